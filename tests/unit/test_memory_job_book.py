"""The job book of this process keeps the book's contract, and stays within its bounds."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

import pytest

from inference_worker.disposition import Token
from inference_worker.errors import StoreUnavailable
from inference_worker.job_book import KEPT_AFTER_S, RESERVED_S, JobRecord, Reserved
from inference_worker.results import memory_job_book
from inference_worker.results.memory import MemoryStore
from inference_worker.results.memory_job_book import MemoryJobBook
from tests.job_book_contract import JobBookContract, record
from tests.store_contract import failure, reply
from tests.unit.worker_kit import now

TTL_S = 3600.0


class MemoryBookHarness:
    """A book on virtual time; two intakes of one process share it."""

    def __init__(self) -> None:
        self.store = MemoryStore(now=now, lease_s=15, ttl_s=TTL_S)
        self.book = self.other = MemoryJobBook(self.store, ttl_s=TTL_S, now=now)

    def now(self) -> float:
        return now()

    async def reservation_lapses(self, job_id: str) -> None:
        await asyncio.sleep(RESERVED_S)

    async def finish(self, job_id: str, status: Literal["completed", "failed"] = "completed") -> None:
        await self.store.write(reply(job_id) if status == "completed" else failure(job_id), None, Token("w"))

    async def replay(self, job_id: str, deadline: float) -> None:
        assert await self.store.make_room(job_id, deadline) is None


@pytest.fixture
async def harness() -> MemoryBookHarness:
    return MemoryBookHarness()


class TestMemoryJobBook(JobBookContract):
    """All clauses, on virtual time."""


async def accept(harness: MemoryBookHarness, one: JobRecord, key: str | None = None) -> None:
    reserved = await harness.book.reserve(one, key)
    assert isinstance(reserved, Reserved)
    await harness.book.confirm(reserved)


async def test_a_job_that_never_ends_is_forgotten_a_day_after_the_last_time_for_its_result(
    harness: MemoryBookHarness,
) -> None:
    await accept(harness, record(expires_at=now() + 60), "k")
    await asyncio.sleep(60 + TTL_S + KEPT_AFTER_S - 1)
    assert await harness.book.find("a") is not None
    await asyncio.sleep(1)

    assert await harness.book.find("a") is None
    assert isinstance(await harness.book.reserve(record("b"), "k"), Reserved)
    assert (await harness.book.page("t", limit=10, after=None)).records == []


async def test_a_job_that_has_ended_is_forgotten_a_day_after_its_result(harness: MemoryBookHarness) -> None:
    await accept(harness, record(expires_at=now() + 600_000))
    await harness.finish("a")
    await asyncio.sleep(TTL_S + KEPT_AFTER_S - 1)
    assert await harness.book.find("a") is not None
    await asyncio.sleep(1)

    assert await harness.book.find("a") is None


async def test_the_oldest_jobs_go_where_there_are_too_many(
    harness: MemoryBookHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_job_book, "MOST_JOBS", 3)
    for number in range(5):
        await accept(harness, record(f"{number}", created_at=now() + number), f"{number}")

    page = await harness.book.page("t", limit=10, after=None)

    assert [one.job_id for one in page.records] == ["4", "3", "2"]
    assert len(await harness.book.deadlines(10)) == 3
    assert isinstance(await harness.book.reserve(record("new"), "0"), Reserved)


async def test_what_is_over_is_swept_as_new_jobs_come(harness: MemoryBookHarness) -> None:
    for number in range(10):
        await accept(harness, record(f"{number}", expires_at=now() + 1), f"{number}")
    await asyncio.sleep(1 + TTL_S + KEPT_AFTER_S)

    for number in range(5):
        await accept(harness, record(f"new{number}", tenant="u"))

    assert len(harness.book._jobs) == 5
    assert not harness.book._keys
    assert list(harness.book._listed) == ["u"]
    assert len(harness.book._due) == 5


async def test_a_hook_book_is_told_of_jobs_that_have_a_webhook(harness: MemoryBookHarness) -> None:
    told: list[str] = []
    harness.book.on_hook = lambda one: told.append(one.job_id)

    await accept(harness, record("a", webhook_url="https://example.com"))
    await accept(harness, record("b"))

    assert told == ["a"]


async def test_the_end_of_a_request_that_came_another_way_is_nothing(harness: MemoryBookHarness) -> None:
    await harness.finish("stranger", "failed")
    await harness.replay("stranger", now() + 60)

    assert await harness.book.find("stranger") is None


@pytest.mark.parametrize("name", ["reserve", "confirm", "withdraw", "leave", "find", "page", "deadlines"])
async def test_it_cannot_be_asked_while_the_store_is_away(harness: MemoryBookHarness, name: str) -> None:
    book = harness.book
    reserved = Reserved(record=record(), key=None, owner="a")
    asks: dict[str, Callable[[], Awaitable[object]]] = {
        "reserve": lambda: book.reserve(record(), None),
        "confirm": lambda: book.confirm(reserved),
        "withdraw": lambda: book.withdraw(reserved),
        "leave": lambda: book.leave(reserved),
        "find": lambda: book.find("a"),
        "page": lambda: book.page("t", limit=1, after=None),
        "deadlines": lambda: book.deadlines(1),
    }
    harness.store.away = "it is away"

    with pytest.raises(StoreUnavailable, match="it is away"):
        await asks[name]()
