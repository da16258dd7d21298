"""Reads what a caller asks for: the body of `POST /v1/jobs`, a payload, and the headers and parameters beside them.

The payload is sliced out and stays the bytes that came. Nothing here knows what becomes of a job.
"""

import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from inference_worker.gateway.problems import Refusal
from inference_worker.messages import json_mended

T = TypeVar("T")

LONGEST_WAIT_S: Final = 60.0
DEFAULT_TIMEOUT_S: Final = 60.0
LONGEST_KEY: Final = 512
MOST_METADATA_BYTES: Final = 16 * 1024
"""Metadata is kept with the record of a job, for days."""

MOST_FIELD_BYTES: Final = 16 * 1024
"""Of a field beside the payload, as it came. One that is larger is wrong in any case, and is not decoded: out of a list
of millions would become millions of objects, while everybody waits."""

MOST_SEARCHED_BYTES: Final = 1024 * 1024
"""Of a body whose fields are all looked at by name. In a larger one, the first that is not known is named alone."""

MOST_PROBLEMS: Final = 20
"""What is wrong with one body is told up to here: an answer may not be larger than what it answers."""

DEFAULT_PAGE: Final = 20
LARGEST_PAGE: Final = 100
FIELDS: Final = ("payload", "timeout_s", "endpoint", "metadata", "idempotency_key", "webhook")
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f]")
_UNKNOWN: Final = re.compile("Object contains unknown field `(.*)`", re.DOTALL)
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\["\\])*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """What a caller asked for; the payload as the bytes that came."""

    payload: bytes
    timeout_s: float = DEFAULT_TIMEOUT_S
    endpoint: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    key: str | None = None
    """The idempotency key."""
    webhook_url: str | None = None

    def fingerprint(self) -> str:
        """What was asked for, as a digest: the same key with another one is a mistake of the caller."""
        digest = hashlib.sha256(self.payload)
        digest.update(
            b"\0"
            + msgspec.json.encode([self.timeout_s, self.endpoint, self.metadata, self.webhook_url], order="sorted")
        )
        return digest.hexdigest()


CheckWebhook = Callable[[str], str | None]
"""What is wrong with the URL of a webhook, if anything is."""


def read_job(
    body: bytes, endpoints: tuple[str, ...], *, header_key: str | None = None, check_webhook: CheckWebhook
) -> NewJob:
    """Read the body of `POST /v1/jobs`.

    Raises:
        Refusal: with every field that is wrong.
    """
    fields, unknown = _job_fields(body)
    found = _Findings(fields, body)
    job = NewJob(
        payload=found.payload(),
        timeout_s=found.timeout_s(),
        endpoint=found.endpoint(endpoints),
        metadata=found.metadata(),
        key=found.key(header_key),
        webhook_url=found.webhook(check_webhook),
    )
    found.unknown(unknown)
    if found.problems:
        detail = "; ".join(f"{p['pointer']}: {p['detail']}" for p in found.problems)
        raise Refusal(422, "invalid_request", detail, problems=tuple(found.problems))
    return job


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How a payload wants to be answered."""

    stream: bool
    include_usage: bool


def read_payload(body: bytes) -> Wanted:
    """Look at a payload, which is the whole body.

    Raises:
        Refusal: it is no JSON object.
    """
    fields = _object(body, _Payload)
    stream = bytes(fields.stream) == b"true"
    include_usage = False
    if stream and bytes(fields.stream_options):
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            options = msgspec.json.decode(json_mended(bytes(fields.stream_options)), type=_StreamOptions)
            include_usage = bytes(options.include_usage) == b"true"
    return Wanted(stream=stream, include_usage=include_usage)


_ABSENT: Final = msgspec.Raw(b"")


class _Payload(msgspec.Struct):
    """What is looked at in a payload. All else is read over and becomes no object, however much it is."""

    stream: msgspec.Raw = _ABSENT
    stream_options: msgspec.Raw = _ABSENT


class _StreamOptions(msgspec.Struct):
    include_usage: msgspec.Raw = _ABSENT


class _Job(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of `FIELDS`."""

    payload: msgspec.Raw = _ABSENT
    timeout_s: msgspec.Raw = _ABSENT
    endpoint: msgspec.Raw = _ABSENT
    metadata: msgspec.Raw = _ABSENT
    idempotency_key: msgspec.Raw = _ABSENT
    webhook: msgspec.Raw = _ABSENT


class _AnyJob(msgspec.Struct):
    """The same, beside others."""

    payload: msgspec.Raw = _ABSENT
    timeout_s: msgspec.Raw = _ABSENT
    endpoint: msgspec.Raw = _ABSENT
    metadata: msgspec.Raw = _ABSENT
    idempotency_key: msgspec.Raw = _ABSENT
    webhook: msgspec.Raw = _ABSENT


def _job_fields(body: bytes) -> tuple[dict[str, msgspec.Raw], list[str]]:
    """The fields that are there, and the names of those that are not known."""
    unknown: list[str] = []
    try:
        found: _Job | _AnyJob = _object(body, _Job)
    except _UnknownField as exc:
        found, unknown = _object(body, _AnyJob), [exc.name]
        if len(body) <= MOST_SEARCHED_BYTES:
            unknown = [name for name in _object(body, dict[str, msgspec.Raw]) if name not in FIELDS]
    values = ((name, getattr(found, name)) for name in FIELDS)
    return {name: value for name, value in values if bytes(value)}, unknown


class _UnknownField(Exception):
    def __init__(self, name: str) -> None:
        self.name = name


def _object(body: bytes, kind: type[T]) -> T:
    try:
        body.decode()
        return msgspec.json.decode(body, type=kind)
    except UnicodeDecodeError as exc:
        detail = f"The body must be UTF-8: {exc.reason} at byte {exc.start}."
        raise Refusal(400, "invalid_json", detail) from exc
    except msgspec.ValidationError as exc:
        if unknown := _UNKNOWN.fullmatch(str(exc)):
            raise _UnknownField(unknown[1]) from None
        raise Refusal(400, "invalid_json", f"The body must be a JSON object: {exc}.") from exc
    except (msgspec.DecodeError, RecursionError) as exc:
        if (mended := json_mended(body)) != body:
            return _object(mended, kind)
        raise Refusal(400, "invalid_json", f"The body must be JSON: {exc}.") from exc


class _Findings:
    """The fields of a body, and what is wrong with them."""

    def __init__(self, fields: Mapping[str, msgspec.Raw], body: bytes) -> None:
        self._fields = fields
        self._body = body
        self.problems: list[dict[str, str]] = []

    def payload(self) -> bytes:
        raw = bytes(self._fields.get("payload", b""))
        accepted = "a JSON object: the request for the model"
        if not raw:
            self._wrong("payload", "is missing", accepted)
        elif raw[0] != ord("{"):
            # That it is JSON was seen when the body was read: whatever begins like an object is one.
            self._wrong("payload", f"got {_shown(self._decoded('payload', None))}", accepted)
        if raw in self._body:
            return raw
        start = json_mended(self._body).find(
            raw
        )  # An escape of half a character: the bytes that came, not our mending.
        return self._body[start : start + len(raw)]

    def timeout_s(self) -> float:
        value = self._decoded("timeout_s", DEFAULT_TIMEOUT_S)
        if not isinstance(value, bool) and isinstance(value, int | float):
            with contextlib.suppress(OverflowError):
                seconds = float(value)
                if seconds > 0:  # JSON has no infinity, and one too large for a float is not read as a number.
                    return seconds
        self._wrong("timeout_s", f"got {_shown(value)}", "a finite number of seconds above 0")
        return DEFAULT_TIMEOUT_S

    def endpoint(self, endpoints: tuple[str, ...]) -> str | None:
        value = self._decoded("endpoint", None)
        if "endpoint" not in self._fields:
            return None
        if isinstance(value, str) and value in endpoints:
            return value
        self._wrong("endpoint", f"got {_shown(value)}", "one of " + ", ".join(endpoints))
        return None

    def metadata(self) -> dict[str, str]:
        if len(self._fields.get("metadata", b"")) > MOST_METADATA_BYTES:
            self._wrong("metadata", "is too large", f"at most {MOST_METADATA_BYTES} bytes")
            return {}
        value = self._decoded("metadata", {})
        if not (isinstance(value, dict) and all(isinstance(text, str) for text in value.values())):
            self._wrong("metadata", f"got {_shown(value)}", "an object whose values are strings")
            return {}
        return value

    def key(self, from_header: str | None) -> str | None:
        if "idempotency_key" not in self._fields:
            return from_header
        value = self._decoded("idempotency_key", None)
        if not isinstance(value, str) or not _usable_key(value):
            self._wrong("idempotency_key", f"got {_shown(value)}", KEY)
            return None
        if from_header is not None and from_header != value:
            self._wrong("idempotency_key", "is another one than in the header Idempotency-Key", "one of the two")
        return value

    def webhook(self, check: CheckWebhook) -> str | None:
        if "webhook" not in self._fields:
            return None
        value = self._decoded("webhook", None)
        accepted = 'an object with a URL of a public address: {"url": "https://…"}'
        if not (isinstance(value, dict) and value.keys() == {"url"} and isinstance(value["url"], str)):
            self._wrong("webhook", f"got {_shown(value)}", accepted)
            return None
        url: str = value["url"]
        if (wrong := check(url)) is not None:
            self._wrong("webhook", wrong, accepted)
        return url

    def unknown(self, names: list[str]) -> None:
        """A field that is accepted and ignored would be a promise that is not kept."""
        for name in names[:MOST_PROBLEMS]:
            self._wrong(name, "is not known", "the fields " + ", ".join(FIELDS))

    def _decoded(self, name: str, default: object) -> object:
        if name not in self._fields:
            return default
        if len(self._fields[name]) > MOST_FIELD_BYTES:
            return self._fields[name]
        try:
            return msgspec.json.decode(self._fields[name])
        except (msgspec.MsgspecError, RecursionError):
            return self._fields[name]

    def _wrong(self, name: str, detail: str, accepted: str) -> None:
        pointer = "/" + name.replace("~", "~0").replace("/", "~1")
        self.problems.append({"pointer": pointer[:200], "detail": detail, "accepted": accepted})


def _shown(value: object) -> str:
    raw = bytes(value) if isinstance(value, msgspec.Raw) else msgspec.json.encode(value)
    text = raw[: 4 * 61].decode(errors="ignore")  # A character has four bytes at most.
    return text if len(text) <= 60 else f"{text[:60]}…"


# ---------------------------------------------------------------- headers and parameters

KEY: Final = f"1 to {LONGEST_KEY} characters, none of them a control character"


def _usable_key(key: str) -> bool:
    return 0 < len(key) <= LONGEST_KEY and _CONTROL.search(key) is None


def read_key(header: str | None) -> str | None:
    """The idempotency key of the header `Idempotency-Key`: a quoted string, as its draft wants it, or a bare one.

    Raises:
        Refusal: it is no usable key.
    """
    if header is None:
        return None
    text = header.strip()
    quoted = _QUOTED.fullmatch(text)
    key = re.sub(r"\\(.)", r"\1", quoted[1]) if quoted is not None else text
    if not _usable_key(key) or (quoted is None and text.startswith('"')):
        raise Refusal(422, "invalid_request", f"The header Idempotency-Key must have {KEY}.")
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """What the header `Prefer` asks for, as far as it is known here (RFC 7240)."""

    respond_async: bool = False
    wait_s: float | None = None


def read_prefer(header: str | None) -> Preference:
    """Read the header; what is not understood is ignored, as its standard demands."""
    respond_async, wait_s = False, None
    for part in (header or "").split(","):
        name, _, value = part.partition(";")[0].partition("=")
        match name.strip().lower():
            case "respond-async":
                respond_async = True
            case "wait":
                digits = value.strip().strip('"')
                wait_s = float(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else wait_s
    return Preference(respond_async=respond_async, wait_s=wait_s)


def read_wait(given: str | None) -> float:
    """The seconds of `?wait=`, cut to the longest wait.

    Raises:
        Refusal: it is no number.
    """
    try:
        seconds = 0.0 if given is None else float(given)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        detail = f"wait must be a number of seconds, 0 or more (cut to {LONGEST_WAIT_S:g}), got {_shown(given)}."
        raise Refusal(422, "invalid_request", detail)
    return min(seconds, LONGEST_WAIT_S)


def read_limit(given: str | None) -> int:
    """The number of `?limit=`.

    Raises:
        Refusal: it is none.
    """
    if given is None:
        return DEFAULT_PAGE
    if given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= LARGEST_PAGE and len(given) < 9:
        return int(given)
    detail = f"limit must be a whole number from 1 to {LARGEST_PAGE}, got {_shown(given)}."
    raise Refusal(422, "invalid_request", detail)
