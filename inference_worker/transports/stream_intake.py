"""The way of a job into a Redis stream: key, depth, record and entry in one script, so that there is nothing between.

Not here: reading the stream (`redis_streams.py`), and what is kept of jobs afterwards (`results/job_book.py`).
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from inference_worker.errors import QueueFull, StoreUnavailable
from inference_worker.job_book import JobRecord, Message, OtherBody, Taken
from inference_worker.job_records import FIRST_OWN, WRITING, arguments_of, keys_of, record_of
from inference_worker.ports import Backlog
from inference_worker.redis_scripts import RedisLink, Script
from inference_worker.transports.redis_streams import stream_backlog
from inference_worker.transports.stream_entries import RETURNED, StreamNames, delayed_key, entry_fields

PAUSES_S: Final = (0.05, 0.15, 0.4, 1.0)
"""Before a script that was not answered is sent again; it does nothing where it had been done."""

AGAIN_WITHIN_S: Final = 6.0
"""Not again later than this. A Redis that says nothing takes its time each time, and callers do not wait for ever."""

ACCEPT: Final = Script(
    WRITING
    + f"""
-- KEYS …, stream, delayed   ARGV …, group, most waiting or 0, consumer of what was handed back, the entry's fields
local job, own = job_of(KEYS, ARGV), {{unpack(ARGV, {FIRST_OWN})}}
"""
    + """
local stream, group, most, returned = KEYS[5], own[1], tonumber(own[2]), own[3]
local held, known = standing(job, 'confirmed', 'ended')
if held and held ~= job.id and (known[2] or known[3]) then
  if known[1] ~= job.fingerprint then return {'OTHER'} end
  return {'STANDING', held, read('infer_job:' .. held)}
end
-- Ours already, where the answer to this very script was lost.
if redis.call('HEXISTS', job.record, 'confirmed') == 1 then return {'TAKEN'} end
local waiting = redis.call('XLEN', stream) + redis.call('ZCARD', KEYS[6])
local pending = redis.pcall('XPENDING', stream, group)
if not pending.err and pending[1] > 0 then
  waiting = waiting - pending[1]
  for _, of in ipairs(pending[4]) do
    if of[1] == returned then waiting = waiting + tonumber(of[2]) end
  end
end
if waiting < 0 then waiting = 0 end
if most > 0 and waiting >= most then return {'FULL', waiting} end
write_down(job)
-- The entry last but for what marks the record as accepted: a script that fails is not rolled back.
local added = redis.pcall('XADD', stream, '*', unpack(own, 4))
if type(added) == 'table' and added.err then
  forget(job)
  return added
end
redis.call('HSET', job.record, 'confirmed', '1')
return {'TAKEN', waiting}
"""
)


class StreamIntake:
    """The intake of `job_book.py` on the Redis that has both the stream and the book."""

    def __init__(
        self, link: RedisLink, names: StreamNames, *, queue: str, ttl_s: float, now: Callable[[], float]
    ) -> None:
        self._link = link
        self._names = names
        self._queue = queue
        self._ttl_s = ttl_s
        self._now = now

    async def accept(
        self, record: JobRecord, message: Message, *, key: str | None, most_waiting: int
    ) -> Taken | OtherBody:
        """See `job_book.Intake`."""
        stream = self._names.stream
        answer = await self._done(
            [*keys_of(record, self._queue), stream, delayed_key(stream)],
            *arguments_of(record, self._queue, key, self._ttl_s),
            *(self._names.group, most_waiting, RETURNED),
            *entry_fields(message(record), record.job_id, enqueued_at=self._now()),
        )
        match answer:
            case [b"OTHER"]:
                return OtherBody()
            case [b"STANDING", held, values]:
                standing = record_of(held.decode(), values, self._queue)
                return Taken(record=record if standing is None else standing, new=False)
            case [b"FULL", waiting]:
                raise QueueFull(f"{waiting} requests wait, and {most_waiting} may", waiting)
            case [_, waiting]:
                return Taken(record=record, new=True, waiting=waiting)
            case _:
                return Taken(record=record, new=True)

    async def backlog(self) -> Backlog:
        """See `job_book.Intake`."""
        return await stream_backlog(self._link, self._names)

    async def _done(self, keys: list[str], *arguments: str | bytes | int | float) -> Any:
        loop = asyncio.get_running_loop()
        until = loop.time() + AGAIN_WITHIN_S
        for pause_s in PAUSES_S:
            try:
                return await self._link.run(ACCEPT, keys, *arguments)
            except StoreUnavailable:
                if loop.time() + pause_s > until:
                    raise
                await asyncio.sleep(pause_s)
        return await self._link.run(ACCEPT, keys, *arguments)
