"""Gates that count in Redis, on a real one: quotas, reservations, a budget in a key, a leased rate."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from redis.asyncio import Redis as RedisClient
from structlog.testing import capture_logs

from inference_worker.errors import GateFailed
from inference_worker.gates.combined import Composite, WaitOnRefuse
from inference_worker.gates.quota import Allowance, ConcurrencyQuota, RateQuota, ReservationClassifier
from inference_worker.gates.redis_gates import API_VERSION, BudgetKeyGate, DrainLimit, LeasedRateGate
from inference_worker.ports import Admitted, Asked, Feedback, Gate, Parked, Permit, TurnedAway
from inference_worker.redis_scripts import RedisLink, RedisTls
from tests.faults.proxy import Do
from tests.integration.conftest import MakeProxy
from tests.services import Redis
from tests.waiting import eventually

DONE = Feedback(kind="accepted")
NOT_SENT = Feedback(kind="not_sent")
OVER = TurnedAway(because="quota_exhausted")
COUNTER, SLOTS = "quota:userid:ann", "quota-slots:userid:ann"


def linked(url: str, answer_s: float = 5.0) -> RedisLink:
    return RedisLink(lambda: url, lambda: None, client_name="test", tls=RedisTls(), answer_s=answer_s)


def asked(user: str | None = "ann", payload: bytes = b"", labels: dict[str, str] | None = None) -> Asked:
    metadata = {} if user is None else {"userid": user}
    return Asked(
        request_id="r", metadata=metadata, labels={} if labels is None else labels, deadline=1e12, payload=payload
    )


async def permits(gate: Gate, request: Asked | None = None) -> tuple[Permit, ...]:
    verdict = await gate.admit(request or asked())
    assert isinstance(verdict, Admitted), verdict
    return verdict.permits


async def give_back(taken: Sequence[Permit], seen: Feedback = DONE) -> None:
    for permit in taken:
        await permit.release(seen)


@asynccontextmanager
async def running(*gates: Gate) -> AsyncGenerator[None]:
    until = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for gate in gates:
            group.create_task(gate.run(until))
        try:
            yield
        finally:
            until.set()


@pytest.fixture
async def link(redis_url: str) -> AsyncGenerator[RedisLink]:
    async with linked(redis_url).open() as made:
        yield made


@pytest.fixture
async def other_link(redis_url: str) -> AsyncGenerator[RedisLink]:
    async with linked(redis_url).open() as made:
        yield made


async def lease_ends(client: RedisClient) -> list[float]:
    """Of ann's slots, the first one's first, in Unix ms."""
    return [float(slot[1]) for slot in await client.zrange(SLOTS, 0, -1, withscores=True)]


# ---------------------------------------------------------------- so many at once


async def test_what_is_over_the_limit_is_refused_until_something_ends_case_206(link: RedisLink) -> None:
    gate = ConcurrencyQuota(link, Allowance(limit=2), holder="p")
    first, second = asked(), asked()

    taken = await permits(gate, first)
    await permits(gate, second)
    third = asked()
    refused = await gate.admit(third)
    other = await gate.admit(asked("ben"))
    await give_back(taken)

    assert (refused, third.labels) == (OVER, {"classification": "overflow"})
    assert (first.labels, second.labels) == ({"classification": "reserved"},) * 2
    assert isinstance(other, Admitted)
    assert isinstance(await gate.admit(asked()), Admitted)


async def test_a_permit_gives_its_slot_back_once(link: RedisLink, redis_client: RedisClient) -> None:
    gate = ConcurrencyQuota(link, Allowance(limit=5), holder="p")
    taken = await permits(gate)
    await permits(gate)

    await give_back([*taken, *taken, *taken])

    assert await redis_client.get(COUNTER) == b"1"


async def test_a_classifying_quota_admits_the_overflow_case_209(link: RedisLink) -> None:
    gate = ConcurrencyQuota(link, Allowance(limit=1, blocking=False), holder="p")
    await permits(gate)
    second = asked()

    verdict = await gate.admit(second)

    assert (verdict, second.labels) == (Admitted(), {"classification": "overflow"})


@pytest.mark.parametrize("mode", ["concurrency", "rate"])
async def test_a_request_that_names_no_tenant_is_not_counted_case_210(link: RedisLink, mode: str) -> None:
    allowance = Allowance(limit=1)
    gate = (
        ConcurrencyQuota(link, allowance, holder="p")
        if mode == "concurrency"
        else RateQuota(link, allowance, holder="p")
    )
    request = asked(None)

    verdicts = [await gate.admit(request) for _ in range(3)]

    assert verdicts == [Admitted()] * 3
    assert request.labels == {}


async def test_the_limit_holds_over_processes_and_under_contention_case_343(
    link: RedisLink, other_link: RedisLink, redis_client: RedisClient
) -> None:
    """24 workers of two processes, limit 7: never more, and 0 in the end."""
    gates = [ConcurrencyQuota(each, Allowance(limit=7), holder=f"p{n}") for n, each in enumerate((link, other_link))]
    rng, inside, most = random.Random(3), 0, 0

    async def work(gate: Gate) -> None:
        nonlocal inside, most
        for _ in range(15):
            verdict = await gate.admit(asked())
            if isinstance(verdict, Admitted):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(rng.random() / 500)
                inside -= 1
                await give_back(verdict.permits)

    async with asyncio.TaskGroup() as group:
        for number in range(24):
            group.create_task(work(gates[number % 2]))

    assert most == 7
    assert await redis_client.exists(COUNTER, SLOTS) == 0


async def test_a_killed_process_frees_its_slots_while_others_go_on_case_351(
    link: RedisLink, other_link: RedisLink, redis_client: RedisClient
) -> None:
    """Steady traffic keeps the counter alive; only the leases of what runs are renewed."""
    dead = ConcurrencyQuota(other_link, Allowance(limit=3), holder="dead", lease_s=1)
    alive = ConcurrencyQuota(link, Allowance(limit=3), holder="alive", lease_s=1)
    await permits(dead)
    await permits(dead)  # Its `run` is never called: it renews nothing.
    async with running(alive):
        kept = await permits(alive)

        async def three_fit() -> bool:
            traffic = [await alive.admit(asked()) for _ in range(2)]
            for verdict in traffic:
                await give_back(verdict.permits if isinstance(verdict, Admitted) else ())
            return all(isinstance(verdict, Admitted) for verdict in traffic)

        assert not await three_fit()
        await eventually(three_fit, within=5, what="the slots of the dead process")

        assert await redis_client.get(COUNTER) == b"1"
        await give_back(kept)
    assert await redis_client.exists(COUNTER, SLOTS) == 0


async def test_what_runs_longer_than_a_lease_keeps_its_slot(link: RedisLink, redis_client: RedisClient) -> None:
    gate = ConcurrencyQuota(link, Allowance(limit=1), holder="p", lease_s=1)
    async with running(gate):
        taken = await permits(gate)
        (first_end,) = await lease_ends(redis_client)

        async def lease_over() -> bool:
            return time.time() * 1000 > first_end + 300

        await eventually(lease_over, within=5, what="the first lease's end")

        assert await gate.admit(asked()) == OVER
        await give_back(taken)


async def test_slots_that_redis_forgot_are_there_again_with_the_next_renewal(
    link: RedisLink, redis_client: RedisClient
) -> None:
    gate = ConcurrencyQuota(link, Allowance(limit=1), holder="p", lease_s=1)
    async with running(gate):
        await permits(gate)
        await redis_client.flushdb()

        async def counted() -> bool:
            return await redis_client.get(COUNTER) == b"1"

        await eventually(counted, within=5, what="the slot in the counter")
        assert await gate.admit(asked()) == OVER


async def test_other_programs_that_count_in_the_same_key_are_counted(
    link: RedisLink, redis_client: RedisClient
) -> None:
    """The Go system's counter is a plain number under the same name."""
    gate = ConcurrencyQuota(link, Allowance(limit=3), holder="p")
    await redis_client.set(COUNTER, 2, ex=300)

    taken = await permits(gate)

    assert await gate.admit(asked()) == OVER
    assert await redis_client.get(COUNTER) == b"3"
    await give_back(taken)
    assert await redis_client.get(COUNTER) == b"2"


async def test_every_key_ends_by_itself(link: RedisLink, redis_client: RedisClient) -> None:
    await permits(ConcurrencyQuota(link, Allowance(limit=3), holder="p"))
    await permits(RateQuota(link, Allowance(limit=3, prefix="rate:", window_s=5), holder="p"))
    await permits(ReservationClassifier(link, ["team"], holder="p", fallback_cap=2))

    left_s = {key: await redis_client.ttl(key) for key in await redis_client.keys("*")}

    assert len(left_s) == 6
    assert all(0 < seconds <= 86_400 for seconds in left_s.values()), left_s


@pytest.mark.parametrize(
    ("set_to", "fit"), [("3", 3), ("0", 0), ("1e9", 4), ("-1", 1), ("many", 1), ("nan", 1), (None, 1)]
)
async def test_a_tenants_limit_may_be_changed_while_all_runs(
    link: RedisLink, redis_client: RedisClient, set_to: str | None, fit: int
) -> None:
    """What is no limit is passed over for the default, which is 1 here."""
    gate = ConcurrencyQuota(link, Allowance(limit=1), holder="p")
    if set_to is not None:
        await redis_client.hset("quota-limits:userid", "ann", set_to)

    verdicts = [await gate.admit(asked()) for _ in range(4)]

    assert sum(isinstance(verdict, Admitted) for verdict in verdicts) == fit


async def test_a_quota_in_tokens_counts_what_a_request_may_use(link: RedisLink, redis_client: RedisClient) -> None:
    gate = ConcurrencyQuota(link, Allowance(limit=1000, counts="tokens"), holder="p")
    small = asked(payload=b'{"max_tokens": 90, "p": "' + b"x" * 14 + b'"}')
    large = asked(payload=b'{"max_tokens": 5000}')

    first = await permits(gate, small)
    held = await redis_client.get(COUNTER)
    refused = await gate.admit(large)
    await give_back(first)

    assert held == b"100"
    assert refused == OVER
    assert isinstance(await gate.admit(large), Admitted)  # Alone, it goes: else it never would.


async def test_a_value_that_looks_like_another_key_counts_for_itself_alone(
    link: RedisLink, redis_client: RedisClient
) -> None:
    """A caller chooses it: nobody may write into what belongs to ann."""
    gate = ConcurrencyQuota(link, Allowance(limit=1), holder="p")
    rate = RateQuota(link, Allowance(limit=1, prefix="rate:"), holder="p")
    for user in ("ann:slots", "ann:total", "limits:userid", "ann" * 1000):
        await permits(gate, asked(user))
        await permits(rate, asked(user))

    await permits(gate)
    await permits(rate)

    assert all(len(key) < 400 for key in await redis_client.keys("*"))


async def test_the_queues_own_label_outranks_what_the_caller_says(link: RedisLink) -> None:
    gate = ConcurrencyQuota(link, Allowance(limit=1, attribute="team"), holder="p")
    forged = [
        Asked(request_id="r", metadata={"team": f"t{n}"}, labels={"team": "real"}, deadline=1e12) for n in range(2)
    ]

    assert [type(await gate.admit(one)) for one in forged] == [Admitted, TurnedAway]


async def test_a_slot_whose_answer_was_lost_is_given_back(
    redis_url: str, redis_server: Redis, redis_client: RedisClient, proxy: MakeProxy
) -> None:
    before = await proxy(redis_server, speaks="redis")
    async with linked(before.url(redis_url)).open() as link:
        gate = ConcurrencyQuota(link, Allowance(limit=1), holder="p")
        await give_back(await permits(gate, asked("warm-up")))
        before.when_client_sends(SLOTS.encode(), Do.CUT_ON_REPLY)
        async with running(gate):
            with pytest.raises(GateFailed):
                await gate.admit(asked())

            async def none() -> bool:
                return await redis_client.exists(COUNTER, SLOTS) == 0

            await eventually(none, within=5, what="the slot that nobody knows of")


async def test_a_slot_that_cannot_be_given_back_now_is_given_back_later(
    redis_url: str, redis_server: Redis, redis_client: RedisClient, proxy: MakeProxy
) -> None:
    before = await proxy(redis_server, speaks="redis")
    async with linked(before.url(redis_url)).open() as link:
        gate = ConcurrencyQuota(link, Allowance(limit=9), holder="p", lease_s=1)
        async with running(gate):
            first, second = await permits(gate), await permits(gate)
            await before.refuse()
            await before.cut()
            await give_back(first)
            assert await redis_client.get(COUNTER) == b"2"
            await before.accept()

            async def one() -> bool:
                return await redis_client.get(COUNTER) == b"1"

            await eventually(one, within=5, what="the slot that was given back")
            await give_back(second)
    assert await redis_client.exists(COUNTER, SLOTS) == 0


async def test_a_slot_that_was_given_back_is_neither_renewed_nor_given_back_again(
    redis_url: str, redis_server: Redis, redis_client: RedisClient, proxy: MakeProxy
) -> None:
    """Its answer was lost, so it is given back twice; another one's renewal shows that renewals went by."""
    before = await proxy(redis_server, speaks="redis")
    async with linked(before.url(redis_url)).open() as link:
        gate = ConcurrencyQuota(link, Allowance(limit=9), holder="p", lease_s=1)
        async with running(gate):
            first, _ = await permits(gate), await permits(gate)
            await give_back(await permits(gate, asked("warm-up")))
            before.when_client_sends(SLOTS.encode(), Do.CUT_ON_REPLY)
            await give_back(first)
            ends = await lease_ends(redis_client)

            async def renewed() -> bool:
                return (await lease_ends(redis_client))[0] > ends[0] + 500

            await eventually(renewed, within=5, what="renewals")
            assert await redis_client.get(COUNTER) == b"1"
            assert (len(ends), len(await lease_ends(redis_client))) == (1, 1)


async def test_renewals_go_on_after_an_outage_and_its_one_log_line(
    redis_url: str, redis_server: Redis, redis_client: RedisClient, proxy: MakeProxy
) -> None:
    before = await proxy(redis_server, speaks="redis")
    async with linked(before.url(redis_url)).open() as link:
        gate = ConcurrencyQuota(link, Allowance(limit=9), holder="p", lease_s=1)
        with capture_logs() as log:
            async with running(gate):
                await permits(gate)
                await before.refuse()
                await before.cut()
                await eventually(lambda: bool(log), within=5, what="a renewal that fails")
                await redis_client.flushdb()
                await before.accept()

                async def renewed() -> bool:
                    return await redis_client.get(COUNTER) == b"1"

                await eventually(renewed, within=5, what="the renewed slot")

    assert [line["event"] for line in log] == ["leases on quota slots cannot be renewed"]


async def test_what_can_never_be_undone_does_not_keep_the_others(link: RedisLink, redis_client: RedisClient) -> None:
    """Somebody else's key of another kind stands in the way of one tenant."""
    gate = RateQuota(link, Allowance(limit=9), holder="p")
    async with running(gate):
        one, other = await permits(gate, asked("one")), await permits(gate, asked("other"))
        await redis_client.set("quota:userid:one", "not a set")
        await give_back([*one, *other], NOT_SENT)

        async def undone() -> bool:
            return await redis_client.exists("quota:userid:other") == 0

        await eventually(undone, within=5, what="the other's admission to be taken back")


async def test_a_question_that_is_cancelled_takes_nothing(link: RedisLink, redis_client: RedisClient) -> None:
    slots = ConcurrencyQuota(link, Allowance(limit=100), holder="p")
    rate = RateQuota(link, Allowance(limit=100, prefix="rate:"), holder="p")
    async with running(slots, rate):
        for gate in (slots, rate):
            for turns in range(6):  # Before it is sent, on its way, answered.
                question = asyncio.create_task(gate.admit(asked()))
                for _ in range(turns):
                    await asyncio.sleep(0)
                question.cancel()
                await asyncio.wait([question])
                if not question.cancelled():
                    await give_back(await permits_of(question), NOT_SENT)

        async def none() -> bool:
            return await redis_client.exists(COUNTER, SLOTS, "rate:userid:ann", "rate-total:userid:ann") == 0

        await eventually(none, within=5, what="nothing to be counted")


async def permits_of(question: "asyncio.Task[object]") -> tuple[Permit, ...]:
    verdict = question.result()
    assert isinstance(verdict, Admitted)
    return verdict.permits


async def test_those_that_wait_hear_of_a_slot_at_once(link: RedisLink) -> None:
    gate = ConcurrencyQuota(link, Allowance(limit=1), holder="p")
    taken = await permits(gate)
    waiting = await WaitOnRefuse(gate).admit(asked())
    elsewhere = await WaitOnRefuse(gate).admit(asked("ben"))

    await give_back(taken)

    assert isinstance(waiting, Parked)
    assert waiting.because == "quota_exhausted"
    assert waiting.changed is not None
    assert waiting.changed.is_set()
    assert isinstance(elsewhere, Admitted)


async def test_a_chain_that_refuses_leaves_no_slot_behind(link: RedisLink, redis_client: RedisClient) -> None:
    first = ConcurrencyQuota(link, Allowance(limit=9), holder="p")
    full = ConcurrencyQuota(link, Allowance(limit=1, prefix="full:"), holder="q")
    await permits(full)

    verdict = await Composite([first, full]).admit(asked())

    assert verdict == OVER
    assert await redis_client.exists(COUNTER) == 0


# ---------------------------------------------------------------- so many lately


async def test_a_window_slides_case_208(link: RedisLink) -> None:
    gate = RateQuota(link, Allowance(limit=2, window_s=0.4), holder="p")
    began = time.monotonic()
    first, third = asked(), asked()

    await permits(gate, first)
    await permits(gate)
    refused = await gate.admit(third)

    assert (refused, first.labels, third.labels) == (
        OVER,
        {"classification": "reserved"},
        {"classification": "overflow"},
    )

    async def again() -> bool:
        return isinstance(await gate.admit(asked()), Admitted)

    await eventually(again, within=5, what="the window's end")
    assert time.monotonic() - began >= 0.4


async def test_a_window_slides_while_it_is_in_use(link: RedisLink, redis_client: RedisClient) -> None:
    """Not by the key's own end: what left the window makes room, what is in it stays."""
    gate = RateQuota(link, Allowance(limit=2, window_s=1), holder="p")
    await permits(gate)
    first = await redis_client.zrange(COUNTER, 0, 0)
    began = time.monotonic()
    await eventually(lambda: time.monotonic() - began > 0.6, within=5, what="more than half of the window")
    await permits(gate)

    async def again() -> bool:
        return isinstance(await gate.admit(asked()), Admitted)

    await eventually(again, within=5, what="the first one's end")
    assert await redis_client.zcard(COUNTER) == 2
    assert first[0] not in await redis_client.zrange(COUNTER, 0, -1)


async def test_exactly_the_limit_is_admitted_by_several_processes(link: RedisLink, other_link: RedisLink) -> None:
    gates = [RateQuota(each, Allowance(limit=20), holder=f"p{n}") for n, each in enumerate((link, other_link))]

    verdicts = await asyncio.gather(*(gates[number % 2].admit(asked()) for number in range(100)))

    assert sum(isinstance(verdict, Admitted) for verdict in verdicts) == 20


async def test_what_ended_still_counts_and_what_was_never_sent_does_not(
    link: RedisLink, redis_client: RedisClient
) -> None:
    gate = RateQuota(link, Allowance(limit=2), holder="p")
    async with running(gate):
        await give_back(await permits(gate), DONE)
        await give_back(await permits(gate), NOT_SENT)

        async def one() -> bool:
            return await redis_client.zcard(COUNTER) == 1

        await eventually(one, within=5, what="one admission in the window")

    assert isinstance(await gate.admit(asked()), Admitted)
    assert await gate.admit(asked()) == OVER


async def test_tokens_that_were_not_used_are_taken_off(link: RedisLink, redis_client: RedisClient) -> None:
    gate = RateQuota(link, Allowance(limit=1000, counts="tokens"), holder="p")
    request = asked(payload=b'{"max_tokens": 800}')
    async with running(gate):
        taken = await permits(gate, request)
        refused = await gate.admit(request)
        await give_back(taken, Feedback(kind="accepted", input_tokens=20, output_tokens=30))

        async def corrected() -> bool:
            return await redis_client.get("quota-total:userid:ann") == b"50"

        await eventually(corrected, within=5, what="the true cost")

    assert refused == OVER
    assert isinstance(await gate.admit(request), Admitted)


# ---------------------------------------------------------------- reservations


def of_team(team: str) -> Asked:
    return asked(labels={"team": team, "tier": "async"})


async def test_a_bucket_is_reserved_up_to_its_cap_and_overflow_beyond(
    link: RedisLink, redis_client: RedisClient
) -> None:
    gate = ReservationClassifier(link, ["team", "tier", "model"], holder="p")
    await redis_client.set("rmp:cap:a:async:", 2)
    requests = [of_team("a") for _ in range(3)]

    taken = [await permits(gate, request) for request in requests]
    in_flight = await redis_client.get("rmp:inflight:a:async:")
    await give_back(taken[0])
    await permits(gate, again := of_team("a"))
    await permits(gate, without_cap := of_team("b"))

    assert [request.labels["classification"] for request in requests] == ["reserved", "reserved", "overflow"]
    assert in_flight == b"2"
    assert again.labels["classification"] == "reserved"
    assert without_cap.labels["classification"] == "overflow"  # The fallback cap is 0.


async def test_without_redis_a_quota_fails_and_a_classifier_says_overflow(
    redis_url: str, redis_server: Redis, proxy: MakeProxy
) -> None:
    before = await proxy(redis_server)
    await before.refuse()
    async with linked(before.url(redis_url)).open() as away:
        request = of_team("a")

        for gate in (
            ConcurrencyQuota(away, Allowance(limit=1), holder="p"),
            RateQuota(away, Allowance(limit=1), holder="p"),
        ):
            with pytest.raises(GateFailed):
                await gate.admit(asked())
        verdict = await ReservationClassifier(away, ["team"], holder="p").admit(request)

    assert (verdict, request.labels["classification"]) == (Admitted(), "overflow")


# ---------------------------------------------------------------- a budget in a key


async def test_a_budget_in_a_key_is_followed_case_204(
    redis_url: str, redis_server: Redis, redis_client: RedisClient, proxy: MakeProxy
) -> None:
    before = await proxy(redis_server)
    async with linked(before.url(redis_url), 0.2).open() as link:
        gate = BudgetKeyGate(link, "b", look_s=0.1, believed_s=0.3)
        assert gate.budget() == 0  # It has not looked yet.
        async with running(gate):
            for said, budget in [
                (None, 1.0),
                ("0.5", 0.5),
                ("0", 0.0),
                ("7", 1.0),
                ("-1", 0.0),
                ("much", 1.0),
                ("nan", 1.0),
                ("0.25", 0.25),
            ]:
                if said is not None:
                    await redis_client.set("b", said)
                await eventually(
                    lambda budget=budget: gate.budget() == budget,  # type: ignore[misc]
                    within=5,
                    what=f"the budget {budget} of {said}",
                )
                assert isinstance(await gate.admit(asked()), Admitted if budget else TurnedAway)
            await before.refuse()
            await before.cut()
            await eventually(lambda: gate.budget() == 0, within=5, what="a closed gate without Redis")
            assert await gate.admit(asked()) == TurnedAway()


# ---------------------------------------------------------------- a leased rate


def leased(link: RedisLink, told: list[DrainLimit] | None = None) -> LeasedRateGate:
    return LeasedRateGate(
        link,
        control_key="rate",
        state_key="rate:state",
        pool_id="pool",
        look_s=0.1,
        told=(lambda _: None) if told is None else told.append,
    )


async def lend(client: RedisClient, rate: str = "2", **changes: str) -> None:
    command = {
        "api_version": API_VERSION,
        "pool_id": "pool",
        "max_admission_rps": rate,
        "valid_until_unix_ms": str(int(time.time() * 1000) + 60_000),
        "decision_id": "d1",
    } | changes
    await client.delete("rate")
    await client.hset("rate", mapping={name: value for name, value in command.items() if value})


async def admitted(*gates: Gate) -> list[bool]:
    return [isinstance(await gate.admit(asked()), Admitted) for gate in gates]


async def test_a_rate_is_shared_by_all_processes_case_220_case_221(
    link: RedisLink, other_link: RedisLink, redis_client: RedisClient
) -> None:
    await lend(redis_client)
    one, two = leased(link), leased(other_link)
    began = time.monotonic()

    assert await admitted(one, two, one, two) == [True, True, False, False]

    async def one_more() -> bool:
        return any(await admitted(one))

    await eventually(one_more, within=5, what="half a second at two a second")
    assert time.monotonic() - began >= 0.45
    assert await admitted(two) == [False]


async def test_a_clock_that_was_set_back_does_not_fill_the_bucket_twice(
    link: RedisLink, redis_client: RedisClient
) -> None:
    await lend(redis_client)
    ahead = int(time.time() * 1000) + 3_600_000
    await redis_client.hset("rate:state", mapping={"tokens": "0", "last_ms": ahead})

    assert await admitted(leased(link)) == [False]
    assert await redis_client.hget("rate:state", "last_ms") == str(ahead).encode()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"valid_until_unix_ms": "1000"}, id="lapsed"),
        pytest.param({"valid_until_unix_ms": "9e12"}, id="an end that is no whole number"),
        pytest.param({"pool_id": "other"}, id="of another pool"),
        pytest.param({"api_version": "v0"}, id="of another version"),
        pytest.param({"decision_id": ""}, id="incomplete"),
        pytest.param({"max_admission_rps": "-1"}, id="negative"),
        pytest.param({"max_admission_rps": "inf"}, id="infinite"),
        pytest.param({"max_admission_rps": "nan"}, id="not a number"),
        pytest.param({"max_admission_rps": "fast"}, id="no number"),
    ],
)
async def test_a_lease_that_cannot_be_believed_closes_and_leaves_no_state_case_222(
    link: RedisLink, redis_client: RedisClient, changes: dict[str, str]
) -> None:
    told: list[DrainLimit] = []
    gate = leased(link, told)
    await lend(redis_client, **changes)

    verdict = await gate.admit(asked())

    assert verdict == TurnedAway()
    assert gate.budget() == 0
    assert await redis_client.exists("rate:state") == 0
    assert told == [DrainLimit(), DrainLimit()]


async def test_gauges_of_a_leased_rate_exist_from_the_start_and_follow_it_case_224(
    link: RedisLink, redis_client: RedisClient
) -> None:
    told: list[DrainLimit] = []
    gate = leased(link, told)
    assert told == [DrainLimit(rate=0, valid_until=0, valid=False)]
    async with running(gate):
        await lend(redis_client, "2.5")
        await eventually(lambda: gate.budget() == 1, within=5, what="an open gate")
        seen = told[-1]
        await lend(redis_client, "0")
        await eventually(lambda: told[-1].valid and told[-1].rate == 0, within=5, what="an explicit pause")
        assert await admitted(gate) == [False]
        assert gate.budget() == 0
        await redis_client.delete("rate")
        await eventually(lambda: not told[-1].valid, within=5, what="no lease any more")

    assert (seen.rate, seen.valid) == (2.5, True)
    assert 0 < seen.valid_until - time.time() <= 60


async def test_a_token_that_was_not_used_is_returned(link: RedisLink, redis_client: RedisClient) -> None:
    await lend(redis_client, "1")
    gate = leased(link)

    taken = await permits(gate)
    await give_back([*taken, *taken], NOT_SENT)
    again = await permits(gate)
    await give_back(again, DONE)

    assert await admitted(gate) == [False]


async def test_the_state_of_a_rate_ends_with_its_lease(link: RedisLink, redis_client: RedisClient) -> None:
    await lend(redis_client)
    await admitted(leased(link))

    assert 0 < await redis_client.pttl("rate:state") <= 61_000


async def test_without_redis_a_leased_rate_is_closed_and_does_not_fail(
    redis_url: str, redis_server: Redis, proxy: MakeProxy
) -> None:
    before = await proxy(redis_server)
    await before.refuse()
    async with AsyncExitStack() as links:
        away = await links.enter_async_context(linked(before.url(redis_url)).open())
        gate = leased(away)

        assert await gate.admit(asked()) == TurnedAway()
        assert gate.budget() == 0
