"""The hook book of this process keeps the contract, and stays within its bounds."""

import asyncio
from dataclasses import replace
from typing import Literal

import pytest

from inference_worker.disposition import Token
from inference_worker.errors import StoreUnavailable
from inference_worker.job_book import JobRecord, Reserved
from inference_worker.results import memory_hook_book
from inference_worker.results.memory import MemoryStore
from inference_worker.results.memory_hook_book import MemoryHookBook
from inference_worker.results.memory_job_book import MemoryJobBook
from tests.hook_book_contract import LEASE_S, HookBookContract, record
from tests.store_contract import failure, reply
from tests.unit.worker_kit import now

DAY_S = 86_400.0


class MemoryHookHarness:
    """Books on virtual time. Jobs and results are forgotten by taking them out."""

    elsewhere = None

    def __init__(self) -> None:
        self.store = MemoryStore(now=now, lease_s=15.0, ttl_s=30 * DAY_S)
        self.jobs = MemoryJobBook(self.store, ttl_s=30 * DAY_S, now=now)
        self.book = self.other = MemoryHookBook(self.jobs, self.store, now=now)

    def now(self) -> float:
        return now()

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def accept(self, record: JobRecord) -> None:
        reserved = await self.jobs.reserve(record, None)
        assert isinstance(reserved, Reserved)
        await self.jobs.confirm(reserved)

    async def finish(self, job_id: str, status: Literal["completed", "failed"] = "completed") -> None:
        await self.store.write((reply if status == "completed" else failure)(job_id), None, Token("t"))

    async def forget_result(self, job_id: str) -> None:
        self.store._forget(job_id)

    async def forget_job(self, job_id: str) -> None:
        self.jobs._forget(job_id)


@pytest.fixture
async def harness() -> MemoryHookHarness:
    return MemoryHookHarness()


class TestMemoryHookBook(HookBookContract):
    """All clauses, on virtual time."""


async def test_the_oldest_go_where_there_are_too_many(
    harness: MemoryHookHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_hook_book, "MOST_HOOKS", 3)
    for number in range(5):
        await harness.accept(record(f"r-{number}", now()))
        await harness.finish(f"r-{number}")

    hooks = await harness.book.due(10, LEASE_S)
    for hook in hooks:
        await harness.book.later(replace(hook, tries=1), 10.0)

    assert [hook.job_id for hook in hooks] == ["r-2", "r-3", "r-4"]
    await harness.accept(record("r-5", now()))
    await harness.finish("r-5")
    await harness.book.due(10, LEASE_S)
    assert len(harness.book._kept) == 3


async def test_it_cannot_be_asked_while_the_store_cannot(harness: MemoryHookHarness) -> None:
    harness.store.away = "gone"

    for ask in (harness.book.due(1, 1.0), harness.book.log_of("a"), harness.book.hasten(["a"])):
        with pytest.raises(StoreUnavailable, match="gone"):
            await ask


async def test_the_oldest_bodies_go_where_they_are_too_large(
    harness: MemoryHookHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_hook_book, "MOST_BODY_BYTES", 25)
    for number in range(4):
        await harness.accept(record(f"r-{number}", now()))
        await harness.finish(f"r-{number}")
    for hook in await harness.book.due(10, LEASE_S):
        await harness.book.later(replace(hook, tries=1), 10.0, None, b"x" * 10)

    assert [await harness.book.body_of(f"r-{number}") for number in range(4)] == [None, None, b"x" * 10, b"x" * 10]


async def test_one_body_that_is_larger_than_all_may_be_is_kept(
    harness: MemoryHookHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_hook_book, "MOST_BODY_BYTES", 5)
    await harness.accept(record("a", now()))
    await harness.finish("a")
    (hook,) = await harness.book.due(10, LEASE_S)
    await harness.book.later(hook, 10.0, None, b"x" * 10)

    assert await harness.book.body_of("a") == b"x" * 10
