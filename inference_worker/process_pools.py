"""The pools of a process as they run: made of its documents, and changed with them without a restart.

A change has two halves. First all that is new is made: gates, ways to queues. What can fail fails here, and nothing is
touched. Then the process becomes what the documents say, in one turn of the loop:

- What is written as before (`process_changes.written`) is the same object as before: a queue keeps its connection, its
  consumer, its gate and what that knows; a pool its listener, and its gate.
- A queue that is gone gives back what waits here, lets its calls end, and closes (`MergedQueues.change`). One that is
  written anew is one that is gone and one that is new, side by side for a while.
- A pool that is gone drains as at the end of the process. More or fewer workers are room for more or fewer calls
  (`Worker.resize`), another gate is asked from then on, also by who waits at the old one (`PoolGate.replace`), another
  merge policy lines up anew what waits in its lanes.
- A gate that stands no more runs on, unheard, until all that it has let in is given back to it. A gateway that nobody
  names any more is closed when the last call of its queues has ended.

Not here: reading the documents (`process_reload.py`), and what a part is made of (`process_queues.py`, `gates/`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import structlog
from prometheus_client import CollectorRegistry

from inference_worker.addressing import Addressing
from inference_worker.alongside import Alongside
from inference_worker.assembly import Outside, Stores, Worker
from inference_worker.config.documents import GateConfig, MergeConfig, PoolConfig, ProcessDocuments, QueueConfig
from inference_worker.config.doubts import named
from inference_worker.config.process_flags import ProcessFlags
from inference_worker.disposition import HandBack
from inference_worker.gates.making import Around, Owner, gate_of
from inference_worker.gates.telling import Telling
from inference_worker.llmd_retry import UntilDeadline
from inference_worker.metrics import WorkerMetrics
from inference_worker.peer import Peer
from inference_worker.peer_backlog import Expiring
from inference_worker.pool_gate import PoolGate
from inference_worker.pools import Pool
from inference_worker.ports import Connect, Gate, Route, Tracer
from inference_worker.process_changes import written
from inference_worker.process_queues import HAND_BACK, policy_of, route_of
from inference_worker.process_status import Standing
from inference_worker.routed_model import RoutedModel
from inference_worker.sharers import Sharers
from inference_worker.timing import ByteBudget
from inference_worker.transforms.shaping import Shaping
from inference_worker.transports.merged import MergedQueues, Source, saw
from inference_worker.transports.merged_source import MOST_WAITING_BYTES

log = structlog.get_logger(__name__)


class Broker(Protocol):
    """Where the queues of a pool are; see `process_queues.Broker`."""

    def connect(self, queue: QueueConfig, route: Route) -> Connect: ...

    def due(self, queues: Sequence[QueueConfig]) -> Mapping[str, Expiring]: ...

    @property
    def hand_back(self) -> HandBack: ...

    @property
    def on_ladder(self) -> bool: ...


BrokerOf = Callable[[WorkerMetrics], Broker]
"""For a pool, which has such metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What pools are made of, the same for as long as the process runs."""

    flags: ProcessFlags
    outside: Outside
    replica_id: str
    stores: Stores
    broker_of: BrokerOf
    model: RoutedModel
    around: Around
    """Of gates; whom they tell is the peer."""
    open_links: Callable[[], Awaitable[None]]
    """Has the connections opened that gates were given since."""
    peer: Peer
    standing: Standing
    tracer: Tracer
    queue_ids: dict[str, str]
    """By the names of queues, as spans name them; kept up here."""
    shaping: Shaping
    breaker_failures: int
    waiting: ByteBudget = field(default_factory=lambda: ByteBudget(MOST_WAITING_BYTES))
    """What waits unstarted, of all pools together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StandingGate:
    """A gate and its place."""

    owner: Owner
    written: str
    gate: Gate
    telling: Telling
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Queue:
    """A queue of a pool."""

    written: str
    source: Source
    gate: StandingGate | None


@dataclass(slots=True, kw_only=True, eq=False)
class RunningPool:
    """A pool, with what may become another one while it runs."""

    name: str
    metrics: WorkerMetrics
    merged: MergedQueues
    broker: Broker
    sharers: Sharers
    merge: str
    """As it was written."""
    at_pool: PoolGate = field(init=False)
    """Where the gate of the pool stands, if there is one."""
    queues: Mapping[str, Queue] = field(default_factory=dict)
    """By their ids."""
    gate: StandingGate | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Ends what runs beside it."""
    shares: bool = False
    """It is looked how many processes take from it, for there is or was a gate."""

    @property
    def gates(self) -> list[StandingGate]:
        """All that stand before it and its queues."""
        return _gates(self.queues, self.gate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """What a pool is to become."""

    pool: RunningPool
    config: PoolConfig
    configs: Sequence[QueueConfig]
    queues: Mapping[str, Queue]
    gate: StandingGate | None


class ProcessPools:
    """All pools of a process."""

    def __init__(self, parts: Parts, first: ProcessDocuments) -> None:
        """`first` are the documents that it begins with."""
        self._parts = parts
        self._worker: Worker | None = None
        self.alongside = Alongside()
        """To be run beside the pools: gates, and what looks at queues."""
        self._pools: dict[str, RunningPool] = {}
        self._leaving: dict[Queue, None] = {}
        """Those that are gone, and have calls that run, perhaps."""
        self._first = (first.pools[0].id if first.pools else "", WorkerMetrics())
        self.registries: dict[str, CollectorRegistry] = {self._first[0]: self.metrics.registry}
        """By pool; the first one's stays, since what all pools share is counted there."""

    @property
    def metrics(self) -> WorkerMetrics:
        """Where what the pools share is counted: with the first one."""
        return self._first[1]

    async def begin(self, worker: Worker, documents: ProcessDocuments) -> None:
        """Hand the pools to a worker, which has none yet.

        Raises:
            ConfigurationError: a gate cannot be made.
        """
        self._worker = worker
        await self.change(documents)

    async def change(self, documents: ProcessDocuments) -> Sequence[str]:
        """Become what the documents say, and say what has changed. Where it raises, all is as it was.

        After the worker was told to stop nothing is changed any more.
        """
        nexts = [self._next(config, documents) for config in documents.pools]
        await self._parts.open_links()
        assert self._worker is not None
        if self._worker.stopping:
            return ["nothing: told to stop"]
        # Not before: whoever leaves meanwhile has those closed that no queue names (`_seen_off`).
        self._parts.model.open(_urls(queue for one in nexts for queue in one.queues.values()))
        changes = self._changes(nexts)
        self._become(documents, nexts, self._worker)
        return changes

    # ------------------------------------------------------------ the first half: making

    def _next(self, config: PoolConfig, documents: ProcessDocuments) -> Next:
        pool = self._pools.get(config.id) or self._made(config, documents.merge)
        configs = [queue for queue in documents.transport.queues if queue.worker_pool_id == config.id]
        return Next(
            pool=pool,
            config=config,
            configs=configs,
            queues={queue.id: self._queue(pool, queue, documents.merge) for queue in configs},
            gate=self._gate(pool.gate, config.gate, pool, Owner(kind="pool", name=config.id, pool=config.id)),
        )

    def _made(self, config: PoolConfig, merge: MergeConfig) -> RunningPool:
        flags, outside = self._parts.flags, self._parts.outside
        first, metrics = self._first
        metrics = metrics if config.id == first else WorkerMetrics()
        merged = MergedQueues(
            (),
            partial(policy_of, merge, outside.rng, self._parts.around.extensions),
            now=outside.now,
            rng=outside.rng,
            replica_id=self._parts.replica_id,
            tier_label=merge.tier_label,
            gate_wait_s=flags.gate_wait_timeout_s,
            told=self._parts.peer.verdict,
            waiting=self._parts.waiting,
        )
        return RunningPool(
            name=config.id,
            metrics=metrics,
            merged=merged,
            broker=self._parts.broker_of(metrics),
            sharers=Sharers(self._parts.stores.fleet_of(config.id)),
            merge=written(merge),
        )

    def _queue(self, pool: RunningPool, config: QueueConfig, merge: MergeConfig) -> Queue:
        header, broker = merge.stamps.objective_header, pool.broker
        said = written((config, header))
        before = pool.queues.get(config.id)
        if before is not None and before.written == said:
            return before
        gate = self._gate(None, config.gate, pool, Owner(kind="queue", name=config.id, pool=pool.name))
        route = route_of(config, header)
        source = Source(
            name=config.queue_name,
            connect=broker.connect(config, route),
            gate=None if gate is None else gate.gate,
            labels=config.labels,
            route=route,
            hand_back=broker.hand_back,
        )
        return Queue(written=said, source=source, gate=gate)

    def _gate(
        self, before: StandingGate | None, config: GateConfig | None, pool: RunningPool, owner: Owner
    ) -> StandingGate | None:
        """The one that stands there, where it is written as before, else another one; None for none."""
        if config is None:
            return None
        said = written(config)
        if before is not None and before.written == said:
            return before
        around = self._parts.around
        telling = Telling(replace(around, metrics=replace(around.metrics, sharers=pool.sharers)))
        return StandingGate(owner=owner, written=said, gate=gate_of(config, telling.around, owner), telling=telling)

    # ------------------------------------------------------------ the second half: becoming

    def _changes(self, nexts: Sequence[Next]) -> list[str]:
        """In words, with a few names of each."""
        queues = {id: queue for pool in self._pools.values() for id, queue in pool.queues.items()}
        to_be = {id: queue for one in nexts for id, queue in one.queues.items()}
        pools = {one.pool.name: one for one in nexts}
        found = {
            "queues added": [id for id in to_be if id not in queues],
            "queues removed": [id for id in queues if id not in to_be],
            "queues changed": [id for id in to_be if id in queues and to_be[id] is not queues[id]],
            "pools added": [name for name in pools if name not in self._pools],
            "pools removed": [name for name in self._pools if name not in pools],
            "pools resized": [name for name, one in pools.items() if self._resized(one)],
            "gates changed of pools": [
                name for name, one in pools.items() if name in self._pools and one.gate is not one.pool.gate
            ],
        }
        return [f"{what}: {named(names)}" for what, names in found.items() if names]

    def _resized(self, one: Next) -> bool:
        assert self._worker is not None
        known = self._worker.pools.get(one.pool.name)
        return known is not None and known.slots != one.config.workers

    def _become(self, documents: ProcessDocuments, nexts: Sequence[Next], worker: Worker) -> None:
        """Nothing in here waits or fails."""
        peer, standing = self._parts.peer, self._parts.standing
        stood = {gate: None for pool in self._pools.values() for gate in pool.gates}
        stand = {gate: None for one in nexts for gate in _gates(one.queues, one.gate)}
        for gate in stood:
            if gate not in stand:
                gate.telling.leave()
                peer.gone(gate.owner)
        peer.change(documents)
        self._parts.queue_ids.clear()
        self._parts.queue_ids.update({queue.queue_name: queue.id for queue in documents.transport.queues})
        standing.change(documents)
        gone = self._pools.keys() - {one.pool.name for one in nexts}
        for name in gone:
            self._remove(self._pools.pop(name), worker)
        for gate in stand:
            if gate not in stood:
                gate.telling.stand()
                self.alongside.start(gate.gate.run, gate.over)
        for one in nexts:
            self._change(one, documents.merge, worker)

    def _change(self, one: Next, merge: MergeConfig, worker: Worker) -> None:
        pool, parts = one.pool, self._parts
        if pool.name not in self._pools:
            self._add(one, merge, worker)
        before, queues_before = pool.gate, pool.queues
        pool.queues, pool.gate = one.queues, one.gate
        at_queues = {id: queue.gate.gate for id, queue in one.queues.items() if queue.gate is not None}
        at_pool = None if one.gate is None else one.gate.gate
        parts.peer.stand(pool.name, at_queues, at_pool)
        parts.standing.stand(pool.name, at_queues, at_pool)
        said = written(merge)
        policy = None if said == pool.merge else partial(policy_of, merge, parts.outside.rng, parts.around.extensions)
        pool.merge = said
        pool.merged.change([queue.source for queue in one.queues.values()], policy, tier_label=merge.tier_label)
        if before is not one.gate:
            pool.at_pool.replace(at_pool)
        if worker.pools[pool.name].slots != one.config.workers:
            worker.resize(pool.name, one.config.workers)
        listener = worker.listeners[pool.name]
        if policy is not None:
            listener.address(_addressing(merge))
        parts.peer.polled(pool.name, pool.broker.due(one.configs))
        if pool.gates and not pool.shares:
            pool.shares = True
            self.alongside.start(pool.sharers.run, pool.over)
        kept = set(one.queues.values())
        for queue in queues_before.values():
            if queue not in kept:
                self._see_off([queue], partial(pool.merged.gone, queue.source))
        if before is not None and before is not one.gate:
            self.alongside.care(self._end(before, listener.settled))

    def _add(self, one: Next, merge: MergeConfig, worker: Worker) -> None:
        pool, parts = one.pool, self._parts
        self._pools[pool.name] = pool
        self.registries[pool.name] = pool.metrics.registry
        backlog = parts.peer.backlog(pool.name, parts.flags.backlog_poll_interval_s)
        self.alongside.start(backlog.run, pool.over)
        pool.at_pool = PoolGate(
            None, parts.outside.rng, wait_s=parts.flags.gate_wait_timeout_s, told=parts.peer.at_pool(pool.name)
        )
        worker.add(
            Pool(
                name=pool.name,
                connect=parts.peer.followed(pool.name, pool.merged.connect),
                slots=one.config.workers,
                policy=UntilDeadline(on_ladder=pool.broker.on_ladder),
                retry_statuses=parts.flags.statuses.judged("retry"),
                answer_statuses=parts.flags.statuses.judged("answer"),
                metrics=pool.metrics,
                tracer=parts.tracer,
                breaker_failures=parts.breaker_failures,
                hand_back=HAND_BACK,
                gate=pool.at_pool,
                addressing=_addressing(merge),
                shaping=parts.shaping,
                saw=saw,
                one_of_several=True,
            )
        )

    def _remove(self, pool: RunningPool, worker: Worker) -> None:
        if pool.metrics is self.metrics:
            pool.metrics.slots.set(0)
            pool.metrics.in_flight.set(0)
        else:
            del self.registries[pool.name]
        drained = worker.remove(pool.name)
        pool.over.set()
        self._see_off(list(pool.queues.values()), drained.wait)
        if pool.gate is not None:
            self.alongside.care(self._end(pool.gate, drained.wait))

    # ------------------------------------------------------------ what is gone

    def _see_off(self, queues: Sequence[Queue], over: Callable[[], Awaitable[object]]) -> None:
        for queue in queues:
            self._leaving[queue] = None
        self.alongside.care(self._seen_off(queues, over))

    async def _seen_off(self, queues: Sequence[Queue], over: Callable[[], Awaitable[object]]) -> None:
        await over()
        for queue in queues:
            if queue.gate is not None:
                queue.gate.over.set()
            del self._leaving[queue]
        here = [queue for pool in self._pools.values() for queue in pool.queues.values()]
        try:
            await self._parts.model.keep(_urls([*here, *self._leaving]))
        except Exception:
            # A connection that cannot be closed is no reason to end all others.
            log.exception("the connections to a gateway could not be closed")

    async def _end(self, gate: StandingGate, over: Callable[[], Awaitable[object]]) -> None:
        await over()
        gate.over.set()


def _gates(queues: Mapping[str, Queue], at_pool: StandingGate | None) -> list[StandingGate]:
    return [gate for gate in (*(queue.gate for queue in queues.values()), at_pool) if gate is not None]


def _urls(queues: Iterable[Queue]) -> list[str]:
    return [queue.source.route.base_url for queue in queues if queue.source.route is not None]


def _addressing(merge: MergeConfig) -> Addressing:
    return Addressing(stamps=merge.stamps, tier_label=merge.tier_label)
