"""RabbitMQ keeps the transport contract, on both kinds of queue."""

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal

import pytest

from inference_worker.metrics import WorkerMetrics
from inference_worker.ports import Transport
from inference_worker.results.memory import MemoryStore
from inference_worker.rmq_listener import RabbitMQ, Topology
from tests.conservation import peek, publish
from tests.faults.proxy import TcpProxy
from tests.services import Rabbit
from tests.transport_contract import Parked, TransportContract
from tests.waiting import eventually


class RabbitHarness:
    """A queue of its own on the run's broker; each connection goes through a proxy that can cut it."""

    def __init__(self, rabbit: Rabbit, url: str, deployment_id: str, queue_type: Literal["quorum", "classic"]) -> None:
        self.store = MemoryStore(now=time.time, lease_s=15, ttl_s=3600)
        self._rabbit = rabbit
        self._url = url
        self.topology = Topology(
            queue=f"infer_req.{deployment_id}",
            dead_letter_exchange=f"dlx.{deployment_id}",
            dead_letter_queue=f"dlq.{deployment_id}",
            dead_letter_routing_key="dead",
            queue_type=queue_type,
            delivery_limit=100,
        )
        self._proxies: dict[Transport, TcpProxy] = {}

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Transport, None]:
        async with TcpProxy(self._rabbit.host, self._rabbit.port) as proxy:
            broker = RabbitMQ(
                url=lambda: proxy.url(self._url),
                topology=self.topology,
                store=self.store,
                metrics=WorkerMetrics(),
                name="contract/test",
                tls=None,
                now=time.time,
            )
            async with broker.connect() as transport:
                self._proxies[transport] = proxy
                yield transport

    async def declare(self) -> None:
        async with self.connect():
            pass

    async def publish(self, body: bytes, message_id: str | None = None) -> None:
        await publish(self._url, self.topology.queue, body, message_id=message_id)

    async def cut(self, transport: Transport) -> None:
        await self._proxies[transport].cut()
        await eventually(transport.lost.is_set, within=10, what="the cut is seen")

    lapse = cut

    async def parked(self) -> list[Parked]:
        return [Parked(message.body) for message in await peek(self._url, self.topology.dead_letter_queue)]


@pytest.fixture(params=["quorum", "classic"])
async def harness(
    rabbit: Rabbit, rabbitmq_url: str, deployment_id: str, request: pytest.FixtureRequest
) -> AsyncGenerator[RabbitHarness, None]:
    made = RabbitHarness(rabbit, rabbitmq_url, deployment_id, request.param)
    async with AsyncExitStack():
        await made.declare()
        yield made


class TestRabbitMQTransport(TransportContract):
    """All clauses, on a real broker."""
