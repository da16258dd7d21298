"""How long the listener waits between connections, on virtual time."""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import pytest

from inference_worker.breaker import Breaker
from inference_worker.disposition import RetryPolicy, Token
from inference_worker.errors import TransportLost
from inference_worker.listener import Listener
from inference_worker.message_processor import MessageProcessor
from inference_worker.metrics import WorkerMetrics
from inference_worker.metrics_buffer import MetricsBuffer
from inference_worker.ports import Answer, Health, ResultStore, Transport
from inference_worker.results.memory import MemoryStore
from inference_worker.timing import ByteBudget
from inference_worker.transports.memory import MemoryBroker, MemoryTransport


class NoModel:
    """Is never called."""

    async def infer(self, **_: object) -> Answer:
        raise AssertionError("there is no request here")

    async def warm(self, connections: int) -> None:
        """Nothing to open."""


class Link:
    """A broker that is reached or not, as told; it notes when it was asked."""

    def __init__(self, store: ResultStore) -> None:
        self.broker = MemoryBroker(store=store, now=lambda: 0.0)
        self.asked_at: list[float] = []

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Transport, None]:
        self.asked_at.append(asyncio.get_running_loop().time())
        async with self.broker.connect() as transport:
            yield transport

    def cut(self, why: str) -> None:
        for transport in list(self.broker.connections):
            assert isinstance(transport, MemoryTransport)
            transport.cut(why)

    @property
    def pauses_s(self) -> Sequence[float]:
        return [after - before for before, after in zip(self.asked_at, self.asked_at[1:], strict=False)]


def listener_of(link: Link, store: ResultStore) -> Listener:
    metrics, rng = WorkerMetrics(), random.Random(1)
    model_health, store_health = Health("model"), Health("store")
    processor = MessageProcessor(
        store=store,
        model=NoModel(),
        model_health=model_health,
        store_health=store_health,
        metrics=metrics,
        usage_event=lambda request, reply, usage: None,
        now=lambda: 0.0,
        new_token=lambda: Token("t"),
        rng=rng,
        replica_id="r",
        infer_path="/v1/chat/completions",
        infer_timeout_s=10.0,
        retry_statuses=frozenset(),
        slots=1,
        lease_s=15.0,
        max_crashes=3,
        store_patience_s=10.0,
    )
    return Listener(
        connect=link.connect,
        processor=processor,
        store=store,
        store_health=store_health,
        warm=NoModel().warm,
        policy=RetryPolicy(max_retries=1),
        breaker=Breaker(0),
        metrics=metrics,
        buffer=MetricsBuffer(10),
        budget=ByteBudget(1000),
        now=lambda: 0.0,
        rng=rng,
        limit=1,
        grace_s=1.0,
        store_patience_s=10.0,
    )


@asynccontextmanager
async def running(link: Link) -> AsyncGenerator[Listener, None]:
    listener = listener_of(link, link.broker.store)
    stop = asyncio.Event()
    task = asyncio.create_task(listener.run(stop))
    try:
        yield listener
    finally:
        stop.set()
        await task


@pytest.fixture
def link() -> Link:
    return Link(MemoryStore(now=lambda: 0.0, lease_s=15.0, ttl_s=60.0))


async def test_pauses_double_up_to_thirty_seconds(link: Link) -> None:
    link.broker.refuses = "refused"
    async with running(link) as listener:
        await asyncio.sleep(200.5)

        assert list(link.pauses_s) == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0, 30.0]
        assert listener.link_reason == "refused"


async def test_a_session_that_lasted_begins_the_pauses_anew(link: Link) -> None:
    link.broker.refuses = "refused"
    async with running(link) as listener:
        await asyncio.sleep(20.0)
        link.broker.refuses = None
        await asyncio.sleep(100.0)
        assert listener.transport is not None
        asked = len(link.asked_at)
        link.broker.refuses = "refused"
        link.cut("gone")
        await asyncio.sleep(8.0)

        assert list(link.pauses_s[asked:]) == [2.0, 4.0]
        assert link.asked_at[asked] == 121.0


async def test_sessions_that_end_at_once_are_not_opened_in_a_hot_loop(link: Link) -> None:
    """A broker that takes the connection and closes the channel, again and again."""
    async with running(link):
        for _ in range(600):
            await asyncio.sleep(0.1)
            link.cut("closed at once")

        assert len(link.asked_at) <= 8


async def test_a_worker_that_waits_to_connect_again_stops_at_once(link: Link) -> None:
    link.broker.refuses = "refused"
    async with running(link):
        await asyncio.sleep(60.5)
        told_at = asyncio.get_running_loop().time()

    assert asyncio.get_running_loop().time() - told_at < 0.1


async def test_a_refused_connection_is_no_end(link: Link) -> None:
    """Whatever the reason: only its change is news."""
    async with running(link) as listener:
        for reason in ("refused", "the broker refused the credentials", "no answer within 15 s"):
            link.broker.refuses = reason
            link.cut(reason)
            await asyncio.sleep(61.0)
            assert listener.link_reason == reason
        link.broker.refuses = None
        await asyncio.sleep(31.0)

        assert listener.transport is not None


def test_the_error_that_is_waited_out_is_the_transports() -> None:
    assert issubclass(TransportLost, Exception)
