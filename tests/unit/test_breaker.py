"""A model that answers /health and fails everything is unhealthy too: the breaker on results, bug report B92."""

import asyncio
from typing import get_args

import pytest

from inference_worker.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker
from inference_worker.disposition import Concluded, Failed, Fault, Hold, Interrupted, Outcome, Superseded, Token
from inference_worker.errors import ModelSlow
from inference_worker.messages import ErrorCode, Reply
from tests.unit.worker_kit import FakeModel, Site, Worker, body, running
from tests.waiting import eventually

HOLD = Hold("a", Token("t"))


def reply(status_code: int, error_code: ErrorCode | None) -> Reply:
    return Reply(
        request_id="a",
        status="completed" if error_code is None else "failed",
        status_code=status_code,
        attempt=0,
        replica_id="r",
        finished_at=1.0,
        error_code=error_code,
    )


GOOD = Concluded(reply=reply(200, None), hold=HOLD)
REFUSED = Concluded(reply=reply(400, "model_error"), hold=HOLD)
BROKEN = Concluded(reply=reply(500, "model_error"), hold=HOLD)
CUT = Failed(fault=Fault.CUT, detail="", hold=HOLD, reply=reply(500, "retries_exhausted"))


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(CUT, id="a call that was cut"),
        pytest.param(BROKEN, id="a 5xx"),
        pytest.param(Concluded(reply=reply(502, "bad_response"), hold=HOLD), id="no answer at all"),
        pytest.param(
            Concluded(reply=reply(408, "deadline_exceeded"), hold=HOLD), id="a deadline that passed in the call"
        ),
    ],
)
def test_so_many_failures_in_a_row_open_it(failure: Outcome) -> None:
    breaker = Breaker(3)

    assert [breaker.saw(failure) for _ in range(3)] == [None, None, FIRST_PAUSE_S]
    assert breaker.state == "open"


@pytest.mark.parametrize("good", [GOOD, REFUSED], ids=["an answer", "a 4xx is an answer"])
def test_one_success_begins_the_count_anew(good: Outcome) -> None:
    breaker = Breaker(2)

    assert [breaker.saw(outcome) for outcome in (CUT, good, CUT)] == [None, None, None]
    assert breaker.state == "closed"


@pytest.mark.parametrize(
    "silent",
    [
        Superseded(),
        Interrupted(reason="stop"),
        Concluded(reply=reply(408, "expired"), hold=HOLD),
        Concluded(reply=reply(500, "poison"), hold=HOLD),
    ],
    ids=lambda outcome: type(outcome).__name__,
)
def test_what_says_nothing_of_the_model_is_not_counted(silent: Outcome) -> None:
    breaker = Breaker(2)

    assert [breaker.saw(outcome) for outcome in (CUT, silent, CUT)] == [None, None, FIRST_PAUSE_S]


def test_the_pause_doubles_with_each_try_that_fails_up_to_a_minute_and_begins_anew_after_a_success() -> None:
    breaker = Breaker(1)
    pauses = [breaker.saw(CUT)]
    for _ in range(5):
        breaker.try_again()
        pauses.append(breaker.saw(CUT))
    breaker.try_again()
    breaker.saw(GOOD)

    assert pauses == [5.0, 10.0, 20.0, 40.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert breaker.state == "closed"
    assert breaker.saw(CUT) == FIRST_PAUSE_S


def test_failures_of_calls_that_ran_when_it_opened_change_nothing() -> None:
    breaker = Breaker(1)
    breaker.saw(CUT)

    assert breaker.saw(CUT) is None
    assert breaker.state == "open"


def test_zero_never_opens_it() -> None:
    breaker = Breaker(0)

    assert [breaker.saw(CUT) for _ in range(100)] == [None] * 100


def test_every_error_code_is_judged_or_says_nothing() -> None:
    for code in get_args(ErrorCode):
        Breaker(1).saw(Concluded(reply=reply(500, code), hold=HOLD))


async def test_a_model_that_fails_everything_is_left_alone_then_tried_with_one_request_and_used_again() -> None:
    """Messages stay in the queue, with their retries left, instead of being burnt."""
    site = Site()
    model = FakeModel(takes_s=0.1)
    model.failures = [ModelSlow("no answer")] * 6  # Four open it, one was under way, and one is the first try.
    worker = Worker(site, model, slots=4, max_retries=9, breaker_failures=4)
    names = [f"r-{n}" for n in range(12)]
    await site.publish(*[body(name) for name in names])
    async with running(worker):
        await eventually(lambda: "breaker" in worker.listener.suspended, within=10, what="the pause", every=0.01)
        most_at_once, calls = model.most_at_once, len(model.calls)
        await asyncio.sleep(FIRST_PAUSE_S - 0.5)
        assert len(model.calls) == calls
        model.most_at_once = 0
        await eventually(lambda: worker.listener.breaker.state == "trying", within=10, what="the try", every=0.01)
        await eventually(lambda: worker.listener.breaker.state == "open", within=10, what="its failure", every=0.01)
        assert model.most_at_once == 1
        await eventually(lambda: worker.listener.breaker.state == "closed", within=30, what="a success", every=0.01)

        async def all_answered() -> bool:
            return all([await site.store.read(name) is not None for name in names])

        await eventually(all_answered, within=60, what="all answers", every=0.1)
        assert most_at_once == 4
        assert worker.listener.suspended == {}


async def test_a_try_that_takes_long_is_not_taken_for_a_dead_consumer() -> None:
    """With ready messages behind it, the connection was given up and opened again, every minute."""
    site = Site()
    model = FakeModel(takes_s=0.1)
    model.failures = [ModelSlow("no answer")] * 5
    worker = Worker(site, model, slots=4, max_retries=9, breaker_failures=4)
    await site.publish(*[body(f"r-{n}") for n in range(12)])
    async with running(worker):
        await eventually(lambda: "breaker" in worker.listener.suspended, within=10, what="the pause", every=0.01)
        await asyncio.sleep(1)
        model.takes_s = 110.0
        await asyncio.sleep(100)
        assert worker.listener.breaker.state == "trying"
        assert len(worker.connects) == 1


async def test_the_end_of_a_pause_that_was_cut_short_does_not_cut_the_next_one() -> None:
    site = Site()
    model = FakeModel(takes_s=1.0)
    worker = Worker(site, model, slots=4, breaker_failures=2, first_delay_s=20)
    loop, listener = asyncio.get_running_loop(), worker.listener

    async def fails(*names: str) -> None:
        model.takes_s, model.failures = 0.1, [ModelSlow("no answer")] * len(names)
        await site.publish(*[body(name) for name in names])
        await eventually(lambda: "breaker" in listener.suspended, within=10, what="the pause", every=0.01)

    await site.publish(body("old"))
    async with running(worker):
        await eventually(lambda: model.calls, within=10, what="the call that ends the pause", every=0.01)
        await fails("a", "b")
        await eventually(lambda: listener.breaker.state == "closed", within=3, what="its success", every=0.01)
        await asyncio.sleep(2)
        await fails("c", "d")
        begun = loop.time()
        await eventually(lambda: listener.breaker.state == "trying", within=10, what="the try", every=0.01)
        assert loop.time() - begun > FIRST_PAUSE_S - 0.1
