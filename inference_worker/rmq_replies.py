"""Results for requesters who wait at RabbitMQ: to the queue that `reply_to` names, with their correlation id.

The result in the store is the one that counts, and is there before. A reply that nobody takes is given up after a
while, so that a queue that is gone or full holds up no message. Not here: when a reply is due (`rmq_listener`).
"""

import asyncio
import uuid
from typing import Final

import msgspec
import structlog
from pamqp.commands import Basic

from inference_worker.disposition import DeadLetter
from inference_worker.errors import TransportLost
from inference_worker.metrics import WorkerMetrics
from inference_worker.rmq_connection import Publisher, Refused, TooLarge, Unroutable
from inference_worker.rmq_values import text_of
from inference_worker.timing import first_of

log = structlog.get_logger(__name__)

REPLY_S: Final = 10.0
"""How long a reply is tried."""

PAUSE_S: Final = 0.25
DIRECT: Final = "amq.rabbitmq.reply-to."
"""What the broker puts in front of an address that is no queue but the requester's own channel (direct reply-to)."""


def awaited(asked: Basic.Properties) -> bool:
    """Whether somebody waits for a reply at a queue that can be named."""
    return bool(text_of(asked.reply_to))


async def send_reply(
    publisher: Publisher, asked: Basic.Properties, result: bytes, lost: asyncio.Event, metrics: WorkerMetrics
) -> None:
    """Publish a result to who has asked, confirmed, unless the message is lost meanwhile. Never fails."""
    queue = asked.reply_to or ""
    loop = asyncio.get_running_loop()
    until = loop.time() + REPLY_S
    while not lost.is_set():
        try:
            await publisher.publish(
                result,
                _properties(asked),
                exchange="",
                routing_key=queue,
                within_s=max(until - loop.time(), PAUSE_S),
                # Told to be careful, the broker hands a direct reply over and says all the same that no queue took it.
                mandatory=not queue.startswith(DIRECT),
            )
        except Unroutable:
            metrics.replied("returned")
            log.info("nobody waits for a reply any more", queue=queue)
            return
        except (Refused, TransportLost) as exc:
            if isinstance(exc, TooLarge) or loop.time() + PAUSE_S >= until:
                metrics.replied("given_up")
                log.warning("a reply is given up; its result is stored", queue=queue, reason=str(exc))
                return
        else:
            metrics.replied("sent")
            return
        await first_of(lost, within_s=PAUSE_S)


def _properties(asked: Basic.Properties) -> Basic.Properties:
    return Basic.Properties(
        content_type="application/json",
        correlation_id=asked.correlation_id or asked.message_id,
        delivery_mode=asked.delivery_mode,
        message_id=uuid.uuid4().hex,
    )


def refusal(letter: DeadLetter) -> bytes:
    """What is replied to a message without an id that a result could be stored under."""
    said = {"status": "failed", "status_code": letter.status_code, "error": letter.detail, "error_code": letter.reason}
    return msgspec.json.encode(said)
