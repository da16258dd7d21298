"""A connection on which Redis says that a key has changed, in milliseconds, and that does nothing else.

It is what client-side caching is made of (CLIENT TRACKING, Redis 6): who has read a key is told once when it changes,
whoever changes it and by whatever command. Nothing in the server's configuration is needed for it, or altered by it;
and a key that nobody waits for costs nothing, however often it changes.

What is said is a hint: whoever is told looks. Where a server or a proxy before it does not offer it, `hears` is false,
and the connection only tells whether Redis is there.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import structlog
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError

from inference_worker.errors import TransportLost
from inference_worker.redis_scripts import Address, Argument, RedisTls, connect, reason_of, url_from
from inference_worker.timing import ended, quietly

log = structlog.get_logger(__name__)

CONNECT_S: Final = 10.0
ANSWER_S: Final = 5.0


class KeyWatch:
    """Is told of changes from the moment that a key was read by it."""

    def __init__(self, connection: AbstractConnection, changed: asyncio.Event | None = None) -> None:
        self._connection = connection
        self._asked: deque[asyncio.Future[Any]] = deque()
        self._gone: TransportLost | None = None
        self.changed = changed or asyncio.Event()
        """Set when something has changed; who looks clears it first."""
        self.hears = False

    async def ask(self, *words: Argument) -> Any:
        """Send a command and wait for its answer.

        Raises: TransportLost; ResponseError: the command was refused.
        """
        if self._gone is not None:
            raise self._gone
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        try:
            async with asyncio.timeout(ANSWER_S):
                packed = self._connection.pack_commands([words])
                await self._connection.send_packed_command(packed, check_health=False)
                said = await answer
        except (RedisError, OSError, TimeoutError) as exc:
            raise TransportLost(f"the connection to Redis is gone: {reason_of(exc)}") from exc
        if isinstance(said, BaseException):
            raise said
        return said

    async def ping(self) -> None:
        """See whether the connection is alive. Raises: TransportLost."""
        try:
            await self.ask("PING")
        except ResponseError:
            return  # Not allowed: an answer all the same.

    async def count(self, sorted_set: str) -> int:
        """How many members a sorted set has, and be told once that changes. Raises: TransportLost."""
        try:
            return int(await self.ask("ZCARD", sorted_set))
        except ResponseError as exc:
            raise TransportLost(reason_of(exc)) from exc

    async def track(self, *options: str) -> None:
        """Be told from now on, if the server does that."""
        try:
            await self.ask("CLIENT", "TRACKING", "ON", *options)
        except ResponseError:
            return
        self.hears = True

    async def listen(self) -> TransportLost:
        """Hear what is said, until the connection is gone; then why."""
        try:
            while True:
                self._heard(await self._next())
        except (RedisError, OSError, ValueError) as exc:
            self._gone = TransportLost(f"the connection to Redis is gone: {reason_of(exc)}")
        for answer in self._asked:
            if not answer.done():
                answer.set_result(self._gone)
        return self._gone

    async def _next(self) -> Any:
        try:
            # No limit in the driver, which would go through wait_for; a dead peer fails the ping.
            return await self._connection.read_response(timeout=math.inf, disconnect_on_error=False, push_request=True)
        except ResponseError as exc:
            return exc

    def _heard(self, said: Any) -> None:
        # What the server pushes comes as nothing here; no command of ours is answered so.
        if said is None or isinstance(said, list):
            self.changed.set()
        elif self._asked:
            answer = self._asked.popleft()
            if not answer.done():
                answer.set_result(said)


class KeyWatches:
    """Several of them as one: each server tells only of its own keys."""

    def __init__(self, changed: asyncio.Event, watches: Sequence[KeyWatch]) -> None:
        self.changed = changed
        self._watches = watches

    async def ping(self) -> None:
        """See whether all connections are alive. Raises: TransportLost."""
        await asyncio.gather(*(watch.ping() for watch in self._watches))


@asynccontextmanager
async def watching(
    url: Address,
    *options: str,
    client_name: str,
    tls: RedisTls,
    lost: Callable[[TransportLost], None],
    changed: asyncio.Event | None = None,
) -> AsyncGenerator[KeyWatch, None]:
    """An open watch; `lost` is called where its connection goes. `options` are those of CLIENT TRACKING.

    Raises: TransportLost: no connection could be had.
    """
    try:
        async with asyncio.timeout(CONNECT_S):
            # What is pushed comes between answers, which only RESP3 knows.
            server = await url_from(url)
            connection = await connect(server, None, client_name=client_name, tls=tls, within_s=CONNECT_S, resp=3)
    except (RedisError, OSError, TimeoutError, ValueError) as exc:
        raise TransportLost(reason_of(exc)) from exc
    watch = KeyWatch(connection, changed)

    async def hear() -> None:
        lost(await watch.listen())

    hearing = asyncio.create_task(hear(), name="key watch")
    try:
        await watch.track(*options)
        yield watch
    finally:
        await ended(hearing)
        await quietly(connection.disconnect(nowait=True), 1.0, RedisError, OSError)


@asynccontextmanager
async def watching_all(
    urls: Sequence[Address], *options: str, client_name: str, tls: RedisTls, lost: Callable[[TransportLost], None]
) -> AsyncGenerator[KeyWatches, None]:
    """A watch on each of these servers, as `watching`. One that cannot be reached is left out."""
    changed = asyncio.Event()
    watches: list[KeyWatch] = []
    async with AsyncExitStack() as opened:
        for url in urls:
            watch = watching(url, *options, client_name=client_name, tls=tls, lost=lost, changed=changed)
            try:
                watches.append(await opened.enter_async_context(watch))
            except TransportLost as exc:
                log.warning("a server does not tell of changes: what changes there is seen later", reason=str(exc))
        yield KeyWatches(changed, watches)
