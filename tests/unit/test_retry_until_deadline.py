"""The engine under both rules of retrying: so many times, and until the deadline.

Names end in the number of the peer's case. What a delay is made of stands in `test_llmd_retry.py`.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.disposition import (
    Ack,
    Concluded,
    DeadLetter,
    Failed,
    Fault,
    Hold,
    Outcome,
    Republish,
    RetryPolicy,
    Token,
    decide,
)
from inference_worker.errors import BadResponse, ModelCut, ModelFailure, ModelGone, ModelSlow
from inference_worker.llmd_results import HttpAnswer, NoAnswer, outcome_of
from inference_worker.llmd_retry import StatusTable, UntilDeadline, status_table
from inference_worker.message_processor import Job
from inference_worker.messages import InferenceRequest, Reply
from inference_worker.ports import Answer, Route
from inference_worker.retry_ladder import LADDER_S
from tests.unit.test_disposition import TABLE, jitters
from tests.unit.worker_kit import EPOCH, FakeModel, Site, Worker, body, running
from tests.waiting import eventually

HOLD = Hold("a", Token("t"))
BOUNDED = RetryPolicy(max_retries=2)
UNTIL = UntilDeadline()
REASON = "x-llm-d-request-dropped-reason"
ROUTE = Route(base_url="http://gateway/base", path="/v1/completions", headers={"X-Pool": "gpu"})
BUSY = b'{"error": {"message": "busy", "code": 7}}'
TABLE_OF_STATUSES = StatusTable()
RETRIED = TABLE_OF_STATUSES.judged("retry")


def failed(status_code: int | None = None, retry_after_s: float | None = None, fault: Fault = Fault.GONE) -> Failed:
    reply = Reply(
        request_id="a",
        status="failed",
        status_code=500,
        attempt=0,
        replica_id="r",
        finished_at=1.0,
        error="tried",
        error_code="retries_exhausted",
        answer=None if status_code is None else b"busy",
    )
    return Failed(fault=fault, detail="", hold=HOLD, reply=reply, retry_after_s=retry_after_s, status_code=status_code)


# ---------------------------------------------------------------- decide


@pytest.mark.parametrize(("outcome", "attempts"), [row.values[:2] for row in TABLE], ids=[row.id for row in TABLE])
def test_only_what_becomes_of_a_failure_that_may_pass_depends_on_the_rule(outcome: Outcome, attempts: int) -> None:
    if not isinstance(outcome, Failed):
        bounded = decide(outcome, attempts, BOUNDED, left_s=60, jitter=0.5)
        assert decide(outcome, attempts, UNTIL, left_s=60, jitter=0.5) == bounded


@pytest.mark.parametrize(
    ("attempts", "left_s", "bounded", "until"),
    [
        pytest.param(0, 600, Republish, Republish, id="the first failure"),
        pytest.param(1, 600, Republish, Republish, id="the last retry of a bounded number"),
        pytest.param(2, 600, DeadLetter, Republish, id="no retry left of a bounded number"),
        pytest.param(5000, 600, DeadLetter, Republish, id="any number of failures"),
        pytest.param(0, 0, Republish, Ack, id="its time is over just now"),
        pytest.param(0, -5, Republish, Ack, id="its time is over"),
        pytest.param(5000, -5, DeadLetter, Ack, id="its time is over after many failures"),
    ],
)
def test_a_failure_that_may_pass_under_each_rule(
    attempts: int, left_s: float, bounded: type[object], until: type[object]
) -> None:
    """A bounded number leaves the deadline to the next delivery, which answers it as expired."""
    assert isinstance(decide(failed(), attempts, BOUNDED, left_s=left_s, jitter=0.5), bounded)
    assert isinstance(decide(failed(), attempts, UNTIL, left_s=left_s, jitter=0.5), until)


@pytest.mark.parametrize("fault", list(Fault))
def test_no_connection_a_cut_answer_and_a_slow_one_are_tried_again_case_250(fault: Fault) -> None:
    decided = decide(failed(fault=fault), 0, UNTIL, left_s=600, jitter=0.0)

    assert decided == Republish(delay_s=2.0, attempts=1, left_s=600, claim=HOLD)


@pytest.mark.parametrize("left_s", [-3600.0, -0.001, 0.0])
def test_without_an_answer_a_request_whose_time_is_over_ends_with_that_case_252(left_s: float) -> None:
    decided = decide(failed(), 3, UNTIL, left_s=left_s, jitter=0.5)

    assert isinstance(decided, Ack)
    assert decided.claim == HOLD
    assert decided.reply is not None
    assert (decided.reply.status_code, decided.reply.error_code) == (408, "deadline_exceeded")
    assert outcome_of(decided.reply) == NoAnswer(code="DEADLINE_EXCEEDED", text="tried")


@pytest.mark.parametrize(("left_s", "again"), [(0.25, True), (0.249, False), (0.0, False)])
def test_just_before_a_deadline_that_many_share_there_are_no_more_tries(left_s: float, again: bool) -> None:
    decided = decide(failed(503), 3, UNTIL, left_s=left_s, jitter=0.5)

    assert isinstance(decided, Republish) is again
    if isinstance(decided, Republish):
        assert decided.delay_s == 0.25


def test_after_a_429_a_request_whose_time_is_over_ends_with_that_429_case_253() -> None:
    decided = decide(failed(429), 3, UNTIL, left_s=0.0, jitter=0.5)

    assert isinstance(decided, Ack)
    assert decided.reply is not None
    assert outcome_of(decided.reply) == HttpAnswer(status_code=429, body=b"busy")


@given(st.integers(0, 10**6), st.floats(0.25, 10**6), jitters)
def test_a_retry_counts_one_more_and_waits_within_the_ladder_case_254(n: int, left_s: float, jitter: float) -> None:
    decided = decide(failed(), n, UNTIL, left_s=left_s, jitter=jitter)

    assert isinstance(decided, Republish)
    whole = min(2.0 * 2.0 ** min(n + 1, 60), 60.0, left_s)
    assert decided.attempts == n + 1
    assert whole / 2 <= decided.delay_s <= whole


@pytest.mark.parametrize(
    ("asked_s", "attempts", "left_s", "least", "below"),
    [
        pytest.param(30.0, 0, 100, 30, 37.5, id="what is asked and up to a quarter more"),
        pytest.param(1.0, 5, 100, 30, 60, id="less than the backoff changes nothing"),
        pytest.param(30.0, 0, 5, 2.5, 5, id="another try fits"),
        pytest.param(300.0, 0, 40, 20, 25, id="at most 62.5 % of what is left"),
        pytest.param(0.0, 0, 100, 2, 4, id="nothing is asked"),
    ],
)
def test_a_retry_after_is_a_floor_that_leaves_time_for_another_try_case_257(
    asked_s: float, attempts: int, left_s: float, least: float, below: float
) -> None:
    for jitter in (0.0, 0.5, 0.999999):
        decided = decide(failed(429, asked_s), attempts, UNTIL, left_s=left_s, jitter=jitter)

        assert isinstance(decided, Republish)
        assert least <= decided.delay_s < below


@given(st.integers(0, 100), st.floats(0.25, 10**6), st.none() | st.floats(0, 10**5), jitters)
def test_a_broker_with_a_queue_for_each_delay_sees_only_those_that_exist(
    n: int, left_s: float, asked_s: float | None, jitter: float
) -> None:
    decided = decide(failed(429, asked_s), n, UntilDeadline(on_ladder=True), left_s=left_s, jitter=jitter)

    assert isinstance(decided, Republish)
    assert decided.delay_s in (0.0, *LADDER_S)
    assert decided.delay_s <= left_s


# ---------------------------------------------------------------- the processor


@pytest.fixture
async def site() -> Site:
    return Site()


async def outcome_of_call(
    site: Site,
    said: Exception | Answer,
    *,
    foreign: bool = True,
    retried: frozenset[int] = RETRIED,
    answers: frozenset[int] = frozenset(),
) -> tuple[Outcome, FakeModel]:
    """What a call comes to, of a message in a format of its own (or in ours) that has a route."""
    model = FakeModel(failures=[said])
    worker = Worker(site, model, retry_statuses=retried)
    worker.processor._answer_statuses = answers
    job = worker.job(body() if not foreign else b"theirs")
    request = InferenceRequest(
        request_id="a",
        received_at=EPOCH,
        timeout_s=600.0,
        deadline=EPOCH + 600.0,
        payload=b'{ "as": "it came" }',
        endpoint="/v1/x",
        stream=False,
        headers={"X-Mine": "1", "Host": "evil"},
    )
    job = Job(replace(job.delivery, request=request if foreign else None, route=ROUTE))
    try:
        return await worker.processor.process(job), model
    finally:
        worker.processor.forget(job)


def answer(status_code: int, **headers: str) -> Answer:
    return Answer(status_code=status_code, reason="No", body=BUSY, retry_after_s=7.0, headers=headers)


@pytest.mark.parametrize("status_code", [429, 500, 503, 599, 408, 425])
async def test_a_status_that_may_pass_is_tried_again_and_its_answer_kept_case_249(site: Site, status_code: int) -> None:
    outcome, _ = await outcome_of_call(site, answer(status_code))

    assert isinstance(outcome, Failed)
    assert (outcome.status_code, outcome.retry_after_s) == (status_code, 7.0)
    assert outcome.reply.answer == BUSY
    assert isinstance(decide(outcome, 0, UNTIL, left_s=600, jitter=0.5), Republish)


@pytest.mark.parametrize("status_code", [400, 401, 404, 422])
async def test_another_4xx_is_the_result_with_its_body_and_not_tried_again_case_249(
    site: Site, status_code: int
) -> None:
    outcome, _ = await outcome_of_call(site, answer(status_code))

    assert isinstance(outcome, Concluded)
    assert outcome_of(outcome.reply) == HttpAnswer(status_code=status_code, body=BUSY)
    assert isinstance(decide(outcome, 0, UNTIL, left_s=600, jitter=0.5), Ack)


@pytest.mark.parametrize("failure", [ModelGone("refused"), ModelCut("cut"), ModelSlow("slow")])
async def test_a_call_without_an_answer_is_tried_again_and_has_none_to_end_with_case_250(
    site: Site, failure: ModelFailure
) -> None:
    outcome, _ = await outcome_of_call(site, failure)

    assert isinstance(outcome, Failed)
    assert (outcome.status_code, outcome.reply.answer) == (None, None)
    assert isinstance(decide(outcome, 0, UNTIL, left_s=600, jitter=0.5), Republish)


async def test_an_answer_that_cannot_be_stored_is_no_answer_to_end_with(site: Site) -> None:
    outcome, _ = await outcome_of_call(site, BadResponse("too large", status_code=503))

    assert isinstance(outcome, Failed)
    assert (outcome.status_code, outcome.reply.answer) == (None, None)


async def test_a_request_whose_time_is_over_ends_with_the_429_that_came_last_case_253(site: Site) -> None:
    outcome, _ = await outcome_of_call(site, answer(429))

    decided = decide(outcome, 9, UNTIL, left_s=-1.0, jitter=0.5)

    assert isinstance(decided, Ack)
    assert decided.reply is not None
    assert outcome_of(decided.reply) == HttpAnswer(status_code=429, body=BUSY)


@pytest.mark.parametrize("status_code", [429, 400])
async def test_a_reply_in_our_own_format_holds_no_second_copy_of_the_answer(site: Site, status_code: int) -> None:
    outcome, _ = await outcome_of_call(site, answer(status_code), foreign=False)

    assert isinstance(outcome, Failed | Concluded)
    assert outcome.reply.answer is None


@pytest.mark.parametrize("status_code", [429, 404])
async def test_the_gateways_reason_is_in_the_text_of_a_failure_case_282(site: Site, status_code: int) -> None:
    outcome, _ = await outcome_of_call(site, answer(status_code, **{REASON: "rejected-saturated"}))

    assert isinstance(outcome, Failed | Concluded)
    assert outcome.reply.error is not None
    assert outcome.reply.error.endswith("busy [rejected-saturated]")


async def test_statuses_can_be_set_otherwise() -> None:
    table, problems = status_table({"404": "retry", "5xx": "final", "409": "answer"})
    retried, answers = table.judged("retry"), table.judged("answer")

    again, _ = await outcome_of_call(Site(), answer(404), retried=retried, answers=answers)
    final, _ = await outcome_of_call(Site(), answer(503), retried=retried, answers=answers)
    taken, _ = await outcome_of_call(Site(), answer(409), retried=retried, answers=answers)

    assert not problems
    assert isinstance(again, Failed)
    assert isinstance(final, Concluded)
    assert isinstance(taken, Concluded)
    assert (final.reply.status, final.reply.status_code) == ("failed", 503)
    assert (taken.reply.status, taken.reply.status_code) == ("completed", 409)
    assert taken.reply.result == BUSY


def test_no_status_of_a_success_can_be_among_those_that_are_set() -> None:
    assert not TABLE_OF_STATUSES.judged("answer")
    assert {408, 425, 429, *range(500, 600)} == RETRIED


async def test_a_call_follows_the_route_of_its_delivery_with_the_payload_as_it_came(site: Site) -> None:
    _, model = await outcome_of_call(site, answer(200))

    assert model.targets == [("http://gateway/base", "/base/v1/x")]
    assert model.payloads == [b'{ "as": "it came" }']
    assert {name: model.headers[0].get(name) for name in ("X-Pool", "X-Mine", "Host")} == {
        "X-Pool": "gpu",
        "X-Mine": "1",
        "Host": None,
    }


async def test_a_message_in_our_format_that_names_no_endpoint_goes_to_the_path_of_its_route(site: Site) -> None:
    _, model = await outcome_of_call(site, answer(200), foreign=False)

    assert model.targets == [("http://gateway/base", "/base/v1/completions")]


# ---------------------------------------------------------------- the listener


async def test_a_request_is_tried_as_often_as_its_time_allows_and_never_parked(site: Site) -> None:
    """Twenty failures take 2 to 60 s each, where a bounded rule would have given up after two."""
    busy = answer(429)
    worker = Worker(site, FakeModel(failures=[busy] * 20), retry_statuses=RETRIED, max_retries=2, breaker_failures=0)
    worker.listener._policy = UNTIL
    await site.publish(body(timeout_s=3600.0))
    async with running(worker):
        await eventually(site.result, within=3600, what="the result")

    result = await site.result()
    assert result is not None
    assert (result["status"], result["attempt"]) == ("completed", 20)
    assert not site.dead


async def test_a_request_that_fails_until_its_deadline_ends_there_and_not_among_the_dead(site: Site) -> None:
    model = FakeModel(takes_s=0.1, failures=[answer(429)] * 1000)
    worker = Worker(site, model, retry_statuses=RETRIED, breaker_failures=0)
    worker.listener._policy = UNTIL
    await site.publish(body(timeout_s=60.0))
    async with running(worker):
        await eventually(site.result, within=3600, what="the result")

    result = await site.result()
    assert result is not None
    assert result["error_code"] in ("deadline_exceeded", "expired", "model_error")
    assert 4 < len(model.calls) < 20
    assert not site.dead
