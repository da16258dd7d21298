"""What everything that speaks AMQP shares: plain connections with a name, errors of ours, confirmed publishes.

Not here: queues and what they mean (`rmq_listener`, `rmq_producer`, `rmq_dead_letters`).
"""

import asyncio
import socket
import ssl
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Final

import aio_pika
from aio_pika.exceptions import ChannelNotFoundEntity, ChannelPreconditionFailed, DeliveryError, PublishError
from aiormq.abc import AbstractChannel as RawChannel
from aiormq.connection import TCPTransportFactory, TLSTransportFactory, TransportFactory
from aiormq.exceptions import (
    ChannelAccessRefused,
    ChannelLockedResource,
    InvalidFrameError,
    ProbableAuthenticationError,
)
from pamqp.commands import Basic
from yarl import URL

from inference_worker import rmq_values
from inference_worker.errors import TransportLost

rmq_values.install()

CONNECT_S: Final = 15.0
CALL_S: Final = 10.0
"""How long the broker may take to answer one call."""

CLOSE_S: Final = 1.0
BROKER_HEADERS: Final = frozenset({"CC", "BCC", "x-death", "x-delivery-count", "x-acquired-count"})
BROKER_HEADER_PREFIXES: Final = ("x-first-death-", "x-last-death-")


@asynccontextmanager
async def opened(
    url: str, *, name: str, tls: ssl.SSLContext | None, within_s: float = CONNECT_S
) -> AsyncGenerator["Connection", None]:
    """A plain connection with its name; closed for sure, also when the broker has stopped answering.

    Raises:
        TransportLost: no connection could be had.
    """
    async with translated("connect", within_s):
        connection = await aio_pika.connect(
            URL(url, encoded=True),  # It names its heartbeat; an argument of that name would go above it.
            ssl_context=tls,
            client_properties={"connection_name": name},
            connection_class=Connection,
        )
    assert isinstance(connection, Connection)
    try:
        yield connection
    finally:
        await _close(connection)


class Connection(aio_pika.Connection):
    """A plain connection that keeps hold of its sockets, so that one with a silent peer can be torn down."""

    def __init__(self, url: URL, **options: Any) -> None:
        super().__init__(url, **options)
        self.sockets = _Sockets()
        self.kwargs["transport_factory"] = self.sockets


class _Sockets(TransportFactory):
    """Opens the driver's sockets, with TCP keepalive on."""

    def __init__(self) -> None:
        self._writers: list[asyncio.StreamWriter] = []

    async def create(self, url: URL, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        factory = TLSTransportFactory() if url.scheme == "amqps" else TCPTransportFactory()
        reader, writer = await factory.create(url, **options)
        if (sock := writer.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._writers.append(writer)
        return reader, writer

    def abort(self) -> None:
        """Close the sockets at once, whatever is still to be written."""
        for writer in self._writers:
            writer.transport.abort()


async def _close(connection: Connection) -> None:
    """Close a connection; one whose peer has stopped answering is torn down."""
    closing = asyncio.ensure_future(connection.close())
    try:
        await asyncio.wait([closing], timeout=CLOSE_S)
    finally:
        connection.sockets.abort()
    await asyncio.wait([closing], timeout=CLOSE_S)
    if not closing.done():
        closing.cancel()
    elif not closing.cancelled():
        closing.exception()


class Refused(Exception):
    """The broker answered, and the answer is no."""


class TooLarge(Refused):
    """The broker takes no message of this size."""


class Unroutable(Refused):
    """No queue took the message, or the exchange is not there."""


class translated:
    """Gives a call its time limit, and turns whatever the driver raises into errors of ours: the one place for it.

    Written as a class, since it stands on the way of every message.
    """

    __slots__ = ("_limit", "_what", "_within_s")

    def __init__(self, what: str, within_s: float) -> None:
        self._what = what
        self._within_s = within_s
        self._limit = asyncio.timeout(within_s)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._limit.__aexit__(kind, exc, trace)
        except TimeoutError:
            raise TransportLost(f"{self._what}: no answer within {self._within_s:g} s") from exc
        if exc is None or isinstance(exc, TransportLost | Refused | Unroutable):
            return
        if isinstance(exc, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling() > 0:
                return
            # Nobody cancelled us: so the driver tells of the end of a connection whose heartbeats went unanswered.
            raise TransportLost(f"{self._what}: the connection is gone") from exc
        if isinstance(exc, Exception):
            raise _translation(self._what, exc) from exc


def _translation(what: str, exc: Exception) -> Exception:
    match exc:
        case ProbableAuthenticationError():
            return TransportLost(f"{what}: the broker refused the credentials")
        case InvalidFrameError() if "Connection.OpenOk" in str(exc):
            # The driver keeps nothing of the broker's own words, and names an object by its address: new each time.
            return TransportLost(f"{what}: the broker does not open the vhost: it is not there, or not for this user")
        case PublishError():
            return Unroutable(f"{what}: no queue took it")
        case DeliveryError():
            return Refused(f"{what}: the broker rejected it")
        case ChannelPreconditionFailed() if "larger than" in str(exc):
            return TooLarge(f"{what}: {reason_text(exc)}")
        case ChannelNotFoundEntity() if "no exchange" in str(exc):
            return Unroutable(f"{what}: {reason_text(exc)}")
        case ChannelPreconditionFailed() | ChannelNotFoundEntity() | ChannelAccessRefused() | ChannelLockedResource():
            return Refused(f"{what}: {reason_text(exc)}")
        case _:
            # Also what is no error of the driver's: it rejects pending calls with whatever closed the connection.
            return TransportLost(f"{what}: {reason_text(exc)}")


class Publisher:
    """Publishes with confirms over its own connection, opened when needed and dropped after every doubt."""

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[Connection]]) -> None:
        self._connect = connect
        self._opening = asyncio.Lock()
        self._stack: AsyncExitStack | None = None
        self._channel: RawChannel | None = None
        self._under_way: dict[str, asyncio.Event] = {}
        """By message id: the driver tells returned messages apart by nothing else."""

    async def publish(
        self,
        body: bytes,
        properties: Basic.Properties,
        *,
        exchange: str,
        routing_key: str,
        within_s: float,
        mandatory: bool = True,
    ) -> None:
        """Publish once, and return when the broker has confirmed. Not `mandatory`, it also confirms what it drops.

        Raises:
            Unroutable: it came back.
            TooLarge: the broker never takes a message of this size.
            Refused: the broker would not have it.
            TransportLost: it may have been published, or not.
        """
        async with translated("publish", within_s):
            message_id = properties.message_id or uuid.uuid4().hex
            while (other := self._under_way.get(message_id)) is not None:
                await other.wait()
            over = self._under_way[message_id] = asyncio.Event()
            channel: RawChannel | None = None
            try:
                channel = await self.open()
                await channel.basic_publish(
                    body, exchange=exchange, routing_key=routing_key, properties=properties, mandatory=mandatory
                )
            except (PublishError, DeliveryError):
                raise  # An answer: the channel is as good as before.
            except BaseException:
                self._forsake(channel)
                raise
            finally:
                del self._under_way[message_id]
                over.set()

    async def close(self) -> None:
        """Close the connection, if there is one."""
        stack, self._stack, self._channel = self._stack, None, None
        if stack is not None:
            await stack.aclose()

    @property
    def usable(self) -> bool:
        """Whether a channel is open, as far as one can see."""
        return self._channel is not None and not self._channel.is_closed

    async def open(self) -> RawChannel:
        """The channel, opened anew where there is none that can be used.

        Raises: whatever the driver or the connection does.
        """
        async with self._opening:
            if self._channel is not None and not self._channel.is_closed:
                return self._channel
            await self.close()
            async with AsyncExitStack() as stack:
                connection = await stack.enter_async_context(self._connect())
                channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
                self._channel = await channel.get_underlay_channel()
                self._stack = stack.pop_all()
            return self._channel

    def _forsake(self, channel: RawChannel | None) -> None:
        """Have the next publish open a new channel: on this one a late confirm could be taken for a later message's.

        Unless that has been done: one that fails late must not take the new channel from the others.
        """
        if self._channel is channel:
            self._channel = None


async def on_own_channel(
    connection: Connection, what: str, call: Callable[[RawChannel], Awaitable[Any]], *, within_s: float = CALL_S
) -> Any:
    """Make a call on a channel of its own: the broker closes the channel of a call that it refuses.

    Raises:
        Refused, TransportLost
    """
    async with translated(what, within_s), connection.channel(publisher_confirms=False) as channel:
        return await call(await channel.get_underlay_channel())


def copied(properties: Basic.Properties) -> Basic.Properties:
    """A copy's properties: all that were set, less what the broker wrote or would act on again."""
    kept = Basic.Properties(
        **{name: getattr(properties, name) for name in Basic.Properties.attributes() if name != "user_id"}
    )
    if kept.headers is not None:
        kept.headers = {
            name: value
            for name, value in kept.headers.items()
            if name not in BROKER_HEADERS and not name.startswith(BROKER_HEADER_PREFIXES)
        }
    return kept


def reason_text(exc: BaseException | None) -> str:
    """An error's text, short enough for a log; the driver's errors carry no credentials."""
    if exc is None:
        return "no reason given"
    said = " ".join(str(part) for part in exc.args if part is not None) or type(exc).__name__
    return said[:300]
