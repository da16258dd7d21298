"""The worker's own HTTP port: probes, metrics, and a page for people. It asks nobody and only says what is known.

`/livez` depends on no neighbour, or an outage would restart the fleet.
"""

import errno
import hmac
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final, Protocol, get_args

import msgspec
from aiohttp import web

from inference_worker.logs import Level

CLOSE_S: Final = 1.0
"""How long requests that are under way may take at the end."""

Conditions = Mapping[str, tuple[bool, str]]
"""By name: whether it is met, and why not."""


class OpsServer:
    """Answers from what the callables say, which must not wait: nothing here may slow a probe."""

    def __init__(
        self,
        *,
        ready: Callable[[], Conditions],
        status: Callable[[], Mapping[str, object]],
        metrics: Callable[[str], tuple[bytes, str]],
        controls: "Controls | None" = None,
        token: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Without a token the controls are off, whoever asks."""
        self._controls = controls
        self._token = token
        self._ready = ready
        self._status = status
        self._metrics = metrics
        self.app = web.Application(middlewares=[_json_errors])
        self.app.add_routes(
            [
                web.get("/livez", self._livez),
                web.get("/healthz", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics_page),
                web.get("/status", self._status_page),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.post("/log-level", self._log_level),
            ]
        )

    @asynccontextmanager
    async def serving(self, host: str, port: int, named: str = "WORKER_HTTP_PORT") -> AsyncGenerator[int]:
        """Listen inside the context; hands up the port. `named` is the variable or the flag that says which.

        Raises:
            OSError: nothing can listen there; the text names the variable.
        """
        runner = web.AppRunner(self.app, access_log=None, handle_signals=False, shutdown_timeout=CLOSE_S)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as exc:
                why = "it is in use; choose another, or 0 for none" if exc.errno == errno.EADDRINUSE else str(exc)
                variable = "WORKER_HTTP_HOST" if isinstance(exc, socket.gaierror) else named
                raise OSError(f"{variable}: cannot listen on {host or '*'}:{port}: {why}") from exc
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()

    async def _livez(self, request: web.Request) -> web.Response:
        return _json({"status": "alive"})

    async def _readyz(self, request: web.Request) -> web.Response:
        conditions = self._ready()
        ready = all(ok for ok, _ in conditions.values())
        body = {
            "ready": ready,
            "conditions": {name: {"ok": ok, "reason": reason} for name, (ok, reason) in conditions.items()},
        }
        return _json(body, HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _metrics_page(self, request: web.Request) -> web.Response:
        page, content_type = self._metrics(request.headers.get("Accept", ""))
        return web.Response(body=page, headers={"Content-Type": content_type})

    async def _status_page(self, request: web.Request) -> web.Response:
        return _json(self._status())

    async def _pause(self, request: web.Request) -> web.Response:
        self._permitted(request).pause()
        return _json({"paused": True})

    async def _resume(self, request: web.Request) -> web.Response:
        self._permitted(request).resume()
        return _json({"paused": False})

    async def _log_level(self, request: web.Request) -> web.Response:
        controls = self._permitted(request)
        try:
            level = msgspec.json.decode(await request.read(), type=_WantedLevel).level
        except msgspec.MsgspecError as exc:
            raise web.HTTPBadRequest(reason=f'{exc}; accepted: {{"level": "{"|".join(get_args(Level))}"}}') from exc
        controls.log_level(level)
        return _json({"level": level})

    def _permitted(self, request: web.Request) -> "Controls":
        token = self._token()
        if self._controls is None or not token:
            raise web.HTTPForbidden(reason="the controls are off: set WORKER_HTTP_TOKEN to have them")
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise web.HTTPUnauthorized(reason="Authorization: Bearer <WORKER_HTTP_TOKEN> is needed")
        return self._controls


class Controls(Protocol):
    """What an operator may do to a running worker."""

    def pause(self) -> None:
        """Stop taking messages; what is in hand goes on."""

    def resume(self) -> None:
        """Take messages again."""

    def log_level(self, level: Level) -> None:
        """Log from this level on."""


class _WantedLevel(msgspec.Struct):
    level: Level


@web.middleware
async def _json_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as exc:
        response = _json({"error": exc.reason, "path": request.path}, exc.status)
        if allowed := exc.headers.get("Allow"):
            response.headers["Allow"] = allowed
        return response


def _json(body: Mapping[str, object], status: int = HTTPStatus.OK) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body, enc_hook=str),
        status=status,
        headers={"Content-Type": "application/json", "Cache-Control": "no-store"},
    )
