"""The trace of a request, without a collector: what is read from a message, and what the model gets of it."""

import timeit
from collections.abc import Mapping

import pytest
from structlog.testing import capture_logs

from inference_worker.messages import InferenceRequest
from inference_worker.ports import Answer, Delivery
from inference_worker.tracing import PASSING_ON, UNTRACED, carried
from tests.unit.worker_kit import FakeModel, Site, Worker, body, running
from tests.waiting import eventually

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
STATE = "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"


@pytest.fixture
async def site() -> Site:
    return Site()


async def publish(site: Site, headers: Mapping[str, object], request_id: str = "a") -> None:
    async with site.broker.connect() as producer:
        await producer.publish(body(request_id), headers=headers)


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({"traceparent": PARENT, "tracestate": STATE, "baggage": "user=7"}, id="as text"),
        pytest.param(
            {"traceparent": PARENT.encode(), "tracestate": bytearray(STATE.encode()), "baggage": b"user=7"},
            id="as bytes",
        ),
        pytest.param(
            {"traceparent": f" {PARENT}\t", "tracestate": f" {STATE}", "baggage": "user=7 ", "x-other": 7}, id="padded"
        ),
    ],
)
def test_context_and_baggage_are_read_from_a_message(headers: Mapping[str, object]) -> None:
    assert carried(headers) == {"traceparent": PARENT, "tracestate": STATE, "baggage": "user=7"}


@pytest.mark.parametrize(
    "parent",
    [
        pytest.param("", id="empty"),
        pytest.param("garbage", id="garbage"),
        pytest.param(7, id="a number"),
        pytest.param({"traceparent": PARENT}, id="a table"),
        pytest.param(b"\xff" * 55, id="no ASCII"),
        pytest.param(PARENT.upper(), id="in capitals"),
        pytest.param(PARENT[:-1], id="too short"),
        pytest.param(PARENT + "-more", id="longer than version 00 is"),
        pytest.param("01" + PARENT[2:] + "more", id="of a later version, without its dash"),
        pytest.param("ff" + PARENT[2:], id="of the version that never is"),
        pytest.param(PARENT.replace(TRACE, "0" * 32), id="of no trace"),
        pytest.param(PARENT.replace("00f067aa0ba902b7", "0" * 16), id="of no span"),
        pytest.param(f"{PARENT}\r\nAuthorization: x", id="with another header inside"),
        pytest.param(f"{PARENT}\n", id="with a line break"),
    ],
)
def test_what_is_no_context_is_left_out_with_its_state(parent: object) -> None:
    """W3C Trace Context, 3.2.3: without a valid traceparent the tracestate is not to be used."""
    assert carried({"traceparent": parent, "tracestate": STATE, "baggage": "user=7"}) == {"baggage": "user=7"}


def test_a_later_version_may_say_more() -> None:
    parent = "01" + PARENT[2:] + "-more"

    assert carried({"traceparent": parent}) == {"traceparent": parent}


@pytest.mark.parametrize("state", ["x" * 513, "a=1\r\nX: y", "a=\u00e9", 3])
def test_a_state_that_cannot_be_sent_is_left_out_and_the_trace_goes_on(state: object) -> None:
    assert carried({"traceparent": PARENT, "tracestate": state}) == {"traceparent": PARENT}


# ---------------------------------------------------------------- passing on


async def test_the_model_gets_the_producers_context_of_every_attempt(site: Site) -> None:
    worker = Worker(site, FakeModel(failures=[Answer(status_code=503, reason="busy", body=b"")]))
    worker.processor._retry_statuses = frozenset({503})
    with capture_logs() as log:
        async with running(worker):
            await publish(site, {"traceparent": PARENT, "tracestate": STATE, "baggage": b"user=7"})
            await eventually(lambda: len(worker.settled) == 2, within=5, what="two settlements")

    assert worker.model.headers == [{"traceparent": PARENT, "tracestate": STATE, "baggage": "user=7"}] * 2
    assert [line["trace_id"] for line in log if line["event"] == "request"] == [TRACE] * 2


async def test_baggage_is_passed_on_without_a_trace_too(site: Site) -> None:
    worker = Worker(site, FakeModel())
    async with running(worker):
        await publish(site, {"baggage": "user=7"})
        await eventually(lambda: worker.settled, within=5, what="a settlement")

    assert worker.model.headers == [{"baggage": "user=7"}]


async def test_a_message_without_a_trace_says_nothing_of_one(site: Site) -> None:
    worker = Worker(site, FakeModel())
    with capture_logs() as log:
        async with running(worker):
            await publish(site, {"traceparent": "garbage", "x-other": "y"})
            await eventually(lambda: worker.settled, within=5, what="a settlement")

    assert worker.model.headers == [{}]
    (line,) = [line for line in log if line["event"] == "request"]
    assert "trace_id" not in line


async def test_a_message_without_a_trace_costs_less_than_a_microsecond(site: Site) -> None:
    """A bar: what is done for each message where nobody traces. It takes the best of several runs."""
    worker = Worker(site, FakeModel())
    delivery = worker.job(body()).delivery
    request = InferenceRequest(
        request_id="a", received_at=0, timeout_s=1, deadline=1, payload=b"{}", endpoint="/v1", stream=False
    )
    outcome = await worker.processor.process(worker.job(body()))

    def traced(delivery: Delivery) -> Mapping[str, str]:
        span = PASSING_ON.begin(delivery)
        with span.calling(request) as call:
            headers = call.headers
            call.ended(None, None)
        span.settled(outcome, "ack", request_id="a")
        span.end()
        return {**span.ids, **headers}

    assert traced(delivery) == {}
    assert PASSING_ON.begin(delivery) is UNTRACED
    one_s = min(timeit.repeat(lambda: traced(delivery), number=2000, repeat=20)) / 2000
    print(f"{one_s * 1e9:.0f} ns")
    assert one_s < 1e-6
