"""When a failed call is tried again, and what is final. Names end in the number of the peer's case."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.disposition import Ack, Failed, Fault, Hold, Republish, Token, decide
from inference_worker.llmd_retry import (
    StatusRule,
    StatusTable,
    UntilDeadline,
    backoff_s,
    delay_s,
    failure_text,
    status_table,
)
from inference_worker.messages import Reply
from inference_worker.model_client import retry_after_s
from inference_worker.retry_ladder import LADDER_S

HOLD = Hold("a", Token("t"))
POLICY = UntilDeadline()
LAST = Reply(
    request_id="a",
    status="failed",
    status_code=429,
    attempt=0,
    replica_id="r",
    finished_at=1.0,
    error="busy",
    error_code="model_error",
    answer=b"busy",
)
jitters = st.floats(0, 1, exclude_max=True)
TABLE = StatusTable()


def failed(retry_after_s: float | None = None) -> Failed:
    return Failed(fault=Fault.STATUS, detail="429", hold=HOLD, reply=LAST, retry_after_s=retry_after_s, status_code=429)


@pytest.mark.parametrize("status_code", [200, 201, 204, 299])
def test_a_2xx_is_the_answer_case_248(status_code: int) -> None:
    assert TABLE.of(status_code).judgement == "answer"


@pytest.mark.parametrize(
    ("status_code", "judgement", "shed"),
    [
        (429, "retry", True),
        (500, "retry", False),
        (503, "retry", False),
        (599, "retry", False),
        (400, "final", False),
        (404, "final", False),
        (408, "retry", False),
        (425, "retry", False),
        (302, "final", False),
        (100, "final", False),
        (0, "final", False),
        (999, "final", False),
    ],
)
def test_each_status_is_judged_case_249(status_code: int, judgement: str, shed: bool) -> None:
    rule = TABLE.of(status_code)

    assert (rule.judgement, rule.shed, rule.heeds_retry_after) == (judgement, shed, judgement == "retry")


def test_a_status_can_be_set_otherwise_and_its_class_too() -> None:
    table, problems = status_table({"404": "retry", "5xx": "final", "503": "retry", "302": "answer", "429": "retry"})

    assert not problems
    assert [table.of(code).judgement for code in (404, 500, 503, 302, 301)] == [
        "retry",
        "final",
        "retry",
        "answer",
        "final",
    ]
    assert table.of(429) == StatusRule(judgement="retry", shed=True)


def test_a_class_that_is_set_holds_for_all_its_statuses() -> None:
    table, _ = status_table({"4xx": "final"})

    assert {table.of(code).judgement for code in (400, 408, 425, 429)} == {"final"}


@pytest.mark.parametrize(
    "setting", [("200", "retry"), ("2xx", "final"), ("abc", "retry"), ("404", "maybe"), ("²04", "final")]
)
def test_what_is_wrong_with_a_setting_is_said(setting: tuple[str, str]) -> None:
    _, problems = status_table(dict([setting]))

    assert len(problems) == 1
    assert "accepted:" in problems[0]
    assert setting[0] in problems[0]


@pytest.mark.parametrize("fault", list(Fault))
def test_a_connection_that_fails_and_a_call_that_is_too_long_are_tried_again_case_250(fault: Fault) -> None:
    seen = Failed(fault=fault, detail="gone", hold=HOLD, reply=LAST)

    assert isinstance(decide(seen, 0, POLICY, left_s=100, jitter=0.5), Republish)


@pytest.mark.parametrize("left_s", [-5.0, 0.0])
def test_at_its_deadline_a_request_ends_with_the_last_answer_case_252(left_s: float) -> None:
    assert decide(failed(30), 7, POLICY, left_s=left_s, jitter=0.5) == Ack(reply=LAST, claim=HOLD)


def test_the_last_result_of_a_deadline_after_a_429_is_that_429_case_253() -> None:
    done = decide(failed(), 1000, POLICY, left_s=-0.001, jitter=0.0)

    assert isinstance(done, Ack)
    assert done.reply is not None
    assert (done.reply.status_code, done.reply.answer) == (429, b"busy")


@given(st.integers(0, 10**6), st.floats(0.25, 10**6), jitters)
def test_a_retry_counts_one_more_and_waits_within_the_ladder_case_254(n: int, left_s: float, jitter: float) -> None:
    done = decide(failed(), n, POLICY, left_s=left_s, jitter=jitter)

    assert isinstance(done, Republish)
    whole = min(2.0 * 2.0 ** min(n + 1, 60), 60.0, left_s)
    assert done.attempts == n + 1
    assert whole / 2 <= done.delay_s <= whole


def test_the_first_retry_waits_2_to_4_seconds_and_the_steps_double_up_to_a_minute() -> None:
    lows = [backoff_s(n, POLICY, left_s=1e9, jitter=0.0) for n in range(7)]

    assert lows == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert backoff_s(0, POLICY, left_s=1e9, jitter=0.999) < 4.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("120", 120.0),
        ("0", 0.0),
        ("-5", 0.0),  # Which asks for nothing, as none does.
        ("Thu, 01 Jan 1970 00:20:00 GMT", 200.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("abc", None),
        ("", None),
    ],
)
def test_a_retry_after_is_read_and_garbage_is_none_case_256(text: str, seconds: float | None) -> None:
    assert retry_after_s(text, 1000.0) == seconds


@pytest.mark.parametrize(
    ("retry_count", "left_s", "asked_s", "least", "below"),
    [
        pytest.param(0, 100, 30, 30, 37.5, id="what is asked and up to a quarter more"),
        pytest.param(5, 100, 1, 30, 60, id="less than the backoff changes nothing"),
        pytest.param(0, 5, 30, 2.5, 5, id="half of what is left, so that another try fits"),
        pytest.param(0, 40, 300, 20, 25, id="at most 62.5 % of what is left"),
        pytest.param(0, 100, 0, 2, 4, id="none at all"),
    ],
)
def test_a_retry_after_is_a_floor_that_leaves_time_for_another_try_case_257(
    retry_count: int, left_s: float, asked_s: float, least: float, below: float
) -> None:
    for jitter in (0.0, 0.25, 0.5, 0.75, 0.999999):
        for spread in (None, 0.0, 0.5, 0.999999):
            delay = delay_s(retry_count, POLICY, left_s=left_s, retry_after_s=asked_s, jitter=jitter, spread=spread)

            assert least <= delay < below


@given(st.integers(0, 10**6), st.floats(0.001, 10**7), st.floats(0, 10**9), jitters, jitters)
def test_a_retry_after_never_makes_a_wait_shorter(
    n: int, left_s: float, asked_s: float, one: float, two: float
) -> None:
    delay = delay_s(n, POLICY, left_s=left_s, retry_after_s=asked_s, jitter=one, spread=two)

    assert delay >= backoff_s(n, POLICY, left_s=left_s, jitter=one)


@given(st.integers(0, 10**6), st.floats(0.001, 10**7), st.none() | st.floats(0, 10**9), jitters)
def test_no_wait_reaches_beyond_the_deadline(n: int, left_s: float, asked_s: float | None, jitter: float) -> None:
    for policy in (POLICY, UntilDeadline(on_ladder=True)):
        delay = delay_s(n, policy, left_s=left_s, retry_after_s=asked_s, jitter=jitter)

        assert 0 <= delay <= left_s


@given(st.integers(0, 99), st.floats(0.1, 10**6), st.none() | st.floats(0, 10**6), jitters)
def test_on_the_ladder_there_are_only_its_rungs_and_none_is_sooner_than_asked(
    n: int, left_s: float, asked_s: float | None, jitter: float
) -> None:
    free = delay_s(n, POLICY, left_s=left_s, retry_after_s=asked_s, jitter=jitter)
    rung = delay_s(n, UntilDeadline(on_ladder=True), left_s=left_s, retry_after_s=asked_s, jitter=jitter)

    assert rung in LADDER_S or rung == 0.0
    assert rung >= free or rung == max((step for step in LADDER_S if step <= left_s), default=0.0)


@pytest.mark.parametrize(
    ("reason", "cause", "text"),
    [
        (None, None, "rate limited"),
        ("rejected-saturated", None, "rate limited [rejected-saturated]"),
        ("rejected-saturated", "429 Too Many", "rate limited [rejected-saturated]: 429 Too Many"),
        (None, "429 Too Many", "rate limited: 429 Too Many"),
    ],
)
def test_the_text_of_a_failure_has_the_gateways_reason_in_brackets_case_12(
    reason: str | None, cause: str | None, text: str
) -> None:
    assert failure_text("rate limited", reason, cause) == text
