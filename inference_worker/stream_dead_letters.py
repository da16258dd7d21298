"""The stream of dead letters, entry by entry: looking holds nothing, and what is put back goes in one step.

An entry has all fields of the one that died, and why (`DIED_OF`); `docs/redis-streams.md` describes them.
Not here: which letters are meant, and what a replay is (`dlq`).
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from inference_worker.job_records import record_key
from inference_worker.messages import LONGEST_TIMEOUT_S
from inference_worker.redis_scripts import PRELUDE, REVIVING, RedisLink, Script
from inference_worker.results.redis import claim_key, record_kept_until_ms, result_key
from inference_worker.transports.hands import Appetite
from inference_worker.transports.stream_entries import (
    ATTEMPT,
    ENQUEUED_AT,
    JOB_ID,
    REQUEST,
    contents_of,
)

NotReplayed = Literal["completed", "running", "gone"]
DIED_OF: Final = frozenset({b"reason", b"detail", b"attempts", b"status_code", b"died_at", b"queue"})
"""What the worker writes into a dead letter besides the fields of the entry that died."""

AT_ONCE: Final = 16
"""Entries of one look, at most; fewer where they are large."""

REPLAY_ENTRY: Final = Script(
    PRELUDE
    + REVIVING
    + """
-- KEYS result, claim, dead letters, stream
-- ARGV id of the dead letter, key of the intake's record, its new deadline, Unix ms until which it is kept, the copy…
local known = answered(KEYS[1])
if known and #known == 1 then return {'COMPLETED'} end
local c = redis.call('HMGET', KEYS[2], 'holder', 'until')
if not known and c[1] and tonumber(c[2]) > millis() then return {'BUSY'} end
if #redis.call('XRANGE', KEYS[3], ARGV[1], ARGV[1]) == 0 then return {'GONE'} end
-- The copy first: where there is no memory for it, a script is not rolled back, and the letter would be lost.
redis.call('XADD', KEYS[4], '*', unpack(ARGV, 5))
redis.call('XDEL', KEYS[3], ARGV[1])
redis.call('DEL', KEYS[1], KEYS[2])
revive(ARGV[2], ARGV[3], tonumber(ARGV[4]))
return {'REPLAYED'}
"""
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamLetter:
    """A dead letter as it was read; the same names as one of RabbitMQ has."""

    entry_id: str
    fields: Mapping[bytes, bytes] = field(repr=False)
    stream: str
    """Where requests come from, for a letter that does not say where it died."""

    @property
    def body(self) -> bytes:
        return self.fields.get(REQUEST, b"")

    @property
    def message_id(self) -> str | None:
        return self._said(JOB_ID) or None

    @property
    def origin(self) -> str:
        """The stream that it died in."""
        return self._said(b"queue") or self.stream

    @property
    def headers(self) -> Mapping[str, object]:
        """What came with the request, and why it died in the names that a dead letter of RabbitMQ has."""
        came = contents_of(
            [part for name, value in self.fields.items() if name not in DIED_OF for part in (name, value)]
        )
        died: dict[str, object] = {
            "x-retry-count": came.attempts,
            "x-dead-reason": self._said(b"reason"),
            "x-dead-detail": self._said(b"detail"),
            "x-dead-attempts": self._whole(b"attempts"),
            "x-dead-status": self._whole(b"status_code"),
        }
        return {**came.headers, **{name: value for name, value in died.items() if value is not None and value != ""}}

    @property
    def deaths(self) -> Sequence[Mapping[str, object]]:
        """Its one death."""
        return [{"queue": self.origin, "reason": self._said(b"reason") or "unknown", "time": self._died_at()}]

    def copied(self, body: bytes, now: float) -> list[bytes]:
        """The fields of a copy that begins anew, one after the other."""
        changed = {ATTEMPT: b"0", ENQUEUED_AT: f"{now:.6f}".encode(), REQUEST: body}
        kept = {name: value for name, value in self.fields.items() if name not in DIED_OF}
        return [part for pair in {**kept, **changed}.items() for part in pair]

    def _said(self, name: bytes) -> str:
        return self.fields.get(name, b"").decode(errors="replace")

    def _whole(self, name: bytes) -> int | None:
        text = self._said(name)
        return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None

    def _died_at(self) -> float:
        """What it says, else when it was written: the id of an entry begins with that, in ms."""
        try:
            said = float(self._said(b"died_at"))
        except ValueError:
            said = math.nan
        return said if math.isfinite(said) else int(self.entry_id.partition("-")[0]) / 1000


class StreamDeadLetters:
    """The letters that are there now, the oldest first. Nothing is held: two who look see the same."""

    at_once: Final = True
    """Making room, putting a copy back and taking the letter away are one step, which `put_back` is."""

    def __init__(
        self, link: RedisLink, *, stream: str, dead_letters: str, ttl_s: float, now: Callable[[], float]
    ) -> None:
        """`ttl_s` is how long a result lives."""
        self._link = link
        self._stream = stream
        self._dead_letters = dead_letters
        self._ttl_s = ttl_s
        self._now = now
        self.ready = 0
        """How many there were at the beginning."""
        self._read: deque[StreamLetter] = deque()
        self._appetite = Appetite()
        self._after = "-"
        self._newest = ""

    async def begin(self) -> None:
        """Look how many there are. All methods raise `StoreUnavailable`."""
        newest = await self._link.do("XREVRANGE", self._dead_letters, "+", "-", "COUNT", 1)
        if newest:
            self._newest = self._letter(*newest[0]).entry_id
            self.ready = int(await self._link.do("XLEN", self._dead_letters))

    async def next(self) -> StreamLetter | None:
        """The next letter; None where there is none. Those that came after the beginning are left out."""
        if not self._read and self._newest:
            count = self._appetite.portion(AT_ONCE)
            rows = await self._link.do("XRANGE", self._dead_letters, self._after, self._newest, "COUNT", count)
            self._read.extend(self._letter(*row) for row in rows)
            if not rows:
                self._newest = ""
        if not self._read:
            return None
        letter = self._read.popleft()
        self._after = f"({letter.entry_id}"
        return letter

    def _letter(self, entry_id: bytes, fields: Sequence[bytes] | Mapping[bytes, bytes]) -> StreamLetter:
        pairs = fields if isinstance(fields, Mapping) else dict(zip(fields[::2], fields[1::2], strict=True))
        self._appetite.saw([sum(len(name) + len(value) for name, value in pairs.items())])
        return StreamLetter(entry_id=entry_id.decode(), fields=pairs, stream=self._stream)

    async def has_queue(self, name: str) -> bool:
        """Whether a stream exists; ours does as soon as something is put into it."""
        return name == self._stream or await self._link.do("TYPE", name) == b"stream"

    async def put_back(self, letter: StreamLetter, body: bytes, queue: str) -> NotReplayed | None:
        """Add a copy that begins anew, and take the letter away: one step, which may be repeated without harm."""
        seen = msgspec.json.decode(body, type=Seen)
        now = self._now()
        deadline = now + seen.lasts_s
        answer = await self._link.run(
            REPLAY_ENTRY,
            [result_key(seen.request_id), claim_key(seen.request_id), self._dead_letters, queue],
            letter.entry_id,
            record_key(seen.request_id),
            repr(deadline),
            record_kept_until_ms(deadline, self._ttl_s),
            *letter.copied(body, now),
        )
        match answer[0]:
            case b"COMPLETED":
                return "completed"
            case b"BUSY":
                return "running"
            case b"GONE":
                return "gone"
            case _:
                return None

    async def take_away(self, letter: StreamLetter) -> None:
        """Remove it."""
        await self._link.do("XDEL", self._dead_letters, letter.entry_id)


class Seen(msgspec.Struct):
    """Of a body that was looked at, and may be no request at all: what a replay needs."""

    request_id: str
    timeout_s: object = 0.0

    @property
    def lasts_s(self) -> float:
        """How long it has; 0 where that is not a number."""
        said = self.timeout_s
        return max(0.0, min(said, LONGEST_TIMEOUT_S)) if isinstance(said, int | float) else 0.0
