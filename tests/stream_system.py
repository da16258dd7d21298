"""A deployment whose queue is a stream of Redis: that of `faults/system.py` without RabbitMQ, and its conservation.

Nothing that was put into the stream may be lost, answered twice, or be there twice: of every job there is one copy in
stream and delayed set together, or a result, or both result and dead letter.
"""

import json
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from inference_worker.assembly import Worker
from tests import conservation
from tests.conservation import Evidence, assert_conserved
from tests.faults.system import Running, System
from tests.stream_kit import Inside, Streams, look_inside
from tests.waiting import eventually

ENV = {
    "TRANSPORT": "redis-streams",
    "RABBITMQ_URL": "",
    "IWL_CLAIM_IDLE_MS": "500",
    "IWL_CONCURRENCY": "4",
    "IWL_MAX_ATTEMPTS": "2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSystem:
    """Model, billing, and the workers that a test starts, around one stream."""

    rest: System
    streams: Streams

    @asynccontextmanager
    async def worker(self, replica: str, **changes: str) -> AsyncGenerator[Running]:
        """A worker process, ready; killed at the end."""
        async with self.rest.worker(replica, **(ENV | changes)) as process:
            yield process

    def process(self, replica: str, **changes: str) -> Running:
        """A worker process that is not started yet."""
        return self.rest.process(replica, **(ENV | changes))

    @asynccontextmanager
    async def inside(self, replica: str = "inside", **changes: str) -> AsyncGenerator[Worker]:
        """A worker in the test's own loop."""
        async with self.rest.inside(replica, **(ENV | changes)) as made:
            yield made

    def ids(self, number: int, name: str = "r") -> list[str]:
        """Ids that no other test has."""
        return self.rest.ids(number, name)

    async def submit(self, *ids: str, prompt: str = "") -> None:
        """Put one entry for each id into the stream."""
        for one in ids:
            messages = [{"role": "user", "content": f"{one} {prompt}"}]
            body = {
                "request_id": one,
                "received_at": time.time(),
                "timeout_s": 120,
                "payload": {"model": "tiny", "messages": messages},
            }
            self.rest.submitted.append(one)
            await self.streams.add(json.dumps(body).encode(), one)

    async def answered(self, ids: Collection[str], *, within: float = 30.0) -> dict[str, dict[str, object]]:
        """Wait until each has a result; the results."""
        return await self.rest.answered(ids, within=within)

    async def drained(self, *, within: float = 20.0) -> None:
        """Wait until the stream is empty, and every usage event has left."""

        async def empty() -> bool:
            return not (await self.look()).copies

        await eventually(empty, within=within, what="an empty stream", every=0.05)
        await self.rest.billed()

    async def look(self) -> Inside:
        """Where everything is."""
        return await look_inside(self.rest.redis)

    async def conserved(self) -> Evidence:
        """The check that every fault test ends with, while no worker runs; nothing is left to be done."""
        inside = await self.look()
        assert max(inside.copies.values(), default=0) <= 1, f"there twice: {inside.copies}"
        assert max(inside.dead.values(), default=0) <= 1, f"dead twice: {inside.dead}"
        assert not inside.pending, f"still pending: {inside.pending}"
        assert not inside.copies, f"left in the stream: {inside.copies}"
        system = self.rest
        stored = await conservation.results(system.redis, system.submitted)
        evidence = Evidence(
            submitted=frozenset(system.submitted),
            queued=inside.copies,
            results=stored,
            dead=inside.dead,
            billed=system.billing.events,
            outbox=await conservation.outbox(system.redis, system.deployment_id),
            announced=system.watcher.announced if system.watcher else None,
            replaced=system.watcher.replaced(stored) if system.watcher else {},
        )
        assert_conserved(evidence)
        assert evidence.results.keys() == evidence.submitted
        return evidence


@asynccontextmanager
async def stream_system(
    redis_url: str, deployment_id: str, folder: Path, streams: Streams
) -> AsyncGenerator[StreamSystem]:
    """Start model and sinks."""
    made = System(rabbitmq_url="amqp://nobody.invalid", redis_url=redis_url, deployment_id=deployment_id, folder=folder)
    async with made as rest:
        yield StreamSystem(rest=rest, streams=streams)
