"""How many processes take from a pool: gates share its capacity out among them."""

import asyncio
from contextlib import suppress
from typing import Final

from inference_worker.errors import StoreUnavailable
from inference_worker.ports import Fleet
from inference_worker.timing import stopped_within

SHARERS_S: Final = 5.0
"""How often it is looked how many there are."""


class Sharers:
    """Of one pool."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._count = 1

    def __call__(self) -> int:
        """As last seen; 1 at least."""
        return self._count

    async def run(self, until: asyncio.Event) -> None:
        """Look now and then. While nobody answers the last count holds."""
        while not until.is_set():
            with suppress(StoreUnavailable):
                self._count = max(len(await self._fleet.members()), 1)
            await stopped_within(until, SHARERS_S)
