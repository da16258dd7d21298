"""Who still goes on when the pool is full: it depends on what was promised, and on who waits for the answer."""

import asyncio

from inference_worker.gates.combined import Build, Composite, parked
from inference_worker.gates.parameters import GateSpec, Parameters
from inference_worker.gates.permits import Signals
from inference_worker.lanes import CLASSIFICATION_LABEL, RESERVED, TIER_LABEL
from inference_worker.ports import Asked, Dropped, Gate, Parked, TurnedAway, Verdict


class TierPriorityAdmission:
    """Asks a gate whether the pool is saturated: it is where that gate refuses, or would keep the request waiting.

    Then what is reserved waits; an interactive request beyond that is answered 429 at once, as somebody sits before it;
    everything else goes back to its queue. What is not classified is not reserved.
    """

    def __init__(self, saturation: Gate, tier_label: str = TIER_LABEL) -> None:
        self._saturation = saturation
        self._tier_label = tier_label

    def budget(self) -> float:
        """The inner gate's."""
        return self._saturation.budget()

    async def admit(self, asked: Asked) -> Verdict:
        """The inner gate's verdict, unless it says saturated."""
        verdict = await self._saturation.admit(asked)
        if isinstance(verdict, Parked | TurnedAway):
            return self._saturated(verdict, asked)
        return verdict

    def signal(self, changed: asyncio.Event, asked: Asked) -> bool:
        """Told by the inner gate."""
        return isinstance(self._saturation, Signals) and self._saturation.signal(changed, asked)

    async def run(self, until: asyncio.Event) -> None:
        """The inner gate's."""
        await self._saturation.run(until)

    def closes_at(self) -> str:
        """The inner gate's."""
        return self._saturation.closes_at()

    def _saturated(self, verdict: Parked | TurnedAway, asked: Asked) -> Verdict:
        if asked.labels.get(CLASSIFICATION_LABEL) == RESERVED:
            return verdict if isinstance(verdict, Parked) else parked(verdict, self._saturation, asked)
        if asked.labels.get(self._tier_label) == "interactive":
            said = "the pool is saturated, and the request is beyond what is reserved for its caller"
            return Dropped(status_code=429, error_code="GATE_DROPPED", error=said)
        return TurnedAway(because=verdict.because)


def tier_priority_admission(given: Parameters, build: Build) -> TierPriorityAdmission | Composite:
    """`tier-priority-admission`: `saturation_gate` (a type), `saturation_gate_params`, `tier_label`."""
    gate_type = given.text("saturation_gate")
    inner = given.inner("saturation_gate_params")
    tier_label = given.text("tier_label", TIER_LABEL)
    given.finish()
    if not gate_type:
        return Composite(())
    spec = GateSpec(gate_type=gate_type, given=inner, where=f"{given.where}.saturation_gate")
    return TierPriorityAdmission(build(spec), tier_label)
