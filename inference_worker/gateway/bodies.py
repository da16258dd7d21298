"""Reads the bodies of requests, each and all together within their bounds. What is in them is not looked at."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from fastapi import Request
from starlette.requests import ClientDisconnect

from inference_worker.gateway.problems import Refusal

MOST_BODY_BYTES: Final = 16 * 1024 * 1024
MOST_BYTES_AT_ONCE: Final = 256 * 1024 * 1024
"""Of all bodies that are being read or published."""

BODY_S: Final = 30.0
"""How long a client may take to send its body."""

CLOSE: Final = {"Connection": "close"}
"""Where the rest of a body is not read."""


class Bodies:
    """Reads bodies; what they hold is counted."""

    def __init__(
        self,
        *,
        most_bytes: int = MOST_BODY_BYTES,
        most_bytes_at_once: int = MOST_BYTES_AT_ONCE,
        within_s: float = BODY_S,
    ) -> None:
        self.most_bytes = most_bytes
        self._most_bytes_at_once = most_bytes_at_once
        self._within_s = within_s
        self._held_bytes = 0
        self._held_by: Counter[str] = Counter()

    @asynccontextmanager
    async def json(self, request: Request, tenant: str = "") -> AsyncGenerator[bytes, None]:
        """The body, which must say that it is JSON; it counts until the context is left.

        One tenant may hold half of the room, so that slow bodies of one do not shut the others out.
        """
        most_of_one = self._most_bytes_at_once // 2 if tenant else self._most_bytes_at_once
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Also keeps web pages of other sites out: a browser asks before it sends JSON elsewhere.
            detail = "The body must come as JSON: send the header Content-Type: application/json."
            raise Refusal(415, "unsupported_media_type", detail)
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > self.most_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(self._within_s):
                    async for chunk in request.stream():
                        body += chunk
                        self._held_bytes += len(chunk)
                        self._held_by[tenant] += len(chunk)
                        if len(body) > self.most_bytes:
                            raise self._too_large()
                        if self._held_bytes > self._most_bytes_at_once or self._held_by[tenant] > most_of_one:
                            raise Refusal(
                                503, "overloaded", "Too many bodies are being read; try again.", headers=CLOSE
                            )
            except TimeoutError:
                detail = f"The body did not arrive within {self._within_s:g} s."
                raise Refusal(408, "body_too_slow", detail, headers=CLOSE) from None
            except ClientDisconnect as exc:
                raise Refusal(400, "client_gone", "The client went away in the middle of its body.") from exc
            yield bytes(body)
        finally:
            self._held_bytes -= len(body)
            self._held_by[tenant] -= len(body)
            if not self._held_by[tenant]:
                del self._held_by[tenant]

    def _too_large(self) -> Refusal:
        return Refusal(413, "body_too_large", f"The body is larger than {self.most_bytes} bytes.", headers=CLOSE)
