"""From a request to what is sent, and from an answer to what is stored: the model's name, then the transforms. Pure.

By default both pass as the bytes that came. Not here: where it is sent (`addressing`), and what an answer means.
"""

from dataclasses import dataclass, field, replace
from typing import Final

from inference_worker.errors import BadResponse
from inference_worker.messages import InferenceRequest
from inference_worker.ports import Answer, Route
from inference_worker.transforms.chain import Body, Transforms, Unfit
from inference_worker.transforms.model_name import error_as_asked, named_as_asked, sent_as, without_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """How the requests of a pool are changed on their way, and their answers on the way back."""

    transforms: Transforms = field(default_factory=Transforms)

    def refused(self, request: InferenceRequest) -> Unfit | None:
        """What speaks against a request, before anything is taken for it."""
        return self.transforms.refused(request)

    def body(self, request: InferenceRequest, route: Route | None) -> Body | Unfit:
        """What is sent of a request."""
        if route is not None and route.model:
            request = replace(request, payload=sent_as(request.payload, route.model))
        return self.transforms.body(request)

    def answer(self, request: InferenceRequest, route: Route | None, answer: Answer) -> Answer:
        """What its caller sees of an answer.

        Raises:
            BadResponse: a transform fails.
        """
        model = route.model if route is not None else ""
        if answer.status_code >= 400:
            return replace(answer, body=error_as_asked(request, answer.body, model)) if model else answer
        if not answer.body:
            return answer
        body = named_as_asked(request, answer.body) if model else answer.body
        body = self.transforms.answer(request, body)
        return answer if body is answer.body else replace(answer, body=body)

    def failure(self, request: InferenceRequest, route: Route | None, failed: BadResponse) -> BadResponse:
        """What its caller sees of an answer that is none, such as an error within a stream."""
        if route is None or not route.model:
            return failed
        return BadResponse(without_name(request, str(failed), route.model), failed.status_code)


AS_IT_CAME: Final = Shaping()
