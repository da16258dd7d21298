"""How fast the queue moves, as its workers say: what positions, estimates and `Retry-After` are made of.

A guess for people and for clients' pauses. It is asked seldom, and where nobody answers there is none.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Final

from inference_worker.errors import StoreUnavailable
from inference_worker.ports import Beat, Fleet

KEPT_S: Final = 2.0
"""How long an answer of the fleet holds."""

ASKED_S: Final = 1.0
UNKNOWN_RETRY_AFTER_S: Final = 5
LONGEST_RETRY_AFTER_S: Final = 3600


class Pace:
    """Asks the fleet, and keeps what it said for a little while."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._members: Sequence[Beat] = ()
        self._asked_at = -math.inf

    async def per_s(self) -> float | None:
        """Requests that the workers finish a second when they have work; None where it is not known."""
        rates = [b.slots / b.service_s for b in await self.members() if b.consuming and b.service_s]
        return sum(rates) or None

    async def wait_s(self, ahead: int | None) -> float | None:
        """How long it takes until `ahead` requests are done; None where it is not known."""
        rate = None if ahead is None else await self.per_s()
        return None if ahead is None or rate is None else round(ahead / rate, 3)

    async def retry_after_s(self, waiting: int | None, most_waiting: int) -> int:
        """Whole seconds until so few wait that one more is let in."""
        rate = await self.per_s()
        if rate is None or waiting is None:
            return UNKNOWN_RETRY_AFTER_S
        return min(max(math.ceil((waiting - most_waiting + 1) / rate), 1), LONGEST_RETRY_AFTER_S)

    async def members(self) -> Sequence[Beat]:
        """The workers that were heard of lately; those of the last answer while there is none."""
        now = asyncio.get_running_loop().time()
        if now - self._asked_at >= KEPT_S:
            self._asked_at = now  # Before asking: who comes meanwhile gets what is known.
            try:
                async with asyncio.timeout(ASKED_S):
                    self._members = await self._fleet.members()
            except (StoreUnavailable, TimeoutError):
                self._members = ()
        return self._members
