"""The connections to one Postgres: a few for statements, shared by all who ask, and new ones for who has to listen.

Every statement is a transaction of its own and has a deadline, here and in the server. One whose answer was lost may
have been done: its connection is not used again. Not here: what is asked (`sql_schema`), and being told (`sql_ears`).

The driver is asyncpg. Beside psycopg 3 it takes half of our CPU for a claim and its acknowledgement, gives up a server
that stands still when its time is over (psycopg waits five seconds more), and says at once that a connection is gone.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg

from inference_worker.errors import StatementRefused, StoreUnavailable

ANSWER_S: Final = 5.0
"""How long one statement may take; the time to wait for a connection, or to open one, comes before it."""

SERVER_SHARE: Final = 0.8
"""After this part of it the server gives up by itself, and then it is known that nothing was done."""

MOST_CONNECTIONS: Final = 10
CLOSE_S: Final = 1.0
IDLE: Final = 2
"""Connections that are kept while nobody asks, for the next who does."""

LINGER_S: Final = 60.0
"""How long others outlast the last who needed so many."""

FAILURES: Final = (asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError, ValueError)
"""What the driver raises besides what the server says. The second is said, too, of a connection over which the server
has taken its leave and whose end was not read yet."""

Prepare = Callable[[asyncpg.Connection], Awaitable[None]]
"""Done once, on the first connection: the tables are made."""

Record = Any
"""A row, by position and by name: the driver is untyped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlTls:
    """Files for encrypted connections, where the URL names none; None where the system's own are meant."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


@dataclass(slots=True, eq=False)
class _Idle:
    connection: asyncpg.Connection
    since: float


class SqlLink:
    """Statements over at most so many connections, which open when they are needed and are replaced when they fail."""

    def __init__(
        self,
        url: Callable[[], str],
        *,
        client_name: str,
        tls: SqlTls,
        prepare: Prepare,
        most_connections: int = MOST_CONNECTIONS,
        answer_s: float = ANSWER_S,
    ) -> None:
        """`url` is asked at each connection."""
        self._url = url
        self._client_name = client_name
        self._tls = tls
        self._prepare = prepare
        self._prepared = False
        self._preparing = asyncio.Lock()
        self._answer_s = answer_s
        self._room = asyncio.Semaphore(most_connections)
        self._idle: list[_Idle] = []
        """The last one to be used is the next."""
        self._closed = False

    @asynccontextmanager
    async def open(self) -> AsyncGenerator["SqlLink", None]:
        """A context that closes the connections; opening it does not connect."""
        try:
            yield self
        finally:
            self._closed = True
            idle, self._idle = self._idle, []
            await asyncio.gather(*(_close(one.connection) for one in idle))

    async def fetch(self, statement: str, *arguments: object) -> Sequence[Record]:
        """Carry out one statement, as a transaction of its own.

        Raises:
            StatementRefused: the server says no, and nothing was done.
            StoreUnavailable: there is no answer in time; it may have been done.
        """
        async with self._borrowed() as connection:
            found: Sequence[Record] = await connection.fetch(statement, *arguments)
        return found

    async def row(self, statement: str, *arguments: object) -> Record:
        """The one row that a statement gives. Raises as `fetch`."""
        (found,) = await self.fetch(statement, *arguments)
        return found

    async def another(self) -> asyncpg.Connection:
        """A connection of one's own, to be closed by `closed`. Raises `StoreUnavailable`."""
        try:
            async with asyncio.timeout(self._answer_s):
                return await self._ready_connection()
        except (asyncpg.PostgresError, *FAILURES) as exc:
            raise StoreUnavailable(reason_of(exc)) from exc

    @asynccontextmanager
    async def _borrowed(self) -> AsyncGenerator[asyncpg.Connection, None]:
        """A connection for one statement. What went wrong with it is translated here."""
        connection: asyncpg.Connection | None = None
        good = False
        async with self._turn():
            try:
                connection = await self._taken()
                async with asyncio.timeout(self._answer_s):
                    yield connection
                good = True
            except asyncpg.PostgresError as exc:
                good = not connection_is_over(exc)
                raise (StatementRefused if good else StoreUnavailable)(reason_of(exc), exc.sqlstate or "") from exc
            except FAILURES as exc:
                raise StoreUnavailable(reason_of(exc)) from exc
            finally:
                if connection is not None:
                    await self._returned(connection, good)

    @asynccontextmanager
    async def _turn(self) -> AsyncGenerator[None, None]:
        """Room for one connection more."""
        try:
            async with asyncio.timeout(self._answer_s):
                await self._room.acquire()
        except TimeoutError as exc:
            raise StoreUnavailable("all connections to Postgres are busy") from exc
        try:
            yield
        finally:
            self._room.release()

    async def _taken(self) -> asyncpg.Connection:
        if self._closed:
            raise ConnectionError("the connections to Postgres were closed by us")
        while self._idle:
            one = self._idle.pop()
            if not one.connection.is_closed():
                return one.connection
        async with asyncio.timeout(self._answer_s):
            return await self._ready_connection()

    async def _returned(self, connection: asyncpg.Connection, good: bool) -> None:
        """Keep what can be used again. One whose answer was not read is ended: nobody knows what comes over it."""
        now = asyncio.get_running_loop().time()
        if not good or self._closed:
            connection.terminate()
        elif not connection.is_closed():
            self._idle.append(_Idle(connection, now))
        if len(self._idle) > IDLE and now - self._idle[0].since > LINGER_S:
            await _close(self._idle.pop(0).connection)

    async def _ready_connection(self) -> asyncpg.Connection:
        connection = await connect(self._url(), client_name=self._client_name, tls=self._tls, within_s=self._answer_s)
        try:
            async with self._preparing:
                if not self._prepared:
                    await self._prepare(connection)
                    self._prepared = True
        except BaseException:
            connection.terminate()
            raise
        return connection


async def connect(url: str, *, client_name: str, tls: SqlTls, within_s: float) -> asyncpg.Connection:
    """A connection whose statements are given up by the server before we do.

    Raises: asyncpg.PostgresError, and FAILURES.
    """
    connection: asyncpg.Connection = await asyncpg.connect(
        with_files(url, tls),
        timeout=within_s,
        server_settings={
            "application_name": client_name[:63],
            "statement_timeout": str(round(within_s * SERVER_SHARE * 1000)),
            # Every question of ours is for an index; a plan that was made while a table was empty would stay.
            "enable_seqscan": "off",
            "enable_bitmapscan": "off",
            "jit": "off",
        },
    )
    return connection


def with_files(url: str, tls: SqlTls) -> str:
    """The URL with the files that it does not name itself. Whether to encrypt is its own `sslmode`."""
    parts = urlsplit(url)
    said = parse_qsl(parts.query, keep_blank_values=True)
    names = {name for name, _ in said}
    files = {"sslrootcert": tls.ca_file, "sslcert": tls.cert_file, "sslkey": tls.key_file}
    added = [(name, file) for name, file in files.items() if file is not None and name not in names]
    return url if not added else urlunsplit(parts._replace(query=urlencode([*said, *added])))


def connection_is_over(exc: asyncpg.PostgresError) -> bool:
    """Whether an error is the end of its connection, so that nothing is known of the statement."""
    state = exc.sqlstate or ""
    return state.startswith(("08", "57P", "XX", "25P")) or state == ""


def reason_of(exc: BaseException) -> str:
    """What went wrong, without addresses or credentials, short enough to be a log's value."""
    if isinstance(exc, TimeoutError | asyncpg.QueryCanceledError | asyncpg.LockNotAvailableError):
        return "Postgres gave no answer in time"
    if isinstance(exc, asyncpg.InvalidAuthorizationSpecificationError):
        return "Postgres refused the credentials"
    if isinstance(exc, asyncpg.ClientConfigurationError | ValueError):
        return "the address of Postgres cannot be used"
    if isinstance(exc, asyncpg.InternalClientError):
        return "the connection to Postgres has ended"
    return f"{type(exc).__name__}: {str(exc)[:200]}"


async def closed(connection: asyncpg.Connection) -> None:
    """End a connection of one's own."""
    await _close(connection)


async def _close(connection: asyncpg.Connection) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await connection.close(timeout=CLOSE_S)
    except (asyncpg.PostgresError, *FAILURES):
        connection.terminate()
