"""The clock that the unit tests run on does what they rely on."""

import asyncio
import socket
import time

import pytest

from tests.unit.conftest import Deadlock, TooLong, VirtualTimeLoop


async def test_an_hour_passes_at_once() -> None:
    begun, real = asyncio.get_running_loop().time(), time.monotonic()

    await asyncio.sleep(3600)

    assert asyncio.get_running_loop().time() - begun == pytest.approx(3600)
    assert time.monotonic() - real < 5


async def test_timers_come_in_their_order() -> None:
    seen: list[float] = []

    async def after(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        seen.append(delay_s)

    async with asyncio.TaskGroup() as group:
        for delay_s in (3.0, 1.0, 2.0):
            group.create_task(after(delay_s))

    assert seen == [1.0, 2.0, 3.0]


async def test_a_timeout_ends_a_wait_for_nothing() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(30):
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("wait", "error"),
    [
        pytest.param(lambda: asyncio.Event().wait(), Deadlock, id="a wait that nothing ends is a deadlock"),
        pytest.param(lambda: asyncio.sleep(8 * 24 * 3600), TooLong, id="a week is too long"),
    ],
)
def test_a_wait_without_an_end_is_an_error_at_once(wait: object, error: type[Exception]) -> None:
    loop = VirtualTimeLoop()

    async def forever() -> None:
        await wait()  # type: ignore[operator] # the table's lambdas differ in what they return

    task = loop.create_task(forever())
    with pytest.raises(error):
        loop.run_until_complete(task)

    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()


async def test_a_unit_test_opens_no_socket() -> None:
    with pytest.raises(AssertionError, match="real_loop"), socket.socket() as opened:
        opened.connect(("127.0.0.1", 9))


@pytest.mark.real_loop
async def test_a_marked_test_may_use_loopback_on_a_real_loop() -> None:
    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        received = await reader.read()
        writer.close()
        await writer.wait_closed()

    assert received == b""
    assert not isinstance(asyncio.get_running_loop(), VirtualTimeLoop)
