"""What a worker tells its fleet, and when it idles because it is not wanted."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from inference_worker.errors import StoreUnavailable
from inference_worker.fleet_reporter import BEAT_S, WISH_HOLDS_S, FleetReporter, number_of
from inference_worker.metrics import Suspension
from inference_worker.ports import Beat, LinkState
from inference_worker.results.fleet import MemoryFleet
from inference_worker.throughput import Throughput
from inference_worker.timing import ended
from tests.unit.worker_kit import FakeModel, Site, Worker, body, now, running


@dataclass
class Consumer:
    """The listener as its fleet sees it."""

    state: LinkState = "consuming"
    suspended: dict[Suspension, str] = field(default_factory=dict)
    throughput: Throughput = field(default_factory=Throughput)
    in_flight: int = 0
    changes: list[str] = field(default_factory=list)

    def suspend_consuming(self, reason: Suspension, why: str = "") -> None:
        self.suspended[reason] = why
        self.changes.append(f"-{reason}")

    def resume_consuming(self, reason: Suspension) -> None:
        if self.suspended.pop(reason, None) is not None:
            self.changes.append(f"+{reason}")


class FaultyFleet(MemoryFleet):
    """One whose store can be away."""

    away = False

    async def beat(self, beat: Beat) -> int | None:
        if self.away:
            raise StoreUnavailable("away")
        return await super().beat(beat)

    async def leave(self, replica_id: str) -> None:
        if self.away:
            await asyncio.Event().wait()
        await super().leave(replica_id)


def reporter(
    fleet: MemoryFleet, consumer: Consumer | None = None, *, replica_id: str = "worker-3", stopping: bool = False
) -> FleetReporter:
    return FleetReporter(
        fleet,
        consumer or Consumer(),
        replica_id=replica_id,
        slots=4,
        model="tiny",
        stopping=lambda: stopping,
        now=now,
    )


@asynccontextmanager
async def beating(one: FleetReporter) -> AsyncGenerator[asyncio.Event]:
    until = asyncio.Event()
    task = asyncio.create_task(one.run(until))
    try:
        await asyncio.sleep(0)
        yield until
    finally:
        await ended(task)


async def only(fleet: MemoryFleet) -> Beat:
    (beat,) = await fleet.members()
    return beat


async def test_a_worker_says_how_it_is_at_once_and_again_every_two_seconds() -> None:
    fleet, consumer = MemoryFleet(now=now), Consumer(in_flight=1)

    async with beating(reporter(fleet, consumer)):
        await asyncio.sleep(0.1)
        first = await only(fleet)
        consumer.in_flight = 2
        await asyncio.sleep(BEAT_S)
        second = await only(fleet)

    assert (first.in_flight, second.in_flight) == (1, 2)
    assert second.at - first.at == pytest.approx(BEAT_S)


async def test_a_worker_that_ends_is_gone_from_its_fleet_at_once() -> None:
    fleet = MemoryFleet(now=now)

    async with beating(reporter(fleet)) as until:
        until.set()
        await asyncio.sleep(0.1)

    assert await fleet.members() == []


async def test_a_silent_store_does_not_hold_up_the_end() -> None:
    fleet, until = FaultyFleet(now=now), asyncio.Event()
    fleet.away = True
    until.set()

    async with asyncio.timeout(2):
        await reporter(fleet).run(until)


@pytest.mark.parametrize(
    ("suspended", "stopping", "fit"),
    [
        pytest.param({}, False, True, id="nothing speaks against it"),
        pytest.param({"scale": ""}, False, True, id="one that is not wanted would work"),
        pytest.param({"memory": ""}, False, True, id="one that is full has work"),
        pytest.param({"model": ""}, False, False, id="its model is ill"),
        pytest.param({"store": "", "kept": ""}, False, False, id="its store is away"),
        pytest.param({"operator": ""}, False, False, id="an operator paused it"),
        pytest.param({"breaker": ""}, False, False, id="its model fails everything"),
        pytest.param({}, True, False, id="it is stopping"),
    ],
)
async def test_fit_is_who_would_work_if_wanted(suspended: dict[Suspension, str], stopping: bool, fit: bool) -> None:
    fleet = MemoryFleet(now=now)
    await fleet.want(9, 60)

    consumer = Consumer(suspended={**suspended})
    async with beating(reporter(fleet, consumer, replica_id="replica", stopping=stopping)):
        await asyncio.sleep(0.1)
        beat = await only(fleet)

    assert beat.fit is fit


@pytest.mark.parametrize(
    ("replica_id", "number"),
    [
        ("worker-1", 1),
        ("iw-worker-12", 12),
        ("worker-0", None),
        ("worker-007", None),
        ("worker-1b", None),
        ("worker", None),
        ("worker-1\n", None),
        ("replica-3", None),
    ],
)
def test_only_a_worker_with_a_number_can_be_one_too_many(replica_id: str, number: int | None) -> None:
    assert number_of(replica_id) == number


@pytest.mark.parametrize(
    ("replica_id", "wanted", "idles"),
    [
        pytest.param("worker-3", 2, True, id="the third of two"),
        pytest.param("worker-3", 3, False, id="the third of three"),
        pytest.param("worker-1", 0, True, id="the first, where none is wanted"),
        pytest.param("replica-9", 1, False, id="one without a number"),
        pytest.param("worker-3", None, False, id="nobody says how many"),
    ],
)
async def test_a_worker_idles_while_fewer_are_wanted(replica_id: str, wanted: int | None, idles: bool) -> None:
    fleet, consumer = MemoryFleet(now=now), Consumer()
    if wanted is not None:
        await fleet.want(wanted, 60)

    async with beating(reporter(fleet, consumer, replica_id=replica_id)):
        await asyncio.sleep(10)

    assert ("scale" in consumer.suspended) is idles
    assert consumer.changes == (["-scale"] if idles else [])  # Told once, not with every beat.


async def test_it_works_again_when_it_is_wanted_and_when_the_wish_has_lapsed() -> None:
    fleet, consumer = MemoryFleet(now=now), Consumer()
    await fleet.want(1, 60)

    async with beating(reporter(fleet, consumer)):
        await asyncio.sleep(5)
        await fleet.want(3, 60)
        await asyncio.sleep(5)
        wanted = list(consumer.changes)
        await fleet.want(1, 20)
        await asyncio.sleep(18)
        not_wanted = list(consumer.changes)
        await asyncio.sleep(5)  # The scaler has died.

    assert wanted == ["-scale", "+scale"]
    assert not_wanted == ["-scale", "+scale", "-scale"]
    assert consumer.changes == ["-scale", "+scale", "-scale", "+scale"]


async def test_while_the_store_is_silent_the_last_wish_holds_as_long_as_one_lives() -> None:
    fleet, consumer = FaultyFleet(now=now), Consumer()
    await fleet.want(1, 60)

    async with beating(reporter(fleet, consumer)):
        await asyncio.sleep(1)
        fleet.away = True
        await asyncio.sleep(WISH_HOLDS_S - 3)
        held = "scale" in consumer.suspended
        await asyncio.sleep(6)

    assert held
    assert consumer.suspended == {}


async def test_a_worker_that_is_not_wanted_finishes_what_it_has_and_takes_nothing_new() -> None:
    site, model = Site(), FakeModel(takes_s=20.0)
    fleet, worker = MemoryFleet(now=now), Worker(site, model)
    async with running(worker):
        await site.publish(body("running"))
        await asyncio.sleep(1)

        report = FleetReporter(
            fleet,
            worker.listener,
            replica_id="worker-2",
            slots=4,
            model="tiny",
            stopping=lambda: False,
            now=now,
        )
        await fleet.want(1, 3600)
        async with beating(report):
            await asyncio.sleep(1)
            await site.publish(body("waiting"))
            await asyncio.sleep(60)
            finished, untouched, suspended = (
                await site.result("running"),
                await site.result("waiting"),
                (
                    worker.listener.state,
                    worker.gauge("suspended", reason="scale"),
                ),
            )
            await fleet.want(2, 3600)
            await asyncio.sleep(60)

    assert finished is not None
    assert (untouched, suspended) == (None, ("suspended", 1.0))
    assert await site.result("waiting") is not None


async def test_a_worker_tells_how_long_a_request_holds_a_slot_and_how_many_it_finishes() -> None:
    site, model = Site(), FakeModel(takes_s=2.0)
    worker = Worker(site, model, slots=1)

    async with running(worker):
        begun = asyncio.get_running_loop().time()
        before = worker.listener.throughput.mean_s(begun), worker.listener.throughput.per_s(begun)
        await site.publish(*(body(f"r{n}") for n in range(15)))
        await asyncio.sleep(40)
        at = asyncio.get_running_loop().time()
        lately = worker.listener.throughput.mean_s(at), worker.listener.throughput.per_s(at)
        await asyncio.sleep(100)
        at = asyncio.get_running_loop().time()
        later = worker.listener.throughput.mean_s(at), worker.listener.throughput.per_s(at)

    assert before == (None, 0.0)
    assert lately == pytest.approx((2.0, 15 / 40))
    assert later == pytest.approx((2.0, 0.0))  # How long one takes is still known; that none came is, too.


async def test_what_never_reached_the_model_does_not_make_requests_look_short() -> None:
    site, model = Site(), FakeModel(takes_s=2.0)
    worker = Worker(site, model)

    late = body("late", timeout_s=1.0)
    await asyncio.sleep(2)
    async with running(worker):
        await site.publish(body("a"), b"no json", late)
        await asyncio.sleep(5)

    expired = await site.result("late")
    assert expired is not None
    assert expired["status_code"] == 408
    assert worker.listener.throughput.mean_s(asyncio.get_running_loop().time()) == pytest.approx(2.0)
