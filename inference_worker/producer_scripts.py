"""What the producer of the sorted-set form asks of Redis, each in one atomic step.

Keys and values are those of the Go library, so that both may work on one Redis. A script is not rolled back where it
fails half-way: so each reads first, and writes in an order in which what was written does no harm.
"""

from typing import Final

from inference_worker.redis_scripts import PRELUDE, Script

MOST_AT_ONCE: Final = 1000
"""How many requests one script takes in."""

LOOKS_AT: Final = 100
"""How many results one call of `RECEIVE` looks at, and how many lapsed leases it takes back."""

SUBMIT: Final = Script(
    """
-- KEYS of each request: queue, active, cancel [, payload] [, record of its idempotency key]
-- ARGV how many requests, then of each: score, member, token, deadline, payload's expiry or '', payload,
--      fingerprint or '', id, result route, record's expiry
local key, arg = 0, 1
local function next_key() key = key + 1 return KEYS[key] end
local function next_arg() arg = arg + 1 return ARGV[arg] end
local requests, known = {}, {}
for place = 1, tonumber(ARGV[1]) do
  local r = {}
  r.queue, r.active, r.cancel = next_key(), next_key(), next_key()
  r.score, r.member, r.token, r.deadline = next_arg(), next_arg(), next_arg(), next_arg()
  r.payload_until, r.payload, r.fingerprint = next_arg(), next_arg(), next_arg()
  r.id, r.result_route, r.record_until = next_arg(), next_arg(), next_arg()
  if r.payload_until ~= '' then r.payload_key = next_key() end
  if r.fingerprint ~= '' then
    r.record = next_key()
    local old = redis.pcall('HMGET', r.record, 'sha256', 'id', 'token', 'request_route', 'result_route', 'deadline')
    if old.err then return {'REFUSED', old.err} end
    if old[1] and old[1] ~= r.fingerprint then return {'OTHER', place, old[2]} end
    if old[1] then
      r.known = true
      known[#known + 1] = {place, old[2], old[3], old[4], old[5], old[6]}
    end
  end
  requests[place] = r
end
-- Together or not at all: what is in the queues by then is taken out again.
local function undo(last)
  for place = 1, last do
    local r = requests[place]
    if not r.known then
      redis.pcall('ZREM', r.queue, r.member)
      if r.payload_key then redis.pcall('DEL', r.payload_key) end
      if r.record then redis.pcall('DEL', r.record) end
    end
  end
end
local function put(r)
  local steps = {{'ZADD', r.queue, r.score, r.member}}
  if r.payload_key then steps[#steps + 1] = {'SET', r.payload_key, r.payload, 'EXAT', r.payload_until} end
  if r.record then
    steps[#steps + 1] = {'HSET', r.record, 'sha256', r.fingerprint, 'id', r.id, 'token', r.token,
      'request_route', r.queue, 'result_route', r.result_route, 'deadline', r.deadline}
    steps[#steps + 1] = {'EXPIREAT', r.record, r.record_until}
  end
  for _, step in ipairs(steps) do
    local done = redis.pcall(unpack(step))
    if type(done) == 'table' and done.err then return done.err end
  end
end
for place, r in ipairs(requests) do
  local err = not r.known and put(r)
  if err then
    undo(place)
    return {'REFUSED', err}
  end
end
-- Not before all are there: it replaces what an earlier submission of an id has, which could not be put back.
for _, r in ipairs(requests) do
  if not r.known then
    redis.call('SET', r.active, r.token, 'EXAT', r.deadline)
    redis.call('DEL', r.cancel)
  end
end
return {'TAKEN', known}
"""
)

LOOK_UP: Final = Script(
    "return redis.call('HMGET', KEYS[1], 'id', 'token', 'request_route', 'result_route', 'deadline')"
)
"""What an idempotency key stands for."""

CANCEL: Final = Script(
    """
-- KEYS of each request: active, cancel   ARGV seconds to keep the mark, then of each: token or '' for whichever lives
local marked = {}
for place = 1, #KEYS / 2 do
  local active, cancel, meant = KEYS[2 * place - 1], KEYS[2 * place], ARGV[place + 1]
  local token = redis.call('GET', active)
  if token and (meant == '' or meant == token) then
    redis.call('SET', cancel, token, 'EX', ARGV[1])
    marked[#marked + 1] = place
  end
end
return marked
"""
)

LEASING: Final = (
    PRELUDE
    + f"local LOOKS_AT = {LOOKS_AT}"
    + """
local UNREADABLE = '\\0unparsable-result\\0'
-- The generation that a result belongs to; nil where it is no result.
local function generation(body)
  local fine, result = pcall(cjson.decode, body)
  if not fine or type(result) ~= 'table' then return nil end
  local id, token = result['id'], result['request_token']
  if token == nil or token == cjson.null then token = '' end
  if type(id) ~= 'string' or id == '' or type(token) ~= 'string' then return nil end
  return token == '' and id or id .. '\\0' .. token
end
local function forget(lease, claimed, owners, expiries)
  redis.call('HDEL', claimed, lease)
  redis.call('HDEL', owners, lease)
  redis.call('ZREM', expiries, lease)
end
local function is_alive(lease, owner, owners, expiries, now)
  if owner == '' or redis.call('HGET', owners, lease) ~= owner then return false end
  local expiry = redis.call('ZSCORE', expiries, lease)
  return expiry and tonumber(expiry) > now
end
local function is_acknowledged(lease, tombstones, now)
  local expiry = redis.call('ZSCORE', tombstones, lease)
  return expiry and tonumber(expiry) > now
end
-- At its memory limit the server refuses a script that begins with a write that needs memory, and lets one go on that
-- has written already: so this one, which needs none. Results can be fetched from a server that is full.
local function begin_small(owners)
  redis.call('HDEL', owners, '')
end
-- A thousand at a time: the server does nothing else meanwhile.
local function drop_old(tombstones, now)
  local old = redis.call('ZCOUNT', tombstones, '-inf', now)
  if old > 0 then redis.call('ZREMRANGEBYRANK', tombstones, 0, math.min(old, 1000) - 1) end
end
"""
)
"""The functions behind the scripts on leased results."""

RECEIVE: Final = Script(
    LEASING
    + """
-- KEYS results, claimed, owners, expiries, tombstones   ARGV owner, lease ms
-- {'LEASED' | 'UNREADABLE', lease, body}, {'MORE'}: ask again, {'NONE', ms to the next lapse or -1}
local results, claimed, owners, expiries, tombstones = unpack(KEYS)
local now = millis()
begin_small(owners)
drop_old(tombstones, now)
-- Lapsed leases go back to where results are taken from, so that the oldest is the next.
local lapsed = redis.call('ZRANGEBYSCORE', expiries, '-inf', now, 'LIMIT', 0, LOOKS_AT)
for place = #lapsed, 1, -1 do
  local body = redis.call('HGET', claimed, lapsed[place])
  if body then redis.call('RPUSH', results, body) end
  forget(lapsed[place], claimed, owners, expiries)
end
local function take(lease, body)
  redis.call('HSET', claimed, lease, body)
  redis.call('HSET', owners, lease, ARGV[1])
  redis.call('ZADD', expiries, now + tonumber(ARGV[2]), lease)
  redis.call('RPOP', results)  -- Last, so that it is at no time nowhere.
end
for _ = 1, LOOKS_AT do
  local body = redis.call('LINDEX', results, -1)
  if not body then
    local next = redis.call('ZRANGE', expiries, 0, 0, 'WITHSCORES')
    return {'NONE', next[2] and math.max(math.ceil(tonumber(next[2]) - now), 1) or -1}
  end
  local lease = generation(body)
  if not lease then
    lease = UNREADABLE .. ARGV[1]
    take(lease, body)
    return {'UNREADABLE', lease, body}
  end
  if is_acknowledged(lease, tombstones, now) or redis.call('HEXISTS', owners, lease) == 1 then
    redis.call('RPOP', results)  -- The same result once more.
  else
    take(lease, body)
    return {'LEASED', lease, body}
  end
end
return {'MORE'}
"""
)

RENEW: Final = Script(
    LEASING
    + """
-- KEYS owners, expiries   ARGV lease, owner, lease ms
local now = millis()
if not is_alive(ARGV[1], ARGV[2], KEYS[1], KEYS[2], now) then return 0 end
begin_small(KEYS[1])
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[3]), ARGV[1])
return 1
"""
)

ACKNOWLEDGE: Final = Script(
    LEASING
    + """
-- KEYS claimed, owners, expiries, tombstones   ARGV lease, owner, ms to remember it   1 now, 2 before, 0 not ours
local claimed, owners, expiries, tombstones = unpack(KEYS)
local now = millis()
drop_old(tombstones, now)
if is_alive(ARGV[1], ARGV[2], owners, expiries, now) then
  forget(ARGV[1], claimed, owners, expiries)
  redis.call('ZADD', tombstones, now + tonumber(ARGV[3]), ARGV[1])
  redis.call('PEXPIRE', tombstones, ARGV[3])
  return 1
end
return is_acknowledged(ARGV[1], tombstones, now) and 2 or 0
"""
)

RELEASE: Final = Script(
    LEASING
    + """
-- KEYS results, claimed, owners, expiries   ARGV lease, owner
local results, claimed, owners, expiries = unpack(KEYS)
if not is_alive(ARGV[1], ARGV[2], owners, expiries, millis()) then return 0 end
begin_small(owners)
local body = redis.call('HGET', claimed, ARGV[1])
if body then redis.call('RPUSH', results, body) end
forget(ARGV[1], claimed, owners, expiries)
return 1
"""
)
