"""A worker before a gate, from the queue to the result: the cases of a worker that no part of it shows alone.

Not here: what each verdict comes to (`test_pool_gate.py`), and which verdict a gate gives (the tests of the gates).
"""

import asyncio
import random
from dataclasses import replace

import pytest

from inference_worker.disposition import Answered, Concluded, Failed, Fault, NotAdmitted, Outcome
from inference_worker.errors import ModelCut
from inference_worker.gates.basic import LocalMaxConcurrency
from inference_worker.gates.combined import WaitOnRefuse
from inference_worker.gates.feedback import REASON_HEADER
from inference_worker.gates.tiers import TierPriorityAdmission
from inference_worker.lanes import CLASSIFICATION_LABEL, TIER_LABEL
from inference_worker.llmd_retry import UntilDeadline
from inference_worker.message_processor import Job
from inference_worker.pool_gate import PoolGate
from inference_worker.ports import Admitted, Answer, Asked, Feedback, Gate, Parked, TurnedAway, Verdict
from tests.store_contract import failure
from tests.unit.gate_kit import RecordedPermit, Told
from tests.unit.worker_kit import FakeModel, Site, Worker, body, running
from tests.waiting import eventually


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def worker_at(gate: Gate, model: FakeModel | None = None, *, slots: int = 4) -> Worker:
    return Worker(Site(), model or FakeModel(), gate=PoolGate(gate, random.Random(3)), slots=slots)


async def processed(worker: Worker, job: Job) -> Outcome:
    try:
        return await worker.processor.process(job)
    finally:
        worker.processor.forget(job)


class Saturated:
    """A pool that is full until a moment of the loop's time, and then takes all that comes."""

    def __init__(self, until: float) -> None:
        self._until = until

    def budget(self) -> float:
        return 0.0 if loop_time() < self._until else 1.0

    async def admit(self, asked: Asked) -> Verdict:
        return TurnedAway() if self.budget() == 0 else Admitted()

    async def run(self, until: asyncio.Event) -> None:
        await until.wait()

    def closes_at(self) -> str:
        return "by the clock"


# ---------------------------------------------------------------- cancellation


@pytest.mark.parametrize(
    "verdicts",
    [
        pytest.param([Admitted()], id="let in at once"),
        pytest.param([Parked(within_s=0.05)] * 4 + [Admitted()], id="after a while at the gate"),
    ],
)
async def test_before_its_call_a_request_is_asked_after_once_case_261(verdicts: list[Verdict]) -> None:
    """The question for its claim tells of a cancellation as well."""
    gate = Told(*verdicts)
    worker = worker_at(gate)

    assert isinstance(await processed(worker, worker.job(body("a"))), Concluded)

    assert worker.store.asked == [("claim", "a")]
    assert gate.asks == len(verdicts)


@pytest.mark.parametrize(
    ("cancelled_at", "heard_of", "claim_takes_s", "ends_at"),
    [
        pytest.param(2.0, True, 0.0, 2.0, id="at the gate"),
        pytest.param(4.9, False, 0.0, 5.0, id="as the gate lets it in"),
        pytest.param(8.0, False, 6.0, 11.0, id="right before it is sent"),
        pytest.param(5.5, True, 1.0, 6.0, id="while it is claimed"),
    ],
)
async def test_a_request_that_is_cancelled_before_its_call_is_never_sent_case_262(
    cancelled_at: float, heard_of: bool, claim_takes_s: float, ends_at: float
) -> None:
    """The gate takes five seconds. Where nobody hears of it, the store tells when it is asked."""
    permit = RecordedPermit("permit", [])
    worker = worker_at(Told(Admitted(permits=(permit,)), takes_s=5.0))
    worker.store.takes_s["claim"] = claim_takes_s
    over = asyncio.Event()

    async def cancel_later() -> None:
        await asyncio.sleep(cancelled_at)
        await worker.site.store.cancel(failure("a", error_code="cancelled", status_code=499))

    async with asyncio.TaskGroup() as group:
        if heard_of:
            group.create_task(worker.processor.heed_cancellations(over))
        group.create_task(cancel_later())
        outcome = await processed(worker, worker.job(body("a")))
        over.set()

    assert isinstance(outcome, Answered)
    assert outcome.reply.error_code == "cancelled"
    assert loop_time() == pytest.approx(ends_at)
    assert worker.model.calls == []
    assert {seen.kind for seen in permit.seen} <= {"not_sent"}


async def test_while_nobody_knows_whether_it_is_cancelled_a_request_is_not_sent_and_not_counted_case_260() -> None:
    site = Site()
    worker = Worker(site, FakeModel(), store_patience_s=1.0)
    worker.store.away, worker.store.away_for = "gone", {"claim"}
    await site.publish(body("a"))
    async with running(worker):
        await eventually(lambda: worker.settled, within=30, what="it goes back")
        sent_meanwhile = list(worker.model.calls)
        worker.store.away = None
        await eventually(lambda: site.result("a"), within=60, what="the result")

    result = await site.result("a")
    assert sent_meanwhile == []
    assert result is not None
    assert (result["status"], result["attempt"]) == ("completed", 0)


# ---------------------------------------------------------------- the pool's gate


async def test_who_waits_twice_is_called_once_case_268() -> None:
    gate = Told(Parked(within_s=0.05), Parked(within_s=0.05), Admitted())
    worker = worker_at(gate)

    assert isinstance(await processed(worker, worker.job(body("a"))), Concluded)

    assert (gate.asks, worker.model.calls) == (3, ["a"])


async def test_what_is_over_the_limit_of_a_blocking_gate_follows_without_a_retry_case_269() -> None:
    worker = worker_at(LocalMaxConcurrency(2, "blocking"), FakeModel(takes_s=10.0))
    jobs = [asyncio.create_task(processed(worker, worker.job(body(name)))) for name in ("a", "b", "c")]
    await asyncio.sleep(5.0)
    assert worker.model.calls == ["a", "b"]

    outcomes = await asyncio.gather(*jobs)

    assert [type(outcome) for outcome in outcomes] == [Concluded] * 3
    assert (worker.model.calls, worker.model.most_at_once) == (["a", "b", "c"], 2)
    assert loop_time() == pytest.approx(20.0)


async def test_a_pool_that_is_full_keeps_its_requests_and_goes_on_when_it_is_not_case_333() -> None:
    worker = worker_at(WaitOnRefuse(Saturated(until=10.0)))
    jobs = [asyncio.create_task(processed(worker, worker.job(body(name)))) for name in ("a", "b")]
    await asyncio.sleep(9.9)
    assert worker.model.calls == []

    outcomes = await asyncio.gather(*jobs)

    assert [type(outcome) for outcome in outcomes] == [Concluded] * 2
    assert loop_time() < 12.0


async def test_in_a_full_pool_who_sits_before_it_hears_at_once_and_the_rest_comes_later_case_334() -> None:
    worker = worker_at(TierPriorityAdmission(Saturated(until=10.0)))

    def job(name: str, tier: str, classification: str) -> Job:
        made = worker.job(body(name))
        labels = {TIER_LABEL: tier, CLASSIFICATION_LABEL: classification}
        return Job(replace(made.delivery, labels=labels))

    reserved = asyncio.create_task(processed(worker, job("reserved", "interactive", "reserved")))
    person = await processed(worker, job("person", "interactive", "overflow"))
    others = [await processed(worker, job(tier, tier, "overflow")) for tier in ("async", "batch")]
    assert isinstance(person, Concluded)
    assert (person.reply.status_code, person.reply.error_code) == (429, "gate_dropped")
    assert [type(outcome) for outcome in others] == [NotAdmitted] * 2
    await asyncio.sleep(9.9 - loop_time())
    assert worker.model.calls == []
    await asyncio.sleep(0.2)
    again = [await processed(worker, job(tier, tier, "overflow")) for tier in ("async", "batch")]

    assert [type(outcome) for outcome in [await reserved, *again]] == [Concluded] * 3
    assert sorted(worker.model.calls) == ["async", "batch", "reserved"]


async def test_a_rejection_whose_body_is_cut_is_heeded_as_one_case_281() -> None:
    permit = RecordedPermit("permit", [])
    said = {REASON_HEADER: "rejected-saturated"}
    cut = ModelCut("429, and the answer stopped before its end", 429, headers=said, retry_after_s=7.0)
    worker = worker_at(Told(Admitted(permits=(permit,))), FakeModel(failures=[cut]))

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Failed)
    assert (outcome.fault, outcome.retry_after_s) == (Fault.CUT, 7.0)
    assert permit.seen == [Feedback(kind="capacity_rejected", sent_at=0.0, retry_after_s=7.0, headers=said)]


# ---------------------------------------------------------------- the end, and a backend that is away


@pytest.mark.parametrize(
    ("grace_s", "answered"), [pytest.param(120.0, 3, id="time enough"), pytest.param(5.0, 0, id="too little time")]
)
async def test_of_what_runs_at_a_stop_each_is_answered_or_back_uncounted_case_265_266_325_326(
    grace_s: float, answered: int
) -> None:
    site = Site()
    worker = Worker(site, FakeModel(takes_s=60.0), grace_s=grace_s).start()
    names = ["a", "b", "c"]
    await site.publish(*map(body, names))
    await eventually(lambda: len(worker.model.calls) == 3, within=5, what="all three run")
    told_at = loop_time()

    await worker.ended()

    assert loop_time() - told_at < min(grace_s, 60.0) + 0.5
    results = [result for name in names if (result := await site.result(name)) is not None]
    assert [result["status"] for result in results] == ["completed"] * answered
    assert [message.attempts for message in site.broker.ready] == [0] * (3 - answered)
    assert worker.model.closed == ([] if answered else names)


async def test_a_backend_that_is_away_for_five_seconds_costs_time_and_nothing_else_case_324() -> None:
    site = Site()
    away = Answer(status_code=503, reason="No", body=b"{}")
    model = FakeModel(answer=away)
    worker = Worker(site, model, retry_statuses=frozenset({503}))
    worker.listener._policy = UntilDeadline()
    await site.publish(body("a"))
    async with running(worker):
        await asyncio.sleep(5.0)
        assert await site.result("a") is None
        model.answer = FakeModel().answer
        await eventually(lambda: site.result("a"), within=120, what="the result")

    result = await site.result("a")
    assert result is not None
    assert result["status"] == "completed"
    assert not site.dead
