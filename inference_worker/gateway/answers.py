"""Sends large answers in pieces, all together within a bound, and no slower than a client may read.

An answer is held whole until its last byte has left. Without a bound, clients that ask for large results and do not
read them would fill the memory. What an answer says is not looked at.
"""

import asyncio
from typing import Final

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_worker.gateway.problems import Refusal, answer

log = structlog.get_logger(__name__)

PIECE_BYTES: Final = 256 * 1024
MOST_BYTES_AT_ONCE: Final = 512 * 1024 * 1024
"""Of all answers that are larger than a piece and on their way."""

SEND_S: Final = 120.0
"""How long one may take to be read."""


class Paced:
    """A layer around the web application."""

    def __init__(self, web: ASGIApp, *, most_bytes_at_once: int = MOST_BYTES_AT_ONCE, within_s: float = SEND_S) -> None:
        self._web = web
        self._most_bytes_at_once = most_bytes_at_once
        self._within_s = within_s
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._web(scope, receive, send)
            return
        one = _Answer(self, send)
        try:
            await self._web(scope, receive, one.send)
        except _NotRead:
            # Nothing more is sent, so that the server closes the connection.
            log.info("a client did not read its answer in time", within_s=self._within_s)
        finally:
            self._held_bytes -= one.held_bytes
        if one.refusal is not None:
            await answer(scope["path"], one.refusal)(scope, receive, send)

    def take(self, size_bytes: int, *, begun: bool = False) -> bool:
        """Count an answer, if it may be sent now; of any size where there is no other, or where it has begun."""
        if self._held_bytes and self._held_bytes + size_bytes > self._most_bytes_at_once and not begun:
            return False
        self._held_bytes += size_bytes
        return True

    async def in_pieces(self, message: Message, body: bytes, send: Send) -> None:
        """Send a large body; each piece waits until the one before it has been read."""
        view, more = memoryview(body), message.get("more_body", False)
        try:
            async with asyncio.timeout(self._within_s):
                for start in range(0, len(body), PIECE_BYTES):
                    last = start + PIECE_BYTES >= len(body)
                    piece = bytes(view[start : start + PIECE_BYTES])
                    await send({"type": "http.response.body", "body": piece, "more_body": more or not last})
        except TimeoutError:
            raise _NotRead from None


class _NotRead(Exception):
    """The client takes too long."""


class _Answer:
    """One answer on its way."""

    def __init__(self, paced: Paced, send: Send) -> None:
        self._paced = paced
        self._send = send
        self.held_bytes = 0
        self.refusal: Refusal | None = None
        """What is said in the place of an answer that cannot be sent now."""

    async def send(self, message: Message) -> None:
        """Pass on what the application sends."""
        if self.refusal is not None:
            return
        if message["type"] == "http.response.start":
            headers = Headers(raw=list(message.get("headers", ())))
            announced = headers.get("content-length", "0")
            if not self._take(int(announced) if announced.isdigit() else 0):
                self.refusal = _too_many(headers.get("x-job-id"))
                return
        body = message.get("body", b"")
        if len(body) <= PIECE_BYTES:
            await self._send(message)
        else:
            if not self.held_bytes:  # A part of a stream, whose size nobody has announced.
                self._paced.take(len(body), begun=True)
                self.held_bytes = len(body)
            await self._paced.in_pieces(message, body, self._send)

    def _take(self, size_bytes: int) -> bool:
        if size_bytes <= PIECE_BYTES:
            return True
        if not self._paced.take(size_bytes):
            return False
        self.held_bytes = size_bytes
        return True


def _too_many(job_id: str | None) -> Refusal:
    where = "" if job_id is None else f" It is kept: ask GET /v1/jobs/{job_id}."
    detail = f"Too many large answers are on their way; this one cannot be sent now.{where}"
    return Refusal(503, "overloaded", detail, job_id=job_id, final=job_id is not None)
