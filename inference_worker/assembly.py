"""Chooses the parts, joins them, and ends them in the right order. The `match` statements are the only registry."""

import asyncio
import gc
import random
import secrets
import signal
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeVar

import httpx
import structlog

from inference_worker import logs
from inference_worker.billing.cloudevents import usage_event
from inference_worker.billing.making import billing_sink
from inference_worker.config.settings import Settings, warnings
from inference_worker.config.values import without_user
from inference_worker.disposition import Token
from inference_worker.errors import TransportLost
from inference_worker.extensions import Extensions
from inference_worker.fleet_reporter import FleetReporter
from inference_worker.health_checker import HealthChecker
from inference_worker.listener import Listener
from inference_worker.messages import InferenceRequest, Reply, Usage
from inference_worker.metrics import WorkerMetrics, version
from inference_worker.metrics_buffer import MetricsBuffer
from inference_worker.metrics_reporter import BillingDrainer, MetricsReporter, report
from inference_worker.model_client import HttpModelClient
from inference_worker.ops_server import OpsServer
from inference_worker.pools import Pool, Shared, listener_of
from inference_worker.ports import Connect, Fleet, Health, ModelClient, Outbox, ResultStore, Tracer
from inference_worker.scraping import Gpu, ModelLoad, NotRead, scrape_gpus, scrape_model
from inference_worker.timing import ByteBudget, first_of
from inference_worker.tracing import PASSING_ON

log = structlog.get_logger(__name__)
T = TypeVar("T")

if TYPE_CHECKING:
    from inference_worker.redis_modes import RedisPlace
    from inference_worker.redis_scripts import RedisTls

MOST_HELD_BYTES: Final = 256 * 1024 * 1024
"""Message bodies and answers in memory at once, whatever their number."""

MOST_RECORDS: Final = 10_000
PAUSED: Final = "paused by an operator"
SCRAPE_S: Final = 5.0
BROKERS: Final[Mapping[str, str]] = {"rabbitmq": "rabbitmq", "redis-streams": "redis_streams", "memory": "queue"}
"""What the broker is called where it is one of several conditions."""


OpenQueue = Callable[[ResultStore, WorkerMetrics], Connect]
"""Makes of a store and the metrics the way to open connections to a queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What a worker takes from its process: the clock and chance."""

    now: Callable[[], float]
    rng: random.Random

    def new_token(self) -> Token:
        """128 random bits; from the system's source, since two workers may share a seed but never a token."""
        return Token(secrets.token_hex(16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """Where results and unsent usage events are kept, and what the workers say of themselves."""

    results: ResultStore
    outbox: Outbox
    fleet_of: Callable[[str], Fleet]
    """The workers of a queue, or of a pool, by its name."""


Listeners = Mapping[str, Listener]
"""By the names of their pools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The ops port, and what it shows beside what every worker does."""

    host: str
    ports: Mapping[str, int]
    """By the variable or the flag that says which; 0: none."""
    links: Callable[[Listeners], Mapping[str, tuple[bool, str]]]
    """By condition: whether the broker is connected, and why not."""
    metrics: Callable[[str], tuple[bytes, str]]
    """The page for an Accept header, and its content type."""
    status: Callable[[Listeners], Mapping[str, object]]
    """More about this process, for people."""
    one_model: bool = True
    """Off where there are several, whose health nobody asks."""
    store: str = "redis"
    """By condition: what has results and claims."""


Beside = Callable[[asyncio.Event], Coroutine[object, object, None]]
"""Something that runs beside the pools, until they have drained."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Serving:
    """A pool at work."""

    listener: Listener
    reporter: FleetReporter
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Until told to stop; the fleet hears of it until it has drained."""
        drained = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.reporter.run(drained), name="fleet")
                try:
                    await self.listener.run(self.stop)
                finally:
                    drained.set()
        finally:
            self.ended.set()


class Worker:
    """Pools of slots, each with its listener and processor, and what they share: health, metrics, billing, traces.

    A sidecar has one pool, over one queue and without a gate. Where there are several, they come and go while it works.
    """

    def __init__(
        self,
        settings: Settings,
        outside: Outside,
        *,
        stores: Stores,
        pools: Sequence[Pool],
        model: ModelClient,
        budget: ByteBudget,
        tls: ssl.SSLContext | None,
        tracer: Tracer,
        metrics: WorkerMetrics | None = None,
        page: Page | None = None,
        beside: Sequence[Beside] = (),
        asks_health: bool = True,
        billed_model: Callable[[InferenceRequest], str] | None = None,
        infer_timeout_s: float | None = None,
        grace_s: float | None = None,
    ) -> None:
        """`asks_health` is off where there is no one model whose health could be asked. `metrics` are those of what the
        pools share; without them, of the first pool. `billed_model` names the model of usage events, where there are
        several of them.
        """
        self._settings = settings
        self._outside = outside
        self._stores = stores
        self._tls: ssl.SSLContext | bool = tls if tls is not None else True
        self.metrics = pools[0].metrics if metrics is None else metrics
        self._billed_model = billed_model
        self._tracer = tracer
        self._budget = budget
        self._beside = beside
        self._asks_health = asks_health and settings.model.mode != "mock"
        self.model_health = Health("model")
        self.store_health = Health("store")
        self._buffer = MetricsBuffer(MOST_RECORDS, count_lost=self.metrics.records_lost)
        self._started_at = outside.now()
        self._stopping = False
        self._debugging = False
        self._paused = False
        self._scrape_said: dict[str, str] = {}
        self._shared = Shared(
            store=stores.results,
            model=model,
            model_health=self.model_health,
            store_health=self.store_health,
            buffer=self._buffer,
            budget=budget,
            usage_event=self._usage_event,
            now=outside.now,
            rng=outside.rng,
            new_token=outside.new_token,
            replica_id=settings.identity.replica_id,
            infer_path=settings.model.infer_path,
            infer_timeout_s=settings.model.infer_timeout_s if infer_timeout_s is None else infer_timeout_s,
            lease_s=settings.lease_s,
            max_crashes=settings.rabbitmq.max_crashes,
            store_patience_s=settings.redis.retry_delay_s,
            grace_s=settings.ops.shutdown_grace_s if grace_s is None else grace_s,
        )
        self.pools: dict[str, Pool] = {}
        self.listeners: dict[str, Listener] = {}
        self._serving: dict[str, Serving] = {}
        self._listening: asyncio.TaskGroup | None = None
        for pool in pools:
            self.add(pool)
        self._page = page or Page(
            host=settings.ops.host,
            ports={"WORKER_HTTP_PORT": settings.ops.port},
            links=self._link,
            metrics=self.metrics.exposition,
            status=self._status_of_one,
        )
        self.model_health.watch(self._model_changed)

    @property
    def listener(self) -> Listener:
        """The one of a sidecar."""
        return next(iter(self.listeners.values()))

    @property
    def stopping(self) -> bool:
        """It was told to stop."""
        return self._stopping

    # ------------------------------------------------------------ pools that come and go

    def add(self, pool: Pool) -> None:
        """Have a pool work: from the start, or from now on."""
        listener = listener_of(pool, self._shared)
        self.pools[pool.name], self.listeners[pool.name] = pool, listener
        if self.model_health.ok:
            self._model_of(pool, listener, True, "")
        if self._paused:
            listener.suspend_consuming("operator", PAUSED)
        serving = self._serving[pool.name] = Serving(listener=listener, reporter=self._fleet_reporter(pool, listener))
        if self._listening is not None:
            self._begin(self._listening, pool.name, serving)

    def remove(self, name: str) -> asyncio.Event:
        """Have a pool drain as at the end of all; the event is set once it has ended."""
        del self.pools[name], self.listeners[name]
        serving = self._serving.pop(name)
        serving.stop.set()
        if self._listening is None:
            serving.ended.set()
        return serving.ended

    def resize(self, name: str, slots: int) -> None:
        """Let a pool have so many slots from now on."""
        self.pools[name] = replace(self.pools[name], slots=slots)
        self.listeners[name].resize(slots)
        self._serving[name].reporter.slots = slots

    def _begin(self, group: asyncio.TaskGroup, name: str, serving: Serving) -> None:
        if self._stopping:
            serving.stop.set()
        group.create_task(serving.run(), name=f"listener of {name}")

    async def run(self, stop: asyncio.Event) -> None:
        """Until told to stop: then the listener drains, and only after that do the others end, billing last but one.

        If any of them fails, the others are cancelled, what is in hand goes back, and the failure comes out of here.
        """
        for warning in warnings(self._settings):
            log.warning(warning)
        drained = asyncio.Event()
        async with AsyncExitStack() as stack:
            scraper = await stack.enter_async_context(
                httpx.AsyncClient(trust_env=False, verify=self._tls, timeout=SCRAPE_S)
            )
            drainer = await self._drainer(stack)
            named = {port: name for name, port in self._page.ports.items() if port}
            for port, name in named.items():
                await stack.enter_async_context(self._ops_server().serving(self._page.host, port, name))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._check_health(drained), name="health checker")
                group.create_task(
                    report(self._reporter(scraper), drainer, drained), name="metrics and billing reporter"
                )
                group.create_task(self._tracer.run(drained), name="traces")
                for task in self._beside:
                    group.create_task(task(drained))
                try:
                    async with asyncio.TaskGroup() as listening:
                        for name, serving in self._serving.items():
                            self._begin(listening, name, serving)
                        self._listening = listening
                        await stop.wait()
                        self._stopping = True
                        for serving in self._serving.values():
                            serving.stop.set()
                finally:
                    self._listening = None
                    drained.set()

    # ------------------------------------------------------------ for probes and people

    def ready(self) -> Mapping[str, tuple[bool, str]]:
        """What must be true for this worker to be of use now, and what is not."""
        model = self.model_health
        return {
            **self._page.links(self.listeners),
            self._page.store: (self.store_health.ok, "" if self.store_health.ok else self.store_health.reason),
            **({"model": (model.ok, "" if model.ok else model.reason)} if self._page.one_model else {}),
            "running": (not self._stopping, "stopping" if self._stopping else ""),
        }

    def status(self) -> Mapping[str, object]:
        """What this worker is and does, for people."""
        identity = self._settings.identity
        return {
            "version": version(),
            "deployment_id": identity.deployment_id,
            "replica_id": identity.replica_id,
            **({"hf_model_id": identity.hf_model_id} if self._page.one_model else {}),
            **self._page.status(self.listeners),
            "ready": {name: ok for name, (ok, _) in self.ready().items()},
            "reasons": {name: why for name, (ok, why) in self.ready().items() if not ok},
            **({"model_checked_at": self.model_health.checked_at} if self._page.one_model else {}),
            "uptime_s": round(self._outside.now() - self._started_at, 1),
        }

    def _status_of_one(self, _: Listeners) -> Mapping[str, object]:
        listener = self.listener
        return {
            "queue": self._settings.queue,
            "state": listener.state,
            "suspended": self._suspended(listener),
            "in_flight": listener.in_flight,
            "slots": self._settings.slots,
        }

    def _suspended(self, listener: Listener) -> Mapping[str, str]:
        """Why messages do not flow, as it is now: a neighbour may be ill for another reason than at first."""
        now = {health.name: health.reason for health in (self.model_health, self.store_health) if not health.ok}
        return {reason: now.get(reason, why) for reason, why in listener.suspended.items()}

    def _link(self, _: Listeners) -> Mapping[str, tuple[bool, str]]:
        linked = self.listener.transport is not None
        why = "" if linked else self.listener.link_reason or "not connected"
        return {BROKERS[self._settings.transport.kind]: (linked, why)}

    # ------------------------------------------------------------ for operators

    def pause(self) -> None:
        """See `ops_server.Controls`."""
        log.warning(PAUSED)
        self._paused = True
        for listener in self.listeners.values():
            listener.suspend_consuming("operator", PAUSED)

    def resume(self) -> None:
        """See `ops_server.Controls`."""
        log.warning("resumed by an operator")
        self._paused = False
        for listener in self.listeners.values():
            listener.resume_consuming("operator")

    def toggle_pause(self) -> None:
        """Pause, or resume: for a signal, which can only say one thing."""
        if self._paused:
            self.resume()
        else:
            self.pause()

    def log_level(self, level: logs.Level) -> None:
        """See `ops_server.Controls`."""
        logs.set_level(level)
        log.warning("the log level was changed", to=level)

    def toggle_debug(self) -> None:
        """Log everything, or as configured: for a signal."""
        self._debugging = not self._debugging
        self.log_level("debug" if self._debugging else self._settings.log.level)

    def _exposition(self, accept: str) -> tuple[bytes, str]:
        for name, listener in self.listeners.items():
            self.pools[name].metrics.in_flight.set(listener.calls)
        self.metrics.held_bytes.set(self._budget.held_bytes)
        return self._page.metrics(accept)

    # ------------------------------------------------------------ parts

    async def _check_health(self, until: asyncio.Event) -> None:
        if self._asks_health:
            await self._health_checker().run(until)
        while not until.is_set():  # Whoever wants a look is told at once: there is nobody to ask.
            self.model_health.wanted.clear()
            self.model_health.report(True, checked_at=self._outside.now())
            await first_of(until, self.model_health.wanted)

    def _ops_server(self) -> OpsServer:
        return OpsServer(
            ready=self.ready,
            status=self.status,
            metrics=self._exposition,
            controls=self,
            token=self._settings.ops.token_now,
        )

    def _fleet_reporter(self, pool: Pool, listener: Listener) -> FleetReporter:
        identity = self._settings.identity
        return FleetReporter(
            self._stores.fleet_of(pool.name),
            listener,
            replica_id=identity.replica_id,
            slots=pool.slots,
            model=identity.hf_model_id,
            stopping=lambda: self._stopping,
            now=self._outside.now,
        )

    def _health_checker(self) -> HealthChecker:
        model = self._settings.model
        return HealthChecker(
            self.model_health,
            base_url=model.url_now,
            health_path=model.health_path,
            hf_model_id=self._settings.identity.hf_model_id,
            api_key=model.api_key_now,
            now=self._outside.now,
            interval_s=self._settings.health.interval_s,
            failure_threshold=self._settings.health.failure_threshold,
            verify=self._tls,
        )

    def _reporter(self, scraper: httpx.AsyncClient) -> MetricsReporter:
        identity, settings = self._settings.identity, self._settings.metrics
        return MetricsReporter(
            url=None if settings.url is None else settings.url.now,
            token=settings.service_token_now,
            buffer=self._buffer,
            health=self.model_health,
            metrics=self.metrics,
            scrape_model=lambda: self._model_load(scraper),
            scrape_gpus=lambda: self._gpus(scraper),
            backlog=self._ready_messages,
            now=self._outside.now,
            deployment_id=identity.deployment_id,
            replica_id=identity.replica_id,
            user_id=identity.user_id,
            org_id=identity.org_id or "",
            hf_model_id=identity.hf_model_id,
            flush_interval_s=settings.flush_interval_s,
            verify=self._tls,
        )

    async def _drainer(self, stack: AsyncExitStack) -> BillingDrainer | None:
        sink = await stack.enter_async_context(
            billing_sink(self._settings, Extensions(), now=self._outside.now, verify=self._tls)
        )
        if sink is None:
            return None
        return BillingDrainer(
            self._stores.outbox,
            sink,
            self.metrics,
            rng=self._outside.rng,
            flush_interval_s=self._settings.metrics.flush_interval_s,
        )

    def _usage_event(self, request: InferenceRequest, reply: Reply, usage: Usage) -> bytes | None:
        if not self._settings.billing.on:
            return None
        identity = self._settings.identity
        if self._billed_model is not None:
            request = replace(request, model=self._billed_model(request))
        return usage_event(
            request,
            reply,
            usage,
            deployment_id=identity.deployment_id,
            user_id=identity.user_id,
            org_id=identity.org_id or "",
            hf_model_id=identity.hf_model_id,
        )

    def _model_changed(self, ok: bool, reason: str) -> None:
        for name, listener in self.listeners.items():
            self._model_of(self.pools[name], listener, ok, reason)

    def _model_of(self, pool: Pool, listener: Listener, ok: bool, reason: str) -> None:
        pool.metrics.peer("model", ok)
        if ok:
            listener.resume_consuming("model")
        else:
            listener.suspend_consuming("model", reason)

    # ------------------------------------------------------------ what the reporter asks for

    async def _model_load(self, scraper: httpx.AsyncClient) -> ModelLoad | None:
        if not self._asks_health:
            return None
        load = await scrape_model(scraper, self._settings.vllm_metrics_url_now(), within_s=SCRAPE_S)
        return self._or_said("model", load)

    async def _gpus(self, scraper: httpx.AsyncClient) -> Sequence[Gpu]:
        url = self._settings.metrics.dcgm_url_now()
        if not url:
            return ()
        return self._or_said("GPU", await scrape_gpus(scraper, url, within_s=SCRAPE_S)) or ()

    def _or_said(self, what: str, read: T | NotRead) -> T | None:
        """What was read; of what could not be, one line per change of reason."""
        if not isinstance(read, NotRead):
            self._scrape_said.pop(what, None)
            return read
        if self._scrape_said.get(what) != read.reason:
            self._scrape_said[what] = read.reason
            log.warning("metrics could not be read", of=what, reason=read.reason)
        return None

    async def _ready_messages(self) -> int | None:
        ready: int | None = None
        for listener in list(self.listeners.values()):  # Others may come and go meanwhile.
            if listener.transport is not None:
                with suppress(TransportLost):
                    ready = (ready or 0) + (await listener.transport.backlog()).ready
        return ready


# ---------------------------------------------------------------- choosing


@asynccontextmanager
async def worker(
    settings: Settings,
    outside: Outside,
    *,
    stores: Stores | None = None,
    connect: OpenQueue | None = None,
) -> AsyncGenerator[Worker, None]:
    """A worker with its connections; they are closed at the end. `dev` brings its own store and queue."""
    tls = settings.tls.context()
    metrics = WorkerMetrics()
    budget = ByteBudget(MOST_HELD_BYTES)
    async with AsyncExitStack() as stack:
        model = await stack.enter_async_context(_model(settings, outside, budget, tls))
        kept_in = stores if stores is not None else await stack.enter_async_context(redis_stores(settings))
        open_queue = connect or queue(settings, outside, tls)
        tracer = tracer_of(settings, settings.transport.kind if connect is None else "memory")
        pool = Pool(
            name=settings.queue,
            connect=open_queue(kept_in.results, metrics),
            slots=settings.slots,
            policy=settings.retry_policy,
            retry_statuses=settings.retry_statuses,
            metrics=metrics,
            tracer=tracer,
            breaker_failures=settings.health.breaker_failures,
        )
        yield Worker(
            settings, outside, stores=kept_in, pools=(pool,), model=model, budget=budget, tls=tls, tracer=tracer
        )


@asynccontextmanager
async def _model(
    settings: Settings, outside: Outside, budget: ByteBudget, tls: ssl.SSLContext | None
) -> AsyncGenerator[ModelClient, None]:
    """The client of the model container, or the echo in its place."""
    match settings.model.mode:
        case "mock":
            from inference_worker.echo_model import EchoModel

            yield EchoModel(latency_s=settings.model.mock_latency_s, model=settings.identity.hf_model_id)
        case "vllm":
            async with HttpModelClient(
                settings.model.url_now,
                now=outside.now,
                budget=budget,
                max_response_bytes=settings.model.max_response_bytes,
                api_key=settings.model.api_key_now,
                tls=tls,
                health_path=settings.model.health_path,
                ttft_header=settings.metrics.ttft_header,
                tbt_header=settings.metrics.tbt_header,
            ) as client:
                yield client


def tracer_of(settings: Settings, system: str, queue_ids: Mapping[str, str] | None = None) -> Tracer:
    """Spans, where a collector is named; else what came with a message goes on to the model."""
    url = settings.traces.url_now()
    if url is None:
        return PASSING_ON
    from inference_worker import otlp

    identity, tls = settings.identity, settings.tls
    return otlp.tracer(
        url,
        ca_file=tls.ca_file,
        cert_file=tls.cert_file,
        key_file=tls.key_file,
        identity={
            "service.name": "inference-worker",
            "service.version": version(),
            "service.instance.id": identity.replica_id,
            "inference_worker.deployment_id": identity.deployment_id,
        },
        system=system,
        # Where there are several queues there is no one model.
        model=identity.hf_model_id if queue_ids is None else "",
        model_url=settings.model.url_now if queue_ids is None else lambda: "",
        queue_ids={} if queue_ids is None else queue_ids,
    )


@asynccontextmanager
async def redis_stores(settings: Settings) -> AsyncGenerator[Stores, None]:
    """Results and outbox in one Redis server."""
    from inference_worker.redis_modes import redis_place

    name, tls = client_name(settings), redis_tls(settings)
    async with (
        redis_place(settings.redis.url_now, mode="standalone", client_name=name, tls=tls) as place,
        stores_in(place, settings) as stores,
    ):
        yield stores


@asynccontextmanager
async def stores_in(place: "RedisPlace", settings: Settings) -> AsyncGenerator[Stores, None]:
    """Results and outbox in Redis, wherever that is."""
    from inference_worker.results.fleet import RedisFleet
    from inference_worker.results.notifications import Notifications
    from inference_worker.results.redis import RedisOutbox, RedisStore

    identity, link = settings.identity, place.commands
    told = Notifications(link, place.address, lambda: None, client_name=client_name(settings), tls=redis_tls(settings))
    async with told.open():
        yield Stores(
            results=RedisStore(
                link,
                deployment_id=identity.deployment_id,
                replica_id=identity.replica_id,
                lease_s=settings.lease_s,
                ttl_s=settings.redis.response_ttl_s,
                notifications=told,
                clustered=place.clustered,
            ),
            outbox=RedisOutbox(
                link,
                deployment_id=identity.deployment_id,
                replica_id=identity.replica_id,
                clustered=place.clustered,
            ),
            fleet_of=lambda queue: RedisFleet(link, queue=queue),
        )


def queue(settings: Settings, outside: Outside, tls: ssl.SSLContext | None) -> OpenQueue:
    """The queue that the settings name. An embedded one is brought by `dev`."""
    match settings.transport.kind:
        case "rabbitmq":
            return rabbitmq_queue(settings, outside, tls)
        case "redis-streams":
            return redis_streams_queue(settings, outside)
        case "memory":
            raise AssertionError("an embedded queue is brought along")


def redis_streams_queue(settings: Settings, outside: Outside) -> OpenQueue:
    """The request queue in a stream of Redis."""
    from inference_worker.redis_scripts import RedisTls
    from inference_worker.transports.redis_streams import RedisStreams, StreamNames

    streams, identity, tls = settings.streams, settings.identity, settings.tls

    def connect(store: ResultStore, metrics: WorkerMetrics) -> Connect:
        return RedisStreams(
            url=settings.redis.url_now,
            names=StreamNames(stream=streams.stream, group=streams.group, dead_letters=streams.dead_letters),
            store=store,
            metrics=metrics,
            deployment_id=identity.deployment_id,
            replica_id=identity.replica_id,
            lease_s=settings.lease_s,
            ttl_s=settings.redis.response_ttl_s,
            client_name=client_name(settings),
            tls=RedisTls(ca_file=tls.ca_file, cert_file=tls.cert_file, key_file=tls.key_file),
            now=outside.now,
        ).connect

    return connect


def rabbitmq_queue(settings: Settings, outside: Outside, tls: ssl.SSLContext | None) -> OpenQueue:
    """The request queue in RabbitMQ."""
    name = settings.identity.request_queue
    return lambda store, metrics: rabbitmq_connect(settings, name, store, metrics, now=outside.now, tls=tls)


def rabbitmq_connect(
    settings: Settings,
    queue_name: str,
    store: ResultStore,
    metrics: WorkerMetrics,
    *,
    now: Callable[[], float],
    tls: ssl.SSLContext | None,
) -> Connect:
    """The way to open connections to one queue of RabbitMQ."""
    from inference_worker.rmq_listener import RabbitMQ, Topology

    rabbitmq, identity = settings.rabbitmq, settings.identity
    return RabbitMQ(
        url=rabbitmq.url_now,
        topology=Topology(
            queue=queue_name,
            dead_letter_exchange=rabbitmq.dlx,
            dead_letter_queue=rabbitmq.dlq,
            dead_letter_routing_key=rabbitmq.dlx_routing_key,
            queue_type=rabbitmq.queue_type,
            delivery_limit=rabbitmq.delivery_limit,
            max_priority=rabbitmq.max_priority,
        ),
        store=store,
        metrics=metrics,
        name=f"{identity.deployment_id}/{identity.replica_id}",
        tls=tls,
        now=now,
    ).connect


def client_name(settings: Settings) -> str:
    """A name that CLIENT SETNAME takes: no spaces, nothing outside of ASCII."""
    name = f"inference-worker/{settings.identity.deployment_id}/{settings.identity.replica_id}"
    return "".join(c if "!" <= c <= "~" else "_" for c in name)[:200]


def redis_tls(settings: Settings) -> "RedisTls":
    """The files that connections to Redis are made with."""
    from inference_worker.redis_scripts import RedisTls

    return RedisTls(ca_file=settings.tls.ca_file, cert_file=settings.tls.cert_file, key_file=settings.tls.key_file)


OnSignal = Callable[[signal.Signals, Callable[[], None]], None]
"""Has a function called at a signal; the doors know how."""


async def run_worker(settings: Settings, outside: Outside, stop: asyncio.Event, on_signal: OnSignal) -> None:
    """The `run` command: until told to stop. SIGUSR1 pauses and resumes, SIGUSR2 switches the debug log on and off."""
    # What is loaded by now stays for ever, and a request makes hardly any cycles: looking for them after every few of
    # its objects, as is the default, costs some percent of each.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    log.info(
        "starting",
        version=version(),
        deployment_id=settings.identity.deployment_id,
        replica_id=settings.identity.replica_id,
        transport=settings.transport.kind,
        queue=settings.queue,
        broker=settings.queue_address,
        redis=settings.redis.address,
        model="a mock" if settings.model.mode == "mock" else without_user(settings.model.url_now()),
        slots=settings.slots,
    )
    async with worker(settings, outside) as sidecar:
        on_signal(signal.SIGUSR1, sidecar.toggle_pause)
        on_signal(signal.SIGUSR2, sidecar.toggle_debug)
        await sidecar.run(stop)
