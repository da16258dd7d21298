"""The HTTP intake over a queue that the test looks into, a store that it fills, and a fleet that it makes up."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from inference_worker.confirmed_intake import ConfirmedIntake
from inference_worker.gateway.bodies import Bodies
from inference_worker.gateway.jobs import Jobs
from inference_worker.gateway.keys import KeyFile
from inference_worker.gateway.metrics import GatewayMetrics
from inference_worker.gateway.pace import Pace
from inference_worker.gateway.watch import Watch
from inference_worker.gateway.web import Gateway, Mount, app, no_webhooks
from inference_worker.messages import ErrorCode, Reply
from inference_worker.ports import Backlog, Beat
from inference_worker.results.fleet import MemoryFleet
from inference_worker.results.memory import MemoryStore
from inference_worker.results.memory_job_book import MemoryJobBook

CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "hello"}]}
TTL_S = 3600.0
START = 1_800_000_000.0
WAIT_S = 30.0


class Queue:
    """Takes what is published, unless it is away or full; nobody works on it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.ids: list[str] = []
        self.refuses: Exception | None = None
        self.waiting: int | None = None
        """What it says of itself; None for the truth."""
        self.published = asyncio.Event()

    async def publish(self, body: bytes, *, message_id: str) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.bodies.append(body)
        self.ids.append(message_id)
        self.published.set()

    async def backlog(self) -> Backlog:
        if self.refuses is not None:
            raise self.refuses
        return Backlog(ready=len(self.bodies) if self.waiting is None else self.waiting)


class Site:
    """What the intakes of one queue share: the queue, the store, the book, the fleet; and virtual Unix time."""

    def __init__(self) -> None:
        self.queue = Queue()
        self.store = MemoryStore(now=self.now, lease_s=15, ttl_s=TTL_S)
        self.book = MemoryJobBook(self.store, ttl_s=TTL_S, now=self.now)
        self.fleet = MemoryFleet(now=self.now)
        self.numbers = itertools.count(1)

    def now(self) -> float:
        return START + asyncio.get_running_loop().time()

    async def worker(
        self, replica: str = "w", *, slots: int = 2, service_s: float | None = 0.5, model: str = "m"
    ) -> None:
        """A worker says how it is."""
        beat = Beat(
            replica_id=replica,
            at=self.now(),
            slots=slots,
            in_flight=0,
            consuming=True,
            fit=True,
            service_s=service_s,
            done_per_s=1.0,
            model=model,
        )
        await self.fleet.beat(beat)

    async def end(
        self,
        job_id: str,
        *,
        status_code: int = 200,
        code: ErrorCode | None = None,
        result: bytes = b'{"a": 1}',
        error: str = "it failed",
    ) -> None:
        """A job ends, as a worker would have it."""
        reply = Reply(
            request_id=job_id,
            status="completed" if code is None else "failed",
            status_code=status_code,
            attempt=1,
            replica_id="replica-1",
            finished_at=self.now(),
            result=result if code is None else None,
            error=None if code is None else error,
            error_code=code,
        )
        await self.store.cancel(reply)


class Intake:
    """One intake of a site, and a client of it."""

    def __init__(
        self,
        site: Site | None = None,
        *,
        keys: KeyFile | None = None,
        most_waiting: int = 0,
        wait_s: float = WAIT_S,
        bodies: Bodies | None = None,
        models: Sequence[str] = (),
        check_webhook: Callable[[str, str], str | None] = no_webhooks,
        hint: Callable[[str], None] = lambda job_id: None,
        others: tuple[Mount, ...] = (),
    ) -> None:
        self.site = Site() if site is None else site
        self.queue, self.store, self.book = self.site.queue, self.site.store, self.site.book
        self.now, self.end = self.site.now, self.site.end
        self.metrics = GatewayMetrics()
        confirmed = ConfirmedIntake(self.book, self.queue.publish, self.queue.backlog)
        self.jobs = Jobs(
            intake=confirmed,
            book=self.book,
            store=self.store,
            pace=Pace(self.site.fleet),
            metrics=self.metrics,
            now=self.now,
            new_id=lambda: f"job-{next(self.site.numbers)}",
            infer_path="/v1/chat/completions",
            result_ttl_s=TTL_S,
            most_waiting=most_waiting,
            name="gateway-1",
            knows_tenants=keys is not None,
            hint=hint,
        )
        self.watch = Watch(confirmed.backlog, self.store.probe, self.metrics, self.jobs.stopping)

        async def names() -> Sequence[str]:
            return models

        self.web = app(
            Gateway(
                jobs=self.jobs,
                metrics=self.metrics,
                wait_s=wait_s,
                ready=self.watch.conditions,
                keys=keys,
                bodies=Bodies() if bodies is None else bodies,
                models=names,
                check_webhook=check_webhook,
                others=others,
            )
        )
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.web, raise_app_exceptions=False), base_url="http://intake"
        )

    async def post(self, body: object, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return await self.http.post("/v1/jobs", json=body, headers=dict(headers or {}))

    async def chat(self, headers: Mapping[str, str] | None = None, **more: object) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json={**CHAT, **more}, headers=dict(headers or {}))

    async def job(self, **more: object) -> str:
        answer = await self.post({"payload": CHAT, **more})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["job_id"])

    async def get(self, job_id: str, wait: object = None) -> httpx.Response:
        return await self.http.get(f"/v1/jobs/{job_id}", params={} if wait is None else {"wait": str(wait)})

    async def state(self, job_id: str) -> str:
        return str((await self.get(job_id)).json()["status"])

    async def metrics_page(self) -> str:
        return (await self.http.get("/metrics")).text

    def count(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(f"inference_worker_gateway_{name}", labels)
        assert value is not None, name
        return value


@asynccontextmanager
async def opened(made: Intake) -> AsyncGenerator[Intake]:
    async with made.http:
        yield made


def said(answer: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = answer.json()
    return body


def is_problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    """An error of RFC 9457."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = said(answer)
    assert body["status"] == status
    assert body["title"]
    assert body["detail"]
    assert body["code"]
    return body


def is_openai_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    """An error as OpenAI writes it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = said(answer)["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"]
    return error
