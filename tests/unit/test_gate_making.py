"""From a document's gate to the gate: every type there is, and a problem with its place for all that is none."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest

from inference_worker.config.documents import GATE_TYPES, GateConfig, GateType, read_documents
from inference_worker.errors import ConfigurationError
from inference_worker.gates.aimd import Aimd
from inference_worker.gates.basic import (
    Constant,
    ConstantDecision,
    DeadlineDrop,
    LocalMaxConcurrency,
    LocalRateLimit,
)
from inference_worker.gates.combined import Composite, WaitOnRefuse
from inference_worker.gates.from_metrics import Surroundings
from inference_worker.gates.making import (
    DEEPEST,
    Around,
    Owner,
    gate_of,
    gate_problems,
    make_gate,
    redis_url,
    spec_of,
)
from inference_worker.gates.quota import RateQuota, ReservationClassifier
from inference_worker.gates.quota_sql import SqlQuota
from inference_worker.gates.redis_gates import BudgetKeyGate, DrainLimit, LeasedRateGate
from inference_worker.gates.saturation import BinaryGate, MetricGate, Seen
from inference_worker.gates.tiers import TierPriorityAdmission
from inference_worker.ports import Admitted, Asked, Dropped, Gate
from inference_worker.redis_scripts import RedisLink, RedisTls
from tests.unit.gate_kit import admitted, asked, at_once
from tests.unit.prometheus_kit import URL, Neighbours, unix_now, vector

Given = Mapping[str, object]
POOL = Owner(kind="pool", name="p", pool="p")
QUEUE = Owner(kind="queue", name="q", pool="p")
SATURATION: Given = {"gate_type": "prometheus-saturation", "gate_params": {"pool": "vllm"}}

KINDS: dict[GateType, tuple[Given, type]] = {
    "aimd": ({}, Aimd),
    "binary-metric": ({"query": "up"}, BinaryGate),
    "composite": ({"gates": [{"gate_type": "constant"}]}, Composite),
    "constant": ({}, Constant),
    "constant-decision": ({"decision": "wait"}, ConstantDecision),
    "deadline-drop": ({}, DeadlineDrop),
    "endpoint-scrape": ({"url": "http://m/metrics", "metric": "busy"}, MetricGate),
    "local-max-concurrency": ({"limit": "2"}, LocalMaxConcurrency),
    "local-rate-limit": ({"requests_per_minute": 60}, LocalRateLimit),
    "prometheus-budget": ({"pool": "vllm"}, MetricGate),
    "prometheus-query": ({"query": "up"}, MetricGate),
    "prometheus-saturation": ({"pool": "vllm"}, MetricGate),
    "redis": ({"address": "r:6379"}, BudgetKeyGate),
    "redis-leased-rate": ({"address": "r:6379", "control_key": "c"}, LeasedRateGate),
    "redis-quota": ({"address": "r:6379", "limit": 3}, RateQuota),
    "reservation-classifier": ({"address": "r:6379", "labels": "team,tier"}, ReservationClassifier),
    "sql-quota": ({"limit": 3}, SqlQuota),
    "tier-priority-admission": ({"saturation_gate": "constant"}, TierPriorityAdmission),
    "wait-on-refuse": ({"gate": {"gate_type": "constant"}}, WaitOnRefuse),
}


class Process:
    """What gates need, and what they have told it."""

    def __init__(self) -> None:
        self.neighbours = Neighbours()
        self.seen: list[tuple[Owner, str, Seen]] = []
        self.lent: list[tuple[Owner, DrainLimit]] = []
        self.watched: list[tuple[Owner, str]] = []
        self.windows: list[tuple[Owner, Aimd]] = []
        self.urls: list[str] = []
        self.around = Around(
            metrics=Surroundings(client=self.neighbours.client(), now=unix_now, chance=lambda: 0.0, prometheus_url=URL),
            link_to=self.link_to,
            clock=lambda: asyncio.get_running_loop().time(),
            process="host-1",
            seen=lambda owner, pool, seen: self.seen.append((owner, pool, seen)),
            lent=lambda owner, limit: self.lent.append((owner, limit)),
            watched=lambda owner, pool: self.watched.append((owner, pool)),
            windows=lambda owner, windows: self.windows.append((owner, windows)),
        )

    def link_to(self, url: str) -> RedisLink:
        self.urls.append(url)
        return RedisLink(lambda: url, lambda: None, client_name="test", tls=RedisTls())

    def gate(self, gate_type: str, params: Given, owner: Owner = POOL) -> Gate:
        return gate_of(config(gate_type, params), self.around, owner)


@pytest.fixture
async def process() -> Process:
    return Process()


def config(gate_type: str, params: Given, where: str = "pools[0]") -> GateConfig:
    return GateConfig(gate_type=gate_type, gate_params=params, where=where)


def problems(gate_type: str, params: Given) -> tuple[str, ...]:
    return gate_problems(config(gate_type, params), prometheus_url=URL)


def test_the_types_of_the_documents_are_those_that_are_made() -> None:
    assert set(KINDS) == set(GATE_TYPES)
    assert len(GATE_TYPES) == len(set(GATE_TYPES))


@pytest.mark.parametrize("gate_type", GATE_TYPES)
async def test_every_type_is_made_of_its_parameters(process: Process, gate_type: GateType) -> None:
    params, kind = KINDS[gate_type]

    gate = process.gate(gate_type, params)

    assert isinstance(gate, kind)
    assert gate.closes_at()
    assert problems(gate_type, params) == ()


@pytest.mark.parametrize("gate_type", GATE_TYPES)
def test_every_type_refuses_a_parameter_that_is_none(gate_type: GateType) -> None:
    params, _ = KINDS[gate_type]

    assert any(
        "pools[0].gate_params.odd: is not a parameter" in line for line in problems(gate_type, {**params, "odd": 1})
    )


async def test_an_unknown_type_is_an_error_that_names_what_there_is_case_176(process: Process) -> None:
    with pytest.raises(ConfigurationError) as caught:
        process.gate("promethius", {})

    (line,) = caught.value.problems
    assert line.startswith('pools[0].gate_type: is "promethius"; accepted: aimd, binary-metric, ')
    assert all(gate_type in line for gate_type in GATE_TYPES)


async def test_no_gate_and_an_empty_type_are_always_open_case_176(process: Process) -> None:
    empty = make_gate(spec_of(config("", {}), []), process.around, POOL)

    for gate in (gate_of(None, process.around, POOL), empty):
        assert at_once(gate.admit(asked())) == Admitted()


@pytest.mark.parametrize(
    ("gate_type", "params", "line"),
    [
        pytest.param(
            "composite",
            {"gates": [{"gate_type": "constant"}, {"gate_type": "no"}]},
            'pools[0].gate_params.gates[1].gate_type: is "no"; accepted: ',
            id="in a composite",
        ),
        pytest.param(
            "wait-on-refuse",
            {"gate": '{"gate_type": "local-max-concurrency", "gate_params": {"limit": 0}}'},
            "pools[0].gate_params.gate.gate_params.limit: is 0; accepted: a whole number at least 1",
            id="in JSON as text",
        ),
        pytest.param(
            "tier-priority-admission",
            {"saturation_gate": "no"},
            'pools[0].gate_params.saturation_gate: is "no"; accepted: ',
            id="in a tier gate",
        ),
        pytest.param(
            "redis",
            {"address": "http://r:6379"},
            "pools[0].gate_params.address: ",
            id="an address of something else",
        ),
        pytest.param(
            "redis-quota", {"address": "r:6379/x", "limit": 1}, "pools[0].gate_params.address: ", id="no database"
        ),
        pytest.param("redis", {}, "pools[0].gate_params.address: is missing; accepted: a text", id="no address"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(gate_type: str, params: Given, line: str) -> None:
    (found,) = problems(gate_type, params)

    assert found.startswith(line)
    assert "accepted: " in found


def test_a_password_in_a_wrong_address_is_not_shown() -> None:
    assert "secret" not in "".join(problems("redis", {"address": "http://:secret@r:6379"}))


def test_a_gate_that_asks_prometheus_needs_its_address() -> None:
    (line,) = gate_problems(config("prometheus-saturation", {"pool": "vllm"}))

    assert "--prometheus-url" in line


def test_documents_say_all_that_is_wrong_with_all_gates() -> None:
    queue = {"queue_name": "a", "igw_base_url": "http://g", "gate_type": "redis-quota", "gate_params": {"mode": "odd"}}
    pools = [{"id": "default", "workers": 1, "gate_type": "local-rate-limit"}]

    with pytest.raises(ConfigurationError) as caught:
        read_documents(
            "redis-sortedset",
            json.dumps({"url": "redis://r", "queues": [queue]}),
            json.dumps(pools),
            gate_problems=partial(gate_problems, prometheus_url=URL),
        )

    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "transport.queues[0].gate_params.address",
        "transport.queues[0].gate_params.mode",
        "transport.queues[0].gate_params.limit",
        "pools[0].gate_params.requests_per_minute",
    ]


def nested(depth: int) -> Given:
    """A gate inside of so many others."""
    params: Given = {}
    for _ in range(depth):
        params = {"gate": {"gate_type": "wait-on-refuse" if params else "constant", "gate_params": params}}
    return params


def test_gates_in_gates_in_gates_have_an_end() -> None:
    assert problems("wait-on-refuse", nested(DEEPEST - 1)) == ()
    (line,) = problems("wait-on-refuse", nested(DEEPEST))
    assert f"is {DEEPEST + 1} gates deep; accepted: up to {DEEPEST}" in line
    assert len(problems("wait-on-refuse", nested(200))) == 1


# ---------------------------------------------------------------- what goes with a gate


WRAPPED: list[tuple[str, Given]] = [
    (str(SATURATION["gate_type"]), {"pool": "vllm"}),
    ("composite", {"gates": [{"gate_type": "constant"}, SATURATION]}),
    ("wait-on-refuse", {"gate": SATURATION}),
    (
        "tier-priority-admission",
        {"saturation_gate": "prometheus-saturation", "saturation_gate_params": {"pool": "vllm"}},
    ),
    ("composite", {"gates": [{"gate_type": "wait-on-refuse", "gate_params": {"gate": SATURATION}}]}),
]


@pytest.mark.parametrize(("gate_type", "params"), WRAPPED, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("owner", [QUEUE, POOL], ids=["queue", "pool"])
async def test_a_metric_gates_look_is_told_with_its_owner_however_it_is_wrapped_case_182(
    process: Process, gate_type: str, params: Given, owner: Owner
) -> None:
    gate = process.gate(gate_type, params, owner)
    over = asyncio.Event()

    async with asyncio.TaskGroup() as group:
        group.create_task(gate.run(over))
        await asyncio.sleep(1.0)
        over.set()

    told, inference_pool, seen = process.seen[0]
    assert (told, inference_pool, seen.available) == (owner, "vllm", False)


async def test_a_leased_rate_is_that_of_the_owners_pool(process: Process) -> None:
    gate = process.gate("redis-leased-rate", KINDS["redis-leased-rate"][0], QUEUE)

    assert gate.closes_at().endswith("lends to pool p, and without it")
    assert process.lent == [(QUEUE, DrainLimit())]


@pytest.mark.parametrize(("gate_type", "params"), WRAPPED, ids=lambda value: value if isinstance(value, str) else "")
async def test_a_metric_gate_is_told_of_before_its_first_look_case_182(
    process: Process, gate_type: str, params: Given
) -> None:
    process.gate(gate_type, params, QUEUE)

    assert process.watched == [(QUEUE, "vllm")]
    assert process.seen == []


async def test_a_gate_with_windows_is_handed_out_however_it_is_wrapped(process: Process) -> None:
    learning = {"gate_type": "aimd", "gate_params": {"max_window": 8}}

    process.gate("composite", {"gates": [{"gate_type": "wait-on-refuse", "gate_params": {"gate": learning}}]})

    ((owner, windows),) = process.windows
    assert owner == POOL
    assert isinstance(windows, Aimd)


async def test_gates_that_hold_something_do_so_under_different_names(process: Process) -> None:
    for _ in range(2):
        process.gate("redis-quota", KINDS["redis-quota"][0])

    assert (process.around.holder(), process.around.holder()) == ("host-1/3", "host-1/4")


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("r:6379", "redis://r:6379"),
        ("redis://u:p@r/3", "redis://u:p@r/3"),
        ("rediss://r", "rediss://r"),
    ],
)
async def test_an_address_is_a_host_or_a_url(process: Process, address: str, url: str) -> None:
    process.gate("redis", {"address": address})

    assert process.urls == [url]
    assert redis_url(address) == url


async def test_a_deadline_is_told_by_the_wall_clock(process: Process) -> None:
    gate = process.gate("deadline-drop", {})
    late = Asked(request_id="a", metadata={}, labels={}, deadline=unix_now() - 1)

    assert isinstance(at_once(gate.admit(late)), Dropped)
    assert admitted(gate, asked(deadline=unix_now() + 1)) == ()


async def test_gates_of_queues_on_one_neighbour_admit_together_what_it_has_room_for(process: Process) -> None:
    """Two queues of a pool, each of whose gates would take all that is free; a queue on another pool counts alone."""
    process.neighbours.answers = {
        "timestamp": lambda: vector(unix_now()),
        "ready": lambda: vector(10),
        "saturation": lambda: vector(0.8),  # 2 of 10 are in use.
    }
    gates = [
        process.gate("prometheus-saturation", {"pool": pool, "max_concurrency": 10}, replace(QUEUE, name=name))
        for name, pool in (("a", "p"), ("b", "p"), ("c", "q"))
    ]
    until = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for gate in gates:
            group.create_task(gate.run(until))
        await asyncio.sleep(0.01)
        taken = []
        for gate in gates:
            number = 0
            while isinstance(await gate.admit(asked()), Admitted):
                number += 1
            taken.append(number)
        until.set()

    assert taken == [6, 0, 6]
