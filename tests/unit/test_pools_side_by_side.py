"""Pools of one process over queues with gates: neither holds up another, and a gate costs no rate at either place.

Not here: what one pool does with one request (`test_gated_worker.py`), and how a process is made of its documents.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

import pytest

from inference_worker.disposition import RetryPolicy, Token
from inference_worker.gates.basic import LocalMaxConcurrency
from inference_worker.gates.combined import WaitOnRefuse
from inference_worker.listener import Listener
from inference_worker.merge import RandomRobin
from inference_worker.metrics import WorkerMetrics
from inference_worker.metrics_buffer import MetricsBuffer
from inference_worker.pool_gate import PoolGate
from inference_worker.pools import Pool, Shared, listener_of
from inference_worker.ports import NO_HEADERS, Answer, Gate, Health, Route
from inference_worker.timing import ByteBudget
from inference_worker.tracing import PASSING_ON
from inference_worker.transports.memory import MemoryBroker
from inference_worker.transports.merged import MergedQueues, Source
from tests.unit.worker_kit import GOOD, Site, body, event_of, now
from tests.waiting import eventually

SLOW, FAST = "http://slow", "http://fast"


class Backends:
    """Gateways that answer after so many seconds, by their base URLs."""

    def __init__(self, takes_s: Mapping[str, float]) -> None:
        self._takes_s = takes_s
        self.begun: dict[str, int] = dict.fromkeys(takes_s, 0)
        self.running = 0
        self.most = 0

    async def infer(
        self,
        *,
        endpoint: str,
        payload: bytes,
        stream: bool,
        request_id: str,
        timeout_s: float,
        headers: Mapping[str, str] = NO_HEADERS,
        base_url: str | None = None,
    ) -> Answer:
        assert base_url is not None
        self.begun[base_url] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self._takes_s[base_url])
        finally:
            self.running -= 1
        return Answer(status_code=200, reason="OK", body=GOOD)

    async def warm(self, connections: int) -> None:
        return


class Process:
    """Some pools in this process, each with one queue of its own; what they share is the site's."""

    def __init__(self, model: Backends) -> None:
        self.site = Site()
        self.metrics = WorkerMetrics()
        self.brokers: dict[str, MemoryBroker] = {}
        numbers = count()
        self._store_health = Health("store")
        self._shared = Shared(
            store=self.site.store,
            model=model,
            model_health=Health("model", ok=True),
            store_health=self._store_health,
            buffer=MetricsBuffer(10_000),
            budget=ByteBudget(100_000_000),
            usage_event=event_of,
            now=now,
            rng=random.Random(1),
            new_token=lambda: Token(f"token-{next(numbers)}"),
            replica_id="r",
            infer_path="/v1/completions",
            infer_timeout_s=3600.0,
            lease_s=self.site.lease_s,
            max_crashes=3,
            store_patience_s=5.0,
            grace_s=1.0,
        )

    def pool(
        self, base_url: str, *, slots: int, gate: PoolGate | None = None, queue_gate: Gate | None = None
    ) -> Listener:
        broker = self.brokers[base_url] = MemoryBroker(store=self.site.store, now=now, queue=base_url)
        source = Source(
            name=base_url,
            connect=broker.connect,
            gate=queue_gate,
            route=Route(base_url=base_url, path="/v1/completions"),
        )
        queues = MergedQueues(
            [source], lambda: RandomRobin(random.Random(1)), now=now, rng=random.Random(1), replica_id="r"
        )
        listener = listener_of(
            Pool(
                name=base_url,
                connect=queues.connect,
                slots=slots,
                policy=RetryPolicy(max_retries=3),
                retry_statuses=frozenset(),
                metrics=self.metrics,
                tracer=PASSING_ON,
                breaker_failures=0,
                gate=gate,
            ),
            self._shared,
        )
        listener.resume_consuming("model")
        return listener

    async def submit(self, base_url: str, *names: str) -> None:
        async with self.brokers[base_url].connect() as producer:
            for name in names:
                await producer.publish(body(name, timeout_s=3600.0))

    async def answered(self, *names: str) -> bool:
        return all([await self.site.result(name) is not None for name in names])

    @asynccontextmanager
    async def running(self, *pools: Listener) -> AsyncGenerator[None, None]:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for pool in pools:
                group.create_task(pool.run(stop))
            try:
                yield
            finally:
                stop.set()


async def test_a_backend_that_hangs_in_one_pool_delays_no_other_pool_case_274() -> None:
    backends = Backends({SLOW: 3000.0, FAST: 0.1})
    process = Process(backends)
    async with process.running(process.pool(SLOW, slots=4), process.pool(FAST, slots=1)):
        await process.submit(SLOW, *(f"slow-{n}" for n in range(50)))
        await eventually(lambda: backends.begun[SLOW] == 4, within=10, what="one pool hangs")
        for name in [f"fast-{n}" for n in range(10)]:
            await process.submit(FAST, name)
            await eventually(partial(process.answered, name), within=1, what="an answer of the other pool")

    assert backends.begun == {SLOW: 4, FAST: 10}


@pytest.mark.parametrize("place", ["queue", "pool"])
async def test_many_requests_are_done_in_time_with_a_gate_at_either_place_case_337(place: str) -> None:
    """A thousand instead of five thousand. A gate that is full costs no more than its limit does."""
    backends = Backends({FAST: 0.51})
    process = Process(backends)
    gate = LocalMaxConcurrency(40)
    pool = process.pool(
        FAST,
        slots=64,
        queue_gate=gate if place == "queue" else None,
        gate=PoolGate(WaitOnRefuse(gate), random.Random(3)) if place == "pool" else None,
    )
    names = [f"r-{n}" for n in range(1000)]
    async with process.running(pool):
        begun = asyncio.get_running_loop().time()
        await process.submit(FAST, *names)
        await eventually(lambda: backends.begun[FAST] == len(names), within=120, what="the last one is sent")
        took_s = asyncio.get_running_loop().time() - begun
        await eventually(lambda: process.answered(*names), within=10, what="all are answered")

    assert took_s < 13  # 25 times 40, of which the last begin after 12.24 s at the earliest.
    assert 36 <= backends.most <= 40
