"""Measure the worker against a bare loop over the same clients, and its latency piece by piece.

    python -m tests.bench throughput [--rounds 3] [--messages 5000] [--in-flight 16 64]
    python -m tests.bench latency [--messages 300]
    python -m tests.bench submit [--lines 10000] [--in-flight 64]
    python -m tests.bench streams [--rounds 9]
    python -m tests.bench kills [--jobs 20000]
    python -m tests.bench saturation [--seconds 25] [--only aimd]
    python -m tests.bench pickup [--transport redis-sortedset] [--messages 1000]
    python -m tests.bench process-kills --transport redis-sortedset [--kills 1000]
    python -m tests.bench process-kills --transport rabbitmq --command run [--kills 1000]
    python -m tests.bench process [--seconds 15] [--rates 500 1000 2000]

RabbitMQ and Redis come from where the tests have them (`TEST_SERVICES`). The worker is the real process; the bare loop
consumes, claims, calls, stores and acknowledges with the same drivers, the same scripts and no logic at all. Rounds
alternate, so that both meet the same machine. `pickup` and `process-kills` are for one transport at a time: RabbitMQ,
Redis, Postgres or Pub/Sub (`tests/pubsub_emulator.py`).
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aio_pika
from redis.asyncio import Redis as RedisClient
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from inference_worker import logs
from tests.bench.kills import kills_bar
from tests.bench.latency import measure_latency
from tests.bench.pickup import pickup_bar
from tests.bench.process import RATES, process_bar
from tests.bench.process_kills import process_kills_bar
from tests.bench.saturation import saturation_bar
from tests.bench.servers import Servers
from tests.bench.streams import streams_bar
from tests.bench.submit import submit_bar
from tests.conservation import channel_of
from tests.every_transport import TRANSPORTS
from tests.faults.processes import WorkerProcess
from tests.services import Rabbit, Redis, choose, free_port
from tests.waiting import eventually
from tests.worker_env import queue_of, worker_env

BAR = 0.75
PAYLOAD = {"model": "mock-model", "messages": [{"role": "user", "content": "y" * 900}], "max_tokens": 8}
console = Console()


async def fill(url: str, queue: str, count: int) -> list[str]:
    """Publish so many messages, confirmed, and return their ids."""
    ids = [f"{queue}-{n}" for n in range(count)]
    async with channel_of(url) as channel:
        for start in range(0, count, 500):
            await asyncio.gather(
                *(
                    channel.default_exchange.publish(
                        aio_pika.Message(
                            json.dumps(
                                {"request_id": i, "received_at": time.time(), "timeout_s": 3600, "payload": PAYLOAD}
                            ).encode(),
                            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                        ),
                        routing_key=queue,
                    )
                    for i in ids[start : start + 500]
                )
            )
    return ids


async def rate(redis: RedisClient, ids: Sequence[str]) -> float:
    """Messages a second between the first and the last stored result; fails where one is missing."""
    stored = await redis.mget([f"infer_resp:{i}" for i in ids])
    lost = [i for i, value in zip(ids, stored, strict=True) if value is None]
    assert not lost, f"{len(lost)} of {len(ids)} requests have no result"
    finished: list[float] = sorted(json.loads(value)["finished_at"] for value in stored if value is not None)
    return (len(finished) - 1) / (finished[-1] - finished[0])


async def one_run(
    kind: str, rabbit: Rabbit, redis_url: str, model_url: str, in_flight: int, count: int, folder: Path
) -> float:
    """Fill a queue, let the worker or the bare loop empty it, and return its rate."""
    deployment = f"bench-{kind}-{in_flight}-{time.monotonic_ns()}"
    env = worker_env(
        rabbitmq_url=rabbit.url,
        redis_url=redis_url,
        model_url=model_url,
        deployment_id=deployment,
        RABBITMQ_PREFETCH=str(in_flight),
        CLAIM_LEASE_S="15",
        HEALTH_CHECK_INTERVAL_S="10",
        METRICS_FLUSH_INTERVAL_S="30",
        HF_MODEL_ID="mock-model",
    )
    command = [sys.executable, "-m", "inference_worker", "run"]
    if kind == "bare":
        command = [sys.executable, "-m", "tests.bench.bare"]
    # Declared by a worker that finds nothing to do, so that both kinds meet the same queue.
    port = free_port()
    async with WorkerProcess({**env, "WORKER_HTTP_PORT": str(port)}, output=folder / f"{deployment}.declare") as worker:
        await worker.ready(f"http://127.0.0.1:{port}/readyz")
        worker.terminate()
        await worker.wait(within=20)
    ids = await fill(rabbit.url, queue_of(env), count)
    redis = RedisClient.from_url(redis_url)
    async with redis, WorkerProcess(env, output=folder / f"{deployment}.log", command=command) as worker:

        async def done() -> bool:
            return await redis.exists(f"infer_resp:{ids[-1]}") == 1 and await redis.dbsize() >= len(ids)

        await eventually(done, within=300, what=f"{count} results", every=0.2)
        measured = await rate(redis, ids)
        worker.terminate()
        await worker.wait(within=30)
        await redis.flushdb()
    return measured


async def throughput(args: argparse.Namespace, rabbit: Rabbit, redis: Redis) -> bool:
    """All rounds, and the table."""
    rows: list[tuple[int, list[float], list[float]]] = []
    with tempfile.TemporaryDirectory() as name, Progress(console=console, disable=not console.is_terminal) as bar:
        folder, port = Path(name), free_port()
        model = WorkerProcess(
            {},
            output=folder / "model.log",
            command=[
                *(sys.executable, "-m", "inference_worker", "mock-model", "--port", str(port)),
                *("--latency", "0.005", "--tokens-per-second", "0", "--max-num-seqs", "1024"),
            ],
        )
        task = bar.add_task("rounds", total=len(args.in_flight) * args.rounds * 2)
        async with model:
            await model.ready(f"http://127.0.0.1:{port}/health")
            for in_flight in args.in_flight:
                figures: dict[str, list[float]] = {"bare": [], "worker": []}
                for _ in range(args.rounds):
                    for kind, got in figures.items():
                        got.append(
                            await one_run(
                                kind, rabbit, redis.at(1), f"http://127.0.0.1:{port}", in_flight, args.messages, folder
                            )
                        )
                        bar.advance(task)
                rows.append((in_flight, figures["worker"], figures["bare"]))
    table = Table(title=f"{args.messages} messages of 1 KiB, a 5 ms model, medians of {args.rounds} rounds")
    for heading in ("in flight", "worker msg/s", "bare msg/s", "ratio", f"bar {BAR}"):
        table.add_column(heading, justify="right")
    good = True
    for in_flight, worker, bare in rows:
        ratio = statistics.median(worker) / statistics.median(bare)
        good &= ratio >= BAR
        table.add_row(
            str(in_flight),
            f"{statistics.median(worker):.0f}",
            f"{statistics.median(bare):.0f}",
            f"{ratio:.2f}",
            "met" if ratio >= BAR else "MISSED",
        )
    console.print(table)
    return good


async def latency(args: argparse.Namespace, rabbit: Rabbit, redis: Redis) -> bool:
    """One in flight: the median of each step against the source's figure."""
    steps = await measure_latency(rabbit.url, redis.at(1), args.messages)
    table = Table(title=f"one in flight, a 5 ms model, {args.messages} messages of 1 KiB: milliseconds")
    for heading in ("step", "median", "p95", "bar", ""):
        table.add_column(heading, justify="right")
    good = True
    for name, (values, bar) in steps.items():
        median = statistics.median(values) * 1000
        good &= median < bar
        p95 = statistics.quantiles(values, n=20)[18] * 1000
        table.add_row(name, f"{median:.2f}", f"{p95:.2f}", f"< {bar:g}", "met" if median < bar else "MISSED")
    console.print(table)
    return good


def main() -> int:
    """Run what the arguments name; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    what = ["throughput", "latency", "submit", "streams", "kills", "saturation", "pickup", "process", "all"]
    what += ["process-kills"]
    parser.add_argument("what", nargs="?", choices=what, default="all")
    parser.add_argument("--transport", choices=TRANSPORTS, default=TRANSPORTS[0], help="of pickup and process-kills")
    parser.add_argument("--command", choices=("process", "run"), default="process", help="what process-kills kills")
    parser.add_argument("--rounds", type=int, help="default 3; streams: 9")
    parser.add_argument("--messages", type=int, default=5000)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seconds", type=float, help="of each case; default 25, process: 15, pickup: 30 of idleness")
    parser.add_argument("--only", default="", help="of saturation: cases with this text, or aimd")
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES))
    args = parser.parse_args()
    if args.command == "run" and args.transport != "rabbitmq":
        parser.error("--command run goes with --transport rabbitmq")
    rounds, args.rounds = args.rounds, args.rounds or 3
    logs.configure("warning", "console", sys.stderr)
    supply = choose(os.environ, console.print)
    try:
        servers, good = Servers(supply), True
        if args.what == "process-kills":
            good = asyncio.run(process_kills_bar(args.transport, args.command, args.kills, servers, console))
            return 0 if good else 1
        if args.what in ("pickup", "all"):
            messages, idle_s = min(args.messages, 1000), args.seconds or 30
            good &= asyncio.run(pickup_bar(args.transport, messages, idle_s, servers, console))
        if args.what == "pickup":
            return 0 if good else 1
        redis = servers.redis
        if args.what in ("latency", "all"):
            few = argparse.Namespace(messages=min(args.messages, 500))
            good &= asyncio.run(latency(few, supply.rabbit(), redis))
        if args.what in ("throughput", "all"):
            good &= asyncio.run(throughput(args, supply.rabbit(), redis))
        if args.what in ("streams", "all"):
            good &= asyncio.run(streams_bar(rounds or 9, redis, console))
        if args.what in ("kills", "all"):
            good &= asyncio.run(kills_bar(args.jobs, redis, console))
        if args.what in ("saturation", "all"):
            good &= asyncio.run(saturation_bar(args.seconds or 25, redis, console, args.only))
        if args.what in ("process", "all"):
            good &= asyncio.run(process_bar(args.seconds or 15, args.rates, supply, console))
        if args.what in ("submit", "all"):
            good &= asyncio.run(submit_bar(args.lines, args.in_flight[-1], supply.rabbit(), redis, console))
    finally:
        supply.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
