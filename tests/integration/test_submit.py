"""`submit` as a process, over RabbitMQ and Redis and over HTTP; stopped, killed and gone on with."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.faults import model as fake
from tests.faults import wire
from tests.faults.model import FakeModel
from tests.faults.processes import ROOT, WorkerProcess
from tests.faults.system import System
from tests.in_process import InProcess
from tests.integration.conftest import RunningWorker
from tests.integration.test_client import held_until, intake
from tests.integration.test_dev import dev, up
from tests.services import Rabbit
from tests.waiting import eventually

SUBMIT = (sys.executable, "-m", "inference_worker", "submit")
END_S = 60.0


def chat(text: str) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}]}


def client_env(env: Mapping[str, str]) -> dict[str, str]:
    """What `submit` needs to be told, and no more."""
    return {name: env[name] for name in ("DEPLOYMENT_ID", "RABBITMQ_URL", "REDIS_URL")}


class Ended:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


async def submit(env: Mapping[str, str], *options: str, stdin: str = "", cwd: Path | None = None) -> Ended:
    """Run it to its end."""
    process = await asyncio.create_subprocess_exec(
        *(*SUBMIT, *options),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **env},
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(END_S):
        out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


def running(env: Mapping[str, str], tmp_path: Path, *options: str) -> WorkerProcess:
    return WorkerProcess(env, output=tmp_path / "submit.log", command=(*SUBMIT, *options))


def jsonl(path: Path, *values: object) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_one_prompt_is_answered_on_stdout(running_worker: RunningWorker) -> None:
    w = await running_worker()

    ended = await submit(client_env(w.env), "--prompt", "hello", "--model", "tiny")

    assert (ended.code, ended.err) == (0, "")
    (line,) = ended.lines
    assert (line["status"], line["status_code"]) == ("completed", 200)
    assert json.loads(w.at.model.requests[0].body) == chat("hello")


async def test_a_payload_comes_from_the_command_line_or_a_file_and_a_failure_is_exit_code_1(
    running_worker: RunningWorker, model: FakeModel, tmp_path: Path
) -> None:
    w = await running_worker()
    (tmp_path / "payload.json").write_text(json.dumps(chat("from a file"), indent=2))
    model.when_prompt_has("bad", wire.error(418, "no coffee"))

    from_file = await submit(client_env(w.env), "--payload", f"@{tmp_path / 'payload.json'}")
    payload = json.dumps(chat("bad"))
    failed = await submit(client_env(w.env), "--payload", payload, "--request-id", "mine", "--priority", "3")

    assert (from_file.code, failed.code) == (0, 1)
    (line,) = failed.lines
    assert (line["request_id"], line["error"], line["error_code"]) == ("mine", "no coffee", "model_error")


async def test_a_file_of_all_kinds_of_lines_is_answered_in_its_order(
    running_worker: RunningWorker, model: FakeModel, tmp_path: Path
) -> None:
    w = await running_worker(RABBITMQ_PREFETCH="8")
    model.when_prompt_has("slow", fake.ok(takes_s=0.5))
    batch = {"custom_id": "c-3", "method": "POST", "url": "/v1/chat/completions", "body": chat("third")}
    given = jsonl(
        tmp_path / "in.jsonl",
        chat("slow first"),
        {"payload": chat("second"), "request_id": "second", "tenant": "acme", "timeout_s": 30, "priority": 3},
        batch,
        {"payload": {"input": "x"}, "endpoint": "/v1/embeddings"},
    )
    output = tmp_path / "out.jsonl"

    ended = await submit(client_env(w.env), given, "--output", str(output))

    assert ended.code == 0, ended.err
    first, second, third, fourth = read(output)
    assert first["request_id"].endswith("-1")
    assert second["request_id"] == "second"
    assert (third["custom_id"], third["response"]["status_code"]) == ("c-3", 200)
    assert fourth["result"]["data"][0]["embedding"] == [0.0, 1.0]
    assert "4/4: 4 completed, 0 failed" in ended.err
    assert names_in(tmp_path) == ["in.jsonl", "out.jsonl"], "the state is left"


async def test_lines_from_a_pipe_are_answered_on_stdout(running_worker: RunningWorker, tmp_path: Path) -> None:
    w = await running_worker()
    lines = "".join(json.dumps(chat(str(number))) + "\n" for number in range(3))

    ended = await submit(client_env(w.env), stdin=lines, cwd=tmp_path)

    assert (ended.code, len(ended.lines)) == (0, 3)
    assert names_in(tmp_path) == []


async def test_every_bad_line_is_named_before_anything_is_sent(running_worker: RunningWorker, tmp_path: Path) -> None:
    w = await running_worker()
    (tmp_path / "in.jsonl").write_text(f'{json.dumps(chat("good"))}\nnonsense\n{{"payload": 3, "timeout_s": -1}}\n')

    ended = await submit(client_env(w.env), str(tmp_path / "in.jsonl"))

    assert (ended.code, ended.out) == (1, "")
    assert "line 2: is not a request" in ended.err
    assert "line 3: payload: must be a JSON object" in ended.err
    assert "timeout_s: must be a finite number of seconds above 0" in ended.err
    assert "2 of 3 lines are no requests; nothing was sent" in ended.err
    assert w.at.model.requests == []


async def test_a_line_that_failed_is_in_the_output_and_makes_exit_code_1(
    running_worker: RunningWorker, model: FakeModel, tmp_path: Path
) -> None:
    w = await running_worker()
    model.when_prompt_has("bad", wire.error(400, "no"))

    ended = await submit(client_env(w.env), jsonl(tmp_path / "in.jsonl", chat("a"), chat("bad"), chat("c")))

    assert ended.code == 1
    assert [line["status"] for line in ended.lines] == ["completed", "failed", "completed"]


async def test_a_missing_variable_is_exit_code_2_with_its_name() -> None:
    ended = await submit({}, "--prompt", "hello")

    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("DEPLOYMENT_ID: is required")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("in.jsonl", "--prompt", "x"), "FILE and --prompt do not go together"),
        (("--payload", "{}", "--model", "m"), "--model goes with --prompt"),
        (("--priority", "3"), "--priority goes with --prompt or --payload"),
        (("--payload", "{}", "--priority", "256"), "256 is above 255"),
        (("in.jsonl", "--tenant", "t"), "each line has its own"),
        (("--resume", "s", "--output", "o"), "--resume goes on with the output"),
        (("--payload", "[]"), "accepted: a JSON object"),
        (("missing.jsonl",), "missing.jsonl cannot be opened: No such file"),
        (("--resume", "missing"), "--resume: missing cannot be read"),
        (("--prompt", "x", "--endpoint", "/v1/other"), "accepted: /v1/chat/completions"),
    ],
)
async def test_options_that_cannot_be_meant_are_exit_code_2(
    options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    ended = await submit({"DEPLOYMENT_ID": "d"}, *options, cwd=tmp_path)

    assert ended.code == 2
    assert said in ended.err
    assert "Traceback" not in ended.err


async def test_an_output_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")

    ended = await submit(
        {"DEPLOYMENT_ID": "d"}, jsonl(tmp_path / "in.jsonl", chat("x")), "--output", str(tmp_path / "out")
    )

    assert ended.code == 2
    assert "exists; name another file, or remove it" in ended.err
    assert (tmp_path / "out").read_text() == "precious"


async def test_an_output_that_cannot_be_made_is_found_before_anything_is_sent(
    running_worker: RunningWorker, tmp_path: Path
) -> None:
    w = await running_worker()
    nowhere, answer = tmp_path / "nope" / "x", tmp_path / "answer.jsonl"

    refused = await submit(client_env(w.env), "--prompt", "hello", "--model", "tiny", "--output", str(nowhere))
    unread = await submit(client_env(w.env), "--payload", "{", "--output", str(answer))
    written = await submit(client_env(w.env), "--prompt", "hello", "--model", "tiny", "--output", str(answer))

    assert (refused.code, unread.code, written.code) == (2, 2, 0)
    assert f"--output: {nowhere} cannot be made" in refused.err
    assert len(w.at.model.requests) == 1
    assert [line["status"] for line in read(answer)] == ["completed"]


async def test_over_http_it_is_the_same(running_worker: RunningWorker, tmp_path: Path) -> None:
    w = await running_worker(RABBITMQ_PREFETCH="8")
    given = jsonl(tmp_path / "in.jsonl", *(chat(str(number)) for number in range(20)))
    async with intake(w) as url:
        one = await submit({}, "--url", url, "--prompt", "hello")
        many = await submit({}, "--url", url, given)

    assert (one.code, many.code) == (0, 0)
    assert [line["status"] for line in many.lines] == ["completed"] * 20
    assert "takes no ids of ours" not in many.err
    asked = [json.loads(request.body)["messages"][0]["content"] for request in w.at.model.requests]
    assert sorted(asked) == sorted(["hello", *(str(number) for number in range(20))])


async def test_dev_is_reached_by_its_url(tmp_path: Path) -> None:
    async with dev(tmp_path, None, "--samples", "0") as process:
        url = await up(process)

        ended = await submit({}, "--url", url, "--prompt", "Hello, queue")

    assert ended.code == 0
    assert ended.lines[0]["result"]["choices"][0]["message"]["content"] == "Hello, queue"


# Stopped, and gone on with


@asynccontextmanager
async def half_way(
    w: InProcess, tmp_path: Path, lines: int, *more: str, env: Mapping[str, str] | None = None
) -> AsyncGenerator[WorkerProcess, None]:
    """A run of which some lines are written and some are held by the model."""
    given = jsonl(tmp_path / "in.jsonl", *(chat(f"n{number} ") for number in range(lines)))
    options = (given, "--output", str(tmp_path / "out.jsonl"), "--in-flight", "4", *more)
    async with running(client_env(w.env) if env is None else env, tmp_path, *options) as process:
        await eventually(
            lambda: (tmp_path / "out.jsonl").exists() and len(read_so_far(tmp_path)) >= 3 and w.at.model.in_flight,
            within=30,
            what="a few lines",
        )
        yield process


def read_so_far(tmp_path: Path) -> list[bytes]:
    return (tmp_path / "out.jsonl").read_bytes().splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
@pytest.mark.parametrize("over", ["the broker", "http"])
async def test_a_run_that_was_stopped_is_gone_on_with_and_makes_no_second_request(
    number: signal.Signals, over: str, running_worker: RunningWorker, model: FakeModel, tmp_path: Path
) -> None:
    gate = asyncio.Event()
    model.when_prompt_has("n5 ", held_until(gate))
    w = await running_worker(RABBITMQ_PREFETCH="4")
    state = tmp_path / "out.jsonl.resume"
    async with intake(w) as url:
        way = ("--url", url) if over == "http" else ()
        async with half_way(w, tmp_path, 20, *way, env={} if over == "http" else None) as process:
            await eventually(lambda: len(model.requests) == 20 or model.in_flight, within=20, what="the held request")
            await asyncio.sleep(1.2)  # Past a save of the state, which is what a kill leaves.
            if number == signal.SIGINT:
                process.interrupt()
                assert await process.wait(within=20) == 1
                assert f"inference-worker submit --resume {state}" in process.log
            else:
                process.kill()
        gate.set()
        assert json.loads(state.read_bytes())["written"] == len(read_so_far(tmp_path)) == 5

        ended = await submit(client_env(w.env) if not way else {}, "--resume", str(state))

    assert ended.code == 0, ended.err
    results = read(tmp_path / "out.jsonl")
    assert len(results) == len({one["request_id"] for one in results}) == 20
    assert not state.exists()
    asked = [json.loads(request.body)["messages"][0]["content"] for request in model.requests]
    assert sorted(asked) == sorted(f"n{n} " for n in range(20))


async def test_what_a_killed_run_wrote_and_did_not_note_is_written_once(
    running_worker: RunningWorker, model: FakeModel, tmp_path: Path
) -> None:
    gate = asyncio.Event()
    model.when_prompt_has("n5 ", held_until(gate))
    w = await running_worker(RABBITMQ_PREFETCH="4")
    async with half_way(w, tmp_path, 10) as process:
        await asyncio.sleep(1.0)
        process.kill()
    gate.set()
    with (tmp_path / "out.jsonl").open("ab") as output:
        output.write(b'{"request_id": "written and not noted"}\n{"half a li')

    ended = await submit(client_env(w.env), "--resume", str(tmp_path / "out.jsonl.resume"))

    assert ended.code == 0
    assert [one["request_id"].rpartition("-")[2] for one in read(tmp_path / "out.jsonl")] == [
        str(number) for number in range(1, 11)
    ]


async def test_on_a_terminal_there_is_a_bar_with_rate_and_time_left(
    running_worker: RunningWorker, model: FakeModel, tmp_path: Path
) -> None:
    model.default = fake.ok(takes_s=0.1)
    w = await running_worker(RABBITMQ_PREFETCH="4")
    ours, theirs = os.openpty()
    process = await asyncio.create_subprocess_exec(
        *(*SUBMIT, jsonl(tmp_path / "in.jsonl", *(chat(str(n)) for n in range(60)))),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
        | client_env(w.env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    shown = asyncio.create_task(asyncio.to_thread(read_terminal, ours))
    async with asyncio.timeout(END_S):
        out, _ = await process.communicate()
        seen = await shown

    assert process.returncode == 0
    assert len(out.splitlines()) == 60
    assert "/60" in seen
    assert "/s" in seen
    assert " left" in seen
    assert "60/60: 60 completed, 0 failed" in seen


def read_terminal(descriptor: int) -> str:
    """All that is written to it, until its other end is closed."""
    seen = b""
    with suppress(OSError):  # EIO is how a terminal ends.
        while some := os.read(descriptor, 65536):
            seen += some
    os.close(descriptor)
    return seen.decode(errors="replace")


async def test_an_input_that_was_changed_is_not_gone_on_with(
    running_worker: RunningWorker, model: FakeModel, tmp_path: Path
) -> None:
    gate = asyncio.Event()
    model.when_prompt_has("n5 ", held_until(gate))
    w = await running_worker(RABBITMQ_PREFETCH="4")
    async with half_way(w, tmp_path, 10) as process:
        process.interrupt()
        await process.wait(within=20)
    gate.set()
    jsonl(tmp_path / "in.jsonl", chat("another"))

    ended = await submit(client_env(w.env), "--resume", str(tmp_path / "out.jsonl.resume"))

    assert ended.code == 2
    assert "is not what it was when the run was begun" in ended.err


async def test_a_run_that_was_stopped_is_not_begun_anew_over_its_state(tmp_path: Path) -> None:
    given = jsonl(tmp_path / "in.jsonl", chat("x"))
    (tmp_path / "in.jsonl.resume").write_text("{}")

    ended = await submit({"DEPLOYMENT_ID": "d"}, given)

    assert ended.code == 2
    assert "a run was stopped. Go on with --resume" in ended.err


async def test_a_queue_that_is_missing_stops_the_run_and_leaves_it_to_be_gone_on_with(
    rabbitmq_url: str, redis_url: str, deployment_id: str, tmp_path: Path
) -> None:
    env = {"DEPLOYMENT_ID": deployment_id, "RABBITMQ_URL": rabbitmq_url, "REDIS_URL": redis_url}

    ended = await submit(env, jsonl(tmp_path / "in.jsonl", chat("x"), chat("y")))

    assert (ended.code, ended.out) == (1, "")
    assert f"there is no queue infer_req.{deployment_id}" in ended.err
    assert "0 of 2 are written. Go on with" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.needs_control
async def test_a_restart_of_the_broker_loses_no_line(system: System, rabbit: Rabbit, tmp_path: Path) -> None:
    """The bar's shape with fewer lines; `python -m tests.bench submit` has all 10,000 and counts the memory."""
    system.model.default = fake.ok(takes_s=0.02)
    output = tmp_path / "out.jsonl"
    given = jsonl(
        tmp_path / "in.jsonl",
        *({"payload": chat(f"n{n}"), "request_id": one} for n, one in enumerate(system.ids(1500))),
    )
    system.submitted += system.ids(1500)
    env = client_env(system.env("x", {}))
    async with system.worker() as worker:
        async with running(env, tmp_path, given, "--output", str(output)) as process:
            await eventually(
                lambda: output.exists() and len(output.read_bytes().splitlines()) > 200, within=40, what="some lines"
            )
            await asyncio.to_thread(rabbit.stop)
            await asyncio.to_thread(rabbit.start)
            assert await process.wait(within=100) == 0, process.log
        assert [one["request_id"] for one in read(output)] == system.ids(1500)
        await system.drained()
        await system.billed()
        await system.stopped(worker)

    await system.conserved()
