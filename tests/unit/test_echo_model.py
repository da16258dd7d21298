"""The model inside the worker: what it answers, and that a call takes its latency and nothing more."""

import asyncio
import json
from typing import Any

import pytest

from inference_worker import echo_model, mock_answers
from inference_worker.echo_model import EchoModel
from inference_worker.errors import ModelSlow
from inference_worker.messages import answer_of
from inference_worker.ports import Answer
from tests.unit.conftest import VirtualTimeLoop

CHAT = "/v1/chat/completions"


async def asked(
    payload: object, endpoint: str = CHAT, *, latency_s: float = 0.05, timeout_s: float = 60.0, stream: bool = False
) -> Answer:
    raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return await EchoModel(latency_s=latency_s, model="tiny").infer(
        endpoint=endpoint, payload=raw, stream=stream, request_id="r", timeout_s=timeout_s
    )


def read(answer: Answer) -> Any:
    return json.loads(answer.body)


async def test_a_chat_is_answered_with_its_last_message_and_the_tokens_are_counted() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one two three"}]
    answer = await asked({"messages": messages})

    said = read(answer)
    assert answer.status_code == 200
    assert said["object"] == "chat.completion"
    assert said["model"] == "tiny"
    assert said["choices"][0]["message"] == {"role": "assistant", "content": "one two three"}
    assert said["choices"][0]["finish_reason"] == "stop"
    assert (said["usage"]["prompt_tokens"], said["usage"]["completion_tokens"]) == (5, 3)
    assert answer_of(answer.body)[1] is not None, "the worker finds the usage in the body, and bills it"


async def test_a_completion_is_answered_with_its_prompt_and_keeps_to_max_tokens() -> None:
    said = read(await asked({"prompt": "one two three", "max_tokens": 2}, "/v1/completions"))

    assert said["object"] == "text_completion"
    assert said["choices"][0]["text"] == "one two "
    assert said["choices"][0]["finish_reason"] == "length"


async def test_embeddings_are_the_same_for_the_same_text() -> None:
    said = read(await asked({"input": ["a", "b", "a"]}, "/v1/embeddings"))

    first, second, third = (one["embedding"] for one in said["data"])
    assert first == third != second
    assert said["usage"]["total_tokens"] == 3


async def test_a_stream_is_answered_as_it_is_put_together() -> None:
    payload = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
    payload["stream_options"] = {"include_usage": True}

    said = read(await asked(payload, stream=True))

    assert said["object"] == "chat.completion"
    assert said["choices"][0]["message"]["content"] == "hello"
    assert said["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("payload", "endpoint", "status"),
    [
        pytest.param({}, CHAT, 400, id="a chat without messages"),
        pytest.param({"messages": "hello"}, CHAT, 400, id="messages that are none"),
        pytest.param(b"no JSON", CHAT, 400, id="no JSON"),
        pytest.param({"messages": [{"content": "a"}], "n": 0}, CHAT, 400, id="no answer wanted"),
        pytest.param({"messages": [{"content": "a"}]}, "/v1/embeddings", 400, id="embeddings without an input"),
        pytest.param({"prompt": "a"}, "/generate", 404, id="an endpoint that it does not know"),
    ],
)
async def test_what_it_cannot_answer_is_refused_as_a_model_server_does(
    payload: object, endpoint: str, status: int
) -> None:
    answer = await asked(payload, endpoint)

    assert answer.status_code == status
    assert read(answer)["error"]["code"] == status


@pytest.mark.parametrize("latency_s", [0.0, 0.005, 2.0])
async def test_a_call_takes_its_latency_whatever_is_asked(latency_s: float) -> None:
    begun = asyncio.get_running_loop().time()
    await asked({"messages": [{"role": "user", "content": "word " * 1000}]}, latency_s=latency_s)

    assert asyncio.get_running_loop().time() - begun == pytest.approx(latency_s, abs=1e-6)


async def test_making_the_answer_is_a_part_of_the_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a benchmark would measure the mock."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)

    def slow_read(payload: bytes) -> mock_answers.Asked:
        loop._virtual.now += 0.003
        return mock_answers.read(payload)

    monkeypatch.setattr(echo_model, "read", slow_read)
    begun = loop.time()
    await asked({"messages": [{"role": "user", "content": "a"}]}, latency_s=0.005)

    assert loop.time() - begun == pytest.approx(0.005, abs=1e-6)


async def test_a_call_whose_time_is_shorter_than_the_latency_ends_when_it_is_over() -> None:
    begun = asyncio.get_running_loop().time()
    with pytest.raises(ModelSlow):
        await asked({"messages": [{"role": "user", "content": "a"}]}, latency_s=5.0, timeout_s=1.0)

    assert asyncio.get_running_loop().time() - begun == pytest.approx(1.0)


async def test_a_cancelled_call_ends_at_once() -> None:
    call = asyncio.create_task(asked({"messages": [{"role": "user", "content": "a"}]}, latency_s=3600.0))
    await asyncio.sleep(0.1)
    call.cancel()

    with pytest.raises(asyncio.CancelledError):
        await call
    assert asyncio.get_running_loop().time() < 3600
