"""The loop behind the scale signal: what it looks at, what it writes, and what it says when it cannot see."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from inference_worker.config.settings import load
from inference_worker.errors import StoreUnavailable, TransportLost
from inference_worker.ports import Backlog, Beat
from inference_worker.results.fleet import MemoryFleet
from inference_worker.scaler import LOOK_S, NotSeen, ScaleView, Sources, scale_view, shown
from inference_worker.scaling import Policy
from tests.unit.test_fleet import beat
from tests.unit.worker_kit import now

POLICY = Policy(least=1, most=10, down_after_s=30.0)
INTERVAL_S = 2.0


class Queue:
    """A queue that can be counted, or not."""

    def __init__(self, backlog: Backlog | None = None) -> None:
        self.backlog = backlog or Backlog(ready=0, in_flight=0, delayed=0, how="test")
        self.away: Exception | None = None
        self.hangs = False
        self.due: Sequence[float] = ()

    async def count(self) -> Backlog:
        if self.hangs:
            await asyncio.Event().wait()
        if self.away is not None:
            raise self.away
        return self.backlog

    async def deadlines(self, limit: int) -> Sequence[float]:
        return self.due[:limit]


class FaultyFleet(MemoryFleet):
    """One that counts what is written, and can refuse it."""

    writes: int = 0
    refuses = False
    away = False

    async def want(self, replicas: int, for_s: float) -> None:
        if self.refuses:
            raise StoreUnavailable("read only")
        self.writes += 1
        await super().want(replicas, for_s)

    async def members(self) -> Sequence[Beat]:
        if self.away:
            raise StoreUnavailable("away")
        return await super().members()


def view_of(
    queue: Queue, fleet: MemoryFleet, *, writes: bool = True, policy: Policy = POLICY, deadlines: bool = True
) -> ScaleView:
    return ScaleView(
        "q:1",
        Sources(backlog=queue.count, fleet=fleet, deadlines=queue.deadlines if deadlines else None),
        policy,
        now=now,
        interval_s=INTERVAL_S,
        slots=1,
        writes=writes,
    )


@asynccontextmanager
async def looking(view: ScaleView) -> AsyncGenerator[None]:
    until = asyncio.Event()
    task = asyncio.create_task(view.run(until))
    try:
        await view.looked.wait()
        yield
    finally:
        until.set()
        await task


def wanted(view: ScaleView) -> int:
    return view.look().recommendation.stabilised


def why_not(view: ScaleView) -> str:
    with pytest.raises(NotSeen) as caught:
        view.look()
    return str(caught.value)


async def test_what_is_wanted_is_written_where_workers_read_it() -> None:
    queue, fleet = Queue(Backlog(ready=5, in_flight=0)), MemoryFleet(now=now)

    async with looking(view_of(queue, fleet)):
        at_first = await fleet.desired()
        queue.backlog = Backlog(ready=7, in_flight=1)
        await asyncio.sleep(INTERVAL_S + 0.1)

        assert (at_first, await fleet.desired()) == (5, 8)


async def test_the_wish_lapses_when_the_scaler_has_died() -> None:
    fleet = MemoryFleet(now=now)
    async with looking(view_of(Queue(Backlog(ready=5, in_flight=0)), fleet)):
        await asyncio.sleep(60)

    alive = await fleet.desired()
    await asyncio.sleep(25)
    still = await fleet.desired()
    await asyncio.sleep(6)

    assert (alive, still, await fleet.desired()) == (5, 5, None)


async def test_one_that_starts_again_goes_on_from_the_wish_before() -> None:
    """Else each restart would take away replicas that were kept for a while on purpose."""
    fleet = MemoryFleet(now=now)
    await fleet.want(6, 30.0)

    async with looking(view := view_of(Queue(), fleet)):
        begun = wanted(view)
        await asyncio.sleep(31)

    assert (begun, wanted(view)) == (6, 1)


async def test_who_only_shows_writes_nothing_and_shows_the_wish_of_who_does() -> None:
    queue, fleet = Queue(), FaultyFleet(now=now)
    fleet.refuses = True

    async with looking(view := view_of(queue, fleet, writes=False)):
        alone = wanted(view)
        fleet.refuses = False
        await fleet.want(4, 3600)
        await asyncio.sleep(120)
        together = wanted(view)
        await fleet.want(2, 3600)
        await asyncio.sleep(INTERVAL_S)

    assert (alone, together, wanted(view), fleet.writes) == (1, 4, 2, 2)


# ---------------------------------------------------------------- what counts


async def test_what_the_workers_hold_counts_where_the_broker_does_not_tell() -> None:
    """AMQP shows what is ready and nothing else: three busy workers would look idle."""
    fleet = MemoryFleet(now=now)
    for number in (1, 2, 3):
        await fleet.beat(beat(f"worker-{number}", in_flight=2))

    async with looking(view := view_of(Queue(Backlog(ready=0, how="amqp")), fleet)):
        sample = view.look()

    assert (sample.load.in_flight, sample.how) == (6, "amqp+workers")


async def test_a_broker_that_tells_late_does_not_hide_what_the_workers_hold() -> None:
    fleet = MemoryFleet(now=now)
    await fleet.beat(beat(in_flight=3))

    async with looking(view := view_of(Queue(Backlog(ready=0, in_flight=1, how="management")), fleet)):
        sample = view.look()

    assert (sample.load.in_flight, sample.how) == (3, "management")


async def test_slots_and_rate_are_what_the_workers_say() -> None:
    fleet = MemoryFleet(now=now)
    await fleet.beat(replace(beat("a"), slots=8, service_s=1.0, done_per_s=2.0))
    await fleet.beat(replace(beat("b"), slots=4, service_s=3.0, done_per_s=0.5))
    await fleet.beat(replace(beat("ill"), slots=60, fit=False))

    async with looking(view := view_of(Queue(), fleet)):
        capacity = view.look().capacity

    assert (capacity.replicas, capacity.slots_per_replica) == (2, 6)
    assert (capacity.service_s, capacity.completions_per_s) == (2.0, 2.5)


async def test_what_was_known_of_the_workers_holds_while_there_are_none() -> None:
    """From none at all the right number is wanted at once, not one for each request."""
    queue, fleet = Queue(), MemoryFleet(now=now)
    await fleet.beat(replace(beat("a"), slots=8, service_s=2.0))

    async with looking(view := view_of(queue, fleet, policy=replace(POLICY, least=0))):
        await asyncio.sleep(60)  # It has gone.
        queue.backlog = Backlog(ready=20, in_flight=0)
        await asyncio.sleep(INTERVAL_S)

    assert (view.look().capacity.replicas, wanted(view)) == (0, 3)


async def test_deadlines_of_jobs_count() -> None:
    queue, fleet = Queue(Backlog(ready=20, in_flight=0)), MemoryFleet(now=now)
    queue.due = [now() + 10.0] * 20 + [now() + 3600.0] * 5
    await fleet.beat(replace(beat("a"), slots=1, service_s=5.0))

    async with looking(view := view_of(queue, fleet, policy=replace(POLICY, per_replica=100))):
        sample = view.look()

    assert (sample.recommendation.by_deadline, sample.recommendation.reason, sample.due_soon) == (10, "by_deadline", 20)


# ---------------------------------------------------------------- not seen


async def test_a_fault_of_ours_blinds_the_signal_and_ends_nothing() -> None:
    """The intake runs it, too: what cannot be made out of a queue must not take that along."""
    queue = Queue(Backlog(ready=3, in_flight=0))
    queue.away = ValueError("could not convert string to float")

    async with looking(view := view_of(queue, MemoryFleet(now=now))):
        assert why_not(view) == "the look failed: ValueError"
        queue.away = None
        await asyncio.sleep(INTERVAL_S + 0.1)

        assert wanted(view) == 3


@pytest.mark.parametrize("away", [TransportLost("no broker"), StoreUnavailable("no store")], ids=["broker", "store"])
async def test_what_cannot_be_seen_is_not_nothing(away: Exception) -> None:
    """No wish is written and no number is told: a 0 would end replicas that are at work."""
    queue, fleet = Queue(Backlog(ready=5, in_flight=0)), FaultyFleet(now=now)

    async with looking(view := view_of(queue, fleet)):
        written, queue.away = fleet.writes, away
        await asyncio.sleep(INTERVAL_S * 3)
        reason = why_not(view)
        while_away = fleet.writes - written
        queue.away = None
        await asyncio.sleep(INTERVAL_S)

    assert (reason, while_away, wanted(view)) == (str(away), 0, 5)


async def test_workers_that_cannot_be_seen_are_no_reason_to_want_fewer() -> None:
    fleet = FaultyFleet(now=now)
    fleet.away = True

    async with looking(view := view_of(Queue(), fleet)):
        assert why_not(view) == "away"


async def test_a_count_that_cannot_be_is_no_decision() -> None:
    fleet = FaultyFleet(now=now)

    async with looking(view := view_of(Queue(Backlog(ready=-1)), fleet)):
        assert "nothing to decide by" in why_not(view)

    assert fleet.writes == 0


async def test_before_the_first_look_nothing_is_said() -> None:
    assert "not been looked at" in why_not(view_of(Queue(), MemoryFleet(now=now)))


async def test_a_look_that_takes_too_long_is_given_up() -> None:
    queue = Queue()
    queue.hangs = True
    begun = now()

    async with looking(view := view_of(queue, MemoryFleet(now=now))):
        assert now() - begun == pytest.approx(LOOK_S)
        assert "no answer" in why_not(view)


async def test_an_old_sample_is_not_told_for_a_new_one() -> None:
    """The loop stands still, for whatever reason: what it saw ages."""
    view = view_of(Queue(Backlog(ready=5, in_flight=0)), MemoryFleet(now=now))
    await view.refresh()

    await asyncio.sleep(9.9)
    fresh = wanted(view)
    await asyncio.sleep(0.2)

    assert fresh == 5
    assert "10 s ago" in why_not(view)


async def test_a_wish_that_cannot_be_written_is_still_told() -> None:
    fleet = FaultyFleet(now=now)
    fleet.refuses = True

    async with looking(view := view_of(Queue(Backlog(ready=5, in_flight=0)), fleet)):
        assert wanted(view) == 5


async def test_the_settings_name_the_queue_and_the_policy() -> None:
    settings = load(
        {"DEPLOYMENT_ID": "a", "RABBITMQ_PREFETCH": "8", "SCALE_MAX": "3", "SCALE_DOWN_AFTER_S": "7"}, needs="scaler"
    )
    sources = Sources(backlog=Queue(Backlog(ready=100, in_flight=0)).count, fleet=MemoryFleet(now=now))

    view = scale_view(settings, sources, now=now, writes=False)
    await view.refresh()

    assert (view.queue, view.policy) == ("infer_req.a", Policy(least=1, most=3, down_after_s=7.0))
    assert view.look().capacity.slots_per_replica == 8


# ---------------------------------------------------------------- as JSON


async def test_the_signal_has_every_documented_path() -> None:
    queue, fleet = Queue(Backlog(ready=6, in_flight=2, delayed=1, oldest_s=12.4, how="stream")), MemoryFleet(now=now)
    queue.due = [now() + 30.0] * 3
    await fleet.beat(replace(beat("a"), slots=4, service_s=2.0, done_per_s=1.5))

    async with looking(view := view_of(queue, fleet)):
        await asyncio.sleep(1.5)
        signal = shown(view)

    assert signal == {
        "queue": "q:1",
        "observed_at": "2023-11-14T22:13:20.000Z",
        "age_seconds": 1.5,
        "active": 1,
        "desired_replicas": 3,
        "load": 9,
        "target_per_replica": 4,
        "backlog": {"ready": 6, "in_flight": 2, "delayed": 1, "oldest_seconds": 12.4, "due_within_60s": 3},
        "capacity": {"replicas_ready": 1, "slots_per_replica": 4, "completions_per_second": 1.5},
        "recommendations": {"by_load": 3, "by_wait": 1, "by_deadline": 1, "raw": 3, "stabilised": 3},
        "limits": {"min": 1, "max": 10},
        "reason": "by_load",
        "how": "stream",
        "not_known": [],
    }


async def test_what_is_not_known_is_a_number_all_the_same_and_is_named() -> None:
    async with looking(view := view_of(Queue(Backlog(ready=1)), MemoryFleet(now=now), deadlines=False)):
        signal = shown(view)

    assert signal["backlog"] == {"ready": 1, "in_flight": 0, "delayed": 0, "oldest_seconds": 0.0, "due_within_60s": 0}
    assert signal["not_known"] == [
        "backlog.delayed",
        "backlog.oldest_seconds",
        "backlog.due_within_60s",
        "recommendations.by_wait",
        "recommendations.by_deadline",
    ]
    assert signal["recommendations"] == {"by_load": 1, "by_wait": 0, "by_deadline": 0, "raw": 1, "stabilised": 1}
    assert signal["how"] == "queue+workers"
