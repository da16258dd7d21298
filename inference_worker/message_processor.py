"""From a delivery to an outcome: decode, join, deadline, slot, gate, claim, model.

The steps are those of `docs/design/delivery.md`, section 3. What becomes of the message is not decided here
(`disposition.py`), nor carried out (the transport); a `Job` is what one delivery holds meanwhile.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol, TypeVar, assert_never

import structlog

from inference_worker.addressing import Addressing
from inference_worker.disposition import (
    Answered,
    Concluded,
    Failed,
    Fault,
    Hold,
    Interrupted,
    Malformed,
    NotAdmitted,
    NotAdmittedBecause,
    NotStored,
    Outcome,
    Superseded,
    Token,
)
from inference_worker.errors import (
    BadResponse,
    GateFailed,
    MalformedRequest,
    ModelCut,
    ModelFailure,
    ModelSlow,
    StoreUnavailable,
)
from inference_worker.gates.endings import GATE_FAILED, ending
from inference_worker.gates.feedback import REASON_HEADER
from inference_worker.gates.waiting import SHORTEST_PAUSE_S
from inference_worker.llmd_retry import failure_text
from inference_worker.messages import (
    ErrorCode,
    InferenceRequest,
    KnownReply,
    Reply,
    Timings,
    Usage,
    answer_of,
    decode,
    error_text,
    known_reply,
    shown_id,
)
from inference_worker.metrics import WorkerMetrics
from inference_worker.pool_gate import Permits, PoolGate, Question
from inference_worker.ports import (
    Admitted,
    AlreadyAnswered,
    Answer,
    Asked,
    BelowFloor,
    Claimed,
    ClaimLost,
    Delivery,
    Dropped,
    Feedback,
    Health,
    ModelClient,
    Parked,
    Renewed,
    ResultStore,
    RunningElsewhere,
    Span,
    TurnedAway,
    Verdict,
)
from inference_worker.settling import release
from inference_worker.stamping import overlaid
from inference_worker.timing import first_of, stopped_within
from inference_worker.tracing import UNTRACED
from inference_worker.transforms.chain import Body, Unfit
from inference_worker.transforms.shaping import AS_IT_CAME, Shaping

log = structlog.get_logger(__name__)
T = TypeVar("T")

LONGEST_WAIT_S: Final = 600.0
"""How long a message waits for another runner before it is handed back; the broker's own limit is 30 minutes."""

LOOK_S: Final = 1.0
"""How often a waiting message looks whether its runner is still there."""

HEALTH_LOOK_S: Final = 5.0
"""How long a failed call waits for a look at the model's health before its copy is published."""

ADDRESSING: Final = Addressing()


class UsageEvent(Protocol):
    """Makes a billing event; None where nothing is billed."""

    def __call__(self, request: InferenceRequest, reply: Reply, usage: Usage) -> bytes | None: ...


class Saw(Protocol):
    """Told of a call to the model."""

    def __call__(self, delivery: Delivery, seen: Feedback) -> None: ...


def nobody_wants(delivery: Delivery, seen: Feedback) -> None:
    """Nobody wants to know."""


@dataclass(slots=True, eq=False)
class Job:
    """What one delivery holds here, from its arrival until it is settled."""

    delivery: Delivery
    span: Span = UNTRACED
    request: InferenceRequest | None = None
    hold: Hold | None = None
    """The claim that is renewed while the job lasts."""
    calling: asyncio.Task[object] | None = None
    """The job's own task, while it calls the model."""
    ended_call_because: AlreadyAnswered | ClaimLost | Interrupted | None = None
    has_slot: bool = False
    permits: Permits | None = None
    """What it has taken of the pool's gate."""
    at_gate: asyncio.Event | None = None
    """While it waits there: set by who has heard that its request may be cancelled."""
    doubted: bool = False
    """Whether its request is said to be cancelled since its claim was asked for."""
    suspect: bool = False
    """Whether a worker has died while running this request."""
    registered: bool = False
    waits_until: float | None = None
    """Loop time at which a waiting message is handed back."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the job is settled: who joined it goes on then."""

    def end_call(self, because: AlreadyAnswered | ClaimLost | Interrupted) -> None:
        """Close the call that is running, if one is. To be called from another task, so that this one is in it."""
        if self.calling is not None and self.ended_call_because is None:
            self.ended_call_because = because
            self.calling.cancel()


class MessageProcessor:
    """Runs requests: at most `slots` calls at once, at most one for each request."""

    def __init__(
        self,
        *,
        store: ResultStore,
        model: ModelClient,
        model_health: Health,
        store_health: Health,
        metrics: WorkerMetrics,
        usage_event: UsageEvent,
        now: Callable[[], float],
        new_token: Callable[[], Token],
        rng: random.Random,
        replica_id: str,
        infer_path: str,
        infer_timeout_s: float,
        retry_statuses: frozenset[int],
        slots: int,
        lease_s: float,
        max_crashes: int,
        store_patience_s: float,
        addressing: Addressing = ADDRESSING,
        shaping: Shaping = AS_IT_CAME,
        answer_statuses: frozenset[int] = frozenset(),
        gate: PoolGate | None = None,
        saw: Saw = nobody_wants,
    ) -> None:
        """`addressing` is for deliveries that have a route. `answer_statuses` are taken as 2xx are. `shaping` says what
        is sent of a payload, and what is stored of an answer.

        `saw` hears what became of each call, for the gate of the queue that it came from.
        """
        self._store = store
        self._model = model
        self._model_health = model_health
        self._store_health = store_health
        self._metrics = metrics
        self._usage_event = usage_event
        self._now = now
        self._new_token = new_token
        self._rng = rng
        self._replica_id = replica_id
        self._infer_path = infer_path
        self._infer_timeout_s = infer_timeout_s
        self._retry_statuses = retry_statuses
        self._lease_s = lease_s
        self._max_crashes = max_crashes
        self._store_patience_s = store_patience_s
        self._addressing = addressing
        self._shaping = shaping
        self._answer_statuses = answer_statuses
        self._gate = gate
        self._saw = saw
        self._slots = self._free_slots = slots
        self._slot_freed = asyncio.Event()
        self._jobs: dict[str, Job] = {}
        """By request id: what runs here, or is about to."""
        self._suspect: Job | None = None
        """The one request that runs here although a worker died while running it."""
        self._suspect_freed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._grace_over = False

    # ------------------------------------------------------------ for the listener

    @property
    def calls(self) -> int:
        """Requests that have a slot: they call the model, or are about to."""
        return self._slots - self._free_slots

    def resize(self, slots: int) -> None:
        """So many calls at once from now on; those that run end as they would."""
        self._free_slots += slots - self._slots
        self._slots = slots
        self._slot_freed.set()

    def address(self, addressing: Addressing) -> None:
        """Follow routes like this from now on."""
        self._addressing = addressing

    async def process(self, job: Job) -> Outcome:
        """Bring a delivery to an outcome. Ends early once the delivery is lost before its call, or on `stop`."""
        job.hold = None  # One that was lost on an earlier round must not be renewed while this one waits.
        if job.delivery.redelivered and job.request is None:  # On its first round.
            self._metrics.redelivered()
        try:
            request = (
                job.request
                or job.delivery.request
                or decode(
                    job.delivery.body,
                    message_id=job.delivery.message_id,
                    infer_path=self._infer_path if job.delivery.route is None else job.delivery.route.path,
                    now=self._now(),
                )
            )
        except MalformedRequest as exc:
            return Malformed(reason=exc.reason, reply=self._invalid(exc, job))
        job.request = request
        loop = asyncio.get_running_loop()
        if job.waits_until is None:
            job.waits_until = loop.time() + LONGEST_WAIT_S
        elif (early := self._may_not_wait(job)) is not None:
            return early  # It came back as busy. Past its deadline, too, it waits no longer than any other.
        while True:
            if (early := await self._join(job, request)) is not None:
                return early
            if self._now() >= request.deadline:
                return self._without_claim(job, request, 408, "expired", _expired(job))
            if (unfit := self._shaping.refused(request)) is not None:
                return self._without_claim(job, request, 400, "invalid_request", unfit.reason)
            if (early := await self._stand_back(job)) is not None:
                return early
            if (early := await self._take_slot(job)) is not None:
                return early
            gate = self._gate if self._gate is not None and self._gate.stands else None
            if gate is not None and (early := await self._pass_gate(job, request, gate)) is not None:
                return early
            try:
                outcome = await self._claim_and_call(job, request)
            finally:
                if job.permits is not None:
                    await job.permits.over()
                    job.permits = None
            if isinstance(outcome, RunningElsewhere):
                self._give_slot(job)
                self._let_other_suspects_run(job)
                if (early := await self._wait_for_runner(job, outcome)) is not None:
                    return early
            elif outcome is not None:
                return outcome

    def stop(self) -> None:
        """Have everything handed back that has not begun; running calls go on."""
        self._stopping.set()

    def interrupt(self) -> None:
        """Close the calls that run: their grace is over."""
        self._grace_over = True
        for job in list(self._jobs.values()):
            job.end_call(Interrupted(reason="told to stop, and the grace is over", hold=job.hold))

    def forget(self, job: Job) -> None:
        """The job is settled, or given up: free what it holds."""
        self._give_slot(job)
        self._let_other_suspects_run(job)
        if job.registered and job.request is not None:
            del self._jobs[job.request.request_id]
            job.registered = False
        job.over.set()

    async def renew_leases(self, until: asyncio.Event) -> None:
        """Keep every claim of this process alive: three times a lease, all in one go."""
        while not await stopped_within(until, self._lease_s / 3):
            held = [(job, job.hold) for job in self._jobs.values() if job.hold is not None]
            if held:
                await asyncio.gather(*(self._renew_quietly(job, hold) for job, hold in held))

    async def heed_cancellations(self, until: asyncio.Event) -> None:
        """Look at once after a request that is said to be cancelled, where it runs here; a renewal would tell later."""
        looking: set[str] = set()
        async with asyncio.TaskGroup() as group:

            async def look(job: Job, hold: Hold) -> None:
                try:
                    await self._renew_quietly(job, hold)
                finally:
                    looking.discard(hold.request_id)

            def told(request_id: str) -> None:
                job = self._jobs.get(request_id)
                if job is None:
                    return
                if job.at_gate is not None:
                    job.at_gate.set()
                elif job.hold is None:
                    job.doubted = True
                elif request_id not in looking:
                    looking.add(request_id)
                    group.create_task(look(job, job.hold))

            await self._store.cancellations(until, told)

    # ------------------------------------------------------------ the steps

    async def _join(self, job: Job, request: InferenceRequest) -> Outcome | None:
        """Wait while this process runs the request already; then be the one that does."""
        while not job.registered:
            running = self._jobs.get(request.request_id)
            if running is None:
                self._jobs[request.request_id] = job
                job.registered = True
                break
            self._metrics.joined()
            await first_of(running.over, job.delivery.lost, self._stopping, within_s=self._wait_left_s(job))
            if (early := self._may_not_wait(job)) is not None:
                return early
        return None

    async def _take_slot(self, job: Job) -> Outcome | None:
        while self._free_slots <= 0 and not job.has_slot:
            self._slot_freed.clear()
            await first_of(self._slot_freed, job.delivery.lost, self._stopping, within_s=self._wait_left_s(job))
            if (early := self._may_not_wait(job)) is not None:
                return early
        if (early := self._may_not_wait(job)) is not None:
            return early
        if not job.has_slot:
            self._free_slots -= 1
            job.has_slot = True
        return None

    def _give_slot(self, job: Job) -> None:
        if job.has_slot:
            job.has_slot = False
            self._free_slots += 1
            self._slot_freed.set()

    async def _pass_gate(self, job: Job, request: InferenceRequest, gate: PoolGate) -> Outcome | None:
        """Wait for the pool's gate, with a slot and without a claim. None: it is let in."""
        left_s = request.deadline - self._now()
        if left_s <= 0:
            return self._without_claim(job, request, 408, "expired", _expired(job))
        asked = Asked(
            request_id=request.request_id,
            metadata=request.metadata,
            labels=job.delivery.labels,
            deadline=request.deadline,
            tenant=request.tenant,
            payload=request.payload,
        )
        job.at_gate = asyncio.Event()
        try:
            async with gate.asking(asked, left_s) as question:
                if (early := await self._wait_at_gate(job, request, question, job.at_gate)) is not None:
                    return early
                # Once the time is over the question is withdrawn, though its gate may be about to answer.
                verdict = Parked(within_s=0.0) if question.pending else question.verdict()
        except GateFailed as exc:
            text = f"the gate of the pool could not be asked: {exc}"
            return self._without_claim(job, request, GATE_FAILED, "gate_error", text)
        finally:
            job.at_gate = None
        return self._heard(job, request, verdict, gate)

    async def _wait_at_gate(
        self, job: Job, request: InferenceRequest, question: Question, doubted: asyncio.Event
    ) -> Outcome | None:
        """Until there is a verdict, or time is over. An outcome where it may not wait, or need not."""
        while question.pending and question.left_s > 0:
            doubted.clear()
            await first_of(question.answered, doubted, job.delivery.lost, self._stopping, within_s=question.left_s)
            if job.delivery.lost.is_set():
                return Interrupted(reason="the delivery was lost at the gate")
            if self._stopping.is_set():
                return Interrupted(reason="told to stop before it was let in")
            if doubted.is_set() and (known := await self._stored(request)) is not None:
                return Answered(reply=known)
        return None

    def _heard(self, job: Job, request: InferenceRequest, verdict: Verdict, gate: PoolGate) -> Outcome | None:
        match verdict:
            case Admitted(permits=permits):
                job.permits = Permits(permits, partial(self._saw, job.delivery))
                return None
            case Dropped():
                return self._without_claim(job, request, *ending(verdict))
            case Parked() if self._now() >= request.deadline:
                text = "the deadline passed while it waited at the gate of the pool"
                return self._without_claim(job, request, 408, "expired", text)
            case Parked():
                reason = f"waited {gate.wait_s:g} s at the gate of the pool"
                why: NotAdmittedBecause = "waited"
            case TurnedAway(because=because):
                reason, why = f"turned away at the gate of the pool: {because}", because
            case _:
                assert_never(verdict)
        return NotAdmitted(reason=reason, hold=Hold(request.request_id, self._new_token()), because=why)

    def _without_claim(
        self, job: Job, request: InferenceRequest, status_code: int, code: ErrorCode, text: str
    ) -> Concluded:
        """It ends here: storing that needs no claim, unless somebody else has one."""
        hold = Hold(request.request_id, self._new_token())
        return Concluded(reply=self._failure(job, status_code, code, text), hold=hold)

    async def _stored(self, request: InferenceRequest) -> KnownReply | None:
        """The result that is there already; None also where the store does not say."""
        try:
            stored = await self._store.read(request.request_id)
        except StoreUnavailable as exc:
            self._store_health.report(False, str(exc))
            return None
        return None if stored is None else known_reply(stored)

    async def _claim_and_call(self, job: Job, request: InferenceRequest) -> Outcome | RunningElsewhere | None:
        """Claim, then call. None: the claim went to another on the way; begin again."""
        hold = Hold(request.request_id, self._new_token())
        job.doubted = False
        asked_at = asyncio.get_running_loop().time()
        claim = await self._ask_store(
            lambda: self._store.claim(request.request_id, job.delivery.attempts, hold.token, request.deadline),
            job,
            hold,
        )
        match claim:
            case AlreadyAnswered(reply=known):
                return Answered(reply=known)
            case BelowFloor():
                return Superseded()
            case RunningElsewhere():
                return claim
            case NotStored() | Interrupted():
                return claim
            case Claimed(starts=starts):
                if starts > self._max_crashes:
                    text = f"its workers died {starts - 1} times while running it"
                    return Concluded(reply=self._failure(job, 500, "poison", text), hold=hold)
                job.suspect = starts > 1
                if job.suspect and not self._may_run_suspect(job):
                    await release(self._store, hold)
                    return RunningElsewhere(left_s=0.0)
            case _:
                assert_never(claim)
        job.hold = hold
        if job.delivery.lost.is_set():
            return Interrupted(reason="the delivery was lost before its call", hold=hold)
        if job.doubted or asyncio.get_running_loop().time() - asked_at > self._lease_s / 3:
            renewal = await self._ask_store(lambda: self._store.renew(request.request_id, hold.token), job, hold)
            match renewal:
                case AlreadyAnswered(reply=known):
                    return Answered(reply=known)
                case ClaimLost():
                    self._metrics.claim_lost()
                    job.hold = None
                    return None
                case NotStored() | Interrupted():
                    return renewal
                case Renewed():
                    pass
                case _:
                    assert_never(renewal)
        return await self._call(job, request, hold)

    def _may_run_suspect(self, job: Job) -> bool:
        """Requests whose runner died run one at a time: a poison among them must not take the others along again."""
        if self._suspect is None:
            self._suspect = job
        return self._suspect is job

    def _let_other_suspects_run(self, job: Job) -> None:
        """The job is over, or waits for another worker that runs its request."""
        if self._suspect is job:
            self._suspect = None
            self._suspect_freed.set()

    async def _stand_back(self, job: Job) -> Outcome | None:
        """A known suspect waits for its turn without a claim: one that was lost in between would count as a crash."""
        while job.suspect and not self._may_run_suspect(job):
            self._suspect_freed.clear()
            await first_of(self._suspect_freed, job.delivery.lost, self._stopping, within_s=self._wait_left_s(job))
            if (early := self._may_not_wait(job)) is not None:
                return early
        return None

    async def _call(self, job: Job, request: InferenceRequest, hold: Hold) -> Outcome | None:
        """Call the model. None: the claim was lost meanwhile, and there is no answer."""
        if self._grace_over:
            return Interrupted(reason="told to stop", hold=hold)
        begun = self._now()
        left_s = request.deadline - begun
        timeout_s = min(self._infer_timeout_s, left_s)
        if timeout_s <= 0:
            return Concluded(reply=self._failure(job, 408, "expired", _expired(job)), hold=hold)
        body = self._shaping.body(request, job.delivery.route)
        if isinstance(body, Unfit):
            return Concluded(reply=self._failure(job, 400, "invalid_request", body.reason), hold=hold)
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        if job.permits is None and self._saw is not nobody_wants:
            job.permits = Permits((), partial(self._saw, job.delivery))
        if job.permits is not None:
            job.permits.sent(asked_at)
        with job.span.calling(request) as call:
            answer = await self._answer(job, request, body, timeout_s, call.headers)
            model_s = loop.time() - asked_at  # The wall clock may be set meanwhile.
            queue_s = max(begun - request.received_at, 0.0)
            timings = Timings(queue_s=queue_s, model_s=model_s)
            outcome = self._judge(job, request, answer, hold, timings) if isinstance(answer, Answer) else None
            call.ended(answer, outcome)
        if job.permits is not None:
            await job.permits.answered(answer, outcome)
        # The call is what a slot is for: storing its answer need not keep the next one from the model.
        self._give_slot(job)
        if outcome is not None:
            return outcome
        assert not isinstance(answer, Answer)
        match answer:
            case None:
                return self._ended(job)
            case ModelSlow() if left_s <= self._infer_timeout_s:
                text = f"the deadline passed while the model was working ({timeout_s:g} s)"
                return Concluded(reply=self._failure(job, 408, "deadline_exceeded", text, timings), hold=hold)
            case ModelSlow():
                return self._failed(job, Fault.SLOW, str(answer), hold, timings)
            case BadResponse(status_code=status) if status in self._retry_statuses:
                return self._failed(job, Fault.STATUS, str(answer), hold, timings)
            case BadResponse():
                return Concluded(reply=self._failure(job, 502, "bad_response", str(answer), timings), hold=hold)
            case ModelFailure():
                # Asked before the copy is published: a worker whose model is gone must not burn all retries by itself.
                await self._model_health.check_now(HEALTH_LOOK_S)
                if isinstance(answer, ModelCut):
                    cut = self._failed(job, Fault.CUT, str(answer), hold, timings)
                    return replace(cut, retry_after_s=answer.retry_after_s)
                return self._failed(job, Fault.GONE, str(answer), hold, timings)
            case _:
                assert_never(answer)

    async def _answer(
        self, job: Job, request: InferenceRequest, body: Body, timeout_s: float, headers: Mapping[str, str]
    ) -> Answer | ModelFailure | None:
        """What the model says to a body, as its caller is to see it. None: the call was closed from outside."""
        route = job.delivery.route
        address = self._addressing.of(job.delivery, request, headers)
        if address.skipped:
            log.debug("headers_not_sent", request_id=shown_id(request.request_id), names=address.skipped)
        job.ended_call_because, job.calling = None, asyncio.current_task()
        try:
            answer = await self._model.infer(
                endpoint=address.endpoint,
                payload=body.content,
                # What streams in answer to another body is of no shape that could be put together.
                stream=request.stream and body.content_type is None,
                request_id=request.request_id,
                timeout_s=timeout_s,
                headers=_with_type(address.headers, body.content_type),
                base_url=address.base_url,
            )
            return self._shaping.answer(request, route, answer)
        except BadResponse as exc:
            return self._shaping.failure(request, route, exc)
        except ModelFailure as exc:
            return exc
        except asyncio.CancelledError:
            if job.ended_call_because is None:
                raise
            return None
        finally:
            if job.ended_call_because is not None and job.calling is not None:
                job.calling.uncancel()  # The call was meant, not the job.
            job.calling = None

    def _ended(self, job: Job) -> Outcome | None:
        """The call was closed from outside, and there is no answer."""
        match job.ended_call_because:
            case AlreadyAnswered(reply=known):
                return Answered(reply=known)
            case Interrupted() as interrupted:
                return interrupted
            case _:
                job.hold = None
                return None

    def _judge(self, job: Job, request: InferenceRequest, answer: Answer, hold: Hold, timings: Timings) -> Outcome:
        status = answer.status_code
        timings = Timings(queue_s=timings.queue_s, model_s=timings.model_s, ttft_s=answer.ttft_s, tbt_s=answer.tbt_s)
        if status in self._retry_statuses:
            text = failure_text(error_text(answer.body, answer.reason), answer.headers.get(REASON_HEADER), None)
            return self._failed(job, Fault.STATUS, f"{status}: {text}", hold, timings, answer)
        if 200 <= status < 300 or status in self._answer_statuses:
            is_json, usage = answer_of(answer.body) if answer.body else (True, None)
            if not is_json:
                text = f"the model answered {status} with a body that is not JSON ({len(answer.body)} bytes)"
                return Concluded(reply=self._failure(job, 502, "bad_response", text, timings), hold=hold)
            reply = self._reply(job, status, timings, result=answer.body or None)
            usage = usage or answer.usage
            event = self._usage_event(request, reply, usage) if usage is not None else None
            return Concluded(reply=reply, usage=usage, usage_event=event, hold=hold)
        if status >= 400:
            text = failure_text(error_text(answer.body, answer.reason), answer.headers.get(REASON_HEADER), None)
            reply = self._failure(job, status, "model_error", text, timings)
            return Concluded(reply=_handing_on(job, reply, answer), hold=hold)
        text = f"the model answered {status} {answer.reason}, which is no answer"
        return Concluded(reply=self._failure(job, 502, "bad_response", text, timings), hold=hold)

    async def _wait_for_runner(self, job: Job, runner: RunningElsewhere) -> Outcome | None:
        self._metrics.waiting_elsewhere(+1)
        try:
            within_s = min(runner.left_s + self._rng.uniform(0.01, 0.1), LOOK_S, self._wait_left_s(job))
            await first_of(job.delivery.lost, self._stopping, within_s=within_s)
        finally:
            self._metrics.waiting_elsewhere(-1)
        return self._may_not_wait(job)

    def _may_not_wait(self, job: Job) -> Outcome | None:
        """Why a message that has not begun must go back, if it must."""
        if job.delivery.lost.is_set():
            return Interrupted(reason="the delivery was lost")
        if self._stopping.is_set():
            return Interrupted(reason="told to stop before it began")
        if self._wait_left_s(job) <= 0:
            return Interrupted(reason=f"waited {LONGEST_WAIT_S:g} s for its turn")
        return None

    def _wait_left_s(self, job: Job) -> float:
        assert job.waits_until is not None
        return max(job.waits_until - asyncio.get_running_loop().time(), 0.0)

    # ------------------------------------------------------------ the store

    async def _ask_store(self, ask: Callable[[], Awaitable[T]], job: Job, hold: Hold) -> T | NotStored | Interrupted:
        """Ask again, with the same token, for as long as we may hold the message."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._store_patience_s
        while True:
            try:
                return await ask()
            except StoreUnavailable as exc:
                self._store_health.report(False, str(exc))
            left_s = until - loop.time()
            if left_s < SHORTEST_PAUSE_S:
                return NotStored(hold=hold)
            await first_of(job.delivery.lost, self._stopping, within_s=min(LOOK_S, left_s))
            if job.delivery.lost.is_set() or self._stopping.is_set():
                return Interrupted(reason="the store did not answer", hold=hold)

    async def _renew_quietly(self, job: Job, hold: Hold) -> None:
        if job.hold is not hold:  # It was given up between the look and this task's first step.
            return
        try:
            renewal = await self._store.renew(hold.request_id, hold.token)
        except StoreUnavailable as exc:
            self._store_health.report(False, str(exc))  # The call goes on: its answer is kept.
            return
        if not isinstance(renewal, Renewed) and job.hold is hold:
            if isinstance(renewal, ClaimLost):
                self._metrics.claim_lost()
            job.end_call(renewal)

    # ------------------------------------------------------------ replies

    def _failed(
        self,
        job: Job,
        fault: Fault,
        detail: str,
        hold: Hold,
        timings: Timings,
        answer: Answer | None = None,
    ) -> Failed:
        text = f"{fault.value}, {job.delivery.attempts + 1} times tried: {detail}"
        reply = self._failure(job, 500, "retries_exhausted", text, timings)
        if answer is None:
            return Failed(fault=fault, detail=detail, hold=hold, reply=reply)
        return Failed(
            fault=fault,
            detail=detail,
            hold=hold,
            reply=_handing_on(job, reply, answer),
            retry_after_s=answer.retry_after_s,
            status_code=answer.status_code,
        )

    def _failure(self, job: Job, status_code: int, code: ErrorCode, text: str, timings: Timings | None = None) -> Reply:
        return self._reply(job, status_code, timings or Timings(), error=text, error_code=code)

    def _reply(
        self,
        job: Job,
        status_code: int,
        timings: Timings,
        *,
        result: bytes | None = None,
        error: str | None = None,
        error_code: ErrorCode | None = None,
    ) -> Reply:
        assert job.request is not None
        return Reply(
            request_id=job.request.request_id,
            status="completed" if error_code is None else "failed",
            status_code=status_code,
            attempt=job.delivery.attempts,
            replica_id=self._replica_id,
            received_at=job.request.received_at,
            finished_at=self._now(),
            timings=timings,
            result=result,
            error=error,
            error_code=error_code,
        )

    def _invalid(self, exc: MalformedRequest, job: Job) -> Reply | None:
        if exc.request_id is None:
            return None
        return Reply(
            request_id=exc.request_id,
            status="failed",
            status_code=400,
            attempt=job.delivery.attempts,
            replica_id=self._replica_id,
            finished_at=self._now(),
            error=exc.reason,
            error_code="invalid_request",
        )


def _with_type(headers: Mapping[str, str], content_type: str | None) -> Mapping[str, str]:
    """With the type of what is sent, in place of the caller's in any letter case."""
    return headers if content_type is None else overlaid(headers, {"Content-Type": content_type})


def _handing_on(job: Job, reply: Reply, answer: Answer) -> Reply:
    """A failed reply, with the answer itself where the message's format hands it on; ours does not."""
    return reply if job.delivery.request is None else replace(reply, answer=answer.body)


def _expired(job: Job) -> str:
    tried = job.delivery.attempts
    if not tried:
        return EXPIRED
    return f"the deadline had passed before it could be tried again; {tried} {'tries' if tried > 1 else 'try'} failed"


EXPIRED: Final = "the deadline had passed before a worker could begin"
