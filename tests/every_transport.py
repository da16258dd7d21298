"""Queues of `process` over each transport, in the same words: what it is told, how they are filled, what is in them.

    async with rabbit_queues(rabbitmq_url, redis_url, ["work"]) as queues:
        told = queues.told("http://127.0.0.1:8000")
        await queues.put("work", ["a", "b"])

For what is run over all of them. Not here: the cases of a single transport, which its own kit has (`sql_kit.py`,
`stream_kit.py`, …).
"""

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, get_args

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection
from redis.asyncio import Redis as RedisClient
from redis.exceptions import ResponseError

from inference_worker.pubsub_link import pubsub_link
from inference_worker.pubsub_values import Pulled
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.retry_ladder import LADDER_S, rungs_up_to
from inference_worker.transports.redis_streams import append
from inference_worker.transports.sorted_set_members import SortedSetQueue
from inference_worker.transports.stream_entries import StreamNames, delayed_key
from tests.conservation import drain_queue, outbox, request_id_of
from tests.in_process import request_body
from tests.process_rig import PACE, RESULTS, envelope
from tests.pubsub_kit import Subscribed, bare, subscribed
from tests.sql_kit import SqlQueueKit, sql_queue_at
from tests.waiting import eventually

Transport = Literal["redis-sortedset", "redis-streams", "rabbitmq", "sql", "gcp-pubsub"]
TRANSPORTS: Final[tuple[Transport, ...]] = get_args(Transport)

DEPLOYMENT: Final = "every"
GROUP: Final = "workers"
LASTS_S: Final = 3600.0
"""How far off the deadlines are."""

NAMED: Final[Mapping[str, str]] = {"DEPLOYMENT_ID": DEPLOYMENT}

MOST_DELAY_S: Final = 64.0
"""Beyond the longest wait between two tries."""

AT_ONCE: Final = 100
PUBSUB_PAGE: Final = 1000
PUBSUB_LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What `inference-worker process` is told; or, where there are no flags, `inference-worker run`."""

    flags: Mapping[str, str]
    environ: Mapping[str, str]
    modules: tuple[str, ...]
    """What it loads for this transport alone."""

    def arguments(self) -> list[str]:
        """The command line after `process`."""
        return [f"--{name}={value}" for name, value in self.flags.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is there when no worker is left."""

    results: Mapping[str, Sequence[str]]
    """By request, what was said of its end, as JSON: as often as it was said."""
    dead: Counter[str]
    """Dead letters by request."""
    billed: Sequence[tuple[str, str]]
    """Usage events that were not sent: their id, and their request."""
    left: Mapping[str, int]
    """What should not be there any more, by where it is."""


class Queues(Protocol):
    """Some queues over one transport."""

    repeats: bool
    """Whether a result may be said more than once, and a dead letter: where nobody can take back what was published."""
    lease_s: float
    """How long a request is hidden that was in the hands of a worker that is dead, at least."""
    lease_again_s: float
    """And of one that is tried again."""

    def told(self, base_url: str, *, quick: bool = False, **flags: str) -> Told:
        """Of a process over all of them. `quick`: with short leases."""
        ...

    async def put(self, queue: str, ids: Sequence[str]) -> None:
        """Put a request for each of these into a queue; once it returns, they are accepted."""
        ...

    async def ended(self) -> int:
        """How many have an end."""
        ...

    async def waiting(self) -> int:
        """How many wait, or are in a worker's hands, as far as the broker says."""
        ...

    async def found(self) -> Found:
        """Look everywhere, while no worker is there. Once: what is looked at may be taken out."""
        ...


def payload_of(request_id: str) -> dict[str, object]:
    """What the model is sent."""
    return {"model": "mock-model", "prompt": request_id, "max_tokens": 2}


def _own_body(request_id: str) -> bytes:
    body = request_body(request_id, timeout_s=LASTS_S, received_at=time.time(), payload=payload_of(request_id))
    return json.dumps(body).encode()


def _envelope(request_id: str) -> tuple[bytes, int]:
    return envelope(request_id, deadline=int(time.time() + LASTS_S), payload=payload_of(request_id))


def _flags(kind: str, document: Mapping[str, object], flags: Mapping[str, str]) -> dict[str, str]:
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    return {"transport": kind, "transport-config": json.dumps(document), **PACE, **named}


def _by_request(results: Iterable[bytes | str]) -> dict[str, list[str]]:
    said: dict[str, list[str]] = defaultdict(list)
    for one in results:
        result = json.loads(one)
        said[str(result["id"])].append(json.dumps(result, sort_keys=True))
    return said


def _bill(event: Mapping[str, object]) -> tuple[str, str]:
    data = event["data"]
    assert isinstance(data, dict)
    return str(event["id"]), str(data["request_id"])


async def _bills(redis: RedisClient) -> list[tuple[str, str]]:
    return [_bill(event) for event in await outbox(redis, DEPLOYMENT)]


async def _claims(redis: RedisClient) -> int:
    """Of requests; all of them have ended. A worker's own probe is none."""
    return len([key async for key in redis.scan_iter("infer_claim:{*", count=1000)])


async def _entries(redis: RedisClient, stream: str) -> list[dict[bytes, bytes]]:
    found: list[tuple[bytes, dict[bytes, bytes]]] = await redis.xrange(stream) or []  # type: ignore[assignment]  # As below.
    return [fields for _, fields in found]


async def _listed(redis: RedisClient) -> dict[str, list[str]]:
    found: list[bytes] = await redis.lrange(RESULTS, 0, -1)  # type: ignore[assignment]  # Bytes, as nothing is decoded.
    return _by_request(found)


@asynccontextmanager
async def _redis(url: str) -> AsyncGenerator[RedisClient]:
    async with RedisClient.from_url(url, socket_timeout=None) as redis:
        await redis.flushdb()
        yield redis


# ---------------------------------------------------------------- sorted sets of Redis


@dataclass(kw_only=True)
class SortedSets:
    """As producers of the Go library fill them."""

    url: str
    redis: RedisClient
    names: Sequence[str]
    repeats: bool = False
    lease_s: float = 0.0
    lease_again_s: float = 0.0

    def told(self, base_url: str, *, quick: bool = False, **flags: str) -> Told:
        queues = [{"queue_name": name, "igw_base_url": base_url} for name in self.names]
        lease = {"claim_lease_ttl_seconds": 1} if quick else {}
        return Told(
            flags=_flags("redis-sortedset", {"url": self.url, "queues": queues, **lease}, flags),
            environ={**NAMED, **({"CLAIM_LEASE_S": "0.5"} if quick else {})},
            modules=("inference_worker.transports.redis_sorted_set",),
        )

    async def put(self, queue: str, ids: Sequence[str]) -> None:
        async with self.redis.pipeline(transaction=False) as pipe:
            for one in ids:
                member, until = _envelope(one)
                pipe.zadd(queue, {member: until})
            await pipe.execute()

    async def ended(self) -> int:
        return await self.redis.llen(RESULTS)

    async def waiting(self) -> int:
        return sum((await self._left()).values())

    async def found(self) -> Found:
        dead: Counter[str] = Counter()
        for name in self.names:
            for fields in await _entries(self.redis, SortedSetQueue(name=name).dead_letters):
                dead[str(json.loads(fields[b"request"])["data"]["id"])] += 1
        return Found(
            results=await _listed(self.redis),
            dead=dead,
            billed=await _bills(self.redis),
            left=await self._left() | {"claims": await _claims(self.redis)},
        )

    async def _left(self) -> dict[str, int]:
        left: dict[str, int] = {}
        for name in self.names:
            waiting, claimed, owners, index, notes, delayed, retries, _ = SortedSetQueue(name=name).keys
            async with self.redis.pipeline(transaction=False) as pipe:
                for sorted_set in (waiting, index, delayed, retries):
                    pipe.zcard(sorted_set)
                for mapping in (claimed, owners, notes):
                    pipe.hlen(mapping)
                counts = await pipe.execute()
            left |= dict(zip((waiting, index, delayed, retries, claimed, owners, notes), counts, strict=True))
        return left


@asynccontextmanager
async def sorted_sets(url: str, names: Sequence[str]) -> AsyncGenerator[SortedSets]:
    async with _redis(url) as redis:
        yield SortedSets(url=url, redis=redis, names=names)


# ---------------------------------------------------------------- streams of Redis


@dataclass(kw_only=True)
class Streams:
    """In our own format; results are stored, and sent to a list."""

    url: str
    redis: RedisClient
    link: RedisLink
    names: Sequence[str]
    repeats: bool = False
    lease_s: float = 0.0
    lease_again_s: float = 0.0

    def told(self, base_url: str, *, quick: bool = False, **flags: str) -> Told:
        queues = [{"queue_name": name, "igw_base_url": base_url, "result_queue_name": RESULTS} for name in self.names]
        return Told(
            flags=_flags("redis-streams", {"url": self.url, "queues": queues}, flags),
            environ={**NAMED, "IWL_GROUP": GROUP, **({"IWL_CLAIM_IDLE_MS": "500"} if quick else {})},
            modules=("inference_worker.transports.redis_streams",),
        )

    async def put(self, queue: str, ids: Sequence[str]) -> None:
        for one in ids:
            await append(self.link, _stream(queue), _own_body(one), one, enqueued_at=time.time())

    async def ended(self) -> int:
        return await self.redis.llen(RESULTS)

    async def waiting(self) -> int:
        return sum((await self._left()).values())

    async def found(self) -> Found:
        dead: Counter[str] = Counter()
        for name in self.names:
            for fields in await _entries(self.redis, _stream(name).dead_letters):
                dead[fields[b"job_id"].decode()] += 1
        return Found(
            results=await _listed(self.redis),
            dead=dead,
            billed=await _bills(self.redis),
            left=await self._left() | {"claims": await _claims(self.redis)},
        )

    async def _left(self) -> dict[str, int]:
        left: dict[str, int] = {}
        for name in self.names:
            delayed = delayed_key(name)
            left |= {name: await self.redis.xlen(name), delayed: await self.redis.zcard(delayed)}
            with suppress(ResponseError):  # There is no group yet.
                left[f"{name}, pending"] = (await self.redis.xpending(name, GROUP))["pending"]
        return left


def _stream(name: str) -> StreamNames:
    return StreamNames(stream=name, group=GROUP, dead_letters=f"{name}:dead")


@asynccontextmanager
async def streams(url: str, names: Sequence[str]) -> AsyncGenerator[Streams]:
    link = RedisLink(lambda: url, lambda: None, client_name="test", tls=RedisTls())
    async with _redis(url) as redis, link.open():
        yield Streams(url=url, redis=redis, link=link, names=names)


# ---------------------------------------------------------------- RabbitMQ


@dataclass(kw_only=True)
class RabbitQueues:
    """In our own format; results are stored in Redis, and sent to a list there."""

    url: str
    redis_url: str
    redis: RedisClient
    connection: AbstractConnection
    channel: AbstractChannel
    names: Sequence[str]
    declared: set[str] = field(default_factory=set)
    repeats: bool = False
    lease_s: float = 1.0
    """What a worker holds is not counted, but back at once when it dies."""
    lease_again_s: float = 1.0

    @property
    def dead_letters(self) -> str:
        return f"{self.names[0]}.dead"

    @property
    def dead_letter_exchange(self) -> str:
        return f"{self.names[0]}.dlx"

    def told(self, base_url: str, *, quick: bool = False, **flags: str) -> Told:
        queues = [{"queue_name": name, "igw_base_url": base_url, "result_queue_name": RESULTS} for name in self.names]
        names = {"INFERENCE_DLX": self.dead_letter_exchange, "INFERENCE_DLQ": self.dead_letters}
        lease = {"CLAIM_LEASE_S": "0.5"} if quick else {}
        return Told(
            flags=_flags("rabbitmq", {"url": self.url, "queues": queues}, flags),
            environ={**NAMED, **names, "REDIS_URL": self.redis_url, **lease},
            modules=("inference_worker.rmq_listener",),
        )

    async def put(self, queue: str, ids: Sequence[str]) -> None:
        if queue not in self.declared:

            async def there() -> bool:
                return await self._look(queue) is not None

            await eventually(there, within=20, what=f"a worker has declared {queue}")
            self.declared.add(queue)
        for start in range(0, len(ids), AT_ONCE):
            await asyncio.gather(*(self._put(queue, one) for one in ids[start : start + AT_ONCE]))

    async def _put(self, queue: str, request_id: str) -> None:
        message = aio_pika.Message(_own_body(request_id), delivery_mode=aio_pika.DeliveryMode.PERSISTENT)

        async def accepted() -> bool:
            try:
                await self.channel.default_exchange.publish(message, routing_key=queue, mandatory=True)
            except aio_pika.exceptions.DeliveryError:
                return False  # Just declared, a quorum queue may have no leader yet, and refuses.
            return True

        await eventually(accepted, within=20, what=f"the broker takes {request_id}")

    async def ended(self) -> int:
        return await self.redis.llen(RESULTS)

    async def waiting(self) -> int:
        return sum([await self._look(name) or 0 for name in self.names])

    async def found(self) -> Found:
        dead = Counter(request_id_of(message) for message in await drain_queue(self.url, self.dead_letters))
        left = {queue: await self._look(queue) or 0 for queue in self.everything()}
        return Found(
            results=await _listed(self.redis),
            dead=dead,
            billed=await _bills(self.redis),
            left=left | {"claims": await _claims(self.redis)},
        )

    def everything(self) -> list[str]:
        """The queues, and those in which retries wait."""
        rungs_s = LADDER_S[: rungs_up_to(MOST_DELAY_S)]
        delays = [f"{name}.delay.{round(rung_s * 1000)}" for name in self.names for rung_s in rungs_s]
        return [*self.names, *delays]

    async def delete(self, *queues: str) -> None:
        """Of what workers declare."""
        for queue in queues:
            await self.channel.queue_delete(queue)
        await self.channel.exchange_delete(self.dead_letter_exchange)

    async def _look(self, queue: str) -> int | None:
        """How many messages are ready there; None where there is no such queue."""
        try:
            async with self.connection.channel() as channel:
                return (await channel.declare_queue(queue, passive=True)).declaration_result.message_count or 0
        except aio_pika.exceptions.ChannelNotFoundEntity:
            return None


@asynccontextmanager
async def rabbit_queues(url: str, redis_url: str, names: Sequence[str]) -> AsyncGenerator[RabbitQueues]:
    async with _redis(redis_url) as redis, await aio_pika.connect(url) as connection:
        channel = await connection.channel(on_return_raises=True)
        made = RabbitQueues(
            url=url, redis_url=redis_url, redis=redis, connection=connection, channel=channel, names=names
        )
        await made.delete(*names, made.dead_letters)
        try:
            yield made
        finally:
            await made.delete(*made.everything(), made.dead_letters)


# ---------------------------------------------------------------- Postgres


@dataclass(kw_only=True)
class SqlTables:
    """With all that belongs to them in the same schema."""

    kit: SqlQueueKit
    names: Sequence[str]
    repeats: bool = False
    lease_s: float = 0.0
    lease_again_s: float = 0.0

    def told(self, base_url: str, *, quick: bool = False, **flags: str) -> Told:
        queues = [{"queue_name": name, "igw_base_url": base_url} for name in self.names]
        pace = {"lease_ttl_seconds": 1, "poll_interval_ms": 100} if quick else {}
        return Told(
            flags=_flags("sql", {"url": self.kit.url, "queues": queues, **pace}, flags),
            environ={**NAMED, **({"CLAIM_LEASE_S": "0.5"} if quick else {})},
            modules=("inference_worker.process_sql",),
        )

    async def put(self, queue: str, ids: Sequence[str]) -> None:
        for one in ids:
            body, _ = _envelope(one)
            await self.kit.add(body, queue=queue)

    async def ended(self) -> int:
        return await self._count("iw_results")

    async def waiting(self) -> int:
        return await self._count("iw_requests")

    async def found(self) -> Found:
        events = [_bill(json.loads(row[0])) for row in await self.kit.rows("select event from iw_usage")]
        return Found(
            results=_by_request(row[0] for row in await self.kit.rows("select body from iw_results")),
            dead=(await self.kit.inside()).dead,
            billed=events,
            left={
                "iw_requests": await self.waiting(),
                "iw_state without an end": await self._count("iw_state where reply is null"),
            },
        )

    async def _count(self, of: str) -> int:
        ((count,),) = await self.kit.rows(f"select count(*) from {of}")
        return int(count)


@asynccontextmanager
async def sql_tables(url: str, names: Sequence[str]) -> AsyncGenerator[SqlTables]:
    async with sql_queue_at(url) as kit:
        yield SqlTables(kit=kit, names=names)


# ---------------------------------------------------------------- Google Cloud Pub/Sub


@dataclass(kw_only=True)
class Subscriptions:
    """A topic and a subscription for each queue; results are stored in Redis, and published."""

    kit: Subscribed
    redis_url: str
    redis: RedisClient
    names: Sequence[str]
    repeats: bool = True
    lease_s: float = 11.0
    """The deadline of these subscriptions, and one second."""
    lease_again_s: float = 61.0

    def told(self, base_url: str, *, quick: bool = False, **flags: str) -> Told:
        topics = [{"subscriber_id": name, "igw_base_url": base_url} for name in self.names]
        document = {"project_id": self.kit.queue.project, "result_topic_id": self.kit.queue.results, "topics": topics}
        lease = {"CLAIM_LEASE_S": "0.5"} if quick else {}
        return Told(
            flags=_flags("gcp-pubsub", document, flags),
            environ={**NAMED, "REDIS_URL": self.redis_url, "PUBSUB_EMULATOR_HOST": self.kit.address, **lease},
            modules=("inference_worker.process_pubsub", "inference_worker.pubsub_link"),
        )

    async def put(self, queue: str, ids: Sequence[str]) -> None:
        until = time.time() + LASTS_S
        for start in range(0, len(ids), AT_ONCE):
            some = ids[start : start + AT_ONCE]
            messages = [{"data": bare(one, deadline=until, payload=payload_of(one))} for one in some]
            await self.kit.publisher.publish(request={"topic": self._name("topics", queue), "messages": messages})

    async def ended(self) -> int:
        return len([key async for key in self.redis.scan_iter("infer_resp:*", count=1000)])

    async def waiting(self) -> int:
        """Nobody says."""
        return 0

    async def found(self) -> Found:
        dead = Counter(str(json.loads(one.data)["id"]) for one in await self._taken("dead"))
        left = {name: len(await self._taken(name)) for name in self.names}
        return Found(
            results=_by_request(one.data for one in await self._taken("results")),
            dead=dead,
            billed=await _bills(self.redis),
            left=left | {"claims": await _claims(self.redis)},
        )

    async def create(self) -> None:
        letters = {"dead_letter_topic": self.kit.dead_topic, "max_delivery_attempts": 100}
        for name in self.names:
            topic = self._name("topics", name)
            await self.kit.publisher.create_topic(name=topic)
            asked = {"name": self._name("subscriptions", name), "topic": topic, "ack_deadline_seconds": 10}
            more = {"enable_exactly_once_delivery": True, "dead_letter_policy": letters}
            await self.kit.subscriber.create_subscription(request={**asked, **more})

    async def _taken(self, name: str) -> list[Pulled]:
        """All that comes from a subscription until nothing comes for a while, acknowledged."""
        subscription, taken = self._name("subscriptions", name), list[Pulled]()
        async with pubsub_link(self.kit.address) as link:
            with suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(PUBSUB_LOOK_S):
                        came = await link.pull(subscription, PUBSUB_PAGE)
                    taken += came
                    await asyncio.gather(*(link.acknowledge(subscription, one.ack_id) for one in came))
        return taken

    def _name(self, kind: str, name: str) -> str:
        return f"projects/{self.kit.queue.project}/{kind}/{name}"


@asynccontextmanager
async def subscriptions(redis_url: str, names: Sequence[str]) -> AsyncGenerator[Subscriptions]:
    async with _redis(redis_url) as redis, subscribed(redis_url) as kit:
        made = Subscriptions(kit=kit, redis_url=redis_url, redis=redis, names=names)
        await made.create()
        yield made
