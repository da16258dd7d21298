"""The operator's commands and the client over Redis Streams; and a cancellation, which closes the call at once.

RabbitMQ is at an address where nobody listens: whatever asks it fails.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker.assembly import Outside, Worker, worker
from inference_worker.check import Finding, check
from inference_worker.client import Client, NotAccepted, NotSupported
from inference_worker.config.settings import load
from inference_worker.dlq_command import DlqOptions, run_dlq
from inference_worker.gateway.keys import new_key
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.results.redis import CANCELLED, claim_key, result_key
from inference_worker.serve_gateway import run_gateway
from inference_worker.stream_dead_letters import REPLAY_ENTRY, StreamDeadLetters
from tests.conservation import outbox
from tests.faults import model as fake
from tests.faults import wire
from tests.faults.model import FakeModel
from tests.faults.processes import ROOT
from tests.faults.proxy import Do
from tests.integration.conftest import MakeProxy, RunningWorker
from tests.services import Redis, free_port
from tests.waiting import eventually
from tests.worker_env import worker_env

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
STREAM, DEAD = "inference:jobs", "inference:dlq"
LEASE_MS = 30_000
"""A renewal, which would find a cancellation too, is 10 s away."""

TOOLS = ("TRANSPORT", "REDIS_URL", "RABBITMQ_URL")
"""What a command is told of the environment, and no more."""


@pytest.fixture
def env(redis_url: str, model: FakeModel) -> dict[str, str]:
    return worker_env(
        rabbitmq_url="amqp://guest:guest@127.0.0.1:9/",
        redis_url=redis_url,
        model_url=model.url,
        deployment_id="d",
        TRANSPORT="redis-streams",
        IWL_CONCURRENCY="4",
        IWL_MAX_ATTEMPTS="1",
        IWL_CLAIM_IDLE_MS=str(LEASE_MS),
        SHUTDOWN_GRACE_S="0.2",
    )


@asynccontextmanager
async def running(env: Mapping[str, str]) -> AsyncGenerator[Worker]:
    """A worker in this process, consuming."""
    stop = asyncio.Event()
    async with worker(load(env), Outside(now=time.time, rng=random.Random(1))) as made:
        task = asyncio.create_task(made.run(stop))
        try:
            await eventually(lambda: made.listener.state == "consuming", within=15, what="the worker consumes")
            yield made
        finally:
            stop.set()
            async with asyncio.timeout(15):
                await task


def caller(env: Mapping[str, str]) -> Client:
    return Client.streams(redis_url=env["REDIS_URL"])


async def entries(redis: RedisClient, stream: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    found: Any = await redis.xrange(stream)  # Its own types allow for every setting of the client.
    return list(found)


async def put(redis: RedisClient, stream: str, **fields: str) -> None:
    given: Any = fields
    await redis.xadd(stream, given)


async def write(redis: RedisClient, key: str, **fields: str) -> None:
    given: Any = fields
    await redis.hset(key, mapping=given)


async def nothing_left(redis: RedisClient) -> None:
    """Every entry was acknowledged."""

    async def empty() -> bool:
        return await redis.xlen(STREAM) == 0

    await eventually(empty, within=5, what="an empty stream")


# ---------------------------------------------------------------- the client and submit


async def test_a_request_is_answered_over_redis_alone(
    env: dict[str, str], model: FakeModel, redis_client: RedisClient
) -> None:
    async with running(env), caller(env) as client:
        job = await client.submit(CHAT, metadata={"a": "b"}, tenant="acme", request_id="mine")
        result = await job.wait(10)

        assert (job.request_id, result.status, result.attempt) == ("mine", "completed", 0)
        assert json.loads(model.requests[0].body) == CHAT
        await nothing_left(redis_client)


async def test_a_stream_has_no_priorities_and_says_so(env: dict[str, str]) -> None:
    async with caller(env) as client:
        with pytest.raises(NotSupported, match="no priorities"):
            await client.submit(CHAT, priority=1)


async def test_a_request_waits_in_a_stream_that_no_worker_has_seen(env: dict[str, str]) -> None:
    async with caller(env) as client:
        job = await client.submit(CHAT)
        assert await client.look(job.request_id) is None
        async with running(env):
            assert (await job.wait(10)).completed


async def test_a_redis_that_is_away_takes_nothing(env: dict[str, str]) -> None:
    async with Client.streams(redis_url="redis://127.0.0.1:9/0") as client:
        with pytest.raises(NotAccepted, match=r"not confirmed within 0.5 s") as told:
            await client.submit(CHAT, within_s=0.5)

    assert told.value.maybe


async def test_an_entry_whose_reply_is_lost_is_one_request(
    env: dict[str, str], redis_server: Redis, redis_client: RedisClient, proxy: MakeProxy, model: FakeModel
) -> None:
    link = await proxy(redis_server, speaks="redis")
    link.when_client_sends(lambda unit: bool(unit.args and unit.args[0] == b"XADD"), Do.CUT_ON_REPLY)
    async with Client.streams(redis_url=link.url(env["REDIS_URL"])) as client:
        job = await client.submit(CHAT, request_id="one")
        assert await redis_client.xlen(STREAM) == 2, "it was added again"
        async with running(env):
            assert (await job.wait(10)).completed
            await nothing_left(redis_client)

    assert len(model.requests) == 1


async def test_submit_sends_a_file_over_redis_alone(env: dict[str, str], tmp_path: Path) -> None:
    lines = tmp_path / "requests.jsonl"
    lines.write_text("".join(f"{json.dumps({'request_id': f'r-{n}', 'payload': CHAT})}\n" for n in range(3)))
    told = {name: env[name] for name in TOOLS}
    async with running(env):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "inference_worker", "submit", str(lines)),
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **told},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        async with asyncio.timeout(30):
            out, err = await process.communicate()

    assert process.returncode == 0, err.decode()
    results = [json.loads(line) for line in out.decode().splitlines()]
    assert [(one["request_id"], one["status"]) for one in results] == [(f"r-{n}", "completed") for n in range(3)]


# ---------------------------------------------------------------- cancelling


async def closed_within_a_second(client: Client, model: FakeModel, redis: RedisClient) -> None:
    """Cancel what runs, and see that the model hears of it long before a renewal would tell."""
    job = await client.submit(CHAT, request_id="r")
    await model.busy()

    async def heard() -> bool:
        return bool((await redis.pubsub_numsub(CANCELLED))[0][1])

    await eventually(heard, within=5, what="the worker's subscription")
    begun = time.monotonic()
    assert await job.cancel() == "cancelled"
    await eventually(lambda: model.in_flight == 0, within=5, what="the end of the call")
    took_s = time.monotonic() - begun

    assert took_s < 1.0
    assert model.requests[0].disconnected_at is not None
    result = await job.wait(5)
    assert (result.status_code, result.error_code) == (499, "cancelled")


async def test_a_cancelled_call_over_streams_is_closed_at_once_and_not_billed(
    env: dict[str, str], model: FakeModel, redis_client: RedisClient
) -> None:
    model.default = fake.ok(takes_s=60)
    async with running(env | {"CROESUS_HOST": "http://127.0.0.1:9"}), caller(env) as client:
        await closed_within_a_second(client, model, redis_client)
        await nothing_left(redis_client)

    assert await outbox(redis_client, "d") == []
    assert await redis_client.xlen(DEAD) == 0


async def test_a_cancelled_call_over_rabbitmq_is_closed_at_once_and_not_billed(
    running_worker: RunningWorker, model: FakeModel, redis_client: RedisClient
) -> None:
    model.default = fake.ok(takes_s=60)
    w = await running_worker(CLAIM_LEASE_S=str(LEASE_MS / 1000))
    client = Client.direct(
        rabbitmq_url=w.env["RABBITMQ_URL"], redis_url=w.env["REDIS_URL"], deployment_id=w.env["DEPLOYMENT_ID"]
    )
    async with client:
        await closed_within_a_second(client, model, redis_client)
        await w.disposed("ack")

    seen = await w.seen()
    assert (seen.queued, seen.dead, seen.billed) == ([], [], [])


async def test_a_queued_request_that_is_cancelled_never_reaches_the_model(
    env: dict[str, str], model: FakeModel, redis_client: RedisClient
) -> None:
    async with caller(env) as client:
        job = await client.submit(CHAT)
        assert await job.cancel() == "cancelled"
        async with running(env):
            await nothing_left(redis_client)

    assert model.requests == []


# ---------------------------------------------------------------- check


def row(findings: list[Finding], what: str) -> tuple[str, str]:
    (found,) = [one for one in findings if one.what == what]
    return found.word, found.detail


async def test_check_looks_at_the_stream_and_asks_no_rabbitmq(env: dict[str, str]) -> None:
    before = await check(load(env), env)
    async with running(env | {"IWL_CONCURRENCY": "1"}), caller(env) as client:
        await (await client.submit(CHAT)).wait(10)
        after = await check(load(env), env)

    assert before.reached, before.findings
    assert "RabbitMQ" not in {finding.what for finding in before.findings}
    assert row(before.findings, "request stream") == ("ok", f"{STREAM} does not exist yet: the worker creates it")
    assert row(before.findings, "dead letters") == ("ok", f"{DEAD}: none")
    assert after.reached, after.findings
    said = f"{STREAM}: 0 ready, 0 with workers, 0 delayed; group workers: 1 consumers"
    assert row(after.findings, "request stream") == ("ok", said)


async def test_check_says_what_waits_and_what_is_dead(env: dict[str, str], redis_client: RedisClient) -> None:
    await put(redis_client, STREAM, job_id="a", request="{}")
    await put(redis_client, DEAD, job_id="a", request="{}")
    ungrouped = await check(load(env), env)
    await redis_client.xgroup_create(STREAM, "workers", "0")
    await redis_client.xreadgroup("workers", "w", {STREAM: ">"})
    await put(redis_client, STREAM, job_id="b", request="{}")
    held = await check(load(env), env)

    assert row(ungrouped.findings, "dead letters") == ("warning", f"{DEAD}: 1 dead letters")
    said = f"{STREAM}: 1 entries; the group workers does not exist yet: the worker creates it"
    assert row(ungrouped.findings, "request stream") == ("ok", said)
    said = f"{STREAM}: 1 ready, 1 with workers, 0 delayed; group workers: 1 consumers"
    assert row(held.findings, "request stream") == ("ok", said)


async def test_check_finds_a_key_that_is_no_stream(env: dict[str, str], redis_client: RedisClient) -> None:
    await redis_client.set(STREAM, "mine")
    await redis_client.set(DEAD, "mine")

    report = await check(load(env), env)

    assert not report.reached
    assert row(report.findings, "request stream") == ("failed", f"{STREAM} is a string")
    assert row(report.findings, "dead letters") == ("failed", f"{DEAD} is no stream")


async def test_check_asks_for_no_model_where_there_is_a_mock(env: dict[str, str], model: FakeModel) -> None:
    mocked = env | {"MODEL_MODE": "mock", "MODEL_CONTAINER_URL": "http://127.0.0.1:9"}

    report = await check(load(mocked), mocked)

    assert report.reached, report.findings
    assert row(report.findings, "model")[1].startswith("a mock")
    assert model.probes == []


async def test_a_worker_with_a_mock_answers_without_any_model(env: dict[str, str]) -> None:
    mocked = env | {"MODEL_MODE": "mock", "MODEL_CONTAINER_URL": "http://127.0.0.1:9"}
    async with running(mocked), caller(env) as client:
        result = await client.submit_and_wait(CHAT)

    assert result.json()["choices"][0]["message"]["content"] == "hello"


# ---------------------------------------------------------------- dlq


async def dlq(env: Mapping[str, str], do: Literal["list", "show", "replay", "purge"], **options: Any) -> int:
    settings = load({name: env[name] for name in TOOLS}, needs="client")
    return await run_dlq(settings, DlqOptions(do=do, **({"rate": 0.0} | options)), time.time, asyncio.Event())


async def died(env: Mapping[str, str], model: FakeModel, redis: RedisClient, *ids: str) -> None:
    """Requests whose calls are reset until their attempts are used up."""
    model.default = wire.reset()
    async with running(env), caller(env) as client:
        for one in ids:
            await client.submit(CHAT, request_id=one, tenant="acme")

        async def there() -> bool:
            return await redis.xlen(DEAD) == len(ids)

        await eventually(there, within=20, what=f"{len(ids)} dead letters")
        await nothing_left(redis)
    model.default = wire.answer(200, {"answer": 1})


def printed(capfdbinary: pytest.CaptureFixture[bytes]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]


async def test_dead_letters_are_listed_with_reason_attempts_status_and_time(
    env: dict[str, str], model: FakeModel, redis_client: RedisClient, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    await died(env, model, redis_client, "r-1", "r-2")
    await redis_client.delete("infer_dead:r-2", result_key("r-2"))
    capfdbinary.readouterr()

    assert await dlq(env, "list", json=True) == 0
    first, second = printed(capfdbinary)
    assert await dlq(env, "list") == 0
    table = capfdbinary.readouterr().out.decode()

    for name, one in (("r-1", first), ("r-2", second)):
        assert (one["request_id"], one["reason"], one["attempts"]) == (name, "retries_exhausted", 1)
        assert (one["queue"], one["tenant"], one["status_code"]) == (STREAM, "acme", 500)
        assert one["detail"]
        assert abs(one["died_at"] - time.time()) < 30
    assert (first["result"], second["result"]) == ("failed", None)
    assert f"2 of 2 dead letters in {DEAD}" in table


async def test_a_dead_letter_is_shown_whole(
    env: dict[str, str], model: FakeModel, redis_client: RedisClient, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    fields = {
        "job_id": "r",
        "attempt": "2",
        "request": '{"request_id": "r"}',
        "traceparent": "00-1",
        "reason": "poison",
    }
    await put(redis_client, DEAD, **fields)

    assert await dlq(env, "show", ids=frozenset({"r"}), json=True) == 0
    (shown,) = printed(capfdbinary)

    assert (shown["reason"], shown["attempts"], shown["body"]) == ("poison", 3, '{"request_id": "r"}')
    assert shown["headers"]["traceparent"] == "00-1"
    assert await dlq(env, "show", ids=frozenset({"nobody"})) == 1


async def test_a_replayed_letter_is_run_as_new_with_all_that_came_with_it(
    env: dict[str, str], model: FakeModel, redis_client: RedisClient
) -> None:
    await died(env, model, redis_client, "r-1", "r-2")
    (entry_id, fields), _ = await entries(redis_client, DEAD)
    kept = {name.decode(): value.decode() for name, value in fields.items()}
    await put(redis_client, DEAD, **(kept | {"attempt": "2"}), traceparent="00-1")
    await redis_client.xdel(DEAD, entry_id)

    assert await dlq(env, "replay", ids=frozenset({"r-1"})) == 0
    ((_, copy),) = await entries(redis_client, STREAM)
    async with running(env), caller(env) as client:
        result = await client.wait("r-1", 10)

    assert copy.keys() == {b"job_id", b"attempt", b"enqueued_at", b"request", b"traceparent"}
    assert (copy[b"job_id"], copy[b"attempt"], copy[b"traceparent"]) == (b"r-1", b"0", b"00-1")
    assert abs(float(copy[b"enqueued_at"]) - time.time()) < 30
    assert abs(json.loads(copy[b"request"])["received_at"] - time.time()) < 30
    assert (result.status, result.attempt) == ("completed", 0)
    assert [fields[b"job_id"] for _, fields in await entries(redis_client, DEAD)] == [b"r-2"]


async def test_what_an_intake_keeps_of_a_job_begins_anew_with_its_replay(
    env: dict[str, str], model: FakeModel, redis_client: RedisClient
) -> None:
    await died(env, model, redis_client, "r-1")
    await write(redis_client, "infer_job:r-1", ended="failed", expires_at="1.0", due="infer_due:q")
    await redis_client.expire("infer_job:r-1", 100)

    assert await dlq(env, "replay", everything=True) == 0

    kept = await redis_client.hgetall("infer_job:r-1")
    deadline = time.time() + 60
    assert kept.keys() == {b"expires_at", b"due"}
    assert float(kept[b"expires_at"]) == pytest.approx(deadline, abs=10)
    assert await redis_client.zscore("infer_due:q", "infer_job:r-1") == pytest.approx(deadline, abs=10)
    for key in ("infer_job:r-1", "infer_due:q"):
        assert await redis_client.ttl(key) == pytest.approx(60 + 3600 + 86_400, abs=10), key


@pytest.mark.parametrize("state", ["completed", "running", "gone"])
async def test_a_request_that_is_done_or_runs_is_not_replayed(
    redis_url: str, redis_client: RedisClient, state: str
) -> None:
    """The step itself refuses, whatever was seen before it."""
    await put(redis_client, DEAD, job_id="r", request='{"request_id":"r","timeout_s":60}', reason="poison")
    link = RedisLink(lambda: redis_url, lambda: None, client_name="test", tls=RedisTls())
    async with link.open():
        letters = StreamDeadLetters(link, stream=STREAM, dead_letters=DEAD, ttl_s=60, now=time.time)
        await letters.begin()
        letter = await letters.next()
        assert letter is not None
        match state:
            case "completed":
                await redis_client.set(result_key("r"), b'{"status":"completed","status_code":200,"result":1}')
            case "running":
                await write(redis_client, claim_key("r"), holder="other", until=str(int(time.time() * 1000) + 60_000))
            case _:
                await redis_client.xdel(DEAD, letter.entry_id)
        held = await redis_client.xlen(DEAD)

        assert await letters.put_back(letter, letter.body, STREAM) == state

    assert (await redis_client.xlen(STREAM), await redis_client.xlen(DEAD)) == (0, held)


async def test_letters_that_come_while_one_looks_are_left_for_the_next_look(
    redis_url: str, redis_client: RedisClient
) -> None:
    """Of more than one page."""
    for n in range(40):
        await put(redis_client, DEAD, job_id=f"r-{n}")
    link = RedisLink(lambda: redis_url, lambda: None, client_name="test", tls=RedisTls())
    async with link.open():
        letters = StreamDeadLetters(link, stream=STREAM, dead_letters=DEAD, ttl_s=60, now=time.time)
        await letters.begin()
        seen = []
        while (letter := await letters.next()) is not None:
            seen.append(letter.message_id)
            await put(redis_client, DEAD, job_id="later")

    assert seen == [f"r-{n}" for n in range(40)]
    assert letters.ready == 40


async def test_a_purge_removes_what_is_meant_and_nothing_else(env: dict[str, str], redis_client: RedisClient) -> None:
    for name, reason in (("a", "poison"), ("b", "invalid_request"), ("c", "poison")):
        await put(redis_client, DEAD, job_id=name, request=json.dumps({"request_id": name}), reason=reason)

    assert await dlq(env, "purge", reason="poison", yes=True) == 0

    assert [fields[b"job_id"] for _, fields in await entries(redis_client, DEAD)] == [b"b"]


async def test_an_operator_works_with_dead_letters_over_a_gateway_and_nobody_else_does(
    env: dict[str, str],
    model: FakeModel,
    redis_client: RedisClient,
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    await died(env, model, redis_client, "r-1", "r-2")
    (operator, one), (tenant, other) = new_key("ops", operator=True), new_key("acme", operator=False)
    keys = tmp_path / "keys.json"
    keys.write_text(f'{{"keys": [{one}, {other}]}}')
    port = free_port()
    told = {name: env[name] for name in TOOLS} | {"GATEWAY_API_KEYS_FILE": str(keys), "GATEWAY_PORT": str(port)}
    stop = asyncio.Event()

    async def over_http(do: Literal["list", "show", "replay", "purge"], key: str, **options: Any) -> int:
        settings = load({"GATEWAY_API_KEY": key}, needs="dev")
        asked = DlqOptions(do=do, url=f"http://127.0.0.1:{port}", **({"rate": 0.0} | options))
        return await run_dlq(settings, asked, time.time, asyncio.Event())

    outside = Outside(now=time.time, rng=random.Random(1))
    gateway = asyncio.create_task(run_gateway(load(told, needs="gateway"), outside, stop))
    try:

        async def listening() -> bool:
            return await over_http("list", operator) == 0

        await eventually(listening, within=15, what="the gateway")
        capfdbinary.readouterr()
        assert await over_http("list", operator, json=True) == 0
        assert [one["request_id"] for one in printed(capfdbinary)] == ["r-1", "r-2"]
        assert await over_http("purge", tenant, everything=True, yes=True) == 1
        assert "HTTP 403" in capfdbinary.readouterr().err.decode()
        assert await over_http("replay", operator, ids=frozenset({"r-1"})) == 0
    finally:
        stop.set()
        await gateway

    assert [fields[b"job_id"] for _, fields in await entries(redis_client, DEAD)] == [b"r-2"]
    assert [fields[b"job_id"] for _, fields in await entries(redis_client, STREAM)] == [b"r-1"]


@pytest.mark.parametrize("when", [Do.CUT, Do.CUT_ON_REPLY], ids=["before the step", "after it, its reply lost"])
async def test_a_cut_at_the_step_of_a_replay_loses_nothing_and_makes_no_second_copy(
    env: dict[str, str],
    model: FakeModel,
    redis_server: Redis,
    redis_client: RedisClient,
    proxy: MakeProxy,
    when: Do,
) -> None:
    await died(env, model, redis_client, *(f"r-{n}" for n in range(3)))
    link = await proxy(redis_server, speaks="redis")

    def step(unit: Any) -> bool:
        return bool(unit.args and unit.args[0] in (b"EVAL", b"EVALSHA") and REPLAY_ENTRY.sha.encode() in unit.args)

    link.when_client_sends(step, when)
    first = await dlq(env | {"REDIS_URL": link.url(env["REDIS_URL"])}, "replay", everything=True)
    found = [*await entries(redis_client, DEAD), *await entries(redis_client, STREAM)]
    held = {fields[b"job_id"] for _, fields in found}
    second = await dlq(env, "replay", everything=True)

    assert (first, second) == (1, 0)
    assert held == {b"r-0", b"r-1", b"r-2"}, "a request is nowhere"
    assert await redis_client.xlen(DEAD) == 0
    assert sorted(fields[b"job_id"] for _, fields in await entries(redis_client, STREAM)) == [b"r-0", b"r-1", b"r-2"]
    model.forget_requests()
    async with running(env), caller(env) as client:
        for n in range(3):
            assert (await client.wait(f"r-{n}", 10)).completed
        await nothing_left(redis_client)
    assert len(model.requests) == 3
