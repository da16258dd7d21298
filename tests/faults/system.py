"""One deployment under test: model, billing and metric server, a queue, a store, and the workers that a test starts.

Workers are processes (`worker`), to be killed and frozen, or run in the test's own loop (`inside`), to be looked into.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import aio_pika
import aiohttp
from aio_pika.abc import HeadersType
from redis.asyncio import Redis as RedisClient

from inference_worker import assembly
from inference_worker.assembly import Outside, Worker
from inference_worker.config.settings import load
from tests import conservation
from tests.conservation import Evidence, ResultWatcher, assert_conserved, channel_of, publish
from tests.faults.model import FakeModel
from tests.faults.processes import WorkerProcess
from tests.faults.sinks import BillingServer, MetricServer
from tests.services import free_port
from tests.waiting import NotInTime, eventually
from tests.worker_env import worker_env

STOP_S = 13.0
"""The grace of the tests' workers, and what may follow it."""


class Running(WorkerProcess):
    """A worker process with its ops port."""

    port = 0
    replica = ""

    @property
    def readyz(self) -> str:
        return f"http://127.0.0.1:{self.port}/readyz"

    async def status(self) -> dict[str, object]:
        """What `/status` says."""
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self.port}/status") as answer:
            said: dict[str, object] = await answer.json()
            return said

    async def in_state(self, state: str, *, within: float = 20.0) -> None:
        """Wait until the listener is in this state."""

        async def reached() -> bool:
            try:
                return (await self.status())["state"] == state
            except aiohttp.ClientError:
                return False

        await eventually(reached, within=within, what=f"{self.replica} {state}")

    def lines(self, event: str) -> list[dict[str, object]]:
        """The log's lines with this event."""
        found = []
        for line in self.log.splitlines():
            if event in line and line.startswith("{") and line.endswith("}"):
                parsed: dict[str, object] = json.loads(line)
                if parsed.get("event") == event:
                    found.append(parsed)
        return found


class System:
    """`async with System(...) as system:` starts model and sinks; workers are the test's to start."""

    def __init__(
        self, *, rabbitmq_url: str, redis_url: str, deployment_id: str, folder: Path, watched: bool = True
    ) -> None:
        self.rabbitmq_url = rabbitmq_url
        self.redis_url = redis_url
        self.deployment_id = deployment_id
        self.queue = f"infer_req.{deployment_id}"
        self.dlq = f"dlq.{deployment_id}"
        self.folder = folder
        self.model = FakeModel()
        self.billing = BillingServer()
        self.metrics = MetricServer()
        self.redis: RedisClient = RedisClient.from_url(redis_url, socket_timeout=None)
        self.watcher = ResultWatcher(redis_url, only=deployment_id) if watched else None
        self.submitted: list[str] = []
        self._open = AsyncExitStack()
        self._made = 0

    async def __aenter__(self) -> Self:
        for each in (self.model, self.billing, self.metrics, self.redis, self.watcher):
            if each is not None:
                await self._open.enter_async_context(each)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    # Workers

    def env(self, replica: str, changes: Mapping[str, str], *, http_port: int = 0) -> dict[str, str]:
        """A worker's environment; billing is on, the metric server is off."""
        env = worker_env(
            rabbitmq_url=self.rabbitmq_url,
            redis_url=self.redis_url,
            model_url=self.model.url,
            deployment_id=self.deployment_id,
            http_port=http_port,
            REPLICA_ID=replica,
            CROESUS_HOST=self.billing.url,
            RABBITMQ_PREFETCH="8",
            METRICS_FLUSH_INTERVAL_S="0.2",
        )
        return {**env, **changes}

    def process(self, replica: str = "replica-1", **changes: str) -> Running:
        """A worker process that is not started yet."""
        port = free_port()
        made = Running(self.env(replica, changes, http_port=port), output=self.folder / f"{replica}.log")
        made.port, made.replica = port, replica
        return made

    @asynccontextmanager
    async def worker(self, replica: str = "replica-1", **changes: str) -> AsyncGenerator[Running]:
        """A worker process, ready; killed at the end."""
        async with self.process(replica, **changes) as process:
            await process.ready(process.readyz)
            yield process

    @asynccontextmanager
    async def inside(self, replica: str = "inside", **changes: str) -> AsyncGenerator[Worker]:
        """A worker in the test's own loop; told to stop at the end, and awaited."""
        stop = asyncio.Event()
        settings = load(self.env(replica, changes))
        async with assembly.worker(settings, Outside(now=time.time, rng=random.Random())) as made:
            running = asyncio.create_task(made.run(stop))
            try:
                yield made
            finally:
                stop.set()
                async with asyncio.timeout(STOP_S):
                    await running

    async def stopped(self, *workers: Running) -> None:
        """Tell processes to stop, and see that they do as they are told."""
        for worker in workers:
            worker.terminate()
        for worker in workers:
            assert await worker.wait(within=STOP_S) == 0, worker.log[-4000:]

    # Requests

    def ids(self, number: int, name: str = "r") -> list[str]:
        """Ids that no other test has."""
        return [f"{self.deployment_id}-{name}{n}" for n in range(number)]

    async def submit(
        self, *ids: str, timeout_s: float = 120.0, pad: int = 0, headers: HeadersType | None = None, prompt: str = ""
    ) -> None:
        """Publish one request for each id; the queue is declared by a worker, or was."""
        bodies = [
            {
                "request_id": one,
                "received_at": time.time(),
                "timeout_s": timeout_s,
                "payload": {"model": "tiny", "messages": [{"role": "user", "content": f"{one} {prompt}{'x' * pad}"}]},
            }
            for one in ids
        ]
        self.submitted += [one for one in ids if one not in self.submitted]
        await publish(self.rabbitmq_url, self.queue, *bodies, headers=headers)

    async def submit_when_declared(self, *ids: str) -> None:
        """As `submit`, once the queue is there."""

        async def there() -> bool:
            async with channel_of(self.rabbitmq_url) as channel:
                try:
                    await channel.declare_queue(self.queue, passive=True)
                except aio_pika.exceptions.ChannelNotFoundEntity:
                    return False
                return True

        await eventually(there, within=20, what="the queue", every=0.05)
        await self.submit(*ids)

    async def answered(self, ids: Collection[str], *, within: float = 30.0) -> dict[str, dict[str, object]]:
        """Wait until each has a result; the results."""

        async def all_there() -> dict[str, dict[str, object]] | None:
            found = await conservation.results(self.redis, ids)
            missing = set(ids) - found.keys()
            assert not missing, f"{len(missing)} without a result: {sorted(missing)[:5]}"
            return found

        return await eventually(all_there, within=within, what=f"the results of {len(ids)} requests", every=0.05)

    def calls(self) -> Counter[str]:
        """How often the model was called, by request id."""
        return Counter(request.headers.get("x-request-id", "") for request in self.model.requests)

    async def ready_messages(self) -> int:
        """How many messages of the queue are in nobody's hands."""
        async with channel_of(self.rabbitmq_url) as channel:
            try:
                queue = await channel.declare_queue(self.queue, passive=True)
            except aio_pika.exceptions.ChannelNotFoundEntity:
                return 0
            return queue.declaration_result.message_count or 0

    async def waiting(self, messages: int, *, within: float = 20.0) -> None:
        """Wait until at least this many messages are in nobody's hands."""

        async def there() -> bool:
            return await self.ready_messages() >= messages

        await eventually(there, within=within, what=f"{messages} ready messages", every=0.05)

    async def drained(self, *workers: Worker, within: float = 30.0) -> None:
        """Wait until the queue is empty and these workers hold nothing."""

        async def empty() -> bool:
            return await self.ready_messages() == 0 and not any(worker.listener.in_flight for worker in workers)

        await eventually(empty, within=within, what="the end of all messages", every=0.05)

    async def billed(self, *, within: float = 20.0) -> None:
        """Wait until every usage event has left."""

        async def none_left() -> bool:
            return not await conservation.outbox(self.redis, self.deployment_id)

        await eventually(none_left, within=within, what="an empty outbox")

    # The end

    async def evidence(self) -> Evidence:
        """What is where, while no worker runs."""
        if self.watcher is not None:
            # What was published may still be on its way to us; what was not is found out by the check.
            stored = await conservation.results(self.redis, self.submitted)
            with suppress(NotInTime):
                await self.watcher.ended(stored, within=3)
        return await conservation.collect(
            self.submitted,
            redis=self.redis,
            rabbitmq_url=self.rabbitmq_url,
            deployment_id=self.deployment_id,
            dlq=self.dlq,
            billed=self.billing.events,
            watcher=self.watcher,
        )

    async def conserved(self, *, all_done: bool = True) -> Evidence:
        """The check that every fault test ends with; `all_done`: and nothing is left in the queue."""
        evidence = await self.evidence()
        assert_conserved(evidence)
        if all_done:
            assert not evidence.queued, f"left in the queue: {evidence.queued}"
            assert evidence.results.keys() >= evidence.submitted
        return evidence
