"""Several queues as one: the transport contract, no queue in another's way, and nothing lost or doubled."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from inference_worker.disposition import (
    AT_ONCE,
    Ack,
    CopyRefused,
    DeadLetter,
    DeliveryLost,
    Disposition,
    HandBack,
    Hold,
    Known,
    Nack,
    Republish,
    Settled,
    Settlement,
    Token,
)
from inference_worker.errors import GateFailed, TransportLost
from inference_worker.gates.basic import LocalMaxConcurrency
from inference_worker.merge import MergePolicy, RandomRobin, TierPriority
from inference_worker.messages import KnownReply, Timings
from inference_worker.ports import (
    Admitted,
    Asked,
    Backlog,
    Delivery,
    Dropped,
    Feedback,
    Gate,
    Parked,
    Route,
    Transport,
    TurnedAway,
    Verdict,
)
from inference_worker.results.memory import MemoryStore
from inference_worker.timing import ByteBudget, ended
from inference_worker.transports.memory import MemoryBroker, MemoryTransport, _receipt
from inference_worker.transports.merged import MergedQueues, MergedTransport, Source, saw, seen_of, summed
from tests.transport_contract import Parked as ParkedLetter
from tests.transport_contract import TransportContract, failed, nothing_comes, reply, request, take
from tests.unit.gate_kit import RecordedPermit, Told
from tests.waiting import eventually


@dataclass
class System:
    """Some queues in this process, and one pool over them."""

    names: Sequence[str] = ("one", "two")
    gates: dict[str, Gate] = field(default_factory=dict)
    labels: dict[str, dict[str, str]] = field(default_factory=dict)
    window: int = 4
    policy: Callable[[], MergePolicy[Delivery]] = lambda: RandomRobin(random.Random(1))
    gate_wait_s: float = 300.0
    hand_back: HandBack = AT_ONCE
    waiting: ByteBudget = field(default_factory=lambda: ByteBudget(1_000_000))

    def __post_init__(self) -> None:
        self.store = MemoryStore(now=time.time, lease_s=15, ttl_s=3600)
        self.brokers = {name: MemoryBroker(store=self.store, now=time.time, queue=name) for name in self.names}
        self.told: list[tuple[str, str]] = []
        self._turn = 0
        self.queues = MergedQueues(
            [
                Source(
                    name=name,
                    connect=broker.connect,
                    gate=self.gates.get(name),
                    labels=self.labels.get(name, {}),
                    route=Route(base_url=f"http://{name}", path="/v1/completions"),
                    window=self.window,
                    hand_back=self.hand_back,
                )
                for name, broker in self.brokers.items()
            ],
            lambda: self.policy(),
            now=time.time,
            rng=random.Random(2),
            replica_id="r",
            gate_wait_s=self.gate_wait_s,
            told=lambda queue, verdict: self.told.append((queue, verdict)),
            waiting=self.waiting,
        )

    def connect(self) -> AbstractAsyncContextManager[MergedTransport]:
        return self.queues.connect()

    async def publish(self, body: bytes, message_id: str | None = None) -> None:
        """Into one queue after the other."""
        name = self.names[self._turn % len(self.names)]
        self._turn += 1
        await self.put(name, body, message_id)

    async def put(self, name: str, body: bytes, message_id: str | None = None) -> None:
        async with self.brokers[name].connect() as transport:
            await transport.publish(body, message_id=message_id)

    async def cut(self, transport: Transport) -> None:
        assert isinstance(transport, MergedTransport)
        transport.lose("cut by the test")
        await transport.lost.wait()

    lapse = cut

    async def parked(self) -> list[ParkedLetter]:
        return [ParkedLetter(letter.body) for broker in self.brokers.values() for letter in broker.dead]

    def cut_queue(self, name: str) -> None:
        """The queue's connections end, and nobody can open another one."""
        self.brokers[name].refuses = "cut by the test"
        for connection in list(self.brokers[name].connections):
            connection.cut("cut by the test")

    @asynccontextmanager
    async def consuming(self, limit: int = 1) -> AsyncGenerator[MergedTransport]:
        async with self.queues.connect() as transport, transport.consuming(limit):
            yield transport

    @property
    def left(self) -> int:
        return sum(len(broker.ready) + broker.delayed for broker in self.brokers.values())


class Settling:
    """Settlements in memory, written down. Copies can be slow to be confirmed, or be answered as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Disposition] = []
        self.copy_takes_s = 0.0
        self.copies: list[Settlement] = []
        real = MemoryTransport.settle

        async def settle(transport: MemoryTransport, delivery: Delivery, disposition: Disposition) -> Settlement:
            self.seen.append(disposition)
            match disposition:
                case Republish() if self.copies:
                    return self.copies.pop(0)
                case Republish(delay_s=delay_s) if self.copy_takes_s:
                    transport._broker.hide(_receipt(delivery).message, delay_s)
                    await asyncio.sleep(self.copy_takes_s)
                    return await real(transport, delivery, Ack())
                case _:
                    return await real(transport, delivery, disposition)

        monkeypatch.setattr(MemoryTransport, "settle", settle)

    def count(self, kind: type[Disposition]) -> int:
        return sum(isinstance(disposition, kind) for disposition in self.seen)


@pytest.fixture
def settling(monkeypatch: pytest.MonkeyPatch) -> Settling:
    return Settling(monkeypatch)


@pytest.fixture(params=[("one",), ("one", "two")], ids=["one queue", "two queues"])
def harness(request: pytest.FixtureRequest) -> System:
    return System(names=request.param)


class TestMergedTransport(TransportContract):
    """All clauses, on virtual time."""


def queue_of(delivery: Delivery) -> str:
    return delivery.queue


def id_of(delivery: Delivery) -> str:
    found: str = msgspec.json.decode(delivery.body)["request_id"]
    return found


async def stored(system: System, request_id: str) -> dict[str, object]:
    async def look() -> bytes | None:
        return await system.store.read(request_id)

    found: dict[str, object] = msgspec.json.decode(await eventually(look, within=60, what="a result"))
    return found


class Hung:
    """Never says anything."""

    def budget(self) -> float:
        return 1.0

    async def admit(self, asked: Asked) -> Verdict:
        await asyncio.Event().wait()
        raise AssertionError

    async def run(self, until: asyncio.Event) -> None:
        return

    def closes_at(self) -> str:
        return "always"


class Classifying(Told):
    """Says what the request's id ends with: reserved or not."""

    async def admit(self, asked: Asked) -> Verdict:
        asked.labels["classification"] = "reserved" if asked.request_id.endswith("!") else "overflow"
        return await super().admit(asked)


async def test_a_delivery_has_its_queues_route_and_labels() -> None:
    system = System(labels={"one": {"tier": "batch"}})
    await system.put("one", request("a"))
    async with system.consuming() as transport:
        delivery = await take(transport)

    assert delivery.route == Route(base_url="http://one", path="/v1/completions")
    assert delivery.labels == {"tier": "batch"}


@pytest.mark.parametrize(
    ("labels", "seen"),
    [
        ({}, {"team": "x"}),
        ({"tier": "batch"}, {"team": "x", "tier": "batch"}),
        ({"classification": "overflow"}, {"team": "x", "classification": "overflow"}),
    ],
)
async def test_no_message_says_of_itself_that_it_is_reserved(
    monkeypatch: pytest.MonkeyPatch, labels: dict[str, str], seen: dict[str, str]
) -> None:
    real = MemoryTransport.receive

    async def receive(transport: MemoryTransport) -> Delivery:
        return replace(await real(transport), labels={"team": "x", "classification": "reserved"})

    monkeypatch.setattr(MemoryTransport, "receive", receive)
    system = System(labels={"one": labels})
    await system.put("one", request("a"))
    async with system.consuming() as transport:
        delivery = await take(transport)

    assert delivery.labels == seen


async def test_a_lost_queue_ends_neither_the_others_nor_the_session_and_comes_back() -> None:
    system = System()
    await system.put("one", request("a"))
    async with system.consuming(4) as transport:
        held = await take(transport)
        system.cut_queue("one")
        await system.put("two", request("b"))

        assert id_of(await take(transport)) == "b"
        assert held.lost.is_set()
        assert not transport.lost.is_set()
        assert isinstance(await transport.settle(held, Ack()), DeliveryLost)
        await eventually(lambda: transport.reasons()["one"] == "cut by the test", within=5, what="it says why")
        system.brokers["one"].refuses = None
        assert id_of(await take(transport, within_s=60)) == "a"
        assert transport.reasons() == {"one": "", "two": ""}


async def test_a_session_begins_with_one_queue_and_not_with_none() -> None:
    system = System()
    system.cut_queue("one")
    await system.put("two", request("b"))
    async with system.consuming() as transport:
        assert id_of(await take(transport)) == "b"
    system.cut_queue("two")
    with pytest.raises(TransportLost, match=r"queue one: cut by the test; queue two: cut by the test"):
        async with system.queues.connect():
            pass


async def test_what_waits_here_of_a_lost_queue_is_not_handed_up() -> None:
    order: list[str] = []
    permit = RecordedPermit("p", order)
    system = System(gates={"one": Told(Admitted(permits=(permit,)))})
    await system.put("one", request("a"))
    async with system.queues.connect() as transport, transport.consuming(1):
        await eventually(lambda: transport.waiting()["one"] == 1, within=5, what="it waits here")
        system.cut_queue("one")
        await nothing_comes(transport)

        assert [seen.kind for seen in permit.seen] == ["not_sent"]
        assert system.left == 1


async def test_a_hung_gate_holds_up_its_own_queue_alone_and_gives_back_in_the_end() -> None:
    system = System(gates={"one": Hung()}, gate_wait_s=5)
    for n in range(6):
        await system.put("one", request(f"hung-{n}"))
    async with system.consuming() as transport:
        for n in range(20):
            await system.put("two", request(f"r-{n}"))
            delivery = await take(transport, within_s=1)
            assert id_of(delivery) == f"r-{n}"
            await transport.settle(delivery, Ack())
        await eventually(lambda: ("one", "error") in system.told, within=60, what="the gate is given up")
    assert system.left == 6


async def test_a_full_lane_holds_up_no_other() -> None:
    """Also not what stands behind it in its own queue."""
    system = System(
        names=["one", "two"],
        gates={"one": Classifying(Admitted())},
        labels={"one": {"tier": "batch"}, "two": {"tier": "interactive"}},
        policy=lambda: TierPriority(per_lane=1),
        window=8,
    )
    for n in range(5):
        await system.put("one", request(f"low-{n}"))
    await system.put("one", request("high!"))
    await system.put("two", request("other"))
    got = []
    async with system.queues.connect() as transport, transport.consuming(1):
        await eventually(lambda: transport.waiting() == {"one": 6, "two": 1}, within=5, what="all wait here")
        for _ in range(7):
            delivery = await take(transport)
            got.append(id_of(delivery))
            await transport.settle(delivery, Ack())

    assert got == ["high!", "other", *(f"low-{n}" for n in range(5))]


async def test_a_flooding_queue_has_its_window_and_its_turns_and_no_more() -> None:
    system = System(policy=lambda: TierPriority(), window=4)
    for n in range(200):
        await system.put("one", request(f"flood-{n}"))
    async with system.queues.connect() as transport, transport.consuming(1):
        await eventually(lambda: transport.waiting()["one"] == 4, within=5, what="the window is full")
        for n in range(20):
            await system.put("two", request(f"r-{n}"))
        await eventually(lambda: transport.waiting()["two"] == 4, within=5, what="the others are here")
        got = []
        for _ in range(41):
            delivery = await take(transport)
            got.append(queue_of(delivery))
            assert transport.waiting()["one"] <= 4
            await transport.settle(delivery, Ack())
            await asyncio.sleep(0.01)

    assert got.count("two") == 20


async def test_under_strict_priority_an_interactive_request_waits_for_one_running_request_at_most() -> None:
    system = System(
        labels={"one": {"tier": "batch"}, "two": {"tier": "interactive"}}, policy=lambda: TierPriority(), window=64
    )
    for n in range(100):
        await system.put("one", request(f"batch-{n}"))
    async with system.queues.connect() as transport, transport.consuming(1):
        running = await take(transport)
        await asyncio.sleep(1)
        await system.put("two", request("now"))
        await asyncio.sleep(0.1)
        await transport.settle(running, Ack())

        assert id_of(await take(transport)) == "now"


async def test_all_reserved_go_within_the_first_seven_and_overflow_is_last_case_245() -> None:
    """Twenty of overflow stand before five reserved ones; one worker."""
    system = System(
        names=["one"],
        gates={"one": Classifying(Admitted())},
        policy=lambda: TierPriority(),
        window=30,
    )
    for n in range(20):
        await system.put("one", request(f"over-{n}"))
    for n in range(5):
        await system.put("one", request(f"res-{n}!"))
    got = []
    async with system.queues.connect() as transport, transport.consuming(1):
        for _ in range(25):
            delivery = await take(transport)
            got.append(id_of(delivery))
            await asyncio.sleep(0.1)
            await transport.settle(delivery, Ack())

    assert sorted(place for place, name in enumerate(got) if name.endswith("!"))[-1] < 7
    assert not got[-1].endswith("!")


async def test_a_queue_whose_gate_has_no_budget_is_not_consumed_until_it_has() -> None:
    gate = Told(Admitted(), budget=0.0)
    system = System(gates={"one": gate})
    await system.put("one", request("a"))
    async with system.consuming() as transport:
        await nothing_comes(transport, 30)
        assert (gate.asks, len(system.brokers["one"].ready), transport.waiting()["one"]) == (0, 1, 0)
        assert [connection._limit for connection in system.brokers["one"].connections] == [0]
        gate._budget = 0.5

        assert id_of(await take(transport, within_s=1)) == "a"


async def test_a_gate_that_closes_has_its_queue_stop_consuming() -> None:
    gate = Told(Admitted())
    system = System(gates={"one": gate}, window=2)
    for n in range(4):
        await system.put("one", request(f"r-{n}"))
    async with system.queues.connect() as transport, transport.consuming(4):
        first = await take(transport)
        gate._budget = 0.0
        await asyncio.sleep(5)
        await transport.settle(first, Ack())
        asks = gate.asks
        await asyncio.sleep(5)

        assert gate.asks == asks
        gate._budget = 1.0
        got = {id_of(await take(transport)) for _ in range(3)}
        assert got == {"r-1", "r-2", "r-3"}


async def test_a_wait_at_a_queues_gate_waits_and_other_queues_go_on_case_355() -> None:
    changed = asyncio.Event()
    gate = Told(Parked(within_s=60, changed=changed), Admitted())
    system = System(gates={"one": gate})
    await system.put("one", request("waits"))
    async with system.consuming(2) as transport:
        await nothing_comes(transport)
        await system.put("two", request("b"))
        assert id_of(await take(transport)) == "b"
        changed.set()

        assert id_of(await take(transport, within_s=0.1)) == "waits"


async def test_a_wait_that_is_not_over_in_its_time_goes_back_uncounted(settling: Settling) -> None:
    gate = Told(Parked(within_s=1))
    system = System(names=["one"], gates={"one": gate}, gate_wait_s=20)
    await system.put("one", request("a"))
    async with system.consuming() as transport:
        await eventually(lambda: settling.seen, within=30, what="the wait is over")
        gate._verdicts = [Admitted()]
        delivery = await take(transport, within_s=10)

        assert (delivery.attempts, delivery.redelivered) == (0, True)


@pytest.mark.parametrize(
    ("verdicts", "told"),
    [
        ([Admitted()], ["admitted"]),
        ([Parked(within_s=1), Parked(within_s=1), Admitted()], ["gate_closed", "admitted"]),
        ([Parked(within_s=1, because="quota_exhausted")] * 2 + [Admitted()], ["quota_exhausted", "admitted"]),
        ([Parked(within_s=1), TurnedAway(because="quota_exhausted"), Admitted()], ["gate_closed", "admitted"]),
        (
            [TurnedAway(), TurnedAway(because="quota_exhausted"), Admitted()],
            ["gate_closed", "quota_exhausted", "admitted"],
        ),
        ([Parked(within_s=1), GateFailed("no answer"), Admitted()], ["gate_closed", "error", "admitted"]),
    ],
    ids=[
        "let in",
        "a wait, once",
        "a wait for quota, once",
        "turned away after a wait, once",
        "turned away, each time",
        "a gate that cannot say, besides",
    ],
)
async def test_what_a_queues_gate_says_is_told_with_its_reason_case_273(
    verdicts: list[Verdict | Exception], told: list[str]
) -> None:
    system = System(names=["one"], gates={"one": Told(*verdicts)})
    await system.put("one", request("a"))
    async with system.consuming() as transport:
        await take(transport, within_s=60)

    assert system.told == [("one", verdict) for verdict in told]


async def test_a_wait_that_is_never_over_is_told_once_each_time(settling: Settling) -> None:
    system = System(names=["one"], gates={"one": Told(Parked(within_s=1, because="quota_exhausted"))}, gate_wait_s=20)
    await system.put("one", request("a"))
    async with system.consuming() as transport:
        await nothing_comes(transport, 70)

        assert settling.count(Nack) == 3
        assert system.told == [("one", "quota_exhausted")] * 4


@pytest.mark.parametrize("verdict", [TurnedAway(), GateFailed("no answer"), ZeroDivisionError()], ids=repr)
async def test_what_cannot_go_now_goes_back_without_a_hot_loop_case_355(verdict: Verdict | Exception) -> None:
    gate = Told(verdict)
    system = System(gates={"one": gate}, window=4)
    for n in range(20):
        await system.put("one", request(f"r-{n}"))
    async with system.queues.connect() as transport, transport.consuming(1):
        await nothing_comes(transport, 60)
        # Four at a time, after pauses of 0.25, 0.5, 1, 2 and then 4 seconds, less their jitter.
        assert 20 <= gate.asks <= 4 * 45
        gate._verdicts = [Admitted()]

        assert (await take(transport, within_s=10)).attempts == 0
    assert system.left + len({name for name, _ in system.told}) >= 19


COPY = HandBack(copy_after_s=1.0)


@pytest.mark.parametrize("verdict", [TurnedAway(), Parked(within_s=1), GateFailed("no answer")], ids=repr)
async def test_where_the_broker_counts_what_it_gets_back_it_gets_copies(
    verdict: Verdict | Exception, settling: Settling
) -> None:
    gate = Told(verdict)
    system = System(names=["one"], gates={"one": gate}, hand_back=COPY, gate_wait_s=5)
    await system.put("one", request("a"), "m-1")
    async with system.consuming() as transport:
        await nothing_comes(transport, 60)
        gate._verdicts = [Admitted()]
        delivery = await take(transport, within_s=20)
        await transport.settle(delivery, Ack())

    assert (delivery.attempts, delivery.message_id, delivery.redelivered) == (0, "m-1", False)
    assert settling.count(Nack) == 0
    copies = [disposition for disposition in settling.seen if isinstance(disposition, Republish)]
    assert len(copies) > 3
    assert all(0.5 <= copy.delay_s <= 1.0 and copy.attempts == 0 for copy in copies)


async def test_what_only_waited_here_goes_back_as_itself_when_consuming_ends(settling: Settling) -> None:
    system = System(names=["one"], gates={"one": Told(Admitted(), Parked(within_s=60), TurnedAway())}, hand_back=COPY)
    for n in range(3):
        await system.put("one", request(f"r-{n}"))
    async with system.queues.connect() as transport:
        async with transport.consuming(1):
            await eventually(lambda: transport.waiting()["one"] == 3, within=5, what="all are here")
        assert settling.seen == [Nack()] * 3
        assert system.left == 3


async def test_a_copy_on_its_way_is_waited_for_when_consuming_ends(settling: Settling) -> None:
    """Cut short, it would be there twice."""
    settling.copy_takes_s = 0.5
    system = System(names=["one"], gates={"one": Told(TurnedAway())}, hand_back=COPY)
    await system.put("one", request("a"))
    async with system.queues.connect() as transport:
        async with transport.consuming(1):
            await eventually(lambda: settling.seen, within=5, what="the copy is on its way")
        assert transport.waiting()["one"] == 0
    assert system.left == 1


async def test_a_copy_that_hangs_is_given_up_when_consuming_ends(settling: Settling) -> None:
    settling.copy_takes_s = 1000
    system = System(names=["one"], gates={"one": Told(TurnedAway())}, hand_back=COPY)
    await system.put("one", request("a"))
    async with system.queues.connect() as transport, asyncio.timeout(5), transport.consuming(1):
        await eventually(lambda: settling.seen, within=5, what="the copy is on its way")

    assert [type(disposition) for disposition in settling.seen] == [Republish, Nack]


@pytest.mark.parametrize(
    ("copies", "last"),
    [
        (CopyRefused(reason="too large"), Nack()),
        (Known(reply=KnownReply(status="completed", status_code=200)), Ack()),
    ],
    ids=repr,
)
async def test_what_no_copy_can_be_made_of_is_settled_all_the_same(
    copies: Settlement, last: Disposition, settling: Settling
) -> None:
    settling.copies = [copies]
    system = System(names=["one"], gates={"one": Told(TurnedAway())}, hand_back=COPY)
    await system.put("one", request("a"))
    async with system.consuming():
        await eventually(lambda: len(settling.seen) == 2, within=5, what="the second try")

        assert settling.seen[1] == last


async def test_a_gate_that_opens_and_closes_makes_no_broker_count_what_has_come(settling: Settling) -> None:
    """What has come is kept while the gate is closed, in its order."""
    gate = Told(Admitted())
    system = System(names=["one"], gates={"one": gate}, hand_back=COPY, window=4)
    for n in range(6):
        await system.put("one", request(f"r-{n}"))
    got = []
    async with system.consuming(6) as transport:
        for _ in range(6):
            gate._budget = 1.0
            got.append(id_of(delivery := await take(transport)))
            gate._budget = 0.0
            await transport.settle(delivery, Ack())
            await asyncio.sleep(5)

        assert got == [f"r-{n}" for n in range(6)]
        assert settling.count(Nack) == settling.count(Republish) == 0


async def test_what_came_before_a_gate_closed_goes_back_as_a_copy_after_its_time(settling: Settling) -> None:
    gate = Told(Admitted())
    system = System(names=["one"], gates={"one": gate}, hand_back=COPY, gate_wait_s=20)
    async with system.consuming() as transport:
        await nothing_comes(transport)
        gate._budget = 0.0
        for n in range(3):
            await system.put("one", request(f"r-{n}"))
        await nothing_comes(transport, 10)
        assert (transport.waiting()["one"], gate.asks) == (3, 0)
        await nothing_comes(transport, 60)

        assert transport.waiting()["one"] == 0
        assert len(system.brokers["one"].ready) == 3
        assert [connection._limit for connection in system.brokers["one"].connections] == [0]
    assert system.told == [("one", "gate_closed")] * 3
    assert (settling.count(Republish), settling.count(Nack)) == (3, 0)


async def test_a_place_that_is_free_again_is_taken_at_once_by_what_was_kept() -> None:
    gate = LocalMaxConcurrency(1, "classifying")
    system = System(names=["one"], gates={"one": gate}, hand_back=COPY)
    for n in range(20):
        await system.put("one", request(f"r-{n}"))
    loop = asyncio.get_running_loop()
    async with system.consuming(8) as transport:
        begun = loop.time()
        for _ in range(20):
            delivery = await take(transport)
            await asyncio.sleep(1)
            await transport.settle(delivery, Ack())

        assert loop.time() - begun < 20.5


@pytest.mark.parametrize(
    ("verdict", "status_code", "error_code"),
    [
        (Dropped(status_code=429, error_code="GATE_DROPPED", error="full"), 429, "gate_dropped"),
        (Dropped(status_code=None, error_code="GATE_DROPPED", error="full"), 0, "gate_dropped"),
        (Dropped(status_code=None, error_code="DEADLINE_EXCEEDED", error="full"), 408, "expired"),
    ],
)
async def test_what_a_gate_drops_ends_with_what_the_gate_says(
    verdict: Dropped, status_code: int, error_code: str
) -> None:
    system = System(gates={"one": Told(verdict)})
    await system.put("one", request("a"))
    async with system.consuming() as transport:
        result = await stored(system, "a")
        await nothing_comes(transport)

    assert (result["status"], result["status_code"], result["error_code"]) == ("failed", status_code, error_code)
    assert result["error"] == "full"
    assert system.left == 0
    assert system.told == [("one", "dropped")]


async def test_what_is_dropped_and_known_already_keeps_its_first_result() -> None:
    system = System(gates={"one": Told(Dropped(status_code=429, error_code="GATE_DROPPED", error="no"))})
    await system.store.write(reply("a"), None, Token("other"))
    await system.put("one", request("a"))
    async with system.consuming() as transport:
        await nothing_comes(transport)

    assert (await stored(system, "a"))["status"] == "completed"
    assert system.left == 0


async def test_what_is_dropped_while_another_runs_it_goes_back() -> None:
    system = System(gates={"one": Told(Dropped(status_code=429, error_code="GATE_DROPPED", error="no"))})
    await system.store.claim("a", 0, Token("other"), time.time() + 600)
    await system.put("one", request("a"))
    async with system.consuming() as transport:
        await nothing_comes(transport, 5)

    assert await system.store.read("a") is None
    assert system.left == 1


@pytest.mark.parametrize("body", [b"no request", b'{"request_id":"a","received_at":1,"timeout_s":1,"payload":{}}'])
async def test_what_the_gate_need_not_see_is_handed_up_to_be_ended(body: bytes) -> None:
    """No request, or one whose time is over."""
    gate = Told(TurnedAway())
    system = System(gates={"one": gate})
    await system.put("one", body)
    async with system.consuming() as transport:
        assert (await take(transport)).body == body

    assert gate.asks == 0


@pytest.mark.parametrize(
    ("disposition", "kind"),
    [
        (Ack(), "not_sent"),
        (Nack(), "not_sent"),
        (Republish(delay_s=0, attempts=1, left_s=9, claim=Hold("a", Token("t"))), "error"),
        (Ack(reply=reply("a")), "accepted"),
        (Ack(reply=failed("a", error_code="expired", status_code=408)), "not_sent"),
        (Ack(reply=failed("a", error_code="model_error", status_code=422, timings=Timings(model_s=1.0))), "rejected"),
        (
            DeadLetter(
                reason="retries_exhausted",
                detail="",
                attempts=2,
                status_code=500,
                reply=failed("a", timings=Timings(model_s=1.0)),
            ),
            "error",
        ),
    ],
    ids=repr,
)
async def test_permits_go_back_once_when_a_delivery_is_settled_case_272(
    disposition: Ack | Nack | Republish, kind: str
) -> None:
    permit = RecordedPermit("p", [])
    system = System(names=["one"], gates={"one": Told(Admitted(permits=(permit,)), TurnedAway())})
    await system.put("one", request("a"))
    async with system.queues.connect() as transport, transport.consuming(1):
        delivery = await take(transport)
        assert not permit.seen
        assert isinstance(await transport.settle(delivery, disposition), Settled)
        assert isinstance(await transport.settle(delivery, Ack()), DeliveryLost)

    assert [seen.kind for seen in permit.seen] == [kind]
    assert seen_of(disposition).kind == kind


async def test_a_gate_hears_what_was_noted_of_its_request() -> None:
    permit = RecordedPermit("p", [])
    system = System(names=["one"], gates={"one": Told(Admitted(permits=(permit,)))})
    await system.put("one", request("a"))
    seen = Feedback(kind="capacity_rejected", sent_at=3.0, retry_after_s=2.0)
    async with system.queues.connect() as transport, transport.consuming(1):
        delivery = await take(transport)
        saw(delivery, seen)
        await transport.settle(delivery, Ack(reply=reply("a")))

    assert permit.seen == [seen]


async def test_leaving_gives_back_permits_and_messages_also_of_what_waits_for_room_case_264() -> None:
    permits = [RecordedPermit(f"p-{n}", []) for n in range(4)]
    system = System(
        names=["one"],
        gates={"one": Told(*(Admitted(permits=(permit,)) for permit in permits))},
        policy=lambda: TierPriority(per_lane=1),
    )
    for n in range(4):
        await system.put("one", request(f"r-{n}"))
    async with system.queues.connect() as transport:
        async with transport.consuming(1):
            await eventually(lambda: transport.waiting()["one"] == 4, within=5, what="all wait here")
        assert transport.waiting() == {"one": 0}
        assert system.left == 4

    assert [[seen.kind for seen in permit.seen] for permit in permits] == [["not_sent"]] * 4
    bodies = [msgspec.json.decode(message.body)["request_id"] for message in system.brokers["one"].ready]
    assert bodies == ["r-0", "r-1", "r-2", "r-3"]


async def test_a_gate_of_slots_is_used_to_its_limit_and_never_beyond() -> None:
    """Its budget is zero while it is full; a slot that is free is taken at once, not at the next look."""
    gate = LocalMaxConcurrency(2, "classifying")
    system = System(names=["one"], gates={"one": gate}, window=2)
    for n in range(40):
        await system.put("one", request(f"r-{n}"))
    loop = asyncio.get_running_loop()
    async with system.queues.connect() as transport, transport.consuming(8):
        begun, running = loop.time(), 0

        async def run(delivery: Delivery) -> None:
            nonlocal running
            running += 1
            assert running <= 2
            await asyncio.sleep(1)
            running -= 1
            await transport.settle(delivery, Ack())

        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            for _ in range(40):
                group.create_task(run(await transport.receive()))

        assert loop.time() - begun < 21


@pytest.mark.parametrize("gate", [None, Told(Admitted())], ids=["no gate", "an open gate"])
async def test_a_queues_consumer_that_looks_alive_and_gets_nothing_is_replaced_alone(
    gate: Gate | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the others get something hides it from who looks at all of them."""
    receive = MemoryTransport.receive
    deaf: list[MemoryTransport] = []

    async def heard(transport: MemoryTransport) -> Delivery:
        if transport in deaf:
            await transport.lost.wait()
        return await receive(transport)

    monkeypatch.setattr(MemoryTransport, "receive", heard)
    system = System(gates={} if gate is None else {"one": gate})
    async with system.queues.connect() as transport:
        deaf += system.brokers["one"].connections
        async with transport.consuming(2):
            await system.put("one", request("a"))
            await system.put("two", request("long"))
            running = await take(transport)
            got: list[str] = []
            async with asyncio.timeout(90):
                while "a" not in got:
                    await system.put("two", request("b"))
                    delivery = await take(transport)
                    got.append(id_of(delivery))
                    await asyncio.sleep(1)
                    await transport.settle(delivery, Ack())

            assert await transport.settle(running, Ack()) == Settled(how="ack")


@pytest.mark.parametrize(
    "gate",
    [None, Told(Admitted(), budget=0.0), Told(TurnedAway()), Told(Parked(within_s=60)), Hung()],
    ids=["no gate", "no budget", "turned away", "waits", "hangs"],
)
async def test_a_queue_is_not_given_up_that_is_idle_or_full_or_whose_gate_is_closed(gate: Gate | None) -> None:
    """With a window of one, nothing can come either while that waits here."""
    system = System(gates={} if gate is None else {"one": gate}, window=1, gate_wait_s=0)
    for n in range(3):
        await system.put("one", request(f"r-{n}"))
    async with system.queues.connect() as transport, transport.consuming(1):
        before = [*system.brokers["one"].connections, *system.brokers["two"].connections]
        await asyncio.sleep(300)

        assert [*system.brokers["one"].connections, *system.brokers["two"].connections] == before


@pytest.mark.parametrize(
    ("gate", "withheld"),
    [
        (Told(Admitted(), budget=0.0), 3),
        (Told(Parked(within_s=60)), 3),
        (Told(TurnedAway()), 3),
        (Hung(), 3),
        (Told(Admitted()), 0),
        (None, 0),
    ],
    ids=["no budget", "all wait", "all are turned away", "it hangs", "open", "none"],
)
async def test_what_a_queues_gate_keeps_there_is_no_reason_to_take_a_consumer_for_dead(
    gate: Gate | None, withheld: int
) -> None:
    system = System(gates={} if gate is None else {"one": gate}, window=2)
    for n in range(3):
        await system.put("one", request(f"r-{n}"))
        await system.put("two", request(f"s-{n}"))
    async with system.queues.connect() as transport, transport.consuming(1):
        await asyncio.sleep(30)
        backlog = await transport.backlog()

        assert (backlog.ready, backlog.withheld) == (6, withheld)


async def test_the_backlog_is_the_sum_of_those_that_can_be_asked() -> None:
    system = System(window=2)
    for n in range(3):
        await system.put("one", request(f"a-{n}"))
        await system.put("two", request(f"b-{n}"))
    async with system.queues.connect() as transport, transport.consuming(1):
        await take(transport)
        await eventually(lambda: sum(transport.waiting().values()) == 4, within=5, what="the windows are full")

        assert await transport.backlog() == Backlog(ready=5, delayed=0, in_flight=1)
        assert set(await transport.backlogs()) == {"one", "two"}
        system.cut_queue("two")
        await eventually(lambda: transport.reasons()["two"], within=5, what="it is gone")
        assert set(await transport.backlogs()) == {"one"}


def test_what_no_queue_can_tell_the_sum_cannot_tell_either() -> None:
    queues = [
        Backlog(ready=1, oldest_s=3, next_deadline=20),
        Backlog(ready=2, delayed=4, in_flight=1, oldest_s=5, next_deadline=10, withheld=2),
    ]

    assert summed([]) == Backlog(ready=0)
    assert summed(queues) == Backlog(ready=3, delayed=4, in_flight=1, oldest_s=5, next_deadline=10, withheld=2)


async def test_publishing_goes_to_the_first_queue_or_to_a_named_one() -> None:
    system = System()
    async with system.queues.connect() as transport:
        await transport.publish(request("a"))
        await transport.publish(request("b"), queue="two")
        with pytest.raises(ValueError, match="there is no queue 'three' here; there are: one, two"):
            await transport.publish(request("c"), queue="three")
        system.cut_queue("two")
        with pytest.raises(TransportLost):
            await transport.publish(request("d"), queue="two")

    assert [len(broker.ready) for broker in system.brokers.values()] == [1, 1]


async def test_a_queue_that_cannot_even_be_connected_to_holds_up_no_other() -> None:
    system = System(names=["one", "two", "three"])

    @asynccontextmanager
    async def hangs() -> AsyncGenerator[Transport]:
        await asyncio.Event().wait()
        yield system  # type: ignore[misc]  # Never comes to it.

    @asynccontextmanager
    async def breaks() -> AsyncGenerator[Transport]:
        raise ZeroDivisionError
        yield system

    def merged(*connects: Callable[[], AbstractAsyncContextManager[Transport]]) -> MergedQueues:
        return MergedQueues(
            [Source(name=f"q-{n}", connect=connect) for n, connect in enumerate(connects)],
            lambda: RandomRobin(random.Random(1)),
            now=time.time,
            rng=random.Random(1),
            replica_id="r",
        )

    await system.put("three", request("c"))
    async with asyncio.timeout(1):
        async with merged(hangs, breaks, system.brokers["three"].connect).connect() as transport:
            async with transport.consuming(1):
                assert id_of(await take(transport)) == "c"
            assert transport.reasons()["q-0"] == "not connected yet"
    async with asyncio.timeout(10):
        with pytest.raises(TransportLost, match="q-0: not connected yet; queue q-1: ZeroDivisionError"):
            async with merged(hangs, breaks).connect():
                pass


async def test_a_session_whose_queues_become_others_while_it_opens_opens_with_those() -> None:
    """Else a reload at that moment looks like a broker that is away, and costs the pool a pause."""
    opening = asyncio.Event()

    @asynccontextmanager
    async def hangs() -> AsyncGenerator[Transport, None]:
        opening.set()
        await asyncio.Event().wait()
        raise AssertionError
        yield

    system = System(names=["one"])
    await system.put("one", request("a"))
    queues = MergedQueues(
        [Source(name="slow", connect=hangs)],
        lambda: RandomRobin(random.Random(1)),
        now=time.time,
        rng=random.Random(1),
        replica_id="r",
    )

    @asynccontextmanager
    async def slowly() -> AsyncGenerator[Transport, None]:
        await asyncio.sleep(0.05)
        async with system.brokers["one"].connect() as transport:
            yield transport

    async def change() -> None:
        await opening.wait()
        queues.change([Source(name="one", connect=slowly)], tier_label="tier")

    changing = asyncio.create_task(change())
    async with queues.connect() as transport, transport.consuming(1):
        assert id_of(await take(transport)) == "a"
    await changing


async def test_a_connection_that_fails_to_close_does_not_keep_the_session_open() -> None:
    system = System(names=["one"])

    @asynccontextmanager
    async def fails_to_close() -> AsyncGenerator[Transport]:
        async with system.brokers["one"].connect() as transport:
            try:
                yield transport
            finally:
                raise TransportLost("it was gone already")

    source = Source(name="one", connect=fails_to_close)
    queues = MergedQueues(
        [source], lambda: RandomRobin(random.Random(1)), now=time.time, rng=random.Random(1), replica_id="r"
    )
    async with asyncio.timeout(20):
        async with queues.connect() as transport, transport.consuming(1):
            await nothing_comes(transport)


async def test_what_lapsed_while_it_waited_here_is_not_handed_up() -> None:
    """A lease of one delivery can be lost while its connection lives."""
    permit = RecordedPermit("p", [])
    system = System(names=["one"], gates={"one": Told(Admitted(permits=(permit,)), Admitted())})
    await system.put("one", request("a"))
    async with system.queues.connect() as transport, transport.consuming(1):
        await eventually(lambda: transport.waiting()["one"] == 1, within=5, what="it waits here")
        (connection,) = system.brokers["one"].connections
        for delivery in connection._held.values():
            delivery.lost.set()
        await nothing_comes(transport)

        assert transport.waiting()["one"] == 0
        assert [seen.kind for seen in permit.seen] == ["not_sent"]


async def test_what_runs_takes_no_place_from_what_may_wait() -> None:
    system = System(names=["one"], window=2)
    for n in range(10):
        await system.put("one", request(f"r-{n}"))
    async with system.queues.connect() as transport, transport.consuming(5):
        for _ in range(5):
            await take(transport)
        await eventually(lambda: transport.waiting()["one"] == 2, within=5, what="the window is full all the same")
        await nothing_comes(transport)

        assert len(system.brokers["one"].ready) == 3


@pytest.mark.parametrize("hand_back", [AT_ONCE, COPY], ids=["as itself", "as a copy"])
@pytest.mark.parametrize("seed", range(20))
async def test_under_cuts_pauses_and_refusals_each_message_is_settled_once(seed: int, hand_back: HandBack) -> None:
    """Conservation: what goes in is acknowledged once or is still there; each permit goes back once."""
    rng = random.Random(seed)
    permits: list[RecordedPermit] = []

    class Moody(Told):
        async def admit(self, asked: Asked) -> Verdict:
            await asyncio.sleep(rng.choice([0, 0, 0.05]))
            match rng.randrange(8):
                case 0:
                    return TurnedAway()
                case 1:
                    return Parked(within_s=0.1)
                case 2:
                    raise GateFailed("a mood")
            permits.append(RecordedPermit("p", [], takes_s=rng.choice([0, 0.01])))
            return Admitted(permits=(permits[-1],))

    names = ["one", "two", "three"]
    system = System(
        names=names,
        gates={"one": Moody(Admitted()), "two": Moody(Admitted())},
        policy=lambda: TierPriority(per_lane=2),
        window=5,
        hand_back=hand_back,
    )
    for n in range(90):
        await system.put(names[n % 3], request(f"r-{n}"))
    acked: list[str] = []

    async def hurt() -> None:
        while True:
            await asyncio.sleep(rng.uniform(0, 1))
            name = rng.choice(names)
            system.cut_queue(name)
            await asyncio.sleep(rng.uniform(0, 2))
            system.brokers[name].refuses = None

    async def handle(transport: MergedTransport, delivery: Delivery) -> None:
        await asyncio.sleep(rng.uniform(0, 0.2))
        settlement = await transport.settle(delivery, Nack() if rng.randrange(3) == 0 else Ack())
        if isinstance(settlement, Settled) and settlement.how == "ack":
            acked.append(id_of(delivery))

    async def pump(transport: MergedTransport, jobs: asyncio.TaskGroup) -> None:
        while True:
            jobs.create_task(handle(transport, await transport.receive()))

    hurting = asyncio.create_task(hurt())
    async with asyncio.timeout(3600), asyncio.TaskGroup() as jobs:  # What runs outlasts its session, as in a worker.
        while len(acked) < 90:
            try:
                async with system.queues.connect() as transport:
                    for _ in range(3):
                        async with transport.consuming(4):
                            pumping = asyncio.create_task(pump(transport, jobs))
                            await asyncio.wait([pumping], timeout=rng.uniform(1, 5))
                            await ended(pumping)
            except TransportLost:
                await asyncio.sleep(1)
    await ended(hurting)

    assert sorted(acked) == sorted(f"r-{n}" for n in range(90))
    assert system.left == 0
    assert all(len(permit.seen) == 1 for permit in permits)


async def test_large_requests_wait_in_their_queues_but_one_of_each_which_is_kept_out_by_no_other() -> None:
    """Windows count requests: a full one of the largest, for each of some hundred queues, ended the process."""
    system = System(names=("large", "small"), window=8, waiting=ByteBudget(2_500))
    for n in range(6):
        await system.put("large", request(f"l{n}") + b" " * 1000)
        await system.put("small", request(f"s{n}"))
    async with system.consuming(2) as transport:
        first = await take(transport)
        await asyncio.sleep(1)
        assert transport.waiting()["small"] >= 1
        assert sum(transport.waiting().values()) < 8
        assert system.waiting.held_bytes < 2_500 + 2 * 1_200
        came = [first]
        for _ in range(11):
            await transport.settle(came[-1], Ack())
            came.append(await take(transport))
        await transport.settle(came[-1], Ack())

    assert {delivery.queue for delivery in came[:4]} == {"large", "small"}
    assert system.left == 0
    assert system.waiting.held_bytes == 0


async def test_bytes_that_another_pool_frees_let_a_queue_go_on() -> None:
    system = System(names=("one",), waiting=ByteBudget(100))
    system.waiting.add(1_000)
    for n in range(3):
        await system.put("one", request(f"r{n}"))
    async with system.consuming(4) as transport:
        await asyncio.sleep(60)
        assert (sum(transport.waiting().values()), transport.reasons()["one"]) == (1, "")
        system.waiting.release(None, 1_000)
        system.waiting.limit_bytes = 10_000
        await asyncio.sleep(1)
        assert sum(transport.waiting().values()) == 3

    assert (system.left, system.waiting.held_bytes) == (3, 0)
