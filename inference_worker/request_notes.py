"""What is told of a message once it is settled: the log's canonical line, the metric server's record, the counters.

Not here: what is counted by who does it, where it happens (reconnects, refused publishes, suspensions).
"""

from collections.abc import Callable, Mapping

import structlog

from inference_worker.disposition import (
    Answered,
    Concluded,
    DispositionName,
    Failed,
    Interrupted,
    Malformed,
    NotAdmitted,
    NotStored,
    Outcome,
)
from inference_worker.message_processor import Job
from inference_worker.messages import Reply, Timings, shown_id
from inference_worker.metrics import WorkerMetrics
from inference_worker.metrics_buffer import MetricsBuffer, RequestRecord
from inference_worker.ports import AlreadyAnswered

log = structlog.get_logger(__name__)


class Notes:
    """Tells the three of them, once for each delivery."""

    def __init__(self, metrics: WorkerMetrics, buffer: MetricsBuffer, now: Callable[[], float]) -> None:
        self._metrics = metrics
        self._buffer = buffer
        self._now = now
        self._log = log.bind()  # Once: what a log line costs is mostly finding its logger.

    def settled(self, job: Job, outcome: Outcome, how: DispositionName, settle_s: float) -> None:
        """The canonical line, the record for the metric server, and the counters of one settled message."""
        reply = _reply_of(outcome, how)
        timings = reply.timings if reply is not None else Timings()
        usage = outcome.usage if isinstance(outcome, Concluded) else None
        self._metrics.settled(how, settle_s=settle_s)
        if reply is not None and how != "retry":
            self._metrics.result(reply, usage)
        if isinstance(outcome, Concluded | Failed):
            self._metrics.timed(outcome.reply.timings)
        if isinstance(outcome, Failed) and how == "retry":
            self._metrics.retried(outcome.fault)
        if isinstance(outcome, Answered):
            self._metrics.answered_from_store()
            if outcome.reply.error_code == "cancelled":
                self._metrics.cancelled(
                    "in_call" if isinstance(job.ended_call_because, AlreadyAnswered) else "before_call"
                )
        if isinstance(outcome, NotStored):
            self._metrics.not_stored()
        finished_at = self._now()
        status_code = reply.status_code if reply is not None else _status_of(outcome)
        request_id = id_of(job) or (shown_id(reply.request_id) if reply is not None else None)
        self._buffer.add(
            RequestRecord(
                request_id=request_id,
                status_code=status_code,
                status=reply.status if reply is not None else None,
                disposition=how,
                attempt=job.delivery.attempts,
                received_at=job.request.received_at if job.request is not None else None,
                finished_at=finished_at,
                queue_s=timings.queue_s,
                model_s=timings.model_s,
                ttft_s=timings.ttft_s,
                tbt_s=timings.tbt_s,
                prompt_tokens=usage.input_tokens if usage is not None else None,
                completion_tokens=usage.output_tokens if usage is not None else None,
                total_tokens=usage.total_tokens if usage is not None else None,
            )
        )
        self._log.info(
            "request",
            request_id=request_id,
            disposition=how,
            attempt=job.delivery.attempts,
            status_code=status_code,
            error_code=reply.error_code if reply is not None else None,
            outcome=type(outcome).__name__,
            why=_why(outcome),
            queue_s=_rounded(timings.queue_s),
            model_s=_rounded(timings.model_s),
            settle_s=_rounded(settle_s),
            **_queue_of(job),
            **job.span.ids,
        )
        job.span.settled(outcome, how, request_id=request_id)

    def lost(self, job: Job, outcome: Outcome, *, stored: bool) -> None:
        """A message that the broker has back, or will have; what was stored for it stays."""
        if stored and isinstance(outcome, Concluded):
            self._metrics.result(outcome.reply, outcome.usage)
            self._metrics.timed(outcome.reply.timings)
        self._metrics.delivery_lost(stored=stored)
        self._log.info(
            "the delivery was lost; the broker delivers it again",
            request_id=id_of(job),
            attempt=job.delivery.attempts,
            stored=stored,
            **_queue_of(job),
            **job.span.ids,
        )
        job.span.settled(outcome, "stored" if stored else "lost", request_id=id_of(job))


def id_of(job: Job) -> str | None:
    """The request's id, where the message is a request."""
    return shown_id(job.request.request_id) if job.request is not None else None


def _queue_of(job: Job) -> Mapping[str, str]:
    """Said where there are several."""
    return {} if job.delivery.route is None else {"queue": job.delivery.queue}


def _reply_of(outcome: Outcome, how: DispositionName) -> Reply | None:
    """The reply that was stored with a settlement."""
    match outcome:
        case Concluded(reply=reply):
            return reply if how in ("ack", "dead_letter") else None
        case Failed(reply=reply):
            return reply if how == "dead_letter" else None
        case Malformed(reply=answer):
            return answer if how == "dead_letter" else None
        case _:
            return None


def _status_of(outcome: Outcome) -> int | None:
    return outcome.reply.status_code if isinstance(outcome, Answered) else None


def _why(outcome: Outcome) -> str | None:
    match outcome:
        case Failed(fault=fault, detail=detail):
            return f"{fault.value}: {detail}"[:300]
        case Malformed(reason=reason) | Interrupted(reason=reason) | NotAdmitted(reason=reason):
            return reason[:300]
        case Concluded(reply=reply):
            return reply.error[:300] if reply.error is not None and reply.error_code != "model_error" else None
        case _:
            return None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
