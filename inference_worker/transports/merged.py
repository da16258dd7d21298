"""Several queues as one: a `Transport` for a pool that works for all of them.

A session keeps one connection for each queue (`merged_source.py`). A queue that is lost, that floods, or whose gate
hangs holds up no other, nor ends the session: its deliveries are lost, and it comes back by itself. Which delivery is
next is the merge policy's to say; each is settled with the queue that it came from. Queues come and go while it lasts,
and the policy may become another one (`MergedQueues.change`): no call is interrupted by it.

Not here: what a pool's own gate says, which is asked later, by whoever starts a request.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, assert_never

import structlog

from inference_worker.disposition import (
    Ack,
    DeadLetter,
    DeliveryLost,
    Disposition,
    Nack,
    Republish,
    Settled,
    Settlement,
)
from inference_worker.errors import TransportLost
from inference_worker.gates.feedback import feedback
from inference_worker.gates.permits import NOT_SENT
from inference_worker.lanes import TIER_LABEL
from inference_worker.merge import MergePolicy
from inference_worker.messages import Reply
from inference_worker.ports import Backlog, Delivery, Feedback
from inference_worker.timing import ByteBudget
from inference_worker.transports.merged_source import MOST_WAITING_BYTES, Feed, Held, QueueVerdict, Shared, Source

__all__ = ["MergedQueues", "MergedTransport", "QueueVerdict", "Source"]

log = structlog.get_logger(__name__)

FIRST_TRY_S: Final = 5.0
"""How long the first connection is waited for."""
PUBLISH_S: Final = 10.0
"""How long a queue without a connection is waited for by who publishes."""
BACKLOG_S: Final = 5.0
REST_S: Final = 10.0
"""How long queues may take to stop consuming; each of their steps has a bound of its own, below this."""
GATE_WAIT_S: Final = 300.0

FAILED_AGAIN: Final = Feedback(kind="error")


def nobody(queue: str, verdict: QueueVerdict) -> None:
    """Nobody wants to know what the gates of queues say."""


class MergedQueues:
    """Opens sessions with the queues of one pool; without a queue they have nothing to do."""

    def __init__(
        self,
        sources: Sequence[Source],
        policy: Callable[[], MergePolicy[Delivery]],
        *,
        now: Callable[[], float],
        rng: random.Random,
        replica_id: str,
        tier_label: str = TIER_LABEL,
        gate_wait_s: float = GATE_WAIT_S,
        told: Callable[[str, QueueVerdict], None] = nobody,
        waiting: ByteBudget | None = None,
    ) -> None:
        """`policy` makes one for each session; `told` hears of each verdict of a queue's gate. What waits unstarted is
        counted in `waiting`, which pools share.
        """
        self._sources = tuple(sources)
        self._policy = policy
        self._now = now
        self._rng = rng
        self._replica_id = replica_id
        self._tier_label = tier_label
        self._gate_wait_s = gate_wait_s
        self._told = told
        self._waiting = ByteBudget(MOST_WAITING_BYTES) if waiting is None else waiting
        self._session: MergedTransport | None = None
        self._feeds: list[Feed] = []
        """Of all sessions, until they are over."""

    def change(
        self, sources: Sequence[Source], policy: Callable[[], MergePolicy[Delivery]] | None = None, *, tier_label: str
    ) -> None:
        """Other queues, and perhaps another policy, in the session that is open and in those to come.

        A source that is the same object goes on untouched. One that is not named any more takes nothing from now on: it
        gives back what waits here, and closes once what it has handed up is settled (see `gone`).
        """
        self._sources = tuple(sources)
        self._policy = policy or self._policy
        self._tier_label = tier_label
        self._prune()
        if self._session is not None:
            self._session.change(self._sources, None if policy is None else policy(), tier_label=tier_label)

    async def gone(self, source: Source) -> None:
        """Wait until nothing of a queue that was taken away is in anybody's hands here."""
        for feed in [feed for feed in self._feeds if feed.source is source]:
            await feed.over.wait()

    def _prune(self) -> None:
        self._feeds = [feed for feed in self._feeds if not feed.over.is_set()]

    def _feed(self, source: Source, shared: Shared, key: str) -> Feed:
        feed = Feed(source, shared, key)
        self._feeds.append(feed)
        return feed

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator["MergedTransport", None]:
        """Open a session: with one queue at least, where there are any; the others follow.

        Raises:
            TransportLost: no queue could be connected to.
        """
        shared = Shared(
            policy=self._policy(),
            now=self._now,
            rng=self._rng,
            replica_id=self._replica_id,
            tier_label=self._tier_label,
            gate_wait_s=self._gate_wait_s,
            told=self._told,
            waiting=self._waiting,
        )
        self._prune()
        session = MergedTransport(shared, self._feed)
        session.begin(self._sources)
        self._session = session
        try:
            await session.first_connection()
            yield session
        finally:
            self._session = None
            session.lose("closed by us")
            await session.end()


class MergedTransport:
    """One session. See `ports.Transport`."""

    def __init__(self, shared: Shared, make_feed: Callable[[Source, Shared, str], Feed]) -> None:
        self._shared = shared
        self._make_feed = make_feed
        self._feeds: dict[str, Feed] = {}
        """By the names of their queues, without those that are taken away."""
        self._tasks: dict[Feed, asyncio.Task[None]] = {}
        self._made = 0
        self._closer: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self.lost = asyncio.Event()
        """Set once the session is over and all its connections are closed."""
        self.lost_because = ""

    # ------------------------------------------------------------ beginning and end

    def begin(self, sources: Sequence[Source]) -> None:
        """Start connecting."""
        for source in sources:
            self._start(source, "")
        self._closer = asyncio.create_task(self._close(), name="closing the queues")

    def change(
        self, sources: Sequence[Source], policy: MergePolicy[Delivery] | None = None, *, tier_label: str
    ) -> None:
        """See `MergedQueues.change`."""
        if self._ending.is_set():
            return
        shared = self._shared
        shared.feeds = [feed for feed in shared.feeds if not feed.over.is_set()]
        wanted = {id(source) for source in sources}
        for name, feed in list(self._feeds.items()):
            if id(feed.source) not in wanted:
                del self._feeds[name]
                self._retire(feed)
        shared.tier_label = tier_label
        if policy is not None:
            before, shared.policy = shared.policy, policy
            for feed in shared.feeds:
                feed.line_up_anew(before)
        keys = {feed.key for feed in shared.feeds}
        for source in sources:
            if source.name not in self._feeds:
                # One that takes another's place has a name of its own in the policy: each gives back its own alone.
                self._start(source, f"{source.name} {self._made}" if source.name in keys else "")
        shared.something.set()

    def _start(self, source: Source, key: str) -> None:
        self._made += 1
        feed = self._feeds[source.name] = self._make_feed(source, self._shared, key)
        self._shared.feeds.append(feed)
        task = self._tasks[feed] = asyncio.create_task(feed.run(), name=f"queue {source.name}")
        task.add_done_callback(lambda task: self._ended(feed, task))

    def _retire(self, feed: Feed) -> None:
        feed.retire()
        if feed.transport is None and feed in self._tasks:
            self._tasks[feed].cancel()  # A connection that is still being opened is not waited for.

    async def first_connection(self) -> None:
        """Wait for one; a queue that hangs is not waited for once another has connected."""
        try:
            async with asyncio.timeout(FIRST_TRY_S):
                # Meanwhile others may have taken their place, who were not tried yet.
                while not self._connected and (untried := [f for f in self._feeds.values() if not f.tried.is_set()]):
                    await self._tried(untried)
        except TimeoutError:
            pass
        if not self._connected:
            reasons = self.reasons().items()
            raise TransportLost("; ".join(f"queue {name}: {reason}" for name, reason in reasons))

    async def _tried(self, feeds: Sequence[Feed]) -> None:
        """Wait until one of all is connected, or each of these was tried."""
        waits = [asyncio.create_task(feed.tried.wait()) for feed in feeds]
        try:
            for wait in asyncio.as_completed(waits):
                await wait
                if self._connected:
                    return
        finally:
            for task in waits:
                task.cancel()
            await asyncio.wait(waits)

    @property
    def _connected(self) -> bool:
        """With one queue at least, where there are any."""
        return not self._feeds or any(feed.connected.is_set() for feed in self._feeds.values())

    def lose(self, why: str) -> None:
        """End the session: the connections are closed, which gives back all that came over them."""
        if not self._ending.is_set():
            self.lost_because = why
            self._ending.set()
            self._shared.something.set()

    async def end(self) -> None:
        """Wait until all is closed."""
        assert self._closer is not None
        await asyncio.wait([self._closer])

    async def _close(self) -> None:
        await self._ending.wait()
        self._shared.over = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.lost.set()

    def _ended(self, feed: Feed, task: asyncio.Task[None]) -> None:
        """With an exception it is a fault of ours, and a new session is better."""
        self._tasks.pop(feed, None)
        feed.ended()
        if not task.cancelled() and (exc := task.exception()) is not None:
            if not self._ending.is_set():
                log.error("a queue was given up", exc_info=exc)
            self.lose(f"a queue was given up: {type(exc).__name__}")

    def _alive(self) -> None:
        if self._ending.is_set():
            raise TransportLost(self.lost_because)

    # ------------------------------------------------------------ consuming

    @asynccontextmanager
    async def consuming(self, limit: int) -> AsyncGenerator[None, None]:
        """See `ports.Transport`. Besides, each queue has its window of what waits here."""
        self._alive()
        self._flow(limit)
        try:
            yield
        finally:
            self._flow(None)
            try:
                async with asyncio.timeout(REST_S):
                    for feed in self._shared.feeds:
                        await feed.resting.wait()
            except TimeoutError:
                log.warning("not all queues have stopped in time")

    def _flow(self, limit: int | None) -> None:
        self._shared.flowing = limit is not None
        self._shared.limit = limit or 0
        for feed in self._shared.feeds:
            if limit is not None or feed.unstarted:
                # Cleared here, before its turn comes, so that nobody takes it for resting meanwhile.
                feed.awake()
            feed.turn()
        self._shared.something.set()

    async def set_limit(self, limit: int) -> None:
        """See `ports.Transport`. What waits here is not surplus: it was not handed up."""
        self._alive()
        self._shared.limit = limit
        for feed in self._shared.feeds:
            feed.turn()
        self._shared.something.set()

    async def receive(self) -> Delivery:
        """See `ports.Transport`."""
        while True:
            self._alive()
            delivery = self._next()
            if delivery is not None:
                return delivery
            self._shared.something.clear()
            await self._shared.something.wait()

    def _next(self) -> Delivery | None:
        if not self._shared.flowing or sum(len(feed.started) for feed in self._shared.feeds) >= self._shared.limit:
            return None
        while (delivery := self._shared.policy.pop()) is not None:
            self._shared.refill()
            held = _held(delivery)
            if not held.inner.lost.is_set():
                held.feed.start(held)
                return delivery
            held.feed.let_go(held)
        return None

    # ------------------------------------------------------------ settling

    async def settle(self, delivery: Delivery, disposition: Disposition) -> Settlement:
        """See `ports.Transport`. With the queue that it came from; then its gate has its permits back."""
        held = _held(delivery)
        try:
            settlement = await held.transport.settle(held.inner, disposition)
        except asyncio.CancelledError:
            if isinstance(disposition, Nack):  # Nobody comes back to what could not even be given back.
                await held.feed.finish(held, NOT_SENT)
            raise
        except TransportLost:
            settlement = DeliveryLost(stored=False)
        if isinstance(settlement, Settled | DeliveryLost):
            await held.feed.finish(held, held.seen or seen_of(disposition))
        return settlement

    async def extend(self, delivery: Delivery) -> None:
        """See `ports.Transport`."""
        self._alive()
        held = _held(delivery)
        await held.transport.extend(held.inner)

    # ------------------------------------------------------------ the rest

    async def publish(
        self,
        body: bytes,
        *,
        message_id: str | None = None,
        headers: Mapping[str, object] | None = None,
        queue: str | None = None,
    ) -> None:
        """See `ports.Transport`. Into a queue by its name, or the first one."""
        self._alive()
        if queue is not None and queue not in self._feeds:
            raise ValueError(f"there is no queue {queue!r} here; there are: {', '.join(self._feeds)}")
        if not self._feeds:
            raise TransportLost("there is no queue")
        feed = next(iter(self._feeds.values())) if queue is None else self._feeds[queue]
        try:
            async with asyncio.timeout(PUBLISH_S):
                await feed.connected.wait()
        except TimeoutError as exc:
            raise TransportLost(f"queue {feed.source.name}: {feed.reason}") from exc
        if feed.transport is None:
            raise TransportLost(f"queue {feed.source.name}: its connection is gone")
        await feed.transport.publish(body, message_id=message_id, headers=headers)

    async def backlog(self) -> Backlog:
        """See `ports.Transport`. The sum over those queues that can be asked."""
        return summed(list((await self.backlogs()).values()))

    async def backlogs(self) -> dict[str, Backlog]:
        """What waits, by queue; without those that cannot be asked now. What waits here counts as ready."""
        self._alive()
        feeds = dict(self._feeds)
        found = await asyncio.gather(*(_backlog(feed) for feed in feeds.values()))
        return {name: backlog for name, backlog in zip(feeds, found, strict=True) if backlog is not None}

    def reasons(self) -> dict[str, str]:
        """Why a queue has no connection, by queue; empty for those that have one."""
        return {name: feed.reason for name, feed in self._feeds.items()}

    def waiting(self) -> dict[str, int]:
        """How much of each queue is here and not started."""
        return {name: len(feed.unstarted) for name, feed in self._feeds.items()}


async def _backlog(feed: Feed) -> Backlog | None:
    if feed.transport is None:
        return None
    try:
        async with asyncio.timeout(BACKLOG_S):
            backlog = await feed.transport.backlog()
    except (TransportLost, TimeoutError):
        return None
    here = sum(1 for held in feed.unstarted if not held.inner.lost.is_set())
    in_flight = None if backlog.in_flight is None else max(backlog.in_flight - here, 0)
    ready = backlog.ready + here
    return Backlog(
        ready=ready,
        withheld=ready if feed.withholds else 0,
        delayed=backlog.delayed,
        in_flight=in_flight,
        oldest_s=backlog.oldest_s,
        how=backlog.how,
        next_deadline=backlog.next_deadline,
    )


def summed(backlogs: Sequence[Backlog]) -> Backlog:
    """Several queues as one; what none of them can tell, it cannot tell either."""
    delayed = [one.delayed for one in backlogs if one.delayed is not None]
    in_flight = [one.in_flight for one in backlogs if one.in_flight is not None]
    return Backlog(
        ready=sum(one.ready for one in backlogs),
        withheld=sum(one.withheld for one in backlogs),
        delayed=sum(delayed) if delayed else None,
        in_flight=sum(in_flight) if in_flight else None,
        oldest_s=max((one.oldest_s for one in backlogs if one.oldest_s is not None), default=None),
        next_deadline=min((one.next_deadline for one in backlogs if one.next_deadline is not None), default=None),
    )


def seen_of(disposition: Disposition) -> Feedback:
    """What a settlement tells of the call: enough to give a place back, not always what a rate learns from."""
    match disposition:
        case Nack():
            return NOT_SENT
        case Republish():
            return FAILED_AGAIN
        case Ack(reply=reply) | DeadLetter(reply=reply):
            return NOT_SENT if reply is None or not _was_sent(reply) else feedback(reply.status_code, {}, sent_at=None)
        case _:
            assert_never(disposition)


def _was_sent(reply: Reply) -> bool:
    return reply.error_code is None or reply.timings.model_s is not None


def saw(delivery: Delivery, seen: Feedback) -> None:
    """Note what became of a request, for the gate of its queue: more than its settlement tells."""
    _held(delivery).seen = seen


def _held(delivery: Delivery) -> Held:
    assert isinstance(delivery.receipt, Held)
    return delivery.receipt
