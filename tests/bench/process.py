"""Many requests through the whole command: an instant model, 256 workers, batches of 100, rates that rise.

The shape is that of the benchmark of llm-d-async's transports: prompts of 400 words, Redis with an append-only file
written every second, producers that submit 100 at a time, collectors that pop results. `kept up` is what it is there:
95 % of what is offered is completed, and the rest is drained. Redis, model, processes, producers and collectors are all
on this machine, and take its cores from each other.
"""

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from redis.asyncio import Redis as RedisClient
from rich.console import Console
from rich.table import Table

from inference_worker.producer import Producer, Request
from tests.bench.pickup import cpu_s
from tests.faults.processes import WorkerProcess
from tests.process_rig import ProcessDocuments, queue
from tests.services import Supply, free_port
from tests.waiting import NotInTime, eventually

WORKERS: Final = 256
BATCH: Final = 64
AT_ONCE: Final = 100
PRODUCERS: Final = 4
COLLECTORS: Final = 2
WORDS: Final = 400
QUEUE: Final = "bench"
RESULTS: Final = "bench-results"
KEPT_UP: Final = 0.95
DRAIN_S: Final = 5.0
PAUSE_S: Final = 0.002
RATES: Final = (1000, 2000, 3000, 3500, 4000, 5000)
APPEND_ONLY: Final = ("--appendonly", "yes", "--appendfsync", "everysec")


@dataclass
class Traffic:
    """What was submitted and what came back."""

    submitted_at: dict[str, float] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)
    came: Counter[str] = field(default_factory=Counter)
    failed: list[object] = field(default_factory=list)

    def collect(self, raw: bytes, now: float) -> None:
        result = json.loads(raw)
        request_id = str(result["id"])
        self.came[request_id] += 1
        if result.get("status_code") != 200:
            self.failed.append(result)
        self.took.setdefault(request_id, now - self.submitted_at[request_id])


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rate."""

    offered: float
    completed: float
    """A second, in the time in which they were offered."""
    duplicates: int
    lost: int
    cuts_ms: tuple[float, float, float]
    cpu_ms: float
    """Of our processes, for each message."""
    drained: bool

    @property
    def kept_up(self) -> bool:
        return self.drained and self.completed >= KEPT_UP * self.offered


async def _produce(producer: Producer, traffic: Traffic, prompts: list[bytes], rate: float, seconds: float) -> None:
    """Batches at a steady pace; one that is late is not waited for by the next."""
    loop = asyncio.get_running_loop()
    began, sent, rng = loop.time(), 0, random.Random(1)
    pending: set[asyncio.Task[None]] = set()

    async def batch(numbers: range) -> None:
        deadline = int(time.time()) + 600
        ids = [f"r{n}" for n in numbers]
        requests = [Request(id=one, payload=rng.choice(prompts), deadline=deadline) for one in ids]
        traffic.submitted_at.update(dict.fromkeys(ids, time.monotonic()))
        await producer.submit_many(requests)

    total = round(rate * seconds / AT_ONCE) * AT_ONCE
    while sent < total:
        await asyncio.sleep(max(began + sent / rate - loop.time(), 0.0))
        while len(pending) >= PRODUCERS:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        pending.add(asyncio.create_task(batch(range(sent, sent + AT_ONCE))))
        sent += AT_ONCE
    if pending:
        await asyncio.wait(pending)


async def _collect(redis: RedisClient, traffic: Traffic) -> None:
    while True:
        found: list[bytes] = await redis.rpop(RESULTS, AT_ONCE)  # type: ignore[assignment]  # By the count a list, of bytes.
        now = time.monotonic()
        if not found:
            await asyncio.sleep(PAUSE_S)
            continue
        for raw in found:
            traffic.collect(raw, now)


def _prompts() -> list[bytes]:
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2000)]
    texts = (" ".join(rng.choices(words, k=WORDS)) for _ in range(50))
    return [json.dumps({"model": "instant", "prompt": text, "max_tokens": 2}).encode() for text in texts]


async def one_rate(redis_url: str, rate: float, seconds: float, processes: list[WorkerProcess]) -> Row:
    """Offer so many a second, and collect."""
    traffic = Traffic()
    async with (
        RedisClient.from_url(redis_url, socket_timeout=None) as redis,
        Producer(redis_url, request_queue=QUEUE, result_queue=RESULTS) as producer,
    ):
        collecting = [asyncio.create_task(_collect(redis, traffic)) for _ in range(COLLECTORS)]
        cpu, began = sum(cpu_s(one.pid) for one in processes), time.monotonic()
        await _produce(producer, traffic, _prompts(), rate, seconds)
        await asyncio.sleep(max(began + seconds - time.monotonic(), 0.0))
        within, lasted = len(traffic.came), time.monotonic() - began
        drained = True
        try:
            await eventually(
                lambda: len(traffic.came) >= len(traffic.submitted_at), within=DRAIN_S, what="the rest", every=0.05
            )
        except NotInTime:
            drained = False
            await eventually(
                lambda: len(traffic.came) >= len(traffic.submitted_at), within=120, what="the last ones", every=0.2
            )
        cpu = sum(cpu_s(one.pid) for one in processes) - cpu
        for task in collecting:
            task.cancel()
        await asyncio.wait(collecting)
        await redis.flushdb()  # Else the next rate would pay for the append-only file of this one.
    assert not traffic.failed, traffic.failed[:3]
    cuts = statistics.quantiles([took * 1000 for took in traffic.took.values()], n=100)
    return Row(
        offered=rate,
        completed=within / lasted,
        duplicates=sum(count - 1 for count in traffic.came.values()),
        lost=len(traffic.submitted_at) - len(traffic.came),
        cuts_ms=(cuts[49], cuts[94], cuts[98]),
        cpu_ms=cpu / len(traffic.came) * 1000,
        drained=drained,
    )


async def process_rows(
    redis_url: str, processes: int, rates: list[int], seconds: float, folder: Path, run: list[str]
) -> list[Row]:
    """So many processes on one pool, rate after rate until they do not keep up twice. `run` starts Python."""
    model_port, health_port = free_port(), free_port()
    model_url = f"http://127.0.0.1:{model_port}"
    documents = ProcessDocuments(
        url=redis_url,
        queues=[queue(QUEUE, model_url)],
        transport={"batch_size": BATCH, "poll_interval_ms": 10, "result_queue_name": RESULTS},
        flags={"concurrency": str(WORKERS)},
    )
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        command = [sys.executable, "-m", "tests.bench.instant", "--port", str(model_port)]
        model = await stack.enter_async_context(WorkerProcess({}, output=folder / "model.log", command=command))
        await model.ready(model_url)
        started = []
        for number in range(processes):
            flags = [*documents.arguments(_no_file), f"--health-port={health_port + number}"]
            one = WorkerProcess(
                {},
                output=folder / f"{processes}-{number}.log",
                command=[*run, "-m", "inference_worker", "process", *flags],
            )
            started.append(await stack.enter_async_context(one))
        for number, one in enumerate(started):
            await one.ready(f"http://127.0.0.1:{health_port + number}/readyz")
        await one_rate(redis_url, 200, 3, started)  # Connections and caches.
        for rate in rates:
            rows.append(await one_rate(redis_url, rate, seconds, started))
            if len(rows) > 1 and not rows[-1].kept_up and not rows[-2].kept_up:
                break
        for one in started:
            one.terminate()
        for one in started:
            await one.wait(within=20)
    return rows


def _no_file(name: str, text: str) -> str:
    raise AssertionError(f"there is no document {name}: {text}")


async def process_bar(
    seconds: float, rates: list[int], supply: Supply, console: Console, processes: tuple[int, ...] = (1, 2)
) -> bool:
    """One process and two, the table; no bar but that nothing is lost or doubled."""
    redis = supply.redis(*APPEND_ONLY)
    table = Table(
        title=f"an instant model, {WORKERS} workers, {AT_ONCE} at a time, {WORDS} words; {seconds:g} s a rate"
    )
    for heading in ("processes", "offered/s", "completed/s", "kept up", "duplicates", "p50 ms", "p95 ms", "p99 ms"):
        table.add_column(heading, justify="right")
    table.add_column("CPU ms each", justify="right")
    good = True
    with tempfile.TemporaryDirectory() as name:
        for count in processes:
            for row in await process_rows(redis.url, count, rates, seconds, Path(name), [sys.executable]):
                good &= not row.duplicates and not row.lost
                table.add_row(
                    str(count),
                    f"{row.offered:g}",
                    f"{row.completed:.0f}",
                    "yes" if row.kept_up else "no",
                    str(row.duplicates),
                    *(f"{ms:.0f}" for ms in row.cuts_ms),
                    f"{row.cpu_ms:.2f}",
                )
    console.print(table)
    return good
