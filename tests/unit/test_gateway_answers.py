"""Large answers leave in pieces, within a bound, and not for ever."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from inference_worker.gateway.answers import PIECE_BYTES, Paced
from inference_worker.gateway.problems import json_answer

LARGE = b"x" * (2 * PIECE_BYTES + 1)
SCOPE: dict[str, Any] = {"type": "http", "path": "/v1/jobs/a", "method": "GET", "headers": []}


class Reader:
    """A client that reads so fast, and what it got."""

    def __init__(self, every_s: float = 0.0, path: str = "/v1/jobs/a") -> None:
        self.every_s = every_s
        self.scope = {**SCOPE, "path": path}
        self.status = 0
        self.pieces: list[bytes] = []
        self.over = False

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    async def receive(self) -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await asyncio.sleep(self.every_s)
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        self.pieces.append(message["body"])
        self.over = not message.get("more_body", False)


async def large(scope: Any, receive: Any, send: Any) -> None:
    from starlette.responses import Response

    await Response(LARGE, 200, {"X-Job-Id": "job-1"})(scope, receive, send)


async def small(scope: Any, receive: Any, send: Any) -> None:
    await json_answer({"a": 1})(scope, receive, send)


async def read(paced: Paced, reader: Reader) -> Reader:
    await paced(reader.scope, reader.receive, reader.send)
    return reader


async def test_a_large_answer_leaves_whole_and_in_pieces() -> None:
    reader = await read(Paced(large), Reader())

    assert (reader.status, reader.body, reader.over) == (200, LARGE, True)
    assert [len(piece) for piece in reader.pieces] == [PIECE_BYTES, PIECE_BYTES, 1]


async def test_a_small_answer_leaves_as_it_is() -> None:
    reader = await read(Paced(small, most_bytes_at_once=0), Reader())

    assert (reader.status, reader.pieces) == (200, [b'{"a":1}'])


@pytest.mark.parametrize("path", ["/v1/jobs/a", "/v1/chat/completions"])
async def test_one_too_many_is_refused_names_its_job_and_is_sent_later(path: str) -> None:
    paced = Paced(large, most_bytes_at_once=len(LARGE))
    async with asyncio.TaskGroup() as group:
        slow = group.create_task(read(paced, Reader(every_s=5)))
        await asyncio.sleep(1)
        refused = await read(paced, Reader(path=path))
    again = await read(paced, Reader(path=path))

    assert refused.status == 503
    assert b"job-1" in refused.body
    assert b"overloaded" in refused.body
    assert slow.result().body == again.body == LARGE


async def test_one_beyond_the_bound_is_sent_where_there_is_no_other() -> None:
    assert (await read(Paced(large, most_bytes_at_once=1), Reader())).body == LARGE


async def test_who_does_not_read_is_left_and_frees_what_he_held() -> None:
    paced = Paced(large, most_bytes_at_once=len(LARGE), within_s=30)

    left = await read(paced, Reader(every_s=20))

    assert not left.over
    assert asyncio.get_running_loop().time() <= 20 + 30
    assert (await read(paced, Reader())).body == LARGE


async def test_a_client_that_is_cut_off_frees_what_it_held() -> None:
    paced = Paced(large, most_bytes_at_once=len(LARGE))
    reading = asyncio.create_task(read(paced, Reader(every_s=20)))
    await asyncio.sleep(1)
    reading.cancel()
    await asyncio.wait([reading])

    assert (await read(paced, Reader())).body == LARGE


async def test_a_large_part_of_a_stream_counts_and_is_never_cut() -> None:
    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": LARGE, "more_body": True})
        await send({"type": "http.response.body", "body": b"end", "more_body": False})

    async def either(scope: Any, receive: Any, send: Any) -> None:
        await (large if scope["path"] == "/v1/jobs/a" else stream)(scope, receive, send)

    paced = Paced(either, most_bytes_at_once=len(LARGE))
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(read(paced, Reader(every_s=5, path="/v1/chat/completions"))) for _ in range(2)]
        await asyncio.sleep(6)
        refused = await read(paced, Reader())

    assert [one.result().body for one in streams] == [LARGE + b"end"] * 2
    assert refused.status == 503
    assert (await read(paced, Reader())).body == LARGE
