"""How much waits at the brokers, asked for every few seconds and shown under the peer's names.

A queue that cannot be asked is said to be unknown. A source that fails or hangs costs its numbers of one turn and
nothing else; the reason is logged once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from inference_worker.errors import StoreUnavailable, TransportLost
from inference_worker.peer_metrics import PROXIMITY_WINDOWS_S, QueueMetrics
from inference_worker.ports import Backlog, Gate
from inference_worker.timing import stopped_within

log = structlog.get_logger(__name__)

TURN_S: Final = 10.0
"""How long one turn may take."""
FAR_S: Final = 1e11
"""Beyond every deadline: some thousand years."""
WINDOWS_S: Final = (*PROXIMITY_WINDOWS_S, FAR_S)

Backlogs = Callable[[], Awaitable[Mapping[str, Backlog]]]
"""What waits, by queue, without those queues that cannot be asked; may raise anything."""
Expiring = Callable[[Sequence[float]], Awaitable[Sequence[int]]]
"""How many of those that wait are due within each window, in seconds from now; may raise anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Polled:
    """A queue whose backlog is shown."""

    name: str
    """As `Backlogs` has it."""
    metrics: QueueMetrics
    gate: Gate | None = None
    expiring: Expiring | None = None
    """None where the broker does not know of deadlines."""


class PeerBacklog:
    """Asks one source for the backlogs of some queues, such as those of one pool."""

    def __init__(self, queues: Sequence[Polled], backlogs: Backlogs, *, interval_s: float) -> None:
        """`interval_s` of 0: never."""
        self.queues = tuple(queues)
        """They may become others while it runs."""
        self._backlogs = backlogs
        self._interval_s = interval_s
        self._why_not = ""

    async def run(self, until: asyncio.Event) -> None:
        """Ask at once, and again and again until told to stop."""
        if self._interval_s <= 0:
            return
        while not until.is_set():
            await self._turn()
            await stopped_within(until, self._interval_s)

    async def _turn(self) -> None:
        why_not, queues = "", self.queues
        found: Mapping[str, Backlog] = {}
        try:
            async with asyncio.timeout(TURN_S):
                found = await self._backlogs()
                for queue in queues:
                    if queue.name in found and queue.expiring is not None:
                        queue.metrics.deadlines_within(await queue.expiring(WINDOWS_S))
        except (TransportLost, StoreUnavailable, TimeoutError) as exc:
            why_not = str(exc) or "there was no answer in time"
            if why_not != self._why_not:
                log.warning("what waits cannot be counted; trying again", reason=why_not)
        except Exception as exc:
            # A fault of ours must not end the process: these are numbers to look at.
            why_not = f"{type(exc).__name__}: {exc}"
            if why_not != self._why_not:
                log.exception("what waits cannot be counted; trying again", reason=why_not)
        for queue in queues:
            self._note(queue, found.get(queue.name))
        if self._why_not and not why_not:
            log.info("what waits is counted again")
        self._why_not = why_not

    def _note(self, queue: Polled, backlog: Backlog | None) -> None:
        queue.metrics.backlog(None if backlog is None else backlog.ready)
        if backlog is not None and backlog.ready > 0 and queue.gate is not None and queue.gate.budget() <= 0:
            queue.metrics.gate.decided("gate_closed")
