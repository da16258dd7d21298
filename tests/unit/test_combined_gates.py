"""Gates made of gates: all or none with roll-back, wait instead of refuse, and who goes on where the pool is full."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.errors import GateFailed
from inference_worker.gates.aimd import Aimd, AimdRules
from inference_worker.gates.basic import Constant, LocalMaxConcurrency
from inference_worker.gates.combined import Composite, WaitOnRefuse, composite, wait_on_refuse
from inference_worker.gates.parameters import GateSpec, Parameters
from inference_worker.gates.permits import ASK_AGAIN_S, POLL_S, Signals, give_back
from inference_worker.gates.tiers import TierPriorityAdmission, tier_priority_admission
from inference_worker.gates.waiting import outlast
from inference_worker.ports import Admitted, Dropped, Feedback, Gate, Parked, TurnedAway, Verdict
from tests.unit.gate_kit import RecordedPermit, Told, admitted, asked, at_once, release

DROPPED = Dropped(status_code=503, error_code="GATE_DROPPED", error="no")


@pytest.mark.parametrize(
    ("budgets", "least"), [((), 1.0), ((0.4,), 0.4), ((0.9, 0.2, 0.5), 0.2)], ids=["none", "one", "several"]
)
def test_the_budget_of_several_gates_is_the_smallest_case_214(budgets: tuple[float, ...], least: float) -> None:
    assert Composite([Told(Admitted(), budget=budget) for budget in budgets]).budget() == least


def test_no_gates_let_all_through_case_214() -> None:
    assert at_once(Composite([]).admit(asked())) == Admitted()


def test_what_all_admit_goes_on_with_all_their_permits_case_214() -> None:
    permits = [RecordedPermit(name, []) for name in "abc"]
    gate = Composite([Told(Admitted(permits=(permits[0],))), Told(Admitted(permits=tuple(permits[1:])))])

    assert at_once(gate.admit(asked())) == Admitted(permits=tuple(permits))
    assert not any(permit.seen for permit in permits)


@pytest.mark.parametrize("verdict", [TurnedAway(because="quota_exhausted"), Parked(within_s=3.0), DROPPED], ids=repr)
async def test_what_one_does_not_admit_goes_back_to_the_others_case_214(verdict: Verdict) -> None:
    order: list[str] = []
    permits = [RecordedPermit(name, order) for name in "ab"]
    never = Told(Admitted())
    gate = Composite([*(Told(Admitted(permits=(permit,))) for permit in permits), Told(verdict), never])

    assert await gate.admit(asked()) == verdict
    assert order == ["b", "a"]
    assert [permit.seen for permit in permits] == [[Feedback(kind="not_sent")]] * 2
    assert never.asks == 0


async def test_a_gate_that_fails_leaves_nothing_taken_case_214() -> None:
    permit = RecordedPermit("a", [])

    with pytest.raises(GateFailed):
        await Composite([Told(Admitted(permits=(permit,))), Told(GateFailed("gone"))]).admit(asked())

    assert permit.seen == [Feedback(kind="not_sent")]


@given(st.lists(st.sampled_from(["admit", "wait", "refuse", "drop", "fail"]), max_size=6))
def test_whatever_the_gates_say_all_is_taken_or_nothing_is(said: list[str]) -> None:
    slots = [LocalMaxConcurrency(1) for _ in said]
    verdicts: dict[str, Verdict | Exception] = {
        "wait": Parked(within_s=1),
        "refuse": TurnedAway(),
        "drop": DROPPED,
        "fail": GateFailed(""),
    }
    gates: list[Gate] = []
    for word, slot in zip(said, slots, strict=True):
        gates += [slot] if word == "admit" else [slot, Told(verdicts[word])]
    first = next((word for word in said if word != "admit"), None)

    try:
        verdict = at_once(Composite(gates).admit(asked()))
    except GateFailed:
        assert first == "fail"
        assert all(slot.budget() == 1 for slot in slots)
        return

    taken = isinstance(verdict, Admitted)
    assert taken is (first is None)
    assert all(slot.budget() == (0 if taken else 1) for slot in slots)


@pytest.mark.parametrize("turns", range(1, 12))
async def test_a_question_that_is_cancelled_leaves_nothing_taken(turns: int) -> None:
    """At every turn of the loop that it may take, and also while the roll-back of a refusal is under way."""
    order: list[str] = []
    permits = [RecordedPermit(name, order) for name in "abc"]
    gate = Composite([*(Told(Admitted(permits=(permit,)), takes_s=1e-9) for permit in permits), Told(TurnedAway())])
    question = asyncio.create_task(gate.admit(asked()))
    for _ in range(turns):
        await asyncio.sleep(0)

    question.cancel()
    await asyncio.wait([question])

    assert all(len(permit.seen) == 1 for permit in permits if permit.name in order)
    assert len(order) == len(set(order))
    assert order in ([], ["a"], ["b", "a"], ["c", "b", "a"])


async def test_a_cancelled_question_gives_back_what_it_had_taken() -> None:
    permit = RecordedPermit("a", [])
    gate = Composite([Told(Admitted(permits=(permit,))), Told(Admitted(), takes_s=60)])
    question = asyncio.create_task(gate.admit(asked()))
    await asyncio.sleep(1)

    question.cancel()
    with pytest.raises(asyncio.CancelledError):
        await question

    assert permit.seen == [Feedback(kind="not_sent")]


async def test_giving_back_goes_on_past_a_cancellation_and_then_tells_of_it() -> None:
    order: list[str] = []
    permits = [RecordedPermit(name, order, takes_s=10) for name in "abc"]
    giving = asyncio.create_task(give_back(permits, Feedback(kind="not_sent")))
    await asyncio.sleep(1)

    giving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await giving

    assert order == ["c", "b", "a"]


async def test_all_inner_gates_keep_their_readings_fresh_until_told_to_stop() -> None:
    inner = [Told(Admitted()) for _ in range(3)]
    until = asyncio.Event()
    gate = TierPriorityAdmission(WaitOnRefuse(Composite(inner)))
    running = asyncio.create_task(gate.run(until))
    await asyncio.sleep(1)

    until.set()
    await running

    assert all(told.ran for told in inner)
    assert gate.closes_at() == "at 1; or at 1; or at 1"
    assert Composite([]).closes_at() == "never"


@pytest.mark.parametrize(
    ("verdict", "seen"),
    [
        pytest.param(TurnedAway(), Parked(within_s=POLL_S), id="a refusal becomes a wait"),
        pytest.param(
            TurnedAway(because="quota_exhausted"),
            Parked(within_s=POLL_S, because="quota_exhausted"),
            id="its reason too",
        ),
        pytest.param(Admitted(), Admitted(), id="an admission"),
        pytest.param(Parked(within_s=9.0), Parked(within_s=9.0), id="a wait"),
        pytest.param(DROPPED, DROPPED, id="a drop"),
    ],
)
def test_only_a_refusal_becomes_a_wait_case_216(verdict: Verdict, seen: Verdict) -> None:
    assert at_once(WaitOnRefuse(Told(verdict)).admit(asked())) == seen


def test_a_failure_and_the_budget_pass_through_a_wait_case_216() -> None:
    with pytest.raises(GateFailed):
        at_once(WaitOnRefuse(Told(GateFailed(""))).admit(asked()))
    assert WaitOnRefuse(Told(Admitted(), budget=0.3)).budget() == 0.3


SATURATED = [TurnedAway(because="quota_exhausted"), Parked(within_s=7.0, because="quota_exhausted")]


@pytest.mark.parametrize("tier", ["interactive", "async", "batch", None, "odd"])
@pytest.mark.parametrize("classification", ["reserved", "overflow", None])
def test_without_saturation_every_tier_goes_on_case_217(tier: str | None, classification: str | None) -> None:
    assert at_once(TierPriorityAdmission(Told(Admitted())).admit(asked(tier, classification))) == Admitted()


@pytest.mark.parametrize("inner", SATURATED, ids=repr)
@pytest.mark.parametrize("tier", ["interactive", "async", "batch", None])
def test_what_is_reserved_waits_for_a_saturated_pool_case_217(inner: Verdict, tier: str | None) -> None:
    verdict = at_once(TierPriorityAdmission(Told(inner)).admit(asked(tier, "reserved")))

    assert isinstance(verdict, Parked)
    assert verdict.within_s == (7.0 if isinstance(inner, Parked) else POLL_S)
    assert verdict.because == "quota_exhausted"


@pytest.mark.parametrize("inner", SATURATED, ids=repr)
@pytest.mark.parametrize("classification", ["overflow", None])
def test_an_interactive_request_beyond_that_is_answered_429_at_once_case_217(
    inner: Verdict, classification: str | None
) -> None:
    """With its status: the original writes it into the text alone."""
    verdict = at_once(TierPriorityAdmission(Told(inner)).admit(asked("interactive", classification)))

    assert isinstance(verdict, Dropped)
    assert (verdict.status_code, verdict.error_code) == (429, "GATE_DROPPED")


@pytest.mark.parametrize("inner", SATURATED, ids=repr)
@pytest.mark.parametrize("tier", ["async", "batch", None, "odd"])
@pytest.mark.parametrize("classification", ["overflow", None])
def test_everything_else_goes_back_to_its_queue_case_217(
    inner: Verdict, tier: str | None, classification: str | None
) -> None:
    verdict = at_once(TierPriorityAdmission(Told(inner)).admit(asked(tier, classification)))

    assert verdict == TurnedAway(because="quota_exhausted")


def test_drops_failures_and_the_budget_are_the_inner_gates_case_217() -> None:
    assert at_once(TierPriorityAdmission(Told(DROPPED)).admit(asked("interactive"))) == DROPPED
    assert TierPriorityAdmission(Told(Admitted(), budget=0.3)).budget() == 0.3
    with pytest.raises(GateFailed):
        at_once(TierPriorityAdmission(Told(GateFailed(""))).admit(asked()))


def test_the_tier_stands_under_the_configured_label() -> None:
    gate = TierPriorityAdmission(Told(TurnedAway()), "rank")

    assert isinstance(at_once(gate.admit(asked("interactive", tier_label="rank"))), Dropped)
    assert at_once(gate.admit(asked("interactive"))) == TurnedAway()


@pytest.mark.parametrize(
    "around",
    [
        lambda gate: WaitOnRefuse(gate),
        lambda gate: WaitOnRefuse(Composite([Constant(), gate])),
        lambda gate: Composite([Constant(), WaitOnRefuse(gate)]),
        lambda gate: TierPriorityAdmission(gate),
        lambda gate: TierPriorityAdmission(Composite([WaitOnRefuse(gate)])),
        lambda gate: WaitOnRefuse(Composite([WaitOnRefuse(TierPriorityAdmission(gate))])),
    ],
    ids=["a wait", "a wait around all", "a wait among all", "tiers", "tiers around all", "all of them"],
)
@pytest.mark.parametrize(
    "make",
    [lambda: LocalMaxConcurrency(1), lambda: Aimd(AimdRules(), lambda: asyncio.get_running_loop().time())],
    ids=["slots", "aimd"],
)
async def test_feedback_and_the_signal_pass_through_wrappers_case_232(make: object, around: object) -> None:
    gate: Gate = around(make())  # type: ignore[operator] # the tables' lambdas
    held = admitted(gate, asked("async", "reserved"))
    waiting = asyncio.create_task(outlast(gate, asked("async", "reserved"), until=100.0, rng=random.Random(1)))
    await asyncio.sleep(0.25)
    assert not waiting.done()

    release(held, "accepted")

    assert isinstance(await waiting, Admitted)
    assert asyncio.get_running_loop().time() == 0.25


@pytest.mark.parametrize(
    "around",
    [
        lambda gates: WaitOnRefuse(Composite(gates)),
        lambda gates: WaitOnRefuse(Composite([Composite(gates)])),
        lambda gates: TierPriorityAdmission(Composite(gates)),
    ],
    ids=["a wait", "twice", "tiers"],
)
@pytest.mark.parametrize(
    "before",
    [lambda: LocalMaxConcurrency(9), lambda: Aimd(AimdRules(min_window=9), lambda: asyncio.get_running_loop().time())],
    ids=["slots", "aimd"],
)
async def test_those_who_wait_do_not_wake_each_other_with_what_their_questions_give_back(
    before: object, around: object
) -> None:
    full, request = LocalMaxConcurrency(1), asked("async", "reserved")
    held = admitted(full, request)
    counted = Told(*[Admitted()] * 500, GateFailed("it is asked in a circle"))
    gate: Gate = around([counted, before(), full])  # type: ignore[operator] # the tables' lambdas
    waiting = [asyncio.create_task(outlast(gate, request, 100.0, random.Random(n))) for n in range(3)]

    await asyncio.sleep(10.0)
    assert counted.asks <= 3 * 10 * 2 + 3
    release(held)

    done, _ = await asyncio.wait(waiting, return_when="FIRST_COMPLETED", timeout=0.0)
    assert len(done) == 1
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


def test_a_gate_that_cannot_tell_is_asked_now_and_then_case_232() -> None:
    quiet = WaitOnRefuse(Composite([Constant(), Told(TurnedAway())]))

    assert at_once(quiet.admit(asked())) == Parked(within_s=POLL_S)
    assert not quiet.signal(asyncio.Event(), asked())
    assert not TierPriorityAdmission(Told(TurnedAway())).signal(asyncio.Event(), asked())
    assert isinstance(quiet, Signals)


def test_an_aimd_window_learns_through_wrappers_case_232() -> None:
    inner = Aimd(AimdRules(), lambda: 0.0)
    gate = TierPriorityAdmission(WaitOnRefuse(Composite([Constant(), inner])))

    for _ in range(3):
        release(admitted(gate, asked("batch", "overflow")), "accepted")

    assert inner.readings()[5].window == 4


def build(spec: GateSpec) -> Gate:
    """As the joining part does, for the types of these tests."""
    match spec.gate_type:
        case "composite":
            return composite(spec.given, build)
        case "wait-on-refuse":
            return wait_on_refuse(spec.given, build)
        case "tier-priority-admission":
            return tier_priority_admission(spec.given, build)
        case "told":
            return Told(TurnedAway(), budget=spec.given.number("budget"))
        case other:
            spec.given.problems.append(f"{spec.where}: {other}")
            return Constant()


def test_nested_gates_are_made_of_their_parameters() -> None:
    problems: list[str] = []
    given = Parameters(
        {
            "saturation_gate": "wait-on-refuse",
            "saturation_gate_params": {
                "gate": '{"gate_type": "composite", "gate_params": {"gates": [{"gate_type": "told", "gate_params": '
                '{"budget": "0.25"}}]}}'
            },
            "tier_label": "rank",
        },
        "gate_params",
        problems,
    )

    gate = tier_priority_admission(given, build)

    assert not problems
    assert gate.budget() == 0.25
    verdict = at_once(gate.admit(asked("interactive", "reserved", tier_label="rank")))
    assert verdict == Parked(within_s=POLL_S)
    assert at_once(gate.admit(asked("interactive", tier_label="rank"))) != TurnedAway()


@pytest.mark.parametrize(
    ("gate_type", "given", "problem"),
    [
        ("composite", {}, "p.gates: is missing"),
        ("composite", {"gates": [{"gate_type": "odd"}]}, "p.gates[0]: odd"),
        ("wait-on-refuse", {}, "p.gate: is missing"),
        ("tier-priority-admission", {}, "p.saturation_gate: is missing"),
        ("tier-priority-admission", {"saturation_gate": "odd"}, "p.saturation_gate: odd"),
        (
            "wait-on-refuse",
            {"gate": {"gate_type": "told", "gate_params": {"budget": "x"}}},
            "p.gate.gate_params.budget: ",
        ),
    ],
)
def test_what_is_wrong_with_a_nested_gate_is_told_with_its_place(
    gate_type: str, given: dict[str, object], problem: str
) -> None:
    params = Parameters(given, "p")

    gate = build(GateSpec(gate_type=gate_type, given=params, where="p"))

    assert len(params.problems) == 1
    assert params.problems[0].startswith(problem)
    at_once(gate.admit(asked()))


def test_pauses_are_short_without_a_signal_and_long_with_one() -> None:
    assert POLL_S < ASK_AGAIN_S
    full = LocalMaxConcurrency(1)
    admitted(full, asked())
    verdict = at_once(WaitOnRefuse(full).admit(asked()))

    assert isinstance(verdict, Parked)
    assert verdict.within_s == ASK_AGAIN_S
