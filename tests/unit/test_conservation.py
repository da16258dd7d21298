"""Over any mix of faults, in any order, nothing that the queue accepted is lost, answered twice, or billed wrongly.

The first three invariants of the contract (section 5) and I5 of `docs/design/delivery.md`, on the real listener and
processor over the embedded queue and store. A killed worker takes no step any more, as in a kill of its process.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Generator

import pytest
import structlog
import structlog.testing
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inference_worker.errors import ModelCut, ModelGone, ModelSlow
from inference_worker.messages import DEAD_LETTERED
from inference_worker.ports import Answer
from inference_worker.transports.memory import MemoryTransport, _Message
from tests.store_contract import failure
from tests.unit.conftest import VirtualTimeLoop
from tests.unit.worker_kit import FakeModel, Site, Worker, body, running

NAMES = ("a", "b", "c")
SAID: dict[str, Answer | Exception] = {
    "refused by the model": Answer(status_code=400, reason="no", body=b"{}"),
    "no usage": Answer(status_code=200, reason="OK", body=b"{}"),
    "cut": ModelCut("reset"),
    "gone": ModelGone("refused"),
    "slow": ModelSlow("slow"),
    "a bug of ours": RuntimeError("a bug"),
}


@pytest.fixture(autouse=True)
def _no_lines() -> Generator[None]:
    """Tens of thousands of log lines are not rendered."""
    with structlog.testing.capture_logs():
        yield


class Conservation(RuleBasedStateMachine):
    """Two workers at most; every rule is a step of somebody, or a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.published: set[str] = set()
        self.first_seen: dict[str, bytes] = {}
        self.workers: list[Worker] = []
        self.ever: list[Worker] = []
        self.lapses = False
        """Whether a lease may have lapsed under a live worker."""

    def do(self, work: "asyncio.Future[None] | object") -> None:
        assert asyncio.iscoroutine(work)
        self.loop.run_until_complete(work)

    @initialize()
    def begin(self) -> None:
        async def make() -> None:
            self.site = Site()

        self.do(make())

    # ------------------------------------------------------------ steps

    @rule(name=st.sampled_from(NAMES), timeout_s=st.sampled_from([40.0, 100_000.0]))
    def publish(self, name: str, timeout_s: float) -> None:
        """Also a second time: a producer may repeat itself."""

        async def publish() -> None:
            await self.site.publish(body(name, timeout_s=timeout_s))

        self.do(publish())
        self.published.add(name)

    @precondition(lambda self: len(self.workers) < 2)
    @rule(
        said=st.lists(st.sampled_from(sorted(SAID)), max_size=4),
        takes_s=st.sampled_from([0.0, 3.0, 25.0]),
        slots=st.sampled_from([1, 3]),
        delay_s=st.sampled_from([0.0, 2.0]),
    )
    def start(self, said: list[str], takes_s: float, slots: int, delay_s: float) -> None:
        async def start() -> None:
            model = FakeModel(takes_s=takes_s, failures=[SAID[name] for name in said])
            worker = Worker(
                self.site, model, slots=slots, max_retries=2, grace_s=10.0, first_delay_s=delay_s, store_patience_s=3.0
            )
            self.workers.append(worker.start())
            self.ever.append(worker)
            await asyncio.sleep(0.1)

        self.do(start())

    @rule(seconds=st.sampled_from([0.01, 1.0, 6.0, 20.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.do(asyncio.sleep(seconds))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        worker = self.workers.pop(data.draw(st.integers(0, len(self.workers) - 1)))
        self.do(worker.ended())

    @rule(name=st.sampled_from(NAMES))
    def cancel(self, name: str) -> None:
        async def cancel() -> None:
            await self.site.store.cancel(failure(name, status_code=499, error_code="cancelled"))

        if name in self.published:  # A job that the gateway knows.
            self.do(cancel())

    # ------------------------------------------------------------ faults

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        worker = self.workers.pop(data.draw(st.integers(0, len(self.workers) - 1)))
        self.do(worker.kill())

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), steps=st.integers(1, 5), before=st.booleans(), within_s=st.sampled_from([0.5, 30.0]))
    def kill_at_a_step(self, data: st.DataObject, steps: int, before: bool, within_s: float) -> None:
        """At one of its next questions to the store: between claim and call, result and ack, copy and release."""
        worker = self.workers[data.draw(st.integers(0, len(self.workers) - 1))]
        worker.store.dies_in, worker.store.dies_before_the_work = steps, before
        self.do(asyncio.sleep(within_s))
        worker.store.dies_in = None
        if worker.store.dead:
            self.workers.remove(worker)
            self.do(worker.kill())

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        worker = self.workers[data.draw(st.integers(0, len(self.workers) - 1))]

        async def cut() -> None:
            worker.cut()

        self.do(cut())

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), away=st.booleans())
    def store(self, data: st.DataObject, away: bool) -> None:
        """For one worker alone, or (drawn twice) for both; a lease may lapse meanwhile."""
        worker = self.workers[data.draw(st.integers(0, len(self.workers) - 1))]
        worker.store.away = "gone" if away else None
        self.lapses |= away

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), count=st.integers(1, 3))
    def answers_get_lost(self, data: st.DataObject, count: int) -> None:
        """The store has done what it was asked, and nobody hears of it."""
        self.workers[data.draw(st.integers(0, len(self.workers) - 1))].store.answers_lost = count

    # ------------------------------------------------------------ invariants

    def queued(self) -> Counter[str]:
        messages: list[_Message] = list(self.site.broker.ready)
        for connection in self.site.broker.connections:
            assert isinstance(connection, MemoryTransport)
            messages += [held.receipt.message for held in connection._held.values()]  # type: ignore[attr-defined]  # Its own.
        return Counter(json.loads(message.body)["request_id"] for message in messages)

    def hidden_copies(self) -> int:
        return sum(view.delayed for worker in self.ever for view in worker.views)

    @invariant()
    def nothing_is_nowhere(self) -> None:
        """1: queued, or answered, or dead with its history."""
        if not hasattr(self, "site"):
            return
        queued = self.queued()
        for name in self.published:
            found = queued[name] or name in self.site.store._results or self.hidden_copies()
            assert found, f"{name} is nowhere"
        for letter in self.site.broker.dead:
            name = json.loads(letter.body)["request_id"]
            assert name in self.site.store._results, f"{name} is dead without a result"

    @invariant()
    def no_result_is_replaced(self) -> None:
        """2."""
        if not hasattr(self, "site"):
            return
        for name, result in self.site.store._results.items():
            assert self.first_seen.setdefault(name, result.body) == result.body, f"{name} was answered twice"
        assert set(self.first_seen) == set(self.site.store._results)

    @invariant()
    def what_was_used_is_billed_once(self) -> None:
        """3: distinct event ids = completed requests that used tokens."""
        if not hasattr(self, "site"):
            return
        billed = Counter(json.loads(event)["id"] for event in self.site.store._outbox.values())
        used = {name for name, result in self.site.store._results.items() if b'"usage"' in result.body}
        assert billed == Counter(used)

    @invariant()
    def one_call_at_a_time(self) -> None:
        """I4, as long as runners keep their leases."""
        running = sum((Counter(worker.model.running) for worker in self.ever), Counter())
        assert self.lapses or all(calls <= 1 for calls in running.values()), running

    @invariant()
    def a_worker_lives(self) -> None:
        """4: no fault of a peer ends it."""
        for worker in self.workers:
            assert worker.task is not None
            assert not worker.task.done(), worker.task
            assert all(running <= 1 for running in worker.model.running.values())

    def teardown(self) -> None:
        """I5: once the faults stop, every message is settled; and the dead letters are those whose result says so."""
        try:
            if hasattr(self, "site"):
                self.heal()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(10))
            self.loop.close()

    def heal(self) -> None:
        for worker in self.workers:
            worker.store.away = None
            worker.store.answers_lost = 0
            worker.model.failures.clear()
        if not self.workers:
            self.start([], 0.0, 3, 0.0)
        self.do(asyncio.sleep(300.0))

        assert not self.queued(), "something is never settled"
        results = {name: json.loads(result.body) for name, result in self.site.store._results.items()}
        assert set(results) == self.published
        dead = {json.loads(letter.body)["request_id"] for letter in self.site.broker.dead}
        assert dead == {name for name, result in results.items() if result.get("error_code") in DEAD_LETTERED}
        self.nothing_is_nowhere()
        self.no_result_is_replaced()
        self.what_was_used_is_billed_once()
        for worker in self.workers:
            self.do(worker.ended())
            assert worker.listener.in_flight == 0
            assert worker.processor._jobs == {}
            assert worker.budget.held_bytes == 0


TestConservation = Conservation.TestCase
TestConservation.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("before", [True, False], ids=["before it is done", "after it"])
@pytest.mark.parametrize("step", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("said", "sent", "ends_as", "calls"),
    [
        pytest.param([], None, None, 2, id="an answer"),
        pytest.param([SAID["cut"]], None, None, 3, id="a retry"),
        pytest.param([SAID["cut"]] * 9, None, "retries_exhausted", 5, id="the last retry"),
        pytest.param([SAID["refused by the model"]] * 9, None, "model_error", 2, id="a refusal"),
        pytest.param([], b'{"request_id":"a"}', "invalid_request", 0, id="no request"),
    ],
)
async def test_a_kill_at_any_step_of_a_message_loses_nothing(
    said: list[Answer | Exception], sent: bytes | None, ends_as: str | None, calls: int, step: int, before: bool
) -> None:
    """The windows of `docs/design/delivery.md`, section 9: one extra call at most, one result, one bill."""
    site = Site()
    model = FakeModel(takes_s=1.0, failures=list(said))
    first = Worker(site, model, max_retries=2)
    await site.publish(sent or body())
    first.store.dies_in, first.store.dies_before_the_work = step, before
    first.start()
    await asyncio.sleep(8.0)
    was_killed = first.store.dead
    await (first.kill() if was_killed else first.ended())
    held = len(site.broker.ready) + sum(view.delayed for view in first.views)
    assert held or await site.result() is not None, "it is nowhere"

    async with running(Worker(site, model, max_retries=2)):
        await asyncio.sleep(60.0)

    result = await site.result()
    assert result is not None
    assert result.get("error_code") == ends_as
    assert not site.broker.ready
    assert (ends_as in DEAD_LETTERED | {"invalid_request"}) == bool(site.dead)
    assert await site.store.size() == (1 if ends_as is None else 0)
    assert len(model.calls) <= calls
