"""Gateways of a test: in its own process, with the settings of an environment, or as processes to be killed."""

import random
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from inference_worker.assembly import Outside
from inference_worker.config.settings import load
from inference_worker.serve_gateway import listening
from tests.faults.processes import WorkerProcess
from tests.services import free_port

COMMAND = (sys.executable, "-m", "inference_worker", "gateway")
READY_S = 20.0
STOP_S = 10.0


@asynccontextmanager
async def gateway(env: Mapping[str, str], **changes: str) -> AsyncGenerator[str]:
    """A whole gateway in this process, inside the context, which gives its URL."""
    settings = load({**env, "GATEWAY_PORT": "0", "REPLICA_ID": "gateway-1", **changes}, needs="gateway")
    async with listening(settings, Outside(now=time.time, rng=random.Random(1))) as url:
        yield url


class GatewayProcess(WorkerProcess):
    """One as a process of its own."""

    def __init__(self, env: Mapping[str, str], *, folder: Path, name: str = "gateway-1", **changes: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(
            {**env, "GATEWAY_PORT": str(port), "REPLICA_ID": name, **changes},
            output=folder / f"{name}.log",
            command=COMMAND,
        )

    async def up(self) -> str:
        """Its URL, once it is ready."""
        await self.ready(f"{self.url}/readyz", within=READY_S)
        return self.url
