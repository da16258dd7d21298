"""A Prometheus and pages of metrics as a gate sees them: answers that a test sets, over HTTP, on virtual time."""

import asyncio
import json
from collections.abc import Callable

import httpx

EPOCH = 1_700_000_000.0
URL = "http://prometheus:9090"


def unix_now() -> float:
    """The loop's time as Unix seconds."""
    return EPOCH + asyncio.get_running_loop().time()


def vector(*values: float | str, at: float | None = None) -> httpx.Response:
    """What Prometheus says, with one sample for each value."""
    stamp = unix_now() if at is None else at
    result = [{"metric": {"n": str(n)}, "value": [stamp, str(value)]} for n, value in enumerate(values)]
    return httpx.Response(
        200, text=json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}})
    )


def page(*lines: str) -> httpx.Response:
    return httpx.Response(200, text="\n".join(lines) + "\n")


class Neighbours:
    """Answers by what a question contains: the query of a Prometheus, else the URL. Counts the questions."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.takes_s = 0.0
        self.answers: dict[str, Callable[[], httpx.Response] | Exception] = {}

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self._answer))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        question = request.url.params.get("query", str(request.url))
        self.asked.append(question)
        await asyncio.sleep(self.takes_s)
        answer = next((answer for part, answer in self.answers.items() if part in question), vector)
        if isinstance(answer, Exception):
            raise answer
        return answer()
