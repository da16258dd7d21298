"""What is counted of each request under the peer's names. Names end in the number of the peer's case, if any."""

import asyncio
import random
from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry

from inference_worker.disposition import (
    Answered,
    Concluded,
    Failed,
    Fault,
    HandBack,
    Hold,
    Interrupted,
    Malformed,
    NotAdmitted,
    NotStored,
    Outcome,
    Superseded,
    Token,
)
from inference_worker.errors import BadResponse, GateFailed, ModelCut, ModelFailure, ModelGone
from inference_worker.llmd_retry import UntilDeadline
from inference_worker.messages import ErrorCode, KnownReply, Reply, Usage
from inference_worker.peer_metrics import PeerMetrics, Place
from inference_worker.peer_notes import PeerNotes
from inference_worker.pool_gate import PoolGate
from inference_worker.ports import Answer, Claimed, Delivery, Dropped, Gate, Parked, TurnedAway
from inference_worker.tracing import PASSING_ON
from tests.store_contract import failure
from tests.unit.gate_kit import Told
from tests.unit.worker_kit import EPOCH, LEASE_S, FakeModel, Site, Worker, body, running
from tests.waiting import eventually

CHAT = Place(queue_id="chat", queue_name="memory", pool_name="gpu")
OTHER = Place(queue_id="other", queue_name="other", pool_name="gpu")
POOL = Place(pool_name="gpu")
HOLD = Hold("a", Token("t"))
COUNTERS = (
    "successful_requests",
    "failed_requests",
    "exceeded_deadline_requests",
    "request_retries",
    "gate_wait_requeues",
)
REASONS = ("gate_closed", "quota_exhausted", "dropped", "error")


class Counted:
    """Workers whose requests are counted."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = PeerMetrics(self.registry, queues=[CHAT, OTHER], pools=["gpu"])
        self.notes = PeerNotes(PASSING_ON, {place.queue_name: self.metrics.queue(place) for place in (CHAT, OTHER)})
        self.site = Site()

    def worker(self, model: FakeModel, gate: Gate | None = None, wait_s: float = 300.0, slots: int = 4) -> Worker:
        at_pool = (
            None if gate is None else PoolGate(gate, random.Random(3), wait_s=wait_s, told=self.metrics.pool("gpu"))
        )
        made = Worker(
            self.site,
            model,
            gate=at_pool,
            slots=slots,
            retry_statuses=frozenset({429, 500, 503}),
            hand_back=HandBack(copy_after_s=1.0),
        )
        made.listener._tracer = self.notes
        return made

    def value(self, name: str, place: Place = CHAT, **labels: str) -> float:
        at = dict(zip(("queue_id", "queue_name", "pool_name"), place.labels, strict=True))
        found = self.registry.get_sample_value(f"llm_d_async_async_{name}", at | labels)
        assert found is not None, name
        return found

    def counters(self, place: Place = CHAT) -> dict[str, float]:
        """Those that are not 0."""
        found = {name: self.value(f"{name}_total", place) for name in COUNTERS}
        return {name: number for name, number in found.items() if number}

    def decisions(self, place: Place = POOL) -> dict[str, float]:
        """Those that are not 0."""
        found = {reason: self.value("gate_decisions_total", place, reason=reason) for reason in REASONS}
        return {reason: number for reason, number in found.items() if number}

    @property
    def at_rest(self) -> bool:
        """Nothing is in flight, nor waits at a gate."""
        return self.value("inflight_requests") == 0 and self.value("gate_waiting_requests", POOL) == 0


@pytest.fixture
async def counted() -> Counted:
    return Counted()


def delivery(*, attempts: int = 0, redelivered: bool = False, queue: str = "memory", taken_at: float = 0.0) -> Delivery:
    return Delivery(
        body=b"",
        attempts=attempts,
        queue=queue,
        message_id=None,
        redelivered=redelivered,
        receipt=None,
        lost=asyncio.Event(),
        taken_at=taken_at,
    )


def reply(error_code: ErrorCode | None = None, status_code: int = 200) -> Reply:
    return Reply(
        request_id="a",
        status="completed" if error_code is None else "failed",
        status_code=status_code,
        attempt=0,
        replica_id="w",
        finished_at=0.0,
        error_code=error_code,
    )


def concluded(error_code: ErrorCode | None = None, status_code: int = 200) -> Concluded:
    usage = Usage(input_tokens=5, output_tokens=7, total_tokens=12) if error_code is None else None
    return Concluded(reply=reply(error_code, status_code), hold=HOLD, usage=usage)


FAILED = Failed(fault=Fault.STATUS, detail="busy", hold=HOLD, reply=reply("retries_exhausted", 500), status_code=429)

# ---------------------------------------------------------------- what comes


@pytest.mark.parametrize(
    ("attempts", "redelivered", "count"),
    [(0, False, 1), (1, False, 0), (0, True, 0)],
    ids=["first", "a retry", "delivered again"],
)
async def test_a_request_is_counted_when_it_comes_for_the_first_time(
    counted: Counted, attempts: int, redelivered: bool, count: int
) -> None:
    counted.notes.begin(delivery(attempts=attempts, redelivered=redelivered))

    assert counted.value("request_total") == count
    assert counted.value("queue_residence_time_millis_count") == 1


async def test_the_time_that_it_has_waited_here_is_counted(counted: Counted) -> None:
    await asyncio.sleep(100.0)

    counted.notes.begin(delivery(taken_at=98.5))

    assert counted.value("queue_residence_time_millis_sum") == 1500


async def test_of_a_queue_that_is_not_known_nothing_is_counted(counted: Counted) -> None:
    span = counted.notes.begin(delivery(queue="elsewhere"))
    span.settled(concluded(), "ack", request_id="a")
    span.end()

    assert counted.counters() == counted.counters(OTHER) == {}


# ---------------------------------------------------------------- what becomes of it


@pytest.mark.parametrize(
    ("outcome", "how", "counters"),
    [
        pytest.param(concluded(), "ack", {"successful_requests"}, id="an answer"),
        pytest.param(concluded(), "stored", {"successful_requests"}, id="an answer whose delivery was lost"),
        pytest.param(concluded(), "lost", set(), id="an answer that was lost"),
        pytest.param(concluded(), "requeue", set(), id="an answer that was not stored"),
        pytest.param(concluded("model_error", 400), "ack", {"failed_requests"}, id="the model's refusal"),
        pytest.param(concluded("poison", 500), "dead_letter", {"failed_requests"}, id="a dead letter"),
        pytest.param(concluded("gate_dropped", 429), "ack", {"failed_requests"}, id="dropped by a gate"),
        pytest.param(concluded("expired", 408), "ack", {"exceeded_deadline_requests"}, id="too late to begin"),
        pytest.param(concluded("deadline_exceeded", 408), "ack", {"exceeded_deadline_requests"}, id="too late"),
        pytest.param(concluded("cancelled", 499), "ack", set(), id="cancelled"),
        pytest.param(FAILED, "retry", {"request_retries"}, id="tried again"),
        pytest.param(FAILED, "ack", {"exceeded_deadline_requests"}, id="given up at its deadline"),
        pytest.param(FAILED, "dead_letter", {"failed_requests"}, id="given up after its retries"),
        pytest.param(FAILED, "requeue", set(), id="a copy that could not be placed"),
        pytest.param(Malformed(reason="no", reply=None), "dead_letter", {"failed_requests"}, id="no request"),
        pytest.param(
            NotAdmitted(reason="", hold=HOLD, because="waited"), "retry", {"gate_wait_requeues"}, id="waited at a gate"
        ),
        pytest.param(NotAdmitted(reason="", hold=HOLD, because="waited"), "lost", set(), id="waited, and was lost"),
        pytest.param(NotAdmitted(reason="", hold=HOLD, because="gate_closed"), "retry", set(), id="turned away"),
        pytest.param(Interrupted(reason="", hold=HOLD), "requeue", set(), id="handed back"),
        pytest.param(NotStored(), "requeue", set(), id="not stored"),
        pytest.param(Superseded(), "ack", set(), id="history"),
        pytest.param(
            Answered(reply=KnownReply(status="completed", status_code=200)), "ack", set(), id="answered before"
        ),
    ],
)
async def test_the_end_of_a_request_is_counted_once(
    counted: Counted, outcome: Outcome, how: str, counters: set[str]
) -> None:
    span = counted.notes.begin(delivery())

    span.settled(outcome, how, request_id="a")
    span.end()

    assert counted.counters() == dict.fromkeys(counters, 1)
    assert counted.counters(OTHER) == {}


@pytest.mark.parametrize(("status_code", "tokens"), [(200, 5), (201, 5), (302, 0)])
async def test_tokens_are_those_of_2xx_answers_case_276(counted: Counted, status_code: int, tokens: int) -> None:
    counted.notes.begin(delivery()).settled(concluded(status_code=status_code), "ack", request_id="a")

    assert counted.value("tokens_total", direction="input") == tokens
    assert counted.value("tokens_total", direction="output") == (7 if tokens else 0)


# ---------------------------------------------------------------- calls


async def run(counted: Counted, worker: Worker, *sent: bytes, until: str | None = "a") -> None:
    await counted.site.publish(*sent)
    async with running(worker):
        if until is not None:
            assert await counted.site.store.wait(until, 60.0) is not None
        await eventually(lambda: worker.listener.in_flight == 0, within=60, what="nothing in hand")


async def test_an_answer_is_a_success_and_no_retry_case_248(counted: Counted) -> None:
    await run(counted, counted.worker(FakeModel(takes_s=0.25)), body())

    assert counted.counters() == {"successful_requests": 1}
    assert counted.value("request_total") == counted.value("dispatched_requests_total") == 1
    assert counted.value("inference_latency_time_millis_sum") == pytest.approx(250)
    assert counted.value("tokens_total", direction="output") == 4


@pytest.mark.parametrize(
    ("said", "shed"),
    [
        pytest.param(Answer(status_code=429, reason="", body=b"{}"), 1, id="a 429"),
        pytest.param(BadResponse("in the stream", 429), 1, id="a 429 inside an answer"),
        pytest.param(Answer(status_code=503, reason="", body=b"{}"), 0, id="a 503"),
        pytest.param(ModelGone("refused"), 0, id="nobody there"),
    ],
)
async def test_a_429_is_counted_as_shed_and_tried_again_like_a_5xx_case_249(
    counted: Counted, said: Answer | ModelFailure, shed: int
) -> None:
    await run(counted, counted.worker(FakeModel(failures=[said])), body())

    assert counted.counters() == {"request_retries": 1, "successful_requests": 1}
    assert counted.value("shedded_requests_total") == shed
    assert counted.value("dispatched_requests_total") == 2
    assert counted.value("request_total") == 1
    assert counted.at_rest


async def test_what_is_given_up_at_its_deadline_is_late_case_253(counted: Counted) -> None:
    model = FakeModel(answer=Answer(status_code=429, reason="", body=b"{}"))
    worker = counted.worker(model)
    worker.listener._policy = UntilDeadline()

    await run(counted, worker, body(timeout_s=30.0))

    counters = counted.counters()
    assert counters.pop("request_retries") >= 1
    assert counters == {"exceeded_deadline_requests": 1}


@pytest.mark.parametrize(
    "failures",
    [[], [ModelCut("cut")], [ZeroDivisionError("a bug")]],
    ids=["success", "error", "a fault of ours"],
)
async def test_nothing_is_in_flight_once_a_call_has_ended_case_302(
    counted: Counted, failures: list[Exception | Answer]
) -> None:
    model = FakeModel(takes_s=2.0, failures=failures)
    worker = counted.worker(model)
    during: list[float] = []
    asyncio.get_running_loop().call_later(1.0, lambda: during.append(counted.value("inflight_requests")))

    await run(counted, worker, body())

    assert during == [1]
    assert counted.value("inflight_requests", OTHER) == 0
    assert counted.at_rest


async def test_nothing_is_in_flight_after_a_drain_case_302(counted: Counted) -> None:
    worker = counted.worker(FakeModel(takes_s=1e6))
    await counted.site.publish(body())
    async with running(worker):
        await worker.model.begun.wait()
        assert counted.value("inflight_requests") == 1

    assert counted.at_rest
    assert counted.counters() == {}


async def test_an_answer_whose_delivery_was_lost_is_counted_once(counted: Counted) -> None:
    """It is stored, and what is delivered again finds it."""
    worker = counted.worker(FakeModel(takes_s=5.0))
    await counted.site.publish(body())
    async with running(worker):
        await worker.model.begun.wait()
        worker.cut()
        assert await counted.site.store.wait("a", 60.0) is not None
        await eventually(lambda: worker.settled, within=60, what="a settlement")

    assert worker.model.calls == ["a"]
    assert counted.counters() == {"successful_requests": 1}
    assert counted.value("request_total") == 1


# ---------------------------------------------------------------- the gate of a pool


@pytest.mark.parametrize(
    ("said", "reason", "counters"),
    [
        pytest.param(
            Dropped(status_code=429, error_code="GATE_DROPPED", error="full"), "dropped", {"failed_requests"}, id="drop"
        ),
        pytest.param(GateFailed("no Redis"), "error", {"failed_requests"}, id="error"),
    ],
)
async def test_what_a_gate_ends_is_counted_there_and_failed_case_273(
    counted: Counted, said: Dropped | GateFailed, reason: str, counters: set[str]
) -> None:
    await run(counted, counted.worker(FakeModel(), Told(said)), body())

    assert counted.decisions() == {reason: 1}
    assert counted.counters() == dict.fromkeys(counters, 1)
    assert counted.decisions(CHAT) == {}


@pytest.mark.parametrize("because", ["gate_closed", "quota_exhausted"])
async def test_who_is_turned_away_is_counted_each_time_it_comes_round_case_273(counted: Counted, because: str) -> None:
    turned_away = TurnedAway(because=because)  # type: ignore[arg-type] # the two are listed above
    told = Told(turned_away, turned_away, Dropped(status_code=429, error_code="GATE_DROPPED", error="no"))

    await run(counted, counted.worker(FakeModel(), told), body())

    assert counted.decisions() == {because: 2, "dropped": 1}
    assert counted.value("gate_wait_requeues_total") == 0


@pytest.mark.parametrize("because", ["gate_closed", "quota_exhausted"])
async def test_who_waits_is_counted_once_however_often_it_asks_case_273(counted: Counted, because: str) -> None:
    told = Told(*[Parked(within_s=0.1, because=because)] * 20, TurnedAway(because=because))  # type: ignore[arg-type]
    worker = counted.worker(FakeModel(), told)
    during: list[float] = []
    asyncio.get_running_loop().call_later(1.0, lambda: during.append(counted.value("gate_waiting_requests", POOL)))

    job = worker.job(body())
    assert isinstance(await worker.processor.process(job), NotAdmitted)

    assert told.asks == 21
    assert during == [1]
    assert counted.decisions() == {because: 1}
    assert counted.at_rest


@pytest.mark.parametrize("how", ["cancelled", "lost", "stopped", "late", "over"])
async def test_nobody_waits_at_the_gate_once_it_is_over_case_302(counted: Counted, how: str) -> None:
    worker = counted.worker(FakeModel(), Told(Parked(within_s=60.0)), wait_s=50.0)
    job = worker.job(body(timeout_s=20.0 if how == "late" else 600.0))
    waiting = asyncio.create_task(worker.processor.process(job))
    await asyncio.sleep(5.0)
    before = counted.value("gate_waiting_requests", POOL)

    ways: Mapping[str, object] = {
        "cancelled": waiting.cancel,
        "lost": job.delivery.lost.set,
        "stopped": worker.processor.stop,
    }
    if callable(way := ways.get(how)):
        way()
    await asyncio.wait([waiting])

    assert before == 1
    assert counted.at_rest
    assert counted.decisions() == {"gate_closed": 1}


async def test_a_wait_that_was_over_is_a_requeue_of_its_gate(counted: Counted) -> None:
    opened = Told(*[Parked(within_s=60.0)] * 3)
    worker = counted.worker(FakeModel(), opened, wait_s=50.0)
    await counted.site.publish(body())
    async with running(worker):
        await eventually(lambda: worker.settled, within=100, what="a settlement")

    assert counted.counters() == {"gate_wait_requeues": 1}
    assert counted.value("dispatched_requests_total") == 0


async def test_a_drop_that_nobody_hears_is_not_counted(counted: Counted) -> None:
    dropped = Dropped(status_code=429, error_code="GATE_DROPPED", error="full")
    worker = counted.worker(FakeModel(), Told(dropped, takes_s=5.0))
    job = worker.job(body())
    asyncio.get_running_loop().call_later(5.0, job.delivery.lost.set)

    assert isinstance(await worker.processor.process(job), Interrupted)

    assert counted.decisions() == {}


# ---------------------------------------------------------------- our own


async def test_what_the_peer_has_no_counter_for_is_counted_under_our_names(counted: Counted) -> None:
    worker = counted.worker(FakeModel(takes_s=60.0))
    await counted.site.store.cancel(failure("before", error_code="cancelled", status_code=499))
    await counted.site.publish(body("before"), body("during"))
    async with running(worker):
        await worker.model.begun.wait()
        await counted.site.store.cancel(failure("during", error_code="cancelled", status_code=499))
        await eventually(lambda: len(worker.settled) == 2, within=30, what="both settlements")

    assert worker.gauge("cancelled_total", when="before_call") == 1
    assert worker.gauge("cancelled_total", when="in_call") == 1
    assert counted.counters() == {}


async def test_a_delivery_that_is_lost_and_comes_again_is_counted_as_both(counted: Counted) -> None:
    worker = counted.worker(FakeModel(takes_s=5.0))
    await counted.site.publish(body())
    async with running(worker):
        await worker.model.begun.wait()
        worker.cut()
        await eventually(lambda: worker.settled, within=60, what="a settlement")

    assert worker.gauge("deliveries_lost_total", stored="yes") == 1
    assert worker.gauge("deliveries_lost_total", stored="no") == 0
    assert worker.gauge("redelivered_total") == 1


async def test_a_message_that_goes_back_since_the_store_is_away_is_counted(counted: Counted) -> None:
    worker = counted.worker(FakeModel())
    worker.store.away = "gone"
    job = worker.job(body())
    outcome = await worker.processor.process(job)
    assert isinstance(outcome, NotStored)

    worker.listener._notes.settled(job, outcome, "requeue", 0.0)

    assert worker.gauge("not_stored_total") == 1


async def test_a_claim_that_another_worker_has_taken_over_is_counted(counted: Counted) -> None:
    worker = counted.worker(FakeModel(takes_s=1e6))
    worker.store.away, worker.store.away_for = "cut off", {"renew"}
    over = asyncio.Event()
    renewing = asyncio.create_task(worker.processor.renew_leases(over))
    calling = asyncio.create_task(worker.processor.process(worker.job(body("a"))))
    await asyncio.sleep(LEASE_S + 1)
    assert isinstance(await counted.site.store.claim("a", 0, Token("elsewhere"), EPOCH + 600), Claimed)

    worker.store.away = None
    await eventually(lambda: worker.model.closed, within=30, what="the end of the call")

    assert worker.gauge("claims_lost_total") == 1
    over.set()
    calling.cancel()
    await asyncio.wait([calling, renewing])


async def test_the_tracer_around_which_it_counts_runs_until_told_to_stop() -> None:
    class Sending:
        begin = PASSING_ON.begin
        ran = 0.0

        async def run(self, until: asyncio.Event) -> None:
            await until.wait()
            self.ran = asyncio.get_running_loop().time()

    sending, over = Sending(), asyncio.Event()
    asyncio.get_running_loop().call_later(5.0, over.set)

    await PeerNotes(sending, {}).run(over)

    assert sending.ran == 5.0
