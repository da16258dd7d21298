"""The scale signal for Prometheus: what `scaler` knows, when it is asked. NaN where the queue is not seen, never 0."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from inference_worker.metrics import NOT_KNOWN, PREFIX
from inference_worker.scaler import NotSeen, Sample, ScaleView

Values = Mapping[str, float | None]
"""By the label's value; None is not known."""


class ScaleCollector(Collector):
    """One queue's signal: in a registry of its own, or beside other metrics of a process that shows one queue."""

    def __init__(self, view: ScaleView) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        try:
            sample = self._view.look()
        except NotSeen:
            sample = None
        yield _family("up", "1 while the queue is seen, so that something can be said.", None, {"": sample is not None})
        for name, text, label, values in _rows(sample):
            yield _family(name, text, label, values)

    def page(self, accept: str) -> tuple[bytes, str]:
        """The signal alone, and its content type, in the format that the `Accept` header asks for."""
        registry = CollectorRegistry()
        registry.register(self)
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # The driver stumbles over versions that are none.
            encode, content_type = choose_encoder("")
        return encode(registry), content_type


def _rows(sample: Sample | None) -> Iterable[tuple[str, str, str | None, Values]]:
    seen = sample
    answer = seen.recommendation if seen is not None else None
    yield (
        "desired_replicas",
        "Replicas that are wanted.",
        None,
        {"": answer.stabilised if answer else None},
    )
    yield (
        "recommended_replicas",
        "Replicas that each way of counting asks for.",
        "way",
        {
            "by_load": answer.by_load if answer else None,
            "by_wait": answer.by_wait if answer else None,
            "by_deadline": answer.by_deadline if answer else None,
            "raw": answer.raw if answer else None,
        },
    )
    yield (
        "load",
        "Requests that wait, run, or come back soon.",
        None,
        {"": seen.load.total if seen else None},
    )
    yield (
        "backlog",
        "Requests by where they are.",
        "state",
        {
            "ready": seen.load.ready if seen else None,
            "in_flight": seen.load.in_flight if seen else None,
            "delayed": seen.backlog.delayed if seen else None,
        },
    )
    yield (
        "oldest_seconds",
        "How long the oldest request that nobody holds has waited.",
        None,
        {"": seen.backlog.oldest_s if seen else None},
    )
    yield (
        "replicas_ready",
        "Replicas that would take work.",
        None,
        {"": seen.capacity.replicas if seen else None},
    )
    yield (
        "completions_per_second",
        "Requests that all replicas have finished a second, over the last minute.",
        None,
        {"": seen.capacity.completions_per_s if seen else None},
    )


def _family(name: str, text: str, label: str | None, values: Values) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{PREFIX}_scale_{name}", text, labels=[label] if label else [])
    for of, value in values.items():
        family.add_metric([of] if label else [], NOT_KNOWN if value is None else float(value))
    return family
