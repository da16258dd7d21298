"""Waiting: until told to stop, for the first of several, past a cancellation; and a bound on bytes."""

import asyncio

import pytest

from inference_worker.timing import ByteBudget, ended, first_of, quietly, stopped_within


def loop_time() -> float:
    return asyncio.get_running_loop().time()


async def test_a_pause_lasts_its_time_when_nobody_says_stop() -> None:
    assert not await stopped_within(asyncio.Event(), 7.0)
    assert loop_time() == pytest.approx(7.0)


async def test_a_pause_ends_with_the_event() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(2.0, event.set)

    assert await stopped_within(event, 7.0)
    assert loop_time() == pytest.approx(2.0)


async def test_an_event_that_is_set_already_costs_no_time() -> None:
    event = asyncio.Event()
    event.set()

    assert await stopped_within(event, 7.0)
    await first_of(asyncio.Event(), event, within_s=7.0)

    assert loop_time() == 0.0


@pytest.mark.parametrize("which", [0, 1])
async def test_the_first_of_several_events_ends_the_wait(which: int) -> None:
    events = (asyncio.Event(), asyncio.Event())
    asyncio.get_running_loop().call_later(2.0, events[which].set)

    await first_of(*events, within_s=7.0)

    assert loop_time() == pytest.approx(2.0)


async def test_waiting_for_several_ends_with_its_time() -> None:
    await first_of(asyncio.Event(), asyncio.Event(), within_s=7.0)

    assert loop_time() == pytest.approx(7.0)


async def test_a_cancelled_wait_for_several_leaves_no_task() -> None:
    waiting = asyncio.create_task(first_of(asyncio.Event(), asyncio.Event()))
    await asyncio.sleep(0)

    await ended(waiting)

    assert waiting.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()} | {
        task for task in asyncio.all_tasks() if "_task_watch" in repr(task)
    }


@pytest.mark.parametrize("error", [None, ValueError("no")])
async def test_an_ended_task_has_ended_whatever_it_ends_with(error: Exception | None) -> None:
    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(1)
            if error is not None:
                raise error

    task = asyncio.create_task(work())
    await asyncio.sleep(0)

    await ended(task)

    assert task.done()
    assert loop_time() == 1.0


@pytest.mark.parametrize(
    ("takes_s", "error", "done"),
    [
        pytest.param(1.0, None, True, id="what ends in time is done"),
        pytest.param(5.0, None, False, id="what takes too long is given up"),
        pytest.param(1.0, ValueError("no"), False, id="an expected error is swallowed"),
    ],
)
async def test_a_courtesy_never_holds_anybody_up(takes_s: float, error: Exception | None, done: bool) -> None:
    async def work() -> None:
        await asyncio.sleep(takes_s)
        if error is not None:
            raise error

    assert await quietly(work(), 2.0, ValueError) is done
    assert loop_time() == min(takes_s, 2.0)


async def test_an_error_that_nobody_expected_is_not_swallowed() -> None:
    async def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await quietly(work(), 2.0, KeyError)


class TestByteBudget:
    """A bound on bytes; one holder at a time may go beyond it."""

    async def test_it_is_full_at_its_limit(self) -> None:
        budget = ByteBudget(10)
        budget.add(9)
        assert not budget.full

        budget.add(1)

        assert budget.full

    async def test_what_fits_is_counted_at_once(self) -> None:
        budget = ByteBudget(10)
        await budget.acquire("a", 10)
        assert budget.held_bytes == 10

        budget.release("a", 4)

        assert budget.held_bytes == 6

    async def test_one_holder_may_go_beyond_it_and_the_next_waits(self) -> None:
        """Without the one, half-read answers would wait for each other's bytes for ever."""
        budget = ByteBudget(10)
        await budget.acquire("a", 8)
        await budget.acquire("b", 8)
        await budget.acquire("b", 8)
        waiting = asyncio.create_task(budget.acquire("c", 1))
        await asyncio.sleep(1)
        assert not waiting.done()

        budget.release("a", 8)
        await asyncio.sleep(1)
        assert not waiting.done()  # There is no room yet, and b is beyond.
        budget.release("b", 16)
        await waiting

        assert budget.held_bytes == 1

    async def test_whoever_waited_may_be_the_next_to_go_beyond(self) -> None:
        budget = ByteBudget(10)
        await budget.acquire("a", 20)
        waiting = [asyncio.create_task(budget.acquire(name, 20)) for name in ("b", "c")]
        await asyncio.sleep(1)

        budget.release("a", 20)
        await asyncio.sleep(1)

        assert [task.done() for task in waiting] == [True, False]
        budget.release("b", 20)
        await waiting[1]
