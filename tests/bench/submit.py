"""The bar of `submit`: many lines through RabbitMQ, the broker restarted in the middle, each line once, memory bounded.

The worker and `submit` are processes of their own, as in life. The broker is stopped in good order and started again.
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from redis.asyncio import Redis as RedisClient
from rich.console import Console

from tests.conservation import assert_conserved, collect
from tests.faults.processes import WorkerProcess
from tests.faults.sinks import BillingServer
from tests.services import Rabbit, Redis, free_port
from tests.waiting import eventually
from tests.worker_env import worker_env

MOST_MIB = 200


async def submit_bar(lines: int, in_flight: int, rabbit: Rabbit, redis: Redis, console: Console) -> bool:
    """Run it, and say whether the bar is met."""
    with tempfile.TemporaryDirectory() as name:
        folder, port, ready = Path(name), free_port(), free_port()
        given, output = folder / "input.jsonl", folder / "output.jsonl"
        prompt = "y" * 900
        with given.open("w") as file:
            for number in range(lines):
                payload = {"model": "mock-model", "messages": [{"role": "user", "content": f"{number} {prompt}"}]}
                file.write(json.dumps({"payload": payload | {"max_tokens": 8}, "timeout_s": 600}) + "\n")
        billing = BillingServer()
        env = worker_env(
            rabbitmq_url=rabbit.url,
            redis_url=redis.at(1),
            model_url=f"http://127.0.0.1:{port}",
            deployment_id=f"bench-submit-{time.monotonic_ns()}",
            http_port=ready,
            RABBITMQ_PREFETCH=str(in_flight),
            HF_MODEL_ID="mock-model",
            CROESUS_HOST=billing.url,
        )
        model = WorkerProcess(
            {},
            output=folder / "model.log",
            command=[
                *(sys.executable, "-m", "inference_worker", "mock-model", "--port", str(port)),
                *("--latency", "0.005", "--tokens-per-second", "0", "--max-num-seqs", "1024"),
            ],
        )
        submit = WorkerProcess(
            env,
            output=folder / "submit.log",
            command=[
                *(sys.executable, "-m", "inference_worker", "submit", str(given), "--output", str(output)),
                *("--in-flight", str(in_flight)),
            ],
        )
        async with model, billing, WorkerProcess(env, output=folder / "worker.log") as worker:
            await worker.ready(f"http://127.0.0.1:{ready}/readyz")
            begun = time.monotonic()
            seen: list[int] = []
            async with submit:

                def half() -> bool:
                    return output.exists() and output.read_bytes().count(b"\n") >= lines // 2

                watching = asyncio.create_task(_watch(submit.pid, seen))
                await eventually(half, within=300, what=f"half of {lines} lines", every=0.2)
                await asyncio.to_thread(rabbit.stop)
                await asyncio.to_thread(rabbit.start)
                code = await submit.wait(within=600)
                watching.cancel()
                peak_kib = max(seen)
                said = submit.log
            took_s = time.monotonic() - begun
            worker.terminate()
            await worker.wait(within=30)
            async with RedisClient.from_url(redis.at(1)) as client:
                got = [json.loads(line) for line in output.read_text().splitlines()]
                ids = [one["request_id"] for one in got]
                evidence = await collect(
                    ids,
                    redis=client,
                    rabbitmq_url=rabbit.url,
                    deployment_id=env["DEPLOYMENT_ID"],
                    dlq=env["INFERENCE_DLQ"],
                    billed=billing.events,
                )
                assert not evidence.queued, "requests are left in the queue"
                await client.flushdb()
        answered = [one["result"]["choices"][0]["message"]["content"].split()[0] for one in got if "result" in one]
        in_order = answered == [str(number) for number in range(lines)]
        console.print(said.strip(), markup=False)
        console.print(
            f"submit: {len(got)} of {lines} lines, {len(set(ids))} ids, in order: {in_order}, exit code {code}, "
            f"peak {peak_kib / 1024:.0f} MiB (bar {MOST_MIB}), {took_s:.0f} s with a restart of the broker"
        )
        assert_conserved(evidence)
        return code == 0 and in_order and len(set(ids)) == lines and peak_kib < MOST_MIB * 1024


async def _watch(pid: int, seen: list[int]) -> None:
    """The most memory that the process has had, as the kernel counts it."""
    while True:
        status = await asyncio.to_thread(Path(f"/proc/{pid}/status").read_text)
        seen.extend(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
        await asyncio.sleep(0.2)
