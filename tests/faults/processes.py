"""The worker, or any program, as a process that can be stopped, frozen and killed."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from tests.services import reaper
from tests.waiting import eventually

RUN = (sys.executable, "-m", "inference_worker", "run")
ROOT = Path(__file__).resolve().parents[2]
"""The repository: the worker is run from source where it is not installed."""

_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "COVERAGE_PROCESS_START", "SSL_CERT_FILE")


class WorkerProcess:
    """One process in a group of its own; its output goes to a file. Of our environment it sees only a few names.

    `async with WorkerProcess(env, output=tmp_path / "worker.log") as worker:` starts it, and kills it at the end.
    """

    def __init__(self, env: Mapping[str, str], *, output: Path, command: Sequence[str] = RUN) -> None:
        self.env = dict(env)
        self.command = command
        self.output = output
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, also again after an end; the output of all runs is in one file."""
        assert self.returncode is not None or self._process is None, "it still runs"
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                self.command,
                env={"PYTHONUNBUFFERED": "1", "PYTHONPATH": path} | inherited | self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        reaper().remember("group", str(self._process.pid))

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal; None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def log(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def terminate(self) -> None:
        """SIGTERM to the process itself, as a container engine does."""
        self._signal(signal.SIGTERM)

    def interrupt(self) -> None:
        self._signal(signal.SIGINT)

    def stop(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    async def stop_cont(self, frozen_s: float) -> None:
        """Freeze for this long, as a long pause of the machine or of the process would."""
        self.stop()
        try:
            await asyncio.sleep(frozen_s)
        finally:
            self.cont()

    def kill(self) -> None:
        """SIGKILL to the group, and reap."""
        if self._process is None:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        reaper().forget("group", str(self._process.pid))

    async def wait(self, within: float) -> int:
        """The exit code.

        Raises:
            NotInTime: it has not ended `within` seconds; the end of its output is in the message.
        """
        try:
            await eventually(lambda: self.returncode is not None, within=within, what=f"the end of {self._what()}")
        except AssertionError as late:
            raise type(late)(f"{late}\n{self.log[-4000:]}") from late
        assert self.returncode is not None
        return self.returncode

    async def ready(self, url: str, *, within: float = 20.0, status: int = 200) -> None:
        """Wait until `url` (of `/readyz`) answers `status`; an end of the process is a failure at once."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:

            async def answers() -> bool:
                if self.returncode is not None:
                    raise RuntimeError(f"{self._what()} ended with {self.returncode}\n{self.log[-4000:]}")
                try:
                    async with session.get(url) as answer:
                        return answer.status == status
                except (aiohttp.ClientError, TimeoutError):
                    return False

            try:
                await eventually(answers, within=within, what=f"{status} from {url}")
            except AssertionError as late:
                raise type(late)(f"{late}\n{self.log[-4000:]}") from late

    async def logged(self, text: str, *, within: float = 10.0) -> None:
        """Wait until `text` stands in the output."""
        await eventually(lambda: text in self.log, within=within, what=f"{text!r} in the output of {self._what()}")

    def _signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def _what(self) -> str:
        return f"process {self.pid} ({' '.join(self.command[-2:])})"

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
