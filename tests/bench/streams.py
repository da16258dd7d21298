"""80 jobs at once into a stream, four slots, a model of 5 ms: how long until the 76th of them is done.

Each side is a process of its own; jobs are appended one by one from here, and a job is done when its result's key is
set, which Redis itself tells (keyspace notifications), so that both sides are measured in one way. The ideal is 95 ms.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from redis.asyncio import Redis as RedisClient
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.faults.processes import WorkerProcess
from tests.services import Redis, free_port
from tests.waiting import eventually
from tests.worker_env import worker_env

JOBS: Final = 80
SLOTS: Final = 4
LATENCY_S: Final = 0.005
RATIO_BAR: Final = 1.15
BAR_MS: Final = 125.0
"""With the in-process model, on an idle machine of two cores."""

PAYLOAD: Final = {"model": "mock-model", "messages": [{"role": "user", "content": "y" * 640}]}
DB: Final = 1


async def one_round(kind: str, mode: str, redis_url: str, model_url: str, folder: Path) -> list[float]:
    """Milliseconds from the append of each job to its result, sorted."""
    name = f"bench-{kind}-{mode}-{time.monotonic_ns()}"
    port = free_port()
    env = worker_env(
        rabbitmq_url="amqp://nobody@127.0.0.1:1",
        redis_url=redis_url,
        model_url=model_url,
        deployment_id=name,
        http_port=port,
        TRANSPORT="redis-streams",
        IWL_STREAM=name,
        IWL_CONCURRENCY=str(SLOTS),
        MODEL_MODE=mode,
        MODEL_MOCK_LATENCY_S=str(LATENCY_S),
        HF_MODEL_ID="mock-model",
        LOG_LEVEL="info",
    )
    command = [sys.executable, "-m", "inference_worker", "run"]
    if kind == "bare":
        command = [sys.executable, "-m", "tests.bench.bare_streams"]
    redis: RedisClient = RedisClient.from_url(redis_url, socket_timeout=None)
    done: dict[str, float] = {}
    async with redis, redis.pubsub() as told, WorkerProcess(env, output=folder / f"{name}.log", command=command) as one:
        await redis.config_set("notify-keyspace-events", "E$")
        await told.subscribe(f"__keyevent@{DB}__:set")
        if kind == "bare":
            await eventually(lambda: redis.exists(f"ready:{name}"), within=20, what="the bare loop")
        else:
            await one.ready(f"http://127.0.0.1:{port}/readyz")
        listening = asyncio.create_task(_listen(told, done))
        begun: dict[str, float] = {}
        for number in range(JOBS):
            job = f"{name}-{number}"
            request = {"request_id": job, "received_at": time.time(), "timeout_s": 600, "payload": PAYLOAD}
            begun[job] = time.perf_counter()
            fields = {"job_id": job, "attempt": 0, "enqueued_at": time.time(), "request": json.dumps(request)}
            await redis.xadd(name, fields)  # type: ignore[arg-type]  # The driver's type leaves no room for numbers.
        await eventually(lambda: done.keys() >= begun.keys(), within=30, what=f"{JOBS} results", every=0.02)
        listening.cancel()
        await asyncio.wait([listening])
        one.terminate()
        await one.wait(within=20)
        await redis.flushdb()
    return sorted((done[job] - began) * 1000 for job, began in begun.items())


async def _listen(told: "object", done: dict[str, float]) -> None:
    async for message in told.listen():  # type: ignore[attr-defined]  # The driver's PubSub has no type of its own.
        if message["type"] == "message":
            done.setdefault(message["data"].decode().removeprefix("infer_resp:"), time.perf_counter())


async def streams_bar(rounds: int, redis: Redis, console: Console) -> bool:
    """Both models, `rounds` rounds of both sides in turn, the table, and whether the bars are met."""
    got: dict[tuple[str, str], list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as name, Progress(console=console, disable=not console.is_terminal) as bar:
        folder, port = Path(name), free_port()
        command = [sys.executable, "-m", "inference_worker", "mock-model", "--port", str(port)]
        options = ("--latency", str(LATENCY_S), "--tokens-per-second", "0", "--max-num-seqs", "1024")
        task = bar.add_task("rounds", total=rounds * 4)
        async with WorkerProcess({}, output=folder / "model.log", command=[*command, *options]) as model:
            await model.ready(f"http://127.0.0.1:{port}/health")
            for _ in range(rounds):
                for mode in ("mock", "vllm"):
                    for kind in ("bare", "worker"):
                        times = await one_round(kind, mode, redis.at(DB), f"http://127.0.0.1:{port}", folder)
                        got.setdefault((mode, kind), []).append(times)
                        bar.advance(task)
    table = Table(
        title=f"{JOBS} jobs, {SLOTS} slots, a {LATENCY_S * 1000:g} ms model: ms from append to result, "
        f"medians of {rounds} rounds"
    )
    for heading in ("model", "side", "p50", "p95", "last", "p95 / bare", "bars"):
        table.add_column(heading, justify="left" if heading in ("model", "side", "bars") else "right")
    good = True
    for mode, shown in (("mock", "in process"), ("vllm", "over HTTP")):
        bare = _median(got[mode, "bare"], 0.95)
        for kind in ("bare", "worker"):
            side = got[mode, kind]
            p95 = _median(side, 0.95)
            said = ""
            if kind == "worker":
                met = p95 <= RATIO_BAR * bare and (mode != "mock" or p95 <= BAR_MS)
                good &= met
                bars = f"<= {RATIO_BAR} x bare" + (f", <= {BAR_MS:g} ms" if mode == "mock" else "")
                said = f"{bars}: {'met' if met else 'MISSED'}"
            table.add_row(
                shown,
                kind,
                f"{_median(side, 0.5):.1f}",
                f"{p95:.1f}",
                f"{_median(side, 1.0):.1f}",
                f"{p95 / bare:.2f}",
                said,
            )
    console.print(table)
    return good


def _median(rounds: list[list[float]], part: float) -> float:
    return statistics.median(times[max(round(len(times) * part), 1) - 1] for times in rounds)
