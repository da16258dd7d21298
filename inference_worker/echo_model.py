"""A model inside the worker: what it says is the prompt, and every call takes the same time.

For load tests of everything around a model (`MODEL_MODE=mock`). No server, no pace of tokens, no faults: for those
there is `mock-model`, which this one answers like.
"""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus

from inference_worker.errors import ModelSlow
from inference_worker.mock_answers import Refusal, embeddings, generation, read, texts_to_embed
from inference_worker.ports import NO_HEADERS, Answer


class EchoModel:
    """The model client of `ports.py`, without a model. A streamed answer is given as it is put together."""

    def __init__(self, *, latency_s: float, model: str) -> None:
        self._latency_s = latency_s
        self._model = model

    async def infer(
        self,
        *,
        endpoint: str,
        payload: bytes,
        stream: bool,
        request_id: str,
        timeout_s: float,
        headers: Mapping[str, str] = NO_HEADERS,
        base_url: str | None = None,
    ) -> Answer:
        """See `ports.ModelClient`. Any number of calls at once."""
        loop = asyncio.get_running_loop()
        # The answer is made within the latency, not after it: otherwise a long prompt would take longer.
        until = loop.time() + min(self._latency_s, timeout_s)
        answer = self._answer(endpoint, payload, request_id)
        await asyncio.sleep(max(until - loop.time(), 0.0))
        if self._latency_s > timeout_s:
            raise ModelSlow(f"no answer within {timeout_s:g} s")
        return answer

    async def warm(self, connections: int) -> None:
        """See `ports.ModelClient`. There are none."""

    def _answer(self, endpoint: str, payload: bytes, request_id: str) -> Answer:
        try:
            body = self._body(endpoint, payload, request_id)
        except Refusal as refusal:
            status = HTTPStatus(refusal.status)
            return Answer(status_code=status, reason=status.phrase, body=refusal.body)
        return Answer(status_code=200, reason="OK", body=body)

    def _body(self, endpoint: str, payload: bytes, answer_id: str) -> bytes:
        match endpoint:
            case "/v1/chat/completions" | "/v1/completions":
                chat = endpoint == "/v1/chat/completions"
                return generation(read(payload), answer_id, chat=chat, model=self._model).whole()
            case "/v1/embeddings":
                asked = read(payload)
                return embeddings(texts_to_embed(asked), answer_id, size=asked.dimensions, model=self._model).body
            case _:
                raise Refusal(404, f"There is no {endpoint} here.", "NotFoundError")
