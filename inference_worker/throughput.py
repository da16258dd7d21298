"""How many requests a worker has lately finished, and for how long each held a slot. Pure: who counts says when."""

from collections import deque
from typing import Final

WINDOW_S: Final = 60.0


class Throughput:
    """Counts of the last minute, by the second, so that a message costs next to nothing. All times are of one clock."""

    def __init__(self) -> None:
        self._seconds: deque[list[float]] = deque(maxlen=int(WINDOW_S) + 1)
        """The second, how many ended in it, and for how long they had a slot, in all."""
        self._begun: float | None = None
        self._last_mean_s: float | None = None

    def finished(self, at: float, held_s: float) -> None:
        """A request that was worked on has ended."""
        self._begin(at)
        second = at // 1
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0.0])
        self._seconds[-1][1] += 1
        self._seconds[-1][2] += held_s

    def per_s(self, at: float) -> float:
        """Requests a second, over the last minute, or since the first look where that is less."""
        begun = self._begin(at)
        return self._count(at)[0] / min(max(at - begun, 1.0), WINDOW_S)

    def mean_s(self, at: float) -> float | None:
        """Mean seconds for which a request held a slot; of earlier ones where none ended lately, None before any."""
        count, held_s = self._count(at)
        if count:
            self._last_mean_s = held_s / count
        return self._last_mean_s

    def _begin(self, at: float) -> float:
        if self._begun is None:
            self._begun = at
        return self._begun

    def _count(self, at: float) -> tuple[float, float]:
        lately = [one for one in self._seconds if one[0] > at - WINDOW_S]
        return sum(count for _, count, _ in lately), sum(held_s for _, _, held_s in lately)
