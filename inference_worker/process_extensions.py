"""What other packages bring to a process of many queues, made of its documents: the way to a queue, the merge policy.

Not here: who brings it (`extensions.py`), and gates and transforms, which are made where all of their kind are.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import structlog
from prometheus_client import CollectorRegistry

from inference_worker.config.documents import MergeConfig, ProcessDocuments, QueueConfig, TransportConfig
from inference_worker.errors import ConfigurationError
from inference_worker.extensions import Extensions, MergePolicyParts, TransportParts
from inference_worker.gates.parameters import Parameters
from inference_worker.merge import PER_LANE, MergePolicy, RandomRobin
from inference_worker.merge_guarded import GuardedPolicy
from inference_worker.ports import Connect, Delivery, ResultStore
from inference_worker.results.memory import MemoryStore
from inference_worker.transports.guarded import guarded

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What a transport of another package is told of the process that it is in."""

    now: Callable[[], float]
    replica_id: str
    lease_s: float


def connect_of(
    transport: TransportConfig,
    queue: QueueConfig,
    process: Process,
    extensions: Extensions,
    store: ResultStore,
    registry: CollectorRegistry,
) -> Connect:
    """The way to open connections to a queue.

    Raises:
        ConfigurationError: with all that is wrong with it.
    """
    problems: list[str] = []
    parts = TransportParts(
        given=Parameters(transport.parameters, "transport", problems),
        url="" if transport.url is None else transport.url.now(),
        queue_name=queue.queue_name,
        labels=queue.labels,
        store=store,
        now=process.now,
        replica_id=process.replica_id,
        lease_s=process.lease_s,
        registry=registry,
    )
    made = extensions.make("transport", transport.extension, parts, "--transport")
    if problems:
        raise ConfigurationError(tuple(dict.fromkeys(problems)))
    return guarded(cast(Connect, made), transport.extension)


def policy_of_another(merge: MergeConfig, rng: random.Random, extensions: Extensions) -> MergePolicy[Delivery]:
    """A merge policy of another package; it could be made when the documents were read.

    One that cannot be made any more is no reason to end.
    """
    per_lane = merge.max_per_lane or PER_LANE
    try:
        made = _policy(merge, rng, extensions)
    except ConfigurationError as exc:
        log.error("a merge policy cannot be made; the order is random-robin", policy=merge.extension, why=exc.problems)  # noqa: TRY400
        return RandomRobin(rng, per_lane)
    return GuardedPolicy(made, merge.extension, rng, per_lane)


def extension_problems(documents: ProcessDocuments, extensions: Extensions) -> tuple[str, ...]:
    """What is wrong with the transport and the merge policy of other packages. Nothing is opened."""
    problems: list[str] = []
    transport, merge = documents.transport, documents.merge
    process = Process(now=lambda: 0.0, replica_id="-", lease_s=60.0)
    for queue in transport.queues if transport.extension else ():
        store, registry = MemoryStore(now=process.now, lease_s=60, ttl_s=60), CollectorRegistry()
        try:
            connect_of(transport, queue, process, extensions, store, registry)
        except ConfigurationError as exc:
            problems.extend(exc.problems)
    if merge.extension:
        try:
            _policy(merge, random.Random(0), extensions)
        except ConfigurationError as exc:
            problems.extend(exc.problems)
    return tuple(dict.fromkeys(problems))


def _policy(merge: MergeConfig, rng: random.Random, extensions: Extensions) -> MergePolicy[Delivery]:
    problems: list[str] = []
    given = Parameters(merge.parameters, "merge.parameters", problems)
    parts = MergePolicyParts(given=given, rng=rng, per_lane=merge.max_per_lane or PER_LANE)
    made = extensions.make("merge policy", merge.extension, parts, "merge.type")
    if problems:
        raise ConfigurationError(tuple(dict.fromkeys(problems)))
    return cast("MergePolicy[Delivery]", made)
