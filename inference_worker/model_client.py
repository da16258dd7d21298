"""Calls the model's HTTP server. Every status is an answer; what is no answer is one of the failures in `errors.py`.

Nothing here judges a status or retries a call. The one exception: a request of which no byte was sent, because its
pooled connection turned out to be closed, goes out again.
"""

import asyncio
import math
import re
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final, Self

import aiohttp
from aiohttp.abc import AbstractStreamWriter

from inference_worker.errors import BadResponse, ModelCut, ModelFailure, ModelGone, ModelSlow
from inference_worker.event_stream import EventParser, Reassembly, choices_asked
from inference_worker.llmd_retry import failure_text
from inference_worker.messages import shown_id
from inference_worker.ports import NO_HEADERS, Answer
from inference_worker.stamping import overlaid
from inference_worker.timing import ByteBudget, quietly

KEEP_ALIVE_S: Final = 2.0
"""Below the 5 s after which common model servers close an idle connection."""
UNCOUNTED_BYTES: Final = 64 * 1024
"""What every call may hold without asking the budget."""
WRITE_BYTES: Final = 256 * 1024
MOST_WARM: Final = 16
WARM_S: Final = 5.0
LAST_CHUNK_S: Final = 0.1
LONGEST_HEADER_ID: Final = 200
_VISIBLE: Final = re.compile("[!-~]*")
DROPPED_BECAUSE: Final = "x-llm-d-request-dropped-reason"
KEPT_HEADERS: Final = (DROPPED_BECAUSE, "x-llm-d-flow-band-headroom", "x-llm-d-flow-queue-duration-ms")
"""What gates learn from and results repeat; each is given on up to `LONGEST_KEPT_HEADER` characters."""
LONGEST_KEPT_HEADER: Final = 200
MOST_UNSENT: Final = 3
"""How often one call may find its pooled connection closed before anything was sent."""


class HttpModelClient:
    """One session to one model server."""

    def __init__(
        self,
        base_url: Callable[[], str],
        *,
        now: Callable[[], float],
        budget: ByteBudget,
        max_response_bytes: int,
        api_key: Callable[[], str | None] = lambda: None,
        tls: ssl.SSLContext | None = None,
        health_path: str = "/health",
        ttft_header: str = "x-ttft",
        tbt_header: str = "x-tbt",
    ) -> None:
        """`now` tells Unix seconds, for a `Retry-After` that is a date. Make it inside a running loop."""
        self._base_url = base_url
        self._now = now
        self._budget = budget
        self._max_response_bytes = max_response_bytes
        self._api_key = api_key
        self._health_path = health_path
        self._ttft_header = ttft_header
        self._tbt_header = tbt_header
        # No limits but the caller's: a call that waited for a connection would spend its time unseen.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=tls if tls is not None else True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
            # The model is next door: compressing costs it more than sending.
            headers={"User-Agent": "inference-worker", "Accept-Encoding": "identity"},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def infer(
        self,
        *,
        endpoint: str,
        payload: bytes,
        stream: bool,
        request_id: str,
        timeout_s: float,
        headers: Mapping[str, str] = NO_HEADERS,
        base_url: str | None = None,
    ) -> Answer:
        """Send a payload, with `headers` besides our own, and wait for the whole answer. `base_url` is not looked at.

        Of our own only the content type gives way to one in `headers`.

        Raises:
            ModelGone, ModelCut, ModelSlow, BadResponse: see `errors.py`.
        """
        call = _Call(self._budget, self._max_response_bytes)
        try:
            async with asyncio.timeout(timeout_s):
                headers = overlaid({"Content-Type": "application/json"}, headers)
                headers = overlaid(headers, self._headers(shown_id(request_id), stream))
                if "@" in self._base_url().partition("://")[2].partition("/")[0]:
                    # The user in the URL is who calls; the driver writes that header, and refuses to with another one.
                    headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
                return await self._answered(call, endpoint, payload, stream, headers)
        except TimeoutError as exc:
            raise ModelSlow(f"no whole answer within {timeout_s:g} s") from exc
        finally:
            call.end()

    async def warm(self, connections: int) -> None:
        """Open connections ahead of the first requests, 16 at most. Never fails."""
        async with asyncio.TaskGroup() as group:
            # All at once: none has been given back when the others look for one, so each opens its own.
            for _ in range(min(connections, MOST_WARM)):
                group.create_task(self._warm_one())

    async def _warm_one(self) -> None:
        # RuntimeError: the client was closed meanwhile, since nobody names its gateway any more.
        with suppress(aiohttp.ClientError, OSError, TimeoutError, RuntimeError):
            async with asyncio.timeout(WARM_S):
                response = await self._session.get(self._base_url() + self._health_path, allow_redirects=False)
                try:
                    await response.content.readexactly(UNCOUNTED_BYTES)
                except asyncio.IncompleteReadError:  # All of it has been read: the connection is kept.
                    response.release()
                finally:
                    response.close()

    async def _answered(
        self, call: "_Call", endpoint: str, payload: bytes, stream: bool, headers: Mapping[str, str]
    ) -> Answer:
        """Call, and translate what aiohttp raises: here alone."""
        begun_at = asyncio.get_running_loop().time()
        for tried in range(1, MOST_UNSENT + 1):
            call.body = _Body(payload)
            try:
                call.response = response = await self._session.post(
                    self._base_url() + endpoint, data=call.body, headers=headers, allow_redirects=False
                )
                if stream and 200 <= response.status < 300 and response.content_type == "text/event-stream":
                    return await self._read_stream(call, response, choices_asked(payload), begun_at)
                return await self._read_whole(call, response)
            except aiohttp.ClientConnectorError as exc:
                raise ModelGone(f"no connection to the model: {exc}") from exc
            except (aiohttp.ClientConnectionError, OSError) as exc:
                if call.body.begun or tried == MOST_UNSENT:
                    raise _failure(exc, call, self._now()) from exc
            except aiohttp.ClientError as exc:
                raise _failure(exc, call, self._now()) from exc
        raise AssertionError("the last try returns or raises")

    def _headers(self, request_id: str, stream: bool) -> dict[str, str]:
        headers: dict[str, str] = {}
        if len(request_id) <= LONGEST_HEADER_ID and _visible(request_id):
            headers["X-Request-Id"] = request_id
        key = (self._api_key() or "").strip()
        if key and _visible(key):
            headers["Authorization"] = f"Bearer {key}"
        if stream:
            # llama.cpp closes after a stream though it promises not to; the next call must not meet that connection.
            headers["Connection"] = "close"
        return headers

    async def _read_whole(self, call: "_Call", response: aiohttp.ClientResponse) -> Answer:
        if (promised := response.content_length or 0) > self._max_response_bytes:
            raise BadResponse(f"the answer has {promised} bytes, at most {self._max_response_bytes} are taken")
        chunks: list[bytes] = []
        async for chunk in response.content.iter_any():
            await call.hold(len(chunk))
            chunks.append(chunk)
        if not chunks and 200 <= response.status < 300 and _endless(response):
            raise ModelCut("the connection was closed after the headers of an answer without a length")
        body = b"".join(chunks)
        if len(body) > UNCOUNTED_BYTES:
            await asyncio.sleep(0)  # It will be parsed and written whole: others may run in between.
        return Answer(
            status_code=response.status,
            reason=_readable(response.reason or ""),
            body=body,
            ttft_s=_seconds(response.headers.get(self._ttft_header)),
            tbt_s=_seconds(response.headers.get(self._tbt_header)),
            retry_after_s=retry_after_s(response.headers.get("Retry-After"), self._now()),
            headers=_kept(response.headers),
        )

    async def _read_stream(
        self, call: "_Call", response: aiohttp.ClientResponse, choices: int, begun_at: float
    ) -> Answer:
        clock = asyncio.get_running_loop().time
        parser = EventParser(max(self._max_response_bytes, UNCOUNTED_BYTES))
        answer = Reassembly(choices=choices, limit_bytes=self._max_response_bytes)
        async for chunk in response.content.iter_any():
            answer.add(parser.feed(chunk), clock())
            await call.hold(answer.size_bytes + parser.held_bytes - call.held_bytes)
            if answer.done:
                # The end of the HTTP body is all that may follow; a server that forgets it must not hold us up.
                await quietly(
                    response.content.readexactly(UNCOUNTED_BYTES), LAST_CHUNK_S, aiohttp.ClientError, EOFError
                )
                break
        whole = answer.finish()
        return Answer(
            status_code=response.status,
            reason=_readable(response.reason or ""),
            body=whole.body,
            ttft_s=whole.first_token_at - begun_at if whole.first_token_at is not None else None,
            tbt_s=whole.tbt_s,
            usage=whole.usage,
            headers=_kept(response.headers),
        )


class _Call:
    """What one call holds: bytes of its answer, and its connection."""

    def __init__(self, budget: ByteBudget, max_bytes: int) -> None:
        self._budget = budget
        self._max_bytes = max_bytes
        self._counted_bytes = 0
        self.held_bytes = 0
        self.body: _Body | None = None
        self.response: aiohttp.ClientResponse | None = None

    async def hold(self, size_bytes: int) -> None:
        """Have `size_bytes` more of an answer.

        Raises:
            BadResponse: it is more than an answer may have.
        """
        self.held_bytes += size_bytes
        if self.held_bytes > self._max_bytes:
            raise BadResponse(f"the answer has more than {self._max_bytes} bytes")
        if (over := self.held_bytes - UNCOUNTED_BYTES - self._counted_bytes) > 0:
            await self._budget.acquire(self, over)
            self._counted_bytes += over

    def end(self) -> None:
        """Give back what is held, and cut the connection of an answer that has not been read to its end.

        The model stops when it sees the connection closed. It would not see it while bytes of ours wait for a server
        that does not read, so they are thrown away.
        """
        self._budget.release(self, self._counted_bytes)
        self._counted_bytes = 0
        if self.response is not None:
            # None once the answer's last byte has come: the connection may be another call's by now.
            if self.response.connection is not None and self.response.connection.transport is not None:
                self.response.connection.transport.abort()
            self.response.close()
        elif self.body is not None and self.body.transport is not None:
            self.body.transport.abort()


class _Body(aiohttp.Payload):
    """A request's body that knows whether any of the request may have reached the network."""

    def __init__(self, payload: bytes) -> None:
        super().__init__(payload, content_type="application/json")
        self._payload = payload
        self.begun = False
        self.transport: asyncio.WriteTransport | None = None

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return len(self._payload)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The body as text."""
        return self._payload.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Send the headers, which wait in the writer for the first bytes of the body, and the body."""
        # A connection that the server has closed in the meantime shows as closed once the loop has looked at its
        # sockets, which takes two rounds: in the first it finds what came, in the second that is handled.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if writer.transport is None or writer.transport.is_closing():
            raise ConnectionResetError("the connection was closed before anything was sent")
        self.transport, self.begun = writer.transport, True
        rest = memoryview(self._payload)
        for start in range(0, len(rest), WRITE_BYTES):
            await writer.write(rest[start : start + WRITE_BYTES])

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """The same: the length is the body's own."""
        await self.write(writer)


def _failure(exc: Exception, call: _Call, now: float) -> ModelFailure:
    """What an exception of aiohttp's means."""
    if call.response is not None:
        if isinstance(exc.__cause__, aiohttp.http_exceptions.ContentEncodingError):
            return BadResponse(f"the answer cannot be decompressed: {exc.__cause__.message}")
        return _cut(exc, call.response, now)
    if isinstance(exc, aiohttp.ServerDisconnectedError) and not isinstance(exc.message, str):
        return ModelCut("the connection was closed within the headers of the answer")
    if isinstance(exc, aiohttp.ClientResponseError):
        return ModelCut(f"the answer is no HTTP: {exc.message}")
    return ModelGone(f"the connection was closed before any answer: {exc}")


def _cut(exc: Exception, response: aiohttp.ClientResponse, now: float) -> ModelCut:
    """An answer without its end. The head of an error tells all that a next try and gates need."""
    if response.status < 400:
        return ModelCut(f"the answer stopped before its end: {exc}")
    headers = _kept(response.headers)
    said = f"{response.status}, and the answer stopped before its end"
    return ModelCut(
        failure_text(said, headers.get(DROPPED_BECAUSE), str(exc)),
        response.status,
        headers=headers,
        retry_after_s=retry_after_s(response.headers.get("Retry-After"), now),
    )


def _readable(text: str) -> str:
    """What an HTTP head says, fit to be stored: bytes that are not UTF-8 come as half characters, which are no text."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _kept(headers: Mapping[str, str]) -> Mapping[str, str]:
    kept = {name: _readable(headers[name])[:LONGEST_KEPT_HEADER] for name in KEPT_HEADERS if name in headers}
    return kept or NO_HEADERS


def _visible(text: str) -> bool:
    return _VISIBLE.fullmatch(text) is not None


def _endless(response: aiohttp.ClientResponse) -> bool:
    """Whether only the end of the connection tells where the body ends."""
    headers = response.headers
    return "Content-Length" not in headers and "Transfer-Encoding" not in headers and response.status != 204


def _seconds(text: str | None) -> float | None:
    try:
        seconds = float(text) if text is not None else -1.0
    except ValueError:
        return None
    return seconds if 0.0 <= seconds < math.inf else None


def retry_after_s(text: str | None, now: float) -> float | None:
    """The seconds that a `Retry-After` asks for: a number, or a date."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            date = parsedate_to_datetime(text)
        except (ValueError, OverflowError):
            return None
        seconds = (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp() - now
    return max(seconds, 0.0) if math.isfinite(seconds) else None
