"""OpenAI's paths over the queue: an unmodified `openai` client works through it.

The body is the payload, untouched. The answer is waited for up to a limit; then a 504 names the job, which stays. Who
goes away while he waits cancels his job, unless he gave it an idempotency key: then he will be back.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Final, assert_never

import structlog
from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from inference_worker.errors import StoreUnavailable
from inference_worker.gateway.bodies import Bodies
from inference_worker.gateway.completions import KEEP_ALIVE, answer_of, chunks, error_event
from inference_worker.gateway.description import COMPLETIONS, MODEL, MODELS
from inference_worker.gateway.edge import caller_of, client_gone
from inference_worker.gateway.job_requests import NewJob, Preference, Wanted, read_key, read_payload, read_prefer
from inference_worker.gateway.jobs import Ended, Jobs, NotYet
from inference_worker.gateway.problems import Refusal, json_answer, openai_error
from inference_worker.job_book import JobRecord, Taken
from inference_worker.timing import quietly

log = structlog.get_logger(__name__)

TIMEOUT_S: Final = 600.0
"""How long a job of these paths may take, whoever waits for it: the clients' own limit."""

FIRST_S: Final = 2.0
"""How long a stream is not begun yet: what fails sooner still has its own status."""

KEEP_ALIVE_S: Final = 10.0
CANCEL_S: Final = 5.0
CLIENT_GONE: Final = 499
"""Nobody reads it; it is what the answer is counted as."""

ModelNames = Callable[[], Awaitable[Sequence[str]]]


def mount(web: FastAPI, jobs: Jobs, bodies: Bodies, models: ModelNames, *, wait_s: float) -> None:
    """Add the routes; answers are waited for up to `wait_s` seconds."""
    paths = _Paths(jobs, bodies, wait_s)

    @web.post("/v1/chat/completions", tags=["OpenAI"], **COMPLETIONS["/v1/chat/completions"])
    async def chat_completions(request: Request) -> Response:
        """A chat completion, through the queue."""
        return await paths.complete(request, "/v1/chat/completions")

    @web.post("/v1/completions", tags=["OpenAI"], **COMPLETIONS["/v1/completions"])
    async def completions(request: Request) -> Response:
        """A text completion, through the queue."""
        return await paths.complete(request, "/v1/completions")

    @web.post("/v1/embeddings", tags=["OpenAI"], **COMPLETIONS["/v1/embeddings"])
    async def embeddings(request: Request) -> Response:
        """Embeddings, through the queue."""
        return await paths.complete(request, "/v1/embeddings")

    @web.get("/v1/models", tags=["OpenAI"], **MODELS)
    async def list_models() -> Response:
        """The models of the workers that were heard of lately."""
        return json_answer({"object": "list", "data": [_model(name) for name in await models()]})

    @web.get("/v1/models/{model_id:path}", tags=["OpenAI"], **MODEL)
    async def retrieve_model(model_id: str) -> Response:
        """One of them."""
        if model_id not in await models():
            raise Refusal(404, "model_not_found", "There is no such model.")
        return json_answer(_model(model_id))


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "inference-worker"}


class _Paths:
    """What the three paths have in common."""

    def __init__(self, jobs: Jobs, bodies: Bodies, wait_s: float) -> None:
        self._jobs = jobs
        self._bodies = bodies
        self._wait_s = wait_s

    async def complete(self, request: Request, endpoint: str) -> Response:
        """Queue the body as a payload, and answer with what became of it."""
        caller = caller_of(request)
        prefer = read_prefer(request.headers.get("prefer"))
        key = read_key(request.headers.get("idempotency-key"))
        async with self._bodies.json(request, caller.tenant) as body:
            wanted = read_payload(body)
            job = NewJob(payload=body, timeout_s=TIMEOUT_S, endpoint=endpoint, key=key)
            taken = await self._jobs.accept(job, caller.tenant)
            del job, body  # Who waits holds no body.
        headers = {"X-Job-Id": taken.record.job_id}
        if not taken.new:
            headers["Idempotency-Replayed"] = "true"
        streams = wanted.stream and endpoint != "/v1/embeddings" and not prefer.respond_async
        wait_s = self._wait_s if prefer.wait_s is None else min(prefer.wait_s, self._wait_s)
        if prefer.respond_async and prefer.wait_s is None:
            return await self._later(taken, prefer, headers)
        if prefer.wait_s is not None:
            headers["Preference-Applied"] = f"wait={wait_s:g}"
        job_id = taken.record.job_id
        async with client_gone(request.receive) as gone:
            outcome = await self._jobs.wait(job_id, min(FIRST_S, wait_s) if streams else wait_s, gone)
            if gone.is_set() and isinstance(outcome, NotYet):
                await self._abandoned(taken.record, key)
                return Response(status_code=CLIENT_GONE)
        match outcome:
            case Ended(stored=stored):
                answer = answer_of(job_id, stored)
                if not streams:
                    return Response(bytes(answer), 200, {"Cache-Control": "no-store", **headers}, "application/json")
                chat = endpoint == "/v1/chat/completions"
                events = chunks(job_id, answer, chat=chat, include_usage=wanted.include_usage)
                first = next(events)  # An answer that cannot be streamed still gets its own status.

                async def all_events(_: asyncio.Event) -> AsyncGenerator[bytes, None]:
                    yield first
                    for event in events:
                        yield event

                return _Events(all_events, headers)
            case NotYet() if streams and wait_s > FIRST_S and not self._jobs.stopping.is_set():
                left_s = wait_s - FIRST_S
                return _Events(lambda g: self._events(taken.record, endpoint, wanted, key, left_s, g), headers)
            case NotYet() if prefer.respond_async:
                return await self._later(taken, prefer, headers)
            case NotYet():
                raise self._not_yet(job_id, outcome, wait_s)
            case never:
                assert_never(never)

    async def _later(self, taken: Taken, prefer: Preference, headers: dict[str, str]) -> Response:
        applied = "respond-async" if prefer.wait_s is None else f"respond-async, {headers['Preference-Applied']}"
        headers |= {"Location": f"/v1/jobs/{taken.record.job_id}", "Preference-Applied": applied}
        return json_answer(await self._jobs.accepted_view(taken), 202, headers)

    def _not_yet(self, job_id: str, outcome: NotYet, wait_s: float) -> Refusal:
        where = f"It stays: ask GET /v1/jobs/{job_id}."
        if self._jobs.stopping.is_set():
            detail = f"Job {job_id} has not ended, and this gateway stops. {where}"
            return Refusal(503, "stopping", detail, job_id=job_id, final=True)
        if outcome.unanswered:
            detail = f"Job {job_id}: the result store cannot be asked. {where}"
            return Refusal(503, "store_unavailable", detail, because=outcome.unanswered, job_id=job_id, final=True)
        detail = f"Job {job_id} has not ended within {wait_s:g} s. {where}"
        return Refusal(504, "not_ended_in_time", detail, job_id=job_id, final=True)

    async def _abandoned(self, record: JobRecord, key: str | None) -> None:
        """Nobody waits for it any more, and nobody can ask for it again."""
        if key is None and not self._jobs.stopping.is_set():
            log.debug("a client has gone; its job is cancelled", job_id=record.job_id)
            await quietly(self._jobs.abandon(record), CANCEL_S, StoreUnavailable)

    async def _events(
        self, record: JobRecord, endpoint: str, wanted: Wanted, key: str | None, wait_s: float, gone: asyncio.Event
    ) -> AsyncGenerator[bytes, None]:
        """The events of a job that has not ended yet: signs of life, then its answer, or why there is none."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        yield KEEP_ALIVE
        while True:
            outcome = await self._jobs.wait(record.job_id, min(KEEP_ALIVE_S, max(until - loop.time(), 0)), gone)
            try:
                match outcome:
                    case Ended(stored=stored):
                        answer = answer_of(record.job_id, stored)
                        chat = endpoint == "/v1/chat/completions"
                        for event in chunks(record.job_id, answer, chat=chat, include_usage=wanted.include_usage):
                            yield event
                        return
                    case NotYet() if gone.is_set():
                        await self._abandoned(record, key)
                        return
                    case NotYet() if loop.time() >= until or self._jobs.stopping.is_set():
                        raise self._not_yet(record.job_id, outcome, wait_s + FIRST_S)
                    case NotYet():
                        yield KEEP_ALIVE
                    case never:
                        assert_never(never)
            except Refusal as refusal:
                yield error_event(openai_error(refusal))
                return


class _Events(Response):
    """An event stream; unlike the framework's own it tells its source that the client has gone."""

    media_type = "text/event-stream"

    def __init__(self, events: Callable[[asyncio.Event], AsyncGenerator[bytes, None]], headers: dict[str, str]) -> None:
        self._events = events
        self.background = None
        self.body = b""
        self.status_code = 200
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers})
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with client_gone(receive) as gone:
            events = self._events(gone)
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            finally:
                await events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
