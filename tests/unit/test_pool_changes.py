"""A pool that gets another gate, or more or fewer slots, while it works: calls that run are not interrupted."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from inference_worker.gates.basic import Constant, LocalMaxConcurrency
from inference_worker.gates.combined import WaitOnRefuse
from inference_worker.message_processor import Job
from inference_worker.pool_gate import PoolGate
from inference_worker.ports import Admitted, Asked, Dropped, Gate, Health, Parked, Verdict
from tests.unit.gate_kit import RecordedPermit
from tests.unit.worker_kit import FakeModel, Site, Worker, body, running
from tests.waiting import eventually


class Says:
    """One verdict for all."""

    def __init__(self, verdict: Callable[[], Verdict]) -> None:
        self._verdict = verdict
        self.asked = 0

    def budget(self) -> float:
        return 1.0

    async def admit(self, asked: Asked) -> Verdict:
        self.asked += 1
        return self._verdict()

    async def run(self, until: asyncio.Event) -> None:
        return

    def closes_at(self) -> str:
        return "-"


class Slow(Says):
    """Takes its time, and heeds no cancellation."""

    async def admit(self, asked: Asked) -> Verdict:
        self.asked += 1
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(5.0)
        return self._verdict()


class Counts:
    """What is told of a gate."""

    def __init__(self) -> None:
        self.decisions: list[str] = []
        self.here = 0

    def decided(self, reason: str) -> None:
        self.decisions.append(reason)

    def waiting(self, change: int) -> None:
        self.here += change


def closed() -> Verdict:
    return Parked(within_s=3600.0)


# ---------------------------------------------------------------- gates


@pytest.mark.parametrize("after", [Constant(), None], ids=["an open one", "none"])
async def test_who_waits_at_a_gate_is_asked_anew_by_the_one_that_takes_its_place(after: Gate | None) -> None:
    site, told = Site(), Counts()
    gate = PoolGate(Says(closed), random.Random(3), told=told)
    async with running(Worker(site, FakeModel(), gate=gate)):
        await site.publish(body("a"))
        await eventually(lambda: told.here == 1, within=10, what="it waits")

        gate.replace(after)
        await eventually(lambda: site.result("a"), within=1, what="its result")

    assert (told.decisions, told.here) == (["gate_closed"], 0)


async def test_a_gate_may_come_to_stand_where_there_was_none() -> None:
    site = Site()
    gate = PoolGate(None, random.Random(3))
    async with running(Worker(site, FakeModel(), gate=gate)):
        gate.replace(Says(lambda: Dropped(status_code=None, error_code="gate_dropped", error="no")))
        await site.publish(body("a"))
        await eventually(lambda: site.result("a"), within=10, what="its result")

        assert (await site.result("a") or {})["error_code"] == "gate_dropped"


async def test_who_waits_and_is_asked_anew_is_told_of_once() -> None:
    site, told, second = Site(), Counts(), Says(closed)
    gate = PoolGate(Says(closed), random.Random(3), told=told)
    async with running(Worker(site, FakeModel(), gate=gate)):
        await site.publish(body("a"))
        await eventually(lambda: told.here == 1, within=10, what="it waits")
        gate.replace(second)
        await eventually(lambda: second.asked == 1, within=10, what="it is asked anew")
        assert told.here == 1
        gate.replace(None)
        await eventually(lambda: site.result("a"), within=10, what="its result")

    assert (told.decisions, told.here) == (["gate_closed"], 0)


async def test_what_the_old_gate_admitted_is_given_back_to_it_and_not_to_the_new_one() -> None:
    site, old, new = Site(), LocalMaxConcurrency(2), LocalMaxConcurrency(2)
    gate = PoolGate(WaitOnRefuse(old), random.Random(3))
    model = FakeModel(takes_s=10.0)
    worker = Worker(site, model, gate=gate)
    async with running(worker):
        await site.publish(body("a"))
        await eventually(lambda: len(model.calls) == 1, within=10, what="it is called")
        gate.replace(WaitOnRefuse(new))
        await site.publish(body("b"))
        await eventually(lambda: len(model.calls) == 2, within=10, what="the other is called")
        assert (old.budget(), new.budget()) == (0.5, 0.5)
        settled = asyncio.create_task(worker.listener.settled())
        await eventually(lambda: site.result("a"), within=30, what="its result")
        assert old.budget() == 1.0
        await settled

    assert new.budget() == 1.0


async def test_an_answer_of_the_old_gate_that_comes_too_late_is_given_back() -> None:
    site = Site()
    permit = RecordedPermit("old", [])
    gate = PoolGate(Slow(lambda: Admitted(permits=(permit,))), random.Random(3))
    async with running(Worker(site, FakeModel(), gate=gate)):
        await site.publish(body("a"))
        await asyncio.sleep(1.0)
        gate.replace(None)
        await eventually(lambda: site.result("a"), within=10, what="its result")

    assert [seen.kind for seen in permit.seen] == ["not_sent"]


# ---------------------------------------------------------------- slots


async def test_more_slots_are_used_at_once_and_no_call_is_interrupted() -> None:
    site, model = Site(), FakeModel(takes_s=20.0)
    worker = Worker(site, model, slots=2)
    async with running(worker):
        await site.publish(*(body(f"r{n}") for n in range(6)))
        await eventually(lambda: len(model.calls) == 2, within=10, what="two run")
        before = worker.views[-1].connections

        worker.listener.resize(5)
        await eventually(lambda: len(model.calls) == 5, within=1, what="five run")

        assert model.closed == []
        assert worker.views[-1].connections is before, "the session is the same"
        assert (worker.listener.calls, worker.metrics.registry.get_sample_value("inference_worker_slots")) == (5, 5)


async def test_fewer_slots_hold_once_the_calls_that_run_have_ended() -> None:
    site, model = Site(), FakeModel(takes_s=20.0)
    worker = Worker(site, model, slots=4)
    async with running(worker):
        await site.publish(*(body(f"r{n}") for n in range(8)))
        await eventually(lambda: len(model.calls) == 4, within=10, what="four run")

        worker.listener.resize(1)
        await asyncio.sleep(10.0)
        assert (len(model.calls), worker.listener.calls, model.closed) == (4, 4, [])
        await asyncio.sleep(20.0)

        assert (len(model.calls), worker.listener.calls) == (5, 1)
        await eventually(lambda: len(model.calls) == 8, within=300, what="all of them are called")
        await asyncio.sleep(21.0)
    assert all([await site.result(f"r{n}") for n in range(8)])
    assert worker.listener.calls == 0


async def test_what_waits_for_a_slot_has_one_as_soon_as_there_are_more_and_none_while_there_are_too_few() -> None:
    site, model = Site(), FakeModel(takes_s=20.0)
    processor = (worker := Worker(site, model, slots=2)).processor
    async with asyncio.TaskGroup() as group:
        jobs = [worker.job(body(f"r{n}")) for n in range(4)]

        async def run(job: Job) -> None:
            await processor.process(job)
            processor.forget(job)

        for job in jobs:
            group.create_task(run(job))
        await asyncio.sleep(1.0)
        processor.resize(3)
        await asyncio.sleep(1.0)
        assert len(model.calls) == 3

        processor.resize(1)
        await asyncio.sleep(10.0)
        assert (len(model.calls), processor.calls) == (3, 3)
        await asyncio.sleep(8.5)
        assert (len(model.calls), processor.calls) == (3, 1)
        await asyncio.sleep(2.0)
        assert (len(model.calls), processor.calls) == (4, 1)


async def test_while_the_model_is_tried_again_it_is_one_call_whatever_the_slots() -> None:
    site, model = Site(), FakeModel(takes_s=5.0)
    worker = Worker(site, model, slots=4, breaker_failures=2)
    async with running(worker):
        worker.listener.breaker.state = "trying"
        worker.listener._changed.set()
        worker.listener.resize(8)
        await site.publish(*(body(f"r{n}") for n in range(4)))
        await asyncio.sleep(4.0)

        assert len(model.calls) == 1


# ---------------------------------------------------------------- health


def test_who_begins_to_watch_late_is_told_how_it_stands_and_who_has_left_is_not() -> None:
    health = Health("store")
    early: list[bool] = []
    late: list[bool] = []

    def heard_early(ok: bool, _: str) -> None:
        early.append(ok)

    def heard_late(ok: bool, _: str) -> None:
        late.append(ok)

    health.watch(heard_early)
    health.report(True)
    health.watch(heard_late)
    health.unwatch(heard_early)
    health.unwatch(heard_early)
    health.report(False)

    assert (early, late) == ([True], [True, False])
