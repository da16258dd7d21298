"""A queue whose results go to a list as well, as llm-d-async's do: a transport around a transport.

The result is stored first, as ever; then it is sent to its list, once, and only then the message is acknowledged. So a
crash between the steps leads to the same again: the redelivered message finds its result, and sends it if nobody has.
For transports that know nothing of lists; the sorted set has its own, in one step.

Where the key of the list is something else, there is no session: this queue waits until that is mended, and no other.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import Final, Protocol

from inference_worker.disposition import Ack, DeadLetter, DeliveryLost, Disposition, Settlement, StoreSilent
from inference_worker.errors import StoreUnavailable, TransportLost
from inference_worker.llmd_results import outcome_of, result_json
from inference_worker.messages import Reply, request_id_in
from inference_worker.ports import Backlog, Connect, Delivery, ResultStore, Transport
from inference_worker.redis_scripts import RedisCommands, Script
from inference_worker.settling import bury, store_reply
from inference_worker.timing import ended, first_of
from inference_worker.transports.sorted_set_members import stored_reply

SEND: Final = Script(
    """
-- KEYS list, mark   ARGV message, ttl of the list in s or 0, ttl of the mark in s
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('LPUSH', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], '1', 'EX', ARGV[3])
if tonumber(ARGV[2]) > 0 then redis.call('EXPIRE', KEYS[1], ARGV[2]) end
return 1
"""
)


class NoList(Exception):
    """What lies under the key is no list: no outage, and nothing that mends itself."""


class Results(Protocol):
    """Where results go besides."""

    async def look(self) -> None:
        """Raises NoList."""

    async def send(self, reply: Reply) -> None:
        """Send a terminal result; a repeat does nothing. Raises StoreUnavailable, NoList."""


class ResultList:
    """One list of results in Redis."""

    def __init__(self, link: RedisCommands, name: str, *, list_ttl_s: int, marked_s: float) -> None:
        """`list_ttl_s`: a list that gets nothing new for so long goes; 0: never. `marked_s`: how long it is known that
        a result was sent: as long as the result itself is kept.
        """
        self._link = link
        self._name = name
        self._list_ttl_s = list_ttl_s
        self._marked_s = max(round(marked_s), 1)

    async def look(self) -> None:
        """See `Results`. Where nobody answers, whoever sends will say so."""
        kind = b"none"
        with suppress(StoreUnavailable):
            kind = bytes(await self._link.do("TYPE", self._name))
        if kind not in (b"none", b"list"):
            raise NoList(f"{self._name} is to be a list of results, and is a {kind.decode()}")

    async def send(self, reply: Reply) -> None:
        """See `Results`."""
        message = result_json(reply.request_id, outcome_of(reply))
        mark = f"infer_sent:{self._name}:{reply.request_id}"
        try:
            await self._link.run(SEND, [self._name, mark], message, self._list_ttl_s, self._marked_s)
        except StoreUnavailable as exc:
            if "WRONGTYPE" in str(exc):
                raise NoList(f"{self._name} is to be a list of results: {exc}") from exc
            raise


def listed(connect: Connect, results: Results, store: ResultStore, now: Callable[[], float]) -> Connect:
    """The same queue, whose results go to a list as well."""

    @asynccontextmanager
    async def open_session() -> AsyncGenerator[Transport, None]:
        try:
            await results.look()
        except NoList as exc:
            raise TransportLost(str(exc)) from exc
        async with connect() as transport:
            session = ListedTransport(transport, results, store, now)
            heeding = asyncio.create_task(session.heed(), name="the session of a queue with a list")
            try:
                yield session
            finally:
                await ended(heeding)

    return open_session


class ListedTransport:
    """One session. See `ports.Transport`."""

    def __init__(self, transport: Transport, results: Results, store: ResultStore, now: Callable[[], float]) -> None:
        self._transport = transport
        self._results = results
        self._store = store
        self._now = now
        self._why = ""
        self.lost = asyncio.Event()

    async def heed(self) -> None:
        """Be lost with the queue's own session."""
        await first_of(self._transport.lost)
        self.lost.set()

    def _lose(self, why: str) -> None:
        self._why = why
        self.lost.set()

    @property
    def lost_because(self) -> str:
        """See `ports.Transport`."""
        return self._why or self._transport.lost_because

    def consuming(self, limit: int) -> AbstractAsyncContextManager[None]:
        """See `ports.Transport`."""
        return self._transport.consuming(limit)

    async def set_limit(self, limit: int) -> None:
        """See `ports.Transport`."""
        await self._transport.set_limit(limit)

    async def receive(self) -> Delivery:
        """See `ports.Transport`."""
        if self._why:
            raise TransportLost(self._why)
        try:
            return await self._transport.receive()
        except TransportLost:
            self.lost.set()
            raise

    async def settle(self, delivery: Delivery, disposition: Disposition) -> Settlement:
        """See `ports.Transport`. What ends a request sends its result before it is acknowledged."""
        if not isinstance(disposition, Ack | DeadLetter):
            return await self._transport.settle(delivery, disposition)
        reply = disposition.reply
        if reply is None:
            return await self._settle_known(delivery, disposition)
        if (not_yet := await store_reply(self._store, disposition)) is not None:
            return not_yet
        if isinstance(disposition, DeadLetter):
            await bury(self._store, disposition, self._now())
        try:
            await self._results.send(reply)
        except StoreUnavailable:
            return StoreSilent()  # Asked again, the store has the result, and it is sent as a known one.
        except NoList as exc:
            self._lose(str(exc))
            return DeliveryLost(stored=True)  # As after that the message comes back.
        settlement = await self._transport.settle(delivery, replace(disposition, reply=None))
        return DeliveryLost(stored=True) if isinstance(settlement, DeliveryLost) else settlement

    async def _settle_known(self, delivery: Delivery, disposition: Ack | DeadLetter) -> Settlement:
        """The result is there already, if there is one; whether it was sent is looked at."""
        request_id = request_id_in(delivery.body, message_id=delivery.message_id, now=self._now())
        if request_id is not None:
            try:
                stored = await self._store.read(request_id)
                if stored is not None:
                    await self._results.send(stored_reply(request_id, stored))
            except StoreUnavailable:
                return StoreSilent()
            except NoList as exc:
                self._lose(str(exc))
                return DeliveryLost(stored=False)
        return await self._transport.settle(delivery, disposition)

    async def extend(self, delivery: Delivery) -> None:
        """See `ports.Transport`."""
        await self._transport.extend(delivery)

    async def publish(
        self, body: bytes, *, message_id: str | None = None, headers: Mapping[str, object] | None = None
    ) -> None:
        """See `ports.Transport`."""
        await self._transport.publish(body, message_id=message_id, headers=headers)

    async def backlog(self) -> Backlog:
        """See `ports.Transport`."""
        return await self._transport.backlog()
