"""A merge policy of another package, that loses nothing: all that it was given is known here as well.

At its first fault it is put aside, and what waits goes on in the order `random-robin`: an exception, an item that was
not there, none where there are some, no room where there is nothing. Not here: whether its order is the one that was
meant.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import structlog

from inference_worker.faults import as_exceptions
from inference_worker.merge import PER_LANE, MergePolicy, RandomRobin

T = TypeVar("T")
Said = TypeVar("Said")

MOST: Final = 2**31

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Kept(Generic[T]):
    item: T
    source: str
    tier: str | None
    classification: str | None


class GuardedPolicy(Generic[T]):
    """See `merge.MergePolicy`."""

    def __init__(self, policy: MergePolicy[T], name: str, rng: random.Random, per_lane: int = PER_LANE) -> None:
        self._policy = policy
        self._name = name
        self._rng = rng
        self._per_lane = per_lane
        self._kept: dict[int, _Kept[T]] = {}
        """By the identity of the item, which is held here and so stays its own."""
        self.failed = False

    def put(self, item: T, source: str, tier: str | None, classification: str | None) -> bool:
        """See `merge.MergePolicy`."""
        taken = self._asked(lambda: self._policy.put(item, source, tier, classification))
        if taken is None or (not taken and not self._kept and self._fell("has no room for a single item")):
            taken = self._policy.put(item, source, tier, classification)
        if taken:
            self._kept[id(item)] = _Kept(item, source, tier, classification)
        return bool(taken)

    def pop(self) -> T | None:
        """See `merge.MergePolicy`."""
        item = self._asked(lambda: self._policy.pop())
        known = item is not None and id(item) in self._kept
        if not known and (item is not None or self._kept):
            self._fell("took out what it was not given" if item is not None else "has nothing, where items wait")
            item = self._policy.pop()
        if item is not None:
            del self._kept[id(item)]
        return item

    def room(self, source: str, lane: int) -> int:
        """See `merge.MergePolicy`."""
        said = self._asked(lambda: int(self._policy.room(source, lane)))
        return self._policy.room(source, lane) if said is None else min(max(said, 0), MOST)

    def remove(self, source: str) -> list[T]:
        """See `merge.MergePolicy`."""
        ours = [kept.item for kept in self._kept.values() if kept.source == source]
        removed = self._asked(lambda: list(self._policy.remove(source)))
        if removed is not None and {id(item) for item in removed} != {id(item) for item in ours}:
            self._fell("removed other items than those of the queue")
            removed = None
        if removed is None:
            removed = self._policy.remove(source)
        for item in removed:
            del self._kept[id(item)]
        return removed

    def sizes(self) -> tuple[int, ...]:
        """See `merge.MergePolicy`."""
        said = self._asked(lambda: tuple(int(size) for size in self._policy.sizes()))
        return self._policy.sizes() if said is None else said

    def __len__(self) -> int:
        return len(self._kept)

    def _asked(self, ask: Callable[[], Said]) -> Said | None:
        """What the policy says; None where it failed, and another one has taken its place."""
        try:
            with as_exceptions():
                return ask()
        except Exception as exc:
            if self.failed:
                raise  # The fault is not the extension's.
            log.exception("a merge policy failed", policy=self._name)
            self._fell(type(exc).__name__)
            return None

    def _fell(self, why: str) -> bool:
        """Have another policy in its place, with all that waits."""
        log.error("a merge policy broke its promise; the order is random-robin from now on", policy=self._name, why=why)
        self.failed = True
        # With room for all that is here already: none of it may be lost.
        self._policy = RandomRobin(self._rng, max(self._per_lane, len(self._kept)))
        for kept in self._kept.values():
            self._policy.put(kept.item, kept.source, kept.tier, kept.classification)
        return True
