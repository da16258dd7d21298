"""The trace that a request belongs to: read from its message, and passed on to the model as it came.

This is all that is done without a collector. What makes spans is `otlp.py`, which is loaded only where there is one.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Final, Self

from inference_worker.disposition import Outcome
from inference_worker.errors import ModelFailure
from inference_worker.messages import InferenceRequest
from inference_worker.ports import NO_HEADERS, Answer, Delivery

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
BAGGAGE: Final = "baggage"

LONGEST_STATE: Final = 512
"""What every party to a trace must pass on; a longer `tracestate` is left out, the trace goes on."""

LONGEST_BAGGAGE: Final = 8192
_PARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_PARENT_CHARS: Final = 55
_VISIBLE: Final = re.compile(r"[ -~\t]+")


def carried(headers: Mapping[str, object]) -> Mapping[str, str]:
    """The W3C trace context and baggage among a message's headers, fit to be HTTP headers. What is none is left out.

    Source: W3C Trace Context, 3.2 and 3.3; W3C Baggage, 3.3.
    """
    found: dict[str, str] = {}
    parent = _text(headers.get(TRACEPARENT), LONGEST_STATE)
    if parent is not None and _is_parent(parent):
        found[TRACEPARENT] = parent
        if (state := _text(headers.get(TRACESTATE), LONGEST_STATE)) is not None:
            found[TRACESTATE] = state
    if (baggage := _text(headers.get(BAGGAGE), LONGEST_BAGGAGE)) is not None:
        found[BAGGAGE] = baggage
    return found or NO_HEADERS


def _is_parent(text: str) -> bool:
    """A later version than 00 may go on after a dash."""
    if _PARENT.match(text) is None:
        return False
    return len(text) == _PARENT_CHARS or (text[:2] != "00" and text[_PARENT_CHARS] == "-")


def _text(value: object, longest: int) -> str | None:
    """What a producer's library wrote, as text or as bytes."""
    if isinstance(value, bytes | bytearray):
        value = value.decode("ascii", "replace")
    if not isinstance(value, str) or len(value) > longest or _VISIBLE.fullmatch(value) is None:
        return None
    return value.strip(" \t") or None


class Passing:
    """A delivery, and its calls, of which no span is made. See `ports.Span` and `ports.CallSpan`."""

    __slots__ = ("headers", "ids")

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers
        parent = headers.get(TRACEPARENT)
        self.ids: Mapping[str, str] = NO_HEADERS if parent is None else {"trace_id": parent[3:35]}

    def calling(self, request: InferenceRequest) -> Self:
        """See `ports.Span`."""
        return self

    def settled(self, outcome: Outcome, how: str, *, request_id: str | None) -> None:
        """See `ports.Span`."""

    def failed(self, exc: BaseException) -> None:
        """See `ports.Span`."""

    def end(self) -> None:
        """See `ports.Span`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was begun."""

    def ended(self, answer: Answer | ModelFailure | None, outcome: Outcome | None) -> None:
        """See `ports.CallSpan`."""


UNTRACED: Final = Passing(NO_HEADERS)
"""A delivery that belongs to no trace."""


class PassingOn:
    """No spans: what came with a message goes on to the model. See `ports.Tracer`."""

    def begin(self, delivery: Delivery) -> Passing:
        """See `ports.Tracer`."""
        headers = delivery.headers
        if TRACEPARENT not in headers and BAGGAGE not in headers:
            return UNTRACED
        return Passing(carried(headers))

    async def run(self, until: asyncio.Event) -> None:
        """See `ports.Tracer`."""


PASSING_ON: Final = PassingOn()
