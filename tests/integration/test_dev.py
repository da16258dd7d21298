"""`dev` as a process: contract, section 1, and what a newcomer does with it, as printed."""

import asyncio
import fcntl
import os
import re
import shlex
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker.mock_model import MockModel, MockModelConfig
from tests.faults.processes import ROOT, WorkerProcess
from tests.integration.conftest import OwnRedis
from tests.services import Rabbit
from tests.waiting import eventually, wait_until

DEV = (sys.executable, "-m", "inference_worker", "dev")
PORTS = {"GATEWAY_PORT": "0"}
READY_S = 40.0
STOP_S = 20.0
JOB = {"payload": {"messages": [{"role": "user", "content": "one two three"}]}}
NOW = "What happens now"


@asynccontextmanager
async def dev(
    tmp_path: Path, env: Mapping[str, str] | None = None, *options: str
) -> AsyncGenerator[WorkerProcess, None]:
    """A `dev` that is starting."""
    process = WorkerProcess({**PORTS, **(env or {})}, output=tmp_path / "dev.log", command=(*DEV, *options))
    async with process:
        yield process


def url_of(printed: str) -> str:
    found = re.search(r"HTTP intake\s+(http://[\d.]+:\d+)/v1/jobs", printed)
    assert found, printed
    return found[1]


async def up(process: WorkerProcess) -> str:
    """The URL of the intake, once everything has been printed."""
    await process.logged(NOW, within=READY_S)
    return url_of(process.log)


async def stopped(process: WorkerProcess) -> str:
    """What was printed at the end of a stop that was asked for by Ctrl-C."""
    process.interrupt()
    assert await process.wait(STOP_S) == 0, process.log
    assert "Traceback" not in process.log
    return process.log.splitlines()[-1]


def block(printed: str, begins: str) -> str:
    """The lines printed between a heading and the next empty line, to be pasted."""
    after = printed.partition(f"{begins}\n\n")[2]
    assert after, printed
    return after.partition("\n\n")[0]


def run_printed(*command: str) -> str:
    env = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(trust_env=False, timeout=60)


async def result_of(url: str, job_id: str) -> dict[str, Any]:
    async with client() as http:
        body: dict[str, Any] = (await http.get(f"{url}/v1/jobs/{job_id}", params={"wait": 30})).json()
        return body


@contextmanager
def taken(port: int = 0) -> Generator[int]:
    """A port that somebody listens on; a named one may be taken by another already."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            sock.bind(("127.0.0.1", port))
            sock.listen()
        yield port or sock.getsockname()[1]


async def test_a_newcomer_sees_answers_and_can_do_what_is_printed(tmp_path: Path) -> None:
    async with dev(tmp_path) as process:
        url = await up(process)

        printed = process.log
        assert printed.count("succeeded") == 3
        assert "(streamed)" in printed
        assert "Reachable from this machine alone" in printed

        by_curl = await asyncio.to_thread(run_printed, "bash", "-c", block(printed, "Send one yourself:"))
        assert '"status":"succeeded"' in by_curl
        assert "Hello, queue" in by_curl

        by_python = await asyncio.to_thread(run_printed, sys.executable, "-c", block(printed, "Or from Python:"))
        assert "'status': 'succeeded'" in by_python

        async with client() as http:
            answer = await http.post(f"{url}/v1/jobs", json=JOB)
        assert answer.status_code == 202
        body = await result_of(url, answer.json()["job_id"])
        assert body["result"]["choices"][0]["message"]["content"] == "one two three"

        await process.logged("done 6, failed 0", within=10)
        assert await stopped(process) == "Stopped: 6 done, 0 failed; the queue is empty"


async def test_a_failed_job_is_shown_as_failed_with_its_reason(tmp_path: Path) -> None:
    async with dev(tmp_path, None, "--samples", "1", "--fault", '{"status": 418}') as process:
        await up(process)

        await process.logged("done 0, failed 1", within=10)
        assert "This is a fault that was asked for: 418." in process.log
        assert "0 done, 1 failed" in await stopped(process)


async def test_sigterm_lets_what_runs_end(tmp_path: Path) -> None:
    async with dev(tmp_path, None, "--samples", "0", "--latency", "3") as process:
        url = await up(process)
        async with client() as http:
            await http.post(f"{url}/v1/jobs", json=JOB)
        await process.logged("running 1", within=10)

        process.terminate()

        assert await process.wait(STOP_S) == 0
        assert "Stopping: 1 running may finish" in process.log
        assert "Stopped: 1 done, 0 failed; the queue is empty" in process.log


@pytest.mark.parametrize("name", ["GATEWAY_PORT", "WORKER_HTTP_PORT"])
async def test_a_port_that_was_named_and_is_taken_ends_it_with_one_line(tmp_path: Path, name: str) -> None:
    with taken() as port:
        async with dev(tmp_path, {name: str(port)}) as process:
            code = await process.wait(STOP_S)

    assert code == 1
    assert f"{name}: cannot listen on 127.0.0.1:{port}: it is in use" in process.log
    assert "Traceback" not in process.log


async def test_default_ports_that_are_taken_are_left_to_their_owners(tmp_path: Path) -> None:
    with taken(8080), taken(9090):
        async with dev(tmp_path, {"GATEWAY_PORT": ""}, "--samples", "1") as process:
            url = await up(process)

            assert "Port 8080 is taken; the HTTP intake is on" in process.log
            assert "Port 9090 is taken; the worker's own page is on" in process.log
            assert not url.endswith(":8080")
            assert "1 done, 0 failed" in await stopped(process)


async def test_it_says_that_it_waits_for_the_users_own_model_and_jobs_wait_in_the_queue(tmp_path: Path) -> None:
    with taken() as port:
        pass
    async with dev(tmp_path, {"MODEL_CONTAINER_URL": f"http://127.0.0.1:{port}"}) as process:
        await process.logged("Waiting (up to 60 s) for the model", within=READY_S)
        url = url_of(process.log)

        async with client() as http:
            answer = await http.post(f"{url}/v1/jobs", json=JOB)
            view = await http.get(f"{url}{answer.headers['location']}")

        assert (answer.status_code, view.json()["status"]) == (202, "queued")
        assert "1 queued is gone" in await stopped(process)


async def test_the_users_own_model_is_called_by_its_own_name(tmp_path: Path) -> None:
    model = MockModel(MockModelConfig(model="people/model-7b", strict_model=True))
    async with model.serving() as model_url, dev(tmp_path, {"MODEL_CONTAINER_URL": model_url}) as process:
        await up(process)

        assert process.log.count("succeeded") == 3
        assert f"people/model-7b at {model_url}" in process.log
        assert '"model": "people/model-7b"' in block(process.log, "Send one yourself:")
        await stopped(process)


async def test_a_model_that_comes_late_is_asked_for_its_name_then(tmp_path: Path) -> None:
    with taken() as port:
        pass
    env = {"MODEL_CONTAINER_URL": f"http://127.0.0.1:{port}", "HEALTH_CHECK_INTERVAL_S": "0.2"}
    async with dev(tmp_path, env) as process:
        await process.logged("Waiting (up to 60 s) for the model", within=READY_S)
        async with MockModel(MockModelConfig(model="people/late", strict_model=True)).serving(port=port):
            await up(process)

        assert process.log.count("succeeded") == 3
        assert '"model": "people/late"' in block(process.log, "Send one yourself:")
        await stopped(process)


@pytest.mark.parametrize("used", [("rabbitmq",), ("redis",), ("rabbitmq", "redis")], ids=" and ".join)
async def test_real_servers_take_the_place_of_the_embedded_ones_each_by_itself(
    tmp_path: Path,
    rabbitmq_url: str,
    redis_url: str,
    redis_client: RedisClient,
    deployment_id: str,
    used: tuple[str, ...],
) -> None:
    env = {"DEPLOYMENT_ID": deployment_id}
    env |= {"RABBITMQ_URL": rabbitmq_url} if "rabbitmq" in used else {}
    env |= {"REDIS_URL": redis_url} if "redis" in used else {}

    async with dev(tmp_path, env) as process:
        await up(process)

        assert process.log.count("succeeded") == 3
        assert (f"queue infer_req.{deployment_id}" in process.log) == ("rabbitmq" in used)
        assert (re.search(r"results +redis://", process.log) is not None) == ("redis" in used)
        assert len(await redis_client.keys("infer_resp:*")) == (3 if "redis" in used else 0)
        last = await stopped(process)
        assert ("is in RabbitMQ" in last) == ("rabbitmq" in used)


async def test_a_stream_takes_the_place_of_the_embedded_queue(
    tmp_path: Path, redis_url: str, redis_client: RedisClient, deployment_id: str
) -> None:
    stream = f"{deployment_id}:jobs"
    env = {"TRANSPORT": "redis-streams", "REDIS_URL": redis_url, "IWL_STREAM": stream}

    async with dev(tmp_path, env) as process:
        await up(process)

        assert process.log.count("succeeded") == 3
        assert f"queue {stream}" in process.log
        assert len(await redis_client.keys("infer_resp:*")) == 3
        assert "is in Redis" in await stopped(process)


async def test_with_a_file_of_keys_only_who_has_one_comes_in(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made = await asyncio.to_thread(
        run_printed, sys.executable, "-m", "inference_worker", "gateway", "--new-key", "acme"
    )
    key, line = made.splitlines()[1], made.splitlines()[-1]
    path.write_text(f'{{"keys": [{line}]}}')

    async with dev(tmp_path, {"GATEWAY_API_KEYS_FILE": str(path)}) as process:
        url = await up(process)
        async with client() as http:
            refused = await http.post(f"{url}/v1/jobs", json=JOB)
            accepted = await http.post(f"{url}/v1/jobs", json=JOB, headers={"Authorization": f"Bearer {key}"})

        assert (refused.status_code, accepted.status_code) == (401, 202)
        assert "An API key" in process.log
        await stopped(process)


async def test_without_keys_other_machines_stay_outside_whatever_is_asked_for(tmp_path: Path) -> None:
    async with dev(tmp_path, {"GATEWAY_HOST": "0.0.0.0"}, "--samples", "1") as process:
        url = await up(process)

        assert url.startswith("http://127.0.0.1:")
        assert "GATEWAY_HOST has no effect" in process.log
        await stopped(process)


def documented(page: str, begins: str) -> list[str]:
    """The words of the command that a page of the docs shows."""
    found = re.search(rf"^```\n({begins}.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return shlex.split(found[1])


@pytest.mark.needs_control
async def test_the_permissions_that_the_docs_name_are_enough(
    tmp_path: Path, rabbit: Rabbit, own_redis: OwnRedis, deployment_id: str
) -> None:
    """Through retries, delayed and not, dead letters, and the outbox, whose receiver is away."""
    redis = await own_redis()
    allow = [
        word.replace("PASSWORD", "secret").replace("DEPLOYMENT_ID", deployment_id)
        for word in documented("redis.md", "ACL SETUSER worker")
    ]
    # A `dev` is a gateway, too: its user may what both may.
    also = [word.replace("DEPLOYMENT_ID", deployment_id) for word in documented("redis.md", "ACL SETUSER gateway")]
    rules = also[also.index(">PASSWORD") + 1 :]
    async with RedisClient.from_url(redis.url, socket_timeout=None) as admin:
        await admin.execute_command(*allow, *rules)  # type: ignore[no-untyped-call]  # The driver's own gap.
    user = f"u-{deployment_id}"
    permit = [word.replace("DEPLOYMENT_ID", deployment_id) for word in documented("rabbitmq.md", "rabbitmqctl")][1:]
    await asyncio.to_thread(rabbit.ctl, "add_user", user, "secret")
    await asyncio.to_thread(rabbit.ctl, *[user if word == "worker" else word for word in permit])
    with taken() as nobody:
        pass
    env = {
        "DEPLOYMENT_ID": deployment_id,
        "RABBITMQ_URL": f"amqp://{user}:secret@{rabbit.host}:{rabbit.port}/",
        "REDIS_URL": f"redis://worker:secret@{redis.host}:{redis.port}/0",
        "RABBITMQ_RETRY_DELAY_S": "0.05",
        "CROESUS_HOST": f"http://127.0.0.1:{nobody}",
        "METRICS_FLUSH_INTERVAL_S": "0.5",
    }
    try:
        async with dev(tmp_path, env, "--fault", '{"drop": true, "times": 4}') as process:
            url = await up(process)
            async with client() as http:
                answer = await http.post(f"{url}/v1/jobs", json={**JOB, "metadata": {"a": "b"}})
            body = await result_of(url, answer.json()["job_id"])

            assert body["status"] == "succeeded"
            assert (process.log.count("succeeded"), process.log.count("dead")) == (2, 1)
            await process.logged("retried 3", within=10)
            await stopped(process)
            assert "ACCESS_REFUSED" not in process.log
        async with RedisClient.from_url(redis.url, socket_timeout=None) as admin:
            refused = await admin.acl_log()
        # redis-py tells its version where it may, and does not mind.
        assert [entry["object"] for entry in refused if entry["object"] != "client|setinfo"] == []
    finally:
        await asyncio.to_thread(rabbit.ctl, "delete_user", user)


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, env: Mapping[str, str], *options: str) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        os.set_blocking(self._master, False)
        self.shown = ""
        base = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        self._process = subprocess.Popen(
            [*DEV, *options],
            env=base | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), **env},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)

    def read(self) -> str:
        with suppress(BlockingIOError, OSError):
            while data := os.read(self._master, 65536):
                self.shown += data.decode(errors="replace")
        return self.shown

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> int:
        """The exit code, once it has ended."""
        wait_until(
            lambda: self.read() is not None and self._process.poll() is not None,
            within=STOP_S,
            what="the end of dev on its terminal",
        )
        assert self._process.returncode is not None
        return self._process.returncode

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._master)


async def test_on_a_terminal_there_is_a_live_view_and_warnings_stand_above_it(tmp_path: Path) -> None:
    terminal = Terminal({**PORTS, "HEALTH_CHECK_INTERVAL_S": "0.2"}, "--samples", "1")
    try:
        await eventually(lambda: NOW in terminal.read(), within=READY_S, what="the live view")
        plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.shown)
        url = url_of(plain)
        model = re.search(r"model +mock-model at (http://[\d.:]+)", plain)
        assert model

        async with client() as http:
            answer = await http.post(f"{url}/v1/jobs", json=JOB)
            await result_of(url, answer.json()["job_id"])
            # The view moves the cursor up and writes its two lines anew.
            await eventually(
                lambda: re.search(r"\x1b\[1A.*retried.*\r\n[^\n]*\b2\b", terminal.read()) is not None,
                within=10,
                what="a view that counts 2 done",
            )
            await http.post(f"{model[1]}/mock/faults", json={"unhealthy": True})
            # The view is erased first, so that the line stands where it was.
            await eventually(
                lambda: (
                    re.search(r"\x1b\[2K(\x1b\[[\d;]*m|[^\x1b\n])*model is not healthy", terminal.read()) is not None
                ),
                within=10,
                what="a warning of the model's health above the view",
            )
            await eventually(lambda: "suspended: the model" in terminal.read(), within=10, what="the state in the view")

        terminal.press(b"\x03")

        assert terminal.end() == 0, shlex.quote(terminal.shown)
        assert "Stopped: 2 done, 0 failed" in terminal.shown
    finally:
        terminal.close()
