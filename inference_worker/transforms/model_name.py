"""The name of the model in requests and answers: one name inside, the caller's outside. Pure.

A queue may have its requests sent to a model of another name; and the transform `model_name` has answers say a name
that its document gives, or the caller's. In a good answer that is the member `model` at the top, which every answer of
OpenAI's shapes has there; in an error it is the text, wherever the inner name stands in it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from inference_worker.messages import InferenceRequest, json_mended
from inference_worker.transforms.members import members_of, text_of, with_member

MODEL: Final = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelName:
    """The answer transform `model_name`."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Inner names and what callers see; what is not named stays. Empty: the name that the caller has asked for."""

    def apply(self, request: InferenceRequest, body: bytes) -> bytes:
        """See `AnswerTransform`."""
        if not self.names:
            return named_as_asked(request, body)
        said = text_of((members_of(body) or {}).get(MODEL))
        shown = self.names.get(said) if said is not None else None
        return body if shown is None else with_member(body, MODEL, msgspec.json.encode(shown)) or body


def sent_as(payload: bytes, model: str) -> bytes:
    """The payload with this model's name, also where it has none; what is no object stays as it is."""
    return with_member(payload, MODEL, msgspec.json.encode(model), added=True) or payload


def asked_name(request: InferenceRequest) -> bytes:
    """The name that the caller has used, as JSON: in the payload, else in the message, else none."""
    said = (members_of(request.payload) or {}).get(MODEL)
    return msgspec.json.encode(request.model) if said is None else said


def asked_text(request: InferenceRequest) -> str:
    """The same as text; empty where it is none."""
    return text_of(asked_name(request)) or ""


def named_as_asked(request: InferenceRequest, body: bytes) -> bytes:
    """A good answer with the name that the caller has used. One that names no model stays as it is."""
    return with_member(body, MODEL, asked_name(request)) or body


def without_name(request: InferenceRequest, said: str, model: str) -> str:
    """A text with the name that the caller has used in place of `model`, where that stands as a word."""
    return _word(model).sub(lambda _: text_of(asked_name(request)) or "", said)


def error_as_asked(request: InferenceRequest, body: bytes, model: str) -> bytes:
    """An error with the name that the caller has used in place of `model`. It stays as it came where it has none."""
    word, asked = _word(model), text_of(asked_name(request)) or ""
    try:
        said = msgspec.json.decode(json_mended(body))
        changed = _replaced(said, word, asked)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        text = body.decode(errors="surrogateescape")
        return word.sub(lambda _: asked, text).encode(errors="surrogateescape")
    return body if changed == said else msgspec.json.encode(changed)


def _replaced(value: object, word: re.Pattern[str], by: str) -> object:
    """The same with every text in it replaced."""
    match value:
        case str():
            return word.sub(lambda _: by, value)
        case list():
            return [_replaced(item, word, by) for item in value]
        case dict():
            return {_replaced(name, word, by): _replaced(item, word, by) for name, item in value.items()}
        case _:
            return value


def _word(model: str) -> re.Pattern[str]:
    """A name that is not the part of a longer one: `llama` is none in `org/llama-3.1`."""
    return re.compile(rf"(?<![\w/-])(?<!\w[.:]){re.escape(model)}(?![\w/-]|[.:]\w)")
