"""A client for people's own programs: submit a request, wait for its result, cancel it.

Over RabbitMQ and Redis (`Client.direct`), over Redis Streams (`Client.streams`), or over the HTTP intake of `dev` or
a gateway (`Client.http`). `SyncClient` is the same for programs without asyncio. A request has one id; submitting it
twice under that id is one request.
"""

import asyncio
import json
import random
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import httpx
import msgspec

from inference_worker.client_ways import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Cancelled,
    Request,
    Result,
    Way,
    direct,
    over_http,
    streams,
)
from inference_worker.errors import NoResultYet, NoSuchRequest, NotAccepted, NotSupported, StoreUnavailable
from inference_worker.messages import LONGEST_TIMEOUT_S, usable_id
from inference_worker.redis_scripts import RedisTls

__all__ = [
    "Cancelled",
    "Client",
    "Job",
    "NoResultYet",
    "NoSuchRequest",
    "NotAccepted",
    "NotSupported",
    "Result",
    "StoreUnavailable",
    "SyncClient",
]

T = TypeVar("T")

STREAM: Final = "inference:jobs"
TIMEOUT_S: Final = 60.0
SUBMIT_S: Final = 30.0
"""How long a request may take to be taken over, unless the caller says otherwise."""

AFTER_S: Final = 30.0
"""How long after a request's own time its result is waited for, unless the caller says otherwise."""

SOON_S: Final = 1.0
"""An answer without a result that comes within this time is followed by a pause."""

MOST_PRIORITY: Final = 255
"""AMQP's."""

Payload = Mapping[str, object] | bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that was taken over."""

    request_id: str
    until: float
    """Unix seconds after which nobody works on it."""
    client: "Client" = field(repr=False, compare=False)

    async def wait(self, within_s: float | None = None) -> Result:
        """As `Client.wait`; until half a minute after the request's own time, unless `within_s` says otherwise."""
        if within_s is None:
            within_s = max(self.until - self.client.now(), 0.0) + AFTER_S
        return await self.client.wait(self.request_id, within_s)

    async def cancel(self) -> Cancelled:
        """As `Client.cancel`."""
        return await self.client.cancel(self.request_id)


class Client:
    """`async with Client.direct(…) as client:`, then `await client.submit_and_wait({…})`. For any number of tasks."""

    def __init__(self, way: AbstractAsyncContextManager[Way], *, now: Callable[[], float] = time.time) -> None:
        self._opening = way
        self._way: Way | None = None
        self._rng = random.Random()
        self.now = now

    @classmethod
    def direct(
        cls,
        *,
        rabbitmq_url: str | Callable[[], str],
        redis_url: str | Callable[[], str],
        deployment_id: str,
        redis_password: str | None = None,
        response_ttl_s: float = 3600.0,
        name: str = "client",
        tls: ssl.SSLContext | None = None,
        redis_tls: RedisTls | None = None,
        now: Callable[[], float] = time.time,
    ) -> "Client":
        """Over RabbitMQ and Redis. A URL may be a function, which is asked again at each connection.

        `response_ttl_s` is the worker's REDIS_RESPONSE_TTL_S: how long the result of a cancelled request is kept.
        """
        way = direct(
            _asked(rabbitmq_url),
            _asked(redis_url),
            deployment_id,
            redis_password=redis_password,
            response_ttl_s=response_ttl_s,
            name=name,
            tls=tls,
            redis_tls=redis_tls or RedisTls(),
            now=now,
        )
        return cls(way, now=now)

    @classmethod
    def streams(
        cls,
        *,
        redis_url: str | Callable[[], str],
        stream: str = STREAM,
        redis_password: str | None = None,
        response_ttl_s: float = 3600.0,
        name: str = "client",
        redis_tls: RedisTls | None = None,
        now: Callable[[], float] = time.time,
    ) -> "Client":
        """Over Redis alone, where the workers have TRANSPORT=redis-streams. `stream` is their IWL_STREAM."""
        way = streams(
            _asked(redis_url),
            stream,
            redis_password=redis_password,
            response_ttl_s=response_ttl_s,
            name=name,
            redis_tls=redis_tls or RedisTls(),
            now=now,
        )
        return cls(way, now=now)

    @classmethod
    def http(
        cls,
        url: str,
        *,
        api_key: str | None = None,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
        now: Callable[[], float] = time.time,
    ) -> "Client":
        """Over the HTTP intake at `url`, of which `/v1/jobs` is a part or not."""
        return cls(over_http(url, api_key, verify, transport), now=now)

    async def submit(
        self,
        payload: Payload,
        *,
        endpoint: str | None = None,
        timeout_s: float = TIMEOUT_S,
        metadata: Mapping[str, str] | None = None,
        tenant: str | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        within_s: float = SUBMIT_S,
    ) -> Job:
        """Hand a request over; returns once the broker has it. The payload's bytes reach the model as they are.

        A higher `priority` (0 to 255, none is 0) goes first; over RabbitMQ alone, where the queue has priorities.

        Raises:
            NotAccepted: it was not taken over within `within_s`, for sure or perhaps (`maybe`).
            NotSupported: the server cannot do what was asked for.
            ValueError: an argument that cannot be meant.
        """
        request = Request(
            payload=_bytes(payload),
            request_id=_checked_id(request_id),
            timeout_s=_checked_seconds(timeout_s),
            endpoint=endpoint,
            metadata=dict(metadata or {}),
            tenant=tenant,
            priority=_checked_priority(priority),
        )
        taken = await self._reached().submit(request, within_s)
        return Job(request_id=taken, until=self.now() + min(timeout_s, LONGEST_TIMEOUT_S), client=self)

    async def wait(self, request_id: str, within_s: float) -> Result:
        """The result, as soon as there is one. Faults on the way are waited out.

        Raises:
            NoResultYet: there is none after `within_s` seconds.
            NoSuchRequest: over HTTP, the server does not know it.
        """
        loop = asyncio.get_running_loop()
        until, pause_s, why = loop.time() + within_s, FIRST_PAUSE_S, ""
        while True:
            asked_at, left_s = loop.time(), max(until - loop.time(), 0.0)
            found = None
            try:
                found = await self._reached().look(request_id, left_s)
            except StoreUnavailable as exc:
                why = f": {exc}"
            if found is not None:
                return found
            if loop.time() >= until:
                raise NoResultYet(f"no result of {request_id} within {within_s:g} s{why}")
            if loop.time() - asked_at >= SOON_S:
                pause_s = FIRST_PAUSE_S
                continue
            # A fault, or a server that does not hold its answer back: it must not be asked all the time.
            await asyncio.sleep(min(pause_s * self._rng.uniform(0.5, 1.0), until - loop.time()))
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def look(self, request_id: str) -> Result | None:
        """The result, if there is one now.

        Raises:
            StoreUnavailable, NoSuchRequest
        """
        return await self._reached().look(request_id, 0.0)

    async def submit_and_wait(
        self,
        payload: Payload,
        *,
        endpoint: str | None = None,
        timeout_s: float = TIMEOUT_S,
        metadata: Mapping[str, str] | None = None,
        tenant: str | None = None,
        request_id: str | None = None,
        priority: int | None = None,
    ) -> Result:
        """Both; as they are."""
        job = await self.submit(
            payload,
            endpoint=endpoint,
            timeout_s=timeout_s,
            metadata=metadata,
            tenant=tenant,
            request_id=request_id,
            priority=priority,
        )
        return await job.wait()

    async def cancel(self, request_id: str) -> Cancelled:
        """End a request with a failed result (499), if it has none yet. Whoever runs it notices and stops.

        Raises:
            NotSupported: the server cannot cancel.
            StoreUnavailable: nobody could be asked. It may have been done; asking again does no harm.
            NoSuchRequest: over HTTP, the server does not know it.
        """
        return await self._reached().cancel(request_id)

    async def __aenter__(self) -> Self:
        self._way = await self._opening.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._way = None
        await self._opening.__aexit__(kind, error, trace)

    def _reached(self) -> Way:
        if self._way is None:
            raise RuntimeError("the client is not open: use it inside `async with`")
        return self._way


class SyncClient:
    """The same for programs without asyncio: `with SyncClient.http(url) as client:`. For any number of threads.

    The client lives on an event loop in a thread of its own, which ends with the context.
    """

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make = make
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: Client | None = None

    @classmethod
    def direct(cls, *, rabbitmq_url: str, redis_url: str, deployment_id: str, **options: Any) -> "SyncClient":
        """As `Client.direct`."""
        return cls(
            lambda: Client.direct(
                rabbitmq_url=rabbitmq_url, redis_url=redis_url, deployment_id=deployment_id, **options
            )
        )

    @classmethod
    def streams(cls, *, redis_url: str, **options: Any) -> "SyncClient":
        """As `Client.streams`."""
        return cls(lambda: Client.streams(redis_url=redis_url, **options))

    @classmethod
    def http(cls, url: str, **options: Any) -> "SyncClient":
        """As `Client.http`."""
        return cls(lambda: Client.http(url, **options))

    def submit(self, payload: Payload, **options: Any) -> str:
        """As `Client.submit`; the request's id."""
        return self._run(lambda client: client.submit(payload, **options)).request_id

    def wait(self, request_id: str, within_s: float) -> Result:
        """As `Client.wait`."""
        return self._run(lambda client: client.wait(request_id, within_s))

    def submit_and_wait(self, payload: Payload, **options: Any) -> Result:
        """As `Client.submit_and_wait`."""
        return self._run(lambda client: client.submit_and_wait(payload, **options))

    def cancel(self, request_id: str) -> Cancelled:
        """As `Client.cancel`."""
        return self._run(lambda client: client.cancel(request_id))

    def __enter__(self) -> Self:
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="inference_worker.client", daemon=True)
        self._thread.start()
        try:
            self._client = self._call(self._make().__aenter__())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        client, self._client = self._client, None
        try:
            if client is not None:
                self._call(client.__aexit__(None, None, None))
        finally:
            self._end()

    def _run(self, ask: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        if self._client is None:
            raise RuntimeError("the client is not open: use it inside `with`")
        return self._call(ask(self._client))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C in the caller's thread: nobody waits any more.
            raise

    def _end(self) -> None:
        loop, thread = self._loop, self._thread
        assert loop is not None
        assert thread is not None
        asyncio.run_coroutine_threadsafe(_all_ended(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        self._loop = self._thread = None


# ---------------------------------------------------------------- arguments


async def _all_ended() -> None:
    """Calls that other threads still wait for: nobody will run them any more."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def _asked(url: str | Callable[[], str]) -> Callable[[], str]:
    return url if callable(url) else lambda: url


def _bytes(payload: Payload) -> bytes:
    raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    try:
        msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise ValueError(f"payload must be a JSON object: {exc}") from exc
    return raw


def _checked_id(request_id: str | None) -> str | None:
    if request_id is not None and not usable_id(request_id):
        raise ValueError("request_id must be a string of 1 to 512 bytes of UTF-8 without control characters")
    return request_id


def _checked_priority(priority: int | None) -> int | None:
    if priority is not None and not 0 <= priority <= MOST_PRIORITY:
        raise ValueError(f"priority must be a whole number from 0 to {MOST_PRIORITY}")
    return priority


def _checked_seconds(timeout_s: float) -> float:
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"timeout_s must be a finite number above 0, got {timeout_s}")
    return float(timeout_s)
