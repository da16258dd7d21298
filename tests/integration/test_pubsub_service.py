"""What the service under the tests does of what Pub/Sub promises: Google's emulator and ours alike.

It is the ground that the other tests stand on, and runs against whichever `tests/pubsub_emulator.py` gives. What is
published and the emulator does not do is tested against ours alone. Leases that lapse take ten seconds at least:
`test_pubsub_kills.py` waits for them.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.api_core.exceptions import InvalidArgument, NotFound
from google.cloud.pubsub_v1 import SubscriberClient
from google.cloud.pubsub_v1.subscriber.exceptions import AcknowledgeError, AcknowledgeStatus
from google.cloud.pubsub_v1.subscriber.message import Message
from google.pubsub_v1 import PublisherAsyncClient, SubscriberAsyncClient
from google.pubsub_v1.services.publisher.transports import PublisherGrpcAsyncIOTransport
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcAsyncIOTransport, SubscriberGrpcTransport
from google.pubsub_v1.types import ReceivedMessage, StreamingPullRequest, StreamingPullResponse
from grpc import aio

from inference_worker.errors import StoreUnavailable
from inference_worker.pubsub_link import GrpcLink
from inference_worker.pubsub_values import Pulled
from inference_worker.timing import ended
from tests.pubsub_emulator import chosen, emulator_address
from tests.waiting import eventually

published = pytest.mark.skipif(chosen() != "server", reason="published, but Google's emulator does not do it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A project of a test's own, with a topic and what subscribes to it."""

    name: str
    link: GrpcLink
    publisher: PublisherAsyncClient
    subscriber: SubscriberAsyncClient

    async def topic(self, name: str = "requests") -> str:
        made = await self.publisher.create_topic(name=f"projects/{self.name}/topics/{name}")
        return str(made.name)

    async def subscribe(self, name: str = "work", topic: str = "requests", **options: object) -> str:
        asked = {
            "name": f"projects/{self.name}/subscriptions/{name}",
            "topic": f"projects/{self.name}/topics/{topic}",
            **options,
        }
        return str((await self.subscriber.create_subscription(request=asked)).name)

    async def publish(self, *bodies: str, key: str = "", **attributes: str) -> None:
        messages = [{"data": body.encode(), "ordering_key": key, "attributes": attributes} for body in bodies]
        await self.publisher.publish(request={"topic": f"projects/{self.name}/topics/requests", "messages": messages})

    async def taken(self, subscription: str, count: int) -> list[Pulled]:
        """So many, in the order in which they came."""
        came: list[Pulled] = []

        async def enough() -> bool:
            came.extend(await self.link.pull(subscription, count - len(came)))
            return len(came) == count

        await eventually(enough, within=10, what=f"{count} messages")
        return came


@pytest.fixture
async def project() -> AsyncGenerator[Project]:
    channel = aio.insecure_channel(await asyncio.to_thread(emulator_address))
    try:
        yield Project(
            name=f"p-{secrets.token_hex(6)}",
            link=GrpcLink(channel),
            publisher=PublisherAsyncClient(transport=PublisherGrpcAsyncIOTransport(channel=channel)),
            subscriber=SubscriberAsyncClient(transport=SubscriberGrpcAsyncIOTransport(channel=channel)),
        )
    finally:
        await channel.close()


@contextmanager
def streaming(subscription: str, into: list[Message]) -> Generator[None]:
    """Google's own subscriber over StreamingPull, as producers read their results with it. It has threads."""
    with ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(emulator_address()))
        client = SubscriberClient(transport=SubscriberGrpcTransport(channel=channel))
        reading = client.subscribe(subscription, callback=into.append)
        try:
            yield
        finally:
            reading.cancel()
            reading.result(timeout=10)


@asynccontextmanager
async def bare_stream(
    project: Project, subscription: str, **limits: int
) -> AsyncGenerator[tuple[Any, list[ReceivedMessage], list[StreamingPullResponse.AcknowledgeConfirmation]]]:
    """A StreamingPull without a library around it: the call, what has come, and what was said of acknowledgements."""
    came: list[ReceivedMessage] = []
    said: list[StreamingPullResponse.AcknowledgeConfirmation] = []
    opened: Any = project.subscriber.transport.streaming_pull  # Typed as if it took one request.
    call = opened()
    await call.write(StreamingPullRequest(subscription=subscription, stream_ack_deadline_seconds=10, **limits))

    async def read() -> None:
        while (answer := await call.read()) is not aio.EOF:
            came.extend(answer.received_messages)
            said.append(answer.acknowledge_confirmation)

    reading = asyncio.create_task(read())
    try:
        yield call, came, said
    finally:
        await ended(reading)
        call.cancel()


def valid(said: Sequence[StreamingPullResponse.AcknowledgeConfirmation]) -> list[str]:
    return [ack_id for one in said for ack_id in one.ack_ids]


def invalid(said: Sequence[StreamingPullResponse.AcknowledgeConfirmation]) -> list[str]:
    return [ack_id for one in said for ack_id in one.invalid_ack_ids]


async def come(read: Sequence[object], count: int) -> None:
    await eventually(lambda: len(read) >= count, within=10, what=f"{count} messages over the stream")


async def one_by_one(project: Project, subscription: str, count: int) -> list[str]:
    """What comes when each is acknowledged before the next is pulled."""
    came = []
    for _ in range(count):
        (one,) = await project.taken(subscription, 1)
        await project.link.acknowledge(subscription, one.ack_id)
        came.append(one.data.decode())
    return came


async def test_with_exactly_once_delivery_an_id_that_was_given_back_acknowledges_nothing(project: Project) -> None:
    await project.topic()
    subscription = await project.subscribe(enable_exactly_once_delivery=True)
    await project.publish("a")
    (older,) = await project.taken(subscription, 1)
    assert await project.link.keep(subscription, [older.ack_id], 0) == frozenset()
    (newer,) = await project.taken(subscription, 1)

    assert (newer.message_id, newer.ack_id == older.ack_id) == (older.message_id, False)
    assert not await project.link.acknowledge(subscription, older.ack_id)
    assert await project.link.keep(subscription, [older.ack_id, newer.ack_id], 10) == {older.ack_id}
    assert await project.link.acknowledge(subscription, newer.ack_id)


async def test_without_it_nothing_is_refused(project: Project) -> None:
    await project.topic()
    subscription = await project.subscribe()
    await project.publish("a")
    (older,) = await project.taken(subscription, 1)
    await project.link.keep(subscription, [older.ack_id], 0)
    await project.taken(subscription, 1)

    assert await project.link.acknowledge(subscription, older.ack_id)
    assert await project.link.keep(subscription, [older.ack_id], 10) == frozenset()


async def test_deliveries_are_counted_and_after_the_last_one_a_message_is_a_dead_letter(project: Project) -> None:
    await project.topic()
    dead = await project.topic("dead")
    letters = await project.subscribe("letters", "dead")
    policy = {"dead_letter_topic": dead, "max_delivery_attempts": 5}
    subscription = await project.subscribe(dead_letter_policy=policy)
    await project.publish("a", route="mine")
    for attempt in range(1, 6):
        (one,) = await project.taken(subscription, 1)
        assert one.delivery_attempt == attempt
        await project.link.keep(subscription, [one.ack_id], 0)
    looking = asyncio.create_task(project.link.pull(subscription, 1))  # The emulator moves it where it would come next.
    (letter,) = await project.taken(letters, 1)
    await ended(looking)

    assert letter.data == b"a"
    assert letter.attributes["route"] == "mine"
    assert letter.delivery_attempt == 0


@published
async def test_with_a_retry_policy_what_was_given_back_rests(project: Project) -> None:
    await project.topic()
    subscription = await project.subscribe(retry_policy={"minimum_backoff": "2s", "maximum_backoff": "2s"})
    await project.publish("a")
    (one,) = await project.taken(subscription, 1)
    begun = time.monotonic()
    await project.link.keep(subscription, [one.ack_id], 0)

    await project.taken(subscription, 1)

    assert time.monotonic() - begun >= 1.5


async def test_under_one_key_messages_come_in_their_order(project: Project) -> None:
    await project.topic()
    subscription = await project.subscribe(enable_message_ordering=True)
    await project.publish("a", "b", "c", key="k")

    assert await one_by_one(project, subscription, 3) == ["a", "b", "c"]


@published
async def test_what_was_given_back_comes_before_what_follows_it_under_its_key(project: Project) -> None:
    await project.topic()
    subscription = await project.subscribe(enable_message_ordering=True)
    await project.publish("a", "b", "c", key="k")
    (first,) = await project.taken(subscription, 1)
    await project.link.keep(subscription, [first.ack_id], 0)

    assert first.data == b"a"
    assert await one_by_one(project, subscription, 3) == ["a", "b", "c"]


@published
async def test_a_stream_has_no_more_unsettled_than_its_first_request_says(project: Project) -> None:
    await project.topic()
    subscription = await project.subscribe()
    await project.publish(*[str(n) for n in range(6)])
    async with bare_stream(project, subscription, max_outstanding_messages=2) as (call, came, _):
        for settled in (0, 2, 4):
            await come(came, settled + 2)
            assert len(came) == settled + 2
            await call.write(StreamingPullRequest(ack_ids=[one.ack_id for one in came[settled:]]))

    assert sorted(one.message.data for one in came) == [str(n).encode() for n in range(6)]


@published
async def test_a_stream_confirms_what_it_was_asked_to_acknowledge_and_names_what_is_not_valid(project: Project) -> None:
    await project.topic()
    subscription = await project.subscribe(enable_exactly_once_delivery=True)
    await project.publish("a")
    async with bare_stream(project, subscription) as (call, came, said):
        await come(came, 1)
        await project.link.keep(subscription, [came[0].ack_id], 0)
        await come(came, 2)
        older, newer = (one.ack_id for one in came)
        await call.write(StreamingPullRequest(ack_ids=[older]))
        await call.write(StreamingPullRequest(ack_ids=[newer]))
        await eventually(lambda: newer in valid(said) and older in invalid(said), within=10, what="both are answered")

    assert (valid(said), invalid(said)) == ([newer], [older])


@published
async def test_producers_read_their_own_results_by_a_filter_and_a_stream(project: Project) -> None:
    await project.topic()
    subscription = await project.subscribe(filter='attributes.result_route = "mine"')
    await project.publish("theirs", result_route="theirs")
    await project.publish("of nobody")
    await project.publish("mine", result_route="mine")
    read: list[Message] = []
    with streaming(subscription, read):
        await come(read, 1)

    assert [one.data for one in read] == [b"mine"]


async def test_googles_own_subscriber_hears_whether_an_acknowledgement_counted(project: Project) -> None:
    await project.topic()
    subscription = await project.subscribe(enable_exactly_once_delivery=True)
    await project.publish("a")
    read: list[Message] = []
    with streaming(subscription, read):
        await come(read, 1)
        await project.link.keep(subscription, [read[0].ack_id], 0)
        await come(read, 2)
        refused = await asyncio.to_thread(read[0].ack_with_response().exception, 10)
        confirmed = await asyncio.to_thread(read[1].ack_with_response().result, 10)

    assert isinstance(refused, AcknowledgeError)
    assert refused.error_code is AcknowledgeStatus.INVALID_ACK_ID
    assert confirmed is AcknowledgeStatus.SUCCESS


async def test_of_a_subscription_that_was_deleted_nothing_can_be_pulled(project: Project) -> None:
    await project.topic()
    subscription = await project.subscribe()
    await project.publish("a")
    await project.subscriber.delete_subscription(subscription=subscription)

    with pytest.raises(StoreUnavailable, match="NOT_FOUND"):
        await project.link.pull(subscription, 1)
    with pytest.raises(NotFound):
        await project.subscriber.get_subscription(subscription=subscription)


@pytest.mark.parametrize("seconds", [pytest.param(9, marks=published), 601])
async def test_a_deadline_under_ten_seconds_or_over_ten_minutes_is_refused(project: Project, seconds: int) -> None:
    await project.topic()

    with pytest.raises(InvalidArgument):
        await project.subscribe(ack_deadline_seconds=seconds)


async def test_a_name_that_is_too_short_is_refused(project: Project) -> None:
    with pytest.raises(InvalidArgument):
        await project.topic("t")
