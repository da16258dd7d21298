"""What documents may say and probably do not mean: each rule where it applies, and where it does not."""

import json
from typing import Any

import pytest

from inference_worker.config.documents import GateConfig, ProcessDocuments, read_documents
from inference_worker.config.doubts import doubts, named
from inference_worker.config.gate_tree import gate_tree

PLENTY = 100_000


Document = dict[str, Any]  # JSON has no types.


def queue(name: str = "q", **others: object) -> Document:
    return {"queue_name": name, "igw_base_url": "http://gateway", "result_ttl_seconds": 60, **others}


def documents(
    *queues: dict[str, object], pools: object = None, merge: object = None, kind: str = "redis-sortedset"
) -> ProcessDocuments:
    return read_documents(
        kind,
        json.dumps({"url": "redis://redis" if "redis" in kind else "amqp://rabbit", "queues": queues or [queue()]}),
        None if pools is None else json.dumps(pools),
        None if merge is None else json.dumps(merge),
    )


def said(of: ProcessDocuments, most_files: int = PLENTY) -> list[str]:
    return [f"{doubt.what}: {doubt.detail}" for doubt in doubts(of, most_files=most_files)]


CLASSIFYING: Document = {"gate_type": "redis-quota", "gate_params": {"gating_mode": "classifying"}}
CLASSIFIER: Document = {"gate_type": "reservation-classifier"}
BLOCKING: Document = {"gate_type": "redis-quota", "gate_params": {}}
TIERS: Document = {
    "gate_type": "tier-priority-admission",
    "gate_params": {"saturation_gate": "local-max-concurrency", "saturation_gate_params": {"limit": 1}},
}


def test_what_is_usual_leaves_no_doubt() -> None:
    assert said(documents()) == []


def test_a_pool_that_no_queue_names_has_nothing_to_do() -> None:
    pools = [{"id": "default", "workers": 1}, {"id": "idle", "workers": 3}]

    assert said(documents(pools=pools)) == ["pool idle: no queue names it: its 3 workers have nothing to do"]


@pytest.mark.parametrize("policy", ["tier-priority", "tier-aging"])
def test_with_lanes_a_queue_without_a_known_tier_counts_as_batch(policy: str) -> None:
    queues = [queue("a", labels={"tier": "batch"}), queue("b", labels={"tier": "bulk"}), queue("c")]

    assert said(documents(*queues, merge={"type": policy})) == [
        "tiers: b, c: their label tier is missing or none of interactive, async, batch: they count as batch"
    ]
    assert said(documents(*queues)) == []


def test_the_label_of_the_tier_is_the_policys() -> None:
    merge = {"type": "tier-priority", "parameters": {"tier_label": "class"}}

    assert said(documents(queue(labels={"class": "async"}), merge=merge)) == []


@pytest.mark.parametrize(
    "gate", [CLASSIFYING, CLASSIFIER, {"gate_type": "composite", "gate_params": {"gates": [CLASSIFYING]}}]
)
def test_marks_that_nobody_reads_limit_nothing(gate: Document) -> None:
    (doubt,) = said(documents(queue(**gate)))

    assert doubt.startswith("gate of queue q: it only marks requests as reserved or overflow")


@pytest.mark.parametrize("merge", ["tier-priority", "tier-aging"])
def test_lanes_read_the_marks_of_queues(merge: str) -> None:
    of = documents(queue(labels={"tier": "async"}, **CLASSIFYING), merge={"type": merge})

    assert said(of) == []


@pytest.mark.parametrize("reader", [TIERS, {"gate_type": "aimd"}])
def test_gates_that_ask_for_classes_read_the_marks_of_queues(reader: Document) -> None:
    pools = [{"id": "default", "workers": 1, **reader}]
    both: Document = {"gate_type": "composite", "gate_params": {"gates": [CLASSIFYING, reader]}}

    assert said(documents(queue(**CLASSIFYING), pools=pools)) == []
    assert said(documents(queue(**both))) == []


def test_a_pools_own_gate_may_read_what_it_has_marked() -> None:
    pools = [{"id": "default", "workers": 1, "gate_type": "composite", "gate_params": {"gates": [CLASSIFYING, TIERS]}}]

    assert said(documents(pools=pools)) == []


def test_a_mark_made_at_the_pool_comes_too_late_for_lanes() -> None:
    pools = [{"id": "default", "workers": 1, **CLASSIFYING}]
    of = documents(queue(labels={"tier": "async"}), pools=pools, merge={"type": "tier-priority"})

    (doubt,) = said(of)

    assert doubt.startswith("gate of pool default: it only marks")


def test_a_quota_that_refuses_needs_no_reader() -> None:
    assert said(documents(queue(**BLOCKING))) == []


def quota(**params: object) -> Document:
    return {"gate_type": "redis-quota", "gate_params": params}


def test_quotas_of_two_kinds_under_one_key_fail_every_request() -> None:
    both: Document = {"gate_type": "composite", "gate_params": {"gates": [quota(), quota(mode="concurrency")]}}
    somewhere = [queue("a", **quota()), queue("b", **quota(mode="concurrency"))]

    for of in (documents(queue(**both)), documents(*somewhere)):
        (doubt,) = said(of)
        assert doubt.startswith("quotas: several redis-quota gates count under quota:userid:…, some at once and some")


def test_a_request_that_passes_two_quotas_under_one_key_is_counted_twice() -> None:
    both: Document = {"gate_type": "composite", "gate_params": {"gates": [quota(window="1s"), quota(window="1h")]}}
    pools = [{"id": "default", "workers": 1, **quota()}]

    for of in (documents(queue(**both)), documents(queue(**quota()), pools=pools)):
        (doubt,) = said(of)
        assert doubt.endswith("a request that passes two of them is counted twice")


def test_quotas_under_keys_of_their_own_and_one_that_queues_share_are_usual() -> None:
    gates = [quota(), quota(prefix="slots:", mode="concurrency"), quota(attribute="team"), quota(address="other:6379")]

    assert said(documents(queue(gate_type="composite", gate_params={"gates": gates}))) == []
    assert said(documents(queue("a", **quota()), queue("b", **quota()))) == []


def test_results_that_nobody_takes_stay_where_no_list_expires() -> None:
    queues = [queue("a", result_ttl_seconds=0), queue("b", result_ttl_seconds=0, result_queue_name="own"), queue("c")]

    assert said(documents(*queues)) == [
        "result lists: own: results that nobody takes stay for ever",
        "result lists: result-list: some of their queues have a result_ttl_seconds, and when it is over the results of "
        "all go",
    ]
    assert said(documents(*queues, kind="redis-streams")) == []


def test_more_workers_than_files_may_be_open() -> None:
    pools = [{"id": "default", "workers": 1000}]

    assert said(documents(pools=pools), most_files=1024) == [
        "open files: 1000 workers may need 1067 files and sockets, and 1024 may be open here"
    ]
    assert said(documents(pools=pools), most_files=1067) == []


def test_of_many_names_a_few_are_said() -> None:
    assert named(["a", "b"]) == "a, b"
    assert named([str(number) for number in range(8)]) == "0, 1, 2, 3, 4 and 3 more"


@pytest.mark.parametrize(
    ("gate_type", "params", "shown"),
    [
        pytest.param("constant", {}, "constant", id="one"),
        pytest.param("", {}, "constant", id="none is always open"),
        pytest.param("wait-on-refuse", {}, "wait-on-refuse", id="what is inside may be missing"),
        pytest.param(
            "wait-on-refuse",
            {"gate": TIERS},
            "wait-on-refuse(tier-priority-admission(local-max-concurrency))",
            id="one inside another",
        ),
        pytest.param("tier-priority-admission", {}, "tier-priority-admission", id="a tier gate without its other half"),
        pytest.param(
            "composite",
            {"gates": [CLASSIFIER, BLOCKING]},
            "composite(reservation-classifier, redis-quota)",
            id="several",
        ),
    ],
)
def test_a_gate_is_shown_with_what_is_inside_it(gate_type: str, params: dict[str, object], shown: str) -> None:
    tree = gate_tree(GateConfig(gate_type=gate_type, gate_params=params, where="queue"))

    assert str(tree) == shown


def test_gates_in_gates_end_somewhere() -> None:
    gate: dict[str, object] = {"gate_type": "constant"}
    for _ in range(50):
        gate = {"gate_type": "wait-on-refuse", "gate_params": {"gate": gate}}

    tree = gate_tree(GateConfig(gate_type="wait-on-refuse", gate_params={"gate": gate}, where="queue"))

    assert len(list(tree.all())) == 16
