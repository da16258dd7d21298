"""The producer of queues in Postgres: whole batches, keys that stand for one request, results by route and lease."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from inference_worker.disposition import Ack, Settled
from inference_worker.errors import (
    ConfigurationError,
    InvalidSubmission,
    KeyTaken,
    LeaseLost,
    NoResultYet,
    NotAccepted,
    PartlyAccepted,
    UnreadableResult,
)
from inference_worker.sql_place import route_channel
from inference_worker.sql_producer import LeasedResult, Request, SqlProducer
from tests.faults.proxy import Do
from tests.integration.conftest import MakeProxy
from tests.services import Postgres
from tests.sql_kit import SqlQueueKit, sql_queue_at
from tests.transport_contract import reply, take
from tests.waiting import eventually

ROUTE = "results"


@pytest.fixture
async def kit(sql_url: str) -> AsyncGenerator[SqlQueueKit]:
    async with sql_queue_at(sql_url) as made:
        yield made


@pytest.fixture
async def producer(kit: SqlQueueKit) -> AsyncGenerator[SqlProducer]:
    async with SqlProducer(kit.url, result_queue=ROUTE) as made:
        yield made


def asked(**changes: object) -> Request:
    values: dict[str, object] = {"payload": {"n": 1}, "deadline": time.time() + 600}
    return Request(**(values | changes))  # type: ignore[arg-type]  # Test data by name.


async def put_result(kit: SqlQueueKit, *ids: str, route: str = ROUTE) -> None:
    for request_id in ids:
        body = json.dumps({"id": request_id, "status_code": 200, "payload": "{}"}).encode()
        await kit.rows("with n as (insert into iw_results (route, body) values ($1, $2)) select 1", route, body)
    await kit.rows("select iw1_tell_route($1)", route)


@asynccontextmanager
async def answering(kit: SqlQueueKit) -> AsyncGenerator[None]:
    """A worker that answers all that comes."""
    async with kit.session() as transport, transport.consuming(8):

        async def answer() -> None:
            while True:
                delivery = await transport.receive()
                assert delivery.request is not None
                settled = await transport.settle(delivery, Ack(reply=reply(delivery.request.request_id)))
                assert settled == Settled(how="ack")

        working = asyncio.create_task(answer())
        try:
            yield
        finally:
            working.cancel()
            await asyncio.wait([working])


# ------------------------------------------------------------ submitting


async def test_a_submission_is_answered_on_its_route(kit: SqlQueueKit, producer: SqlProducer) -> None:
    submitted = await producer.submit(asked(id="a"))
    async with answering(kit):
        result = await producer.get_result(within_s=5)

    assert (result.id, result.token, result.status_code) == ("a", submitted.token, 200)
    assert result.json() == {"ok": True}


async def test_two_thousand_and_five_requests_all_lie_there_in_their_order_case_128(
    kit: SqlQueueKit, producer: SqlProducer
) -> None:
    deadline = time.time() + 600
    submitted = await producer.submit_many(asked(id=f"r{number}", deadline=deadline) for number in range(2005))

    rows = await kit.rows("select request_id from iw_requests order by queue, deadline, seq")
    assert [row[0] for row in rows] == [one.id for one in submitted] == [f"r{number}" for number in range(2005)]
    assert await producer.submit_many([]) == []


async def test_of_a_batch_with_one_that_is_there_already_nothing_is_kept_case_128(
    kit: SqlQueueKit, producer: SqlProducer
) -> None:
    await producer.submit(asked(id="first"))
    await kit.rows("update iw_requests set token = 'taken'")

    class Drawn:
        """Draws for the second one what another producer has drawn."""

        def __init__(self) -> None:
            self.left = ["another", "taken"]

        def draw(self, now: float) -> str:
            return self.left.pop(0)

    producer._tokens = Drawn()  # type: ignore[assignment]  # It happens once in 2**64 times.
    with pytest.raises(NotAccepted) as caught:
        await producer.submit_many([asked(id="other"), asked(id="first")])

    assert not caught.value.maybe
    assert (await kit.inside()).queued == {"first": 1}


@pytest.mark.parametrize("changes", [{"payload": b"[1]"}, {"payload": "text"}, {"deadline": 1.0}, {"id": "\x00"}])
async def test_what_cannot_be_meant_is_refused_before_anything_is_put_there(
    kit: SqlQueueKit, producer: SqlProducer, changes: dict[str, object]
) -> None:
    with pytest.raises(InvalidSubmission):
        await producer.submit_many([asked(), asked(**changes)])

    assert not (await kit.inside()).queued


async def test_two_submissions_under_one_key_are_one(kit: SqlQueueKit, producer: SqlProducer) -> None:
    """Also in one batch, also from two producers at once."""
    request = asked(id="a", idempotency_key="key")
    async with SqlProducer(kit.url, result_queue=ROUTE) as other:
        several = await asyncio.gather(*(one.submit(request) for one in (producer, other) * 4))
        batch = await producer.submit_many([request, asked(id="b"), request])

    assert len({one.token for one in (*several, batch[0], batch[2])}) == 1
    assert Counter(one.repeated for one in several) == {True: 7, False: 1}
    assert (await kit.inside()).queued == {"a": 1, "b": 1}
    found = await producer.look_up("key")
    assert found is not None
    assert found.token == batch[0].token
    assert await producer.look_up("another") is None


async def test_a_key_that_stands_for_another_request_refuses_the_whole_batch(
    kit: SqlQueueKit, producer: SqlProducer
) -> None:
    deadline = time.time() + 600
    await producer.submit(asked(id="a", deadline=deadline, idempotency_key="key"))

    with pytest.raises(KeyTaken) as caught:
        await producer.submit_many([asked(id="b"), asked(id="other", deadline=deadline, idempotency_key="key")])

    assert "'a'" in str(caught.value)
    assert (await kit.inside()).queued == {"a": 1}


async def test_a_key_is_free_again_long_after_the_deadline(kit: SqlQueueKit, producer: SqlProducer) -> None:
    await producer.submit(asked(id="a", idempotency_key="key"))
    await kit.rows("update iw_keys set expires = now() - interval '1 s'")

    again = await producer.submit(asked(id="b", idempotency_key="key"))

    assert (again.id, again.repeated) == ("b", False)


async def test_a_lost_answer_is_asked_for_again_where_there_is_a_key(
    kit: SqlQueueKit, postgres: Postgres, proxy: MakeProxy
) -> None:
    """Without one it may be there; with one it is there, once."""
    way = await proxy(postgres)
    async with SqlProducer(way.url(kit.url), result_queue=ROUTE) as producer:
        way.when_client_sends(b"lost one", Do.CUT_AFTER)
        with pytest.raises(NotAccepted) as caught:
            await producer.submit(asked(id="unsure", payload={"is": "lost one"}))
        assert caught.value.maybe
        way.when_client_sends(b"lost two", Do.CUT_AFTER)
        sure = await producer.submit(asked(id="sure", payload={"is": "lost two"}, idempotency_key="key"))

    assert not sure.repeated
    assert (await kit.inside()).queued["sure"] == 1


async def test_chunks_before_the_one_that_failed_are_told_of(kit: SqlQueueKit, producer: SqlProducer) -> None:
    deadline = time.time() + 600
    await producer.submit(asked(id="taken", deadline=deadline, idempotency_key="key"))
    last = asked(id="other", deadline=deadline, idempotency_key="key")

    with pytest.raises(PartlyAccepted) as caught:
        await producer.submit_many([*(asked(id=f"r{number}") for number in range(1000)), last])

    assert len(caught.value.accepted) == 1000
    assert sum((await kit.inside()).queued.values()) == 1001


async def test_cancelling_marks_the_latest_under_an_id_or_the_one_that_is_meant_case_142(
    kit: SqlQueueKit, producer: SqlProducer
) -> None:
    first = await producer.submit(asked(id="a"))
    second = await producer.submit(asked(id="a"))

    assert await producer.cancel("a") == ["a"]
    assert await producer.cancel([first, "nobody", "\x00"]) == ["a"]
    assert await producer.cancel([]) == []
    rows = await kit.rows("select token from iw_requests where cancelled order by seq")
    assert [row[0] for row in rows] == [first.token, second.token]


# ------------------------------------------------------------ results


async def test_results_are_taken_in_their_order_up_to_a_limit_case_145(kit: SqlQueueKit, producer: SqlProducer) -> None:
    await put_result(kit, "a", "b", "c")
    await put_result(kit, "other", route="other")

    assert [result.id for result in await producer.get_results(2)] == ["a", "b"]
    assert [result.id for result in await producer.get_results(2)] == ["c"]
    assert list(await producer.get_results(2)) == []


async def test_waiting_for_a_result_is_woken_by_it_and_ends_with_its_time(
    kit: SqlQueueKit, producer: SqlProducer
) -> None:
    with pytest.raises(NoResultYet):
        await producer.get_result(within_s=0)
    waiting = asyncio.create_task(producer.get_result(within_s=60))

    async def waits() -> bool:
        return bool(await kit.rows("select 1 from iw_waiting where what = $1", route_channel(ROUTE)))

    await eventually(waits, within=5, what="somebody waits")
    began = asyncio.get_running_loop().time()
    await put_result(kit, "a")

    assert (await waiting).id == "a"
    assert asyncio.get_running_loop().time() - began < 0.9, "told, not found by a look"


async def test_who_stops_waiting_takes_nothing(kit: SqlQueueKit, producer: SqlProducer) -> None:
    """At many points of the call: what was on its way is put back to where it lay."""
    await put_result(kit, "a")
    for turns in range(0, 30, 2):
        for ask in (producer.get_result(within_s=5), producer.receive(within_s=5)):
            taking: asyncio.Task[object] = asyncio.create_task(ask)
            for _ in range(turns):
                await asyncio.sleep(0)
            taking.cancel()
            await asyncio.wait([taking])
            if not taking.cancelled():
                got = taking.result()
                if isinstance(got, LeasedResult):
                    await got.release()
                else:
                    await put_result(kit, "a")
            await eventually(lambda: not producer._returning._tasks, within=5, what="all is given back")
            assert [row[0] for row in await kit.rows("select owner from iw_results")] == [None]


async def test_a_received_result_is_ours_until_it_is_acknowledged_or_lapses_case_109(
    kit: SqlQueueKit, producer: SqlProducer
) -> None:
    await put_result(kit, "a")
    leased = await producer.receive(within_s=5, lease_s=0.3)
    with pytest.raises(NoResultYet):
        await producer.receive(within_s=0)
    await leased.renew(0.4)
    again = await producer.receive(within_s=5, lease_s=60)

    assert again.result.id == "a"
    with pytest.raises(LeaseLost):
        await leased.ack()
    with pytest.raises(LeaseLost):
        await leased.renew()
    await leased.release()  # Nothing of ours any more.
    await again.ack()
    await again.ack()
    depth = await producer.depth()
    assert (depth.requests, depth.results, depth.leased) == (0, 0, 0)


async def test_a_released_result_comes_again_at_once(kit: SqlQueueKit, producer: SqlProducer) -> None:
    await put_result(kit, "a")
    leased = await producer.receive(within_s=5)
    waiting = asyncio.create_task(producer.receive(within_s=5))
    await leased.release()

    await (await waiting).ack()


async def test_what_is_no_result_holds_up_nobody(kit: SqlQueueKit, producer: SqlProducer) -> None:
    await kit.rows("with n as (insert into iw_results (route, body) values ($1, 'rubbish')) select 1", ROUTE)
    await put_result(kit, "a")
    with pytest.raises(UnreadableResult) as caught:
        await producer.receive(within_s=5)
    assert (await producer.receive(within_s=5)).result.id == "a"
    assert caught.value.discard is not None
    await caught.value.discard()
    assert (await producer.depth()).leased == 1


async def test_a_result_whose_time_is_over_is_not_handed_out(kit: SqlQueueKit, producer: SqlProducer) -> None:
    await put_result(kit, "a")
    await kit.rows("update iw_results set expires = now() - interval '1 s'")

    assert list(await producer.get_results(1)) == []


async def test_all_that_waits_can_be_thrown_away(kit: SqlQueueKit, producer: SqlProducer) -> None:
    await producer.submit(asked())
    await put_result(kit, "a")
    with pytest.raises(ValueError, match="say what to clear"):
        await producer.clear()
    await producer.clear(requests=True, results=True)

    depth = await producer.depth()
    assert (depth.requests, depth.results) == (0, 0)


@pytest.mark.parametrize(
    ("url", "route", "problem"),
    [
        pytest.param(None, ROUTE, "sql_url", id="no address"),
        pytest.param("postgresql://h/d", "", "result_queue", id="no route"),
    ],
)
def test_a_producer_that_cannot_work_is_an_error_case_105(url: str | None, route: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        SqlProducer(url, result_queue=route)


async def test_connections_that_are_handed_in_are_left_open_case_106(kit: SqlQueueKit) -> None:
    async with SqlProducer(result_queue=ROUTE, place=kit.place) as producer:
        await producer.submit(asked(id="a"))

    async with kit.session() as transport, transport.consuming(1):
        assert (await take(transport)).request is not None
    assert (await kit.inside()).queued == {"a": 1}
    with pytest.raises(RuntimeError, match="not open"):
        await producer.submit(asked())
