"""What a gateway's answer says of its capacity. Pure."""

from collections.abc import Mapping
from typing import Final

from inference_worker.ports import Feedback, FeedbackKind

REASON_HEADER: Final = "x-llm-d-request-dropped-reason"
_REASONS: Final[Mapping[str, FeedbackKind]] = {
    "rejected-saturated": "capacity_rejected",
    "rejected-ttl-expired": "ttl_expired",
}
EVICTED: Final = "evicted"


def feedback(
    status_code: int | None,
    headers: Mapping[str, str],
    *,
    sent_at: float | None,
    retry_after_s: float | None = None,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
) -> Feedback:
    """What is told to gates of an answer; without a status there was none.

    A reason outranks the status, and a bare 429 is a matter of capacity, so that it works with gateways that give no
    reasons. A reason that is not known says nothing of capacity.
    """
    lower = {name.lower(): value for name, value in headers.items()}
    return Feedback(
        kind=_kind(status_code, lower.get(REASON_HEADER, "").strip().lower()),
        sent_at=sent_at,
        retry_after_s=retry_after_s,
        headers=lower,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
    )


def _kind(status_code: int | None, reason: str) -> FeedbackKind:
    if status_code is None:
        return "error"
    if status_code < 400:
        return "accepted"
    if reason:
        return "evicted" if reason.startswith(EVICTED) else _REASONS.get(reason, "rejected")
    if status_code == 429:
        return "capacity_rejected"
    # Any other 4xx was looked at and refused for its own sake.
    return "error" if status_code >= 500 else "rejected"
