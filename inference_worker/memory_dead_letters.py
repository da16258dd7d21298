"""The dead letters of the embedded queue, with the same promises as those of a broker."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from inference_worker.errors import QueueFull
from inference_worker.rmq_dead_letters import NotPutBack
from inference_worker.transports.memory import DeadMessage, MemoryBroker


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryLetter:
    """A dead letter; the same names as one of RabbitMQ has."""

    dead: DeadMessage
    origin: str
    """The queue that it died in."""

    @property
    def body(self) -> bytes:
        return self.dead.body

    @property
    def message_id(self) -> str | None:
        return self.dead.message_id

    @property
    def headers(self) -> Mapping[str, object]:
        return {**self.dead.headers, "x-dead-reason": self.dead.reason, "x-dead-attempts": self.dead.attempts}

    @property
    def deaths(self) -> Sequence[Mapping[str, object]]:
        return [{"queue": self.origin, "reason": self.dead.reason, "time": self.dead.died_at}]


class MemoryDeadLetters:
    """The letters that are there now, the oldest first. Nothing is held: two who look see the same."""

    at_once: Final = False
    """Results are kept elsewhere, so that a replay has its steps."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._left = deque(broker.dead)
        self.ready = len(self._left)

    async def next(self) -> MemoryLetter | None:
        """The next letter; None where there is none."""
        return MemoryLetter(dead=self._left.popleft(), origin=self._broker.queue) if self._left else None

    async def has_queue(self, name: str) -> bool:
        """Whether that is the queue: there is no other."""
        return name == self._broker.queue

    async def put_back(self, letter: MemoryLetter, body: bytes, queue: str) -> None:
        """Add a copy that begins anew.

        Raises:
            NotPutBack: there is no room. The letter is where it was.
        """
        async with self._broker.connect() as connection:
            try:
                await connection.publish(body, message_id=letter.message_id, headers=letter.dead.headers)
            except QueueFull as exc:
                raise NotPutBack(str(exc)) from exc

    async def take_away(self, letter: MemoryLetter) -> None:
        """Remove it. What is gone already stays gone."""
        kept = [dead for dead in self._broker.dead if dead is not letter.dead]
        self._broker.dead.clear()
        self._broker.dead.extend(kept)
