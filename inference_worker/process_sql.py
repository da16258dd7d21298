"""A process whose queues are in Postgres: its connections, where results are kept, and how a queue is opened.

No Redis is needed then: results, claims, usage events and the fleet are in the same tables as the queues.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from inference_worker.assembly import Stores, client_name
from inference_worker.config.documents import QueueConfig, TransportConfig
from inference_worker.config.settings import Settings
from inference_worker.metrics import WorkerMetrics
from inference_worker.peer_backlog import Expiring
from inference_worker.ports import Connect, Route
from inference_worker.results.sql import SqlOutbox, SqlStore
from inference_worker.results.sql_fleet import SqlFleet
from inference_worker.sql_link import SqlTls
from inference_worker.sql_place import SqlPlace, sql_place
from inference_worker.transports.sql import SqlQueue, SqlQueues, expiring


@asynccontextmanager
async def sql_place_of(settings: Settings, transport: TransportConfig) -> AsyncGenerator[SqlPlace, None]:
    """The Postgres that the settings name."""
    tls = settings.tls
    async with sql_place(
        settings.sql.url_now,
        client_name=client_name(settings),
        tls=SqlTls(ca_file=tls.ca_file, cert_file=tls.cert_file, key_file=tls.key_file),
        most_connections=transport.max_connections,
    ) as place:
        yield place


def sql_stores(place: SqlPlace, settings: Settings) -> Stores:
    """Results and outbox there, and the fleets."""
    deployment_id, replica_id = settings.identity.deployment_id, settings.identity.replica_id
    return Stores(
        results=_store(place, settings, settings.redis.response_ttl_s),
        outbox=SqlOutbox(place, deployment_id=deployment_id, replica_id=replica_id),
        fleet_of=lambda queue: SqlFleet(place, queue=queue),
    )


def sql_queue(
    place: SqlPlace,
    settings: Settings,
    transport: TransportConfig,
    queue: QueueConfig,
    route: Route,
    metrics: WorkerMetrics,
    now: Callable[[], float],
) -> Connect:
    """The way to open sessions with one queue."""
    return SqlQueues(
        place,
        queue=SqlQueue(
            name=queue.queue_name,
            queue_id=queue.id,
            results=queue.result_queue_name,
            default_results=transport.result_queue_name,
            result_ttl_s=queue.result_ttl_s,
            path=queue.request_path,
            route=route,
            labels=queue.labels,
        ),
        store=_store(place, settings, settings.redis.response_ttl_s),
        metrics=metrics,
        replica_id=settings.identity.replica_id,
        lease_s=transport.claim_lease_s,
        now=now,
        poll_interval_s=transport.poll_interval_s,
    ).connect


def sql_due(place: SqlPlace, queue: str, now: Callable[[], float]) -> Expiring:
    """How to ask how many requests of a queue expire soon."""
    return lambda windows_s: expiring(place.link, queue, windows_s, now())


def _store(place: SqlPlace, settings: Settings, ttl_s: float) -> SqlStore:
    return SqlStore(
        place,
        deployment_id=settings.identity.deployment_id,
        replica_id=settings.identity.replica_id,
        lease_s=settings.redis.claim_lease_s,
        ttl_s=ttl_s,
    )
