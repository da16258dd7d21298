"""A billing sink that appends to a file, one event a line: `{"path": "/var/lib/usage.jsonl"}`."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inference_worker.errors import SinkUnavailable
from inference_worker.extensions import BillingSinkParts
from inference_worker.ports import Delivered, Refused


@dataclass(frozen=True, slots=True)
class JsonLines:
    """See `ports.BillingSink`. An event may be there twice, with the same id: it is sent until it was answered."""

    path: Path

    async def send(self, events: Sequence[bytes]) -> Delivered | Refused:
        """They are on the disk when this returns. In a thread: a disk that hangs must hold up nothing else."""
        try:
            await asyncio.to_thread(self._append, b"".join(event + b"\n" for event in events))
        except OSError as exc:
            raise SinkUnavailable(f"{self.path}: {exc.strerror}") from exc
        return Delivered()

    def _append(self, lines: bytes) -> None:
        # One write to a file that is only appended to: two processes do not tear each other's lines.
        with self.path.open("ab", buffering=0) as file:
            file.write(lines)
            os.fsync(file.fileno())


def json_lines(parts: BillingSinkParts) -> JsonLines:
    """The factory that the entry point names."""
    return JsonLines(Path(parts.given.text("path")))
