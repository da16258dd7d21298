"""The deprecated transport over channels of Redis: what its source promises of it, and no more."""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker.assembly import Outside
from inference_worker.disposition import Ack, Hold, Nack, Republish, Settled, Token
from inference_worker.errors import StoreUnavailable, TransportLost
from inference_worker.metrics import WorkerMetrics
from inference_worker.process import process
from inference_worker.process_setup import read_setup
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.results.redis import RedisStore
from inference_worker.transports.redis_pubsub import BATCH, Channel, ChannelTransport, Publisher, RedisChannels
from tests.faults.proxy import TcpProxy
from tests.process_rig import ProcessDocuments, envelope, queue, serving_mock
from tests.services import Redis
from tests.transport_contract import nothing_comes, reply, take
from tests.waiting import eventually

RETRIES, RESULTS = "retry-sortedset", "result-queue"


class Kit:
    """One channel in one database: sessions, producers, and a listener for results."""

    def __init__(self, url: str, link: RedisLink, client: RedisClient) -> None:
        self.url = url
        self.link = link
        self.client = client
        self.store = RedisStore(link, deployment_id="d", replica_id="r", lease_s=1.0, ttl_s=3600)
        self.results: list[dict[str, Any]] = []

    @asynccontextmanager
    async def session(self, url: str = "", channel: str = "requests") -> AsyncGenerator[ChannelTransport]:
        channels = RedisChannels(
            self.link,
            url=lambda: url or self.url,
            channel=Channel(name=channel, queue_id=channel),
            store=self.store,
            metrics=WorkerMetrics(),
            replica_id="r",
            client_name="test",
            tls=RedisTls(),
            now=time.time,
        )
        async with channels.connect() as transport:
            yield transport

    async def say(self, request_id: str, channel: str = "requests", **fields: Any) -> None:
        body, _ = envelope(request_id, **fields)
        await self.client.publish(channel, body)

    async def retries(self) -> list[dict[str, Any]]:
        members: list[bytes] = await self.client.zrange(RETRIES, 0, -1)  # type: ignore[assignment]  # Bytes, as nothing is decoded.
        return [json.loads(member) for member in members]

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[None]:
        async with self.client.pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.subscribe(RESULTS)

            async def hear() -> None:
                async for said in pubsub.listen():
                    self.results.append(json.loads(said["data"]))

            hearing = asyncio.create_task(hear())
            try:
                yield
            finally:
                hearing.cancel()
                await asyncio.wait([hearing])


@pytest.fixture
async def kit(redis_url: str) -> AsyncGenerator[Kit]:
    link = RedisLink(lambda: redis_url, lambda: None, client_name="test", tls=RedisTls())
    async with link.open(), RedisClient.from_url(redis_url, socket_timeout=None) as client:
        yield Kit(redis_url, link, client)


async def test_a_request_on_the_channel_gives_a_result_on_the_result_channel_case_84(kit: Kit) -> None:
    async with kit.listening(), serving_mock() as mock:
        documents = ProcessDocuments(url=kit.url, queues=[queue("requests", mock.url)], kind="redis-pubsub")
        given, texts = documents.given()
        setup = read_setup(given, {}, texts.__getitem__, random.Random(1))
        stop = asyncio.Event()
        async with (
            process(setup, Outside(now=time.time, rng=random.Random(1))) as running,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(running.worker.run(stop))

            async def heard() -> bool:
                ((_, listeners),) = await kit.client.pubsub_numsub("requests")
                return int(listeners) > 0

            await eventually(heard, within=10, what="the channel is subscribed to")
            await kit.say("a")
            await eventually(lambda: kit.results, within=10, what="the result")
            stop.set()

    assert [(one["id"], one["status_code"]) for one in kit.results] == [("a", 200)]


async def test_results_are_published_in_batches_and_none_is_lost_case_85() -> None:
    link = CountingLink()
    publisher = Publisher(link, WorkerMetrics())
    publishing = asyncio.create_task(publisher.run())
    async with asyncio.timeout(10):
        await publisher.publish("c", b"alone")
        await asyncio.gather(*(publisher.publish("c", b"%d" % n) for n in range(200)))
    await publisher.end(publishing)

    assert sorted(link.published) == sorted([b"alone", *(b"%d" % n for n in range(200))])
    assert link.most <= BATCH
    assert link.most > 1


async def test_a_publish_that_fails_twice_is_delivered_and_one_that_goes_on_failing_holds_up_nobody_case_86_94() -> (
    None
):
    link = CountingLink(fails=2)
    publisher = Publisher(link, WorkerMetrics())
    publishing = asyncio.create_task(publisher.run())
    async with asyncio.timeout(10):
        await publisher.publish("c", b"a")
        assert link.published == [b"a"]
        link.fails = 3
        await publisher.publish("c", b"lost")
        await publisher.publish("c", b"b")
    await publisher.end(publishing)
    assert link.published == [b"a", b"b"]
    link.fails, begun = 2, asyncio.get_running_loop().time()
    await publisher.publish("c", b"at the end")

    assert link.published[-1] == b"at the end"
    assert asyncio.get_running_loop().time() - begun < 0.1


class CountingLink:
    """Takes PUBLISH, some at once; the first `fails` are not answered."""

    def __init__(self, fails: int = 0) -> None:
        self.fails = fails
        self.published: list[bytes] = []
        self.most = 0
        self._now = 0

    async def do(self, *words: Any) -> int:
        if self.fails:
            self.fails -= 1
            raise StoreUnavailable("no")
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(0.001)
        self._now -= 1
        self.published.append(words[2])
        return 1

    async def run(self, script: Any, keys: Any, *arguments: Any) -> None:
        raise AssertionError


async def test_a_retry_waits_in_the_set_and_a_later_one_stays_there_case_88(kit: Kit) -> None:
    async with kit.session() as transport, transport.consuming(2):
        for name in ("a", "b"):
            await kit.say(name)
        for delay_s in (0.1, 60.0):
            again = Republish(delay_s=delay_s, attempts=1, left_s=60, claim=Hold("x", Token("t")))
            assert await transport.settle(await take(transport), again) == Settled(how="retry")
        copy = await take(transport)

        assert (copy.message_id, copy.attempts) == ("a", 1)
        (later,) = await kit.retries()
        assert (later["data"]["id"], later["internal"]["retry_count"]) == ("b", 1)


async def test_of_several_who_look_each_retry_is_taken_once_and_other_queues_are_left_alone_case_89(kit: Kit) -> None:
    for n in range(50):
        body, _ = envelope(f"r-{n}", request_queue_name="requests")
        await kit.client.zadd(RETRIES, {body: 1.0})
    other, _ = envelope("other", request_queue_name="another")
    await kit.client.zadd(RETRIES, {other: 0.5, b"no json": 0.6})
    got: list[str | None] = []

    async def drain(transport: ChannelTransport) -> None:
        while len(got) < 50:
            try:
                delivery = await take(transport, 0.3)
            except TimeoutError:
                continue
            got.append(delivery.message_id)
            await transport.settle(delivery, Ack())

    async with kit.session() as one, kit.session() as two, one.consuming(5), two.consuming(5):
        async with asyncio.timeout(20):
            await asyncio.gather(drain(one), drain(two))

    assert sorted(map(str, got)) == sorted(f"r-{n}" for n in range(50))
    assert await kit.client.zrange(RETRIES, 0, -1) == [other, b"no json"]


async def test_what_was_taken_and_not_handed_up_is_put_back_at_a_stop_case_90(kit: Kit) -> None:
    async with kit.session() as transport:
        async with transport.consuming(1):
            for name in ("a", "b", "c"):
                await kit.say(name)
            mine = await take(transport)
            await asyncio.sleep(0.1)
        assert [one["data"]["id"] for one in await kit.retries()] == ["b", "c"]
        assert await transport.settle(mine, Nack()) == Settled(how="requeue")

    assert sorted(one["data"]["id"] for one in await kit.retries()) == ["a", "b", "c"]
    assert all("retry_count" not in one["internal"] for one in await kit.retries())


async def test_a_stop_during_an_idle_wait_is_prompt_case_92(kit: Kit) -> None:
    async with kit.session() as transport, transport.consuming(1):
        await nothing_comes(transport)
        begun = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - begun < 0.5


async def test_a_channel_that_closes_is_subscribed_to_again_and_what_is_in_hand_is_settled_case_93(
    kit: Kit, redis_server: Redis
) -> None:
    async with kit.listening(), TcpProxy(redis_server.host, redis_server.port) as proxy:
        async with kit.session(proxy.url(kit.url)) as transport, transport.consuming(1):
            await kit.say("a")
            delivery = await take(transport)
            await proxy.cut()
            await eventually(transport.lost.is_set, within=10, what="the cut is seen")
            with pytest.raises(TransportLost):
                await transport.receive()
            assert not delivery.lost.is_set()
            assert await transport.settle(delivery, Ack(reply=reply("a"))) == Settled(how="ack")
        async with kit.session(proxy.url(kit.url)) as again, again.consuming(1):
            await kit.say("b")
            assert (await take(again)).message_id == "b"
        await eventually(lambda: kit.results, within=5, what="the result")


async def test_a_password_is_needed_and_taken_from_the_url_case_96(kit: Kit) -> None:
    await kit.client.acl_setuser(
        "channels", enabled=True, passwords=["+secret"], categories=["+@all"], keys=["*"], channels=["*"]
    )
    try:
        right = kit.url.replace("redis://", "redis://channels:secret@")
        async with kit.session(right) as transport, transport.consuming(1):
            await kit.say("a")
            await take(transport)
        with pytest.raises(TransportLost):
            async with kit.session(kit.url.replace("redis://", "redis://channels:wrong@")):
                pass
    finally:
        await kit.client.acl_deluser("channels")


async def test_what_is_no_request_is_skipped_and_answered_once_where_it_has_an_id(kit: Kit) -> None:
    async with kit.listening(), kit.session() as one, kit.session() as two, one.consuming(1), two.consuming(1):
        await kit.client.publish("requests", b"rubbish")
        await kit.client.publish("requests", b'{"request_kind": "redis", "data": {"id": "a"}}')
        await kit.say("fine")
        assert (await take(one)).message_id == "fine"
        await eventually(lambda: kit.results, within=5, what="the answer")
        await asyncio.sleep(0.1)

    assert [(answer["id"], answer["error_code"]) for answer in kit.results] == [("a", "INVALID_REQUEST")]


@pytest.mark.parametrize("form", ["bare", "ours"])
async def test_bare_requests_and_our_own_are_taken_too(kit: Kit, form: str) -> None:
    body: Mapping[str, object] = {"id": "a", "deadline": int(time.time()) + 60, "payload": {"n": 1}}
    if form == "ours":
        body = {"request_id": "a", "received_at": time.time(), "timeout_s": 60, "payload": {"n": 1}}
    async with kit.session() as transport, transport.consuming(1):
        await transport.publish(json.dumps(body).encode())
        delivery = await take(transport)
        seen = await transport.backlog()

    assert delivery.request is not None
    assert (delivery.request.request_id, delivery.request.payload) == ("a", b'{"n": 1}')
    assert (seen.ready, seen.delayed, seen.in_flight) == (0, 0, 1)
