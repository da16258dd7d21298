"""One POST of a webhook: it goes to the address that was looked at and nowhere else, whatever its receiver does."""

import asyncio
import gzip
import json
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from email.utils import formatdate

import pytest

from inference_worker.gateway import webhook_posting
from inference_worker.gateway.addresses import AddressFilter, Resolver
from inference_worker.gateway.webhook_posting import Answered, NoAnswer, PinnedPost
from inference_worker.timing import ended
from tests.faults import wire
from tests.faults.tls import CA, TlsFront
from tests.faults.wire import Exchange
from tests.services import LOOPBACK
from tests.waiting import eventually
from tests.webhook_receiver import Receiver, posting

pytestmark = pytest.mark.real_loop


@pytest.fixture
async def receiver() -> AsyncGenerator[Receiver]:
    async with Receiver() as server:
        yield server


async def test_what_arrives_is_what_was_sent_under_the_hosts_name(receiver: Receiver) -> None:
    body = json.dumps({"ü": "x" * 200_000}).encode()
    async with posting() as post:
        answer = await post(f"http://Hooks.Example:{receiver.port}/a%20b?c=d&e#f", {"webhook-id": "1"}, body)

    assert answer == Answered(status_code=204)
    (request,) = receiver.requests
    assert (request.method, request.path, request.body) == ("POST", "/a%20b?c=d&e", body)
    assert request.headers["host"] == f"hooks.example:{receiver.port}"
    assert request.headers["webhook-id"] == "1"
    assert request.headers["content-length"] == str(len(body))


async def test_a_host_that_leads_inside_is_not_connected_to(receiver: Receiver) -> None:
    async with posting([LOOPBACK], networks=()) as post:
        named = await post(f"http://hooks.example:{receiver.port}/", {}, b"{}")
        for host in (LOOPBACK, "127.1", "2130706433", "[::ffff:127.0.0.1]", "localhost"):
            literal = await post(f"http://{host}:{receiver.port}/", {}, b"{}")
            assert isinstance(literal, NoAnswer)

    assert isinstance(named, NoAnswer)
    assert LOOPBACK not in named.why
    assert receiver.connections_accepted == 0


async def test_a_name_server_that_changes_its_mind_leads_nowhere_else(receiver: Receiver) -> None:
    """Looked up once for each try, and that is where it goes: what it says afterwards reaches nobody."""
    async with posting([LOOPBACK], ["10.0.0.1"]) as post:
        first = await post(f"http://hooks.example:{receiver.port}/", {}, b"{}")
        second = await post(f"http://hooks.example:{receiver.port}/", {}, b"{}")

    assert (first, type(second)) == (Answered(status_code=204), NoAnswer)
    assert len(receiver.requests) == 1


async def test_a_redirect_is_not_followed(receiver: Receiver) -> None:
    async with Receiver() as inside, posting() as post:
        receiver.behaves = wire.answer(307, b"", {"Location": f"{inside.url}/secret"})

        answer = await post(f"{receiver.url}/", {}, b"{}")

    assert answer == Answered(status_code=307)
    assert inside.connections_accepted == 0


async def test_the_next_address_is_tried_where_one_refuses(receiver: Receiver) -> None:
    """The receiver listens on IPv4 alone."""
    async with posting(["::1", LOOPBACK], networks=(f"{LOOPBACK}/32", "::1/128")) as post:
        assert await post(f"http://hooks.example:{receiver.port}/", {}, b"{}") == Answered(status_code=204)
    assert len(receiver.requests) == 1


async def test_the_certificate_must_be_the_hosts_and_not_the_addresss(receiver: Receiver) -> None:
    """The server's certificate is for localhost and for its address; only the host's name counts."""
    verify = ssl.create_default_context(cafile=CA)
    async with TlsFront(receiver.url) as front, posting(verify=verify) as post, posting() as distrustful:
        unknown = await distrustful(f"https://localhost:{front.port}/", {}, b"{}")
        other = await post(f"https://hooks.example:{front.port}/", {}, b"{}")
        good = await post(f"https://localhost:{front.port}/", {}, b"{}")
        literal = await post(f"https://{LOOPBACK}:{front.port}/", {}, b"{}")

    assert (good, literal) == (Answered(status_code=204), Answered(status_code=204))
    assert isinstance(other, NoAnswer)
    assert "certificate" in other.why
    assert isinstance(unknown, NoAnswer)
    assert len(receiver.requests) == 2


async def test_nothing_is_kept_from_one_to_the_next(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither connections nor cookies; and no proxy of the environment sees anything."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    receiver.behaves = wire.answer(200, b"{}", {"Set-Cookie": "a=b; Path=/", "Connection": "keep-alive"})
    async with posting() as post:
        for _ in range(2):
            assert await post(f"{receiver.url}/", {}, b"{}") == Answered(status_code=200)

    assert {request.connection for request in receiver.requests} == {1, 2}
    assert "cookie" not in receiver.requests[1].headers


async def test_a_long_answer_is_not_read_to_its_end(receiver: Receiver) -> None:
    sent_bytes = 0

    async def endless(exchange: Exchange) -> None:
        nonlocal sent_bytes
        await exchange.head(200, {"Transfer-Encoding": "chunked", "Content-Encoding": "gzip"})
        part = gzip.compress(b"\0" * 10_000_000)
        while True:
            await exchange.chunk(part)
            sent_bytes += len(part)

    receiver.behaves = endless
    async with posting() as post:
        assert await post(f"{receiver.url}/", {}, b"{}") == Answered(status_code=200)
        await eventually(lambda: receiver.connections == 0, within=5, what="the end of the connection")

    assert sent_bytes < 50_000_000


async def test_an_answer_that_trickles_after_its_status_does_not_hold_us(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_posting, "ANSWER_S", 0.1)

    async def trickle(exchange: Exchange) -> None:
        await exchange.head(200, {"Content-Length": "1000"})
        while True:
            await exchange.send(b"x")
            await exchange.pause(0.02)

    receiver.behaves = trickle
    async with posting() as post:
        assert await post(f"{receiver.url}/", {}, b"{}") == Answered(status_code=200)


async def reset(exchange: Exchange) -> None:
    exchange.reset()


async def close(exchange: Exchange) -> None:
    exchange.close()


async def garbage(exchange: Exchange) -> None:
    await exchange.send(b"\0\1\2 no HTTP\r\n\r\n")
    exchange.close()


async def huge_head(exchange: Exchange) -> None:
    await exchange.head(200, {f"x-{number}": "y" * 10_000 for number in range(100)})


@pytest.mark.parametrize("behaves", [reset, close, garbage, huge_head])
async def test_a_receiver_that_misbehaves_has_said_nothing(
    receiver: Receiver, behaves: Callable[[Exchange], Awaitable[None]]
) -> None:
    receiver.behaves = behaves
    async with posting() as post:
        answer = await post(f"{receiver.url}/", {}, b"{}")

    assert isinstance(answer, NoAnswer)
    assert answer.why.startswith("no answer: ")


async def test_a_receiver_that_is_not_there_has_said_nothing(receiver: Receiver) -> None:
    await receiver.refuse()
    async with posting() as post:
        answer = await post(f"{receiver.url}/", {}, b"{}")

    assert isinstance(answer, NoAnswer)
    assert answer.why.startswith("no connection: ")


@pytest.mark.parametrize("after_s", ["7", "date"])
async def test_retry_after_is_read(receiver: Receiver, after_s: str) -> None:
    value = formatdate(time.time() + 7, usegmt=True) if after_s == "date" else after_s
    receiver.behaves = wire.answer(503, b"", {"Retry-After": value})
    async with posting() as post:
        answer = await post(f"{receiver.url}/", {}, b"{}")

    assert isinstance(answer, Answered)
    assert answer.retry_after_s == pytest.approx(7, abs=1.5)


async def test_a_cancelled_post_closes_its_connection(receiver: Receiver) -> None:
    receiver.behaves = wire.silent()
    async with posting() as post:
        task = asyncio.create_task(post(f"{receiver.url}/", {}, b"{}"))
        await eventually(lambda: receiver.requests, within=5, what="the request")
        await ended(task)
        await eventually(lambda: receiver.connections == 0, within=5, what="the end of the connection")


async def test_a_name_server_that_hangs_does_not_hold_the_loop(receiver: Receiver) -> None:
    asked, let_go = threading.Event(), threading.Event()

    def look_up(host: str, _: int) -> Sequence[str]:
        if host == "hangs.example":
            asked.set()
            let_go.wait(20)
        return [LOOPBACK]

    allowed = AddressFilter((f"{LOOPBACK}/32",), resolve=Resolver(look_up).resolve)
    async with PinnedPost(allowed, now=time.time) as post:
        hanging = asyncio.create_task(post(f"http://hangs.example:{receiver.port}/", {}, b"{}"))
        await eventually(asked.is_set, within=5, what="the question")

        assert await post(f"http://quick.example:{receiver.port}/", {}, b"{}") == Answered(status_code=204)
        assert not hanging.done()

        let_go.set()
        assert await hanging == Answered(status_code=204)
