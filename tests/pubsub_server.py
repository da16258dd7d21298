"""A Pub/Sub service for tests, where Google's emulator cannot be had: `python -m tests.pubsub_server --port 8085`.

It follows the published protocol (`google/pubsub/v1/pubsub.proto`, and the pages "Exactly-once delivery", "Handle
message failures" and "Quotas and limits") for the calls that are made here: CreateTopic, Publish, CreateSubscription,
GetSubscription, Pull, Acknowledge, ModifyAckDeadline. Everything is in memory. Not there: StreamingPull, push, ordering
keys, filters, retention, retry policies, schemas, snapshots, credentials.
"""

import argparse
import asyncio
import itertools
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import grpc
from google.protobuf import any_pb2, empty_pb2
from google.pubsub_v1 import types
from google.rpc import error_details_pb2, status_pb2

from tests.pubsub_state import MOST_BYTES, Message, Subscription, Topic

INVALID_ID: Final = "PERMANENT_FAILURE_INVALID_ACK_ID"
PULL_S: Final = 60.0
"""How long a pull waits for a message; then it has none."""

MOST_MESSAGES: Final = 1000
"""In one answer, and in one request."""

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
        self._numbers = itertools.count(1)

    def handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        """For a server of `grpc.aio`."""
        return (
            _handler(
                "google.pubsub.v1.Publisher",
                CreateTopic=(self.create_topic, types.Topic),
                Publish=(self.publish, types.PublishRequest),
            ),
            _handler(
                "google.pubsub.v1.Subscriber",
                CreateSubscription=(self.create_subscription, types.Subscription),
                GetSubscription=(self.get_subscription, types.GetSubscriptionRequest),
                Pull=(self.pull, types.PullRequest),
                Acknowledge=(self.acknowledge, types.AcknowledgeRequest),
                ModifyAckDeadline=(self.modify_ack_deadline, types.ModifyAckDeadlineRequest),
            ),
        )

    # ------------------------------------------------------------ publishing

    async def create_topic(self, asked: Any, context: Any) -> Any:
        """Refused where it is there."""
        if asked.name in self._topics:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"Topic already exists: {asked.name}")
        self._topics[asked.name] = Topic(asked.name)
        return asked

    async def publish(self, asked: Any, context: Any) -> Any:
        """To all subscriptions that are there by now."""
        topic = await self._topic(asked.topic, context)
        if not 0 < len(asked.messages) <= MOST_MESSAGES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "1 to 1000 messages are accepted")
        messages = []
        for one in asked.messages:
            message = Message(id=str(next(self._numbers)), data=one.data, attributes=dict(one.attributes))
            if not message.size_bytes:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a message needs data or attributes")
            if message.size_bytes > MOST_BYTES:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a message has at most {MOST_BYTES} bytes")
            messages.append(message)
        topic.publish(messages)
        return types.PublishResponse(message_ids=[message.id for message in messages])

    # ------------------------------------------------------------ subscriptions

    async def create_subscription(self, asked: Any, context: Any) -> Any:
        """It has what is published from now on."""
        topic = await self._topic(asked.topic, context)
        if asked.name in self._subscriptions:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"Subscription already exists: {asked.name}")
        seconds = asked.ack_deadline_seconds or 10
        if not 10 <= seconds <= 600:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "ack_deadline_seconds: 10 to 600 are accepted")
        asked.ack_deadline_seconds = seconds
        dead, most = None, 0
        if asked.dead_letter_policy.dead_letter_topic:
            dead = await self._topic(asked.dead_letter_policy.dead_letter_topic, context)
            most = asked.dead_letter_policy.max_delivery_attempts or 5
            if not 5 <= most <= 100:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "max_delivery_attempts: 5 to 100 are accepted")
        subscription = Subscription(
            asked,
            clock=asyncio.get_running_loop().time,
            deadline_s=float(seconds),
            exactly_once=asked.enable_exactly_once_delivery,
            dead_letters=dead,
            most_deliveries=most,
        )
        self._subscriptions[asked.name] = subscription
        topic.subscriptions.append(subscription)
        return asked

    async def get_subscription(self, asked: Any, context: Any) -> Any:
        """As it was created."""
        return (await self._subscription(asked.subscription, context)).described

    # ------------------------------------------------------------ taking

    async def pull(self, asked: Any, context: Any) -> Any:
        """Up to so many, once there is one."""
        subscription = await self._subscription(asked.subscription, context)
        if asked.max_messages < 1:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "max_messages: at least 1 is accepted")
        taken = await subscription.pull(min(asked.max_messages, MOST_MESSAGES), within_s=PULL_S)
        return types.PullResponse(
            received_messages=[
                types.ReceivedMessage(
                    ack_id=one.ack_id,
                    message=types.PubsubMessage(
                        data=one.message.data, attributes=one.message.attributes, message_id=one.message.id
                    ),
                    delivery_attempt=one.attempt,
                )
                for one in taken
            ]
        )

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
    def written(answer: Any) -> bytes:
        plain = answer if isinstance(answer, empty_pb2.Empty) else type(answer).pb(answer)
        return bytes(plain.SerializeToString())

    return grpc.method_handlers_generic_handler(
        service,
        {
            name: grpc.unary_unary_rpc_method_handler(call, asked.deserialize, written)
            for name, (call, asked) in calls.items()
        },
    )


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
