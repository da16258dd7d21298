"""`dlq` on a real broker and store: what it shows, what it moves, and that cuts and kills at each step lose nothing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker.assembly import redis_stores
from inference_worker.config.settings import load
from inference_worker.disposition import Token
from inference_worker.dlq_command import DlqOptions, run_dlq
from inference_worker.results.redis import RedisStore, claim_key
from tests.conservation import channel_of, drain_queue, peek, publish
from tests.faults import wire
from tests.faults.model import FakeModel
from tests.faults.processes import ROOT, WorkerProcess
from tests.faults.proxy import Do, TcpProxy
from tests.faults.system import System
from tests.in_process import Broker, InProcess, request_body
from tests.integration.conftest import MakeProxy, RunningWorker
from tests.services import Rabbit, Redis
from tests.waiting import eventually

DLQ = (sys.executable, "-m", "inference_worker", "dlq")
NAMES = ("DEPLOYMENT_ID", "RABBITMQ_URL", "REDIS_URL", "INFERENCE_DLX", "INFERENCE_DLQ")


class Ended:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


async def dlq(env: Mapping[str, str], *options: str) -> Ended:
    """Run it to its end, with the variables that it needs and no more."""
    process = await asyncio.create_subprocess_exec(
        *(*DLQ, *options),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)} | {name: env[name] for name in NAMES if name in env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


async def inside(env: Mapping[str, str], do: Literal["list", "show", "replay", "purge"], **options: Any) -> int:
    """The same in this process, which is quicker."""
    settings = load({name: env[name] for name in NAMES if name in env}, needs="client")
    return await run_dlq(settings, DlqOptions(do=do, **({"rate": 0.0} | options)), time.time, asyncio.Event())


async def died(w: InProcess, *ids: str, **changes: object) -> None:
    """Requests whose calls are reset until their retries are used up."""
    before = await w.at.broker.ready(w.dlq) or 0
    w.at.model.default = wire.reset()
    for one in ids:
        await w.publish(request_body(one, **changes))
    await dead(w, before + len(ids))
    w.at.model.default = wire.answer(200, {"answer": 1})


async def dead(w: InProcess, count: int) -> None:
    async def there() -> bool:
        return await w.at.broker.ready(w.dlq) == count

    await eventually(there, within=20, what=f"{count} dead letters")


async def test_the_list_says_why_when_how_often_and_with_which_status(running_worker: RunningWorker) -> None:
    w = await running_worker()
    await died(w, "r-1", tenant="acme")
    await w.publish(b"not json", message_id="r-2")
    await dead(w, 2)

    table = await dlq(w.env, "list")
    listed = await dlq(w.env, "list", "--json")

    assert (table.code, listed.code) == (0, 0)
    assert f"2 of 2 dead letters in {w.dlq}" in table.out
    assert "retries_exhausted" in table.out
    first, second = sorted(listed.lines, key=lambda line: str(line["request_id"]))
    assert (first["request_id"], first["reason"], first["attempts"]) == ("r-1", "retries_exhausted", 2)
    assert (first["status_code"], first["result"], first["tenant"]) == (500, "failed", "acme")
    assert abs(first["died_at"] - time.time()) < 60
    assert first["queue"] == w.queue
    assert (second["request_id"], second["reason"], second["status_code"]) == ("r-2", "invalid_request", 400)
    assert len(await w.at.broker.take(w.dlq)) == 2, "looking lost one"


async def test_one_letter_is_shown_whole(running_worker: RunningWorker) -> None:
    w = await running_worker()
    await died(w, "r-1", "r-2")

    shown = await dlq(w.env, "show", "r-2")
    missing = await dlq(w.env, "show", "nobody")

    assert shown.code == 0
    assert "retries_exhausted" in shown.out
    assert "x-death" in shown.out
    assert '"content": "hello"' in shown.out
    assert "r-1" not in shown.out
    assert (missing.code, missing.out) == (1, "")


async def test_a_replayed_letter_is_run_as_new(running_worker: RunningWorker) -> None:
    w = await running_worker()
    await died(w, "r-1", received_at=time.time() - 30)
    await asyncio.sleep(0)

    ended = await dlq(w.env, "replay", "r-1")

    assert ended.code == 0, ended.err
    assert "r-1: replayed" in ended.out
    result = await w.stored("r-1")
    assert (result["status"], result["attempt"]) == ("completed", 0)
    assert time.time() - result["received_at"] < 20
    assert (await w.seen()).dead == []


async def test_a_copy_has_the_properties_of_its_letter_less_what_the_broker_wrote(
    running_worker: RunningWorker, system: System
) -> None:
    w = await running_worker()
    w.at.model.default = wire.reset()
    await w.publish(request_body("r"), message_id="m", headers={"traceparent": "00-1", "CC": ["x"]}, priority=3)
    await dead(w, 1)
    await w.stop()

    assert await inside(w.env, "replay", everything=True) == 0

    (copy,) = await w.at.broker.take(w.queue)
    headers = {name: value for name, value in copy.headers.items() if name != "x-delivery-count"}  # Of this delivery.
    assert headers == {"traceparent": "00-1", "x-retry-count": 0}
    assert (copy.message_id, copy.priority, copy.expiration, copy.delivery_mode) == ("m", 3, None, 2)


async def test_a_completed_request_is_not_replayed(running_worker: RunningWorker, redis_client: RedisClient) -> None:
    w = await running_worker()
    await died(w, "r-1")
    await redis_client.set("infer_resp:r-1", '{"status": "completed", "status_code": 200, "result": 1}')

    ended = await dlq(w.env, "replay", "r-1", "--json")

    assert ended.code == 1
    assert ended.lines[0]["outcome"] == "completed"
    seen = await w.seen(dead=1)
    assert (seen.results["r-1"]["result"], seen.queued) == (1, [])


async def test_replay_and_purge_ask_which_and_a_dry_run_changes_nothing(running_worker: RunningWorker) -> None:
    w = await running_worker()
    await died(w, "r-1")

    which = await dlq(w.env, "replay")
    dry = await dlq(w.env, "replay", "--everything", "--dry-run")
    unasked = await dlq(w.env, "purge", "--everything")
    dry_purge = await dlq(w.env, "purge", "--reason", "retries_exhausted", "--dry-run")

    assert (which.code, unasked.code, dry.code, dry_purge.code) == (2, 2, 0, 0)
    assert "say which" in which.err
    assert "--yes" in unasked.err
    assert "1 would replay" in dry.out
    assert "1 would be purged" in dry_purge.out
    seen = await w.seen(dead=1)
    assert seen.results["r-1"]["status"] == "failed"


async def test_a_purge_removes_what_was_chosen_and_nothing_else(running_worker: RunningWorker) -> None:
    w = await running_worker()
    await died(w, "r-1", "r-2")

    ended = await dlq(w.env, "purge", "--id", "r-1", "--yes")

    assert (ended.code, ended.out) == (0, "r-1: purged\n1 purged\n")
    (left,) = (await w.seen(dead=1)).dead
    assert json.loads(left.body)["request_id"] == "r-2"


@pytest.mark.parametrize(("typed", "left"), [("yes", 0), ("y", 1), ("\x03", 1)], ids=["yes", "not yes", "Ctrl-C"])
async def test_on_a_terminal_a_purge_is_asked_about(
    typed: str, left: int, running_worker: RunningWorker, tmp_path: Path
) -> None:
    w = await running_worker()
    await died(w, "r-1")
    ours, theirs = os.openpty()
    process = await asyncio.create_subprocess_exec(
        *(*DLQ, "purge", "--everything"),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)} | {name: w.env[name] for name in NAMES},
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None
    async with asyncio.timeout(30):
        asked = await process.stderr.readuntil(b"Type yes: ")
        if typed == "\x03":
            process.send_signal(signal.SIGINT)
        else:
            os.write(ours, typed.encode() + b"\n")
        await process.communicate()
    os.close(ours)
    os.close(theirs)

    assert asked.startswith(f"Remove 1 dead letters of {w.dlq} for good?".encode())
    assert process.returncode == left
    assert len((await w.seen()).dead) == left


async def test_letters_of_another_deployment_are_left_alone_unless_all_are_meant(
    running_worker: RunningWorker, broker: Broker
) -> None:
    w = await running_worker()
    await died(w, "ours")
    other = await running_worker(DEPLOYMENT_ID=f"{w.env['DEPLOYMENT_ID']}-b", REPLICA_ID="replica-2")
    await died(other, "theirs")

    mine = await dlq(w.env, "list", "--json")
    every = await dlq(w.env, "list", "--all", "--json")
    ended = await dlq(w.env, "purge", "--everything", "--yes")

    assert [line["request_id"] for line in mine.lines] == ["ours"]
    assert {line["request_id"]: line["queue"] for line in every.lines} == {"ours": w.queue, "theirs": other.queue}
    assert "1 purged" in ended.out
    assert [json.loads(one.body)["request_id"] for one in await broker.take(w.dlq)] == ["theirs"]


@pytest.mark.timeout(300)  # Half a minute by itself: some twenty thousand letters are taken and given back.
async def test_more_than_a_thousand_letters_are_listed_many_times_and_none_is_lost(
    running_worker: RunningWorker, rabbitmq_url: str
) -> None:
    """B: a look gives each letter back, which a quorum queue counts; its limit is the worker's to set high."""
    w = await running_worker()
    await w.stop()
    letters = [request_body(f"r-{n}") for n in range(1200)]
    dead_in = {"x-death": [{"queue": w.queue, "reason": "rejected", "count": 1}]}
    await publish(rabbitmq_url, w.dlq, *letters, headers=dead_in)  # type: ignore[arg-type]

    for _ in range(3):
        ended = await dlq(w.env, "list", "--json", "--limit", "5000")
        assert len({line["request_id"] for line in ended.lines}) == 1200
    for _ in range(25):
        assert await inside(w.env, "list", ids=frozenset({"r-7"}), limit=1) == 0

    assert len(await drain_queue(rabbitmq_url, w.dlq)) == 1200


async def test_a_queue_of_others_that_may_drop_what_was_looked_at_is_not_looked_at_too_often(
    rabbitmq_url: str, redis_url: str, deployment_id: str
) -> None:
    env = {"DEPLOYMENT_ID": deployment_id, "RABBITMQ_URL": rabbitmq_url, "REDIS_URL": redis_url}
    env |= {"INFERENCE_DLQ": f"dlq.{deployment_id}"}
    declared: dict[str, str | int] = {"x-queue-type": "quorum", "x-delivery-limit": 20}
    await publish(rabbitmq_url, env["INFERENCE_DLQ"], request_body("r"), declare=declared)

    codes = [await inside(env, "list") for _ in range(14)]

    assert codes[:10] == [0] * 10
    assert codes[-1] == 1
    async with channel_of(rabbitmq_url) as channel:
        queue = await channel.declare_queue(env["INFERENCE_DLQ"], passive=True)
        assert queue.declaration_result.message_count == 1
        await channel.queue_delete(env["INFERENCE_DLQ"])


async def test_without_a_dead_letter_queue_it_says_so(rabbitmq_url: str, redis_url: str, deployment_id: str) -> None:
    env = {"DEPLOYMENT_ID": deployment_id, "RABBITMQ_URL": rabbitmq_url, "REDIS_URL": redis_url}

    ended = await dlq(env | {"INFERENCE_DLQ": f"dlq.{deployment_id}"}, "list")

    assert ended.code == 1
    assert f"there is no queue dlq.{deployment_id}" in ended.err
    assert "Traceback" not in ended.err


async def test_a_broker_that_is_not_there_is_one_line(redis_url: str) -> None:
    ended = await dlq(
        {"DEPLOYMENT_ID": "d", "RABBITMQ_URL": "amqp://u:secret@127.0.0.1:9/", "REDIS_URL": redis_url}, "list"
    )

    assert ended.code == 1
    assert "RabbitMQ cannot be asked (RABBITMQ_URL): connect" in ended.err
    assert "secret" not in ended.err
    assert "Traceback" not in ended.err


async def test_the_script_makes_room_unless_the_request_is_completed_or_running(
    redis_url: str, redis_client: RedisClient, deployment_id: str
) -> None:
    """What the command has seen before may have changed: the script looks itself, in the step that removes."""
    settings = load({"DEPLOYMENT_ID": deployment_id, "REDIS_URL": redis_url}, needs="client")
    async with redis_stores(settings) as stores:
        store = stores.results
        assert isinstance(store, RedisStore)
        await redis_client.set("infer_resp:done", '{"status":"completed","status_code":200,"result":1}')
        await redis_client.set("infer_resp:spaced", '{"status": "completed", "status_code": 200, "result": 1}')
        await redis_client.set("infer_resp:failed", '{"status":"failed","status_code":500,"error":"completed"}')
        await redis_client.hset(claim_key("failed"), mapping={"floor": 7})
        await store.claim("busy", 0, Token("t"), time.time() + 60)
        await store.claim("left", 0, Token("t"), time.time() + 60)
        await store.release("left", Token("t"), floor=3)

        made = {
            one: await store.make_room(one, time.time()) for one in ("done", "spaced", "failed", "busy", "left", "new")
        }

        assert made == {
            "done": "completed", "spaced": "completed", "failed": None, "busy": "running", "left": None, "new": None
        }  # fmt: skip
        kept = {bytes(key) for key in await redis_client.keys("*")}  # type: ignore[arg-type]  # Not decoded here.
        assert kept == {b"infer_resp:done", b"infer_resp:spaced", claim_key("busy").encode()}


# Cuts and kills

Set = Callable[[TcpProxy, TcpProxy], object]


@pytest.fixture
async def links(rabbit: Rabbit, redis_server: Redis, proxy: MakeProxy) -> tuple[TcpProxy, TcpProxy]:
    return await proxy(rabbit, speaks="amqp"), await proxy(redis_server, speaks="redis")


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda _, redis: redis.when_client_sends(script, Do.CUT), id="before the result is removed"),
        pytest.param(lambda _, redis: redis.when_client_sends(script, Do.CUT_ON_REPLY), id="after it, unknown"),
        pytest.param(lambda amqp, _: amqp.when_client_sends("basic.publish", Do.CUT), id="before the copy"),
        pytest.param(lambda amqp, _: amqp.when_server_sends("basic.ack", Do.CUT), id="after the copy, unconfirmed"),
        pytest.param(lambda amqp, _: amqp.when_client_sends("basic.ack", Do.CUT), id="before the letter is taken away"),
        pytest.param(lambda amqp, _: amqp.when_client_sends("basic.ack", Do.CUT_AFTER), id="after it"),
        pytest.param(lambda amqp, _: amqp.when_client_sends("basic.get", Do.CUT), id="before it is looked at"),
    ],
)
async def test_a_cut_at_any_step_of_a_replay_loses_nothing_and_it_can_be_repeated(
    fault: Set,
    system: System,
    links: tuple[TcpProxy, TcpProxy],
    rabbitmq_url: str,
    redis_url: str,
) -> None:
    amqp, redis = links
    ids = system.ids(3)
    env = system.env("x", {"RABBITMQ_MAX_RETRIES": "0"})
    async with system.worker(RABBITMQ_MAX_RETRIES="0") as worker:
        system.model.default = wire.reset()
        await system.submit(*ids)
        await system.answered(ids)
        await all_dead(system, 3)
        await system.stopped(worker)
    system.model.default = wire.answer(200, {"answer": 1})
    cut = env | {"RABBITMQ_URL": amqp.url(rabbitmq_url), "REDIS_URL": redis.url(redis_url)}
    fault(amqp, redis)

    first = await inside(cut, "replay", everything=True)
    await asyncio.sleep(0.2)
    where = {one["request_id"] for one in [*await bodies(system, system.dlq), *await bodies(system, system.queue)]}
    second = await inside(env, "replay", everything=True)

    assert first == 1
    assert where == set(ids), "a request is nowhere"
    assert second == 0
    async with system.worker("replica-2") as worker:
        await answered_well(system, ids)
        await system.drained()
        await system.stopped(worker)
    assert await bodies(system, system.dlq) == []
    assert await inside(env, "replay", everything=True) == 0


def script(unit: Any) -> bool:
    """The script of a replay, as it is called."""
    from inference_worker.redis_scripts import REPLAY

    return bool(unit.args and unit.args[0] == b"EVALSHA" and unit.args[1] == REPLAY.sha.encode())


async def bodies(system: System, queue: str) -> list[dict[str, Any]]:
    return [json.loads(message.body) for message in await peek(system.rabbitmq_url, queue)]


async def all_dead(system: System, count: int) -> None:
    async def there() -> bool:
        async with channel_of(system.rabbitmq_url) as channel:
            found = await channel.declare_queue(system.dlq, passive=True)
            return found.declaration_result.message_count == count

    await eventually(there, within=20, what=f"{count} dead letters", every=0.1)


async def answered_well(system: System, ids: list[str]) -> None:
    async def all_completed() -> bool:
        values = await system.redis.mget([f"infer_resp:{one}" for one in ids])
        return all(value is not None and json.loads(value)["status"] == "completed" for value in values)

    await eventually(all_completed, within=30, what="completed results", every=0.1)


async def begun(process: WorkerProcess) -> None:
    await eventually(
        lambda: "replayed" in process.log or process.returncode is not None, within=20, what="the first replay"
    )


async def test_kills_at_random_moments_of_a_replay_lose_nothing(system: System, tmp_path: Path) -> None:
    """Conservation at the end: an operator's replay may change a failed result, and nothing else."""
    ids = system.ids(60)
    async with system.worker(RABBITMQ_MAX_RETRIES="0") as worker:
        system.model.default = wire.reset()
        await system.submit(*ids)
        await system.answered(ids)
        await all_dead(system, 60)
        system.model.default = wire.answer(200, {"answer": 1})
        env = {name: system.env("x", {})[name] for name in NAMES}
        command = (*DLQ, "replay", "--everything", "--rate", "100")
        for number in range(6):
            async with WorkerProcess(env, output=tmp_path / f"replay{number}.log", command=command) as process:
                await begun(process)
                await asyncio.sleep(0.02 * number)
                if process.returncode is None:
                    os.kill(process.pid, signal.SIGKILL)
                    await process.wait(within=5)
        await inside(env, "replay", everything=True)
        await answered_well(system, ids)
        await system.drained()
        await inside(env, "purge", completed=True, yes=True)
        await system.stopped(worker)

    assert system.watcher is not None
    ends = [system.watcher.announced[one] for one in ids]
    assert ends == [["failed", "completed"]] * 60, "a completed result was replaced, or lost"
    evidence = await system.evidence()
    assert (evidence.queued, evidence.dead) == ({}, {})
    assert evidence.results.keys() == set(ids)


async def test_a_fault_of_the_model_takes_a_replayed_request_back_to_the_dead_letters(
    running_worker: RunningWorker, model: FakeModel
) -> None:
    w = await running_worker()
    await died(w, "r-1")
    model.default = wire.reset()

    assert await inside(w.env, "replay", everything=True) == 0

    await dead(w, 1)
    assert (await w.stored("r-1"))["error_code"] == "retries_exhausted"
