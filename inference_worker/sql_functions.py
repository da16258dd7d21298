"""What is done in Postgres in one step: functions of version 1. Locks are taken in one order: request, then state.

Each may be called again with the same arguments. Time is the server's. `#variable_conflict` decides for columns where a
name could be a result's, too.
"""

from typing import Final

FUNCTIONS: Final = r"""
-- Telling, and wanting to be told. Both take a lock on what it is about, so that whoever registers and then looks
-- misses nothing: what was put there before is seen, and what comes later is told.
create function iw1_tell(p_what text, p_channel text, p_said text) returns void language plpgsql as $$
begin
  perform pg_advisory_xact_lock_shared(hashtextextended(p_what, 7203));
  if exists (select 1 from iw_waiting w where w.what = p_what and w.until > clock_timestamp()) then
    perform pg_notify(p_channel, p_said);
  end if;
end $$;

create function iw1_want(p_what text, p_who text, p_seconds double precision) returns void language plpgsql as $$
begin
  perform pg_advisory_xact_lock(hashtextextended(p_what, 7203));
  insert into iw_waiting values (p_what, p_who, clock_timestamp() + make_interval(secs => p_seconds))
    on conflict (what, who) do update set until = excluded.until;
end $$;

create function iw1_tell_queue(p_queue text) returns void language sql as $$
  select iw1_tell('iw_q_' || md5(p_queue), 'iw_q_' || md5(p_queue), '')
$$;

create function iw1_tell_route(p_route text) returns void language sql as $$
  select iw1_tell('iw_r_' || md5(p_route), 'iw_r_' || md5(p_route), '')
$$;

-- ---------------------------------------------------------------- results and claims

create function iw1_claim(
  p_id bytea, p_attempt int, p_token text, p_lease double precision, p_deadline double precision,
  out said text, out known bytea, out number double precision
) language plpgsql as $$
#variable_conflict use_column
declare
  s iw_state;
  at timestamptz;
  ends timestamptz;
begin
  loop
    select * into s from iw_state where id = p_id for update;
    at := clock_timestamp();
    ends := greatest(to_timestamp(least(p_deadline, 4e9)), at) + make_interval(secs => 2 * p_lease + 60);
    if not found then
      insert into iw_state (id, holder, held_until, starts, expires)
        values (p_id, p_token, at + make_interval(secs => p_lease), 1, ends) on conflict do nothing;
      continue when not found;
      said := 'CLAIMED'; number := 1;
      return;
    end if;
    exit;
  end loop;
  if s.expires <= at then
    s.reply := null; s.holder := null; s.lowest := 0; s.starts := 0;
  end if;
  if s.reply is not null then
    said := 'KNOWN'; known := case when s.status = 'failed' then s.reply end;
    return;
  end if;
  if p_attempt < s.lowest then
    said := 'SUPERSEDED';
    return;
  end if;
  if s.holder is not null and s.holder <> p_token and s.held_until > at then
    said := 'BUSY'; number := extract(epoch from s.held_until - at);
    return;
  end if;
  said := 'CLAIMED'; number := s.starts + (s.holder is distinct from p_token)::int;
  update iw_state set holder = p_token, held_until = at + make_interval(secs => p_lease), starts = number,
    lowest = s.lowest, status = null, reply = null, sent = false, expires = ends where id = p_id;
end $$;

create function iw1_renew(p_id bytea, p_token text, p_lease double precision, out said text, out known bytea)
language plpgsql as $$
#variable_conflict use_column
declare
  s iw_state;
  at timestamptz;
  ends timestamptz;
begin
  loop
    select * into s from iw_state where id = p_id for update;
    at := clock_timestamp();
    ends := at + make_interval(secs => 2 * p_lease + 60);
    if not found then
      insert into iw_state (id, holder, held_until, expires)
        values (p_id, p_token, at + make_interval(secs => p_lease), ends) on conflict do nothing;
      continue when not found;
      said := 'OK';
      return;
    end if;
    exit;
  end loop;
  if s.expires <= at then
    s.reply := null; s.holder := null; s.lowest := 0; s.starts := 0;
  end if;
  if s.reply is not null then
    said := 'KNOWN'; known := case when s.status = 'failed' then s.reply end;
    return;
  end if;
  if s.holder is not null and s.holder <> p_token and s.held_until > at then
    said := 'LOST';
    return;
  end if;
  said := 'OK';
  update iw_state set holder = p_token, held_until = at + make_interval(secs => p_lease), starts = s.starts,
    lowest = s.lowest, status = null, reply = null, sent = false, expires = greatest(s.expires, ends) where id = p_id;
end $$;

create function iw1_release(p_id bytea, p_token text, p_floor int, p_lease double precision) returns void
language plpgsql as $$
#variable_conflict use_column
declare
  s iw_state;
  at timestamptz;
  ends timestamptz;
begin
  loop
    select * into s from iw_state where id = p_id for update;
    at := clock_timestamp();
    ends := at + make_interval(secs => 2 * p_lease + 60);
    if not found then
      if p_floor is null then return; end if;
      insert into iw_state (id, lowest, expires) values (p_id, p_floor, ends) on conflict do nothing;
      continue when not found;
      return;
    end if;
    exit;
  end loop;
  if s.expires <= at then
    s.reply := null; s.holder := null; s.lowest := 0; s.starts := 0;
  end if;
  if s.reply is not null then return; end if;
  if s.holder = p_token then
    s.holder := null;
    s.starts := case when p_floor is null then greatest(s.starts - 1, 0) else 0 end;
  end if;
  update iw_state set holder = s.holder, starts = s.starts, lowest = greatest(s.lowest, coalesce(p_floor, 0)),
    status = null, reply = null, sent = false, expires = greatest(s.expires, ends) where id = p_id;
end $$;

create function iw1_finish(
  p_id bytea, p_token text, p_reply bytea, p_status text, p_ttl double precision, p_event bytea, p_deployment text,
  p_past_token boolean, p_sent boolean, out said text, out known bytea, out left_s double precision
) language plpgsql as $$
#variable_conflict use_column
declare
  s iw_state;
  at timestamptz;
  named text := encode(sha256(p_id), 'hex');
begin
  loop
    select * into s from iw_state where id = p_id for update;
    at := clock_timestamp();
    if not found then
      insert into iw_state (id, status, reply, sent, expires)
        values (p_id, p_status, p_reply, p_sent, at + make_interval(secs => p_ttl)) on conflict do nothing;
      continue when not found;
      exit;
    end if;
    if s.expires > at then
      if s.reply is not null then
        said := 'KNOWN'; known := case when s.status = 'failed' then s.reply end;
        return;
      end if;
      -- A late success counts, whoever has the claim; a failure must not end what another rightly runs.
      if p_status = 'failed' and not p_past_token and s.holder <> p_token and s.held_until > at then
        said := 'BUSY'; left_s := extract(epoch from s.held_until - at);
        return;
      end if;
    end if;
    update iw_state set holder = null, held_until = null, lowest = 0, starts = 0, status = p_status, reply = p_reply,
      sent = p_sent, expires = at + make_interval(secs => p_ttl) where id = p_id;
    exit;
  end loop;
  if p_event is not null then
    insert into iw_usage (deployment, event) values (p_deployment, p_event);
  end if;
  perform iw1_tell('iw_e_' || named, 'iw_ended', named);
  said := 'STORED';
end $$;

-- Forget a failed result and the claim, so that the request can run anew.
create function iw1_make_room(p_id bytea) returns text language plpgsql as $$
declare
  s iw_state;
begin
  select * into s from iw_state where id = p_id for update;
  if not found then return 'DONE'; end if;
  if s.expires > clock_timestamp() then
    if s.status = 'completed' then return 'COMPLETED'; end if;
    if s.reply is null and s.holder is not null and s.held_until > clock_timestamp() then return 'BUSY'; end if;
  end if;
  delete from iw_state where id = p_id;
  return 'DONE';
end $$;

create function iw1_note(p_id bytea, p_note bytea, p_ttl double precision) returns void language sql as $$
  insert into iw_notes values (p_id, p_note, clock_timestamp() + make_interval(secs => p_ttl))
    on conflict (id) do update set note = excluded.note, expires = excluded.expires
$$;

-- ---------------------------------------------------------------- the queue

-- Give back what its holder has not kept, show the retries that are due, and claim the earliest deadlines. The first
-- row says when there is something to look for again, and whether there may be more now. Nothing is written where there
-- is nothing.
create function iw1_take(
  p_queue text, p_owner text, p_wanted int, p_bytes bigint, p_lease double precision, p_moved int, p_told boolean
) returns table (
  seq bigint, wait_s double precision, more boolean, request_id text, token text, deadline double precision,
  attempt bigint, cancelled boolean, attempts int, deliveries int, lapses int, message_id text, headers bytea,
  body bytea, payload bytea
) language plpgsql as $$
#variable_conflict use_column
declare
  at timestamptz := clock_timestamp();
  one record;
  seqs bigint[] := '{}';
  total bigint := 0;
  full_ boolean := false;
  moved int;
  first timestamptz;
begin
  update iw_requests r set owner = null, lease_until = null, lapses = r.lapses + 1 where r.seq in (
    select h.seq from iw_requests h where h.queue = p_queue and h.owner is not null and h.lease_until <= at
    order by h.lease_until limit p_moved for update skip locked);
  get diagnostics moved = row_count;
  full_ := moved >= p_moved;
  update iw_requests r set due = null where r.seq in (
    select d.seq from iw_requests d where d.queue = p_queue and d.due is not null and d.due <= at
    order by d.due limit p_moved for update skip locked);
  get diagnostics moved = row_count;
  full_ := full_ or moved >= p_moved;
  if p_wanted > 0 then
    for one in
      select r.seq, octet_length(r.body) + coalesce(octet_length(r.payload), 0) as size from iw_requests r
      where r.queue = p_queue and r.owner is null and r.due is null
      order by r.queue, r.deadline, r.seq limit p_wanted for update skip locked
    loop
      if total > 0 and total + one.size > p_bytes then
        full_ := true;
        exit;
      end if;
      seqs := seqs || one.seq;
      total := total + one.size;
    end loop;
    full_ := full_ or cardinality(seqs) >= p_wanted;
  end if;
  if full_ and p_told then
    delete from iw_waiting where what = 'iw_q_' || md5(p_queue) and who = p_owner;
  end if;
  select least(
    (select h.lease_until from iw_requests h where h.queue = p_queue and h.owner is not null
      order by h.queue, h.lease_until limit 1),
    (select d.due from iw_requests d where d.queue = p_queue and d.due is not null order by d.queue, d.due limit 1)
  ) into first;
  return query select null::bigint, extract(epoch from first - at)::double precision, full_, null::text, null::text,
    null::double precision, null::bigint, null::boolean, null::int, null::int, null::int, null::text, null::bytea,
    null::bytea, null::bytea;
  if cardinality(seqs) > 0 then
    return query update iw_requests r set owner = p_owner, lease_until = at + make_interval(secs => p_lease),
        attempt = r.attempt + 1, deliveries = r.deliveries + 1 where r.seq = any(seqs)
      returning r.seq, null::double precision, null::boolean, r.request_id, r.token, r.deadline, r.attempt, r.cancelled,
        r.attempts, r.deliveries, r.lapses, r.message_id, r.headers, r.body, r.payload;
  end if;
end $$;

-- Another lease for what is ours; what is missing in the answer is not.
create function iw1_keep(p_seqs bigint[], p_attempts bigint[], p_owner text, p_lease double precision)
returns table (seq bigint, cancelled boolean) language sql as $$
  with ours as (
    select r.seq from iw_requests r join unnest(p_seqs, p_attempts) k(seq, attempt) on r.seq = k.seq
    where r.attempt = k.attempt and r.owner = p_owner order by r.seq for update of r
  )
  update iw_requests r set lease_until = clock_timestamp() + make_interval(secs => p_lease)
  from ours where r.seq = ours.seq returning r.seq, r.cancelled
$$;

-- Whether a claim is ours; the row is locked then.
create function iw1_ours(p_seq bigint, p_attempt bigint, p_owner text) returns text language plpgsql as $$
declare
  r record;
begin
  select q.attempt, q.owner into r from iw_requests q where q.seq = p_seq for update;
  if not found then return 'GONE'; end if;
  if r.attempt = p_attempt and r.owner = p_owner then return 'OURS'; end if;
  return 'THEIRS';
end $$;

-- Result, its message, usage event, dead letter, and the end of the request.
create function iw1_conclude(
  p_seq bigint, p_attempt bigint, p_owner text, p_id bytea, p_token text, p_reply bytea, p_status text,
  p_ttl double precision, p_event bytea, p_deployment text, p_note bytea, p_note_ttl double precision,
  p_route text, p_message bytea, p_route_ttl double precision, p_letter bytea,
  out said text, out known bytea, out left_s double precision
) language plpgsql as $$
#variable_conflict use_column
begin
  said := iw1_ours(p_seq, p_attempt, p_owner);
  if said <> 'OURS' then return; end if;
  if p_reply is not null then
    select f.said, f.known, f.left_s into said, known, left_s from iw1_finish(
      p_id, p_token, p_reply, p_status, p_ttl, p_event, p_deployment, false, p_message is not null) f;
    if said <> 'STORED' then return; end if;
    if p_note is not null then perform iw1_note(p_id, p_note, p_note_ttl); end if;
  elsif p_route <> '' then
    -- Stored by a holder that was late, or by who cancelled it, and owed to its route.
    select s.reply into known from iw_state s
      where s.id = p_id and s.reply is not null and not s.sent and s.expires > clock_timestamp() for update;
    if found and p_message is null then
      said := 'OWED';
      return;
    end if;
    if not found then p_message := null; end if;
    known := null;
    update iw_state s set sent = true where s.id = p_id;
  end if;
  if p_message is not null then
    insert into iw_results (route, body, expires) values (p_route, p_message,
      case when p_route_ttl > 0 then clock_timestamp() + make_interval(secs => p_route_ttl) end);
    perform iw1_tell_route(p_route);
  end if;
  if p_letter is not null then
    insert into iw_dead (queue, request_id, token, message_id, headers, body, payload, attempts, note)
      select r.queue, r.request_id, r.token, r.message_id, r.headers, r.body, r.payload, r.attempts, p_letter
      from iw_requests r where r.seq = p_seq;
  end if;
  delete from iw_requests r where r.seq = p_seq;
  said := 'DONE';
end $$;

-- The copy with its time, the floor under it, and the end of the claim.
create function iw1_retry(
  p_seq bigint, p_attempt bigint, p_owner text, p_id bytea, p_token text, p_attempts int, p_lease double precision,
  p_delay double precision, p_body bytea, out said text, out known bytea, out left_s double precision
) language plpgsql as $$
#variable_conflict use_column
declare
  s iw_state;
  at timestamptz;
  q text;
begin
  said := iw1_ours(p_seq, p_attempt, p_owner);
  if said <> 'OURS' then
    perform iw1_release(p_id, p_token, null, p_lease);
    return;
  end if;
  select * into s from iw_state where id = p_id and expires > clock_timestamp() for update;
  at := clock_timestamp();
  if found then
    if s.reply is not null then
      said := 'KNOWN'; known := case when s.status = 'failed' then s.reply end;
      return;
    end if;
    if s.holder <> p_token and s.held_until > at then
      said := 'BUSY'; left_s := extract(epoch from s.held_until - at);
      return;
    end if;
  end if;
  -- A copy that is no attempt (a gate was closed) is no news of those who died while running it.
  perform iw1_release(p_id, p_token, case when p_attempts > 0 then p_attempts end, p_lease);
  update iw_state set starts = case when p_attempts > coalesce(s.lowest, 0) then 0 else s.starts end
    where id = p_id and s.id is not null;
  update iw_requests r set owner = null, lease_until = null, deliveries = 0, lapses = 0, attempts = p_attempts,
      body = coalesce(p_body, r.body), due = case when p_delay > 0 then at + make_interval(secs => p_delay) end
    where r.seq = p_seq returning r.queue into q;
  if p_delay <= 0 then perform iw1_tell_queue(q); end if;
  said := 'DONE';
end $$;

-- Back to its place in the queue, uncounted.
create function iw1_hand_back(
  p_queue text, p_seqs bigint[], p_attempts bigint[], p_owner text, p_id bytea, p_token text, p_lease double precision
) returns int language plpgsql as $$
declare
  back int;
begin
  with ours as (
    select r.seq from iw_requests r join unnest(p_seqs, p_attempts) k(seq, attempt) on r.seq = k.seq
    where r.attempt = k.attempt and r.owner = p_owner order by r.seq for update of r
  )
  update iw_requests r set owner = null, lease_until = null from ours where r.seq = ours.seq;
  get diagnostics back = row_count;
  if p_id is not null then perform iw1_release(p_id, p_token, null, p_lease); end if;
  if back > 0 then perform iw1_tell_queue(p_queue); end if;
  return back;
end $$;

-- Give back what is claimed for a session and not in its hands: it leaves, or the answer that brought it was lost.
create function iw1_leave(p_queue text, p_owner text, p_kept bigint[]) returns int language plpgsql as $$
declare
  back int;
begin
  update iw_requests r set owner = null, lease_until = null where r.seq in (
    select h.seq from iw_requests h where h.queue = p_queue and h.owner = p_owner and h.owner is not null
      and not h.seq = any(p_kept) for update skip locked);
  get diagnostics back = row_count;
  if cardinality(p_kept) = 0 then
    delete from iw_waiting where what = 'iw_q_' || md5(p_queue) and who = p_owner;
  end if;
  if back > 0 then perform iw1_tell_queue(p_queue); end if;
  return back;
end $$;

create function iw1_put(p_queue text, p_request_id text, p_token text, p_deadline double precision, p_message_id text,
  p_headers bytea, p_body bytea, p_payload bytea) returns void language plpgsql as $$
begin
  insert into iw_requests (queue, request_id, token, deadline, message_id, headers, body, payload)
    values (p_queue, p_request_id, p_token, p_deadline, p_message_id, p_headers, p_body, p_payload);
  perform iw1_tell_queue(p_queue);
end $$;

-- All of them or none. The rows of the answer are those that were there before, under their idempotency keys. An error
-- of class IW says which one has a key that stands for another request.
create function iw1_submit(
  p_queues text[], p_ids text[], p_tokens text[], p_deadlines bigint[], p_bodies bytea[], p_payloads bytea[],
  p_routes text[], p_keys text[], p_prints text[], p_kept double precision
) returns table (place int, request_id text, token text, queue text, route text, deadline bigint)
language plpgsql as $$
#variable_conflict use_column
declare
  i int;
  k iw_keys;
  repeats int[] := '{}';
begin
  for i in select o.ord from unnest(p_keys) with ordinality o(key, ord) where o.key is not null order by o.key loop
    insert into iw_keys as seen values (p_keys[i], p_prints[i], p_ids[i], p_tokens[i], p_queues[i], p_routes[i],
        p_deadlines[i], to_timestamp(p_deadlines[i]) + make_interval(secs => p_kept))
      on conflict (key) do update set fingerprint = excluded.fingerprint, request_id = excluded.request_id,
        token = excluded.token, queue = excluded.queue, route = excluded.route, deadline = excluded.deadline,
        expires = excluded.expires where seen.expires <= clock_timestamp();
    if not found then
      select * into k from iw_keys where key = p_keys[i];
      if k.fingerprint <> p_prints[i] then
        raise exception using errcode = 'IW001', message = i || ':' || k.request_id;
      end if;
      repeats := repeats || i;
      place := i; request_id := k.request_id; token := k.token; queue := k.queue; route := k.route;
      deadline := k.deadline;
      return next;
    end if;
  end loop;
  insert into iw_requests (queue, request_id, token, deadline, body, payload)
    select n.queue, n.request_id, n.token, n.deadline, n.body, n.payload
    from unnest(p_queues, p_ids, p_tokens, p_deadlines, p_bodies, p_payloads) with ordinality
      n(queue, request_id, token, deadline, body, payload, ord)
    where not n.ord = any(repeats) order by n.ord;
  perform iw1_tell_queue(n.queue) from (select distinct q as queue from unnest(p_queues) q order by q) n;
end $$;

-- Mark requests as cancelled, each the latest under its id, or the one that the token names.
create function iw1_cancel(p_ids text[], p_tokens text[]) returns table (place int) language plpgsql as $$
#variable_conflict use_column
declare
  marked record;
begin
  for marked in
    with meant as (
      select o.ord::int as place, (select r.seq from iw_requests r where r.request_id = o.id and o.id <> ''
          and r.request_id <> '' and (o.token = '' or r.token = o.token) order by r.seq desc limit 1) as seq
      from unnest(p_ids, p_tokens) with ordinality o(id, token, ord)
    ), locked as (
      select r.seq from iw_requests r join meant m on m.seq = r.seq order by r.seq for update of r
    ), done as (
      update iw_requests r set cancelled = true from locked where r.seq = locked.seq returning r.seq, r.queue
    )
    select m.place, d.queue from done d join meant m on m.seq = d.seq
  loop
    perform pg_notify('iw_q_' || md5(marked.queue), 'cancelled');
    place := marked.place;
    return next;
  end loop;
end $$;

-- ---------------------------------------------------------------- results on their routes

create function iw1_pop(p_route text, p_limit int) returns table (seq bigint, body bytea) language sql as $$
  with oldest as (
    select r.seq from iw_results r where r.route = p_route and (r.owner is null or r.lease_until <= clock_timestamp())
      and (r.expires is null or r.expires > clock_timestamp())
    order by r.route, r.seq limit p_limit for update skip locked
  )
  delete from iw_results r using oldest where r.seq = oldest.seq returning r.seq, r.body
$$;

-- The oldest result, for a time; without one, the seconds to the next lease that lapses.
create function iw1_receive(
  p_route text, p_owner text, p_lease double precision, out seq bigint, out body bytea, out lapses_s double precision
) language plpgsql as $$
#variable_conflict use_column
begin
  update iw_results r set owner = p_owner, lease_until = clock_timestamp() + make_interval(secs => p_lease)
    where r.seq = (
      select f.seq from iw_results f where f.route = p_route
        and (f.owner is null or f.lease_until <= clock_timestamp())
        and (f.expires is null or f.expires > clock_timestamp())
      order by f.route, f.seq limit 1 for update skip locked)
    returning r.seq, r.body into seq, body;
  if not found then
    select extract(epoch from min(r.lease_until) - clock_timestamp()) into lapses_s
      from iw_results r where r.route = p_route and r.owner is not null;
  end if;
end $$;

create function iw1_result_renew(p_seq bigint, p_owner text, p_lease double precision) returns boolean
language plpgsql as $$
begin
  update iw_results r set lease_until = clock_timestamp() + make_interval(secs => p_lease)
    where r.seq = p_seq and r.owner = p_owner and r.lease_until > clock_timestamp();
  return found;
end $$;

create function iw1_result_ack(p_seq bigint, p_owner text, p_remembered double precision) returns boolean
language plpgsql as $$
begin
  delete from iw_results r where r.seq = p_seq and r.owner = p_owner and r.lease_until > clock_timestamp();
  if not found then
    return exists (select 1 from iw_acknowledged a where a.seq = p_seq and a.owner = p_owner);
  end if;
  insert into iw_acknowledged values (p_seq, p_owner, clock_timestamp() + make_interval(secs => p_remembered))
    on conflict do nothing;
  return true;
end $$;

create function iw1_result_release(p_route text, p_seq bigint, p_owner text) returns void language plpgsql as $$
begin
  update iw_results r set owner = null, lease_until = null
    where r.seq = p_seq and r.owner = p_owner and r.lease_until > clock_timestamp();
  if found then perform iw1_tell_route(p_route); end if;
end $$;

-- ---------------------------------------------------------------- dead letters

-- Put a dead letter back as a new request, and take it away.
create function iw1_revive(
  p_seq bigint, p_queue text, p_request_id text, p_token text, p_deadline double precision, p_body bytea, p_id bytea
) returns text language plpgsql as $$
declare
  d iw_dead;
  room text;
begin
  select * into d from iw_dead where seq = p_seq for update;
  if not found then return 'GONE'; end if;
  if p_id is not null then
    room := iw1_make_room(p_id);
    if room <> 'DONE' then return room; end if;
  elsif exists (select 1 from iw_requests r where r.request_id = p_request_id and r.request_id <> '') then
    return 'BUSY';
  end if;
  insert into iw_requests (queue, request_id, token, deadline, message_id, headers, body, payload)
    values (p_queue, p_request_id, p_token, p_deadline, d.message_id, d.headers, p_body, d.payload);
  delete from iw_dead where seq = p_seq;
  perform iw1_tell_queue(p_queue);
  return 'DONE';
end $$;

-- ---------------------------------------------------------------- usage events

create function iw1_usage_take(p_deployment text, p_taker text, p_limit int, p_left_s double precision)
returns table (seq bigint, event bytea) language sql as $$
  with mine as (
    select u.seq from iw_usage u where u.deployment = p_deployment
      and (u.taken_at is null or u.taken_at <= clock_timestamp() - make_interval(secs => p_left_s))
    order by u.deployment, u.seq limit p_limit for update skip locked
  )
  update iw_usage u set taker = p_taker, taken_at = clock_timestamp() from mine where u.seq = mine.seq
  returning u.seq, u.event
$$;

-- ---------------------------------------------------------------- quotas

create function iw1_quota_limit(p_limits text, p_value text, p_limit bigint) returns bigint language sql stable as $$
  select coalesce((select l.limit from iw_quota_limits l where l.name = p_limits and l.value = p_value), p_limit)
$$;

-- Takes slots for a holder whose lease is alive, one after the other, as long as there is room; null where the lease
-- has lapsed. What costs more than all of the limit goes alone. A slot that is there already was taken before.
create function iw1_quota_take(
  p_key text, p_limits text, p_value text, p_limit bigint, p_holder text, p_slots text[], p_costs bigint[]
) returns boolean[] language plpgsql as $$
declare
  bound bigint;
  used bigint;
  taken boolean[] := '{}';
  fits boolean;
begin
  if cardinality(p_slots) <> cardinality(p_costs) then
    raise exception using errcode = 'IW002', message = 'as many costs as slots are needed';
  end if;
  perform pg_advisory_xact_lock(hashtextextended(p_key, 7204));
  perform 1 from iw_quota_holders h where h.holder = p_holder and h.lease_until > clock_timestamp() for share;
  if not found then return null; end if;
  bound := iw1_quota_limit(p_limits, p_value, p_limit);
  select coalesce(sum(s.cost), 0) into used from iw_quota_slots s join iw_quota_holders h on h.holder = s.holder
    where s.key = p_key and h.lease_until > clock_timestamp();
  for i in 1 .. cardinality(p_slots) loop
    if exists (select 1 from iw_quota_slots s where s.slot = p_slots[i]) then
      taken := taken || true;
      continue;
    end if;
    fits := bound > 0 and (used = 0 or used + p_costs[i] <= bound);
    if fits then
      insert into iw_quota_slots values (p_slots[i], p_key, p_holder, p_costs[i]);
      used := used + p_costs[i];
    end if;
    taken := taken || fits;
  end loop;
  return taken;
end $$;

-- The same within a window that slides.
create function iw1_quota_admit(
  p_key text, p_limits text, p_value text, p_limit bigint, p_window double precision, p_slots text[], p_costs bigint[]
) returns boolean[] language plpgsql as $$
declare
  at_ timestamptz;
  bound bigint;
  used bigint;
  taken boolean[] := '{}';
  fits boolean;
begin
  perform pg_advisory_xact_lock(hashtextextended(p_key, 7204));
  at_ := clock_timestamp();
  bound := iw1_quota_limit(p_limits, p_value, p_limit);
  delete from iw_quota_admissions a where a.key = p_key and a.at <= at_ - make_interval(secs => p_window);
  select coalesce(sum(a.cost), 0) into used from iw_quota_admissions a where a.key = p_key;
  for i in 1 .. cardinality(p_slots) loop
    if exists (select 1 from iw_quota_admissions a where a.slot = p_slots[i]) then
      taken := taken || true;
      continue;
    end if;
    fits := bound > 0 and (used = 0 or used + p_costs[i] <= bound);
    if fits then
      insert into iw_quota_admissions
        values (p_slots[i], p_key, at_, p_costs[i], at_ + make_interval(secs => p_window));
      used := used + p_costs[i];
    end if;
    taken := taken || fits;
  end loop;
  return taken;
end $$;

-- ---------------------------------------------------------------- what is over

create function iw1_tidy(p_most int) returns int language plpgsql as $$
declare
  moment timestamptz := clock_timestamp();
  gone int;
  most int := 0;  -- Of one table: where that is all that was asked for, there may be more.
begin
  delete from iw_state where id in (select s.id from iw_state s where s.expires <= moment order by s.expires
    limit p_most for update skip locked);
  get diagnostics gone = row_count; most := greatest(most, gone);
  delete from iw_results where seq in (select r.seq from iw_results r where r.expires <= moment order by r.expires
    limit p_most for update skip locked);
  get diagnostics gone = row_count; most := greatest(most, gone);
  delete from iw_acknowledged where seq in (select a.seq from iw_acknowledged a where a.expires <= moment
    order by a.expires limit p_most for update skip locked);
  get diagnostics gone = row_count; most := greatest(most, gone);
  delete from iw_notes where id in (select n.id from iw_notes n where n.expires <= moment order by n.expires
    limit p_most for update skip locked);
  get diagnostics gone = row_count; most := greatest(most, gone);
  delete from iw_keys where key in (select k.key from iw_keys k where k.expires <= moment order by k.expires
    limit p_most for update skip locked);
  get diagnostics gone = row_count; most := greatest(most, gone);
  delete from iw_waiting w where (w.what, w.who) in (select o.what, o.who from iw_waiting o where o.until <= moment
    order by o.until limit p_most for update skip locked);
  get diagnostics gone = row_count; most := greatest(most, gone);
  delete from iw_fleet f where f.heard_at <= moment - interval '1 day';
  delete from iw_quota_holders where holder in (select h.holder from iw_quota_holders h where h.lease_until <= moment
    order by h.lease_until limit p_most for update skip locked);
  get diagnostics gone = row_count; most := greatest(most, gone);
  delete from iw_quota_admissions where slot in (select a.slot from iw_quota_admissions a where a.expires <= moment
    order by a.expires limit p_most for update skip locked);
  get diagnostics gone = row_count; most := greatest(most, gone);
  return most;
end $$;
"""
