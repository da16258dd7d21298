"""What a queue in Postgres promises beyond the transport contract: order, fences, cancellation, tables, connections.

Cases on partitions, their owners and their heartbeats do not apply: rows are claimed singly, fenced by attempt.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import asyncpg
import pytest

from inference_worker.disposition import Ack, DeadLetter, DeliveryLost, Hold, Nack, Republish, Settled, Token
from inference_worker.errors import StatementRefused, StoreUnavailable, TransportLost
from inference_worker.gates.basic import LocalMaxConcurrency
from inference_worker.merge import RandomRobin
from inference_worker.messages import Reply
from inference_worker.ports import Claimed, Delivery
from inference_worker.sql_dead_letters import SqlDeadLetters
from inference_worker.sql_ears import SqlEars
from inference_worker.sql_link import SqlLink, SqlTls, reason_of, with_files
from inference_worker.sql_place import SqlPlace, queue_channel
from inference_worker.sql_schema import VERSION, ensure_schema
from inference_worker.transports.merged import MergedQueues
from inference_worker.transports.merged_source import Source
from inference_worker.transports.sql import SqlQueue, expiring, sql_backlog
from inference_worker.transports.sql_members import placed
from tests.integration.conftest import OwnPostgres
from tests.services import Postgres, free_port
from tests.sql_kit import QUEUE, SqlQueueKit, envelope, place_at, sql_queue_at
from tests.transport_contract import failed, nothing_comes, reply, request, take
from tests.waiting import eventually

LEASE_S = 0.3


@pytest.fixture
async def kit(sql_url: str) -> AsyncGenerator[SqlQueueKit]:
    async with sql_queue_at(sql_url, lease_s=LEASE_S) as made:
        yield made


def id_of(delivery: Delivery) -> str:
    assert delivery.request is not None
    return delivery.request.request_id.partition("\0")[0]


def generation(delivery: Delivery) -> str:
    assert delivery.request is not None
    return delivery.request.request_id


def answer(delivery: Delivery, token: str = "") -> Ack:
    hold = Hold(generation(delivery), Token(token)) if token else None
    return Ack(reply=reply(generation(delivery)), claim=hold)


# ------------------------------------------------------------ tables


async def test_tables_are_made_once_whoever_comes_first_and_however_many_case_126(empty_sql_url: str) -> None:
    connections = [await asyncpg.connect(empty_sql_url) for _ in range(8)]
    try:
        await asyncio.gather(*(ensure_schema(connection) for connection in connections))
        await ensure_schema(connections[0])
        versions = [row[0] for row in await connections[0].fetch("select version from iw_schema")]
    finally:
        for connection in connections:
            await connection.close()

    assert versions == list(range(1, VERSION + 1))


async def test_a_role_that_may_make_no_tables_uses_those_there_are(empty_sql_url: str, postgres: Postgres) -> None:
    schema = empty_sql_url.rpartition("=")[2]
    async with sql_queue_at(empty_sql_url) as owner:
        await owner.rows("select 1")
    made_up = f"r_{schema}"
    admin = await asyncpg.connect(postgres.url)
    try:
        await admin.execute(
            f"create role {made_up} login password 'test'; grant usage on schema {schema} to {made_up};"
            f"grant select, insert, update, delete on all tables in schema {schema} to {made_up};"
        )
        url = empty_sql_url.replace("postgres:", f"{made_up}:")
        async with sql_queue_at(url, lease_s=LEASE_S) as kit:
            await kit.submit("a")
            async with kit.session() as transport, transport.consuming(1):
                assert await transport.settle(await take(transport), Ack()) == Settled(how="ack")
    finally:
        await admin.execute(f"drop owned by {made_up}; drop role {made_up}")
        await admin.close()


async def test_a_newer_version_of_the_tables_is_left_as_it_is(sql_url: str) -> None:
    async with sql_queue_at(sql_url) as kit:
        await kit.rows("insert into iw_schema values (999, now())")
        try:
            async with place_at(sql_url) as place:
                assert (await place.link.row("select max(version) from iw_schema"))[0] == 999
        finally:
            await kit.rows("delete from iw_schema where version = 999")


# ------------------------------------------------------------ the address


@pytest.mark.parametrize("password", ["hunter2"])
async def test_a_refusal_shows_no_credentials_case_125(postgres: Postgres, password: str) -> None:
    """Nor does an address that nobody answers at."""
    for url in (
        f"postgresql://nobody:{password}@{postgres.host}:{postgres.port}/postgres",
        f"postgresql://nobody:{password}@127.0.0.1:{free_port()}/postgres",
        f"postgresql://postgres:{password}@{postgres.host}:{postgres.port}/postgres?sslmode=no{password}",
    ):
        with pytest.raises(StoreUnavailable) as caught:
            async with place_at(url) as place:
                await place.link.fetch("select 1")

        assert password not in str(caught.value)
        assert "nobody" not in str(caught.value)


def test_files_for_tls_are_those_of_the_url_first() -> None:
    files = SqlTls(ca_file="/ca.pem", cert_file="/cert.pem", key_file="/key.pem")

    assert with_files("postgresql://h/d?sslmode=verify-full", files) == (
        "postgresql://h/d?sslmode=verify-full&sslrootcert=%2Fca.pem&sslcert=%2Fcert.pem&sslkey=%2Fkey.pem"
    )
    assert "mine.pem" in with_files("postgresql://h/d?sslrootcert=mine.pem", files)
    assert with_files("postgresql://h/d", SqlTls()) == "postgresql://h/d"


def test_reasons_say_what_to_do_and_no_more() -> None:
    assert reason_of(TimeoutError()) == "Postgres gave no answer in time"
    assert reason_of(asyncpg.InvalidPasswordError("password of alice")) == "Postgres refused the credentials"
    assert reason_of(ValueError("postgresql://u:p@h")) == "the address of Postgres cannot be used"


# ------------------------------------------------------------ what is put there


async def test_payloads_stay_the_bytes_that_came_case_146(kit: SqlQueueKit) -> None:
    """Also over a retry, which writes the envelope anew. Binary is no JSON, but a table does not mind."""
    await kit.submit("a")
    async with kit.session() as transport, transport.consuming(1):
        first = await take(transport)
        hold = Hold(generation(first), Token("t"))
        await transport.settle(first, Republish(delay_s=0, attempts=1, left_s=60, claim=hold))
        second = await take(transport)
        assert first.request is not None
        assert second.request is not None
        assert first.request.payload == second.request.payload == b'{ "model":"m", "n": 1.50, "text":"\xc3\xbc" }'
        assert second.attempts == 1
    for raw in (b"\x00\xff\x01", b""):
        await kit.rows(
            "insert into iw_requests (queue, request_id, token, deadline, body, payload)"
            " values ('o', 'o', $1, 1, $2, $2)",
            raw.hex(),
            raw,
        )
    stored = await kit.rows("select body, payload from iw_requests where queue = 'o' order by seq")
    assert [(row[0], row[1]) for row in stored] == [(b"\x00\xff\x01", b"\x00\xff\x01"), (b"", b"")]


async def test_a_request_without_its_payload_is_refused_by_the_table(kit: SqlQueueKit) -> None:
    with pytest.raises(StatementRefused):
        await kit.rows("select iw1_put('q', 'a', 't', 1.0, null, null, 'x', null)")


async def test_an_envelope_that_is_put_there_twice_is_there_once(kit: SqlQueueKit) -> None:
    await kit.submit("a")
    await kit.submit("a")

    assert (await kit.inside()).queued == {"a": 1}


def test_an_envelope_lies_without_its_payload_which_lies_beside_it() -> None:
    row = placed(envelope("a", "t"), time.time())

    assert (row.request_id, row.token) == ("a", "t")
    assert row.payload == b'{ "model":"m", "n": 1.50, "text":"\xc3\xbc" }'
    assert json.loads(row.body)["data"]["payload"] is None


# ------------------------------------------------------------ taking


async def test_the_earliest_deadlines_come_first_and_other_queues_stay_case_129(kit: SqlQueueKit) -> None:
    now = int(time.time())
    await kit.submit("late", deadline=now + 300)
    await kit.submit("early", deadline=now + 100)
    await kit.submit("mid", deadline=now + 200)
    await kit.submit("other", queue="other")
    async with kit.session() as transport, transport.consuming(2):
        assert [id_of(await take(transport)) for _ in range(2)] == ["early", "mid"]
        await transport.set_limit(3)
        assert id_of(await take(transport)) == "late"
        await nothing_comes(transport)
    assert (await kit.inside()).queued["other"] == 1


async def test_equal_deadlines_come_in_the_order_of_submission_case_130(kit: SqlQueueKit) -> None:
    deadline = int(time.time()) + 600
    for number in range(50):
        await kit.submit(f"r{number:02}", deadline=deadline)
    await kit.submit("last", deadline=deadline + 1)
    async with kit.session() as transport, transport.consuming(51):
        got = [id_of(await take(transport)) for _ in range(51)]

    assert got == [*(f"r{number:02}" for number in range(50)), "last"]


async def test_what_is_given_back_has_its_place_and_giving_back_twice_is_nothing_case_140(kit: SqlQueueKit) -> None:
    now = int(time.time())
    for name, deadline in (("a", now + 100), ("b", now + 200)):
        await kit.submit(name, deadline=deadline)
    async with kit.session() as transport, transport.consuming(1):
        first = await take(transport)
        assert await transport.settle(first, Nack()) == Settled(how="requeue")
        again = await take(transport)
        assert await transport.settle(first, Nack()) == DeliveryLost(stored=False)
        assert (id_of(first), id_of(again)) == ("a", "a")
        assert again.redelivered
        assert await transport.settle(again, Ack()) == Settled(how="ack")


async def test_a_retry_waits_with_its_old_payload_and_its_new_envelope_case_141(kit: SqlQueueKit) -> None:
    await kit.submit("a")
    async with kit.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        hold = Hold(generation(delivery), Token("t"))
        await transport.settle(delivery, Republish(delay_s=60, attempts=1, left_s=90, claim=hold))

        ((body, payload, due),) = await kit.rows(
            "select body, payload, due > now() + interval '50 s' from iw_requests where request_id = 'a'"
        )
        assert json.loads(body)["internal"]["retry_count"] == 1
        assert payload == b'{ "model":"m", "n": 1.50, "text":"\xc3\xbc" }'
        assert due
        await nothing_comes(transport)
        assert (await transport.backlog()).delayed == 1


async def test_what_is_locked_is_passed_over_and_found_later_case_136(kit: SqlQueueKit, sql_url: str) -> None:
    """Lapsed rows that another transaction holds are no reason to wait, and no reason to forget them."""
    await kit.submit("a")
    await kit.submit("b")
    await kit.rows(
        "update iw_requests set owner = 'gone', lease_until = now() - interval '1 s', attempt = 1, deliveries = 1"
    )
    other = await asyncpg.connect(sql_url)
    try:
        locked = other.transaction()
        await locked.start()
        await other.execute("select 1 from iw_requests where request_id = 'a' for update")
        async with kit.session(poll_interval_s=0.1) as transport, transport.consuming(2):
            got = await take(transport)
            assert id_of(got) == "b"
            assert got.redelivered
            await nothing_comes(transport)
            await locked.rollback()
            assert id_of(await take(transport)) == "a"
    finally:
        await other.close()


# ------------------------------------------------------------ leases and fences


async def test_a_lapsed_lease_goes_to_another_and_its_former_holder_is_fenced_case_133_134_150(
    kit: SqlQueueKit,
) -> None:
    """Ack, retry and hand-back of the late one change nothing; that of the new one holds, once."""
    await kit.submit("a")
    async with kit.session() as sleeper, sleeper.consuming(1):
        stale = await take(sleeper)
        await kit.rows("update iw_requests set lease_until = now() - interval '1 s'")
        async with kit.session() as other, other.consuming(1):
            fresh = await take(other)
            assert fresh.redelivered
            late = Hold(generation(stale), Token("late"))
            for ending in (Ack(), Nack(), Republish(delay_s=0, attempts=1, left_s=9, claim=late)):
                assert await sleeper.settle(stale, ending) == DeliveryLost(stored=False)
            assert await other.settle(fresh, answer(fresh)) == Settled(how="ack")
            assert await other.settle(fresh, Ack()) == DeliveryLost(stored=False)
    assert [result["id"] for result in await kit.results()] == ["a"]


async def test_of_one_row_the_claim_before_does_not_settle_the_one_after(kit: SqlQueueKit) -> None:
    """The same session, which lost it and took it again."""
    await kit.submit("a")
    async with kit.session(lease_s=30) as transport, transport.consuming(1):
        first = await take(transport)
        await kit.rows("update iw_requests set lease_until = now() - interval '1 s'")
        await transport.set_limit(2)
        second = await take(transport)

        assert first.lost.is_set()
        assert await transport.settle(first, Ack()) == DeliveryLost(stored=False)
        assert await transport.settle(second, Ack()) == Settled(how="ack")


async def test_who_leaves_frees_everything_at_once_case_137(kit: SqlQueueKit) -> None:
    await kit.submit("a")
    async with kit.session(lease_s=60) as leaving, leaving.consuming(1):
        await take(leaving)
    async with kit.session() as other, other.consuming(1):
        assert id_of(await take(other)) == "a"


async def test_a_session_that_keeps_its_leases_keeps_its_requests(kit: SqlQueueKit) -> None:
    kit.lease_s = 1.0  # Three renewals in a shorter one are late where the machine is busy.
    await kit.submit("a")
    async with kit.session() as one, one.consuming(1):
        held = await take(one)
        async with kit.session() as two, two.consuming(1):
            await nothing_comes(two, kit.lease_s * 2.5)

        assert not held.lost.is_set()
        assert await one.settle(held, Ack()) == Settled(how="ack")


# ------------------------------------------------------------ results, dead letters, cancellation


async def test_results_come_in_their_order_each_on_its_route_case_145(kit: SqlQueueKit) -> None:
    for number in range(3):
        await kit.submit(f"r{number}")
    await kit.submit("own", result_queue_name="own-route")
    async with kit.session() as transport, transport.consuming(4):
        for _ in range(4):
            delivery = await take(transport)
            await transport.settle(delivery, answer(delivery))

    assert [result["id"] for result in await kit.results()] == ["r0", "r1", "r2"]
    assert [result["id"] for result in await kit.results("own-route")] == ["own"]


async def test_a_queue_says_where_its_results_go_and_for_how_long(kit: SqlQueueKit) -> None:
    await kit.submit("a", result_queue_name="asked")
    queue = SqlQueue(results="queues", result_ttl_s=60)
    async with kit.session(queue=queue) as transport, transport.consuming(1):
        delivery = await take(transport)
        await transport.settle(delivery, answer(delivery))

    assert [result["id"] for result in await kit.results("queues")] == ["a"]
    ((left_s,),) = await kit.rows("select extract(epoch from expires - now())::float from iw_results")
    assert 50 < left_s <= 60


async def test_an_answer_a_usage_event_and_the_end_of_the_request_are_one_step(kit: SqlQueueKit) -> None:
    await kit.submit("a")
    async with kit.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        await kit.rows("alter table iw_usage add constraint none check (event <> 'refused')")
        try:
            refused = Ack(reply=reply(generation(delivery)), usage_event=b"refused")
            await transport.settle(delivery, refused)
            assert await kit.results() == []
            assert await kit.store.read(generation(delivery)) is None
            assert (await kit.inside()).claimed == {"a": 1}
        finally:
            await kit.rows("alter table iw_usage drop constraint none")
        assert await transport.settle(delivery, refused) == Settled(how="ack")
    assert len(await kit.results()) == 1


async def test_what_was_stored_late_is_sent_by_whoever_ends_the_request(kit: SqlQueueKit) -> None:
    """A cancellation, or a holder that was late, stores without sending."""
    await kit.submit("a")
    async with kit.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        await kit.store.write(reply(generation(delivery)), None, Token("late"))
        assert await transport.settle(delivery, Ack()) == Settled(how="ack")

    ((result),) = await kit.results()
    assert (result["id"], json.loads(result["payload"])) == ("a", {"ok": True})


async def test_cancelled_before_it_was_taken_gives_one_cancelled_and_is_not_handed_up_case_142(
    kit: SqlQueueKit,
) -> None:
    await kit.submit("a", "t1")
    await kit.submit("b", "t2")
    assert [row[0] for row in await kit.rows("select place from iw1_cancel('{a,gone}', '{\"\",\"\"}')")] == [1]
    assert await kit.rows("select place from iw1_cancel('{b}', '{another}')") == []
    assert await kit.rows("select place from iw1_cancel('{}', '{}')") == []
    async with kit.session() as transport, transport.consuming(2):
        assert id_of(await take(transport)) == "b"
        await nothing_comes(transport)
        ((result),) = await kit.results()
    assert (result["id"], result["error_code"]) == ("a", "CANCELLED")
    await kit.submit("a", "t3")
    async with kit.session() as transport, transport.consuming(2):
        assert {id_of(await take(transport)) for _ in range(2)} == {"a", "b"}


async def test_cancelled_while_it_runs_its_runner_learns_of_it_at_once(kit: SqlQueueKit) -> None:
    await kit.submit("a")
    async with kit.session(lease_s=60) as transport, transport.consuming(1):
        delivery = await take(transport)
        await kit.rows("select place from iw1_cancel('{a}', '{\"\"}')")

        async def ended() -> bool:
            return await kit.store.read(generation(delivery)) is not None

        await eventually(ended, within=5, what="the cancellation is stored")
        assert await transport.settle(delivery, Ack()) == Settled(how="ack")
    assert [result["error_code"] for result in await kit.results()] == ["CANCELLED"]


async def test_what_is_no_request_is_dead_lettered_and_answered_where_it_has_an_id(kit: SqlQueueKit) -> None:
    await kit.add(b"\x00 no JSON")
    broken = json.dumps({"internal": {}, "request_kind": "odd", "data": {"id": "x", "deadline": 1}}).encode()
    await kit.add(broken)
    await kit.submit("fine")
    async with kit.session() as transport, transport.consuming(3):
        assert id_of(await take(transport)) == "fine"
        await nothing_comes(transport)

    assert sum((await kit.inside()).dead.values()) == 2
    assert [result["error_code"] for result in await kit.results()] == ["INVALID_REQUEST"]


async def test_what_no_table_takes_ends_as_no_request_and_holds_up_nobody(kit: SqlQueueKit) -> None:
    """Written there by somebody else: a result whose route no table takes could never be stored."""
    await kit.submit("route", result_queue_name="a\0b")
    await kit.submit("token", "t" * 40_000)
    await kit.submit("headers")
    await kit.link.fetch("update iw_requests set headers = $1 where request_id = 'headers'", b"\xff{")
    await kit.submit("attempts", retry_count=2**40)
    async with kit.session() as transport, transport.consuming(4):
        for delivery in [await take(transport) for _ in range(2)]:
            claimed = await kit.store.claim(generation(delivery), delivery.attempts, Token("c"), time.time() + 60)
            assert isinstance(claimed, Claimed)
            assert await transport.settle(delivery, answer(delivery, "c")) == Settled(how="ack")
        await nothing_comes(transport)

    said = {result["id"]: result.get("error_code") for result in await kit.results()}
    assert said == {"route": "INVALID_REQUEST", "token": "INVALID_REQUEST", "headers": None, "attempts": None}


async def test_letters_are_looked_at_a_few_at_a_time_where_they_are_large(
    kit: SqlQueueKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_worker.sql_dead_letters.AT_ONCE_BYTES", 100)
    await kit.link.fetch(
        "insert into iw_dead (queue, request_id, token, body, attempts, note)"
        " select $1, g::text, '', convert_to(repeat('x', size), 'UTF8'), 1, '{}'"
        " from unnest(array[40, 40, 40, 500, 1]) with ordinality s(size, g)",
        QUEUE.name,
    )
    letters = SqlDeadLetters(kit.link, queue=QUEUE.name, now=time.time)
    await letters.begin()
    seen = []
    while (letter := await letters.next()) is not None:
        seen.append((letter.message_id, len(letters._read)))

    assert seen == [("1", 1), ("2", 0), ("3", 0), ("4", 0), ("5", 0)]


async def test_a_dead_letter_is_shown_and_put_back_as_new(kit: SqlQueueKit) -> None:
    await kit.submit("a")
    await kit.add(request("own"), "m-1")
    async with kit.session() as transport, transport.consuming(2):
        for _ in range(2):
            delivery = await take(transport)
            named = "own" if delivery.request is None else generation(delivery)
            end: Reply = failed(named)
            letter = DeadLetter(reason="retries_exhausted", detail="no", attempts=2, status_code=500, reply=end)
            assert await transport.settle(delivery, letter) == Settled(how="dead_letter")
    letters = SqlDeadLetters(kit.link, queue=QUEUE.name, now=time.time)
    await letters.begin()
    assert letters.ready == 2
    found = {letter.message_id: letter for letter in [await letters.next(), await letters.next()] if letter}
    assert await letters.next() is None
    assert found["a"].headers["x-dead-reason"] == "retries_exhausted"
    assert json.loads(found["a"].body)["data"]["payload"] == {"model": "m", "n": 1.5, "text": "ü"}

    assert await letters.put_back(found["a"], envelope("a", "new"), QUEUE.name) is None
    assert await letters.put_back(found["m-1"], found["m-1"].body, QUEUE.name) is None
    assert await letters.put_back(found["m-1"], found["m-1"].body, QUEUE.name) == "gone"

    assert (await kit.inside()).queued == {"a": 1, "own": 1}
    assert await kit.store.read("own") is None


async def test_a_dead_letter_whose_request_was_answered_meanwhile_is_not_put_back(kit: SqlQueueKit) -> None:
    await kit.add(request("own"))
    async with kit.session() as transport, transport.consuming(1):
        letter = DeadLetter(reason="poison", detail="no", attempts=2, status_code=500)
        await transport.settle(await take(transport), letter)
    await kit.store.write(reply("own"), None, Token("t"))
    letters = SqlDeadLetters(kit.link, queue=QUEUE.name, now=time.time)
    await letters.begin()
    one = await letters.next()
    assert one is not None

    assert await letters.put_back(one, one.body, QUEUE.name) == "completed"
    await letters.take_away(one)
    assert (await kit.inside()).dead == {}


# ------------------------------------------------------------ counting


async def test_the_backlog_and_what_expires_of_it_case_144(kit: SqlQueueKit) -> None:
    now = int(time.time())
    for number, deadline in enumerate((now + 30, now + 300, now + 3000)):
        await kit.submit(f"r{number}", deadline=deadline)
    await kit.submit("other", queue="other")
    async with kit.session() as transport, transport.consuming(1):
        await take(transport)
        backlog = await transport.backlog()
        assert (backlog.ready, backlog.in_flight, backlog.delayed) == (2, 1, 0)
        assert backlog.next_deadline == now + 300
        assert await expiring(kit.link, QUEUE.name, [60, 600, 6000], now) == [0, 1, 2]
    assert (await sql_backlog(kit.link, "other")).ready == 1


# ------------------------------------------------------------ being told


async def test_an_idle_queue_is_heard_of_at_once_and_a_busy_one_tells_nobody(kit: SqlQueueKit, sql_url: str) -> None:
    """The poll is an hour away: what comes was told."""
    said: list[str] = []
    listening = await asyncpg.connect(sql_url)
    try:
        await listening.add_listener(queue_channel(QUEUE.name), lambda *told: said.append(told[3]))
        async with kit.session(poll_interval_s=3600, lease_s=3 * 3600) as transport, transport.consuming(1):

            async def waits() -> bool:
                return bool(await kit.rows("select 1 from iw_waiting"))

            await eventually(waits, within=5, what="it wants to be told")
            await kit.submit("a")
            held = await take(transport)
            for number in range(5):
                await kit.submit(f"more{number}")
            assert await transport.settle(held, Ack()) == Settled(how="ack")
            for _ in range(5):
                assert await transport.settle(await take(transport), Ack()) == Settled(how="ack")
            assert len(said) < 6
    finally:
        await listening.close()


async def test_nothing_that_comes_while_it_goes_to_rest_is_missed(kit: SqlQueueKit) -> None:
    """Messages at all moments around the end of a look; the poll would bring a missed one after an hour."""
    async with kit.session(poll_interval_s=3600, lease_s=3 * 3600) as transport, transport.consuming(4):
        for number in range(60):
            await kit.submit(f"r{number}")
            for _ in range(number % 7):
                await asyncio.sleep(0)
            delivery = await take(transport, 5)
            assert await transport.settle(delivery, Ack()) == Settled(how="ack")


# ------------------------------------------------------------ connections


async def test_connections_are_as_many_as_were_allowed_and_taken_again(kit: SqlQueueKit, sql_url: str) -> None:
    async with place_at(sql_url, most_connections=3) as place:
        await asyncio.gather(*(place.link.fetch("select pg_sleep(0.02)") for _ in range(12)))
        ((most,),) = await place.link.fetch(
            "select count(*) from pg_stat_activity where application_name = 'test' and query like '%pg_sleep(0.02)%'"
            " and pid <> pg_backend_pid()"
        )
    assert most <= 3


async def test_a_statement_that_takes_too_long_is_given_up_by_the_server(sql_url: str) -> None:
    link = SqlLink(lambda: sql_url, client_name="test", tls=SqlTls(), prepare=ensure_schema, answer_s=0.25)
    async with link.open():
        with pytest.raises(StatementRefused, match="no answer in time"):
            await link.fetch("select pg_sleep(10)")
        assert (await link.row("select 1"))[0] == 1


async def test_a_locked_table_costs_all_queues_one_time_out_and_no_session_case_157(sql_url: str) -> None:
    """Three sessions ask at the same time; each goes on when the table is free."""
    link = SqlLink(lambda: sql_url, client_name="test", tls=SqlTls(), prepare=ensure_schema, answer_s=0.5)
    other = await asyncpg.connect(sql_url)
    try:
        async with link.open(), SqlEars(link).open() as ears, AsyncExitStack() as stack:
            kit = SqlQueueKit(sql_url, SqlPlace(link=link, ears=ears), lease_s=LEASE_S, queue=QUEUE)
            names = ("one", "two", "three")
            sessions = [
                await stack.enter_async_context(kit.sessions(kit.place, queue=SqlQueue(name=name)).connect())
                for name in names
            ]
            began = asyncio.get_running_loop().time()
            async with other.transaction():
                await other.execute("lock table iw_requests in access exclusive mode")
                asked = await asyncio.gather(*(one.backlog() for one in sessions), return_exceptions=True)
                assert [type(one) for one in asked] == [TransportLost] * 3
                assert asyncio.get_running_loop().time() - began < 1.0
            for name, session in zip(names, sessions, strict=True):
                await kit.submit(name, queue=name)
                async with session.consuming(1):
                    assert id_of(await take(session)) == name
    finally:
        await other.close()


async def test_finishing_one_claim_gives_back_its_own_permit_and_not_that_of_another_case_156(
    kit: SqlQueueKit,
) -> None:
    """The same request under the same id, claimed twice by one process: the first claim was lost to the second."""
    await kit.submit("a")
    gate = LocalMaxConcurrency(4)
    rng = random.Random(1)
    queues = MergedQueues(
        [Source(name=QUEUE.name, connect=kit.sessions(kit.place, lease_s=60, poll_interval_s=0.05).connect, gate=gate)],
        lambda: RandomRobin(rng, 10),
        now=time.time,
        rng=rng,
        replica_id="r",
    )
    async with queues.connect() as transport, transport.consuming(4):
        first = await take(transport)
        await kit.rows("update iw_requests set lease_until = now() - interval '1 s'")
        second = await take(transport)
        assert gate.budget() == 0.5
        assert isinstance(await transport.settle(first, Ack()), DeliveryLost)
        assert gate.budget() == 0.75
        assert isinstance(await transport.settle(first, Ack()), DeliveryLost)
        assert gate.budget() == 0.75
        assert await transport.settle(second, Ack()) == Settled(how="ack")
        assert gate.budget() == 1.0


async def test_a_server_that_is_away_is_found_again(own_postgres: OwnPostgres) -> None:
    """Sessions of several queues end at once, not one time-out after the other; new ones work on what was there."""
    server = await own_postgres()
    async with sql_queue_at(server.url, lease_s=LEASE_S) as kit:
        await kit.submit("a")
        async with AsyncExitStack() as stack:
            names = ("one", "two", "three")
            opening = [kit.sessions(kit.place, queue=SqlQueue(name=name)) for name in names]
            sessions = [await stack.enter_async_context(one.connect()) for one in opening]
            began = asyncio.get_running_loop().time()
            await asyncio.to_thread(server.kill)
            for session in sessions:
                await eventually(session.lost.is_set, within=10, what="the session is over")
            with pytest.raises(TransportLost):
                async with opening[0].connect():
                    raise AssertionError("there is nobody")
            assert asyncio.get_running_loop().time() - began < 10
        await asyncio.to_thread(server.start)
        async with kit.session() as transport, transport.consuming(1):
            assert id_of(await take(transport)) == "a"
