"""Webhooks in Redis: which are due, what became of each try, what is to be sent again. Fills `job_book.HookBook`.

The step that accepts a job puts its id into the sorted set `infer_hooks:<queue>`, and the URL into the job's record;
what happens after its end lies in the hash `infer_hook:<job_id>`, which begins when its job is first found ended. When
it is next looked at is said by that hash (`next`), and the sorted set is but an index of it: an id that is put there
once more, or early, leads to nothing that would not have been.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
import structlog

from inference_worker.job_book import (
    FIRST_LOOK_S,
    HOOK_KEPT_S,
    LONGEST_LOOK_S,
    MOST_TRIES_LOGGED,
    Hook,
    HookEnd,
    HookLog,
    HookTry,
)
from inference_worker.job_records import hooks_key, record_key
from inference_worker.redis_scripts import PRELUDE, Argument, RedisLink, Script
from inference_worker.results.redis import result_key

log = structlog.get_logger(__name__)

LOOKED_AT: Final = 256
"""Jobs that one run of the script looks at: about a millisecond of Redis' time."""
MOST_RUNS: Final = 40
"""Of the script in one call of `due`; what is left over is found by the next."""

_HOOK: Final = (
    PRELUDE
    + f"""
local KEPT, LOGGED = {round(HOOK_KEPT_S * 1000)}, {MOST_TRIES_LOGGED}
"""
    + """
local function seconds()
  local t = redis.call('TIME')
  return tonumber(t[1]) + tonumber(t[2]) / 1000000
end
local function index(hooks, at, id, ms)
  redis.call('ZADD', hooks, at, id)
  keep_for(hooks, ms)
end
local function write_log(hook, line)
  if line == '' then return end
  local last = redis.call('HGET', hook, 'logged') or '0'
  -- Told twice: the answer to the first time was lost.
  if redis.call('HGET', hook, 'log' .. (tonumber(last) % LOGGED)) == line then return end
  local number = redis.call('HINCRBY', hook, 'logged', 1)
  redis.call('HSET', hook, 'log' .. (number % LOGGED), line)
end
"""
)

DUE: Final = Script(
    _HOOK
    + """
-- KEYS hooks   ARGV most that are looked at, most that are taken, lease s, first look after s, longest s
local now = seconds()
local taken, forgotten = {}, {}
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
local function take(id, hook)
  local at = now + tonumber(ARGV[3])
  redis.call('HSET', hook, 'next', at, 'held', 1)
  index(KEYS[1], at, id, KEPT)
  taken[#taken + 1] = {
    id, redis.call('HINCRBY', hook, 'lease', 1), redis.call('HEXISTS', hook, 'body'),
    redis.call('HMGET', hook, 'tenant', 'url', 'expires_at', 'tries', 'first_try_at')
  }
end
local function begin(id, hook)
  local job = redis.call('HMGET', 'infer_job:' .. id,
    'webhook_url', 'tenant', 'expires_at', 'created_at', 'ended', 'queue')
  if not job[1] or job[1] == '' then
    redis.call('ZREM', KEYS[1], id)
    forgotten[#forgotten + 1] = id
  elseif (job[5] and job[5] ~= '') or redis.call('EXISTS', 'infer_resp:' .. id) == 1 then
    redis.call('HSET', hook, 'state', 'waiting', 'url', job[1], 'tenant', job[2], 'expires_at', job[3],
      'queue', job[6] or '', 'tries', 0)
    redis.call('PEXPIRE', hook, KEPT)
    take(id, hook)
  else
    local wait = (now - tonumber(job[4])) / 4
    redis.call('ZADD', KEYS[1], now + math.min(math.max(wait, tonumber(ARGV[4])), tonumber(ARGV[5])), id)
  end
end
local seen = 0
for _, id in ipairs(due) do
  if #taken >= tonumber(ARGV[2]) then break end
  seen = seen + 1
  local hook = 'infer_hook:' .. id
  local known = redis.call('HMGET', hook, 'state', 'next')
  if not known[1] then
    begin(id, hook)
  elseif known[1] ~= 'waiting' then
    redis.call('ZREM', KEYS[1], id)
  elseif tonumber(known[2]) > now then
    redis.call('ZADD', KEYS[1], known[2], id)
  else
    take(id, hook)
  end
end
return {seen, taken, forgotten}
"""
)

HASTEN: Final = Script(
    _HOOK
    + """
-- KEYS hooks   ARGV ids…
local now = seconds()
for _, id in ipairs(ARGV) do redis.call('ZADD', KEYS[1], 'XX', now, id) end
return 'OK'
"""
)

LATER: Final = Script(
    _HOOK
    + """
-- KEYS hook, hooks   ARGV id, lease, in s, tries, first try at or '', line of the log or '', body or ''
local known = redis.call('HMGET', KEYS[1], 'lease', 'state')
if known[1] ~= ARGV[2] or known[2] ~= 'waiting' then return 0 end
local at = seconds() + tonumber(ARGV[3])
redis.call('HSET', KEYS[1], 'next', at, 'held', 0, 'tries', ARGV[4])
if ARGV[5] ~= '' then redis.call('HSET', KEYS[1], 'first_try_at', ARGV[5]) end
if ARGV[7] ~= '' then redis.call('HSET', KEYS[1], 'body', ARGV[7]) end
write_log(KEYS[1], ARGV[6])
local life = math.floor(tonumber(ARGV[3]) * 1000) + KEPT
keep_for(KEYS[1], life)
index(KEYS[2], at, ARGV[1], life)
return 1
"""
)

OVER: Final = Script(
    _HOOK
    + """
-- KEYS hook, hooks   ARGV id, lease, how it ended, line of the log, body or ''
local known = redis.call('HMGET', KEYS[1], 'lease', 'state')
if not known[2] or known[2] == 'delivered' then return 0 end
if (known[1] ~= ARGV[2] or known[2] ~= 'waiting') and ARGV[3] ~= 'delivered' then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[3], 'held', 0)
redis.call('HDEL', KEYS[1], 'next')
if ARGV[3] == 'delivered' then
  redis.call('HDEL', KEYS[1], 'body')
elseif ARGV[5] ~= '' then
  redis.call('HSET', KEYS[1], 'body', ARGV[5])
end
write_log(KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[1], KEPT)
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
"""
)

REPLAY: Final = Script(
    _HOOK
    + """
-- KEYS hook, hooks, result   ARGV id, queue
local known = redis.call('HMGET', KEYS[1], 'state', 'held', 'next', 'queue')
if not known[1] or known[4] ~= ARGV[2] then return 0 end
local now = seconds()
if known[2] == '1' and tonumber(known[3] or '0') > now then return 1 end  -- It is being sent.
if redis.call('HEXISTS', KEYS[1], 'body') == 0 and redis.call('EXISTS', KEYS[3]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'state', 'waiting', 'tries', 0, 'next', now, 'held', 0)
redis.call('HDEL', KEYS[1], 'first_try_at')
redis.call('HINCRBY', KEYS[1], 'lease', 1)
keep_for(KEYS[1], KEPT)
index(KEYS[2], now, ARGV[1], KEPT)
return 1
"""
)


def hook_key(job_id: str) -> str:
    """What became of a job's webhook."""
    return f"infer_hook:{job_id}"


_LOG_FIELDS: Final = tuple(f"log{number}" for number in range(MOST_TRIES_LOGGED))
_States = Literal["waiting", "delivered", "failed", "disabled"]
_STATES: Final[dict[bytes, _States]] = {
    b"waiting": "waiting",
    b"delivered": "delivered",
    b"failed": "failed",
    b"disabled": "disabled",
}


class RedisHookBook:
    """The webhooks of one queue. Leases and times are by the clock of Redis."""

    def __init__(self, link: RedisLink, *, queue: str) -> None:
        self._link = link
        self._queue = queue
        self._hooks = hooks_key(queue)

    async def due(self, limit: int, lease_s: float) -> Sequence[Hook]:
        """See `job_book.HookBook`."""
        hooks: list[Hook] = []
        for _ in range(MOST_RUNS):
            wanted = limit - len(hooks)
            if wanted <= 0:
                break
            seen, taken, forgotten = await self._link.run(
                DUE, [self._hooks], LOOKED_AT, wanted, lease_s, FIRST_LOOK_S, LONGEST_LOOK_S
            )
            hooks += map(_hook, taken)
            for job_id in forgotten:
                log.warning("a webhook is forgotten, its job is not known any more", job_id=_text(job_id))
            if seen < LOOKED_AT:
                break
        return hooks

    async def hasten(self, job_ids: Sequence[str]) -> None:
        """See `job_book.HookBook`."""
        if job_ids:
            await self._link.run(HASTEN, [self._hooks], *job_ids)

    async def body_of(self, job_id: str) -> bytes | None:
        """See `job_book.HookBook`."""
        body = await self._link.do("HGET", hook_key(job_id), "body")
        return body if isinstance(body, bytes) else None

    async def later(self, hook: Hook, in_s: float, tried: HookTry | None = None, body: bytes | None = None) -> None:
        """See `job_book.HookBook`."""
        first = "" if hook.first_try_at is None else repr(hook.first_try_at)
        line = b"" if tried is None else _line(tried)
        arguments = (hook.job_id, hook.lease, repr(in_s), hook.tries, first, line, body or b"")
        await self._link.run(LATER, [hook_key(hook.job_id), self._hooks], *arguments)

    async def over(self, hook: Hook, end: HookEnd, tried: HookTry, body: bytes | None = None) -> None:
        """See `job_book.HookBook`."""
        arguments: tuple[Argument, ...] = (hook.job_id, hook.lease, end, _line(tried), body or b"")
        await self._link.run(OVER, [hook_key(hook.job_id), self._hooks], *arguments)

    async def log_of(self, job_id: str) -> HookLog | None:
        """See `job_book.HookBook`."""
        queue, tenant, url, state, at, held, *lines = await self._link.do(
            "HMGET", hook_key(job_id), "queue", "tenant", "url", "state", "next", "held", *_LOG_FIELDS
        )
        if state is None:
            queue, tenant, url = await self._link.do("HMGET", record_key(job_id), "queue", "tenant", "webhook_url")
        if not url or queue is None or _text(queue) != self._queue:
            return None
        tries = sorted((_tried(line) for line in lines if line), key=lambda tried: tried.at)
        return HookLog(
            tenant=_text(tenant),
            url=_text(url),
            state=_STATES.get(state, "waiting"),
            tries=tries,
            next_try_at=None if at is None or held == b"1" else float(at),
        )

    async def replay(self, job_id: str) -> bool:
        """See `job_book.HookBook`."""
        keys = [hook_key(job_id), self._hooks, result_key(job_id)]
        return bool(await self._link.run(REPLAY, keys, job_id, self._queue))


def _hook(row: Sequence[Any]) -> Hook:
    job_id, lease, kept, (tenant, url, expires_at, tries, first_try_at) = row
    return Hook(
        job_id=_text(job_id),
        tenant=_text(tenant),
        url=_text(url),
        expires_at=float(expires_at),
        tries=int(tries),
        first_try_at=None if first_try_at is None else float(first_try_at),
        kept=bool(kept),
        lease=int(lease),
    )


def _line(tried: HookTry) -> bytes:
    return msgspec.json.encode(tried)


def _tried(line: bytes) -> HookTry:
    return msgspec.json.decode(line, type=HookTry)


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogatepass")
