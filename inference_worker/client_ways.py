"""How a caller reaches the system: over RabbitMQ and Redis, Redis alone, or the HTTP intake. Callers use `client`."""

import asyncio
import json
import random
import secrets
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol
from urllib.parse import quote

import httpx
import msgspec

from inference_worker.errors import NoSuchRequest, NotAccepted, NotSupported, StoreUnavailable
from inference_worker.messages import Reply, Timings, encode_request
from inference_worker.ports import AlreadyAnswered, Stored
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.results.notifications import Notifications
from inference_worker.results.redis import RedisStore
from inference_worker.rmq_producer import Producer
from inference_worker.transports.stream_entries import entry_fields

HTTP_WAIT_S: Final = 20.0
"""How long one question for a result is held open by the server."""

ANSWER_S: Final = 15.0
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0
MOST_CONNECTIONS: Final = 256

Status = Literal["completed", "failed"]
Cancelled = Literal["cancelled", "too late"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a request has ended."""

    request_id: str
    status: Status
    status_code: int
    result: bytes | None = None
    """The model's answer as the bytes that it sent; None where it failed."""
    error: str | None = None
    error_code: str | None = None
    attempt: int = 0
    """0 for the first."""
    replica_id: str | None = None
    received_at: float | None = None
    finished_at: float | None = None
    timings: Timings = field(default_factory=Timings)

    @property
    def completed(self) -> bool:
        return self.status == "completed"

    def json(self) -> Any:  # JSON is what it is
        """The model's answer, decoded; None where the request failed."""
        return None if self.result is None else json.loads(self.result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be submitted."""

    payload: bytes
    request_id: str | None
    timeout_s: float
    endpoint: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    tenant: str | None = None
    priority: int | None = None


class Way(Protocol):
    """How the system is reached."""

    async def submit(self, request: Request, within_s: float) -> str:
        """Hand a request over, and return its id.

        Raises:
            NotAccepted, NotSupported
        """

    async def look(self, request_id: str, within_s: float) -> Result | None:
        """The result, as soon as there is one; None after `within_s`.

        Raises:
            StoreUnavailable: nobody could be asked; try again.
            NoSuchRequest
        """

    async def cancel(self, request_id: str) -> Cancelled:
        """Store a failed result, if there is none.

        Raises:
            StoreUnavailable, NotSupported, NoSuchRequest
        """


# ---------------------------------------------------------------- a queue and Redis


@asynccontextmanager
async def direct(
    rabbitmq_url: Callable[[], str],
    redis_url: Callable[[], str],
    deployment_id: str,
    *,
    redis_password: str | None,
    response_ttl_s: float,
    name: str,
    tls: ssl.SSLContext | None,
    redis_tls: RedisTls,
    now: Callable[[], float],
) -> AsyncGenerator[Way, None]:
    async with AsyncExitStack() as stack:
        shown = _shown(deployment_id, name)
        link = RedisLink(redis_url, lambda: redis_password, client_name=shown, tls=redis_tls)
        await stack.enter_async_context(link.open())
        told = Notifications(link, redis_url, lambda: redis_password, client_name=shown, tls=redis_tls)
        await stack.enter_async_context(told.open())
        producer = Producer(rabbitmq_url, f"infer_req.{deployment_id}", name=shown, tls=tls)
        await stack.enter_async_context(producer.open())
        store = _store(link, told, deployment_id, name, response_ttl_s)
        yield _Direct(producer, store, name=name, now=now)


@asynccontextmanager
async def streams(
    redis_url: Callable[[], str],
    stream: str,
    *,
    redis_password: str | None,
    response_ttl_s: float,
    name: str,
    redis_tls: RedisTls,
    now: Callable[[], float],
) -> AsyncGenerator[Way, None]:
    shown = _shown(stream, name)
    link = RedisLink(redis_url, lambda: redis_password, client_name=shown, tls=redis_tls)
    told = Notifications(link, redis_url, lambda: redis_password, client_name=shown, tls=redis_tls)
    async with link.open(), told.open():
        store = _store(link, told, stream, name, response_ttl_s)
        yield _Direct(_StreamProducer(link, stream, now=now), store, name=name, now=now)


def _shown(queue: str, name: str) -> str:
    return "".join(c if "!" <= c <= "~" else "_" for c in f"inference-worker/{queue}/{name}")[:200]


def _store(link: RedisLink, told: Notifications, deployment_id: str, name: str, ttl_s: float) -> RedisStore:
    return RedisStore(link, deployment_id=deployment_id, replica_id=name, lease_s=15.0, ttl_s=ttl_s, notifications=told)


class Publishes(Protocol):
    """Puts a message into the queue and returns once the broker has it, or raises `NotAccepted`."""

    async def publish(self, body: bytes, *, message_id: str, within_s: float, priority: int | None = None) -> None: ...


class _StreamProducer:
    """Adds entries to a stream. One without an answer is added again: the same request twice is one request."""

    def __init__(self, link: RedisLink, stream: str, *, now: Callable[[], float]) -> None:
        self._link = link
        self._stream = stream
        self._now = now
        self._rng = random.Random()

    async def publish(self, body: bytes, *, message_id: str, within_s: float, priority: int | None = None) -> None:
        if priority is not None:
            raise NotSupported("a stream has no priorities: leave priority out")
        why, pause_s = "no answer", FIRST_PAUSE_S
        try:
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        fields = entry_fields(body, message_id, enqueued_at=self._now())
                        await self._link.do("XADD", self._stream, "*", *fields)
                        return
                    except StoreUnavailable as exc:
                        why = str(exc)
                    await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
                    pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        except TimeoutError as exc:
            raise NotAccepted(f"not confirmed within {within_s:g} s: {why}", maybe=True) from exc


class _Direct:
    """Requests into the queue, results out of the store."""

    def __init__(self, producer: Publishes, store: RedisStore, *, name: str, now: Callable[[], float]) -> None:
        self._producer = producer
        self._store = store
        self._name = name
        self._now = now

    async def submit(self, request: Request, within_s: float) -> str:
        request_id = request.request_id or secrets.token_hex(16)
        body = encode_request(
            request_id=request_id,
            received_at=self._now(),
            timeout_s=request.timeout_s,
            payload=request.payload,
            endpoint=request.endpoint,
            metadata=request.metadata,
            tenant=request.tenant,
        )
        await self._producer.publish(body, message_id=request_id, within_s=within_s, priority=request.priority)
        return request_id

    async def look(self, request_id: str, within_s: float) -> Result | None:
        if within_s > 0:
            stored = await self._store.wait(request_id, within_s)
        else:
            stored = await self._store.read(request_id)
        return None if stored is None else read_result(request_id, stored)

    async def cancel(self, request_id: str) -> Cancelled:
        reply = Reply(
            request_id=request_id,
            status="failed",
            status_code=499,
            attempt=0,
            replica_id=self._name,
            finished_at=self._now(),
            error="cancelled by the caller",
            error_code="cancelled",
        )
        match await self._store.cancel(reply):
            case Stored():
                return "cancelled"
            case AlreadyAnswered(reply=known) if known.error_code == "cancelled":
                return "cancelled"
            case _:
                return "too late"


# ---------------------------------------------------------------- HTTP


@asynccontextmanager
async def over_http(
    url: str, api_key: str | None, verify: ssl.SSLContext | bool, transport: httpx.AsyncBaseTransport | None
) -> AsyncGenerator[Way, None]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=MOST_CONNECTIONS, max_keepalive_connections=MOST_CONNECTIONS)
    async with httpx.AsyncClient(
        headers=headers,
        limits=limits,
        verify=verify,
        transport=transport,
        timeout=httpx.Timeout(ANSWER_S, pool=None),
        trust_env=False,
    ) as client:
        yield _Http(client, url.rstrip("/").removesuffix("/v1/jobs"))


class _Http:
    """Jobs of an intake: contract, section 9."""

    def __init__(self, client: httpx.AsyncClient, base: str) -> None:
        self._client = client
        self._jobs = f"{base}/v1/jobs"
        self._rng = random.Random()

    async def submit(self, request: Request, within_s: float) -> str:
        if request.tenant is not None:
            raise NotSupported("over HTTP the tenant is that of the API key; leave it out")
        if request.priority is not None:
            raise NotSupported("over HTTP there are no priorities: leave priority out")
        body: dict[str, object] = {"payload": msgspec.Raw(request.payload), "timeout_s": request.timeout_s}
        if request.endpoint is not None:
            body["endpoint"] = request.endpoint
        if request.metadata:
            body["metadata"] = request.metadata
        if request.request_id is not None:
            body["idempotency_key"] = request.request_id
        sent, why, pause_s = False, "", FIRST_PAUSE_S
        try:
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        answer = await self._client.post(
                            self._jobs,
                            content=msgspec.json.encode(body),
                            headers={"Content-Type": "application/json"},
                        )
                    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as exc:
                        why, asked_s = _said(exc), None
                    except httpx.HTTPError as exc:
                        sent, why, asked_s = True, _said(exc), None
                        if request.request_id is None:
                            raise NotAccepted(why, maybe=True) from exc  # A second one would be a second job.
                    else:
                        if answer.status_code == 202:
                            return _job_id(answer)
                        why, asked_s = self._refused(answer, sent), _retry_after_s(answer)
                    await asyncio.sleep(asked_s if asked_s is not None else pause_s * self._rng.uniform(0.5, 1.0))
                    pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        except TimeoutError as exc:
            raise NotAccepted(f"not accepted within {within_s:g} s: {why or 'no answer'}", maybe=True) from exc

    def _refused(self, answer: httpx.Response, sent: bool) -> str:
        """Why it was refused for now; an error where it was for good."""
        detail = _problem(answer)
        if answer.status_code in (429, 502, 503, 504):
            return detail
        if answer.status_code == 422 and "/idempotency_key" in answer.text and "not supported" in answer.text:
            raise NotSupported("this server takes no ids of ours (idempotency_key); leave request_id out")
        raise NotAccepted(detail, maybe=sent, for_good=answer.status_code in (400, 401, 403, 413, 415, 422))

    async def look(self, request_id: str, within_s: float) -> Result | None:
        wait_s = min(within_s, HTTP_WAIT_S)
        try:
            answer = await self._client.get(
                f"{self._jobs}/{quote(request_id, safe='')}",
                params={"wait": f"{wait_s:.3f}"} if wait_s > 0 else {},
                timeout=httpx.Timeout(wait_s + ANSWER_S, pool=None),
            )
        except httpx.HTTPError as exc:
            raise StoreUnavailable(_said(exc)) from exc
        if answer.status_code in (404, 410):
            raise NoSuchRequest(_problem(answer))
        if answer.status_code != 200:
            raise StoreUnavailable(_problem(answer))
        return _read_view(request_id, answer.content)

    async def cancel(self, request_id: str) -> Cancelled:
        try:
            answer = await self._client.delete(f"{self._jobs}/{quote(request_id, safe='')}")
        except httpx.HTTPError as exc:
            raise StoreUnavailable(_said(exc)) from exc
        match answer.status_code:
            case 200 | 202 | 204:
                return "cancelled"
            case 404 | 410:
                raise NoSuchRequest(_problem(answer))
            case 405 | 501:
                raise NotSupported("this server cannot cancel jobs")
            case 409:
                return "too late"
            case _:
                raise StoreUnavailable(_problem(answer))


def _job_id(answer: httpx.Response) -> str:
    try:
        return msgspec.json.decode(answer.content, type=_Accepted).job_id
    except msgspec.MsgspecError as exc:
        raise NotAccepted(f"the server accepted it and named no job: {exc}", maybe=True) from exc


def _retry_after_s(answer: httpx.Response) -> float | None:
    given = answer.headers.get("retry-after", "")
    return min(float(given), 60.0) if given.isdigit() else None


def _problem(answer: httpx.Response) -> str:
    try:
        detail = msgspec.json.decode(answer.content, type=_Problem).detail
    except (msgspec.MsgspecError, UnicodeDecodeError):
        detail = ""
    return f"HTTP {answer.status_code}: {detail or answer.reason_phrase}"


def _said(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"[:300]


class _Accepted(msgspec.Struct):
    job_id: str


class _Problem(msgspec.Struct):
    detail: str = ""


# ---------------------------------------------------------------- reading results


class _Timings(msgspec.Struct):
    queue_s: float | None = None
    model_s: float | None = None
    ttft_s: float | None = None
    tbt_s: float | None = None


class _Stored(msgspec.Struct):
    """A stored result, or a job's view; also one of a worker that writes no more than the first source asks for."""

    status: str
    status_code: int = 0
    result: msgspec.Raw = msgspec.Raw(b"")
    error: str | None = None
    error_code: str | None = None
    attempt: int = 0
    replica_id: str | None = None
    received_at: float | None = None
    finished_at: float | None = None
    timings: _Timings = msgspec.field(default_factory=_Timings)


def read_result(request_id: str, stored: bytes) -> Result:
    """A result as it is stored; what cannot be read is a failed one that says so."""
    try:
        seen = msgspec.json.decode(stored, type=_Stored)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        return Result(
            request_id=request_id,
            status="failed",
            status_code=0,
            error=f"the stored result cannot be read: {exc}",
            error_code="bad_response",
        )
    return _result(request_id, seen)


def _read_view(request_id: str, body: bytes) -> Result | None:
    try:
        seen = msgspec.json.decode(body, type=_Stored)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise StoreUnavailable(f"the server's answer cannot be read: {exc}") from exc
    if seen.status in ("queued", "running", "retrying"):
        return None
    seen.status = "completed" if seen.status == "succeeded" else "failed"
    return _result(request_id, seen)


def _result(request_id: str, seen: _Stored) -> Result:
    completed = seen.status == "completed"
    timings = seen.timings
    return Result(
        request_id=request_id,
        status="completed" if completed else "failed",
        status_code=seen.status_code,
        result=(bytes(seen.result) or b"null") if completed else None,
        error=None if completed else seen.error or "",
        error_code=seen.error_code,
        attempt=seen.attempt,
        replica_id=seen.replica_id,
        received_at=seen.received_at,
        finished_at=seen.finished_at,
        timings=Timings(queue_s=timings.queue_s, model_s=timings.model_s, ttft_s=timings.ttft_s, tbt_s=timings.tbt_s),
    )
