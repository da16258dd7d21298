"""The metrics under the peer's names. Names end in the number of the peer's case, where there is one."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from inference_worker.gates.aimd import BandReading
from inference_worker.gates.redis_gates import DrainLimit
from inference_worker.gates.saturation import Seen
from inference_worker.lanes import LANES
from inference_worker.messages import Usage
from inference_worker.peer_metrics import PeerMetrics, Place

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
CHAT = Place(queue_id="chat", queue_name="requests:chat", pool_name="gpu")
BULK = Place(queue_id="bulk", queue_name="requests:bulk", pool_name="gpu")
POOL = Place(pool_name="gpu")

Q = ("queue_id", "queue_name", "pool_name")
GATE = (*Q, "inference_pool")
# Name, type, labels, bounds of buckets: the peer's own table.
TABLE: list[tuple[str, str, tuple[str, ...], tuple[float, ...]]] = [
    ("async_request_total", "counter", Q, ()),
    ("async_request_retries_total", "counter", Q, ()),
    ("async_successful_requests_total", "counter", Q, ()),
    ("async_failed_requests_total", "counter", Q, ()),
    ("async_exceeded_deadline_requests_total", "counter", Q, ()),
    ("async_shedded_requests_total", "counter", Q, ()),
    ("async_dispatched_requests_total", "counter", Q, ()),
    ("async_gate_wait_requeues_total", "counter", Q, ()),
    ("async_tokens_total", "counter", (*Q, "direction"), ()),
    ("async_gate_decisions_total", "counter", (*Q, "reason"), ()),
    ("async_queue_config_reloads_total", "counter", ("result",), ()),
    ("async_queue_config_last_success_timestamp_seconds", "gauge", (), ()),
    (
        "async_message_latency_time_millis",
        "histogram",
        Q,
        (100, 1_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000),
    ),
    (
        "async_inference_latency_time_millis",
        "histogram",
        Q,
        (10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 120_000),
    ),
    (
        "async_queue_residence_time_millis",
        "histogram",
        Q,
        (
            *(500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 120_000, 300_000, 600_000),
            *(1_800_000, 3_600_000, 7_200_000, 21_600_000, 43_200_000, 86_400_000),
        ),
    ),
    (
        "async_deadline_proximity_millis",
        "histogram",
        Q,
        tuple(
            1000 * seconds
            for seconds in (0, 1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600, 2 * 3600, 6 * 3600, 24 * 3600)
        ),
    ),
    ("async_queue_depth", "gauge", Q, ()),
    ("async_inflight_requests", "gauge", Q, ()),
    ("async_gate_waiting_requests", "gauge", Q, ()),
    ("async_broker_backlog", "gauge", Q, ()),
    ("async_broker_backlog_source_available", "gauge", Q, ()),
    ("async_dispatch_budget", "gauge", Q, ()),
    ("async_pool_worker_limit", "gauge", ("pool_name",), ()),
    ("async_gate_metric_value", "gauge", GATE, ()),
    ("async_gate_metric_threshold", "gauge", GATE, ()),
    ("async_gate_metric_source_available", "gauge", GATE, ()),
    ("async_drain_limit_rps", "gauge", ("pool_name",), ()),
    ("async_drain_limit_lease_valid", "gauge", ("pool_name",), ()),
    ("async_drain_limit_valid_until_seconds", "gauge", ("pool_name",), ()),
    ("async_aimd_window", "gauge", ("pool_name", "band"), ()),
    ("async_aimd_ssthresh", "gauge", ("pool_name", "band"), ()),
    ("async_aimd_inflight", "gauge", ("pool_name", "band"), ()),
]


def made(message_latency: bool = True) -> tuple[PeerMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    metrics = PeerMetrics(registry, queues=[CHAT, BULK], pools=["gpu"], message_latency=message_latency)
    for place in (CHAT, POOL):
        metrics.told(place, "llama")
    metrics.drain_told("gpu")
    metrics.bands("gpu", ())
    return metrics, registry


def families(registry: CollectorRegistry) -> dict[str, Metric]:
    """As Prometheus reads them."""
    text = generate_latest(registry).decode()
    return {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(text)
    }


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def value(registry: CollectorRegistry, name: str, place: Place | None = None, **labels: str) -> float:
    at = dict(zip(Q, place.labels, strict=True)) if place is not None else {}
    found = registry.get_sample_value(f"llm_d_async_async_{name}", at | labels)
    assert found is not None, f"no series {name} {at | labels}"
    return found


@pytest.mark.parametrize(("name", "kind", "labels", "buckets"), TABLE, ids=[row[0] for row in TABLE])
def test_a_metric_has_the_peers_name_type_labels_and_buckets(
    name: str, kind: str, labels: tuple[str, ...], buckets: tuple[float, ...]
) -> None:
    family = families(made()[1])[f"llm_d_async_{name}"]

    assert family.type == kind
    assert family.samples, "no series is there at the start"
    assert {frozenset(sample.labels) - {"le"} for sample in family.samples} == {frozenset(labels)}
    bounds = {float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels}
    assert bounds == ({*buckets, float("inf")} if buckets else set())


def test_there_are_no_metrics_but_those_of_the_table_case_300() -> None:
    everything = {f"llm_d_async_{name}" for name, *_ in TABLE}

    assert families(made()[1]).keys() == everything
    without = families(made(message_latency=False)[1]).keys()
    assert everything - without == {"llm_d_async_async_message_latency_time_millis"}


def test_the_table_in_the_docs_is_what_is_exposed() -> None:
    section = DOCS.read_text().partition("## Of a process of many queues")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines()]
    documented = {row[0].strip("`"): (row[1], row[2]) for row in rows if len(row) == 4 and row[0].startswith("`")}

    exposed = {}
    for name, kind, labels, _ in TABLE:
        said = [*(["q"] if labels[:3] == Q else []), *(f"`{label}`" for label in labels if label not in Q[:2])]
        own = [label for label in said if "q" not in said or label != "`pool_name`"]
        exposed[name.removeprefix("async_")] = (kind, ", ".join(own) or "–")

    del exposed["message_latency_time_millis"]
    assert documented == exposed


def test_everything_is_at_0_from_the_start_and_no_series_is_born_later() -> None:
    metrics, registry = made()
    at_first = samples(registry)

    exercise(metrics)

    assert set(at_first.values()) == {0.0}
    assert samples(registry).keys() == at_first.keys()


def test_everything_that_can_be_counted_moves() -> None:
    metrics, registry = made()

    exercise(metrics)

    still = {name for (name, _), number in samples(registry).items() if number == 0.0}
    moved = {name for (name, _), number in samples(registry).items() if number != 0.0}
    assert not {name for name in still - moved if not name.endswith("_bucket")}


@pytest.mark.parametrize("reason", ["gate_closed", "quota_exhausted", "dropped", "error"])
def test_the_reasons_of_gates_are_there_at_0_for_queues_and_pools_and_move_alone_case_301(reason: str) -> None:
    metrics, registry = made()
    before = samples(registry)

    metrics.pool("gpu").decided(reason)  # type: ignore[arg-type] # the reasons are listed above

    after = samples(registry)
    changed = [key for key in after if after[key] != before[key]]
    assert len(changed) == 1
    assert value(registry, "gate_decisions_total", POOL, reason=reason) == 1
    assert value(registry, "gate_decisions_total", CHAT, reason=reason) == 0


def test_setters_change_only_their_own_labels_case_301() -> None:
    metrics, registry = made()

    metrics.queue(CHAT).gate.budget(0.25)
    metrics.worker_limit("gpu", 8)

    assert value(registry, "dispatch_budget", CHAT) == 0.25
    assert value(registry, "dispatch_budget", BULK) == value(registry, "dispatch_budget", POOL) == 0
    assert value(registry, "pool_worker_limit", pool_name="gpu") == 8


def test_depth_and_calls_return_to_0_and_queues_are_told_apart_case_302() -> None:
    metrics, registry = made()
    chat = metrics.queue(CHAT)

    chat.depth(3)
    chat.dispatched()
    assert (value(registry, "inflight_requests", CHAT), value(registry, "inflight_requests", BULK)) == (1, 0)
    assert (value(registry, "queue_depth", CHAT), value(registry, "queue_depth", BULK)) == (3, 0)
    chat.returned(call_s=0.1)
    chat.depth(0)

    assert value(registry, "inflight_requests", CHAT) == value(registry, "queue_depth", CHAT) == 0
    assert value(registry, "dispatched_requests_total", CHAT) == 1


def test_a_copy_that_comes_again_is_no_new_request() -> None:
    metrics, registry = made()
    chat = metrics.queue(CHAT)

    chat.arrived(first=True)
    chat.arrived(first=False)

    assert value(registry, "request_total", CHAT) == 1


def test_times_are_counted_in_milliseconds() -> None:
    metrics, registry = made()

    metrics.queue(CHAT).begun(waited_s=0.75)
    metrics.queue(CHAT).dispatched()
    metrics.queue(CHAT).returned(call_s=0.25)

    assert value(registry, "queue_residence_time_millis_sum", CHAT) == 750
    assert value(registry, "queue_residence_time_millis_bucket", CHAT, le="500.0") == 0
    assert value(registry, "queue_residence_time_millis_bucket", CHAT, le="1000.0") == 1
    assert value(registry, "inference_latency_time_millis_bucket", CHAT, le="250.0") == 1
    assert value(registry, "inference_latency_time_millis_bucket", CHAT, le="100.0") == 0


def test_tokens_are_counted_by_direction_and_none_where_the_answer_says_none_case_276() -> None:
    metrics, registry = made()

    metrics.queue(CHAT).succeeded(Usage(input_tokens=5, output_tokens=7, total_tokens=12))
    metrics.queue(CHAT).succeeded(None)
    metrics.queue(BULK).succeeded(Usage(input_tokens=5, output_tokens=0, total_tokens=5))

    assert value(registry, "tokens_total", CHAT, direction="input") == 5
    assert value(registry, "tokens_total", CHAT, direction="output") == 7
    assert value(registry, "tokens_total", BULK, direction="output") == 0
    assert value(registry, "successful_requests_total", CHAT) == 2


def test_the_nearness_of_deadlines_is_a_snapshot_that_is_replaced_case_309() -> None:
    metrics, registry = made()
    name = "deadline_proximity_millis"

    metrics.queue(CHAT).deadlines([-3, 0, 0.5, 7, 100_000])
    seen = [value(registry, f"{name}_bucket", CHAT, le=le) for le in ("0.0", "1000.0", "5000.0", "15000.0", "+Inf")]
    metrics.queue(CHAT).deadlines([7])

    assert seen == [2, 3, 3, 4, 5]
    assert value(registry, f"{name}_count", CHAT) == 1
    assert value(registry, f"{name}_sum", CHAT) == 7000
    assert value(registry, f"{name}_count", BULK) == 0


def test_the_nearness_of_deadlines_may_come_as_counts_that_have_those_before_in_them_case_309() -> None:
    metrics, registry = made()
    name = "deadline_proximity_millis"

    metrics.queue(CHAT).deadlines_within([9] * 15)
    metrics.queue(CHAT).deadlines_within([1, 1, 4, *[4] * 11, 5])

    bounds = ("0.0", "1000.0", "5000.0", "8.64e+07", "+Inf")
    assert [value(registry, f"{name}_bucket", CHAT, le=le) for le in bounds] == [1, 1, 4, 4, 5]
    assert value(registry, f"{name}_count", CHAT) == 5
    assert value(registry, f"{name}_sum", CHAT) == 3 * 5000 + 86_400_000
    assert value(registry, f"{name}_count", BULK) == 0


def test_counts_that_fall_since_some_have_gone_meanwhile_are_no_negative_numbers() -> None:
    metrics, registry = made()

    metrics.queue(CHAT).deadlines_within([3, 2, *[4] * 13])

    found = [sample for sample in samples(registry).items() if "proximity" in sample[0][0]]
    assert all(number >= 0 for _, number in found)
    assert value(registry, "deadline_proximity_millis_bucket", CHAT, le="1000.0") == 3


def test_a_backlog_that_is_not_known_is_0_and_said_to_be_unknown() -> None:
    metrics, registry = made()
    chat = metrics.queue(CHAT)

    chat.backlog(5)
    known = (value(registry, "broker_backlog", CHAT), value(registry, "broker_backlog_source_available", CHAT))
    chat.backlog(None)

    assert known == (5, 1)
    assert value(registry, "broker_backlog", CHAT) == value(registry, "broker_backlog_source_available", CHAT) == 0


def test_a_gate_that_sees_nothing_keeps_its_last_value_and_says_so() -> None:
    metrics, registry = made()
    told = metrics.told(CHAT, "llama")

    told(Seen(value=0.4, threshold=0.1, available=True, source=0))
    told(Seen(value=None, threshold=0.1, available=False, source=None))

    assert value(registry, "gate_metric_value", CHAT, inference_pool="llama") == 0.4
    assert value(registry, "gate_metric_threshold", CHAT, inference_pool="llama") == 0.1
    assert value(registry, "gate_metric_source_available", CHAT, inference_pool="llama") == 0
    assert value(registry, "gate_metric_value", POOL, inference_pool="llama") == 0


def test_only_a_reload_that_succeeds_sets_the_time() -> None:
    metrics, registry = made()

    metrics.reloaded("success", 1000.0)
    metrics.reloaded("error", 2000.0)

    assert value(registry, "queue_config_last_success_timestamp_seconds") == 1000
    assert value(registry, "queue_config_reloads_total", result="error") == 1


def test_a_place_that_was_not_configured_has_no_metrics() -> None:
    with pytest.raises(KeyError):
        made()[0].queue(Place(queue_id="other", queue_name="other", pool_name="gpu"))


def exercise(metrics: PeerMetrics) -> None:
    """Everything that can be counted."""
    metrics.worker_limit("gpu", 4)
    metrics.told(POOL, "llama")(Seen(value=0.4, threshold=0.1, available=True, source=0))
    metrics.told(CHAT, "llama")(Seen(value=0.4, threshold=0.1, available=True, source=0))
    metrics.drain_told("gpu")(DrainLimit(rate=5, valid_until=9.0, valid=True))
    metrics.bands("gpu", [BandReading(band=b, window=2, ssthresh=8, in_flight=1, closed=False) for b in LANES])
    metrics.reloaded("success", 1000.0)
    metrics.reloaded("error", 1001.0)
    gates = [metrics.pool("gpu")]
    for place in (CHAT, BULK):
        queue = metrics.queue(place)
        gates.append(queue.gate)
        queue.arrived(first=True, since_published_s=0.2)
        queue.begun(waited_s=0.2)
        queue.dispatched()
        queue.dispatched()
        queue.returned(call_s=0.2)
        queue.succeeded(Usage(input_tokens=1, output_tokens=2, total_tokens=3))
        queue.failed()
        queue.expired()
        queue.retried()
        queue.shed()
        queue.requeued_by_gate()
        queue.depth(2)
        queue.backlog(3)
        queue.deadlines([5.0])
    for gate in gates:
        for reason in ("gate_closed", "quota_exhausted", "dropped", "error"):
            gate.decided(reason)
        gate.budget(0.5)
        gate.waiting(+1)
