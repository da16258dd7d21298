"""The transforms by themselves."""

import json

import pytest
from iw_system_prompt import SystemPrompt, WithoutReasoning, system_prompt

from inference_worker.extensions import TransformParts
from inference_worker.gates.parameters import Parameters
from inference_worker.messages import InferenceRequest
from inference_worker.transforms.chain import Body, Unfit

USER = {"role": "user", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}


def request(**payload: object) -> InferenceRequest:
    return InferenceRequest(
        request_id="a",
        received_at=0.0,
        timeout_s=60.0,
        deadline=60.0,
        payload=json.dumps(payload).encode(),
        endpoint="/v1/chat/completions",
        stream=False,
    )


def test_a_conversation_gets_the_prompt_and_keeps_the_rest() -> None:
    body = SystemPrompt("Be brief.").apply(request(model="m", messages=[USER]))

    assert isinstance(body, Body)
    assert json.loads(body.content) == {"model": "m", "messages": [SYSTEM, USER]}


@pytest.mark.parametrize("payload", [{"prompt": "x"}, {"messages": [SYSTEM, USER]}])
def test_what_has_none_or_its_own_is_left_alone(payload: dict[str, object]) -> None:
    assert SystemPrompt("Be brief.").apply(request(**payload)) is None


def test_a_conversation_that_is_none_is_refused() -> None:
    assert SystemPrompt("Be brief.").validate(request(messages="x")) == Unfit("messages is no list")


def test_reasoning_is_taken_out() -> None:
    answer = {"choices": [{"message": {"content": "<think>\nhm\n</think>\n4"}}, {"text": "5"}]}

    left = json.loads(WithoutReasoning().apply(request(), json.dumps(answer).encode()))

    assert left == {"choices": [{"message": {"content": "4"}}, {"text": "5"}]}


def test_the_prompt_is_needed() -> None:
    problems: list[str] = []

    system_prompt(TransformParts(given=Parameters({}, "p", problems), name="brief"))

    assert problems == ["p.prompt: is missing; accepted: a text"]
