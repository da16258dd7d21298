"""What is told of each request under the peer's names, by listening to what a trace is told. See `ports.Tracer`.

What counts as what is the peer's rule: a request is counted when it comes for the first time, a call each time, and its
end once, by whoever has made it: an answer, a failure, or that its time was over. What was answered before, cancelled,
or given back at the end of a process is none of these; those are in our own metrics.

Not here: what gates decide (`pool_gate.py`, `peer_gates.py`), and what waits (`peer_backlog.py`).
"""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final

from inference_worker.disposition import Concluded, Failed, Malformed, NotAdmitted, Outcome
from inference_worker.errors import BadResponse, ModelFailure
from inference_worker.messages import InferenceRequest
from inference_worker.peer_metrics import QueueMetrics
from inference_worker.ports import Answer, CallSpan, Delivery, Span, Tracer

TOO_MANY: Final = 429
ENDED: Final = ("ack", "dead_letter", "stored")
"""What became of a message whose request ended with what was found out now."""


class PeerNotes:
    """Counts by the queue of each delivery, and passes everything on to another tracer."""

    def __init__(self, tracer: Tracer, queues: Mapping[str, QueueMetrics]) -> None:
        """`queues` by their names; of deliveries from another nothing is counted."""
        self._tracer = tracer
        self._queues = queues

    def begin(self, delivery: Delivery) -> Span:
        """See `ports.Tracer`."""
        span = self._tracer.begin(delivery)
        queue = self._queues.get(delivery.queue)
        if queue is None:
            return span
        queue.arrived(first=delivery.attempts == 0 and not delivery.redelivered)
        queue.begun(waited_s=max(asyncio.get_running_loop().time() - delivery.taken_at, 0.0))
        return CountedDelivery(span, queue)

    async def run(self, until: asyncio.Event) -> None:
        """See `ports.Tracer`."""
        await self._tracer.run(until)


class CountedDelivery:
    """See `ports.Span`."""

    __slots__ = ("_queue", "_span")

    def __init__(self, span: Span, queue: QueueMetrics) -> None:
        self._span = span
        self._queue = queue

    @property
    def ids(self) -> Mapping[str, str]:
        """See `ports.Span`."""
        return self._span.ids

    def calling(self, request: InferenceRequest) -> "CountedCall":
        """See `ports.Span`."""
        return CountedCall(self._span.calling(request), self._queue)

    def settled(self, outcome: Outcome, how: str, *, request_id: str | None) -> None:
        """See `ports.Span`."""
        self._span.settled(outcome, how, request_id=request_id)
        _count(self._queue, outcome, how)

    def failed(self, exc: BaseException) -> None:
        """See `ports.Span`."""
        self._span.failed(exc)

    def end(self) -> None:
        """See `ports.Span`."""
        self._span.end()


class CountedCall:
    """See `ports.CallSpan`."""

    __slots__ = ("_begun_at", "_call", "_queue", "_span")

    def __init__(self, span: AbstractContextManager[CallSpan], queue: QueueMetrics) -> None:
        self._span = span
        self._queue = queue
        self._call: CallSpan
        self._begun_at = 0.0

    def __enter__(self) -> "CountedCall":
        self._call = self._span.__enter__()
        self._begun_at = asyncio.get_running_loop().time()
        self._queue.dispatched()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._queue.returned(call_s=asyncio.get_running_loop().time() - self._begun_at)
        self._span.__exit__(kind, exc, tb)

    @property
    def headers(self) -> Mapping[str, str]:
        """See `ports.CallSpan`."""
        return self._call.headers

    def ended(self, answer: Answer | ModelFailure | None, outcome: Outcome | None) -> None:
        """See `ports.CallSpan`."""
        if isinstance(answer, Answer | BadResponse) and answer.status_code == TOO_MANY:
            self._queue.shed()
        self._call.ended(answer, outcome)


def _count(queue: QueueMetrics, outcome: Outcome, how: str) -> None:
    match outcome:
        case Concluded(reply=reply, usage=usage) if how in ENDED:
            match reply.error_code:
                case None:
                    # What is no 2xx is handed on as an answer, and says nothing of tokens.
                    queue.succeeded(usage if 200 <= reply.status_code < 300 else None)
                case "expired" | "deadline_exceeded":
                    queue.expired()
                case "cancelled":
                    pass
                case _:
                    queue.failed()
        case Failed() if how == "retry":
            queue.retried()
        case Failed() if how == "dead_letter":
            queue.failed()
        case Failed() if how in ENDED:
            queue.expired()  # It is given up once its time is over, with whatever answer came last.
        case Malformed() if how in ENDED:
            queue.failed()
        case NotAdmitted(because="waited") if how != "lost":
            queue.requeued_by_gate()
        case _:
            pass
