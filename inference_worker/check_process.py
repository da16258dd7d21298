"""`check process`: what flags and documents say, who of the neighbours is reached, and what each gate would do now.

It looks and leaves everything as it is: nothing is taken from a queue, and no gate is asked to let anything in.
Not here: what is wrong with a document (`process_setup`: it stops this as it stops a start), and the printing.
"""

import asyncio
import resource
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, assert_never

import httpx
from prometheus_client import CollectorRegistry

from inference_worker.assembly import Outside, redis_tls
from inference_worker.check import (
    CHECK_S,
    Finding,
    Report,
    failed,
    in_time,
    rabbitmq_mend,
    redis_mend,
    redis_server,
    said_of,
    status_of,
    unknown_variables,
    variables,
)
from inference_worker.check_command import show_report
from inference_worker.config.documents import GateConfig, QueueConfig, TransportConfig
from inference_worker.config.doubts import doubts, named
from inference_worker.config.gate_tree import GateTree, gate_tree
from inference_worker.config.settings import describe
from inference_worker.config.values import without_user
from inference_worker.errors import StoreUnavailable, TransportLost
from inference_worker.extensions import GROUPS
from inference_worker.gates.from_metrics import Surroundings
from inference_worker.gates.making import Around, Owner, gate_of
from inference_worker.gates.redis_gates import DrainLimit
from inference_worker.gates.saturation import Seen
from inference_worker.ports import Backlog, Gate
from inference_worker.process import gateway_tls
from inference_worker.process_extensions import Process, connect_of
from inference_worker.process_setup import ProcessSetup
from inference_worker.pubsub_values import DENIED, PubsubLink
from inference_worker.redis_modes import RedisPlace, redis_place
from inference_worker.redis_scripts import PROBE, RedisCommands, RedisLink
from inference_worker.results.memory import MemoryStore
from inference_worker.results.redis import probe_key
from inference_worker.rmq_look import look
from inference_worker.timing import ended
from inference_worker.transports.key_watch import watching
from inference_worker.transports.redis_sorted_set import SortedSetQueue, sorted_set_backlog
from inference_worker.transports.redis_streams import stream_backlog
from inference_worker.transports.stream_entries import StreamNames

READ_S: Final = 5.0
"""How long gates may take to see their numbers."""
SETTLE_S: Final = 0.5
"""How long those run that do not say that they have seen one."""
MOST_QUEUES: Final = 200
"""So many of them, and so many gates, are looked at; of other queues it is said that they were not."""
AT_ONCE: Final = 8
"""Connections to RabbitMQ, one for each queue."""
KEPT: Final = "requests, claims and results"
CLIENT: Final = "inference-worker/check"
ASKED_EACH_TIME: Final = frozenset({"redis-quota", "reservation-classifier"})
"""Gates that ask Redis of each request: there is nothing to read before one comes."""
FROM_PROMETHEUS: Final = frozenset({"prometheus-saturation", "prometheus-budget", "prometheus-query", "binary-metric"})

Rows = Callable[[], Awaitable[list[Finding]]]


async def run_check_process(
    setup: ProcessSetup, environ: Mapping[str, str], outside: Outside, *, as_json: bool, with_variables: bool
) -> int:
    """The command. 0: all is reached; 1: something is not."""
    report = await check_process(setup, environ, outside)
    return show_report(report, as_json=as_json, with_variables=with_variables)


async def check_process(setup: ProcessSetup, environ: Mapping[str, str], outside: Outside) -> Report:
    """Ask all neighbours and gates at the same time, each for at most `CHECK_S`.

    Raises:
        ConfigurationError: a file of certificates cannot be used.
    """
    tls = gateway_tls(setup)
    report = Report(findings=_configuration(setup, environ), variables=variables(setup.settings, environ), gates=[])
    async with httpx.AsyncClient(trust_env=False, verify=tls or True, timeout=CHECK_S) as client:
        links = _Links(setup)
        places = _places(setup, outside, client, links)
        asked = _neighbours(setup, client, links, places)
        stop = asyncio.Event()
        async with links.open(), asyncio.TaskGroup() as group:
            running = [group.create_task(place.gate.run(stop)) for place in places]
            asking = [group.create_task(in_time(what, ask)) for what, ask in asked]
            await _all_looked(places)
            for task in asking:
                report.findings += await task
            report.findings += [place.finding() for place in places]
            report.gates = [place.as_json() for place in places]
            for run in running:
                await ended(run)
    return report


def _configuration(setup: ProcessSetup, environ: Mapping[str, str]) -> list[Finding]:
    documents = setup.documents
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most_files == resource.RLIM_INFINITY:
        most_files = 2**31
    said = f"{len(documents.transport.queues)} queues, {len(documents.pools)} pools, {documents.merge.name}"
    return [
        Finding(what="configuration", word="ok", detail=f"{said}; {len(describe())} variables, none of them wrong"),
        *(Finding(what="flags", word="warning", detail=note) for note in setup.flags.notes),
        *unknown_variables(environ),
        *_extensions(setup),
        *(
            Finding(what=doubt.what, word="warning", detail=doubt.detail, mend=doubt.mend)
            for doubt in doubts(documents, most_files=most_files)
        ),
    ]


def _neighbours(
    setup: ProcessSetup, client: httpx.AsyncClient, links: "_Links", places: Sequence["Place"]
) -> list[tuple[str, Rows]]:
    kind = setup.documents.transport.kind
    asked: list[tuple[str, Rows]] = []
    if kind == "rabbitmq":
        asked.append(("RabbitMQ", partial(_rabbitmq, setup)))
    if kind == "sql":
        asked.append(("Postgres", partial(_postgres, setup)))
    else:
        asked.append(("Redis", partial(_redis, setup)))
    if kind == "gcp-pubsub":
        asked.append(("Pub/Sub", partial(_pubsub, setup)))
    if kind == "extension":
        asked.append((f"transport {setup.documents.transport.name}", partial(_of_another_package, setup)))
    if kind == "redis-sortedset":
        asked.append(("changes", partial(_changes, setup)))
    for url, queues in _gateways(setup).items():
        asked.append((f"gateway {without_user(url)}", partial(_gateway, client, url, queues)))
    if any(gate.gate_type in FROM_PROMETHEUS for place in places for gate in place.tree.all()):
        asked.append(("Prometheus", partial(_prometheus, client, setup.flags.prometheus_url)))
    asked += [(f"Redis of gates {without_user(url)}", partial(_gate_redis, url, link)) for url, link in links.items()]
    return asked


# ---------------------------------------------------------------- Redis, and queues in it


class _Links:
    """Connections to the Redis of gates, one for each URL."""

    def __init__(self, setup: ProcessSetup) -> None:
        self._tls = redis_tls(setup.settings)
        self._links: dict[str, RedisLink] = {}

    def to(self, url: str) -> RedisLink:
        if url not in self._links:
            self._links[url] = RedisLink(
                lambda: url, lambda: None, client_name=CLIENT, tls=self._tls, answer_s=CHECK_S - 1
            )
        return self._links[url]

    def items(self) -> list[tuple[str, RedisLink]]:
        return list(self._links.items())

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        async with AsyncExitStack() as stack:
            for link in self._links.values():
                await stack.enter_async_context(link.open())
            yield


async def _gate_redis(url: str, link: RedisLink) -> list[Finding]:
    what = f"Redis of gates {without_user(url)}"
    try:
        await link.do("PING")
    except StoreUnavailable as exc:
        return [failed(what, str(exc), f"the address of these gates; {redis_mend(str(exc))}")]
    return [Finding(what=what, word="ok", detail="answers")]


def _place_of(setup: ProcessSetup) -> AbstractAsyncContextManager[RedisPlace]:
    settings, transport = setup.settings, setup.documents.transport
    return redis_place(
        settings.redis.url_now,
        mode=transport.mode,
        addresses=transport.addresses,
        master_name=transport.master_name,
        client_name=CLIENT,
        tls=redis_tls(settings),
    )


async def _redis(setup: ProcessSetup) -> list[Finding]:
    settings = setup.settings
    async with _place_of(setup) as place:
        link = place.commands
        try:
            await link.run(PROBE, [probe_key(settings.identity.deployment_id, "check")])
        except StoreUnavailable as exc:
            return [failed("Redis", f"{settings.redis.address}: {exc}", redis_mend(str(exc)))]
        rows = await redis_server(link, settings.redis.address, KEPT)
        rows += await _memory(link)
        transport = setup.documents.transport
        match transport.kind:
            case "redis-sortedset":
                return rows + await _queues(transport.queues, partial(_sorted_set, link, place.clustered))
            case "redis-streams":
                assert isinstance(link, RedisLink)  # Only sorted sets have other modes.
                return rows + await _queues(transport.queues, partial(_stream, link, settings.streams.group))
            case "redis-pubsub":
                rows += await _retries(link, transport.retry_queue_name)
                return rows + await _queues(transport.queues, partial(_channel, link))
            case "rabbitmq" | "sql" | "gcp-pubsub" | "extension":
                return rows
            case _:
                assert_never(transport.kind)


async def _memory(link: RedisCommands) -> list[Finding]:
    """Without a limit it is the machine that runs out of memory, and then Redis is killed."""
    try:
        said = await link.do("INFO", "memory")
    except StoreUnavailable:
        return []  # Which was said.
    if b"\nmaxmemory:0\r" not in bytes(said):
        return []
    detail = "maxmemory is not set: Redis takes what the machine has, and is killed instead of refusing"
    mend = "CONFIG SET maxmemory, with as much left free for a fork"
    return [Finding(what="Redis memory", word="warning", detail=detail, mend=mend)]


async def _queues(
    queues: Sequence[QueueConfig], ask: Callable[[QueueConfig], Awaitable[list[Finding]]]
) -> list[Finding]:
    """Rows of each queue, and one for those that were left out."""
    several = await asyncio.gather(*(ask(queue) for queue in queues[:MOST_QUEUES]))
    rows = [row for rows in several for row in rows]
    if (left := len(queues) - MOST_QUEUES) > 0:
        rows.append(Finding(what="queues", word="warning", detail=f"{left} more were not looked at"))
    return rows


async def _sorted_set(link: RedisCommands, clustered: bool, queue: QueueConfig) -> list[Finding]:
    name = queue.queue_name
    there = SortedSetQueue(name=name, clustered=clustered)
    try:
        backlog = await sorted_set_backlog(link, there)
        dead = int(await link.do("XLEN", there.dead_letters))
    except StoreUnavailable as exc:
        mend = "something else is kept under its name" if "WRONGTYPE" in str(exc) else redis_mend(str(exc))
        return [failed(f"queue {queue.id}", f"{name}: {exc}", mend)]
    return [
        _backlog(queue, backlog),
        *_dead_letters(there.dead_letters, dead, f"inference-worker dlq list --sorted-set {name}"),
    ]


async def _stream(link: RedisLink, group: str, queue: QueueConfig) -> list[Finding]:
    name, dead_letters = queue.queue_name, f"{queue.queue_name}:dead"
    try:
        kind = await link.do("TYPE", name)
        if kind == b"none":
            return [Finding(what=f"queue {queue.id}", word="ok", detail=f"{name} does not exist yet: it is created")]
        if kind != b"stream":
            detail = f"{name} is a {bytes(kind).decode(errors='replace')}"
            return [failed(f"queue {queue.id}", detail, "something else is kept under its name")]
        backlog = await stream_backlog(link, StreamNames(stream=name, group=group, dead_letters=dead_letters))
        dead = int(await link.do("XLEN", dead_letters))
    except StoreUnavailable as exc:
        return [failed(f"queue {queue.id}", f"{name}: {exc}", redis_mend(str(exc)))]
    return [
        _backlog(queue, backlog),
        *_dead_letters(
            dead_letters, dead, f"IWL_STREAM={name} IWL_DLQ_STREAM={dead_letters} inference-worker dlq list"
        ),
    ]


async def _retries(link: RedisCommands, name: str) -> list[Finding]:
    """The set where all of what is to be tried again waits, and what a stop has left."""
    try:
        waiting = int(await link.do("ZCARD", name))
    except StoreUnavailable as exc:
        mend = "something else is kept under its name" if "WRONGTYPE" in str(exc) else redis_mend(str(exc))
        return [failed("retries", f"{name}: {exc}", mend)]
    return [Finding(what="retries", word="ok", detail=f"{name}: {waiting} wait")]


async def _channel(link: RedisCommands, queue: QueueConfig) -> list[Finding]:
    name = queue.queue_name
    try:
        _, listeners = await link.do("PUBSUB", "NUMSUB", name)
    except StoreUnavailable as exc:
        return [failed(f"queue {queue.id}", f"{name}: {exc}", redis_mend(str(exc)))]
    return [Finding(what=f"queue {queue.id}", word="ok", detail=f"{name}: {int(listeners)} listen to this channel")]


def _backlog(queue: QueueConfig, backlog: Backlog) -> Finding:
    name = queue.queue_name
    counts = (("ready", backlog.ready), ("with workers", backlog.in_flight), ("delayed", backlog.delayed))
    said = ", ".join(f"{count} {word}" for word, count in counts if count is not None)
    return Finding(what=f"queue {queue.id}", word="ok", detail=f"{name}: {said}; by {backlog.how}")


def _dead_letters(name: str, dead: int, mend: str) -> list[Finding]:
    if not dead:
        return []
    return [Finding(what="dead letters", word="warning", detail=f"{name}: {dead} dead letters", mend=mend)]


async def _pubsub(setup: ProcessSetup) -> list[Finding]:
    """Whether each subscription is there, and is one that loses nothing."""
    from inference_worker.process_pubsub import pubsub_link_of

    transport = setup.documents.transport
    try:
        async with pubsub_link_of(setup.settings) as link:
            return await _queues(transport.queues, partial(_subscription, link, transport))
    except StoreUnavailable as exc:
        return [failed("Pub/Sub", str(exc), "GOOGLE_APPLICATION_CREDENTIALS, or the identity of the workload")]


async def _subscription(link: PubsubLink, transport: TransportConfig, queue: QueueConfig) -> list[Finding]:
    from inference_worker.process_pubsub import pubsub_names

    what, name = f"queue {queue.id}", pubsub_names(transport, queue).subscription
    try:
        seen = await link.look(name)
    except StoreUnavailable as exc:
        if exc.code == DENIED:
            return [Finding(what=what, word="ok", detail=f"{name} may not be looked at, which pulling does not need")]
        mend = "project_id and subscriber_id, and that the subscription was created"
        if exc.code != "NOT_FOUND":
            mend = "PUBSUB_EMULATOR_HOST, or GOOGLE_APPLICATION_CREDENTIALS and the way to Google: see docs/pubsub.md"
        return [failed(what, f"{name}: {exc}", mend)]
    rows = [Finding(what=what, word="ok", detail=f"{name} of {seen.topic}: deadline {seen.ack_deadline_s} s")]
    if not seen.exactly_once:
        detail = f"{name} has no exactly-once delivery: a request may run twice where a lease has lapsed"
        rows.append(Finding(what=what, word="warning", detail=detail, mend="create it with exactly-once delivery"))
    if not seen.dead_letter_topic:
        detail = f"{name} has no dead-letter topic: what is no request is answered, and kept nowhere"
        rows.append(Finding(what=what, word="warning", detail=detail, mend="a dead-letter policy of 100 attempts"))
    return rows


async def _postgres(setup: ProcessSetup) -> list[Finding]:
    """Whether it takes writes, tells of changes and keeps what it has acknowledged, and each queue's backlog."""
    from inference_worker.process_sql import sql_place_of
    from inference_worker.sql_place import queue_channel
    from inference_worker.transports.sql import sql_backlog

    address, queues = setup.settings.sql.address, setup.documents.transport.queues

    async def one(queue: QueueConfig) -> list[Finding]:
        backlog = await sql_backlog(place.link, queue.queue_name)
        (dead,) = await place.link.row("select count(*) from iw_dead where queue = $1", queue.queue_name)
        mend = f"inference-worker dlq list --sql {queue.queue_name}"
        return [_backlog(queue, backlog), *_dead_letters(queue.queue_name, dead, mend)]

    try:
        async with sql_place_of(setup.settings, setup.documents.transport) as place:
            version, synchronous = await place.link.row(
                "select current_setting('server_version'), current_setting('synchronous_commit')"
            )
            await place.link.fetch("select iw1_want('iw_check', 'check', 1)")
            rows = [Finding(what="Postgres", word="ok", detail=f"{address}, {version}, takes writes")]
            if synchronous == "off":
                detail = "synchronous_commit is off: a crash of the server loses what it has acknowledged"
                mend = "switch it on, or have those who submit do it anew"
                rows.append(Finding(what="Postgres", word="warning", detail=detail, mend=mend))
            channel = queue_channel("check")
            with place.ears.hearing(channel, lambda _: None):
                await place.ears.stands(channel)
            return rows + await _queues(queues, one)
    except StoreUnavailable as exc:
        return [failed("Postgres", f"{address}: {exc}", _sql_mend(str(exc)))]


def _sql_mend(said: str) -> str:
    """What to do about what the driver says."""
    if "InvalidCatalogName" in said:
        return "SQL_URL: name a database that is there, or create it"
    if "Privilege" in said or "InvalidSchemaName" in said:
        return "grant its user the permissions of docs/sql.md, on a schema that is there"
    if "Authorization" in said or "InvalidPassword" in said:
        return "SQL_URL: user and password, and pg_hba.conf of the server"
    if "ReadOnly" in said:
        return "SQL_URL: name the server that takes writes, no standby"
    return "SQL_URL: is it the right address, and does Postgres run?"


async def _changes(setup: ProcessSetup) -> list[Finding]:
    try:
        async with (
            _place_of(setup) as place,
            watching(place.address, client_name=CLIENT, tls=redis_tls(setup.settings), lost=lambda _: None) as watch,
        ):
            hears = watch.hears
    except TransportLost:
        return []  # The row of Redis says why.
    if hears:
        detail = "Redis tells of changes: an idle queue costs nothing, and a request is taken up at once"
        return [Finding(what="changes", word="ok", detail=detail)]
    detail = "CLIENT TRACKING is not offered: each queue is looked at some twenty times a second"
    mend = "a Redis from 6 on, or Valkey, without a proxy between; the ACL category @connection"
    return [Finding(what="changes", word="warning", detail=detail, mend=mend)]


# ---------------------------------------------------------------- other packages


def _extensions(setup: ProcessSetup) -> list[Finding]:
    """Where what is not built in comes from, and what is never used since its name is built in."""
    others = setup.extensions
    return [
        *(
            Finding(what=f"extension {one.name}", word="ok", detail=f"{one.kind}, of {one.package} {one.version}")
            for one in others.used
        ),
        *(
            Finding(
                what=f"extension {one.name}",
                word="warning",
                detail=f"the {one.kind} of {one.package} {one.version} is not used: its name is built in",
                mend="another name for its entry point",
            )
            for kind in GROUPS
            for one in others.hidden(kind)
        ),
    ]


async def _of_another_package(setup: ProcessSetup) -> list[Finding]:
    """Whether each queue can be opened, and its backlog, by the transport's own count."""
    transport, identity = setup.documents.transport, setup.settings.identity
    process = Process(now=lambda: 0.0, replica_id=f"{identity.replica_id}/check", lease_s=setup.settings.lease_s)
    store = MemoryStore(now=process.now, lease_s=CHECK_S, ttl_s=CHECK_S)

    async def ask(queue: QueueConfig) -> list[Finding]:
        try:
            connect = connect_of(transport, queue, process, setup.extensions, store, CollectorRegistry())
            async with connect() as opened:
                backlog = await opened.backlog()
        except TransportLost as exc:
            mend = f"docs of {setup.extensions.said_of('transport', transport.name)}"
            return [failed(f"queue {queue.id}", f"{queue.queue_name}: {exc}", mend)]
        return [_backlog(queue, backlog if backlog.how else replace(backlog, how=transport.name))]

    return await _queues(transport.queues, ask)


# ---------------------------------------------------------------- RabbitMQ


async def _rabbitmq(setup: ProcessSetup) -> list[Finding]:
    rabbitmq, tls = setup.settings.rabbitmq, setup.settings.tls.context()
    few = asyncio.Semaphore(AT_ONCE)
    servers: set[str] = set()
    dead: set[int] = set()

    async def ask(queue: QueueConfig) -> list[Finding]:
        what, name = f"queue {queue.id}", queue.queue_name
        async with few:
            try:
                found = await look(
                    rabbitmq.url_now(),
                    queue=name,
                    queue_type=rabbitmq.queue_type,
                    delivery_limit=rabbitmq.delivery_limit,
                    max_priority=rabbitmq.max_priority,
                    exchange=rabbitmq.dlx,
                    dead_letter_queue=rabbitmq.dlq,
                    routing_key=rabbitmq.dlx_routing_key,
                    tls=tls,
                    within_s=CHECK_S - 1,
                )
            except (TransportLost, OSError) as exc:
                return [failed(what, f"{rabbitmq.address}: {exc}", rabbitmq_mend(str(exc)))]
        servers.add(found.server)
        dead.add(found.dead_letters)
        if "ACCESS_REFUSED" in found.queue_missing + found.queue_differs:
            said = found.queue_missing or found.queue_differs
            return [failed(what, f"{name}: {said}", "grant the permissions of docs/rabbitmq.md")]
        if found.queue_missing:
            return [Finding(what=what, word="ok", detail=f"{name} does not exist yet: it is declared")]
        if found.queue_differs:
            mend = "it is used as it is; to have it declared anew, stop all, empty and delete it"
            return [Finding(what=what, word="warning", detail=f"{name}: {found.queue_differs}", mend=mend)]
        return [_backlog(queue, Backlog(ready=found.ready, how="AMQP"))]

    rows = await _queues(setup.documents.transport.queues, ask)
    reached = [
        Finding(what="RabbitMQ", word="ok", detail=f"{rabbitmq.address}, {server}") for server in sorted(servers)
    ]
    return [*reached, *rows, *_dead_letters(rabbitmq.dlq, max(dead, default=0), "inference-worker dlq list --all")]


# ---------------------------------------------------------------- gateways, Prometheus


def _gateways(setup: ProcessSetup) -> dict[str, list[str]]:
    """The queues of each gateway."""
    found: dict[str, list[str]] = {}
    for queue in setup.documents.transport.queues:
        found.setdefault(queue.base_url.now(), []).append(queue.id)
    return found


async def _gateway(client: httpx.AsyncClient, url: str, queues: Sequence[str]) -> list[Finding]:
    """Any answer will do: what a gateway says at its root is its own affair."""
    what = f"gateway {without_user(url)}"
    try:
        status = await status_of(client, url)
    except (httpx.HTTPError, OSError) as exc:
        return [failed(what, said_of(exc), f"igw_base_url of {named(queues)}: does the gateway run there?")]
    return [Finding(what=what, word="ok", detail=f"answers (HTTP {status}); of {named(queues)}")]


async def _prometheus(client: httpx.AsyncClient, url: str) -> list[Finding]:
    what, mend = "Prometheus", "--prometheus-url: is it the right address?"
    shown = without_user(url)
    try:
        status = await status_of(client, f"{url.rstrip('/')}/api/v1/query?query=vector(1)")
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as exc:
        return [failed(what, f"{shown}: {said_of(exc)}", mend)]
    if status != 200:
        return [failed(what, f"{shown} answers HTTP {status} to a query", mend)]
    return [Finding(what=what, word="ok", detail=f"{shown} answers queries")]


# ---------------------------------------------------------------- gates


@dataclass(slots=True, kw_only=True)
class _Heard:
    """What the parts of a gate have said of their readings."""

    looks: int = 0
    """So many of them look at metrics."""
    seen: list[Seen] = field(default_factory=list)
    lent: DrainLimit | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once all have looked."""

    def note(self, seen: Seen) -> None:
        self.seen.append(seen)
        if len(self.seen) >= self.looks:
            self.done.set()

    @property
    def why_not(self) -> str:
        """Why there is no reading; empty where there is all that is needed."""
        reasons = [seen.why_not or "not said" for seen in self.seen if not seen.available]
        if len(self.seen) < self.looks:
            reasons.append(f"no answer within {READ_S:g} s")
        if self.lent is not None and not self.lent.valid:
            reasons.append("no lease that holds")
        return "; ".join(dict.fromkeys(reasons))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A gate where it stands."""

    owner: Owner
    tree: GateTree
    gate: Gate
    heard: _Heard

    def as_json(self) -> dict[str, object]:
        return {
            "place": f"{self.owner.kind} {self.owner.name}",
            "pool": self.owner.pool,
            "type": str(self.tree),
            "closes_at": self.gate.closes_at(),
            "budget": round(self.gate.budget(), 4),
            "why_not": self.heard.why_not,
        }

    def finding(self) -> Finding:
        what = f"gate of {self.owner.kind} {self.owner.name}"
        closes, budget = self.gate.closes_at().removeprefix("closed "), self.gate.budget()
        said = f"{self.tree}; closes: {closes}"
        if why_not := self.heard.why_not:
            detail = f"{said}. Now: no reading ({why_not}), so the budget is {budget:.2f}"
            return Finding(what=what, word="warning", detail=detail, mend="mend what it reads, or its fallback")
        now = f"open, budget {budget:.2f}" if budget > 0 else "closed"
        if budget > 0 and any(gate.gate_type in ASKED_EACH_TIME for gate in self.tree.all()):
            now += "; Redis is asked for each request"
        return Finding(what=what, word="ok", detail=f"{said}. Now: {now}")


def _places(setup: ProcessSetup, outside: Outside, client: httpx.AsyncClient, links: _Links) -> list[Place]:
    transport, pools = setup.documents.transport, setup.documents.pools
    owned = [
        *((queue.gate, Owner(kind="queue", name=queue.id, pool=queue.worker_pool_id)) for queue in transport.queues),
        *((pool.gate, Owner(kind="pool", name=pool.id, pool=pool.id)) for pool in pools),
    ]
    gated = [(gate, owner) for gate, owner in owned if gate is not None]
    return [_place(setup, outside, client, links, gate, owner) for gate, owner in gated[:MOST_QUEUES]]


def _place(
    setup: ProcessSetup, outside: Outside, client: httpx.AsyncClient, links: _Links, config: GateConfig, owner: Owner
) -> Place:
    heard = _Heard()

    def watched(_owner: Owner, _pool: str) -> None:
        heard.looks += 1

    def lent(_owner: Owner, limit: DrainLimit) -> None:
        heard.lent = limit

    around = Around(
        metrics=Surroundings(
            client=client,
            now=outside.now,
            chance=outside.rng.random,
            prometheus_url=setup.flags.prometheus_url,
            refresh_s=setup.flags.prometheus_cache_s,
        ),
        link_to=links.to,
        clock=asyncio.get_running_loop().time,
        process=f"{setup.settings.identity.replica_id}/check",
        seen=lambda _owner, _pool, seen: heard.note(seen),
        lent=lent,
        watched=watched,
        extensions=setup.extensions,
    )
    return Place(owner=owner, tree=gate_tree(config), gate=gate_of(config, around, owner), heard=heard)


async def _all_looked(places: Sequence[Place]) -> None:
    """Return once all gates that run have looked, or have taken too long."""
    looking = [place.heard.done.wait() for place in places if place.heard.looks]
    try:
        async with asyncio.timeout(READ_S):
            await asyncio.gather(asyncio.sleep(SETTLE_S), *looking)
    except TimeoutError:
        pass
