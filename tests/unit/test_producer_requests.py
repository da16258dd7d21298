"""What the producer of the sorted-set form writes, and what it refuses to write; no Redis."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.errors import ConfigurationError, InvalidSubmission, UnreadableResult
from inference_worker.llmd_messages import Envelope, read_member
from inference_worker.llmd_results import GateAnswer, HttpAnswer, NoAnswer, ResultOutcome, result_json
from inference_worker.producer import Producer
from inference_worker.producer_requests import Prepared, Request, Tokens, prepared
from inference_worker.producer_results import read_result

NOW = 1_790_000_000.25


def written(
    request: Request, *, payload_keys: bool = False, tokens: Tokens | None = None, now: float = NOW
) -> Prepared:
    return prepared(
        request,
        tokens or Tokens(),
        request_queue="requests",
        result_queue="results",
        payload_keys=payload_keys,
        now=now,
    )


def request(**changes: Any) -> Request:
    fields: dict[str, Any] = {"payload": {"model": "m"}, "deadline": NOW + 60, "id": "r1"}
    return Request(**fields | changes)


def test_a_request_reads_back_as_it_was_submitted() -> None:
    made = written(
        request(metadata={"a": "b"}, headers={"X-A": "1"}, endpoint="/v1/embeddings", model="m", created=5.0)
    )

    read = read_member(made.member)
    assert isinstance(read, Envelope)
    assert (read.kind, read.request.id, read.request.created, read.request.deadline) == (
        "plain",
        "r1",
        5,
        1_790_000_061,
    )
    assert (read.request.metadata, read.request.headers) == ({"a": "b"}, {"X-A": "1"})
    assert (read.request.endpoint, read.request.model) == ("/v1/embeddings", "m")
    assert (read.routing.request_queue_name, read.routing.result_queue_name) == ("requests", "results")
    assert (read.routing.request_token, read.routing.enqueued_at_ms) == (made.submission.token, 1_790_000_000_250)
    assert (made.score, made.submission.deadline) == (read.score, 1_790_000_061)
    assert 1_790_000_061 < made.score < 1_790_000_062


def test_a_request_with_queues_of_its_own_says_so_to_the_go_library() -> None:
    made = written(request(request_queue="mine", result_queue="mailbox"))

    member = json.loads(made.member)
    assert member["request_kind"] == "redis"
    assert (member["internal"]["request_queue_name"], member["internal"]["result_queue_name"]) == ("mine", "mailbox")
    assert (member["data"]["request_queue_name"], member["data"]["result_queue_name"]) == ("mine", "mailbox")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"payload": b"[1]"}, id="a payload that is a list"),
        pytest.param({"payload": b'"text"'}, id="a payload that is a string"),
        pytest.param({"payload": b"{"}, id="a payload that is cut short"),
        pytest.param({"payload": b'{"a":\xff}'}, id="a payload that is no UTF-8"),
        pytest.param({"payload": b'{"a":1}{}'}, id="a payload and something behind it"),
        pytest.param({"payload": 7}, id="a payload that is a number"),
        pytest.param({"payload": "{}"}, id="a payload that is text and no bytes"),
        pytest.param({"payload": {"a": object()}}, id="a payload with something that JSON has not"),
    ],
)
def test_a_payload_that_is_neither_an_object_nor_null_is_refused_case_112(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSubmission, match="payload"):
        written(request(**changes))


@pytest.mark.parametrize("payload_keys", [False, True])
@pytest.mark.parametrize("raw", [b'{"b": 1.50,  "a":1e3, "z":9007199254740993}', b"null", b' {"a":1}\n'])
def test_the_payloads_bytes_are_not_touched_case_112(raw: bytes, payload_keys: bool) -> None:
    made = written(request(payload=raw), payload_keys=payload_keys)

    read = read_member(made.member)
    assert isinstance(read, Envelope)
    assert (made.payload if payload_keys else read.request.payload) == raw.strip()
    assert (read.request.payload is None) == payload_keys


def test_a_payload_that_is_stored_apart_leaves_its_key_in_the_envelope() -> None:
    made = written(request(payload={"prompt": "long"}), payload_keys=True)

    member = json.loads(made.member)
    assert member["internal"]["payload_ref"] == f"request-payload:r1:{made.submission.token}"
    assert member["data"]["payload"] is None
    assert b"long" not in made.member


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"deadline": NOW - 1}, "has passed", id="a deadline in the past"),
        pytest.param({"deadline": 0}, "above 0", id="no deadline"),
        pytest.param({"deadline": -5}, "above 0", id="a deadline below 0"),
        pytest.param({"deadline": math.nan}, "above 0", id="a deadline that is no number"),
        pytest.param({"deadline": math.inf}, "above 0", id="a deadline that never comes"),
        pytest.param({"deadline": True}, "above 0", id="a deadline that is a truth value"),
        pytest.param({"deadline": "soon"}, "above 0", id="a deadline that is text"),
        pytest.param({"deadline": NOW * 1000}, "milliseconds", id="a deadline in milliseconds"),
        pytest.param({"id": ""}, "id must", id="an empty id"),
        pytest.param({"id": "a\0b"}, "id must", id="an id that could be taken for another one's generation"),
        pytest.param({"id": 5}, "id must", id="an id that is a number"),
        pytest.param({"idempotency_key": ""}, "idempotency_key must", id="an empty idempotency key"),
        pytest.param({"result_queue": ""}, "result_queue must", id="an empty result queue"),
        pytest.param({"result_queue": "requests"}, "result_queue is the request queue", id="results among requests"),
        pytest.param({"request_queue": 5}, "request_queue must", id="a request queue that is a number"),
        pytest.param({"metadata": {"a": 1}}, "metadata", id="metadata with a number"),
        pytest.param({"metadata": ["a"]}, "metadata", id="metadata that is a list"),
        pytest.param({"headers": {"a b": "c"}}, "header", id="a header with a name that HTTP has not"),
        pytest.param({"headers": {"a": "b\r\nc: d"}}, "header", id="a header that smuggles another one"),
        pytest.param({"endpoint": None}, "endpoint must", id="an endpoint that is none"),
        pytest.param({"model": "\ud800"}, "model must", id="half a character"),
        pytest.param({"created": -1}, "created must", id="made before time began"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_field(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSubmission, match=said):
        written(request(**changes))


def test_a_deadline_is_never_cut_short() -> None:
    assert written(request(deadline=NOW + 0.5)).submission.deadline == 1_790_000_001


@pytest.mark.parametrize("nothing", [None, {}, "r1", Request])
async def test_something_that_is_no_request_is_refused_case_98(nothing: Any) -> None:
    producer = Producer("redis://127.0.0.1:1/0", result_queue="results")

    with pytest.raises(InvalidSubmission, match="must be a Request"):
        await producer.submit(nothing)
    with pytest.raises(InvalidSubmission, match="must be a Request"):
        await producer.submit_many([request(deadline=1.9e9), nothing])


def test_all_that_is_wrong_with_a_producer_is_said_at_once_case_105() -> None:
    with pytest.raises(ConfigurationError) as raised:
        Producer("", result_queue="", request_queue="")

    assert [problem.split(":")[0] for problem in raised.value.problems] == [
        "redis_url",
        "request_queue",
        "result_queue",
    ]


def test_a_producer_does_not_have_its_results_among_the_requests() -> None:
    with pytest.raises(ConfigurationError, match="is the request queue"):
        Producer("redis://127.0.0.1:1/0", request_queue="q", result_queue="q")


@pytest.mark.parametrize("options", [{}, {"link": None}, {"link": "redis://127.0.0.1"}, {"redis_url": None}])
def test_a_producer_needs_a_url_or_a_connection_case_106(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Producer(result_queue="results", **options)


@given(st.lists(st.floats(min_value=0, max_value=2**32), min_size=2, max_size=50))
def test_tokens_sort_in_the_order_in_which_they_were_drawn_whatever_the_clock_does(clock: list[float]) -> None:
    tokens = Tokens()

    drawn = [tokens.draw(now) for now in clock]

    assert drawn == sorted(drawn)
    assert all(len(token) == 32 for token in drawn)
    assert len(set(drawn)) == len(drawn)


def test_requests_of_one_moment_lie_in_the_queue_in_the_order_of_submission_case_24() -> None:
    tokens = Tokens()

    made = [written(request(id=f"r{-n}"), tokens=tokens) for n in range(300)]

    assert sorted(made, key=lambda one: (one.score, one.member)) == made


def test_two_tries_of_one_request_are_the_same_and_another_request_is_not() -> None:
    def fingerprint(now: float = NOW, **changes: Any) -> str:
        return written(request(idempotency_key="k", deadline=NOW + 100, **changes), now=now).fingerprint

    assert fingerprint() == fingerprint(now=NOW + 5)
    assert fingerprint(metadata={"a": "1", "b": "2"}) == fingerprint(metadata={"b": "2", "a": "1"})
    others: list[dict[str, Any]] = [
        {"id": "r2"},
        {"payload": {"model": "n"}},
        {"metadata": {"a": "1"}},
        {"headers": {"a": "1"}},
        {"endpoint": "/v1/x"},
        {"model": "m"},
        {"request_queue": "q"},
        {"result_queue": "q"},
    ]
    assert len({fingerprint(), *(fingerprint(**one) for one in others)}) == len(others) + 1


def test_a_result_says_whether_the_gateway_answered() -> None:
    answered = read_result(b'{"id":"a","status_code":429,"payload":"{\\"error\\":\\"busy\\"}","request_token":"t"}')
    failed = read_result(b'{"id":"a","payload":"","error_code":"CANCELLED","error_message":"by you"}')

    assert (answered.id, answered.token, answered.status_code, answered.ok) == ("a", "t", 429, False)
    assert (answered.json(), answered.error_code) == ({"error": "busy"}, None)
    assert (failed.token, failed.status_code, failed.ok, failed.error_code) == (None, None, False, "CANCELLED")
    assert failed.error_message == "by you"
    assert read_result(b'{"id":"a","status_code":201,"payload":"x","new":1}').ok


@pytest.mark.parametrize(
    ("outcome", "seen"),
    [
        pytest.param(HttpAnswer(status_code=200, body=b'{"a":1.50}'), (200, None, b'{"a":1.50}'), id="an answer"),
        pytest.param(HttpAnswer(status_code=503, body=b"busy"), (503, None, b"busy"), id="a failed answer"),
        pytest.param(
            NoAnswer(code="DEADLINE_EXCEEDED", text="late"), (None, "DEADLINE_EXCEEDED", b'{"error":"late"}'), id="none"
        ),
        pytest.param(
            GateAnswer(status_code=429, code="GATE_DROPPED", text="full"),
            (429, "GATE_DROPPED", b'{"error":"full"}'),
            id="a gate's answer",
        ),
    ],
)
def test_what_our_workers_write_as_a_result_is_read(outcome: ResultOutcome, seen: tuple[object, ...]) -> None:
    result = read_result(result_json("a", outcome, token="t"))

    assert (result.status_code, result.error_code, result.payload) == seen
    assert (result.id, result.token) == ("a", "t")


@pytest.mark.parametrize(
    "raw",
    [b"", b"text", b"[]", b"{}", b'{"id":""}', b'{"id":5}', b'{"id":"a","status_code":"200"}', b'{"id":"\xff"}'],
)
def test_what_is_no_result_is_said_to_be_none_case_104(raw: bytes) -> None:
    with pytest.raises(UnreadableResult) as raised:
        read_result(raw)

    assert raised.value.raw == raw
    assert raised.value.discard is None
