"""What runs beside the pools of a process and comes and goes with their configuration, as tasks of one group.

Not here: what it is. A failure of any of it ends the process, as one of its other parts does.
"""

import asyncio
from collections.abc import Callable, Coroutine

Run = Callable[[asyncio.Event], Coroutine[object, object, None]]
"""Runs until the event is set, and returns."""


class Alongside:
    """Runs what it is handed, from when it runs itself, each until its own end or that of all."""

    def __init__(self) -> None:
        self._handed: dict[object, tuple[Run, asyncio.Event]] = {}
        """With what ends them; before it runs itself they wait here."""
        self._cares: dict[asyncio.Task[None], None] = {}
        self._group: asyncio.TaskGroup | None = None

    def start(self, run: Run, until: asyncio.Event) -> None:
        """Run this until its own `until`, which is set at the end of all as well."""
        key = object()
        self._handed[key] = (run, until)
        if self._group is not None:
            self._group.create_task(self._one(key, run, until))

    def care(self, work: Coroutine[object, object, None]) -> None:
        """Do this once, while all runs; at the end of all it is cancelled. Nothing is done before or after."""
        if self._group is None:
            work.close()
            return
        task = self._group.create_task(work)
        self._cares[task] = None
        task.add_done_callback(lambda _: self._cares.pop(task, None))

    async def run(self, until: asyncio.Event) -> None:
        """Until told to stop; then nothing more is taken."""
        async with asyncio.TaskGroup() as group:
            for key, (run, own) in list(self._handed.items()):
                group.create_task(self._one(key, run, own))
            self._group = group
            try:
                await until.wait()
            finally:
                self._group = None
                for _, own in self._handed.values():
                    own.set()
                for task in list(self._cares):
                    task.cancel()

    async def _one(self, key: object, run: Run, until: asyncio.Event) -> None:
        try:
            await run(until)
        finally:
            self._handed.pop(key, None)
