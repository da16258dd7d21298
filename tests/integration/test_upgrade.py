"""The last release and this version on one queue and one store together: workers are replaced one by one, and back.

What the last release does not have yet is left out by asking it. Each test ends with the conservation check.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker.producer import Producer, Request
from tests.faults import model as models
from tests.faults import wire
from tests.faults.model import FakeModel
from tests.faults.processes import ROOT
from tests.faults.system import Running, System
from tests.faults.wire import Behaviour
from tests.faults.wire import Request as Asked
from tests.process_rig import RESULTS, ProcessDocuments, queue
from tests.services import free_port
from tests.stream_kit import streams_at
from tests.stream_system import StreamSystem, stream_system
from tests.upgrade.releases import NoHistory, Release, last_release
from tests.waiting import eventually

HERE: Final = Release(name="this version", folder=ROOT)
REQUESTS: Final = 60
PYTHON: Final = (sys.executable, "-P", "-m", "inference_worker")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The last release; where a clone has no history there is nothing to test, but CI must have one."""
    try:
        return last_release(tmp_path_factory.mktemp("release"))
    except NoHistory as exc:
        if os.environ.get("CI") and (ROOT / ".git").exists():
            raise
        pytest.skip(str(exc))


def seldom_busy() -> Callable[[Asked], Behaviour | None]:
    """Of each request the first call in five fails, and is tried again."""
    rng, seen = random.Random(4), Counter[str]()

    def decide(asked: Asked) -> Behaviour | None:
        request_id = asked.headers.get("x-request-id", "")
        seen[request_id] += 1
        if seen[request_id] == 1 and rng.random() < 0.2:
            return wire.error(503)
        return models.ok(takes_s=rng.uniform(0.02, 0.1))

    return decide


def test_the_last_release_is_run_from_its_own_sources(old: Release) -> None:
    """Else this version would be tested against itself."""
    asked = "import inference_worker.assembly as module; print(module.__file__)"
    for release in (old, HERE):
        said = subprocess.run(
            [sys.executable, "-P", "-c", asked],
            env={"PATH": os.environ["PATH"], **release.environ},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert said.stdout.startswith(str(release.folder)), said.stdout
    assert not (old.folder / "tests").exists()


# ---------------------------------------------------------------- one queue beside a model


Start = Callable[[str, Release], Running]


async def replaced_one_by_one(
    start: Start,
    old: Release,
    submit: Callable[[Sequence[str]], Awaitable[None]],
    ids: Sequence[str],
    answered: Callable[[Sequence[str]], Awaitable[object]],
) -> None:
    """Two workers, replaced by the other version amid their work: killed, or told to stop; to the new one, and back."""
    portion = len(ids) // 4
    async with AsyncExitStack() as stack:
        running = [start(f"old-{number}", old) for number in range(2)]
        for worker in running:
            await stack.enter_async_context(worker)
        for worker in running:
            await worker.ready(worker.readyz)
        for turn, (place, release) in enumerate([(0, HERE), (1, HERE), (0, old), (1, HERE)]):
            some = ids[turn * portion : (turn + 1) * portion]
            await submit(some)
            await answered(some[: portion // 3])
            leaving = running[place]
            if turn % 2:
                leaving.terminate()
            else:
                leaving.kill()
            running[place] = await stack.enter_async_context(start(f"turn-{turn}", release))
            await running[place].ready(running[place].readyz)
            if turn % 2:
                assert await leaving.wait(within=15) == 0, leaving.log[-2000:]
        await answered(ids)
        for worker in running:
            worker.terminate()
        for worker in running:
            assert await worker.wait(within=15) == 0, worker.log[-2000:]


def starting(make: Callable[..., Running], extra: Mapping[str, str]) -> Start:
    def start(replica: str, release: Release) -> Running:
        made = make(replica, **extra, **release.environ)
        made.command = (*PYTHON, "run")
        return made

    return start


async def test_over_rabbitmq_a_fleet_is_replaced_one_by_one_and_back(old: Release, system: System) -> None:
    system.model.decide = seldom_busy()
    ids = system.ids(REQUESTS)

    async def submit(some: Sequence[str]) -> None:
        await system.submit(*some)

    start = starting(system.process, {"CLAIM_LEASE_S": "1", "MODEL_RETRY_STATUS_CODES": "503"})
    await replaced_one_by_one(start, old, submit, ids, system.answered)
    async with system.worker("last"):
        await system.drained()
        await system.billed()
    evidence = await system.conserved()

    failed = {one: result.get("error") for one, result in evidence.results.items() if result["status"] != "completed"}
    assert not failed


async def test_over_a_stream_a_fleet_is_replaced_one_by_one_and_back(
    old: Release, redis_url: str, deployment_id: str, tmp_path: Path
) -> None:
    async with (
        streams_at(redis_url) as streams,
        stream_system(redis_url, deployment_id, tmp_path, streams) as system,
    ):
        system.rest.model.decide = seldom_busy()
        ids = system.ids(REQUESTS)
        await replaced_one_by_one(
            starting(system.process, {"IWL_MAX_ATTEMPTS": "4"}), old, _into(system), ids, system.answered
        )
        async with system.worker("last"):
            await system.drained()
        await system.conserved()


def _into(system: StreamSystem) -> Callable[[Sequence[str]], Awaitable[None]]:
    async def submit(some: Sequence[str]) -> None:
        await system.submit(*some)

    return submit


# ---------------------------------------------------------------- many queues


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Processes of both versions over the same sorted sets, with a quota that they share."""

    redis_url: str
    redis: RedisClient
    model: FakeModel
    folder: Path

    def start(self, name: str, release: Release) -> Running:
        port = free_port()
        tenants = {"gate_type": "redis-quota", "gate_params": {"address": self.redis_url, "limit": "3"}}
        documents = ProcessDocuments(
            url=self.redis_url,
            queues=[queue("quick", self.model.url, **tenants), queue("slow", self.model.url)],
            flags={"health-port": str(port), "concurrency": "4", "drain-timeout": "3s"},
            transport={"claim_lease_ttl_seconds": 2},
        )
        command = (*PYTHON, "process", *documents.arguments(_no_file))
        made = Running(release.environ, output=self.folder / f"{name}.log", command=command)
        made.port, made.replica = port, name
        return made

    async def answered(self, ids: Sequence[str]) -> Counter[str]:
        """Wait until each has a result; how many there are of each id that was ever submitted."""

        async def all_there() -> Counter[str]:
            found = Counter(json.loads(one)["id"] for one in await self.redis.lrange(RESULTS, 0, -1))
            missing = set(ids) - found.keys()
            assert not missing, f"{len(missing)} without a result: {sorted(missing)[:5]}"
            return found

        return await eventually(all_there, within=30, what=f"the results of {len(ids)} requests", every=0.05)


def _no_file(name: str, text: str) -> str:
    raise AssertionError(f"there is no document {name}: {text}")


@asynccontextmanager
async def fleet(redis_url: str, folder: Path) -> AsyncGenerator[Fleet]:
    async with FakeModel() as model, RedisClient.from_url(redis_url, socket_timeout=None) as redis:
        model.decide = seldom_busy()
        yield Fleet(redis_url=redis_url, redis=redis, model=model, folder=folder)


SUBMIT = """
import asyncio, json, sys, time
from inference_worker.producer import Producer, Request

async def main():
    async with Producer(sys.argv[1], request_queue=sys.argv[2], result_queue=sys.argv[3]) as producer:
        for one in json.load(sys.stdin):
            await producer.submit(Request(id=one, payload={"model": "m", "prompt": one}, deadline=time.time() + 120))

asyncio.run(main())
"""


async def submitted_by(release: Release, redis_url: str, name: str, ids: Sequence[str]) -> None:
    """Submit with a version's own producer."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", SUBMIT, redis_url, name, RESULTS),
        env={"PATH": os.environ["PATH"], **release.environ},
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        _, said = await process.communicate(json.dumps(list(ids)).encode())
    assert process.returncode == 0, said.decode()


async def test_over_sorted_sets_a_fleet_is_replaced_one_by_one_and_back(
    old: Release, redis_url: str, tmp_path: Path
) -> None:
    """With both versions' producers, a quota that both count, retries, and results in one list."""
    _has(old, "redis-sortedset")
    async with fleet(redis_url, tmp_path) as system:
        ids = [f"r{number}" for number in range(REQUESTS)]

        async def submit(some: Sequence[str]) -> None:
            half = len(some) // 2
            await submitted_by(old, redis_url, "quick", some[:half])
            await submitted_by(HERE, redis_url, "slow", some[half:])

        await replaced_one_by_one(system.start, old, submit, ids, system.answered)

        results = await system.answered(ids)
        assert results == Counter(ids), "each once"
        left = {
            key: await system.redis.exists(key)
            for name in ("quick", "slow")
            for key in (name, f"{name}:claimed", f"{name}:delayed", f"{name}:dead")
        }
        assert not any(left.values()), left
        statuses = Counter(json.loads(one)["status_code"] for one in await system.redis.lrange(RESULTS, 0, -1))
        assert statuses == {200: REQUESTS}


async def test_what_one_version_leases_the_other_renews_and_acknowledges(old: Release, redis_url: str) -> None:
    """Producers of both versions on one list of results: who takes one keeps it from the other."""
    _has(old, "redis-sortedset")
    async with RedisClient.from_url(redis_url, socket_timeout=None) as redis:
        for number in range(4):
            await redis.lpush(RESULTS, json.dumps({"id": f"r{number}", "payload": "{}", "status_code": 200}))
    take = TAKE.format(results=RESULTS)
    said = await _output(old, take, redis_url)
    async with Producer(redis_url, result_queue=RESULTS) as producer:
        mine = [await producer.receive(within_s=5, lease_s=30) for _ in range(2)]
        ids = {leased.result.id for leased in mine}
        for leased in mine:
            await leased.renew(lease_s=30)
            await leased.ack()
        depth = await producer.depth()

    assert ids | set(said.split()) == {f"r{number}" for number in range(4)}
    assert (depth.results, depth.leased) == (0, 1), "the other version's: one is acknowledged, one still leased"


TAKE = """
import asyncio, sys
from inference_worker.producer import Producer

async def main():
    async with Producer(sys.argv[1], result_queue="{results}") as producer:
        first = await producer.receive(within_s=5, lease_s=60)
        second = await producer.receive(within_s=5, lease_s=60)
        await first.ack()
        print(first.result.id, second.result.id)

asyncio.run(main())
"""


async def _output(release: Release, program: str, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", program, *arguments),
        env={"PATH": os.environ["PATH"], **release.environ},
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_a_request_that_one_version_has_submitted_the_other_finds_by_its_key(
    old: Release, redis_url: str
) -> None:
    _has(old, "redis-sortedset")
    deadline = int(time.time()) + 60
    program = KEYED.format(deadline=deadline)
    first = (await _output(old, program, redis_url)).strip()
    async with Producer(redis_url, result_queue=RESULTS) as producer:
        again = await producer.submit(
            Request(id="r", payload={"model": "m", "prompt": "p"}, deadline=deadline, idempotency_key="k")
        )
        known = await producer.look_up("k")

    assert (again.token, again.repeated) == (first, True)
    assert known is not None
    assert known.token == first


KEYED = """
import asyncio, sys
from inference_worker.producer import Producer, Request

async def main():
    async with Producer(sys.argv[1], result_queue="result-list") as producer:
        request = Request(id="r", payload={{"model": "m", "prompt": "p"}}, deadline={deadline}, idempotency_key="k")
        print((await producer.submit(request)).token)

asyncio.run(main())
"""


def _has(release: Release, transport: str) -> None:
    """Leave a test out where the release does not know of the transport."""
    said: Any = subprocess.run(
        [*PYTHON, "process", "--help"],
        env={"PATH": os.environ["PATH"], **release.environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if transport not in said.stdout:
        pytest.skip(f"{release.name} has no {transport}")
