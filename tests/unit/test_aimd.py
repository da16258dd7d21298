"""The window that learns from answers. Source of the numbers: section 4.7 of the peer's rules, and cases 225 to 232."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.gates.aimd import LONGEST_CLOSE_S, Aimd, AimdRules, aimd
from inference_worker.gates.combined import WaitOnRefuse
from inference_worker.gates.feedback import feedback
from inference_worker.gates.parameters import Parameters
from inference_worker.gates.permits import POLL_S
from inference_worker.gates.waiting import outlast
from inference_worker.lanes import LANES
from inference_worker.ports import Admitted, Asked, Feedback, FeedbackKind, Parked, Permit, TurnedAway
from tests.unit.gate_kit import admitted, asked, at_once, release

TOP = asked("interactive", "reserved")
MIDDLE = asked("async", "reserved")
BOTTOM = asked("batch", "overflow")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(clock: Clock) -> Aimd:
    return Aimd(AimdRules(max_window=64.0), clock)


def window(gate: Aimd, request: Asked) -> float:
    name = f"{request.labels['classification']}-{request.labels['tier']}"
    return next(reading.window for reading in gate.readings() if reading.band == name)


def answer(gate: Aimd, request: Asked, kind: FeedbackKind, times: int = 1, **seen: object) -> None:
    """Requests one after the other, sent when they are admitted."""
    for _ in range(times):
        release(admitted(gate, request), kind, **seen)


def flight(gate: Aimd, request: Asked, size: int) -> list[tuple[Permit, ...]]:
    return [admitted(gate, request) for _ in range(size)]


def test_a_full_band_keeps_waiting_what_is_reserved_and_refuses_the_rest_case_225(gate: Aimd) -> None:
    admitted(gate, MIDDLE)
    admitted(gate, BOTTOM)

    waiting = at_once(gate.admit(MIDDLE))
    assert isinstance(waiting, Parked)
    assert waiting.changed is not None
    assert at_once(gate.admit(BOTTOM)) == TurnedAway()


def test_a_band_grows_by_one_an_acceptance_in_slow_start_and_then_by_one_a_window_case_225(gate: Aimd) -> None:
    answer(gate, MIDDLE, "accepted", 3)
    assert window(gate, MIDDLE) == 4

    answer(gate, MIDDLE, "capacity_rejected")
    assert window(gate, MIDDLE) == 2
    answer(gate, MIDDLE, "accepted")
    assert window(gate, MIDDLE) == pytest.approx(2.5)
    answer(gate, MIDDLE, "accepted")
    assert window(gate, MIDDLE) == pytest.approx(2.9)


def test_a_window_ends_at_its_bound_case_225(gate: Aimd) -> None:
    answer(gate, MIDDLE, "accepted", 200)

    assert window(gate, MIDDLE) == 64


def test_the_rejections_of_one_flight_count_once_case_226(gate: Aimd, clock: Clock) -> None:
    answer(gate, BOTTOM, "accepted", 15)
    first = flight(gate, BOTTOM, 5)
    clock.now += 1
    for held in first:
        release(held, "capacity_rejected", sent_at=clock.now - 1)
    assert window(gate, BOTTOM) == 8

    clock.now += 1
    answer(gate, BOTTOM, "capacity_rejected", sent_at=clock.now)
    assert window(gate, BOTTOM) == 4


def test_a_flight_is_told_apart_even_within_one_tick_of_the_clock_case_226(gate: Aimd) -> None:
    answer(gate, BOTTOM, "accepted", 15)
    for held in flight(gate, BOTTOM, 5):
        release(held, "capacity_rejected")
    assert window(gate, BOTTOM) == 8

    answer(gate, BOTTOM, "capacity_rejected")
    assert window(gate, BOTTOM) == 4


def test_an_acceptance_from_before_a_decrease_does_not_undo_it(gate: Aimd, clock: Clock) -> None:
    answer(gate, BOTTOM, "accepted", 7)
    old = admitted(gate, BOTTOM)
    clock.now += 1
    answer(gate, BOTTOM, "capacity_rejected")

    release(old, "accepted", sent_at=clock.now - 1)

    assert window(gate, BOTTOM) == 4


def test_a_rejection_below_holds_the_bands_above_for_a_while_case_228(gate: Aimd, clock: Clock) -> None:
    answer(gate, TOP, "accepted", 7)
    answer(gate, BOTTOM, "accepted", 7)
    answer(gate, BOTTOM, "capacity_rejected")
    assert (window(gate, TOP), window(gate, BOTTOM)) == (8, 4)

    answer(gate, TOP, "accepted", 3)
    assert window(gate, TOP) == 8
    clock.now += 1.01
    answer(gate, TOP, "accepted")
    assert window(gate, TOP) == 9


def test_an_acceptance_below_ends_the_hold_case_228(gate: Aimd) -> None:
    answer(gate, TOP, "accepted", 7)
    answer(gate, BOTTOM, "capacity_rejected")

    answer(gate, BOTTOM, "accepted")
    answer(gate, TOP, "accepted")

    assert window(gate, TOP) == 9


def test_an_acceptance_from_before_the_hold_does_not_end_it_case_228(gate: Aimd, clock: Clock) -> None:
    answer(gate, TOP, "accepted", 7)
    answer(gate, BOTTOM, "accepted", 3)
    old = admitted(gate, BOTTOM)
    clock.now += 0.1
    answer(gate, BOTTOM, "capacity_rejected")

    release(old, "accepted")
    answer(gate, TOP, "accepted")

    assert window(gate, TOP) == 8


def test_late_rejections_of_one_flight_do_not_prolong_the_hold_case_228(gate: Aimd, clock: Clock) -> None:
    answer(gate, TOP, "accepted", 7)
    answer(gate, BOTTOM, "accepted", 7)
    first, late = flight(gate, BOTTOM, 2)
    release(first, "capacity_rejected")
    clock.now += 0.6
    release(late, "capacity_rejected")

    clock.now += 0.5
    answer(gate, TOP, "accepted")

    assert window(gate, TOP) == 9


def test_a_rejection_above_shrinks_the_bands_below_case_229(gate: Aimd) -> None:
    answer(gate, BOTTOM, "accepted", 15)
    answer(gate, TOP, "accepted", 15)

    answer(gate, TOP, "capacity_rejected")

    assert (window(gate, TOP), window(gate, BOTTOM)) == (8, 8)


def test_an_order_to_wait_closes_the_bands_below_too_case_229(gate: Aimd, clock: Clock) -> None:
    answer(gate, BOTTOM, "accepted", 15)
    answer(gate, MIDDLE, "accepted", 15)

    answer(gate, MIDDLE, "capacity_rejected", retry_after_s=5.0)

    assert at_once(gate.admit(BOTTOM)) == TurnedAway()
    assert window(gate, BOTTOM) == 1
    assert admitted(gate, TOP), "those above stay open"
    waiting = at_once(gate.admit(MIDDLE))
    assert waiting == Parked(within_s=5.0)
    assert [reading.closed for reading in gate.readings()] == [False, True, True, True, True, True]
    clock.now += 5
    assert admitted(gate, BOTTOM)


def test_after_an_order_to_wait_a_band_opens_in_slow_start_case_230(gate: Aimd, clock: Clock) -> None:
    answer(gate, BOTTOM, "accepted", 15)
    answer(gate, BOTTOM, "capacity_rejected", retry_after_s=5.0)
    assert window(gate, BOTTOM) == 1
    assert gate.budget() == 0

    clock.now += 6
    answer(gate, BOTTOM, "accepted", 4)
    assert window(gate, BOTTOM) == 5
    answer(gate, BOTTOM, "accepted", 4)
    assert window(gate, BOTTOM) == pytest.approx(8 + 1 / 8), "half of 16, and slowly from there on"


def test_several_orders_of_one_flight_leave_the_threshold_alone_case_230(gate: Aimd) -> None:
    answer(gate, BOTTOM, "accepted", 15)
    for held in flight(gate, BOTTOM, 5):
        release(held, "capacity_rejected", retry_after_s=5.0)

    assert gate.readings()[5].ssthresh == 8


def test_an_odd_order_closes_for_a_bounded_time(gate: Aimd, clock: Clock) -> None:
    answer(gate, BOTTOM, "capacity_rejected", retry_after_s=86400.0)
    clock.now += LONGEST_CLOSE_S

    assert admitted(gate, BOTTOM)


def test_a_shorter_order_does_not_open_what_a_longer_one_closed(gate: Aimd, clock: Clock) -> None:
    first, second = admitted(gate, asked("async", "overflow")), admitted(gate, BOTTOM)
    release(first, "capacity_rejected", retry_after_s=60.0)
    release(second, "capacity_rejected", retry_after_s=1.0)
    clock.now += 30

    assert at_once(gate.admit(BOTTOM)) == TurnedAway()


def test_what_expires_in_the_gateways_queue_shrinks_gently_and_holds_case_230(gate: Aimd, clock: Clock) -> None:
    answer(gate, BOTTOM, "accepted", 9)
    answer(gate, TOP, "accepted", 7)

    answer(gate, BOTTOM, "ttl_expired")
    assert window(gate, BOTTOM) == 9
    answer(gate, TOP, "accepted")
    answer(gate, BOTTOM, "accepted")
    assert (window(gate, TOP), window(gate, BOTTOM)) == (8, 9)
    clock.now += 1.01
    answer(gate, TOP, "accepted")
    answer(gate, BOTTOM, "accepted")
    assert window(gate, TOP) == 9
    assert window(gate, BOTTOM) == pytest.approx(9 + 1 / 9)


@pytest.mark.parametrize("kind", ["evicted", "rejected", "error", "not_sent"])
def test_what_says_nothing_of_capacity_changes_nothing_case_230(gate: Aimd, kind: FeedbackKind) -> None:
    answer(gate, BOTTOM, "accepted", 7)

    answer(gate, BOTTOM, kind, retry_after_s=5.0)

    assert window(gate, BOTTOM) == 8
    assert gate.readings()[5].in_flight == 0


def test_the_room_that_a_gateway_names_caps_the_window(gate: Aimd) -> None:
    answer(gate, BOTTOM, "accepted", 31)
    held = flight(gate, BOTTOM, 3)

    release(held.pop(), "accepted", headers={"x-llm-d-flow-band-headroom": "4"})

    assert window(gate, BOTTOM) == 6
    release(held.pop(), "accepted")
    assert window(gate, BOTTOM) == pytest.approx(6 + 1 / 6)


@pytest.mark.parametrize("headroom", ["", "many", "-1", "nan", "inf"])
def test_a_room_that_is_no_number_is_none(gate: Aimd, headroom: str) -> None:
    answer(gate, BOTTOM, "accepted", 7)
    answer(gate, BOTTOM, "accepted", headers={"x-llm-d-flow-band-headroom": headroom})

    assert window(gate, BOTTOM) == 9


@pytest.mark.parametrize(("queued_ms", "left"), [("99", 9), ("100", 8), ("199.9", 8), ("200", 7.2), ("5000", 7.2)])
def test_waiting_at_the_gateway_is_the_first_sign_of_congestion(clock: Clock, queued_ms: str, left: float) -> None:
    gate = Aimd(AimdRules(queue_target_s=0.1), clock)
    answer(gate, BOTTOM, "accepted", 7)

    answer(gate, BOTTOM, "accepted", headers={"x-llm-d-flow-queue-duration-ms": queued_ms})

    assert window(gate, BOTTOM) == pytest.approx(left)


def test_waiting_at_the_gateway_counts_only_where_a_target_is_set(gate: Aimd) -> None:
    answer(gate, BOTTOM, "accepted", headers={"x-llm-d-flow-queue-duration-ms": "60000"})

    assert window(gate, BOTTOM) == 2


def test_the_smallest_window_always_tries(clock: Clock) -> None:
    gate = Aimd(AimdRules(min_window=2.0), clock)

    answer(gate, BOTTOM, "capacity_rejected", 20)

    assert window(gate, BOTTOM) == 2


def test_the_budget_is_the_free_part_of_the_bands_in_use(gate: Aimd) -> None:
    assert gate.budget() == 1
    held = admitted(gate, BOTTOM)
    assert gate.budget() == 0
    release(held, "error")
    answer(gate, BOTTOM, "accepted", 3)
    admitted(gate, BOTTOM)
    assert gate.budget() == 0.75


def test_a_part_of_a_place_is_none(gate: Aimd) -> None:
    answer(gate, BOTTOM, "accepted", 3)
    answer(gate, BOTTOM, "capacity_rejected")
    answer(gate, BOTTOM, "accepted")
    assert window(gate, BOTTOM) == 2.5

    flight(gate, BOTTOM, 2)

    assert at_once(gate.admit(BOTTOM)) == TurnedAway()


async def test_growth_wakes_as_many_as_there_is_room_for() -> None:
    gate = Aimd(AimdRules(), lambda: asyncio.get_running_loop().time())
    held = admitted(gate, TOP)
    waiting = [asyncio.create_task(outlast(gate, TOP, until=100.0, rng=random.Random(1))) for _ in range(5)]
    await asyncio.sleep(0.3)

    release(held, "accepted")
    await asyncio.sleep(0.001)

    assert sum(task.done() for task in waiting) == 2
    for task in waiting:
        verdict = await task
        assert isinstance(verdict, Admitted)
        release(verdict.permits, "accepted")
    assert asyncio.get_running_loop().time() < 0.31


def test_no_more_are_woken_than_there_is_room_for(gate: Aimd) -> None:
    held = admitted(gate, TOP)
    waiting = [at_once(gate.admit(TOP)) for _ in range(5)]

    release(held, "accepted")

    events = [verdict.changed for verdict in waiting if isinstance(verdict, Parked)]
    assert [event is not None and event.is_set() for event in events] == [True, True, False, False, False]


async def test_what_reads_answers_alone_has_nothing_to_keep_fresh(gate: Aimd) -> None:
    await gate.run(asyncio.Event())


def test_a_closed_band_cannot_tell_when_it_opens_and_an_open_one_can(gate: Aimd, clock: Clock) -> None:
    answer(gate, BOTTOM, "capacity_rejected", retry_after_s=5.0)
    assert not gate.signal(asyncio.Event(), BOTTOM)
    assert at_once(WaitOnRefuse(gate).admit(BOTTOM)) == Parked(within_s=POLL_S)

    clock.now += 5
    held = admitted(gate, BOTTOM)
    changed = asyncio.Event()
    assert gate.signal(changed, BOTTOM)
    release(held, "error")

    assert changed.is_set()


async def test_whoever_waits_for_a_closed_band_goes_on_when_it_opens() -> None:
    gate = Aimd(AimdRules(), lambda: asyncio.get_running_loop().time())
    release(admitted(gate, TOP), "capacity_rejected", retry_after_s=5.0)

    assert isinstance(await outlast(gate, TOP, until=100.0, rng=random.Random(1)), Admitted)
    assert 5 <= asyncio.get_running_loop().time() < 7


async def test_a_pool_of_unknown_size_is_kept_busy_and_seldom_refuses() -> None:
    """It holds 32 at once and answers 429 beyond; 100 requests always want to go."""
    loop = asyncio.get_running_loop()
    gate, rng = WaitOnRefuse(Aimd(AimdRules(), loop.time)), random.Random(5)
    running = served = refused = 0

    async def caller() -> None:
        nonlocal running, served, refused
        while loop.time() < 200:
            verdict = await outlast(gate, BOTTOM, until=1e9, rng=rng)
            assert isinstance(verdict, Admitted)
            sent_at = loop.time()
            if running >= 32:
                refused += 1
                await asyncio.sleep(0.005)
                seen = Feedback(kind="capacity_rejected", sent_at=sent_at)
            else:
                running += 1
                await asyncio.sleep(rng.uniform(0.5, 1.5))
                running -= 1
                served += 1
                seen = Feedback(kind="accepted", sent_at=sent_at)
            await verdict.permits[0].release(seen)

    async with asyncio.TaskGroup() as group:
        for _ in range(100):
            group.create_task(caller())

    assert served > 0.7 * 32 * 200
    assert refused < 0.05 * served


STEP = st.tuples(
    st.sampled_from(["admit", "release", "again", "pass"]),
    st.integers(0, 5),
    st.sampled_from(["accepted", "capacity_rejected", "ttl_expired", "evicted", "rejected", "error", "not_sent"]),
    st.sampled_from([None, 0.0, 0.5, 3.0]),
    st.sampled_from([None, "0", "3", "x"]),
)


@given(st.lists(STEP, max_size=120), st.floats(1, 4), st.floats(0.1, 0.95))
def test_no_order_of_answers_overshoots_a_window_or_loses_a_place(
    steps: list[tuple[str, int, FeedbackKind, float | None, str | None]], least: float, factor: float
) -> None:
    clock = Clock()
    gate = Aimd(AimdRules(min_window=least, max_window=16, decrease_factor=factor, queue_target_s=1), clock)
    held: list[tuple[int, tuple[Permit, ...]]] = []
    done: list[tuple[int, tuple[Permit, ...]]] = []
    for what, number, kind, retry_after_s, headroom in steps:
        headers = {} if headroom is None else {"x-llm-d-flow-band-headroom": headroom}
        seen = Feedback(kind=kind, sent_at=clock.now - number, retry_after_s=retry_after_s, headers=headers)
        classification, _, tier = LANES[number].partition("-")
        before = gate.readings()
        match what:
            case "admit":
                verdict = at_once(gate.admit(asked(tier, classification)))
                free = not before[number].closed and before[number].in_flight + 1 <= before[number].window
                assert isinstance(verdict, Admitted) is free
                if isinstance(verdict, Admitted):
                    held.append((number, verdict.permits))
                else:
                    assert isinstance(verdict, Parked) is (classification == "reserved")
            case "release" if held:
                done.append(held.pop(number % len(held)))
                at_once(done[-1][1][0].release(seen))
            case "again" if done:
                at_once(done[number % len(done)][1][0].release(seen))
                assert gate.readings() == before
            case _:
                clock.now += number / 2

        for place, reading in enumerate(gate.readings()):
            assert reading.in_flight == sum(number == place for number, _ in held)
            assert least <= reading.window <= 16
            assert least <= reading.ssthresh <= 16
    assert 0 <= gate.budget() <= 1


def test_its_parameters_have_defaults_and_names() -> None:
    params = Parameters({"min_window": "2", "max_window": 8, "hold_duration": "250ms", "pool": "p"}, "gate_params")
    gate = aimd(params, lambda: 0.0)

    assert not params.problems
    assert gate.readings()[0].window == 2
    assert gate.closes_at() == "2 to 8 requests in flight a band, as the model's answers allow"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_window", 0.5),
        ("max_window", 0),
        ("increase", 0),
        ("decrease_factor", 1),
        ("decrease_factor", 0),
        ("hold_duration", "-1s"),
        ("queue_duration_target", 5),
        ("window", 5),
    ],
)
def test_a_parameter_out_of_bounds_is_a_problem(name: str, value: object) -> None:
    params = Parameters({name: value}, "gate_params")
    aimd(params, lambda: 0.0)

    assert len(params.problems) == 1
    assert params.problems[0].startswith(f"gate_params.{name}: ")


def test_windows_in_the_wrong_order_are_a_problem() -> None:
    params = Parameters({"min_window": 9, "max_window": 8}, "gate_params")
    aimd(params, lambda: 0.0)

    assert params.problems == ["gate_params.max_window: is 8; accepted: a number of at least min_window, 9"]


@pytest.mark.parametrize(
    ("status_code", "reason", "kind"),
    [
        (200, None, "accepted"),
        (201, None, "accepted"),
        (302, None, "accepted"),
        (429, None, "capacity_rejected"),
        (429, "rejected-saturated", "capacity_rejected"),
        (503, "rejected-saturated", "capacity_rejected"),
        (429, "rejected-ttl-expired", "ttl_expired"),
        (503, "Rejected-TTL-Expired", "ttl_expired"),
        (429, "evicted", "evicted"),
        (503, "evicted-preempted", "evicted"),
        (503, "rejected-no-endpoints", "rejected"),
        (429, "rejected-context-cancelled", "rejected"),
        (429, "something-new", "rejected"),
        (500, None, "error"),
        (503, None, "error"),
        (400, None, "rejected"),
        (None, None, "error"),
    ],
)
def test_an_answer_says_what_it_means_for_capacity(
    status_code: int | None, reason: str | None, kind: FeedbackKind
) -> None:
    headers = {"X-Other": "1"} if reason is None else {"X-LLM-D-Request-Dropped-Reason": reason}

    seen = feedback(status_code, headers, sent_at=5.0, retry_after_s=2.0, input_tokens=3)

    assert (seen.kind, seen.sent_at, seen.retry_after_s, seen.input_tokens) == (kind, 5.0, 2.0, 3)
    assert all(name == name.lower() for name in seen.headers)
