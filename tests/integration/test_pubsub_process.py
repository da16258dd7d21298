"""`process` over subscriptions of Pub/Sub: results, gates, and what `check process` says."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Mapping

import pytest

from inference_worker.assembly import Outside
from inference_worker.check_process import check_process
from inference_worker.mock_model import Fault
from tests.process_rig import serving_mock
from tests.pubsub_kit import Subscribed, bare, processing_pubsub, setup_of, subscribed
from tests.transport_contract import nothing_comes


@pytest.fixture
async def kit(redis_url: str) -> AsyncGenerator[Subscribed]:
    async with subscribed(redis_url) as made:
        yield made


def topic(base_url: str, **options: object) -> Mapping[str, object]:
    return {"subscriber_id": "requests", "igw_base_url": base_url, **options}


def gated(gate_type: str, **parameters: object) -> Mapping[str, object]:
    return {"gate_type": gate_type, "gate_params": parameters}


async def nothing_is_left(kit: Subscribed) -> None:
    async with kit.session() as transport, transport.consuming(1):
        await nothing_comes(transport)


async def test_what_is_let_in_and_answered_is_acknowledged_and_its_place_given_back_case_113(
    kit: Subscribed, redis_url: str
) -> None:
    async with serving_mock() as mock:
        one_at_a_time = gated("local-max-concurrency", limit=1)
        async with processing_pubsub(kit, redis_url, topics=[topic(mock.url, **one_at_a_time)]):
            for name in ("a", "b", "c"):
                await kit.add(bare(name), result_route="mine")
            answers = await kit.answers(3)
    await nothing_is_left(kit)

    assert {answer["id"]: answer["status_code"] for answer in answers} == {"a": 200, "b": 200, "c": 200}
    assert all(dict(one.attributes) == {"result_route": "mine"} for one in kit.results)


async def test_what_is_let_in_and_fails_is_kept_and_its_place_given_back_case_114(
    kit: Subscribed, redis_url: str
) -> None:
    """The place is the only one: the other request gets it while the first one waits for its next try."""
    async with serving_mock(fault=Fault(status=503, times=1)) as mock:
        one_at_a_time = gated("local-max-concurrency", limit=1)
        async with processing_pubsub(kit, redis_url, topics=[topic(mock.url, **one_at_a_time)]):
            await kit.add(bare("a"))
            await kit.add(bare("b"))
            answers = await kit.answers(2, within=20)
    await nothing_is_left(kit)

    assert sorted(answer["id"] for answer in answers) == ["a", "b"]
    assert all(answer["status_code"] == 200 for answer in answers)


async def test_no_more_than_the_limit_of_a_gate_are_in_flight_case_116(kit: Subscribed, redis_url: str) -> None:
    most = 0
    async with serving_mock(latency_s=0.1) as mock:
        two = gated("local-max-concurrency", limit=2)
        async with processing_pubsub(kit, redis_url, topics=[topic(mock.url, **two)]):
            for n in range(8):
                await kit.add(bare(f"r-{n}"))
            answering = asyncio.create_task(kit.answers(8, within=20))
            while not answering.done():
                most = max(most, mock.mock.running)
                await asyncio.sleep(0.005)
    await nothing_is_left(kit)

    assert len(await answering) == 8
    assert most == 2


async def test_what_is_over_a_rate_is_delivered_later_case_117(kit: Subscribed, redis_url: str) -> None:
    async with serving_mock() as mock:
        rate = gated("local-rate-limit", requests_per_minute=120, burst=1)
        begun = time.monotonic()
        async with processing_pubsub(kit, redis_url, topics=[topic(mock.url, **rate)]):
            for n in range(4):
                await kit.add(bare(f"r-{n}"))
            answers = await kit.answers(4, within=20)
    await nothing_is_left(kit)

    assert len({answer["id"] for answer in answers}) == 4
    assert time.monotonic() - begun >= 1.4


async def test_what_has_expired_gets_a_result(kit: Subscribed, redis_url: str) -> None:
    async with serving_mock() as mock, processing_pubsub(kit, redis_url, topics=[topic(mock.url)]):
        await kit.add(bare("late", deadline=time.time() - 5))
        (answer,) = await kit.answers()
    await nothing_is_left(kit)

    assert (answer["id"], answer["error_code"]) == ("late", "DEADLINE_EXCEEDED")


async def test_check_says_which_subscriptions_are_there(kit: Subscribed, redis_url: str) -> None:
    async with serving_mock() as mock:
        topics = [topic(mock.url, id="there"), {"subscriber_id": "missing", "igw_base_url": mock.url}]
        setup = setup_of(kit, redis_url, topics=topics)
        report = await check_process(setup, {}, Outside(now=time.time, rng=random.Random(1)))
    rows = {row.what: row for row in report.findings}

    assert rows["queue there"].word == "ok"
    assert "deadline 10 s" in rows["queue there"].detail
    assert rows["queue missing"].word == "failed"
    assert "NOT_FOUND" in rows["queue missing"].detail


async def test_check_warns_of_a_subscription_that_may_run_twice_and_keeps_no_dead_letters(redis_url: str) -> None:
    async with (
        subscribed(redis_url, exactly_once=False, dead_letter_policy=None) as kit,
        serving_mock() as mock,
    ):
        setup = setup_of(kit, redis_url, topics=[topic(mock.url)])
        report = await check_process(setup, {}, Outside(now=time.time, rng=random.Random(1)))
    said = [row.detail for row in report.findings if row.what == "queue requests" and row.word == "warning"]

    assert any("exactly-once" in one for one in said)
    assert any("dead-letter topic" in one for one in said)
