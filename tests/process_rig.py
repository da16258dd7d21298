"""A process of many queues in the test's own process, its documents given as Python objects.

    async with serving_mock(latency_s=0.2) as mock, processing(
        redis_url,
        queues=[queue("fast", mock.url, labels={"tier": "interactive"}), queue("slow", mock.url)],
        pools=[{"id": "default", "workers": 1}],
        merge={"type": "tier-priority"},
    ) as running:
        await running.submit("a", "b", queue="fast")
        results = await running.results(2)

Producers here only ZADD what the Go library would, and results are what lies in the lists. For signals and kills the
same documents go to a process of its own: `ProcessDocuments.arguments`.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from redis.asyncio import Redis as RedisClient

from inference_worker.assembly import Outside, Worker
from inference_worker.config.documents import DEFAULT_POOL
from inference_worker.llmd_messages import PublicRequest, Routing, new_envelope, write_envelope
from inference_worker.mock_model import MockModel, MockModelConfig
from inference_worker.process import process
from inference_worker.process_setup import read_setup
from inference_worker.producer_requests import Tokens
from inference_worker.transports.merged import MergedTransport
from tests.waiting import eventually

START_S: Final = 15.0
SOON_S: Final = 10.0
END_S: Final = 15.0
RESULTS: Final = "result-list"
PAYLOAD: Final[Mapping[str, object]] = {"model": "mock-model", "prompt": "tick tock", "max_tokens": 2}
PACE: Final = {"drain-timeout": "1s", "metrics-port": "0", "health-port": "0"}
"""Flags that make a test quick, or leave a port alone; a test that needs another value gives it."""

Document = Mapping[str, object]

_tokens = Tokens()


def queue(name: str, base_url: str, **options: object) -> Document:
    """A queue as the transport document has it; `options` are its other keys."""
    return {"queue_name": name, "igw_base_url": base_url, **options}


def envelope(
    request_id: str,
    *,
    token: str = "",
    deadline: int | None = None,
    payload: Mapping[str, object] = PAYLOAD,
    metadata: Mapping[str, str] | None = None,
    **routing: Any,
) -> tuple[bytes, int]:
    """A member as producers of the Go library write it, and its score; `routing` are fields of `Routing`.

    Those of one deadline come out in the order in which they were made.
    """
    until = int(time.time()) + 600 if deadline is None else deadline
    request = PublicRequest(
        id=request_id,
        created=int(time.time()),
        deadline=until,
        payload=json.dumps(payload).encode(),
        metadata=metadata or {},
    )
    internal = Routing(request_token=token or _tokens.draw(time.time()), **routing)
    return write_envelope(new_envelope(request, internal)), until


@dataclass(frozen=True, kw_only=True)
class ProcessDocuments:
    """What a process is told, as flags that have the documents inside them or beside them."""

    url: str
    queues: Sequence[Document]
    pools: Sequence[Document] | None = None
    merge: Document | None = None
    transforms: Document | None = None
    transport: Document = field(default_factory=dict)
    """Other keys of the transport document."""
    kind: str = "redis-sortedset"
    flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def queue_names(self) -> list[str]:
        return [str(one["queue_name"]) for one in self.queues]

    def given(self) -> tuple[dict[str, str], dict[str, str]]:
        """Flags by name, and the texts of the files that they name."""
        files = {"pools.json": self.pools, "merge.json": self.merge, "transforms.json": self.transforms}
        texts = {name: json.dumps(document) for name, document in files.items() if document is not None}
        flags = {
            "transport": self.kind,
            "transport-config": json.dumps({"url": self.url, "queues": self.queues, **self.transport}),
        }
        if self.pools is not None:
            flags["pool-config-file"] = "pools.json"
        if self.merge is not None:
            flags["request-merge-policy-config-file"] = "merge.json"
        if self.transforms is not None:
            flags["transform-config-file"] = "transforms.json"
        return {**flags, **PACE, **self.flags}, texts

    def arguments(self, write: Any) -> list[str]:
        """The command line after `process`; `write(name, text)` puts a document into a file and returns its path."""
        flags, texts = self.given()
        paths = {name: str(write(name, text)) for name, text in texts.items()}
        return [f"--{name}={paths.get(value, value)}" for name, value in flags.items()]


@dataclass(kw_only=True)
class Processing:
    """A process that runs as a task."""

    worker: Worker
    redis: RedisClient
    """The queues' database."""
    queues: Sequence[str]
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _task: "asyncio.Task[None] | None" = None

    async def submit(self, *ids: str, queue: str = "", **options: Any) -> None:
        """ZADD an envelope for each id into a queue, the first one if none is named; `options` as for `envelope`."""
        await submit(self.redis, queue or self.queues[0], ids, **options)

    async def results(self, count: int, name: str = RESULTS, within: float = SOON_S) -> list[dict[str, Any]]:
        """Wait until so many lie in a list; all that lie there, the oldest first."""

        async def enough() -> bool:
            return await self.redis.llen(name) >= count

        await eventually(enough, within=within, what=f"{count} results in {name}")
        return [json.loads(one) for one in reversed(await self.redis.lrange(name, 0, -1))]

    async def result(self, request_id: str, name: str = RESULTS, within: float = SOON_S) -> dict[str, Any]:
        """Wait for the first result of a request; it stays in the list."""

        async def there() -> dict[str, Any] | None:
            found = (json.loads(one) for one in reversed(await self.redis.lrange(name, 0, -1)))
            return next((one for one in found if one["id"] == request_id), None)

        return await eventually(there, within=within, what=f"the result of {request_id} in {name}")

    async def consuming(self, within: float = START_S) -> None:
        """Wait until every queue is connected; an end of the process is a failure at once."""

        def flows() -> bool:
            if self._task is not None and self._task.done():
                self._task.result()
                raise RuntimeError("the process has ended")
            sessions = [listener.transport for listener in self.worker.listeners.values()]
            return all(
                isinstance(session, MergedTransport) and not any(session.reasons().values()) for session in sessions
            )

        await eventually(flows, within=within, what="all queues are connected")

    async def lying(self) -> dict[str, int]:
        """What is left in Redis of each queue: waiting members and claims; empty where there is none."""
        left: dict[str, int] = {}
        for name in self.queues:
            waiting = await self.redis.zcard(name) + await self.redis.hlen(f"{name}:claimed")
            if waiting:
                left[name] = waiting
        return left

    async def stop(self) -> None:
        """Tell it to stop, and wait until it has."""
        self._stop.set()
        if self._task is not None:
            task, self._task = self._task, None
            async with asyncio.timeout(END_S):
                await task

    def told_to_stop(self) -> None:
        """As SIGTERM does; returns at once."""
        self._stop.set()


@asynccontextmanager
async def processing(
    redis_url: str,
    *,
    queues: Sequence[Document],
    pools: Sequence[Document] | None = None,
    merge: Document | None = None,
    transforms: Document | None = None,
    transport: Document | None = None,
    kind: str = "redis-sortedset",
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    seed: int = 1,
    ready: bool = True,
) -> AsyncGenerator[Processing, None]:
    """Run a process inside the context, once all its queues are connected unless `ready` is off; it is stopped at the
    end, if it was not before. Several on one Redis are told apart by their `seed`.
    """
    documents = ProcessDocuments(
        url=redis_url,
        queues=queues,
        pools=pools,
        merge=merge,
        transforms=transforms,
        transport=transport or {},
        kind=kind,
        flags=flags or {},
    )
    async with processing_of(documents, environ=environ, seed=seed, ready=ready) as running:
        yield running


@asynccontextmanager
async def processing_of(
    documents: ProcessDocuments,
    *,
    environ: Mapping[str, str] | None = None,
    seed: int = 1,
    ready: bool = True,
) -> AsyncGenerator[Processing, None]:
    """`processing`, of documents that are made already."""
    given, texts = documents.given()
    rng = random.Random(seed)
    setup = read_setup(given, dict(environ or {}), texts.__getitem__, rng)
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(RedisClient.from_url(documents.url, socket_timeout=None))
        made = await stack.enter_async_context(process(setup, Outside(now=time.time, rng=rng)))
        running = Processing(worker=made.worker, redis=redis, queues=documents.queue_names)
        running._task = asyncio.create_task(made.worker.run(running._stop), name="process")
        try:
            if ready:
                await running.consuming()
            yield running
        finally:
            await running.stop()


async def submit(redis: RedisClient, queue: str, ids: Iterable[str], **options: Any) -> None:
    """One ZADD for each, all of them in one pipeline."""
    async with redis.pipeline(transaction=False) as pipe:
        for request_id in ids:
            member, score = envelope(request_id, **options)
            pipe.zadd(queue, {member: score})
        await pipe.execute()


# ---------------------------------------------------------------- the model


class Watched:
    """A mock model that runs, and how full it is over a time."""

    def __init__(self, mock: MockModel, url: str) -> None:
        self.mock = mock
        self.url = url

    async def mean_running(self, seconds: float, every_s: float = 0.01) -> tuple[float, int]:
        """The mean number of running requests over so many seconds from now, weighted by time, and the most seen."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        area, most, last = 0.0, 0, loop.time()
        began = last
        while last < until:
            running = self.mock.running
            most = max(most, running)
            await asyncio.sleep(every_s)
            now = loop.time()
            area += (now - last) * (running + self.mock.running) / 2
            last = now
        return area / (last - began), most


@asynccontextmanager
async def serving_mock(**config: Any) -> AsyncGenerator[Watched, None]:
    """A mock model; `config` are fields of `MockModelConfig`. Its page of metrics is at `url` + `/metrics`."""
    mock = MockModel(MockModelConfig(**config), now=time.time)
    async with mock.serving() as url:
        yield Watched(mock, url)


# ---------------------------------------------------------------- Prometheus


@asynccontextmanager
async def serving_prometheus(mock: MockModel, *, capacity: int, every_s: float = 1.0) -> AsyncGenerator[str, None]:
    """A Prometheus that scrapes a router over one pool of `capacity` requests: a sample every `every_s`, and answers
    that have it until the next one, stamped with the time of the question, as the real one's are.
    """
    from aiohttp import web

    sample = (time.time(), 0.0)

    async def scrape() -> None:
        nonlocal sample
        while True:
            sample = (time.time(), mock.running / capacity)
            await asyncio.sleep(every_s)

    async def query(request: web.Request) -> web.Response:
        asked = request.query["query"]
        at, saturation = sample
        if "timestamp(" in asked:
            value = at
        elif "ready" in asked:
            value = float(capacity)
        else:
            value = 1 - saturation
        data = {"resultType": "vector", "result": [{"metric": {}, "value": [time.time(), repr(value)]}]}
        return web.json_response({"status": "success", "data": data})

    app = web.Application()
    app.router.add_get("/api/v1/query", query)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    scraping = asyncio.create_task(scrape(), name="scraping")
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        scraping.cancel()
        await asyncio.wait([scraping])
        await runner.cleanup()


__all__ = [
    "DEFAULT_POOL",
    "Document",
    "ProcessDocuments",
    "Processing",
    "Watched",
    "envelope",
    "processing",
    "processing_of",
    "queue",
    "serving_mock",
    "serving_prometheus",
    "submit",
]
