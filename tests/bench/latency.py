"""One request at a time through the real worker, with the time of each step taken where it happens."""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import aio_pika
from redis.asyncio import Redis as RedisClient

from inference_worker import assembly
from inference_worker.assembly import Outside, Stores, rabbitmq_queue, redis_stores
from inference_worker.config.settings import load
from inference_worker.metrics import WorkerMetrics
from inference_worker.mock_model import MockModel, MockModelConfig
from inference_worker.model_client import HttpModelClient
from inference_worker.ports import Answer, Connect, Delivery, ResultStore, Transport
from inference_worker.results.redis import RedisStore
from tests.waiting import eventually
from tests.worker_env import queue_of, worker_env

MODEL_S = 0.005
Steps = dict[str, tuple[list[float], float]]


class Marks:
    """Moments of the request that is under way, by name."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def mark(self, name: str) -> None:
        self.at[name] = time.perf_counter()


async def measure_latency(rabbitmq_url: str, redis_url: str, count: int) -> Steps:
    """Seconds of each step, with the bar of the median in milliseconds."""
    marks = Marks()
    steps: Steps = {
        "delivery": ([], 5),
        "processing": ([], 10),
        "Redis write": ([], 5),
        "in all, less the model": ([], 20),
    }
    mock = MockModel(MockModelConfig(latency_s=MODEL_S))
    async with mock.serving("127.0.0.1", 0) as model_url:
        env = worker_env(
            rabbitmq_url=rabbitmq_url,
            redis_url=redis_url,
            model_url=model_url,
            deployment_id=f"latency-{time.monotonic_ns()}",
            HF_MODEL_ID="mock-model",
        )
        settings = load(env)
        outside = Outside(now=time.time, rng=random.Random(1))
        stop = asyncio.Event()
        async with redis_stores(settings) as stores, RedisClient.from_url(redis_url) as redis:
            watched = Stores(
                results=_timed_store(stores.results, marks), outbox=stores.outbox, fleet_of=stores.fleet_of
            )
            _time_the_model(marks)
            async with assembly.worker(
                settings, outside, stores=watched, connect=_timed_queue(rabbitmq_queue(settings, outside, None), marks)
            ) as worker:
                running = asyncio.create_task(worker.run(stop))
                await eventually(lambda: worker.listener.state == "consuming", within=20, what="consuming")
                async with await aio_pika.connect(rabbitmq_url) as connection, connection.channel() as channel:
                    for n in range(count + 20):
                        await _one(f"latency-{n}", queue_of(env), channel, redis, marks)
                        if n >= 20:  # The first ones warm the caches.
                            _note(steps, marks.at)
                stop.set()
                await running
    return steps


async def _one(
    request_id: str, queue: str, channel: aio_pika.abc.AbstractChannel, redis: RedisClient, marks: Marks
) -> None:
    payload = {"model": "mock-model", "messages": [{"role": "user", "content": "y" * 900}], "max_tokens": 8}
    body = {"request_id": request_id, "received_at": time.time(), "timeout_s": 60, "payload": payload}
    async with redis.pubsub() as told:
        await told.subscribe(f"infer_resp:{request_id}")
        await told.get_message(timeout=5)
        marks.mark("published")
        await channel.default_exchange.publish(aio_pika.Message(json.dumps(body).encode()), routing_key=queue)
        while (message := await told.get_message(timeout=5)) is None or message["type"] != "message":
            pass
        marks.mark("told")
    await eventually(lambda: marks.at.get("settled", 0) > marks.at["published"], within=5, what="settled", every=0.001)


def _note(steps: Steps, at: dict[str, float]) -> None:
    redis_s = at["written"] - at["writing"]
    before, after = at["calling"] - at["received"], at["settled"] - at["answered"]
    steps["delivery"][0].append(at["received"] - at["published"])
    steps["Redis write"][0].append(redis_s)
    steps["processing"][0].append(before + after - redis_s)
    steps["in all, less the model"][0].append(at["told"] - at["published"] - MODEL_S)


def _timed_store(store: ResultStore, marks: Marks) -> ResultStore:
    assert isinstance(store, RedisStore)
    write = store.write

    async def timed(*args: object, **kwargs: object) -> object:
        marks.mark("writing")
        try:
            return await write(*args, **kwargs)  # type: ignore[arg-type]  # Passed through as it came.
        finally:
            marks.mark("written")

    store.write = timed  # type: ignore[assignment,method-assign]  # Timed from outside, for this measurement alone.
    return store


def _time_the_model(marks: Marks) -> None:
    infer = HttpModelClient.infer

    async def timed(self: HttpModelClient, **kwargs: object) -> Answer:
        marks.mark("calling")
        try:
            return await infer(self, **kwargs)  # type: ignore[arg-type]  # Passed through as it came.
        finally:
            marks.mark("answered")

    HttpModelClient.infer = timed  # type: ignore[method-assign]  # As above.


def _timed_queue(
    queue: Callable[[ResultStore, WorkerMetrics], Connect], marks: Marks
) -> Callable[[ResultStore, WorkerMetrics], Connect]:
    def connect(store: ResultStore, metrics: WorkerMetrics) -> Connect:
        opened = queue(store, metrics)

        @asynccontextmanager
        async def timed() -> AsyncGenerator[Transport, None]:
            async with opened() as transport:
                receive, settle = transport.receive, transport.settle

                async def timed_receive() -> Delivery:
                    delivery = await receive()
                    marks.mark("received")
                    return delivery

                async def timed_settle(*args: object) -> object:
                    settled = await settle(*args)  # type: ignore[arg-type]  # As above.
                    marks.mark("settled")
                    return settled

                transport.receive = timed_receive  # type: ignore[method-assign]  # As above.
                transport.settle = timed_settle  # type: ignore[assignment,method-assign]  # As above.
                yield transport

        return timed

    return connect
