"""Postgres keeps the store contract; and what only Postgres has: tables and what is swept from them."""

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from inference_worker.disposition import Token
from inference_worker.results.sql import SqlOutbox, SqlStore
from inference_worker.sql_place import SqlPlace
from tests.sql_kit import place_at
from tests.store_contract import StoreContract, failure, reply
from tests.waiting import eventually

A = Token("token-a")
LEASE_S = 0.25


class SqlStoreHarness:
    """This test's schema; its time is real."""

    lease_s = LEASE_S
    ttl_s = 0.3

    def __init__(self, place: SqlPlace) -> None:
        self.place = place
        self.store = SqlStore(place, deployment_id="d", replica_id="r", lease_s=LEASE_S, ttl_s=3600)
        self.short_lived = SqlStore(place, deployment_id="d", replica_id="r", lease_s=LEASE_S, ttl_s=self.ttl_s)
        self.heeded = self.store
        self.outbox = SqlOutbox(place, deployment_id="d", replica_id="r")
        self.other_outbox = SqlOutbox(place, deployment_id="d", replica_id="other")

    def now(self) -> float:
        return time.time()

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def leave_lying(self) -> None:
        await self.place.link.fetch("update iw_usage set taken_at = taken_at - interval '1 minute'")


@pytest.fixture
async def harness(sql_url: str) -> AsyncGenerator[SqlStoreHarness]:
    async with place_at(sql_url) as place:
        yield SqlStoreHarness(place)


class TestSqlStore(StoreContract):
    """All clauses, on a real Postgres."""


async def test_what_is_over_is_swept_and_the_rest_stays(harness: SqlStoreHarness) -> None:
    await harness.short_lived.write(reply("over"), b"{}", A)
    await harness.store.write(reply("kept"), None, A)
    await harness.store.claim("claimed", 0, A, time.time() + 60)
    await harness.store.bury("kept", b"{}")
    await harness.pass_time(harness.ttl_s * 1.1)

    (swept,) = await harness.place.link.row("select iw1_tidy(1000)")

    left = await harness.place.link.fetch("select convert_from(id, 'UTF8') from iw_state order by 1")
    assert (swept, [row[0] for row in left]) == (1, ["claimed", "kept"])
    assert await harness.store.dead_note("kept") == b"{}"
    assert await harness.outbox.size() == 1, "events stay until they are sent"


async def test_of_each_table_all_that_is_over_is_swept_in_the_end(harness: SqlStoreHarness) -> None:
    """One that grows by more than a sweep takes in a minute would grow for ever otherwise."""
    over = "clock_timestamp() - interval '1 second' from generate_series(1, 5) g"
    for insert in (
        f"insert into iw_keys select g::text, '', '', '', '', '', 0, {over}",
        f"insert into iw_acknowledged select g, '', {over}",
        f"insert into iw_notes select g::text::bytea, '', {over}",
        f"insert into iw_waiting select g::text, '', {over}",
        f"insert into iw_quota_admissions (slot, key, cost, at, expires) select g::text, '', 1, now(), {over}",
    ):
        await harness.place.link.fetch(insert)
        (swept,) = await harness.place.link.row("select iw1_tidy(2)")
        assert swept == 2, insert
        while (await harness.place.link.row("select iw1_tidy(2)"))[0]:
            pass


async def test_what_a_stranger_says_of_cancellations_is_passed_over(harness: SqlStoreHarness) -> None:
    until, told = asyncio.Event(), list[str]()

    async def both() -> list[str] | None:
        await harness.place.link.fetch("select pg_notify('iw_cancelled', 'no id at all')")
        await harness.place.link.fetch("select pg_notify('iw_cancelled', $1)", b"a".hex())
        return told or None

    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    async with asyncio.TaskGroup() as group:
        group.create_task(harness.store.cancellations(until, told.append))
        await eventually(both, within=10, what="the cancellation is heard of")
        until.set()
    assert (set(told), failures) == ({"a"}, [])


async def test_a_result_beyond_the_first_is_made_room_for_only_where_it_failed(harness: SqlStoreHarness) -> None:
    await harness.store.write(failure("failed"), None, A)
    await harness.store.write(reply("completed"), None, A)
    await harness.store.claim("running", 0, A, time.time() + 60)

    assert await harness.store.make_room("failed", time.time() + 60) is None
    assert await harness.store.make_room("completed", time.time() + 60) == "completed"
    assert await harness.store.make_room("running", time.time() + 60) == "running"
    assert await harness.store.known("failed") is None
    known = await harness.store.known("completed")
    assert known is not None
    assert known.status == "completed"
