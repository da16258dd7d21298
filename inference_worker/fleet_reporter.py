"""A worker's word to its fleet: how it is, every two seconds; and its ear: whether it is wanted.

`worker-N` takes no messages while fewer than N replicas are wanted. It finishes what it has, and stays warm. Workers
of other names never idle: whoever starts and stops those has the scale signal for it.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from inference_worker.errors import StoreUnavailable
from inference_worker.metrics import Suspension
from inference_worker.ports import Beat, Fleet, LinkState
from inference_worker.throughput import Throughput
from inference_worker.timing import quietly, stopped_within

log = structlog.get_logger(__name__)

BEAT_S: Final = 2.0
WISH_HOLDS_S: Final = 30.0
"""How long a wish is gone by when the fleet does not answer: as long as one lives at least."""

LEAVE_S: Final = 1.0
_NUMBERED: Final = re.compile(r"worker-([1-9][0-9]{0,8})\Z")
_STILL_FIT: Final = frozenset({"scale", "memory"})
"""Reasons to take nothing now that say nothing against the worker."""


class Consumer(Protocol):
    """The part of the listener that this needs."""

    state: LinkState
    suspended: dict[Suspension, str]
    throughput: Throughput

    @property
    def in_flight(self) -> int: ...

    def suspend_consuming(self, reason: Suspension, why: str = "") -> None: ...

    def resume_consuming(self, reason: Suspension) -> None: ...


class FleetReporter:
    """Beats for one worker, and lets it idle while it is not wanted."""

    def __init__(
        self,
        fleet: Fleet,
        consumer: Consumer,
        *,
        replica_id: str,
        slots: int,
        model: str,
        stopping: Callable[[], bool],
        now: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._consumer = consumer
        self._replica_id = replica_id
        self._number = number_of(replica_id)
        self.slots = slots
        """They may become others while it runs."""
        self._model = model
        self._stopping = stopping
        self._now = now
        self._heard_at: float | None = None
        self._said = ""

    async def run(self, until: asyncio.Event) -> None:
        """Beat at once and then every two seconds, until told to stop; then say that this worker has ended."""
        while not until.is_set():
            await self._beat()
            await stopped_within(until, BEAT_S)
        await quietly(self._fleet.leave(self._replica_id), LEAVE_S, StoreUnavailable)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            wanted = await self._fleet.beat(self._as_it_is(loop.time()))
        except StoreUnavailable as exc:
            if self._said != (why := str(exc)):
                self._said = why
                log.warning("the fleet cannot be told how this worker is", reason=why)
            if self._heard_at is not None and loop.time() - self._heard_at >= WISH_HOLDS_S:
                self._heed(None)
            return
        self._said = ""
        self._heard_at = loop.time()
        self._heed(wanted)

    def _as_it_is(self, at: float) -> Beat:
        consumer = self._consumer
        return Beat(
            replica_id=self._replica_id,
            at=self._now(),
            slots=self.slots,
            in_flight=consumer.in_flight,
            consuming=consumer.state == "consuming",
            fit=not self._stopping() and _STILL_FIT.issuperset(consumer.suspended),
            service_s=consumer.throughput.mean_s(at),
            done_per_s=consumer.throughput.per_s(at),
            model=self._model,
        )

    def _heed(self, wanted: int | None) -> None:
        if self._number is None or wanted is None or self._number <= wanted:
            self._consumer.resume_consuming("scale")
            return
        why = f"{wanted} replicas are wanted, and this is number {self._number}"
        if self._consumer.suspended.get("scale") != why:
            self._consumer.suspend_consuming("scale", why)


def number_of(replica_id: str) -> int | None:
    """The N of an id that ends in `worker-N`, 1 or more; None for any other id."""
    found = _NUMBERED.search(replica_id)
    return None if found is None else int(found[1])
