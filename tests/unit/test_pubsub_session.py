"""A session with a subscription over scripted calls: health, silence of the service, and what is kept meanwhile."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import httpx
import pytest

from inference_worker.disposition import Ack, DeadLetter, Hold, Nack, Republish, Settled, StoreSilent, Token
from inference_worker.errors import StoreUnavailable, TransportLost
from inference_worker.metrics import WorkerMetrics
from inference_worker.ports import Claimed
from inference_worker.pubsub_backlog import Monitoring
from inference_worker.pubsub_values import DENIED, Pulled, Subscription
from inference_worker.results.memory import MemoryStore
from inference_worker.transports.gcp_pubsub import PubsubQueue, PubsubTransport, PubsubTransports
from inference_worker.transports.pubsub_messages import PubsubClaim
from tests.transport_contract import failed, reply, take

SEEN = Subscription(topic="t", ack_deadline_s=10, exactly_once=True, dead_letter_topic="dead", most_deliveries=5)


def pulled(number: int, body: bytes = b"", attempt: int = 1) -> Pulled:
    data = body or json.dumps({"id": f"r-{number}", "deadline": int(time.time()) + 600, "payload": {}}).encode()
    return Pulled(ack_id=f"ack-{number}", message_id=str(number), data=data, attributes={}, delivery_attempt=attempt)


@dataclass(eq=False)
class ScriptedLink:
    """The calls, each of which fails with `fails[name]`, where that is given."""

    waiting: list[Pulled] = field(default_factory=list)
    fails: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, object]] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    up: bool = True

    def _call(self, name: str, what: object) -> None:
        self.calls.append((name, what))
        if name in self.fails:
            raise StoreUnavailable(f"{name}: {self.fails[name]}", self.fails[name])

    def connected(self) -> bool:
        return self.up

    async def look(self, subscription: str) -> Subscription:
        self._call("look", subscription)
        return SEEN

    async def pull(self, subscription: str, most: int) -> list[Pulled]:
        self._call("pull", most)
        while not self.waiting:
            await asyncio.sleep(0.05)
        came, self.waiting = self.waiting[:most], self.waiting[most:]
        return came

    async def keep(self, subscription: str, ack_ids: Sequence[str], seconds: int) -> frozenset[str]:
        self._call("keep", (*ack_ids, seconds))
        return frozenset(self.gone & set(ack_ids))

    async def acknowledge(self, subscription: str, ack_id: str) -> bool:
        self._call("ack", ack_id)
        return ack_id not in self.gone

    async def publish(self, topic: str, data: bytes, attributes: Mapping[str, str]) -> None:
        self._call("publish", topic)

    def made(self, name: str) -> list[object]:
        return [what for one, what in self.calls if one == name]


@dataclass
class Scripted:
    link: ScriptedLink
    store: MemoryStore

    @asynccontextmanager
    async def session(self, **options: object) -> AsyncGenerator[PubsubTransport]:
        @asynccontextmanager
        async def link() -> AsyncGenerator[ScriptedLink]:
            yield self.link

        transports = PubsubTransports(
            link,
            queue=PubsubQueue(project="p"),
            store=self.store,
            metrics=WorkerMetrics(),
            replica_id="r",
            now=time.time,
            patience_s=2.0,
            **options,  # type: ignore[arg-type]  # By name.
        )
        async with transports.connect() as transport:
            yield transport


@pytest.fixture
def scripted() -> Scripted:
    return Scripted(ScriptedLink(), MemoryStore(now=time.time, lease_s=60.0, ttl_s=3600.0))


async def test_who_may_not_look_at_the_subscription_works_all_the_same_case_120(scripted: Scripted) -> None:
    scripted.link.fails["look"] = DENIED
    scripted.link.waiting = [pulled(1)]
    async with scripted.session() as transport, transport.consuming(1):
        assert await transport.settle(await take(transport), Ack()) == Settled(how="ack")
        with pytest.raises(TransportLost, match="may not be looked at"):
            await transport.publish(b"{}")


async def test_a_session_that_works_is_not_probed_and_one_that_failed_is_well_again_after_a_look_case_120(
    scripted: Scripted,
) -> None:
    async with scripted.session() as transport, transport.consuming(1):
        await asyncio.sleep(60)
        assert len(scripted.link.made("look")) == 1
        scripted.link.fails["pull"] = "NOT_FOUND"
        scripted.link.waiting = [pulled(1)]
        await take(transport)
        await transport.set_limit(2)
        await asyncio.sleep(1)
        assert transport.lost.is_set()
    scripted.link.fails.clear()
    async with scripted.session() as again:
        assert not again.lost.is_set()


async def test_a_service_that_is_away_for_a_moment_ends_no_session(scripted: Scripted) -> None:
    scripted.link.fails["pull"] = "UNAVAILABLE"
    async with scripted.session() as transport, transport.consuming(1):
        await asyncio.sleep(1)
        del scripted.link.fails["pull"]
        scripted.link.waiting = [pulled(1)]
        await take(transport)
        scripted.link.fails["pull"] = "UNAVAILABLE"
        await transport.set_limit(2)
        await asyncio.sleep(3)
        scripted.link.waiting = [pulled(2)]
        await asyncio.sleep(3)
        assert "UNAVAILABLE" in transport.lost_because


async def test_a_connection_that_does_not_come_back_ends_the_session_with_full_hands_too(scripted: Scripted) -> None:
    scripted.link.waiting = [pulled(1)]
    async with scripted.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        scripted.link.up = False
        await asyncio.sleep(5)
        assert delivery.lost.is_set()
        assert transport.lost_because == "there is no connection to Pub/Sub"


@pytest.mark.parametrize("call", ["publish", "ack"])
async def test_what_the_service_does_not_confirm_is_not_acknowledged_and_settled_again(
    scripted: Scripted, call: str
) -> None:
    """Result stored, published, acknowledged, in this order; a repeat finds the result, and goes on from there."""
    scripted.link.waiting = [pulled(1)]
    async with scripted.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        scripted.link.fails[call] = "UNAVAILABLE"
        assert await transport.settle(delivery, Ack(reply=reply("r-1"))) == StoreSilent()
        assert scripted.link.made("ack") == ([] if call == "publish" else ["ack-1"])
        del scripted.link.fails[call]
        assert await transport.settle(delivery, Ack()) == Settled(how="ack")

    assert scripted.link.calls[-2:] == [("publish", "projects/p/topics/results"), ("ack", "ack-1")]


async def test_a_dead_letter_is_parked_before_it_is_acknowledged(scripted: Scripted) -> None:
    scripted.link.waiting = [pulled(1)]
    async with scripted.session() as transport, transport.consuming(1):
        letter = DeadLetter(
            reason="poison", detail="x" * 3000, attempts=3, status_code=500, reply=failed("r-1", error_code="poison")
        )
        assert await transport.settle(await take(transport), letter) == Settled(how="dead_letter")

    assert scripted.link.calls[-3:] == [
        ("publish", "projects/p/topics/results"),
        ("publish", "dead"),
        ("ack", "ack-1"),
    ]


async def test_a_lease_that_went_to_another_is_seen_at_its_renewal(scripted: Scripted) -> None:
    scripted.link.waiting = [pulled(1), pulled(2)]
    async with scripted.session() as transport, transport.consuming(2):
        first, second = await take(transport), await take(transport)
        scripted.link.gone = {"ack-1"}
        await asyncio.sleep(4)

        assert (first.lost.is_set(), second.lost.is_set()) == (True, False)
        assert ("ack-2", 60) in scripted.link.made("keep") or ("ack-1", "ack-2", 60) in scripted.link.made("keep")
        with pytest.raises(TransportLost):
            await transport.extend(first)
        await transport.extend(second)


async def test_leases_that_cannot_be_renewed_for_as_long_as_they_last_end_the_session(scripted: Scripted) -> None:
    scripted.link.waiting = [pulled(1)]
    async with scripted.session(lease_s=10) as transport, transport.consuming(1):
        delivery = await take(transport)
        scripted.link.fails["keep"] = "UNAVAILABLE"
        await asyncio.sleep(8)
        assert not delivery.lost.is_set()
        await asyncio.sleep(8)
        assert "leases could not be renewed" in transport.lost_because


async def test_what_is_tried_again_is_kept_leased_until_its_time(scripted: Scripted) -> None:
    scripted.link.waiting = [pulled(1)]
    async with scripted.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        assert await scripted.store.claim("r-1", 0, Token("t"), time.time() + 600) == Claimed(starts=1)
        again = Republish(delay_s=30, attempts=1, left_s=60, claim=Hold("r-1", Token("t")))
        begun = asyncio.get_running_loop().time()
        assert await transport.settle(delivery, again) == Settled(how="retry")
        copy = await take(transport, 60)

        assert asyncio.get_running_loop().time() - begun == pytest.approx(30, abs=0.5)
        assert copy.attempts == 1
        assert scripted.link.made("keep").count(("ack-1", 60)) >= 9


async def test_what_is_due_while_nothing_is_consumed_goes_to_others(scripted: Scripted) -> None:
    scripted.link.waiting = [pulled(1)]
    async with scripted.session() as transport:
        async with transport.consuming(1):
            again = Republish(delay_s=5, attempts=1, left_s=60, claim=Hold("r-1", Token("t")))
            await transport.settle(await take(transport), again)
        await asyncio.sleep(6)
        assert ("ack-1", 0) in scripted.link.made("keep")
        assert transport.held() == []


async def test_what_fails_while_nothing_is_consumed_is_left_to_the_service(scripted: Scripted) -> None:
    scripted.link.waiting = [pulled(1)]
    async with scripted.session() as transport:
        async with transport.consuming(1):
            delivery = await take(transport)
        again = Republish(delay_s=4.2, attempts=1, left_s=60, claim=Hold("r-1", Token("t")))
        assert await transport.settle(delivery, again) == Settled(how="retry")
        assert scripted.link.made("keep")[-1] == ("ack-1", 5)
        assert transport.held() == []


async def test_what_cannot_be_given_back_comes_back_after_its_lease(scripted: Scripted) -> None:
    scripted.link.waiting = [pulled(1)]
    async with scripted.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        scripted.link.fails["keep"] = "UNAVAILABLE"
        assert await transport.settle(delivery, Nack()) == Settled(how="requeue")
        assert transport.held() == []


async def test_the_backlog_is_what_monitoring_says_less_what_is_ours(scripted: Scripted) -> None:
    async def says(subscription: str) -> int | None:
        return said.pop(0) if said else None

    said = [7]
    scripted.link.waiting = [pulled(1)]
    async with scripted.session(undelivered=says) as transport, transport.consuming(1):
        await take(transport)
        seen = await transport.backlog()
        assert (seen.ready, seen.in_flight, seen.how) == (6, 1, "monitoring")
        assert (await transport.backlog()).how == "unknown"
    async with scripted.session() as transport:
        assert (await transport.backlog()).how == "nobody counts"


def monitoring(answer: httpx.Response, asked: list[httpx.Request], clock: list[float]) -> Monitoring:
    def answers(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return answer

    async def token() -> str:
        return "secret"

    return Monitoring(token, lambda: clock[0], lambda: httpx.AsyncClient(transport=httpx.MockTransport(answers)))


async def test_monitoring_is_asked_for_the_newest_point_and_not_too_often() -> None:
    asked: list[httpx.Request] = []
    clock = [1_000_000.0]
    points = [{"value": {"int64Value": "42"}}, {"value": {"int64Value": "7"}}]
    ask = monitoring(httpx.Response(200, json={"timeSeries": [{"points": points}]}), asked, clock)

    assert [await ask("projects/p/subscriptions/s") for _ in range(3)] == [42, 42, 42]
    assert len(asked) == 1
    assert asked[0].url.path == "/v3/projects/p/timeSeries"
    assert asked[0].headers["authorization"] == "Bearer secret"
    assert 'subscription_id="s"' in asked[0].url.params["filter"]
    clock[0] += 31
    await ask("projects/p/subscriptions/s")
    assert len(asked) == 2


async def test_a_subscription_without_points_is_unknown_and_a_refusal_is_said_once_in_a_while() -> None:
    asked: list[httpx.Request] = []
    assert await monitoring(httpx.Response(200, json={}), asked, [100.0])("projects/p/subscriptions/s") is None
    refused = monitoring(httpx.Response(403), asked, [100.0])
    with pytest.raises(StoreUnavailable, match="403"):
        await refused("projects/p/subscriptions/s")
    assert await refused("projects/p/subscriptions/s") is None
    assert len(asked) == 2


def test_a_dead_letter_has_no_more_attributes_than_the_service_takes_and_its_reason_among_them() -> None:
    """Else it could not be parked, and came again until the service gives it up."""
    came = {f"name-{number}": "x" for number in range(100)} | {"message_id": "m"}
    claim = PubsubClaim(pulled=replace(pulled(1), attributes=came))
    said = claim.dead_attributes(
        PubsubQueue(), DeadLetter(reason="invalid_request", detail="why", attempts=2, status_code=400)
    )

    assert len(said) == 100
    assert (said["message_id"], said["dead_reason"], said["dead_detail"]) == ("m", "invalid_request", "why")
    assert said["name-0"] == "x"


async def test_a_fault_while_leases_are_renewed_costs_a_turn_and_not_the_leases(
    scripted: Scripted,
) -> None:
    link = scripted.link
    link.waiting = [pulled(1)]
    renew, failures = link.keep, 0

    async def keep(subscription: str, ack_ids: Sequence[str], seconds: int) -> frozenset[str]:
        nonlocal failures
        if not failures:
            failures += 1
            raise RuntimeError("a fault")
        return await renew(subscription, ack_ids, seconds)

    link.keep = keep  # type: ignore[method-assign]  # One fault, then as it was.
    async with scripted.session() as transport, transport.consuming(1):
        delivery = await take(transport)
        while not link.made("keep"):
            await asyncio.sleep(1)

        assert failures == 1
        assert not delivery.lost.is_set()
