"""Several queues of real brokers as one transport: the transport contract, and what a closed gate costs a message."""

import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from inference_worker.disposition import AT_ONCE, Ack, DeadLetter, HandBack, Nack, Settled, Token
from inference_worker.gates.basic import LocalMaxConcurrency
from inference_worker.merge import RandomRobin
from inference_worker.ports import Admitted, Claimed, Gate, Transport, TurnedAway
from inference_worker.transports import merged_source, redis_sorted_set
from inference_worker.transports.merged import MergedQueues, MergedTransport, Source
from inference_worker.transports.merged_source import Feed
from inference_worker.transports.redis_sorted_set import SortedSetQueue
from tests.integration.test_pubsub_transport import PubsubHarness
from tests.integration.test_rabbitmq_transport import RabbitHarness
from tests.integration.test_redis_sorted_set_transport import LEASE_S, SortedSetHarness
from tests.integration.test_redis_streams_transport import StreamHarness
from tests.integration.test_sql_transport import SqlHarness
from tests.pubsub_kit import subscribed
from tests.services import Postgres, Rabbit, Redis
from tests.sorted_set_kit import sorted_sets_at
from tests.sql_kit import sql_queue_at
from tests.stream_kit import NAMES, streams_at
from tests.transport_contract import Harness, Parked, TransportContract, nothing_comes, request, take
from tests.unit.gate_kit import Told
from tests.waiting import eventually

COPY = HandBack(copy_after_s=0.02)
"""As for a pool's gate over RabbitMQ, only sooner."""


class MergedHarness:
    """Sessions over some queues; messages are published into the first one."""

    def __init__(
        self, queues: Sequence[Harness], *, gate: Gate | None = None, hand_back: HandBack = AT_ONCE, window: int = 8
    ) -> None:
        self.store = queues[0].store
        self._queues = queues
        self._merged = MergedQueues(
            [
                Source(name=f"q-{n}", connect=queue.connect, gate=gate, hand_back=hand_back, window=window)
                for n, queue in enumerate(queues)
            ],
            lambda: RandomRobin(random.Random(1)),
            now=time.time,
            rng=random.Random(2),
            replica_id="r",
        )

    def connect(self) -> AbstractAsyncContextManager[MergedTransport]:
        return self._merged.connect()

    async def publish(self, body: bytes, message_id: str | None = None) -> None:
        await self._queues[0].publish(body, message_id)

    async def cut(self, transport: Transport) -> None:
        """All its connections, and the session: a queue alone would come back by itself."""
        assert isinstance(transport, MergedTransport)
        inner = [feed.transport for feed in transport._shared.feeds]
        for queue, connection in zip(self._queues, inner, strict=True):
            if connection is not None:
                await queue.cut(connection)
        transport.lose("cut by the test")
        await transport.lost.wait()

    lapse = cut

    async def parked(self) -> list[Parked]:
        return [letter for queue in self._queues for letter in await queue.parked()]


# ---------------------------------------------------------------- the contract


class TestMergedSortedSets(TransportContract):
    """All clauses: a sorted set and an idle one."""

    @pytest.fixture
    async def harness(self, redis_server: Redis, redis_url: str) -> AsyncGenerator[MergedHarness]:
        async with (
            sorted_sets_at(redis_url, lease_s=LEASE_S) as sets,
            sorted_sets_at(redis_url, lease_s=LEASE_S, queue=SortedSetQueue(name="idle")) as idle,
        ):
            yield MergedHarness([SortedSetHarness(redis_server, sets), SortedSetHarness(redis_server, idle)])


class TestAMergedStream(TransportContract):
    """All clauses: a stream, where entries stay what they are when they go back."""

    @pytest.fixture
    async def harness(self, redis_server: Redis, redis_url: str) -> AsyncGenerator[MergedHarness]:
        async with streams_at(redis_url, lease_s=LEASE_S) as streams:
            yield MergedHarness([StreamHarness(redis_server, streams)])


# ---------------------------------------------------------------- two brokers


async def test_queues_of_two_brokers_feed_one_pool_and_each_message_is_settled_with_its_own(
    redis_server: Redis, redis_url: str, rabbit: Rabbit, rabbitmq_url: str, deployment_id: str
) -> None:
    async with sorted_sets_at(redis_url) as sets:
        here, there = SortedSetHarness(redis_server, sets), RabbitHarness(rabbit, rabbitmq_url, deployment_id, "quorum")
        await there.declare()
        await feed_one_pool(here, sets.queue.name, there, there.topology.queue)


async def test_a_stream_and_a_table_of_postgres_feed_one_pool(
    redis_server: Redis, redis_url: str, postgres: Postgres, sql_url: str
) -> None:
    async with streams_at(redis_url) as streams, sql_queue_at(sql_url) as kit:
        here, there = StreamHarness(redis_server, streams), SqlHarness(postgres, kit)
        await feed_one_pool(here, NAMES.stream, there, kit.queue.name)


async def test_a_sorted_set_and_a_subscription_feed_one_pool(redis_server: Redis, redis_url: str) -> None:
    async with sorted_sets_at(redis_url) as sets, subscribed(redis_url) as kit:
        here, there = SortedSetHarness(redis_server, sets), PubsubHarness(kit)
        await feed_one_pool(here, sets.queue.name, there, kit.queue.name, counted=False)


async def feed_one_pool(here: Harness, at_here: str, there: Harness, at_there: str, *, counted: bool = True) -> None:
    """Two queues, each with ten messages, of which one is given back and another is a dead letter.

    `counted`: whether both brokers say what waits.
    """
    bodies = [request(f"r-{n}") for n in range(20)]
    for n, body in enumerate(bodies):
        await (here, there)[n % 2].publish(body)
    merged, settled, given_back = MergedHarness([here, there]), Counter[tuple[str, str]](), set[bytes]()
    got: list[bytes] = []
    async with merged.connect() as transport, transport.consuming(3):
        while len(got) < 20:
            delivery = await take(transport)
            disposition: Ack | Nack | DeadLetter = Ack()
            number = bodies.index(delivery.body)
            if number in (4, 5) and delivery.body not in given_back:
                given_back.add(delivery.body)
                disposition = Nack()
            elif number in (6, 7):
                disposition = DeadLetter(reason="poison", detail="", attempts=1, status_code=500)
            settlement = await transport.settle(delivery, disposition)
            assert isinstance(settlement, Settled)
            settled[delivery.queue, settlement.how] += 1
            if settlement.how != "requeue":
                got.append(delivery.body)
        await nothing_comes(transport)

        how = {"ack": 9, "dead_letter": 1, "requeue": 1}
        assert sorted(got) == sorted(bodies)
        assert settled == Counter({(queue, name): n for queue in (at_here, at_there) for name, n in how.items()})
        ready = {name: one.ready for name, one in (await transport.backlogs()).items()}
        assert ready == {"q-0": 0, "q-1": 0} or not counted
        assert [letter.body for letter in await here.parked()] == [bodies[6]]
        theirs = await eventually(there.parked, within=10, what="the dead letter of the other broker")
        assert [letter.body for letter in theirs] == [bodies[7]]


# ---------------------------------------------------------------- a closed gate, over each broker


@pytest.fixture(params=["a sorted set", "a stream", "RabbitMQ"])
async def queue(
    request: pytest.FixtureRequest,
    redis_server: Redis,
    redis_url: str,
    rabbit: Rabbit,
    rabbitmq_url: str,
    deployment_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncGenerator[tuple[Harness, HandBack]]:
    """A queue that buries what it counts twice, and how its gate gives back. Pauses are short."""
    monkeypatch.setattr(redis_sorted_set, "MOST_LAPSES", 2)
    for name, seconds in (("FIRST_PAUSE_S", 0.01), ("LONGEST_PAUSE_S", 0.01), ("CLOSED_S", 0.1)):
        monkeypatch.setattr(merged_source, name, seconds)
    if request.param == "a sorted set":
        async with sorted_sets_at(redis_url) as sets:
            yield SortedSetHarness(redis_server, sets), AT_ONCE
    elif request.param == "a stream":
        async with streams_at(redis_url) as streams:
            yield StreamHarness(redis_server, streams), AT_ONCE
    else:
        made = RabbitHarness(rabbit, rabbitmq_url, deployment_id, "quorum")
        made.topology = replace(made.topology, delivery_limit=2)
        await made.declare()
        yield made, COPY


async def test_what_a_gate_turns_away_again_and_again_is_counted_by_no_broker(queue: tuple[Harness, HandBack]) -> None:
    harness, hand_back = queue
    gate = Told(TurnedAway())
    await harness.publish(request("a"), message_id="m-1")
    merged = MergedHarness([harness], gate=gate, hand_back=hand_back)
    async with merged.connect() as transport, transport.consuming(1):
        await eventually(lambda: gate.asks >= 8, within=20, what="it was turned away eight times")
        gate._verdicts = [Admitted()]
        delivery = await take(transport)

        assert (delivery.attempts, delivery.message_id) == (0, "m-1")
        assert await harness.store.claim("a", 0, Token("t"), time.time() + 600) == Claimed(starts=1)
        assert await transport.settle(delivery, Ack()) == Settled(how="ack")
        await nothing_comes(transport)
    assert await harness.parked() == []


async def test_what_has_come_is_counted_by_no_broker_when_a_gate_opens_and_closes(
    queue: tuple[Harness, HandBack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gate on the model's load does so every few seconds, for hours."""
    ends = 0
    consume = Feed._consume

    async def counted(feed: Feed, transport: Transport) -> None:
        nonlocal ends
        await consume(feed, transport)
        ends += 1

    monkeypatch.setattr(Feed, "_consume", counted)
    harness, hand_back = queue
    for n in range(6):
        await harness.publish(request(f"r-{n}"))
    merged = MergedHarness([harness], gate=LocalMaxConcurrency(1, "classifying"), hand_back=hand_back)
    got: list[bytes] = []
    async with merged.connect() as transport, transport.consuming(2):

        def given_back_or_kept() -> bool:
            left = 6 - len(got)
            return ends >= len(got) or left == 0 or (hand_back is COPY and transport.waiting()["q-0"] == left)

        while len(got) < 6:
            delivery = await take(transport)
            got.append(delivery.body)
            await eventually(given_back_or_kept, within=10, what="the gate is closed for the others")
            assert await transport.settle(delivery, Ack()) == Settled(how="ack")

        assert (await transport.backlog()).ready == 0
    assert len(set(got)) == 6
    assert await harness.parked() == []
