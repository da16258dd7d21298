"""Gates that need no neighbour, and how those that wait for one are woken."""

import asyncio
import gc
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.gates.basic import (
    Constant,
    ConstantDecision,
    DeadlineDrop,
    Decision,
    GatingMode,
    LocalMaxConcurrency,
    LocalRateLimit,
    constant,
    constant_decision,
    deadline_drop,
    local_max_concurrency,
    local_rate_limit,
)
from inference_worker.gates.parameters import Parameters
from inference_worker.gates.permits import ASK_AGAIN_S, Line, signal_of
from inference_worker.gates.waiting import outlast
from inference_worker.ports import Admitted, Dropped, Feedback, Gate, Parked, Permit, TurnedAway, Verdict
from tests.unit.gate_kit import Told, admitted, asked, at_once, release

RNG = random.Random(1)


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def test_the_constant_gate_is_open() -> None:
    gate = Constant()

    assert at_once(gate.admit(asked())) == Admitted()
    assert (gate.budget(), gate.closes_at()) == (1.0, "never")


@pytest.mark.parametrize(
    ("decision", "verdict", "budget"),
    [
        ("continue", Admitted(), 1.0),
        ("wait", Parked(within_s=ASK_AGAIN_S), 0.0),
        ("refuse", TurnedAway(), 0.0),
        (
            "drop",
            Dropped(status_code=None, error_code="GATE_DROPPED", error="the gate drops every request"),
            1.0,
        ),
    ],
)
def test_a_constant_decision_is_the_same_for_all(decision: Decision, verdict: Verdict, budget: float) -> None:
    gate = ConstantDecision(decision)

    assert [at_once(gate.admit(asked())) for _ in range(2)] == [verdict, verdict]
    assert gate.budget() == budget


@pytest.mark.parametrize(("now", "dropped"), [(99.0, False), (100.0, False), (100.001, True)])
def test_what_is_past_its_deadline_is_dropped(now: float, dropped: bool) -> None:
    verdict = at_once(DeadlineDrop(lambda: now).admit(asked(deadline=100.0)))

    assert isinstance(verdict, Dropped) is dropped
    if isinstance(verdict, Dropped):
        assert (verdict.status_code, verdict.error_code) == (None, "DEADLINE_EXCEEDED")


def test_a_full_gate_refuses_until_something_is_given_back_case_212() -> None:
    gate = LocalMaxConcurrency(2)
    first, _second = admitted(gate, asked()), admitted(gate, asked())

    assert at_once(gate.admit(asked())) == TurnedAway()
    assert gate.budget() == 0
    release(first)
    assert gate.budget() == 0.5
    assert admitted(gate, asked())


async def test_of_a_hundred_at_once_exactly_the_limit_goes_on_case_212() -> None:
    gate = LocalMaxConcurrency(50)

    verdicts = await asyncio.gather(*(gate.admit(asked()) for _ in range(100)))

    let_in = [verdict for verdict in verdicts if isinstance(verdict, Admitted)]
    assert len(let_in) == 50
    for verdict in let_in:
        release(verdict.permits)
    assert gate.budget() == 1


@pytest.mark.parametrize("limit", [0, -3])
@pytest.mark.parametrize("mode", ["blocking", "classifying"])
def test_a_limit_of_nothing_refuses_case_212(limit: int, mode: GatingMode) -> None:
    gate = LocalMaxConcurrency(limit, mode)

    assert at_once(gate.admit(asked())) == TurnedAway()
    assert gate.budget() == 0


@given(st.lists(st.integers(0, 9)), st.integers(1, 4))
def test_a_slot_is_given_back_once_however_often_its_permit_is_released(order: list[int], limit: int) -> None:
    gate = LocalMaxConcurrency(limit)
    held: list[tuple[Permit, ...]] = []
    released: list[tuple[Permit, ...]] = []
    for step in order:
        if step < 5:
            verdict = at_once(gate.admit(asked()))
            assert isinstance(verdict, Admitted) is (len(held) < limit)
            if isinstance(verdict, Admitted):
                held.append(verdict.permits)
        elif step < 8 and held:
            released.append(held.pop())
            release(released[-1])
        elif released:
            release(released[step % len(released)])

        assert gate.budget() == pytest.approx(1 - len(held) / limit)


async def test_a_blocking_gate_keeps_waiting_until_a_slot_is_free_case_213() -> None:
    gate = LocalMaxConcurrency(1, "blocking")
    first = admitted(gate, asked())

    waiting = asyncio.create_task(outlast(gate, asked(), until=100.0, rng=RNG))
    await asyncio.sleep(30)
    assert not waiting.done()
    release(first)
    released_at = loop_time()

    assert isinstance(await waiting, Admitted)
    assert loop_time() == released_at


async def test_who_stops_waiting_takes_no_slot_case_213() -> None:
    gate = LocalMaxConcurrency(1, "blocking")
    first = admitted(gate, asked())
    waiting = asyncio.create_task(outlast(gate, asked(), until=100.0, rng=RNG))
    await asyncio.sleep(1)

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release(first)

    assert gate.budget() == 1


async def test_who_is_cancelled_in_the_turn_in_which_it_is_woken_takes_no_slot() -> None:
    gate = LocalMaxConcurrency(1, "blocking")
    first = admitted(gate, asked())
    waiting = [asyncio.create_task(outlast(gate, asked(), until=100.0, rng=RNG)) for _ in range(2)]
    await asyncio.sleep(0.01)

    release(first)
    waiting[0].cancel()
    await asyncio.wait(waiting)

    assert waiting[0].cancelled()
    assert isinstance(waiting[1].result(), Admitted)
    assert loop_time() < ASK_AGAIN_S + 0.1


async def test_those_that_wait_go_on_in_their_order_and_one_for_each_slot() -> None:
    gate = LocalMaxConcurrency(1, "blocking")
    held = admitted(gate, asked())
    order: list[int] = []
    asks = 0

    async def wait(number: int) -> tuple[Permit, ...]:
        nonlocal asks
        while True:
            asks += 1
            verdict = await gate.admit(asked())
            if isinstance(verdict, Admitted):
                order.append(number)
                return verdict.permits
            assert isinstance(verdict, Parked)
            assert verdict.changed is not None
            await verdict.changed.wait()

    tasks = [asyncio.create_task(wait(number)) for number in range(5)]
    await asyncio.sleep(0)
    for task in tasks:
        release(held)
        held = await task

    assert order == [0, 1, 2, 3, 4]
    assert asks == 10, "only who can go on is woken"


def test_who_has_gone_away_is_passed_over_in_the_line() -> None:
    line = Line()
    gone, stays = line.join(), line.join()
    del gone
    gc.collect()

    line.wake(1)

    assert stays.is_set()


def test_a_line_does_not_grow_by_those_who_have_left() -> None:
    line = Line()
    stays = [line.join() for _ in range(10)]
    for _ in range(10_000):
        line.join()

    assert len(line._waiting) <= 128
    line.wake(10)
    assert all(event.is_set() for event in stays)


async def test_a_bucket_lets_its_burst_through_and_then_its_rate() -> None:
    gate = LocalRateLimit(60, 3, loop_time)
    times = []

    for _ in range(6):
        assert isinstance(await outlast(gate, asked(), until=1e9, rng=RNG), Admitted)
        times.append(loop_time())

    assert times == pytest.approx([0, 0, 0, 1, 2, 3], abs=0.05)


async def test_those_that_wait_for_tokens_get_one_each_in_their_order() -> None:
    gate = LocalRateLimit(600, 1, loop_time)
    admitted(gate, asked())
    times: list[float] = []

    async def wait() -> None:
        assert isinstance(await outlast(gate, asked(), until=1e9, rng=RNG), Admitted)
        times.append(loop_time())

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(wait())

    assert times == pytest.approx([0.1 * (turn + 1) for turn in range(8)], abs=0.06)


async def test_a_token_that_was_not_used_goes_back() -> None:
    gate = LocalRateLimit(60, 1, loop_time)
    release(admitted(gate, asked()), "not_sent")
    assert gate.budget() == 1

    release(admitted(gate, asked()), "accepted")

    assert gate.budget() == 0
    assert isinstance(await gate.admit(asked()), Parked)
    await asyncio.sleep(1)
    assert gate.budget() == 1


@given(st.lists(st.floats(0, 20), max_size=60), st.integers(1, 600), st.integers(1, 5))
def test_no_order_of_questions_gets_more_than_burst_and_rate(pauses: list[float], rate: int, burst: int) -> None:
    now = 0.0
    gate = LocalRateLimit(rate, burst, lambda: now)
    loop = asyncio.new_event_loop()
    let_in = 0

    async def ask() -> None:
        nonlocal let_in
        let_in += isinstance(await gate.admit(asked()), Admitted)

    try:
        for pause in pauses:
            now += pause
            loop.run_until_complete(ask())
            assert let_in <= burst + now * rate / 60 + 1e-6
    finally:
        loop.close()


async def test_a_wait_at_a_queue_is_a_wait() -> None:
    """The original goes on as if it had been told to continue."""
    gate = Told(Parked(within_s=0.1), Parked(within_s=0.1), Parked(within_s=0.1), Admitted())

    assert await outlast(gate, asked(), until=100.0, rng=RNG) == Admitted()
    assert gate.asks == 4
    assert 0.35 <= loop_time() <= 0.7


async def test_pauses_double_up_to_a_second_and_end_at_the_time_limit() -> None:
    gate = Told(Parked(within_s=0.1))

    verdict = await outlast(gate, asked(), until=60.0, rng=RNG)

    assert verdict == Parked(within_s=0.1)
    assert loop_time() == pytest.approx(60.0)
    assert 60 <= gate.asks <= 125


async def test_a_longer_pause_that_the_gate_names_is_kept() -> None:
    gate = Told(Parked(within_s=30.0), Admitted())

    assert await outlast(gate, asked(), until=100.0, rng=RNG) == Admitted()
    assert 15 <= loop_time() <= 30


@pytest.mark.parametrize("verdict", [TurnedAway(), Dropped(status_code=429, error_code="X", error="")], ids=repr)
async def test_any_other_verdict_stands_at_once(verdict: Verdict) -> None:
    assert await outlast(Told(verdict), asked(), until=100.0, rng=RNG) == verdict
    assert loop_time() == 0


def test_gates_are_made_of_their_parameters() -> None:
    def of(**given: object) -> Parameters:
        return Parameters(given, "gate_params", problems)

    problems: list[str] = []
    gates: list[Gate] = [
        constant(of()),
        constant_decision(of(decision="refuse")),
        local_max_concurrency(of(limit="2", gating_mode="blocking")),
        local_rate_limit(of(requests_per_minute="90", burst=2), lambda: 0.0),
        deadline_drop(of(), lambda: 0.0),
    ]

    assert not problems
    assert [gate.closes_at() for gate in gates] == [
        "never",
        "always: refuse",
        "2 requests in flight in this process",
        "90 requests a minute in this process, 2 at once",
        "never; it drops what is past its deadline",
    ]


@pytest.mark.parametrize("limit", [None, "x", 0, -1, 1.5], ids=repr)
def test_a_limit_that_is_none_is_a_problem(limit: object) -> None:
    params = Parameters({"limit": limit, "gating_mode": "maybe", "more": 1}, "gate_params")
    local_max_concurrency(params)

    assert len(params.problems) == 3


async def test_gates_without_readings_have_nothing_to_keep_fresh() -> None:
    gates: list[Gate] = [
        Constant(),
        ConstantDecision("wait"),
        LocalMaxConcurrency(1),
        LocalRateLimit(1, 1, loop_time),
        DeadlineDrop(lambda: 0.0),
    ]
    for gate in gates:
        assert 0 <= gate.budget() <= 1
        await gate.run(asyncio.Event())


async def test_a_gate_tells_those_that_others_keep_waiting() -> None:
    slots, rate = LocalMaxConcurrency(1), LocalRateLimit(60, 1, loop_time)
    held = admitted(slots, asked())
    admitted(rate, asked())
    by_slot, by_token = signal_of((slots,), asked()), signal_of((rate,), asked())
    assert by_slot is not None
    assert by_token is not None

    await by_token.wait()
    assert loop_time() == pytest.approx(1.0, abs=0.05)
    assert not by_slot.is_set()
    await held[0].release(Feedback(kind="error"))
    assert by_slot.is_set()
    assert signal_of((Constant(),), asked()) is None
