"""Waiting for a condition, with a named bound. There is no other way to wait in these tests."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

T = TypeVar("T")

POLL_S = 0.02


class NotInTime(AssertionError):
    """What was waited for did not come within its bound."""


@overload
async def eventually(
    predicate: Callable[[], Awaitable[T | None]], *, within: float, what: str, every: float = POLL_S
) -> T: ...
@overload
async def eventually(predicate: Callable[[], T | None], *, within: float, what: str, every: float = POLL_S) -> T: ...
async def eventually(
    predicate: Callable[[], Awaitable[T | None] | T | None], *, within: float, what: str, every: float = POLL_S
) -> T:
    """Return the first true answer of `predicate`, sync or async; it counts as false while it raises AssertionError.

    Raises:
        NotInTime: `within` seconds have passed; the message says `what`, and the last answer or failed assertion.
    """
    last: object = "no answer yet"
    bound = asyncio.timeout(within)
    try:
        async with bound:
            while True:
                try:
                    answer = predicate()
                    value: T | None = await answer if inspect.isawaitable(answer) else answer
                except AssertionError as failed:
                    last = failed
                else:
                    if value:
                        return value
                    last = value
                await asyncio.sleep(every)
    except TimeoutError as late:
        if not bound.expired():  # the predicate's own
            raise
        raise NotInTime(f"waited {within:g} s for {what}; last: {last!r}") from late


def wait_until(predicate: Callable[[], T], *, within: float, what: str, every: float = POLL_S) -> T:
    """`eventually` for code that blocks: starting and stopping servers."""
    end = time.monotonic() + within
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > end:
            raise NotInTime(f"waited {within:g} s for {what}; last: {value!r}")
        time.sleep(every)
