"""A queue in a schema of Postgres of a test's own: producers, sessions, and a look at all that is in it."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from inference_worker.assembly import Outside
from inference_worker.llmd_messages import PublicRequest, Routing, new_envelope, write_envelope
from inference_worker.metrics import WorkerMetrics
from inference_worker.process import process
from inference_worker.process_setup import read_setup
from inference_worker.results.sql import SqlStore
from inference_worker.sql_link import SqlTls
from inference_worker.sql_place import SqlPlace, sql_place
from inference_worker.transports.sql import SqlQueue, SqlQueues, SqlTransport, place_message
from tests.process_rig import ProcessDocuments

QUEUE = SqlQueue()
DEPLOYMENT = "d"
REPLICA = "replica"


@dataclass(frozen=True, kw_only=True)
class Lying:
    """Where the copies of requests are, by their id."""

    queued: Counter[str]
    claimed: Counter[str]
    delayed: Counter[str]
    dead: Counter[str]

    @property
    def copies(self) -> Counter[str]:
        """That are still to be worked on."""
        return self.queued + self.claimed + self.delayed


class SqlQueueKit:
    """One queue in one schema: a store with connections of its own, and sessions."""

    def __init__(self, url: str, place: SqlPlace, *, lease_s: float, queue: SqlQueue) -> None:
        self.url = url
        self.place = place
        self.link = place.link
        self.lease_s = lease_s
        self.queue = queue
        self.metrics = WorkerMetrics()
        self.store = self.store_at(place)

    def store_at(self, place: SqlPlace, ttl_s: float = 3600) -> SqlStore:
        return SqlStore(place, deployment_id=DEPLOYMENT, replica_id="r", lease_s=self.lease_s, ttl_s=ttl_s)

    @asynccontextmanager
    async def session(
        self,
        url: str = "",
        *,
        queue: SqlQueue | None = None,
        lease_s: float | None = None,
        poll_interval_s: float = 1.0,
        now: Callable[[], float] = time.time,
    ) -> AsyncGenerator[SqlTransport]:
        """A session over connections of its own, through a proxy if `url` says so."""
        async with place_at(url or self.url) as place:
            opening = self.sessions(place, queue=queue, lease_s=lease_s, poll_interval_s=poll_interval_s, now=now)
            async with opening.connect() as transport:
                yield transport

    def sessions(
        self,
        place: SqlPlace,
        *,
        queue: SqlQueue | None = None,
        lease_s: float | None = None,
        poll_interval_s: float = 1.0,
        now: Callable[[], float] = time.time,
    ) -> SqlQueues:
        """What opens sessions, one after the other."""
        return SqlQueues(
            place,
            queue=queue or self.queue,
            store=self.store_at(place),
            metrics=self.metrics,
            replica_id=REPLICA,
            lease_s=lease_s or self.lease_s,
            now=now,
            poll_interval_s=poll_interval_s,
        )

    async def add(self, body: bytes, message_id: str | None = None, queue: str = "") -> None:
        """A message, in an envelope or our own format."""
        await place_message(self.link, queue or self.queue.name, body, message_id, now=time.time())

    async def submit(
        self, request_id: str, token: str = "t0", *, deadline: int | None = None, queue: str = "", **routing: Any
    ) -> None:
        """An envelope; `routing` are fields of `Routing`."""
        await self.add(envelope(request_id, token, deadline=deadline, **routing), queue=queue)

    async def rows(self, statement: str, *arguments: object) -> list[Any]:
        return list(await self.link.fetch(statement, *arguments))

    async def results(self, route: str = "result-sql") -> list[dict[str, Any]]:
        """What lies on a route, in the order in which it came."""
        return [
            json.loads(row[0])
            for row in await self.rows("select body from iw_results where route = $1 order by seq", route)
        ]

    async def inside(self) -> Lying:
        """Look everywhere."""
        rows = await self.rows("select body, owner is not null, due is not null from iw_requests order by seq")
        return Lying(
            queued=Counter(id_in(body) for body, held, delayed in rows if not held and not delayed),
            claimed=Counter(id_in(body) for body, held, _ in rows if held),
            delayed=Counter(id_in(body) for body, _, delayed in rows if delayed),
            dead=Counter(id_in(row[0]) for row in await self.rows("select body from iw_dead")),
        )


def envelope(request_id: str, token: str = "t0", *, deadline: int | None = None, **routing: Any) -> bytes:
    """A message as producers write it."""
    payload = b'{ "model":"m", "n": 1.50, "text":"\xc3\xbc" }'
    until = int(time.time()) + 600 if deadline is None else deadline
    request = PublicRequest(id=request_id, created=int(time.time()), deadline=until, payload=payload)
    return write_envelope(new_envelope(request, Routing(request_token=token, **routing)))


def id_in(body: bytes) -> str:
    """Whose a row is; its first bytes where that cannot be read."""
    try:
        said = json.loads(body)
        return str(said["data"]["id"] if "data" in said else said["request_id"])
    except (ValueError, KeyError, TypeError):
        return body[:20].decode(errors="replace")


@asynccontextmanager
async def place_at(url: str, most_connections: int = 10) -> AsyncGenerator[SqlPlace]:
    """Connections of a test's own."""
    async with sql_place(
        lambda: url, client_name="test", tls=SqlTls(), most_connections=most_connections, sweeps=False
    ) as place:
        yield place


@asynccontextmanager
async def sql_queue_at(url: str, *, lease_s: float = 0.6, queue: SqlQueue = QUEUE) -> AsyncGenerator[SqlQueueKit]:
    """The queue in the schema that `url` names."""
    async with place_at(url) as place:
        yield SqlQueueKit(url, place, lease_s=lease_s, queue=queue)


@asynccontextmanager
async def processing_sql(
    url: str,
    *,
    queues: Sequence[Mapping[str, object]],
    pools: Sequence[Mapping[str, object]] | None = None,
    transport: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    seed: int = 1,
) -> AsyncGenerator[SqlQueueKit, None]:
    """`inference-worker process` over this schema, in this process; and a look at its first queue."""
    documents = ProcessDocuments(url=url, queues=queues, pools=pools, kind="sql", transport=transport or {})
    given, texts = documents.given()
    rng = random.Random(seed)
    setup = read_setup(given, dict(environ or {}), texts.__getitem__, rng)
    stop = asyncio.Event()
    name = documents.queue_names[0]
    async with (
        sql_queue_at(url, queue=SqlQueue(name=name)) as kit,
        process(setup, Outside(now=time.time, rng=rng)) as running,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(running.worker.run(stop))
        try:
            yield kit
        finally:
            stop.set()
