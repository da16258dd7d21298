"""An OpenTelemetry collector that takes spans over OTLP/HTTP, and fails as told."""

import gzip
from dataclasses import dataclass
from typing import Literal

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from tests.faults import wire
from tests.faults.wire import Exchange, HttpServer, Request
from tests.waiting import eventually


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A span as it came."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for the first of a trace."""
    attributes: dict[str, object]
    resource: dict[str, object]


class Collector(HttpServer):
    """`POST /v1/traces`."""

    def __init__(self, *, port: int | None = None) -> None:
        super().__init__(port=port)
        self.mode: Literal["ok", "status", "silent"] = "ok"
        self.requests: list[Request] = []
        self.spans: list[Seen] = []
        """Of the batches that were taken."""

    async def received(self, spans: int, *, within: float = 15.0) -> list[Seen]:
        """Wait until this many spans have been taken."""
        await eventually(lambda: len(self.spans) >= spans, within=within, what=f"{spans} spans")
        return self.spans

    async def asked(self, times: int = 1, *, within: float = 15.0) -> None:
        """Wait until this many batches have come, whatever they were answered."""
        await eventually(lambda: len(self.requests) >= times, within=within, what=f"{times} batches")

    async def answer(self, exchange: Exchange) -> None:
        request = exchange.request
        self.requests.append(request)
        if request.path != "/v1/traces":
            await exchange.answer(404)
        elif self.mode == "silent":
            await wire.silent()(exchange)
        elif self.mode == "status":
            await exchange.answer(403)
        else:
            self.spans += _spans(request)
            await exchange.answer(200, b"", {"Content-Type": "application/x-protobuf"})


def _spans(request: Request) -> list[Seen]:
    raw = gzip.decompress(request.body) if request.headers.get("content-encoding") == "gzip" else request.body
    return [
        Seen(
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            attributes=dict(map(_attribute, span.attributes)),
            resource=dict(map(_attribute, batch.resource.attributes)),
        )
        for batch in ExportTraceServiceRequest.FromString(raw).resource_spans
        for scope in batch.scope_spans
        for span in scope.spans
    ]


def _attribute(pair: KeyValue) -> tuple[str, object]:
    kind = pair.value.WhichOneof("value")
    return pair.key, getattr(pair.value, kind) if kind else None
