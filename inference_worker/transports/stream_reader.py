"""The connection that waits in XREADGROUP, and does nothing else: all other commands would wait with it.

Its answers are waited for by a time limit of their own, longer than BLOCK, whatever the driver's is.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError

from inference_worker.errors import TransportLost
from inference_worker.redis_scripts import Argument, RedisTls, connect, reason_of
from inference_worker.timing import quietly
from inference_worker.transports.stream_entries import Entry, StreamNames, of_stream, parsed

CONNECT_S: Final = 10.0
ANSWER_S: Final = 5.0
"""How long Redis may take beyond BLOCK."""


class GroupGone:
    """The group or the whole stream is not there any more: FLUSHALL, DEL, XGROUP DESTROY."""


class BlockingReader:
    """Reads new entries in the name of one consumer."""

    def __init__(self, connection: AbstractConnection, names: StreamNames, consumer: str) -> None:
        self._connection = connection
        self._names = names
        self._consumer = consumer
        self.client_id: int | None = None
        """What CLIENT UNBLOCK knows it by; None where the user may not ask."""
        self.blocked = False
        """Whether it waits for an answer now."""

    async def read(self, count: int, block_s: float) -> list[Entry] | GroupGone:
        """Up to `count` entries that nobody was given before; none after `block_s` seconds, or once it is unblocked.

        Raises: TransportLost.
        """
        block_ms = max(round(block_s * 1000), 1)  # 0 would be for ever.
        self.blocked = True
        try:
            rows = of_stream(
                await self._ask(
                    *("XREADGROUP", "GROUP", self._names.group, self._consumer, "COUNT", count, "BLOCK", block_ms),
                    *("STREAMS", self._names.stream, ">"),
                    within_s=block_s + ANSWER_S,
                )
            )
        except ResponseError as exc:
            if str(exc).startswith(("NOGROUP", "UNBLOCKED")):
                return GroupGone()
            raise TransportLost(reason_of(exc)) from exc
        finally:
            self.blocked = False
        return parsed(rows)

    async def ping(self) -> None:
        """See whether the connection is alive. Raises: TransportLost."""
        with suppress(ResponseError):  # Not allowed: an answer all the same.
            await self._ask("PING", within_s=ANSWER_S)

    async def ask_for_id(self) -> None:
        """Learn the connection's number, where that is allowed."""
        with suppress(ResponseError):
            self.client_id = int(await self._ask("CLIENT", "ID", within_s=ANSWER_S))

    async def _ask(self, *words: Argument, within_s: float) -> Any:
        try:
            async with asyncio.timeout(within_s):
                packed = self._connection.pack_commands([words])
                await self._connection.send_packed_command(packed, check_health=False)
                return await self._connection.read_response(disconnect_on_error=False)
        except ResponseError:
            raise
        except (RedisError, OSError, TimeoutError, ValueError) as exc:
            raise TransportLost(f"the connection to Redis is gone: {reason_of(exc)}") from exc


@asynccontextmanager
async def reading(
    url: Callable[[], str], names: StreamNames, consumer: str, *, client_name: str, tls: RedisTls
) -> AsyncGenerator[BlockingReader, None]:
    """An open reader; closed at the end for sure.

    Raises: TransportLost: no connection could be had.
    """
    try:
        async with asyncio.timeout(CONNECT_S):
            connection = await connect(url(), None, client_name=client_name, tls=tls, within_s=CONNECT_S)
    except (RedisError, OSError, TimeoutError, ValueError) as exc:
        raise TransportLost(reason_of(exc)) from exc
    try:
        reader = BlockingReader(connection, names, consumer)
        await reader.ask_for_id()
        yield reader
    finally:
        await quietly(connection.disconnect(nowait=True), 1.0, RedisError, OSError)
