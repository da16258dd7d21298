"""What an HTTP intake keeps of its jobs, and its way into a queue: data and seams.

A job is a request that came over HTTP; its `job_id` is the request's id. The record is what the queue and the result
do not tell: whose job it is, what its idempotency key stands for, whom to tell of its end. Filled by `results/` and by
the transports; used by `gateway/`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from inference_worker.ports import Backlog

KEPT_AFTER_S: Final = 86_400.0
"""How long a record outlives its result: that long the job is gone (410), afterwards unknown (404)."""

RESERVED_S: Final = 5.0
"""How long a job may be on its way into the queue before another call with its key takes it over."""

MOST_LISTED: Final = 100_000
"""Of each tenant's jobs, the newest; older ones are still found by their id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One accepted job."""

    job_id: str
    tenant: str
    """Whose it is; empty where nobody is asked who he is."""
    created_at: float
    expires_at: float
    """Its deadline, Unix seconds."""
    fingerprint: str
    """What was asked for, as a digest: the same key with another one is a mistake of the caller."""
    endpoint: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    webhook_url: str | None = None
    ended: Literal["", "completed", "failed"] = ""
    """Set in the step that stores the result, so that a result whose time is over is known to have been there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The queue has the job, once."""

    record: JobRecord
    new: bool
    """False where its idempotency key stood for it already."""
    waiting: int | None = None
    """How many waited before it; None where it is not new or cannot be told."""


@dataclass(frozen=True, slots=True)
class OtherBody:
    """The idempotency key stands for a job that asked for something else."""


Message = Callable[[JobRecord], bytes]
"""Writes the queue's message of a job by its record, which may have the id of an earlier call with its key."""


class Intake(Protocol):
    """The way of a job into the queue."""

    async def accept(
        self, record: JobRecord, message: Message, *, key: str | None, most_waiting: int
    ) -> Taken | OtherBody:
        """Put a job into the queue and its record into the book; returns once the queue has it for sure.

        The same `key` of the same tenant means the same job: it is put in once, wherever an earlier call was cut off.
        What such a call left half done is finished under its own `job_id`, with the times of this record.
        At `most_waiting` waiting requests it is refused; 0 = no limit.

        Raises:
            QueueFull: with `waiting`. It was not accepted.
            TransportLost, StoreUnavailable: it was not accepted, or that is not known; under the same key it may be
                accepted again without harm.
            NotAccepted: the queue will never take this very message.
        """

    async def backlog(self) -> Backlog:
        """Count what waits.

        Raises:
            TransportLost, StoreUnavailable
        """


class JobBook(Protocol):
    """Records of jobs, shared by all intakes of a queue. Raises `StoreUnavailable`."""

    async def reserve(self, record: JobRecord, key: str | None) -> "Reserved | Standing | OtherBody":
        """Write a record down before the queue is asked; with a key, unless that stands for a job already.

        A job that was reserved `RESERVED_S` ago and not confirmed since is ours to finish: whoever had it is dead.
        """

    async def confirm(self, reserved: "Reserved") -> None:
        """The queue has the job. Writes the record again where it is lost."""

    async def withdraw(self, reserved: "Reserved") -> None:
        """The queue has not got the job from us, for sure: forget it, unless it may have it from another call."""

    async def leave(self, reserved: "Reserved") -> None:
        """It is not known whether the queue has the job: the next call with the key may take it over at once."""

    async def find(self, job_id: str, tenant: str | None = None) -> JobRecord | None:
        """The record of a job, also of one that is only reserved; None where there is none.

        With a `tenant` one of another is not read either: how long it takes must not tell that it is there.
        """

    async def page(self, tenant: str, *, limit: int, after: str | None) -> "Page":
        """The tenant's jobs, newest first, at most `limit`, from behind the cursor `after`.

        Raises:
            ValueError: `after` is no cursor.
        """

    async def deadlines(self, limit: int) -> Sequence[float]:
        """Deadlines ahead of jobs of this queue that have not ended, soonest first, Unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """The record is written, and the job is ours to put into the queue. May be one that another intake left so."""

    record: JobRecord
    key: str | None
    owner: str
    """Whose it is to put in: the `job_id` that this call would have given it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The key stands for this job. `confirmed`: the queue has it; else another intake is about to put it in."""

    record: JobRecord
    confirmed: bool
    left_s: float = 0.0
    """Where it is not confirmed: after this time it is anybody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some jobs of a tenant."""

    records: Sequence[JobRecord]
    after: str | None
    """The cursor of the next page; None at the end. A page may be short, even empty, and yet have a next one."""


def write_cursor(created_at: float, job_id: str) -> str:
    """The place behind a job in a tenant's list."""
    return f"{created_at!r}~{job_id}"


def read_cursor(text: str) -> tuple[float, str]:
    """Undo `write_cursor`.

    Raises:
        ValueError: it is none.
    """
    created_at, _, job_id = text.partition("~")
    try:
        at = float(created_at)
    except ValueError:
        at = math.nan
    if not math.isfinite(at) or not job_id:
        raise ValueError("that is no cursor of a page of jobs")
    return at, job_id


# ---------------------------------------------------------------- webhooks

HOOK_KEPT_S: Final = 3 * 86_400.0
"""How long a webhook is known once it is over: that long its log can be read, and it can be sent again."""

MOST_TRIES_LOGGED: Final = 20
FIRST_LOOK_S: Final = 0.5
LONGEST_LOOK_S: Final = 5.0
"""A job that runs is looked at again after a quarter of its age, within these bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """A webhook whose job has ended, in the hands of one sender for a while."""

    job_id: str
    tenant: str
    url: str
    expires_at: float
    """The job's deadline."""
    tries: int = 0
    """How many tries lie behind it since it was first sent, or since it was replayed."""
    first_try_at: float | None = None
    kept: bool = False
    """An earlier try has left what is sent: the result may be gone by now."""
    lease: int = 0
    """Which taking this is. Where another sender has taken it since, what this one says of it does not count, but for
    its having been delivered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookTry:
    """One line of a webhook's log."""

    at: float
    status_code: int | None
    """What the receiver said; None where it said nothing."""
    detail: str = ""


HookEnd = Literal["delivered", "failed", "disabled"]


class HookBook(Protocol):
    """Webhooks that wait for their job, or for their next try. Raises `StoreUnavailable`.

    A webhook is written down in the step that accepts its job, by the record's `webhook_url`. One whose job's record is
    gone before the job has ended is forgotten, with a line in the log.
    """

    async def due(self, limit: int, lease_s: float) -> Sequence[Hook]:
        """Hooks whose job has ended and whose time has come, at most `limit`; for `lease_s` nobody else gets them."""

    async def hasten(self, job_ids: Sequence[str]) -> None:
        """These jobs have ended: look at them now. Changes nothing for one that is being sent or waits for a try."""

    async def body_of(self, job_id: str) -> bytes | None:
        """What an earlier try has left."""

    async def later(self, hook: Hook, in_s: float, tried: HookTry | None = None, body: bytes | None = None) -> None:
        """Give it back until `in_s` seconds from now; `hook` has the new number of tries. A `body` is kept."""

    async def over(self, hook: Hook, end: HookEnd, tried: HookTry, body: bytes | None = None) -> None:
        """There will be no more tries, unless it is replayed; what is delivered needs no body any more."""

    async def log_of(self, job_id: str) -> "HookLog | None":
        """What happened to a job's webhook; None where it has none."""

    async def replay(self, job_id: str) -> bool:
        """Have it sent again, now, with all its tries before it; False where there is nothing to send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookLog:
    """A webhook and its tries, oldest first."""

    tenant: str
    url: str
    state: Literal["waiting", "delivered", "failed", "disabled"]
    tries: Sequence[HookTry]
    next_try_at: float | None = None
    """None before the job has ended, and once it is over."""
