"""Results of llm-d-async, for every way in which a request may end. Names end in the number of the peer's case."""

import json
from typing import get_args

import pytest

from inference_worker.llmd_messages import PublicRequest, Routing, new_envelope
from inference_worker.llmd_results import (
    CODES,
    GateAnswer,
    HttpAnswer,
    NoAnswer,
    ResultCode,
    ResultMessage,
    outcome_of,
    read_result,
    result_for,
    result_json,
)
from inference_worker.messages import ERROR_CODES, ErrorCode, Reply

ENVELOPE = new_envelope(PublicRequest(id="a", deadline=5, metadata={"k": "v"}), Routing(request_token="t"))


def reply(
    status_code: int, error_code: ErrorCode | None = None, *, result: bytes | None = None, answer: bytes | None = None
) -> Reply:
    return Reply(
        request_id="a",
        status="completed" if error_code is None else "failed",
        status_code=status_code,
        attempt=0,
        replica_id="r",
        finished_at=1.0,
        result=result,
        error=None if error_code is None else "no",
        error_code=error_code,
        answer=answer,
    )


def test_an_answer_has_its_status_and_its_raw_body_and_no_error_code_case_16() -> None:
    assert json.loads(result_for(ENVELOPE, reply(200, result=b'{"a": 1.0}'))) == {
        "id": "a",
        "status_code": 200,
        "payload": '{"a": 1.0}',
        "request_token": "t",
    }


@pytest.mark.parametrize("status_code", [201, 202, 204, 299])
def test_the_real_status_of_a_success_is_kept_case_17(status_code: int) -> None:
    assert json.loads(result_json("a", outcome_of(reply(status_code))))["status_code"] == status_code


@pytest.mark.parametrize("status_code", [302, 400, 404, 429, 500, 503])
def test_a_final_failure_keeps_its_status_and_body_and_has_no_error_code_case_18(status_code: int) -> None:
    body = json.loads(result_for(ENVELOPE, reply(status_code, "model_error", answer=b"<p>no</p>")))

    assert (body["status_code"], body["payload"], "error_code" in body) == (status_code, "<p>no</p>", False)


def test_a_failure_whose_body_was_not_kept_has_its_status_all_the_same() -> None:
    body = json.loads(result_for(ENVELOPE, reply(404, "model_error")))

    assert (body["status_code"], body["payload"], "error_code" in body) == (404, '{"error":"no"}', False)


def test_a_deadline_after_a_429_gives_the_429_case_253() -> None:
    body = json.loads(result_for(ENVELOPE, reply(429, "deadline_exceeded", answer=b"busy")))

    assert (body["status_code"], body["payload"], "error_code" in body) == (429, "busy", False)


def test_what_a_gate_drops_without_an_answer_is_gate_dropped_case_20() -> None:
    assert json.loads(result_json("a", NoAnswer(code="GATE_DROPPED", text="closed"))) == {
        "id": "a",
        "payload": '{"error":"closed"}',
        "error_code": "GATE_DROPPED",
        "error_message": "closed",
    }


def test_a_gates_429_can_be_told_by_its_status_and_by_its_code() -> None:
    """Theirs has it in the text alone, so that a reader cannot classify it."""
    body = json.loads(result_for(ENVELOPE, reply(429, "gate_dropped")))

    assert (body["status_code"], body["error_code"]) == (429, "GATE_DROPPED")


def test_a_text_that_cannot_be_written_still_gives_a_result_case_21() -> None:
    body = json.loads(result_json("a\ud800", NoAnswer(code="INFERENCE_ERROR", text="half \ud83d"), token="\udc00"))

    assert body["id"].startswith("a\ufffd")
    assert body["error_code"] == "INFERENCE_ERROR"
    assert "half" in body["error_message"]


def test_a_body_that_is_no_utf_8_is_mended_and_not_lost() -> None:
    assert json.loads(result_json("a", HttpAnswer(status_code=200, body=b"\xff{}")))["payload"] == "\ufffd{}"


@pytest.mark.parametrize("code", ERROR_CODES)
def test_each_of_our_error_codes_has_one_there(code: ErrorCode) -> None:
    match outcome_of(reply(0 if code == "gate_dropped" else 500, code)):
        case NoAnswer(code=theirs):
            assert theirs == CODES[code]
        case HttpAnswer(status_code=status_code):
            assert (code, status_code) == ("model_error", 500)
        case GateAnswer():
            pytest.fail("no gate gave a status")


def test_all_codes_of_theirs_can_come_of_ours() -> None:
    assert set(CODES.values()) == set(get_args(ResultCode))


@pytest.mark.parametrize(
    "outcome",
    [
        HttpAnswer(status_code=503, body=b"{}"),
        NoAnswer(code="CANCELLED", text="cancelled"),
        GateAnswer(status_code=429, code="GATE_DROPPED", text="full"),
    ],
)
def test_what_is_written_is_read(outcome: HttpAnswer | NoAnswer | GateAnswer) -> None:
    text = result_json("a", outcome, token="t")

    seen = read_result(text)

    assert {name: value for name in json.loads(text) if (value := getattr(seen, name))} == json.loads(text)


def test_an_old_result_is_read_without_what_it_does_not_have() -> None:
    assert read_result(b'{"id":"old","payload":"done"}') == ResultMessage(id="old", payload="done")


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"payload":"x"}', b'{"id":""}', b'{"id":7}', b"\xff", b"[" * 99_999]
)
def test_what_is_no_result_is_an_error_and_no_crash_case_104(text: bytes) -> None:
    with pytest.raises(ValueError, match="result"):
        read_result(text)
