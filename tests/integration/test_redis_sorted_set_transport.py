"""A sorted set of Redis keeps the transport contract."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from inference_worker.ports import Transport
from tests.faults.proxy import TcpProxy
from tests.services import Redis
from tests.sorted_set_kit import SortedSets, sorted_sets_at
from tests.stream_kit import entries_of
from tests.transport_contract import Parked, TransportContract
from tests.waiting import eventually

LEASE_S = 0.5


class SortedSetHarness:
    """A queue in this test's database; each session goes through a proxy that can cut it."""

    def __init__(self, redis: Redis, sets: SortedSets) -> None:
        self.store = sets.store
        self._redis = redis
        self._sets = sets
        self._proxies: dict[Transport, TcpProxy] = {}

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Transport, None]:
        async with (
            TcpProxy(self._redis.host, self._redis.port) as proxy,
            self._sets.session(proxy.url(self._sets.url)) as transport,
        ):
            self._proxies[transport] = proxy
            yield transport

    async def publish(self, body: bytes, message_id: str | None = None) -> None:
        await self._sets.add(body, message_id)

    async def cut(self, transport: Transport) -> None:
        await self._proxies[transport].cut()
        await eventually(transport.lost.is_set, within=10, what="the cut is seen")

    lapse = cut
    """A session that is gone keeps nothing: whoever takes next has it after the lease. A session that only sleeps for
    longer than its lease is looked at in `test_redis_sorted_set_faults.py`."""

    async def parked(self) -> list[Parked]:
        entries = await entries_of(self._sets.client, self._sets.queue.dead_letters)
        return [Parked(fields[b"request"]) for _, fields in entries]


@pytest.fixture
async def harness(redis_server: Redis, redis_url: str) -> AsyncGenerator[SortedSetHarness, None]:
    async with sorted_sets_at(redis_url, lease_s=LEASE_S) as sets:
        yield SortedSetHarness(redis_server, sets)


class TestRedisSortedSetTransport(TransportContract):
    """All clauses, on a real Redis."""
