"""Outlasting a gate: a request that is to wait does wait, at a queue as at a pool.

Not here: what is done with it while it waits, and where the time for it comes from.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Final, Literal, Protocol

from inference_worker.gates.permits import ASK_AGAIN_S
from inference_worker.ports import Asked, Gate, Parked, Verdict

SHORTEST_PAUSE_S: Final = 0.001

GateDecision = Literal["gate_closed", "quota_exhausted", "dropped", "error"]
"""Why a gate kept a request from being sent; `error`: it could not say."""


class GateTold(Protocol):
    """Counts what happens at a gate."""

    def decided(self, reason: GateDecision) -> None:
        """The gate kept a request from being sent; one that waits is told of once, however often it asks."""

    def waiting(self, change: int) -> None:
        """One more (+1) or one less (-1) request waits at the gate."""


def nobody_wants(_: Parked) -> None:
    """Nobody wants to know that a request waits."""


async def outlast(
    gate: Gate, asked: Asked, until: float, rng: random.Random, parked: Callable[[Parked], None] = nobody_wants
) -> Verdict:
    """Ask, and ask again while the gate says wait; the last verdict, a wait, once it is `until` by the loop's time.

    Each pause ends when the gate says that something has changed. Where it does not, they double from what the gate
    named up to a second, cut to between half and all of it, so that those who wait do not all ask at once. May be
    cancelled at any time: between two questions nothing is held. `parked` hears of the first wait, and of no other.

    Raises:
        GateFailed: it cannot be said.
    """
    loop = asyncio.get_running_loop()
    asks = 0
    while True:
        verdict = await gate.admit(asked)
        if isinstance(verdict, Parked) and asks == 0:
            parked(verdict)
        if not isinstance(verdict, Parked) or loop.time() >= until:
            return verdict
        longest_s = max(verdict.within_s, ASK_AGAIN_S)
        pause_s = min(verdict.within_s * 2 ** min(asks, 10), longest_s) * rng.uniform(0.5, 1)
        # Not shorter than this: what rounding leaves of the time would have it ask in a circle.
        await _pause(verdict.changed, max(min(pause_s, until - loop.time()), SHORTEST_PAUSE_S))
        asks += 1


async def _pause(changed: asyncio.Event | None, seconds: float) -> None:
    if changed is None:
        await asyncio.sleep(seconds)
        return
    try:
        async with asyncio.timeout(seconds):
            await changed.wait()
    except TimeoutError:
        pass
