"""A queue in Postgres keeps the transport contract."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from inference_worker.ports import Transport
from tests.faults.proxy import TcpProxy
from tests.services import Postgres
from tests.sql_kit import SqlQueueKit, sql_queue_at
from tests.transport_contract import Parked, TransportContract
from tests.waiting import eventually

LEASE_S = 0.3


class SqlHarness:
    """A queue in this test's schema; each session goes through a proxy that can cut it."""

    def __init__(self, postgres: Postgres, kit: SqlQueueKit) -> None:
        self.store = kit.store
        self._postgres = postgres
        self._kit = kit
        self._proxies: dict[Transport, TcpProxy] = {}

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Transport, None]:
        async with (
            TcpProxy(self._postgres.host, self._postgres.port) as proxy,
            self._kit.session(proxy.url(self._kit.url)) as transport,
        ):
            self._proxies[transport] = proxy
            yield transport

    async def publish(self, body: bytes, message_id: str | None = None) -> None:
        await self._kit.add(body, message_id)

    async def cut(self, transport: Transport) -> None:
        await self._proxies[transport].cut()
        await eventually(transport.lost.is_set, within=10, what="the cut is seen")

    lapse = cut
    """A session that is gone keeps nothing: whoever takes next has it after the lease. A session that only sleeps for
    longer than its lease is looked at in `test_sql_faults.py`."""

    async def parked(self) -> list[Parked]:
        return [Parked(row[0]) for row in await self._kit.rows("select body from iw_dead order by seq")]


@pytest.fixture
async def harness(postgres: Postgres, sql_url: str) -> AsyncGenerator[SqlHarness, None]:
    async with sql_queue_at(sql_url, lease_s=LEASE_S) as kit:
        yield SqlHarness(postgres, kit)


class TestSqlTransport(TransportContract):
    """All clauses, on a real Postgres."""
