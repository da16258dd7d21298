"""Contract, section 1: `mock-model`, "an OpenAI-compatible model server with latency, token rate, streaming and fault
knobs", as a process: what its options and its orders over HTTP change. Its answers in detail: the unit tests.
"""

import json
import re
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.faults.processes import WorkerProcess
from tests.in_process import request_body
from tests.integration.conftest import RunningWorker
from tests.services import free_port

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def mock(folder: Path, *options: str) -> AsyncGenerator[httpx.AsyncClient]:
    """A process; at the end it is told to stop, and must end with 0."""
    port = free_port()
    command = (sys.executable, "-m", "inference_worker", "mock-model", "--port", str(port), *options)
    async with WorkerProcess({}, output=folder / "mock.log", command=command) as process:
        await process.ready(f"http://127.0.0.1:{port}/health")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=10) as client:
            yield client
        process.terminate()
        assert await process.wait(within=10) == 0, process.log


def say(text: str, **more: object) -> dict[str, object]:
    return {"model": "mock-model", "messages": [{"role": "user", "content": text}], **more}


async def test_it_needs_no_variable_and_answers_as_openai_does(tmp_path: Path) -> None:
    """Section 1: "Each command asks only for the variables that it uses": `mock-model` uses none."""
    async with mock(tmp_path, "--latency", "0", "--tokens-per-second", "0", "--model", "m-1") as client:
        listed = (await client.get("/v1/models")).json()
        chat = (await client.post(CHAT, json=say("a b c"))).json()
        completion = (await client.post("/v1/completions", json={"prompt": "a b"})).json()
        embedding = (await client.post("/v1/embeddings", json={"input": "a"})).json()
        streamed = (await client.post(CHAT, json=say("a b c", stream=True))).text

    assert listed["data"][0]["id"] == "m-1"
    assert chat["choices"][0]["message"]["content"].strip() == "a b c"
    assert chat["usage"]["total_tokens"] > 0
    assert completion["object"] == "text_completion"
    assert embedding["data"][0]["embedding"]
    assert len(re.findall(r"^data: \{", streamed, re.MULTILINE)) >= 3
    assert streamed.rstrip().endswith("data: [DONE]")


async def test_latency_and_token_rate_are_knobs(tmp_path: Path) -> None:
    """Section 1: "latency, token rate": 0.2 s to the first token, then 20 tokens a second. A bound from below only."""
    async with mock(tmp_path, "--latency", "0.2", "--tokens-per-second", "20") as client:
        answer = await client.post(CHAT, json=say("a b c d e", max_tokens=5))

    assert answer.elapsed.total_seconds() >= 0.2 + 4 / 20


async def test_faults_are_knobs_of_the_command_and_over_http(tmp_path: Path) -> None:
    """Section 1: "fault knobs": an option, an order, a header, a field of the payload."""
    async with mock(tmp_path, "--latency", "0", "--fault", json.dumps({"status": 503, "times": 1})) as client:
        statuses = [(await client.post(CHAT, json=say("a"))).status_code for _ in range(2)]
        await client.post("/mock/faults", json={"status": 429, "retry_after_s": 2})
        ordered = await client.post(CHAT, json=say("a"))
        await client.post("/mock/faults", json={"unhealthy": True})
        health = (await client.get("/health")).status_code
        await client.post("/mock/faults")
        headed = await client.post(CHAT, json=say("a"), headers={"x-mock-fault": json.dumps({"status": 500})})
        asked = await client.post(CHAT, json=say("a", mock={"status": 418}))
        for fault in ("drop", "cut", "half_body"):
            with pytest.raises(httpx.TransportError):
                await client.post(CHAT, json=say("a", mock={fault: True}))
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, json=say("a", mock={"hang": True}), timeout=0.3)
        healed = await client.post(CHAT, json=say("a"))

    assert statuses == [503, 200]
    assert (ordered.status_code, ordered.headers["Retry-After"], health) == (429, "2", 503)
    assert (headed.status_code, asked.status_code, healed.status_code) == (500, 418, 200)


async def test_a_fault_that_is_none_is_told_with_the_fields_there_are(tmp_path: Path) -> None:
    """A typing mistake must not look like a server without faults."""
    command = (sys.executable, "-m", "inference_worker", "mock-model", "--fault", '{"status": "often"}')
    async with WorkerProcess({}, output=tmp_path / "log", command=command) as process:
        assert await process.wait(within=10) == 2

    assert "retry_after_s" in process.log
    assert "Traceback" not in process.log


async def test_a_worker_retries_over_a_fault_of_the_mock(running_worker: RunningWorker, tmp_path: Path) -> None:
    """What the mock is for: the worker's own behaviour can be seen with it, here a call that is cut once."""
    async with mock(tmp_path, "--latency", "0") as client:
        w = await running_worker(MODEL_CONTAINER_URL=str(client.base_url).rstrip("/"), HF_MODEL_ID="mock-model")
        await client.post("/mock/faults", json={"cut": True, "times": 1})

        await w.publish(request_body("r", payload=say("hello")))

        await w.disposed("retry", "ack")
        assert (await w.seen()).result["attempt"] == 1
