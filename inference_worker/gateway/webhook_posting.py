"""One POST of a webhook, to exactly an address that the filter has allowed. No redirects, no proxies, no cookies."""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol

import httpx
import structlog

from inference_worker.billing.cloudevents import retry_after_s
from inference_worker.gateway.addresses import AddressFilter, NotAllowed, literal_address

log = structlog.get_logger(__name__)

CONNECT_S: Final = 5.0
"""For each address of the host."""
MOST_ADDRESSES_TRIED: Final = 4
MOST_ANSWER_BYTES: Final = 64 * 1024
ANSWER_S: Final = 2.0
"""How long an answer's body is read, which nobody looks at: closing at once would reset a receiver that writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What the receiver said."""

    status_code: int
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """The receiver said nothing; why, in words that its owner may read."""

    why: str


class Post(Protocol):
    """Sends a body to a URL, within the caller's time."""

    async def __call__(self, url: str, headers: Mapping[str, str], body: bytes) -> Answered | NoAnswer: ...


class PinnedPost:
    """Fills `Post`. A context manager; each call has a connection of its own.

    The URL that is asked for has the address in the place of the host, so that nothing below resolves the name again;
    the header Host, and the name that TLS checks, are the host's. Kept connections would be found by their address
    alone, and one that TLS has checked for a host would be used for another behind the same address.
    """

    def __init__(
        self,
        allowed: AddressFilter,
        *,
        now: Callable[[], float],
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        self._allowed = allowed
        self._now = now
        self._transport = httpx.AsyncHTTPTransport(
            verify=verify, trust_env=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )

    async def __aenter__(self) -> "PinnedPost":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._transport.aclose()

    async def __call__(self, url: str, headers: Mapping[str, str], body: bytes) -> Answered | NoAnswer:
        """See `Post`."""
        whole = httpx.URL(url)
        host = whole.raw_host.decode("ascii")
        try:
            addresses = await self._allowed.addresses(host, whole.port or (443 if whole.scheme == "https" else 80))
        except NotAllowed as exc:
            log.info("a webhook's host is not gone to", host=host, reason=str(exc))
            return NoAnswer("the host has no address, or one that is not public")
        last: NoAnswer = NoAnswer("the host has no address")
        for address in addresses[:MOST_ADDRESSES_TRIED]:
            request = _request(whole, host, address, headers, body)
            try:
                return await self._send(request)
            except (httpx.ConnectError, httpx.ConnectTimeout) as exc:  # Nothing was sent: the next one may be there.
                last = NoAnswer(_said(exc, "no connection"))
            except (httpx.HTTPError, OSError) as exc:
                return NoAnswer(_said(exc, "no answer"))
        return last

    async def _send(self, request: httpx.Request) -> Answered:
        response = await self._transport.handle_async_request(request)
        try:
            await _drain(response)
        finally:
            await response.aclose()
        return Answered(
            status_code=response.status_code, retry_after_s=retry_after_s(response.headers, now=self._now())
        )


def _request(url: httpx.URL, host: str, address: str, headers: Mapping[str, str], body: bytes) -> httpx.Request:
    extensions: dict[str, object] = {"timeout": {"connect": CONNECT_S}}
    name = host.rstrip(".") if literal_address(host) is None else address
    if url.scheme == "https":
        extensions["sni_hostname"] = name
    return httpx.Request(
        "POST",
        url.copy_with(host=address, fragment=None),
        headers={**headers, "Host": url.netloc.decode("ascii")},
        content=body,
        extensions=extensions,
    )


async def _drain(response: httpx.Response) -> None:
    """Read a little of what comes; the status is known, and nothing that happens now changes it."""
    assert isinstance(response.stream, httpx.AsyncByteStream)
    read_bytes = 0
    try:
        async with asyncio.timeout(ANSWER_S):
            async for part in response.stream:
                read_bytes += len(part)
                if read_bytes >= MOST_ANSWER_BYTES:
                    return
    except (TimeoutError, httpx.HTTPError, OSError):
        return


def _said(exc: Exception, what: str) -> str:
    return f"{what}: {str(exc)[:200] or type(exc).__name__}"
