"""A queue in Postgres whose answers get lost at every step, and sessions that sleep or hear nothing.

Each test ends with a look at everything: one result for each request, and nothing left behind.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from inference_worker.disposition import Ack, DeliveryLost, Disposition, Hold, Known, Nack, Republish, Settled, Token
from inference_worker.errors import StoreUnavailable
from inference_worker.ports import AlreadyAnswered, Claimed, Delivery, Transport
from inference_worker.sql_ears import SqlEars
from inference_worker.sql_link import SqlLink, SqlTls
from inference_worker.sql_schema import ensure_schema
from inference_worker.transports.sql import SqlTransport
from tests.faults.proxy import Do, TcpProxy
from tests.integration.conftest import MakeProxy
from tests.services import Postgres
from tests.sql_kit import SqlQueueKit, sql_queue_at
from tests.transport_contract import reply, take
from tests.waiting import eventually

LONG_S = 60.0
"""A lease that does not lapse in a test: what comes back sooner was given back."""


@pytest.fixture
async def kit(sql_url: str) -> AsyncGenerator[SqlQueueKit]:
    async with sql_queue_at(sql_url, lease_s=LONG_S) as made:
        yield made


@asynccontextmanager
async def through(
    kit: SqlQueueKit, postgres: Postgres, proxy: MakeProxy, *, lease_s: float = LONG_S
) -> AsyncGenerator[tuple[SqlTransport, TcpProxy]]:
    """A session behind a proxy."""
    way = await proxy(postgres)
    async with kit.session(way.url(kit.url), lease_s=lease_s) as transport:
        yield transport, way


async def hold_of(kit: SqlQueueKit, delivery: Delivery) -> Hold:
    assert delivery.request is not None
    hold = Hold(delivery.request.request_id, Token("t"))
    answer = await kit.store.claim(hold.request_id, delivery.attempts, hold.token, time.time() + 600)
    assert isinstance(answer, Claimed)
    return hold


def answer(hold: Hold) -> Ack:
    return Ack(reply=reply(hold.request_id, result=b'"marked"'), usage_event=b'{"id":"e"}', claim=hold)


async def settled_in_the_end(transport: Transport, delivery: Delivery, ending: Disposition) -> Settled | DeliveryLost:
    """As the listener does: asked again while the outcome is not known, and acknowledged where an answer is there."""
    async with asyncio.timeout(20):
        while True:
            match await transport.settle(delivery, ending):
                case Settled() | DeliveryLost() as settlement:
                    return settlement
                case Known():
                    ending = Ack()
                case _:
                    await asyncio.sleep(0.02)


async def conserved(kit: SqlQueueKit, *names: str) -> None:
    """Have somebody answer what is left; then each has one result and one bill, and nothing else is there."""
    async with kit.session() as survivor, survivor.consuming(4):

        async def work() -> None:
            while True:
                delivery = await survivor.receive()
                assert delivery.request is not None
                hold = Hold(delivery.request.request_id, Token("survivor"))
                seen = await kit.store.claim(hold.request_id, delivery.attempts, hold.token, time.time() + 600)
                ending = Ack() if isinstance(seen, AlreadyAnswered) else answer(hold)
                await settled_in_the_end(survivor, delivery, ending)

        async def over() -> bool:
            return not (await kit.inside()).copies

        working = asyncio.create_task(work())
        await eventually(over, within=10, what="nothing is left to do")
        working.cancel()
        await asyncio.wait([working])
    assert sorted(result["id"] for result in await kit.results()) == sorted(names)
    assert len(await kit.rows("select 1 from iw_usage")) == len(names)
    assert not (await kit.inside()).dead


@pytest.mark.parametrize("do", [Do.CUT, Do.CUT_AFTER], ids=["it never arrived", "it was done"])
async def test_an_end_whose_answer_is_lost_is_asked_for_again_and_is_one_end(
    kit: SqlQueueKit, postgres: Postgres, proxy: MakeProxy, do: Do
) -> None:
    await kit.submit("a")
    async with through(kit, postgres, proxy) as (transport, way), transport.consuming(1):
        delivery = await take(transport)
        hold = await hold_of(kit, delivery)
        trap = way.when_client_sends(b"marked", do)

        assert await settled_in_the_end(transport, delivery, answer(hold)) == Settled(how="ack")
        assert trap.hits == 1
        assert not transport.lost.is_set()
    await conserved(kit, "a")


@pytest.mark.parametrize("do", [Do.CUT, Do.CUT_AFTER], ids=["it never arrived", "it was done"])
async def test_a_retry_whose_answer_is_lost_makes_one_copy(
    kit: SqlQueueKit, postgres: Postgres, proxy: MakeProxy, do: Do
) -> None:
    await kit.submit("a")
    async with through(kit, postgres, proxy) as (transport, way), transport.consuming(1):
        delivery = await take(transport)
        hold = await hold_of(kit, delivery)
        way.when_client_sends(b'"retry_count":1', do)

        settled = await transport.settle(delivery, Republish(delay_s=0, attempts=1, left_s=60, claim=hold))
        assert settled == Settled(how="retry")
        copy = await take(transport)
        assert copy.attempts == 1
        assert (await kit.inside()).copies == {"a": 1}
        await transport.settle(copy, Nack())
    await conserved(kit, "a")


async def test_rows_of_a_look_whose_answer_was_lost_return_at_once_and_others_stay_case_154(
    kit: SqlQueueKit, postgres: Postgres, proxy: MakeProxy
) -> None:
    await kit.submit("kept")
    async with through(kit, postgres, proxy) as (transport, way), transport.consuming(2):
        kept = await take(transport)
        trap = way.when_server_sends(b'"id":"lost"', Do.CUT)
        await kit.submit("lost")
        again = await take(transport, 5)

        assert trap.hits == 1
        assert again.redelivered
        assert not kept.lost.is_set()
        assert await transport.settle(kept, Nack()) == Settled(how="requeue")
    await conserved(kit, "kept", "lost")


async def test_what_could_not_be_given_back_comes_back_when_somebody_answers_case_153(
    kit: SqlQueueKit, postgres: Postgres, proxy: MakeProxy
) -> None:
    """And not twice: the claim after it is another one."""
    await kit.submit("a")
    async with through(kit, postgres, proxy) as (transport, way), transport.consuming(1):
        first = await take(transport)
        way.when_client_sends(b"iw1_hand_back", Do.CUT, times=2)

        assert await transport.settle(first, Nack()) == Settled(how="requeue")
        second = await take(transport, 5)
        assert second.redelivered
        assert await transport.settle(first, Nack()) == DeliveryLost(stored=False)
        assert not second.lost.is_set()
    await conserved(kit, "a")


async def test_a_session_that_slept_longer_than_its_lease_has_its_answer_stored_and_sent_by_another(
    kit: SqlQueueKit, postgres: Postgres, proxy: MakeProxy
) -> None:
    await kit.submit("a")
    async with through(kit, postgres, proxy, lease_s=0.4) as (sleeper, way), sleeper.consuming(1):
        delivery = await take(sleeper)
        hold = await hold_of(kit, delivery)
        way.freeze()
        async with kit.session(lease_s=LONG_S) as other, other.consuming(1):
            theirs = await take(other, 5)
            assert theirs.redelivered
            await way.cut()
            way.thaw()
            await eventually(sleeper.lost.is_set, within=10, what="the sleeper finds out")
            late = await settled_in_the_end(sleeper, delivery, answer(hold))
            assert late == DeliveryLost(stored=True)
            ending = replace(answer(Hold(hold.request_id, Token("other"))))
            assert await settled_in_the_end(other, theirs, ending) == Settled(how="ack")
    await conserved(kit, "a")


async def test_a_server_that_says_nothing_any_more_is_found_out_by_asking(
    sql_url: str, postgres: Postgres, proxy: MakeProxy
) -> None:
    """A connection that is dead without saying so: whoever hears over it is told, and it is tried again."""
    way, gone, heard = await proxy(postgres), asyncio.Event(), asyncio.Event()
    link = SqlLink(lambda: way.url(sql_url), client_name="test", tls=SqlTls(), prepare=ensure_schema, answer_s=0.5)
    async with link.open(), SqlEars(link, answer_s=0.5, ping_s=0.1).open() as ears:
        with ears.hearing("iw_test", lambda _: heard.set(), lambda _: gone.set()):
            await ears.stands("iw_test")
            way.freeze()
            await eventually(gone.is_set, within=5, what="the silence is noticed")
            way.thaw()

            async def stands() -> bool:
                await link.fetch("select pg_notify('iw_test', 'x')")
                return heard.is_set()

            await eventually(stands, within=10, what="it is heard again")


async def test_a_connection_over_which_the_server_has_taken_its_leave_is_an_answer_that_did_not_come(
    sql_url: str, postgres: Postgres, proxy: MakeProxy
) -> None:
    """Its end is not read yet: the driver takes that for a fault of its own. The next statement has another one."""
    way = await proxy(postgres)
    link = SqlLink(lambda: way.url(sql_url), client_name="test", tls=SqlTls(), prepare=ensure_schema)
    async with link.open():
        await link.fetch("select 1")
        kept = link._idle[0].connection
        kept._protocol.data_received(b"E\0\0\0\x20SFATAL\0C57P01\0Mshutdown\0\0\0\0\0")

        with pytest.raises(StoreUnavailable, match="the connection to Postgres has ended"):
            await link.fetch("select 1")
        assert (await link.row("select 2"))[0] == 2
