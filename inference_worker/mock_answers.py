"""What a model that is no model answers: the words of the prompt, in the shapes of OpenAI's endpoints.

Of the server (`mock_model`) and of the echo inside a worker (`echo_model`). Bytes in, bytes out: no pace, no faults,
and nothing of HTTP.
"""

import hashlib
import itertools
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

EMBEDDING_SIZE: Final = 16
MAX_MODEL_LEN: Final = 32_768
DEFAULT_MAX_TOKENS: Final = 256
_WORD: Final = re.compile(r"\S+\s*")


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Asked(msgspec.Struct):
    """What the mock reads of a request; the rest may be anything."""

    model: str | None = None
    messages: list[dict[str, object]] | None = None
    prompt: str | list[str | int | list[int]] | None = None
    input: str | list[str | int | list[int]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    mock: msgspec.Raw = msgspec.Raw(b"null")
    """What is to go wrong with it; the server's affair."""


class Refusal(Exception):
    """An answer that is an error, in vLLM's shape."""

    def __init__(
        self, status: int, message: str, kind: str, param: str | None = None, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


@dataclass(frozen=True, slots=True)
class _Prompt:
    words: list[str]
    """What is said back."""
    tokens: int
    """With everything around it."""


@dataclass(frozen=True, slots=True)
class _Choice:
    words: list[str]
    reason: str


class MockAnswer:
    """What is said to one request, whole or as events."""

    def __init__(
        self, head: dict[str, object], asked: Asked, prompts: list[_Prompt], default_max_tokens: int, *, chat: bool
    ) -> None:
        self._head = head
        self._chat = chat
        self._with_usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
        most = asked.max_completion_tokens or asked.max_tokens or default_max_tokens
        least = most if asked.ignore_eos else min(asked.min_tokens or 0, most)
        self.choices = [_choice(prompt.words, least, most) for prompt in prompts for _ in range(asked.n or 1)]
        self.prompt_tokens = sum(prompt.tokens for prompt in prompts)
        self.output_tokens = sum(len(choice.words) for choice in self.choices)
        self.longest = max((len(choice.words) for choice in self.choices), default=0)

    @property
    def _usage(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "completion_tokens": self.output_tokens,
            "prompt_tokens_details": None,
        }

    def whole(self) -> bytes:
        """The unstreamed answer."""
        choices: list[dict[str, object]] = []
        for index, choice in enumerate(self.choices):
            text = "".join(choice.words)
            said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append(
                {"index": index, **said, "logprobs": None, "finish_reason": choice.reason, "stop_reason": None}
            )
        return msgspec.json.encode({**self._head, "choices": choices, "usage": self._usage})

    def events(self) -> Iterator[bytes]:
        """The streamed answer, what comes at the same time together."""
        head = {**self._head, "object": "chat.completion.chunk" if self._chat else "text_completion"}

        def event(index: int, said: dict[str, object], reason: str | None) -> bytes:
            choice = {"index": index, **said, "logprobs": None, "finish_reason": reason}
            return b"data: %b\n\n" % msgspec.json.encode({**head, "choices": [choice]})

        for number in range(self.longest):
            step: list[bytes] = []
            for index, choice in enumerate(self.choices):
                if number == 0 and self._chat:
                    step.append(event(index, {"delta": {"role": "assistant", "content": ""}}, None))
                if number < len(choice.words):
                    word = choice.words[number]
                    last = number == len(choice.words) - 1
                    said: dict[str, object] = {"delta": {"content": word}} if self._chat else {"text": word}
                    step.append(event(index, said, choice.reason if last else None))
            yield b"".join(step)
        end = b"data: [DONE]\n\n"
        if self._with_usage:
            usage = {**head, "choices": [], "usage": self._usage}
            end = b"data: %b\n\n%b" % (msgspec.json.encode(usage), end)
        yield end


def read(payload: bytes) -> Asked:
    """A request.

    Raises:
        Refusal
    """
    try:
        return msgspec.json.decode(payload, type=Asked)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise Refusal(400, f"1 validation error:\n  {exc}", "Bad Request") from exc


def generation(
    asked: Asked,
    answer_id: str,
    *,
    chat: bool,
    model: str,
    created: int = 0,
    max_model_len: int = MAX_MODEL_LEN,
    default_max_tokens: int = DEFAULT_MAX_TOKENS,
) -> MockAnswer:
    """The answer to a chat or a completion.

    Raises:
        Refusal
    """
    prompts = [_chat_prompt(asked)] if chat else [_prompt(text) for text in _texts(asked.prompt, "prompt")]
    _check(asked, prompts, max_model_len)
    head: dict[str, object] = {
        "id": f"chatcmpl-{answer_id}" if chat else f"cmpl-{answer_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
    }
    return MockAnswer(head, asked, prompts, default_max_tokens, chat=chat)


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answer to a request for embeddings."""

    body: bytes
    tokens: int


def embeddings(texts: list[str], answer_id: str, *, size: int | None, model: str, created: int = 0) -> Embedded:
    """A vector for each text."""
    tokens = sum(len(_WORD.findall(text)) for text in texts)
    data = [
        {"index": index, "object": "embedding", "embedding": embedding(text, size or EMBEDDING_SIZE)}
        for index, text in enumerate(texts)
    ]
    body = {
        "id": f"embd-{answer_id}",
        "object": "list",
        "created": created,
        "model": model,
        "data": data,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }
    return Embedded(msgspec.json.encode(body), tokens)


def texts_to_embed(asked: Asked) -> list[str]:
    """What a request for embeddings is about.

    Raises:
        Refusal
    """
    return _texts(asked.input, "input")


# ---------------------------------------------------------------- reading and choosing


def _check(asked: Asked, prompts: list[_Prompt], max_model_len: int) -> None:
    wanted = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    if wanted is not None and wanted < 1:
        raise Refusal(400, f"max_tokens must be at least 1, got {wanted}.", "BadRequestError", "max_tokens")
    if asked.n is not None and not 1 <= asked.n <= 128:
        raise Refusal(400, f"n must be 1 to 128, got {asked.n}.", "BadRequestError", "n")
    if asked.stream_options is not None and not asked.stream:
        raise Refusal(400, "Stream options can only be defined when `stream=True`.", "BadRequestError")
    longest = max((prompt.tokens for prompt in prompts), default=0)
    if longest + (wanted or 1) > max_model_len:
        raise Refusal(
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{wanted or 1} output tokens and your prompt contains {longest} input tokens.",
            "BadRequestError",
            "input_tokens",
        )


def _choice(words: list[str], least: int, most: int) -> _Choice:
    if len(words) < least:
        spoken = list(itertools.islice(itertools.cycle([f"{word.rstrip()} " for word in words]), least))
        return _Choice(spoken, "length" if least == most else "stop")
    return _Choice(words[:most], "stop" if len(words) <= most else "length")


def _prompt(text: str, around: int = 0) -> _Prompt:
    words = _WORD.findall(text) or ["mock"]
    return _Prompt(words, len(words) + around)


def _chat_prompt(asked: Asked) -> _Prompt:
    """The last message is said back; the others count."""
    if not asked.messages:
        missing = "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required'}"
        raise Refusal(400, missing, "Bad Request", "body.messages")
    *others, last = [_content(message.get("content")) for message in asked.messages]
    return _prompt(last, sum(len(_WORD.findall(text)) for text in others))


def _content(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return " ".join(text for text in texts if isinstance(text, str))


def _texts(given: str | list[str | int | list[int]] | None, name: str) -> list[str]:
    """The texts in a prompt or input; token ids are read as numbers."""
    if given is None:
        missing = f"1 validation error:\n  {{'type': 'missing', 'loc': 'body.{name}', 'msg': 'Field required'}}"
        raise Refusal(400, missing, "Bad Request", f"body.{name}")
    if isinstance(given, str):
        return [given]
    ids = [str(item) for item in given if isinstance(item, int)]
    if ids:
        return [" ".join(ids)]
    return [item if isinstance(item, str) else " ".join(map(str, item)) for item in given if not isinstance(item, int)]


def embedding(text: str, size: int) -> list[float]:
    """A vector of length 1 that is the same for the same text, everywhere."""
    blocks = (hashlib.sha256(f"{number}:{text}".encode()).digest() for number in range(-(-size // 16)))
    numbers = [value / 32768.0 for block in blocks for value in struct.unpack("<16h", block)][:size]
    length = sum(number * number for number in numbers) ** 0.5 or 1.0
    return [round(number / length, 8) for number in numbers]
