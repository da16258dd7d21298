"""What the `dlq` command prints: tables and sentences for people, or JSON lines; and the one question that it asks."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inference_worker.dlq import Dead, Walk
from inference_worker.errors import ConfigurationError
from inference_worker.timing import first_of

PLAIN_COLUMNS: Final = 160
MOST_SHOWN: Final = 4000
"""Characters of a body."""
WHITE: Final = "\n\t"


class Saying:
    """Says what is looked at and what was done. `source` is where the letters are."""

    def __init__(self, source: str, stop: asyncio.Event, *, as_json: bool, with_queue: bool) -> None:
        self._source = source
        self._stop = stop
        self._json = as_json
        self._with_queue = with_queue
        self._found: list[Dead] = []
        self._console = Console(highlight=False, soft_wrap=True)
        if not self._console.is_terminal:
            self._console = Console(highlight=False, soft_wrap=True, width=PLAIN_COLUMNS)

    async def agreed(self, seen: Walk) -> bool:
        """Ask whether a purge is meant."""
        if not sys.stdin.isatty():
            raise ConfigurationError(("dlq purge: nobody can be asked here; --yes says that it is meant",))
        question = f"Remove {seen.matched} dead letters of {self._source} for good? Type yes: "
        print(question, end="", file=sys.stderr, flush=True)
        return await _typed(self._stop) == "yes"

    def replayed(self, outcomes: Mapping[str, int], seen: Walk) -> None:
        """How a replay has ended."""
        counts = ", ".join(f"{count} {word}" for word, count in outcomes.items()) or "none"
        self.end(f"{counts}; {self.summary(seen)}", {"outcomes": outcomes, "looked_at": seen.looked_at})
        self.say_silent(seen)

    def found(self, dead: Dead) -> None:
        """A letter of a list: a line at once, or one of the table's."""
        if self._json:
            _print_json(dead.as_json())
        else:
            self._found.append(dead)

    def listed(self, seen: Walk) -> None:
        """The list is over."""
        if not self._json:
            if self._found:
                self._console.print(self._table(self._found))
            self._console.print(self.summary(seen))
        self.say_silent(seen)

    def show(self, shown: Mapping[str, object], body: str) -> None:
        """One letter whole."""
        if self._json:
            _print_json({**shown, "body": body})
            return
        for name, value in shown.items():
            if name in ("died_at", "received_at") and isinstance(value, float):
                value = _when(value)
            if value is not None and value != "":
                self._console.out(f"{name:<12} {_harmless(str(value))}", highlight=False)
        cut = " …" if len(body) > MOST_SHOWN else ""
        self._console.out(f"{'body':<12} {_harmless(body[:MOST_SHOWN], WHITE)}{cut}\n", highlight=False)

    def _table(self, found: Sequence[Dead]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        headings = ["request", "reason", "tried", "status", "died", "result", "tenant"]
        for heading in [*headings, *(["queue"] if self._with_queue else [])]:
            table.add_column(heading, no_wrap=True, justify="right" if heading in ("tried", "status") else "left")
        for dead in found:
            cells = [
                dead.request_id or "–",
                dead.reason,
                "–" if dead.attempts is None else str(dead.attempts),
                "–" if dead.status_code is None else str(dead.status_code),
                "–" if dead.died_at is None else _when(dead.died_at),
                dead.result or "none",
                dead.tenant or "–",
            ]
            if self._with_queue:
                cells.append(dead.queue or "–")
            table.add_row(*(Text(_harmless(cell)) for cell in cells))
        return table

    def summary(self, seen: Walk) -> str:
        """How much was looked at."""
        more = "; there are more" if seen.more else ""
        return f"{seen.matched} of {seen.looked_at} dead letters in {self._source}{more}"

    def say(self, request_id: str | None, word: str, why: str) -> None:
        """What became of one letter."""
        if self._json:
            _print_json({"request_id": request_id, "outcome": word, "why": why})
        else:
            self._console.print(Text(_harmless(f"{request_id or '–'}: {word}{f': {why}' if why else ''}")))

    def end(self, text: str, counts: Mapping[str, object]) -> None:
        """What became of all."""
        if self._json:
            _print_json(counts)
        else:
            self._console.print(Text(text))

    def say_silent(self, seen: Walk) -> None:
        """What is missing, where Redis could not be asked."""
        if seen.store_silent:
            print(
                f"Redis could not be asked, so that results and notes are missing: {seen.store_silent}", file=sys.stderr
            )


async def _typed(stop: asyncio.Event) -> str:
    """A line from the terminal; nothing after Ctrl-C, which a blocking read would not hear of."""
    loop, fd, readable = asyncio.get_running_loop(), sys.stdin.fileno(), asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await first_of(readable, stop)
    finally:
        loop.remove_reader(fd)
    return os.read(fd, 1000).decode(errors="replace").strip() if readable.is_set() else ""


def _print_json(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def _harmless(text: str, kept: str = "") -> str:
    """What anybody has written into a letter, with what would steer a terminal escaped."""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def _when(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{unix_s:g} Unix s"  # Milliseconds, perhaps: one such letter must not keep the others from being seen.
