"""Pub/Sub for the tests: a service that runs already, Google's own emulator, or one of ours.

`PUBSUB_EMULATOR_HOST` names one that runs. Else `TEST_PUBSUB` = `emulator` | `server` chooses; unset, it is Google's
emulator where the package `google-cloud-cli-pubsub-emulator` and Java are installed, and elsewhere `pubsub_server`,
which is always there. One for all tests of a process, each with a project of its own.
"""

import atexit
import os
import shutil
import socket
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.services import LOOPBACK, START_S, Processes, free_port, reaper
from tests.waiting import wait_until

HOME = Path("/usr/lib/google-cloud-sdk/platform/pubsub-emulator/lib")
HEAP = "-Xmx256m"
ROOT = Path(__file__).parent.parent


@cache
def emulator_address() -> str:
    """`host:port` of the run's service."""
    if given := os.environ.get("PUBSUB_EMULATOR_HOST"):
        return given
    port = free_port()
    argv = _emulator(port) if chosen() == "emulator" else _server(port)
    folder = Path(tempfile.mkdtemp(prefix="test-pubsub-"))
    reaper().remember("folder", str(folder))
    server = Processes(folder, argv, {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT)})
    atexit.register(server.close)
    server.start()
    wait_until(lambda: _answers(port), within=START_S, what=f"Pub/Sub on port {port}")
    return f"{LOOPBACK}:{port}"


def chosen() -> str:
    """Whose it is: `given`, `emulator`, `server`."""
    if os.environ.get("PUBSUB_EMULATOR_HOST"):
        return "given"
    said = os.environ.get("TEST_PUBSUB") or ("emulator" if _jars() and shutil.which("java") else "server")
    if said not in ("emulator", "server"):
        raise ValueError(f"TEST_PUBSUB is {said!r}; accepted: emulator, server")
    return said


def _jars() -> list[Path]:
    return sorted(HOME.glob("cloud-pubsub-emulator-*-all.jar"))


def _emulator(port: int) -> list[str]:
    java, jars = shutil.which("java"), _jars()
    if java is None or not jars:
        raise RuntimeError("TEST_PUBSUB=emulator needs the package google-cloud-cli-pubsub-emulator, and Java")
    tuned = [HEAP, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    return [java, *tuned, "-jar", str(jars[-1]), f"--host={LOOPBACK}", f"--port={port}"]


def _server(port: int) -> list[str]:
    return [sys.executable, "-m", "tests.pubsub_server", "--port", str(port)]


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1):
        return True
    return False
