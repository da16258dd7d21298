"""Members as values: what is read, what is written back, and what is said of a result."""

import json

import msgspec
import pytest

from inference_worker.llmd_messages import Envelope, PublicRequest, Routing, new_envelope, read_member, write_envelope
from inference_worker.messages import Reply, encode_reply, known_reply
from inference_worker.transports.sorted_set_members import (
    SortedSetQueue,
    Taken,
    letter_fields,
    own_score,
    read_taken,
    sent,
    stored_reply,
    taken_of,
)
from inference_worker.transports.sorted_set_scripts import PUSHED

QUEUE = SortedSetQueue(name="q", labels={"tier": "batch"})
NUL = "\0"


def envelope(**routing: object) -> bytes:
    request = PublicRequest(id="r", created=1, deadline=100, payload=b'{"b":1, "a":2.50}')
    return write_envelope(new_envelope(request, Routing(**({"request_token": "t"} | routing))))  # type: ignore[arg-type]  # Test data by name.


def taken(member: bytes, **changes: object) -> Taken:
    values: dict[str, object] = {
        "claim_id": b"r\0t",
        "number": 7,
        "member": member,
        "score": b"100",
        "token": "t",
        "cancelled": False,
        "attempts": 0,
        "deliveries": 1,
        "lapses": 0,
        "message_id": None,
        "headers": {},
    }
    return Taken(**(values | changes))  # type: ignore[arg-type]  # Test data by name.


def reply(**changes: object) -> Reply:
    values: dict[str, object] = {
        "request_id": f"r{NUL}t",
        "status": "completed",
        "status_code": 200,
        "attempt": 1,
        "replica_id": "x",
        "finished_at": 5.0,
        "result": b'{"text":"long"}',
    }
    return Reply(**(values | changes))  # type: ignore[arg-type]  # Test data by name.


def test_a_copy_counts_its_attempts_in_the_envelope_and_keeps_the_request_byte_for_byte() -> None:
    claim, why = read_taken(taken(envelope(retry_count=1, enqueued_at_ms=12)), QUEUE)
    copy = read_member(claim.copy(2))

    assert why == ""
    assert isinstance(copy, Envelope)
    assert copy.routing.retry_count == 2
    assert copy.routing.enqueued_at_ms == 12
    assert copy.routing.labels == {"tier": "batch"}
    assert b'{"b":1, "a":2.50}' in copy.data
    assert claim.attempts == 1


def test_a_copy_in_our_own_format_is_the_member_itself() -> None:
    body = b'{"request_id":"a","received_at":1,"timeout_s":2,"payload":{} }'
    claim, why = read_taken(taken(body, token="", attempts=4), QUEUE)

    assert (why, claim.copy(5), claim.attempts, claim.result_list, claim.cancel_key) == ("", body, 4, "", "")


@pytest.mark.parametrize(
    ("queue", "asked", "goes_to"),
    [
        pytest.param("", "", "result-list", id="by default to the common one"),
        pytest.param("", "mine", "mine", id="the message may choose"),
        pytest.param("theirs", "mine", "theirs", id="the queue goes before"),
    ],
)
def test_a_result_has_one_route_case_78(queue: str, asked: str, goes_to: str) -> None:
    claim, _ = read_taken(taken(envelope(result_queue_name=asked)), SortedSetQueue(results=queue))

    assert claim.result_list == goes_to


@pytest.mark.parametrize("asked", ["q", "other", "retry-sortedset", "q:claimed", "other:claims-idx", "q:dead"])
def test_a_message_that_asks_for_its_result_in_a_key_of_a_queue_is_refused_where_results_lie(asked: str) -> None:
    """Once the queue is empty a list would be made there, and the queue be none any more."""
    queue = SortedSetQueue(name="q", queues=frozenset({"q", "other"}))

    claim, why = read_taken(taken(envelope(result_queue_name=asked)), queue)

    assert why.startswith(f"result_queue_name is {asked}, which is a key of a queue")
    assert claim.result_list == "result-list"


def test_names_that_only_look_like_keys_of_a_queue_are_lists_as_any() -> None:
    queue = SortedSetQueue(name="q", queues=frozenset({"q", "other"}))

    for asked in ("q:mine", "third:claimed", "claimed", "others"):
        claim, why = read_taken(taken(envelope(result_queue_name=asked)), queue)
        assert (claim.result_list, why) == (asked, "")


def test_what_is_on_its_way_keeps_its_route_whatever_the_configuration_becomes() -> None:
    first, _ = read_taken(taken(envelope()), SortedSetQueue(results="old", result_ttl_s=5))
    again, _ = read_taken(taken(first.copy(1)), SortedSetQueue(results="new", result_ttl_s=9))

    assert (again.result_list, again.result_ttl_s) == ("old", 5)


def test_what_cannot_be_read_is_answered_where_it_has_an_id() -> None:
    with_id, why = read_taken(taken(b'{"internal":{},"request_kind":"odd","data":{"id":"r","deadline":1}}'), QUEUE)
    without, why_not = read_taken(taken(b"garbage", token=""), QUEUE)
    said = json.loads(with_id.message(reply(status="failed", error="no such kind", error_code="invalid_request")))

    assert "request_kind" in why
    assert (said["id"], said["error_code"], said["request_token"]) == ("r", "INVALID_REQUEST", "t")
    assert why_not
    assert without.result_list == ""


def test_a_stored_result_that_was_sent_says_so_without_its_body() -> None:
    marker = sent(reply())

    assert marker.endswith(PUSHED)
    assert marker.startswith(b'{"status":"completed"')
    assert b"long" not in marker
    assert json.loads(marker)["pushed"] is True
    assert known_reply(marker).status == "completed"


def test_a_stored_reply_is_read_back_for_the_list_it_is_owed_to() -> None:
    claim, _ = read_taken(taken(envelope()), QUEUE)
    done = stored_reply(claim.generation, encode_reply(reply()))
    cancelled = reply(status="failed", status_code=499, result=None, error="gone", error_code="cancelled")
    told = json.loads(claim.message(stored_reply(claim.generation, encode_reply(cancelled))))

    assert json.loads(claim.message(done)) == {
        "id": "r",
        "status_code": 200,
        "payload": '{"text":"long"}',
        "request_token": "t",
    }
    assert (told["error_code"], told["error_message"]) == ("CANCELLED", "gone")


@pytest.mark.parametrize("stored", [b"", b"null", b"\xff", b'{"status":1}', b"[" * 5000])
def test_a_damaged_stored_reply_is_a_failure_and_no_crash(stored: bytes) -> None:
    assert stored_reply("r", stored).status == "failed"


@pytest.mark.parametrize(
    ("body", "score"),
    [
        pytest.param(b'{"received_at":1000.25,"timeout_s":60}', 1060.25, id="its deadline"),
        pytest.param(b'{"received_at":9e9,"timeout_s":60}', 1120.0, id="a clock ahead of ours"),
        pytest.param(b'{"received_at":1000,"timeout_s":1e12}', 1000 + 30 * 86_400, id="the longest time-out"),
        pytest.param(b"garbage", 1000.0, id="no request"),
        pytest.param(b'{"received_at":1000,"timeout_s":0}', 1000.0, id="no time"),
        pytest.param(b'{"received_at":1000,"timeout_s":null}', 1000.0, id="null"),
    ],
)
def test_a_message_of_ours_stands_at_its_deadline(body: bytes, score: float) -> None:
    assert own_score(body, 1000.0) == score


def test_the_rows_of_the_script_are_read() -> None:
    row = [b"c\xff", 3, b"m", b"1.5", b"t", 1, 2, 4, 5, b"", [b"traceparent", b"00"]]
    (one,) = taken_of([row])

    assert (one.claim_id, one.number, one.cancelled, one.attempts, one.lapses) == (b"c\xff", 3, True, 2, 5)
    assert one.headers == {"traceparent": "00"}
    assert one.message_id is None
    assert one.entry_id.encode(errors="surrogateescape") == b"c\xff"


def test_a_dead_letter_has_the_member_as_it_came_and_what_lay_beside_it() -> None:
    claim, _ = read_taken(taken(envelope()), QUEUE)
    fields = letter_fields(claim, None, {"request": "forged", "x": "1"}, {"reason": "poison"})
    named = dict(zip(fields[::2], fields[1::2], strict=True))

    assert named == {
        "job_id": "r",
        "attempt": "0",
        "request": claim.taken.member,
        "x": "1",
        "reason": "poison",
    }


def test_only_a_payload_key_is_deleted_with_a_result() -> None:
    odd, _ = read_taken(taken(envelope(payload_ref="infer_resp:other")), QUEUE)
    fine, _ = read_taken(taken(envelope(payload_ref="request-payload:r:t")), QUEUE)

    for claim in (odd, fine):
        assert claim.keys("outbox")[-1] == "request-payload:r:t"
    assert msgspec.json.decode(odd.taken.member)["internal"]["payload_ref"] == "infer_resp:other"
