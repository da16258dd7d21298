"""The gate that learns from answers: a window for each band, which grows while requests are taken and shrinks when not.

A band is a lane of `lanes.py`. It needs no metrics and no constants of the pool: every answer is a reading, and none is
ever old. The model serves the bands in the order of their rank, so what one band sees says something of the others: a
rejection means that those below it are no better off, and that those above it will be next.

A decrease is a point of recovery, as in TCP: of requests that were sent before it, rejections are the same event and
count no more, and acceptances say nothing of how things are now.

Sources: V. Jacobson, "Congestion Avoidance and Control", SIGCOMM 1988; D. Chiu and R. Jain, "Analysis of the Increase
and Decrease Algorithms for Congestion Avoidance in Computer Networks", 1989, for why several replicas, each with such a
gate, come to equal shares without knowing of each other.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from inference_worker.gates.parameters import Parameters
from inference_worker.gates.permits import ASK_AGAIN_S, Line, OncePermit
from inference_worker.lanes import CLASSIFICATION_LABEL, LANES, RESERVED, TIER_LABEL, lane_by_labels
from inference_worker.ports import Admitted, Asked, Feedback, Parked, TurnedAway, Verdict

GENTLY: Final = 0.9
LONGEST_CLOSE_S: Final = 600.0
"""A `Retry-After` beyond it closes a band for so long only: one odd answer must not stop a pool for a day."""
HEADROOM_HEADER: Final = "x-llm-d-flow-band-headroom"
QUEUE_MS_HEADER: Final = "x-llm-d-flow-queue-duration-ms"


class _Mark(NamedTuple):
    """A moment, and the admissions up to it, which tell apart what falls on one tick of the clock."""

    at: float
    admissions: int


_NEVER: Final = _Mark(-math.inf, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AimdRules:
    """The parameters. Windows are numbers of requests in flight."""

    min_window: float = 1.0
    """At least 1: a band that is squeezed out still tries, and so learns that it is over."""
    max_window: float = 256.0
    increase: float = 1.0
    decrease_factor: float = 0.5
    hold_s: float = 1.0
    """How long a band does not grow, since one below it was rejected."""
    queue_target_s: float = 0.0
    """How long an accepted request may wait at the gateway before that counts as congestion; 0 = for ever."""
    tier_label: str = TIER_LABEL


@dataclass(frozen=True, slots=True, kw_only=True)
class BandReading:
    """One band as it stands, for metrics."""

    band: str
    window: float
    ssthresh: float
    in_flight: int
    closed: bool


class Aimd:
    """One window a band. A full band keeps what is reserved waiting and gives the rest back to its queue.

    Only what is reserved waits, since whoever waits holds a place of the pool that other bands could use.
    """

    def __init__(self, rules: AimdRules, clock: Callable[[], float]) -> None:
        """`clock` is the loop's time, by which `Feedback.sent_at` counts."""
        self._rules = rules
        self._clock = clock
        self._admissions = 0
        self._bands = [_Band(rules) for _ in LANES]

    def budget(self) -> float:
        """The free part of the windows of the bands that were ever asked for."""
        now = self._clock()
        asked_for = [band for band in self._bands if band.asked_for]
        free, whole = sum(band.free(now) for band in asked_for), sum(int(band.window) for band in asked_for)
        return min(1.0, free / whole) if whole else 1.0

    async def admit(self, asked: Asked) -> Verdict:
        """A place in the band's window. Nothing here waits."""
        now, number = self._clock(), lane_by_labels(asked.labels, self._rules.tier_label)
        band = self._bands[number]
        band.asked_for = True
        if band.free(now) > 0:
            band.in_flight += 1
            self._admissions += 1
            admitted = _Mark(now, self._admissions)
            return Admitted(permits=(OncePermit(lambda seen: self._seen(number, admitted, seen)),))
        if asked.labels.get(CLASSIFICATION_LABEL) != RESERVED:
            return TurnedAway()
        if band.closed_until > now:
            return Parked(within_s=band.closed_until - now)
        return Parked(within_s=ASK_AGAIN_S, changed=band.line.join())

    def signal(self, changed: asyncio.Event, asked: Asked) -> bool:
        """Told of a free place in the request's band; of the end of a closed time, only by asking again."""
        band = self._bands[lane_by_labels(asked.labels, self._rules.tier_label)]
        if band.closed_until > self._clock():
            return False
        band.line.join(changed)
        return True

    async def run(self, until: asyncio.Event) -> None:
        """It reads answers alone."""

    def closes_at(self) -> str:
        """By what the model says."""
        least, most = self._rules.min_window, self._rules.max_window
        return f"{least:g} to {most:g} requests in flight a band, as the model's answers allow"

    def readings(self) -> Sequence[BandReading]:
        """All six bands, the highest first."""
        now = self._clock()
        return [
            BandReading(
                band=name,
                window=band.window,
                ssthresh=band.ssthresh,
                in_flight=band.in_flight,
                closed=band.closed_until > now,
            )
            for name, band in zip(LANES, self._bands, strict=True)
        ]

    def _seen(self, number: int, admitted: _Mark, seen: Feedback) -> None:
        """A request has ended: its place is free, and its answer may move windows."""
        band = self._bands[number]
        band.in_flight -= 1
        sent = admitted if seen.sent_at is None else _Mark(seen.sent_at, admitted.admissions)
        match seen.kind:
            case "accepted":
                self._accepted(number, sent, seen)
            case "capacity_rejected":
                self._rejected(number, sent, seen)
            case "ttl_expired":
                now = self._mark()
                if band.decrease(GENTLY, sent, now):
                    self._hold(number + 1, now)
            case "evicted" | "rejected" | "error" | "not_sent":
                # It was let in and made way for another, was wrong in itself, or nobody answered: no word on capacity.
                pass
        if (headroom := _number(seen, HEADROOM_HEADER)) is not None:
            band.cap(band.in_flight + headroom)
        now_s = self._clock()
        for woken in self._bands:
            woken.line.wake(woken.free(now_s))

    def _accepted(self, number: int, sent: _Mark, seen: Feedback) -> None:
        band, target_s = self._bands[number], self._rules.queue_target_s
        queued_s = (_number(seen, QUEUE_MS_HEADER) or 0.0) / 1000
        if target_s > 0 and queued_s >= target_s:
            # The first sign of congestion, before any rejection.
            if queued_s >= 2 * target_s:
                band.decrease(GENTLY, sent, self._mark())
            return
        for above in self._bands[:number]:
            if sent > above.held_at:
                above.held_until = -math.inf
        if band.held_until <= self._clock() and sent > band.decreased_at:
            band.grow()

    def _rejected(self, number: int, sent: _Mark, seen: Feedback) -> None:
        now, factor = self._mark(), self._rules.decrease_factor
        if seen.retry_after_s is not None and seen.retry_after_s > 0:
            # An order, not a reading: it holds whenever the request was sent.
            until = now.at + min(seen.retry_after_s, LONGEST_CLOSE_S)
            for band in self._bands[number:]:
                band.close(until, factor, sent, now)
            self._hold(number, now)
            return
        fresh = sent > self._bands[number].decreased_at
        for band in self._bands[number:]:
            band.decrease(factor, sent, now)
        if fresh:
            self._hold(number, now)

    def _hold(self, below: int, now: _Mark) -> None:
        """The bands above do not grow for a while."""
        for band in self._bands[:below]:
            band.held_at, band.held_until = now, now.at + self._rules.hold_s

    def _mark(self) -> _Mark:
        return _Mark(self._clock(), self._admissions)


class _Band:
    """One window, and what moves it."""

    def __init__(self, rules: AimdRules) -> None:
        self._rules = rules
        self.window = rules.min_window
        self.ssthresh = rules.max_window
        self.in_flight = 0
        self.asked_for = False
        self.decreased_at = _NEVER
        self.held_at = _NEVER
        self.held_until = -math.inf
        self.closed_until = -math.inf
        self.line = Line()

    def free(self, now: float) -> int:
        """How many more it takes. A part of a place is none."""
        return 0 if self.closed_until > now else max(0, int(self.window) - self.in_flight)

    def grow(self) -> None:
        """By one an acceptance up to the threshold, which doubles it a flight; beyond it by one for a whole window."""
        increase = self._rules.increase
        self.window += increase if self.window < self.ssthresh else increase / self.window
        self.window = min(self.window, self._rules.max_window)

    def decrease(self, factor: float, sent: _Mark, now: _Mark) -> bool:
        """Once for all that was sent before; False where that was done already."""
        if sent <= self.decreased_at:
            return False
        self.window = self.ssthresh = max(self._rules.min_window, self.window * factor)
        self.decreased_at = now
        return True

    def close(self, until: float, factor: float, sent: _Mark, now: _Mark) -> None:
        """Takes nothing until then; it opens at the smallest window and doubles up to what would have been left."""
        self.decrease(factor, sent, now)
        self.window = self._rules.min_window
        self.decreased_at = now
        self.closed_until = max(self.closed_until, until)

    def cap(self, most: float) -> None:
        """What the gateway says it has room for; from there on it grows slowly."""
        if most < self.window:
            self.window = max(self._rules.min_window, most)
            self.ssthresh = min(self.ssthresh, self.window)


def _number(seen: Feedback, name: str) -> float | None:
    """A header's number, 0 or more; None where it is missing or no such thing."""
    try:
        number = float(seen.headers.get(name, ""))
    except ValueError:
        return None
    return number if 0 <= number < math.inf else None


def aimd(given: Parameters, clock: Callable[[], float]) -> Aimd:
    """`aimd`: all its parameters may be left out."""
    least = given.number("min_window", 1.0, at_least=1)
    most = given.number("max_window", 256.0, at_least=1)
    if most < least:
        given.wrong("max_window", f"a number of at least min_window, {least:g}")
    rules = AimdRules(
        min_window=least,
        max_window=max(least, most),
        increase=given.number("increase", 1.0, above=0),
        decrease_factor=given.number("decrease_factor", 0.5, above=0, below=1),
        hold_s=given.seconds("hold_duration", 1.0, at_least=0),
        queue_target_s=given.seconds("queue_duration_target", 0.0, at_least=0),
        tier_label=given.text("tier_label", TIER_LABEL),
    )
    given.text("pool", "")  # Names the pool in the peer's metrics; here the pool that has the gate says so.
    given.finish()
    return Aimd(rules, clock)
