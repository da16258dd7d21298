"""Queues that come, go and change while a session lasts: the others do not notice, and nothing is lost or doubled."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest

from inference_worker.disposition import Ack, Nack, Settled
from inference_worker.errors import TransportLost
from inference_worker.gates.basic import LocalMaxConcurrency
from inference_worker.lanes import TIER_LABEL
from inference_worker.merge import MergePolicy, RandomRobin, TierPriority
from inference_worker.ports import Delivery, Gate, Route
from inference_worker.results.memory import MemoryStore
from inference_worker.timing import ended
from inference_worker.transports.memory import MemoryBroker, MemoryTransport
from inference_worker.transports.merged import MergedQueues, MergedTransport, Source
from tests.transport_contract import nothing_comes, reply, take
from tests.unit.worker_kit import body, now
from tests.waiting import eventually


def robin() -> MergePolicy[Delivery]:
    return RandomRobin(random.Random(1))


class Pool:
    """Some queues in this process, of which a pool has as many as a test says."""

    def __init__(self) -> None:
        self.store = MemoryStore(now=now, lease_s=15, ttl_s=3600)
        self.brokers: dict[str, MemoryBroker] = {}
        self.merged = MergedQueues((), robin, now=now, rng=random.Random(2), replica_id="r")
        self.sources: dict[str, Source] = {}

    def broker(self, name: str) -> MemoryBroker:
        return self.brokers.setdefault(name, MemoryBroker(store=self.store, now=now, queue=name))

    def has(
        self,
        *names: str,
        anew: Mapping[str, Mapping[str, str]] | None = None,
        gates: Mapping[str, Gate] | None = None,
        policy: Callable[[], MergePolicy[Delivery]] | None = None,
    ) -> None:
        """These queues and no others; those of `anew` are written anew, with such labels."""
        fresh = anew or {}
        for name in names:
            if name in fresh or name not in self.sources:
                self.sources[name] = Source(
                    name=name,
                    connect=self.broker(name).connect,
                    gate=(gates or {}).get(name),
                    labels=fresh.get(name, {}),
                    route=Route(base_url=f"http://{name}", path="/"),
                    window=4,
                )
        self.sources = {name: self.sources[name] for name in names}
        self.merged.change(list(self.sources.values()), policy, tier_label=TIER_LABEL)

    async def put(self, name: str, *ids: str) -> None:
        async with self.broker(name).connect() as transport:
            for request_id in ids:
                await transport.publish(body(request_id))

    @asynccontextmanager
    async def consuming(self, limit: int = 8) -> AsyncGenerator[MergedTransport]:
        async with self.merged.connect() as session, session.consuming(limit):
            yield session

    def ready(self, name: str) -> list[str]:
        return [msgspec.json.decode(message.body)["request_id"] for message in self.brokers[name].ready]

    async def connections(self, name: str, count: int) -> None:
        await eventually(
            lambda: len(self.brokers[name].connections) == count, within=60, what=f"{count} connections to {name}"
        )


def id_of(delivery: Delivery) -> str:
    found: str = msgspec.json.decode(delivery.body)["request_id"]
    return found


async def answered(session: MergedTransport, delivery: Delivery) -> None:
    settled = await session.settle(delivery, Ack(reply=reply(id_of(delivery))))
    assert settled == Settled(how="ack")


async def test_a_queue_that_is_added_is_consumed_and_the_others_keep_their_connections_case_310() -> None:
    pool = Pool()
    pool.has("one")
    async with pool.consuming() as session:
        await pool.connections("one", 1)
        (before,) = pool.brokers["one"].connections

        pool.has("one", "two")
        await pool.put("two", "a")
        delivery = await take(session)

        assert (id_of(delivery), delivery.route) == ("a", Route(base_url="http://two", path="/"))
        assert list(pool.brokers["one"].connections) == [before]
        assert session.reasons() == {"one": "", "two": ""}
        await answered(session, delivery)


async def test_a_queue_that_is_removed_keeps_its_backlog_and_what_runs_ends_with_its_own_connection_case_310() -> None:
    pool = Pool()
    pool.has("one", "two")
    await pool.put("one", *"abcdefgh")
    async with pool.consuming(limit=1) as session:
        running = await take(session)
        await eventually(lambda: session.waiting()["one"] == 4, within=10, what="its window is full")

        gone = asyncio.create_task(pool.merged.gone(pool.sources["one"]))
        pool.has("two")
        await eventually(lambda: len(pool.ready("one")) == 7, within=10, what="what waited here is back")

        assert pool.ready("one") == [*"bcdefgh"]
        assert not gone.done()
        assert len(pool.brokers["one"].connections) == 1
        assert session.waiting() == {"two": 0}
        await answered(session, running)
        await gone
        await pool.connections("one", 0)
        await nothing_comes(session)

    assert await pool.store.read("a") is not None


async def test_a_queue_that_is_written_anew_runs_twice_until_the_calls_of_the_old_one_end_case_310() -> None:
    pool = Pool()
    pool.has("one", anew={"one": {"team": "old"}})
    await pool.put("one", *"abc")
    async with pool.consuming(limit=2) as session:
        old = [await take(session)]
        before = pool.sources["one"]

        pool.has("one", anew={"one": {"team": "new"}})
        new = await take(session)

        assert (old[0].labels, new.labels) == ({"team": "old"}, {"team": "new"})
        await pool.connections("one", 2)
        await answered(session, old[0])
        await pool.merged.gone(before)
        await pool.connections("one", 1)
        await answered(session, new)
        last = await take(session)
        await answered(session, last)

    assert sorted(id_of(delivery) for delivery in (*old, new, last)) == [*"abc"]
    assert pool.ready("one") == []


async def test_all_queues_may_go_and_come_back_case_313() -> None:
    pool = Pool()
    pool.has("one", "two")
    await pool.put("one", "a")
    async with pool.consuming() as session:
        await answered(session, await take(session))

        pool.has()
        for name in ("one", "two"):
            await pool.connections(name, 0)
        await pool.put("one", "b")
        await nothing_comes(session)
        assert session.reasons() == {}
        with pytest.raises(TransportLost, match="no queue"):
            await session.publish(b"")
        pool.has("two", "one")

        await answered(session, await take(session))
    assert await pool.store.read("b") is not None


async def test_a_session_without_a_queue_is_open_and_has_nothing_to_do_case_313() -> None:
    pool = Pool()

    async with pool.consuming() as session:
        await nothing_comes(session)
        assert (await session.backlog()).ready == 0

        assert not session.lost.is_set()


async def test_sessions_to_come_have_the_queues_of_the_last_change() -> None:
    pool = Pool()
    pool.has("one")
    async with pool.merged.connect() as session:
        pool.has("two")
        await pool.connections("two", 1)
        session.lose("cut by the test")
        await session.lost.wait()

    async with pool.merged.connect() as session:
        assert session.reasons().keys() == {"two"}


async def test_what_waits_in_lanes_is_lined_up_anew_when_the_policy_changes() -> None:
    pool = Pool()
    labels = {"bulk": {TIER_LABEL: "batch"}, "chat": {TIER_LABEL: "interactive"}}
    pool.has("bulk", "chat", anew=labels)
    async with pool.merged.connect() as session, session.consuming(1):
        await pool.put("bulk", "first")
        running = await take(session)
        await pool.put("bulk", "a", "b", "c", "d")
        await pool.put("chat", "e", "f")
        await eventually(lambda: session.waiting() == {"bulk": 4, "chat": 2}, within=10, what="all wait here")

        pool.has("bulk", "chat", policy=lambda: TierPriority(1))
        order = []
        for _ in range(6):
            await answered(session, running)
            running = await take(session)
            order.append(id_of(running))
        await answered(session, running)

    assert order == ["e", "f", "a", "b", "c", "d"]


async def test_a_queue_that_hangs_or_rests_is_gone_at_once() -> None:
    pool = Pool()
    pool.has("one")
    pool.broker("away").refuses = "it is away"

    @asynccontextmanager
    async def hangs() -> AsyncGenerator[MemoryTransport]:
        await asyncio.Event().wait()
        yield MemoryTransport(pool.broker("one"))  # Never.

    hung = Source(name="hung", connect=hangs)
    away = Source(name="away", connect=pool.broker("away").connect)
    async with pool.consuming():
        pool.merged.change([*pool.sources.values(), hung, away], tier_label=TIER_LABEL)
        await asyncio.sleep(100.0)
        begun = asyncio.get_running_loop().time()

        pool.has("one")
        await pool.merged.gone(hung)
        await pool.merged.gone(away)

        assert asyncio.get_running_loop().time() - begun < 1.0


async def test_the_old_gate_has_back_what_it_let_in_and_the_new_one_begins_empty() -> None:
    old, new = LocalMaxConcurrency(2), LocalMaxConcurrency(3)
    pool = Pool()
    pool.has("one", gates={"one": old})
    await pool.put("one", *"abcd")
    async with pool.consuming(limit=1) as session:
        running = await take(session)
        await eventually(lambda: old.budget() == 0, within=10, what="the old gate is full")
        before = pool.sources["one"]

        pool.has("one", anew={"one": {}}, gates={"one": new})
        await eventually(lambda: new.budget() == 0, within=10, what="the new gate is full")

        assert old.budget() == 0.5, "what waited here was given back"
        await answered(session, running)
        await pool.merged.gone(before)
        assert old.budget() == 1.0
        for _ in range(3):
            await answered(session, await take(session))
    assert new.budget() == 1.0


async def test_a_call_whose_session_is_lost_meanwhile_still_counts_for_the_old_gate() -> None:
    old = LocalMaxConcurrency(2)
    pool = Pool()
    pool.has("one", gates={"one": old})
    await pool.put("one", "a")
    async with pool.consuming() as session:
        running = await take(session)
        gone = asyncio.create_task(pool.merged.gone(pool.sources["one"]))
        pool.has()
        session.lose("cut by the test")
        await session.lost.wait()
        await asyncio.sleep(100.0)

        assert not gone.done()
        await session.settle(running, Nack())
        await gone

    assert old.budget() == 1.0


async def test_changes_while_messages_flow_lose_none_and_double_none_case_313() -> None:
    """Ten queues that come, go and are written anew under a load: each request is answered once."""
    pool, chance = Pool(), random.Random(7)
    names = [f"q{n}" for n in range(10)]
    ids = {name: [f"{name}-{n}" for n in range(30)] for name in names}
    pool.has(*names)
    done: list[str] = []

    async def run(session: MergedTransport, delivery: Delivery) -> None:
        await asyncio.sleep(chance.uniform(0.1, 1.0))
        await answered(session, delivery)
        done.append(id_of(delivery))

    async def serve(session: MergedTransport, group: asyncio.TaskGroup) -> None:
        while True:
            group.create_task(run(session, await session.receive()))

    async with pool.consuming() as session, asyncio.TaskGroup() as group:
        serving = asyncio.create_task(serve(session, group))
        for name in names:
            await pool.put(name, *ids[name])
        for turn in range(40):
            some = chance.sample(names, chance.randrange(len(names) + 1))
            anew = {name: {"turn": str(turn)} for name in some if chance.random() < 0.5}
            policy = chance.choice((None, robin, partial(TierPriority[Delivery], 2)))
            pool.has(*some, anew=anew, policy=policy)
            await asyncio.sleep(chance.uniform(0, 0.5))
        pool.has(*names)
        await eventually(lambda: len(done) >= 300, within=600, every=1.0, what="all are answered")
        await ended(serving)

    assert sorted(done) == sorted(one for some in ids.values() for one in some)
    assert [pool.ready(name) for name in names] == [[]] * 10
