"""The `process` command: many queues, gates and pools around the engine that a sidecar has once.

A pool is a listener over its queues made one; gates stand before queues and pools; one client calls all gateways.
Not here: what the documents say (`process_setup.py`), and how a queue is opened (`process_queues.py`).
"""

import asyncio
import gc
import random
import resource
import signal
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import httpx
import structlog

from inference_worker.addressing import Addressing
from inference_worker.assembly import (
    MOST_HELD_BYTES,
    Beside,
    OnSignal,
    Outside,
    Page,
    Stores,
    Worker,
    client_name,
    redis_tls,
    stores_in,
    tracer_of,
)
from inference_worker.config.documents import PoolConfig, ProcessDocuments, QueueConfig
from inference_worker.config.doubts import doubts
from inference_worker.config.settings import Settings
from inference_worker.errors import ConfigurationError, StoreUnavailable
from inference_worker.gates.from_metrics import Surroundings
from inference_worker.gates.making import Around, Owner, gate_of
from inference_worker.llmd_retry import UntilDeadline
from inference_worker.metrics import WorkerMetrics, version
from inference_worker.model_client import HttpModelClient
from inference_worker.peer import Peer
from inference_worker.pool_gate import PoolGate
from inference_worker.pools import Pool
from inference_worker.ports import Fleet, Gate, Tracer
from inference_worker.process_queues import HAND_BACK, Broker, policy_of, route_of, sources
from inference_worker.process_setup import ProcessSetup, later
from inference_worker.process_status import Standing
from inference_worker.process_status import links as queue_links
from inference_worker.redis_modes import RedisPlace, redis_place
from inference_worker.redis_scripts import RedisLink
from inference_worker.routed_model import RoutedModel
from inference_worker.timing import ByteBudget, stopped_within
from inference_worker.transports.merged import MergedQueues, saw
from inference_worker.transports.merged_source import MOST_WAITING_BYTES

log = structlog.get_logger(__name__)

SHARERS_S: Final = 5.0
"""How often it is looked how many processes take from the same pools."""


class Links:
    """Connections to Redis that gates ask over, one for each URL. They open with the first question."""

    def __init__(self, setup: ProcessSetup) -> None:
        self._name = client_name(setup.settings)
        self._tls = redis_tls(setup.settings)
        self._links: dict[str, RedisLink] = {}

    def to(self, url: str) -> RedisLink:
        """The connection to a URL."""
        if url not in self._links:
            self._links[url] = RedisLink(lambda: url, lambda: None, client_name=self._name, tls=self._tls)
        return self._links[url]

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        """All that were asked for by now."""
        async with AsyncExitStack() as stack:
            for link in self._links.values():
                await stack.enter_async_context(link.open())
            yield


class Sharers:
    """How many processes take from a pool: gates share its capacity out among them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._count = 1

    def __call__(self) -> int:
        """As last seen; 1 at least."""
        return self._count

    async def run(self, until: asyncio.Event) -> None:
        """Look now and then. While nobody answers the last count holds."""
        while not until.is_set():
            with suppress(StoreUnavailable):
                self._count = max(len(await self._fleet.members()), 1)
            await stopped_within(until, SHARERS_S)


@asynccontextmanager
async def process(setup: ProcessSetup, outside: Outside) -> AsyncGenerator[Worker, None]:
    """A process with its connections, which are closed at the end."""
    settings, documents = setup.settings, setup.documents
    tls = gateway_tls(setup)
    budget = ByteBudget(MOST_HELD_BYTES)
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(_redis(setup))
        stores = await stack.enter_async_context(stores_in(place, settings))
        stores = replace(stores, fleet_of=partial(_fleet_of, stores, settings.identity.deployment_id))
        model = await stack.enter_async_context(_gateways(setup, outside, budget, tls))
        looking = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, verify=tls or True))
        links = Links(setup)
        peer, standing = Peer(documents), Standing(documents, model)
        tracer = peer.notes(tracer_of(settings, documents.transport.kind, _queue_ids(documents)))
        around = Around(
            metrics=Surroundings(
                client=looking,
                now=outside.now,
                chance=outside.rng.random,
                prometheus_url=setup.flags.prometheus_url,
                refresh_s=setup.flags.prometheus_cache_s,
            ),
            link_to=links.to,
            clock=asyncio.get_running_loop().time,
            process=process_name(settings, outside.rng),
            seen=lambda _owner, _pool, _seen: None,
            lent=lambda _owner, _limit: None,
        )
        parts = Parts(
            setup=setup,
            outside=outside,
            stores=stores,
            place=place,
            around=peer.around(around),
            peer=peer,
            standing=standing,
            tracer=tracer,
        )
        # One without queues has nothing to do, which is warned of.
        made = [parts.pool(config) for config in documents.pools if setup.queues_of(config.id)]
        await stack.enter_async_context(links.open())
        pools = [one.pool for one in made]
        yield Worker(
            settings,
            outside,
            stores=stores,
            pools=pools,
            model=model,
            budget=budget,
            tls=settings.tls.context(),
            tracer=tracer,
            page=Page(
                host=settings.ops.host,
                ports={"--health-port": setup.flags.health_port, "--metrics-port": setup.flags.metrics_port},
                links=queue_links,
                metrics=peer.page({pool.name: pool.metrics.registry for pool in pools}),
                status=standing.status,
                one_model=False,
            ),
            beside=[run for one in made for run in one.beside],
            asks_health=False,
            infer_timeout_s=setup.flags.request_timeout_s,
            grace_s=setup.flags.drain_timeout_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A pool, and what runs beside it."""

    pool: Pool
    beside: Sequence[Beside]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What pools are made of."""

    setup: ProcessSetup
    outside: Outside
    stores: Stores
    place: RedisPlace
    around: Around
    peer: Peer
    standing: Standing
    tracer: Tracer
    waiting: ByteBudget = field(default_factory=lambda: ByteBudget(MOST_WAITING_BYTES))
    """What waits unstarted, of all pools together."""

    def pool(self, config: PoolConfig) -> Made:
        """One pool: its queues with their gates, made one; its own gate; and how its requests are sent."""
        flags, documents, outside = self.setup.flags, self.setup.documents, self.outside
        metrics = WorkerMetrics()
        queues = self.setup.queues_of(config.id)
        sharers = Sharers(self.stores.fleet_of(config.id))
        at_queues, at_pool = self._gates(config, queues, sharers)
        broker = self._broker(metrics)
        merged = MergedQueues(
            sources(broker, queues, at_queues, documents.merge),
            partial(policy_of, documents.merge, outside.rng),
            now=outside.now,
            rng=outside.rng,
            replica_id=self.setup.settings.identity.replica_id,
            tier_label=documents.merge.tier_label,
            gate_wait_s=flags.gate_wait_timeout_s,
            told=self.peer.verdict,
            waiting=self.waiting,
        )
        gate = None
        if at_pool is not None:
            told = self.peer.at_pool(config.id)
            gate = PoolGate(at_pool, outside.rng, wait_s=flags.gate_wait_timeout_s, told=told)
        pool = Pool(
            name=config.id,
            connect=self.peer.followed(config.id, merged.connect),
            slots=config.workers,
            policy=UntilDeadline(on_ladder=documents.transport.kind == "rabbitmq"),
            retry_statuses=flags.statuses.judged("retry"),
            answer_statuses=flags.statuses.judged("answer"),
            metrics=metrics,
            tracer=self.tracer,
            breaker_failures=_breaker_failures(self.setup.settings),
            hand_back=HAND_BACK,
            gate=gate,
            addressing=Addressing(stamps=documents.merge.stamps, tier_label=documents.merge.tier_label),
            saw=saw,
            one_of_several=True,
        )
        backlog = self.peer.backlog(config.id, flags.backlog_poll_interval_s, broker.due(queues))
        running = [gate.run for gate in (*at_queues.values(), at_pool) if gate is not None]
        return Made(pool=pool, beside=[backlog.run, *running, *([sharers.run] if running else [])])

    def _gates(
        self, config: PoolConfig, queues: Sequence[QueueConfig], sharers: Sharers
    ) -> tuple[dict[str, Gate], Gate | None]:
        """Those of the queues, by their ids, and that of the pool."""
        around = replace(self.around, metrics=replace(self.around.metrics, sharers=sharers))
        at_queues = {
            queue.id: gate_of(queue.gate, around, Owner(kind="queue", name=queue.id, pool=config.id))
            for queue in queues
            if queue.gate is not None
        }
        at_pool = None
        if config.gate is not None:
            at_pool = gate_of(config.gate, around, Owner(kind="pool", name=config.id, pool=config.id))
        self.peer.stand(config.id, at_queues, at_pool)
        self.standing.stand(config.id, at_queues, at_pool)
        return at_queues, at_pool

    def _broker(self, metrics: WorkerMetrics) -> Broker:
        settings = self.setup.settings
        return Broker(
            settings=settings,
            transport=self.setup.documents.transport,
            store=self.stores.results,
            place=self.place,
            metrics=metrics,
            now=self.outside.now,
        )


def process_name(settings: Settings, rng: random.Random) -> str:
    """A name that no other process has, nor had this one before it began anew: what that one has taken under its name
    would count as this one's, and a quota be passed over once more with each start.
    """
    return f"{settings.identity.deployment_id}/{settings.identity.replica_id}/{rng.randrange(16**8):08x}"


def _queue_ids(documents: ProcessDocuments) -> dict[str, str]:
    return {queue.queue_name: queue.id for queue in documents.transport.queues}


def _breaker_failures(settings: Settings) -> int:
    """Off unless it is asked for: a gateway that sheds for a while is a gate's business, and not every failure's."""
    health = settings.health
    return health.breaker_failures if "breaker_failures" in health.model_fields_set else 0


def _fleet_of(stores: Stores, deployment_id: str, pool: str) -> Fleet:
    # Its keys share a slot, for where there are any.
    return stores.fleet_of(f"{{{deployment_id}/{pool}}}")


def _redis(setup: ProcessSetup) -> AbstractAsyncContextManager[RedisPlace]:
    settings, transport = setup.settings, setup.documents.transport
    return redis_place(
        settings.redis.url_now,
        mode=transport.mode,
        addresses=transport.addresses,
        master_name=transport.master_name,
        client_name=client_name(settings),
        tls=redis_tls(settings),
    )


# ---------------------------------------------------------------- gateways


@asynccontextmanager
async def _gateways(
    setup: ProcessSetup, outside: Outside, budget: ByteBudget, tls: ssl.SSLContext | None
) -> AsyncGenerator[RoutedModel, None]:
    settings, model = setup.settings, setup.settings.model

    def client(base_url: str) -> HttpModelClient:
        return HttpModelClient(
            lambda: base_url,
            now=outside.now,
            budget=budget,
            max_response_bytes=model.max_response_bytes,
            api_key=model.api_key_now,
            tls=tls,
            health_path=model.health_path,
            ttft_header=settings.metrics.ttft_header,
            tbt_header=settings.metrics.tbt_header,
        )

    routes = (route_of(queue, "") for queue in setup.documents.transport.queues)
    async with RoutedModel([route.base_url for route in routes], client) as routed:
        yield routed


def gateway_tls(setup: ProcessSetup) -> ssl.SSLContext | None:
    """What gateways and metric sources are reached with, by the flags or else by the environment.

    Raises:
        ConfigurationError: a file is not there, or not what it should be.
    """
    flags = setup.flags
    if not (flags.tls_ca_cert or flags.tls_cert or flags.tls_skip_verify):
        return setup.settings.tls.context()
    problems: list[str] = []
    context = ssl.create_default_context()
    if flags.tls_ca_cert:
        try:
            context.load_verify_locations(flags.tls_ca_cert)
        except (OSError, ValueError) as exc:
            problems.append(f"--tls-ca-cert: {flags.tls_ca_cert} cannot be read: {exc}; accepted: a PEM file")
    if flags.tls_cert:
        try:
            context.load_cert_chain(flags.tls_cert, flags.tls_key, password="")
        except (OSError, ValueError) as exc:
            text = f"--tls-cert, --tls-key: {flags.tls_cert} and {flags.tls_key} cannot be used: {exc}"
            problems.append(f"{text}; accepted: a PEM file each, the key not encrypted")
    if problems:
        raise ConfigurationError(tuple(problems))
    if flags.tls_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


async def run_process(setup: ProcessSetup, outside: Outside, stop: asyncio.Event, on_signal: OnSignal) -> None:
    """The `process` command: until told to stop. The signals are those of `run`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    for note in (*setup.flags.notes, *later(setup.flags)):
        log.warning(note)
    for doubt in doubts(setup.documents, most_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
        log.warning("probably not meant", what=doubt.what, detail=doubt.detail, mend=doubt.mend)
    settings, documents = setup.settings, setup.documents
    log.info(
        "starting",
        version=version(),
        replica_id=settings.identity.replica_id,
        transport=documents.transport.kind,
        broker=settings.rabbitmq.address if documents.transport.kind == "rabbitmq" else settings.redis.address,
        redis=settings.redis.address,
        queues=len(documents.transport.queues),
        pools={pool.id: pool.workers for pool in documents.pools},
        merge=documents.merge.type,
    )
    async with process(setup, outside) as running:
        on_signal(signal.SIGUSR1, running.toggle_pause)
        on_signal(signal.SIGUSR2, running.toggle_debug)
        await running.run(stop)
