"""The last release and this version on one queue and one store together: workers are replaced one by one, and back.

What the last release does not have yet is left out by asking it, and tested from the next one on. Where requests are
run, the test ends with the conservation check.
"""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker.producer import Producer, Request
from tests.every_transport import Queues, rabbit_queues, sql_tables, streams, subscriptions
from tests.faults import model as models
from tests.faults import wire
from tests.faults.model import FakeModel
from tests.faults.process_kills import QUEUE, Ended
from tests.faults.processes import ROOT
from tests.faults.system import Running, System
from tests.faults.wire import Behaviour
from tests.faults.wire import Request as Asked
from tests.gateways import GatewayProcess, gateway
from tests.integration.conftest import RunningWorker
from tests.process_rig import RESULTS, ProcessDocuments, queue
from tests.services import free_port
from tests.stream_kit import streams_at
from tests.stream_system import StreamSystem, stream_system
from tests.upgrade.releases import NoHistory, Release, last_release
from tests.waiting import eventually

HERE: Final = Release(name="this version", folder=ROOT)
REQUESTS: Final = 40
QUOTA: Final = 3
JOB: Final[dict[str, Any]] = {"payload": {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}}
UNBILLED: Final = {"MODEL_BREAKER_FAILURES": "0", "CROESUS_HOST": "http://127.0.0.1:1"}
"""Nobody takes usage events there, so that all of them can be counted."""
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


async def test_what_one_version_has_answered_the_other_neither_runs_nor_bills_again(
    old: Release, system: System
) -> None:
    """Redelivered both ways: the result is found, and has one bill."""
    here, there = system.ids(5, "here"), system.ids(5, "old")
    async with system.inside("here") as worker:
        await system.submit_when_declared(*here)
        await system.answered(here)
        await system.drained(worker)
    release = starting(system.process, {})("old", old)
    async with release:
        await release.ready(release.readyz)
        await system.submit(*here, *there)
        await system.answered(there)
        await system.drained()
        await system.stopped(release)
    async with system.inside("here-again") as worker:
        await system.submit(*there)
        await system.drained(worker)
        await system.billed()
    await system.conserved()

    assert system.calls() == Counter([*here, *there]), "each was run once"
    assert len(system.billing.events) == len({str(event["id"]) for event in system.billing.events}) == 10


async def test_gateways_of_both_versions_know_the_same_jobs(
    old: Release, running_worker: RunningWorker, model: FakeModel, tmp_path: Path
) -> None:
    """A key stands for one job at both; what one accepted the other shows, waits for, lists and cancels."""
    w = await running_worker()
    process = GatewayProcess({**w.env, **old.environ}, folder=tmp_path)
    process.command = (*PYTHON, "gateway")
    async with (
        process,
        gateway(w.env, REPLICA_ID="here") as here,
        httpx.AsyncClient(trust_env=False, timeout=30) as http,
    ):
        there = await process.up()

        async def submitted(url: str, key: str) -> str:
            answer = await http.post(f"{url}/v1/jobs", json={**JOB, "idempotency_key": key})
            assert answer.status_code == 202, answer.text
            return str(answer.json()["job_id"])

        async def seen(url: str, job_id: str) -> str:
            view = await http.get(f"{url}/v1/jobs/{job_id}", params={"wait": 20})
            return str(view.json()["status"])

        jobs = {}
        for key, (first, other) in {"of the old": (there, here), "of the new": (here, there)}.items():
            jobs[key] = await submitted(first, key)
            assert await submitted(other, key) == jobs[key]
            assert await seen(other, jobs[key]) == "succeeded"
        for url in (there, here):
            listed = (await http.get(f"{url}/v1/jobs")).json()["jobs"]
            assert {job["job_id"] for job in listed} == set(jobs.values())
        model.default = models.ok(takes_s=60)
        for first, other in ((there, here), (here, there)):
            job_id = await submitted(first, f"cancelled at {other}")
            await model.busy()
            assert (await http.delete(f"{other}/v1/jobs/{job_id}")).status_code == 200
            assert await seen(first, job_id) == "cancelled"
            await eventually(lambda: model.in_flight == 0, within=10, what="the end of the call")


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
    limited: FakeModel
    """That of the queue with the quota."""
    folder: Path

    def start(self, name: str, release: Release) -> Running:
        port = free_port()
        quota = {"address": self.redis_url, "mode": "concurrency", "limit": str(QUOTA), "lease": "1s"}
        gate = {"gate_type": "redis-quota", "gate_params": quota, "labels": {"userid": "alice"}}
        documents = ProcessDocuments(
            url=self.redis_url,
            queues=[queue("quick", self.limited.url, **gate), queue("slow", self.model.url)],
            flags={"health-port": str(port), "concurrency": "4", "drain-timeout": "3s"},
            transport={"claim_lease_ttl_seconds": 2},
        )
        command = (*PYTHON, "process", *documents.arguments(_no_file))
        environ = {"CLAIM_LEASE_S": "1", **release.environ}
        made = Running(environ, output=self.folder / f"{name}.log", command=command)
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
    async with (
        FakeModel() as model,
        FakeModel() as limited,
        RedisClient.from_url(redis_url, socket_timeout=None) as redis,
    ):
        model.decide, limited.decide = seldom_busy(), seldom_busy()
        yield Fleet(redis_url=redis_url, redis=redis, model=model, limited=limited, folder=folder)


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
    """Submit with the last release's own producer."""
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
            async with Producer(redis_url, request_queue="slow", result_queue=RESULTS) as producer:
                for one in some[half:]:
                    payload = {"model": "m", "prompt": one}
                    await producer.submit(Request(id=one, payload=payload, deadline=time.time() + 120))

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
        assert system.limited.peak <= QUOTA, "both count what the other runs"


async def shared(old: Release, queues: Queues, folder: Path) -> None:
    """A process of each version on one queue; the old one is killed amid its work, comes back, and is replaced."""
    async with FakeModel() as model, AsyncExitStack() as stack:
        model.decide = seldom_busy()

        async def started(name: str, release: Release) -> Running:
            port = free_port()
            told = queues.told(model.url, quick=True, concurrency="4", health_port=str(port), drain_timeout="3s")
            environ = {**told.environ, **UNBILLED, **release.environ}
            command = (*PYTHON, "process", *told.arguments())
            made = Running(environ, output=folder / f"{name}.log", command=command)
            made.port, made.replica = port, name
            await stack.enter_async_context(made)
            await made.ready(made.readyz)
            return made

        async def ends(number: int) -> None:
            async def reached() -> bool:
                return await queues.ended() >= number

            await eventually(reached, within=40, what=f"{number} ends", every=0.05)

        ids = [f"r{number}" for number in range(24)]
        first, here = await asyncio.gather(started("old", old), started("here", HERE))
        await queues.put(QUEUE, ids[:12])
        await ends(4)
        first.kill()
        await queues.put(QUEUE, ids[12:18])
        back = await started("old-again", old)
        await queues.put(QUEUE, ids[18:])
        here.terminate()
        assert await here.wait(within=15) == 0, here.log[-2000:]
        last = await started("here-again", HERE)
        await ends(len(ids))
        for running in (back, last):
            running.terminate()
        for running in (back, last):
            assert await running.wait(within=15) == 0, running.log[-2000:]
        ended = Ended(
            submitted=frozenset(ids),
            found=await queues.found(),
            repeats=queues.repeats,
            kills=1,
            failed_once=0,
            calls=len(model.requests),
            seconds=0.0,
        )
    assert not ended.breaches()
    assert ended.completed == ended.submitted


async def test_processes_of_both_versions_share_a_stream(old: Release, redis_url: str, tmp_path: Path) -> None:
    _has(old, "redis-streams")
    async with streams(redis_url, [QUEUE]) as queues:
        await shared(old, queues, tmp_path)


async def test_processes_of_both_versions_share_a_queue_of_rabbitmq(
    old: Release, rabbitmq_url: str, redis_url: str, tmp_path: Path
) -> None:
    _has(old, "rabbitmq")
    async with rabbit_queues(rabbitmq_url, redis_url, [QUEUE]) as queues:
        await shared(old, queues, tmp_path)


async def test_processes_of_both_versions_share_a_queue_in_postgres(old: Release, sql_url: str, tmp_path: Path) -> None:
    _has(old, "sql")
    async with sql_tables(sql_url, [QUEUE]) as queues:
        await shared(old, queues, tmp_path)


async def test_processes_of_both_versions_share_a_subscription(old: Release, redis_url: str, tmp_path: Path) -> None:
    _has(old, "gcp-pubsub")
    async with subscriptions(redis_url, [QUEUE]) as queues:
        await shared(old, queues, tmp_path)


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
    said = subprocess.run(
        [*PYTHON, "process", "--help"],
        env={"PATH": os.environ["PATH"], **release.environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    listed = re.search(r"the kind of queues: ((?:[a-z-]+,\s+)*[a-z-]+)", said.stdout)
    assert listed is not None, said.stdout
    if transport not in re.split(r",\s+", listed[1]):
        pytest.skip(f"{release.name} has no {transport}")
