"""A queue in a sorted set of a test's own: producers that only ZADD, sessions, and a look at all that is in it."""

import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from redis.asyncio import Redis as RedisClient

from inference_worker.llmd_messages import PublicRequest, Routing, new_envelope, write_envelope
from inference_worker.metrics import WorkerMetrics
from inference_worker.redis_scripts import Address, ClusterCommands, RedisCommands, RedisLink, RedisTls
from inference_worker.results.redis import RedisStore
from inference_worker.transports.redis_sorted_set import RedisSortedSet, SortedSetQueue, SortedSetTransport, place

QUEUE = SortedSetQueue()
DEPLOYMENT = "d"
REPLICA = "replica"


@dataclass(frozen=True, kw_only=True)
class Lying:
    """Where the copies of requests are, by their id."""

    queued: Counter[str]
    claimed: Counter[str]
    delayed: Counter[str]
    """Also those in the retry set of all queues."""
    dead: Counter[str]
    owners: int
    indexed: int
    notes: int

    @property
    def copies(self) -> Counter[str]:
        """That are still to be worked on."""
        return self.queued + self.claimed + self.delayed


class SortedSets:
    """One queue in one database, or on a Cluster: a store with a link of its own, and sessions."""

    def __init__(
        self,
        url: str,
        link: RedisCommands,
        client: RedisClient,
        *,
        lease_s: float,
        queue: SortedSetQueue,
        cluster: ClusterCommands | None = None,
        address: Address | None = None,
        moved: Callable[[], int] | None = None,
    ) -> None:
        """`address` finds the server anew at each connection, where one URL does not always lead to it."""
        self.url = url
        self.link = link
        self.client = client
        self.lease_s = lease_s
        self.queue = queue
        self.metrics = WorkerMetrics()
        self.cluster = cluster
        self.address = address
        self.moved = moved
        self.store = RedisStore(
            link,
            deployment_id=DEPLOYMENT,
            replica_id="r",
            lease_s=lease_s,
            ttl_s=3600,
            clustered=cluster is not None,
        )

    @asynccontextmanager
    async def session(
        self,
        url: str = "",
        *,
        queue: SortedSetQueue | None = None,
        poll_interval_s: float = 1.0,
        now: Callable[[], float] = time.time,
        cluster: ClusterCommands | None = None,
    ) -> AsyncGenerator[SortedSetTransport]:
        """A session, through a proxy if `url` says so."""
        opening = self.sessions(url, queue=queue, poll_interval_s=poll_interval_s, now=now, cluster=cluster)
        async with opening.connect() as transport:
            yield transport

    def sessions(
        self,
        url: str = "",
        *,
        queue: SortedSetQueue | None = None,
        poll_interval_s: float = 1.0,
        now: Callable[[], float] = time.time,
        cluster: ClusterCommands | None = None,
    ) -> RedisSortedSet:
        """What opens sessions, one after the other."""
        return RedisSortedSet(
            url=self.address or (lambda: url or self.url),
            queue=queue or self.queue,
            store=self.store,
            metrics=self.metrics,
            deployment_id=DEPLOYMENT,
            replica_id=REPLICA,
            lease_s=self.lease_s,
            hold_s=self.lease_s,
            ttl_s=3600,
            client_name="test",
            tls=RedisTls(),
            now=now,
            poll_interval_s=poll_interval_s,
            cluster=cluster or self.cluster,
            moved=self.moved,
        )

    async def add(self, body: bytes, message_id: str | None = None) -> None:
        """A message in our own format."""
        await place(self.link, self.queue, body, message_id, now=time.time())

    async def submit(
        self,
        request_id: str,
        token: str = "t0",
        *,
        deadline: int | None = None,
        routing: Routing | None = None,
        queue: str | None = None,
    ) -> bytes:
        """As a producer of theirs does: the active key, and ZADD. The member."""
        routing = routing or Routing(request_token=token)
        member = envelope(request_id, deadline=deadline, routing=routing)
        until = deadline or _later()
        await self.client.set(f"request-active:{request_id}", routing.request_token, pxat=max(until, 1) * 1000)
        await self.client.zadd(queue or self.queue.name, {member: until})
        return member

    async def scored(self, name: str) -> list[tuple[bytes, float]]:
        """The members of a sorted set and their scores, lowest first."""
        found: list[tuple[bytes, float]] = await self.client.zrange(name, 0, -1, withscores=True)  # type: ignore[assignment]  # Pairs, by `withscores`.
        return found

    async def results(self, name: str = "result-list") -> list[dict[str, object]]:
        """What lies in a result list, in the order in which it came."""
        found: list[bytes] = await self.client.lrange(name, 0, -1)  # type: ignore[assignment]  # Bytes, as nothing is decoded.
        return [json.loads(result) for result in reversed(found)]

    async def inside(self) -> Lying:
        """Look everywhere."""
        client = self.client
        name, claimed_key, owners, index, notes, delayed_key, retries, dead_letters = self.queue.keys
        claimed: dict[bytes, bytes] = await client.hgetall(claimed_key)  # type: ignore[assignment]  # Bytes, as nothing is decoded.
        letters: list[tuple[bytes, dict[bytes, bytes]]] = await client.xrange(dead_letters) or []  # type: ignore[assignment]  # As above.
        delayed = [*await client.zrange(delayed_key, 0, -1), *await client.zrange(retries, 0, -1)]
        return Lying(
            queued=Counter(map(id_in, await client.zrange(name, 0, -1))),
            claimed=Counter(map(id_in, claimed.values())),
            delayed=Counter(map(id_in, delayed)),
            dead=Counter(id_in(fields[b"request"]) for _, fields in letters),
            owners=await client.hlen(owners),
            indexed=await client.zcard(index),
            notes=await client.hlen(notes),
        )


def envelope(request_id: str, *, deadline: int | None = None, routing: Routing | None = None) -> bytes:
    """A member as producers of theirs write it."""
    payload = b'{ "model":"m", "n": 1.50, "text":"\xc3\xbc" }'
    request = PublicRequest(id=request_id, created=int(time.time()), deadline=deadline or _later(), payload=payload)
    return write_envelope(new_envelope(request, routing or Routing(request_token="t0")))


def id_in(member: object) -> str:
    """Whose a member is; its first bytes where that cannot be read."""
    assert isinstance(member, bytes)
    try:
        said = json.loads(member)
        return str(said["data"]["id"] if "data" in said else said["request_id"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return member[:20].decode(errors="replace")


def _later() -> int:
    return int(time.time()) + 600


@asynccontextmanager
async def sorted_sets_at(
    url: str, *, lease_s: float = 0.6, queue: SortedSetQueue = QUEUE
) -> AsyncGenerator[SortedSets]:
    """The queue in the database that `url` names."""
    link = RedisLink(lambda: url, lambda: None, client_name="test", tls=RedisTls())
    async with link.open(), RedisClient.from_url(url, socket_timeout=None) as client:
        yield SortedSets(url, link, client, lease_s=lease_s, queue=queue)
