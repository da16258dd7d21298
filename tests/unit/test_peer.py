"""What a process tells under the peer's names, with its queues, gates and workers around it."""

import asyncio
import json
import random
from collections.abc import Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inference_worker.config.documents import read_documents
from inference_worker.errors import StoreUnavailable
from inference_worker.gates.from_metrics import Surroundings
from inference_worker.gates.making import Around, Owner, gate_of
from inference_worker.merge import RandomRobin
from inference_worker.peer import Peer, due_in
from inference_worker.pool_gate import PoolGate
from inference_worker.ports import Gate
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.tracing import PASSING_ON
from inference_worker.transports.memory import MemoryBroker
from inference_worker.transports.merged import MergedQueues, Source
from tests.unit.prometheus_kit import URL, Neighbours, unix_now
from tests.unit.worker_kit import FakeModel, Site, Worker, body, now, running
from tests.waiting import eventually

POOL = "gpu"
BOTH = ("chat", "bulk")


class Process:
    """Two queues of one pool and a worker for them, as `process` joins them."""

    def __init__(self, *, at_chat: dict[str, object] | None = None, at_pool: dict[str, object] | None = None) -> None:
        queue: dict[str, object] = {"igw_base_url": "http://g", "worker_pool_id": POOL}
        queues = [{**queue, "id": id, "queue_name": f"requests:{id}"} for id in BOTH]
        queues[0] |= at_chat or {}
        self.documents = read_documents(
            "redis-sortedset",
            json.dumps({"url": "redis://r", "queues": queues}),
            json.dumps([{"id": POOL, "workers": 2, **(at_pool or {})}]),
        )
        self.peer = Peer(self.documents)
        around = self.peer.around(
            Around(
                metrics=Surroundings(
                    client=Neighbours().client(), now=unix_now, chance=lambda: 0.0, prometheus_url=URL
                ),
                link_to=lambda url: RedisLink(lambda: url, lambda: None, client_name="test", tls=RedisTls()),
                clock=lambda: asyncio.get_running_loop().time(),
                process="host-1",
                seen=lambda _, __, ___: None,
                lent=lambda _, __: None,
            )
        )
        self.gates: dict[str, Gate] = {
            one.id: gate_of(one.gate, around, Owner(kind="queue", name=one.id, pool=POOL))
            for one in self.documents.transport.queues
            if one.gate is not None
        }
        (pool,) = self.documents.pools
        self.gate = None if pool.gate is None else gate_of(pool.gate, around, Owner(kind="pool", name=POOL, pool=POOL))
        self.peer.stand(POOL, self.gates, self.gate)
        self.site = Site()
        self.brokers = {
            f"requests:{id}": MemoryBroker(store=self.site.store, now=now, queue=f"requests:{id}") for id in BOTH
        }
        self.queues = MergedQueues(
            [
                Source(name=one.queue_name, connect=self.brokers[one.queue_name].connect, gate=self.gates.get(one.id))
                for one in self.documents.transport.queues
            ],
            lambda: RandomRobin(random.Random(1)),
            now=now,
            rng=random.Random(2),
            replica_id="r",
            told=self.peer.verdict,
        )

    def worker(self, model: FakeModel) -> Worker:
        gate = None if self.gate is None else PoolGate(self.gate, random.Random(3), told=self.peer.at_pool(POOL))
        made = Worker(self.site, model, slots=2, gate=gate)
        made.listener._connect = self.peer.followed(POOL, self.queues.connect)
        made.listener._tracer = self.peer.notes(PASSING_ON)
        self.page = self.peer.page({POOL: made.metrics.registry})
        return made

    async def put(self, id: str, *request_ids: str) -> None:
        async with self.brokers[f"requests:{id}"].connect() as transport:
            for request_id in request_ids:
                await transport.publish(body(request_id))

    def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(self.page("")[0].decode())
            for sample in family.samples
        }

    def value(self, name: str, id: str = "", **more: str) -> float:
        labels = {"queue_id": id, "queue_name": f"requests:{id}" if id else "", "pool_name": POOL} | more
        return self.samples()[f"llm_d_async_async_{name}", tuple(sorted(labels.items()))]


@pytest.fixture
async def process() -> Process:
    return Process()


async def test_each_queue_is_counted_for_itself(process: Process) -> None:
    async with running(process.worker(FakeModel())):
        await process.put("chat", "a", "b")
        await process.put("bulk", "c")
        await eventually(
            lambda: process.value("successful_requests_total", "chat") == 2, within=30, every=0.5, what="two answers"
        )
        await eventually(
            lambda: process.value("successful_requests_total", "bulk") == 1, within=30, every=0.5, what="another"
        )

    for id, count in (("chat", 2), ("bulk", 1)):
        assert process.value("request_total", id) == process.value("dispatched_requests_total", id) == count
        assert process.value("queue_residence_time_millis_count", id) == count
        assert process.value("tokens_total", id, direction="output") == 4 * count
    assert process.samples()["llm_d_async_async_pool_worker_limit", (("pool_name", POOL),)] == 2


async def test_no_series_is_born_while_it_works() -> None:
    process = Process(
        at_chat={"gate_type": "composite", "gate_params": {"gates": [{"gate_type": "aimd", "gate_params": {}}]}},
        at_pool={"gate_type": "local-max-concurrency", "gate_params": {"limit": 1, "gating_mode": "blocking"}},
    )
    worker = process.worker(FakeModel(takes_s=1.0))
    before = process.samples().keys()

    async with running(worker):
        await process.put("chat", "a", "b", "c")
        await eventually(
            lambda: process.value("successful_requests_total", "chat") == 3, within=60, every=0.5, what="answers"
        )

    assert process.samples().keys() == before


async def test_what_waits_here_and_at_the_gate_of_the_pool_is_shown() -> None:
    process = Process(
        at_pool={"gate_type": "local-max-concurrency", "gate_params": {"limit": 1, "gating_mode": "blocking"}}
    )
    worker = process.worker(FakeModel(takes_s=10.0))
    await process.put("chat", "a", "b", "c", "d")

    async with running(worker):
        await asyncio.sleep(5.0)
        assert process.value("inflight_requests", "chat") == 1
        assert process.value("gate_waiting_requests") == 1
        assert process.value("queue_depth", "chat") == 2
        assert process.value("dispatch_budget") == 0
        assert process.value("gate_decisions_total", reason="gate_closed") == 1
        await eventually(
            lambda: process.value("successful_requests_total", "chat") == 4, within=60, every=0.5, what="answers"
        )

    assert process.value("gate_waiting_requests") == process.value("queue_depth", "chat") == 0
    assert process.value("inflight_requests", "chat") == 0


async def test_what_the_gate_of_a_queue_drops_is_counted_there() -> None:
    process = Process(at_chat={"gate_type": "constant-decision", "gate_params": {"decision": "drop"}})

    async with running(process.worker(FakeModel())):
        await process.put("chat", "a")
        await eventually(
            lambda: process.value("failed_requests_total", "chat") == 1, within=30, every=0.5, what="a drop"
        )

    assert process.value("gate_decisions_total", "chat", reason="dropped") == 1
    assert process.value("gate_decisions_total", reason="dropped") == 0
    assert process.value("request_total", "chat") == 0, "it was never handed to a worker"


async def test_backlogs_are_asked_for_while_there_is_a_session(process: Process) -> None:
    worker = process.worker(FakeModel(takes_s=1e6))
    await process.put("bulk", "a", "b", "c", "d")
    poll, over = process.peer.backlog(POOL, 5.0), asyncio.Event()
    asked: list[Sequence[float]] = []

    async def due(windows_s: Sequence[float]) -> Sequence[int]:
        asked.append(windows_s)
        return [2] * 15

    with_deadlines = process.peer.backlog(POOL, 5.0, {"requests:bulk": due})
    async with asyncio.TaskGroup() as group:
        group.create_task(poll.run(over))
        await asyncio.sleep(1.0)
        assert process.value("broker_backlog_source_available", "bulk") == 0
        async with running(worker):
            await asyncio.sleep(6.0)
            assert process.value("broker_backlog_source_available", "bulk") == 1
            assert process.value("broker_backlog", "bulk") == 2
            group.create_task(with_deadlines.run(over))
            await asyncio.sleep(1.0)
            assert process.value("deadline_proximity_millis_count", "bulk") == 2
        await asyncio.sleep(6.0)
        over.set()

    assert process.value("broker_backlog_source_available", "bulk") == 0
    assert asked


async def test_a_closed_gate_of_a_queue_counts_at_each_look_at_what_waits_behind_it_case_33() -> None:
    process = Process(at_chat={"gate_type": "prometheus-saturation", "gate_params": {"pool": "llama", "fallback": 1}})
    await process.put("chat", "a")
    worker, over = process.worker(FakeModel()), asyncio.Event()

    async with asyncio.TaskGroup() as group, running(worker):
        await asyncio.sleep(1.0)
        group.create_task(process.peer.backlog(POOL, 5.0).run(over))
        await asyncio.sleep(6.0)
        over.set()

    assert process.value("gate_decisions_total", "chat", reason="gate_closed") == 2
    assert process.value("dispatch_budget", "chat") == 0
    assert process.value("dispatch_budget", "bulk") == 1
    assert process.value("gate_metric_source_available", "chat", inference_pool="llama") == 0


async def test_a_sorted_set_that_does_not_answer_cannot_say_what_is_due() -> None:
    link = RedisLink(lambda: "redis://127.0.0.1:1", lambda: None, client_name="test", tls=RedisTls())

    with pytest.raises(StoreUnavailable):
        await due_in(link, "requests:chat", now)([0.0, 1.0])
