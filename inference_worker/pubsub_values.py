"""What Pub/Sub's calls are made with, and what is made of their answers; and the calls themselves, as a seam. Pure.

Who makes the calls is `pubsub_link.py`, which alone loads the service's libraries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

SILENT: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "INTERNAL", "UNKNOWN", "RESOURCE_EXHAUSTED"})
"""Statuses of failures that pass by themselves."""

DENIED: Final = "PERMISSION_DENIED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """One delivery of a message. Its ack id is of this delivery alone."""

    ack_id: str
    message_id: str
    """The service's own, the same at every delivery."""
    data: bytes
    attributes: Mapping[str, str]
    delivery_attempt: int
    """From 1; 0 where the subscription has no dead-letter policy, as then nobody counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """What the service says of a subscription."""

    topic: str = ""
    """Empty where we may not know."""
    ack_deadline_s: int = 10
    exactly_once: bool = False
    dead_letter_topic: str = ""
    most_deliveries: int = 0
    """After which it goes to the dead-letter topic; 0: never."""


class PubsubLink(Protocol):
    """The calls. Each raises StoreUnavailable, whose code is the gRPC status: refused, or not answered in time."""

    def connected(self) -> bool:
        """Whether there is a connection now; where there is none, one is tried."""

    async def look(self, subscription: str) -> Subscription:
        """Look at a subscription."""

    async def pull(self, subscription: str, most: int) -> list[Pulled]:
        """Wait for messages, up to `most`; none where none has come for a while."""

    async def keep(self, subscription: str, ack_ids: Sequence[str], seconds: int) -> frozenset[str]:
        """Set the deadline of deliveries, 0 to give them back; those that are not ours any more.

        Who is refused is told with exactly-once delivery alone.
        """

    async def acknowledge(self, subscription: str, ack_id: str) -> bool:
        """Acknowledge a delivery; False where it is not ours any more."""

    async def publish(self, topic: str, data: bytes, attributes: Mapping[str, str]) -> None:
        """Publish a message; returns once the service has it."""
