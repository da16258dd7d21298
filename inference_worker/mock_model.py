"""A model server for development and load tests: OpenAI's endpoints, vLLM's metrics, no model.

It answers with the words of the prompt, at the pace of its configuration. What it reports of itself (running, waiting,
tokens held) is true of what it does. It is deliberately no simulation of a scheduler: a request takes one place, and a
place is taken in the order of arrival.
"""

import asyncio
import hashlib
import itertools
import re
import struct
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
from aiohttp import web

EMBEDDING_SIZE: Final = 16
_WORD: Final = re.compile(r"\S+\s*")
_JSON: Final = "application/json"


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What goes wrong with a request: by configuration, by `POST /mock/faults`, or for one request by the header
    `x-mock-fault` or the payload's field `mock`, both as this object in JSON."""

    status: int | None = None
    """Answer with this status and an error object."""
    retry_after_s: float | None = None
    """A `Retry-After` for that answer."""
    delay_s: float = 0.0
    """Wait so long first."""
    drop: bool = False
    """Close the connection instead of answering."""
    cut: bool = False
    """Close it after the headers, or in the middle of a stream."""
    half_body: bool = False
    """Promise the whole body and close after half of it (a stream: as `cut`)."""
    hang: bool = False
    """Never answer."""
    unhealthy: bool = False
    """`/health` says 503; requests are answered all the same."""
    times: int | None = None
    """For so many requests; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MockModelConfig:
    """How the mock behaves."""

    model: str = "mock-model"
    latency_s: float = 0.0
    """From the start of a request to its first token."""
    tokens_per_second: float = 0.0
    """For each request; 0 for all tokens at once."""
    max_num_seqs: int = 256
    """How many requests run at a time; the others wait."""
    max_queued: int | None = None
    """How many may wait; one more is refused with 503. None for any number."""
    kv_capacity_tokens: int = 100_000
    """How many tokens fit the cache, for `vllm:kv_cache_usage_perc`."""
    max_model_len: int = 32_768
    default_max_tokens: int = 256
    strict_model: bool = False
    """Whether another model's name is an error 404."""
    api_key: str | None = field(default=None, repr=False)
    fault: Fault = field(default_factory=Fault)


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(msgspec.Struct):
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
    mock: Fault | None = None


class _Refusal(Exception):
    """An answer that is an error, in vLLM's shape."""

    def __init__(
        self, status: int, message: str, kind: str, param: str | None = None, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


class _Dropped(Exception):
    """The connection was closed on purpose; nobody hears what is answered."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request that runs."""

    prompt_tokens: int
    output_tokens: int
    choices: int
    begun_at: float


class MockModel:
    """The server's state and its handlers."""

    def __init__(self, config: MockModelConfig | None = None, *, now: Callable[[], float] = lambda: 0.0) -> None:
        """`now` tells the Unix seconds that answers are said to be created at."""
        self.config = config if config is not None else MockModelConfig()
        self._now = now
        self.fault = self.config.fault
        self.requests = 0
        """Requests for work that came, whatever became of them."""
        self.aborted = 0
        """Requests whose client went away."""
        self._running: set[_Sequence] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._faulted = 0
        self._taken = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._rejections = 0
        self._success = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self._ids = itertools.count(1)

    @property
    def running(self) -> int:
        """Requests that run."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    @asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[str, None]:
        """Serve inside the context, which gives the URL; port 0 takes a free one. Leaving it ends running requests."""
        runner = web.AppRunner(self._app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            bound = runner.addresses[0][1]
            shown = f"[{host}]" if ":" in host else host
            yield f"http://{shown}:{bound}"
        finally:
            await runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/mock/faults", self._set_fault)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/embeddings", self._embed)
        return app

    # ------------------------------------------------------------ what is asked beside the work

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.fault.unhealthy else 200)

    async def _models(self, _: web.Request) -> web.Response:
        model = {
            "id": self.config.model,
            "object": "model",
            "created": 0,
            "owned_by": "inference-worker",
            "root": self.config.model,
            "parent": None,
            "max_model_len": self.config.max_model_len,
            "permission": [],
        }
        return _json(msgspec.json.encode({"object": "list", "data": [model]}))

    async def _set_fault(self, request: web.Request) -> web.Response:
        """Replace the fault; `{}` heals."""
        try:
            self.fault = msgspec.json.decode(await request.read() or b"{}", type=Fault)
        except msgspec.MsgspecError as exc:
            return _refused(_Refusal(400, f"not a fault: {exc}", "Bad Request"))
        self._faulted = 0
        return _json(msgspec.json.encode(self.fault))

    async def _metrics(self, _: web.Request) -> web.Response:
        now = asyncio.get_running_loop().time()
        held = sum(self._held_tokens(sequence, now) for sequence in self._running)
        usage = min(1.0, held / max(1, self.config.kv_capacity_tokens))
        label = f'engine="0",model_name="{_escaped(self.config.model)}"'
        lines: list[str] = []

        def family(name: str, kind: str, *values: tuple[str, float]) -> None:
            lines.append(f"# TYPE {name} {kind}")
            lines.extend(f"{name}{{{label}{more}}} {float(value)!r}" for more, value in values)

        family("vllm:num_requests_running", "gauge", ("", self.running))
        family("vllm:num_requests_waiting", "gauge", ("", self.waiting))
        family("vllm:kv_cache_usage_perc", "gauge", ("", usage))
        family("vllm:num_preemptions_total", "counter", ("", 0))
        family("vllm:prompt_tokens_total", "counter", ("", self._prompt_tokens))
        family("vllm:generation_tokens_total", "counter", ("", self._generation_tokens))
        family(
            "vllm:request_success_total",
            "counter",
            *((f',finished_reason="{reason}"', count) for reason, count in self._success.items()),
        )
        family("vllm:admission_rejections_total", "counter", (',reason="max_num_queued_reqs"', self._rejections))
        return web.Response(
            body="".join(f"{line}\n" for line in lines).encode(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    def _held_tokens(self, sequence: _Sequence, now: float) -> int:
        pace = self.config.tokens_per_second
        written = max(0.0, now - sequence.begun_at - self.config.latency_s) * pace if pace else 0.0
        return sequence.prompt_tokens + min(int(written), sequence.output_tokens) * sequence.choices

    # ------------------------------------------------------------ the work

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        chat = request.path == "/v1/chat/completions"
        try:
            asked, fault = await self._read(request)
            prompts = [_chat_prompt(asked)] if chat else [_prompt(text) for text in _texts(asked.prompt, "prompt")]
            self._check(asked, prompts)
            await _go_wrong(request, fault)
            answer = _Answer(self._id(request), int(self._now()), self.config, asked, prompts, chat)
            async with self._place(answer):
                if asked.stream:
                    return await self._stream(request, answer, fault)
                await asyncio.sleep(self.config.latency_s + self._writing_s(answer.longest))
                self._count(answer)
                return await _sent(request, answer.whole(), fault)
        except _Refusal as refusal:
            return _refused(refusal)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        except ConnectionResetError:
            self.aborted += 1
            return web.Response()
        except _Dropped:
            return web.Response()

    async def _embed(self, request: web.Request) -> web.StreamResponse:
        try:
            asked, fault = await self._read(request)
            texts = _texts(asked.input, "input")
            await _go_wrong(request, fault)
            await asyncio.sleep(self.config.latency_s)
        except _Refusal as refusal:
            return _refused(refusal)
        except _Dropped:
            return web.Response()
        tokens = sum(len(_WORD.findall(text)) for text in texts)
        self._prompt_tokens += tokens
        self._success["stop"] += 1
        size = asked.dimensions or EMBEDDING_SIZE
        data = [
            {"index": index, "object": "embedding", "embedding": embedding(text, size)}
            for index, text in enumerate(texts)
        ]
        body = {
            "id": f"embd-{self._id(request)}",
            "object": "list",
            "created": int(self._now()),
            "model": self.config.model,
            "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }
        return await _sent(request, msgspec.json.encode(body), fault)

    async def _read(self, request: web.Request) -> tuple[_Request, Fault]:
        """The request, and what is to go wrong with it."""
        self.requests += 1
        config = self.config
        if config.api_key is not None and request.headers.get("Authorization") != f"Bearer {config.api_key}":
            raise _Refusal(401, "Unauthorized", "Unauthorized")
        try:
            asked = msgspec.json.decode(await request.read(), type=_Request)
            header = request.headers.get("x-mock-fault")
            fault = msgspec.json.decode(header, type=Fault) if header is not None else asked.mock
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise _Refusal(400, f"1 validation error:\n  {exc}", "Bad Request") from exc
        if fault is None:
            fault = self._fault_now()
        if config.strict_model and asked.model not in (None, config.model):
            raise _Refusal(404, f"The model `{asked.model}` does not exist.", "NotFoundError", "model")
        return asked, fault

    def _fault_now(self) -> Fault:
        if self.fault.times is not None and self._faulted >= self.fault.times:
            return Fault()
        self._faulted += 1
        return self.fault

    def _check(self, asked: _Request, prompts: list["_Prompt"]) -> None:
        wanted = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
        if wanted is not None and wanted < 1:
            raise _Refusal(400, f"max_tokens must be at least 1, got {wanted}.", "BadRequestError", "max_tokens")
        if asked.n is not None and not 1 <= asked.n <= 128:
            raise _Refusal(400, f"n must be 1 to 128, got {asked.n}.", "BadRequestError", "n")
        if asked.stream_options is not None and not asked.stream:
            raise _Refusal(400, "Stream options can only be defined when `stream=True`.", "BadRequestError")
        longest = max((prompt.tokens for prompt in prompts), default=0)
        if longest + (wanted or 1) > self.config.max_model_len:
            raise _Refusal(
                400,
                f"This model's maximum context length is {self.config.max_model_len} tokens. However, you requested "
                f"{wanted or 1} output tokens and your prompt contains {longest} input tokens.",
                "BadRequestError",
                "input_tokens",
            )

    def _id(self, request: web.Request) -> str:
        return request.headers.get("X-Request-Id") or f"mock-{next(self._ids)}"

    @asynccontextmanager
    async def _place(self, answer: "_Answer") -> AsyncGenerator[None, None]:
        """Run inside: wait for a place in the order of arrival, or be refused."""
        loop = asyncio.get_running_loop()
        if self._taken < self.config.max_num_seqs:
            self._taken += 1
        else:
            if self.config.max_queued is not None and self.waiting >= self.config.max_queued:
                self._rejections += 1
                busy = "The engine is currently busy and cannot accept new requests. Please try again later."
                raise _Refusal(503, busy, "Service Unavailable")
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._pass_on()  # Its turn had come, in the moment in which it left.
                elif turn in self._waiting:
                    self._waiting.remove(turn)
                raise
        sequence = _Sequence(answer.prompt_tokens, answer.longest, len(answer.choices), loop.time())
        self._running.add(sequence)
        try:
            yield
        finally:
            self._running.remove(sequence)
            self._pass_on()

    def _pass_on(self) -> None:
        """Give a place to who has waited longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._taken -= 1

    def _writing_s(self, tokens: int) -> float:
        return tokens / self.config.tokens_per_second if self.config.tokens_per_second > 0 else 0.0

    def _count(self, answer: "_Answer") -> None:
        self._prompt_tokens += answer.prompt_tokens
        self._generation_tokens += answer.output_tokens
        for choice in answer.choices:
            self._success[choice.reason] += 1

    async def _stream(self, request: web.Request, answer: "_Answer", fault: Fault) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        first_at = loop.time() + self.config.latency_s
        await asyncio.sleep(self.config.latency_s)
        steps = list(answer.events())
        if fault.cut or fault.half_body:
            steps = steps[: max(1, len(steps) // 2)]
        if self.config.tokens_per_second > 0:
            for number, step in enumerate(steps):
                await asyncio.sleep(max(0.0, first_at + self._writing_s(number) - loop.time()))
                await response.write(step)
        else:
            await response.write(b"".join(steps))
        if fault.cut or fault.half_body:
            _close(request)
            return response
        self._count(answer)
        await response.write_eof()
        return response


async def run_mock_model(
    config: MockModelConfig, host: str, port: int, until: asyncio.Event, *, now: Callable[[], float] = lambda: 0.0
) -> None:
    """Serve until told to stop."""
    async with MockModel(config, now=now).serving(host, port):
        await until.wait()


# ---------------------------------------------------------------- answers


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


class _Answer:
    """What is said to one request, whole or as events."""

    def __init__(
        self, answer_id: str, created: int, config: MockModelConfig, asked: _Request, prompts: list[_Prompt], chat: bool
    ) -> None:
        self._head: dict[str, object] = {
            "id": f"chatcmpl-{answer_id}" if chat else f"cmpl-{answer_id}",
            "object": "chat.completion" if chat else "text_completion",
            "created": created,
            "model": config.model,
        }
        self._chat = chat
        self._with_usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
        most = asked.max_completion_tokens or asked.max_tokens or config.default_max_tokens
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


def _choice(words: list[str], least: int, most: int) -> _Choice:
    if len(words) < least:
        spoken = list(itertools.islice(itertools.cycle([f"{word.rstrip()} " for word in words]), least))
        return _Choice(spoken, "length" if least == most else "stop")
    return _Choice(words[:most], "stop" if len(words) <= most else "length")


def _prompt(text: str, around: int = 0) -> _Prompt:
    words = _WORD.findall(text) or ["mock"]
    return _Prompt(words, len(words) + around)


def _chat_prompt(asked: _Request) -> _Prompt:
    """The last message is said back; the others count."""
    if not asked.messages:
        missing = "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required'}"
        raise _Refusal(400, missing, "Bad Request", "body.messages")
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
        raise _Refusal(400, missing, "Bad Request", f"body.{name}")
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


# ---------------------------------------------------------------- HTTP


async def _go_wrong(request: web.Request, fault: Fault) -> None:
    if fault.delay_s > 0:
        await asyncio.sleep(fault.delay_s)
    if fault.hang:
        await asyncio.get_running_loop().create_future()
    if fault.drop:
        _close(request)
        raise _Dropped
    if fault.status is not None:
        said = f"This is a fault that was asked for: {fault.status}."
        raise _Refusal(fault.status, said, "MockFault", retry_after_s=fault.retry_after_s)


async def _sent(request: web.Request, body: bytes, fault: Fault) -> web.StreamResponse:
    if not fault.cut and not fault.half_body:
        return _json(body)
    response = web.StreamResponse(headers={"Content-Type": _JSON, "Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2] if fault.half_body else b"")
    _close(request)
    return response


def _close(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.close()


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, headers={"Content-Type": _JSON})


def _refused(refusal: _Refusal) -> web.Response:
    response = _json(refusal.body, refusal.status)
    if refusal.retry_after_s is not None:
        response.headers["Retry-After"] = f"{refusal.retry_after_s:g}"
    return response


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
