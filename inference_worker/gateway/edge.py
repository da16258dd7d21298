"""What every request meets first: an id, a key, and the count of its answer. It knows nothing of jobs.

A plain layer of ASGI and no middleware of the framework's: those hide from a handler that its client has gone, and an
answer to a fault of ours would pass them by.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final, cast

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_worker.gateway.bodies import CLOSE
from inference_worker.gateway.keys import ANYBODY, Caller, KeyFile, given_key
from inference_worker.gateway.metrics import GatewayMetrics, RefusedBecause, Route
from inference_worker.gateway.problems import Refusal, answer, is_openai
from inference_worker.timing import ended

OPEN_PATHS: Final = frozenset({"/", "/livez", "/readyz", "/healthz", "/metrics", "/docs", "/openapi.json"})
"""What is answered without a key: nothing of any job is in it."""

MOST_AT_ONCE: Final = 10_000
"""Requests under way, most of them waiting for the end of a job."""

_USABLE_ID: Final = re.compile("[!-~]{1,128}")
_REFUSED: Final[dict[str, RefusedBecause]] = {
    "queue_full": "queue_full",
    "queue_unavailable": "broker",
    "store_unavailable": "store",
    "idempotency_key_reused": "key_reused",
    "body_too_large": "too_large",
    "unauthorized": "unauthorized",
    "overloaded": "overloaded",
}
_OF_JOBS: Final = re.compile("/v1/jobs/[^/]+(/webhook(?:/replay)?)?")
_OPENAI: Final[dict[str, Route]] = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
}
_OPERATORS: Final[dict[str, Route]] = {"/v1/scale": "scale", "/v1/dead-letters": "dead_letters"}


class Edge:
    """The web application behind its door."""

    def __init__(self, web: ASGIApp, keys: KeyFile | None, metrics: GatewayMetrics) -> None:
        """Without keys nobody is asked who he is."""
        self._web = web
        self._keys = keys
        self._metrics = metrics
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._web(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # What GET would answer; the server leaves the body out.
            scope = {**scope, "method": "GET"}
        loop = asyncio.get_running_loop()
        begun, headers, status = loop.time(), Headers(scope=scope), 500
        given = headers.get("x-request-id", "")
        request_id = given if _USABLE_ID.fullmatch(given) else secrets.token_hex(8)

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        self._under_way += 1
        try:
            caller = self._caller(scope["path"], headers)
            if caller is None:
                await self._unauthorized(scope, receive, noted)
            elif self._under_way > MOST_AT_ONCE and scope["path"] not in OPEN_PATHS:
                detail = "Too many requests are under way at this gateway; try again."
                await self._refuse(Refusal(503, "overloaded", detail, headers=CLOSE), scope, receive, noted)
            else:
                scope.setdefault("state", {})["caller"] = caller
                await self._web(scope, receive, noted)
        finally:
            self._under_way -= 1
            self._metrics.request(route_of(scope["method"], scope["path"]), status, loop.time() - begun)

    def _caller(self, path: str, headers: Headers) -> Caller | None:
        if self._keys is None or path in OPEN_PATHS:
            return ANYBODY
        key = given_key(headers)
        return None if key is None else self._keys.caller(key)

    async def _unauthorized(self, scope: Scope, receive: Receive, send: Send) -> None:
        detail = "An API key that is known here is needed: Authorization: Bearer <key>, or X-API-Key: <key>."
        headers = {"WWW-Authenticate": 'Bearer realm="inference-worker"'}
        if scope["method"] not in ("GET", "HEAD", "DELETE"):
            headers |= CLOSE
        await self._refuse(Refusal(401, "unauthorized", detail, headers=headers), scope, receive, send)

    async def _refuse(self, refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        count_refused(self._metrics, scope["method"], scope["path"], refusal)
        await answer(scope["path"], refusal)(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """Who asks."""
    return cast(Caller, request.scope["state"]["caller"])


@asynccontextmanager
async def client_gone(receive: Receive) -> AsyncGenerator[asyncio.Event, None]:
    """Inside it the event is set once the client has gone. Its body has been read, or does not matter."""
    gone = asyncio.Event()

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    listening = asyncio.create_task(listen())
    try:
        yield gone
    finally:
        await ended(listening)


async def tenant_of(request: Request) -> str:
    """Whose request it is."""
    return caller_of(request).tenant


def permit_operators(request: Request) -> None:
    """Only operators may go on.

    Raises:
        Refusal: it is none.
    """
    if not caller_of(request).operator:
        raise Refusal(403, "operators_only", 'This is for operators: a key with "operator": true is needed.')


def route_of(method: str, path: str) -> Route:
    """Which of a few routes a request is counted under, whatever its path holds."""
    if path in _OPENAI:
        return _OPENAI[path]
    if path == "/v1/jobs":
        return "submit" if method == "POST" else "list"
    if found := _OF_JOBS.fullmatch(path):
        return "webhook" if found[1] else "cancel" if method == "DELETE" else "look"
    if is_openai(path):
        return "models"
    for prefix, route in _OPERATORS.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return route
    return "other"


def count_refused(metrics: GatewayMetrics, method: str, path: str, refusal: Refusal) -> None:
    """Count a refusal, where it is that of a job."""
    submits = route_of(method, path) in ("submit", "chat_completions", "completions", "embeddings")
    if method == "POST" and submits and refusal.job_id is None:
        reason: RefusedBecause = "invalid" if refusal.status < 500 else "broker"
        metrics.refused(_REFUSED.get(refusal.code, reason))
