"""The spine: receive, process, decide, settle; and when to receive at all.

It owns the state of the link and the one loop that reconnects. It consumes only while nothing speaks against it (the
reasons are named), and when told to stop it hands back what has not begun, lets the rest finish for a while, then hands
back that too. What a message means is the processor's business, what becomes of it `decide`'s.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol, assert_never

import structlog

from inference_worker.addressing import Addressing
from inference_worker.breaker import Breaker
from inference_worker.disposition import (
    AT_ONCE,
    Answered,
    Busy,
    Concluded,
    CopyRefused,
    DeliveryLost,
    Disposition,
    Failed,
    HandBack,
    Interrupted,
    Known,
    Malformed,
    Nack,
    NotAdmitted,
    NotStored,
    Outcome,
    Republish,
    Retries,
    Settled,
    StoreSilent,
    decide,
)
from inference_worker.errors import StoreUnavailable, TransportLost
from inference_worker.message_processor import Job, MessageProcessor
from inference_worker.metrics import Suspension, WorkerMetrics
from inference_worker.metrics_buffer import MetricsBuffer
from inference_worker.ports import Connect, Delivery, Health, LinkState, ResultStore, Tracer, Transport
from inference_worker.request_notes import Notes, id_of
from inference_worker.throughput import Throughput
from inference_worker.timing import ByteBudget, ended, first_of, quietly, stopped_within
from inference_worker.tracing import PASSING_ON

log = structlog.get_logger(__name__)

FIRST_BACKOFF_S: Final = 1.0
LONGEST_BACKOFF_S: Final = 30.0
STORE_LOOK_S: Final = 1.0
WATCHDOG_S: Final = 30.0
"""How often an idle consumer is held against the queue: one that looks alive and gets nothing is replaced."""

AFTER_GRACE_S: Final = 1.0
"""How long each step of handing back may take once the grace is over; closing connections ends what hangs then.

There are three, and the sinks' last flushes (5 s) come after them: all of it must be over 10 s after the grace.
"""


class Warm(Protocol):
    """Opens connections before the first message needs them. Never fails."""

    async def __call__(self, connections: int) -> None: ...


class Listener:
    """Takes messages from one queue at a time, at most `limit` unsettled ones."""

    def __init__(
        self,
        *,
        connect: Connect,
        processor: MessageProcessor,
        store: ResultStore,
        store_health: Health,
        warm: Warm,
        policy: Retries,
        breaker: Breaker,
        metrics: WorkerMetrics,
        buffer: MetricsBuffer,
        budget: ByteBudget,
        now: Callable[[], float],
        rng: random.Random,
        limit: int,
        grace_s: float,
        store_patience_s: float,
        tracer: Tracer = PASSING_ON,
        hand_back: HandBack = AT_ONCE,
        name: str = "",
    ) -> None:
        """`name` stands in its lines of log, where there are several."""
        self._log = log.bind(pool=name) if name else log
        self._connect = connect
        self._processor = processor
        self._store = store
        self._store_health = store_health
        self._warm = warm
        self._policy = policy
        self._hand_back = hand_back
        self.breaker = breaker
        self._metrics = metrics
        self._notes = Notes(metrics, buffer, now)
        self._budget = budget
        self._now = now
        self._rng = rng
        self._limit = limit
        self._grace_s = grace_s
        self._store_patience_s = store_patience_s
        self._tracer = tracer
        self.state: LinkState = "connecting"
        self.throughput = Throughput()
        self.link_reason = "not connected yet"
        """Why there is no session; empty while there is one."""
        self.suspended: dict[Suspension, str] = {}
        """Why messages do not flow, by reason; empty while they may."""
        self._transport: Transport | None = None
        self._jobs: dict[asyncio.Task[None], None] = {}
        self._kept = 0
        self._received = 0
        self._told_at = 0.0
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._until_try: asyncio.TimerHandle | None = None
        """The breaker's pause that is running."""
        self._grace_over = asyncio.Event()
        for reason, why in (("model", "not asked yet"), ("store", "not asked yet")):
            self.suspend_consuming(reason, why)  # type: ignore[arg-type]  # They are two of the literals.
        store_health.watch(self._store_changed)

    # ------------------------------------------------------------ for others

    def suspend_consuming(self, reason: Suspension, why: str = "") -> None:
        """Stop taking messages, for a reason that lasts until `resume_consuming` is called with it."""
        if reason not in self.suspended:
            self._metrics.suspension(reason, True)
        self.suspended[reason] = why
        self._changed.set()

    def resume_consuming(self, reason: Suspension) -> None:
        """A reason against taking messages is gone."""
        if self.suspended.pop(reason, None) is not None:
            self._metrics.suspension(reason, False)
            self._changed.set()

    def resize(self, limit: int) -> None:
        """Hold so many messages from now on, and call the model as often at once; what runs is not interrupted."""
        self._limit = limit
        self._processor.resize(limit)
        self._metrics.slots.set(limit)
        self._changed.set()

    def address(self, addressing: Addressing) -> None:
        """Follow the routes of deliveries like this from now on."""
        self._processor.address(addressing)

    async def settled(self) -> None:
        """Wait until what is in our hands now is settled or given back; what comes meanwhile is not waited for."""
        if self._jobs:
            await asyncio.wait(list(self._jobs))

    @property
    def in_flight(self) -> int:
        """Messages in our hands."""
        return len(self._jobs)

    @property
    def calls(self) -> int:
        """Those of them that call the model."""
        return self._processor.calls

    @property
    def transport(self) -> Transport | None:
        """The open session, if there is one."""
        return self._transport if self._transport is not None and not self._transport.lost.is_set() else None

    async def run(self, stop: asyncio.Event) -> None:
        """Listen until told to stop, and return once everything in hand is settled or given back."""
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_store(over), name="store watch")
            group.create_task(self._processor.renew_leases(over), name="leases")
            group.create_task(self._processor.heed_cancellations(over), name="cancellations")
            serving = asyncio.create_task(self._serve(stop), name="sessions")
            try:
                await self._told_to_stop(stop, serving)
                await self._drain()
            finally:
                await ended(serving)
                await self._end_jobs()
                self._end_pause()
                self._enter("stopped")
                self._store_health.unwatch(self._store_changed)
                over.set()

    # ------------------------------------------------------------ the link

    async def _told_to_stop(self, stop: asyncio.Event, serving: asyncio.Task[None]) -> None:
        """Wait for the end of the sessions; a connection that is still being opened is not waited for."""
        told = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([told, serving], return_when=asyncio.FIRST_COMPLETED)
            self._told_at = asyncio.get_running_loop().time()
            if self._transport is None:
                serving.cancel()
            await asyncio.wait([serving])
        finally:
            await ended(told)
        if not serving.cancelled():
            serving.result()

    async def _serve(self, stop: asyncio.Event) -> None:
        """One session after the other, with growing pauses between those that fail."""
        loop = asyncio.get_running_loop()
        backoff_s, sessions = FIRST_BACKOFF_S, 0
        while not stop.is_set():
            self._enter("connecting")
            opened_at = loop.time()
            try:
                async with self._connect() as transport:
                    self._transport = transport
                    self._linked(sessions)
                    sessions += 1
                    await self._session(transport, stop)
                    if stop.is_set():
                        await self._drain()
                        return
                    why = transport.lost_because
            except TransportLost as exc:
                why = str(exc)
            finally:
                self._transport = None
            self._metrics.peer("broker", False)
            if why != self.link_reason:
                self._log.warning("no connection to the broker; trying again", reason=why)
            self.link_reason = why
            if loop.time() - opened_at > backoff_s + FIRST_BACKOFF_S:
                backoff_s = FIRST_BACKOFF_S  # It had lasted: this is a new failure, not the same one still.
            self._enter("connecting")
            await stopped_within(stop, backoff_s)
            backoff_s = min(backoff_s * 2, LONGEST_BACKOFF_S)

    def _linked(self, sessions: int) -> None:
        if sessions:
            self._metrics.reconnected()
        self._metrics.peer("broker", True)
        self.link_reason = ""
        self._log.info("connected to the broker")

    async def _session(self, transport: Transport, stop: asyncio.Event) -> None:
        """Consume whenever nothing speaks against it, until the session is lost or we are told to stop."""
        while not stop.is_set() and not transport.lost.is_set():
            self._changed.clear()
            if self.suspended:
                self._enter("suspended")
                await first_of(stop, transport.lost, self._changed)
                continue
            limit = self._limit_now
            await self._warm(limit)
            async with transport.consuming(limit):
                self._enter("consuming")
                await self._take(transport, limit, stop)

    @property
    def _limit_now(self) -> int:
        """One at a time while it is tried whether the model does its work again."""
        return 1 if self._trying else self._limit

    @property
    def _trying(self) -> bool:
        return self.breaker.state == "trying"

    async def _take(self, transport: Transport, limit: int, stop: asyncio.Event) -> None:
        """Take messages until something speaks against it, or the model is tried again, or was."""
        pump = asyncio.create_task(self._pump(transport), name="pump")
        idle_looks, received, trying = 0, self._received, self._trying
        try:
            while not (
                stop.is_set() or transport.lost.is_set() or self.suspended or pump.done() or trying != self._trying
            ):
                self._changed.clear()
                if limit != self._limit_now:
                    limit = self._limit_now
                    await transport.set_limit(limit)
                await first_of(stop, transport.lost, self._changed, within_s=WATCHDOG_S)
                busy = self._received != received or self.in_flight >= limit
                idle_looks, received = 0 if busy else idle_looks + 1, self._received
                if idle_looks and not self._changed.is_set() and not stop.is_set():
                    backlog = await transport.backlog()
                    self._metrics.backlog(backlog)
                    if backlog.ready <= backlog.withheld or self._received != received:
                        idle_looks = 0
                    elif idle_looks > 1:
                        raise TransportLost("messages are ready and none arrive: the consumer is dead")
        finally:
            await ended(pump)
        if not pump.cancelled():
            pump.result()

    async def _pump(self, transport: Transport) -> None:
        try:
            # Asked after each one: what a transport has at hand comes without a pause in which `_take` could end this.
            while not self.suspended:
                self._start(transport, await transport.receive())
        except TransportLost:
            return  # `transport.lost` tells the one who waits.

    def _start(self, transport: Transport, delivery: Delivery) -> None:
        """Begin with a delivery: no pause between receiving it and here, so that none can fall between."""
        self._received += 1
        self._idle.clear()
        self._budget.add(len(delivery.body))
        if self._budget.full:
            self.suspend_consuming("memory", f"{self._budget.held_bytes} bytes are held")
        task = asyncio.create_task(self._handle(transport, delivery))
        self._jobs[task] = None
        task.add_done_callback(lambda _: self._finished(task, delivery))

    def _finished(self, task: asyncio.Task[None], delivery: Delivery) -> None:
        self._jobs.pop(task, None)
        self._budget.release(delivery, len(delivery.body))
        if "memory" in self.suspended and self._budget.held_bytes <= self._budget.limit_bytes // 2:
            self.resume_consuming("memory")
        if not self._jobs:
            self._idle.set()
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._log.error("a job ended with an error", exc_info=exc)

    # ------------------------------------------------------------ one delivery

    async def _handle(self, transport: Transport, delivery: Delivery) -> None:
        """One delivery, from its arrival to its settlement. Whatever happens to it happens to no other."""
        job = Job(delivery, self._tracer.begin(delivery))
        try:
            await self._process_and_settle(transport, job)
        except asyncio.CancelledError:
            await quietly(transport.settle(delivery, Nack(claim=job.hold)), AFTER_GRACE_S, TransportLost)
            raise
        except Exception as exc:
            # A fault of ours. The claim is not released: it counts as a crash, so that a message that provokes it
            # every time ends as poison instead of going round for ever.
            log.exception("a message could not be handled; it goes back", request_id=id_of(job), **job.span.ids)
            job.span.failed(exc)
            await first_of(delivery.lost, within_s=STORE_LOOK_S)
            await transport.settle(delivery, Nack())
        finally:
            self._processor.forget(job)
            job.span.end()

    async def _process_and_settle(self, transport: Transport, job: Job) -> None:
        received = asyncio.get_running_loop().time()
        while True:
            outcome = await self._processor.process(job)
            self._judge_model(outcome)
            begun = asyncio.get_running_loop().time()
            # The call has given back what it counted, but an answer is held until it is stored, which may take long.
            held_bytes = _size_of(outcome)
            self._budget.add(held_bytes)
            try:
                settlement, outcome = await self._settle(transport, job, outcome)
            finally:
                self._budget.release(job, held_bytes)
            match settlement:
                case Settled(how=how):
                    at = asyncio.get_running_loop().time()
                    self._notes.settled(job, outcome, how, at - begun)
                    if isinstance(outcome, Concluded | Failed) and outcome.reply.timings.model_s is not None:
                        self.throughput.finished(at, at - received)
                    return
                case DeliveryLost(stored=stored):
                    self._notes.lost(job, outcome, stored=stored)
                    return
                case Busy(left_s=left_s):
                    # Our failure does not count: another worker rightly runs the request. Wait for it as on arrival.
                    await first_of(job.delivery.lost, within_s=min(left_s, 1.0))
                case _:
                    assert_never(settlement)

    def _judge_model(self, outcome: Outcome) -> None:
        """A model that answers /health and fails everything is unhealthy too."""
        state = self.breaker.state
        pause_s = self.breaker.saw(outcome)
        if pause_s is not None:
            why = f"{self.breaker.failures} calls in a row failed although the model says that it is healthy"
            self._log.warning("the model fails everything; consuming pauses", pause_s=pause_s, reason=why)
            self.suspend_consuming("breaker", why)
            self._end_pause()
            self._until_try = asyncio.get_running_loop().call_later(pause_s, self._try_model)
        elif state != "closed" and self.breaker.state == "closed":
            self._log.info("the model does its work again")
            self._end_pause()
            self.resume_consuming("breaker")
            self._changed.set()

    def _end_pause(self) -> None:
        """Forget the running pause: its end must not cut a later one short."""
        if self._until_try is not None:
            self._until_try.cancel()
            self._until_try = None

    def _try_model(self) -> None:
        self.breaker.try_again()
        self.resume_consuming("breaker")

    async def _settle(
        self, transport: Transport, job: Job, outcome: Outcome
    ) -> tuple[Settled | DeliveryLost | Busy, Outcome]:
        """Decide and carry out, until the message is settled, lost, or another's."""
        loop = asyncio.get_running_loop()
        patient_until = loop.time() + self._store_patience_s
        while True:
            disposition = self._decide(job, outcome)
            if isinstance(disposition, Nack | Republish):
                job.hold = None  # It is released in there: a renewal after that would take it back for a whole lease.
            settlement = await transport.settle(job.delivery, disposition)
            match settlement:
                case Settled() | DeliveryLost():
                    return settlement, outcome
                case Known(reply=known):
                    outcome = replace(outcome, reply=None) if isinstance(outcome, Malformed) else Answered(reply=known)
                case Busy():
                    if not isinstance(outcome, Malformed):
                        return settlement, outcome
                    outcome = replace(outcome, reply=None)
                case CopyRefused(reason=reason):
                    outcome = _without_retries(outcome, reason)
                case StoreSilent():
                    self._store_health.report(False, "a result could not be stored")
                    if self._grace_over.is_set() or loop.time() >= patient_until:
                        return await self._keep(transport, job, outcome, disposition)
                    await first_of(self._grace_over, within_s=STORE_LOOK_S)
                case _:
                    assert_never(settlement)

    def _decide(self, job: Job, outcome: Outcome) -> Disposition:
        left_s = job.request.deadline - self._now() if job.request is not None else 0.0
        return decide(
            outcome, job.delivery.attempts, self._policy, self._hand_back, left_s=left_s, jitter=self._rng.random()
        )

    async def _keep(
        self, transport: Transport, job: Job, outcome: Outcome, disposition: Disposition
    ) -> tuple[Settled | DeliveryLost, Outcome]:
        """The store is away: hand the message back, keep the answer and its slot, and store it once that is possible.

        Nothing is consumed before: so the same worker does not call the model twice.
        """
        settlement = await transport.settle(job.delivery, Nack())
        assert isinstance(settlement, Settled | DeliveryLost)
        if not isinstance(outcome, Concluded | Failed) or isinstance(disposition, Nack | Republish):
            return settlement, NotStored()  # There is no answer: nothing to keep.
        reply, event = outcome.reply, outcome.usage_event if isinstance(outcome, Concluded) else None
        if isinstance(settlement, Settled):
            self._notes.settled(job, NotStored(), settlement.how, 0.0)
        self._kept += 1
        self._metrics.kept_results.set(self._kept)
        self.suspend_consuming("kept", "answers wait for the store")
        try:
            while True:
                last = await stopped_within(self._grace_over, STORE_LOOK_S)
                try:
                    async with asyncio.timeout(AFTER_GRACE_S if last else None):
                        await self._store.write(reply, event, outcome.hold.token)
                except (StoreUnavailable, TimeoutError) as exc:
                    if last:
                        text = "an answer is given up; its message is queued"
                        self._log.warning(text, request_id=id_of(job), **job.span.ids)
                        return DeliveryLost(stored=False), NotStored()
                    self._store_health.report(False, str(exc))
                else:
                    return DeliveryLost(stored=True), outcome
        finally:
            self._kept -= 1
            self._metrics.kept_results.set(self._kept)
            if self._kept == 0:
                self.resume_consuming("kept")

    # ------------------------------------------------------------ the store

    async def _watch_store(self, over: asyncio.Event) -> None:
        """Ask the store once a second whether it takes writes, so that an idle worker knows before a message does."""
        while not over.is_set():
            try:
                await self._store.probe()
            except StoreUnavailable as exc:
                self._store_health.report(False, str(exc), checked_at=self._now())
            else:
                self._store_health.report(True, checked_at=self._now())
            await first_of(over, self._store_health.wanted, within_s=STORE_LOOK_S)
            self._store_health.wanted.clear()

    def _store_changed(self, ok: bool, reason: str) -> None:
        self._metrics.peer("store", ok)
        if ok:
            self._log.info("the result store answers")
            self.resume_consuming("store")
        else:
            self._log.warning("the result store does not answer; consuming pauses", reason=reason)
            self.suspend_consuming("store", reason)

    # ------------------------------------------------------------ the end

    async def _drain(self) -> None:
        """Let what runs finish within the grace, then close the calls and hand the messages back."""
        if self.state == "stopping":
            return
        self._enter("stopping")
        self._processor.stop()
        if self._jobs:
            self._log.info(
                "stopping: waiting for the requests that run", in_flight=len(self._jobs), grace_s=self._grace_s
            )
        grace_left_s = max(self._told_at + self._grace_s - asyncio.get_running_loop().time(), 0.0)
        if not await stopped_within(self._idle, grace_left_s):
            self._log.warning("the grace is over: requests are handed back", in_flight=len(self._jobs))
        self._grace_over.set()
        self._processor.interrupt()
        await stopped_within(self._idle, AFTER_GRACE_S)

    async def _end_jobs(self) -> None:
        """Nothing of ours outlives us. A settlement that has begun is given the time to end."""
        self._processor.stop()
        self._processor.interrupt()
        self._grace_over.set()
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=AFTER_GRACE_S)
        for task in list(self._jobs):
            task.cancel()
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=AFTER_GRACE_S)

    def _enter(self, state: LinkState) -> None:
        if state != self.state:
            self._log.info(state, **({"reasons": dict(self.suspended)} if state == "suspended" else {}))
        self.state = state
        self._metrics.link(state)


def _without_retries(outcome: Outcome, reason: str) -> Outcome:
    """A failure that would be tried again, if only a copy could be placed; what only waits goes back as it is."""
    if isinstance(outcome, NotAdmitted):
        return Interrupted(reason=f"{outcome.reason}; no copy can be placed: {reason}")
    assert isinstance(outcome, Failed)
    reply = replace(outcome.reply, error=f"{outcome.reply.error}; it cannot be tried again: {reason}")
    return Concluded(reply=reply, hold=outcome.hold)


def _size_of(outcome: Outcome) -> int:
    """How many bytes of an answer wait to be stored: as it came, inside the result, and inside the command for it."""
    return 3 * len(outcome.reply.result or outcome.reply.answer or b"") if isinstance(outcome, Concluded) else 0
