"""A broker that restarts, refuses, forgets, swallows, blocks and limits: the worker recovers and loses nothing.

The numbers B… are those of the collected bug reports of other workers (`docs/design/delivery.md` has the rules).
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from inference_worker import listener, rmq_listener
from inference_worker.assembly import Worker
from inference_worker.rmq_listener import RabbitTransport
from tests.conservation import channel_of, publish
from tests.faults import model as models
from tests.faults import wire
from tests.faults.proxy import Do
from tests.faults.system import System
from tests.faults.wire import Behaviour, Exchange, Request
from tests.integration.conftest import MakeProxy
from tests.services import Rabbit, Redis
from tests.waiting import eventually

pytestmark = pytest.mark.needs_control


async def consumers(system: System) -> int:
    """How many consumers the queue has."""
    async with channel_of(system.rabbitmq_url) as channel:
        queue = await channel.declare_queue(system.queue, passive=True)
        return queue.declaration_result.consumer_count or 0


async def consuming(worker: Worker, *, within: float = 40.0) -> None:
    await eventually(lambda: worker.listener.state == "consuming", within=within, what="a consuming worker")


async def lost(worker: Worker, because: str) -> None:
    """Wait until the session has ended for this reason, which is known until the next one begins."""
    await eventually(lambda: because in worker.listener.link_reason, within=15, what=f"a session ended by {because}")


@asynccontextmanager
async def broker_setting(rabbit: Rabbit, settings: str, restored: str) -> AsyncGenerator[None]:
    """Change the broker's own settings for a while, by its `eval`."""
    await asyncio.to_thread(rabbit.ctl, "eval", settings)
    try:
        yield
    finally:
        await asyncio.to_thread(rabbit.ctl, "eval", restored)


def set_env(**values: int) -> str:
    """What has a broker take these settings; 4.x keeps a copy of some, which it reads instead."""
    settings = [f"application:set_env(rabbit,{name},{value})" for name, value in values.items()]
    copies = [f"persistent_term:put({name},{value})" for name, value in values.items()]
    return ", ".join(copies + settings) + "."


@pytest.mark.parametrize("how", ["restarted", "its connections closed", "killed"])
async def test_after_each_of_five_losses_the_queue_has_one_consumer_and_everything_is_answered(
    how: str, system: System, rabbit: Rabbit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B01."""
    monkeypatch.setattr(listener, "FIRST_BACKOFF_S", 0.1)
    monkeypatch.setattr(listener, "LONGEST_BACKOFF_S", 1.0)
    turns = 1 if how == "killed" else 5
    ids = system.ids(4 * turns)
    left = list(ids)
    system.model.default = models.ok(takes_s=0.3)
    async with system.inside() as worker:
        await consuming(worker)
        for _ in range(turns):
            await system.submit(*(left.pop() for _ in range(4)))
            await system.model.busy(1)
            match how:
                case "restarted":
                    await asyncio.to_thread(rabbit.ctl, "stop_app")
                    await asyncio.to_thread(rabbit.ctl, "start_app")
                case "killed":
                    await asyncio.to_thread(rabbit.write_down)
                    await asyncio.to_thread(rabbit.kill)
                    await asyncio.to_thread(rabbit.start)
                case _:
                    await asyncio.to_thread(rabbit.ctl, "close_all_connections", "why")
            await consuming(worker)
            await eventually(lambda: consumers(system), within=10, what="a consumer", every=0.1)
            assert await consumers(system) == 1
        await system.answered(ids)
        await system.drained(worker)
        await system.billed()

    await system.conserved()
    assert max(system.calls().values()) == 1


@pytest.mark.parametrize("busy", [False, True], ids=["while idle", "while three run"])
async def test_a_deleted_queue_is_declared_anew_and_consumed(busy: bool, system: System) -> None:
    """B03, B13: the broker cancels the consumer and closes nothing."""
    running, (later,) = system.ids(3, "running"), system.ids(1, "later")
    opened = asyncio.Event()
    system.model.default = wire.gated(opened, models.ok())
    async with system.inside() as worker:
        await consuming(worker)
        if busy:
            await system.submit(*running)
            await system.model.busy(3)
        async with channel_of(system.rabbitmq_url) as channel:
            await channel.queue_delete(system.queue)
        await lost(worker, "cancelled the consumer")
        await consuming(worker, within=15)
        await system.submit(later)
        opened.set()
        await system.answered([later, *(running if busy else [])], within=15)
        await system.drained(worker)
        await system.billed()

    await system.conserved()
    assert max(system.calls().values()) == 1


async def test_refused_credentials_are_tried_again_and_told_once(system: System, rabbit: Rabbit) -> None:
    """B07: a user who comes later, then a password that changes and comes back. No password is ever printed."""
    secret, name = "s3cret-pa55word", f"u-{system.deployment_id}"

    async def ctl(*args: str) -> None:
        await asyncio.to_thread(rabbit.ctl, *args)

    url = system.rabbitmq_url.replace("guest:guest", f"{name}:{secret}")
    (before, after) = system.ids(2)
    process = system.process(RABBITMQ_URL=url)
    async with process:
        refused = "the broker refused the credentials"
        await process.logged(refused)
        await process.ready(process.readyz, status=503)
        await ctl("add_user", name, secret)
        await ctl("set_permissions", name, ".*", ".*", ".*")
        await process.ready(process.readyz)
        await system.submit(before)
        await system.answered([before])
        warned = process.log.count(refused)

        await ctl("change_password", name, "another")
        await ctl("close_all_connections", "the password has changed")
        await eventually(lambda: process.log.count(refused) > warned, within=10, what="the second refusal")
        await ctl("change_password", name, secret)
        await process.ready(process.readyz)
        await system.submit(after)
        await system.answered([after])
        await system.stopped(process)
        await ctl("delete_user", name)

    await system.conserved()
    assert process.log.count(refused) == 2
    assert secret not in process.log


async def test_retries_and_suspensions_leak_no_channel_and_no_connection(
    system: System, rabbit: Rabbit, proxy: MakeProxy
) -> None:
    """B08."""
    broker = await proxy(rabbit, speaks="amqp")
    ids = system.ids(300)
    failed: set[str] = set()

    def fail_once(request: Request) -> Behaviour | None:
        name = request.headers["x-request-id"]
        if name in failed:
            return None
        failed.add(name)
        return wire.error(503)

    system.model.decide = fail_once
    async with system.inside(
        RABBITMQ_URL=broker.url(system.rabbitmq_url), RABBITMQ_PREFETCH="32", MODEL_RETRY_STATUS_CODES="503"
    ) as worker:
        await consuming(worker)
        await system.submit(*ids)
        for _ in range(30):
            worker.listener.suspend_consuming("model", "for a test")
            await eventually(lambda: worker.listener.state == "suspended", within=10, what="a suspension", every=0.005)
            worker.listener.resume_consuming("model")
            await eventually(lambda: worker.listener.state == "consuming", within=10, what="its end", every=0.005)
        await system.answered(ids)
        await system.drained(worker)
        await system.billed()
        assert broker.accepted == broker.open == 2
        # Those of the test before may be there for a moment yet.
        await eventually(lambda: _channels_at_most(rabbit, 2), within=10, what="two channels")

    evidence = await system.conserved()
    assert system.calls() == dict.fromkeys(ids, 2)
    assert {result["attempt"] for result in evidence.results.values()} == {1}


async def _channels_at_most(rabbit: Rabbit, count: int) -> bool:
    channels = await asyncio.to_thread(rabbit.ctl, "list_channels", "--no-table-headers", "pid")
    return len(channels.splitlines()) <= count


async def test_a_worker_starts_before_everything_else(
    system: System, rabbit: Rabbit, redis_server: Redis, proxy: MakeProxy
) -> None:
    """B09: alive at once, ready when all three have come, in whatever order; few lines meanwhile."""
    broker, store = await proxy(rabbit), await proxy(redis_server)
    await broker.refuse()
    await store.refuse()
    await system.model.refuse()
    (one,) = system.ids(1)
    process = system.process(RABBITMQ_URL=broker.url(system.rabbitmq_url), REDIS_URL=store.url(system.redis_url))
    async with process:
        await process.ready(process.readyz, status=503)
        async with aiohttp.ClientSession() as session, session.get(process.readyz.replace("readyz", "livez")) as alive:
            assert alive.status == 200
        await process.logged("no connection to the broker")
        await broker.accept()
        await process.logged("connected to the broker")
        await store.accept()
        await process.logged("the result store answers")
        await process.ready(process.readyz, status=503)
        assert not process.lines("consuming")
        await system.model.listen()
        await process.ready(process.readyz)
        await system.submit(one)
        await system.answered([one])
        await system.stopped(process)

    await system.conserved()
    assert len(process.log.splitlines()) < 30, process.log


async def test_losing_the_broker_does_not_stop_running_calls(system: System, rabbit: Rabbit, proxy: MakeProxy) -> None:
    """B17, B90: the answers are stored meanwhile, the redeliveries find them, and no call is made twice."""
    broker = await proxy(rabbit, speaks="amqp")
    ids = system.ids(6)
    opened = asyncio.Event()
    system.model.default = wire.gated(opened, models.ok())
    async with system.worker(RABBITMQ_URL=broker.url(system.rabbitmq_url)) as worker:
        await system.submit(*ids)
        await system.model.busy(6)
        await broker.refuse()
        await broker.cut()
        opened.set()
        await system.answered(ids)
        await broker.accept()
        await worker.in_state("consuming")
        await system.drained()
        await eventually(lambda: len(worker.lines("request")) >= 6, within=10, what="the redeliveries' ends")
        await system.billed()
        await system.stopped(worker)

    await system.conserved()
    assert system.calls() == dict.fromkeys(ids, 1)
    assert {(line["disposition"], line["outcome"]) for line in worker.lines("request")} == {("ack", "Answered")}
    assert '"level": "error"' not in worker.log


async def test_a_failure_after_the_ack_settles_nothing_twice(
    system: System, rabbit: Rabbit, proxy: MakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B18: a second settlement would close the channel under all the others."""
    broker = await proxy(rabbit, speaks="amqp")
    ids = system.ids(10)

    def broken(*_: object) -> None:
        raise RuntimeError("told to fail after the ack")

    async with system.inside(RABBITMQ_URL=broker.url(system.rabbitmq_url)) as worker:
        monkeypatch.setattr(worker._buffer, "add", broken)
        await consuming(worker)
        await system.submit(*ids)
        await system.answered(ids)
        await system.drained(worker)
        await system.billed()
        assert broker.accepted == 1
        assert worker.listener.state == "consuming"

    await system.conserved()
    assert system.calls() == dict.fromkeys(ids, 1)


async def test_the_brokers_limit_of_acknowledgement_costs_no_second_call(system: System, rabbit: Rabbit) -> None:
    """B19, B20: the channel alone is closed while the model works (recipe R3)."""
    (long,), short = system.ids(1, "long"), system.ids(3, "short")
    opened = asyncio.Event()
    system.model.when_prompt_has("long", wire.gated(opened, models.ok()))
    quick = set_env(consumer_timeout=1000, channel_tick_interval=500)
    usual = set_env(consumer_timeout=1_800_000, channel_tick_interval=60_000)
    async with broker_setting(rabbit, quick, usual), system.inside() as worker:
        await consuming(worker)
        await system.submit(long)
        await system.model.busy()
        await lost(worker, "PRECONDITION")
        await consuming(worker)
        await system.submit(*short)
        await system.answered(short)
        opened.set()
        await system.answered([long])
        await system.drained(worker)
        await system.billed()

    await system.conserved()
    assert system.calls() == dict.fromkeys([long, *short], 1)


async def test_a_channel_that_is_closed_alone_is_a_lost_session(system: System) -> None:
    """B20: the connection lives on, and hides nothing."""
    before, after = system.ids(2)
    opened = asyncio.Event()
    system.model.default = wire.gated(opened, models.ok())
    async with system.inside() as worker:
        await consuming(worker)
        await system.submit(before)
        await system.model.busy()
        session = worker.listener.transport
        assert isinstance(session, RabbitTransport)
        await session._raw().basic_publish(b"", exchange="there is none")
        await eventually(session.lost.is_set, within=5, what="the channel's end")
        assert worker.ready()["rabbitmq"][0] is False
        await consuming(worker)
        opened.set()
        await system.submit(after)
        await system.answered([before, after])
        await system.drained(worker)
        await system.billed()

    await system.conserved()
    assert system.calls() == dict.fromkeys([before, after], 1)


async def test_a_consumer_that_looks_alive_and_gets_nothing_is_replaced(
    system: System, rabbit: Rabbit, proxy: MakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B23: deliveries vanish while messages are ready."""
    monkeypatch.setattr(listener, "WATCHDOG_S", 0.3)
    broker = await proxy(rabbit, speaks="amqp")
    ids = system.ids(5)
    async with system.inside(RABBITMQ_URL=broker.url(system.rabbitmq_url), RABBITMQ_PREFETCH="2") as worker:
        await consuming(worker)
        swallowed = broker.when_server_sends("basic.deliver", Do.DROP, times=2)
        await system.submit(*ids)
        await swallowed.sprung()
        await lost(worker, "the consumer is dead")
        await system.answered(ids)
        await system.drained(worker)
        await system.billed()

    await system.conserved()
    assert system.calls() == dict.fromkeys(ids, 1)


async def test_an_idle_or_busy_consumer_is_not_taken_for_dead(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog's other half: many looks at a full worker with a backlog, and at an empty queue."""
    monkeypatch.setattr(listener, "WATCHDOG_S", 0.05)
    ids = system.ids(4)
    opened = asyncio.Event()
    system.model.default = wire.gated(opened, models.ok())
    async with system.inside(RABBITMQ_PREFETCH="2") as worker:
        await consuming(worker)
        session = worker.listener.transport
        await system.submit(*ids)
        await system.model.busy(2)
        await asyncio.sleep(0.5)  # ten looks
        opened.set()
        await system.answered(ids)
        await system.drained(worker)
        await asyncio.sleep(0.5)
        assert worker.listener.transport is session

    await system.conserved()


async def test_a_memory_alarm_holds_copies_up_and_nothing_else(system: System, rabbit: Rabbit) -> None:
    """B30: the broker stops reading from publishers (recipe R2); what needs no copy goes on, the rest recovers."""
    bad, good = system.ids(3, "bad"), system.ids(6, "good")
    opened = asyncio.Event()
    failed: set[str] = set()

    def decide(request: Request) -> Behaviour:
        name = request.headers["x-request-id"]
        if "bad" in name and name not in failed:
            failed.add(name)
            return wire.gated(opened, wire.error(503))
        return wire.gated(opened, models.ok())

    system.model.decide = decide
    async with system.inside(RABBITMQ_PREFETCH="4", MODEL_RETRY_STATUS_CODES="503") as worker:
        await consuming(worker)
        await system.submit(*bad, *good)
        await system.model.busy(4)
        await asyncio.to_thread(rabbit.ctl, "set_vm_memory_high_watermark", "0.00001")
        try:
            opened.set()
            await system.answered(good)
            assert worker.listener.in_flight == 3
            assert system.calls().keys() == {*bad, *good}
        finally:
            await asyncio.to_thread(rabbit.ctl, "set_vm_memory_high_watermark", "0.4")
        await system.answered(bad)
        await system.drained(worker)
        await system.billed()

    evidence = await system.conserved()
    assert {evidence.results[one]["status"] for one in bad} == {"completed"}


async def test_a_missing_dead_letter_exchange_is_declared_anew_and_disturbs_nobody(system: System) -> None:
    """B33: on a queue of another form the worker publishes dead letters itself, on a channel of their own."""
    (bad,), good = system.ids(1, "bad"), system.ids(4, "good")
    opened = asyncio.Event()
    system.model.when_prompt_has("bad", wire.close_before_answer())
    system.model.default = wire.gated(opened, models.ok())
    await publish(system.rabbitmq_url, system.queue, declare={})
    async with system.inside(RABBITMQ_MAX_RETRIES="0") as worker:
        await consuming(worker)
        await system.submit(*good)
        await system.model.busy(4)
        async with channel_of(system.rabbitmq_url) as channel:
            await channel.exchange_delete(f"dlx.{system.deployment_id}")
        session = worker.listener.transport
        await system.submit(bad)
        await system.answered([bad])
        opened.set()
        await system.answered(good)
        await system.drained(worker)
        await system.billed()
        assert worker.listener.transport is session

    evidence = await system.conserved()
    assert evidence.dead == {bad: 1}
    assert system.calls() == dict.fromkeys([bad, *good], 1)


async def test_a_message_too_large_for_its_copy_fails_for_good(system: System, rabbit: Rabbit) -> None:
    """B34: the limit was lowered after the message was queued (recipe R4)."""
    (big,), small = system.ids(1, "big"), system.ids(3, "small")
    opened = asyncio.Event()
    system.model.when_prompt_has("big", wire.gated(opened, wire.error(503)))
    limit = set_env(max_message_size=1_048_576)
    changes = {"MODEL_RETRY_STATUS_CODES": "503", "RABBITMQ_MAX_RETRIES": "5"}
    async with broker_setting(rabbit, "ok.", set_env(max_message_size=134_217_728)), system.inside(**changes) as worker:
        await consuming(worker)
        await system.submit(big, pad=1_500_000)
        await system.model.busy()
        await asyncio.to_thread(rabbit.ctl, "eval", limit)
        opened.set()
        results = await system.answered([big])
        await system.submit(*small)
        await system.answered(small)
        await system.drained(worker)
        await system.billed()

    evidence = await system.conserved()
    assert results[big]["status"] == "failed"
    assert "larger than" in str(results[big]["error"])
    assert evidence.dead == {big: 1}
    assert system.calls()[big] == 1


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
async def test_a_request_that_kills_its_workers_ends_as_poison_and_takes_nobody_along(
    queue_type: str, system: System
) -> None:
    """B46, B47: a classic queue carries no counter; a quorum queue would count against the neighbours too."""
    (deadly,), good = system.ids(1, "deadly"), system.ids(4, "good")
    deaths = 0

    async def kill_the_worker(exchange: Exchange) -> None:
        nonlocal deaths
        deaths += 1
        worker.kill()
        await wire.silent()(exchange)

    system.model.when_prompt_has("deadly", wire.delayed(0.1, kill_the_worker))
    changes = {"RABBITMQ_QUEUE_TYPE": queue_type, "CLAIM_LEASE_S": "0.5", "RABBITMQ_DELIVERY_LIMIT": "10"}
    worker = system.process(**changes)
    async with worker:
        await worker.ready(worker.readyz)
        await system.submit(deadly, *good)
        for _ in range(3):
            await eventually(lambda: worker.returncode is not None, within=20, what="the worker's death")
            worker.start()
        results = await system.answered([deadly, *good])
        await worker.in_state("consuming")
        await system.drained()
        await system.billed()
        await system.stopped(worker)

    evidence = await system.conserved()
    assert deaths == 3
    assert results[deadly]["error_code"] == "poison"
    assert evidence.dead == {deadly: 1}
    assert {results[one]["status"] for one in good} == {"completed"}


async def test_a_queue_that_is_not_there_yet_is_waited_for(system: System, rabbit: Rabbit) -> None:
    """B59: a user who may not declare, and a queue that somebody else makes later; no answer is fatal."""
    name = f"u-{system.deployment_id}"
    await asyncio.to_thread(rabbit.ctl, "add_user", name, name)
    await asyncio.to_thread(rabbit.ctl, "set_permissions", name, "^$", ".*", ".*")
    (one,) = system.ids(1)
    async with system.inside(RABBITMQ_URL=system.rabbitmq_url.replace("guest:guest", f"{name}:{name}")) as worker:
        await eventually(
            lambda: "neither be declared nor found" in worker.listener.link_reason, within=10, what="the refusal"
        )
        async with channel_of(system.rabbitmq_url) as channel:
            exchange = await channel.declare_exchange(f"dlx.{system.deployment_id}", durable=True)
            await (await channel.declare_queue(system.dlq, durable=True)).bind(exchange, "dead")
            await channel.declare_queue(system.queue, durable=True)
        await system.submit(one)
        await system.answered([one])
        await system.drained(worker)
        await system.billed()
    await asyncio.to_thread(rabbit.ctl, "delete_user", name)

    await system.conserved()


@pytest.mark.parametrize("method", ["queue.declare", "basic.qos", "basic.consume", "channel.open", "connection.open"])
async def test_a_call_that_the_broker_never_answers_ends_the_session_and_the_next_one_works(
    method: str, system: System, rabbit: Rabbit, proxy: MakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B60."""
    for name, seconds in (("CALL_S", 0.5), ("CONNECT_S", 0.5)):
        monkeypatch.setattr(rmq_listener, name, seconds)
    monkeypatch.setattr(RabbitTransport._session_call.__wrapped__, "__defaults__", (0.5,))  # type: ignore[attr-defined]
    broker = await proxy(rabbit, speaks="amqp")
    swallowed = broker.when_client_sends(method, Do.DROP)
    (one,) = system.ids(1)
    async with system.inside(RABBITMQ_URL=broker.url(system.rabbitmq_url)) as worker:
        await swallowed.sprung()
        await eventually(lambda: "no answer within" in worker.listener.link_reason, within=10, what="the time limit")
        await consuming(worker)
        await system.submit(one)
        await system.answered([one])
        await system.drained(worker)
        await system.billed()

    await system.conserved()


async def test_a_half_open_link_is_noticed_by_its_heartbeats(system: System, rabbit: Rabbit, proxy: MakeProxy) -> None:
    """The link is frozen, and nothing is ever closed; the redelivery finds the answer."""
    broker = await proxy(rabbit, speaks="amqp")
    running, later = system.ids(2)
    opened = asyncio.Event()
    system.model.default = wire.gated(opened, models.ok())
    async with system.inside(RABBITMQ_URL=broker.url(system.rabbitmq_url), RABBITMQ_HEARTBEAT_S="1") as worker:
        await consuming(worker)
        await system.submit(running)
        await system.model.busy()
        frozen = broker.when_server_sends(lambda unit: True, Do.FREEZE)
        await frozen.sprung()
        opened.set()
        await system.answered([running])
        await eventually(lambda: broker.accepted == 2, within=15, what="a second connection")
        await consuming(worker)
        await system.submit(later)
        await system.answered([later])
        await system.drained(worker)
        await system.billed()
        broker.thaw()

    await system.conserved()
    assert system.calls() == dict.fromkeys([running, later], 1)
