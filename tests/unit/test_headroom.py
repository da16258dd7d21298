"""How many of ours may be in flight: no reading, however late, lets ours alone go over the threshold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_worker.gates.headroom import Headroom, Measured, OwnLoad, OwnLoads


def headroom(own: OwnLoad, threshold: float = 0.8, sharers: int = 1, chance: float = 0.0) -> Headroom:
    return Headroom(own, threshold=threshold, sharers=lambda: sharers, chance=lambda: chance)


def filled(room: Headroom, own: OwnLoad, now: float) -> int:
    count = 0
    while room.admits() and count < 10_000:
        own.took(now)
        count += 1
    return count


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["read", "take", "take many", "end", "end many"]),
        st.floats(0.0, 5.0),
        st.floats(0.0, 60.0),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, capacity=st.integers(1, 200), threshold=st.floats(0.05, 1.0), told=st.booleans())
def test_ours_alone_never_go_over_the_threshold(
    steps: list[tuple[str, float, float]], capacity: int, threshold: float, told: bool
) -> None:
    """Whatever the order of readings, admissions and ends, however late each reading, whether it says so or not."""
    own, now = OwnLoad(remembered_s=100), 0.0
    room = headroom(own, threshold)
    past: list[tuple[float, int]] = [(-1e9, 0)]
    for what, later_s, lag_s in steps:
        now += later_s
        match what:
            case "read":
                count = next(count for at, count in reversed(past) if at <= now - lag_s)
                at = now - lag_s if told else now
                room.see(Measured(load=count / capacity, at=at, capacity=capacity))
            case "take" if room.admits():
                own.took(now)
            case "take many":
                filled(room, own, now)
            case "end" if own.in_flight:
                own.gave_back(now, None)
            case "end many":
                for _ in range(own.in_flight // 2):
                    own.gave_back(now, None)
            case _:
                pass
        past.append((now, own.in_flight))

        assert own.in_flight <= max(threshold * capacity, 1) + 1e-6
        assert 0 <= room.budget() <= 1


def test_a_request_that_replaces_a_finished_one_changes_nothing() -> None:
    own = OwnLoad(remembered_s=60)
    room = headroom(own)
    room.see(Measured(load=0.5, at=0, capacity=100))
    assert filled(room, own, 1) == 30

    own.gave_back(2, None)

    assert room.admits()
    own.took(3)
    assert not room.admits()


def test_what_was_admitted_after_the_measurement_is_added_to_it() -> None:
    own = OwnLoad(remembered_s=60)
    room = headroom(own)
    for now in range(10):
        own.took(float(now))

    room.see(Measured(load=0.5, at=4.5, capacity=100))

    assert filled(room, own, 10) == 30 - 5
    assert room.budget() == pytest.approx(0)


def test_what_waits_in_memory_before_it_is_sent_is_not_taken_for_a_part_of_the_reading() -> None:
    own = OwnLoad(remembered_s=60)
    room = headroom(own)
    for _ in range(200):
        own.took(0)
        own.gave_back(0, 5.0)
    for now in range(10):
        own.took(10.0 + now)

    room.see(Measured(load=0.5, at=20.0, capacity=100))

    assert own.sent_after_s == pytest.approx(5.0)
    assert filled(room, own, 20) == 30 - 4  # Those of the last five seconds are not in it.


def test_a_load_over_the_threshold_opens_again_when_enough_of_ours_have_ended() -> None:
    own = OwnLoad(remembered_s=60)
    room = headroom(own)
    for _ in range(20):
        own.took(0)
    room.see(Measured(load=0.85, at=1, capacity=100))

    ended = 0
    while not room.admits():
        own.gave_back(2, None)
        ended += 1

    assert ended == 6  # 5 too many, and one to make room.


def test_a_pool_without_capacity_takes_nothing() -> None:
    room = headroom(own := OwnLoad(remembered_s=60))

    room.see(Measured(load=0, at=0, capacity=0))

    assert (filled(room, own, 0), room.budget()) == (0, 0)


def test_without_a_reading_there_is_no_room() -> None:
    room = headroom(OwnLoad(remembered_s=60))

    assert (room.admits(), room.budget()) == (False, 0)


@pytest.mark.parametrize(("chance", "share"), [(0.0, 14), (0.33, 14), (0.34, 13)])
def test_a_share_is_rounded_by_chance_so_that_all_of_them_take_the_right_number(chance: float, share: int) -> None:
    room = headroom(own := OwnLoad(remembered_s=60), sharers=6, chance=chance)

    room.see(Measured(load=0, at=0, capacity=100))

    assert filled(room, own, 0) == share  # 80 / 6 = 13.33


def test_where_nobody_names_a_capacity_the_first_step_is_one_request() -> None:
    room = headroom(own := OwnLoad(remembered_s=60))

    room.see(Measured(load=0.1, at=0))

    assert filled(room, own, 1) == 1


def test_a_learned_capacity_takes_all_of_the_load_to_be_ours_at_most() -> None:
    """So that what others hold makes it careful, never bold."""
    room = headroom(own := OwnLoad(remembered_s=60))
    for reading in range(4):
        room.see(Measured(load=0.2 + own.in_flight / 100, at=reading * 5.0))
        filled(room, own, reading * 5.0 + 1)

    assert 4 <= own.in_flight <= 60


def test_a_capacity_that_shrinks_is_noticed_with_the_next_reading() -> None:
    room = headroom(own := OwnLoad(remembered_s=60))
    for reading in range(12):
        room.see(Measured(load=own.in_flight / 100, at=reading * 5.0))
        filled(room, own, reading * 5.0 + 1)
    before = own.in_flight

    room.see(Measured(load=own.in_flight / 50, at=60.0))
    while not room.admits():
        own.gave_back(61.0, None)

    assert 70 <= before <= 80
    assert own.in_flight < 45


def test_a_wrong_lesson_is_forgotten() -> None:
    """Others grew while a step was taken: the request was blamed for it, and must be tried again all the same."""
    room = headroom(own := OwnLoad(remembered_s=60))
    room.see(Measured(load=0.1, at=0))
    filled(room, own, 1)
    room.see(Measured(load=0.7, at=5))
    assert filled(room, own, 6) == 0

    taken = 0
    for reading in range(2, 60):
        room.see(Measured(load=0.7 + (own.in_flight - 1) / 100, at=reading * 5.0))
        taken += filled(room, own, reading * 5.0 + 1)

    assert 7 <= taken <= 11


def test_history_is_bounded() -> None:
    own = OwnLoad(remembered_s=10)
    for step in range(100_000):
        own.took(step / 1000)

    assert len(own._steps) <= 10 / 0.05 + 2
    assert own.sent_by(95.0) == pytest.approx(95_000, abs=60)
    assert own.fewest_between(95.0, 97.0) == pytest.approx(95_000, abs=60)


def test_what_ends_makes_room_in_the_budget_too_where_the_load_stood_at_the_threshold() -> None:
    """Else a queue whose gate is looked at before anything is taken stays closed while requests end."""
    own = OwnLoad(remembered_s=60)
    room = headroom(own)
    room.see(Measured(load=0.0, at=0))
    own.took(1)
    room.see(Measured(load=0.8, at=2))
    assert (room.admits(), room.budget()) == (False, 0)

    own.gave_back(3, None)

    assert room.admits()
    assert room.budget() > 0


def test_gates_that_look_at_the_same_count_together_unless_one_request_passes_both() -> None:
    loads = OwnLoads()

    before_a_queue = loads.of("queue", 1, "load of p", 60)

    assert loads.of("queue", 1, "load of p", 90) is before_a_queue
    assert loads.of("queue", 2, "load of p", 60) is not before_a_queue
    assert loads.of("pool", 1, "load of p", 60) is not before_a_queue
    assert loads.of("queue", 1, "load of q", 60) is not before_a_queue
