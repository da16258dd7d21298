"""How many replicas a queue wants, from what waits and what the workers get done. Pure: no clock, no I/O, no names.

Three answers, of which the highest counts: by load (requests for each replica), by wait (all of them done within a
while), by deadline (each of them done in time). Up at once, down late: `recommend` says when. Nothing here starts or
stops a container.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Reason = Literal[
    "by_load", "by_wait", "by_deadline", "minimum", "maximum", "work_pending", "cooling_down", "nothing_to_do"
]
"""What the wish comes from. `work_pending` and `cooling_down`: fewer would do, and it is not time to want fewer."""

TARGET_WAIT_S: Final = 60.0
SHORTEST_S: Final = 1e-6
"""A request that took no time by the clock took some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work that is there."""

    ready: int
    in_flight: int
    delayed: int = 0
    """Retries that become ready soon."""
    deadlines: Sequence[float] = ()
    """Of requests that have not ended, as far as they are known, soonest first; Unix seconds."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.ready + self.in_flight + self.delayed


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the replicas can do, as measured."""

    replicas: int
    """Those that would take work."""
    slots_per_replica: int
    service_s: float | None
    """Mean seconds for which a request holds a slot; None where nothing was measured yet."""
    completions_per_s: float = 0.0
    """Of all replicas together; only for people."""

    @property
    def rate_per_replica(self) -> float | None:
        """Requests a second of one replica with all its slots in use."""
        return None if self.service_s is None else self.slots_per_replica / max(self.service_s, SHORTEST_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is wanted of the answer."""

    least: int
    most: int
    per_replica: int = 0
    """Requests that one replica is to have; 0 = as many as it has slots."""
    down_lag: int = 0
    down_after_s: float = 30.0
    target_wait_s: float = TARGET_WAIT_S
    """All that is there is to be done within so many seconds."""

    def clamped(self, replicas: int) -> int:
        """Within the bounds."""
        return min(max(replicas, self.least), self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What was wanted last, and since when less would have been enough."""

    replicas: int
    lower_since: float | None = None
    peak: int = 0
    """The most that was needed since then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """How many replicas are wanted, and how that came about."""

    by_load: int
    by_wait: int | None
    """None where no rate has been measured."""
    by_deadline: int | None
    raw: int
    """The highest of them, within the bounds."""
    stabilised: int
    """What is wanted."""
    target_per_replica: int
    reason: Reason
    held: Held
    """For the next time."""


def recommend(
    load: Load | None, capacity: Capacity | None, policy: Policy, previous: Held | None, now: float
) -> Recommendation | None:
    """How many replicas are wanted now; None where what was seen is nothing to decide by.

    Up at once. Down only while at most `down_lag` requests wait and none is in flight, and only once fewer have been
    enough for `down_after_s` without a break; then to the most that was needed in that time.
    """
    if load is None or capacity is None or not _sound(load, capacity):
        return None
    target = policy.per_replica or capacity.slots_per_replica
    # More slots than requests help nobody, however late it is.
    useful = _shares(load.total, capacity.slots_per_replica)
    by_load = _shares(load.total, target)
    by_wait, by_deadline = _by_rate(load, capacity, policy.target_wait_s, now)
    if by_wait is not None and by_deadline is not None:
        by_wait, by_deadline = min(by_wait, useful), min(by_deadline, useful)
    needed = max(by_load, by_wait or 0, by_deadline or 0)
    raw = policy.clamped(needed)
    held, waits_for = _stabilised(raw, load, capacity, policy, previous, now)
    return Recommendation(
        by_load=by_load,
        by_wait=by_wait,
        by_deadline=by_deadline,
        raw=raw,
        stabilised=held.replicas,
        target_per_replica=target,
        reason=waits_for or _reason(needed, raw, by_load, by_wait),
        held=held,
    )


def _by_rate(load: Load, capacity: Capacity, target_wait_s: float, now: float) -> tuple[int | None, int | None]:
    """Replicas that get everything done within the target, and each request within its deadline."""
    rate = capacity.rate_per_replica
    if rate is None or capacity.service_s is None:
        return None, None
    by_wait, shortest_s = math.ceil(load.total / (target_wait_s * rate)), max(capacity.service_s, SHORTEST_S)
    # What has less time left than a request takes is running already, or too late for any number of replicas.
    times_s = [deadline - now for deadline in load.deadlines if deadline - now >= shortest_s]
    return by_wait, _for_deadlines(sorted(times_s), rate)


def _for_deadlines(times_s: Iterable[float], rate: float) -> int:
    """For each deadline: all that is due by then, over what one replica gets done until then; the highest of these."""
    return max((math.ceil(due / (time_s * rate)) for due, time_s in enumerate(times_s, 1)), default=0)


def _stabilised(
    raw: int, load: Load, capacity: Capacity, policy: Policy, previous: Held | None, now: float
) -> tuple[Held, Reason | None]:
    """What is wanted, and why it is not less, if less would do."""
    # At the very first there is nothing to hold on to but what runs: those replicas may be at work.
    before = policy.clamped(previous.replicas if previous is not None else capacity.replicas)
    if raw >= before:
        return Held(replicas=raw), None
    since, peak = now, raw
    if previous is not None and previous.lower_since is not None:
        since, peak = min(previous.lower_since, now), max(previous.peak, raw)
    if load.in_flight or load.ready + load.delayed > policy.down_lag:
        return Held(replicas=before, lower_since=since, peak=peak), "work_pending"
    if now - since < policy.down_after_s:
        return Held(replicas=before, lower_since=since, peak=peak), "cooling_down"
    if (lower := min(policy.clamped(peak), before)) == raw:
        return Held(replicas=raw), None
    return Held(replicas=lower, lower_since=now, peak=raw), "cooling_down"


def _reason(needed: int, raw: int, by_load: int, by_wait: int | None) -> Reason:
    if raw < needed:
        return "maximum"
    if raw > needed:
        return "minimum"
    if needed == 0:
        return "nothing_to_do"
    if needed == by_load:
        return "by_load"
    return "by_wait" if needed == by_wait else "by_deadline"


def _shares(total: int, each: int) -> int:
    return -(-total // each)


def _sound(load: Load, capacity: Capacity) -> bool:
    counts = (load.ready, load.in_flight, load.delayed, capacity.replicas)
    numbers = (*load.deadlines, capacity.completions_per_s, capacity.service_s or 0.0)
    return (
        all(count >= 0 for count in counts)
        and capacity.slots_per_replica >= 1
        and all(math.isfinite(number) for number in numbers)
        and (capacity.service_s is None or capacity.service_s >= 0)
    )
