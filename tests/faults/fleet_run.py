"""Two gateways and three workers over a stream, one of the workers killed again and again, and what is left at the end.

The same run is a test with some hundred jobs, and the bar with 20,000 (`python -m tests.bench kills`).
"""

import asyncio
import itertools
import json
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from redis.asyncio import Redis as RedisClient

from tests import conservation
from tests.conservation import Evidence, ResultWatcher
from tests.faults.processes import WorkerProcess
from tests.faults.sinks import BillingServer
from tests.services import free_port
from tests.waiting import eventually
from tests.worker_env import worker_env

WORKERS: Final = 3
CLIENTS: Final = 16
"""Jobs are submitted by so many at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a run has shown."""

    evidence: Evidence
    accepted: int
    refused: Counter[int]
    """Statuses other than 202, and how often."""
    killed: int
    left: dict[str, int]
    """Entries that are still somewhere: in the stream, delayed, pending."""
    states: Counter[str]
    """Terminal states as the gateway tells them, of a sample."""
    seconds: float


@asynccontextmanager
async def fleet(name: str, redis_url: str, billing: BillingServer, folder: Path) -> AsyncGenerator["Fleet"]:
    """Gateways and workers that are up; killed at the end."""
    made = Fleet(name, redis_url, billing, folder)
    async with AsyncExitStack() as stack:
        for process in (*made.workers, *made.gateways):
            await stack.enter_async_context(process)
        for process, url in zip((*made.workers, *made.gateways), made.ready_urls, strict=True):
            await process.ready(url, within=40)
        yield made


class Fleet:
    """The processes, with a stream of their own."""

    def __init__(self, name: str, redis_url: str, billing: BillingServer, folder: Path) -> None:
        self.name = name
        self.ports = [free_port() for _ in range(WORKERS + 2)]
        env = worker_env(
            rabbitmq_url="",
            redis_url=redis_url,
            model_url="",
            deployment_id=name,
            TRANSPORT="redis-streams",
            IWL_STREAM=f"{name}:jobs",
            IWL_DLQ_STREAM=f"{name}:dlq",
            IWL_CLAIM_IDLE_MS="2000",
            IWL_CONCURRENCY="8",
            IWL_MAX_QUEUE_DEPTH="0",
            MODEL_MODE="mock",
            MODEL_MOCK_LATENCY_S="0.02",
            METRICS_FLUSH_INTERVAL_S="0.5",
            LOG_LEVEL="warning",
        )
        self.workers = [
            WorkerProcess(
                {
                    **env,
                    "REPLICA_ID": f"worker-{number + 1}",
                    "CROESUS_HOST": billing.url,
                    "WORKER_HTTP_PORT": str(self.ports[number]),
                },
                output=folder / f"worker-{number + 1}.log",
            )
            for number in range(WORKERS)
        ]
        command = (sys.executable, "-m", "inference_worker", "gateway")
        self.gateways = [
            WorkerProcess(
                {**env, "REPLICA_ID": f"gateway-{number}", "GATEWAY_PORT": str(self.ports[WORKERS + number])},
                output=folder / f"gateway-{number}.log",
                command=command,
            )
            for number in range(2)
        ]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports[WORKERS:]]

    @property
    def ready_urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}/readyz" for port in self.ports]


async def run(
    redis_url: str,
    folder: Path,
    *,
    name: str,
    jobs: int,
    kill_every_s: float,
    told: Callable[[int, int], None] = lambda accepted, ended: None,
    within: float = 600.0,
) -> Ended:
    """Submit, kill, wait for the end of all, stop, and look everywhere."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    redis: RedisClient = RedisClient.from_url(redis_url, socket_timeout=None)
    async with redis, BillingServer() as billing, ResultWatcher(redis_url, only="") as watcher:
        async with fleet(name, redis_url, billing, folder) as up:
            over = asyncio.Event()
            killing = asyncio.create_task(_kill(up.workers, kill_every_s, over))
            try:
                accepted, refused = await _submit(up.urls, jobs, lambda n: told(n, len(watcher.announced)))

                def all_ended() -> bool:
                    told(len(accepted), len(watcher.announced))
                    return watcher.announced.keys() >= set(accepted)

                await eventually(all_ended, within=within, what=f"the ends of {len(accepted)} jobs", every=0.2)
            finally:
                over.set()
            killed = await killing
            states = await _states(up.urls, accepted[:: max(len(accepted) // 200, 1)])

            async def billed() -> bool:
                return not await conservation.outbox(redis, name)

            for worker, url in zip(up.workers, up.ready_urls, strict=False):
                await worker.ready(url, within=40)
            await eventually(billed, within=60, what="an empty outbox")
            for process in (*up.workers, *up.gateways):
                process.terminate()
            for process in (*up.workers, *up.gateways):
                assert await process.wait(within=20) == 0, process.log[-4000:]
        stream, dead = f"{name}:jobs", f"{name}:dlq"
        stored = await conservation.results(redis, accepted)
        pending = await redis.xpending(stream, "workers")
        return Ended(
            evidence=Evidence(
                submitted=frozenset(accepted),
                queued=Counter(map(_job_of, await redis.xrange(stream) or [])),
                results=stored,
                dead=Counter(map(_job_of, await redis.xrange(dead) or [])),
                billed=billing.events,
                outbox=await conservation.outbox(redis, name),
                announced=watcher.announced,
                replaced=watcher.replaced(stored),
            ),
            accepted=len(accepted),
            refused=refused,
            killed=killed,
            left={
                "stream": await redis.xlen(stream),
                "delayed": await redis.zcard(f"{stream}:delayed"),
                "pending": int(pending["pending"]),
            },
            states=states,
            seconds=loop.time() - begun,
        )


def _job_of(entry: Any) -> str:
    return str(entry[1][b"job_id"].decode())


async def _submit(urls: Sequence[str], jobs: int, told: Callable[[int], None]) -> tuple[list[str], Counter[int]]:
    """Ids of what was accepted, and the other answers; what was not accepted is sent again."""
    accepted: list[str] = []
    refused: Counter[int] = Counter()
    numbers = iter(range(jobs))

    async def one_client(session: aiohttp.ClientSession, which: int) -> None:
        for number in numbers:
            url = itertools.cycle((urls[(which + number) % len(urls)], urls[(which + number + 1) % len(urls)]))
            body = json.dumps(
                {"payload": {"messages": [{"role": "user", "content": f"job {number}"}]}, "timeout_s": 3600}
            )
            while True:
                async with session.post(
                    f"{next(url)}/v1/jobs",
                    data=body,
                    headers={"Content-Type": "application/json", "Idempotency-Key": f"key-{number}"},
                ) as answer:
                    if answer.status == 202:
                        accepted.append((await answer.json())["job_id"])
                        break
                    refused[answer.status] += 1
                    await answer.read()
                await asyncio.sleep(0.05)
            if len(accepted) % 100 == 0:
                told(len(accepted))

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        await asyncio.gather(*(one_client(session, which) for which in range(CLIENTS)))
    return accepted, refused


async def _kill(workers: Sequence[WorkerProcess], every_s: float, over: asyncio.Event) -> int:
    """Kill one worker after the other, and start it again at once; how many were killed."""
    for killed, worker in enumerate(itertools.cycle(workers)):
        with suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                await over.wait()
        if over.is_set():
            return killed
        worker.kill()
        worker.start()
    raise AssertionError("unreachable")


async def _states(urls: Sequence[str], ids: Sequence[str]) -> Counter[str]:
    """What the gateways say of some jobs, in turn."""
    said: Counter[str] = Counter()
    async with aiohttp.ClientSession() as session:
        for number, job in enumerate(ids):
            async with session.get(f"{urls[number % len(urls)]}/v1/jobs/{job}") as answer:
                said[(await answer.json()).get("status", f"HTTP {answer.status}")] += 1
    return said


def judge(ended: Ended) -> list[str]:
    """Every breach, one line each."""
    breaches = conservation.faults_of(ended.evidence)
    if missing := ended.evidence.submitted - ended.evidence.results.keys():
        breaches.append(f"{len(missing)} accepted jobs have no result")
    breaches += [f"{count} entries are still there: {where}" for where, count in ended.left.items() if count]
    if len(ended.evidence.submitted) != ended.accepted:
        breaches.append(f"{ended.accepted} were accepted under {len(ended.evidence.submitted)} ids")
    if odd := ended.states.keys() - {"succeeded", "dead"}:
        breaches.append(f"the gateway says {sorted(odd)} of jobs that have ended")
    return breaches
