"""What Prometheus sees of one gateway. `docs/metrics.md` has the table; a test holds the two together.

As with the worker's: every label value is there at 0 from the start, what is not known is NaN, and no id, tenant or
text ever becomes a label.
"""

import math
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder

PREFIX: Final = "inference_worker_gateway"

Route = Literal[
    "submit",
    "list",
    "look",
    "cancel",
    "webhook",
    "chat_completions",
    "completions",
    "embeddings",
    "models",
    "scale",
    "dead_letters",
    "other",
]
StatusClass = Literal["2xx", "3xx", "4xx", "5xx"]
RefusedBecause = Literal[
    "queue_full", "broker", "store", "invalid", "key_reused", "too_large", "unauthorized", "overloaded"
]
Peer = Literal["broker", "store"]
HookOutcome = Literal["delivered", "failed_try", "failed", "disabled", "dropped"]

ROUTES: Final[tuple[Route, ...]] = get_args(Route)
SECONDS: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0),
)
"""5 ms to an hour: a request may wait for the end of its job."""


class GatewayMetrics:
    """The counters and gauges of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # The library's own gap.
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, namespace=PREFIX, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, namespace=PREFIX, registry=self.registry)

        requests = counter("requests_total", "Requests answered, by route and class of status.", "route", "status")
        self._requests = {
            (route, status): requests.labels(route, status) for route in ROUTES for status in get_args(StatusClass)
        }
        seconds = Histogram(
            "request_seconds",
            "From a request's first byte to its answer's last.",
            ("route",),
            namespace=PREFIX,
            registry=self.registry,
            buckets=SECONDS,
        )
        self._seconds = {route: seconds.labels(route) for route in ROUTES}
        self._accepted = counter("jobs_accepted_total", "Jobs that the queue has taken.")
        self._replayed = counter("jobs_replayed_total", "Submissions whose idempotency key stood for a job already.")
        refused = counter("jobs_refused_total", "Submissions that were not accepted.", "reason")
        self._refused = {reason: refused.labels(reason) for reason in get_args(RefusedBecause)}
        self._cancelled = counter("jobs_cancelled_total", "Jobs cancelled by their callers.")
        self._hooks = counter("webhooks_total", "What became of webhooks and of single tries.", "outcome")
        for outcome in get_args(HookOutcome):
            self._hooks.labels(outcome)
        self.waiting = gauge("waiting_clients", "Requests that wait for the end of a job.")
        up = gauge("up", "1 while a neighbour answers, as last seen.", "peer")
        self._up = {peer: up.labels(peer) for peer in get_args(Peer)}
        self._queue_ready = gauge("queue_ready_messages", "Messages that nobody holds, at the last look.")
        self._queue_ready.set(math.nan)

    def request(self, route: Route, status: int, seconds: float) -> None:
        """A request was answered."""
        of: StatusClass = "2xx" if status < 300 else "3xx" if status < 400 else "4xx" if status < 500 else "5xx"
        self._requests[route, of].inc()
        self._seconds[route].observe(seconds)

    def accepted(self, *, new: bool) -> None:
        """A submission was accepted; not `new` where its key stood for a job already."""
        (self._accepted if new else self._replayed).inc()

    def refused(self, because: RefusedBecause) -> None:
        """A submission was not accepted."""
        self._refused[because].inc()

    def cancelled(self) -> None:
        """A job was cancelled by its caller."""
        self._cancelled.inc()

    def hook(self, outcome: HookOutcome) -> None:
        """A webhook, or one try of it, came out so."""
        self._hooks.labels(outcome).inc()

    def peer(self, peer: Peer, up: bool) -> None:
        """A neighbour answers, or not."""
        self._up[peer].set(up)

    def backlog(self, ready: int | None) -> None:
        """How much work waits; None where it is not known."""
        self._queue_ready.set(math.nan if ready is None else ready)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, in the format that the `Accept` header asks for."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # The driver stumbles over versions that are none.
            encode, content_type = choose_encoder("")
        return encode(self.registry), content_type
