"""Listens for HTTP inside a context. What is answered, and when the process stops, is decided elsewhere."""

import asyncio
import errno
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from inference_worker.gateway.connections import ACCEPTED_AT_ONCE, Connection
from inference_worker.timing import ended

App = ASGIApp

WAITING_CONNECTIONS: Final = 1024
"""In the kernel's queue, until they are accepted."""

CLOSE_S: Final = 2
"""How long requests that are under way may take at the end."""


@asynccontextmanager
async def serving(
    web: ASGIApp, host: str, port: int, stopping: asyncio.Event, *, variable: str = "GATEWAY_PORT"
) -> AsyncGenerator[str, None]:
    """Listen inside the context, which gives the URL; port 0 takes a free one. Leaving it sets `stopping`.

    Raises:
        OSError: nothing can listen there; the text names `variable`.
    """
    sock = await _bound(host, port, variable)
    server = _Server(
        uvicorn.Config(
            web,
            http=Connection,
            backlog=ACCEPTED_AT_ONCE,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=CLOSE_S,
        )
    )
    serve = asyncio.create_task(server.serve([sock]), name="HTTP intake")
    try:
        up = asyncio.create_task(server.up.wait())
        try:
            await asyncio.wait([up, serve], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await ended(up)
        sock.listen(WAITING_CONNECTIONS)  # The server has made it as short as what it accepts at once.
        address = sock.getsockname()
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        yield f"http://{shown}:{address[1]}"
    finally:
        stopping.set()
        server.should_exit = True
        await asyncio.wait([serve], timeout=CLOSE_S + 1)
        await ended(serve)
        sock.close()


async def _bound(host: str, port: int, variable: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = (
            await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(WAITING_CONNECTIONS)
        except OSError:
            sock.close()
            raise
    except OSError as exc:
        why = "it is in use; choose another, or 0 for any free one" if exc.errno == errno.EADDRINUSE else str(exc)
        raise OSError(f"{variable}: cannot listen on {host}:{port}: {why}") from exc
    return sock


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handlers, and with an event that says that it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
