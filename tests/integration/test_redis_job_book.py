"""Redis keeps the contract of job books; and what only Redis has: the ends of keys, other queues, lost answers."""

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Literal

import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker.disposition import Token
from inference_worker.errors import StoreUnavailable
from inference_worker.job_book import KEPT_AFTER_S, Reserved
from inference_worker.job_records import hooks_key, list_key, record_key
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.results.job_book import MOST_LOOKED_AT, RedisJobBook
from inference_worker.results.redis import RedisStore
from tests.faults.proxy import Do
from tests.integration.conftest import MakeProxy
from tests.job_book_contract import JobBookContract, record
from tests.services import Redis
from tests.store_contract import failure, reply

TTL_S = 3600
QUEUE = "infer_req.d"


def linked(url: str, answer_s: float = 5.0) -> RedisLink:
    return RedisLink(lambda: url, lambda: None, client_name="test", tls=RedisTls(), answer_s=answer_s)


class RedisBookHarness:
    """Two intakes with a connection each; the worker uses the first one's."""

    def __init__(self, first: RedisLink, second: RedisLink, client: RedisClient) -> None:
        self.link = first
        self.client = client
        self.book = RedisJobBook(first, queue=QUEUE, ttl_s=TTL_S, now=time.time)
        self.other = RedisJobBook(second, queue=QUEUE, ttl_s=TTL_S, now=time.time)
        self.store = RedisStore(first, deployment_id="d", replica_id="r", lease_s=15, ttl_s=TTL_S)

    def now(self) -> float:
        return time.time()

    async def reservation_lapses(self, job_id: str) -> None:
        await self.client.hset(record_key(job_id), "until", "1")

    async def finish(self, job_id: str, status: Literal["completed", "failed"] = "completed") -> None:
        await self.store.write(reply(job_id) if status == "completed" else failure(job_id), None, Token("w"))

    async def replay(self, job_id: str, deadline: float) -> None:
        assert await self.store.make_room(job_id, deadline) is None


@pytest.fixture
async def harness(redis_url: str, redis_client: RedisClient) -> AsyncGenerator[RedisBookHarness]:
    async with AsyncExitStack() as links:
        first, second = [await links.enter_async_context(linked(redis_url).open()) for _ in range(2)]
        yield RedisBookHarness(first, second, redis_client)


class TestRedisJobBook(JobBookContract):
    """All clauses, on a real Redis."""


async def ends_of(client: RedisClient) -> dict[str, int]:
    """Every key with the seconds it has left; -1 for ever."""
    keys = [key if isinstance(key, str) else key.decode() for key in await client.keys("*")]
    return {key: await client.ttl(key) for key in keys}


async def test_no_key_is_for_ever(harness: RedisBookHarness) -> None:
    """Whatever is done, in whatever order: what nobody deletes goes by itself."""
    soon = time.time() + 60
    for number, step in enumerate(["nothing", "confirm", "withdraw", "leave", "end"]):
        one = record(f"{number}", webhook_url="https://example.com", expires_at=soon, tenant=f"{number}")
        reserved = await harness.book.reserve(one, "k")
        assert isinstance(reserved, Reserved)
        match step:
            case "confirm":
                await harness.book.confirm(reserved)
            case "withdraw":
                await harness.book.withdraw(reserved)
            case "leave":
                await harness.book.leave(reserved)
            case "end":
                await harness.finish(one.job_id)

    ends = await ends_of(harness.client)

    kinds = sorted({key.split(":")[0] for key in ends})
    assert kinds == ["infer_due", "infer_hooks", "infer_job", "infer_job_key", "infer_jobs", "infer_resp"]
    day = KEPT_AFTER_S
    assert all(TTL_S <= left_s <= 60 + TTL_S + 2 * day for left_s in ends.values()), ends


async def test_a_record_and_its_key_end_a_day_after_the_last_time_for_its_result(harness: RedisBookHarness) -> None:
    await harness.book.reserve(record(expires_at=time.time() + 1000), "k")

    ends = await ends_of(harness.client)

    expected = pytest.approx(1000 + TTL_S + KEPT_AFTER_S, abs=5)
    assert ends[record_key("a")] == expected
    assert [left_s for key, left_s in ends.items() if key.startswith("infer_job_key:")] == [expected]
    assert ends[list_key(QUEUE, "t")] == expected


async def test_a_record_of_a_job_that_has_ended_ends_a_day_after_its_result(harness: RedisBookHarness) -> None:
    await harness.book.reserve(record(), None)
    await harness.finish("a")

    assert await harness.client.ttl(record_key("a")) == pytest.approx(TTL_S + KEPT_AFTER_S, abs=5)


async def test_a_key_whose_record_is_gone_is_free(harness: RedisBookHarness) -> None:
    """A job that ended early is forgotten before its deadline would have been over."""
    await harness.book.reserve(record("a"), "k")
    await harness.client.delete(record_key("a"))

    assert isinstance(await harness.book.reserve(record("b"), "k"), Reserved)


async def test_key_names_tell_neither_tenant_nor_idempotency_key(harness: RedisBookHarness) -> None:
    await harness.book.reserve(record(tenant="acme", webhook_url="https://example.com"), "order-17")

    assert not [key for key in await ends_of(harness.client) if "acme" in key or "order" in key]


async def test_jobs_of_another_queue_are_not_ours(harness: RedisBookHarness) -> None:
    """Two deployments may share a Redis, and call different people by one name."""
    elsewhere = RedisJobBook(harness.link, queue="infer_req.other", ttl_s=TTL_S, now=time.time)
    reserved = await elsewhere.reserve(record("theirs"), "k")
    assert isinstance(reserved, Reserved)
    await elsewhere.confirm(reserved)

    assert await harness.book.find("theirs") is None
    assert await harness.book.deadlines(10) == []
    assert (await harness.book.page("t", limit=10, after=None)).records == []
    assert isinstance(await harness.book.reserve(record("ours"), "k"), Reserved)


async def test_a_webhook_is_written_down_with_its_job(harness: RedisBookHarness) -> None:
    await harness.book.reserve(record("a", webhook_url="https://example.com"), None)
    await harness.book.reserve(record("b"), None)

    assert await harness.client.zrange(hooks_key(QUEUE), 0, -1, withscores=True) == [(b"a", record().created_at)]


async def test_a_list_is_bounded_and_what_is_gone_from_it_ends_no_page(harness: RedisBookHarness) -> None:
    """The records of most of what is listed are over; a page looks at some of them and goes on in the next one."""
    await harness.client.zadd(list_key(QUEUE, "t"), {f"{number}": number + 1 for number in range(100_010)})
    reserved = await harness.book.reserve(record("old", created_at=90_000.5), None)
    assert isinstance(reserved, Reserved)
    await harness.book.confirm(reserved)
    assert await harness.client.zcard(list_key(QUEUE, "t")) == 100_000

    pages, after, found = 0, None, list[str]()
    while pages == 0 or after is not None:
        page = await harness.book.page("t", limit=10, after=after)
        found += [one.job_id for one in page.records]
        pages, after = pages + 1, page.after

    assert found == ["old"]
    assert pages <= 100_000 / MOST_LOOKED_AT + 1
    assert await harness.client.zcard(list_key(QUEUE, "t")) == 1


async def test_the_list_loses_what_is_over_as_new_jobs_come(harness: RedisBookHarness) -> None:
    await harness.client.zadd(list_key(QUEUE, "t"), {f"{number}": number + 1 for number in range(10)})

    for number in range(5):
        await harness.book.reserve(record(f"new{number}"), None)

    assert await harness.client.zcard(list_key(QUEUE, "t")) == 5


@pytest.mark.parametrize("step", ["reserve", "confirm", "withdraw", "leave"])
async def test_a_step_whose_answer_was_lost_may_be_repeated(
    harness: RedisBookHarness, redis_url: str, redis_server: Redis, proxy: MakeProxy, step: str
) -> None:
    before = await proxy(redis_server, speaks="redis")
    async with linked(before.url(redis_url)).open() as link:
        book = RedisJobBook(link, queue=QUEUE, ttl_s=TTL_S, now=time.time)
        if step == "reserve":
            await book.reserve(record("warm-up"), None)  # The server has the script now.
            before.when_client_sends(record_key("a").encode(), Do.CUT_ON_REPLY)
            with pytest.raises(StoreUnavailable):
                await book.reserve(record(), "k")
        reserved = await book.reserve(record(), "k")
        assert isinstance(reserved, Reserved)
        if step != "reserve":
            ask = {"confirm": book.confirm, "withdraw": book.withdraw, "leave": book.leave}[step]
            await ask(Reserved(record=record("warm-up"), key=None, owner="nobody"))  # As above.
            trap = before.when_client_sends(record_key("a").encode(), Do.CUT_ON_REPLY)
            with pytest.raises(StoreUnavailable):
                await ask(reserved)
            assert trap.hits == 1
            await ask(reserved)

    found = await harness.book.find("a")
    assert (found is None) == (step == "withdraw")
    again = await harness.other.reserve(record("b"), "k")
    assert (type(again).__name__, getattr(again, "confirmed", None)) == {
        "reserve": ("Standing", False),
        "confirm": ("Standing", True),
        "withdraw": ("Reserved", None),
        "leave": ("Reserved", None),
    }[step]


async def test_a_redis_that_cannot_be_reached_is_unavailable(
    redis_url: str, redis_server: Redis, proxy: MakeProxy
) -> None:
    before = await proxy(redis_server, speaks="redis")
    await before.refuse()
    async with linked(before.url(redis_url)).open() as link:
        book = RedisJobBook(link, queue=QUEUE, ttl_s=TTL_S, now=time.time)

        with pytest.raises(StoreUnavailable):
            await book.reserve(record(), "k")
        with pytest.raises(StoreUnavailable):
            await book.find("a")
        with pytest.raises(StoreUnavailable):
            await book.page("t", limit=10, after=None)
