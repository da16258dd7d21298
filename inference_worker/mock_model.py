"""A model server for development and load tests: OpenAI's endpoints, vLLM's metrics, no model.

It answers with the words of the prompt, at the pace of its configuration. What it reports of itself (running, waiting,
tokens held) is true of what it does. It is deliberately no simulation of a scheduler: a request takes one place, and a
place is taken in the order of arrival.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import msgspec
from aiohttp import web

from inference_worker.mock_answers import (
    DEFAULT_MAX_TOKENS,
    MAX_MODEL_LEN,
    Asked,
    MockAnswer,
    Refusal,
    embeddings,
    generation,
    read,
    texts_to_embed,
)

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
    """How many may wait; one more is refused. None for any number."""
    busy_status: int = 503
    """What it is refused with."""
    kv_capacity_tokens: int = 100_000
    """How many tokens fit the cache, for `vllm:kv_cache_usage_perc`."""
    max_model_len: int = MAX_MODEL_LEN
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    strict_model: bool = False
    """Whether another model's name is an error 404."""
    api_key: str | None = field(default=None, repr=False)
    fault: Fault = field(default_factory=Fault)


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
        self.rejections = 0
        """Requests for which there was no room."""
        self._running: set[_Sequence] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._faulted = 0
        self._taken = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
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
            return _refused(Refusal(400, f"not a fault: {exc}", "Bad Request"))
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
        family("vllm:admission_rejections_total", "counter", (',reason="max_num_queued_reqs"', self.rejections))
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
            answer = generation(
                asked,
                self._id(request),
                chat=chat,
                model=self.config.model,
                created=int(self._now()),
                max_model_len=self.config.max_model_len,
                default_max_tokens=self.config.default_max_tokens,
            )
            await _go_wrong(request, fault)
            async with self._place(answer):
                if asked.stream:
                    return await self._stream(request, answer, fault)
                await asyncio.sleep(self.config.latency_s + self._writing_s(answer.longest))
                self._count(answer)
                return await _sent(request, answer.whole(), fault)
        except Refusal as refusal:
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
            texts = texts_to_embed(asked)
            await _go_wrong(request, fault)
            await asyncio.sleep(self.config.latency_s)
        except Refusal as refusal:
            return _refused(refusal)
        except _Dropped:
            return web.Response()
        answer = embeddings(
            texts, self._id(request), size=asked.dimensions, model=self.config.model, created=int(self._now())
        )
        self._prompt_tokens += answer.tokens
        self._success["stop"] += 1
        return await _sent(request, answer.body, fault)

    async def _read(self, request: web.Request) -> tuple[Asked, Fault]:
        """The request, and what is to go wrong with it."""
        self.requests += 1
        config = self.config
        if config.api_key is not None and request.headers.get("Authorization") != f"Bearer {config.api_key}":
            raise Refusal(401, "Unauthorized", "Unauthorized")
        asked = read(await request.read())
        header = request.headers.get("x-mock-fault")
        try:
            fault = msgspec.json.decode(header if header is not None else asked.mock, type=Fault | None)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise Refusal(400, f"1 validation error:\n  {exc}", "Bad Request") from exc
        if fault is None:
            fault = self._fault_now()
        if config.strict_model and asked.model not in (None, config.model):
            raise Refusal(404, f"The model `{asked.model}` does not exist.", "NotFoundError", "model")
        return asked, fault

    def _fault_now(self) -> Fault:
        if self.fault.times is not None and self._faulted >= self.fault.times:
            return Fault()
        self._faulted += 1
        return self.fault

    def _id(self, request: web.Request) -> str:
        return request.headers.get("X-Request-Id") or f"mock-{next(self._ids)}"

    @asynccontextmanager
    async def _place(self, answer: MockAnswer) -> AsyncGenerator[None, None]:
        """Run inside: wait for a place in the order of arrival, or be refused."""
        loop = asyncio.get_running_loop()
        if self._taken < self.config.max_num_seqs:
            self._taken += 1
        else:
            if self.config.max_queued is not None and self.waiting >= self.config.max_queued:
                self.rejections += 1
                busy = "The engine is currently busy and cannot accept new requests. Please try again later."
                kind = "Service Unavailable" if self.config.busy_status == 503 else "Too Many Requests"
                raise Refusal(self.config.busy_status, busy, kind)
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

    def _count(self, answer: MockAnswer) -> None:
        self._prompt_tokens += answer.prompt_tokens
        self._generation_tokens += answer.output_tokens
        for choice in answer.choices:
            self._success[choice.reason] += 1

    async def _stream(self, request: web.Request, answer: MockAnswer, fault: Fault) -> web.StreamResponse:
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
        raise Refusal(fault.status, said, "MockFault", retry_after_s=fault.retry_after_s)


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


def _refused(refusal: Refusal) -> web.Response:
    response = _json(refusal.body, refusal.status)
    if refusal.retry_after_s is not None:
        response.headers["Retry-After"] = f"{refusal.retry_after_s:g}"
    return response


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
