"""A merge policy that shares a pool among its queues by weights: `{"weights": {"chat": "3", "batch": "1"}}`.

A queue that has work gets its weight's part of the starts while others have work, too; one without a weight has 1.
"""

from collections import deque
from typing import Generic, TypeVar

from inference_worker.extensions import MergePolicyParts

T = TypeVar("T")


class Weighted(Generic[T]):
    """See `merge.MergePolicy`. Stride scheduling: each start moves its queue on by 1 / weight, and the last one goes.

    Source: C. Waldspurger, W. Weihl, "Stride Scheduling", MIT/LCS/TM-528, 1995.
    """

    def __init__(self, weights: dict[str, int], per_queue: int) -> None:
        self._weights = weights
        self._per_queue = per_queue
        self._waiting: dict[str, deque[T]] = {}
        self._passed: dict[str, float] = {}
        self._at = 0.0
        """Where the queue stands whose turn it was last: one that comes back does not catch up on what it missed."""

    def put(self, item: T, source: str, tier: str | None, classification: str | None) -> bool:
        """Lanes mean nothing here."""
        if not self.room(source, 0):
            return False
        if source not in self._waiting:
            self._waiting[source] = deque()
            self._passed[source] = self._at + 1 / self._weights.get(source, 1)
        self._waiting[source].append(item)
        return True

    def pop(self) -> T | None:
        """Of the queue that was passed over most, by its weight."""
        if not self._waiting:
            return None
        source = min(self._waiting, key=lambda name: (self._passed[name], name))
        self._at = self._passed[source]
        self._passed[source] += 1 / self._weights.get(source, 1)
        item = self._waiting[source].popleft()
        if not self._waiting[source]:
            self.remove(source)
        return item

    def room(self, source: str, lane: int) -> int:
        """Each queue has its own."""
        return self._per_queue - len(self._waiting.get(source, ()))

    def remove(self, source: str) -> list[T]:
        """All of a queue."""
        self._passed.pop(source, None)
        return list(self._waiting.pop(source, ()))

    def sizes(self) -> tuple[int, ...]:
        """One number: there are no lanes."""
        return (len(self),)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))


def weighted(parts: MergePolicyParts) -> Weighted[object]:
    """The factory that the entry point names."""
    given = parts.given.texts("weights")
    for source, weight in given.items():
        if not (weight.isdecimal() and int(weight) > 0):
            parts.given.wrong("weights", f"a whole number from 1 on for {source}")
    weights = {source: int(weight) for source, weight in given.items() if weight.isdecimal() and int(weight) > 0}
    return Weighted(weights, parts.per_lane)
