"""Queues on a Redis Cluster of three masters, and on a Redis that a sentinel watches: what holds for one server holds.

The servers are started once for this file. What is looked at is looked at by the driver's own Cluster client.
"""

import asyncio
import dataclasses
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
from redis.asyncio import Redis as RedisClient
from redis.asyncio.cluster import RedisCluster as ClusterClient
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError

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
from inference_worker.errors import InvalidSubmission, NotAccepted, StoreUnavailable, TransportLost
from inference_worker.llmd_messages import Routing
from inference_worker.ports import Beat, BelowFloor, Claimed, Stored, Transport
from inference_worker.producer import Depth, Producer, Request
from inference_worker.redis_cluster import RedisCluster
from inference_worker.redis_modes import RedisPlace, redis_place
from inference_worker.redis_scripts import (
    FINISH_IN_SLOT,
    Address,
    Argument,
    ClusterCommands,
    RedisCommands,
    RedisLink,
    RedisTls,
    Script,
    url_from,
)
from inference_worker.redis_sentinel import Sentinels
from inference_worker.results.fleet import RedisFleet
from inference_worker.results.notifications import Notifications
from inference_worker.results.redis import RedisOutbox, RedisStore, slot_keys
from inference_worker.transports.redis_sorted_set import SortedSetQueue, SortedSetTransport
from inference_worker.transports.sorted_set_cluster import FLOOR, FORGET, PUSH, SENT, UNHOLD
from inference_worker.transports.sorted_set_scripts import COPY, FENCE, HAND_BACK, SETTLE
from tests.faults.proxy import TcpProxy
from tests.integration.conftest import services_of
from tests.integration.test_redis_sorted_set_faults import answer, claim, conserved, settled_in_the_end
from tests.process_rig import envelope as member_of
from tests.process_rig import processing, queue, serving_mock
from tests.redis_cluster_kit import Cluster, Node, Watched
from tests.services import LOOPBACK, free_port
from tests.sorted_set_kit import SortedSets, envelope
from tests.stream_kit import entries_of
from tests.transport_contract import Parked, TransportContract, failed, nothing_comes, reply, take
from tests.waiting import eventually

pytestmark = pytest.mark.needs_control

LEASE_S = 0.5
QUEUE = SortedSetQueue(clustered=True)


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest) -> Generator[Cluster]:
    made = Cluster(services_of(request.config).supply)
    yield made
    made.close()


@asynccontextmanager
async def reached(servers: Cluster) -> AsyncGenerator[RedisCluster]:
    async with RedisCluster(lambda: servers.nodes[0].url, client_name="test", tls=RedisTls()).open() as made:
        yield made


@asynccontextmanager
async def sets_on(servers: Cluster, cluster: RedisCluster) -> AsyncGenerator[SortedSets]:
    first = servers.nodes[0]
    async with ClusterClient(host=first.host, port=first.port) as client:
        looking = cast("RedisClient", client)  # It has the methods that are used.
        # It asks one server otherwise, whichever.
        looking.keys = partial(client.keys, target_nodes=ClusterClient.PRIMARIES)  # type: ignore[method-assign]
        yield SortedSets(first.url, cluster, looking, lease_s=LEASE_S, queue=QUEUE, cluster=cluster)


@pytest.fixture
async def cluster(servers: Cluster) -> AsyncGenerator[RedisCluster]:
    await asyncio.to_thread(servers.empty)
    async with reached(servers) as made:
        yield made


@pytest.fixture
async def sets(servers: Cluster, cluster: RedisCluster) -> AsyncGenerator[SortedSets]:
    async with sets_on(servers, cluster) as made:
        yield made


class Through:
    """A Cluster, where the server that has the queue is reached through a proxy."""

    def __init__(self, cluster: ClusterCommands, proxy: TcpProxy) -> None:
        self._cluster = cluster
        self._proxy = proxy

    @property
    def masters(self) -> tuple[str, ...]:
        return self._cluster.masters

    def address_of(self, key: str) -> Address:
        async def url() -> str:
            return self._proxy.url(await url_from(self._cluster.address_of(key)))

        return url

    def address_at(self, master: str) -> Address:
        return self._cluster.address_at(master)

    async def run(self, script: Script, keys: Sequence[str], *arguments: Argument) -> Any:
        return await self._cluster.run(script, keys, *arguments)

    async def do(self, *parts: Argument) -> Any:
        return await self._cluster.do(*parts)


class ClusterHarness:
    """A queue on the Cluster; each session has a proxy before the server of the queue, which can cut it."""

    def __init__(self, servers: Cluster, sets: SortedSets) -> None:
        self.store = sets.store
        self._servers = servers
        self._sets = sets
        self._proxies: dict[Transport, TcpProxy] = {}

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Transport, None]:
        owner = self._servers.owner(QUEUE.name)
        assert self._sets.cluster is not None
        async with (
            TcpProxy(owner.host, owner.port) as proxy,
            self._sets.session(cluster=Through(self._sets.cluster, proxy)) as transport,
        ):
            self._proxies[transport] = proxy
            yield transport

    async def publish(self, body: bytes, message_id: str | None = None) -> None:
        await self._sets.add(body, message_id)

    async def cut(self, transport: Transport) -> None:
        await self._proxies[transport].cut()
        await eventually(transport.lost.is_set, within=10, what="the cut is seen")

    lapse = cut

    async def parked(self) -> list[Parked]:
        entries = await entries_of(self._sets.client, QUEUE.dead_letters)
        return [Parked(fields[b"request"]) for _, fields in entries]


@pytest.fixture
async def harness(servers: Cluster, sets: SortedSets) -> ClusterHarness:
    return ClusterHarness(servers, sets)


class TestRedisClusterTransport(TransportContract):
    """All clauses, on a real Cluster."""


# ---------------------------------------------------------------- where everything lies


@pytest.mark.parametrize("name", ["tier-a", "{tier-a}", "{team}:tier-a", "team{}a", "a}b{c}d", "}{", "{a", "ü"])
async def test_all_that_a_queue_keeps_lies_in_its_slot_case_66(name: str, servers: Cluster) -> None:
    """The server says in which, so that one script may touch all of it."""
    first = servers.nodes[0]

    slots = {key: first.ask("CLUSTER", "KEYSLOT", key) for key in SortedSetQueue(name=name, clustered=True).keys}

    assert len(slots) == 8
    assert set(slots.values()) == {first.ask("CLUSTER", "KEYSLOT", name)}


@pytest.mark.parametrize("request_id", ["r", "r\0tok", "{r}\0tok", "a}b\0tok", "a{}b{c}\0tok", "{infer_resp:r}"])
async def test_result_claim_and_owed_event_share_a_slot_whatever_the_id(request_id: str, servers: Cluster) -> None:
    first = servers.nodes[0]

    keys = slot_keys(request_id)

    assert len(set(keys)) == 3
    assert len({first.ask("CLUSTER", "KEYSLOT", key) for key in keys}) == 1


async def test_the_claims_of_other_programs_have_the_names_that_they_know_case_66(sets: SortedSets) -> None:
    await sets.submit("a", "tok")
    async with sets.session() as transport, transport.consuming(1):
        await take(transport)

        assert await sets.client.hkeys("{request-sortedset}:claimed") == [b"a\0tok"]
        assert await sets.client.zrange("{request-sortedset}:claims-idx", 0, -1) == [b"a\0tok"]


async def test_a_result_for_a_claim_of_another_is_not_sent_by_us_case_66(sets: SortedSets) -> None:
    """Result and list lie in other slots than the claim: that is looked at first, and fenced again at its end."""
    await sets.submit("a", "tok")
    async with sets.session() as transport, transport.consuming(1):
        stale = await take(transport)
        hold = await claim(sets, stale)
        _, claimed, owners, *_ = QUEUE.keys
        await sets.client.hset(owners, "a\0tok", "somebody else's")

        assert await transport.settle(stale, answer(hold)) == DeliveryLost(stored=True)
        assert await sets.results() == []
        assert await sets.client.hexists(claimed, "a\0tok")
    await sets.client.zadd(QUEUE.keys[3], {"a\0tok": 1})  # The other's lease lapses.
    await conserved(sets, "a")
    assert await events(sets) == Counter("e")


async def test_results_lists_and_producers_keys_may_lie_anywhere_case_77(sets: SortedSets, servers: Cluster) -> None:
    names = [f"r{number}" for number in range(12)]
    for name in names:
        await submit_apart(sets, name, result_queue_name=f"list-{name[-1]}")
    async with sets.session() as transport, transport.consuming(12):
        deliveries = [await take(transport) for _ in names]
        holds = [await claim(sets, delivery) for delivery in deliveries]
        settled = await asyncio.gather(*map(transport.settle, deliveries, map(answer, holds)))

    assert settled == [Settled(how="ack")] * 12
    assert {servers.owner(f"list-{digit}").address for digit in range(10)} == {one.address for one in servers.nodes}
    for name in names:
        assert [one["id"] for one in await sets.results(f"list-{name[-1]}")].count(name) == 1
    assert await sets.client.keys("request-*") == []
    assert await sets.client.keys("infer_claim*") == await sets.client.keys("infer_owed*") == []
    assert (await sets.inside()).copies == Counter()


async def test_payloads_that_lie_apart_come_from_wherever_they_are_case_60_61(sets: SortedSets) -> None:
    for name in "abcd":
        ref = f"request-payload:{name}:tok"
        if name != "d":
            await sets.client.set(ref, f'{{"n":"{name}"}}')
        head = f'{{"internal":{{"request_token":"tok","payload_ref":"{ref}"}},"request_kind":"redis",'
        rest = f'"data":{{"id":"{name}","created":1,"deadline":{int(time.time()) + 600},"payload":null}}}}'
        await sets.client.zadd(QUEUE.name, {(head + rest).encode(): 1})
    async with sets.session() as transport, transport.consuming(4):
        deliveries = [await take(transport) for _ in range(3)]
        payloads = {one.request.payload for one in deliveries if one.request is not None}
        assert payloads == {b'{"n":"a"}', b'{"n":"b"}', b'{"n":"c"}'}

        for delivery in deliveries:
            assert await transport.settle(delivery, answer(await claim(sets, delivery))) == Settled(how="ack")
        await eventually(lambda: empty(sets), within=5, what="the one without a payload is answered")
    codes = {str(one["id"]): one.get("error_code") for one in await sets.results()}
    assert codes == {"a": None, "b": None, "c": None, "d": "PAYLOAD_UNAVAILABLE"}
    assert await sets.client.keys("request-payload:*") == []


# ---------------------------------------------------------------- retries and cancellations


async def test_a_retry_waits_in_the_queues_own_set_and_comes_counted_case_69_70(sets: SortedSets) -> None:
    await sets.submit("a", "tok")
    async with sets.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        score = (await sets.client.zscore(QUEUE.keys[0], delivery.body)) or float(delivery.receipt.more.taken.score)  # type: ignore[attr-defined]  # Of this transport.
        hold = await claim(sets, delivery)
        settled = await transport.settle(delivery, Republish(delay_s=2, attempts=1, left_s=60, claim=hold))
        ((copy, due),) = await sets.scored("{request-sortedset}:retry-sortedset")
        assert settled == Settled(how="retry")
        assert 0 < due - time.time() <= 2
        assert await sets.client.zcard("retry-sortedset") == 0

        await sets.client.zadd("{request-sortedset}:retry-sortedset", {copy: 1})
        again = await take(transport)
        assert again.attempts == 1
        assert float(again.receipt.more.taken.score) == score  # type: ignore[attr-defined]  # As above.
        assert await sets.store.claim("a\0tok", 0, Token("late"), time.time() + 60) == BelowFloor()
        assert await sets.store.claim("a\0tok", 1, Token("next"), time.time() + 60) == Claimed(starts=1)
    await conserved(sets, "a")


async def test_retries_that_other_programs_have_parked_come_back_to_their_queues_case_70_72(sets: SortedSets) -> None:
    """Theirs lie in one set for all queues, in a slot of its own. What was brought is not there any more."""
    later = int(time.time()) + 600
    ours = envelope("a", routing=Routing(request_token="tok", request_queue_name=QUEUE.name, retry_count=2))
    of_no_queue = envelope("b", routing=Routing(request_token="tok"))
    elsewhere = envelope("c", deadline=later, routing=Routing(request_token="tok", request_queue_name="other"))
    not_due = envelope("d", routing=Routing(request_token="tok"))
    await sets.client.zadd("retry-sortedset", {ours: 1, of_no_queue: 2, elsewhere: 3, not_due: later})
    async with sets.session() as transport, transport.consuming(2):
        came = {(one.message_id, one.attempts) for one in [await take(transport), await take(transport)]}
        assert came == {("a", 2), ("b", 0)}

        async def all_brought() -> bool:
            return await sets.scored("retry-sortedset") == [(not_due, later)]

        await eventually(all_brought, within=5, what="the due ones are brought back")
    assert await sets.scored("other") == [(elsewhere, later)]
    await conserved(sets, "a", "b")


async def test_what_was_cancelled_while_it_waited_is_answered_and_never_handed_up_case_30(sets: SortedSets) -> None:
    for name in "abcdef":
        await sets.submit(name, "tok")
        await sets.client.set(f"request-cancel:{name}", "tok")
    await sets.submit("g", "tok")
    await sets.client.set("request-cancel:g", "an older one")
    async with sets.session() as transport, transport.consuming(8):
        assert (await take(transport)).message_id == "g"
        await nothing_comes(transport, 0.05)
        await eventually(lambda: _count(sets, 6), within=5, what="six results")
    assert {str(one["id"]): one["error_code"] for one in await sets.results()} == dict.fromkeys("abcdef", "CANCELLED")
    await conserved(sets, *"abcdefg")


async def _count(sets: SortedSets, wanted: int) -> bool:
    return len(await sets.results()) == wanted


async def test_what_is_cancelled_in_our_hands_is_known_within_moments_wherever_it_is_said_case_108(
    sets: SortedSets, servers: Cluster
) -> None:
    """Each server tells of its own keys alone: all of them are listened to."""
    sets.lease_s = 60.0
    names = [next(f"r{n}" for n in range(99) if servers.owner(f"request-cancel:r{n}") is one) for one in servers.nodes]
    for name in names:
        await sets.submit(name, "tok")
    async with sets.session() as transport, transport.consuming(3):
        deliveries = [await take(transport) for _ in names]
        for name in names:
            await sets.client.set(f"request-cancel:{name}", "tok")
            await eventually(lambda: sets.store.read(f"{name}\0tok"), within=2, what=f"{name} is cancelled")  # noqa: B023  # Awaited here.

        for delivery in deliveries:
            known = await transport.settle(delivery, answer(Hold(f"{delivery.message_id}\0tok", Token("h"))))
            assert isinstance(known, Known)
            assert await transport.settle(delivery, Ack()) == Settled(how="ack")
    assert {str(one["id"]): one["error_code"] for one in await sets.results()} == dict.fromkeys(names, "CANCELLED")
    assert await empty(sets)
    assert await sets.client.keys("request-*") == []


async def test_a_message_is_picked_up_within_milliseconds_by_zadd_alone(sets: SortedSets) -> None:
    async with sets.session() as transport, transport.consuming(1):
        await eventually(lambda: transport._dry, within=5, what="an idle reader")
        before = time.monotonic()
        await sets.submit("a", "tok")
        await take(transport)

        assert time.monotonic() - before < 0.3, "it was not told; the next look is after a second"


# ---------------------------------------------------------------- servers that change


async def test_a_queue_whose_slot_moves_is_served_where_it_is_then(servers: Cluster, sets: SortedSets) -> None:
    """Halfway there each side sends us to the other. Once the queue is empty it is seen that nobody tells of news."""
    to = servers.other_than(servers.owner(QUEUE.name))
    for name in "abc":
        await sets.submit(name, "tok")
    async with sets.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        hold = await claim(sets, delivery)
        await asyncio.to_thread(servers.begin_to_move, QUEUE.name, to)
        assert await transport.settle(delivery, answer(hold)) == StoreSilent()
        await asyncio.to_thread(servers.have_moved, QUEUE.name, to)

        assert isinstance(await settled_in_the_end(transport, delivery, answer(hold)), Settled)
        with suppress(TransportLost):  # It has been seen by now, perhaps.
            for _ in "bc":
                delivery = await take(transport)
                await transport.settle(delivery, answer(await claim(sets, delivery)))
        async with asyncio.timeout(5):
            await transport.lost.wait()
        assert "MovedError" in transport.lost_because
    await conserved(sets, *"abc")


async def test_commands_follow_a_key_that_moves_and_are_done_once(servers: Cluster, cluster: RedisCluster) -> None:
    """At each stage: before, halfway, and after; the map is read anew without a command being lost."""
    script = Script("return {redis.call('INCR', KEYS[1]), redis.call('INCR', KEYS[2])}")
    keys = ["{moving}a", "{moving}b"]
    to = servers.other_than(servers.owner("{moving}"))

    counts = [await cluster.run(script, keys)]
    await asyncio.to_thread(servers.begin_to_move, "{moving}", to)
    counts += [await cluster.run(script, keys) for _ in range(2)]
    counts.append([int(await cluster.do("INCR", key)) for key in keys])
    await asyncio.to_thread(servers.have_moved, "{moving}", to)
    counts += await asyncio.gather(*(cluster.run(script, keys) for _ in range(3)))

    assert counts == [[number, number] for number in range(1, 8)]


async def test_a_server_without_an_answer_holds_up_no_other(servers: Cluster, cluster: RedisCluster) -> None:
    names = {one.address: next(f"k{n}" for n in range(99) if servers.owner(f"k{n}") is one) for one in servers.nodes}
    frozen, *others = servers.nodes[::-1]
    await cluster.do("PING")
    frozen.server.pause()
    try:
        hanging = asyncio.create_task(cluster.do("SET", names[frozen.address], "1"))
        async with asyncio.timeout(2):
            for one in others:
                assert await cluster.do("SET", names[one.address], "1") == b"OK"
        hanging.cancel()
        await asyncio.wait([hanging])
    finally:
        frozen.server.resume()
    assert await cluster.do("SET", names[frozen.address], "2") == b"OK"


async def test_a_map_that_nobody_can_give_is_said_and_asked_for_again(servers: Cluster, redis_url: str) -> None:
    """One address leads nowhere, the next to a server that is no Cluster; then the right one."""
    alone = redis_url.removeprefix("redis://").split("/")[0]
    url, addresses = f"redis://{alone}", [f"{LOOPBACK}:{free_port()}", alone]
    async with RedisCluster(lambda: url, addresses, client_name="test", tls=RedisTls()).open() as nowhere:
        with pytest.raises(StoreUnavailable, match="cluster support disabled"):
            await nowhere.do("GET", "k")
    addresses.append(servers.nodes[1].address)
    async with RedisCluster(lambda: url, addresses, client_name="test", tls=RedisTls()).open() as found:
        assert await found.do("GET", "k") is None
        assert set(found.masters) == {one.address for one in servers.nodes}


async def test_a_queue_goes_on_where_a_replica_has_taken_over(request: pytest.FixtureRequest) -> None:
    supply = services_of(request.config).supply
    small = await asyncio.to_thread(Cluster, supply, masters=1)
    try:
        replica = await asyncio.to_thread(small.add_replica, supply, small.nodes[0])
        async with reached(small) as cluster, sets_on(small, cluster) as sets:
            for name in "abc":
                await sets.submit(name, "tok")
            async with sets.session() as transport, transport.consuming(1):
                held = await take(transport)
                hold = await claim(sets, held)
                await eventually(lambda: small.is_level(replica), within=5, what="a replica that has all of it")
                await asyncio.to_thread(replica.ask, "CLUSTER", "FAILOVER", "TAKEOVER")
                await eventually(
                    lambda: small.owner(QUEUE.name) is replica, within=10, what="the replica has the queue"
                )

                settlement = await settled_in_the_end(transport, held, answer(hold))
                assert isinstance(settlement, Settled | DeliveryLost)
                async with asyncio.timeout(10):
                    await transport.lost.wait()
            await conserved(sets, *"abc")
    finally:
        await asyncio.to_thread(small.close)


# ---------------------------------------------------------------- workers that die between two steps


class Mortal:
    """The commands of a worker that dies when one of them is about to be sent, or was done; or has no answer to it."""

    def __init__(self, inner: RedisCommands, plan: "Plan") -> None:
        self._inner = inner
        self._plan = plan

    async def run(self, script: Script, keys: Sequence[str], *arguments: Argument) -> Any:
        return await self._plan.carry_out(script, lambda: self._inner.run(script, keys, *arguments))

    async def do(self, *parts: Argument) -> Any:
        return await self._plan.carry_out(str(parts[0]), lambda: self._inner.do(*parts))


class Plan:
    """When it dies."""

    def __init__(self, step: Script | str, *, done: bool, for_good: bool) -> None:
        self.step = step
        self.done = done
        self.for_good = for_good
        self.dead = asyncio.Event()
        self.armed = False

    async def carry_out(self, step: Script | str, doing: Callable[[], Awaitable[Any]]) -> Any:
        if self.dead.is_set() and self.for_good:
            raise StoreUnavailable("dead")
        if not self.armed or step != self.step:
            return await doing()
        self.armed = False
        if self.done:
            await doing()
        self.dead.set()
        if self.for_good:
            await asyncio.Event().wait()  # Until it is cancelled: nothing comes after it.
        raise StoreUnavailable("no answer")


@asynccontextmanager
async def mortal(sets: SortedSets, plan: Plan) -> AsyncGenerator[SortedSetTransport]:
    """A session whose commands go by a plan."""
    async with sets.session() as transport:
        across = transport._across
        assert across is not None
        transport._link = cast("RedisLink", Mortal(transport._link, plan))
        across._link, across._cluster = transport._link, Mortal(across._cluster, plan)
        yield transport


def billed(hold: Hold) -> Disposition:
    """With a usage event of its own."""
    return replace(answer(hold), usage_event=json.dumps({"id": hold.request_id}).encode())


def letter(hold: Hold) -> Disposition:
    end = failed(hold.request_id)
    return DeadLetter(reason="retries_exhausted", detail="no", attempts=1, status_code=500, reply=end, claim=hold)


def retry(hold: Hold) -> Disposition:
    return Republish(delay_s=0, attempts=1, left_s=60, claim=hold)


ANSWERED = (FENCE, FINISH_IN_SLOT, "XADD", PUSH, FORGET, SENT, SETTLE, "DEL")
LETTERED = (FINISH_IN_SLOT, PUSH, SENT, SETTLE)
STEPS: list[tuple[str, Script | str, Callable[[Hold], Disposition]]] = [
    *[(f"answer {number}", ANSWERED[number], billed) for number in range(len(ANSWERED))],
    *[(f"letter {number}", LETTERED[number], letter) for number in range(len(LETTERED))],
    *[(f"retry {number}", step, retry) for number, step in enumerate((UNHOLD, COPY, FLOOR))],
    ("give back", HAND_BACK, lambda hold: Nack(claim=hold)),
]
ASIDE = "{request-sortedset}:aside"


@pytest.mark.parametrize("done", [False, True], ids=["before it", "after it"])
async def test_workers_that_die_at_every_step_lose_and_double_nothing(done: bool, sets: SortedSets) -> None:
    """One for each step, and none of them leaves in good order."""
    for name, step, make in STEPS:
        plan = Plan(step, done=done, for_good=True)
        await submit_apart(sets, name)
        async with mortal(sets, plan) as doomed, doomed.consuming(1):
            delivery = await take(doomed)
            assert delivery.message_id == name
            hold = await claim(sets, delivery)
            plan.armed = True
            settling = asyncio.create_task(doomed.settle(delivery, make(hold)))
            await eventually(plan.dead.is_set, within=5, what=f"the step of {name}")
            settling.cancel()
            await asyncio.wait([settling])
        await hidden(sets)
    await shown(sets)

    names = [name for name, _, _ in STEPS]
    # Where not even the result was stored, it was run again, and went well.
    await conserved(sets, *names, dead=4 if done else 3)
    stored = {f"answer {number}\0tok" for number in range(1 if done else 2, len(ANSWERED))}
    # The first two steps leave together.
    assert (await events(sets)).keys() - {"answer 0\0tok"} == stored | {"e"}, "what is stored is billed, and no more"
    assert await sets.client.keys("infer_owed*") == []
    # Payloads of those that died after all was noted are nobody's, and expire.
    last = ("answer 5", "answer 6", "letter 2", "letter 3") if done else ("answer 6", "answer 7", "letter 3")
    assert set(await sets.client.keys("request-*")) == {f"request-payload:{name}:tok".encode() for name in last}


@pytest.mark.parametrize("done", [False, True], ids=["it was not done", "it was done"])
async def test_a_settlement_that_hears_no_answer_at_a_step_is_done_once_case_80(done: bool, sets: SortedSets) -> None:
    for name, step, make in STEPS:
        plan = Plan(step, done=done, for_good=False)
        await submit_apart(sets, name)
        async with mortal(sets, plan) as transport, transport.consuming(1):
            delivery = await take(transport)
            assert delivery.message_id == name
            hold = await claim(sets, delivery)
            plan.armed = True
            settlement = await settled_in_the_end(transport, delivery, make(hold))

            assert plan.dead.is_set(), name
            # The copy of a retry may be in somebody's hands already, when it is asked for again.
            assert isinstance(settlement, Settled | DeliveryLost if make is retry else Settled), name
        await hidden(sets)
    await shown(sets)

    await conserved(sets, *(name for name, _, _ in STEPS), dead=4)


async def hidden(sets: SortedSets) -> None:
    """Take aside what is in the queue, and have no claim lapse: the next worker is to find its own request alone."""
    queue, claimed, _, index, *_ = QUEUE.keys
    for member, score in await sets.scored(queue):
        await sets.client.zrem(queue, member)
        await sets.client.zadd(ASIDE, {member: score})
    for key in await claims(sets, claimed):
        await sets.client.zadd(index, {key: time.time() + 3600})


async def shown(sets: SortedSets) -> None:
    """Put all of it back; all leases have lapsed."""
    queue, claimed, _, index, *_ = QUEUE.keys
    for member, score in await sets.scored(ASIDE):
        await sets.client.zadd(queue, {member: score})
    await sets.client.delete(ASIDE)
    for key in await claims(sets, claimed):
        await sets.client.zadd(index, {key: 1})


async def claims(sets: SortedSets, claimed: str) -> list[bytes]:
    found: list[bytes] = await sets.client.hkeys(claimed)  # type: ignore[assignment]  # Bytes, as nothing is decoded.
    return found


async def submit_apart(sets: SortedSets, name: str, result_queue_name: str = "") -> None:
    """With a key of its own for the payload, which is to go with the rest."""
    ref = f"request-payload:{name}:tok"
    await sets.client.set(ref, "{}")
    routing = Routing(request_token="tok", result_queue_name=result_queue_name, payload_ref=ref)
    await sets.submit(name, routing=routing)


async def events(sets: SortedSets) -> Counter[str]:
    """Usage events by their ids."""
    entries = await entries_of(sets.client, "infer_usage:d")
    return Counter(json.loads(fields[b"event"])["id"] for _, fields in entries)


async def empty(sets: SortedSets) -> bool:
    """Nothing is left behind, of claims and notes either."""
    inside = await sets.inside()
    return not inside.copies and (inside.owners, inside.indexed, inside.notes) == (0, 0, 0)


# ---------------------------------------------------------------- what else is kept there


async def test_a_result_its_event_and_its_notification_go_where_they_go_elsewhere(cluster: RedisCluster) -> None:
    """The outbox lies in another slot than the result, what is refused in a third; any server tells of a result."""
    told = Notifications(cluster, cluster.any_address, lambda: None, client_name="test", tls=RedisTls())
    store = RedisStore(
        cluster, deployment_id="d", replica_id="r", lease_s=9, ttl_s=60, notifications=told, clustered=True
    )
    outbox = RedisOutbox(cluster, deployment_id="d", replica_id="r", clustered=True)
    over, heard = asyncio.Event(), list[str]()
    async with told.open():
        waiting = asyncio.create_task(store.wait("a", 10))
        listening = asyncio.create_task(store.cancellations(over, heard.append))
        await eventually(lambda: told._subscribed >= {"infer_resp:a", "infer_cancel"}, within=5, what="a subscription")
        before = time.monotonic()

        assert await store.write(reply("a"), b'{"id":"e"}', Token("t")) == Stored()
        assert await waiting is not None

        async def is_heard() -> bool:  # A hint, which may be missed: said again, it is told again.
            await store.cancel(failed("b", status_code=499, error_code="cancelled"))
            return "b" in heard

        await eventually(is_heard, within=5, what="the cancellation", every=0.1)
        over.set()
        await listening
    assert time.monotonic() - before < 1.5, "the next look is after two seconds"
    (entry,) = await outbox.take(9)
    assert entry.event == b'{"id":"e"}'
    await outbox.refused(entry, "no")
    assert await outbox.size() == 0
    assert await cluster.do("XLEN", "infer_usage_refused:d") == 1
    assert await cluster.do("EXISTS", slot_keys("a")[2]) == 0


async def test_the_workers_of_a_queue_know_each_other(cluster: RedisCluster) -> None:
    fleet = RedisFleet(cluster, queue="{d/pool}")
    beat = Beat(
        replica_id="r", at=0, slots=1, in_flight=0, consuming=True, fit=True, service_s=None, done_per_s=0, model=""
    )

    await fleet.want(3, 60)

    assert await fleet.beat(beat) == await fleet.desired() == 3
    assert [one.replica_id for one in await fleet.members()] == ["r"]


# ---------------------------------------------------------------- producers


@pytest.mark.parametrize("payload_keys", [False, True], ids=["as a whole", "payloads apart"])
async def test_a_producer_submits_cancels_and_receives_wherever_the_keys_are(
    payload_keys: bool, sets: SortedSets, cluster: RedisCluster
) -> None:
    asked = [
        Request(payload={"prompt": "hi", "n": number}, deadline=time.time() + 600, id=f"r{number}")
        for number in range(9)
    ]
    async with Producer(link=cluster, result_queue="results", payload_keys=payload_keys) as producer:
        submitted = await producer.submit_many(asked)
        assert await producer.cancel([submitted[0], "r1", "unknown"]) == ["r0", "r1"]
        async with sets.session() as transport, transport.consuming(9):
            for _ in range(7):
                delivery = await take(transport)
                assert delivery.request is not None
                assert json.loads(delivery.request.payload)["n"] > 1
                settled = await transport.settle(delivery, answer(await claim(sets, delivery)))
                assert settled == Settled(how="ack")
        results = []
        for _ in range(9):
            leased = await producer.receive(within_s=5)
            results.append((leased.result.id, leased.result.error_code))
            await leased.ack()

        assert sorted(results) == [(f"r{number}", "CANCELLED" if number < 2 else None) for number in range(9)]
        assert (await producer.depth()) == Depth(requests=0, results=0, leased=0)
        with pytest.raises(InvalidSubmission, match="on a Redis Cluster there are none"):
            await producer.submit(dataclasses.replace(asked[0], idempotency_key="k"))
    assert await sets.client.keys("request-*") == []


async def test_a_submission_that_is_refused_or_not_confirmed_says_which(cluster: RedisCluster) -> None:
    asked = Request(payload={}, deadline=time.time() + 600, id="r")
    await cluster.do("SET", "no-queue", "1")
    async with Producer(link=cluster, result_queue="results", request_queue="no-queue") as producer:
        with pytest.raises(NotAccepted) as refused:
            await producer.submit(asked)
    plan = Plan("ZADD", done=True, for_good=False)
    plan.armed = True
    async with Producer(link=cluster, result_queue="results") as producer:
        producer._link = Mortal(cluster, plan)
        with pytest.raises(NotAccepted) as unheard:
            await producer.submit(asked)
        assert (refused.value.maybe, unheard.value.maybe) == (False, True)
        assert (await producer.depth()).requests == 1


# ---------------------------------------------------------------- sentinels


@pytest.fixture
async def watched(request: pytest.FixtureRequest) -> AsyncGenerator[Watched]:
    made = await asyncio.to_thread(Watched, services_of(request.config).supply)
    yield made
    await asyncio.to_thread(made.close)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda watched: watched.ask("SENTINEL", "FAILOVER", "main"), id="asked to"),
        pytest.param(lambda watched: watched.master.server.kill(), id="as a server is dead"),
        pytest.param(lambda watched: watched.master.server.pause(), id="as a server hangs"),
    ],
)
async def test_a_queue_goes_on_where_sentinels_have_made_another_the_master(
    end: Callable[[Watched], None], watched: Watched
) -> None:
    async with redis_place(
        lambda: "redis://not-asked",
        mode="sentinel",
        addresses=(f"{LOOPBACK}:{free_port()}", watched.sentinel),
        master_name="main",
        client_name="test",
        tls=RedisTls(),
    ) as place:

        async def is_found() -> bool:
            try:
                return await url_from(place.address) == watched.replica.url
            except OSError:
                return False

        async with on_sentinels(place, watched.master) as sets:
            for name in "abc":
                await sets.submit(name, "tok")
            async with sets.session() as transport, transport.consuming(1):
                await take(transport)
                assert await sets.client.wait(1, 5000) == 1
                await asyncio.to_thread(end, watched)
                # Told of it: a server that is well is told to follow its successor after ten seconds.
                async with asyncio.timeout(8):
                    await transport.lost.wait()
        await eventually(is_found, within=15, what="the successor is known")
        async with on_sentinels(place, watched.replica) as sets:
            await conserved(sets, *"abc")


@asynccontextmanager
async def on_sentinels(place: RedisPlace, looking_at: Node) -> AsyncGenerator[SortedSets]:
    async with RedisClient.from_url(looking_at.url, socket_timeout=None) as client:
        yield SortedSets(
            "",
            place.commands,
            client,
            lease_s=LEASE_S,
            queue=SortedSetQueue(),
            address=place.address,
            moved=place.moved,
        )


async def test_a_server_that_is_no_master_any_more_is_not_believed_to_be_one(watched: Watched) -> None:
    """Sentinels may not agree yet. The one that is right is asked first from then on."""
    asked: list[str] = []

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if b"GET-MASTER" in line.upper():
                asked.append("a sentinel that is late")
                host, port = watched.replica.host, str(watched.replica.port)
                writer.write(f"*2\r\n${len(host)}\r\n{host}\r\n${len(port)}\r\n{port}\r\n".encode())
            elif line.strip() == b"CLIENT":
                writer.write(b"-ERR unknown command\r\n")
        writer.close()

    server = await asyncio.start_server(lie, LOOPBACK, 0)
    async with server:
        late = f"{LOOPBACK}:{server.sockets[0].getsockname()[1]}"

        def sentinels(*addresses: str) -> Sentinels:
            return Sentinels(lambda: "redis://-/3?protocol=2", addresses, master_name="main", tls=RedisTls())

        with pytest.raises(ConnectionError, match="is no master"):
            await sentinels(late).master()
        both = sentinels(late, watched.sentinel)
        assert [await both.master() for _ in range(2)] == [f"{watched.master.url}/3?protocol=2"] * 2
        assert len(asked) == 2
    with pytest.raises(ConnectionError, match="no sentinel knows a master 'other'"):
        await Sentinels(lambda: f"redis://{watched.sentinel}", master_name="other", tls=RedisTls()).master()


async def test_sentinels_that_take_no_password_are_asked_without(watched: Watched) -> None:
    """The URL's is the server's; it is named by its URL where no other addresses are given."""
    await asyncio.to_thread(watched.master.ask, "CONFIG", "SET", "requirepass", "secret")
    url = f"redis://:secret@{watched.sentinel}?protocol=2"  # By which a password too many is an error.

    found = await Sentinels(lambda: url, master_name="main", tls=RedisTls()).master()

    assert found == f"redis://:secret@{watched.master.address}?protocol=2"


# ---------------------------------------------------------------- the command


async def test_a_process_serves_queues_and_lists_in_several_slots(sets: SortedSets, servers: Cluster) -> None:
    names = ("chat", "reports", "night")
    assert len({servers.owner(name).url for name in names}) > 1
    addresses = [node.address for node in servers.nodes]
    async with serving_mock() as mock:
        queues = [queue(name, mock.url, result_queue_name=f"{name}-results") for name in names]
        async with processing(
            servers.nodes[0].url, queues=queues, transport={"mode": "cluster", "addrs": addresses}
        ) as running:
            for name in names:
                member, score = member_of(f"r-{name}")
                await sets.client.zadd(name, {member: score})

            async def all_answered() -> bool:
                return all([await sets.client.llen(f"{name}-results") == 1 for name in names])

            await eventually(all_answered, within=10, what="each list has its result")
            assert all(ok for name, (ok, _) in running.worker.ready().items() if name.startswith("queue"))
        found = [json.loads(await sets.client.lindex(f"{name}-results", 0)) for name in names]  # type: ignore[arg-type]  # The driver's types cover both its clients.

    assert [(one["id"], one["status_code"]) for one in found] == [(f"r-{name}", 200) for name in names]


async def test_a_process_goes_on_with_the_server_that_sentinels_have_made_the_master(watched: Watched) -> None:
    async with serving_mock() as mock:
        transport = {"mode": "sentinel", "addrs": [watched.sentinel], "master_name": "main"}
        async with processing("redis://not-asked", queues=[queue("q", mock.url)], transport=transport):
            async with RedisClient.from_url(watched.master.url, socket_timeout=None) as redis:
                await redis.zadd("q", dict([member_of("before")]))
                await eventually(lambda: _long(redis, 1), within=10, what="it is answered")
                assert await redis.wait(1, 5000) == 1
            await asyncio.to_thread(watched.ask, "SENTINEL", "FAILOVER", "main")
            async with RedisClient.from_url(watched.replica.url, socket_timeout=None) as redis:
                await eventually(lambda: _takes(redis), within=15, what="the successor takes writes")
                await eventually(lambda: _long(redis, 2), within=20, what="it is answered there")


async def _takes(redis: RedisClient) -> bool:
    try:
        await redis.zadd("q", dict([member_of("after")]))
    except (ReadOnlyError, RedisConnectionError):
        return False
    return True


async def _long(redis: RedisClient, count: int) -> bool:
    return await redis.llen("result-list") == count
