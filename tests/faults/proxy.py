"""A TCP proxy between a client and a server that delays, freezes, loses and cuts, at a chosen byte, frame or command.

It reads AMQP frames and Redis commands, so that a fault can be put exactly where it hurts, for example
`proxy.when_client_sends("basic.ack", Do.CUT)` or `proxy.when_client_sends(b"infer_resp:", Do.CUT_ON_REPLY)`.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from types import TracebackType
from typing import Literal, Self, assert_never
from urllib.parse import urlsplit, urlunsplit

from pamqp.commands import INDEX_MAPPING

from tests.services import LOOPBACK, free_port
from tests.waiting import eventually

CHUNK_BYTES = 65536
UNITS_AHEAD = 256


class Way(Enum):
    """A direction."""

    UP = auto()
    """From the client to the server."""
    DOWN = auto()
    """From the server to the client."""


class Do(Enum):
    """What happens to the unit (frame, command, reply, or chunk of bytes) that a trap was set for."""

    DROP = auto()
    """It is swallowed; an AMQP method with its header and body. The connection goes on."""
    CUT = auto()
    """It is not passed on; the connection is closed on both sides."""
    RESET = auto()
    """As CUT, by RST."""
    FREEZE = auto()
    """It and all that follows on this connection, both ways, waits for `thaw`."""
    CUT_AFTER = auto()
    """It is passed on, then the connection is closed; the server reads it before it sees the end."""
    CUT_ON_REPLY = auto()
    """Redis: it is passed on, and the connection is closed in the place of the reply to it: done, but unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One frame, command or reply; where the proxy speaks no protocol, what one read brought."""

    raw: bytes
    method: str = ""
    """AMQP: `basic.ack` and the like; empty for other frames."""
    channel: int = 0
    args: tuple[bytes, ...] = ()
    """Redis: the words of the command."""


What = str | bytes | Callable[[Unit], bool]
"""An AMQP method's name, bytes that stand in the unit, or a predicate."""


@dataclass(slots=True, eq=False)
class Trap:
    """A fault that waits for its moment."""

    way: Way
    what: What
    do: Do
    times: int
    hits: int = 0
    units: list[Unit] = field(default_factory=list)

    async def sprung(self, within: float = 10.0) -> None:
        """Wait until it has acted at least once."""
        await eventually(lambda: self.hits, within=within, what=f"a unit with {self.what!r} on the way {self.way.name}")

    def matches(self, unit: Unit) -> bool:
        if isinstance(self.what, str):
            return unit.method == self.what
        if isinstance(self.what, bytes):
            return self.what in unit.raw
        return self.what(unit)


class TcpProxy:
    """`async with TcpProxy("127.0.0.1", port, speaks="amqp") as proxy:` listens on `proxy.port` of the loopback.

    Faults of the whole proxy (delay, freeze, drop) hold for connections there are and for those to come.
    """

    def __init__(self, host: str, port: int, *, speaks: Literal["amqp", "redis"] | None = None) -> None:
        self.server_host = host
        self.server_port = port
        self.speaks = speaks
        self.host = LOOPBACK
        self.port = free_port()
        self.accepted = 0
        """Connections so far."""
        self.passed = {Way.UP: 0, Way.DOWN: 0}
        """Bytes passed on so far."""
        self.swallowed = {Way.UP: 0, Way.DOWN: 0}
        """Bytes lost to `drop`."""
        self.traps: list[Trap] = []
        self.delay_s = {Way.UP: 0.0, Way.DOWN: 0.0}
        self._flowing = {Way.UP: asyncio.Event(), Way.DOWN: asyncio.Event()}
        self._swallowing: set[Way] = set()
        self._left: dict[Way, int] = {}
        self._silent = False
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        for event in self._flowing.values():
            event.set()

    def url(self, original: str) -> str:
        """The same URL, through this proxy."""
        parts = urlsplit(original)
        user, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{user}{at}{self.host}:{self.port}"))

    @property
    def open(self) -> int:
        """Connections now."""
        return len(self._links)

    # Faults of the whole proxy

    def delay(self, seconds: float, *ways: Way) -> None:
        """Every byte takes this much longer; the order stays and the throughput too."""
        for way in ways or Way:
            self.delay_s[way] = seconds

    def freeze(self, *ways: Way) -> None:
        """Connections stay open and are accepted; nothing passes until `thaw`. What was read meanwhile is not lost."""
        for way in ways or Way:
            self._flowing[way].clear()

    def thaw(self) -> None:
        """Undo `freeze`, and what traps froze."""
        for event in self._flowing.values():
            event.set()
        for link in self._links:
            link.flowing.set()

    def drop(self, *ways: Way) -> None:
        """Swallow bytes until `let_pass`: the peer believes that they were sent."""
        self._swallowing.update(ways or Way)

    def let_pass(self) -> None:
        """Undo `drop`."""
        self._swallowing.clear()

    def truncate(self, way: Way, after_bytes: int) -> None:
        """Pass this many more bytes, then cut the connection, in the middle of a frame perhaps. Once."""
        self._left[way] = after_bytes

    async def cut(self) -> int:
        """Close all connections on both sides; how many there were."""
        return await self._end_all(reset=False)

    async def reset(self) -> int:
        """As `cut`, by RST."""
        return await self._end_all(reset=True)

    async def refuse(self) -> None:
        """Refuse new connections until `accept`; those there are go on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def accept(self) -> None:
        """Listen (again), on the same port, and serve."""
        self._silent = False
        if self._server is None:
            self._server = await asyncio.start_server(self._arrived, self.host, self.port)

    def silence(self) -> None:
        """Accept new connections, but never answer them and never ask the server, until `accept`."""
        self._silent = True

    # Faults at one unit

    def when_client_sends(self, what: What, do: Do, *, times: int = 1) -> Trap:
        """Set a trap on the way up: an AMQP method's name, bytes in a frame or command, or a predicate of the unit."""
        return self._set(Trap(Way.UP, what, do, times))

    def when_server_sends(self, what: What, do: Do, *, times: int = 1) -> Trap:
        """Set a trap on the way down: `"basic.ack"` is the broker's confirm."""
        return self._set(Trap(Way.DOWN, what, do, times))

    def clear_traps(self) -> None:
        self.traps.clear()

    def _set(self, trap: Trap) -> Trap:
        assert trap.do is not Do.CUT_ON_REPLY or (self.speaks == "redis" and trap.way is Way.UP), (
            "commands of Redis only"
        )
        self.traps.append(trap)
        return trap

    def sprung(self, way: Way, unit: Unit) -> Do | None:
        """The fault that is set for this unit, which counts as a hit."""
        for trap in self.traps:
            if trap.way is way and trap.hits < trap.times and trap.matches(unit):
                trap.hits += 1
                trap.units.append(unit)
                return trap.do
        return None

    def allowance(self, way: Way, size: int) -> int | None:
        """How many of `size` bytes may pass before the connection is to be cut; None where it is not to be cut."""
        left = self._left.get(way)
        if left is None:
            return None
        if left > size:
            self._left[way] = left - size
            return None
        del self._left[way]
        return left

    def swallows(self, way: Way) -> bool:
        return way in self._swallowing

    async def flow(self, way: Way) -> None:
        await self._flowing[way].wait()

    # Life

    async def __aenter__(self) -> Self:
        await self.accept()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.refuse()
        for link in list(self._links):
            link.end()
        tasks = set(self._tasks)
        if tasks:
            # Cancelled only if need be: a link that is closing its sockets already would leave one of them open.
            await asyncio.wait(tasks, timeout=5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(self, reader, writer, silent=self._silent)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)

    async def _end_all(self, *, reset: bool) -> int:
        links = list(self._links)
        for link in links:
            link.end(reset=reset)
        await eventually(lambda: not self._links & set(links), within=10, what="the end of the cut connections")
        return len(links)


class _Link:
    """One connection of a client, with its own to the server."""

    def __init__(
        self, proxy: TcpProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, silent: bool
    ) -> None:
        self.proxy = proxy
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.commands = 0
        self.replies = 0
        self.deadly_reply: int | None = None
        self._client = (reader, writer)
        self._writers = [writer]
        self._silent = silent
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Pass bytes both ways until one side has gone or the link was cut."""
        reader, writer = self._client
        pumps: list[asyncio.Task[None]] = []
        try:
            if not self._silent:
                upstream = await asyncio.open_connection(self.proxy.server_host, self.proxy.server_port)
                self._writers.append(upstream[1])
                loop = asyncio.get_running_loop()
                pumps.append(loop.create_task(self._pump(Way.UP, reader, upstream[1])))
                pumps.append(loop.create_task(self._pump(Way.DOWN, upstream[0], writer)))
            await self._ended.wait()
        except OSError:
            pass  # the server is not there: the client sees its connection closed
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for each in self._writers:
                await _close(each)

    def end(self, *, reset: bool = False) -> None:
        """Close both sides."""
        for writer in self._writers:
            if reset:
                raw: socket.socket | None = writer.get_extra_info("socket")
                if raw is not None:
                    with suppress(OSError):
                        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            else:
                writer.close()
        self._ended.set()

    async def _pump(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read and write by two tasks: with one, a delay would be paid by every chunk one after another."""
        units: asyncio.Queue[tuple[float, Unit] | None] = asyncio.Queue(UNITS_AHEAD)
        reading = asyncio.get_running_loop().create_task(self._read(way, reader, units))
        try:
            await self._write(way, writer, units)
        except OSError:
            pass
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        self._ended.set()

    async def _read(
        self, way: Way, reader: asyncio.StreamReader, units: asyncio.Queue[tuple[float, Unit] | None]
    ) -> None:
        parser = _parser(self.proxy.speaks, way)
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                for unit in parser.feed(chunk):
                    await units.put((loop.time() + self.proxy.delay_s[way], unit))
            if parser.rest:
                await units.put((loop.time(), Unit(raw=bytes(parser.rest))))
        await units.put(None)

    async def _write(
        self, way: Way, writer: asyncio.StreamWriter, units: asyncio.Queue[tuple[float, Unit] | None]
    ) -> None:
        content_dropped_on: int | None = None
        loop = asyncio.get_running_loop()
        while (item := await units.get()) is not None:
            due, unit = item
            await asyncio.sleep(max(0.0, due - loop.time()))
            await self.proxy.flow(way)
            await self.flowing.wait()
            if content_dropped_on is not None and unit.channel == content_dropped_on:
                if unit.raw[0] in (_HEADER, _BODY):
                    continue
                content_dropped_on = None
            self._count(way, unit)
            do = self.proxy.sprung(way, unit)
            if way is Way.DOWN and self.deadly_reply is not None and self.replies >= self.deadly_reply:
                do = Do.CUT
            match do:
                case None | Do.CUT_AFTER | Do.CUT_ON_REPLY:
                    pass
                case Do.DROP:
                    content_dropped_on = unit.channel if unit.method in _WITH_CONTENT else None
                    continue
                case Do.FREEZE:
                    self.flowing.clear()
                    await self.flowing.wait()
                case Do.CUT | Do.RESET:
                    self.end(reset=do is Do.RESET)
                    return
                case _:
                    assert_never(do)
            if do is Do.CUT_ON_REPLY:
                self.deadly_reply = self.commands
            if not await self._pass_on(way, unit, writer):
                return
            if do is Do.CUT_AFTER:
                if unit.method in _WITH_CONTENT:
                    await self._pass_content(way, writer, units)
                self.end()
                return
        # Half closed: the other way goes on until its own end, as long as the peer reads at all.
        if writer.can_write_eof():
            writer.write_eof()
        if way is Way.UP:
            await self._ended.wait()

    async def _pass_on(self, way: Way, unit: Unit, writer: asyncio.StreamWriter) -> bool:
        if self.proxy.swallows(way):
            self.proxy.swallowed[way] += len(unit.raw)
            return True
        allowed = self.proxy.allowance(way, len(unit.raw))
        passed = unit.raw[:allowed]
        writer.write(passed)
        self.proxy.passed[way] += len(passed)
        await writer.drain()
        if allowed is not None:
            self.end()
        return allowed is None

    async def _pass_content(
        self, way: Way, writer: asyncio.StreamWriter, units: asyncio.Queue[tuple[float, Unit] | None]
    ) -> None:
        """The header and the body frames that belong to a method just passed on."""
        body_left: int | None = None
        while body_left != 0 and (item := await units.get()) is not None:
            unit = item[1]
            if unit.raw[0] == _HEADER:
                body_left = int.from_bytes(unit.raw[11:19], "big")
            elif unit.raw[0] == _BODY and body_left is not None:
                body_left -= len(unit.raw) - _FRAME_EXTRA_BYTES
            await self._pass_on(way, unit, writer)

    def _count(self, way: Way, unit: Unit) -> None:
        if self.proxy.speaks != "redis":
            return
        if way is Way.UP:
            self.commands += 1
        elif not unit.raw.startswith(b">"):  # a push answers nothing
            self.replies += 1


async def _close(writer: asyncio.StreamWriter) -> None:
    if writer.transport.get_write_buffer_size():
        writer.transport.abort()  # the peer does not read: what is left would hold the connection open
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


# Protocols

_METHOD, _HEADER, _BODY = 1, 2, 3
_FRAME_EXTRA_BYTES = 8
_GREETING = b"AMQP"
_WITH_CONTENT = frozenset({"basic.publish", "basic.deliver", "basic.return", "basic.getok"})


class _Chunks:
    """No protocol: a unit is what one read brought."""

    def __init__(self) -> None:
        self.rest = bytearray()

    def feed(self, chunk: bytes) -> Iterator[Unit]:
        yield Unit(raw=chunk)


class _AmqpFrames:
    """AMQP 0-9-1: one unit a frame; the client's greeting is one too."""

    def __init__(self) -> None:
        self.rest = bytearray()

    def feed(self, chunk: bytes) -> Iterator[Unit]:
        self.rest += chunk
        while len(self.rest) >= _FRAME_EXTRA_BYTES:
            if self.rest.startswith(_GREETING):
                yield Unit(raw=self._take(8))
                continue
            size = int.from_bytes(self.rest[3:7], "big") + _FRAME_EXTRA_BYTES
            if len(self.rest) < size:
                return
            raw = self._take(size)
            yield Unit(raw=raw, channel=int.from_bytes(raw[1:3], "big"), method=_method(raw))

    def _take(self, size: int) -> bytes:
        raw = bytes(self.rest[:size])
        del self.rest[:size]
        return raw


def _method(raw: bytes) -> str:
    if raw[0] != _METHOD:
        return ""
    known = INDEX_MAPPING.get(int.from_bytes(raw[7:11], "big"))
    return str(getattr(known, "name", "unknown")).lower()


class _RedisUnits:
    """RESP 2 and 3: one unit a command or reply, whatever is nested in it."""

    def __init__(self) -> None:
        self.rest = bytearray()

    def feed(self, chunk: bytes) -> Iterator[Unit]:
        self.rest += chunk
        while (size := _resp_size(self.rest)) is not None:
            raw = bytes(self.rest[:size])
            del self.rest[:size]
            yield Unit(raw=raw, args=_words(raw))


def _resp_size(data: bytearray) -> int | None:
    """The size of the first whole value, or None where it is not all there."""
    at, wanted = 0, 1
    while wanted:
        end = data.find(b"\r\n", at)
        if end < 0:
            return None
        kind, head, at = bytes(data[at : at + 1]), bytes(data[at + 1 : end]), end + 2
        wanted -= 1
        if kind in (b"$", b"=", b"!"):
            at += int(head) + 2 if int(head) >= 0 else 0
        elif kind in (b"*", b"~", b">"):
            wanted += max(0, int(head))
        elif kind in (b"%", b"|"):
            wanted += 2 * int(head) + (kind == b"|")
    return at if at <= len(data) else None


def _words(raw: bytes) -> tuple[bytes, ...]:
    """The strings of a command, which is a flat array."""
    if not raw.startswith(b"*"):
        return ()
    words: deque[bytes] = deque()
    at = raw.index(b"\r\n") + 2
    while at < len(raw) and raw[at : at + 1] == b"$":
        end = raw.index(b"\r\n", at)
        size = int(raw[at + 1 : end])
        words.append(raw[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return tuple(words)


_Parser = _Chunks | _AmqpFrames | _RedisUnits


def _parser(speaks: Literal["amqp", "redis"] | None, way: Way) -> _Parser:
    match speaks:
        case None:
            return _Chunks()
        case "amqp":
            return _AmqpFrames()
        case "redis":
            return _RedisUnits()
