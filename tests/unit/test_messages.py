"""A message's body as a request, and a reply as its JSON."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.errors import ConfigurationError, MalformedRequest
from inference_worker.messages import (
    CLOCK_SKEW_S,
    LONGEST_TIMEOUT_S,
    MOST_HALVES,
    InferenceRequest,
    KnownReply,
    Reply,
    Timings,
    Usage,
    decode,
    encode_reply,
    encode_request,
    error_text,
    known_reply,
    usable_id,
    usage_of,
    whole_json,
)

NOW = 1000.0
HUGE = "9" * 5000
"""More digits than Python converts."""


def message(**changes: object) -> dict[str, object]:
    return {"request_id": "a", "received_at": NOW, "timeout_s": 60, "payload": {"n": 1}} | changes


def read(
    body: bytes | dict[str, object], *, message_id: str | None = None, infer_path: str = "/v1/x"
) -> InferenceRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return decode(raw, message_id=message_id, infer_path=infer_path, now=NOW)


class TestDecode:
    """What a producer may write, and what it is told where it may not."""

    def test_reads_what_was_written(self) -> None:
        body = encode_request(
            request_id="ü",
            received_at=NOW,
            timeout_s=60,
            payload=b'{"n":1}',
            endpoint="/v1/embeddings",
            metadata={"k": "v"},
            tenant="t",
        )

        assert read(body) == InferenceRequest(
            request_id="ü",
            received_at=NOW,
            timeout_s=60,
            deadline=NOW + 60,
            payload=b'{"n":1}',
            endpoint="/v1/embeddings",
            stream=False,
            tenant="t",
            metadata={"k": "v"},
        )

    def test_what_need_not_be_said_is_left_out(self) -> None:
        body = encode_request(request_id="a", received_at=NOW, timeout_s=60, payload=b"{}")

        assert set(json.loads(body)) == {"request_id", "received_at", "timeout_s", "payload"}
        request = read(body)
        assert (request.endpoint, request.tenant, request.metadata) == ("/v1/x", None, {})

    def test_the_payload_is_the_bytes_that_came(self) -> None:
        payload = b'{ "b":1.0e5, "a" : "\\u00fc \\/", "a":2,\n "big":' + HUGE.encode() + b"}"
        body = b'{"request_id":"a","received_at":1000,"timeout_s":60,"payload":' + payload + b"}"

        assert read(body).payload == payload

    def test_unknown_fields_are_ignored(self) -> None:
        assert read(message(priority=9, extra={"deep": [1]})).request_id == "a"

    @pytest.mark.parametrize(
        ("received_at", "timeout_s", "deadline"),
        [
            pytest.param(900.0, 60, 960.0, id="it counts from when the request was received"),
            pytest.param(NOW + 1e6, 60, NOW + CLOCK_SKEW_S + 60, id="a clock that is far ahead is not believed"),
            pytest.param(NOW, 1e300, NOW + LONGEST_TIMEOUT_S, id="a month is as long as anybody waits"),
            pytest.param(-1e300, 1.0, -1e300, id="an absurd past is the past"),
        ],
    )
    def test_the_deadline(self, received_at: float, timeout_s: float, deadline: float) -> None:
        assert read(message(received_at=received_at, timeout_s=timeout_s)).deadline == deadline

    @pytest.mark.parametrize(
        "body",
        [
            pytest.param(b"", id="nothing"),
            pytest.param(b"no", id="no JSON"),
            pytest.param(b'{"request_id":"a"', id="a JSON that is cut short"),
            pytest.param(json.dumps(message()).encode() + b"x", id="something after the JSON"),
            pytest.param(b"[" * 100_000, id="nesting without an end"),
            pytest.param(b"[]", id="no object"),
            pytest.param(b"null", id="null"),
            pytest.param(b'{"request_id":"\xff"}', id="no UTF-8"),
            pytest.param(json.dumps(message()).encode("utf-16"), id="another encoding"),
        ],
    )
    def test_what_is_no_object_is_answered_under_the_message_id(self, body: bytes) -> None:
        with pytest.raises(MalformedRequest) as raised:
            read(body, message_id="m")
        assert raised.value.request_id == "m"

    @pytest.mark.parametrize(
        "request_id",
        [
            pytest.param(None, id="null"),
            pytest.param("", id="empty"),
            pytest.param(7, id="a number"),
            pytest.param(["a"], id="a list"),
            pytest.param("a\n", id="a control character"),
            pytest.param("a\x7f", id="DEL"),
            pytest.param("a\x85", id="a control character beyond ASCII"),
            pytest.param("ü" * 257, id="more than 512 bytes"),
        ],
    )
    def test_an_id_that_names_nothing_falls_back_to_the_message_id(self, request_id: object) -> None:
        with pytest.raises(MalformedRequest, match="request_id") as raised:
            read(message(request_id=request_id), message_id="m")
        assert raised.value.request_id == "m"

    @pytest.mark.parametrize("message_id", [None, "", "\x00", "x" * 513, "\ud800"])
    def test_a_message_id_that_names_nothing_leaves_no_id_at_all(self, message_id: str | None) -> None:
        with pytest.raises(MalformedRequest) as raised:
            read(b"no", message_id=message_id)
        assert raised.value.request_id is None

    def test_a_missing_id_is_no_id(self) -> None:
        body = message()
        del body["request_id"]

        with pytest.raises(MalformedRequest, match="request_id"):
            read(body)

    def test_an_id_of_512_bytes_is_one(self) -> None:
        assert read(message(request_id="ü" * 256)).request_id == "ü" * 256

    @pytest.mark.parametrize("name", ["received_at", "timeout_s"])
    @pytest.mark.parametrize(
        "value",
        [
            pytest.param('"60"', id="a string"),
            pytest.param("null", id="null"),
            pytest.param("true", id="a boolean"),
            pytest.param("[]", id="a list"),
            pytest.param("1e999", id="beyond any float"),
            pytest.param("1" + "0" * 400, id="an integer beyond any float"),
            pytest.param(HUGE, id="an integer that Python will not read"),
            pytest.param("NaN", id="not a number"),
            pytest.param("-Infinity", id="infinite"),
        ],
    )
    def test_a_time_must_be_a_finite_number(self, name: str, value: str) -> None:
        body = json.dumps(message(**{name: "HERE"})).replace('"HERE"', value).encode()

        with pytest.raises(MalformedRequest) as raised:
            read(body, message_id="m")
        assert raised.value.request_id == ("m" if value in ("NaN", "-Infinity") else "a")

    @pytest.mark.parametrize("name", ["received_at", "timeout_s", "payload"])
    def test_a_missing_field_is_named(self, name: str) -> None:
        body = message()
        del body[name]

        with pytest.raises(MalformedRequest, match=name) as raised:
            read(body)
        assert raised.value.request_id == "a"

    @pytest.mark.parametrize("timeout_s", [0, -1, -0.0, -1e308])
    def test_a_time_out_must_be_above_0(self, timeout_s: float) -> None:
        with pytest.raises(MalformedRequest, match="above 0"):
            read(message(timeout_s=timeout_s))

    @pytest.mark.parametrize("payload", [None, [], "x", 1])
    def test_a_payload_must_be_an_object(self, payload: object) -> None:
        with pytest.raises(MalformedRequest, match="payload"):
            read(message(payload=payload))

    @pytest.mark.parametrize("endpoint", ["/v1/x", "/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
    def test_an_endpoint_of_the_list_is_taken(self, endpoint: str) -> None:
        assert read(message(endpoint=endpoint)).endpoint == endpoint

    @pytest.mark.parametrize("endpoint", ["/metrics", "/v1/chat/completions/", "http://x/v1/completions", None, 1, []])
    def test_an_endpoint_outside_the_list_is_refused(self, endpoint: object) -> None:
        """Else a producer could call anything on the model's host."""
        with pytest.raises(MalformedRequest, match=r"/v1/x, /v1/chat/completions"):
            read(message(endpoint=endpoint))

    def test_the_configured_path_is_named_once(self) -> None:
        with pytest.raises(MalformedRequest) as raised:
            read(message(endpoint="/"), infer_path="/v1/completions")
        assert raised.value.reason.count("/v1/completions") == 1

    @pytest.mark.parametrize("metadata", [None, [], "x", {"k": 1}, {"k": None}, {"k": {}}])
    def test_metadata_must_be_a_map_of_strings(self, metadata: object) -> None:
        with pytest.raises(MalformedRequest, match="metadata"):
            read(message(metadata=metadata))

    @pytest.mark.parametrize("tenant", [None, 1, ["t"]])
    def test_a_tenant_must_be_a_string(self, tenant: object) -> None:
        with pytest.raises(MalformedRequest, match="tenant"):
            read(message(tenant=tenant))

    @pytest.mark.parametrize(
        ("payload", "sent"),
        [
            pytest.param(
                b'{"stream": true, "n": 1.0}',
                b'{"stream": true, "n": 1.0,"stream_options":{"include_usage":true}}',
                id="a stream is asked for its usage",
            ),
            pytest.param(
                b'{"stream":true,"stream_options":{"x":1}}',
                b'{"stream":true,"stream_options":{"x":1,"include_usage":true}}',
                id="the other options of a stream stay",
            ),
            pytest.param(
                b'{"stream":true,"stream_options":null}',
                b'{"stream":true,"stream_options":{"include_usage":true}}',
                id="null is no options",
            ),
        ],
    )
    def test_a_stream_is_asked_for_its_usage(self, payload: bytes, sent: bytes) -> None:
        request = read(encode_request(request_id="a", received_at=NOW, timeout_s=60, payload=payload))

        assert request.stream
        assert request.payload == sent

    @pytest.mark.parametrize(
        ("payload", "stream"),
        [
            pytest.param(b'{"stream": true, "stream_options": {"include_usage": false}}', True, id="it says no"),
            pytest.param(b'{"stream": true, "stream_options": {"include_usage": true}}', True, id="it says yes"),
            pytest.param(b'{"stream": true, "stream_options": [1]}', True, id="its options are no object"),
            pytest.param(b'{"stream": false}', False, id="it is no stream"),
            pytest.param(b'{"stream": "true"}', False, id="a string is not true"),
            pytest.param(b'{"stream": 1}', False, id="a number is not true"),
        ],
    )
    def test_a_payload_that_has_its_say_is_left_as_it_came(self, payload: bytes, stream: bool) -> None:
        request = read(encode_request(request_id="a", received_at=NOW, timeout_s=60, payload=payload))

        assert request.stream is stream
        assert request.payload == payload

    @given(st.binary(max_size=200))
    def test_any_bytes_are_a_request_or_malformed(self, body: bytes) -> None:
        """Anything else would be a fault of ours, and send the message round until it is poison."""
        with pytest.raises(MalformedRequest):
            read(body)

    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=10,
    )

    @given(
        st.fixed_dictionaries(
            {"request_id": st.text(max_size=5), "received_at": st.floats(), "timeout_s": st.floats()},
            optional={
                "payload": st.fixed_dictionaries({}, optional={"stream": json_values, "stream_options": json_values}),
                "endpoint": json_values,
                "tenant": json_values,
                "metadata": json_values,
            },
        )
    )
    def test_any_fields_are_a_request_or_malformed(self, fields: dict[str, Any]) -> None:
        try:
            request = read(json.dumps(fields).encode())
        except MalformedRequest as exc:
            assert exc.request_id is None or exc.request_id == fields["request_id"]  # noqa: PT017 - either is right
            return
        assert usable_id(request.request_id)
        assert math.isfinite(request.deadline)
        assert request.deadline <= NOW + CLOCK_SKEW_S + LONGEST_TIMEOUT_S
        assert isinstance(json.loads(request.payload), dict)


class TestUsableId:
    """What can name a request."""

    @given(st.text())
    def test_every_text_of_1_to_512_bytes_without_control_characters(self, text: str) -> None:
        try:
            size_bytes = len(text.encode())
        except UnicodeEncodeError:
            size_bytes = 0
        plain = not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in text)

        assert usable_id(text) is (1 <= size_bytes <= 512 and plain)

    def test_half_a_character_is_none(self) -> None:
        assert not usable_id("a\ud800")


def reply(**changes: Any) -> Reply:
    values: dict[str, Any] = {
        "request_id": "a",
        "status": "completed",
        "status_code": 200,
        "attempt": 1,
        "replica_id": "r",
        "finished_at": 2.5,
    }
    return Reply(**(values | changes))


class TestReply:
    """The JSON that callers read, and what we read of it."""

    def test_a_completed_one_has_the_keys_of_the_source_first(self) -> None:
        body = encode_reply(
            reply(result=b'{ "x" : 1.0 }', received_at=1.5, timings=Timings(queue_s=0.25, model_s=1 / 3, ttft_s=0.0))
        )

        assert body == (
            b'{"status":"completed","status_code":200,"result":{ "x" : 1.0 },"request_id":"a","attempt":1,'
            b'"replica_id":"r","received_at":1.5,"finished_at":2.5,'
            b'"timings":{"queue_s":0.25,"model_s":0.333333,"ttft_s":0.0}}'
        )

    def test_a_failed_one_says_why(self) -> None:
        body = encode_reply(reply(status="failed", status_code=502, error="no", error_code="bad_response"))

        assert body == (
            b'{"status":"failed","status_code":502,"error":"no","request_id":"a","attempt":1,"replica_id":"r",'
            b'"finished_at":2.5,"timings":{},"error_code":"bad_response"}'
        )

    def test_an_empty_answer_is_null(self) -> None:
        assert json.loads(encode_reply(reply()))["result"] is None

    def test_an_error_is_always_a_string(self) -> None:
        assert json.loads(encode_reply(reply(status="failed", error_code="expired")))["error"] == ""

    @pytest.mark.parametrize(
        ("stored", "known"),
        [
            pytest.param(
                encode_reply(reply(result=b"{}")),
                KnownReply(status="completed", status_code=200, attempt=1),
                id="a completed one of ours",
            ),
            pytest.param(
                encode_reply(reply(status="failed", status_code=500, attempt=3, error_code="retries_exhausted")),
                KnownReply(status="failed", status_code=500, attempt=3, error_code="retries_exhausted"),
                id="a failed one of ours",
            ),
            pytest.param(
                b'{"status": "failed", "status_code": 500, "error": "no"}',
                KnownReply(status="failed", status_code=500),
                id="one of an older worker",
            ),
            pytest.param(
                b'{"status":"failed","error_code":"of another version"}',
                KnownReply(status="failed", status_code=0, error_code="of another version"),
                id="one of a newer worker",
            ),
            pytest.param(b'{"status":"odd"}', KnownReply(status="failed", status_code=0), id="one of nobody"),
            pytest.param(
                b'{"status":"completed","status_code":200,"resu',
                KnownReply(status="completed", status_code=0),
                id="a damaged one that was completed",
            ),
            pytest.param(b"\xff", KnownReply(status="failed", status_code=0), id="a damaged one"),
            pytest.param(
                b'{"status":"failed","status_code":' + HUGE.encode() + b"}",
                KnownReply(status="failed", status_code=0),
                id="one with a number that Python will not read",
            ),
        ],
    )
    def test_what_is_known_of_a_stored_one(self, stored: bytes, known: KnownReply) -> None:
        assert known_reply(stored) == known


@pytest.mark.parametrize(
    ("body", "whole"),
    [
        (b'{"a":1}', True),
        (b" [1] \n", True),
        (b"null", True),
        (b'{"a":' + HUGE.encode() + b"}", True),
        (b"", False),
        (b'{"a":', False),
        (b"{} {}", False),
        (b"<html>", False),
        (b'"\xff"', False),
        (b"[" * 100_000, False),
    ],
)
def test_a_whole_json_is_one_complete_text_in_utf_8(body: bytes, whole: bool) -> None:
    assert whole_json(body) is whole


@pytest.mark.parametrize(
    ("result", "usage"),
    [
        pytest.param(
            b'{"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}',
            Usage(input_tokens=3, output_tokens=4, total_tokens=7),
            id="what an answer says",
        ),
        pytest.param(
            b'{"usage":{"prompt_tokens":3,"total_tokens":3}}',
            Usage(input_tokens=3, output_tokens=0, total_tokens=3),
            id="embeddings have no completion",
        ),
        pytest.param(
            b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}',
            Usage(input_tokens=3, output_tokens=4, total_tokens=7),
            id="a missing total is the sum",
        ),
        pytest.param(
            b'{"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":1}}',
            Usage(input_tokens=3, output_tokens=4, total_tokens=7),
            id="a total below the sum is the sum",
        ),
        pytest.param(
            b'{"usage":{"prompt_tokens":3,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}}',
            Usage(input_tokens=3, output_tokens=4, total_tokens=7, cached_input_tokens=2),
            id="what came from the cache",
        ),
        pytest.param(
            b'{"usage":{"prompt_tokens":3,"completion_tokens":-4,"prompt_tokens_details":{"cached_tokens":-2}}}',
            Usage(input_tokens=3, output_tokens=0, total_tokens=3),
            id="less than nothing is nothing",
        ),
        pytest.param(
            b'{"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":null}}}',
            Usage(input_tokens=3, output_tokens=0, total_tokens=3),
            id="a cache that says nothing",
        ),
        pytest.param(b'{"usage":{"prompt_tokens":0,"completion_tokens":0}}', None, id="no tokens are no usage"),
        pytest.param(b'{"usage":null}', None, id="null"),
        pytest.param(b"{}", None, id="nothing said"),
        pytest.param(b"[]", None, id="no object"),
        pytest.param(b'{"usage":{"prompt_tokens":"3"}}', None, id="a string"),
        pytest.param(b'{"usage":{"prompt_tokens":' + HUGE.encode() + b"}}", None, id="a number without an end"),
        pytest.param(b"[" * 100_000, None, id="nesting without an end"),
    ],
)
def test_usage(result: bytes, usage: Usage | None) -> None:
    assert usage_of(result) == usage


@pytest.mark.parametrize(
    ("body", "text"),
    [
        pytest.param(b'{"error":{"message":"m"},"message":"n","detail":"d"}', "m", id="error.message first"),
        pytest.param(b'{"error":{"code":1},"message":"n","detail":"d"}', "n", id="message next"),
        pytest.param(b'{"error":"e","message":"n"}', "e", id="an error that is a text itself"),
        pytest.param(b'{"error":{"message":""},"message":7,"detail":"d"}', "d", id="detail next"),
        pytest.param(b'{"detail":[{"loc":["n"],"msg":"m"}]}', '[{"loc":["n"],"msg":"m"}]', id="a validator's list"),
        pytest.param(b'{"x":1}', '{"x":1}', id="else the body"),
        pytest.param(b"  <html>no</html> ", "<html>no</html>", id="a body that is no JSON"),
        pytest.param(b"x" * 2000, "x" * 1000, id="a thousand characters of it"),
        pytest.param(b"\xff", "\N{REPLACEMENT CHARACTER}", id="a body that is no text"),
        pytest.param(b'["a"]', '["a"]', id="a list"),
        pytest.param(b" ", "Bad Gateway", id="else the reason phrase"),
        pytest.param(b"[" * 2000, "[" * 1000, id="nesting without an end"),
    ],
)
def test_what_a_failed_answer_says_for_itself(body: bytes, text: str) -> None:
    assert error_text(body, "Bad Gateway") == text


def test_a_configuration_error_has_a_line_for_every_problem() -> None:
    exc = ConfigurationError(("A is missing", "B is wrong"))

    assert exc.problems == ("A is missing", "B is wrong")
    assert str(exc) == "A is missing\nB is wrong"


HALF = b'"cut \\ud83d"'
"""Half of an emoji as an escape: legal JSON, which browsers write when they cut a string."""


@pytest.mark.parametrize("half", [HALF, b'"\\uDE00 at the start"', b'"\\ud83d\\ud83d\\ude00"'])
def test_half_a_character_in_a_payload_passes_as_it_came(half: bytes) -> None:
    payload = b'{"messages":[' + half + b'],"n":1}'

    request = decode(
        b'{"request_id":"a","received_at":1,"timeout_s":5,"payload":' + payload + b"}",
        message_id=None,
        infer_path="/v1/chat/completions",
        now=1.0,
    )

    assert request.payload == payload
    assert whole_json(payload)


@pytest.mark.parametrize(("more", "is_read"), [(0, True), (1, False)])
def test_very_many_halves_of_characters_are_no_request(more: int, is_read: bool) -> None:
    """Mending each takes time in which nothing else is done; nobody writes so many but to use that up."""
    text = b'{"text":"' + b"\\ud83d" * (MOST_HALVES + more) + b'"}'

    assert whole_json(text) is is_read


def test_half_a_character_in_a_streamed_payload_passes_as_it_came() -> None:
    payload = b'{"stream":true,"messages":[' + HALF + b"]}"

    request = decode(
        b'{"request_id":"a","received_at":1,"timeout_s":5,"payload":' + payload + b"}",
        message_id=None,
        infer_path="/v1/chat/completions",
        now=1.0,
    )

    assert request.payload == payload[:-1] + b',"stream_options":{"include_usage":true}}'


def test_half_a_character_names_no_request() -> None:
    """Two ids that differ in nothing else would become one."""
    body = b'{"request_id":"a\\ud83d","received_at":1,"timeout_s":5,"payload":{}}'

    with pytest.raises(MalformedRequest) as raised:
        decode(body, message_id="m", infer_path="/v1/chat/completions", now=1.0)
    assert raised.value.request_id == "m"


def test_an_answer_with_half_a_character_is_an_answer() -> None:
    answer = b'{"choices":[{"message":{"content":' + HALF + b'}}],"usage":{"prompt_tokens":1,"completion_tokens":2}}'

    assert whole_json(answer)
    assert usage_of(answer) == Usage(input_tokens=1, output_tokens=2, total_tokens=3)
    assert not whole_json(answer[:-1])
