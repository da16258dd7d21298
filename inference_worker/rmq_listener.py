"""RabbitMQ's side of listening: sessions, QoS, topology, copies, settling. The loop that listens is `listener.py`.

Plain connections: the driver's own "robust" ones come back without their consumers. A connection is a session: once
anything of it is gone (the connection, a channel, the consumer) all of it is, and the listener opens another. Copies
and replies go over a connection of their own, opened when the first one is needed: a broker short of memory or disk
stops reading from connections that publish, and with them the acknowledgements that they carry.
"""

import asyncio
import ssl
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, assert_never

import structlog
from aiormq.abc import AbstractChannel as RawChannel
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from inference_worker.disposition import (
    Ack,
    CopyRefused,
    DeadLetter,
    DeliveryLost,
    Disposition,
    DispositionName,
    Nack,
    Republish,
    Settled,
    Settlement,
    StoreSilent,
)
from inference_worker.errors import StoreUnavailable, TransportLost
from inference_worker.messages import encode_reply, request_id_in
from inference_worker.metrics import WorkerMetrics
from inference_worker.ports import Backlog, Delivery, ResultStore
from inference_worker.rmq_connection import (
    Connection,
    Publisher,
    Refused,
    TooLarge,
    Unroutable,
    copied,
    on_own_channel,
    opened,
    reason_text,
    translated,
)
from inference_worker.rmq_replies import awaited, refusal, send_reply
from inference_worker.rmq_values import text_of
from inference_worker.settling import bury, release, store_reply
from inference_worker.timing import ended, first_of

log = structlog.get_logger(__name__)

CONNECT_S: Final = 15.0
CALL_S: Final = 10.0
"""How long the broker may take to answer one call."""

CANCEL_S: Final = 2.0
COPY_S: Final = 30.0
"""How long a copy is tried, its deadline apart."""

COPY_PAUSE_S: Final = 0.25
RETRY_HEADER: Final = "x-retry-count"
MOST_RETRY_COUNT: Final = 2**31 - 1
DLQ_DELIVERY_LIMIT: Final = 1_000_000_000
"""Looking at dead letters must never drop one."""

DELAY_QUEUE_LIFE_S: Final = 86_400
"""A waiting queue goes this long after its last use, and its longest message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The names and kinds of what the worker declares."""

    queue: str
    dead_letter_exchange: str
    dead_letter_queue: str
    dead_letter_routing_key: str
    queue_type: Literal["quorum", "classic"]
    delivery_limit: int
    max_priority: int = 0
    """Of a classic queue: messages of so many levels overtake each other. 0: none does."""

    def queue_arguments(self) -> dict[str, Any]:
        """Of the request queue."""
        arguments: dict[str, Any] = {
            "x-queue-type": self.queue_type,
            "x-dead-letter-exchange": self.dead_letter_exchange,
            "x-dead-letter-routing-key": self.dead_letter_routing_key,
        }
        if self.queue_type == "quorum":
            arguments |= {
                "x-delivery-limit": self.delivery_limit,
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            }
        elif self.max_priority:
            arguments["x-max-priority"] = self.max_priority
        return arguments

    def dead_letter_arguments(self) -> dict[str, Any]:
        """Of the queue that keeps the dead letters."""
        if self.queue_type == "quorum":
            return {"x-queue-type": "quorum", "x-delivery-limit": DLQ_DELIVERY_LIMIT}
        return {"x-queue-type": "classic"}

    def delay_queue(self, delay_s: float) -> tuple[str, dict[str, Any]]:
        """The queue whose messages come back to the request queue after `delay_s`: one for each delay.

        In one queue for all of them a short delay would wait behind a long one.
        """
        delay_ms = max(round(delay_s * 1000), 1)
        arguments: dict[str, Any] = {
            "x-queue-type": self.queue_type,
            "x-message-ttl": delay_ms,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self.queue,
            "x-expires": delay_ms + DELAY_QUEUE_LIFE_S * 1000,
        }
        if self.queue_type == "quorum":
            arguments |= {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
        return f"{self.queue}.delay.{delay_ms}", arguments


@dataclass(slots=True, eq=False)
class _Receipt:
    delivery_tag: int
    properties: Basic.Properties
    settled: bool = False
    """Settling twice would close the channel under all other deliveries."""


class RabbitMQ:
    """Opens sessions with one broker, for one queue."""

    def __init__(
        self,
        *,
        url: Callable[[], str],
        topology: Topology,
        store: ResultStore,
        metrics: WorkerMetrics,
        name: str,
        tls: ssl.SSLContext | None,
        now: Callable[[], float],
    ) -> None:
        self._url = url
        self.topology = topology
        self.store = store
        self.metrics = metrics
        self.name = name
        self._tls = tls
        self.now = now
        self._said: set[str] = set()

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator["RabbitTransport", None]:
        """Open a session: connection, channel and topology, or nothing."""
        async with self.connection(self.name) as connection:
            session = RabbitTransport(self, connection)
            try:
                await session.begin()
                yield session
            finally:
                session.lose("closed by us")
                await session.end()

    @asynccontextmanager
    async def connection(self, name: str) -> AsyncGenerator[Connection, None]:
        """A plain connection with its name; closed for sure, also when the broker has stopped answering."""
        async with opened(self._url(), name=name, tls=self._tls, within_s=CONNECT_S) as connection:
            yield connection

    def say_once(self, warning: str, **context: object) -> None:
        """Warn of what does not change from one connection to the next."""
        if warning not in self._said:
            self._said.add(warning)
            log.warning(warning, **context)


class RabbitTransport:
    """One session: a channel to consume on, and a way to publish copies. See `ports.Transport`."""

    def __init__(self, broker: RabbitMQ, connection: Connection) -> None:
        self._broker = broker
        self._connection = connection
        self._topology = broker.topology
        self._store = broker.store
        self._publisher = Publisher(lambda: broker.connection(f"{broker.name} (retries)"[:255]))
        self._channel: RawChannel | None = None
        self._buffer: deque[Delivery] = deque()
        self._something = asyncio.Event()
        self._flow: _Flow | None = None
        self._returning: set[asyncio.Task[None]] = set()
        self._parks_itself = False
        """Whether dead letters are published by us, since the queue was not declared by us."""
        self.lost = asyncio.Event()
        self.lost_because = ""

    # ------------------------------------------------------------ beginning and end

    async def begin(self) -> None:
        """Open the channel and declare the topology."""
        self._connection.close_callbacks.add(self._connection_closed)
        self._channel = await self._open_channel()
        await self._declare()

    def lose(self, why: str) -> None:
        """The session is over."""
        if not self.lost.is_set():
            self.lost_because = why
            self.lost.set()
            self._something.set()

    async def end(self) -> None:
        """Close what the session opened besides its connection."""
        for task in list(self._returning):
            await ended(task)
        await self._publisher.close()

    async def _open_channel(self) -> RawChannel:
        async with translated("open a channel", CALL_S):
            channel = self._connection.channel(publisher_confirms=False)
            channel.close_callbacks.add(self._channel_closed)
            await channel.initialize()
            raw = await channel.get_underlay_channel()
        raw.on_consumer_cancel_callbacks.add(self._consumer_cancelled)
        return raw

    def _connection_closed(self, _: object, exc: BaseException | None) -> None:
        self.lose(f"the connection was closed: {reason_text(exc)}")

    def _channel_closed(self, _: object, exc: BaseException | None) -> None:
        self.lose(f"the channel was closed: {reason_text(exc)}")

    def _consumer_cancelled(self, _: object) -> None:
        self.lose("the broker cancelled the consumer")

    async def _declare(self) -> None:
        names = self._topology
        await self._declared(
            f"exchange {names.dead_letter_exchange}",
            lambda c: c.exchange_declare(names.dead_letter_exchange, exchange_type="direct", durable=True),
            lambda c: c.exchange_declare(names.dead_letter_exchange, passive=True),
        )
        await self._declared(
            f"queue {names.dead_letter_queue}",
            lambda c: c.queue_declare(names.dead_letter_queue, durable=True, arguments=names.dead_letter_arguments()),
            lambda c: c.queue_declare(names.dead_letter_queue, passive=True),
        )
        try:
            await self._on_own_channel(
                "bind the dead-letter queue",
                lambda c: c.queue_bind(
                    names.dead_letter_queue, names.dead_letter_exchange, names.dead_letter_routing_key
                ),
            )
        except Refused as exc:
            self._broker.say_once(
                "the dead-letter queue could not be bound; dead letters may have nowhere to go", reason=str(exc)
            )
        as_wanted = await self._declared(
            f"queue {names.queue}",
            lambda c: c.queue_declare(names.queue, durable=True, arguments=names.queue_arguments()),
            lambda c: c.queue_declare(names.queue, passive=True),
        )
        self._parks_itself = not as_wanted

    async def _declared(
        self,
        what: str,
        declare: Callable[[RawChannel], Awaitable[object]],
        look: Callable[[RawChannel], Awaitable[object]],
    ) -> bool:
        """Declare, or find out that it is there in another form: then it is used as it is."""
        try:
            await self._on_own_channel(f"declare {what}", declare)
        except Refused as exc:
            try:
                await self._on_own_channel(f"find {what}", look)
            except Refused as missing:
                raise TransportLost(f"{what} could neither be declared nor found: {exc}; {missing}") from missing
            self._broker.say_once(f"{what} exists in another form and is used as it is", reason=str(exc))
            return False
        return True

    async def _on_own_channel(self, what: str, call: Callable[[RawChannel], Awaitable[Any]]) -> Any:
        """Make a call on a channel of its own: the broker closes the channel of a call that it refuses."""
        return await on_own_channel(self._connection, what, call, within_s=CALL_S)

    # ------------------------------------------------------------ consuming

    @asynccontextmanager
    async def consuming(self, limit: int) -> AsyncGenerator[None, None]:
        """See `ports.Transport`."""
        await self._start_flow(limit)
        try:
            yield
        finally:
            await self._stop_flow()

    async def set_limit(self, limit: int) -> None:
        """See `ports.Transport`."""
        self._alive()
        await self._stop_flow()
        await self._start_flow(limit)

    async def receive(self) -> Delivery:
        """See `ports.Transport`."""
        while True:
            self._alive()
            if self._buffer:
                return self._buffer.popleft()
            self._something.clear()
            await self._something.wait()

    async def _start_flow(self, limit: int) -> None:
        self._alive()
        channel = self._raw()
        flow = _Flow(tag=f"{self._broker.name}.{uuid.uuid4().hex[:8]}"[:255])
        async with self._session_call("consume"):
            await channel.basic_qos(prefetch_count=limit)
            self._flow = flow
            await channel.basic_consume(
                self._topology.queue, lambda message: self._arrived(flow, message), consumer_tag=flow.tag
            )

    async def _stop_flow(self) -> None:
        """Cancel the consumer, then give back what it has delivered and nobody has received."""
        flow, self._flow = self._flow, None
        if flow is None:
            return
        flow.closed = True
        if self.lost.is_set():
            self._buffer.clear()
            return
        try:
            async with self._session_call("cancel the consumer", CANCEL_S):
                await self._raw().basic_cancel(flow.tag)
                while self._buffer:
                    await self._raw().basic_nack(_receipt(self._buffer.popleft()).delivery_tag, requeue=True)
        except TransportLost:
            self._buffer.clear()  # They go back by themselves.

    async def _arrived(self, flow: "_Flow", message: DeliveredMessage) -> None:
        tag = message.delivery_tag
        if tag is None:
            return
        if flow.closed or self.lost.is_set():
            if not self.lost.is_set():
                task = asyncio.create_task(self._return(tag))
                self._returning.add(task)
                task.add_done_callback(self._returning.discard)
            return
        properties = message.header.properties
        headers = properties.headers or {}
        self._buffer.append(
            Delivery(
                body=message.body,
                attempts=self._attempts(headers),
                queue=self._topology.queue,
                message_id=text_of(properties.message_id),
                redelivered=bool(message.redelivered),
                receipt=_Receipt(tag, properties),
                lost=self.lost,
                headers=headers,
                correlation_id=text_of(properties.correlation_id),
            )
        )
        self._something.set()

    async def _return(self, delivery_tag: int) -> None:
        with suppress(TransportLost):  # It goes back by itself.
            async with self._session_call("give a message back"):
                await self._raw().basic_nack(delivery_tag, requeue=True)

    def _attempts(self, headers: Mapping[str, object]) -> int:
        if RETRY_HEADER not in headers:
            return 0
        count = headers[RETRY_HEADER]
        if isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= MOST_RETRY_COUNT:
            return count
        log.warning(
            "the retry count is no count and is taken for 0",
            header=RETRY_HEADER,
            accepted=f"an integer from 0 to {MOST_RETRY_COUNT}",
            came=type(count).__name__,
        )
        return 0

    # ------------------------------------------------------------ settling

    async def settle(self, delivery: Delivery, disposition: Disposition) -> Settlement:
        """See `ports.Transport`."""
        match disposition:
            case Ack(reply=reply):
                if (not_yet := await self._store_and_reply(delivery, disposition)) is not None:
                    return not_yet
                return await self._ack(delivery, "ack", stored=reply is not None)
            case Nack(claim=claim):
                await release(self._store, claim)
                return await self._reject(delivery, requeue=True, how="requeue", stored=False)
            case DeadLetter(reply=reply):
                if (not_yet := await self._store_and_reply(delivery, disposition)) is not None:
                    return not_yet
                await bury(self._store, disposition, self._broker.now())
                if self._parks_itself:
                    return await self._park(delivery, disposition)
                return await self._reject(delivery, requeue=False, how="dead_letter", stored=reply is not None)
            case Republish():
                return await self._republish(delivery, disposition)
            case _:
                assert_never(disposition)

    async def _store_and_reply(self, delivery: Delivery, ending: Ack | DeadLetter) -> Settlement | None:
        """Store the result, if there is one, and send it to who waits for it here. None: go on and acknowledge.

        On what was redelivered the result is there already, and is sent again: the first reply may have been lost.
        """
        if (not_yet := await store_reply(self._store, ending)) is not None:
            return not_yet
        asked = _receipt(delivery).properties
        if not awaited(asked) or delivery.lost.is_set():
            return None
        try:
            result = encode_reply(ending.reply) if ending.reply is not None else await self._stored(delivery, ending)
        except StoreUnavailable:
            return StoreSilent()
        if result is not None:
            await send_reply(self._publisher, asked, result, delivery.lost, self._broker.metrics)
        return None

    async def _stored(self, delivery: Delivery, ending: Ack | DeadLetter) -> bytes | None:
        """The result that is there; of what is no request, and has no id to store one under, what is wrong with it."""
        request_id = request_id_in(delivery.body, message_id=delivery.message_id, now=self._broker.now())
        stored = await self._store.read(request_id) if request_id is not None else None
        if stored is None and isinstance(ending, DeadLetter):
            return refusal(ending)
        return stored

    async def extend(self, delivery: Delivery) -> None:
        """See `ports.Transport`. The broker has no leases: a delivery is ours as long as its channel lives."""
        self._alive()
        if delivery.lost.is_set():
            raise TransportLost(self.lost_because)

    async def _republish(self, delivery: Delivery, disposition: Republish) -> Settlement:
        if delivery.lost.is_set() or _receipt(delivery).settled:
            await release(self._store, disposition.claim)
            return DeliveryLost(stored=False)
        body, properties = delivery.body, copied(_receipt(delivery).properties)
        properties.headers = {**(properties.headers or {}), RETRY_HEADER: disposition.attempts}
        queue = self._topology.queue
        if disposition.delay_s > 0:
            properties.expiration = None
            queue, arguments = self._topology.delay_queue(disposition.delay_s)
            declare: Callable[[RawChannel], Awaitable[object]] | None = lambda c: c.queue_declare(  # noqa: E731
                queue, durable=True, arguments=arguments
            )
        else:
            declare = None
        within_s = min(COPY_S, disposition.left_s)
        try:
            placed = await self._place(
                body, properties, exchange="", routing_key=queue, within_s=within_s, first=declare, delivery=delivery
            )
        except TooLarge as exc:
            return CopyRefused(reason=str(exc))
        if placed:
            await release(self._store, disposition.claim, disposition.attempts)
            return await self._ack(delivery, "retry", stored=False)
        await release(self._store, disposition.claim)
        if delivery.lost.is_set():
            return DeliveryLost(stored=False)
        return await self._reject(delivery, requeue=True, how="requeue", stored=False)

    async def _park(self, delivery: Delivery, letter: DeadLetter) -> Settlement:
        """Publish a dead letter ourselves: this queue was declared by others, who may have given it no dead letters."""
        properties = copied(_receipt(delivery).properties)
        properties.expiration = None
        properties.headers = {
            **(properties.headers or {}),
            "x-dead-reason": letter.reason,
            "x-dead-attempts": letter.attempts,
            "x-dead-status": letter.status_code,
            "x-dead-queue": self._topology.queue,
        }
        stored = letter.reply is not None
        try:
            placed = await self._place(
                delivery.body,
                properties,
                exchange=self._topology.dead_letter_exchange,
                routing_key=self._topology.dead_letter_routing_key,
                within_s=COPY_S,
                first=None,
                delivery=delivery,
            )
        except TooLarge:
            # It can go nowhere by our hand; the broker may still know where to put it.
            return await self._reject(delivery, requeue=False, how="dead_letter", stored=stored)
        if placed:
            return await self._ack(delivery, "dead_letter", stored=stored)
        if delivery.lost.is_set():
            return DeliveryLost(stored=stored)
        # Found as answered when it comes again, and parked then.
        return await self._reject(delivery, requeue=True, how="requeue", stored=stored)

    async def _place(
        self,
        body: bytes,
        properties: Basic.Properties,
        *,
        exchange: str,
        routing_key: str,
        within_s: float,
        first: Callable[[RawChannel], Awaitable[object]] | None,
        delivery: Delivery,
    ) -> bool:
        """Publish until the broker confirms, as long as the message is ours and there is time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while not delivery.lost.is_set():
            left_s = until - loop.time()
            if left_s <= 0:
                break
            try:
                if first is not None:
                    await self._on_own_channel(f"declare {routing_key}", first)
                await self._publisher.publish(
                    body, properties, exchange=exchange, routing_key=routing_key, within_s=min(left_s, CALL_S)
                )
            except Unroutable as exc:
                self._broker.metrics.publish_failed("returned")
                log.warning("a copy came back; the topology is declared anew", reason=str(exc))
                try:
                    await self._declare()
                except TransportLost as lost:
                    self.lose(str(lost))
                    break
            except TooLarge:
                raise
            except (Refused, TransportLost) as exc:
                self._broker.metrics.publish_failed("unconfirmed")
                log.warning("a copy was not confirmed", reason=str(exc))
            else:
                return True
            await first_of(delivery.lost, within_s=COPY_PAUSE_S)
        return False

    async def _ack(self, delivery: Delivery, how: DispositionName, *, stored: bool) -> Settlement:
        return await self._end(delivery, how, lambda c, tag: c.basic_ack(tag), stored=stored)

    async def _reject(self, delivery: Delivery, *, requeue: bool, how: DispositionName, stored: bool) -> Settlement:
        return await self._end(delivery, how, lambda c, tag: c.basic_nack(tag, requeue=requeue), stored=stored)

    async def _end(
        self,
        delivery: Delivery,
        how: DispositionName,
        call: Callable[[RawChannel, int], Awaitable[None]],
        *,
        stored: bool,
    ) -> Settlement:
        if delivery.lost.is_set() or self.lost.is_set():
            return DeliveryLost(stored=stored)
        receipt = _receipt(delivery)
        if receipt.settled:
            return DeliveryLost(stored=stored)
        receipt.settled = True
        try:
            async with translated("settle", CALL_S):
                await call(self._raw(), receipt.delivery_tag)
        except (TransportLost, Refused) as exc:
            self.lose(str(exc))
            return DeliveryLost(stored=stored)
        return Settled(how=how)

    # ------------------------------------------------------------ the rest

    async def publish(
        self, body: bytes, *, message_id: str | None = None, headers: Mapping[str, object] | None = None
    ) -> None:
        """See `ports.Transport`."""
        self._alive()
        properties = Basic.Properties(
            message_id=message_id,
            content_type="application/json",
            delivery_mode=2,
            headers=dict(headers or {}),  # type: ignore[arg-type]  # The driver's own type for them.
        )
        try:
            await self._publisher.publish(
                body, properties, exchange="", routing_key=self._topology.queue, within_s=CALL_S
            )
        except Refused as exc:
            raise TransportLost(f"the broker did not take a message: {exc}") from exc

    async def backlog(self) -> Backlog:
        """See `ports.Transport`. AMQP shows what is ready, nothing else."""
        self._alive()
        try:
            declared = await self._on_own_channel(
                "count the backlog", lambda c: c.queue_declare(self._topology.queue, passive=True)
            )
        except Refused as exc:
            self.lose(f"the queue cannot be looked at: {exc}")
            raise TransportLost(self.lost_because) from exc
        except TransportLost as exc:
            self.lose(str(exc))
            raise
        return Backlog(ready=declared.message_count or 0)

    def _alive(self) -> None:
        if self.lost.is_set():
            raise TransportLost(self.lost_because)

    def _raw(self) -> RawChannel:
        assert self._channel is not None
        return self._channel

    @asynccontextmanager
    async def _session_call(self, what: str, within_s: float = CALL_S) -> AsyncGenerator[None, None]:
        """A call whose failure is the end of the session."""
        try:
            async with translated(what, within_s):
                yield
        except (TransportLost, Refused) as exc:
            self.lose(str(exc))
            raise TransportLost(self.lost_because) from exc


@dataclass(slots=True, eq=False)
class _Flow:
    """One consumer, from basic.consume to its cancel; a message that comes later goes back."""

    tag: str
    closed: bool = False


def _receipt(delivery: Delivery) -> _Receipt:
    assert isinstance(delivery.receipt, _Receipt)
    return delivery.receipt
