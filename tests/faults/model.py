"""A model server that does as it is told: OpenAI's chat, completions, embeddings; `/health`, `/v1/models`, `/metrics`.

In the test's own process, `async with FakeModel() as model:`, or as one of its own,
`python -m tests.faults.model --port N`, which takes the same orders as JSON: `POST /__control__`.
"""

import argparse
import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from tests.faults import wire
from tests.faults.wire import Behaviour, Exchange, HttpServer, Request, Traffic, event
from tests.waiting import eventually

Health = Literal["ok", "status", "silent", "slow", "empty"]
DONE = "[DONE]"


def ok(
    text: str = "tick tock",
    *,
    prompt_tokens: int = 3,
    completion_tokens: int = 2,
    usage: bool = True,
    takes_s: float = 0.0,
) -> Behaviour:
    """A chat completion; an event stream where the request has `"stream": true`, with usage where it asks for it."""

    async def behave(exchange: Exchange) -> None:
        if takes_s:
            await exchange.pause(takes_s)
        asked = _asked(exchange.request)
        counted = _usage(prompt_tokens, completion_tokens) if usage else None
        if asked.get("stream") is True:
            options = asked.get("stream_options")
            wants = isinstance(options, dict) and options.get("include_usage") is True
            await sse(*text.split(" "), usage=counted if wants else None)(exchange)
        elif "embeddings" in exchange.request.path:
            await wire.answer(200, _embedding(counted))(exchange)
        else:
            await wire.answer(200, _completion(exchange.request, text, counted))(exchange)

    return behave


def sse(
    *words: str,
    usage: dict[str, int] | None = None,
    every_s: float = 0.0,
    first_after_s: float = 0.0,
    finish: bool = True,
    done: bool = True,
    end: bool = True,
) -> Behaviour:
    """A chat completion as a stream, one event a word.

    `finish`: a last chunk with a finish_reason; `done`: `[DONE]`; `end`: the last chunk of the HTTP body.
    """
    events = [event(_chunk({"role": "assistant", "content": ""}))]
    events += [event(_chunk({"content": word if not number else f" {word}"})) for number, word in enumerate(words)]
    if finish:
        events.append(event(_chunk({}, "stop")))
    if usage is not None:
        events.append(event(_chunk(None) | {"choices": [], "usage": usage}))
    if done:
        events.append(event(DONE))
    return wire.stream(*events, every_s=every_s, first_after_s=first_after_s, end=end)


def sse_error(message: str = "engine died", *, code: int = 500, after: int = 1) -> Behaviour:
    """A stream with `after` words, then an error event, then `[DONE]`, as vLLM ends when its engine dies."""
    words = [event(_chunk({"content": f"word{number}"})) for number in range(after)]
    failed = event({"error": {"message": message, "type": "InternalServerError", "param": None, "code": code}})
    return wire.stream(*words, failed, event(DONE))


def sse_without_end(*words: str) -> Behaviour:
    """A stream that stops in the middle: no finish, no `[DONE]`, connection closed."""
    return sse(*(words or ("half", "an")), finish=False, done=False, end=False)


def sse_shed() -> Behaviour:
    """200, and in the stream the news that the engine is busy: vLLM's way to shed load after the headers."""
    return sse_error("The engine is currently busy and cannot accept new requests.", code=503, after=0)


class FakeModel(HttpServer):
    """A request gets the behaviour of `decide`, else of the first fitting `when_prompt_has`, else the next of `script`,
    else `default`.
    """

    def __init__(self, *, port: int | None = None, default: Behaviour | None = None, model_id: str = "tiny") -> None:
        super().__init__(port=port)
        self.default = default or ok()
        self.script: deque[Behaviour] = deque()
        self.decide: Callable[[Request], Behaviour | None] = lambda request: None
        self.model_id = model_id
        self.metrics_text = ""
        self.health: Health = "ok"
        self.health_status = 200
        self.health_takes_s = 1.0
        self.probes: list[Request] = []
        """Requests for `/health`."""
        self.requests: list[Request] = []
        """Inference requests in the order of their arrival."""
        self._by_prompt: list[tuple[bytes, Behaviour]] = []
        self._traffic = Traffic()

    @property
    def peak(self) -> int:
        """The most inference requests at once."""
        return self._traffic.peak

    @property
    def in_flight(self) -> int:
        return self._traffic.now

    def next(self, *behaviours: Behaviour) -> None:
        """Behaviours for the next requests, one each."""
        self.script.extend(behaviours)

    def when_prompt_has(self, text: str, behaviour: Behaviour) -> None:
        """A behaviour for every request whose body contains `text`."""
        self._by_prompt.append((text.encode(), behaviour))

    def forget_requests(self) -> None:
        self.requests.clear()
        self._traffic.peak = self._traffic.now
        self.probes.clear()

    def sick(self, health: Health = "status", *, status: int = 503, takes_s: float = 1.0) -> None:
        """How `/health` answers from now on; inference goes on as before. For a dead model: `refuse`, then `listen`."""
        self.health, self.health_status, self.health_takes_s = health, status, takes_s

    def well(self) -> None:
        self.health, self.health_status = "ok", 200

    async def called(self, times: int = 1, *, within: float = 10.0) -> list[Request]:
        """Wait until this many inference requests have arrived."""
        await eventually(lambda: len(self.requests) >= times, within=within, what=f"{times} calls of the model")
        return self.requests

    async def busy(self, calls: int = 1, *, within: float = 10.0) -> None:
        """Wait until this many calls are in flight at once."""
        await eventually(lambda: self.in_flight >= calls, within=within, what=f"{calls} calls in flight")

    async def answer(self, exchange: Exchange) -> None:
        path = exchange.request.path.partition("?")[0]
        match (exchange.request.method, path):
            case (_, "/__control__"):
                await exchange.answer(200, json.dumps(await self._control(exchange.request)).encode())
            case ("GET", "/v1/models"):
                listed = {"object": "list", "data": [{"id": self.model_id, "object": "model", "owned_by": "test"}]}
                await wire.answer(200, listed)(exchange)
            case ("GET", "/metrics"):
                await wire.answer(200, self.metrics_text, {"Content-Type": "text/plain; version=0.0.4"})(exchange)
            case ("POST", _):
                await self._infer(exchange)
            case _:
                self.probes.append(exchange.request)
                await self._probe(exchange)

    async def _infer(self, exchange: Exchange) -> None:
        self.requests.append(exchange.request)
        with self._traffic:
            await self._behaviour(exchange.request)(exchange)

    def _behaviour(self, request: Request) -> Behaviour:
        if chosen := self.decide(request):
            return chosen
        for text, behaviour in self._by_prompt:
            if text in request.body:
                return behaviour
        return self.script.popleft() if self.script else self.default

    async def _probe(self, exchange: Exchange) -> None:
        match self.health:
            case "ok":
                await wire.answer(200, {"status": "ok"})(exchange)
            case "empty":
                await wire.empty()(exchange)
            case "status":
                await wire.error(self.health_status)(exchange)
            case "silent":
                await wire.silent()(exchange)
            case "slow":
                await wire.delayed(self.health_takes_s, wire.answer(200))(exchange)

    async def _control(self, request: Request) -> object:
        """Orders: `default`, `next` (list), `prompt` ({text: behaviour}), `health` ([mode, status]), `forget`.

        The answer is the record so far.
        """
        orders = json.loads(request.body or b"{}")
        if "default" in orders:
            self.default = behaviour(orders["default"])
        for spec in orders.get("next", []):
            self.next(behaviour(spec))
        for text, spec in orders.get("prompt", {}).items():
            self.when_prompt_has(text, behaviour(spec))
        if "health" in orders:
            mode, status = orders["health"]
            self.sick(mode, status=status)
        if orders.get("forget"):
            self.forget_requests()
        now = time.monotonic()
        seen = [
            {"path": one.path, "body": one.body.decode(errors="replace"), "ago_s": now - one.arrived_at}
            for one in self.requests
        ]
        return {"requests": seen, "peak": self.peak, "in_flight": self.in_flight, "probes": len(self.probes)}


BY_NAME: dict[str, Callable[..., Behaviour]] = {
    "ok": ok,
    "answer": wire.answer,
    "error": wire.error,
    "retry_after": wire.retry_after,
    "silent": wire.silent,
    "close_before_answer": wire.close_before_answer,
    "close_after_headers": wire.close_after_headers,
    "half_body": wire.half_body,
    "chunked_without_end": wire.chunked_without_end,
    "reset": wire.reset,
    "html": wire.html,
    "broken_gzip": wire.broken_gzip,
    "latin1": wire.latin1,
    "no_content": wire.no_content,
    "empty": wire.empty,
    "redirect": wire.redirect,
    "huge": wire.huge,
    "lone_surrogate": wire.lone_surrogate,
    "not_a_number": wire.not_a_number,
    "deep": wire.deep,
    "cut_all": wire.cut_all,
    "sse": sse,
    "sse_error": sse_error,
    "sse_without_end": sse_without_end,
    "sse_shed": sse_shed,
}
"""The behaviours that can be ordered over HTTP, and that a table of tests can name."""


def behaviour(spec: object) -> Behaviour:
    """From `"name"` or `{"name": {argument: value}}`."""
    match spec:
        case str():
            return BY_NAME[spec]()
        case dict() if len(spec) == 1:
            ((name, arguments),) = spec.items()
            return BY_NAME[name](**arguments)
    raise ValueError(f"expected a behaviour's name, or an object of one name and its arguments, not {spec!r}")


def _asked(request: Request) -> dict[str, object]:
    try:
        asked = json.loads(request.body)
    except ValueError:
        return {}
    return asked if isinstance(asked, dict) else {}


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _completion(request: Request, text: str, usage: dict[str, int] | None) -> dict[str, object]:
    chat = "chat" in request.path
    said: dict[str, object] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    answer: dict[str, object] = {
        "id": "chatcmpl-1",
        "object": "chat.completion" if chat else "text_completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [{"index": 0, "finish_reason": "stop"} | said],
    }
    return answer | ({"usage": usage} if usage is not None else {})


def _embedding(usage: dict[str, int] | None) -> dict[str, object]:
    answer: dict[str, object] = {
        "object": "list",
        "model": "tiny",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.0, 1.0]}],
    }
    return answer | ({"usage": usage} if usage is not None else {})


def _chunk(delta: dict[str, str] | None, finish_reason: str | None = None) -> dict[str, object]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
    }


async def _serve(port: int) -> None:
    async with FakeModel(port=port) as model:
        print(f"listening on {model.url}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(_serve(parser.parse_args().port))
