"""One queue of several that feed one pool: its connection, which heals itself, and its gate.

What a queue hands up was admitted by its gate before. Whatever happens to one queue happens to no other: it has its own
connection, its own window of what waits here, its own pauses. One that is taken away gives back what waits here, lets
what runs end, and only then closes its connection.

Not here: in which order the queues take turns (`merge.py`), and who keeps a gate's readings fresh: whoever made the
gate runs it, since it outlasts connections and may stand at several places.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, Literal, assert_never

import structlog

from inference_worker.disposition import (
    AT_ONCE,
    Ack,
    DeliveryLost,
    Disposition,
    HandBack,
    Hold,
    Known,
    Nack,
    Settled,
    Token,
    handed_back,
)
from inference_worker.errors import GateFailed, MalformedRequest, TransportLost
from inference_worker.gates.combined import parked
from inference_worker.gates.endings import ending
from inference_worker.gates.permits import NOT_SENT, give_back
from inference_worker.gates.waiting import outlast
from inference_worker.lanes import CLASSIFICATION_LABEL, lane_of
from inference_worker.merge import MergePolicy
from inference_worker.messages import InferenceRequest, Reply, decode
from inference_worker.ports import (
    Admitted,
    Asked,
    Connect,
    Delivery,
    Dropped,
    Feedback,
    Gate,
    Parked,
    Permit,
    Route,
    Transport,
    TurnedAway,
    Verdict,
)
from inference_worker.timing import ByteBudget, ended, first_of

log = structlog.get_logger(__name__)

FIRST_BACKOFF_S: Final = 1.0
LONGEST_BACKOFF_S: Final = 30.0

FIRST_PAUSE_S: Final = 0.25
"""How long what was turned away is kept before it goes back; doubled while nothing is admitted."""
LONGEST_PAUSE_S: Final = 4.0

CLOSED_LOOK_S: Final = 0.1
"""How often a gate without budget is looked at."""
HEAVY_LOOK_S: Final = 0.1
"""How often it is looked whether there is room for more bytes."""
CLOSED_S: Final = 0.5
"""A gate that is without budget for so long has its queue's connection stop consuming: a full one that opens with
every answer must not cost a consumer each time."""

WATCHDOG_S: Final = 20.0
"""How often a queue from which nothing comes is looked at: a consumer that looks alive and gets nothing is replaced.
The listener, which does so too, sees only that nothing comes from any queue."""
LOOK_S: Final = 5.0
"""How long such a look may take."""

GATE_S: Final = 10.0
"""How much longer than the time for waiting a gate may take for its last answer."""
GIVE_BACK_S: Final = 3.0
"""How long all that waits here may take to go back. After it the connection is closed, which gives it back."""
LEAVE_S: Final = 1.0
"""How long settlements that have begun are waited for before that: cut short, a copy and its original both remain."""

MOST_WAITING_BYTES: Final = 64 * 1024 * 1024
"""So much may wait here unstarted, of all queues together. Beyond it each has one, so that none is kept out."""

UNCLAIMED: Final = Token("never claimed")
"""Before a gate nothing is claimed."""

QueueVerdict = Literal["admitted", "gate_closed", "quota_exhausted", "dropped", "error"]
"""What a queue's gate has said. One that keeps a request waiting, or refuses it after a wait, has said one thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One queue."""

    name: str
    connect: Connect
    gate: Gate | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    route: Route | None = None
    window: int = 64
    """The most that waits here unstarted: asking the gate, or in a lane."""
    hand_back: HandBack = AT_ONCE
    """How a delivery goes back that the gate has not let in. As a copy where the broker counts what it gets back: there
    a gate that opens and closes also keeps what has come, until its time for waiting is over."""


@dataclass(slots=True, eq=False)
class Held:
    """A delivery of a queue, as it came: the receipt of the one that is handed up for it."""

    feed: "Feed"
    transport: Transport
    inner: Delivery
    """As the queue's own transport knows it."""
    permits: tuple[Permit, ...] = ()
    seen: Feedback | None = None
    """What became of the request, where somebody has said so."""
    refused: bool = False
    """The gate's refusal was told."""

    @property
    def size_bytes(self) -> int:
        """What it takes to keep it: what came, and the payload that was read out of it, or fetched."""
        request = self.inner.request
        return len(self.inner.body) + (len(request.payload) if request is not None else 0)

    async def release(self, seen: Feedback) -> None:
        """Give the permits back; a repeat does nothing."""
        await give_back(self.take_permits(), seen)

    def take_permits(self) -> tuple[Permit, ...]:
        """What is to be given back by whoever takes it."""
        permits, self.permits = self.permits, ()
        return permits


@dataclass(slots=True, kw_only=True)
class Shared:
    """What the queues of one session have in common."""

    policy: MergePolicy[Delivery]
    now: Callable[[], float]
    rng: random.Random
    replica_id: str
    tier_label: str
    gate_wait_s: float
    """0: until the request's deadline."""
    told: Callable[[str, QueueVerdict], None]
    waiting: ByteBudget = field(default_factory=lambda: ByteBudget(MOST_WAITING_BYTES))
    """Counts what waits unstarted, of other sessions too where they share it."""
    flowing: bool = False
    over: bool = False
    """The session has ended."""
    limit: int = 0
    something: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a delivery can be handed up, perhaps."""
    feeds: "list[Feed]" = field(default_factory=list)

    def refill(self) -> None:
        """There is room in a lane, perhaps."""
        for feed in self.feeds:
            feed.refill()


class Feed:
    """Runs one queue for as long as its session lasts, or until it is taken away."""

    def __init__(self, source: Source, shared: Shared, key: str = "") -> None:
        """`key` is its name in the merge policy, where it is not that of the queue."""
        self.source = source
        self.key = key or source.name
        self._shared = shared
        self.transport: Transport | None = None
        self.reason = "not connected yet"
        """Why there is no connection; empty while there is one."""
        self.tried = asyncio.Event()
        """Set once a connection was had, or not."""
        self.connected = asyncio.Event()
        self.resting = asyncio.Event()
        """Set while nothing is consumed and nothing waits here."""
        self.resting.set()
        self.retired = asyncio.Event()
        """Set once the queue is taken away."""
        self.over = asyncio.Event()
        """Set once it has ended, and all that it has handed up is settled."""
        self._ended = False
        self.unstarted: dict[Held, None] = {}
        self.started: dict[Held, None] = {}
        """Handed up and not settled, also by connections that are gone."""
        self._no_room: dict[int, deque[Delivery]] = {}
        """Admitted, by lane: they wait for room in it, in their order."""
        self._asking: dict[asyncio.Task[None], None] = {}
        """Before the gate, or in the pause after it."""
        self._leaving: dict[asyncio.Task[None], None] = {}
        """Of those, what is being settled."""
        self._releasing: dict[asyncio.Task[None], None] = {}
        self._turn = asyncio.Event()
        """Set when consuming is to begin or to end, perhaps."""
        self._room = asyncio.Event()
        """Set when more may be taken, perhaps."""
        self._received = 0
        self._inner_limit = 0
        self._pause_s = 0.0
        self._pause_until = 0.0
        self._gate_said = ""

    # ------------------------------------------------------------ the connection

    async def run(self) -> None:
        """One connection after the other, with growing pauses between those that fail.

        Ends by being cancelled, or once it is retired and what it has handed up is settled.
        """
        loop = asyncio.get_running_loop()
        backoff_s = FIRST_BACKOFF_S
        while not (self._shared.over or self.retired.is_set()):
            opened_at = loop.time()
            try:
                why = await self._connection()
            except TransportLost as exc:
                why = str(exc)
            except Exception as exc:
                # A fault with one queue is that queue's: the others go on.
                log.exception("the connection to a queue failed", queue=self.source.name)
                why = f"{type(exc).__name__}: {exc}"
            finally:
                self.resting.set()
            if self.retired.is_set():
                log.info("a queue was taken away", queue=self.source.name)
                return
            if why != self.reason:
                log.warning("no connection to a queue; trying again", queue=self.source.name, reason=why)
            self.reason = why or "the connection was closed"
            self.tried.set()
            if self._shared.over:
                return  # A cancellation that a failure to close has covered up.
            if loop.time() - opened_at > backoff_s + FIRST_BACKOFF_S:
                backoff_s = FIRST_BACKOFF_S  # It had lasted: this is a new failure, not the same one still.
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, LONGEST_BACKOFF_S)

    async def _connection(self) -> str:
        """Use one connection until it is lost; says why it was."""
        async with self.source.connect() as transport:
            self.transport = transport
            self.reason = ""
            self.tried.set()
            self.connected.set()
            log.info("connected to a queue", queue=self.source.name)
            try:
                await self._use(transport)
            finally:
                self.transport = None
                self.connected.clear()
                await self._empty(transport)
            return transport.lost_because

    def awake(self) -> None:
        """It will consume, or has something to give back."""
        if self.transport is not None:
            self.resting.clear()

    def turn(self) -> None:
        """Whether messages flow, or how many, has changed."""
        self._turn.set()
        self._room.set()

    def retire(self) -> None:
        """The queue is taken away. Where it has no connection, whoever runs it ends it."""
        self.retired.set()
        self._leave_lanes()
        self.turn()

    def ended(self) -> None:
        """It runs no more, whatever for."""
        self._ended = True
        self.tried.set()
        self._note_over()

    def _note_over(self) -> None:
        if self._ended and not self.started:
            self.over.set()

    @property
    def _flows(self) -> bool:
        return self._shared.flowing and not self.retired.is_set()

    async def _use(self, transport: Transport) -> None:
        """Consume whenever messages flow and the gate has a budget, until the connection is lost, or not needed."""
        while not transport.lost.is_set():
            self._turn.clear()
            if not self._flows:
                if not await self._empty(transport):
                    raise TransportLost("what was not started could not be given back")
                if not self._flows:
                    self.resting.set()
                    if self.retired.is_set() and not self.started:
                        return
                    await first_of(transport.lost, self._turn)
                continue
            self.resting.clear()
            if self._closed:
                await first_of(transport.lost, self._turn, within_s=CLOSED_LOOK_S)
            else:
                await self._consume(transport)

    @property
    def _closed(self) -> bool:
        return self.source.gate is not None and self.source.gate.budget() <= 0

    @property
    def _keeps(self) -> bool:
        """What has come is kept while the gate is closed: given back, it would be counted as delivered."""
        return self.source.hand_back.copy_after_s > 0

    @property
    def withholds(self) -> bool:
        """Whether what is ready in this queue is to stay there, as far as its gate says."""
        return self._closed or bool(self._asking)

    async def _consume(self, transport: Transport) -> None:
        self._inner_limit = self.source.window
        async with transport.consuming(self._inner_limit):
            pump = asyncio.create_task(self._pump(transport), name=f"queue {self.source.name}")
            pump.add_done_callback(lambda _: self._turn.set())
            try:
                await self._watch(transport, pump)
            finally:
                await ended(pump)
            if not pump.cancelled():
                pump.result()

    async def _watch(self, transport: Transport, pump: asyncio.Task[None]) -> None:
        """Until it is to end; TransportLost where messages are ready and none come, though there is room for them."""
        idle_looks, received = 0, self._received
        while self._flows and not transport.lost.is_set() and not pump.done():
            self._turn.clear()
            await first_of(transport.lost, self._turn, within_s=WATCHDOG_S)
            if self._turn.is_set() or transport.lost.is_set():
                continue
            busy = self._received != received or self._full
            idle_looks, received = 0 if busy else idle_looks + 1, self._received
            if idle_looks and not await self._ready(transport):
                idle_looks = 0
            if idle_looks > 1 and self._received == received:
                raise TransportLost("messages are ready and none arrive: the consumer is dead")

    async def _ready(self, transport: Transport) -> int:
        try:
            async with asyncio.timeout(LOOK_S):
                return (await transport.backlog()).ready
        except TimeoutError:
            return 0  # Too slow to say, which ends no session by itself.

    async def _pump(self, transport: Transport) -> None:
        while await self._may_take(transport):
            if (inner := await self._receive(transport)) is not None:
                self._take(transport, inner)
            elif self._closed:
                return

    async def _receive(self, transport: Transport) -> Delivery | None:
        """The next one. None where nothing has come for a while from a queue whose gate is closed."""
        if not self._closed:
            return await transport.receive()
        try:
            async with asyncio.timeout(CLOSED_S):
                return await transport.receive()
        except TimeoutError:
            return None

    async def _may_take(self, transport: Transport) -> bool:
        """Wait until there is room for another one; False once the gate has been without budget for a while."""
        loop = asyncio.get_running_loop()
        closed_since: float | None = None
        while True:
            self._room.clear()
            if self._full:
                closed_since = None
                # Bytes are freed by other pools, too, which tell nobody here.
                few = len(self.unstarted) < self.source.window
                await first_of(self._room, within_s=HEAVY_LOOK_S if few else None)
            elif self._closed and not self._keeps:
                closed_since = loop.time() if closed_since is None else closed_since
                if loop.time() - closed_since >= CLOSED_S:
                    return False
                await first_of(self._room, within_s=CLOSED_LOOK_S)
            else:
                await self._widen(transport)
                return True

    @property
    def _full(self) -> bool:
        """Nothing more may wait here for now."""
        return len(self.unstarted) >= self.source.window or (bool(self.unstarted) and self._shared.waiting.full)

    async def _widen(self, transport: Transport) -> None:
        """What runs takes no place from what may wait. It only grows: some brokers begin anew with each change."""
        unsettled = len(self.unstarted) + len(self.started)
        if self._inner_limit <= unsettled and self._inner_limit < (most := self._shared.limit + self.source.window):
            self._inner_limit = min(max(unsettled + 1, self._inner_limit + self.source.window), most)
            await transport.set_limit(self._inner_limit)

    # ------------------------------------------------------------ one delivery

    def _take(self, transport: Transport, inner: Delivery) -> None:
        self._received += 1
        held = Held(feed=self, transport=transport, inner=inner)
        delivery = replace(
            inner,
            receipt=held,
            route=self.source.route or inner.route,
            labels=self._labels(inner),
            taken_at=asyncio.get_running_loop().time(),
        )
        self.unstarted[held] = None
        self._shared.waiting.add(held.size_bytes)
        request = self._request(inner)
        if self.source.gate is None or request is None or request.deadline <= self._shared.now():
            # What is no request, or too late, is ended by whoever receives it, and never sent.
            self._line_up(delivery)
            return
        gate = OnceOpen(self.source.gate) if self._keeps else self.source.gate
        task = asyncio.create_task(self._ask(gate, held, delivery, request))
        self._asking[task] = None
        task.add_done_callback(self._asked)

    def _labels(self, inner: Delivery) -> dict[str, str]:
        """Those of the queue stand above the message's own, which cannot claim to be reserved: a gate says so anew."""
        of_message = {name: text for name, text in inner.labels.items() if name != CLASSIFICATION_LABEL}
        return {**of_message, **self.source.labels}

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking.pop(task, None)
        self._leaving.pop(task, None)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("a delivery could not be let in", queue=self.source.name, exc_info=exc)

    def _request(self, inner: Delivery) -> InferenceRequest | None:
        if inner.request is not None or self.source.gate is None:
            return inner.request
        try:
            return decode(inner.body, message_id=inner.message_id, infer_path="/", now=self._shared.now())
        except MalformedRequest:
            return None

    async def _ask(self, gate: Gate, held: Held, delivery: Delivery, request: InferenceRequest) -> None:
        try:
            verdict = await self._verdict(gate, held, delivery, request)
            match verdict:
                case Admitted(permits=permits):
                    held.permits = permits
                    self._pause_s = 0.0
                    self._told("admitted")
                    self._line_up(delivery)
                case Dropped():
                    self._told("dropped")
                    await self._drop(held, request, verdict)
                case Parked() if request.deadline <= self._shared.now():
                    self._refused(held, verdict)
                    self._line_up(delivery)
                case Parked() | TurnedAway():
                    self._refused(held, verdict)
                    await self._return(held, request)
                case None:
                    self._told("error")
                    await self._return(held, request)
                case _:
                    assert_never(verdict)
        except TransportLost:
            self._forget(held)  # It goes back by itself.
        except Exception:
            # A fault of ours with one message: kept, it would take its place in the window for ever.
            log.exception("a delivery could not be let in; it goes back", queue=self.source.name)
            await self._return(held, request)

    def _told(self, what: QueueVerdict) -> None:
        self._shared.told(self.source.name, what)

    def _refused(self, held: Held, verdict: Parked | TurnedAway) -> None:
        if not held.refused:
            held.refused = True
            self._told(verdict.because)

    async def _verdict(self, gate: Gate, held: Held, delivery: Delivery, request: InferenceRequest) -> Verdict | None:
        """What the gate says in its time; None where it cannot say."""
        left_s = request.deadline - self._shared.now()
        wait_s = min(self._shared.gate_wait_s, left_s) if self._shared.gate_wait_s > 0 else left_s
        until = asyncio.get_running_loop().time() + wait_s
        asked = Asked(
            request_id=request.request_id,
            metadata=request.metadata,
            labels=delivery.labels,
            deadline=request.deadline,
            tenant=request.tenant,
            payload=request.payload,
        )
        try:
            async with asyncio.timeout_at(until + GATE_S):
                verdict = await outlast(
                    gate, asked, until, self._shared.rng, parked=lambda wait: self._refused(held, wait)
                )
        except (GateFailed, TimeoutError) as exc:
            reason = str(exc) or "it gave no answer"
            if self._says_anew(reason):
                log.warning("the gate of a queue cannot be asked", queue=self.source.name, reason=reason)
            return None
        except Exception as exc:
            # A fault in a gate keeps its own queue waiting, and nothing else.
            if self._says_anew(f"{type(exc).__name__}: {exc}"):
                log.exception("the gate of a queue failed", queue=self.source.name)
            return None
        self._gate_said = ""
        return verdict

    def _says_anew(self, reason: str) -> bool:
        """Whether the reason is another than the last one: it is asked for every message."""
        last, self._gate_said = self._gate_said, reason
        return reason != last

    async def _drop(self, held: Held, request: InferenceRequest, dropped: Dropped) -> None:
        """End a request with what its gate says."""
        if not await self._left(held, Ack(reply=self._last_word(held, request, dropped))):
            # Another runs it, or the store does not answer: it is asked for again when it comes back.
            await self._return(held, request)

    def _last_word(self, held: Held, request: InferenceRequest, dropped: Dropped) -> Reply:
        status_code, error_code, error = ending(dropped)
        return Reply(
            request_id=request.request_id,
            status="failed",
            status_code=status_code,
            attempt=held.inner.attempts,
            replica_id=self._shared.replica_id,
            received_at=request.received_at,
            finished_at=self._shared.now(),
            error=error,
            error_code=error_code,
        )

    async def _return(self, held: Held, request: InferenceRequest) -> None:
        """Give a delivery back after a pause: brokers hand it out again at once."""
        await first_of(held.inner.lost, within_s=self._next_pause_s())
        back = handed_back(
            Hold(request.request_id, UNCLAIMED),
            held.inner.attempts,
            self.source.hand_back,
            left_s=request.deadline - self._shared.now(),
            jitter=self._shared.rng.random(),
        )
        with suppress(TransportLost):  # It goes back by itself.
            if not await self._left(held, back):
                await self._left(held, Nack())
        self._forget(held)

    async def _left(self, held: Held, disposition: Disposition) -> bool:
        """Settle what is not handed up, and let go of it; whether that was done."""
        task = asyncio.current_task()
        assert task is not None
        self._leaving[task] = None
        try:
            settlement = await held.transport.settle(held.inner, disposition)
            if isinstance(settlement, Known):
                settlement = await held.transport.settle(held.inner, Ack())
        finally:
            self._leaving.pop(task, None)
        if not isinstance(settlement, Settled | DeliveryLost):
            return False
        self._forget(held)
        return True

    def _next_pause_s(self) -> float:
        """Twice as long after each pause in which nothing was admitted; those turned away during one share it."""
        at = asyncio.get_running_loop().time()
        if at >= self._pause_until or not self._pause_s:
            self._pause_s = min(max(self._pause_s * 2, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            self._pause_until = at + self._pause_s
        # Nothing comes back before the pause is over, so that it begins no shorter one; nor all of it at once.
        return self._pause_until - at + self._pause_s * self._shared.rng.uniform(0, 0.5)

    def _line_up(self, delivery: Delivery) -> None:
        """Into its lane, or, where there is no room, behind those that wait for some."""
        if self.retired.is_set():
            return  # It goes back with the rest of what was not started.
        tier, classification = self._lane(delivery)
        waiting = self._no_room.get(lane_of(tier, classification))
        if waiting or not self._shared.policy.put(delivery, self.key, tier, classification):
            self._no_room.setdefault(lane_of(tier, classification), deque()).append(delivery)
        self._shared.something.set()

    def refill(self) -> None:
        """Put what waits for room into its lane, as far as there is some."""
        for lane, waiting in list(self._no_room.items()):
            while waiting:
                if not self._shared.policy.put(waiting[0], self.key, *self._lane(waiting[0])):
                    break
                waiting.popleft()
            if not waiting:
                del self._no_room[lane]

    def line_up_anew(self, before: MergePolicy[Delivery]) -> None:
        """Another policy holds from now on: bring over what waits, in its order."""
        no_room = [delivery for waiting in self._no_room.values() for delivery in waiting]
        self._no_room.clear()
        for delivery in (*before.remove(self.key), *no_room):
            self._line_up(delivery)

    def _lane(self, delivery: Delivery) -> tuple[str | None, str | None]:
        return delivery.labels.get(self._shared.tier_label), delivery.labels.get(CLASSIFICATION_LABEL)

    # ------------------------------------------------------------ what leaves

    def start(self, held: Held) -> None:
        """A delivery is handed up."""
        self._no_longer_waits(held)
        self.started[held] = None
        self._room.set()

    def let_go(self, held: Held) -> None:
        """A delivery was lost before it was handed up: somebody else has it by now."""
        self._forget(held)
        if held.permits:
            task = asyncio.create_task(held.release(NOT_SENT))
            self._releasing[task] = None
            task.add_done_callback(lambda _: self._releasing.pop(task, None))

    def _forget(self, held: Held) -> None:
        self._no_longer_waits(held)
        self._room.set()

    def _no_longer_waits(self, held: Held) -> None:
        if held in self.unstarted:
            del self.unstarted[held]
            self._shared.waiting.release(held, held.size_bytes)

    async def finish(self, held: Held, seen: Feedback) -> None:
        """A delivery is settled, or lost: what its gate gave goes back, once."""
        self.started.pop(held, None)
        self._room.set()
        self._shared.something.set()
        if self.retired.is_set():
            self._turn.set()
        try:
            await held.release(seen)
        finally:
            self._room.set()  # The gate may have a budget now.
            self._note_over()

    async def _empty(self, transport: Transport) -> bool:
        """Give back all that waits here, the last one first, so that brokers have it in its old order.

        False where that took too long: then closing the connection gives it back.
        """
        left: list[Held] = []
        try:
            try:
                await self._end_asking()
            finally:
                left = self._taken_out()
            if not transport.lost.is_set():
                async with asyncio.timeout(GIVE_BACK_S):
                    for held in reversed(left):
                        await transport.settle(held.inner, Nack())
        except (TimeoutError, TransportLost):
            return False
        finally:
            await give_back([permit for held in left for permit in held.take_permits()], NOT_SENT)
        return True

    async def _end_asking(self) -> None:
        for task in self._asking:
            if task not in self._leaving:
                task.cancel()
        try:
            if self._leaving:
                await asyncio.wait(list(self._leaving), timeout=LEAVE_S)
        finally:
            for task in self._asking:
                task.cancel()
        if tasks := [*self._asking, *self._releasing]:
            await asyncio.wait(tasks)

    def _leave_lanes(self) -> None:
        self._shared.policy.remove(self.key)
        self._no_room.clear()

    def _taken_out(self) -> list[Held]:
        self._leave_lanes()
        left = list(self.unstarted)
        for held in left:
            self._no_longer_waits(held)
        self._shared.refill()
        self._shared.something.set()
        return left


class OnceOpen:
    """Keeps a request waiting while its gate has no budget, and asks it then."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def budget(self) -> float:
        """Its gate's."""
        return self._gate.budget()

    async def admit(self, asked: Asked) -> Verdict:
        """Its gate's verdict, once it is open."""
        if self._gate.budget() <= 0:
            return parked(TurnedAway(), self._gate, asked)
        return await self._gate.admit(asked)

    async def run(self, until: asyncio.Event) -> None:
        """Its gate's."""
        await self._gate.run(until)

    def closes_at(self) -> str:
        """Its gate's."""
        return self._gate.closes_at()
