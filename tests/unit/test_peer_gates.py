"""What gates say, under the peer's names. Names end in the number of the peer's case, where there is one."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from inference_worker.config.documents import GateConfig
from inference_worker.gates.basic import LocalMaxConcurrency
from inference_worker.gates.from_metrics import Surroundings
from inference_worker.gates.making import Around, Owner, gate_of
from inference_worker.gates.redis_gates import DrainLimit
from inference_worker.gates.saturation import Seen
from inference_worker.lanes import LANES
from inference_worker.peer_gates import PeerGates
from inference_worker.peer_metrics import PeerMetrics, Place
from inference_worker.ports import Gate
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.transports.merged_source import QueueVerdict
from tests.unit.gate_kit import admitted, asked, release
from tests.unit.prometheus_kit import URL, Neighbours, unix_now

CHAT = Place(queue_id="chat", queue_name="requests:chat", pool_name="gpu")
BULK = Place(queue_id="bulk", queue_name="requests:bulk", pool_name="gpu")
POOL = Place(pool_name="gpu")
AT_CHAT = Owner(kind="queue", name="chat", pool="gpu")
AT_POOL = Owner(kind="pool", name="gpu", pool="gpu")
DRAIN = ("drain_limit_rps", "drain_limit_lease_valid", "drain_limit_valid_until_seconds")
READINGS = ("gate_metric_value", "gate_metric_threshold", "gate_metric_source_available")


class Process:
    """Gates in a process whose metrics can be looked at."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = PeerMetrics(self.registry, queues=[CHAT, BULK], pools=["gpu"])
        self.told = PeerGates(self.metrics, [CHAT, BULK])
        self.around = Around(
            metrics=Surroundings(client=Neighbours().client(), now=unix_now, chance=lambda: 0.0, prometheus_url=URL),
            link_to=lambda url: RedisLink(lambda: url, lambda: None, client_name="test", tls=RedisTls()),
            clock=lambda: asyncio.get_running_loop().time(),
            process="host-1",
            seen=self.told.seen,
            lent=self.told.lent,
            watched=self.told.watched,
            windows=self.told.windows,
        )

    def gate(self, owner: Owner, gate_type: str, **params: object) -> Gate:
        return gate_of(GateConfig(gate_type=gate_type, gate_params=params, where="pools[0]"), self.around, owner)

    def value(self, name: str, place: Place | None = None, **labels: str) -> float | None:
        at = {} if place is None else dict(zip(("queue_id", "queue_name", "pool_name"), place.labels, strict=True))
        return self.registry.get_sample_value(f"llm_d_async_async_{name}", at | labels)


@pytest.fixture
async def process() -> Process:
    return Process()


async def test_the_gauges_of_a_lease_are_there_at_0_as_soon_as_its_gate_is_made_case_224(process: Process) -> None:
    before = [process.value(name, pool_name="gpu") for name in DRAIN]

    process.gate(AT_CHAT, "redis-leased-rate", address="r:6379", control_key="c")

    assert before == [None] * 3
    assert [process.value(name, pool_name="gpu") for name in DRAIN] == [0] * 3
    process.told.lent(AT_CHAT, DrainLimit(rate=5.0, valid_until=9.0, valid=True))
    assert [process.value(name, pool_name="gpu") for name in DRAIN] == [5, 1, 9]


@pytest.mark.parametrize(("owner", "place"), [(AT_CHAT, CHAT), (AT_POOL, POOL)], ids=["queue", "pool"])
async def test_the_gauges_of_a_metric_gate_are_there_at_0_and_show_what_it_saw_case_192(
    process: Process, owner: Owner, place: Place
) -> None:
    process.gate(owner, "wait-on-refuse", gate={"gate_type": "prometheus-saturation", "gate_params": {"pool": "llama"}})
    at_first = [process.value(name, place, inference_pool="llama") for name in READINGS]

    process.told.seen(owner, "llama", Seen(value=0.4, threshold=0.2, available=True, source=0))

    assert at_first == [0, 0, 0]
    assert [process.value(name, place, inference_pool="llama") for name in READINGS] == [0.4, 0.2, 1]


async def test_windows_are_there_at_0_and_read_when_the_page_is_shown(process: Process) -> None:
    gate = process.gate(AT_POOL, "composite", gates=[{"gate_type": "aimd", "gate_params": {"min_window": 4}}])
    assert [process.value("aimd_window", pool_name="gpu", band=band) for band in LANES] == [0] * len(LANES)
    taken = admitted(gate, asked("batch", "overflow"))

    process.told.read({}, {"gpu": gate})

    lowest = LANES[-1]
    assert process.value("aimd_window", pool_name="gpu", band=lowest) == 4
    assert process.value("aimd_inflight", pool_name="gpu", band=lowest) == 1
    assert process.value("aimd_inflight", pool_name="gpu", band=LANES[0]) == 0
    release(taken)
    process.told.read({}, {"gpu": gate})
    assert process.value("aimd_inflight", pool_name="gpu", band=lowest) == 0


async def test_windows_of_several_queues_of_a_pool_add_up(process: Process) -> None:
    for owner in (AT_CHAT, Owner(kind="queue", name="bulk", pool="gpu")):
        process.gate(owner, "aimd", min_window=2)

    process.told.read({}, {})

    assert process.value("aimd_window", pool_name="gpu", band=LANES[0]) == 4


async def test_budgets_are_read_when_the_page_is_shown_case_301(process: Process) -> None:
    full, half = LocalMaxConcurrency(1), LocalMaxConcurrency(2)
    for gate in (full, half):
        admitted(gate, asked())

    process.told.read({"chat": full}, {"gpu": half})

    assert process.value("dispatch_budget", CHAT) == 0
    assert process.value("dispatch_budget", POOL) == 0.5
    assert process.value("dispatch_budget", BULK) == 1, "a queue without a gate is always open"
    process.told.read({}, {"gpu": None})
    assert process.value("dispatch_budget", POOL) == 1


@pytest.mark.parametrize("verdict", ["gate_closed", "quota_exhausted", "dropped", "error"])
async def test_what_the_gate_of_a_queue_says_is_counted_there_case_273(process: Process, verdict: QueueVerdict) -> None:
    process.told.verdict("requests:chat", verdict)

    counted = {
        (place.queue_id, reason): process.value("gate_decisions_total", place, reason=reason)
        for place in (CHAT, BULK)
        for reason in ("gate_closed", "quota_exhausted", "dropped", "error")
    }
    assert {key for key, number in counted.items() if number} == {("chat", verdict)}
    assert process.value("failed_requests_total", CHAT) == (1 if verdict == "dropped" else 0)


async def test_who_is_let_in_is_not_counted(process: Process) -> None:
    process.told.verdict("requests:chat", "admitted")

    assert process.value("gate_decisions_total", CHAT, reason="gate_closed") == 0
    assert process.value("failed_requests_total", CHAT) == 0
