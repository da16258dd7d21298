"""The embedded queue keeps the transport contract."""

import time

import pytest

from inference_worker.ports import Transport
from inference_worker.results.memory import MemoryStore
from inference_worker.transports.memory import MemoryBroker, MemoryTransport
from tests.transport_contract import Parked, TransportContract


class MemoryHarness:
    """A broker in this process."""

    def __init__(self) -> None:
        self.store = MemoryStore(now=time.time, lease_s=15, ttl_s=3600)
        self._broker = MemoryBroker(store=self.store, now=time.time)
        self.connect = self._broker.connect

    async def publish(self, body: bytes, message_id: str | None = None) -> None:
        async with self._broker.connect() as transport:
            await transport.publish(body, message_id=message_id)

    async def cut(self, transport: Transport) -> None:
        assert isinstance(transport, MemoryTransport)
        transport.cut("cut by the test")

    lapse = cut

    async def parked(self) -> list[Parked]:
        return [Parked(letter.body) for letter in self._broker.dead]


@pytest.fixture
def harness() -> MemoryHarness:
    return MemoryHarness()


class TestMemoryTransport(TransportContract):
    """All clauses, on virtual time."""
