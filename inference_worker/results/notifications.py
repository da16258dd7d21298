"""Tells of results as they are stored: one subscription for all who wait, and a slow look behind it.

What is published is a hint and nothing else: whoever is told reads the result from the store. So a notification that
was lost only delays, until the next look, and an unfounded one costs a read. The same subscription hears of
cancellations, behind which there is no look: a worker finds out at its next renewal.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import structlog
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoPermissionError, RedisError

from inference_worker.errors import StoreUnavailable
from inference_worker.redis_scripts import ANSWER_S, Address, RedisCommands, RedisTls, connect, reason_of, url_from
from inference_worker.timing import ended, quietly, stopped_within

log = structlog.get_logger(__name__)

LOOK_S: Final = 2.0
"""How often all that are waited for are looked for, notified or not."""

LOOK_UNHEARD_S: Final = 0.5
"""The same while there is no subscription."""

PING_S: Final = 10.0
"""A subscription that says nothing for so long is asked whether it is alive."""

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0
AT_ONCE: Final = 256


class Notifications:
    """One connection in subscription mode, opened with the first who waits. `docs/redis.md` lists the commands."""

    def __init__(
        self,
        link: RedisCommands,
        url: Address,
        password: Callable[[], str | None],
        *,
        client_name: str,
        tls: RedisTls,
        look_s: float = LOOK_S,
        ping_s: float = PING_S,
    ) -> None:
        self._link = link
        self._url = url
        self._password = password
        self._client_name = client_name
        self._tls = tls
        self._look_s = look_s
        self._look_unheard_s = min(look_s, LOOK_UNHEARD_S)
        self._ping_s = ping_s
        self._waiting: dict[str, set[asyncio.Event]] = {}
        """By key, which is the channel's name too."""
        self._told: dict[str, set[Callable[[str], None]]] = {}
        """By channel: who is told of everything that is said there."""
        self._asked: deque[str] = deque()
        """Such channels whose subscription is asked for and not answered."""
        self._refused: set[str] = set()
        """Such channels that we may not hear."""
        self._connection: AbstractConnection | None = None
        self._changed = asyncio.Event()
        self._to_send: dict[str, None] = {}
        """Keys whose subscription is to be made or ended, in order."""
        self._subscribed: set[str] = set()
        self._closed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def open(self) -> AsyncGenerator["Notifications", None]:
        """A context that ends the subscription; opening it does not connect."""
        try:
            yield self
        finally:
            self._closed.set()
            for task in self._tasks:
                await ended(task)
            await self._drop()

    async def wait(self, key: str, within_s: float) -> bytes | None:
        """The value of `key` as soon as there is one; None where there is none after `within_s`.

        Raises:
            StoreUnavailable: it could not be read.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        with self._watched(key) as told:
            # The first look is for what was there before, the next follows the news that the subscription stands.
            while True:
                told.clear()
                stored = await self._link.do("GET", key)
                if isinstance(stored, bytes):
                    return stored
                left_s = until - loop.time()
                if left_s <= 0:
                    return None
                await stopped_within(told, left_s)

    @contextmanager
    def hearing(self, channel: str, told: Callable[[str], None]) -> Generator[None, None, None]:
        """Inside it `told` is called with what is said on a channel, as long as there is a connection."""
        listeners = self._told.setdefault(channel, set())
        listeners.add(told)
        self._wanted_changed(channel)
        self._begin()
        try:
            yield
        finally:
            listeners.discard(told)
            if not listeners:
                del self._told[channel]
                self._wanted_changed(channel)

    # ------------------------------------------------------------ who waits for what

    @contextmanager
    def _watched(self, key: str) -> Generator[asyncio.Event, None, None]:
        if self._closed.is_set():
            raise StoreUnavailable("the connection to Redis was closed by us")
        told = asyncio.Event()
        watchers = self._waiting.setdefault(key, set())
        watchers.add(told)
        if len(watchers) == 1:
            self._wanted_changed(key)
        self._begin()
        try:
            yield told
        finally:
            watchers.discard(told)
            if not watchers:
                del self._waiting[key]
                self._wanted_changed(key)

    def _begin(self) -> None:
        if not self._tasks and not self._closed.is_set():
            self._tasks = [
                asyncio.create_task(self._listen_for_ever(), name="redis notifications"),
                asyncio.create_task(self._look_for_ever(), name="redis look"),
            ]

    def _wanted_changed(self, key: str) -> None:
        self._to_send[key] = None
        self._changed.set()

    def _tell(self, key: str) -> None:
        for told in self._waiting.get(key, ()):
            told.set()

    # ------------------------------------------------------------ the subscription

    async def _listen_for_ever(self) -> None:
        pause_s, said = FIRST_PAUSE_S, ""
        while not self._closed.is_set():
            try:
                async with asyncio.timeout(ANSWER_S):
                    self._connection = await connect(
                        await url_from(self._url),
                        self._password(),
                        client_name=self._client_name,
                        tls=self._tls,
                        within_s=ANSWER_S,
                        # In RESP2 what comes is an answer like any other.
                        resp=2,
                    )
                self._subscribed.clear()
                self._asked.clear()
                self._to_send = dict.fromkeys([*self._told, *self._waiting])
                self._changed.set()
                pause_s = FIRST_PAUSE_S
                await self._listen(self._connection)
            except (RedisError, OSError, TimeoutError, ValueError) as exc:
                if (why := reason_of(exc)) != said:
                    said = why
                    log.warning("results are not announced to us for now; they are looked for", reason=why)
            finally:
                self._subscribed.clear()
                await self._drop()
            await stopped_within(self._closed, pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _listen(self, connection: AbstractConnection) -> None:
        sending = asyncio.create_task(self._send_for_ever(connection), name="redis subscriber")
        try:
            while True:
                # No limit in the driver, which would go through wait_for; a dead peer fails the ping.
                answer = asyncio.create_task(connection.read_response(timeout=math.inf))
                try:
                    await asyncio.wait([answer, sending], return_when=asyncio.FIRST_COMPLETED, timeout=2 * self._ping_s)
                    if sending.done():
                        sending.result()
                    if not answer.done():
                        raise TimeoutError
                    self._heard(answer.exception() or answer.result())
                finally:
                    if not answer.done():
                        await ended(answer)
        finally:
            await ended(sending)

    async def _send_for_ever(self, connection: AbstractConnection) -> None:
        while True:
            await stopped_within(self._changed, self._ping_s)
            self._changed.clear()
            keys, self._to_send = list(self._to_send), {}
            commands: list[tuple[str, ...]] = []
            for start in range(0, len(keys), AT_ONCE):
                some = keys[start : start + AT_ONCE]
                # In a command of their own: where a user may not hear one, the whole command is refused.
                heard = [key for key in some if key in self._told and key not in self._subscribed | self._refused]
                wanted = [key for key in some if key in self._waiting and key not in self._subscribed]
                kept = self._waiting.keys() | self._told.keys()
                unwanted = [key for key in some if key not in kept and key in self._subscribed]
                self._asked.extend(heard)
                self._subscribed.update(heard, wanted)
                commands.extend(("SUBSCRIBE", channel) for channel in heard)
                self._subscribed.difference_update(unwanted)
                if wanted:
                    commands.append(("SUBSCRIBE", *wanted))
                if unwanted:
                    commands.append(("UNSUBSCRIBE", *unwanted))
            if not commands:
                commands.append(("PING",))
            async with asyncio.timeout(ANSWER_S):
                await connection.send_packed_command(connection.pack_commands(commands), check_health=False)

    def _heard(self, answer: Any) -> None:
        if isinstance(answer, NoPermissionError) and self._asked:  # Answers come in the order of the questions.
            channel = self._asked.popleft()
            self._refused.add(channel)
            self._subscribed.discard(channel)
            log.warning("this user may not hear a channel: it goes without", channel=channel, mend="docs/redis.md")
            return
        if isinstance(answer, Exception):
            raise answer
        if not isinstance(answer, list) or len(answer) != 3 or answer[0] not in (b"subscribe", b"message"):
            return
        kind, channel, said = answer
        name = bytes(channel).decode(errors="replace")
        if kind == b"message":
            for told in tuple(self._told.get(name, ())):
                told(bytes(said).decode(errors="replace"))
        elif self._asked and self._asked[0] == name:
            self._asked.popleft()
        self._tell(name)

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await quietly(connection.disconnect(nowait=True), 1.0, RedisError, OSError)

    # ------------------------------------------------------------ the look behind it

    async def _look_for_ever(self) -> None:
        while not await stopped_within(self._closed, self._look_s if self._subscribed else self._look_unheard_s):
            keys = list(self._waiting)
            for start in range(0, len(keys), AT_ONCE):
                try:
                    await self._look(keys[start : start + AT_ONCE])
                except StoreUnavailable:
                    break  # Those who wait find out by themselves once they are told, or when their time is over.

    async def _look(self, keys: Sequence[str]) -> None:
        """Which of these are there; one command a key, since on a Cluster keys of several slots share none."""
        async with asyncio.TaskGroup() as group:
            for key in keys:
                group.create_task(self._look_at(key))

    async def _look_at(self, key: str) -> None:
        try:
            if await self._link.do("EXISTS", key):
                self._tell(key)
        except StoreUnavailable:
            return
