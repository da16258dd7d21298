"""Workers on a stream, killed at every step, told to stop, frozen: every job ends once, and no copy is made.

`docs/design/delivery.md`, section 7: a proxy stops the worker's own command, or the answer to it, at the exact place,
and the worker is killed there. Each test ends with the conservation check of `stream_system.py`.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from inference_worker.redis_scripts import CLAIM, Script
from inference_worker.transports.stream_scripts import CONCLUDE, HAND_BACK, RETRY
from tests.faults import model as models
from tests.faults import wire
from tests.faults.proxy import Do, TcpProxy, Unit, Way
from tests.integration.conftest import MakeProxy
from tests.services import Redis
from tests.stream_kit import NAMES, streams_at
from tests.stream_system import StreamSystem, stream_system
from tests.waiting import eventually

KILLS = 6


@pytest.fixture
async def system(redis_url: str, deployment_id: str, tmp_path: Path) -> AsyncGenerator[StreamSystem]:
    async with (
        streams_at(redis_url) as streams,
        stream_system(redis_url, deployment_id, tmp_path, streams) as made,
    ):
        yield made


Arm = Callable[[TcpProxy], asyncio.Event]


def runs(script: Script) -> Callable[[Unit], bool]:
    return lambda unit: script.sha.encode() in unit.args


def before(script: Script) -> Arm:
    """The command does not arrive."""

    def arm(proxy: TcpProxy) -> asyncio.Event:
        sprung = asyncio.Event()

        def look(unit: Unit) -> bool:
            if runs(script)(unit):
                sprung.set()
                return True
            return False

        proxy.when_client_sends(look, Do.FREEZE)
        return sprung

    return arm


def after(script: Script) -> Arm:
    """The command is carried out; its answer does not arrive, nor does anything after it."""

    def arm(proxy: TcpProxy) -> asyncio.Event:
        sprung = asyncio.Event()

        def look(unit: Unit) -> bool:
            if runs(script)(unit):
                proxy.freeze(Way.DOWN)
                sprung.set()
            return False

        proxy.when_client_sends(look, Do.DROP)
        return sprung

    return arm


def delivered(proxy: TcpProxy) -> asyncio.Event:
    """The entry is pending for the worker, and never reaches it."""
    sprung = asyncio.Event()

    def look(unit: Unit) -> bool:
        if b"enqueued_at" in unit.raw:
            sprung.set()
            return True
        return False

    proxy.when_server_sends(look, Do.FREEZE)
    return sprung


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Where the worker dies, and what that may cost."""

    arm: Arm
    calls: int
    """Of the model, at most, by both workers together."""
    fails_once: bool = False
    fails_always: bool = False
    told_to_stop: bool = False
    delay_s: str = "0"


WINDOWS = [
    pytest.param(Window(arm=delivered, calls=1), id="at the delivery"),
    pytest.param(Window(arm=before(CLAIM), calls=1), id="before the claim"),
    pytest.param(Window(arm=after(CLAIM), calls=1), id="after the claim"),
    pytest.param(Window(arm=before(CONCLUDE), calls=2), id="with the model's answer"),
    pytest.param(Window(arm=after(CONCLUDE), calls=1), id="after the answer and the ack"),
    pytest.param(Window(arm=before(RETRY), calls=3, fails_once=True), id="before the retry"),
    pytest.param(Window(arm=after(RETRY), calls=2, fails_once=True), id="after the retry"),
    pytest.param(Window(arm=after(RETRY), calls=2, fails_once=True, delay_s="0.2"), id="after a retry for later"),
    pytest.param(Window(arm=before(CONCLUDE), calls=3, fails_always=True), id="before the dead letter"),
    pytest.param(Window(arm=after(CONCLUDE), calls=2, fails_always=True), id="after the dead letter"),
    pytest.param(Window(arm=before(HAND_BACK), calls=2, told_to_stop=True), id="before the hand-back of a drain"),
    pytest.param(Window(arm=after(HAND_BACK), calls=2, told_to_stop=True), id="after the hand-back of a drain"),
]


@pytest.mark.parametrize("window", WINDOWS)
async def test_a_worker_killed_at_any_step_makes_no_copy_and_loses_none(
    window: Window, system: StreamSystem, redis_server: Redis, proxy: MakeProxy
) -> None:
    between = await proxy(redis_server, speaks="redis")
    (one,) = system.ids(1)
    opened = asyncio.Event()
    model = system.rest.model
    if window.fails_once:
        model.next(wire.error(500))
    if window.fails_always:
        model.default = wire.error(500)
    if window.told_to_stop:
        model.next(wire.gated(opened, models.ok()))
    pace = {"SHUTDOWN_GRACE_S": "0.1", "IWL_RETRY_DELAY_S": window.delay_s}

    async with system.worker("doomed", REDIS_URL=between.url(system.rest.redis_url), **pace) as doomed:
        sprung = window.arm(between)
        await system.submit(one)
        if window.told_to_stop:
            await model.busy()
            doomed.terminate()
        await eventually(sprung.is_set, within=10, what="the step")
        doomed.kill()
    await between.cut()
    opened.set()
    async with system.inside():
        results = await system.answered([one])
        await system.drained()

    evidence = await system.conserved()
    status = "failed" if window.fails_always else "completed"
    assert results[one]["status"] == status
    assert system.rest.calls()[one] <= window.calls
    assert evidence.dead.total() == window.fails_always
    assert len({str(event["id"]) for event in system.rest.billing.events}) == (not window.fails_always)


async def test_a_call_lost_with_its_worker_is_made_once_more(system: StreamSystem) -> None:
    (one,) = system.ids(1)
    opened = asyncio.Event()
    system.rest.model.next(wire.gated(opened, models.ok()))
    async with system.worker("doomed") as doomed:
        await system.submit(one)
        await system.rest.model.busy()
        doomed.kill()

    async with system.inside():
        await system.answered([one])
        await system.drained()
    await system.conserved()
    assert system.rest.calls()[one] == 2
    opened.set()


async def test_kills_at_random_instants_lose_and_double_nothing(system: StreamSystem) -> None:
    """Some requests fail at first, so that there are retries, at once and later."""
    rng = random.Random(4)
    failed: set[str] = set()

    def fail_once(asked: wire.Request) -> wire.Behaviour | None:
        name = asked.headers.get("x-request-id", "")
        if name in failed or rng.random() > 0.3:
            return None
        failed.add(name)
        return wire.error(503)

    system.rest.model.decide = fail_once
    system.rest.model.default = models.ok(takes_s=0.05)
    ids = system.ids(8 * KILLS)
    left = list(ids)
    # A request may be among those that run at several kills, without being what kills.
    pace = {"IWL_MAX_ATTEMPTS": "5", "IWL_RETRY_DELAY_S": "0.05", "INFERENCE_MAX_CRASHES": "100"}
    async with system.process("r1", **pace) as first, system.process("r2", **pace) as second:
        for kill in range(KILLS):
            victim = (first, second)[kill % 2]
            await victim.in_state("consuming")
            await system.submit(*(left.pop() for _ in range(8)))
            await asyncio.sleep(rng.uniform(0, 0.25))  # the instant
            victim.kill()
            victim.start()
        await system.answered(ids)
        await system.drained()
        await system.rest.stopped(first, second)

    evidence = await system.conserved()
    assert not evidence.dead, [evidence.results[one] for one in evidence.dead]
    assert len({str(event["id"]) for event in system.rest.billing.events}) == len(ids)


async def test_told_to_stop_a_worker_hands_back_at_once_and_uncounted(system: StreamSystem) -> None:
    """Long before its lease of 30 s lapses; what had not begun, and what ran beyond the grace."""
    ids = system.ids(6)
    opened = asyncio.Event()
    system.rest.model.default = wire.gated(opened, models.ok())
    pace = {"IWL_CLAIM_IDLE_MS": "30000", "SHUTDOWN_GRACE_S": "0.1", "IWL_CONCURRENCY": "4"}
    async with system.worker("stopping", **pace) as stopping:
        await system.submit(*ids)
        await system.rest.model.busy(4)
        async with system.inside("other", IWL_CLAIM_IDLE_MS="30000", IWL_CONCURRENCY="8"):
            await system.rest.stopped(stopping)
            opened.set()
            results = await system.answered(ids, within=10)
            await system.drained()
    await system.conserved()
    assert {(result["status"], result["attempt"]) for result in results.values()} == {("completed", 0)}
    assert {result["replica_id"] for result in results.values()} == {"other"}


async def test_losing_redis_does_not_stop_what_runs_and_nothing_is_called_twice(
    system: StreamSystem, redis_server: Redis, proxy: MakeProxy
) -> None:
    """Every connection is cut while four calls run and four requests wait, with another worker on the stream."""
    between = await proxy(redis_server, speaks="redis")
    ids = system.ids(8)
    opened = asyncio.Event()
    system.rest.model.default = wire.gated(opened, models.ok())
    slow = {"IWL_CLAIM_IDLE_MS": "5000"}
    async with system.inside("cut", REDIS_URL=between.url(system.rest.redis_url), **slow) as worker:
        await system.submit(*ids)
        await system.rest.model.busy(4)
        await between.cut()
        await eventually(lambda: worker.listener.transport is None, within=5, what="the loss is seen")
        opened.set()
        async with system.inside("other", **slow):
            await system.answered(ids)
            await system.drained()
    await system.conserved()
    assert system.rest.calls() == dict.fromkeys(ids, 1)


async def test_a_model_that_answers_500_is_tried_as_often_as_allowed_then_dead_lettered(system: StreamSystem) -> None:
    (one,) = system.ids(1)
    system.rest.model.default = wire.error(500)
    async with system.inside(IWL_MAX_ATTEMPTS="3"):
        await system.submit(one)
        results = await system.answered([one])
        await system.drained()
    evidence = await system.conserved()
    assert system.rest.calls()[one] == 3
    assert (results[one]["error_code"], results[one]["attempt"]) == ("retries_exhausted", 2)
    assert evidence.dead == {one: 1}


async def test_a_worker_frozen_for_longer_than_its_lease_answers_once_and_bills_once(system: StreamSystem) -> None:
    (one,) = system.ids(1)
    opened = [asyncio.Event(), asyncio.Event()]
    system.rest.model.next(*(wire.gated(gate, models.ok(text=f"answer {n}")) for n, gate in enumerate(opened)))
    async with system.worker("frozen", IWL_CONCURRENCY="1") as frozen:
        await system.submit(one)
        await system.rest.model.busy(1)
        frozen.stop()
        async with system.inside("other"):
            await system.rest.model.busy(2)
            opened[1].set()
            await system.answered([one])
            frozen.cont()
            opened[0].set()
            await system.drained()
        await system.rest.stopped(frozen)
    evidence = await system.conserved()
    assert "answer 1" in str(evidence.results[one])
    assert len({str(event["id"]) for event in system.rest.billing.events}) == 1


@pytest.mark.parametrize("script", [CLAIM, CONCLUDE, RETRY, HAND_BACK], ids=["claim", "answer", "retry", "back"])
async def test_a_lost_reply_costs_no_job_no_copy_and_no_bill(
    script: Script, system: StreamSystem, redis_server: Redis, proxy: MakeProxy
) -> None:
    """The connection is cut in the place of the reply, several times, while jobs run, fail and are given back."""
    between = await proxy(redis_server, speaks="redis")
    ids = system.ids(12)
    system.rest.model.next(*(wire.error(500) for _ in range(3)))
    system.rest.model.default = models.ok(takes_s=0.02)
    async with system.inside(REDIS_URL=between.url(system.rest.redis_url), IWL_MAX_ATTEMPTS="4") as worker:
        await eventually(lambda: worker.listener.state == "consuming", within=10, what="consuming")
        between.when_client_sends(runs(script), Do.CUT_ON_REPLY, times=2)
        await system.submit(*ids)
        worker.pause()
        await asyncio.sleep(0.05)
        worker.resume()
        await system.answered(ids)
        await system.drained()
    await system.conserved()
    assert len({str(event["id"]) for event in system.rest.billing.events}) == len(ids)
    assert await system.rest.redis.xlen(NAMES.dead_letters) == 0
