"""TLS in front of a plain server: a proxy that ends TLS, and the certificates of `tests/samples/tls/`.

Not here: faults. Those are the plain proxy's (`proxy.py`), which can stand behind this one.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from tests.services import LOOPBACK, free_port

SAMPLES = Path(__file__).resolve().parents[1] / "samples" / "tls"
CA = str(SAMPLES / "ca.pem")
STRANGER = str(SAMPLES / "stranger.pem")
"""An authority that has signed nothing of ours."""

TRUST = {"TLS_CA_FILE": CA}
CLIENT = TRUST | {"TLS_CERT_FILE": str(SAMPLES / "client.pem"), "TLS_KEY_FILE": str(SAMPLES / "client.key")}
HANDSHAKE_S = 5.0
SECURE = {"amqp": "amqps", "redis": "rediss", "http": "https"}


class TlsFront:
    """`async with TlsFront("http://127.0.0.1:8000") as front:` serves the same at `front.url`, over TLS.

    With `clients_prove_themselves` a client without a certificate of our authority is refused: up to TLS 1.2 within its
    handshake, from 1.3 on after it, when it believes itself connected.
    """

    def __init__(
        self,
        url: str,
        *,
        clients_prove_themselves: bool = False,
        newest: ssl.TLSVersion = ssl.TLSVersion.MAXIMUM_SUPPORTED,
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._server_host, self._server_port = parts.hostname, parts.port
        self.port = free_port()
        user, at, _ = parts.netloc.rpartition("@")
        self.url = urlunsplit(parts._replace(scheme=SECURE[parts.scheme], netloc=f"{user}{at}{LOOPBACK}:{self.port}"))
        self.proven: list[str] = []
        """The common name in each client's certificate, in the order of arrival; empty for a client without one."""
        self.refused = 0
        """Handshakes that failed, whoever ended them."""
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=CA)
        self._context.load_cert_chain(SAMPLES / "server.pem", SAMPLES / "server.key")
        self._context.verify_mode = ssl.CERT_REQUIRED if clients_prove_themselves else ssl.CERT_OPTIONAL
        self._context.maximum_version = newest
        self._links: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._arrived, LOOPBACK, self.port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        links = list(self._links)
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)

    def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._links.add(link)
        link.add_done_callback(self._links.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Secured(self._context, reader, writer)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await client.handshake()
        except (OSError, EOFError, TimeoutError):
            self.refused += 1
            writer.close()
            return
        self.proven.append(client.common_name)
        try:
            server_reader, server_writer = await asyncio.open_connection(self._server_host, self._server_port)
        except OSError:
            writer.close()
            return
        up = asyncio.ensure_future(_pass(client.read, server_writer.write, server_writer))
        down = asyncio.ensure_future(_pass(lambda: server_reader.read(65536), client.write, writer))
        try:
            # Either side's end is the end: half-open connections do not exist over TLS.
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            writer.close()
            server_writer.close()


class _Secured:
    """The server's side of TLS, by hand: asyncio's own drops the alert that tells a refused client why."""

    def __init__(self, context: ssl.SSLContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._goes, server_side=True)

    @property
    def common_name(self) -> str:
        certificate: dict[str, Any] = self._tls.getpeercert() or {}
        names = certificate.get("subject", ())
        return next((str(value) for pairs in names for name, value in pairs if name == "commonName"), "")

    async def handshake(self) -> None:
        """Raises: ssl.SSLError, after its alert was sent; OSError, EOFError where the client has gone."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                await self._more()
            else:
                return
            finally:
                self._flush()

    async def read(self) -> bytes:
        """What has come; nothing at the end."""
        while True:
            try:
                return self._tls.read(65536)
            except ssl.SSLWantReadError:
                try:
                    await self._more()
                except EOFError:
                    return b""
            except ssl.SSLZeroReturnError:
                return b""

    def write(self, data: bytes) -> None:
        self._tls.write(data)
        self._flush()

    def _flush(self) -> None:
        if data := self._goes.read():
            self._writer.write(data)

    async def _more(self) -> None:
        if not (data := await self._reader.read(65536)):
            raise EOFError
        self._came.write(data)


async def _pass(
    read: Callable[[], Awaitable[bytes]], write: Callable[[bytes], None], writer: asyncio.StreamWriter
) -> None:
    with suppress(OSError):
        while data := await read():
            write(data)
            await writer.drain()
