"""What becomes of a message: contract, section 5, row by row; and what holds for every outcome."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.disposition import (
    Ack,
    Answered,
    Concluded,
    DeadLetter,
    Disposition,
    Failed,
    Fault,
    HandBack,
    Hold,
    Interrupted,
    Malformed,
    Nack,
    NotAdmitted,
    NotStored,
    Outcome,
    Republish,
    RetryPolicy,
    Superseded,
    Token,
    decide,
    retry_delay_s,
)
from inference_worker.messages import DEAD_LETTERED, ERROR_CODES, ErrorCode, KnownReply, Reply
from inference_worker.retry_ladder import LADDER_S

HOLD = Hold("a", Token("t"))
POLICY = RetryPolicy(max_retries=2)


def reply(status_code: int = 200, error_code: ErrorCode | None = None, attempt: int = 0) -> Reply:
    return Reply(
        request_id="a",
        status="completed" if error_code is None else "failed",
        status_code=status_code,
        attempt=attempt,
        replica_id="r",
        finished_at=1.0,
        result=b"{}" if error_code is None else None,
        error=None if error_code is None else "no",
        error_code=error_code,
    )


def concluded(status_code: int, error_code: ErrorCode | None = None) -> Concluded:
    return Concluded(reply=reply(status_code, error_code), hold=HOLD)


def failed(attempt: int, retry_after_s: float | None = None) -> Failed:
    return Failed(
        fault=Fault.CUT,
        detail="cut",
        hold=HOLD,
        reply=reply(500, "retries_exhausted", attempt),
        retry_after_s=retry_after_s,
    )


def known(error_code: str | None, attempt: int) -> Answered:
    status_code = 200 if error_code is None else 500
    return Answered(
        reply=KnownReply(
            status="completed" if error_code is None else "failed",
            status_code=status_code,
            attempt=attempt,
            error_code=error_code,
        )
    )


def parked_again(reason: ErrorCode, attempt: int) -> DeadLetter:
    return DeadLetter(reason=reason, detail="found as already failed", attempts=attempt + 1, status_code=500)


def parked(reason: ErrorCode, status_code: int, attempt: int) -> DeadLetter:
    return DeadLetter(
        reason=reason,
        detail="no",
        attempts=attempt + 1,
        status_code=status_code,
        reply=reply(status_code, reason, attempt),
        claim=HOLD,
    )


BAD_REQUEST = reply(400, "invalid_request")
EVENT = Concluded(reply=reply(), hold=HOLD, usage_event=b"{}")

TABLE = [
    pytest.param(
        Malformed(reason="no JSON", reply=BAD_REQUEST),
        0,
        DeadLetter(reason="invalid_request", detail="no JSON", attempts=0, status_code=400, reply=BAD_REQUEST),
        id="what is no request is answered 400 and rejected",
    ),
    pytest.param(
        Malformed(reason="no JSON", reply=None),
        0,
        DeadLetter(reason="invalid_request", detail="no JSON", attempts=0, status_code=400),
        id="what is no request and has no id is rejected without an answer",
    ),
    pytest.param(
        concluded(408, "expired"),
        0,
        Ack(reply=reply(408, "expired"), claim=HOLD),
        id="what came too late is answered 408 and acknowledged",
    ),
    pytest.param(known(None, 0), 0, Ack(), id="what is completed already is acknowledged and nothing else"),
    pytest.param(known("model_error", 0), 3, Ack(), id="what the model refused already is acknowledged"),
    pytest.param(known("cancelled", 0), 0, Ack(), id="what was cancelled already is acknowledged"),
    pytest.param(known("expired", 0), 0, Ack(), id="what is expired already is acknowledged"),
    pytest.param(
        known("retries_exhausted", 2),
        2,
        parked_again("retries_exhausted", 2),
        id="the last attempt found as exhausted is rejected, since the first reject was lost",
    ),
    pytest.param(
        known("poison", 0), 1, parked_again("poison", 0), id="a later attempt found as poison is rejected as poison"
    ),
    pytest.param(
        known("retries_exhausted", 2), 1, Ack(), id="an older attempt than the one that was exhausted is acknowledged"
    ),
    pytest.param(Superseded(), 0, Ack(), id="an attempt whose copy is confirmed is acknowledged"),
    pytest.param(NotStored(hold=HOLD), 0, Nack(claim=HOLD), id="a store that cannot be asked sends the message back"),
    pytest.param(
        concluded(500, "poison"),
        0,
        parked("poison", 500, 0),
        id="a request that killed its workers is answered 500 and rejected",
    ),
    pytest.param(
        concluded(200), 0, Ack(reply=reply(200), claim=HOLD), id="an answer of the model is stored, then acknowledged"
    ),
    pytest.param(
        EVENT,
        0,
        Ack(reply=reply(), usage_event=b"{}", claim=HOLD),
        id="the usage event travels with the answer",
    ),
    pytest.param(
        concluded(429, "model_error"),
        0,
        Ack(reply=reply(429, "model_error"), claim=HOLD),
        id="a refusal of the model is an answer",
    ),
    pytest.param(
        concluded(502, "bad_response"),
        0,
        Ack(reply=reply(502, "bad_response"), claim=HOLD),
        id="an answer that cannot be stored is answered 502 and acknowledged",
    ),
    pytest.param(
        failed(0),
        0,
        Republish(delay_s=0, attempts=1, left_s=60, claim=HOLD),
        id="a failure that may pass is tried again as the next attempt",
    ),
    pytest.param(
        failed(1),
        1,
        Republish(delay_s=0, attempts=2, left_s=60, claim=HOLD),
        id="the last retry is still a retry",
    ),
    pytest.param(
        failed(2), 2, parked("retries_exhausted", 500, 2), id="with its retries used up it is answered 500 and rejected"
    ),
    pytest.param(
        failed(7), 7, parked("retries_exhausted", 500, 7), id="a count beyond the retries is used up just the same"
    ),
    pytest.param(
        concluded(408, "deadline_exceeded"),
        0,
        Ack(reply=reply(408, "deadline_exceeded"), claim=HOLD),
        id="a deadline that passed during the call is answered 408 and acknowledged",
    ),
    pytest.param(
        Interrupted(reason="told to stop", hold=HOLD),
        1,
        Nack(claim=HOLD),
        id="a call that was interrupted gives its claim back and the message, uncounted",
    ),
    pytest.param(Interrupted(reason="told to stop"), 1, Nack(), id="a message that had not begun goes back uncounted"),
    pytest.param(
        NotAdmitted(reason="closed", hold=HOLD), 2, Nack(), id="what a gate has not let in goes back uncounted"
    ),
    pytest.param(
        concluded(429, "gate_dropped"),
        0,
        Ack(reply=reply(429, "gate_dropped"), claim=HOLD),
        id="what a gate drops is answered and acknowledged",
    ),
    pytest.param(
        concluded(500, "gate_error"),
        0,
        Ack(reply=reply(500, "gate_error"), claim=HOLD),
        id="a gate that cannot say ends the request",
    ),
]


@pytest.mark.parametrize(("outcome", "attempts", "disposition"), TABLE)
def test_what_becomes_of_a_message(outcome: Outcome, attempts: int, disposition: Disposition) -> None:
    assert decide(outcome, attempts, POLICY, left_s=60, jitter=0.5) == disposition


BY_COPY = HandBack(copy_after_s=1.0)
CLOSED = NotAdmitted(reason="closed", hold=HOLD)


@pytest.mark.parametrize(
    ("attempts", "left_s", "disposition"),
    [
        pytest.param(
            0,
            60.0,
            Republish(delay_s=0.761, attempts=0, left_s=60.0, claim=HOLD),
            id="a copy has as many attempts behind it as the message",
        ),
        pytest.param(
            7,
            60.0,
            Republish(delay_s=0.761, attempts=7, left_s=60.0, claim=HOLD),
            id="used up retries do not matter to what was not tried",
        ),
        pytest.param(
            0,
            0.05,
            Republish(delay_s=0.04, attempts=0, left_s=0.05, claim=HOLD),
            id="a copy does not sleep through its deadline",
        ),
        pytest.param(0, 0.005, Nack(), id="without time for a copy it goes back to be answered"),
        pytest.param(0, -5.0, Nack(), id="nor is there time after the deadline"),
    ],
)
def test_what_a_gate_has_not_let_in_goes_back_as_a_copy_where_the_broker_hands_out_at_once(
    attempts: int, left_s: float, disposition: Disposition
) -> None:
    assert decide(CLOSED, attempts, POLICY, BY_COPY, left_s=left_s, jitter=0.5) == disposition


@given(
    attempts=st.integers(0, 2**31 - 1),
    after_s=st.floats(0, 1e6),
    left_s=st.floats(-1e6, 1e9),
    jitter=st.floats(0, 1, exclude_max=True),
)
def test_no_gate_counts_or_outlasts_the_deadline(attempts: int, after_s: float, left_s: float, jitter: float) -> None:
    decided = decide(CLOSED, attempts, POLICY, HandBack(copy_after_s=after_s), left_s=left_s, jitter=jitter)

    match decided:
        case Republish(delay_s=delay_s, attempts=next_attempt):
            assert next_attempt == attempts
            assert delay_s in LADDER_S
            assert delay_s <= min(after_s, left_s)
        case _:
            assert decided == Nack()


def test_no_retries_at_all_is_a_policy() -> None:
    decided = decide(failed(0), 0, RetryPolicy(max_retries=0), left_s=60, jitter=0.5)

    assert isinstance(decided, DeadLetter)


codes = st.sampled_from(ERROR_CODES)
attempts_ = st.integers(0, 2**31 - 1)
jitters = st.floats(0, 1, exclude_max=True)
seconds = st.floats(-1e6, 1e9)
delays_asked = st.none() | st.floats(0, 1e9)
policies = st.builds(
    RetryPolicy,
    max_retries=st.integers(0, 1000),
    first_delay_s=st.one_of(st.just(0.0), st.floats(0, 1e6)),
    longest_delay_s=st.floats(0, 1e6),
)
replies = st.one_of(
    st.builds(reply, st.just(200), st.none(), attempts_), st.builds(reply, st.just(500), codes, attempts_)
)
holds = st.none() | st.just(HOLD)
outcomes: st.SearchStrategy[Outcome] = st.one_of(
    st.builds(known, st.none() | st.sampled_from([*ERROR_CODES, "of_another_version"]), attempts_),
    st.just(Superseded()),
    st.builds(Concluded, reply=replies, hold=st.just(HOLD), usage_event=st.none() | st.just(b"{}")),
    st.builds(failed, attempts_, delays_asked),
    st.builds(Malformed, reason=st.text(), reply=st.none() | replies),
    st.builds(NotStored, hold=holds),
    st.builds(Interrupted, reason=st.text(), hold=holds),
    st.builds(NotAdmitted, reason=st.text(), hold=st.just(HOLD)),
)


class TestEveryOutcome:
    """What no table can list."""

    @given(outcome=outcomes, attempts=attempts_, policy=policies, left_s=seconds, jitter=jitters)
    def test_ends_in_one_disposition_that_loses_nothing(
        self, outcome: Outcome, attempts: int, policy: RetryPolicy, left_s: float, jitter: float
    ) -> None:
        decided = decide(outcome, attempts, policy, left_s=left_s, jitter=jitter)

        match decided:
            case Ack(reply=stored):
                # Acknowledged without storing only where a result, or a confirmed copy, is known to be there.
                assert stored is not None or isinstance(outcome, Answered | Superseded)
            case Nack():
                assert isinstance(outcome, NotStored | Interrupted | NotAdmitted)
            case Republish(attempts=next_attempt):
                assert isinstance(outcome, Failed)
                assert next_attempt == attempts + 1
                assert next_attempt <= policy.max_retries
            case DeadLetter(reason=reason, reply=stored):
                assert reason in DEAD_LETTERED | {"invalid_request"}
                assert stored is None or stored.status == "failed" or isinstance(outcome, Malformed)

    @given(outcome=outcomes, policy=policies, left_s=seconds, jitter=jitters)
    def test_a_message_is_tried_a_bounded_number_of_times(
        self, outcome: Outcome, policy: RetryPolicy, left_s: float, jitter: float
    ) -> None:
        attempts = rounds = 0
        while isinstance(decided := decide(outcome, attempts, policy, left_s=left_s, jitter=jitter), Republish):
            attempts, rounds = decided.attempts, rounds + 1

        assert rounds <= policy.max_retries


class TestDelay:
    """Equal jitter on a fixed ladder."""

    @given(tried=st.integers(1, 2**31), policy=policies, left_s=seconds, jitter=jitters, asked=delays_asked)
    def test_is_0_or_a_rung_and_never_beyond_the_deadline(
        self, tried: int, policy: RetryPolicy, left_s: float, jitter: float, asked: float | None
    ) -> None:
        delay_s = retry_delay_s(tried, policy, asked, left_s=left_s, jitter=jitter)

        assert delay_s == 0 or delay_s in LADDER_S
        assert delay_s == 0 or delay_s <= left_s

    @given(tried=st.integers(1, 40), policy=policies, left_s=seconds, jitter=jitters)
    def test_lies_between_half_and_the_whole(
        self, tried: int, policy: RetryPolicy, left_s: float, jitter: float
    ) -> None:
        """0 only where no rung lies in between: below the lowest, or above the highest."""
        whole = min(policy.longest_delay_s, policy.first_delay_s * 2.0 ** (tried - 1), max(left_s, 0.0))

        delay_s = retry_delay_s(tried, policy, None, left_s=left_s, jitter=jitter)

        if delay_s == 0:
            assert not [rung for rung in LADDER_S if whole / 2 <= rung <= whole]
        else:
            assert whole / 2 <= delay_s <= whole

    @pytest.mark.parametrize(
        ("jitter", "delay_s"),
        [
            pytest.param(0.0, 0.538, id="the least jitter is the lowest rung from half on"),
            pytest.param(0.999, 0.905, id="the most jitter is the highest rung up to the whole"),
        ],
    )
    def test_is_spread_over_all_rungs_of_its_range(self, jitter: float, delay_s: float) -> None:
        policy = RetryPolicy(max_retries=9, first_delay_s=0.25)

        assert retry_delay_s(3, policy, None, left_s=600, jitter=jitter) == delay_s

    def test_a_whole_that_is_a_rung_is_reached(self) -> None:
        policy = RetryPolicy(max_retries=9, first_delay_s=0.01)

        assert retry_delay_s(1, policy, None, left_s=600, jitter=0.999) == 0.01

    @given(asked=st.floats(0.001, 1e5), left_s=st.floats(0.1, 1e6), jitter=jitters)
    def test_is_at_least_what_the_model_asked_for_while_there_is_time(
        self, asked: float, left_s: float, jitter: float
    ) -> None:
        """Cut to half of what is left, so that one more try fits in."""
        delay_s = retry_delay_s(1, RetryPolicy(max_retries=1), asked, left_s=left_s, jitter=jitter)

        assert delay_s >= min(asked, left_s / 2)
        assert delay_s <= left_s

    def test_the_longer_of_backoff_and_retry_after_counts(self) -> None:
        policy = RetryPolicy(max_retries=9, first_delay_s=8.0)

        assert retry_delay_s(1, policy, 0.5, left_s=600, jitter=0.5) >= 4.0
        assert retry_delay_s(1, policy, 20.0, left_s=600, jitter=0.5) >= 20.0

    def test_the_rungs_rise_from_10_ms_to_26_days_four_to_the_octave(self) -> None:
        assert LADDER_S[0] == 0.01
        assert LADDER_S[4] == 0.02
        assert list(LADDER_S) == sorted(set(LADDER_S))
        assert LADDER_S[-1] > 26 * 86_400
