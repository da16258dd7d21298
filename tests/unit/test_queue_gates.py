"""Gates before queues, as whoever works for several queues sees them: who is held, who goes on, what comes back.

Not here: how a session deals with one verdict (`test_merged_transport.py`), and which verdict a gate gives.
"""

import asyncio

import pytest

from inference_worker.disposition import Ack, Hold, Republish, Settled, Token
from inference_worker.gates.basic import LocalMaxConcurrency
from inference_worker.gates.combined import Composite
from inference_worker.merge import TierPriority
from inference_worker.ports import Admitted, Asked, Delivery, Gate, TurnedAway, Verdict
from tests.transport_contract import nothing_comes, request, take
from tests.unit.gate_kit import Told, asked, release
from tests.unit.test_merged_transport import Hung, System, id_of


class HungFor(Hung):
    """Never says anything of some requests, and lets the others in."""

    def __init__(self, *names: str) -> None:
        self._names = names

    async def admit(self, asked: Asked) -> Verdict:
        if asked.request_id in self._names:
            await asyncio.Event().wait()
        return Admitted()


async def test_what_is_let_in_does_not_wait_for_the_verdict_on_the_next_one_case_46() -> None:
    system = System(names=["one"], gates={"one": HungFor("b")})
    await system.put("one", request("a"))
    await system.put("one", request("b"))
    await system.put("one", request("c"))
    async with system.consuming(3) as transport:
        assert [id_of(await take(transport, within_s=1)) for _ in range(2)] == ["a", "c"]


async def test_while_a_budget_is_0_all_waits_and_none_is_lost_when_it_is_not_case_328() -> None:
    gate = Told(Admitted(), budget=0.0)
    system = System(names=["one"], gates={"one": gate})
    for name in ("a", "b", "c"):
        await system.put("one", request(name))
    async with system.consuming(3) as transport:
        await nothing_comes(transport, 10)
        gate._budget = 1.0

        assert [id_of(await take(transport, within_s=5)) for _ in range(3)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("quota_full", "saturated"), [(False, False), (True, False), (False, True), (True, True)], ids=repr
)
async def test_of_two_gates_in_a_row_each_can_hold_a_queue_case_330(quota_full: bool, saturated: bool) -> None:
    quota = LocalMaxConcurrency(1)
    load = Told(Admitted())
    load._verdicts = [TurnedAway() if saturated else Admitted()]
    system = System(names=["one"], gates={"one": Composite([quota, load])})
    taken = await quota.admit(asked()) if quota_full else Admitted()
    assert isinstance(taken, Admitted)
    await system.put("one", request("a"))
    async with system.consuming() as transport:
        if quota_full or saturated:
            await nothing_comes(transport, 30)
            load._verdicts = [Admitted()]
            release(taken.permits)
        delivery = await take(transport, within_s=10)
        assert quota.budget() == 0.0
        await transport.settle(delivery, Ack())

    assert quota.budget() == 1.0


async def test_a_full_quota_of_one_team_does_not_delay_another_case_332() -> None:
    system = System(names=["batch", "premium"], gates={"batch": LocalMaxConcurrency(1)})
    for n in range(3):
        await system.put("batch", request(f"batch-{n}"))
    async with system.consuming(8) as transport:
        held = await take(transport)
        assert id_of(held) == "batch-0"
        for n in range(5):
            await system.put("premium", request(f"premium-{n}"))
            delivery = await take(transport, within_s=1)
            assert id_of(delivery) == f"premium-{n}"
            await transport.settle(delivery, Ack())
        await nothing_comes(transport, 5)

        drained = []
        for _ in range(2):
            await transport.settle(held, Ack())
            held = await take(transport, within_s=10)
            drained.append(id_of(held))
        await transport.settle(held, Ack())

    assert sorted(drained) == ["batch-1", "batch-2"]


async def test_what_is_to_be_tried_again_holds_no_place_meanwhile_case_349() -> None:
    """A place that a retry kept would keep its own queue waiting for itself."""
    gate = LocalMaxConcurrency(1)
    system = System(names=["one"], gates={"one": gate})
    await system.put("one", request("a"))
    await system.put("one", request("b"))
    async with system.consuming(2) as transport:
        failed = await take(transport)
        again = Republish(delay_s=60, attempts=1, left_s=500, claim=Hold("a", Token("t")))
        assert await transport.settle(failed, again) == Settled(how="retry")

        assert id_of(await take(transport, within_s=5)) == "b"


async def test_each_of_many_queues_has_its_turn_case_355() -> None:
    """One of them floods, and the gate of another says nothing."""
    names = [f"q-{n}" for n in range(100)]
    gates: dict[str, Gate] = {"q-1": Hung()}
    system = System(names=names, gates=gates, window=4, policy=lambda: TierPriority())
    for n in range(100):
        await system.put("q-0", request(f"flood-{n}"))
    for name in names[1:]:
        await system.put(name, request(name))
    came: list[Delivery] = []
    async with system.consuming(1) as transport:
        while len(came) < 198:
            came.append(await take(transport, within_s=1))
            await transport.settle(came[-1], Ack())
            await asyncio.sleep(0.01)

    first = {delivery.queue for delivery in came[:110]}
    assert [name for name in names if name not in first] == ["q-1"]
