"""In which order requests of several queues go to a pool, for every order in which they come."""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.lanes import LANES, lane_by_labels, lane_of
from inference_worker.merge import MergePolicy, RandomRobin, TierAging, TierPriority

LABELS = [tuple(name.split("-")) for name in LANES]
"""Of each lane: classification, tier."""

Item = tuple[int, str, int]
"""A lane, a queue, and its number in both."""
Make = Callable[[int], MergePolicy[Item]]

POLICIES: list[Make] = [
    lambda bound: RandomRobin(random.Random(1), per_source=bound),
    lambda bound: TierPriority(per_lane=bound),
    lambda bound: TierAging(per_lane=bound, patience=7),
]
every_policy = pytest.mark.parametrize("make", POLICIES, ids=["random-robin", "tier-priority", "tier-aging"])


def put(policy: MergePolicy[Item], lane: int, source: str, number: int = 0) -> bool:
    classification, tier = LABELS[lane]
    return policy.put((lane, source, number), source, tier, classification)


def drained(policy: MergePolicy[Item]) -> list[Item]:
    items = []
    while (item := policy.pop()) is not None:
        items.append(item)
    return items


@pytest.mark.parametrize(
    ("tier", "classification", "lane"),
    [
        ("interactive", "reserved", 0),
        ("async", "reserved", 1),
        ("batch", "reserved", 2),
        ("odd", "reserved", 2),
        (None, "reserved", 2),
        ("interactive", "overflow", 3),
        ("interactive", None, 3),
        ("async", "", 4),
        ("batch", "odd", 5),
        (None, None, 5),
    ],
)
def test_a_request_has_one_of_six_lanes(tier: str | None, classification: str | None, lane: int) -> None:
    assert lane_of(tier, classification) == lane
    labels = {"rank": tier, "classification": classification}
    assert lane_by_labels({name: text for name, text in labels.items() if text is not None}, "rank") == lane


PUT = st.tuples(st.just("put"), st.integers(0, 5), st.sampled_from("abc"))
STEPS = st.lists(
    st.one_of(
        PUT, PUT, st.tuples(st.just("pop"), st.just(0), st.just("")), st.tuples(st.just("pop"), st.just(0), st.just(""))
    ),
    max_size=150,
)


@every_policy
@given(steps=STEPS, bound=st.integers(1, 6), gone=st.sampled_from("abc"))
def test_nothing_is_lost_doubled_or_overtaken_inside_its_queue_and_lane_case_236(
    make: Make, steps: list[tuple[str, int, str]], bound: int, gone: str
) -> None:
    policy = make(bound)
    expected: dict[tuple[int, str], deque[Item]] = defaultdict(deque)
    numbers: Counter[tuple[int, str]] = Counter()

    def came(item: Item | None) -> None:
        assert item is not None
        assert item == expected[item[:2]].popleft()

    for what, lane, source in steps:
        waiting = sum(map(len, expected.values()))
        if what == "put":
            room = policy.room(source, lane)
            item = (lane, source, numbers[lane, source])
            assert put(policy, *item) is (room > 0)
            if room > 0:
                expected[lane, source].append(item)
                numbers[lane, source] += 1
        elif waiting:
            came(policy.pop())
        else:
            assert policy.pop() is None
        assert len(policy) == sum(policy.sizes()) == sum(map(len, expected.values()))

    for item in policy.remove(gone):
        assert item[1] == gone
        came(item)
    assert not any(items for (_, source), items in expected.items() if source == gone)
    for item in drained(policy):
        came(item)
    assert not any(expected.values())
    assert len(policy) == 0


@every_policy
@given(steps=STEPS, bound=st.integers(1, 6))
def test_what_waits_is_bounded_whatever_comes(make: Make, steps: list[tuple[str, int, str]], bound: int) -> None:
    policy = make(bound)
    for what, lane, source in steps:
        if what == "put":
            put(policy, lane, source)
        else:
            policy.pop()
        # A lane, or a queue, has its bound, and room for one of each of three queues.
        assert all(size <= (bound + 2 if len(policy.sizes()) == 6 else 3 * bound) for size in policy.sizes())


@every_policy
def test_messages_of_all_queues_arrive_and_nothing_comes_of_none_case_233(make: Make) -> None:
    policy = make(10)
    assert policy.pop() is None
    for source in "abc":
        assert put(policy, 5, source)

    assert {item[1] for item in drained(policy)} == {"a", "b", "c"}
    assert policy.pop() is None


@every_policy
def test_a_queue_that_goes_leaves_the_others_as_they_are_case_233(make: Make) -> None:
    policy = make(10)
    for number in range(3):
        for source in "abc":
            put(policy, 4, source, number)

    assert policy.remove("b") == [(4, "b", 0), (4, "b", 1), (4, "b", 2)]
    assert policy.remove("b") == []
    left = drained(policy)
    assert [item for item in left if item[1] == "a"] == [(4, "a", 0), (4, "a", 1), (4, "a", 2)]
    assert len(left) == 6


# ---------------------------------------------------------------- random-robin


def test_queues_that_have_something_are_drawn_alike() -> None:
    policy: RandomRobin[Item] = RandomRobin(random.Random(7), per_source=1000)
    for number in range(1000):
        for source in "abc":
            put(policy, 5, source, number)

    drawn = Counter(item[1] for item in (policy.pop() for _ in range(900)) if item is not None)

    assert all(250 <= drawn[source] <= 350 for source in "abc")


def test_the_same_chance_draws_the_same_order() -> None:
    orders = []
    for _ in range(2):
        policy: RandomRobin[Item] = RandomRobin(random.Random(3))
        for number in range(5):
            for source in "abc":
                put(policy, 5, source, number)
        orders.append(drained(policy))

    assert orders[0] == orders[1]


def test_a_full_queue_leaves_the_room_of_another() -> None:
    policy: RandomRobin[Item] = RandomRobin(random.Random(3), per_source=1)
    assert put(policy, 5, "a")

    assert not put(policy, 0, "a")
    assert (policy.room("a", 5), policy.room("b", 5)) == (0, 1)
    assert put(policy, 5, "b")


# ---------------------------------------------------------------- tier-priority


def test_the_lanes_go_in_their_order_case_238() -> None:
    policy: TierPriority[Item] = TierPriority()
    for lane in (5, 0, 1, 3):
        put(policy, lane, "a")

    assert [item[0] for item in drained(policy)] == [0, 1, 3, 5]


def test_the_queues_of_a_lane_take_turns_case_240() -> None:
    policy: TierPriority[str] = TierPriority()
    for item in ("a1", "a2", "b1", "b2"):
        policy.put(item, item[0], "batch", "overflow")

    assert [policy.pop() for _ in range(4)] == ["a1", "b1", "a2", "b2"]
    assert not policy._lanes[5]._waiting, "empty queues are forgotten"


def test_a_full_lane_blocks_no_other_case_241() -> None:
    policy: TierPriority[Item] = TierPriority(per_lane=1)
    assert put(policy, 5, "a", 0)
    assert not put(policy, 5, "a", 1)

    assert put(policy, 0, "a", 0)

    assert [item[0] for item in drained(policy)] == [0, 5]


def test_a_queue_that_floods_a_lane_keeps_no_other_from_its_turn() -> None:
    policy: TierPriority[Item] = TierPriority(per_lane=100)
    while put(policy, 5, "flood"):
        pass

    assert policy.room("flood", 5) == 0
    assert policy.room("small", 5) == 1
    assert put(policy, 5, "small")
    assert [item[1] for item in (policy.pop(), policy.pop()) if item is not None] == ["flood", "small"]


def test_what_is_reserved_overtakes_a_backlog_with_one_worker_case_245() -> None:
    """Two of the backlog were taken before anything reserved came: one runs, one is on its way."""
    policy: TierPriority[Item] = TierPriority()
    for number in range(20):
        put(policy, 5, "overflow", number)
    done = [policy.pop(), policy.pop()]
    for number in range(5):
        put(policy, 2, "reserved", number)

    done += drained(policy)

    assert [item[0] for item in done[:7] if item is not None].count(2) == 5
    assert done[-1] == (5, "overflow", 19)


@given(STEPS)
def test_the_lowest_lane_that_has_something_is_always_next(steps: list[tuple[str, int, str]]) -> None:
    policy: TierPriority[Item] = TierPriority(per_lane=4)
    for what, lane, source in steps:
        if what == "put":
            put(policy, lane, source)
            continue
        first = next((lane for lane, size in enumerate(policy.sizes()) if size), None)
        item = policy.pop()
        assert (None if item is None else item[0]) == first


@pytest.mark.parametrize("make", POLICIES[1:], ids=["tier-priority", "tier-aging"])
@given(steps=STEPS)
def test_no_queue_has_two_turns_of_a_lane_while_another_waits(make: Make, steps: list[tuple[str, int, str]]) -> None:
    policy = make(5)
    waiting: Counter[tuple[int, str]] = Counter()
    passed: Counter[tuple[int, str, str]] = Counter()
    for what, lane, source in steps:
        if what == "put":
            waiting[lane, source] += put(policy, lane, source)
        elif (item := policy.pop()) is not None:
            waiting[item[:2]] -= 1
            for other in "abc":
                passed[item[0], item[1], other] = 0
                if other != item[1] and waiting[item[0], other]:
                    passed[item[0], other, item[1]] += 1
                    assert passed[item[0], other, item[1]] <= 1


def test_a_low_lane_starves_under_strict_priority_case_347() -> None:
    """Why there is a third policy."""
    policy: TierPriority[Item] = TierPriority()
    put(policy, 5, "batch")
    for number in range(10_000):
        put(policy, 0, "chat", number)
        item = policy.pop()
        assert item is not None
        assert item[0] == 0


# ---------------------------------------------------------------- tier-aging


@given(STEPS, st.integers(1, 12), st.lists(st.integers(1, 12), min_size=6, max_size=6))
def test_no_lane_that_has_work_is_passed_over_for_longer_than_its_bound_case_347(
    steps: list[tuple[str, int, str]], patience: int, own: list[int]
) -> None:
    """For every order of comings and goings, and whatever the lanes' own patience is."""
    policy: TierAging[Item] = TierAging(per_lane=3, patience=patience, by_lane=dict(zip(LANES[::2], own, strict=False)))
    bounds = [own[lane // 2] if lane % 2 == 0 else patience for lane in range(6)]
    since = [0] * 6
    for what, lane, source in [*steps, *([("pop", 0, "")] * 200)]:
        if what == "put":
            put(policy, lane, source)
            continue
        before = policy.sizes()
        item = policy.pop()
        for number in range(6):
            passed_over = before[number] > 0 and (item is None or item[0] != number)
            since[number] = since[number] + 1 if passed_over else 0
            assert since[number] <= bounds[number] + len(LANES) - 1


@given(st.integers(1, 40), st.sets(st.integers(0, 5), min_size=1))
def test_under_a_flood_of_every_lane_each_item_is_out_within_its_place_times_the_bound_case_347(
    patience: int, flooded: set[int]
) -> None:
    """All flooded lanes stay full for ever, of two queues each: the tenth item of a queue has the twentieth turn."""
    policy: TierAging[Item] = TierAging(per_lane=20, patience=patience)
    numbers: Counter[tuple[int, str]] = Counter()

    def fill() -> None:
        for lane in flooded:
            for source in "ab":
                while policy.room(source, lane) > 0 and numbers[lane, source] - out[lane, source] < 10:
                    put(policy, lane, source, numbers[lane, source])
                    numbers[lane, source] += 1

    out: Counter[tuple[int, str]] = Counter()
    fill()
    left = {(lane, source, 9) for lane in flooded for source in "ab"}
    for _ in range(20 * (patience + len(LANES))):
        item = policy.pop()
        assert item is not None
        out[item[:2]] += 1
        left.discard(item)
        fill()
    assert not left


def test_the_first_lane_keeps_most_of_the_starts() -> None:
    policy: TierAging[Item] = TierAging()
    started: Counter[int] = Counter()
    for _ in range(3200):
        for lane in range(6):
            put(policy, lane, "a")
        item = policy.pop()
        assert item is not None
        started[item[0]] += 1

    assert started[0] > 0.8 * 3200
    assert all(started[lane] >= 3200 // (32 + 6) for lane in range(1, 6))


def test_a_lane_alone_has_all_starts_and_an_old_debt_is_forgotten_with_it() -> None:
    policy: TierAging[Item] = TierAging(patience=3)
    put(policy, 5, "a")
    for _ in range(2):
        put(policy, 0, "b")
        policy.pop()
    policy.remove("a")
    put(policy, 5, "a", 1)
    for number in range(3):
        put(policy, 0, "b", number)

    assert [item[0] for item in drained(policy)] == [0, 0, 0, 5]


def test_a_lane_that_was_overdue_when_its_queue_went_is_not_popped_while_empty() -> None:
    policy: TierAging[Item] = TierAging(patience=1)
    put(policy, 5, "a")
    put(policy, 0, "b", 0)
    put(policy, 0, "b", 1)
    policy.pop()
    policy.remove("a")

    assert drained(policy) == [(0, "b", 1)]


def test_without_pressure_the_order_is_strict() -> None:
    strict: TierPriority[Item] = TierPriority()
    aging: TierAging[Item] = TierAging(patience=32)
    policies: list[MergePolicy[Item]] = [strict, aging]
    for policy in policies:
        for lane in (5, 3, 0, 4, 1, 2):
            for number in range(5):
                put(policy, lane, "a", number)

    assert drained(aging) == drained(strict)


def test_the_gaps_between_a_lanes_turns_are_even() -> None:
    policy: TierAging[Item] = TierAging(patience=10)
    turns = []
    for start in range(500):
        for lane in (0, 5):
            put(policy, lane, "a")
        item = policy.pop()
        assert item is not None
        if item[0] == 5:
            turns.append(start)

    assert {later - earlier for earlier, later in pairwise(turns)} == {11}
