"""Usage as CloudEvents 1.0: what one completed request is billed for, and the receiver that takes such events.

When an event is sent, and again, and when it is given up, is the drainer's part (`metrics_reporter.py`).
"""

import asyncio
import email.utils
import re
import ssl
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from types import TracebackType
from typing import Final
from urllib.parse import quote

import httpx
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent

from inference_worker.errors import SinkUnavailable
from inference_worker.messages import InferenceRequest, Reply, Usage, public_id, shown_id
from inference_worker.ports import Delivered, Refused

EVENT_TYPE: Final = "inference.usage"
BATCH_CONTENT_TYPE: Final = "application/cloudevents-batch+json"
LONGEST_REASON: Final = 300
"""Characters of a refusal's body that are kept."""

OPERATIONS: Final = (
    ("/chat/completions", "chat"),
    ("/completions", "text_completion"),
    ("/embeddings", "embeddings"),
)
"""What the end of a path says of the operation, in the words of OpenTelemetry's `gen_ai.operation.name`."""

LATER: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})
"""The 4xx that say nothing against the events."""

_json = JSONFormat()
_no_text = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def usage_event(
    request: InferenceRequest,
    reply: Reply,
    usage: Usage,
    *,
    deployment_id: str,
    user_id: str,
    org_id: str,
    hf_model_id: str,
) -> bytes | None:
    """One event in structured JSON; None where no tokens were used.

    Its id comes of the request id alone, so that a repetition is the same event.
    """
    if usage.total_tokens <= 0:
        return None
    event = CloudEvent(
        {
            "specversion": "1.0",
            "id": f"{shown_id(request.request_id)}:usage",
            "source": f"urn:inference-worker:deployment:{quote(deployment_id, safe='')}",
            "type": EVENT_TYPE,
            "subject": _text(request.tenant or org_id or user_id),
            "time": datetime.fromtimestamp(reply.finished_at, UTC),
            "datacontenttype": "application/json",
        },
        {
            "request_id": public_id(request.request_id),
            "model": request.model or hf_model_id,
            "operation": operation(request.endpoint),
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "total_tokens": usage.total_tokens,
            "cached_input_tokens": usage.cached_input_tokens,
            "requests": 1,
            "duration_s": round(reply.timings.model_s or 0.0, 6),
            "queue_s": round(reply.timings.queue_s or 0.0, 6),
            "attempt": reply.attempt,
            "replica_id": reply.replica_id,
        },
    )
    return _json.write(event)


def operation(endpoint: str) -> str:
    """What a path of the model does; `inference` where it is none of OpenAI's."""
    return next((name for end, name in OPERATIONS if endpoint.endswith(end)), "inference")


class CroesusSink:
    """The billing server: `POST {base_url}/events`. A context manager; leaving it closes its connections."""

    def __init__(
        self,
        base_url: Callable[[], str],
        *,
        now: Callable[[], float],
        timeout_s: float = 10.0,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._base_url = base_url
        self._now = now
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            # Compressed answers could be large beyond what we read of them.
            headers={"Accept-Encoding": "identity"},
            timeout=None,  # One limit for the whole exchange instead, below.
            trust_env=False,
            verify=verify,
            transport=transport,
        )

    async def __aenter__(self) -> "CroesusSink":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def send(self, events: Sequence[bytes]) -> Delivered | Refused:
        """Send events, at most 100. A 409 says that the receiver has them.

        Raises:
            SinkUnavailable: no answer, or one that says nothing against the events.
        """
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream(
                    "POST",
                    f"{self._base_url()}/events",
                    content=b"[" + b",".join(events) + b"]",
                    headers={"Content-Type": BATCH_CONTENT_TYPE},
                ) as response,
            ):
                return await self._judged(response)
        except (TimeoutError, httpx.TimeoutException) as exc:
            raise SinkUnavailable(f"no answer within {self._timeout_s:g} s") from exc
        except (httpx.HTTPError, OSError) as exc:
            raise SinkUnavailable(f"{type(exc).__name__}: {exc}") from exc

    async def _judged(self, response: httpx.Response) -> Delivered | Refused:
        status = response.status_code
        if response.is_success or status == HTTPStatus.CONFLICT:
            return Delivered()
        if not response.is_client_error or status in LATER:
            raise SinkUnavailable(f"HTTP {status}", retry_after_s(response.headers, now=self._now()))
        said = await _beginning(response, LONGEST_REASON)
        return Refused(reason=f"HTTP {status}: {said}" if said else f"HTTP {status}")


def retry_after_s(headers: httpx.Headers, *, now: float) -> float | None:
    """Seconds that an answer asks to wait, by a number or a date (RFC 9110, 10.2.3); None where it asks nothing."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - now, 0.0)
    except (ValueError, OverflowError):
        return None


def _text(value: str) -> str:
    """CloudEvents strings have no control characters and no lone surrogates; a receiver may refuse the event."""
    return _no_text.sub(lambda found: f"%{ord(found.group()):02X}", value)


async def _beginning(response: httpx.Response, characters: int) -> str:
    read = bytearray()
    async for part in response.aiter_bytes():
        read += part
        if len(read) >= 4 * characters:
            break
    return read.decode(errors="replace").strip()[:characters]
