"""How much work waits and runs in a queue of RabbitMQ, for who consumes nothing from it: scaler and HTTP intake.

AMQP tells what is ready, at this moment, and nothing else. What workers hold, and retries that wait for their time,
only the management API tells, and of a quorum queue up to five seconds late; so both are asked where both are there.
That API being away blinds nobody: `Backlog.how` says which way it was counted.
"""

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import httpx
import msgspec
import structlog

from inference_worker.config.settings import Settings
from inference_worker.errors import TransportLost
from inference_worker.ports import Backlog
from inference_worker.rmq_connection import CALL_S, Connection, Refused, on_own_channel, opened

log = structlog.get_logger(__name__)

MANAGEMENT_S: Final = 5.0
MOST_DELAY_QUEUES: Final = 500
"""The most that the management API puts on one page."""

NOT_SEEN: Final = frozenset({"down", "minority", "stopped", "crashed", "terminated"})
"""States in which AMQP counts a queue as empty, because nobody can be asked."""


class RabbitMQBacklog:
    """Counts one queue, over a connection of its own that is kept open and comes back."""

    def __init__(
        self,
        url: Callable[[], str],
        queue: str,
        *,
        name: str,
        management_url: Callable[[], str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`management_url` may have a user and a password of its own; else it is asked with those of `url`."""
        self._url = url
        self._queue = queue
        self._name = name
        self._management_url = management_url
        self._tls = tls
        self._http: httpx.AsyncClient | None = None
        self._stack = AsyncExitStack()
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self._said = ""

    @asynccontextmanager
    async def open(self) -> AsyncGenerator["RabbitMQBacklog", None]:
        """A context that closes the connections; opening it does not connect."""
        verify = self._tls if self._tls is not None else True
        async with httpx.AsyncClient(trust_env=False, verify=verify, timeout=MANAGEMENT_S) as self._http:
            try:
                yield self
            finally:
                await self._close()

    async def backlog(self) -> Backlog:
        """Count.

        Raises:
            TransportLost: it cannot be counted, or there is no such queue.
        """
        ready = await self._ready()
        if self._management_url is None:
            return Backlog(ready=ready, how="amqp")
        try:
            seen = await self._managed(self._management_url())
        except _NotManaged as exc:
            self._say(str(exc))
            return Backlog(ready=ready, how="amqp")
        self._say("")
        return Backlog(ready=ready, in_flight=seen.in_flight, delayed=seen.delayed, how="management")

    # ------------------------------------------------------------ AMQP

    async def _ready(self) -> int:
        connection = await self._connected()
        try:
            declared = await on_own_channel(
                connection, "count the backlog", lambda channel: channel.queue_declare(self._queue, passive=True)
            )
        except Refused as exc:  # The connection is as good as before.
            raise TransportLost(f"the queue cannot be looked at: {exc}") from exc
        except BaseException:
            self._connection = None
            raise
        return int(declared.message_count or 0)

    async def _connected(self) -> Connection:
        async with self._opening:
            if self._connection is None or self._connection.is_closed:
                await self._close()
                self._connection = await self._stack.enter_async_context(
                    opened(self._url(), name=self._name, tls=self._tls, within_s=CALL_S)
                )
            return self._connection

    async def _close(self) -> None:
        stack, self._stack, self._connection = self._stack, AsyncExitStack(), None
        await stack.aclose()

    # ------------------------------------------------------------ the management API

    async def _managed(self, base_url: str) -> "_Seen":
        assert self._http is not None, "use it inside open()"
        amqp, given = urlsplit(self._url()), urlsplit(base_url)
        asked_as = given if given.username is not None else amqp
        bare = urlunsplit(given._replace(netloc=given.netloc.rpartition("@")[2]))
        vhost = quote(unquote(amqp.path[1:]) or "/", safe="")
        # The page of one queue has its counts only from 4.0 on, or late; this one has them everywhere, without having
        # the broker add up its statistics.
        asking = {
            "disable_stats": "true",
            "enable_queue_totals": "true",
            "page": "1",
            "page_size": str(MOST_DELAY_QUEUES),
            "use_regex": "true",
            "name": rf"^{re.escape(self._queue)}(\.delay\.[0-9]+)?$",
        }
        user, password = unquote(asked_as.username or "guest"), unquote(asked_as.password or "")
        try:
            async with asyncio.timeout(MANAGEMENT_S):
                answer = await self._http.get(f"{bare}/api/queues/{vhost}", params=asking, auth=(user, password))
        except (httpx.HTTPError, TimeoutError, OSError) as exc:
            raise _NotManaged(f"no answer: {type(exc).__name__}") from exc
        if answer.status_code != httpx.codes.OK:
            raise _NotManaged(f"it says {answer.status_code}")
        return read_page(answer.content, self._queue)

    def _say(self, why: str) -> None:
        if why and why != self._said:
            log.warning("the management API does not tell what workers hold", reason=why)
        self._said = why


def backlog_of(settings: Settings) -> RabbitMQBacklog:
    """The request queue's, as the settings name it."""
    rabbitmq, identity = settings.rabbitmq, settings.identity
    return RabbitMQBacklog(
        rabbitmq.url_now,
        identity.request_queue,
        name=f"{identity.deployment_id}/{identity.replica_id}/backlog",
        management_url=None if rabbitmq.management_url is None else rabbitmq.management_url.now,
        tls=settings.tls.context(),
    )


class _NotManaged(Exception):
    """The management API does not say; AMQP may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    in_flight: int
    delayed: int


class _Queue(msgspec.Struct):
    """A queue as the management API shows it; a count is missing while nobody knows it."""

    name: str
    messages: int | None = None
    messages_unacknowledged: int | None = None
    state: str = ""


class _Page(msgspec.Struct):
    items: list[_Queue]


def read_page(page: bytes, queue: str) -> _Seen:
    """What a page of `/api/queues/<vhost>` says of a queue and of the delay queues beside it.

    Raises:
        TransportLost: the queue is there, and nobody can be asked what is in it.
        _NotManaged: the page says nothing of it.
    """
    try:
        items = msgspec.json.decode(page, type=_Page).items
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise _NotManaged("its page is not understood") from exc
    main = next((item for item in items if item.name == queue), None)
    if main is not None and main.state in NOT_SEEN:
        raise TransportLost(f"the queue is there, and cannot be counted: its state is {main.state}")
    if main is None or main.messages_unacknowledged is None:
        raise _NotManaged("it knows no counts of the queue")
    return _Seen(in_flight=main.messages_unacknowledged, delayed=_messages(item for item in items if item is not main))


def _messages(queues: Iterable[_Queue]) -> int:
    return sum(queue.messages or 0 for queue in queues)
