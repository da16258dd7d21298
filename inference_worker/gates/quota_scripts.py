"""The scripts of the gates that count in Redis. Each is atomic and goes by the clock of Redis, never by ours.

A slot is a member of a sorted set, scored by when its lease lapses (Unix ms), named `<cost>:<holder>:<number>`. Beside
it stands the plain counter that other programs read and count in: what lapses is taken off it by whoever comes next, so
a process that was killed frees its slots however busy the key is. Each script may be repeated with the same arguments.
"""

from typing import Final

from inference_worker.redis_scripts import PRELUDE, Script

_LIMITS: Final = """
-- What somebody has set for one tenant, or the default.
local function limit_of(set, default)
  local limit = tonumber(set or '')
  if not limit or limit ~= limit or limit < 0 then return tonumber(default) end
  return limit
end
local function cost_of(member) return tonumber(string.match(member, '^(%d+):') or '1') end
"""

_SLOTS: Final = """
local function give(counter, cost)
  local left = (tonumber(redis.call('GET', counter) or '0') or 0) - cost
  if left > 0 then redis.call('DECRBY', counter, cost) else redis.call('DEL', counter) end
end
local function lapse(counter, slots, now)
  local gone = redis.call('ZRANGEBYSCORE', slots, '-inf', now, 'LIMIT', 0, 1000)
  if #gone == 0 then return end
  local freed = 0
  for _, member in ipairs(gone) do freed = freed + cost_of(member) end
  redis.call('ZREM', slots, unpack(gone))
  give(counter, freed)
end
local function keep(counter, slots, lease, kept)
  keep_for(counter, math.max(kept, 2 * lease))
  keep_for(slots, math.max(kept, 2 * lease))
end
local function take(counter, slots, member, limit, lease, kept)
  local now = millis()
  lapse(counter, slots, now)
  if redis.call('ZSCORE', slots, member) then return 1 end
  -- The counter expires where those who share it set a time that is too short; ours are there all the same.
  local held = math.max(tonumber(redis.call('GET', counter) or '0') or 0, redis.call('ZCARD', slots))
  local cost = cost_of(member)
  -- What alone is beyond the limit goes when nothing else does, or it would never go.
  if limit <= 0 or (held > 0 and held + cost > limit) then return 0 end
  redis.call('SET', counter, string.format('%d', held + cost), 'KEEPTTL')
  redis.call('ZADD', slots, now + lease, member)
  keep(counter, slots, lease, kept)
  return 1
end
"""

TAKE: Final = Script(
    PRELUDE
    + _LIMITS
    + _SLOTS
    + """
-- KEYS counter, slots, limits   ARGV member, default limit, lease ms, ms for which the keys are kept, tenant
local limit = limit_of(redis.call('HGET', KEYS[3], ARGV[5]), ARGV[2])
return take(KEYS[1], KEYS[2], ARGV[1], limit, tonumber(ARGV[3]), tonumber(ARGV[4]))
"""
)
"""1: ours now; 0: over the limit, which is looked up in a hash."""

TAKE_CAPPED: Final = Script(
    PRELUDE
    + _LIMITS
    + _SLOTS
    + """
-- KEYS counter, slots, cap   ARGV member, default cap, lease ms, ms for which the keys are kept
local limit = limit_of(redis.call('GET', KEYS[3]), ARGV[2])
return take(KEYS[1], KEYS[2], ARGV[1], limit, tonumber(ARGV[3]), tonumber(ARGV[4]))
"""
)
"""The same, with the limit in a key of its own."""

RENEW_SLOTS: Final = Script(
    PRELUDE
    + _LIMITS
    + _SLOTS
    + """
-- KEYS counter, slots   ARGV lease ms, ms for which the keys are kept, members…
local lease = tonumber(ARGV[1])
local till = millis() + lease
for i = 3, #ARGV do
  -- One that had lapsed is held all the same: its request runs.
  if not redis.call('ZSCORE', KEYS[2], ARGV[i]) then redis.call('INCRBY', KEYS[1], cost_of(ARGV[i])) end
  redis.call('ZADD', KEYS[2], till, ARGV[i])
end
keep(KEYS[1], KEYS[2], lease, tonumber(ARGV[2]))
return #ARGV - 2
"""
)

GIVE_BACK: Final = Script(
    PRELUDE
    + _LIMITS
    + _SLOTS
    + """
-- KEYS counter, slots   ARGV member
if redis.call('ZREM', KEYS[2], ARGV[1]) == 0 then return 0 end
give(KEYS[1], cost_of(ARGV[1]))
return 1
"""
)

_WINDOW: Final = """
-- Nanoseconds, as others score this set. A double is exact to a quarter of a microsecond here.
local function nanos()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1e9 + tonumber(t[2]) * 1e3
end
local function add(total, by)
  if by ~= 0 and redis.call('INCRBY', total, by) <= 0 then redis.call('DEL', total) end
end
"""

ADMIT_WITHIN: Final = Script(
    PRELUDE
    + _LIMITS
    + _WINDOW
    + """
-- KEYS admissions, total cost, limits   ARGV member, default limit, window ms, tenant
local now, window = nanos(), tonumber(ARGV[3])
local past = string.format('%.0f', now - window * 1e6)
local gone, freed = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', past), 0
for _, member in ipairs(gone) do freed = freed + cost_of(member) end
if #gone > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', past)
  add(KEYS[2], -freed)
end
if redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 1 end
local limit, cost = limit_of(redis.call('HGET', KEYS[3], ARGV[4]), ARGV[2]), cost_of(ARGV[1])
local used = math.max(tonumber(redis.call('GET', KEYS[2]) or '0') or 0, redis.call('ZCARD', KEYS[1]))
if limit <= 0 or (used > 0 and used + cost > limit) then return 0 end
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
redis.call('SET', KEYS[2], string.format('%d', used + cost))
redis.call('PEXPIRE', KEYS[1], 2 * window)
redis.call('PEXPIRE', KEYS[2], 2 * window)
return 1
"""
)
"""1: admitted; 0: over the limit of a sliding window."""

CORRECT: Final = Script(
    PRELUDE
    + _LIMITS
    + _WINDOW
    + """
-- KEYS admissions, total cost   ARGV member, the member with its true cost or '' where nothing was sent
local at = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not at then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
local by = -cost_of(ARGV[1])
if ARGV[2] ~= '' then
  redis.call('ZADD', KEYS[1], at, ARGV[2])
  by = by + cost_of(ARGV[2])
end
add(KEYS[2], by)
keep_for(KEYS[2], math.max(redis.call('PTTL', KEYS[1]), 1))
return 1
"""
)

_LEASE: Final = """
-- The rate and the end of a command that holds now; nil where there is none, or one that cannot be believed.
local function command(control, version, pool, now)
  local c = redis.call('HMGET', control, 'api_version', 'pool_id', 'max_admission_rps', 'valid_until_unix_ms',
    'decision_id')
  for i = 1, 5 do if not c[i] or c[i] == '' then return nil end end
  if c[1] ~= version or c[2] ~= pool or not string.find(c[4], '^%d+$') then return nil end
  local rate, till = tonumber(c[3]), tonumber(c[4])
  if not rate or rate ~= rate or rate < 0 or rate == math.huge or till <= now or till > 2 ^ 53 then return nil end
  return rate, till
end
"""

TAKE_TOKEN: Final = Script(
    PRELUDE
    + _LEASE
    + """
-- KEYS command, bucket   ARGV version, pool, seconds of burst
local now = millis()
local rate, till = command(KEYS[1], ARGV[1], ARGV[2], now)
if not rate then return {0, 0, '0', 0} end
if rate == 0 then return {0, 1, '0', till} end
local size = rate * tonumber(ARGV[3])
if size == math.huge then return {0, 0, '0', 0} end
size = math.max(1, size)
local b = redis.call('HMGET', KEYS[2], 'tokens', 'last_ms')
local tokens, last = tonumber(b[1] or ''), tonumber(b[2] or '')
-- A clock that was set back must not fill the bucket twice once it is right again.
local at = math.max(now, last or now)
tokens = tokens and last and math.min(size, tokens + (at - last) / 1000 * rate) or size
local taken = 0
if tokens >= 1 then taken, tokens = 1, tokens - 1 end
redis.call('HSET', KEYS[2], 'tokens', string.format('%.17g', tokens), 'last_ms', string.format('%d', at))
redis.call('PEXPIRE', KEYS[2], math.max(1000, till - now + 1000))
return {taken, 1, string.format('%.17g', rate), till}
"""
)
"""Taken or not, whether there is a command, its rate, and when it ends in Unix ms."""

RETURN_TOKEN: Final = Script(
    """
-- KEYS bucket. It may be more than the bucket holds until somebody looks, who cuts it.
if redis.call('HEXISTS', KEYS[1], 'tokens') == 1 then redis.call('HINCRBYFLOAT', KEYS[1], 'tokens', 1) end
return 1
"""
)

LOOK_AT_RATE: Final = Script(
    PRELUDE
    + _LEASE
    + """
-- KEYS command   ARGV version, pool
local rate, till = command(KEYS[1], ARGV[1], ARGV[2], millis())
if not rate then return {0, 0, '0', 0} end
return {0, 1, string.format('%.17g', rate), till}
"""
)
"""The same answer, without taking anything."""
