"""The request queue in a stream of Redis, behind the same seam as RabbitMQ. `docs/redis-streams.md` tells it to users.

A session is two connections: one waits for new entries, the other does everything else. Its consumer's name is its own,
so that "pending for this consumer" is "ours"; every settlement is one script that looks at that first. Needs a Redis,
or Valkey, that is no Cluster.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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
    Token,
)
from inference_worker.errors import StoreUnavailable, TransportLost
from inference_worker.job_records import record_key
from inference_worker.messages import KnownReply, encode_reply, known_reply
from inference_worker.metrics import WorkerMetrics
from inference_worker.ports import Backlog, Delivery, ResultStore
from inference_worker.redis_scripts import Argument, RedisLink, RedisTls, Script
from inference_worker.results.redis import DEAD_NOTE_TTL_S, claim_key, result_key
from inference_worker.settling import death_note, settle_late
from inference_worker.timing import ended, first_of, quietly, stopped_within
from inference_worker.transports.hands import MOST_BYTES, Appetite, Receipt, receipt_of
from inference_worker.transports.stream_entries import (
    RETURNED,
    Entry,
    StreamNames,
    contents_of,
    copy_of,
    delayed_key,
    entry_fields,
    letter_of,
    taken_over,
)
from inference_worker.transports.stream_reader import BlockingReader, GroupGone, reading
from inference_worker.transports.stream_scripts import (
    BACKLOG,
    CONCLUDE,
    HAND_BACK,
    KEEP,
    LEAVE,
    RETRY,
    SETTLE,
    STREAM_SCRIPTS,
    TAKE,
    TIDY,
)
from inference_worker.transports.taking import Saying, Taking

__all__ = ["RedisStreams", "StreamNames", "append", "delayed_key", "entry_fields", "stream_backlog"]

log = structlog.get_logger(__name__)

BLOCK_S: Final = 1.0
"""The longest wait for a new entry, and the longest pause between two looks at what was given back or is due."""

GROUP_PAUSE_S: Final = 0.1
UNBLOCK_S: Final = 0.5
STOP_S: Final = 1.5
"""How long a reader that nobody may unblock is waited for: its BLOCK, and some."""

CLOSE_S: Final = 1.0
"""How long each courtesy on leaving may take. Without it, what is ours comes back when its lease has lapsed."""

LOAD_S: Final = 5.0
COPY_S: Final = 30.0
"""How long a copy is tried, its deadline apart."""

COPY_PAUSE_S: Final = 0.25
BACK_IDLE_MS: Final = 86_400_000
"""The idle time of what was given back: beyond every lease."""

TIDY_S: Final = 60.0
CONSUMER_GONE_MS: Final = 600_000
MOST_AT_ONCE: Final = 1000
"""Entries in one call of a script."""

MOST_SHOWN: Final = 100
"""Retries that are shown in one go."""

SHOW_PAUSE_S: Final = 0.05


class RedisStreams:
    """Opens sessions with one stream."""

    def __init__(
        self,
        *,
        url: Callable[[], str],
        names: StreamNames,
        store: ResultStore,
        metrics: WorkerMetrics,
        deployment_id: str,
        replica_id: str,
        lease_s: float,
        ttl_s: float,
        client_name: str,
        tls: RedisTls,
        now: Callable[[], float],
    ) -> None:
        self._url = url
        self.names = names
        self.store = store
        self.metrics = metrics
        self.outbox = f"infer_usage:{deployment_id}"
        self._replica_id = replica_id
        self.lease_s = lease_s
        self.ttl_s = max(round(ttl_s), 1)
        self._client_name = client_name
        self._tls = tls
        self.now = now
        self.appetite = Appetite()
        """Outlasts the sessions: one that ended over an answer that was too large must not be followed by its like."""
        self.warnings = Saying(stream=names.stream)

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator["StreamTransport", None]:
        """Open a session: both connections and the group, or nothing."""
        consumer = f"{self._replica_id}:{secrets.token_hex(6)}"
        link = RedisLink(self._url, lambda: None, client_name=self._client_name, tls=self._tls)
        async with (
            reading(self._url, self.names, consumer, client_name=self._client_name, tls=self._tls) as reader,
            link.open(),
        ):
            session = StreamTransport(self, link, reader, consumer)
            try:
                await session.begin()
                yield session
            finally:
                session.lose("closed by us")
                await session.end()


class StreamTransport:
    """One session. See `ports.Transport`."""

    def __init__(self, streams: RedisStreams, link: RedisLink, reader: BlockingReader, consumer: str) -> None:
        self._streams = streams
        self._names = streams.names
        self._store = streams.store
        self._link = link
        self._reader = reader
        self.consumer = consumer
        self._lease_ms = round(streams.lease_s * 1000)
        self._look_s = min(BLOCK_S, streams.lease_s / 3)
        self._taking = Taking(
            "the stream", take_turn=self._take_turn, give_back=self._give_back, stop_s=STOP_S, wake=self._unblock
        )
        self._hands = self._taking.hands
        self.lost = self._taking.lost
        self._more = False
        """The last look found as much as it asked for: the next one need not wait for its time."""
        self._heard_at = 0.0
        """Loop time at which Redis last answered the reader."""
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ beginning and end

    async def begin(self) -> None:
        """Have the group, and find out whether the scripts may do what they do."""
        # Where they may not be loaded, they are sent when they are needed.
        await asyncio.gather(*(self._load(script) for script in STREAM_SCRIPTS))
        await self._create_group()
        try:
            await self._take(0)
        except StoreUnavailable as exc:
            raise TransportLost(str(exc)) from exc
        self._tasks = [
            asyncio.create_task(self._taking.read(), name="stream reader"),
            asyncio.create_task(self._keep_ours(), name="stream leases"),
        ]

    def lose(self, why: str) -> None:
        """The session is over, and with it the right to settle what came by it."""
        self._taking.lose(why)

    async def end(self) -> None:
        """Give back what is pending for us, so that nobody waits for our lease, and take the consumer away."""
        for task in self._tasks:
            await ended(task)
        leaving = self._link.run(LEAVE, [self._names.stream], self._names.group, self.consumer, RETURNED, BACK_IDLE_MS)
        await quietly(leaving, CLOSE_S, StoreUnavailable)

    async def _load(self, script: Script) -> None:
        await quietly(self._link.do("SCRIPT", "LOAD", script.source), LOAD_S, StoreUnavailable)

    async def _create_group(self) -> None:
        """From the first entry on: what was sent before the first worker came is to be done, too."""
        try:
            await self._link.do("XGROUP", "CREATE", self._names.stream, self._names.group, "0", "MKSTREAM")
        except StoreUnavailable as exc:
            # OOM: where the group exists, nothing else is in the way; where not, the reader will find out.
            if "BUSYGROUP" not in str(exc) and "OutOfMemory" not in str(exc):
                raise TransportLost(str(exc)) from exc

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
        """Give back what lies too long, take what was given back or left, then wait for new entries."""
        loop = asyncio.get_running_loop()
        self._taking.turn.clear()
        if not self._taking.consumed:
            self._taking.resting.set()
            await self._listen_for(BLOCK_S)
            return
        await self._give_back(self._hands.take_back(loop.time()))
        if loop.time() >= self._taking.look_at or (self._more and self._wanted):
            await self._look()
        wanted = self._wanted
        wait_s = max(self._taking.look_at - loop.time(), 0.001)
        if self._taking.turn.is_set() or not self._taking.consumed:
            return
        if not wanted:
            await self._listen_for(wait_s)
            return
        if self._more:
            return
        read = await self._reader.read(wanted, wait_s)
        self._heard_at = loop.time()
        if isinstance(read, GroupGone):
            self._streams.warnings.say("the stream or its group has gone; it is made anew")
            await stopped_within(self.lost, GROUP_PAUSE_S)  # Somebody may go on destroying it.
            await self._create_group()
        else:
            self._streams.warnings.well("the stream or its group has gone; it is made anew")
            self._arrived(read, redelivered=False)

    async def _listen_for(self, seconds: float) -> None:
        """Wait until there is something to do, and see meanwhile whether the connection is still there."""
        loop = asyncio.get_running_loop()
        await first_of(self._taking.turn, self.lost, within_s=seconds)
        if loop.time() - self._heard_at >= BLOCK_S and not self.lost.is_set():
            await self._reader.ping()
            self._heard_at = loop.time()

    @property
    def _wanted(self) -> int:
        return self._streams.appetite.portion(self._hands.wanted)

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            due_in_s = await self._take(self._wanted)
        except StoreUnavailable as exc:
            self._streams.warnings.say("what was given back or is due cannot be looked at", str(exc))
            due_in_s, self._more = self._look_s, False
        else:
            self._streams.warnings.well("what was given back or is due cannot be looked at")
        self._taking.look_at = loop.time() + min(due_in_s, self._look_s)

    async def _take(self, wanted: int) -> float:
        """Show what is due, take up to `wanted` entries that nobody has any more; seconds to the next that is due."""
        names = self._names
        wait_ms, gone, rows = await self._link.run(
            TAKE,
            [names.stream, delayed_key(names.stream), names.dead_letters],
            *(names.group, self.consumer, self._lease_ms, wanted, MOST_SHOWN, MOST_BYTES),
        )
        if gone:
            log.warning("entries were deleted while they were pending", entries=gone, stream=names.stream)
        entries = taken_over(rows)
        self._more = len(entries) + gone >= wanted or sum(entry.size_bytes for entry in entries) >= MOST_BYTES
        self._arrived(entries, redelivered=True)
        # What is due and was not shown must wait for memory, or its turn.
        return BLOCK_S if wait_ms < 0 else wait_ms / 1000 or SHOW_PAUSE_S

    def _arrived(self, entries: Sequence[Entry], *, redelivered: bool) -> None:
        self._streams.appetite.saw([entry.size_bytes for entry in entries])
        for entry in entries:
            self._hands.put(self._delivery(entry, redelivered))
        if entries:
            self._taking.something.set()

    def _delivery(self, entry: Entry, redelivered: bool) -> Delivery:
        said = contents_of(entry.fields)
        if said.odd_attempt:
            log.warning("an entry's attempt is no whole number and counts as 0", entry_id=entry.entry_id)
        return Delivery(
            body=said.body,
            attempts=said.attempts,
            queue=self._names.stream,
            message_id=said.message_id,
            redelivered=redelivered,
            receipt=Receipt(
                entry_id=entry.entry_id,
                count=entry.count,
                fields=entry.fields,
                read_at=asyncio.get_running_loop().time(),
                size_bytes=entry.size_bytes,
            ),
            lost=asyncio.Event(),
            headers=said.headers,
        )

    async def _unblock(self) -> None:
        """End the reader's wait for new entries."""
        if self._reader.blocked and self._reader.client_id is not None:
            unblocking = self._link.do("CLIENT", "UNBLOCK", self._reader.client_id)
            await quietly(unblocking, UNBLOCK_S, StoreUnavailable)

    async def _give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Give back what was not received. Where Redis does not answer, it comes back when our lease has lapsed."""
        for start in range(0, len(deliveries), MOST_AT_ONCE):
            receipts = [receipt_of(delivery) for delivery in deliveries[start : start + MOST_AT_ONCE]]
            pairs = (part for receipt in receipts for part in (receipt.entry_id, receipt.count))
            giving = self._link.run(
                HAND_BACK,
                [self._names.stream],
                *(self._names.group, self.consumer, RETURNED, BACK_IDLE_MS, "", self._lease_ms, *pairs),
            )
            await quietly(giving, CLOSE_S, StoreUnavailable)

    # ------------------------------------------------------------ keeping

    async def _keep_ours(self) -> None:
        """Three times a lease: have it run anew for all that is in our hands."""
        loop = asyncio.get_running_loop()
        tidy_at = loop.time()
        while not await stopped_within(self.lost, self._streams.lease_s / 3):
            try:
                await self._extend(self._hands.everything())
                if loop.time() >= tidy_at:
                    tidy_at = loop.time() + TIDY_S
                    await self._tidy()
            except StoreUnavailable as exc:
                self._streams.warnings.say("the leases of entries could not be renewed", str(exc))
            except Exception:  # A fault of ours costs a turn, not the leases of all that runs.
                log.exception("the leases of entries could not be renewed")
            else:
                self._streams.warnings.well("the leases of entries could not be renewed")

    async def _extend(self, receipts: Sequence[Receipt]) -> None:
        """Keep these, and have those known as lost that are not ours any more."""
        for start in range(0, len(receipts), MOST_AT_ONCE):
            counts = {receipt.entry_id: receipt.count for receipt in receipts[start : start + MOST_AT_ONCE]}
            pairs = (part for pair in counts.items() for part in pair)
            lost = await self._link.run(KEEP, [self._names.stream], self._names.group, self.consumer, *pairs)
            for name in lost:
                self._hands.drop(name.decode(), counts[name.decode()])
            if lost:
                self._taking.dropped()

    async def _tidy(self) -> None:
        try:
            await self._link.run(TIDY, [self._names.stream], self._names.group, RETURNED, CONSUMER_GONE_MS)
        except StoreUnavailable as exc:
            # They are in nobody's way.
            log.debug("old consumers could not be removed", reason=str(exc))

    async def extend(self, delivery: Delivery) -> None:
        """See `ports.Transport`."""
        await self._taking.extend(delivery, lambda: self._extend([receipt_of(delivery)]))

    # ------------------------------------------------------------ settling

    async def settle(self, delivery: Delivery, disposition: Disposition) -> Settlement:
        """See `ports.Transport`."""
        return await self._taking.settle(delivery, disposition, self._settle_ours, self._settle_late)

    async def _settle_ours(self, delivery: Delivery, disposition: Disposition) -> Settlement:
        match disposition:
            case Ack() | DeadLetter():
                return await self._conclude(delivery, disposition)
            case Nack(claim=claim):
                return await self._requeue(delivery, claim)
            case Republish():
                return await self._retry(delivery, disposition)
            case _:
                assert_never(disposition)

    async def _settle_late(self, disposition: Disposition) -> Settlement:
        """The session is over."""
        return await settle_late(self._store, disposition, self._streams.now())

    async def _conclude(self, delivery: Delivery, disposition: Ack | DeadLetter) -> Settlement:
        """Result, usage event, dead letter and acknowledgement: one step."""
        names, receipt = self._names, receipt_of(delivery)
        letter = self._letter(receipt, disposition) if isinstance(disposition, DeadLetter) else ()
        reply = disposition.reply
        how: DispositionName = "dead_letter" if isinstance(disposition, DeadLetter) else "ack"
        keys = [names.stream, names.dead_letters]
        try:
            if reply is None:
                (said,) = await self._link.run(SETTLE, keys, *self._right_to(delivery), *letter)
                return self._settled(receipt, said, how, stored=False)
            event = disposition.usage_event if isinstance(disposition, Ack) else None
            request_id = reply.request_id
            note = (
                death_note(request_id, disposition, self._streams.now()) if isinstance(disposition, DeadLetter) else b""
            )
            keys += [result_key(request_id), claim_key(request_id), self._streams.outbox, f"infer_dead:{request_id}"]
            answer = await self._link.run(
                CONCLUDE,
                keys,
                *self._right_to(delivery),
                *(disposition.claim.token if disposition.claim is not None else "", encode_reply(reply)),
                *(self._streams.ttl_s, reply.status, event or b"", record_key(request_id), note, DEAD_NOTE_TTL_S),
                *letter,
            )
        except StoreUnavailable as exc:
            return self._unclear(receipt, exc)
        if answer[0] == b"STORED":
            return self._settled(receipt, answer[1], how, stored=True)
        return _not_stored(answer)

    async def _retry(self, delivery: Delivery, disposition: Republish) -> Settlement:
        """The copy and the end of the original are one step, tried until it is done, or the time for it is over."""
        names, receipt, claim = self._names, receipt_of(delivery), disposition.claim
        loop = asyncio.get_running_loop()
        until = loop.time() + min(COPY_S, max(disposition.left_s, 0.0))
        keys = [names.stream, delayed_key(names.stream), result_key(claim.request_id), claim_key(claim.request_id)]
        while not self.lost.is_set():
            try:
                answer = await self._link.run(
                    RETRY,
                    keys,
                    *self._right_to(delivery),
                    *(claim.token, disposition.attempts, self._lease_ms, round(disposition.delay_s * 1000)),
                    *copy_of(receipt.fields, disposition.attempts),
                )
            except StoreUnavailable as exc:
                self._unclear(receipt, exc)
                self._streams.metrics.publish_failed("unconfirmed")
                if loop.time() >= until:
                    return await self._requeue(delivery, claim)
                await first_of(self.lost, within_s=COPY_PAUSE_S)
                continue
            if answer[0] == b"DONE" and disposition.delay_s > 0:
                await self._taking.look_in(disposition.delay_s)
            if answer[0] in (b"DONE", b"GONE", b"THEIRS"):
                return self._settled(receipt, answer[0], "retry", stored=False)
            return _not_stored(answer)
        return await self._settle_late(disposition)

    async def _requeue(self, delivery: Delivery, claim: Hold | None) -> Settlement:
        """Give it back, uncounted; where Redis does not answer, by letting go: then it is back after the lease."""
        names, receipt = self._names, receipt_of(delivery)
        keys = [names.stream]
        if claim is not None:
            keys += [result_key(claim.request_id), claim_key(claim.request_id)]
        token = claim.token if claim is not None else Token("")
        group, entry_id, consumer, count = self._right_to(delivery)
        for _ in range(2):  # Once more, as the link opens its connection anew.
            try:
                back = await self._link.run(
                    HAND_BACK,
                    keys,
                    *(group, consumer, RETURNED, BACK_IDLE_MS, token, self._lease_ms, entry_id, count),
                )
            except StoreUnavailable as exc:
                self._unclear(receipt, exc)
                continue
            await self._taking.look_in(0.0)
            return Settled(how="requeue") if back or receipt.unclear else DeliveryLost(stored=False)
        return Settled(how="requeue") if consumer else DeliveryLost(stored=False)

    def _right_to(self, delivery: Delivery) -> tuple[str, str, str, int]:
        """What a script is told to see for itself whether the entry is ours; of a delivery that we let go it is not."""
        receipt = receipt_of(delivery)
        return self._names.group, receipt.entry_id, self.consumer if self._hands.holds(delivery) else "", receipt.count

    def _settled(self, receipt: Receipt, said: bytes, how: DispositionName, *, stored: bool) -> Settlement:
        if said == b"DONE" or (said == b"GONE" and receipt.unclear):
            return Settled(how=how)
        return DeliveryLost(stored=stored)

    def _unclear(self, receipt: Receipt, exc: StoreUnavailable) -> StoreSilent:
        receipt.unclear = True
        self._streams.warnings.say(
            "an entry could not be settled; it is tried again", str(exc), entry_id=receipt.entry_id
        )
        return StoreSilent()

    def _letter(self, receipt: Receipt, letter: DeadLetter) -> list[bytes]:
        notes = {
            "reason": letter.reason,
            "detail": letter.detail[:1000],
            "attempts": str(letter.attempts),
            "status_code": str(letter.status_code),
            "died_at": f"{self._streams.now():.6f}",
            "queue": self._names.stream,
        }
        return letter_of(receipt.fields, {name.encode(): value.encode() for name, value in notes.items()})

    # ------------------------------------------------------------ publishing and counting

    async def publish(
        self, body: bytes, *, message_id: str | None = None, headers: Mapping[str, object] | None = None
    ) -> None:
        """See `ports.Transport`. Whether it was done is not known where it raises."""
        self._taking.alive()
        try:
            await append(self._link, self._names, body, message_id, enqueued_at=self._streams.now(), headers=headers)
        except StoreUnavailable as exc:
            raise TransportLost(str(exc)) from exc

    async def backlog(self) -> Backlog:
        """See `ports.Transport`."""
        self._taking.alive()
        try:
            return await stream_backlog(self._link, self._names)
        except StoreUnavailable as exc:
            raise TransportLost(str(exc)) from exc


async def append(
    link: RedisLink,
    names: StreamNames,
    body: bytes,
    message_id: str | None,
    *,
    enqueued_at: float,
    headers: Mapping[str, object] | None = None,
) -> str:
    """Put a new entry into the stream; its id.

    Raises: StoreUnavailable: it is not known whether it is there.
    """
    fields: list[Argument] = [*entry_fields(body, message_id, enqueued_at=enqueued_at, headers=headers)]
    entry_id = await link.do("XADD", names.stream, "*", *fields)
    return bytes(entry_id).decode()


async def stream_backlog(link: RedisLink, names: StreamNames) -> Backlog:
    """Count what waits, without a session. Raises `StoreUnavailable`."""
    never, returned, in_flight, delayed, how, *oldest, now_ms = await link.run(
        BACKLOG, [names.stream, delayed_key(names.stream)], names.group, RETURNED
    )
    ages_s = [max(now_ms / 1000 - float(since), 0.0) for since in oldest if since]
    return Backlog(
        ready=never + returned,
        delayed=delayed,
        in_flight=in_flight,
        oldest_s=max(ages_s) if ages_s else None,
        how=how.decode(),
    )


def _not_stored(answer: Sequence[Any]) -> Known | Busy:
    if answer[0] == b"BUSY":
        return Busy(left_s=int(answer[1]) / 1000)
    if len(answer) > 1:
        return Known(reply=known_reply(bytes(answer[1])))
    return Known(reply=KnownReply(status="completed", status_code=200))
