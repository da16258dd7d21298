"""More work than capacity behind a saturation gate at 0.8: how full the model is, by time, after a warm-up.

Everything is real but the model: the command as a process of its own, or two of them on one pool, Redis, the gate's own
metrics source. The model takes any number of requests, so that an overshoot would be seen; its capacity is what the
gate is told, or is to find out. Requests take between a quarter of a second and two.
"""

import asyncio
import random
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from redis.asyncio import Redis as RedisClient
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.faults.processes import WorkerProcess
from tests.process_rig import (
    Document,
    ProcessDocuments,
    Watched,
    queue,
    serving_mock,
    serving_prometheus,
    submit,
)
from tests.services import Redis
from tests.waiting import eventually

CAPACITY: Final = 25
WORKERS: Final = 64
THRESHOLD: Final = 0.8
LEAST: Final = 0.75
MOST: Final = 0.82
WARM_UP_S: Final = 12.0
"""Where the gate is told the capacity; where it is to find it out, by steps of at most twice the last, seven readings.
Two processes know of each other after five seconds."""
AT_ONCE: Final = 4
"""Cases that are measured beside each other; the machine is nearly idle with so many."""
BACKLOG: Final = 400
"""Requests that wait at all times."""

Source = Literal["endpoint-scrape", "prometheus", "prometheus, told"]
Place = Literal["pool", "pool, refusing", "queue", "two queues"]
"""A pool's gate keeps waiting what it does not let in, `wait-on-refuse`, or gives it back to its queue."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One set-up."""

    source: Source
    place: Place
    refresh_s: float
    processes: int = 1
    name: str = "work"
    """Of its queues: several cases may share a Redis."""

    @property
    def warm_up_s(self) -> float:
        return max(WARM_UP_S, 7 * self.refresh_s) if self.source == "prometheus" else WARM_UP_S

    def gate(self, mock_url: str) -> tuple[str, Document]:
        """The gate itself."""
        if self.source == "endpoint-scrape":
            return "endpoint-scrape", {
                "url": f"{mock_url}/metrics",
                "metric": "vllm:num_requests_running",
                "max_count_per_pod": CAPACITY,
                "baseline": round(1 - THRESHOLD, 3),
            }
        told: Document = {"max_concurrency": CAPACITY} if self.source == "prometheus, told" else {}
        return "prometheus-saturation", {"pool": "pool", "threshold": THRESHOLD, **told}

    def documents(self, redis_url: str, mock_url: str, prometheus_url: str) -> ProcessDocuments:
        """What the process is told."""
        kind, params = self.gate(mock_url)
        refusing: Document = {"gate_type": kind, "gate_params": params}
        waiting: Document = {"gate_type": "wait-on-refuse", "gate_params": {"gate": refusing}}
        before_queue = refusing if self.place in ("queue", "two queues") else {}
        before_pool = {"pool": waiting, "pool, refusing": refusing}.get(self.place, {})
        names = [self.name, f"{self.name}-2"] if self.place == "two queues" else [self.name]
        return ProcessDocuments(
            url=redis_url,
            transport={"result_queue_name": f"{self.name}-results", "retry_queue_name": f"{self.name}-retries"},
            queues=[queue(name, mock_url, **before_queue) for name in names],
            pools=[{"id": "default", "workers": WORKERS, **before_pool}],
            flags={"prometheus-url": prometheus_url, "prometheus-cache-ttl": f"{self.refresh_s:g}s"},
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How full the model was."""

    mean: float
    most: float

    @property
    def met(self) -> bool:
        return LEAST <= self.mean <= MOST


@asynccontextmanager
async def _running(
    case: Case, documents: ProcessDocuments, folder: Path, name: str
) -> AsyncGenerator[list[WorkerProcess], None]:
    def write(file: str, text: str) -> Path:
        path = folder / f"{name}-{file}"
        path.write_text(text)
        return path

    command = [sys.executable, "-m", "inference_worker", "process", *documents.arguments(write)]
    async with AsyncExitStack() as stack:
        started = []
        for number in range(case.processes):
            one = WorkerProcess({}, output=folder / f"{name}-{number}.log", command=command)
            started.append(await stack.enter_async_context(one))
        yield started


async def flood(redis: RedisClient, documents: ProcessDocuments) -> None:
    """Keep every queue full, and throw the results away."""
    number, rng = 0, random.Random(1)
    while True:
        for name in documents.queue_names:
            missing = BACKLOG - await redis.zcard(name)
            for _ in range(max(missing, 0)):
                number += 1
                payload = {"model": "mock-model", "prompt": "w " * 40, "max_tokens": rng.randint(5, 40)}
                await submit(redis, name, [f"r{number}"], payload=payload)
        await redis.delete(str(documents.transport["result_queue_name"]))
        await asyncio.sleep(0.2)


async def measured(case: Case, redis_url: str, seconds: float, folder: Path, name: str) -> Measured:
    """Run a case."""
    async with (
        serving_mock(tokens_per_second=20.0, max_num_seqs=100_000) as mock,
        serving_prometheus(mock.mock, capacity=CAPACITY) as prometheus_url,
        RedisClient.from_url(redis_url, socket_timeout=None) as redis,
    ):
        await redis.flushdb()
        documents = case.documents(redis_url, mock.url, prometheus_url)
        flooding = asyncio.create_task(flood(redis, documents))
        try:
            async with _running(case, documents, folder, name) as processes:
                await _begun(mock, processes)
                await asyncio.sleep(case.warm_up_s)
                mean, most = await mock.mean_running(seconds)
                for one in processes:
                    assert one.returncode is None, one.log[-2000:]
        finally:
            flooding.cancel()
            await asyncio.wait([flooding])
            await redis.flushdb()
        if not flooding.cancelled():
            flooding.result()
    return Measured(mean=mean / CAPACITY, most=most / CAPACITY)


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """How full the model was that says 429 above its capacity, and how often it had to."""

    mean: float
    shed: float


async def learnt(processes: int, reserved: bool, redis_url: str, seconds: float, folder: Path) -> Learnt:
    """The gate `aimd` before a pool: nobody tells it the capacity, and it sees no metric."""
    name = f"aimd-{processes}-{reserved}"
    case = Case(source="endpoint-scrape", place="pool", refresh_s=5.0, processes=processes)
    async with (
        serving_mock(tokens_per_second=20.0, max_num_seqs=CAPACITY, max_queued=0, busy_status=429) as mock,
        RedisClient.from_url(redis_url, socket_timeout=None) as redis,
    ):
        await redis.flushdb()
        labels: Document = {"labels": {"classification": "reserved"}} if reserved else {}
        documents = ProcessDocuments(
            url=redis_url,
            transport={"result_queue_name": "results"},
            queues=[queue("work", mock.url, **labels)],
            pools=[{"id": "default", "workers": WORKERS, "gate_type": "aimd"}],
        )
        flooding = asyncio.create_task(flood(redis, documents))
        try:
            async with _running(case, documents, folder, name) as running:
                await _begun(mock, running)
                await asyncio.sleep(WARM_UP_S)
                requests, shed = mock.mock.requests, mock.mock.rejections
                mean, _ = await mock.mean_running(seconds)
                requests, shed = mock.mock.requests - requests, mock.mock.rejections - shed
        finally:
            flooding.cancel()
            await asyncio.wait([flooding])
            await redis.flushdb()
    return Learnt(mean=mean / CAPACITY, shed=shed / requests)


async def _begun(mock: Watched, processes: list[WorkerProcess]) -> None:
    def begun() -> bool:
        for one in processes:
            assert one.returncode is None, one.log[-2000:]
        return mock.mock.requests > 0

    await eventually(begun, within=30, what="the first request at the model")


def cases() -> list[Case]:
    """All of them."""
    sources: tuple[Source, ...] = ("endpoint-scrape", "prometheus", "prometheus, told")
    places: tuple[Place, ...] = ("pool", "pool, refusing", "queue", "two queues")
    return [
        Case(source=source, place=place, refresh_s=refresh_s, processes=processes)
        for processes in (1, 2)
        for source in sources
        for place in places
        for refresh_s in (5.0, 1.0)
        if processes == 1 or place in ("pool", "queue")
    ]


async def saturation_bar(seconds: float, redis: Redis, console: Console, only: str = "") -> bool:
    """All cases, some beside each other, the tables, and whether the bar is met by all."""
    if only == "aimd":
        await _aimd_table(seconds, redis, console)
        return True
    todo = [case for case in cases() if only in str(case)]
    got: dict[Case, Measured] = {}
    with tempfile.TemporaryDirectory() as name, Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("cases", total=len(todo))
        free = list(range(1, AT_ONCE + 1))

        async def one(case: Case) -> None:
            async with slots:
                db = free.pop()
                try:
                    got[case] = await measured(case, redis.at(db), seconds, Path(name), f"c{todo.index(case)}")
                finally:
                    free.append(db)
                bar.advance(task)

        slots = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for case in todo:
                group.create_task(one(case))
    table = Table(
        title=f"a gate at {THRESHOLD:g}, a model of {CAPACITY} at once, {WORKERS} workers: "
        f"running / capacity over {seconds:g} s"
    )
    for heading in ("source", "gate of the", "read every", "processes", "mean", "most", f"bar {LEAST:g}-{MOST:g}"):
        table.add_column(heading, justify="left" if heading in ("source", "gate of the") else "right")
    for case in todo:
        found = got[case]
        table.add_row(
            case.source,
            case.place,
            f"{case.refresh_s:g} s",
            str(case.processes),
            f"{found.mean:.3f}",
            f"{found.most:.2f}",
            "met" if found.met else "MISSED",
        )
    console.print(table)
    if not only:
        await _aimd_table(seconds, redis, console)
    return all(found.met for found in got.values())


async def _aimd_table(seconds: float, redis: Redis, console: Console) -> None:
    table = Table(title=f"aimd before a pool, a model that says 429 above {CAPACITY} at once: over {seconds:g} s")
    for heading in ("requests are", "processes", "running / capacity", "answered 429"):
        table.add_column(heading, justify="left" if heading == "requests are" else "right")
    todo = [(processes, reserved) for processes in (1, 2) for reserved in (True, False)]
    with tempfile.TemporaryDirectory() as name:
        got = await asyncio.gather(
            *(
                learnt(processes, reserved, redis.at(number + 1), seconds, Path(name))
                for number, (processes, reserved) in enumerate(todo)
            )
        )
    for (processes, reserved), found in zip(todo, got, strict=True):
        kind = "reserved" if reserved else "overflow"
        table.add_row(kind, str(processes), f"{found.mean:.3f}", f"{found.shed:.2%}")
    console.print(table)
