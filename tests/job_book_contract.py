"""What every job book promises an HTTP intake, as tests. A book's own test file brings a harness and one fixture."""

import asyncio
from dataclasses import replace
from typing import Any, Literal, Protocol

import pytest

from inference_worker.job_book import JobBook, JobRecord, OtherBody, Reserved, Standing

ODD_KEYS = [
    pytest.param("k", id="one letter"),
    pytest.param("x" * 256, id="256 letters"),
    pytest.param("\U0001f407" * 256, id="256 rabbits"),
    pytest.param("a\0b", id="a NUL inside"),
    pytest.param("\0", id="NUL alone"),
    pytest.param(" a b\r\n", id="white space"),
    pytest.param("e\u0301", id="a combining accent"),
    pytest.param("\ud800", id="a lone surrogate"),
    pytest.param("infer_job:{a}*?", id="what Redis might read as more"),
    pytest.param("\u202eabc\ufeff", id="marks that are not seen"),
]


def record(job_id: str = "a", **changes: Any) -> JobRecord:
    """A job of tenant `t`; times are given by the caller where they matter."""
    values: dict[str, Any] = {
        "job_id": job_id,
        "tenant": "t",
        "created_at": 1_700_000_000.25,
        "expires_at": 4_000_000_000.5,
        "fingerprint": "f",
    }
    return JobRecord(**(values | changes))


class BookHarness(Protocol):
    """An empty book, as two intakes see it."""

    book: JobBook
    other: JobBook

    def now(self) -> float: ...
    async def reservation_lapses(self, job_id: str) -> None:
        """Let the time pass after which another may finish what was reserved."""

    async def finish(self, job_id: str, status: Literal["completed", "failed"] = "completed") -> None:
        """The worker's last step: the result is stored."""

    async def replay(self, job_id: str, deadline: float) -> None:
        """An operator's first step with its dead letter: room is made for a new result."""


class JobBookContract:
    """One key, one job; a job is its tenant's alone; what is accepted is listed until it is forgotten."""

    async def accepted(self, harness: BookHarness, one: JobRecord, key: str | None = None) -> JobRecord:
        """Reserve and confirm."""
        reserved = await harness.book.reserve(one, key)
        assert isinstance(reserved, Reserved)
        await harness.book.confirm(reserved)
        return reserved.record

    async def left_behind(self, harness: BookHarness, one: JobRecord, key: str) -> None:
        """Reserve and die."""
        assert isinstance(await harness.book.reserve(one, key), Reserved)
        await harness.reservation_lapses(one.job_id)

    # ------------------------------------------------------------ records

    async def test_a_record_is_found_as_it_was_written(self, harness: BookHarness) -> None:
        full = record(
            tenant="ä tenant",
            endpoint="/v1/embeddings",
            metadata={"k": "ü", "": "\n"},
            webhook_url="https://example.com/ü?q=1",
            created_at=1_700_000_000.123456,
        )
        await self.accepted(harness, full)

        assert await harness.other.find("a") == full

    async def test_a_reserved_record_is_found(self, harness: BookHarness) -> None:
        """A worker may be faster than the intake that put the job in."""
        await harness.book.reserve(record(), None)

        assert await harness.book.find("a") == record()

    async def test_an_unknown_job_is_none(self, harness: BookHarness) -> None:
        assert await harness.book.find("a") is None

    @pytest.mark.parametrize("tenant", ["t", "ä tenant", ""])
    async def test_a_tenant_finds_its_own_record_alone(self, harness: BookHarness, tenant: str) -> None:
        await self.accepted(harness, record(tenant=tenant))

        assert await harness.book.find("a", tenant) == record(tenant=tenant)
        assert await harness.book.find("a", "another") is None
        assert await harness.book.find("b", tenant) is None

    @pytest.mark.parametrize("status", ["completed", "failed"])
    async def test_the_end_of_a_job_is_in_its_record(
        self, harness: BookHarness, status: Literal["completed", "failed"]
    ) -> None:
        await self.accepted(harness, record())

        await harness.finish("a", status)

        assert await harness.book.find("a") == record(ended=status)

    async def test_a_job_may_end_before_it_is_confirmed(self, harness: BookHarness) -> None:
        reserved = await harness.book.reserve(record(), "k")
        assert isinstance(reserved, Reserved)
        await harness.finish("a")
        await harness.book.confirm(reserved)

        assert await harness.book.find("a") == record(ended="completed")
        assert await harness.book.deadlines(10) == []

    # ------------------------------------------------------------ keys

    @pytest.mark.parametrize("key", ODD_KEYS)
    async def test_a_key_stands_for_the_job_that_it_came_with(self, harness: BookHarness, key: str) -> None:
        await self.accepted(harness, record("a"), key)

        again = await harness.other.reserve(record("b"), key)

        assert again == Standing(record=record("a"), confirmed=True)
        assert await harness.book.find("b") is None

    async def test_two_keys_are_two_jobs(self, harness: BookHarness) -> None:
        """Composed and decomposed letters are two keys as well: they are compared as they came."""
        for job_id, key in enumerate(["k", "K", "k ", "\u00e9", "e\u0301", "a\0b", "a"]):
            await self.accepted(harness, record(f"{job_id}"), key)

        page = await harness.book.page("t", limit=10, after=None)

        assert len(page.records) == 7

    @pytest.mark.parametrize("tenants", [("t", "u"), ("t", ""), ("t", "t "), ("a:b", "a"), ("T", "t")])
    async def test_the_keys_of_two_tenants_never_meet(self, harness: BookHarness, tenants: tuple[str, str]) -> None:
        first, second = (record(job_id, tenant=tenant) for job_id, tenant in zip("ab", tenants, strict=True))
        await self.accepted(harness, first, "k")

        assert await self.accepted(harness, second, "k") == second
        assert await harness.book.reserve(replace(first, job_id="c"), "k") == Standing(record=first, confirmed=True)

    async def test_a_key_with_another_body_is_a_mistake(self, harness: BookHarness) -> None:
        await self.accepted(harness, record("a"), "k")

        assert await harness.other.reserve(record("b", fingerprint="g"), "k") == OtherBody()
        assert await harness.book.find("b") is None

    async def test_a_key_with_another_body_is_a_mistake_before_the_job_is_confirmed_too(
        self, harness: BookHarness
    ) -> None:
        await self.left_behind(harness, record("a"), "k")

        assert await harness.other.reserve(record("b", fingerprint="g"), "k") == OtherBody()

    async def test_a_key_stands_for_its_job_after_the_end_of_that(self, harness: BookHarness) -> None:
        await self.accepted(harness, record("a"), "k")
        await harness.finish("a")

        assert await harness.other.reserve(record("b"), "k") == Standing(
            record=record("a", ended="completed"), confirmed=True
        )

    async def test_without_a_key_every_call_is_a_job(self, harness: BookHarness) -> None:
        await self.accepted(harness, record("a"))
        await self.accepted(harness, record("b"))

        assert len((await harness.book.page("t", limit=10, after=None)).records) == 2

    # ------------------------------------------------------------ half done

    async def test_a_job_on_its_way_is_left_to_whoever_has_it(self, harness: BookHarness) -> None:
        await harness.book.reserve(record("a"), "k")

        standing = await harness.other.reserve(record("b"), "k")

        assert isinstance(standing, Standing)
        assert standing.record == record("a")
        assert not standing.confirmed
        assert 0 < standing.left_s <= 5

    async def test_a_repeated_reservation_is_the_same_one(self, harness: BookHarness) -> None:
        """The answer to the first may have been lost."""
        first = await harness.book.reserve(record("a"), "k")

        assert await harness.book.reserve(record("a"), "k") == first

    async def test_what_a_dead_intake_left_is_finished_under_its_id_with_new_times(self, harness: BookHarness) -> None:
        await self.left_behind(harness, record("a"), "k")

        mine = await harness.other.reserve(record("b", created_at=1_800_000_000.0, expires_at=4_000_000_009.0), "k")

        assert isinstance(mine, Reserved)
        assert mine.record == record("a", created_at=1_800_000_000.0, expires_at=4_000_000_009.0)
        await harness.other.confirm(mine)
        assert await harness.book.find("a") == mine.record
        assert await harness.book.find("b") is None
        assert await harness.book.deadlines(10) == [4_000_000_009.0]

    async def test_only_one_of_many_finishes_what_was_left(self, harness: BookHarness) -> None:
        await self.left_behind(harness, record("a"), "k")

        answers = [await harness.other.reserve(record(f"b{number}"), "k") for number in range(10)]

        assert [type(answer) for answer in answers] == [Reserved] + [Standing] * 9

    async def test_a_job_that_has_ended_needs_no_finishing(self, harness: BookHarness) -> None:
        await self.left_behind(harness, record("a"), "k")
        await harness.finish("a")

        assert await harness.other.reserve(record("b"), "k") == Standing(
            record=record("a", ended="completed"), confirmed=True
        )

    async def test_a_withdrawn_job_is_forgotten_and_its_key_is_free(self, harness: BookHarness) -> None:
        reserved = await harness.book.reserve(record("a", webhook_url="https://example.com"), "k")
        assert isinstance(reserved, Reserved)

        await harness.book.withdraw(reserved)

        assert await harness.book.find("a") is None
        assert await harness.book.deadlines(10) == []
        assert await self.accepted(harness, record("b", fingerprint="g"), "k") == record("b", fingerprint="g")

    async def test_a_job_of_unknown_whereabouts_keeps_its_id_and_may_be_taken_over_at_once(
        self, harness: BookHarness
    ) -> None:
        reserved = await harness.book.reserve(record("a"), "k")
        assert isinstance(reserved, Reserved)

        await harness.book.leave(reserved)
        mine = await harness.other.reserve(record("b"), "k")

        assert isinstance(mine, Reserved)
        assert mine.record == record("a")

    async def test_who_took_a_job_over_cannot_forget_it(self, harness: BookHarness) -> None:
        """The one before may have put it in, or may be about to: the queue's job must stay known under its key."""
        await self.left_behind(harness, record("a"), "k")
        mine = await harness.other.reserve(record("b"), "k")
        assert isinstance(mine, Reserved)

        await harness.other.withdraw(mine)

        assert await harness.book.find("a") == record("a")
        next_one = await harness.book.reserve(record("c"), "k")
        assert isinstance(next_one, Reserved)
        assert next_one.record == record("a")

    async def test_who_lost_a_job_to_another_cannot_withdraw_it(self, harness: BookHarness) -> None:
        first = await harness.book.reserve(record("a"), "k")
        assert isinstance(first, Reserved)
        await harness.reservation_lapses("a")
        await harness.other.reserve(record("b"), "k")

        await harness.book.withdraw(first)
        await harness.book.leave(first)

        standing = await harness.book.reserve(record("c"), "k")
        assert isinstance(standing, Standing)
        assert standing.record == record("a")

    async def test_a_job_that_may_be_in_the_queue_is_not_withdrawn_later(self, harness: BookHarness) -> None:
        reserved = await harness.book.reserve(record("a"), "k")
        assert isinstance(reserved, Reserved)
        await harness.book.leave(reserved)
        again = await harness.book.reserve(record("a"), "k")
        assert isinstance(again, Reserved)

        await harness.book.withdraw(again)

        assert await harness.book.find("a") == record("a")

    async def test_a_confirmed_job_is_not_withdrawn(self, harness: BookHarness) -> None:
        reserved = await harness.book.reserve(record("a"), "k")
        assert isinstance(reserved, Reserved)
        await harness.book.confirm(reserved)

        await harness.book.withdraw(reserved)
        await harness.book.leave(reserved)

        assert await harness.other.reserve(record("b"), "k") == Standing(record=record("a"), confirmed=True)

    async def test_a_job_that_has_ended_is_not_withdrawn(self, harness: BookHarness) -> None:
        reserved = await harness.book.reserve(record("a"), "k")
        assert isinstance(reserved, Reserved)
        await harness.finish("a")

        await harness.book.withdraw(reserved)

        assert await harness.book.find("a") == record(ended="completed")

    async def test_a_confirmed_job_is_known_where_its_record_was_lost(self, harness: BookHarness) -> None:
        reserved = await harness.book.reserve(record("a"), "k")
        assert isinstance(reserved, Reserved)
        await harness.book.withdraw(reserved)

        await harness.book.confirm(reserved)

        assert await harness.other.reserve(record("b"), "k") == Standing(record=record("a"), confirmed=True)

    async def test_a_record_written_again_does_not_take_a_key_from_another_job(self, harness: BookHarness) -> None:
        reserved = await harness.book.reserve(record("a"), "k")
        assert isinstance(reserved, Reserved)
        await harness.book.withdraw(reserved)
        await self.accepted(harness, record("b"), "k")

        await harness.book.confirm(reserved)

        assert await harness.book.find("a") == record("a")
        assert await harness.book.reserve(record("c"), "k") == Standing(record=record("b"), confirmed=True)

    # ------------------------------------------------------------ pages

    async def some(self, harness: BookHarness, count: int, *, apart_s: float = 1.0) -> list[str]:
        ids = [f"{number:03}" for number in range(count)]
        for number, job_id in enumerate(ids):
            await self.accepted(harness, record(job_id, created_at=1_700_000_000.1 + number * apart_s))
        return ids[::-1]

    async def all_pages(self, harness: BookHarness, limit: int) -> list[list[str]]:
        pages: list[list[str]] = []
        after: str | None = None
        while True:
            page = await harness.book.page("t", limit=limit, after=after)
            pages.append([one.job_id for one in page.records])
            if page.after is None:
                return pages
            assert len(pages) < 100
            after = page.after

    @pytest.mark.parametrize("apart_s", [1.0, 1e-6, 0.0], ids=["a second apart", "a microsecond apart", "at once"])
    async def test_pages_are_newest_first_and_miss_nothing(self, harness: BookHarness, apart_s: float) -> None:
        ids = await self.some(harness, 25, apart_s=apart_s)

        assert await self.all_pages(harness, 10) == [ids[:10], ids[10:20], ids[20:]]

    async def test_there_is_no_page_after_the_last_one(self, harness: BookHarness) -> None:
        ids = await self.some(harness, 20)

        assert await self.all_pages(harness, 10) == [ids[:10], ids[10:]]

    async def test_a_page_goes_on_where_it_ended_though_newer_jobs_came_and_older_ones_went(
        self, harness: BookHarness
    ) -> None:
        ids = await self.some(harness, 10)
        first = await harness.book.page("t", limit=4, after=None)
        await self.accepted(harness, record("new", created_at=1_800_000_000.0))

        second = await harness.book.page("t", limit=4, after=first.after)

        assert [one.job_id for one in second.records] == ids[4:8]

    async def test_a_tenant_without_jobs_has_an_empty_page(self, harness: BookHarness) -> None:
        await self.some(harness, 2)

        page = await harness.book.page("u", limit=10, after=None)

        assert page.records == []
        assert page.after is None

    async def test_a_page_has_no_job_of_another_tenant(self, harness: BookHarness) -> None:
        for number, tenant in enumerate(["t", "u", "", "t:u", "*"]):
            await self.accepted(harness, record(f"{number}", tenant=tenant))

        for number, tenant in enumerate(["t", "u", "", "t:u", "*"]):
            page = await harness.book.page(tenant, limit=10, after=None)
            assert [one.job_id for one in page.records] == [f"{number}"]

    async def test_what_was_never_accepted_is_not_listed(self, harness: BookHarness) -> None:
        await harness.book.reserve(record("a"), None)
        await self.accepted(harness, record("b"))

        assert [one.job_id for one in (await harness.book.page("t", limit=10, after=None)).records] == ["b"]

    async def test_what_has_ended_is_listed_though_its_confirmation_was_lost(self, harness: BookHarness) -> None:
        await harness.book.reserve(record("a"), None)
        await harness.finish("a")

        page = await harness.book.page("t", limit=10, after=None)

        assert list(page.records) == [record("a", ended="completed")]

    @pytest.mark.parametrize("cursor", ["", "a", "~", "1~", "nan~a", "inf~a", "1e400~a", "1;2~a", "-inf"])
    async def test_what_is_no_cursor_is_refused_or_harmless(self, harness: BookHarness, cursor: str) -> None:
        await self.some(harness, 2)

        with pytest.raises(ValueError, match="cursor"):
            await harness.book.page("t", limit=10, after=cursor)

    # ------------------------------------------------------------ deadlines

    async def test_deadlines_ahead_are_told_soonest_first(self, harness: BookHarness) -> None:
        now = harness.now()
        for number, left_s in enumerate([300.5, 100.25, 200.0, -5.0]):
            await self.accepted(harness, record(f"{number}", expires_at=now + left_s))

        assert list(await harness.book.deadlines(10)) == [now + 100.25, now + 200.0, now + 300.5]
        assert list(await harness.book.deadlines(2)) == [now + 100.25, now + 200.0]

    async def test_a_job_that_has_ended_is_not_due(self, harness: BookHarness) -> None:
        await self.accepted(harness, record("a", expires_at=harness.now() + 100))
        await self.accepted(harness, record("b", expires_at=harness.now() + 200))
        await harness.finish("a", "failed")

        assert len(await harness.book.deadlines(10)) == 1

    async def test_a_job_whose_dead_letter_is_replayed_begins_anew(self, harness: BookHarness) -> None:
        await self.accepted(harness, record("a", expires_at=harness.now() + 100), "k")
        await harness.finish("a", "failed")

        await harness.replay("a", harness.now() + 500.5)

        anew = await harness.book.find("a")
        assert anew is not None
        assert anew == record("a", expires_at=anew.expires_at)
        assert anew.expires_at == pytest.approx(harness.now() + 500.5, abs=5)
        assert list(await harness.book.deadlines(10)) == [anew.expires_at]
        assert await harness.book.reserve(record("b"), "k") == Standing(record=anew, confirmed=True)
        await harness.finish("a")
        assert await harness.book.deadlines(10) == []

    # ------------------------------------------------------------ many at once

    async def test_of_many_calls_at_once_with_one_key_one_has_the_job(self, harness: BookHarness) -> None:
        answers = await asyncio.gather(
            *(book.reserve(record(f"{number}-{name}"), "k")
              for number in range(25) for name, book in (("a", harness.book), ("b", harness.other)))
        )  # fmt: skip

        assert sum(isinstance(answer, Reserved) for answer in answers) == 1
        assert len({answer.record.job_id for answer in answers if not isinstance(answer, OtherBody)}) == 1
