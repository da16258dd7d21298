"""What goes along with a request: its target, and the headers that tell a gateway whose it is and how it ranks. Pure.

A caller's headers come between: they replace nothing that the operator has configured, in any letter case.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from inference_worker.lanes import LANES

OBJECTIVE_HEADER: Final = "x-llm-d-inference-objective"
OLD_OBJECTIVE_HEADER: Final = "x-gateway-inference-objective"
FAIRNESS_HEADER: Final = "x-llm-d-inference-fairness-id"
FAIRNESS_ATTRIBUTE: Final = "userid"
MOST_FAIRNESS_BYTES: Final = 256

NOT_THE_CALLERS: Final = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers of the connection, not of the request: with them, a caller could pass two requests off as one."""

_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NOT_IN_A_VALUE: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamps:
    """Which headers are stamped. An empty name switches one off."""

    objective_header: str = OBJECTIVE_HEADER
    lane_objectives: Mapping[str, str] = field(default_factory=dict)
    """By the name of the lane; a lane without one keeps its queue's objective."""
    priority_header: str = ""
    """Gets the number of the lane, 0 to 5, lower first."""
    fairness_header: str = FAIRNESS_HEADER
    fairness_attribute: str = FAIRNESS_ATTRIBUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamped:
    """The headers of one request."""

    headers: dict[str, str]
    skipped: tuple[str, ...]
    """Names of the caller's headers that are not sent: they cannot be written, or are not for callers to set."""


def stamped(
    stamps: Stamps,
    *,
    lane: int,
    objective: str | None,
    given: Mapping[str, str],
    metadata: Mapping[str, str],
    tenant: str | None = None,
) -> Stamped:
    """The headers of a request in a lane, of a queue with an `objective`, whose caller has `given` some.

    `tenant` is who the caller has proven to be; where it is not known, the fairness id is what the metadata claim.
    """
    ours = _stamps(stamps, lane, objective, metadata, tenant)
    reserved = {name.lower() for name in _names(stamps, objective)} | NOT_THE_CALLERS
    kept: dict[str, str] = {}
    skipped: list[str] = []
    for name, value in given.items():
        if name.lower() in reserved or not legal_name(name) or not legal_value(value):
            skipped.append(name)
        else:
            kept[name] = value
    return Stamped(headers=kept | ours, skipped=tuple(skipped))


def _stamps(
    stamps: Stamps, lane: int, objective: str | None, metadata: Mapping[str, str], tenant: str | None
) -> dict[str, str]:
    values = {
        stamps.objective_header: stamps.lane_objectives.get(LANES[lane]) or objective or "",
        stamps.priority_header: str(lane),
        stamps.fairness_header: _fairness_id(tenant or metadata.get(stamps.fairness_attribute, "")),
    }
    return {name: value for name, value in values.items() if name and value and legal_value(value)}


def _names(stamps: Stamps, objective: str | None) -> Iterable[str]:
    """What a caller may not set. Where the operator ranks nothing by objectives, there is none to forge."""
    yield from (stamps.priority_header, stamps.fairness_header)
    if objective or stamps.lane_objectives:
        yield from (stamps.objective_header, OBJECTIVE_HEADER, OLD_OBJECTIVE_HEADER)


def _fairness_id(identity: str) -> str:
    """Empty where it cannot be a header, or is too long for one."""
    if not legal_value(identity) or len(identity.encode()) > MOST_FAIRNESS_BYTES:
        return ""
    return identity


def overlaid(headers: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """`headers`, with `ours` in place of those of the same name in any letter case."""
    names = {name.lower() for name in ours}
    return {name: value for name, value in headers.items() if name.lower() not in names} | dict(ours)


def legal_name(name: str) -> bool:
    """Whether HTTP can have a header of this name."""
    return _NAME.fullmatch(name) is not None


def legal_value(value: str) -> bool:
    """Whether a header can have this value: no line ends, no control characters, and it can be written as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return _NOT_IN_A_VALUE.search(value) is None


def target(base_url: str, path: str, endpoint: str | None = None) -> str:
    """Where a request goes: below `base_url`, at its own `endpoint`, else at its queue's `path`, joined by one slash.

    An endpoint changes neither the host nor the base path: it is only ever a path, and `..` ends at the base.
    """
    base = urlsplit(base_url)
    whole = endpoint or path
    parts: list[str] = []
    for part in whole.split("/"):
        plain = unquote(part)
        if plain == "..":
            del parts[-1:]
        elif plain not in ("", ".") and ".." not in re.split(r"[/\\]", plain):
            # What is escaped already stays so; a way up that hides in it is left out.
            parts.append(quote(part, safe="%:@!$&'()*+,;=~", errors="replace"))
    slash = "/" if whole.endswith("/") and parts else ""
    joined = f"{base.path.rstrip('/')}/{'/'.join(parts)}{slash}" if parts else base.path
    return urlunsplit((base.scheme, base.netloc, joined, base.query, ""))
