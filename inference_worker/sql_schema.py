"""The tables and functions in Postgres, made at the first connection, by whoever is first. `docs/sql.md` lists them.

Each version of the schema is a step from the one before, done once under a lock. Functions have the version that made
them in their names, and steps only add: a worker of an older version goes on with its own while a newer one is there.
Whose role may not make tables uses those that are there. Not here: what the functions do (`sql_functions`).
"""

from typing import Final

import asyncpg

from inference_worker.sql_functions import FUNCTIONS

LOCK: Final = 7_203_114_502
"""The advisory lock under which steps are done: drawn once, so that no other program has it."""

TABLES: Final = """
create table iw_requests (
  seq bigint generated always as identity primary key,
  queue text not null,
  request_id text not null default '',  -- Empty for messages in our own format, whose body has it.
  token text not null,
  deadline double precision not null,
  due timestamptz,  -- A retry that waits for its time.
  attempt bigint not null default 0,  -- The fence: counts the claims of this row.
  owner text,
  lease_until timestamptz,
  cancelled boolean not null default false,
  attempts int not null default 0,
  deliveries int not null default 0,
  lapses int not null default 0,
  message_id text,
  headers bytea,
  body bytea not null,  -- The envelope without its payload, or a message in our own format.
  payload bytea,
  created_at timestamptz not null default clock_timestamp(),
  constraint iw_requests_have_a_payload check (request_id = '' or payload is not null)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);
create unique index iw_requests_generation on iw_requests (request_id, token) where request_id <> '';
create index iw_requests_ready on iw_requests (queue, deadline, seq) where owner is null and due is null;
create index iw_requests_due on iw_requests (queue, due) where due is not null;
create index iw_requests_held on iw_requests (queue, lease_until) where owner is not null;

create table iw_results (
  seq bigint generated always as identity primary key,
  route text not null,
  body bytea not null,
  owner text,  -- Of whoever has received it.
  lease_until timestamptz,
  expires timestamptz,
  created_at timestamptz not null default clock_timestamp()
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0);
create index iw_results_route on iw_results (route, seq);
create index iw_results_expires on iw_results (expires) where expires is not null;

create table iw_acknowledged (  -- Leased results that are gone: an ack may be said again.
  seq bigint primary key,
  owner text not null,
  expires timestamptz not null
);
create index iw_acknowledged_expires on iw_acknowledged (expires);

create table iw_dead (
  seq bigint generated always as identity primary key,
  queue text not null,
  request_id text not null,
  token text not null,
  message_id text,
  headers bytea,
  body bytea not null,
  payload bytea,
  attempts int not null,
  note bytea not null,  -- Why, as JSON.
  died_at timestamptz not null default clock_timestamp()
);
create index iw_dead_queue on iw_dead (queue, seq);

create table iw_state (  -- Of each request: who runs it, or how it has ended.
  id bytea primary key,
  holder text,
  held_until timestamptz,
  lowest int not null default 0,  -- The floor: the lowest attempt that may still run.
  starts int not null default 0,
  status text,
  reply bytea,
  sent boolean not null default false,  -- The result lies on its route, too.
  expires timestamptz not null
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);
create index iw_state_expires on iw_state (expires);

create table iw_usage (
  seq bigint generated always as identity primary key,
  deployment text not null,
  event bytea not null,
  taker text,
  taken_at timestamptz
);
create index iw_usage_deployment on iw_usage (deployment, seq);
create table iw_usage_refused (
  seq bigint generated always as identity primary key,
  deployment text not null,
  event bytea not null,
  reason text not null,
  refused_at timestamptz not null default clock_timestamp()
);

create table iw_notes (  -- Why a message was dead-lettered, by its request.
  id bytea primary key,
  note bytea not null,
  expires timestamptz not null
);
create index iw_notes_expires on iw_notes (expires);

create table iw_keys (  -- What an idempotency key stands for.
  key text primary key,
  fingerprint text not null,
  request_id text not null,
  token text not null,
  queue text not null,
  route text not null,
  deadline bigint not null,
  expires timestamptz not null
);
create index iw_keys_expires on iw_keys (expires);

create table iw_fleet (
  queue text not null,
  replica_id text not null,
  beat bytea not null,
  heard_at timestamptz not null,
  primary key (queue, replica_id)
);
create table iw_wishes (
  queue text primary key,
  replicas int not null,
  until timestamptz not null
);

create table iw_quota_holders (
  holder text primary key,
  lease_until timestamptz not null
);
create index iw_quota_holders_lease on iw_quota_holders (lease_until);
create table iw_quota_slots (  -- What is taken at once: one row for each request.
  slot text primary key,
  key text not null,
  holder text not null references iw_quota_holders on delete cascade,
  cost bigint not null
);
create index iw_quota_slots_key on iw_quota_slots (key);
create index iw_quota_slots_holder on iw_quota_slots (holder);
create table iw_quota_admissions (  -- What was admitted within a window: one row for each request.
  slot text primary key,
  key text not null,
  at timestamptz not null,
  cost bigint not null,
  expires timestamptz not null
);
create index iw_quota_admissions_key on iw_quota_admissions (key, at);
create index iw_quota_admissions_expires on iw_quota_admissions (expires);
create table iw_quota_limits (  -- Of single tenants; may be changed at any time.
  name text not null,
  value text not null,
  "limit" bigint not null,
  primary key (name, value)
);

create unlogged table iw_waiting (  -- Who wants to be told, so that nobody is told for nothing.
  what text not null,
  who text not null,
  until timestamptz not null,
  primary key (what, who)
);
create index iw_waiting_until on iw_waiting (until);
"""

STEPS: Final = (TABLES + FUNCTIONS,)
"""From nothing to version 1, from there to version 2, and so on."""

VERSION: Final = len(STEPS)


async def ensure_schema(connection: asyncpg.Connection) -> None:
    """See to it that there is this version, or a later one. Safe for any number of openers at once.

    Raises: asyncpg.PostgresError and what else a statement raises.
    """
    if await _version(connection) >= VERSION:
        return
    async with connection.transaction():
        await connection.execute("select pg_advisory_xact_lock($1)", LOCK)
        there = await _version(connection)
        if there == 0:
            await connection.execute("create table if not exists iw_schema (version int primary key, at timestamptz)")
        for number, step in enumerate(STEPS[there:], there + 1):
            await connection.execute(step)
            await connection.execute("insert into iw_schema values ($1, now())", number)


async def _version(connection: asyncpg.Connection) -> int:
    """0 where there is nothing."""
    # Read as rows: `to_regclass` may answer from before the lock was had.
    if not await connection.fetchval(
        "select exists (select 1 from pg_catalog.pg_tables"
        " where tablename = 'iw_schema' and schemaname = any(current_schemas(false)))"
    ):
        return 0
    return int(await connection.fetchval("select coalesce(max(version), 0) from iw_schema"))
