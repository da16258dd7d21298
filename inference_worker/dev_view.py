"""What `dev` shows of itself: what is queued, running, done and failed, live or line by line."""

import asyncio
import io
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from inference_worker import logs
from inference_worker.assembly import Stores, Worker
from inference_worker.config.settings import Settings
from inference_worker.errors import TransportLost
from inference_worker.messages import ERROR_CODES
from inference_worker.serve_gateway import Neighbours
from inference_worker.timing import stopped_within
from inference_worker.transports.memory import MemoryBroker

LOOK_S: Final = 0.25
BACKLOG_S: Final = 1.0
PLAIN_S: Final = 1.0
"""At most one plain line in so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevParts:
    """What the embedded whole is made of."""

    settings: Settings
    stores: Stores
    broker: MemoryBroker | None
    """None where the queue is not embedded."""
    sidecar: Worker
    neighbours: Neighbours


def what_is_missing(sidecar: Worker) -> str:
    """Why messages do not flow, in words."""
    listener = sidecar.listener
    if listener.transport is None:
        return f"the queue: {listener.link_reason}" if listener.link_reason else "the queue"
    names = {"model": "the model", "store": "the result store", "kept": "answers to be stored"}
    return ", ".join(f"{names.get(reason, reason)}: {why}" for reason, why in listener.suspended.items())


@dataclass(frozen=True, slots=True)
class _Numbers:
    queued: int | None
    running: int
    done: int
    failed: int
    retried: int
    state: str

    def line(self) -> str:
        queued = "?" if self.queued is None else self.queued
        retried = f", retried {self.retried}" if self.retried else ""
        state = "" if self.state == "consuming" else f" ({self.state})"
        return f"queued {queued}, running {self.running}, done {self.done}, failed {self.failed}{retried}{state}"


class View:
    """Shows what is queued, running, done and failed until told to stop."""

    def __init__(self, parts: DevParts, console: Console, *, live: bool) -> None:
        self._parts = parts
        self._console = console
        self._live = live
        self._queued: int | None = None
        self._looked_at = -BACKLOG_S
        self.url = ""
        self.model = ""

    async def show(self, stop: asyncio.Event) -> None:
        """Until told to stop."""
        if self._live:
            await self._show_live(stop)
        else:
            await self._show_lines(stop)

    def summary(self) -> str:
        """One line for the end."""
        now, broker = self._count(), self._parts.broker
        if broker is None:
            kept_in = "Redis" if self._parts.settings.over_streams else "RabbitMQ"
            left = f"what was queued is in {kept_in}"
        else:
            lost = len(broker.ready) + broker.delayed
            left = (
                f"{lost} queued {'is' if lost == 1 else 'are'} gone with the embedded queue"
                if lost
                else "the queue is empty"
            )
        return f"Stopped: {now.done} done, {now.failed} failed; {left}"

    async def _show_live(self, stop: asyncio.Event) -> None:
        self._console.print("What happens now (Ctrl-C stops it):", style="bold")
        with (
            _logs_above(self._console, self._parts.settings),
            Live(
                self._panel(await self._numbers()), console=self._console, auto_refresh=False, redirect_stdout=False
            ) as live,
        ):
            while not await stopped_within(stop, LOOK_S):
                live.update(self._panel(await self._numbers()), refresh=True)
            live.update(self._panel(await self._numbers()), refresh=True)

    async def _show_lines(self, stop: asyncio.Event) -> None:
        self._console.print("What happens now, a line for each change (Ctrl-C stops it):")
        shown = None
        while not stop.is_set():
            if (now := await self._numbers()) != shown:
                shown = now
                self._console.print(now.line(), markup=False)
                await stopped_within(stop, PLAIN_S)
            else:
                await stopped_within(stop, LOOK_S)

    def _panel(self, now: _Numbers) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 4, 0, 0))
        columns = (
            ("queued", "cyan"),
            ("running", "yellow"),
            ("done", "green"),
            ("failed", "red"),
            ("retried", "magenta"),
        )
        for name, colour in columns:
            table.add_column(name, justify="right", header_style="dim", style=colour)
        queued = "?" if now.queued is None else str(now.queued)
        table.add_row(queued, str(now.running), str(now.done), str(now.failed), str(now.retried))
        missing = "" if now.state == "consuming" else f"{now.state}: {what_is_missing(self._parts.sidecar)}"
        return Group(table, Text(missing, style="yellow"))

    async def _numbers(self) -> _Numbers:
        loop, transport = asyncio.get_running_loop(), self._parts.sidecar.listener.transport
        if transport is None:
            self._queued = None
        elif self._parts.broker is not None or loop.time() - self._looked_at >= BACKLOG_S:
            self._looked_at = loop.time()
            try:
                backlog = await transport.backlog()
                self._queued = backlog.ready + (backlog.delayed or 0)
            except TransportLost:
                self._queued = None
        return self._count()

    def _count(self) -> _Numbers:
        sidecar = self._parts.sidecar
        value = sidecar.metrics.registry.get_sample_value
        results = "inference_worker_results_total"
        failed = sum(value(results, {"status": "failed", "error_code": code}) or 0 for code in ERROR_CODES)
        return _Numbers(
            queued=self._queued,
            running=sidecar.listener.in_flight,
            done=round(value(results, {"status": "completed", "error_code": "none"}) or 0),
            failed=round(failed),
            retried=round(value("inference_worker_dispositions_total", {"disposition": "retry"}) or 0),
            state=sidecar.listener.state,
        )


@contextmanager
def _logs_above(console: Console, settings: Settings) -> Generator[None, None, None]:
    """Log lines that go to the same terminal are printed above the live view instead of through it."""
    if not sys.stderr.isatty():
        yield
        return
    logs.configure(log_level(settings), "console", _Above(console))
    try:
        yield
    finally:
        logs.configure(log_level(settings), "console", sys.stderr)


def log_level(settings: Settings) -> logs.Level:
    """Quiet, unless the environment says otherwise: the view tells what `info` would."""
    return settings.log.level if "level" in settings.log.model_fields_set else "warning"


class _Above(io.StringIO):
    """Where a log writes lines; keeps none."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def write(self, text: str) -> int:
        if line := text.rstrip("\n"):
            self._console.print(Text.from_ansi(line))
        return len(text)

    def isatty(self) -> bool:
        return True
