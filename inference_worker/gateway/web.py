"""The HTTP intake as one web application: its routes, and what becomes of errors.

What a job is and where it goes is `jobs`; who may come in is `edge`; listening is `serving`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from inference_worker.errors import StoreUnavailable
from inference_worker.gateway import description, openai_api
from inference_worker.gateway.answers import Paced
from inference_worker.gateway.bodies import Bodies
from inference_worker.gateway.edge import Edge, caller_of, client_gone, count_refused
from inference_worker.gateway.job_requests import read_job, read_key, read_limit, read_wait
from inference_worker.gateway.jobs import Jobs
from inference_worker.gateway.keys import KeyFile
from inference_worker.gateway.metrics import GatewayMetrics
from inference_worker.gateway.openai_api import ModelNames
from inference_worker.gateway.problems import Refusal, answer, json_answer
from inference_worker.gateway.watch import Conditions

Mount = Callable[[FastAPI], None]
"""Adds routes of another part."""


async def no_models() -> list[str]:
    """Nobody says which."""
    return []


def no_webhooks(_: str, __: str) -> str | None:
    """What is wrong with any webhook where none can be signed."""
    return "cannot be signed: there is no secret for webhooks (GATEWAY_WEBHOOK_SECRET)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """What the application is made of."""

    jobs: Jobs
    metrics: GatewayMetrics
    wait_s: float
    ready: Callable[[], Conditions]
    keys: KeyFile | None = None
    bodies: Bodies = field(default_factory=Bodies)
    answers: Callable[[ASGIApp], ASGIApp] = Paced
    models: ModelNames = no_models
    check_webhook: Callable[[str, str], str | None] = no_webhooks
    """What is wrong with a tenant's webhook to a URL."""
    webhooks: bool = False
    """Whether somebody's webhooks can be signed."""
    others: tuple[Mount, ...] = ()


def app(gateway: Gateway) -> ASGIApp:
    """The web application."""
    web = FastAPI(title="inference-worker", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    _around(web, gateway)
    _jobs(web, gateway)
    openai_api.mount(web, gateway.jobs, gateway.bodies, gateway.models, wait_s=gateway.wait_s)
    for mount in gateway.others:
        mount(web)
    _handle_errors(web, gateway.metrics)
    return Edge(gateway.answers(web), gateway.keys, gateway.metrics)


def _jobs(web: FastAPI, gateway: Gateway) -> None:
    jobs, bodies = gateway.jobs, gateway.bodies

    @web.post("/v1/jobs", tags=["jobs"], **description.submit(webhooks=gateway.webhooks))
    async def submit(request: Request) -> Response:
        """Queue a request for the model. The answer comes once the queue has it."""
        tenant = caller_of(request).tenant
        header_key = read_key(request.headers.get("idempotency-key"))
        async with bodies.json(request, tenant) as body:
            job = read_job(
                body,
                jobs.endpoints,
                header_key=header_key,
                check_webhook=lambda url: gateway.check_webhook(tenant, url),
            )
            taken = await jobs.accept(job, tenant)
        headers = {"Location": f"/v1/jobs/{taken.record.job_id}"}
        if not taken.new:
            headers["Idempotency-Replayed"] = "true"
        return json_answer(await jobs.accepted_view(taken), 202, headers)

    @web.get("/v1/jobs", tags=["jobs"], **description.LIST)
    async def list_jobs(request: Request) -> Response:
        """The caller's jobs, newest first."""
        limit = read_limit(request.query_params.get("limit"))
        after = request.query_params.get("after")
        return json_answer(await jobs.page(caller_of(request).tenant, limit=limit, after=after))

    @web.get("/v1/jobs/{job_id}", tags=["jobs"], **description.LOOK)
    async def look(job_id: str, request: Request) -> Response:
        """The state of a job, and its result once it has ended."""
        wait_s = read_wait(request.query_params.get("wait"))
        async with client_gone(request.receive) as gone:
            return json_answer(await jobs.look(job_id, caller_of(request).tenant, wait_s, gone))

    @web.delete("/v1/jobs/{job_id}", tags=["jobs"], **description.CANCEL)
    async def cancel(job_id: str, request: Request) -> Response:
        """Cancel a job: a queued one is never run, the call of a running one is closed."""
        return json_answer(await jobs.cancel(job_id, caller_of(request).tenant))


def _around(web: FastAPI, gateway: Gateway) -> None:
    document: dict[str, object] = {}

    @web.get("/", include_in_schema=False)
    async def index() -> Response:
        return json_answer(
            {"service": "inference-worker", "jobs": "/v1/jobs", "docs": "/docs", "openapi": "/openapi.json"}
        )

    @web.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        if not document:
            document.update(description.describe(web, keyed=gateway.keys is not None))
        return json_answer(document)

    @web.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        from fastapi.openapi.docs import get_swagger_ui_html

        return get_swagger_ui_html(openapi_url="/openapi.json", title="inference-worker")

    @web.get("/livez", include_in_schema=False)
    @web.get("/healthz", include_in_schema=False)
    async def livez() -> Response:
        return json_answer({"status": "alive"})

    @web.get("/readyz", include_in_schema=False)
    async def readyz() -> Response:
        conditions = gateway.ready()
        ready = all(ok for ok, _ in conditions.values())
        body = {
            "ready": ready,
            "conditions": {name: {"ok": ok, "reason": reason} for name, (ok, reason) in conditions.items()},
        }
        return json_answer(body, 200 if ready else 503)

    @web.get("/metrics", include_in_schema=False)
    async def metrics(request: Request) -> Response:
        page, content_type = gateway.metrics.exposition(request.headers.get("accept", ""))
        return Response(page, 200, {"Content-Type": content_type})


def _handle_errors(web: FastAPI, metrics: GatewayMetrics) -> None:
    def told(request: Request, refusal: Refusal) -> Response:
        count_refused(metrics, request.method, request.url.path, refusal)
        return answer(request.url.path, refusal, operator=caller_of(request).operator)

    @web.exception_handler(Refusal)
    async def refused(request: Request, exc: Refusal) -> Response:
        return told(request, exc)

    @web.exception_handler(StoreUnavailable)
    async def silent(request: Request, exc: StoreUnavailable) -> Response:
        return told(request, Refusal(503, "store_unavailable", "The result store cannot be asked.", because=str(exc)))

    @web.exception_handler(HTTPException)
    async def by_framework(request: Request, exc: HTTPException) -> Response:
        code, headers = {404: "not_found", 405: "method_not_allowed"}.get(exc.status_code, "http_error"), exc.headers
        if exc.status_code == 405:
            headers = {"Allow": ", ".join(_methods(web, request))}
        detail = f"{exc.detail}: {request.method} {request.url.path}; GET /openapi.json has what there is."
        return told(request, Refusal(exc.status_code, code, detail, headers=headers))

    @web.exception_handler(Exception)
    async def ours(request: Request, _: Exception) -> Response:
        return told(request, Refusal(500, "internal_error", "This is a fault of the server; its log says more."))


def _methods(web: FastAPI, request: Request) -> list[str]:
    """All that a path can do; the framework names those of one route, and here a path has one for each method."""
    found: set[str] = set()
    for route in web.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found)
