"""StreamingPull of the tests' Pub/Sub service: one stream, over which messages go out and acknowledgements come in.

Follows `StreamingPullRequest` and `StreamingPullResponse` of `google/pubsub/v1/pubsub.proto`: the first request names
the subscription, the deadline and the limits; what is out over the stream and not settled counts against the limits.
Not here: what a message is written as (`pubsub_server`), and that the service ends a stream after some minutes.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import grpc
from google.pubsub_v1 import types

from tests.pubsub_state import MOST_BYTES, Subscription, Taken

MOST_MESSAGES: Final = 1000
"""In one answer, and in one request."""

MOST_ANSWERS: Final = 100
"""That wait to be written."""

FOREVER_S: Final = 24 * 3600.0


class Stream:
    """One stream over a subscription, from its first request on."""

    def __init__(
        self, subscription: Subscription, first: Any, context: Any, written: Callable[[Sequence[Taken]], Any]
    ) -> None:
        """`written`: makes messages of the protocol of what was taken."""
        self._subscription = subscription
        self._context = context
        self._written = written
        self._deadline_s = float(first.stream_ack_deadline_seconds)
        self._most = first.max_outstanding_messages if first.max_outstanding_messages > 0 else sys.maxsize
        self._most_bytes = first.max_outstanding_bytes if first.max_outstanding_bytes > 0 else sys.maxsize
        self._out: dict[str, int] = {}
        """What went out and may not be settled yet, by ack id: its size."""
        self._answers: asyncio.Queue[Any] = asyncio.Queue(MOST_ANSWERS)

    async def run(self, first: Any, read: Callable[[], Awaitable[Any]]) -> None:
        """Until the client has said all, the subscription is deleted, or the stream is cancelled."""
        pulling = asyncio.create_task(self._pull(), name="stream pull")
        writing = asyncio.create_task(self._write(), name="stream write")
        hearing = asyncio.create_task(self._hear(first, read), name="stream hear")
        tasks = (pulling, writing, hearing)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if wrong := next((task.exception() for task in tasks if not task.cancelled() and task.exception()), None):
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(wrong))
        if self._subscription.deleted:
            await self._context.abort(grpc.StatusCode.NOT_FOUND, "the subscription is deleted")

    async def _pull(self) -> None:
        while not self._subscription.deleted:
            self._out = {ack_id: size for ack_id, size in self._out.items() if self._subscription.holds(ack_id)}
            room, room_bytes = self._most - len(self._out), self._most_bytes - sum(self._out.values())
            if room <= 0 or room_bytes <= 0:
                await self._subscription.changed()
                continue
            taken = await self._subscription.pull(
                min(room, MOST_MESSAGES),
                within_s=FOREVER_S,
                most_bytes=min(room_bytes, MOST_BYTES),
                deadline_s=self._deadline_s,
            )
            self._out |= {one.ack_id: one.message.size_bytes for one in taken}
            properties = types.StreamingPullResponse.SubscriptionProperties(
                exactly_once_delivery_enabled=self._subscription.terms.exactly_once,
                message_ordering_enabled=self._subscription.terms.ordered,
            )
            await self._answers.put(
                types.StreamingPullResponse(received_messages=self._written(taken), subscription_properties=properties)
            )

    async def _write(self) -> None:
        while True:
            await self._context.write(await self._answers.get())

    async def _hear(self, first: Any, read: Callable[[], Awaitable[Any]]) -> None:
        asked = first
        while asked is not grpc.aio.EOF:
            await self._settle(asked)
            asked = await read()
            if asked is not grpc.aio.EOF and (asked.subscription or asked.max_outstanding_messages):
                raise ValueError("the subscription and its limits are said once")

    async def _settle(self, asked: Any) -> None:
        """Do what one request says, and confirm it where the subscription has exactly-once delivery."""
        if len(asked.modify_deadline_ack_ids) != len(asked.modify_deadline_seconds):
            raise ValueError("as many deadlines as ids are accepted")
        self._deadline_s = float(asked.stream_ack_deadline_seconds or self._deadline_s)
        answer = types.StreamingPullResponse()
        if asked.ack_ids:
            wrong = frozenset(self._subscription.acknowledge(asked.ack_ids))
            answer.acknowledge_confirmation = types.StreamingPullResponse.AcknowledgeConfirmation(
                ack_ids=[one for one in asked.ack_ids if one not in wrong], invalid_ack_ids=sorted(wrong)
            )
        if asked.modify_deadline_ack_ids:
            wrong = frozenset(
                ack_id
                for ack_id, seconds in zip(asked.modify_deadline_ack_ids, asked.modify_deadline_seconds, strict=True)
                for ack_id in self._subscription.modify([ack_id], float(seconds))
            )
            answer.modify_ack_deadline_confirmation = types.StreamingPullResponse.ModifyAckDeadlineConfirmation(
                ack_ids=[one for one in asked.modify_deadline_ack_ids if one not in wrong],
                invalid_ack_ids=sorted(wrong),
            )
        if self._subscription.terms.exactly_once and (asked.ack_ids or asked.modify_deadline_ack_ids):
            await self._answers.put(answer)
