"""What every hook book promises, as tests. A book's own test file brings a harness and one fixture."""

from dataclasses import replace
from typing import Literal, Protocol

import pytest

from inference_worker.job_book import HOOK_KEPT_S, MOST_TRIES_LOGGED, Hook, HookBook, HookEnd, HookTry, JobRecord

URL = "https://example.com/hooks"
LEASE_S = 60.0
BODY = b'{"type":"job.succeeded"}'


def record(job_id: str, now: float, *, tenant: str = "t", url: str | None = URL) -> JobRecord:
    """A job that is accepted now."""
    return JobRecord(
        job_id=job_id, tenant=tenant, created_at=now, expires_at=now + 600, fingerprint="", webhook_url=url
    )


class HookHarness(Protocol):
    """An empty book as two gateways see it, with its clock, its jobs and their results."""

    book: HookBook
    other: HookBook
    elsewhere: HookBook | None
    """The book of another queue in the same place, where there is such a thing."""

    def now(self) -> float: ...
    async def pass_time(self, seconds: float) -> None: ...
    async def accept(self, record: JobRecord) -> None: ...
    async def finish(self, job_id: str, status: Literal["completed", "failed"] = "completed") -> None:
        """The worker's last step."""

    async def forget_result(self, job_id: str) -> None:
        """The time of its result is over."""

    async def forget_job(self, job_id: str) -> None:
        """The time of its record is over, or it was withdrawn."""


class HookBookContract:
    """Nothing is handed out before its job has ended, nor twice within a lease; nothing is lost by who dies."""

    async def ended(self, harness: HookHarness, job_id: str = "a", tenant: str = "t") -> None:
        await harness.accept(record(job_id, harness.now(), tenant=tenant))
        await harness.finish(job_id)
        await harness.book.hasten([job_id])

    async def taken(self, harness: HookHarness, book: HookBook | None = None) -> Hook:
        (hook,) = await (book or harness.book).due(10, LEASE_S)
        return hook

    def tried(self, harness: HookHarness, status: int | None = 500, detail: str = "") -> HookTry:
        return HookTry(at=harness.now(), status_code=status, detail=detail)

    # ------------------------------------------------------------ taking

    async def test_an_ended_job_is_handed_out_with_what_its_record_says(self, harness: HookHarness) -> None:
        known = record("a", harness.now(), tenant="tü")
        await harness.accept(known)
        await harness.finish("a")

        hook = await self.taken(harness)

        assert hook == Hook(job_id="a", tenant="tü", url=URL, expires_at=known.expires_at, lease=1)

    @pytest.mark.parametrize("status", ["completed", "failed"])
    async def test_a_job_is_handed_out_once_it_has_ended(
        self, harness: HookHarness, status: Literal["completed", "failed"]
    ) -> None:
        await harness.accept(record("a", harness.now()))
        assert list(await harness.book.due(10, LEASE_S)) == []
        await harness.finish("a", status)
        assert list(await harness.book.due(10, LEASE_S)) == []

        await harness.pass_time(0.55)

        assert (await self.taken(harness)).job_id == "a"

    async def test_the_older_a_job_the_more_rarely_it_is_looked_at(self, harness: HookHarness) -> None:
        """After a quarter of its age, 5 s at most."""
        await harness.accept(record("a", harness.now()))
        await harness.pass_time(8.0)
        await harness.book.due(10, LEASE_S)
        await harness.finish("a")

        await harness.pass_time(1.8)
        assert list(await harness.book.due(10, LEASE_S)) == []
        await harness.pass_time(0.3)
        assert len(await harness.book.due(10, LEASE_S)) == 1

    async def test_an_old_job_is_looked_at_every_five_seconds(self, harness: HookHarness) -> None:
        await harness.accept(record("a", harness.now()))
        await harness.pass_time(1000.0)
        await harness.book.due(10, LEASE_S)
        await harness.finish("a")

        await harness.pass_time(5.1)

        assert len(await harness.book.due(10, LEASE_S)) == 1

    async def test_a_hint_saves_the_wait(self, harness: HookHarness) -> None:
        await harness.accept(record("a", harness.now()))
        await harness.pass_time(1000.0)
        await harness.book.due(10, LEASE_S)
        await harness.finish("a")

        await harness.book.hasten(["a", "unknown"])
        await harness.book.hasten([])

        assert (await self.taken(harness)).job_id == "a"

    async def test_a_job_without_a_webhook_is_not_handed_out(self, harness: HookHarness) -> None:
        await harness.accept(record("a", harness.now(), url=None))
        await harness.finish("a")
        await harness.book.hasten(["a"])

        assert list(await harness.book.due(10, LEASE_S)) == []
        assert await harness.book.log_of("a") is None

    async def test_no_more_than_asked_for_are_handed_out_and_each_once(self, harness: HookHarness) -> None:
        for number in range(5):
            await self.ended(harness, f"r-{number}")

        first = await harness.book.due(2, LEASE_S)
        second = await harness.other.due(10, LEASE_S)

        assert (len(first), len(second)) == (2, 3)
        assert {hook.job_id for hook in (*first, *second)} == {f"r-{number}" for number in range(5)}

    async def test_many_jobs_that_run_do_not_hide_one_that_has_ended(self, harness: HookHarness) -> None:
        for number in range(600):
            await harness.accept(record(f"r-{number}", harness.now()))
        await self.ended(harness, "a")

        assert [hook.job_id for hook in await harness.book.due(10, LEASE_S)] == ["a"]

    async def test_nobody_else_gets_what_is_leased(self, harness: HookHarness) -> None:
        await self.ended(harness)
        await self.taken(harness)
        await harness.pass_time(LEASE_S - 1)
        await harness.other.hasten(["a"])

        assert list(await harness.other.due(10, LEASE_S)) == []

    async def test_who_dies_is_followed_by_another(self, harness: HookHarness) -> None:
        await self.ended(harness)
        await self.taken(harness)
        await harness.pass_time(LEASE_S + 0.1)

        hook = await self.taken(harness, harness.other)

        assert (hook.job_id, hook.tries, hook.lease) == ("a", 0, 2)

    async def test_a_webhook_outlives_the_record_of_its_job(self, harness: HookHarness) -> None:
        """The last try is a day after the first, and a result may live for minutes."""
        await self.ended(harness)
        hook = await self.taken(harness)
        await harness.book.later(replace(hook, tries=1, first_try_at=harness.now()), 5.0, self.tried(harness), BODY)
        await harness.forget_result("a")
        await harness.forget_job("a")
        await harness.pass_time(5.1)

        again = await self.taken(harness)

        assert (again.url, again.tenant, again.kept) == (URL, "t", True)
        assert await harness.book.body_of("a") == BODY

    async def test_a_webhook_whose_job_is_gone_before_its_end_is_forgotten(self, harness: HookHarness) -> None:
        await harness.accept(record("a", harness.now()))
        await harness.forget_job("a")
        await harness.pass_time(1.0)

        assert list(await harness.book.due(10, LEASE_S)) == []
        assert await harness.book.log_of("a") is None

    # ------------------------------------------------------------ later

    async def test_a_try_is_put_off_for_as_long_as_was_said(self, harness: HookHarness) -> None:
        await self.ended(harness)
        hook, at = await self.taken(harness), harness.now()
        await harness.book.later(replace(hook, tries=1, first_try_at=at), 300.0, self.tried(harness), BODY)

        await harness.pass_time(299.0)
        await harness.other.hasten(["a"])
        assert list(await harness.other.due(10, LEASE_S)) == []
        await harness.pass_time(1.1)
        again = await self.taken(harness, harness.other)

        assert (again.tries, again.kept) == (1, True)
        assert again.first_try_at == pytest.approx(at, abs=0.01)
        assert await harness.other.body_of("a") == BODY

    async def test_what_was_kept_once_stays(self, harness: HookHarness) -> None:
        await self.ended(harness)
        hook = await self.taken(harness)
        assert await harness.book.body_of("a") is None
        await harness.book.later(hook, 0.0, None, BODY)
        await harness.book.later(await self.taken(harness), 0.0)

        assert (await self.taken(harness)).kept
        assert await harness.book.body_of("a") == BODY

    async def test_giving_back_at_once_is_no_try(self, harness: HookHarness) -> None:
        await self.ended(harness)
        await harness.book.later(await self.taken(harness), 0.0)

        again = await self.taken(harness, harness.other)
        log = await harness.book.log_of("a")

        assert again.tries == 0
        assert log is not None
        assert list(log.tries) == []

    async def test_what_is_said_twice_is_one_try(self, harness: HookHarness) -> None:
        """The answer to the first time was lost."""
        await self.ended(harness)
        hook = replace(await self.taken(harness), tries=1, first_try_at=harness.now())
        first = self.tried(harness, 503)
        for _ in range(2):
            await harness.book.later(hook, 0.0, first, BODY)
        again = await self.taken(harness)
        last = HookTry(at=first.at + 1, status_code=503)
        for _ in range(2):
            await harness.book.over(again, "failed", last)

        log = await harness.book.log_of("a")
        assert log is not None
        assert list(log.tries) == [first, last]

    async def test_a_late_holder_does_not_move_what_went_to_another(self, harness: HookHarness) -> None:
        await self.ended(harness)
        late = await self.taken(harness)
        await harness.pass_time(LEASE_S + 0.1)
        hook = await self.taken(harness, harness.other)

        await harness.book.later(replace(late, tries=4), 0.0, self.tried(harness))
        await harness.book.over(late, "failed", self.tried(harness))

        assert list(await harness.book.due(10, LEASE_S)) == []
        await harness.other.later(hook, 0.0)
        assert (await self.taken(harness)).tries == 0

    # ------------------------------------------------------------ over

    @pytest.mark.parametrize("end", ["delivered", "failed", "disabled"])
    async def test_what_is_over_is_not_handed_out(self, harness: HookHarness, end: HookEnd) -> None:
        await self.ended(harness)
        await harness.book.over(await self.taken(harness), end, self.tried(harness, 200), BODY)
        await harness.pass_time(HOOK_KEPT_S - 10)
        await harness.book.hasten(["a"])

        assert list(await harness.book.due(10, LEASE_S)) == []
        log = await harness.book.log_of("a")
        assert log is not None
        assert (log.state, len(log.tries), log.next_try_at) == (end, 1, None)
        assert await harness.book.body_of("a") == (None if end == "delivered" else BODY)

    async def test_what_is_delivered_at_last_leaves_no_body(self, harness: HookHarness) -> None:
        await self.ended(harness)
        await harness.book.later(await self.taken(harness), 0.0, self.tried(harness), BODY)
        await harness.book.over(await self.taken(harness), "delivered", self.tried(harness, 200))

        assert await harness.book.body_of("a") is None

    async def test_accepting_a_job_again_does_not_send_it_again(self, harness: HookHarness) -> None:
        """An idempotency key's second call may write the same record down once more."""
        known = record("a", harness.now())
        await harness.accept(known)
        await harness.finish("a")
        await harness.book.over(await self.taken(harness), "delivered", self.tried(harness, 200))

        await harness.accept(known)

        assert list(await harness.book.due(10, LEASE_S)) == []

    async def test_what_a_late_holder_has_delivered_is_delivered(self, harness: HookHarness) -> None:
        await self.ended(harness)
        late = await self.taken(harness)
        await harness.pass_time(LEASE_S + 0.1)
        hook = await self.taken(harness, harness.other)

        await harness.book.over(late, "delivered", self.tried(harness, 200))
        await harness.other.later(hook, 0.0, self.tried(harness))
        await harness.other.over(hook, "failed", self.tried(harness))

        log = await harness.book.log_of("a")
        assert log is not None
        assert log.state == "delivered"
        assert list(await harness.book.due(10, LEASE_S)) == []

    async def test_what_is_over_is_forgotten_after_three_days(self, harness: HookHarness) -> None:
        await self.ended(harness)
        await harness.book.over(await self.taken(harness), "failed", self.tried(harness), BODY)
        await harness.forget_result("a")
        await harness.forget_job("a")

        await harness.pass_time(HOOK_KEPT_S + 1)

        assert await harness.book.log_of("a") is None
        assert await harness.book.body_of("a") is None
        assert not await harness.book.replay("a")

    # ------------------------------------------------------------ the log

    async def test_there_is_a_log_from_the_beginning(self, harness: HookHarness) -> None:
        await harness.accept(record("a", harness.now()))

        log = await harness.book.log_of("a")

        assert log is not None
        assert (log.tenant, log.url, log.state, list(log.tries), log.next_try_at) == ("t", URL, "waiting", [], None)
        assert await harness.book.log_of("unknown") is None

    async def test_the_log_has_the_last_tries_oldest_first_and_the_next(self, harness: HookHarness) -> None:
        await self.ended(harness)
        for number in range(MOST_TRIES_LOGGED + 3):
            await harness.pass_time(1.05)
            hook = await self.taken(harness)
            await harness.book.later(hook, 1.0, HookTry(at=float(number), status_code=None, detail=f"ü {number}"))

        log = await harness.book.log_of("a")

        assert log is not None
        assert [tried.at for tried in log.tries] == [float(number) for number in range(3, MOST_TRIES_LOGGED + 3)]
        assert log.tries[-1] == HookTry(at=22.0, status_code=None, detail="ü 22")
        assert log.next_try_at == pytest.approx(harness.now() + 1.0, abs=0.5)

    async def test_what_is_being_sent_has_no_next_try(self, harness: HookHarness) -> None:
        await self.ended(harness)
        await self.taken(harness)

        log = await harness.book.log_of("a")

        assert log is not None
        assert (log.state, log.next_try_at) == ("waiting", None)

    async def test_the_webhook_of_another_queue_is_not_seen(self, harness: HookHarness) -> None:
        if harness.elsewhere is None:
            return
        await harness.accept(record("early", harness.now()))
        await self.ended(harness)
        await harness.book.over(await self.taken(harness), "failed", self.tried(harness))

        assert list(await harness.elsewhere.due(10, LEASE_S)) == []
        assert await harness.elsewhere.log_of("a") is None
        assert await harness.elsewhere.log_of("early") is None
        assert not await harness.elsewhere.replay("a")

    # ------------------------------------------------------------ replay

    @pytest.mark.parametrize("end", ["delivered", "failed", "disabled"])
    async def test_a_replay_has_all_its_tries_before_it(self, harness: HookHarness, end: HookEnd) -> None:
        await self.ended(harness)
        hook = replace(await self.taken(harness), tries=5, first_try_at=harness.now())
        await harness.book.over(hook, end, self.tried(harness), BODY)

        assert await harness.other.replay("a")

        again = await self.taken(harness)
        assert (again.tries, again.first_try_at, again.kept) == (0, None, end != "delivered")
        log = await harness.book.log_of("a")
        assert log is not None
        assert (log.state, len(log.tries)) == ("waiting", 1)

    async def test_a_failed_one_is_replayed_although_its_result_is_gone(self, harness: HookHarness) -> None:
        await self.ended(harness)
        await harness.book.over(await self.taken(harness), "failed", self.tried(harness), BODY)
        await harness.forget_result("a")
        await harness.forget_job("a")

        assert await harness.book.replay("a")
        assert (await self.taken(harness)).kept

    async def test_a_delivered_one_is_replayed_only_while_its_result_is_there(self, harness: HookHarness) -> None:
        await self.ended(harness)
        await harness.book.over(await self.taken(harness), "delivered", self.tried(harness, 200))
        await harness.forget_result("a")

        assert not await harness.book.replay("a")
        log = await harness.book.log_of("a")
        assert log is not None
        assert log.state == "delivered"

    async def test_a_waiting_one_is_replayed_at_once(self, harness: HookHarness) -> None:
        await self.ended(harness)
        hook = replace(await self.taken(harness), tries=3, first_try_at=harness.now())
        await harness.book.later(hook, 3600.0, self.tried(harness), BODY)

        assert await harness.book.replay("a")

        again = await self.taken(harness)
        assert (again.tries, again.first_try_at) == (0, None)

    async def test_who_held_it_before_a_replay_does_not_count_its_tries(self, harness: HookHarness) -> None:
        await self.ended(harness)
        late = await self.taken(harness)
        await harness.pass_time(LEASE_S + 0.1)
        assert await harness.book.replay("a")

        await harness.book.later(replace(late, tries=4), 3600.0, self.tried(harness))

        assert (await self.taken(harness)).tries == 0

    async def test_one_that_is_being_sent_is_not_sent_twice_by_a_replay(self, harness: HookHarness) -> None:
        await self.ended(harness)
        await self.taken(harness)

        assert await harness.book.replay("a")

        assert list(await harness.other.due(10, LEASE_S)) == []

    async def test_there_is_nothing_to_replay_before_the_end(self, harness: HookHarness) -> None:
        await harness.accept(record("a", harness.now()))

        assert not await harness.book.replay("a")
        assert not await harness.book.replay("unknown")
