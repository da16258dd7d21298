"""Workers to be killed by the thousand: each a whole `inference-worker process`, forked by `nursery_process.py`."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from tests.every_transport import Told
from tests.faults.processes import ROOT
from tests.services import reaper


class Nursery:
    """Workers, of which each can be killed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._seed = 0
        self.alive: list[int] = []

    async def beget(self) -> None:
        """One more worker."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._seed += 1
        self._process.stdin.write(f"{self._seed}\n".encode())
        self.alive.append(int(await self._process.stdout.readline()))

    def kill(self, pid: int) -> None:
        """By SIGKILL."""
        self.alive.remove(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def nursery(told: Told) -> AsyncGenerator[Nursery, None]:
    """One whose workers are told this; they end with it."""
    said = {"flags": dict(told.flags), "environ": dict(told.environ), "modules": told.modules}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.faults.nursery_process", json.dumps(said)),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    reaper().remember("group", str(process.pid))
    try:
        yield Nursery(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        reaper().forget("group", str(process.pid))
