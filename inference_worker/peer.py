"""All that a process tells under the peer's names, made of its documents: what its parts are handed, and the page.

Where the documents become others, so does what is told (`change`).

Not here: what counts as what. That is in the `peer_*` files beside this one, and in `pool_gate.py`.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Final

from prometheus_client import CollectorRegistry

from inference_worker.config.documents import ProcessDocuments
from inference_worker.gates.making import Around, Owner
from inference_worker.gates.waiting import GateTold
from inference_worker.peer_backlog import Expiring, PeerBacklog, Polled
from inference_worker.peer_gates import PeerGates
from inference_worker.peer_metrics import PeerMetrics, Place, QueueMetrics, ReloadResult
from inference_worker.peer_notes import PeerNotes
from inference_worker.pooled_metrics import PooledMetrics
from inference_worker.ports import Backlog, Gate, Tracer
from inference_worker.redis_scripts import RedisCommands
from inference_worker.transports.merged import MergedTransport
from inference_worker.transports.merged_source import QueueVerdict

Sessions = Callable[[], AbstractAsyncContextManager[MergedTransport]]
NO_DEADLINES: Final[Mapping[str, Expiring]] = {}


class Peer:
    """What is told of one process."""

    def __init__(self, documents: ProcessDocuments) -> None:
        self._places: list[Place] = []
        self._registry = CollectorRegistry()
        self._metrics = PeerMetrics(self._registry, queues=(), pools=())
        self._gates = PeerGates(self._metrics, ())
        self._by_name: dict[str, QueueMetrics] = {}
        """By the names of queues, as deliveries have them."""
        self._at_queues: dict[str, Mapping[str, Gate]] = {}
        """By pools, and then by the ids of queues."""
        self._at_pools: dict[str, Gate | None] = {}
        self._sessions: dict[str, MergedTransport] = {}
        self._backlogs: dict[str, PeerBacklog] = {}
        self.change(documents)

    def change(self, documents: ProcessDocuments) -> None:
        """These are the queues and pools now. Which gates stand there is said by `stand` and `gone`."""
        self._places = [
            Place(queue_id=queue.id, queue_name=queue.queue_name, pool_name=queue.worker_pool_id)
            for queue in documents.transport.queues
        ]
        pools = [pool.id for pool in documents.pools]
        self._metrics.change(queues=self._places, pools=pools)
        for pool in documents.pools:
            self._metrics.worker_limit(pool.id, pool.workers)
        self._gates.change(self._places)
        self._by_name.clear()
        self._by_name.update({place.queue_name: self._metrics.queue(place) for place in self._places})
        self._at_pools = {pool: self._at_pools.get(pool) for pool in pools}
        for gone in self._backlogs.keys() - set(pools):
            del self._backlogs[gone]
            self._at_queues.pop(gone, None)
            self._sessions.pop(gone, None)

    # ------------------------------------------------------------ what the parts are handed

    def around(self, around: Around) -> Around:
        """The surroundings of gates, that are to be made of them."""
        gates = self._gates
        return replace(around, seen=gates.seen, lent=gates.lent, watched=gates.watched, windows=gates.windows)

    def stand(self, pool: str, at_queues: Mapping[str, Gate], at_pool: Gate | None) -> None:
        """These gates were made for a pool and its queues, by the ids of these."""
        self._at_queues[pool] = at_queues
        self._at_pools[pool] = at_pool

    def gone(self, owner: Owner) -> None:
        """The gate there stands no more."""
        self._gates.gone(owner)

    def reloaded(self, result: ReloadResult, now: float) -> None:
        """The documents were read again at `now`, in Unix seconds."""
        self._metrics.reloaded(result, now)

    def verdict(self, queue: str, verdict: QueueVerdict) -> None:
        """The gate of a queue has spoken: what `MergedQueues` tells."""
        self._gates.verdict(queue, verdict)

    def at_pool(self, pool: str) -> GateTold:
        """What the gate of a pool tells of requests: for `PoolGate`."""
        return self._metrics.pool(pool)

    def notes(self, tracer: Tracer) -> PeerNotes:
        """A tracer for the listeners, around their own."""
        return PeerNotes(tracer, self._by_name)

    def followed(self, pool: str, connect: Sessions) -> Sessions:
        """The same way to open sessions with the queues of a pool, which are asked from then on what waits."""

        @asynccontextmanager
        async def open_session() -> AsyncGenerator[MergedTransport, None]:
            async with connect() as session:
                self._sessions[pool] = session  # Once it is lost it has nothing to tell, and says so.
                yield session

        return open_session

    # ------------------------------------------------------------ what waits, and what is shown

    def backlog(self, pool: str, interval_s: float, due: Mapping[str, Expiring] = NO_DEADLINES) -> PeerBacklog:
        """What is to run beside a pool whose gates stand; see `polled` for `due`."""

        async def backlogs() -> Mapping[str, Backlog]:
            session = self._sessions.get(pool)
            return {} if session is None or session.lost.is_set() else await session.backlogs()

        made = self._backlogs[pool] = PeerBacklog((), backlogs, interval_s=interval_s)
        self.polled(pool, due)
        return made

    def polled(self, pool: str, due: Mapping[str, Expiring] = NO_DEADLINES) -> None:
        """Count what waits in the queues that a pool has now, at the gates that stand there now.

        `due` is by the names of queues.
        """
        gates = self._at_queues.get(pool, {})
        self._backlogs[pool].queues = tuple(
            Polled(
                name=place.queue_name,
                metrics=self._metrics.queue(place),
                gate=gates.get(place.queue_id),
                expiring=due.get(place.queue_name),
            )
            for place in self._places
            if place.pool_name == pool
        )

    def page(self, pools: Mapping[str, CollectorRegistry]) -> Callable[[str], tuple[bytes, str]]:
        """The whole page of the process, for an Accept header; `pools` are the registries of their workers."""
        pooled = PooledMetrics(pools, [self._registry])

        def shown(accept: str) -> tuple[bytes, str]:
            at_queues = {id: gate for gates in self._at_queues.values() for id, gate in gates.items()}
            self._gates.read(at_queues, self._at_pools)
            waiting = {name: count for session in self._sessions.values() for name, count in session.waiting().items()}
            for place in self._places:
                self._metrics.queue(place).depth(waiting.get(place.queue_name, 0))
            return pooled.exposition(accept)

        return shown


def due_in(link: RedisCommands, queue_name: str, now: Callable[[], float]) -> Expiring:
    """Asks a queue in a sorted set of Redis how much of it is due when."""
    from inference_worker.transports.redis_sorted_set import SortedSetQueue, expiring

    queue = SortedSetQueue(name=queue_name)
    return lambda windows_s: expiring(link, queue, windows_s, now())
