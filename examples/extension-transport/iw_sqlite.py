"""Queues in an SQLite file, for processes of one machine: `{"path": "/var/lib/queues.db"}` in the transport document.

A message is a row; who takes it holds it for a lease, fenced by `claim`, which rises with each holder. All statements
run on the loop: a file on a local disk answers in less than a millisecond. Not for a file on a network.
"""

import asyncio
import json
import sqlite3
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from inference_worker.disposition import (
    Ack,
    DeadLetter,
    DeliveryLost,
    Disposition,
    Nack,
    Republish,
    Settled,
    Settlement,
)
from inference_worker.errors import TransportLost
from inference_worker.extensions import TransportParts
from inference_worker.ports import Backlog, Connect, Delivery, ResultStore
from inference_worker.settling import bury, release, store_reply
from inference_worker.timing import first_of

POLL_S = 0.02
"""How often an idle queue is looked at: nobody tells of what other processes write."""
BUSY_S = 0.2
"""How long another process may keep the file to itself; the loop stands still for it."""
SCHEMA = """
pragma journal_mode = wal;
create table if not exists messages (
    id integer primary key autoincrement, queue text not null, body blob not null, message_id text,
    headers text not null default '{}', attempts integer not null default 0, redelivered integer not null default 0,
    visible_at real not null default 0, held_until real not null default 0, claim integer not null default 0,
    dead text
);
create index if not exists waiting on messages (queue, id) where dead is null;
"""
TAKE = """
update messages set claim = claim + 1, held_until = :until, redelivered = redelivered or held_until > 0
where id = (
    select id from messages
    where queue = :queue and dead is null and visible_at <= :now and held_until <= :now order by id limit 1
)
returning id, claim, body, message_id, headers, attempts, redelivered
"""
COUNT = """
select count(*) filter (where held_until <= :now and visible_at <= :now),
       count(*) filter (where held_until <= :now and visible_at > :now),
       count(*) filter (where held_until > :now)
from messages where queue = :queue and dead is null
"""
PUBLISH = "insert into messages (queue, body, message_id, headers) values (?, ?, ?, ?)"
GIVE_BACK = "update messages set held_until = 0, redelivered = 1"


@dataclass(frozen=True, slots=True)
class Receipt:
    """A row, and whose it is."""

    row: int
    claim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteQueue:
    """One queue."""

    path: str
    name: str
    store: ResultStore
    now: Callable[[], float]
    lease_s: float

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator["SqliteTransport", None]:
        """See `ports.Connect`."""
        try:
            db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
        except sqlite3.Error as exc:
            raise TransportLost(f"{self.path}: {exc}") from exc
        transport = SqliteTransport(self, db)
        try:
            transport.prepare()
            yield transport
        finally:
            transport.cut("closed")


class SqliteTransport:
    """See `ports.Transport`."""

    def __init__(self, queue: SqliteQueue, db: sqlite3.Connection) -> None:
        self._queue = queue
        self._db = db
        self._limit = 0
        self._held: dict[Receipt, Delivery] = {}
        self._turn = asyncio.Event()
        self.lost = asyncio.Event()
        self.lost_because = ""

    def prepare(self) -> None:
        """Make the tables, where there are none."""
        try:
            self._db.executescript(SCHEMA)
        except sqlite3.Error as exc:
            raise TransportLost(f"{self._queue.path}: {exc}") from exc

    def cut(self, why: str) -> None:
        """End the connection: what it holds goes back."""
        if self.lost.is_set():
            return
        self.lost_because = why
        self.lost.set()
        self._turn.set()
        for receipt, delivery in self._held.items():
            delivery.lost.set()
            with suppress(sqlite3.Error):  # Then its lease lapses.
                self._db.execute(f"{GIVE_BACK} where id = ? and claim = ?", (receipt.row, receipt.claim))
        self._held.clear()
        self._db.close()

    @asynccontextmanager
    async def consuming(self, limit: int) -> AsyncGenerator[None, None]:
        """See `ports.Transport`. Nothing is read ahead, so there is nothing to give back."""
        await self.set_limit(limit)
        try:
            yield
        finally:
            self._limit = 0

    async def set_limit(self, limit: int) -> None:
        """See `ports.Transport`."""
        self._alive()
        self._limit = limit
        self._turn.set()

    async def receive(self) -> Delivery:
        """See `ports.Transport`. Between taking a row and returning it nothing waits, so a cancellation loses none."""
        while True:
            self._alive()
            if len(self._held) < self._limit and (delivery := self._take()) is not None:
                return delivery
            self._turn.clear()
            await first_of(self._turn, within_s=POLL_S)

    def _take(self) -> Delivery | None:
        now = self._queue.now()
        row = self._do(TAKE, {"queue": self._queue.name, "now": now, "until": now + self._queue.lease_s}).fetchone()
        if row is None:
            return None
        receipt = Receipt(row[0], row[1])
        delivery = Delivery(
            body=row[2],
            message_id=row[3],
            headers=json.loads(row[4]),
            attempts=row[5],
            redelivered=bool(row[6]),
            queue=self._queue.name,
            receipt=receipt,
            lost=asyncio.Event(),
        )
        self._held[receipt] = delivery
        return delivery

    async def settle(self, delivery: Delivery, disposition: Disposition) -> Settlement:
        """See `ports.Transport`. A copy is the row itself, which changes hands in one statement."""
        queue = self._queue
        match disposition:
            case Ack(reply=reply):
                if (not_yet := await store_reply(queue.store, disposition)) is not None:
                    return not_yet
                ours = self._end(delivery, "delete from messages")
                return Settled(how="ack") if ours else DeliveryLost(stored=reply is not None)
            case DeadLetter(reason=reason, reply=reply):
                if (not_yet := await store_reply(queue.store, disposition)) is not None:
                    return not_yet
                await bury(queue.store, disposition, queue.now())
                ours = self._end(delivery, "update messages set held_until = 0, dead = ?", reason)
                return Settled(how="dead_letter") if ours else DeliveryLost(stored=reply is not None)
            case Nack(claim=claim):
                await release(queue.store, claim)
                ours = self._end(delivery, GIVE_BACK)
                return Settled(how="requeue") if ours else DeliveryLost(stored=False)
            case Republish(delay_s=delay_s, attempts=attempts, claim=claim):
                again = "update messages set held_until = 0, redelivered = 0, attempts = ?, visible_at = ?"
                ours = self._end(delivery, again, attempts, queue.now() + delay_s)
                await release(queue.store, claim, attempts if ours else None)
                return Settled(how="retry") if ours else DeliveryLost(stored=False)

    def _end(self, delivery: Delivery, statement: str, *values: object) -> bool:
        """Let go of a row; False where it is somebody else's by now."""
        receipt = delivery.receipt
        if not isinstance(receipt, Receipt) or self._held.get(receipt) is not delivery:
            return False
        changed = self._do(f"{statement} where id = ? and claim = ?", (*values, receipt.row, receipt.claim)).rowcount
        self._held.pop(receipt, None)
        self._turn.set()
        if not changed:
            delivery.lost.set()
        return changed == 1

    async def extend(self, delivery: Delivery) -> None:
        """See `ports.Transport`."""
        self._alive()
        receipt = delivery.receipt
        if isinstance(receipt, Receipt) and receipt in self._held:
            until = self._queue.now() + self._queue.lease_s
            extend = "update messages set held_until = ? where id = ? and claim = ?"
            if self._do(extend, (until, receipt.row, receipt.claim)).rowcount:
                return
            del self._held[receipt]
        delivery.lost.set()
        raise TransportLost("another one holds the message by now")

    async def publish(
        self, body: bytes, *, message_id: str | None = None, headers: Mapping[str, object] | None = None
    ) -> None:
        """See `ports.Transport`."""
        self._alive()
        self._do(PUBLISH, (self._queue.name, body, message_id, json.dumps(dict(headers or {}))))
        self._turn.set()

    async def backlog(self) -> Backlog:
        """See `ports.Transport`."""
        self._alive()
        now = self._queue.now()
        ready, delayed, in_flight = self._do(COUNT, {"queue": self._queue.name, "now": now}).fetchone()
        return Backlog(ready=ready, delayed=delayed, in_flight=in_flight, how="SQLite")

    def _alive(self) -> None:
        if self.lost.is_set():
            raise TransportLost(self.lost_because)

    def _do(self, statement: str, values: Mapping[str, object] | tuple[object, ...]) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.Error as exc:
            self.cut(f"{self._queue.path}: {exc}")
            raise TransportLost(self.lost_because) from exc


def sqlite(parts: TransportParts) -> Connect:
    """The factory that the entry point names; it is called for each queue, and opens nothing."""
    return SqliteQueue(
        path=parts.given.text("path"),
        name=parts.queue_name,
        store=parts.store,
        now=parts.now,
        lease_s=parts.lease_s,
    ).connect
