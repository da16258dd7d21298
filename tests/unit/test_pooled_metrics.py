"""The metrics of several workers on one page."""

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from inference_worker.messages import Timings
from inference_worker.metrics import WorkerMetrics
from inference_worker.peer_metrics import PeerMetrics, Place
from inference_worker.pooled_metrics import PooledMetrics

CHAT = Place(queue_id="chat", queue_name="requests:chat", pool_name="gpu")


class Process:
    """Two pools, and what the peer's names say of their queues."""

    def __init__(self) -> None:
        self.gpu, self.cpu = WorkerMetrics(), WorkerMetrics()
        registry = CollectorRegistry()
        self.peer = PeerMetrics(registry, queues=[CHAT], pools=["gpu", "cpu"])
        self.page = PooledMetrics({"gpu": self.gpu.registry, "cpu": self.cpu.registry}, [registry])

    def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in plain(self.page.exposition("")[0].decode())
            for sample in family.samples
        }


def test_the_same_metric_of_two_pools_is_told_apart_by_a_label() -> None:
    process = Process()

    process.gpu.joined()
    process.cpu.peer("broker", True)
    process.gpu.timed(Timings(queue_s=0.02))

    found = process.samples()
    joined, up = "inference_worker_joined_total", "inference_worker_up"
    assert (found[joined, (("pool", "gpu"),)], found[joined, (("pool", "cpu"),)]) == (1, 0)
    assert found[up, (("peer", "broker"), ("pool", "cpu"))] == 1
    assert found[up, (("peer", "broker"), ("pool", "gpu"))] == 0
    wait = "inference_worker_queue_wait_seconds"
    assert found[f"{wait}_bucket", (("le", "0.025"), ("pool", "gpu"))] == 1
    assert found[f"{wait}_count", (("pool", "cpu"),)] == 0


def test_what_is_true_of_the_process_is_there_once() -> None:
    found = [labels for name, labels in Process().samples() if name == "inference_worker_build_info"]

    assert len(found) == 1
    assert "pool" not in dict(found[0])


def test_what_has_labels_of_its_own_keeps_them_alone() -> None:
    process = Process()

    process.peer.queue(CHAT).arrived(first=True)

    labels = (("pool_name", "gpu"), ("queue_id", "chat"), ("queue_name", "requests:chat"))
    assert process.samples()["llm_d_async_async_request_total", labels] == 1


def test_no_family_is_there_twice() -> None:
    """Prometheus takes a page with one for broken, and reads none of it."""
    text = Process().page.exposition("")[0].decode()

    heads = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        pytest.param("", "text/plain", id="plain text is the default"),
        pytest.param("application/openmetrics-text; version=1.0.0", "application/openmetrics-text", id="OpenMetrics"),
        pytest.param("application/openmetrics-text; version=x", "text/plain", id="a version that is none is no error"),
    ],
)
def test_the_page_comes_in_the_format_asked_for(accept: str, content_type: str) -> None:
    page, said = Process().page.exposition(accept)

    assert said.startswith(content_type)
    families = list((plain if content_type == "text/plain" else openmetrics)(page.decode()))
    assert {family.name for family in families} >= {"inference_worker_dispositions", "inference_worker_model_seconds"}


def test_a_process_without_pools_has_what_the_others_have() -> None:
    registry = CollectorRegistry()
    PeerMetrics(registry, queues=[], pools=["gpu"])

    page, _ = PooledMetrics({}, [registry]).exposition("")

    assert b'llm_d_async_async_pool_worker_limit{pool_name="gpu"} 0.0' in page
