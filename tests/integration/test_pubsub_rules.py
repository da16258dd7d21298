"""What a subscription of Pub/Sub has of its own: ack ids, attributes, results on a topic, counted deliveries."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator

import pytest

from inference_worker.disposition import Ack, DeliveryLost, Hold, Nack, Republish, Settled, Token
from inference_worker.errors import TransportLost
from inference_worker.ports import Claimed
from inference_worker.transports.gcp_pubsub import PubsubQueue, PubsubTransport
from inference_worker.transports.pubsub_messages import MOST_RESULT
from tests.pubsub_kit import Subscribed, bare, subscribed
from tests.transport_contract import claim, nothing_comes, reply, take
from tests.waiting import eventually


@pytest.fixture
async def kit(redis_url: str) -> AsyncGenerator[Subscribed]:
    async with subscribed(redis_url) as made:
        yield made


async def test_a_bare_request_is_read_and_its_attributes_win(kit: Subscribed) -> None:
    await kit.add(bare("a", metadata={"tenant": "body", "kept": "yes"}, endpoint="/v1/x"), tenant="attribute")
    async with kit.session() as transport, transport.consuming(1):
        delivery = await take(transport)

    assert delivery.request is not None
    assert (delivery.request.request_id, delivery.request.endpoint) == ("a", "/v1/x")
    assert delivery.request.metadata == {"tenant": "attribute", "kept": "yes"}
    assert delivery.attempts == 0


async def test_the_labels_of_its_topic_are_on_a_delivery_case_118(kit: Subscribed) -> None:
    await kit.add(bare("a"))
    queue = PubsubQueue(project=kit.queue.project, labels={"tier": "batch"})
    async with kit.session(queue=queue) as transport, transport.consuming(1):
        assert (await take(transport)).labels == {"tier": "batch"}


async def test_a_result_has_the_route_of_its_request_and_no_attribute_without_one_case_121(kit: Subscribed) -> None:
    await kit.add(bare("a"), result_route="mine", other="x")
    await kit.add(bare("b"), other="x")
    async with kit.session() as transport, transport.consuming(2):
        for _ in range(2):
            delivery = await take(transport)
            assert delivery.request is not None
            request_id = delivery.request.request_id
            hold = await claim(kit, request_id)  # type: ignore[arg-type]  # It has a store, which is all that is asked.
            await transport.settle(delivery, Ack(reply=reply(request_id), claim=hold))
        await kit.answers(2)

    assert {json.loads(one.data)["id"]: dict(one.attributes) for one in kit.results} == {
        "a": {"result_route": "mine"},
        "b": {},
    }
    assert all(json.loads(one.data)["status_code"] == 200 for one in kit.results)


async def test_of_two_deliveries_of_one_message_the_older_ones_end_is_not_the_newer_ones(kit: Subscribed) -> None:
    """By the message's id the older one's result would acknowledge it, and its holder would wait for ever."""
    await kit.add(bare("a"))
    async with kit.session() as one, kit.session() as two, one.consuming(1):
        older = await take(one)
        await kit.nack(one.held())
        async with two.consuming(1):
            newer = await take(two)

            assert newer.correlation_id != older.correlation_id
            assert await one.settle(older, Ack()) == DeliveryLost(stored=False)
            assert await two.settle(newer, Ack()) == Settled(how="ack")
    await asyncio.sleep(0)
    async with kit.session() as again, again.consuming(1):
        await nothing_comes(again)


async def test_what_is_tried_again_is_counted_by_us_and_not_by_the_service(kit: Subscribed) -> None:
    """Its dead-letter policy must not end a request that is within its deadline."""
    await kit.add(bare("a"))
    async with kit.session() as transport, transport.consuming(1):
        for attempt in range(4):
            delivery = await take(transport)
            assert delivery.attempts == attempt
            hold = await claim(kit, "a", attempt, f"t{attempt}")  # type: ignore[arg-type]  # As above.
            again = Republish(delay_s=0.01, attempts=attempt + 1, left_s=60, claim=hold)
            assert await transport.settle(delivery, again) == Settled(how="retry")
        last = await take(transport)
        await transport.settle(last, Nack())
        back = await take(transport)

        assert (back.attempts, back.redelivered) == (4, True)


async def test_what_waits_for_its_next_try_goes_to_others_when_its_holder_ends(kit: Subscribed) -> None:
    await kit.add(bare("a"))
    async with kit.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        hold = await claim(kit, "a")  # type: ignore[arg-type]  # As above.
        await transport.settle(delivery, Republish(delay_s=300, attempts=1, left_s=600, claim=hold))
        await nothing_comes(transport)
    async with kit.session() as other, other.consuming(1):
        assert (await take(other)).attempts == 1


async def test_what_looks_superseded_is_not_acknowledged_as_there_is_no_other_copy(kit: Subscribed) -> None:
    """An attempt was noted by who held it before, after we had looked."""
    await kit.add(bare("a"))
    async with kit.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        await kit.store.release("a", Token("another"), 1)

        assert await transport.settle(delivery, Ack()) == Settled(how="requeue")
        again = await take(transport)
        assert again.attempts == 1
        assert isinstance(await kit.store.claim("a", 1, Token("u"), time.time() + 60), Claimed)


async def test_what_is_answered_already_gives_its_result_again_before_it_is_acknowledged(kit: Subscribed) -> None:
    """Its first result may not have been published."""
    await kit.store.write(reply("a"), None, Token("t"))
    await kit.add(bare("a"), result_route="mine")
    async with kit.session() as transport, transport.consuming(1):
        assert await transport.settle(await take(transport), Ack()) == Settled(how="ack")
    (answer,) = await kit.answers()

    assert (answer["id"], json.loads(answer["payload"])) == ("a", {"ok": True})
    assert dict(kit.results[0].attributes) == {"result_route": "mine"}


async def test_what_is_no_request_is_answered_and_parked(kit: Subscribed) -> None:
    bodies = [b'{"id": "a", "payload": {}}', b"rubbish", b'{"id": 7, "deadline": 1}', b"\xff"]
    ids = ["a", *[await kit.add(body) for body in bodies][1:]]
    async with kit.session() as transport, transport.consuming(1):
        answers = await kit.answers(4)
        parked = await kit.parked(4)
        await nothing_comes(transport)

    assert {(answer["id"], answer["error_code"]) for answer in answers} == {(one, "INVALID_REQUEST") for one in ids}
    assert sorted(one.data for one in parked) == sorted(bodies)
    assert all(one.attributes["dead_reason"] == "invalid_request" for one in parked)
    assert await kit.store.read("a") is not None


async def test_a_result_that_is_too_large_says_so(kit: Subscribed) -> None:
    await kit.add(bare("a"))
    async with kit.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        hold = await claim(kit, "a")  # type: ignore[arg-type]  # As above.
        large = reply("a", result=b'"' + b"x" * MOST_RESULT + b'"')
        assert await transport.settle(delivery, Ack(reply=large, claim=hold)) == Settled(how="ack")
    (answer,) = await kit.answers()

    assert answer["error_code"] == "INFERENCE_ERROR"
    assert "more than Pub/Sub takes" in answer["error_message"]


async def test_a_lease_is_renewed_while_it_is_ours(kit: Subscribed) -> None:
    """Ten seconds is the shortest there is: the renewals are watched instead."""
    kept: list[tuple[str, ...]] = []
    await kit.add(bare("a"))
    async with kit.session() as transport, transport.consuming(1):
        link = transport._link
        keep = link.keep

        async def watched(subscription: str, ack_ids: list[str], seconds: int) -> frozenset[str]:
            kept.append((*ack_ids, str(seconds)))
            return await keep(subscription, ack_ids, seconds)

        link.keep = watched  # type: ignore[method-assign,assignment]  # Watched.
        delivery = await take(transport)
        await eventually(lambda: kept, within=8, what="a renewal")

    assert kept[0] == (delivery.correlation_id, "10")


async def test_a_subscription_that_is_there_is_healthy_and_a_missing_one_is_not_case_120(kit: Subscribed) -> None:
    async with kit.session() as transport:
        assert not transport.lost.is_set()
    missing = PubsubQueue(project=kit.queue.project, name="missing")
    with pytest.raises(TransportLost, match="NOT_FOUND"):
        async with kit.session(queue=missing):
            pass
    with pytest.raises(TransportLost, match="UNAVAILABLE"):
        async with kit.session("127.0.0.1:1"):
            pass


async def test_a_claim_of_nobodys_is_released(kit: Subscribed) -> None:
    await kit.add(bare("a"))
    async with kit.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        hold = await claim(kit, "a")  # type: ignore[arg-type]  # As above.
        await kit.nack(transport.held())
        again = Republish(delay_s=0.0, attempts=1, left_s=60, claim=hold)

        assert await transport.settle(delivery, again) == DeliveryLost(stored=False)
        assert await kit.store.claim("a", 0, Token("u"), time.time() + 60) == Claimed(starts=1)
    assert isinstance(transport, PubsubTransport)
    assert hold == Hold("a", Token("t"))
