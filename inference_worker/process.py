"""The `process` command: many queues, gates and pools around the engine that a sidecar has once.

A pool is a listener over its queues made one; gates stand before queues and pools; one client calls all gateways.
Not here: what the documents say (`process_setup.py`), how a queue is opened (`process_queues.py`), and how pools are
made and become others (`process_pools.py`, `process_reload.py`).
"""

import asyncio
import gc
import random
import resource
import signal
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import httpx
import structlog

from inference_worker.assembly import (
    MOST_HELD_BYTES,
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
from inference_worker.config.documents import ProcessDocuments
from inference_worker.config.doubts import Doubt, doubts
from inference_worker.config.settings import Settings
from inference_worker.errors import ConfigurationError
from inference_worker.gates.from_metrics import Surroundings
from inference_worker.gates.making import Around
from inference_worker.metrics import version
from inference_worker.model_client import HttpModelClient
from inference_worker.peer import Peer
from inference_worker.ports import Fleet
from inference_worker.process_pools import Parts, ProcessPools
from inference_worker.process_queues import Broker
from inference_worker.process_reload import Reloading
from inference_worker.process_setup import ProcessSetup, documents_again
from inference_worker.process_status import Standing
from inference_worker.process_status import links as queue_links
from inference_worker.redis_modes import RedisPlace, redis_place
from inference_worker.redis_scripts import RedisLink
from inference_worker.routed_model import RoutedModel
from inference_worker.timing import ByteBudget
from inference_worker.transforms.making import transforms_of
from inference_worker.transforms.model_name import asked_text
from inference_worker.transforms.shaping import Shaping

if TYPE_CHECKING:
    from inference_worker.sql_place import SqlPlace

log = structlog.get_logger(__name__)


class Doubts:
    """Warns of what documents say and probably do not mean, of each once."""

    def __init__(self) -> None:
        self._said: set[Doubt] = set()

    def look(self, documents: ProcessDocuments) -> None:
        """Warn of what was not there before."""
        found = doubts(documents, most_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        for doubt in found:
            if doubt not in self._said:
                log.warning("probably not meant", what=doubt.what, detail=doubt.detail, mend=doubt.mend)
        self._said = set(found)


class Links:
    """Connections to Redis that gates ask over, one for each URL. They open with the first question."""

    def __init__(self, setup: ProcessSetup) -> None:
        self._name = client_name(setup.settings)
        self._tls = redis_tls(setup.settings)
        self._links: dict[str, RedisLink] = {}
        self._opened: set[str] = set()
        self._stack = AsyncExitStack()

    def to(self, url: str) -> RedisLink:
        """The connection to a URL."""
        if url not in self._links:
            self._links[url] = RedisLink(lambda: url, lambda: None, client_name=self._name, tls=self._tls)
        return self._links[url]

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        """All of them until the end; those that are asked for later once they are opened, too."""
        async with self._stack:
            yield

    async def open_new(self) -> None:
        """Those that were asked for since. Nobody is waited for."""
        for url in self._links.keys() - self._opened:
            await self._stack.enter_async_context(self._links[url].open())
            self._opened.add(url)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that is ready to run."""

    worker: Worker
    reloading: Reloading
    """Runs beside the worker."""


@asynccontextmanager
async def process(setup: ProcessSetup, outside: Outside) -> AsyncGenerator[Process, None]:
    """A process with its connections, which are closed at the end."""
    settings, documents = setup.settings, setup.documents
    tls = gateway_tls(setup)
    budget = ByteBudget(MOST_HELD_BYTES)
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(_redis(setup))
        sql = await _sql(setup, stack)
        if sql is None:
            stores = await stack.enter_async_context(stores_in(place, settings))
        else:
            stores = _sql_stores(sql, settings)
        stores = replace(stores, fleet_of=partial(_fleet_of, stores, settings.identity.deployment_id))
        model = await stack.enter_async_context(_gateways(setup, outside, budget, tls))
        looking = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, verify=tls or True))
        links = Links(setup)
        await stack.enter_async_context(links.open())
        peer, standing = Peer(documents), Standing(documents, model)
        queue_ids: dict[str, str] = {}
        around = Around(
            metrics=Surroundings(
                client=looking,
                now=outside.now,
                chance=outside.rng.random,
                prometheus_url=setup.flags.prometheus_url,
                refresh_s=setup.flags.prometheus_cache_s,
            ),
            link_to=links.to,
            sql=sql,
            extensions=setup.extensions,
            clock=asyncio.get_running_loop().time,
            process=process_name(settings, outside.rng),
            seen=lambda _owner, _pool, _seen: None,
            lent=lambda _owner, _limit: None,
        )
        parts = Parts(
            flags=setup.flags,
            outside=outside,
            replica_id=settings.identity.replica_id,
            stores=stores,
            broker_of=lambda metrics: Broker(
                settings=settings,
                transport=documents.transport,
                store=stores.results,
                place=place,
                sql=sql,
                extensions=setup.extensions,
                metrics=metrics,
                now=outside.now,
                names=queue_ids.keys(),
            ),
            model=model,
            around=peer.around(around),
            open_links=links.open_new,
            peer=peer,
            standing=standing,
            tracer=peer.notes(tracer_of(settings, documents.transport.name, queue_ids)),
            queue_ids=queue_ids,
            shaping=Shaping(transforms=transforms_of(documents, setup.extensions)),
            breaker_failures=_breaker_failures(settings),
        )
        pools, doubting = ProcessPools(parts, documents), Doubts()
        doubting.look(documents)

        async def become(now: ProcessDocuments) -> Sequence[str]:
            changes = await pools.change(now)
            doubting.look(now)
            return changes

        reloading = Reloading(
            partial(documents_again, setup),
            become,
            lambda result: peer.reloaded(result, outside.now()),
            read_file=setup.read_file,
            paths=setup.paths,
            fingerprint=setup.fingerprint,
            interval_s=setup.flags.watch_interval_s,
        )
        worker = Worker(
            settings,
            outside,
            stores=stores,
            pools=(),
            model=model,
            budget=budget,
            tls=settings.tls.context(),
            tracer=parts.tracer,
            metrics=pools.metrics,
            page=Page(
                host=settings.ops.host,
                ports={"--health-port": setup.flags.health_port, "--metrics-port": setup.flags.metrics_port},
                links=queue_links,
                metrics=peer.page(pools.registries),
                status=standing.status,
                one_model=False,
                store="redis" if sql is None else "postgres",
            ),
            beside=[pools.alongside.run, reloading.run],
            asks_health=False,
            billed_model=asked_text,  # The caller's name, not the one inside: it is the caller's usage.
            infer_timeout_s=setup.flags.request_timeout_s,
            grace_s=setup.flags.drain_timeout_s,
        )
        await pools.begin(worker, documents)
        yield Process(worker=worker, reloading=reloading)


def process_name(settings: Settings, rng: random.Random) -> str:
    """A name that no other process has, nor had this one before it began anew: what that one has taken under its name
    would count as this one's, and a quota be passed over once more with each start.
    """
    return f"{settings.identity.deployment_id}/{settings.identity.replica_id}/{rng.randrange(16**8):08x}"


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


async def _sql(setup: ProcessSetup, stack: AsyncExitStack) -> "SqlPlace | None":
    """The Postgres that has queues and results, where it is one. Its driver is loaded only then."""
    if setup.documents.transport.kind != "sql":
        return None
    from inference_worker.process_sql import sql_place_of

    return await stack.enter_async_context(sql_place_of(setup.settings, setup.documents.transport))


def _sql_stores(place: "SqlPlace", settings: Settings) -> Stores:
    from inference_worker.process_sql import sql_stores

    return sql_stores(place, settings)


def _broker_address(setup: ProcessSetup) -> str:
    """Where the queues are, as it may be logged."""
    settings = setup.settings
    match setup.documents.transport.kind:
        case "rabbitmq":
            return settings.rabbitmq.address
        case "sql":
            return settings.sql.address
        case "gcp-pubsub":
            return settings.pubsub.emulator or f"projects/{setup.documents.transport.project}"
        case _:
            return settings.redis.address


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

    async with RoutedModel((), client) as routed:
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
    """The `process` command: until told to stop. The signals are those of `run`; SIGHUP reads the documents again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    for note in setup.flags.notes:
        log.warning(note)
    settings, documents = setup.settings, setup.documents
    log.info(
        "starting",
        version=version(),
        replica_id=settings.identity.replica_id,
        transport=documents.transport.name,
        broker=_broker_address(setup),
        store=_broker_address(setup) if documents.transport.kind == "sql" else settings.redis.address,
        queues=len(documents.transport.queues),
        pools={pool.id: pool.workers for pool in documents.pools},
        merge=documents.merge.name,
    )
    async with process(setup, outside) as running:
        on_signal(signal.SIGUSR1, running.worker.toggle_pause)
        on_signal(signal.SIGUSR2, running.worker.toggle_debug)
        on_signal(signal.SIGHUP, running.reloading.ask)
        await running.worker.run(stop)
