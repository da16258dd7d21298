"""In which order requests of several queues go to one pool. Data structures only: nothing waits, and there is no clock.

Three policies, all bounded. `RandomRobin` draws among the queues that have something. `TierPriority` has six lanes in
strict order, so that a low one may starve. `TierAging` keeps that order and lets no lane starve.

Not here: what the items are. Whoever fills a policy asks `room` first, and keeps what finds none in its queue.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Final, Generic, Protocol, TypeVar

from inference_worker.lanes import LANES, lane_of

T = TypeVar("T")

PER_LANE: Final = 1000
"""How many items a lane holds where nothing else is configured."""
PATIENCE: Final = 32


class MergePolicy(Protocol[T]):
    """What waits for one pool, and which of it goes next."""

    def put(self, item: T, source: str, tier: str | None, classification: str | None) -> bool:
        """Add an item of a queue; False where there is no room for it."""

    def pop(self) -> T | None:
        """Take the next one out; None where there is none."""

    def room(self, source: str, lane: int) -> int:
        """How many more a queue may put into a lane now."""

    def remove(self, source: str) -> list[T]:
        """Take out all that a queue has here, oldest first by lane: it is gone, or its connection is."""

    def sizes(self) -> tuple[int, ...]:
        """How many wait in each lane, or in all where there are no lanes."""

    def __len__(self) -> int: ...


class RandomRobin(Generic[T]):
    """A queue that has something is as likely as any other to be next; inside a queue, first in, first out."""

    def __init__(self, rng: random.Random, per_source: int = PER_LANE) -> None:
        self._rng = rng
        self._per_source = per_source
        self._waiting: dict[str, deque[T]] = {}
        self._ready: list[str] = []
        """The queues that have something, in any order: one is drawn by its place, the last takes a gap."""
        self._size = 0

    def put(self, item: T, source: str, tier: str | None, classification: str | None) -> bool:
        """Lanes mean nothing here."""
        if not self.room(source, lane_of(tier, classification)):
            return False
        if source not in self._waiting:
            self._waiting[source] = deque()
            self._ready.append(source)
        self._waiting[source].append(item)
        self._size += 1
        return True

    def pop(self) -> T | None:
        """The oldest item of a queue drawn at random."""
        if not self._ready:
            return None
        place = self._rng.randrange(len(self._ready))
        waiting = self._waiting[self._ready[place]]
        item = waiting.popleft()
        self._size -= 1
        if not waiting:
            self._forget(place)
        return item

    def room(self, source: str, lane: int) -> int:
        """Each queue has its own."""
        return self._per_source - len(self._waiting.get(source, ()))

    def remove(self, source: str) -> list[T]:
        """All of a queue."""
        if source not in self._waiting:
            return []
        items = list(self._waiting[source])
        self._size -= len(items)
        self._forget(self._ready.index(source))
        return items

    def sizes(self) -> tuple[int, ...]:
        """One number: there are no lanes."""
        return (self._size,)

    def __len__(self) -> int:
        return self._size

    def _forget(self, place: int) -> None:
        del self._waiting[self._ready[place]]
        last = self._ready.pop()
        if place < len(self._ready):
            self._ready[place] = last


class TierPriority(Generic[T]):
    """The lowest lane that has something is always next, whatever waits behind it; in it, the queues take turns."""

    def __init__(self, per_lane: int = PER_LANE) -> None:
        self._lanes: list[_Lane[T]] = [_Lane(per_lane) for _ in LANES]

    def put(self, item: T, source: str, tier: str | None, classification: str | None) -> bool:
        """A full lane refuses its own alone."""
        return self._lanes[lane_of(tier, classification)].put(item, source)

    def pop(self) -> T | None:
        """Of the first lane that has something."""
        return next((lane.pop() for lane in self._lanes if lane.size), None)

    def room(self, source: str, lane: int) -> int:
        """Of that lane; a queue that has nothing in it always has room for one."""
        return self._lanes[lane].room(source)

    def remove(self, source: str) -> list[T]:
        """All of a queue, the first lane first."""
        return [item for lane in self._lanes for item in lane.remove(source)]

    def sizes(self) -> tuple[int, ...]:
        """By lane."""
        return tuple(lane.size for lane in self._lanes)

    def __len__(self) -> int:
        return sum(self.sizes())


class TierAging(Generic[T]):
    """Strict order, but a lane that was passed over `patience` times since its last turn is next.

    Where several have run out of patience, the one whose patience ended first goes first, and each has one turn. So
    between two turns of a lane that has work there are at most `patience + 5` others, and the first lane keeps what the
    others' patience leaves it: with 32 for each, more than four fifths.

    Age is counted in starts, not in seconds. By the clock, a deep backlog makes every batch message old, and an
    interactive one then waits behind minutes of it; and while a gate is closed all would grow old together. Counted in
    starts, what a lane gets does not depend on how long the backlog is. Plain weights have such a bound, too, but take
    from the first lane also where nobody has waited long.
    """

    def __init__(
        self, per_lane: int = PER_LANE, patience: int = PATIENCE, by_lane: Mapping[str, int] | None = None
    ) -> None:
        """`patience` is at least 1; `by_lane` has that of single lanes, by their names."""
        given = by_lane or {}
        self._patience: Sequence[int] = [given.get(name, patience) for name in LANES]
        self._lanes: list[_Lane[T]] = [_Lane(per_lane) for _ in LANES]
        self._passed_over = [0 for _ in LANES]
        """Since its last turn, or since it has had something."""
        self._overdue: OrderedDict[int, None] = OrderedDict()
        """Lanes without patience left, in the order in which it ended."""

    def put(self, item: T, source: str, tier: str | None, classification: str | None) -> bool:
        """A full lane refuses its own alone."""
        return self._lanes[lane_of(tier, classification)].put(item, source)

    def pop(self) -> T | None:
        """Of the lane whose patience ended first, else of the first lane that has something."""
        number = next(iter(self._overdue), None)
        if number is None:
            number = next((number for number, lane in enumerate(self._lanes) if lane.size), None)
        if number is None:
            return None
        item = self._lanes[number].pop()
        self._passed_over[number] = 0
        self._overdue.pop(number, None)
        for other, lane in enumerate(self._lanes):
            if other != number and lane.size:
                self._passed_over[other] += 1
                if self._passed_over[other] >= self._patience[other]:
                    self._overdue[other] = None
        return item

    def room(self, source: str, lane: int) -> int:
        """Of that lane; a queue that has nothing in it always has room for one."""
        return self._lanes[lane].room(source)

    def remove(self, source: str) -> list[T]:
        """All of a queue, the first lane first."""
        items = [item for lane in self._lanes for item in lane.remove(source)]
        for number, lane in enumerate(self._lanes):
            if not lane.size:
                self._passed_over[number] = 0
                self._overdue.pop(number, None)
        return items

    def sizes(self) -> tuple[int, ...]:
        """By lane."""
        return tuple(lane.size for lane in self._lanes)

    def __len__(self) -> int:
        return sum(self.sizes())


class _Lane(Generic[T]):
    """Queues take turns, one item each; inside a queue, first in, first out.

    A full lane takes one item of a queue that has none in it: a queue that floods a lane never keeps another from its
    turns. So it holds at most its bound and one for each queue.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        """The queue whose turn it is comes first."""
        self.size = 0

    def put(self, item: T, source: str) -> bool:
        if not self.room(source):
            return False
        self._waiting.setdefault(source, deque()).append(item)
        self.size += 1
        return True

    def pop(self) -> T:
        source, waiting = next(iter(self._waiting.items()))
        item = waiting.popleft()
        self.size -= 1
        if waiting:
            self._waiting.move_to_end(source)
        else:
            del self._waiting[source]
        return item

    def room(self, source: str) -> int:
        return max(self._bound - self.size, 0 if source in self._waiting else 1)

    def remove(self, source: str) -> list[T]:
        items = list(self._waiting.pop(source, ()))
        self.size -= len(items)
        return items
