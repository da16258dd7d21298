"""How much more may be sent to something whose load is only known late. Pure: no clock, no waiting, no neighbour.

A gate that looks at the last reading alone lets everybody through until the next one, and the load shoots over its
threshold. Here every admission counts at once:

    predicted load = reading + (ours in flight now - ours in flight when it was measured) / capacity

It is exact for what is ours, since we know at every moment how many are in flight; a request that replaces a finished
one changes nothing, and no guess is needed at how long requests take. And since ours are a part of the load, the load
is never taken to be less than that: however late a reading comes, ours alone cannot go over the threshold. What a late
reading costs is that others' load is seen late, nothing else.

Where the capacity is not known, what one request adds is learned: at most the whole load divided by what is ours (then
all of it would be ours), and less where careful steps, each at most twice the last, have shown so.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from inference_worker.gates.permits import Line

GRAIN_S: Final = 0.05
"""Changes closer together than this are remembered as one."""
TOLERANCE: Final = 1e-9
SMOOTHING: Final = 0.1
"""How much one request changes what is thought of the time between admission and sending."""
FORGETTING: Final = 0.9
TELLING_PART: Final = 0.1
"""A change of what is ours by less than this part says nothing of what a request adds: the load moves by itself."""


class OwnLoad:
    """What is in flight through us, now and a while ago. Gates on one neighbour may share it, and then count together.

    Not to be shared by gates that one request passes both of: it would count twice.
    """

    def __init__(self, *, remembered_s: float) -> None:
        self.in_flight = 0
        self.waiting = Line()
        """Those that were refused and wait; shared like the count."""
        self.sent_after_s = 0.0
        """About how long an admitted request waits before it is sent, by those that have ended."""
        self._remembered_s = remembered_s
        self._steps: deque[tuple[float, int]] = deque([(-math.inf, 0)])

    def remember(self, seconds: float) -> None:
        """What was in flight so long ago will be asked for, if not longer ago."""
        self._remembered_s = max(self._remembered_s, seconds)

    def took(self, now: float) -> None:
        """One more was admitted."""
        self._change(now, 1)

    def gave_back(self, now: float, sent_after_s: float | None) -> None:
        """One has ended; `sent_after_s` tells how long after its admission it was sent, if it was. Wakes one."""
        self._change(now, -1)
        if sent_after_s is not None:
            self.sent_after_s += SMOOTHING * (max(sent_after_s, 0.0) - self.sent_after_s)
        self.waiting.wake(1)

    def sent_by(self, moment: float) -> int:
        """How many were in flight, and seen by the other side, at a moment."""
        moment -= self.sent_after_s
        return next((count for at, count in reversed(self._steps) if at <= moment), self._steps[0][1])

    def fewest_between(self, since: float, until: float) -> int:
        """The smallest number in flight within a time."""
        since, until = since - self.sent_after_s, until - self.sent_after_s
        fewest = math.inf
        for at, count in reversed(self._steps):
            if at <= until:
                fewest = min(fewest, count)
            if at <= since:
                break
        return 0 if fewest == math.inf else int(fewest)

    def _change(self, now: float, by: int) -> None:
        self.in_flight += by
        if now - self._steps[-1][0] < GRAIN_S:
            self._steps[-1] = (self._steps[-1][0], self.in_flight)
        else:
            self._steps.append((now, self.in_flight))
        while len(self._steps) > 1 and self._steps[1][0] <= now - self._remembered_s:
            self._steps.popleft()


class OwnLoads:
    """Those of one process, by what gates look at: gates on the same neighbour would each take all that is free."""

    def __init__(self) -> None:
        self._loads: dict[tuple[str, int, str], OwnLoad] = {}

    def of(self, stands: str, number: int, what: str, remembered_s: float) -> OwnLoad:
        """The load of gates that stand before the same kind of thing, a queue or a pool, and look at the same metric.

        Before a queue and before its pool one request is counted each time; `number` tells apart several gates that it
        passes before one of them.
        """
        key = (stands, number, what)
        if key not in self._loads:
            self._loads[key] = OwnLoad(remembered_s=remembered_s)
        self._loads[key].remember(remembered_s)
        return self._loads[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A load as it was at a moment."""

    load: float
    """In parts of the capacity: 0 is idle, 1 is full."""
    at: float
    """Loop time at which it was so."""
    capacity: float | None = None
    """Requests that make a load of 1; None where nobody knows."""


class Headroom:
    """How many of ours may be in flight, by the last reading. One for each gate; `own` may be shared."""

    def __init__(
        self, own: OwnLoad, *, threshold: float, sharers: Callable[[], int], chance: Callable[[], float]
    ) -> None:
        self.own = own
        self.threshold = threshold
        self._sharers = sharers
        self._chance = chance
        self._limit: float | None = None
        self._unit = 0.0
        self._learned = _Learned()

    def see(self, measured: Measured) -> None:
        """Take in a reading, and wake as many as it has room for."""
        own_then = self.own.sent_by(measured.at)
        if measured.capacity is not None:
            growth, self._unit = self._known(measured.load, own_then, measured.capacity)
        else:
            there = self.own.fewest_between(self._learned.seen_at, measured.at)
            growth = self._learned.growth(measured, own_then, there, self.threshold)
            self._unit = (self.threshold - measured.load) / growth if growth else self._learned.adds or self._unit
        self._limit = own_then + self._share(growth)
        if self.admits():
            self.own.waiting.wake(int(self._limit + TOLERANCE) - self.own.in_flight)

    def admits(self) -> bool:
        """Whether one more may go, by the last reading and what has changed since."""
        return self._limit is not None and self.own.in_flight + 1 <= self._limit + TOLERANCE

    def budget(self) -> float:
        """The part of the capacity that is free below the threshold, by the same."""
        if self._limit is None or self._limit <= self.own.in_flight:
            return 0.0
        return min((self._limit - self.own.in_flight) * self._unit * max(self._sharers(), 1), 1.0)

    def within(self, capacity: float, part: float) -> bool:
        """Whether one more of ours fits into a part of the capacity, where nothing else is known."""
        return self.own.in_flight + 1 <= max(capacity * part, 1.0) + TOLERANCE

    def _known(self, load: float, own_then: int, capacity: float) -> tuple[float, float]:
        if capacity <= 0:
            return -math.inf, 0.0
        # Else a capacity of one request could never be used: 0.8 of it is none.
        threshold = max(self.threshold, 1 / capacity)
        growth = (threshold - max(load, own_then / capacity)) * capacity
        # A load below 0 leaves more than the whole, as a budget; what may be sent is no more for that.
        return growth, (threshold - load) / growth if load < 0 < growth else 1 / capacity

    def _share(self, growth: float) -> float:
        """Ours of what is free, where several processes see the same reading and would each take all of it.

        Less than one request is given out by chance, so that all of them together take the right number.
        """
        sharers = max(self._sharers(), 1)
        if sharers == 1 or not math.isfinite(growth):
            return growth
        share = growth / sharers
        return math.floor(share) + (self._chance() < share - math.floor(share))


class _Learned:
    """What one request adds to a load of unknown capacity."""

    def __init__(self) -> None:
        self.seen_at = -math.inf
        self._own = 0
        self._load = 0.0
        self._step = 1.0
        self.adds: float | None = None
        """None until it has shown."""

    def growth(self, measured: Measured, own_then: int, there: int, threshold: float) -> float:
        """How many more may be in flight than when it was measured; negative where there are too many.

        `there` is how many of ours were there all the time since the reading before, and are in this one for sure.
        """
        grown, rise = own_then - self._own, measured.load - self._load
        self.seen_at, self._own, self._load = measured.at, own_then, measured.load
        if abs(grown) >= max(1.0, TELLING_PART * own_then) and rise * grown > 0:
            self.adds = rise / grown
        free = threshold - measured.load
        at_most = measured.load / there if there and measured.load > 0 else None
        adds = min((value for value in (at_most, self.adds) if value is not None), default=None)
        if free <= TOLERANCE:
            self._step = 1.0
            return free / adds if adds else -float(own_then)
        # A step that was taken may be followed by one of twice its size; one that nobody took says nothing.
        self._step = max(2.0 * grown, 1.0) if grown >= 1 else self._step
        if self.adds is not None and free < self.adds:
            # Perhaps others grew while it was learned: forgotten slowly, or it would never be tried again.
            self.adds *= FORGETTING
        stepped = min(self._step, free / self.adds) if self.adds else self._step
        return max(free / at_most if at_most else 0.0, stepped, 1.0 if adds is None else 0.0)
