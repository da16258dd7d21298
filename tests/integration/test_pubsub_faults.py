"""Pub/Sub under faults: connections cut again and again, and workers that end amid their work. No request is lost."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from tests.faults.proxy import TcpProxy
from tests.process_rig import serving_mock
from tests.pubsub_kit import Subscribed, bare, processing_pubsub, subscribed
from tests.transport_contract import nothing_comes
from tests.waiting import eventually

REQUESTS = 40


@pytest.fixture
async def kit(redis_url: str) -> AsyncGenerator[Subscribed]:
    async with subscribed(redis_url) as made:
        yield made


async def conserved(kit: Subscribed, ids: list[str]) -> None:
    """Each request has a result, published and stored; none waits, and none was dead-lettered."""
    answers = await kit.answers(len(ids), within=20)
    while set(ids) - {answer["id"] for answer in answers}:  # Some came twice, and the rest after them.
        answers = await kit.answers(len(answers) + 1, within=20)
    assert all(answer["status_code"] == 200 for answer in answers)
    assert [one for one in ids if await kit.store.read(one) is None] == []
    async with kit.session() as transport, transport.consuming(1):
        await nothing_comes(transport)
    assert kit.dead == []


async def test_connections_that_are_cut_again_and_again_lose_no_request(kit: Subscribed, redis_url: str) -> None:
    host, _, port = kit.address.rpartition(":")
    ids = [f"r-{n}" for n in range(REQUESTS)]
    async with serving_mock(latency_s=0.05) as mock, TcpProxy(host, int(port)) as proxy:
        through = replace(kit, address=f"{proxy.host}:{proxy.port}")
        topic = {"subscriber_id": "requests", "igw_base_url": mock.url}
        async with processing_pubsub(through, redis_url, topics=[topic], workers=4):
            for number, request_id in enumerate(ids):
                await kit.add(bare(request_id))
                if number % 8 == 4:
                    await proxy.cut()
                    await asyncio.sleep(0.1)
            await conserved(kit, ids)


async def test_workers_that_end_amid_their_work_leave_it_to_others(kit: Subscribed, redis_url: str) -> None:
    ids = [f"r-{n}" for n in range(REQUESTS)]
    for request_id in ids:
        await kit.add(bare(request_id))
    async with serving_mock(latency_s=0.1) as mock:
        topic = {"subscriber_id": "requests", "igw_base_url": mock.url}
        for _ in range(2):
            async with processing_pubsub(kit, redis_url, topics=[topic], workers=4):
                await eventually(lambda: mock.mock.running, within=10, what="some run")
        async with processing_pubsub(kit, redis_url, topics=[topic], workers=8):
            await conserved(kit, ids)

    assert max(Counter(one.data for one in kit.results).values()) <= 2
