"""Results as llm-d-async writes them: `{"id", "status_code", "payload", "error_code", "error_message", …}`. Pure.

A reader looks at `status_code` first: above 0 it stands for an HTTP answer, whatever its status, and `payload` is its
body as text. Otherwise `error_code` says why there is none. What a gate drops has both where the gate answers in the
model's place, so that a reader of either finds what it needs. Metadata and routing are not echoed.
"""

from dataclasses import dataclass
from typing import Final, Literal, assert_never

import msgspec

from inference_worker.llmd_messages import Envelope
from inference_worker.messages import ErrorCode, Reply

ResultCode = Literal[
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "GATE_DROPPED",
    "GATE_ERROR",
    "INFERENCE_ERROR",
    "INVALID_REQUEST",
    "PAYLOAD_UNAVAILABLE",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """The model, or the gateway before it, has answered."""

    status_code: int
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAnswer:
    """There is no HTTP answer."""

    code: ResultCode
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GateAnswer:
    """A gate has answered in the model's place."""

    status_code: int
    code: ResultCode
    text: str


ResultOutcome = HttpAnswer | NoAnswer | GateAnswer

CODES: Final[dict[ErrorCode, ResultCode]] = {
    "invalid_request": "INVALID_REQUEST",
    "expired": "DEADLINE_EXCEEDED",
    "deadline_exceeded": "DEADLINE_EXCEEDED",
    "cancelled": "CANCELLED",
    "model_error": "INFERENCE_ERROR",
    "bad_response": "INFERENCE_ERROR",
    "retries_exhausted": "INFERENCE_ERROR",
    "poison": "INFERENCE_ERROR",
    "gate_dropped": "GATE_DROPPED",
    "gate_error": "GATE_ERROR",
    "payload_unavailable": "PAYLOAD_UNAVAILABLE",
}
"""What our error codes are there, where there was no HTTP answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultMessage:
    """A result as its reader sees it."""

    id: str
    status_code: int = 0
    """0: no HTTP answer."""
    payload: str = ""
    error_code: str = ""
    error_message: str = ""
    request_token: str = ""


def result_json(request_id: str, outcome: ResultOutcome, *, token: str = "") -> bytes:
    """Write a result. Never fails: bytes that are no UTF-8, and halves of characters, become U+FFFD."""
    body: dict[str, object] = {"id": _writable(request_id)}
    match outcome:
        case HttpAnswer(status_code=status_code, body=answer):
            body["status_code"] = status_code
            body["payload"] = answer.decode(errors="replace")
        case NoAnswer(code=code, text=text):
            body |= {"payload": _error(text), "error_code": code, "error_message": _writable(text)}
        case GateAnswer(status_code=status_code, code=code, text=text):
            body["status_code"] = status_code
            body |= {"payload": _error(text), "error_code": code, "error_message": _writable(text)}
        case _:
            assert_never(outcome)
    if token:
        body["request_token"] = _writable(token)
    return msgspec.json.encode(body)


def result_for(envelope: Envelope, reply: Reply) -> bytes:
    """Write what a request of an envelope ended with."""
    return result_json(envelope.request.id, outcome_of(reply), token=envelope.routing.request_token)


def outcome_of(reply: Reply) -> ResultOutcome:
    """What a terminal result of ours is there: the model's own answer wherever there was one."""
    if reply.error_code is None:
        return HttpAnswer(status_code=reply.status_code, body=reply.result or b"")
    if reply.answer is not None:
        return HttpAnswer(status_code=reply.status_code, body=reply.answer)
    text = reply.error or reply.error_code
    if reply.error_code == "gate_dropped" and reply.status_code > 0:
        return GateAnswer(status_code=reply.status_code, code="GATE_DROPPED", text=text)
    if reply.error_code == "model_error":
        # The answer itself was not kept: its status is the model's all the same.
        return HttpAnswer(status_code=reply.status_code, body=_error(text).encode())
    return NoAnswer(code=CODES[reply.error_code], text=text)


def read_result(result: bytes) -> ResultMessage:
    """Read a result, also an old one, which has an id and a payload alone.

    Raises:
        ValueError: it is none.
    """
    try:
        seen = msgspec.json.decode(result, type=_Result)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise ValueError(f"this is no result: {exc}") from exc
    if not seen.id:
        raise ValueError("this result has no id")
    return ResultMessage(
        id=seen.id,
        status_code=max(seen.status_code or 0, 0),
        payload=seen.payload or "",
        error_code=seen.error_code or "",
        error_message=seen.error_message or "",
        request_token=seen.request_token or "",
    )


class _Result(msgspec.Struct):
    id: str | None = None
    status_code: int | None = None
    payload: str | None = None
    error_code: str | None = None
    error_message: str | None = None
    request_token: str | None = None


def _error(text: str) -> str:
    return msgspec.json.encode({"error": _writable(text)}).decode()


def _writable(text: str) -> str:
    return text.encode(errors="surrogatepass").decode(errors="replace")
