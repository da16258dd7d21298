"""Contract, sections 1 and 2: exit codes, what is said of a wrong environment, and what is never said."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from inference_worker.config.settings import describe
from tests.faults import wire
from tests.faults.model import FakeModel
from tests.faults.processes import ROOT, WorkerProcess
from tests.in_process import Broker, request_body
from tests.integration.conftest import RunningWorker
from tests.services import free_port
from tests.worker_env import queue_of, worker_env

SECRET = "hunter2"
COMMAND = (sys.executable, "-m", "inference_worker")
REQUIRED = ("DEPLOYMENT_ID", "REPLICA_ID", "USER_ID", "HF_MODEL_ID", "METRIC_SERVER_URL", "CROESUS_HOST")


async def ended(env: Mapping[str, str], *arguments: str, command: Sequence[str] = COMMAND) -> tuple[int, str, str]:
    """Run a process to its end: exit code, standard output, standard error."""

    def run() -> subprocess.CompletedProcess[str]:
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        return subprocess.run(
            [*command, *arguments],
            env={**inherited, "PYTHONPATH": str(ROOT), **env},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    done = await asyncio.to_thread(run)
    return done.returncode, done.stdout, done.stderr


def good_env(**changes: str) -> dict[str, str]:
    """An environment of neighbours that are not there; configuration alone can end the process."""
    nowhere = f"127.0.0.1:{free_port()}"
    env = worker_env(
        rabbitmq_url=f"amqp://guest:{SECRET}@{nowhere}/",
        redis_url=f"redis://:{SECRET}@{nowhere}/0",
        model_url=f"http://{nowhere}",
        deployment_id="d-1",
    )
    return env | changes


# ---------------------------------------------------------------- exit code 2


@pytest.mark.parametrize("arguments", [(), ("run",)], ids=["no command", "run"])
async def test_every_missing_variable_has_its_line_at_once(arguments: tuple[str, ...]) -> None:
    """Section 1: 2 for a configuration error, one line for every variable; with no command it is `run`."""
    code, out, err = await ended({}, *arguments)

    assert code == 2
    assert out == ""
    lines = err.splitlines()
    assert {line.partition(":")[0] for line in lines} == {*REQUIRED, "METRIC_SERVER_SERVICE_TOKEN"}
    assert all("is required and not set; accepted: " in line for line in lines)


WRONG = {
    "RABBITMQ_URL": f"http://guest:{SECRET}@host/",
    "RABBITMQ_PORT": "0",
    "RABBITMQ_PREFETCH": "0",
    "RABBITMQ_MAX_RETRIES": "-1",
    "RABBITMQ_HEARTBEAT_S": "never",
    "RABBITMQ_QUEUE_TYPE": "stream",
    "RABBITMQ_DELIVERY_LIMIT": "0",
    "RABBITMQ_RETRY_DELAY_S": "31",
    "RABBITMQ_PASSWORD": f"{SECRET}\x01",
    "INFERENCE_DLX": "amq.direct",
    "INFERENCE_MAX_CRASHES": "0",
    "CLAIM_LEASE_S": "0",
    "REDIS_URL": f"https://:{SECRET}@host/0",
    "REDIS_RESPONSE_TTL_S": "0",
    "REDIS_RETRY_DELAY_S": "nan",
    "MODEL_CONTAINER_URL": f"{SECRET}@model:8000",
    "MODEL_API_KEY": f"{SECRET}\n{SECRET}",
    "MODEL_INFER_PATH": "v1/chat/completions",
    "MODEL_HEALTH_PATH": "health",
    "MODEL_INFER_TIMEOUT_S": "inf",
    "MODEL_RETRY_STATUS_CODES": "200",
    "MODEL_MAX_RESPONSE_BYTES": "16MB",
    "HEALTH_CHECK_INTERVAL_S": "0",
    "HEALTH_FAILURE_THRESHOLD": "0",
    "METRIC_SERVER_URL": "metrics:9000",
    "METRIC_SERVER_SERVICE_TOKEN": f"{SECRET}\x7f",
    "METRICS_FLUSH_INTERVAL_S": "-1",
    "METRICS_MODEL_TTFT_HEADER": "x ttft",
    "VLLM_METRICS_URL": "file:///etc/passwd",
    "CROESUS_HOST": f"croesus:{SECRET}",
    "SHUTDOWN_GRACE_S": "-1",
    "WORKER_HTTP_PORT": "65536",
    "LOG_LEVEL": "loud",
    "LOG_FORMAT": "xml",
    "TLS_CA_FILE": "/nowhere/ca.pem",
    "DEPLOYMENT_ID": "x" * 222,
    "REPLICA_ID": "a\nb",
}


async def test_every_wrong_variable_has_its_line_at_once_and_no_secret_is_printed() -> None:
    """Section 1: name, what is wrong, what is accepted; "secrets never printed". No traceback."""
    code, out, err = await ended(good_env(**WRONG))

    assert code == 2
    assert {line.partition(":")[0] for line in err.splitlines()} == WRONG.keys()
    assert all("; accepted: " in line for line in err.splitlines())
    assert "Traceback" not in err + out
    assert SECRET not in err + out


@pytest.mark.parametrize("name", [row.name for row in describe() if row.secret])
async def test_a_secret_that_is_wrong_is_named_and_not_shown(name: str) -> None:
    """Section 1, for each secret by itself."""
    env = good_env(METRIC_SERVER_URL="http://metrics", METRIC_SERVER_SERVICE_TOKEN="t")

    code, _, err = await ended(env | {name: f"{SECRET}\x02"})

    assert code == 2
    assert err.startswith(f"{name}: ")
    assert SECRET not in err


# ---------------------------------------------------------------- _FILE twins


async def test_a_value_and_its_file_together_are_an_error(tmp_path: Path) -> None:
    """Section 2: "both set is a configuration error"; so is a file that cannot be read."""
    (tmp_path / "key").write_text(SECRET)
    env = good_env(
        MODEL_API_KEY=SECRET,
        MODEL_API_KEY_FILE=str(tmp_path / "key"),
        REDIS_PASSWORD_FILE=str(tmp_path / "missing"),
        RABBITMQ_PASSWORD_FILE=str(tmp_path),
    )

    code, _, err = await ended(env)

    assert code == 2
    named = {line.partition(":")[0]: line for line in err.splitlines()}
    assert named.keys() == {"MODEL_API_KEY", "REDIS_PASSWORD", "RABBITMQ_PASSWORD"}
    assert "MODEL_API_KEY_FILE too" in named["MODEL_API_KEY"]
    assert "No such file" in named["REDIS_PASSWORD"]
    assert SECRET not in err


async def test_urls_and_keys_come_from_files(
    running_worker: RunningWorker, model: FakeModel, rabbitmq_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Section 2: every secret and URL has a twin; a trailing newline is dropped."""
    files = {
        "RABBITMQ_URL": rabbitmq_url,
        "REDIS_URL": redis_url,
        "MODEL_CONTAINER_URL": model.url,
        "MODEL_API_KEY": "k-1",
    }
    for name, value in files.items():
        (tmp_path / name).write_text(f"{value}\n")
    w = await running_worker(**dict.fromkeys(files, ""), **{f"{name}_FILE": str(tmp_path / name) for name in files})

    await w.publish(request_body("r"))
    await w.disposed("ack")

    assert model.requests[0].headers["authorization"] == "Bearer k-1"
    assert (await w.seen()).result["status"] == "completed"


# ---------------------------------------------------------------- exit codes 1 and 0


async def test_a_port_in_use_ends_the_process_with_1_and_says_so() -> None:
    """Section 1: "1 for anything else", in a line that names the variable, without a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = await ended(good_env(WORKER_HTTP_PORT=str(port)))

    assert code == 1
    said = out + err
    assert f"WORKER_HTTP_PORT: cannot listen on 127.0.0.1:{port}: it is in use" in said
    assert "Traceback" not in said
    assert SECRET not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
async def test_a_stop_while_no_neighbour_is_there_is_0(tmp_path: Path, number: signal.Signals) -> None:
    """Section 1: 0 after a stop that was asked for; section 5: unreachable neighbours never end the process."""
    async with WorkerProcess(good_env(LOG_LEVEL="debug"), output=tmp_path / "log") as process:
        await process.logged("no connection to the broker; trying again")
        await process.logged("the model is not healthy")
        assert process.returncode is None

        os.kill(process.pid, number)
        assert await process.wait(within=13) == 0, process.log

    assert SECRET not in process.log
    assert "Traceback" not in process.log


async def test_a_stop_that_hands_requests_back_is_0_and_in_time(
    rabbitmq_url: str, redis_url: str, deployment_id: str, model: FakeModel, broker: Broker, tmp_path: Path
) -> None:
    """Section 1: "0 after a stop that was asked for, hand-backs included, at most 10 s after the grace"."""
    model.default = wire.silent()
    port = free_port()
    env = worker_env(
        rabbitmq_url=rabbitmq_url,
        redis_url=redis_url,
        model_url=model.url,
        deployment_id=deployment_id,
        http_port=port,
        SHUTDOWN_GRACE_S="0.5",
    )
    async with WorkerProcess(env, output=tmp_path / "log") as process:
        await process.ready(f"http://127.0.0.1:{port}/readyz")
        await broker.publish(queue_of(env), json.dumps(request_body("r")).encode())
        await model.busy()

        told = time.monotonic()
        process.terminate()
        assert await process.wait(within=20) == 0, process.log

    assert 0.5 <= time.monotonic() - told < 10.5
    (message,) = await broker.take(queue_of(env))
    assert "x-retry-count" not in message.headers
    await broker.delete(queue_of(env), env["INFERENCE_DLQ"])


async def test_a_sink_that_is_off_asks_for_nothing(tmp_path: Path) -> None:
    """Section 2: "With a sink `off`, its other variables are not required"; every kind is written off at will."""
    env = good_env(METRIC_SERVER_URL="OFF", CROESUS_HOST="off")
    assert "METRIC_SERVER_SERVICE_TOKEN" not in env
    async with WorkerProcess(env, output=tmp_path / "log") as process:
        await process.logged("no connection to the broker; trying again")

        process.terminate()
        assert await process.wait(within=13) == 0, process.log
