"""Undoes in Redis, in the background, what may or may not have been done: a question was cancelled, or its answer lost.

What is to be undone must be harmless where it was never done, and lapse by itself where this process ends first.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final

from inference_worker.errors import StoreUnavailable
from inference_worker.redis_scripts import Argument, RedisLink, Script
from inference_worker.timing import ended, first_of, quietly

MOST: Final = 10_000
"""Older ones are left to lapse."""
MOST_TRIES: Final = 10
AGAIN_S: Final = 1.0
LAST_WORDS_S: Final = 2.0


class Undoing:
    """What is still to be undone."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._left: deque[_Undo] = deque(maxlen=MOST)
        self._more = asyncio.Event()

    def later(self, script: Script, keys: tuple[str, ...], *arguments: Argument) -> None:
        """Run a script as soon as may be."""
        self._left.append(_Undo(script, keys, arguments))
        self._more.set()

    async def run(self, until: asyncio.Event) -> None:
        """Undo until told to stop; then once more what is left, for a bounded time."""
        undoing = asyncio.create_task(self._undo_for_ever(), name="undoing quotas")
        try:
            await first_of(until)
        finally:
            await ended(undoing)
            await quietly(self._undo(), LAST_WORDS_S, StoreUnavailable)

    async def _undo_for_ever(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            try:
                await self._undo()
            except StoreUnavailable:
                await asyncio.sleep(AGAIN_S)
                self._more.set()

    async def _undo(self) -> None:
        for _ in range(len(self._left)):
            undo = self._left[0]
            try:
                await self._link.run(undo.script, undo.keys, *undo.arguments)
            except StoreUnavailable:
                # To the end of the line, and not for ever: one that never works must not keep the others.
                if self._left and self._left[0] is undo:
                    self._left.popleft()
                undo.tries += 1
                if undo.tries < MOST_TRIES:
                    self._left.append(undo)
                raise
            if self._left and self._left[0] is undo:  # Else it was pushed out meanwhile.
                self._left.popleft()
        if self._left:
            self._more.set()


@dataclass(slots=True, eq=False)
class _Undo:
    script: Script
    keys: tuple[str, ...]
    arguments: tuple[Argument, ...]
    tries: int = 0
