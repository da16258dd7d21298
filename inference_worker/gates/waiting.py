"""Outlasting a gate: a request that is to wait does wait, at a queue as at a pool.

Not here: what is done with it while it waits, and where the time for it comes from.
"""

import asyncio
import random

from inference_worker.gates.permits import ASK_AGAIN_S
from inference_worker.ports import Asked, Gate, Parked, Verdict


async def outlast(gate: Gate, asked: Asked, until: float, rng: random.Random) -> Verdict:
    """Ask, and ask again while the gate says wait; the last verdict, a wait, once it is `until` by the loop's time.

    Each pause ends when the gate says that something has changed. Where it does not, they double from what the gate
    named up to a second, cut to between half and all of it, so that those who wait do not all ask at once. May be
    cancelled at any time: between two questions nothing is held.

    Raises:
        GateFailed: it cannot be said.
    """
    loop = asyncio.get_running_loop()
    asks = 0
    while True:
        verdict = await gate.admit(asked)
        if not isinstance(verdict, Parked) or loop.time() >= until:
            return verdict
        longest_s = max(verdict.within_s, ASK_AGAIN_S)
        pause_s = min(verdict.within_s * 2 ** min(asks, 10), longest_s) * rng.uniform(0.5, 1)
        await _pause(verdict.changed, min(pause_s, until - loop.time()))
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
