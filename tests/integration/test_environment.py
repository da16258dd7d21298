"""Contract, sections 1 and 2: what the variables do, seen from outside; files read again, and the shape of the log."""

import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import aio_pika
import aiohttp
import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker import listener
from tests.faults.model import FakeModel
from tests.faults.processes import ROOT, WorkerProcess
from tests.faults.sinks import BillingServer, MetricServer
from tests.in_process import SOON_S, Broker, request_body
from tests.integration.conftest import OwnRedis, RunningWorker
from tests.services import Rabbit, free_port
from tests.waiting import eventually
from tests.worker_env import worker_env

NOWHERE = "http://127.0.0.1:9"
AWKWARD = "p@ss/word:#?%"
"""A password that must be encoded in a URL."""


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "FIRST_BACKOFF_S", 0.05)


# ---------------------------------------------------------------- section 1


def console_script(name: str) -> str:
    """The program that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert list(project["scripts"]) == [name]
    module, _, function = project["scripts"][name].partition(":")
    return f"from {module} import {function}; {function}()"


@pytest.mark.parametrize(
    "command",
    [
        pytest.param((sys.executable, "-m", "inference_worker"), id="the module, no command"),
        pytest.param((sys.executable, "-m", "inference_worker", "run"), id="the module, run"),
        # As an installer writes it; the tests also run where nothing is installed.
        pytest.param((sys.executable, "-c", console_script("inference-worker")), id="the console script, no command"),
    ],
)
async def test_with_no_command_it_is_run(command: tuple[str, ...], tmp_path: Path) -> None:
    """Section 1: "one console script `inference-worker` (also `python -m inference_worker`; with no command …)"."""
    port = free_port()
    async with WorkerProcess(nobody_there(port), output=tmp_path / "log", command=command) as process:
        await process.ready(f"http://127.0.0.1:{port}/livez")
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/status") as answer:
            status = await answer.json()
        process.terminate()
        assert await process.wait(within=13) == 0, process.log

    assert (status["queue"], status["state"]) == ("infer_req.d-1", "connecting")


def nobody_there(port: int = 0, **changes: str) -> dict[str, str]:
    """An environment whose neighbours are all away."""
    nowhere = f"127.0.0.1:{free_port()}"
    return worker_env(
        rabbitmq_url=f"amqp://{nowhere}/",
        redis_url=f"redis://{nowhere}/0",
        model_url=f"http://{nowhere}",
        deployment_id="d-1",
        http_port=port,
        **changes,
    )


# ---------------------------------------------------------------- section 2: the log, the ops port


async def log_of(env: Mapping[str, str], folder: Path) -> list[str]:
    """The lines of a worker that was started, waited for, and stopped."""
    async with WorkerProcess(env, output=folder / "log") as process:
        await process.logged("no connection to the broker; trying again")
        process.terminate()
        assert await process.wait(within=13) == 0, process.log
    return process.log.splitlines()


async def test_the_log_is_json_unless_told_otherwise(tmp_path: Path) -> None:
    """Section 2: `LOG_FORMAT` defaults to `json`, one object a line, and `LOG_LEVEL` to `info`."""
    lines = [json.loads(line) for line in await log_of(nobody_there(LOG_FORMAT="", LOG_LEVEL=""), tmp_path)]

    assert all({"timestamp", "level", "event"} <= line.keys() for line in lines)
    assert "debug" not in {line["level"] for line in lines}


async def test_the_log_can_be_for_people(tmp_path: Path) -> None:
    """Section 2: `LOG_FORMAT=console`."""
    lines = await log_of(nobody_there(LOG_FORMAT="console"), tmp_path)

    (line,) = [line for line in lines if "no connection to the broker" in line]
    assert "warning" in line
    assert "reason=" in line
    assert not [line for line in lines if line.startswith("{")]
    assert "\x1b" not in "".join(lines)  # no colours where nobody sees them


async def test_the_least_level_that_is_written_can_be_chosen(tmp_path: Path) -> None:
    """Section 2: `LOG_LEVEL`."""
    lines = [json.loads(line) for line in await log_of(nobody_there(LOG_LEVEL="warning"), tmp_path)]

    assert {line["level"] for line in lines} == {"warning"}


async def test_the_ops_port_is_there_for_all_interfaces(tmp_path: Path) -> None:
    """Section 2: "The ops port binds all interfaces (`WORKER_HTTP_HOST`)"; 127.0.0.2 is one that nobody named."""
    port = free_port()
    async with WorkerProcess(nobody_there(port, WORKER_HTTP_HOST=""), output=tmp_path / "log") as process:
        await process.ready(f"http://127.0.0.2:{port}/livez")


async def test_without_a_port_there_is_no_ops_port(tmp_path: Path) -> None:
    """Section 2: `WORKER_HTTP_PORT`, "0 = off"."""
    async with WorkerProcess(nobody_there(0), output=tmp_path / "log") as process:
        await process.logged("no connection to the broker; trying again")

        assert not listening(process.pid)


def listening(pid: int) -> list[str]:
    """The TCP sockets on which a process listens, as Linux tells them."""
    inodes = {path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


# ---------------------------------------------------------------- section 2: the broker by its parts


async def test_the_broker_can_be_named_by_its_parts(
    rabbit: Rabbit, vhost: str, deployment_id: str, running_worker: RunningWorker
) -> None:
    """Section 2: `RABBITMQ_HOST`, `_PORT`, `_USERNAME`, `_PASSWORD`, `_VHOST`, without a URL; any character counts."""
    name, virtual_host = f"u@{deployment_id}", vhost.rpartition("/")[2]
    rabbit.ctl("add_user", name, AWKWARD)
    try:
        rabbit.ctl("set_permissions", "-p", virtual_host, name, ".*", ".*", ".*")
        w = await running_worker(
            RABBITMQ_URL="",
            RABBITMQ_HOST=rabbit.host,
            RABBITMQ_PORT=str(rabbit.port),
            RABBITMQ_USERNAME=name,
            RABBITMQ_PASSWORD=AWKWARD,
            RABBITMQ_VHOST=virtual_host,
        )
        async with await aio_pika.connect(vhost) as connection:
            await Broker(connection).publish(w.queue, json.dumps(request_body("r")).encode())
            await w.disposed("ack")
        assert await w.at.broker.ready(w.queue) is None  # nothing in the default virtual host
        assert AWKWARD not in repr(w.at.log)
        await w.stop()
    finally:
        rabbit.ctl("delete_user", name)


# ---------------------------------------------------------------- section 2: files, read again


async def test_the_brokers_password_is_read_again_at_each_try(
    rabbit: Rabbit, running_worker: RunningWorker, tmp_path: Path
) -> None:
    """Section 2: `RABBITMQ_PASSWORD_FILE`, "read again at each reconnect"."""
    secret = tmp_path / "password"
    secret.write_text("wr0ng\n")
    parts = {"RABBITMQ_URL": "", "RABBITMQ_HOST": rabbit.host, "RABBITMQ_PORT": str(rabbit.port)}
    w = await running_worker(ready=False, **parts, RABBITMQ_PASSWORD_FILE=str(secret))
    await eventually(
        lambda: "refused the credentials" in w.worker.ready()["rabbitmq"][1], within=SOON_S, what="a refusal"
    )

    secret.write_text("guest\n")

    await w.consuming()


@pytest.mark.parametrize("name", ["REDIS_PASSWORD", "REDIS_URL"])
async def test_the_stores_url_and_password_are_read_again_at_each_try(
    name: str, own_redis: OwnRedis, running_worker: RunningWorker, tmp_path: Path
) -> None:
    """Section 2: `REDIS_URL_FILE`, `REDIS_PASSWORD_FILE`; and "`REDIS_PASSWORD` is used where the URL has none"."""
    server = await own_redis()
    async with RedisClient.from_url(server.url, socket_timeout=None) as admin:
        await admin.config_set("requirepass", "right")
    secret, open_url = tmp_path / "secret", f"redis://{server.host}:{server.port}/0"
    wrong, right = ("wrong", "right") if name == "REDIS_PASSWORD" else (open_url, f"redis://:right@{open_url[8:]}")
    secret.write_text(f"{wrong}\n")
    urls = {"REDIS_URL": "" if name == "REDIS_URL" else open_url}
    async with RedisClient.from_url(open_url, password="right", socket_timeout=None) as client:
        w = await running_worker(ready=False, redis=client, **urls, **{f"{name}_FILE": str(secret)})
        await eventually(
            lambda: w.worker.ready()["redis"] == (False, "Redis refused the credentials"),
            within=SOON_S,
            what="a refusal",
        )

        secret.write_text(f"{right}\n")

        await w.consuming()
        await w.publish(request_body("r"))
        await w.disposed("ack")
        assert (await w.seen()).result["status"] == "completed"


async def test_the_models_url_and_key_are_read_again(
    running_worker: RunningWorker, model: FakeModel, tmp_path: Path
) -> None:
    """Section 2: `MODEL_CONTAINER_URL_FILE` and `MODEL_API_KEY_FILE`, for calls and for looks at the health."""
    url, key = tmp_path / "url", tmp_path / "key"
    url.write_text(model.url)
    key.write_text("k-1")
    w = await running_worker(
        MODEL_CONTAINER_URL="", MODEL_CONTAINER_URL_FILE=str(url), MODEL_API_KEY="", MODEL_API_KEY_FILE=str(key)
    )
    await w.publish(request_body("r-1"))
    await w.disposed("ack")
    async with FakeModel() as moved:
        key.write_text("k-2")
        url.write_text(f"{moved.url}\n")

        await eventually(lambda: moved.probes, within=SOON_S, what="a look at the new place")
        await w.publish(request_body("r-2"))
        await w.disposed("ack", "ack")

        assert [request.headers["authorization"] for request in model.requests] == ["Bearer k-1"]
        assert [request.headers["authorization"] for request in moved.requests] == ["Bearer k-2"]
        assert moved.probes[-1].headers["authorization"] == "Bearer k-2"
        await w.stop()


async def test_the_metric_servers_url_and_token_are_read_again(running_worker: RunningWorker, tmp_path: Path) -> None:
    """Section 2: `METRIC_SERVER_URL_FILE` and `METRIC_SERVER_SERVICE_TOKEN_FILE`."""
    url, token = tmp_path / "url", tmp_path / "token"
    async with MetricServer() as first, MetricServer() as second:
        url.write_text(f"{first.url}\n")
        token.write_text("t-1\n")
        w = await running_worker(
            METRIC_SERVER_URL="",
            METRIC_SERVER_URL_FILE=str(url),
            METRIC_SERVER_SERVICE_TOKEN_FILE=str(token),
            METRICS_FLUSH_INTERVAL_S="0.1",
        )
        await first.received()

        token.write_text("t-2\n")
        url.write_text(f"{second.url}\n")

        await second.received()
        await w.stop()
        assert first.batches[0].headers["authorization"] == "Bearer t-1"
        assert {batch.headers["authorization"] for batch in second.batches} == {"Bearer t-2"}


async def test_the_billing_servers_url_is_read_again(
    running_worker: RunningWorker, billing: BillingServer, tmp_path: Path
) -> None:
    """Section 2: `CROESUS_HOST_FILE`; what one place did not take, the next one gets."""
    url = tmp_path / "url"
    url.write_text(f"{NOWHERE}\n")
    w = await running_worker(CROESUS_HOST="", CROESUS_HOST_FILE=str(url), METRICS_FLUSH_INTERVAL_S="0.1")
    await w.publish(request_body("r"))
    await w.disposed("ack")
    told = "the billing receiver does not take events; they are kept"
    await eventually(lambda: w.lines(told), within=SOON_S, what="a flush that failed")

    url.write_text(f"{billing.url}\n")

    await billing.billed(1)
    assert (await w.seen()).billed == ["r"]


async def test_the_addresses_of_exporters_are_read_again(running_worker: RunningWorker, tmp_path: Path) -> None:
    """Section 2: `VLLM_METRICS_URL_FILE`, `DCGM_METRICS_URL_FILE`."""
    load, gpus = tmp_path / "load", tmp_path / "gpus"
    load.write_text(NOWHERE)
    gpus.write_text(NOWHERE)
    async with MetricServer() as metrics, FakeModel() as exporter:
        exporter.metrics_text = 'vllm:num_requests_running 7\nDCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1"} 60\n'
        w = await running_worker(
            METRIC_SERVER_URL=metrics.url,
            METRIC_SERVER_SERVICE_TOKEN="t",
            VLLM_METRICS_URL_FILE=str(load),
            DCGM_METRICS_URL_FILE=str(gpus),
            METRICS_FLUSH_INTERVAL_S="0.1",
        )
        await metrics.received()

        load.write_text(f"{exporter.url}/metrics")
        gpus.write_text(f"{exporter.url}/metrics")

        def known() -> bool:
            last = metrics.batches[-1].content
            assert isinstance(last, dict)
            return last["model"]["requests_running"] == 7 and [gpu["uuid"] for gpu in last["gpus"]] == ["GPU-1"]

        await eventually(known, within=SOON_S, what="the load and the GPU")
        await w.stop()
