"""Results, claims and the billing outbox in this process: the same protocol as in Redis, for `dev` and for tests.

Bounded: the oldest results go first, as if their time were over.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from inference_worker.disposition import Token
from inference_worker.errors import StoreUnavailable
from inference_worker.messages import KnownReply, Reply, encode_reply, known_reply
from inference_worker.ports import (
    AlreadyAnswered,
    BelowFloor,
    Claim,
    Claimed,
    ClaimLost,
    OutboxEntry,
    Progress,
    Renewal,
    Renewed,
    RunningElsewhere,
    Stored,
    Write,
)

MOST_RESULTS: Final = 10_000
MOST_BYTES: Final = 256 * 1024 * 1024
MOST_EVENTS: Final = 10_000
LEFT_LYING_S: Final = 60.0
"""After this time an event that was taken and not removed is handed out again."""


@dataclass(slots=True)
class _Lease:
    holder: Token | None = None
    until: float = 0.0
    floor: int = 0
    starts: int = 0
    expires: float = 0.0


@dataclass(slots=True)
class _Result:
    body: bytes
    expires: float


class MemoryStore:
    """The result store of `ports.py`, and its outbox, in dictionaries. Times are Unix seconds of `now`."""

    def __init__(self, *, now: Callable[[], float], lease_s: float, ttl_s: float) -> None:
        self._now = now
        self._lease_s = lease_s
        self._ttl_s = ttl_s
        self._results: dict[str, _Result] = {}
        self._held_bytes = 0
        self._leases: dict[str, _Lease] = {}
        self._told: dict[str, asyncio.Event] = {}
        self._outbox: dict[str, bytes] = {}
        self._taken: dict[str, float] = {}
        """When an event was handed out."""
        self._events = 0
        self.notes: dict[str, bytes] = {}
        self.refused_events: list[tuple[bytes, str]] = []
        self._heeding: list[Callable[[str], None]] = []
        """Told of each cancellation."""
        self.on_end: Callable[[Reply], None] | None = None
        """Told of each terminal result; an intake's book is."""
        self.on_replay: Callable[[str, float], None] | None = None
        """Told of each request that is to begin anew, with its deadline."""
        self.away: str | None = None
        """Why the store cannot be asked; a test sets it, `dev` never does."""

    # ------------------------------------------------------------ ResultStore

    async def claim(self, request_id: str, attempt: int, token: Token, deadline: float) -> Claim:
        """See `ports.ResultStore`."""
        if (known := self._known(request_id)) is not None:
            return known
        lease, now = self._lease(request_id) or _Lease(), self._now()
        if attempt < lease.floor:
            return BelowFloor()
        if lease.holder not in (None, token) and lease.until > now:
            return RunningElsewhere(left_s=lease.until - now)
        if lease.holder != token:
            lease.starts += 1
        lease.holder, lease.until = token, now + self._lease_s
        lease.expires = max(deadline, now) + 2 * self._lease_s + 60
        self._leases[request_id] = lease
        return Claimed(starts=lease.starts)

    async def renew(self, request_id: str, token: Token) -> Renewal:
        """See `ports.ResultStore`."""
        if (known := self._known(request_id)) is not None:
            return known
        lease, now = self._lease(request_id) or _Lease(), self._now()
        if lease.holder not in (None, token) and lease.until > now:
            return ClaimLost()
        lease.holder, lease.until = token, now + self._lease_s
        lease.expires = max(lease.expires, now + 2 * self._lease_s + 60)
        self._leases[request_id] = lease
        return Renewed()

    async def release(self, request_id: str, token: Token, floor: int | None = None) -> None:
        """See `ports.ResultStore`."""
        if self._known(request_id) is not None:
            return
        lease = self._lease(request_id)
        if lease is None:
            if floor is None:
                return
            lease = self._leases[request_id] = _Lease(expires=self._now() + 2 * self._lease_s + 60)
        if lease.holder == token:
            lease.holder = None
            lease.starts = max(lease.starts - 1, 0) if floor is None else 0
        if floor is not None:
            lease.floor = max(lease.floor, floor)

    async def write(self, reply: Reply, usage_event: bytes | None, token: Token) -> Write:
        """See `ports.ResultStore`."""
        return self._finish(reply, usage_event, token, past_token=False)

    async def cancel(self, reply: Reply) -> Write:
        """See `ports.ResultStore`."""
        written = self._finish(reply, None, Token(""), past_token=True)
        for told in tuple(self._heeding):
            told(reply.request_id)
        return written

    async def cancellations(self, until: asyncio.Event, told: Callable[[str], None]) -> None:
        """See `ports.ResultStore`."""
        self._heeding.append(told)
        try:
            await until.wait()
        finally:
            self._heeding.remove(told)

    async def bury(self, request_id: str, note: bytes) -> None:
        """See `ports.ResultStore`."""
        self._ask()
        self.notes[request_id] = note
        while len(self.notes) > MOST_RESULTS:
            self.notes.pop(next(iter(self.notes)))

    async def read(self, request_id: str) -> bytes | None:
        """See `ports.ResultStore`."""
        self._ask()
        result = self._results.get(request_id)
        if result is None:
            return None
        if result.expires <= self._now():
            self._forget(request_id)
            return None
        return result.body

    async def wait(self, request_id: str, within_s: float) -> bytes | None:
        """See `ports.ResultStore`."""
        if (stored := await self.read(request_id)) is not None:
            return stored
        told = self._told.setdefault(request_id, asyncio.Event())
        try:
            async with asyncio.timeout(within_s):
                await told.wait()
        except TimeoutError:
            return None
        return await self.read(request_id)

    async def progress(self, request_id: str) -> Progress:
        """See `ports.ResultStore`."""
        self._ask()
        lease = self._lease(request_id)
        if lease is None:
            return Progress(running=False)
        return Progress(running=lease.holder is not None and lease.until > self._now(), attempts=lease.floor)

    async def probe(self) -> None:
        """See `ports.ResultStore`."""
        self._ask()

    # ------------------------------------------------------------ what replays of dead letters ask

    async def known(self, request_id: str) -> KnownReply | None:
        """What is stored; None where nothing is."""
        answered = self._known(request_id)
        return None if answered is None else answered.reply

    async def dead_note(self, request_id: str) -> bytes | None:
        """What `bury` has noted."""
        self._ask()
        return self.notes.get(request_id)

    async def make_room(self, request_id: str, deadline: float) -> Literal["completed", "running"] | None:
        """Forget a failed result and the claim, so that the request can run anew; None where that was done."""
        known, lease = self._known(request_id), self._lease(request_id)
        if known is not None and known.reply.status == "completed":
            return "completed"
        if known is None and lease is not None and lease.holder is not None and lease.until > self._now():
            return "running"
        self._forget(request_id)
        self._leases.pop(request_id, None)
        if self.on_replay is not None:
            self.on_replay(request_id, deadline)
        return None

    # ------------------------------------------------------------ Outbox

    async def take(self, limit: int) -> Sequence[OutboxEntry]:
        """See `ports.Outbox`."""
        self._ask()
        now = self._now()
        entries = [
            OutboxEntry(entry_id=entry_id, event=event)
            for entry_id, event in self._outbox.items()
            if now - self._taken.get(entry_id, -math.inf) >= LEFT_LYING_S
        ][:limit]
        self._taken.update((entry.entry_id, now) for entry in entries)
        return entries

    async def sent(self, entries: Sequence[OutboxEntry]) -> None:
        """See `ports.Outbox`."""
        self._ask()
        for entry in entries:
            self._outbox.pop(entry.entry_id, None)
            self._taken.pop(entry.entry_id, None)

    async def refused(self, entry: OutboxEntry, reason: str) -> None:
        """See `ports.Outbox`."""
        await self.sent([entry])
        self.refused_events.append((entry.event, reason))
        del self.refused_events[:-MOST_EVENTS]

    async def size(self) -> int:
        """See `ports.Outbox`."""
        self._ask()
        return len(self._outbox)

    # ------------------------------------------------------------

    def _ask(self) -> None:
        if self.away is not None:
            raise StoreUnavailable(self.away)

    def _known(self, request_id: str) -> AlreadyAnswered | None:
        self._ask()
        result = self._results.get(request_id)
        if result is None or result.expires <= self._now():
            return None
        return AlreadyAnswered(reply=known_reply(result.body))

    def _lease(self, request_id: str) -> _Lease | None:
        lease = self._leases.get(request_id)
        return lease if lease is not None and lease.expires > self._now() else None

    def _finish(self, reply: Reply, usage_event: bytes | None, token: Token, *, past_token: bool) -> Write:
        if (known := self._known(reply.request_id)) is not None:
            return known
        lease, now = self._lease(reply.request_id), self._now()
        alive = lease is not None and lease.holder not in (None, token) and lease.until > now
        if reply.status == "failed" and not past_token and alive and lease is not None:
            return RunningElsewhere(left_s=lease.until - now)
        self._forget(reply.request_id)
        body = encode_reply(reply)
        self._results[reply.request_id] = _Result(body, now + self._ttl_s)
        self._held_bytes += len(body)
        if usage_event is not None:
            self._events += 1
            self._outbox[f"{self._events}-0"] = usage_event
        self._leases.pop(reply.request_id, None)
        if (told := self._told.pop(reply.request_id, None)) is not None:
            told.set()
        if self.on_end is not None:
            self.on_end(reply)
        while len(self._results) > MOST_RESULTS or (self._held_bytes > MOST_BYTES and len(self._results) > 1):
            self._forget(next(iter(self._results)))
        self._sweep(now)
        return Stored()

    def _forget(self, request_id: str) -> None:
        if (result := self._results.pop(request_id, None)) is not None:
            self._held_bytes -= len(result.body)

    def _sweep(self, now: float) -> None:
        """Drop what is over at the old end of each book, a few at a time."""
        for book in (self._results, self._leases):
            for request_id in list(book)[:2]:
                if book[request_id].expires <= now:
                    self._forget(request_id) if book is self._results else book.pop(request_id)
        while len(self._told) > MOST_RESULTS:
            self._told.pop(next(iter(self._told))).set()
