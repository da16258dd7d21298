"""The dead letters of a queue in a sorted set: entries of a stream beside it, which go back into the set in one step.

A letter is the member that died. One of llm-d-async becomes a new submission, with a token of its own; one in our own
format begins anew under its id, as in a stream (`stream_dead_letters`). Not for a Cluster: the keys lie in many slots.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from inference_worker.job_records import record_key
from inference_worker.llmd_messages import Envelope
from inference_worker.llmd_renewed import envelope_in
from inference_worker.redis_scripts import PRELUDE, REVIVING, RedisLink, Script
from inference_worker.results.redis import claim_key, record_kept_until_ms, result_key
from inference_worker.rmq_dead_letters import NotPutBack
from inference_worker.stream_dead_letters import DIED_OF, NotReplayed, Seen, StreamDeadLetters, StreamLetter
from inference_worker.transports.sorted_set_members import ACTIVE, CANCELS, own_score
from inference_worker.transports.sorted_set_scripts import BOOK
from inference_worker.transports.stream_entries import ATTEMPT, ENQUEUED_AT, JOB_ID, REQUEST

NOT_HEADERS: Final = DIED_OF | {ATTEMPT, ENQUEUED_AT, JOB_ID, REQUEST}

REPLAY_ENVELOPE: Final = Script(
    """
-- KEYS dead letters, queue, key of the live submission, of what cancels it, of a payload that lies apart or none
-- ARGV id of the dead letter, the member, its score, token and deadline
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) == 0 then return {'GONE'} end
-- The id was used again meanwhile: two results under it at a time are one too many.
if redis.call('EXISTS', KEYS[3]) == 1 then return {'BUSY'} end
if #KEYS > 4 and redis.call('EXISTS', KEYS[5]) == 0 then return {'NO_PAYLOAD'} end
-- The copy first: where there is no memory for it, a script is not rolled back, and the letter would be lost.
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[4])
redis.pcall('SET', KEYS[3], ARGV[4], 'EXAT', ARGV[5])
return {'REPLAYED'}
"""
)

REPLAY_OWN: Final = Script(
    PRELUDE
    + REVIVING
    + BOOK
    + """
-- KEYS result, claim, dead letters, queue, notes
-- ARGV id of the dead letter, key of the intake's record, its new deadline, Unix ms until which it is kept, the member,
--      its score, its message id or '', its headers by turns
local known = answered(KEYS[1])
if known and #known == 1 then return {'COMPLETED'} end
local c = redis.call('HMGET', KEYS[2], 'holder', 'until')
if not known and c[1] and tonumber(c[2]) > millis() then return {'BUSY'} end
if #redis.call('XRANGE', KEYS[3], ARGV[1], ARGV[1]) == 0 then return {'GONE'} end
local note = {s = tonumber(ARGV[6]), m = ARGV[7], h = {unpack(ARGV, 8)}}
write_note(KEYS[5], claim_id_of(ARGV[5]), note, seconds())
redis.call('ZADD', KEYS[4], ARGV[6], ARGV[5])
redis.call('XDEL', KEYS[3], ARGV[1])
redis.call('DEL', KEYS[1], KEYS[2])
revive(ARGV[2], ARGV[3], tonumber(ARGV[4]))
return {'REPLAYED'}
"""
)


class SortedSetDeadLetters:
    """The letters that are there now, the oldest first. Nothing is held: two who look see the same."""

    at_once: Final = True
    """Making room, putting a copy back and taking the letter away are one step, which `put_back` is."""

    def __init__(self, link: RedisLink, *, queue: str, ttl_s: float, now: Callable[[], float]) -> None:
        """`ttl_s` is how long a result lives."""
        self._link = link
        self._queue = queue
        self._dead_letters = f"{queue}:dead"
        self._ttl_s = ttl_s
        self._now = now
        self._entries = StreamDeadLetters(link, stream=queue, dead_letters=self._dead_letters, ttl_s=ttl_s, now=now)

    @property
    def ready(self) -> int:
        """How many there were at the beginning."""
        return self._entries.ready

    async def begin(self) -> None:
        """Look how many there are. All methods raise `StoreUnavailable`."""
        await self._entries.begin()

    async def next(self) -> StreamLetter | None:
        """The next letter; None where there is none."""
        return await self._entries.next()

    async def has_queue(self, name: str) -> bool:
        """Whether it is a queue; ours is as soon as something is put into it."""
        return name == self._queue or await self._link.do("TYPE", name) == b"zset"

    async def put_back(self, letter: StreamLetter, body: bytes, queue: str) -> NotReplayed | None:
        """Add a copy that begins anew, and take the letter away: one step, which may be repeated without harm.

        Raises:
            NotPutBack: its payload lay apart, and went with its result.
        """
        envelope = envelope_in(body)
        said = await (
            self._own(letter, body, queue) if envelope is None else self._theirs(letter, envelope, body, queue)
        )
        match said:
            case b"COMPLETED":
                return "completed"
            case b"BUSY":
                return "running"
            case b"GONE":
                return "gone"
            case b"NO_PAYLOAD":
                raise NotPutBack("its payload lay apart, and is gone")
            case _:
                return None

    async def take_away(self, letter: StreamLetter) -> None:
        """Remove it."""
        await self._entries.take_away(letter)

    async def _theirs(self, letter: StreamLetter, envelope: Envelope, member: bytes, queue: str) -> bytes:
        request, routing = envelope.request, envelope.routing
        apart = [routing.payload_ref] if routing.payload_ref and request.payload is None else []
        (said,) = await self._link.run(
            REPLAY_ENVELOPE,
            [self._dead_letters, queue, ACTIVE + request.id, CANCELS + request.id, *apart],
            letter.entry_id,
            member,
            repr(envelope.score),
            routing.request_token,
            request.deadline,
        )
        return bytes(said)

    async def _own(self, letter: StreamLetter, member: bytes, queue: str) -> bytes:
        seen = msgspec.json.decode(member, type=Seen)
        now = self._now()
        deadline = now + seen.lasts_s
        headers = [part for name, value in letter.fields.items() if name not in NOT_HEADERS for part in (name, value)]
        (said,) = await self._link.run(
            REPLAY_OWN,
            [
                result_key(seen.request_id),
                claim_key(seen.request_id),
                self._dead_letters,
                queue,
                f"{queue}:claim-notes",
            ],
            letter.entry_id,
            record_key(seen.request_id),
            repr(deadline),
            record_kept_until_ms(deadline, self._ttl_s),
            member,
            repr(own_score(member, now)),
            letter.message_id or "",
            *headers,
        )
        return bytes(said)
