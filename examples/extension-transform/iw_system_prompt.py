"""Transforms: a system prompt before a conversation that has none, and an answer without the model's reasoning."""

import json
import re
from dataclasses import dataclass

from inference_worker.extensions import TransformParts
from inference_worker.messages import InferenceRequest
from inference_worker.transforms.chain import Body, Unfit


@dataclass(frozen=True, slots=True)
class SystemPrompt:
    """See `chain.BodyTransform`."""

    prompt: str

    def validate(self, request: InferenceRequest) -> Unfit | None:
        """A conversation is a list; of other requests nothing is said."""
        messages = json.loads(request.payload).get("messages", [])
        return None if isinstance(messages, list) else Unfit("messages is no list")

    def apply(self, request: InferenceRequest) -> Body | Unfit | None:
        """The payload stays as it was: each attempt begins with it again."""
        payload = json.loads(request.payload)
        messages = payload.get("messages")
        if not messages or messages[0].get("role") == "system":
            return None
        payload["messages"] = [{"role": "system", "content": self.prompt}, *messages]
        return Body(content=json.dumps(payload).encode())


class WithoutReasoning:
    """See `chain.AnswerTransform`."""

    def apply(self, request: InferenceRequest, body: bytes) -> bytes:
        """What stands between <think> and </think> is nobody's business."""
        answer = json.loads(body)
        for choice in answer.get("choices", []):
            message = choice.get("message")
            if message and isinstance(message.get("content"), str):
                message["content"] = re.sub(r"<think>.*?</think>\s*", "", message["content"], flags=re.DOTALL)
        return json.dumps(answer).encode()


def system_prompt(parts: TransformParts) -> SystemPrompt:
    """The factory that the entry point names."""
    return SystemPrompt(parts.given.text("prompt"))


def without_reasoning(parts: TransformParts) -> WithoutReasoning:
    """The factory that the entry point names; it has no parameters."""
    return WithoutReasoning()
