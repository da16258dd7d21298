"""An unmodified `openai` client works through the queue: a real gateway, a real worker, real servers between them."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.faults import model as fake
from tests.faults import wire
from tests.faults.model import FakeModel
from tests.faults.wire import Request
from tests.gateways import gateway
from tests.in_process import InProcess
from tests.integration.conftest import RunningWorker
from tests.waiting import eventually

CHAT: Any = [{"role": "user", "content": "hello"}]
SAMPLES = Path(__file__).parents[1] / "samples"
TOOLS = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "tiny",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"in": "Oslo"}'}}
                ],
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}


@asynccontextmanager
async def client_of(w: InProcess, **changes: str) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with (
        gateway(w.env, **changes) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=30) as client,
    ):
        yield client


async def test_chat_whole_and_streamed(running_worker: RunningWorker) -> None:
    w = await running_worker()
    async with client_of(w) as client:
        whole = await client.chat.completions.create(model="tiny", messages=CHAT)
        stream = await client.chat.completions.create(
            model="tiny", messages=CHAT, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]

    assert whole.choices[0].message.content == "tick tock"
    assert whole.usage is not None
    assert whole.usage.total_tokens == 5
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "tick tock"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 5


async def test_the_clients_own_helper_for_streams_puts_the_answer_together(
    running_worker: RunningWorker, model: FakeModel
) -> None:
    model.default = wire.answer(200, TOOLS)
    model.when_prompt_has('"stream"', fake.sse("tick", "tock"))
    w = await running_worker()
    async with client_of(w) as client, client.chat.completions.stream(model="tiny", messages=CHAT) as stream:
        final = await stream.get_final_completion()

    assert final.choices[0].message.content == "tick tock"


async def test_tool_calls_whole_and_streamed(running_worker: RunningWorker, model: FakeModel) -> None:
    """The stored answer of a stream is whole, and the client's stream is made of that."""
    model.default = wire.answer(200, TOOLS)
    streamed = (SAMPLES / "vllm-stream-tools.sse").read_bytes()
    model.when_prompt_has('"stream":true', wire.answer(200, streamed, {"Content-Type": "text/event-stream"}))
    w = await running_worker()
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    async with client_of(w) as client:
        whole = await client.chat.completions.create(model="tiny", messages=CHAT, tools=tools)
        async with client.chat.completions.stream(model="tiny", messages=CHAT, tools=tools) as stream:
            put_together = await stream.get_final_completion()

    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", '{"in": "Oslo"}')
    assert whole.choices[0].finish_reason == "tool_calls"
    (streamed_call,) = put_together.choices[0].message.tool_calls or []
    assert streamed_call.function.name == "get_weather"
    assert streamed_call.function.arguments.startswith("{")
    assert put_together.choices[0].finish_reason == "tool_calls"


async def test_completions_and_embeddings(running_worker: RunningWorker, model: FakeModel) -> None:
    text = {"id": "c", "object": "text_completion", "created": 1, "model": "tiny"}
    text["choices"] = [{"index": 0, "text": " a time", "logprobs": None, "finish_reason": "length"}]

    def decide(request: Request) -> wire.Behaviour | None:
        return wire.answer(200, text) if request.path == "/v1/completions" else None

    model.decide = decide
    w = await running_worker()
    async with client_of(w) as client:
        completion = await client.completions.create(model="tiny", prompt="once upon")
        embedding = await client.embeddings.create(model="tiny", input="hello", encoding_format="float")

    assert (completion.choices[0].text, completion.choices[0].finish_reason) == (" a time", "length")
    assert len(embedding.data[0].embedding) > 0
    assert {request.path for request in model.requests} == {"/v1/completions", "/v1/embeddings"}


async def test_models_are_those_of_the_workers(running_worker: RunningWorker) -> None:
    w = await running_worker(HF_MODEL_ID="people/model-7b")
    async with client_of(w, HF_MODEL_ID="") as client:

        async def there() -> list[str]:
            return [one.id async for one in client.models.list()]

        assert await eventually(there, within=10, what="a model in the list") == ["people/model-7b"]
        assert (await client.models.retrieve("people/model-7b")).id == "people/model-7b"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("none")


async def test_the_models_own_errors_are_the_clients(running_worker: RunningWorker, model: FakeModel) -> None:
    body = {"error": {"message": "max_tokens must be at least 1", "type": "BadRequestError", "code": 400}}
    model.next(wire.answer(400, body))
    w = await running_worker()
    async with client_of(w) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=0)

    assert "max_tokens must be at least 1" in str(refused.value)
    assert refused.value.response.headers["x-job-id"]
    assert len(model.requests) == 1


async def test_a_job_that_takes_too_long_is_named_is_not_sent_again_and_stays(
    running_worker: RunningWorker, model: FakeModel
) -> None:
    model.default = fake.ok(takes_s=1.5)
    w = await running_worker()
    async with client_of(w, GATEWAY_WAIT_S="0.3") as client:
        with pytest.raises(openai.InternalServerError) as late:
            await client.chat.completions.create(model="tiny", messages=CHAT)
        job_id = late.value.response.headers["x-job-id"]
        assert late.value.status_code == 504
        assert job_id in str(late.value)
        async with httpx.AsyncClient(base_url=str(client.base_url), trust_env=False, timeout=30) as http:
            view = (await http.get(f"jobs/{job_id}", params={"wait": 20})).json()

    assert view["status"] == "succeeded"
    assert len(model.requests) == 1


async def test_who_responds_later_gets_the_job(running_worker: RunningWorker) -> None:
    w = await running_worker()
    async with client_of(w) as client:
        answer = await client.chat.completions.with_raw_response.create(
            model="tiny", messages=CHAT, extra_headers={"Prefer": "respond-async"}
        )

        assert answer.status_code == 202
        async with httpx.AsyncClient(base_url=str(client.base_url), trust_env=False, timeout=30) as http:
            view = (await http.get(answer.headers["location"].removeprefix("/v1/"), params={"wait": 20})).json()
    assert view["status"] == "succeeded"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_hangs_up_stops_the_model(
    running_worker: RunningWorker, model: FakeModel, stream: bool
) -> None:
    """Its job is cancelled, and the worker closes the call."""
    model.default = fake.ok(takes_s=60)
    w = await running_worker()
    async with client_of(w) as client:
        asking = asyncio.create_task(client.chat.completions.create(model="tiny", messages=CHAT, stream=stream))
        await model.busy()

        asking.cancel()
        await asyncio.wait([asking])

        await eventually(lambda: model.in_flight == 0, within=10, what="the end of the call")
        await w.disposed("ack")


async def test_a_stream_whose_job_fails_late_ends_with_the_clients_error(
    running_worker: RunningWorker, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_worker.gateway.openai_api.FIRST_S", 0.05)

    async def late(exchange: wire.Exchange) -> None:
        await exchange.pause(0.5)
        await wire.answer(400, {"error": {"message": "too long for us"}})(exchange)

    model.default = late
    w = await running_worker()
    async with client_of(w) as client:
        begun = time.monotonic()
        stream = await client.chat.completions.create(model="tiny", messages=CHAT, stream=True)
        headers_after_s = time.monotonic() - begun
        with pytest.raises(openai.APIError, match="too long for us"):
            async for _ in stream:
                pass

    assert headers_after_s < 0.5
