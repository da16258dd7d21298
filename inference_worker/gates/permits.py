"""What an admission has taken, and how those that wait hear that something was given back.

Not here: what is counted. A gate hands a function to its permits and wakes its own line.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol, runtime_checkable
from weakref import ref

from inference_worker.ports import Asked, Feedback, Gate, Permit

NOT_SENT: Final = Feedback(kind="not_sent")

POLL_S: Final = 0.1
"""When a gate that cannot tell of its changes is asked again; who parks a request may double it up to `ASK_AGAIN_S`."""
ASK_AGAIN_S: Final = 1.0
"""When a gate that tells of its changes is asked again all the same."""


class OncePermit:
    """Calls a function with what was seen, once. The function does not wait, so nothing can come between."""

    __slots__ = ("_give_back",)

    def __init__(self, give_back: Callable[[Feedback], None]) -> None:
        self._give_back: Callable[[Feedback], None] | None = give_back

    async def release(self, seen: Feedback) -> None:
        """A repeat does nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(seen)


async def give_back(permits: Sequence[Permit], seen: Feedback) -> None:
    """Release all of them, the last one first. A cancellation that comes between is raised after all were tried."""
    cut: asyncio.CancelledError | None = None
    for permit in reversed(permits):
        try:
            await permit.release(seen)
        except asyncio.CancelledError as exc:
            cut = exc
    if cut is not None:
        raise cut


class Line:
    """Those that wait for something to be free, in the order in which they came.

    Each has an event of its own, so that one free place wakes one of them and not all. It is held weakly: who has gone
    away, whatever for, is passed over.
    """

    def __init__(self) -> None:
        self._waiting: deque[ref[asyncio.Event]] = deque()
        self._sweep_at = 64

    def __len__(self) -> int:
        """How many still wait."""
        return sum(1 for _ in self._alive())

    def join(self, changed: asyncio.Event | None = None) -> asyncio.Event:
        """An event to wait for: a new one, or the one that somebody waits for already."""
        event = asyncio.Event() if changed is None else changed
        if len(self._waiting) >= self._sweep_at:
            self._waiting = deque(ref(left) for left in self._alive())
            self._sweep_at = max(64, 2 * len(self._waiting))
        self._waiting.append(ref(event))
        return event

    def wake(self, places: int) -> None:
        """Set the events of the first so many."""
        while places > 0 and self._waiting:
            event = self._waiting.popleft()()
            if event is not None and not event.is_set():
                event.set()
                places -= 1

    def _alive(self) -> Iterable[asyncio.Event]:
        for reference in self._waiting:
            event = reference()
            if event is not None and not event.is_set():
                yield event


@runtime_checkable
class Signals(Protocol):
    """A gate that can say when it is worth asking again."""

    def signal(self, changed: asyncio.Event, asked: Asked) -> bool:
        """Have `changed` set once this gate may take such a request again; False where it cannot tell.

        Held weakly: it ends with the one who waits for it.
        """


def signal_of(gates: Iterable[Gate], asked: Asked) -> asyncio.Event | None:
    """An event that is set once any of these gates has something to tell; None where none of them can."""
    changed = asyncio.Event()
    told = [isinstance(gate, Signals) and gate.signal(changed, asked) for gate in gates]
    return changed if any(told) else None
