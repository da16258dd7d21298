"""What gates say of themselves, under the peer's names: what they tell as it happens, and what is read off them.

Its methods fit the fields of `gates.making.Around`; once the gates are made all of their series are there, at 0, until
they stand no more. Not here: what a gate says to single requests at a pool, which `pool_gate` counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, assert_never

from inference_worker.gates.aimd import Aimd, BandReading
from inference_worker.gates.making import Owner
from inference_worker.gates.redis_gates import DrainLimit
from inference_worker.gates.saturation import Seen
from inference_worker.peer_metrics import PeerMetrics, Place
from inference_worker.ports import Gate
from inference_worker.transports.merged_source import QueueVerdict

ALWAYS_OPEN: Final = 1.0
"""The budget of a place without a gate."""


class PeerGates:
    """All gates of a process."""

    def __init__(self, metrics: PeerMetrics, queues: Sequence[Place]) -> None:
        self._metrics = metrics
        self._by_id: dict[str, Place] = {}
        """As owners of gates are named."""
        self._by_name: dict[str, Place] = {}
        """As transports name them."""
        self._watched: dict[Owner, set[tuple[Place, str]]] = {}
        self._lent: set[Owner] = set()
        self._windows: dict[Owner, list[Aimd]] = {}
        self.change(queues)

    def change(self, queues: Sequence[Place]) -> None:
        """These are the queues now."""
        self._by_id = {place.queue_id: place for place in queues}
        self._by_name = {place.queue_name: place for place in queues}

    def gone(self, owner: Owner) -> None:
        """The gates there stand no more: what they alone have told goes with them."""
        for place, inference_pool in self._watched.pop(owner, ()):
            self._metrics.not_told(place, inference_pool)
        self._lent.discard(owner)
        if all(other.pool != owner.pool for other in self._lent):
            self._metrics.not_lent(owner.pool)
        self._windows.pop(owner, None)
        if all(other.pool != owner.pool for other in self._windows):
            self._metrics.no_bands(owner.pool)

    # ------------------------------------------------------------ told by gates

    def watched(self, owner: Owner, inference_pool: str) -> None:
        """A gate there looks at metrics."""
        place = self._place(owner)
        self._watched.setdefault(owner, set()).add((place, inference_pool))
        self._metrics.told(place, inference_pool)

    def seen(self, owner: Owner, inference_pool: str, seen: Seen) -> None:
        """It has looked."""
        self._metrics.told(self._place(owner), inference_pool)(seen)

    def lent(self, owner: Owner, limit: DrainLimit) -> None:
        """A gate there has a leased rate."""
        self._lent.add(owner)
        self._metrics.drain_told(owner.pool)(limit)

    def windows(self, owner: Owner, windows: Aimd) -> None:
        """A gate there learns how much may be in flight."""
        self._windows.setdefault(owner, []).append(windows)
        self._metrics.bands(owner.pool, ())

    def verdict(self, queue: str, verdict: QueueVerdict) -> None:
        """The gate of a queue, by its name, has let a request in, or has said why it goes no further."""
        if queue not in self._by_name:  # It was taken away, and gives back the last of what it has.
            return
        counted = self._metrics.queue(self._by_name[queue])
        match verdict:
            case "gate_closed" | "quota_exhausted" | "error":
                counted.gate.decided(verdict)
            case "dropped":
                counted.gate.decided(verdict)
                counted.failed()  # Its answer was that of the gate, and nobody hears of it any more.
            case "admitted":
                pass
            case _:
                assert_never(verdict)

    # ------------------------------------------------------------ read off

    def read(self, queue_gates: Mapping[str, Gate], pool_gates: Mapping[str, Gate | None]) -> None:
        """Note how budgets and windows stand, before they are shown; gates of queues by the id of their queue."""
        for queue_id, place in self._by_id.items():
            self._metrics.queue(place).gate.budget(_budget(queue_gates.get(queue_id)))
        for pool, gate in pool_gates.items():
            self._metrics.pool(pool).budget(_budget(gate))
        by_pool: dict[str, list[Aimd]] = {}
        for owner, windows in self._windows.items():
            by_pool.setdefault(owner.pool, []).extend(windows)
        for pool, windows in by_pool.items():
            self._metrics.bands(pool, summed([one.readings() for one in windows]))

    def _place(self, owner: Owner) -> Place:
        return self._by_id[owner.name] if owner.kind == "queue" else Place(pool_name=owner.pool)


def summed(readings: Sequence[Sequence[BandReading]]) -> list[BandReading]:
    """The windows of a pool whose queues have some each: what may be in flight in all of them."""
    return [
        replace(
            bands[0],
            window=sum(band.window for band in bands),
            ssthresh=sum(band.ssthresh for band in bands),
            in_flight=sum(band.in_flight for band in bands),
            closed=all(band.closed for band in bands),
        )
        for bands in zip(*readings, strict=True)
    ]


def _budget(gate: Gate | None) -> float:
    return ALWAYS_OPEN if gate is None else gate.budget()
