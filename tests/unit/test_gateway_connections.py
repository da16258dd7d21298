"""One connection of the intake: heads that do not come, too many at once, refusals that must be read."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from inference_worker.gateway.bodies import CLOSE
from inference_worker.gateway.connections import MOST_CONNECTIONS, most_connections
from inference_worker.gateway.problems import Refusal, answer, json_answer
from inference_worker.gateway.serving import serving

pytestmark = pytest.mark.real_loop

WHERE = "inference_worker.gateway.connections"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = 24 * 1024 * 1024


async def web(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a GET, and refuses any POST without reading its body."""
    if scope["method"] == "POST":
        await answer("/", Refusal(413, "body_too_large", "too large", headers=CLOSE))(scope, receive, send)
    else:
        await json_answer({})(scope, receive, send)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serving(web, "127.0.0.1", 0, asyncio.Event()) as url:
        yield int(url.rpartition(":")[2])


@asynccontextmanager
async def connected(port: int) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def rest(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(10):
        return await reader.read()


def is_problem(said: bytes, status: int) -> None:
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"content-type: application/problem+json" in head
    assert msgspec.json.decode(body)["status"] == status


@pytest.mark.parametrize("first", [b"", b"GET / HT", GET + b"GET / HT"], ids=["nothing", "half", "half a second one"])
async def test_who_does_not_send_the_head_of_a_request_is_hung_up_on(
    port: int, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    monkeypatch.setattr(f"{WHERE}.HEAD_S", 0.3)
    async with connected(port) as (reader, writer):
        writer.write(first)
        trickle = asyncio.create_task(trickled(writer, b"X" if first else b""))
        try:
            async with asyncio.timeout(3):
                said = await rest(reader)
        finally:
            trickle.cancel()

    assert said.count(b"200 OK") == (1 if first.startswith(GET) else 0)


async def trickled(writer: asyncio.StreamWriter, part: bytes) -> None:
    while True:
        await asyncio.sleep(0.05)
        writer.write(part)


async def test_a_request_that_takes_its_time_is_not_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{WHERE}.HEAD_S", 0.1)

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.3)
        await json_answer({})(scope, receive, send)

    async with serving(slow, "127.0.0.1", 0, asyncio.Event()) as url:
        said = await once(int(url.rpartition(":")[2]))

    assert b"200 OK" in said


async def test_one_connection_too_many_is_told_so_and_the_next_one_finds_room(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{WHERE}.most_connections", lambda: 1)
    async with connected(port) as (reader, writer):
        writer.write(GET)
        assert b"200 OK" in await reader.readuntil(b"{}")
        async with connected(port) as (other, _):
            said = await rest(other)

    is_problem(said, 503)
    assert b"retry-after: 2" in said
    async with asyncio.timeout(3):
        while b"200 OK" not in await once(port):
            await asyncio.sleep(0.01)


async def once(port: int) -> bytes:
    async with connected(port) as (reader, writer):
        writer.write(GET)
        return await reader.readline()


async def test_what_is_no_http_is_a_problem_in_json(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(b"NONSENSE\r\n\r\n")
        is_problem(await rest(reader), 400)


async def test_a_client_that_still_sends_its_body_reads_why_it_was_refused(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % LARGE)
        writer.write(bytes(LARGE))
        async with asyncio.timeout(10):
            await writer.drain()
        is_problem(await rest(reader), 413)


async def test_a_client_that_never_stops_sending_is_hung_up_on(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{WHERE}.LINGER_S", 0.3)
    async with connected(port) as (_, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        async with asyncio.timeout(5):
            with pytest.raises(ConnectionError):
                await sent_for_ever(writer)


async def sent_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"4\r\nabcd\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("files", "most"), [(64, 32), (1024, 768), (1_048_576, MOST_CONNECTIONS), (-1, 20_000)])
def test_connections_leave_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch, files: int, most: int) -> None:
    monkeypatch.setattr(f"{WHERE}.resource.getrlimit", lambda _: (files, files))

    assert most_connections() == most
