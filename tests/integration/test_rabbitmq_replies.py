"""Results for requesters who wait at RabbitMQ (`reply_to`): when a reply is due, and what it may not do."""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aio_pika import connect
from aio_pika.abc import AbstractIncomingMessage
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic
from redis.asyncio import Redis as RedisClient

from inference_worker import rmq_replies
from inference_worker.assembly import Outside
from inference_worker.process import process
from inference_worker.process_setup import read_setup
from tests.faults import wire
from tests.faults.model import FakeModel, ok
from tests.faults.proxy import Do
from tests.in_process import SOON_S, Broker, InProcess, request_body
from tests.integration.conftest import MakeProxy, RunningWorker
from tests.integration.test_rabbitmq_rules import frames
from tests.process_rig import PACE as PROCESS_PACE
from tests.process_rig import processing, queue, serving_mock
from tests.services import Rabbit
from tests.waiting import eventually

DIRECT = "amq.rabbitmq.reply-to"


@pytest.fixture
async def answers(broker: Broker, deployment_id: str) -> AsyncGenerator[str]:
    """The queue of a requester who waits."""
    name = f"answers.{deployment_id}"
    await broker.declare(name)
    yield name
    await broker.delete(name)


async def replies(w: InProcess, answers: str, count: int = 1) -> list[AbstractIncomingMessage]:
    """Every reply that is there, out of the queue, once there are so many."""

    async def there() -> bool:
        return (await w.at.broker.ready(answers) or 0) >= count

    await eventually(there, within=SOON_S, what=f"{count} replies")
    return await w.at.broker.take(answers)


async def raw_result(w: InProcess, request_id: str = "r") -> bytes:
    stored = await w.at.redis.get(f"infer_resp:{request_id}")
    assert isinstance(stored, bytes)
    return stored


async def test_a_result_is_stored_then_replied_confirmed_and_only_then_acknowledged(
    running_worker: RunningWorker, rabbit: Rabbit, rabbitmq_url: str, proxy: MakeProxy, answers: str
) -> None:
    link = await proxy(rabbit, speaks="amqp")
    order = frames(link)
    w = await running_worker(RABBITMQ_URL=link.url(rabbitmq_url))

    await w.publish(
        request_body("r"),
        reply_to=answers,
        correlation_id="c-1",
        message_id="m-1",
        expiration="600000",
        headers={"a": "b"},
    )
    await w.disposed("ack")

    (reply,) = await replies(w, answers)
    assert order == ["publish", "confirm", "ack"]
    assert reply.body == await raw_result(w)
    assert json.loads(reply.body)["status"] == "completed"
    assert (reply.correlation_id, reply.content_type, reply.delivery_mode) == ("c-1", "application/json", 2)
    assert (reply.expiration, reply.reply_to, reply.headers, reply.priority or 0) == (None, None, {}, 0)


@pytest.mark.parametrize("message_id", ["m-1", None])
async def test_without_a_correlation_id_the_messages_own_id_is_told(
    running_worker: RunningWorker, answers: str, message_id: str | None
) -> None:
    w = await running_worker()

    await w.publish(request_body("r"), reply_to=answers, message_id=message_id, delivery_mode=1)

    (reply,) = await replies(w, answers)
    assert (reply.correlation_id, reply.delivery_mode) == (message_id, 1)


async def test_a_failure_is_replied_once_it_is_final_and_before_the_dead_letter(
    running_worker: RunningWorker, model: FakeModel, rabbit: Rabbit, rabbitmq_url: str, proxy: MakeProxy, answers: str
) -> None:
    link = await proxy(rabbit, speaks="amqp")
    order = frames(link)
    model.default = wire.reset()
    w = await running_worker(RABBITMQ_URL=link.url(rabbitmq_url), RABBITMQ_MAX_RETRIES="1")

    await w.publish(request_body("r"), reply_to=answers, correlation_id="c-1")
    await w.disposed("retry", "dead_letter")

    (reply,) = await replies(w, answers)
    assert order == ["publish", "confirm", "ack", "publish", "confirm"], "the copy, its original, the reply"
    assert reply.correlation_id == "c-1"
    said = json.loads(reply.body)
    assert (said["error_code"], said["attempt"]) == ("retries_exhausted", 1)
    assert reply.body == await raw_result(w)
    (dead,) = (await w.seen(dead=1)).dead
    assert dead.reply_to == answers, "a replay answers, too"


async def test_on_a_queue_of_others_the_reply_goes_before_the_dead_letter(
    running_worker: RunningWorker, model: FakeModel, broker: Broker, deployment_id: str, answers: str
) -> None:
    await broker.declare(f"infer_req.{deployment_id}")
    model.default = wire.reset()
    w = await running_worker(RABBITMQ_MAX_RETRIES="0")

    await w.publish(request_body("r"), reply_to=answers)
    await w.disposed("dead_letter")

    assert len(await replies(w, answers)) == 1
    assert len((await w.seen(dead=1)).dead) == 1


@pytest.mark.parametrize(
    ("body", "request_id"),
    [
        pytest.param(request_body("r", timeout_s=-1), "r", id="with an id"),
        pytest.param(b"no JSON", None, id="without an id"),
    ],
)
async def test_what_is_no_request_is_told_so(
    running_worker: RunningWorker, answers: str, body: object, request_id: str | None
) -> None:
    """Else its requester would wait for nothing: where there is no id, nothing is stored."""
    w = await running_worker()

    await w.publish(body, reply_to=answers, correlation_id="c-1")

    (reply,) = await replies(w, answers)
    said = json.loads(reply.body)
    assert (said["status"], said["status_code"], said["error_code"]) == ("failed", 400, "invalid_request")
    assert said["error"]
    assert said.get("request_id") == request_id
    assert reply.correlation_id == "c-1"
    assert len((await w.seen(dead=1)).dead) == 1


async def test_a_request_that_has_its_answer_is_replied_again(running_worker: RunningWorker, answers: str) -> None:
    w = await running_worker()

    await w.publish(request_body("r"), reply_to=answers, correlation_id="c-1")
    await w.disposed("ack")
    await w.publish(request_body("r"), reply_to=answers, correlation_id="c-2")
    await w.disposed("ack", "ack")

    first, second = await replies(w, answers, 2)
    assert first.body == second.body == await raw_result(w)
    assert [first.correlation_id, second.correlation_id] == ["c-1", "c-2"]
    assert (await w.seen()).calls == 1


async def test_a_lost_acknowledgement_costs_a_second_reply_and_no_second_call(
    running_worker: RunningWorker, rabbit: Rabbit, rabbitmq_url: str, proxy: MakeProxy, answers: str
) -> None:
    link = await proxy(rabbit, speaks="amqp")
    trap = link.when_client_sends("basic.ack", Do.CUT)
    w = await running_worker(RABBITMQ_URL=link.url(rabbitmq_url))

    await w.publish(request_body("r"), reply_to=answers, correlation_id="c-1")
    await eventually(lambda: trap.hits, within=SOON_S, what="the acknowledgement is lost")

    first, second = await replies(w, answers, 2)
    assert first.body == second.body
    await w.disposed("ack")
    assert (await w.seen()).calls == 1


async def test_a_reply_without_a_confirm_is_sent_again(
    running_worker: RunningWorker, rabbit: Rabbit, rabbitmq_url: str, proxy: MakeProxy, answers: str
) -> None:
    link = await proxy(rabbit, speaks="amqp")
    trap = link.when_client_sends("basic.publish", Do.CUT)
    w = await running_worker(RABBITMQ_URL=link.url(rabbitmq_url))

    await w.publish(request_body("r"), reply_to=answers)
    await w.disposed("ack")

    assert trap.hits == 1
    assert len(await replies(w, answers)) == 1
    assert w.dispositions == ["ack"]


async def test_where_nobody_waits_any_more_the_result_stands_and_the_message_is_acknowledged(
    running_worker: RunningWorker,
) -> None:
    w = await running_worker()

    await w.publish(request_body("r"), reply_to="no-such-queue")
    await w.disposed("ack")

    assert len(w.lines("nobody waits for a reply any more")) == 1
    seen = await w.seen()
    assert (seen.dispositions, seen.result["status"], seen.queued, seen.dead) == (["ack"], "completed", [], [])


async def test_a_queue_that_takes_no_reply_holds_a_message_up_for_a_while_only(
    running_worker: RunningWorker, broker: Broker, deployment_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rmq_replies, "REPLY_S", 0.6)
    full = f"full.{deployment_id}"
    await broker.declare(full, {"x-max-length": 0, "x-overflow": "reject-publish"})
    w = await running_worker()

    await w.publish(request_body("r"), reply_to=full)
    await w.disposed("ack")

    (line,) = w.lines("a reply is given up; its result is stored")
    assert "rejected" in line["reason"]
    assert (await w.seen()).result["status"] == "completed"
    await broker.delete(full)


async def test_a_broker_that_takes_no_publish_keeps_a_message_for_a_while_and_no_result(
    running_worker: RunningWorker,
    rabbit: Rabbit,
    rabbitmq_url: str,
    proxy: MakeProxy,
    answers: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rmq_replies, "REPLY_S", 0.6)
    link = await proxy(rabbit, speaks="amqp")
    trap = link.when_client_sends("basic.publish", Do.DROP, times=1000)
    w = await running_worker(RABBITMQ_URL=link.url(rabbitmq_url))

    await w.publish(request_body("r"), reply_to=answers)
    await eventually(lambda: trap.hits, within=SOON_S, what="a reply on its way")

    assert json.loads(await raw_result(w))["status"] == "completed"
    assert w.dispositions == []
    await w.disposed("ack")

    assert w.lines("a reply is given up; its result is stored")
    assert (await w.seen()).dispositions == ["ack"]


# ---------------------------------------------------------------- direct reply-to


@asynccontextmanager
async def asking(url: str) -> AsyncGenerator[tuple[Any, "asyncio.Queue[DeliveredMessage]"]]:
    """A channel whose replies come to itself, without a queue."""
    connection = await connect(url)
    async with connection, connection.channel(publisher_confirms=False) as channel:
        raw = await channel.get_underlay_channel()
        came: asyncio.Queue[DeliveredMessage] = asyncio.Queue()
        await raw.basic_consume(DIRECT, came.put, no_ack=True)
        yield raw, came


async def ask(channel: Any, w: InProcess, body: dict[str, object]) -> None:
    properties = Basic.Properties(reply_to=DIRECT, correlation_id=str(body["request_id"]), delivery_mode=2)
    await channel.basic_publish(json.dumps(body).encode(), routing_key=w.queue, properties=properties)


async def test_a_requester_may_wait_on_its_own_channel_also_over_a_retry(
    running_worker: RunningWorker, model: FakeModel, rabbitmq_url: str
) -> None:
    """Direct reply-to. The broker says of each such reply that no queue took it, where it is asked."""
    model.next(wire.reset())
    w = await running_worker()

    async with asking(rabbitmq_url) as (channel, came), asyncio.timeout(SOON_S):
        await ask(channel, w, request_body("r"))
        reply = await came.get()

    assert (reply.body, reply.header.properties.correlation_id) == (await raw_result(w), "r")
    await w.disposed("retry", "ack")
    assert w.lines("nobody waits for a reply any more") == []


async def test_a_requester_that_has_gone_with_its_channel_breaks_nothing(
    running_worker: RunningWorker, model: FakeModel, rabbitmq_url: str
) -> None:
    opened = asyncio.Event()
    model.next(wire.gated(opened, wire.answer(200, {"gone": True})))
    w = await running_worker()
    async with asking(rabbitmq_url) as (channel, _):
        await ask(channel, w, request_body("gone"))
        await model.busy()
    opened.set()
    await w.disposed("ack")

    async with asking(rabbitmq_url) as (channel, came), asyncio.timeout(SOON_S):
        await ask(channel, w, request_body("here"))
        assert json.loads((await came.get()).body)["request_id"] == "here"

    seen = await w.seen()
    assert sorted(seen.results) == ["gone", "here"]
    assert (seen.dispositions, len(w.lines("connected to the broker"))) == (["ack", "ack"], 1)


# ---------------------------------------------------------------- many queues


async def test_a_queue_with_a_list_of_results_replies_as_well(vhost: str, redis_url: str) -> None:
    async with serving_mock() as mock:
        jobs = queue("jobs", mock.url, result_queue_name="list", model_override="inner")
        async with processing(
            redis_url,
            queues=[jobs],
            kind="rabbitmq",
            transport={"url": vhost},
            environ={"REDIS_URL": redis_url},
        ) as running:
            connection = await connect(vhost)
            async with connection, connection.channel(on_return_raises=True) as channel:
                answers = await channel.declare_queue(exclusive=True)
                body = request_body("r", payload={"model": "mine", "prompt": "x", "max_tokens": 2})
                raw = await channel.get_underlay_channel()
                await raw.basic_publish(
                    json.dumps(body).encode(),
                    routing_key="jobs",
                    properties=Basic.Properties(reply_to=answers.name, correlation_id="c-1"),
                )
                result = await running.result("r", "list")

                async def came() -> AbstractIncomingMessage | None:
                    return await answers.get(fail=False, no_ack=True)

                reply = await eventually(came, within=SOON_S, what="the reply")
                assert reply.body == await running.redis.get("infer_resp:r")
                assert json.loads(reply.body)["result"]["model"] == "mine"
                assert json.loads(result["payload"])["model"] == "mine"
                assert reply.correlation_id == "c-1"


async def test_what_runs_while_its_queue_changes_is_replied_to_and_so_is_what_follows(
    vhost: str, redis_url: str
) -> None:
    opened, texts = asyncio.Event(), dict[str, str]()
    async with FakeModel() as model, RedisClient.from_url(redis_url, socket_timeout=None) as redis:
        model.next(wire.gated(opened, ok()))

        def says(**options: object) -> None:
            texts["t"] = json.dumps({"url": vhost, "queues": [queue("jobs", model.url, **options)]})

        says()
        given = {**PROCESS_PACE, "transport": "rabbitmq", "transport-config-file": "t", "concurrency": "1"}
        environ = {"REDIS_URL": redis_url, "RABBITMQ_QUEUE_TYPE": "classic", "RABBITMQ_MAX_PRIORITY": "5"}
        rng, stop = random.Random(1), asyncio.Event()
        setup = read_setup(given, environ, texts.__getitem__, rng)
        connection = await connect(vhost)
        async with (
            process(setup, Outside(now=time.time, rng=rng)) as made,
            asyncio.TaskGroup() as group,
            connection,
            connection.channel(on_return_raises=True) as channel,
        ):
            group.create_task(made.worker.run(stop), name="process")
            await eventually(lambda: made.worker.ready().get("queue jobs", (False, ""))[0], within=15, what="its queue")
            answers = await channel.declare_queue(exclusive=True)
            raw = await channel.get_underlay_channel()

            async def put(name: str, priority: int) -> None:
                asked = Basic.Properties(reply_to=answers.name, correlation_id=name, priority=priority)
                body = json.dumps(request_body(name, payload={"model": "m", "prompt": name})).encode()
                await raw.basic_publish(body, routing_key="jobs", properties=asked)

            await put("running", 0)
            await model.busy()
            says(result_queue_name="list")
            made.reloading.ask()

            await eventually(
                lambda: made.worker.ready().get("queue jobs", (False, ""))[0], within=15, what="its queue again"
            )
            for name, priority in (("low", 1), ("high", 5)):
                await put(name, priority)
            opened.set()
            replies = dict[str, Any]()

            async def all_came() -> bool:
                while (message := await answers.get(fail=False, no_ack=True)) is not None:
                    replies[str(message.correlation_id)] = json.loads(message.body)
                return len(replies) == 3

            await eventually(all_came, within=SOON_S, what="the replies")
            listed = [json.loads(one)["id"] for one in await redis.lrange("list", 0, -1)]
            stop.set()

    assert {name: (reply["request_id"], reply["status_code"]) for name, reply in replies.items()} == {
        name: (name, 200) for name in ("running", "low", "high")
    }
    assert sorted(listed) == ["high", "low"], "what ran goes where its queue said when it was taken"
