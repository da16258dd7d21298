"""What the metric server is told of each disposition, held until the next flush.

Bounded by count and by bytes. Where it is full, the oldest records go, and are counted. It sends nothing.
"""

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from inference_worker.disposition import DispositionName
from inference_worker.messages import Status

RECORD_BYTES: Final = 700
"""What a record takes in memory besides its request id, rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One disposition, under the names of the metric server's batch. None is what is not known or does not apply."""

    request_id: str | None
    """None where the message had no usable one."""
    status_code: int | None
    status: Status | None
    """None where no result was written: a retry, a requeue."""
    disposition: DispositionName
    attempt: int
    """0 for the first."""
    received_at: float | None
    finished_at: float
    queue_s: float | None
    model_s: float | None
    ttft_s: float | None
    tbt_s: float | None
    prompt_tokens: int | None
    completion_tokens: int | None
    total_tokens: int | None


class MetricsBuffer:
    """Records that wait for the next flush. `add` never waits and never fails.

    `count_lost` is told of every record that will never be sent, once.
    """

    def __init__(
        self, limit: int, *, limit_bytes: int = 16 * 1024 * 1024, count_lost: Callable[[int], None] | None = None
    ) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._count_lost = count_lost
        self._records: deque[RequestRecord] = deque()
        self.held_bytes = 0
        self.dropped = 0
        """Records lost since the last flush that arrived."""

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        """Keep a record; the oldest ones make room."""
        self._records.append(record)
        self.held_bytes += _size_bytes(record)
        while self._records and (len(self._records) > self._limit or self.held_bytes > self._limit_bytes):
            self.held_bytes -= _size_bytes(self._records.popleft())
            self._lose(1)

    def take(self) -> tuple[list[RequestRecord], int]:
        """Hand over everything, with how many records were lost before; both begin anew."""
        taken = list(self._records), self.dropped
        self._records.clear()
        self.held_bytes = self.dropped = 0
        return taken

    def not_sent(self, records: int, dropped: int) -> None:
        """What was taken did not arrive: its records are lost, and nobody has heard of the `dropped` ones yet."""
        self.dropped += dropped
        self._lose(records)

    def _lose(self, records: int) -> None:
        self.dropped += records
        if self._count_lost is not None:
            self._count_lost(records)


def _size_bytes(record: RequestRecord) -> int:
    return RECORD_BYTES + sys.getsizeof(record.request_id)
