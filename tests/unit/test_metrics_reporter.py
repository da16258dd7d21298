"""Metric batches: contract, section 7, and the bug reports B125 and B127."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from structlog.testing import capture_logs

from inference_worker.metrics import WorkerMetrics
from inference_worker.metrics_buffer import MetricsBuffer, RequestRecord
from inference_worker.metrics_reporter import MetricsReporter
from inference_worker.ports import Health

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "telemetry" / "metric-batch.schema.json").read_text(encoding="utf-8")
)
SILENT = 0
RESET = -1

RECORD = RequestRecord(
    request_id="r-0",
    status_code=200,
    status="completed",
    disposition="ack",
    attempt=0,
    received_at=1.0,
    finished_at=2.0,
    queue_s=0.5,
    model_s=0.5,
    ttft_s=0.1,
    tbt_s=0.01,
    prompt_tokens=3,
    completion_tokens=4,
    total_tokens=7,
)
UNREADABLE = RequestRecord(
    request_id=None,
    status_code=None,
    status=None,
    disposition="dead_letter",
    attempt=0,
    received_at=None,
    finished_at=2.0,
    queue_s=None,
    model_s=None,
    ttft_s=None,
    tbt_s=None,
    prompt_tokens=None,
    completion_tokens=None,
    total_tokens=None,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    kv_cache_usage: float | None = None
    requests_running: float | None = None
    requests_waiting: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    uuid: str
    utilization: float | None


class FakeMetricServer:
    """Answers by what `says` says, the last one for ever; keeps the batches that it took."""

    def __init__(self, *says: int) -> None:
        self.says = list(says) or [200]
        self.batches: list[dict[str, Any]] = []
        self.taken: list[dict[str, Any]] = []
        self.asked_at: list[float] = []
        self.requests: list[httpx.Request] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        self.asked_at.append(asyncio.get_running_loop().time())
        batch = json.loads(request.content)
        jsonschema.validate(batch, SCHEMA)
        self.batches.append(batch)
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if said == SILENT:
            await asyncio.sleep(1e5)
        if said == RESET:
            raise httpx.ReadError("connection reset")
        if 200 <= said < 300:
            self.taken.append(batch)
        return httpx.Response(said)

    def ids(self) -> list[str]:
        return [record["request_id"] for batch in self.taken for record in batch["requests"]]


class Worker:
    """What a reporter is given."""

    def __init__(self, server: FakeMetricServer, limit: int = 100) -> None:
        self.server = server
        self.metrics = WorkerMetrics()
        self.buffer = MetricsBuffer(limit, count_lost=self.metrics.records_lost)
        self.health = Health("model")
        self.load: Load | None = Load(kv_cache_usage=0.25, requests_running=2, requests_waiting=0)
        self.gpus: list[Gpu] = []
        self.queue_depth: int | None = 17
        self.token: Callable[[], str | None] = lambda: "secret"

    def reporter(self, **changed: Any) -> MetricsReporter:
        async def scrape_model() -> Load | None:
            return self.load

        async def scrape_gpus() -> Sequence[Gpu]:
            return self.gpus

        async def backlog() -> int | None:
            return self.queue_depth

        options: dict[str, Any] = {
            "url": lambda: "http://metrics",
            "token": lambda: self.token(),
            "buffer": self.buffer,
            "health": self.health,
            "metrics": self.metrics,
            "scrape_model": scrape_model,
            "scrape_gpus": scrape_gpus,
            "backlog": backlog,
            "now": lambda: 1000.0 + asyncio.get_running_loop().time(),
            "deployment_id": "deployment-1",
            "replica_id": "replica-1",
            "user_id": "user-1",
            "org_id": "",
            "hf_model_id": "org/model",
            "flush_interval_s": 30.0,
            "verify": False,
            "transport": httpx.MockTransport(self.server),
        }
        return MetricsReporter(**(options | changed))

    def add(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.buffer.add(dataclasses.replace(RECORD, request_id=request_id))

    def counted(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"inference_worker_{name}", labels)


@asynccontextmanager
async def reporting(worker: Worker, **changed: Any) -> AsyncGenerator[None]:
    until = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.reporter(**changed).run(until))
        try:
            yield
        finally:
            until.set()


async def test_a_batch_has_everything_that_the_contract_names() -> None:
    worker = Worker(FakeMetricServer())
    worker.gpus = [Gpu(uuid="GPU-1", utilization=0.9), Gpu(uuid="GPU-2", utilization=None)]
    worker.health.report(True, checked_at=990.0)

    async with reporting(worker):
        worker.add("r-1")
        await asyncio.sleep(31)

    assert worker.server.batches[0] == {
        "deployment_id": "deployment-1",
        "replica_id": "replica-1",
        "user_id": "user-1",
        "org_id": "",
        "hf_model_id": "org/model",
        "sent_at": 1030.0,
        "requests": [
            {
                "request_id": "r-1",
                "status_code": 200,
                "status": "completed",
                "disposition": "ack",
                "attempt": 0,
                "received_at": 1.0,
                "finished_at": 2.0,
                "queue_s": 0.5,
                "model_s": 0.5,
                "ttft_s": 0.1,
                "tbt_s": 0.01,
                "prompt_tokens": 3,
                "completion_tokens": 4,
                "total_tokens": 7,
            }
        ],
        "health": {"healthy": True, "checked_at": 990.0},
        "model": {"kv_cache_usage": 0.25, "requests_running": 2, "requests_waiting": 0},
        "gpus": [{"uuid": "GPU-1", "utilization": 0.9}, {"uuid": "GPU-2", "utilization": None}],
        "queue_depth": 17,
        "dropped": 0,
    }


async def test_a_batch_is_posted_with_the_service_token_which_is_read_each_time() -> None:
    worker = Worker(FakeMetricServer())
    tokens = ["first", "second"]
    worker.token = lambda: tokens.pop(0)

    async with reporting(worker):
        await asyncio.sleep(31)

    first, second = worker.server.requests
    assert (first.method, str(first.url)) == ("POST", "http://metrics/metrics")
    assert first.headers["content-type"] == "application/json"
    assert first.headers["authorization"] == "Bearer first"
    assert second.headers["authorization"] == "Bearer second"


async def test_a_flush_comes_at_every_interval_and_once_more_at_the_end() -> None:
    worker = Worker(FakeMetricServer())

    async with reporting(worker):
        await asyncio.sleep(70)
        worker.add("last")

    assert worker.server.asked_at == [30, 60, 70]
    assert worker.server.ids() == ["last"]


async def test_each_record_is_sent_once() -> None:
    worker = Worker(FakeMetricServer())

    async with reporting(worker):
        for number in range(100):
            worker.add(f"r-{number}")
            await asyncio.sleep(1)

    assert worker.server.ids() == [f"r-{number}" for number in range(100)]


async def test_what_is_not_known_is_null_and_not_zero() -> None:
    worker = Worker(FakeMetricServer())
    worker.load, worker.queue_depth = None, None
    worker.buffer.add(UNREADABLE)

    async with reporting(worker):
        await asyncio.sleep(31)

    batch = worker.server.batches[0]
    assert batch["model"] == {"kv_cache_usage": None, "requests_running": None, "requests_waiting": None}
    assert batch["queue_depth"] is None
    assert batch["health"] == {"healthy": False, "checked_at": None}
    assert batch["requests"][0]["request_id"] is None


@pytest.mark.parametrize("broken", ["scrape_model", "scrape_gpus", "backlog"])
@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_a_source_that_gives_nothing_does_not_cost_the_batch(broken: str, how: str) -> None:
    worker = Worker(FakeMetricServer())

    async def ask() -> None:
        if how == "hangs":
            await asyncio.sleep(1e5)
        raise OSError("nobody there")

    async with reporting(worker, **{broken: ask}):
        worker.add("r-1")
        await asyncio.sleep(36)

    assert worker.server.ids() == ["r-1"]


@pytest.mark.parametrize("said", [500, 401, 302, SILENT, RESET])
async def test_a_failed_flush_is_dropped_and_counted_and_the_next_one_goes_on(said: int) -> None:
    """B125: after one time-out the exporter must send again; what was lost is exact."""
    worker = Worker(FakeMetricServer(said, 200))

    async with reporting(worker):
        worker.add("a", "b")
        await asyncio.sleep(41)
        worker.add("c")
        await asyncio.sleep(40)

    assert worker.server.ids() == ["c"]
    assert [batch["dropped"] for batch in worker.server.taken] == [2, 0]
    assert worker.counted("metric_records_dropped_total") == 2
    assert worker.counted("flush_failures_total", sink="metrics") == 1


async def test_dropped_adds_up_over_several_failures_and_a_full_buffer() -> None:
    worker = Worker(FakeMetricServer(500, 500, 200), limit=2)

    async with reporting(worker):
        worker.add("a", "b", "c")
        await asyncio.sleep(31)
        worker.add("d")
        await asyncio.sleep(30)
        worker.add("e")
        await asyncio.sleep(30)

    assert worker.server.taken[0]["dropped"] == 4
    assert worker.counted("metric_records_dropped_total") == 4


async def test_a_failure_is_told_once_and_so_is_the_recovery() -> None:
    worker = Worker(FakeMetricServer(500, 500, 500, 503, 200))

    with capture_logs() as lines:
        async with reporting(worker):
            await asyncio.sleep(200)

    assert [(line["log_level"], line.get("reason")) for line in lines if line["log_level"] != "debug"] == [
        ("warning", "SinkUnavailable: HTTP 500"),
        ("warning", "SinkUnavailable: HTTP 503"),
        ("info", None),
    ]


async def test_a_token_that_cannot_be_read_costs_one_flush() -> None:
    worker = Worker(FakeMetricServer())

    def unreadable() -> str:
        raise PermissionError("token file")

    worker.token = unreadable
    async with reporting(worker):
        await asyncio.sleep(31)
        worker.token = lambda: None
        await asyncio.sleep(30)

    assert len(worker.server.requests) == 2
    assert "authorization" not in worker.server.requests[0].headers


async def test_adding_never_waits_for_a_sink_that_hangs() -> None:
    worker = Worker(FakeMetricServer(SILENT), limit=10)

    async with reporting(worker):
        await asyncio.sleep(31)
        for number in range(1000):
            worker.add(str(number))
        assert asyncio.get_running_loop().time() == 31
        assert len(worker.buffer) == 10


@pytest.mark.parametrize("stopped_at", [5.0, 31.0])
async def test_a_sink_that_hangs_holds_a_stop_up_for_two_seconds(stopped_at: float) -> None:
    """B127: also while a flush is under way."""
    worker = Worker(FakeMetricServer(SILENT))

    async with reporting(worker):
        await asyncio.sleep(stopped_at)

    assert asyncio.get_running_loop().time() == pytest.approx(stopped_at + 2)


async def test_the_last_flush_is_tried_although_one_is_under_way_that_hangs() -> None:
    worker = Worker(FakeMetricServer(SILENT, 200))

    async with reporting(worker):
        worker.add("a")
        await asyncio.sleep(31)
        worker.add("b")

    assert worker.server.ids() == ["b"]
    assert worker.server.taken[0]["dropped"] == 1


async def test_a_stop_lets_a_flush_end_that_is_under_way() -> None:
    worker = Worker(FakeMetricServer())

    async def slowly() -> None:
        await asyncio.sleep(1.5)

    async with reporting(worker, scrape_model=slowly):
        worker.add("a")
        await asyncio.sleep(31)

    assert worker.server.ids() == ["a"]


async def test_a_cancelled_flush_counts_what_it_had_taken() -> None:
    worker = Worker(FakeMetricServer(SILENT))
    running = asyncio.create_task(worker.reporter().run(asyncio.Event()))
    worker.add("a")
    await asyncio.sleep(31)

    running.cancel()
    await asyncio.wait([running])

    assert worker.buffer.dropped == 1


async def test_with_the_sink_off_nothing_is_sent_nor_lost_and_the_load_is_still_seen() -> None:
    worker = Worker(FakeMetricServer())

    async with reporting(worker, url=None):
        worker.add("a")
        await asyncio.sleep(31)
        assert worker.counted("model_kv_cache_usage_ratio") == 0.25
        assert worker.counted("queue_ready_messages") == 17

    assert worker.server.requests == []
    assert worker.counted("metric_records_dropped_total") == 0
    assert len(worker.buffer) == 0
