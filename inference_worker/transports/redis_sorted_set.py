"""The request queue in a sorted set of Redis, as llm-d-async has it: earliest deadline first, claims with leases.

A session is three connections: one does the work, one is told when the queue changes, one when a producer cancels
(`key_watch.py`). Producers need only ZADD: an idle worker is told within a millisecond, and looks once a second, too.
Every settlement is one script that first looks whether the claim is this session's.

A request in an envelope has its result sent to a list, once: the terminal result that all workers know it by says
whether that was done, and who finds one that was not sends it.

On a Cluster a session is with the server that has the queue; what lies elsewhere is reached through the `RedisCluster`
that its store has, too, and settled in steps (`sorted_set_cluster.py`).
"""

import asyncio
import secrets
from collections import deque
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
from inference_worker.job_records import record_key
from inference_worker.llmd_messages import to_request, with_payload
from inference_worker.messages import ErrorCode, KnownReply, Reply, decode, encode_reply, known_reply
from inference_worker.metrics import WorkerMetrics
from inference_worker.ports import Backlog, Delivery, ResultStore
from inference_worker.redis_scripts import Address, ClusterCommands, RedisCommands, RedisLink, RedisTls, Script
from inference_worker.results.redis import DEAD_NOTE_TTL_S, claim_key, result_key
from inference_worker.settling import death_note, release, settle_late
from inference_worker.timing import ended, first_of, quietly, stopped_within
from inference_worker.transports.hands import MOST_BYTES, Appetite, Receipt, receipt_of
from inference_worker.transports.key_watch import KeyWatch, KeyWatches, watching, watching_all
from inference_worker.transports.sorted_set_cluster import AcrossSlots, Ending
from inference_worker.transports.sorted_set_members import (
    CANCELS,
    PAYLOADS,
    Claim,
    SortedSetQueue,
    Taken,
    letter_fields,
    own_score,
    read_taken,
    request_keys,
    sent,
    stored_reply,
    taken_of,
)
from inference_worker.transports.sorted_set_scripts import (
    BACKLOG,
    CONCLUDE,
    HAND_BACK,
    KEEP,
    LEAVE,
    PUBLISH,
    PUSHED,
    RETRY,
    SETTLE,
    SORTED_SET_SCRIPTS,
    TAKE,
    TAKE_IN_SLOT,
    TIDY,
)
from inference_worker.transports.taking import Saying, Taking

__all__ = ["RedisSortedSet", "SortedSetQueue", "expiring", "place", "sorted_set_backlog"]

log = structlog.get_logger(__name__)

LOOK_S: Final = 1.0
"""The longest pause between two looks at what lapsed or is due, and at a queue of which we are told."""

UNTOLD_S: Final = 0.05
"""The pause between two looks at a queue of which nobody tells us."""

LONGEST_RENEWAL_S: Final = 30.0
STOP_S: Final = 1.5
"""How long the reader is waited for when consuming ends."""

CLOSE_S: Final = 1.0
"""How long each courtesy on leaving may take. Without it, what is ours comes back when its lease has lapsed."""

LOAD_S: Final = 5.0
COPY_S: Final = 30.0
"""How long a copy is tried, its deadline apart."""

COPY_PAUSE_S: Final = 0.25
SHOW_PAUSE_S: Final = 0.05
ASTRAY_PAUSE_S: Final = 0.25
"""To the next look after one that failed: claims of ours may wait for it."""

CANCEL_PAUSE_S: Final = 0.02
"""Between two looks at what was cancelled: a producer may cancel thousands."""

TIDY_S: Final = 60.0
MOST_AT_ONCE: Final = 1000
"""Claims in one call of a script."""

MOST_MOVED: Final = 100
"""Lapsed claims, and retries, that one look puts back."""

MOST_LEFT_BEHIND: Final = 16
MOST_LAPSES: Final = 100
"""Deliveries whose holder went silent before a member counts as poison; a last line behind the crashes that are counted
for a request while it runs."""

REFUSED: Final = ("ReadOnlyError", "NoPermissionError", "ResponseError", "MovedError")
"""How the reasons begin that end a session: the server may be the wrong one by now. Full memory is none of them."""

NO_LIST: Final = "WRONGTYPE the result list"
"""So the scripts say it."""

POISON: Final = "its holders went silent {} times"
CANCELLED: Final = "its producer has cancelled it"
TOO_LATE: Final = "the deadline had passed before anybody could take it"
MOST_LATE: Final = 100
SCORE_FRACTION_S: Final = 1.0
"""A score is the deadline and less than so much: the order of submissions that share one."""


class RedisSortedSet:
    """Opens sessions with one queue."""

    def __init__(
        self,
        *,
        url: Address,
        queue: SortedSetQueue,
        store: ResultStore,
        metrics: WorkerMetrics,
        deployment_id: str,
        replica_id: str,
        lease_s: float,
        hold_s: float,
        ttl_s: float,
        client_name: str,
        tls: RedisTls,
        now: Callable[[], float],
        poll_interval_s: float = LOOK_S,
        cluster: ClusterCommands | None = None,
        moved: Callable[[], int] | None = None,
    ) -> None:
        """`lease_s` is a member's in our hands, `hold_s` a request's that the processor has claimed in the store.

        With a `cluster` it has the queue, and `url` is not asked; the `store` is one that is clustered. `moved` counts
        how often `url` has come to lead elsewhere: a session from before ends.
        """
        self._url = url if cluster is None else cluster.address_of(queue.name)
        self.cluster = cluster
        self.moved = moved or (lambda: 0)
        self.stays = cluster is None and moved is None
        """The queue lies with one server for ever."""
        self.left_behind: deque[str] = deque(maxlen=MOST_LEFT_BEHIND)
        """Sessions that could not give back what was claimed for them."""
        self.queue = queue if cluster is None else replace(queue, clustered=True)
        self.store = store
        self.metrics = metrics
        self.outbox = f"infer_usage:{deployment_id}"
        self.replica_id = replica_id
        self.lease_s = lease_s
        self.hold_ms = round(hold_s * 1000)
        self.ttl_s = max(round(ttl_s), 1)
        self._client_name = client_name
        self._tls = tls
        self.now = now
        self.poll_interval_s = poll_interval_s
        self.appetite = Appetite()
        """Outlasts the sessions: one that ended over an answer that was too large must not be followed by its like."""
        self.warnings = Saying(queue=queue.name)

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator["SortedSetTransport", None]:
        """Open a session: all connections, or nothing."""
        session: SortedSetTransport | None = None

        def lost(why: TransportLost) -> None:
            if session is not None:
                session.lose(str(why))

        link = RedisLink(self._url, lambda: None, client_name=self._client_name, tls=self._tls)
        name, tls = self._client_name, self._tls
        moved_at = self.moved()
        async with (
            watching(self._url, client_name=name, tls=tls, lost=lost) as changes,
            self._cancellations(lost) as cancels,
            link.open(),
        ):
            session = SortedSetTransport(self, link, changes, cancels, moved_at)
            try:
                await session.begin()
                yield session
            finally:
                session.lose("closed by us")
                await session.end()

    def _cancellations(
        self, lost: Callable[[TransportLost], None]
    ) -> AbstractAsyncContextManager[KeyWatch | KeyWatches]:
        """Be told of what producers cancel, wherever that is said."""
        name, tls, options = self._client_name, self._tls, ("BCAST", "PREFIX", CANCELS)
        if self.cluster is None:
            return watching(self._url, *options, client_name=name, tls=tls, lost=lost)
        servers = [self.cluster.address_at(master) for master in self.cluster.masters]
        return watching_all(servers, *options, client_name=name, tls=tls, lost=lost)

    @property
    def masters(self) -> tuple[str, ...]:
        """Of the Cluster, where it is on one."""
        return () if self.cluster is None else self.cluster.masters


class SortedSetTransport:
    """One session. See `ports.Transport`."""

    def __init__(
        self,
        sets: RedisSortedSet,
        link: RedisLink,
        changes: KeyWatch,
        cancels: KeyWatch | KeyWatches,
        moved_at: int,
    ) -> None:
        """`moved_at` is what `RedisSortedSet.moved` said before the connections were opened."""
        self._sets = sets
        self._queue = sets.queue
        self._keys = sets.queue.keys
        self._store = sets.store
        self._link = link
        self._changes = changes
        self._cancels = cancels
        self._across = None if sets.cluster is None else _across(sets, link, sets.cluster)
        """For what lies in other slots; None where there are none."""
        self._masters, self._moved_at = sets.masters, moved_at
        self._take_script = TAKE if sets.cluster is None else TAKE_IN_SLOT
        self.session = secrets.token_hex(8)
        self._number = 0
        """Of the next claim."""
        self._look_s = min(LOOK_S, sets.lease_s / 3)
        self._taking = Taking("the sorted set", take_turn=self._take_turn, give_back=self._give_back, stop_s=STOP_S)
        self._hands = self._taking.hands
        self.lost = self._taking.lost
        self._unseen: set[int] = set()
        """Numbers of claims that are ours and in nobody's hands: what is ended here, not handed up."""
        self._astray = False
        """An answer was lost: there may be claims of ours that we do not know of."""
        self._late_at = 0.0
        """Loop time of the next look at what is too late, while nothing is consumed."""
        self._more = False
        """The last look found as much as it asked for."""
        self._dry = False
        """The queue was seen empty, and we are told when it is not."""
        self._heard_at = 0.0
        """Loop time at which the watches last answered."""
        self._tidied = "0"
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ beginning and end

    async def begin(self) -> None:
        """Find out whether the scripts may do what they do."""
        # Where they may not be loaded, they are sent when they are needed.
        await asyncio.gather(*(self._load(script) for script in SORTED_SET_SCRIPTS))
        try:
            await self._see_the_list()
            await self._take(0)
            await self._tidy_up_behind()
        except StoreUnavailable as exc:
            raise TransportLost(str(exc)) from exc
        if not self._changes.hears:
            self._sets.warnings.say(
                "Redis does not tell of changes: the queue is looked at, some twenty times a second"
            )
        self._late_at = asyncio.get_running_loop().time() + LOOK_S
        self._tasks = [
            asyncio.create_task(self._taking.read(), name="sorted set reader"),
            asyncio.create_task(self._keep_ours(), name="sorted set leases"),
            asyncio.create_task(self._heed_cancellations(), name="sorted set cancellations"),
        ]
        if not self._sets.stays:
            self._tasks.append(asyncio.create_task(self._heed_the_servers(), name="sorted set servers"))

    async def _load(self, script: Script) -> None:
        await quietly(self._link.do("SCRIPT", "LOAD", script.source), LOAD_S, StoreUnavailable)

    async def _see_the_list(self) -> None:
        """Raises TransportLost: where results are to go is something else, and none of them could be sent."""
        if self._across is not None:
            return  # It lies with another server.
        try:
            kind = bytes(await self._link.do("TYPE", self._queue.own_results))
        except StoreUnavailable:
            return  # What is missing says whoever needs it.
        if kind not in (b"none", b"list"):
            raise TransportLost(f"{self._queue.own_results} is to be a list of results, and is a {kind.decode()}")

    async def _tidy_up_behind(self) -> None:
        """Give back what sessions before this one could not, as the server was gone. Raises StoreUnavailable."""
        for session in tuple(self._sets.left_behind):
            await self._link.run(LEAVE, self._keys, session)
            self._sets.left_behind.remove(session)

    def lose(self, why: str) -> None:
        """The session is over, and with it the right to settle what came by it."""
        self._taking.lose(why)

    async def end(self) -> None:
        """Give back what is claimed for us, so that nobody waits for our lease."""
        for task in self._tasks:
            await ended(task)
        if not await quietly(self._link.run(LEAVE, self._keys, self.session), CLOSE_S, StoreUnavailable):
            self._sets.left_behind.append(self.session)

    # ------------------------------------------------------------ consuming

    @property
    def lost_because(self) -> str:
        """See `ports.Transport`."""
        return self._taking.lost_because

    @asynccontextmanager
    async def consuming(self, limit: int) -> AsyncGenerator[None, None]:
        """See `ports.Transport`."""
        async with self._taking.consuming(limit):
            try:
                yield
            finally:
                self._late_at = asyncio.get_running_loop().time() + LOOK_S

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
            await self._end_late()
            # Not until the queue changes: nobody would take note of it, and this would go round without a pause.
            await self._rest(LOOK_S, self._taking.turn)
            return
        await self._give_back(self._hands.take_back(loop.time()))
        if self._changes.changed.is_set():
            self._changes.changed.clear()
            self._dry = False
        if loop.time() >= self._taking.look_at or (self._wanted and not self._dry):
            await self._look()
        if self._taking.turn.is_set() or (self._more and self._wanted) or not self._taking.consumed:
            return
        if not self._wanted or await self._seen_empty():
            await self._rest(max(self._taking.look_at - loop.time(), 0.001), self._taking.turn, self._changes.changed)

    async def _end_late(self) -> None:
        """What nobody may take, as before a gate that is closed, ends in time all the same: once its time is over."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._late_at:
            return
        self._more = False
        try:
            await self._take(MOST_LATE, before=self._sets.now() - SCORE_FRACTION_S)
        except StoreUnavailable as exc:
            self._sets.warnings.say("the queue cannot be looked at", str(exc))
        else:
            self._sets.warnings.well("the queue cannot be looked at")
        self._late_at = loop.time() + (SHOW_PAUSE_S if self._more else LOOK_S)

    async def _seen_empty(self) -> bool:
        """See whether the queue is empty, in the same step as asking to be told once it is not."""
        if self._dry or not self._changes.hears:
            self._dry = True
            return True
        self._changes.changed.clear()
        self._dry = await self._changes.count(self._queue.name) == 0
        self._heard_at = asyncio.get_running_loop().time()
        return self._dry

    async def _rest(self, seconds: float, *events: asyncio.Event) -> None:
        """Wait until there is something to do, and see meanwhile whether the connections are still there."""
        loop = asyncio.get_running_loop()
        await first_of(self.lost, *events, within_s=seconds)
        if loop.time() - self._heard_at >= LOOK_S and not self.lost.is_set():
            await asyncio.gather(self._changes.ping(), self._cancels.ping())
            self._heard_at = loop.time()

    @property
    def _wanted(self) -> int:
        return self._sets.appetite.portion(self._hands.wanted)

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        longest_s = self._look_s
        if not self._changes.hears:
            longest_s = min(longest_s, UNTOLD_S, self._sets.poll_interval_s)
        try:
            due_in_s = await self._take(self._wanted)
        except StoreUnavailable as exc:
            if str(exc).startswith(REFUSED):
                raise TransportLost(str(exc)) from exc
            self._sets.warnings.say("the queue cannot be looked at", str(exc))
            due_in_s, self._more, self._astray = ASTRAY_PAUSE_S, False, True
            # Not at once again: it is refused, or nobody answers.
            await first_of(self._taking.turn, self.lost, within_s=SHOW_PAUSE_S)
        else:
            self._sets.warnings.well("the queue cannot be looked at")
        self._taking.look_at = loop.time() + min(due_in_s, longest_s)

    async def _take(self, wanted: int, *, before: float | None = None) -> float:
        """Put back what lapsed or is due, claim up to `wanted` members; seconds to the next retry that is due.

        `before`: only members with a lower score, which are too late, and are ended here.
        """
        if self._astray:
            numbers = [receipt.count for receipt in self._hands.everything()]
            await self._link.run(LEAVE, self._keys, self.session, *numbers, *self._unseen)
            self._astray = False
        first, self._number = self._number, self._number + wanted
        self._dry = False
        wait_ms, rows, full = await self._link.run(
            self._take_script,
            self._keys,
            *(self.session, first, self._sets.lease_s, wanted, MOST_MOVED, MOST_BYTES),
            *(() if before is None else (repr(before),)),
        )
        self._more = len(rows) >= wanted or bool(full)
        await self._arrived(taken_of(rows), late=before is not None)
        # What is due and was not moved must wait for memory, or its turn.
        return LOOK_S if wait_ms < 0 else wait_ms / 1000 or SHOW_PAUSE_S

    async def _give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Give back what was not received. Where Redis does not answer, it comes back when our lease has lapsed."""
        for start in range(0, len(deliveries), MOST_AT_ONCE):
            pairs = (
                part
                for delivery in deliveries[start : start + MOST_AT_ONCE]
                for part in (_claim_of(delivery).taken.claim_id, self._owner(receipt_of(delivery).count))
            )
            giving = self._link.run(HAND_BACK, self._keys, "", 0, *pairs)
            if not await quietly(giving, CLOSE_S, StoreUnavailable):
                self._astray = True

    # ------------------------------------------------------------ what has arrived

    async def _arrived(self, members: Sequence[Taken], *, late: bool) -> None:
        """Hand up what is to be run; end here what is not."""
        if not members:
            return
        read = [read_taken(taken, self._queue) for taken in members]
        claims = [claim for claim, _ in read]
        self._sets.appetite.saw([len(taken.member) for taken in members])
        payloads = await self._payloads(claims)
        if payloads:
            self._sets.appetite.saw([len(payload or b"") for payload in payloads.values()])
        cancelled = {claim.taken.claim_id for claim in claims if claim.taken.cancelled}
        if self._across is not None:
            cancelled |= await self._across.cancelled(claims)
        endings: list[tuple[Delivery, Disposition | None]] = []
        for claim, why in read:
            delivery, ending = self._delivery(claim, why, payloads)
            # Ours already: its lease had lapsed, or it is the copy that a retry of ours has placed. Another claim.
            self._hands.replaced(claim.taken.entry_id)
            if late and ending is None:
                ending = self._too_late(delivery)
            if ending is None and claim.taken.claim_id not in cancelled:
                self._hands.put(delivery)
            else:
                self._unseen.add(claim.taken.number)
                endings.append((delivery, ending))
        self._taking.something.set()
        await asyncio.gather(*(self._end_unseen(delivery, ending) for delivery, ending in endings))

    def _too_late(self, delivery: Delivery) -> Disposition:
        """How a request ends whose time was over before anybody could take it."""
        try:
            request = delivery.request or decode(
                delivery.body,
                message_id=delivery.message_id,
                infer_path=self._queue.path,
                now=self._sets.now(),
            )
        except MalformedRequest as exc:
            return DeadLetter(
                reason="invalid_request", detail=exc.reason, attempts=delivery.attempts, status_code=400, reply=None
            )
        if request.deadline > self._sets.now():
            return Nack()
        return Ack(
            reply=Reply(
                request_id=request.request_id,
                status="failed",
                status_code=408,
                attempt=delivery.attempts,
                replica_id=self._sets.replica_id,
                received_at=request.received_at,
                finished_at=self._sets.now(),
                error=TOO_LATE,
                error_code="expired",
            )
        )

    async def _payloads(self, claims: Sequence[Claim]) -> Mapping[str, bytes | None]:
        """What lies apart, all of it in one question. Without an answer the whole batch goes back."""
        refs = [claim.envelope.routing.payload_ref for claim in claims if _lies_apart(claim)]  # type: ignore[union-attr]  # An envelope, or nothing lies apart.
        if not refs:
            return {}
        try:
            if self._across is not None:
                return await self._across.payloads(refs)
            found = await self._link.do("MGET", *refs)
        except StoreUnavailable:
            # The next look finds them as claims of ours that are in nobody's hands.
            self._astray = True
            raise
        return dict(zip(refs, found, strict=True))

    def _delivery(
        self, claim: Claim, why: str, payloads: Mapping[str, bytes | None]
    ) -> tuple[Delivery, Disposition | None]:
        """A delivery, and how it ends where nobody is to run it."""
        taken, envelope, request = claim.taken, claim.envelope, None
        ending: Disposition | None = None
        if envelope is not None:
            if _lies_apart(claim):
                payload = payloads.get(envelope.routing.payload_ref)
                envelope = with_payload(envelope, payload) if payload is not None else envelope
            try:
                request = to_request(envelope, path=self._queue.path, now=self._sets.now())
            except MalformedRequest as exc:
                why = exc.reason
                if envelope.request.payload is None:
                    gone = "its payload, which was stored apart, has gone"
                    ending = Ack(reply=self._failure(claim, 410, "payload_unavailable", gone))
        if why and ending is None:
            reply = self._failure(claim, 400, "invalid_request", why) if claim.request_id else None
            ending = DeadLetter(
                reason="invalid_request", detail=why, attempts=claim.attempts, status_code=400, reply=reply
            )
        if ending is None and taken.lapses >= MOST_LAPSES:
            why = POISON.format(taken.lapses)
            reply = self._failure(claim, 500, "poison", why) if claim.request_id else None
            ending = DeadLetter(reason="poison", detail=why, attempts=claim.attempts, status_code=500, reply=reply)
        loop_time = asyncio.get_running_loop().time()
        delivery = Delivery(
            body=taken.member,
            attempts=claim.attempts,
            queue=self._queue.name,
            message_id=taken.message_id or claim.request_id or None,
            redelivered=taken.deliveries > 1,
            receipt=Receipt(
                entry_id=taken.entry_id,
                count=taken.number,
                fields=(),
                read_at=loop_time,
                size_bytes=len(taken.member) + (len(request.payload) if request is not None else 0),
                more=claim,
            ),
            lost=asyncio.Event(),
            headers=taken.headers if request is None else request.metadata,
            request=request,
            route=self._queue.route,
            labels=dict(self._queue.labels) if envelope is None else dict(envelope.routing.labels),
            taken_at=loop_time,
        )
        return delivery, ending

    async def _end_unseen(self, delivery: Delivery, ending: Disposition | None) -> None:
        """End what nobody is to run; it was cancelled, where nothing else is said. What fails comes again."""
        claim, begun = _claim_of(delivery), asyncio.get_running_loop().time()
        try:
            if ending is None:
                await self._store.cancel(self._failure(claim, 499, "cancelled", CANCELLED))
                ending = Ack()
            elif isinstance(ending, DeadLetter):
                log.warning(
                    "a member of the queue is dead-lettered", reason=ending.detail, request_id=claim.request_id or None
                )
            settlement = await self._settle_ours(delivery, ending)
            if isinstance(settlement, Known):
                settlement = await self._settle_ours(
                    delivery, replace(ending, reply=None) if isinstance(ending, Ack | DeadLetter) else Ack()
                )
        except StoreUnavailable:
            settlement = StoreSilent()
        finally:
            self._unseen.discard(claim.taken.number)
        match settlement:
            case Settled(how=how):
                self._sets.metrics.settled(how, settle_s=asyncio.get_running_loop().time() - begun)
            case DeliveryLost():
                pass
            case _:
                await self._give_back([delivery])

    def _failure(self, claim: Claim, status_code: int, code: ErrorCode, text: str) -> Reply:
        return Reply(
            request_id=claim.generation,
            status="failed",
            status_code=status_code,
            attempt=claim.attempts,
            replica_id=self._sets.replica_id,
            finished_at=self._sets.now(),
            error=text,
            error_code=code,
        )

    # ------------------------------------------------------------ keeping

    async def _keep_ours(self) -> None:
        """Three times a lease: have it run anew for all that is in our hands."""
        loop = asyncio.get_running_loop()
        tidy_at = loop.time()
        while not await stopped_within(self.lost, min(self._sets.lease_s / 3, LONGEST_RENEWAL_S)):
            await self._keep_all()
            if loop.time() >= tidy_at:
                tidy_at = loop.time() + TIDY_S
                await self._tidy()

    async def _keep_all(self) -> None:
        try:
            await self._extend(self._hands.deliveries())
        except StoreUnavailable as exc:
            self._sets.warnings.say("the leases of claims could not be renewed", str(exc))
        except Exception:  # A fault of ours costs a turn, not the leases of all that runs.
            log.exception("the leases of claims could not be renewed")
        else:
            self._sets.warnings.well("the leases of claims could not be renewed")

    async def _extend(self, deliveries: Sequence[Delivery]) -> None:
        """Keep these; have those known as lost that are not ours any more, and those ended that were cancelled."""
        for start in range(0, len(deliveries), MOST_AT_ONCE):
            some = {
                _claim_of(delivery).taken.claim_id: delivery for delivery in deliveries[start : start + MOST_AT_ONCE]
            }
            numbers = {claim_id: receipt_of(delivery).count for claim_id, delivery in some.items()}
            lost, cancelled = await self._link.run(
                KEEP, self._keys, self._sets.lease_s, *(part for one in some.values() for part in self._kept(one))
            )
            for claim_id in lost:
                self._hands.drop(receipt_of(some[claim_id]).entry_id, numbers[claim_id])
            if lost:
                self._taking.dropped()
            if self._across is not None:
                kept = [_claim_of(delivery) for claim_id, delivery in some.items() if claim_id not in lost]
                cancelled = await self._across.cancelled(kept)
            await asyncio.gather(*(self._cancel(_claim_of(some[claim_id])) for claim_id in cancelled))

    def _kept(self, delivery: Delivery) -> tuple[bytes | str, ...]:
        claim = _claim_of(delivery)
        owner = self._owner(receipt_of(delivery).count)
        cancel_key = claim.cancel_key if self._across is None else ""
        return (claim.taken.claim_id, owner, claim.taken.score, cancel_key, claim.taken.token)

    async def _cancel(self, claim: Claim) -> None:
        """A terminal result closes the call that runs, or keeps it from beginning; its message is sent with the ack."""
        cancelling = self._store.cancel(self._failure(claim, 499, "cancelled", CANCELLED))
        await quietly(cancelling, CLOSE_S, StoreUnavailable)  # Not now: the next look sees it again.

    async def _heed_cancellations(self) -> None:
        """Look at once at what is in our hands where a producer has cancelled anything."""
        while not self.lost.is_set():
            await first_of(self._cancels.changed, self.lost)
            self._cancels.changed.clear()
            await self._keep_all()
            await stopped_within(self.lost, CANCEL_PAUSE_S)

    async def _heed_the_servers(self) -> None:
        """Once a second: see who the servers are, and bring back what other programs keep in a set of all queues."""
        what = "retries of other programs could not be brought back"
        while not await stopped_within(self.lost, LOOK_S):
            if (self._sets.masters, self._sets.moved()) != (self._masters, self._moved_at):
                self.lose("the queue has come to lie with another server")
                return
            if self._across is None:
                continue
            try:
                await self._across.bring_back()
            except StoreUnavailable as exc:
                self._sets.warnings.say(what, str(exc))
            except Exception:  # A fault of ours costs a turn, not the session.
                log.exception(what)
            else:
                self._sets.warnings.well(what)

    async def _tidy(self) -> None:
        try:
            cursor = await self._link.run(TIDY, self._keys, self._tidied)
        except StoreUnavailable as exc:
            # They are in nobody's way.
            log.debug("old notes could not be removed", reason=str(exc))
        else:
            self._tidied = bytes(cursor).decode()

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
        """The claim is not ours; whoever has the member now finds the result, and sends it."""
        return await settle_late(self._store, disposition, self._sets.now())

    async def _conclude(self, delivery: Delivery, disposition: Ack | DeadLetter) -> Settlement:
        """Result, its message, usage event, dead letter and the end of the claim: one step."""
        receipt, claim = receipt_of(delivery), _claim_of(delivery)
        try:
            try:
                return await self._conclude_with(claim, delivery, disposition)
            except StoreUnavailable as exc:
                if (ours := self._with_our_list(claim, exc)) is None:
                    raise
                return await self._conclude_with(ours, delivery, disposition)
        except StoreUnavailable as exc:
            if NO_LIST in str(exc):
                # No outage: all goes on but this queue, until somebody has mended it. The result waits in the store.
                self.lose(f"{self._queue.own_results} is to be a list of results: {exc}")
                return await self._settle_late(disposition)
            return self._unclear(receipt, exc)

    def _with_our_list(self, claim: Claim, exc: StoreUnavailable) -> Claim | None:
        """What ends where the queue's results go, since the key that its message asks for is no list; else None."""
        if "WRONGTYPE" not in str(exc) or claim.result_list in ("", self._queue.own_results):
            return None
        self._sets.warnings.say(
            "a message asks for its result in what is no list; it goes to the queue's", claim.result_list
        )
        return replace(claim, result_list=self._queue.own_results)

    async def _conclude_with(self, claim: Claim, delivery: Delivery, disposition: Ack | DeadLetter) -> Settlement:
        """Raises StoreUnavailable."""
        receipt, reply = receipt_of(delivery), disposition.reply
        letter = self._letter(delivery, disposition) if isinstance(disposition, DeadLetter) else []
        how: DispositionName = "dead_letter" if isinstance(disposition, DeadLetter) else "ack"
        if reply is None:
            return await self._acknowledge(claim, delivery, how, letter)
        event = disposition.usage_event if isinstance(disposition, Ack) else None
        note = b""
        if isinstance(disposition, DeadLetter):
            note = death_note(reply.request_id, disposition, self._sets.now())
        token = disposition.claim.token if disposition.claim is not None else ""
        if self._across is not None:
            ending = Ending(reply=reply, token=token, event=event or b"", note=note)
            answer = await self._across.conclude(self._right_to(delivery), claim, ending, letter)
            return self._concluded(receipt, answer, how)
        listed = claim.result_list != ""
        keys = claim.keys(self._sets.outbox) if listed else request_keys(reply.request_id, self._sets.outbox)
        answer = await self._link.run(
            CONCLUDE,
            [*self._keys, *keys],
            *self._right_to(delivery),
            token,
            *(sent(reply) if listed else encode_reply(reply), self._sets.ttl_s, reply.status, event or b""),
            *(record_key(reply.request_id), note, DEAD_NOTE_TTL_S),
            *(claim.message(reply) if listed else b"", claim.result_ttl_s, claim.taken.token),
            *letter,
        )
        if answer[0] in (b"GONE", b"THEIRS"):
            return await self._settle_late(disposition)
        return self._concluded(receipt, answer, how)

    def _concluded(self, receipt: Receipt, answer: Sequence[Any], how: DispositionName) -> Settlement:
        if answer[0] == b"STORED":
            return self._settled(receipt, answer[1], how, stored=True)
        return _not_stored(answer)

    async def _acknowledge(
        self, claim: Claim, delivery: Delivery, how: DispositionName, letter: Sequence[str | bytes]
    ) -> Settlement:
        """End the claim; send the result where one is stored that was not sent. Raises StoreUnavailable."""
        receipt = receipt_of(delivery)
        right = self._right_to(delivery)
        if self._across is not None:
            return self._settled(receipt, await self._across.acknowledge(right, claim, letter), how, stored=False)
        keys = [*self._keys, *(claim.keys(self._sets.outbox) if claim.result_list else [])]
        said = await self._link.run(SETTLE, keys, *right, PUSHED, "", 0, "", "", *letter)
        if said[0] == b"OWED":
            reply = stored_reply(claim.generation, bytes(said[1]))
            owed = (claim.message(reply), claim.result_ttl_s, claim.taken.token, sent(reply))
            said = await self._link.run(SETTLE, keys, *right, PUSHED, *owed, *letter)
        return self._settled(receipt, said[0], how, stored=False)

    async def _retry(self, delivery: Delivery, disposition: Republish) -> Settlement:
        """The copy and the end of the claim are one step, tried until it is done, or the time for it is over."""
        receipt, claim, hold = receipt_of(delivery), _claim_of(delivery), disposition.claim
        loop = asyncio.get_running_loop()
        until = loop.time() + min(COPY_S, max(disposition.left_s, 0.0))
        keys = [*self._keys, result_key(hold.request_id), claim_key(hold.request_id)]
        copy = claim.copy(disposition.attempts)
        while not self.lost.is_set():
            right = self._right_to(delivery)
            try:
                if self._across is not None:
                    answer = await self._across.retry(right, claim, hold, disposition.attempts, disposition.delay_s)
                else:
                    answer = await self._link.run(
                        RETRY,
                        keys,
                        *right,
                        *(hold.token, disposition.attempts, self._sets.hold_ms, disposition.delay_s),
                        *(copy, 1 if claim.envelope is not None else 0),
                    )
            except StoreUnavailable as exc:
                self._unclear(receipt, exc)
                self._sets.metrics.publish_failed("unconfirmed")
                if loop.time() >= until:
                    return await self._requeue(delivery, hold)
                await first_of(self.lost, within_s=COPY_PAUSE_S)
                continue
            if answer[0] == b"DONE" and disposition.delay_s > 0:
                await self._taking.look_in(disposition.delay_s)
            if answer[0] in (b"DONE", b"GONE", b"THEIRS"):
                return self._settled(receipt, answer[0], "retry", stored=False)
            return _not_stored(answer)
        return await self._settle_late(disposition)

    async def _requeue(self, delivery: Delivery, hold: Hold | None) -> Settlement:
        """Give it back, uncounted; where Redis does not answer, by letting go: then it is back after the lease."""
        receipt = receipt_of(delivery)
        keys = [*self._keys]
        if hold is not None and self._across is not None:
            await release(self._store, hold)
        elif hold is not None:
            keys += [result_key(hold.request_id), claim_key(hold.request_id)]
        token = hold.token if hold is not None else ""
        claim_id, owner = self._right_to(delivery)
        for _ in range(2):  # Once more, as the link opens its connection anew.
            try:
                back = await self._link.run(HAND_BACK, keys, token, self._sets.hold_ms, claim_id, owner)
            except StoreUnavailable as exc:
                self._unclear(receipt, exc)
                continue
            return Settled(how="requeue") if back or receipt.unclear else DeliveryLost(stored=False)
        self._astray = True
        return Settled(how="requeue") if owner else DeliveryLost(stored=False)

    def _owner(self, number: int) -> str:
        return f"{self.session}:{number}"

    def _right_to(self, delivery: Delivery) -> tuple[bytes, str]:
        """The claim, and whose it is if it is ours; of a delivery that we let go it is not."""
        receipt, taken = receipt_of(delivery), _claim_of(delivery).taken
        ours = self._hands.holds(delivery) or taken.number in self._unseen
        return taken.claim_id, self._owner(receipt.count) if ours else ""

    def _settled(self, receipt: Receipt, said: bytes, how: DispositionName, *, stored: bool) -> Settlement:
        if said == b"DONE" or (said == b"GONE" and receipt.unclear):
            return Settled(how=how)
        return DeliveryLost(stored=stored)

    def _unclear(self, receipt: Receipt, exc: StoreUnavailable) -> StoreSilent:
        receipt.unclear = True
        self._sets.warnings.say("a claim could not be settled; it is tried again", str(exc))
        return StoreSilent()

    def _letter(self, delivery: Delivery, letter: DeadLetter) -> list[str | bytes]:
        notes = {
            "reason": letter.reason,
            "detail": letter.detail[:1000],
            "attempts": str(letter.attempts),
            "status_code": str(letter.status_code),
            "died_at": f"{self._sets.now():.6f}",
            "queue": self._queue.name,
        }
        claim = _claim_of(delivery)
        return letter_fields(claim, claim.taken.message_id, claim.taken.headers, notes)

    # ------------------------------------------------------------ publishing and counting

    async def publish(
        self, body: bytes, *, message_id: str | None = None, headers: Mapping[str, object] | None = None
    ) -> None:
        """See `ports.Transport`. Whether it was done is not known where it raises."""
        self._taking.alive()
        try:
            await place(self._link, self._queue, body, message_id, now=self._sets.now(), headers=headers)
        except StoreUnavailable as exc:
            raise TransportLost(str(exc)) from exc

    async def backlog(self) -> Backlog:
        """See `ports.Transport`."""
        self._taking.alive()
        try:
            return await sorted_set_backlog(self._link, self._queue)
        except StoreUnavailable as exc:
            raise TransportLost(str(exc)) from exc


async def place(
    link: RedisCommands,
    queue: SortedSetQueue,
    body: bytes,
    message_id: str | None,
    *,
    now: float,
    headers: Mapping[str, object] | None = None,
) -> None:
    """Put a message in our own format into the queue, at its deadline.

    Raises: StoreUnavailable: it is not known whether it is there. Said again, it is there once.
    """
    beside = [str(part) for pair in (headers or {}).items() for part in pair]
    await link.run(PUBLISH, queue.keys, body, repr(own_score(body, now)), message_id or "", *beside)


async def sorted_set_backlog(link: RedisCommands, queue: SortedSetQueue) -> Backlog:
    """Count what waits, without a session. Retries in envelopes are those of all queues that share their set.

    Raises `StoreUnavailable`.
    """
    ready, in_flight, delayed, retries, first = await link.run(BACKLOG, queue.keys)
    return Backlog(
        ready=ready,
        in_flight=in_flight,
        delayed=delayed + retries,
        how="sorted set",
        next_deadline=float(first) if first else None,
    )


async def expiring(link: RedisCommands, queue: SortedSetQueue, windows_s: Sequence[float], now: float) -> list[int]:
    """How many of those that wait expire within each window; the fraction of a score is no part of a deadline.

    Raises `StoreUnavailable`.
    """
    ends = (int(now + within_s) + 1 for within_s in windows_s)
    return list(await asyncio.gather(*(link.do("ZCOUNT", queue.name, "-inf", f"({end}") for end in ends)))


def _across(sets: RedisSortedSet, link: RedisLink, cluster: ClusterCommands) -> AcrossSlots:
    return AcrossSlots(
        link,
        cluster,
        sets.queue,
        outbox=sets.outbox,
        lease_s=sets.lease_s,
        hold_ms=sets.hold_ms,
        ttl_s=sets.ttl_s,
    )


def _claim_of(delivery: Delivery) -> Claim:
    more = receipt_of(delivery).more
    assert isinstance(more, Claim)
    return more


def _lies_apart(claim: Claim) -> bool:
    """Its payload has a key of its own. A key of another kind is none of ours to read, or to delete."""
    if claim.envelope is None or claim.envelope.request.payload is not None:
        return False
    return claim.envelope.routing.payload_ref.startswith(PAYLOADS)


def _not_stored(answer: Sequence[Any]) -> Known | Busy:
    if answer[0] == b"BUSY":
        return Busy(left_s=int(answer[1]) / 1000)
    if len(answer) > 1:
        return Known(reply=known_reply(bytes(answer[1])))
    return Known(reply=KnownReply(status="completed", status_code=200))
