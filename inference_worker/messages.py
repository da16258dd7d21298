"""What a requester writes and what a requester gets, as values and as bytes.

Payload and result are sliced out of the bytes and put back, never decoded and encoded again: they are not ours to
change. Nothing here knows of a broker, a store or a model.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

import msgspec

from inference_worker.errors import MalformedRequest

CHAT_COMPLETIONS: Final = "/v1/chat/completions"
ENDPOINTS: Final = (CHAT_COMPLETIONS, "/v1/completions", "/v1/embeddings")
"""The paths that a request may name for itself, besides the configured one."""

CLOCK_SKEW_S: Final = 60.0
"""How far ahead of our clock a producer's may be before its `received_at` is not believed."""

LONGEST_TIMEOUT_S: Final = 30 * 86_400.0
LONGEST_REQUEST_ID_BYTES: Final = 512
MOST_TOKENS: Final = 2**53
"""A larger count is none: no answer has so many, and no receiver of ours could be sure of reading it."""

_HALF_CHARACTER: Final = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
"""What both branches begin with stands before them: so the search goes from one backslash to the next, and a text of
16 MiB with one of them takes 5 ms instead of 200."""

MOST_HALVES: Final = 100_000
"""A text with more escapes of surrogates is not mended: looking at each takes time in which nothing else is done."""
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f]")

Status = Literal["completed", "failed"]
ErrorCode = Literal[
    "invalid_request",
    "expired",
    "deadline_exceeded",
    "cancelled",
    "model_error",
    "bad_response",
    "retries_exhausted",
    "poison",
    "gate_dropped",
    "gate_error",
    "payload_unavailable",
]
ERROR_CODES: Final[tuple[ErrorCode, ...]] = (
    "invalid_request",
    "expired",
    "deadline_exceeded",
    "cancelled",
    "model_error",
    "bad_response",
    "retries_exhausted",
    "poison",
    "gate_dropped",
    "gate_error",
    "payload_unavailable",
)
DEAD_LETTERED: Final = frozenset({"retries_exhausted", "poison"})
"""The failures whose message belongs into the dead letters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """One request, as its producer wrote it."""

    request_id: str
    received_at: float
    """Unix seconds, by the producer's clock."""
    timeout_s: float
    deadline: float
    """Unix seconds after which nobody waits for the answer."""
    payload: bytes
    """The JSON object for the model, as the bytes that came (a streamed one asks for its usage, too)."""
    endpoint: str
    stream: bool
    tenant: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    """For the model, as the caller named them; none in our own format."""
    model: str = ""
    """What the caller says of the model, for traces, so that nobody reads the payload for it; mostly empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens that one answer used."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    cached_input_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time went, in seconds; None where it is not known."""

    queue_s: float | None = None
    model_s: float | None = None
    ttft_s: float | None = None
    """To the first token."""
    tbt_s: float | None = None
    """Between two tokens, on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A terminal result. `result` is raw JSON; None with `error` unset stands for JSON null."""

    request_id: str
    status: Status
    status_code: int
    attempt: int
    """0 for the first."""
    replica_id: str
    finished_at: float
    result: bytes | None = None
    error: str | None = None
    error_code: ErrorCode | None = None
    received_at: float | None = None
    timings: Timings = field(default_factory=Timings)
    answer: bytes | None = None
    """The model's whole answer where it was a failure, for formats that hand it on; not stored in ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownReply:
    """What one needs to know of a terminal result that was there before us."""

    status: Status
    status_code: int
    attempt: int = 0
    error_code: str | None = None


def usable_id(value: object) -> bool:
    """Whether `value` can name a request: 1 to 512 bytes of UTF-8 without control characters."""
    if not isinstance(value, str) or not value:
        return False
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError:  # A lone surrogate.
        return False
    return size_bytes <= LONGEST_REQUEST_ID_BYTES and _CONTROL.search(value) is None


def decode(body: bytes, *, message_id: str | None, infer_path: str, now: float) -> InferenceRequest:
    """Read a message's body.

    Raises:
        MalformedRequest: with the field that is wrong, what came and what is accepted.
    """
    if (request := _plain(body, infer_path, now)) is not None:
        return request
    fallback = message_id if usable_id(message_id) else None
    fields = _object(body, "the message", fallback)
    request_id = _decoded(fields.get("request_id"))
    # A mended id is not the one that was sent: two requests could share it.
    if not isinstance(request_id, str) or not usable_id(request_id) or _id_was_mended(request_id, body):
        raise MalformedRequest(
            "request_id must be a string of 1 to 512 bytes of UTF-8 without control characters", fallback
        )
    received_at = _number(fields, "received_at", request_id)
    timeout_s = _number(fields, "timeout_s", request_id)
    if timeout_s <= 0:
        raise MalformedRequest(f"timeout_s must be above 0, got {timeout_s:g}", request_id)
    if "payload" not in fields:
        raise MalformedRequest("payload is missing: a JSON object is expected", request_id)
    payload = as_it_came(bytes(fields["payload"]), body)
    parts = _object(payload, "payload", request_id)
    stream = bytes(parts.get("stream", b"")) == b"true"
    return InferenceRequest(
        request_id=request_id,
        received_at=received_at,
        timeout_s=timeout_s,
        deadline=_deadline(received_at, timeout_s, now),
        payload=_with_usage(payload, parts) if stream else payload,
        endpoint=_endpoint(fields, infer_path, request_id),
        stream=stream,
        tenant=_tenant(fields, request_id),
        metadata=_metadata(fields, request_id),
    )


def encode_request(
    *,
    request_id: str,
    received_at: float,
    timeout_s: float,
    payload: bytes,
    endpoint: str | None = None,
    metadata: dict[str, str] | None = None,
    tenant: str | None = None,
) -> bytes:
    """Write a message's body, as a producer does."""
    body: dict[str, object] = {
        "request_id": request_id,
        "received_at": received_at,
        "timeout_s": timeout_s,
        "payload": msgspec.Raw(payload),
    }
    if endpoint is not None:
        body["endpoint"] = endpoint
    if metadata:
        body["metadata"] = metadata
    if tenant is not None:
        body["tenant"] = tenant
    return msgspec.json.encode(body)


def encode_reply(reply: Reply) -> bytes:
    """Write a terminal result: the keys of the first source first, ours after them."""
    body: dict[str, object] = {"status": reply.status, "status_code": reply.status_code}
    if reply.status == "completed":
        body["result"] = msgspec.Raw(b"null" if reply.result is None else reply.result)
    else:
        body["error"] = reply.error or ""
    body["request_id"] = reply.request_id
    body["attempt"] = reply.attempt
    body["replica_id"] = reply.replica_id
    if reply.received_at is not None:
        body["received_at"] = reply.received_at
    body["finished_at"] = reply.finished_at
    body["timings"] = {
        name: round(value, 6)
        for name in ("queue_s", "model_s", "ttft_s", "tbt_s")
        if (value := getattr(reply.timings, name)) is not None
    }
    if reply.error_code is not None:
        body["error_code"] = reply.error_code
    return msgspec.json.encode(body)


def request_id_in(body: bytes, *, message_id: str | None, now: float) -> str | None:
    """The id under which the result of a message lies, also of one that is no request; None where it has none."""
    try:
        return decode(body, message_id=message_id, infer_path="/", now=now).request_id
    except MalformedRequest as exc:
        return exc.request_id


def shown_id(request_id: str) -> str:
    """A request's id as people and other systems are told it.

    What tells submissions of one id apart stands behind a NUL, which few of them can store.
    """
    return request_id.replace("\0", "/")


def public_id(request_id: str) -> str:
    """The id alone, as its requester has given it."""
    return request_id.partition("\0")[0]


def known_reply(stored: bytes) -> KnownReply:
    """Read of a stored result what `KnownReply` says; a foreign or damaged one counts as what it looks like."""
    try:
        seen = msgspec.json.decode(stored, type=_Stored)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return KnownReply(
            status="completed" if stored.startswith(b'{"status":"completed"') else "failed", status_code=0
        )
    return KnownReply(
        status="completed" if seen.status == "completed" else "failed",
        status_code=seen.status_code,
        attempt=seen.attempt,
        error_code=seen.error_code,
    )


def answer_of(body: bytes) -> tuple[bool, Usage | None]:
    """Whether an answer is one complete JSON text, and the tokens that it says it used; mostly in one pass."""
    try:
        body.decode()
        usage = _usage_decoder.decode(body).usage
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return whole_json(body), usage_of(body)
    return True, _counted(usage)


def whole_json(body: bytes) -> bool:
    """Whether `body` is one complete JSON text in UTF-8."""
    try:
        body.decode()
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        mended = json_mended(body)
        return mended != body and whole_json(mended)
    except UnicodeDecodeError:
        return False
    return True


def usage_of(result: bytes) -> Usage | None:
    """The tokens that an OpenAI-shaped answer says it used, or None where it says none."""
    try:
        return _counted(_usage_decoder.decode(result).usage)
    except msgspec.ValidationError:
        return _counted(_odd_usage(json_mended(result)))
    except (msgspec.DecodeError, RecursionError):
        mended = json_mended(result)
        return usage_of(mended) if mended != result else None
    except UnicodeDecodeError:
        return None


def _odd_usage(result: bytes) -> "_Usage | None":
    """The counts that can be read where something about them is odd: whole numbers written as 12.0, details of none."""
    try:
        found = msgspec.json.decode(result, type=dict[str, msgspec.Raw])
        fields = msgspec.json.decode(found.get("usage", b"null"), type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    counts = {name: _count(fields.get(name)) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    try:
        details = msgspec.json.decode(fields.get("prompt_tokens_details", b"{}"), type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        details = {}
    return _Usage(**counts, prompt_tokens_details=_TokenDetails(cached_tokens=_count(details.get("cached_tokens"))))


def _count(raw: msgspec.Raw | None) -> int | None:
    value = _decoded(raw)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if value <= MOST_TOKENS and value == int(value) else None


def _counted(usage: "_Usage | None") -> Usage | None:
    if usage is None:
        return None
    prompt, completion = max(usage.prompt_tokens or 0, 0), max(usage.completion_tokens or 0, 0)
    total = max(usage.total_tokens or 0, prompt + completion)
    if total == 0:
        return None
    details = usage.prompt_tokens_details
    cached = max(details.cached_tokens or 0, 0) if details is not None else 0
    return Usage(input_tokens=prompt, output_tokens=completion, total_tokens=total, cached_input_tokens=cached)


def error_text(body: bytes, reason: str) -> str:
    """What a failed answer says for itself.

    `error.message`, else `message`, else `detail`, else the first 1,000 characters of the body, else the reason phrase.
    """
    try:
        said = msgspec.json.decode(json_mended(body))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        said = None
    if isinstance(said, dict):
        error = said.get("error")
        nested = error.get("message") if isinstance(error, dict) else error
        for text in (nested, said.get("message"), said.get("detail")):
            if isinstance(text, str) and text:
                return text
        if isinstance(said.get("detail"), list):
            return msgspec.json.encode(said["detail"]).decode()[:1000]
    return body.decode(errors="replace").strip()[:1000] or reason


class _Stored(msgspec.Struct):
    status: str
    status_code: int = 0
    attempt: int = 0
    error_code: str | None = None


_Tokens = Annotated[int, msgspec.Meta(le=MOST_TOKENS)]


class _TokenDetails(msgspec.Struct):
    cached_tokens: _Tokens | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    total_tokens: _Tokens | None = None
    prompt_tokens_details: _TokenDetails | None = None


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None


_usage_decoder = msgspec.json.Decoder(_WithUsage)


class _Envelope(msgspec.Struct):
    request_id: str
    received_at: float
    timeout_s: float
    payload: msgspec.Raw
    endpoint: str | msgspec.UnsetType = msgspec.UNSET
    tenant: str | msgspec.UnsetType = msgspec.UNSET
    metadata: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class _Head(msgspec.Struct):
    """What we look at in a payload."""

    stream: msgspec.Raw = msgspec.Raw(b"false")


_envelope = msgspec.json.Decoder(_Envelope)
_head = msgspec.json.Decoder(_Head)


def _plain(body: bytes, infer_path: str, now: float) -> InferenceRequest | None:
    """Read a message in which everything is as it should be, in one go; None: look closer, something is not."""
    try:
        body.decode()
        envelope = _envelope.decode(body)
        payload = bytes(envelope.payload)
        stream = bytes(_head.decode(payload).stream)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    endpoint = infer_path if envelope.endpoint is msgspec.UNSET else envelope.endpoint
    if (
        stream == b"true"
        or envelope.timeout_s <= 0
        or not (endpoint == infer_path or endpoint in ENDPOINTS)
        or not usable_id(envelope.request_id)
    ):
        return None
    return InferenceRequest(
        request_id=envelope.request_id,
        received_at=envelope.received_at,
        timeout_s=envelope.timeout_s,
        deadline=_deadline(envelope.received_at, envelope.timeout_s, now),
        payload=payload,
        endpoint=endpoint,
        stream=False,
        tenant=None if envelope.tenant is msgspec.UNSET else envelope.tenant,
        metadata={} if envelope.metadata is msgspec.UNSET else envelope.metadata,
    )


def _deadline(received_at: float, timeout_s: float, now: float) -> float:
    return min(received_at, now + CLOCK_SKEW_S) + min(timeout_s, LONGEST_TIMEOUT_S)


def _object(body: bytes, what: str, request_id: str | None) -> dict[str, msgspec.Raw]:
    try:
        body.decode()
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UnicodeDecodeError as exc:
        raise MalformedRequest(f"{what} must be UTF-8: {exc.reason} at byte {exc.start}", request_id) from exc
    except msgspec.ValidationError as exc:
        raise MalformedRequest(f"{what} must be a JSON object: {exc}", request_id) from exc
    except (msgspec.DecodeError, RecursionError) as exc:
        if (mended := json_mended(body)) != body:
            return _object(mended, what, request_id)
        raise MalformedRequest(f"{what} must be JSON: {exc}", request_id) from exc


def json_mended(body: bytes) -> bytes:
    """The same text with escapes of half a character in the place of a whole one: legal JSON that our parser refuses.

    Browsers write them when a string is cut in the middle of an emoji. The length stays, and so does every other byte.
    """
    if b"\\" not in body or not 0 < body.count(b"\\ud") + body.count(b"\\uD") <= MOST_HALVES:
        return body  # The first look is the quick one: a large text without any escape is not counted through.
    return _HALF_CHARACTER.sub(b"\\\\ufffd", body)


def _id_was_mended(request_id: str, body: bytes) -> bool:
    return "\ufffd" in request_id and json_mended(body) != body


def as_it_came(part: bytes, body: bytes) -> bytes:
    """A slice of a text that had to be mended, as it was before."""
    if part in body:
        return part
    start = json_mended(body).find(part)
    return body[start : start + len(part)]


def _decoded(raw: msgspec.Raw | None) -> object:
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def _number(fields: dict[str, msgspec.Raw], name: str, request_id: str) -> float:
    value = _decoded(fields.get(name))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedRequest(f"{name} must be a finite number of seconds", request_id)
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise MalformedRequest(f"{name} must be a finite number of seconds", request_id)
    return seconds


def _endpoint(fields: dict[str, msgspec.Raw], infer_path: str, request_id: str) -> str:
    if "endpoint" not in fields:
        return infer_path
    endpoint = _decoded(fields["endpoint"])
    accepted = (infer_path, *(path for path in ENDPOINTS if path != infer_path))
    if endpoint not in accepted:
        raise MalformedRequest(f"endpoint must be one of {', '.join(accepted)}", request_id)
    return str(endpoint)


def _tenant(fields: dict[str, msgspec.Raw], request_id: str) -> str | None:
    if "tenant" not in fields:
        return None
    tenant = _decoded(fields["tenant"])
    if not isinstance(tenant, str):
        raise MalformedRequest("tenant must be a string; leave it out where there is none", request_id)
    return tenant


def _metadata(fields: dict[str, msgspec.Raw], request_id: str) -> dict[str, str]:
    if "metadata" not in fields:
        return {}
    metadata = _decoded(fields["metadata"])
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise MalformedRequest("metadata must be an object whose values are strings", request_id)
    return metadata


def _with_usage(payload: bytes, parts: dict[str, msgspec.Raw]) -> bytes:
    """A streamed request that does not say whether it wants its usage gets asked for it: we bill by it."""
    try:
        options = msgspec.json.decode(parts.get("stream_options", b"null"), type=dict[str, msgspec.Raw] | None) or {}
    except msgspec.MsgspecError:
        return payload  # Not an object: the model will say so better than we.
    if "include_usage" in options:
        return payload
    if "stream_options" not in parts:
        return payload.rstrip()[:-1] + b',"stream_options":{"include_usage":true}}'
    options["include_usage"] = msgspec.Raw(b"true")
    return msgspec.json.encode({**parts, "stream_options": options})
