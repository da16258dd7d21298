"""A queue in Postgres: how soon a request is at the model, what waiting costs, and a thousand kills.

As `pickup.py` for sorted sets: the time is from just before the submission to the arrival of the request at a model in
this process, one at a time, and CPU is that of the process by the kernel's count.
"""

import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import asyncpg
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from inference_worker.sql_producer import Request, SqlProducer
from tests.bench.pickup import CPU_BAR, P99_BAR_MS, SETTLE_S, WARM_UP, cpu_s
from tests.faults import sql_kills
from tests.faults.model import FakeModel
from tests.faults.processes import WorkerProcess
from tests.process_rig import ProcessDocuments, queue
from tests.services import Postgres, free_port


async def _schema(postgres: Postgres, name: str) -> str:
    """An empty one, by its URL."""
    connection = await asyncpg.connect(postgres.url)
    await connection.execute(f"drop schema if exists {name} cascade; create schema {name}")
    await connection.close()
    return postgres.at(name)


async def one_set_up(queues: int, messages: int, idle_s: float, url: str, folder: Path) -> tuple[list[float], float]:
    """Milliseconds of each request, sorted, and the part of a core that the idle process takes."""
    names, port, rng = [f"work-{number}" for number in range(queues)], free_port(), random.Random(1)
    async with FakeModel() as model, SqlProducer(url, result_queue="results") as producer:
        documents = ProcessDocuments(
            url=url, queues=[queue(name, model.url) for name in names], kind="sql", flags={"health-port": str(port)}
        )
        command = [sys.executable, "-m", "inference_worker", "process", *documents.arguments(_no_file)]
        async with WorkerProcess({}, output=folder / f"{queues}.log", command=command) as one:
            await one.ready(f"http://127.0.0.1:{port}/readyz")
            await asyncio.sleep(SETTLE_S)
            began, cpu = time.monotonic(), cpu_s(one.pid)
            await asyncio.sleep(idle_s)
            idle = (cpu_s(one.pid) - cpu) / (time.monotonic() - began)
            took = []
            for _ in range(messages + WARM_UP):
                request = Request(payload={"n": 1}, deadline=time.time() + 60, request_queue=rng.choice(names))
                sent_at = time.monotonic()
                await producer.submit(request)
                await producer.get_result(within_s=10)
                took.append((model.requests[-1].arrived_at - sent_at) * 1000)
                await asyncio.sleep(rng.uniform(0.01, 0.05))
            assert one.returncode is None, one.log[-2000:]
    return sorted(took[WARM_UP:]), idle


def _no_file(name: str, text: str) -> str:
    raise AssertionError(f"there is no document {name}: {text}")


async def sql_pickup_bar(messages: int, idle_s: float, postgres: Postgres, console: Console) -> bool:
    """With one queue and with ten: the table, and whether the bars are met."""
    table = Table(title=f"sql: an idle queue, {messages} requests one at a time; idle CPU over {idle_s:g} s")
    for heading in ("queues", "p50 ms", "p95 ms", "p99 ms", "most ms", "idle CPU", "bars"):
        table.add_column(heading, justify="right")
    good = True
    with tempfile.TemporaryDirectory() as name:
        for queues in (1, 10):
            url = await _schema(postgres, f"pickup_{queues}")
            took, idle = await one_set_up(queues, messages, idle_s, url, Path(name))
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


async def sql_kills_bar(kills: int, postgres: Postgres, console: Console) -> bool:
    """The run, its table, and whether each request ended once and was billed once."""
    requests = kills * 6
    with Progress(console=console, disable=not console.is_terminal) as bar:
        killing, ending = bar.add_task("kills", total=kills), bar.add_task("ended", total=requests)

        def told(killed: int, ended: int) -> None:
            bar.update(killing, completed=killed)
            bar.update(ending, completed=ended)

        url = await _schema(postgres, "kills")
        ended = await sql_kills.run(url, kills=kills, requests=requests, lives_s=0.5, told=told)
    table = Table(title=f"sql: {kills} kills of {sql_kills.WORKERS} workers, by chance", show_header=False)
    for row in (
        ("requests", str(len(ended.submitted))),
        ("completed", str(ended.completed)),
        ("failed, dead letters", f"{ended.failed}, {sum(ended.dead.values())}"),
        ("usage events, by id", str(len(ended.billed))),
        ("calls of the model", str(ended.calls)),
        ("seconds", f"{ended.seconds:.0f}"),
    ):
        table.add_row(*row)
    console.print(table)
    breaches = ended.breaches()
    for breach in breaches[:20]:
        console.print(breach)
    return not breaches
