"""An idle queue through the whole command: how soon a message is at the model, and what waiting for it costs.

The time is from just before the ZADD to the arrival of the request at a model in this process, one message at a time:
the next one is sent some time after the result of the last one is there, so that the queue is idle again. CPU is that
of the process by the kernel's count, over a time in which nothing comes.
"""

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from redis.asyncio import Redis as RedisClient
from rich.console import Console
from rich.table import Table

from tests.faults.model import FakeModel
from tests.faults.processes import WorkerProcess
from tests.process_rig import RESULTS, ProcessDocuments, envelope, queue
from tests.services import Redis, free_port
from tests.waiting import eventually

DB: Final = 1
WARM_UP: Final = 20
P99_BAR_MS: Final = 20.0
CPU_BAR: Final = 0.01
SETTLE_S: Final = 3.0
"""After the start, until idle CPU is counted."""


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def one_set_up(
    queues: int, messages: int, idle_s: float, redis_url: str, folder: Path
) -> tuple[list[float], float]:
    """Milliseconds of each message, sorted, and the part of a core that the idle process takes."""
    names = [f"work-{number}" for number in range(queues)]
    port = free_port()
    rng = random.Random(1)
    async with FakeModel() as model, RedisClient.from_url(redis_url, socket_timeout=None) as redis:
        await redis.flushdb()
        documents = ProcessDocuments(
            url=redis_url,
            queues=[queue(name, model.url) for name in names],
            flags={"health-port": str(port)},
        )
        command = [sys.executable, "-m", "inference_worker", "process", *documents.arguments(_no_file)]
        async with WorkerProcess({}, output=folder / f"{queues}.log", command=command) as one:
            await one.ready(f"http://127.0.0.1:{port}/readyz")
            await asyncio.sleep(SETTLE_S)
            began, cpu = time.monotonic(), cpu_s(one.pid)
            await asyncio.sleep(idle_s)
            idle = (cpu_s(one.pid) - cpu) / (time.monotonic() - began)
            took = []
            for number in range(messages + WARM_UP):
                member, score = envelope(f"m{number}")
                sent_at = time.monotonic()
                await redis.zadd(rng.choice(names), {member: score})
                await eventually(lambda: redis.rpop(RESULTS), within=10, what=f"result {number}", every=0.002)
                took.append((model.requests[-1].arrived_at - sent_at) * 1000)
                await asyncio.sleep(rng.uniform(0.01, 0.05))
            assert one.returncode is None, one.log[-2000:]
        await redis.flushdb()
    return sorted(took[WARM_UP:]), idle


def _no_file(name: str, text: str) -> str:
    raise AssertionError(f"there is no document {name}: {text}")


async def pickup_bar(messages: int, idle_s: float, redis: Redis, console: Console) -> bool:
    """With one queue and with ten: the table, and whether the bars are met."""
    table = Table(title=f"an idle queue, {messages} messages one at a time; idle CPU over {idle_s:g} s")
    for heading in ("queues", "p50 ms", "p95 ms", "p99 ms", "most ms", "idle CPU", "bars"):
        table.add_column(heading, justify="right")
    good = True
    with tempfile.TemporaryDirectory() as name:
        for queues in (1, 10):
            took, idle = await one_set_up(queues, messages, idle_s, redis.at(DB), Path(name))
            cuts = statistics.quantiles(took, n=100)
            met = cuts[98] < P99_BAR_MS and idle < CPU_BAR
            good &= met
            table.add_row(
                str(queues),
                *(f"{ms:.2f}" for ms in (cuts[49], cuts[94], cuts[98], took[-1])),
                f"{idle:.2%}",
                "met" if met else "MISSED",
            )
    console.print(table)
    return good
