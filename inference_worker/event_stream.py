"""An OpenAI event stream becomes the answer that the same request would have got unstreamed.

`EventParser` makes events of bytes by the WHATWG standard, `Reassembly` an answer of events. Neither reads a socket or
a clock.

Most events of a stream differ in one string alone, the new piece of text. The bytes before and after that string are
kept as a template once an event has been read in full, and an event that fits a template is read by decoding its one
string: a tenth of the work, with the same outcome by construction.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeVar

import msgspec

from inference_worker.errors import BadResponse, ModelCut
from inference_worker.messages import MOST_TOKENS, Usage, json_mended, usage_of

LONGEST_EVENT_BYTES: Final = 4 * 1024 * 1024
MOST_TEMPLATES: Final = 8
MOST_PIECES: Final = 1024

_BOM: Final = b"\xef\xbb\xbf"
_HEARD: Final = (b"", b"message", b"error")
"""The types of events that have a say; others (SGLang's `sglext_ids`) are passed over."""
_NULL: Final = b"null"
_PROBE: Final = "\x00probe\x00"

T = TypeVar("T")

_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_raws = msgspec.json.Decoder(list[msgspec.Raw]).decode
_string = msgspec.json.Decoder(str).decode
_anything = msgspec.json.Decoder().decode


class EventParser:
    """Splits a byte stream into the data of its events. What stands after the last empty line is no event."""

    def __init__(self, longest_event_bytes: int = LONGEST_EVENT_BYTES) -> None:
        self._longest_event_bytes = longest_event_bytes
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._after_cr = False
        self._begun = False

    @property
    def held_bytes(self) -> int:
        """Bytes of an event that has not ended yet."""
        return self._pending_bytes

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that end in this chunk.

        Raises:
            BadResponse: an event is larger than it may be.
        """
        chunk = self._with_lf(chunk)
        if not chunk:
            return []
        across_the_seam = bool(self._pending) and chunk[0] == 10 and self._pending[-1][-1] == 10
        if not across_the_seam and b"\n\n" not in chunk:
            self._keep(chunk)
            return []
        blocks = b"".join((*self._pending, chunk)).split(b"\n\n")
        self._pending, self._pending_bytes = [], 0
        self._keep(blocks.pop())
        if not self._begun:
            self._begun = True
            blocks[0] = blocks[0].removeprefix(_BOM)
        if len(chunk) > self._longest_event_bytes or len(blocks[0]) > self._longest_event_bytes:
            self._check(max(map(len, blocks)))
        return [data for block in blocks if (data := _data_of(block)) is not None]

    def _with_lf(self, chunk: bytes) -> bytes:
        """The chunk with LF as its only line end; a CRLF may lie across two chunks."""
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        if b"\r" in chunk:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return chunk

    def _keep(self, tail: bytes) -> None:
        if tail:
            self._pending.append(tail)
            self._pending_bytes += len(tail)
            self._check(self._pending_bytes)

    def _check(self, size_bytes: int) -> None:
        if size_bytes > self._longest_event_bytes:
            raise BadResponse(f"an event of the stream is larger than {self._longest_event_bytes} bytes")


def _data_of(block: bytes) -> bytes | None:
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    kind = b""
    lines: list[bytes] = []
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            lines.append(value)
        elif name == b"event":
            kind = value
    return b"\n".join(lines) if lines and kind in _HEARD else None


class _Asked(msgspec.Struct):
    n: object = None
    prompt: msgspec.Raw = msgspec.Raw(_NULL)


def choices_asked(payload: bytes) -> int:
    """How many choices a payload asks for: `n` for every prompt."""
    try:
        asked = msgspec.json.decode(json_mended(payload), type=_Asked)
        prompts = _raws(asked.prompt) if bytes(asked.prompt).lstrip().startswith((b'["', b"[[", b"[ ")) else []
    except (msgspec.MsgspecError, RecursionError):
        return 1
    listed = len(prompts) if prompts and bytes(prompts[0])[:1] in (b'"', b"[") else 1
    n = asked.n if isinstance(asked.n, int) and not isinstance(asked.n, bool) and asked.n > 0 else 1
    return n * listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """The whole answer."""

    body: bytes
    usage: Usage | None
    """Set where the body has none, and the stream let it be estimated."""
    first_token_at: float | None
    tbt_s: float | None


class _Pieces(list[str]):
    """A text in the pieces that came."""

    def text(self) -> str:
        if len(self) > 1:
            self[:] = ["".join(self)]
        return self[0] if self else ""


_Held = bytes | list[bytes] | _Pieces
"""JSON as it came, the items of a list, or a text."""


@dataclass(slots=True)
class _Call:
    """A tool call: pieces of its arguments, and first values of everything else."""

    fields: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[str, _Held]] = field(default_factory=dict)
    """`function`, or `custom`: its name, and its arguments in pieces."""

    def encoded(self) -> dict[str, object]:
        known = {name: msgspec.Raw(value) for name, value in self.fields.items()}
        parts = {name: _encodable(part) for name, part in self.parts.items()}
        return {**{k: known.pop(k) for k in ("id",) if k in known}, "type": "function", **known, **parts}


@dataclass(slots=True)
class _Choice:
    message: dict[str, _Held] = field(default_factory=dict)
    """Strings in pieces, lists in items, anything else as it last was; null while nothing else came."""
    fields: dict[str, _Held] = field(default_factory=dict)
    logprobs: dict[str, _Held] | None = None
    calls: dict[int, _Call] = field(default_factory=dict)
    function_call: dict[str, _Held] = field(default_factory=dict)
    finished: bool = False
    usage: bytes | None = None
    """A running count that came with this choice."""

    def pieces(self) -> Iterator[_Pieces]:
        """Every text that may have grown."""
        parts = [
            self.message,
            self.fields,
            self.function_call,
            *(p for c in self.calls.values() for p in c.parts.values()),
        ]
        for part in parts:
            for value in part.values():
                if isinstance(value, _Pieces):
                    yield value

    def encoded(self, index: int, chat: bool) -> dict[str, object]:
        fields = _encodable(self.fields)
        finish = {name: fields.pop(name) for name in ("finish_reason", "stop_reason") if name in fields}
        logprobs = {"logprobs": _encodable(self.logprobs) if self.logprobs is not None else None}
        if not chat:
            text = fields.pop("text", "")
            return {"index": index, "text": text, **logprobs, **finish, **fields}
        message: dict[str, object] = {"role": "assistant", "content": None, **_encodable(self.message)}
        if self.calls:
            message["tool_calls"] = [self.calls[number].encoded() for number in sorted(self.calls)]
        if self.function_call:
            message["function_call"] = _encodable(self.function_call)
        return {"index": index, "message": message, **logprobs, **finish, **fields}


def _encodable(parts: dict[str, _Held]) -> dict[str, object]:
    return {name: _value(value) for name, value in parts.items()}


def _value(value: _Held) -> object:
    if isinstance(value, _Pieces):
        return value.text()
    if isinstance(value, list):
        return [msgspec.Raw(item) for item in value]
    return msgspec.Raw(value)


@dataclass(slots=True)
class _Effect:
    """What reading one event did, as far as a template needs to know."""

    grown: list[tuple[_Pieces, tuple[str | int, ...], str]] = field(default_factory=list)
    """Texts that grew: where they are kept, where they stood in the event, by what."""
    began: bool = False
    """Whether a tool call began, which takes tokens, too."""
    other: bool = False
    """Whether anything was done that doing again would do twice, or that a template cannot see."""


class Reassembly:
    """Takes events, and makes the unstreamed answer of them."""

    def __init__(self, *, choices: int = 1, limit_bytes: int = 1 << 62) -> None:
        self._expected = choices
        self._limit_bytes = limit_bytes
        self._top: dict[str, bytes] = {}
        self._choices: dict[int, _Choice] = {}
        self._templates: list[tuple[bytes, bytes, int, _Pieces]] = []
        self._chat = True
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._token_events = 0
        self._running_usage = False
        self.done = False
        """Whether `[DONE]` came. Says nothing of success."""
        self.size_bytes = 0
        """About how much the answer holds so far."""

    def add(self, events: Iterable[bytes], at: float) -> None:
        """Take events that came at the time `at`, in seconds of any clock.

        Raises:
            BadResponse: the model reports an error, an event cannot be part of an answer, or the answer is too large.
        """
        before = self._token_events
        templates = self._templates
        for data in events:
            for prefix, suffix, around, pieces in templates:
                if data.startswith(prefix) and data.endswith(suffix) and len(data) > around:
                    try:
                        piece = _string(data[len(prefix) : len(data) - len(suffix)])
                    except (msgspec.MsgspecError, UnicodeDecodeError):
                        continue
                    pieces.append(piece)
                    self.size_bytes += len(data) - around
                    if piece:
                        self._token_events += 1
                    break
            else:
                if data == b"[DONE]":
                    self.done = True
                    break
                self._read(data)
        if self._token_events > before:
            if self._first_token_at is None:
                self._first_token_at = at
            self._last_token_at = at
        self._compact()
        if self.size_bytes > self._limit_bytes:
            raise BadResponse(f"the streamed answer is larger than {self._limit_bytes} bytes")

    @property
    def complete(self) -> bool:
        """Whether every choice that is expected or was seen has a reason why it ended."""
        return len(self._choices) >= max(self._expected, 1) and all(c.finished for c in self._choices.values())

    def finish(self) -> Assembled:
        """The whole answer, after the stream's end.

        Raises:
            ModelCut: the stream ended before the answer did.
            BadResponse: the answer is too large.
        """
        if not self.complete:
            finished = sum(choice.finished for choice in self._choices.values())
            how = "[DONE] came" if self.done else "the stream ended"
            expected = max(self._expected, len(self._choices), 1)
            raise ModelCut(f"{how} when {finished} of {expected} choices had a finish_reason")
        body = self._body()
        if len(body) > self._limit_bytes:
            raise BadResponse(f"the streamed answer is larger than {self._limit_bytes} bytes")
        usage = usage_of(body)
        estimated = self._estimated() if usage is None else None
        counted = usage or estimated
        return Assembled(
            body=body,
            usage=estimated,
            first_token_at=self._first_token_at,
            tbt_s=self._tbt_s(counted.output_tokens if counted is not None else self._token_events),
        )

    def _body(self) -> bytes:
        top: dict[str, object] = {name: msgspec.Raw(value) for name, value in self._top.items() if name != "object"}
        choices = [self._choices[index].encoded(index, self._chat) for index in sorted(self._choices)]
        head = {"id": top.pop("id")} if "id" in top else {}
        named = {name: top.pop(name) for name in ("created", "model") if name in top}
        kind = "chat.completion" if self._chat else "text_completion"
        return msgspec.json.encode({**head, "object": kind, **named, "choices": choices, **top})

    def _tbt_s(self, tokens: int) -> float | None:
        """Seconds between two tokens of one choice; events are not tokens, and choices run side by side."""
        gaps = tokens / len(self._choices) - 1
        first, last = self._first_token_at, self._last_token_at
        if first is None or last is None or last <= first or gaps <= 0:
            return None  # Of tokens that all came at once nothing can be said.
        return (last - first) / gaps

    def _estimated(self) -> Usage | None:
        """The tokens by what the stream said in passing: running counts, llama.cpp's timings, token ids."""
        running = [usage_of(b'{"usage":' + c.usage + b"}") for c in self._choices.values() if c.usage is not None]
        counts = [usage for usage in running if usage is not None]
        if counts:
            prompt, output = max(u.input_tokens for u in counts), sum(u.output_tokens for u in counts)
            cached = max(u.cached_input_tokens for u in counts)
            return _usage(prompt, output, cached)
        timings = _known(self._top.get("timings"), _Timings)
        if timings is not None and timings.predicted_n is not None:
            cached = timings.cache_n or 0
            return _usage(cached + (timings.prompt_n or 0), timings.predicted_n, cached)
        ids = [c.fields["token_ids"] for c in self._choices.values() if isinstance(c.fields.get("token_ids"), list)]
        prompt_ids = _known(self._top.get("prompt_token_ids"), list[msgspec.Raw]) or []
        return _usage(len(prompt_ids), sum(map(len, ids)), 0)

    def _compact(self) -> None:
        for choice in self._choices.values():
            for pieces in choice.pieces():
                if len(pieces) > MOST_PIECES:
                    pieces.text()

    def _read(self, data: bytes) -> None:
        """Read an event in full."""
        if not data.isascii():
            data = data.decode(errors="replace").encode()
        data = json_mended(data)
        effect = _Effect()
        try:
            self._read_chunk(_object(data), effect)
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise BadResponse(f"an event of the stream is no chunk of an answer: {exc}") from exc
        if effect.began or any(piece for _, _, piece in effect.grown):
            self._token_events += 1
        if not effect.other and len(effect.grown) == 1 and len(self._templates) < MOST_TEMPLATES:
            pieces, path, _ = effect.grown[0]
            if (around := _around(data, path)) is not None:
                self._templates.append((*around, len(around[0]) + len(around[1]), pieces))

    def _read_chunk(self, chunk: dict[str, msgspec.Raw], effect: _Effect) -> None:
        _raise_error(chunk)
        entries = _list(chunk.pop("choices", None))
        touched = [self._choice(entry, effect) for entry in entries]
        for number, (choice, entry) in enumerate(zip(touched, entries, strict=True)):
            self._read_choice(choice, entry, ("choices", number), effect)
        usage = bytes(chunk.pop("usage", _NULL))
        if usage != _NULL:
            effect.other = True
            if not touched or max(self._expected, len(self._choices)) <= 1:
                self._top["usage"] = usage
            for choice in touched:
                choice.usage = usage
        for name, raw in chunk.items():
            value, known = bytes(raw), self._top.get(name)
            if known is None:
                self.size_bytes += len(name) + len(value)
            if known in (None, _NULL) or (value != _NULL and name not in ("id", "created", "model", "object")):
                self._top[name] = value

    def _choice(self, entry: dict[str, msgspec.Raw], effect: _Effect) -> _Choice:
        index = _anything(entry.pop("index", b"0"))
        if not isinstance(index, int) or index < 0:
            raise BadResponse(f"an event of the stream has a choice with the index {index!r}")
        if index not in self._choices:
            self._choices[index] = _Choice()
            self.size_bytes += 64
            effect.other = True
        return self._choices[index]

    def _read_choice(
        self, choice: _Choice, entry: dict[str, msgspec.Raw], path: tuple[str | int, ...], effect: _Effect
    ) -> None:
        if "text" in entry and "delta" not in entry:
            self._chat = False
        for name, raw in entry.items():
            value = bytes(raw)
            if name in ("delta", "message"):
                if value != _NULL:
                    self._read_message(choice, _object(raw), (*path, name), effect)
            elif name == "logprobs":
                if value != _NULL:
                    self._read_logprobs(choice, _object(raw), effect)
            elif name == "text" or (name == "token_ids" and value != _NULL):
                self._grow(choice.fields, name, value, (*path, name), effect)
            elif value != _NULL and (name, value) != ("finish_reason", b'""'):
                choice.fields[name] = value
                choice.finished = choice.finished or name == "finish_reason"
                effect.other = effect.other or name in ("finish_reason", "stop_reason")
            else:
                choice.fields.setdefault(name, _NULL)

    def _read_message(
        self, choice: _Choice, delta: dict[str, msgspec.Raw], path: tuple[str | int, ...], effect: _Effect
    ) -> None:
        for name, raw in delta.items():
            value = bytes(raw)
            if name == "role":
                if value != _NULL:
                    choice.message.setdefault("role", value)
            elif name == "tool_calls":
                for number, entry in enumerate(_list(raw)):
                    self._read_call(choice, entry, (*path, name, number), effect)
            elif name == "function_call":
                if value != _NULL:
                    self._read_part(choice.function_call, _object(raw), (*path, name), effect)
            else:
                self._grow(choice.message, name, value, (*path, name), effect)

    def _read_call(
        self, choice: _Choice, entry: dict[str, msgspec.Raw], path: tuple[str | int, ...], effect: _Effect
    ) -> None:
        number = _anything(entry.pop("index", _NULL))
        if not isinstance(number, int):
            # Some shims name no index: an id that is new begins a call, all else belongs to the latest one.
            effect.other = True
            call_id = bytes(entry.get("id", _NULL))
            known = {call.fields.get("id"): at for at, call in choice.calls.items()}
            last = max(choice.calls, default=-1)
            number = known.get(call_id, last + 1) if call_id not in (_NULL, b'""') else max(last, 0)
        if number not in choice.calls:
            choice.calls[number] = _Call()
            self.size_bytes += 64
            effect.began = effect.other = True
        call = choice.calls[number]
        for name, raw in entry.items():
            value = bytes(raw)
            if value.startswith(b"{") and name in ("function", "custom"):
                self._read_part(call.parts.setdefault(name, {}), _object(raw), (*path, name), effect)
            elif value not in (_NULL, b'""') and call.fields.get(name) != value:
                effect.other = True
                self.size_bytes += len(value)
                call.fields.setdefault(name, value)

    def _read_part(
        self,
        part: dict[str, _Held],
        fields: dict[str, msgspec.Raw],
        path: tuple[str | int, ...],
        effect: _Effect,
    ) -> None:
        """The inside of a function call: the name counts once, the arguments come in pieces."""
        for name, raw in fields.items():
            value = bytes(raw)
            if name == "name":
                if value not in (_NULL, b'""') and part.get(name) != value:
                    effect.other = True
                    part.setdefault(name, value)
            elif value.startswith(b'"'):
                self._grow(part, name, value, (*path, name), effect)
            elif value != _NULL:  # Arguments as an object, in one go.
                effect.other = True
                self._grow(part, name, msgspec.json.encode(value.decode()), (*path, name), effect)

    def _read_logprobs(self, choice: _Choice, logprobs: dict[str, msgspec.Raw], effect: _Effect) -> None:
        if choice.logprobs is None:
            choice.logprobs = {}
        for name, raw in logprobs.items():
            self._grow(choice.logprobs, name, bytes(raw), (), effect)
        effect.other = True

    def _grow(
        self, into: dict[str, _Held], name: str, value: bytes, path: tuple[str | int, ...], effect: _Effect
    ) -> None:
        """Strings get longer, lists get more items, of anything else the last one that is not null counts."""
        known = into.get(name)
        if value == _NULL:
            into.setdefault(name, _NULL)
        elif value.startswith(b'"'):
            if not isinstance(known, _Pieces):
                into[name] = known = _Pieces()
            piece = _string(value)
            known.append(piece)
            effect.grown.append((known, path, piece))
            self.size_bytes += len(value)
        elif value.startswith(b"["):
            if not isinstance(known, list) or isinstance(known, _Pieces):
                into[name] = known = []
            known.extend(map(bytes, _raws(value)))
            effect.other = True
            self.size_bytes += len(value)
        else:
            into[name] = value
            effect.other = True


def _list(raw: msgspec.Raw | None) -> list[dict[str, msgspec.Raw]]:
    return [] if raw is None or bytes(raw) == _NULL else _objects(raw)


_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class _Timings(msgspec.Struct):
    """llama.cpp's."""

    predicted_n: _Count | None = None
    prompt_n: _Count | None = None
    cache_n: _Count | None = None


def _known(raw: bytes | None, kind: type[T]) -> T | None:
    """What the stream said in passing, where it can be read: the answer does not depend on it."""
    try:
        return msgspec.json.decode(raw or _NULL, type=kind | None)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _usage(prompt: int, output: int, cached: int) -> Usage | None:
    if prompt + output <= 0:
        return None
    return Usage(input_tokens=prompt, output_tokens=output, total_tokens=prompt + output, cached_input_tokens=cached)


def _raise_error(chunk: dict[str, msgspec.Raw]) -> None:
    """An error comes as `{"error": {…}}`, as `{"error": "…"}`, or flat with `"object": "error"`."""
    error = _anything(chunk.get("error", _NULL))
    if error is None and bytes(chunk.get("object", b"")) == b'"error"':
        error = {name: _anything(raw) for name, raw in chunk.items()}
    if error is None:
        return
    said = error if isinstance(error, dict) else {"message": error}
    code = said.get("code")
    if isinstance(code, str) and code.isascii() and code.isdecimal():
        code = int(code[:9])
    status_code = code if isinstance(code, int) and 400 <= code <= 599 else None
    message = said.get("message")
    reason = message if isinstance(message, str) and message else msgspec.json.encode(error).decode()[:1000]
    raise BadResponse(reason, status_code)


def _around(data: bytes, path: tuple[str | int, ...]) -> tuple[bytes, bytes] | None:
    """The bytes before and after the string at `path`, proved by putting another string there."""
    name = re.escape(str(path[-1]).encode())
    for found in re.finditer(rb'"' + name + rb'"\s*:\s*("(?:[^"\\]|\\.)*+")', data):
        prefix, suffix = data[: found.start(1)], data[found.end(1) :]
        try:
            probed = _anything(prefix + msgspec.json.encode(_PROBE) + suffix)
        except (msgspec.MsgspecError, RecursionError):
            return None  # In what is passed on unread there is something that cannot be read.
        for step in path:
            probed = probed[step]
        if probed == _PROBE:
            return prefix, suffix
    return None
