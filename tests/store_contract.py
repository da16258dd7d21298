"""What every result store and its outbox promise, as tests: `docs/design/delivery.md`, sections 1 and 2, rule by rule.

A store's own test file brings a harness and one fixture. A `token` is one arrival of one message.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import pytest

from inference_worker.disposition import Token
from inference_worker.messages import KnownReply, Reply, encode_reply
from inference_worker.ports import (
    AlreadyAnswered,
    BelowFloor,
    Claim,
    Claimed,
    ClaimLost,
    Outbox,
    Renewed,
    ResultStore,
    RunningElsewhere,
    Stored,
)

A, B, C = Token("token-a"), Token("token-b"), Token("token-c")


class StoreHarness(Protocol):
    """An empty store, and its clock."""

    store: ResultStore
    short_lived: ResultStore
    """The same store, which keeps results for `ttl_s`."""
    heeded: ResultStore
    """The same store, as one sees it who is told of what happens there."""
    outbox: Outbox
    other_outbox: Outbox
    """The same outbox as another replica sees it."""
    lease_s: float
    ttl_s: float

    def now(self) -> float: ...
    async def pass_time(self, seconds: float) -> None: ...
    async def leave_lying(self) -> None:
        """Let a minute pass over what was taken from the outbox."""


def reply(request_id: str = "a", **changes: Any) -> Reply:
    """A completed reply."""
    values: dict[str, Any] = {
        "request_id": request_id,
        "status": "completed",
        "status_code": 200,
        "attempt": 0,
        "replica_id": "r",
        "finished_at": 1.0,
        "result": b'{"ok":true}',
    }
    return Reply(**(values | changes))


def failure(request_id: str = "a", **changes: Any) -> Reply:
    """A failed reply."""
    values: dict[str, Any] = {"status": "failed", "status_code": 500, "result": None, "error": "no"}
    return reply(request_id, **(values | {"error_code": "retries_exhausted"} | changes))


class StoreContract:
    """First result wins; one live claim at a time; facts about copies are kept."""

    async def claim(self, harness: StoreHarness, token: Token, attempt: int = 0, request_id: str = "a") -> Claim:
        return await harness.store.claim(request_id, attempt, token, harness.now() + 600)

    async def lapse(self, harness: StoreHarness) -> None:
        await harness.pass_time(harness.lease_s * 1.2)

    # ------------------------------------------------------------ claim

    async def test_a_new_request_is_claimed(self, harness: StoreHarness) -> None:
        assert await self.claim(harness, A) == Claimed(starts=1)

    async def test_a_repeated_claim_is_the_same_claim(self, harness: StoreHarness) -> None:
        """What was sent once more after an answer was lost is no second start."""
        await self.claim(harness, A)

        assert await self.claim(harness, A) == Claimed(starts=1)
        await self.lapse(harness)
        assert await self.claim(harness, A) == Claimed(starts=1)

    @pytest.mark.parametrize("attempt", [0, 1, 2])
    async def test_nobody_takes_over_a_live_claim(self, harness: StoreHarness, attempt: int) -> None:
        await self.claim(harness, A, 1)

        claim = await self.claim(harness, B, attempt)

        assert isinstance(claim, RunningElsewhere)
        assert 0 < claim.left_s <= harness.lease_s
        assert await harness.store.renew("a", A) == Renewed()

    async def test_a_lapsed_claim_goes_to_the_next_and_counts_as_a_start(self, harness: StoreHarness) -> None:
        await self.claim(harness, A)
        await self.lapse(harness)

        assert await self.claim(harness, B) == Claimed(starts=2)
        await self.lapse(harness)
        assert await self.claim(harness, C) == Claimed(starts=3)

    async def test_claims_on_two_requests_are_two(self, harness: StoreHarness) -> None:
        await self.claim(harness, A, request_id="a")

        assert await self.claim(harness, B, request_id="b") == Claimed(starts=1)

    @pytest.mark.parametrize(
        "request_id",
        ["{b}", "x{b}y", "a}b", "{}", "{", "}{x}", "ü", "a b", "*", "x" * 512, "infer_resp:a"],
    )
    async def test_any_usable_id_is_a_request_of_its_own(self, harness: StoreHarness, request_id: str) -> None:
        await self.claim(harness, A, request_id="b")

        assert await self.claim(harness, A, request_id=request_id) == Claimed(starts=1)
        assert await harness.store.write(failure(request_id), None, A) == Stored()
        assert await harness.store.read(request_id) == encode_reply(failure(request_id))
        assert isinstance(await self.claim(harness, A, request_id=request_id), AlreadyAnswered)
        assert await harness.store.read("b") is None

    # ------------------------------------------------------------ floor

    @pytest.mark.parametrize(
        ("attempt", "claim"),
        [
            pytest.param(1, BelowFloor(), id="a lower attempt is history"),
            pytest.param(2, Claimed(starts=1), id="the attempt of the floor runs"),
            pytest.param(3, Claimed(starts=1), id="a higher attempt runs"),
        ],
    )
    async def test_the_floor_is_the_lowest_attempt_that_runs(
        self, harness: StoreHarness, attempt: int, claim: Claim
    ) -> None:
        await self.claim(harness, A, 1)
        await harness.store.release("a", A, 2)

        assert await self.claim(harness, B, attempt) == claim

    async def test_an_attempt_below_the_floor_need_not_wait_for_a_runner(self, harness: StoreHarness) -> None:
        await self.claim(harness, A)
        await harness.store.release("a", A, 1)
        await self.claim(harness, B, 1)

        assert await self.claim(harness, C, 0) == BelowFloor()

    async def test_a_floor_never_sinks(self, harness: StoreHarness) -> None:
        await harness.store.release("a", A, 3)
        await harness.store.release("a", B, 1)

        assert await self.claim(harness, C, 2) == BelowFloor()

    async def test_a_floor_is_set_by_whoever_knows_it(self, harness: StoreHarness) -> None:
        """It states a fact about the broker, not about the claim; the claim stays another's."""
        await self.claim(harness, A, 1)

        await harness.store.release("a", B, 1)

        assert await self.claim(harness, C, 0) == BelowFloor()
        assert isinstance(await self.claim(harness, C, 1), RunningElsewhere)

    async def test_a_floor_outlives_the_claims_after_it(self, harness: StoreHarness) -> None:
        await harness.store.release("a", A, 2)
        await self.claim(harness, B, 2)
        await self.lapse(harness)
        await harness.store.renew("a", C)
        await harness.store.release("a", C)

        assert await self.claim(harness, A, 1) == BelowFloor()

    # ------------------------------------------------------------ renew

    async def test_a_renewed_claim_lives_for_another_lease(self, harness: StoreHarness) -> None:
        await self.claim(harness, A)
        for _ in range(3):
            await harness.pass_time(harness.lease_s * 0.6)
            assert await harness.store.renew("a", A) == Renewed()

        assert isinstance(await self.claim(harness, B), RunningElsewhere)

    async def test_a_late_renewal_takes_back_what_nobody_took(self, harness: StoreHarness) -> None:
        await self.claim(harness, A)
        await self.lapse(harness)

        assert await harness.store.renew("a", A) == Renewed()
        assert isinstance(await self.claim(harness, B), RunningElsewhere)

    async def test_a_renewal_takes_what_a_dead_runner_left(self, harness: StoreHarness) -> None:
        """A wakes after B, which took over, has died; its call is as good as any."""
        await self.claim(harness, A)
        await self.lapse(harness)
        await self.claim(harness, B)
        await self.lapse(harness)

        assert await harness.store.renew("a", A) == Renewed()
        assert await harness.store.renew("a", B) == ClaimLost()

    async def test_a_claim_that_another_holds_is_lost(self, harness: StoreHarness) -> None:
        await self.claim(harness, A)
        await self.lapse(harness)
        await self.claim(harness, B)

        assert await harness.store.renew("a", A) == ClaimLost()
        assert await harness.store.renew("a", A) == ClaimLost()
        assert await harness.store.renew("a", B) == Renewed()

    async def test_a_renewal_without_a_claim_makes_one(self, harness: StoreHarness) -> None:
        assert await harness.store.renew("a", A) == Renewed()
        assert isinstance(await self.claim(harness, B), RunningElsewhere)

    async def test_a_renewal_is_no_start(self, harness: StoreHarness) -> None:
        await self.claim(harness, A)
        await harness.store.renew("a", A)
        await self.lapse(harness)

        assert await self.claim(harness, B) == Claimed(starts=2)

    # ------------------------------------------------------------ release

    async def test_a_released_claim_is_free_and_its_start_does_not_count(self, harness: StoreHarness) -> None:
        await self.claim(harness, A)
        await harness.store.release("a", A)

        assert await self.claim(harness, B) == Claimed(starts=1)

    async def test_a_repeated_release_takes_back_one_start_only(self, harness: StoreHarness) -> None:
        await self.claim(harness, A)
        await self.lapse(harness)
        await self.claim(harness, B)
        await harness.store.release("a", B)
        await harness.store.release("a", B)

        assert await self.claim(harness, C) == Claimed(starts=2)

    async def test_an_attempt_that_ended_forgives_the_crashes_before_it(self, harness: StoreHarness) -> None:
        await self.claim(harness, A)
        await self.lapse(harness)
        await self.claim(harness, B)
        await harness.store.release("a", B, 1)

        assert await self.claim(harness, C, 1) == Claimed(starts=1)

    @pytest.mark.parametrize("floor", [None, 1])
    async def test_a_late_release_does_not_hit_the_next_runner(self, harness: StoreHarness, floor: int | None) -> None:
        await self.claim(harness, A)
        await self.lapse(harness)
        await self.claim(harness, B, 1)

        await harness.store.release("a", A, floor)

        assert isinstance(await self.claim(harness, C, 1), RunningElsewhere)
        await self.lapse(harness)
        assert await self.claim(harness, C, 1) == Claimed(starts=3)

    async def test_releasing_what_is_not_there_is_nothing(self, harness: StoreHarness) -> None:
        await harness.store.release("a", A)

        assert await self.claim(harness, B) == Claimed(starts=1)

    # ------------------------------------------------------------ write

    async def test_a_result_is_read_as_it_was_written(self, harness: StoreHarness) -> None:
        await self.claim(harness, A)

        assert await harness.store.write(reply(), None, A) == Stored()
        assert await harness.store.read("a") == encode_reply(reply())

    async def test_the_first_result_wins(self, harness: StoreHarness) -> None:
        await harness.store.write(failure(status_code=504), None, A)

        written = await harness.store.write(reply(), b"{}", B)

        assert written == AlreadyAnswered(
            reply=KnownReply(status="failed", status_code=504, attempt=0, error_code="retries_exhausted")
        )
        assert await harness.store.read("a") == encode_reply(failure(status_code=504))
        assert await harness.outbox.size() == 0

    async def test_a_repeated_write_stores_and_bills_once(self, harness: StoreHarness) -> None:
        await self.claim(harness, A)
        await harness.store.write(reply(), b'{"id":"a"}', A)

        again = await harness.store.write(reply(), b'{"id":"a"}', A)

        assert isinstance(again, AlreadyAnswered)
        assert again.reply.status == "completed"
        assert await harness.outbox.size() == 1

    @pytest.mark.parametrize(
        "ask",
        [
            pytest.param(lambda store: store.claim("a", 5, B, 2e9), id="claim"),
            pytest.param(lambda store: store.claim("a", 0, A, 2e9), id="claim by its writer"),
            pytest.param(lambda store: store.renew("a", A), id="renew"),
            pytest.param(lambda store: store.write(reply(), None, A), id="write"),
            pytest.param(lambda store: store.cancel(failure()), id="cancel"),
        ],
    )
    @pytest.mark.parametrize(
        ("written", "known"),
        [
            pytest.param(
                failure(attempt=2, error_code="poison"),
                KnownReply(status="failed", status_code=500, attempt=2, error_code="poison"),
                id="a failed one, with what decides over its message",
            ),
            pytest.param(reply(), None, id="a completed one, however long it is"),
        ],
    )
    async def test_an_answer_is_told_to_whoever_asks(
        self,
        harness: StoreHarness,
        ask: Callable[[ResultStore], Awaitable[object]],
        written: Reply,
        known: KnownReply | None,
    ) -> None:
        await harness.store.release("a", B, 3)  # A floor says less than a result.
        await harness.store.write(written, None, A)

        answer = await ask(harness.store)

        assert isinstance(answer, AlreadyAnswered)
        assert known is None or answer.reply == known
        assert answer.reply.status == written.status
        assert await harness.store.read("a") == encode_reply(written)

    async def test_a_late_success_counts_whoever_has_the_claim(self, harness: StoreHarness) -> None:
        await self.claim(harness, A)
        await self.lapse(harness)
        await self.claim(harness, B)

        assert await harness.store.write(reply(), b"{}", A) == Stored()
        assert isinstance(await harness.store.renew("a", B), AlreadyAnswered)
        assert await harness.outbox.size() == 1

    async def test_a_late_failure_does_not_count_while_another_runs(self, harness: StoreHarness) -> None:
        await self.claim(harness, A)
        await self.lapse(harness)
        await self.claim(harness, B)

        written = await harness.store.write(failure(), None, A)

        assert isinstance(written, RunningElsewhere)
        assert 0 < written.left_s <= harness.lease_s
        assert await harness.store.read("a") is None
        assert await harness.store.renew("a", B) == Renewed()

    @pytest.mark.parametrize("claimed", [True, False], ids=["claimed and lapsed", "never claimed"])
    async def test_a_failure_counts_while_nobody_runs(self, harness: StoreHarness, claimed: bool) -> None:
        if claimed:
            await self.claim(harness, A)
            await self.lapse(harness)

        assert await harness.store.write(failure(), None, B) == Stored()

    async def test_a_failure_by_the_holder_counts(self, harness: StoreHarness) -> None:
        await self.claim(harness, A)

        assert await harness.store.write(failure(), None, A) == Stored()

    async def test_a_result_ends_the_claim(self, harness: StoreHarness) -> None:
        await self.claim(harness, A)
        await harness.store.write(reply(), None, A)

        assert not (await harness.store.progress("a")).running

    async def test_a_release_after_the_result_changes_nothing(self, harness: StoreHarness) -> None:
        await harness.short_lived.write(reply(), None, A)

        await harness.store.release("a", A, 7)

        assert isinstance(await self.claim(harness, B), AlreadyAnswered)
        await harness.pass_time(harness.ttl_s * 1.2)
        assert await self.claim(harness, B) == Claimed(starts=1)

    async def test_a_result_that_is_over_is_forgotten(self, harness: StoreHarness) -> None:
        await harness.short_lived.write(failure(), None, A)
        assert await harness.store.read("a") is not None

        await harness.pass_time(harness.ttl_s * 1.2)

        assert await harness.store.read("a") is None
        assert await self.claim(harness, B) == Claimed(starts=1)
        assert await harness.store.write(reply(), None, B) == Stored()

    # ------------------------------------------------------------ cancel

    async def test_cancelling_passes_the_runners_claim(self, harness: StoreHarness) -> None:
        await self.claim(harness, A)

        assert await harness.store.cancel(failure(status_code=499, error_code="cancelled")) == Stored()
        renewed = await harness.store.renew("a", A)
        assert isinstance(renewed, AlreadyAnswered)
        assert renewed.reply.error_code == "cancelled"
        assert isinstance(await harness.store.write(reply(), b"{}", A), AlreadyAnswered)
        assert await harness.outbox.size() == 0

    async def test_cancelling_comes_too_late_for_an_answer(self, harness: StoreHarness) -> None:
        await harness.store.write(reply(), None, A)

        cancelled = await harness.store.cancel(failure(error_code="cancelled"))

        assert isinstance(cancelled, AlreadyAnswered)
        assert cancelled.reply.status == "completed"

    # ------------------------------------------------------------ looking

    async def test_a_request_runs_while_its_lease_lives(self, harness: StoreHarness) -> None:
        assert not (await harness.store.progress("a")).running
        await self.claim(harness, A)
        assert (await harness.store.progress("a")).running
        await harness.store.release("a", A)
        assert not (await harness.store.progress("a")).running
        await self.claim(harness, B)
        await self.lapse(harness)
        assert not (await harness.store.progress("a")).running

    async def test_the_attempts_behind_a_request_are_told_while_it_runs_and_between_two_runs(
        self, harness: StoreHarness
    ) -> None:
        """How a caller sees that it is being tried again."""
        await self.claim(harness, A)
        await harness.store.release("a", A, 1)
        between = await harness.store.progress("a")
        await self.claim(harness, B, 1)
        again = await harness.store.progress("a")

        assert (between.running, between.attempts) == (False, 1)
        assert (again.running, again.attempts) == (True, 1)

    async def test_what_is_stored_is_not_waited_for(self, harness: StoreHarness) -> None:
        await harness.store.write(reply(), None, A)

        assert await harness.store.wait("a", 60) == encode_reply(reply())

    async def test_whoever_waits_is_told(self, harness: StoreHarness) -> None:
        waiting = [asyncio.create_task(harness.store.wait("a", 60)) for _ in range(2)]
        await harness.pass_time(0.05)
        await harness.store.write(reply(), None, A)

        assert await asyncio.gather(*waiting) == [encode_reply(reply())] * 2

    async def test_waiting_ends_with_its_time(self, harness: StoreHarness) -> None:
        assert await harness.store.wait("a", 0.1) is None
        assert await harness.store.wait("a", 0) is None

    async def test_nothing_is_read_where_nothing_is(self, harness: StoreHarness) -> None:
        assert await harness.store.read("a") is None

    async def test_a_cancellation_is_told_to_all_who_heed_them(self, harness: StoreHarness) -> None:
        """A hint, so it may be told more than once; and only a cancellation is one."""
        until, told, other = asyncio.Event(), asyncio.Event(), list[str]()

        def hear(request_id: str) -> None:
            if request_id == "a":
                told.set()
            other.append(request_id)

        heeding = asyncio.create_task(harness.heeded.cancellations(until, hear))
        async with asyncio.timeout(10):
            while not told.is_set():  # Where it goes over a connection, that may not stand yet.
                await harness.store.cancel(failure("a", error_code="cancelled"))
                await harness.pass_time(0.05)
        await harness.store.write(reply("b"), None, A)
        await harness.pass_time(0.1)

        assert set(other) == {"a"}
        until.set()
        await heeding

    async def test_a_store_that_takes_writes_says_so(self, harness: StoreHarness) -> None:
        await harness.store.probe()

    # ------------------------------------------------------------ outbox

    async def fill(self, harness: StoreHarness, count: int) -> list[bytes]:
        events = [json.dumps({"id": f"r-{n}"}).encode() for n in range(count)]
        for n, event in enumerate(events):
            await harness.store.write(reply(f"r-{n}"), event, A)
        return events

    async def test_an_empty_outbox_has_nothing(self, harness: StoreHarness) -> None:
        assert list(await harness.outbox.take(10)) == []
        assert await harness.outbox.size() == 0

    async def test_events_come_in_their_order_up_to_the_limit(self, harness: StoreHarness) -> None:
        events = await self.fill(harness, 3)

        first = await harness.outbox.take(2)
        second = await harness.outbox.take(2)

        assert [entry.event for entry in (*first, *second)] == events

    async def test_what_one_has_taken_no_other_gets(self, harness: StoreHarness) -> None:
        await self.fill(harness, 2)
        await harness.outbox.take(1)

        assert len(await harness.other_outbox.take(10)) == 1
        assert await harness.outbox.size() == 2

    async def test_what_was_left_lying_goes_to_another(self, harness: StoreHarness) -> None:
        """Taken and not removed: its sender has died, or could not send it."""
        events = await self.fill(harness, 2)
        await harness.outbox.take(2)

        await harness.leave_lying()

        assert [entry.event for entry in await harness.other_outbox.take(10)] == events
        assert list(await harness.outbox.take(10)) == []

    async def test_what_was_sent_is_forgotten(self, harness: StoreHarness) -> None:
        await self.fill(harness, 2)
        entries = await harness.outbox.take(1)

        for _ in range(2):  # The answer may get lost.
            await harness.outbox.sent(entries)

        assert await harness.outbox.size() == 1
        await harness.leave_lying()
        assert len(await harness.outbox.take(10)) == 1

    async def test_sending_nothing_forgets_nothing(self, harness: StoreHarness) -> None:
        await self.fill(harness, 1)

        await harness.outbox.sent([])

        assert await harness.outbox.size() == 1

    async def test_what_is_refused_blocks_nobody(self, harness: StoreHarness) -> None:
        events = await self.fill(harness, 2)
        first, second = await harness.outbox.take(2)

        await harness.outbox.refused(first, "HTTP 400: no")

        assert await harness.outbox.size() == 1
        await harness.leave_lying()
        assert [entry.event for entry in await harness.outbox.take(10)] == events[1:]
        assert second.event == events[1]
