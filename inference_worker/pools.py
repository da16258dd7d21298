"""A pool: a listener and its processor over one queue, or over several that were made one. A sidecar has one pool.

Pools of one process share the store, the model client and the memory; their slots, gates and queues are their own, so
that one that stands still holds up no other. Not here: what is chosen for them (`assembly.py`, `process.py`).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from inference_worker.addressing import Addressing
from inference_worker.breaker import Breaker
from inference_worker.disposition import AT_ONCE, HandBack, Retries, Token
from inference_worker.listener import Listener
from inference_worker.message_processor import ADDRESSING, MessageProcessor, Saw, UsageEvent, nobody_wants
from inference_worker.metrics import WorkerMetrics
from inference_worker.metrics_buffer import MetricsBuffer
from inference_worker.pool_gate import PoolGate
from inference_worker.ports import Connect, Health, ModelClient, ResultStore, Tracer
from inference_worker.timing import ByteBudget
from inference_worker.transforms.shaping import AS_IT_CAME, Shaping

NO_STATUSES: Final[frozenset[int]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What makes one pool another than the others."""

    name: str
    connect: Connect
    slots: int
    """Calls to the model at once, which is also how many messages are held."""
    policy: Retries
    retry_statuses: frozenset[int]
    metrics: WorkerMetrics
    tracer: Tracer
    breaker_failures: int
    answer_statuses: frozenset[int] = NO_STATUSES
    hand_back: HandBack = AT_ONCE
    gate: PoolGate | None = None
    addressing: Addressing = ADDRESSING
    shaping: Shaping = AS_IT_CAME
    saw: Saw = nobody_wants
    one_of_several: bool = False
    """Its name stands in its lines of log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the pools of a process have in common."""

    store: ResultStore
    model: ModelClient
    model_health: Health
    store_health: Health
    buffer: MetricsBuffer
    budget: ByteBudget
    usage_event: UsageEvent
    now: Callable[[], float]
    rng: random.Random
    new_token: Callable[[], Token]
    replica_id: str
    infer_path: str
    infer_timeout_s: float
    lease_s: float
    max_crashes: int
    store_patience_s: float
    grace_s: float


def listener_of(pool: Pool, shared: Shared) -> Listener:
    """The running part of a pool."""
    processor = MessageProcessor(
        store=shared.store,
        model=shared.model,
        model_health=shared.model_health,
        store_health=shared.store_health,
        metrics=pool.metrics,
        usage_event=shared.usage_event,
        now=shared.now,
        new_token=shared.new_token,
        rng=shared.rng,
        replica_id=shared.replica_id,
        infer_path=shared.infer_path,
        infer_timeout_s=shared.infer_timeout_s,
        retry_statuses=pool.retry_statuses,
        answer_statuses=pool.answer_statuses,
        slots=pool.slots,
        lease_s=shared.lease_s,
        max_crashes=shared.max_crashes,
        store_patience_s=shared.store_patience_s,
        addressing=pool.addressing,
        shaping=pool.shaping,
        gate=pool.gate,
        saw=pool.saw,
    )
    pool.metrics.slots.set(pool.slots)
    return Listener(
        connect=pool.connect,
        processor=processor,
        store=shared.store,
        store_health=shared.store_health,
        warm=shared.model.warm,
        policy=pool.policy,
        hand_back=pool.hand_back,
        breaker=Breaker(pool.breaker_failures),
        metrics=pool.metrics,
        buffer=shared.buffer,
        budget=shared.budget,
        now=shared.now,
        rng=shared.rng,
        limit=pool.slots,
        grace_s=shared.grace_s,
        store_patience_s=shared.store_patience_s,
        tracer=pool.tracer,
        name=pool.name if pool.one_of_several else "",
    )
