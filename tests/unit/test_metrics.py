"""The Prometheus metrics: contract, section 8."""

import math
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import Metric

from inference_worker.disposition import Fault
from inference_worker.messages import ERROR_CODES, Reply, Timings, Usage
from inference_worker.metrics import ReplyFate, WorkerMetrics
from inference_worker.ports import Backlog


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    kv_cache_usage: float | None
    requests_running: float | None
    requests_waiting: float | None


DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(f"inference_worker_{name}", labels)
    assert found is not None, f"no series {name}{labels}"
    return found


def families(metrics: WorkerMetrics) -> list[Metric]:
    return list(metrics.registry.collect())


def series(metrics: WorkerMetrics) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))) for family in families(metrics) for sample in family.samples
    }


def reply(error_code: str | None = None) -> Reply:
    return Reply(
        request_id="r",
        status="completed" if error_code is None else "failed",
        status_code=200,
        attempt=0,
        replica_id="replica",
        finished_at=1.0,
        error_code=error_code,  # type: ignore[arg-type] # the tests hand in names from ERROR_CODES
    )


def exercise(metrics: WorkerMetrics) -> None:
    """Everything that can be counted, with everything that it can be counted under."""
    for disposition in ("ack", "requeue", "retry", "dead_letter"):
        metrics.settled(disposition, settle_s=0.1)
    metrics.result(reply(), Usage(input_tokens=1, output_tokens=2, total_tokens=3, cached_input_tokens=1))
    for code in ERROR_CODES:
        metrics.result(reply(code), None)
    for fault in Fault:
        metrics.retried(fault)
    metrics.timed(Timings(queue_s=1.0, model_s=2.0, ttft_s=0.1, tbt_s=0.01))
    metrics.answered_from_store()
    metrics.joined()
    metrics.cancelled("before_call")
    metrics.cancelled("in_call")
    metrics.redelivered()
    metrics.delivery_lost(stored=True)
    metrics.delivery_lost(stored=False)
    metrics.claim_lost()
    metrics.not_stored()
    metrics.waiting_elsewhere(+1)
    metrics.waiting_elsewhere(-1)
    metrics.peer("broker", True)
    metrics.suspension("memory", True)
    metrics.link("consuming")
    metrics.reconnected()
    metrics.publish_failed("returned")
    metrics.publish_failed("unconfirmed")
    for fate in get_args(ReplyFate):
        metrics.replied(fate)
    metrics.backlog(Backlog(ready=3))
    metrics.events("sent", 2)
    metrics.events("refused", 1)
    metrics.flush_failed("metrics")
    metrics.flush_failed("billing")
    metrics.records_lost(4)
    metrics.scraped(ModelLoad(kv_cache_usage=0.5, requests_running=2.0, requests_waiting=None))


def test_every_series_is_there_from_the_start() -> None:
    """A rate over a series that is born with its first event misses that event."""
    metrics = WorkerMetrics()
    before = series(metrics)

    exercise(metrics)

    assert series(metrics) == before


def test_every_series_starts_at_zero_or_as_not_known() -> None:
    not_known = set()
    for family in families(WorkerMetrics()):
        for sample in family.samples:
            if math.isnan(sample.value):
                not_known.add(sample.name)
            elif family.type != "info":
                assert sample.value == 0, sample

    assert not_known == {
        "inference_worker_queue_ready_messages",
        "inference_worker_model_kv_cache_usage_ratio",
        "inference_worker_model_requests_running",
        "inference_worker_model_requests_waiting",
    }


def test_the_table_in_the_docs_is_what_is_exposed() -> None:
    documented = {}
    for line in DOCS.read_text().splitlines():
        if line.startswith("| `inference_worker_"):
            name, kind, labels, _meaning = (cell.strip() for cell in line.strip("|").split(" | "))
            documented[name.strip("`")] = (kind, _labels(labels))

    exposed = {}
    for family in families(WorkerMetrics()):
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        found: dict[str, set[str]] = {}
        for sample in family.samples:
            for label, text in sample.labels.items():
                if label != "le":
                    found.setdefault(label, set()).add("…" if family.type == "info" else text)
        exposed[name] = ("gauge" if family.type == "info" else family.type, found)

    assert documented == exposed


def _labels(cell: str) -> dict[str, set[str]]:
    """`a`: `x`, `y`; `b`: one value each. Several names before a colon share what follows it."""
    labels: dict[str, set[str]] = {}
    for part in cell.split("; "):
        names, _, values = part.partition(": ")
        for name in re.findall(r"`(\w+)`", names):
            labels[name] = set(re.findall(r"`(\w+)`", values)) or {"…"}
    return labels


def test_names_have_the_prefix_and_end_in_their_unit() -> None:
    for family in families(WorkerMetrics()):
        assert family.name.startswith("inference_worker_")
        assert "milli" not in family.name
        if family.type == "histogram":
            assert family.name.endswith("_seconds")


def test_two_workers_in_one_process_stay_apart() -> None:
    one, other = WorkerMetrics(), WorkerMetrics()

    one.joined()

    assert value(one, "joined_total") == 1
    assert value(other, "joined_total") == 0


def test_a_result_is_counted_by_status_and_error_code() -> None:
    metrics = WorkerMetrics()

    metrics.result(reply(), Usage(input_tokens=10, output_tokens=20, total_tokens=30, cached_input_tokens=4))
    metrics.result(reply("expired"), None)

    assert value(metrics, "results_total", status="completed", error_code="none") == 1
    assert value(metrics, "results_total", status="failed", error_code="expired") == 1
    assert value(metrics, "results_total", status="failed", error_code="poison") == 0
    assert value(metrics, "input_tokens_total") == 10
    assert value(metrics, "output_tokens_total") == 20
    assert value(metrics, "cached_input_tokens_total") == 4


def test_a_failed_result_without_a_code_is_no_error_here() -> None:
    WorkerMetrics().result(
        Reply(request_id="r", status="failed", status_code=1, attempt=0, replica_id="x", finished_at=1.0), None
    )


def test_dispositions_retries_and_times_are_counted() -> None:
    metrics = WorkerMetrics()

    metrics.settled("dead_letter", settle_s=0.3)
    metrics.retried(Fault.SLOW)
    metrics.timed(Timings(queue_s=7200.0, model_s=None))

    assert value(metrics, "dispositions_total", disposition="dead_letter") == 1
    assert value(metrics, "dispositions_total", disposition="ack") == 0
    assert value(metrics, "settle_seconds_sum") == pytest.approx(0.3)
    assert value(metrics, "retries_total", fault="slow") == 1
    assert value(metrics, "retries_total", fault="gone") == 0
    assert value(metrics, "queue_wait_seconds_bucket", le="3600.0") == 0
    assert value(metrics, "queue_wait_seconds_bucket", le="7200.0") == 1
    assert value(metrics, "model_seconds_count") == 0


def test_the_queue_wait_has_buckets_from_5_ms_to_a_day() -> None:
    metrics = WorkerMetrics()

    assert value(metrics, "queue_wait_seconds_bucket", le="0.005") == 0
    assert value(metrics, "queue_wait_seconds_bucket", le="86400.0") == 0


def test_the_link_is_in_one_state() -> None:
    metrics = WorkerMetrics()

    metrics.link("consuming")
    assert value(metrics, "consuming") == 1
    metrics.link("stopping")

    assert value(metrics, "link_state", state="stopping") == 1
    assert value(metrics, "link_state", state="consuming") == 0
    assert value(metrics, "consuming") == 0


def test_several_reasons_suspend_at_once() -> None:
    metrics = WorkerMetrics()

    for reason in ("model", "store", "kept"):
        metrics.suspension(reason, True)
    metrics.suspension("store", False)
    metrics.peer("model", True)

    assert value(metrics, "suspended", reason="model") == 1
    assert value(metrics, "suspended", reason="store") == 0
    assert value(metrics, "suspended", reason="kept") == 1
    assert value(metrics, "up", peer="model") == 1


def test_what_the_model_does_not_say_is_not_zero() -> None:
    """Bug report B128: a missing value read as no load scales a full model down."""
    metrics = WorkerMetrics()

    metrics.scraped(ModelLoad(kv_cache_usage=0.5, requests_running=0.0, requests_waiting=None))
    assert value(metrics, "model_kv_cache_usage_ratio") == 0.5
    assert value(metrics, "model_requests_running") == 0
    assert math.isnan(value(metrics, "model_requests_waiting"))
    metrics.scraped(None)

    assert math.isnan(value(metrics, "model_kv_cache_usage_ratio"))


def test_an_unknown_backlog_is_not_zero() -> None:
    metrics = WorkerMetrics()

    metrics.backlog(7)
    assert value(metrics, "queue_ready_messages") == 7
    metrics.backlog(None)

    assert math.isnan(value(metrics, "queue_ready_messages"))


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        pytest.param("", "text/plain", id="plain text is the default"),
        pytest.param("application/openmetrics-text; version=1.0.0", "application/openmetrics-text", id="OpenMetrics"),
        pytest.param("application/openmetrics-text; version=x", "text/plain", id="a version that is none is no error"),
    ],
)
def test_the_page_comes_in_the_format_asked_for(accept: str, content_type: str) -> None:
    page, said = WorkerMetrics().exposition(accept)

    assert said.startswith(content_type)
    assert b'inference_worker_dispositions_total{disposition="retry"} 0.0' in page
    assert b"_created" not in page


def test_the_version_is_told_even_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)

    page, _ = WorkerMetrics().exposition("")

    assert b'version="unknown"' in page
