"""Small things that do the thing, for tests above the seams: a model, a store with faults, a worker of one process.

`Site` is what workers share (queue, store, clock); a `Worker` is one process of ours, which can be killed.
"""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

from inference_worker.breaker import Breaker
from inference_worker.disposition import AT_ONCE, Disposition, HandBack, RetryPolicy, Settlement, Token
from inference_worker.errors import StoreUnavailable, TransportLost
from inference_worker.listener import Listener
from inference_worker.message_processor import Job, MessageProcessor
from inference_worker.messages import InferenceRequest, Reply, Usage, encode_request
from inference_worker.metrics import WorkerMetrics
from inference_worker.metrics_buffer import MetricsBuffer
from inference_worker.pool_gate import PoolGate
from inference_worker.ports import (
    NO_HEADERS,
    Answer,
    Backlog,
    Claim,
    Delivery,
    Health,
    Progress,
    Renewal,
    Transport,
    Write,
)
from inference_worker.results.memory import MemoryStore
from inference_worker.timing import ByteBudget, ended
from inference_worker.transforms.shaping import AS_IT_CAME, Shaping
from inference_worker.transports.memory import MemoryBroker, MemoryTransport

T = TypeVar("T")
EPOCH = 1_700_000_000.0
"""When virtual time begins, in Unix seconds."""
LEASE_S = 15.0
TTL_S = 86_400.0
GOOD = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}'


def now() -> float:
    """Unix seconds by the virtual clock."""
    return EPOCH + asyncio.get_running_loop().time()


def body(request_id: str = "a", *, timeout_s: float = 600.0, payload: bytes = b"{}") -> bytes:
    """A message that is received now."""
    return encode_request(request_id=request_id, received_at=now(), timeout_s=timeout_s, payload=payload)


def event_of(request: InferenceRequest, reply: Reply, usage: Usage) -> bytes:
    """A usage event; its id is made of the request id alone."""
    return json.dumps({"id": request.request_id, "tokens": usage.total_tokens, "attempt": reply.attempt}).encode()


@dataclass
class FakeModel:
    """Answers after `takes_s`; the first calls end as `failures` say, in this order."""

    takes_s: float = 0.0
    failures: list[Exception | Answer] = field(default_factory=list)
    answer: Answer = field(default_factory=lambda: Answer(status_code=200, reason="OK", body=GOOD))
    calls: list[str] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    streams: list[bool] = field(default_factory=list)
    timeouts_s: list[float] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    targets: list[tuple[str | None, str]] = field(default_factory=list)
    """Base URL and endpoint of each call."""
    running: dict[str, int] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    """Requests whose call was closed before its end."""
    most_at_once: int = 0
    warmed: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def infer(
        self,
        *,
        endpoint: str,
        payload: bytes,
        stream: bool,
        request_id: str,
        timeout_s: float,
        headers: Mapping[str, str] = NO_HEADERS,
        base_url: str | None = None,
    ) -> Answer:
        self.calls.append(request_id)
        self.targets.append((base_url, endpoint))
        self.headers.append(headers)
        self.payloads.append(payload)
        self.streams.append(stream)
        self.timeouts_s.append(timeout_s)
        self.running[request_id] = self.running.get(request_id, 0) + 1
        self.most_at_once = max(self.most_at_once, sum(self.running.values()))
        self.begun.set()
        said: Exception | Answer = self.failures.pop(0) if self.failures else self.answer
        try:
            await asyncio.sleep(self.takes_s)
        except asyncio.CancelledError:
            self.closed.append(request_id)
            raise
        finally:
            self.running[request_id] -= 1
        if isinstance(said, Exception):
            raise said
        return said

    async def warm(self, connections: int) -> None:
        self.warmed += 1


class FaultyStore:
    """The real store in memory, seen over a link that can be away, slow, cut after the work, or dead."""

    def __init__(self, real: MemoryStore) -> None:
        self.real = real
        self.away: str | None = None
        """Why nothing is done; what it raises."""
        self.away_for: set[str] = set()
        """The only methods that `away` concerns; empty for all."""
        self.answers_lost = 0
        """So many answers get lost: the work is done, and nobody hears of it."""
        self.takes_s: dict[str, float] = {}
        self.dead = False
        """Its process was killed: nothing it asks is ever done or answered."""
        self.asked: list[tuple[str, str]] = []
        self.dies_in: int | None = None
        """So many questions from now its process is killed, before the work is done or after it."""
        self.dies_before_the_work = False
        self.died: Callable[[], None] = lambda: None

    def _die(self, *, before: bool) -> None:
        if self.dies_in == 0 and self.dies_before_the_work is before:
            self.dead = True
            self.died()

    async def _do(self, name: str, request_id: str, work: Callable[[], Awaitable[T]]) -> T:
        if self.dies_in is not None and name != "probe":
            self.dies_in -= 1
            self._die(before=True)
        if self.dead:
            await asyncio.Event().wait()
        self.asked.append((name, request_id))
        if self.away is not None and (not self.away_for or name in self.away_for):
            raise StoreUnavailable(self.away)
        answer = await work()
        self._die(before=False)
        if name in self.takes_s:
            await asyncio.sleep(self.takes_s[name])
        if self.answers_lost and name != "probe":
            self.answers_lost -= 1
            raise StoreUnavailable("the answer was lost")
        if self.dead:
            await asyncio.Event().wait()
        return answer

    async def claim(self, request_id: str, attempt: int, token: Token, deadline: float) -> Claim:
        return await self._do("claim", request_id, lambda: self.real.claim(request_id, attempt, token, deadline))

    async def renew(self, request_id: str, token: Token) -> Renewal:
        return await self._do("renew", request_id, lambda: self.real.renew(request_id, token))

    async def release(self, request_id: str, token: Token, floor: int | None = None) -> None:
        await self._do("release", request_id, lambda: self.real.release(request_id, token, floor))

    async def write(self, reply: Reply, usage_event: bytes | None, token: Token) -> Write:
        return await self._do("write", reply.request_id, lambda: self.real.write(reply, usage_event, token))

    async def cancel(self, reply: Reply) -> Write:
        return await self._do("cancel", reply.request_id, lambda: self.real.cancel(reply))

    async def cancellations(self, until: asyncio.Event, told: Callable[[str], None]) -> None:
        await self.real.cancellations(until, told)

    async def bury(self, request_id: str, note: bytes) -> None:
        await self._do("bury", request_id, lambda: self.real.bury(request_id, note))

    async def read(self, request_id: str) -> bytes | None:
        return await self._do("read", request_id, lambda: self.real.read(request_id))

    async def wait(self, request_id: str, within_s: float) -> bytes | None:
        return await self._do("wait", request_id, lambda: self.real.wait(request_id, within_s))

    async def progress(self, request_id: str) -> Progress:
        return await self._do("progress", request_id, lambda: self.real.progress(request_id))

    async def probe(self) -> None:
        await self._do("probe", "", self.real.probe)

    def count(self, name: str) -> int:
        """How often something was asked."""
        return sum(asked == name for asked, _ in self.asked)


class FittedHealth(Health):
    """The model's health, looked at by a checker that is told what it sees."""

    def __init__(self, name: str, *, ok: bool = True) -> None:
        super().__init__(name, ok=ok)
        self.asked_now: list[float] = []
        self.sees_after_s: float | None = 0.1
        """How long a look takes; None for a checker that never comes."""

    async def check_now(self, within_s: float) -> bool:
        self.asked_now.append(within_s)
        if self.sees_after_s is None:
            return await super().check_now(within_s)
        await asyncio.sleep(self.sees_after_s)
        return self.ok


class Watched:
    """A transport in memory whose settlements are written down; a killed one settles nothing more."""

    def __init__(self, real: MemoryTransport, worker: "Worker") -> None:
        self.real = real
        self._worker = worker

    @property
    def lost(self) -> asyncio.Event:
        return self.real.lost

    @property
    def lost_because(self) -> str:
        return self.real.lost_because

    @asynccontextmanager
    async def consuming(self, limit: int) -> AsyncGenerator[None, None]:
        async with self.real.consuming(limit):
            yield

    async def set_limit(self, limit: int) -> None:
        await self.real.set_limit(limit)

    async def receive(self) -> Delivery:
        if self._worker.deaf:
            await self.real.lost.wait()
        return await self.real.receive()

    async def settle(self, delivery: Delivery, disposition: Disposition) -> Settlement:
        if self._worker.store.dead:
            await asyncio.Event().wait()
        self._worker.tried.append(disposition)
        await asyncio.sleep(self._worker.settle_takes_s)
        if self._worker.settlements:
            return self._worker.settlements.pop(0)
        if self._worker.settle_fails:
            raise self._worker.settle_fails.pop(0)
        settlement = await self.real.settle(delivery, disposition)
        self._worker.settled.append(settlement)
        return settlement

    async def extend(self, delivery: Delivery) -> None:
        await self.real.extend(delivery)

    async def publish(
        self, body: bytes, *, message_id: str | None = None, headers: Mapping[str, object] | None = None
    ) -> None:
        await self.real.publish(body, message_id=message_id, headers=headers)

    async def backlog(self) -> Backlog:
        backlog = await self.real.backlog()
        return replace(backlog, withheld=backlog.ready if self._worker.withholds else 0)


class Site:
    """One deployment: a queue, a store, and as many workers as a test starts."""

    def __init__(self, *, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self.store = MemoryStore(now=now, lease_s=lease_s, ttl_s=TTL_S)
        self.broker = MemoryBroker(store=self.store, now=now)
        self.tokens = count()
        self.workers = 0

    def token(self) -> Token:
        return Token(f"token-{next(self.tokens)}")

    async def publish(self, *bodies: bytes, message_id: str | None = None) -> None:
        async with self.broker.connect() as producer:
            for sent in bodies:
                await producer.publish(sent, message_id=message_id)

    async def result(self, request_id: str = "a") -> dict[str, object] | None:
        stored = await self.store.read(request_id)
        return None if stored is None else json.loads(stored)

    @property
    def dead(self) -> list[str]:
        return [letter.reason for letter in self.broker.dead]


class Worker:
    """One process of ours: processor, listener, and its own view of store and queue."""

    def __init__(
        self,
        site: Site,
        model: FakeModel,
        *,
        slots: int = 4,
        max_retries: int = 3,
        first_delay_s: float = 0.0,
        infer_timeout_s: float = 120.0,
        retry_statuses: frozenset[int] = frozenset(),
        max_crashes: int = 3,
        store_patience_s: float = 5.0,
        grace_s: float = 25.0,
        budget_bytes: int = 1_000_000,
        model_ok: bool = True,
        breaker_failures: int = 0,
        gate: PoolGate | None = None,
        hand_back: HandBack = AT_ONCE,
        shaping: Shaping = AS_IT_CAME,
    ) -> None:
        self.site = site
        self.model = model
        self.name = f"w{site.workers}"
        site.workers += 1
        self.store = FaultyStore(site.store)
        self.tried: list[Disposition] = []
        self.settled: list[Settlement] = []
        self.settlements: list[Settlement] = []
        """What the next settlements answer, without being carried out."""
        self.settle_fails: list[Exception] = []
        self.settle_takes_s = 0.0
        self.deaf = False
        """Its consumer is alive and gets nothing."""
        self.withholds = False
        """Its queue keeps what is ready, and says so."""
        self.refusals: list[str] = []
        """Why the next connections cannot be had."""
        self.connect_takes_s = 0.0
        self.connects: list[float] = []
        self.views: list[MemoryBroker] = []
        """The queue as each connection saw it."""
        self.model_health = FittedHealth("model", ok=model_ok)
        self.store_health = Health("store")
        self.metrics = WorkerMetrics()
        self.buffer = MetricsBuffer(1000)
        self.budget = ByteBudget(budget_bytes)
        self.processor = MessageProcessor(
            store=self.store,
            model=model,
            model_health=self.model_health,
            store_health=self.store_health,
            metrics=self.metrics,
            usage_event=event_of,
            now=now,
            new_token=site.token,
            rng=random.Random(1),
            replica_id=self.name,
            infer_path="/v1/chat/completions",
            infer_timeout_s=infer_timeout_s,
            retry_statuses=retry_statuses,
            slots=slots,
            lease_s=site.lease_s,
            max_crashes=max_crashes,
            store_patience_s=store_patience_s,
            gate=gate,
            shaping=shaping,
        )
        self.listener = Listener(
            connect=self.connect,
            processor=self.processor,
            store=self.store,
            store_health=self.store_health,
            warm=model.warm,
            policy=RetryPolicy(max_retries=max_retries, first_delay_s=first_delay_s),
            breaker=Breaker(breaker_failures),
            metrics=self.metrics,
            buffer=self.buffer,
            budget=self.budget,
            now=now,
            rng=random.Random(2),
            limit=slots,
            grace_s=grace_s,
            store_patience_s=store_patience_s,
            hand_back=hand_back,
        )
        self.store.died = self._die
        self.model_health.watch(self._model_changed)
        if model_ok:
            self.listener.resume_consuming("model")
        self.stop = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def _model_changed(self, ok: bool, reason: str) -> None:
        if ok:
            self.listener.resume_consuming("model")
        else:
            self.listener.suspend_consuming("model", reason)

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Transport, None]:
        self.connects.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.connect_takes_s)
        if self.refusals:
            raise TransportLost(self.refusals.pop(0))
        # The same queue, with this worker's own view of the store.
        view = replace(self.site.broker, store=self.store)
        self.views.append(view)
        async with view.connect() as transport:
            yield Watched(transport, self)

    def start(self) -> "Worker":
        self.task = asyncio.create_task(self.listener.run(self.stop))
        return self

    async def ended(self) -> None:
        """Ask it to stop, and wait until it has."""
        self.stop.set()
        assert self.task is not None
        await self.task

    def cut(self, why: str = "cut by the test") -> None:
        """Its connection to the broker is over."""
        transport = self.listener.transport
        if isinstance(transport, Watched):
            transport.real.cut(why)

    async def kill(self) -> None:
        """It is gone without a word: nothing it had begun goes on, and the broker sees its connection end."""
        self._die()
        assert self.task is not None
        await ended(self.task)

    def _die(self) -> None:
        self.store.dead = True
        self.cut("killed")
        for job in self.listener._jobs:  # Else a step that gives up on the silent store would go on to its next one.
            job.cancel()

    def gauge(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"inference_worker_{name}", labels)

    # ------------------------------------------------------------ without a listener

    def job(self, sent: bytes, *, attempts: int = 0, message_id: str | None = None) -> Job:
        """A delivery in this worker's hands."""
        return Job(
            Delivery(
                body=sent,
                attempts=attempts,
                queue="q",
                message_id=message_id,
                redelivered=False,
                receipt=None,
                lost=asyncio.Event(),
            )
        )


@asynccontextmanager
async def running(worker: Worker) -> AsyncGenerator[Worker, None]:
    """A worker that runs inside the context, and is stopped after it."""
    worker.start()
    try:
        yield worker
    finally:
        await worker.ended()
