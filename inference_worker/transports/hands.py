"""What one session has taken from the stream: handed up and unsettled, or read ahead. Pure: times are handed in.

Reading ahead spares a fast model the round trip between two jobs. It must not take work away from idle neighbours: it
is done only while jobs are short, and what has lain for about a second goes back.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from inference_worker.ports import Delivery

SHORT_S: Final = 0.25
"""Jobs that hold their place for less than this are worth reading ahead for."""

LOOKED_BACK: Final = 8
"""So many of the last jobs say whether jobs are short."""

LONGEST_AHEAD_S: Final = 1.0
"""What was read ahead and could not be handed up for so long goes back."""

MOST_BYTES: Final = 16 * 1024 * 1024
"""So much is asked for in one go, and may lie read ahead: a larger entry comes alone."""

SMALL_BYTES: Final = 512 * 1024
"""Smaller entries are not told apart. The next ones may be of any size: never more than 32 are asked for at once."""


@dataclass(slots=True, eq=False)
class Receipt:
    """What it takes to settle an entry."""

    entry_id: str
    count: int
    fields: tuple[bytes, ...]
    read_at: float
    size_bytes: int = 0
    handed_up_at: float = 0.0
    unclear: bool = False
    """A settlement was sent and its answer did not come: a repeat that finds nothing was preceded by it."""
    more: object = None
    """What else its transport needs."""


def receipt_of(delivery: Delivery) -> Receipt:
    """The receipt of a delivery of ours."""
    assert isinstance(delivery.receipt, Receipt)
    return delivery.receipt


class Appetite:
    """How many entries are asked for in one go: Redis bounds their number only, and they may be of any size.

    An answer that takes longer than one waits for would be asked for again and again.
    """

    def __init__(self) -> None:
        self._largest_bytes = SMALL_BYTES

    def portion(self, wanted: int) -> int:
        """At most so many now; of what is wanted at all, one at least."""
        return min(wanted, max(MOST_BYTES // self._largest_bytes, 1))

    def saw(self, sizes_bytes: Sequence[int]) -> None:
        """Entries of these sizes came: the next ones are taken to be like them, or, in time, smaller."""
        if sizes_bytes:
            self._largest_bytes = max(max(sizes_bytes), self._largest_bytes // 2, SMALL_BYTES)


class Hands:
    """Deliveries by their entry's id."""

    def __init__(self) -> None:
        self.limit = 0
        """The most that is handed up and unsettled."""
        self._held: dict[str, Delivery] = {}
        self._ahead: dict[str, Delivery] = {}
        """In the order in which they are handed up."""
        self._ahead_bytes = 0
        self._settling: set[str] = set()
        """Of those held, what is being settled: it makes room for the next one already."""
        self._lasted: deque[float] = deque(maxlen=LOOKED_BACK)

    # ------------------------------------------------------------ how much more

    @property
    def jobs_are_short(self) -> bool:
        """Whether reading ahead pays and harms nobody. Not before a job was seen to end."""
        return bool(self._lasted) and sum(self._lasted) / len(self._lasted) < SHORT_S

    @property
    def wanted(self) -> int:
        """How many more entries may be read now."""
        if self._ahead_bytes >= MOST_BYTES:
            return 0
        spare = self.limit - self._unsettled - len(self._ahead)
        if not self.limit or not self.jobs_are_short:
            return max(spare, 0)
        if -spare > self.limit // 2:
            return 0  # Not one by one: half of what may be read ahead is fetched in one go.
        return max(spare + self.limit, 0)

    @property
    def free(self) -> bool:
        """Whether a delivery can be handed up."""
        return bool(self._ahead) and self._unsettled < self.limit

    @property
    def _unsettled(self) -> int:
        """At most as many again may be on their way out, so that a silent Redis does not let them pile up."""
        return len(self._held) - min(len(self._settling), self.limit)

    # ------------------------------------------------------------ in and out

    def put(self, delivery: Delivery) -> None:
        """An entry was read. One that is in our hands already stays as it is: its group was made anew, for example."""
        receipt = receipt_of(delivery)
        known = self._held.get(receipt.entry_id) or self._ahead.get(receipt.entry_id)
        if known is not None:
            receipt_of(known).count = receipt.count
        else:
            self._ahead[receipt.entry_id] = delivery
            self._ahead_bytes += receipt.size_bytes

    def hand_up(self, at: float) -> Delivery:
        """The next delivery; `free` says that there is one."""
        entry_id = next(iter(self._ahead))
        delivery = self._held[entry_id] = self._take_out(entry_id)
        receipt_of(delivery).handed_up_at = at
        return delivery

    def holds(self, delivery: Delivery) -> bool:
        """Whether this very delivery is still ours, as far as we know."""
        return self._held.get(receipt_of(delivery).entry_id) is delivery

    def settling(self, delivery: Delivery, on: bool) -> None:
        """A settlement begins, or has come to nothing."""
        entry_id = receipt_of(delivery).entry_id
        if on and self.holds(delivery):
            self._settling.add(entry_id)
        else:
            self._settling.discard(entry_id)

    def let_go(self, delivery: Delivery, at: float) -> None:
        """A delivery is settled, or was found to be lost."""
        if self.holds(delivery):
            receipt = receipt_of(delivery)
            del self._held[receipt.entry_id]
            self._settling.discard(receipt.entry_id)
            self._lasted.append(at - receipt.handed_up_at)

    def drop(self, entry_id: str, count: int) -> None:
        """An entry was found to be somebody else's by now."""
        delivery = self._held.get(entry_id) or self._ahead.get(entry_id)
        if delivery is not None and receipt_of(delivery).count == count:
            if entry_id in self._ahead:
                self._take_out(entry_id)
            self._held.pop(entry_id, None)
            self._settling.discard(entry_id)
            delivery.lost.set()

    def replaced(self, entry_id: str) -> None:
        """The same entry was taken anew: what is in our hands of it is settled by nobody."""
        if (delivery := self._held.get(entry_id) or self._ahead.get(entry_id)) is not None:
            self.drop(entry_id, receipt_of(delivery).count)

    def take_back(self, at: float | None = None) -> list[Delivery]:
        """Take out what cannot be handed up and has lain for too long at `at`; without `at`, however long it has lain.

        The latest ones go: they would be handed up last.
        """
        surplus = min(self._unsettled + len(self._ahead) - self.limit, len(self._ahead))
        if surplus <= 0:
            return []
        last = list(self._ahead)[-surplus:]
        oldest_s = 0.0 if at is None else at - receipt_of(self._ahead[last[0]]).read_at
        if at is not None and oldest_s < LONGEST_AHEAD_S:
            return []
        if at is not None:
            # Jobs are long by now, though none has ended to say so.
            self._lasted.append(SHORT_S * LOOKED_BACK)
        return [self._take_out(entry_id) for entry_id in last]

    def lose_all(self) -> None:
        """Nothing is ours any more."""
        for delivery in self.deliveries():
            delivery.lost.set()
        self._held.clear()
        self._settling.clear()
        self._ahead.clear()
        self._ahead_bytes = 0

    def everything(self) -> list[Receipt]:
        """What is to be kept."""
        return [receipt_of(delivery) for delivery in self.deliveries()]

    def deliveries(self) -> list[Delivery]:
        """Handed up or read ahead."""
        return [*self._held.values(), *self._ahead.values()]

    def _take_out(self, entry_id: str) -> Delivery:
        delivery = self._ahead.pop(entry_id)
        self._ahead_bytes -= receipt_of(delivery).size_bytes
        return delivery
