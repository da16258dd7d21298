"""What Prometheus sees of queues, pools and gates under the names of llm-d-async, so that its dashboards go on working.

Beside our own metrics (`metrics.py`), which say more of less: these tell the queues apart. Labels have the values of
the configuration and no others, and all series are there at 0 from the start; where the configuration changes, those of
what it has no more are taken away. Times are in milliseconds, as theirs are.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from inference_worker.gates.aimd import BandReading
from inference_worker.gates.redis_gates import DrainLimit
from inference_worker.gates.saturation import Seen, Told
from inference_worker.gates.waiting import GateDecision
from inference_worker.lanes import LANES
from inference_worker.messages import Usage

PREFIX: Final = "llm_d_async"
QUEUE_LABELS: Final = ("queue_id", "queue_name", "pool_name")

Direction = Literal["input", "output"]
ReloadResult = Literal["success", "error"]

LATENCY_BUCKETS_MS: Final = (100, 1e3, 5e3, 10e3, 20e3, 50e3, 100e3, 200e3, 500e3, 1e6)
INFERENCE_BUCKETS_MS: Final = (10, 25, 50, 100, 250, 500, 1e3, 2.5e3, 5e3, 10e3, 30e3, 60e3, 120e3)
RESIDENCE_BUCKETS_MS: Final = (
    *(500, 1e3, 2e3, 5e3, 10e3, 30e3, 60e3, 120e3, 300e3, 600e3),
    *(1.8e6, 3.6e6, 7.2e6, 21.6e6, 43.2e6, 86.4e6),
)
PROXIMITY_BUCKETS_MS: Final = (
    *(0, 1e3, 5e3, 15e3, 30e3, 60e3, 120e3, 300e3, 600e3, 1.8e6),
    *(3.6e6, 7.2e6, 21.6e6, 86.4e6),
)
"""What has a deadline behind it is in the first."""
PROXIMITY_WINDOWS_S: Final = tuple(bound / 1000 for bound in PROXIMITY_BUCKETS_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where something is counted: a queue of a pool, or, without a queue, the pool itself."""

    queue_id: str = ""
    queue_name: str = ""
    pool_name: str

    @property
    def labels(self) -> tuple[str, str, str]:
        """In the order of `QUEUE_LABELS`."""
        return (self.queue_id, self.queue_name, self.pool_name)


class PeerMetrics:
    """The metrics of one process, in a registry that it may share with others."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        queues: Sequence[Place],
        pools: Sequence[str],
        message_latency: bool = False,
    ) -> None:
        """What single kinds of gates tell has its series from when such a gate is made.

        `message_latency`: whether messages tell when they were published, so that the time since then can be counted.
        """
        # Else there is one more series for each counter: when it was made.
        disable_created_metrics()  # type: ignore[no-untyped-call] # it has no annotations.
        self._families = families = _Families(registry, message_latency)
        self._queues: dict[Place, QueueMetrics] = {}
        self._at_pools: dict[str, GateMetrics] = {}
        self._worker_limits: dict[str, Gauge] = {}
        self._reloads = {result: families.reloads.labels(result) for result in get_args(ReloadResult)}
        self._last_reload = families.last_reload
        self.change(queues=queues, pools=pools)

    def change(self, *, queues: Sequence[Place], pools: Sequence[str]) -> None:
        """These and no others: new ones begin at 0, the series of those that are gone are taken away.

        Whoever still counts for one that is gone counts unseen.
        """
        families = self._families
        for place in self._queues.keys() - set(queues):
            del self._queues[place]
            families.forget(place)
        for pool in self._at_pools.keys() - set(pools):
            del self._at_pools[pool], self._worker_limits[pool]
            families.forget(Place(pool_name=pool))
            families.worker_limit.remove(pool)
        for place in queues:
            if place not in self._queues:
                self._queues[place] = QueueMetrics(families, place)
        for pool in pools:
            if pool not in self._at_pools:
                self._at_pools[pool] = GateMetrics(families, Place(pool_name=pool))
                self._worker_limits[pool] = families.worker_limit.labels(pool)

    def queue(self, place: Place) -> "QueueMetrics":
        """What is counted of one queue, gates included that stand at it."""
        return self._queues[place]

    def pool(self, name: str) -> "GateMetrics":
        """What is counted of a gate that stands at a pool."""
        return self._at_pools[name]

    def worker_limit(self, pool: str, slots: int) -> None:
        """A pool calls the model so often at once, at most."""
        self._worker_limits[pool].set(slots)

    def told(self, place: Place, inference_pool: str) -> Told:
        """What a gate that looks at metrics tells its readings; its series are there from now on."""
        labels = (*place.labels, inference_pool)
        value, threshold, available = (gauge.labels(*labels) for gauge in self._families.gate_readings)

        def tell(seen: Seen) -> None:
            if seen.value is not None:  # The last one stays, and the third gauge says that it is old.
                value.set(seen.value)
            threshold.set(seen.threshold)
            available.set(seen.available)

        return tell

    def not_told(self, place: Place, inference_pool: str) -> None:
        """No such gate stands there any more: its series are taken away."""
        for gauge in self._families.gate_readings:
            gauge.remove(*place.labels, inference_pool)

    def drain_told(self, pool: str) -> Callable[[DrainLimit], None]:
        """What a gate with a leased rate tells of its lease; its series are there from now on."""
        rate, valid, until = (gauge.labels(pool) for gauge in self._families.drain)

        def tell(limit: DrainLimit) -> None:
            rate.set(limit.rate)
            valid.set(limit.valid)
            until.set(limit.valid_until)

        return tell

    def not_lent(self, pool: str) -> None:
        """No gate with a leased rate stands there any more: its series are taken away."""
        for gauge in self._families.drain:
            gauge.remove(pool)

    def no_bands(self, pool: str) -> None:
        """No windows are left in a pool: their series are taken away."""
        for gauge in self._families.aimd:
            for band in LANES:
                gauge.remove(pool, band)

    def bands(self, pool: str, readings: Iterable[BandReading]) -> None:
        """How the windows of a pool stand; their series are there from now on, without a reading at 0."""
        bands = {band: [gauge.labels(pool, band) for gauge in self._families.aimd] for band in LANES}
        for reading in readings:
            window, ssthresh, in_flight = bands[reading.band]
            window.set(reading.window)
            ssthresh.set(reading.ssthresh)
            in_flight.set(reading.in_flight)

    def reloaded(self, result: ReloadResult, now: float) -> None:
        """The configuration of the queues was read again at `now`, in Unix seconds."""
        self._reloads[result].inc()
        if result == "success":
            self._last_reload.set(now)


class GateMetrics:
    """What is counted of a gate at one place."""

    def __init__(self, families: "_Families", place: Place) -> None:
        self._decisions = {
            reason: families.decisions.labels(*place.labels, reason) for reason in get_args(GateDecision)
        }
        self._budget = families.budget.labels(*place.labels)
        self._waiting = families.gate_waiting.labels(*place.labels)

    def decided(self, reason: GateDecision) -> None:
        """The gate kept a request from being sent; one that waits is counted once, however often it asks."""
        self._decisions[reason].inc()

    def budget(self, part: float) -> None:
        """The part of the capacity that is free, 0 to 1."""
        self._budget.set(part)

    def waiting(self, change: int) -> None:
        """One more (+1) or one less (-1) request waits at the gate."""
        self._waiting.inc(change)


class QueueMetrics:
    """What is counted of one queue."""

    def __init__(self, families: "_Families", place: Place) -> None:
        labels = place.labels
        self.gate = GateMetrics(families, place)
        self._requests = families.requests.labels(*labels)
        self._retries = families.retries.labels(*labels)
        self._succeeded = families.succeeded.labels(*labels)
        self._failed = families.failed.labels(*labels)
        self._expired = families.expired.labels(*labels)
        self._shed = families.shed.labels(*labels)
        self._dispatched = families.dispatched.labels(*labels)
        self._gate_requeues = families.gate_requeues.labels(*labels)
        self._tokens = {way: families.tokens.labels(*labels, way) for way in get_args(Direction)}
        self._latency = families.latency.child(labels) if families.latency is not None else None
        self._inference = families.inference.child(labels)
        self._residence = families.residence.child(labels)
        self._proximity = families.proximity.child(labels)
        self._depth = families.depth.labels(*labels)
        self._in_flight = families.in_flight.labels(*labels)
        self._backlog = families.backlog.labels(*labels)
        self._backlog_known = families.backlog_known.labels(*labels)

    def arrived(self, *, first: bool, since_published_s: float | None = None) -> None:
        """A request was received; whether for the first time, and how long after it was published."""
        if first:
            self._requests.inc()
        if self._latency is not None and since_published_s is not None:
            self._latency.observe(since_published_s * 1000)

    def begun(self, *, waited_s: float) -> None:
        """A worker has taken a request up that had waited so long in this process."""
        self._residence.observe(waited_s * 1000)

    def dispatched(self) -> None:
        """A call to the model begins."""
        self._dispatched.inc()
        self._in_flight.inc()

    def returned(self, *, call_s: float) -> None:
        """A call has ended, whatever came of it."""
        self._in_flight.dec()
        self._inference.observe(call_s * 1000)

    def succeeded(self, usage: Usage | None) -> None:
        """A request ended with the model's answer, which says that it used so many tokens."""
        self._succeeded.inc()
        if usage is not None:
            self._tokens["input"].inc(usage.input_tokens)
            self._tokens["output"].inc(usage.output_tokens)

    def failed(self) -> None:
        """A request ended with a failure that is not a matter of time."""
        self._failed.inc()

    def expired(self) -> None:
        """A request's time was over."""
        self._expired.inc()

    def retried(self) -> None:
        """A failed call is tried again."""
        self._retries.inc()

    def shed(self) -> None:
        """The model, or the gateway before it, answered 429."""
        self._shed.inc()

    def requeued_by_gate(self) -> None:
        """A request waited at a gate for as long as it may, and was given back."""
        self._gate_requeues.inc()

    def depth(self, count: int) -> None:
        """So many requests wait in this process."""
        self._depth.set(count)

    def backlog(self, ready: int | None) -> None:
        """So many messages wait at the broker; None where it cannot tell."""
        self._backlog.set(ready or 0)
        self._backlog_known.set(ready is not None)

    def deadlines(self, left_s: Iterable[float]) -> None:
        """How far off the deadlines are of what waits now. It replaces what was said before."""
        self._proximity.replace([seconds * 1000 for seconds in left_s])

    def deadlines_within(self, counts: Sequence[int]) -> None:
        """The same, from how many are due within each of `PROXIMITY_WINDOWS_S`, and in all."""
        self._proximity.replace_counted(counts)


class _Families:
    """Every metric, without its values."""

    def __init__(self, registry: CollectorRegistry, message_latency: bool) -> None:
        self._of_queues: list[Counter | Gauge | _Histogram] = []
        """Those with the labels of queues and no more."""

        def counter(name: str, help_text: str, labels: Sequence[str] = QUEUE_LABELS) -> Counter:
            made = Counter(f"async_{name}", help_text, labels, namespace=PREFIX, registry=registry)
            if labels == QUEUE_LABELS:
                self._of_queues.append(made)
            return made

        def gauge(name: str, help_text: str, labels: Sequence[str] = QUEUE_LABELS) -> Gauge:
            made = Gauge(f"async_{name}", help_text, labels, namespace=PREFIX, registry=registry)
            if labels == QUEUE_LABELS:
                self._of_queues.append(made)
            return made

        def histogram(name: str, help_text: str, buckets: Sequence[float]) -> _Histogram:
            made = _Histogram(f"{PREFIX}_async_{name}", help_text, buckets)
            registry.register(made)
            self._of_queues.append(made)
            return made

        self.requests = counter("request_total", "Requests received for the first time.")
        self.retries = counter("request_retries_total", "Calls that failed and are tried again.")
        self.succeeded = counter("successful_requests_total", "Requests that ended with the model's answer.")
        self.failed = counter("failed_requests_total", "Requests that ended with a failure.")
        self.expired = counter("exceeded_deadline_requests_total", "Requests whose time was over.")
        self.shed = counter("shedded_requests_total", "Calls that were answered 429.")
        self.dispatched = counter("dispatched_requests_total", "Calls to the model, those after the first included.")
        self.gate_requeues = counter("gate_wait_requeues_total", "Requests given back that had waited at a gate.")
        self.tokens = counter("tokens_total", "Tokens that answers say they used.", (*QUEUE_LABELS, "direction"))
        self.decisions = counter(
            "gate_decisions_total", "Requests that a gate kept from being sent.", (*QUEUE_LABELS, "reason")
        )
        self.reloads = counter("queue_config_reloads_total", "How often the configuration was read again.", ("result",))
        self.last_reload = gauge(
            "queue_config_last_success_timestamp_seconds", "When that last succeeded, in Unix seconds.", ()
        )

        self.latency = (
            histogram("message_latency_time_millis", "From publishing a message to its arrival.", LATENCY_BUCKETS_MS)
            if message_latency
            else None
        )
        self.inference = histogram("inference_latency_time_millis", "The call to the model.", INFERENCE_BUCKETS_MS)
        self.residence = histogram(
            "queue_residence_time_millis", "From the arrival in this process to a worker.", RESIDENCE_BUCKETS_MS
        )
        self.proximity = histogram(
            "deadline_proximity_millis", "How far off the deadlines are of what waits now.", PROXIMITY_BUCKETS_MS
        )

        self.depth = gauge("queue_depth", "Requests that wait in this process.")
        self.in_flight = gauge("inflight_requests", "Calls to the model that run now.")
        self.gate_waiting = gauge("gate_waiting_requests", "Requests that wait at a gate.")
        self.backlog = gauge("broker_backlog", "Messages that wait at the broker; 0 where it cannot tell.")
        self.backlog_known = gauge("broker_backlog_source_available", "1 while the broker tells how many wait.")
        self.budget = gauge("dispatch_budget", "The part of the capacity that a gate has free, 0 to 1.")
        self.worker_limit = gauge("pool_worker_limit", "Most calls to the model at once.", ("pool_name",))
        gate_labels = (*QUEUE_LABELS, "inference_pool")
        self.gate_readings = (
            gauge("gate_metric_value", "What a gate has last read: the free part of the capacity.", gate_labels),
            gauge("gate_metric_threshold", "The gate is closed at this value and below.", gate_labels),
            gauge("gate_metric_source_available", "1 while the gate can read its metric.", gate_labels),
        )
        self.drain = (
            gauge("drain_limit_rps", "Requests a second that a planner allows; 0 without a lease.", ("pool_name",)),
            gauge("drain_limit_lease_valid", "1 while the planner's lease holds.", ("pool_name",)),
            gauge("drain_limit_valid_until_seconds", "Until when it holds, in Unix seconds.", ("pool_name",)),
        )
        self.aimd = (
            gauge("aimd_window", "Requests that may be in flight in a band.", ("pool_name", "band")),
            gauge("aimd_ssthresh", "The window up to which a band grows fast.", ("pool_name", "band")),
            gauge("aimd_inflight", "Requests in flight in a band.", ("pool_name", "band")),
        )

    def forget(self, place: Place) -> None:
        """Take away all series of a queue, or of the gate of a pool; what is not there is no matter."""
        for family in self._of_queues:
            family.remove(*place.labels)
        for direction in get_args(Direction):
            self.tokens.remove(*place.labels, direction)
        for reason in get_args(GateDecision):
            self.decisions.remove(*place.labels, reason)


class _Histogram(Collector):
    """Histograms by queue, for one event loop: the library takes two locks for each value."""

    def __init__(self, name: str, help_text: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._help_text = help_text
        self._bounds = (*map(float, buckets), inf)
        self._children: dict[tuple[str, ...], _Counts] = {}

    def child(self, labels: tuple[str, ...]) -> "_Counts":
        """The one of a queue, made where there is none."""
        return self._children.setdefault(labels, _Counts(self._bounds))

    def remove(self, *labels: str) -> None:
        """Take the one of a queue away, where there is one."""
        self._children.pop(labels, None)

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        family = HistogramMetricFamily(self._name, self._help_text, labels=QUEUE_LABELS)
        names = list(map(floatToGoString, self._bounds))
        for labels, counts in self._children.items():
            cumulative = [(name, float(count)) for name, count in zip(names, accumulate(counts.counts), strict=True)]
            family.add_metric(labels, buckets=cumulative, sum_value=counts.total)
        yield family


class _Counts:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * len(bounds)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def replace(self, values: Iterable[float]) -> None:
        self.counts = [0] * len(self._bounds)
        self.total = 0.0
        for value in values:
            self.observe(value)

    def replace_counted(self, cumulative: Sequence[int]) -> None:
        """Take over counts, each with those before it in it; the values are not known but for their bounds.

        Counted one after the other while others come and go, they may fall; then the smaller is taken for the larger.
        """
        rising = list(accumulate(cumulative, max))
        counts = [count - before for count, before in zip(rising, (0, *rising[:-1]), strict=True)]
        # Each counts as its bound, so that the mean is one from above, and what lies beyond all of them as the last.
        ends = (*self._bounds[:-1], self._bounds[-2])
        self.total = sum(count * end for count, end in zip(counts, ends, strict=True))
        self.counts = counts
