"""What a line of `submit` may be, and how it is answered."""

import io
import json
from typing import Any

import pytest

from inference_worker.client import Result
from inference_worker.errors import ConfigurationError
from inference_worker.messages import ENDPOINTS, Timings
from inference_worker.submit_lines import BadLine, Checked, Line, check, output_line, read_line, read_lines
from inference_worker.submit_state import opened_input

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def line_of(value: object) -> Line:
    return read_line(json.dumps(value).encode() + b"\n", 0, ENDPOINTS)


def checked(text: str, *, tenants: bool = True, priorities: bool = True) -> Checked:
    looking = check(io.BytesIO(text.encode()), ENDPOINTS, tenants=tenants, priorities=priorities)
    while True:
        try:
            next(looking)
        except StopIteration as over:
            found: Checked = over.value
            return found


def result(**changes: Any) -> Result:
    given: dict[str, Any] = {"request_id": "r", "status": "completed", "status_code": 200, "result": b'{"a":1}'}
    return Result(**(given | changes))


def test_a_payload_is_taken_as_the_bytes_that_came() -> None:
    raw = b'{"messages": [ {"role":"user","content":"\xc3\xa4"} ],   "n": 1}'

    assert read_line(raw + b"\r\n", 0, ENDPOINTS).payload == raw


def test_an_object_around_the_payload_says_more_about_the_request() -> None:
    line = line_of(
        {
            "payload": CHAT,
            "request_id": "mine",
            "timeout_s": 5,
            "endpoint": "/v1/completions",
            "metadata": {"a": "b"},
            "tenant": "t",
            "priority": 7,
        }
    )

    assert (line.request_id, line.timeout_s, line.endpoint) == ("mine", 5.0, "/v1/completions")
    assert (line.metadata, line.tenant, line.priority, json.loads(line.payload)) == ({"a": "b"}, "t", 7, CHAT)


def test_a_batch_line_names_its_endpoint_by_its_url() -> None:
    line = line_of({"custom_id": "c", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}})

    assert (line.custom_id, line.endpoint, json.loads(line.payload)) == ("c", "/v1/embeddings", {"input": "x"})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1], "is not a request"),
        ("text", "is not a request"),
        ({"payload": 1}, "payload: must be a JSON object"),
        ({"payload": CHAT, "request_id": ""}, "request_id: must be 1 to 512 bytes"),
        ({"payload": CHAT, "timeout_s": 0}, "timeout_s: must be a finite number of seconds above 0"),
        ({"payload": CHAT, "timeout_s": True}, "timeout_s: must be a finite number"),
        ({"payload": CHAT, "endpoint": "/v1/other"}, "endpoint: must be one of /v1/chat/completions"),
        ({"payload": CHAT, "metadata": {"a": 1}}, "metadata: must be an object whose values are strings"),
        ({"payload": CHAT, "tenant": None}, "tenant: must be a string"),
        ({"payload": CHAT, "timeout": 3}, "timeout: is not known; accepted are payload, request_id"),
        ({"custom_id": "", "method": "POST", "url": "/v1/embeddings", "body": {}}, "custom_id: must be a string"),
        ({"custom_id": "c", "method": "GET", "url": "/v1/embeddings", "body": {}}, "method: must be POST"),
        ({"custom_id": "c", "method": "POST", "url": "/v1/files", "body": {}}, "url: must be one of"),
        ({"custom_id": "c", "method": "POST", "url": "/v1/embeddings"}, "body: is missing"),
        ({"custom_id": "c", "method": "POST", "url": "/v1/embeddings", "body": 1}, "body: must be a JSON object"),
    ],
)
def test_a_bad_line_is_told_what_is_wrong_and_what_is_accepted(value: object, said: str) -> None:
    with pytest.raises(BadLine) as bad:
        line_of(value)

    assert said in str(bad.value)


def test_every_problem_of_a_line_is_named_at_once() -> None:
    with pytest.raises(BadLine) as bad:
        line_of({"payload": 1, "timeout_s": -1, "tenant": 5, "priority": 256})

    assert len(bad.value.problems) == 4


@pytest.mark.parametrize("priority", [-1, 256, 1.5, "5", True, None])
def test_a_priority_is_one_of_amqps(priority: object) -> None:
    with pytest.raises(BadLine, match="priority: must be a whole number from 0 to 255"):
        line_of({"payload": CHAT, "priority": priority})


def test_a_priority_cannot_be_given_where_there_are_none() -> None:
    text = json.dumps({"payload": CHAT, "priority": 0})

    assert checked(text).problems == []
    assert checked(text, priorities=False).problems == ["line 1: priority: only RabbitMQ has any; leave it out"]


def test_all_bad_lines_are_reported_by_their_numbers_in_the_file_and_empty_ones_are_not() -> None:
    found = checked(f'\n{json.dumps(CHAT)}\nno json\n\n{{"payload": 3}}\n')

    assert found.lines == 3
    assert [problem.split(":")[0] for problem in found.problems] == ["line 3", "line 5"]


def test_an_id_that_stands_on_two_lines_is_refused_since_two_requests_under_one_id_are_one() -> None:
    line = json.dumps({"payload": CHAT, "request_id": "same"})

    assert checked(f"{line}\n{line}\n").problems == [
        "line 2: request_id: the same as on line 1; each request has one of its own"
    ]


def test_a_tenant_cannot_be_named_over_http() -> None:
    assert "API key" in checked(json.dumps({"payload": CHAT, "tenant": "t"}), tenants=False).problems[0]


def test_a_line_of_any_length_is_not_read_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_worker.submit_lines.MOST_LINE_BYTES", 100)
    found = checked('{"a": "' + "x" * 1000 + '"}\n' + json.dumps(CHAT))

    assert found.lines == 2
    assert found.problems == ["line 1: is longer than 100 bytes"]


def test_lines_are_read_again_from_where_a_run_was_stopped() -> None:
    source = io.BytesIO(b'{"n":0}\n\n{"n":1}\n{"n":2}')

    assert [(line.index, line.payload) for line in read_lines(source, ENDPOINTS, after=1)] == [
        (1, b'{"n":1}'),
        (2, b'{"n":2}'),
    ]


def test_a_result_is_one_line_whatever_the_model_wrote() -> None:
    written = output_line(Line(index=0, payload=b""), result(result=b'{\n "text": "a\\nb"\r\n}'))

    assert written.count(b"\n") == 1
    assert json.loads(written)["result"] == {"text": "a\nb"}


def test_a_completed_result_has_the_keys_of_a_stored_one_with_its_id_first() -> None:
    written = json.loads(
        output_line(Line(index=0, payload=b""), result(replica_id="x", finished_at=2.0, timings=Timings(model_s=1.0)))
    )

    assert list(written) == [
        *("request_id", "status", "status_code", "result", "attempt", "replica_id", "finished_at", "timings")
    ]
    assert written["timings"] == {"model_s": 1.0}


def test_a_batch_line_is_answered_in_openai_s_shape() -> None:
    line = Line(index=0, payload=b"", custom_id="c")

    done = json.loads(output_line(line, result()))
    refused = json.loads(
        output_line(line, result(status="failed", status_code=429, error="busy", error_code="model_error"))
    )
    late = json.loads(output_line(line, result(status="failed", status_code=408, error="late", error_code="expired")))

    assert done == {
        "id": "batch_req_r",
        "custom_id": "c",
        "response": {"status_code": 200, "request_id": "r", "body": {"a": 1}},
        "error": None,
    }
    assert refused["response"]["status_code"] == 429
    assert refused["response"]["body"]["error"]["message"] == "busy"
    assert (late["response"], late["error"]) == (None, {"code": "expired", "message": "late"})


def test_a_device_is_no_input() -> None:
    """The one line of /dev/zero never ends: not even a signal ended the command."""
    with pytest.raises(ConfigurationError, match="by stdin"), opened_input("/dev/zero"):
        pass
