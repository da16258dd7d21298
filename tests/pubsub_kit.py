"""A subscription of a test's own, with its topics: producers, sessions, and a look at what comes."""

import asyncio
import json
import random
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from google.pubsub_v1 import PublisherAsyncClient, SubscriberAsyncClient
from google.pubsub_v1.services.publisher.transports import PublisherGrpcAsyncIOTransport
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcAsyncIOTransport
from grpc import aio

from inference_worker.assembly import Outside
from inference_worker.metrics import WorkerMetrics
from inference_worker.ports import ResultStore
from inference_worker.process import process
from inference_worker.process_setup import ProcessSetup, read_setup
from inference_worker.pubsub_link import pubsub_link
from inference_worker.pubsub_values import Pulled
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.results.redis import RedisStore
from inference_worker.transports.gcp_pubsub import PubsubQueue, PubsubTransport, PubsubTransports
from tests.process_rig import PACE
from tests.pubsub_emulator import emulator_address
from tests.waiting import eventually

LEASE_S = 10
PATIENCE_S = 0.3


def bare(request_id: str, *, deadline: float | None = None, **fields: object) -> bytes:
    """A request as its producers publish it."""
    until = int(time.time() + 600 if deadline is None else deadline)
    payload = {"model": "mock-model", "prompt": "tick tock", "max_tokens": 2}
    return json.dumps({"id": request_id, "deadline": until, "payload": payload, **fields}).encode()


@dataclass(kw_only=True)
class Subscribed:
    """One subscription with a dead-letter topic, and a topic for results."""

    address: str
    queue: PubsubQueue
    store: ResultStore
    topic: str
    dead_topic: str
    publisher: PublisherAsyncClient
    subscriber: SubscriberAsyncClient
    metrics: WorkerMetrics = field(default_factory=WorkerMetrics)
    published: int = 0
    acknowledged: int = 0
    dead: list[Pulled] = field(default_factory=list)
    results: list[Pulled] = field(default_factory=list)

    @asynccontextmanager
    async def session(
        self, address: str = "", *, now: Callable[[], float] = time.time, **options: Any
    ) -> AsyncGenerator[PubsubTransport]:
        """A session over a channel of its own, through a proxy if `address` says so."""
        transports = PubsubTransports(
            lambda: pubsub_link(address or self.address),
            queue=options.pop("queue", self.queue),
            store=self.store,
            metrics=self.metrics,
            replica_id="replica",
            now=now,
            lease_s=LEASE_S,
            patience_s=PATIENCE_S,
            **options,
        )
        async with transports.connect() as transport:
            yield transport

    async def add(self, body: bytes, message_id: str | None = None, **attributes: str) -> str:
        """Publish a message; the service's id of it."""
        named = attributes if message_id is None else {**attributes, "message_id": message_id}
        asked = {"topic": self.topic, "messages": [{"data": body, "attributes": named}]}
        self.published += 1
        return str((await self.publisher.publish(request=asked)).message_ids[0])

    async def undelivered(self, subscription: str) -> int | None:
        """What Cloud Monitoring would say, which has no emulator."""
        return self.published - self.acknowledged

    async def nack(self, ack_ids: list[str]) -> None:
        """Have deliveries lapse, whoever has them."""
        if ack_ids:
            asked = {"subscription": self.queue.subscription, "ack_ids": ack_ids, "ack_deadline_seconds": 0}
            await self.subscriber.modify_ack_deadline(request=asked)

    async def parked(self, count: int = 1) -> list[Pulled]:
        """What lies in the dead-letter topic, once there are so many."""
        return await self._drained("dead", self.dead, count)

    async def answers(self, count: int = 1, within: float = 10.0) -> list[dict[str, Any]]:
        """The results that were published, once there are so many."""
        return [json.loads(one.data) for one in await self._drained("results", self.results, count, within)]

    async def _drained(self, name: str, into: list[Pulled], count: int, within: float = 10.0) -> list[Pulled]:
        subscription = f"projects/{self.queue.project}/subscriptions/{name}"
        async with pubsub_link(self.address) as link:

            async def enough() -> bool:
                if len(into) >= count:
                    return True
                came = await link.pull(subscription, 100)
                into.extend(came)
                for one in came:
                    await link.acknowledge(subscription, one.ack_id)
                return len(into) >= count

            await eventually(enough, within=within, what=f"{count} messages of {name}")
        return into


@asynccontextmanager
async def subscribed(redis_url: str, *, exactly_once: bool = True, **policy: Any) -> AsyncGenerator[Subscribed]:
    """A project of a test's own. `policy`: other fields of the subscription."""
    address, project = emulator_address(), f"p-{secrets.token_hex(6)}"
    link = RedisLink(lambda: redis_url, lambda: None, client_name="test", tls=RedisTls())
    channel = aio.insecure_channel(address)
    try:
        publisher = PublisherAsyncClient(transport=PublisherGrpcAsyncIOTransport(channel=channel))
        subscriber = SubscriberAsyncClient(transport=SubscriberGrpcAsyncIOTransport(channel=channel))
        topics = {name: f"projects/{project}/topics/{name}" for name in ("requests", "results", "dead")}
        for topic in topics.values():
            await publisher.create_topic(name=topic)
        letters = {"dead_letter_topic": topics["dead"], "max_delivery_attempts": 100}
        asked: Mapping[str, Any]
        for name, topic in topics.items():
            asked = {"name": f"projects/{project}/subscriptions/{name}", "topic": topic, "ack_deadline_seconds": 10}
            if name == "requests":
                asked = {**asked, "enable_exactly_once_delivery": exactly_once, "dead_letter_policy": letters, **policy}
            await subscriber.create_subscription(request=asked)
        async with link.open():
            yield Subscribed(
                address=address,
                queue=PubsubQueue(project=project),
                store=RedisStore(link, deployment_id="d", replica_id="r", lease_s=1.0, ttl_s=3600),
                topic=topics["requests"],
                dead_topic=topics["dead"],
                publisher=publisher,
                subscriber=subscriber,
            )
    finally:
        await channel.close()


@asynccontextmanager
async def processing_pubsub(
    kit: Subscribed, redis_url: str, *, topics: Sequence[Mapping[str, object]], workers: int = 8
) -> AsyncGenerator[None]:
    """`inference-worker process` over subscriptions of the kit's project, in this process."""
    setup = setup_of(kit, redis_url, topics=topics, workers=workers)
    stop = asyncio.Event()
    async with (
        process(setup, Outside(now=time.time, rng=random.Random(1))) as running,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(running.worker.run(stop))
        try:
            yield
        finally:
            stop.set()


def setup_of(
    kit: Subscribed, redis_url: str, *, topics: Sequence[Mapping[str, object]], workers: int = 8
) -> ProcessSetup:
    """What a process over the kit's project is told."""
    document = {"project_id": kit.queue.project, "result_topic_id": kit.queue.results, "topics": list(topics)}
    flags = {
        **PACE,
        "transport": "gcp-pubsub",
        "transport-config": json.dumps(document),
        "concurrency": str(workers),
    }
    environ = {"REDIS_URL": redis_url, "PUBSUB_EMULATOR_HOST": kit.address}
    return read_setup(flags, environ, dict[str, str]().__getitem__, random.Random(1))
