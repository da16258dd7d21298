"""What waits at the brokers, under the peer's names. Names end in the number of the peer's case, where there is one."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from inference_worker.errors import TransportLost
from inference_worker.gates.basic import Constant, LocalMaxConcurrency
from inference_worker.peer_backlog import TURN_S, PeerBacklog, Polled
from inference_worker.peer_metrics import PROXIMITY_BUCKETS_MS, PeerMetrics, Place
from inference_worker.ports import Backlog, Gate
from tests.unit.gate_kit import admitted, asked

CHAT = Place(queue_id="chat", queue_name="requests:chat", pool_name="gpu")
BULK = Place(queue_id="bulk", queue_name="requests:bulk", pool_name="gpu")


@dataclass
class Brokers:
    """What waits, as each turn is told it; the last answer stays."""

    answers: list[Mapping[str, Backlog] | Exception] = field(default_factory=list)
    takes_s: float = 0.0
    asks: int = 0
    windows: list[Sequence[float]] = field(default_factory=list)
    due: Sequence[int] = (0,) * 15

    async def backlogs(self) -> Mapping[str, Backlog]:
        self.asks += 1
        await asyncio.sleep(self.takes_s)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def expiring(self, windows_s: Sequence[float]) -> Sequence[int]:
        self.windows.append(windows_s)
        return self.due


def waits(**ready: int) -> dict[str, Backlog]:
    return {f"requests:{name}": Backlog(ready=count) for name, count in ready.items()}


class Shown:
    """The backlogs of two queues, polled every 15 s for as long as a test says."""

    def __init__(self, *answers: Mapping[str, Backlog] | Exception, gate: Gate | None = None) -> None:
        self.registry = CollectorRegistry()
        self.brokers = Brokers(list(answers))
        metrics = PeerMetrics(self.registry, queues=[CHAT, BULK], pools=["gpu"])
        self.queues = [
            Polled(name=CHAT.queue_name, metrics=metrics.queue(CHAT), gate=gate, expiring=self.brokers.expiring),
            Polled(name=BULK.queue_name, metrics=metrics.queue(BULK)),
        ]

    async def after(self, seconds: float, interval_s: float = 15.0) -> None:
        over = asyncio.Event()
        poll = PeerBacklog(self.queues, self.brokers.backlogs, interval_s=interval_s)
        async with asyncio.TaskGroup() as group:
            group.create_task(poll.run(over))
            await asyncio.sleep(seconds)
            over.set()

    def value(self, name: str, place: Place, **labels: str) -> float | None:
        at = dict(zip(("queue_id", "queue_name", "pool_name"), place.labels, strict=True))
        return self.registry.get_sample_value(f"llm_d_async_async_{name}", at | labels)

    def backlog(self, place: Place) -> tuple[float | None, float | None]:
        return self.value("broker_backlog", place), self.value("broker_backlog_source_available", place)


async def test_what_waits_is_shown_of_each_queue() -> None:
    shown = Shown(waits(chat=5, bulk=0))

    await shown.after(1.0)

    assert (shown.backlog(CHAT), shown.backlog(BULK)) == ((5, 1), (0, 1))


async def test_a_queue_that_cannot_be_asked_is_said_to_be_unknown() -> None:
    shown = Shown(waits(chat=5, bulk=7), waits(bulk=7))

    await shown.after(16.0)

    assert (shown.backlog(CHAT), shown.backlog(BULK)) == ((0, 0), (7, 1))


async def test_it_is_asked_at_once_and_at_each_interval() -> None:
    shown = Shown(waits(chat=1))

    await shown.after(46.0)

    assert shown.brokers.asks == 4


async def test_an_interval_of_0_is_never() -> None:
    shown = Shown(waits(chat=1))

    await shown.after(100.0, interval_s=0.0)

    assert shown.brokers.asks == 0
    assert shown.backlog(CHAT) == (0, 0)


@pytest.mark.parametrize(
    ("failure", "level", "reason"),
    [
        pytest.param(TransportLost("no Redis"), "warning", "no Redis", id="away"),
        pytest.param(ZeroDivisionError("a bug"), "error", "ZeroDivisionError: a bug", id="a fault of ours"),
    ],
)
async def test_a_source_that_fails_costs_its_turns_and_is_said_once(
    failure: Exception, level: str, reason: str
) -> None:
    shown = Shown(failure, failure, failure, waits(chat=2))

    with capture_logs() as log:
        await shown.after(31.0)
        failed = shown.backlog(CHAT)
        await shown.after(1.0)

    assert failed == (0, 0)
    assert shown.backlog(CHAT) == (2, 1)
    assert [(line["log_level"], line.get("reason")) for line in log] == [(level, reason)]


async def test_a_source_that_comes_back_is_said_so() -> None:
    shown = Shown(TransportLost("no Redis"), waits(chat=2))

    with capture_logs() as log:
        await shown.after(16.0)

    assert [line["event"] for line in log] == [
        "what waits cannot be counted; trying again",
        "what waits is counted again",
    ]


async def test_a_source_that_hangs_costs_its_turn() -> None:
    shown = Shown(waits(chat=5))
    shown.brokers.takes_s = 1e6

    await shown.after(TURN_S + 16.0)

    assert shown.brokers.asks == 2
    assert shown.backlog(CHAT) == (0, 0)


async def test_it_may_be_cancelled_while_it_asks() -> None:
    shown = Shown(waits(chat=5))
    shown.brokers.takes_s = 5.0
    poll = PeerBacklog(shown.queues, shown.brokers.backlogs, interval_s=15.0)
    running = asyncio.create_task(poll.run(asyncio.Event()))
    await asyncio.sleep(1.0)

    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_closed_gate_counts_once_a_poll_while_something_waits_case_33() -> None:
    gate = LocalMaxConcurrency(1)
    admitted(gate, asked())
    empty, waiting = Shown(waits(chat=0), gate=gate), Shown(waits(chat=1), gate=gate)

    await empty.after(16.0)
    await waiting.after(16.0)

    assert (empty.brokers.asks, waiting.brokers.asks) == (2, 2)
    assert empty.value("gate_decisions_total", CHAT, reason="gate_closed") == 0
    assert waiting.value("gate_decisions_total", CHAT, reason="gate_closed") == 2
    assert waiting.backlog(CHAT) == (1, 1)


async def test_an_open_gate_and_a_queue_that_cannot_be_asked_count_nothing() -> None:
    opened, unknown = Shown(waits(chat=9), gate=Constant()), Shown(waits(), gate=LocalMaxConcurrency(1))

    await opened.after(16.0)
    await unknown.after(16.0)

    for shown in (opened, unknown):
        assert shown.value("gate_decisions_total", CHAT, reason="gate_closed") == 0


async def test_the_nearness_of_deadlines_is_asked_for_by_window_and_replaced_case_309() -> None:
    shown = Shown(waits(chat=9))
    shown.brokers.due = [1, 1, 4, *[4] * 11, 9]
    await shown.after(1.0)
    first = [shown.value("deadline_proximity_millis_bucket", CHAT, le=le) for le in ("0.0", "1000.0", "5000.0", "+Inf")]

    shown.brokers.due = [0] * 14 + [2]
    await shown.after(1.0)

    assert first == [1, 1, 4, 9]
    assert shown.value("deadline_proximity_millis_bucket", CHAT, le="8.64e+07") == 0
    assert shown.value("deadline_proximity_millis_count", CHAT) == 2
    assert [window * 1000 for window in shown.brokers.windows[0][:-1]] == list(PROXIMITY_BUCKETS_MS)
    assert shown.value("deadline_proximity_millis_count", BULK) == 0
