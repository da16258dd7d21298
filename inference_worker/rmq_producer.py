"""The producer's side of RabbitMQ: requests into the queue, each confirmed, over a connection that comes back.

Not here: what a request is, and who waits for its answer (`client`).
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

import structlog
from pamqp.commands import Basic

from inference_worker.errors import NotAccepted, TransportLost
from inference_worker.rmq_connection import (
    CALL_S,
    Connection,
    Publisher,
    Refused,
    TooLarge,
    Unroutable,
    opened,
    translated,
)

log = structlog.get_logger(__name__)

MOST_UNCONFIRMED: Final = 256
MOST_UNCONFIRMED_BYTES: Final = 32 * 1024 * 1024
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0
NO_QUEUE_S: Final = 10.0
"""How long a queue may be missing: while a broker starts, its queues are."""


class Producer:
    """Publishes into one queue. What was not confirmed is published again: the same request twice is one request."""

    def __init__(self, url: Callable[[], str], queue: str, *, name: str, tls: ssl.SSLContext | None = None) -> None:
        self.queue = queue
        self._url = url
        self._name = name
        self._tls = tls
        self._publisher = Publisher(self._connect)
        self._window = _Window(MOST_UNCONFIRMED, MOST_UNCONFIRMED_BYTES)
        self._mending = asyncio.Lock()
        self._pause_s = FIRST_PAUSE_S

    @asynccontextmanager
    async def open(self) -> AsyncGenerator["Producer", None]:
        """A context that closes the connection; opening it does not connect."""
        try:
            yield self
        finally:
            await self._publisher.close()

    async def publish(self, body: bytes, *, message_id: str, within_s: float, priority: int | None = None) -> None:
        """Return once the broker has taken the message over. A higher `priority` goes first, where the queue has any.

        Raises:
            NotAccepted: it has not, within the time; the reason says why.
        """
        until = asyncio.get_running_loop().time() + within_s
        sent, why = False, ""
        try:
            async with asyncio.timeout(within_s), self._window.of(len(body)):
                no_queue_until = asyncio.get_running_loop().time() + NO_QUEUE_S
                while True:
                    try:
                        await self._publish(body, message_id, priority, until - asyncio.get_running_loop().time())
                        return
                    except Unroutable as exc:
                        why = f"there is no queue {self.queue}; it is declared by the first worker of the deployment"
                        if asyncio.get_running_loop().time() > no_queue_until:
                            raise NotAccepted(why, maybe=sent) from exc
                        await asyncio.sleep(min(self._pause_s, 1.0))
                    except TooLarge as exc:
                        raise NotAccepted(str(exc), maybe=False, for_good=True) from exc
                    except Refused as exc:
                        why = f"{exc}: the queue is full, or on its way to another node"
                        await asyncio.sleep(min(self._pause_s, 1.0))
                    except TransportLost as exc:
                        sent, why = True, str(exc)
                        await self._mend(why)
        except TimeoutError as exc:
            reason = f"not confirmed within {within_s:g} s" + (f": {why}" if why else "")
            raise NotAccepted(reason, maybe=True) from exc

    async def _publish(self, body: bytes, message_id: str, priority: int | None, left_s: float) -> None:
        properties = Basic.Properties(
            message_id=message_id, content_type="application/json", delivery_mode=2, priority=priority
        )
        await self._publisher.publish(
            body, properties, exchange="", routing_key=self.queue, within_s=max(min(left_s, CALL_S), 0.001)
        )

    async def _mend(self, why: str) -> None:
        """Have a connection again: one tries, the others wait for it."""
        async with self._mending:
            while not self._publisher.usable:
                log.info("the connection to RabbitMQ is gone; trying again", reason=why)
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
                try:
                    async with translated("connect", CALL_S):
                        await self._publisher.open()
                except (TransportLost, Refused) as exc:
                    why = str(exc)
            self._pause_s = FIRST_PAUSE_S

    def _connect(self) -> AbstractAsyncContextManager[Connection]:
        return opened(self._url(), name=self._name, tls=self._tls, within_s=CALL_S)


class _Window:
    """A bound on messages and on bytes that are under way; one message of any size always fits."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._count = 0
        self._bytes = 0
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def of(self, size_bytes: int) -> AsyncGenerator[None, None]:
        """Room for one message inside the context."""
        while self._count and (self._count >= self._most or self._bytes + size_bytes > self._most_bytes):
            self._freed.clear()
            await self._freed.wait()
        self._count += 1
        self._bytes += size_bytes
        try:
            yield
        finally:
            self._count -= 1
            self._bytes -= size_bytes
            self._freed.set()
