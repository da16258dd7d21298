"""A job as a caller sees it: its state out of record, result and progress. Who may see it is decided elsewhere."""

from typing import Final, Literal

import msgspec

from inference_worker.job_book import JobRecord
from inference_worker.messages import DEAD_LETTERED
from inference_worker.ports import Progress

State = Literal["queued", "running", "retrying", "succeeded", "failed", "cancelled", "expired", "dead"]
STATES: Final[tuple[State, ...]] = (
    *("queued", "running", "retrying"),
    *("succeeded", "failed", "cancelled", "expired", "dead"),
)
OPEN: Final = frozenset({"queued", "running", "retrying"})
"""The states of a job that has not ended."""

View = dict[str, object]


class StoredHead(msgspec.Struct):
    """A stored result, also one of a worker that writes no more than the first source asks for."""

    status: str
    status_code: int = 0
    error: str | None = None
    error_code: str | None = None


_SHOWN: Final = (
    *("status_code", "result", "error", "error_code", "attempt", "replica_id"),
    *("received_at", "finished_at", "timings"),
)
_head = msgspec.json.Decoder(StoredHead)
_parts = msgspec.json.Decoder(dict[str, msgspec.Raw])


def ended_view(job_id: str, stored: bytes, record: JobRecord | None = None) -> View:
    """A job whose result is stored; the result stays the bytes that were stored."""
    try:
        parts, seen = _parts.decode(stored), _head.decode(stored)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return {"job_id": job_id, "status": "failed", "error": "the stored result cannot be read"} | _of(record)
    state = state_of(seen.status, seen.status_code, seen.error_code)
    return {"job_id": job_id, "status": state, **{n: parts[n] for n in _SHOWN if n in parts}, **_of(record)}


def open_view(job_id: str, progress: Progress, record: JobRecord | None) -> View:
    """A job that has not ended."""
    return {
        "job_id": job_id,
        "status": open_state(progress),
        "attempt": progress.attempts,
        **_of(record),
    }


def open_state(progress: Progress) -> State:
    """The state of a job without a result."""
    if progress.running:
        return "running"
    return "retrying" if progress.attempts > 0 else "queued"


def state_of(status: str, status_code: int, error_code: str | None) -> State:
    """The state of a job whose result is stored; by status alone where the result has no error code."""
    if status == "completed":
        return "succeeded"
    match error_code:
        case "cancelled":
            return "cancelled"
        case "expired" | "deadline_exceeded":
            return "expired"
        case "invalid_request":
            return "dead"
        case None:
            return "cancelled" if status_code == 499 else "expired" if status_code == 408 else "failed"
        case _:
            return "dead" if error_code in DEAD_LETTERED else "failed"


def stored_state(stored: bytes) -> State:
    """The state that a stored result says."""
    try:
        seen = _head.decode(stored)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return "failed"
    return state_of(seen.status, seen.status_code, seen.error_code)


def _of(record: JobRecord | None) -> View:
    """What the record tells."""
    if record is None:
        return {}
    view: View = {"created_at": record.created_at, "expires_at": record.expires_at}
    if record.metadata:
        view["metadata"] = dict(record.metadata)
    if record.webhook_url is not None:
        view["webhook"] = {"url": record.webhook_url, "log": f"/v1/jobs/{record.job_id}/webhook"}
    return view
