"""Unit tests own time: their event loop jumps to the next timer when nothing is runnable. No sockets, no tasks left.

A test marked `real_loop` has a real loop and loopback sockets, for a server in the same process. A thread does not
count as runnable on the virtual loop.
"""

import asyncio
import inspect
import selectors
import socket
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from typing import Any

import pytest

WEEK_S = 7 * 24 * 3600.0


class Deadlock(AssertionError):
    """Every task waits for another: nothing is runnable, and no timer is set."""


class TooLong(AssertionError):
    """A week of virtual time has passed: something waits in a circle."""


class _NothingComes(selectors.SelectSelector):
    """No file is ever ready; to wait is to move the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # What a thread has called back comes through the loop's own pipe, which is a file and ready at once.
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise Deadlock("nothing is runnable and no timer is set")
        self.now += timeout
        if self.now > WEEK_S:
            raise TooLong("a week of virtual time has passed")
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time stands still while something is runnable, and then jumps."""

    def __init__(self) -> None:
        self._virtual = _NothingComes()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """One loop a test: virtual time, unless the test is marked `real_loop`."""
    if item.get_closest_marker("real_loop"):
        return {"real": asyncio.new_event_loop}
    return {"virtual": VirtualTimeLoop}


@pytest.fixture(autouse=True)
def _no_sockets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback for `real_loop`, nothing for the others."""
    real_loop = request.node.get_closest_marker("real_loop") is not None

    def guarded(name: str) -> Callable[..., Any]:
        original: Callable[..., Any] = getattr(socket.socket, name)

        def call(self: socket.socket, address: Any, /) -> Any:
            loopback = self.family == socket.AF_UNIX or (
                isinstance(address, tuple) and str(address[0]) in ("127.0.0.1", "::1", "localhost")
            )
            if not (real_loop and loopback):
                raise AssertionError(f"a unit test would {name} a socket: {address!r}; see the marker real_loop")
            return original(self, address)

        return call

    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, guarded(name))


@pytest.fixture(autouse=True)
def _no_task_left(request: pytest.FixtureRequest) -> Generator[None]:
    """Whoever starts a task ends it."""
    if not inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        yield
        return
    request.getfixturevalue("_task_watch")
    yield


@pytest.fixture
async def _task_watch() -> AsyncGenerator[None]:
    before = asyncio.all_tasks()
    yield
    left = [task for task in asyncio.all_tasks() - before if task is not asyncio.current_task() and not task.done()]
    assert not left, f"tasks are left running: {left}"
