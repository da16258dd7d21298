"""The client over both ways, with real servers and a worker in this process."""

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker.assembly import Outside
from inference_worker.client import (
    Client,
    NoResultYet,
    NoSuchRequest,
    NotAccepted,
    NotSupported,
    Result,
    SyncClient,
)
from inference_worker.config.settings import load
from inference_worker.serve_gateway import listening
from tests.faults import model as fake
from tests.faults import wire
from tests.faults.model import FakeModel
from tests.faults.proxy import Do
from tests.faults.system import System
from tests.faults.wire import Behaviour, Exchange
from tests.in_process import InProcess
from tests.integration.conftest import MakeProxy, RunningWorker
from tests.services import Rabbit, Redis
from tests.waiting import eventually

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


def direct(env: Mapping[str, str], **options: Any) -> Client:
    urls = {"rabbitmq_url": env["RABBITMQ_URL"], "redis_url": env["REDIS_URL"]} | options
    return Client.direct(deployment_id=env["DEPLOYMENT_ID"], **urls)


@asynccontextmanager
async def intake(w: InProcess) -> AsyncGenerator[str, None]:
    """The HTTP intake before the worker's queue and its store."""
    settings = load({**w.env, "GATEWAY_PORT": "0", "REPLICA_ID": "gateway-1"}, needs="gateway")
    async with listening(settings, Outside(now=time.time, rng=random.Random(1))) as url:
        yield url


async def test_a_request_is_answered_over_rabbitmq_and_redis(running_worker: RunningWorker) -> None:
    w = await running_worker()
    async with direct(w.env) as client:
        job = await client.submit(CHAT, metadata={"a": "b"}, tenant="acme", request_id="mine")
        result = await job.wait()

    assert (job.request_id, result.status, result.status_code, result.attempt) == ("mine", "completed", 200, 0)
    assert result.json()["choices"][0]["message"]["content"] == "tick tock"
    assert result.timings.model_s is not None
    (sent,) = w.at.model.requests
    assert json.loads(sent.body) == CHAT


async def test_a_payload_given_as_bytes_reaches_the_model_as_it_is(running_worker: RunningWorker) -> None:
    w = await running_worker()
    raw = b'{"messages":  [], "seed": 1.50}'
    async with direct(w.env) as client:
        await client.submit_and_wait(raw)

    assert w.at.model.requests[0].body == raw


async def test_a_failure_is_a_result_with_its_reason(running_worker: RunningWorker, model: FakeModel) -> None:
    model.default = wire.error(418, "no coffee")
    w = await running_worker()
    async with direct(w.env) as client:
        result = await client.submit_and_wait(CHAT)

    assert (result.status, result.status_code, result.error_code) == ("failed", 418, "model_error")
    assert (result.error, result.json()) == ("no coffee", None)


async def test_the_same_id_twice_is_one_request(running_worker: RunningWorker) -> None:
    w = await running_worker()
    async with direct(w.env) as client:
        first = await client.submit_and_wait(CHAT, request_id="one")
        second = await client.submit_and_wait(CHAT, request_id="one")

    assert first == second
    assert (await w.seen()).calls == 1


async def test_thousands_that_wait_share_one_subscription_and_poll_nothing(
    running_worker: RunningWorker, redis_client: RedisClient
) -> None:
    w = await running_worker(RABBITMQ_PREFETCH="32")
    async with direct(w.env) as client:
        before = await commands(redis_client)
        jobs = await asyncio.gather(*(client.submit(CHAT) for _ in range(500)))
        results = await asyncio.gather(*(job.wait(60) for job in jobs))
        after = await commands(redis_client)
        names = [str(one.get("name")) for one in await redis_client.client_list()]

    assert all(result.completed for result in results)
    reads = after.get("get", 0) - before.get("get", 0)
    assert reads <= 4 * 500, f"{reads} reads for 500 results"
    assert sum(name.endswith("/client") for name in names) == 2


async def commands(redis: RedisClient) -> dict[str, int]:
    stats = await redis.info("commandstats")
    return {name.removeprefix("cmdstat_"): int(said["calls"]) for name, said in stats.items()}


async def test_a_subscription_that_is_cut_is_made_again(
    running_worker: RunningWorker,
    redis_server: Redis,
    redis_url: str,
    redis_client: RedisClient,
    proxy: MakeProxy,
    model: FakeModel,
) -> None:
    """Redis itself is asked who listens: the look behind the subscription would hide a lost one."""
    link = await proxy(redis_server, speaks="redis")
    gate = asyncio.Event()
    model.default = held_until(gate)
    w = await running_worker()
    async with direct(w.env, redis_url=link.url(redis_url)) as client:
        job = await client.submit(CHAT)
        waiting = asyncio.create_task(job.wait(30))
        await eventually(lambda: subscribers(redis_client, job.request_id), within=5, what="the subscription")
        await link.cut()
        await eventually(lambda: subscribers(redis_client, job.request_id), within=5, what="the subscription again")
        gate.set()

        assert (await waiting).completed


async def subscribers(redis: RedisClient, request_id: str) -> int:
    counted = await redis.pubsub_numsub(f"infer_resp:{request_id}")
    return int(counted[0][1])


def held_until(gate: asyncio.Event) -> Behaviour:
    async def behave(exchange: Exchange) -> None:
        await gate.wait()
        await fake.ok()(exchange)

    return behave


async def test_a_notification_that_is_lost_only_delays(
    running_worker: RunningWorker,
    redis_server: Redis,
    redis_url: str,
    redis_client: RedisClient,
    proxy: MakeProxy,
    model: FakeModel,
) -> None:
    link = await proxy(redis_server, speaks="redis")
    lost = link.when_server_sends(b"$7\r\nmessage", Do.DROP, times=100)
    gate = asyncio.Event()
    model.default = held_until(gate)
    w = await running_worker()
    async with direct(w.env, redis_url=link.url(redis_url)) as client:
        job = await client.submit(CHAT)
        waiting = asyncio.create_task(job.wait(30))
        await eventually(lambda: subscribers(redis_client, job.request_id), within=5, what="the subscription")
        gate.set()
        async with asyncio.timeout(10):  # Its last look, after 30 s, would find it anyway.
            result = await waiting

    assert result.completed
    assert lost.hits, "the notification was not lost"


async def test_redis_away_for_a_while_is_waited_out(
    running_worker: RunningWorker, redis_server: Redis, redis_url: str, proxy: MakeProxy
) -> None:
    link = await proxy(redis_server, speaks="redis")
    w = await running_worker()
    async with direct(w.env, redis_url=link.url(redis_url)) as client:
        await link.refuse()
        await link.cut()
        job = await client.submit(CHAT)
        waiting = asyncio.create_task(job.wait(30))
        await w.stored(job.request_id)
        await link.accept()

        assert (await waiting).completed


@pytest.mark.parametrize("do", [Do.CUT, Do.CUT_AFTER, Do.DROP], ids=lambda do: do.name)
async def test_a_publish_of_unknown_outcome_is_repeated_under_the_same_id(
    do: Do,
    running_worker: RunningWorker,
    rabbit: Rabbit,
    rabbitmq_url: str,
    proxy: MakeProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inference_worker.rmq_producer.CALL_S", 1.0)
    link = await proxy(rabbit, speaks="amqp")
    trap = link.when_client_sends("basic.publish", do)
    w = await running_worker()
    async with direct(w.env, rabbitmq_url=link.url(rabbitmq_url)) as client:
        result = await client.submit_and_wait(CHAT)

    assert result.completed
    assert trap.hits == 1
    seen = await w.seen()
    assert (seen.calls, list(seen.results)) == (1, [result.request_id])


async def test_a_lost_confirm_makes_a_copy_and_no_second_call(
    running_worker: RunningWorker, rabbit: Rabbit, rabbitmq_url: str, proxy: MakeProxy
) -> None:
    link = await proxy(rabbit, speaks="amqp")
    trap = link.when_server_sends("basic.ack", Do.CUT)
    w = await running_worker()
    async with direct(w.env, rabbitmq_url=link.url(rabbitmq_url)) as client:
        result = await client.submit_and_wait(CHAT)
        await w.disposed("ack", "ack")

    assert (result.completed, trap.hits) == (True, 1)
    assert (await w.seen()).calls == 1


async def test_many_publishers_share_one_reconnection(
    running_worker: RunningWorker, rabbit: Rabbit, rabbitmq_url: str, proxy: MakeProxy
) -> None:
    link = await proxy(rabbit, speaks="amqp")
    w = await running_worker(RABBITMQ_PREFETCH="32")
    async with direct(w.env, rabbitmq_url=link.url(rabbitmq_url)) as client:
        await client.submit_and_wait(CHAT)
        accepted = link.accepted
        sending = [asyncio.create_task(client.submit_and_wait(CHAT)) for _ in range(200)]
        await eventually(lambda: len(w.at.model.requests) > 10, within=10, what="some requests")
        await link.cut()
        results = await asyncio.gather(*sending)

    assert all(result.completed for result in results)
    assert link.accepted - accepted <= 4


async def test_a_queue_that_does_not_exist_is_told_in_words(
    rabbitmq_url: str, redis_url: str, deployment_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_worker.rmq_producer.NO_QUEUE_S", 0.5)
    async with Client.direct(rabbitmq_url=rabbitmq_url, redis_url=redis_url, deployment_id=deployment_id) as client:
        with pytest.raises(NotAccepted) as refused:
            await client.submit(CHAT)

    assert f"there is no queue infer_req.{deployment_id}" in str(refused.value)
    assert not refused.value.maybe


async def test_a_broker_that_is_not_there_is_given_up_after_the_time(redis_url: str) -> None:
    async with Client.direct(
        rabbitmq_url="amqp://guest:guest@127.0.0.1:9/", redis_url=redis_url, deployment_id="d"
    ) as client:
        with pytest.raises(NotAccepted, match=r"not confirmed within 1 s.*refused|not confirmed within 1 s"):
            await client.submit(CHAT, within_s=1)


async def test_cancelling_ends_a_running_request_and_the_call(running_worker: RunningWorker, model: FakeModel) -> None:
    model.default = fake.ok(takes_s=60)
    w = await running_worker()
    async with direct(w.env) as client:
        job = await client.submit(CHAT)
        await model.busy()

        assert await job.cancel() == "cancelled"

        result = await job.wait(5)
        assert (result.status, result.status_code, result.error_code) == ("failed", 499, "cancelled")
        await eventually(lambda: model.in_flight == 0, within=5, what="the end of the call")
        assert await job.cancel() == "cancelled"


async def test_cancelling_an_answered_request_is_too_late(running_worker: RunningWorker) -> None:
    w = await running_worker()
    async with direct(w.env) as client:
        result = await client.submit_and_wait(CHAT)

        assert await client.cancel(result.request_id) == "too late"
        assert await client.wait(result.request_id, 1) == result


@pytest.mark.parametrize("priority", [-1, 256])
async def test_a_priority_that_amqp_has_not_is_refused(redis_url: str, rabbitmq_url: str, priority: int) -> None:
    async with Client.direct(rabbitmq_url=rabbitmq_url, redis_url=redis_url, deployment_id="d") as client:
        with pytest.raises(ValueError, match="from 0 to 255"):
            await client.submit(CHAT, priority=priority)


async def test_a_wait_ends_after_its_time(redis_url: str, rabbitmq_url: str) -> None:
    async with Client.direct(rabbitmq_url=rabbitmq_url, redis_url=redis_url, deployment_id="d") as client:
        with pytest.raises(NoResultYet, match=r"no result of nobody within 0\.3 s"):
            await client.wait("nobody", 0.3)


async def test_over_http_it_is_the_same(running_worker: RunningWorker) -> None:
    w = await running_worker()
    async with intake(w) as url, Client.http(url) as client:
        job = await client.submit(CHAT, metadata={"a": "b"})
        result = await job.wait()

        assert (result.status, result.status_code) == ("completed", 200)
        assert result.json()["choices"][0]["message"]["content"] == "tick tock"
        with pytest.raises(NoSuchRequest):
            await client.wait("nobody", 5)
        assert await client.cancel(job.request_id) == "too late"
        with pytest.raises(NoSuchRequest):
            await client.cancel("nobody")
        with pytest.raises(NotSupported, match="API key"):
            await client.submit(CHAT, tenant="t")
        with pytest.raises(NotSupported, match="no priorities"):
            await client.submit(CHAT, priority=1)
        first = await client.submit_and_wait(CHAT, request_id="mine")
        assert await client.submit_and_wait(CHAT, request_id="mine") == first
        with pytest.raises(NotAccepted, match="something else"):
            await client.submit({**CHAT, "n": 1}, request_id="mine")
        with pytest.raises(NotAccepted) as refused:
            await client.submit(CHAT, endpoint="/v1/other")
    assert refused.value.for_good


async def test_over_http_cancelling_ends_the_call(running_worker: RunningWorker, model: FakeModel) -> None:
    model.default = fake.ok(takes_s=60)
    w = await running_worker()
    async with intake(w) as url, Client.http(url) as client:
        job = await client.submit(CHAT)
        await model.busy()

        assert await job.cancel() == "cancelled"

        result = await job.wait(5)
        assert (result.status, result.status_code, result.error_code) == ("failed", 499, "cancelled")
        await eventually(lambda: model.in_flight == 0, within=5, what="the end of the call")
        assert await job.cancel() == "cancelled"


async def test_a_server_that_is_full_is_asked_again_after_the_time_that_it_names() -> None:
    asked: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(time.monotonic())
        if len(asked) == 1:
            return httpx.Response(429, headers={"Retry-After": "1"}, json={"detail": "full"})
        return httpx.Response(202, json={"job_id": "j"})

    async with Client.http("http://gateway", transport=httpx.MockTransport(answer)) as client:
        job = await client.submit(CHAT)

    assert job.request_id == "j"
    assert asked[1] - asked[0] >= 1.0


async def test_a_server_that_does_not_hold_its_answer_back_is_not_asked_all_the_time() -> None:
    """An intake that is stopping answers at once."""
    asked = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        return httpx.Response(200, json={"job_id": "j", "status": "queued"})

    async with Client.http("http://gateway", transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(NoResultYet):
            await client.wait("j", 2.0)

    assert asked < 12


async def test_a_post_without_an_id_whose_answer_is_lost_is_not_repeated() -> None:
    asked = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        raise httpx.ReadError("cut")

    async with Client.http("http://gateway", transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(NotAccepted) as lost:
            await client.submit(CHAT, within_s=2)

    assert (asked, lost.value.maybe) == (1, True)


def test_a_thread_that_still_waits_is_told_when_the_client_is_closed(rabbitmq_url: str, redis_url_sync: str) -> None:
    ended: list[BaseException] = []
    with SyncClient.direct(rabbitmq_url=rabbitmq_url, redis_url=redis_url_sync, deployment_id="d") as client:
        waits = threading.Event()

        def wait() -> None:
            waits.set()
            try:
                client.wait("nobody", 60)
            except BaseException as exc:  # noqa: BLE001 - whatever it is, the thread goes on
                ended.append(exc)

        thread = threading.Thread(target=wait)
        thread.start()
        waits.wait(5)
    thread.join(5)

    assert not thread.is_alive()
    assert len(ended) == 1


def test_without_asyncio(rabbitmq_url: str, redis_url_sync: str) -> None:
    """From two threads at once, and closed in good order."""
    with SyncClient.direct(rabbitmq_url=rabbitmq_url, redis_url=redis_url_sync, deployment_id="d") as client:
        with pytest.raises(NoResultYet):
            client.wait("nobody", 0.2)
        assert client.cancel("nobody") == "cancelled"
        result: Result = client.wait("nobody", 1)

    assert result.error_code == "cancelled"
    with pytest.raises(RuntimeError):
        client.wait("nobody", 0.2)


@pytest.fixture
def redis_url_sync(redis_server: Redis) -> str:
    return redis_server.at(15) if redis_server.controllable else redis_server.url


async def test_after_cuts_on_both_sides_nothing_is_lost_or_answered_twice(
    system: System, rabbit: Rabbit, redis_server: Redis, proxy: MakeProxy
) -> None:
    amqp, resp = await proxy(rabbit, speaks="amqp"), await proxy(redis_server, speaks="redis")
    ids = system.ids(300)
    async with system.worker() as worker:
        async with Client.direct(
            rabbitmq_url=amqp.url(system.rabbitmq_url),
            redis_url=resp.url(system.redis_url),
            deployment_id=system.deployment_id,
        ) as client:
            system.submitted += ids
            sending = [asyncio.create_task(client.submit_and_wait(CHAT, request_id=one)) for one in ids]
            for link in (amqp, resp, amqp, resp):
                await asyncio.sleep(0.3)
                await link.cut()
            results = await asyncio.gather(*sending)
        assert [result.request_id for result in results] == ids
        assert all(result.completed for result in results)
        await system.drained()
        await system.billed()
        await system.stopped(worker)

    await system.conserved()


async def test_a_worker_has_one_connection_for_commands_and_one_to_be_told_of_cancellations(
    running_worker: RunningWorker, redis_client: RedisClient
) -> None:
    w = await running_worker()

    names = [str(one.get("name")) for one in await redis_client.client_list()]

    assert sum(w.env["DEPLOYMENT_ID"] in name for name in names) == 2
