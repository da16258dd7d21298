"""An idle queue through the whole command: how soon a request is at the model, and what waiting for it costs.

The time is from just before the request is put into the queue (the ZADD, the insert, the publication: as a producer
does it) to its arrival at a model in this process, one at a time: the next one is sent some time after the last one has
ended, so that the queue is idle again. CPU is that of the process by the kernel's count, over a time in which nothing
comes.
"""

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.bench.servers import Servers
from tests.every_transport import Queues, Transport
from tests.faults.model import FakeModel
from tests.faults.processes import WorkerProcess
from tests.services import free_port
from tests.waiting import eventually

WARM_UP: Final = 20
P99_BAR_MS: Final[dict[Transport, float | None]] = {
    "redis-sortedset": 20.0,
    "redis-streams": 20.0,
    "rabbitmq": 20.0,
    "sql": 20.0,
    "gcp-pubsub": None,  # The service's own, which no emulator has.
}
CPU_BAR: Final = 0.01
SETTLE_S: Final = 3.0
"""After the start, until idle CPU is counted."""


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def one_set_up(
    queues: Queues, names: list[str], messages: int, idle_s: float, output: Path
) -> tuple[list[float], float]:
    """Milliseconds of each request, sorted, and the part of a core that the idle process takes."""
    port, rng = free_port(), random.Random(1)
    async with FakeModel() as model:
        told = queues.told(model.url, health_port=str(port))
        command = [sys.executable, "-m", "inference_worker", "process", *told.arguments()]
        async with WorkerProcess(told.environ, output=output, command=command) as one:
            await one.ready(f"http://127.0.0.1:{port}/readyz")
            await asyncio.sleep(SETTLE_S)
            began, cpu = time.monotonic(), cpu_s(one.pid)
            await asyncio.sleep(idle_s)
            idle = (cpu_s(one.pid) - cpu) / (time.monotonic() - began)
            took = []
            for number in range(messages + WARM_UP):
                sent_at = time.monotonic()
                await queues.put(rng.choice(names), [f"m{number}"])
                await eventually(partial(_ended, queues, number), within=10, what=f"the end of {number}", every=0.002)
                took.append((model.requests[-1].arrived_at - sent_at) * 1000)
                await asyncio.sleep(rng.uniform(0.01, 0.05))
            assert one.returncode is None, one.log[-2000:]
    assert len(model.requests) == len(took), "a request came to the model twice"
    return sorted(took[WARM_UP:]), idle


async def _ended(queues: Queues, number: int) -> bool:
    return await queues.ended() > number


async def pickup_bar(transport: Transport, messages: int, idle_s: float, servers: Servers, console: Console) -> bool:
    """With one queue and with ten: the table, and whether the bars are met."""
    table = Table(title=f"{transport}: an idle queue, {messages} requests one at a time; idle CPU over {idle_s:g} s")
    for heading in ("queues", "p50 ms", "p95 ms", "p99 ms", "most ms", "idle CPU", "bars"):
        table.add_column(heading, justify="right")
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for count in (1, 10):
            names = [f"work-{number}" for number in range(count)]
            async with servers.queues(transport, names) as queues:
                took, idle = await one_set_up(queues, names, messages, idle_s, Path(folder) / f"{count}.log")
            cuts, bar_ms = statistics.quantiles(took, n=100), P99_BAR_MS[transport]
            met = (bar_ms is None or cuts[98] < bar_ms) and idle < CPU_BAR
            good &= met
            table.add_row(
                str(count),
                *(f"{ms:.2f}" for ms in (cuts[49], cuts[94], cuts[98], took[-1])),
                f"{idle:.2%}",
                "met" if met else "MISSED",
            )
    console.print(table)
    return good
