"""`process` over queues in Postgres: no Redis anywhere, and its documents, checks and dead letters."""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from inference_worker.assembly import Outside
from inference_worker.check_process import check_process
from inference_worker.disposition import DeadLetter
from inference_worker.ports import Beat
from inference_worker.process_setup import read_setup
from inference_worker.results.sql_fleet import SqlFleet
from inference_worker.sql_producer import Request, SqlProducer
from tests.process_rig import ProcessDocuments, queue, serving_mock
from tests.sql_kit import SqlQueueKit, place_at, processing_sql, sql_queue_at
from tests.transport_contract import take
from tests.waiting import eventually

BEAT = Beat(
    replica_id="worker-1",
    at=0.0,
    slots=4,
    in_flight=2,
    consuming=True,
    fit=True,
    service_s=1.5,
    done_per_s=0.25,
    model="tiny",
)


@pytest.fixture
async def kit(sql_url: str) -> AsyncGenerator[SqlQueueKit]:
    async with sql_queue_at(sql_url) as made:
        yield made


async def test_requests_of_two_queues_are_answered_without_any_redis(sql_url: str) -> None:
    """The address of Redis leads nowhere; results are on their routes, usage and state in the tables."""
    nowhere = {"REDIS_URL": "redis://127.0.0.1:1/0", "REDIS_RETRY_DELAY_S": "1"}
    async with serving_mock() as mock:
        queues = [queue("chat", mock.url), queue("bulk", mock.url, result_queue_name="bulk-results")]
        async with (
            processing_sql(sql_url, queues=queues, environ=nowhere) as kit,
            SqlProducer(sql_url, result_queue="mine", request_queue="chat") as producer,
        ):
            submitted = await producer.submit(
                Request(payload={"prompt": "x", "max_tokens": 2}, deadline=time.time() + 60)
            )
            result = await producer.get_result(within_s=10)
            await kit.submit("b", queue="bulk")

            async def there() -> list[dict[str, Any]]:
                return await kit.results("bulk-results")

            (other,) = await eventually(there, within=10, what="the result of the other queue")
    assert (result.id, result.token, result.status_code) == (submitted.id, submitted.token, 200)
    assert other["id"] == "b"


async def test_a_cancelled_call_ends_and_its_result_says_so(sql_url: str) -> None:
    async with (
        serving_mock(latency_s=60.0) as mock,
        processing_sql(sql_url, queues=[queue("chat", mock.url)]),
        SqlProducer(sql_url, result_queue="mine", request_queue="chat") as producer,
    ):
        submitted = await producer.submit(Request(payload={"prompt": "x"}, deadline=time.time() + 60))
        await eventually(lambda: mock.mock.running == 1, within=10, what="the call runs")
        assert await producer.cancel(submitted) == [submitted.id]
        result = await producer.get_result(within_s=10)
        await eventually(lambda: mock.mock.running == 0, within=10, what="the call is closed")
    assert result.error_code == "CANCELLED"


async def test_check_says_who_is_there_and_what_waits(sql_url: str, kit: SqlQueueKit) -> None:
    await kit.submit("a", queue="chat")
    async with serving_mock() as mock:
        documents = ProcessDocuments(url=sql_url, queues=[queue("chat", mock.url)], kind="sql")
        given, texts = documents.given()
        rng = random.Random(1)
        setup = read_setup(given, {}, texts.__getitem__, rng)
        report = await check_process(setup, {}, Outside(now=time.time, rng=rng))
    rows = {row.what: row for row in report.findings}

    assert rows["Postgres"].word == "ok"
    assert "takes writes" in rows["Postgres"].detail
    assert "chat: 1 ready, 0 with workers, 0 delayed" in rows["queue chat"].detail
    assert "Redis" not in rows


async def test_check_says_what_is_not_reached() -> None:
    url = "postgresql://user:secret@127.0.0.1:1/d"
    documents = ProcessDocuments(url=url, queues=[queue("chat", "http://127.0.0.1:1")], kind="sql")
    given, texts = documents.given()
    rng = random.Random(1)
    setup = read_setup(given, {}, texts.__getitem__, rng)
    report = await check_process(setup, {}, Outside(now=time.time, rng=rng))
    (row,) = [row for row in report.findings if row.what == "Postgres"]

    assert row.word == "failed"
    assert "secret" not in f"{row.detail} {row.mend}"


async def test_the_fleet_is_what_was_heard_of_lately(sql_url: str) -> None:
    async with place_at(sql_url) as place:
        fleet, other = SqlFleet(place, queue="q", silent_s=0.3), SqlFleet(place, queue="other")
        assert await fleet.beat(replace(BEAT, in_flight=0)) is None
        await fleet.beat(BEAT)
        await other.beat(replace(BEAT, replica_id="elsewhere"))
        (seen,) = await fleet.members()
        assert abs(seen.at - time.time()) < 5
        assert replace(seen, at=0.0) == BEAT

        await fleet.want(3, 60.0)
        assert await fleet.beat(BEAT) == await fleet.desired() == 3
        await fleet.want(3, 0.001)

        async def silent() -> bool:
            return not await fleet.members() and await fleet.desired() is None

        await eventually(silent, within=5, what="who is silent is gone, and a wish lapses")
        await place.link.fetch("update iw_fleet set beat = 'rubbish', heard_at = now()")
        assert await fleet.members() == []
        await fleet.leave("worker-1")
        await other.leave("elsewhere")
        assert [tuple(row) for row in await place.link.fetch("select queue from iw_fleet")] == []


async def test_dead_letters_are_listed_shown_and_put_back_by_the_command(kit: SqlQueueKit, sql_url: str) -> None:
    await kit.submit("a")
    async with kit.session() as transport, transport.consuming(1):
        letter = DeadLetter(reason="poison", detail="no", attempts=2, status_code=500)
        await transport.settle(await take(transport), letter)

    assert json.loads(await dlq(sql_url, "list", "--json"))["reason"] == "poison"
    assert '{ "model":"m", "n": 1.50' in await dlq(sql_url, "show", "a")
    await dlq(sql_url, "replay", "--everything")

    inside = await kit.inside()
    assert (inside.queued, inside.dead) == ({"a": 1}, {})
    async with kit.session() as transport, transport.consuming(1):
        again = await take(transport)
        assert again.request is not None
        assert again.request.payload == b'{ "model":"m", "n": 1.50, "text":"\xc3\xbc" }'


async def dlq(url: str, *words: str) -> str:
    """What the command prints."""
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "inference_worker", "dlq", *words, "--sql", "request-sql"),
        env={**os.environ, "SQL_URL": url},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await command.communicate()
    assert command.returncode == 0
    return said.decode()
