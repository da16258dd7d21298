"""The `process` command: queues, gates and pools together, over each transport, in one process and with its end."""

import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import aio_pika
import httpx
from redis.asyncio import Redis as RedisClient

from inference_worker.producer import Producer
from inference_worker.producer_requests import Request
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.transports.redis_streams import append
from inference_worker.transports.stream_entries import StreamNames
from tests.faults.model import FakeModel, ok
from tests.faults.processes import WorkerProcess
from tests.in_process import request_body
from tests.process_rig import RESULTS, ProcessDocuments, Processing, processing, queue, serving_mock, submit
from tests.services import free_port
from tests.waiting import eventually

GATE_OF_REDIS = "dispatch-gate-budget"


def counted(results: list[dict[str, Any]]) -> Counter[str]:
    return Counter(result["id"] for result in results)


# ---------------------------------------------------------------- over each transport


async def test_a_member_of_a_sorted_set_is_answered_with_what_the_gateway_said(redis_url: str) -> None:
    async with serving_mock() as mock, processing(redis_url, queues=[queue("chat", mock.url)]) as running:
        await running.submit("a", token="t" * 32)
        result = await running.result("a")

        assert result["status_code"] == 200
        assert result["request_token"] == "t" * 32
        assert json.loads(result["payload"])["object"] == "text_completion"
        assert "error_code" not in result
        await eventually(_nothing_left(running), within=5, what="the queue is empty")


async def test_a_queue_in_a_stream_stores_its_results_and_sends_them_to_its_list(redis_url: str) -> None:
    names = StreamNames(stream="jobs", group="workers", dead_letters="jobs:dead")
    link = RedisLink(lambda: redis_url, lambda: None, client_name="test", tls=RedisTls())
    async with serving_mock() as mock, link.open():
        jobs = queue("jobs", mock.url, result_queue_name="answers", result_ttl_seconds=600)
        async with processing(redis_url, queues=[jobs], kind="redis-streams") as running:
            body = json.dumps(request_body("s", payload={"prompt": "x", "max_tokens": 2}))
            await append(link, names, body.encode(), "s", enqueued_at=time.time())
            result = await running.result("s", "answers")

            assert (result["status_code"], await running.redis.llen(RESULTS)) == (200, 0)
            stored = json.loads(await running.redis.get("infer_resp:s"))  # type: ignore[arg-type]
            assert stored["status"] == "completed"
            assert 0 < await running.redis.ttl("infer_resp:s") <= 600
            assert 0 < await running.redis.ttl("answers") <= 600


async def test_a_queue_of_rabbitmq_stores_its_results_and_sends_them_to_its_list(vhost: str, redis_url: str) -> None:
    async with serving_mock() as mock:
        jobs = queue("rabbit-jobs", mock.url, result_queue_name="answers")
        async with processing(
            redis_url,
            queues=[jobs],
            kind="rabbitmq",
            transport={"url": vhost},
            environ={"REDIS_URL": redis_url},
        ) as running:
            connection = await aio_pika.connect(vhost)
            async with connection, connection.channel() as channel:
                body = json.dumps(request_body("r", payload={"prompt": "x", "max_tokens": 2})).encode()
                await channel.default_exchange.publish(aio_pika.Message(body), routing_key="rabbit-jobs")
            result = await running.result("r", "answers")

            assert result["status_code"] == 200
            assert json.loads(await running.redis.get("infer_resp:r"))["status"] == "completed"  # type: ignore[arg-type]


# ---------------------------------------------------------------- pools and gates


async def test_a_pool_whose_gateway_hangs_does_not_delay_another_case_274(redis_url: str) -> None:
    async with serving_mock(latency_s=60.0) as hung, serving_mock() as quick:
        queues = [queue("slow", hung.url, worker_pool_id="slow"), queue("fast", quick.url, worker_pool_id="fast")]
        pools = [{"id": "slow", "workers": 1}, {"id": "fast", "workers": 1}]
        async with processing(redis_url, queues=queues, pools=pools) as running:
            await running.submit(*(f"s{n}" for n in range(20)), queue="slow")
            await eventually(lambda: hung.mock.running == 1, within=5, what="the slow pool is full")
            await running.submit(*(f"f{n}" for n in range(20)), queue="fast")

            assert counted(await running.results(20)) == Counter(f"f{n}" for n in range(20))


async def test_a_closed_budget_holds_a_queue_and_an_open_one_lets_it_go_case_328(redis_url: str) -> None:
    async with serving_mock() as mock, RedisClient.from_url(redis_url, socket_timeout=None) as redis:
        await redis.set(GATE_OF_REDIS, "0")
        gate = {"gate_type": "redis", "gate_params": {"address": redis_url}}
        queues = [queue("gated", mock.url, **gate), queue("open", mock.url)]
        async with processing(redis_url, queues=queues) as running:
            await running.submit("a", "b", "c", queue="gated")
            await running.submit("o", queue="open")
            await running.result("o")
            assert await running.redis.zcard("gated") == 3
            await running.redis.set(GATE_OF_REDIS, "1")

            assert counted(await running.results(4)) == Counter("abco")


async def test_a_request_behind_a_gate_that_stays_closed_ends_at_its_deadline_case_270(redis_url: str) -> None:
    async with serving_mock() as mock:
        gates = ({"gate_type": "redis", "gate_params": {"address": redis_url}}, _decides("wait"), _decides("refuse"))
        queues = [queue(f"q{n}", mock.url, **gate) for n, gate in enumerate(gates)]
        async with RedisClient.from_url(redis_url, socket_timeout=None) as redis:
            await redis.set(GATE_OF_REDIS, "0")
        async with processing(redis_url, queues=queues) as running:
            for n in range(len(gates)):
                await running.submit(f"r{n}", queue=f"q{n}", deadline=int(time.time()) + 2)
            results = await running.results(3)

    assert {result["error_code"] for result in results} == {"DEADLINE_EXCEEDED"}
    assert counted(results) == Counter(["r0", "r1", "r2"])


def _decides(decision: str) -> dict[str, Any]:
    return {"gate_type": "constant-decision", "gate_params": {"decision": decision}}


async def test_a_request_that_a_gate_drops_ends_with_a_result_that_says_so_case_20(redis_url: str) -> None:
    async with serving_mock() as mock:
        gate = {"gate_type": "constant-decision", "gate_params": {"decision": "drop"}}
        queues = [queue("at-queue", mock.url, **gate), queue("at-pool", mock.url, worker_pool_id="gated")]
        pools = [{"id": "default", "workers": 1}, {"id": "gated", "workers": 1, **gate}]
        async with processing(redis_url, queues=queues, pools=pools) as running:
            await running.submit("q", queue="at-queue")
            await running.submit("p", queue="at-pool")
            results = await running.results(2)

    assert [result["error_code"] for result in results] == ["GATE_DROPPED"] * 2


async def test_a_queue_that_is_over_its_quota_leaves_the_other_teams_alone_case_332(redis_url: str) -> None:
    quota = {"address": redis_url, "attribute": "team", "mode": "concurrency", "limit": 1}
    async with serving_mock(latency_s=0.3) as mock:
        queues = [
            queue("batch", mock.url, gate_type="redis-quota", gate_params=quota),
            queue("premium", mock.url),
        ]
        async with processing(redis_url, queues=queues, pools=[{"id": "default", "workers": 8}]) as running:
            await running.submit("b0", "b1", "b2", queue="batch", metadata={"team": "b"})
            await eventually(lambda: mock.mock.running == 1, within=5, what="one of the batch runs")
            await running.submit("p0", "p1", queue="premium")
            first = await running.results(3)
            everything = await running.results(5)

    assert {"p0", "p1"} <= set(counted(first))
    assert counted(everything) == Counter(["b0", "b1", "b2", "p0", "p1"])


async def test_a_gate_of_a_pool_that_waits_lets_no_more_in_than_its_limit_case_269(redis_url: str) -> None:
    limit = {
        "gate_type": "wait-on-refuse",
        "gate_params": {"gate": {"gate_type": "local-max-concurrency", "gate_params": {"limit": 2}}},
    }
    async with (
        serving_mock(latency_s=0.2) as mock,
        processing(
            redis_url, queues=[queue("q", mock.url)], pools=[{"id": "default", "workers": 4, **limit}]
        ) as running,
    ):
        await running.submit("a", "b", "c")
        await eventually(lambda: mock.mock.running == 2, within=5, what="two run")
        _, most = await mock.mean_running(0.3)
        results = await running.results(3)

    assert most == 2
    assert {result["status_code"] for result in results} == {200}


# ---------------------------------------------------------------- retries, results, cancelling


async def test_a_gateway_that_fails_for_a_while_costs_time_and_no_request_case_324(redis_url: str) -> None:
    async with (
        serving_mock(max_num_seqs=1, max_queued=0, latency_s=0.5) as mock,
        processing(redis_url, queues=[queue("q", mock.url)]) as running,
    ):
        await running.submit("a", "b")
        results = await running.results(2, within=30)

    assert {result["status_code"] for result in results} == {200}
    assert counted(results) == Counter("ab")


async def test_each_queue_may_have_a_list_of_its_own_and_a_message_may_name_one_where_it_has_none_case_77_78(
    redis_url: str,
) -> None:
    async with serving_mock() as mock:
        queues = [queue("own", mock.url, result_queue_name="mine"), queue("free", mock.url)]
        async with processing(redis_url, queues=queues) as running:
            await running.submit("a", queue="own", result_queue_name="theirs")
            await running.submit("b", queue="free", result_queue_name="theirs")
            await running.submit("c", queue="free")

            assert [r["id"] for r in await running.results(1, "mine")] == ["a"]
            assert [r["id"] for r in await running.results(1, "theirs")] == ["b"]
            assert [r["id"] for r in await running.results(1)] == ["c"]


async def test_a_payload_reaches_the_gateway_byte_for_byte_with_its_headers_and_nothing_forged_case_112_242(
    redis_url: str,
) -> None:
    raw = b'{"z" : 1.50,  "a":"\\u00e9","big":123456789012345678901234567890}'
    async with FakeModel() as model:
        there = queue("q", f"{model.url}/base", inference_objective="slow", request_path_url="/v1/completions")
        async with (
            processing(redis_url, queues=[there]),
            Producer(redis_url, result_queue=RESULTS, request_queue="q") as producer,
        ):
            forged = {"X-LLM-D-Inference-Fairness-Id": "boss", "X-Team": "b", "x-request-id": "mine"}
            request = Request(payload=raw, deadline=time.time() + 60, id="a", metadata={"userid": "u1"}, headers=forged)
            await producer.submit(request)
            await producer.submit(replace(request, id="b", endpoint="/v1/other"))
            results = {result.id: result for result in [await producer.get_result(10) for _ in range(2)]}

    by_path = {request.path: request for request in model.requests}
    assert by_path.keys() == {"/base/v1/completions", "/base/v1/other"}
    seen = by_path["/base/v1/completions"]
    assert seen.body == raw
    assert seen.headers["x-llm-d-inference-fairness-id"] == "u1"
    assert seen.headers["x-llm-d-inference-objective"] == "slow"
    assert seen.headers["x-team"] == "b"
    assert seen.headers["x-request-id"].startswith("a/")
    assert {result.status_code for result in results.values()} == {200}


async def test_a_call_whose_request_is_cancelled_is_closed_and_its_result_says_so_case_108(redis_url: str) -> None:
    async with (
        FakeModel(default=ok(takes_s=60.0)) as model,
        processing(redis_url, queues=[queue("q", model.url)]) as running,
        Producer(redis_url, result_queue=RESULTS, request_queue="q") as producer,
    ):
        sent = await producer.submit(Request(payload={"prompt": "x"}, deadline=time.time() + 60, id="a"))
        await eventually(lambda: len(model.requests) == 1, within=10, what="it is called")
        assert list(await producer.cancel(sent)) == ["a"]
        result = await producer.get_result(10)
        await eventually(lambda: model.requests[0].disconnected_at is not None, within=5, what="its call was closed")
        await eventually(_nothing_left(running), within=5, what="nothing is left")

    assert (result.id, result.error_code, result.token) == ("a", "CANCELLED", sent.token)


# ---------------------------------------------------------------- the command


class Command:
    """The command as a process of its own, and its queue."""

    def __init__(self, redis: RedisClient, tmp_path: Path, documents: ProcessDocuments, name: str = "process") -> None:
        def write(file: str, text: str) -> Path:
            path = tmp_path / f"{name}-{file}"
            path.write_text(text)
            return path

        self.redis = redis
        arguments = documents.arguments(write)
        command = (sys.executable, "-m", "inference_worker", "process", *arguments)
        self.process = WorkerProcess({}, output=tmp_path / f"{name}.log", command=command)

    async def ready(self) -> None:
        def consuming() -> bool:
            assert self.process.returncode is None, self.process.log
            return '"event":"consuming"' in self.process.log

        await eventually(consuming, within=20, what="it consumes")


def _nothing_left(running: Processing) -> Any:
    async def nothing() -> bool:
        return not await running.lying()

    return nothing


async def left(redis: RedisClient, name: str = "q") -> int:
    """Members that are queued, claimed, or wait for a retry."""
    return await redis.zcard(name) + await redis.hlen(f"{name}:claimed") + await redis.zcard("retry-sortedset")


async def test_running_calls_finish_after_a_sigterm_and_the_rest_is_back_in_the_queue_case_264_265(
    redis_url: str, tmp_path: Path
) -> None:
    async with serving_mock(latency_s=1.0) as mock, RedisClient.from_url(redis_url, socket_timeout=None) as redis:
        documents = ProcessDocuments(
            url=redis_url, queues=[queue("q", mock.url)], flags={"concurrency": "2", "drain-timeout": "10s"}
        )
        command = Command(redis, tmp_path, documents)
        async with command.process as process:
            await command.ready()
            await submit(redis, "q", [str(n) for n in range(6)])
            await eventually(lambda: mock.mock.running == 2, within=10, what="two run")
            process.terminate()
            await eventually(lambda: process.returncode is not None, within=15, what="it has ended")

        assert process.returncode == 0
        assert await redis.llen(RESULTS) == 2
        assert (await redis.zcard("q"), await redis.hlen("q:claimed")) == (4, 0)


async def test_calls_that_outlast_the_drain_are_ended_and_their_requests_go_back_case_266_325_326(
    redis_url: str, tmp_path: Path
) -> None:
    async with serving_mock(latency_s=60.0) as mock, RedisClient.from_url(redis_url, socket_timeout=None) as redis:
        documents = ProcessDocuments(
            url=redis_url, queues=[queue("q", mock.url)], flags={"concurrency": "3", "drain-timeout": "500ms"}
        )
        command = Command(redis, tmp_path, documents)
        async with command.process as process:
            await command.ready()
            await submit(redis, "q", ["a", "b", "c"])
            await eventually(lambda: mock.mock.running == 3, within=10, what="all run")
            process.terminate()
            await eventually(lambda: process.returncode is not None, within=15, what="it has ended")

        assert process.returncode == 0
        assert await redis.llen(RESULTS) == 0
        members = [json.loads(str(member, "utf-8")) for member in await redis.zrange("q", 0, -1)]  # type: ignore[arg-type]  # Bytes, as nothing is decoded.
        assert sorted(member["data"]["id"] for member in members) == ["a", "b", "c"]
        assert {member["internal"].get("retry_count", 0) for member in members} == {0}


async def test_every_request_ends_once_whatever_processes_are_killed_case_352(redis_url: str, tmp_path: Path) -> None:
    ids = [f"r{n}" for n in range(400)]
    transport = {"claim_lease_ttl_seconds": 1}
    async with serving_mock(latency_s=0.02) as mock, RedisClient.from_url(redis_url, socket_timeout=None) as redis:
        documents = ProcessDocuments(
            url=redis_url, queues=[queue("q", mock.url)], transport=transport, flags={"concurrency": "4"}
        )
        commands = [Command(redis, tmp_path, documents, f"p{n}") for n in range(2)]
        for command in commands:
            command.process.env["CLAIM_LEASE_S"] = "0.5"
        async with commands[0].process, commands[1].process:
            await asyncio.gather(*(command.ready() for command in commands))
            await submit(redis, "q", ids)
            for turn in range(4):
                await _killed_and_started(commands[turn % 2].process, redis)
            await eventually(lambda: _more(redis, len(ids)), within=60, what="all are done")

            async def nothing() -> bool:
                return await left(redis) == 0

            await eventually(nothing, within=10, what="nothing is left")
        results = [json.loads(result) for result in await redis.lrange(RESULTS, 0, -1)]

    assert counted(results) == Counter(ids)
    assert {result["status_code"] for result in results} == {200}


async def _killed_and_started(process: WorkerProcess, redis: RedisClient) -> None:
    """Once some more are done; not so late that nothing is left to be done."""
    enough = min(await redis.llen(RESULTS) + 50, 380)
    await eventually(lambda: _more(redis, enough), within=30, what="some more are done")
    process.kill()
    await eventually(lambda: process.returncode is not None, within=5, what="it is dead")
    process.start()


async def _more(redis: RedisClient, count: int) -> bool:
    return await redis.llen(RESULTS) >= count


async def test_a_command_line_that_is_wrong_says_all_that_is_wrong_and_ends_with_2(tmp_path: Path) -> None:
    document = {"queues": [{"queue_name": "a", "worker_pool_id": "p", "gate_type": "open-sesame"}]}
    arguments = ("--transport", "redis-sortedset", "--transport-config", json.dumps(document), "--concurrency", "0")
    output = tmp_path / "out.log"
    async with WorkerProcess(
        {"LOG_LEVEL": "loud"}, output=output, command=(sys.executable, "-m", "inference_worker", "process", *arguments)
    ) as process:
        await eventually(lambda: process.returncode is not None, within=15, what="it has ended")

    assert process.returncode == 2
    for said in ("LOG_LEVEL", "--concurrency"):
        assert said in process.log
    assert "Traceback" not in process.log


async def test_both_ports_answer_and_the_page_has_all_pools(redis_url: str) -> None:
    health, metrics = free_port(), free_port()
    async with serving_mock() as mock:
        queues = [queue("a", mock.url, worker_pool_id="x"), queue("b", mock.url, worker_pool_id="y")]
        pools = [{"id": "x", "workers": 1}, {"id": "y", "workers": 2}]
        flags = {"health-port": str(health), "metrics-port": str(metrics)}
        async with (
            processing(redis_url, queues=queues, pools=pools, flags=flags) as running,
            httpx.AsyncClient() as client,
        ):
            await running.submit("r", queue="a")
            await running.result("r")

            async def ready() -> dict[str, Any] | None:
                answer = await client.get(f"http://127.0.0.1:{health}/readyz")
                return answer.json() if answer.status_code == 200 else None

            page = await eventually(ready, within=5, what="it is ready")
            assert {"queue a", "queue b", "redis", "running"} <= page["conditions"].keys()
            text = (await client.get(f"http://127.0.0.1:{metrics}/metrics")).text
            assert 'inference_worker_slots{pool="x"} 1.0' in text
            assert 'inference_worker_slots{pool="y"} 2.0' in text
            assert 'llm_d_async_async_successful_requests_total{pool_name="x",queue_id="a",queue_name="a"} 1.0' in text
            status = (await client.get(f"http://127.0.0.1:{health}/status")).json()
            assert status["pools"].keys() == {"x", "y"}
