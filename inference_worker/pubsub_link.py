"""Google Cloud Pub/Sub as we use it: pull, deadlines, acknowledgements with their results, confirmed publishing.

The generated asyncio clients over one gRPC channel. The library's own subscriber runs threads, reads ahead and hides
what became of an acknowledgement; here a pull is a call, so that never more is in our hands than was asked for.

What the service refuses or does not answer is `StoreUnavailable`, with the name of the gRPC status as its code. Not
here: what a message means (`transports/gcp_pubsub.py`).
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import google.auth
import grpc
from google.api_core.exceptions import GoogleAPICallError
from google.auth.exceptions import GoogleAuthError
from google.auth.transport.requests import Request
from google.pubsub_v1 import PublisherAsyncClient, SubscriberAsyncClient
from google.pubsub_v1.services.publisher.transports import PublisherGrpcAsyncIOTransport
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcAsyncIOTransport

from inference_worker.errors import StoreUnavailable
from inference_worker.pubsub_values import Pulled, Subscription

CALL_S: Final = 10.0
"""How long the service may take to answer one call."""

PULL_S: Final = 30.0
"""How long one pull waits for a message."""

SCOPES: Final = ("https://www.googleapis.com/auth/pubsub",)
MONITORING_SCOPES: Final = ("https://www.googleapis.com/auth/monitoring.read",)
OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
MOST_IDS: Final = 1000
"""Ack ids in one call: it may be of 512 KiB, and an id is of up to some 200 bytes."""

PERMANENT: Final = "PERMANENT_FAILURE"


class GrpcLink:
    """One channel to the service. See `pubsub_values.PubsubLink`."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._subscriber = SubscriberAsyncClient(transport=SubscriberGrpcAsyncIOTransport(channel=channel))
        self._publisher = PublisherAsyncClient(transport=PublisherGrpcAsyncIOTransport(channel=channel))

    def connected(self) -> bool:
        """See `pubsub_values.PubsubLink`."""
        return bool(self._channel.get_state(try_to_connect=True) == grpc.ChannelConnectivity.READY)

    async def look(self, subscription: str) -> Subscription:
        """See `pubsub_values.PubsubLink`."""
        seen = await _called(
            self._subscriber.get_subscription(subscription=subscription, retry=None, timeout=CALL_S), "look at it"
        )
        letters = seen.dead_letter_policy
        return Subscription(
            topic=seen.topic,
            ack_deadline_s=seen.ack_deadline_seconds or 10,
            exactly_once=seen.enable_exactly_once_delivery,
            dead_letter_topic=letters.dead_letter_topic,
            most_deliveries=letters.max_delivery_attempts if letters.dead_letter_topic else 0,
        )

    async def pull(self, subscription: str, most: int) -> list[Pulled]:
        """See `pubsub_values.PubsubLink`."""
        asked = {"subscription": subscription, "max_messages": most}
        try:
            came = await _called(self._subscriber.pull(request=asked, retry=None, timeout=PULL_S), "pull")
        except StoreUnavailable as exc:
            if exc.code == "DEADLINE_EXCEEDED":
                return []
            raise
        return [
            Pulled(
                ack_id=one.ack_id,
                message_id=one.message.message_id,
                data=one.message.data,
                attributes=dict(one.message.attributes),
                delivery_attempt=one.delivery_attempt,
            )
            for one in came.received_messages
        ]

    async def keep(self, subscription: str, ack_ids: Sequence[str], seconds: int) -> frozenset[str]:
        """See `pubsub_values.PubsubLink`."""
        gone: frozenset[str] = frozenset()
        for some in _portions(ack_ids):
            asked = {"subscription": subscription, "ack_ids": some, "ack_deadline_seconds": seconds}
            gone |= await _refused(
                self._subscriber.modify_ack_deadline(request=asked, retry=None, timeout=CALL_S), "set a deadline"
            )
        return gone

    async def acknowledge(self, subscription: str, ack_id: str) -> bool:
        """See `pubsub_values.PubsubLink`."""
        asked = {"subscription": subscription, "ack_ids": [ack_id]}
        return not await _refused(
            self._subscriber.acknowledge(request=asked, retry=None, timeout=CALL_S), "acknowledge"
        )

    async def publish(self, topic: str, data: bytes, attributes: Mapping[str, str]) -> None:
        """See `pubsub_values.PubsubLink`."""
        asked = {"topic": topic, "messages": [{"data": data, "attributes": dict(attributes)}]}
        await _called(self._publisher.publish(request=asked, retry=None, timeout=CALL_S), "publish")


@asynccontextmanager
async def pubsub_link(emulator: str = "") -> AsyncGenerator[GrpcLink, None]:
    """A channel to the service, with the credentials that its libraries find; or to an emulator, `host:port`.

    Raises:
        StoreUnavailable: there are no credentials.
    """
    if emulator:
        channel = grpc.aio.insecure_channel(emulator, options=OPTIONS)
    else:
        try:
            # Reads files, and may ask the machine's metadata server.
            credentials, _ = await asyncio.to_thread(google.auth.default, scopes=SCOPES)
        except GoogleAuthError as exc:
            raise StoreUnavailable(f"Pub/Sub: {exc}", "UNAUTHENTICATED") from exc
        channel = SubscriberGrpcAsyncIOTransport.create_channel(credentials=credentials, options=OPTIONS)
    try:
        yield GrpcLink(channel)
    finally:
        await channel.close()


class Bearer:
    """A token for the services of Google that are asked over HTTP, made anew when its time is over."""

    def __init__(self) -> None:
        self._credentials: Any = None

    async def token(self) -> str:
        """The token. Raises StoreUnavailable."""
        try:
            return await asyncio.to_thread(self._made)
        except GoogleAuthError as exc:
            raise StoreUnavailable(f"Google's credentials: {exc}", "UNAUTHENTICATED") from exc

    def _made(self) -> str:
        if self._credentials is None:
            self._credentials, _ = google.auth.default(scopes=MONITORING_SCOPES)
        if not self._credentials.valid:
            self._credentials.refresh(Request())
        return str(self._credentials.token)


def _portions(ack_ids: Sequence[str]) -> Iterable[list[str]]:
    return (list(ack_ids[start : start + MOST_IDS]) for start in range(0, len(ack_ids), MOST_IDS))


async def _called(call: Any, what: str) -> Any:
    try:
        return await call
    except GoogleAPICallError as exc:
        raise _unavailable(exc, what) from exc
    except (GoogleAuthError, grpc.RpcError, grpc.aio.UsageError) as exc:
        raise StoreUnavailable(f"Pub/Sub could not be asked to {what}: {exc}", "UNAVAILABLE") from exc


async def _refused(call: Any, what: str) -> frozenset[str]:
    """The ack ids that the service says are nobody's, or another's."""
    try:
        await _called(call, what)
    except StoreUnavailable as exc:
        if gone := _permanent(exc.__cause__):
            return gone
        raise
    return frozenset()


def _permanent(exc: object) -> frozenset[str]:
    return frozenset(ack_id for ack_id, said in _ids(exc) if said.startswith(PERMANENT))


def _ids(exc: object) -> Iterable[tuple[str, str]]:
    """What the service says of single ack ids, in the details of its error."""
    for detail in getattr(exc, "details", None) or ():
        yield from getattr(detail, "metadata", {}).items()


def _unavailable(exc: GoogleAPICallError, what: str) -> StoreUnavailable:
    status = exc.grpc_status_code
    code = "UNKNOWN" if status is None else str(status.name)
    return StoreUnavailable(f"Pub/Sub was asked to {what}: {code} {exc.message or ''}".rstrip(), code)
