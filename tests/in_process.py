"""A worker in the test's own process, with the settings of an environment, and what a test asks of its neighbours.

Far quicker than a process of its own (`faults/processes.py`), which is for signals and kills. Its paces are those of a
test: short leases, looks and delays.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from pamqp.commands import Basic
from redis.asyncio import Redis
from structlog.typing import EventDict

from inference_worker.assembly import Outside, Worker, worker
from inference_worker.config.settings import load
from tests.conservation import outbox
from tests.faults.model import FakeModel
from tests.faults.sinks import BillingServer
from tests.waiting import eventually
from tests.worker_env import queue_of

START_S = 15.0
SOON_S = 10.0
END_S = 15.0
PACE = {
    "HEALTH_CHECK_INTERVAL_S": "0.3",
    "METRICS_FLUSH_INTERVAL_S": "0.3",
    "CLAIM_LEASE_S": "0.9",
    "REDIS_RETRY_DELAY_S": "0.6",
    "SHUTDOWN_GRACE_S": "0.3",
    "MODEL_INFER_TIMEOUT_S": "8",
    "WORKER_HTTP_PORT": "0",
}
"""Every variable that makes a worker wait; a test that needs another value gives it."""

COMPLETED_KEYS = (
    *("status", "status_code", "result"),
    *("request_id", "attempt", "replica_id", "received_at", "finished_at", "timings"),
)
"""The keys of a completed result, in their order."""

FAILED_KEYS = (
    *("status", "status_code", "error"),
    *("request_id", "attempt", "replica_id", "received_at", "finished_at", "timings", "error_code"),
)
INVALID_KEYS = tuple(key for key in FAILED_KEYS if key != "received_at")
"""Of a message that is no request `received_at` is not known."""


def request_body(request_id: object = "r", **changes: object) -> dict[str, object]:
    """A request as its producer writes it; a change to `...` leaves the field out."""
    body: dict[str, object] = {
        "request_id": request_id,
        "received_at": time.time(),
        "timeout_s": 60,
        "payload": {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
    }
    return {name: value for name, value in (body | changes).items() if value is not ...}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is left of a test's messages once the worker has stopped."""

    dispositions: list[str]
    """What the worker says it did, in order, one for each delivery."""
    queued: list[AbstractIncomingMessage]
    dead: list[AbstractIncomingMessage]
    results: dict[str, dict[str, Any]]
    """All of them, by request id."""
    calls: int
    billed: list[str]
    """Request ids, sorted, each once."""

    @property
    def result(self) -> dict[str, Any]:
        """The only one."""
        (one,) = self.results.values()
        return one


class _Bare(Basic.Properties):
    """Properties that stay without a `message_id` where none was given: the driver adds one, to find what came back."""

    def __init__(self, wire: Callable[[bytes], bytes], **properties: Any) -> None:
        super().__init__(**properties)
        self._wire = wire
        self._given = properties.get("message_id")

    def marshal(self) -> bytes:
        self.message_id = self._given
        return self._wire(super().marshal())


class Broker:
    """What a test does and sees at RabbitMQ, over a connection of its own."""

    def __init__(self, connection: aio_pika.abc.AbstractConnection) -> None:
        self._connection = connection

    @asynccontextmanager
    async def channel(self) -> AsyncGenerator[AbstractChannel]:
        async with self._connection.channel(on_return_raises=True) as channel:
            yield channel

    async def publish(
        self, queue: str, body: bytes, *, wire: Callable[[bytes], bytes] = lambda sent: sent, **properties: Any
    ) -> None:
        """Confirmed, and an error where no queue takes it. Nothing is set but what is given.

        `wire` changes the properties as they are sent, for what the driver would never write.
        """
        if not await self._look(queue):
            raise LookupError(f"there is no queue {queue}")
        async with self.channel() as channel:
            raw = await channel.get_underlay_channel()
            given = _Bare(wire, **{"delivery_mode": 2} | {name: value for name, value in properties.items() if value})
            await raw.basic_publish(body, routing_key=queue, properties=given, mandatory=True)

    async def ready(self, queue: str) -> int | None:
        """How many messages nobody holds; None where there is no such queue."""
        found = await self._look(queue)
        return None if found is None else found.message_count

    async def consumers(self, queue: str) -> int | None:
        found = await self._look(queue)
        return None if found is None else found.consumer_count

    async def _look(self, queue: str) -> Any:
        try:
            async with self.channel() as channel:
                return (await channel.declare_queue(queue, passive=True)).declaration_result
        except aio_pika.exceptions.ChannelNotFoundEntity:
            return None

    async def take(self, queue: str) -> list[AbstractIncomingMessage]:
        """Every ready message, out of the queue."""
        found: list[AbstractIncomingMessage] = []
        with suppress(aio_pika.exceptions.ChannelNotFoundEntity):
            async with self.channel() as channel:
                source = await channel.declare_queue(queue, passive=True)
                while (message := await source.get(fail=False, no_ack=True)) is not None:
                    found.append(message)
        return found

    async def declare(self, queue: str, arguments: Mapping[str, object] | None = None) -> None:
        async with self.channel() as channel:
            await channel.declare_queue(queue, durable=True, arguments=dict(arguments or {}))  # type: ignore[arg-type]

    async def delete(self, *queues: str) -> None:
        async with self.channel() as channel:
            for queue in queues:
                await channel.queue_delete(queue)

    async def delete_exchange(self, name: str) -> None:
        async with self.channel() as channel:
            await channel.exchange_delete(name)


@dataclass(kw_only=True)
class Neighbours:
    """What all workers of one test share."""

    broker: Broker
    redis: Redis
    model: FakeModel
    billing: BillingServer
    log: Sequence[EventDict]
    """Every line that any of them has logged."""


@dataclass(kw_only=True)
class InProcess:
    """One worker that runs as a task."""

    env: Mapping[str, str]
    at: Neighbours
    worker: Worker
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _task: "asyncio.Task[None] | None" = None

    @property
    def queue(self) -> str:
        return queue_of(self.env)

    @property
    def dlq(self) -> str:
        return self.env["INFERENCE_DLQ"]

    @property
    def dispositions(self) -> list[str]:
        """Of the canonical lines so far; of all workers of the test."""
        return [str(line["disposition"]) for line in self.lines("request")]

    def lines(self, event: str) -> list[EventDict]:
        return [line for line in self.at.log if line["event"] == event]

    async def consuming(self, within: float = START_S) -> None:
        """Wait until messages flow; an end of the worker is a failure at once."""

        def flows() -> bool:
            if self._task is not None and self._task.done():
                self._task.result()
                raise RuntimeError("the worker has ended")
            return self.worker.listener.state == "consuming"

        await eventually(flows, within=within, what="the worker consumes")

    async def suspended(self, within: float = SOON_S) -> None:
        await eventually(lambda: self.worker.listener.state == "suspended", within=within, what="consuming is stopped")

    async def publish(
        self,
        body: object,
        *,
        headers: Mapping[str, object] | None = None,
        message_id: str | None = None,
        **properties: Any,
    ) -> None:
        """A message, persistent: bytes as they are, anything else as JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.at.broker.publish(self.queue, raw, headers=headers, message_id=message_id, **properties)

    async def disposed(self, *dispositions: str, within: float = SOON_S) -> None:
        """Wait until at least these have been logged, in this order, others between them or not."""

        def came() -> bool:
            left = iter(self.dispositions)
            return all(one in left for one in dispositions)

        await eventually(came, within=within, what=f"{dispositions} among {self.dispositions or 'no'} dispositions")

    async def stored(self, request_id: str, within: float = SOON_S) -> dict[str, Any]:
        """Wait for a result."""

        async def there() -> bytes | None:
            found = await self.at.redis.get(f"infer_resp:{request_id}")
            return found if isinstance(found, bytes) else None

        found: dict[str, Any] = json.loads(await eventually(there, within=within, what=f"the result of {request_id}"))
        return found

    async def stop(self) -> None:
        """Tell it to stop, and wait until it has."""
        self._stop.set()
        if self._task is not None:
            task, self._task = self._task, None
            async with asyncio.timeout(END_S):
                await task

    def told_to_stop(self) -> None:
        """As SIGTERM does; returns at once."""
        self._stop.set()

    async def seen(self, *, dead: int = 0) -> Seen:
        """Stop, and look what is where. `dead` letters are waited for: the broker moves them in its own time."""
        dispositions = self.dispositions
        await self.stop()
        if dead:

            async def all_dead() -> bool:
                return await self.at.broker.ready(self.dlq) == dead

            await eventually(all_dead, within=SOON_S, what=f"{dead} dead letters")
        keys = sorted(await self.at.redis.keys("infer_resp:*"))
        values = await self.at.redis.mget(keys) if keys else []
        waiting = await outbox(self.at.redis, self.env["DEPLOYMENT_ID"])
        events = [*self.at.billing.events, *waiting]
        by_event = {str(one["id"]): str(one["data"]["request_id"]) for one in events}  # type: ignore[index]
        return Seen(
            dispositions=dispositions,
            queued=await self.at.broker.take(self.queue),
            dead=await self.at.broker.take(self.dlq),
            results={
                _text(key).removeprefix("infer_resp:"): json.loads(value)
                for key, value in zip(keys, values, strict=True)
                if value is not None
            },
            calls=len(self.at.model.requests),
            billed=sorted(by_event.values()),
        )


def _text(key: bytes | str) -> str:
    return key.decode() if isinstance(key, bytes) else key


@asynccontextmanager
async def in_process(env: Mapping[str, str], at: Neighbours) -> AsyncGenerator[InProcess]:
    """Run a worker inside the context; it is stopped at the end, if it was not before."""
    outside = Outside(now=time.time, rng=random.Random(1))
    async with AsyncExitStack() as stack:
        made = InProcess(env=env, at=at, worker=await stack.enter_async_context(worker(load(env), outside)))
        made._task = asyncio.create_task(made.worker.run(made._stop), name=f"worker {env['REPLICA_ID']}")
        try:
            yield made
        finally:
            await made.stop()
