"""A stream of Redis keeps the transport contract."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from inference_worker.ports import Transport
from tests.faults.proxy import TcpProxy
from tests.services import Redis
from tests.stream_kit import NAMES, Streams, entries_of, streams_at
from tests.transport_contract import Parked, TransportContract
from tests.waiting import eventually

LEASE_S = 0.5


class StreamHarness:
    """A stream in this test's database; each session goes through a proxy that can cut it."""

    def __init__(self, redis: Redis, streams: Streams) -> None:
        self.store = streams.store
        self._redis = redis
        self._streams = streams
        self._proxies: dict[Transport, TcpProxy] = {}

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Transport, None]:
        async with (
            TcpProxy(self._redis.host, self._redis.port) as proxy,
            self._streams.session(proxy.url(self._streams.url)) as transport,
        ):
            self._proxies[transport] = proxy
            yield transport

    async def publish(self, body: bytes, message_id: str | None = None) -> None:
        await self._streams.add(body, message_id)

    async def cut(self, transport: Transport) -> None:
        await self._proxies[transport].cut()
        await eventually(transport.lost.is_set, within=10, what="the cut is seen")

    lapse = cut
    """A session that is gone keeps nothing: whoever takes next has it after the lease. A session that only sleeps for
    longer than its lease is looked at in `test_redis_streams_faults.py`."""

    async def parked(self) -> list[Parked]:
        entries = await entries_of(self._streams.client, NAMES.dead_letters)
        return [Parked(fields[b"request"]) for _, fields in entries]


@pytest.fixture
async def harness(redis_server: Redis, redis_url: str) -> AsyncGenerator[StreamHarness, None]:
    async with streams_at(redis_url, lease_s=LEASE_S) as streams:
        yield StreamHarness(redis_server, streams)


class TestRedisStreamsTransport(TransportContract):
    """All clauses, on a real Redis."""
