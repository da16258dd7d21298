"""How many replicas are wanted: what the three ways of counting say, and when a wish goes up, down, or stays."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.scaling import Capacity, Held, Load, Policy, Recommendation, recommend

NOW = 1_700_000_000.0
POLICY = Policy(least=1, most=10, down_after_s=30.0)
FOUR_SLOTS = Capacity(replicas=2, slots_per_replica=4, service_s=2.0)
NOTHING = Load(ready=0, in_flight=0)


def asked(
    load: Load | None,
    capacity: Capacity | None = FOUR_SLOTS,
    policy: Policy = POLICY,
    previous: Held | None = None,
    now: float = NOW,
) -> Recommendation:
    answer = recommend(load, capacity, policy, previous, now)
    assert answer is not None
    return answer


# ---------------------------------------------------------------- how many


@pytest.mark.parametrize(
    ("load", "wanted"),
    [
        pytest.param(NOTHING, 0, id="nothing waits"),
        pytest.param(Load(ready=1, in_flight=0), 1, id="one request wants one replica"),
        pytest.param(Load(ready=4, in_flight=0), 1, id="as many as there are slots"),
        pytest.param(Load(ready=5, in_flight=0), 2, id="one more than there are slots"),
        pytest.param(Load(ready=0, in_flight=5), 2, id="what runs counts as much as what waits"),
        pytest.param(Load(ready=0, in_flight=0, delayed=5), 2, id="retries that come back soon count too"),
        pytest.param(Load(ready=3, in_flight=3, delayed=3), 3, id="all of it together"),
    ],
)
def test_by_load_there_is_a_slot_for_each_request(load: Load, wanted: int) -> None:
    assert asked(load).by_load == wanted


def test_a_target_of_ones_own_takes_the_place_of_the_slots() -> None:
    answer = asked(Load(ready=139, in_flight=0), policy=replace(POLICY, per_replica=32))

    assert (answer.by_load, answer.target_per_replica, answer.reason) == (5, 32, "by_load")


def test_by_wait_everything_is_done_within_the_target() -> None:
    """Four slots at 2 s each do 2 a second, 120 a minute."""
    answer = asked(Load(ready=241, in_flight=0), policy=replace(POLICY, per_replica=1000))

    assert (answer.by_wait, answer.raw, answer.reason) == (3, 3, "by_wait")


def test_by_deadline_what_is_due_first_counts() -> None:
    """20 due in 4 s want 20 / (4 x 2); 40 more due in a minute want less."""
    deadlines = [NOW + 4.0] * 20 + [NOW + 60.0] * 40

    answer = asked(Load(ready=60, in_flight=0, deadlines=deadlines), policy=replace(POLICY, per_replica=1000))

    assert (answer.by_deadline, answer.raw, answer.reason) == (3, 3, "by_deadline")


def test_a_later_deadline_has_the_work_of_the_earlier_ones_before_it() -> None:
    deadlines = [NOW + 10.0] * 20 + [NOW + 12.0] * 60

    answer = asked(Load(ready=80, in_flight=0, deadlines=deadlines), policy=replace(POLICY, per_replica=1000))

    assert answer.by_deadline == 4  # 80 / (12 x 2), not 60 / (12 x 2)


def test_a_deadline_that_nobody_can_meet_is_not_chased() -> None:
    """A request takes 2 s: what is due in 1 s is lost, however many replicas there are."""
    hopeless = Load(ready=100, in_flight=0, deadlines=[NOW - 5.0] * 50 + [NOW + 1.0] * 50)

    answer = asked(hopeless, policy=replace(POLICY, per_replica=1000))

    assert (answer.by_deadline, answer.raw) == (0, 1)


def test_more_slots_than_requests_are_never_wanted() -> None:
    """Requests of ten minutes cannot all be done in one, and a second slot for each makes none of them faster."""
    slow = Capacity(replicas=1, slots_per_replica=1, service_s=600.0)

    answer = asked(Load(ready=3, in_flight=0, deadlines=[NOW + 601.0] * 3), slow, replace(POLICY, per_replica=10))

    assert (answer.by_load, answer.by_wait, answer.by_deadline) == (1, 3, 3)


def test_without_a_measured_rate_only_the_load_counts() -> None:
    answer = asked(Load(ready=9, in_flight=0, deadlines=[NOW + 1.0]), replace(FOUR_SLOTS, service_s=None))

    assert (answer.by_wait, answer.by_deadline, answer.raw) == (None, None, 3)


@pytest.mark.parametrize(
    ("load", "policy", "raw", "reason"),
    [
        pytest.param(NOTHING, POLICY, 1, "minimum", id="never fewer than SCALE_MIN"),
        pytest.param(NOTHING, replace(POLICY, least=0), 0, "nothing_to_do", id="none, where none is allowed"),
        pytest.param(Load(ready=999, in_flight=0), POLICY, 10, "maximum", id="never more than SCALE_MAX"),
    ],
)
def test_the_bounds_hold(load: Load, policy: Policy, raw: int, reason: str) -> None:
    answer = asked(load, policy=policy, previous=Held(replicas=0))

    assert (answer.raw, answer.reason) == (raw, reason)


@pytest.mark.parametrize(
    ("load", "capacity"),
    [
        pytest.param(None, FOUR_SLOTS, id="the queue was not seen"),
        pytest.param(NOTHING, None, id="the workers were not seen"),
        pytest.param(Load(ready=-1, in_flight=0), FOUR_SLOTS, id="fewer than none wait"),
        pytest.param(NOTHING, replace(FOUR_SLOTS, slots_per_replica=0), id="replicas without slots"),
        pytest.param(NOTHING, replace(FOUR_SLOTS, service_s=float("nan")), id="a time that is no number"),
        pytest.param(NOTHING, replace(FOUR_SLOTS, service_s=-1.0), id="a time below 0"),
        pytest.param(Load(ready=1, in_flight=0, deadlines=[float("inf")]), FOUR_SLOTS, id="a deadline that never is"),
    ],
)
def test_what_cannot_be_is_no_reason_to_decide(load: Load | None, capacity: Capacity | None) -> None:
    assert recommend(load, capacity, POLICY, Held(replicas=5), NOW) is None


# ---------------------------------------------------------------- when


def test_the_wish_goes_up_at_once() -> None:
    assert asked(Load(ready=40, in_flight=0), previous=Held(replicas=1)).stabilised == 10


def test_the_wish_goes_down_when_fewer_have_been_enough_for_long_enough() -> None:
    first = asked(NOTHING, previous=Held(replicas=5))
    later = asked(NOTHING, previous=first.held, now=NOW + 29.9)
    at_last = asked(NOTHING, previous=later.held, now=NOW + 30.0)

    assert [(one.stabilised, one.reason) for one in (first, later, at_last)] == [
        (5, "cooling_down"),
        (5, "cooling_down"),
        (1, "minimum"),
    ]


def test_a_need_in_between_begins_the_time_anew() -> None:
    first = asked(NOTHING, previous=Held(replicas=5))
    needed = asked(Load(ready=20, in_flight=0), previous=first.held, now=NOW + 20.0)
    later = asked(NOTHING, previous=needed.held, now=NOW + 31.0)

    assert (later.stabilised, later.held.lower_since) == (5, NOW + 31.0)


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(Load(ready=0, in_flight=1), id="one is in flight"),
        pytest.param(Load(ready=1, in_flight=0), id="one waits"),
        pytest.param(Load(ready=0, in_flight=0, delayed=1), id="one comes back soon"),
    ],
)
def test_the_wish_does_not_go_down_while_work_is_pending(load: Load) -> None:
    answer = asked(load, previous=Held(replicas=5, lower_since=NOW - 999.0, peak=1))

    assert (answer.stabilised, answer.reason) == (5, "work_pending")


def test_a_few_that_wait_do_not_hold_it_where_that_is_allowed() -> None:
    held = Held(replicas=5, lower_since=NOW - 999.0, peak=1)

    answer = asked(Load(ready=3, in_flight=0), policy=replace(POLICY, down_lag=3), previous=held)

    assert answer.stabilised == 1


def test_the_wish_goes_down_to_what_was_needed_lately_and_later_on() -> None:
    held = Held(replicas=8, lower_since=NOW - 30.0, peak=3)

    first = asked(NOTHING, previous=held)
    last = asked(NOTHING, previous=first.held, now=NOW + 30.0)

    assert (first.stabilised, last.stabilised) == (3, 1)


def test_at_the_very_first_what_runs_is_held_on_to() -> None:
    """Else a scaler that starts would take away replicas that are at work."""
    assert asked(NOTHING, replace(FOUR_SLOTS, replicas=6)).stabilised == 6


def test_a_wish_from_before_is_cut_to_bounds_that_have_changed() -> None:
    assert asked(NOTHING, policy=replace(POLICY, most=3), previous=Held(replicas=9)).stabilised == 3


def test_a_clock_that_was_set_back_does_not_hold_the_wish_for_ever() -> None:
    ahead = Held(replicas=5, lower_since=NOW + 3600.0, peak=1)

    first = asked(NOTHING, previous=ahead)

    assert asked(NOTHING, previous=first.held, now=NOW + 30.0).stabilised == 1


# ---------------------------------------------------------------- whatever comes

counts = st.integers(min_value=0, max_value=5000)
loads = st.builds(
    Load,
    ready=counts,
    in_flight=counts,
    delayed=counts,
    deadlines=st.lists(st.floats(min_value=NOW - 10, max_value=NOW + 5000), max_size=20),
)
capacities = st.builds(
    Capacity,
    replicas=st.integers(min_value=0, max_value=50),
    slots_per_replica=st.integers(min_value=1, max_value=64),
    service_s=st.none() | st.floats(min_value=0.0, max_value=900.0),
)
policies = st.builds(
    lambda bounds, **rest: Policy(least=min(bounds), most=max(bounds), **rest),
    bounds=st.tuples(st.integers(min_value=0, max_value=40), st.integers(min_value=0, max_value=40)),
    per_replica=st.integers(min_value=0, max_value=100),
    down_lag=st.integers(min_value=0, max_value=20),
    down_after_s=st.floats(min_value=0.1, max_value=60.0),
)


@given(load=loads, capacity=capacities, policy=policies, before=st.none() | counts)
def test_whatever_comes_the_bounds_hold_and_what_is_needed_is_wanted(
    load: Load, capacity: Capacity, policy: Policy, before: int | None
) -> None:
    answer = asked(load, capacity, policy, None if before is None else Held(replicas=before))

    assert policy.least <= answer.raw <= answer.stabilised <= policy.most


@given(load=loads, more=counts, capacity=capacities, policy=policies, where=st.sampled_from(["ready", "in_flight"]))
def test_more_work_never_wants_fewer(load: Load, more: int, capacity: Capacity, policy: Policy, where: str) -> None:
    heavier = replace(load, **{where: getattr(load, where) + more})

    assert asked(heavier, capacity, policy).raw >= asked(load, capacity, policy).raw


@given(load=loads, deadline=st.floats(min_value=NOW, max_value=NOW + 5000), capacity=capacities, policy=policies)
def test_one_more_deadline_never_wants_fewer(load: Load, deadline: float, capacity: Capacity, policy: Policy) -> None:
    with_it = replace(load, deadlines=[*load.deadlines, deadline])

    assert (asked(with_it, capacity, policy).by_deadline or 0) >= (asked(load, capacity, policy).by_deadline or 0)


steps = st.lists(
    st.tuples(
        st.floats(min_value=0.1, max_value=20.0),
        st.one_of(st.just(0), st.integers(min_value=0, max_value=60)),
        st.one_of(st.just(0), st.integers(min_value=0, max_value=8)),
    ),
    min_size=1,
    max_size=60,
)


@given(steps=steps, policy=policies)
def test_a_wish_goes_down_only_at_rest_and_after_its_time_so_that_it_never_flaps(
    steps: Sequence[tuple[float, int, int]], policy: Policy
) -> None:
    now, held, wish = NOW, Held(replicas=policy.most), policy.most
    raws: list[tuple[float, int]] = []

    for after_s, ready, in_flight in steps:
        now += after_s
        answer = asked(Load(ready=ready, in_flight=in_flight), FOUR_SLOTS, policy, held, now)
        raws.append((now, answer.raw))
        if answer.stabilised < wish:
            assert in_flight == 0
            assert ready <= policy.down_lag
            lately = [(at, raw) for at, raw in raws if at > now - policy.down_after_s]
            assert raws[0][0] <= now - policy.down_after_s
            assert max(raw for _, raw in lately) <= answer.stabilised
        held, wish = answer.held, answer.stabilised
