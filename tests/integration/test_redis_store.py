"""Redis keeps the store contract; and what only Redis has: keys and their ends, notifications, lost scripts."""

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker.disposition import Token
from inference_worker.ports import BelowFloor, Claimed, RunningElsewhere, Stored
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.results.notifications import Notifications
from inference_worker.results.redis import BILLING_GROUP, RedisOutbox, RedisStore, claim_key, result_key
from tests.store_contract import StoreContract, failure, reply
from tests.waiting import eventually

A, B = Token("token-a"), Token("token-b")
LEASE_S = 0.6
OUTBOX = "infer_usage:d"


class RedisStoreHarness:
    """One connection to this test's database; its time is real."""

    lease_s = LEASE_S
    ttl_s = 1.0

    def __init__(self, link: RedisLink, client: RedisClient, told: Notifications) -> None:
        self.link = link
        self.client = client
        self.store = RedisStore(link, deployment_id="d", replica_id="r", lease_s=LEASE_S, ttl_s=3600)
        self.short_lived = RedisStore(link, deployment_id="d", replica_id="r", lease_s=LEASE_S, ttl_s=self.ttl_s)
        self.heeded = RedisStore(
            link, deployment_id="d", replica_id="r", lease_s=LEASE_S, ttl_s=3600, notifications=told
        )
        self.outbox = RedisOutbox(link, deployment_id="d", replica_id="r")
        self.other_outbox = RedisOutbox(link, deployment_id="d", replica_id="other")

    def now(self) -> float:
        return time.time()

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def leave_lying(self) -> None:
        """Redis is told that a minute has passed since they were taken."""
        for entry in await self.client.xpending_range(OUTBOX, BILLING_GROUP, "-", "+", 100):
            ids = [entry["message_id"]]
            await self.client.xclaim(OUTBOX, BILLING_GROUP, entry["consumer"], 0, ids, idle=60_000)  # type: ignore[arg-type]  # Its own answer.


@pytest.fixture
async def harness(redis_url: str, redis_client: RedisClient) -> AsyncGenerator[RedisStoreHarness]:
    link = RedisLink(lambda: redis_url, lambda: None, client_name="test", tls=RedisTls())
    told = Notifications(link, lambda: redis_url, lambda: None, client_name="test", tls=RedisTls())
    async with link.open(), told.open():
        yield RedisStoreHarness(link, redis_client, told)


class TestRedisStore(StoreContract):
    """All clauses, on a real Redis."""


async def ends_of(client: RedisClient) -> dict[str, int]:
    """Every key with the seconds it has left; -1 for ever."""
    keys = [key if isinstance(key, str) else key.decode() for key in await client.keys("*")]
    return {key: await client.ttl(key) for key in keys}


async def test_no_key_is_for_ever_but_the_outbox(harness: RedisStoreHarness) -> None:
    """Whatever is done, in whatever order: what nobody deletes goes by itself."""
    store, deadline = harness.store, time.time() + 100
    await store.claim("claimed", 0, A, deadline)
    await store.renew("renewed", A)
    await store.claim("released", 0, A, deadline)
    await store.release("released", A)
    await store.release("floor", A, 2)
    await store.claim("retried", 0, A, deadline)
    await store.release("retried", A, 1)
    await store.write(reply("stored"), b"{}", A)
    await store.cancel(failure("cancelled"))
    await store.bury("stored", b"{}")
    await store.probe()
    (entry,) = await harness.outbox.take(1)
    await store.write(reply("other"), b"{}", A)
    await harness.outbox.refused(entry, "no")

    ends = await ends_of(harness.client)

    assert {key for key, left_s in ends.items() if left_s < 0} == {OUTBOX, "infer_usage_refused:d"}
    assert len(ends) == 12, sorted(ends)


async def test_a_claim_ends_two_leases_and_a_minute_after_the_deadline(harness: RedisStoreHarness) -> None:
    await harness.store.claim("a", 0, A, time.time() + 100)
    await harness.store.renew("a", A)
    await harness.store.release("a", A, 1)

    left_ms = await harness.client.pttl(claim_key("a"))

    assert left_ms == pytest.approx((100 + 2 * LEASE_S + 60) * 1000, abs=2000)


async def test_a_claim_past_its_deadline_lasts_for_the_answer(harness: RedisStoreHarness) -> None:
    await harness.store.claim("a", 0, A, 1.0)

    assert await harness.client.pttl(claim_key("a")) > 60_000
    assert isinstance(await harness.store.claim("a", 0, B, 1.0), RunningElsewhere)


async def test_the_result_ends_with_its_time_and_the_claim_with_the_result(harness: RedisStoreHarness) -> None:
    await harness.store.claim("a", 0, A, time.time() + 100)
    await harness.store.write(reply("a"), None, A)

    ends = await ends_of(harness.client)

    assert ends == {result_key("a"): pytest.approx(3600, abs=5)}


async def test_a_dead_letters_note_is_kept_for_30_days(harness: RedisStoreHarness) -> None:
    await harness.store.bury("a", b'{"reason":"poison"}')

    assert await harness.client.get("infer_dead:a") == b'{"reason":"poison"}'
    assert await harness.client.ttl("infer_dead:a") == pytest.approx(30 * 86_400, abs=5)


@pytest.mark.parametrize("status", ["completed", "failed"])
async def test_the_end_of_a_request_is_announced_once(harness: RedisStoreHarness, status: str) -> None:
    written = reply("a") if status == "completed" else failure("a")
    async with harness.client.pubsub() as listening:
        await listening.subscribe(result_key("a"))
        await listening.get_message(timeout=5)
        await harness.store.write(written, None, A)
        await harness.store.write(written, None, A)
        await harness.store.cancel(failure("a"))
        told = await listening.get_message(timeout=5)
        again = await listening.get_message(timeout=0.2)

    assert told is not None
    assert told["data"] == status.encode()
    assert again is None


async def test_a_cancellation_is_announced_as_failed(harness: RedisStoreHarness) -> None:
    async with harness.client.pubsub() as listening:
        await listening.subscribe(result_key("a"))
        await listening.get_message(timeout=5)
        await harness.store.cancel(failure("a"))
        told = await listening.get_message(timeout=5)

    assert told is not None
    assert told["data"] == b"failed"


async def test_a_user_that_may_not_hear_of_cancellations_is_told_of_results_all_the_same(
    redis_url: str, redis_client: RedisClient
) -> None:
    """A user that was made for a worker without this channel."""
    rules = "reset on >secret ~* &infer_resp:* +@all"
    await redis_client.execute_command("ACL", "SETUSER", "reader", *rules.split())  # type: ignore[no-untyped-call]  # The driver's own gap.
    url = redis_url.replace("://", "://reader:secret@")
    link = RedisLink(lambda: url, lambda: None, client_name="test", tls=RedisTls())
    told = Notifications(link, lambda: url, lambda: None, client_name="test", tls=RedisTls(), look_s=3600.0)
    until = asyncio.Event()
    try:
        async with link.open(), told.open():
            store = RedisStore(link, deployment_id="d", replica_id="r", lease_s=LEASE_S, ttl_s=3600, notifications=told)
            heeding = asyncio.create_task(store.cancellations(until, lambda _: None))
            waiting = asyncio.create_task(store.wait("a", 10.0))

            async def heard() -> bool:
                return bool((await redis_client.pubsub_numsub(result_key("a")))[0][1])

            await eventually(heard, within=5.0, what="the result is subscribed to")
            assert await store.write(reply("a"), None, A) == Stored()
            async with asyncio.timeout(2.0):
                assert await waiting is not None
            assert await store.cancel(failure("b", error_code="cancelled")) == Stored(), "without the hint"
            until.set()
            await heeding
    finally:
        await redis_client.execute_command("ACL", "DELUSER", "reader")  # type: ignore[no-untyped-call]  # The driver's own gap.


async def test_result_and_claim_share_a_slot_of_a_cluster() -> None:
    """The braces of the claim's key name the result's key, or the id's own tag does for both.

    An id with a brace that closes and no tag (`a}b`) cannot be placed so; only a Cluster minds.
    """

    def tag(key: str) -> str:
        start = key.find("{")
        end = key.find("}", start + 1)
        return key[start + 1 : end] if start >= 0 and end > start + 1 else key

    for request_id in ("a", "x{b}y", "ü", "{", "x{b", "{b}{c}"):
        assert tag(claim_key(request_id)) == tag(result_key(request_id)), request_id


async def test_lost_scripts_are_sent_again(harness: RedisStoreHarness) -> None:
    """A restart or SCRIPT FLUSH: the server knows the names no more."""
    await harness.store.claim("a", 0, A, time.time() + 100)

    await harness.client.script_flush()

    assert isinstance(await harness.store.claim("a", 0, B, time.time() + 100), RunningElsewhere)
    assert await harness.store.write(reply("a"), b"{}", A) == Stored()
    assert await harness.outbox.size() == 1


async def test_a_redis_that_was_emptied_hangs_nobody(harness: RedisStoreHarness) -> None:
    await harness.store.release("a", A, 1)
    await harness.store.write(reply("b"), b"{}", A)
    await harness.outbox.take(1)
    assert await harness.store.claim("a", 0, A, time.time() + 100) == BelowFloor()

    await harness.client.flushdb()

    assert await harness.store.claim("a", 0, A, time.time() + 100) == Claimed(starts=1)
    await harness.store.write(reply("b"), b"{}", A)
    taken = [*await harness.outbox.take(1), *await harness.outbox.take(1)]
    assert len(taken) == 1


async def test_a_foreign_result_counts_as_what_it_looks_like(harness: RedisStoreHarness) -> None:
    """Another worker's JSON may have spaces, or be written by hand."""
    await harness.client.set(result_key("a"), b'{"status": "completed", "status_code": 200, "result": 1}')
    await harness.client.set(result_key("b"), b'{"status": "failed", "status_code": 418, "error": "no"}')

    assert getattr(await harness.store.renew("a", A), "reply").status == "completed"  # noqa: B009 - a union
    assert getattr(await harness.store.renew("b", A), "reply").status_code == 418  # noqa: B009 - a union


async def test_a_replica_that_is_started_anew_sends_at_once_what_it_had_taken(harness: RedisStoreHarness) -> None:
    """Its events need not wait for the minute after which they are anybody's."""
    for name in ("a", "b", "c"):
        await harness.store.write(reply(name), name.encode(), A)
    taken = await harness.outbox.take(2)
    again = RedisOutbox(harness.link, deployment_id="d", replica_id="r")

    assert [entry.event for entry in await again.take(1)] == [b"a"]
    assert [entry.event for entry in await again.take(10)] == [b"b", b"c"]
    assert list(await again.take(10)) == []
    await again.sent(taken)
    assert await again.size() == 1
