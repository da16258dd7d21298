"""The jobs of an intake in Redis, shared by all intakes of a queue. Its keys: `job_records.py`, and `docs/redis.md`.

Time is Redis' own where intakes have to agree on it. Every script may be repeated with the same arguments.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from inference_worker.job_book import (
    RESERVED_S,
    JobRecord,
    OtherBody,
    Page,
    Reserved,
    Standing,
    read_cursor,
    write_cursor,
)
from inference_worker.job_records import (
    FIELDS,
    FIRST_OWN,
    WRITING,
    arguments_of,
    due_key,
    keys_of,
    list_key,
    record_key,
    record_of,
)
from inference_worker.redis_scripts import RedisLink, Script

MOST_LOOKED_AT: Final = 2_000
"""So many records one page looks at, where most of what is listed is not to be shown."""

RESERVE: Final = Script(
    WRITING
    + f"""
-- ARGV …, ms until another may take it over
local job, lease = job_of(KEYS, ARGV), tonumber(ARGV[{FIRST_OWN}])
"""
    + """
local fresh, owner = '1', job.id
local held, known = standing(job, 'confirmed', 'ended', 'owner', 'until')
if held then
  if known[1] ~= job.fingerprint then return {'OTHER'} end
  local record = 'infer_job:' .. held
  if known[2] or known[3] then return {'STANDING', held, 1, 0, read(record)} end
  local left = tonumber(known[5] or '0') - millis()
  if known[4] ~= owner and left > 0 then return {'STANDING', held, 0, left, read(record)} end
  job.id, job.record = held, record
end
if redis.call('EXISTS', job.record) == 1 then fresh = '0' end
write_down(job, 'owner', owner, 'fresh', fresh, 'until', string.format('%d', millis() + lease))
return {'RESERVED', job.id}
"""
)

CONFIRM: Final = Script(
    WRITING
    + """
local job = job_of(KEYS, ARGV)
if redis.call('EXISTS', job.record) == 0 then
  if standing(job) then job.key = '' end
  write_down(job)
end
redis.call('HSET', job.record, 'confirmed', '1')
redis.call('HDEL', job.record, 'owner', 'fresh', 'until')
return 'OK'
"""
)

WITHDRAW: Final = Script(
    WRITING
    + f"""
-- ARGV …, owner, '1' where the queue has not got it from this owner for sure
local job, owner, sure = job_of(KEYS, ARGV), ARGV[{FIRST_OWN}], ARGV[{FIRST_OWN + 1}] == '1'
"""
    + """
local known = redis.call('HMGET', job.record, 'owner', 'fresh', 'ended')
if known[1] ~= owner then return 'OK' end
-- Whoever had it before may have put it in, or may be about to: then the id has to stay known.
if sure and known[2] == '1' and not known[3] then
  forget(job)
else
  redis.call('HSET', job.record, 'until', '0', 'fresh', '0')
end
return 'OK'
"""
)

PAGE: Final = Script(
    f"""
local READ = {{{", ".join(map(repr, FIELDS))}}}
"""
    + """
-- KEYS list   ARGV most shown, most looked at, score and id of the cursor or ''
local most, score, cursor = tonumber(ARGV[1]), ARGV[3], ARGV[4]
local shown, gone, last, looked = {}, {}, false, 0
-- By bytes, as sorted sets do; Lua's own order is that of the server's language.
local function less(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end
while #shown < most do
  if looked >= tonumber(ARGV[2]) then break end
  local some = redis.call('ZREVRANGEBYSCORE', KEYS[1], score == '' and '+inf' or score, '-inf', 'WITHSCORES',
                          'LIMIT', looked, 100)
  for i = 1, #some, 2 do
    looked = looked + 1
    local id = some[i]
    if score == '' or tonumber(some[i + 1]) < tonumber(score) or less(id, cursor) then
      local record = redis.call('HMGET', 'infer_job:' .. id, unpack(READ))
      if not record[1] then
        gone[#gone + 1] = id
      elseif record[9] or record[10] then
        shown[#shown + 1] = {id, record}
        if #shown == most then break end
      end
      last = {some[i + 1], id}
    end
  end
  if #some < 200 then
    last = false
    break
  end
end
for _, id in ipairs(gone) do redis.call('ZREM', KEYS[1], id) end
return {shown, last}
"""
)

FIND: Final = Script(
    f"""
local READ = {{{", ".join(map(repr, FIELDS))}}}
"""
    + """
-- KEYS record   ARGV the tenant that asks, or none
if ARGV[1] and redis.call('HMGET', KEYS[1], 'tenant')[1] ~= ARGV[1] then return {} end
return redis.call('HMGET', KEYS[1], unpack(READ))
"""
)

DEADLINES: Final = Script(
    """
-- KEYS due   ARGV from when on, how many
local some, times = redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2]), {}
for i = 2, #some, 2 do times[#times + 1] = some[i] end
return times
"""
)


class RedisJobBook:
    """The job book of `job_book.py` in one Redis."""

    def __init__(self, link: RedisLink, *, queue: str, ttl_s: float, now: Callable[[], float]) -> None:
        self._link = link
        self._queue = queue
        self._ttl_s = ttl_s
        self._now = now

    async def reserve(self, record: JobRecord, key: str | None) -> Reserved | Standing | OtherBody:
        """See `job_book.JobBook`."""
        answer = await self._run(RESERVE, record, key, round(RESERVED_S * 1000))
        match answer[0]:
            case b"OTHER":
                return OtherBody()
            case b"STANDING":
                _, held, confirmed, left_ms, values = answer
                return Standing(
                    record=self._read(held, values) or record, confirmed=bool(confirmed), left_s=int(left_ms) / 1000
                )
            case _:
                held = answer[1].decode()
                return Reserved(record=replace(record, job_id=held), key=key, owner=record.job_id)

    async def confirm(self, reserved: Reserved) -> None:
        """See `job_book.JobBook`."""
        await self._run(CONFIRM, reserved.record, reserved.key)

    async def withdraw(self, reserved: Reserved) -> None:
        """See `job_book.JobBook`."""
        await self._run(WITHDRAW, reserved.record, reserved.key, reserved.owner, "1")

    async def leave(self, reserved: Reserved) -> None:
        """See `job_book.JobBook`."""
        await self._run(WITHDRAW, reserved.record, reserved.key, reserved.owner, "")

    async def find(self, job_id: str, tenant: str | None = None) -> JobRecord | None:
        """See `job_book.JobBook`."""
        whose = () if tenant is None else (tenant.encode("utf-8", "surrogatepass"),)
        values = await self._link.run(FIND, [record_key(job_id)], *whose)
        return record_of(job_id, values, self._queue) if values else None

    async def page(self, tenant: str, *, limit: int, after: str | None) -> Page:
        """See `job_book.JobBook`."""
        at, last_id = ("", "") if after is None else read_cursor(after)
        # One more than is asked for: whether there is a next page is not known otherwise.
        keys, most = [list_key(self._queue, tenant)], min(limit + 1, MOST_LOOKED_AT)
        shown, looked_at = await self._link.run(PAGE, keys, most, MOST_LOOKED_AT, at and repr(at), last_id)
        records = [record for job_id, values in shown if (record := self._read(job_id, values)) is not None]
        if len(records) > limit:
            last = records[limit - 1]
            return Page(records=records[:limit], after=write_cursor(last.created_at, last.job_id))
        return Page(
            records=records, after=write_cursor(float(looked_at[0]), looked_at[1].decode()) if looked_at else None
        )

    async def deadlines(self, limit: int) -> Sequence[float]:
        """See `job_book.JobBook`."""
        return [float(at) for at in await self._link.run(DEADLINES, [due_key(self._queue)], repr(self._now()), limit)]

    async def _run(self, script: Script, record: JobRecord, key: str | None, *own: str | int) -> Any:
        arguments = arguments_of(record, self._queue, key, self._ttl_s)
        return await self._link.run(script, keys_of(record, self._queue), *arguments, *own)

    def _read(self, job_id: bytes, values: Sequence[bytes | None]) -> JobRecord | None:
        return record_of(job_id.decode(), values, self._queue)
