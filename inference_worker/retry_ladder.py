"""The delays that exist between two tries of a request. Pure.

A broker needs one waiting queue for each distinct delay, so there is a fixed set of them.
"""

from bisect import bisect_left, bisect_right
from typing import Final

LADDER_S: Final[tuple[float, ...]] = tuple(round(0.01 * 2 ** (step / 4), 3) for step in range(4 * 28))
"""10 ms to 26 days, four to the octave."""


def rungs_below(seconds: float) -> int:
    """How many rungs are shorter than `seconds`."""
    return bisect_left(LADDER_S, seconds)


def rungs_up_to(seconds: float) -> int:
    """How many rungs are at most `seconds` long."""
    return bisect_right(LADDER_S, seconds)
