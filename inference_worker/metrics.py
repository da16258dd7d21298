"""What Prometheus sees of one worker. `docs/metrics.md` has the table; a test holds the two together.

Every label has a fixed set of values, and all of them exist at 0 from the start: a rate over a series that is born with
its first event misses that event. What is not known is NaN, never 0. No id, tenant or text ever becomes a label.
"""

import math
import platform
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from itertools import accumulate
from typing import Final, Literal, Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from inference_worker.disposition import DispositionName, Fault
from inference_worker.messages import ERROR_CODES, Reply, Timings, Usage
from inference_worker.ports import Backlog, LinkState

PREFIX: Final = "inference_worker"

Peer = Literal["broker", "store", "model"]
Suspension = Literal["model", "store", "memory", "operator", "kept", "breaker", "scale"]
"""Why consuming is stopped: the model or the store is unfit, memory is full, an operator said so, answers are kept, the
model fails everything although it says that it is healthy, or fewer replicas are wanted than there are."""
Sink = Literal["metrics", "billing"]
PublishFailure = Literal["returned", "unconfirmed"]
ReplyFate = Literal["sent", "returned", "given_up"]
EventFate = Literal["sent", "refused"]
CancelledWhen = Literal["before_call", "in_call"]

QUEUE_WAIT_BUCKETS_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21_600.0, 43_200.0, 86_400.0),
)
"""5 ms to a day: a queue is where batch work waits."""
MODEL_BUCKETS_S: Final = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Those of vLLM's end-to-end latency, with a few below."""
TTFT_BUCKETS_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""OpenTelemetry's for the time to the first token, and vLLM's beyond."""
TBT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
SETTLE_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

NOT_KNOWN: Final = math.nan


class ModelLoad(Protocol):
    """How busy the model says it is; None is not known."""

    @property
    def kv_cache_usage(self) -> float | None: ...
    @property
    def requests_running(self) -> float | None: ...
    @property
    def requests_waiting(self) -> float | None: ...


class WorkerMetrics:
    """The metrics of one worker, in a registry of their own, so that two workers in one process stay apart."""

    def __init__(self) -> None:
        # Else there is one more series for each counter and histogram: when it was made.
        disable_created_metrics()  # type: ignore[no-untyped-call] # it has no annotations.
        self.registry = CollectorRegistry()
        registry = self.registry

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(name, help_text, labels, namespace=PREFIX, registry=registry)

        def gauge(name: str, help_text: str, *labels: str) -> Gauge:
            return Gauge(name, help_text, labels, namespace=PREFIX, registry=registry)

        def histogram(name: str, help_text: str, buckets: Sequence[float]) -> "_Histogram":
            made = _Histogram(f"{PREFIX}_{name}", help_text, buckets)
            registry.register(made)
            return made

        # Requests
        self._dispositions = _counters(
            counter("dispositions_total", "Messages settled, by what became of them.", "disposition"),
            get_args(DispositionName),
        )
        results = counter("results_total", "Results stored by this worker.", "status", "error_code")
        self._completed = results.labels(status="completed", error_code="none")
        self._failed = {code: results.labels(status="failed", error_code=code) for code in ERROR_CODES}
        retries = counter("retries_total", "Attempts that failed and are tried again, by fault.", "fault")
        self._retries = {fault: retries.labels(fault=fault.name.lower()) for fault in Fault}
        self._answered_from_store = counter(
            "answered_from_store_total", "Deliveries whose request had a terminal result already."
        )
        self._joined = counter("joined_total", "Deliveries that waited for the same request, running in this process.")
        self._cancelled = _counters(
            counter("cancelled_total", "Deliveries whose request its caller has cancelled.", "when"),
            get_args(CancelledWhen),
        )
        self._redelivered = counter("redelivered_total", "Deliveries that somebody has had before.")
        self._deliveries_lost = _counters(
            counter(
                "deliveries_lost_total",
                "Deliveries lost before they were settled, by whether a result is kept.",
                "stored",
            ),
            ("yes", "no"),
        )
        self._claims_lost = counter("claims_lost_total", "Claims on a running request that went to another worker.")
        self._not_stored = counter("not_stored_total", "Messages handed back because the store could not be asked.")
        self.in_flight = gauge("in_flight_requests", "Calls to the model that run now.")
        self.slots = gauge("slots", "Most calls to the model at once.")
        self.claims_waiting = gauge("claims_waiting", "Deliveries that wait for another worker's claim to lapse.")

        # Time
        self.queue_wait = histogram(
            "queue_wait_seconds", "From received_at to the call to the model.", QUEUE_WAIT_BUCKETS_S
        )
        self.model_time = histogram("model_seconds", "The call to the model, to its last byte.", MODEL_BUCKETS_S)
        self.ttft = histogram("time_to_first_token_seconds", "From the call to the first token.", TTFT_BUCKETS_S)
        self.tbt = histogram("time_between_tokens_seconds", "Mean time between two tokens of a call.", TBT_BUCKETS_S)
        self.settle_time = histogram(
            "settle_seconds", "From the outcome to the acknowledgement: store, copy, release, ack.", SETTLE_BUCKETS_S
        )

        # Tokens
        self._input_tokens = counter("input_tokens_total", "Prompt tokens of completed requests.")
        self._output_tokens = counter("output_tokens_total", "Completion tokens of completed requests.")
        self._cached_input_tokens = counter(
            "cached_input_tokens_total", "Those of the prompt tokens that came from the model's cache."
        )

        # Link and suspension
        self._up = _gauges(gauge("up", "1 while a neighbour is fit for work, as last seen.", "peer"), get_args(Peer))
        self._suspended = _gauges(
            gauge("suspended", "1 for each reason for which consuming is stopped now.", "reason"), get_args(Suspension)
        )
        self.consuming = gauge("consuming", "1 while messages flow.")
        self._link_state = _gauges(
            gauge("link_state", "1 for the state that the listener is in.", "state"), get_args(LinkState)
        )
        self._reconnects = counter("reconnects_total", "Connections to the broker opened after the first.")
        self._publish_failures = _counters(
            counter("publish_failures_total", "Publishes that the broker returned or did not confirm.", "reason"),
            get_args(PublishFailure),
        )
        self._replies = _counters(
            counter("replies_total", "Results for requesters that wait at the broker.", "outcome"),
            get_args(ReplyFate),
        )
        self._backlog_ready = gauge("queue_ready_messages", "Messages that nobody holds, at the last look.")
        self._backlog_ready.set(NOT_KNOWN)

        # Memory
        self.kept_results = gauge("kept_results", "Answers that wait for the store.")
        self.held_bytes = gauge("held_bytes", "Bytes of messages and answers in memory, of those that are counted.")

        # Sinks
        self.outbox_events = gauge("outbox_events", "Usage events of the deployment that are not sent yet.")
        self._billing_events = _counters(
            counter("billing_events_total", "Usage events that the receiver took or refused.", "outcome"),
            get_args(EventFate),
        )
        self._flush_failures = _counters(
            counter("flush_failures_total", "Batches that a sink did not take.", "sink"), get_args(Sink)
        )
        self._metric_records_lost = counter(
            "metric_records_dropped_total", "Records that the metric server will never get."
        )

        # The model's own numbers
        self._kv_cache_usage = gauge("model_kv_cache_usage_ratio", "Used part of the model's KV cache, 0 to 1.")
        self._requests_running = gauge("model_requests_running", "Requests that the model runs.")
        self._requests_waiting = gauge("model_requests_waiting", "Requests that wait inside the model.")
        self.scraped(None)

        Info("build", "What this is.", namespace=PREFIX, registry=registry).info(
            {"version": version(), "python_version": platform.python_version()}
        )

    # ------------------------------------------------------------ requests

    def settled(self, disposition: DispositionName, *, settle_s: float) -> None:
        """A message was settled, and that took so long."""
        self._dispositions[disposition].inc()
        self.settle_time.observe(settle_s)

    def result(self, reply: Reply, usage: Usage | None) -> None:
        """A terminal result was stored by us."""
        if reply.status == "completed":
            self._completed.inc()
        elif reply.error_code is not None:
            self._failed[reply.error_code].inc()
        if usage is not None:
            self._input_tokens.inc(usage.input_tokens)
            self._output_tokens.inc(usage.output_tokens)
            self._cached_input_tokens.inc(usage.cached_input_tokens)

    def timed(self, timings: Timings) -> None:
        """A call to the model has ended, whatever came of it."""
        for histogram, seconds in (
            (self.queue_wait, timings.queue_s),
            (self.model_time, timings.model_s),
            (self.ttft, timings.ttft_s),
            (self.tbt, timings.tbt_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def retried(self, fault: Fault) -> None:
        """A failed attempt is tried again."""
        self._retries[fault].inc()

    def answered_from_store(self) -> None:
        """A delivery's request had a terminal result."""
        self._answered_from_store.inc()

    def joined(self) -> None:
        """A delivery waits for a call of the same request that runs here."""
        self._joined.inc()

    def cancelled(self, when: CancelledWhen) -> None:
        """A delivery's request was cancelled by its caller: before the model was called, or meanwhile."""
        self._cancelled[when].inc()

    def redelivered(self) -> None:
        """A delivery has come that somebody had before."""
        self._redelivered.inc()

    def delivery_lost(self, *, stored: bool) -> None:
        """A delivery can be settled no more; whether the result of its request is stored."""
        self._deliveries_lost["yes" if stored else "no"].inc()

    def claim_lost(self) -> None:
        """Another worker has taken over a request that was ours."""
        self._claims_lost.inc()

    def not_stored(self) -> None:
        """A message goes back, since the store could not be asked, or did not take its result."""
        self._not_stored.inc()

    def waiting_elsewhere(self, change: int) -> None:
        """One more (+1) or one less (-1) delivery waits for another worker's claim."""
        self.claims_waiting.inc(change)

    # ------------------------------------------------------------ link

    def peer(self, peer: Peer, up: bool) -> None:
        """A neighbour is fit for work, or not."""
        self._up[peer].set(up)

    def suspension(self, reason: Suspension, on: bool) -> None:
        """A reason to stop consuming begins or ends."""
        self._suspended[reason].set(on)

    def link(self, state: LinkState) -> None:
        """The listener is in another state."""
        for name, gauge in self._link_state.items():
            gauge.set(name == state)
        self.consuming.set(state == "consuming")

    def reconnected(self) -> None:
        """A connection was opened that was not the first."""
        self._reconnects.inc()

    def publish_failed(self, reason: PublishFailure) -> None:
        """The broker did not take a publish."""
        self._publish_failures[reason].inc()

    def replied(self, fate: ReplyFate) -> None:
        """A result was sent to who waits for it at the broker, or could not be."""
        self._replies[fate].inc()

    def backlog(self, backlog: Backlog | int | None) -> None:
        """How much work waits; None where it is not known."""
        ready = backlog.ready if isinstance(backlog, Backlog) else backlog
        self._backlog_ready.set(NOT_KNOWN if ready is None else ready)

    # ------------------------------------------------------------ sinks

    def events(self, fate: EventFate, count: int) -> None:
        """The billing receiver answered for so many events."""
        self._billing_events[fate].inc(count)

    def flush_failed(self, sink: Sink) -> None:
        """A sink did not take a batch."""
        self._flush_failures[sink].inc()

    def records_lost(self, count: int) -> None:
        """So many records will never reach the metric server."""
        self._metric_records_lost.inc(count)

    def scraped(self, load: ModelLoad | None) -> None:
        """What the model says of its load; None where it says nothing."""
        gauges = (self._kv_cache_usage, self._requests_running, self._requests_waiting)
        values = (None,) * 3 if load is None else (load.kv_cache_usage, load.requests_running, load.requests_waiting)
        for gauge, value in zip(gauges, values, strict=True):
            gauge.set(NOT_KNOWN if value is None else value)

    # ------------------------------------------------------------ exposition

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, in the format that the `Accept` header asks for."""
        return page(self.registry, accept)


def page(metrics: Collector, accept: str) -> tuple[bytes, str]:
    """What a collector collects, and its content type, in the format that an `Accept` header asks for."""
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # The driver stumbles over versions that are none.
        encode, content_type = choose_encoder("")
    return encode(metrics), content_type


class _Histogram(Collector):
    """A histogram for one event loop: the library takes two locks for each value, and there are four a message."""

    def __init__(self, name: str, help_text: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._help_text = help_text
        self._bounds = (*buckets, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        cumulative = zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True)
        yield HistogramMetricFamily(
            self._name,
            self._help_text,
            buckets=[(bound, float(count)) for bound, count in cumulative],
            sum_value=self._sum,
        )


def _counters(counter: Counter, values: Sequence[str]) -> Mapping[str, Counter]:
    return {value: counter.labels(value) for value in values}


def _gauges(gauge: Gauge, values: Sequence[str]) -> Mapping[str, Gauge]:
    return {value: gauge.labels(value) for value in values}


def version() -> str:
    """The installed version of this package."""
    try:
        return metadata.version("inference-worker")
    except metadata.PackageNotFoundError:
        return "unknown"
