"""Traces from the producer to the model, by a collector in this process; and a collector that fails hurts nobody."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from structlog.typing import EventDict

from tests.faults.collector import Collector
from tests.faults.model import FakeModel
from tests.faults.processes import WorkerProcess
from tests.in_process import Broker, InProcess, request_body
from tests.integration.conftest import RunningWorker
from tests.services import free_port
from tests.waiting import eventually
from tests.worker_env import queue_of, worker_env

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
SECRET = "t0p-secret"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK sends every 5 s unless told otherwise."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


@pytest.fixture
async def collector() -> AsyncGenerator[Collector]:
    async with Collector() as made:
        yield made


def lines(worker: InProcess, event: str) -> list[EventDict]:
    return [line for line in worker.at.log if event in line["event"]]


async def test_producer_worker_and_model_are_one_trace(
    running_worker: RunningWorker, collector: Collector, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the environment says of the SDK holds: its name, its attributes, its headers."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=prod,service.version=9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-key={SECRET}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    worker = await running_worker(OTEL_EXPORTER_OTLP_ENDPOINT=f"{collector.url}/")
    await worker.publish(
        request_body(),
        headers={"traceparent": PARENT, "tracestate": "k=v", "baggage": "user=7"},
        message_id="m-1",
        correlation_id="c-1",
    )
    await worker.stored("r")
    call, process = await collector.received(2)

    assert (process.trace_id, process.parent_id) == (TRACE, PARENT[36:52])
    assert (call.trace_id, call.parent_id) == (TRACE, process.span_id)
    (asked,) = model.requests
    assert asked.headers["traceparent"] == f"00-{TRACE}-{call.span_id}-01"
    assert (asked.headers["tracestate"], asked.headers["baggage"]) == ("k=v", "user=7")
    assert process.name == f"process {worker.queue}"
    assert process.attributes["messaging.system"] == "rabbitmq"
    assert process.attributes["messaging.message.id"] == "m-1"
    assert process.attributes["messaging.message.conversation_id"] == "c-1"
    assert process.attributes["inference_worker.disposition"] == "ack"
    assert (call.name, call.attributes["server.port"]) == ("chat tiny", model.port)
    assert (call.attributes["gen_ai.usage.input_tokens"], call.attributes["gen_ai.usage.output_tokens"]) == (3, 2)
    assert process.resource["service.name"] == "inference-worker"
    assert process.resource["service.instance.id"] == "replica-1"
    assert process.resource["inference_worker.deployment_id"] == worker.env["DEPLOYMENT_ID"]
    assert process.resource["deployment.environment.name"] == "prod"
    assert process.resource["service.version"] == "9"
    assert collector.requests[0].headers["x-key"] == SECRET
    assert [line["trace_id"] for line in lines(worker, "request")] == [TRACE]


@pytest.mark.parametrize("over", ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"])
async def test_the_last_spans_are_sent_before_the_end(
    over: str, running_worker: RunningWorker, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    path = "/v1/traces" if "TRACES" in over else ""
    worker = await running_worker(**{over: collector.url + path})
    await worker.publish(request_body())
    await worker.stored("r")
    assert not collector.requests

    await worker.stop()

    assert len(collector.spans) == 2


async def test_without_a_collector_the_producers_context_reaches_the_model_of_every_attempt(
    running_worker: RunningWorker, model: FakeModel
) -> None:
    model.next(lambda exchange: exchange.answer(503))
    worker = await running_worker(MODEL_RETRY_STATUS_CODES="503", RABBITMQ_MAX_RETRIES="2")
    await worker.publish(
        request_body(), headers={"traceparent": PARENT, "tracestate": bytearray(b"k=v"), "baggage": "user=7"}
    )
    await worker.disposed("retry", "ack")

    sent = [[one.headers.get(name) for name in ("traceparent", "tracestate", "baggage")] for one in model.requests]
    assert sent == [[PARENT, "k=v", "user=7"]] * 2
    assert [line["trace_id"] for line in lines(worker, "request")] == [TRACE] * 2


async def test_what_is_no_context_is_not_passed_on(running_worker: RunningWorker, model: FakeModel) -> None:
    worker = await running_worker()
    await worker.publish(request_body(), headers={"traceparent": "garbage", "tracestate": "k=v", "baggage": 7})
    await worker.stored("r")

    (asked,) = model.requests
    assert not {"traceparent", "tracestate", "baggage"} & asked.headers.keys()


async def test_a_collector_that_refuses_is_told_of_once_and_once_more_when_it_takes_spans_again(
    running_worker: RunningWorker, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector.mode = "status"
    worker = await running_worker(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
    for number in range(3):
        await worker.publish(request_body(f"r-{number}"))
        await worker.stored(f"r-{number}")
        await collector.asked(number + 1)
    await eventually(lambda: lines(worker, "spans are lost"), within=5, what="the warning")
    collector.mode = "ok"
    await worker.publish(request_body("last"))
    await collector.received(1)
    await eventually(lambda: lines(worker, "takes spans again"), within=5, what="the news")

    (warning,) = lines(worker, "spans are lost")
    assert "403" in warning["reason"]
    assert len(lines(worker, "takes spans again")) == 1


@pytest.mark.parametrize(
    ("header", "told"),
    [
        pytest.param(SECRET, "OpenTelemetry warns", id="that is none"),
        pytest.param(f"authorization={SECRET}%0A2", "spans are lost", id="that cannot be sent"),
    ],
)
async def test_a_wrong_header_is_told_of_and_not_logged(
    header: str, told: str, running_worker: RunningWorker, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", header)
    worker = await running_worker(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
    await worker.publish(request_body())
    await eventually(lambda: lines(worker, told), within=10, what="the warning")

    (warning,) = lines(worker, told)
    assert "OTEL_EXPORTER_OTLP_HEADERS" in str(warning)
    assert SECRET not in str(worker.at.log)


async def test_what_the_sdk_says_of_its_variables_is_told(
    running_worker: RunningWorker, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "maybe")
    worker = await running_worker(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)

    said = [str(line["text"]) for line in lines(worker, "OpenTelemetry warns")]
    assert [text for text in said if "soon" in text]
    assert [text for text in said if "maybe" in text]


async def test_the_key_in_a_collectors_url_is_not_logged(
    running_worker: RunningWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    url = f"http://127.0.0.1:{free_port()}/v1/traces?key={SECRET}"
    worker = await running_worker(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=url)
    await worker.publish(request_body())
    await eventually(lambda: lines(worker, "spans are lost"), within=10, what="the warning")

    (warning,) = lines(worker, "spans are lost")
    assert "Connection refused" in warning["reason"]
    assert SECRET not in str(worker.at.log)


@pytest.mark.parametrize("how", ["refused", "silent", "failing"])
async def test_a_collector_that_is_away_costs_no_request_and_no_time_at_the_end(
    how: str,
    rabbitmq_url: str,
    redis_url: str,
    deployment_id: str,
    model: FakeModel,
    broker: Broker,
    collector: Collector,
    tmp_path: Path,
) -> None:
    """As a process: its exit must not wait for a thread of the SDK's."""
    if how == "refused":
        await collector.refuse()
    collector.mode = "silent" if how == "silent" else "status"
    port = free_port()
    env = worker_env(
        rabbitmq_url=rabbitmq_url,
        redis_url=redis_url,
        model_url=model.url,
        deployment_id=deployment_id,
        http_port=port,
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_BSP_SCHEDULE_DELAY="50",
        RABBITMQ_PREFETCH="8",
    )
    async with WorkerProcess(env, output=tmp_path / "log") as process:
        await process.ready(f"http://127.0.0.1:{port}/readyz")
        for number in range(20):
            await broker.publish(queue_of(env), json.dumps(request_body(f"r-{number}")).encode())
        await model.called(20)
        await eventually(lambda: process.log.count('"disposition":"ack"') == 20, within=10, what="20 answers")
        if how != "refused":
            await collector.asked()
        else:
            await asyncio.sleep(0.2)
        process.terminate()
        told_at = time.monotonic()
        assert await process.wait(within=3 + 10) == 0, process.log

    assert time.monotonic() - told_at < 6, "nothing was in flight, so that only the last spans are waited for"
    assert "Traceback" not in process.log
    await broker.delete(queue_of(env), env["INFERENCE_DLQ"])
    await broker.delete_exchange(env["INFERENCE_DLX"])
