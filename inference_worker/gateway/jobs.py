"""Jobs of a tenant: accepted, looked at, listed, waited for, cancelled.

Which broker, which store and which book is nobody's business here, nor what HTTP makes of it. A job is accepted once
the queue has it, never before. A job of another tenant is exactly a job that does not exist: the same steps, the same
answer.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from inference_worker.errors import NotAccepted, QueueFull, StoreUnavailable, TransportLost
from inference_worker.gateway.job_requests import NewJob
from inference_worker.gateway.metrics import GatewayMetrics
from inference_worker.gateway.pace import Pace
from inference_worker.gateway.problems import Refusal
from inference_worker.gateway.views import OPEN, View, ended_view, open_state, open_view, stored_state
from inference_worker.job_book import Intake, JobBook, JobRecord, Message, OtherBody, Taken
from inference_worker.messages import ENDPOINTS, LONGEST_TIMEOUT_S, Reply, encode_request, usable_id
from inference_worker.ports import AlreadyAnswered, ResultStore, RunningElsewhere, Stored
from inference_worker.timing import ended

T = TypeVar("T")

LISTED_AT_ONCE: Final = 8
ASK_AGAIN_S: Final = 0.5
"""How soon a store that was silent is asked again by who waits for a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A job has ended, and this is its stored result."""

    stored: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NotYet:
    """The time to wait is over, or the gateway stops, or who waited has gone."""

    unanswered: str = ""
    """Why the store could not be asked, if so."""


class Jobs:
    """What callers do with their jobs."""

    def __init__(
        self,
        *,
        intake: Intake,
        book: JobBook,
        store: ResultStore,
        pace: Pace,
        metrics: GatewayMetrics,
        now: Callable[[], float],
        new_id: Callable[[], str],
        infer_path: str,
        result_ttl_s: float,
        most_waiting: int,
        name: str,
        knows_tenants: bool,
        hint: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`hint` is told of jobs with a webhook that may be sent soon; `name` signs what is cancelled."""
        self._intake = intake
        self._book = book
        self._store = store
        self._pace = pace
        self._metrics = metrics
        self._now = now
        self._new_id = new_id
        self._result_ttl_s = result_ttl_s
        self._most_waiting = most_waiting
        self._name = name
        self._knows_tenants = knows_tenants
        self._hint = hint
        self.endpoints = (infer_path, *(path for path in ENDPOINTS if path != infer_path))
        """What a job may ask for; the first one is meant where it asks for none."""
        self.stopping = asyncio.Event()
        """Set at the end: whoever waits for a result gets what is known by then."""

    # ------------------------------------------------------------ accepting

    async def accept(self, job: NewJob, tenant: str) -> Taken:
        """Put a job into the queue.

        Raises:
            Refusal: it is not accepted; where that is not sure, the same key means the same job later.
        """
        now = self._now()
        record = JobRecord(
            job_id=self._new_id(),
            tenant=tenant,
            created_at=now,
            expires_at=now + min(job.timeout_s, LONGEST_TIMEOUT_S),
            fingerprint="" if job.key is None else job.fingerprint(),
            endpoint=job.endpoint,
            metadata=job.metadata,
            webhook_url=job.webhook_url,
        )

        def message(of: JobRecord) -> bytes:
            return encode_request(
                request_id=of.job_id,
                received_at=of.created_at,
                timeout_s=job.timeout_s,
                payload=job.payload,
                endpoint=job.endpoint,
                metadata=job.metadata,
                tenant=tenant or None,
            )

        taken = await self._put(record, message, job.key)
        self._metrics.accepted(new=taken.new)
        return taken

    async def _put(self, record: JobRecord, message: Message, key: str | None) -> Taken:
        try:
            taken = await self._intake.accept(record, message, key=key, most_waiting=self._most_waiting)
        except QueueFull as exc:
            retry_after_s = await self._pace.retry_after_s(exc.waiting, self._most_waiting)
            raise Refusal(429, "queue_full", f"The job is not accepted: {exc}.", retry_after_s=retry_after_s) from exc
        except NotAccepted as exc:
            if exc.for_good:
                raise Refusal(413, "body_too_large", f"The job is not accepted: {exc}.") from exc
            detail = "The job is not accepted, the queue has not confirmed it."
            raise Refusal(503, "queue_unavailable", detail, because=str(exc)) from exc
        except TransportLost as exc:
            detail = "The job is not accepted, the queue cannot be reached."
            raise Refusal(503, "queue_unavailable", detail, because=str(exc)) from exc
        except StoreUnavailable as exc:
            detail = "The job is not accepted, the store cannot be asked."
            raise Refusal(503, "store_unavailable", detail, because=str(exc)) from exc
        if isinstance(taken, OtherBody):
            detail = "The idempotency key stands for a job that asked for something else."
            raise Refusal(422, "idempotency_key_reused", detail)
        return taken

    async def accepted_view(self, taken: Taken) -> View:
        """An accepted job, as its caller is told."""
        record = taken.record
        view: View = {"job_id": record.job_id, "status": "queued"}
        if not taken.new:
            view["status"] = await self.state(record)
        view |= {"created_at": record.created_at, "expires_at": record.expires_at}
        ahead = taken.waiting if taken.new else None
        view["position"] = None if ahead is None else ahead + 1
        view["estimated_wait_s"] = await self._pace.wait_s(ahead)
        view["links"] = links(record)
        return view

    # ------------------------------------------------------------ looking

    async def look(self, job_id: str, tenant: str, wait_s: float = 0.0, gone: asyncio.Event | None = None) -> View:
        """The job as it is now, or as soon as it has ended, `wait_s` seconds from now at the latest.

        `gone` ends the wait, not the job: who waited does not any more.

        Raises:
            Refusal: there is no such job, or it is gone.
            StoreUnavailable
        """
        record = await self._find(job_id, tenant)
        view = await self._view(job_id, record)
        if wait_s > 0 and view["status"] in OPEN:
            match await self.wait(job_id, wait_s, gone):
                case Ended(stored=stored):
                    return ended_view(job_id, stored, record)
                case NotYet(unanswered=why) if why:
                    raise StoreUnavailable(why)
            return await self._view(job_id, record)
        return view

    async def state(self, record: JobRecord) -> str:
        """The state alone, without reading a result that may be large."""
        if record.ended == "completed":
            return "succeeded"
        if record.ended == "":
            progress = await self._store.progress(record.job_id)
            if progress.running:
                return "running"
            stored = await self._store.read(record.job_id)
            return open_state(progress) if stored is None else stored_state(stored)
        stored = await self._store.read(record.job_id)
        return "failed" if stored is None else stored_state(stored)

    async def page(self, tenant: str, *, limit: int, after: str | None) -> View:
        """The caller's jobs, newest first."""
        try:
            page = await self._book.page(tenant, limit=limit, after=after)
        except ValueError as exc:
            raise Refusal(422, "invalid_request", "after must be a cursor that an earlier page gave.") from exc
        states = await self._states(page.records)
        jobs = [
            {
                "job_id": record.job_id,
                "status": status,
                "created_at": record.created_at,
                "expires_at": record.expires_at,
                "endpoint": record.endpoint or self.endpoints[0],
                "metadata": dict(record.metadata),
            }
            for record, status in zip(page.records, states, strict=True)
        ]
        return {"jobs": jobs, "after": page.after}

    async def _states(self, records: Sequence[JobRecord]) -> list[str]:
        """Their states, a few asked for at a time: the result of one that failed is read."""
        places = asyncio.Semaphore(LISTED_AT_ONCE)

        async def state(record: JobRecord) -> str | StoreUnavailable:
            async with places:
                try:
                    return await self.state(record)
                except StoreUnavailable as exc:
                    return exc

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(state(record)) for record in records]
        states: list[str] = []
        for task in asked:
            found = task.result()
            if isinstance(found, StoreUnavailable):
                raise found
            states.append(found)
        return states

    async def wait(self, job_id: str, within_s: float, gone: asyncio.Event | None = None) -> Ended | NotYet:
        """Wait for the end of a job; a store that is silent is asked again until the time is over.

        `gone` ends the wait: who waited does not any more.
        """
        loop = asyncio.get_running_loop()
        until, why = loop.time() + within_s, ""
        self._metrics.waiting.inc()
        try:
            while True:
                left_s = until - loop.time()
                if self.stopping.is_set() or (gone is not None and gone.is_set()):
                    return NotYet()
                if left_s <= 0:
                    return NotYet(unanswered=why)
                try:
                    stored = await self._wait(job_id, left_s, gone)
                except StoreUnavailable as exc:
                    why = str(exc)
                    await self._wait_for(asyncio.sleep(min(ASK_AGAIN_S, left_s)), gone)
                else:
                    why = ""
                    if stored is not None:
                        return Ended(stored=stored)
        finally:
            self._metrics.waiting.dec()

    async def _wait(self, job_id: str, within_s: float, gone: asyncio.Event | None) -> bytes | None:
        return await self._wait_for(self._store.wait(job_id, within_s), gone)

    async def _wait_for(self, work: Coroutine[Any, Any, T], gone: asyncio.Event | None) -> T | None:
        """Wait for `work`, unless we stop or who waits has gone."""
        working = asyncio.create_task(work)
        events = [asyncio.create_task(e.wait()) for e in (self.stopping, gone) if e is not None]
        try:
            await asyncio.wait([working, *events], return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            for task in (working, *events):
                await ended(task)

    async def _find(self, job_id: str, tenant: str) -> JobRecord | None:
        """The record. None only where nobody is asked who he is: then what the store knows is shown, too.

        Raises:
            Refusal: 404, with the same steps and words whether nobody has such a job, or another one has.
        """
        asks = tenant if self._knows_tenants else None
        record = await self._book.find(job_id, asks) if usable_id(job_id) else None
        mine = record is not None and record.tenant == tenant
        if mine:
            return record
        if self._knows_tenants or record is not None or not usable_id(job_id):
            raise _no_such_job()
        return None

    async def _view(self, job_id: str, record: JobRecord | None) -> View:
        stored = await self._store.read(job_id)
        if stored is not None:
            return ended_view(job_id, stored, record)
        progress = await self._store.progress(job_id)
        if not progress.running:
            stored = await self._store.read(job_id)  # It may have ended between the two questions.
            if stored is not None:
                return ended_view(job_id, stored, record)
            if record is None:
                raise _no_such_job()
            if self._is_gone(record):
                raise _gone()
        return open_view(job_id, progress, record)

    def _is_gone(self, record: JobRecord) -> bool:
        return record.ended != "" or self._now() > record.expires_at + self._result_ttl_s

    # ------------------------------------------------------------ cancelling

    async def cancel(self, job_id: str, tenant: str) -> View:
        """End a job that has not ended: a queued one is never run, the call of a running one is closed.

        Raises:
            Refusal: no such job, gone, or it has ended otherwise.
            StoreUnavailable
        """
        record = await self._find(job_id, tenant)
        view = await self._view(job_id, record)
        if view["status"] in OPEN:
            await self._cancel(job_id, record)
            view = await self._view(job_id, record)
        if view["status"] != "cancelled":
            detail = f"The job cannot be cancelled, it has ended: {view['status']}."
            raise Refusal(409, "already_ended", detail, job_id=job_id)
        return view

    async def abandon(self, record: JobRecord) -> None:
        """Its caller has gone: nobody will ask for the answer."""
        await self._cancel(record.job_id, record)

    async def _cancel(self, job_id: str, record: JobRecord | None) -> None:
        reply = Reply(
            request_id=job_id,
            status="failed",
            status_code=499,
            attempt=0,
            replica_id=self._name,
            finished_at=self._now(),
            received_at=None if record is None else record.created_at,
            error="cancelled by the caller",
            error_code="cancelled",
        )
        match await self._store.cancel(reply):
            case Stored():
                self._metrics.cancelled()
                if record is not None and record.webhook_url is not None:
                    self._hint(job_id)
            case AlreadyAnswered() | RunningElsewhere():
                pass


def links(record: JobRecord) -> dict[str, str]:
    """Where to go from here."""
    found = {"self": f"/v1/jobs/{record.job_id}", "wait": f"/v1/jobs/{record.job_id}?wait=60"}
    if record.webhook_url is not None:
        found["webhook"] = f"/v1/jobs/{record.job_id}/webhook"
    return found


def _no_such_job() -> Refusal:
    return Refusal(404, "no_such_job", "There is no such job.")


def _gone() -> Refusal:
    return Refusal(410, "gone", "The job is over, and its result is not kept any more.")
