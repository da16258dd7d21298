"""The gateway between real servers: over RabbitMQ and Redis Streams, two of them, killed, cut off, stopped."""

import asyncio
import hashlib
import json
import secrets
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis as RedisClient

from tests.conservation import results
from tests.faults import model as fake
from tests.faults.model import FakeModel
from tests.gateways import STOP_S, GatewayProcess, gateway
from tests.integration.conftest import MakeProxy, RunningWorker
from tests.services import Rabbit
from tests.waiting import eventually
from tests.worker_env import worker_env

JOB: dict[str, Any] = {"payload": {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}}
OVER = ("rabbitmq", "redis-streams")


@asynccontextmanager
async def client(*, key: str | None = None) -> AsyncGenerator[httpx.AsyncClient]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(trust_env=False, timeout=60, headers=headers) as http:
        yield http


def env_of(over: str, rabbitmq_url: str, redis_url: str, deployment_id: str) -> dict[str, str]:
    """The environment of worker and gateway alike."""
    env = worker_env(rabbitmq_url=rabbitmq_url, redis_url=redis_url, model_url="", deployment_id=deployment_id)
    return env | over_variables(over, deployment_id)


def over_variables(over: str, deployment_id: str) -> dict[str, str]:
    if over == "rabbitmq":
        return {}
    return {
        "TRANSPORT": over,
        "IWL_STREAM": f"{deployment_id}:jobs",
        "IWL_DLQ_STREAM": f"{deployment_id}:dlq",
        "IWL_CONCURRENCY": "4",
    }


async def submitted(http: httpx.AsyncClient, url: str, **more: object) -> str:
    answer = await http.post(f"{url}/v1/jobs", json={**JOB, **more})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["job_id"])


async def ended(http: httpx.AsyncClient, url: str, job_id: str) -> dict[str, Any]:
    view: dict[str, Any] = (await http.get(f"{url}/v1/jobs/{job_id}", params={"wait": 30})).json()
    return view


# ---------------------------------------------------------------- the way of a job


@pytest.mark.parametrize("over", OVER)
async def test_a_job_that_came_before_the_first_worker_is_run_by_it(
    running_worker: RunningWorker, over: str, rabbitmq_url: str, redis_url: str, deployment_id: str
) -> None:
    """Nothing was declared by anybody: the gateway does, so that a fleet may start at zero."""
    env = env_of(over, rabbitmq_url, redis_url, deployment_id)
    async with gateway(env) as url, client() as http:

        async def ready() -> bool:
            return (await http.get(f"{url}/readyz")).status_code == 200

        await eventually(ready, within=15, what="a gateway that is ready")
        first = await http.post(f"{url}/v1/jobs", json=JOB)
        second = await http.post(f"{url}/v1/jobs", json=JOB)
        assert (first.json()["position"], second.json()["position"]) == (1, 2)

        await running_worker(**over_variables(over, deployment_id))

        for answer in (first, second):
            view = await ended(http, url, answer.json()["job_id"])
            assert view["status"] == "succeeded"
            assert view["result"]["choices"][0]["message"]["content"] == "tick tock"


@pytest.mark.parametrize("over", OVER)
async def test_two_gateways_know_the_same_jobs(
    running_worker: RunningWorker, model: FakeModel, over: str, deployment_id: str
) -> None:
    model.default = fake.ok(takes_s=60)
    w = await running_worker(**over_variables(over, deployment_id))
    async with gateway(w.env) as one, gateway(w.env, REPLICA_ID="gateway-2") as other, client() as http:
        keyed = {"idempotency_key": "k"}
        twins = await asyncio.gather(*(submitted(http, url, **keyed) for url in (one, other) for _ in range(5)))
        (job_id,) = set(twins)
        await model.busy()
        listed = (await http.get(f"{other}/v1/jobs")).json()["jobs"]
        waiting = asyncio.create_task(ended(http, one, job_id))
        cancelled = await http.delete(f"{other}/v1/jobs/{job_id}")

        assert [job["job_id"] for job in listed] == [job_id]
        assert listed[0]["status"] == "running"
        assert cancelled.status_code == 200
        assert (await waiting)["status"] == "cancelled"
        await eventually(lambda: model.in_flight == 0, within=10, what="the end of the call")
    assert len(model.requests) == 1


@pytest.mark.parametrize("over", OVER)
async def test_whenever_a_gateway_is_killed_a_key_means_one_job_that_runs_once(
    running_worker: RunningWorker,
    redis_client: RedisClient,
    model: FakeModel,
    over: str,
    deployment_id: str,
    tmp_path: Path,
) -> None:
    """Clients submit at one that is killed in the middle, and ask the other for what they were not told."""
    prefetch = {"RABBITMQ_PREFETCH": "8", "IWL_CONCURRENCY": "8"}
    w = await running_worker(**(over_variables(over, deployment_id) | prefetch))
    keys = [secrets.token_hex(8) for _ in range(120)]
    told: dict[str, set[str]] = {key: set() for key in keys}

    async def submit(http: httpx.AsyncClient, url: str, key: str) -> bool:
        try:
            answer = await http.post(f"{url}/v1/jobs", json={**JOB, "idempotency_key": key})
        except httpx.HTTPError:
            return False
        if answer.status_code == 202:
            told[key].add(answer.json()["job_id"])
        return answer.status_code == 202

    async with client() as http, gateway(w.env, REPLICA_ID="gateway-2") as other:
        async with GatewayProcess(w.env, folder=tmp_path) as killed:
            url = await killed.up()
            sending = [asyncio.create_task(submit(http, url, key)) for key in keys]
            await eventually(lambda: sum(map(bool, told.values())) >= 30, within=10, what="some answers", every=0.001)
            killed.kill()
            first = await asyncio.gather(*sending)
        assert not all(first), "all were answered before the kill"

        async def all_resent() -> bool:
            return all(await asyncio.gather(*(submit(http, other, key) for key in keys)))

        await eventually(all_resent, within=20, what="the job of every key")

        jobs = {key: next(iter(ids)) for key, ids in told.items()}
        views = await asyncio.gather(*(ended(http, other, job_id) for job_id in jobs.values()))

    assert [len(ids) for ids in told.values()] == [1] * len(keys)
    assert Counter(view["status"] for view in views) == {"succeeded": len(keys)}
    asked = Counter(request.headers["x-request-id"] for request in model.requests)
    assert asked == Counter(jobs.values())
    seen = await w.seen()
    assert (seen.queued, seen.dead) == ([], [])
    assert seen.billed == sorted(jobs.values())
    assert len(await results(redis_client, jobs.values())) == len(keys)


async def test_a_broker_that_cannot_be_reached_is_a_503_and_nothing_is_accepted(
    running_worker: RunningWorker, rabbit: Rabbit, rabbitmq_url: str, proxy: MakeProxy, model: FakeModel
) -> None:
    w = await running_worker()
    link = await proxy(rabbit, speaks="amqp")
    async with gateway({**w.env, "RABBITMQ_URL": link.url(rabbitmq_url)}) as url, client() as http:
        await submitted(http, url)
        await link.refuse()
        await link.cut()

        refused = await http.post(f"{url}/v1/jobs", json=JOB)

        assert refused.status_code == 503, refused.text
        assert int(refused.headers["retry-after"]) > 0
        await link.accept()

        async def accepted() -> bool:
            return (await http.post(f"{url}/v1/jobs", json=JOB)).status_code == 202

        await eventually(accepted, within=20, what="an accepted job once the broker is back")


async def test_a_full_queue_is_a_429_with_the_time_until_there_is_room(
    running_worker: RunningWorker, model: FakeModel
) -> None:
    model.default = fake.ok(takes_s=60)
    w = await running_worker()
    async with gateway(w.env, IWL_MAX_QUEUE_DEPTH="3") as url, client() as http:

        async def full() -> httpx.Response | None:
            answer = await http.post(f"{url}/v1/jobs", json=JOB)
            return answer if answer.status_code == 429 else None

        refused = await eventually(full, within=10, what="a full queue", every=0.1)

        assert 1 <= int(refused.headers["retry-after"]) <= 3600
        for job in (await http.get(f"{url}/v1/jobs")).json()["jobs"]:
            await http.delete(f"{url}/v1/jobs/{job['job_id']}")


# ---------------------------------------------------------------- the process


@pytest.fixture
def env(rabbitmq_url: str, redis_url: str, deployment_id: str) -> dict[str, str]:
    return env_of("redis-streams", rabbitmq_url, redis_url, deployment_id)


async def test_sigterm_lets_those_who_wait_go_with_what_is_known(env: dict[str, str], tmp_path: Path) -> None:
    async with GatewayProcess(env, folder=tmp_path) as process, client() as http:
        url = await process.up()
        job_id = await submitted(http, url)
        waiting = asyncio.create_task(ended(http, url, job_id))
        chatting = asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=JOB["payload"]))

        async def both_wait() -> bool:
            return "waiting_clients 2.0" in (await http.get(f"{url}/metrics")).text

        await eventually(both_wait, within=10, what="two that wait")
        process.terminate()

        assert (await waiting)["status"] == "queued"
        answer = await chatting
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")
        assert await process.wait(STOP_S) == 0
    assert "Traceback" not in process.log


@pytest.mark.parametrize(
    ("changes", "content", "told"),
    [
        pytest.param({}, '{"keys": [{"tenant": "a", "sha256": "s3cret"}]}', "keys[0].sha256", id="a bad file"),
        pytest.param({"GATEWAY_WEBHOOK_SECRET": "s3cret"}, None, "GATEWAY_WEBHOOK_SECRET", id="a bad secret"),
    ],
)
async def test_what_is_wrong_with_keys_ends_it_with_2_and_one_line(
    env: dict[str, str], tmp_path: Path, changes: dict[str, str], content: str | None, told: str
) -> None:
    if content is not None:
        (tmp_path / "keys.json").write_text(content)
        changes = {"GATEWAY_API_KEYS_FILE": str(tmp_path / "keys.json")}
    async with GatewayProcess(env | changes, folder=tmp_path) as process:
        code = await process.wait(STOP_S)

    assert code == 2
    assert told in process.log
    assert "s3cret" not in process.log
    assert "Traceback" not in process.log


async def test_a_port_that_is_taken_ends_it_with_1_and_one_line(env: dict[str, str], tmp_path: Path) -> None:
    async with gateway(env) as url, GatewayProcess(env, folder=tmp_path) as process:
        process.kill()
        process.env["GATEWAY_PORT"] = url.rpartition(":")[2]
        process.start()

        assert await process.wait(STOP_S) == 1
    assert "GATEWAY_PORT: cannot listen" in process.log
    assert "Traceback" not in process.log


async def test_without_keys_it_listens_on_loopback_alone_and_says_so(env: dict[str, str], tmp_path: Path) -> None:
    async with GatewayProcess(env | {"GATEWAY_HOST": "0.0.0.0"}, folder=tmp_path) as process:
        await process.up()

        assert "nobody is asked who he is" in process.log
        assert '"listening":"127.0.0.1"' in process.log.replace('": "', '":"')
        listening = json.loads(next(line for line in process.log.splitlines() if '"event":"listening"' in line))
        assert listening["url"].startswith("http://127.0.0.1:")


async def test_with_keys_tenants_and_operators_see_what_is_theirs(env: dict[str, str], tmp_path: Path) -> None:
    keys = [
        {"tenant": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "operator": name == "ops"}
        for name in ("acme", "rival", "ops")
    ]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": keys, "webhook_secrets": {"acme": "whsec_" + "A" * 44}}))
    async with gateway(env, GATEWAY_API_KEYS_FILE=str(path)) as url:
        async with client(key="acme") as http:
            hooked = {"webhook": {"url": "https://example.com/hook"}}
            job_id = await submitted(http, url, **hooked)
            mine = await http.get(f"{url}/v1/jobs/{job_id}/webhook")
            scale_of_a_tenant = await http.get(f"{url}/v1/scale")
        async with client(key="rival") as http:
            others = await http.get(f"{url}/v1/jobs/{job_id}/webhook")
            no_secret = await http.post(f"{url}/v1/jobs", json={**JOB, **hooked})
            nothing = (await http.get(f"{url}/v1/jobs")).json()
        async with client(key="ops") as http:
            await http.get(f"{url}/v1/scale")

            async def seen() -> bool:
                return (await http.get(f"{url}/v1/scale")).status_code == 200

            await eventually(seen, within=15, what="a scale signal")
        async with client() as http:
            nobody = await http.get(f"{url}/v1/scale")

    assert (mine.status_code, others.status_code) == (200, 404)
    assert mine.json()["url"] == "https://example.com/hook"
    assert (scale_of_a_tenant.status_code, nobody.status_code) == (403, 401)
    assert "signed" in no_secret.json()["detail"]
    assert nothing["jobs"] == []
