"""One HTTP connection as uvicorn has it, within the bounds that uvicorn does not set.

A head that does not come, more connections than there are descriptors, a refusal that its client cannot read because
it is still sending: all three before there is a request that somebody could answer. What is answered is `web`.
"""

import asyncio
import resource
from http import HTTPStatus
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from inference_worker.gateway.bodies import CLOSE
from inference_worker.gateway.problems import Refusal, answer

HEAD_S: Final = 20.0
"""From the connection, or the first byte of a further request, to the end of the head."""

LINGER_S: Final = 10.0
"""How long is read, and thrown away, what a client still sends after it was refused. Closed at once, its own system
would throw the refusal away: a body that is too large would look like a connection that broke."""

MOST_CONNECTIONS: Final = 20_000
MOST_SPARE_FILES: Final = 256
"""Descriptors that are left to everything else: neighbours, webhooks, files."""

ACCEPTED_AT_ONCE: Final = 8
"""Between two looks at how many there are; also how often asyncio says that it has no descriptor, each time."""


def most_connections() -> int:
    """How many there may be, by what this process may open."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(files - min(MOST_SPARE_FILES, files // 2), MOST_CONNECTIONS)


_NO_PATH: Final = ""
"""There is none yet that might want another shape."""
_NOT_HTTP: Final = Refusal(400, "bad_request", "This is no HTTP request that is understood here.", headers=CLOSE)
_FULL: Final = Refusal(503, "overloaded", "There are too many connections; try again.", headers=CLOSE)


class Connection(H11Protocol):
    """Given to uvicorn in the place of its own, whose rules hold but for those above."""

    _head: asyncio.TimerHandle | None = None
    _lingering: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # As it is there.
        """It stands."""
        full = len(self.connections) >= most_connections()
        super().connection_made(_Closing(transport, self))  # type: ignore[arg-type]  # All of it that is used.
        if full:
            self._say(_FULL)
            transport.close()
            return
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Some bytes of it."""
        if self._lingering is not None or self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timers()
        elif not self.transport.is_closing():
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._stop_timers()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._say(_NOT_HTTP)
        self.transport.close()

    def _say(self, refusal: Refusal) -> None:
        said = answer(_NO_PATH, refusal)
        reason = HTTPStatus(refusal.status).phrase
        head = h11.Response(status_code=refusal.status, headers=said.raw_headers, reason=reason)
        events = (head, h11.Data(data=bytes(said.body)), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))

    def _unsupported_upgrade_warning(self) -> None:
        """An offer that nobody takes up; uvicorn would say which package to install for it."""

    def _expect_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(HEAD_S, self._no_head)

    def _stop_timers(self) -> None:
        for timer in (self._head, self._lingering):
            if timer is not None:
                timer.cancel()
        self._head = self._lingering = None

    def _no_head(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def close_after(self, transport: asyncio.Transport) -> bool:
        """Whether it is read on for a while before it is closed: the client is in the middle of a body."""
        if self.conn.their_state not in (h11.SEND_BODY, h11.ERROR) or transport.is_closing():
            return False
        transport.resume_reading()
        transport.write_eof()
        self._lingering = self.loop.call_later(LINGER_S, transport.close)
        return True


class _Closing:
    """A transport whose `close` may take its time; all else is the transport's own."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport = transport
        self._connection = connection
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether nothing more is answered here."""
        return self._closed or self._transport.is_closing()

    def close(self) -> None:
        """Close it, at once or in a while."""
        if not self._closed:
            self._closed = True
            if not self._connection.close_after(self._transport):
                self._transport.close()
