"""What docs/many-queues.md tells to do, and what docs/redis.md says it takes, as they stand there."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker.producer import Producer, Request
from tests.faults.model import FakeModel
from tests.faults.processes import ROOT
from tests.integration.conftest import OwnRedis
from tests.integration.test_check import check
from tests.services import free_port

PAGE = (ROOT / "docs" / "many-queues.md").read_text()


async def test_the_quick_start_answers_as_it_says(tmp_path: Path, redis_url: str) -> None:
    (lines,) = re.findall(r"^## Quick start\n.*?^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    # Other tests have their own on the ports that a person would use.
    lines = lines.replace("8000", str(free_port())).replace("process $documents &", "process $documents $ports &")
    places = tmp_path / "bin"
    places.mkdir()
    for name, words in (("python", ""), ("inference-worker", "-m inference_worker")):
        (places / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (places / name).chmod(0o755)
    shell = await asyncio.create_subprocess_exec(
        *("bash", "-euc", lines),
        cwd=tmp_path,
        env={
            "PATH": f"{places}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "REDIS_URL": redis_url,
            "ports": "--health-port 0 --metrics-port 0",
            "LOG_LEVEL": "error",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(90):
            said = (await shell.communicate())[0].decode()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)

    assert shell.returncode == 0, said
    answers = re.findall(r"^200 (.*)$", said, re.MULTILINE)
    assert sorted(answers) == ["Hello from chat", "Hello from reports", "Hello from reports"]
    assert "local-max-concurrency; closes: 2 requests in flight in this process. Now: open" in " ".join(said.split())
    assert "all reached" in said


@pytest.mark.needs_control
async def test_the_permissions_that_the_docs_name_are_enough(
    tmp_path: Path, own_redis: OwnRedis, model: FakeModel
) -> None:
    server = await own_redis()
    page = (ROOT / "docs" / "redis.md").read_text()
    (shown,) = re.findall(r"^```\n(ACL SETUSER process .*?)^```", page, re.MULTILINE | re.DOTALL)
    gateway = {"igw_base_url": model.url, "request_path_url": "/v1/chat/completions"}
    queues = [{"queue_name": name, **gateway} for name in ("chat", "reports")]
    url = server.url.replace("redis://", "redis://process:secret@")
    (tmp_path / "queues.json").write_text(json.dumps({"url": url, "queues": queues}))
    flags = ("--transport", "redis-sortedset", "--transport-config-file", str(tmp_path / "queues.json"))
    async with RedisClient.from_url(server.url) as admin:
        await admin.execute_command(*shown.replace("PASSWORD", "secret").split())  # type: ignore[no-untyped-call]  # The driver's own gap.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "inference_worker", "process", *flags, "--health-port", "0", "--metrics-port", "0"),
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            async with Producer(server.url, result_queue="result-list", payload_keys=True) as producer:
                for queue in ("chat", "reports"):
                    await producer.submit(Request(payload={}, deadline=time.time() + 60, request_queue=queue))
                statuses = [(await producer.get_result(30)).status_code for _ in range(2)]
                await producer.submit(Request(id="late", payload={}, deadline=time.time() + 60, request_queue="chat"))
                await producer.cancel(["late"])
                await producer.get_result(30)
            checked = await check({}, "process", *flags, "--json")
        finally:
            process.terminate()
            await process.wait()
        # What may be refused: the driver's version, and what the server says of itself.
        refused = {entry["object"] for entry in await admin.acl_log()} - {"client|setinfo", "info"}

    assert statuses == [200, 200]
    assert refused == set()
    assert (process.returncode, checked.code) == (0, 0)
