"""Envelopes of llm-d-async: what comes is what goes. Names end in the number of the peer's case."""

import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.errors import MalformedRequest
from inference_worker.llmd_messages import (
    LONGEST_TTL_S,
    Envelope,
    OwnMessage,
    PublicRequest,
    RequestKind,
    Routing,
    from_request,
    generation_of,
    new_envelope,
    queue_score,
    read_member,
    retried,
    routed,
    to_request,
    with_payload,
    without_payload,
    write_envelope,
)
from inference_worker.messages import LONGEST_TIMEOUT_S, InferenceRequest, encode_request

NOW = 1_790_000_000.0
DEADLINE = 1_790_000_060


def member(data: object = None, internal: object = None, **others: object) -> bytes:
    said = {"id": "a", "created": 1_790_000_000, "deadline": DEADLINE, "payload": {"model": "m"}}
    return json.dumps(
        {"internal": {} if internal is None else internal, "request_kind": "plain", "data": data or said, **others}
    ).encode()


def read(text: bytes) -> Envelope:
    envelope = read_member(text)
    assert isinstance(envelope, Envelope)
    return envelope


def refused(text: bytes) -> MalformedRequest:
    with pytest.raises(MalformedRequest) as caught:
        read_member(text)
    return caught.value


FULL = Routing(
    retry_count=2,
    queue_id="q",
    request_token="t0ken",
    request_queue_name="rq",
    result_queue_name="resq",
    result_ttl_seconds=60,
    result_routing_resolved=True,
    transport_correlation_id="tc",
    enqueued_at_ms=1_790_000_000_123,
    labels={"tier": "batch"},
)


@pytest.mark.parametrize("kind", ["plain", "redis", "pubsub"])
def test_a_request_that_is_written_and_read_is_the_same_in_every_kind_case_1(kind: RequestKind) -> None:
    request = PublicRequest(
        id="a",
        created=1000,
        deadline=2000,
        payload=b'{"model":"m"}',
        metadata={"k": "v"},
        headers={"X-A": "b"},
        endpoint="/v1/embeddings",
        model="m",
        pubsub_id="ps" if kind == "pubsub" else "",
    )

    envelope = read(write_envelope(new_envelope(request, FULL, kind)))

    assert (envelope.kind, envelope.request, envelope.routing) == (kind, request, FULL)


def test_a_callers_choice_of_queues_is_kept_in_the_data_case_2() -> None:
    request = PublicRequest(id="a", deadline=2000, payload=b"{}", request_queue_name="rq", result_queue_name="resq")

    text = write_envelope(new_envelope(request, Routing()))

    assert json.loads(text)["request_kind"] == "redis"
    assert json.loads(text)["data"]["request_queue_name"] == "rq"
    assert read(text).request == request


@pytest.mark.parametrize("kind", ['"request_kind":null,', '"request_kind":"",', ""])
def test_an_envelope_without_a_kind_is_refused_with_its_id_case_4(kind: str) -> None:
    said = refused(b'{"internal":{},' + kind.encode() + b'"data":{"id":"a","deadline":5}}')

    assert (said.request_id, "request_kind is missing" in said.reason) == ("a", True)


@pytest.mark.parametrize("kind", [b'"alien"', b"7", b'{"a":1}', b'"Plain"'])
def test_an_unknown_kind_is_refused_with_its_id_case_5(kind: bytes) -> None:
    said = refused(b'{"internal":{},"request_kind":' + kind + b',"data":{"id":"a","deadline":5}}')

    assert said.request_id == "a"
    assert kind.decode() in said.reason
    assert "plain, redis, pubsub" in said.reason


@pytest.mark.parametrize("data", [b"", b',"data":null'])
def test_an_envelope_without_data_is_refused_case_6(data: bytes) -> None:
    assert "data is missing" in refused(b'{"internal":{},"request_kind":"plain"' + data + b"}").reason


def test_an_endpoint_survives_and_an_empty_one_is_not_written_case_9() -> None:
    with_one = write_envelope(new_envelope(PublicRequest(id="a", deadline=5, endpoint="/v1/custom"), Routing()))
    without = write_envelope(new_envelope(PublicRequest(id="a", deadline=5), Routing()))

    assert read(with_one).request.endpoint == "/v1/custom"
    assert set(json.loads(without)["data"]) == {"id", "created", "deadline", "payload"}
    assert json.loads(without)["internal"] == {}


def test_a_request_of_ours_is_copied_field_by_field_case_10() -> None:
    request = InferenceRequest(
        request_id="a",
        received_at=1000.7,
        timeout_s=9.5,
        deadline=1010.2,
        payload=b'{"b":1,"a":2.50}',
        endpoint="/v1/embeddings",
        stream=False,
        metadata={"userid": "u"},
        headers={"X-A": "b"},
        model="m",
    )

    envelope = read(write_envelope(from_request(request, Routing(request_token="t"))))

    assert envelope.request == PublicRequest(
        id="a",
        created=1000,
        deadline=1011,
        payload=b'{"b":1,"a":2.50}',
        metadata={"userid": "u"},
        headers={"X-A": "b"},
        endpoint="/v1/embeddings",
        model="m",
    )


def test_what_is_split_and_joined_again_is_the_same_case_13() -> None:
    whole = read(member(internal={"request_token": "t"}))

    bare, payload = without_payload(whole, "request-payload:a:t")
    text = write_envelope(bare)
    joined = with_payload(read(text), payload)

    assert b'"model"' not in text
    assert payload == b'{"model": "m"}'
    assert joined.request == whole.request
    assert joined.routing == replace(whole.routing, payload_ref="request-payload:a:t")


def test_a_payload_that_lies_elsewhere_is_never_written_and_an_inline_one_always_case_14() -> None:
    request = PublicRequest(id="a", deadline=5, payload=b'{"prompt":"big"}')

    pointer = new_envelope(request, Routing(payload_ref="request-payload:a:t"))
    fetched = with_payload(read(write_envelope(pointer)), b'{"prompt":"big"}')
    inline = new_envelope(request, Routing())

    assert b"big" not in write_envelope(pointer)
    assert b"big" not in write_envelope(retried(fetched))
    assert read(write_envelope(retried(fetched))).routing.payload_ref == "request-payload:a:t"
    assert b'"payload":{"prompt":"big"}' in write_envelope(inline)


def test_key_order_and_number_text_of_a_payload_stay_as_they_came_case_112() -> None:
    payload = b'{"z": 1.50, "a" :1e3,"u":"\\u00e9", "half":"\\ud83d"}'
    text = b'{"request_kind":"redis","data":{"payload":' + payload + b',"id":"a","deadline":%d}}' % DEADLINE

    once = read(text)
    again = read(write_envelope(retried(once)))

    assert once.request.payload == again.request.payload == payload
    assert to_request(again, path="/v1/completions", now=NOW).payload == payload


def test_fields_of_another_version_are_put_back() -> None:
    text = member(
        data={"id": "a", "deadline": DEADLINE, "payload": {}, "new": [1, 2.0]},
        internal={"retry_count": 1, "dispatch_attempt": 7, "later": {"x": None}},
    )

    again = json.loads(write_envelope(retried(read(text))))

    assert again["internal"] == {"retry_count": 2, "dispatch_attempt": 7, "later": {"x": None}}
    assert again["data"]["new"] == [1, 2.0]


def test_a_retry_has_one_failed_attempt_more_case_254() -> None:
    assert read(write_envelope(retried(read(member(internal={"retry_count": 4}))))).routing.retry_count == 5


def test_a_count_of_attempts_that_no_store_keeps_is_taken_for_the_largest_that_they_do() -> None:
    assert read(member(internal={"retry_count": 2**40})).routing.retry_count == 2**31 - 1


@pytest.mark.parametrize("null", ["internal", "data"])
def test_a_field_of_null_is_a_field_that_is_not_there(null: str) -> None:
    names = {"internal": ("labels", "queue_id", "retry_count"), "data": ("metadata", "headers", "endpoint", "created")}
    parts = {"internal": {}, "data": {"id": "a", "deadline": DEADLINE, "payload": {}}}
    parts[null] = {**parts[null], **dict.fromkeys(names[null])}

    assert read(member(parts["data"], parts["internal"])).request.deadline == DEADLINE


def test_an_internal_of_null_is_an_empty_one() -> None:
    assert read(b'{"internal":null,"request_kind":"plain","data":{"id":"a","deadline":5}}').routing == Routing()


@pytest.mark.parametrize(
    ("text", "request_id"),
    [
        pytest.param(b"", None, id="nothing"),
        pytest.param(b"null", None, id="null"),
        pytest.param(b"[1]", None, id="a list"),
        pytest.param(b"{", None, id="half an object"),
        pytest.param(b'{"request_kind":"plain","data":{"id":"a","deadline":5}}\xff', None, id="no UTF-8"),
        pytest.param(b'{"internal":' + b"[" * 100_000, None, id="too deep"),
        pytest.param(member({"id": "a"}), "a", id="no deadline"),
        pytest.param(member({"id": "a", "deadline": "soon"}), "a", id="a deadline of words"),
        pytest.param(member({"id": "a", "deadline": 1.5}), "a", id="half a second"),
        pytest.param(member({"id": "a", "deadline": 0}), "a", id="a deadline of 0"),
        pytest.param(member({"id": "a", "deadline": -5}), "a", id="a negative deadline"),
        pytest.param(member({"id": "a", "deadline": 2**63}), "a", id="a deadline beyond all time"),
        pytest.param(member([1]), None, id="data that is a list"),
        pytest.param(member({"deadline": 5}), None, id="no id"),
        pytest.param(member({"id": "", "deadline": 5}), None, id="an empty id"),
        pytest.param(member({"id": 7, "deadline": 5}), None, id="an id that is a number"),
        pytest.param(member({"id": "a\0b", "deadline": 5}), None, id="an id with a NUL, which parts generations"),
        pytest.param(member({"id": "\ud83d", "deadline": 5}), None, id="an id of half a character"),
        pytest.param(member({"id": "a", "deadline": 5, "metadata": {"k": 1}}), "a", id="metadata of numbers"),
        pytest.param(member({"id": "a", "deadline": 5, "headers": ["x"]}), "a", id="headers as a list"),
        pytest.param(member(internal={"retry_count": "two"}), "a", id="a count of words"),
        pytest.param(member(internal=[1]), "a", id="an internal that is a list"),
        pytest.param(b'{"id":"a","deadline":5,"payload":{}}', "a", id="a bare request"),
    ],
)
def test_what_is_no_envelope_is_refused_with_its_id_where_one_can_be_read_case_29(
    text: bytes, request_id: str | None
) -> None:
    said = refused(text)

    assert said.request_id == request_id
    assert said.reason


def test_a_message_in_our_own_format_is_told_apart() -> None:
    body = encode_request(request_id="a", received_at=NOW, timeout_s=60.0, payload=b"{}")

    assert read_member(body) == OwnMessage(body=body)


def test_a_request_id_beside_a_kind_does_not_make_it_ours() -> None:
    assert isinstance(read_member(member(request_id="x")), Envelope)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_bytes_do_anything_but_be_read_or_be_refused(text: bytes) -> None:
    with contextlib.suppress(MalformedRequest):
        read_member(text)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
TEXTS = st.dictionaries(st.text(), st.text(), max_size=3)


@given(JSON, TEXTS, st.integers(0, 99))
def test_whatever_the_payload_is_it_passes_byte_for_byte(payload: object, labels: dict[str, str], times: int) -> None:
    raw = json.dumps(payload, indent=1).encode()
    text = b'{"data":{"deadline":9,"payload": ' + raw + b' ,"id":"a"} ,"request_kind":"plain"}'

    envelope = read(text)
    for _ in range(times % 4):
        envelope = read(write_envelope(retried(replace(envelope, routing=replace(envelope.routing, labels=labels)))))

    assert envelope.request.payload == raw
    assert envelope.routing.retry_count == times % 4


def test_a_generation_is_the_id_and_the_token_and_the_id_alone_without_one_case_57() -> None:
    assert generation_of("a", "t") == "a\0t"
    assert generation_of("a", "") == "a"
    assert (
        read(member(internal={"request_token": "t1"})).generation
        != read(member(internal={"request_token": "t2"})).generation
    )


def test_the_score_of_an_old_producer_is_the_bare_deadline_case_25() -> None:
    assert read(member()).score == float(DEADLINE)


def test_equal_deadlines_go_in_the_order_of_their_submission_case_24() -> None:
    at_ms = 1_790_000_000_000
    scores = [queue_score(DEADLINE, at_ms + 63 * n) for n in range(100)]

    assert scores == sorted(set(scores))
    assert all(DEADLINE <= score < DEADLINE + 1 for score in scores)


@given(st.integers(1, 2**32), st.integers(1, 2**45), st.integers(0, 2**40))
def test_no_submission_time_puts_a_request_behind_a_later_deadline(deadline: int, at_ms: int, later_ms: int) -> None:
    first, second = queue_score(deadline, at_ms), queue_score(deadline, at_ms + later_ms)

    assert deadline <= first <= second < deadline + 1


def test_the_score_is_the_one_that_the_peer_computes() -> None:
    """Worked out by hand: 60 s before the deadline are 131,012,000 of 131,072,000 ms, 2,096,192 of 2,097,152 steps."""
    assert queue_score(DEADLINE, (DEADLINE - 60) * 1000) == DEADLINE + 2_096_192 / 2_097_152


class TestRoute:
    """Where a result goes is said once."""

    @staticmethod
    def at(queue: str = "", asked: str = "", internal: dict[str, object] | None = None) -> Routing:
        envelope = read(member(internal={"result_queue_name": asked, **(internal or {})}))
        return routed(
            envelope,
            queue_id="q",
            queue_name="rq",
            result_queue_name=queue,
            default_result_queue_name="result-list",
            result_ttl_seconds=30,
            labels={"tier": "async"},
        ).routing

    def test_the_queue_says_before_the_message_and_the_message_before_the_default_case_78(self) -> None:
        assert self.at(queue="theirs", asked="mine").result_queue_name == "theirs"
        assert self.at(asked="mine").result_queue_name == "mine"

    def test_without_either_it_is_the_default_case_77(self) -> None:
        assert self.at().result_queue_name == "result-list"

    def test_what_is_resolved_stays(self) -> None:
        frozen: dict[str, object] = {"result_routing_resolved": True, "result_ttl_seconds": 5}

        routing = self.at(queue="new", asked="old", internal=frozen)

        assert (routing.result_queue_name, routing.result_ttl_seconds) == ("old", 5)

    def test_a_route_that_is_resolved_and_names_no_list_leads_to_the_default(self) -> None:
        assert self.at(internal={"result_routing_resolved": True}).result_queue_name == "result-list"

    def test_a_time_that_redis_cannot_have_is_shortened(self) -> None:
        said: dict[str, object] = {"result_routing_resolved": True, "result_ttl_seconds": 10**18}

        assert self.at(asked="mine", internal=said).result_ttl_seconds == LONGEST_TTL_S

    @pytest.mark.parametrize("said", ["", "rq:claimed", "retry-sortedset", "another"])
    def test_a_retry_comes_back_to_the_queue_it_was_taken_from_whatever_the_message_says(self, said: str) -> None:
        assert self.at(internal={"request_queue_name": said}).request_queue_name == "rq"

    def test_it_gets_the_id_and_the_labels_of_its_queue_case_22(self) -> None:
        routing = self.at(internal={"labels": {"tier": "batch", "team": "x"}})

        assert (routing.queue_id, routing.request_queue_name) == ("q", "rq")
        assert routing.labels == {"tier": "async", "team": "x"}


class TestToRequest:
    def test_it_is_named_by_its_generation_and_has_what_the_caller_said(self) -> None:
        said = {
            "id": "a",
            "created": 1_789_999_990,
            "deadline": DEADLINE,
            "payload": {"model": "m"},
            "metadata": {"userid": "u"},
            "headers": {"X-A": "b"},
            "model": "m",
        }

        request = to_request(read(member(said, {"request_token": "t"})), path="/v1/completions", now=NOW)

        assert request == InferenceRequest(
            request_id="a\0t",
            received_at=1_789_999_990.0,
            timeout_s=70.0,
            deadline=float(DEADLINE),
            payload=b'{"model": "m"}',
            endpoint="/v1/completions",
            stream=False,
            metadata={"userid": "u"},
            headers={"X-A": "b"},
            model="m",
        )

    def test_its_own_endpoint_goes_before_the_queues_path_case_234(self) -> None:
        envelope = read(member({"id": "a", "deadline": DEADLINE, "endpoint": "/v1/embeddings"}))

        assert to_request(envelope, path="/v1/completions", now=NOW).endpoint == "/v1/embeddings"

    @pytest.mark.parametrize(
        ("created", "enqueued_at_ms", "received_at"),
        [
            pytest.param(0, 0, NOW, id="now where nothing is said"),
            pytest.param(1_789_999_000, 1_789_999_500_250, 1_789_999_500.25, id="the submission to the millisecond"),
            pytest.param(1_899_999_000, 0, NOW + 60, id="a clock far ahead is not believed"),
        ],
    )
    def test_it_was_received_when_it_was_submitted(self, created: int, enqueued_at_ms: int, received_at: float) -> None:
        said = {"id": "a", "created": created, "deadline": DEADLINE}

        request = to_request(read(member(said, {"enqueued_at_ms": enqueued_at_ms})), path="/", now=NOW)

        assert request.received_at == received_at

    def test_a_deadline_in_the_far_future_is_as_far_as_any_of_ours(self) -> None:
        envelope = read(member({"id": "a", "deadline": 2**62}))

        assert to_request(envelope, path="/", now=NOW).deadline == NOW + LONGEST_TIMEOUT_S

    def test_a_payload_that_is_missing_is_null(self) -> None:
        assert to_request(read(member({"id": "a", "deadline": DEADLINE})), path="/", now=NOW).payload == b"null"

    @pytest.mark.parametrize(
        ("payload", "stream"), [(b'{"stream":true}', True), (b'{"stream":1}', False), (b"[1]", False)]
    )
    def test_a_stream_is_recognised_and_nothing_is_added_to_it(self, payload: bytes, stream: bool) -> None:
        envelope = new_envelope(PublicRequest(id="a", deadline=DEADLINE, payload=payload), Routing())

        request = to_request(envelope, path="/", now=NOW)

        assert (request.payload, request.stream) == (payload, stream)

    def test_what_was_not_fetched_is_no_request(self) -> None:
        envelope = new_envelope(PublicRequest(id="a", deadline=DEADLINE), Routing(payload_ref="k"))

        with pytest.raises(MalformedRequest):
            to_request(envelope, path="/", now=NOW)
