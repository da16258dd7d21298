"""A stream of a test's own, with sessions and a look at everything that is in it."""

import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from redis.asyncio import Redis as RedisClient
from redis.exceptions import ResponseError

from inference_worker.metrics import WorkerMetrics
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.results.redis import RedisStore
from inference_worker.transports.redis_streams import RedisStreams, StreamNames, StreamTransport, append, delayed_key

NAMES = StreamNames(stream="inference:jobs", group="workers", dead_letters="inference:dlq")
DEPLOYMENT = "d"


@dataclass(frozen=True, kw_only=True)
class Inside:
    """Where the copies of requests are, by `job_id`."""

    stream: Counter[str]
    """All entries, in hands or not."""
    delayed: Counter[str]
    dead: Counter[str]
    pending: Counter[str]
    """Entries by the consumer that holds them."""

    @property
    def copies(self) -> Counter[str]:
        """That are still to be worked on."""
        return self.stream + self.delayed


class Streams:
    """One queue in one database: a store with a link of its own, and sessions."""

    def __init__(self, url: str, link: RedisLink, client: RedisClient, *, lease_s: float) -> None:
        self.url = url
        self.link = link
        self.client = client
        self.lease_s = lease_s
        self.store = RedisStore(link, deployment_id=DEPLOYMENT, replica_id="r", lease_s=lease_s, ttl_s=3600)

    @asynccontextmanager
    async def session(self, url: str = "", replica: str = "replica") -> AsyncGenerator[StreamTransport, None]:
        """A session, through a proxy if `url` says so."""
        streams = RedisStreams(
            url=lambda: url or self.url,
            names=NAMES,
            store=self.store,
            metrics=WorkerMetrics(),
            deployment_id=DEPLOYMENT,
            replica_id=replica,
            lease_s=self.lease_s,
            ttl_s=3600,
            client_name="test",
            tls=RedisTls(),
            now=time.time,
        )
        async with streams.connect() as transport:
            yield transport

    async def add(self, body: bytes, message_id: str | None = None, **headers: object) -> str:
        """A new entry; its id."""
        return await append(self.link, NAMES, body, message_id, enqueued_at=time.time(), headers=headers)

    async def inside(self) -> Inside:
        """Look everywhere."""
        return await look_inside(self.client)


@asynccontextmanager
async def streams_at(url: str, *, lease_s: float = 0.6) -> AsyncGenerator[Streams, None]:
    """The queue in the database that `url` names."""
    link = RedisLink(lambda: url, lambda: None, client_name="test", tls=RedisTls())
    async with link.open(), RedisClient.from_url(url, socket_timeout=None) as client:
        yield Streams(url, link, client, lease_s=lease_s)


async def look_inside(client: RedisClient) -> Inside:
    """Where everything is, in a database."""

    async def ids(stream: str) -> Counter[str]:
        return Counter(fields.get(b"job_id", b"").decode() for _, fields in await entries_of(client, stream))

    members: list[bytes] = await client.zrange(delayed_key(NAMES.stream), 0, -1)  # type: ignore[assignment]  # Bytes, as nothing is decoded.
    delayed = Counter(_job_of(member) for member in members)
    pending: Counter[str] = Counter()
    with suppress(ResponseError):  # There is no group.
        for row in await client.xpending_range(NAMES.stream, NAMES.group, "-", "+", 100_000):
            consumer = row["consumer"]
            assert isinstance(consumer, bytes)
            pending[consumer.decode()] += 1
    return Inside(stream=await ids(NAMES.stream), delayed=delayed, dead=await ids(NAMES.dead_letters), pending=pending)


async def entries_of(client: RedisClient, stream: str) -> list[tuple[str, dict[bytes, bytes]]]:
    """All entries of a stream."""
    found: list[tuple[bytes, dict[bytes, bytes]]] = await client.xrange(stream) or []  # type: ignore[assignment]  # As above.
    return [(entry_id.decode(), fields) for entry_id, fields in found]


def _job_of(member: bytes) -> str:
    """A delayed retry is packed by Redis; the name of the field stands right before its value, which is short."""
    value = member[member.index(b"job_id") + len(b"job_id") :]
    size = value[0] & 0x1F if value[0] < 0xC0 else value[1]
    start = 1 if value[0] < 0xC0 else 2
    return value[start : start + size].decode()
