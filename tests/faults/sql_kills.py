"""Workers of a queue in Postgres, killed again and again while requests come; what is looked at when all have ended.

Each worker is a whole `inference-worker process` in a process of its own (`sql_nursery.py`), and dies by SIGKILL at a
moment drawn by chance: at its start, between a claim and its answer, in the middle of a transaction.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from inference_worker.sql_producer import Request, SqlProducer
from tests.faults.processes import ROOT
from tests.process_rig import ProcessDocuments, queue, serving_mock
from tests.services import reaper
from tests.sql_kit import SqlQueueKit, sql_queue_at
from tests.waiting import eventually

QUEUE: Final = "kills"
ROUTE: Final = "kills-results"
WORKERS: Final = 4
SLOTS: Final = 4
LATENCY_S: Final = 0.03

Told = Callable[[int, int], None]
"""Of kills and of results so far."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What was found when nothing waited any more."""

    submitted: frozenset[str]
    results: Counter[str]
    completed: int
    failed: int
    billed: Counter[str]
    """Usage events by id, sent to nobody."""
    dead: Counter[str]
    left: int
    """Rows of requests."""
    endless: int
    """Requests without an end in the state, though they have a result."""
    kills: int
    calls: int
    """Of the model."""
    seconds: float

    def breaches(self) -> list[str]:
        """What must not be, one line each."""
        lost, twice = self.submitted - self.results.keys(), [name for name, n in self.results.items() if n > 1]
        found = [
            *(f"{name} has no result" for name in sorted(lost)),
            *(f"{name} has {self.results[name]} results" for name in twice),
            *(f"{name} was never submitted" for name in self.results.keys() - self.submitted),
            *(f"event {name} is there {n} times" for name, n in self.billed.items() if n > 1),
        ]
        if len(self.billed) != self.completed:
            found.append(f"{self.completed} were completed, and {len(self.billed)} are billed")
        if sum(self.dead.values()) != self.failed:
            found.append(f"{self.failed} have failed, and {sum(self.dead.values())} are dead letters")
        if self.left or self.endless:
            found.append(f"{self.left} rows and {self.endless} states are left behind")
        return found


class Nursery:
    """Workers, of which each can be killed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._seed = 0
        self.alive: list[int] = []

    async def beget(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._seed += 1
        self._process.stdin.write(f"{self._seed}\n".encode())
        self.alive.append(int(await self._process.stdout.readline()))

    def kill(self, pid: int) -> None:
        self.alive.remove(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def nursery(documents: ProcessDocuments, environ: dict[str, str]) -> AsyncGenerator[Nursery, None]:
    """One of these documents; its workers end with it."""
    flags, files = documents.given()
    said = {"flags": flags, "files": files, "environ": environ}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.faults.sql_nursery", json.dumps(said)),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    reaper().remember("group", str(process.pid))
    try:
        yield Nursery(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        reaper().forget("group", str(process.pid))


async def run(url: str, *, kills: int, requests: int, lives_s: float, told: Told = lambda _, __: None) -> Ended:
    """Submit, kill, wait for the end, look. `lives_s` is how long a worker lives on average."""
    rng, began = random.Random(7), time.monotonic()
    async with serving_mock(latency_s=LATENCY_S) as mock, sql_queue_at(url) as kit:
        documents = ProcessDocuments(
            url=url,
            queues=[queue(QUEUE, mock.url)],
            pools=[{"id": "default", "workers": SLOTS}],
            kind="sql",
            transport={"lease_ttl_seconds": 1, "poll_interval_ms": 100},
        )
        environ = {"CLAIM_LEASE_S": "0.5", "CROESUS_HOST": "http://127.0.0.1:1", "INFERENCE_MAX_CRASHES": "3"}
        async with (
            nursery(documents, environ) as workers,
            SqlProducer(result_queue=ROUTE, request_queue=QUEUE, place=kit.place) as producer,
        ):
            for _ in range(WORKERS):
                await workers.beget()
            submitting = asyncio.create_task(_submit(producer, requests, kills * lives_s / WORKERS))
            for kill in range(kills):
                await asyncio.sleep(rng.expovariate(WORKERS / lives_s))
                workers.kill(rng.choice(workers.alive))
                await workers.beget()
                if kill % 10 == 0:
                    told(kill, (await producer.depth()).results)
            await submitting

            async def over() -> bool:
                done = (await producer.depth()).results
                told(kills, done)
                return not (await kit.rows("select 1 from iw_requests limit 1"))

            await eventually(over, within=120, every=0.2, what="the end of all requests")
        return await _seen(kit, submitting.result(), kills, mock.mock.requests, time.monotonic() - began)


async def _submit(producer: SqlProducer, requests: int, over_s: float) -> frozenset[str]:
    """Some at a time, over the time of the kills."""
    ids = [f"r{number}" for number in range(requests)]
    for start in range(0, requests, 20):
        deadline = time.time() + 3600
        some, payload = ids[start : start + 20], {"prompt": "x", "max_tokens": 2}
        await producer.submit_many(Request(id=one, payload=payload, deadline=deadline) for one in some)
        await asyncio.sleep(over_s * 0.9 / (requests / 20))
    return frozenset(ids)


async def _seen(kit: SqlQueueKit, submitted: frozenset[str], kills: int, calls: int, seconds: float) -> Ended:
    results = await kit.results(ROUTE)
    events = [json.loads(row[0]) for row in await kit.rows("select event from iw_usage")]
    ((left,),) = await kit.rows("select count(*) from iw_requests")
    ((endless,),) = await kit.rows("select count(*) from iw_state where reply is null")
    completed = sum(result.get("status_code") == 200 for result in results)
    return Ended(
        submitted=submitted,
        results=Counter(result["id"] for result in results),
        completed=completed,
        failed=len(results) - completed,
        billed=Counter(event["id"] for event in events),
        dead=(await kit.inside()).dead,
        left=left,
        endless=endless,
        kills=kills,
        calls=calls,
        seconds=seconds,
    )
