"""The spine on the embedded queue and store: when to receive, what becomes of a delivery, and how it ends."""

import asyncio
import json
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from inference_worker.disposition import (
    Ack,
    Busy,
    CopyRefused,
    DeadLetter,
    DeliveryLost,
    Known,
    Nack,
    Republish,
    StoreSilent,
    Token,
)
from inference_worker.errors import ModelCut, ModelGone, TransportLost
from inference_worker.listener import AFTER_GRACE_S, WATCHDOG_S
from inference_worker.message_processor import Job
from inference_worker.messages import KnownReply
from inference_worker.ports import Answer, Claimed, RunningElsewhere
from tests.store_contract import failure, reply
from tests.unit.worker_kit import EPOCH, FakeModel, Site, Worker, body, now, running
from tests.waiting import eventually

OTHER = Token("elsewhere")
FAR = EPOCH + 10_000.0


def loop_time() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture
async def site() -> Site:
    return Site()


@pytest.fixture(autouse=True)
def logged() -> Generator[list[EventDict]]:
    """What is logged; not rendered, which would cost more than the tests."""
    with capture_logs() as entries:
        yield entries


async def answered(site: Site, *request_ids: str, within: float = 600.0) -> None:
    """Wait until every request has a terminal result."""

    async def all_are() -> bool:
        return all([await site.store.read(name) is not None for name in request_ids or ("a",)])

    await eventually(all_are, within=within, what="the results", every=0.1)


async def state(worker: Worker, name: str, within: float = 60.0) -> None:
    await eventually(lambda: worker.listener.state == name, within=within, what=f"the state {name}", every=0.1)


def records(worker: Worker) -> list[tuple[str | None, str, int | None, int]]:
    return [(r.request_id, r.disposition, r.status_code, r.attempt) for r in worker.buffer.take()[0]]


# ---------------------------------------------------------------- the usual way


async def test_a_message_is_answered_billed_and_acknowledged_and_noted_once(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=2.0))
    await site.publish(body())
    async with running(worker):
        await answered(site)
        await eventually(lambda: not worker.listener.in_flight, within=1, what="it is settled")
        assert [entry.event for entry in await site.store.take(9)] == [b'{"id": "a", "tokens": 7, "attempt": 0}']
        assert not site.broker.ready

    result = await site.result()
    assert result is not None
    assert result["status"] == "completed"
    assert records(worker) == [("a", "ack", 200, 0)]
    assert worker.gauge("dispositions_total", disposition="ack") == 1
    assert worker.gauge("results_total", status="completed", error_code="none") == 1
    assert worker.gauge("output_tokens_total") == 4
    assert worker.gauge("model_seconds_count") == 1


async def test_no_more_messages_are_in_hand_than_the_limit(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=10.0), slots=2)
    names = [f"r-{n}" for n in range(6)]
    await site.publish(*(body(name) for name in names))
    async with running(worker):
        await worker.model.begun.wait()
        await asyncio.sleep(1.0)
        assert worker.listener.in_flight == 2
        await answered(site, *names)

    assert worker.model.most_at_once == 2
    assert loop_time() == pytest.approx(30.0, abs=1.0)


async def test_connections_are_warm_before_the_first_message(site: Site) -> None:
    worker = Worker(site, FakeModel())
    async with running(worker):
        await state(worker, "consuming")
        assert worker.model.warmed == 1


async def test_a_failure_that_may_pass_is_tried_again_until_it_passes(site: Site) -> None:
    worker = Worker(site, FakeModel(failures=[ModelCut("reset"), ModelCut("reset")]))
    await site.publish(body())
    async with running(worker):
        await answered(site)

    result = await site.result()
    assert result is not None
    assert (result["status"], result["attempt"]) == ("completed", 2)
    assert records(worker) == [("a", "retry", None, 0), ("a", "retry", None, 1), ("a", "ack", 200, 2)]
    assert worker.gauge("retries_total", fault="cut") == 2
    assert worker.gauge("results_total", status="failed", error_code="retries_exhausted") == 0


async def test_a_retry_waits_for_its_delay(site: Site) -> None:
    worker = Worker(site, FakeModel(failures=[ModelCut("reset")]), first_delay_s=8.0)
    await site.publish(body())
    async with running(worker):
        await answered(site)

    assert 4.0 <= loop_time() <= 9.0


async def test_with_its_retries_used_up_a_request_is_failed_and_parked(site: Site) -> None:
    worker = Worker(site, FakeModel(failures=[ModelCut("reset")] * 9), max_retries=2)
    await site.publish(body())
    async with running(worker):
        await answered(site)

    result = await site.result()
    assert result is not None
    assert (result["status_code"], result["error_code"], result["attempt"]) == (500, "retries_exhausted", 2)
    assert site.dead == ["retries_exhausted"]
    assert worker.model.calls == ["a"] * 3
    assert json.loads(site.store.notes["a"])["attempts"] == 3
    assert records(worker)[-1] == ("a", "dead_letter", 500, 2)
    assert worker.gauge("results_total", status="failed", error_code="retries_exhausted") == 1


@pytest.mark.parametrize(
    ("sent", "noted"),
    [
        pytest.param(b'{"request_id":"a"}', ("a", "dead_letter", 400, 0), id="under its id"),
        pytest.param(b"no", (None, "dead_letter", None, 0), id="without one"),
    ],
)
async def test_what_is_no_request_is_parked(
    site: Site, sent: bytes, noted: tuple[str | None, str, int | None, int]
) -> None:
    worker = Worker(site, FakeModel())
    await site.publish(sent)
    async with running(worker):
        await eventually(lambda: site.dead, within=5, what="it is parked")

    assert site.dead == ["invalid_request"]
    assert records(worker) == [noted]
    assert worker.model.calls == []


async def test_what_is_no_request_is_parked_also_where_its_id_has_an_answer(site: Site) -> None:
    """`finish`, whatever it returns, then reject."""
    worker = Worker(site, FakeModel())
    await site.store.write(reply(), None, OTHER)
    await site.publish(b'{"request_id":"a"}')
    async with running(worker):
        await eventually(lambda: site.dead, within=5, what="it is parked")

    result = await site.result()
    assert result is not None
    assert result["status"] == "completed"


async def test_what_is_no_request_is_parked_also_while_its_id_runs(site: Site) -> None:
    worker = Worker(site, FakeModel())
    await site.store.claim("a", 0, OTHER, FAR)
    await site.publish(b'{"request_id":"a"}')
    async with running(worker):
        await eventually(lambda: site.dead, within=5, what="it is parked")

    assert await site.result() is None


async def test_what_was_answered_before_is_acknowledged_and_not_called(site: Site) -> None:
    worker = Worker(site, FakeModel())
    await site.store.write(reply(), None, OTHER)
    await site.publish(body())
    async with running(worker):
        await eventually(lambda: len(worker.buffer), within=5, what="it is settled")

    assert records(worker) == [("a", "ack", 200, 0)]
    assert worker.model.calls == []
    assert worker.gauge("answered_from_store_total") == 1
    assert await site.store.size() == 0


async def test_what_was_exhausted_before_is_parked_since_its_reject_was_lost(site: Site) -> None:
    worker = Worker(site, FakeModel())
    await site.store.write(failure(attempt=0), None, OTHER)
    await site.publish(body())
    async with running(worker):
        await eventually(lambda: site.dead, within=5, what="it is parked")

    assert site.dead == ["retries_exhausted"]


async def test_what_is_superseded_is_acknowledged(site: Site) -> None:
    worker = Worker(site, FakeModel())
    await site.store.release("a", OTHER, 1)
    await site.publish(body())
    async with running(worker):
        await eventually(lambda: len(worker.buffer), within=5, what="it is settled")

    assert records(worker) == [("a", "ack", None, 0)]
    assert worker.model.calls == []


async def test_a_finished_request_is_one_line_without_its_content(site: Site, logged: list[EventDict]) -> None:
    """Also the model's own error text may quote the prompt."""
    refused = Answer(status_code=400, reason="no", body=b'{"message":"secret"}')
    worker = Worker(site, FakeModel(takes_s=2.0, failures=[refused]))
    await site.publish(body(payload=b'{"prompt":"secret"}'))
    async with running(worker):
        await answered(site)

    (line,) = [entry for entry in logged if entry["event"] == "request"]
    assert (line["request_id"], line["disposition"], line["status_code"], line["attempt"]) == ("a", "ack", 400, 0)
    assert line["error_code"] == "model_error"
    assert line["model_s"] == 2.0
    assert "secret" not in repr(logged)


async def test_a_reason_for_no_connection_is_one_warning_while_it_stays_the_same(
    site: Site, logged: list[EventDict]
) -> None:
    worker = Worker(site, FakeModel())
    worker.refusals = ["refused"] * 3 + ["credentials"] * 2
    async with running(worker):
        await state(worker, "consuming", within=300)

    assert [entry["reason"] for entry in logged if entry["log_level"] == "warning"] == ["refused", "credentials"]


# ---------------------------------------------------------------- what settling says


async def test_an_answer_that_was_there_first_decides(site: Site) -> None:
    worker = Worker(site, FakeModel())
    worker.settlements = [Known(reply=KnownReply(status="failed", status_code=500, attempt=0, error_code="poison"))]
    await site.publish(body())
    async with running(worker):
        await eventually(lambda: site.dead, within=5, what="it is parked")

    assert isinstance(worker.tried[0], Ack)
    assert isinstance(worker.tried[1], DeadLetter)
    assert site.dead == ["poison"]


async def test_a_failure_that_another_runner_forbids_waits_for_that_one(site: Site) -> None:
    worker = Worker(site, FakeModel())
    sent = body(timeout_s=5.0)
    await asyncio.sleep(6.0)
    await site.store.claim("a", 0, OTHER, FAR)
    await site.publish(sent)
    async with running(worker):
        await asyncio.sleep(5.0)
        assert worker.listener.in_flight == 1
        await site.store.write(reply(), None, OTHER)
        await eventually(lambda: len(worker.buffer), within=5, what="it is settled")

    assert records(worker) == [("a", "ack", 200, 0)]


async def test_a_stop_hands_back_what_waits_for_another_runner_past_its_deadline(site: Site) -> None:
    worker = Worker(site, FakeModel(), grace_s=25.0)
    sent = body(timeout_s=5.0)
    await asyncio.sleep(6.0)
    await site.store.claim("a", 0, OTHER, FAR)
    await site.publish(sent)
    worker.start()
    await asyncio.sleep(3.0)

    stopped_at = loop_time()
    await worker.ended()

    assert loop_time() - stopped_at <= 2.0
    assert len(site.broker.ready) == 1


async def test_a_copy_that_the_broker_never_takes_ends_the_request(site: Site) -> None:
    worker = Worker(site, FakeModel(failures=[ModelCut("reset")]))
    worker.settlements = [CopyRefused(reason="its headers are too large")]
    await site.publish(body())
    async with running(worker):
        await answered(site)

    result = await site.result()
    assert result is not None
    assert result["error_code"] == "retries_exhausted"
    assert str(result["error"]).endswith("it cannot be tried again: its headers are too large")
    assert site.dead == ["retries_exhausted"]
    assert isinstance(worker.tried[0], Republish)


async def test_a_settlement_of_an_unknown_kind_is_a_fault_of_ours(site: Site) -> None:
    worker = Worker(site, FakeModel())
    worker.settlements = [Busy(left_s=0.5)]
    await site.publish(body())
    async with running(worker):
        await answered(site)

    assert worker.model.calls == ["a", "a"]


# ---------------------------------------------------------------- our own bugs


async def test_a_fault_of_ours_sends_the_message_back_and_harms_no_other(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(site, FakeModel())
    processed = worker.processor.process

    async def process(job: Job) -> object:
        if job.delivery.body == b"bad":
            raise RuntimeError("a bug")
        return await processed(job)

    monkeypatch.setattr(worker.processor, "process", process)
    await site.publish(b"bad", body())
    async with running(worker):
        await answered(site, within=5)
        await asyncio.sleep(10.0)
        sent_back = [tried for tried in worker.tried if isinstance(tried, Nack)]
        assert 5 <= len(sent_back) <= 11, "once a second, not in a frenzy"


async def test_a_message_that_provokes_a_bug_of_ours_ends_as_poison(site: Site) -> None:
    """Its claim is not released: that counts as a crash."""
    worker = Worker(site, FakeModel(failures=[RuntimeError("a bug")] * 9), max_crashes=3)
    await site.publish(body())
    async with running(worker):
        await answered(site)

    result = await site.result()
    assert result is not None
    assert result["error_code"] == "poison"
    assert site.dead == ["poison"]
    assert worker.model.calls == ["a"] * 3


async def test_a_job_that_cannot_even_be_sent_back_is_logged_and_lost_to_nobody(site: Site) -> None:
    worker = Worker(site, FakeModel(failures=[RuntimeError("a bug")]))
    worker.settle_fails = [TransportLost("gone")]
    await site.publish(body())
    async with running(worker):
        await worker.model.begun.wait()
        await asyncio.sleep(3.0)
        assert worker.listener.in_flight == 0
        worker.cut()
        await answered(site)


# ---------------------------------------------------------------- suspension


async def test_nothing_is_taken_before_model_and_store_were_seen(site: Site) -> None:
    worker = Worker(site, FakeModel(), model_ok=False)
    worker.store.away = "starting"
    await site.publish(body())
    async with running(worker):
        await state(worker, "suspended")
        assert set(worker.listener.suspended) == {"model", "store"}
        worker.model_health.report(True)
        await asyncio.sleep(5.0)
        assert worker.model.calls == []
        worker.store.away = None
        await answered(site)

    assert worker.gauge("suspended", reason="store") == 0


@pytest.mark.parametrize("reason", ["model", "store", "operator", "kept"])
async def test_any_reason_stops_the_flow_and_running_calls_finish(site: Site, reason: str) -> None:
    worker = Worker(site, FakeModel(takes_s=10.0))
    await site.publish(body("a"))
    async with running(worker):
        await worker.model.begun.wait()
        worker.listener.suspend_consuming(reason, "said the test")  # type: ignore[arg-type]  # One of the literals.
        await state(worker, "suspended")
        await site.publish(body("b"))
        await answered(site, "a")
        await asyncio.sleep(30.0)
        assert worker.listener.state == "suspended"
        assert worker.model.calls == ["a"]
        assert worker.gauge("suspended", reason=reason) == 1
        worker.listener.resume_consuming(reason)  # type: ignore[arg-type]  # One of the literals.
        await answered(site, "b")

    assert len(worker.connects) == 1


async def test_a_reason_that_is_given_twice_is_taken_back_once(site: Site) -> None:
    worker = Worker(site, FakeModel())
    async with running(worker):
        worker.listener.suspend_consuming("operator", "one")
        worker.listener.suspend_consuming("operator", "two")
        await state(worker, "suspended")
        assert worker.listener.suspended["operator"] == "two"
        worker.listener.resume_consuming("operator")
        worker.listener.resume_consuming("operator")
        await state(worker, "consuming")


async def test_a_model_that_is_gone_stops_the_flow_before_the_copy_is_published(site: Site) -> None:
    """Else this worker would burn all retries by itself."""
    worker = Worker(site, FakeModel(failures=[ModelGone("refused")]), max_retries=1)

    async def check_now(within_s: float) -> bool:
        worker.model_health.report(False, "refused")
        await asyncio.sleep(0.01)  # A broker is not in this process: a copy takes its time to come round.
        return False

    worker.model_health.check_now = check_now  # type: ignore[method-assign]  # The test is the checker.
    await site.publish(body())
    async with running(worker):
        await state(worker, "suspended")
        await asyncio.sleep(20.0)
        assert len(site.broker.ready) == 1
        assert worker.model.calls == ["a"]
        worker.model_health.report(True)
        await answered(site)

    result = await site.result()
    assert result is not None
    assert result["status"] == "completed"


async def test_a_store_that_was_never_there_is_told_once_and_with_its_reason(site: Site) -> None:
    """A wrong REDIS_URL: without it a worker would wait in silence, for a store that was "not asked yet"."""
    worker = Worker(site, FakeModel())
    worker.store.away = "connection refused"
    with capture_logs() as lines:
        async with running(worker):
            await state(worker, "suspended")
            await asyncio.sleep(10.0)
            assert worker.listener.suspended["store"] == "connection refused"

    warned = [line["reason"] for line in lines if line["log_level"] == "warning"]
    assert warned == ["connection refused"]


async def test_a_store_that_goes_away_is_seen_by_an_idle_worker(site: Site) -> None:
    """So that a message is not passed round all replicas in an outage."""
    worker = Worker(site, FakeModel())
    async with running(worker):
        await state(worker, "consuming")
        worker.store.away = "gone"
        await state(worker, "suspended", within=2)
        await site.publish(body())
        await asyncio.sleep(60.0)
        assert [name for name, _ in worker.store.asked if name != "probe"] == []
        worker.store.away = None
        await answered(site, within=3)


async def test_a_look_at_the_store_can_be_had_at_once(site: Site) -> None:
    worker = Worker(site, FakeModel())
    async with running(worker):
        await state(worker, "consuming")
        before = loop_time()

        assert await worker.store_health.check_now(5.0)

        assert loop_time() == before


async def test_memory_that_is_full_stops_the_flow_until_half_is_free(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=10.0), slots=10, budget_bytes=250)
    names = [f"r-{n}" for n in range(8)]
    bodies = [body(name) for name in names]
    assert len(bodies[0]) < 125
    await site.publish(*bodies)
    async with running(worker):
        await state(worker, "suspended")
        assert "memory" in worker.listener.suspended
        await answered(site, *names)
        await state(worker, "consuming")

    assert worker.model.most_at_once == 250 // len(bodies[0]) + 1


async def test_messages_flow_again_once_half_of_the_memory_is_free(site: Site) -> None:
    """Not before: else each answer would let one message in, and consuming would begin and end all the time."""

    class Staggered(FakeModel):
        async def infer(self, **asked: Any) -> Answer:
            self.takes_s += 10.0
            return await super().infer(**asked)

    bodies = [body(f"r-{n}") for n in range(6)]
    worker = Worker(site, Staggered(), slots=10, budget_bytes=len(bodies[0]) * 4)
    await site.publish(*bodies)
    async with running(worker):
        await asyncio.sleep(19.0)
        assert len(worker.model.calls) == 4
        assert worker.listener.state == "suspended"
        await asyncio.sleep(2.0)
        assert len(worker.model.calls) == 6
        await answered(site, *(f"r-{n}" for n in range(6)))


# ---------------------------------------------------------------- answers that wait for the store


@pytest.fixture
async def keeping(site: Site) -> AsyncGenerator[Worker]:
    """A worker whose store went away during the call, until it had to hand the message back."""
    worker = Worker(site, FakeModel(takes_s=5.0), slots=2, store_patience_s=3.0)
    await site.publish(body())
    worker.start()
    await worker.model.begun.wait()
    worker.store.away = "gone"
    await eventually(lambda: site.broker.ready, within=30, what="the message was handed back")
    yield worker
    worker.store.away = None
    await worker.ended()


async def test_an_answer_that_could_not_be_stored_is_kept_and_its_message_handed_back(keeping: Worker) -> None:
    assert set(keeping.listener.suspended) == {"store", "kept"}
    assert keeping.listener.in_flight == 1
    assert keeping.gauge("kept_results") == 1
    assert records(keeping) == [("a", "requeue", None, 0)]


async def test_a_kept_answer_is_stored_before_anything_is_consumed_and_not_made_twice(
    site: Site, keeping: Worker
) -> None:
    keeping.store.away = None

    await answered(site, within=5)
    await eventually(lambda: not site.broker.ready, within=5, what="the message is settled")

    assert keeping.model.calls == ["a"]
    assert await site.store.size() == 1
    assert keeping.gauge("kept_results") == 0


async def test_a_kept_answer_yields_to_one_that_came_first(site: Site, keeping: Worker) -> None:
    await site.store.write(reply(status_code=201), None, OTHER)
    keeping.store.away = None

    await eventually(lambda: not keeping.listener.suspended, within=5, what="it consumes again")

    result = await site.result()
    assert result is not None
    assert result["status_code"] == 201
    assert await site.store.size() == 0


@pytest.mark.parametrize("back", [True, False])
async def test_a_stop_tries_a_kept_answer_once_more(site: Site, keeping: Worker, back: bool) -> None:
    await asyncio.sleep(0.5)
    keeping.store.asked.clear()
    keeping.stop.set()
    if back:
        keeping.store.away = None
    assert keeping.task is not None
    await keeping.task

    assert (await site.result() is not None) is back
    assert len(site.broker.ready) == 1


async def test_several_kept_answers_are_all_stored_before_consuming_resumes(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=5.0), slots=2, store_patience_s=3.0)
    await site.publish(body("a"), body("b"))
    async with running(worker):
        await worker.model.begun.wait()
        worker.store.away = "gone"
        await eventually(lambda: len(site.broker.ready) == 2, within=30, what="both were handed back")
        assert worker.gauge("kept_results") == 2
        worker.store.away = None
        await answered(site, "a", "b", within=5)

    assert worker.model.calls == ["a", "b"]


async def test_a_kept_failure_parks_its_message_on_redelivery(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=5.0, failures=[ModelCut("reset")]), max_retries=0, store_patience_s=3.0)
    await site.publish(body())
    async with running(worker):
        await worker.model.begun.wait()
        worker.store.away = "gone"
        await eventually(lambda: site.broker.ready, within=30, what="the message was handed back")
        worker.store.away = None
        await eventually(lambda: site.dead, within=10, what="it is parked")

    assert site.dead == ["retries_exhausted"]
    assert worker.model.calls == ["a"]


async def test_an_answer_is_kept_also_when_its_delivery_is_lost(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=5.0), store_patience_s=3.0)
    await site.publish(body())
    async with running(worker):
        await worker.model.begun.wait()
        worker.store.away = "gone"
        worker.cut()
        await asyncio.sleep(60.0)
        assert worker.gauge("kept_results") == 1
        worker.store.away = None
        await answered(site, within=5)

    assert worker.model.calls == ["a"]
    assert worker.gauge("results_total", status="completed", error_code="none") == 1


async def test_what_is_no_request_goes_back_while_the_store_is_away(site: Site) -> None:
    worker = Worker(site, FakeModel(), store_patience_s=3.0)
    worker.store.away_for = {"write"}
    worker.store.away = "gone"
    await site.publish(b'{"request_id":"a"}')
    async with running(worker):
        await eventually(
            lambda: any(isinstance(tried, Nack) for tried in worker.tried), within=20, what="it goes back", every=0.5
        )
        assert worker.gauge("kept_results") == 0
        worker.store.away = None
        await eventually(lambda: site.dead, within=20, what="it is parked")


async def test_a_short_outage_at_the_end_is_waited_out(site: Site) -> None:
    worker = Worker(site, FakeModel())
    worker.settlements = [StoreSilent(), StoreSilent()]
    await site.publish(body())
    async with running(worker):
        await answered(site)

    assert worker.model.calls == ["a"]
    assert [type(tried) for tried in worker.tried] == [Ack, Ack, Ack]


# ---------------------------------------------------------------- the link


async def test_pauses_between_failed_connections_double_up_to_30_s(site: Site) -> None:
    worker = Worker(site, FakeModel())
    worker.refusals = ["refused"] * 7
    async with running(worker):
        await state(worker, "consuming", within=300)

    gaps = [later - earlier for earlier, later in zip(worker.connects, worker.connects[1:], strict=False)]
    assert gaps == pytest.approx([1, 2, 4, 8, 16, 30, 30], abs=0.01)


async def test_a_session_that_had_lasted_begins_the_pauses_anew(site: Site) -> None:
    worker = Worker(site, FakeModel())
    worker.refusals = ["refused"] * 3
    async with running(worker):
        await state(worker, "consuming", within=300)
        await asyncio.sleep(100.0)
        cut_at = loop_time()
        worker.cut()
        await eventually(lambda: len(worker.connects) == 5, within=10, what="it connects again", every=0.1)
        assert worker.connects[4] - cut_at == pytest.approx(1.0)
        assert worker.gauge("reconnects_total") == 1


async def test_why_there_is_no_connection_is_told_for_as_long_as_there_is_none(site: Site) -> None:
    worker = Worker(site, FakeModel())
    worker.refusals = ["refused"]
    assert worker.listener.link_reason == "not connected yet"
    async with running(worker):
        await asyncio.sleep(0.5)
        assert worker.listener.link_reason == "refused"
        assert worker.listener.transport is None
        assert worker.gauge("up", peer="broker") == 0
        await state(worker, "consuming")
        assert worker.listener.link_reason == ""
        assert worker.listener.transport is not None
        assert worker.gauge("up", peer="broker") == 1
        worker.cut("cut by the broker")
        assert worker.listener.transport is None
        await asyncio.sleep(0.5)
        assert worker.listener.link_reason == "cut by the broker"


async def test_a_lost_connection_does_not_stop_the_calls_that_run(site: Site) -> None:
    """Their answers are stored, and the redelivered message finds them."""
    worker = Worker(site, FakeModel(takes_s=20.0))
    await site.publish(body())
    async with running(worker):
        await worker.model.begun.wait()
        worker.cut()
        await answered(site)
        await eventually(
            lambda: not site.broker.ready and not worker.listener.in_flight, within=9, what="all is settled"
        )

    assert worker.model.calls == ["a"]
    assert worker.model.closed == []
    assert records(worker) == [("a", "ack", 200, 0)]


async def test_calls_in_flight_never_exceed_the_limit_over_a_lost_connection(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=20.0), slots=2)
    names = [f"r-{n}" for n in range(4)]
    await site.publish(*(body(name) for name in names))
    async with running(worker):
        await worker.model.begun.wait()
        await asyncio.sleep(1.0)
        worker.cut()
        await answered(site, *names)

    assert worker.model.most_at_once == 2
    assert sorted(worker.model.calls) == names


async def test_a_lost_delivery_that_may_be_tried_again_is_left_to_the_broker(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=20.0, failures=[ModelCut("reset")]))
    await site.publish(body())
    async with running(worker):
        await worker.model.begun.wait()
        worker.cut()
        await answered(site)

    assert worker.model.calls == ["a", "a"]
    result = await site.result()
    assert result is not None
    assert result["attempt"] == 0, "losing the link is no attempt"


async def test_a_consumer_that_looks_alive_and_gets_nothing_is_replaced(site: Site) -> None:
    worker = Worker(site, FakeModel())
    async with running(worker):
        await state(worker, "consuming")
        worker.cut()
        worker.deaf = True
        await eventually(lambda: len(worker.connects) == 2, within=5, what="the second session")
        await site.publish(body())
        begun = loop_time()
        await eventually(lambda: len(worker.connects) == 3, within=200, what="the third session", every=0.5)
        worker.deaf = False
        assert loop_time() - begun <= 2 * WATCHDOG_S + 5
        await answered(site)


async def test_a_consumer_is_not_dead_that_gets_nothing_as_a_gate_keeps_it_in_its_queue(site: Site) -> None:
    worker = Worker(site, FakeModel())
    worker.deaf = worker.withholds = True
    await site.publish(body())
    async with running(worker):
        await asyncio.sleep(20 * WATCHDOG_S)
        assert len(worker.connects) == 1
        assert worker.gauge("queue_ready_messages") == 1
        worker.withholds = False
        await eventually(lambda: len(worker.connects) == 2, within=200, what="the second session", every=0.5)
        worker.deaf = False
        await answered(site)


async def test_an_idle_queue_is_no_dead_consumer(site: Site) -> None:
    worker = Worker(site, FakeModel())
    async with running(worker):
        await asyncio.sleep(20 * WATCHDOG_S)
        assert len(worker.connects) == 1
        assert worker.gauge("queue_ready_messages") == 0


async def test_a_busy_worker_is_no_dead_consumer(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=110.0), slots=1)
    await site.publish(body("a"), body("b"), body("c"))
    async with running(worker):
        await answered(site, "a", "b", "c")

    assert len(worker.connects) == 1


# ---------------------------------------------------------------- the end


async def test_a_stop_lets_what_runs_finish_and_takes_nothing_new(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=10.0), slots=1)
    await site.publish(body("a"), body("b"))
    worker.start()
    await worker.model.begun.wait()
    await worker.ended()

    assert loop_time() == pytest.approx(10.0, abs=0.1)
    assert worker.model.calls == ["a"]
    assert await site.result("a") is not None
    assert len(site.broker.ready) == 1
    assert worker.listener.state == "stopped"


async def test_what_does_not_finish_within_the_grace_is_closed_released_and_handed_back(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=100.0), grace_s=25.0)
    await site.publish(body())
    worker.start()
    await worker.model.begun.wait()
    await worker.ended()

    assert loop_time() == pytest.approx(25.0, abs=0.5)
    assert worker.model.closed == ["a"]
    assert [message.attempts for message in site.broker.ready] == [0]
    assert await site.store.claim("a", 0, OTHER, FAR) == Claimed(starts=1)
    assert records(worker) == [("a", "requeue", None, 0)]


async def test_a_claim_that_is_being_released_is_not_renewed(site: Site) -> None:
    """A renewal takes what nobody holds: the next runner would wait for a whole lease."""
    worker = Worker(site, FakeModel(takes_s=100.0), grace_s=24.5)
    await site.publish(body())
    worker.start()
    await worker.model.begun.wait()
    worker.store.takes_s["release"] = 1.0  # Done at 24.5, known at 25.5; renewals come every 5 s.
    await worker.ended()

    assert worker.store.count("renew") == 4
    assert await site.store.claim("a", 0, OTHER, FAR) == Claimed(starts=1)


async def test_what_has_not_begun_is_handed_back_at_once(site: Site) -> None:
    worker = Worker(site, FakeModel(), grace_s=25.0)
    await site.store.claim("a", 0, OTHER, FAR)
    await site.publish(body())
    worker.start()
    await asyncio.sleep(3.0)
    await worker.ended()

    assert loop_time() == 3.0
    assert len(site.broker.ready) == 1
    assert isinstance(await site.store.claim("a", 0, Token("x"), FAR), RunningElsewhere)


@pytest.mark.parametrize("takes_s", [0.0, 1000.0])
async def test_a_stop_does_not_wait_for_a_connection(site: Site, takes_s: float) -> None:
    """Neither for the pause between two tries nor for one that is being opened."""
    worker = Worker(site, FakeModel())
    worker.refusals = ["refused"] * 9
    worker.connect_takes_s = takes_s
    worker.start()
    await asyncio.sleep(10.0)
    await worker.ended()

    assert loop_time() == 10.0
    assert worker.listener.state == "stopped"


async def test_a_stop_without_a_connection_lets_what_runs_finish(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=10.0))
    await site.publish(body())
    worker.start()
    await worker.model.begun.wait()
    worker.refusals = ["refused"] * 9
    worker.cut()
    await asyncio.sleep(1.0)
    await worker.ended()

    assert loop_time() == pytest.approx(10.0, abs=0.1)
    assert await site.result() is not None


async def test_a_stop_while_suspended_is_at_once(site: Site) -> None:
    worker = Worker(site, FakeModel(), model_ok=False)
    worker.start()
    await state(worker, "suspended")
    begun = loop_time()
    await worker.ended()

    assert loop_time() == begun


async def test_the_grace_counts_from_the_moment_of_being_told(site: Site) -> None:
    """Also where the end of the session takes its time."""
    worker = Worker(site, FakeModel(takes_s=100.0), grace_s=5.0)
    await site.publish(body())
    worker.start()
    await worker.model.begun.wait()
    await asyncio.sleep(7.0)
    await worker.ended()

    assert loop_time() == pytest.approx(12.0, abs=0.5)


async def test_a_store_that_hangs_does_not_hold_up_the_end(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=100.0), grace_s=5.0)
    await site.publish(body())
    worker.start()
    await worker.model.begun.wait()
    worker.store.takes_s["release"] = 1000.0
    await worker.ended()

    assert loop_time() <= 5.0 + 5 * AFTER_GRACE_S
    assert len(site.broker.ready) == 1


@pytest.mark.parametrize("for_good", [True, False])
async def test_a_settlement_that_hangs_does_not_hold_up_the_end(site: Site, for_good: bool) -> None:
    """It is broken off and the message handed back; where that hangs, too, closing the connection gives it back."""
    worker = Worker(site, FakeModel(), grace_s=5.0)
    worker.settle_takes_s = 1000.0
    await site.publish(body())
    worker.start()
    await eventually(lambda: worker.tried, within=5, what="it is being settled")
    if not for_good:
        worker.settle_takes_s = 0.0
    await worker.ended()

    assert loop_time() <= 5.0 + 5 * AFTER_GRACE_S
    assert len(site.broker.ready) == 1
    assert worker.listener.in_flight == 0


async def test_an_answer_at_the_end_of_the_grace_with_the_store_away_is_given_up(site: Site) -> None:
    worker = Worker(site, FakeModel(takes_s=4.0), grace_s=5.0, store_patience_s=60.0)
    await site.publish(body())
    worker.start()
    await worker.model.begun.wait()
    worker.store.away = "gone"
    await worker.ended()

    assert loop_time() <= 5.0 + 3 * AFTER_GRACE_S
    assert len(site.broker.ready) == 1


async def test_a_cancelled_listener_hands_back_what_it_has(site: Site) -> None:
    """The emergency: no grace, and still nothing is lost."""
    worker = Worker(site, FakeModel(takes_s=100.0))
    await site.publish(body())
    worker.start()
    await worker.model.begun.wait()
    assert worker.task is not None
    worker.task.cancel()
    await asyncio.wait([worker.task])

    assert worker.model.closed == ["a"]
    assert len(site.broker.ready) == 1
    assert await site.store.claim("a", 0, OTHER, FAR) == Claimed(starts=1)


async def test_an_error_of_ours_in_the_session_ends_the_worker_and_hands_everything_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(site, FakeModel(takes_s=100.0))
    await site.publish(body())
    worker.start()
    await worker.model.begun.wait()

    async def broken(connections: int) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(worker.listener, "_warm", broken)
    worker.listener.suspend_consuming("operator")
    await asyncio.sleep(1.0)
    worker.listener.resume_consuming("operator")
    assert worker.task is not None
    with pytest.raises(ExceptionGroup) as raised:
        await worker.task
    assert raised.group_contains(RuntimeError, match="a bug")

    assert len(site.broker.ready) == 1


@pytest.mark.parametrize("stop_first", [True, False])
async def test_a_cut_during_the_drain_loses_nothing(site: Site, stop_first: bool) -> None:
    worker = Worker(site, FakeModel(takes_s=10.0))
    await site.publish(body())
    worker.start()
    await worker.model.begun.wait()
    if stop_first:
        worker.stop.set()
        await asyncio.sleep(1.0)
        worker.cut()
    else:
        worker.cut()
        worker.stop.set()
    await worker.ended()

    assert await site.result() is not None
    assert len(site.broker.ready) == 1
    assert worker.settled == [DeliveryLost(stored=True)]


async def test_requests_whose_runner_died_run_one_at_a_time_beside_the_others(site: Site) -> None:
    """Bug report B46: a poison must not take its innocent neighbours along a second time."""
    for name in ("a", "b"):
        await site.store.claim(name, 0, Token(f"dead-{name}"), now() + 600)
    await asyncio.sleep(site.lease_s + 1)
    await site.publish(*[body(name) for name in ("a", "b", "c")])
    worker = Worker(site, FakeModel(takes_s=5.0), slots=4)
    async with running(worker):
        await eventually(lambda: len(worker.model.calls) == 2, within=10, what="two calls", every=0.1)
        assert sorted(worker.model.calls) == ["a", "c"]
        await answered(site, "a", "b", "c")

    assert worker.model.calls.count("b") == 1
    assert worker.model.most_at_once == 2
    assert worker.store.count("claim") <= 4, "one that waits for its turn does not claim again and again"
