"""What is told under the peer's names when queues, pools and gates come and go: no series outlives what it counts."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from inference_worker.config.documents import GateConfig
from inference_worker.gates.from_metrics import Surroundings
from inference_worker.gates.making import Around, Owner, gate_of
from inference_worker.gates.redis_gates import DrainLimit
from inference_worker.gates.saturation import Seen
from inference_worker.gates.telling import Telling
from inference_worker.lanes import LANES
from inference_worker.peer_gates import PeerGates
from inference_worker.peer_metrics import PeerMetrics, Place
from inference_worker.ports import Gate
from inference_worker.redis_scripts import RedisLink, RedisTls
from tests.unit.prometheus_kit import URL, Neighbours, unix_now

CHAT = Place(queue_id="chat", queue_name="requests:chat", pool_name="gpu")
BULK = Place(queue_id="bulk", queue_name="requests:bulk", pool_name="gpu")
AT_CHAT = Owner(kind="queue", name="chat", pool="gpu")
AT_BULK = Owner(kind="queue", name="bulk", pool="gpu")
AT_POOL = Owner(kind="pool", name="gpu", pool="gpu")


class Shown:
    """Two queues of a pool, and what is shown of them."""

    def __init__(self, *, message_latency: bool = True) -> None:
        self.registry = CollectorRegistry()
        self.metrics = PeerMetrics(self.registry, queues=[CHAT, BULK], pools=["gpu"], message_latency=message_latency)
        self.gates = PeerGates(self.metrics, [CHAT, BULK])

    def series(self, **labels: str) -> set[str]:
        """The names of those that have such labels."""
        return {
            sample.name.removeprefix("llm_d_async_async_")
            for family in self.registry.collect()
            for sample in family.samples
            if labels.items() <= sample.labels.items()
        }

    def around(self) -> Around:
        return Around(
            metrics=Surroundings(client=Neighbours().client(), now=unix_now, chance=lambda: 0.0, prometheus_url=URL),
            link_to=lambda url: RedisLink(lambda: url, lambda: None, client_name="test", tls=RedisTls()),
            clock=lambda: asyncio.get_running_loop().time(),
            process="host-1",
            seen=self.gates.seen,
            lent=self.gates.lent,
            watched=self.gates.watched,
            windows=self.gates.windows,
        )

    def gate(self, owner: Owner, gate_type: str, **params: object) -> tuple[Gate, Telling]:
        telling = Telling(self.around())
        config = GateConfig(gate_type=gate_type, gate_params=params, where="pools[0]")
        return gate_of(config, telling.around, owner), telling


@pytest.fixture
async def shown() -> Shown:
    return Shown()


async def test_all_series_of_a_queue_that_is_removed_are_deleted_and_no_others_case_309(shown: Shown) -> None:
    of_each = shown.series(queue_id="chat")
    assert of_each == shown.series(queue_id="bulk")
    gone = shown.metrics.queue(CHAT)
    gone.deadlines([1.0, 100.0])
    before = shown.series() - of_each

    shown.metrics.change(queues=[BULK], pools=["gpu"])
    gone.arrived(first=True)
    gone.gate.waiting(+1)

    assert shown.series(queue_id="chat") == set()
    assert shown.series(queue_id="bulk") == of_each
    assert before <= shown.series()


async def test_a_queue_that_comes_back_is_counted_from_0(shown: Shown) -> None:
    shown.metrics.queue(CHAT).arrived(first=True)
    shown.metrics.change(queues=[BULK], pools=["gpu"])

    shown.metrics.change(queues=[CHAT, BULK], pools=["gpu"])

    labels = dict(zip(("queue_id", "queue_name", "pool_name"), CHAT.labels, strict=True))
    assert shown.registry.get_sample_value("llm_d_async_async_request_total", labels) == 0


async def test_what_stays_counts_on(shown: Shown) -> None:
    counted = shown.metrics.queue(CHAT)
    counted.arrived(first=True)

    shown.metrics.change(queues=[CHAT], pools=["gpu", "cpu"])

    assert shown.metrics.queue(CHAT) is counted
    labels = dict(zip(("queue_id", "queue_name", "pool_name"), CHAT.labels, strict=True))
    assert shown.registry.get_sample_value("llm_d_async_async_request_total", labels) == 1


async def test_all_series_of_a_pool_that_is_removed_are_deleted(shown: Shown) -> None:
    shown.metrics.change(queues=[], pools=["gpu", "cpu"])
    of_each = shown.series(pool_name="gpu")
    shown.metrics.worker_limit("cpu", 3)

    shown.metrics.change(queues=[], pools=["cpu"])

    assert shown.series(pool_name="gpu") == set()
    assert shown.series(pool_name="cpu") == of_each >= {"pool_worker_limit", "dispatch_budget", "gate_decisions_total"}


async def test_a_queue_that_is_not_there_any_more_may_still_give_back_what_it_has(shown: Shown) -> None:
    shown.gates.change([BULK])

    shown.gates.verdict(CHAT.queue_name, "gate_closed")


async def test_the_readings_of_a_gate_go_with_it_and_those_of_others_stay(shown: Shown) -> None:
    for owner in (AT_CHAT, AT_POOL):
        shown.gate(owner, "prometheus-saturation", pool="llama")[1].stand()

    shown.gates.gone(AT_CHAT)

    readings = {"gate_metric_value", "gate_metric_threshold", "gate_metric_source_available"}
    assert shown.series(queue_id="chat", inference_pool="llama") == set()
    assert shown.series(queue_id="", inference_pool="llama") == readings


async def test_a_lease_and_windows_go_with_the_last_gate_of_a_pool_that_has_any(shown: Shown) -> None:
    for owner in (AT_CHAT, AT_BULK):
        shown.gate(owner, "redis-leased-rate", address="r:6379", control_key="c")[1].stand()
        shown.gate(owner, "aimd")[1].stand()
    of_gates = {"drain_limit_rps", "aimd_window"}

    shown.gates.gone(AT_CHAT)
    assert of_gates <= shown.series(pool_name="gpu")
    shown.gates.read({}, {})
    shown.gates.gone(AT_BULK)
    shown.gates.read({}, {})

    assert not {name for name in shown.series() if name.startswith(("drain_limit", "aimd"))}


async def test_a_gate_is_heard_from_when_it_stands_until_it_does_no_more(shown: Shown) -> None:
    _, telling = shown.gate(AT_POOL, "prometheus-saturation", pool="llama")
    around = telling.around
    assert shown.series(inference_pool="llama") == set(), "it is made, and does not stand"

    telling.stand()
    around.seen(AT_POOL, "llama", Seen(value=0.4, threshold=0.2, available=True, source=0))
    around.lent(AT_POOL, DrainLimit(rate=5.0, valid_until=9.0, valid=True))
    labels = {"queue_id": "", "queue_name": "", "pool_name": "gpu", "inference_pool": "llama"}
    assert shown.registry.get_sample_value("llm_d_async_async_gate_metric_value", labels) == 0.4
    telling.leave()
    shown.gates.gone(AT_POOL)
    around.seen(AT_POOL, "llama", Seen(value=0.9, threshold=0.2, available=True, source=0))
    around.lent(AT_POOL, DrainLimit(rate=7.0, valid_until=9.0, valid=True))

    assert shown.series(inference_pool="llama") == set()
    assert not {name for name in shown.series() if name.startswith("drain_limit")}


async def test_the_bands_of_a_pool_are_those_of_the_gates_that_stand(shown: Shown) -> None:
    _, old = shown.gate(AT_POOL, "aimd", min_window=2)
    old.stand()
    _, new = shown.gate(AT_POOL, "aimd", min_window=5)
    old.leave()
    shown.gates.gone(AT_POOL)
    new.stand()

    shown.gates.read({}, {})

    labels = {"pool_name": "gpu", "band": LANES[0]}
    assert shown.registry.get_sample_value("llm_d_async_async_aimd_window", labels) == 5
