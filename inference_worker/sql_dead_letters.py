"""The dead letters of a queue in Postgres: rows of a table, which go back into the queue in one transaction.

A letter is the request that died. One in an envelope becomes a new submission, with a token of its own; one in our own
format begins anew under its id.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from inference_worker.llmd_messages import without_payload, write_envelope
from inference_worker.llmd_renewed import envelope_in
from inference_worker.messages import LONGEST_TIMEOUT_S
from inference_worker.producer_requests import payload_key
from inference_worker.results.sql import row_id
from inference_worker.sql_link import SqlLink
from inference_worker.stream_dead_letters import NotReplayed
from inference_worker.transports.sorted_set_members import own_score
from inference_worker.transports.sql_members import headers_in, whole

AT_ONCE: Final = 64
"""Letters of one look, at most."""

AT_ONCE_BYTES: Final = 16 * 1024 * 1024
"""And their bytes: a larger letter comes alone. One answer with all of them could be longer than one waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlLetter:
    """A dead letter as `dlq` has it."""

    seq: int
    queue: str
    body: bytes = field(repr=False)
    """The whole message: an envelope has its payload in it again."""
    message_id: str | None
    came_with: Mapping[str, object] = field(repr=False)
    attempts: int
    note: Mapping[str, object]
    died_at: float

    @property
    def origin(self) -> str:
        """The queue that it died in."""
        return self.queue

    @property
    def headers(self) -> Mapping[str, object]:
        """What came with the request, and why it died in the names that a dead letter of RabbitMQ has."""
        died = {
            "x-retry-count": self.attempts,
            "x-dead-reason": self.note.get("reason"),
            "x-dead-detail": self.note.get("detail"),
            "x-dead-attempts": self.note.get("attempts"),
            "x-dead-status": self.note.get("status_code"),
        }
        return {**self.came_with, **{name: value for name, value in died.items() if value not in (None, "")}}

    @property
    def deaths(self) -> Sequence[Mapping[str, object]]:
        """Its one death."""
        reason = self.note.get("reason") or "unknown"
        return [{"queue": self.queue, "reason": reason, "time": self.note.get("dead_at") or self.died_at}]


class SqlDeadLetters:
    """The letters that are there now, the oldest first. Nothing is held: two who look see the same."""

    at_once: Final = True
    """Making room, putting a copy back and taking the letter away are one step, which `put_back` is."""

    def __init__(self, link: SqlLink, *, queue: str, now: Callable[[], float]) -> None:
        self._link = link
        self._queue = queue
        self._now = now
        self.ready = 0
        """How many there were at the beginning."""
        self._read: deque[SqlLetter] = deque()
        self._after = 0
        self._newest = 0

    async def begin(self) -> None:
        """Look how many there are. All methods raise `StoreUnavailable`."""
        self.ready, newest = await self._link.row(
            "select count(*), max(seq) from iw_dead where queue = $1", self._queue
        )
        self._newest = newest or 0

    async def next(self) -> SqlLetter | None:
        """The next letter; None where there is none. Those that came after the beginning are left out."""
        if not self._read:
            rows = await self._link.fetch(
                "with next as (select seq, octet_length(body) + coalesce(octet_length(payload), 0) as size from iw_dead"
                " where queue = $1 and seq > $2 and seq <= $3 order by queue, seq limit $4),"
                " sums as (select seq, size, sum(size) over (order by seq) as until_here from next)"
                " select d.*, extract(epoch from d.died_at)::double precision as died from sums s"
                " join iw_dead d on d.seq = s.seq where s.until_here <= $5 or s.until_here = s.size order by d.seq",
                *(self._queue, self._after, self._newest, AT_ONCE, AT_ONCE_BYTES),
            )
            self._read.extend(_letter(row) for row in rows)
        if not self._read:
            return None
        letter = self._read.popleft()
        self._after = letter.seq
        return letter

    async def has_queue(self, name: str) -> bool:
        """Whether it is a queue; ours is as soon as something is put into it."""
        rows = await self._link.fetch("select 1 from iw_requests where queue = $1 limit 1", name)
        return name == self._queue or bool(rows)

    async def put_back(self, letter: SqlLetter, body: bytes, queue: str) -> NotReplayed | None:
        """Add a copy that begins anew, and take the letter away: one step, which may be repeated without harm."""
        envelope = envelope_in(body)
        if envelope is None:
            seen, now = msgspec.json.decode(body, type=_Seen), self._now()
            deadline = min(own_score(body, now), now + LONGEST_TIMEOUT_S)
            said = await self._revived(
                letter, queue, "", f"letter-{letter.seq}", deadline, body, row_id(seen.request_id)
            )
        else:
            request_id, token = envelope.request.id, envelope.routing.request_token
            apart, _ = without_payload(envelope, payload_key(request_id, token))
            deadline = float(envelope.request.deadline)
            said = await self._revived(letter, queue, request_id, token, deadline, write_envelope(apart), None)
        match said:
            case "COMPLETED":
                return "completed"
            case "BUSY":
                return "running"
            case "GONE":
                return "gone"
            case _:
                return None

    async def take_away(self, letter: SqlLetter) -> None:
        """Remove it."""
        await self._link.fetch("delete from iw_dead where seq = $1", letter.seq)

    async def _revived(
        self,
        letter: SqlLetter,
        queue: str,
        request_id: str,
        token: str,
        deadline: float,
        body: bytes,
        own: bytes | None,
    ) -> str:
        (said,) = await self._link.row(
            "select iw1_revive($1, $2, $3, $4, $5, $6, $7)",
            *(letter.seq, queue, request_id, token, deadline, body, own),
        )
        return str(said)


def _letter(row: Any) -> SqlLetter:
    try:
        note = msgspec.json.decode(row["note"], type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        note = {}
    return SqlLetter(
        seq=row["seq"],
        queue=row["queue"],
        body=whole(row["body"], row["payload"]),
        message_id=row["message_id"] or row["request_id"] or None,
        came_with=headers_in(row["headers"]),
        attempts=row["attempts"],
        note=note,
        died_at=row["died"],
    )


class _Seen(msgspec.Struct):
    """Of a body that was looked at: what a replay needs."""

    request_id: str
    timeout_s: float = 0.0
