"""The transport keeps the contract of all transports. Run it from the repository, where that lies in `tests/`."""

import asyncio
import sqlite3
import time
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path

import pytest
from iw_sqlite import SqliteQueue, SqliteTransport

from inference_worker.errors import TransportLost
from inference_worker.ports import Transport
from inference_worker.results.memory import MemoryStore
from tests.transport_contract import Parked, TransportContract, request, take


class SqliteHarness:
    """One queue in a file."""

    def __init__(self, path: Path) -> None:
        self.store = MemoryStore(now=time.time, lease_s=15, ttl_s=3600)
        self.path = path

    def queue(self, lease_s: float = 15.0) -> SqliteQueue:
        return SqliteQueue(path=str(self.path), name="q", store=self.store, now=time.time, lease_s=lease_s)

    def connect(self) -> AbstractAsyncContextManager[Transport]:
        return self.queue().connect()

    async def publish(self, body: bytes, message_id: str | None = None) -> None:
        async with self.connect() as transport:
            await transport.publish(body, message_id=message_id)

    async def cut(self, transport: Transport) -> None:
        assert isinstance(transport, SqliteTransport)
        transport.cut("cut by the test")

    lapse = cut

    async def parked(self) -> list[Parked]:
        with closing(sqlite3.connect(self.path)) as db:
            return [Parked(body) for (body,) in db.execute("select body from messages where dead is not null")]


@pytest.fixture
def harness(tmp_path: Path) -> SqliteHarness:
    return SqliteHarness(tmp_path / "queues.db")


class TestSqlite(TransportContract):
    """All clauses."""

    async def test_what_a_dead_process_held_comes_back_when_its_lease_is_over(self, harness: SqliteHarness) -> None:
        await harness.publish(request("a"))
        async with harness.queue(lease_s=0.05).connect() as dead, dead.consuming(1):
            stale = await take(dead)
            async with harness.connect() as other, other.consuming(1):
                theirs = await take(other)

                assert theirs.redelivered
                with pytest.raises(TransportLost):
                    await dead.extend(stale)
                assert stale.lost.is_set()

    async def test_a_file_that_cannot_be_used_is_a_lost_connection(self, harness: SqliteHarness) -> None:
        await asyncio.to_thread(harness.path.write_bytes, b"no database" * 100)

        with pytest.raises(TransportLost, match="not a database"):
            async with harness.connect():
                pass
