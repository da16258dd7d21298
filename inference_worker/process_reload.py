"""Reads the documents of a process again while it runs: now and then, and when somebody asks.

What they say is taken whole or not at all: with one problem in them all that was good before stays, and every problem
is said once. What is right and could not be applied is tried again. Not here: how a process becomes what they say
(`process_pools.py`), nor what in them is right.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal

import structlog

from inference_worker.config.documents import ProcessDocuments
from inference_worker.errors import ConfigurationError
from inference_worker.process_files import ReadFile, Snapshot
from inference_worker.timing import first_of

log = structlog.get_logger(__name__)

AGAIN_S: Final = 10.0
"""When what could not be applied is tried again, where nobody looks now and then."""

LONGEST_SAID: Final = 200
"""Characters of what an exception says."""

Documents = Callable[[ReadFile], ProcessDocuments]
"""Reads and checks the documents; raises ConfigurationError with all that is wrong."""
Apply = Callable[[ProcessDocuments], Awaitable[Sequence[str]]]
"""Becomes what they say, or, where it raises, stays as it was; returns what has changed, a few words each."""
Told = Callable[[Literal["success", "error"]], None]


class Reloading:
    """Looks at the files of one process."""

    def __init__(
        self,
        documents: Documents,
        apply: Apply,
        told: Told,
        *,
        read_file: ReadFile,
        paths: Sequence[str],
        fingerprint: str,
        interval_s: float,
    ) -> None:
        """`paths` are the files, `fingerprint` is what they were when the process began; `interval_s` of 0: only when
        asked. `told` counts how it went.
        """
        self._documents = documents
        self._apply = apply
        self._told = told
        self._read_file = read_file
        self._paths = paths
        self._last = fingerprint
        self._interval_s = interval_s
        self._failed = ""
        """Why what is written there could not be applied; empty where it was, or is wrong."""
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Have them read again now, changed or not: for a signal."""
        if self._paths:
            self._asked.set()
        else:
            log.warning("no flag names a file: there is nothing to read again")

    async def run(self, until: asyncio.Event) -> None:
        """Until told to stop."""
        while True:
            await first_of(until, self._asked, within_s=self._pause_s)
            if until.is_set():
                return
            await self._look()

    @property
    def _pause_s(self) -> float | None:
        if self._interval_s > 0 and self._paths:
            return self._interval_s
        return AGAIN_S if self._failed else None

    async def _look(self) -> None:
        asked = self._asked.is_set()
        self._asked.clear()
        files = Snapshot(self._read_file, self._paths)
        if files.fingerprint == self._last and not asked and not self._failed:
            return
        if files.fingerprint != self._last or asked:
            self._failed = ""
        self._last = files.fingerprint
        documents, problems = self._read(files)
        if documents is None:
            self._told("error")
            log.error("the documents are wrong; the last good ones stay", problems=problems)
            return
        try:
            changes = await self._apply(documents)
        except Exception as exc:
            # Whatever it is that could not be made: what runs goes on as it is, and it is tried again.
            self._told("error")
            reason = f"{type(exc).__name__}: {exc}"
            if reason != self._failed:
                log.exception("the documents could not be applied; trying again", reason=reason)
            self._failed = reason
            return
        self._failed = ""
        self._told("success")
        log.info("the documents were read again", changes=list(changes) or "none")

    def _read(self, files: Snapshot) -> tuple[ProcessDocuments | None, list[str]]:
        try:
            return self._documents(files), []
        except ConfigurationError as exc:
            return None, list(exc.problems)
        except Exception as exc:
            # A fault of ours with what is written there is no reason to end what runs.
            log.exception("the documents could not be read")
            return None, [f"{type(exc).__name__}: {exc}"[:LONGEST_SAID]]
