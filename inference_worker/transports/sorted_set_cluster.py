"""How a claim of a queue on a Cluster is settled: in steps, as what a request touches lies in several slots.

The queue and all its bookkeeping share a slot, so that taking, giving back, retrying and acknowledging are one script
each, as everywhere. Result, claim and usage event of a request share another. The list of results, the outbox, the
keys of a producer and payloads lie anywhere.

The order is what makes it safe, and never changes: whether the claim is ours; the result, and beside it the usage event
that is owed; the message in its list and the event in the outbox; the end of the producer's keys; the note that all was
sent; the end of the claim; last that of the payload. Who dies between two of them leaves a claim: whoever takes it
finds the result and goes on from there. A message that was put into its list leaves a mark there for as long as that
may take, so that it is not put there twice.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from inference_worker.disposition import Hold
from inference_worker.errors import MalformedRequest, StoreUnavailable
from inference_worker.llmd_messages import OwnMessage, read_member
from inference_worker.messages import Reply, encode_reply
from inference_worker.redis_scripts import FINISH_IN_SLOT, PRELUDE, RedisCommands, Script
from inference_worker.redis_slots import beside
from inference_worker.results.redis import DEAD_NOTE_TTL_S, hand_over, slot_keys
from inference_worker.timing import quietly
from inference_worker.transports.sorted_set_members import (
    ACTIVE,
    CANCELS,
    Claim,
    SortedSetQueue,
    sent,
    stored_reply,
)
from inference_worker.transports.sorted_set_scripts import BRING, COPY, FENCE, PUSHED, SETTLE

log = structlog.get_logger(__name__)

COURTESY_S: Final = 2.0
"""How long what nothing depends on may take."""

MARKED_FOR_S: Final = 60.0
"""So much longer than two leases it is known that a message was put into its list."""

MOST_BROUGHT: Final = 100
LENT_FOR_S: Final = 30.0
"""How long a retry that is being brought back is nobody else's to bring."""

PUSH: Final = Script(
    """
-- KEYS list, mark   ARGV message, ttl of the list or 0, ttl of the mark
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('LPUSH', KEYS[1], ARGV[1])
if tonumber(ARGV[2]) > 0 then redis.call('EXPIRE', KEYS[1], ARGV[2]) end
-- Not before: marked and not put there, it would be lost.
redis.call('SET', KEYS[2], '', 'EX', ARGV[3])
return 1
"""
)
"""A result's message into its list, unless it was put there a short while ago."""

OWED: Final = Script(
    """
-- KEYS result, claim, owed   ARGV how a sent result ends
local event = redis.call('GET', KEYS[3]) or ''
if redis.call('GETRANGE', KEYS[1], -#ARGV[1], -1) == ARGV[1] then return {'', event} end
return {redis.call('GET', KEYS[1]) or '', event}
"""
)
"""A stored result that was not sent, and its usage event."""

SENT: Final = Script(
    """
-- KEYS result, claim, owed   ARGV the result as one that is sent, or ''
if ARGV[1] ~= '' and redis.call('EXISTS', KEYS[1]) == 1 then redis.call('SET', KEYS[1], ARGV[1], 'KEEPTTL') end
redis.call('DEL', KEYS[3])
return 1
"""
)
"""The note that message and event are where they belong."""

FORGET: Final = Script(
    """
-- KEYS key   ARGV token
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""
)
"""A key of this submission goes; a newer one under the same id keeps its own."""

UNHOLD: Final = Script(
    PRELUDE
    + """
-- KEYS result, claim   ARGV token of the hold, attempts of the copy, lease of the hold in ms
local known = answered(KEYS[1])
if known then return known end
local c = redis.call('HMGET', KEYS[2], 'holder', 'until', 'floor')
local now = millis()
if c[1] and c[1] ~= ARGV[1] and tonumber(c[2]) > now then return {'BUSY', tonumber(c[2]) - now} end
if redis.call('EXISTS', KEYS[2]) == 1 then
  redis.call('HDEL', KEYS[2], 'holder', 'until')
  -- A copy that is no attempt (a gate was closed) is no news of those who died while running it.
  if tonumber(ARGV[2]) > tonumber(c[3] or '0') then redis.call('HSET', KEYS[2], 'starts', 0) end
  if redis.call('EXISTS', KEYS[2]) == 1 then keep_for(KEYS[2], 2 * tonumber(ARGV[3]) + 60000) end
end
return {'OK'}
"""
)
"""What of a retry comes before the copy: whoever takes that must not find the request held."""

FLOOR: Final = Script(
    PRELUDE
    + """
-- KEYS result, claim   ARGV attempts of the copy, lease of the hold in ms
if redis.call('EXISTS', KEYS[1]) == 1 then return 1 end
if tonumber(ARGV[1]) > tonumber(redis.call('HGET', KEYS[2], 'floor') or '0') then
  redis.call('HSET', KEYS[2], 'floor', ARGV[1])
  keep_for(KEYS[2], 2 * tonumber(ARGV[2]) + 60000)
end
return 1
"""
)
"""What comes after it: earlier attempts are over. Before it, the original would be taken for superseded, and lost."""

LEND: Final = Script(
    """
-- KEYS retries   ARGV most, s for which they are lent
local t = redis.call('TIME')
local now = tonumber(t[1]) + tonumber(t[2]) / 1000000
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
for _, member in ipairs(due) do redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), member) end
return due
"""
)
"""Retries that are due, for one to bring back to their queues; they stay until that is done."""

Right = tuple[bytes, str]
"""A claim, and whose it is if it is ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a request ends."""

    reply: Reply
    token: str
    """Of the hold."""
    event: bytes
    """Its usage event; empty where there is none."""
    note: bytes
    """Why it is dead; empty where it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owed:
    """What is stored and not sent."""

    generation: str
    """What it is stored by."""
    reply: Reply | None
    """None where nothing goes to a list."""
    event: bytes


class AcrossSlots:
    """The steps of one session. Answers are those of the scripts that do the same where there is one server.

    `link` leads to the server that has the queue, `cluster` to all. Every method raises `StoreUnavailable`: then some
    of the steps were done, and it may be asked for again.
    """

    def __init__(
        self,
        link: RedisCommands,
        cluster: RedisCommands,
        queue: SortedSetQueue,
        *,
        outbox: str,
        lease_s: float,
        hold_ms: int,
        ttl_s: int,
    ) -> None:
        self._link = link
        self._cluster = cluster
        self._queue = queue
        self._keys = queue.keys
        self._outbox = outbox
        self._lease_s = lease_s
        self._hold_ms = hold_ms
        self._ttl_s = ttl_s
        self._mark_s = round(2 * lease_s + MARKED_FOR_S)

    # ------------------------------------------------------------ settling

    async def conclude(
        self, right: Right, claim: Claim, ending: Ending, letter: Sequence[str | bytes]
    ) -> Sequence[Any]:
        """As `CONCLUDE`. Who is late stores its result all the same; it is not sent by it."""
        reply = ending.reply
        keys = slot_keys(reply.request_id)
        fence, stored = await _all(
            self._fence(right, claim),
            self._cluster.run(
                FINISH_IN_SLOT,
                keys,
                *(ending.token, encode_reply(reply), self._ttl_s, reply.status, ending.event, ""),
            ),
        )
        if stored[0] != b"STORED":
            return list(stored)
        if ending.note:
            noting = self._cluster.do("SET", f"infer_dead:{reply.request_id}", ending.note, "EX", DEAD_NOTE_TTL_S)
            await quietly(noting, COURTESY_S, StoreUnavailable)
        if fence != b"OURS":
            if ending.event:
                await hand_over(self._cluster, keys[2], self._outbox, ending.event)
            return [b"STORED", fence]
        owed = Owed(generation=reply.request_id, reply=reply if claim.result_list else None, event=ending.event)
        return [b"STORED", await self._end(right, claim, owed, letter)]

    async def acknowledge(self, right: Right, claim: Claim, letter: Sequence[str | bytes]) -> bytes:
        """As `SETTLE`, and again where a result is owed."""
        generation = claim.generation if claim.result_list else claim.taken.entry_id
        keys = slot_keys(generation)
        fence, (stored, event) = await _all(self._fence(right, claim), self._cluster.run(OWED, keys, PUSHED))
        if fence != b"OURS":
            if event:
                await hand_over(self._cluster, keys[2], self._outbox, bytes(event))
            return bytes(fence)
        reply = stored_reply(generation, bytes(stored)) if stored and claim.result_list else None
        owed = Owed(generation=generation, reply=reply, event=bytes(event))
        return await self._end(right, claim, owed, letter)

    async def retry(self, right: Right, claim: Claim, hold: Hold, attempts: int, delay_s: float) -> Sequence[Any]:
        """As `RETRY`."""
        keys = slot_keys(hold.request_id)[:2]
        freed = await self._cluster.run(UNHOLD, keys, hold.token, attempts, self._hold_ms)
        if freed[0] == b"BUSY":
            # Of who took it after a copy of ours whose answer was lost, perhaps.
            fence = await self._fence(right, claim)
            return list(freed) if fence == b"OURS" else [fence]
        if freed[0] != b"OK":
            return list(freed)
        envelope = "1" if claim.envelope is not None else "0"
        said = await self._link.run(COPY, self._keys, *right, "", attempts, 0, delay_s, claim.copy(attempts), envelope)
        # Without it an older copy of the same request would be run once more, if there were one.
        await quietly(self._cluster.run(FLOOR, keys, attempts, self._hold_ms), COURTESY_S, StoreUnavailable)
        return list(said)

    async def _end(self, right: Right, claim: Claim, owed: Owed, letter: Sequence[str | bytes]) -> bytes:
        """Send what is owed, note that it was sent, and end the claim."""
        keys, token, reply = slot_keys(owed.generation), claim.taken.token, owed.reply
        sending: list[Awaitable[Any]] = []
        if owed.event:
            sending.append(self._cluster.do("XADD", self._outbox, "*", "event", owed.event))
        if reply is not None:
            to = [claim.result_list, beside(claim.result_list, f"sent:{owed.generation}")]
            sending.append(self._cluster.run(PUSH, to, claim.message(reply), claim.result_ttl_s, self._mark_s))
        await _all(*sending)
        # Before the note: what is noted as sent is not looked at again.
        if reply is not None and token:
            names = (ACTIVE + claim.request_id, CANCELS + claim.request_id)
            await _all(*(self._cluster.run(FORGET, [name], token) for name in names))
        if reply is not None or owed.event:
            await self._cluster.run(SENT, keys, b"" if reply is None else sent(reply))
        said = await self._link.run(SETTLE, self._keys, *right, PUSHED, "", 0, "", "", *letter)
        if said[0] == b"DONE" and reply is not None and token and claim.lies_apart:
            # Not before: whoever took it again would find its payload gone, and not look at how it ended. It expires.
            await quietly(self._cluster.do("DEL", claim.payload_key), COURTESY_S, StoreUnavailable)
        return bytes(said[0])

    async def _fence(self, right: Right, claim: Claim) -> bytes:
        said = await self._link.run(FENCE, self._keys, *right, self._lease_s, claim.taken.score)
        return bytes(said[0])

    # ------------------------------------------------------------ what lies elsewhere

    async def payloads(self, refs: Sequence[str]) -> Mapping[str, bytes | None]:
        """What lies apart."""
        return dict(zip(refs, await _all(*(self._cluster.do("GET", ref) for ref in refs)), strict=True))

    async def cancelled(self, claims: Sequence[Claim]) -> set[bytes]:
        """The ids of those that their producers have cancelled. Who cannot be asked for is taken not to be."""
        asked = [claim for claim in claims if claim.cancel_key]
        found = await _all(*(self._is_cancelled(claim) for claim in asked))
        return {claim.taken.claim_id for claim, so in zip(asked, found, strict=True) if so}

    async def _is_cancelled(self, claim: Claim) -> bool:
        try:
            said = await self._cluster.do("GET", claim.cancel_key)
        except StoreUnavailable:
            return False  # The next look sees it.
        return said is not None and bytes(said) == claim.taken.token.encode()

    async def bring_back(self) -> None:
        """Bring retries that other programs have put into the set of all queues, and that are due, to their queues."""
        for member in await self._cluster.run(LEND, [self._queue.retries], MOST_BROUGHT, LENT_FOR_S):
            origin = self._origin(bytes(member))
            try:
                await self._cluster.run(BRING, origin.keys, member)
            except StoreUnavailable as exc:
                log.warning("a retry could not be brought to its queue", queue=origin.name, reason=str(exc))
            else:
                await self._cluster.do("ZREM", self._queue.retries, member)

    def _origin(self, member: bytes) -> SortedSetQueue:
        try:
            read = read_member(member)
        except MalformedRequest:
            return self._queue
        named = "" if isinstance(read, OwnMessage) else read.routing.request_queue_name
        return SortedSetQueue(name=named, clustered=True) if named else self._queue


async def _all(*asked: Awaitable[Any]) -> list[Any]:
    """Ask for all of it in one loop turn. Where something fails, the first failure, once all have their answer."""
    found = await asyncio.gather(*asked, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found
