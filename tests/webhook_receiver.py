"""Whom webhooks are sent to in tests, and what sends them: real sockets of the loopback, a name server of our own."""

import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from inference_worker.gateway.addresses import AddressFilter
from inference_worker.gateway.webhook_posting import PinnedPost
from tests.faults import wire
from tests.faults.wire import Exchange, HttpServer, Request
from tests.services import LOOPBACK


class Receiver(HttpServer):
    """Records every request; answers as `behaves` says, with 204 where it says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.behaves: Callable[[Exchange], Awaitable[None]] = wire.answer(204)

    async def answer(self, exchange: Exchange) -> None:
        self.requests.append(exchange.request)
        await self.behaves(exchange)


def resolving(*answers: Sequence[str]) -> Callable[[str, int], Awaitable[Sequence[str]]]:
    """A name server that says one of these after the other."""
    left = list(answers)

    async def resolve(_: str, __: int) -> Sequence[str]:
        return left.pop(0) if len(left) > 1 else left[0]

    return resolve


@asynccontextmanager
async def posting(
    *answers: Sequence[str], networks: Sequence[str] = (f"{LOOPBACK}/32",), verify: ssl.SSLContext | bool = True
) -> AsyncGenerator[PinnedPost, None]:
    allowed = AddressFilter(networks, resolve=resolving(*(answers or ([LOOPBACK],))))
    async with PinnedPost(allowed, now=time.time, verify=verify) as post:
        yield post
