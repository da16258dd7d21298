"""The embedded whole: queue, store, model, worker and HTTP intake in one process, with nothing to install.

It is the worker of `run` between an intake and a mock model, not a second worker. What the environment names (RabbitMQ,
Redis, a model) is used instead of what is embedded, each by itself.
"""

import asyncio
import errno
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import httpx
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inference_worker import logs
from inference_worker.assembly import Outside, Stores, Worker, redis_stores, worker
from inference_worker.config.settings import Settings
from inference_worker.config.values import url_text, without_user
from inference_worker.confirmed_intake import ConfirmedIntake
from inference_worker.dev_samples import curl_lines, python_lines, sample_payload, send_samples
from inference_worker.dev_view import DevParts, View, log_level, what_is_missing
from inference_worker.dlq_reach import reach_of
from inference_worker.errors import TransportLost
from inference_worker.gateway.keys import KeyFile
from inference_worker.gateway.serving import serving
from inference_worker.job_book import HookBook, Intake, JobBook
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
from inference_worker.timing import stopped_within
from inference_worker.transports.memory import MemoryBroker

SLOTS: Final = 8
"""Requests in flight, unless RABBITMQ_PREFETCH says otherwise."""

LOOPBACK: Final = "127.0.0.1"
READY_S: Final = 60.0
"""How long the samples wait for everything to be ready."""

LINK_S: Final = 1.0
SAY_WHAT_IS_WAITED_FOR_S: Final = 2.0
PLAIN_COLUMNS: Final = 140


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
    logs.set_level(log_level(settings))
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
    view = View(parts, console, live=options.live and console.is_terminal)
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
                    await send_samples(
                        console,
                        stop,
                        url=view.url,
                        path=settings.model.infer_path,
                        model=view.model,
                        count=options.samples,
                    )
            if not stop.is_set():
                _say_how(view, settings.model.infer_path, keys, console)
            await view.show(stop)
        if sidecar.listener.in_flight:
            running, grace_s = sidecar.listener.in_flight, settings.ops.shutdown_grace_s
            console.print(f"Stopping: {running} running may finish within {grace_s:g} s")
    console.print(view.summary(), style="bold")


# ---------------------------------------------------------------- the parts


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


async def _parts(settings: Settings, outside: Outside, stack: AsyncExitStack) -> DevParts:
    """Queue and store, embedded unless the environment names others, and the worker between them."""
    memory, opened, link = None, None, None
    if settings.redis.given or settings.over_streams:
        stores = await stack.enter_async_context(redis_stores(settings))
    else:
        memory = MemoryStore(now=outside.now, lease_s=settings.redis.claim_lease_s, ttl_s=settings.redis.response_ttl_s)
        fleet = MemoryFleet(now=outside.now)
        stores = Stores(results=memory, outbox=memory, fleet_of=lambda _: fleet)
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
        fleet=stores.fleet_of(settings.queue),
        dead=reach_of(settings, outside.now, broker=broker, store=memory),
    )
    return DevParts(settings=settings, stores=stores, broker=broker, sidecar=sidecar, neighbours=neighbours)


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
        waited_s, why = loop.time() - begun, what_is_missing(sidecar)
        if waited_s > READY_S:
            console.print(f"Not ready after {READY_S:g} s, so no samples are sent. Jobs sent now wait in the queue.")
            return False
        if waited_s > SAY_WHAT_IS_WAITED_FOR_S and why and why != said:
            said = why
            console.print(f"Waiting (up to {READY_S:g} s) for {why}", style="yellow", markup=False)
        await stopped_within(stop, 0.05)
    return False


# ---------------------------------------------------------------- what is said once


def _say_where(
    settings: Settings, parts: DevParts, keys: KeyFile | None, view: View, console: Console, *, mocked: bool
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


def _say_how(view: View, infer_path: str, keys: KeyFile | None, console: Console) -> None:
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
