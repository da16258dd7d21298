"""A Postgres that is reached: the connections to it, being told of what changes there, and sweeping what is over.

One for a process. Who uses it waits for nobody at the beginning: it connects with the first question.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import structlog

from inference_worker.errors import StoreUnavailable
from inference_worker.sql_ears import SqlEars
from inference_worker.sql_link import MOST_CONNECTIONS, SqlLink, SqlTls
from inference_worker.sql_schema import ensure_schema
from inference_worker.timing import ended, stopped_within

log = structlog.get_logger(__name__)

SWEEP_S: Final = 60.0
MOST_SWEPT: Final = 1000
"""Rows of each table in one go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlPlace:
    """What is needed of it."""

    link: SqlLink
    ears: SqlEars


@asynccontextmanager
async def sql_place(
    url: Callable[[], str],
    *,
    client_name: str,
    tls: SqlTls,
    most_connections: int = MOST_CONNECTIONS,
    sweeps: bool = True,
) -> AsyncGenerator[SqlPlace, None]:
    """A context that closes the connections at its end."""
    link = SqlLink(url, client_name=client_name, tls=tls, prepare=ensure_schema, most_connections=most_connections)
    async with link.open(), SqlEars(link).open() as ears:
        sweeping = asyncio.create_task(_sweep_for_ever(link), name="postgres sweeping") if sweeps else None
        try:
            yield SqlPlace(link=link, ears=ears)
        finally:
            if sweeping is not None:
                await ended(sweeping)


def queue_channel(queue: str) -> str:
    """On which it is told that a queue has something new."""
    return f"iw_q_{_named(queue)}"


def route_channel(route: str) -> str:
    """On which it is told that a route has a result."""
    return f"iw_r_{_named(route)}"


async def _sweep_for_ever(link: SqlLink) -> None:
    """Delete what is over. Who fails to has lost nothing: it is looked at as if it were gone."""
    over = asyncio.Event()
    while not await stopped_within(over, SWEEP_S):
        try:
            while (await link.row("select iw1_tidy($1)", MOST_SWEPT))[0] >= MOST_SWEPT:
                continue
        except StoreUnavailable as exc:
            log.debug("what is over could not be deleted", reason=str(exc))


def _named(what: str) -> str:
    """As Postgres' own `md5` has it."""
    return hashlib.md5(what.encode(), usedforsecurity=False).hexdigest()
