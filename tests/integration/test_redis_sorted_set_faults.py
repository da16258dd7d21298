"""A queue in a sorted set whose workers die, sleep or hear no answer at every step, and a Redis that will not.

Each test ends with a look at everything: one result for each request, and no claim, note or copy left behind.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest

from inference_worker.disposition import (
    Ack,
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
from inference_worker.ports import AlreadyAnswered, BelowFloor, Claimed, Delivery, Transport
from inference_worker.redis_scripts import Script
from inference_worker.results.redis import claim_key
from inference_worker.transports import redis_sorted_set
from inference_worker.transports.redis_sorted_set import SortedSetTransport
from inference_worker.transports.sorted_set_scripts import (
    CONCLUDE,
    HAND_BACK,
    KEEP,
    LEAVE,
    RETRY,
    SETTLE,
    SORTED_SET_SCRIPTS,
    TAKE,
)
from tests.faults.proxy import Do, TcpProxy, Unit, Way
from tests.integration.conftest import MakeProxy, OwnRedis
from tests.services import Redis, free_port
from tests.sorted_set_kit import QUEUE, SortedSets, sorted_sets_at
from tests.transport_contract import failed, nothing_comes, reply, take
from tests.waiting import eventually

LEASE_S = 0.5


@pytest.fixture
async def sets(redis_url: str) -> AsyncGenerator[SortedSets]:
    async with sorted_sets_at(redis_url, lease_s=LEASE_S) as made:
        yield made


@pytest.fixture
async def on_own_redis(own_redis: OwnRedis) -> AsyncGenerator[tuple[SortedSets, Redis]]:
    """A queue on a Redis of this test's own."""
    server = await own_redis()
    async with sorted_sets_at(server.url, lease_s=LEASE_S) as made:
        yield made, server


async def claim(sets: SortedSets, delivery: Delivery, token: str = "h") -> Hold:
    """Claim a request as the processor does."""
    assert delivery.request is not None
    generation = delivery.request.request_id
    answer = await sets.store.claim(generation, delivery.attempts, Token(token), time.time() + 600)
    assert isinstance(answer, Claimed)
    return Hold(generation, Token(token))


def runs(script: Script) -> Callable[[Unit], bool]:
    return lambda unit: script.sha.encode() in unit.args


def answer(hold: Hold) -> Ack:
    return Ack(reply=reply(hold.request_id), usage_event=b'{"id":"e"}', claim=hold)


def retry(hold: Hold, delay_s: float = 0.0) -> Republish:
    return Republish(delay_s=delay_s, attempts=1, left_s=60, claim=hold)


def letter(hold: Hold) -> DeadLetter:
    end = failed(hold.request_id)
    return DeadLetter(reason="retries_exhausted", detail="no", attempts=1, status_code=500, reply=end, claim=hold)


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


async def work(sets: SortedSets, transport: Transport) -> None:
    """Answer whatever comes, as a worker does."""
    turn = 0
    while True:
        delivery = await transport.receive()
        assert delivery.request is not None
        turn += 1
        token = Token(f"survivor-{turn}")
        generation = delivery.request.request_id
        seen = await sets.store.claim(generation, delivery.attempts, token, time.time() + 600)
        match seen:
            case Claimed():
                await settled_in_the_end(transport, delivery, answer(Hold(generation, token)))
            case AlreadyAnswered(reply=known) if known.error_code == "retries_exhausted":
                dead = DeadLetter(reason="retries_exhausted", detail="found", attempts=1, status_code=500)
                await settled_in_the_end(transport, delivery, dead)
            case AlreadyAnswered() | BelowFloor():
                await settled_in_the_end(transport, delivery, Ack())
            case _:
                await asyncio.sleep(0.05)
                await transport.settle(delivery, Nack())


async def conserved(sets: SortedSets, *names: str, dead: int = 0) -> None:
    """Have a worker finish what there is; then each request has one result, and nothing else is left."""

    async def done() -> bool:
        inside = await sets.inside()
        return not inside.copies and (inside.owners, inside.indexed, inside.notes) == (0, 0, 0)

    async with sets.session() as survivor, survivor.consuming(4):
        working = asyncio.create_task(work(sets, survivor))
        try:
            await eventually(done, within=10, what="an empty queue")
        finally:
            working.cancel()
            await asyncio.wait([working])
    results = await sets.results()
    assert Counter(str(result["id"]) for result in results) == Counter(names)
    assert (await sets.inside()).dead.total() == dead
    assert await sets.client.keys("request-active:*") == []


# ---------------------------------------------------------------- workers that die


@pytest.mark.parametrize("done", [False, True], ids=["before it", "after it"])
@pytest.mark.parametrize(
    ("script", "make"),
    [
        pytest.param(TAKE, None, id="claim"),
        pytest.param(CONCLUDE, answer, id="answer"),
        pytest.param(SETTLE, None, id="acknowledge"),
        pytest.param(RETRY, retry, id="retry"),
        pytest.param(RETRY, lambda hold: retry(hold, 0.3), id="retry later"),
        pytest.param(HAND_BACK, lambda hold: Nack(claim=hold), id="give back"),
        pytest.param(CONCLUDE, letter, id="dead-letter"),
        pytest.param(KEEP, None, id="renew"),
        pytest.param(LEAVE, None, id="leave"),
    ],
)
async def test_a_worker_that_dies_at_any_step_loses_and_doubles_nothing_case_352(
    script: Script,
    make: Callable[[Hold], Disposition] | None,
    done: bool,
    sets: SortedSets,
    redis_server: Redis,
    proxy: MakeProxy,
) -> None:
    between = await proxy(redis_server, speaks="redis")
    sprung = asyncio.Event()

    def look(unit: Unit) -> bool:
        """The command does not arrive; or its answer does not, nor does anything after it."""
        if not runs(script)(unit):
            return False
        sprung.set()
        if done:
            between.freeze(Way.DOWN)
        return not done

    async with sets.session(between.url(sets.url)) as doomed, doomed.consuming(2):
        await eventually(lambda: doomed._dry, within=5, what="an idle reader")
        if script is TAKE:
            between.when_client_sends(look, Do.FREEZE)
            await sets.submit("a", "tok")
        else:
            await sets.submit("a", "tok")
            delivery = await take(doomed)
            hold = await claim(sets, delivery)
            between.when_client_sends(look, Do.FREEZE)
            if script not in (KEEP, LEAVE):
                end = make(hold) if make is not None else Ack()
                settling = asyncio.create_task(doomed.settle(delivery, end))
                await eventually(sprung.is_set, within=5, what="the step")
                await asyncio.sleep(0.02)  # Done, where it is to be done.
                settling.cancel()
                await asyncio.wait([settling])
        if script is not LEAVE:
            await eventually(sprung.is_set, within=5, what="the step")
            await asyncio.sleep(0.02)
            await between.refuse()
            await between.cut()
    await between.cut()
    between.thaw()
    await between.accept()
    if script is SETTLE and done:
        # Acknowledged without an answer, which only a request with a copy elsewhere is: nothing is left of it.
        await sets.client.delete("request-active:a")
        await conserved(sets)
        return
    await conserved(sets, "a", dead=1 if script is CONCLUDE and make is letter and done else 0)


@pytest.mark.parametrize("fault", [Do.CUT_ON_REPLY, Do.CUT], ids=["it was done", "it was not done"])
@pytest.mark.parametrize(
    ("script", "make", "results", "dead"),
    [
        pytest.param(CONCLUDE, answer, 1, 0, id="answer"),
        pytest.param(RETRY, retry, 0, 0, id="retry"),
        pytest.param(RETRY, lambda hold: retry(hold, 30.0), 0, 0, id="retry later"),
        pytest.param(HAND_BACK, lambda hold: Nack(claim=hold), 0, 0, id="give back"),
        pytest.param(CONCLUDE, letter, 1, 1, id="dead-letter"),
        pytest.param(SETTLE, lambda hold: Ack(), 0, 0, id="acknowledge"),
    ],
)
async def test_a_settlement_whose_answer_is_lost_is_done_once_case_80(
    script: Script,
    make: Callable[[Hold], Disposition],
    results: int,
    dead: int,
    fault: Do,
    sets: SortedSets,
    redis_server: Redis,
    proxy: MakeProxy,
) -> None:
    between = await proxy(redis_server, speaks="redis")
    await sets.submit("a", "tok")
    async with sets.session(between.url(sets.url)) as transport, transport.consuming(1):
        delivery = await take(transport)
        hold = await claim(sets, delivery)
        trap = between.when_client_sends(runs(script), fault)
        settlement = await settled_in_the_end(transport, delivery, make(hold))

        assert trap.hits == 1
        # The copy of a retry that is not for later may be in somebody's hands already, when it is asked for again.
        assert isinstance(settlement, Settled | DeliveryLost if make is retry else Settled)
    inside = await sets.inside()
    left = script in (RETRY, HAND_BACK)
    assert inside.copies == Counter({"a": 1} if left else {})
    assert inside.dead.total() == dead
    assert len(await sets.results()) == results
    assert await sets.client.xlen("infer_usage:d") == (make is answer)
    if left:
        for member, _ in await sets.scored(QUEUE.retries):
            await sets.client.zadd(QUEUE.retries, {member: 1})
        await conserved(sets, "a")


async def test_claims_whose_answer_was_lost_come_back_at_the_next_look(
    sets: SortedSets, redis_server: Redis, proxy: MakeProxy
) -> None:
    """They are ours, and nobody has them: their lease, of minutes perhaps, is not waited for."""
    sets.lease_s = 60.0
    between = await proxy(redis_server, speaks="redis")
    await sets.submit("a", "tok")
    async with sets.session(between.url(sets.url)) as transport:
        trap = between.when_client_sends(runs(TAKE), Do.CUT_ON_REPLY)
        async with transport.consuming(1):
            await trap.sprung()
            delivery = await take(transport, 3)
            assert delivery.redelivered
            await transport.settle(delivery, Nack())
    await conserved(sets, "a")


async def test_what_a_session_takes_again_is_another_delivery_case_344(sets: SortedSets) -> None:
    """Its renewals came too late, and nobody else was there: the first one is nobody's, the second is handed up."""
    await sets.submit("a", "tok")
    async with sets.session() as transport, transport.consuming(2):
        stale = await take(transport)
        await sets.client.zadd(f"{QUEUE.name}:claims-idx", {"a\0tok": time.time() - 1})
        await transport._take(2)
        again = await take(transport)

        assert stale.lost.is_set()
        assert not again.lost.is_set()
        assert await transport.settle(stale, Ack()) == DeliveryLost(stored=False)
        assert await transport.settle(again, Nack()) == Settled(how="requeue")
    await conserved(sets, "a")


async def test_a_copy_that_its_own_session_takes_before_it_knows_of_it_is_handed_up(
    sets: SortedSets, redis_server: Redis, proxy: MakeProxy
) -> None:
    """The retry was done, its answer was lost, and the copy has the claim's id: its lease is not waited for."""
    sets.lease_s = 60.0
    between = await proxy(redis_server, speaks="redis")
    await sets.submit("a", "tok")
    async with sets.session(between.url(sets.url)) as transport, transport.consuming(1):
        delivery = await take(transport)
        hold = await claim(sets, delivery)
        between.when_client_sends(runs(RETRY), Do.CUT_ON_REPLY)
        assert isinstance(await settled_in_the_end(transport, delivery, retry(hold)), Settled | DeliveryLost)
        copy = await take(transport, 3)
        assert copy.attempts == 1
        await transport.settle(copy, Nack())
    await conserved(sets, "a")


async def test_a_payload_that_cannot_be_fetched_gives_the_whole_batch_back_case_62(
    sets: SortedSets, redis_server: Redis, proxy: MakeProxy
) -> None:
    sets.lease_s = 60.0
    between = await proxy(redis_server, speaks="redis")
    ref = "request-payload:a:tok"
    await sets.client.set(ref, "{}")
    head = f'{{"internal":{{"request_token":"tok","payload_ref":"{ref}"}},"request_kind":"redis",'
    rest = f'"data":{{"id":"a","created":1,"deadline":{int(time.time()) + 600},"payload":null}}}}'
    await sets.client.zadd(QUEUE.name, {(head + rest).encode(): 1})
    async with sets.session(between.url(sets.url)) as transport:
        trap = between.when_client_sends(lambda unit: unit.args[:1] == (b"MGET",), Do.CUT)
        async with transport.consuming(1):
            await trap.sprung()
            delivery = await take(transport, 3)
            assert delivery.request is not None
            assert delivery.request.payload == b"{}"
    await conserved(sets, "a")


# ---------------------------------------------------------------- holders that sleep


@asynccontextmanager
async def frozen_owner(sets: SortedSets, redis: Redis) -> AsyncGenerator[tuple[SortedSetTransport, Delivery, TcpProxy]]:
    """A session that sleeps for longer than its lease."""
    async with (
        TcpProxy(redis.host, redis.port) as proxy,
        sets.session(proxy.url(sets.url)) as transport,
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
    make: Callable[[Hold], Disposition], sets: SortedSets, redis_server: Redis
) -> None:
    await sets.submit("a", "tok")
    async with frozen_owner(sets, redis_server) as (late, stale, proxy), sets.session() as other:
        old_hold = await claim(sets, stale, "old")
        async with other.consuming(1):
            theirs = await take(other)
            assert theirs.redelivered
            await asyncio.sleep(LEASE_S)  # The old hold lapses.
            hold = await claim(sets, theirs, "new")
            before = await sets.inside()
            settling = asyncio.create_task(late.settle(stale, make(old_hold)))
            proxy.thaw()
            settlement = await settling

            assert not isinstance(settlement, Settled)
            assert await sets.inside() == before
            assert await sets.results() == []
            assert await other.settle(theirs, answer(hold)) == Settled(how="ack")
            await eventually(stale.lost.is_set, within=5, what="the late one knows")
            with pytest.raises(TransportLost):
                await late.extend(stale)
    await conserved(sets, "a")


async def test_a_stale_owners_answer_is_sent_by_who_has_the_claim(sets: SortedSets, redis_server: Redis) -> None:
    await sets.submit("a", "tok")
    async with frozen_owner(sets, redis_server) as (late, stale, proxy), sets.session() as other:
        hold = await claim(sets, stale)
        async with other.consuming(1):
            theirs = await take(other)
            settling = asyncio.create_task(late.settle(stale, answer(hold)))
            proxy.thaw()
            assert await settling == DeliveryLost(stored=True)
            assert await sets.results() == []
            assert isinstance(await settled_in_the_end(other, theirs, answer(hold)), Settled)
    await conserved(sets, "a")
    assert await sets.client.xlen("infer_usage:d") == 1


async def test_what_is_held_for_many_leases_stays_its_holders(sets: SortedSets) -> None:
    for name in "abc":
        await sets.submit(name, "tok")
    async with sets.session() as transport, transport.consuming(3), sets.session() as other, other.consuming(3):
        held = []
        for _ in range(3):
            holder = transport if transport._hands.everything() else other
            held.append((holder, await take(holder)))
        idle = other if held[0][0] is transport else transport
        await nothing_comes(idle, LEASE_S * 3)
        for holder, delivery in held:
            assert await holder.settle(delivery, answer(await claim(sets, delivery))) == Settled(how="ack")
    await conserved(sets, "a", "b", "c")


# ---------------------------------------------------------------- a server that will not, or cannot now


async def test_where_memory_is_full_nothing_is_half_done_case_74_354(on_own_redis: tuple[SortedSets, Redis]) -> None:
    sets, _ = on_own_redis
    for name in "abc":
        await sets.submit(name, "tok")
    async with sets.session() as transport, transport.consuming(3):
        held = [await take(transport) for _ in range(3)]
        holds = [await claim(sets, delivery, f"h{n}") for n, delivery in enumerate(held)]
        await sets.client.config_set("maxmemory", "1")
        before = await sets.inside()

        assert await transport.settle(held[0], answer(holds[0])) == StoreSilent()
        assert await transport.settle(held[1], letter(holds[1])) == StoreSilent()
        retrying = asyncio.create_task(transport.settle(held[2], retry(holds[2])))
        await asyncio.sleep(0.3)
        assert not retrying.done()
        assert await sets.inside() == before
        assert await sets.results() == []

        await sets.client.config_set("maxmemory", "0")
        assert await transport.settle(held[0], answer(holds[0])) == Settled(how="ack")
        assert await transport.settle(held[1], letter(holds[1])) == Settled(how="dead_letter")
        assert await retrying == Settled(how="retry")
    await conserved(sets, "a", "b", "c", dead=1)


async def test_a_copy_that_cannot_be_placed_goes_back_uncounted(
    on_own_redis: tuple[SortedSets, Redis], monkeypatch: pytest.MonkeyPatch
) -> None:
    sets, _ = on_own_redis
    monkeypatch.setattr(redis_sorted_set, "COPY_S", 0.3)
    await sets.submit("a", "tok")
    async with sets.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        hold = await claim(sets, delivery)
        await sets.client.config_set("maxmemory", "1")

        assert await transport.settle(delivery, retry(hold)) == Settled(how="requeue")
        await sets.client.config_set("maxmemory", "0")
        back = await take(transport)
        assert back.attempts == 0
        await transport.settle(back, Nack())
    await sets.client.delete(claim_key(hold.request_id))
    await conserved(sets, "a")


@pytest.mark.parametrize("how", ["READONLY", "NOREPLICAS"])
async def test_a_session_with_a_server_that_refuses_writes_goes_on_where_it_takes_them_again_case_354(
    how: str, on_own_redis: tuple[SortedSets, Redis]
) -> None:
    sets, _ = on_own_redis
    await sets.submit("a", "tok")
    if how == "READONLY":
        await sets.client.execute_command("REPLICAOF", "127.0.0.1", "1")  # type: ignore[no-untyped-call]  # The driver's own gap.
    else:
        await sets.client.config_set("min-replicas-to-write", "1")
    with pytest.raises(TransportLost, match=r"(?i)read.?only|NOREPLICAS"):
        async with sets.session():
            pass
    if how == "READONLY":
        await sets.client.execute_command("REPLICAOF", "NO", "ONE")  # type: ignore[no-untyped-call]  # As above.
    else:
        await sets.client.config_set("min-replicas-to-write", "0")
    await conserved(sets, "a")


async def test_a_queue_that_is_flushed_or_of_another_kind_ends_no_worker_for_good(
    on_own_redis: tuple[SortedSets, Redis],
) -> None:
    sets, _ = on_own_redis
    async with sets.session() as transport, transport.consuming(1):
        await nothing_comes(transport, 0.1)
        await sets.client.flushall()
        await sets.client.script_flush()
        await sets.submit("a", "tok")
        delivery = await take(transport)
        hold = await claim(sets, delivery)
        await sets.client.flushall()
        await eventually(delivery.lost.is_set, within=5, what="the loss is seen")
        assert await transport.settle(delivery, answer(hold)) == DeliveryLost(stored=True)
        assert not transport.lost.is_set()
        await sets.client.set(QUEUE.name, "x")
        await asyncio.sleep(0.1)
        await sets.client.delete(QUEUE.name)
    await sets.client.flushall()
    await sets.submit("b", "tok")
    await conserved(sets, "b")


async def test_a_session_is_left_in_time_although_redis_hangs(
    sets: SortedSets, redis_server: Redis, proxy: MakeProxy
) -> None:
    between = await proxy(redis_server)
    await sets.submit("a", "tok")
    async with asyncio.timeout(6.0):
        async with sets.session(between.url(sets.url)) as transport, transport.consuming(2):
            await take(transport)
            between.freeze()
    between.thaw()
    await conserved(sets, "a")


async def test_a_session_that_ends_gives_back_all_it_has_at_once(sets: SortedSets) -> None:
    sets.lease_s = 60.0
    for name in "abc":
        await sets.submit(name, "tok")
    async with sets.session() as transport, transport.consuming(2):
        await take(transport)
    assert (await sets.inside()).queued == Counter("abc")
    await conserved(sets, *"abc")


@pytest.mark.parametrize("which", [0, 1, 2], ids=["first", "second", "third"])
async def test_a_session_of_which_any_connection_is_cut_ends_or_goes_on_whole(
    which: int, sets: SortedSets, redis_server: Redis, proxy: MakeProxy
) -> None:
    between = await proxy(redis_server)
    async with sets.session(between.url(sets.url)) as transport, transport.consuming(1):
        await nothing_comes(transport, 0.1)
        links = list(between._links)
        assert len(links) == 3
        links[which].end()
        await sets.submit("a", "tok")
        taking = asyncio.create_task(transport.receive())
        await asyncio.wait([taking], timeout=5)
        assert taking.done()
        if taking.exception() is not None:
            assert transport.lost.is_set()
    await conserved(sets, "a")


async def test_a_cluster_is_refused_with_a_reason(own_redis: OwnRedis) -> None:
    """A script may not touch keys of several slots there."""
    server = await own_redis("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    async with sorted_sets_at(server.url) as made:
        await made.client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)  # type: ignore[no-untyped-call]  # The driver's own gap.

        async def up() -> bool:
            said = await made.client.execute_command("CLUSTER", "INFO")  # type: ignore[no-untyped-call]  # As above.
            return "cluster_state:ok" in str(said)

        await eventually(up, within=10, what="the cluster")
        with pytest.raises(TransportLost, match=r"(?i)slot"):
            async with made.session():
                pass


@pytest.mark.parametrize("lacking", ["zadd", "zrem", "hset", "hdel", "lpush", "del", "xadd", "evalsha", "hget"])
async def test_a_user_who_lacks_a_command_loses_and_doubles_nothing(
    lacking: str, on_own_redis: tuple[SortedSets, Redis]
) -> None:
    """What may not be looked at is not taken for nothing; all goes on once the command is allowed."""
    sets, server = on_own_redis
    words = ("ACL", "SETUSER", "worker", "reset", "on", ">pw", "~*", "&*", "+@all")
    await sets.client.execute_command(*words)  # type: ignore[no-untyped-call]  # The driver's own gap.
    for name in "abc":
        await sets.submit(name, "tok")
    url = server.url.replace("redis://", "redis://worker:pw@")
    async with sets.session(url) as transport, transport.consuming(3):
        held = [await take(transport) for _ in range(3)]
        holds = [await claim(sets, delivery, f"h{n}") for n, delivery in enumerate(held)]
        await sets.client.execute_command("ACL", "SETUSER", "worker", f"-{lacking}")  # type: ignore[no-untyped-call]  # As above.
        made: list[Disposition] = [answer(holds[0]), retry(holds[1], 0.1), letter(holds[2])]
        ends = [settled_in_the_end(transport, *pair) for pair in zip(held, made, strict=True)]
        settling = [asyncio.create_task(end) for end in ends]
        await asyncio.sleep(0.2)
        await sets.client.execute_command("ACL", "SETUSER", "worker", f"+{lacking}")  # type: ignore[no-untyped-call]  # As above.
        await asyncio.gather(*settling)
    await conserved(sets, "a", "b", "c", dead=1)


def test_every_script_has_a_name_of_its_own() -> None:
    assert len({script.sha for script in SORTED_SET_SCRIPTS}) == len(SORTED_SET_SCRIPTS)


async def test_what_a_session_could_not_give_back_the_next_one_of_its_process_does(own_redis: OwnRedis) -> None:
    """The server was gone when it ended: nobody waits for a lease of minutes once it is back."""
    server = await own_redis("--appendonly", "yes", "--appendfsync", "always")
    async with sorted_sets_at(server.url, lease_s=60.0) as sets:
        opening = sets.sessions()
        await sets.submit("a", "tok")
        async with opening.connect() as transport, transport.consuming(1):
            await take(transport)
            await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        async with opening.connect() as again, again.consuming(1):
            assert (await take(again, 3)).redelivered
            assert not opening.left_behind
