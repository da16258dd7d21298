"""A stored answer as OpenAI's clients expect it: whole, or as the chunks of a stream. Pure.

The answer is whole before its first chunk leaves: the model's own pace does not reach a client through a queue. Texts
are never decoded: each is one slice of the stored bytes.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from inference_worker.gateway.problems import Refusal
from inference_worker.gateway.views import StoredHead, state_of

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": the job waits or runs\n\n"
NULL: Final = msgspec.Raw(b"null")

_head = msgspec.json.Decoder(StoredHead)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_lists = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_UNREADABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


def answer_of(job_id: str, stored: bytes) -> msgspec.Raw:
    """The model's answer in a stored result, as the bytes that the model sent.

    Raises:
        Refusal: the job has failed, with the status and the words of whoever failed it.
    """
    try:
        head, fields = _head.decode(stored), _fields.decode(stored)
    except _UNREADABLE as exc:
        raise Refusal(502, "bad_response", "The stored result cannot be read.", job_id=job_id, final=True) from exc
    if head.status == "completed":
        return fields.get("result", NULL)
    raise failure(job_id, head)


def failure(job_id: str, head: StoredHead) -> Refusal:
    """A failed result as an error of HTTP."""
    words = head.error or "The job has failed."
    match state_of(head.status, head.status_code, head.error_code):
        case "expired":
            return Refusal(504, head.error_code or "expired", words, job_id=job_id, final=True)
        case "cancelled":
            # 409 and not 499: clients know it, and it says that nobody else failed.
            return Refusal(409, "cancelled", words, job_id=job_id, final=True)
        case "dead":
            # It was tried as often as it may be.
            return Refusal(
                _error_status(head.status_code), head.error_code or "failed", words, job_id=job_id, final=True
            )
        case _:
            return Refusal(_error_status(head.status_code), head.error_code or "model_error", words, job_id=job_id)


def _error_status(status: int) -> int:
    return status if 400 <= status <= 599 else 502


def chunks(job_id: str, answer: msgspec.Raw, *, chat: bool, include_usage: bool) -> Iterator[bytes]:
    """A whole answer as the events of a stream, the last one `[DONE]`.

    Raises:
        Refusal: it is no answer that has choices; nothing was yielded before.
    """
    try:
        whole = _fields.decode(answer)
        choices = _lists.decode(whole["choices"])
        messages = [_message(choice) for choice in choices] if chat else [{} for _ in choices]
    except (*_UNREADABLE, KeyError) as exc:
        detail = "The model's answer has no choices and cannot be streamed."
        raise Refusal(502, "bad_response", detail, job_id=job_id, final=True) from exc
    head: dict[str, object] = {name: value for name, value in whole.items() if name not in ("choices", "usage")}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    if include_usage:
        head["usage"] = None
    for choice, message in zip(choices, messages, strict=True):
        for part in _chat_parts(choice, message) if chat else _text_parts(choice):
            yield _event({**head, "choices": [part]})
    if include_usage and "usage" in whole:
        yield _event({**head, "choices": [], "usage": whole["usage"]})
    yield DONE


def _message(choice: Mapping[str, msgspec.Raw]) -> dict[str, object]:
    """The message of a choice as one delta: tool calls get the index that a stream's have."""
    message: dict[str, object] = dict(_fields.decode(choice.get("message", b"{}")))
    if isinstance(calls := message.get("tool_calls"), msgspec.Raw) and bytes(calls) != b"null":
        message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(_lists.decode(calls))]
    return message


def _chat_parts(choice: Mapping[str, msgspec.Raw], message: Mapping[str, object]) -> Iterator[dict[str, object]]:
    index = choice.get("index", msgspec.Raw(b"0"))
    delta = {"role": msgspec.Raw(b'"assistant"'), **message}
    yield {"index": index, "delta": delta, "logprobs": choice.get("logprobs", NULL), "finish_reason": None}
    rest = {name: value for name, value in choice.items() if name not in ("index", "message", "logprobs")}
    yield {"index": index, "delta": {}, "logprobs": None, "finish_reason": NULL, **rest}


def _text_parts(choice: Mapping[str, msgspec.Raw]) -> Iterator[dict[str, object]]:
    index = choice.get("index", msgspec.Raw(b"0"))
    text = choice.get("text", msgspec.Raw(b'""'))
    yield {"index": index, "text": text, "logprobs": choice.get("logprobs", NULL), "finish_reason": None}
    rest = {name: value for name, value in choice.items() if name not in ("index", "text", "logprobs")}
    yield {"index": index, "text": "", "logprobs": None, "finish_reason": NULL, **rest}


def error_event(error: Mapping[str, object]) -> bytes:
    """A failure after the stream has begun."""
    return _event(error) + DONE


def _event(body: Mapping[str, object]) -> bytes:
    # An event ends with its line. A line break of JSON stands between two parts, where a space does as well.
    return b"data: %b\n\n" % msgspec.json.encode(body).replace(b"\n", b" ").replace(b"\r", b" ")
