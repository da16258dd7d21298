"""Requests as llm-d-async writes them into Redis: the public request, and the envelope around it. Pure.

An envelope is `{"internal": {…}, "request_kind": "…", "data": {…}}`: what the system notes for itself, and the caller's
request. Only `internal` is ever written anew. The request passes as the bytes that came, payload and unknown fields
included, and so do fields of `internal` that another version has put there.

Not here: results (`llmd_results`), Redis keys, what of a caller's headers and endpoint may be used (`stamping`), and
our own format, which is only told apart.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeVar

import msgspec

from inference_worker.errors import MalformedRequest
from inference_worker.messages import (
    CLOCK_SKEW_S,
    LONGEST_TIMEOUT_S,
    InferenceRequest,
    as_it_came,
    json_mended,
    usable_id,
)

RequestKind = Literal["plain", "redis", "pubsub"]
REQUEST_KINDS: Final[tuple[RequestKind, ...]] = ("plain", "redis", "pubsub")

SCORE_HORIZON_MS: Final = 2**17 * 1000
"""36 hours before the deadline: within them the time of the submission orders requests of one deadline."""
SCORE_STEPS: Final = 2**21
"""Of a second of the score, 62.5 ms of submission time each; a float64 holds them beside a whole Unix time."""
LATEST_DEADLINE: Final = 2**63 - 1
LONGEST_TTL_S: Final = 366 * 86_400
MOST_ATTEMPTS: Final = 2**31 - 1
"""A larger count is taken for this one: stores keep four bytes of it."""

"""Of a list of results, as documents may have it: Redis refuses what is beyond its own clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicRequest:
    """What a caller writes. An empty text stands for a field that is not there."""

    id: str
    created: int = 0
    """Unix seconds; 0 where it does not say."""
    deadline: int
    """Unix seconds, above 0."""
    payload: bytes | None = None
    """Raw JSON for the model; None where it lies elsewhere, see `Routing.payload_ref`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    endpoint: str = ""
    model: str = ""
    request_queue_name: str = ""
    """Kind `redis`: the caller's choice of a queue, which producers copy into `Routing`."""
    result_queue_name: str = ""
    pubsub_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What the system notes of a request. Empty fields are not written."""

    retry_count: int = 0
    """Failed attempts that lie behind it; refusals of gates do not count."""
    queue_id: str = ""
    """Of the configured queue that it was taken from."""
    request_token: str = ""
    """Of this submission: an id may be used again, and then stands for two generations."""
    request_queue_name: str = ""
    result_queue_name: str = ""
    result_ttl_seconds: int = 0
    result_routing_resolved: bool = False
    """The two fields before are final: a change of the configuration does not move the result any more."""
    transport_correlation_id: str = ""
    enqueued_at_ms: int = 0
    """Unix milliseconds of the submission; 0 where the producer is an old one."""
    labels: Mapping[str, str] = field(default_factory=dict)
    payload_ref: str = ""
    """The key under which the payload lies, where it is stored apart."""
    others: Mapping[str, bytes] = field(default_factory=dict)
    """Fields of other versions, as raw JSON, which are put back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """One request on its way."""

    kind: RequestKind
    routing: Routing
    request: PublicRequest
    data: bytes
    """`request` as the JSON that came."""

    @property
    def generation(self) -> str:
        """What tells this submission from another one under the same id: claims and results go by it."""
        return generation_of(self.request.id, self.routing.request_token)

    @property
    def score(self) -> float:
        """Its place in the queue, the same however often it comes back."""
        return queue_score(self.request.deadline, self.routing.enqueued_at_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMessage:
    """A member that is a message in our own format: `messages.decode` reads it."""

    body: bytes


Member = Envelope | OwnMessage


def generation_of(request_id: str, token: str) -> str:
    """The id, NUL and the token; the id alone where there is no token."""
    return f"{request_id}\0{token}" if token else request_id


def queue_score(deadline: int, enqueued_at_ms: int) -> float:
    """Earliest deadline first, and of one deadline in the order of submission. Whole seconds for old producers."""
    if enqueued_at_ms <= 0:
        return float(deadline)
    offset = enqueued_at_ms - (deadline * 1000 - SCORE_HORIZON_MS)
    step = min(max(offset, 0), SCORE_HORIZON_MS - 1) * SCORE_STEPS // SCORE_HORIZON_MS
    return deadline + step / SCORE_STEPS


def read_member(member: bytes) -> Member:
    """Read a member of a queue.

    Raises:
        MalformedRequest: with the field that is wrong, and the id where one can be read.
    """
    wire = _read(member, _wires, "the member")
    data = b"" if wire.data is msgspec.UNSET else _slice(bytes(wire.data), member)
    if wire.request_kind is msgspec.UNSET and wire.request_id is not msgspec.UNSET and not data:
        return OwnMessage(body=member)
    kind = _kind(wire.request_kind, data or member)
    if data in (b"", b"null"):
        raise MalformedRequest("data is missing: the request is expected there, as a JSON object", _id_in(member))
    routing = _routing(_slice(bytes(wire.internal), member), data)
    return Envelope(kind=kind, routing=routing, request=_public(data, routing), data=data)


def read_bare(body: bytes) -> Member:
    """Read a public request that has no envelope around it, as it travels over Pub/Sub.

    Raises:
        MalformedRequest: with the field that is wrong, and the id where one can be read.
    """
    parts = _read(body, _fields, "the message")
    if "request_id" in parts and "id" not in parts:
        return OwnMessage(body=body)
    return Envelope(kind="pubsub", routing=Routing(), request=_public(body, Routing()), data=body)


def write_envelope(envelope: Envelope) -> bytes:
    """The member for a queue. The request is written as it came."""
    routing = envelope.routing
    internal: dict[str, object] = {name: value for name in _ROUTED if (value := getattr(routing, name))}
    internal.update({name: msgspec.Raw(raw) for name, raw in routing.others.items()})
    return msgspec.json.encode(
        {"internal": internal, "request_kind": envelope.kind, "data": msgspec.Raw(envelope.data)}
    )


def new_envelope(request: PublicRequest, routing: Routing, kind: RequestKind = "redis") -> Envelope:
    """An envelope for a request that nobody has written yet; without its payload where `payload_ref` names one."""
    payload = b"null" if request.payload is None or routing.payload_ref else request.payload
    data: dict[str, object] = {"id": request.id, "created": request.created, "deadline": request.deadline}
    data["payload"] = msgspec.Raw(payload)
    data.update({name: value for name in _OPTIONAL if (value := getattr(request, name))})
    return Envelope(kind=kind, routing=routing, request=request, data=msgspec.json.encode(data))


def from_request(request: InferenceRequest, routing: Routing, kind: RequestKind = "redis") -> Envelope:
    """A request of ours in an envelope. Its deadline is rounded up to whole seconds, which is all the format has."""
    public = PublicRequest(
        id=request.request_id,
        created=int(request.received_at),
        deadline=math.ceil(request.deadline),
        payload=request.payload,
        metadata=request.metadata,
        headers=request.headers,
        endpoint=request.endpoint,
        model=request.model,
    )
    return new_envelope(public, routing, kind)


def to_request(envelope: Envelope, *, path: str, now: float) -> InferenceRequest:
    """The request as the engine takes it, named by its generation. `path` is the queue's.

    The payload is the caller's, byte for byte: where it asks for a stream, nothing is added to it.

    Raises:
        MalformedRequest: the payload is stored apart and was not fetched.
    """
    request, routing = envelope.request, envelope.routing
    if request.payload is None:
        raise MalformedRequest("the payload is stored apart and has not been fetched", request.id)
    received_at = routing.enqueued_at_ms / 1000 if routing.enqueued_at_ms > 0 else float(request.created)
    received_at = min(received_at, now + CLOCK_SKEW_S) if received_at > 0 else now
    deadline = min(float(request.deadline), now + LONGEST_TIMEOUT_S)
    return InferenceRequest(
        request_id=envelope.generation,
        received_at=received_at,
        timeout_s=max(deadline - received_at, 0.0),
        deadline=deadline,
        payload=request.payload,
        endpoint=request.endpoint or path,
        stream=_streams(request.payload),
        metadata=dict(request.metadata),
        headers=dict(request.headers),
        model=request.model,
    )


def retried(envelope: Envelope) -> Envelope:
    """The same with one failed attempt more behind it."""
    return replace(envelope, routing=replace(envelope.routing, retry_count=envelope.routing.retry_count + 1))


def routed(
    envelope: Envelope,
    *,
    queue_id: str,
    queue_name: str,
    result_queue_name: str,
    default_result_queue_name: str,
    result_ttl_seconds: int,
    labels: Mapping[str, str],
) -> Envelope:
    """What the queue says of a request that is taken from it, noted in its envelope.

    Where the result goes is said once: by the queue, else by the message, else by default. A request that is on its
    way already keeps its route, whatever the configuration has become. A retry comes back to the queue that it was
    taken from, whatever the message says: another key may be no queue, or one that nobody serves.
    """
    routing = envelope.routing
    if not (routing.result_routing_resolved and routing.result_queue_name):
        asked = routing.result_queue_name or envelope.request.result_queue_name
        routing = replace(
            routing,
            result_queue_name=result_queue_name or asked or default_result_queue_name,
            result_ttl_seconds=result_ttl_seconds or routing.result_ttl_seconds,
            result_routing_resolved=True,
        )
    return replace(
        envelope,
        routing=replace(
            routing,
            queue_id=queue_id,
            request_queue_name=queue_name,
            labels={**routing.labels, **labels},
        ),
    )


def without_payload(envelope: Envelope, payload_ref: str) -> tuple[Envelope, bytes]:
    """Split what is to be stored apart: the envelope, which names `payload_ref`, and the payload's bytes."""
    parts = _read(envelope.data, _fields, "data")
    payload = b"null" if envelope.request.payload is None else envelope.request.payload
    bare = {name: msgspec.Raw(_slice(bytes(raw), envelope.data)) for name, raw in parts.items()}
    bare["payload"] = msgspec.Raw(b"null")
    return (
        replace(
            envelope,
            routing=replace(envelope.routing, payload_ref=payload_ref),
            request=replace(envelope.request, payload=None),
            data=msgspec.json.encode(bare),
        ),
        payload,
    )


def with_payload(envelope: Envelope, payload: bytes) -> Envelope:
    """The request with the payload that was stored apart. What is written into a queue stays without it."""
    return replace(envelope, request=replace(envelope.request, payload=payload))


# ---------------------------------------------------------------- reading


class _Wire(msgspec.Struct):
    internal: msgspec.Raw = msgspec.Raw(b"{}")
    request_kind: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    request_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Not theirs: our own format begins with it."""


class _Data(msgspec.Struct):
    id: str | None = None
    created: int | None = None
    deadline: int | None = None
    payload: msgspec.Raw = msgspec.Raw(b"null")
    metadata: dict[str, str] | None = None
    headers: dict[str, str] | None = None
    endpoint: str | None = None
    model: str | None = None
    request_queue_name: str | None = None
    result_queue_name: str | None = None
    pubsub_id: str | None = None


class _Internal(msgspec.Struct):
    retry_count: int | None = None
    queue_id: str | None = None
    request_token: str | None = None
    request_queue_name: str | None = None
    result_queue_name: str | None = None
    result_ttl_seconds: int | None = None
    result_routing_resolved: bool | None = None
    transport_correlation_id: str | None = None
    enqueued_at_ms: int | None = None
    labels: dict[str, str] | None = None
    payload_ref: str | None = None


class _Head(msgspec.Struct):
    stream: msgspec.Raw = msgspec.Raw(b"false")


class _Id(msgspec.Struct):
    id: msgspec.Raw = msgspec.Raw(b"null")


_ROUTED: Final = _Internal.__struct_fields__
_OPTIONAL: Final = (
    "metadata",
    "headers",
    "endpoint",
    "model",
    "request_queue_name",
    "result_queue_name",
    "pubsub_id",
)

_wires = msgspec.json.Decoder(_Wire)
_datas = msgspec.json.Decoder(_Data)
_internals = msgspec.json.Decoder(_Internal)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_heads = msgspec.json.Decoder(_Head)
_ids = msgspec.json.Decoder(_Id)

T = TypeVar("T")


def _read(text: bytes, decoder: msgspec.json.Decoder[T], what: str, request: bytes = b"") -> T:
    """Decode a text; where that fails, the id to answer under is the one in `request`."""
    try:
        if not text.isascii():
            text.decode()
        return decoder.decode(text)
    except UnicodeDecodeError as exc:
        reason = f"{what} must be UTF-8: {exc.reason} at byte {exc.start}"
        raise MalformedRequest(reason, _id_in(request)) from exc
    except msgspec.ValidationError as exc:
        raise MalformedRequest(f"{what} is not as it should be: {exc}", _id_in(request)) from exc
    except (msgspec.DecodeError, RecursionError) as exc:
        if (mended := json_mended(text)) != text:
            return _read(mended, decoder, what, request)
        raise MalformedRequest(f"{what} must be a JSON object: {exc}", _id_in(request)) from exc


def _slice(part: bytes, text: bytes) -> bytes:
    """A part of what was read as it stands in `text`, also where half a character had to be mended to read it."""
    return part if b"\\ufffd" not in part else as_it_came(part, text)


def _id_in(request: bytes) -> str | None:
    """The id that a request names, where it can be read, however wrong the rest is."""
    try:
        return _usable(msgspec.json.decode(_read(request, _ids, "the request").id), request) if request else None
    except (MalformedRequest, msgspec.MsgspecError):
        return None


def _usable(request_id: object, request: bytes) -> str | None:
    """The id, unless it cannot be one. A mended one is not the one that was sent: two requests could share it."""
    if not isinstance(request_id, str) or not usable_id(request_id):
        return None
    return None if "\ufffd" in request_id and json_mended(request) != request else request_id


def _kind(raw: msgspec.Raw | msgspec.UnsetType, request: bytes) -> RequestKind:
    said = b"null" if raw is msgspec.UNSET else bytes(raw)
    kind = next((kind for kind in REQUEST_KINDS if said == f'"{kind}"'.encode()), None)
    if kind is None:
        came = "missing" if said in (b"null", b'""') else said[:64].decode(errors="replace")
        raise MalformedRequest(f"request_kind is {came}; accepted: {', '.join(REQUEST_KINDS)}", _id_in(request))
    return kind


def _routing(internal: bytes, request: bytes) -> Routing:
    if internal == b"null":
        return Routing()
    seen = _read(internal, _internals, "internal", request)
    parts = _read(internal, _fields, "internal", request)
    return Routing(
        retry_count=min(max(seen.retry_count or 0, 0), MOST_ATTEMPTS),
        queue_id=seen.queue_id or "",
        request_token=seen.request_token or "",
        request_queue_name=seen.request_queue_name or "",
        result_queue_name=seen.result_queue_name or "",
        result_ttl_seconds=min(max(seen.result_ttl_seconds or 0, 0), LONGEST_TTL_S),
        result_routing_resolved=seen.result_routing_resolved or False,
        transport_correlation_id=seen.transport_correlation_id or "",
        enqueued_at_ms=seen.enqueued_at_ms or 0,
        labels=seen.labels or {},
        payload_ref=seen.payload_ref or "",
        others={name: _slice(bytes(raw), internal) for name, raw in parts.items() if name not in _ROUTED},
    )


def _public(data: bytes, routing: Routing) -> PublicRequest:
    seen = _read(data, _datas, "data", data)
    request_id = _usable(seen.id, data)
    if request_id is None:
        raise MalformedRequest("id must be a string of 1 to 512 bytes of UTF-8 without control characters", None)
    if seen.deadline is None or not 0 < seen.deadline <= LATEST_DEADLINE:
        came = "nothing" if seen.deadline is None else str(seen.deadline)
        raise MalformedRequest(f"deadline must be Unix seconds, a whole number above 0, got {came}", request_id)
    payload = _slice(bytes(seen.payload), data)
    return PublicRequest(
        id=request_id,
        created=max(seen.created or 0, 0),
        deadline=seen.deadline,
        payload=None if payload == b"null" and routing.payload_ref else payload,
        metadata=seen.metadata or {},
        headers=seen.headers or {},
        endpoint=seen.endpoint or "",
        model=seen.model or "",
        request_queue_name=seen.request_queue_name or "",
        result_queue_name=seen.result_queue_name or "",
        pubsub_id=seen.pubsub_id or "",
    )


def _streams(payload: bytes) -> bool:
    try:
        return bytes(_heads.decode(payload).stream) == b"true"
    except (msgspec.MsgspecError, RecursionError):
        return False  # No object: the model will say so better than we.
