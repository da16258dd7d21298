"""The `gateway` command: the HTTP intake before a queue, with all that it needs, until told to stop.

It chooses the parts and joins them, for `dev` too, which brings some of its own. It runs no model and takes no message.
"""

import asyncio
import ipaddress
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import structlog

from inference_worker.assembly import Outside, client_name, rabbitmq_queue, redis_stores, redis_tls
from inference_worker.config.settings import BROUGHT, Settings
from inference_worker.confirmed_intake import ConfirmedIntake
from inference_worker.dlq_reach import Reach, reach_of
from inference_worker.errors import TransportLost
from inference_worker.gateway import dead_letters, scale, webhook_routes
from inference_worker.gateway.addresses import AddressFilter, validate_url
from inference_worker.gateway.bodies import MOST_BYTES_AT_ONCE, Bodies
from inference_worker.gateway.edge import permit_operators, tenant_of
from inference_worker.gateway.jobs import Jobs
from inference_worker.gateway.keys import KeyFile
from inference_worker.gateway.metrics import GatewayMetrics
from inference_worker.gateway.pace import Pace
from inference_worker.gateway.serving import App, serving
from inference_worker.gateway.watch import Watch
from inference_worker.gateway.web import Gateway, app
from inference_worker.gateway.webhook_posting import PinnedPost
from inference_worker.gateway.webhook_signing import secret_problem
from inference_worker.gateway.webhooks import WebhookSender
from inference_worker.job_book import HookBook, Intake, JobBook
from inference_worker.metrics import WorkerMetrics, version
from inference_worker.ports import Connect, Fleet, ResultStore
from inference_worker.redis_scripts import RedisLink
from inference_worker.results.hook_book import RedisHookBook
from inference_worker.results.job_book import RedisJobBook
from inference_worker.rmq_backlog import RabbitMQBacklog
from inference_worker.rmq_producer import Producer
from inference_worker.scaler import Sources, scale_view
from inference_worker.timing import stopped_within
from inference_worker.transports.redis_streams import StreamNames
from inference_worker.transports.stream_intake import StreamIntake

log = structlog.get_logger(__name__)

LOOPBACK: Final = "127.0.0.1"
PUBLISH_S: Final = 5.0
"""How long the broker may take to confirm a job, reconnecting included."""

DECLARE_AGAIN_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """What an intake is put between."""

    intake: Intake
    book: JobBook
    hooks: HookBook
    results: ResultStore
    fleet: Fleet
    dead: Reach
    """The way to the dead letters."""
    declare: Connect | None = None
    """Opens a session that declares the queue, where that is not the store's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A gateway that is ready to be served."""

    web: App
    jobs: Jobs
    metrics: GatewayMetrics
    loops: Sequence[Callable[[asyncio.Event], Awaitable[None]]]
    """What runs beside it until told to stop."""

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """All that runs beside the listening, inside the context."""
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for loop in self.loops:
                group.create_task(_until(loop, over))
            try:
                yield
            finally:
                over.set()


async def _until(loop: Callable[[asyncio.Event], Awaitable[None]], over: asyncio.Event) -> None:
    await loop(over)


async def run_gateway(settings: Settings, outside: Outside, stop: asyncio.Event) -> None:
    """The `gateway` command: until told to stop.

    Raises:
        ConfigurationError: the file of API keys is bad, or a webhook secret is.
        OSError: the port is taken.
    """
    async with listening(settings, outside) as url:
        log.info(
            "listening",
            url=url,
            version=version(),
            transport=settings.transport.kind,
            queue=settings.queue,
            broker=settings.queue_address,
            redis=settings.redis.address,
            keys=settings.gateway.api_keys_file or "none",
        )
        await stop.wait()
        log.info("stopping")


@asynccontextmanager
async def listening(settings: Settings, outside: Outside) -> AsyncGenerator[str, None]:
    """A whole gateway inside the context, which gives its URL. Raises as `run_gateway` does."""
    keys = key_file(settings)
    host = listening_host(settings, keys)
    try:
        async with AsyncExitStack() as stack:
            parts = await _neighbours(settings, outside, stack)
            gateway = await assembled(settings, outside, parts, keys, stack)
            await stack.enter_async_context(gateway.running())
            yield await stack.enter_async_context(
                serving(gateway.web, host, settings.gateway.port, gateway.jobs.stopping)
            )
    except BaseExceptionGroup as group:
        if (error := only(group)) is group:
            raise
        raise error from group


def only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What is in a group of one, so that the doors see what it is."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def key_file(settings: Settings) -> KeyFile | None:
    """Who may come in; None where nobody is asked.

    Raises:
        ConfigurationError: the file is bad.
    """
    path = settings.gateway.api_keys_file
    return None if path is None else KeyFile(path, secret_problem)


def listening_host(settings: Settings, keys: KeyFile | None) -> str:
    """Where to listen: where nobody is asked who he is, on loopback alone."""
    host = settings.gateway.host
    if keys is not None:
        return host
    if not is_loopback(host):
        log.warning(
            "without GATEWAY_API_KEYS_FILE nobody is asked who he is: listening on this machine alone",
            wanted=host,
            listening=LOOPBACK,
        )
        return LOOPBACK
    log.warning("without GATEWAY_API_KEYS_FILE nobody is asked who he is; listening on this machine alone")
    return host


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, and seen from nowhere else."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def assembled(
    settings: Settings,
    outside: Outside,
    parts: Neighbours,
    keys: KeyFile | None,
    stack: AsyncExitStack,
    *,
    model: Callable[[], str | None] | None = None,
) -> Assembled:
    """Join the parts. `model` tells what the queue's model is called where no worker says so."""
    metrics, pace = GatewayMetrics(), Pace(parts.fleet)
    gateway = settings.gateway
    allowed = AddressFilter(gateway.webhook_networks)

    def secret_of(tenant: str) -> str | None:
        own = None if keys is None else keys.webhook_secret(tenant)
        if own is None and gateway.webhook_secret is not None:
            return gateway.webhook_secret.now()
        return own

    def check_webhook(tenant: str, url: str) -> str | None:
        if secret_of(tenant) is None:
            return "cannot be signed: there is no webhook secret for this tenant"
        return validate_url(url, allowed)

    async def view_of(job_id: str, tenant: str) -> dict[str, object]:
        return await jobs.look(job_id, tenant)

    post = await stack.enter_async_context(PinnedPost(allowed, now=outside.now, verify=settings.tls.public_context()))
    sender = WebhookSender(
        book=parts.hooks,
        view_of=view_of,
        secret_of=secret_of,
        post=post,
        meter=metrics,
        now=outside.now,
        rng=outside.rng,
    )
    jobs = Jobs(
        intake=parts.intake,
        book=parts.book,
        store=parts.results,
        pace=pace,
        metrics=metrics,
        now=outside.now,
        new_id=lambda: secrets.token_hex(12),
        infer_path=settings.model.infer_path,
        result_ttl_s=settings.redis.response_ttl_s,
        most_waiting=gateway.max_queue_depth,
        name=settings.identity.replica_id,
        knows_tenants=keys is not None,
        hint=sender.hint,
    )
    watch = Watch(parts.intake.backlog, parts.results.probe, metrics, jobs.stopping)
    view = scale_view(
        settings,
        Sources(backlog=parts.intake.backlog, fleet=parts.fleet, deadlines=parts.book.deadlines),
        now=outside.now,
        writes=False,
    )

    async def models() -> list[str]:
        found = sorted({beat.model for beat in await pace.members() if beat.model})
        named = model() if model is not None else _configured_model(settings)
        return found or ([named] if named else [])

    bodies = Bodies(
        most_bytes=gateway.max_body_bytes,
        most_bytes_at_once=max(MOST_BYTES_AT_ONCE, 2 * gateway.max_body_bytes),
    )
    web = app(
        Gateway(
            jobs=jobs,
            metrics=metrics,
            wait_s=gateway.wait_s,
            ready=watch.conditions,
            keys=keys,
            bodies=bodies,
            models=models,
            check_webhook=check_webhook,
            webhooks=gateway.webhook_secret is not None or (keys is not None and keys.has_webhook_secrets),
            others=(
                lambda web: webhook_routes.routes(web, parts.hooks, tenant_of, sender.hint),
                lambda web: scale.mount(web, {settings.queue: view}, permit_operators),
                lambda web: dead_letters.routes(
                    web,
                    parts.dead,
                    permit_operators,
                    bodies,
                    queue=settings.queue,
                    now=outside.now,
                    stop=jobs.stopping,
                ),
            ),
        )
    )
    loops: list[Callable[[asyncio.Event], Awaitable[None]]] = [watch.run, sender.run, view.run]
    if parts.declare is not None:
        declare = parts.declare
        loops.append(lambda until: _keep_declared(declare, watch, until))
    return Assembled(web=web, jobs=jobs, metrics=metrics, loops=loops)


def _configured_model(settings: Settings) -> str | None:
    name = settings.identity.hf_model_id
    return None if name == BROUGHT["gateway"]["HF_MODEL_ID"] else name


async def _keep_declared(connect: Connect, watch: Watch, until: asyncio.Event) -> None:
    """Have the queue exist, so that jobs are accepted before the first worker has ever run."""
    declared, said = False, ""
    while True:
        if not declared or not watch.conditions()["broker"][0]:
            try:
                async with connect():
                    declared, said = True, ""
            except TransportLost as exc:
                if str(exc) != said:
                    said = str(exc)
                    log.warning("the queue could not be declared; trying again", reason=said)
        if await stopped_within(until, DECLARE_AGAIN_S if declared else 1.0):
            return


# ---------------------------------------------------------------- neighbours


async def _neighbours(settings: Settings, outside: Outside, stack: AsyncExitStack) -> Neighbours:
    stores = await stack.enter_async_context(redis_stores(settings))
    book, hooks, link = await redis_books(settings, outside, stack)
    intake: Intake
    declare: Connect | None = None
    match settings.transport.kind:
        case "redis-streams":
            intake = stream_intake(settings, outside, link)
        case "rabbitmq":
            intake = await _rabbitmq_intake(settings, book, stack)
            declare = rabbitmq_queue(settings, outside, settings.tls.context())(stores.results, WorkerMetrics())
        case "memory":
            raise AssertionError("an embedded queue is in another process")
    return Neighbours(
        intake=intake,
        book=book,
        hooks=hooks,
        results=stores.results,
        fleet=stores.fleet_of(settings.queue),
        dead=reach_of(settings, outside.now),
        declare=declare,
    )


async def redis_books(
    settings: Settings, outside: Outside, stack: AsyncExitStack
) -> tuple[RedisJobBook, RedisHookBook, RedisLink]:
    """What an intake keeps in Redis, and the connection that it does so over."""
    redis = settings.redis
    link = await stack.enter_async_context(
        RedisLink(redis.url_now, lambda: None, client_name=client_name(settings), tls=redis_tls(settings)).open()
    )
    book = RedisJobBook(link, queue=settings.queue, ttl_s=redis.response_ttl_s, now=outside.now)
    return book, RedisHookBook(link, queue=settings.queue), link


def stream_intake(settings: Settings, outside: Outside, link: RedisLink) -> StreamIntake:
    """Into a stream, beside the book."""
    streams = settings.streams
    names = StreamNames(stream=streams.stream, group=streams.group, dead_letters=streams.dead_letters)
    return StreamIntake(link, names, queue=settings.queue, ttl_s=settings.redis.response_ttl_s, now=outside.now)


async def _rabbitmq_intake(settings: Settings, book: JobBook, stack: AsyncExitStack) -> ConfirmedIntake:
    rabbitmq, queue, tls = settings.rabbitmq, settings.queue, settings.tls.context()
    name = f"{settings.identity.deployment_id}/{settings.identity.replica_id}"[:200]
    producer = await stack.enter_async_context(Producer(rabbitmq.url_now, queue, name=name, tls=tls).open())
    management = rabbitmq.management_url
    looks = await stack.enter_async_context(
        RabbitMQBacklog(
            rabbitmq.url_now,
            queue,
            name=f"{name} (depth)",
            management_url=None if management is None else management.now,
            tls=tls,
        ).open()
    )

    async def publish(body: bytes, *, message_id: str) -> None:
        await producer.publish(body, message_id=message_id, within_s=PUBLISH_S)

    return ConfirmedIntake(book, publish, looks.backlog)
