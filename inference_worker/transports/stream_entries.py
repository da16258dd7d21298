"""Entries of the request stream as values: names of keys, fields, and what a delivery is made of. Pure.

An entry's fields: `job_id`, `attempt` (0 first), `enqueued_at` (Unix seconds) and `request`; all others are headers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

MOST_ATTEMPTS: Final = 2**31 - 1
MOST_FIELDS: Final = 1000
"""So many fields of an entry are kept over a retry: a script cannot pass on any number of them."""

RETURNED: Final = "returned"
"""The consumer that entries are given back to. Nobody reads by this name: every worker takes from it first."""

REQUEST, JOB_ID, ATTEMPT, ENQUEUED_AT = b"request", b"job_id", b"attempt", b"enqueued_at"
_OURS: Final = (REQUEST, JOB_ID, ATTEMPT, ENQUEUED_AT)
_WHOLE: Final = re.compile(rb"[0-9]{1,10}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamNames:
    """A queue's stream, its group, and the stream of its dead letters."""

    stream: str
    group: str
    dead_letters: str


def delayed_key(stream: str) -> str:
    """The sorted set of retries that wait for their time, by the millisecond at which they are due."""
    return f"{stream}:delayed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry as it was read."""

    entry_id: str
    count: int
    """How often it was delivered, this time included: part of the right to settle it."""
    fields: tuple[bytes, ...]
    """Names and values by turns."""

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return sum(map(len, self.fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What an entry says."""

    body: bytes
    """Empty where there is no `request`: that is no request, and is dead-lettered as such."""
    message_id: str | None
    attempts: int
    headers: Mapping[str, object]
    odd_attempt: bool
    """Its `attempt` is no whole number of 0 to 2**31-1, and counts as 0."""


def entry_fields(
    body: bytes, message_id: str | None, *, enqueued_at: float, headers: Mapping[str, object] | None = None
) -> list[bytes]:
    """The fields of a new entry, as XADD wants them. Headers are written as text; ours are not overwritten by them."""
    fields = [ATTEMPT, b"0", ENQUEUED_AT, f"{enqueued_at:.6f}".encode(), REQUEST, body]
    if message_id is not None:
        fields = [JOB_ID, message_id.encode(), *fields]
    for name, value in (headers or {}).items():
        if name.encode() not in _OURS:
            fields += [name.encode(), value if isinstance(value, bytes) else str(value).encode()]
    return fields


def contents_of(fields: Sequence[bytes]) -> Contents:
    """Read an entry. Nothing in it is an error: what is no request is for the processor to say."""
    named = dict(zip(fields[::2], fields[1::2], strict=True))
    attempt = named.get(ATTEMPT, b"0")
    usable = _WHOLE.fullmatch(attempt) is not None and int(attempt) <= MOST_ATTEMPTS
    job_id = named.get(JOB_ID)
    return Contents(
        body=named.get(REQUEST, b""),
        message_id=None if job_id is None else _id(job_id),
        attempts=int(attempt) if usable else 0,
        headers={_text(name): _text(value) for name, value in named.items() if name not in _OURS},
        odd_attempt=not usable,
    )


def copy_of(fields: Sequence[bytes], attempts: int) -> list[bytes]:
    """The fields of a copy: the same, in the same order, but for the attempt."""
    kept = _without(fields, (ATTEMPT,))
    return [ATTEMPT, str(attempts).encode(), *kept]


def letter_of(fields: Sequence[bytes], notes: Mapping[bytes, bytes]) -> list[bytes]:
    """The fields of a dead letter: the entry's, as they are, and what became of it."""
    return [*_without(fields, tuple(notes)), *(part for pair in notes.items() for part in pair)]


def parsed(rows: Any) -> list[Entry]:
    """Entries as XREADGROUP gives them: delivered for the first time. What was deleted meanwhile is left out."""
    return [Entry(entry_id=_text(row[0]), count=1, fields=_flat(row[1])) for row in rows or [] if row and row[1]]


def of_stream(answer: Any) -> Any:
    """XREADGROUP's rows of its one stream: a list of pairs in RESP2, a map in RESP3."""
    if not answer:
        return []
    return next(iter(answer.values())) if isinstance(answer, dict) else answer[0][1]


def taken_over(rows: Any) -> list[Entry]:
    """Entries as the script `TAKE` gives them: with how often they were delivered."""
    return [Entry(entry_id=_text(row[0]), count=int(row[1]), fields=_flat(row[2])) for row in rows]


def _flat(fields: Any) -> tuple[bytes, ...]:
    if isinstance(fields, dict):
        return tuple(part for pair in fields.items() for part in pair)
    return tuple(fields)


def _without(fields: Sequence[bytes], names: Sequence[bytes]) -> list[bytes]:
    """The fields but for some; of too many, the request and the job's id are kept for sure."""
    pairs = [pair for pair in zip(fields[::2], fields[1::2], strict=True) if pair[0] not in names]
    if len(pairs) > MOST_FIELDS:
        pairs = sorted(pairs, key=lambda pair: pair[0] not in _OURS)[:MOST_FIELDS]
    return [part for pair in pairs for part in pair]


def _id(value: bytes) -> str | None:
    """An answer goes under this very id or under none: two that are no text must not become one."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
