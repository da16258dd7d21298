"""The request queue as a subscription of Google Cloud Pub/Sub: pulled one call after the other, leased, acknowledged.

A delivery is known by its ack id, never by its message's id: a message that is delivered twice is two deliveries, and
the first one's end says nothing of the second. Results are stored, then published and confirmed, then the message is
acknowledged; so a crash between the steps leads to the same again, and a result may come twice, never not at all.

The service counts every delivery, also of what was given back or not let in. Attempts are therefore counted in the
store, and what is to be tried again waits here, leased: the service does not count it, and its dead-letter policy does
not end it. Where we die, the lease lapses and the message comes again, its attempts with it.

A session is a use of a channel. It is over when the service has not answered for a while, and another is opened.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Final, Protocol, assert_never

import structlog

from inference_worker.disposition import (
    Ack,
    DeadLetter,
    DeliveryLost,
    Disposition,
    DispositionName,
    Known,
    Nack,
    Republish,
    Settled,
    Settlement,
    StoreSilent,
)
from inference_worker.errors import StoreUnavailable, TransportLost
from inference_worker.messages import Reply
from inference_worker.metrics import WorkerMetrics
from inference_worker.ports import Backlog, Delivery, ResultStore
from inference_worker.pubsub_values import DENIED, SILENT, PubsubLink, Subscription
from inference_worker.settling import bury, release, settle_late, store_reply
from inference_worker.timing import ended, first_of, quietly, stopped_within
from inference_worker.transports.hands import Appetite, Receipt, receipt_of
from inference_worker.transports.pubsub_messages import PubsubClaim, PubsubQueue, attributes_of, read_pulled
from inference_worker.transports.sorted_set_members import stored_reply
from inference_worker.transports.taking import Saying, Taking

__all__ = ["PubsubQueue", "PubsubTransport", "PubsubTransports"]

log = structlog.get_logger(__name__)

LEASE_S: Final = 60
"""The deadline that a delivery has in our hands; renewed three times within it."""

LEAST_LEASE_S: Final = 10
MOST_LEASE_S: Final = 600
"""The longest deadline of the service, and the longest delay that it may be asked for."""

PATIENCE_S: Final = 10.0
"""How long pulls may fail for reasons that pass until the session is over."""

PAUSE_S: Final = 0.25
"""Between two pulls of which the first failed, or brought nothing at once."""

LAST_S: Final = 0.2
"""How long a pull is waited for when nothing is consumed any more."""

CANCELLED_S: Final = 0.05
CLOSE_S: Final = 2.0
STOP_S: Final = 1.5
MOST_WAITING: Final = 10_000
MOST_WAITING_BYTES: Final = 64 * 1024 * 1024
"""Of what is to be tried again; beyond it the service keeps it, and counts."""


class Undelivered(Protocol):
    """How many messages of a subscription are not acknowledged, which the service itself does not say."""

    async def __call__(self, subscription: str) -> int | None:
        """None where it is not known. Raises StoreUnavailable."""


class PubsubTransports:
    """Opens sessions with one subscription."""

    def __init__(
        self,
        link: Callable[[], AbstractAsyncContextManager[PubsubLink]],
        *,
        queue: PubsubQueue,
        store: ResultStore,
        metrics: WorkerMetrics,
        replica_id: str,
        now: Callable[[], float],
        undelivered: Undelivered | None = None,
        batch_size: int = 10,
        lease_s: int = LEASE_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`batch_size`: the most that one pull asks for."""
        self.link = link
        self.queue = queue
        self.store = store
        self.metrics = metrics
        self.replica_id = replica_id
        self.now = now
        self.undelivered = undelivered
        self.batch_size = batch_size
        self.lease_s = min(max(lease_s, LEAST_LEASE_S), MOST_LEASE_S)
        self.patience_s = patience_s
        self.appetite = Appetite()
        self.warnings = Saying(subscription=queue.name)

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator["PubsubTransport", None]:
        """Open a session: a channel, and a look at the subscription."""
        async with AsyncExitStack() as stack:
            try:
                session = PubsubTransport(self, await stack.enter_async_context(self.link()))
                await session.begin()
            except StoreUnavailable as exc:
                raise TransportLost(str(exc)) from exc
            try:
                yield session
            finally:
                await session.end()
                session.lose("closed by us")


class PubsubTransport:
    """One session. See `ports.Transport`."""

    def __init__(self, transports: PubsubTransports, link: PubsubLink) -> None:
        self._transports = transports
        self._link = link
        self._queue = transports.queue
        self._name = transports.queue.subscription
        self._store = transports.store
        self._seen = Subscription()
        self._taking = Taking(
            "the subscription",
            take_turn=self._take_turn,
            give_back=self._give_back,
            stop_s=STOP_S,
            on_lost=self._forget_waiting,
        )
        self._hands = self._taking.hands
        self.lost = self._taking.lost
        self._unseen: set[str] = set()
        """Ack ids of what is ended here, not handed up."""
        self._waiting: dict[str, tuple[asyncio.TimerHandle, int]] = {}
        """By ack id: what is handed up again later, and its size. Leased all the while."""
        self._failing_since: float | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._returning: set[asyncio.Task[bool]] = set()
        self._renewed_at = 0.0

    # ------------------------------------------------------------ beginning and end

    async def begin(self) -> None:
        """Look at the subscription; who may not is told nothing of it and goes on. Raises StoreUnavailable."""
        try:
            self._seen = await self._link.look(self._name)
        except StoreUnavailable as exc:
            if exc.code != DENIED:
                raise
            self._transports.warnings.say(
                "the subscription may not be looked at: its dead-letter topic is not known, and dead letters are"
                " stored and answered only",
                str(exc),
            )
        else:
            if not self._seen.exactly_once:
                self._transports.warnings.say(
                    "the subscription has no exactly-once delivery: a request may run twice where a lease has lapsed"
                )
        self._renewed_at = asyncio.get_running_loop().time()
        self._tasks = [
            asyncio.create_task(self._taking.read(), name="pubsub reader"),
            asyncio.create_task(self._keep_ours(), name="pubsub leases"),
            asyncio.create_task(self._watch(), name="pubsub connection"),
        ]

    @property
    def lost_because(self) -> str:
        """See `ports.Transport`."""
        return self._taking.lost_because

    def lose(self, why: str) -> None:
        """The session is over, and with it the right to settle what came by it."""
        self._taking.lose(why)

    def _forget_waiting(self) -> None:
        for timer, _ in self._waiting.values():
            timer.cancel()
        self._waiting.clear()

    async def end(self) -> None:
        """Give back what is ours, so that nobody waits for our lease."""
        for task in self._tasks:
            await ended(task)
        ours = [] if self.lost.is_set() else self.held()
        if ours:
            await quietly(self._link.keep(self._name, ours, 0), CLOSE_S, StoreUnavailable)
        for returning in list(self._returning):
            await ended(returning)

    def held(self) -> list[str]:
        """Ack ids of all that is ours."""
        return [*(receipt.entry_id for receipt in self._hands.everything()), *self._unseen, *self._waiting]

    # ------------------------------------------------------------ consuming

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
        """Give back what lies too long, and pull once."""
        loop = asyncio.get_running_loop()
        self._taking.turn.clear()
        if not self._taking.consumed:
            self._taking.resting.set()
            await first_of(self._taking.turn, self.lost)
            return
        await self._give_back(self._hands.take_back(loop.time()))
        if not self._wanted:
            await first_of(self._taking.turn, self.lost, within_s=1.0)
            return
        begun = loop.time()
        try:
            came = await self._pulled()
        except StoreUnavailable as exc:
            self._failing_since = begun if self._failing_since is None else self._failing_since
            if exc.code not in SILENT or loop.time() - self._failing_since >= self._transports.patience_s:
                raise TransportLost(str(exc)) from exc
            self._transports.warnings.say("the subscription cannot be pulled from", str(exc))
            await stopped_within(self.lost, min(PAUSE_S, self._transports.patience_s))
            return
        self._failing_since = None
        self._transports.warnings.well("the subscription cannot be pulled from")
        if not came and loop.time() - begun < PAUSE_S:
            await first_of(self._taking.turn, self.lost, within_s=PAUSE_S)

    @property
    def _wanted(self) -> int:
        return self._transports.appetite.portion(min(self._hands.wanted, self._transports.batch_size))

    async def _pulled(self) -> bool:
        """One pull, given up where nothing is consumed any more. Raises StoreUnavailable."""
        pulling = asyncio.create_task(self._link.pull(self._name, self._wanted), name="pubsub pull")
        try:
            while not pulling.done() and self._taking.consumed:
                self._taking.turn.clear()
                turned = asyncio.create_task(self._taking.turn.wait())
                try:
                    await asyncio.wait([pulling, turned], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await ended(turned)
            # What is under way already would otherwise be hidden from all for the subscription's whole deadline.
            await asyncio.wait([pulling], timeout=LAST_S)
        finally:
            if not pulling.done():
                await ended(pulling)
        if pulling.cancelled():
            # What we give back next would be handed to this very call, which the service has not seen end yet.
            await asyncio.sleep(CANCELLED_S)
            return False
        came = pulling.result()
        claims = [read_pulled(one, self._queue, self._transports.now()) for one in came]
        self._transports.appetite.saw([claim.size_bytes for claim in claims])
        self._unseen |= {claim.pulled.ack_id for claim in claims}
        await asyncio.gather(*(self._arrived(claim) for claim in claims))
        return bool(came)

    async def _arrived(self, claim: PubsubClaim) -> None:
        """Hand up what is to be run; end here what is no request."""
        attempts = await self._noted(claim)
        if claim.wrong:
            await self._end_malformed(claim, attempts)
            return
        self._unseen.discard(claim.pulled.ack_id)
        self._hands.put(self._delivery(claim, attempts))
        self._taking.something.set()

    async def _noted(self, claim: PubsubClaim) -> int:
        """How many attempts lie behind it. Where nobody says, 0: what is not the first one is found out by claiming."""
        if not claim.request_id:
            return 0
        try:
            return (await self._store.progress(claim.request_id)).attempts
        except StoreUnavailable:
            return 0

    def _delivery(self, claim: PubsubClaim, attempts: int) -> Delivery:
        loop_time = asyncio.get_running_loop().time()
        return Delivery(
            body=claim.pulled.data,
            attempts=attempts,
            queue=self._queue.name,
            message_id=claim.message_id,
            redelivered=claim.redelivered,
            receipt=Receipt(
                entry_id=claim.pulled.ack_id,
                count=0,
                fields=(),
                read_at=loop_time,
                size_bytes=claim.size_bytes,
                more=claim,
            ),
            lost=asyncio.Event(),
            headers=claim.headers,
            correlation_id=claim.pulled.ack_id,
            request=claim.request,
            route=self._queue.route,
            labels=dict(self._queue.labels),
            taken_at=loop_time,
        )

    async def _end_malformed(self, claim: PubsubClaim, attempts: int) -> None:
        """Answer what is no request, and park it. What fails comes again."""
        reply = self._failure(claim, attempts) if claim.request_id else None
        letter = DeadLetter(
            reason="invalid_request", detail=claim.wrong, attempts=attempts, status_code=400, reply=reply
        )
        log.warning(
            "a message of the subscription is dead-lettered",
            reason=claim.wrong,
            request_id=claim.request_id or None,
            message_id=claim.message_id,
            subscription=self._queue.name,
        )
        begun = asyncio.get_running_loop().time()
        try:
            settlement = await self._conclude(claim, letter)
            if isinstance(settlement, Known):
                settlement = await self._conclude(claim, replace(letter, reply=None))
        finally:
            self._unseen.discard(claim.pulled.ack_id)
        match settlement:
            case Settled(how=how):
                self._transports.metrics.settled(how, settle_s=asyncio.get_running_loop().time() - begun)
            case DeliveryLost():
                pass
            case _:
                await self._nacked([claim.pulled.ack_id])

    def _failure(self, claim: PubsubClaim, attempts: int) -> Reply:
        return Reply(
            request_id=claim.request_id,
            status="failed",
            status_code=400,
            attempt=attempts,
            replica_id=self._transports.replica_id,
            finished_at=self._transports.now(),
            error=claim.wrong,
            error_code="invalid_request",
        )

    async def _give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Give back what was not received. Where nobody answers, it comes back when its lease has lapsed."""
        if deliveries:
            await self._nacked([receipt_of(delivery).entry_id for delivery in deliveries])

    async def _nacked(self, ack_ids: Sequence[str]) -> bool:
        return await quietly(self._link.keep(self._name, ack_ids, 0), CLOSE_S, StoreUnavailable)

    # ------------------------------------------------------------ keeping

    async def _keep_ours(self) -> None:
        """Three times within a deadline: have it run anew for all that is in our hands."""
        loop, lease_s = asyncio.get_running_loop(), self._transports.lease_s
        pause_s = min(lease_s, self._seen.ack_deadline_s) / 3
        while not await stopped_within(self.lost, pause_s):
            at, why = loop.time(), ""
            try:
                await self._extend(self.held())
                self._renewed_at = at
            except StoreUnavailable as exc:
                why = str(exc)
                self._transports.warnings.say("leases could not be renewed", why)
            except Exception as exc:  # A fault of ours costs a turn, not the leases of all that runs.
                why = type(exc).__name__
                log.exception("leases could not be renewed")
            else:
                self._transports.warnings.well("leases could not be renewed")
            if why and loop.time() - self._renewed_at > lease_s:
                self.lose(f"leases could not be renewed: {why}")

    async def _watch(self) -> None:
        """See a connection that is gone and does not come back, also where nothing is pulled as our hands are full."""
        loop, patience_s = asyncio.get_running_loop(), self._transports.patience_s
        seen_at = loop.time()
        while not await stopped_within(self.lost, min(patience_s / 2, 1.0)):
            if self._link.connected():
                seen_at = loop.time()
            elif loop.time() - seen_at > patience_s:
                self.lose("there is no connection to Pub/Sub")

    def _drop(self, ack_ids: Iterable[str]) -> None:
        for ack_id in ack_ids:
            self._hands.drop(ack_id, 0)
            if (waits := self._waiting.pop(ack_id, None)) is not None:
                waits[0].cancel()
        self._taking.something.set()

    async def extend(self, delivery: Delivery) -> None:
        """See `ports.Transport`."""
        await self._taking.extend(delivery, lambda: self._extend([receipt_of(delivery).entry_id]))

    async def _extend(self, ack_ids: Sequence[str]) -> None:
        """Keep these, and have those known as lost that are not ours any more."""
        self._drop(await self._link.keep(self._name, ack_ids, self._transports.lease_s))

    # ------------------------------------------------------------ settling

    async def settle(self, delivery: Delivery, disposition: Disposition) -> Settlement:
        """See `ports.Transport`."""
        if not self._hands.holds(delivery):
            return await self._settle_late(disposition)
        return await self._taking.settle(delivery, disposition, self._settle_ours, self._settle_late)

    async def _settle_ours(self, delivery: Delivery, disposition: Disposition) -> Settlement:
        match disposition:
            case Ack() | DeadLetter():
                if disposition.reply is None and isinstance(disposition, Ack):
                    return await self._forget(delivery, disposition)
                return await self._conclude(_claim_of(delivery), disposition)
            case Nack(claim=claim):
                await release(self._store, claim)
                return await self._ended(_claim_of(delivery), "requeue", stored=False)
            case Republish():
                return await self._retry(delivery, disposition)
            case _:
                assert_never(disposition)

    async def _settle_late(self, disposition: Disposition) -> Settlement:
        """It is not ours; whoever has it now finds the result, and publishes it."""
        return await settle_late(self._store, disposition, self._transports.now())

    async def _conclude(self, claim: PubsubClaim, disposition: Ack | DeadLetter) -> Settlement:
        """Store, publish, park, acknowledge; each step is done before the next begins, and any of them may repeat."""
        if (not_yet := await store_reply(self._store, disposition)) is not None:
            return not_yet
        letter = disposition if isinstance(disposition, DeadLetter) else None
        how: DispositionName = "ack" if letter is None else "dead_letter"
        reply = disposition.reply
        try:
            if reply is None:
                reply = await self._stored(claim)
            if letter is not None:
                await bury(self._store, letter, self._transports.now())
            message = None if reply is None else claim.result(reply)
            if message is None and letter is not None:
                message = claim.refusal(letter.detail)
            if message is not None and self._queue.result_topic:
                await self._link.publish(self._queue.result_topic, message, claim.result_attributes)
            if letter is not None and self._seen.dead_letter_topic:
                attributes = claim.dead_attributes(self._queue, letter)
                await self._link.publish(self._seen.dead_letter_topic, claim.pulled.data or b" ", attributes)
        except StoreUnavailable as exc:
            return self._silent(exc)
        return await self._ended(claim, how, stored=disposition.reply is not None)

    async def _stored(self, claim: PubsubClaim) -> Reply | None:
        """The result that is there already. Raises StoreUnavailable."""
        stored = await self._store.read(claim.request_id) if claim.request_id else None
        return None if stored is None else stored_reply(claim.request_id, stored)

    async def _forget(self, delivery: Delivery, disposition: Ack) -> Settlement:
        """It is answered, or history. The latter is true only of a copy, and there are none: then it comes again.

        Where two held this message, the first may have noted an attempt that the second did not know of.
        """
        claim = _claim_of(delivery)
        try:
            if claim.request_id and await self._stored(claim) is None:
                behind = (await self._store.progress(claim.request_id)).attempts
                if behind > delivery.attempts:
                    return await self._ended(claim, "requeue", stored=False)
        except StoreUnavailable as exc:
            return self._silent(exc)
        return await self._conclude(claim, disposition)

    async def _ended(self, claim: PubsubClaim, how: DispositionName, *, stored: bool) -> Settlement:
        """Acknowledge, or give back; whether it was ours to do so is what the service says."""
        ack_id = claim.pulled.ack_id
        try:
            if how == "requeue":
                ours = not await self._link.keep(self._name, [ack_id], 0)
            else:
                ours = await self._link.acknowledge(self._name, ack_id)
        except StoreUnavailable as exc:
            if how == "requeue":
                return Settled(how=how)  # Let go of, it is back after its lease.
            return self._silent(exc)
        return Settled(how=how) if ours else DeliveryLost(stored=stored)

    def _silent(self, exc: StoreUnavailable) -> StoreSilent:
        self._transports.warnings.say("a delivery could not be settled; it is tried again", str(exc))
        return StoreSilent()

    # ------------------------------------------------------------ trying again

    async def _retry(self, delivery: Delivery, disposition: Republish) -> Settlement:
        """Have it handed up again after its delay. Its lease is renewed first, which shows that it is ours."""
        claim, lease_s = _claim_of(delivery), self._transports.lease_s
        size = claim.size_bytes + sum(size for _, size in self._waiting.values())
        keeps = self._taking.consumed and len(self._waiting) < MOST_WAITING and size <= MOST_WAITING_BYTES
        try:
            gone = await self._link.keep(self._name, [claim.pulled.ack_id], lease_s)
        except StoreUnavailable as exc:
            return self._silent(exc)
        if gone:
            await release(self._store, disposition.claim)
            return DeliveryLost(stored=False)
        await release(self._store, disposition.claim, disposition.attempts)
        if not keeps:
            # Nobody knows of it here when it comes again: its attempts are in the store.
            seconds = min(math.ceil(disposition.delay_s), MOST_LEASE_S)
            await quietly(self._link.keep(self._name, [claim.pulled.ack_id], seconds), CLOSE_S, StoreUnavailable)
            return Settled(how="retry")
        timer = asyncio.get_running_loop().call_later(
            max(disposition.delay_s, 0.0), self._due, replace(claim, redelivered=False), disposition.attempts
        )
        self._waiting[claim.pulled.ack_id] = timer, claim.size_bytes
        return Settled(how="retry")

    def _due(self, claim: PubsubClaim, attempts: int) -> None:
        del self._waiting[claim.pulled.ack_id]
        if self._taking.consumed:
            self._hands.put(self._delivery(claim, attempts))
            self._taking.something.set()
            return
        returning = asyncio.create_task(self._nacked([claim.pulled.ack_id]))
        self._returning.add(returning)
        returning.add_done_callback(self._returning.discard)

    # ------------------------------------------------------------ publishing and counting

    async def publish(
        self, body: bytes, *, message_id: str | None = None, headers: Mapping[str, object] | None = None
    ) -> None:
        """See `ports.Transport`. Every subscription of the topic gets it."""
        self._taking.alive()
        if not self._seen.topic:
            raise TransportLost("the topic of the subscription is not known: it may not be looked at")
        try:
            await self._link.publish(self._seen.topic, body, attributes_of(message_id, headers))
        except StoreUnavailable as exc:
            raise TransportLost(str(exc)) from exc

    async def backlog(self) -> Backlog:
        """See `ports.Transport`. What others hold counts as waiting: the service tells of neither."""
        self._taking.alive()
        ours = len(self.held())
        if self._transports.undelivered is None:
            return Backlog(ready=0, in_flight=ours, how="nobody counts")
        try:
            undelivered = await self._transports.undelivered(self._name)
        except StoreUnavailable as exc:
            self._transports.warnings.say("the backlog cannot be looked at", str(exc))
            undelivered = None
        if undelivered is None:
            return Backlog(ready=0, in_flight=ours, how="unknown")
        self._transports.warnings.well("the backlog cannot be looked at")
        return Backlog(ready=max(undelivered - ours, 0), in_flight=ours, how="monitoring")


def _claim_of(delivery: Delivery) -> PubsubClaim:
    more = receipt_of(delivery).more
    assert isinstance(more, PubsubClaim)
    return more
