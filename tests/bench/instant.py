"""An instant model for load tests: reads each request to its end and answers one completion, whatever was asked.

    python -m tests.bench.instant --port N

The mock model takes as long for an answer as our worker for a whole request; beside a worker on two cores, it would be
measured, too. `GET /anything` is answered with 200, so that it can be waited for.
"""

import argparse
import asyncio
import contextlib
import json
import re

ANSWER = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "instant",
        "choices": [{"index": 0, "text": "tick tock", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 400, "completion_tokens": 2, "total_tokens": 402},
    }
).encode()
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Connection(asyncio.Protocol):
    """One connection, kept alive; requests come whole or in pieces, one after the other."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (head := self._buffer.find(b"\r\n\r\n")) >= 0:
            length = LENGTH.search(self._buffer, 0, head)
            end = head + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < end:
                return
            self._buffer = self._buffer[end:]
            assert self._transport is not None
            self._transport.write(RESPONSE)


async def main() -> None:
    """Until it is ended."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.instant")
    parser.add_argument("--port", type=int, required=True)
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", parser.parse_args().port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
