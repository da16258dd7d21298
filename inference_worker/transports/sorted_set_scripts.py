"""The scripts of a queue in a sorted set: each step is one script, and only the holder of a claim can take it.

A claim is a member that was moved out of the queue: `<queue>:claimed` has it, `<queue>:claim-owners` whose it is, and
`<queue>:claims-idx` until when, in Unix seconds. Processes of llm-d-async use the same three keys: each takes over what
the other has left lying, and neither touches what is not its own. An owner here is a session and the number of the
claim, since what came back to a session is another delivery.

`<queue>:claim-notes` is ours alone: the member's score, and what a member in our own format cannot say by itself. All
may be lost: then the score is read out of the member, and it counts as new.

Every script may be repeated with the same arguments. A script is not rolled back when a command in it fails: so what
needs memory, or may be refused, comes first, and a member is written at its new place before it leaves the old one.
"""

from typing import Final

from inference_worker.redis_scripts import FINISHING, PRELUDE, Script
from inference_worker.transports.stream_scripts import RELEASING

PUSHED: Final = b',"pushed":true}'
"""How a terminal result ends whose message for the result list was sent with it, in the same step."""

BOOK: Final = """
-- KEYS of every script: 1 queue, 2 claimed, 3 owners, 4 index, 5 notes, 6 delayed, 7 retries of all queues, 8 dead
-- Before anything is written: Redis before 7.0 does not say what a user may.
if not redis.acl_check_cmd then return redis.error_reply('ERR queues need Redis 7.0 or newer, or Valkey') end
local function seconds()
  local t = redis.call('TIME')
  return tonumber(t[1]) + tonumber(t[2]) / 1000000
end
local function decoded(text)
  local fine, value = pcall(cjson.decode, text)
  if fine and type(value) == 'table' then return value end
end
local function text_of(value)
  if type(value) == 'string' then return value end
  return ''
end
-- The head of an envelope as producers write it: `internal` and the id, without a look at the payload behind them. What
-- is not so is nil, never wrong: a piece that is not one JSON object by itself does not decode.
local function head_of(member)
  local internal, id = string.match(member, '^{"internal":(%b{}),"request_kind":"%a*","data":{"id":"([^"\\\\]*)"')
  if id then return decoded(internal), id end
end
-- Whose it is: the request's id, and the token of its submission where it has one.
local function names_of(member)
  local internal, id = head_of(member)
  if internal then return id, text_of(internal.request_token) end
  id = string.match(member, '^{"request_id": ?"([^"\\\\]*)"')
  if id then return id, '' end
  local all = decoded(member)
  if not all then return '', '' end
  if type(all.data) == 'table' then
    return text_of(all.data.id), type(all.internal) == 'table' and text_of(all.internal.request_token) or ''
  end
  return text_of(all.request_id), ''
end
local function claim_id_of(member)
  local id, token = names_of(member)
  if id == '' then return '\\0' .. redis.sha1hex(member), '', '' end
  if token == '' then return id, id, '' end
  return id .. '\\0' .. token, id, token
end
local function usable(number)
  return type(number) == 'number' and number > 0 and number < 1e11
end
-- The score of a member that has none: the deadline, and the place among those that have the same one.
local function score_of(member, otherwise)
  local all = decoded(member)
  if not all then return otherwise end
  local data, internal = all.data, all.internal
  if type(data) == 'table' and usable(data.deadline) then
    local at = type(internal) == 'table' and internal.enqueued_at_ms
    if type(at) ~= 'number' or not (at > 0) then return data.deadline end
    local offset = math.min(math.max(at - (data.deadline * 1000 - 131072000), 0), 131072000 - 1)
    return data.deadline + math.floor(offset * 2097152 / 131072000) / 2097152
  end
  if usable(all.received_at) and usable(all.timeout_s) then return all.received_at + all.timeout_s end
  return otherwise
end
local function note_of(notes, id)
  local packed = redis.call('HGET', notes, id)
  if not packed then return {} end
  local fine, note = pcall(cmsgpack.unpack, packed)
  if fine and type(note) == 'table' then return note end
  return {}
end
-- s score, d deliveries, l lapses, a attempts, m message id, h headers, u kept until. Left behind where another program
-- settles the member: `TIDY` finds it.
local function write_note(notes, id, note, now)
  note.u = math.max(tonumber(note.s) or 0, now) + 86400
  redis.call('HSET', notes, id, cmsgpack.pack(note))
end
local function mine(id, owner)
  return owner ~= '' and redis.call('HGET', KEYS[3], id) == owner
end
local function whose(id)
  if redis.call('HEXISTS', KEYS[3], id) == 1 then return 'THEIRS' end
  return 'GONE'
end
-- Before anything is written: who may not take away shall not add.
local function may_forget()
  if redis.acl_check_cmd('ZREM', KEYS[1], 'x') and redis.acl_check_cmd('HDEL', KEYS[2], 'x') then return end
  error({err = 'NOPERM this user has no permissions to run ZREM and HDEL'})
end
local function forget(id)
  redis.call('HDEL', KEYS[2], id)
  redis.call('HDEL', KEYS[3], id)
  redis.call('ZREM', KEYS[4], id)
end
local function put_back(id, lapsed, now)
  local member = redis.call('HGET', KEYS[2], id)
  if member then
    local note = note_of(KEYS[5], id)
    if not note.s then note.s = score_of(member, now) end
    if lapsed then note.l = (note.l or 0) + 1 end
    write_note(KEYS[5], id, note, now)
    redis.call('ZADD', KEYS[1], note.s, member)
  end
  forget(id)
end
"""
"""What the scripts share; after `PRELUDE`."""

RESULTS: Final = """
-- KEYS of a request in an envelope: 9 result, 10 claim, 11 outbox, 12 note, 13 list, 14 active, 15 cancel, 16 payload
-- A result must not be stored, and then not be sent: the list is looked at before.
local function may_push()
  local kind = redis.call('TYPE', KEYS[13]).ok
  if kind ~= 'none' and kind ~= 'list' then error({err = 'WRONGTYPE the result list is a ' .. kind}) end
  if redis.acl_check_cmd('LPUSH', KEYS[13], 'x') and redis.acl_check_cmd('DEL', KEYS[14], KEYS[15], KEYS[16]) then
    return
  end
  error({err = 'NOPERM this user has no permissions to run LPUSH and DEL'})
end
local function push(message, ttl_s, token)
  redis.call('LPUSH', KEYS[13], message)
  if tonumber(ttl_s) > 0 then redis.call('EXPIRE', KEYS[13], ttl_s) end
  -- Of this submission alone: a newer one under the same id keeps its own.
  for at = 14, 15 do
    if token ~= '' and redis.call('GET', KEYS[at]) == token then redis.call('DEL', KEYS[at]) end
  end
  if token ~= '' then redis.call('DEL', KEYS[16]) end
end
"""
"""Sending a result to its list; after `BOOK`."""

_DUE: Final = """
-- ARGV session, number of the first claim, lease s, most claims, most moved, most bytes
local now, lease, most_moved = seconds(), tonumber(ARGV[3]), tonumber(ARGV[5])
local most, bytes_left = tonumber(ARGV[4]), tonumber(ARGV[6])
may_forget()  -- Who may not settle shall not take.
if most == 0 then  -- Whether it is a sorted set, and this a server to write to. No claim has that id.
  redis.call('ZCARD', KEYS[1])
  redis.call('HDEL', KEYS[2], '\\0')
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', now, 'LIMIT', 0, most_moved)) do
  put_back(id, true, now)
end
-- One by one, as they may be of any size.
local function next_due(set)
  return redis.call('ZRANGEBYSCORE', set, '-inf', now, 'LIMIT', 0, 1)[1]
end
local moved = 0
while moved < most_moved do
  local member = next_due(KEYS[6])
  if not member then break end
  local note = note_of(KEYS[5], claim_id_of(member))
  if type(redis.pcall('ZADD', KEYS[1], note.s or score_of(member, now), member)) == 'table' then break end
  redis.call('ZREM', KEYS[6], member)
  moved = moved + 1
end
"""
_RETRIES_OF_ALL: Final = """
local stuck = false
while moved < most_moved do
  local member = next_due(KEYS[7])
  if not member then break end
  local internal = head_of(member)
  if not internal then
    local all = decoded(member)
    internal = all and type(all.internal) == 'table' and all.internal or {}
  end
  local origin = text_of(internal.request_queue_name)
  -- One that names this very set would be put there and taken away again.
  if origin == '' or origin == KEYS[7] then origin = KEYS[1] end
  -- Notes of another user's queue, or of what is none, must not end all that look here. Only a score is wanted.
  local fine, note = pcall(note_of, origin .. ':claim-notes', claim_id_of(member))
  local added = redis.pcall('ZADD', origin, fine and note.s or score_of(member, now), member)
  if type(added) == 'table' and string.find(added.err, 'WRONGTYPE') then
    -- It names what is no queue, and would stand before all others for ever.
    added = redis.pcall('XADD', KEYS[8], '*', 'request', member, 'reason', 'invalid_request', 'detail',
      'its queue is none', 'queue', origin)
  end
  if type(added) == 'table' and added.err then  -- Memory is full, or it is another user's queue: it stays where it is.
    stuck = true
    break
  end
  redis.call('ZREM', KEYS[7], member)
  moved = moved + 1
end
"""
_EARLIEST: Final = """
local wait = -1
for at = 6, 7 do
  local due = redis.call('ZRANGE', KEYS[at], 0, 0, 'WITHSCORES')[2]
  if due and not (at == 7 and stuck) then
    local left = math.max(tonumber(due) - now, 0)
    if wait < 0 or left < wait then wait = left end
  end
end
local rows, number = {}, tonumber(ARGV[2])
while #rows < most and bytes_left > 0 do
  local head = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
  local member, score = head[1], head[2]
  if not member or (ARGV[7] and tonumber(score) >= tonumber(ARGV[7])) then break end
  local claim, id, token = claim_id_of(member)
  local note = note_of(KEYS[5], claim)
  note.s, note.d = score, (note.d or 0) + 1
  write_note(KEYS[5], claim, note, now)
  redis.call('HSET', KEYS[2], claim, member)
  redis.call('HSET', KEYS[3], claim, ARGV[1] .. ':' .. number)
  redis.call('ZADD', KEYS[4], math.min(now + lease, math.max(tonumber(score), now) + 300), claim)
  redis.call('ZREM', KEYS[1], member)
"""
_CANCELLED: Final = """
  local cancelled = token ~= '' and redis.call('GET', 'request-cancel:' .. id) == token and 1 or 0
"""
_TAKEN: Final = """
  rows[#rows + 1] = {claim, number, member, score, token, cancelled, note.a or 0, note.d, note.l or 0,
    note.m or '', note.h or {}}
  number, bytes_left = number + 1, bytes_left - #member
end
return {wait < 0 and -1 or math.ceil(wait * 1000), rows, bytes_left > 0 and 0 or 1}
"""

TAKE: Final = Script(PRELUDE + BOOK + _DUE + _RETRIES_OF_ALL + _EARLIEST + _CANCELLED + _TAKEN)
"""Give back what its holder has not kept, show the retries that are due, and take the earliest deadlines.

A claim ends five minutes after the deadline at the latest, as theirs do. A member that is there again while it is
claimed is claimed anew: the late holder finds out."""

KEEP: Final = Script(
    PRELUDE
    + BOOK
    + """
-- ARGV lease s, then of each: claim, owner, score, key that cancels it or '', token
local now, lease, lost, cancelled = seconds(), tonumber(ARGV[1]), {}, {}
for at = 2, #ARGV, 5 do
  local id = ARGV[at]
  if mine(id, ARGV[at + 1]) then
    redis.call('ZADD', KEYS[4], math.min(now + lease, math.max(tonumber(ARGV[at + 2]), now) + 300), id)
    if ARGV[at + 3] ~= '' and redis.call('GET', ARGV[at + 3]) == ARGV[at + 4] then cancelled[#cancelled + 1] = id end
  else
    lost[#lost + 1] = id
  end
end
return {lost, cancelled}
"""
)
"""Another lease for what is in our hands; says what is not any more, and what its producer has cancelled."""

CONCLUDE: Final = Script(
    PRELUDE
    + FINISHING
    + BOOK
    + RESULTS
    + """
-- ARGV claim, owner, token of the hold, reply, ttl s, status, usage event or '', key of the intake's record,
--      note or '', its ttl s, message for the list or '', ttl of the list, token of the submission, fields of the dead
--      letter or none
local known = answered(KEYS[9])
if known then return known end
local ours, in_envelope = mine(ARGV[1], ARGV[2]), ARGV[11] ~= ''
if in_envelope then
  -- Whoever has it now sends its result; ours is kept for it by another step.
  if not ours then return {whose(ARGV[1])} end
  may_push()
end
if ours then may_forget() end
local done = finish(KEYS[9], KEYS[10], KEYS[11], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7], '', ARGV[8])
if done[1] ~= 'STORED' then return done end
if ARGV[9] ~= '' then redis.pcall('SET', KEYS[12], ARGV[9], 'EX', ARGV[10]) end
if not ours then return {'STORED', whose(ARGV[1])} end
if in_envelope then push(ARGV[11], ARGV[12], ARGV[13]) end
if #ARGV > 13 then redis.call('XADD', KEYS[8], '*', unpack(ARGV, 14)) end
forget(ARGV[1])
redis.call('HDEL', KEYS[5], ARGV[1])
return {'STORED', 'DONE'}
"""
)
"""Result, its message, usage event, dead letter, and the end of the claim."""

SETTLE: Final = Script(
    PRELUDE
    + BOOK
    + RESULTS
    + """
-- ARGV claim, owner, how a sent result ends, message for the list or '', ttl of the list, token of the submission,
--      the result as one that is sent or '', fields of the dead letter or none
if not mine(ARGV[1], ARGV[2]) then return {whose(ARGV[1])} end
may_forget()
if #KEYS > 8 and redis.call('EXISTS', KEYS[9]) == 1 and
    redis.call('GETRANGE', KEYS[9], -#ARGV[3], -1) ~= ARGV[3] then
  if ARGV[4] == '' then return {'OWED', redis.call('GET', KEYS[9])} end
  may_push()
  redis.call('SET', KEYS[9], ARGV[7], 'KEEPTTL')
  push(ARGV[4], ARGV[5], ARGV[6])
end
if #ARGV > 7 then redis.call('XADD', KEYS[8], '*', unpack(ARGV, 8)) end
forget(ARGV[1])
redis.call('HDEL', KEYS[5], ARGV[1])
return {'DONE'}
"""
)
"""End the claim of what has no reply to store. One that was stored without being sent is owed to its list: by a holder
that was late, or by who cancelled it."""

_COPYING: Final = """
-- The copy with its time, and what it cannot say by itself.
local note = note_of(KEYS[5], ARGV[1])
if not note.s then note.s = score_of(ARGV[7], now) end
note.a, note.d, note.l = tonumber(ARGV[4]), 0, 0
write_note(KEYS[5], ARGV[1], note, now + delay)
if delay > 0 then
  redis.call('ZADD', ARGV[8] == '1' and KEYS[7] or KEYS[6], now + delay, ARGV[7])
else
  redis.call('ZADD', KEYS[1], note.s, ARGV[7])
end
"""

RETRY: Final = Script(
    PRELUDE
    + RELEASING
    + BOOK
    + """
-- KEYS …, 9 result, 10 claim
-- ARGV claim, owner, token of the hold, attempts of the copy, lease of the hold in ms, delay s, the copy,
--      '1' where it is in an envelope
local known = answered(KEYS[9])
if known then return known end
if not mine(ARGV[1], ARGV[2]) then
  release(KEYS[9], KEYS[10], ARGV[3], ARGV[5])
  return {whose(ARGV[1])}
end
may_forget()
local c = redis.call('HMGET', KEYS[10], 'holder', 'until', 'floor')
local now, delay = seconds(), tonumber(ARGV[6])
if c[1] and c[1] ~= ARGV[3] and tonumber(c[2]) > now * 1000 then
  return {'BUSY', math.ceil(tonumber(c[2]) - now * 1000)}
end
"""
    + _COPYING
    + """
redis.call('HDEL', KEYS[10], 'holder', 'until')
local floor = tonumber(c[3] or '0')
-- A copy that is no attempt (a gate was closed) is no news of those who died while running it.
if tonumber(ARGV[4]) > floor then redis.call('HSET', KEYS[10], 'floor', ARGV[4], 'starts', 0) end
keep_for(KEYS[10], 2 * tonumber(ARGV[5]) + 60000)
forget(ARGV[1])
return {'DONE'}
"""
)
"""The copy with its time, the floor under it, and the end of the claim. A copy in an envelope lies where all queues'
retries lie, and any process moves it; one of ours, whose attempts only our notes know, among our own."""

HAND_BACK: Final = Script(
    PRELUDE
    + RELEASING
    + BOOK
    + """
-- KEYS …, and of a hold that is to be released: 9 result, 10 claim
-- ARGV token of the hold, its lease ms, then claim and owner of each
if #KEYS > 8 then release(KEYS[9], KEYS[10], ARGV[1], ARGV[2]) end
may_forget()
local back, now = 0, seconds()
for at = 3, #ARGV, 2 do
  if mine(ARGV[at], ARGV[at + 1]) then
    put_back(ARGV[at], false, now)
    back = back + 1
  end
end
return back
"""
)
"""Back to its place in the queue, uncounted."""

LEAVE: Final = Script(
    PRELUDE
    + BOOK
    + """
-- ARGV session, then the numbers of its claims that are in its hands
local kept, back, now = {}, 0, seconds()
for at = 2, #ARGV do kept[ARGV[1] .. ':' .. ARGV[at]] = true end
may_forget()
local all = redis.call('HGETALL', KEYS[3])
for at = 1, #all, 2 do
  local owner = all[at + 1]
  if string.sub(owner, 1, #ARGV[1] + 1) == ARGV[1] .. ':' and not kept[owner] then
    put_back(all[at], false, now)
    back = back + 1
  end
end
return back
"""
)
"""Give back what is claimed for a session and not in its hands: it leaves, or the answer that brought it was lost."""

PUBLISH: Final = Script(
    PRELUDE
    + BOOK
    + """
-- ARGV member, score, message id or '', headers by turns
local score = tonumber(ARGV[2])
-- Of one deadline in the order of submission: a hair behind the last one.
local last = redis.call('ZRANGE', KEYS[1], '(' .. string.format('%.17g', score + 0.001), score, 'BYSCORE', 'REV',
  'LIMIT', 0, 1, 'WITHSCORES')
if last[1] and last[1] ~= ARGV[1] then score = tonumber(last[2]) + 0.0000005 end
if #ARGV > 2 and (ARGV[3] ~= '' or #ARGV > 3) then
  local note = {s = score, m = ARGV[3], h = {unpack(ARGV, 4)}}
  write_note(KEYS[5], claim_id_of(ARGV[1]), note, seconds())
end
redis.call('ZADD', KEYS[1], score, ARGV[1])
return 1
"""
)
"""A new member, and what it cannot say by itself."""

BACKLOG: Final = Script(
    """
local head = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
return {redis.call('ZCARD', KEYS[1]), redis.call('HLEN', KEYS[2]), redis.call('ZCARD', KEYS[6]),
  redis.call('ZCARD', KEYS[7]), head[2] or ''}
"""
)
"""What waits, looked at in one moment."""

TIDY: Final = Script(
    PRELUDE
    + BOOK
    + """
-- ARGV cursor   Notes whose member is long gone, settled by another program.
local now = seconds()
local page = redis.call('HSCAN', KEYS[5], ARGV[1], 'COUNT', 1000)
for at = 1, #page[2], 2 do
  local fine, note = pcall(cmsgpack.unpack, page[2][at + 1])
  local over = not fine or type(note) ~= 'table' or (tonumber(note.u) or 0) < now
  if over and redis.call('HEXISTS', KEYS[2], page[2][at]) == 0 then redis.call('HDEL', KEYS[5], page[2][at]) end
end
return page[1]
"""
)
"""Forget, a page at a time, notes that nobody needs any more."""

# ---------------------------------------------------------------- a queue on a Cluster, all of whose keys share a slot

TAKE_IN_SLOT: Final = Script(
    PRELUDE
    + BOOK
    + _DUE
    + """
-- Its own: nothing else lies in its slot, and nothing there is of another queue.
local stuck = false
while moved < most_moved do
  local member = next_due(KEYS[7])
  if not member then break end
  local note = note_of(KEYS[5], claim_id_of(member))
  if type(redis.pcall('ZADD', KEYS[1], note.s or score_of(member, now), member)) == 'table' then break end
  redis.call('ZREM', KEYS[7], member)
  moved = moved + 1
end
"""
    + _EARLIEST
    + """
  local cancelled = 0
"""
    + _TAKEN
)
"""`TAKE`, but for what lies elsewhere: what is cancelled is asked for afterwards."""

FENCE: Final = Script(
    PRELUDE
    + BOOK
    + """
-- ARGV claim, owner, lease s, score
if not mine(ARGV[1], ARGV[2]) then return {whose(ARGV[1])} end
may_forget()
local now = seconds()
redis.call('ZADD', KEYS[4], math.min(now + tonumber(ARGV[3]), math.max(tonumber(ARGV[4]), now) + 300), ARGV[1])
return {'OURS'}
"""
)
"""Whether a claim is ours, and another lease for what is done elsewhere before it is ended."""

COPY: Final = Script(
    PRELUDE
    + BOOK
    + """
-- ARGV claim, owner, -, attempts of the copy, -, delay s, the copy, '1' where it is in an envelope
if not mine(ARGV[1], ARGV[2]) then return {whose(ARGV[1])} end
may_forget()
local now, delay = seconds(), tonumber(ARGV[6])
"""
    + _COPYING
    + """
forget(ARGV[1])
return {'DONE'}
"""
)
"""What of `RETRY` is the queue's."""

BRING: Final = Script(
    PRELUDE
    + BOOK
    + """
-- ARGV member
local note = note_of(KEYS[5], claim_id_of(ARGV[1]))
redis.call('ZADD', KEYS[1], note.s or score_of(ARGV[1], seconds()), ARGV[1])
return 1
"""
)
"""A retry that was due elsewhere, back in its queue."""

SORTED_SET_SCRIPTS: Final = (TAKE, KEEP, CONCLUDE, SETTLE, RETRY, HAND_BACK, LEAVE, PUBLISH, BACKLOG, TIDY)
