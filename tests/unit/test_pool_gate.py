"""The gate of a pool before the model: who waits and how long, who is answered, and what goes back, exactly once."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_worker.disposition import (
    Answered,
    Concluded,
    CopyRefused,
    Failed,
    HandBack,
    Interrupted,
    NotAdmitted,
    Outcome,
    Republish,
    Token,
)
from inference_worker.errors import BadResponse, GateFailed, ModelCut, ModelGone
from inference_worker.gates.basic import LocalMaxConcurrency
from inference_worker.gates.feedback import REASON_HEADER
from inference_worker.message_processor import Job
from inference_worker.messages import InferenceRequest
from inference_worker.pool_gate import WAIT_S, PoolGate
from inference_worker.ports import (
    NO_HEADERS,
    Admitted,
    Answer,
    Asked,
    Claimed,
    Dropped,
    Feedback,
    FeedbackKind,
    Gate,
    Parked,
    TurnedAway,
    Verdict,
)
from tests.store_contract import failure
from tests.unit.conftest import VirtualTimeLoop
from tests.unit.gate_kit import RecordedPermit, Told
from tests.unit.worker_kit import EPOCH, FakeModel, Site, Worker, body, now, running

LONG_S = 1e6
NOT_SENT = Feedback(kind="not_sent")


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def permit() -> RecordedPermit:
    return RecordedPermit("permit", [])


def gate_of(gate: Gate, wait_s: float = WAIT_S) -> PoolGate:
    return PoolGate(gate, random.Random(3), wait_s=wait_s)


def worker_at(gate: Gate, *, model: FakeModel | None = None, wait_s: float = WAIT_S, slots: int = 4) -> Worker:
    return Worker(Site(), model or FakeModel(), gate=gate_of(gate, wait_s), slots=slots)


async def processed(worker: Worker, job: Job) -> Outcome:
    """Process a delivery and let go of it."""
    try:
        return await worker.processor.process(job)
    finally:
        worker.processor.forget(job)


class Heard:
    """Admits everything, and remembers what it was told."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def budget(self) -> float:
        return 1.0

    async def admit(self, asked: Asked) -> Verdict:
        self.asked.append(asked)
        asked.labels["classification"] = "reserved"
        return Admitted()

    async def run(self, until: asyncio.Event) -> None:
        await until.wait()

    def closes_at(self) -> str:
        return "never"


# ---------------------------------------------------------------- what a gate is told


async def test_a_gate_is_told_of_the_request_and_may_classify_its_delivery() -> None:
    gate = Heard()
    worker = worker_at(gate)
    job = worker.job(body("a", timeout_s=60.0, payload=b'{"n":1}'))
    job.delivery.labels["tier"] = "batch"

    assert isinstance(await processed(worker, job), Concluded)

    (asked,) = gate.asked
    assert (asked.request_id, asked.deadline, asked.payload) == ("a", EPOCH + 60.0, b'{"n":1}')
    assert job.delivery.labels == {"tier": "batch", "classification": "reserved"}


async def test_a_request_that_its_transport_has_read_is_taken_as_it_is() -> None:
    gate = Heard()
    worker = worker_at(gate)
    request = InferenceRequest(
        request_id="theirs",
        received_at=now(),
        timeout_s=60.0,
        deadline=now() + 60.0,
        payload=b"{}",
        endpoint="/v1/x",
        stream=False,
        metadata={"userid": "u"},
    )
    job = Job(replace(worker.job(b"no request of ours").delivery, request=request))

    outcome = await processed(worker, job)

    assert isinstance(outcome, Concluded)
    assert outcome.reply.request_id == "theirs"
    assert gate.asked[0].metadata == {"userid": "u"}


# ---------------------------------------------------------------- verdicts


async def test_who_is_let_in_gives_back_what_it_took_with_what_the_model_said_case_272() -> None:
    taken = permit()
    worker = worker_at(Told(Admitted(permits=(taken,))), model=FakeModel(takes_s=2.0))
    await asyncio.sleep(1.0)

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Concluded)
    assert taken.seen == [Feedback(kind="accepted", sent_at=1.0, input_tokens=3, output_tokens=4)]


def said(status_code: int, headers: Mapping[str, str] = NO_HEADERS, retry_after_s: float | None = None) -> Answer:
    return Answer(status_code=status_code, reason="", body=b"{}", headers=headers, retry_after_s=retry_after_s)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        pytest.param(said(200), "accepted", id="an answer"),
        pytest.param(said(429), "capacity_rejected", id="a bare 429"),
        pytest.param(said(429, {REASON_HEADER: "rejected-ttl-expired"}), "ttl_expired", id="a reason"),
        pytest.param(said(400), "rejected", id="a refusal"),
        pytest.param(said(503), "error", id="an error"),
        pytest.param(ModelGone("refused"), "error", id="nobody there"),
        pytest.param(ModelCut("cut"), "error", id="half an answer"),
        pytest.param(BadResponse("in the stream", 429), "capacity_rejected", id="a status inside an answer"),
        pytest.param(BadResponse("no JSON"), "error", id="no answer at all"),
    ],
)
async def test_a_gate_hears_what_became_of_a_request(answer: Answer | Exception, kind: FeedbackKind) -> None:
    taken = permit()
    worker = worker_at(Told(Admitted(permits=(taken,))), model=FakeModel(failures=[answer]))

    await processed(worker, worker.job(body()))

    assert [seen.kind for seen in taken.seen] == [kind]
    assert taken.seen[0].sent_at == 0.0


async def test_a_gate_hears_for_how_long_it_is_to_stay_away() -> None:
    taken = permit()
    model = FakeModel(failures=[said(429, {"x-llm-d-flow-band-headroom": "2"}, 7.0)])
    worker = worker_at(Told(Admitted(permits=(taken,))), model=model)

    await processed(worker, worker.job(body()))

    assert (taken.seen[0].retry_after_s, taken.seen[0].headers) == (7.0, {"x-llm-d-flow-band-headroom": "2"})


async def test_who_is_turned_away_is_neither_claimed_nor_called_case_268() -> None:
    worker = worker_at(Told(TurnedAway(because="quota_exhausted")))

    outcome = await processed(worker, worker.job(body(), attempts=2))

    assert isinstance(outcome, NotAdmitted)
    assert outcome.reason == "turned away at the gate of the pool: quota_exhausted"
    assert worker.model.calls == []
    assert worker.store.asked == []
    assert worker.processor.calls == 0


@pytest.mark.parametrize(
    ("dropped", "status_code", "error_code", "error"),
    [
        pytest.param(
            Dropped(status_code=429, error_code="GATE_DROPPED", error="full"), 429, "gate_dropped", "full", id="its own"
        ),
        pytest.param(
            Dropped(status_code=None, error_code="GATE_DROPPED", error="no"), 0, "gate_dropped", "no", id="no status"
        ),
        pytest.param(
            Dropped(status_code=None, error_code="DEADLINE_EXCEEDED", error="late"), 408, "expired", "late", id="late"
        ),
        pytest.param(
            Dropped(status_code=402, error_code="PAY", error="first"), 402, "gate_dropped", "PAY: first", id="another"
        ),
    ],
)
async def test_who_is_dropped_is_answered_so_case_268(
    dropped: Dropped, status_code: int, error_code: str, error: str
) -> None:
    worker = worker_at(Told(dropped))

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Concluded)
    assert (outcome.reply.status_code, outcome.reply.error_code, outcome.reply.error) == (
        status_code,
        error_code,
        error,
    )
    assert worker.model.calls == []


async def test_a_gate_that_cannot_say_ends_the_request_case_268() -> None:
    worker = worker_at(Told(GateFailed("no Redis")))

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Concluded)
    assert (outcome.reply.status_code, outcome.reply.error_code) == (500, "gate_error")
    assert outcome.reply.error == "the gate of the pool could not be asked: no Redis"


# ---------------------------------------------------------------- waiting


async def test_who_waits_is_let_in_once_the_gate_opens() -> None:
    opened = asyncio.Event()
    worker = worker_at(Told(Parked(within_s=50.0, changed=opened), Admitted()))
    asyncio.get_running_loop().call_later(5.0, opened.set)

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Concluded)
    assert loop_time() == 5.0


@pytest.mark.parametrize("closed", [Told(Parked(within_s=0.1)), Told(Admitted(), takes_s=LONG_S)], ids=["shut", "hung"])
async def test_the_wait_at_a_gate_has_an_end(closed: Told) -> None:
    worker = worker_at(closed)

    outcome = await processed(worker, worker.job(body(timeout_s=9000.0)))

    assert isinstance(outcome, NotAdmitted)
    assert outcome.reason == "waited 300 s at the gate of the pool"
    assert loop_time() == pytest.approx(300.0)
    assert worker.store.asked == []


@pytest.mark.parametrize("wait_s", [0.0, 300.0], ids=["without a limit", "with a longer limit"])
@pytest.mark.parametrize("closed", [Told(Parked(within_s=0.1)), Told(Admitted(), takes_s=LONG_S)], ids=["shut", "hung"])
async def test_a_deadline_that_passes_at_the_gate_is_too_late_case_270(closed: Told, wait_s: float) -> None:
    worker = worker_at(closed, wait_s=wait_s)

    outcome = await processed(worker, worker.job(body(timeout_s=200.0)))

    assert isinstance(outcome, Concluded)
    assert (outcome.reply.status_code, outcome.reply.error_code) == (408, "expired")
    assert loop_time() == pytest.approx(200.0)


async def test_without_a_limit_it_is_waited_beyond_what_other_waits_may_last() -> None:
    opened = asyncio.Event()
    worker = worker_at(Told(Parked(within_s=LONG_S, changed=opened), Admitted()), wait_s=0.0)
    asyncio.get_running_loop().call_later(5000.0, opened.set)

    assert isinstance(await processed(worker, worker.job(body(timeout_s=9000.0))), Concluded)


async def test_a_deadline_that_passes_before_the_slot_asks_no_gate() -> None:
    gate = Told(Admitted())
    worker = worker_at(gate, model=FakeModel(takes_s=50.0), slots=1)
    first = asyncio.create_task(processed(worker, worker.job(body("a"))))
    await worker.model.begun.wait()

    outcome = await processed(worker, worker.job(body("b", timeout_s=10.0)))

    assert isinstance(outcome, Concluded)
    assert outcome.reply.error_code == "expired"
    assert gate.asks == 1
    await first


@pytest.mark.parametrize("gate", [Told(Parked(within_s=60.0)), Told(Admitted(), takes_s=LONG_S)], ids=["shut", "hung"])
@pytest.mark.parametrize("why", ["lost", "stopped"])
async def test_who_may_not_wait_goes_back_at_once_case_258(gate: Told, why: str) -> None:
    worker = worker_at(gate)
    job = worker.job(body())
    asyncio.get_running_loop().call_later(5.0, job.delivery.lost.set if why == "lost" else worker.processor.stop)

    outcome = await processed(worker, job)

    assert isinstance(outcome, Interrupted)
    assert loop_time() == 5.0
    assert worker.store.asked == []


async def test_what_is_admitted_as_its_request_goes_back_is_given_back() -> None:
    taken = permit()
    worker = worker_at(Told(Admitted(permits=(taken,)), takes_s=5.0))
    asyncio.get_running_loop().call_later(5.0, worker.processor.stop)

    outcome = await processed(worker, worker.job(body()))

    assert isinstance(outcome, Interrupted)
    assert taken.seen == [NOT_SENT]


async def test_a_request_that_is_cancelled_at_the_gate_does_not_wait_on_case_262() -> None:
    worker = worker_at(Told(Parked(within_s=60.0)))
    over = asyncio.Event()

    async def cancel_later() -> None:
        await asyncio.sleep(5.0)
        await worker.site.store.cancel(failure("a", error_code="cancelled", status_code=499))

    async with asyncio.TaskGroup() as group:
        group.create_task(worker.processor.heed_cancellations(over))
        group.create_task(cancel_later())
        outcome = await processed(worker, worker.job(body("a")))
        assert loop_time() == 5.0
        over.set()

    assert isinstance(outcome, Answered)
    assert outcome.reply.error_code == "cancelled"


@pytest.mark.parametrize("store_away", [False, True])
async def test_a_hint_without_foundation_changes_nothing(store_away: bool) -> None:
    worker = worker_at(Told(Parked(within_s=60.0)), wait_s=20.0)
    job = worker.job(body())

    def doubt() -> None:
        assert job.at_gate is not None
        job.at_gate.set()

    worker.store.away = "gone" if store_away else None
    asyncio.get_running_loop().call_later(5.0, doubt)

    assert isinstance(await processed(worker, job), NotAdmitted)
    assert loop_time() == 20.0
    assert job.at_gate is None


# ---------------------------------------------------------------- what was taken goes back once


@pytest.mark.parametrize("at_s", [0.5, 1.5, 2.5], ids=["at the gate", "at the claim", "in the call"])
async def test_a_job_that_is_cancelled_gives_back_what_it_took(at_s: float) -> None:
    taken = permit()
    gate = Told(Admitted(permits=(taken,)), takes_s=1.0)
    worker = worker_at(gate, model=FakeModel(takes_s=10.0))
    worker.store.takes_s["claim"] = 1.0
    job = asyncio.create_task(processed(worker, worker.job(body())))
    await asyncio.sleep(at_s)

    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job

    kinds = [seen.kind for seen in taken.seen]
    assert kinds == {0.5: [], 1.5: ["not_sent"], 2.5: ["error"]}[at_s]


async def test_a_call_that_is_closed_from_here_gives_back_what_it_took() -> None:
    taken = permit()
    worker = worker_at(Told(Admitted(permits=(taken,))), model=FakeModel(takes_s=60.0))
    asyncio.get_running_loop().call_later(5.0, worker.processor.interrupt)

    assert isinstance(await processed(worker, worker.job(body())), Interrupted)

    assert taken.seen == [Feedback(kind="error", sent_at=0.0)]


async def test_a_request_that_is_answered_already_was_not_sent() -> None:
    taken = permit()
    worker = worker_at(Told(Admitted(permits=(taken,))))
    await worker.site.store.write(failure("a"), None, Token("elsewhere"))

    assert isinstance(await processed(worker, worker.job(body("a"))), Answered)

    assert taken.seen == [NOT_SENT]


async def test_who_waits_for_another_runner_holds_nothing_of_the_gate() -> None:
    first, second = permit(), permit()
    worker = worker_at(Told(Admitted(permits=(first,)), Admitted(permits=(second,))))
    claimed = await worker.site.store.claim("a", 0, Token("elsewhere"), EPOCH + 10_000)
    assert isinstance(claimed, Claimed)
    waiting = asyncio.create_task(processed(worker, worker.job(body("a"))))
    await asyncio.sleep(0.5)
    assert first.seen == [NOT_SENT]
    await worker.site.store.release("a", Token("elsewhere"))

    assert isinstance(await waiting, Concluded)

    assert [seen.kind for seen in second.seen] == ["accepted"]


async def test_the_next_one_with_the_slot_finds_the_gate_open_again() -> None:
    """A slot that was free before its permit would have the next one turned away for nothing."""
    gate = LocalMaxConcurrency(1)
    worker = worker_at(gate, model=FakeModel(takes_s=1.0), slots=1)

    outcomes = await asyncio.gather(*(processed(worker, worker.job(body(f"r-{n}"))) for n in range(5)))

    assert [type(outcome) for outcome in outcomes] == [Concluded] * 5
    assert gate.budget() == 1.0


@settings(max_examples=50, deadline=None)
@given(
    takes_s=st.floats(0, 2),
    ends=st.lists(st.tuples(st.floats(0, 6), st.sampled_from(["lost", "cancelled"])), min_size=1, max_size=8),
    stop_s=st.floats(0, 8),
)
def test_nothing_stays_taken_whatever_ends_a_request_case_272(
    takes_s: float, ends: list[tuple[float, str]], stop_s: float
) -> None:
    async def all_of_them() -> float:
        gate = LocalMaxConcurrency(2, "blocking")
        worker = worker_at(gate, model=FakeModel(takes_s=takes_s))
        worker.store.takes_s["claim"] = 0.5
        loop = asyncio.get_running_loop()
        tasks = []
        for number, (after_s, how) in enumerate(ends):
            job = worker.job(body(f"r-{number}"))
            tasks.append(asyncio.create_task(processed(worker, job)))
            loop.call_later(after_s, job.delivery.lost.set if how == "lost" else tasks[-1].cancel)
        loop.call_later(stop_s, worker.processor.stop)
        await asyncio.wait(tasks, timeout=100.0)
        assert all(task.done() for task in tasks)
        assert worker.processor.calls == 0
        return gate.budget()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(all_of_them()) == 1.0


# ---------------------------------------------------------------- with a queue


async def test_what_waits_before_a_closed_gate_does_not_go_round_in_a_circle_and_is_not_counted_case_268() -> None:
    taken = permit()
    gate = Told(*[TurnedAway()] * 20, Admitted(permits=(taken,)))
    site = Site()
    worker = Worker(site, FakeModel(), gate=gate_of(gate), max_retries=0, hand_back=HandBack(copy_after_s=1.0))
    await site.publish(body("a"))

    async with running(worker):
        await site.store.wait("a", 60.0)

    result = await site.result("a")
    assert result is not None
    assert (result["status"], result["attempt"]) == ("completed", 0)
    assert 10.0 <= loop_time() <= 30.0
    assert gate.asks == 21
    assert [tried.attempts for tried in worker.tried if isinstance(tried, Republish)] == [0] * 20
    assert [seen.kind for seen in taken.seen] == ["accepted"]


async def test_where_no_copy_can_be_placed_the_message_itself_goes_back() -> None:
    site = Site()
    gate = Told(TurnedAway(), Admitted())
    worker = Worker(site, FakeModel(), gate=gate_of(gate), hand_back=HandBack(copy_after_s=1.0))
    worker.settlements.append(CopyRefused(reason="too large"))
    await site.publish(body("a"))

    async with running(worker):
        await site.store.wait("a", 60.0)

    assert await site.result("a") is not None
    assert loop_time() < 1.0  # Not as after a fault of ours.


async def test_a_failure_behind_a_gate_is_still_an_attempt() -> None:
    worker = worker_at(Told(Admitted()), model=FakeModel(failures=[ModelCut("cut")]))

    assert isinstance(await processed(worker, worker.job(body())), Failed)
