"""What the spans say, by an exporter in memory: OpenTelemetry's conventions for messaging and generative AI."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id
from structlog.testing import capture_logs

from inference_worker.disposition import Concluded, Hold, Malformed, NotStored, Outcome, Token
from inference_worker.errors import BadResponse, ConfigurationError, ModelCut, ModelGone, ModelSlow
from inference_worker.message_processor import Job
from inference_worker.messages import ErrorCode, InferenceRequest
from inference_worker.otlp import OtlpTracer, category_of, tracer
from inference_worker.ports import Answer, Delivery, Route
from tests.store_contract import failure
from tests.unit.worker_kit import FakeModel, Site, Worker, body, now, running
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


def ended(error_code: ErrorCode, status_code: int) -> Concluded:
    return Concluded(reply=failure(error_code=error_code, status_code=status_code), hold=Hold("a", Token("t")))


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


# ---------------------------------------------------------------- of requests of the peer's


def routed(metadata: dict[str, str] | None = None, *, attempts: int = 0, request_id: str = "a") -> Delivery:
    """A delivery as a queue of llm-d-async's gives it: read, with its metadata, and with a way to go."""
    request = InferenceRequest(
        request_id=request_id,
        received_at=now(),
        timeout_s=60.0,
        deadline=now() + 60.0,
        payload=b"{}",
        endpoint="/v1/completions",
        stream=False,
        metadata=metadata or {},
        model="org/large",
    )
    return Delivery(
        body=b"{}",
        attempts=attempts,
        queue="requests:chat",
        message_id=request_id,
        redelivered=False,
        receipt=None,
        lost=asyncio.Event(),
        headers=request.metadata,
        request=request,
        route=Route(
            base_url="http://gateway:8080", path="/v1/completions", headers={"x-llm-d-inference-objective": "o"}
        ),
    )


async def of_peer(
    traced: Traced, delivery: Delivery, how: str = "ack", *, stop: bool = False, **options: Any
) -> list[ReadableSpan]:
    """The spans of one delivery, in the order of their ends."""
    worker = traced.worker(**options)
    worker.listener._tracer = OtlpTracer(
        traced.provider, system="redis", model="", model_url=lambda: "", queue_ids={"requests:chat": "chat"}
    )
    job = Job(delivery, worker.listener._tracer.begin(delivery))
    if stop:
        asyncio.get_running_loop().call_later(1.0, worker.processor.interrupt)
    outcome = await worker.processor.process(job)
    worker.processor.forget(job)
    job.span.settled(outcome, how, request_id="a")
    job.span.end()
    return traced.spans


CATEGORY = "llm_d.async.error.category"


async def test_the_spans_say_what_the_peers_say_without_error_on_success_case_304(traced: Traced) -> None:
    call, process = await of_peer(traced, routed(attempts=2))

    said = about(process)
    assert {name: value for name, value in said.items() if name.startswith(("llm_d.", "gen_ai."))} == {
        "llm_d.async.queue.id": "chat",
        "llm_d.async.queue.name": "requests:chat",
        "llm_d.async.retry_count": 2,
        "gen_ai.request.id": "a",
        "gen_ai.request.model": "org/large",
    }
    assert (said["inference_worker.attempt"], said["messaging.destination.name"]) == (2, "requests:chat")
    assert (about(call)["gen_ai.request.id"], about(call)["gen_ai.request.model"]) == ("a", "org/large")
    assert (about(call)["server.address"], about(call)["server.port"]) == ("gateway", 8080)
    assert call.name == "text_completion org/large"
    assert error(process) is error(call) is None
    assert CATEGORY not in about(call)


async def test_a_queue_without_an_id_has_its_name(traced: Traced) -> None:
    tracer = OtlpTracer(traced.provider, system="redis", model="", model_url=lambda: "")

    tracer.begin(replace(routed(), request=None)).end()

    (process,) = traced.spans
    assert about(process)["llm_d.async.queue.id"] == "requests:chat"
    assert "gen_ai.request.id" not in about(process)


@pytest.mark.parametrize(
    ("came", "category"),
    [
        pytest.param(Answer(status_code=429, reason="", body=b"{}"), "RATE_LIMIT", id="a 429"),
        pytest.param(Answer(status_code=500, reason="", body=b"{}"), "SERVER_ERROR", id="a 500"),
        pytest.param(ModelGone("refused"), "SERVER_ERROR", id="nobody there"),
        pytest.param(BadResponse("", 429), "RATE_LIMIT", id="a 429 inside an answer"),
        pytest.param(BadResponse("", 503), "SERVER_ERROR", id="a 503 inside an answer"),
    ],
)
async def test_what_is_tried_again_has_a_category_and_is_no_error_case_304(
    traced: Traced, came: Exception | Answer, category: str
) -> None:
    traced.model.failures = [came]

    call, process = await of_peer(traced, routed(), "retry", retry_statuses=frozenset({429, 500, 503}))

    assert (about(call)[CATEGORY], error(call)) == (category, None)
    assert (about(process)[CATEGORY], error(process)) == (
        "SERVER_ERROR" if isinstance(came, BadResponse) else category,
        None,
    )


@pytest.mark.parametrize(
    ("came", "category", "of_delivery"),
    [
        pytest.param(Answer(status_code=400, reason="", body=b"{}"), "INVALID_REQ", "model_error", id="a refusal"),
        pytest.param(Answer(status_code=401, reason="", body=b"{}"), "AUTH_ERROR", "model_error", id="no key"),
        pytest.param(Answer(status_code=200, reason="", body=b"<p>"), "PARSE_ERROR", "bad_response", id="no JSON"),
        pytest.param(BadResponse("too large"), "PARSE_ERROR", "bad_response", id="unusable"),
    ],
)
async def test_what_ends_a_request_is_an_error_with_a_category_case_304(
    traced: Traced, came: Exception | Answer, category: str, of_delivery: str
) -> None:
    traced.model.failures = [came]

    call, process = await of_peer(traced, routed())

    assert (about(call)[CATEGORY], about(process)[CATEGORY]) == (category, category)
    assert error(call) is not None
    assert error(process) == of_delivery


@pytest.mark.parametrize(
    ("outcome", "category"),
    [
        pytest.param(Malformed(reason="no", reply=None), "INVALID_REQ", id="no request"),
        pytest.param(ended("model_error", 503), "SERVER_ERROR", id="a 503 that is not tried again"),
        pytest.param(ended("model_error", 429), "RATE_LIMIT", id="a 429 that is not tried again"),
        pytest.param(ended("payload_unavailable", 410), "INVALID_REQ", id="no payload"),
        pytest.param(ended("poison", 500), "UNKNOWN", id="poison"),
        pytest.param(ended("expired", 408), None, id="too late"),
        pytest.param(ended("gate_dropped", 429), None, id="dropped by a gate"),
        pytest.param(NotStored(), None, id="not stored"),
    ],
)
def test_a_category_says_what_was_wrong_with_the_request_or_its_call(outcome: Outcome, category: str | None) -> None:
    assert category_of(outcome) == category


async def test_too_slow_is_of_no_known_category(traced: Traced) -> None:
    traced.model.failures = [ModelSlow("slow")]

    call, _ = await of_peer(traced, routed(), "retry")

    assert (about(call)[CATEGORY], error(call)) == ("UNKNOWN", "timeout")


async def test_what_goes_back_at_shutdown_has_a_linked_span_of_another_trace_case_304_306(traced: Traced) -> None:
    traced.model.takes_s = 100.0

    _, again, process = await of_peer(traced, routed({"traceparent": PARENT}), "requeue", stop=True)

    assert again.name == "re-enqueue"
    assert again.parent is None
    assert [(format_trace_id(link.context.trace_id), format_span_id(link.context.span_id)) for link in again.links] == [
        ids(process)
    ]
    assert ids(again)[0] != ids(process)[0] == TRACE
    assert about(again)["llm_d.async.queue.name"] == "requests:chat"
    assert error(process) is error(again) is None


async def test_a_delivery_without_a_route_has_none_when_it_goes_back(traced: Traced) -> None:
    traced.model.takes_s = 100.0

    spans = await of_peer(traced, replace(routed(), route=None), "requeue", stop=True)

    assert [span.kind for span in spans] == [SpanKind.CLIENT, SpanKind.CONSUMER]
    assert not [name for span in spans for name in about(span) if name.startswith("llm_d.")]


async def test_the_metadatas_trace_goes_on_to_the_gateway_case_305(traced: Traced) -> None:
    metadata = {"traceparent": PARENT, "tracestate": "k=v", "baggage": "user=7", "userid": "u"}

    call, process = await of_peer(traced, routed(metadata))

    assert process.parent is not None
    assert (ids(process)[0], format_span_id(process.parent.span_id)) == (TRACE, PRODUCER)
    assert call.parent is not None
    assert (ids(call)[0], format_span_id(call.parent.span_id)) == ids(process)
    (headers,) = traced.model.headers
    assert headers["traceparent"] == f"00-{TRACE}-{ids(call)[1]}-01"
    assert (headers["tracestate"], headers["baggage"]) == ("k=v", "user=7")
    assert headers["x-llm-d-inference-objective"] == "o"


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
