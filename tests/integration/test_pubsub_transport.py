"""A subscription of Pub/Sub keeps the transport contract."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from inference_worker.ports import Transport
from inference_worker.transports.gcp_pubsub import PubsubTransport
from tests.faults.proxy import TcpProxy
from tests.pubsub_kit import Subscribed, subscribed
from tests.transport_contract import Parked, TransportContract
from tests.waiting import eventually


class PubsubHarness:
    """A project of this test's; each session goes through a proxy that can cut it, and stays cut."""

    def __init__(self, kit: Subscribed) -> None:
        self.store = kit.store
        self._kit = kit
        self._proxies: dict[Transport, TcpProxy] = {}

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Transport, None]:
        host, _, port = self._kit.address.rpartition(":")
        async with (
            TcpProxy(host, int(port)) as proxy,
            self._kit.session(f"{proxy.host}:{proxy.port}", undelivered=self._kit.undelivered) as transport,
        ):
            self._proxies[transport] = proxy
            yield transport

    async def publish(self, body: bytes, message_id: str | None = None) -> None:
        await self._kit.add(body, message_id)

    async def cut(self, transport: Transport) -> None:
        await self._proxies[transport].refuse()
        await self._proxies[transport].cut()
        await eventually(transport.lost.is_set, within=10, what="the cut is seen")

    async def lapse(self, transport: Transport) -> None:
        """The shortest deadline is ten seconds: what lapses is given back over another channel instead."""
        assert isinstance(transport, PubsubTransport)
        held = transport.held()
        await self.cut(transport)
        await self._kit.nack(held)

    async def parked(self) -> list[Parked]:
        return [Parked(one.data) for one in await self._kit.parked()]


@pytest.fixture
async def harness(redis_url: str) -> AsyncGenerator[PubsubHarness, None]:
    async with subscribed(redis_url) as kit:
        yield PubsubHarness(kit)


class TestPubsubTransport(TransportContract):
    """All clauses."""
