"""Gates on metrics as a document names them: their formulas, their parameters, and what they do without a number."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest
from structlog.testing import capture_logs

from inference_worker.gates.combined import WaitOnRefuse
from inference_worker.gates.from_metrics import (
    Surroundings,
    binary_metric,
    endpoint_scrape,
    prometheus_budget,
    prometheus_query,
    prometheus_saturation,
)
from inference_worker.gates.parameters import Parameters
from inference_worker.gates.saturation import Seen
from inference_worker.gates.tiers import TierPriorityAdmission
from inference_worker.ports import Admitted, Asked, Dropped, Feedback, Gate, Parked, Permit, TurnedAway
from tests.unit.prometheus_kit import URL, Neighbours, page, unix_now, vector

Make = Callable[[Parameters, Surroundings], Gate]
DONE, NOT_SENT = Feedback(kind="accepted"), Feedback(kind="not_sent")
SATURATION, READY, QUEUED, PER_POD, RUNNING = (
    "flow_control_pool_saturation",
    "ready_endpoints",
    "flow_control_queue_size",
    "per_endpoint_queue_size",
    "num_requests_running",
)


def asked() -> Asked:
    return Asked(request_id="r", metadata={}, labels={}, deadline=1e12)


def around(neighbours: Neighbours, told: list[Seen] | None = None, **changes: object) -> Surroundings:
    made = Surroundings(
        client=neighbours.client(),
        now=unix_now,
        chance=lambda: 0.0,
        prometheus_url=URL,
        told=(lambda _: None) if told is None else told.append,
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # The tests' own names.


def gate_of(make: Make, surroundings: Surroundings, **parameters: object) -> Gate:
    given = Parameters(parameters, "gate_params")
    gate = make(given, surroundings)
    given.raise_problems()
    return gate


def problems(make: Make, surroundings: Surroundings, **parameters: object) -> str:
    given = Parameters(parameters, "gate_params")
    make(given, surroundings)
    return "\n".join(given.problems)


@asynccontextmanager
async def running(gate: Gate) -> AsyncGenerator[None]:
    """Its first look has ended."""
    until = asyncio.Event()
    task = asyncio.create_task(gate.run(until))
    try:
        await asyncio.sleep(0.5)
        yield
    finally:
        until.set()
        await task


async def admissions(gate: Gate, most: int = 1000) -> list[Permit]:
    """All that it lets through now."""
    permits: list[Permit] = []
    for _ in range(most):
        verdict = await gate.admit(asked())
        if not isinstance(verdict, Admitted):
            assert verdict == TurnedAway()
            break
        permits.extend(verdict.permits)
    return permits


async def budget_of(make: Make, answers: dict[str, Callable[[], httpx.Response]], **parameters: object) -> float:
    """Whatever it is, the gate is closed where it is 0 and admits where it is not."""
    neighbours = Neighbours()
    neighbours.answers.update(answers)
    gate = gate_of(make, around(neighbours), **parameters)
    async with running(gate):
        budget = gate.budget()
        assert isinstance(await gate.admit(asked()), Admitted) == (budget > 1e-9)
    return budget


# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize(
    ("saturation", "threshold", "budget"),
    [
        (0.0, 0.8, 0.8),
        (0.3, 0.8, 0.5),
        (0.8, 0.8, 0.0),
        (0.95, 0.8, 0.0),
        (1.0, 0.8, 0.0),
        (0.79, 0.8, 0.01),
        (1.5, 0.8, 0.0),
        (-0.5, 0.8, 1.0),
        (0.99, 1.0, 0.01),
    ],
)
@pytest.mark.parametrize("each", [None, 100])
async def test_a_saturation_leaves_a_budget_below_the_threshold_case_188(
    saturation: float, threshold: float, budget: float, each: int | None
) -> None:
    answers = {SATURATION: lambda: vector(1 - saturation), READY: lambda: vector(100)}
    stamps = {"timestamp": lambda: vector(unix_now())}

    found = await budget_of(
        prometheus_saturation, stamps | answers, pool="p", threshold=threshold, max_concurrency=each
    )

    assert found == pytest.approx(budget)


@pytest.mark.parametrize("answer", [vector, lambda: vector("NaN"), lambda: vector("-Inf"), lambda: httpx.Response(500)])
@pytest.mark.parametrize(("fallback", "budget"), [(1, 0.0), (0, 1.0), (None, 1.0), (0.4, 0.6)])
async def test_a_saturation_that_is_not_seen_is_the_fallback_case_189(
    answer: Callable[[], httpx.Response], fallback: float | None, budget: float
) -> None:
    assert await budget_of(prometheus_saturation, {SATURATION: answer}, pool="p", fallback=fallback) == pytest.approx(
        budget
    )


@pytest.mark.parametrize(
    ("value", "baseline", "fallback", "budget"),
    [
        (0.7, 0.1, 0, 0.6),
        (0.1, 0.1, 0, 0.0),
        (0.05, 0.1, 0, 0.0),
        (0.7, 0, 0, 0.7),
        ("NaN", 0.1, 0.3, 0.3),
        ("NaN", 0.1, 2, 1.0),
        ("NaN", 0.1, -1, 0.0),
    ],
)
async def test_a_budget_is_what_is_free_less_the_baseline_case_190(
    value: float | str, baseline: float, fallback: float, budget: float
) -> None:
    answers: dict[str, Callable[[], httpx.Response]] = {
        "timestamp": lambda: vector(unix_now()),
        "1 - ": lambda: vector(value),
        READY: lambda: vector(100),
    }

    found = await budget_of(prometheus_budget, answers, pool="p", baseline=baseline, fallback=fallback)

    assert found == pytest.approx(budget)


@pytest.mark.parametrize(("value", "budget"), [(0.4, 0.4), (0, 0.0), (-3, 0.0), (7, 1.0), ("NaN", 0.0)])
async def test_the_value_of_a_query_is_the_budget_case_190(value: float | str, budget: float) -> None:
    assert await budget_of(prometheus_query, {"up": lambda: vector(value)}, query="up") == pytest.approx(budget)


async def test_gauges_show_value_threshold_and_whether_there_is_a_source_case_192() -> None:
    neighbours, told = Neighbours(), list[Seen]()
    gate = gate_of(prometheus_saturation, around(neighbours, told), pool="p")

    for answer in (lambda: vector(0.6), vector, lambda: vector("NaN"), lambda: vector(0.5)):
        neighbours.answers = {"timestamp": lambda: vector(unix_now()), SATURATION: answer}
        async with running(gate):
            pass

    closed_at = 1 - 0.8
    assert told == [
        Seen(value=0.6, threshold=closed_at, available=True, source=0),
        Seen(value=None, threshold=closed_at, available=False, source=None, why_not="no such series"),
        Seen(value=None, threshold=closed_at, available=False, source=None, why_not="the value is NaN"),
        Seen(value=0.5, threshold=closed_at, available=True, source=0),
    ]


@pytest.mark.parametrize(
    ("answer", "open_"),
    [
        pytest.param(lambda: vector(0), True, id="0 is open"),
        pytest.param(lambda: vector(3), False, id="anything else is closed"),
        pytest.param(lambda: vector(0, 1), True, id="the first of several decides"),
        pytest.param(lambda: vector(1, 0), False, id="the first of several decides, closed"),
        pytest.param(vector, True, id="nothing is open"),
        pytest.param(lambda: httpx.Response(500), True, id="a failure is open"),
    ],
)
async def test_a_binary_metric_is_0_or_closed_case_193(answer: Callable[[], httpx.Response], open_: bool) -> None:
    neighbours = Neighbours()
    neighbours.answers = {"full": answer}
    gate = gate_of(binary_metric, around(neighbours), query="full")
    async with running(gate):
        verdict = await gate.admit(asked())

        assert (gate.budget(), verdict) == ((1.0, Admitted()) if open_ else (0.0, TurnedAway()))


async def test_a_budget_uses_a_later_source_while_the_first_has_none_case_329() -> None:
    neighbours, told = Neighbours(), list[Seen]()
    neighbours.answers = {
        "timestamp": lambda: vector(unix_now()),
        f"1 - (sum(llm_d_epp_{QUEUED}": vector,
        f"llm_d_epp_{PER_POD}": lambda: vector(0.4),
        READY: lambda: vector(100),
    }
    gate = gate_of(prometheus_budget, around(neighbours, told), pool="p", baseline=0)
    async with running(gate):
        assert gate.budget() == pytest.approx(0.4)

    assert told[0].source == 1


async def test_a_stale_first_source_is_passed_over() -> None:
    """Present and old is not what a pool is like now."""
    neighbours, told = Neighbours(), list[Seen]()
    neighbours.answers = {
        f"timestamp(llm_d_epp_{QUEUED}": lambda: vector(unix_now() - 300),
        "timestamp": lambda: vector(unix_now()),
        f"1 - (sum(llm_d_epp_{QUEUED}": lambda: vector(0.9),
        f"llm_d_epp_{PER_POD}": lambda: vector(0.4),
        READY: lambda: vector(100),
    }
    gate = gate_of(prometheus_budget, around(neighbours, told), pool="p", baseline=0)
    async with running(gate):
        assert gate.budget() == pytest.approx(0.4)

    assert told[0].source == 1


# ---------------------------------------------------------------- a page


PAGE, PODS = "http://m/metrics", "http://p/metrics"


@pytest.mark.parametrize(
    ("lines", "parameters", "budget"),
    [
        pytest.param(["load 3"], {"max_count_per_pod": 10}, 0.7, id="3 of 10"),
        pytest.param(["load 0.25"], {}, 0.75, id="a part already"),
        pytest.param(["load 30"], {"max_count_per_pod": 10}, 0.0, id="over capacity"),
        pytest.param(["load 0.25"], {"baseline": 0.5}, 0.25, id="less a baseline"),
        pytest.param(['load{e="0"} 0.2', 'load{e="1"} 0.9'], {}, 0.1, id="the fullest of several"),
        pytest.param(['load{e="0"} 2', 'load{e="1"} 3'], {"max_count_per_pod": 10}, 0.5, id="counts add up"),
        pytest.param(["other 1"], {}, 0.0, id="absent is closed"),
        pytest.param(["other 1"], {"fallback": 0.4}, 0.4, id="absent is the fallback"),
        pytest.param(["other 1"], {"absent_value": 0}, 1.0, id="absent stands for a value"),
        pytest.param(["other 1"], {"absent_value": 0.25, "fallback": 0.1}, 0.75, id="which is no fallback"),
        pytest.param(["load 0.3"], {"value_type": "budget"}, 0.3, id="a budget itself"),
        pytest.param(['load{e="0"} 0.2', 'load{e="1"} 0.9'], {"value_type": "budget"}, 0.2, id="the least of several"),
    ],
)
async def test_a_page_leaves_a_budget_case_198_case_200(
    lines: list[str], parameters: dict[str, object], budget: float
) -> None:
    found = await budget_of(endpoint_scrape, {PAGE: lambda: page(*lines)}, url=PAGE, metric="load", **parameters)

    assert found == pytest.approx(budget)


async def test_the_capacity_of_a_page_comes_from_the_pods_that_are_ready_case_198() -> None:
    answers = {PAGE: lambda: page("load 20"), PODS: lambda: page('ready{pool="a"} 4', 'ready{pool="b"} 9')}

    found = await budget_of(
        endpoint_scrape,
        answers,
        url=PAGE,
        metric="load",
        max_count_per_pod=10,
        pods_url=PODS,
        pods_metric="ready",
        pods_labels='{"pool": "a"}',
    )

    assert found == pytest.approx(0.5)


class Pods:
    """A counted gate on pods that take 8 each."""

    def __init__(self, *, used: float, pods: int, counted: bool = True) -> None:
        self.used, self.pods, self.fails = used, pods, False
        self.neighbours = Neighbours()
        self.neighbours.answers = {PAGE: self._page, PODS: lambda: page(f"ready {self.pods}")}
        self.gate = gate_of(
            endpoint_scrape,
            around(self.neighbours),
            url=PAGE,
            metric="load",
            max_count_per_pod=8,
            pods_url=PODS,
            pods_metric="ready",
            admission="counted" if counted else "budget",
        )

    def _page(self) -> httpx.Response:
        return httpx.Response(503) if self.fails else page(f"load {self.used}")


async def test_each_reading_grants_what_it_shows_free_case_201() -> None:
    pods = Pods(used=60, pods=8)
    async with running(pods.gate):
        first = await admissions(pods.gate, 10)
        pods.used = 10
        none = await admissions(pods.gate)
        await asyncio.sleep(5)
        second = await admissions(pods.gate)
        pods.used, pods.pods = 0, 4
        await asyncio.sleep(5)
        third = await admissions(pods.gate)

    assert [len(permits) for permits in (first, none, second, third)] == [4, 0, 54, 32]


async def test_without_a_reading_or_without_pods_nothing_is_granted_case_202() -> None:
    pods = Pods(used=0, pods=8)
    pods.fails = True
    async with running(pods.gate):
        assert (len(await admissions(pods.gate)), pods.gate.budget()) == (0, 0.0)
        pods.fails, pods.pods = False, 0
        await asyncio.sleep(5)
        assert (len(await admissions(pods.gate)), pods.gate.budget()) == (0, 0.0)
        pods.pods = 8
        await asyncio.sleep(5)
        assert len(await admissions(pods.gate)) == 64


async def test_a_failed_look_takes_what_was_granted_case_202() -> None:
    pods = Pods(used=0, pods=8)
    async with running(pods.gate):
        pods.fails = True
        await asyncio.sleep(5)

        assert (len(await admissions(pods.gate)), pods.gate.budget()) == (0, 0.0)


async def test_the_budget_is_the_share_of_the_capacity_that_is_still_granted_case_202() -> None:
    pods = Pods(used=0, pods=1)
    async with running(pods.gate):
        budgets = [pods.gate.budget()]
        await admissions(pods.gate, 2)
        budgets.append(pods.gate.budget())
        await admissions(pods.gate)
        budgets.append(pods.gate.budget())

    assert budgets == [1.0, 0.75, 0.0]


async def test_parallel_calls_get_exactly_what_is_free_case_202() -> None:
    pods = Pods(used=54, pods=8)
    async with running(pods.gate):
        verdicts = await asyncio.gather(*(pods.gate.admit(asked()) for _ in range(200)))

    assert sum(isinstance(verdict, Admitted) for verdict in verdicts) == 10


async def test_a_grant_that_was_not_used_is_put_back_within_its_reading_alone() -> None:
    pods = Pods(used=62, pods=8)
    async with running(pods.gate):
        one, two = await admissions(pods.gate)
        await one.release(DONE)
        assert await admissions(pods.gate) == []
        await two.release(NOT_SENT)
        await two.release(NOT_SENT)
        (three,) = await admissions(pods.gate)
        await asyncio.sleep(5)
        await three.release(NOT_SENT)

        assert len(await admissions(pods.gate)) == 2


async def test_a_budget_of_a_page_is_counted_against_too() -> None:
    """Beyond the form that is compatible: what is admitted counts at once, and what ends makes room at once."""
    pods = Pods(used=60, pods=8, counted=False)
    async with running(pods.gate):
        permits = await admissions(pods.gate)
        await permits[0].release(DONE)
        after = await admissions(pods.gate)

    assert (len(permits), len(after)) == (4, 1)


# ---------------------------------------------------------------- before and without a number


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (prometheus_saturation, {"pool": "p"}),
        (binary_metric, {"query": "q"}),
        (endpoint_scrape, {"url": PAGE, "metric": "m", "max_count_per_pod": 2, "admission": "counted"}),
    ],
)
async def test_the_first_look_is_waited_for_and_no_other(make: Make, parameters: dict[str, object]) -> None:
    neighbours, loop = Neighbours(), asyncio.get_running_loop()
    neighbours.takes_s = 2.0
    gate = gate_of(make, around(neighbours), **parameters)
    async with running(gate):
        before = gate.budget()
        await gate.admit(asked())
        waited_until = loop.time()
        await asyncio.sleep(5.5)
        again = loop.time()
        await gate.admit(asked())

        assert (before, waited_until) == (0, 2.0)
        assert loop.time() == again


async def test_a_first_look_that_takes_too_long_is_waited_for_no_longer() -> None:
    neighbours, loop = Neighbours(), asyncio.get_running_loop()
    gate = gate_of(prometheus_saturation, around(neighbours), pool="p")

    assert isinstance(await gate.admit(asked()), Admitted)  # Its fallback; nobody has even started it.
    assert loop.time() == 10.0


@pytest.mark.parametrize(("tier", "verdict"), [("interactive", 429), ("async", TurnedAway()), ("batch", TurnedAway())])
async def test_a_full_pool_drops_what_somebody_waits_for_and_keeps_the_rest_case_218(
    tier: str, verdict: int | TurnedAway
) -> None:
    neighbours = Neighbours()
    neighbours.answers = {"timestamp": lambda: vector(unix_now()), SATURATION: lambda: vector(0.1)}
    inner = gate_of(prometheus_saturation, around(neighbours), pool="p")
    gate = TierPriorityAdmission(inner)
    async with running(gate):
        said = await gate.admit(replace(asked(), labels={"tier": tier, "classification": "overflow"}))

    assert (said.status_code if isinstance(said, Dropped) else said) == verdict


async def test_a_gate_that_fails_open_still_sends_no_more_than_fills_the_pool() -> None:
    """The last capacity that was seen holds, and what is ours is known without any metric."""
    neighbours = Neighbours()
    neighbours.answers = {"up": lambda: vector(1)}
    gate = gate_of(prometheus_query, around(neighbours), query="up", capacity=10, fallback=1, max_age="10s")
    async with running(gate):
        neighbours.answers = {"up": httpx.ConnectError("gone")}
        await asyncio.sleep(20)

        assert gate.budget() == 1
        assert len(await admissions(gate)) == 10


async def test_a_capacity_of_one_is_used() -> None:
    neighbours = Neighbours()
    neighbours.answers = {
        "timestamp": lambda: vector(unix_now()),
        SATURATION: lambda: vector(1),
        READY: lambda: vector(1),
    }
    gate = gate_of(prometheus_saturation, around(neighbours), pool="p", max_concurrency=1)
    async with running(gate):
        assert len(await admissions(gate)) == 1


async def test_one_that_waits_is_woken_by_an_end_and_by_a_reading_with_room() -> None:
    neighbours = Neighbours()
    neighbours.answers = {"up": lambda: vector(0.5)}
    gate = gate_of(prometheus_query, around(neighbours), query="up", capacity=2)
    waiting = WaitOnRefuse(gate)
    async with running(gate):
        (permit,) = await admissions(gate)
        first, second = await waiting.admit(asked()), await waiting.admit(asked())
        assert isinstance(first, Parked)
        assert isinstance(second, Parked)
        assert first.changed is not None
        assert second.changed is not None
        await permit.release(DONE)
        await permit.release(DONE)
        assert (first.changed.is_set(), second.changed.is_set()) == (True, False)
        neighbours.answers = {"up": lambda: vector(1)}
        await asyncio.sleep(5)
        assert second.changed.is_set()


async def test_one_that_waits_for_a_grant_is_woken_by_the_next_reading() -> None:
    pods = Pods(used=64, pods=8)
    async with running(pods.gate):
        verdict = await WaitOnRefuse(pods.gate).admit(asked())
        pods.used = 0
        await asyncio.sleep(5)

    assert isinstance(verdict, Parked)
    assert verdict.changed is not None
    assert verdict.changed.is_set()


async def test_a_page_whose_pods_cannot_be_counted_is_no_reading() -> None:
    answers: dict[str, Callable[[], httpx.Response]] = {
        PAGE: lambda: page("load 1"),
        PODS: lambda: httpx.Response(500),
    }

    found = await budget_of(
        endpoint_scrape,
        answers,
        url=PAGE,
        metric="load",
        max_count_per_pod=10,
        pods_url=PODS,
        pods_metric="ready",
        fallback=0.3,
    )

    assert found == pytest.approx(0.3)


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (prometheus_saturation, {"pool": "p"}),
        (prometheus_budget, {"pool": "p"}),
        (prometheus_query, {"query": "up"}),
        (binary_metric, {"query": "up"}),
    ],
)
def test_a_gate_that_asks_prometheus_needs_its_address_case_177(make: Make, parameters: dict[str, object]) -> None:
    without = around(Neighbours(), prometheus_url="")

    assert "--prometheus-url" in problems(make, without, **parameters)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (prometheus_saturation, "pool"),
        (prometheus_budget, "pool"),
        (prometheus_query, "query"),
        (endpoint_scrape, "url"),
        (endpoint_scrape, "metric"),
    ],
)
def test_what_a_gate_cannot_do_without_is_asked_for_case_177(make: Make, name: str) -> None:
    assert f"gate_params.{name}: is missing" in problems(make, around(Neighbours()))


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (prometheus_saturation, "threshold", "high"),
        (prometheus_saturation, "fallback", "none"),
        (prometheus_budget, "baseline", "low"),
        (prometheus_budget, "baseline", -0.1),
        (prometheus_budget, "baseline", 1),
        (prometheus_budget, "max_concurrency", 0),
        (prometheus_budget, "max_concurrency", "-5"),
        (prometheus_query, "capacity", 0),
        (endpoint_scrape, "value_type", "load"),
        (endpoint_scrape, "admission", "maybe"),
        (endpoint_scrape, "max_age", 5),
        (endpoint_scrape, "replicas", 0),
        (endpoint_scrape, "colour", "red"),
    ],
)
def test_a_parameter_that_is_none_is_named_case_178_case_200(make: Make, name: str, value: object) -> None:
    enough = {"pool": "p", "query": "q", "url": PAGE, "metric": "m"}
    said = problems(make, around(Neighbours()), **enough, **{name: value})

    assert said.count(f"gate_params.{name}: is ") == 1


def test_a_budget_is_of_a_hundred_requests_a_pod_and_says_where_it_closes_case_178() -> None:
    gate = gate_of(prometheus_budget, around(Neighbours()), pool="p")

    assert gate.closes_at() == ("closed at 95 requests for each ready pod (100 x (1 - 0.05)); without a reading closed")


@pytest.mark.parametrize(
    ("make", "parameters", "said"),
    [
        (prometheus_saturation, {"pool": "p"}, "closed at a saturation of 0.8 and above; without a reading open"),
        (prometheus_query, {"query": "q"}, "closed while the query gives 0 or less; without a reading closed"),
        (
            endpoint_scrape,
            {"url": PAGE, "metric": "m", "max_count_per_pod": 5, "fallback": 0.5},
            "closed while m / (5 x pods) is 1 or more; without a reading a budget of 0.5",
        ),
        (
            endpoint_scrape,
            {"url": PAGE, "metric": "m", "max_count_per_pod": 5, "admission": "counted"},
            "each reading of m grants what is left of 5 for each pod; without one closed",
        ),
        (binary_metric, {"query": "q"}, "closed while the metric is anything but 0; open without it"),
    ],
)
def test_a_gate_says_at_which_load_it_closes(make: Make, parameters: dict[str, object], said: str) -> None:
    assert gate_of(make, around(Neighbours()), **parameters).closes_at() == said


@pytest.mark.parametrize(
    "more",
    [
        {"max_count_per_pod": 0},
        {"value_type": "budget"},
        {"baseline": 0.1},
        {"fallback": 0.1},
        {"pods_url": PODS},
    ],
)
def test_counted_admission_takes_only_what_it_uses_case_201(more: dict[str, object]) -> None:
    enough: dict[str, object] = {"url": PAGE, "metric": "m", "max_count_per_pod": 8, "admission": "counted"}

    assert problems(endpoint_scrape, around(Neighbours()), **enough) == ""
    assert problems(endpoint_scrape, around(Neighbours()), **enough | more) != ""


@pytest.mark.parametrize(
    "url", ["model:8000/metrics", "x y", "http://", "http://[::1", "http://m:99999/", "ftp://u:hidden@m"]
)
@pytest.mark.parametrize("name", ["url", "pods_url"])
def test_a_page_that_can_never_be_read_stops_the_start(name: str, url: str) -> None:
    enough: dict[str, object] = {"url": PAGE, "metric": "m", "max_count_per_pod": 8, "pods_metric": "p"}

    said = problems(endpoint_scrape, around(Neighbours()), **enough | {name: url})

    assert f".{name}: " in said
    assert "hidden" not in said


@pytest.mark.parametrize("more", [{}, {"max_count_per_pod": 5, "admission": "counted"}])
async def test_the_user_of_a_page_is_never_logged(more: dict[str, object]) -> None:
    url = "http://user:secret@elsewhere/metrics?token=secret"
    gate = gate_of(endpoint_scrape, around(Neighbours()), url=url, metric="m", **more)
    over = asyncio.Event()

    with capture_logs() as log:
        running = asyncio.create_task(gate.run(over))
        await asyncio.sleep(1.0)
        over.set()
        await running

    assert log
    assert "secret" not in repr(log)
