"""Usage events and the sink that takes them: contract, section 7."""

import asyncio
import email.utils
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent

from inference_worker.billing.cloudevents import CroesusSink, operation, retry_after_s, usage_event
from inference_worker.errors import SinkUnavailable
from inference_worker.messages import InferenceRequest, Reply, Timings, Usage
from inference_worker.ports import Delivered, Refused

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "telemetry" / "usage-event.schema.json").read_text(encoding="utf-8")
)
NOW = 1_700_000_000.0


def encoded(
    *,
    request_id: str = "r-1",
    tenant: str | None = None,
    org_id: str = "",
    attempt: int = 0,
    replica_id: str = "replica-1",
    deployment_id: str = "8c4ffd1e",
    endpoint: str = "/v1/chat/completions",
    timings: Timings | None = None,
    total_tokens: int = 976,
) -> bytes | None:
    return usage_event(
        InferenceRequest(
            request_id=request_id,
            received_at=NOW - 20,
            timeout_s=60,
            deadline=NOW + 40,
            payload=b"{}",
            endpoint=endpoint,
            stream=False,
            tenant=tenant,
        ),
        Reply(
            request_id=request_id,
            status="completed",
            status_code=200,
            attempt=attempt,
            replica_id=replica_id,
            finished_at=NOW + 0.25,
            timings=timings or Timings(queue_s=12.4, model_s=3.42),
        ),
        Usage(input_tokens=812, output_tokens=164, total_tokens=total_tokens, cached_input_tokens=512),
        deployment_id=deployment_id,
        user_id="user-1",
        org_id=org_id,
        hf_model_id="org/model",
    )


def made(**changed: Any) -> dict[str, Any]:
    """An event, valid by our schema and by the CloudEvents SDK."""
    event = encoded(**changed)
    assert event is not None
    decoded: dict[str, Any] = json.loads(event)
    jsonschema.validate(decoded, SCHEMA)
    JSONFormat().read(CloudEvent, event)
    return decoded


def test_an_event_is_a_cloudevent_with_the_fields_of_the_contract() -> None:
    assert made() == {
        "specversion": "1.0",
        "id": "r-1:usage",
        "source": "urn:inference-worker:deployment:8c4ffd1e",
        "type": "inference.usage",
        "subject": "user-1",
        "time": "2023-11-14T22:13:20.250000Z",
        "datacontenttype": "application/json",
        "data": {
            "request_id": "r-1",
            "model": "org/model",
            "operation": "chat",
            "input_tokens": 812,
            "output_tokens": 164,
            "total_tokens": 976,
            "cached_input_tokens": 512,
            "requests": 1,
            "duration_s": 3.42,
            "queue_s": 12.4,
            "attempt": 0,
            "replica_id": "replica-1",
        },
    }


def test_another_attempt_on_another_replica_is_the_same_event_to_a_receiver() -> None:
    """Invariant 3: one event id a request, whatever was redelivered."""
    first, second = made(), made(attempt=3, replica_id="replica-2")

    assert (first["id"], first["source"]) == (second["id"], second["source"])
    assert (second["data"]["attempt"], second["data"]["replica_id"]) == (3, "replica-2")


@pytest.mark.parametrize(
    ("tenant", "org_id", "subject"),
    [
        pytest.param("tenant-1", "org-1", "tenant-1", id="the tenant is billed"),
        pytest.param(None, "org-1", "org-1", id="without a tenant the organisation"),
        pytest.param("", "org-1", "org-1", id="an empty tenant is none"),
        pytest.param(None, "", "user-1", id="without both the user"),
        pytest.param("a\nb\x7f", "", "a%0Ab%7F", id="control characters would have the event refused"),
    ],
)
def test_the_subject_is_never_empty(tenant: str | None, org_id: str, subject: str) -> None:
    assert made(tenant=tenant, org_id=org_id)["subject"] == subject


def test_the_source_is_a_uri_whatever_the_deployment_is_called() -> None:
    assert made(deployment_id="a b/ü")["source"] == "urn:inference-worker:deployment:a%20b%2F%C3%BC"


def test_an_id_of_any_script_makes_a_valid_event() -> None:
    assert made(request_id="ü" * 256)["id"] == "ü" * 256 + ":usage"


def test_what_was_not_measured_is_0_as_a_meter_sums_it() -> None:
    data = made(timings=Timings())["data"]

    assert (data["duration_s"], data["queue_s"]) == (0, 0)


def test_no_tokens_are_no_event() -> None:
    assert encoded(total_tokens=0) is None


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [
        ("/v1/chat/completions", "chat"),
        ("/openai/v1/completions", "text_completion"),
        ("/v1/embeddings", "embeddings"),
        ("/generate", "inference"),
    ],
)
def test_the_operation_follows_from_the_path(endpoint: str, name: str) -> None:
    assert operation(endpoint) == name


async def sent(
    server: Callable[[httpx.Request], object], events: list[bytes] | None = None, **options: float
) -> Delivered | Refused:
    async with CroesusSink(
        lambda: "http://croesus/billing",
        now=lambda: NOW,
        verify=False,
        transport=httpx.MockTransport(server),  # type: ignore[arg-type] # it takes coroutine functions, too
        **options,
    ) as sink:
        return await sink.send(events or [b'{"id":"1"}'])


async def test_events_are_posted_as_one_cloudevents_batch() -> None:
    requests: list[httpx.Request] = []

    def server(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(204)

    assert await sent(server, [b'{"id":"1"}', b'{"id":"2"}']) == Delivered()

    (request,) = requests
    assert (request.method, str(request.url)) == ("POST", "http://croesus/billing/events")
    assert request.headers["content-type"] == "application/cloudevents-batch+json"
    assert json.loads(request.content) == [{"id": "1"}, {"id": "2"}]


@pytest.mark.parametrize("status", [200, 202, 204, 409])
async def test_2xx_and_409_say_that_the_receiver_has_them(status: int) -> None:
    """B130: a refusal of a duplicate is a success."""
    assert await sent(lambda _: httpx.Response(status)) == Delivered()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
async def test_other_4xx_refuse_the_events_with_a_reason(status: int) -> None:
    answer = await sent(lambda _: httpx.Response(status, json={"detail": "no such meter"}))

    assert answer == Refused(reason=f'HTTP {status}: {{"detail":"no such meter"}}')


async def test_a_refusal_without_a_body_has_its_status_for_a_reason() -> None:
    assert await sent(lambda _: httpx.Response(422)) == Refused(reason="HTTP 422")


async def test_the_kept_reason_is_bounded() -> None:
    async def endless() -> Any:
        while True:
            yield b"x" * 1000

    answer = await sent(lambda _: httpx.Response(400, content=endless()))

    assert isinstance(answer, Refused)
    assert len(answer.reason) < 400


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429, 408, 425, 301])
async def test_a_status_that_says_nothing_against_the_events_means_later(status: int) -> None:
    with pytest.raises(SinkUnavailable, match=f"HTTP {status}") as raised:
        await sent(lambda _: httpx.Response(status, headers={"Retry-After": "7", "Location": "http://other/"}))

    assert raised.value.retry_after_s == 7


@pytest.mark.parametrize("failure", [httpx.ConnectError("refused"), httpx.ReadError("reset"), OSError("a cable")])
async def test_no_connection_means_later(failure: Exception) -> None:
    def server(request: httpx.Request) -> httpx.Response:
        raise failure

    with pytest.raises(SinkUnavailable, match=type(failure).__name__) as raised:
        await sent(server)

    assert raised.value.retry_after_s is None
    assert raised.value.__cause__ is failure


async def test_silence_means_later() -> None:
    async def server(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(1e5)
        return httpx.Response(200)

    with pytest.raises(SinkUnavailable, match="no answer within 10 s"):
        await sent(server)

    assert asyncio.get_running_loop().time() == 10


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        pytest.param("120", 120, id="a number of seconds"),
        pytest.param(email.utils.formatdate(NOW + 90, usegmt=True), 90, id="a date"),
        pytest.param(email.utils.formatdate(NOW - 90, usegmt=True), 0, id="a date that has passed"),
        pytest.param("9" * 5000, 999_999_999, id="a number without an end"),
        pytest.param("soon", None, id="neither"),
        pytest.param("-5", None, id="a negative number"),
        pytest.param("", None, id="nothing"),
    ],
)
def test_retry_after_is_a_number_or_a_date(value: str, seconds: float | None) -> None:
    assert retry_after_s(httpx.Headers({"Retry-After": value}), now=NOW) == seconds
