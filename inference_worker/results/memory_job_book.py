"""The jobs of an intake in this process: the same promises as in Redis, for `dev` and for tests.

Bounded: the oldest jobs go first, as if their time were over. It can be asked as long as the store beside it can.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from inference_worker.job_book import (
    KEPT_AFTER_S,
    MOST_LISTED,
    RESERVED_S,
    JobRecord,
    OtherBody,
    Page,
    Reserved,
    Standing,
    read_cursor,
    write_cursor,
)
from inference_worker.messages import Reply
from inference_worker.results.memory import MemoryStore

MOST_JOBS: Final = MOST_LISTED

Place = tuple[float, str]
"""Where a job stands in a list: by a time, then by its id."""


@dataclass(slots=True, kw_only=True)
class _Job:
    record: JobRecord
    key: str | None
    expires: float
    owner: str = ""
    fresh: bool = False
    """Nobody else can have put it into the queue."""
    until: float = 0.0
    confirmed: bool = False

    @property
    def shown(self) -> bool:
        return self.confirmed or self.record.ended != ""


class MemoryJobBook:
    """The job book of `job_book.py`, in dictionaries. Times are Unix seconds of `now`."""

    def __init__(self, store: MemoryStore, *, ttl_s: float, now: Callable[[], float]) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._now = now
        self._jobs: dict[str, _Job] = {}
        self._keys: dict[tuple[str, str], str] = {}
        self._listed: dict[str, list[Place]] = {}
        self._due: list[Place] = []
        self.on_hook: Callable[[JobRecord], None] | None = None
        """Told of each job that is written down with a webhook; a hook book is."""
        store.on_end = self._ended
        store.on_replay = self._begun_anew

    async def reserve(self, record: JobRecord, key: str | None) -> Reserved | Standing | OtherBody:
        """See `job_book.JobBook`."""
        await self._store.probe()
        now, owner = self._now(), record.job_id
        held = self._keys.get((record.tenant, key), owner) if key is not None else owner
        known = self._job(held)
        if known is not None and key is not None and known.key == key:
            if known.record.fingerprint != record.fingerprint:
                return OtherBody()
            if known.shown:
                return Standing(record=known.record, confirmed=True)
            if known.owner != owner and known.until > now:
                return Standing(record=known.record, confirmed=False, left_s=known.until - now)
            record = replace(record, job_id=held)
        job = self._write_down(record, key)
        job.owner, job.fresh, job.until = owner, known is None, now + RESERVED_S
        return Reserved(record=record, key=key, owner=owner)

    async def confirm(self, reserved: Reserved) -> None:
        """See `job_book.JobBook`."""
        await self._store.probe()
        job = self._job(reserved.record.job_id)
        if job is None:
            key = reserved.key
            taken = key is not None and self._job(self._keys.get((reserved.record.tenant, key), "")) is not None
            job = self._write_down(reserved.record, None if taken else key)
        job.confirmed, job.owner = True, ""

    async def withdraw(self, reserved: Reserved) -> None:
        """See `job_book.JobBook`."""
        await self._store.probe()
        job = self._job(reserved.record.job_id)
        if job is None or job.owner != reserved.owner:
            return
        if job.fresh and not job.shown:
            self._forget(reserved.record.job_id)
        else:
            job.until, job.fresh = 0.0, False

    async def leave(self, reserved: Reserved) -> None:
        """See `job_book.JobBook`."""
        await self._store.probe()
        job = self._job(reserved.record.job_id)
        if job is not None and job.owner == reserved.owner:
            job.until, job.fresh = 0.0, False

    async def find(self, job_id: str, tenant: str | None = None) -> JobRecord | None:
        """See `job_book.JobBook`."""
        await self._store.probe()
        job = self._job(job_id)
        return None if job is None or tenant not in (None, job.record.tenant) else job.record

    async def page(self, tenant: str, *, limit: int, after: str | None) -> Page:
        """See `job_book.JobBook`."""
        await self._store.probe()
        listed = self._listed.get(tenant, [])
        end = len(listed) if after is None else bisect_left(listed, read_cursor(after))
        records: list[JobRecord] = []
        for index in range(end - 1, -1, -1):
            job = self._job(listed[index][1])
            if job is None or not job.shown:
                continue
            if len(records) == limit:
                return Page(records=records, after=write_cursor(records[-1].created_at, records[-1].job_id))
            records.append(job.record)
        return Page(records=records, after=None)

    async def deadlines(self, limit: int) -> Sequence[float]:
        """See `job_book.JobBook`."""
        await self._store.probe()
        start = bisect_left(self._due, (self._now(), ""))
        return [at for at, _ in self._due[start : start + limit]]

    def _job(self, job_id: str) -> _Job | None:
        job = self._jobs.get(job_id)
        return job if job is not None and job.expires > self._now() else None

    def _write_down(self, record: JobRecord, key: str | None) -> _Job:
        now = self._now()
        self._forget(record.job_id)
        self._sweep(now)
        life_s = max(record.expires_at - now, 0.0) + self._ttl_s + KEPT_AFTER_S
        job = self._jobs[record.job_id] = _Job(record=record, key=key, expires=now + life_s)
        if key is not None:
            self._keys[record.tenant, key] = record.job_id
        insort(self._listed.setdefault(record.tenant, []), (record.created_at, record.job_id))
        insort(self._due, (record.expires_at, record.job_id))
        if record.webhook_url is not None and self.on_hook is not None:
            self.on_hook(record)
        return job

    def _sweep(self, now: float) -> None:
        """Drop the oldest where there are too many, and a few whose time is over."""
        while len(self._jobs) >= MOST_JOBS:
            self._forget(next(iter(self._jobs)))
        for job_id in list(_first(self._jobs, 2)):
            if self._jobs[job_id].expires <= now:
                self._forget(job_id)
        del self._due[: bisect_right(self._due, (now - 60.0, ""))]

    def _forget(self, job_id: str) -> None:
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        tenant = job.record.tenant
        if job.key is not None and self._keys.get((tenant, job.key)) == job_id:
            del self._keys[tenant, job.key]
        _remove(self._listed[tenant], (job.record.created_at, job_id))
        if not self._listed[tenant]:
            del self._listed[tenant]
        _remove(self._due, (job.record.expires_at, job_id))

    def _ended(self, reply: Reply) -> None:
        job = self._job(reply.request_id)
        if job is None:
            return
        job.record = replace(job.record, ended=reply.status)
        job.expires = self._now() + self._ttl_s + KEPT_AFTER_S
        _remove(self._due, (job.record.expires_at, reply.request_id))

    def _begun_anew(self, job_id: str, deadline: float) -> None:
        """A dead letter of the job was put back."""
        job = self._job(job_id)
        if job is None:
            return
        _remove(self._due, (job.record.expires_at, job_id))
        job.record = replace(job.record, ended="", expires_at=deadline)
        job.expires = max(deadline, self._now()) + self._ttl_s + KEPT_AFTER_S
        insort(self._due, (deadline, job_id))


def _first(jobs: dict[str, _Job], count: int) -> list[str]:
    return [job_id for job_id, _ in zip(jobs, range(count), strict=False)]


def _remove(places: list[Place], place: Place) -> None:
    index = bisect_left(places, place)
    if index < len(places) and places[index] == place:
        del places[index]
