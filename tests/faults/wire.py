"""An HTTP/1.1 server written by hand, because a good one will not misbehave; and the ways in which it answers.

Each request is recorded, then handed to a `Behaviour`, which writes whatever bytes it likes to the connection.
"""

import asyncio
import gzip
import json
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tests.services import LOOPBACK, free_port
from tests.waiting import eventually

MAX_HEAD_BYTES = 65536
SILENCE_S = 3600.0
"""A silent server is silent until the client goes, the server closes, or this long."""


@dataclass(slots=True, eq=False)
class Request:
    """What came, and when. Times are of `time.monotonic()`."""

    method: str
    path: str
    """With the query."""
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    connection: int
    """The number of the connection, from 1: two requests with the same one shared it."""
    arrived_at: float
    answered_at: float | None = None
    """When the behaviour was done."""
    disconnected_at: float | None = None
    """When the client went before the answer was complete."""

    @property
    def json(self) -> object:
        return json.loads(self.body)


class Gone(Exception):
    """The connection is over: the client has gone, or the behaviour has closed it."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One request, and the connection to answer on."""

    request: Request
    server: "HttpServer"
    _connection: "_Connection"

    async def send(self, data: bytes) -> None:
        """Write, and wait until the kernel has it.

        Raises:
            Gone: the client is not there any more.
        """
        await self._connection.send(data)

    async def head(self, status: int, headers: Mapping[str, str], *, reason: str = "Reason") -> None:
        lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
        await self.send("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n")

    async def answer(
        self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None, *, reason: str = "Reason"
    ) -> None:
        """A complete answer, in one write."""
        all_headers = {"Content-Type": "application/json", "Content-Length": str(len(body))} | dict(headers or {})
        lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in all_headers.items())]
        await self.send("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)

    async def chunk(self, data: bytes) -> None:
        """One chunk of a chunked answer; of no data: its end."""
        await self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def pause(self, seconds: float) -> None:
        """Raises: Gone: the client went meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                await self._connection.gone.wait()
        except TimeoutError:
            return
        raise Gone

    def close(self) -> None:
        """FIN."""
        self._connection.close()
        raise Gone

    def reset(self) -> None:
        """RST."""
        self._connection.reset()
        raise Gone


Behaviour = Callable[[Exchange], Awaitable[None]]


class HttpServer:
    """Listens on `port` of the loopback, which stays the same when it refuses for a while.

    `answer` decides what becomes of a request; a subclass or the caller sets it.
    """

    def __init__(self, *, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://{LOOPBACK}:{self.port}"
        self.connections_accepted = 0
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None

    async def answer(self, exchange: Exchange) -> None:
        """Answer one request. Overridden."""
        await exchange.answer(404)

    @property
    def connections(self) -> int:
        """Connections now."""
        return len(self._connections)

    async def refuse(self, *, cut: bool = True) -> None:
        """Close the listening port, and with `cut` the connections there are: what a dead process looks like."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if cut:
            await self.cut()

    async def listen(self) -> None:
        """Listen (again) on the same port."""
        if self._server is None:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: _Connection(self), LOOPBACK, self.port, backlog=4096
            )

    async def cut(self, *, reset: bool = False) -> None:
        """Close all connections."""
        ending = list(self._connections.items())
        for connection, _ in ending:
            if reset:
                connection.reset()
            else:
                connection.close()
        own = asyncio.current_task()
        others = [task for _, task in ending if task is not own]
        await eventually(lambda: all(task.done() for task in others), within=10, what="the end of the cut connections")

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.refuse(cut=False)
        ending = list(self._connections.items())
        for connection, task in ending:
            task.cancel()
            connection.abort()
        await asyncio.gather(*(task for _, task in ending), return_exceptions=True)

    def opened(self, connection: "_Connection") -> int:
        self.connections_accepted += 1
        task = asyncio.get_running_loop().create_task(connection.serve())
        self._connections[connection] = task
        task.add_done_callback(lambda _: self._connections.pop(connection, None))
        return self.connections_accepted


class _Connection(asyncio.Protocol):
    def __init__(self, server: HttpServer) -> None:
        self.gone = asyncio.Event()
        self.client_left_at: float | None = None
        self._server = server
        self._number = 0
        self._data = bytearray()
        self._came = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        raw: socket.socket = transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._number = self._server.opened(self)

    def data_received(self, data: bytes) -> None:
        self._data += data
        self._came.set()

    def eof_received(self) -> bool:
        self.connection_lost(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.gone.is_set():
            self.client_left_at = time.monotonic()
        self._over()

    def _over(self) -> None:
        self.gone.set()
        self._came.set()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def send(self, data: bytes) -> None:
        if self.gone.is_set():
            raise Gone
        self._transport.write(data)
        await self._writable.wait()

    def close(self) -> None:
        self._over()
        self._transport.close()

    def reset(self) -> None:
        raw = self._transport.get_extra_info("socket")
        with suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()

    def abort(self) -> None:
        self._over()
        self._transport.abort()

    async def serve(self) -> None:
        try:
            while True:
                request = await self._read()
                try:
                    await self._server.answer(Exchange(request, self._server, self))
                finally:
                    request.answered_at = time.monotonic()
                    request.disconnected_at = self.client_left_at
                if request.headers.get("connection", "").lower() == "close":
                    break
        except (Gone, ValueError):  # ValueError: this is no HTTP
            pass
        finally:
            self._transport.close()

    async def _read(self) -> Request:
        while b"\r\n\r\n" not in self._data:
            await self._more()
            if len(self._data) > MAX_HEAD_BYTES and b"\r\n\r\n" not in self._data:
                raise ValueError("the head of the request has no end")
        arrived_at = time.monotonic()
        head = self._take(self._data.index(b"\r\n\r\n") + 4).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ", 2)
        pairs = (line.split(":", 1) for line in head[1:] if line)
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        if headers.get("expect", "").lower() == "100-continue":
            await self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "chunked" in headers.get("transfer-encoding", ""):
            body = await self._chunks()
        else:
            body = await self._exactly(int(headers.get("content-length", "0")))
        return Request(method, path, headers, body, self._number, arrived_at)

    async def _chunks(self) -> bytes:
        body = bytearray()
        while True:
            while b"\r\n" not in self._data:
                await self._more()
            size = int(self._take(self._data.index(b"\r\n") + 2).split(b";")[0], 16)
            body += (await self._exactly(size + 2))[:-2]
            if not size:
                return bytes(body)

    async def _exactly(self, size: int) -> bytes:
        while len(self._data) < size:
            await self._more()
        return self._take(size)

    async def _more(self) -> None:
        if self.gone.is_set():
            raise Gone
        self._came.clear()
        await self._came.wait()

    def _take(self, size: int) -> bytes:
        taken = bytes(self._data[:size])
        del self._data[:size]
        return taken


# Behaviours. Each is a function of its knobs that returns what answers one request.


def answer(status: int = 200, body: object = None, headers: Mapping[str, str] | None = None) -> Behaviour:
    """A complete answer. `body`: bytes as they are, text as UTF-8, anything else as JSON; None is no body at all."""
    match body:
        case None:
            data = b""
        case bytes():
            data = body
        case str():
            data = body.encode()
        case _:
            data = json.dumps(body).encode()

    async def behave(exchange: Exchange) -> None:
        await exchange.answer(status, data, headers)

    return behave


def error(status: int, message: str = "told to fail", headers: Mapping[str, str] | None = None) -> Behaviour:
    """An error in the shape of OpenAI's."""
    return answer(status, {"error": {"message": message, "type": "error", "code": status}}, headers)


def retry_after(value: str, status: int = 503) -> Behaviour:
    """`value` is seconds, an HTTP date, or nonsense."""
    return error(status, "come back later", {"Retry-After": value})


def delayed(seconds: float, then: Behaviour) -> Behaviour:
    """Wait first, unless the client goes."""

    async def behave(exchange: Exchange) -> None:
        await exchange.pause(seconds)
        await then(exchange)

    return behave


def gated(opened: asyncio.Event, then: Behaviour) -> Behaviour:
    """Wait until the test sets the event, or the client goes."""

    async def behave(exchange: Exchange) -> None:
        while not opened.is_set():
            await exchange.pause(0.005)
        await then(exchange)

    return behave


def silent() -> Behaviour:
    """Accept the request and never answer."""

    async def behave(exchange: Exchange) -> None:
        await exchange.pause(SILENCE_S)

    return behave


def close_before_answer() -> Behaviour:
    """FIN in the place of an answer."""

    async def behave(exchange: Exchange) -> None:
        exchange.close()

    return behave


def reset() -> Behaviour:
    """RST in the place of an answer."""

    async def behave(exchange: Exchange) -> None:
        exchange.reset()

    return behave


def close_after_headers(status: int = 200) -> Behaviour:
    """Headers that promise a body, then FIN."""

    async def behave(exchange: Exchange) -> None:
        await exchange.head(status, {"Content-Type": "application/json", "Content-Length": "100"})
        exchange.close()

    return behave


def half_body(then: Callable[[Exchange], None] = Exchange.close) -> Behaviour:
    """Half of what Content-Length promised, then FIN, or `Exchange.reset`."""

    async def behave(exchange: Exchange) -> None:
        await exchange.head(200, {"Content-Type": "application/json", "Content-Length": "100"})
        await exchange.send(b'{"id": "chatcmpl-1", "object": "chat.completion", ')
        then(exchange)

    return behave


def chunked_without_end(*chunks: bytes, close: bool = True) -> Behaviour:
    """Chunks without the last one, then FIN; without `close`: then silence."""

    async def behave(exchange: Exchange) -> None:
        await exchange.head(200, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"})
        for chunk in chunks or (b'{"id": "chatcmpl-1", ',):
            await exchange.chunk(chunk)
        if close:
            exchange.close()
        await exchange.pause(SILENCE_S)

    return behave


def raw(data: bytes) -> Behaviour:
    """These bytes, whatever they are, then FIN."""

    async def behave(exchange: Exchange) -> None:
        await exchange.send(data)
        exchange.close()

    return behave


def html(status: int = 200) -> Behaviour:
    """A proxy's page in the place of the model's answer."""
    return answer(status, "<html><body>It works!</body></html>", {"Content-Type": "text/html"})


def latin1() -> Behaviour:
    """JSON in Latin-1, which is no JSON."""
    return answer(200, '{"text": "caf\xe9"}'.encode("latin-1"))


def broken_gzip() -> Behaviour:
    """`Content-Encoding: gzip` over what gzip cannot read to its end."""
    packed = bytearray(gzip.compress(b'{"choices": []}' * 20))
    packed[len(packed) // 2] ^= 0xFF
    return answer(200, bytes(packed), {"Content-Encoding": "gzip"})


def no_content() -> Behaviour:
    """204."""

    async def behave(exchange: Exchange) -> None:
        await exchange.head(204, {})

    return behave


def empty() -> Behaviour:
    """200 without a body."""
    return answer(200)


def redirect(location: str = "/elsewhere", status: int = 307) -> Behaviour:
    return answer(status, None, {"Location": location})


def huge(size_bytes: int, *, chunked: bool = False) -> Behaviour:
    """A valid JSON string of this size; with `chunked` the size is not told beforehand."""
    block = b"x" * 65536

    async def behave(exchange: Exchange) -> None:
        length = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(size_bytes)}
        send = exchange.chunk if chunked else exchange.send
        await exchange.head(200, {"Content-Type": "application/json"} | length)
        await send(b'"')
        left = size_bytes - 2
        while left > 0:
            await send(block[: min(left, len(block))])
            left -= len(block)
        await send(b'"')
        if chunked:
            await exchange.chunk(b"")

    return behave


def trickle(body: bytes, *, every_s: float, size_bytes: int = 1) -> Behaviour:
    """The body in little pieces: no single read takes long, the whole does."""

    async def behave(exchange: Exchange) -> None:
        await exchange.head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        for at in range(0, len(body), size_bytes):
            await exchange.send(body[at : at + size_bytes])
            await exchange.pause(every_s)

    return behave


def lone_surrogate() -> Behaviour:
    """JSON whose text cannot be written as UTF-8."""
    return answer(200, b'{"choices": [{"message": {"content": "\\ud800"}}], "usage": {"total_tokens": 2}}')


def not_a_number() -> Behaviour:
    """`NaN`, which Python writes and JSON does not know."""
    return answer(200, b'{"choices": [], "logprob": NaN}')


def deep(levels: int = 100_000) -> Behaviour:
    """Nested deeper than a recursive reader can go."""
    return answer(200, b"[" * levels + b"]" * levels)


def cut_all(*, with_reset: bool = False) -> Behaviour:
    """Every connection of the server is cut, as where this request crashes it and a supervisor starts it again."""

    async def behave(exchange: Exchange) -> None:
        await exchange.server.cut(reset=with_reset)

    return behave


def stream(*events: bytes, every_s: float = 0.0, end: bool = True, first_after_s: float = 0.0) -> Behaviour:
    """Server-sent events, each given as its bytes; without `end` the connection is closed before the last chunk."""

    async def behave(exchange: Exchange) -> None:
        if first_after_s:
            await exchange.pause(first_after_s)
        await exchange.head(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"})
        for number, event in enumerate(events):
            if number and every_s:
                await exchange.pause(every_s)
            await exchange.chunk(event)
        if not end:
            exchange.close()
        await exchange.chunk(b"")

    return behave


def event(data: object) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}\n\n".encode()


@dataclass(slots=True)
class Traffic:
    """How much is going on at once."""

    now: int = 0
    peak: int = 0

    def __enter__(self) -> Self:
        self.now += 1
        self.peak = max(self.peak, self.now)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.now -= 1
