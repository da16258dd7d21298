"""Workers to be killed by the thousand: each a whole `inference-worker`, forked and killed by `nursery_process.py`."""

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
        self.killed = 0
        self.fell: list[int] = []
        """Exit codes of those that were dead before they were killed."""

    async def beget(self) -> None:
        """One more worker."""
        self._seed += 1
        self.alive.append(await self._ask(f"beget {self._seed}"))

    async def kill(self, pid: int) -> None:
        """By SIGKILL."""
        self.alive.remove(pid)
        code = await self._ask(f"kill {pid}")
        if code == -signal.SIGKILL:
            self.killed += 1
        else:
            self.fell.append(code)

    async def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n".encode())
        return int(await self._process.stdout.readline())


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
