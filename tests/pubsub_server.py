"""A Pub/Sub service for tests, where Google's emulator cannot be had: `python -m tests.pubsub_server --port 8085`.

It follows the published protocol (`google/pubsub/v1/pubsub.proto`, and the pages "Exactly-once delivery", "Handle
message failures", "Dead-letter topics", "Order messages", "Filter messages" and "Quotas and limits") for the calls that
are made here: CreateTopic, DeleteTopic, Publish; CreateSubscription, GetSubscription, DeleteSubscription, Pull,
StreamingPull, Acknowledge, ModifyAckDeadline. Everything is in memory, and `integration/test_pubsub_service.py` says
what it has in common with Google's emulator.

Not there: push, updates and lists, retention, seeking and snapshots, expiry, schemas, credentials; filters but by the
value of one attribute; that a redelivery under an ordering key repeats what was acknowledged after it; that anything
the service does "on a best effort basis" is done late, or not at all.
"""

import argparse
import asyncio
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import grpc
from google.protobuf import any_pb2, empty_pb2
from google.pubsub_v1 import types
from google.rpc import error_details_pb2, status_pb2

from tests.pubsub_server_stream import MOST_MESSAGES, Stream
from tests.pubsub_state import MOST_BYTES, Message, Subscription, Taken, Terms, Topic

INVALID_ID: Final = "PERMANENT_FAILURE_INVALID_ACK_ID"
PULL_S: Final = 60.0
"""How long a pull waits for a message; then it has none."""

MOST_VALUE_BYTES: Final = 1024
"""Of an attribute."""

NAME: Final = re.compile(r"projects/[^/]+/(topics|subscriptions)/(?!goog)[A-Za-z][A-Za-z0-9._~+%-]{2,254}")

BY_ATTRIBUTE: Final = re.compile(r'attributes\.([A-Za-z_][A-Za-z0-9_-]*)\s*=\s*"([^"\\]*)"')
"""The one form of a filter that is understood."""

OPTIONS: Final = (
    ("grpc.max_receive_message_length", MOST_BYTES + 1024 * 1024),
    ("grpc.max_send_message_length", -1),
    # As the service has it: its clients see that a connection is gone by asking.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class Service:
    """Topics and subscriptions by their names, and the calls."""

    def __init__(self) -> None:
        self._topics: dict[str, Topic] = {}
        self._subscriptions: dict[str, Subscription] = {}
        self._described: dict[str, Any] = {}

    def handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        """For a server of `grpc.aio`."""
        return (
            _handler(
                "google.pubsub.v1.Publisher",
                CreateTopic=(self.create_topic, types.Topic),
                DeleteTopic=(self.delete_topic, types.DeleteTopicRequest),
                Publish=(self.publish, types.PublishRequest),
            ),
            _handler(
                "google.pubsub.v1.Subscriber",
                CreateSubscription=(self.create_subscription, types.Subscription),
                GetSubscription=(self.get_subscription, types.GetSubscriptionRequest),
                DeleteSubscription=(self.delete_subscription, types.DeleteSubscriptionRequest),
                Pull=(self.pull, types.PullRequest),
                Acknowledge=(self.acknowledge, types.AcknowledgeRequest),
                ModifyAckDeadline=(self.modify_ack_deadline, types.ModifyAckDeadlineRequest),
            ),
            grpc.method_handlers_generic_handler(
                "google.pubsub.v1.Subscriber",
                {
                    "StreamingPull": grpc.stream_stream_rpc_method_handler(
                        self.streaming_pull, types.StreamingPullRequest.deserialize, _written
                    )
                },
            ),
        )

    # ------------------------------------------------------------ publishing

    async def create_topic(self, asked: Any, context: Any) -> Any:
        """Refused where it is there."""
        await _named(asked.name, "topics", context)
        if asked.name in self._topics:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"Topic already exists: {asked.name}")
        self._topics[asked.name] = Topic(asked.name)
        return asked

    async def delete_topic(self, asked: Any, context: Any) -> Any:
        """Its subscriptions stay, and get nothing more."""
        await self._topic(asked.topic, context)
        del self._topics[asked.topic]
        return empty_pb2.Empty()

    async def publish(self, asked: Any, context: Any) -> Any:
        """To all subscriptions that are there by now."""
        topic = await self._topic(asked.topic, context)
        if not 0 < len(asked.messages) <= MOST_MESSAGES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "1 to 1000 messages are accepted")
        messages = []
        for one in asked.messages:
            message = Message(
                data=one.data,
                attributes=dict(one.attributes),
                ordering_key=one.ordering_key,
                published_at=time.time(),
            )
            if not message.size_bytes:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a message needs data or attributes")
            if message.size_bytes > MOST_BYTES:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a message has at most {MOST_BYTES} bytes")
            if any(len(value.encode()) > MOST_VALUE_BYTES for value in message.attributes.values()):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an attribute has at most 1024 bytes")
            messages.append(message)
        topic.publish(messages)
        return types.PublishResponse(message_ids=[message.id for message in messages])

    # ------------------------------------------------------------ subscriptions

    async def create_subscription(self, asked: Any, context: Any) -> Any:
        """It has what is published from now on."""
        await _named(asked.name, "subscriptions", context)
        topic = await self._topic(asked.topic, context)
        if asked.name in self._subscriptions:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"Subscription already exists: {asked.name}")
        if dead_letters := asked.dead_letter_policy.dead_letter_topic:
            await self._topic(dead_letters, context)
        try:
            terms = self._terms(asked)
        except ValueError as exc:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(exc))
            raise  # It has raised already, which is not in its type.
        asked.ack_deadline_seconds = int(terms.deadline_s)
        if terms.dead_letters is not None:
            asked.dead_letter_policy.max_delivery_attempts = terms.most_deliveries
        subscription = Subscription(terms)
        self._subscriptions[asked.name], self._described[asked.name] = subscription, asked
        topic.subscriptions.append(subscription)
        return asked

    def _terms(self, asked: Any) -> Terms:
        """Raises ValueError where it is not allowed, or not understood here."""
        letters, resting = asked.dead_letter_policy, asked.retry_policy
        rest_s = 0.0, 0.0
        if "retry_policy" in asked:
            least, most = resting.minimum_backoff, resting.maximum_backoff
            rest_s = 10.0 if least is None else least.total_seconds(), 600.0 if most is None else most.total_seconds()
        wants = BY_ATTRIBUTE.fullmatch(asked.filter.strip())
        terms = Terms(
            name=asked.name,
            deadline_s=float(asked.ack_deadline_seconds or 10),
            exactly_once=asked.enable_exactly_once_delivery,
            ordered=asked.enable_message_ordering,
            wants=None if wants is None else (wants[1], wants[2]),
            least_rest_s=rest_s[0],
            most_rest_s=rest_s[1],
            dead_letters=self._topics.get(letters.dead_letter_topic),
            most_deliveries=letters.max_delivery_attempts or 5,
        )
        if not 10 <= terms.deadline_s <= 600:
            raise ValueError("ack_deadline_seconds: 10 to 600 are accepted")
        if not 0 <= terms.least_rest_s <= terms.most_rest_s <= 600:
            raise ValueError("minimum_backoff, maximum_backoff: 0 to 600 s are accepted")
        if not 5 <= terms.most_deliveries <= 100:
            raise ValueError("max_delivery_attempts: 5 to 100 are accepted")
        if asked.filter and wants is None:
            raise ValueError('filter: attributes.NAME = "VALUE" is accepted')
        return terms

    async def get_subscription(self, asked: Any, context: Any) -> Any:
        """As it was created."""
        await self._subscription(asked.subscription, context)
        return self._described[asked.subscription]

    async def delete_subscription(self, asked: Any, context: Any) -> Any:
        """With all of its messages; who pulls hears that it is not there."""
        subscription = await self._subscription(asked.subscription, context)
        del self._subscriptions[asked.subscription], self._described[asked.subscription]
        for topic in self._topics.values():
            if subscription in topic.subscriptions:
                topic.subscriptions.remove(subscription)
        subscription.delete()
        return empty_pb2.Empty()

    # ------------------------------------------------------------ taking

    async def pull(self, asked: Any, context: Any) -> Any:
        """Up to so many, once there is one."""
        subscription = await self._subscription(asked.subscription, context)
        if asked.max_messages < 1:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "max_messages: at least 1 is accepted")
        taken = await subscription.pull(min(asked.max_messages, MOST_MESSAGES), within_s=PULL_S)
        await self._subscription(asked.subscription, context)
        return types.PullResponse(received_messages=_received(taken))

    async def streaming_pull(self, _asked: Any, context: Any) -> None:
        """See `pubsub_server_stream`."""
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        subscription = await self._subscription(first.subscription, context)
        if not 10 <= first.stream_ack_deadline_seconds <= 600:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "stream_ack_deadline_seconds: 10 to 600 are accepted")
        await Stream(subscription, first, context, _received).run(first, context.read)

    async def acknowledge(self, asked: Any, context: Any) -> Any:
        """With exactly-once delivery an id that is not the message's latest, or has lapsed, is an error."""
        subscription = await self._subscription(asked.subscription, context)
        await _refuse(subscription.acknowledge(asked.ack_ids), context)
        return empty_pb2.Empty()

    async def modify_ack_deadline(self, asked: Any, context: Any) -> Any:
        """0: hand it out again at once."""
        subscription = await self._subscription(asked.subscription, context)
        if not 0 <= asked.ack_deadline_seconds <= 600:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "ack_deadline_seconds: 0 to 600 are accepted")
        await _refuse(subscription.modify(asked.ack_ids, float(asked.ack_deadline_seconds)), context)
        return empty_pb2.Empty()

    async def _topic(self, name: str, context: Any) -> Topic:
        if name not in self._topics:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Topic not found: {name}")
        return self._topics[name]

    async def _subscription(self, name: str, context: Any) -> Subscription:
        if name not in self._subscriptions:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Subscription does not exist: {name}")
        return self._subscriptions[name]


async def _named(name: str, kind: str, context: Any) -> None:
    if not (found := NAME.fullmatch(name)) or found[1] != kind:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"Invalid [{kind}] name: (name={name})")


async def _refuse(ack_ids: Sequence[str], context: Any) -> None:
    """Say of these that they are no longer valid, each by itself, as the client libraries read it."""
    if not ack_ids:
        return
    info = error_details_pb2.ErrorInfo(
        reason="EXACTLY_ONCE_ACKID_FAILURE",
        domain="pubsub.googleapis.com",
        metadata=dict.fromkeys(ack_ids, INVALID_ID),
    )
    detail = any_pb2.Any()
    detail.Pack(info)
    text = "Some acknowledgement ids in the request were invalid."
    said = status_pb2.Status(code=grpc.StatusCode.FAILED_PRECONDITION.value[0], message=text, details=[detail])
    metadata = (("grpc-status-details-bin", said.SerializeToString()),)
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text, metadata)


Call = tuple[Callable[[Any, Any], Awaitable[Any]], Any]


def _handler(service: str, **calls: Call) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(
        service,
        {
            name: grpc.unary_unary_rpc_method_handler(call, asked.deserialize, _written)
            for name, (call, asked) in calls.items()
        },
    )


def _written(answer: Any) -> bytes:
    plain = answer if isinstance(answer, empty_pb2.Empty) else type(answer).pb(answer)
    return bytes(plain.SerializeToString())


def _received(taken: Sequence[Taken]) -> Sequence[Any]:
    """What was taken, as the protocol has it."""
    return [
        types.ReceivedMessage(
            ack_id=one.ack_id,
            message=types.PubsubMessage(
                data=one.message.data,
                attributes=one.message.attributes,
                message_id=one.message.id,
                ordering_key=one.message.ordering_key,
                publish_time=datetime.fromtimestamp(one.message.published_at, UTC),
            ),
            delivery_attempt=one.attempt,
        )
        for one in taken
    ]


async def serve(port: int, ready: Callable[[int], None], stop: asyncio.Event) -> None:
    """On loopback, until told to stop. `ready` hears the port."""
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers(Service().handlers())
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    ready(bound)
    try:
        await stop.wait()
    finally:
        await server.stop(grace=1.0)


async def main() -> None:
    """Until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="A Pub/Sub service for tests, in memory.")
    parser.add_argument("--port", type=int, default=8085, help="on 127.0.0.1; 0: any that is free")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(parser.parse_args().port, lambda port: print(f"listening on 127.0.0.1:{port}", file=sys.stderr), stop)


if __name__ == "__main__":
    asyncio.run(main())
