"""The scripts of the request stream: each settlement is one step, and only the entry's holder can take it.

`docs/design/delivery.md`, section 7. "Mine" is: pending for this very consumer, since this very delivery. Every script
may be repeated with the same arguments; a repeat finds the entry no longer pending, or the result, and does nothing.

A script is not rolled back when a command in it fails. So whatever needs memory comes first: where Redis is full, that
is refused, and nothing has been done.
"""

from typing import Final

from inference_worker.redis_scripts import FINISHING, PRELUDE, Script

RELEASING: Final = """
local function release(result, claim, token, lease_ms)
  if redis.call('EXISTS', result) == 1 then return end
  local c = redis.call('HMGET', claim, 'holder', 'starts')
  if c[1] ~= token then return end
  redis.call('HDEL', claim, 'holder', 'until')
  redis.call('HSET', claim, 'starts', math.max(tonumber(c[2] or '1') - 1, 0))
  keep_for(claim, 2 * tonumber(lease_ms) + 60000)
end
"""
"""Gives a request's claim up, uncounted; after `PRELUDE`."""

ENTRIES: Final = (
    """
-- Before anything is written: Redis before 7.0 does not say what a user may, and keeps what is gone as pending.
if not redis.acl_check_cmd then return redis.error_reply('ERR queues need Redis 7.0 or newer, or Valkey') end
-- What is pending; nothing is where there is no group. Any other failure must not be taken for that.
local function pending(stream, group, ...)
  local rows = redis.pcall('XPENDING', stream, group, ...)
  if not rows.err then return rows end
  if string.find(rows.err, 'NOGROUP') then return {} end
  return error(rows)
end
local function mine(stream, group, id, consumer, count)
  if consumer == '' then return false end
  local rows = pending(stream, group, id, id, 1, consumer)
  return #rows == 1 and rows[1][4] == tonumber(count)
end
-- Of an entry that is not mine: GONE, nobody has it, or THEIRS.
local function whose(stream, group, id)
  if #pending(stream, group, id, id, 1) == 0 then return 'GONE' end
  return 'THEIRS'
end
-- Before anything is written: refused after a copy was made, the next try would make another.
local function may_forget(stream, group, id)
  if redis.acl_check_cmd('XACK', stream, group, id) and redis.acl_check_cmd('XDEL', stream, id) then return end
  error({err = 'NOPERM this user has no permissions to run XACK and XDEL'})
end
local function forget(stream, group, id)
  redis.call('XACK', stream, group, id)
  redis.call('XDEL', stream, id)
end
local function give_back(stream, group, returned, idle_ms, ids)
  local words = {unpack(ids)}
  for _, word in ipairs({'IDLE', idle_ms, 'JUSTID'}) do words[#words + 1] = word end
  redis.call('XCLAIM', stream, group, returned, 0, unpack(words))
end
"""
    + RELEASING
)
"""What the scripts share; after `PRELUDE`."""

SETTLE: Final = Script(
    PRELUDE
    + ENTRIES
    + """
-- KEYS stream, dead letters   ARGV group, id, consumer, count, fields of the dead letter or none
if not mine(KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]) then return {whose(KEYS[1], ARGV[1], ARGV[2])} end
may_forget(KEYS[1], ARGV[1], ARGV[2])
if #ARGV > 4 then redis.call('XADD', KEYS[2], '*', unpack(ARGV, 5)) end
forget(KEYS[1], ARGV[1], ARGV[2])
return {'DONE'}
"""
)
"""Acknowledge, or park, what has no reply to store."""

CONCLUDE: Final = Script(
    PRELUDE
    + FINISHING
    + ENTRIES
    + """
-- KEYS stream, dead letters, result, claim, outbox, note
-- ARGV group, id, consumer, count, token, reply, ttl s, status, usage event or '', key of the intake's record,
--      note or '', its ttl s, fields of the dead letter or none
local ours = mine(KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
if ours then may_forget(KEYS[1], ARGV[1], ARGV[2]) end
local done = finish(KEYS[3], KEYS[4], KEYS[5], ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9], '', ARGV[10])
if done[1] ~= 'STORED' then return done end
if ARGV[11] ~= '' then redis.pcall('SET', KEYS[6], ARGV[11], 'EX', ARGV[12]) end
if not ours then return {'STORED', whose(KEYS[1], ARGV[1], ARGV[2])} end
if #ARGV > 12 then redis.call('XADD', KEYS[2], '*', unpack(ARGV, 13)) end
forget(KEYS[1], ARGV[1], ARGV[2])
return {'STORED', 'DONE'}
"""
)
"""Result, usage event, dead letter and acknowledgement."""

RETRY: Final = Script(
    PRELUDE
    + ENTRIES
    + """
-- KEYS stream, delayed, result, claim
-- ARGV group, id, consumer, count, token, attempts of the copy, lease ms, delay ms, fields of the copy
local known = answered(KEYS[3])
if known then return known end
if not mine(KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]) then
  release(KEYS[3], KEYS[4], ARGV[5], ARGV[7])
  return {whose(KEYS[1], ARGV[1], ARGV[2])}
end
may_forget(KEYS[1], ARGV[1], ARGV[2])
local c = redis.call('HMGET', KEYS[4], 'holder', 'until', 'floor')
local now, delay = millis(), tonumber(ARGV[8])
if c[1] and c[1] ~= ARGV[5] and tonumber(c[2]) > now then return {'BUSY', tonumber(c[2]) - now} end
if delay > 0 then
  -- The entry's id makes it another member than any other copy.
  redis.call('ZADD', KEYS[2], now + delay, cmsgpack.pack({ARGV[2], unpack(ARGV, 9)}))
else
  redis.call('XADD', KEYS[1], '*', unpack(ARGV, 9))
end
redis.call('HDEL', KEYS[4], 'holder', 'until')
local floor = tonumber(c[3] or '0')
-- A copy that is no attempt (a gate was closed) is no news of those who died while running it.
if tonumber(ARGV[6]) > floor then redis.call('HSET', KEYS[4], 'floor', ARGV[6], 'starts', 0) end
keep_for(KEYS[4], 2 * tonumber(ARGV[7]) + 60000)
forget(KEYS[1], ARGV[1], ARGV[2])
return {'DONE'}
"""
)
"""The copy, the floor under it, and the end of the original. A claim that nobody holds counts as ours, as it does when
it is renewed."""

HAND_BACK: Final = Script(
    PRELUDE
    + ENTRIES
    + """
-- KEYS stream, and of a claim that is to be released: result, claim
-- ARGV group, consumer, consumer of what is given back, its idle ms, token, lease ms, then id and count of each
if #KEYS > 1 then release(KEYS[2], KEYS[3], ARGV[5], ARGV[6]) end
local ours = {}
for at = 7, #ARGV, 2 do
  if mine(KEYS[1], ARGV[1], ARGV[at], ARGV[2], ARGV[at + 1]) then ours[#ours + 1] = ARGV[at] end
end
if #ours > 0 then give_back(KEYS[1], ARGV[1], ARGV[3], ARGV[4], ours) end
return #ours
"""
)
"""Uncounted, for whoever takes first."""

KEEP: Final = Script(
    PRELUDE
    + ENTRIES
    + """
-- KEYS stream   ARGV group, consumer, then id and count of each
local lost, kept = {}, {}
for at = 3, #ARGV, 2 do
  local list = mine(KEYS[1], ARGV[1], ARGV[at], ARGV[2], ARGV[at + 1]) and kept or lost
  list[#list + 1] = ARGV[at]
end
if #kept > 0 then
  kept[#kept + 1] = 'JUSTID'
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, unpack(kept))
end
return lost
"""
)
"""Another lease for what is in our hands; says what is not any more."""

TAKE: Final = Script(
    PRELUDE
    + ENTRIES
    + """
-- KEYS stream, delayed, dead letters
-- ARGV group, consumer, lease ms, most entries, most retries shown, most bytes
local now, most, bytes_left = millis(), tonumber(ARGV[4]), tonumber(ARGV[6])
may_forget(KEYS[1], ARGV[1], '0-1')  -- Who may not settle shall not take.
-- An id, then names and values by turns. What is not so would be refused, and stand before all others for ever.
local function is_copy(fields)
  if type(fields) ~= 'table' or #fields < 3 or #fields > 4001 or #fields % 2 == 0 then return false end
  for _, part in ipairs(fields) do
    if type(part) ~= 'string' then return false end
  end
  return true
end
local show_bytes = bytes_left
for _ = 1, tonumber(ARGV[5]) do  -- One by one, as they may be of any size, too.
  local member = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1)[1]
  if not member or show_bytes <= 0 then break end
  show_bytes = show_bytes - #member
  local readable, fields = pcall(cmsgpack.unpack, member)
  local added
  if readable and is_copy(fields) then
    added = redis.pcall('XADD', KEYS[1], '*', unpack(fields, 2))
  else
    added = redis.pcall('XADD', KEYS[3], '*', 'request', member, 'reason', 'invalid_request', 'detail',
      'it lay among the delayed retries and is none')
  end
  if type(added) == 'table' then break end  -- Memory is full: it stays where it is.
  redis.call('ZREM', KEYS[2], member)
end
local due = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
local wait = due[2] and math.max(tonumber(due[2]) - now, 0) or -1
-- What was given back is idle for longer than every lease. Of ours, what nobody has kept for a lease is taken, too:
-- the reply that brought it was lost, or giving it back failed.
local taken, gone = {}, 0
for _, row in ipairs(pending(KEYS[1], ARGV[1], 'IDLE', ARGV[3], '-', '+', most)) do
  if bytes_left <= 0 then break end
  -- One by one: how large an entry is shows when it is there, and an answer with all of them may be too large.
  local entry = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, row[1])[1]
  if entry then
    taken[#taken + 1] = {entry[1], row[4] + 1, entry[2]}
    for _, part in ipairs(entry[2]) do bytes_left = bytes_left - #part end
  else
    gone = gone + 1
  end
end
return {wait, gone, taken}
"""
)
"""Show the retries that are due; take what was given back, and what its holder has not kept for a lease."""

LEAVE: Final = Script(
    PRELUDE
    + ENTRIES
    + """
-- KEYS stream   ARGV group, consumer, consumer of what is given back, its idle ms
for _ = 1, 100 do
  local ids = {}
  for _, row in ipairs(pending(KEYS[1], ARGV[1], '-', '+', 1000, ARGV[2])) do ids[#ids + 1] = row[1] end
  if #ids == 0 then
    redis.pcall('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
    return 1
  end
  give_back(KEYS[1], ARGV[1], ARGV[3], ARGV[4], ids)
end
return 0
"""
)
"""A session is over: what is pending for it goes back, and its consumer goes, once nothing is pending for it."""

TIDY: Final = Script(
    """
-- KEYS stream   ARGV group, consumer of what is given back, idle ms
local gone = 0
for _, row in ipairs(redis.pcall('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local c = {}
  for at = 1, #row, 2 do c[row[at]] = row[at + 1] end
  if c['name'] ~= ARGV[2] and c['pending'] == 0 and c['idle'] > tonumber(ARGV[3]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], c['name'])
    gone = gone + 1
  end
end
return gone
"""
)
"""Forget consumers that were not heard of for long. One for which something is pending stays: that would go with it."""

BACKLOG: Final = Script(
    PRELUDE
    + """
-- KEYS stream, delayed   ARGV group, consumer of what is given back
local length, lag, last, pending, returned = redis.call('XLEN', KEYS[1]), false, '0-0', 0, 0
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
if groups.err and not string.find(groups.err, 'no such key') then return groups end
for _, row in ipairs(groups) do
  local g = {}
  for at = 1, #row, 2 do g[row[at]] = row[at + 1] end
  if g['name'] == ARGV[1] then lag, last, pending = g['lag'], g['last-delivered-id'], g['pending'] end
end
local how = 'lag'
local never = lag
if not lag or lag > length then how, never = 'length', math.max(length - pending, 0) end
if pending > 0 then
  for _, row in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1])[4] or {}) do
    if row[1] == ARGV[2] then returned = tonumber(row[2]) end
  end
end
-- Both ways may be off after entries were deleted by others; whether there is one at all is seen.
local first = redis.call('XRANGE', KEYS[1], '(' .. last, '+', 'COUNT', 1)
if #first == 0 then never = 0 elseif never < 1 then never = 1 end
-- The oldest of those that nobody holds, by its own word, else by its id. Lua's numbers are more than other people's,
-- nan and hexadecimal ones among them, so it is written anew.
local function since(entries)
  if #entries == 0 then return '' end
  local fields, said = entries[1][2], nil
  for at = 1, #fields, 2 do
    if fields[at] == 'enqueued_at' then said = tonumber(fields[at + 1]) end
  end
  if not said or not (said >= 0 and said < 1e12) then said = tonumber(string.match(entries[1][1], '^%d+')) / 1000 end
  return string.format('%.6f', said)
end
local oldest = {since(first), ''}
if returned > 0 then
  local row = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2])[1]
  if row then oldest[2] = since(redis.call('XRANGE', KEYS[1], row[1], row[1])) end
end
return {never, returned, pending - returned, redis.call('ZCARD', KEYS[2]), how, oldest[1], oldest[2], millis()}
"""
)
"""What waits, looked at in one moment. `lag` is nil after an entry was deleted before it was delivered; then it is what
the stream holds less what is pending, since whatever is settled is deleted, too."""

STREAM_SCRIPTS: Final = (SETTLE, CONCLUDE, RETRY, HAND_BACK, KEEP, TAKE, LEAVE, TIDY, BACKLOG)
