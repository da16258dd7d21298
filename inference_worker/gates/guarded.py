"""A gate of another package, whose faults end nothing but what it was asked about.

It fails closed: one that cannot say how much is free has nothing free. Not here: what a gate that fails costs a
request, which is the same for all gates (`pool_gate.py`, `transports/merged_source.py`).
"""

import asyncio
import math
from dataclasses import replace
from typing import Final, cast

import structlog

from inference_worker.errors import GateFailed
from inference_worker.faults import as_exceptions
from inference_worker.ports import Admitted, Asked, Dropped, Feedback, Gate, Parked, Permit, TurnedAway, Verdict
from inference_worker.timing import first_of

log = structlog.get_logger(__name__)

AGAIN_S: Final = 5.0
"""When readings are kept fresh again after a fault."""
SHORTEST_WAIT_S: Final = 0.05
"""A gate that says "at once" would be asked in a circle."""


class GuardedGate:
    """See `ports.Gate`."""

    def __init__(self, gate: Gate, name: str) -> None:
        self._gate = gate
        self._name = name
        self._fault = ""
        """The last one of `budget`, which is asked all the time."""

    def budget(self) -> float:
        """See `ports.Gate`; nothing where it cannot be said."""
        try:
            with as_exceptions():
                budget = float(self._gate.budget())
            if math.isnan(budget):
                raise ValueError("no number")
        except Exception as exc:
            if (fault := f"{type(exc).__name__}: {exc}") != self._fault:
                log.exception("a gate cannot say its budget; it counts as closed", gate=self._name)
            self._fault = fault
            return 0.0
        self._fault = ""
        return min(max(budget, 0.0), 1.0)

    async def admit(self, asked: Asked) -> Verdict:
        """See `ports.Gate`."""
        try:
            with as_exceptions():
                verdict = await self._gate.admit(asked)
            if not isinstance(verdict, Admitted | Parked | TurnedAway | Dropped):
                raise GateFailed(f"the gate {self._name} said a {type(verdict).__name__}, which is no verdict")
            return self._whole(verdict)
        except GateFailed:
            raise
        except Exception as exc:
            raise GateFailed(f"the gate {self._name} failed: {type(exc).__name__}") from exc

    def _whole(self, verdict: Verdict) -> Verdict:
        if isinstance(verdict, Admitted):
            return Admitted(permits=tuple(_GuardedPermit(_permit(one), self._name) for one in verdict.permits))
        if isinstance(verdict, Parked):
            # A number that is none compares as no number does, and an event that is set already is no news.
            within_s = verdict.within_s if verdict.within_s >= SHORTEST_WAIT_S else SHORTEST_WAIT_S
            changed = None if verdict.changed is not None and verdict.changed.is_set() else verdict.changed
            return replace(verdict, within_s=within_s, changed=changed)
        return verdict

    async def run(self, until: asyncio.Event) -> None:
        """See `ports.Gate`; begun again after a fault."""
        while not until.is_set():
            try:
                with as_exceptions():
                    await self._gate.run(until)
                return
            except Exception:
                log.exception("a gate could not keep its readings fresh; trying again", gate=self._name)
            await first_of(until, within_s=AGAIN_S)

    def closes_at(self) -> str:
        """See `ports.Gate`."""
        try:
            with as_exceptions():
                return str(self._gate.closes_at())
        except Exception as exc:  # noqa: BLE001  # It is for people, who see it.
            return f"not said: {type(exc).__name__}"


def _permit(said: object) -> Permit:
    if not callable(getattr(said, "release", None)):
        raise TypeError(f"a {type(said).__name__} is no permit")
    return cast(Permit, said)


class _GuardedPermit:
    def __init__(self, permit: Permit, name: str) -> None:
        self._permit = permit
        self._name = name

    async def release(self, seen: Feedback) -> None:
        try:
            with as_exceptions():
                await self._permit.release(seen)
        except Exception:
            log.exception("a gate failed to take a permit back", gate=self._name)
