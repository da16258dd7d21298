"""What the tests' Pub/Sub service knows: messages, and who has which of them until when. See `pubsub_server`.

Not here: the protocol, and whether what is asked for is allowed.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

MOST_BYTES: Final = 10 * 1024 * 1024
"""Of a message: its data and attributes together. And of what one answer has: beyond it nothing is added to it."""

MOST_KEPT: Final = 200_000
"""Messages in one subscription. It is a service for tests."""

_numbers: Final = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """As it was published."""

    data: bytes = b""
    attributes: Mapping[str, str] = field(default_factory=dict)
    ordering_key: str = ""
    published_at: float = 0.0
    """Unix seconds."""
    id: str = field(default_factory=lambda: str(next(_numbers)))

    @property
    def size_bytes(self) -> int:
        """What is counted against the limit."""
        return len(self.data) + sum(len(name) + len(value) for name, value in self.attributes.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a subscription was told when it was made."""

    name: str = ""
    deadline_s: float = 10.0
    exactly_once: bool = False
    ordered: bool = False
    wants: tuple[str, str] | None = None
    """An attribute and its value: other messages are none of its business."""
    least_rest_s: float = 0.0
    most_rest_s: float = 0.0
    """How long a message rests between two deliveries."""
    dead_letters: "Topic | None" = None
    most_deliveries: int = 0


@dataclass(slots=True, eq=False)
class Lane:
    """Copies that are handed out one batch after the other: those of one ordering key; or a single copy without one."""

    key: str
    copies: "deque[Copy]" = field(default_factory=deque)
    """Not acknowledged yet, in the order of their publishing."""
    held: int = 0
    waits: bool = False
    """It is in line, or will be after a rest."""
    rest_s: float = 0.0


@dataclass(slots=True, eq=False)
class Copy:
    """A message in one subscription."""

    message: Message
    lane: Lane
    deliveries: int = 0
    ack_ids: list[str] = field(default_factory=list)
    """All that it was ever handed out under."""
    held_as: str = ""
    """The one of them under which somebody has it; empty while it waits."""
    lapsing: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a pull has given."""

    ack_id: str
    message: Message
    attempt: int
    """Which delivery it is; 0 where there is no dead-letter policy."""


class Subscription:
    """Messages that wait, and messages that somebody has."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.deleted = False
        self._kept = 0
        self._line: deque[Lane] = deque()
        self._lanes: dict[str, Lane] = {}
        """By ordering key."""
        self._by_ack_id: dict[str, Copy] = {}
        """All ids ever given of a message that is not acknowledged."""
        self._changed = asyncio.Event()

    def add(self, message: Message) -> None:
        """It has been published."""
        if self.terms.wants is not None and self.terms.wants not in message.attributes.items():
            return
        if self._kept >= MOST_KEPT:
            raise OverflowError(f"more than {MOST_KEPT} messages are not acknowledged")
        self._kept += 1
        key = message.ordering_key if self.terms.ordered else ""
        lane = self._lanes.setdefault(key, Lane(key)) if key else Lane(key)
        lane.copies.append(Copy(message, lane))
        self._line_up(lane)

    async def pull(
        self, most: int, *, within_s: float, most_bytes: int = MOST_BYTES, deadline_s: float | None = None
    ) -> Sequence[Taken]:
        """Take up to so many, waiting for one. A message that is given is held from this moment on."""
        until = asyncio.get_running_loop().time() + within_s
        while not self.deleted:
            if taken := self._take(most, most_bytes, self.terms.deadline_s if deadline_s is None else deadline_s):
                return taken
            try:
                async with asyncio.timeout_at(until):
                    await self.changed()
            except TimeoutError:
                break
        return []

    async def changed(self) -> None:
        """Wait until a message has come, or has left somebody's hands, or the subscription is deleted."""
        self._changed.clear()
        await self._changed.wait()

    def acknowledge(self, ack_ids: Iterable[str]) -> Sequence[str]:
        """These are done. Returns the ids that are not valid, where that counts."""
        wrong = []
        for ack_id in ack_ids:
            copy = self._by_ack_id.get(ack_id)
            if copy is None or (self.terms.exactly_once and copy.held_as != ack_id):
                wrong.append(ack_id)
            else:
                self._end(copy)
        return wrong if self.terms.exactly_once else ()

    def modify(self, ack_ids: Iterable[str], seconds: float) -> Sequence[str]:
        """They are held for so long from now on. Returns the ids that are not valid, where that counts."""
        wrong = []
        for ack_id in ack_ids:
            if not self.holds(ack_id):
                wrong.append(ack_id)
            elif seconds == 0:
                self._back(self._by_ack_id[ack_id])
            else:
                self._hold(self._by_ack_id[ack_id], seconds)
        return wrong if self.terms.exactly_once else ()

    def holds(self, ack_id: str) -> bool:
        """Whether somebody has a message by this id."""
        copy = self._by_ack_id.get(ack_id)
        return copy is not None and copy.held_as == ack_id

    def delete(self) -> None:
        """Nothing comes out of it any more."""
        self.deleted = True
        for copy in {id(one): one for one in self._by_ack_id.values()}.values():
            self._let_go(copy)
        self._by_ack_id.clear()
        self._changed.set()

    def _take(self, most: int, most_bytes: int, deadline_s: float) -> Sequence[Taken]:
        taken: list[Taken] = []
        size = 0
        while self._line and len(taken) < most and size < most_bytes:
            lane = self._line.popleft()
            lane.waits = False
            for copy in lane.copies:
                if len(taken) == most or size >= most_bytes:
                    break
                taken.append(self._hand_out(copy, deadline_s))
                size += copy.message.size_bytes
        return taken

    def _hand_out(self, copy: Copy, deadline_s: float) -> Taken:
        copy.deliveries += 1
        copy.lane.held += 1
        copy.held_as = f"{copy.message.id}-{next(_numbers)}"
        copy.ack_ids.append(copy.held_as)
        self._by_ack_id[copy.held_as] = copy
        self._hold(copy, deadline_s)
        attempt = copy.deliveries if self.terms.dead_letters is not None else 0
        return Taken(ack_id=copy.held_as, message=copy.message, attempt=attempt)

    def _hold(self, copy: Copy, seconds: float) -> None:
        if copy.lapsing is not None:
            copy.lapsing.cancel()
        copy.lapsing = asyncio.get_running_loop().call_later(seconds, self._back, copy)

    def _let_go(self, copy: Copy) -> None:
        if copy.lapsing is not None:
            copy.lapsing.cancel()
            copy.lapsing = None
            copy.lane.held -= 1
        copy.held_as = ""

    def _back(self, copy: Copy) -> None:
        """Nobody has it any more, nor what comes after it under its key."""
        lane, terms = copy.lane, self.terms
        for one in itertools.islice(lane.copies, lane.copies.index(copy), None):
            self._let_go(one)
        if terms.dead_letters is not None and copy.deliveries >= terms.most_deliveries:
            terms.dead_letters.publish([self._letter(copy)])
            self._end(copy)
            return
        # Beyond 2 ** 64 it is the longest one anyhow, and a float would overflow.
        rest_s = min(terms.least_rest_s * 2.0 ** min(copy.deliveries - 1, 64), terms.most_rest_s)
        lane.rest_s = max(lane.rest_s, rest_s)
        self._line_up(lane)

    def _letter(self, copy: Copy) -> Message:
        """It is published anew, with what the service says of it."""
        project, _, name = self.terms.name.removeprefix("projects/").partition("/subscriptions/")
        told = {
            "CloudPubSubDeadLetterSourceDeliveryCount": str(copy.deliveries),
            "CloudPubSubDeadLetterSourceSubscription": name,
            "CloudPubSubDeadLetterSourceSubscriptionProject": project,
        }
        attributes = {**copy.message.attributes, **told}
        return replace(copy.message, id=str(next(_numbers)), attributes=attributes)

    def _end(self, copy: Copy) -> None:
        self._let_go(copy)
        self._kept -= 1
        copy.lane.copies.remove(copy)
        for ack_id in copy.ack_ids:
            del self._by_ack_id[ack_id]
        if copy.lane.key and not copy.lane.copies:
            self._lanes.pop(copy.lane.key, None)
        self._line_up(copy.lane)

    def _line_up(self, lane: Lane) -> None:
        """Have it wait for a pull, after its rest, if nobody has anything of it."""
        self._changed.set()
        if lane.held or lane.waits or not lane.copies:
            return
        lane.waits = True
        rest_s, lane.rest_s = lane.rest_s, 0.0
        if rest_s > 0:
            asyncio.get_running_loop().call_later(rest_s, self._rested, lane)
        else:
            self._line.append(lane)

    def _rested(self, lane: Lane) -> None:
        self._line.append(lane)
        self._changed.set()


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
