"""A run of `submit` over many lines: so many requests under way, results written in the input's order, progress noted.

Memory is bounded by two windows: requests under way, and requests that are taken from the input and not yet written.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from inference_worker.client import AFTER_S, Client, Result
from inference_worker.errors import NoResultYet, NoSuchRequest, NotAccepted, NotSupported, StoreUnavailable
from inference_worker.submit_lines import Line, output_line
from inference_worker.submit_progress import Progress
from inference_worker.submit_state import State, flush, write_state

SAVE_S: Final = 0.5
PATIENCE_S: Final = 300.0
"""How long the broker or the server may be away before a run stops, to be gone on with."""

AHEAD: Final = 8
"""Requests that are taken from the input and not yet written, for each one that may be under way."""

MOST_HELD_BYTES: Final = 32 * 1024 * 1024
"""Of results that wait for one before them; a result beyond it is asked for again when it is its turn."""


class _Stopped(Exception):
    """Nothing can be submitted now; what is left is for another run."""


class Run:
    """The requests under way, and the results that wait for one before them."""

    def __init__(
        self, client: Client, state: State, path: Path, output: BinaryIO, progress: Progress, *, in_flight: int
    ) -> None:
        self._client = client
        self._state = state
        self._path = path
        self._output = output
        self._progress = progress
        self._in_flight = in_flight
        self._resumed = path.exists()
        self._waiting: dict[int, _Held] = {}
        """By the line's number."""
        self._held_bytes = 0
        self._taken = 0
        self._written = asyncio.Event()
        self._writing = asyncio.Lock()

    async def to_the_end(self, lines: Iterator[Line], stop: asyncio.Event) -> str:
        """Submit, wait and write until all is written or the run was stopped; why it was."""
        write_state(self._path, self._state)
        self._taken = self._state.written
        why = ""
        try:
            async with asyncio.TaskGroup() as group:
                workers = [group.create_task(self._work(lines)) for _ in range(self._in_flight)]
                others = [
                    group.create_task(self._stop_when_told(stop, workers)),
                    group.create_task(self._save_now_and_then()),
                ]
                await asyncio.wait(workers)
                for other in others:
                    other.cancel()
            why = "" if self._state.written == self._state.lines else "stopped"
        except* _Stopped as stopped:
            why = f"stopped: {stopped.exceptions[0]}"
        with contextlib.suppress(_Stopped):  # What was saved before is right, too.
            self._save()
        return why

    async def _work(self, lines: Iterator[Line]) -> None:
        while True:
            while self._taken - self._state.written >= AHEAD * self._in_flight:
                self._written.clear()
                await self._written.wait()
            line = next(lines, None)
            if line is None:
                return
            self._taken += 1
            request_id, result = await self._answer(line)
            self._hold(line, request_id, result)
            await self._write()

    async def _stop_when_told(self, stop: asyncio.Event, workers: list["asyncio.Task[None]"]) -> None:
        await stop.wait()
        for worker in workers:
            worker.cancel()

    async def _save_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            self._save()

    def _save(self) -> None:
        """The output first: a state that tells of more than there is could not be gone on with."""
        try:
            flush(self._output)
            write_state(self._path, self._state)
        except OSError as exc:
            raise _Stopped(f"the output or {self._path} cannot be written: {exc.strerror}") from exc

    # ------------------------------------------------------------ one line

    async def _answer(self, line: Line) -> tuple[str, Result]:
        """The line's result; that there is none is a failed one."""
        timeout_s = line.timeout_s or self._state.timeout_s
        request_id = line.request_id or self._state.request_id(line.index)
        try:
            if self._resumed and (found := await self._known(line, request_id)) is not None:
                return found.request_id, found
            job_id = await self._submit(line, request_id, timeout_s)
            return job_id, await self._result(job_id, timeout_s + AFTER_S)
        except NotAccepted as exc:
            if not exc.for_good:
                raise _Stopped(str(exc)) from exc
            return request_id, _failed(request_id, "not_accepted", str(exc))
        except NotSupported as exc:
            return request_id, _failed(request_id, "not_accepted", str(exc))

    async def _result(self, job_id: str, within_s: float) -> Result:
        try:
            return await self._client.wait(job_id, within_s)
        except (NoResultYet, NoSuchRequest) as exc:
            return _failed(job_id, "no_result", str(exc))

    async def _submit(self, line: Line, request_id: str, timeout_s: float) -> str:
        given = request_id if self._state.takes_ids else None
        try:
            job = await self._client.submit(
                line.payload,
                endpoint=line.endpoint,
                timeout_s=timeout_s,
                metadata=line.metadata,
                tenant=line.tenant,
                priority=line.priority,
                request_id=given,
                within_s=PATIENCE_S,
            )
        except NotSupported:
            if given is None or self._state.url is None:
                raise
            if self._state.takes_ids:
                self._state.takes_ids = False
                self._progress.say("this server takes no ids of ours: after a crash a few lines may be sent twice")
            return await self._submit(line, request_id, timeout_s)
        if self._state.url is not None:
            self._state.jobs[line.index] = job.request_id
        return job.request_id

    async def _known(self, line: Line, request_id: str) -> Result | None:
        """What became of a request that an earlier run may have sent; None: send it (again)."""
        if self._state.url is None:
            with contextlib.suppress(StoreUnavailable):
                return await self._client.look(request_id)
            return None
        job_id = self._state.jobs.get(line.index)
        if job_id is None:
            return None
        try:
            return await self._client.wait(job_id, (line.timeout_s or self._state.timeout_s) + AFTER_S)
        except (NoResultYet, NoSuchRequest):
            return None

    # ------------------------------------------------------------ writing, in order

    def _hold(self, line: Line, request_id: str, result: Result) -> None:
        written: bytes | None = output_line(line, result)
        can_be_asked_again = result.error_code not in ("not_accepted", "no_result")
        first = line.index == self._state.written
        if can_be_asked_again and not first and self._held_bytes + len(written or b"") > MOST_HELD_BYTES:
            written = None
        self._held_bytes += len(written or b"")
        self._waiting[line.index] = _Held(
            line=_without_payload(line), request_id=request_id, written=written, failed=not result.completed
        )

    async def _write(self) -> None:
        async with self._writing:
            while (held := self._waiting.get(self._state.written)) is not None:
                if held.written is None:
                    result = await self._result(held.request_id, AFTER_S)
                    held.written, held.failed = output_line(held.line, result), not result.completed
                    self._held_bytes += len(held.written)
                # No waiting from here: a stop falls before a line or after it.
                try:
                    self._output.write(held.written)
                except OSError as exc:
                    raise _Stopped(f"the output cannot be written: {exc.strerror}") from exc
                del self._waiting[self._state.written]
                self._state.jobs.pop(self._state.written, None)
                self._held_bytes -= len(held.written)
                self._state.failed += held.failed
                self._state.written_bytes += len(held.written)
                self._state.written += 1
                self._progress.advance(failed=held.failed)
                self._written.set()


@dataclass(slots=True, kw_only=True, eq=False)
class _Held:
    """An answer that waits for its turn."""

    line: Line
    request_id: str
    written: bytes | None
    """Its line; None where there was no room, and it is to be asked for again."""
    failed: bool


def _without_payload(line: Line) -> Line:
    return Line(index=line.index, payload=b"", custom_id=line.custom_id)


def _failed(request_id: str, error_code: str, error: str) -> Result:
    return Result(request_id=request_id, status="failed", status_code=0, error=error, error_code=error_code)
