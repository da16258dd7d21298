"""The request queue in a table of Postgres: earliest deadline first, rows claimed one by one, with leases.

A claim locks rows that nobody else has locked (SKIP LOCKED) and counts them up; the count is the fence. Every
settlement is one statement that first looks whether the claim is this session's: result, its message, usage event,
dead letter and the end of the request are one transaction. Nothing is dealt out in partitions: who is free takes more.

A worker that has nothing to do is told of what comes, in milliseconds, and looks once a poll interval besides. Nobody
is told while there is a backlog, as then nobody waits: telling costs Postgres a lock over all of its transactions.

A session is a use of the process's connections (`sql_place`). It is over when being told is, and another is opened.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, Final, assert_never

import structlog

from inference_worker.disposition import (
    Ack,
    Busy,
    DeadLetter,
    DeliveryLost,
    Disposition,
    DispositionName,
    Hold,
    Known,
    Nack,
    Republish,
    Settled,
    Settlement,
    StoreSilent,
)
from inference_worker.errors import MalformedRequest, StoreUnavailable, TransportLost
from inference_worker.llmd_messages import MOST_ATTEMPTS, to_request
from inference_worker.messages import ErrorCode, Reply, encode_reply
from inference_worker.metrics import WorkerMetrics
from inference_worker.ports import Backlog, Delivery
from inference_worker.results.sql import DEAD_NOTE_TTL_S, SqlStore, known_of, row_id
from inference_worker.settling import death_note, release, settle_late
from inference_worker.sql_link import SqlLink
from inference_worker.sql_place import SqlPlace, queue_channel
from inference_worker.timing import ended, first_of, quietly, stopped_within
from inference_worker.transports.hands import MOST_BYTES, Appetite, Receipt, receipt_of
from inference_worker.transports.sorted_set_members import stored_reply
from inference_worker.transports.sql_members import (
    SqlClaim,
    SqlQueue,
    claims_of,
    headers_as_stored,
    placed,
    read_claim,
    whole,
)
from inference_worker.transports.taking import Saying, Taking

__all__ = ["SqlQueue", "SqlQueues", "expiring", "place_message", "sql_backlog"]

log = structlog.get_logger(__name__)

WANT_S: Final = 60.0
"""How long it stands that we want to be told; renewed while half of it is left."""

LONGEST_RENEWAL_S: Final = 30.0
STOP_S: Final = 1.5
"""How long the reader is waited for when consuming ends."""

CLOSE_S: Final = 1.0
"""How long each courtesy on leaving may take. Without it, what is ours comes back when its lease has lapsed."""

COPY_S: Final = 30.0
"""How long a copy is tried, its deadline apart."""

COPY_PAUSE_S: Final = 0.25
SHOW_PAUSE_S: Final = 0.05
"""To the next look where something is due and another has it in his hands."""

ASTRAY_PAUSE_S: Final = 0.25
CANCEL_PAUSE_S: Final = 0.02
"""Between two looks at what was cancelled: a producer may cancel thousands."""

MOST_AT_ONCE: Final = 1000
MOST_MOVED: Final = 100
"""Lapsed claims, and retries, that one look puts back."""

MOST_LAPSES: Final = 100
"""Deliveries whose holder went silent before a request counts as poison; a last line behind the crashes that are
counted for a request while it runs."""

UNIQUE: Final = "23505"
CANCEL_SAID: Final = "cancelled"
POISON: Final = "its holders went silent {} times"
CANCELLED: Final = "its producer has cancelled it"


class SqlQueues:
    """Opens sessions with one queue."""

    def __init__(
        self,
        place: SqlPlace,
        *,
        queue: SqlQueue,
        store: SqlStore,
        metrics: WorkerMetrics,
        replica_id: str,
        lease_s: float,
        now: Callable[[], float],
        poll_interval_s: float = 1.0,
    ) -> None:
        """`lease_s` is a row's in our hands; the store has that of a request that the processor has claimed."""
        self.place = place
        self.queue = queue
        self.store = store
        self.metrics = metrics
        self.replica_id = replica_id
        self.lease_s = lease_s
        self.now = now
        self.look_s = min(poll_interval_s, lease_s / 3)
        self.appetite = Appetite()
        """Outlasts the sessions: one that ended over an answer that was too large must not be followed by its like."""
        self.warnings = Saying(queue=queue.name)

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator["SqlTransport", None]:
        """Open a session."""
        session = SqlTransport(self)
        channel = queue_channel(self.queue.name)
        with self.place.ears.hearing(channel, session.told, session.lose):
            try:
                try:
                    await self.place.ears.stands(channel)
                    await session.begin()
                except StoreUnavailable as exc:
                    raise TransportLost(str(exc)) from exc
                yield session
            finally:
                session.lose("closed by us")
                await session.end()


class SqlTransport:
    """One session. See `ports.Transport`."""

    def __init__(self, queues: SqlQueues) -> None:
        self._queues = queues
        self._queue = queues.queue
        self._store = queues.store
        self._link = queues.place.link
        self.session = f"{queues.replica_id[:200]}/{secrets.token_hex(8)}".replace("\0", "")
        self._taking = Taking(
            "the queue in Postgres", take_turn=self._take_turn, give_back=self._give_back, stop_s=STOP_S
        )
        self._hands = self._taking.hands
        self.lost = self._taking.lost
        self._unseen: dict[int, int] = {}
        """Rows that are ours and in nobody's hands, with their fences: what is ended here, not handed up."""
        self._astray = False
        """An answer was lost: there may be claims of ours that we do not know of."""
        self._changed = asyncio.Event()
        """Set where we were told that the queue has something new."""
        self._cancelling = asyncio.Event()
        self._more = False
        """The last look found as much as it asked for."""
        self._dry = False
        """The queue was seen empty, and we are told when it is not."""
        self._wanted_until = 0.0
        """Loop time until which it stands that we want to be told."""
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ beginning and end

    async def begin(self) -> None:
        """Find out whether the queue can be looked at. Raises StoreUnavailable."""
        await self._take(0)
        self._tasks = [
            asyncio.create_task(self._taking.read(), name="sql reader"),
            asyncio.create_task(self._keep_ours(), name="sql leases"),
            asyncio.create_task(self._heed_cancellations(), name="sql cancellations"),
        ]

    def told(self, said: str) -> None:
        """Something has come into the queue, or something in it was cancelled."""
        (self._cancelling if said == CANCEL_SAID else self._changed).set()

    def lose(self, why: str) -> None:
        """The session is over, and with it the right to settle what came by it."""
        self._taking.lose(why)

    async def end(self) -> None:
        """Give back what is claimed for us, so that nobody waits for our lease."""
        for task in self._tasks:
            await ended(task)
        await quietly(self._leave([]), CLOSE_S, StoreUnavailable)

    async def _leave(self, kept: Sequence[int]) -> None:
        await self._link.fetch("select iw1_leave($1, $2, $3)", self._queue.name, self.session, kept)

    # ------------------------------------------------------------ consuming

    @property
    def lost_because(self) -> str:
        """See `ports.Transport`."""
        return self._taking.lost_because

    def consuming(self, limit: int) -> AbstractAsyncContextManager[None]:
        """See `ports.Transport`."""
        return self._taking.consuming(limit)

    async def set_limit(self, limit: int) -> None:
        """See `ports.Transport`."""
        await self._taking.set_limit(limit)

    async def receive(self) -> Delivery:
        """See `ports.Transport`."""
        return await self._taking.receive()

    async def _take_turn(self) -> None:
        """Give back what lies too long, take what there is; where there is nothing, wait until we are told."""
        loop = asyncio.get_running_loop()
        self._taking.turn.clear()
        if not self._taking.consumed:
            self._taking.resting.set()
            await first_of(self._taking.turn, self.lost)
            return
        await self._give_back(self._hands.take_back(loop.time()))
        if self._changed.is_set():
            self._changed.clear()
            self._dry = False
        if loop.time() >= self._taking.look_at or (self._wanted and not self._dry):
            await self._look()
        if self._taking.turn.is_set() or (self._more and self._wanted) or not self._taking.consumed:
            return
        if not self._wanted or await self._seen_empty():
            left_s = max(self._taking.look_at - loop.time(), 0.001)
            await first_of(self._taking.turn, self._changed, self.lost, within_s=left_s)

    async def _seen_empty(self) -> bool:
        """Say that we want to be told, unless it stands; what came until then is seen by one look more."""
        if self._wanted_until - asyncio.get_running_loop().time() > WANT_S / 2:
            self._dry = True
            return True
        channel = queue_channel(self._queue.name)
        at = asyncio.get_running_loop().time()
        try:
            await self._link.fetch("select iw1_want($1, $2, $3)", channel, self.session, WANT_S)
        except StoreUnavailable as exc:
            self._queues.warnings.say("the queue cannot be looked at", str(exc))
            return True  # Until the next look, which is soon.
        self._wanted_until = at + WANT_S
        return False

    @property
    def _wanted(self) -> int:
        return self._queues.appetite.portion(self._hands.wanted)

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            due_in_s = await self._take(self._wanted)
        except StoreUnavailable as exc:
            self._queues.warnings.say("the queue cannot be looked at", str(exc))
            due_in_s, self._more, self._astray = ASTRAY_PAUSE_S, False, True
            # Not at once again: it is refused, or nobody answers.
            await first_of(self._taking.turn, self.lost, within_s=SHOW_PAUSE_S)
        else:
            self._queues.warnings.well("the queue cannot be looked at")
        self._taking.look_at = loop.time() + min(due_in_s, self._queues.look_s)

    async def _take(self, wanted: int) -> float:
        """Put back what lapsed or is due, claim up to `wanted` rows; seconds to the next that lapses or is due."""
        if self._astray:
            await self._leave([receipt_entry(receipt) for receipt in self._hands.everything()] + [*self._unseen])
            self._astray = False
        self._dry = False
        head, *rows = await self._link.fetch(
            "select * from iw1_take($1, $2, $3, $4, $5, $6, $7)",
            self._queue.name,
            self.session,
            wanted,
            MOST_BYTES,
            self._queues.lease_s,
            MOST_MOVED,
            self._wanted_until > 0,
        )
        self._more = bool(head["more"])
        if self._more:
            self._wanted_until = 0.0
        await self._arrived(claims_of(rows))
        wait_s = head["wait_s"]
        return self._queues.look_s if wait_s is None else max(wait_s, SHOW_PAUSE_S if wait_s <= 0 else 0.001)

    async def _give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Give back what was not received. Where nobody answers, it comes back when our lease has lapsed."""
        for start in range(0, len(deliveries), MOST_AT_ONCE):
            some = deliveries[start : start + MOST_AT_ONCE]
            if not await quietly(self._handed_back(some, None), CLOSE_S, StoreUnavailable):
                self._astray = True

    async def _handed_back(self, deliveries: Sequence[Delivery], hold: Hold | None) -> int:
        """How many of these were ours. Raises StoreUnavailable."""
        claims = [_claim_of(delivery) for delivery in deliveries]
        (back,) = await self._link.row(
            "select iw1_hand_back($1, $2, $3, $4, $5, $6, $7)",
            self._queue.name,
            [claim.seq for claim in claims],
            [claim.attempt for claim in claims],
            self.session,
            None if hold is None else row_id(hold.request_id),
            "" if hold is None else hold.token,
            self._store.lease_s,
        )
        return int(back)

    # ------------------------------------------------------------ what has arrived

    async def _arrived(self, claims: Sequence[SqlClaim]) -> None:
        """Hand up what is to be run; end here what is not."""
        if not claims:
            return
        self._queues.appetite.saw([claim.size_bytes for claim in claims])
        endings: list[tuple[Delivery, Disposition | None]] = []
        for claim in claims:
            read, why = read_claim(claim, self._queue)
            delivery, ending = self._delivery(read, why)
            # Ours already: its lease had lapsed, or it is the copy that a retry of ours has placed. Another claim.
            self._hands.replaced(claim.entry_id)
            if ending is None and not claim.cancelled:
                self._hands.put(delivery)
            else:
                self._unseen[claim.seq] = claim.attempt
                endings.append((delivery, ending))
        self._taking.something.set()
        await asyncio.gather(*(self._end_unseen(delivery, ending) for delivery, ending in endings))

    def _delivery(self, claim: SqlClaim, why: str) -> tuple[Delivery, Disposition | None]:
        """A delivery, and how it ends where nobody is to run it."""
        envelope, request = claim.envelope, None
        ending: Disposition | None = None
        if envelope is not None:
            try:
                request = to_request(envelope, path=self._queue.path, now=self._queues.now())
            except MalformedRequest as exc:
                why = exc.reason
        if why:
            reply = self._failure(claim, 400, "invalid_request", why) if claim.request_id else None
            ending = DeadLetter(
                reason="invalid_request", detail=why, attempts=claim.attempts, status_code=400, reply=reply
            )
        elif claim.lapses >= MOST_LAPSES:
            why = POISON.format(claim.lapses)
            reply = self._failure(claim, 500, "poison", why) if claim.request_id else None
            ending = DeadLetter(reason="poison", detail=why, attempts=claim.attempts, status_code=500, reply=reply)
        loop_time = asyncio.get_running_loop().time()
        delivery = Delivery(
            body=whole(claim.body, claim.payload),
            attempts=claim.attempts,
            queue=self._queue.name,
            message_id=claim.message_id or claim.request_id or None,
            redelivered=claim.deliveries > 1,
            receipt=Receipt(
                entry_id=claim.entry_id,
                count=claim.attempt,
                fields=(),
                read_at=loop_time,
                size_bytes=claim.size_bytes,
                more=claim,
            ),
            lost=asyncio.Event(),
            headers=claim.headers if request is None else request.metadata,
            request=request,
            route=self._queue.route,
            labels=dict(self._queue.labels) if envelope is None else dict(envelope.routing.labels),
            taken_at=loop_time,
        )
        return delivery, ending

    async def _end_unseen(self, delivery: Delivery, ending: Disposition | None) -> None:
        """End what nobody is to run; it was cancelled, where nothing else is said. What fails comes again."""
        claim, begun = _claim_of(delivery), asyncio.get_running_loop().time()
        settlement: Settlement
        try:
            if ending is None:
                await self._store.cancel(self._failure(claim, 499, "cancelled", CANCELLED))
                ending = Ack()
            elif isinstance(ending, DeadLetter):
                log.warning(
                    "a request of the queue is dead-lettered", reason=ending.detail, request_id=claim.request_id or None
                )
            settlement = await self._settle_ours(delivery, ending)
            if isinstance(settlement, Known):
                settlement = await self._settle_ours(
                    delivery, replace(ending, reply=None) if isinstance(ending, Ack | DeadLetter) else Ack()
                )
        except StoreUnavailable:
            settlement = StoreSilent()
        finally:
            self._unseen.pop(claim.seq, None)
        match settlement:
            case Settled(how=how):
                self._queues.metrics.settled(how, settle_s=asyncio.get_running_loop().time() - begun)
            case DeliveryLost():
                pass
            case _:
                await self._give_back([delivery])

    def _failure(self, claim: SqlClaim, status_code: int, code: ErrorCode, text: str) -> Reply:
        return Reply(
            request_id=claim.generation,
            status="failed",
            status_code=status_code,
            attempt=claim.attempts,
            replica_id=self._queues.replica_id,
            finished_at=self._queues.now(),
            error=text,
            error_code=code,
        )

    # ------------------------------------------------------------ keeping

    async def _keep_ours(self) -> None:
        """Three times a lease: have it run anew for all that is in our hands."""
        while not await stopped_within(self.lost, min(self._queues.lease_s / 3, LONGEST_RENEWAL_S)):
            await self._keep_all()

    async def _keep_all(self) -> None:
        what = "the leases of claims could not be renewed"
        try:
            await self._extend(self._hands.deliveries())
        except StoreUnavailable as exc:
            self._queues.warnings.say(what, str(exc))
        except Exception:  # A fault of ours costs a turn, not the leases of all that runs.
            log.exception(what)
        else:
            self._queues.warnings.well(what)

    async def _extend(self, deliveries: Sequence[Delivery]) -> None:
        """Keep these; have those known as lost that are not ours any more, and those ended that were cancelled."""
        for start in range(0, len(deliveries), MOST_AT_ONCE):
            some = {
                _claim_of(delivery).seq: _claim_of(delivery) for delivery in deliveries[start : start + MOST_AT_ONCE]
            }
            rows = await self._link.fetch(
                "select * from iw1_keep($1, $2, $3, $4)",
                list(some),
                [claim.attempt for claim in some.values()],
                self.session,
                self._queues.lease_s,
            )
            kept = {row["seq"]: row["cancelled"] for row in rows}
            for seq, claim in some.items():
                if seq not in kept:
                    self._hands.drop(claim.entry_id, claim.attempt)
            if len(kept) < len(some):
                self._taking.dropped()
            await asyncio.gather(*(self._cancel(some[seq]) for seq, cancelled in kept.items() if cancelled))

    async def _cancel(self, claim: SqlClaim) -> None:
        """A terminal result closes the call that runs, or keeps it from beginning; its message is sent with the ack."""
        cancelling = self._store.cancel(self._failure(claim, 499, "cancelled", CANCELLED))
        await quietly(cancelling, CLOSE_S, StoreUnavailable)  # Not now: the next look sees it again.

    async def _heed_cancellations(self) -> None:
        """Look at once at what is in our hands where a producer has cancelled anything."""
        while not self.lost.is_set():
            await first_of(self._cancelling, self.lost)
            self._cancelling.clear()
            await self._keep_all()
            await stopped_within(self.lost, CANCEL_PAUSE_S)

    async def extend(self, delivery: Delivery) -> None:
        """See `ports.Transport`."""
        await self._taking.extend(delivery, lambda: self._extend([delivery]))

    # ------------------------------------------------------------ settling

    async def settle(self, delivery: Delivery, disposition: Disposition) -> Settlement:
        """See `ports.Transport`."""
        return await self._taking.settle(delivery, disposition, self._settle_ours, self._settle_late)

    async def _settle_ours(self, delivery: Delivery, disposition: Disposition) -> Settlement:
        match disposition:
            case Ack() | DeadLetter():
                return await self._conclude(delivery, disposition)
            case Nack(claim=hold):
                return await self._requeue(delivery, hold)
            case Republish():
                return await self._retry(delivery, disposition)
            case _:
                assert_never(disposition)

    async def _settle_late(self, disposition: Disposition) -> Settlement:
        """The claim is not ours; whoever has the row now finds the result, and sends it."""
        return await settle_late(self._store, disposition, self._queues.now())

    async def _conclude(self, delivery: Delivery, disposition: Ack | DeadLetter) -> Settlement:
        """Result, its message, usage event, dead letter and the end of the request: one step."""
        receipt, claim, reply = receipt_of(delivery), _claim_of(delivery), disposition.reply
        how: DispositionName = "dead_letter" if isinstance(disposition, DeadLetter) else "ack"
        message = None if reply is None or not claim.route else claim.message(reply)
        try:
            said, known, left_s = await self._concluded(delivery, disposition, message)
            if said == "OWED":
                owed = claim.message(stored_reply(claim.generation, known))
                said, known, left_s = await self._concluded(delivery, disposition, owed)
        except StoreUnavailable as exc:
            return self._unclear(receipt, exc)
        match said:
            case "DONE":
                return Settled(how=how)
            case "BUSY":
                return Busy(left_s=left_s)
            case "KNOWN":
                return Known(reply=known_of(known))
            case _ if reply is not None:
                return await self._settle_late(disposition)
            case _:
                return self._gone(receipt, said, how)

    async def _concluded(self, delivery: Delivery, disposition: Ack | DeadLetter, message: bytes | None) -> Any:
        claim, reply = _claim_of(delivery), disposition.reply
        letter = note = event = None
        if isinstance(disposition, DeadLetter):
            letter = death_note(claim.request_id or claim.message_id or "", disposition, self._queues.now())
            note = None if reply is None else death_note(reply.request_id, disposition, self._queues.now())
        else:
            event = disposition.usage_event if reply is not None else None
        seq, attempt, owner = self._right_to(delivery)
        # Where the answer goes to its route, the state needs not have its body, too.
        stored = reply if reply is None or message is None else replace(reply, result=None, answer=None)
        return await self._link.row(
            "select * from iw1_conclude($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)",
            *(seq, attempt, owner),
            row_id(claim.generation if reply is None else reply.request_id),
            disposition.claim.token if disposition.claim is not None else "",
            None if stored is None else encode_reply(stored),
            None if reply is None else reply.status,
            self._store.ttl_s,
            event,
            self._store.deployment_id,
            *(note, DEAD_NOTE_TTL_S),
            *(claim.route, message, float(claim.route_ttl_s)),
            letter,
        )

    async def _retry(self, delivery: Delivery, disposition: Republish) -> Settlement:
        """The copy and the end of the claim are one step, tried until it is done, or the time for it is over."""
        receipt, claim, hold = receipt_of(delivery), _claim_of(delivery), disposition.claim
        loop = asyncio.get_running_loop()
        until = loop.time() + min(COPY_S, max(disposition.left_s, 0.0))
        while not self.lost.is_set():
            try:
                said, known, left_s = await self._link.row(
                    "select * from iw1_retry($1, $2, $3, $4, $5, $6, $7, $8, $9)",
                    *self._right_to(delivery),
                    row_id(hold.request_id),
                    hold.token,
                    min(disposition.attempts, MOST_ATTEMPTS),
                    self._store.lease_s,
                    float(disposition.delay_s),
                    claim.copy(disposition.attempts),
                )
            except StoreUnavailable as exc:
                self._unclear(receipt, exc)
                self._queues.metrics.publish_failed("unconfirmed")
                if loop.time() >= until:
                    return await self._requeue(delivery, hold)
                await first_of(self.lost, within_s=COPY_PAUSE_S)
                continue
            match said:
                case "DONE":
                    if disposition.delay_s > 0:
                        await self._taking.look_in(disposition.delay_s)
                    else:
                        self._changed.set()
                    return Settled(how="retry")
                case "BUSY":
                    return Busy(left_s=left_s)
                case "KNOWN":
                    return Known(reply=known_of(known))
                case _:
                    return self._gone(receipt, said, "retry")
        return await self._settle_late(disposition)

    async def _requeue(self, delivery: Delivery, hold: Hold | None) -> Settlement:
        """Give it back, uncounted; where nobody answers, by letting go: then it is back after the lease."""
        receipt = receipt_of(delivery)
        if not self._ours(delivery):
            await release(self._store, hold)
            return DeliveryLost(stored=False)
        for _ in range(2):  # Once more, over another connection.
            try:
                back = await self._handed_back([delivery], hold)
            except StoreUnavailable as exc:
                self._unclear(receipt, exc)
                continue
            self._changed.set()
            return Settled(how="requeue") if back or receipt.unclear else DeliveryLost(stored=False)
        self._astray = True
        return Settled(how="requeue")

    def _ours(self, delivery: Delivery) -> bool:
        claim = _claim_of(delivery)
        return self._hands.holds(delivery) or self._unseen.get(claim.seq) == claim.attempt

    def _right_to(self, delivery: Delivery) -> tuple[int, int, str]:
        """The row, the fence, and whose it is if it is ours; of a delivery that we let go it is not."""
        claim = _claim_of(delivery)
        return claim.seq, claim.attempt, self.session if self._ours(delivery) else ""

    def _gone(self, receipt: Receipt, said: str, how: DispositionName) -> Settlement:
        """Done by an earlier try whose answer was lost, or not ours any more."""
        done = receipt.unclear and (said == "GONE" or how == "retry")
        return Settled(how=how) if done else DeliveryLost(stored=False)

    def _unclear(self, receipt: Receipt, exc: StoreUnavailable) -> StoreSilent:
        receipt.unclear = True
        self._queues.warnings.say("a claim could not be settled; it is tried again", str(exc))
        return StoreSilent()

    # ------------------------------------------------------------ publishing and counting

    async def publish(
        self, body: bytes, *, message_id: str | None = None, headers: Mapping[str, object] | None = None
    ) -> None:
        """See `ports.Transport`. Whether it was done is not known where it raises."""
        self._taking.alive()
        try:
            await place_message(self._link, self._queue.name, body, message_id, headers, now=self._queues.now())
        except StoreUnavailable as exc:
            raise TransportLost(str(exc)) from exc

    async def backlog(self) -> Backlog:
        """See `ports.Transport`."""
        self._taking.alive()
        try:
            return await sql_backlog(self._link, self._queue.name)
        except StoreUnavailable as exc:
            raise TransportLost(str(exc)) from exc


async def place_message(
    link: SqlLink,
    queue: str,
    body: bytes,
    message_id: str | None,
    headers: Mapping[str, object] | None = None,
    *,
    now: float,
) -> None:
    """Put a message into a queue, at its deadline. An envelope that is there already is there once.

    Raises: StoreUnavailable: it is not known whether it is there.
    """
    row = placed(body, now)
    try:
        await link.fetch(
            "select iw1_put($1, $2, $3, $4, $5, $6, $7, $8)",
            *(queue, row.request_id, row.token, row.deadline),
            None if message_id is None else message_id.encode(errors="replace").decode().replace("\0", ""),
            headers_as_stored(headers),
            *(row.body, row.payload),
        )
    except StoreUnavailable as exc:
        if exc.code != UNIQUE:
            raise


async def sql_backlog(link: SqlLink, queue: str) -> Backlog:
    """Count what waits, without a session. Raises `StoreUnavailable`."""
    ready, delayed, in_flight, first = await link.row(
        "select (select count(*) from iw_requests where queue = $1 and owner is null and due is null),"
        " (select count(*) from iw_requests where queue = $1 and due is not null),"
        " (select count(*) from iw_requests where queue = $1 and owner is not null),"
        " (select deadline from iw_requests where queue = $1 and owner is null and due is null"
        "   order by queue, deadline, seq limit 1)",
        queue,
    )
    return Backlog(ready=ready, delayed=delayed, in_flight=in_flight, how="table", next_deadline=first)


async def expiring(link: SqlLink, queue: str, windows_s: Sequence[float], now: float) -> list[int]:
    """How many of those that wait expire within each window. Raises `StoreUnavailable`."""
    rows = await link.fetch(
        "select (select count(*) from iw_requests r where r.queue = $1 and r.owner is null and r.due is null"
        " and r.deadline <= w.ends) from unnest($2::double precision[]) with ordinality w(ends, place)"
        " order by w.place",
        queue,
        [now + within_s for within_s in windows_s],
    )
    return [int(row[0]) for row in rows]


def receipt_entry(receipt: Receipt) -> int:
    """The row of a receipt."""
    return int(receipt.entry_id)


def _claim_of(delivery: Delivery) -> SqlClaim:
    more = receipt_of(delivery).more
    assert isinstance(more, SqlClaim)
    return more
