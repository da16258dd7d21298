"""A queue in this process, behind the same seam as RabbitMQ: for `dev`, and for every test above the seam.

It is a broker (`MemoryBroker`) with connections (`MemoryTransport`) that can be cut; nothing outlives the process.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final, assert_never

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
from inference_worker.errors import QueueFull, TransportLost
from inference_worker.ports import Backlog, Delivery, ResultStore
from inference_worker.settling import bury, release, store_reply

MOST_MESSAGES: Final = 10_000
MOST_BYTES: Final = 256 * 1024 * 1024
MOST_DEAD_LETTERS: Final = 10_000


@dataclass(slots=True, kw_only=True)
class _Message:
    body: bytes
    message_id: str | None
    headers: Mapping[str, object]
    attempts: int = 0
    redelivered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadMessage:
    """A message that was parked, and why."""

    body: bytes
    message_id: str | None
    reason: str
    attempts: int
    died_at: float = 0.0
    headers: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Receipt:
    message: _Message
    number: int


@dataclass(slots=True)
class MemoryBroker:
    """The queue that its connections share."""

    store: ResultStore
    now: Callable[[], float]
    queue: str = "memory"
    ready: deque[_Message] = field(default_factory=deque)
    delayed: int = 0
    held_bytes: int = 0
    dead: deque[DeadMessage] = field(default_factory=lambda: deque(maxlen=MOST_DEAD_LETTERS))
    connections: dict["MemoryTransport", None] = field(default_factory=dict)
    """In the order of their opening, which is that of their being woken: the same in every run."""
    refuses: str | None = None
    """Why no connection can be had; a test sets it."""

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator["MemoryTransport", None]:
        """Open a connection."""
        if self.refuses is not None:
            raise TransportLost(self.refuses)
        transport = MemoryTransport(self)
        self.connections[transport] = None
        try:
            yield transport
        finally:
            transport.cut("closed")

    def add(self, message: _Message) -> None:
        """Put a new message at the end.

        Raises:
            QueueFull: the bound is reached.
        """
        if len(self.ready) + self.delayed >= MOST_MESSAGES or self.held_bytes + len(message.body) > MOST_BYTES:
            raise QueueFull(f"the embedded queue holds {len(self.ready)} messages, which is as many as it takes")
        self.held_bytes += len(message.body)
        self.ready.append(message)
        self.wake()

    def give_back(self, message: _Message) -> None:
        """Put a message where it was taken from."""
        self.ready.appendleft(replace(message, redelivered=True))
        self.wake()

    def hide(self, message: _Message, delay_s: float) -> None:
        """Put a copy in that becomes visible after `delay_s`."""

        def show() -> None:
            self.delayed -= 1
            self.ready.append(message)
            self.wake()

        self.delayed += 1
        if delay_s > 0:
            asyncio.get_running_loop().call_later(delay_s, show)
        else:
            show()

    def forget(self, message: _Message) -> None:
        """The message is settled for good."""
        self.held_bytes -= len(message.body)

    def wake(self) -> None:
        """Tell the connections that there is something."""
        for connection in self.connections:
            connection.wake()


class MemoryTransport:
    """One connection to the broker; `cut` ends it, and everything it holds goes back."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._limit = 0
        self._numbers = itertools.count()
        self._held: dict[int, Delivery] = {}
        self._something = asyncio.Event()
        self.lost = asyncio.Event()
        self.lost_because = ""

    def cut(self, why: str) -> None:
        """End the connection: what it holds is given back."""
        if self.lost.is_set():
            return
        self.lost_because = why
        self.lost.set()
        self._broker.connections.pop(self, None)
        for delivery in reversed(self._held.values()):
            delivery.lost.set()
            self._broker.give_back(_receipt(delivery).message)
        self._held.clear()
        self._something.set()

    def wake(self) -> None:
        """Something has come into the queue."""
        self._something.set()

    @asynccontextmanager
    async def consuming(self, limit: int) -> AsyncGenerator[None, None]:
        """See `ports.Transport`. Nothing is read ahead, so there is nothing to give back."""
        self._alive()
        self._limit = limit
        self._something.set()
        try:
            yield
        finally:
            self._limit = 0

    async def set_limit(self, limit: int) -> None:
        """See `ports.Transport`."""
        self._alive()
        self._limit = limit
        self._something.set()

    async def receive(self) -> Delivery:
        """See `ports.Transport`."""
        while True:
            self._alive()
            if self._broker.ready and len(self._held) < self._limit:
                message = self._broker.ready.popleft()
                number = next(self._numbers)
                delivery = Delivery(
                    body=message.body,
                    attempts=message.attempts,
                    queue=self._broker.queue,
                    message_id=message.message_id,
                    redelivered=message.redelivered,
                    receipt=_Receipt(message, number),
                    lost=asyncio.Event(),
                    headers=message.headers,
                )
                self._held[number] = delivery
                return delivery
            self._something.clear()
            await self._something.wait()

    async def settle(self, delivery: Delivery, disposition: Disposition) -> Settlement:
        """See `ports.Transport`."""
        message = _receipt(delivery).message
        match disposition:
            case Ack():
                if (not_yet := await store_reply(self._broker.store, disposition)) is not None:
                    return not_yet
                return self._end(delivery, Settled(how="ack"), stored=disposition.reply is not None)
            case DeadLetter(reason=reason, attempts=attempts):
                if (not_yet := await store_reply(self._broker.store, disposition)) is not None:
                    return not_yet
                await bury(self._broker.store, disposition, self._broker.now())
                settled = self._end(delivery, Settled(how="dead_letter"), stored=disposition.reply is not None)
                if isinstance(settled, Settled):
                    self._broker.dead.append(
                        DeadMessage(
                            body=message.body,
                            message_id=message.message_id,
                            reason=reason,
                            attempts=attempts,
                            died_at=self._broker.now(),
                            headers=message.headers,
                        )
                    )
                return settled
            case Nack(claim=claim):
                await release(self._broker.store, claim)
                settled = self._end(delivery, Settled(how="requeue"), stored=False, forget=False)
                if isinstance(settled, Settled):
                    self._broker.give_back(message)
                return settled
            case Republish(delay_s=delay_s, attempts=attempts, claim=claim):
                if not self._holds(delivery):
                    await release(self._broker.store, claim)
                    return DeliveryLost(stored=False)
                self._broker.hide(replace(message, attempts=attempts, redelivered=False), delay_s)
                settled = self._end(delivery, Settled(how="retry"), stored=False, forget=False)
                await release(self._broker.store, claim, attempts)
                return settled
            case _:
                assert_never(disposition)

    async def extend(self, delivery: Delivery) -> None:
        """See `ports.Transport`. There are no leases here."""
        self._alive()
        if not self._holds(delivery):
            raise TransportLost("the delivery is not ours any more")

    async def publish(
        self, body: bytes, *, message_id: str | None = None, headers: Mapping[str, object] | None = None
    ) -> None:
        """See `ports.Transport`."""
        self._alive()
        self._broker.add(_Message(body=body, message_id=message_id, headers=dict(headers or {})))

    async def backlog(self) -> Backlog:
        """See `ports.Transport`."""
        self._alive()
        in_flight = sum(len(connection._held) for connection in self._broker.connections)
        return Backlog(ready=len(self._broker.ready), delayed=self._broker.delayed, in_flight=in_flight)

    def _alive(self) -> None:
        if self.lost.is_set():
            raise TransportLost(self.lost_because)

    def _holds(self, delivery: Delivery) -> bool:
        return self._held.get(_receipt(delivery).number) is delivery

    def _end(self, delivery: Delivery, settled: Settled, *, stored: bool, forget: bool = True) -> Settlement:
        """Let go of a delivery, if it is still ours."""
        if not self._holds(delivery):
            return DeliveryLost(stored=stored)
        del self._held[_receipt(delivery).number]
        self._something.set()
        if forget:
            self._broker.forget(_receipt(delivery).message)
        return settled


def _receipt(delivery: Delivery) -> _Receipt:
    assert isinstance(delivery.receipt, _Receipt)
    return delivery.receipt
