"""Priorities of a RabbitMQ queue: which request is next, and what a retry keeps of it."""

import asyncio
import json

import aio_pika
import pytest

from inference_worker.client import Client
from inference_worker.retry_ladder import LADDER_S
from tests.faults import wire
from tests.faults.model import FakeModel, ok
from tests.in_process import InProcess, request_body
from tests.integration.conftest import RunningWorker
from tests.integration.test_rabbitmq_rules import arguments_of, listed
from tests.services import Rabbit
from tests.waiting import eventually

CLASSIC = {"RABBITMQ_QUEUE_TYPE": "classic", "RABBITMQ_MAX_PRIORITY": "5", "RABBITMQ_PREFETCH": "1"}


def order(model: FakeModel) -> list[str]:
    """Which requests have been called for, by the names in their payloads."""
    return [json.loads(request.body)["name"] for request in model.requests]


async def submitted(w: InProcess, client: Client, name: str, priority: int | None) -> None:
    await client.submit({"name": name}, request_id=name, priority=priority)


def reached(w: InProcess) -> Client:
    return Client.direct(
        rabbitmq_url=w.env["RABBITMQ_URL"], redis_url=w.env["REDIS_URL"], deployment_id=w.env["DEPLOYMENT_ID"]
    )


async def ready(w: InProcess, count: int) -> None:
    async def all_there() -> bool:
        return await w.at.broker.ready(w.queue) == count

    await eventually(all_there, within=5, what=f"{count} requests wait")


@pytest.mark.needs_control
async def test_a_classic_queue_is_declared_with_its_levels(running_worker: RunningWorker, rabbit: Rabbit) -> None:
    w = await running_worker(**CLASSIC)

    rows = await listed(rabbit, "list_queues", "name", "arguments")

    (declared,) = [arguments_of(row) for row in rows if row["name"] == w.queue]
    assert declared["x-max-priority"] == 5
    (dead,) = [arguments_of(row) for row in rows if row["name"] == w.dlq]
    assert dead == {"x-queue-type": "classic"}


async def test_a_request_of_a_higher_priority_is_next(running_worker: RunningWorker, model: FakeModel) -> None:
    opened = asyncio.Event()
    model.next(wire.gated(opened, ok()))
    w = await running_worker(**CLASSIC)
    async with reached(w) as client:
        await submitted(w, client, "first", None)
        await model.busy()
        for name, priority in (("none", None), ("low", 1), ("high", 5), ("beyond", 255)):
            await submitted(w, client, name, priority)
        await ready(w, 4)

        opened.set()
        await w.disposed(*["ack"] * 5)

    assert order(model) == ["first", "high", "beyond", "low", "none"]


async def test_a_retry_is_as_urgent_as_the_first_attempt(running_worker: RunningWorker, model: FakeModel) -> None:
    opened = asyncio.Event()
    model.next(wire.gated(opened, wire.reset()))
    w = await running_worker(**CLASSIC)
    async with reached(w) as client:
        await submitted(w, client, "urgent", 5)
        await model.busy()
        await submitted(w, client, "low", 1)
        await submitted(w, client, "none", None)
        await ready(w, 2)

        opened.set()
        await w.disposed("retry", "ack", "ack", "ack")

    # The broker has handed the next one out when the copy comes, one at a time.
    assert order(model)[0] == "urgent"
    assert order(model).index("urgent", 1) < order(model).index("none")


async def test_a_delayed_retry_comes_back_with_its_priority(running_worker: RunningWorker, model: FakeModel) -> None:
    """The queue where it waits has no levels: there, what is due first is first."""
    w = await running_worker(**CLASSIC, HEALTH_CHECK_INTERVAL_S="60", RABBITMQ_RETRY_DELAY_S="0.1")
    await model.refuse()

    await w.publish(request_body("r"), priority=4)
    await w.disposed("retry")
    await ready(w, 1)

    (copy,) = await w.at.broker.take(w.queue)
    assert (copy.priority, copy.headers["x-retry-count"]) == (4, 1)
    names = [f"{w.queue}.delay.{round(rung * 1000)}" for rung in LADDER_S if rung <= 0.2]
    await w.at.broker.delete(*names)


async def test_a_dead_letter_keeps_its_priority(running_worker: RunningWorker, model: FakeModel) -> None:
    model.default = wire.reset()
    w = await running_worker(**CLASSIC, RABBITMQ_MAX_RETRIES="0")

    await w.publish(request_body("r"), priority=4)
    await w.disposed("dead_letter")

    assert [letter.priority for letter in (await w.seen(dead=1)).dead] == [4]


async def test_a_quorum_queue_takes_priorities_and_has_two_levels_from_rabbitmq_4_on(
    running_worker: RunningWorker, model: FakeModel, rabbitmq_url: str
) -> None:
    opened = asyncio.Event()
    model.next(wire.gated(opened, ok()))
    w = await running_worker(RABBITMQ_PREFETCH="1")
    async with reached(w) as client:
        await submitted(w, client, "first", None)
        await model.busy()
        for name, priority in (("low", 0), ("normal", 4), ("high", 5)):
            await submitted(w, client, name, priority)
        await ready(w, 3)

        opened.set()
        await w.disposed(*["ack"] * 4)

    levels = await _major(rabbitmq_url) >= 4
    assert order(model) == (["first", "high", "low", "normal"] if levels else ["first", "low", "normal", "high"])
    assert sorted((await w.seen()).results) == ["first", "high", "low", "normal"]


async def _major(url: str) -> int:
    """Which RabbitMQ it is."""
    connection = await aio_pika.connect(url)
    async with connection:
        properties = connection.transport.connection.server_properties  # type: ignore[union-attr]
        return int(str(properties["version"]).split(".")[0])
