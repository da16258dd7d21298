"""Results, claims and the billing outbox in Redis. Every key is listed in `docs/redis.md`."""

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from inference_worker.disposition import Token
from inference_worker.errors import StoreUnavailable
from inference_worker.job_book import KEPT_AFTER_S
from inference_worker.job_records import record_key
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
from inference_worker.redis_scripts import (
    CLAIM,
    FINISH,
    FINISH_IN_SLOT,
    PROBE,
    PROGRESS,
    REFUSED,
    RELEASE,
    RENEW,
    REPLAY,
    SENT,
    RedisCommands,
)
from inference_worker.redis_slots import slot_of, tag_of
from inference_worker.results.notifications import Notifications
from inference_worker.timing import quietly, stopped_within

ReplayRefused = Literal["completed", "running"]
CANCELLED: Final = "infer_cancel"
"""The channel on which the ids of cancelled requests are said."""

DEAD_NOTE_TTL_S: Final = 30 * 86_400
MOST_REFUSED: Final = 1_000_000
BILLING_GROUP: Final = "billing"
HAND_OVER_S: Final = 2.0
LEFT_LYING_MS: Final = 60_000
"""After this time another sender takes over an event that one has taken and not removed."""


def result_key(request_id: str) -> str:
    """Where the terminal result lies."""
    return f"infer_resp:{request_id}"


def claim_key(request_id: str) -> str:
    """Where the claim lies: in the result's slot of a Cluster, whether or not the id has a hash tag of its own."""
    if "{" in request_id and re.search(r"\{[^}]+\}", request_id):
        # A colon more, or the claim of an id that reads like another's key would be the other's.
        colon = ":" if request_id.lstrip(":").startswith("{infer_resp:") else ""
        return f"infer_claim:{colon}{request_id}"
    return f"infer_claim:{{{result_key(request_id)}}}"


def slot_keys(request_id: str) -> list[str]:
    """Result, claim and owed usage event of a request, as a Cluster has them: in one slot, whatever the id is."""
    result, claim = result_key(request_id), claim_key(request_id)
    if slot_of(claim) != slot_of(result):
        claim = f"infer_claim_at:{{{tag_of(result)}}}:{request_id}"
    return [result, claim, claim.replace("infer_claim", "infer_owed", 1)]


def record_kept_until_ms(deadline: float, ttl_s: float) -> int:
    """When an intake's record of a job with this deadline goes."""
    return round((deadline + ttl_s + KEPT_AFTER_S) * 1000)


def probe_key(deployment_id: str, asker: str) -> str:
    """What is written to know whether scripts may write; without an opening brace, so that it is no request's claim."""
    return f"infer_claim:probe:{deployment_id}:{asker}".replace("{", "(")


class RedisStore:
    """The result store of `ports.py` in one Redis, or in a Cluster.

    In a Cluster (`clustered`) a usage event is stored beside its result, in the same step, and goes to the outbox in
    the next: whoever acknowledges the request's message sees to it where that was not done.
    """

    def __init__(
        self,
        link: RedisCommands,
        *,
        deployment_id: str,
        replica_id: str,
        lease_s: float,
        ttl_s: float,
        notifications: Notifications | None = None,
        clustered: bool = False,
    ) -> None:
        self._link = link
        self._notifications = notifications
        self._clustered = clustered
        self._outbox = f"infer_usage:{deployment_id}"
        self._probe = probe_key(deployment_id, replica_id)
        self._lease_ms = round(lease_s * 1000)
        self._ttl_s = max(round(ttl_s), 1)

    async def claim(self, request_id: str, attempt: int, token: Token, deadline: float) -> Claim:
        """See `ports.ResultStore`."""
        answer = await self._link.run(
            CLAIM, self._keys(request_id), attempt, token, self._lease_ms, round(deadline * 1000)
        )
        match answer[0]:
            case b"CLAIMED":
                return Claimed(starts=int(answer[1]))
            case b"SUPERSEDED":
                return BelowFloor()
            case b"BUSY":
                return RunningElsewhere(left_s=int(answer[1]) / 1000)
            case _:
                return _answered(answer)

    async def renew(self, request_id: str, token: Token) -> Renewal:
        """See `ports.ResultStore`."""
        answer = await self._link.run(RENEW, self._keys(request_id), token, self._lease_ms)
        match answer[0]:
            case b"OK":
                return Renewed()
            case b"LOST":
                return ClaimLost()
            case _:
                return _answered(answer)

    async def release(self, request_id: str, token: Token, floor: int | None = None) -> None:
        """See `ports.ResultStore`."""
        await self._link.run(RELEASE, self._keys(request_id), token, "" if floor is None else floor, self._lease_ms)

    async def write(self, reply: Reply, usage_event: bytes | None, token: Token) -> Write:
        """See `ports.ResultStore`."""
        return await self._finish(reply, usage_event or b"", token, "")

    async def cancel(self, reply: Reply) -> Write:
        """See `ports.ResultStore`."""
        written = await self._finish(reply, b"", Token(""), "1")
        # Also where it is said again: an answer that got lost may have taken its hint along. Without it, whoever runs
        # the request finds out at its next renewal.
        with contextlib.suppress(StoreUnavailable):
            await self._link.do("PUBLISH", CANCELLED, reply.request_id)
        return written

    async def cancellations(self, until: asyncio.Event, told: Callable[[str], None]) -> None:
        """See `ports.ResultStore`."""
        if self._notifications is None:
            await until.wait()
            return
        with self._notifications.hearing(CANCELLED, told):
            await until.wait()

    async def bury(self, request_id: str, note: bytes) -> None:
        """See `ports.ResultStore`."""
        await self._link.do("SET", f"infer_dead:{request_id}", note, "EX", DEAD_NOTE_TTL_S)

    async def read(self, request_id: str) -> bytes | None:
        """See `ports.ResultStore`."""
        stored = await self._link.do("GET", result_key(request_id))
        return stored if isinstance(stored, bytes) else None

    async def wait(self, request_id: str, within_s: float) -> bytes | None:
        """See `ports.ResultStore`. Without notifications it looks more and more rarely, down to five times a second."""
        if self._notifications is not None:
            return await self._notifications.wait(result_key(request_id), within_s)
        over = asyncio.Event()
        until = asyncio.get_running_loop().time() + within_s
        for turn in itertools.count():
            if (stored := await self.read(request_id)) is not None:
                return stored
            left_s = until - asyncio.get_running_loop().time()
            if left_s <= 0:
                break
            await stopped_within(over, min(0.02 * 1.5 ** min(turn, 10), 0.2, left_s))
        return None

    async def make_room(self, request_id: str, deadline: float) -> ReplayRefused | None:
        """Forget a failed result and the claim, so that the request can run anew; None where that was done."""
        record = (record_key(request_id), repr(deadline), record_kept_until_ms(deadline, self._ttl_s))
        answer = await self._link.run(REPLAY, self._keys(request_id), *record)
        match answer[0]:
            case b"COMPLETED":
                return "completed"
            case b"BUSY":
                return "running"
            case _:
                return None

    async def known(self, request_id: str) -> KnownReply | None:
        """What is stored, without the answer, which may be large; None where nothing is."""
        head = await self._link.do("GETRANGE", result_key(request_id), 0, 63)
        if not head:
            return None
        if bytes(head).startswith((b'{"status":"completed"', b'{"status": "completed"')):
            return KnownReply(status="completed", status_code=200)
        stored = await self.read(request_id)
        return None if stored is None else known_reply(stored)

    async def dead_note(self, request_id: str) -> bytes | None:
        """What `bury` has noted."""
        note = await self._link.do("GET", f"infer_dead:{request_id}")
        return note if isinstance(note, bytes) else None

    async def progress(self, request_id: str) -> Progress:
        """See `ports.ResultStore`."""
        running, attempts = await self._link.run(PROGRESS, self._keys(request_id)[1:])
        return Progress(running=bool(running), attempts=int(attempts))

    async def probe(self) -> None:
        """See `ports.ResultStore`."""
        await self._link.run(PROBE, [self._probe])

    def _keys(self, request_id: str) -> list[str]:
        return slot_keys(request_id)[:2] if self._clustered else [result_key(request_id), claim_key(request_id)]

    async def _finish(self, reply: Reply, event: bytes, token: Token, past_token: str) -> Write:
        body = encode_reply(reply)
        if self._clustered:
            keys = slot_keys(reply.request_id)
            answer = await self._link.run(
                FINISH_IN_SLOT, keys, token, body, self._ttl_s, reply.status, event, past_token
            )
            if event and answer[0] == b"STORED":
                # Not now: it is owed, and sent by whoever acknowledges the message.
                await quietly(hand_over(self._link, keys[2], self._outbox, event), HAND_OVER_S, StoreUnavailable)
        else:
            keys = [*self._keys(reply.request_id), self._outbox]
            job = record_key(reply.request_id)
            answer = await self._link.run(FINISH, keys, token, body, self._ttl_s, reply.status, event, past_token, job)
        match answer[0]:
            case b"STORED":
                return Stored()
            case b"BUSY":
                return RunningElsewhere(left_s=int(answer[1]) / 1000)
            case _:
                return _answered(answer)


async def hand_over(link: RedisCommands, owed: str, outbox: str, event: bytes) -> None:
    """Put an event that is owed on a Cluster into the outbox, then forget that it is. Repeated, it is there twice.

    Raises `StoreUnavailable`.
    """
    await link.do("XADD", outbox, "*", "event", event)
    await link.do("DEL", owed)


class RedisOutbox:
    """The outbox of `ports.py`: a stream of usage events, read through one group by all replicas."""

    def __init__(self, link: RedisCommands, *, deployment_id: str, replica_id: str, clustered: bool = False) -> None:
        self._link = link
        self._clustered = clustered
        self._stream = f"infer_usage:{deployment_id}"
        self._refused = f"infer_usage_refused:{deployment_id}"
        self._consumer = replica_id
        self._has_group = False
        self._own_after: str | None = "0"
        """From where what this replica took before it was started anew is read again; None once there is no more."""

    async def take(self, limit: int) -> Sequence[OutboxEntry]:
        """See `ports.Outbox`."""
        try:
            await self._ensure_group()
            left = await self._link.do(
                "XAUTOCLAIM", self._stream, BILLING_GROUP, self._consumer, LEFT_LYING_MS, "0-0", "COUNT", limit
            )
            entries = _entries(left[1])
            if self._own_after is not None and len(entries) < limit:
                entries += await self._own(limit - len(entries), {entry.entry_id for entry in entries})
            if len(entries) < limit:
                new = await self._link.do(
                    "XREADGROUP", "GROUP", BILLING_GROUP, self._consumer, "COUNT", limit - len(entries),
                    "STREAMS", self._stream, ">",
                )  # fmt: skip
                entries += _entries(_only_stream(new))
        except StoreUnavailable as exc:
            self._has_group = False  # It may have gone with the stream: FLUSHALL, DEL.
            if "NOGROUP" in str(exc):
                return []
            raise
        return entries

    async def _own(self, limit: int, seen: set[str]) -> list[OutboxEntry]:
        """Entries that this replica had taken when it died: they need not wait for their minute."""
        own = await self._link.do(
            "XREADGROUP", "GROUP", BILLING_GROUP, self._consumer, "COUNT", limit,
            "STREAMS", self._stream, self._own_after or "0",
        )  # fmt: skip
        rows = _only_stream(own)
        # Over once it is not full: what is taken from now on would be found again, too.
        self._own_after = rows[-1][0].decode() if len(rows) == limit else None
        return [entry for entry in _entries(rows) if entry.entry_id not in seen]

    async def sent(self, entries: Sequence[OutboxEntry]) -> None:
        """See `ports.Outbox`."""
        if entries:
            await self._link.run(SENT, [self._stream], BILLING_GROUP, *(entry.entry_id for entry in entries))

    async def refused(self, entry: OutboxEntry, reason: str) -> None:
        """See `ports.Outbox`."""
        if self._clustered:
            fields = ("event", entry.event, "reason", reason[:500])
            await self._link.do("XADD", self._refused, "MAXLEN", "~", MOST_REFUSED, "*", *fields)
            await self.sent([entry])
            return
        keys = [self._stream, self._refused]
        await self._link.run(REFUSED, keys, BILLING_GROUP, entry.entry_id, entry.event, reason[:500], MOST_REFUSED)

    async def size(self) -> int:
        """See `ports.Outbox`."""
        return int(await self._link.do("XLEN", self._stream))

    async def _ensure_group(self) -> None:
        if self._has_group:
            return
        try:
            await self._link.do("XGROUP", "CREATE", self._stream, BILLING_GROUP, "0", "MKSTREAM")
        except StoreUnavailable as exc:
            if "BUSYGROUP" not in str(exc):
                raise
        self._has_group = True


def _answered(answer: Sequence[Any]) -> AlreadyAnswered:
    if len(answer) > 1:
        return AlreadyAnswered(reply=known_reply(bytes(answer[1])))
    return AlreadyAnswered(reply=KnownReply(status="completed", status_code=200))


def _only_stream(answer: Any) -> Any:
    """XREADGROUP's entries of its one stream: a list of pairs in RESP2, a map in RESP3."""
    if not answer:
        return []
    return next(iter(answer.values())) if isinstance(answer, dict) else answer[0][1]


def _entries(rows: Any) -> list[OutboxEntry]:
    entries = []
    for entry_id, fields in rows or []:
        if not fields:  # Deleted meanwhile.
            continue
        pairs = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
        entries.append(OutboxEntry(entry_id=entry_id.decode(), event=pairs.get(b"event", b"")))
    return entries
