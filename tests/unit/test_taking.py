"""What sessions share that take their work themselves: who rests, who is handed what, and what goes back."""

import asyncio
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from inference_worker.disposition import Ack, DeliveryLost, Disposition, Settled, Settlement, StoreSilent
from inference_worker.errors import StoreUnavailable, TransportLost
from inference_worker.ports import Delivery
from inference_worker.timing import ended, first_of
from inference_worker.transports.taking import Saying, Taking
from tests.unit.test_hands import delivery


class Session:
    """Takes from a list, one entry a turn."""

    def __init__(self, *there: str, stop_s: float = 1.0) -> None:
        self.there = list(there)
        self.back: list[str | None] = []
        self.late: list[Disposition] = []
        self.settlement: Settlement = Settled(how="ack")
        self.fault: Exception | None = None
        self.deaf = False
        self.woken = 0
        self.taking = Taking(
            "a list", take_turn=self._turn, give_back=self._give_back, stop_s=stop_s, wake=self._count_waking
        )
        self.reader = asyncio.create_task(self.taking.read())

    async def _count_waking(self) -> None:
        self.woken += 1

    async def _turn(self) -> None:
        taking = self.taking
        taking.turn.clear()
        if self.fault is not None:
            raise self.fault
        if self.deaf:
            await taking.lost.wait()
        elif not taking.consumed:
            taking.resting.set()
            await first_of(taking.turn, taking.lost, within_s=1.0)
        elif taking.hands.wanted and self.there:
            taking.hands.put(delivery(self.there.pop(0)))
            taking.something.set()
        else:
            await first_of(taking.turn, taking.lost, within_s=1.0)

    async def _give_back(self, deliveries: Sequence[Delivery]) -> None:
        self.back += [one.message_id for one in deliveries]

    async def ours(self, delivery: Delivery, disposition: Disposition) -> Settlement:
        return self.settlement

    async def settled_late(self, disposition: Disposition) -> Settlement:
        self.late.append(disposition)
        return DeliveryLost(stored=False)

    async def end(self) -> None:
        self.taking.lose("over")
        await ended(self.reader)


async def test_as_many_are_handed_up_as_the_limit_says_and_a_settled_one_makes_room() -> None:
    session = Session("a", "b", "c")
    taking = session.taking
    async with taking.consuming(2):
        first, second = await taking.receive(), await taking.receive()
        third = asyncio.create_task(taking.receive())
        await asyncio.sleep(5)
        assert not third.done()

        await taking.settle(first, Ack(reply=None), session.ours, session.settled_late)

        assert (await third).message_id == "c"
    assert second.lost.is_set() is False
    await session.end()


async def test_what_could_not_be_settled_stays_in_hand() -> None:
    session = Session("a")
    session.settlement = StoreSilent()
    async with session.taking.consuming(1):
        first = await session.taking.receive()
        await session.taking.settle(first, Ack(reply=None), session.ours, session.settled_late)

        assert session.taking.hands.holds(first)
    await session.end()


async def test_at_the_end_of_consuming_the_reader_rests_and_what_was_not_received_goes_back() -> None:
    session = Session("a", "b")
    async with session.taking.consuming(2):
        await session.taking.receive()
        await asyncio.sleep(1)
    assert (session.back, session.there) == (["b"], [])
    assert session.taking.resting.is_set()

    await asyncio.sleep(5)
    assert not session.taking.lost.is_set()
    await session.end()


async def test_a_lower_limit_gives_the_surplus_back_at_once_and_wakes_the_reader() -> None:
    session = Session("a", "b", "c")
    async with session.taking.consuming(3):
        await session.taking.receive()
        await asyncio.sleep(1)

        await session.taking.set_limit(1)

        assert (sorted(str(one) for one in session.back), session.woken) == (["b", "c"], 1)
    await session.end()


async def test_a_reader_that_does_not_come_to_rest_costs_the_session() -> None:
    session = Session(stop_s=3.0)
    session.deaf = True
    begun = asyncio.get_running_loop().time()
    async with session.taking.consuming(1):
        pass

    assert session.taking.lost_because == "the reader did not end"
    assert 3.0 <= asyncio.get_running_loop().time() - begun < 4.0
    await session.end()


@pytest.mark.parametrize(
    ("fault", "said"), [(TransportLost("gone"), "gone"), (KeyError("oops"), "the reader failed: KeyError")]
)
async def test_a_reader_that_fails_loses_the_session_and_all_that_is_in_hand(fault: Exception, said: str) -> None:
    session = Session("a")
    async with session.taking.consuming(2):
        first = await session.taking.receive()
        waiting = asyncio.create_task(session.taking.receive())
        await asyncio.sleep(1)

        session.fault = fault
        await session.taking.wake()

        with pytest.raises(TransportLost, match=said):
            await waiting
    assert first.lost.is_set()
    await session.end()


async def test_what_comes_by_a_session_that_is_over_is_settled_late_and_no_longer_received() -> None:
    session = Session("a")
    async with session.taking.consuming(1):
        first = await session.taking.receive()
        assert session.taking.lose("over")
        assert not session.taking.lose("again")

        settlement = await session.taking.settle(first, Ack(reply=None), session.ours, session.settled_late)

        assert settlement == DeliveryLost(stored=False)
        assert session.late == [Ack(reply=None)]
        for call in (session.taking.receive(), session.taking.set_limit(1)):
            with pytest.raises(TransportLost, match=r"^over$"):
                await call
    await session.end()


async def test_only_what_is_ours_and_could_be_kept_counts_as_extended() -> None:
    session = Session("a")
    taking = session.taking

    async def keep() -> None:
        pass

    async def silent() -> None:
        raise StoreUnavailable("no answer")

    async def drop() -> None:
        taking.hands.drop("a", 1)

    async with taking.consuming(1):
        first = await taking.receive()
        await taking.extend(first, keep)
        with pytest.raises(TransportLost, match="no answer"):
            await taking.extend(first, silent)
        with pytest.raises(TransportLost, match="not ours any more"):
            await taking.extend(first, drop)
    await session.end()


async def test_a_look_is_brought_forward_and_never_put_off() -> None:
    session = Session()
    session.taking.look_at = 10.0

    await session.taking.look_in(20.0)
    assert (session.taking.look_at, session.woken) == (10.0, 0)

    await session.taking.look_in(2.0)
    assert (session.taking.look_at, session.woken) == (2.0, 1)
    await session.end()


def test_a_warning_is_said_again_only_for_another_reason_or_once_all_was_well() -> None:
    warnings = Saying(queue="q")
    with capture_logs() as lines:
        for reason in ("away", "away", "refused"):
            warnings.say("cannot be looked at", reason)
        warnings.well("cannot be looked at")
        warnings.say("cannot be looked at", "refused", entry="1")

    assert [(line["reason"], line["queue"], line.get("entry")) for line in lines] == [
        ("away", "q", None),
        ("refused", "q", None),
        ("refused", "q", "1"),
    ]
