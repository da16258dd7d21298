"""The seam of transforms, and the order in which several are asked. Pure.

Of requests: all are asked whether anything speaks against it, then the first that handles it makes the body; the first
error ends it. Of answers: each gets what the one before has made. Not here: which transforms there are (`making`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from inference_worker.errors import BadResponse
from inference_worker.messages import InferenceRequest, shown_id

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What is sent."""

    content: bytes
    content_type: str | None = None
    """In place of what the caller says, in any letter case; None for the payload as it is."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """The request cannot be sent, however often it is tried."""

    reason: str


class BodyTransform(Protocol):
    """Makes another body of some requests. Asked anew for each attempt; changes nothing of the request itself."""

    def validate(self, request: InferenceRequest) -> Unfit | None:
        """What speaks against a request, before anything is taken for it; None for one that is not its own."""

    def apply(self, request: InferenceRequest) -> Body | Unfit | None:
        """The body; None: it is not for this one."""


class AnswerTransform(Protocol):
    """Makes another answer of a good one, before it is stored."""

    def apply(self, request: InferenceRequest, body: bytes) -> bytes:
        """The body that is stored: JSON. `request` is as its caller wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transforms:
    """All of a process, in their order, by their names."""

    requests: Mapping[str, BodyTransform] = field(default_factory=dict)
    answers: Mapping[str, AnswerTransform] = field(default_factory=dict)

    def refused(self, request: InferenceRequest) -> Unfit | None:
        """The first that anything says against a request."""
        for name, transform in self.requests.items():
            try:
                unfit = transform.validate(request)
            except Exception as exc:  # noqa: BLE001  # A fault of its own must end this request, and no other.
                unfit = _fault(name, request, exc)
            if unfit is not None:
                return Unfit(f"the transform {name} refuses it: {unfit.reason}")
        return None

    def body(self, request: InferenceRequest) -> Body | Unfit:
        """What is sent: by default the payload, byte for byte."""
        for name, transform in self.requests.items():
            try:
                made = transform.apply(request)
            except Exception as exc:  # noqa: BLE001  # As above.
                made = _fault(name, request, exc)
            match made:
                case Unfit(reason=reason):
                    return Unfit(f"the transform {name} refuses it: {reason}")
                case Body():
                    return made
        return Body(content=request.payload)

    def answer(self, request: InferenceRequest, body: bytes) -> bytes:
        """What is stored of a good answer.

        Raises:
            BadResponse: a transform fails. What it was to take out must not be seen, so the answer is not stored.
        """
        for name, transform in self.answers.items():
            try:
                body = transform.apply(request, body)
            except Exception as exc:
                raise BadResponse(_fault(name, request, exc).reason) from exc
        return body


def _fault(name: str, request: InferenceRequest, exc: Exception) -> Unfit:
    log.warning("a transform failed", transform=name, request_id=shown_id(request.request_id), exc_info=exc)
    return Unfit(f"the transform {name} failed: {type(exc).__name__}")
