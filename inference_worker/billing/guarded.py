"""A billing sink of another package, held to its promise: an answer in bounded time, and one of those that there are.

What fails is tried again later by whoever sends (`metrics_reporter.py`): no event is lost by it.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from inference_worker.errors import SinkUnavailable
from inference_worker.faults import as_exceptions
from inference_worker.ports import BillingSink, Delivered, Refused

ANSWER_S: Final = 10.0
"""How long one batch may take: as long as `CroesusSink` waits."""


class GuardedSink:
    """See `ports.BillingSink`."""

    def __init__(self, sink: BillingSink, name: str) -> None:
        self._sink = sink
        self._name = name

    async def send(self, events: Sequence[bytes]) -> Delivered | Refused:
        """See `ports.BillingSink`."""
        try:
            async with asyncio.timeout(ANSWER_S):
                with as_exceptions():
                    answer = await self._sink.send(events)
        except SinkUnavailable:
            raise
        except TimeoutError as exc:
            raise SinkUnavailable(f"{self._name}: no answer within {ANSWER_S:g} s") from exc
        except Exception as exc:
            raise SinkUnavailable(f"{self._name}: {type(exc).__name__}: {exc}") from exc
        if not isinstance(answer, Delivered | Refused):
            raise SinkUnavailable(f"{self._name}: answers with a {type(answer).__name__}, which is no answer")
        return answer
