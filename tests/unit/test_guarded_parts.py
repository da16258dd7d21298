"""Faults of parts of other packages while they run: each costs what it was asked about, and nothing else."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from inference_worker.billing.guarded import ANSWER_S, GuardedSink
from inference_worker.disposition import Ack, Settled
from inference_worker.errors import BadResponse, GateFailed, SinkUnavailable, TransportLost
from inference_worker.gates.basic import Constant
from inference_worker.gates.guarded import AGAIN_S, GuardedGate
from inference_worker.gates.waiting import outlast
from inference_worker.merge import RandomRobin, TierPriority
from inference_worker.merge_guarded import GuardedPolicy
from inference_worker.messages import InferenceRequest
from inference_worker.ports import Admitted, Asked, Delivered, Feedback, Parked, Refused, Transport
from inference_worker.results.memory import MemoryStore
from inference_worker.transforms.chain import Body, Transforms, Unfit
from inference_worker.transforms.guarded import GuardedAnswerTransform, GuardedBodyTransform
from inference_worker.transports.guarded import guarded
from inference_worker.transports.memory import MemoryBroker
from tests.transport_contract import Parked as ParkedLetter
from tests.transport_contract import TransportContract, request, take

ASKED = Asked(request_id="a", metadata={}, labels={}, deadline=9e9)


class Faulty:
    """Does as another part does, but for what it was told to break; what it returns there may be a value instead."""

    def __init__(self, inner: object, **broken: object) -> None:
        self._inner = inner
        self.broken = broken

    def __getattr__(self, name: str) -> Any:
        if name not in self.broken:
            return getattr(self._inner, name)
        said = self.broken[name]
        if name == "lost":
            return said

        def answer(*_: object, **__: object) -> Any:
            if isinstance(said, BaseException):
                raise said
            return said() if callable(said) else said

        return answer

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]  # Of policies alone.


def fails(exc: BaseException) -> Callable[[], Any]:
    async def fail() -> None:
        raise exc

    return fail


def says(value: object) -> Callable[[], Any]:
    async def say() -> object:
        return value

    return say


# ---------------------------------------------------------------- gates


@pytest.mark.parametrize("said", [LookupError(), SystemExit(1), None, "much", float("nan")])
def test_a_gate_that_cannot_say_its_budget_counts_as_closed(said: object) -> None:
    faulty = Faulty(Constant(), budget=said)
    gate = GuardedGate(faulty, "g")

    assert gate.budget() == gate.budget() == 0.0
    faulty.broken.clear()
    assert gate.budget() == 1.0


@pytest.mark.parametrize(("said", "is_"), [(-3, 0.0), (7, 1.0), ("0.5", 0.5)])
def test_a_budget_is_a_part(said: object, is_: float) -> None:
    assert GuardedGate(Faulty(Constant(), budget=said), "g").budget() == is_


@pytest.mark.parametrize(
    "admit",
    [
        pytest.param(fails(LookupError()), id="it fails"),
        pytest.param(fails(GateFailed("no")), id="it says that it has failed"),
        pytest.param(fails(SystemExit(1)), id="it would end the process"),
        pytest.param(fails(asyncio.CancelledError()), id="a cancellation of its own"),
        pytest.param(says(True), id="no verdict"),
        pytest.param(says(None), id="nothing"),
        pytest.param(lambda: True, id="nothing to wait for"),
        pytest.param(says(Admitted(permits=None)), id="no permits"),  # type: ignore[arg-type]
        pytest.param(says(Admitted(permits=(1,))), id="permits that are none"),  # type: ignore[arg-type]
        pytest.param(says(Parked(within_s="soon")), id="a wait that is no number"),  # type: ignore[arg-type]
    ],
)
async def test_a_gate_that_fails_or_says_no_verdict_has_failed(admit: Callable[[], Any]) -> None:
    with pytest.raises(GateFailed):
        await GuardedGate(Faulty(Constant(), admit=admit), "g").admit(ASKED)


async def test_a_verdict_is_handed_on_and_a_permit_that_cannot_be_given_back_harms_nobody() -> None:
    given: list[Feedback] = []

    class Permit:
        async def release(self, seen: Feedback) -> None:
            given.append(seen)
            raise LookupError

    gate = GuardedGate(Faulty(Constant(), admit=says(Admitted(permits=(Permit(),)))), "g")

    verdict = await gate.admit(ASKED)

    assert isinstance(verdict, Admitted)
    await verdict.permits[0].release(Feedback(kind="accepted"))
    assert [seen.kind for seen in given] == ["accepted"]
    assert GuardedGate(Constant(), "g").closes_at() == Constant().closes_at()
    assert await GuardedGate(Constant(), "g").admit(ASKED) == Admitted()


async def test_a_gate_that_lets_wait_is_left_to_it() -> None:
    assert await GuardedGate(Faulty(Constant(), admit=says(Parked(within_s=3))), "g").admit(ASKED) == Parked(within_s=3)
    until = asyncio.Event()
    until.set()
    await GuardedGate(Faulty(Constant(), run=fails(LookupError())), "g").run(until)


async def test_who_asks_a_gate_can_be_cancelled_all_the_same() -> None:
    asking = asyncio.create_task(GuardedGate(Faulty(Constant(), admit=asyncio.Event().wait), "g").admit(ASKED))
    await asyncio.sleep(1)

    asking.cancel()

    await asyncio.wait([asking])
    assert asking.cancelled()


@pytest.mark.parametrize("within_s", [0.0, -3.0, float("nan"), 0.3])
async def test_a_gate_that_says_at_once_or_that_it_has_changed_already_is_not_asked_in_a_circle(
    within_s: float,
) -> None:
    changed, loop = asyncio.Event(), asyncio.get_running_loop()
    changed.set()
    asks: list[float] = []

    async def admit() -> Parked:
        asks.append(loop.time())
        assert len(asks) < 1000, "in a circle"
        return Parked(within_s=within_s, changed=changed)

    await outlast(GuardedGate(Faulty(Constant(), admit=admit), "g"), ASKED, loop.time() + 5, random.Random(1))

    assert 2 < len(asks) < 50


async def test_readings_are_kept_fresh_again_after_a_fault() -> None:
    began: list[float] = []
    loop, until = asyncio.get_running_loop(), asyncio.Event()

    async def run() -> None:
        began.append(loop.time())
        if len(began) < 3:
            raise (LookupError, SystemExit)[len(began) - 1]
        await until.wait()

    gate = GuardedGate(Faulty(Constant(), run=run, closes_at=LookupError()), "g")
    running = asyncio.create_task(gate.run(until))
    await asyncio.sleep(3 * AGAIN_S)
    until.set()
    await running

    assert began == [0.0, AGAIN_S, 2 * AGAIN_S]
    assert gate.closes_at() == "not said: LookupError"


# ---------------------------------------------------------------- merge policies

BROKEN: Sequence[Any] = [
    pytest.param({"put": LookupError()}, id="put fails"),
    pytest.param({"pop": LookupError()}, id="pop fails"),
    pytest.param({"pop": SystemExit(1)}, id="pop would end the process"),
    pytest.param({"room": LookupError()}, id="room fails"),
    pytest.param({"room": "plenty"}, id="room is no number"),
    pytest.param({"sizes": LookupError()}, id="sizes fail"),
    pytest.param({"remove": LookupError()}, id="remove fails"),
    pytest.param({"remove": []}, id="remove forgets"),
    pytest.param({"pop": None}, id="pop has nothing where something waits"),
    pytest.param({"pop": object()}, id="pop makes something up"),
    pytest.param({"put": False}, id="put has no room at all"),
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_merge_policy_that_breaks_its_promise_loses_nothing(broken: dict[str, object]) -> None:
    faulty = Faulty(TierPriority())
    policy: GuardedPolicy[object] = GuardedPolicy(faulty, "p", random.Random(1))
    items = [object() for _ in range(6)]
    sources = ["a", "b", "c"] * 2
    for item, source in zip(items[:3], sources, strict=False):
        assert policy.put(item, source, None, None)
    if broken == {"put": False}:
        for source in "abc":  # It has no room where there is nothing, that is.
            policy.remove(source)
        items = items[3:]
    faulty.broken |= broken

    assert policy.room("a", 0) > 0
    for item, source in zip(items[-3:], sources, strict=False):
        assert policy.put(item, source, None, None)
    assert sum(policy.sizes()) == len(policy) == len(items)
    first = policy.pop()
    removed = policy.remove("b")
    left = [policy.pop() for _ in range(len(policy))]

    of_b = [item for item, source in zip(items[-3:], sources, strict=False) if source == "b"]
    assert not {id(item) for item in left} & {id(item) for item in of_b}, "what is removed does not come later"
    assert {id(item) for item in (first, *removed, *left)} == {id(item) for item in items}
    assert policy.pop() is None
    assert policy.failed


def test_a_merge_policy_that_keeps_its_promise_is_left_to_it() -> None:
    policy: GuardedPolicy[str] = GuardedPolicy(TierPriority(per_lane=2), "p", random.Random(1))

    taken = [
        policy.put(item, "a", tier, None) for item, tier in (("b1", "batch"), ("i", "interactive"), ("b2", "batch"))
    ]

    assert taken == [True, True, True]
    assert not policy.put("b3", "a", "batch", None)
    assert [policy.pop() for _ in range(4)] == ["i", "b1", "b2", None]
    assert not policy.failed


def test_a_fault_of_the_order_that_takes_its_place_is_ours_and_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    policy: GuardedPolicy[str] = GuardedPolicy(
        Faulty(RandomRobin(random.Random(1)), pop=LookupError()), "p", random.Random(1)
    )
    policy.put("a", "a", None, None)
    policy.pop()

    def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(RandomRobin, "pop", broken)
    with pytest.raises(ZeroDivisionError):
        policy.pop()


# ---------------------------------------------------------------- transports


class GuardedHarness:
    """The embedded broker behind the guard."""

    def __init__(self) -> None:
        now = asyncio.get_running_loop().time
        self.store = MemoryStore(now=now, lease_s=15, ttl_s=3600)
        self.broker = MemoryBroker(store=self.store, now=now)
        self.connect = guarded(self.broker.connect, "t")

    async def publish(self, body: bytes, message_id: str | None = None) -> None:
        async with self.connect() as transport:
            await transport.publish(body, message_id=message_id)

    async def cut(self, transport: Transport) -> None:
        next(iter(self.broker.connections)).cut("cut by the test")

    lapse = cut

    async def parked(self) -> list[ParkedLetter]:
        return [ParkedLetter(letter.body) for letter in self.broker.dead]


@pytest.fixture
async def harness() -> GuardedHarness:
    return GuardedHarness()


class TestGuardedTransport(TransportContract):
    """A transport that keeps the contract keeps it behind the guard."""

    async def test_a_fault_ends_the_connection_and_a_new_one_has_what_it_held(self, harness: GuardedHarness) -> None:
        await harness.publish(request("a"))
        fault = fails(LookupError("oh"))

        @asynccontextmanager
        async def connect() -> AsyncGenerator[Any, None]:
            async with harness.broker.connect() as inner:
                yield Faulty(inner, settle=fault)

        async with guarded(connect, "t")() as transport, transport.consuming(1):
            delivery = await take(transport)
            with pytest.raises(TransportLost, match="the transport t could not settle: LookupError"):
                await transport.settle(delivery, Ack())
            assert transport.lost.is_set()
            assert transport.lost_because == "the transport t could not settle: LookupError"
            with pytest.raises(TransportLost, match="could not settle"):
                await transport.backlog()
        async with harness.connect() as again, again.consuming(1):
            assert await again.settle(await take(again), Ack()) == Settled(how="ack")

    @pytest.mark.parametrize(
        ("method", "call"),
        [
            ("set_limit", lambda transport: transport.set_limit(1)),
            ("receive", lambda transport: transport.receive()),
            ("extend", lambda transport: transport.extend(None)),
            ("publish", lambda transport: transport.publish(b"{}")),
            ("backlog", lambda transport: transport.backlog()),
            ("consuming", lambda transport: transport.consuming(1).__aenter__()),
        ],
    )
    @pytest.mark.parametrize(
        "fault",
        [
            pytest.param(LookupError(), id="an exception"),
            pytest.param(SystemExit(1), id="it would end the process"),
            pytest.param(asyncio.CancelledError(), id="a cancellation of its own"),
        ],
    )
    async def test_a_fault_of_any_method_is_a_lost_connection(
        self, harness: GuardedHarness, method: str, call: Callable[[Transport], Any], fault: object
    ) -> None:
        @asynccontextmanager
        async def connect() -> AsyncGenerator[Any, None]:
            async with harness.broker.connect() as inner:
                yield Faulty(inner, **{method: fault})

        async with guarded(connect, "t")() as transport:
            with pytest.raises(TransportLost):
                await call(transport)
            assert transport.lost.is_set()

    async def test_one_that_cannot_be_opened_or_has_no_methods_is_a_lost_connection(
        self, harness: GuardedHarness
    ) -> None:
        @asynccontextmanager
        async def nothing() -> AsyncGenerator[Any, None]:
            yield object()

        @asynccontextmanager
        async def never_lost() -> AsyncGenerator[Any, None]:
            async with harness.broker.connect() as inner:
                yield Faulty(inner, lost=False)

        def broken() -> Any:
            raise LookupError

        def ends() -> Any:
            raise SystemExit(1)

        for connect, why in (
            (broken, "could not be opened: LookupError"),
            (ends, "could not be opened: Thrown"),
            (nothing, "has no consuming, set_limit"),
            (never_lost, "has no lost"),
        ):
            with pytest.raises(TransportLost, match=why):
                async with guarded(connect, "t")():
                    pass

    @pytest.mark.parametrize(
        ("method", "call"),
        [
            ("receive", lambda transport: transport.receive()),
            ("settle", lambda transport: transport.settle(None, Ack())),
            ("backlog", lambda transport: transport.backlog()),
        ],
    )
    async def test_an_answer_that_is_none_is_a_lost_connection(
        self, harness: GuardedHarness, method: str, call: Callable[[Transport], Any]
    ) -> None:
        """A queue that hands up nothing, and at once, would be asked for ever, and all others stand still."""

        @asynccontextmanager
        async def connect() -> AsyncGenerator[Any, None]:
            async with harness.broker.connect() as inner:
                yield Faulty(inner, **{method: says(None)})

        async with guarded(connect, "t")() as transport:
            with pytest.raises(TransportLost, match="TypeError"):
                await call(transport)
            assert transport.lost.is_set()

    async def test_a_delivery_that_is_lost_alone_ends_no_connection(self, harness: GuardedHarness) -> None:
        await harness.publish(request("a"))
        async with harness.connect() as transport, transport.consuming(1):
            delivery = await take(transport)
            await transport.settle(delivery, Ack())
            with pytest.raises(TransportLost):
                await transport.extend(delivery)

            assert (await transport.backlog()).ready == 0
            assert not transport.lost.is_set()

    async def test_one_that_cannot_be_closed_covers_up_nothing(self, harness: GuardedHarness) -> None:
        @asynccontextmanager
        async def connect() -> AsyncGenerator[Any, None]:
            async with harness.broker.connect() as inner:
                yield inner
            raise LookupError

        async with guarded(connect, "t")() as transport:
            assert (await transport.backlog()).ready == 0


# ---------------------------------------------------------------- transforms

REQUEST = InferenceRequest(
    request_id="a", received_at=0, timeout_s=9, deadline=9, payload=b"{}", endpoint="/v1/x", stream=False
)


class Fixed:
    def __init__(self, said: object) -> None:
        self.said = said

    def validate(self, request: InferenceRequest) -> Any:
        return self.said

    def apply(self, request: InferenceRequest, body: bytes = b"") -> Any:
        return self.said


def test_a_transform_that_returns_something_else_ends_its_request_and_nothing_is_sent() -> None:
    chain = Transforms(requests={"t": GuardedBodyTransform(Fixed(b"a body that nobody marked as one"))})

    for said in (chain.refused(REQUEST), chain.body(REQUEST)):
        assert isinstance(said, Unfit)
        assert said.reason.endswith("the transform t failed: TypeError")


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(Body(content="text"), id="a text"),  # type: ignore[arg-type]
        pytest.param(Body(content=b"x", content_type="a/b\r\nX-Other: y"), id="a header inside"),
        pytest.param(Body(content=b"x", content_type=b"a/b"), id="a type that is no text"),  # type: ignore[arg-type]
        pytest.param(SystemExit(1), id="it would end the process"),
    ],
)
def test_a_body_that_cannot_be_sent_ends_its_request(said: object) -> None:
    made = Transforms(requests={"t": GuardedBodyTransform(Faulty(None, apply=said))}).body(REQUEST)

    assert isinstance(made, Unfit)
    assert "the transform t failed: " in made.reason


def test_a_transform_of_answers_cannot_end_the_process() -> None:
    faulty = GuardedAnswerTransform(Faulty(None, apply=SystemExit(1)))

    with pytest.raises(BadResponse, match="the transform t failed: Thrown"):
        Transforms(answers={"t": faulty}).answer(REQUEST, b"{}")


def test_transforms_that_return_what_they_may_are_left_to_it() -> None:
    body = Body(content=b"x")

    assert GuardedBodyTransform(Fixed(body)).apply(REQUEST) == body
    assert GuardedBodyTransform(Fixed(None)).validate(REQUEST) is None
    assert GuardedBodyTransform(Fixed(Unfit("no"))).validate(REQUEST) == Unfit("no")
    assert GuardedAnswerTransform(Fixed(b"y")).apply(REQUEST, b"x") == b"y"
    with pytest.raises(TypeError):
        GuardedAnswerTransform(Fixed("y")).apply(REQUEST, b"x")


# ---------------------------------------------------------------- billing sinks


@pytest.mark.parametrize("send", [fails(LookupError()), fails(SinkUnavailable("no")), fails(SystemExit(1)), says(None)])
async def test_a_sink_that_fails_or_says_nothing_is_tried_again(send: Callable[[], Any]) -> None:
    with pytest.raises(SinkUnavailable):
        await GuardedSink(Faulty(None, send=send), "s").send([b"{}"])


async def test_a_sink_that_hangs_is_given_up() -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(SinkUnavailable, match="no answer within 10 s"):
        await GuardedSink(Faulty(None, send=asyncio.Event().wait), "s").send([b"{}"])
    assert loop.time() == ANSWER_S


@pytest.mark.parametrize("answer", [Delivered(), Refused(reason="no")])
async def test_what_a_sink_answers_is_handed_on(answer: object) -> None:
    assert await GuardedSink(Faulty(None, send=says(answer)), "s").send([b"{}"]) == answer
