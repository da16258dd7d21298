"""The fleet in this process: who was heard of, and what is wanted. That in Redis: tests/integration/test_fleet.py."""

import asyncio

from inference_worker.ports import FLEET_SILENT_S, Beat
from inference_worker.results.fleet import MemoryFleet
from tests.unit.worker_kit import now


def beat(replica_id: str = "worker-1", *, in_flight: int = 0) -> Beat:
    return Beat(
        replica_id=replica_id,
        at=0.0,
        slots=4,
        in_flight=in_flight,
        consuming=True,
        fit=True,
        service_s=None,
        done_per_s=0.0,
        model="tiny",
    )


async def members(fleet: MemoryFleet) -> list[tuple[str, int]]:
    return [(one.replica_id, one.in_flight) for one in await fleet.members()]


async def test_a_worker_is_a_member_by_its_last_word() -> None:
    fleet = MemoryFleet(now=now)

    await fleet.beat(beat("b", in_flight=1))
    await fleet.beat(beat("a"))
    await fleet.beat(beat("b", in_flight=3))

    assert await members(fleet) == [("a", 0), ("b", 3)]


async def test_a_worker_that_is_silent_for_too_long_counts_as_gone() -> None:
    fleet = MemoryFleet(now=now)
    await fleet.beat(beat("silent"))
    await asyncio.sleep(FLEET_SILENT_S - 1)
    await fleet.beat(beat("speaking"))

    before = await members(fleet)
    await asyncio.sleep(2)

    assert (before, await members(fleet)) == ([("silent", 0), ("speaking", 0)], [("speaking", 0)])


async def test_a_worker_that_has_ended_is_gone_at_once() -> None:
    fleet = MemoryFleet(now=now)
    await fleet.beat(beat("a"))

    await fleet.leave("a")
    await fleet.leave("never-there")

    assert await members(fleet) == []


async def test_a_beat_says_what_is_wanted_until_that_lapses() -> None:
    fleet = MemoryFleet(now=now)
    at_first = await fleet.beat(beat())
    await fleet.want(3, 30.0)
    wanted = await fleet.beat(beat()), await fleet.desired()
    await asyncio.sleep(30.0)

    assert (at_first, wanted, await fleet.beat(beat())) == (None, (3, 3), None)


async def test_none_at_all_may_be_wanted() -> None:
    fleet = MemoryFleet(now=now)

    await fleet.want(0, 30.0)

    assert await fleet.desired() == 0
