"""The dead-letter queue, letter by letter: each is held unacknowledged, and goes back unless it was taken away.

Not here: which letters are meant, and what a replay is (`dlq`).
"""

import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from aiormq.abc import AbstractChannel as RawChannel
from pamqp.commands import Basic

from inference_worker.errors import TransportLost
from inference_worker.rmq_connection import (
    CALL_S,
    Connection,
    Publisher,
    Refused,
    Unroutable,
    copied,
    on_own_channel,
    opened,
    translated,
)
from inference_worker.rmq_values import text_of

RETRY_HEADER: Final = "x-retry-count"
OUR_HEADERS: Final = frozenset({"x-dead-reason", "x-dead-attempts", "x-dead-status", "x-dead-queue"})
"""What the worker writes into a dead letter that it publishes itself."""

MOST_LOOKS: Final = 10
"""A broker may drop a letter that was delivered 20 times, where the queue was declared without a limit of its own."""

DLQ_DELIVERY_LIMIT: Final = 1_000_000_000


class NoDeadLetterQueue(Exception):
    """It does not exist: no worker of this configuration has ever run."""


class LookedAtTooOften(Exception):
    """The queue is not ours, and looking once more might be what makes its broker drop a letter."""


class NotPutBack(Exception):
    """A copy was not taken over; the letter is where it was."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Letter:
    """A dead letter that is held."""

    tag: int
    body: bytes
    properties: Basic.Properties

    @property
    def headers(self) -> Mapping[str, object]:
        return self.properties.headers or {}

    @property
    def deaths(self) -> Sequence[Mapping[str, object]]:
        """What the broker wrote of each of its deaths, the last one first."""
        deaths = self.headers.get("x-death")
        return [death for death in deaths if isinstance(death, dict)] if isinstance(deaths, list) else []

    @property
    def origin(self) -> str | None:
        """The queue that it died in."""
        named = self.headers.get("x-dead-queue")
        for death in self.deaths:
            named = named or death.get("queue")
        return str(named) if named else None

    @property
    def message_id(self) -> str | None:
        return text_of(self.properties.message_id)


class DeadLetters:
    """One session with the queue. Leaving `open_dead_letters` gives back all that was not taken away."""

    at_once: Final = False
    """A copy and its letter are two messages here."""

    def __init__(self, connection: Connection, channel: RawChannel, publisher: Publisher, queue: str) -> None:
        self._connection = connection
        self._channel = channel
        self._publisher = publisher
        self._queue = queue
        self.ready = 0
        """How many nobody held at the beginning."""
        self._ours: bool | None = None
        """Whether the queue is as the worker declares it; None while nobody has asked."""

    async def begin(self) -> None:
        """Find the queue.

        Raises:
            NoDeadLetterQueue, TransportLost
        """
        try:
            declared = await on_own_channel(
                self._connection,
                "look at the dead-letter queue",
                lambda channel: channel.queue_declare(self._queue, passive=True),
            )
        except Refused as exc:
            raise NoDeadLetterQueue(f"there is no queue {self._queue} that can be looked at: {exc}") from exc
        self.ready = declared.message_count or 0

    async def next(self) -> Letter | None:
        """The next letter that nobody holds; None where there is none.

        Raises:
            LookedAtTooOften, TransportLost
        """
        try:
            async with translated("get a dead letter", CALL_S):
                message = await self._channel.basic_get(self._queue, no_ack=False)
        except Refused as exc:
            raise TransportLost(str(exc)) from exc
        if message.delivery_tag is None or not isinstance(message.delivery, Basic.GetOk):
            return None
        letter = Letter(tag=message.delivery_tag, body=message.body, properties=message.header.properties)
        looks = letter.headers.get("x-delivery-count")
        if isinstance(looks, int) and looks >= MOST_LOOKS and not await self._is_ours():
            raise LookedAtTooOften(
                f"{self._queue} was declared by others, and a letter in it was looked at {looks} times: the broker may "
                "drop it when it was delivered more often than the queue's x-delivery-limit (20 where none is set). "
                "Set a policy with a higher delivery-limit, or take the letters out by other means"
            )
        return letter

    async def _is_ours(self) -> bool:
        """Whether the queue is as the worker declares it. A declaration that differs is refused, and does nothing."""
        if self._ours is None:
            arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-delivery-limit": DLQ_DELIVERY_LIMIT}
            try:
                await on_own_channel(
                    self._connection,
                    "compare the dead-letter queue",
                    lambda channel: channel.queue_declare(self._queue, durable=True, arguments=arguments),
                )
                self._ours = True
            except Refused:
                self._ours = False
        return self._ours

    async def has_queue(self, name: str) -> bool:
        """Whether a queue exists."""
        try:
            await on_own_channel(
                self._connection, f"look at {name}", lambda channel: channel.queue_declare(name, passive=True)
            )
        except Refused:
            return False
        return True

    async def put_back(self, letter: Letter, body: bytes, queue: str) -> None:
        """Publish a copy that begins anew; returns once the broker has it.

        Raises:
            NotPutBack: it has not, for sure or perhaps. The letter is still held.
        """
        properties = copied(letter.properties)
        properties.expiration = None
        properties.delivery_mode = 2
        kept = {name: value for name, value in (properties.headers or {}).items() if name not in OUR_HEADERS}
        properties.headers = {**kept, RETRY_HEADER: 0}
        try:
            await self._publisher.publish(body, properties, exchange="", routing_key=queue, within_s=CALL_S)
        except Unroutable as exc:
            raise NotPutBack(f"there is no queue {queue}") from exc
        except (Refused, TransportLost) as exc:
            raise NotPutBack(str(exc)) from exc

    async def take_away(self, letter: Letter) -> None:
        """Acknowledge it: it is gone.

        Raises:
            TransportLost: perhaps it is not.
        """
        async with translated("acknowledge a dead letter", CALL_S):
            await self._channel.basic_ack(letter.tag)

    async def synchronized(self) -> None:
        """Return once the broker has read what was acknowledged: acknowledgements have no answer of their own."""
        async with translated("wait for the broker", CALL_S):
            await self._channel.basic_qos(prefetch_count=0)

    async def give_back(self) -> None:
        """All that is held and was not taken away."""
        async with translated("give dead letters back", CALL_S):
            await self._channel.basic_nack(0, multiple=True, requeue=True)


@asynccontextmanager
async def open_dead_letters(
    url: str, queue: str, *, name: str, tls: ssl.SSLContext | None
) -> AsyncGenerator[DeadLetters, None]:
    """A session with the dead-letter queue.

    Raises:
        TransportLost: RabbitMQ cannot be reached.
        NoDeadLetterQueue
    """
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(opened(url, name=name, tls=tls))
        async with translated("open a channel", CALL_S):
            channel = connection.channel(publisher_confirms=False)
            await channel.initialize()
            raw = await channel.get_underlay_channel()
        publisher = Publisher(lambda: opened(url, name=f"{name} (replays)"[:255], tls=tls))
        stack.push_async_callback(publisher.close)
        letters = DeadLetters(connection, raw, publisher, queue)
        await letters.begin()
        yield letters
        # Anything else (an error, a kill) ends the connection, and the broker gives them back by itself.
        await letters.synchronized()
        await letters.give_back()
        await letters.synchronized()
