"""What a page of the management API says of a queue; recorded from RabbitMQ 3.10.8 and 4.0.5."""

import json

import pytest

from inference_worker.errors import TransportLost
from inference_worker.rmq_backlog import _NotManaged, _Seen, read_page

QUEUE = "infer_req.a/b:c.d"
OF_3_10 = {
    "arguments": {"x-queue-type": "quorum"},
    "auto_delete": False,
    "durable": True,
    "exclusive": None,
    "leader": "rabbit@localhost",
    "members": ["rabbit@localhost"],
    "messages": 5,
    "messages_ready": 3,
    "messages_unacknowledged": 2,
    "name": QUEUE,
    "online": ["rabbit@localhost"],
    "state": "running",
    "type": "quorum",
    "vhost": "/",
}
OF_4_0 = OF_3_10 | {"exclusive": False, "internal": False, "node": "rabbit@localhost"}
DELAYED = {"name": f"{QUEUE}.delay.5000", "messages": 3, "messages_unacknowledged": 0, "state": "running"}


def page(*items: object) -> bytes:
    return json.dumps({"filtered_count": len(items), "items": items, "page": 1, "page_count": 1}).encode()


@pytest.mark.parametrize("queue", [OF_3_10, OF_4_0], ids=["3.10", "4.0"])
def test_what_workers_hold_and_what_comes_back_later_is_read(queue: dict[str, object]) -> None:
    assert read_page(page(DELAYED, queue, DELAYED), QUEUE) == _Seen(in_flight=2, delayed=6)


@pytest.mark.parametrize("state", ["minority", "down", "stopped", "crashed"])
def test_a_queue_that_nobody_can_be_asked_about_is_not_seen(state: str) -> None:
    """AMQP counts a quorum queue without a leader as empty."""
    with pytest.raises(TransportLost, match=state):
        read_page(page(OF_4_0 | {"state": state}), QUEUE)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(page(), id="it knows no such queue"),
        pytest.param(page({"name": QUEUE}), id="it knows no counts yet"),
        pytest.param(page(OF_4_0 | {"name": "other"}), id="another queue's"),
        pytest.param(b"<html>", id="not JSON"),
        pytest.param(b'{"items": 5}', id="no page"),
        pytest.param(b"\xff", id="not UTF-8"),
        pytest.param(b'{"x": ' + b"[" * 100_000, id="too deep"),
    ],
)
def test_a_page_that_does_not_say_leaves_it_to_amqp(body: bytes) -> None:
    with pytest.raises(_NotManaged):
        read_page(body, QUEUE)
