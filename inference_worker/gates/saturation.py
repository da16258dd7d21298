"""Gates that look at how full a pool is: by Prometheus, or by a page of metrics.

All of them keep their number fresh in the background, and count what they admit against it (`headroom`): the threshold
holds between two readings, too. `budget` is what the reading leaves free, less what was admitted since.

Without a number (none seen, or one past its age limit) each has a rule: its fallback. The first look is waited for, as
a start is no failure; afterwards nobody waits.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from inference_worker.gates.headroom import Headroom, Measured, OwnLoad
from inference_worker.gates.permits import Line, OncePermit
from inference_worker.gates.sources import MetricSource, Reading, Watch
from inference_worker.ports import Admitted, Asked, Feedback, Permit, TurnedAway, Verdict

ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a gate's gauges show after a look, all in parts of the capacity that are free."""

    value: float | None
    """None where nothing was seen."""
    threshold: float
    """The gate is closed at this value and below."""
    available: bool
    source: int | None
    """Which of several sources spoke."""
    why_not: str = ""
    """Why nothing was seen."""


Told = Callable[[Seen], None]


def untold(_: Seen) -> None:
    """For gates without gauges."""


def alone() -> int:
    """For a process that has its pool for itself."""
    return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """When a gate closes, and what it does without a number."""

    baseline: float
    """It is closed while this part of the capacity or less is free."""
    fallback: float
    """The budget without a number: 0 is closed."""
    closes_at: str
    """For people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often a gate looks, and how long it believes what it saw."""

    refresh_s: float
    max_age_s: float
    lag_s: float = 0.0
    """How much older than it says a sample is."""


class MetricGate:
    """Open while more than a baseline of a pool is free, and never for more requests than fit into that.

    `own` may be shared by gates of several queues on one pool, so that they share what is free.
    """

    def __init__(
        self,
        source: MetricSource,
        bounds: Bounds,
        pace: Pace,
        *,
        name: str,
        chance: Callable[[], float],
        own: OwnLoad | None = None,
        sharers: Callable[[], int] = alone,
        told: Told = untold,
    ) -> None:
        self._bounds = bounds
        self._own = own or OwnLoad(remembered_s=pace.max_age_s + pace.refresh_s)
        self._headroom = Headroom(self._own, threshold=1 - bounds.baseline, sharers=sharers, chance=chance)
        self._told = told
        self._capacity: float | None = None
        self._watch = _watch(source, pace, name, self._looked)

    def budget(self) -> float:
        """See `ports.Gate`."""
        if not self._watch.looked:
            return 0.0
        if self._watch.reading() is None:
            return self._bounds.fallback
        return self._headroom.budget()

    async def admit(self, asked: Asked) -> Verdict:
        """See `ports.Gate`. Nothing is waited for after the first look, so nobody comes between question and count."""
        await self._watch.first_look()
        reading = self._watch.reading()
        if not (self._headroom.admits() if reading is not None else self._admits_blindly()):
            return TurnedAway()
        return Admitted(permits=(self._take(),))

    def signal(self, changed: asyncio.Event, asked: Asked) -> bool:
        """See `permits.Signals`: told by a reading with room, and by the end of a request."""
        self._own.waiting.join(changed)
        return True

    async def run(self, until: asyncio.Event) -> None:
        """See `ports.Gate`."""
        await self._watch.run(until)

    def closes_at(self) -> str:
        """See `ports.Gate`."""
        return self._bounds.closes_at

    def _take(self) -> Permit:
        loop = asyncio.get_running_loop()
        taken_at = loop.time()
        self._own.took(taken_at)

        def give_back(seen: Feedback) -> None:
            self._own.gave_back(loop.time(), None if seen.sent_at is None else seen.sent_at - taken_at)

        return OncePermit(give_back)

    def _admits_blindly(self) -> bool:
        """Without a number: as far as the fallback goes, and never more than would fill the pool by itself."""
        if self._bounds.fallback <= 0:
            return False
        part = min(self._bounds.fallback, 1 - self._bounds.baseline)
        return self._capacity is None or self._headroom.within(self._capacity, part)

    def _looked(self, reading: Reading | None) -> None:
        baseline = self._bounds.baseline
        if reading is None:
            self._told(Seen(value=None, threshold=baseline, available=False, source=None, why_not=self._watch.why_not))
            return
        if reading.capacity is not None:
            self._capacity = reading.capacity
        self._headroom.see(Measured(load=1 - reading.value, at=reading.at, capacity=reading.capacity))
        self._told(Seen(value=reading.value, threshold=baseline, available=True, source=reading.source))


class CountedGate:
    """Each reading grants as many admissions as it shows free; they are used up, and the next reading grants anew.

    What ends meanwhile makes no room before the next reading. Without a reading nothing is admitted.
    """

    def __init__(self, source: MetricSource, pace: Pace, *, name: str, closes_at: str, told: Told = untold) -> None:
        self._closes_at = closes_at
        self._told = told
        self._left = 0
        self._waiting = Line()
        self._capacity = 0.0
        self._watch = _watch(source, pace, name, self._looked)

    def budget(self) -> float:
        """See `ports.Gate`: the part of the capacity that is granted and not used."""
        usable = self._watch.reading() is not None and self._capacity > 0
        return min(self._left / self._capacity, 1.0) if usable else 0.0

    async def admit(self, asked: Asked) -> Verdict:
        """See `ports.Gate`."""
        await self._watch.first_look()
        if self._watch.reading() is None or self._left < 1:
            return TurnedAway()
        self._left -= 1
        return Admitted(permits=(self._granted(),))

    def signal(self, changed: asyncio.Event, asked: Asked) -> bool:
        """See `permits.Signals`: told by the next reading."""
        self._waiting.join(changed)
        return True

    async def run(self, until: asyncio.Event) -> None:
        """See `ports.Gate`."""
        await self._watch.run(until)

    def closes_at(self) -> str:
        """See `ports.Gate`."""
        return self._closes_at

    def _granted(self) -> Permit:
        """It stays used, unless nothing was sent; then it is put back, if it is not of an older reading."""
        granted_by = self._watch.reading()

        def give_back(seen: Feedback) -> None:
            if seen.kind == "not_sent" and granted_by is self._watch.reading():
                self._left += 1
                self._waiting.wake(1)

        return OncePermit(give_back)

    def _looked(self, reading: Reading | None) -> None:
        if reading is None or reading.capacity is None:
            self._left = 0
            self._told(Seen(value=None, threshold=0.0, available=False, source=None, why_not=self._watch.why_not))
            return
        self._capacity = reading.capacity
        self._left = max(int(reading.capacity * reading.value + ROUNDING), 0)
        self._waiting.wake(self._left)
        self._told(Seen(value=reading.value, threshold=0.0, available=True, source=reading.source))


class BinaryGate:
    """Open at 0, closed at anything else, open without a number."""

    def __init__(self, source: MetricSource, pace: Pace, *, name: str, told: Told = untold) -> None:
        self._told = told
        self._watch = _watch(source, pace, name, self._looked)

    def budget(self) -> float:
        """See `ports.Gate`."""
        if not self._watch.looked:
            return 0.0
        reading = self._watch.reading()
        return 1.0 if reading is None or reading.value == 0 else 0.0

    async def admit(self, asked: Asked) -> Verdict:
        """See `ports.Gate`."""
        await self._watch.first_look()
        return Admitted() if self.budget() > 0 else TurnedAway()

    async def run(self, until: asyncio.Event) -> None:
        """See `ports.Gate`."""
        await self._watch.run(until)

    def closes_at(self) -> str:
        """See `ports.Gate`."""
        return "closed while the metric is anything but 0; open without it"

    def _looked(self, reading: Reading | None) -> None:
        value, source = (None, None) if reading is None else (reading.value, reading.source)
        available = reading is not None
        self._told(Seen(value=value, threshold=0.0, available=available, source=source, why_not=self._watch.why_not))


def _watch(source: MetricSource, pace: Pace, name: str, told: Callable[[Reading | None], None]) -> Watch:
    return Watch(source, name=name, refresh_s=pace.refresh_s, max_age_s=pace.max_age_s, lag_s=pace.lag_s, told=told)
