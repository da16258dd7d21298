"""The producer of the sorted-set form on a real Redis, beside a consumer and a producer that work as the Go library.

Those speak to Redis by plain commands and read JSON by the standard library, so that nothing of ours is on both sides.
"""

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker.errors import (
    KeyTaken,
    LeaseLost,
    NoResultYet,
    NotAccepted,
    PartlyAccepted,
    StoreUnavailable,
    UnreadableResult,
)
from inference_worker.producer import Producer, Request
from inference_worker.producer_scripts import RECEIVE, SUBMIT
from inference_worker.redis_scripts import RedisLink, RedisTls
from tests.faults.proxy import Do
from tests.integration.conftest import MakeProxy, OwnRedis
from tests.services import Redis
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
QUEUE = "request-sortedset"
SOON_S = 5.0
WEEK_S = 7 * 86_400


@pytest.fixture
async def producer(redis_url: str) -> AsyncGenerator[Producer]:
    async with Producer(redis_url, result_queue="results") as made:
        yield made


def request(request_id: str = "r1", **changes: Any) -> Request:
    fields: dict[str, Any] = {"payload": {"prompt": "hi"}, "deadline": time.time() + 600, "id": request_id}
    return Request(**fields | changes)


async def queued(redis: RedisClient) -> tuple[bytes, float]:
    """The one member of the queue, and its score."""
    members: Any = await redis.zrange(QUEUE, 0, -1, withscores=True)
    ((member, score),) = members
    return bytes(member), float(score)


class GoLike:
    """Dispatcher and caller as the Go library has them, on plain commands."""

    def __init__(self, redis: RedisClient, results: str = "results") -> None:
        self.redis = redis
        self.results = results

    async def submit(self, request_id: str, payload: str, deadline: int) -> str:
        token = secrets.token_hex(16)
        member = (
            f'{{"internal":{{"request_token":"{token}","request_queue_name":"{QUEUE}","result_queue_name":"results"}},'
            f'"request_kind":"plain","data":{{"id":"{request_id}","created":1,"deadline":{deadline},"payload":{payload}}}}}'
        )
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.delete(f"request-cancel:{request_id}")
            pipe.set(f"request-active:{request_id}", token, px=60_000)
            pipe.zadd(QUEUE, {member: deadline})
            await pipe.execute()
        return token

    async def dispatch(self) -> dict[str, Any] | None:
        """Take the next request and answer it, as the dispatcher does once it has taken one."""
        popped: Any = await self.redis.zpopmin(QUEUE)
        if not popped:
            return None
        member = json.loads(popped[0][0])
        request_id, token = member["data"]["id"], member["internal"]["request_token"]
        if await self.redis.get(f"request-cancel:{request_id}") == token.encode():
            await self.answer(request_id, token, error_code="CANCELLED", error_message="cancelled")
        else:
            await self.answer(
                request_id, token, status_code=200, payload=json.dumps({"echo": member["data"]["payload"]})
            )
        if await self.redis.get(f"request-active:{request_id}") == token.encode():
            await self.redis.delete(f"request-active:{request_id}", f"request-cancel:{request_id}")
        return dict(member)

    async def answer(self, request_id: str, token: str | None, **fields: Any) -> bytes:
        result = {"id": request_id, "payload": ""} | fields | ({"request_token": token} if token else {})
        raw = json.dumps(result).encode()
        await self.redis.lpush(self.results, raw)
        return raw

    async def lease(self, owner: str, lease_ms: int) -> tuple[str, bytes]:
        """What a durable receive leaves behind."""
        raw: Any = await self.redis.rpop(self.results)
        result = json.loads(raw)
        claim = result["id"] + "\0" + result["request_token"]
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.hset(f"{self.results}:result-claimed", claim, raw)
            pipe.hset(f"{self.results}:result-claim-owners", claim, owner)
            pipe.zadd(f"{self.results}:result-claims-idx", {claim: int(time.time() * 1000) + lease_ms})
            await pipe.execute()
        return claim, raw

    async def claims(self) -> tuple[Any, Any, Any]:
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(f"{self.results}:result-claimed")
            pipe.hgetall(f"{self.results}:result-claim-owners")
            pipe.zrange(f"{self.results}:result-claims-idx", 0, -1, withscores=True)
            found = await pipe.execute()
        return found[0], found[1], dict(found[2])


@pytest.fixture
def go(redis_client: RedisClient) -> GoLike:
    return GoLike(redis_client)


# ---------------------------------------------------------------- requests


async def test_a_submitted_request_lies_where_the_go_library_looks_for_it_case_97(
    producer: Producer, redis_client: RedisClient
) -> None:
    before = time.time()
    submission = await producer.submit(request(payload=b'{"b": 1.50, "a":1e3}'))

    raw, score = await queued(redis_client)
    member = json.loads(raw)
    assert list(member) == ["internal", "request_kind", "data"]
    assert member["internal"]["request_token"] == submission.token
    assert before - 1 < member["internal"]["enqueued_at_ms"] / 1000 < time.time() + 1
    assert member["data"]["deadline"] == submission.deadline <= score < submission.deadline + 1
    assert b'"payload":{"b": 1.50, "a":1e3}' in raw
    assert await redis_client.get("request-active:r1") == submission.token.encode()
    assert await redis_client.expiretime("request-active:r1") == submission.deadline
    assert not await redis_client.exists("request-cancel:r1")


async def test_a_cancelled_id_has_its_token_in_its_mark_and_an_unknown_one_has_no_mark_case_100(
    producer: Producer, redis_client: RedisClient
) -> None:
    submission = await producer.submit(request())

    assert await producer.cancel(["nobody", "r1"]) == ["r1"]

    assert await redis_client.get("request-cancel:r1") == submission.token.encode()
    assert WEEK_S - 60 < await redis_client.ttl("request-cancel:r1") <= WEEK_S
    assert not await redis_client.exists("request-cancel:nobody")
    assert await producer.cancel([]) == []
    assert await producer.cancel("r1") == await producer.cancel(submission) == ["r1"]


async def test_a_submission_that_is_cancelled_does_not_take_a_later_one_of_its_id_with_it_case_346(
    producer: Producer, redis_client: RedisClient
) -> None:
    first = await producer.submit(request())
    second = await producer.submit(request())

    assert await producer.cancel([first]) == []
    assert await producer.cancel([second]) == ["r1"]
    assert first.token != second.token
    assert await redis_client.get("request-cancel:r1") == second.token.encode()


async def test_a_new_submission_is_not_cancelled_by_an_old_mark_case_101(
    producer: Producer, redis_client: RedisClient
) -> None:
    await producer.submit(request())
    await producer.cancel(["r1"])
    await producer.submit(request())

    assert not await redis_client.exists("request-cancel:r1")


async def test_a_request_that_waits_and_is_cancelled_gets_one_result_case_108(producer: Producer, go: GoLike) -> None:
    submission = await producer.submit(request())
    await producer.cancel(["r1"])
    await go.dispatch()

    result = await producer.get_result(SOON_S)
    assert (result.id, result.token, result.error_code) == ("r1", submission.token, "CANCELLED")
    assert (await producer.depth()).results == 0


async def test_what_this_producer_submits_the_go_library_answers_and_this_producer_reads(
    producer: Producer, go: GoLike
) -> None:
    submission = await producer.submit(request(metadata={"team": "a"}, headers={"X-A": "1"}))
    seen = await go.dispatch()

    result = await producer.get_result(SOON_S)
    assert seen is not None
    assert (seen["data"]["metadata"], seen["data"]["headers"]) == ({"team": "a"}, {"X-A": "1"})
    assert (result.id, result.token, result.status_code, result.ok) == ("r1", submission.token, 200, True)
    assert result.json() == {"echo": {"prompt": "hi"}}


async def test_what_a_go_producer_has_submitted_can_be_cancelled_and_counted(producer: Producer, go: GoLike) -> None:
    token = await go.submit("theirs", '{"a":1}', int(time.time()) + 60)

    assert (await producer.depth()).requests == 1
    assert await producer.cancel(["theirs"]) == ["theirs"]
    await go.dispatch()
    result = await producer.get_result(SOON_S)
    assert (result.token, result.error_code) == (token, "CANCELLED")


async def test_a_payload_can_lie_in_a_key_of_its_own(redis_url: str, redis_client: RedisClient) -> None:
    async with Producer(redis_url, result_queue="results", payload_keys=True) as producer:
        submission = await producer.submit(request(payload=b'{"b": 1.50}'))

    key = f"request-payload:r1:{submission.token}"
    raw, _ = await queued(redis_client)
    assert json.loads(raw)["internal"]["payload_ref"] == key
    assert json.loads(raw)["data"]["payload"] is None
    assert await redis_client.get(key) == b'{"b": 1.50}'
    assert await redis_client.expiretime(key) == submission.deadline + 600


async def test_requests_of_one_deadline_come_out_in_the_order_in_which_they_went_in_case_24(
    producer: Producer, go: GoLike
) -> None:
    deadline = time.time() + 600
    await producer.submit_many([request(f"r{n}", deadline=deadline) for n in range(50)])
    for n in range(50, 70):
        await producer.submit(request(f"r{n}", deadline=deadline))

    came = [(await go.dispatch() or {})["data"]["id"] for _ in range(70)]
    assert came == [f"r{n}" for n in range(70)]


async def test_the_earliest_deadline_comes_first(producer: Producer, go: GoLike) -> None:
    now = time.time()
    await producer.submit_many([request(f"r{n}", deadline=now + n) for n in (300, 100, 200)])

    assert [(await go.dispatch() or {})["data"]["id"] for _ in range(3)] == ["r100", "r200", "r300"]


async def test_a_batch_goes_in_as_a_whole_or_not_at_all(producer: Producer, redis_client: RedisClient) -> None:
    await redis_client.set("no-queue", "text")
    batch = [
        request("a", idempotency_key="k"),
        request("b", request_queue="other"),
        request("c", request_queue="no-queue"),
    ]

    with pytest.raises(NotAccepted, match="WRONGTYPE") as raised:
        await producer.submit_many(batch)

    assert not raised.value.maybe
    assert not await redis_client.exists(QUEUE, "other", "request-idempotency:k")


async def test_a_batch_that_is_refused_leaves_earlier_submissions_of_its_ids_as_they_were(
    producer: Producer, redis_client: RedisClient
) -> None:
    await redis_client.lpush("no-queue", "x")
    earlier = await producer.submit(request("r1"))
    await producer.cancel(earlier)

    with pytest.raises(NotAccepted):
        await producer.submit_many([request("r1"), request("r2", request_queue="no-queue")])

    assert await redis_client.get("request-active:r1") == earlier.token.encode()
    assert await redis_client.get("request-cancel:r1") == earlier.token.encode()
    assert await redis_client.exists("request-active:r2") == 0


async def test_thousands_go_in_chunk_by_chunk_and_it_is_said_how_far_it_went(
    producer: Producer, redis_client: RedisClient
) -> None:
    await redis_client.set("no-queue", "text")
    good = [request(f"r{n}") for n in range(2500)]

    submissions = await producer.submit_many(good)
    assert [one.id for one in submissions] == [one.id for one in good]
    assert await redis_client.zcard(QUEUE) == 2500
    await redis_client.delete(QUEUE)

    with pytest.raises(PartlyAccepted) as raised:
        await producer.submit_many([*good, request("bad", request_queue="no-queue")])
    assert len(raised.value.accepted) == await redis_client.zcard(QUEUE) == 2000
    assert not raised.value.maybe


async def test_results_of_single_requests_can_have_a_list_of_their_own_case_348(
    producer: Producer, redis_url: str, go: GoLike, redis_client: RedisClient
) -> None:
    submission = await producer.submit(request(result_queue="mailbox"))
    raw, _ = await queued(redis_client)
    theirs = GoLike(redis_client, json.loads(raw)["internal"]["result_queue_name"])
    await theirs.dispatch()

    async with Producer(redis_url, result_queue=submission.result_queue) as mailbox:
        assert (await mailbox.get_result(SOON_S)).token == submission.token


# ---------------------------------------------------------------- idempotency keys


async def test_two_submissions_under_one_key_are_one(
    producer: Producer, redis_url: str, redis_client: RedisClient
) -> None:
    asked = request(idempotency_key="k")
    first = await producer.submit(asked)
    async with Producer(redis_url, result_queue="results") as another:
        second = await another.submit(asked)
        found = await another.look_up("k")

    assert (second.id, second.token, second.repeated, first.repeated) == (first.id, first.token, True, False)
    assert found == second
    assert await producer.look_up("other") is None
    assert await redis_client.zcard(QUEUE) == 1
    assert await redis_client.expiretime("request-idempotency:k") > first.deadline + WEEK_S


async def test_a_repeat_after_the_result_is_there_runs_nothing_again(producer: Producer, go: GoLike) -> None:
    asked = request(idempotency_key="k", id=None)
    first = await producer.submit(asked)
    await go.dispatch()
    second = await producer.submit(asked)

    assert (second.id, second.token) == (first.id, first.token)
    assert await go.dispatch() is None


async def test_a_key_that_stands_for_another_request_is_a_conflict(
    producer: Producer, redis_client: RedisClient
) -> None:
    await producer.submit(request(idempotency_key="k"))

    with pytest.raises(KeyTaken, match="'r1'") as raised:
        await producer.submit_many([request("r2"), request("r3", idempotency_key="k")])

    assert (raised.value.request_id, raised.value.maybe, raised.value.for_good) == ("r1", False, True)
    assert await redis_client.zcard(QUEUE) == 1


async def test_a_key_twice_in_one_batch_is_one_request(producer: Producer, redis_client: RedisClient) -> None:
    asked = request(idempotency_key="k")
    first, other, repeat = await producer.submit_many([asked, request("r2"), asked])

    assert (repeat.token, repeat.repeated, first.repeated, other.id) == (first.token, True, False, "r2")
    assert await redis_client.zcard(QUEUE) == 2
    with pytest.raises(KeyTaken):
        await producer.submit_many([request(idempotency_key="n"), request("r9", idempotency_key="n")])
    assert await redis_client.zcard(QUEUE) == 2


async def test_a_lost_answer_is_asked_for_again_only_under_a_key(
    redis_server: Redis, redis_url: str, redis_client: RedisClient, proxy: MakeProxy
) -> None:
    broken = await proxy(redis_server, speaks="redis")
    async with Producer(broken.url(redis_url), result_queue="results") as producer:
        await producer.submit(request("warm"))
        trap = broken.when_client_sends(SUBMIT.sha.encode(), Do.CUT_ON_REPLY)
        with pytest.raises(NotAccepted) as raised:
            await producer.submit(request("without"))
        assert raised.value.maybe
        assert trap.hits == 1

        broken.when_client_sends(SUBMIT.sha.encode(), Do.CUT_ON_REPLY)
        submission = await producer.submit(request("with", idempotency_key="k"))

    assert not submission.repeated
    assert await redis_client.get("request-active:with") == submission.token.encode()
    assert await redis_client.zcard(QUEUE) == 3


# ---------------------------------------------------------------- taking results


async def test_a_result_that_waits_is_taken_and_one_that_comes_is_waited_for_case_102(
    producer: Producer, go: GoLike
) -> None:
    await go.answer("a", "t", status_code=200)
    assert (await producer.get_result(0)).id == "a"
    with pytest.raises(NoResultYet):
        await producer.get_result(0)
    begun = time.monotonic()
    with pytest.raises(NoResultYet):
        await producer.get_result(0.2)
    assert time.monotonic() - begun < 1

    waiting = [asyncio.create_task(producer.get_result(SOON_S)) for _ in range(3)]
    await asyncio.sleep(0.05)
    for name in ("b", "c", "d"):
        await go.answer(name, "t", status_code=200)
    assert {result.id for result in await asyncio.gather(*waiting)} == {"b", "c", "d"}


async def test_results_come_oldest_first(producer: Producer, go: GoLike) -> None:
    for name in "abc":
        await go.answer(name, "t", status_code=200)

    assert [(await producer.get_result(0)).id, (await producer.receive(0)).result.id] == ["a", "b"]


async def test_who_is_cancelled_while_he_waits_leaves_every_result_to_others_case_102(
    producer: Producer, go: GoLike, redis_client: RedisClient
) -> None:
    waiting = asyncio.create_task(producer.get_result(60))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    await go.answer("a", "t", status_code=200)
    assert (await producer.get_result(SOON_S)).id == "a"


@pytest.mark.parametrize("take", ["get_result", "receive"])
async def test_a_result_that_was_on_its_way_to_who_is_gone_is_given_back(
    take: str, redis_server: Redis, redis_url: str, go: GoLike, redis_client: RedisClient, proxy: MakeProxy
) -> None:
    slow = await proxy(redis_server, speaks="redis")
    for name in "abc":
        await go.answer(name, "t", status_code=200)
    async with Producer(slow.url(redis_url), result_queue="results") as producer:
        word = b"RPOP" if take == "get_result" else RECEIVE.sha.encode()
        trap = slow.when_client_sends(word, Do.FREEZE)
        asking = asyncio.create_task(getattr(producer, take)(SOON_S))
        await trap.sprung()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        slow.thaw()

    names = [json.loads(raw)["id"] for raw in await redis_client.lrange("results", 0, -1)]
    assert names == ["c", "b", "a"]
    assert not await redis_client.hlen("results:result-claimed")


@pytest.mark.parametrize("raw", ["{", '{"id":""}', '{"status_code":200}', '{"id":"a","status_code":[]}'])
async def test_what_is_no_result_is_an_error_and_no_crash_case_104(
    raw: str, producer: Producer, go: GoLike, redis_client: RedisClient
) -> None:
    await redis_client.lpush("results", raw)
    await go.answer("good", "t", status_code=200)

    with pytest.raises(UnreadableResult) as raised:
        await producer.get_result(0)
    assert raised.value.raw == raw.encode()
    assert (await producer.get_result(0)).id == "good"


async def test_a_connection_that_is_handed_in_is_used_and_left_open_case_106(redis_url: str, go: GoLike) -> None:
    link = RedisLink(lambda: redis_url, lambda: None, client_name="mine", tls=RedisTls())
    async with link.open():
        async with Producer(link=link, result_queue="results") as producer:
            waiting = asyncio.create_task(producer.get_result(SOON_S))
            await producer.submit(request())
            await go.dispatch()
            assert (await waiting).id == "r1"
        assert await link.do("PING") == b"PONG"

    async with Producer(redis_url, result_queue="results") as own:
        pass
    with pytest.raises(RuntimeError, match="not open"):
        await own.depth()


async def test_a_producer_without_a_redis_says_so_at_once(redis_server: Redis) -> None:
    with pytest.raises(StoreUnavailable):
        async with Producer("redis://127.0.0.1:1/0", result_queue="results"):
            raise AssertionError("it opened")


async def test_a_result_is_picked_up_in_milliseconds_and_waiting_costs_nothing(
    producer: Producer, go: GoLike, redis_client: RedisClient
) -> None:
    async def commands() -> int:
        return int((await redis_client.info("stats"))["total_commands_processed"])

    taken_s = []
    for n in range(40):
        waiting = asyncio.create_task(producer.receive(SOON_S))
        await asyncio.sleep(0.01)
        begun = time.perf_counter()
        await go.answer(f"r{n}", "t", status_code=200)
        await (await waiting).ack()
        taken_s.append(time.perf_counter() - begun)

    waiting = asyncio.create_task(producer.receive(1.2))
    await asyncio.sleep(0.1)
    before = await commands()
    await asyncio.sleep(1.0)
    idle = await commands() - before - 1
    with pytest.raises(NoResultYet):
        await waiting

    print(f"a result is received and acknowledged after {sorted(taken_s)[20] * 1000:.1f} ms in the middle")
    assert sorted(taken_s)[20] < 0.05
    assert idle <= 1, f"{idle} commands in a second in which nothing happened"


async def test_waiting_leaves_the_lists_expiry_and_its_order_alone(
    producer: Producer, go: GoLike, redis_client: RedisClient
) -> None:
    async def blocked() -> bool:
        return int((await redis_client.info("clients"))["blocked_clients"]) > 0

    waiting = asyncio.create_task(producer.receive(SOON_S, lease_s=60))
    await eventually(blocked, within=SOON_S, what="a producer that waits")
    async with redis_client.pipeline(transaction=True) as pipe:
        for name in ("a", "b"):
            pipe.lpush("results", json.dumps({"id": name, "status_code": 200}))
        pipe.expire("results", 1000)
        await pipe.execute()

    assert (await waiting).result.id == "a"
    assert 990 < await redis_client.ttl("results") <= 1000


# ---------------------------------------------------------------- leases


async def test_a_received_result_lies_where_the_go_library_looks_for_it_case_109(
    producer: Producer, go: GoLike
) -> None:
    raw = await go.answer("a", "tok", status_code=200)

    leased = await producer.receive(0)

    claimed, owners, index = await go.claims()
    assert claimed == {b"a\0tok": raw}
    assert owners == {b"a\0tok": leased.lease.owner.encode()}
    assert index[b"a\0tok"] == pytest.approx((time.time() + 300) * 1000, abs=5000)
    assert (await producer.depth()).leased == 1


async def test_a_lease_can_be_renewed_and_an_ack_ends_it_for_good_case_109(producer: Producer, go: GoLike) -> None:
    raw = await go.answer("a", "tok", status_code=200)
    leased = await producer.receive(0, lease_s=10)
    _, _, before = await go.claims()

    await leased.renew(60)
    _, _, renewed = await go.claims()
    assert renewed[b"a\0tok"] > before[b"a\0tok"] + 40_000
    await leased.ack()
    assert await go.claims() == ({}, {}, {})
    expiry = await go.redis.zscore("results:result-ack-tombstones", "a\0tok")
    assert expiry == pytest.approx((time.time() + WEEK_S) * 1000, abs=5000)
    assert WEEK_S - 60 < await go.redis.ttl("results:result-ack-tombstones") <= WEEK_S

    await go.redis.lpush("results", raw)  # The same once more, as after a dispatcher's crash.
    await go.answer("a", "other", status_code=200)
    assert (await producer.receive(0)).result.token == "other"


async def test_a_result_that_is_not_acknowledged_comes_again_as_soon_as_its_lease_lapses_case_109(
    producer: Producer, go: GoLike
) -> None:
    await go.answer("a", "tok", status_code=200)
    first = await producer.receive(0, lease_s=0.4)
    begun = time.monotonic()

    second = await producer.receive(SOON_S)

    assert 0.2 < time.monotonic() - begun < 1.0
    assert second.result == first.result
    await second.ack()


async def test_lapsed_results_come_again_oldest_first_and_before_new_ones(producer: Producer, go: GoLike) -> None:
    for name in "abc":
        await go.answer(name, "t", status_code=200)
    for _ in range(3):
        await producer.receive(0, lease_s=0.05)
        await asyncio.sleep(0.005)
    await go.answer("d", "t", status_code=200)
    await asyncio.sleep(0.1)

    assert [(await producer.receive(0)).result.id for _ in range(4)] == ["a", "b", "c", "d"]


async def test_a_stale_owner_can_do_nothing_any_more_case_110(producer: Producer, go: GoLike) -> None:
    await go.answer("a", "tok", status_code=200)
    stale = await producer.receive(0, lease_s=0.05)
    owner = await producer.receive(SOON_S, lease_s=60)
    before = await go.claims()

    with pytest.raises(LeaseLost):
        await stale.ack()
    with pytest.raises(LeaseLost):
        await stale.renew()
    await stale.release()

    assert await go.claims() == before
    await owner.ack()


async def test_a_lease_that_has_lapsed_is_lost_also_where_nobody_else_has_it_case_110(
    producer: Producer, go: GoLike
) -> None:
    await go.answer("a", "tok", status_code=200)
    leased = await producer.receive(0, lease_s=0.02)
    await asyncio.sleep(0.05)

    with pytest.raises(LeaseLost):
        await leased.renew()
    with pytest.raises(LeaseLost):
        await leased.ack()


async def test_an_ack_may_be_repeated_case_110(producer: Producer, go: GoLike) -> None:
    await go.answer("a", "tok", status_code=200)
    leased = await producer.receive(0)

    await leased.ack()
    await leased.ack()

    with pytest.raises(NoResultYet):
        await producer.receive(0)


async def test_a_result_that_is_released_comes_to_another_at_once(
    producer: Producer, redis_url: str, go: GoLike
) -> None:
    await go.answer("a", "tok", status_code=200)
    leased = await producer.receive(0)
    async with Producer(redis_url, result_queue="results") as other:
        waiting = asyncio.create_task(other.receive(SOON_S))
        await leased.release()
        assert (await waiting).result.id == "a"


async def test_a_result_that_a_go_consumer_holds_comes_to_us_once_its_lease_lapses(
    producer: Producer, go: GoLike
) -> None:
    await go.answer("a", "tok", status_code=200)
    await go.lease("go-owner", 300)
    with pytest.raises(NoResultYet):
        await producer.receive(0)

    leased = await producer.receive(SOON_S)
    assert leased.result.id == "a"
    await leased.ack()


async def test_a_lost_answer_loses_no_result_and_acknowledges_none_twice(
    redis_server: Redis, redis_url: str, go: GoLike, proxy: MakeProxy
) -> None:
    broken = await proxy(redis_server, speaks="redis")
    await go.answer("a", "tok", status_code=200)
    async with Producer(broken.url(redis_url), result_queue="results") as producer:
        first = await producer.receive(0)  # From here on the server knows the script.
        await first.release()
        broken.when_client_sends(RECEIVE.sha.encode(), Do.CUT_ON_REPLY)
        with pytest.raises(StoreUnavailable):
            await producer.receive(0, lease_s=0.3)
        leased = await producer.receive(SOON_S, lease_s=60)
        assert leased.result.id == "a"

        trap = broken.when_client_sends(b"a\0tok", Do.CUT_ON_REPLY)
        with pytest.raises(StoreUnavailable):
            await leased.ack()
        assert trap.hits == 1
        await leased.ack()
    assert await go.claims() == ({}, {}, {})


async def test_a_copy_of_a_result_that_somebody_holds_is_dropped(producer: Producer, go: GoLike) -> None:
    raw = await go.answer("a", "tok", status_code=200)
    await producer.receive(0)
    for _ in range(250):
        await go.redis.lpush("results", raw)

    with pytest.raises(NoResultYet):
        await producer.receive(0)
    assert (await producer.depth()).results == 0


async def test_results_of_old_versions_have_no_token_and_go_by_their_id(producer: Producer, go: GoLike) -> None:
    await go.answer("a", None, status_code=200)
    leased = await producer.receive(0)
    await leased.ack()

    assert leased.result.token is None
    assert await go.redis.zscore("results:result-ack-tombstones", "a") is not None


@pytest.mark.parametrize("raw", [b"{", b"7", b'{"id":""}', b'{"id":5}', b'{"id":"a","request_token":5}', b"\xff"])
async def test_what_is_no_result_is_leased_and_holds_up_nothing_case_109(
    raw: bytes, producer: Producer, go: GoLike, redis_client: RedisClient
) -> None:
    await redis_client.lpush("results", raw)
    await go.answer("good", "t", status_code=200)

    with pytest.raises(UnreadableResult) as raised:
        await producer.receive(0, lease_s=0.3)
    claimed, _, _ = await go.claims()
    assert raised.value.raw == raw
    assert list(claimed.values()) == [raw]
    assert next(iter(claimed)).startswith(b"\0unparsable-result\0")
    good = await producer.receive(0)
    assert good.result.id == "good"

    with pytest.raises(UnreadableResult) as again:
        await producer.receive(SOON_S, lease_s=60)
    assert again.value.discard is not None
    await again.value.discard()
    await good.ack()
    assert await go.claims() == ({}, {}, {})


async def test_a_result_that_lua_can_read_and_we_cannot_is_leased_and_can_be_discarded(
    producer: Producer, go: GoLike, redis_client: RedisClient
) -> None:
    await redis_client.lpush("results", b'{"id":"\xff","request_token":"t"}')

    with pytest.raises(UnreadableResult) as raised:
        await producer.receive(0)
    assert raised.value.discard is not None
    await raised.value.discard()
    assert await go.claims() == ({}, {}, {})


@pytest.mark.needs_control
async def test_results_can_be_fetched_from_a_redis_that_is_full(own_redis: OwnRedis) -> None:
    server = await own_redis("--maxmemory-policy", "noeviction")
    async with RedisClient.from_url(server.url) as client, Producer(server.url, result_queue="results") as producer:
        go = GoLike(client)
        await producer.submit(request())
        for n in range(3):
            await go.answer(f"r{n}", "t", status_code=200, payload="x" * 1000)
        await client.config_set("maxmemory", "100kb")

        with pytest.raises(NotAccepted, match="OOM"):
            await producer.submit_many([request("more"), request("even more")])
        leased = await producer.receive(0)
        await leased.renew()
        await leased.ack()
        assert (await producer.get_result(0)).id == "r1"
        assert (await producer.depth()).requests == 1


@pytest.mark.needs_control
async def test_who_waits_outlives_a_restart_of_redis_and_hears_of_it_where_it_lasts(own_redis: OwnRedis) -> None:
    server = await own_redis("--appendonly", "yes")
    async with Producer(server.url, result_queue="results") as producer:
        waiting = asyncio.create_task(producer.receive(30))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(server.kill)
        with pytest.raises(StoreUnavailable):
            await waiting

        await asyncio.to_thread(server.start)
        async with RedisClient.from_url(server.url) as client:
            waiting = asyncio.create_task(producer.receive(30))
            await GoLike(client).answer("a", "t", status_code=200)
            await (await waiting).ack()


@pytest.mark.needs_control
async def test_the_permissions_that_the_docs_name_are_enough(own_redis: OwnRedis) -> None:
    server = await own_redis()
    shown = re.search(r"^```\n(ACL SETUSER .*?)^```", (ROOT / "docs/producer.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown
    url = server.url.replace("redis://", "redis://producer:secret@")
    async with RedisClient.from_url(server.url) as admin:
        await admin.execute_command(*shown[1].replace("PASSWORD", "secret").split())  # type: ignore[no-untyped-call]  # The driver's own gap.
        go = GoLike(admin)
        async with Producer(url, result_queue="results", payload_keys=True) as producer:
            waiting = asyncio.create_task(producer.receive(SOON_S))
            await producer.submit_many([request(), request("r2", idempotency_key="k")])
            await producer.look_up("k")
            await producer.cancel(["r1"])
            await go.dispatch()
            await (await waiting).release()
            leased = await producer.receive(SOON_S, lease_s=0.01)
            leased = await producer.receive(SOON_S)
            await leased.renew()
            await leased.ack()
            await go.dispatch()
            assert (await producer.get_result(SOON_S)).id == "r2"
            await producer.depth()
            await producer.clear(requests=True, results=True)
        # redis-py tells its version where it may, and does not mind.
        refused = [entry["object"] for entry in await admin.acl_log() if entry["object"] != "client|setinfo"]
    assert refused == []


# ---------------------------------------------------------------- queues


async def test_queues_are_counted_and_cleared_each_for_itself(
    producer: Producer, go: GoLike, redis_client: RedisClient
) -> None:
    await producer.submit_many([request("a"), request("b")])
    for name in "abc":
        await go.answer(name, "t", status_code=200)
    await producer.receive(0)
    depth = await producer.depth()
    assert (depth.requests, depth.results, depth.leased) == (2, 2, 1)

    with pytest.raises(ValueError, match="say what"):
        await producer.clear()
    await producer.clear(requests=True)
    depth = await producer.depth()
    assert (depth.requests, depth.results, depth.leased) == (0, 2, 1)
    await producer.clear(results=True)
    depth = await producer.depth()
    assert (depth.requests, depth.results, depth.leased) == (0, 0, 0)


async def test_many_receivers_take_every_result_once(redis_url: str, go: GoLike) -> None:
    names = [f"r{n}" for n in range(200)]
    taken: list[str] = []

    async def consume() -> None:
        async with Producer(redis_url, result_queue="results") as one:
            while True:
                leased = await one.receive(60)
                await leased.ack()
                taken.append(leased.result.id)

    consumers = [asyncio.create_task(consume()) for _ in range(4)]
    for name in names:
        await go.answer(name, "t", status_code=200)
    await eventually(lambda: len(taken) >= len(names), within=20, what="all results")
    for consumer in consumers:
        consumer.cancel()
    await asyncio.gather(*consumers, return_exceptions=True)

    assert sorted(taken) == sorted(names)


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("inf"), float("nan")])
async def test_a_lease_without_a_length_is_refused_and_takes_nothing(
    lease_s: float, producer: Producer, go: GoLike
) -> None:
    await go.answer("a", "t", status_code=200)

    with pytest.raises(ValueError, match="a lease must"):
        await producer.receive(0, lease_s)
    leased = await producer.receive(0)
    with pytest.raises(ValueError, match="a lease must"):
        await leased.renew(lease_s)
