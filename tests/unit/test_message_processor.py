"""From a delivery to an outcome: the steps of `docs/design/delivery.md`, section 3, one by one."""

import asyncio
from collections.abc import Callable

import pytest

from inference_worker.disposition import (
    Answered,
    Concluded,
    Failed,
    Fault,
    Interrupted,
    Malformed,
    NotStored,
    Outcome,
    Superseded,
    Token,
)
from inference_worker.errors import BadResponse, ModelCut, ModelFailure, ModelGone, ModelSlow
from inference_worker.message_processor import HEALTH_LOOK_S, LONGEST_WAIT_S, Job
from inference_worker.messages import Usage
from inference_worker.ports import Answer, Claimed, ClaimLost, RunningElsewhere
from tests.store_contract import failure, reply
from tests.unit.worker_kit import EPOCH, GOOD, FakeModel, Site, Worker, body

OTHER = Token("elsewhere")
FAR = EPOCH + 10_000.0


def loop_time() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture
async def site() -> Site:
    return Site()


def at(seconds: float, do: object) -> None:
    """Have something done at a moment of virtual time."""
    assert callable(do)
    asyncio.get_running_loop().call_later(seconds, do)


async def hold_elsewhere(site: Site, request_id: str = "a", *, for_s: float, attempt: int = 0) -> "asyncio.Task[None]":
    """Another process runs the request, and renews for `for_s` seconds."""
    claimed = await site.store.claim(request_id, attempt, OTHER, FAR)
    assert isinstance(claimed, Claimed)

    async def renewing() -> None:
        until = loop_time() + for_s
        while loop_time() + site.lease_s / 3 <= until:
            await asyncio.sleep(site.lease_s / 3)
            await site.store.renew(request_id, OTHER)

    return asyncio.create_task(renewing())


async def processed(worker: Worker, job: Job) -> Outcome:
    """Process a delivery and let go of it."""
    try:
        return await worker.processor.process(job)
    finally:
        worker.processor.forget(job)


# ---------------------------------------------------------------- decode


async def test_a_good_answer_is_a_result_with_its_usage_and_its_times(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=2.0))
    sent = body()
    await asyncio.sleep(3.0)

    outcome = await processed(worker, worker.job(sent, attempts=1))

    assert isinstance(outcome, Concluded)
    assert outcome.reply.status == "completed"
    assert outcome.reply.result == GOOD
    assert outcome.reply.attempt == 1
    assert outcome.reply.replica_id == worker.name
    assert outcome.reply.received_at == EPOCH
    assert outcome.reply.finished_at == EPOCH + 5.0
    assert outcome.reply.timings.queue_s == 3.0
    assert outcome.reply.timings.model_s == 2.0
    assert outcome.usage == Usage(input_tokens=3, output_tokens=4, total_tokens=7)
    assert outcome.usage_event == b'{"id": "a", "tokens": 7, "attempt": 1}'


async def test_a_producer_whose_clock_is_ahead_has_waited_for_nothing(site: Site) -> None:
    worker = Worker(site, FakeModel())
    sent = body()
    worker.processor._now = lambda: EPOCH - 5.0

    outcome = await processed(worker, worker.job(sent))

    assert isinstance(outcome, Concluded)
    assert outcome.reply.timings.queue_s == 0.0


@pytest.mark.parametrize(
    ("sent", "message_id", "answered_as"),
    [
        pytest.param(b'{"request_id":"a"}', "m", "a", id="under its id"),
        pytest.param(b"no", "m", "m", id="else under the message id"),
        pytest.param(b"no", None, None, id="else not at all"),
    ],
)
async def test_what_is_no_request_is_answered(
    site: Site, sent: bytes, message_id: str | None, answered_as: str | None
) -> None:
    worker = Worker(site, FakeModel())

    outcome = await processed(worker, worker.job(sent, message_id=message_id))

    assert isinstance(outcome, Malformed)
    assert (outcome.reply.request_id if outcome.reply is not None else None) == answered_as
    if outcome.reply is not None:
        assert (outcome.reply.status_code, outcome.reply.error_code) == (400, "invalid_request")
        assert outcome.reply.error == outcome.reason
    assert worker.store.asked == []


# ---------------------------------------------------------------- join


async def test_the_same_request_is_called_once_in_one_process(site: Site) -> None:
    """The second waits for the first's end, then asks the store."""
    worker = Worker(site, FakeModel(takes_s=20.0))
    first, second = worker.job(body()), worker.job(body())
    running = asyncio.create_task(worker.processor.process(first))
    await worker.model.begun.wait()
    joined = asyncio.create_task(processed(worker, second))

    outcome = await running
    assert isinstance(outcome, Concluded)
    assert not joined.done()
    await site.store.write(outcome.reply, None, outcome.hold.token)
    worker.processor.forget(first)

    assert isinstance(await joined, Answered)
    assert worker.model.calls == ["a"]
    assert worker.gauge("joined_total") == 1
    assert loop_time() == 20.0


async def test_of_several_that_joined_one_runs_next_and_the_others_join_it(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=10.0))
    jobs = [worker.job(body()) for _ in range(3)]
    tasks = [asyncio.create_task(processed(worker, job)) for job in jobs]

    outcomes = await asyncio.gather(*tasks)  # None is stored, so that each runs in its turn.

    assert all(isinstance(outcome, Concluded) for outcome in outcomes)
    assert worker.model.most_at_once == 1


@pytest.mark.parametrize("why", ["lost", "stopped", "ten minutes"])
async def test_what_joined_does_not_wait_longer_than_it_may(site: Site, why: str) -> None:
    worker = Worker(site, FakeModel(takes_s=LONGEST_WAIT_S * 2), infer_timeout_s=LONGEST_WAIT_S * 3)
    first, second = worker.job(body(timeout_s=9000)), worker.job(body(timeout_s=9000))
    running = asyncio.create_task(processed(worker, first))
    await worker.model.begun.wait()
    if why == "lost":
        at(5.0, second.delivery.lost.set)
    elif why == "stopped":
        at(5.0, worker.processor.stop)

    outcome = await processed(worker, second)

    assert isinstance(outcome, Interrupted)
    assert outcome.hold is None
    assert loop_time() == (LONGEST_WAIT_S if why == "ten minutes" else 5.0)
    worker.processor.interrupt()
    assert isinstance(await running, Interrupted)


# ---------------------------------------------------------------- deadline


async def test_what_came_too_late_is_answered_without_a_claim(site: Site) -> None:
    worker = Worker(site, FakeModel())
    sent = body(timeout_s=10.0)
    await asyncio.sleep(10.0)

    outcome = await processed(worker, worker.job(sent))

    assert isinstance(outcome, Concluded)
    assert (outcome.reply.status_code, outcome.reply.error_code) == (408, "expired")
    assert worker.model.calls == []
    assert worker.store.count("claim") == 0


async def test_a_deadline_that_passes_during_the_claim_is_too_late(site: Site) -> None:
    worker = Worker(site, FakeModel())
    worker.store.takes_s["claim"] = 3.0

    outcome = await processed(worker, worker.job(body(timeout_s=2.0)))

    assert isinstance(outcome, Concluded)
    assert (outcome.reply.status_code, outcome.reply.error_code) == (408, "expired")
    assert outcome.hold.token == Token("token-0")
    assert worker.model.calls == []


@pytest.mark.parametrize(
    ("timeout_s", "infer_timeout_s", "given_s"),
    [
        pytest.param(600.0, 120.0, 120.0, id="the time for a call"),
        pytest.param(50.0, 120.0, 50.0, id="no longer than to the deadline"),
    ],
)
async def test_a_call_is_given_its_time(site: Site, timeout_s: float, infer_timeout_s: float, given_s: float) -> None:
    worker = Worker(site, FakeModel(), infer_timeout_s=infer_timeout_s)

    await processed(worker, worker.job(body(timeout_s=timeout_s)))

    assert worker.model.timeouts_s == [given_s]


@pytest.mark.parametrize("timeout_s", [50.0, 120.0])
async def test_a_deadline_that_passes_during_the_call_is_a_failure_for_good(site: Site, timeout_s: float) -> None:
    worker = Worker(site, FakeModel(takes_s=timeout_s, failures=[ModelSlow("slow")]), infer_timeout_s=120.0)

    outcome = await processed(worker, worker.job(body(timeout_s=timeout_s)))

    assert isinstance(outcome, Concluded)
    assert (outcome.reply.status_code, outcome.reply.error_code) == (408, "deadline_exceeded")
    assert outcome.reply.timings.model_s == timeout_s


async def test_a_call_that_takes_its_whole_time_may_be_tried_again(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=120.0, failures=[ModelSlow("slow")]), infer_timeout_s=120.0)

    outcome = await processed(worker, worker.job(body(timeout_s=600.0), attempts=2))

    assert isinstance(outcome, Failed)
    assert outcome.fault is Fault.SLOW
    assert outcome.reply.error_code == "retries_exhausted"
    assert outcome.reply.error == "the model took too long, 3 times tried: slow"
    assert worker.model_health.asked_now == []


# ---------------------------------------------------------------- slots


async def test_no_more_calls_run_than_there_are_slots(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=10.0), slots=2)
    jobs = [worker.job(body(f"r-{n}")) for n in range(5)]

    await asyncio.gather(*(processed(worker, job) for job in jobs))

    assert worker.model.most_at_once == 2
    assert loop_time() == 30.0


@pytest.mark.parametrize("why", ["lost", "stopped", "ten minutes"])
async def test_a_message_without_a_slot_does_not_wait_longer_than_it_may(site: Site, why: str) -> None:
    worker = Worker(site, FakeModel(takes_s=2000.0), slots=1, infer_timeout_s=3000.0)
    first, second = worker.job(body("a", timeout_s=9000)), worker.job(body("b", timeout_s=9000))
    running = asyncio.create_task(processed(worker, first))
    await worker.model.begun.wait()
    if why == "lost":
        at(5.0, second.delivery.lost.set)
    elif why == "stopped":
        at(5.0, worker.processor.stop)

    outcome = await processed(worker, second)

    assert isinstance(outcome, Interrupted)
    assert loop_time() == (LONGEST_WAIT_S if why == "ten minutes" else 5.0)
    assert worker.store.count("claim") == 1
    worker.processor.interrupt()
    await running


async def test_a_message_that_waits_elsewhere_gives_its_slot_to_another(site: Site) -> None:
    """Else a neighbour's crash would idle this worker for a lease."""
    worker = Worker(site, FakeModel(takes_s=1.0), slots=1)
    renewing = await hold_elsewhere(site, "a", for_s=0.0)
    waiting = asyncio.create_task(processed(worker, worker.job(body("a"))))
    await asyncio.sleep(0.5)

    assert isinstance(await processed(worker, worker.job(body("b"))), Concluded)

    assert loop_time() < 5.0
    assert isinstance(await waiting, Concluded)
    await renewing


@pytest.mark.parametrize("why", ["lost", "stopped"])
async def test_a_message_that_may_not_begin_is_not_claimed(site: Site, why: str) -> None:
    worker = Worker(site, FakeModel())
    job = worker.job(body())
    job.delivery.lost.set() if why == "lost" else worker.processor.stop()

    outcome = await processed(worker, job)

    assert isinstance(outcome, Interrupted)
    assert worker.store.asked == []


# ---------------------------------------------------------------- claim


async def test_an_answer_that_is_there_is_not_made_again(site: Site) -> None:
    worker = Worker(site, FakeModel())
    await site.store.write(failure(error_code="poison", attempt=2), None, OTHER)

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Answered)
    assert (outcome.reply.error_code, outcome.reply.attempt) == ("poison", 2)
    assert worker.model.calls == []


async def test_an_attempt_whose_copy_is_confirmed_is_history(site: Site) -> None:
    worker = Worker(site, FakeModel())
    await site.store.release("a", OTHER, 1)

    assert await processed(worker, worker.job(body(), attempts=0)) == Superseded()
    assert worker.model.calls == []


@pytest.mark.parametrize(
    ("crashes", "poison"),
    [
        pytest.param(2, False, id="two deaths are forgiven"),
        pytest.param(3, True, id="three are not"),
    ],
)
async def test_a_request_that_killed_its_workers_is_not_run_again(site: Site, crashes: int, poison: bool) -> None:
    worker = Worker(site, FakeModel(), max_crashes=3)
    sent = body()
    for n in range(crashes):
        await site.store.claim("a", 0, Token(f"dead-{n}"), FAR)
        await asyncio.sleep(site.lease_s)

    outcome = await processed(worker, worker.job(sent))

    assert isinstance(outcome, Concluded)
    assert (outcome.reply.error_code == "poison") is poison
    assert (worker.model.calls == []) is poison
    if poison:
        assert outcome.reply.status_code == 500
        assert outcome.reply.error == "its workers died 3 times while running it"


async def test_every_arrival_has_a_token_of_its_own(site: Site) -> None:
    """One token for all runs of a process: a late release would hit the next run."""
    worker = Worker(site, FakeModel())
    tokens = set()
    for _ in range(3):
        outcome = await processed(worker, worker.job(body()))
        assert isinstance(outcome, Concluded)
        tokens.add(outcome.hold.token)
        await site.store.release("a", outcome.hold.token)

    assert len(tokens) == 3


# ---------------------------------------------------------------- running elsewhere


async def test_a_request_that_runs_elsewhere_waits_for_its_answer(site: Site) -> None:
    worker = Worker(site, FakeModel())
    sent = body()
    renewing = await hold_elsewhere(site, for_s=60.0)
    waiting = asyncio.create_task(processed(worker, worker.job(sent)))
    await asyncio.sleep(30.0)
    assert worker.gauge("claims_waiting") == 1
    await site.store.write(reply(), None, OTHER)

    outcome = await waiting

    assert isinstance(outcome, Answered)
    assert loop_time() <= 31.0
    assert worker.model.calls == []
    assert worker.gauge("claims_waiting") == 0
    await renewing


async def test_a_request_whose_runner_died_runs_once_the_lease_has_lapsed(site: Site) -> None:
    worker = Worker(site, FakeModel())
    renewing = await hold_elsewhere(site, for_s=0.0)

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Concluded)
    assert site.lease_s <= loop_time() < site.lease_s + 0.2
    assert worker.model.calls == ["a"]
    await renewing


@pytest.mark.parametrize("why", ["lost", "stopped", "ten minutes"])
async def test_a_message_waits_for_another_runner_for_ten_minutes_at_most(site: Site, why: str) -> None:
    """The broker's own limit for an acknowledgement is 30."""
    worker = Worker(site, FakeModel())
    job = worker.job(body(timeout_s=9000))
    renewing = await hold_elsewhere(site, for_s=1000.0)
    if why == "lost":
        at(4.5, job.delivery.lost.set)
    elif why == "stopped":
        at(4.5, worker.processor.stop)

    outcome = await processed(worker, job)

    assert isinstance(outcome, Interrupted)
    assert loop_time() == (600.0 if why == "ten minutes" else 4.5)
    renewing.cancel()


async def test_a_deadline_passes_also_while_another_runs(site: Site) -> None:
    worker = Worker(site, FakeModel())
    renewing = await hold_elsewhere(site, for_s=30.0)

    outcome = await processed(worker, worker.job(body(timeout_s=20.0)))

    assert isinstance(outcome, Concluded)
    assert outcome.reply.error_code == "expired"
    await renewing


@pytest.mark.parametrize("why", ["lost", "stopped", "ten minutes"])
async def test_an_expired_message_waits_for_another_runner_no_longer_than_any(site: Site, why: str) -> None:
    """Its 408 does not count while another runs; a stop must not wait for that one's end."""
    worker = Worker(site, FakeModel())
    sent = body(timeout_s=1.0)
    await asyncio.sleep(2.0)
    job = worker.job(sent)
    assert isinstance(await worker.processor.process(job), Concluded)
    if why == "lost":
        job.delivery.lost.set()
    elif why == "stopped":
        worker.processor.stop()
    else:
        await asyncio.sleep(LONGEST_WAIT_S)

    outcome = await processed(worker, job)  # The listener was told that it is busy.

    assert isinstance(outcome, Interrupted)


async def test_an_expired_message_that_comes_back_as_busy_is_concluded_anew(site: Site) -> None:
    worker = Worker(site, FakeModel())
    sent = body(timeout_s=1.0)
    await asyncio.sleep(2.0)
    job = worker.job(sent)
    first = await worker.processor.process(job)

    again = await processed(worker, job)

    assert isinstance(first, Concluded)
    assert isinstance(again, Concluded)
    assert again.reply.error_code == "expired"
    assert again.hold != first.hold


# ---------------------------------------------------------------- leases


async def test_a_lease_is_renewed_over_a_long_call(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=100.0))
    over = asyncio.Event()
    renewing = asyncio.create_task(worker.processor.renew_leases(over))
    calling = asyncio.create_task(processed(worker, worker.job(body())))
    for _ in range(9):
        await asyncio.sleep(11.0)
        claim = await site.store.claim("a", 0, OTHER, FAR)
        assert isinstance(claim, RunningElsewhere)

    assert isinstance(await calling, Concluded)
    over.set()
    await renewing
    assert worker.store.count("renew") in (19, 20)  # The last one falls together with the end.


async def test_nothing_is_renewed_for_what_only_waits(site: Site) -> None:
    worker = Worker(site, FakeModel())
    over = asyncio.Event()
    renewing = asyncio.create_task(worker.processor.renew_leases(over))
    elsewhere = await hold_elsewhere(site, for_s=30.0)

    await processed(worker, worker.job(body()))

    assert worker.store.count("renew") == 0
    over.set()
    await asyncio.gather(renewing, elsewhere)


async def test_a_call_is_closed_when_its_answer_is_there_already(site: Site) -> None:
    """A cancelled request, or a second runner's answer: found at the renewal."""
    worker = Worker(site, FakeModel(takes_s=100.0))
    over = asyncio.Event()
    renewing = asyncio.create_task(worker.processor.renew_leases(over))
    at(7.0, lambda: asyncio.ensure_future(site.store.cancel(failure(status_code=499, error_code="cancelled"))))

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Answered)
    assert outcome.reply.error_code == "cancelled"
    assert worker.model.closed == ["a"]
    assert loop_time() == 10.0
    over.set()
    await renewing


def cancelled(site: Site, request_id: str = "a") -> None:
    reply = failure(request_id, status_code=499, error_code="cancelled")
    asyncio.ensure_future(site.store.cancel(reply))  # noqa: RUF006 - it ends in the same turn


async def test_a_cancelled_call_is_closed_at_once(site: Site) -> None:
    """The store says whose request was cancelled; nobody waits for a renewal."""
    worker = Worker(site, FakeModel(takes_s=100.0))
    over = asyncio.Event()
    heeding = asyncio.create_task(worker.processor.heed_cancellations(over))
    at(7.0, lambda: cancelled(site))

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Answered)
    assert outcome.reply.error_code == "cancelled"
    assert worker.model.closed == ["a"]
    assert loop_time() == 7.0
    over.set()
    await heeding


async def test_an_unfounded_hint_costs_a_look_and_ends_nothing(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=10.0))
    over = asyncio.Event()
    heeding = asyncio.create_task(worker.processor.heed_cancellations(over))

    def hint() -> None:
        for request_id in ("a", "a", "elsewhere"):
            for told in site.store._heeding:
                told(request_id)

    at(1.0, hint)
    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Concluded)
    assert outcome.reply.status == "completed"
    assert worker.store.count("renew") == 1
    over.set()
    await heeding


async def test_a_hint_that_cannot_be_looked_after_ends_nothing(site: Site) -> None:
    """The next renewal tells, once the store answers again."""
    worker = Worker(site, FakeModel(takes_s=100.0))
    over = asyncio.Event()
    heeding = asyncio.create_task(worker.processor.heed_cancellations(over))
    renewing = asyncio.create_task(worker.processor.renew_leases(over))
    worker.store.away, worker.store.away_for = "cut off", {"renew"}

    def back() -> None:
        worker.store.away = None

    at(7.0, lambda: cancelled(site))
    at(8.0, back)
    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Answered)
    assert loop_time() == 10.0
    over.set()
    await asyncio.gather(heeding, renewing)


async def test_a_call_whose_claim_went_to_another_is_closed_and_waits_for_that_one(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=100.0))
    over = asyncio.Event()
    worker.store.away, worker.store.away_for = "cut off", {"renew"}
    renewing = asyncio.create_task(worker.processor.renew_leases(over))
    calling = asyncio.create_task(processed(worker, worker.job(body())))
    await asyncio.sleep(site.lease_s + 1)
    elsewhere = await hold_elsewhere(site, for_s=10.0)
    worker.store.away = None
    await asyncio.sleep(6.0)
    assert worker.model.closed == ["a"]
    await site.store.write(reply(), None, OTHER)

    outcome = await calling

    assert isinstance(outcome, Answered)
    assert worker.model.calls == ["a"]
    over.set()
    await asyncio.gather(renewing, elsewhere)


async def test_a_claim_that_was_lost_is_won_back_with_a_new_token_and_called_anew(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=100.0))
    job = worker.job(body())
    calling = asyncio.create_task(processed(worker, job))
    await worker.model.begun.wait()
    first = job.hold
    worker.model.takes_s = 1.0
    job.end_call(ClaimLost())
    assert first is not None
    await site.store.release("a", first.token)

    outcome = await calling

    assert isinstance(outcome, Concluded)
    assert outcome.hold != first
    assert worker.model.calls == ["a", "a"]


async def test_a_call_goes_on_while_the_lease_cannot_be_renewed(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=100.0))
    over = asyncio.Event()
    worker.store.away, worker.store.away_for = "cut off", {"renew"}
    renewing = asyncio.create_task(worker.processor.renew_leases(over))

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Concluded)
    assert not worker.store_health.ok
    assert worker.store_health.reason == "cut off"
    over.set()
    await renewing


async def test_a_late_answer_to_a_renewal_does_not_end_the_next_call(site: Site) -> None:
    """The renewal was of an earlier claim of the same job."""
    worker = Worker(site, FakeModel(takes_s=10.0))
    job = worker.job(body())
    calling = asyncio.create_task(processed(worker, job))
    await worker.model.begun.wait()
    old = job.hold
    assert old is not None
    await site.store.release("a", old.token)
    await site.store.claim("a", 0, OTHER, FAR)
    worker.store.takes_s["renew"] = 3.0
    late = asyncio.create_task(worker.processor._renew_quietly(job, old))
    await asyncio.sleep(1.0)
    job.end_call(ClaimLost())
    await site.store.release("a", OTHER)

    outcome = await calling

    assert isinstance(outcome, Concluded)
    assert late.done()
    assert worker.model.closed == ["a"]
    assert worker.model.calls == ["a", "a"]


async def test_a_claim_that_is_given_up_as_its_renewal_begins_is_not_taken_back(site: Site) -> None:
    """A renewal takes what nobody holds: one that came after the release would block the next runner for a lease."""
    worker = Worker(site, FakeModel())
    over = asyncio.Event()
    renewing = asyncio.create_task(worker.processor.renew_leases(over))
    job = worker.job(body())
    await worker.processor.process(job)
    hold = job.hold
    assert hold is not None

    def give_up() -> None:
        job.hold = None
        with pytest.raises(StopIteration):  # In one step, as the transport does next.
            site.store.release("a", hold.token).send(None)

    for turns in range(12):  # Whichever turn of the loop it comes in.
        asyncio.get_running_loop().call_later(5.0, _after_turns, turns, give_up)
        await asyncio.sleep(6.0)
        assert await site.store.claim("a", 0, OTHER, FAR) == Claimed(starts=1)
        await site.store.release("a", OTHER)
        await asyncio.sleep(4.0)
        await site.store.claim("a", 0, hold.token, FAR)
        job.hold = hold

    assert not renewing.done()
    worker.processor.forget(job)
    over.set()
    await renewing


def _after_turns(turns: int, do: Callable[[], None]) -> None:
    """Have something done a number of loop turns from now."""
    if turns == 0:
        do()
    else:
        asyncio.get_running_loop().call_soon(_after_turns, turns - 1, do)


@pytest.mark.parametrize(
    ("takes_s", "renewals"),
    [pytest.param(4.9, 0, id="a quick claim"), pytest.param(5.1, 1, id="a slow one")],
)
async def test_a_claim_that_took_long_is_renewed_before_the_call(site: Site, takes_s: float, renewals: int) -> None:
    """More than a third of the lease: what is left might not last until the first renewal."""
    worker = Worker(site, FakeModel())
    worker.store.takes_s["claim"] = takes_s

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Concluded)
    assert worker.store.count("renew") == renewals


async def test_a_slow_claim_that_went_to_another_is_not_called(site: Site) -> None:
    worker = Worker(site, FakeModel())
    worker.store.takes_s["claim"] = site.lease_s + 2
    at(site.lease_s + 1, lambda: asyncio.ensure_future(site.store.claim("a", 0, OTHER, FAR)))
    at(site.lease_s + 3, lambda: asyncio.ensure_future(site.store.write(reply(), None, OTHER)))

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Answered)
    assert worker.model.calls == []
    assert worker.store.count("renew") == 1


async def test_a_slow_claim_that_is_answered_meanwhile_is_not_called(site: Site) -> None:
    worker = Worker(site, FakeModel())
    worker.store.takes_s["claim"] = 6.0
    at(1.0, lambda: asyncio.ensure_future(site.store.write(reply(), None, OTHER)))

    assert isinstance(await processed(worker, worker.job(body())), Answered)
    assert worker.model.calls == []


async def test_a_slow_claim_that_cannot_be_renewed_is_not_called(site: Site) -> None:
    worker = Worker(site, FakeModel(), store_patience_s=3.0)
    worker.store.takes_s["claim"] = 6.0
    worker.store.away, worker.store.away_for = "gone", {"renew"}

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, NotStored)
    assert outcome.hold is not None
    assert worker.model.calls == []


# ---------------------------------------------------------------- the store


async def test_a_store_that_is_away_is_asked_for_as_long_as_patience_lasts(site: Site) -> None:
    worker = Worker(site, FakeModel(), store_patience_s=5.0)
    worker.store.away = "gone"

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, NotStored)
    assert outcome.hold is not None  # The claim may have been made: it is released.
    assert loop_time() == 5.0
    assert worker.store.count("claim") == 6
    assert worker.model.calls == []
    assert not worker.store_health.ok


async def test_a_lost_answer_is_asked_for_again_with_the_same_token(site: Site) -> None:
    worker = Worker(site, FakeModel())
    worker.store.answers_lost = 2

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Concluded)
    assert site.token() == Token("token-1")


@pytest.mark.parametrize("why", ["lost", "stopped"])
async def test_nobody_waits_for_the_store_who_may_not_begin(site: Site, why: str) -> None:
    worker = Worker(site, FakeModel(), store_patience_s=60.0)
    worker.store.away = "gone"
    job = worker.job(body())
    at(2.5, job.delivery.lost.set if why == "lost" else worker.processor.stop)

    outcome = await processed(worker, job)

    assert isinstance(outcome, Interrupted)
    assert outcome.hold is not None
    assert loop_time() == 2.5


# ---------------------------------------------------------------- lost, stopped, interrupted


async def test_a_delivery_that_was_lost_during_the_claim_is_not_called(site: Site) -> None:
    worker = Worker(site, FakeModel())
    worker.store.takes_s["claim"] = 2.0
    job = worker.job(body())
    at(1.0, job.delivery.lost.set)

    outcome = await processed(worker, job)

    assert isinstance(outcome, Interrupted)
    assert outcome.hold is not None
    assert worker.model.calls == []


async def test_a_call_goes_on_though_its_delivery_is_lost(site: Site) -> None:
    """Losing the broker does not lose the generation."""
    worker = Worker(site, FakeModel(takes_s=10.0))
    job = worker.job(body())
    at(1.0, job.delivery.lost.set)

    assert isinstance(await processed(worker, job), Concluded)


async def test_a_stop_lets_a_running_call_end(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=10.0))
    at(1.0, worker.processor.stop)

    assert isinstance(await processed(worker, worker.job(body())), Concluded)


async def test_an_interrupted_call_is_closed_before_its_claim_is_released(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=100.0))
    at(5.0, worker.processor.interrupt)

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Interrupted)
    assert outcome.hold is not None
    assert worker.model.closed == ["a"]
    assert isinstance(await site.store.claim("a", 0, OTHER, FAR), RunningElsewhere)


async def test_an_interrupt_reaches_a_call_that_is_about_to_begin(site: Site) -> None:
    worker = Worker(site, FakeModel())
    worker.store.takes_s["claim"] = 2.0
    at(1.0, worker.processor.interrupt)

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Interrupted)
    assert outcome.hold is not None
    assert worker.model.calls == []


async def test_an_interrupt_of_a_call_that_has_ended_changes_nothing(site: Site) -> None:
    worker = Worker(site, FakeModel())
    job = worker.job(body())
    outcome = await worker.processor.process(job)

    worker.processor.interrupt()

    assert isinstance(outcome, Concluded)
    assert job.ended_call_because is None
    worker.processor.forget(job)


async def test_a_cancelled_job_closes_its_call(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=100.0))
    calling = asyncio.create_task(processed(worker, worker.job(body())))
    await worker.model.begun.wait()

    calling.cancel()
    await asyncio.wait([calling])

    assert calling.cancelled()
    assert worker.model.closed == ["a"]


async def test_what_is_forgotten_before_it_was_known_leaves_nothing(site: Site) -> None:
    worker = Worker(site, FakeModel(), slots=1)
    job = worker.job(b"no")

    worker.processor.forget(job)
    worker.processor.forget(job)

    assert job.over.is_set()
    assert isinstance(await processed(worker, worker.job(body())), Concluded)


# ---------------------------------------------------------------- judgement


def answer(status_code: int, sent: bytes = b"{}", retry_after_s: float | None = None) -> Answer:
    return Answer(
        status_code=status_code, reason="Because", body=sent, retry_after_s=retry_after_s, ttft_s=0.5, tbt_s=0.1
    )


@pytest.mark.parametrize(
    ("said", "status_code", "error_code", "error"),
    [
        pytest.param(answer(200), 200, None, None, id="a 200 is an answer"),
        pytest.param(answer(204, b""), 204, None, None, id="an empty one is, too"),
        pytest.param(
            answer(200, b"<p>"),
            502,
            "bad_response",
            "the model answered 200 with a body that is not JSON (3 bytes)",
            id="one that is no JSON is none",
        ),
        pytest.param(answer(200, b'{"a":'), 502, "bad_response", None, id="half a JSON is none"),
        pytest.param(answer(200, b" "), 502, "bad_response", None, id="a blank is none"),
        pytest.param(
            answer(302, b""), 502, "bad_response", "the model answered 302 Because, which is no answer", id="a redirect"
        ),
        pytest.param(answer(400, b'{"message":"no"}'), 400, "model_error", "no", id="a refusal keeps its status"),
        pytest.param(answer(404, b"<p>"), 404, "model_error", "<p>", id="also where its body is no JSON"),
        pytest.param(answer(500, b""), 500, "model_error", "Because", id="a fault of the model is its answer"),
        pytest.param(
            answer(429, b""), 429, "model_error", "Because", id="too many requests is, unless it is to be retried"
        ),
        pytest.param(BadResponse("too large"), 502, "bad_response", "too large", id="what cannot be stored"),
        pytest.param(BadResponse("event", 500), 502, "bad_response", "event", id="an error event in a stream"),
    ],
)
async def test_an_answer_is_judged(
    site: Site, said: Exception | Answer, status_code: int, error_code: str | None, error: str | None
) -> None:
    worker = Worker(site, FakeModel(failures=[said]), retry_statuses=frozenset({503}))

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Concluded)
    assert (outcome.reply.status_code, outcome.reply.error_code) == (status_code, error_code)
    assert error is None or outcome.reply.error == error
    assert outcome.usage is None
    assert outcome.usage_event is None
    assert worker.model_health.asked_now == []
    if isinstance(said, Answer):
        assert (outcome.reply.timings.ttft_s, outcome.reply.timings.tbt_s) == (0.5, 0.1)


async def test_an_empty_answer_is_null(site: Site) -> None:
    worker = Worker(site, FakeModel(failures=[answer(200, b"")]))

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Concluded)
    assert outcome.reply.result is None


@pytest.mark.parametrize(
    ("sent", "measured", "tokens"),
    [
        pytest.param(b"{}", 9, 9, id="what was measured, where the body is silent"),
        pytest.param(GOOD, 9, 7, id="what the body says, where it speaks"),
    ],
)
async def test_usage_comes_from_the_body_or_from_the_call(site: Site, sent: bytes, measured: int, tokens: int) -> None:
    usage = Usage(input_tokens=measured, output_tokens=0, total_tokens=measured)
    worker = Worker(site, FakeModel(answer=Answer(status_code=200, reason="OK", body=sent, usage=usage)))

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Concluded)
    assert outcome.usage is not None
    assert outcome.usage.total_tokens == tokens


@pytest.mark.parametrize(
    ("said", "fault", "detail", "retry_after_s", "asks_health"),
    [
        pytest.param(ModelGone("refused"), Fault.GONE, "refused", None, True, id="nobody there"),
        pytest.param(ModelCut("reset"), Fault.CUT, "reset", None, True, id="cut short"),
        pytest.param(ModelFailure("odd"), Fault.GONE, "odd", None, True, id="anything else of the model"),
        pytest.param(answer(503, b"", 7.0), Fault.STATUS, "503: Because", 7.0, False, id="a status that asks for it"),
        pytest.param(BadResponse("event", 503), Fault.STATUS, "event", None, False, id="an event with that status"),
    ],
)
async def test_a_failure_that_may_pass_is_tried_again(
    site: Site, said: Exception | Answer, fault: Fault, detail: str, retry_after_s: float | None, asks_health: bool
) -> None:
    worker = Worker(site, FakeModel(failures=[said]), retry_statuses=frozenset({503}))

    outcome = await processed(worker, worker.job(body(), attempts=1))

    assert isinstance(outcome, Failed)
    assert (outcome.fault, outcome.detail, outcome.retry_after_s) == (fault, detail, retry_after_s)
    assert (outcome.reply.status_code, outcome.reply.error_code) == (500, "retries_exhausted")
    assert outcome.reply.error == f"{fault.value}, 2 times tried: {detail}"
    assert worker.model_health.asked_now == ([HEALTH_LOOK_S] if asks_health else [])


async def test_the_models_health_is_looked_at_before_the_copy_is_published(site: Site) -> None:
    """With the model gone, this worker must not burn all retries by itself."""
    worker = Worker(site, FakeModel(failures=[ModelGone("refused")]))
    worker.model_health.sees_after_s = 3.0

    await processed(worker, worker.job(body()))

    assert loop_time() == 3.0


async def test_a_look_that_never_comes_is_waited_for_no_longer_than_5_s(site: Site) -> None:
    worker = Worker(site, FakeModel(failures=[ModelGone("refused")]))
    worker.model_health.sees_after_s = None

    assert isinstance(await processed(worker, worker.job(body())), Failed)

    assert loop_time() == HEALTH_LOOK_S
    assert worker.model_health.wanted.is_set()


async def test_the_lease_goes_on_being_renewed_until_the_job_is_forgotten(site: Site) -> None:
    """Publishing a copy may take 30 s, which is longer than a lease."""
    worker = Worker(site, FakeModel(failures=[ModelCut("reset")]))
    over = asyncio.Event()
    renewing = asyncio.create_task(worker.processor.renew_leases(over))
    job = worker.job(body())
    await worker.processor.process(job)
    await asyncio.sleep(30.0)

    assert isinstance(await site.store.claim("a", 0, OTHER, FAR), RunningElsewhere)
    worker.processor.forget(job)
    await asyncio.sleep(site.lease_s)
    assert isinstance(await site.store.claim("a", 0, OTHER, FAR), Claimed)
    over.set()
    await renewing


async def test_a_suspect_that_waits_for_another_worker_lets_the_other_suspects_run(site: Site) -> None:
    """They waited with it, although none of them ran here: 10 minutes, then they were handed back."""
    model = FakeModel(takes_s=100.0)
    worker = Worker(site, model)
    for name in ("a", "b"):
        await site.store.claim(name, 0, Token(f"died-{name}"), FAR)
    await asyncio.sleep(site.lease_s + 1)
    first, second = worker.job(body("a")), worker.job(body("b"))
    tasks: list[asyncio.Task[object]] = [asyncio.create_task(worker.processor.process(first))]
    await asyncio.sleep(site.lease_s + 1)  # Nobody renews: its claim lapses, and another worker takes it over.
    tasks.append(await hold_elsewhere(site, for_s=100.0))
    await asyncio.sleep(0)
    first.end_call(ClaimLost())
    await asyncio.sleep(5)
    tasks.append(asyncio.create_task(worker.processor.process(second)))
    await asyncio.sleep(5)

    assert model.calls == ["a", "b"]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_clock_that_is_set_back_while_the_model_works_makes_no_negative_duration(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is billed, and a histogram's sum would go down."""
    worker = Worker(site, FakeModel(takes_s=2.0))
    job = worker.job(body())
    at(1.0, lambda: monkeypatch.setattr(worker.processor, "_now", lambda: EPOCH - 3600.0))

    outcome = await processed(worker, job)

    assert isinstance(outcome, Concluded)
    assert outcome.reply.timings.model_s == 2.0
