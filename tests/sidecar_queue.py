"""The queue of a sidecar, `inference-worker run` over RabbitMQ, in the words of `every_transport.py`.

    async with sidecar_queue(rabbitmq_url, redis_url) as queue:
        told = queue.told("http://127.0.0.1:8000")
        await queue.put("", ["a", "b"])

For what is run over `process` and `run` alike. Its results are single keys, announced as they are written; so what is
announced is listened to from the start, that a second end shows, or another one in the place of the first.
"""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from tests.conservation import RESULT, ResultWatcher, results
from tests.every_transport import DEPLOYMENT, Found, RabbitQueues, Told, rabbit_queues
from tests.worker_env import queue_of, worker_env


@dataclass(kw_only=True)
class SidecarQueue:
    """One queue, whatever it is called, since a sidecar has one; results are stored in Redis."""

    rabbit: RabbitQueues
    """What both commands have in common: the broker, the dead letters, the usage events."""
    watcher: ResultWatcher
    repeats: bool = False
    lease_s: float = 1.0
    lease_again_s: float = 1.0

    def told(self, base_url: str, *, quick: bool = False, **flags: str) -> Told:
        """No flags: it has none. Of those of `process` it knows `concurrency`."""
        env = worker_env(
            rabbitmq_url=self.rabbit.url,
            redis_url=self.rabbit.redis_url,
            model_url=base_url,
            deployment_id=DEPLOYMENT,
            INFERENCE_DLX=self.rabbit.dead_letter_exchange,
            INFERENCE_DLQ=self.rabbit.dead_letters,
            CLAIM_LEASE_S="0.5" if quick else "",
            RABBITMQ_PREFETCH=flags.get("concurrency", ""),
            MODEL_RETRY_STATUS_CODES="503",  # As `process` has it; here a status is an answer.
        )
        return Told(flags={}, environ=env, modules=("inference_worker.rmq_listener",))

    async def put(self, queue: str, ids: Sequence[str]) -> None:
        await self.rabbit.put(self.rabbit.names[0], ids)

    async def ended(self) -> int:
        return len([key async for key in self.rabbit.redis.scan_iter(f"{RESULT}*", count=1000)])

    async def waiting(self) -> int:
        return await self.rabbit.waiting()

    async def found(self) -> Found:
        return replace(await self.rabbit.found(), results=await self._results())

    async def _results(self) -> Mapping[str, Sequence[str]]:
        keys = [key.decode() async for key in self.rabbit.redis.scan_iter(f"{RESULT}*", count=1000)]
        stored = await results(self.rabbit.redis, [key.removeprefix(RESULT) for key in keys])
        replaced = self.watcher.replaced(stored)
        return {
            request_id: [
                *([json.dumps(replaced[request_id])] if request_id in replaced else []),
                *[json.dumps(now, sort_keys=True)] * max(1, len(self.watcher.announced.get(request_id, ()))),
            ]
            for request_id, now in stored.items()
        }


@asynccontextmanager
async def sidecar_queue(rabbitmq_url: str, redis_url: str) -> AsyncGenerator[SidecarQueue]:
    name = queue_of({"DEPLOYMENT_ID": DEPLOYMENT})
    async with rabbit_queues(rabbitmq_url, redis_url, [name]) as rabbit, ResultWatcher(redis_url) as watcher:
        yield SidecarQueue(rabbit=rabbit, watcher=watcher)
