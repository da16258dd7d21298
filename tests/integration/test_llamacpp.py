"""The main job against a model server that is not ours: llama.cpp's own HTTP server with a model made on the spot."""

import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from redis.asyncio import Redis as RedisClient

from tests.conservation import assert_conserved, collect, publish
from tests.faults.processes import WorkerProcess
from tests.faults.sinks import BillingServer, MetricServer
from tests.llamacpp.server import LlamaServer, llama_server
from tests.services import free_port
from tests.waiting import eventually
from tests.worker_env import queue_of, worker_env

__all__ = ["llama_server"]


@asynccontextmanager
async def a_worker(env: dict[str, str], port: int, output: Path) -> AsyncGenerator[WorkerProcess]:
    async with WorkerProcess(env, output=output) as worker:
        await worker.ready(f"http://127.0.0.1:{port}/readyz")
        yield worker
        worker.terminate()
        assert await worker.wait(within=15) == 0, worker.log


def chat(request_id: str, *, timeout_s: float = 60, **payload: object) -> dict[str, object]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "the theory of the thing"}], "max_tokens": 12}
    return {
        "request_id": request_id,
        "received_at": time.time(),
        "timeout_s": timeout_s,
        "payload": body | {"ignore_eos": True, "seed": 7, "temperature": 0} | payload,
    }


async def test_llama_cpp_answers_through_the_queue_streamed_and_not(
    llama_server: LlamaServer,
    rabbitmq_url: str,
    redis_url: str,
    redis_client: RedisClient,
    deployment_id: str,
    tmp_path: Path,
) -> None:
    port = free_port()
    async with BillingServer() as billing, MetricServer() as metrics:
        env = worker_env(
            rabbitmq_url=rabbitmq_url,
            redis_url=redis_url,
            model_url=llama_server.url,
            deployment_id=deployment_id,
            http_port=port,
            RABBITMQ_PREFETCH="4",
            CROESUS_HOST=billing.url,
            METRIC_SERVER_URL=metrics.url,
            METRIC_SERVER_SERVICE_TOKEN="s3cret",
        )
        plain = [f"{deployment_id}-plain-{n}" for n in range(8)]
        streamed = [f"{deployment_id}-stream-{n}" for n in range(8)]
        async with a_worker(env, port, tmp_path / "worker.log") as worker:
            assert "not the expected one" not in worker.log
            await publish(rabbitmq_url, queue_of(env), *[chat(i) for i in plain])
            await publish(rabbitmq_url, queue_of(env), *[chat(i, stream=True) for i in streamed])
            ids = plain + streamed

            async def all_done() -> bool:
                return await redis_client.exists(*[f"infer_resp:{i}" for i in ids]) == len(ids)

            await eventually(all_done, within=60, what="all results are stored")
            await billing.billed(len(ids))
            await eventually(lambda: _load_seen(metrics), within=10, what="the model's load is reported")
        stored = {i: json.loads(await redis_client.get(f"infer_resp:{i}") or b"") for i in ids}
        for i in ids:
            result = stored[i]
            assert result["status"] == "completed", result
            assert result["result"]["object"] == "chat.completion"
            assert result["result"]["usage"]["completion_tokens"] == 12
        assert (
            stored[plain[0]]["result"]["choices"][0]["message"]["content"]
            == stored[streamed[0]]["result"]["choices"][0]["message"]["content"]
        )
        assert stored[streamed[0]]["timings"]["ttft_s"] > 0
        assert_conserved(
            await collect(
                ids,
                redis=redis_client,
                rabbitmq_url=rabbitmq_url,
                deployment_id=deployment_id,
                dlq=env["INFERENCE_DLQ"],
                billed=billing.events,
            )
        )


async def test_a_deadline_stops_llama_cpp(
    llama_server: LlamaServer,
    rabbitmq_url: str,
    redis_url: str,
    redis_client: RedisClient,
    deployment_id: str,
    tmp_path: Path,
) -> None:
    """The call is closed, so that the slot is free again and no tokens are made that nobody reads."""
    port = free_port()
    env = worker_env(
        rabbitmq_url=rabbitmq_url,
        redis_url=redis_url,
        model_url=llama_server.url,
        deployment_id=deployment_id,
        http_port=port,
    )
    request_id = f"{deployment_id}-late"
    async with a_worker(env, port, tmp_path / "worker.log"):
        # Half of what the model needs to fill its context, which would end the answer by itself.
        body = chat(request_id, timeout_s=0.06, max_tokens=100_000, stream=True)
        await publish(rabbitmq_url, queue_of(env), body)

        async def answered() -> bool:
            return await redis_client.exists(f"infer_resp:{request_id}") == 1

        await eventually(answered, within=20, what="the deadline's result is stored")
        async with httpx.AsyncClient(trust_env=False) as client:

            async def idle() -> bool:
                slots = (await client.get(f"{llama_server.url}/slots")).json()
                return not any(slot["is_processing"] for slot in slots)

            await eventually(idle, within=10, what="llama.cpp has stopped")
    result = json.loads(await redis_client.get(f"infer_resp:{request_id}") or b"")
    assert (result["status"], result["status_code"]) == ("failed", 408), result
    assert result["error_code"] in ("deadline_exceeded", "expired")  # The latter where the machine is very busy.


def _load_seen(metrics: MetricServer) -> bool:
    for batch in metrics.batches:
        content = batch.content
        if isinstance(content, dict) and content["model"]["requests_running"] is not None:
            return True
    return False
