"""Transforms of other packages, held to what they may return: anything else is a fault, and no body.

What a fault of a transform costs is the same for all (`chain.py`): its request, and no other.
"""

import re
from typing import Final

from inference_worker.faults import as_exceptions
from inference_worker.messages import InferenceRequest
from inference_worker.transforms.chain import AnswerTransform, Body, BodyTransform, Unfit

_HEADER: Final = re.compile("[ -~]*")


class GuardedBodyTransform:
    """See `chain.BodyTransform`."""

    def __init__(self, transform: BodyTransform) -> None:
        self._transform = transform

    def validate(self, request: InferenceRequest) -> Unfit | None:
        """See `chain.BodyTransform`."""
        with as_exceptions():
            said = self._transform.validate(request)
        if said is not None and not isinstance(said, Unfit):
            raise TypeError(f"validate returns a {type(said).__name__}; accepted: Unfit or None")
        return said

    def apply(self, request: InferenceRequest) -> Body | Unfit | None:
        """See `chain.BodyTransform`."""
        with as_exceptions():
            made = self._transform.apply(request)
        if made is not None and not isinstance(made, Body | Unfit):
            raise TypeError(f"apply returns a {type(made).__name__}; accepted: Body, Unfit or None")
        if isinstance(made, Body) and not isinstance(made.content, bytes):
            raise TypeError(f"apply returns a body of type {type(made.content).__name__}; accepted: bytes")
        if isinstance(made, Body) and not (made.content_type is None or _HEADER.fullmatch(made.content_type)):
            raise ValueError("apply returns a content type that no header can carry")
        return made


class GuardedAnswerTransform:
    """See `chain.AnswerTransform`."""

    def __init__(self, transform: AnswerTransform) -> None:
        self._transform = transform

    def apply(self, request: InferenceRequest, body: bytes) -> bytes:
        """See `chain.AnswerTransform`."""
        with as_exceptions():
            made = self._transform.apply(request, body)
        if not isinstance(made, bytes):
            raise TypeError(f"apply returns a {type(made).__name__}; accepted: bytes")
        return made
