"""Requests from a channel of Redis, as llm-d-async's first transport had them. Deprecated there, and here.

It promises no more than a channel does: who does not listen at the time hears nothing, and every worker hears
everything. Claims in the store see to it that one of several runs a request. What is to be tried again lies in a sorted
set with its envelope; what could not be handed up in time, and what a stop left, is put there too. Results are
published; they lie in the store besides. No leases, no cancelling, no dead letters.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, assert_never

import structlog
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from inference_worker.disposition import (
    Ack,
    DeadLetter,
    DeliveryLost,
    Disposition,
    DispositionName,
    Nack,
    Republish,
    Settled,
    Settlement,
    StoreSilent,
    Token,
)
from inference_worker.errors import MalformedRequest, StoreUnavailable, TransportLost
from inference_worker.llmd_messages import (
    Envelope,
    OwnMessage,
    Routing,
    from_request,
    read_bare,
    read_member,
    routed,
    to_request,
    write_envelope,
)
from inference_worker.llmd_results import NoAnswer, result_for, result_json
from inference_worker.messages import Reply, decode
from inference_worker.metrics import WorkerMetrics
from inference_worker.ports import Backlog, Delivery, ResultStore, Route, Stored
from inference_worker.redis_scripts import Address, RedisCommands, RedisTls, Script, connect, reason_of, url_from
from inference_worker.settling import bury, release, store_reply
from inference_worker.timing import ended, first_of, quietly, stopped_within

log = structlog.get_logger(__name__)

CONNECT_S: Final = 10.0
PING_S: Final = 10.0
"""A subscription that says nothing for so long is asked whether it is alive."""

MOST_AHEAD: Final = 1000
"""Messages in memory that nobody has received; what comes then is put into the set."""

MOST_AHEAD_BYTES: Final = 64 * 1024 * 1024
MOST_MOVED: Final = 100
BUSY_S: Final = 1.0
"""To the next look for retries that are due, where there were some."""

IDLE_S: Final = 30.0
"""The longest pause between two looks; it doubles up to here while there are none."""

BATCH: Final = 32
QUEUED: Final = 64
TRIES_AFTER_S: Final = (0.0, 0.1, 0.2)
CLOSE_S: Final = 1.0

DUE: Final = Script(
    """
-- KEYS retries   ARGV now, how many, queue, its id. Those of other queues stay.
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, 1000)
local taken = {}
for _, member in ipairs(due) do
  if #taken >= tonumber(ARGV[2]) then break end
  local ok, said = pcall(cjson.decode, member)
  local internal = ok and type(said) == 'table' and said.internal
  if type(internal) == 'table' and (internal.request_queue_name == ARGV[3] or internal.queue_id == ARGV[4]) then
    redis.call('ZREM', KEYS[1], member)
    taken[#taken + 1] = member
  end
end
return taken
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One channel, and what its requests are told."""

    name: str = "requests"
    queue_id: str = "requests"
    retries: str = "retry-sortedset"
    results: str = "result-queue"
    path: str = "/v1/completions"
    route: Route | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


Waiting = tuple[str, bytes, asyncio.Future[None]]
"""A channel, a message for it, and who waits for it to be published."""


class Publisher:
    """Publishes results in batches. One that nobody takes over after three tries is lost; the store has it."""

    def __init__(self, link: RedisCommands, metrics: WorkerMetrics) -> None:
        self._link = link
        self._metrics = metrics
        self._waiting: asyncio.Queue[Waiting] = asyncio.Queue(QUEUED)
        self.stopping = asyncio.Event()
        """Set: no pauses between two tries any more."""

    async def publish(self, channel: str, message: bytes) -> None:
        """Returns once it is published, or lost."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.stopping.is_set():
            await self._sent([(channel, message, done)])
            return
        await self._waiting.put((channel, message, done))
        await done

    async def run(self) -> None:
        """Batch after batch, until cancelled."""
        while True:
            await self._sent(self._batch(await self._waiting.get()))

    async def end(self, task: "asyncio.Task[None]") -> None:
        """No pauses any more; publish what waits."""
        self.stopping.set()
        await ended(task)
        while not self._waiting.empty():
            await self._sent(self._batch(self._waiting.get_nowait()))

    def _batch(self, first: Waiting) -> list[Waiting]:
        batch = [first]
        while len(batch) < BATCH and not self._waiting.empty():
            batch.append(self._waiting.get_nowait())
        return batch

    async def _sent(self, batch: Sequence[Waiting]) -> None:
        left = list(batch)
        try:
            for pause_s in TRIES_AFTER_S:
                if pause_s:
                    await stopped_within(self.stopping, pause_s)
                said = await asyncio.gather(
                    *(self._link.do("PUBLISH", channel, message) for channel, message, _ in left),
                    return_exceptions=True,
                )
                left = [one for one, answer in zip(left, said, strict=True) if isinstance(answer, StoreUnavailable)]
                if not left:
                    return
            self._metrics.publish_failed("unconfirmed")
            log.error("results could not be published; they can be read in the store", results=len(left))
        finally:
            for _, _, done in batch:
                if not done.done():
                    done.set_result(None)


class RedisChannels:
    """Opens sessions with one channel."""

    def __init__(
        self,
        link: RedisCommands,
        *,
        url: Address,
        channel: Channel,
        store: ResultStore,
        metrics: WorkerMetrics,
        replica_id: str,
        client_name: str,
        tls: RedisTls,
        now: Callable[[], float],
    ) -> None:
        self.link = link
        self.url = url
        self.channel = channel
        self.store = store
        self.metrics = metrics
        self.replica_id = replica_id
        self.client_name = client_name
        self.tls = tls
        self.now = now

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator["ChannelTransport", None]:
        """Open a session: a connection that is subscribed."""
        try:
            async with asyncio.timeout(CONNECT_S):
                server = await url_from(self.url)
                name = self.client_name
                # In RESP2 what comes is an answer like any other.
                connection = await connect(server, None, client_name=name, tls=self.tls, within_s=CONNECT_S, resp=2)
        except (RedisError, OSError, TimeoutError, ValueError) as exc:
            raise TransportLost(reason_of(exc)) from exc
        session = ChannelTransport(self, connection)
        try:
            await session.begin()
            yield session
        finally:
            await session.end()
            await quietly(connection.disconnect(nowait=True), CLOSE_S, RedisError, OSError)


class ChannelTransport:
    """One session. See `ports.Transport`."""

    def __init__(self, channels: RedisChannels, connection: AbstractConnection) -> None:
        self._channels = channels
        self._channel = channels.channel
        self._link = channels.link
        self._store = channels.store
        self._connection = connection
        self._publisher = Publisher(channels.link, channels.metrics)
        self._limit = 0
        self._ahead: deque[Delivery] = deque()
        self._ahead_bytes = 0
        self._held: dict[int, Delivery] = {}
        self._something = asyncio.Event()
        self._look = asyncio.Event()
        self._subscribed = asyncio.Event()
        self._heard_at = 0.0
        self._publishing: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.lost = asyncio.Event()
        self.lost_because = ""

    # ------------------------------------------------------------ beginning and end

    async def begin(self) -> None:
        """Subscribe."""
        self._tasks = [
            asyncio.create_task(self._hear(), name="redis channel"),
            asyncio.create_task(self._ping(), name="redis channel pings"),
            asyncio.create_task(self._move(), name="redis channel retries"),
        ]
        self._publishing = asyncio.create_task(self._publisher.run(), name="redis channel results")
        await self._say("SUBSCRIBE", self._channel.name)
        await first_of(self._subscribed, self.lost, within_s=CONNECT_S)
        if not self._subscribed.is_set():
            self.lose("the channel could not be subscribed to")
        self._alive()

    def lose(self, why: str) -> None:
        """Nothing more is heard. What was handed up stays ours to settle: nobody else has it."""
        if not self.lost.is_set():
            self.lost_because = why
            self.lost.set()
            self._something.set()
            self._look.set()

    async def end(self) -> None:
        """Put back what nobody has received."""
        self.lose("closed by us")
        for task in self._tasks:
            await ended(task)
        if self._publishing is not None:
            await self._publisher.end(self._publishing)
        await self._put_back_all(0)

    def _alive(self) -> None:
        if self.lost.is_set():
            raise TransportLost(self.lost_because)

    # ------------------------------------------------------------ hearing

    async def _say(self, *words: str) -> None:
        try:
            packed = self._connection.pack_commands([words])
            await self._connection.send_packed_command(packed, check_health=False)
        except (RedisError, OSError) as exc:
            self.lose(f"the subscription is gone: {reason_of(exc)}")

    async def _hear(self) -> None:
        try:
            while True:
                # No limit in the driver, which would go through wait_for; a dead peer fails the ping.
                said = await self._connection.read_response(timeout=math.inf, disconnect_on_error=False)
                self._heard_at = asyncio.get_running_loop().time()
                match said:
                    case [b"subscribe", *_]:
                        self._subscribed.set()
                    case [b"message", _, bytes() as body]:
                        await self._arrived(body)
                    case _:
                        pass  # The answer to a ping.
        except (RedisError, OSError, ValueError) as exc:
            self.lose(f"the subscription is gone: {reason_of(exc)}")
        except Exception as exc:
            log.exception("the listener of the channel failed")
            self.lose(f"the listener failed: {type(exc).__name__}")

    async def _ping(self) -> None:
        while not await stopped_within(self.lost, PING_S):
            before = self._heard_at
            await self._say("PING")
            await stopped_within(self.lost, PING_S / 2)
            if self._heard_at == before:
                self.lose("the subscription does not answer")

    async def _arrived(self, body: bytes) -> None:
        """Keep a message, or put it into the set where there is no room for it."""
        try:
            envelope = self._read(body)
            delivery = self._delivery(envelope)
        except MalformedRequest as exc:
            await self._refuse(body, exc)
            return
        if len(self._ahead) >= MOST_AHEAD or self._ahead_bytes >= MOST_AHEAD_BYTES:
            await quietly(self._put_back([delivery]), CLOSE_S, StoreUnavailable)
            return
        self._ahead.append(delivery)
        self._ahead_bytes += len(delivery.body)
        self._something.set()

    def _read(self, body: bytes) -> Envelope:
        """An envelope, a bare request, or a message in our own format."""
        try:
            member = read_member(body)
        except MalformedRequest as no_envelope:
            try:
                member = read_bare(body)
            except MalformedRequest as exc:
                raise exc if exc.request_id else no_envelope from exc
        if isinstance(member, OwnMessage):
            now = self._channels.now()
            member = from_request(decode(body, message_id=None, infer_path=self._channel.path, now=now), Routing())
        channel = self._channel
        return routed(
            replace(member, kind="redis"),
            queue_id=channel.queue_id,
            queue_name=channel.name,
            result_queue_name=channel.results,
            default_result_queue_name=channel.results,
            result_ttl_seconds=0,
            labels=channel.labels,
        )

    def _delivery(self, envelope: Envelope) -> Delivery:
        return Delivery(
            body=write_envelope(envelope),
            attempts=envelope.routing.retry_count,
            queue=self._channel.name,
            message_id=envelope.request.id,
            redelivered=False,
            receipt=envelope,
            lost=asyncio.Event(),
            headers=envelope.request.metadata,
            request=to_request(envelope, path=self._channel.path, now=self._channels.now()),
            route=self._channel.route,
            labels=dict(envelope.routing.labels),
            taken_at=asyncio.get_running_loop().time(),
        )

    async def _refuse(self, body: bytes, why: MalformedRequest) -> None:
        """Skip what is no request; who can be told is told, once."""
        self._channels.metrics.settled("dead_letter", settle_s=0.0)
        log.warning(
            "a message of the channel is no request",
            reason=why.reason,
            request_id=why.request_id,
            channel=self._channel.name,
            size_bytes=len(body),
        )
        if why.request_id is None:
            return
        reply = Reply(
            request_id=why.request_id,
            status="failed",
            status_code=400,
            attempt=0,
            replica_id=self._channels.replica_id,
            finished_at=self._channels.now(),
            error=why.reason,
            error_code="invalid_request",
        )
        try:
            if isinstance(await self._store.write(reply, None, Token("")), Stored):
                message = result_json(why.request_id, NoAnswer(code="INVALID_REQUEST", text=why.reason))
                await self._publisher.publish(self._channel.results, message)
        except StoreUnavailable as exc:
            log.warning("what is no request could not be answered", reason=str(exc), request_id=why.request_id)

    # ------------------------------------------------------------ retries

    async def _move(self) -> None:
        """Take what is due, again and again: a second after there was something, more and more seldom otherwise."""
        pause_s = BUSY_S
        while not self.lost.is_set():
            self._look.clear()
            room = min(MOST_MOVED, MOST_AHEAD - len(self._ahead)) if self._limit else 0
            moved: list[bytes] = []
            if room > 0:
                channel = self._channel
                try:
                    moved = await self._link.run(
                        DUE, [channel.retries], self._channels.now(), room, channel.name, channel.queue_id
                    )
                except StoreUnavailable as exc:
                    log.warning("retries that are due cannot be looked for", reason=str(exc))
                for member in moved:
                    await self._arrived(member)
            pause_s = BUSY_S if moved else min(pause_s * 2, IDLE_S)
            await first_of(self._look, self.lost, within_s=0.0 if len(moved) == MOST_MOVED else pause_s)
            if self._look.is_set():
                pause_s = BUSY_S

    def _look_in(self, seconds: float) -> None:
        """See to it that there is a look when a retry of ours is due."""
        asyncio.get_running_loop().call_later(max(seconds, 0.0) + 0.001, self._look.set)

    async def _put(self, envelope: Envelope, delay_s: float) -> None:
        due = self._channels.now() + delay_s
        await self._link.do("ZADD", self._channel.retries, repr(due), write_envelope(envelope))
        if not self.lost.is_set():
            self._look_in(delay_s)

    async def _put_back(self, deliveries: Sequence[Delivery]) -> None:
        await asyncio.gather(*(self._put(_envelope_of(delivery), 0.0) for delivery in deliveries))

    async def _put_back_all(self, kept: int) -> None:
        """Put all but so many of those that nobody has received into the set, for whoever looks next."""
        surplus = [self._ahead.pop() for _ in range(max(len(self._ahead) - kept, 0))][::-1]
        self._ahead_bytes -= sum(len(delivery.body) for delivery in surplus)
        if surplus and not await quietly(self._put_back(surplus), CLOSE_S, StoreUnavailable):
            log.error("messages of the channel could not be put back and may be lost", messages=len(surplus))

    # ------------------------------------------------------------ consuming

    @asynccontextmanager
    async def consuming(self, limit: int) -> AsyncGenerator[None, None]:
        """See `ports.Transport`."""
        self._alive()
        self._limit = limit
        self._something.set()
        self._look.set()
        try:
            yield
        finally:
            self._limit = 0
            await self._put_back_all(0)

    async def set_limit(self, limit: int) -> None:
        """See `ports.Transport`."""
        self._alive()
        self._limit = limit
        self._something.set()
        self._look.set()

    async def receive(self) -> Delivery:
        """See `ports.Transport`."""
        while True:
            self._alive()
            if self._ahead and len(self._held) < self._limit:
                delivery = self._ahead.popleft()
                self._ahead_bytes -= len(delivery.body)
                self._held[id(delivery)] = delivery
                return delivery
            self._something.clear()
            await self._something.wait()

    async def extend(self, delivery: Delivery) -> None:
        """See `ports.Transport`. There are no leases."""
        self._alive()
        if id(delivery) not in self._held:
            raise TransportLost("the delivery is settled")

    # ------------------------------------------------------------ settling

    async def settle(self, delivery: Delivery, disposition: Disposition) -> Settlement:
        """See `ports.Transport`. Nobody but us has the message: it is settled whether the session lasts or not."""
        if id(delivery) not in self._held:
            return DeliveryLost(stored=False)
        try:
            settlement = await self._settled(_envelope_of(delivery), disposition)
        except StoreUnavailable:
            return StoreSilent()
        if isinstance(settlement, Settled):
            self._held.pop(id(delivery), None)
            self._something.set()
        return settlement

    async def _settled(self, envelope: Envelope, disposition: Disposition) -> Settlement:
        match disposition:
            case Ack(reply=reply) | DeadLetter(reply=reply):
                if (not_yet := await store_reply(self._store, disposition)) is not None:
                    return not_yet
                how: DispositionName = "ack"
                if isinstance(disposition, DeadLetter):
                    how = "dead_letter"
                    await bury(self._store, disposition, self._channels.now())
                if reply is not None:
                    await self._publisher.publish(self._channel.results, result_for(envelope, reply))
                return Settled(how=how)
            case Nack(claim=claim):
                await release(self._store, claim)
                await self._put(envelope, 0.0)
                return Settled(how="requeue")
            case Republish(delay_s=delay_s, attempts=attempts, claim=claim):
                again = replace(envelope, routing=replace(envelope.routing, retry_count=attempts))
                await self._put(again, delay_s)
                await release(self._store, claim, attempts)
                return Settled(how="retry")
            case _:
                assert_never(disposition)

    # ------------------------------------------------------------ publishing and counting

    async def publish(
        self, body: bytes, *, message_id: str | None = None, headers: Mapping[str, object] | None = None
    ) -> None:
        """See `ports.Transport`. Who listens now hears it; the id and the headers stand in the body, or nowhere."""
        self._alive()
        await self._commanded("PUBLISH", self._channel.name, body)

    async def backlog(self) -> Backlog:
        """See `ports.Transport`. The set is that of all queues; what is on its way nobody can count."""
        self._alive()
        delayed = await self._commanded("ZCARD", self._channel.retries)
        return Backlog(ready=len(self._ahead), delayed=int(delayed), in_flight=len(self._held), how="memory")

    async def _commanded(self, *words: str | bytes) -> Any:
        try:
            return await self._link.do(*words)
        except StoreUnavailable as exc:
            raise TransportLost(str(exc)) from exc


def _envelope_of(delivery: Delivery) -> Envelope:
    assert isinstance(delivery.receipt, Envelope)
    return delivery.receipt
