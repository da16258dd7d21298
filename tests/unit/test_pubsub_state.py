"""The tests' own Pub/Sub service keeps what the published protocol says of leases, ids, rests and order."""

import asyncio

from tests.pubsub_state import Message, Subscription, Terms, Topic

NAME = "projects/p/subscriptions/s"


def subscription(**terms: object) -> Subscription:
    return Subscription(Terms(**{"name": NAME, "exactly_once": True, **terms}))  # type: ignore[arg-type]  # By name.


def message(name: str, key: str = "") -> Message:
    return Message(id=name, data=b"x", ordering_key=key)


async def names(made: Subscription, most: int = 10, within_s: float = 0.0) -> list[str]:
    return [one.message.id for one in await made.pull(most, within_s=within_s)]


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


async def test_after_its_last_delivery_a_message_goes_to_the_dead_letters_and_says_whose_it_was() -> None:
    dead, parked = Topic("dead"), subscription()
    dead.subscriptions.append(parked)
    made = subscription(dead_letters=dead, most_deliveries=5)
    made.add(message("a"))
    for attempt in range(1, 6):
        (one,) = await made.pull(1, within_s=1)
        assert one.attempt == attempt
        made.modify([one.ack_id], 0)

    assert await made.pull(1, within_s=1) == []
    (letter,) = await parked.pull(1, within_s=1)
    assert letter.message.id != "a"
    assert letter.message.attributes == {
        "CloudPubSubDeadLetterSourceDeliveryCount": "5",
        "CloudPubSubDeadLetterSourceSubscription": "s",
        "CloudPubSubDeadLetterSourceSubscriptionProject": "p",
    }


async def test_a_message_rests_for_longer_and_longer_between_its_deliveries() -> None:
    loop = asyncio.get_running_loop()
    made = subscription(least_rest_s=10, most_rest_s=30)
    made.add(message("a"))
    rested = []
    (one,) = await made.pull(1, within_s=60)
    for _ in range(4):
        made.modify([one.ack_id], 0)
        begun = loop.time()
        (one,) = await made.pull(1, within_s=60)
        rested.append(round(loop.time() - begun))

    assert rested == [10, 20, 30, 30]


async def test_under_one_key_messages_come_in_their_order_also_after_one_has_come_back() -> None:
    made = subscription(ordered=True)
    for name in "abc":
        made.add(message(name, "k"))
    made.add(message("other"))
    first = await made.pull(2, within_s=0)

    assert [one.message.id for one in first] == ["a", "b"]
    assert await names(made) == ["other"]
    made.modify([first[0].ack_id], 0)
    assert made.acknowledge([first[1].ack_id]) == [first[1].ack_id]
    assert await names(made) == ["a", "b", "c"]


async def test_the_next_under_a_key_comes_once_those_before_it_are_acknowledged() -> None:
    made = subscription(ordered=True)
    made.add(message("a", "k"))
    (first,) = await made.pull(1, within_s=0)
    made.add(message("b", "k"))
    assert await names(made) == []

    made.acknowledge([first.ack_id])

    assert await names(made) == ["b"]


async def test_without_ordering_a_key_holds_nothing_back() -> None:
    made = subscription()
    for name in "ab":
        made.add(message(name, "k"))

    assert [await names(made, 1), await names(made, 1)] == [["a"], ["b"]]


async def test_a_pull_has_no_more_bytes_than_it_asked_for_and_one_message_at_least() -> None:
    made = subscription()
    for name in "abc":
        made.add(message(name))

    assert len(await made.pull(10, within_s=0, most_bytes=2)) == 2
    assert len(await made.pull(10, within_s=0, most_bytes=1)) == 1


async def test_nor_has_it_of_one_key() -> None:
    made = subscription(ordered=True)
    for name in "abc":
        made.add(message(name, "k"))

    assert len(await made.pull(10, within_s=0, most_bytes=2)) == 2


async def test_a_filter_keeps_out_what_has_another_value() -> None:
    made = subscription(wants=("route", "mine"))
    for name, route in (("a", "mine"), ("b", "yours")):
        made.add(Message(id=name, data=b"x", attributes={"route": route}))
    made.add(message("c"))

    assert await names(made) == ["a"]


async def test_who_waits_hears_at_once_that_the_subscription_is_deleted() -> None:
    made = subscription()
    waiting = asyncio.create_task(made.pull(1, within_s=60))
    await asyncio.sleep(1)

    made.delete()

    assert await waiting == []
    assert asyncio.get_running_loop().time() < 60
