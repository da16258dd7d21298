"""Google's own Pub/Sub emulator for the tests: one that runs already, the installed one, or a container of it.

`PUBSUB_EMULATOR_HOST` names one that runs; else the program is started where Debian's package
`google-cloud-cli-pubsub-emulator` has put it, else its image is run by Docker. One for all tests of a run, each with a
project of its own.
"""

import atexit
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from tests.services import LOOPBACK, START_S, Processes, free_port, reaper
from tests.waiting import wait_until

HOME = Path("/usr/lib/google-cloud-sdk/platform/pubsub-emulator/lib")
IMAGE = "gcr.io/google.com/cloudsdktool/google-cloud-cli:emulators"
HEAP = "-Xmx256m"


@cache
def emulator_address() -> str:
    """`host:port` of the run's emulator; skips the test where none can be had."""
    if given := os.environ.get("PUBSUB_EMULATOR_HOST"):
        return given
    port = free_port()
    jars, java = sorted(HOME.glob("cloud-pubsub-emulator-*-all.jar")), shutil.which("java")
    if jars and java:
        argv = [java, HEAP, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-jar", str(jars[-1])]
    elif docker := shutil.which("docker"):
        argv = [docker, "run", "--rm", "--init", f"--publish={LOOPBACK}:{port}:{port}", IMAGE]
        argv += ["gcloud", "beta", "emulators", "pubsub", "start", f"--host-port=0.0.0.0:{port}"]
    else:
        pytest.skip("needs the Pub/Sub emulator: google-cloud-cli-pubsub-emulator and Java, or Docker")
    if jars and java:
        argv += [f"--host={LOOPBACK}", f"--port={port}"]
    folder = Path(tempfile.mkdtemp(prefix="test-pubsub-"))
    reaper().remember("folder", str(folder))
    server = Processes(folder, argv, {"PATH": os.environ["PATH"], "HOME": str(folder)})
    atexit.register(server.close)
    server.start()
    wait_until(lambda: _answers(port), within=START_S, what=f"the Pub/Sub emulator on port {port}")
    return f"{LOOPBACK}:{port}"


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1):
        return True
    return False
