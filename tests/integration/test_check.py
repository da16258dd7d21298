"""`check`: what it says of each neighbour, what it does not disturb, and that it ends in time."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker.config.settings import describe
from tests.conservation import channel_of, drain_queue, publish
from tests.faults.model import FakeModel
from tests.faults.processes import ROOT
from tests.faults.sinks import BillingServer
from tests.in_process import request_body
from tests.integration.conftest import MakeProxy, OwnRedis, RunningWorker
from tests.readme_table import README
from tests.services import Rabbit
from tests.worker_env import queue_of, worker_env

CHECK = (sys.executable, "-m", "inference_worker", "check")
LONGEST_S = 14.0
"""Ten seconds, and the start of Python."""


class Ended:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def said(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self.out)
        return said

    def of(self, what: str) -> tuple[str, str, str]:
        """State, detail and mend of a row."""
        (row,) = [row for row in self.said["checks"] if row["what"] == what]
        return row["state"], row["detail"], row["mend"]


async def check(env: Mapping[str, str], *options: str) -> Ended:
    process = await asyncio.create_subprocess_exec(
        *(*CHECK, *options),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


@pytest.fixture
def env(rabbitmq_url: str, redis_url: str, model: FakeModel, deployment_id: str) -> dict[str, str]:
    model.metrics_text = "vllm:num_requests_running 2\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.5\n"
    return worker_env(rabbitmq_url=rabbitmq_url, redis_url=redis_url, model_url=model.url, deployment_id=deployment_id)


async def test_where_all_is_reached_it_says_what_was_seen(env: dict[str, str], billing: BillingServer) -> None:
    ended = await check(env | {"CROESUS_HOST": billing.url}, "--json")

    assert ended.code == 0, ended.out
    assert ended.said["reached"] is True
    assert "RabbitMQ 3" in ended.of("RabbitMQ")[1] or "RabbitMQ 4" in ended.of("RabbitMQ")[1]
    assert "does not exist yet: the worker declares it" in ended.of("request queue")[1]
    assert "scripts may write" in ended.of("Redis")[1]
    assert ended.of("model")[0] == "ok"
    assert ended.of("model identity") == ("ok", "serves tiny", "")
    assert ended.of("model metrics")[1] == "2 running, 1 waiting, KV cache 50%"
    assert ended.of("metric server")[0] == "off"
    assert ended.of("billing")[0] == "ok"


async def test_a_table_is_what_people_get(env: dict[str, str]) -> None:
    ended = await check(env, "--variables")

    assert ended.code == 0
    assert "all reached" in ended.out
    assert "RABBITMQ_PREFETCH" in ended.out


async def test_nothing_is_reached(env: dict[str, str]) -> None:
    nowhere = {
        "RABBITMQ_URL": "amqp://user:secret-1@127.0.0.1:9/",
        "REDIS_URL": "redis://:secret-2@127.0.0.1:9/0",
        "MODEL_CONTAINER_URL": "http://127.0.0.1:9",
        "METRIC_SERVER_URL": "http://127.0.0.1:9",
        "METRIC_SERVER_SERVICE_TOKEN": "secret-3",
        "CROESUS_HOST": "http://user:secret-4@127.0.0.1:9",
        "MODEL_API_KEY": "secret-5",
    }
    ended = await check(env | nowhere, "--json", "--variables")

    assert ended.code == 1
    assert ended.said["reached"] is False
    failed = {row["what"] for row in ended.said["checks"] if row["state"] == "failed"}
    assert failed == {"RabbitMQ", "Redis", "model", "metric server", "billing"}
    assert all(row["mend"] for row in ended.said["checks"] if row["state"] == "failed")
    assert "secret" not in ended.out + ended.err
    assert "Traceback" not in ended.err


async def test_neighbours_that_never_answer_are_given_up_in_time(
    env: dict[str, str], rabbit: Rabbit, proxy: MakeProxy
) -> None:
    silent = await proxy(rabbit)
    silent.silence()
    where = f"127.0.0.1:{silent.port}"
    begun = time.monotonic()

    ended = await check(
        env
        | {
            "RABBITMQ_URL": f"amqp://guest:guest@{where}/",
            "REDIS_URL": f"redis://{where}/0",
            "MODEL_CONTAINER_URL": f"http://{where}",
            "CROESUS_HOST": f"http://{where}",
        },
        "--json",
    )

    assert time.monotonic() - begun < LONGEST_S
    assert ended.code == 1
    assert [ended.of(what)[0] for what in ("RabbitMQ", "Redis", "model", "billing")] == ["failed"] * 4


async def test_every_wrong_variable_is_exit_code_2_with_a_line_of_its_own(env: dict[str, str]) -> None:
    ended = await check(env | {"RABBITMQ_PREFETCH": "0", "HF_MODEL_ID": "", "REDIS_URL": "http://x"})

    assert (ended.code, ended.out) == (2, "")
    assert sorted(line.split(":")[0] for line in ended.err.splitlines()) == [
        "HF_MODEL_ID",
        "RABBITMQ_PREFETCH",
        "REDIS_URL",
    ]


async def test_wrong_credentials_are_told_from_a_broker_that_is_away(
    env: dict[str, str], rabbit: Rabbit, own_redis: OwnRedis
) -> None:
    locked = await own_redis("--requirepass", "right")
    ended = await check(
        env
        | {
            "RABBITMQ_URL": f"amqp://guest:pw-4711@{rabbit.host}:{rabbit.port}/",
            "REDIS_URL": f"redis://:pw-4711@{locked.host}:{locked.port}/0",
        },
        "--json",
    )

    assert "refused the credentials" in ended.of("RabbitMQ")[1]
    assert "does not know them" in ended.of("RabbitMQ")[2]
    assert "refused the credentials" in ended.of("Redis")[1]
    assert "REDIS_PASSWORD" in ended.of("Redis")[2]
    assert "4711" not in ended.out


@pytest.mark.needs_control
async def test_missing_permissions_are_named(env: dict[str, str], rabbit: Rabbit) -> None:
    name = env["DEPLOYMENT_ID"]
    await publish(env["RABBITMQ_URL"], queue_of(env), declare={})
    for arguments in (("add_user", name, "pw"), ("set_permissions", name, "", "", "")):
        await asyncio.to_thread(rabbit.ctl, *arguments)

    ended = await check(env | {"RABBITMQ_URL": f"amqp://{name}:pw@{rabbit.host}:{rabbit.port}/"}, "--json")

    await asyncio.to_thread(rabbit.ctl, "delete_user", name)
    state, detail, mend = ended.of("request queue")
    assert (ended.code, state, mend) == (1, "failed", "grant the permissions of docs/rabbitmq.md")
    assert "ACCESS_REFUSED" in detail


async def test_a_queue_in_another_form_is_a_warning_and_stays_as_it_is(env: dict[str, str]) -> None:
    await publish(env["RABBITMQ_URL"], queue_of(env), request_body("r"), declare={"x-max-length": 10})

    ended = await check(env, "--json")

    state, detail, _ = ended.of("request queue")
    assert (ended.code, state) == (0, "warning")
    assert "1 ready, 0 consumers" in detail
    assert "PRECONDITION_FAILED" in detail
    assert len(await drain_queue(env["RABBITMQ_URL"], queue_of(env))) == 1


async def test_a_running_deployment_is_not_disturbed(running_worker: RunningWorker) -> None:
    w = await running_worker()
    await w.publish(request_body("r-1"))
    await w.stored("r-1")

    ended = await check({**w.env, "HF_MODEL_ID": "other"}, "--json")

    assert ended.code == 0, ended.out
    assert "0 ready, 1 consumers" in ended.of("request queue")[1]
    assert ended.of("request queue")[0] == "ok"
    assert ended.of("model identity")[:2] == ("warning", "serves tiny, and HF_MODEL_ID is other")
    await w.publish(request_body("r-2"))
    await w.disposed("ack", "ack")
    seen = await w.seen()
    assert (seen.dispositions, seen.queued, seen.dead) == (["ack", "ack"], [], [])


async def test_nothing_is_declared_on_a_broker_that_has_nothing(env: dict[str, str]) -> None:
    await check(env)

    async with channel_of(env["RABBITMQ_URL"]) as channel:
        for name in (queue_of(env), env["INFERENCE_DLQ"]):
            with pytest.raises(Exception, match="NOT_FOUND"):
                await channel.declare_queue(name, passive=True)
            await channel.reopen()


async def test_a_redis_that_forgets_is_a_warning(env: dict[str, str], own_redis: OwnRedis) -> None:
    forgetful = await own_redis("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    careful = await own_redis("--appendonly", "yes")

    warned = await check(env | {"REDIS_URL": forgetful.url}, "--json")
    fine = await check(env | {"REDIS_URL": careful.url}, "--json")

    assert warned.of("Redis memory")[1].startswith("maxmemory-policy is allkeys-lru")
    assert warned.of("Redis persistence")[0] == "warning"
    assert [row["what"] for row in fine.said["checks"] if row["what"].startswith("Redis ")] == []
    assert (warned.code, fine.code) == (0, 0)


async def test_a_replica_is_told(env: dict[str, str], own_redis: OwnRedis) -> None:
    replica = await own_redis()
    async with RedisClient.from_url(replica.url) as client:
        await client.replicaof("127.0.0.1", "1")

    ended = await check(env | {"REDIS_URL": replica.url}, "--json")

    assert ended.code == 1
    assert ended.of("Redis")[2] == "REDIS_URL: this is a replica; name the primary"


async def test_a_model_that_is_sick_is_not_reached(env: dict[str, str], model: FakeModel) -> None:
    model.sick(status=503)

    ended = await check(env, "--json")

    assert ended.code == 1
    assert ended.of("model")[1].endswith("/health: HTTP 503")


async def test_what_is_allowed_and_not_meant_is_a_warning(env: dict[str, str]) -> None:
    ended = await check(env | {"REDIS_RESPONSE_TTL_S": "10", "RABBITMQ_PREFETH": "4"}, "--json")

    rows = [row for row in ended.said["checks"] if row["what"] == "configuration"]
    assert [row["state"] for row in rows] == ["warning", "warning"]
    assert "REDIS_RESPONSE_TTL_S is shorter than MODEL_INFER_TIMEOUT_S" in rows[0]["detail"]
    assert (rows[1]["detail"], rows[1]["mend"]) == (
        "RABBITMQ_PREFETH is set, and there is no such variable",
        "RABBITMQ_PREFETCH is probably meant",
    )


async def test_readme_check_and_settings_have_the_same_variables(env: dict[str, str]) -> None:
    ended = await check(env, "--json")

    checked = [variable["name"] for variable in ended.said["variables"]]
    assert checked == [variable.name for variable in describe()]
    rows = [line for line in README.read_text().splitlines() if line.startswith("| `")]
    named = [line.split("`")[1] for line in rows if line.split("`")[1] in checked]
    assert set(named) == set(checked)
