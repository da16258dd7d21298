"""A look at the broker that changes nothing: what is there, in which form, and how much of it."""

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from aiormq.abc import AbstractChannel as RawChannel

from inference_worker.rmq_connection import Connection, Refused, on_own_channel, opened
from inference_worker.rmq_listener import Topology


@dataclass(slots=True, kw_only=True)
class Found:
    """What was seen; an empty text says that nothing is wrong."""

    server: str = ""
    queue_missing: str = ""
    queue_differs: str = ""
    """How the request queue differs from what the worker declares, in the broker's words."""
    ready: int = 0
    consumers: int = 0
    exchange_missing: str = ""
    dead_missing: str = ""
    dead_letters: int = 0


async def look(
    url: str,
    *,
    queue: str,
    queue_type: Literal["quorum", "classic"],
    delivery_limit: int,
    max_priority: int,
    exchange: str,
    dead_letter_queue: str,
    routing_key: str,
    tls: ssl.SSLContext | None,
    within_s: float,
) -> Found:
    """Connect and look. What exists is declared once more as the worker does, which changes nothing: it is the same or
    is refused. What does not exist is not declared.

    Raises:
        TransportLost: the broker cannot be reached, or refuses us.
    """
    topology = Topology(
        queue=queue,
        dead_letter_exchange=exchange,
        dead_letter_queue=dead_letter_queue,
        dead_letter_routing_key=routing_key,
        queue_type=queue_type,
        delivery_limit=delivery_limit,
        max_priority=max_priority,
    )
    found = Found()
    async with opened(url, name="inference-worker/check", tls=tls, within_s=within_s) as connection:
        found.server = _server(connection)
        declared, found.queue_missing = await _asked(
            connection, f"find {queue}", lambda channel: channel.queue_declare(queue, passive=True)
        )
        if declared is not None:
            found.ready, found.consumers = declared.message_count or 0, declared.consumer_count or 0
            arguments = topology.queue_arguments()
            _, found.queue_differs = await _asked(
                connection,
                f"compare {queue}",
                lambda channel: channel.queue_declare(queue, durable=True, arguments=arguments),
            )
        _, found.exchange_missing = await _asked(
            connection, f"find {exchange}", lambda channel: channel.exchange_declare(exchange, passive=True)
        )
        dead, found.dead_missing = await _asked(
            connection,
            f"find {dead_letter_queue}",
            lambda channel: channel.queue_declare(dead_letter_queue, passive=True),
        )
        found.dead_letters = 0 if dead is None else dead.message_count or 0
    return found


async def _asked(
    connection: Connection, what: str, call: Callable[[RawChannel], Awaitable[Any]]
) -> tuple[Any | None, str]:
    """The answer, or why there is none."""
    try:
        return await on_own_channel(connection, what, call), ""
    except Refused as exc:
        return None, str(exc)


def _server(connection: Connection) -> str:
    transport = connection.transport
    properties = getattr(getattr(transport, "connection", None), "server_properties", None) or {}
    return f"{properties.get('product', 'AMQP broker')} {properties.get('version', '')}".strip()
