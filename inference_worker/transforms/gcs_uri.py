"""`gcs_uri_multipart`: a form with the signed address of an object, for servers that fetch it themselves.

It acts where the metadata `provider` is one of its own and the payload has a `gcs_uri`. A request whose address expires
before its deadline is refused at once: trying could not help. Not here: files inside a message (`multipart`).
"""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final
from urllib.parse import parse_qs, urlsplit

from inference_worker.messages import InferenceRequest
from inference_worker.transforms.chain import Body, Unfit
from inference_worker.transforms.forms import form
from inference_worker.transforms.members import members_of, text_of

PROVIDER: Final = "provider"
"""The metadata that says whose a request is."""

ADDRESS: Final = "gcs_uri"
INLINE: Final = "file_base64"
FIELD: Final = "url"
_WHOLE: Final = re.compile(r"[+-]?\d{1,18}", re.ASCII)


class GcsUriMultipart:
    """See `BodyTransform`."""

    def __init__(self, providers: Iterable[str]) -> None:
        self._providers = frozenset(providers)

    def validate(self, request: InferenceRequest) -> Unfit | None:
        """An address that expires too early, or a file besides the address."""
        if request.metadata.get(PROVIDER) not in self._providers:
            return None
        members = members_of(request.payload)
        if members is None:
            return Unfit("the payload is no JSON object")
        address = text_of(members.get(ADDRESS))
        if not address:
            return None
        if text_of(members.get(INLINE)):
            return Unfit(f"{INLINE} is not accepted beside {ADDRESS}")
        expires = expiry(address)
        if expires is not None and expires <= request.deadline:
            early = _shown(expires)
            return Unfit(f"{ADDRESS} expires {early}, not after the request's deadline {_shown(request.deadline)}")
        return None

    def apply(self, request: InferenceRequest) -> Body | Unfit | None:
        """The form: the address as `url`, the other members as fields."""
        if request.metadata.get(PROVIDER) not in self._providers:
            return None
        members = members_of(request.payload) or {}
        address = text_of(members.get(ADDRESS))
        if not address:
            return None
        # A `url` of the caller's own would stand beside the one that was looked at.
        rest = ((name, plain(raw)) for name, raw in members.items() if name not in (ADDRESS, INLINE, FIELD))
        return form([(FIELD, address.encode()), *rest])


def plain(raw: bytes) -> bytes:
    """A member as a field's value: a text without its quotes, null as an empty one, anything else as JSON."""
    text = text_of(raw)
    return text.encode() if text is not None else b"" if raw == b"null" else raw


def expiry(address: str) -> float | None:
    """Unix seconds at which a signed address ends, by V4 or V2 of Google's signing; None where it does not say."""
    try:
        asked = {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}
    except ValueError:
        return None
    date, lasts_s = asked.get("X-Goog-Date"), asked.get("X-Goog-Expires")
    if date and lasts_s:
        if not _WHOLE.fullmatch(lasts_s):
            return None
        try:
            return datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp() + int(lasts_s)
        except ValueError:
            return None
    until = asked.get("Expires", "")
    return float(until) if _WHOLE.fullmatch(until) else None


def _shown(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime("at %Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"at {at:g}"
