"""The mock answers as vLLM does where clients look, and what it reports of itself is true."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from inference_worker.mock_answers import embedding
from inference_worker.mock_model import Fault, MockModel, MockModelConfig, run_mock_model
from inference_worker.scraping import ModelLoad, NotRead, model_load, scrape_model
from tests.waiting import eventually

pytestmark = pytest.mark.real_loop

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


@asynccontextmanager
async def mock(**config: Any) -> AsyncGenerator[tuple[MockModel, httpx.AsyncClient], None]:
    model = MockModel(MockModelConfig(**config), now=lambda: 7.5)
    async with model.serving() as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=10) as client:
        yield model, client


def say(text: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **fields}


async def load(client: httpx.AsyncClient) -> ModelLoad:
    seen = await scrape_model(client, str(client.base_url.join("/metrics")), within_s=5)
    assert not isinstance(seen, NotRead)
    return seen


async def reaches(model: MockModel, *, running: int, waiting: int) -> None:
    await eventually(
        lambda: (model.running, model.waiting) == (running, waiting),
        within=1,
        what=f"{running} run and {waiting} wait",
        every=0.002,
    )


def chunks(text: str) -> list[Any]:
    *events, done = text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_a_chat_says_the_last_message_back() -> None:
    async with mock(model="m") as (_, client):
        body = say("hello big world")
        body["messages"] = [{"role": "system", "content": "be kind"}, *body["messages"]]  # type: ignore[misc] # a list
        answer = await client.post(CHAT, json=body, headers={"X-Request-Id": "r1"})

    assert answer.json() == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello big world"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {"prompt_tokens": 5, "total_tokens": 8, "completion_tokens": 3, "prompt_tokens_details": None},
    }


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        pytest.param({"max_tokens": 2}, "a b ", "length", id="cut at max_tokens"),
        pytest.param({"max_completion_tokens": 3, "max_tokens": 1}, "a b c", "stop", id="the newer name wins"),
        pytest.param({"max_tokens": 5, "ignore_eos": True}, "a b c a b ", "length", id="going on and on"),
        pytest.param({"min_tokens": 4}, "a b c a ", "stop", id="at least min_tokens"),
    ],
)
async def test_the_number_of_tokens_is_what_was_asked_for(fields: dict[str, object], text: str, reason: str) -> None:
    async with mock() as (_, client):
        (choice,) = (await client.post(CHAT, json=say("a b c", **fields))).json()["choices"]

    assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)


@pytest.mark.parametrize(
    ("content", "text"),
    [("", "mock"), (None, "mock"), ([{"type": "text", "text": "a"}, {"type": "image_url"}, {"text": "b"}], "a b")],
)
async def test_content_may_be_parts_or_nothing(content: object, text: str) -> None:
    async with mock() as (_, client):
        answer = await client.post(CHAT, json={"messages": [{"role": "user", "content": content}]})

    assert answer.json()["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("a b", ["a b"]), (["a", "b"], ["a", "b"]), ([5, 6], ["5 6"]), ([[5], [6, 7]], ["5", "6 7"])],
)
async def test_completions_answer_each_prompt(prompt: object, texts: list[str]) -> None:
    async with mock() as (_, client):
        answer = (await client.post(COMPLETIONS, json={"prompt": prompt})).json()

    assert answer["object"] == "text_completion"
    assert [choice["text"] for choice in answer["choices"]] == texts


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("pace", [0.0, 500.0])
async def test_a_stream_says_the_same_with_usage_where_it_is_asked_for(path: str, pace: float) -> None:
    body = {**say("a b c", n=2, max_tokens=2), "prompt": "a b c", "stream": True}
    async with mock(tokens_per_second=pace) as (_, client):
        plain = await client.post(path, json=body)
        counted = await client.post(path, json={**body, "stream_options": {"include_usage": True}})
        whole = (await client.post(path, json={**body, "stream": False})).json()

    assert plain.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert not any("usage" in chunk for chunk in chunks(plain.text))
    *events, last = chunks(counted.text)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for index in (0, 1):
        mine = [c for event in events for c in event["choices"] if c["index"] == index]
        said = "".join(c["text"] if path == COMPLETIONS else c["delta"]["content"] for c in mine)
        assert (said, mine[-1]["finish_reason"]) == ("a b ", "length")


async def test_embeddings_are_the_same_for_the_same_text() -> None:
    async with mock() as (_, client):
        answer = (await client.post(EMBEDDINGS, json={"input": ["a b", "c", "a b"], "dimensions": 20})).json()

    first, other, again = (entry["embedding"] for entry in answer["data"])
    assert first == again == embedding("a b", 20)
    assert first != other
    assert sum(number * number for number in first) == pytest.approx(1.0, abs=1e-6)
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5, "completion_tokens": 0}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        pytest.param(CHAT, b"{", 400, None, id="no JSON"),
        pytest.param(CHAT, b'{"messages":3}', 400, None, id="not messages"),
        pytest.param(CHAT, b"{}", 400, "body.messages", id="no messages"),
        pytest.param(COMPLETIONS, b"{}", 400, "body.prompt", id="no prompt"),
        pytest.param(EMBEDDINGS, b"{}", 400, "body.input", id="no input"),
        pytest.param(COMPLETIONS, b'{"prompt":"a","max_tokens":0}', 400, "max_tokens", id="no tokens"),
        pytest.param(COMPLETIONS, b'{"prompt":"a","n":0}', 400, "n", id="no choice"),
        pytest.param(COMPLETIONS, b'{"prompt":"a b c d e f g h i j k"}', 400, "input_tokens", id="too long"),
        pytest.param(COMPLETIONS, b'{"prompt":"a","stream_options":{}}', 400, None, id="options of no stream"),
        pytest.param(COMPLETIONS, b'{"prompt":"a","model":"x"}', 404, "model", id="another model"),
    ],
)
async def test_errors_are_in_vllms_shape(path: str, body: bytes, status: int, param: str | None) -> None:
    async with mock(strict_model=True, max_model_len=10) as (_, client):
        answer = await client.post(path, content=body)

    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (answer.status_code, error["code"], error["param"]) == (status, status, param)


async def test_a_key_is_asked_for_where_there_is_one() -> None:
    async with mock(api_key="k") as (_, client):
        without = await client.post(CHAT, json=say("a"))
        having = await client.post(CHAT, json=say("a"), headers={"Authorization": "Bearer k"})
        health = await client.get("/health")

    assert (without.status_code, having.status_code, health.status_code) == (401, 200, 200)
    assert "api_key" not in repr(MockModelConfig(api_key="k"))


async def test_the_model_is_listed() -> None:
    async with mock(model="m", max_model_len=9) as (_, client):
        (model,) = (await client.get("/v1/models")).json()["data"]

    assert (model["id"], model["max_model_len"]) == ("m", 9)


async def test_requests_beyond_the_places_wait_in_turn_and_beyond_the_queue_are_refused() -> None:
    config = {"max_num_seqs": 2, "max_queued": 1, "latency_s": 0.2, "kv_capacity_tokens": 10}
    async with mock(**config) as (model, client):
        calls = [asyncio.ensure_future(client.post(CHAT, json=say(f"a {n}"))) for n in range(3)]
        await reaches(model, running=2, waiting=1)

        seen = await load(client)
        refused = await client.post(CHAT, json=say("a"))
        answers = await asyncio.gather(*calls)

        assert seen == ModelLoad(kv_cache_usage=0.4, requests_running=2, requests_waiting=1)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "Service Unavailable")
        assert [a.json()["choices"][0]["message"]["content"] for a in answers] == ["a 0", "a 1", "a 2"]
        assert await load(client) == ModelLoad(kv_cache_usage=0.0, requests_running=0, requests_waiting=0)
        text = (await client.get("/metrics")).text
    assert 'vllm:prompt_tokens_total{engine="0",model_name="mock-model"} 6.0' in text
    assert 'vllm:generation_tokens_total{engine="0",model_name="mock-model"} 6.0' in text
    assert 'vllm:request_success_total{engine="0",model_name="mock-model",finished_reason="stop"} 3.0' in text
    assert (
        'vllm:admission_rejections_total{engine="0",model_name="mock-model",reason="max_num_queued_reqs"} 1.0' in text
    )


async def test_what_there_is_no_room_for_can_be_answered_as_a_gateway_that_sheds_does() -> None:
    async with mock(max_num_seqs=1, max_queued=0, latency_s=0.2, busy_status=429) as (model, client):
        call = asyncio.ensure_future(client.post(CHAT, json=say("a")))
        await reaches(model, running=1, waiting=0)

        refused = await client.post(CHAT, json=say("a"))

        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "Too Many Requests")
        assert model.rejections == 1
        assert (await call).status_code == 200


async def test_the_cache_fills_while_tokens_are_written() -> None:
    """Two choices of 40 tokens and a prompt of 2, where 100 fit."""
    async with mock(tokens_per_second=100, kv_capacity_tokens=100) as (model, client):
        call = asyncio.ensure_future(client.post(CHAT, json=say("a b", max_tokens=40, ignore_eos=True, n=2)))
        await eventually(lambda: model.running == 1, within=2, what="it runs")

        async def half_full() -> bool:
            return ((await load(client)).kv_cache_usage or 0) > 0.5

        await eventually(half_full, within=2, what="the cache fills")
        assert ((await load(client)).kv_cache_usage or 0) <= 0.82
        assert (await call).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["who runs first", "who waits first"])
async def test_a_client_that_goes_away_frees_its_place(stream: bool, order: tuple[int, int]) -> None:
    async with mock(max_num_seqs=1, tokens_per_second=10) as (model, client):
        long = say("a", max_tokens=500, ignore_eos=True, stream=stream)
        calls = []
        for waiting in (0, 1):
            calls.append(asyncio.ensure_future(client.post(CHAT, json=long)))
            await reaches(model, running=1, waiting=waiting)

        calls[order[0]].cancel()

        await reaches(model, running=1, waiting=0)
        calls[order[1]].cancel()
        await reaches(model, running=0, waiting=0)
        await asyncio.wait(calls)
        assert model.aborted == 2
        assert (await client.post(CHAT, json=say("b", max_tokens=1))).status_code == 200


async def test_a_place_that_was_given_to_who_leaves_goes_to_the_next() -> None:
    """In the moment between being called and coming; the clients' answer is nobody's concern here."""
    model = MockModel(MockModelConfig(max_num_seqs=1))
    answer = SimpleNamespace(prompt_tokens=1, longest=1, choices=[None])
    came: list[int] = []

    async def one(number: int, until: asyncio.Event) -> None:
        async with model._place(answer):  # type: ignore[arg-type] # as much of an answer as a place needs
            came.append(number)
            await until.wait()
        if number == 0:
            tasks[1].cancel()  # Its turn has come, and it has not been told yet.

    first = asyncio.Event()
    tasks = [asyncio.ensure_future(one(0, first)), *(asyncio.ensure_future(one(n, asyncio.Event())) for n in (1, 2))]
    await asyncio.sleep(0)

    first.set()

    await eventually(lambda: came == [0, 2], within=1, what="the third has its place")
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert model._taken == 0


async def test_places_are_taken_in_the_order_of_arrival() -> None:
    async with mock(max_num_seqs=1, latency_s=0.2) as (model, client):
        done: list[int] = []

        async def one(number: int) -> None:
            await client.post(CHAT, json=say("a"))
            done.append(number)

        calls = []
        for number in range(4):
            calls.append(asyncio.ensure_future(one(number)))
            await reaches(model, running=1, waiting=number)
        await asyncio.wait(calls)

    assert done == [0, 1, 2, 3]


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("how", ["config", "header", "payload", "order"])
async def test_a_fault_is_asked_for_in_four_ways(how: str) -> None:
    fault = {"status": 429, "retry_after_s": 2}
    async with mock(**({"fault": Fault(status=429, retry_after_s=2)} if how == "config" else {})) as (_, client):
        if how == "order":
            assert (await client.post("/mock/faults", json=fault)).json() == fault
        body = say("a", **({"mock": fault} if how == "payload" else {}))
        answer = await client.post(
            CHAT, json=body, headers={"x-mock-fault": json.dumps(fault)} if how == "header" else {}
        )

    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "2")


async def test_a_fault_for_a_number_of_requests_heals_and_an_empty_order_heals_at_once() -> None:
    async with mock(fault=Fault(status=500, times=2)) as (_, client):
        seen = [(await client.post(CHAT, json=say("a"))).status_code for _ in range(3)]
        await client.post("/mock/faults", json={"status": 501})
        seen.append((await client.post(EMBEDDINGS, json={"input": "a"})).status_code)
        await client.post("/mock/faults")
        seen.append((await client.post(EMBEDDINGS, json={"input": "a"})).status_code)
        seen.append((await client.post("/mock/faults", json={"status": "x"})).status_code)

    assert seen == [500, 500, 200, 501, 200, 400]


async def test_an_unhealthy_mock_still_answers() -> None:
    async with mock(fault=Fault(unhealthy=True)) as (_, client):
        assert (await client.get("/health")).status_code == 503
        assert (await client.post(CHAT, json=say("a"))).status_code == 200


@pytest.mark.parametrize("path", [CHAT, EMBEDDINGS])
@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        pytest.param(Fault(drop=True), httpx.RemoteProtocolError, id="dropped"),
        pytest.param(Fault(cut=True), httpx.RemoteProtocolError, id="cut after the headers"),
        pytest.param(Fault(half_body=True), httpx.RemoteProtocolError, id="half a body"),
        pytest.param(Fault(hang=True), httpx.ReadTimeout, id="hanging"),
        pytest.param(Fault(delay_s=5.0), httpx.ReadTimeout, id="late"),
    ],
)
async def test_an_answer_can_go_wrong(path: str, fault: Fault, seen: type[Exception]) -> None:
    async with mock(fault=fault) as (model, client):
        with pytest.raises(seen):
            await client.post(path, json={**say("a b c"), "input": "a b c"}, timeout=0.3)

        await eventually(lambda: model.running == 0, within=1, what="the place is free")


async def test_a_stream_can_be_cut_in_the_middle() -> None:
    async with mock(fault=Fault(cut=True)) as (_, client):
        request = client.build_request("POST", CHAT, json=say("a b c d", stream=True))
        response = await client.send(request, stream=True)
        texts = response.aiter_text()
        seen = await anext(texts)
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(texts)
        await response.aclose()

    assert '"content":"a "' in seen
    assert '"content":"d"' not in seen


async def test_a_mock_serves_until_it_is_told_to_stop() -> None:
    until = asyncio.Event()
    running = asyncio.ensure_future(run_mock_model(MockModelConfig(), "127.0.0.1", 0, until))
    await asyncio.sleep(0.05)
    assert not running.done()

    until.set()

    async with asyncio.timeout(2):
        await running


def test_a_mocks_metrics_are_read_as_vllms() -> None:
    assert model_load("") == ModelLoad()
