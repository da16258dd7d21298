"""The `scaler` command: looks at the queue, writes how many replicas are wanted, and says so over HTTP.

It starts and stops nothing: workers named `worker-N` read the wish, and Kubernetes (KEDA) or a person the answer. It is
a process of its own, since one that is scaled away cannot say that it is wanted again.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import structlog

from inference_worker.assembly import Outside, client_name, redis_tls
from inference_worker.config.settings import Settings
from inference_worker.gateway.keys import KeyFile
from inference_worker.gateway.scale_app import app, permit_of
from inference_worker.gateway.serving import serving
from inference_worker.metrics import version
from inference_worker.ports import Backlog
from inference_worker.redis_scripts import RedisLink
from inference_worker.results.fleet import RedisFleet
from inference_worker.results.job_book import RedisJobBook
from inference_worker.scaler import ScaleView, Sources, scale_view

log = structlog.get_logger(__name__)

LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


async def run_scaler(settings: Settings, outside: Outside, stop: asyncio.Event) -> None:
    """Until told to stop. The wish that was written last goes on until it lapses.

    Raises:
        ConfigurationError: the file of keys cannot be read.
        OSError: nothing can listen there.
    """
    scale = settings.scale
    keys = None if settings.gateway.api_keys_file is None else KeyFile(settings.gateway.api_keys_file)
    if keys is None and scale.host not in LOOPBACK:
        log.warning("anybody who reaches SCALER_HOST may read the signal; GATEWAY_API_KEYS_FILE has it ask for a key")
    log.info(
        "starting",
        version=version(),
        transport=settings.transport.kind,
        queue=settings.queue,
        broker=settings.queue_address,
        redis=settings.redis.address,
        least=scale.least,
        most=scale.most,
    )
    async with opened(settings, outside) as view:
        web = app(view, permit_of(keys), stop)
        async with serving(web, scale.host, scale.port, asyncio.Event(), variable="SCALER_PORT") as url:
            log.info("listening", url=url)
            await view.run(stop)


@asynccontextmanager
async def opened(settings: Settings, outside: Outside) -> AsyncGenerator[ScaleView, None]:
    """The signal, with its connections; they are closed at the end."""
    redis = settings.redis
    link = RedisLink(redis.url_now, lambda: None, client_name=client_name(settings), tls=redis_tls(settings))
    book = RedisJobBook(link, queue=settings.queue, ttl_s=redis.response_ttl_s, now=outside.now)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(link.open())
        sources = Sources(
            backlog=await _counting(settings, link, stack),
            fleet=RedisFleet(link, queue=settings.queue),
            deadlines=book.deadlines,
        )
        yield scale_view(settings, sources, now=outside.now, writes=True)


async def _counting(settings: Settings, link: RedisLink, stack: AsyncExitStack) -> Callable[[], Awaitable[Backlog]]:
    """What counts the queue that the settings name."""
    match settings.transport.kind:
        case "rabbitmq":
            from inference_worker.rmq_backlog import backlog_of

            return (await stack.enter_async_context(backlog_of(settings).open())).backlog
        case "redis-streams":
            from inference_worker.transports.redis_streams import stream_backlog
            from inference_worker.transports.stream_entries import StreamNames

            streams = settings.streams
            names = StreamNames(stream=streams.stream, group=streams.group, dead_letters=streams.dead_letters)
            return lambda: stream_backlog(link, names)
        case "memory":
            raise AssertionError("an embedded queue has its signal in its own process")
