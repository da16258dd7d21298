"""The gate `sql-quota`: one limit over several processes, exact under contention, and free of those who die.

Cases on retired holders are met in another way: each slot has a name, so that a release may be repeated.
"""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import pytest

from inference_worker.errors import GateFailed, StatementRefused
from inference_worker.gates.parameters import Parameters
from inference_worker.gates.quota import Allowance
from inference_worker.gates.quota_sql import SqlQuota, sql_quota
from inference_worker.ports import Admitted, Asked, Feedback, TurnedAway
from inference_worker.sql_place import SqlPlace
from tests.faults.proxy import Do
from tests.integration.conftest import MakeProxy
from tests.services import Postgres
from tests.sql_kit import place_at
from tests.waiting import eventually

DONE = Feedback(kind="accepted")
NOT_SENT = Feedback(kind="not_sent")


@pytest.fixture
async def place(sql_url: str) -> AsyncGenerator[SqlPlace]:
    async with place_at(sql_url) as made:
        yield made


@asynccontextmanager
async def quota(
    place: SqlPlace, limit: int, *, at_once: bool = True, lease_s: float = 15.0, **options: object
) -> AsyncGenerator[SqlQuota]:
    """One process's gate, which runs."""
    allowance = Allowance(limit=limit, **options)  # type: ignore[arg-type]  # Test data by name.
    gate = SqlQuota(place, allowance, holder="test", at_once=at_once, lease_s=lease_s)
    until = asyncio.Event()
    running = asyncio.create_task(gate.run(until))
    try:
        yield gate
    finally:
        until.set()
        await running


def asked(user: str = "alice", **labels: str) -> Asked:
    return Asked(request_id="r", metadata={"userid": user}, labels=dict(labels), deadline=2e9)


async def admitted(gate: SqlQuota, count: int, user: str = "alice") -> list[Admitted]:
    """Those of so many at the same time that may go on."""
    verdicts = await asyncio.gather(*(gate.admit(asked(user)) for _ in range(count)))
    return [verdict for verdict in verdicts if isinstance(verdict, Admitted)]


async def slots(place: SqlPlace) -> int:
    """What counts now."""
    (taken,) = await place.link.row(
        "select count(*) from iw_quota_slots join iw_quota_holders using (holder) where lease_until > clock_timestamp()"
    )
    return int(taken)


async def test_one_limit_over_several_processes_and_a_key_for_each_tenant_case_160(place: SqlPlace) -> None:
    async with quota(place, 5) as a, quota(place, 5) as b, quota(place, 9) as wider:
        assert len(await admitted(a, 3)) == 3
        assert len(await admitted(b, 3)) == 2
        assert await admitted(a, 1) == []
        assert len(await admitted(a, 6, "bob")) == 5
        assert len(await admitted(wider, 9)) == 4, "a higher limit sees the same count"


async def test_a_permit_frees_its_own_slot_once_case_161(place: SqlPlace) -> None:
    async with quota(place, 3) as a, quota(place, 3) as b:
        (mine,) = await admitted(a, 1)
        theirs = await admitted(b, 2)
        for _ in range(3):
            await mine.permits[0].release(DONE)

        async def two() -> bool:
            return await slots(place) == 2

        await eventually(two, within=5, what="one slot is free")
        assert len(theirs) == 2
        with pytest.raises(StatementRefused, match="as many costs as slots"):
            await place.link.fetch("select iw1_quota_take('k', 'l', 'v', 1, 'h', '{a,b}', '{1}')")


async def test_slots_of_a_holder_that_lapsed_are_free_and_it_takes_no_more_case_162_174(place: SqlPlace) -> None:
    """A process that was killed renews nothing. Its name is worth nothing then, nor is one that nobody knows."""
    async with quota(place, 2) as dead, quota(place, 2) as alive:
        assert len(await admitted(dead, 2)) == 2
        assert await admitted(alive, 1) == []
        await place.link.fetch("update iw_quota_holders set lease_until = now() - interval '1 s'")
        assert len(await admitted(alive, 3)) == 2
        for holder in (dead._holder, "unknown"):
            (taken,) = await place.link.row(
                "select iw1_quota_take('quota:userid:carol', 'l', 'v', 9, $1, '{x}', '{1}')", holder
            )
            assert taken is None


async def test_a_lease_that_lapsed_fails_no_request_and_its_late_release_frees_nothing_case_173(
    place: SqlPlace,
) -> None:
    async with quota(place, 2) as gate:
        (old,) = await admitted(gate, 1)
        await place.link.fetch("update iw_quota_holders set lease_until = now() - interval '1 s'")
        new = await admitted(gate, 3)
        assert len(new) == 2
        await old.permits[0].release(DONE)
        await asyncio.sleep(0.05)
        assert await slots(place) == 2
        assert await admitted(gate, 1) == []


async def test_many_at_random_never_exceed_the_limit_and_end_at_nothing_case_164(place: SqlPlace) -> None:
    rng, limit, running, peak = random.Random(3), 7, 0, 0
    async with quota(place, limit) as one, quota(place, limit) as two:

        async def work(gate: SqlQuota) -> None:
            nonlocal running, peak
            for _ in range(12):
                verdict = await gate.admit(asked())
                if isinstance(verdict, Admitted):
                    running += 1
                    peak = max(peak, running)
                    await asyncio.sleep(rng.uniform(0, 0.004))
                    running -= 1
                    await verdict.permits[0].release(DONE)
                await asyncio.sleep(rng.uniform(0, 0.002))

        await asyncio.gather(*(work((one, two)[number % 2]) for number in range(24)))

        async def none() -> bool:
            return await slots(place) == 0

        await eventually(none, within=5, what="nothing is held")
    assert 2 <= peak <= limit


async def test_a_window_slides_case_165(place: SqlPlace) -> None:
    """3 now, 2 at half of it, then none; once the first have left it, 3."""
    async with quota(place, 5, at_once=False, window_s=10.0) as gate:
        assert len(await admitted(gate, 3)) == 3
        await place.link.fetch("update iw_quota_admissions set at = at - interval '5 s'")
        assert len(await admitted(gate, 3)) == 2
        assert await admitted(gate, 1) == []
        await place.link.fetch("update iw_quota_admissions set at = at - interval '5.1 s'")
        assert len(await admitted(gate, 5)) == 3


@pytest.mark.parametrize("at_once", [True, False])
async def test_exactly_the_limit_is_let_in_under_a_flood_case_166(place: SqlPlace, at_once: bool) -> None:
    for trial in range(5):
        user = f"user-{trial}"
        async with (
            quota(place, 10, at_once=at_once) as a,
            quota(place, 10, at_once=at_once) as b,
            quota(place, 10, at_once=at_once) as c,
        ):
            got = await asyncio.gather(*(admitted(gate, 60, user) for gate in (a, b, c)))
        assert sum(map(len, got)) == 10


async def test_who_gives_up_while_waiting_takes_nothing_case_168(place: SqlPlace) -> None:
    async with quota(place, 100) as gate:
        for turns in range(40):
            asking = asyncio.create_task(gate.admit(asked()))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            with suppress(asyncio.CancelledError):
                verdict = await asking
                assert isinstance(verdict, Admitted)
                await verdict.permits[0].release(NOT_SENT)

        async def none() -> bool:
            return await slots(place) == 0

        await eventually(none, within=5, what="all is given back")


@pytest.mark.parametrize("do", [Do.CUT, Do.CUT_AFTER], ids=["it never arrived", "it was done"])
async def test_a_release_whose_answer_is_lost_frees_one_slot_in_the_end_case_169_170_172(
    sql_url: str, place: SqlPlace, postgres: Postgres, proxy: MakeProxy, do: Do
) -> None:
    """The one that runs on stays counted meanwhile, and the gate goes on taking."""
    way = await proxy(postgres)
    async with place_at(way.url(sql_url)) as behind, quota(behind, 3, lease_s=0.4) as gate:
        first, second = await admitted(gate, 2)
        way.when_client_sends(b"delete from iw_quota_slots", do)
        await first.permits[0].release(DONE)

        async def one() -> bool:
            return await slots(place) == 1

        await eventually(one, within=5, what="one slot is free")
        await asyncio.sleep(0.6)
        assert await slots(place) == 1, "renewed beyond its lease"
        assert len(await admitted(gate, 3)) == 2
        await second.permits[0].release(DONE)


async def test_a_taking_whose_answer_is_lost_holds_nothing(
    sql_url: str, place: SqlPlace, postgres: Postgres, proxy: MakeProxy
) -> None:
    way = await proxy(postgres)
    async with place_at(way.url(sql_url)) as behind, quota(behind, 3) as gate:
        (held,) = await admitted(gate, 1)
        way.when_client_sends(b"quota:userid:alice", Do.CUT_AFTER)
        with pytest.raises(GateFailed):
            await gate.admit(asked())

        async def one() -> bool:
            return await slots(place) == 1

        await eventually(one, within=5, what="the slot that nobody has is free")
        await held.permits[0].release(DONE)


async def test_at_the_end_what_was_given_back_is_free_and_no_holder_is_left_case_174(place: SqlPlace) -> None:
    async with quota(place, 3) as gate:
        several = await admitted(gate, 3)
        for one in several:
            await one.permits[0].release(DONE)
    assert (await place.link.row("select count(*) from iw_quota_holders"))[0] == 0


async def test_what_was_never_sent_is_taken_off_and_tokens_are_put_right(place: SqlPlace) -> None:
    async with quota(place, 100, at_once=False, counts="tokens") as gate:
        ask = Asked(
            request_id="r",
            metadata={"userid": "a"},
            labels={},
            deadline=2e9,
            payload=b'{"prompt":"' + b"x" * 160 + b'"}',
        )
        sent, unsent = await gate.admit(ask), await gate.admit(ask)
        assert isinstance(sent, Admitted)
        assert isinstance(unsent, Admitted)
        await sent.permits[0].release(Feedback(kind="accepted", input_tokens=5, output_tokens=2))
        await unsent.permits[0].release(NOT_SENT)

        async def seven() -> bool:
            rows = await place.link.fetch("select cost from iw_quota_admissions")
            return [row[0] for row in rows] == [7]

        await eventually(seven, within=5, what="the true cost")


async def test_a_quota_marks_or_refuses_and_leaves_those_without_the_attribute_alone(place: SqlPlace) -> None:
    async with quota(place, 1) as blocking, quota(place, 1, blocking=False, prefix="c:") as classifying:
        first, second = asked(), asked()
        assert isinstance(await blocking.admit(first), Admitted)
        assert await blocking.admit(second) == TurnedAway(because="quota_exhausted")
        assert (first.labels["classification"], second.labels["classification"]) == ("reserved", "overflow")
        await classifying.admit(asked())
        over = asked()
        assert await classifying.admit(over) == Admitted()
        assert over.labels["classification"] == "overflow"
        nobody = Asked(request_id="r", metadata={}, labels={}, deadline=2e9)
        assert await blocking.admit(nobody) == Admitted()
        assert nobody.labels == {}


async def test_a_tenants_limit_may_be_changed_while_everything_runs(place: SqlPlace) -> None:
    async with quota(place, 1) as gate:
        assert len(await admitted(gate, 5)) == 1
        await place.link.fetch("insert into iw_quota_limits values ('quota-limits:userid', 'alice', 3)")
        assert len(await admitted(gate, 5)) == 2


async def test_a_tenant_whose_name_no_text_can_hold_is_counted_under_its_hash(place: SqlPlace) -> None:
    async with quota(place, 1) as gate:
        first = await admitted(gate, 2, "a\0b")
        other = await admitted(gate, 2, "a\0c")

    assert (len(first), len(other)) == (1, 1)


async def test_who_waits_is_told_of_a_slot_of_this_process(place: SqlPlace) -> None:
    async with quota(place, 1) as gate:
        (held,) = await admitted(gate, 1)
        changed = asyncio.Event()
        assert gate.signal(changed, asked())
        await held.permits[0].release(DONE)
        async with asyncio.timeout(5):
            await changed.wait()
        assert not gate.signal(changed, Asked(request_id="r", metadata={}, labels={}, deadline=2e9))


async def test_without_an_answer_it_cannot_be_said(sql_url: str, postgres: Postgres, proxy: MakeProxy) -> None:
    way = await proxy(postgres)
    async with place_at(way.url(sql_url)) as behind, quota(behind, 3) as gate:
        await way.cut()
        way.when_client_sends(lambda _: True, Do.CUT, times=50)
        with pytest.raises(GateFailed, match="the quota cannot be asked"):
            await gate.admit(asked())


def test_its_parameters_are_those_of_redis_quota_without_an_address_case_185() -> None:
    problems: list[str] = []
    given = Parameters({"limit": 0, "mode": "odd", "address": "x"}, "pools[0].gate_params", problems)
    gate = sql_quota(given, None, holder=lambda: "h")

    assert len(problems) == 3
    assert gate.budget() == 1.0
    fine = sql_quota(Parameters({"limit": "7"}, "pools[0].gate_params", []), None, holder=lambda: "h")
    assert fine.closes_at() == "7 requests within 60 s for each userid, or what iw_quota_limits says"
