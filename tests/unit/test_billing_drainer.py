"""Billing from the outbox: contract, section 7; `docs/design/delivery.md`, section 6; bug reports B127 and B133."""

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from inference_worker.errors import SinkUnavailable, StoreUnavailable
from inference_worker.metrics import WorkerMetrics
from inference_worker.metrics_reporter import BillingDrainer, report
from inference_worker.ports import BillingSink, Delivered, OutboxEntry, Refused
from tests.unit.test_metrics_reporter import SILENT, FakeMetricServer, Worker


class FakeOutbox:
    """An outbox in memory: what is taken is handed to nobody for a minute, as a Redis consumer group does."""

    def __init__(self, count: int = 0) -> None:
        self.waiting: dict[str, OutboxEntry] = {}
        self.put_aside: list[tuple[str, str]] = []
        self.taken_at: dict[str, float] = {}
        self.down = False
        self.fails_to_forget = 0
        self.made = 0
        self.size_override: int | None = None
        self.put(count)

    def put(self, count: int) -> None:
        for _ in range(count):
            number = self.made
            self.made += 1
            self.waiting[f"e{number}"] = OutboxEntry(entry_id=f"e{number}", event=b'{"id":"%d"}' % number)

    async def take(self, limit: int) -> Sequence[OutboxEntry]:
        self._may_fail()
        now = asyncio.get_running_loop().time()
        free = [
            entry
            for entry_id, entry in self.waiting.items()
            if entry_id not in self.taken_at or now - self.taken_at[entry_id] >= 60
        ][:limit]
        self.taken_at.update({entry.entry_id: now for entry in free})
        return free

    async def sent(self, entries: Sequence[OutboxEntry]) -> None:
        self._may_fail()
        if self.fails_to_forget:
            self.fails_to_forget -= 1
            raise StoreUnavailable("no answer")
        for entry in entries:
            self.waiting.pop(entry.entry_id, None)

    async def refused(self, entry: OutboxEntry, reason: str) -> None:
        self._may_fail()
        self.waiting.pop(entry.entry_id, None)
        self.put_aside.append((entry.entry_id, reason))

    async def size(self) -> int:
        self._may_fail()
        return len(self.waiting) if self.size_override is None else self.size_override

    def _may_fail(self) -> None:
        if self.down:
            raise StoreUnavailable("no answer")


class FakeCroesus:
    """A billing receiver: keeps what it takes, refuses a batch that has one of `bad`, fails with `failures` first."""

    def __init__(self, *failures: Exception, bad: Sequence[bytes] = ()) -> None:
        self.failures = list(failures)
        self.bad = set(bad)
        self.silent = False
        self.batches: list[list[bytes]] = []
        self.asked_at: list[float] = []
        self.had: set[bytes] = set()

    async def send(self, events: Sequence[bytes]) -> Delivered | Refused:
        self.batches.append(list(events))
        self.asked_at.append(asyncio.get_running_loop().time())
        if self.silent:
            await asyncio.sleep(1e5)
        if self.failures:
            raise self.failures.pop(0)
        if self.bad.intersection(events):
            return Refused(reason="HTTP 400: what is that?")
        self.had.update(events)
        return Delivered()


class Billing:
    def __init__(self, outbox: FakeOutbox, sink: FakeCroesus) -> None:
        self.outbox = outbox
        self.sink = sink
        self.metrics = WorkerMetrics()

    def drainer(self, **options: int) -> BillingDrainer:
        checked: BillingSink = self.sink
        return BillingDrainer(
            self.outbox, checked, self.metrics, rng=random.Random(7), flush_interval_s=30.0, **options
        )

    def counted(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"inference_worker_{name}", labels)


@asynccontextmanager
async def draining(billing: Billing, **options: int) -> AsyncGenerator[None]:
    until = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(billing.drainer(**options).run(until))
        try:
            yield
        finally:
            until.set()


async def test_events_are_sent_at_the_interval_and_forgotten_after_the_answer() -> None:
    billing = Billing(FakeOutbox(3), FakeCroesus())

    async with draining(billing):
        await asyncio.sleep(31)

        assert billing.sink.asked_at == [30]
        assert billing.sink.batches == [[b'{"id":"0"}', b'{"id":"1"}', b'{"id":"2"}']]
        assert not billing.outbox.waiting
        assert billing.counted("billing_events_total", outcome="sent") == 3


async def test_a_backlog_goes_in_batches_of_at_most_100_without_a_pause() -> None:
    billing = Billing(FakeOutbox(250), FakeCroesus())

    async with draining(billing):
        await asyncio.sleep(31)

        assert [len(batch) for batch in billing.sink.batches] == [100, 100, 50]
        assert set(billing.sink.asked_at) == {30}
        assert not billing.outbox.waiting


async def test_an_empty_outbox_sends_nothing() -> None:
    billing = Billing(FakeOutbox(), FakeCroesus())

    async with draining(billing):
        await asyncio.sleep(100)

    assert billing.sink.batches == []


async def test_a_receiver_that_is_away_gets_the_same_events_again_with_backoff() -> None:
    billing = Billing(FakeOutbox(2), FakeCroesus(*[SinkUnavailable("HTTP 503")] * 5))

    async with draining(billing):
        await asyncio.sleep(30 + 31.1)

    pauses = [later - earlier for earlier, later in itertools.pairwise(billing.sink.asked_at)]
    assert len(pauses) == 5
    for pause_s, whole_s in zip(pauses, (1, 2, 4, 8, 16), strict=True):
        assert whole_s / 2 <= pause_s <= whole_s
    assert billing.sink.had == {b'{"id":"0"}', b'{"id":"1"}'}
    assert not billing.outbox.waiting
    assert billing.counted("flush_failures_total", sink="billing") == 5


async def test_the_backoff_is_at_most_a_minute_and_begins_anew_after_a_success() -> None:
    billing = Billing(FakeOutbox(1), FakeCroesus(*[SinkUnavailable("HTTP 503")] * 20))

    async with draining(billing):
        await asyncio.sleep(3600)
        asked = billing.sink.asked_at
        assert len(asked) == 21
        assert max(later - earlier for earlier, later in itertools.pairwise(asked)) <= 60
        billing.outbox.put(1)
        billing.sink.failures = [SinkUnavailable("HTTP 503")]
        await asyncio.sleep(31)

    assert 0.5 <= asked[-1] - asked[-2] <= 1


@pytest.mark.parametrize(("asked_s", "waited_s"), [(20.0, 20.0), (86_400.0, 600.0)])
async def test_retry_after_is_a_floor_under_the_backoff_up_to_ten_minutes(asked_s: float, waited_s: float) -> None:
    billing = Billing(FakeOutbox(1), FakeCroesus(SinkUnavailable("HTTP 429", asked_s)))

    async with draining(billing):
        await asyncio.sleep(700)

    assert billing.sink.asked_at == [30, 30 + waited_s]


async def test_one_bad_event_is_put_aside_alone_and_cannot_block_the_rest() -> None:
    billing = Billing(FakeOutbox(5), FakeCroesus(bad=[b'{"id":"2"}']))

    async with draining(billing):
        await asyncio.sleep(31)

        assert [len(batch) for batch in billing.sink.batches] == [5, 1, 1, 1, 1, 1]
        assert billing.outbox.put_aside == [("e2", "HTTP 400: what is that?")]
        assert not billing.outbox.waiting
        assert len(billing.sink.had) == 4
        assert billing.counted("billing_events_total", outcome="sent") == 4
        assert billing.counted("billing_events_total", outcome="refused") == 1


async def test_an_event_refused_alone_in_its_batch_is_put_aside_at_once() -> None:
    billing = Billing(FakeOutbox(1), FakeCroesus(bad=[b'{"id":"0"}']))

    with capture_logs() as lines:
        async with draining(billing):
            await asyncio.sleep(31)

    assert len(billing.sink.batches) == 1
    assert billing.outbox.put_aside == [("e0", "HTTP 400: what is that?")]
    assert [(line["log_level"], line["reason"]) for line in lines] == [("error", "HTTP 400")]


async def test_sending_one_by_one_goes_on_where_the_receiver_went_away() -> None:
    billing = Billing(FakeOutbox(3), FakeCroesus(bad=[b'{"id":"1"}']))
    original = billing.sink.send

    async def cut(events: Sequence[bytes]) -> Delivered | Refused:
        if len(billing.sink.batches) == 2:
            billing.sink.failures.append(SinkUnavailable("HTTP 503"))
        return await original(events)

    billing.sink.send = cut  # type: ignore[method-assign] # the fault comes at a step
    async with draining(billing):
        await asyncio.sleep(35)

        assert billing.sink.batches == [
            [b'{"id":"0"}', b'{"id":"1"}', b'{"id":"2"}'],
            [b'{"id":"0"}'],
            [b'{"id":"1"}'],
            [b'{"id":"1"}'],
            [b'{"id":"2"}'],
        ]
        assert billing.outbox.put_aside == [("e1", "HTTP 400: what is that?")]
        assert not billing.outbox.waiting


async def test_nothing_leaves_the_outbox_before_the_answer() -> None:
    billing = Billing(FakeOutbox(2), FakeCroesus())
    billing.sink.silent = True

    async with draining(billing):
        await asyncio.sleep(100)
        assert len(billing.outbox.waiting) == 2

    assert len(billing.outbox.waiting) == 2


async def test_a_store_that_is_away_means_later() -> None:
    billing = Billing(FakeOutbox(1), FakeCroesus())
    billing.outbox.down = True

    with capture_logs() as lines:
        async with draining(billing):
            await asyncio.sleep(100)
            assert billing.sink.batches == []
            billing.outbox.down = False
            await asyncio.sleep(30)
            assert not billing.outbox.waiting

    assert lines == []


async def test_a_store_that_went_away_after_the_answer_is_told_later_and_nothing_is_sent_twice() -> None:
    billing = Billing(FakeOutbox(2), FakeCroesus())
    billing.outbox.fails_to_forget = 2

    async with draining(billing):
        await asyncio.sleep(31 + 60)
        assert not billing.outbox.waiting

    assert len(billing.sink.batches) == 1


async def test_no_exception_ends_the_draining() -> None:
    billing = Billing(FakeOutbox(1), FakeCroesus(ValueError("a bug"), RuntimeError("another")))

    with capture_logs() as lines:
        async with draining(billing):
            await asyncio.sleep(40)

            assert not billing.outbox.waiting
    assert "a round of billing failed" in [line["event"] for line in lines]


async def test_a_size_that_cannot_be_measured_does_not_end_the_draining(monkeypatch: pytest.MonkeyPatch) -> None:
    billing = Billing(FakeOutbox(1), FakeCroesus())

    async def size() -> int:
        raise ValueError("a bug")

    monkeypatch.setattr(billing.outbox, "size", size)

    with capture_logs() as lines:
        async with draining(billing):
            await asyncio.sleep(31)
            billing.outbox.put(1)
            await asyncio.sleep(30)

            assert not billing.outbox.waiting
    assert {line["event"] for line in lines} == {"the outbox could not be measured"}


async def test_trouble_is_told_once_and_so_is_its_end() -> None:
    failures = [*[SinkUnavailable("HTTP 503")] * 3, *[SinkUnavailable("no answer within 10 s")] * 2]
    billing = Billing(FakeOutbox(1), FakeCroesus(*failures))

    with capture_logs() as lines:
        async with draining(billing):
            await asyncio.sleep(120)

    assert [(line["log_level"], line.get("reason")) for line in lines] == [
        ("warning", "HTTP 503"),
        ("warning", "no answer within 10 s"),
        ("info", None),
    ]


async def test_a_growing_outbox_is_seen_in_a_gauge_and_told_once_per_threshold() -> None:
    billing = Billing(FakeOutbox(), FakeCroesus())
    sizes = [5, 10, 12, 100, 120, 50, 3]

    with capture_logs() as lines:
        async with draining(billing, warn_at=10, alarm_at=100):
            for size in sizes:
                billing.outbox.size_override = size
                await asyncio.sleep(30.5 if size == sizes[0] else 30)
                assert billing.counted("outbox_events") == size

    assert [(line["log_level"], line["events"], line["threshold"]) for line in lines] == [
        ("warning", 10, 10),
        ("error", 100, 100),
        ("info", 50, 100),
        ("info", 3, 10),
    ]


async def test_the_size_is_measured_while_the_receiver_is_away() -> None:
    billing = Billing(FakeOutbox(7), FakeCroesus(*[SinkUnavailable("HTTP 503")] * 1000))

    async with draining(billing):
        await asyncio.sleep(31)
        assert billing.counted("outbox_events") == 7


async def test_a_stop_sends_what_has_come_since() -> None:
    billing = Billing(FakeOutbox(), FakeCroesus())

    async with draining(billing):
        await asyncio.sleep(10)
        billing.outbox.put(1)

    assert billing.sink.asked_at == [10]
    assert not billing.outbox.waiting


async def test_a_stop_cuts_a_backoff_short_and_tries_once_more() -> None:
    billing = Billing(FakeOutbox(1), FakeCroesus(SinkUnavailable("HTTP 429", 500.0)))

    async with draining(billing):
        await asyncio.sleep(100)

    assert billing.sink.asked_at == [30, 100]
    assert not billing.outbox.waiting


@pytest.mark.parametrize("stopped_at", [5.0, 31.0])
async def test_a_receiver_that_hangs_holds_a_stop_up_for_three_seconds(stopped_at: float) -> None:
    billing = Billing(FakeOutbox(1), FakeCroesus())
    billing.sink.silent = True

    async with draining(billing):
        await asyncio.sleep(stopped_at)

    assert asyncio.get_running_loop().time() == pytest.approx(stopped_at + 3)
    assert len(billing.outbox.waiting) == 1


class TestBothAtOnce:
    """`report`: the sinks do not hold each other up, and billing comes first at the end."""

    async def stopped(self, billing: Billing | None, worker: Worker, during: Callable[[], None] | None = None) -> None:
        until = asyncio.Event()
        running = asyncio.create_task(report(worker.reporter(), billing.drainer() if billing else None, until))
        await asyncio.sleep(31)
        if during is not None:
            during()
        until.set()
        await running

    async def test_both_hang_and_the_end_comes_within_five_seconds_billing_first(self) -> None:
        """B127."""
        billing, worker = Billing(FakeOutbox(), FakeCroesus()), Worker(FakeMetricServer(200, SILENT))
        billing.sink.silent = True

        await self.stopped(billing, worker, lambda: billing.outbox.put(1))

        assert billing.sink.asked_at == [31]
        assert worker.server.asked_at == [30, 34]
        assert asyncio.get_running_loop().time() == pytest.approx(36)

    async def test_a_billing_receiver_that_hangs_does_not_hold_up_metrics(self) -> None:
        billing, worker = Billing(FakeOutbox(1), FakeCroesus()), Worker(FakeMetricServer())
        billing.sink.silent = True

        await self.stopped(billing, worker)

        assert worker.server.asked_at == [30, 34]

    async def test_a_metric_server_that_hangs_does_not_hold_up_billing(self) -> None:
        billing, worker = Billing(FakeOutbox(1), FakeCroesus()), Worker(FakeMetricServer(SILENT))

        await self.stopped(billing, worker)

        assert billing.sink.had == {b'{"id":"0"}'}

    async def test_without_billing_the_metrics_go_alone(self) -> None:
        worker = Worker(FakeMetricServer())

        await self.stopped(None, worker)

        assert worker.server.asked_at == [30, 31]
