"""Webhooks in this process: the same promises as in Redis, for `dev` and for tests. Fills `job_book.HookBook`.

Bounded: the oldest go first.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

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
    JobRecord,
)
from inference_worker.results.memory import MemoryStore
from inference_worker.results.memory_job_book import MemoryJobBook

log = structlog.get_logger(__name__)

MOST_HOOKS: Final = 10_000
MOST_BODY_BYTES: Final = 64 * 1024 * 1024
"""Of all bodies that are kept. The oldest go first; such a one is made anew while the job's result is there."""


@dataclass(slots=True)
class _Kept:
    """What is known of a webhook whose job has been found ended."""

    tenant: str
    url: str
    deadline: float
    expires: float
    state: Literal["waiting", "delivered", "failed", "disabled"] = "waiting"
    tries: int = 0
    first_try_at: float | None = None
    next_at: float | None = None
    held: bool = False
    lease: int = 0
    body: bytes | None = None
    log: deque[HookTry] = field(default_factory=lambda: deque(maxlen=MOST_TRIES_LOGGED))


class MemoryHookBook:
    """The webhooks of the one queue. Times are Unix seconds of `now`. It can be asked as long as the store can."""

    def __init__(self, jobs: MemoryJobBook, store: MemoryStore, *, now: Callable[[], float]) -> None:
        self._jobs = jobs
        self._store = store
        self._now = now
        self._index: dict[str, float] = {}
        """When each is looked at next; no more than an index, as in Redis."""
        self._kept: dict[str, _Kept] = {}
        jobs.on_hook = self.add

    def add(self, record: JobRecord) -> None:
        """A job was written down whose record has a `webhook_url`."""
        self._index[record.job_id] = self._now()
        while len(self._index) > MOST_HOOKS:
            self._index.pop(next(iter(self._index)))

    async def due(self, limit: int, lease_s: float) -> Sequence[Hook]:
        """See `job_book.HookBook`."""
        await self._store.probe()
        now = self._now()
        taken: list[Hook] = []
        for job_id, _ in sorted(
            ((job_id, at) for job_id, at in self._index.items() if at <= now), key=lambda item: item[1]
        ):
            if len(taken) >= limit:
                break
            kept = self._live(job_id) or await self._begin(job_id, now)
            if kept is None:
                continue
            if kept.state != "waiting":
                del self._index[job_id]
            elif kept.next_at is not None and kept.next_at > now:
                self._index[job_id] = kept.next_at
            else:
                taken.append(self._take(job_id, kept, now + lease_s))
        return taken

    async def _begin(self, job_id: str, now: float) -> _Kept | None:
        """A job that is looked at for the first time, or has not ended when last looked at."""
        record = await self._jobs.find(job_id)
        if record is None or not record.webhook_url:
            del self._index[job_id]
            log.warning("a webhook is forgotten, its job is not known any more", job_id=job_id)
            return None
        if record.ended == "" and await self._store.read(job_id) is None:
            wait_s = min(max((now - record.created_at) / 4, FIRST_LOOK_S), LONGEST_LOOK_S)
            self._index[job_id] = now + wait_s
            return None
        kept = _Kept(record.tenant, record.webhook_url, record.expires_at, now + HOOK_KEPT_S)
        self._kept[job_id] = kept
        while len(self._kept) > MOST_HOOKS:
            self._kept.pop(next(iter(self._kept)))
        return kept

    def _take(self, job_id: str, kept: _Kept, until: float) -> Hook:
        kept.lease += 1
        kept.next_at, kept.held = until, True
        self._index[job_id] = until
        return Hook(
            job_id=job_id,
            tenant=kept.tenant,
            url=kept.url,
            expires_at=kept.deadline,
            tries=kept.tries,
            first_try_at=kept.first_try_at,
            kept=kept.body is not None,
            lease=kept.lease,
        )

    async def hasten(self, job_ids: Sequence[str]) -> None:
        """See `job_book.HookBook`."""
        await self._store.probe()
        for job_id in job_ids:
            if job_id in self._index:
                self._index[job_id] = self._now()

    async def body_of(self, job_id: str) -> bytes | None:
        """See `job_book.HookBook`."""
        await self._store.probe()
        kept = self._live(job_id)
        return None if kept is None else kept.body

    async def later(self, hook: Hook, in_s: float, tried: HookTry | None = None, body: bytes | None = None) -> None:
        """See `job_book.HookBook`."""
        await self._store.probe()
        kept = self._live(hook.job_id)
        if kept is None or kept.lease != hook.lease or kept.state != "waiting":
            return
        at = self._now() + in_s
        kept.next_at, kept.held, kept.tries = at, False, hook.tries
        kept.first_try_at = hook.first_try_at if hook.first_try_at is not None else kept.first_try_at
        self._keep_body(kept, body)
        if tried is not None and tried not in kept.log:  # Told twice: the answer to the first time was lost.
            kept.log.append(tried)
        kept.expires = max(kept.expires, at + HOOK_KEPT_S)
        self._index[hook.job_id] = at

    async def over(self, hook: Hook, end: HookEnd, tried: HookTry, body: bytes | None = None) -> None:
        """See `job_book.HookBook`."""
        await self._store.probe()
        kept = self._live(hook.job_id)
        if kept is None or kept.state == "delivered":
            return
        if (kept.lease != hook.lease or kept.state != "waiting") and end != "delivered":
            return
        kept.state, kept.held, kept.next_at = end, False, None
        if end == "delivered":
            kept.body = None
        else:
            self._keep_body(kept, body)
        kept.log.append(tried)
        kept.expires = self._now() + HOOK_KEPT_S
        self._index.pop(hook.job_id, None)

    async def log_of(self, job_id: str) -> HookLog | None:
        """See `job_book.HookBook`."""
        await self._store.probe()
        kept = self._live(job_id)
        if kept is not None:
            next_at = None if kept.held else kept.next_at
            return HookLog(
                tenant=kept.tenant, url=kept.url, state=kept.state, tries=tuple(kept.log), next_try_at=next_at
            )
        record = await self._jobs.find(job_id)
        if record is None or not record.webhook_url:
            return None
        return HookLog(tenant=record.tenant, url=record.webhook_url, state="waiting", tries=())

    async def replay(self, job_id: str) -> bool:
        """See `job_book.HookBook`."""
        await self._store.probe()
        kept, now = self._live(job_id), self._now()
        if kept is None:
            return False
        if kept.held and kept.next_at is not None and kept.next_at > now:
            return True  # It is being sent.
        if kept.body is None and await self._store.read(job_id) is None:
            return False
        kept.state, kept.tries, kept.first_try_at = "waiting", 0, None
        kept.next_at, kept.held, kept.lease = now, False, kept.lease + 1
        kept.expires = max(kept.expires, now + HOOK_KEPT_S)
        self._index[job_id] = now
        return True

    def _keep_body(self, kept: _Kept, body: bytes | None) -> None:
        if body is None:
            return
        kept.body = body
        held_bytes = sum(len(one.body) for one in self._kept.values() if one.body is not None)
        for one in self._kept.values():
            if held_bytes <= MOST_BODY_BYTES:
                break
            if one.body is not None and one is not kept:
                held_bytes -= len(one.body)
                one.body = None

    def _live(self, job_id: str) -> _Kept | None:
        kept = self._kept.get(job_id)
        if kept is not None and kept.expires <= self._now():
            del self._kept[job_id]
            return None
        return kept
