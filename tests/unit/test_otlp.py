"""What the spans say, by an exporter in memory: OpenTelemetry's conventions for messaging and generative AI."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id
from structlog.testing import capture_logs

from inference_worker.errors import BadResponse, ConfigurationError, ModelCut, ModelGone, ModelSlow
from inference_worker.otlp import OtlpTracer, tracer
from inference_worker.ports import Answer, Delivery
from tests.unit.worker_kit import FakeModel, Site, Worker, body, running
from tests.waiting import eventually

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PRODUCER = "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{PRODUCER}-01"
SECRETS = ("the prompt", "the answer")


class Traced:
    """A worker in memory whose spans are kept."""

    def __init__(self) -> None:
        self.site = Site()
        self.model = FakeModel()
        self._kept = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._kept))

    def worker(self, **options: Any) -> Worker:
        made = Worker(self.site, self.model, **options)
        made.listener._tracer = OtlpTracer(
            self.provider, system="rabbitmq", model="org/tiny", model_url=lambda: "http://model:8000/base"
        )
        return made

    async def send(
        self,
        headers: Mapping[str, object] | None = None,
        *,
        request_id: str = "a",
        sent: bytes | None = None,
        settled: int = 1,
        **options: Any,
    ) -> list[ReadableSpan]:
        """The spans of one message, in the order of their ends."""
        worker = self.worker(**options)
        async with running(worker):
            async with self.site.broker.connect() as producer:
                await producer.publish(sent or body(request_id), message_id="m-1", headers=headers)
            await eventually(lambda: len(worker.settled) == settled, within=60, what="its settlements")
        return self.spans

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._kept.get_finished_spans())


@pytest.fixture
async def traced() -> Traced:
    return Traced()


def about(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def error(span: ReadableSpan) -> object:
    """Its `error.type`; it and the status say the same."""
    assert (span.status.status_code is StatusCode.ERROR) is ("error.type" in about(span))
    return about(span).get("error.type")


def ids(span: ReadableSpan) -> tuple[str, str]:
    assert span.context is not None
    return format_trace_id(span.context.trace_id), format_span_id(span.context.span_id)


# ---------------------------------------------------------------- one trace


async def test_producer_delivery_call_and_model_are_one_trace(traced: Traced) -> None:
    call, process = await traced.send({"traceparent": PARENT.encode(), "tracestate": "k=v", "baggage": "user=7"})

    assert process.parent is not None
    assert (ids(process)[0], format_span_id(process.parent.span_id)) == (TRACE, PRODUCER)
    assert call.parent is not None
    assert (ids(call)[0], format_span_id(call.parent.span_id)) == ids(process)
    assert traced.model.headers == [
        {"traceparent": f"00-{TRACE}-{ids(call)[1]}-01", "tracestate": "k=v", "baggage": "user=7"}
    ]


@pytest.mark.parametrize("came", [None, {"traceparent": "garbage"}, {"traceparent": 7}])
async def test_a_message_without_a_trace_begins_one(traced: Traced, came: Mapping[str, object] | None) -> None:
    with capture_logs() as log:
        call, process = await traced.send(came)

    assert process.parent is None
    (headers,) = traced.model.headers
    # The last two digits: sampled, and that the trace's id is random.
    assert headers == {"traceparent": f"00-{ids(process)[0]}-{ids(call)[1]}-03"}
    (line,) = [line for line in log if line["event"] == "request"]
    assert line["trace_id"] == ids(process)[0]


async def test_a_trace_that_is_not_recorded_is_passed_on_as_such(traced: Traced) -> None:
    spans = await traced.send({"traceparent": f"00-{TRACE}-{PRODUCER}-00"})

    assert spans == []
    (headers,) = traced.model.headers
    assert headers["traceparent"].startswith(f"00-{TRACE}-")
    assert headers["traceparent"].endswith("-00")


async def test_with_the_sdk_disabled_the_producers_context_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    traced = Traced()

    spans = await traced.send({"traceparent": PARENT})

    assert spans == []
    assert traced.model.headers == [{"traceparent": PARENT}]


async def test_every_attempt_is_a_child_of_the_producers_span(traced: Traced) -> None:
    traced.model.failures = [ModelCut("cut")]

    *_, last = spans = await traced.send({"traceparent": PARENT}, settled=2)

    processes = [span for span in spans if span.kind is SpanKind.CONSUMER]
    assert [about(span)["inference_worker.attempt"] for span in processes] == [0, 1]
    assert [about(span)["inference_worker.disposition"] for span in processes] == ["retry", "ack"]
    assert [span.parent.span_id for span in processes if span.parent] == [int(PRODUCER, 16)] * 2
    assert error(processes[0]) == "cut"
    assert error(last) is None


# ---------------------------------------------------------------- what they say


async def test_the_span_of_a_delivery_speaks_of_the_message(traced: Traced) -> None:
    sent = body()

    _, process = await traced.send(sent=sent)

    assert (process.name, process.kind) == ("process memory", SpanKind.CONSUMER)
    assert about(process) == {
        "messaging.system": "rabbitmq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "memory",
        "messaging.message.id": "m-1",
        "messaging.message.body.size": len(sent),
        "inference_worker.request_id": "a",
        "inference_worker.attempt": 0,
        "inference_worker.redelivered": False,
        "inference_worker.disposition": "ack",
        "inference_worker.outcome": "Concluded",
    }
    assert error(process) is None


async def test_a_correlation_id_is_the_conversation(traced: Traced) -> None:
    delivery = Delivery(
        body=b"",
        attempts=0,
        queue="q",
        message_id=None,
        redelivered=True,
        receipt=None,
        lost=asyncio.Event(),
        correlation_id="c-1",
    )

    traced.worker().listener._tracer.begin(delivery).end()

    (span,) = traced.spans
    assert about(span)["messaging.message.conversation_id"] == "c-1"
    assert "messaging.message.id" not in about(span)


async def test_the_span_of_a_call_speaks_of_the_model(traced: Traced) -> None:
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    traced.model.answer = Answer(status_code=200, reason="OK", body=json.dumps({"usage": usage}).encode(), ttft_s=0.25)

    call, _ = await traced.send()

    assert (call.name, call.kind) == ("chat org/tiny", SpanKind.CLIENT)
    assert about(call) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "org/tiny",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.time_to_first_chunk": 0.25,
        "server.address": "model",
        "server.port": 8000,
        "http.response.status_code": 200,
    }
    assert error(call) is None


async def test_a_streamed_call_says_so(traced: Traced) -> None:
    call, _ = await traced.send(sent=body(payload=b'{"stream":true}'))

    assert about(call)["gen_ai.request.stream"] is True


async def test_no_span_has_a_prompt_or_an_answer(traced: Traced) -> None:
    traced.model.failures = [
        Answer(status_code=400, reason="Bad", body=b'{"error":{"message":"the prompt is bad"}}'),
    ]
    traced.model.answer = Answer(status_code=200, reason="OK", body=b'{"text":"the answer"}')

    await traced.send(sent=body("a", payload=b'{"prompt":"the prompt"}'))
    spans = await traced.send(sent=body("b", payload=b'{"prompt":"the prompt"}'))

    assert len(spans) == 4
    told = "".join(span.to_json() for span in spans)
    assert not [secret for secret in SECRETS if secret in told]


@pytest.mark.parametrize(
    ("came", "of_call", "of_delivery"),
    [
        pytest.param(ModelGone("refused"), "gone", "gone", id="nobody there"),
        pytest.param(ModelCut("half"), "cut", "cut", id="cut"),
        pytest.param(ModelSlow("slow"), "timeout", "slow", id="too slow"),
        pytest.param(BadResponse("too large"), "bad_response", "bad_response", id="unusable"),
        pytest.param(Answer(status_code=429, reason="", body=b""), "429", "status", id="a status that is tried again"),
        pytest.param(Answer(status_code=400, reason="", body=b"{}"), "400", "model_error", id="the model's error"),
        pytest.param(Answer(status_code=200, reason="", body=b"<p>"), "bad_response", "bad_response", id="no JSON"),
    ],
)
async def test_what_went_wrong_has_a_name(
    traced: Traced, came: Exception | Answer, of_call: str, of_delivery: str
) -> None:
    traced.model.failures = [came]

    call, process = await traced.send(retry_statuses=frozenset({429}), max_retries=0)

    assert (error(call), error(process)) == (of_call, of_delivery)
    assert about(call).get("http.response.status_code") == (came.status_code if isinstance(came, Answer) else None)


async def test_what_is_no_request_has_a_span_too(traced: Traced) -> None:
    (process,) = await traced.send(sent=b"no")

    assert error(process) == "invalid_request"
    assert about(process)["inference_worker.disposition"] == "dead_letter"


async def test_a_call_that_is_closed_is_an_error_of_the_call_and_handing_back_is_none(traced: Traced) -> None:
    traced.model.takes_s = 100.0
    worker = traced.worker(grace_s=1.0)
    async with running(worker):
        await traced.site.publish(body())
        await worker.model.begun.wait()

    call, process = traced.spans
    assert (error(call), error(process)) == ("cancelled", None)
    assert about(process)["inference_worker.disposition"] == "requeue"


async def test_a_fault_of_ours_ends_its_span(traced: Traced) -> None:
    worker = traced.worker()
    worker.settle_fails = [ZeroDivisionError("a bug")]
    async with running(worker):
        await traced.site.publish(body())
        await eventually(lambda: len(traced.spans) >= 2, within=60, what="its spans")

    process = traced.spans[1]
    assert error(process) == "ZeroDivisionError"


async def test_a_call_that_breaks_for_a_fault_of_ours_ends_its_span(traced: Traced) -> None:
    traced.model.failures = [ZeroDivisionError("a bug")]
    worker = traced.worker()
    async with running(worker):
        await traced.site.publish(body())
        await eventually(lambda: len(traced.spans) >= 2, within=60, what="its spans")

    call, process = traced.spans[:2]
    assert (error(call), error(process)) == ("ZeroDivisionError", "ZeroDivisionError")


async def test_a_delivery_that_is_lost_says_so(traced: Traced) -> None:
    traced.model.takes_s = 5.0
    worker = traced.worker()
    async with running(worker):
        await traced.site.publish(body())
        await worker.model.begun.wait()
        worker.cut()
        await eventually(lambda: traced.spans[1:], within=60, what="its spans")

    assert about(traced.spans[1])["inference_worker.disposition"] == "lost"


# ---------------------------------------------------------------- the collector


async def test_a_variable_that_the_sdk_does_not_take_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")

    with pytest.raises(ConfigurationError, match=r"OTEL_.*max_queue_size"):
        tracer(
            "http://127.0.0.1:4318/v1/traces",
            ca_file=None,
            cert_file=None,
            key_file=None,
            identity={},
            system="rabbitmq",
            model="m",
            model_url=lambda: "http://model",
        )


def test_the_sdk_is_not_loaded_where_no_collector_is_named() -> None:
    """Nor anything that sends. (The API alone comes with FastAPI, the SDK's metrics with redis.)"""
    senders = ("opentelemetry.sdk.trace", "opentelemetry.exporter", "requests", "inference_worker.otlp")
    code = f"import sys, inference_worker.cli; print([name for name in sys.modules if name.startswith({senders})])"

    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert said.strip() == "[]"
