"""A dead request of llm-d-async as a new submission: what it keeps, and what begins anew."""

import json

import pytest

from inference_worker.dlq import _body, renewed
from inference_worker.llmd_messages import Envelope, PublicRequest, Routing, new_envelope, read_member, write_envelope
from inference_worker.llmd_renewed import allowed_s, envelope_in, renewed_envelope, submitted_at
from inference_worker.messages import LONGEST_TIMEOUT_S

NOW = 2_000_000_000.25
PAYLOAD = b'{ "n": 1.50 }'


def envelope(*, created: int = 1000, deadline: int = 1600, routing: Routing | None = None) -> Envelope:
    request = PublicRequest(id="r", created=created, deadline=deadline, payload=PAYLOAD, metadata={"a": "b"})
    return new_envelope(request, routing or Routing(request_token="old"))


def again(one: Envelope) -> Envelope:
    read = read_member(renewed_envelope(one, NOW, "new"))
    assert isinstance(read, Envelope)
    return read


def test_it_has_as_much_time_as_it_had_and_a_generation_of_its_own() -> None:
    once_more = again(envelope(routing=Routing(request_token="old", retry_count=7)))

    assert once_more.request.deadline == 2_000_000_601
    assert (once_more.routing.request_token, once_more.routing.retry_count) == ("new", 0)
    assert once_more.routing.enqueued_at_ms == 2_000_000_000_250
    assert once_more.request.payload == PAYLOAD
    assert once_more.request.metadata == {"a": "b"}


def test_its_result_goes_where_it_was_to_go_and_what_a_gate_said_is_forgotten() -> None:
    routing = Routing(
        request_token="old",
        result_queue_name="mine",
        result_routing_resolved=True,
        labels={"tier": "batch", "classification": "reserved"},
    )

    once_more = again(envelope(routing=routing)).routing

    assert (once_more.result_queue_name, once_more.result_routing_resolved) == ("mine", True)
    assert once_more.labels == {"tier": "batch"}


@pytest.mark.parametrize(
    ("of", "seconds"),
    [
        pytest.param(envelope(), 600, id="since it was created"),
        pytest.param(
            envelope(routing=Routing(enqueued_at_ms=1_500_000)), 100, id="since it was submitted, where it says"
        ),
        pytest.param(envelope(created=0), 3600, id="an hour where nobody knows"),
        pytest.param(envelope(deadline=1010), 60, id="a minute at least"),
        pytest.param(envelope(deadline=10**10), LONGEST_TIMEOUT_S, id="not for ever"),
    ],
)
def test_how_long_it_has(of: Envelope, seconds: float) -> None:
    assert allowed_s(of) == seconds


def test_when_it_was_submitted() -> None:
    assert submitted_at(envelope()) == 1000
    assert submitted_at(envelope(created=0)) is None


@pytest.mark.parametrize("member", [b"{", b'{"request_id": "r"}', b'{"internal":{},"request_kind":"odd","data":{}}'])
def test_what_is_no_envelope_is_none(member: bytes) -> None:
    assert envelope_in(member) is None


def test_dead_letters_of_both_formats_are_read_and_renewed() -> None:
    theirs, ours = write_envelope(envelope()), b'{"request_id":"r","received_at":1.0,"timeout_s":60,"payload":{}}'

    assert (_body(theirs).request_id, _body(theirs).stored_as, _body(theirs).timeout_s) == ("r", "r\0old", 600)
    assert (_body(ours).request_id, _body(ours).stored_as, _body(ours).timeout_s) == ("r", None, 60)
    first, second = renewed(theirs, NOW), renewed(theirs, NOW)
    assert first is not None
    assert json.loads(first)["data"]["deadline"] == 2_000_000_601
    assert first != second, "each replay is a submission of its own"
    assert json.loads(renewed(ours, NOW) or b"{}")["received_at"] == NOW
