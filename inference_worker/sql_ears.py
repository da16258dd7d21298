"""One connection that hears what Postgres tells (LISTEN), for all of a process.

What is said is a hint: whoever hears it looks for himself. While nobody can be heard, those who asked to be told of it
know; it is tried again for ever.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

import asyncpg
import structlog

from inference_worker.errors import StoreUnavailable
from inference_worker.sql_link import ANSWER_S, FAILURES, SqlLink, closed, reason_of
from inference_worker.timing import ended, first_of

log = structlog.get_logger(__name__)

PING_S: Final = 10.0
"""A connection that says nothing for so long is asked whether it is alive."""

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0

Told = Callable[[str], None]
Gone = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Ear:
    channel: str
    told: Told
    gone: Gone | None


class SqlEars:
    """Channels, and who is told of what is said there."""

    def __init__(self, link: SqlLink, *, answer_s: float = ANSWER_S, ping_s: float = PING_S) -> None:
        self._link = link
        self._answer_s = answer_s
        self._ping_s = ping_s
        self._ears: dict[str, dict[_Ear, None]] = {}
        self._heard: set[str] = set()
        """Channels that the connection there is now listens to."""
        self._changed = asyncio.Event()
        """Set where the channels are others, and to have a pause between two tries end."""
        self._news = asyncio.Event()
        """Set where `_heard` or `_why` has changed."""
        self._failures = 0
        self._why = ""
        self._task: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()
        self._over = asyncio.Event()
        """The connection there is now is gone."""

    @asynccontextmanager
    async def open(self) -> AsyncGenerator["SqlEars", None]:
        """A context that ends the connection; opening it does not connect."""
        try:
            yield self
        finally:
            self._closed.set()
            if self._task is not None:
                await ended(self._task)

    @contextmanager
    def hearing(self, channel: str, told: Told, gone: Gone | None = None) -> Generator[None, None, None]:
        """Inside it `told` is called with what is said on a channel, and `gone` where that ends, with the reason."""
        ear = _Ear(channel, told, gone)
        self._ears.setdefault(channel, {})[ear] = None
        self._changed.set()
        if self._task is None and not self._closed.is_set():
            self._task = asyncio.create_task(self._listen_for_ever(), name="postgres notifications")
        try:
            yield
        finally:
            del self._ears[channel][ear]
            if not self._ears[channel]:
                del self._ears[channel]
                self._changed.set()

    async def stands(self, channel: str) -> None:
        """Return once what is said on a channel that somebody hears is heard.

        Raises:
            StoreUnavailable: it cannot be had.
        """
        failures, until = self._failures, asyncio.get_running_loop().time() + 2 * self._answer_s
        self._changed.set()
        while channel not in self._heard:
            left_s = until - asyncio.get_running_loop().time()
            if self._failures != failures or left_s <= 0 or self._closed.is_set():
                raise StoreUnavailable(self._why or "Postgres cannot be listened to")
            self._news.clear()
            await first_of(self._news, self._closed, within_s=left_s)

    async def _listen_for_ever(self) -> None:
        pause_s, said = FIRST_PAUSE_S, ""
        while not self._closed.is_set():
            try:
                await self._listen()
            except StoreUnavailable as exc:
                why = str(exc)
            except (asyncpg.PostgresError, *FAILURES) as exc:
                why = reason_of(exc)
            except Exception as exc:  # A fault of ours must not leave everybody deaf.
                log.exception("listening to Postgres failed")
                why = f"listening failed: {type(exc).__name__}"
            else:
                why = "the connection to Postgres has ended"
            if self._heard:
                pause_s = FIRST_PAUSE_S
            self._lost(why)
            if why != said:
                said = why
                log.warning("Postgres cannot be listened to for now", reason=why)
            self._changed.clear()
            await first_of(self._closed, self._changed, within_s=pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _lost(self, why: str) -> None:
        self._heard.clear()
        self._failures += 1
        self._why = why
        self._news.set()
        for ears in tuple(self._ears.values()):
            for ear in tuple(ears):
                if ear.gone is not None:
                    ear.gone(why)

    async def _listen(self) -> None:
        """One connection, until it is gone."""
        connection = await self._link.another()
        try:
            self._over = over = asyncio.Event()
            connection.add_termination_listener(lambda _: over.set())
            while not over.is_set():
                self._changed.clear()
                async with asyncio.timeout(self._answer_s):
                    await self._follow(connection)
                await first_of(over, self._changed, within_s=self._ping_s)
                if not over.is_set() and not self._changed.is_set():
                    async with asyncio.timeout(self._answer_s):
                        await connection.execute("select 1")
        finally:
            await closed(connection)

    async def _follow(self, connection: asyncpg.Connection) -> None:
        """Listen to the channels that somebody hears, and to no others."""
        for channel in self._ears.keys() - self._heard:
            await connection.add_listener(channel, self._hear)
            self._heard.add(channel)
            self._news.set()
        for channel in self._heard - self._ears.keys():
            self._heard.discard(channel)
            await connection.remove_listener(channel, self._hear)

    def _hear(self, _connection: object, _pid: int, channel: str, said: object) -> None:
        for ear in tuple(self._ears.get(channel, ())):
            ear.told(str(said))
