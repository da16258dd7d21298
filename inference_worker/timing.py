"""Waiting: until told to stop, and for the first of several; and a bound on bytes. Knows nothing of what waits."""

import asyncio
from collections.abc import Awaitable
from typing import Any


async def stopped_within(event: asyncio.Event, seconds: float) -> bool:
    """Sleep for `seconds`, unless the event is set first; say whether it is. Every loop's pause."""
    await first_of(event, within_s=seconds)
    return event.is_set()


async def first_of(*events: asyncio.Event, within_s: float | None = None) -> None:
    """Return once any of the events is set, or `within_s` has passed."""
    if any(event.is_set() for event in events):
        return
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)


async def ended(task: "asyncio.Task[Any]") -> None:
    """Cancel a task and wait until it has ended, whatever it ends with."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # Retrieved here, so that nobody is told of an exception that was expected.


class ByteBudget:
    """A bound on bytes held at once. One holder at a time may go beyond it, so that somebody always gets on.

    Without that exception a few half-read answers could each wait for the others' bytes for ever.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._freed = asyncio.Event()
        self._beyond: object | None = None

    @property
    def full(self) -> bool:
        """Whether the bound is reached."""
        return self.held_bytes >= self.limit_bytes

    def add(self, size_bytes: int) -> None:
        """Count what is here already and cannot wait."""
        self.held_bytes += size_bytes

    async def acquire(self, holder: object, size_bytes: int) -> None:
        """Count `size_bytes` more for `holder`, waiting while the bound is reached."""
        while self.held_bytes + size_bytes > self.limit_bytes and self._beyond is not holder:
            if self._beyond is None:
                self._beyond = holder
                break
            self._freed.clear()
            await self._freed.wait()
        self.held_bytes += size_bytes

    def release(self, holder: object, size_bytes: int) -> None:
        """Give back what `holder` counted."""
        self.held_bytes -= size_bytes
        if self._beyond is holder:
            self._beyond = None
        self._freed.set()


async def quietly(work: Awaitable[object], within_s: float, *expected: type[BaseException]) -> bool:
    """Wait for a last courtesy (a close, a release) for at most `within_s`; say whether it was done."""
    try:
        async with asyncio.timeout(within_s):
            await work
    except TimeoutError:
        return False
    except expected:
        return False
    return True
