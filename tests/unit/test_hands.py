"""How much is read, what is handed up, and what goes back: the bookkeeping of one session."""

import asyncio

from inference_worker.ports import Delivery
from inference_worker.transports.hands import (
    LONGEST_AHEAD_S,
    LOOKED_BACK,
    MOST_BYTES,
    SHORT_S,
    Appetite,
    Hands,
    Receipt,
    receipt_of,
)


def delivery(name: str, *, read_at: float = 0.0, count: int = 1, size_bytes: int = 0) -> Delivery:
    return Delivery(
        body=b"",
        attempts=0,
        queue="s",
        message_id=name,
        redelivered=False,
        receipt=Receipt(entry_id=name, count=count, fields=(), read_at=read_at, size_bytes=size_bytes),
        lost=asyncio.Event(),
    )


def hands(limit: int, *, jobs_last_s: float | None = None) -> Hands:
    made = Hands()
    made.limit = limit
    if jobs_last_s is not None:
        done(made, jobs_last_s)
    return made


def done(made: Hands, lasts_s: float, times: int = LOOKED_BACK) -> None:
    for _ in range(times):
        made.put(delivery("done"))
        made.let_go(made.hand_up(0.0), lasts_s)


def fill(made: Hands, *names: str, read_at: float = 0.0) -> None:
    for name in names:
        made.put(delivery(name, read_at=read_at))


def names(deliveries: list[Delivery]) -> list[str | None]:
    return [one.message_id for one in deliveries]


def test_before_a_job_was_seen_to_end_nothing_is_read_ahead() -> None:
    made = hands(2)
    assert made.wanted == 2
    fill(made, "a", "b")

    assert made.wanted == 0


def test_short_jobs_are_read_ahead_for_as_many_again() -> None:
    made = hands(4, jobs_last_s=0.005)

    assert made.wanted == 8


def test_long_jobs_are_not_read_ahead_for() -> None:
    made = hands(4, jobs_last_s=SHORT_S)

    assert made.wanted == 4


def test_one_long_job_among_short_ones_ends_reading_ahead_until_short_ones_outweigh_it() -> None:
    made = hands(2, jobs_last_s=0.005)
    done(made, 10.0, times=1)
    assert made.wanted == 2
    done(made, 0.005)

    assert made.wanted == 4


def test_what_is_read_ahead_is_fetched_by_halves() -> None:
    """Not one entry and one round trip for each job that ends."""
    made = hands(4, jobs_last_s=0.005)
    fill(made, *"abcdefgh")
    held = [made.hand_up(0.0) for _ in range(4)]
    wanted = []
    for one in held:
        made.let_go(one, 0.005)
        made.hand_up(0.0)
        wanted.append(made.wanted)

    assert wanted == [0, 2, 3, 4]


def test_no_more_is_handed_up_than_the_limit() -> None:
    made = hands(2, jobs_last_s=0.005)
    fill(made, *"abc")
    first = made.hand_up(0.0)
    made.hand_up(0.0)
    assert not made.free
    made.let_go(first, 0.005)

    assert made.free
    assert made.hand_up(0.0).message_id == "c"


def test_what_cannot_be_handed_up_for_long_goes_back_the_latest_first_and_no_more_is_read_ahead() -> None:
    made = hands(1, jobs_last_s=0.005)
    fill(made, "a", "b")
    made.hand_up(0.0)

    assert made.take_back(LONGEST_AHEAD_S * 0.99) == []
    assert names(made.take_back(LONGEST_AHEAD_S)) == ["b"]
    assert made.wanted == 0
    assert not made.jobs_are_short


def test_what_can_be_handed_up_stays_however_long_it_lies() -> None:
    made = hands(2)
    fill(made, "a", "b")

    assert made.take_back(1000.0) == []


def test_a_smaller_limit_has_the_surplus_given_back_at_once() -> None:
    made = hands(4)
    fill(made, *"abcd")
    made.hand_up(0.0)
    made.limit = 2

    assert names(made.take_back()) == ["c", "d"]
    made.limit = 0
    assert names(made.take_back()) == ["b"]
    assert made.wanted == 0


def test_what_is_lost_is_told_and_frees_its_place() -> None:
    made = hands(2)
    fill(made, "a", "b", "c")
    first = made.hand_up(0.0)
    made.drop("a", 1)
    made.drop("c", 1)

    assert first.lost.is_set()
    assert not made.holds(first)
    assert [receipt.entry_id for receipt in made.everything()] == ["b"]


def test_news_of_an_earlier_delivery_is_no_news_of_this_one() -> None:
    made = hands(1)
    made.put(delivery("a", count=3))
    held = made.hand_up(0.0)
    made.drop("a", 1)

    assert made.holds(held)
    assert not held.lost.is_set()


def test_an_entry_that_is_read_again_stays_one_delivery() -> None:
    made = hands(2)
    fill(made, "a")
    held = made.hand_up(0.0)
    made.put(delivery("a", count=4))

    assert not made.free
    assert receipt_of(held).count == 4
    assert made.holds(held)


def test_another_delivery_of_an_entry_is_not_held() -> None:
    made = hands(1)
    fill(made, "a")
    made.hand_up(0.0)

    assert not made.holds(delivery("a"))


def test_when_the_session_is_over_nothing_is_ours() -> None:
    made = hands(2)
    fill(made, "a", "b")
    held = made.hand_up(0.0)
    made.lose_all()

    assert held.lost.is_set()
    assert not made.everything()
    assert not made.free


def test_what_lies_read_ahead_is_bounded_in_bytes() -> None:
    """Whatever the limit: what is handed up is counted by the listener, and what is not is by nobody else."""
    made = hands(1000)
    made.put(delivery("a", size_bytes=MOST_BYTES))
    made.put(delivery("b", size_bytes=1))
    assert made.wanted == 0
    made.hand_up(0.0)

    assert made.wanted == 998
    made.put(delivery("c", size_bytes=MOST_BYTES))
    made.drop("c", 1)
    assert made.wanted == 998
    made.put(delivery("d", size_bytes=MOST_BYTES))
    made.lose_all()
    assert made.wanted == 1000


def test_of_large_entries_few_are_asked_for_in_one_go() -> None:
    appetite = Appetite()
    at_first = appetite.portion(1000)
    appetite.saw([10, MOST_BYTES // 4, 10])

    assert at_first == 32
    assert appetite.portion(1000) == 4
    assert appetite.portion(3) == 3
    appetite.saw([MOST_BYTES * 20])
    assert appetite.portion(1000) == 1
    assert appetite.portion(0) == 0


def test_once_entries_are_small_again_more_are_asked_for_step_by_step() -> None:
    appetite = Appetite()
    appetite.saw([MOST_BYTES])
    portions = []
    for _ in range(6):
        appetite.saw([100])
        appetite.saw([])
        portions.append(appetite.portion(1000))

    assert portions == [2, 4, 8, 16, 32, 32]
