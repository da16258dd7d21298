"""The pools of a process become what its documents say while requests run: nothing is interrupted, lost or doubled.

The queues are in memory; all else is as the command joins it. Reading the documents is in `test_reload.py`.
"""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inference_worker.assembly import Outside, Page, Stores, Worker
from inference_worker.config.documents import QueueConfig, read_documents
from inference_worker.disposition import AT_ONCE, HandBack
from inference_worker.gates.from_metrics import Surroundings
from inference_worker.gates.making import Around
from inference_worker.peer import Peer
from inference_worker.peer_backlog import Expiring
from inference_worker.ports import Connect, Route
from inference_worker.process_pools import Parts, ProcessPools
from inference_worker.process_setup import read_setup
from inference_worker.process_status import Standing, links
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.results.fleet import MemoryFleet
from inference_worker.routed_model import RoutedModel
from inference_worker.timing import ByteBudget
from inference_worker.tracing import PASSING_ON
from inference_worker.transforms.shaping import AS_IT_CAME
from inference_worker.transports.memory import MemoryBroker
from inference_worker.transports.merged import MergedTransport
from tests.unit.prometheus_kit import URL, Neighbours, unix_now
from tests.unit.worker_kit import FakeModel, Site, body, now
from tests.waiting import eventually

Document = Mapping[str, Any]
LIMIT = "local-max-concurrency"


def queue(name: str, **options: object) -> Document:
    return {"queue_name": name, "igw_base_url": "http://g", **options}


def pool(name: str = "default", workers: int = 2, **options: Any) -> Document:
    return {"id": name, "workers": workers, **options}


def limited(limit: int) -> Document:
    return {"gate_type": LIMIT, "gate_params": {"limit": limit}}


@dataclass
class Gateway(FakeModel):
    host: str = ""
    closed_at: float = -1.0
    fails_to_close: bool = False

    async def close(self) -> None:
        self.closed_at = asyncio.get_running_loop().time()
        if self.fails_to_close:
            raise OSError("it does not close")


@dataclass
class Brokers:
    """Queues in memory, by their names; for all pools."""

    site: Site
    queues: dict[str, MemoryBroker] = field(default_factory=dict)
    fails: list[Exception] = field(default_factory=list)
    hand_back: HandBack = AT_ONCE
    on_ladder: bool = False

    def of(self, name: str) -> MemoryBroker:
        return self.queues.setdefault(name, MemoryBroker(store=self.site.store, now=now, queue=name))

    def connect(self, config: QueueConfig, route: Route) -> Connect:
        if self.fails:
            raise self.fails.pop(0)
        return self.of(config.queue_name).connect

    def due(self, queues: Sequence[QueueConfig]) -> Mapping[str, Expiring]:
        return {}


class Process:
    """A process whose documents a test changes."""

    def __init__(self, *queues: Document, pools: Sequence[Document] = (pool(),), takes_s: float = 1.0) -> None:
        self.takes_s = takes_s
        self.site = Site()
        self.brokers = Brokers(self.site)
        self.gateways: dict[str, Gateway] = {}
        given = {"transport": "redis-sortedset", "pool-config-file": "p", "transport-config-file": "t"}
        texts = {"t": self._transport(queues), "p": json.dumps(pools)}
        rng = random.Random(1)
        self.setup = read_setup(
            {**given, "health-port": "0", "metrics-port": "0"}, {"LOG_LEVEL": "info"}, texts.__getitem__, rng
        )
        documents = self.setup.documents
        outside = Outside(now=now, rng=rng)
        self.model = RoutedModel((), self._gateway)
        self.peer, self.standing = Peer(documents), Standing(documents, self.model)
        self.fleets: dict[str, MemoryFleet] = {}
        stores = Stores(results=self.site.store, outbox=self.site.store, fleet_of=self._fleet)
        self.links_opened = 0
        self.links_take_s = 0.0
        self.parts = Parts(
            flags=self.setup.flags,
            outside=outside,
            replica_id="r",
            stores=stores,
            broker_of=lambda metrics: self.brokers,
            model=self.model,
            around=self.peer.around(
                Around(
                    metrics=Surroundings(
                        client=Neighbours().client(), now=unix_now, chance=lambda: 0.0, prometheus_url=URL
                    ),
                    link_to=lambda url: RedisLink(lambda: url, lambda: None, client_name="t", tls=RedisTls()),
                    clock=lambda: asyncio.get_running_loop().time(),
                    process="host-1",
                    seen=lambda _, __, ___: None,
                    lent=lambda _, __: None,
                )
            ),
            open_links=self._open_links,
            peer=self.peer,
            standing=self.standing,
            tracer=self.peer.notes(PASSING_ON),
            queue_ids={},
            shaping=AS_IT_CAME,
            breaker_failures=0,
        )
        self.pools = ProcessPools(self.parts, documents)
        self.worker = Worker(
            self.setup.settings,
            outside,
            stores=stores,
            pools=(),
            model=self.model,
            budget=ByteBudget(1_000_000),
            tls=None,
            tracer=self.parts.tracer,
            metrics=self.pools.metrics,
            page=Page(
                host="",
                ports={},
                links=links,
                metrics=self.peer.page(self.pools.registries),
                status=self.standing.status,
            ),
            beside=[self.pools.alongside.run],
            asks_health=False,
            grace_s=60.0,
        )

    def _transport(self, queues: Sequence[Document]) -> str:
        return json.dumps({"url": "redis://r", "queues": queues})

    def _gateway(self, host: str) -> Gateway:
        calls = self.calls(host)  # Of one that was closed before.
        self.gateways[host] = Gateway(host=host, takes_s=self.takes_s, calls=calls)
        return self.gateways[host]

    def _fleet(self, name: str) -> MemoryFleet:
        return self.fleets.setdefault(name, MemoryFleet(now=now))

    async def _open_links(self) -> None:
        self.links_opened += 1
        await asyncio.sleep(self.links_take_s)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        await self.pools.begin(self.worker, self.setup.documents)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            self.task = group.create_task(self.worker.run(stop))
            try:
                await self.connected()
                yield
            finally:
                stop.set()

    async def connected(self) -> None:
        def all_of_them() -> bool:
            sessions = [listener.transport for listener in self.worker.listeners.values()]
            return all(isinstance(one, MergedTransport) and not any(one.reasons().values()) for one in sessions)

        await eventually(all_of_them, within=30, what="all queues are connected")

    async def becomes(
        self, *queues: Document, pools: Sequence[Document] = (pool(),), merge: Document | None = None
    ) -> Sequence[str]:
        documents = read_documents(
            "redis-sortedset",
            self._transport(queues),
            json.dumps(pools),
            None if merge is None else json.dumps(merge),
            without_queues=True,
        )
        return await self.pools.change(documents)

    async def put(self, name: str, *ids: str) -> None:
        async with self.brokers.of(name).connect() as transport:
            for request_id in ids:
                await transport.publish(body(request_id))

    async def result(self, request_id: str, within: float = 30) -> None:
        await eventually(lambda: self.site.result(request_id), within=within, what=f"the result of {request_id}")

    def calls(self, host: str = "http://g") -> list[str]:
        return self.gateways[host].calls if host in self.gateways else []

    async def called(self, count: int, host: str = "http://g") -> None:
        await eventually(lambda: len(self.calls(host)) == count, within=30, what=f"{count} calls")

    def connections(self, name: str) -> int:
        return len(self.brokers.of(name).connections)

    def series(self, name: str, **labels: str) -> list[float]:
        page, _ = self.worker._exposition("")
        return [
            sample.value
            for family in text_string_to_metric_families(page.decode())
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def status(self) -> dict[str, object]:
        shown = self.worker.status()["pools"]
        assert isinstance(shown, dict)
        return shown


async def test_a_queue_that_is_added_is_served_and_one_that_is_removed_keeps_its_backlog_case_310() -> None:
    process = Process(queue("a"), takes_s=30.0)
    async with process.running():
        await process.put("a", "a1", "a2", "a3")
        await process.called(2)

        said = await process.becomes(queue("b"))
        await process.put("b", "b1")
        await process.result("a1", within=60)
        await process.result("a2", within=60)
        await process.result("b1", within=90)
        await eventually(lambda: process.connections("a") == 0, within=10, what="its connection is closed")

    assert said == ["queues added: b", "queues removed: a"]
    assert len(process.brokers.of("a").ready) == 1
    assert process.calls() == ["a1", "a2", "b1"]
    assert process.gateways["http://g"].closed == []


async def test_a_queue_that_changes_is_served_as_it_is_written_now_case_310() -> None:
    process = Process(queue("a"), takes_s=30.0)
    async with process.running():
        await process.put("a", "old")
        await process.called(1)

        said = await process.becomes(queue("a", igw_base_url="http://h"))
        await process.put("a", "new")
        await process.called(1, "http://h")
        await process.result("old", within=60)
        await process.result("new", within=60)
        await eventually(lambda: process.gateways["http://g"].closed_at > 0, within=10, what="the old one is closed")

    assert said == ["queues changed: a"]
    assert (process.calls(), process.calls("http://h")) == (["old"], ["new"])


async def test_what_is_written_as_before_is_left_alone_wherever_it_stands_now() -> None:
    gate = limited(3)
    process = Process(queue("a", **gate), queue("b"), pools=[pool(**gate)])
    async with process.running():
        (before,) = process.brokers.of("a").connections
        at_queue, at_pool = process.pools._pools["default"].gates
        listener = process.worker.listener

        said = await process.becomes(queue("b"), queue("c"), queue("a", **gate), pools=[pool("x"), pool(**gate)])
        await process.connected()

        assert said == ["queues added: c", "pools added: x"]
        assert list(process.brokers.of("a").connections) == [before]
        assert process.pools._pools["default"].gates == [at_queue, at_pool]
        assert process.worker.listeners["default"] is listener


async def test_the_same_documents_change_nothing() -> None:
    process = Process(queue("a"))
    async with process.running():
        assert await process.becomes(queue("a")) == []


async def test_no_queue_at_all_drains_all_of_them_and_they_may_come_back_case_313() -> None:
    process = Process(queue("a"), queue("b"), takes_s=30.0)
    async with process.running():
        await process.put("a", "a1")
        await process.called(1)
        await process.becomes()
        await process.result("a1", within=60)
        await eventually(lambda: process.connections("b") == 0, within=10, what="all connections are closed")
        await process.put("a", "a2")
        await asyncio.sleep(60.0)
        assert (process.calls(), process.worker.ready()["running"]) == (["a1"], (True, ""))

        await process.becomes(queue("b"), queue("a"))
        await process.result("a2", within=60)


async def test_more_and_fewer_workers_interrupt_no_call() -> None:
    process = Process(queue("a"), takes_s=30.0)
    async with process.running():
        await process.put("a", *(f"r{n}" for n in range(8)))
        await process.called(2)

        assert await process.becomes(queue("a"), pools=[pool(workers=4)]) == ["pools resized: default"]
        await process.called(4)
        assert process.series("llm_d_async_async_pool_worker_limit") == [4]
        assert process.series("inference_worker_slots") == [4]

        async def beat() -> bool:
            return [one.slots for one in await process.fleets["default"].members()] == [4]

        await eventually(beat, within=5, what="the fleet knows it")
        await process.becomes(queue("a"), pools=[pool(workers=1)])
        await asyncio.sleep(20.0)
        assert len(process.calls()) == 4
        for n in range(8):
            await process.result(f"r{n}", within=300)

    assert process.gateways["http://g"].closed == []
    assert sorted(process.calls()) == [f"r{n}" for n in range(8)]


async def test_a_pool_that_is_added_works_and_one_that_is_removed_drains() -> None:
    process = Process(queue("a"), takes_s=30.0)
    async with process.running():
        await process.put("a", "a1", "a2", "a3")
        await process.called(2)

        await process.becomes(queue("b", worker_pool_id="x"), pools=[pool("x", 1)])
        await process.put("b", "b1")
        await process.result("b1", within=60)
        await process.result("a1", within=60)
        await process.result("a2", within=60)

        assert process.status().keys() == {"x"}
        assert process.series("llm_d_async_async_pool_worker_limit", pool_name="default") == []
        await eventually(lambda: process.connections("a") == 0, within=10, what="its queue is closed")
        assert [len(process.brokers.of("a").ready), process.calls()] == [1, ["a1", "a2", "b1"]]
        await process.becomes(queue("a"), pools=[pool()])
        await process.result("a3", within=60)
        assert process.series("inference_worker_slots", pool="x") == []


async def test_a_pool_that_comes_back_while_it_drains_works_beside_what_is_left_of_it() -> None:
    process = Process(queue("a"), queue("b", worker_pool_id="x"), pools=[pool(), pool("x", 1)], takes_s=30.0)
    async with process.running():
        await process.put("b", "b1", "b2")
        await process.called(1)
        await process.becomes(queue("a"))
        await process.becomes(queue("a"), queue("b", worker_pool_id="x"), pools=[pool(), pool("x", 1)])
        await process.called(2)

        await process.result("b1")
        await process.result("b2", within=60)
        assert process.status().keys() == {"default", "x"}
        assert process.connections("b") == 1


async def test_a_queue_may_move_to_another_pool() -> None:
    pools = [pool(), pool("x")]
    process = Process(queue("a"), pools=pools, takes_s=30.0)
    async with process.running():
        await process.put("a", "a1")
        await process.called(1)
        assert process.series("llm_d_async_async_inflight_requests", pool_name="default", queue_id="a") == [1]

        await process.becomes(queue("a", worker_pool_id="x"), pools=pools)
        await process.put("a", "a2")
        await process.called(2)

        assert process.series("llm_d_async_async_inflight_requests", pool_name="x") == [1]
        assert process.series("llm_d_async_async_inflight_requests", pool_name="default") == []
        await process.result("a1")
        await process.result("a2", within=60)


async def test_the_gate_of_a_pool_is_swapped_and_runs_on_for_what_it_has_let_in() -> None:
    process = Process(queue("a"), pools=[pool(workers=4, **limited(1))], takes_s=30.0)
    async with process.running():
        old = process.pools._pools["default"].gate
        assert old is not None
        await process.put("a", "a1", "a2", "a3")
        await process.called(1)
        assert old.gate.budget() == 0

        said = await process.becomes(queue("a"), pools=[pool(workers=4, **limited(2))])
        await process.called(3)

        new = process.pools._pools["default"].gate
        assert said == ["gates changed of pools: default"]
        assert new is not None
        assert (old.gate.budget(), new.gate.budget(), old.over.is_set()) == (0, 0, False)
        for request_id in ("a1", "a2", "a3"):
            await process.result(request_id, within=120)
        await eventually(old.over.is_set, within=10, what="the old gate ends")
        assert (old.gate.budget(), new.gate.budget(), new.over.is_set()) == (1, 1, False)
        assert process.series("llm_d_async_async_dispatch_budget", queue_id="") == [1]


async def test_the_gate_of_a_queue_ends_once_what_it_has_let_in_is_settled() -> None:
    process = Process(queue("a", **limited(1)), takes_s=30.0)
    async with process.running():
        (old,) = process.pools._pools["default"].gates
        await process.put("a", "a1")
        await process.called(1)

        await process.becomes(queue("a"))
        await asyncio.sleep(10.0)
        assert not old.over.is_set()
        await process.result("a1", within=60)
        await eventually(old.over.is_set, within=10, what="the old gate ends")

        assert (process.pools._pools["default"].gates, old.gate.budget()) == ([], 1)


async def test_the_series_of_a_gate_are_those_of_the_one_that_stands() -> None:
    learning: Document = {"gate_type": "aimd", "gate_params": {"min_window": 2}}
    process = Process(queue("a"), pools=[pool(**learning)], takes_s=30.0)
    async with process.running():
        await process.put("a", "a1")
        await process.called(1)
        assert set(process.series("llm_d_async_async_aimd_window")) == {2}

        await process.becomes(queue("a"), pools=[pool(gate_type="aimd", gate_params={"min_window": 5})])
        assert set(process.series("llm_d_async_async_aimd_window")) == {5}
        await process.becomes(queue("a"))
        assert process.series("llm_d_async_async_aimd_window") == []
        await process.result("a1", within=60)


async def test_another_merge_policy_and_its_stamps_hold_from_now_on() -> None:
    chat, bulk = queue("chat", labels={"tier": "interactive"}), queue("bulk", labels={"tier": "batch"})
    process = Process(chat, bulk, pools=[pool(workers=1)], takes_s=3.0)
    async with process.running():
        await process.put("bulk", "running")
        await process.called(1)
        await process.put("bulk", "b1", "b2", "b3")
        await process.put("chat", "c1", "c2", "c3")
        await asyncio.sleep(1.0)
        before = {name: list(process.brokers.of(name).connections) for name in ("chat", "bulk")}

        parameters = {"priority_header": "x-lane"}
        await process.becomes(
            chat, bulk, pools=[pool(workers=1)], merge={"type": "tier-priority", "parameters": parameters}
        )
        await process.called(7)

        assert {name: list(process.brokers.of(name).connections) for name in ("chat", "bulk")} == before

    assert process.calls() == ["running", "c1", "c2", "c3", "b1", "b2", "b3"]
    assert process.gateways["http://g"].headers[-1]["x-lane"] == "5"


@pytest.mark.parametrize("documents", [(queue("a"), queue("b")), (queue("a", **limited(1)),)], ids=["queue", "gate"])
async def test_where_something_cannot_be_made_all_is_as_it_was_and_may_be_tried_again_case_314(
    documents: Sequence[Document],
) -> None:
    process = Process(queue("a"), takes_s=30.0)
    async with process.running():
        await process.put("a", "a1")
        await process.called(1)
        connections = list(process.brokers.of("a").connections)
        process.brokers.fails = [RuntimeError("it cannot be made")]

        with pytest.raises(RuntimeError, match="it cannot be made"):
            await process.becomes(*documents, pools=[pool(workers=9, **limited(5)), pool("x")])

        assert list(process.brokers.of("a").connections) == connections
        assert process.status().keys() == {"default"}
        assert (process.worker.pools["default"].slots, process.pools._pools["default"].gates) == (2, [])
        await process.becomes(*documents, pools=[pool(workers=9, **limited(5)), pool("x")])
        await process.result("a1", within=60)
        assert process.worker.pools["default"].slots == 9


async def test_nothing_changes_once_it_was_told_to_stop_case_313() -> None:
    process = Process(queue("a"), takes_s=30.0)
    async with process.running():
        await process.put("a", "a1")
        await process.called(1)
    stopped = await process.becomes(queue("b", worker_pool_id="x"), pools=[pool("x")])

    assert stopped == ["nothing: told to stop"]
    assert process.connections("b") == 0
    assert process.status().keys() == {"default"}


async def test_a_stop_while_queues_and_pools_leave_ends_in_time_and_hands_back_what_runs() -> None:
    process = Process(queue("a"), queue("b", worker_pool_id="x"), pools=[pool(), pool("x")], takes_s=600.0)
    async with process.running():
        await process.put("a", "a1")
        await process.put("b", "b1")
        await process.called(2)
        await process.becomes(pools=[pool()])
        await asyncio.sleep(1.0)
        begun = asyncio.get_running_loop().time()

    assert asyncio.get_running_loop().time() - begun < 70.0
    assert [len(process.brokers.of(name).ready) for name in ("a", "b")] == [1, 1]
    assert sorted(process.gateways["http://g"].closed) == ["a1", "b1"]


async def test_who_has_paused_the_process_has_paused_the_pools_that_come() -> None:
    process = Process(queue("a"))
    async with process.running():
        process.worker.toggle_pause()
        await process.becomes(queue("a"), queue("b", worker_pool_id="x"), pools=[pool(), pool("x")])
        await process.put("b", "b1")
        await asyncio.sleep(10.0)
        assert process.calls() == []

        process.worker.toggle_pause()
        await process.result("b1")


async def test_a_gateway_that_comes_while_another_is_closed_is_not_closed_with_it() -> None:
    process = Process(queue("a"), takes_s=30.0)
    async with process.running():
        await process.put("a", "a1")
        await process.called(1)
        await process.becomes(queue("a", igw_base_url="http://h"))
        process.links_take_s = 60.0
        await process.becomes(queue("a", igw_base_url="http://k"))
        assert process.gateways["http://g"].closed_at > 0

        await process.put("a", "a2")
        await process.called(1, "http://k")
        await process.result("a2", within=60)


async def test_a_gateway_that_does_not_close_ends_nothing() -> None:
    process = Process(queue("a"))
    async with process.running():
        process.gateways["http://g"].fails_to_close = True
        await process.becomes(queue("a", igw_base_url="http://h"))
        await asyncio.sleep(10.0)
        process.gateways["http://g"].fails_to_close = False
        await process.put("a", "a1")
        await process.result("a1")


async def test_changes_under_a_load_lose_no_request_and_call_none_twice_case_313() -> None:
    """Queues, pools, workers, gates and policies come and go while 300 requests run: each is called once."""
    process, chance = Process(queue("q0"), takes_s=2.0), random.Random(11)
    names = [f"q{n}" for n in range(6)]
    ids = [f"{name}-{n}" for name in names for n in range(50)]
    policies: list[Document | None] = [None, {"type": "tier-priority"}, {"type": "tier-aging"}]
    async with process.running():
        for name in names:
            await process.put(name, *(one for one in ids if one.startswith(f"{name}-")))
        for _ in range(40):
            pools = [
                pool(name, chance.randrange(1, 9), **(limited(chance.randrange(1, 9)) if chance.random() < 0.3 else {}))
                for name in chance.sample(["default", "x", "y"], chance.randrange(1, 4))
            ]
            queues = [
                queue(
                    name,
                    worker_pool_id=chance.choice(pools)["id"],
                    labels={"tier": chance.choice(["interactive", "batch"])},
                    **(limited(chance.randrange(1, 9)) if chance.random() < 0.3 else {}),
                )
                for name in chance.sample(names, chance.randrange(len(names) + 1))
            ]
            await process.becomes(*queues, pools=pools, merge=chance.choice(policies))
            await asyncio.sleep(chance.uniform(0, 3.0))
        await process.becomes(*(queue(name) for name in names), pools=[pool(workers=8)])
        for one in ids:
            await process.result(one, within=900)
        await asyncio.sleep(30.0)
        connections = [process.connections(name) for name in names]

    assert sorted(process.calls()) == sorted(ids)
    assert [len(process.brokers.of(name).ready) for name in names] == [0] * len(names)
    assert connections == [1] * len(names)


async def test_what_ran_beside_a_pool_ends_with_it() -> None:
    process = Process(queue("a"), pools=[pool(), pool("x", **limited(1))])
    async with process.running():
        before = len(asyncio.all_tasks())
        for _ in range(5):
            await process.becomes(queue("a"))
            await process.becomes(queue("a", **limited(2)), pools=[pool(), pool("x", **limited(1))])
            await process.becomes(queue("a"), pools=[pool(), pool("x", **limited(1))])
        await asyncio.sleep(60.0)

        assert len(asyncio.all_tasks()) <= before + 2
        assert len(process.worker.store_health._watchers) == 2


async def test_connections_that_new_gates_ask_over_are_opened() -> None:
    process = Process(queue("a"))
    async with process.running():
        before = process.links_opened
        await process.becomes(queue("a", gate_type="redis-quota", gate_params={"address": "r:1", "limit": 1}))

        assert process.links_opened == before + 1
