"""Tells those who wait for results that one lies in their list: by one blocking command for all of them.

The command takes the next result and puts it back to the same place, so that it is harmless whoever hears of it, or
nobody. Taking a result is not here: whoever is told takes it by himself, and may find that another was faster.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import structlog
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from inference_worker.redis_scripts import ANSWER_S, RedisLink, reason_of
from inference_worker.timing import ended, quietly, stopped_within

log = structlog.get_logger(__name__)

BLOCK_S: Final = 10.0
"""How long one command blocks: a connection that is dead without saying so is found out a little later."""

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 2.0
"""Between two tries without a connection; those who wait look for themselves after each."""


class Arrivals:
    """One list, and a connection that is there from the first who waits. `BLMOVE` needs Redis 6.2."""

    def __init__(self, link: RedisLink, results: str) -> None:
        self._link = link
        self._results = results
        self._waiting: set[asyncio.Event] = set()
        self._listening: asyncio.Task[None] | None = None
        self._connection: AbstractConnection | None = None
        self._pause_s = FIRST_PAUSE_S

    @asynccontextmanager
    async def open(self) -> AsyncGenerator["Arrivals", None]:
        """A context that ends the connection; opening it does not connect."""
        try:
            yield self
        finally:
            if self._listening is not None:
                await ended(self._listening)
            await self._drop()

    async def wait(self, within_s: float) -> None:
        """Return once a result lies there or `within_s` has passed. To be called after a look that found none.

        May return for nothing.
        """
        told = asyncio.Event()
        self._waiting.add(told)
        if self._listening is None or self._listening.done():
            self._listening = asyncio.create_task(self._listen(), name="results arriving")
        try:
            await stopped_within(told, within_s)
        finally:
            self._waiting.discard(told)

    async def _listen(self) -> None:
        """As long as somebody waits. It does not spin: who was told and finds nothing waits anew, and so does it."""
        while self._waiting:
            if await self._has_one():
                for told in self._waiting:
                    told.set()
                self._waiting.clear()

    async def _has_one(self) -> bool:
        """Block until there is one, for a while; where that cannot be asked, a pause and True: look for yourselves."""
        try:
            connection = self._connection
            if connection is None:
                connection = self._connection = await self._link.another()
            command = ("BLMOVE", self._results, self._results, "RIGHT", "RIGHT", BLOCK_S)
            async with asyncio.timeout(BLOCK_S + ANSWER_S):
                await connection.send_packed_command(connection.pack_commands([command]), check_health=False)
                there = await connection.read_response(disconnect_on_error=False) is not None
        except (RedisError, OSError, TimeoutError, ValueError) as exc:
            if self._pause_s == FIRST_PAUSE_S:
                log.warning("results are not announced for now; they are looked for", reason=reason_of(exc))
            await self._drop()
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
            return True
        self._pause_s = FIRST_PAUSE_S
        return there

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await quietly(connection.disconnect(nowait=True), 1.0, RedisError, OSError)
