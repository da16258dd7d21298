"""Rows of a queue in Postgres as values: what is put there, and what is made of what lies there."""

import json
import time
from typing import Any

import pytest

from inference_worker.llmd_messages import PublicRequest, Routing, new_envelope, write_envelope
from inference_worker.transports.sql_members import SqlQueue, claims_of, headers_as_stored, placed, read_claim, whole

PAYLOAD = b'{ "n": 1.50, "text":"\xc3\xbc" }'
QUEUE = SqlQueue(name="q", default_results="results", labels={"tier": "batch"})


def envelope(**routing: Any) -> bytes:
    request = PublicRequest(id="a", deadline=2_000_000_000, payload=PAYLOAD)
    return write_envelope(new_envelope(request, Routing(**({"request_token": "t"} | routing))))


def row(body: bytes, payload: bytes | None, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "seq": 1,
        "attempt": 2,
        "body": body,
        "payload": payload,
        "deadline": 5.0,
        "cancelled": False,
        "attempts": 0,
        "deliveries": 1,
        "lapses": 0,
        "message_id": None,
        "headers": None,
        "request_id": "a",
        "token": "t",
    }
    return values | changes


def test_an_envelope_is_put_there_without_its_payload_and_is_whole_again_byte_for_byte() -> None:
    lying = placed(envelope(), time.time())

    assert (lying.request_id, lying.token, lying.deadline, lying.payload) == ("a", "t", 2e9, PAYLOAD)
    assert PAYLOAD not in lying.body
    assert PAYLOAD in whole(lying.body, lying.payload)
    assert json.loads(whole(lying.body, lying.payload)) == json.loads(envelope())


def test_an_envelope_without_a_token_has_one_for_its_row_alone() -> None:
    first, second = (placed(envelope(request_token=""), time.time()) for _ in range(2))
    assert first.token != second.token
    (claim,) = claims_of([row(first.body, first.payload, token=first.token)])
    read, why = read_claim(claim, QUEUE)

    assert not why
    assert (read.request_id, read.token, read.generation) == ("a", "", "a")


def test_our_own_format_stays_as_it_is_and_is_nobodys_by_its_row() -> None:
    body = b'{"request_id":"own","received_at":1,"timeout_s":60,"payload":{}}'
    lying = placed(body, 10.0)
    (claim,) = claims_of([row(body, None, request_id="", token=lying.token, headers=headers_as_stored({"x": 1}))])
    read, why = read_claim(claim, QUEUE)

    assert (lying.body, lying.payload, lying.request_id) == (body, None, "")
    assert (why, read.request_id, read.route, read.copy(3)) == ("", "", "", None)
    assert read.headers == {"x": "1"}
    assert whole(body, None) == body


def test_what_is_no_request_is_answered_under_its_rows_id_where_that_has_one() -> None:
    (known,) = claims_of([row(b"rubbish", b"null")])
    (unknown,) = claims_of([row(b"rubbish", None, request_id="", token="r")])

    read, why = read_claim(known, QUEUE)
    assert why
    assert (read.request_id, read.route) == ("a", "results")
    assert read_claim(unknown, QUEUE)[0].route == ""
    assert whole(b"rubbish", b"null") == b"rubbish"


def test_a_copy_counts_the_attempt_and_leaves_the_payload_where_it_lies() -> None:
    lying = placed(envelope(), time.time())
    (claim,) = claims_of([row(lying.body, lying.payload)])
    read, _ = read_claim(claim, QUEUE)
    copy = read.copy(4)

    assert copy is not None
    assert json.loads(copy)["internal"]["retry_count"] == 4
    assert json.loads(copy)["data"]["payload"] is None
    assert read.envelope is not None
    assert read.envelope.request.payload == PAYLOAD
    assert read.size_bytes == len(lying.body) + len(PAYLOAD)


def test_rows_are_handed_up_in_the_order_of_their_deadlines() -> None:
    """Postgres gives the rows of an update in any order."""
    rows = [row(b"", None, seq=seq, deadline=deadline) for seq, deadline in ((3, 2.0), (2, 1.0), (1, 2.0))]

    assert [claim.seq for claim in claims_of(rows)] == [2, 1, 3]


@pytest.mark.parametrize(
    ("routing", "why"),
    [
        pytest.param({"result_queue_name": "a\0b"}, "result_queue_name", id="a route with a NUL"),
        pytest.param({"result_queue_name": "r" * 513}, "result_queue_name", id="a route too long for an index"),
        pytest.param({"request_token": "a\0b"}, "request_token", id="a token with a NUL"),
        pytest.param({"request_token": "t" * 513}, "request_token", id="a token too long for an index"),
    ],
)
def test_names_that_no_table_takes_make_it_no_request_and_are_answered_where_the_queue_says(
    routing: dict[str, str], why: str
) -> None:
    """Else the end of the request would be refused again and again, as if Postgres did not answer."""
    lying = placed(envelope(**routing), time.time())
    (claim,) = claims_of([row(lying.body, lying.payload, token=lying.token)])
    read, said = read_claim(claim, QUEUE)

    assert said.startswith(f"{why} must be 1 to 512 bytes")
    assert "\0" not in lying.token
    assert (read.request_id, read.token, read.route) == ("a", "", "results")


@pytest.mark.parametrize("stored", [b"\xff{", b"[]", b"{", b""])
def test_headers_that_cannot_be_read_are_none(stored: bytes) -> None:
    (claim,) = claims_of([row(b"{}", None, headers=stored)])

    assert claim.headers == {}
