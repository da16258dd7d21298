"""The client against servers that do, byte by byte, what servers do."""

import asyncio
import gzip
import json
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from inference_worker.errors import BadResponse, ModelCut, ModelFailure, ModelGone, ModelSlow
from inference_worker.messages import Usage
from inference_worker.mock_model import Fault, MockModel, MockModelConfig
from inference_worker.model_client import HttpModelClient, retry_after_s
from inference_worker.ports import Answer, ModelClient
from inference_worker.routed_model import RoutedModel
from inference_worker.timing import ByteBudget
from tests.waiting import eventually

SAMPLES = Path(__file__).parents[1] / "samples"
CHAT = "/v1/chat/completions"
NOW = 1_700_000_000.0


class RawServer:
    """Reads whole requests and answers each as `answer` writes; counts connections, requests, and ends it saw."""

    def __init__(self, answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        self.connections = 0
        self.open = 0

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[str, None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        # An end or a reset in the middle of a request or of an answer is what the tests are about.
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), 0
                )
                self.requests.append(head + await reader.readexactly(length))
                answering = asyncio.ensure_future(self.answer(writer))
                ended = asyncio.ensure_future(end_of(reader))
                await asyncio.wait([answering, ended], return_when=asyncio.FIRST_COMPLETED)
                answering.cancel()
                ended.cancel()
                await asyncio.wait([answering, ended])
                if writer.is_closing():
                    break
        self.open -= 1
        writer.close()


async def end_of(reader: asyncio.StreamReader) -> None:
    """Return once the client has closed, and leave what it sends before that where it is."""
    while not reader.at_eof() and reader.exception() is None:
        await asyncio.sleep(0.005)


def says(
    *parts: bytes, close: bool = False, forever: bool = False
) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    async def answer(writer: asyncio.StreamWriter) -> None:
        for number, part in enumerate(parts):
            await asyncio.sleep(0.005 if number else 0)
            writer.write(part)
            await writer.drain()
        if forever:
            await asyncio.sleep(60)
        if close:
            writer.close()

    return answer


def resets(*parts: bytes) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    async def answer(writer: asyncio.StreamWriter) -> None:
        await says(*parts)(writer)
        raw: socket.socket = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    return answer


def http(body: bytes = b'{"a":1}', *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def head(*headers: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", "Content-Type: application/json", *headers]).encode() + b"\r\n\r\n"


def chunked(*parts: bytes, end: bool = True, kind: str = "text/event-stream; charset=utf-8") -> list[bytes]:
    start = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return [start, *(b"%x\r\n%b\r\n" % (len(p), p) for p in parts), *([b"0\r\n\r\n"] if end else [])]


def client(url: str, **options: Any) -> HttpModelClient:
    options = {"now": lambda: NOW, "budget": ByteBudget(1 << 26), "max_response_bytes": 1 << 20, **options}
    return HttpModelClient(lambda: url, **options)


async def infer(model: ModelClient, payload: object = None, *, stream: bool = False, timeout_s: float = 5.0) -> Answer:
    body = json.dumps(payload if payload is not None else {"messages": []}).encode()
    return await model.infer(endpoint=CHAT, payload=body, stream=stream, request_id="r-1", timeout_s=timeout_s)


async def asked(
    answer: Callable[[asyncio.StreamWriter], Awaitable[None]], stream: bool = False, **options: Any
) -> Answer:
    async with RawServer(answer).serving() as url, client(url, **options) as model:
        return await infer(model, stream=stream)


# ---------------------------------------------------------------- what is sent


async def test_a_request_goes_out_as_it_came_with_its_id_and_key() -> None:
    server = RawServer(says(http()))
    keys = iter(["one\n", None, "bad\nkey"])
    async with server.serving() as url, client(url, api_key=lambda: next(keys)) as model:
        for _ in range(3):
            await infer(model, {"x": "é"})

    first, second, third = (request.partition(b"\r\n\r\n") for request in server.requests)
    assert first[0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"\r\nX-Request-Id: r-1\r\n" in first[0]
    assert b"\r\nAuthorization: Bearer one\r\n" in first[0]
    assert first[0].count(b"Content-Type: application/json") == 1
    assert first[2] == json.dumps({"x": "é"}).encode()
    assert b"Authorization" not in second[0] + third[0]


@pytest.mark.parametrize("request_id", ["é", "a b", "a\tb", "x" * 201])
async def test_an_id_that_is_no_header_value_is_left_out(request_id: str) -> None:
    server = RawServer(says(http()))
    async with server.serving() as url, client(url) as model:
        await model.infer(endpoint=CHAT, payload=b"{}", stream=False, request_id=request_id, timeout_s=5)

    assert b"X-Request-Id" not in server.requests[0]


async def test_a_user_in_the_url_is_who_calls_whatever_key_or_header_there_is_besides() -> None:
    """Both together were refused by the driver, and the request went round until it was poison."""
    server, given = RawServer(says(http())), {"authorization": "Bearer theirs"}
    async with server.serving() as url, client(url.replace("://", "://user:word@"), api_key=lambda: "ours") as model:
        await model.infer(endpoint=CHAT, payload=b"{ }", stream=False, request_id="r-1", timeout_s=5, headers=given)

    lines = server.requests[0].lower().split(b"\r\n")
    assert [line for line in lines if line.startswith(b"authorization")] == [b"authorization: basic dxnlcjp3b3jk"]


async def test_headers_of_a_caller_go_along_but_never_in_place_of_ours_in_any_letter_case_case_277() -> None:
    server = RawServer(says(http()))
    given = {"X-Mine": "1", "authorization": "Bearer forged", "x-request-ID": "forged", "content-type": "text/plain"}
    async with server.serving() as url, client(url, api_key=lambda: "ours") as model:
        await model.infer(endpoint=CHAT, payload=b"{ }", stream=False, request_id="r-1", timeout_s=5, headers=given)

    head, _, sent = server.requests[0].partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert sent == b"{ }"
    assert b"x-mine: 1" in lines
    assert [line for line in lines if line.startswith((b"authorization", b"x-request-id"))] == [
        b"x-request-id: r-1",
        b"authorization: bearer ours",
    ]
    assert [line for line in lines if line.startswith(b"content-type")] == [b"content-type: text/plain"]


@pytest.mark.parametrize("stream", [False, True])
async def test_of_the_answers_headers_those_are_kept_that_gates_and_results_need_case_282(stream: bool) -> None:
    sent = ("X-LLM-D-Request-Dropped-Reason: rejected-saturated", f"X-LLM-D-Flow-Band-Headroom: {'9' * 300}", "X-No: 1")
    start = head(*sent, "Transfer-Encoding: chunked").replace(b"application/json", b"text/event-stream")
    streamed = [start, *chunked(EVENTS)[1:]]
    answer = await asked(says(*streamed) if stream else says(http(b"busy", *sent, status="429 No")), stream=stream)

    assert answer.headers == {
        "x-llm-d-request-dropped-reason": "rejected-saturated",
        "x-llm-d-flow-band-headroom": "9" * 200,
    }


async def test_several_gateways_each_get_their_own_calls_and_one_that_hangs_holds_up_no_other() -> None:
    budget = ByteBudget(1 << 26)
    hangs, works = RawServer(says(head("Content-Length: 5"), forever=True)), RawServer(says(http()))
    async with (
        hangs.serving() as slow,
        works.serving() as fast,
        RoutedModel([slow, f"{fast}/base"], lambda host: client(host, budget=budget)) as model,
    ):
        call = {"payload": b"{}", "stream": False, "request_id": "r-1", "timeout_s": 5.0}
        hanging = [asyncio.ensure_future(model.infer(endpoint="/x", base_url=slow, **call)) for _ in range(20)]  # type: ignore[arg-type]
        await eventually(lambda: len(hangs.requests) == 20, within=10, what="all calls at the one that hangs")
        answer = await model.infer(endpoint="/base/v1", base_url=f"{fast}/base", **call)  # type: ignore[arg-type]
        for task in hanging:
            task.cancel()
        await asyncio.wait(hanging)

    assert answer.status_code == 200
    assert works.requests[0].startswith(b"POST /base/v1 HTTP/1.1\r\n")


async def test_proxy_variables_catch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """B76."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    assert (await asked(says(http()))).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_localhost_is_tried_at_all_its_addresses(host: str) -> None:
    """B80."""
    if host not in {str(found[4][0]) for found in socket.getaddrinfo("localhost", 80)}:
        pytest.skip(f"localhost is not {host} here")
    async with MockModel().serving(host) as url, client(f"http://localhost:{url.rpartition(':')[2]}") as model:
        answer = await infer(model, {"messages": [{"role": "user", "content": "hi"}]})

    assert answer.status_code == 200


async def test_a_large_body_arrives() -> None:
    server = RawServer(says(http()))
    async with server.serving() as url, client(url) as model:
        await infer(model, {"x": "y" * 3_000_000})

    assert len(server.requests[0]) > 3_000_000


# ---------------------------------------------------------------- statuses are values


@pytest.mark.parametrize("status", ["200 OK", "204 No Content", "307 Temporary Redirect", "400 Bad", "503 Busy"])
async def test_every_status_with_a_whole_body_is_an_answer(status: str) -> None:
    body = b"" if status.startswith("204") else b'{"error":"x"}'
    answer = await asked(says(http(body, "Location: /elsewhere", status=status)))

    assert (answer.status_code, answer.reason, answer.body) == (int(status[:3]), status[4:], body)


async def test_an_answer_up_to_the_close_is_whole_where_it_has_no_length() -> None:
    assert (await asked(says(head(), b'{"a":', b"1}", close=True))).body == b'{"a":1}'


async def test_gzip_is_undone() -> None:
    packed = gzip.compress(b'{"a":1}')

    assert (await asked(says(http(packed, "Content-Encoding: gzip")))).body == b'{"a":1}'


@pytest.mark.parametrize(
    ("headers", "ttft_s", "tbt_s", "retry_after_s"),
    [
        pytest.param(["x-ttft: 0.5", "X-TBT: 0.02", "Retry-After: 7"], 0.5, 0.02, 7.0, id="numbers"),
        pytest.param(["x-ttft: nan", "x-tbt: -1", "Retry-After: soon"], None, None, None, id="rubbish"),
        pytest.param(["x-ttft: inf", "x-tbt: x"], None, None, None, id="no seconds"),
        pytest.param([], None, None, None, id="nothing"),
    ],
)
async def test_times_come_from_headers_where_they_can_be_read(
    headers: list[str], ttft_s: float | None, tbt_s: float | None, retry_after_s: float | None
) -> None:
    answer = await asked(says(http(b"{}", *headers)))

    assert (answer.ttft_s, answer.tbt_s, answer.retry_after_s) == (ttft_s, tbt_s, retry_after_s)


async def test_the_names_of_the_headers_can_be_chosen() -> None:
    answer = await asked(says(http(b"{}", "a: 1", "b: 2")), ttft_header="A", tbt_header="B")

    assert (answer.ttft_s, answer.tbt_s) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("3", 3.0),
        ("-3", 0.0),
        ("nan", None),
        ("inf", None),
        ("Tue, 14 Nov 2023 22:13:50 GMT", 30.0),
        ("Tue, 14 Nov 2023 22:13:50 -0000", 30.0),
        ("Tue, 14 Nov 2023 22:13:00 GMT", 0.0),
        ("Tue, 99 Nov 2023", None),
        ("", None),
    ],
)
def test_a_retry_after_is_seconds_or_a_date(text: str | None, expected: float | None) -> None:
    assert retry_after_s(text, NOW) == expected


# ---------------------------------------------------------------- failures


EVENTS = (SAMPLES / "vllm-stream-usage.sse").read_bytes()
LARGE = gzip.compress(b"x" * 3_000_000)


@pytest.mark.parametrize(
    ("answer", "stream", "failure"),
    [
        pytest.param(says(close=True), False, ModelGone, id="closed before any byte"),
        pytest.param(resets(), False, ModelGone, id="reset before any byte"),
        pytest.param(says(b"HTTP/1.1 200 OK\r\nContent-", close=True), False, ModelCut, id="closed within the headers"),
        pytest.param(says(b"rubbish\r\n\r\n"), False, ModelCut, id="no HTTP"),
        pytest.param(says(head("Content-Length: 7"), close=True), False, ModelCut, id="closed after the headers"),
        pytest.param(says(head("Content-Length: 7"), b'{"a"', close=True), False, ModelCut, id="half of the body"),
        pytest.param(resets(head("Content-Length: 7"), b'{"a"'), False, ModelCut, id="a reset in the body"),
        pytest.param(
            says(head("Content-Length: 9"), b'{"a":1}', close=True), False, ModelCut, id="whole JSON, too short a body"
        ),
        pytest.param(
            says(*chunked(b'{"a":1}', end=False, kind="application/json"), close=True),
            False,
            ModelCut,
            id="whole JSON, chunked without an end",
        ),
        pytest.param(says(head(), close=True), False, ModelCut, id="nothing, without a length"),
        pytest.param(
            says(http(b"no gzip at all", "Content-Encoding: gzip")), False, BadResponse, id="broken compression"
        ),
        pytest.param(says(head("Content-Length: 1048577"), forever=True), False, BadResponse, id="a promise too large"),
        pytest.param(
            says(*chunked(*[b"x" * 300_000] * 4, kind="a/b"), forever=True), False, BadResponse, id="a body too large"
        ),
        pytest.param(says(http(LARGE, "Content-Encoding: gzip")), False, BadResponse, id="too large once unpacked"),
        pytest.param(says(*chunked(EVENTS[:900], end=False), close=True), True, ModelCut, id="a stream cut off"),
        pytest.param(says(*chunked(EVENTS[:500])), True, ModelCut, id="a stream that ends early"),
        pytest.param(says(*chunked(b"data: [DONE]\n\n")), True, ModelCut, id="a stream of [DONE] alone"),
        pytest.param(says(*chunked(b"data: " + b"x" * 1_100_000), forever=True), True, BadResponse, id="a huge event"),
        pytest.param(says(*chunked(b"data: {]\n\n"), forever=True), True, BadResponse, id="an event that is no JSON"),
    ],
)
async def test_what_is_no_answer_is_a_failure_of_its_kind(
    answer: Callable[[asyncio.StreamWriter], Awaitable[None]], stream: bool, failure: type[ModelFailure]
) -> None:
    server = RawServer(answer)
    budget = ByteBudget(1 << 26)
    async with server.serving() as url, client(url, budget=budget) as model:
        with pytest.raises(failure) as failed:
            await infer(model, stream=stream)

        assert type(failed.value) is failure
        assert len(server.requests) == 1, "what may have been sent is not sent again"
        assert budget.held_bytes == 0
        if failure is not ModelCut or not stream:
            await eventually(lambda: server.open == 0, within=0.2, what="the connection is closed")


@pytest.mark.parametrize(
    ("said", "retry_after_s"),
    [
        pytest.param(["Retry-After: 7"], 7.0, id="with it"),
        pytest.param([], None, id="without"),
        pytest.param(["Retry-After: soon"], None, id="garbage"),
    ],
)
@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
async def test_an_error_brings_its_retry_after_along_case_278(
    status: str, said: list[str], retry_after_s: float | None
) -> None:
    answer = await asked(says(http(b"busy", *said, status=status)))

    assert (answer.status_code, answer.body, answer.retry_after_s) == (int(status[:3]), b"busy", retry_after_s)


@pytest.mark.parametrize("rest", [pytest.param(b"", id="all"), pytest.param(b'{"a', id="half")])
async def test_an_error_whose_body_is_cut_keeps_what_its_head_said_case_281(rest: bytes) -> None:
    said = ("Retry-After: 7", "X-LLM-D-Request-Dropped-Reason: rejected-saturated", "X-No: 1")
    start = head("Content-Length: 9", *said).replace(b"200 OK", b"429 No")
    with pytest.raises(ModelCut, match=r"^429, and the answer stopped before its end \[rejected-saturated\]: ") as cut:
        await asked(says(start, rest, close=True))

    assert (cut.value.status_code, cut.value.retry_after_s) == (429, 7.0)
    assert cut.value.headers == {"x-llm-d-request-dropped-reason": "rejected-saturated"}


async def test_half_an_answer_is_no_success_case_281() -> None:
    with pytest.raises(ModelCut, match=r"^the answer stopped before its end: ") as cut:
        await asked(says(head("Content-Length: 9", "Retry-After: 7"), b'{"a', close=True))

    assert (cut.value.status_code, cut.value.retry_after_s, cut.value.headers) == (None, None, {})


@pytest.mark.parametrize("url", ["", "no-url", "http://", "http://[::1", "http://host:port", "ftp://host"])
async def test_a_url_that_is_none_is_gone_case_280(url: str) -> None:
    async with client(url) as model:
        with pytest.raises(ModelGone):
            await infer(model)


async def test_nobody_there_is_gone_case_280() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with client(f"http://127.0.0.1:{port}") as model:
        with pytest.raises(ModelGone):
            await infer(model)


async def test_a_name_that_nobody_has_is_gone() -> None:
    async with client("http://nobody.invalid") as model:
        with pytest.raises(ModelGone):
            await infer(model, timeout_s=60)


@pytest.mark.parametrize(
    ("answer", "stream"),
    [
        pytest.param(says(forever=True), False, id="no byte"),
        pytest.param(says(head("Content-Length: 9"), b"{", forever=True), False, id="half of a body"),
        pytest.param(says(*chunked(*[b": keep-alive\n\n"] * 400)), True, id="keep-alive comments"),
    ],
)
async def test_a_call_that_takes_too_long_is_slow_and_its_connection_closed(
    answer: Callable[[asyncio.StreamWriter], Awaitable[None]], stream: bool
) -> None:
    """B79: the model sees the end within 200 ms."""
    server = RawServer(answer)
    async with server.serving() as url, client(url) as model:
        with pytest.raises(ModelSlow):
            await infer(model, stream=stream, timeout_s=0.2)

        await eventually(lambda: server.open == 0, within=0.2, what="the server sees the end")
        server.answer = says(http())
        assert (await infer(model)).status_code == 200
        assert server.connections == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_a_call_closes_its_connection_at_once_case_280(stream: bool) -> None:
    server = RawServer(says(*chunked(EVENTS[:900], end=False), forever=True))
    async with server.serving() as url, client(url) as model:
        call = asyncio.ensure_future(infer(model, stream=stream))
        await eventually(lambda: server.requests, within=2, what="the request arrives")
        await asyncio.sleep(0.05)

        call.cancel()
        await asyncio.wait([call])

        assert call.cancelled()
        await eventually(lambda: server.open == 0, within=0.2, what="the server sees the end")


async def test_a_server_that_does_not_read_is_left_at_once() -> None:
    """Closing would first send what is left, which nobody takes; a server that writes finds out."""
    left = asyncio.Event()

    async def deaf(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined] # a socket's transport reads, too
        await asyncio.sleep(0.4)
        while not writer.transport.is_closing():
            writer.write(b"x")
            await asyncio.sleep(0.01)
        left.set()

    server = await asyncio.start_server(deaf, "127.0.0.1", 0)
    async with server, client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as model:
        with pytest.raises(ModelSlow):
            await infer(model, {"x": "y" * 30_000_000}, timeout_s=0.2)
        async with asyncio.timeout(1):
            await left.wait()


# ---------------------------------------------------------------- connections


async def test_connections_are_kept_and_taken_again() -> None:
    server = RawServer(says(http()))
    async with server.serving() as url, client(url) as model:
        for _ in range(5):
            await infer(model)

    assert server.connections == 1


async def test_a_pooled_connection_that_was_closed_costs_no_attempt() -> None:
    """B71. The server closes while our loop looks elsewhere, so the pool still takes the connection for an open one."""
    closing: list[asyncio.StreamWriter] = []

    async def answer(writer: asyncio.StreamWriter) -> None:
        await says(http())(writer)
        closing.append(writer)

    server = RawServer(answer)
    async with server.serving() as url, client(url) as model:
        for number in range(20):
            await infer(model)
            raw: socket.socket = closing[-1].get_extra_info("socket")
            raw.shutdown(socket.SHUT_RDWR)

            assert (await infer(model)).status_code == 200
            assert len(server.requests) == 2 * (number + 1), "and it was sent once"


async def test_many_pooled_connections_that_were_closed_cost_no_attempt() -> None:
    closing: list[asyncio.StreamWriter] = []

    async def answer(writer: asyncio.StreamWriter) -> None:
        await says(http())(writer)
        closing.append(writer)

    server = RawServer(answer)
    async with server.serving() as url, client(url) as model:
        await asyncio.gather(*(infer(model) for _ in range(8)))
        for writer in closing:
            writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

        answers = await asyncio.gather(*(infer(model) for _ in range(8)))

    assert [a.status_code for a in answers] == [200] * 8


async def test_a_server_that_closes_each_connection_a_while_after_its_answer_costs_no_attempt() -> None:
    """B71, as it was reported."""

    idle: dict[asyncio.StreamWriter, asyncio.TimerHandle] = {}

    async def answer(writer: asyncio.StreamWriter) -> None:
        if writer in idle:
            idle[writer].cancel()
        await says(http())(writer)
        idle[writer] = asyncio.get_running_loop().call_later(0.02, writer.close)

    async with RawServer(answer).serving() as url, client(url) as model:
        for number in range(100):
            assert (await infer(model)).status_code == 200
            # Not within a blink of the close: what crosses it on the way cannot be known to be unread.
            await asyncio.sleep((0, 0.005, 0.01, 0.03, 0.04)[number % 5])


async def test_a_stream_asks_for_the_connection_to_be_closed() -> None:
    server = RawServer(says(*chunked(EVENTS)))
    async with server.serving() as url, client(url) as model:
        await infer(model, stream=True)

    assert b"\r\nConnection: close\r\n" in server.requests[0]


async def test_warming_opens_connections_and_keeps_them() -> None:
    server = RawServer(says(http()))
    async with server.serving() as url, client(url) as model:
        await model.warm(4)
        opened = server.connections
        await asyncio.gather(*(infer(model) for _ in range(4)))

    assert opened == server.connections == 4
    assert server.requests[0].startswith(b"GET /health ")


@pytest.mark.parametrize("answer", [says(close=True), says(http(b"x" * 100_000)), says(b"rubbish\r\n\r\n")])
async def test_warming_never_fails(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
    server = RawServer(answer)
    async with server.serving() as url, client(url) as model:
        await model.warm(100)

    assert 16 <= server.connections <= 32, "a GET may be tried twice"
    async with client("http://nobody.invalid") as model:
        await model.warm(1)
    await model.warm(1)  # Closed meanwhile: nobody names the gateway any more.


# ---------------------------------------------------------------- streams


async def test_a_stream_is_stored_as_the_unstreamed_answer() -> None:
    answer = await asked(says(*chunked(*(EVENTS[i : i + 100] for i in range(0, len(EVENTS), 100)))), stream=True)

    whole = json.loads(answer.body)
    assert (answer.status_code, answer.usage) == (200, None)
    assert whole["choices"][0]["message"]["content"] == " English� over"
    assert answer.ttft_s is not None
    assert answer.tbt_s is not None
    assert 0 < answer.tbt_s < answer.ttft_s + 1


async def test_a_stream_without_usage_hands_up_what_can_be_told() -> None:
    events = (SAMPLES / "vllm-stream-usage.sse").read_bytes().replace(b'"usage"', b'"timings"')
    timings = b'data: {"choices":[],"timings":{"predicted_n":4,"prompt_n":6}}\n\n'
    answer = await asked(says(*chunked(events.replace(b"data: [DONE]", timings + b"data: [DONE]"))), stream=True)

    assert answer.usage == Usage(input_tokens=6, output_tokens=4, total_tokens=10)


async def test_an_error_in_a_stream_is_a_bad_response_with_its_code() -> None:
    events = (SAMPLES / "vllm-stream-shed-http200.sse").read_bytes()

    with pytest.raises(BadResponse, match="currently busy") as failed:
        await asked(says(*chunked(events)), stream=True)

    assert failed.value.status_code == 503


async def test_a_stream_whose_last_chunk_never_comes_holds_nobody_up() -> None:
    began = time.monotonic()
    await asked(says(*chunked(EVENTS, end=False), forever=True), stream=True)

    assert time.monotonic() - began < 1.0


@pytest.mark.parametrize(
    "answer", [says(http(b'{"error":{}}', status="400 Bad Request")), says(http(b'{"choices":[]}'))]
)
async def test_what_is_no_stream_comes_as_it_is(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
    assert json.loads((await asked(answer, stream=True)).body) in ({"error": {}}, {"choices": []})


async def test_a_stream_with_too_few_choices_is_cut() -> None:
    async with RawServer(says(*chunked(EVENTS))).serving() as url, client(url) as model:
        with pytest.raises(ModelCut, match="1 of 2 choices"):
            await infer(model, {"n": 2}, stream=True)


# ---------------------------------------------------------------- memory


async def test_answers_wait_for_each_other_at_the_budget_and_all_arrive() -> None:
    budget = ByteBudget(300_000)
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, budget.held_bytes)
            await asyncio.sleep(0)

    parts = chunked(*[b"x" * 50_000] * 8, kind="application/json")
    async with RawServer(says(*parts)).serving() as url, client(url, budget=budget) as model:
        watching = asyncio.ensure_future(watch())
        answers = await asyncio.gather(*(infer(model) for _ in range(6)))
        watching.cancel()

    assert [len(answer.body) for answer in answers] == [400_000] * 6
    assert 0 < most <= 300_000 + 400_000
    assert budget.held_bytes == 0


# ---------------------------------------------------------------- against the mock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        (Fault(drop=True), ModelGone),
        (Fault(cut=True), ModelCut),
        (Fault(half_body=True), ModelCut),
        (Fault(hang=True), ModelSlow),
    ],
)
async def test_the_faults_of_the_mock_are_what_they_say(
    stream: bool, fault: Fault, failure: type[ModelFailure]
) -> None:
    payload = {"messages": [{"role": "user", "content": "a b c d e f"}], "stream": stream}
    async with MockModel(MockModelConfig(fault=fault)).serving() as url, client(url) as model:
        with pytest.raises(failure):
            await infer(model, payload, stream=stream, timeout_s=0.5)
