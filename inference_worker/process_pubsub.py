"""A process whose queues are subscriptions of Google Cloud Pub/Sub: how one is opened, and what it takes.

Results, claims and usage events are in the Redis of the environment, as over RabbitMQ. The libraries of the service
are an extra, `inference-worker[pubsub]`, and loaded only here.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from typing import Final

from inference_worker.config.documents import QueueConfig, TransportConfig
from inference_worker.config.settings import Settings
from inference_worker.metrics import WorkerMetrics
from inference_worker.ports import Connect, ResultStore, Route
from inference_worker.pubsub_backlog import Monitoring, monitoring_client
from inference_worker.pubsub_values import PubsubLink
from inference_worker.transports.gcp_pubsub import PubsubQueue, PubsubTransports, Undelivered

LIBRARY: Final = "google.pubsub_v1"
MISSING: Final = (
    "--transport: gcp-pubsub needs google-cloud-pubsub, which is not installed; "
    "accepted: after pip install 'inference-worker[pubsub]'"
)


def pubsub_problems(transport: TransportConfig) -> tuple[str, ...]:
    """What is missing for it."""
    return () if transport.kind != "gcp-pubsub" or _installed() else (MISSING,)


def _installed() -> bool:
    try:
        return find_spec(LIBRARY) is not None
    except ModuleNotFoundError:
        return False  # Nor is anything else of Google.


@asynccontextmanager
async def pubsub_link_of(settings: Settings) -> AsyncGenerator[PubsubLink]:
    """A channel to the service, or to the emulator that the environment names. Raises StoreUnavailable."""
    from inference_worker.pubsub_link import pubsub_link

    async with pubsub_link(settings.pubsub.emulator) as link:
        yield link


def pubsub_queue(
    settings: Settings,
    transport: TransportConfig,
    queue: QueueConfig,
    route: Route,
    store: ResultStore,
    metrics: WorkerMetrics,
    now: Callable[[], float],
) -> Connect:
    """The way to open sessions with one subscription."""
    return PubsubTransports(
        partial(pubsub_link_of, settings),
        queue=pubsub_names(transport, queue, route),
        store=store,
        metrics=metrics,
        replica_id=settings.identity.replica_id,
        now=now,
        undelivered=_undelivered(settings, now),
        batch_size=transport.batch_size,
    ).connect


def pubsub_names(transport: TransportConfig, queue: QueueConfig, route: Route | None = None) -> PubsubQueue:
    """A topic of the document, as the transport has it."""
    return PubsubQueue(
        project=transport.project,
        name=queue.queue_name,
        results=queue.result_queue_name or transport.result_queue_name,
        path=queue.request_path,
        route=route,
        labels=queue.labels,
    )


def _undelivered(settings: Settings, now: Callable[[], float]) -> Undelivered | None:
    """An emulator has nobody who counts."""
    if settings.pubsub.emulator:
        return None
    from inference_worker.pubsub_link import Bearer

    return Monitoring(Bearer().token, now, monitoring_client)
