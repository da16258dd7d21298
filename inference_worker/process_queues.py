"""Opens the queues of a pool: each as a transport of its own, all of them as one. The `match` is the only registry.

Not here: what the queues are (`config/documents.py`), and what stands before them (`gates/making.py`).
"""

import random
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from inference_worker.assembly import client_name, rabbitmq_connect, redis_tls
from inference_worker.config.documents import MergeConfig, QueueConfig, TransportConfig
from inference_worker.config.settings import Settings
from inference_worker.disposition import AT_ONCE, HandBack
from inference_worker.extensions import Extensions
from inference_worker.merge import PATIENCE, PER_LANE, MergePolicy, RandomRobin, TierAging, TierPriority
from inference_worker.metrics import WorkerMetrics
from inference_worker.peer import due_in
from inference_worker.peer_backlog import Expiring
from inference_worker.ports import Connect, Delivery, ResultStore, Route
from inference_worker.process_extensions import Process, connect_of, policy_of_another
from inference_worker.redis_modes import RedisPlace
from inference_worker.results.redis import RedisStore
from inference_worker.transports.listed import ResultList, listed

if TYPE_CHECKING:
    from inference_worker.sql_place import SqlPlace

TURNED_AWAY_S = 1.0
"""How long what a gate has turned away stays out of sight: brokers hand it out again at once."""

HAND_BACK = HandBack(copy_after_s=TURNED_AWAY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """Where the queues are, and what all connections to them have in common."""

    settings: Settings
    transport: TransportConfig
    store: ResultStore
    place: RedisPlace
    """The Redis that has the results, and the queues that are in one."""
    metrics: WorkerMetrics
    """Of the pool."""
    now: Callable[[], float]
    names: Set[str] = frozenset()
    """Of all queues of the process, as they are at any time: nothing else may be written there."""
    sql: "SqlPlace | None" = None
    """The Postgres that has the queues and the results, where it is one."""
    extensions: Extensions = field(default_factory=Extensions)
    """Transports of other packages."""

    def connect(self, queue: QueueConfig, route: Route) -> Connect:
        """The way to open connections to one queue."""
        match self.transport.kind:
            case "redis-sortedset":
                return self._sorted_set(queue, route)
            case "redis-streams":
                return self._listed(queue, self._stream)
            case "rabbitmq":
                return self._listed(queue, self._rabbitmq)
            case "sql":
                return self._sql(queue, route)
            case "gcp-pubsub":
                return self._pubsub(queue, route)
            case "redis-pubsub":
                return self._channel(queue, route)
            case "extension":
                return self._listed(queue, self._of_another_package)
            case _:
                assert_never(self.transport.kind)

    def _listed(self, queue: QueueConfig, open_queue: Callable[[QueueConfig, ResultStore], Connect]) -> Connect:
        """A queue whose results lie where their callers wait for them; and in a list, where one is named."""
        identity, ttl_s = self.settings.identity, self._kept_s(queue)
        store: ResultStore = self.store
        if queue.result_ttl_s:
            store = RedisStore(
                self.place.commands,
                deployment_id=identity.deployment_id,
                replica_id=identity.replica_id,
                lease_s=self.settings.lease_s,
                ttl_s=ttl_s,
            )
        connect = open_queue(queue, store)
        if not queue.result_queue_name:
            return connect
        results = ResultList(
            self.place.commands, queue.result_queue_name, list_ttl_s=queue.result_ttl_s, marked_s=ttl_s
        )
        return listed(connect, results, store, self.now)

    def _kept_s(self, queue: QueueConfig) -> float:
        """How long a result lives."""
        return queue.result_ttl_s or self.settings.redis.response_ttl_s

    def _sorted_set(self, queue: QueueConfig, route: Route) -> Connect:
        from inference_worker.transports.redis_sorted_set import RedisSortedSet, SortedSetQueue

        settings, transport = self.settings, self.transport
        return RedisSortedSet(
            url=self.place.address,
            queue=SortedSetQueue(
                name=queue.queue_name,
                queue_id=queue.id,
                retries=transport.retry_queue_name,
                results=queue.result_queue_name,
                default_results=transport.result_queue_name,
                result_ttl_s=queue.result_ttl_s,
                path=queue.request_path,
                route=route,
                labels=queue.labels,
                queues=self.names,
            ),
            store=self.store,
            metrics=self.metrics,
            deployment_id=settings.identity.deployment_id,
            replica_id=settings.identity.replica_id,
            lease_s=transport.claim_lease_s,
            hold_s=settings.redis.claim_lease_s,
            ttl_s=settings.redis.response_ttl_s,
            client_name=client_name(settings),
            tls=redis_tls(settings),
            now=self.now,
            poll_interval_s=transport.poll_interval_s,
            cluster=self.place.cluster,
            moved=self.place.moved if transport.mode == "sentinel" else None,
        ).connect

    def _stream(self, queue: QueueConfig, store: ResultStore) -> Connect:
        from inference_worker.transports.redis_streams import RedisStreams, StreamNames

        settings = self.settings
        name = queue.queue_name
        return RedisStreams(
            url=settings.redis.url_now,
            names=StreamNames(stream=name, group=settings.streams.group, dead_letters=f"{name}:dead"),
            store=store,
            metrics=self.metrics,
            deployment_id=settings.identity.deployment_id,
            replica_id=settings.identity.replica_id,
            lease_s=settings.lease_s,
            ttl_s=self._kept_s(queue),
            client_name=client_name(settings),
            tls=redis_tls(settings),
            now=self.now,
        ).connect

    def _rabbitmq(self, queue: QueueConfig, store: ResultStore) -> Connect:
        tls = self.settings.tls.context()
        return rabbitmq_connect(self.settings, queue.queue_name, store, self.metrics, now=self.now, tls=tls)

    def _of_another_package(self, queue: QueueConfig, store: ResultStore) -> Connect:
        replica_id, lease_s = self.settings.identity.replica_id, self.settings.lease_s
        process = Process(now=self.now, replica_id=replica_id, lease_s=lease_s)
        return connect_of(self.transport, queue, process, self.extensions, store, self.metrics.registry)

    def _sql(self, queue: QueueConfig, route: Route) -> Connect:
        from inference_worker.process_sql import sql_queue

        assert self.sql is not None
        return sql_queue(self.sql, self.settings, self.transport, queue, route, self.metrics, self.now)

    def _pubsub(self, queue: QueueConfig, route: Route) -> Connect:
        from inference_worker.process_pubsub import pubsub_queue

        return pubsub_queue(self.settings, self.transport, queue, route, self.store, self.metrics, self.now)

    def _channel(self, queue: QueueConfig, route: Route) -> Connect:
        from inference_worker.transports.redis_pubsub import Channel, RedisChannels

        return RedisChannels(
            self.place.commands,
            url=self.place.address,
            channel=Channel(
                name=queue.queue_name,
                queue_id=queue.id,
                retries=self.transport.retry_queue_name,
                results=queue.result_queue_name or self.transport.result_queue_name,
                path=queue.request_path,
                route=route,
                labels=queue.labels,
            ),
            store=self.store,
            metrics=self.metrics,
            replica_id=self.settings.identity.replica_id,
            client_name=client_name(self.settings),
            tls=redis_tls(self.settings),
            now=self.now,
        ).connect

    def due(self, queues: Sequence[QueueConfig]) -> Mapping[str, Expiring]:
        """How to ask how far off the deadlines are, by queue; empty where the broker does not know of them."""
        if self.sql is not None:
            from inference_worker.process_sql import sql_due

            return {queue.queue_name: sql_due(self.sql, queue.queue_name, self.now) for queue in queues}
        if self.transport.kind != "redis-sortedset":
            return {}
        return {queue.queue_name: due_in(self.place.commands, queue.queue_name, self.now) for queue in queues}

    @property
    def on_ladder(self) -> bool:
        """Retries wait for so long as there are queues for them to wait in."""
        return self.transport.kind == "rabbitmq"

    @property
    def hand_back(self) -> HandBack:
        """How a queue's gate gives back what it does not let in: a broker that counts deliveries must not count it."""
        return HAND_BACK if self.transport.kind in ("rabbitmq", "gcp-pubsub", "redis-pubsub") else AT_ONCE


def route_of(queue: QueueConfig, objective_header: str) -> Route:
    """Where the requests of a queue go."""
    headers = {objective_header: queue.objective} if queue.objective and objective_header else {}
    return Route(base_url=queue.base_url.now().rstrip("/"), path=queue.request_path, headers=headers, model=queue.model)


def policy_of(merge: MergeConfig, rng: random.Random, extensions: Extensions | None = None) -> MergePolicy[Delivery]:
    """In which order the queues of a pool take turns."""
    per_lane = merge.max_per_lane or PER_LANE
    match merge.type:
        case "random-robin":
            return RandomRobin(rng, per_lane)
        case "tier-priority":
            return TierPriority(per_lane)
        case "tier-aging":
            return TierAging(per_lane, merge.patience or PATIENCE, merge.lane_patience)
        case "extension":
            return policy_of_another(merge, rng, extensions or Extensions())
        case _:
            assert_never(merge.type)
