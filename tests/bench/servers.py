"""The servers of a run of the bench, and queues of any transport in them. Each is started when it is first needed."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cached_property
from typing import Final, assert_never

import asyncpg

from tests.every_transport import (
    Queues,
    SqlTables,
    Transport,
    rabbit_queues,
    sorted_sets,
    sql_tables,
    streams,
    subscriptions,
)
from tests.services import Postgres, Rabbit, Redis, Supply
from tests.sidecar_queue import SidecarQueue, sidecar_queue

DB: Final = 1
SCHEMA: Final = "bench"


class Servers:
    """One of each kind."""

    def __init__(self, supply: Supply) -> None:
        self.supply = supply

    @cached_property
    def redis(self) -> Redis:
        return self.supply.redis()

    @cached_property
    def rabbit(self) -> Rabbit:
        return self.supply.rabbit()

    @cached_property
    def postgres(self) -> Postgres:
        return self.supply.postgres()

    def queues(self, transport: Transport, names: Sequence[str]) -> AbstractAsyncContextManager[Queues]:
        """Some queues, empty, of a database or a schema that is emptied for them."""
        match transport:
            case "redis-sortedset":
                return sorted_sets(self.redis.at(DB), names)
            case "redis-streams":
                return streams(self.redis.at(DB), names)
            case "rabbitmq":
                return rabbit_queues(self.rabbit.url, self.redis.at(DB), names)
            case "sql":
                return _tables(self.postgres, names)
            case "gcp-pubsub":
                return subscriptions(self.redis.at(DB), names)
            case _:
                assert_never(transport)

    def sidecar(self) -> AbstractAsyncContextManager[SidecarQueue]:
        """The queue of `inference-worker run`, empty."""
        return sidecar_queue(self.rabbit.url, self.redis.at(DB))


@asynccontextmanager
async def _tables(postgres: Postgres, names: Sequence[str]) -> AsyncGenerator[SqlTables]:
    connection = await asyncpg.connect(postgres.url)
    await connection.execute(f"drop schema if exists {SCHEMA} cascade; create schema {SCHEMA}")
    await connection.close()
    async with sql_tables(postgres.at(SCHEMA), names) as tables:
        yield tables
