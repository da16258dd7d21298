"""A gate that is open at certain hours of the day (UTC): `{"opens": 22, "closes": 6}` is the night."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from inference_worker.extensions import GateParts
from inference_worker.ports import Admitted, Asked, Parked, Verdict

HOUR_S = 3600
DAY_S = 24 * HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class BusinessHours:
    """See `ports.Gate`."""

    now: Callable[[], float]
    opens_s: int
    """Seconds after midnight, as is the next."""
    closes_s: int

    def budget(self) -> float:
        """All or nothing."""
        return 0.0 if self._shut_for_s() else 1.0

    async def admit(self, asked: Asked) -> Verdict:
        """It takes nothing, so there is nothing to give back. What comes too early waits; its deadline is not ours."""
        shut_for_s = self._shut_for_s()
        return Parked(within_s=shut_for_s) if shut_for_s else Admitted()

    async def run(self, until: asyncio.Event) -> None:
        """The clock is fresh by itself."""

    def closes_at(self) -> str:
        """For people."""
        return f"closed from {self.closes_s // HOUR_S:02} to {self.opens_s // HOUR_S:02} h UTC"

    def _shut_for_s(self) -> float:
        """How long until it opens; 0 while it is open."""
        time_of_day_s = self.now() % DAY_S
        if (time_of_day_s - self.opens_s) % DAY_S < (self.closes_s - self.opens_s) % DAY_S:
            return 0.0
        return (self.opens_s - time_of_day_s) % DAY_S


def business_hours(parts: GateParts) -> BusinessHours:
    """The factory that the entry point names."""
    opens = parts.given.whole("opens", at_least=0, at_most=23)
    closes = parts.given.whole("closes", at_least=0, at_most=23)
    if opens == closes:
        parts.given.wrong("closes", "another hour than opens")
    return BusinessHours(now=parts.now, opens_s=opens * HOUR_S, closes_s=closes * HOUR_S)
