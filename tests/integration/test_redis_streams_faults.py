"""A stream that is emptied, destroyed, full, read-only, slow or cut, and holders that sleep too long.

Each test ends with a look at everything: one copy of what is still to be done, none of what is done.
"""

import asyncio
import json
import math
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker.disposition import (
    Ack,
    Busy,
    DeadLetter,
    DeliveryLost,
    Disposition,
    Hold,
    Known,
    Nack,
    Republish,
    Settled,
    StoreSilent,
    Token,
)
from inference_worker.errors import TransportLost
from inference_worker.ports import BelowFloor, Claimed, Delivery, Transport
from inference_worker.redis_scripts import Script
from inference_worker.results.redis import claim_key
from inference_worker.transports import redis_streams
from inference_worker.transports.redis_streams import StreamTransport, delayed_key, stream_backlog
from inference_worker.transports.stream_entries import RETURNED
from inference_worker.transports.stream_scripts import CONCLUDE, HAND_BACK, RETRY, SETTLE, TAKE, TIDY
from tests.faults.processes import ROOT
from tests.faults.proxy import Do, TcpProxy, Unit
from tests.integration.conftest import MakeProxy, OwnRedis
from tests.services import Redis, free_port
from tests.stream_kit import NAMES, Streams, entries_of, streams_at
from tests.transport_contract import failed, nothing_comes, reply, request, take
from tests.waiting import eventually

LEASE_S = 0.5
DEADLINE_S = 600.0


@pytest.fixture
async def streams(redis_url: str) -> AsyncGenerator[Streams]:
    async with streams_at(redis_url, lease_s=LEASE_S) as made:
        yield made


@pytest.fixture
async def on_own_redis(own_redis: OwnRedis) -> AsyncGenerator[tuple[Streams, Redis]]:
    """A queue on a Redis of this test's own."""
    server = await own_redis()
    async with streams_at(server.url, lease_s=LEASE_S) as made:
        yield made, server


async def claim(streams: Streams, request_id: str, attempt: int = 0, token: str = "t") -> Hold:
    """Claim a request as the processor does."""
    answer = await streams.store.claim(request_id, attempt, Token(token), time.time() + DEADLINE_S)
    assert isinstance(answer, Claimed)
    return Hold(request_id, Token(token))


async def command(client: RedisClient, *words: str | int) -> object:
    """Any command, in its own words."""
    answer: object = await client.execute_command(*words)  # type: ignore[no-untyped-call]  # The driver's own gap.
    return answer


def runs(script: Script) -> Callable[[Unit], bool]:
    return lambda unit: script.sha.encode() in unit.args


def retry(hold: Hold, delay_s: float = 0.0) -> Republish:
    return Republish(delay_s=delay_s, attempts=1, left_s=60, claim=hold)


def letter(hold: Hold) -> DeadLetter:
    answer = failed(hold.request_id)
    return DeadLetter(reason="retries_exhausted", detail="no", attempts=1, status_code=500, reply=answer, claim=hold)


def answer(hold: Hold) -> Ack:
    return Ack(reply=reply(hold.request_id), usage_event=b'{"id":"e"}', claim=hold)


async def settled_in_the_end(
    transport: Transport, delivery: Delivery, disposition: Disposition
) -> Settled | DeliveryLost:
    """As the listener does: asked again while the outcome is not known, and acknowledged where an answer is there."""
    async with asyncio.timeout(20):
        while True:
            match await transport.settle(delivery, disposition):
                case Settled() | DeliveryLost() as settlement:
                    return settlement
                case Known(reply=known):
                    is_dead = known.error_code == "retries_exhausted"
                    dead = DeadLetter(reason="retries_exhausted", detail="found", attempts=1, status_code=500)
                    disposition = dead if is_dead else Ack()
                case _:
                    await asyncio.sleep(0.05)


# ---------------------------------------------------------------- the stream goes, and comes again


@pytest.mark.parametrize("how", ["FLUSHALL", "DEL", "XGROUP DESTROY"])
async def test_a_worker_whose_stream_or_group_goes_makes_it_anew_and_goes_on(
    how: str, on_own_redis: tuple[Streams, Redis]
) -> None:
    streams, _ = on_own_redis
    async with streams.session() as transport, transport.consuming(2):
        await nothing_comes(transport, 0.1)
        words = {"DEL": ("DEL", NAMES.stream), "XGROUP DESTROY": ("XGROUP", "DESTROY", NAMES.stream, NAMES.group)}
        for _ in range(2):
            await command(streams.client, *words.get(how, ("FLUSHALL",)))
            await streams.add(request("a"), "a")
            delivery = await take(transport)
            assert delivery.message_id == "a"
            assert await transport.settle(delivery, Ack()) == Settled(how="ack")

        assert not transport.lost.is_set()
    assert not (await streams.inside()).copies


async def test_an_answer_is_stored_although_everything_was_flushed_meanwhile(
    on_own_redis: tuple[Streams, Redis],
) -> None:
    streams, _ = on_own_redis
    await streams.add(request("a"), "a")
    async with streams.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        hold = await claim(streams, "a")
        await streams.client.flushall()
        await eventually(delivery.lost.is_set, within=5, what="the loss is seen")

        assert await transport.settle(delivery, answer(hold)) == DeliveryLost(stored=True)
        assert await streams.store.read("a") is not None


async def test_a_group_that_is_made_anew_hands_up_nothing_twice(streams: Streams) -> None:
    """It is read from the first entry on again, what is in our hands included."""
    await streams.add(request("a"), "a")
    async with streams.session() as transport, transport.consuming(3):
        held = await take(transport)
        await streams.client.xgroup_destroy(NAMES.stream, NAMES.group)
        await streams.add(request("b"), "b")
        other = await take(transport)
        await nothing_comes(transport)

        assert other.message_id == "b"
        for delivery in (held, other):
            assert await transport.settle(delivery, Ack()) == Settled(how="ack")
    assert not (await streams.inside()).copies


async def test_an_entry_that_was_deleted_while_it_was_pending_is_answered_and_holds_nobody_up(streams: Streams) -> None:
    entry_id = await streams.add(request("a"), "a")
    await streams.add(request("b"), "b")
    async with streams.session() as transport, transport.consuming(2):
        first, second = await take(transport), await take(transport)
        hold = await claim(streams, "a")
        await streams.client.xdel(NAMES.stream, entry_id)

        assert isinstance(await transport.settle(first, answer(hold)), Settled | DeliveryLost)
        assert await streams.store.read("a") is not None
        assert await transport.settle(second, Ack()) == Settled(how="ack")
    inside = await streams.inside()
    assert not inside.copies
    assert not inside.pending


# ---------------------------------------------------------------- holders that sleep


@asynccontextmanager
async def frozen_owner(streams: Streams, redis: Redis) -> AsyncGenerator[tuple[StreamTransport, Delivery, TcpProxy]]:
    """A session whose entry another worker has by now: it has slept for longer than its lease, and has just woken."""
    async with (
        TcpProxy(redis.host, redis.port) as proxy,
        streams.session(proxy.url(streams.url)) as transport,
        transport.consuming(1),
    ):
        stale = await take(transport)
        proxy.freeze()
        yield transport, stale, proxy


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda hold: Ack(), id="acknowledge"),
        pytest.param(lambda hold: Nack(claim=hold), id="give back"),
        pytest.param(retry, id="retry"),
        pytest.param(lambda hold: retry(hold, 30.0), id="retry later"),
        pytest.param(letter, id="dead-letter"),
    ],
)
async def test_a_stale_owner_that_wakes_can_settle_nothing(
    make: Callable[[Hold], Disposition], streams: Streams, redis_server: Redis
) -> None:
    """Its entry was taken over, and its claim with it: nothing that it does may show."""
    await streams.add(request("a"), "a")
    async with frozen_owner(streams, redis_server) as (late, stale, proxy), streams.session() as other:
        old_hold = await claim(streams, "a", token="old")
        async with other.consuming(1):
            theirs = await take(other)
            assert theirs.redelivered
            await asyncio.sleep(LEASE_S)  # The old claim lapses.
            hold = await claim(streams, "a", token="new")
            before = await streams.inside()
            settling = asyncio.create_task(late.settle(stale, make(old_hold)))
            proxy.thaw()
            settlement = await settling

            assert not isinstance(settlement, Settled)
            assert await streams.inside() == before
            assert await streams.store.read("a") is None
            assert await other.settle(theirs, answer(hold)) == Settled(how="ack")
            await eventually(stale.lost.is_set, within=5, what="the late one knows")
            with pytest.raises(TransportLost):
                await late.extend(stale)
    inside = await streams.inside()
    assert not inside.copies
    assert not inside.dead


async def test_a_stale_owner_cannot_settle_what_came_back_to_it(streams: Streams, redis_server: Redis) -> None:
    """The same consumer, but another delivery: its count says so."""
    await streams.add(request("a"), "a")
    async with frozen_owner(streams, redis_server) as (late, stale, proxy):
        async with streams.session() as other, other.consuming(1):
            theirs = await take(other)
            proxy.thaw()
            await eventually(stale.lost.is_set, within=5, what="the late one knows")
            await other.settle(theirs, Nack())
        again = await take(late)

        assert await late.settle(stale, Ack()) == DeliveryLost(stored=False)
        assert await late.settle(stale, Nack()) == DeliveryLost(stored=False)
        assert (await streams.inside()).stream == Counter({"a": 1})
        assert await late.settle(again, Ack()) == Settled(how="ack")
    assert not (await streams.inside()).copies


async def test_a_settlement_by_another_delivery_of_the_entry_does_nothing(streams: Streams) -> None:
    """Right consumer, wrong count: the script sees for itself."""
    entry_id = await streams.add(request("a"), "a")
    async with streams.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        said = await streams.link.run(
            SETTLE, [NAMES.stream, NAMES.dead_letters], NAMES.group, entry_id, transport.consumer, 2
        )

        assert said == [b"THEIRS"]
        assert await transport.settle(delivery, Ack()) == Settled(how="ack")


async def test_a_stale_owners_last_failure_is_stored_and_parked_by_who_has_the_entry(
    streams: Streams, redis_server: Redis
) -> None:
    """Nobody has claimed the request anew: its failure is as good as any, but the entry is not its own to park."""
    await streams.add(request("a"), "a")
    async with frozen_owner(streams, redis_server) as (late, stale, proxy), streams.session() as other:
        hold = await claim(streams, "a")
        async with other.consuming(1):
            theirs = await take(other)
            settling = asyncio.create_task(late.settle(stale, letter(hold)))
            proxy.thaw()

            assert await settling == DeliveryLost(stored=True)
            assert not (await streams.inside()).dead
            settlement = await settled_in_the_end(other, theirs, letter(hold))
            assert settlement == Settled(how="dead_letter")
    inside = await streams.inside()
    assert not inside.copies
    assert inside.dead == Counter({"a": 1})


async def test_a_failure_is_not_retried_while_another_rightly_runs_the_request(streams: Streams) -> None:
    """Our claim has lapsed and went to the holder of a second entry: its answer is waited for."""
    await streams.add(request("a"), "a")
    async with streams.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        await claim(streams, "a", token="other")
        before = await streams.inside()
        settlement = await transport.settle(delivery, retry(Hold("a", Token("mine"))))

        assert isinstance(settlement, Busy)
        assert 0 < settlement.left_s <= LEASE_S
        assert await streams.inside() == before
        await transport.settle(delivery, Nack())


async def test_what_is_held_for_many_leases_stays_its_holders(streams: Streams) -> None:
    """Received or not: the leases of all run anew, while another worker looks for those that lapse."""
    for name in "abc":
        await streams.add(request(name), name)
    async with streams.session() as transport, transport.consuming(3), streams.session() as other, other.consuming(3):
        await eventually(lambda: transport._hands.free, within=5, what="something was read")
        held = [await take(transport)]
        await nothing_comes(other, LEASE_S * 3)
        held += [await take(transport), await take(transport)]

        for delivery in held:
            assert await transport.settle(delivery, Ack()) == Settled(how="ack")
    assert not (await streams.inside()).copies


# ---------------------------------------------------------------- answers that are lost


@pytest.mark.parametrize("fault", [Do.CUT_ON_REPLY, Do.CUT], ids=["it was done", "it was not done"])
@pytest.mark.parametrize(
    ("script", "make", "left"),
    [
        pytest.param(CONCLUDE, answer, {}, id="answer"),
        pytest.param(SETTLE, lambda hold: Ack(), {}, id="acknowledge"),
        pytest.param(RETRY, retry, {"a": 1}, id="retry"),
        pytest.param(RETRY, lambda hold: retry(hold, 30.0), {"a": 1}, id="retry later"),
        pytest.param(HAND_BACK, lambda hold: Nack(claim=hold), {"a": 1}, id="give back"),
        pytest.param(CONCLUDE, letter, {}, id="dead-letter"),
    ],
)
async def test_a_settlement_whose_answer_is_lost_is_done_once(
    script: Script,
    make: Callable[[Hold], Disposition],
    left: dict[str, int],
    fault: Do,
    streams: Streams,
    redis_server: Redis,
    proxy: MakeProxy,
) -> None:
    between = await proxy(redis_server, speaks="redis")
    await streams.add(request("a"), "a")
    async with streams.session(between.url(streams.url)) as transport, transport.consuming(1):
        delivery = await take(transport)
        hold = await claim(streams, "a")
        trap = between.when_client_sends(runs(script), fault)
        settlement = await settled_in_the_end(transport, delivery, make(hold))

        assert trap.hits == 1
        assert isinstance(settlement, Settled)
        assert not transport.lost.is_set()
    inside = await streams.inside()
    parked = isinstance(make(hold), DeadLetter)
    assert inside.copies == Counter(left)
    assert inside.dead == Counter({"a": 1} if parked else {})
    assert await streams.client.xlen("infer_usage:d") == isinstance(make(hold), Ack) * (script is CONCLUDE)


async def test_entries_whose_reply_was_lost_come_back(streams: Streams, redis_server: Redis, proxy: MakeProxy) -> None:
    """They are pending for us, and nobody has them: by the look at what was given back, and by the read itself."""
    between = await proxy(redis_server, speaks="redis")
    await streams.add(request("a"), "a")
    async with streams.session() as first, first.consuming(1):
        await first.settle(await take(first), Nack())
    async with streams.session(between.url(streams.url)) as transport:
        trap = between.when_client_sends(runs(TAKE), Do.CUT_ON_REPLY)
        async with transport.consuming(1):
            await trap.sprung()
            delivery = await take(transport)
            assert await transport.settle(delivery, Ack()) == Settled(how="ack")

    async with streams.session(between.url(streams.url)) as doomed, doomed.consuming(1):
        between.when_server_sends(b"job_id", Do.CUT)
        await streams.add(request("b"), "b")
        await eventually(doomed.lost.is_set, within=5, what="the cut is seen")
    async with streams.session() as last, last.consuming(1):
        assert await last.settle(await take(last), Ack()) == Settled(how="ack")
    inside = await streams.inside()
    assert not inside.copies
    assert not inside.pending


# ---------------------------------------------------------------- a server that will not, or cannot now


async def test_a_wait_for_entries_outlasts_every_read_timeout_of_the_url(streams: Streams) -> None:
    """The driver's own limit is shorter than BLOCK, and nothing is lost by it."""
    async with streams.session(f"{streams.url}?socket_timeout=0.05") as transport, transport.consuming(1):
        await nothing_comes(transport, 0.5)
        await streams.add(request("a"), "a")

        assert await transport.settle(await take(transport), Ack()) == Settled(how="ack")
        assert not transport.lost.is_set()
    assert not (await streams.inside()).copies


async def test_what_other_programs_need_in_the_url_changes_nothing(streams: Streams) -> None:
    """With answers decoded, a worker would look alive and understand none of them."""
    theirs = "decode_responses=True&encoding=ascii&max_connections=1&health_check_interval=1&ssl_cert_reqs=none&word=1"
    async with streams.session(f"{streams.url}?{theirs}") as transport, transport.consuming(1):
        await streams.add(request("a"), "a")
        assert await transport.settle(await take(transport), Ack()) == Settled(how="ack")
    assert not (await streams.inside()).copies


async def test_a_paused_server_costs_time_and_nothing_else(on_own_redis: tuple[Streams, Redis]) -> None:
    """CLIENT PAUSE as a slow script or a slow disk: for longer than a lease, with another worker waiting."""
    streams, _ = on_own_redis
    await streams.add(request("a"), "a")
    async with streams.session() as transport, transport.consuming(1), streams.session() as other, other.consuming(1):
        await eventually(lambda: transport._hands.free or other._hands.free, within=5, what="the entry is read")
        holder = transport if transport._hands.free else other
        delivery = await take(holder)
        hold = await claim(streams, "a")
        await command(streams.client, "CLIENT", "PAUSE", round(LEASE_S * 2500))

        assert await settled_in_the_end(holder, delivery, answer(hold)) is not None
        assert await streams.store.read("a") is not None
        assert not transport.lost.is_set()
        assert not other.lost.is_set()
        for one in (transport, other):
            with_it = asyncio.create_task(drained(one))
            await eventually(lambda: nothing_left(streams), within=5, what="an empty stream")
            with_it.cancel()
            await asyncio.wait([with_it])
    assert await streams.client.xlen("infer_usage:d") == 1


async def drained(transport: Transport) -> None:
    """Acknowledge whatever comes."""
    while True:
        await transport.settle(await transport.receive(), Ack())


async def nothing_left(streams: Streams) -> bool:
    return not (await streams.inside()).copies


async def test_a_session_is_left_in_time_although_redis_hangs(
    streams: Streams, redis_server: Redis, proxy: MakeProxy
) -> None:
    """A stop has 10 s after the grace for everything; what is in hand comes back when its lease has lapsed."""
    between = await proxy(redis_server)
    await streams.add(request("a"), "a")
    async with asyncio.timeout(5.0):
        async with streams.session(between.url(streams.url)) as transport:
            async with transport.consuming(2):
                await take(transport)
                between.freeze()
            assert transport.lost.is_set()
    between.thaw()
    async with streams.session() as other, other.consuming(1):
        assert await other.settle(await take(other), Ack()) == Settled(how="ack")
    assert not (await streams.inside()).copies


async def test_a_session_with_a_server_that_was_demoted_ends_and_says_why(on_own_redis: tuple[Streams, Redis]) -> None:
    """READONLY: the address may lead to the new primary by now, so the connection is not kept."""
    streams, _ = on_own_redis
    await streams.add(request("a"), "a")
    async with streams.session() as transport, transport.consuming(2):
        delivery = await take(transport)
        await command(streams.client, "REPLICAOF", "127.0.0.1", "1")
        await eventually(transport.lost.is_set, within=5, what="the end of the session")

        assert transport.lost_because
        assert delivery.lost.is_set()
        with pytest.raises(TransportLost, match=r"(?i)read.?only"):
            async with streams.session():
                pass
    await command(streams.client, "REPLICAOF", "NO", "ONE")
    async with streams.session() as again, again.consuming(1):
        assert await again.settle(await take(again), Ack()) == Settled(how="ack")
    assert not (await streams.inside()).copies


async def test_a_session_with_a_server_that_refuses_writes_ends_and_says_why(
    on_own_redis: tuple[Streams, Redis],
) -> None:
    """NOREPLICAS stands for its like: MISCONF after a failed save, for example. The connection itself is well."""
    streams, _ = on_own_redis
    async with streams.session() as transport, transport.consuming(2):
        await streams.client.config_set("min-replicas-to-write", "1")
        await eventually(transport.lost.is_set, within=5, what="the end of the session")

        assert "NOREPLICAS" in transport.lost_because
        with pytest.raises(TransportLost, match="NOREPLICAS"):
            async with streams.session():
                pass
    await streams.client.config_set("min-replicas-to-write", "0")
    async with streams.session() as again, again.consuming(1):
        await streams.add(request("a"), "a")
        assert await again.settle(await take(again), Ack()) == Settled(how="ack")


async def test_where_memory_is_full_nothing_is_half_done(on_own_redis: tuple[Streams, Redis]) -> None:
    """Neither a result without its acknowledgement, nor an acknowledgement without its copy."""
    streams, _ = on_own_redis
    for name in "abc":
        await streams.add(request(name), name)
    async with streams.session() as transport, transport.consuming(3):
        held = [await take(transport) for _ in range(3)]
        holds = [await claim(streams, name) for name in "abc"]
        await streams.client.config_set("maxmemory", "1")
        before = await streams.inside()

        assert await transport.settle(held[0], answer(holds[0])) == StoreSilent()
        assert await transport.settle(held[1], letter(holds[1])) == StoreSilent()
        retrying = asyncio.create_task(transport.settle(held[2], retry(holds[2])))
        await asyncio.sleep(0.4)
        assert not retrying.done()
        assert await streams.inside() == before
        assert await streams.client.keys("infer_resp:*") == []

        await streams.client.config_set("maxmemory", "0")
        assert await transport.settle(held[0], answer(holds[0])) == Settled(how="ack")
        assert await transport.settle(held[1], letter(holds[1])) == Settled(how="dead_letter")
        assert await retrying == Settled(how="retry")
        assert not transport.lost.is_set()
    inside = await streams.inside()
    assert inside.copies == Counter({"c": 1})
    assert inside.dead == Counter({"b": 1})


async def test_a_copy_that_cannot_be_placed_goes_back_uncounted(
    on_own_redis: tuple[Streams, Redis], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, _ = on_own_redis
    monkeypatch.setattr(redis_streams, "COPY_S", 0.3)
    await streams.add(request("a"), "a")
    async with streams.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        hold = await claim(streams, "a")
        await streams.client.config_set("maxmemory", "1")

        assert await transport.settle(delivery, retry(hold)) == Settled(how="requeue")
        await streams.client.config_set("maxmemory", "0")
        back = await take(transport)
        assert back.attempts == 0
        assert await streams.store.claim("a", 0, Token("u"), time.time() + 60) == Claimed(starts=1)


async def test_a_copy_that_is_no_attempt_does_not_hide_that_workers_died(streams: Streams) -> None:
    """Else a request that kills its workers would be young again each time that a gate is closed."""
    await streams.add(request("a"), "a")
    name = "a"
    assert await streams.store.claim(name, 0, Token("dead"), time.time() + 60) == Claimed(starts=1)
    await asyncio.sleep(streams.lease_s * 1.2)
    async with streams.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        unclaimed = Hold(name, Token("t"))

        settled = await transport.settle(delivery, Republish(delay_s=0.01, attempts=0, left_s=60, claim=unclaimed))

        assert settled == Settled(how="retry")
        assert (await take(transport)).attempts == 0
        assert await streams.store.claim(name, 0, Token("u"), time.time() + 60) == Claimed(starts=2)


async def test_without_redis_a_message_is_let_go_and_comes_back_when_its_lease_has_lapsed(
    streams: Streams, redis_server: Redis, proxy: MakeProxy
) -> None:
    between = await proxy(redis_server, speaks="redis")
    await streams.add(request("a"), "a")
    async with streams.session(between.url(streams.url)) as transport, transport.consuming(1):
        delivery = await take(transport)
        between.when_client_sends(runs(HAND_BACK), Do.CUT, times=2)

        assert await transport.settle(delivery, Nack()) == Settled(how="requeue")
        assert await transport.settle(delivery, Ack()) == DeliveryLost(stored=False)
        assert (await take(transport)).redelivered
    assert (await streams.inside()).copies == Counter({"a": 1})


async def test_a_cluster_is_refused_with_a_reason(own_redis: OwnRedis) -> None:
    """A script may not touch keys of several slots there."""
    # Its bus would be on a port 10,000 higher, which may be somebody's.
    server = await own_redis("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    async with RedisClient.from_url(server.url, socket_timeout=None) as client:
        await command(client, "CLUSTER", "ADDSLOTSRANGE", 0, 16383)

        async def up() -> bool:
            return "cluster_state:ok" in str(await command(client, "CLUSTER", "INFO"))

        await eventually(up, within=10, what="the cluster")
    async with streams_at(server.url) as made:
        with pytest.raises(TransportLost, match=r"(?i)slot"):
            async with made.session():
                pass


@pytest.mark.parametrize("lacking", ["xpending", "xclaim", "xadd", "zadd", "xack", "xdel", "xreadgroup", "evalsha"])
async def test_a_user_who_lacks_a_command_loses_and_doubles_nothing(
    lacking: str, on_own_redis: tuple[Streams, Redis]
) -> None:
    """What may not be looked at is not taken for nothing; all goes on once the command is allowed."""
    streams, server = on_own_redis
    await command(streams.client, "ACL", "SETUSER", "worker", "reset", "on", ">pw", "~*", "&*", "+@all")
    for name in "abc":
        await streams.add(request(name), name)
    url = server.url.replace("redis://", "redis://worker:pw@")
    async with streams.session(url) as transport, transport.consuming(3):
        held = [await take(transport) for _ in range(3)]
        holds = [await claim(streams, name) for name in "abc"]
        await command(streams.client, "ACL", "SETUSER", "worker", f"-{lacking}")
        made: list[Disposition] = [answer(holds[0]), retry(holds[1], 0.1), letter(holds[2])]
        ends = [settled_in_the_end(transport, *pair) for pair in zip(held, made, strict=True)]
        settling = [asyncio.create_task(end) for end in ends]
        await asyncio.sleep(0.2)
        await command(streams.client, "ACL", "SETUSER", "worker", f"+{lacking}")
        await asyncio.gather(*settling)

    async def three_ends() -> bool:
        inside = await streams.inside()
        return inside.copies == Counter({"b": 1}) and inside.dead == Counter({"c": 1})

    async with streams.session() as other, other.consuming(3):
        clearing = asyncio.create_task(settled_by_their_results(streams, other))
        await eventually(three_ends, within=5, what="one copy and one dead letter")
        clearing.cancel()
        await asyncio.wait([clearing])
    assert await streams.store.read("a") is not None
    assert await streams.client.xlen("infer_usage:d") == 1


async def settled_by_their_results(streams: Streams, transport: Transport) -> None:
    """What was answered is acknowledged or parked; what was not stays in our hands."""
    while True:
        delivery = await transport.receive()
        known = await streams.store.known(delivery.message_id or "")
        if known is not None and known.error_code == "retries_exhausted":
            await transport.settle(
                delivery, DeadLetter(reason="retries_exhausted", detail="", attempts=1, status_code=500)
            )
        elif known is not None:
            await transport.settle(delivery, Ack())


async def test_the_permissions_that_the_docs_name_are_enough(
    on_own_redis: tuple[Streams, Redis], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through every script, and what the worker's store does beside."""
    streams, server = on_own_redis
    monkeypatch.setattr(redis_streams, "TIDY_S", 0.0)
    page = (ROOT / "docs" / "redis.md").read_text()
    for block in re.findall(r"^```\n(ACL SETUSER worker.*?)^```", page, re.MULTILINE | re.DOTALL):
        await command(streams.client, *block.replace("DEPLOYMENT_ID", "d").split())
    url = server.url.replace("redis://", "redis://worker:PASSWORD@")
    for name in "abc":
        await streams.client.xadd(NAMES.stream, {"job_id": name, "request": request(name)})
    async with (
        streams_at(url, lease_s=LEASE_S) as limited,
        limited.session(url) as transport,
        transport.consuming(3),
    ):
        held = [await take(transport) for _ in range(3)]
        holds = [await claim(limited, name) for name in "abc"]
        assert await transport.settle(held[0], answer(holds[0])) == Settled(how="ack")
        assert await transport.settle(held[1], retry(holds[1], 0.05)) == Settled(how="retry")
        assert await transport.settle(held[2], letter(holds[2])) == Settled(how="dead_letter")
        copy = await take(transport)
        assert await transport.settle(copy, Nack(claim=await claim(limited, "b", 1))) == Settled(how="requeue")
        again = await take(transport)
        assert await transport.settle(again, retry(await claim(limited, "b", 1, "v"))) == Settled(how="retry")
        await transport.extend(await take(transport))
        await transport.backlog()
        await nothing_comes(transport, LEASE_S)

    refused: list[dict[str, object]] = await streams.client.acl_log()  # type: ignore[assignment]  # The driver's own gap.
    assert [entry["object"] for entry in refused if entry["object"] != "client|setinfo"] == []
    assert (await streams.inside()).copies == Counter({"b": 1})


# ---------------------------------------------------------------- who has what


async def short_jobs(streams: Streams, transport: Transport, jobs: int = 8) -> None:
    """Have some jobs done at once, so that reading ahead pays."""
    for _ in range(jobs):
        await streams.add(request("short"), "short")
        assert await transport.settle(await take(transport), Ack()) == Settled(how="ack")


async def test_what_was_read_ahead_goes_to_others_once_jobs_are_long(streams: Streams) -> None:
    async with AsyncExitStack() as stack:
        busy = await stack.enter_async_context(streams.session())
        await stack.enter_async_context(busy.consuming(2))
        await short_jobs(streams, busy)
        for name in "abcd":
            await streams.add(request(name), name)
        held = [await take(busy), await take(busy)]
        await eventually(lambda: len(busy._hands.everything()) == 4, within=5, what="two are read ahead")

        idle = await stack.enter_async_context(streams.session())
        await stack.enter_async_context(idle.consuming(2))
        got = [await take(idle, 4), await take(idle, 4)]

        assert {delivery.message_id for delivery in [*held, *got]} == set("abcd")
        assert all(delivery.attempts == 0 for delivery in got)
        for delivery in held:
            assert await busy.settle(delivery, Ack()) == Settled(how="ack")
        for delivery in got:
            assert await idle.settle(delivery, Ack()) == Settled(how="ack")
    assert not (await streams.inside()).copies


async def test_leaving_gives_back_also_what_was_read_ahead(streams: Streams) -> None:
    async with streams.session() as transport, streams.session() as other:
        async with transport.consuming(2):
            await short_jobs(streams, transport)
            for name in "abcd":
                await streams.add(request(name), name)
            await eventually(lambda: len(transport._hands.everything()) >= 3, within=5, what="some are read ahead")
        async with other.consuming(4):
            got = [await take(other) for _ in range(4)]
            assert {delivery.message_id for delivery in got} == set("abcd")
            for delivery in got:
                assert await other.settle(delivery, Ack()) == Settled(how="ack")
    assert not (await streams.inside()).copies


async def test_a_session_that_ends_gives_back_all_it_has_and_takes_its_consumer_along(streams: Streams) -> None:
    """At once: nobody waits for its lease."""
    streams.lease_s = 60.0
    for name in "abc":
        await streams.add(request(name), name)
    async with streams.session() as transport, transport.consuming(2):
        await take(transport)
    consumers = await streams.client.xinfo_consumers(NAMES.stream, NAMES.group)

    assert [one["name"] for one in consumers] == [RETURNED.encode()]
    assert (await streams.inside()).pending.total() >= 1
    async with streams.session() as other, other.consuming(3):
        for _ in range(3):
            assert await other.settle(await take(other), Ack()) == Settled(how="ack")
    assert not (await streams.inside()).copies


async def test_only_a_consumer_for_which_nothing_is_pending_is_removed(streams: Streams) -> None:
    """Its entries would go with it, and nobody would ever hear of them again."""
    await streams.add(request("a"), "a")
    async with streams.session() as transport, transport.consuming(1):
        await take(transport)
        await streams.client.xgroup_createconsumer(NAMES.stream, NAMES.group, "old")
        await asyncio.sleep(0.02)
        gone = await streams.link.run(TIDY, [NAMES.stream], NAMES.group, RETURNED, 10)
        left = {one["name"] for one in await streams.client.xinfo_consumers(NAMES.stream, NAMES.group)}

        assert gone == 1
        assert transport.consumer.encode() in left
        assert b"old" not in left


async def test_leaving_and_giving_back_wait_for_no_block(streams: Streams) -> None:
    """The wait for new entries is ended, in place of being waited for."""
    streams.lease_s = 60.0
    await streams.add(request("a"), "a")
    async with streams.session() as transport:
        async with asyncio.timeout(0.7):
            async with transport.consuming(2):
                await transport.settle(await take(transport), Nack())
                delivery = await take(transport)
        assert await transport.settle(delivery, Ack()) == Settled(how="ack")


async def test_a_retry_for_later_comes_when_it_is_due_and_not_at_the_next_look(streams: Streams) -> None:
    streams.lease_s = 60.0
    async with streams.session() as transport, transport.consuming(1):
        await nothing_comes(transport, 0.05)
        for _ in range(3):
            await streams.add(request("a"), "a")
            delivery = await take(transport)
            settlement = await transport.settle(delivery, retry(await claim(streams, "a"), 0.05))
            assert settlement == Settled(how="retry")
            async with asyncio.timeout(0.5):
                copy = await transport.receive()
            await transport.settle(copy, Ack())
            await streams.client.delete(claim_key("a"))
    assert not (await streams.inside()).copies


async def test_a_user_who_may_not_unblock_leaves_a_moment_later_and_loses_nothing(
    on_own_redis: tuple[Streams, Redis],
) -> None:
    streams, server = on_own_redis
    for lacking in ("-client|unblock", "-client|id"):
        await command(streams.client, "ACL", "SETUSER", "worker", "reset", "on", ">pw", "~*", "&*", "+@all", lacking)
        url = server.url.replace("redis://", "redis://worker:pw@")
        async with streams.session(url) as transport:
            async with transport.consuming(1):
                await nothing_comes(transport, 0.1)
            async with transport.consuming(1):
                await streams.add(request("a"), "a")
                assert await transport.settle(await take(transport), Ack()) == Settled(how="ack")
            assert not transport.lost.is_set()
    assert not (await streams.inside()).copies


async def test_the_limit_lowered_gives_the_surplus_back(streams: Streams) -> None:
    for name in "abcd":
        await streams.add(request(name), name)
    async with streams.session() as transport, transport.consuming(4), streams.session() as other:
        first = await take(transport)
        await eventually(lambda: len(transport._hands.everything()) == 4, within=5, what="all are read")
        await transport.set_limit(1)
        assert (await streams.inside()).pending == Counter({RETURNED: 3, transport.consumer: 1})
        async with other.consuming(4):
            got = [await take(other) for _ in range(3)]

            assert first.message_id not in {delivery.message_id for delivery in got}
            for delivery in got:
                assert await other.settle(delivery, Ack()) == Settled(how="ack")
        assert await transport.settle(first, Ack()) == Settled(how="ack")
    assert not (await streams.inside()).copies


# ---------------------------------------------------------------- what is written


async def test_a_dead_letter_has_the_entry_and_what_became_of_it(streams: Streams) -> None:
    body = request("a")
    await streams.add(body, "a", traceparent="00-x")
    async with streams.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        await transport.settle(delivery, letter(await claim(streams, "a")))

    ((_, fields),) = await entries_of(streams.client, NAMES.dead_letters)
    note = json.loads(await streams.client.get("infer_dead:a") or b"{}")
    assert fields[b"request"] == body
    assert fields[b"job_id"] == b"a"
    assert fields[b"traceparent"] == b"00-x"
    assert (fields[b"reason"], fields[b"attempts"], fields[b"status_code"]) == (b"retries_exhausted", b"1", b"500")
    assert (note["reason"], note["attempts"]) == ("retries_exhausted", 1)
    assert await streams.client.ttl("infer_dead:a") > 29 * 86_400


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
async def test_a_copy_keeps_every_field_but_the_attempt(delay_s: float, streams: Streams) -> None:
    body = request("a") + b"\xff\x00"
    await streams.add(body, "a", traceparent="00-x", other="ü")
    async with streams.session() as transport, transport.consuming(1):
        first = await take(transport)
        ((_, before),) = await entries_of(streams.client, NAMES.stream)
        await transport.settle(first, retry(await claim(streams, "a"), delay_s))
        second = await take(transport)
        ((_, after),) = await entries_of(streams.client, NAMES.stream)

        assert after == before | {b"attempt": b"1"}
        assert (second.body, second.headers, second.attempts) == (body, first.headers, 1)
        assert await streams.store.claim("a", 0, Token("u"), time.time() + 60) == BelowFloor()


async def test_an_entry_without_a_request_is_handed_up_empty(streams: Streams) -> None:
    """So that the processor has it dead-lettered, in place of silence."""
    await streams.client.xadd(NAMES.stream, {"something": "else"})
    async with streams.session() as transport, transport.consuming(1):
        delivery = await take(transport)

        assert delivery.body == b""
        assert delivery.headers == {"something": "else"}
        parked = DeadLetter(reason="invalid_request", detail="", attempts=0, status_code=400)
        assert await transport.settle(delivery, parked) == Settled(how="dead_letter")
    ((_, fields),) = await entries_of(streams.client, NAMES.dead_letters)
    assert fields[b"something"] == b"else"


async def test_what_is_no_retry_among_the_delayed_ones_is_parked_and_stops_nothing(streams: Streams) -> None:
    # No list; a list of an even number; one with a number in it; one with a list in it.
    odd: tuple[bytes, ...] = (
        b"\xff\x00 garbage",
        b"\x94\xa1a\xa1b\xa1c\xa1d",
        b"\x93\xa1a\x01\x02",
        b"\x93\xa1a\x91\xa1b\xa1c",
    )
    await streams.client.zadd(delayed_key(NAMES.stream), {member: n for n, member in enumerate(odd, 1)})
    await streams.add(request("a"), "a")
    async with streams.session() as transport, transport.consuming(1):
        assert await transport.settle(await take(transport), Ack()) == Settled(how="ack")
    assert await streams.client.xlen(NAMES.dead_letters) == len(odd)
    assert not await streams.client.exists(delayed_key(NAMES.stream))


async def test_the_backlog_tells_new_given_back_held_and_delayed_apart(streams: Streams) -> None:
    before = await stream_backlog(streams.link, NAMES)
    assert (before.ready, before.oldest_s) == (0, None)
    for n in range(6):
        await streams.add(request(str(n)), str(n))
    without_group = await stream_backlog(streams.link, NAMES)
    assert (without_group.ready, without_group.in_flight) == (6, 0)
    async with streams.session() as transport:
        async with transport.consuming(3):
            held = [await take(transport) for _ in range(3)]
        await transport.settle(held[0], Nack())
        await transport.settle(held[1], retry(await claim(streams, "1"), 60.0))
        now = await transport.backlog()

        assert (now.ready, now.in_flight, now.delayed, now.how) == (4, 1, 1, "lag")
        assert now.oldest_s is not None
        assert 0 <= now.oldest_s < 30
        entries = await entries_of(streams.client, NAMES.stream)
        await streams.client.xdel(NAMES.stream, entries[-2][0])
        cut = await transport.backlog()
        assert (cut.ready, cut.in_flight, cut.how) == (3, 1, "length")


@pytest.mark.parametrize(
    "said", [b"nan", b"-inf", b"1e400", b"-1e308", b"0x10", b"0x1p-3", b" 5 ", b"5\x00", b"\xff", b"", b"1" * 5000]
)
async def test_an_odd_time_of_an_entry_blinds_nobody_who_counts(said: bytes, streams: Streams) -> None:
    """Lua takes for numbers what Python does not, and the other way round; whoever may XADD may write anything."""
    await streams.client.xadd(NAMES.stream, {"request": request("a"), "enqueued_at": said})
    waiting = await stream_backlog(streams.link, NAMES)
    async with streams.session() as transport, transport.consuming(1):
        await transport.settle(await take(transport), Nack())
        given_back = await transport.backlog()

    for seen in (waiting, given_back):
        assert seen.ready == 1
        assert seen.oldest_s is not None
        assert 0 <= seen.oldest_s < math.inf


async def test_whether_anything_waits_is_right_whatever_others_deleted(streams: Streams) -> None:
    """A scaler that sees 0 where work waits stops the last worker; one that sees work where none is keeps them all."""
    client = streams.client
    await client.xgroup_create(NAMES.stream, NAMES.group, "0", mkstream=True)
    for _ in range(3):
        await client.xadd(NAMES.stream, {"request": "x"})
    await client.xreadgroup(NAMES.group, "somebody", {NAMES.stream: ">"})
    await client.xtrim(NAMES.stream, 0)
    await client.xadd(NAMES.stream, {"request": "x"})
    last = await client.xadd(NAMES.stream, {"request": "x"})
    await client.xdel(NAMES.stream, last)
    trimmed = await stream_backlog(streams.link, NAMES)

    await client.xreadgroup(NAMES.group, "somebody", {NAMES.stream: ">"})
    for row in await client.xpending_range(NAMES.stream, NAMES.group, "-", "+", 10):
        await client.xack(NAMES.stream, NAMES.group, row["message_id"])
    last = await client.xadd(NAMES.stream, {"request": "x"})
    await client.xdel(NAMES.stream, last)
    acknowledged = await stream_backlog(streams.link, NAMES)

    assert trimmed.ready == 1
    assert await client.xlen(NAMES.stream) == 1
    assert (acknowledged.ready, acknowledged.oldest_s) == (0, None)


async def test_what_was_given_back_is_taken_as_fast_as_it_is_done(streams: Streams) -> None:
    """And first, although new entries never cease: not so many with each look, of which there are few a second."""
    for n in range(100):
        await streams.add(request(f"old-{n}"), f"old-{n}")
    async with streams.session() as large, large.consuming(100):
        for _ in range(100):
            await take(large)
    for n in range(100):
        await streams.add(request(f"new-{n}"), f"new-{n}")
    came: list[str] = []
    async with streams.session() as small, small.consuming(1):
        async with asyncio.timeout(3.0):
            while len(came) < 110:
                delivery = await small.receive()
                came.append(str(delivery.message_id))
                await small.settle(delivery, Ack())

    assert sum(name.startswith("old") for name in came) == 100


async def test_large_entries_are_read_a_few_at_a_time(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer with all of them might never arrive in its time, and would be asked for again for ever."""
    monkeypatch.setattr(redis_streams, "MOST_BYTES", 1_000_000)
    for n in range(12):
        await streams.add(request(f"{n}") + b" " * 300_000, f"{n}")
    async with streams.session() as first, first.consuming(12):
        for _ in range(12):
            await take(first)
    async with streams.session() as transport:
        transport._hands.limit = 12
        await transport._take(12)
        assert len(transport._hands.everything()) == 4
        async with transport.consuming(12):
            for _ in range(12):
                await transport.settle(await take(transport), Ack())
    assert not (await streams.inside()).copies
