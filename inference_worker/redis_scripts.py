"""One Redis connection whose commands of one loop turn travel together, and the scripts that run on it.

The scripts are those of `docs/design/delivery.md`, section 2: each is atomic, each may be repeated with the same
arguments. Nothing here knows what a request is.
"""

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import urlsplit, urlunsplit

import structlog
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from inference_worker.errors import StoreUnavailable
from inference_worker.timing import ended, quietly

log = structlog.get_logger(__name__)

Argument = str | bytes | int | float
Address = Callable[[], str | Awaitable[str]]
"""Gives the URL, at each connection anew. Where somebody is asked for it, one waits, and it may raise OSError."""

ANSWER_S: Final = 5.0
"""How long one exchange may take, the time to connect included; a command waits for one exchange before its own."""

FROM_URL: Final = frozenset({"host", "port", "path", "db", "username", "password", "protocol"})
"""What of a URL is heeded. The rest is of other programs that share it: `decode_responses` would turn every answer into
something else, and a word that the driver does not know would end us."""

FROM_URL_SECURED: Final = frozenset(
    {f"ssl_{name}" for name in ("cert_reqs", "check_hostname", "min_version", "ciphers", "password")}
    | {f"ssl_{name}" for name in ("ca_certs", "ca_data", "ca_path", "certfile", "keyfile")}
    | {f"ssl_{name}" for name in ("include_verify_flags", "exclude_verify_flags")}
)
"""The same, of a `rediss://` one."""

GONE_ELSEWHERE: Final = (ReadOnlyError, MovedError)
"""Answers that say that the keys are another server's now."""

MOST_COMMANDS: Final = 512
MOST_BYTES: Final = 8 * 1024 * 1024
"""Bounds of what travels in one go; at least one command does."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and the name the server knows it by."""

    source: str

    @property
    def sha(self) -> str:
        """The script's SHA-1, in hexadecimal."""
        return _sha(self.source)


_SHAS: dict[str, str] = {}


def _sha(source: str) -> str:
    if source not in _SHAS:
        _SHAS[source] = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return _SHAS[source]


PRELUDE: Final = """
local function millis()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end
local function answered(key)
  local head = redis.call('GETRANGE', key, 0, 30)
  if head == '' then return nil end
  if string.find(head, '^{"status": ?"completed"') then return {'ANSWERED'} end
  return {'ANSWERED', redis.call('GET', key)}
end
local function keep_for(key, ms)
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, ms) end
end
"""
"""What the scripts share."""

CLAIM: Final = Script(
    PRELUDE
    + """
-- KEYS result, claim   ARGV attempt, token, lease ms, deadline ms
local known = answered(KEYS[1])
if known then return known end
local c = redis.call('HMGET', KEYS[2], 'holder', 'until', 'floor', 'starts')
if c[3] and tonumber(ARGV[1]) < tonumber(c[3]) then return {'SUPERSEDED'} end
local now, lease = millis(), tonumber(ARGV[3])
if c[1] and c[1] ~= ARGV[2] and tonumber(c[2]) > now then return {'BUSY', tonumber(c[2]) - now} end
local starts = tonumber(c[4] or '0')
if c[1] ~= ARGV[2] then starts = starts + 1 end
redis.call('HSET', KEYS[2], 'holder', ARGV[2], 'until', now + lease, 'starts', starts)
redis.call('PEXPIREAT', KEYS[2], math.max(tonumber(ARGV[4]), now) + 2 * lease + 60000)
return {'CLAIMED', starts}
"""
)

RENEW: Final = Script(
    PRELUDE
    + """
-- KEYS result, claim   ARGV token, lease ms
local known = answered(KEYS[1])
if known then return known end
local c = redis.call('HMGET', KEYS[2], 'holder', 'until')
local now, lease = millis(), tonumber(ARGV[2])
if c[1] and c[1] ~= ARGV[1] and tonumber(c[2]) > now then return {'LOST'} end
redis.call('HSET', KEYS[2], 'holder', ARGV[1], 'until', now + lease)
keep_for(KEYS[2], 2 * lease + 60000)
return {'OK'}
"""
)

FINISHING: Final = """
-- Store a terminal result, unless there is one, or a failure may not be stored.
-- {'STORED'}, {'ANSWERED' …}, {'BUSY', ms}
local function finish(result, claim, outbox, token, reply, ttl_s, status, event, past_token, job)
  local known = answered(result)
  if known then return known end
  if status == 'failed' and past_token ~= '1' then
    local c = redis.call('HMGET', claim, 'holder', 'until')
    local now = millis()
    if c[1] and c[1] ~= token and tonumber(c[2]) > now then return {'BUSY', tonumber(c[2]) - now} end
  end
  -- The event first: where the outbox cannot be written (a user without XADD, a key of another kind), a script is not
  -- rolled back, and a result without its event would never be billed.
  if event ~= '' then redis.call('XADD', outbox, '*', 'event', event) end
  redis.call('SET', result, reply, 'EX', ttl_s)
  redis.call('DEL', claim)
  -- A hint: who waits looks, too. A user without that channel must not end a script between a result and its message.
  redis.pcall('PUBLISH', result, status)
  -- What an intake keeps of its jobs is not ours: where we may not write there, its view is poorer and nothing is lost.
  if job and job ~= '' and redis.pcall('EXISTS', job) == 1 then
    redis.pcall('HSET', job, 'ended', status)
    local due = redis.pcall('HGET', job, 'due')  -- The sorted set of deadlines that the intake has it in.
    if type(due) == 'string' then redis.pcall('ZREM', due, job) end
    redis.pcall('EXPIRE', job, tonumber(ttl_s) + 86400)
  end
  return {'STORED'}
end
"""
"""The function behind every script that ends a request; after `PRELUDE`, which has what it calls."""

FINISH: Final = Script(
    PRELUDE
    + FINISHING
    + """
-- KEYS result, claim, outbox
-- ARGV token, reply, ttl s, status, usage event or '', '1' to pass the token check, key of the intake's record or ''
return finish(KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7])
"""
)

FINISH_IN_SLOT: Final = Script(
    PRELUDE
    + FINISHING
    + """
-- KEYS result, claim, owed   ARGV token, reply, ttl s, status, usage event or '', '1' to pass the token check
local known = answered(KEYS[1])
if known then return known end
-- Only what is completed has one, and that is never refused from here on.
if ARGV[5] ~= '' then redis.call('SET', KEYS[3], ARGV[5], 'EX', ARGV[3]) end
return finish(KEYS[1], KEYS[2], '', ARGV[1], ARGV[2], ARGV[3], ARGV[4], '', ARGV[6], '')
"""
)
"""The same on a Cluster, where the outbox lies in another slot: the event lies beside the result until it is there."""

RELEASE: Final = Script(
    PRELUDE
    + """
-- KEYS result, claim   ARGV token, floor or '', lease ms
if redis.call('EXISTS', KEYS[1]) == 1 then return {'OK'} end
local c = redis.call('HMGET', KEYS[2], 'holder', 'floor', 'starts')
if c[1] == ARGV[1] then
  redis.call('HDEL', KEYS[2], 'holder', 'until')
  local starts = 0
  if ARGV[2] == '' then starts = math.max(tonumber(c[3] or '1') - 1, 0) end
  redis.call('HSET', KEYS[2], 'starts', starts)
end
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[2], 'floor', math.max(tonumber(c[2] or '0'), tonumber(ARGV[2])))
end
if redis.call('EXISTS', KEYS[2]) == 1 then keep_for(KEYS[2], 2 * tonumber(ARGV[3]) + 60000) end
return {'OK'}
"""
)

PROGRESS: Final = Script(
    PRELUDE
    + """
-- KEYS claim
local c = redis.call('HMGET', KEYS[1], 'holder', 'until', 'floor')
return {c[1] and tonumber(c[2]) > millis() and 1 or 0, tonumber(c[3] or '0')}
"""
)

PROBE: Final = Script("redis.call('SET', KEYS[1], '1', 'EX', 60) return 'OK'")
"""Whether scripts may write: PING answers also where they may not."""

SENT: Final = Script(
    """
-- KEYS outbox   ARGV group, ids…
local ids = {unpack(ARGV, 2)}
redis.call('XACK', KEYS[1], ARGV[1], unpack(ids))
return redis.call('XDEL', KEYS[1], unpack(ids))
"""
)

REFUSED: Final = Script(
    """
-- KEYS outbox, refused   ARGV group, id, event, reason, most entries kept
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', 'event', ARGV[3], 'reason', ARGV[4])
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
return redis.call('XDEL', KEYS[1], ARGV[2])
"""
)

REVIVING: Final = """
-- What an intake keeps of a job that begins anew: it has not ended, has a new deadline, and is kept until then (Unix
-- ms). Not ours: where we may not write there, the intake's view is poorer and nothing is lost.
local function revive(job, deadline, kept_until)
  if redis.pcall('EXISTS', job) ~= 1 then return end
  redis.pcall('HDEL', job, 'ended')
  redis.pcall('HSET', job, 'expires_at', deadline)
  redis.pcall('PEXPIREAT', job, kept_until)
  local due = redis.pcall('HGET', job, 'due')
  if type(due) ~= 'string' then return end
  redis.pcall('ZADD', due, deadline, job)
  local left_ms = redis.pcall('PTTL', due)
  if type(left_ms) == 'number' and millis() + left_ms < kept_until then redis.pcall('PEXPIREAT', due, kept_until) end
end
"""
"""The function behind every script that replays a request."""

REPLAY: Final = Script(
    PRELUDE
    + REVIVING
    + """
-- KEYS result, claim   ARGV key of the intake's record, its new deadline, Unix ms until which that is kept
local known = answered(KEYS[1])
if known and #known == 1 then return {'COMPLETED'} end
local c = redis.call('HMGET', KEYS[2], 'holder', 'until')
if not known and c[1] and tonumber(c[2]) > millis() then return {'BUSY', tonumber(c[2]) - millis()} end
redis.call('DEL', KEYS[1], KEYS[2])
revive(ARGV[1], ARGV[2], tonumber(ARGV[3]))
return {'CLEARED'}
"""
)
"""Makes room for a new run of a request: its failed result and its claim go; not while it runs."""

SCRIPTS: Final = (CLAIM, RENEW, FINISH, RELEASE, PROGRESS, PROBE, SENT, REFUSED, REPLAY)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisTls:
    """Files for `rediss://`; None where the system's own are meant."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


class RedisCommands(Protocol):
    """Who runs commands and scripts: one connection, or those to the servers of a Cluster.

    Every method raises `StoreUnavailable`: there is no answer in time, or one that says that it cannot be done now.
    """

    async def run(self, script: Script, keys: Sequence[str], *arguments: Argument) -> Any:
        """Run a script. On a Cluster its keys share a slot."""

    async def do(self, *parts: Argument) -> Any:
        """Run a command."""


class ClusterCommands(RedisCommands, Protocol):
    """The servers of a Cluster, and how to reach one by a connection of one's own."""

    @property
    def masters(self) -> tuple[str, ...]:
        """The addresses of those that have keys, as last seen."""

    def address_of(self, key: str) -> Address:
        """Leads to the server that has a key."""

    def address_at(self, master: str) -> Address:
        """Leads to one of `masters`."""


@dataclass(slots=True, eq=False)
class _Command:
    parts: tuple[Argument, ...]
    answer: asyncio.Future[Any]


class RedisLink:
    """One connection, opened when needed and again after each failure; the driver's own retries are off.

    Commands wait for the end of their loop turn and leave together: one write, one read, whatever their number.
    """

    def __init__(
        self,
        url: Address,
        password: Callable[[], str | None],
        *,
        client_name: str,
        tls: RedisTls,
        answer_s: float = ANSWER_S,
        moved: Callable[[], int] = lambda: 0,
    ) -> None:
        """`moved` counts how often the address has come to lead elsewhere: a connection from before is not used."""
        self._url = url
        self._password = password
        self._client_name = client_name
        self._tls = tls
        self._answer_s = answer_s
        self._moved = moved
        self._moved_at = 0
        """What it was when the connection was opened."""
        self._waiting: deque[_Command] = deque()
        self._connection: AbstractConnection | None = None
        self._sender: asyncio.Task[None] | None = None
        self._closed = False

    @asynccontextmanager
    async def open(self) -> AsyncGenerator["RedisLink", None]:
        """A context that closes the connection at its end; opening it does not connect."""
        try:
            yield self
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connection for good; who waits for an answer is told so."""
        self._closed = True
        if self._sender is not None:
            await ended(self._sender)
        await self._drop()

    async def run(self, script: Script, keys: Sequence[str], *arguments: Argument) -> Any:
        """Run a script.

        Raises:
            StoreUnavailable: no answer in time, or an answer that says that it cannot be done now.
        """
        return await self._answer(("EVALSHA", script.sha, len(keys), *keys, *arguments), script)

    async def do(self, *parts: Argument) -> Any:
        """Run a command; as `run`."""
        return await self._answer(parts, None)

    async def another(self) -> AbstractConnection:
        """A connection of one's own to the same server, for commands that block; whoever asks for it closes it.

        Raises: RedisError, OSError, TimeoutError, ValueError.
        """
        async with asyncio.timeout(self._answer_s):
            return await connect(
                await url_from(self._url),
                self._password(),
                client_name=self._client_name,
                tls=self._tls,
                within_s=self._answer_s,
            )

    async def _answer(self, parts: tuple[Argument, ...], script: Script | None) -> Any:
        if self._closed:
            raise StoreUnavailable("the connection to Redis was closed by us")
        command = _Command(parts, asyncio.get_running_loop().create_future())
        self._waiting.append(command)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all(), name="redis sender")
        answer = await command.answer
        if isinstance(answer, NoScriptError) and script is not None:
            # The server lost its scripts (restart, SCRIPT FLUSH): send the source along.
            return await self._answer(("EVAL", script.source, *parts[2:]), None)
        if isinstance(answer, BaseException):
            raise StoreUnavailable(reason_of(answer)) from answer
        return answer

    async def _send_all(self) -> None:
        """Send what waits, batch by batch, until nothing does. Never raises: the answers carry the failure."""
        while self._waiting:
            batch = self._next_batch()
            try:
                async with asyncio.timeout(self._answer_s):
                    await self._exchange(batch)
            except Exception as exc:
                if not isinstance(exc, RedisError | OSError | TimeoutError | ValueError):
                    log.exception("commands could not be sent to Redis")  # A fault of ours; none may wait for ever.
                await self._drop()
                # Those behind it fail with it: they have waited long enough, and whoever asks again may be luckier.
                self._answer_all([*batch, *self._waiting], exc)
                self._waiting.clear()
            except asyncio.CancelledError:
                # Answers, not cancellations: those who wait are not being cancelled.
                self._answer_all([*batch, *self._waiting], ConnectionError("the connection was closed by us"))
                await self._drop()
                raise
            if any(isinstance(c.answer.result(), GONE_ELSEWHERE) for c in batch if not c.answer.cancelled()):
                await self._drop()  # Demoted by a failover: the address may lead to the new primary by now.

    def _answer_all(self, commands: list[_Command], answer: Exception) -> None:
        for command in commands:
            if not command.answer.done():
                command.answer.set_result(answer)

    def _next_batch(self) -> list[_Command]:
        batch: list[_Command] = []
        size_bytes = 0
        while self._waiting and len(batch) < MOST_COMMANDS and size_bytes < MOST_BYTES:
            command = self._waiting.popleft()
            if command.answer.done():  # Who asked has gone.
                continue
            batch.append(command)
            size_bytes += sum(len(part) for part in command.parts if type(part) is bytes)
        return batch

    async def _exchange(self, batch: list[_Command]) -> None:
        if not batch:
            return
        if self._connection is not None and self._moved_at != self._moved():
            await self._drop()
        connection = self._connection
        if connection is None or not connection.is_connected:
            self._moved_at = self._moved()
            connection = self._connection = await self._connect()
        await connection.send_packed_command(
            connection.pack_commands([command.parts for command in batch]), check_health=False
        )
        for command in batch:
            answer: Any
            try:
                answer = await connection.read_response(disconnect_on_error=False)
            except ResponseError as exc:
                answer = exc
            if not command.answer.done():
                command.answer.set_result(answer)

    async def _connect(self) -> AbstractConnection:
        return await connect(
            await url_from(self._url),
            self._password(),
            client_name=self._client_name,
            tls=self._tls,
            within_s=self._answer_s,
            scripts=SCRIPTS,
        )

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await quietly(connection.disconnect(nowait=True), 1.0, RedisError, OSError)


async def url_from(address: Address) -> str:
    """What an address says now. Raises: OSError, where it does."""
    said = address()
    return said if isinstance(said, str) else await said


def url_at(url: str, address: str, *, database: bool = True) -> str:
    """The same URL, to another server (`host:port`): with its scheme, credentials and options."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    host, _, port = address.rpartition(":")
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return urlunsplit(parts._replace(netloc=f"{user}{at}{host}:{port}", path=parts.path if database else ""))


def address_in(url: str) -> str:
    """The `host:port` that a URL names. Raises: ValueError."""
    parts = urlsplit(url)
    return f"{parts.hostname or 'localhost'}:{parts.port or 6379}"


async def connect(
    url: str,
    password: str | None,
    *,
    client_name: str,
    tls: RedisTls,
    within_s: float,
    scripts: Sequence[Script] = (),
    resp: int | None = None,
) -> AbstractConnection:
    """A connection of the driver's, whose own retries are off, with these scripts loaded.

    Raises: RedisError, OSError, ValueError; it is closed then.
    """
    options: dict[str, Any] = dict(parse_url(url))
    connection_class = options.pop("connection_class", Connection)
    if not options.get("password") and password:
        options["password"] = password
    secured = connection_class is SSLConnection
    options = {
        name: value for name, value in options.items() if name in FROM_URL or (secured and name in FROM_URL_SECURED)
    }
    if secured:
        files = {"ssl_ca_certs": tls.ca_file, "ssl_certfile": tls.cert_file, "ssl_keyfile": tls.key_file}
        options |= {name: file for name, file in files.items() if file is not None}
    # No socket_timeout: with one, the driver writes through wait_for, which on Python 3.11 can swallow a
    # cancellation; every exchange has its own time limit instead.
    options |= {
        "socket_timeout": None,
        "socket_connect_timeout": within_s,
        "retry": Retry(NoBackoff(), 0),
        "client_name": client_name,
    }
    if resp is not None:
        options["protocol"] = resp
    if connection_class is not UnixDomainSocketConnection:
        options["socket_keepalive"] = True
    connection: AbstractConnection = connection_class(**options)
    try:
        await connection.connect()  # type: ignore[no-untyped-call]  # The driver's own gap.
        if scripts:
            await connection.send_packed_command(
                connection.pack_commands([("SCRIPT", "LOAD", script.source) for script in scripts]), check_health=False
            )
        for _ in scripts:
            # Not allowed to load, or still loading its data: the commands themselves will say so.
            with contextlib.suppress(ResponseError):
                await connection.read_response(disconnect_on_error=False)
    except BaseException:
        await quietly(connection.disconnect(nowait=True), 1.0, RedisError, OSError)
        raise
    return connection


def reason_of(exc: BaseException) -> str:
    """What went wrong, without addresses or credentials, short enough to be a log's value."""
    if isinstance(exc, AuthenticationError):
        return "Redis refused the credentials"
    if isinstance(exc, TimeoutError):
        return "Redis gave no answer in time"
    return f"{type(exc).__name__}: {str(exc)[:200]}"
