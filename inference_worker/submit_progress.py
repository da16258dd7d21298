"""How far `submit` has come, for people: a bar on a terminal, plain lines elsewhere, both on stderr."""

import sys
from time import monotonic as monotonic_s
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

EVERY_S: Final = 5.0
"""At most one plain line in so many seconds."""

OVER_S: Final = 30.0
"""The rate is that of so many last seconds."""


class Progress:
    """A context; `advance` for each line that is written."""

    def __init__(self, total: int, done: int, failed: int, *, plain: bool) -> None:
        self._total = total
        self._done = done
        self._failed = failed
        console = Console(stderr=True, highlight=False)
        self._bar: RichProgress | None = None
        if console.is_terminal and not plain:
            self._bar = RichProgress(
                BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"), console=console, transient=True
            )
        self._marks: list[tuple[float, int]] = [(monotonic_s(), done)]
        self._said_at = monotonic_s()

    def advance(self, *, failed: bool) -> None:
        """One more is written."""
        self._done += 1
        self._failed += failed
        now = monotonic_s()
        if now - self._marks[-1][0] >= 1.0:
            self._marks.append((now, self._done))
            while len(self._marks) > 2 and now - self._marks[0][0] > OVER_S:
                del self._marks[0]
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, said=self._said(now))
        elif now - self._said_at >= EVERY_S:
            self._said_at = now
            self.say(f"{self._done}/{self._total}  {self._said(now)}")

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def _said(self, now: float) -> str:
        began, then = self._marks[0]
        rate = (self._done - then) / max(now - began, 0.001)
        left = f"{_duration((self._total - self._done) / rate)} left" if rate > 0 else ""
        return f"{self._failed} failed  {rate:.1f}/s  {left}".rstrip()

    def __enter__(self) -> Self:
        self._began_at, self._began_with = monotonic_s(), self._done
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._done, said="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        took_s = max(monotonic_s() - self._began_at, 0.001)
        rate = (self._done - self._began_with) / took_s
        done = f"{self._done - self._failed} completed, {self._failed} failed"
        print(f"{self._done}/{self._total}: {done}, in {_duration(took_s)} ({rate:.1f}/s)", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
