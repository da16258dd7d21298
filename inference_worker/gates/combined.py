"""Gates made of gates: all of them or none, and one that keeps waiting what another would refuse."""

import asyncio
from collections.abc import Callable, Sequence

from inference_worker.gates.parameters import GateSpec, Parameters
from inference_worker.gates.permits import ASK_AGAIN_S, NOT_SENT, POLL_S, Signals, give_back, signal_of
from inference_worker.ports import Admitted, Asked, Gate, Parked, Permit, TurnedAway, Verdict

Build = Callable[[GateSpec], Gate]
"""Makes a gate of what a document names."""


class Composite:
    """Admits what all of its gates admit, asked in their order. The first other verdict stands.

    Then what was taken goes back; also where a gate fails, and where the question is cancelled.
    """

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = tuple(gates)
        self._in_the_way: tuple[str, Gate] | None = None
        """The last request that was not admitted, and by which one, until somebody waits for that."""

    def budget(self) -> float:
        """The smallest; all of it where there are no gates."""
        return min((gate.budget() for gate in self._gates), default=1.0)

    async def admit(self, asked: Asked) -> Verdict:
        """All or nothing."""
        taken: list[Permit] = []
        verdict: Verdict = Admitted()
        in_the_way: Gate | None = None
        try:
            for gate in self._gates:
                verdict = await gate.admit(asked)
                if not isinstance(verdict, Admitted):
                    in_the_way = gate
                    break
                taken.extend(verdict.permits)
            else:
                return Admitted(permits=tuple(taken))
        except BaseException:
            await give_back(taken, NOT_SENT)
            raise
        await give_back(taken, NOT_SENT)
        if in_the_way is not None:  # Set last: whoever asks for a signal then does so before the loop's next turn.
            self._in_the_way = (asked.request_id, in_the_way)
        return verdict

    def signal(self, changed: asyncio.Event, asked: Asked) -> bool:
        """Told by the gate that was in the way; by any of them, where the request was not asked for just now.

        What each question takes of the gates before that one goes back at once, and they tell of it: two who wait
        would wake each other for ever.
        """
        gates = self._gates
        if self._in_the_way is not None and self._in_the_way[0] == asked.request_id:
            gates, self._in_the_way = (self._in_the_way[1],), None
        return any([isinstance(gate, Signals) and gate.signal(changed, asked) for gate in gates])

    async def run(self, until: asyncio.Event) -> None:
        """All of them."""
        async with asyncio.TaskGroup() as group:
            for gate in self._gates:
                group.create_task(gate.run(until))

    def closes_at(self) -> str:
        """At the first of theirs."""
        return "; or ".join(gate.closes_at() for gate in self._gates) or "never"


class WaitOnRefuse:
    """Keeps a request waiting where its gate would give it back to the queue."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def budget(self) -> float:
        """Its gate's."""
        return self._gate.budget()

    async def admit(self, asked: Asked) -> Verdict:
        """Its gate's verdict; a refusal becomes a wait."""
        verdict = await self._gate.admit(asked)
        return parked(verdict, self._gate, asked) if isinstance(verdict, TurnedAway) else verdict

    def signal(self, changed: asyncio.Event, asked: Asked) -> bool:
        """Told by its gate."""
        return isinstance(self._gate, Signals) and self._gate.signal(changed, asked)

    async def run(self, until: asyncio.Event) -> None:
        """Its gate's."""
        await self._gate.run(until)

    def closes_at(self) -> str:
        """Its gate's."""
        return self._gate.closes_at()


def parked(verdict: TurnedAway, gate: Gate, asked: Asked) -> Parked:
    """The wait that stands for a gate's refusal. No turn of the loop lies between the two, so no change is missed."""
    changed = signal_of((gate,), asked)
    return Parked(within_s=POLL_S if changed is None else ASK_AGAIN_S, changed=changed, because=verdict.because)


def composite(given: Parameters, build: Build) -> Composite:
    """`composite`: `gates`, a list of gates."""
    gates = [build(spec) for spec in given.gates("gates")]
    given.finish()
    return Composite(gates)


def wait_on_refuse(given: Parameters, build: Build) -> WaitOnRefuse | Composite:
    """`wait-on-refuse`: `gate`, one gate."""
    spec = given.gate("gate")
    given.finish()
    return Composite(()) if spec is None else WaitOnRefuse(build(spec))
