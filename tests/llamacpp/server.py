"""A real llama.cpp server with a tiny random model, as a fixture: a conftest imports `llama_server` by name."""

import sys
import urllib.error
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass

import pytest

from tests.faults.processes import WorkerProcess
from tests.services import LOOPBACK, free_port
from tests.waiting import wait_until

SLOTS = 4
START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaServer:
    """Where it listens; its model calls itself `tiny`, `/metrics` and `/slots` are on."""

    url: str
    process: WorkerProcess


@pytest.fixture(scope="session")
def llama_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[LlamaServer]:
    """Made once per run. Elsewhere than on Linux x86-64 there is no wheel of it, and the test says so by failing."""
    from tests.llamacpp.tiny_gguf import write

    folder = tmp_path_factory.mktemp("llamacpp")
    write(folder / "tiny.gguf")
    port = free_port()
    command = (sys.executable, "-m", "tests.llamacpp.serve", str(folder / "tiny.gguf"), str(port), str(SLOTS))
    process = WorkerProcess({}, output=folder / "output", command=command)
    url = f"http://{LOOPBACK}:{port}"
    process.start()
    try:
        wait_until(lambda: process.returncode is not None or _healthy(url), within=START_S, what="llama.cpp")
        assert process.returncode is None, process.log[-4000:]
        yield LlamaServer(url=url, process=process)
    finally:
        process.kill()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
