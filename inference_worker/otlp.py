"""Spans, made by OpenTelemetry's SDK and sent to a collector over OTLP/HTTP by a thread of its own.

Loaded only where a collector is named. What the spans say is that of OpenTelemetry's conventions for messaging and for
generative AI; never a prompt, never an answer. Those of a delivery that has a route also say what llm-d-async's spans
say, by its rules: a failure that is tried again has a category, and is no error yet. Everything that the SDK reads for
itself (`OTEL_*`) is left to it.
"""

import asyncio
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Literal, Self
from urllib.parse import urlsplit

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Link, SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import Tracer as OtelTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from inference_worker.billing.cloudevents import operation
from inference_worker.disposition import Concluded, Failed, Interrupted, Malformed, NotStored, Outcome
from inference_worker.errors import BadResponse, ConfigurationError, ModelCut, ModelFailure, ModelGone, ModelSlow
from inference_worker.messages import InferenceRequest, public_id
from inference_worker.ports import Answer, Delivery, Route
from inference_worker.timing import stopped_within
from inference_worker.tracing import BAGGAGE, carried

log = structlog.get_logger(__name__)

LAST_S: Final = 2.0
"""How long the last spans may take once everything is settled. The sinks' last flushes run meanwhile."""

Attributes = dict[str, AttributeValue]
ErrorCategory = Literal["RATE_LIMIT", "SERVER_ERROR", "INVALID_REQ", "AUTH_ERROR", "PARSE_ERROR", "UNKNOWN"]
"""The peer's word for what went wrong; the first two may pass."""
CATEGORY: Final = "llm_d.async.error.category"
NO_IDS: Final[Mapping[str, str]] = {}
_w3c = TraceContextTextMapPropagator()
_SDK: Final = logging.getLogger("opentelemetry")
_QUERY: Final = re.compile(r"\?\S*")
"""Of a URL in an error's text: some collectors take their key there."""


class OtlpTracer:
    """A span for each delivery and each call. See `ports.Tracer`."""

    def __init__(
        self,
        provider: TracerProvider,
        *,
        system: str,
        model: str,
        model_url: Callable[[], str],
        queue_ids: Mapping[str, str] = NO_IDS,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """`system` names the broker, in the conventions' words. `end` stops what hangs at the end.

        `model` and `model_url` are those of the one model, for requests that name none and have no route; may be empty.
        `queue_ids` are by the names of queues; one without an id has its name.
        """
        self._provider = provider
        self._tracer: OtelTracer = provider.get_tracer("inference_worker")
        self._system = system
        self._model = model
        self._model_url = model_url
        self._queue_ids = queue_ids
        self._end = end

    def begin(self, delivery: Delivery) -> "DeliverySpan":
        """See `ports.Tracer`. The producer's span is the parent, of every attempt's span alike."""
        headers = carried(delivery.headers)
        attributes: Attributes = {
            "messaging.system": self._system,
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": delivery.queue,
            "messaging.message.body.size": len(delivery.body),
            "inference_worker.attempt": delivery.attempts,
            "inference_worker.redelivered": delivery.redelivered,
        }
        if delivery.message_id is not None:
            attributes["messaging.message.id"] = delivery.message_id
        if delivery.correlation_id is not None:
            attributes["messaging.message.conversation_id"] = delivery.correlation_id
        if delivery.route is not None:
            attributes |= self._peers(delivery)
        span = self._tracer.start_span(
            f"process {delivery.queue}",
            context=_w3c.extract(headers, context=Context()),
            kind=SpanKind.CONSUMER,
            attributes=attributes,
        )
        return DeliverySpan(self, span, headers.get(BAGGAGE), delivery)

    def begin_call(
        self, parent: OtelSpan, request: InferenceRequest, baggage: str | None, route: Route | None
    ) -> "ModelSpan":
        """A call to the model, on behalf of a delivery."""
        doing, model = operation(request.endpoint), request.model or self._model
        attributes: Attributes = {
            "gen_ai.operation.name": doing,
            **_said_of(model),
            **_server(self._model_url() if route is None else route.base_url),
        }
        if request.stream:
            attributes["gen_ai.request.stream"] = True
        if route is not None:
            attributes["gen_ai.request.id"] = public_id(request.request_id)
        span = self._tracer.start_span(
            f"{doing} {model}".rstrip(),
            context=set_span_in_context(parent, Context()),
            kind=SpanKind.CLIENT,
            attributes=attributes,
        )
        return ModelSpan(span, baggage, of_peer=route is not None)

    def re_enqueued(self, span: OtelSpan, delivery: Delivery) -> None:
        """A delivery went back unfinished, as at a stop: whoever has it next goes on with a trace of its own."""
        self._tracer.start_span(
            "re-enqueue",
            context=Context(),
            links=[Link(span.get_span_context())],
            attributes=self._peers(delivery),
        ).end()

    def _peers(self, delivery: Delivery) -> Attributes:
        said: Attributes = {
            "llm_d.async.queue.id": self._queue_ids.get(delivery.queue, delivery.queue),
            "llm_d.async.queue.name": delivery.queue,
            "llm_d.async.retry_count": delivery.attempts,
        }
        if delivery.request is not None:
            said |= {"gen_ai.request.id": public_id(delivery.request.request_id), **_said_of(delivery.request.model)}
        return said

    async def run(self, until: asyncio.Event) -> None:
        """See `ports.Tracer`."""
        await until.wait()
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def send_the_last() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # The loop was closed: nobody waits any more.
                loop.call_soon_threadsafe(sent.set)

        # The SDK waits half a minute for its thread. A daemon of ours waits in our stead, and ends with the process.
        threading.Thread(target=send_the_last, name="last spans", daemon=True).start()
        if not await stopped_within(sent, LAST_S):
            log.warning("the last spans could not be sent in time", within_s=LAST_S)
            self._end()


class DeliverySpan:
    """See `ports.Span`."""

    __slots__ = ("_baggage", "_delivery", "_span", "_tracer", "ids")

    def __init__(self, tracer: OtlpTracer, span: OtelSpan, baggage: str | None, delivery: Delivery) -> None:
        self._tracer = tracer
        self._span = span
        self._baggage = baggage
        self._delivery = delivery
        context = span.get_span_context()
        self.ids: Mapping[str, str] = {"trace_id": format_trace_id(context.trace_id)} if context.is_valid else {}

    def calling(self, request: InferenceRequest) -> "ModelSpan":
        """See `ports.Span`."""
        return self._tracer.begin_call(self._span, request, self._baggage, self._delivery.route)

    def settled(self, outcome: Outcome, how: str, *, request_id: str | None) -> None:
        """See `ports.Span`."""
        if request_id is not None:
            self._span.set_attribute("inference_worker.request_id", request_id)
        # A lost delivery whose result is stored is a lost one all the same: the message comes again.
        self._span.set_attribute("inference_worker.disposition", "lost" if how == "stored" else how)
        self._span.set_attribute("inference_worker.outcome", type(outcome).__name__)
        error = _error_of(outcome)
        if self._delivery.route is not None:
            if request_id is not None and self._delivery.request is None:
                self._span.set_attribute("gen_ai.request.id", request_id)
            if (category := category_of(outcome)) is not None:
                self._span.set_attribute(CATEGORY, category)
            if isinstance(outcome, Failed) and how == "retry":
                error = None
            if isinstance(outcome, Interrupted) and how == "requeue":
                self._tracer.re_enqueued(self._span, self._delivery)
        if error is not None:
            _fail(self._span, error)

    def failed(self, exc: BaseException) -> None:
        """See `ports.Span`."""
        _fail(self._span, type(exc).__qualname__)

    def end(self) -> None:
        """See `ports.Span`."""
        self._span.end()


class ModelSpan:
    """See `ports.CallSpan`."""

    __slots__ = ("_of_peer", "_span", "headers")

    def __init__(self, span: OtelSpan, baggage: str | None, *, of_peer: bool) -> None:
        self._span = span
        self._of_peer = of_peer
        headers: dict[str, str] = {} if baggage is None else {BAGGAGE: baggage}
        _w3c.inject(headers, context=set_span_in_context(span, Context()))
        self.headers: Mapping[str, str] = headers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None:
            _fail(self._span, kind.__qualname__)
        self._span.end()

    def ended(self, answer: Answer | ModelFailure | None, outcome: Outcome | None) -> None:
        """See `ports.CallSpan`."""
        error = _error_of_call(answer, outcome)
        if self._of_peer and (category := _category_of_call(answer, outcome)) is not None:
            self._span.set_attribute(CATEGORY, category)
            if category in PASSING:
                error = None
        if error is not None:
            _fail(self._span, error)
        if isinstance(answer, Answer):
            self._span.set_attribute("http.response.status_code", answer.status_code)
            if answer.ttft_s is not None:
                self._span.set_attribute("gen_ai.response.time_to_first_chunk", answer.ttft_s)
        if isinstance(outcome, Concluded) and outcome.usage is not None:
            self._span.set_attribute("gen_ai.usage.input_tokens", outcome.usage.input_tokens)
            self._span.set_attribute("gen_ai.usage.output_tokens", outcome.usage.output_tokens)
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", outcome.usage.cached_input_tokens)


def _said_of(model: str) -> Attributes:
    return {"gen_ai.request.model": model} if model else {}


def _server(url: str) -> Attributes:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return {"server.address": parts.hostname or "", "server.port": port}


def _fail(span: OtelSpan, error: str) -> None:
    span.set_attribute("error.type", error)
    span.set_status(StatusCode.ERROR)


def _error_of(outcome: Outcome) -> str | None:
    """The `error_code` of the reply, also where a retry is to prevent it; handing back is no error."""
    match outcome:
        case Concluded(reply=reply):
            return reply.error_code
        case Failed(fault=fault):
            return fault.name.lower()
        case Malformed():
            return "invalid_request"
        case NotStored():
            return "not_stored"
        case _:
            return None


def _error_of_call(answer: Answer | ModelFailure | None, outcome: Outcome | None) -> str | None:
    match answer:
        case None:
            return "cancelled"
        case ModelGone():
            return "gone"
        case ModelCut():
            return "cut"
        case ModelSlow():
            return "timeout"
        case BadResponse():
            return "bad_response"
        case ModelFailure():
            return type(answer).__name__
        case Answer(status_code=status) if status >= 400:
            return str(status)
        case Answer():
            return outcome.reply.error_code if isinstance(outcome, Concluded) else None


# ---------------------------------------------------------------- the peer's categories

PASSING: Final[frozenset[ErrorCategory]] = frozenset({"RATE_LIMIT", "SERVER_ERROR"})


def category_of(outcome: Outcome) -> ErrorCategory | None:
    """What went wrong with the call or the message; None where nothing did, or it was a matter of time or of a gate."""
    match outcome:
        case Failed(status_code=429):
            return "RATE_LIMIT"
        case Failed():
            return "SERVER_ERROR"
        case Malformed():
            return "INVALID_REQ"
        case Concluded(reply=reply):
            match reply.error_code:
                case "model_error":
                    return _category_of_status(reply.status_code)
                case "bad_response":
                    return "PARSE_ERROR"
                case "invalid_request" | "payload_unavailable":
                    return "INVALID_REQ"
                case "poison" | "retries_exhausted":
                    return "UNKNOWN"
    return None


def _category_of_call(answer: Answer | ModelFailure | None, outcome: Outcome | None) -> ErrorCategory | None:
    match answer:
        case None:
            return None
        case BadResponse(status_code=429):
            return "RATE_LIMIT"
        case BadResponse(status_code=int(status)) if status >= 500:
            return "SERVER_ERROR"
        case BadResponse():
            return "PARSE_ERROR"
        case ModelGone() | ModelCut():
            return "SERVER_ERROR"
        case ModelFailure():
            return "UNKNOWN"
        case Answer():
            return None if outcome is None else category_of(outcome)


def _category_of_status(status_code: int) -> ErrorCategory:
    match status_code:
        case 401 | 403:
            return "AUTH_ERROR"
        case 429:
            return "RATE_LIMIT"
        case _ if status_code >= 500:
            return "SERVER_ERROR"
        case _:
            return "INVALID_REQ"


# ---------------------------------------------------------------- the collector


def tracer(
    endpoint: str,
    *,
    ca_file: str | None,
    cert_file: str | None,
    key_file: str | None,
    identity: Mapping[str, str],
    system: str,
    model: str,
    model_url: Callable[[], str],
    queue_ids: Mapping[str, str] = NO_IDS,
) -> OtlpTracer:
    """A tracer that sends to `endpoint`, the whole URL. To be called inside a running loop.

    `identity` are attributes of the resource; those of OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME win.

    Raises:
        ConfigurationError: the SDK does not take one of its variables.
    """
    said = _Said(asyncio.get_running_loop())
    _SDK.handlers, _SDK.propagate = [said], False
    try:
        exporter = OTLPSpanExporter(
            endpoint, certificate_file=ca_file, client_certificate_file=cert_file, client_key_file=key_file
        )
        # The SDK's own end would be at the process's exit, and takes as long as it likes: ours is in `run`.
        provider = TracerProvider(
            resource=Resource.create(dict(identity)).merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        said.sending = True
        provider.add_span_processor(BatchSpanProcessor(_Told(exporter, said)))
    except (ValueError, RuntimeError) as exc:
        # It reads its variables for itself, so that what is wrong with them shows only here.
        raise ConfigurationError((f"OTEL_*: OpenTelemetry does not take a variable: {exc}",)) from exc
    return OtlpTracer(
        provider, system=system, model=model, model_url=model_url, queue_ids=queue_ids, end=exporter.shutdown
    )


class _Told(SpanExporter):
    """An exporter of which one hears once when it stops being able to send, and once when it can again."""

    def __init__(self, exporter: SpanExporter, said: "_Said") -> None:
        self._exporter = exporter
        self._said = said

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._said.why.clear()
        result = self._exporter.export(spans)
        self._said.sent(result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _Said(logging.Handler):
    """What the SDK logs, in our own words: a warning for each thing, once, and never what a header holds.

    It is told in the SDK's own thread, and tells the loop's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(logging.WARNING)
        self._loop = loop
        self.sending = False
        """Whether all is set up, so that what the exporter says is of sending."""
        self.why: deque[str] = deque(maxlen=2)
        """What was last said about sending: the reason, then that it was given up."""
        self._sends = True
        self._known: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Called by the standard library."""
        text = _QUERY.sub("?***", record.getMessage())[:300]
        if "header" in text.lower():  # The text quotes it.
            text = "OTEL_EXPORTER_OTLP_HEADERS: an entry is no NAME=VALUE, percent-encoded, or cannot be sent"
        if self.sending and record.name.startswith("opentelemetry.exporter"):
            self.why.append(text)
        elif text not in self._known and len(self._known) < 100:
            self._known.add(text)
            self._on_loop(lambda: log.warning("OpenTelemetry warns", text=text))

    def sent(self, ok: bool) -> None:
        """A batch was taken, or was not and is lost."""
        if ok == self._sends:
            return
        self._sends, why = ok, "; ".join(self.why)
        if ok:
            self._on_loop(lambda: log.info("the collector takes spans again"))
        else:
            self._on_loop(lambda: log.warning("spans are lost: the collector does not take them", reason=why))

    def _on_loop(self, tell: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # It is closed: nobody reads any more.
            self._loop.call_soon_threadsafe(tell)
