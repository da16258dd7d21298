"""Ways to the dead letters of a queue: RabbitMQ's, a stream's, a sorted set's, those of an embedded queue."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from inference_worker.config.settings import Settings
from inference_worker.dlq import Letters, Store
from inference_worker.memory_dead_letters import MemoryDeadLetters
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.results.memory import MemoryStore
from inference_worker.results.redis import RedisStore
from inference_worker.rmq_dead_letters import open_dead_letters
from inference_worker.sorted_set_dead_letters import SortedSetDeadLetters
from inference_worker.stream_dead_letters import StreamDeadLetters
from inference_worker.transports.memory import MemoryBroker

AnyLetters = Letters[Any]
"""Of whichever transport: each of its letters goes back to itself alone."""

Reach = Callable[[], AbstractAsyncContextManager[tuple[AnyLetters, Store]]]
"""Opens a session with the letters that are there now, and with what is known of their requests.

Raises: TransportLost, NoDeadLetterQueue, StoreUnavailable
"""


def reach_of(
    settings: Settings,
    now: Callable[[], float],
    *,
    broker: MemoryBroker | None = None,
    store: MemoryStore | None = None,
    sorted_set: str | None = None,
    sql: str | None = None,
) -> Reach:
    """The way to the dead letters of the queue that the settings name, and to its results in Redis.

    `sorted_set` names a queue in a sorted set of that Redis instead, `sql` one in the Postgres of the settings.
    `broker` and `store` take the place of either, where they are embedded.
    """

    @asynccontextmanager
    async def reach() -> AsyncGenerator[tuple[AnyLetters, Store], None]:
        identity, tls = settings.identity, settings.tls
        name = "".join(c if "!" <= c <= "~" else "_" for c in f"inference-worker/{identity.deployment_id}/dlq")[:200]
        files = RedisTls(ca_file=tls.ca_file, cert_file=tls.cert_file, key_file=tls.key_file)
        if sql is not None:
            async with _in_postgres(settings, sql, name, now) as found:
                yield found
            return
        # It connects with the first question.
        async with RedisLink(settings.redis.url_now, lambda: None, client_name=name, tls=files).open() as link:
            results = store if store is not None else _results(settings, link)
            if broker is not None:
                yield MemoryDeadLetters(broker), results
                return
            if sorted_set is not None:
                members = SortedSetDeadLetters(link, queue=sorted_set, ttl_s=settings.redis.response_ttl_s, now=now)
                await members.begin()
                yield members, results
                return
            async with _letters(settings, link, name, now) as letters:
                yield letters, results

    return reach


@asynccontextmanager
async def _in_postgres(
    settings: Settings, queue: str, name: str, now: Callable[[], float]
) -> AsyncGenerator[tuple[AnyLetters, Store], None]:
    from inference_worker.results.sql import SqlStore
    from inference_worker.sql_dead_letters import SqlDeadLetters
    from inference_worker.sql_link import SqlTls
    from inference_worker.sql_place import sql_place

    tls = SqlTls(ca_file=settings.tls.ca_file, cert_file=settings.tls.cert_file, key_file=settings.tls.key_file)
    async with sql_place(settings.sql.url_now, client_name=name, tls=tls, most_connections=2, sweeps=False) as place:
        letters = SqlDeadLetters(place.link, queue=queue, now=now)
        await letters.begin()
        yield (
            letters,
            SqlStore(
                place,
                deployment_id=settings.identity.deployment_id,
                replica_id="dlq",
                lease_s=settings.lease_s,
                ttl_s=settings.redis.response_ttl_s,
            ),
        )


def _results(settings: Settings, link: RedisLink) -> RedisStore:
    return RedisStore(
        link,
        deployment_id=settings.identity.deployment_id,
        replica_id="dlq",
        lease_s=settings.lease_s,
        ttl_s=settings.redis.response_ttl_s,
    )


@asynccontextmanager
async def _letters(
    settings: Settings, link: RedisLink, name: str, now: Callable[[], float]
) -> AsyncGenerator[AnyLetters, None]:
    match settings.transport.kind:
        case "redis-streams":
            streams, ttl_s = settings.streams, settings.redis.response_ttl_s
            entries = StreamDeadLetters(
                link, stream=streams.stream, dead_letters=streams.dead_letters, ttl_s=ttl_s, now=now
            )
            await entries.begin()
            yield entries
        case "rabbitmq":
            url, queue, tls = settings.rabbitmq.url_now(), settings.rabbitmq.dlq, settings.tls.context()
            async with open_dead_letters(url, queue, name=name, tls=tls) as letters:
                yield letters
        case "memory":
            raise AssertionError("an embedded queue is brought along")
