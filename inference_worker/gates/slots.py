"""Slots that this process holds in Redis, each for the length of a lease that is renewed while its request runs.

A process that is killed renews nothing, and its slots are free when their leases have lapsed. Whether a taking whose
answer was lost has happened is not known: it is undone in the background, and lapses otherwise.
"""

import asyncio
from dataclasses import dataclass
from itertools import count
from typing import Final

import structlog

from inference_worker.errors import StoreUnavailable
from inference_worker.gates.permits import Line
from inference_worker.gates.quota_scripts import GIVE_BACK, RENEW_SLOTS
from inference_worker.gates.undoing import Undoing
from inference_worker.ports import Feedback, Permit
from inference_worker.redis_scripts import RedisLink, Script
from inference_worker.timing import stopped_within

log = structlog.get_logger(__name__)

LEASE_S: Final = 15.0
RENEWALS_IN_A_LEASE: Final = 3
MOST_AT_ONCE: Final = 500
"""Slots that one script renews."""
MOST_LINES: Final = 256
"""Lines of those who wait, before empty ones are thrown away."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where slots of one kind are counted."""

    counter: str
    """The number of what is taken, which other programs may read and change."""
    slots: str
    """Ours and those of others like us, by the end of their leases."""
    limit: str
    """Where the limit stands."""


class Slots:
    """What one process holds. Names of members are unique as long as `holder` is."""

    def __init__(self, link: RedisLink, *, holder: str, lease_s: float = LEASE_S, kept_s: float = 0.0) -> None:
        self._link = link
        self._holder = holder
        self._lease_s = lease_s
        self._lease_ms = max(round(lease_s * 1000), 1)
        self._kept_ms = round(kept_s * 1000)
        self._numbers = count(1)
        self._held: dict[Place, dict[str, None]] = {}
        self._undoing = Undoing(link)
        self._lines: dict[str, Line] = {}
        self._sweep_at = MOST_LINES

    async def take(self, script: Script, place: Place, limit: float, *, cost: int, tenant: str = "") -> Permit | None:
        """A slot, or None where the limit is reached.

        Raises:
            StoreUnavailable: it cannot be said.
        """
        member = f"{cost}:{self._holder}:{next(self._numbers)}"
        keys = (place.counter, place.slots, place.limit)
        try:
            taken = await self._link.run(script, keys, member, limit, self._lease_ms, self._kept_ms, tenant)
        except BaseException:  # A cancellation, too: what was asked may have been done.
            self._undoing.later(GIVE_BACK, (place.counter, place.slots), member)
            raise
        if taken != 1:
            return None
        self._held.setdefault(place, {})[member] = None
        return _Slot(self, place, member)

    def wait_for(self, place: Place, changed: asyncio.Event) -> None:
        """Have `changed` set when a slot of ours is given back there."""
        if len(self._lines) >= self._sweep_at:
            self._lines = {counter: line for counter, line in self._lines.items() if len(line)}
            self._sweep_at = max(MOST_LINES, 2 * len(self._lines))
        self._lines.setdefault(place.counter, Line()).join(changed)

    async def give_back(self, place: Place, member: str) -> None:
        """Give a slot back; where that cannot be done now, it is done later, or lapses."""
        held = self._held.get(place, {})
        held.pop(member, None)
        if not held:
            self._held.pop(place, None)
        keys = (place.counter, place.slots)
        try:
            await self._link.run(GIVE_BACK, keys, member)
        except StoreUnavailable:
            self._undoing.later(GIVE_BACK, keys, member)
        except BaseException:
            self._undoing.later(GIVE_BACK, keys, member)
            raise
        if place.counter in self._lines:
            self._lines[place.counter].wake(1)

    async def run(self, until: asyncio.Event) -> None:
        """Renew what is held until told to stop."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._undoing.run(until))
            group.create_task(self._renew_for_ever(until))

    async def _renew_for_ever(self, until: asyncio.Event) -> None:
        failed = False
        while not await stopped_within(until, self._lease_s / RENEWALS_IN_A_LEASE):
            try:
                await self._renew()
                failed = False
            except StoreUnavailable as exc:
                if not failed:
                    log.warning("leases on quota slots cannot be renewed", reason=str(exc))
                failed = True

    async def _renew(self) -> None:
        for place, held in list(self._held.items()):
            members = list(held)
            for first in range(0, len(members), MOST_AT_ONCE):
                # Again those that are still held: one that was given back meanwhile must not come back to life.
                some = [member for member in members[first : first + MOST_AT_ONCE] if member in held]
                if some:
                    await self._link.run(
                        RENEW_SLOTS, (place.counter, place.slots), self._lease_ms, self._kept_ms, *some
                    )


class _Slot:
    """A slot of one request."""

    __slots__ = ("_member", "_place", "_slots")

    def __init__(self, slots: Slots, place: Place, member: str) -> None:
        self._slots: Slots | None = slots
        self._place = place
        self._member = member

    async def release(self, seen: Feedback) -> None:
        """See `ports.Permit`."""
        slots, self._slots = self._slots, None
        if slots is not None:
            await slots.give_back(self._place, self._member)
