"""The tests' own Pub/Sub service keeps what the published protocol says of leases and ids."""

import asyncio

from tests.pubsub_state import Message, Subscription, Topic


def subscription(*, exactly_once: bool = True, dead: Topic | None = None, most: int = 0) -> Subscription:
    return Subscription(
        None,
        clock=lambda: asyncio.get_running_loop().time(),
        deadline_s=10.0,
        exactly_once=exactly_once,
        dead_letters=dead,
        most_deliveries=most,
    )


def message(name: str) -> Message:
    return Message(id=name, data=b"x", attributes={})


async def test_what_is_not_acknowledged_in_time_is_handed_out_again_under_another_id() -> None:
    made = subscription()
    made.add(message("a"))
    (first,) = await made.pull(5, within_s=1)
    assert await made.pull(5, within_s=9) == []

    (again,) = await made.pull(5, within_s=5)

    assert again.message == first.message
    assert made.acknowledge([first.ack_id]) == [first.ack_id]
    assert made.acknowledge([again.ack_id]) == []
    assert await made.pull(5, within_s=60) == []


async def test_without_exactly_once_delivery_a_late_acknowledgement_counts_and_none_is_refused() -> None:
    made = subscription(exactly_once=False)
    made.add(message("a"))
    (first,) = await made.pull(1, within_s=1)
    assert made.modify([first.ack_id], 0) == ()

    assert made.acknowledge([first.ack_id, "nobody's"]) == ()

    assert await made.pull(1, within_s=60) == []


async def test_a_deadline_that_is_moved_holds_from_then_on() -> None:
    made = subscription()
    made.add(message("a"))
    (first,) = await made.pull(1, within_s=1)
    assert made.modify([first.ack_id], 30) == []
    assert await made.pull(1, within_s=29) == []

    assert len(await made.pull(1, within_s=2)) == 1


async def test_what_is_given_back_is_there_at_once_for_who_waits() -> None:
    made = subscription()
    made.add(message("a"))
    (first,) = await made.pull(1, within_s=1)
    waiting = asyncio.create_task(made.pull(1, within_s=5))
    await asyncio.sleep(1)

    made.modify([first.ack_id], 0)

    begun = asyncio.get_running_loop().time()
    assert len(await waiting) == 1
    assert asyncio.get_running_loop().time() == begun


async def test_beyond_its_most_deliveries_a_message_goes_to_the_dead_letters() -> None:
    dead, parked = Topic("dead"), subscription()
    dead.subscriptions.append(parked)
    made = subscription(dead=dead, most=5)
    made.add(message("a"))
    for attempt in range(1, 6):
        (one,) = await made.pull(1, within_s=1)
        assert one.attempt == attempt
        made.modify([one.ack_id], 0)

    assert await made.pull(1, within_s=1) == []
    (letter,) = await parked.pull(1, within_s=1)
    assert letter.message.attributes == {"CloudPubSubDeadLetterSourceDeliveryCount": "5"}
