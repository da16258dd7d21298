"""What becomes of a message: the one place that knows which outcome is retried, acknowledged or dead-lettered.

Pure: no clock, no chance, no I/O. Contract, section 5, is its test table.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Literal, NewType, assert_never

from inference_worker.llmd_retry import UntilDeadline, delay_s
from inference_worker.messages import DEAD_LETTERED, ErrorCode, KnownReply, Reply, Usage
from inference_worker.retry_ladder import LADDER_S, rungs_below, rungs_up_to

Token = NewType("Token", str)
"""128 random bits, drawn anew for every arrival of a message: who holds the claim."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A claim that we have, or may have: what a release needs."""

    request_id: str
    token: Token


DispositionName = Literal["ack", "requeue", "retry", "dead_letter"]
NotAdmittedBecause = Literal["gate_closed", "quota_exhausted", "waited"]
"""`waited`: for as long as one may wait at a gate."""


class Fault(Enum):
    """A failure of the model that may pass."""

    GONE = "the model is gone"
    CUT = "the answer was cut short"
    SLOW = "the model took too long"
    STATUS = "the model asked to be tried again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A terminal result is there; it was there before us."""

    reply: KnownReply


@dataclass(frozen=True, slots=True)
class Superseded:
    """A copy with a higher attempt was confirmed by the broker: this message is history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Concluded:
    """A terminal result was made here: an answer, or a failure that trying again cannot mend."""

    reply: Reply
    hold: Hold
    usage: Usage | None = None
    usage_event: bytes | None = None
    """What billing gets, to be stored in the same step as the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The model failed in a way that may pass."""

    fault: Fault
    detail: str
    hold: Hold
    reply: Reply
    """What is written if there are no retries left."""
    retry_after_s: float | None = None
    """What the model asked for."""
    status_code: int | None = None
    """The HTTP status, where there was a whole answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """The message is no request."""

    reason: str
    reply: Reply | None
    """None where no id could be read to answer under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotStored:
    """The store could not be asked for as long as we may ask."""

    hold: Hold | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """We were told to stop, or may not hold the message any longer; the request has nothing to do with it."""

    reason: str
    hold: Hold | None = None
    """Set where a claim is ours to release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotAdmitted:
    """A gate did not let it in: no attempt, and no word on the request."""

    reason: str
    hold: Hold
    """For the release that goes with a copy; nothing was claimed under it."""
    because: NotAdmittedBecause = "gate_closed"


Outcome = Answered | Superseded | Concluded | Failed | Malformed | NotStored | Interrupted | NotAdmitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Store the reply, if there is one, then acknowledge."""

    reply: Reply | None = None
    usage_event: bytes | None = None
    claim: Hold | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack:
    """Release the claim, if one is held, and put the message back uncounted."""

    claim: Hold | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Republish:
    """Put a copy back that becomes visible after `delay_s`, then forget this one."""

    delay_s: float
    attempts: int
    """How many attempts the copy has behind it."""
    left_s: float
    """To the deadline; after it no copy is tried."""
    claim: Hold


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """Store the reply, if there is one, then park the message with its reason."""

    reason: ErrorCode
    detail: str
    attempts: int
    """How often it was tried."""
    status_code: int
    reply: Reply | None = None
    claim: Hold | None = None


Disposition = Ack | Nack | Republish | DeadLetter


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How temporary failures are tried again: so many times, and then the message is dead-lettered."""

    max_retries: int
    first_delay_s: float = 0.0
    """0 = at once."""
    longest_delay_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandBack:
    """How a message goes back that a gate has not let in. It is never counted as an attempt."""

    copy_after_s: float = 0.0
    """Above 0: as a copy that becomes visible after half to all of it, for brokers that hand out at once again what was
    given back, so that a closed gate would be asked in a circle. 0: the message itself."""


AT_ONCE: Final = HandBack()

Retries = RetryPolicy | UntilDeadline
"""So many times, or until the deadline."""


def decide(
    outcome: Outcome,
    attempts: int,
    policy: Retries,
    hand_back: HandBack = AT_ONCE,
    *,
    left_s: float,
    jitter: float,
) -> Disposition:
    """What becomes of a message.

    `attempts` lie behind it (0 for a first one), `left_s` seconds are left to its deadline, `jitter` is in [0, 1).
    """
    match outcome:
        case Answered(reply=known):
            if known.error_code in DEAD_LETTERED and attempts >= known.attempt:
                # Its message was to be dead-lettered and is here: the first reject was lost.
                return DeadLetter(
                    reason="poison" if known.error_code == "poison" else "retries_exhausted",
                    detail="found as already failed",
                    attempts=known.attempt + 1,
                    status_code=known.status_code,
                )
            return Ack()
        case Superseded():
            return Ack()
        case Concluded(reply=reply, usage_event=usage_event, hold=hold):
            if reply.error_code in DEAD_LETTERED:
                return _dead_letter(reply, hold)
            return Ack(reply=reply, usage_event=usage_event, claim=hold)
        case Failed():
            return _again(outcome, attempts, policy, left_s=left_s, jitter=jitter)
        case Malformed(reason=reason, reply=answer):
            return DeadLetter(
                reason="invalid_request", detail=reason, attempts=attempts, status_code=400, reply=answer, claim=None
            )
        case NotStored(hold=hold) | Interrupted(hold=hold):
            return Nack(claim=hold)
        case NotAdmitted(hold=hold):
            return handed_back(hold, attempts, hand_back, left_s=left_s, jitter=jitter)
        case _:
            assert_never(outcome)


def handed_back(hold: Hold, attempts: int, hand_back: HandBack, *, left_s: float, jitter: float) -> Nack | Republish:
    """How a message goes back that a gate has not let in. Nothing was claimed under `hold`; else as `decide`."""
    wait_s = _jittered_s(min(hand_back.copy_after_s, left_s), jitter)
    # Too late for a copy, it goes back to be answered; there is no circle, as its time is over.
    return Republish(delay_s=wait_s, attempts=attempts, left_s=left_s, claim=hold) if wait_s > 0 else Nack()


def _again(failed: Failed, attempts: int, policy: Retries, *, left_s: float, jitter: float) -> Disposition:
    match policy:
        case RetryPolicy(max_retries=max_retries):
            if attempts >= max_retries:
                return _dead_letter(failed.reply, failed.hold)
            wait_s = retry_delay_s(attempts + 1, policy, failed.retry_after_s, left_s=left_s, jitter=jitter)
        case UntilDeadline():
            if left_s < policy.shortest_step_s:  # Too late for another try that would be more than one of a storm.
                return Ack(reply=_last_reply(failed), claim=failed.hold)
            wait_s = delay_s(attempts, policy, left_s=left_s, retry_after_s=failed.retry_after_s, jitter=jitter)
        case _:
            assert_never(policy)
    return Republish(delay_s=wait_s, attempts=attempts + 1, left_s=left_s, claim=failed.hold)


def _last_reply(failed: Failed) -> Reply:
    """What a request ends with whose time is over: the model's last answer, else that its time is over."""
    if failed.status_code is not None:
        return replace(failed.reply, status_code=failed.status_code, error_code="model_error")
    return replace(failed.reply, status_code=408, error_code="deadline_exceeded")


def _dead_letter(reply: Reply, hold: Hold) -> DeadLetter:
    return DeadLetter(
        reason=reply.error_code or "retries_exhausted",
        detail=reply.error or "",
        attempts=reply.attempt + 1,
        status_code=reply.status_code,
        reply=reply,
        claim=hold,
    )


def retry_delay_s(
    tried: int, policy: RetryPolicy, retry_after_s: float | None, *, left_s: float, jitter: float
) -> float:
    """Seconds until a request that was tried `tried` times is tried again: 0, or a rung of `LADDER_S`.

    Equal jitter: a rung in [d/2, d], d = min(cap, first * 2**(tried - 1)), never beyond the deadline.
    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.

    A model's Retry-After is a floor under it, cut to half of what is left, so that one more try fits in.
    """
    whole = min(policy.longest_delay_s, policy.first_delay_s * 2 ** min(tried - 1, 60), max(left_s, 0.0))
    wait_s = _jittered_s(whole, jitter)
    if retry_after_s is not None and retry_after_s > wait_s:
        asked = min(retry_after_s, max(left_s, 0.0) / 2)
        above = rungs_below(asked)
        within = above < len(LADDER_S) and LADDER_S[above] <= left_s
        wait_s = LADDER_S[above] if within and asked > 0 else wait_s
    return wait_s


def _jittered_s(whole: float, jitter: float) -> float:
    """A rung between half of `whole` and all of it; 0 where there is none."""
    low, high = rungs_below(whole / 2), rungs_up_to(whole)
    return LADDER_S[low + int(jitter * (high - low))] if high > low else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Done: the broker has forgotten the message, or has it back."""

    how: DispositionName
    """What was done in the end; a copy that could not be placed becomes a requeue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Not acknowledged: another terminal result was there first."""

    reply: KnownReply


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Not acknowledged: a failure may not be stored, as another worker rightly runs the request."""

    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSilent:
    """Not acknowledged: the store gave no answer. Whether it stored is unknown; asking again is harmless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryLost:
    """Not acknowledged, and never will be: the connection it came by is gone. `stored` tells of the reply."""

    stored: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRefused:
    """Not acknowledged: the broker will never take a copy of this message."""

    reason: str


Settlement = Settled | Known | Busy | StoreSilent | DeliveryLost | CopyRefused
