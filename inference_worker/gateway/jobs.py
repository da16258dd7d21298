"""The HTTP intake: `POST /v1/jobs`, `GET /v1/jobs/{job_id}`.

`Jobs` knows what was accepted here and asks the result store for the rest; `app` puts HTTP around it; `serving`
listens. Which broker and which store is nobody's business here. A job is accepted once the broker has confirmed it,
never before.
"""

import asyncio
import contextlib
import errno
import math
import socket
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Literal, Protocol

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from inference_worker.errors import QueueFull, StoreUnavailable, TransportLost
from inference_worker.messages import DEAD_LETTERED, ENDPOINTS, LONGEST_TIMEOUT_S, encode_request, usable_id
from inference_worker.ports import ResultStore
from inference_worker.timing import ended

MOST_BODY_BYTES: Final = 16 * 1024 * 1024
MOST_BYTES_AT_ONCE: Final = 256 * 1024 * 1024
"""Of all bodies that are being read or published."""

BODY_S: Final = 30.0
"""How long a client may take to send its body."""

LONGEST_WAIT_S: Final = 60.0
DEFAULT_TIMEOUT_S: Final = 60.0
MOST_REMEMBERED: Final = 100_000
REMEMBERED_S: Final = 86_400.0
"""How long a job is known after its deadline and the life of its result."""

RETRY_AFTER_S: Final = 2
CLOSE_S: Final = 2
"""How long requests that are under way may take at the end."""

State = Literal["queued", "running", "retrying", "succeeded", "failed", "cancelled", "expired", "dead"]
FIELDS: Final = ("payload", "timeout_s", "endpoint", "metadata")

# ---------------------------------------------------------------- jobs


class Publish(Protocol):
    """Puts a message into the queue; returns once the broker has it.

    Raises:
        TransportLost, QueueFull
    """

    async def __call__(self, body: bytes, *, message_id: str) -> None: ...


class NoSuchJob(Exception):
    """Never accepted here, and the store does not know it."""


class JobGone(Exception):
    """It has ended, and its result's time is over."""


class BodyRefused(Exception):
    """A body that is no job."""

    def __init__(self, status: int, detail: str, problems: tuple[Mapping[str, str], ...] = ()) -> None:
        super().__init__(detail)
        self.status = status
        self.problems = problems
        """One for each field that is wrong: where, what is wrong, what is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """What a caller asked for; the payload as the bytes that came."""

    payload: bytes
    timeout_s: float
    endpoint: str | None
    metadata: dict[str, str]


@dataclass(slots=True, kw_only=True)
class Accepted:
    """A job that the broker has confirmed."""

    job_id: str
    created_at: float
    expires_at: float
    has_run: bool = False
    """It was seen running."""
    has_ended: bool = False
    """Its result was seen."""


class Jobs:
    """Accepts jobs, and says what has become of them. What it remembers is bounded and does not outlive the process."""

    def __init__(
        self,
        *,
        publish: Publish,
        store: ResultStore,
        now: Callable[[], float],
        new_id: Callable[[], str],
        infer_path: str,
        result_ttl_s: float,
    ) -> None:
        self._publish = publish
        self._store = store
        self._now = now
        self._new_id = new_id
        self._result_ttl_s = result_ttl_s
        self._accepted: dict[str, Accepted] = {}
        self.endpoints = (infer_path, *(path for path in ENDPOINTS if path != infer_path))
        """What a job may ask for; the first one is meant where it asks for none."""
        self.stopping = asyncio.Event()
        """Set at the end: whoever waits for a result gets what is known by then."""

    async def accept(self, job: NewJob) -> Accepted:
        """Put a job into the queue.

        Raises:
            TransportLost, QueueFull: it is not accepted. Where the broker's confirmation was lost it may run all the
            same, under an id that nobody was told.
        """
        now = self._now()
        accepted = Accepted(
            job_id=self._new_id(), created_at=now, expires_at=now + min(job.timeout_s, LONGEST_TIMEOUT_S)
        )
        body = encode_request(
            request_id=accepted.job_id,
            received_at=now,
            timeout_s=job.timeout_s,
            payload=job.payload,
            endpoint=job.endpoint,
            metadata=job.metadata,
        )
        await self._publish(body, message_id=accepted.job_id)
        self._forget_old(now)
        self._accepted[accepted.job_id] = accepted
        return accepted

    async def look(self, job_id: str, wait_s: float = 0.0) -> dict[str, object]:
        """The job as it is now, or as soon as it has ended, `wait_s` seconds from now at the latest.

        Raises:
            NoSuchJob, JobGone, StoreUnavailable
        """
        view = await self._look(job_id)
        if wait_s > 0 and view["status"] in ("queued", "running", "retrying"):
            await self._wait(job_id, wait_s)
            view = await self._look(job_id)
        return view

    async def _look(self, job_id: str) -> dict[str, object]:
        if not usable_id(job_id):
            raise NoSuchJob
        stored, running = await self._store.read(job_id), False
        if stored is None:
            running = await self._store.running(job_id)
        if stored is None and not running:
            stored = await self._store.read(job_id)  # It may have ended between the two questions.
        accepted = self._accepted.get(job_id)
        if accepted is not None:
            accepted.has_run |= running
            accepted.has_ended |= stored is not None
        if stored is not None:
            return _ended_view(job_id, stored)
        if accepted is None and not running:
            raise NoSuchJob
        if accepted is not None and not running and self._is_gone(accepted):
            raise JobGone
        view: dict[str, object] = {"job_id": job_id, "status": "running" if running else "queued"}
        if accepted is not None:
            if accepted.has_run and not running:
                view["status"] = "retrying"
            view |= {"created_at": accepted.created_at, "expires_at": accepted.expires_at}
        return view

    def _is_gone(self, accepted: Accepted) -> bool:
        return accepted.has_ended or self._now() > accepted.expires_at + self._result_ttl_s

    async def _wait(self, job_id: str, wait_s: float) -> None:
        stored = asyncio.create_task(self._store.wait(job_id, wait_s))
        stopping = asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait([stored, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await ended(stored)
            await ended(stopping)

    def _forget_old(self, now: float) -> None:
        """Drop the oldest where there are too many, and a few whose time is over."""
        over = now - self._result_ttl_s - REMEMBERED_S
        while len(self._accepted) >= MOST_REMEMBERED:
            self._accepted.pop(next(iter(self._accepted)))
        for job_id in list(self._accepted)[:2]:
            if self._accepted[job_id].expires_at < over:
                del self._accepted[job_id]


class _Stored(msgspec.Struct):
    """A stored result, also one of a worker that writes no more than the first source asks for."""

    status: str
    status_code: int = 0
    error_code: str | None = None


_SHOWN: Final = (
    *("status_code", "result", "error", "error_code", "attempt", "replica_id"),
    *("received_at", "finished_at", "timings"),
)


def _ended_view(job_id: str, stored: bytes) -> dict[str, object]:
    try:
        parts = msgspec.json.decode(stored, type=dict[str, msgspec.Raw])
        seen = msgspec.json.decode(stored, type=_Stored)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return {"job_id": job_id, "status": "failed", "error": "the stored result cannot be read"}
    return {"job_id": job_id, "status": state_of(seen.status, seen.status_code, seen.error_code)} | {
        name: parts[name] for name in _SHOWN if name in parts
    }


def state_of(status: str, status_code: int, error_code: str | None) -> State:
    """The state of a job whose result is stored; by status alone where the result has no error code."""
    if status == "completed":
        return "succeeded"
    match error_code:
        case "cancelled":
            return "cancelled"
        case "expired" | "deadline_exceeded":
            return "expired"
        case "invalid_request":
            return "dead"
        case None:
            return "cancelled" if status_code == 499 else "expired" if status_code == 408 else "failed"
        case _:
            return "dead" if error_code in DEAD_LETTERED else "failed"


# ---------------------------------------------------------------- reading a body


def read_job(body: bytes, endpoints: tuple[str, ...]) -> NewJob:
    """Read a body; the payload is sliced out of it and stays the bytes that came.

    Raises:
        BodyRefused: with every field that is wrong.
    """
    try:
        body.decode()
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UnicodeDecodeError as exc:
        raise BodyRefused(400, f"The body must be UTF-8: {exc.reason} at byte {exc.start}.") from exc
    except msgspec.ValidationError as exc:
        raise BodyRefused(400, f"The body must be a JSON object: {exc}.") from exc
    except (msgspec.DecodeError, RecursionError) as exc:
        raise BodyRefused(400, f"The body must be JSON: {exc}.") from exc
    found = _Findings(fields)
    job = NewJob(
        payload=found.payload(),
        timeout_s=found.timeout_s(),
        endpoint=found.endpoint(endpoints),
        metadata=found.metadata(),
    )
    found.unknown()
    if found.problems:
        raise BodyRefused(
            422, "; ".join(f"{p['pointer']}: {p['detail']}" for p in found.problems), tuple(found.problems)
        )
    return job


class _Findings:
    """The fields of a body, and what is wrong with them."""

    def __init__(self, fields: Mapping[str, msgspec.Raw]) -> None:
        self._fields = fields
        self.problems: list[dict[str, str]] = []

    def payload(self) -> bytes:
        raw = bytes(self._fields.get("payload", b""))
        accepted = "a JSON object: the request for the model"
        if not raw:
            self._wrong("payload", "is missing", accepted)
        else:
            try:
                msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            except (msgspec.MsgspecError, RecursionError) as exc:
                self._wrong("payload", str(exc), accepted)
        return raw

    def timeout_s(self) -> float:
        value = self._decoded("timeout_s", DEFAULT_TIMEOUT_S)
        if not isinstance(value, bool) and isinstance(value, int | float):
            with contextlib.suppress(OverflowError):
                seconds = float(value)
                if seconds > 0:  # JSON has no infinity, and one too large for a float is not read as a number.
                    return seconds
        self._wrong("timeout_s", f"got {_shown(value)}", "a finite number of seconds above 0")
        return DEFAULT_TIMEOUT_S

    def endpoint(self, endpoints: tuple[str, ...]) -> str | None:
        value = self._decoded("endpoint", None)
        if "endpoint" not in self._fields:
            return None
        if isinstance(value, str) and value in endpoints:
            return value
        self._wrong("endpoint", f"got {_shown(value)}", "one of " + ", ".join(endpoints))
        return None

    def metadata(self) -> dict[str, str]:
        value = self._decoded("metadata", {})
        if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
            return value
        self._wrong("metadata", f"got {_shown(value)}", "an object whose values are strings")
        return {}

    def unknown(self) -> None:
        """A field that is accepted and ignored would be a promise that is not kept."""
        for name in self._fields:
            if name == "idempotency_key":
                self._wrong(name, "is not supported yet", "leave it out")
            elif name not in FIELDS:
                self._wrong(name, "is not known", "the fields " + ", ".join(FIELDS))

    def _decoded(self, name: str, default: object) -> object:
        if name not in self._fields:
            return default
        try:
            return msgspec.json.decode(self._fields[name])
        except (msgspec.MsgspecError, RecursionError):
            return self._fields[name]

    def _wrong(self, name: str, detail: str, accepted: str) -> None:
        pointer = "/" + name.replace("~", "~0").replace("/", "~1")
        self.problems.append({"pointer": pointer[:200], "detail": detail, "accepted": accepted})


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:60]}…"


def read_wait(given: str | None) -> float:
    """The seconds of `?wait=`, cut to the longest wait.

    Raises:
        BodyRefused: it is no number.
    """
    try:
        seconds = float(given or 0)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        detail = f"wait must be a number of seconds, 0 or more (cut to {LONGEST_WAIT_S:g}), got {_shown(given)}."
        raise BodyRefused(422, detail)
    return min(seconds, LONGEST_WAIT_S)


class _Bodies:
    """Reads bodies, each and all together within their bounds."""

    def __init__(self) -> None:
        self._held_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The body, which counts until the context is left."""
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > MOST_BODY_BYTES:
            raise _too_large()
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_S):
                    async for chunk in request.stream():
                        body += chunk
                        self._held_bytes += len(chunk)
                        if len(body) > MOST_BODY_BYTES:
                            raise _too_large()
                        if self._held_bytes > MOST_BYTES_AT_ONCE:
                            raise BodyRefused(503, "Too many bodies are being read; try again.")
            except TimeoutError:
                raise BodyRefused(408, f"The body did not arrive within {BODY_S:g} s.") from None
            yield bytes(body)
        finally:
            self._held_bytes -= len(body)


def _too_large() -> BodyRefused:
    return BodyRefused(413, f"The body is larger than {MOST_BODY_BYTES} bytes.")


# ---------------------------------------------------------------- HTTP


def app(jobs: Jobs) -> FastAPI:
    """The web application."""
    web = FastAPI(title="inference-worker", summary="Inference jobs through a queue", redoc_url=None)
    bodies = _Bodies()

    @web.get("/", include_in_schema=False)
    async def index() -> Response:
        return _json({"service": "inference-worker", "jobs": "/v1/jobs", "docs": "/docs", "openapi": "/openapi.json"})

    @web.post("/v1/jobs", status_code=202, responses=_answers(400, 408, 413, 415, 422, 429, 503), openapi_extra=_ASKS)
    async def submit(request: Request) -> Response:
        """Queue a request for the model. The answer comes once the broker has confirmed it."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Also keeps web pages of other sites out: a browser asks before it sends JSON elsewhere.
            detail = "The body must come as JSON: send the header Content-Type: application/json."
            raise BodyRefused(415, detail)
        if "idempotency-key" in request.headers:
            raise BodyRefused(422, "The header Idempotency-Key is not supported yet; leave it out.")
        async with bodies.read(request) as body:
            accepted = await jobs.accept(read_job(body, jobs.endpoints))
        view = {
            "job_id": accepted.job_id,
            "status": "queued",
            "created_at": accepted.created_at,
            "expires_at": accepted.expires_at,
        }
        return _json(view, 202, {"Location": f"/v1/jobs/{accepted.job_id}"})

    @web.get("/v1/jobs/{job_id}", responses=_answers(404, 410, 422, 503), openapi_extra=_WAITS)
    async def look(job_id: str, request: Request) -> Response:
        """The state of a job, and its result once it has ended."""
        return _json(await jobs.look(job_id, read_wait(request.query_params.get("wait"))))

    _handle_errors(web)
    return web


def _handle_errors(web: FastAPI) -> None:
    @web.exception_handler(BodyRefused)
    async def refused(_: Request, exc: BodyRefused) -> Response:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if exc.status == 503 else {}
        if exc.status in (408, 413):
            headers["Connection"] = "close"  # The rest of the body is not read.
        return problem(exc.status, str(exc), headers, errors=exc.problems)

    @web.exception_handler(NoSuchJob)
    async def unknown(_: Request, __: NoSuchJob) -> Response:
        return problem(
            404, "There is no such job. Jobs accepted before a restart are known once they run or have ended."
        )

    @web.exception_handler(JobGone)
    async def gone(_: Request, __: JobGone) -> Response:
        return problem(410, "The job is over, and its result is not kept any more.")

    @web.exception_handler(QueueFull)
    async def full(_: Request, exc: QueueFull) -> Response:
        return problem(429, f"The job is not accepted: {exc}.", {"Retry-After": str(RETRY_AFTER_S)})

    @web.exception_handler(TransportLost)
    async def lost(_: Request, exc: TransportLost) -> Response:
        detail = f"The job is not accepted, the queue cannot be reached: {exc}."
        return problem(503, detail, {"Retry-After": str(RETRY_AFTER_S)})

    @web.exception_handler(StoreUnavailable)
    async def silent(_: Request, exc: StoreUnavailable) -> Response:
        return problem(503, f"The result store cannot be asked: {exc}.", {"Retry-After": str(RETRY_AFTER_S)})

    @web.exception_handler(HTTPException)
    async def by_framework(request: Request, exc: HTTPException) -> Response:
        return problem(exc.status_code, f"{exc.detail}: {request.method} {request.url.path}", exc.headers)

    @web.exception_handler(Exception)
    async def ours(_: Request, __: Exception) -> Response:
        return problem(500, "This is a fault of the server; its log says more.")


def problem(
    status: int,
    detail: str,
    headers: Mapping[str, str] | None = None,
    *,
    errors: tuple[Mapping[str, str], ...] = (),
) -> Response:
    """An error as RFC 9457 writes it."""
    body: dict[str, object] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
    }
    if errors:
        body["errors"] = errors
    return _json(body, status, headers, media_type="application/problem+json")


def _json(
    body: Mapping[str, object],
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    *,
    media_type: str = "application/json",
) -> Response:
    content = msgspec.json.encode(body)
    return Response(content, status, {"Cache-Control": "no-store", **(headers or {})}, media_type)


def _answers(*statuses: int) -> dict[int | str, dict[str, object]]:
    return {
        status: {"description": HTTPStatus(status).phrase, "content": {"application/problem+json": {}}}
        for status in statuses
    }


_ASKS: Final[dict[str, object]] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["payload"],
                    "additionalProperties": False,
                    "properties": {
                        "payload": {"type": "object", "description": "The OpenAI request, passed on as it is."},
                        "timeout_s": {"type": "number", "exclusiveMinimum": 0, "default": DEFAULT_TIMEOUT_S},
                        "endpoint": {"type": "string", "enum": list(ENDPOINTS)},
                        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
                    },
                },
                "example": {"payload": {"messages": [{"role": "user", "content": "Hello"}]}, "timeout_s": 60},
            }
        },
    }
}
_WAITS: Final[dict[str, object]] = {
    "parameters": [
        {
            "name": "wait",
            "in": "query",
            "description": f"Seconds to wait for the end of the job, cut to {LONGEST_WAIT_S:g}.",
            "schema": {"type": "number", "minimum": 0, "default": 0},
        }
    ]
}

# ---------------------------------------------------------------- listening


@asynccontextmanager
async def serving(web: FastAPI, host: str, port: int, stopping: asyncio.Event) -> AsyncGenerator[str, None]:
    """Listen inside the context, which gives the URL; port 0 takes a free one. Leaving it sets `stopping`.

    Raises:
        OSError: nothing can listen there; the text names GATEWAY_PORT.
    """
    sock = await _bound(host, port)
    server = _Server(
        uvicorn.Config(
            web,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=CLOSE_S,
        )
    )
    serve = asyncio.create_task(server.serve([sock]), name="HTTP intake")
    try:
        up = asyncio.create_task(server.up.wait())
        try:
            await asyncio.wait([up, serve], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await ended(up)
        address = sock.getsockname()
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        yield f"http://{shown}:{address[1]}"
    finally:
        stopping.set()
        server.should_exit = True
        await asyncio.wait([serve], timeout=CLOSE_S + 1)
        await ended(serve)
        sock.close()


async def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = (
            await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(1024)
        except OSError:
            sock.close()
            raise
    except OSError as exc:
        why = "it is in use; choose another, or 0 for any free one" if exc.errno == errno.EADDRINUSE else str(exc)
        raise OSError(f"GATEWAY_PORT: cannot listen on {host}:{port}: {why}") from exc
    return sock


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handlers, and with an event that says that it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
