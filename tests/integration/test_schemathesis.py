"""The OpenAPI document is true: whatever fits it is accepted, whatever does not is refused, and all is answered so."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

from tests.faults.processes import ROOT, WorkerProcess
from tests.integration.test_dev import up
from tests.services import free_port

CONFIG = ROOT / "tests" / "schemathesis.toml"
FEWEST_CASES = 300
WITHIN_S = 60.0


async def test_every_answer_is_one_that_the_document_describes(tmp_path: Path) -> None:
    """Positive and negative data, all checks, every phase; the same requests in every run."""
    env = {"GATEWAY_PORT": str(free_port()), "WORKER_HTTP_PORT": "0", "IWL_MAX_QUEUE_DEPTH": "0"}
    options = ("--samples", "0", "--latency", "0", "--tokens-per-second", "0", "--max-num-seqs", "256")
    command = (sys.executable, "-m", "inference_worker", "dev", *options)
    async with WorkerProcess(
        env | {"RABBITMQ_PREFETCH": "64"}, output=tmp_path / "dev.log", command=command
    ) as process:
        url = await up(process)
        ran = await asyncio.to_thread(
            subprocess.run,
            [
                *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG)),
                *("run", f"{url}/openapi.json", "--mode", "all", "--max-examples", "15"),
                "--generation-deterministic",
                *("--request-timeout", "10", "--suppress-health-check", "all", "--no-color"),
            ],
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path), "NO_PROXY": "*", "COLUMNS": "200"},
        )

    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    generated = re.search(r"(\d+) generated", ran.stdout)
    assert generated, ran.stdout[-4000:]
    assert int(generated[1]) >= FEWEST_CASES
    assert "Traceback" not in process.log
