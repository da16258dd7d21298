"""A job comes into a Redis stream in one step: its key, the depth limit, its record and its entry, or nothing of it."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker.disposition import Token
from inference_worker.errors import QueueFull, StoreUnavailable
from inference_worker.job_book import KEPT_AFTER_S, JobRecord, OtherBody, Reserved, Taken
from inference_worker.job_records import hooks_key, record_key
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.results.job_book import RedisJobBook
from inference_worker.results.redis import RedisStore
from inference_worker.timing import ended
from inference_worker.transports import stream_intake
from inference_worker.transports.stream_entries import RETURNED, StreamNames, delayed_key
from inference_worker.transports.stream_intake import StreamIntake
from tests.faults.proxy import Do
from tests.integration.conftest import MakeProxy, OwnRedis
from tests.job_book_contract import ODD_KEYS, record
from tests.services import Redis
from tests.store_contract import reply

NAMES = StreamNames(stream="inference:jobs", group="workers", dead_letters="inference:dlq")
QUEUE = "inference:jobs"
TTL_S = 3600


def linked(url: str) -> RedisLink:
    return RedisLink(lambda: url, lambda: None, client_name="test", tls=RedisTls())


def intake_on(link: RedisLink) -> StreamIntake:
    return StreamIntake(link, NAMES, queue=QUEUE, ttl_s=TTL_S, now=time.time)


def message(one: JobRecord) -> bytes:
    return b'{"request_id":"' + one.job_id.encode() + b'"}'


class Place:
    """A stream with its group, two gateways, and what may be asked of their jobs."""

    def __init__(self, first: RedisLink, second: RedisLink, client: RedisClient) -> None:
        self.client = client
        self.intakes = [intake_on(first), intake_on(second)]
        self.book = RedisJobBook(first, queue=QUEUE, ttl_s=TTL_S, now=time.time)
        self.store = RedisStore(first, deployment_id="d", replica_id="r", lease_s=15, ttl_s=TTL_S)

    async def accept(
        self, job_id: str, key: str | None = None, *, most_waiting: int = 0, **changes: Any
    ) -> Taken | OtherBody:
        return await self.intakes[0].accept(record(job_id, **changes), message, key=key, most_waiting=most_waiting)

    async def group(self) -> None:
        await self.client.xgroup_create(NAMES.stream, NAMES.group, "0", mkstream=True)

    async def read(self, count: int, consumer: str = "w") -> list[bytes]:
        """Have a worker take some entries; their ids."""
        rows: Any = await self.client.xreadgroup(NAMES.group, consumer, {NAMES.stream: ">"}, count=count)
        return [entry_id for entry_id, _ in rows[0][1]]

    async def entries(self) -> list[str]:
        """The jobs in the stream, in its order."""
        rows: Any = await self.client.xrange(NAMES.stream)
        return [fields[b"job_id"].decode() for _, fields in rows]

    async def keys(self) -> set[str]:
        return {key if isinstance(key, str) else key.decode() for key in await self.client.keys("*")}


@pytest.fixture
async def place(redis_url: str, redis_client: RedisClient) -> AsyncGenerator[Place]:
    async with AsyncExitStack() as links:
        first, second = [await links.enter_async_context(linked(redis_url).open()) for _ in range(2)]
        yield Place(first, second, redis_client)


async def test_an_accepted_job_is_in_the_stream_and_in_the_book(place: Place) -> None:
    taken = await place.accept("a", webhook_url="https://example.com", metadata={"k": "ü"})

    one = record("a", webhook_url="https://example.com", metadata={"k": "ü"})
    assert taken == Taken(record=one, new=True, waiting=0)
    ((_, fields),) = await place.client.xrange(NAMES.stream)  # type: ignore[misc]  # The client's own typing.
    assert float(fields.pop(b"enqueued_at")) == pytest.approx(time.time(), abs=5)  # type: ignore[union-attr]
    assert fields == {b"job_id": b"a", b"attempt": b"0", b"request": b'{"request_id":"a"}'}
    assert await place.book.find("a") == one
    assert list((await place.book.page("t", limit=9, after=None)).records) == [one]
    assert await place.book.deadlines(9) == [one.expires_at]
    assert await place.client.zrange(hooks_key(QUEUE), 0, -1) == [b"a"]


async def test_a_worker_ends_the_job_in_the_book(place: Place) -> None:
    await place.accept("a", "k")

    await place.store.write(reply("a"), None, Token("w"))

    assert await place.book.find("a") == record("a", ended="completed")
    assert await place.book.deadlines(9) == []
    assert await place.accept("b", "k") == Taken(record=record("a", ended="completed"), new=False)


async def test_no_key_is_for_ever_but_the_stream(place: Place) -> None:
    await place.accept("a", "k", webhook_url="https://example.com", expires_at=time.time() + 60)

    ends = {key: await place.client.ttl(key) for key in await place.keys()}

    assert ends.pop(NAMES.stream) == -1
    assert len(ends) == 5
    assert all(60 <= left_s <= 61 + TTL_S + 2 * KEPT_AFTER_S for left_s in ends.values()), ends


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize("key", ODD_KEYS)
async def test_a_key_stands_for_the_job_that_it_came_with(place: Place, key: str) -> None:
    await place.accept("a", key)

    assert await place.accept("b", key) == Taken(record=record("a"), new=False)
    assert await place.entries() == ["a"]
    assert await place.book.find("b") is None


async def test_a_key_with_another_body_is_a_mistake(place: Place) -> None:
    await place.accept("a", "k")

    assert await place.accept("b", "k", fingerprint="g") == OtherBody()
    assert await place.entries() == ["a"]


async def test_the_keys_of_two_tenants_never_meet(place: Place) -> None:
    await place.accept("a", "k", tenant="t")

    taken = await place.accept("b", "k", tenant="u")

    assert taken == Taken(record=record("b", tenant="u"), new=True, waiting=1)
    assert await place.entries() == ["a", "b"]


async def test_without_a_key_every_call_is_a_job(place: Place) -> None:
    for number in range(3):
        assert await place.accept(f"{number}") == Taken(record=record(f"{number}"), new=True, waiting=number)


async def test_of_fifty_calls_at_once_at_two_gateways_one_puts_the_job_in(place: Place) -> None:
    answers = await asyncio.gather(
        *(
            place.intakes[number % 2].accept(record(f"{number}"), message, key="k", most_waiting=5)
            for number in range(50)
        )
    )

    taken = [answer for answer in answers if isinstance(answer, Taken)]
    assert len(taken) == 50
    assert await place.entries() == [taken[0].record.job_id]
    assert {one.record.job_id for one in taken} == {taken[0].record.job_id}
    assert sum(one.new for one in taken) == 1


# ---------------------------------------------------------------- depth


async def test_what_somebody_holds_does_not_wait(place: Place) -> None:
    await place.group()
    for number in range(5):
        await place.accept(f"{number}")
    await place.read(3)

    assert await place.accept("a", most_waiting=3) == Taken(record=record("a"), new=True, waiting=2)


async def test_what_was_handed_back_and_what_waits_for_its_time_waits(place: Place) -> None:
    await place.group()
    for number in range(4):
        await place.accept(f"{number}")
    taken = await place.read(3)
    await place.client.xclaim(NAMES.stream, NAMES.group, RETURNED, 0, taken[:1])  # type: ignore[arg-type]
    await place.client.zadd(delayed_key(NAMES.stream), {"retry": time.time() * 1000 + 60_000})

    assert await place.accept("a") == Taken(record=record("a"), new=True, waiting=3)


@pytest.mark.parametrize("key", ["k", None])
async def test_at_the_limit_a_job_is_refused_with_how_many_wait_and_leaves_nothing(
    place: Place, key: str | None
) -> None:
    for number in range(3):
        await place.accept(f"{number}", most_waiting=3)
    before = await place.keys()

    with pytest.raises(QueueFull, match="3 requests wait, and 3 may") as caught:
        await place.accept("a", key, most_waiting=3)

    assert caught.value.waiting == 3
    assert await place.keys() == before
    assert await place.entries() == ["0", "1", "2"]


async def test_a_repeat_is_answered_however_full_the_queue_is(place: Place) -> None:
    await place.accept("a", "k", most_waiting=1)

    assert await place.accept("b", "k", most_waiting=1) == Taken(record=record("a"), new=False)


async def test_two_gateways_together_put_in_no_more_than_may_wait(place: Place) -> None:
    answers = await asyncio.gather(
        *(
            place.intakes[number % 2].accept(record(f"{number}"), message, key=None, most_waiting=10)
            for number in range(40)
        ),
        return_exceptions=True,
    )

    assert sum(isinstance(answer, Taken) for answer in answers) == 10
    assert sum(isinstance(answer, QueueFull) for answer in answers) == 30
    assert len(await place.entries()) == 10


async def test_the_backlog_is_that_of_the_stream(place: Place) -> None:
    await place.group()
    for number in range(3):
        await place.accept(f"{number}")
    await place.read(1)

    backlog = await place.intakes[0].backlog()

    assert (backlog.ready, backlog.in_flight, backlog.delayed) == (2, 1, 0)


# ---------------------------------------------------------------- faults


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives up soon."""
    monkeypatch.setattr(stream_intake, "PAUSES_S", (0.01, 0.01))


async def cut_intake(place: Place, redis_url: str, before: Any, links: AsyncExitStack) -> StreamIntake:
    """An intake behind a proxy, on a server that has the script."""
    intake = intake_on(await links.enter_async_context(linked(before.url(redis_url)).open()))
    await intake.accept(record("warm-up", tenant="warm-up"), message, key=None, most_waiting=0)
    await place.client.delete(NAMES.stream)
    return intake


@pytest.mark.parametrize("key", ["k", None])
@pytest.mark.parametrize(
    "fault", [Do.CUT_ON_REPLY, Do.CUT, Do.RESET], ids=["its answer", "the script", "the script, by a reset"]
)
async def test_a_job_is_in_the_stream_once_where_something_is_lost_twice(
    place: Place, redis_url: str, redis_server: Redis, proxy: MakeProxy, fault: Do, key: str | None
) -> None:
    before = await proxy(redis_server, speaks="redis")
    async with AsyncExitStack() as links:
        intake = await cut_intake(place, redis_url, before, links)
        trap = before.when_client_sends(record_key("a").encode(), fault, times=2)

        taken = await intake.accept(record("a"), message, key=key, most_waiting=1)

    assert trap.hits == 2
    assert isinstance(taken, Taken)
    assert taken.new
    assert taken.record == record("a")
    assert await place.entries() == ["a"]


async def test_a_job_whose_gateway_died_before_the_answer_keeps_its_id_for_its_key(
    place: Place, redis_url: str, redis_server: Redis, proxy: MakeProxy
) -> None:
    before = await proxy(redis_server, speaks="redis")
    async with AsyncExitStack() as links:
        intake = await cut_intake(place, redis_url, before, links)
        trap = before.when_client_sends(record_key("a").encode(), Do.CUT_ON_REPLY)
        call = asyncio.create_task(intake.accept(record("a"), message, key="k", most_waiting=0))
        await trap.sprung()
        await ended(call)

    assert await place.accept("b", "k") == Taken(record=record("a"), new=False)
    assert await place.entries() == ["a"]


async def test_a_redis_that_cannot_be_reached_is_unavailable_after_a_while(
    place: Place, redis_url: str, redis_server: Redis, proxy: MakeProxy, at_once: None
) -> None:
    before = await proxy(redis_server, speaks="redis")
    async with AsyncExitStack() as links:
        intake = await cut_intake(place, redis_url, before, links)
        await before.refuse()
        await before.cut()

        with pytest.raises(StoreUnavailable):
            async with asyncio.timeout(10):
                await intake.accept(record("a"), message, key=None, most_waiting=0)


async def test_a_key_of_another_kind_in_the_streams_place_leaves_nothing_of_the_job(
    place: Place, at_once: None
) -> None:
    await place.client.set(NAMES.stream, "in the way")

    with pytest.raises(StoreUnavailable, match="WRONGTYPE"):
        await place.accept("a", "k")

    assert await place.keys() == {NAMES.stream}


async def test_a_stream_that_takes_no_entry_leaves_nothing_of_the_job(place: Place, at_once: None) -> None:
    """A script is not rolled back; what it has written by then has to go again."""
    await place.client.xadd(NAMES.stream, {"last": "possible"}, id=f"{2**64 - 1}-{2**64 - 1}")

    with pytest.raises(StoreUnavailable, match="exhausted"):
        await place.accept("a", "k", webhook_url="https://example.com")

    assert await place.keys() == {NAMES.stream}
    await place.client.delete(NAMES.stream)
    assert await place.accept("b", "k") == Taken(record=record("b"), new=True, waiting=0)


async def test_a_full_memory_refuses_the_job_whole(own_redis: OwnRedis, at_once: None) -> None:
    server = await own_redis("--maxmemory-policy", "noeviction")
    async with linked(server.url).open() as link, RedisClient.from_url(server.url, socket_timeout=None) as client:
        place = Place(link, link, client)
        await place.accept("a", "k")
        await client.config_set("maxmemory", "1")
        before = await place.keys()

        with pytest.raises(StoreUnavailable, match=r"OutOfMemory|OOM"):
            await place.accept("b", "other")
        assert await place.accept("c", "k") == Taken(record=record("a"), new=False)
        assert await place.keys() == before

        await client.config_set("maxmemory", "0")
        assert await place.accept("b", "other") == Taken(record=record("b"), new=True, waiting=1)
        assert await place.entries() == ["a", "b"]


async def test_the_permissions_that_the_docs_name_are_enough(own_redis: OwnRedis, at_once: None) -> None:
    """Of the book, too, before a queue elsewhere."""
    page = (Path(__file__).parents[2] / "docs" / "redis.md").read_text()
    section = page[page.index("## Jobs that came over HTTP") : page.index("## A user for the worker")]
    named = " ".join(re.findall(r"`((?:[~+][^` ]+ ?)+)`", section)).split()
    server = await own_redis()
    async with RedisClient.from_url(server.url, socket_timeout=None) as client:
        await client.execute_command("ACL", "SETUSER", "gateway", "on", ">secret", "resetkeys", "-@all", *named)  # type: ignore[no-untyped-call]  # The client's own typing.
        url = server.url.replace("redis://", "redis://gateway:secret@").rpartition("/")[0] + "/0"
        async with linked(url).open() as link:
            place = Place(link, link, client)
            await place.group()
            await place.accept("a", "k", webhook_url="https://example.com")
            await place.read(1)
            await place.accept("b", "k", most_waiting=1)
            reserved = await place.book.reserve(record("c"), "other")
            assert isinstance(reserved, Reserved)
            await place.book.confirm(reserved)
            await place.book.withdraw(reserved)
            withdrawn = await place.book.reserve(record("d", webhook_url="https://example.com"), "another")
            assert isinstance(withdrawn, Reserved)
            await place.book.withdraw(withdrawn)
            page_of_jobs = await place.book.page("t", limit=9, after=None)

        assert sorted(one.job_id for one in page_of_jobs.records) == ["a", "c"]
        # redis-py tells its version where it may, and does not mind.
        refused = {entry["object"] for entry in await client.acl_log()}
        assert refused <= {"client|setinfo"}


async def test_an_emptied_redis_takes_jobs_again(place: Place) -> None:
    await place.group()
    await place.accept("a", "k")
    await place.client.flushdb()
    await place.client.script_flush()

    assert await place.accept("b", "k") == Taken(record=record("b"), new=True, waiting=0)
