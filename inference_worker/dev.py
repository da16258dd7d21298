"""The embedded whole: queue, store, model, worker and HTTP intake in one process, with nothing to install.

It is the worker of `run` between an intake and a mock model, not a second worker. What the environment names (RabbitMQ,
Redis, a model) is used instead of what is embedded, each by itself.
"""

import asyncio
import errno
import io
import json
import shlex
import socket
import sys
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import httpx
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from inference_worker import logs
from inference_worker.assembly import Outside, Stores, Worker, redis_stores, worker
from inference_worker.config.settings import Settings
from inference_worker.config.values import url_text, without_user
from inference_worker.confirmed_intake import ConfirmedIntake
from inference_worker.dlq_reach import reach_of
from inference_worker.errors import TransportLost
from inference_worker.gateway.keys import KeyFile
from inference_worker.gateway.serving import serving
from inference_worker.job_book import HookBook, Intake, JobBook
from inference_worker.messages import ERROR_CODES
from inference_worker.mock_model import MockModel, MockModelConfig
from inference_worker.ports import Backlog
from inference_worker.results.fleet import MemoryFleet
from inference_worker.results.memory import MemoryStore
from inference_worker.results.memory_hook_book import MemoryHookBook
from inference_worker.results.memory_job_book import MemoryJobBook
from inference_worker.serve_gateway import (
    Assembled,
    Neighbours,
    assembled,
    is_loopback,
    key_file,
    listening_host,
    only,
    redis_books,
    stream_intake,
)
from inference_worker.timing import ended, stopped_within
from inference_worker.transports.memory import MemoryBroker

SLOTS: Final = 8
"""Requests in flight, unless RABBITMQ_PREFETCH says otherwise."""

LOOPBACK: Final = "127.0.0.1"
READY_S: Final = 60.0
"""How long the samples wait for everything to be ready."""

LINK_S: Final = 1.0
SAMPLE_S: Final = 120.0
SAMPLE_TOKENS: Final = 64
SAY_WHAT_IS_WAITED_FOR_S: Final = 2.0
LOOK_S: Final = 0.25
BACKLOG_S: Final = 1.0
PLAIN_S: Final = 1.0
"""At most one plain line in so many seconds."""

PLAIN_COLUMNS: Final = 140

PROMPTS: Final = (
    "What is a message queue good for?",
    "Tell me a very short story about a rabbit that carries letters.",
    "Name three things that can go wrong between two computers.",
    "Why is the sky blue?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DevOptions:
    """What the command line says."""

    samples: int
    live: bool
    """Whether a live view is wanted, where there is a terminal."""
    mock: MockModelConfig


async def run_dev(settings: Settings, outside: Outside, options: DevOptions, stop: asyncio.Event) -> None:
    """The `dev` command: until told to stop.

    Raises:
        OSError: a port that the environment names is taken.
    """
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, soft_wrap=True, width=PLAIN_COLUMNS)
    logs.set_level(_log_level(settings))
    try:
        async with AsyncExitStack() as stack:
            await _run(settings, outside, options, stop, console, stack)
    except BaseExceptionGroup as group:
        if (error := only(group)) is group:
            raise
        raise error from group


async def _run(
    settings: Settings,
    outside: Outside,
    options: DevOptions,
    stop: asyncio.Event,
    console: Console,
    stack: AsyncExitStack,
) -> None:
    console.print("Starting: queue, result store, model, worker and HTTP intake in this process", style="bold")
    mocked = not settings.model.url_given
    settings = await _with_model(_with_defaults(settings, console), outside, options, stack)
    parts = await _parts(settings, outside, stack)
    sidecar = parts.sidecar
    keys = key_file(settings)
    view = _View(parts, console, live=options.live and console.is_terminal)
    gateway = await assembled(settings, outside, parts.neighbours, keys, stack, model=lambda: view.model)
    async with _working(sidecar):
        async with AsyncExitStack() as intake:
            await _linked(sidecar)
            await intake.enter_async_context(gateway.running())
            view.url = await _open_intake(settings, gateway, keys, intake, console)
            view.model = await _model_name(settings)
            _say_where(settings, parts, keys, view, console, mocked=mocked)
            if await _ready(sidecar, stop, console):
                view.model = await _model_name(settings)  # Which one that was still loading could not say before.
                if keys is None:
                    await _send_samples(view, settings, options.samples, stop, console)
            if not stop.is_set():
                _say_how(view, settings.model.infer_path, keys, console)
            await view.show(stop)
        if sidecar.listener.in_flight:
            running, grace_s = sidecar.listener.in_flight, settings.ops.shutdown_grace_s
            console.print(f"Stopping: {running} running may finish within {grace_s:g} s")
    console.print(view.summary(), style="bold")


# ---------------------------------------------------------------- the parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    settings: Settings
    stores: Stores
    broker: MemoryBroker | None
    """None where the queue is not embedded."""
    sidecar: Worker
    neighbours: Neighbours


class _Publisher:
    """Publishes over whatever session the worker has now."""

    def __init__(self, sidecar: Worker) -> None:
        self._listener = sidecar.listener

    async def __call__(self, body: bytes, *, message_id: str) -> None:
        transport = self._listener.transport
        if transport is None:
            raise TransportLost(self._listener.link_reason or "the connection was just lost")
        await transport.publish(body, message_id=message_id)

    async def backlog(self) -> Backlog:
        """What waits, as that session sees it."""
        transport = self._listener.transport
        if transport is None:
            raise TransportLost(self._listener.link_reason or "the connection was just lost")
        return await transport.backlog()


def _with_defaults(settings: Settings, console: Console) -> Settings:
    """What suits a developer's machine where the environment says nothing: loopback, a free port, several slots."""
    rabbitmq, streams, ops = settings.rabbitmq, settings.streams, settings.ops
    if "prefetch" not in rabbitmq.model_fields_set:
        rabbitmq = rabbitmq.model_copy(update={"prefetch": SLOTS})
    if "concurrency" not in streams.model_fields_set:
        streams = streams.model_copy(update={"concurrency": SLOTS})
    if "host" not in ops.model_fields_set:
        ops = ops.model_copy(update={"host": LOOPBACK})
    if ops.port and (why := _cannot_listen(ops.host, ops.port)) is not None:
        if "port" in ops.model_fields_set:
            raise OSError(
                f"WORKER_HTTP_PORT: cannot listen on {ops.host}:{ops.port}: {why}; choose another, or 0 for none"
            )
        free = _free_port(ops.host)
        console.print(f"Port {ops.port} is taken; the worker's own page is on {free} instead (WORKER_HTTP_PORT)")
        ops = ops.model_copy(update={"port": free})
    return settings.model_copy(update={"rabbitmq": rabbitmq, "streams": streams, "ops": ops})


def _cannot_listen(host: str, port: int) -> str | None:
    """Why nothing can listen there, if so."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as exc:
        return "it is in use" if exc.errno == errno.EADDRINUSE else str(exc)
    return None


def _free_port(host: str) -> int:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.bind(address)
        return int(sock.getsockname()[1])


async def _with_model(settings: Settings, outside: Outside, options: DevOptions, stack: AsyncExitStack) -> Settings:
    """The user's model, or the mock on a free port; and the name that it is called by."""
    brought = settings.identity.hf_model_id == MockModelConfig().model
    if settings.model.url_given:
        name = await _model_name(settings) if brought else settings.identity.hf_model_id
        return _named(settings, name)
    config = options.mock
    if config.model == MockModelConfig().model and not brought:
        config = replace(config, model=settings.identity.hf_model_id)
    url = await stack.enter_async_context(MockModel(config, now=outside.now).serving(LOOPBACK, 0))
    model = settings.model.model_copy(update={"url": url_text(url)})
    return _named(
        settings.model_copy(update={"model": model}), config.model if brought else settings.identity.hf_model_id
    )


def _named(settings: Settings, hf_model_id: str) -> Settings:
    return settings.model_copy(update={"identity": settings.identity.model_copy(update={"hf_model_id": hf_model_id})})


async def _model_name(settings: Settings) -> str:
    """The first model that the server says it has, for requests that it will take; else what the settings say."""
    key = settings.model.api_key_now()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=3.0, verify=settings.tls.context() or True) as client:
            answer = await client.get(f"{settings.model.url_now()}/v1/models", headers=headers)
        name = msgspec.json.decode(answer.content, type=_Models).data[0].id
    except (httpx.HTTPError, msgspec.MsgspecError, UnicodeDecodeError, IndexError):
        return settings.identity.hf_model_id
    return name


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def _parts(settings: Settings, outside: Outside, stack: AsyncExitStack) -> _Parts:
    """Queue and store, embedded unless the environment names others, and the worker between them."""
    memory, opened, link = None, None, None
    if settings.redis.given or settings.over_streams:
        stores = await stack.enter_async_context(redis_stores(settings))
    else:
        memory = MemoryStore(now=outside.now, lease_s=settings.redis.claim_lease_s, ttl_s=settings.redis.response_ttl_s)
        stores = Stores(results=memory, outbox=memory, fleet=MemoryFleet(now=outside.now))
    broker = None
    if settings.transport.kind == "memory" or not (settings.rabbitmq.given or settings.transport.given):
        broker = MemoryBroker(store=stores.results, now=outside.now, queue=settings.identity.request_queue)
        opened = broker.connect
    sidecar = await stack.enter_async_context(
        worker(settings, outside, stores=stores, connect=None if opened is None else lambda _store, _metrics: opened)
    )
    book: JobBook
    hooks: HookBook
    if memory is None:
        book, hooks, link = await redis_books(settings, outside, stack)
    else:
        book = memory_book = MemoryJobBook(memory, ttl_s=settings.redis.response_ttl_s, now=outside.now)
        hooks = MemoryHookBook(memory_book, memory, now=outside.now)
    intake: Intake
    if settings.over_streams and link is not None:
        intake = stream_intake(settings, outside, link)
    else:
        publisher = _Publisher(sidecar)
        intake = ConfirmedIntake(book, publisher, publisher.backlog)
    neighbours = Neighbours(
        intake=intake,
        book=book,
        hooks=hooks,
        results=stores.results,
        fleet=stores.fleet,
        dead=reach_of(settings, outside.now, broker=broker, store=memory),
    )
    return _Parts(settings=settings, stores=stores, broker=broker, sidecar=sidecar, neighbours=neighbours)


@asynccontextmanager
async def _working(sidecar: Worker) -> AsyncGenerator[None, None]:
    """The worker at work; leaving the context stops it and waits until it has drained."""
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(sidecar.run(over), name="worker")
        try:
            yield
        finally:
            over.set()


async def _open_intake(
    settings: Settings, gateway: Assembled, keys: KeyFile | None, stack: AsyncExitStack, console: Console
) -> str:
    """The intake's URL, as one reaches it from here."""
    host, port, web, stopping = settings.gateway.host, settings.gateway.port, gateway.web, gateway.jobs.stopping
    if keys is None and not is_loopback(host):
        host = listening_host(settings, keys)
    try:
        url = await stack.enter_async_context(serving(web, host, port, stopping))
    except OSError as exc:
        taken = isinstance(exc.__cause__, OSError) and exc.__cause__.errno == errno.EADDRINUSE
        if not taken or "port" in settings.gateway.model_fields_set:
            raise
        url = await stack.enter_async_context(serving(web, host, 0, stopping))
        console.print(f"Port {port} is taken; the HTTP intake is on {url.rpartition(':')[2]} instead (GATEWAY_PORT)")
    return url.replace("//0.0.0.0:", f"//{LOOPBACK}:").replace("//[::]:", "//[::1]:")


async def _linked(sidecar: Worker) -> None:
    """Give the worker a moment to connect: its session is the intake's, too, and a first look would miss it."""
    until = asyncio.get_running_loop().time() + LINK_S
    while sidecar.listener.transport is None and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0.01)


async def _ready(sidecar: Worker, stop: asyncio.Event, console: Console) -> bool:
    """Wait until messages flow, saying what for; not for ever: what comes meanwhile waits in the queue."""
    loop = asyncio.get_running_loop()
    begun, said = loop.time(), ""
    while not stop.is_set():
        if sidecar.listener.state == "consuming":
            return True
        waited_s, why = loop.time() - begun, _what_is_missing(sidecar)
        if waited_s > READY_S:
            console.print(f"Not ready after {READY_S:g} s, so no samples are sent. Jobs sent now wait in the queue.")
            return False
        if waited_s > SAY_WHAT_IS_WAITED_FOR_S and why and why != said:
            said = why
            console.print(f"Waiting (up to {READY_S:g} s) for {why}", style="yellow", markup=False)
        await stopped_within(stop, 0.05)
    return False


def _what_is_missing(sidecar: Worker) -> str:
    listener = sidecar.listener
    if listener.transport is None:
        return f"RabbitMQ: {listener.link_reason}" if listener.link_reason else "the queue"
    names = {"model": "the model", "store": "the result store", "kept": "answers to be stored"}
    return ", ".join(f"{names.get(reason, reason)}: {why}" for reason, why in listener.suspended.items())


# ---------------------------------------------------------------- what is said once


def _say_where(
    settings: Settings, parts: _Parts, keys: KeyFile | None, view: "_View", console: Console, *, mocked: bool
) -> None:
    redis, model, ops = settings.redis, settings.model, settings.ops
    table = Table.grid(padding=(0, 2))
    embedded = "embedded, gone when this process ends"
    queue = embedded if parts.broker is not None else f"{settings.queue_address}, queue {settings.queue}"
    asked = without_user(model.url_now())
    rows = (
        ("HTTP intake", f"{view.url}/v1/jobs"),
        ("for OpenAI", f"{view.url}/v1"),
        ("queue", queue),
        ("results", redis.address if redis.given or settings.over_streams else embedded),
        ("model", f"{view.model} at {asked}{' (a mock: it says back what it is told)' if mocked else ''}"),
        (
            "worker",
            f"{settings.slots} requests at a time" + (f", http://{ops.host}:{ops.port}/status" if ops.port else ""),
        ),
    )
    for name, value in rows:
        table.add_row(Text(name, style="dim"), Text(value))
    console.print(table)
    others = [
        name
        for name, host, on in (
            ("GATEWAY_HOST", settings.gateway.host, keys is not None),
            ("WORKER_HTTP_HOST", ops.host, bool(ops.port)),
        )
        if on and not is_loopback(host)
    ]
    if keys is not None:
        console.print("An API key of GATEWAY_API_KEYS_FILE is needed", style="dim")
    elif not is_loopback(settings.gateway.host):
        console.print(
            "GATEWAY_HOST has no effect: without GATEWAY_API_KEYS_FILE nobody is asked who he is, and this machine "
            "alone is listened to",
            style="yellow",
        )
    if others:
        console.print(f"Reachable from other machines ({', '.join(others)})", style="yellow")
    else:
        console.print("Reachable from this machine alone", style="dim")


def _say_how(view: "_View", infer_path: str, keys: KeyFile | None, console: Console) -> None:
    """Commands to copy; each line is printed as it is, however narrow the terminal."""
    if keys is not None:
        console.print("Send one yourself with an API key: docs/gateway.md", style="bold")
        return
    payload = sample_payload(infer_path, view.model, "Hello, queue", stream=False)
    console.print("\nSend one yourself:\n", style="bold")
    for line in curl_lines(view.url, payload):
        console.out(line, highlight=False)
    console.print("\nOr from Python:\n", style="bold")
    for line in python_lines(view.url, payload):
        console.out(line, highlight=False)
    console.print()


def sample_payload(infer_path: str, model: str, text: str, *, stream: bool) -> dict[str, object]:
    """A request in the shape that the inference path takes."""
    if infer_path.endswith("/embeddings"):
        return {"model": model, "input": text}
    payload: dict[str, object] = {"model": model}
    if infer_path.endswith("/completions") and not infer_path.endswith("/chat/completions"):
        payload["prompt"] = text
    else:
        payload["messages"] = [{"role": "user", "content": text}]
    return payload | ({"stream": True} if stream else {})


def curl_lines(url: str, payload: Mapping[str, object]) -> Sequence[str]:
    """Lines for a shell: submit, then wait for the result."""
    body = shlex.quote(json.dumps({"payload": payload}, ensure_ascii=False))
    return (
        f"job=$(curl -sS {url}/v1/jobs -H 'Content-Type: application/json' \\",
        f"  -d {body} \\",
        r"""  | sed 's/.*"job_id":"\([^"]*\)".*/\1/')""",
        f'curl -sS "{url}/v1/jobs/$job?wait=30"',
    )


def python_lines(url: str, payload: Mapping[str, object]) -> Sequence[str]:
    """Lines for Python, with nothing but its standard library."""
    return (
        "import json, urllib.request",
        f'jobs = "{url}/v1/jobs"',
        f"body = {json.dumps({'payload': payload}, ensure_ascii=False)}",
        'request = urllib.request.Request(jobs, json.dumps(body).encode(), {"Content-Type": "application/json"})',
        'job_id = json.load(urllib.request.urlopen(request))["job_id"]',
        'print(json.load(urllib.request.urlopen(f"{jobs}/{job_id}?wait=30")))',
    )


# ---------------------------------------------------------------- samples


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    job_id: str
    status: str
    seconds: float
    asked: str
    tokens: str
    text: str


async def _send_samples(view: "_View", settings: Settings, count: int, stop: asyncio.Event, console: Console) -> None:
    """Send a few requests through the intake, as anybody would, and show what came back."""
    if not count:
        return
    console.print(f"\nSending {count} sample request{'s' if count != 1 else ''} through the HTTP intake", style="bold")
    path = settings.model.infer_path
    async with httpx.AsyncClient(base_url=view.url, trust_env=False, timeout=90.0) as client:
        sending = asyncio.create_task(_send_all(client, path, view.model, count))
        told = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([sending, told], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await ended(told)
            if not sending.done():
                await ended(sending)
    if not sending.cancelled():
        console.print(_sample_table(sending.result()))


async def _send_all(client: httpx.AsyncClient, path: str, model: str, count: int) -> list[_Sample]:
    async with asyncio.TaskGroup() as group:
        sending = [group.create_task(_send(client, path, model, number)) for number in range(count)]
    return [task.result() for task in sending]


async def _send(client: httpx.AsyncClient, path: str, model: str, number: int) -> _Sample:
    stream = number % 3 == 1 and "completions" in path
    asked = PROMPTS[number % len(PROMPTS)]
    payload = sample_payload(path, model, asked, stream=stream)
    if "completions" in path:
        payload["max_tokens"] = SAMPLE_TOKENS
    begun = time.monotonic()
    job_id, status, tokens, text = "", "failed", "", ""
    try:
        answer = await client.post("/v1/jobs", json={"payload": payload, "timeout_s": SAMPLE_S})
        view: dict[str, Any] = answer.json()
        job_id = str(view.get("job_id", ""))
        while job_id and time.monotonic() - begun < SAMPLE_S:
            view = (await client.get(f"/v1/jobs/{job_id}", params={"wait": 30})).json()
            if view.get("status") not in ("queued", "running", "retrying"):
                break
        status = str(view.get("status"))
        tokens, text = _said(view)
    except (httpx.HTTPError, ValueError) as exc:
        text = f"{type(exc).__name__}: {exc}"
    seconds = time.monotonic() - begun
    shown = f"{asked} (streamed)" if stream else asked
    return _Sample(job_id=job_id, status=status, seconds=seconds, asked=shown, tokens=tokens, text=text)


def _said(view: Mapping[str, Any]) -> tuple[str, str]:
    """Tokens and text of an answer; of a failure its reason."""
    result = view.get("result")
    if not isinstance(result, dict):
        return "", str(view.get("error") or view.get("detail") or "")
    usage = result.get("usage")
    tokens = usage.get("total_tokens", "") if isinstance(usage, dict) else ""
    choices = result.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = first.get("message")
    text = message.get("content") if isinstance(message, dict) else first.get("text")
    if text is None and isinstance(result.get("data"), list):
        text = f"{len(result['data'])} embedding(s)"
    return str(tokens), str(text or "")


def _sample_table(samples: Sequence[_Sample]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("job", "status", "seconds", "tokens", "asked", "answer"):
        table.add_column(
            name, justify="right" if name in ("seconds", "tokens") else "left", no_wrap=name in ("job", "status")
        )
    for sample in samples:
        colour = "green" if sample.status == "succeeded" else "red"
        table.add_row(
            Text(sample.job_id[:8] or "-"),
            Text(sample.status, style=colour),
            f"{sample.seconds:.2f}",
            sample.tokens,
            Text(sample.asked),
            Text(_shortened(sample.text)),
        )
    return table


def _shortened(text: str, most: int = 70) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


# ---------------------------------------------------------------- the view


@dataclass(frozen=True, slots=True)
class _Numbers:
    queued: int | None
    running: int
    done: int
    failed: int
    retried: int
    state: str

    def line(self) -> str:
        queued = "?" if self.queued is None else self.queued
        retried = f", retried {self.retried}" if self.retried else ""
        state = "" if self.state == "consuming" else f" ({self.state})"
        return f"queued {queued}, running {self.running}, done {self.done}, failed {self.failed}{retried}{state}"


class _View:
    """Shows what is queued, running, done and failed until told to stop."""

    def __init__(self, parts: _Parts, console: Console, *, live: bool) -> None:
        self._parts = parts
        self._console = console
        self._live = live
        self._queued: int | None = None
        self._looked_at = -BACKLOG_S
        self.url = ""
        self.model = ""

    async def show(self, stop: asyncio.Event) -> None:
        """Until told to stop."""
        if self._live:
            await self._show_live(stop)
        else:
            await self._show_lines(stop)

    def summary(self) -> str:
        """One line for the end."""
        now, broker = self._count(), self._parts.broker
        if broker is None:
            kept_in = "Redis" if self._parts.settings.over_streams else "RabbitMQ"
            left = f"what was queued is in {kept_in}"
        else:
            lost = len(broker.ready) + broker.delayed
            left = (
                f"{lost} queued {'is' if lost == 1 else 'are'} gone with the embedded queue"
                if lost
                else "the queue is empty"
            )
        return f"Stopped: {now.done} done, {now.failed} failed; {left}"

    async def _show_live(self, stop: asyncio.Event) -> None:
        self._console.print("What happens now (Ctrl-C stops it):", style="bold")
        with (
            _logs_above(self._console, self._parts.settings),
            Live(
                self._panel(await self._numbers()), console=self._console, auto_refresh=False, redirect_stdout=False
            ) as live,
        ):
            while not await stopped_within(stop, LOOK_S):
                live.update(self._panel(await self._numbers()), refresh=True)
            live.update(self._panel(await self._numbers()), refresh=True)

    async def _show_lines(self, stop: asyncio.Event) -> None:
        self._console.print("What happens now, a line for each change (Ctrl-C stops it):")
        shown = None
        while not stop.is_set():
            if (now := await self._numbers()) != shown:
                shown = now
                self._console.print(now.line(), markup=False)
                await stopped_within(stop, PLAIN_S)
            else:
                await stopped_within(stop, LOOK_S)

    def _panel(self, now: _Numbers) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 4, 0, 0))
        columns = (
            ("queued", "cyan"),
            ("running", "yellow"),
            ("done", "green"),
            ("failed", "red"),
            ("retried", "magenta"),
        )
        for name, colour in columns:
            table.add_column(name, justify="right", header_style="dim", style=colour)
        queued = "?" if now.queued is None else str(now.queued)
        table.add_row(queued, str(now.running), str(now.done), str(now.failed), str(now.retried))
        missing = "" if now.state == "consuming" else f"{now.state}: {_what_is_missing(self._parts.sidecar)}"
        return Group(table, Text(missing, style="yellow"))

    async def _numbers(self) -> _Numbers:
        loop, transport = asyncio.get_running_loop(), self._parts.sidecar.listener.transport
        if transport is None:
            self._queued = None
        elif self._parts.broker is not None or loop.time() - self._looked_at >= BACKLOG_S:
            self._looked_at = loop.time()
            try:
                backlog = await transport.backlog()
                self._queued = backlog.ready + (backlog.delayed or 0)
            except TransportLost:
                self._queued = None
        return self._count()

    def _count(self) -> _Numbers:
        sidecar = self._parts.sidecar
        value = sidecar.metrics.registry.get_sample_value
        results = "inference_worker_results_total"
        failed = sum(value(results, {"status": "failed", "error_code": code}) or 0 for code in ERROR_CODES)
        return _Numbers(
            queued=self._queued,
            running=sidecar.listener.in_flight,
            done=round(value(results, {"status": "completed", "error_code": "none"}) or 0),
            failed=round(failed),
            retried=round(value("inference_worker_dispositions_total", {"disposition": "retry"}) or 0),
            state=sidecar.listener.state,
        )


@contextmanager
def _logs_above(console: Console, settings: Settings) -> Generator[None, None, None]:
    """Log lines that go to the same terminal are printed above the live view instead of through it."""
    if not sys.stderr.isatty():
        yield
        return
    logs.configure(_log_level(settings), "console", _Above(console))
    try:
        yield
    finally:
        logs.configure(_log_level(settings), "console", sys.stderr)


def _log_level(settings: Settings) -> logs.Level:
    """Quiet, unless the environment says otherwise: the view tells what `info` would."""
    return settings.log.level if "level" in settings.log.model_fields_set else "warning"


class _Above(io.StringIO):
    """Where a log writes lines; keeps none."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def write(self, text: str) -> int:
        if line := text.rstrip("\n"):
            self._console.print(Text.from_ansi(line))
        return len(text)

    def isatty(self) -> bool:
        return True
