"""What the tests' Pub/Sub service knows: messages, and who has which of them until when. See `pubsub_server`."""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

MOST_BYTES: Final = 10 * 1024 * 1024
"""Of a message: its data and attributes together."""

MOST_WAITING: Final = 200_000
"""In one subscription. It is a service for tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """As it was published."""

    id: str
    data: bytes
    attributes: Mapping[str, str]

    @property
    def size_bytes(self) -> int:
        """What is counted against the limit."""
        return len(self.data) + sum(len(name) + len(value) for name, value in self.attributes.items())


@dataclass(slots=True, eq=False)
class Copy:
    """A message in one subscription."""

    message: Message
    deliveries: int = 0
    ack_ids: list[str] = field(default_factory=list)
    """All that it was ever handed out under."""
    held_as: str = ""
    """The one of them under which somebody has it; empty while it waits."""
    until: float = 0.0
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a pull has given."""

    ack_id: str
    message: Message
    attempt: int
    """Which delivery it is; 0 where there is no dead-letter policy."""


class Subscription:
    """Messages that wait, and messages that somebody has. `described` is what it was created as."""

    def __init__(
        self,
        described: Any,
        *,
        clock: Callable[[], float],
        deadline_s: float,
        exactly_once: bool,
        dead_letters: "Topic | None",
        most_deliveries: int,
    ) -> None:
        self.described = described
        self._clock = clock
        self._deadline_s = deadline_s
        self._exactly_once = exactly_once
        self._dead_letters = dead_letters
        self._most_deliveries = most_deliveries
        self._waiting: deque[Copy] = deque()
        self._by_ack_id: dict[str, Copy] = {}
        """All ids ever given of a message that is not acknowledged."""
        self._lapsing: list[tuple[float, int, Copy]] = []
        self._numbers = itertools.count(1)
        self._arrived = asyncio.Event()

    def add(self, message: Message) -> None:
        """It has been published."""
        if len(self._waiting) >= MOST_WAITING:
            raise OverflowError(f"more than {MOST_WAITING} messages wait")
        self._wait(Copy(message))

    async def pull(self, most: int, *, within_s: float) -> Sequence[Taken]:
        """Take up to so many, waiting for one. A message that is given is held from this moment on."""
        until = self._clock() + within_s
        while True:
            self._lapse()
            if taken := [self._hand_out(copy) for copy in self._next(most)]:
                return taken
            self._arrived.clear()
            next_at = min(until, self._lapsing[0][0] if self._lapsing else until)
            try:
                async with asyncio.timeout(max(next_at - self._clock(), 0.0)):
                    await self._arrived.wait()
            except TimeoutError:
                if self._clock() >= until:
                    return []

    def acknowledge(self, ack_ids: Iterable[str]) -> Sequence[str]:
        """These are done. Returns the ids that are not valid, where that counts."""
        self._lapse()
        wrong = []
        for ack_id in ack_ids:
            copy = self._by_ack_id.get(ack_id)
            if copy is None or (self._exactly_once and copy.held_as != ack_id):
                wrong.append(ack_id)
            elif not copy.done:
                copy.done = True
                self._forget(copy)
        return wrong if self._exactly_once else ()

    def modify(self, ack_ids: Iterable[str], seconds: float) -> Sequence[str]:
        """They are held for so long from now on. Returns the ids that are not valid, where that counts."""
        self._lapse()
        wrong = []
        for ack_id in ack_ids:
            copy = self._by_ack_id.get(ack_id)
            if copy is None or copy.held_as != ack_id:
                wrong.append(ack_id)
            elif seconds == 0:
                self._back(copy)
            else:
                self._hold(copy, seconds)
        return wrong if self._exactly_once else ()

    def _next(self, most: int) -> Iterable[Copy]:
        while most > 0 and self._waiting:
            copy = self._waiting.popleft()
            if copy.done:
                continue
            if self._dead_letters is not None and copy.deliveries >= self._most_deliveries:
                copy.done = True
                self._forget(copy)
                told = {**copy.message.attributes, "CloudPubSubDeadLetterSourceDeliveryCount": str(copy.deliveries)}
                self._dead_letters.publish([replace(copy.message, attributes=told)])
                continue
            most -= 1
            yield copy

    def _hand_out(self, copy: Copy) -> Taken:
        copy.deliveries += 1
        copy.held_as = f"{copy.message.id}-{next(self._numbers)}"
        copy.ack_ids.append(copy.held_as)
        self._by_ack_id[copy.held_as] = copy
        self._hold(copy, self._deadline_s)
        attempt = copy.deliveries if self._dead_letters is not None else 0
        return Taken(ack_id=copy.held_as, message=copy.message, attempt=attempt)

    def _hold(self, copy: Copy, seconds: float) -> None:
        copy.until = self._clock() + seconds
        heapq.heappush(self._lapsing, (copy.until, next(self._numbers), copy))
        self._arrived.set()  # Who waits looks anew how long.

    def _lapse(self) -> None:
        """Have what was held for too long wait again."""
        now = self._clock()
        while self._lapsing and self._lapsing[0][0] <= now:
            until, _, copy = heapq.heappop(self._lapsing)
            if copy.held_as and not copy.done and copy.until == until:
                self._back(copy)

    def _back(self, copy: Copy) -> None:
        copy.held_as = ""
        self._wait(copy)

    def _wait(self, copy: Copy) -> None:
        self._waiting.append(copy)
        self._arrived.set()

    def _forget(self, copy: Copy) -> None:
        for ack_id in copy.ack_ids:
            del self._by_ack_id[ack_id]


@dataclass(slots=True, eq=False)
class Topic:
    """A name, and who has subscribed to it."""

    name: str
    subscriptions: list[Subscription] = field(default_factory=list)

    def publish(self, messages: Sequence[Message]) -> None:
        """To all of them."""
        for subscription in self.subscriptions:
            for message in messages:
                subscription.add(message)
