"""Contract, section 3 (RabbitMQ) and section 4 (results): what is declared, consumed, copied, published and stored."""

import asyncio
import json
import struct
import time
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker import listener, rmq_listener
from inference_worker.retry_ladder import LADDER_S
from tests.conservation import drain_queue, publish
from tests.faults import wire
from tests.faults.model import FakeModel, ok
from tests.faults.proxy import Do, TcpProxy, Unit
from tests.in_process import SOON_S, Broker, InProcess, request_body
from tests.integration.conftest import MakeProxy, RunningWorker
from tests.services import Rabbit
from tests.waiting import eventually

USED_AS_IT_IS = "exists in another form and is used as it is"


def other_form(w: InProcess, what: str) -> list[Any]:
    return w.lines(f"{what} {USED_AS_IT_IS}")


async def listed(rabbit: Rabbit, *command: str) -> list[dict[str, Any]]:
    """What `rabbitmqctl` lists."""
    rows: list[dict[str, Any]] = json.loads(await asyncio.to_thread(rabbit.ctl, *command, "--formatter", "json"))
    return rows


def arguments_of(row: dict[str, Any]) -> dict[str, Any]:
    """A queue's arguments: an object, or a list of name, type and value, by the broker's version."""
    given = row["arguments"]
    return dict(given) if isinstance(given, dict) else {name: value for name, _, value in given}


# ---------------------------------------------------------------- what is declared


@pytest.mark.needs_control
@pytest.mark.parametrize("kind", ["quorum", "classic"])
async def test_the_topology_is_declared(running_worker: RunningWorker, rabbit: Rabbit, kind: str) -> None:
    """Section 3, first item: queue, exchange, binding and dead-letter queue, with the arguments of each kind."""
    w = await running_worker(
        RABBITMQ_QUEUE_TYPE=kind, RABBITMQ_DELIVERY_LIMIT="42", INFERENCE_DLX_ROUTING_KEY="dead.letters"
    )

    queues = {row["name"]: row for row in await listed(rabbit, "list_queues", "name", "durable", "arguments")}
    exchanges = {row["name"]: row for row in await listed(rabbit, "list_exchanges", "name", "type", "durable")}
    bindings = await listed(rabbit, "list_bindings", "source_name", "destination_name", "routing_key")

    dlx = w.env["INFERENCE_DLX"]
    expected: dict[str, object] = {
        "x-queue-type": kind,
        "x-dead-letter-exchange": dlx,
        "x-dead-letter-routing-key": "dead.letters",
    }
    if kind == "quorum":
        expected |= {
            "x-delivery-limit": 42,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
    assert arguments_of(queues[w.queue]) == expected
    dead = {"x-queue-type": "quorum", "x-delivery-limit": 10**9} if kind == "quorum" else {"x-queue-type": "classic"}
    assert arguments_of(queues[w.dlq]) == dead
    assert queues[w.queue]["durable"] is queues[w.dlq]["durable"] is True
    assert (exchanges[dlx]["type"], exchanges[dlx]["durable"]) == ("direct", True)
    assert {"source_name": dlx, "destination_name": w.dlq, "routing_key": "dead.letters"} in bindings


@pytest.mark.needs_control
async def test_one_named_consumer_with_manual_acks_and_the_prefetch(
    running_worker: RunningWorker, model: FakeModel, rabbit: Rabbit
) -> None:
    """Section 3: "One consumer per worker, manual ack, prefetch = most requests in flight"; the connection's name."""
    model.default = wire.silent()
    w = await running_worker(RABBITMQ_PREFETCH="3")
    for number in range(5):
        await w.publish(request_body(f"r-{number}"))
    await model.busy(3)

    consumers = [row for row in await listed(rabbit, "list_consumers") if row["queue_name"] == w.queue]
    names = json.dumps(await listed(rabbit, "list_connections", "client_properties"))

    assert len(consumers) == 1
    assert (consumers[0]["prefetch_count"], consumers[0]["ack_required"]) == (3, True)
    assert f"{w.env['DEPLOYMENT_ID']}/replica-1" in names
    assert await w.at.broker.ready(w.queue) == 2
    assert model.peak == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        pytest.param({}, "x-dead-letter-exchange", id="without any"),
        pytest.param({"x-queue-type": "quorum"}, "x-dead-letter-exchange", id="a quorum queue without a DLX"),
        pytest.param(
            {
                "x-queue-type": "quorum",
                "x-dead-letter-exchange": "dlx.{}",
                "x-dead-letter-routing-key": "dead",
                "x-delivery-limit": 100,
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
                "x-max-length": 1000,
            },
            "x-max-length",
            id="ours with a length limit",
        ),
    ],
)
async def test_a_queue_in_another_form_is_used_as_it_is_and_said_once(
    running_worker: RunningWorker,
    rabbit: Rabbit,
    rabbitmq_url: str,
    proxy: MakeProxy,
    broker: Broker,
    deployment_id: str,
    arguments: dict[str, object],
    named: str,
) -> None:
    """Section 3: "the worker says so in one warning and uses the queue as it is", also after a reconnect."""
    theirs = {
        name: value.format(deployment_id) if isinstance(value, str) else value for name, value in arguments.items()
    }
    await broker.declare(f"infer_req.{deployment_id}", theirs)
    link = await proxy(rabbit, speaks="amqp")
    w = await running_worker(RABBITMQ_URL=link.url(rabbitmq_url))
    await w.publish(request_body("a"))
    await w.disposed("ack")

    await link.cut()
    await eventually(lambda: w.worker.listener.transport is not None, within=SOON_S, what="the worker is back")
    await w.consuming()
    await w.publish(request_body("b"))
    await w.disposed("ack", "ack")

    (warning,) = other_form(w, f"queue {w.queue}")
    assert warning["log_level"] == "warning"
    assert "inequivalent arg" in warning["reason"]
    assert named in warning["reason"]
    assert sorted((await w.seen()).results) == ["a", "b"]


async def test_on_such_a_queue_dead_letters_are_published_and_confirmed_then_acked(
    running_worker: RunningWorker,
    model: FakeModel,
    rabbit: Rabbit,
    rabbitmq_url: str,
    proxy: MakeProxy,
    broker: Broker,
    deployment_id: str,
) -> None:
    """Section 3: "On such a queue the worker publishes dead letters itself, confirmed, then acks"."""
    await broker.declare(f"infer_req.{deployment_id}")
    link = await proxy(rabbit, speaks="amqp")
    order = frames(link)
    model.default = wire.reset()
    w = await running_worker(RABBITMQ_URL=link.url(rabbitmq_url), RABBITMQ_MAX_RETRIES="0")

    await w.publish(request_body("r"), headers={"a": "b"}, message_id="m-1", correlation_id="c-1")
    await w.disposed("dead_letter")

    assert order == ["publish", "confirm", "ack"]
    seen = await w.seen(dead=1)
    (dead,) = seen.dead
    assert (dead.message_id, dead.correlation_id, dead.headers["a"]) == ("m-1", "c-1", "b")
    assert (dead.headers["x-dead-reason"], dead.headers["x-dead-attempts"]) == ("retries_exhausted", 1)
    assert seen.queued == []


async def test_a_dead_letter_that_comes_back_is_published_again_after_declaring_anew(
    running_worker: RunningWorker, model: FakeModel, broker: Broker, deployment_id: str
) -> None:
    """Section 3, last item, for a dead letter: the exchange had been deleted meanwhile."""
    await broker.declare(f"infer_req.{deployment_id}")
    opened = asyncio.Event()
    model.default = wire.gated(opened, wire.reset())
    w = await running_worker(RABBITMQ_MAX_RETRIES="0")
    await w.publish(request_body("r"))
    await model.busy()

    await broker.delete_exchange(w.env["INFERENCE_DLX"])
    opened.set()
    await w.disposed("dead_letter")

    assert w.lines("a copy came back; the topology is declared anew")
    assert len((await w.seen(dead=1)).dead) == 1


async def test_an_exchange_and_a_dead_letter_queue_in_another_form_are_used_too(
    running_worker: RunningWorker, model: FakeModel, broker: Broker, deployment_id: str
) -> None:
    """Section 3: it never deletes or redeclares what the user has declared."""
    await broker.declare(f"dlq.{deployment_id}", {"x-max-length": 7})
    model.default = wire.reset()
    w = await running_worker(RABBITMQ_MAX_RETRIES="0")

    await w.publish(request_body("r"))
    await w.disposed("dead_letter")

    assert len(other_form(w, f"queue {w.dlq}")) == 1
    assert len((await w.seen(dead=1)).dead) == 1


async def test_what_was_deleted_is_declared_again(
    running_worker: RunningWorker,
    model: FakeModel,
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Section 3: "Declared at every (re)connect"; invariant 4: no consumer that looks alive and receives nothing."""
    monkeypatch.setattr(listener, "FIRST_BACKOFF_S", 0.05)
    model.default = wire.reset()
    w = await running_worker(RABBITMQ_MAX_RETRIES="0")

    await broker.delete_exchange(w.env["INFERENCE_DLX"])
    await broker.delete(w.dlq, w.queue)
    await eventually(lambda: len(w.lines("connected to the broker")) == 2, within=SOON_S, what="a new session")
    await w.consuming()
    await w.publish(request_body("r"))
    await w.disposed("dead_letter")

    assert len((await w.seen(dead=1)).dead) == 1


# ---------------------------------------------------------------- copies

EVERY_PROPERTY: dict[str, Any] = {
    "content_type": "application/json",
    "content_encoding": "utf-8",
    "priority": 3,
    "correlation_id": "c-1",
    "reply_to": "answers",
    "expiration": "600000",
    "message_id": "m-1",
    "timestamp": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    "message_type": "request",
    "app_id": "app",
}
HEADERS: dict[str, Any] = {
    "text": "ü",
    "empty": "",
    "small": 7,
    "negative": -3,
    "large": 2**40,
    "fraction": 0.5,
    "true": True,
    "null": None,
    "money": Decimal("1.25"),
    "time": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    "bytes": bytearray(b"\x00\xff"),
    "nested": {"a": {"b": [1, "two", None, {"c": False}]}},
    "list": [1, "two", [3.5]],
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "x-custom-death": "kept",
}
BROKERS_OWN: dict[str, Any] = {
    "CC": [],
    "BCC": [],
    "x-death": [{"count": 1, "queue": "q", "reason": "rejected"}],
    "x-first-death-queue": "q",
    "x-first-death-reason": "rejected",
    "x-last-death-exchange": "e",
    "x-delivery-count": 4,
    "x-acquired-count": 5,
}


async def copy_of(w: InProcess, model: FakeModel, queue: str | None = None, **properties: Any) -> Any:
    """The copy that a failed attempt leaves: the model dies, so that nobody takes it."""
    await model.refuse()
    await w.publish(request_body("r"), **properties)
    await w.disposed("retry")
    (copy,) = await w.at.broker.take(queue or w.queue)
    return copy


def ours(copy: Any) -> dict[str, Any]:
    """A copy's headers, less the count that a quorum queue adds to what it delivers."""
    return {name: value for name, value in copy.headers.items() if name != "x-delivery-count"}


async def test_a_copy_keeps_every_property_that_was_set(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 3: "AMQP properties that were set are kept over a retry, headers included"."""
    w = await running_worker(HEALTH_CHECK_INTERVAL_S="60")
    body = json.dumps(request_body("r")).encode()

    await model.refuse()
    await w.publish(body, headers=HEADERS, **EVERY_PROPERTY)
    await w.disposed("retry")
    (copy,) = await w.at.broker.take(w.queue)

    assert copy.body == body
    assert ours(copy) == HEADERS | {"x-retry-count": 1}
    kept = {name: getattr(copy, "type" if name == "message_type" else name) for name in EVERY_PROPERTY}
    assert kept == EVERY_PROPERTY | {"expiration": kept["expiration"]}
    assert kept["expiration"] == 600, "seconds, as the driver reads it"
    assert copy.delivery_mode == 2


async def test_a_copy_has_nothing_that_the_broker_wrote(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 3: "What the broker wrote or would act on again is left out of copies"."""
    w = await running_worker(HEALTH_CHECK_INTERVAL_S="60")

    copy = await copy_of(w, model, headers=BROKERS_OWN | {"a": "b"}, user_id="guest")

    assert ours(copy) == {"a": "b", "x-retry-count": 1}
    assert copy.headers.get("x-delivery-count", 0) == 0
    assert copy.user_id is None


async def test_a_copy_of_a_message_without_properties_has_the_count_alone(
    running_worker: RunningWorker, model: FakeModel
) -> None:
    """Section 3: "and `x-retry-count` is changed". (The driver names each publish to find returned ones again.)"""
    w = await running_worker(HEALTH_CHECK_INTERVAL_S="60")

    copy = await copy_of(w, model)

    assert ours(copy) == {"x-retry-count": 1}
    assert (copy.correlation_id, copy.reply_to, copy.expiration, copy.content_type) == (None, None, None, None)


def delay_queues(queue: str, whole_s: float) -> list[str]:
    """Where a copy may wait that is delayed by half to the whole of this."""
    return [f"{queue}.delay.{round(rung * 1000)}" for rung in LADDER_S if whole_s / 2 <= rung <= whole_s]


async def test_a_delayed_copy_has_no_expiration(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 3: "a delayed copy has no `expiration`", which would end it in the waiting queue."""
    w = await running_worker(HEALTH_CHECK_INTERVAL_S="60", RABBITMQ_RETRY_DELAY_S="20")

    await model.refuse()
    await w.publish(request_body("r"), expiration="600000", headers={"a": "b"})
    await w.disposed("retry")

    copies = [one for name in delay_queues(w.queue, 20) for one in await w.at.broker.take(name)]
    (copy,) = copies
    assert copy.expiration is None
    assert (copy.headers["a"], copy.headers["x-retry-count"]) == ("b", 1)


# ---------------------------------------------------------------- x-retry-count


def retyped(kind: bytes, value: bytes) -> Callable[[bytes], bytes]:
    """Send the retry count 1 under another AMQP type."""
    name = b"\x0dx-retry-count"

    def change(sent: bytes) -> bytes:
        at = sent.index(name)
        old = struct.unpack(">I", sent[at - 4 : at])[0]
        table = name + kind + value
        return sent[: at - 4] + struct.pack(">I", len(table)) + table + sent[at + old :]

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(retyped(b"b", b"\x02"), id="8 bits"),
        pytest.param(retyped(b"B", b"\x02"), id="8 bits unsigned"),
        pytest.param(retyped(b"s", b"\x00\x02"), id="16 bits"),
        pytest.param(retyped(b"u", b"\x00\x02"), id="16 bits unsigned"),
        pytest.param(retyped(b"I", b"\x00\x00\x00\x02"), id="32 bits"),
        pytest.param(retyped(b"i", b"\x00\x00\x00\x02"), id="32 bits unsigned"),
        pytest.param(retyped(b"l", b"\x00\x00\x00\x00\x00\x00\x00\x02"), id="64 bits"),
    ],
)
async def test_a_retry_count_is_read_in_every_width(
    running_worker: RunningWorker, change: Callable[[bytes], bytes]
) -> None:
    """Section 3 (B36): "an integer of any AMQP width"."""
    w = await running_worker()

    await w.publish(request_body("r"), headers={"x-retry-count": 1}, wire=change)
    await w.disposed("ack")

    assert (await w.seen()).result["attempt"] == 2


@pytest.mark.parametrize("count", [0, 1, 2**31 - 1])
async def test_a_retry_count_within_its_bounds_is_believed(running_worker: RunningWorker, count: int) -> None:
    """Section 3 (B36): "0 or more, at most 2³¹−1"."""
    w = await running_worker()

    await w.publish(request_body("r"), headers={"x-retry-count": count})
    await w.disposed("ack")

    assert not w.lines("the retry count is no count and is taken for 0")
    assert (await w.seen()).result["attempt"] == count


@pytest.mark.parametrize(
    "count", ["2", "", bytearray(b"2"), True, 2.0, Decimal(2), -5, 2**31, 2**62, None, ["x"], {"a": 1}], ids=repr
)
async def test_a_retry_count_that_is_none_counts_as_0_with_a_warning(
    running_worker: RunningWorker, model: FakeModel, count: object
) -> None:
    """Section 3 (B36): "anything else counts as 0, with a warning"; and the tries are bounded."""
    model.default = wire.reset()
    w = await running_worker()

    await w.publish(request_body("r"), headers={"x-retry-count": count})
    await w.disposed("dead_letter")

    (warning,) = w.lines("the retry count is no count and is taken for 0")
    assert warning["log_level"] == "warning"
    seen = await w.seen(dead=1)
    assert (seen.dispositions, seen.result["attempt"]) == (["retry", "dead_letter"], 1)
    assert seen.dead[0].headers["x-retry-count"] == 1


# ---------------------------------------------------------------- mandatory and confirmed


def frames(link: TcpProxy) -> list[str]:
    """What passes, in order: publishes of the worker, confirms of the broker, acks of the worker."""
    seen: list[str] = []

    def note(name: str, method: str) -> Callable[[Unit], bool]:
        def look(unit: Unit) -> bool:
            if unit.method == method:
                seen.append(name)
            return False

        return look

    link.when_client_sends(note("publish", "basic.publish"), Do.DROP)
    link.when_client_sends(note("ack", "basic.ack"), Do.DROP)
    link.when_server_sends(note("confirm", "basic.ack"), Do.DROP)
    return seen


async def test_a_copy_is_mandatory_and_confirmed_before_the_ack(
    running_worker: RunningWorker, model: FakeModel, rabbit: Rabbit, rabbitmq_url: str, proxy: MakeProxy
) -> None:
    """Section 3: "published with `mandatory` and a publisher confirm **before** the original is acknowledged"."""
    link = await proxy(rabbit, speaks="amqp")
    order = frames(link)
    mandatory: list[bool] = []

    def note(unit: Unit) -> bool:
        if unit.method == "basic.publish":
            mandatory.append(bool(unit.raw[-2] & 1))  # The bits are the method's last byte.
        return False

    link.when_client_sends(note, Do.DROP)
    model.next(wire.reset())
    w = await running_worker(RABBITMQ_URL=link.url(rabbitmq_url))

    await w.publish(request_body("r"))
    await w.disposed("retry", "ack")

    assert order == ["publish", "confirm", "ack", "ack"]
    assert mandatory == [True]


@pytest.mark.parametrize(
    ("way", "do", "copies"),
    [
        pytest.param("up", Do.DROP, 1, id="the publish is lost"),
        pytest.param("up", Do.CUT, 1, id="the connection goes with the publish"),
        pytest.param("up", Do.CUT_AFTER, 2, id="the connection goes after the publish"),
        pytest.param("down", Do.DROP, 2, id="the confirm is lost"),
        pytest.param("down", Do.CUT, 2, id="the connection goes with the confirm"),
    ],
)
async def test_a_copy_without_a_confirm_is_published_again(
    running_worker: RunningWorker,
    model: FakeModel,
    rabbit: Rabbit,
    rabbitmq_url: str,
    proxy: MakeProxy,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    do: Do,
    copies: int,
) -> None:
    """Section 3: acknowledged only after a confirm; a second copy costs no second call, and no second bill."""
    monkeypatch.setattr(rmq_listener, "CALL_S", 0.5)
    link = await proxy(rabbit, speaks="amqp")
    trap = link.when_client_sends("basic.publish", do) if way == "up" else link.when_server_sends("basic.ack", do)
    model.next(wire.reset())
    w = await running_worker(RABBITMQ_URL=link.url(rabbitmq_url))

    await w.publish(request_body("r"))
    await w.disposed("retry", *["ack"] * copies)

    assert trap.hits == 1
    assert w.lines("a copy was not confirmed")
    seen = await w.seen()
    assert (seen.calls, seen.billed, seen.queued, seen.dead) == (2, ["r"], [], [])
    assert seen.result["attempt"] == 1


async def test_a_copy_that_cannot_be_placed_is_given_up_and_the_message_handed_back(
    running_worker: RunningWorker,
    model: FakeModel,
    rabbit: Rabbit,
    rabbitmq_url: str,
    proxy: MakeProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Section 3: "A copy is tried for at most 30 s, or until the deadline; then the message is handed back"."""
    monkeypatch.setattr(rmq_listener, "COPY_S", 0.6)
    link = await proxy(rabbit, speaks="amqp")
    link.when_client_sends("basic.publish", Do.CUT, times=1000)
    model.next(wire.reset())
    w = await running_worker(RABBITMQ_URL=link.url(rabbitmq_url))

    await w.publish(request_body("r"))
    await w.disposed("requeue", "ack")

    seen = await w.seen()
    assert (seen.dispositions, seen.calls, seen.result["attempt"]) == (["requeue", "ack"], 2, 0)


async def test_a_copy_that_the_broker_refuses_is_tried_again(
    running_worker: RunningWorker, model: FakeModel, broker: Broker, deployment_id: str
) -> None:
    """Section 3: a queue that is full says no (`reject-publish`); acknowledged only once it has taken the copy."""
    await broker.declare(f"infer_req.{deployment_id}", {"x-max-length": 1, "x-overflow": "reject-publish"})
    opened = asyncio.Event()
    model.next(wire.gated(opened, wire.reset()))
    w = await running_worker()
    await w.publish(request_body("r"))
    await model.busy()
    await w.publish(request_body("in the way"))

    opened.set()
    await eventually(lambda: w.lines("a copy was not confirmed"), within=SOON_S, what="a refused copy")
    assert w.dispositions == []
    assert len(await broker.take(w.queue)) == 1
    await w.disposed("retry", "ack")

    seen = await w.seen()
    assert (list(seen.results), seen.result["attempt"], seen.calls) == (["r"], 1, 2)


async def test_a_copy_is_not_tried_beyond_the_deadline(
    running_worker: RunningWorker, model: FakeModel, rabbit: Rabbit, rabbitmq_url: str, proxy: MakeProxy
) -> None:
    """Section 3: "or until the deadline"; the message comes again and is failed 408."""
    link = await proxy(rabbit, speaks="amqp")
    link.when_client_sends("basic.publish", Do.CUT, times=1000)
    model.next(wire.reset())
    w = await running_worker(RABBITMQ_URL=link.url(rabbitmq_url))

    await w.publish(request_body("r", timeout_s=1))
    await w.disposed("requeue", "ack")

    seen = await w.seen()
    assert (seen.result["status_code"], seen.result["error_code"], seen.calls) == (408, "expired", 1)


async def test_an_unroutable_copy_is_published_again_after_declaring_anew(
    running_worker: RunningWorker, model: FakeModel, rabbit: Rabbit, rabbitmq_url: str, proxy: MakeProxy
) -> None:
    """Section 3, last sentence: somebody deletes the waiting queue just before the copy comes."""
    link = await proxy(rabbit, speaks="amqp")
    trap = link.when_client_sends("basic.publish", Do.FREEZE)
    model.next(wire.reset())
    w = await running_worker(RABBITMQ_URL=link.url(rabbitmq_url), RABBITMQ_RETRY_DELAY_S="0.3")

    await w.publish(request_body("r"))
    await trap.sprung()
    (name,) = [name for name in delay_queues(w.queue, 0.3) if name.encode() in trap.units[0].raw]
    await w.at.broker.delete(name)
    link.thaw()
    await w.disposed("retry", "ack")

    assert len(w.lines("a copy came back; the topology is declared anew")) == 1
    seen = await w.seen()
    assert (seen.result["attempt"], seen.calls, seen.billed) == (1, 2, ["r"])


# ---------------------------------------------------------------- delays


async def test_a_retry_is_hidden_for_half_to_the_whole_delay(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 2 (`RABBITMQ_RETRY_DELAY_S`): "equal jitter (half to whole)"."""
    model.next(wire.reset())
    w = await running_worker(RABBITMQ_RETRY_DELAY_S="1")

    await w.publish(request_body("r"))
    await w.disposed("retry", "ack")

    first, second = model.requests
    assert 0.5 <= second.arrived_at - first.arrived_at < 1.5
    assert (await w.seen()).result["attempt"] == 1


async def test_without_a_delay_a_retry_is_at_once(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 2 (`RABBITMQ_RETRY_DELAY_S`): "0 = at once"."""
    model.next(wire.reset())
    w = await running_worker()

    await w.publish(request_body("r"))
    await w.disposed("retry", "ack")

    first, second = model.requests
    assert second.arrived_at - first.arrived_at < 0.5


async def test_a_short_delay_does_not_wait_behind_a_long_one(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 2 (B40): "doubling"; and one waiting queue for all would hold the short one up."""
    model.default = wire.reset()
    w = await running_worker(RABBITMQ_RETRY_DELAY_S="0.5", RABBITMQ_MAX_RETRIES="9")

    await w.publish(request_body("long"), headers={"x-retry-count": 5})
    await w.disposed("retry")
    model.default = ok()
    model.next(wire.reset())
    await w.publish(request_body("short"))
    result = await w.stored("short", within=5)

    assert result["attempt"] == 1
    assert len(model.requests) == 3, "the long one waits for 8 s at least"


async def test_a_retry_is_never_delayed_beyond_the_deadline(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 2 (`RABBITMQ_RETRY_DELAY_S`): "capped at 30 s and at the deadline"."""
    model.default = wire.reset()
    w = await running_worker(RABBITMQ_RETRY_DELAY_S="30", RABBITMQ_MAX_RETRIES="9")

    await w.publish(request_body("r", timeout_s=1.5))
    result = await w.stored("r", within=5)

    assert (result["status"], result["status_code"]) == ("failed", 408)


# ---------------------------------------------------------------- the body


@pytest.mark.parametrize(
    ("received_in_s", "timeout_s", "left_s"),
    [
        pytest.param(-10, 30, 20, id="as it was sent"),
        pytest.param(30, 30, 60, id="a clock that is half a minute ahead"),
        pytest.param(10_000, 30, 90, id="a clock that is hours ahead counts as one minute"),
        pytest.param(0, 10**15, 30 * 86_400, id="at most 30 days"),
    ],
)
async def test_the_deadline_is_bounded(
    running_worker: RunningWorker,
    model: FakeModel,
    redis_client: RedisClient,
    received_in_s: float,
    timeout_s: float,
    left_s: float,
) -> None:
    """Section 3: "Deadline = min(`received_at`, now + 60 s) + min(`timeout_s`, 30 days)".

    It is seen in the claim, which expires at the deadline + 2 leases + 60 s (`delivery.md`, 1).
    """
    model.default = wire.silent()
    w = await running_worker(CLAIM_LEASE_S="10")

    await w.publish(request_body("r", received_at=time.time() + received_in_s, timeout_s=timeout_s))
    await model.busy()

    expires_in_s = await redis_client.pttl("infer_claim:{infer_resp:r}") / 1000
    assert abs(expires_in_s - (left_s + 2 * 10 + 60)) < 3


@pytest.mark.parametrize(
    ("endpoint", "path"),
    [
        pytest.param(None, "/generate", id="none: the configured one"),
        pytest.param("/generate", "/generate", id="the configured one by name"),
        pytest.param("/v1/chat/completions", "/v1/chat/completions", id="chat"),
        pytest.param("/v1/completions", "/v1/completions", id="completions"),
        pytest.param("/v1/embeddings", "/v1/embeddings", id="embeddings"),
    ],
)
async def test_the_endpoints_that_a_request_may_name(
    running_worker: RunningWorker, model: FakeModel, endpoint: str | None, path: str
) -> None:
    """Section 3: `MODEL_INFER_PATH` and three of OpenAI's."""
    w = await running_worker(MODEL_INFER_PATH="/generate")

    await w.publish(request_body("r", **({"endpoint": endpoint} if endpoint else {})))
    await w.disposed("ack")

    assert [call.path for call in model.requests] == [path]


ODD = b'{ "temperature": 1.0,\n"n":1e999,"a":1,"a":2,"u":"\\u00e9\xc3\xa9" , "big":12345678901234567890123 }'


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        pytest.param(ODD, ODD, id="byte for byte"),
        pytest.param(b'{"stream": false}', b'{"stream": false}', id="stream: false"),
        pytest.param(b'{"stream": "true"}', b'{"stream": "true"}', id="stream: a string"),
        pytest.param(
            b'{"stream":true, "stream_options":{"include_usage":false}}',
            b'{"stream":true, "stream_options":{"include_usage":false}}',
            id="said no to its usage",
        ),
        pytest.param(
            b'{"stream":true,"stream_options":{"include_usage" : true}}',
            b'{"stream":true,"stream_options":{"include_usage" : true}}',
            id="asks for its usage",
        ),
        pytest.param(
            b'{"top_p":1.0,"stream":true,"n":1E0}',
            b'{"top_p":1.0,"stream":true,"n":1E0,"stream_options":{"include_usage":true}}',
            id="streamed: asked for its usage",
        ),
        pytest.param(
            b'{"stream_options":null,"stream": true}',
            b'{"stream_options":{"include_usage":true},"stream":true}',
            id="no options",
        ),
        pytest.param(
            b'{"stream_options":{"x":1.0},"stream":true}',
            b'{"stream_options":{"x":1.0,"include_usage":true},"stream":true}',
            id="other options stay",
        ),
    ],
)
async def test_the_payload_reaches_the_model_as_it_came(
    running_worker: RunningWorker, model: FakeModel, sent: bytes, arrives: bytes
) -> None:
    """Section 3: "as the bytes that came, except that …  gets `stream_options.include_usage`"."""
    w = await running_worker()
    body = json.dumps(request_body("r", payload=0)).encode().replace(b'"payload": 0', b'"payload": ' + sent)

    await w.publish(body)
    await w.disposed("ack")

    assert [call.body for call in model.requests] == [arrives]


# ---------------------------------------------------------------- results


@pytest.mark.parametrize(
    ("behaviour", "status"), [(ok(), b"completed"), (wire.error(400), b"failed"), (wire.reset(), b"failed")]
)
async def test_the_end_is_published_when_the_result_is_there(
    running_worker: RunningWorker, model: FakeModel, redis_client: RedisClient, behaviour: Any, status: bytes
) -> None:
    """Section 4: `SET`, then `PUBLISH infer_resp:<request_id>` with `completed` or `failed`."""
    model.default = behaviour
    w = await running_worker(RABBITMQ_MAX_RETRIES="0")
    async with redis_client.pubsub() as told:
        await told.subscribe("infer_resp:r")
        await told.get_message(timeout=5)

        await w.publish(request_body("r"))
        message = await told.get_message(ignore_subscribe_messages=True, timeout=SOON_S)

    assert message is not None
    assert message["data"] == status
    assert json.loads(await redis_client.get("infer_resp:r") or b"{}")["status"] == status.decode()


async def test_a_result_lives_for_its_ttl(running_worker: RunningWorker, redis_client: RedisClient) -> None:
    """Section 4: `EX REDIS_RESPONSE_TTL_S`; and the claim has gone with the result."""
    w = await running_worker(REDIS_RESPONSE_TTL_S="77")

    await w.publish(request_body("r"))
    await w.disposed("ack")

    assert 70 <= await redis_client.ttl("infer_resp:r") <= 77
    assert await redis_client.exists("infer_claim:{infer_resp:r}") == 0


async def test_what_a_result_says_of_its_times(
    running_worker: RunningWorker, model: FakeModel, redis_client: RedisClient
) -> None:
    """Section 4: `received_at` as it was sent, `finished_at`, and `timings`, with what the model's headers say."""
    model.default = wire.answer(200, {}, {"x-ttft": "0.25", "x-tbt": "0.01"})
    w = await running_worker()
    received_at = round(time.time() - 3, 3)

    await w.publish(request_body("r", received_at=received_at))
    result = await w.stored("r")

    assert result["received_at"] == received_at
    assert received_at + 3 <= result["finished_at"] <= time.time()
    timings = result["timings"]
    assert list(timings) == ["queue_s", "model_s", "ttft_s", "tbt_s"]
    assert 3 <= timings["queue_s"] < 10
    assert 0 < timings["model_s"] < 5
    assert (timings["ttft_s"], timings["tbt_s"]) == (0.25, 0.01)


async def test_messages_of_a_queue_that_was_there_before_the_worker_are_answered(
    running_worker: RunningWorker, rabbitmq_url: str, deployment_id: str
) -> None:
    """Section 3: producers may come first; the queue that they declared as we would is used without a word."""
    first = await running_worker(REPLICA_ID="first")
    await first.stop()
    await publish(rabbitmq_url, first.queue, request_body("r"))

    w = await running_worker(REPLICA_ID="second", ready=False)
    await w.disposed("ack")

    assert not [line for line in w.at.log if USED_AS_IT_IS in str(line["event"])]
    assert (await w.stored("r"))["replica_id"] == "second"
    assert await drain_queue(rabbitmq_url, w.queue) == []
