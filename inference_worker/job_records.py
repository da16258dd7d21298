"""How an intake's record of a job lies in Redis: its keys, its fields, and the Lua that writes one down.

What is done with records is said by who has scripts of his own: `results/job_book.py`, `transports/stream_intake.py`.
The worker's own scripts know two fields, `ended` and `due` (`redis_scripts.FINISHING`).
"""

import hashlib
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from inference_worker.job_book import KEPT_AFTER_S, MOST_LISTED, JobRecord
from inference_worker.redis_scripts import PRELUDE, Argument

FIELDS: Final = (
    *("tenant", "created_at", "expires_at", "fingerprint", "endpoint", "metadata", "webhook_url"),
    *("queue", "ended", "confirmed"),
)
"""What is read of a record's hash, in this order; the first is there if the record is."""


def record_key(job_id: str) -> str:
    """The record's hash."""
    return f"infer_job:{job_id}"


def idempotency_key(queue: str, tenant: str, key: str) -> str:
    """The string with the id of the job that a tenant's key stands for. Of the key it tells nothing."""
    digest = hashlib.sha256(f"{tenant}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"infer_job_key:{queue}:{digest}"


def list_key(queue: str, tenant: str) -> str:
    """The sorted set of a tenant's jobs, by the time of their acceptance."""
    return f"infer_jobs:{queue}:{hashlib.sha256(tenant.encode('utf-8', 'surrogatepass')).hexdigest()}"


def due_key(queue: str) -> str:
    """The sorted set of the deadlines of jobs that have not ended; its members are the records' keys."""
    return f"infer_due:{queue}"


def hooks_key(queue: str) -> str:
    """The sorted set of jobs whose end somebody wants to be told of, by the time of the next look."""
    return f"infer_hooks:{queue}"


WRITING: Final = (
    PRELUDE
    + f"""
local DAY_MS, MOST_LISTED, READ = {round(KEPT_AFTER_S * 1000)}, {MOST_LISTED}, {{{", ".join(map(repr, FIELDS))}}}
"""
    + """
-- What scripts are given of a job, by name: see `arguments_of`.
local function job_of(k, a)
  return {
    record = k[1], list = k[2], due = k[3], hooks = k[4], key = a[1], id = a[2], fingerprint = a[3],
    created_at = a[4], expires_at = a[5], ttl_ms = tonumber(a[6]), hooked = a[7] == '1', fields = {unpack(a, 8, 23)}
  }
end
local function read(record)
  return redis.call('HMGET', record, unpack(READ))
end
-- The job that the key stands for: its id and HMGET of these fields; nil where it stands for none.
local function standing(job, ...)
  if job.key == '' then return nil end
  local held = redis.call('GET', job.key)
  if not held then return nil end
  local known = redis.call('HMGET', 'infer_job:' .. held, 'fingerprint', ...)
  if not known[1] then return nil end
  return held, known
end
-- Write a job down everywhere, its record first; all of it goes by itself, a day after the last time for its result.
local function write_down(job, ...)
  local now = millis()
  local life = math.floor(math.max(tonumber(job.expires_at) * 1000, now) - now) + job.ttl_ms + DAY_MS
  local words = {'due', job.due, ...}
  for _, word in ipairs(job.fields) do words[#words + 1] = word end
  redis.call('HSET', job.record, unpack(words))
  redis.call('PEXPIRE', job.record, life)
  if job.key ~= '' then redis.call('SET', job.key, job.id, 'PX', life) end
  -- A few whose time is over go at the old end, and what is too much.
  for _, old in ipairs(redis.call('ZRANGE', job.list, 0, 1)) do
    if redis.call('EXISTS', 'infer_job:' .. old) == 0 then redis.call('ZREM', job.list, old) end
  end
  redis.call('ZADD', job.list, job.created_at, job.id)
  redis.call('ZREMRANGEBYRANK', job.list, 0, -MOST_LISTED - 1)
  keep_for(job.list, life)
  redis.call('ZREMRANGEBYSCORE', job.due, '-inf', now / 1000 - 60)
  redis.call('ZADD', job.due, job.expires_at, job.record)
  keep_for(job.due, life)
  if job.hooked then
    redis.call('ZADD', job.hooks, job.created_at, job.id)
    keep_for(job.hooks, life + DAY_MS)
  end
end
local function forget(job)
  redis.call('DEL', job.record)
  if job.key ~= '' and redis.call('GET', job.key) == job.id then redis.call('DEL', job.key) end
  redis.call('ZREM', job.list, job.id)
  redis.call('ZREM', job.due, job.record)
  redis.call('ZREM', job.hooks, job.id)
end
"""
)
"""Lua functions for scripts whose first keys and arguments are those of `keys_of` and `arguments_of`."""

FIRST_OWN: Final = 24
"""The number of a script's first argument behind those of `arguments_of`."""


def keys_of(record: JobRecord, queue: str) -> list[str]:
    """The keys that a job is written down under, but for its idempotency key."""
    return [record_key(record.job_id), list_key(queue, record.tenant), due_key(queue), hooks_key(queue)]


def arguments_of(record: JobRecord, queue: str, key: str | None, ttl_s: float) -> list[Argument]:
    """The arguments that go with `keys_of`. Times are written in full: as scores they come back as they went."""
    return [
        "" if key is None else idempotency_key(queue, record.tenant, key),
        record.job_id,
        record.fingerprint,
        repr(record.created_at),
        repr(record.expires_at),
        round(ttl_s * 1000),
        "1" if record.webhook_url else "",
        *("tenant", _text(record.tenant)),
        *("created_at", repr(record.created_at)),
        *("expires_at", repr(record.expires_at)),
        *("fingerprint", record.fingerprint),
        *("endpoint", _text(record.endpoint or "")),
        *("metadata", msgspec.json.encode(dict(record.metadata))),
        *("webhook_url", _text(record.webhook_url or "")),
        *("queue", queue),
    ]


def record_of(job_id: str, values: Sequence[bytes | None], queue: str) -> JobRecord | None:
    """The record whose `FIELDS` were read; None where there is none, or only that of another queue's job."""
    if values[0] is None:
        return None
    read = dict(zip(FIELDS, (value or b"" for value in values), strict=True))
    if _str(read["queue"]) != queue:
        return None
    return JobRecord(
        job_id=job_id,
        tenant=_str(read["tenant"]),
        created_at=float(read["created_at"]),
        expires_at=float(read["expires_at"]),
        fingerprint=_str(read["fingerprint"]),
        endpoint=_str(read["endpoint"]) or None,
        metadata=msgspec.json.decode(read["metadata"], type=dict[str, str]),
        webhook_url=_str(read["webhook_url"]) or None,
        ended=_ENDED.get(read["ended"], ""),
    )


_ENDED: Final[dict[bytes, Literal["completed", "failed"]]] = {b"completed": "completed", b"failed": "failed"}


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


def _str(value: bytes) -> str:
    return value.decode("utf-8", "surrogatepass")
