"""Workers killed, frozen and told to stop at every moment that matters: nothing is lost, doubled or overbilled.

The windows are those of `docs/design/delivery.md`, section 9: a proxy stops the worker's own command at the exact
place, and the worker is killed there.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import pytest

from inference_worker.redis_scripts import CLAIM, FINISH, RELEASE, SENT, Script
from inference_worker.results import redis as results_in_redis
from tests.faults import model as models
from tests.faults import wire
from tests.faults.proxy import Do, TcpProxy, Unit, Way
from tests.faults.system import Running, System
from tests.faults.wire import Behaviour, Request
from tests.integration.conftest import MakeProxy
from tests.services import Rabbit, Redis
from tests.waiting import eventually

KILLS = 50
PREFETCH = 4
LEASE_S = 1


class Sprung(Protocol):
    """A moment that can be waited for."""

    async def sprung(self, within: float = 10.0) -> None: ...


class Unanswered:
    """The server's part is done, and its answer never arrives: from this unit on nothing comes down."""

    def __init__(self, proxy: TcpProxy, matches: Callable[[Unit], bool]) -> None:
        self._passed = asyncio.Event()

        def look(unit: Unit) -> bool:
            if matches(unit):
                proxy.freeze(Way.DOWN)
                self._passed.set()
            return False

        proxy.when_client_sends(look, Do.DROP)

    async def sprung(self, within: float = 10.0) -> None:
        await eventually(self._passed.is_set, within=within, what="a command whose answer is held back")


def runs(script: Script) -> Callable[[Unit], bool]:
    return lambda unit: script.sha.encode() in unit.args


def is_method(name: str) -> Callable[[Unit], bool]:
    return lambda unit: unit.method == name


def before(script: Script) -> Callable[[TcpProxy, TcpProxy], Sprung]:
    return lambda broker, store: store.when_client_sends(runs(script), Do.FREEZE)


def after(script: Script) -> Callable[[TcpProxy, TcpProxy], Sprung]:
    return lambda broker, store: Unanswered(store, runs(script))


def sends(method: str) -> Callable[[TcpProxy, TcpProxy], Sprung]:
    return lambda broker, store: broker.when_client_sends(method, Do.FREEZE)


def hears(method: str) -> Callable[[TcpProxy, TcpProxy], Sprung]:
    return lambda broker, store: broker.when_server_sends(method, Do.FREEZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Where the worker dies, and what that may cost."""

    arm: Callable[[TcpProxy, TcpProxy], Sprung]
    calls: int
    """Of the model, at most, by both workers together."""
    fails_once: bool = False
    fails_always: bool = False
    told_to_stop: bool = False
    status: str = "completed"


WINDOWS = [
    pytest.param(Window(arm=hears("basic.deliver"), calls=1), id="1 at the delivery"),
    pytest.param(Window(arm=before(CLAIM), calls=1), id="2 before the claim"),
    pytest.param(Window(arm=after(CLAIM), calls=1), id="2 after the claim"),
    pytest.param(Window(arm=before(FINISH), calls=2), id="4 with the model's answer"),
    pytest.param(Window(arm=after(FINISH), calls=1), id="5 after the result"),
    pytest.param(Window(arm=sends("basic.ack"), calls=1), id="5 before the ack"),
    pytest.param(Window(arm=sends("basic.publish"), calls=2, fails_once=True), id="6 before the copy"),
    pytest.param(Window(arm=hears("basic.ack"), calls=3, fails_once=True), id="6 before the confirm"),
    pytest.param(Window(arm=before(RELEASE), calls=3, fails_once=True), id="7 after the confirm"),
    pytest.param(Window(arm=after(RELEASE), calls=2, fails_once=True), id="8 after the release"),
    pytest.param(Window(arm=sends("basic.ack"), calls=2, fails_once=True), id="8 before the ack of the original"),
    pytest.param(
        Window(arm=after(FINISH), calls=2, fails_always=True, status="failed"), id="9 after the last failure is stored"
    ),
    pytest.param(
        Window(arm=sends("basic.nack"), calls=2, fails_always=True, status="failed"), id="9 before the reject"
    ),
    pytest.param(Window(arm=before(RELEASE), calls=2, told_to_stop=True), id="10 at the release of a drain"),
    pytest.param(Window(arm=sends("basic.nack"), calls=2, told_to_stop=True), id="10 at the hand-back of a drain"),
]


class FailingOnce:
    """The first call of some requests is cut off."""

    def __init__(self, share: float, rng: random.Random) -> None:
        self.failed: set[str] = set()
        self._share = share
        self._rng = rng

    def __call__(self, request: Request) -> Behaviour | None:
        name = request.headers.get("x-request-id", "")
        if name in self.failed or self._rng.random() >= self._share:
            return None
        self.failed.add(name)
        return wire.close_before_answer()


@pytest.mark.parametrize("window", WINDOWS)
async def test_a_worker_killed_in_any_window_costs_at_most_the_calls_that_the_design_says(
    window: Window, system: System, rabbit: Rabbit, redis_server: Redis, proxy: MakeProxy
) -> None:
    broker, store = await proxy(rabbit, speaks="amqp"), await proxy(redis_server, speaks="redis")
    (one,) = system.ids(1)
    opened = asyncio.Event()
    if window.fails_once:
        system.model.decide = FailingOnce(1.0, random.Random(0))
    if window.fails_always:
        system.model.default = wire.close_before_answer()
    if window.told_to_stop:
        system.model.next(wire.gated(opened, models.ok()))
    moment = window.arm(broker, store)

    async with system.worker(
        "doomed",
        RABBITMQ_URL=broker.url(system.rabbitmq_url),
        REDIS_URL=store.url(system.redis_url),
        CLAIM_LEASE_S=str(LEASE_S),
        SHUTDOWN_GRACE_S="0.1",
    ) as doomed:
        await system.submit(one)
        if window.told_to_stop:
            await system.model.busy()
            doomed.terminate()
        await moment.sprung()
        doomed.kill()
    await broker.cut()
    await store.cut()
    opened.set()
    await system.waiting(1)
    async with system.inside(CLAIM_LEASE_S=str(LEASE_S)) as rescuer:
        results = await system.answered([one])
        await system.drained(rescuer)
        await system.billed()

    evidence = await system.conserved()
    assert results[one]["status"] == window.status
    assert system.calls()[one] <= window.calls
    assert evidence.dead.total() == (window.status == "failed")
    assert len(system.billing.events) == (window.status == "completed")


async def test_a_call_lost_with_its_worker_is_made_once_more(system: System) -> None:
    """Window 3: the worker dies while the model works."""
    (one,) = system.ids(1)
    opened = asyncio.Event()
    system.model.next(wire.gated(opened, models.ok()))
    async with system.worker("doomed", CLAIM_LEASE_S=str(LEASE_S)) as doomed:
        await system.submit(one)
        await system.model.busy()
        doomed.kill()
    await eventually(lambda: system.model.in_flight == 0, within=5, what="the model notices")

    async with system.inside(CLAIM_LEASE_S=str(LEASE_S)) as rescuer:
        await system.answered([one])
        await system.drained(rescuer)
        await system.billed()

    await system.conserved()
    assert system.calls()[one] == 2


async def test_a_bill_that_was_sent_and_not_removed_is_sent_again_under_the_same_id(
    system: System, redis_server: Redis, proxy: MakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Window 11."""
    monkeypatch.setattr(results_in_redis, "LEFT_LYING_MS", 200)
    store = await proxy(redis_server, speaks="redis")
    moment = store.when_client_sends(runs(SENT), Do.FREEZE)
    (one,) = system.ids(1)
    async with system.worker("doomed", REDIS_URL=store.url(system.redis_url)) as doomed:
        await system.submit(one)
        await moment.sprung()
        doomed.kill()
    await store.cut()
    assert len(system.billing.events) == 1

    async with system.inside() as rescuer:
        await system.billed()
        await system.drained(rescuer)

    await system.conserved()
    assert len(system.billing.events) == 2
    assert len({event["id"] for event in system.billing.events}) == 1


async def test_fifty_kills_at_random_instants_lose_and_double_nothing(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R10. Some requests fail once, so that copies are published; billing is down half of the time."""
    monkeypatch.setattr(results_in_redis, "LEFT_LYING_MS", 200)
    rng = random.Random(20)
    system.model.decide = failing = FailingOnce(0.3, rng)
    system.model.default = models.ok(takes_s=0.08)
    ids = system.ids(6 * KILLS)
    left = list(ids)
    pace = {"RABBITMQ_PREFETCH": str(PREFETCH), "CLAIM_LEASE_S": str(LEASE_S), "RABBITMQ_MAX_RETRIES": "3"}
    async with system.worker("r1", **pace) as first, system.process("r2", **pace) as second:
        for kill in range(KILLS):
            victim: Running = (first, second)[kill % 2]
            await system.submit(*(left.pop() for _ in range(6)))
            if kill % 5 == 0:
                system.billing.fail(status=503) if kill % 10 else system.billing.work()
            await victim.in_state("consuming")
            await asyncio.sleep(rng.uniform(0, 0.3))  # the instant
            victim.kill()
            victim.start()
        system.billing.work()
        await system.answered(ids, within=40)
    async with system.inside(**pace) as last:
        await system.drained(last)
        await system.billed()

    evidence = await system.conserved()
    completed = {one for one, result in evidence.results.items() if result["status"] == "completed"}
    assert len({str(event["id"]) for event in system.billing.events}) == len(completed)
    # A kill costs the calls that ran, and a copy that may have been published beside each.
    assert system.calls().total() <= len(ids) + len(failing.failed) + KILLS * 2 * PREFETCH


@pytest.mark.parametrize("frozen_answers_first", [True, False], ids=["its answer came first", "its answer came last"])
async def test_a_worker_frozen_for_longer_than_its_lease_answers_once_and_bills_once(
    frozen_answers_first: bool, system: System
) -> None:
    """A second copy of the request lies with another worker, which takes over when the lease has lapsed."""
    (one,) = system.ids(1)
    opened = [asyncio.Event(), asyncio.Event()]
    system.model.next(*(wire.gated(gate, models.ok(text=f"answer {n}")) for n, gate in enumerate(opened)))
    async with system.worker("frozen", CLAIM_LEASE_S=str(LEASE_S), RABBITMQ_PREFETCH="1") as frozen:
        await system.submit(one)
        await system.model.busy(1)
        frozen.stop()
        async with system.inside(CLAIM_LEASE_S=str(LEASE_S)) as other:
            await system.submit(one)
            await system.model.busy(2)
            if frozen_answers_first:
                opened[0].set()
                await eventually(lambda: system.model.in_flight == 1, within=5, what="its answer on the way")
                frozen.cont()
                await system.answered([one])
                opened[1].set()
            else:
                opened[1].set()
                await system.answered([one])
                frozen.cont()
                opened[0].set()
            await system.drained(other)
            await system.billed()
        await system.stopped(frozen)

    evidence = await system.conserved()
    assert system.calls()[one] == 2
    assert f"answer {int(not frozen_answers_first)}" in str(evidence.results[one])
    assert len(system.billing.events) == 1


async def test_ten_stops_in_a_burst_dead_letter_nothing_and_count_as_no_attempt(system: System) -> None:
    """B25, B26: what has not begun goes back, what is interrupted goes back, and both uncounted."""
    (slow,), ids = system.ids(1, "slow"), system.ids(200)
    system.model.when_prompt_has("slow", wire.silent())
    system.model.default = models.ok(takes_s=0.1)
    worker = system.process(RABBITMQ_PREFETCH="8", SHUTDOWN_GRACE_S="0.05", RABBITMQ_MAX_RETRIES="1")
    for stop in range(10):
        before = len(system.model.requests)
        async with worker:
            if not stop:
                await worker.ready(worker.readyz)
                await system.submit(slow, *ids)
            await system.model.called(before + 10)
            worker.terminate()
            assert await worker.wait(within=12) == 0
        assert (await system.evidence()).dead.total() == 0
    system.model.decide = lambda request: models.ok()

    async with system.inside(RABBITMQ_PREFETCH="16") as last:
        results = await system.answered([slow, *ids])
        await system.drained(last)
        await system.billed()

    await system.conserved()
    assert {(result["status"], result["attempt"]) for result in results.values()} == {("completed", 0)}


async def test_a_stop_within_milliseconds_of_an_ack_loses_no_ack(
    system: System, rabbit: Rabbit, proxy: MakeProxy
) -> None:
    """B41: an ack that was written is flushed before the connection is closed; no second call in any case."""
    broker = await proxy(rabbit, speaks="amqp")
    ids = system.ids(6)
    worker = system.process(RABBITMQ_URL=broker.url(system.rabbitmq_url), RABBITMQ_PREFETCH="1")
    for turn, one in enumerate(ids):

        def stop_at_once(unit: Unit) -> bool:
            if unit.method == "basic.ack":
                worker.terminate()
            return False

        broker.clear_traps()
        broker.when_client_sends(stop_at_once, Do.DROP)
        async with worker:
            if not turn:
                await worker.ready(worker.readyz)
            await system.submit(one)
            assert await worker.wait(within=12) == 0

        assert await system.ready_messages() == 0

    await system.conserved()
    assert system.calls() == dict.fromkeys(ids, 1)


@pytest.mark.parametrize("hung", ["sinks", "redis", "broker", "model"])
async def test_a_stop_ends_in_time_whatever_hangs(
    hung: str, system: System, rabbit: Rabbit, redis_server: Redis, proxy: MakeProxy
) -> None:
    """B127, B99: exit code 0 within the grace and 10 s, with requests in hand."""
    grace_s = 1.0
    broker, store = await proxy(rabbit, speaks="amqp"), await proxy(redis_server, speaks="redis")
    ids = system.ids(4)
    opened = asyncio.Event()
    system.model.default = wire.gated(opened, models.ok())
    async with system.worker(
        RABBITMQ_URL=broker.url(system.rabbitmq_url),
        REDIS_URL=store.url(system.redis_url),
        SHUTDOWN_GRACE_S=str(grace_s),
        METRIC_SERVER_URL=system.metrics.url,
        METRIC_SERVER_SERVICE_TOKEN="token",
    ) as worker:
        await system.submit(*ids)
        await system.model.busy(4)
        match hung:
            case "sinks":
                system.billing.fail("silent")
                system.metrics.fail("silent")
                opened.set()
                await system.answered(ids)
                await system.billing.received()
            case "redis":
                store.freeze()
                opened.set()
            case "broker":
                broker.freeze()
                opened.set()
                await system.answered(ids)
            case _:
                pass
        begun = time.monotonic()
        worker.terminate()
        assert await worker.wait(within=grace_s + 10) == 0
    assert time.monotonic() - begun < grace_s + 10
    await store.cut()
    await broker.cut()
    opened.set()
    system.billing.work()

    async with system.inside() as next_one:
        await system.answered(ids)
        await system.drained(next_one)

    evidence = await system.conserved()
    assert {result["attempt"] for result in evidence.results.values()} == {0}
