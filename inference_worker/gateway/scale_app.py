"""The web application of the `scaler` process: the signal, probes and metrics, and nothing of jobs."""

import asyncio

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from inference_worker.gateway.keys import KeyFile, given_key
from inference_worker.gateway.problems import Refusal, answer, json_answer
from inference_worker.gateway.scale import Permit, mount
from inference_worker.scale_metrics import ScaleCollector
from inference_worker.scaler import NotSeen, ScaleView


def permit_of(keys: KeyFile | None) -> Permit:
    """Who may see the signal: an operator; anybody, where nobody is asked who he is."""

    def permit(request: Request) -> None:
        if keys is None:
            return
        key = given_key(request.headers)
        caller = None if key is None else keys.caller(key)
        if caller is None:
            detail = "An API key that is known here is needed: Authorization: Bearer <key>, or X-API-Key: <key>."
            raise Refusal(401, "unauthorized", detail, headers={"WWW-Authenticate": 'Bearer realm="inference-worker"'})
        if not caller.operator:
            raise Refusal(403, "operators_only", 'This is for operators: a key with "operator": true is needed.')

    return permit


def app(view: ScaleView, permit: Permit, stop: asyncio.Event) -> FastAPI:
    """The scaler's web application: the signal, probes, metrics."""
    web = FastAPI(title="inference-worker scaler", openapi_url=None, docs_url=None, redoc_url=None)
    collector = ScaleCollector(view)
    mount(web, {view.queue: view}, permit)

    @web.get("/livez")
    @web.get("/healthz")
    async def livez() -> Response:
        return json_answer({"status": "alive"})

    @web.get("/readyz")
    async def readyz() -> Response:
        conditions = {"queue": _condition(view), "running": (not stop.is_set(), "stopping" if stop.is_set() else "")}
        ready = all(ok for ok, _ in conditions.values())
        told = {name: {"ok": ok, "reason": reason} for name, (ok, reason) in conditions.items()}
        return json_answer({"ready": ready, "conditions": told}, 200 if ready else 503)

    @web.get("/metrics")
    async def metrics(request: Request) -> Response:
        page, content_type = collector.page(request.headers.get("accept", ""))
        return Response(page, 200, {"Content-Type": content_type})

    @web.exception_handler(Refusal)
    async def refused(request: Request, exc: Refusal) -> Response:
        return answer(request.url.path, exc)

    @web.exception_handler(HTTPException)
    async def by_framework(request: Request, exc: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(exc.status_code, "http_error")
        detail = f"{exc.detail}: {request.method} {request.url.path}"
        return answer(request.url.path, Refusal(exc.status_code, code, detail, headers=exc.headers))

    return web


def _condition(view: ScaleView) -> tuple[bool, str]:
    try:
        view.look()
    except NotSeen as exc:
        return False, str(exc)
    return True, ""
