"""What a program hands to the producer, checked and made into what lies in Redis. Pure: no clock, no connection."""

import hashlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from inference_worker.errors import InvalidSubmission
from inference_worker.llmd_messages import PublicRequest, Routing, new_envelope, write_envelope
from inference_worker.messages import usable_id, whole_json
from inference_worker.stamping import legal_name, legal_value

FURTHEST_DEADLINE_S: Final = 10 * 365 * 86_400
"""A deadline beyond it is one in milliseconds."""

PAYLOAD_GRACE_S: Final = 600
"""How long a payload that is stored apart outlives the deadline."""

RECORD_GRACE_S: Final = 14 * 86_400
"""How long an idempotency key outlives the deadline: twice as long as an acknowledged result is remembered."""

_WHITE: Final = b" \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request to submit."""

    payload: Mapping[str, object] | bytes | None
    """For the model: an object, which bytes are forwarded as they are; None for JSON null."""
    deadline: float
    """Unix seconds after which nobody works on it; rounded up to whole ones."""
    id: str | None = None
    """The result comes under it. One may be used again; each submission is then told apart by its token."""
    created: float | None = None
    """Unix seconds; now, where it is not said."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent to the model's gateway."""
    endpoint: str = ""
    """A path to take instead of the queue's."""
    model: str = ""
    """A label for traces; the payload is not looked into."""
    request_queue: str | None = None
    """Another one than the producer's."""
    result_queue: str | None = None
    """Another list for the result than the producer's, where the queue's configuration names none."""
    idempotency_key: str | None = None
    """Two submissions under one key are one, whoever makes them and whenever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request that was taken over."""

    id: str
    token: str
    """Of this submission: results carry it, too."""
    request_queue: str
    result_queue: str
    deadline: int
    repeated: bool = False
    """It had been submitted before, under its idempotency key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request as it goes into Redis."""

    submission: Submission
    score: float
    member: bytes
    payload: bytes | None
    """To be stored apart."""
    idempotency_key: str | None
    fingerprint: str
    """What makes two requests under one key the same; empty without a key."""

    @property
    def size_bytes(self) -> int:
        return len(self.member) + len(self.payload or b"")


class Tokens:
    """Draws the tokens of submissions, each greater than the one before.

    Members of one score are ordered by their bytes, which begin with the token. So requests of one deadline come out in
    the order in which they went in, also within the 62.5 ms that a score cannot tell apart.
    """

    def __init__(self) -> None:
        self._last = 0

    def draw(self, now: float) -> str:
        """32 hexadecimal digits: milliseconds, a count within them, and 64 random bits."""
        self._last = max(self._last + 1, int(now * 1000) << 16)
        return f"{self._last:016x}{secrets.token_hex(8)}"


def prepared(
    request: Request, tokens: Tokens, *, request_queue: str, result_queue: str, payload_keys: bool, now: float
) -> Prepared:
    """Check a request and write it down. The queues are the producer's.

    Raises:
        InvalidSubmission: with the field that is wrong, what came and what is accepted.
    """
    if not isinstance(request, Request):
        raise InvalidSubmission(f"request must be a Request, got {type(request).__name__}")
    payload, deadline = _payload(request.payload), _deadline(request.deadline, now)
    token = tokens.draw(now)
    submission = Submission(
        id=_id(request.id),
        token=token,
        request_queue=_queue("request_queue", request.request_queue, request_queue),
        result_queue=_queue("result_queue", request.result_queue, result_queue),
        deadline=deadline,
    )
    if submission.result_queue == submission.request_queue:
        raise InvalidSubmission(f"result_queue is the request queue, {submission.request_queue}: another is needed")
    public = PublicRequest(
        id=submission.id,
        created=int(now if request.created is None else _seconds("created", request.created)),
        deadline=deadline,
        payload=payload,
        metadata=_texts("metadata", request.metadata),
        headers=_headers(request.headers),
        endpoint=_text("endpoint", request.endpoint),
        model=_text("model", request.model),
        request_queue_name=request.request_queue or "",
        result_queue_name=request.result_queue or "",
    )
    routing = Routing(
        request_token=token,
        request_queue_name=submission.request_queue,
        result_queue_name=submission.result_queue,
        enqueued_at_ms=int(now * 1000),
        payload_ref=payload_key(submission.id, token) if payload_keys else "",
    )
    envelope = new_envelope(public, routing, "redis" if request.request_queue or request.result_queue else "plain")
    return Prepared(
        submission=submission,
        score=envelope.score,
        member=write_envelope(envelope),
        payload=payload if payload_keys else None,
        idempotency_key=_key(request.idempotency_key),
        fingerprint=_fingerprint(request.id, public, submission) if request.idempotency_key else "",
    )


def active_key(request_id: str) -> str:
    """Where the token of the live submission stands."""
    return f"request-active:{request_id}"


def cancel_key(request_id: str) -> str:
    """Where the token of a cancelled submission stands."""
    return f"request-cancel:{request_id}"


def payload_key(request_id: str, token: str) -> str:
    """Where a payload lies that is stored apart."""
    return f"request-payload:{request_id}:{token}"


def record_key(idempotency_key: str) -> str:
    """Where it stands what an idempotency key stands for. Ours: the Go library has none."""
    return f"request-idempotency:{idempotency_key}"


# ---------------------------------------------------------------- fields


def _payload(payload: object) -> bytes:
    if payload is None:
        return b"null"
    if isinstance(payload, Mapping):
        try:
            return msgspec.json.encode(payload)
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as exc:
            raise InvalidSubmission(f"payload cannot be written as JSON: {exc}") from exc
    if not isinstance(payload, bytes):
        raise InvalidSubmission(f"payload must be an object, its JSON as bytes, or None, got {type(payload).__name__}")
    bare = payload.strip(_WHITE)
    if bare != b"null" and not (bare.startswith(b"{") and whole_json(bare)):
        raise InvalidSubmission("payload must be a JSON object or null")
    return bare


def _deadline(deadline: object, now: float) -> int:
    whole = math.ceil(_seconds("deadline", deadline))
    if whole <= now:
        raise InvalidSubmission(f"deadline has passed: {whole} is {now - whole:.1f} s ago")
    if whole > now + FURTHEST_DEADLINE_S:
        raise InvalidSubmission(f"deadline must be Unix seconds, got {whole}, which is years ahead: milliseconds?")
    return whole


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidSubmission(f"{name} must be Unix seconds, a number above 0, got {value!r}")
    return value


def _id(request_id: object) -> str:
    if request_id is None:
        return secrets.token_hex(16)
    if not isinstance(request_id, str) or not usable_id(request_id):
        raise InvalidSubmission("id must be a string of 1 to 512 bytes of UTF-8 without control characters")
    return request_id


def _key(idempotency_key: object) -> str | None:
    if idempotency_key is None:
        return None
    if not isinstance(idempotency_key, str) or not usable_id(idempotency_key):
        raise InvalidSubmission(
            "idempotency_key must be a string of 1 to 512 bytes of UTF-8 without control characters"
        )
    return idempotency_key


def _queue(name: str, own: object, default: str) -> str:
    if own is None:
        return default
    if not isinstance(own, str) or not usable_id(own):
        raise InvalidSubmission(f"{name} must be the name of a key, got {own!r}")
    return own


def _texts(name: str, values: object) -> dict[str, str]:
    if not isinstance(values, Mapping):
        raise InvalidSubmission(f"{name} must be a mapping of strings, got {type(values).__name__}")
    return {_text(f"a name in {name}", key): _text(f"{name}[{key!r}]", value) for key, value in values.items()}


def _headers(headers: object) -> dict[str, str]:
    """Those that cannot be sent are refused here: behind the queue they would only be left out."""
    texts = _texts("headers", headers)
    for name, value in texts.items():
        if not legal_name(name):
            raise InvalidSubmission(f"headers: {name[:64]!r} is no name of an HTTP header")
        if not legal_value(value):
            raise InvalidSubmission(f"headers: the value of {name} has a character that no header can carry")
    return texts


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidSubmission(f"{name} must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise InvalidSubmission(f"{name} must be text, got half a character: {exc.reason}") from exc
    return value


def _fingerprint(given_id: str | None, public: PublicRequest, submission: Submission) -> str:
    """SHA-256 of what was asked for: without what differs at each try, the time and a drawn id."""
    asked = {
        "id": given_id,
        "deadline": public.deadline,
        "payload": hashlib.sha256(public.payload or b"").hexdigest(),
        "metadata": public.metadata,
        "headers": public.headers,
        "endpoint": public.endpoint,
        "model": public.model,
        "request_route": submission.request_queue,
        "result_route": submission.result_queue,
    }
    return hashlib.sha256(msgspec.json.encode(asked, order="sorted")).hexdigest()
