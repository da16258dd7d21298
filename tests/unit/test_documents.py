"""The documents of a process of many queues, and all that may be wrong with them. Names end in the peer's case."""

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.config.documents import (
    AnswerTransformConfig,
    GateConfig,
    MergeConfig,
    PoolConfig,
    ProcessDocuments,
    TransformConfig,
    read_documents,
)
from inference_worker.errors import ConfigurationError
from inference_worker.stamping import Stamps

URL = "redis://u:secret@redis:6379/0"
QUEUE = {"queue_name": "q1", "igw_base_url": "http://gateway:8000/"}


def transport(*queues: object, **others: object) -> str:
    return json.dumps({"url": URL, "queues": list(queues) or [QUEUE], **others})


def queue(**others: object) -> dict[str, object]:
    return {**QUEUE, **others}


def read(transport_json: str | None = None, pools: object = None, merge: object = None) -> ProcessDocuments:
    return read_documents(
        "redis-sortedset",
        transport() if transport_json is None else transport_json,
        None if pools is None else pools if isinstance(pools, str) else json.dumps(pools),
        None if merge is None else merge if isinstance(merge, str) else json.dumps(merge),
    )


def problems(transport_json: str | None = None, pools: object = None, merge: object = None) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        read(transport_json, pools, merge)
    return list(caught.value.problems)


def test_everything_that_is_left_out_has_the_peers_default() -> None:
    documents = read()

    assert documents.pools == (PoolConfig(id="default", workers=64),)
    assert documents.merge == MergeConfig(type="random-robin", tier_label="tier", stamps=Stamps())
    config = documents.transport
    assert (config.mode, config.addresses, config.master_name) == ("standalone", (), "")
    assert (config.retry_queue_name, config.result_queue_name) == ("retry-sortedset", "result-list")
    assert (config.poll_interval_s, config.batch_size, config.enable_tracing) == (1.0, 10, False)
    assert (config.claim_lease_s, config.claim_reclaim_interval_s) == (300.0, 15.0)
    only = config.queues[0]
    assert (only.base_url.now(), only.request_path) == ("http://gateway:8000", "/v1/completions")
    assert (only.worker_pool_id, only.objective, only.gate, only.labels) == ("default", "", None, {})
    assert (only.result_queue_name, only.result_ttl_s) == ("", 0)


def test_a_queue_without_an_id_has_its_name_as_one_and_an_id_is_kept_case_38() -> None:
    config = read(transport(queue(), queue(queue_name="q2", id="second"))).transport

    assert [(queue.id, queue.queue_name) for queue in config.queues] == [("q1", "q1"), ("second", "q2")]


def test_parameters_of_gates_stay_as_they_are_written_case_40() -> None:
    params = {"limit": 5, "threshold": "0.8", "on": True, "gates": None}
    config = read(
        transport(
            queue(gate_type="redis-quota", gate_params=params),
            queue(queue_name="q2", gate_type="constant"),
            queue(queue_name="q3", gate_type="redis", gate_params='{"address": "r:6379"}'),
        )
    ).transport

    assert [queue.gate for queue in config.queues] == [
        GateConfig(gate_type="redis-quota", gate_params=params, where="transport.queues[0]"),
        GateConfig(gate_type="constant", gate_params={}, where="transport.queues[1]"),
        GateConfig(gate_type="redis", gate_params={"address": "r:6379"}, where="transport.queues[2]"),
    ]


@pytest.mark.parametrize("text", ["", "{", "[", '{"url": NaN}', "[" * 99_999, "nul"])
def test_what_is_no_json_is_said_with_its_place_case_40(text: str) -> None:
    said = problems(text, pools=text, merge=text)

    for where in ("transport", "pools", "merge"):
        assert any(line.startswith(f"{where}: is no JSON: ") for line in said)


def test_a_queue_without_a_pool_is_served_by_default_where_there_is_one_case_41() -> None:
    assert read(pools=[{"id": "default", "workers": 2}]).transport.queues[0].worker_pool_id == "default"
    assert problems(pools=[{"id": "big", "workers": 2}]) == [
        'transport.queues[0].worker_pool_id: is "default"; accepted: one of the pools: big'
    ]


def test_an_unknown_pool_and_a_missing_base_url_are_errors_at_start_case_42() -> None:
    said = problems(transport({"queue_name": "q1"}, queue(queue_name="q2", worker_pool_id="nope")))

    assert said == [
        "transport.queues[0].igw_base_url: is missing; accepted: a text",
        'transport.queues[1].worker_pool_id: is "nope"; accepted: one of the pools: default',
    ]


def test_a_queue_that_points_to_no_pool_stops_the_start_and_panics_nowhere_case_237() -> None:
    assert problems(pools=[]) == [
        'transport.queues[0].worker_pool_id: is "default"; accepted: a pool, of which there is none'
    ]


def test_names_and_ids_are_given_once_case_312() -> None:
    said = problems(transport(queue(id="x"), queue(id="x"), queue(queue_name="q3", id="q1")))

    assert said == [
        'transport.queues[1].id: is "x", as in transport.queues[0]; accepted: each once',
        'transport.queues[1].queue_name: is "q1", as in transport.queues[0]; accepted: each once',
    ]


def test_a_pool_file_is_read_case_292() -> None:
    pools = [{"id": "default", "workers": 8}, {"id": "b", "workers": "2", "gate_type": "constant"}]

    assert read(pools=pools).pools == (
        PoolConfig(id="default", workers=8),
        PoolConfig(id="b", workers=2, gate=GateConfig(gate_type="constant", gate_params={}, where="pools[1]")),
    )


@pytest.mark.parametrize(
    ("pools", "where"),
    [
        pytest.param([{"workers": 1}], "pools[0].id: is missing", id="no id"),
        pytest.param([{"id": "", "workers": 1}], "pools[0].id: is missing", id="an empty id"),
        pytest.param([{"id": "default", "workers": 1}] * 2, 'pools[1].id: is "default"', id="an id twice"),
        pytest.param([{"id": "default", "workers": 0}], "pools[0].workers: is 0", id="no workers"),
        pytest.param([{"id": "default", "workers": -1}], "pools[0].workers: is -1", id="less than none"),
        pytest.param([{"id": "default", "workers": 1.5}], "pools[0].workers: is 1.5", id="half a worker"),
        pytest.param([{"id": "default"}], "pools[0].workers: is missing", id="no word of workers"),
        pytest.param([{"id": "default", "workers": 1, "size": 2}], "pools[0].size: is not", id="an unknown key"),
        pytest.param([7, {"id": "default", "workers": 1}], "pools[0]: is 7; accepted: an object", id="no object"),
        pytest.param({"id": "default"}, 'pools: is {"id": "default"}; accepted: a list', id="no list"),
    ],
)
def test_what_is_wrong_with_a_pool_is_said_case_292(pools: object, where: str) -> None:
    assert problems(pools=pools)[0].startswith(where)


def test_every_problem_of_all_documents_comes_at_once() -> None:
    text = json.dumps({"url": "http://x", "batch_size": -1, "pol_interval_ms": 5, "queues": [{}, 5]})

    said = problems(text, pools=[{"id": "a", "workers": 0}], merge={"type": "fifo"})

    assert [line.split(": ")[0] for line in said] == [
        "transport.queues[0].queue_name",
        "transport.queues[0].igw_base_url",
        "transport.queues[1]",
        "transport.url",
        "transport.batch_size",
        "transport.pol_interval_ms",
        "pools[0].workers",
        "merge.type",
        "transport.queues[0].worker_pool_id",
    ]


@pytest.mark.parametrize(
    ("others", "where"),
    [
        ({"url": "redis://u:secret@h:0/x"}, "transport.url: has"),
        ({"url": ""}, "transport.url: is missing"),
        ({"url": {"a": "secret"}}, "transport.url: is an object"),
        ({"mode": "ring"}, 'transport.mode: is "ring"'),
        ({"addrs": ["a:1"]}, "transport.addrs: is given; accepted only with"),
        ({"mode": "cluster", "addrs": ["a:1", 7]}, "transport.addrs[1]: is 7"),
        ({"mode": "cluster", "addrs": "a:1"}, 'transport.addrs: is "a:1"; accepted: a list'),
        ({"mode": "cluster", "master_name": "m"}, "transport.master_name: is given"),
        ({"mode": "sentinel"}, "transport.master_name: is missing"),
        ({"claim_lease_ttl_seconds": -1}, "transport.claim_lease_ttl_seconds: is -1"),
        ({"poll_interval_ms": "often"}, 'transport.poll_interval_ms: is "often"'),
        ({"queues": []}, "transport.queues: has no queue"),
        ({"queues": {"a": 1}}, "transport.queues: is {"),
        ({"enable_tracing": "perhaps"}, 'transport.enable_tracing: is "perhaps"'),
    ],
)
def test_what_is_wrong_with_the_transport_is_said_and_never_the_password_case_68(
    others: Mapping[str, object], where: str
) -> None:
    said = problems(transport(**others))

    assert said[0].startswith(where)
    assert "secret" not in "\n".join(said)


@pytest.mark.parametrize(
    ("others", "where"),
    [
        ({"igw_base_url": "gateway:8000"}, "transport.queues[0].igw_base_url: does not begin with http://"),
        ({"labels": {"tier": ["a"]}}, "transport.queues[0].labels: is"),
        ({"gate_params": {"limit": 1}}, "transport.queues[0].gate_params: is given without a gate_type"),
        ({"gate_type": "constant", "gate_params": [1]}, "transport.queues[0].gate_params: is [1]"),
        ({"gate_type": "constant", "gate_params": "{"}, "transport.queues[0].gate_params: is no JSON"),
        ({"result_ttl_seconds": -1}, "transport.queues[0].result_ttl_seconds: is -1"),
        ({"priority": 1}, "transport.queues[0].priority: is not a parameter"),
        ({"inference_objective": "a\r\nHost: b"}, "transport.queues[0].inference_objective: is"),
        ({"result_queue_name": "q1"}, 'transport.queues[0].result_queue_name: is "q1", which is the queue q1'),
        ({"result_queue_name": "q1:claimed"}, "transport.queues[0].result_queue_name: is"),
        ({"result_queue_name": "retry-sortedset"}, "transport.queues[0].result_queue_name: is"),
        ({"queue_name": "retry-sortedset"}, "transport.queues[0].queue_name: is"),
        ({"queue_name": "q\ud83d"}, "transport: has half a character"),
    ],
)
def test_what_is_wrong_with_a_queue_is_said_with_its_place(others: Mapping[str, object], where: str) -> None:
    (said,) = problems(transport(queue(**others)))

    assert said.startswith(where)


def test_no_two_things_of_a_transport_lie_under_one_key() -> None:
    """The first that is written there ends the other, once the other is empty."""
    first = queue(queue_name="p", result_queue_name="q1")
    second = queue(queue_name="p:claimed")
    said = problems(transport(first, second, QUEUE, result_queue_name="p:dead", retry_queue_name="q1"))

    assert [one.split(": ")[0] for one in said] == [
        "transport.queues[1].queue_name",
        "transport.queues[2].queue_name",
        "transport.result_queue_name",
        "transport.queues[0].result_queue_name",
    ]


def test_a_queue_of_rabbitmq_and_a_list_of_redis_may_have_one_name() -> None:
    text = json.dumps({"queues": [queue(result_queue_name="q1")]})

    assert read_documents("rabbitmq", text).transport.queues[0].result_queue_name == "q1"
    with pytest.raises(ConfigurationError):
        read_documents("redis-streams", text)


def test_sentinels_and_clusters_are_named_case_68() -> None:
    sentinel = read(transport(mode="sentinel", addrs=["a:1", "b:2"], master_name="m")).transport
    cluster = read(transport(mode="cluster")).transport

    assert (sentinel.mode, sentinel.addresses, sentinel.master_name) == ("sentinel", ("a:1", "b:2"), "m")
    assert (cluster.mode, cluster.addresses) == ("cluster", ())


@pytest.mark.parametrize(
    ("gate", "where"),
    [
        pytest.param({"gate_type": "promethius"}, "transport.queues[0].gate_type", id="of a queue"),
        pytest.param(
            {"gate_type": "composite", "gate_params": {"gates": [{"gate_type": "constant"}, {"gate_type": "no"}]}},
            "transport.queues[0].gate_params.gates[1].gate_type",
            id="in a composite",
        ),
        pytest.param(
            {"gate_type": "composite", "gate_params": {"gates": '[{"gate_type": "no"}]'}},
            "transport.queues[0].gate_params.gates[0].gate_type",
            id="in a composite that is text",
        ),
        pytest.param(
            {
                "gate_type": "wait-on-refuse",
                "gate_params": {
                    "gate": {"gate_type": "composite", "gate_params": {"gates": [{"gate_type": "no"}]}},
                },
            },
            "transport.queues[0].gate_params.gate.gate_params.gates[0].gate_type",
            id="two levels down",
        ),
        pytest.param(
            {"gate_type": "tier-priority-admission", "gate_params": {"saturation_gate": "no"}},
            "transport.queues[0].gate_params.saturation_gate",
            id="behind the tiers",
        ),
        pytest.param(
            {
                "gate_type": "tier-priority-admission",
                "gate_params": {
                    "saturation_gate": "wait-on-refuse",
                    "saturation_gate_params": {"gate": {"gate_type": "no"}},
                },
            },
            "transport.queues[0].gate_params.saturation_gate_params.gate.gate_type",
            id="inside the gate behind the tiers",
        ),
    ],
)
def test_an_unknown_gate_type_is_an_error_wherever_it_stands_case_176(gate: dict[str, object], where: str) -> None:
    (said,) = problems(transport(queue(**gate)))

    assert said.startswith(f"{where}: is ")
    assert "accepted: aimd, " in said


def test_tiers_without_a_gate_behind_them_are_an_error() -> None:
    assert problems(transport(queue(gate_type="tier-priority-admission"))) == [
        "transport.queues[0].gate_params.saturation_gate: is missing; accepted: a text"
    ]


def test_a_list_of_queues_has_an_end() -> None:
    many = [queue(queue_name=f"q{number}") for number in range(10_001)]

    assert problems(transport(*many)) == ["transport.queues: has 10001 queues; accepted: up to 10000"]


def test_nested_gates_as_text_or_as_objects_are_accepted_case_181() -> None:
    inner = {"gate_type": "constant"}
    for gates in ([inner], json.dumps([inner])):
        read(transport(queue(gate_type="composite", gate_params={"gates": gates})))
    for gate in (inner, json.dumps(inner)):
        read(transport(queue(gate_type="wait-on-refuse", gate_params={"gate": gate})))


def test_whoever_makes_gates_says_what_is_wrong_with_them() -> None:
    asked: list[str] = []

    def all_wrong(gate: GateConfig) -> list[str]:
        asked.append(gate.where)
        return [f"{gate.where}: no"]

    with pytest.raises(ConfigurationError) as caught:
        read_documents(
            "redis-sortedset",
            transport(queue(gate_type="x")),
            json.dumps([{"id": "default", "workers": 1, "gate_type": "y"}]),
            gate_problems=all_wrong,
        )

    assert asked == ["transport.queues[0]", "pools[0]"]
    assert caught.value.problems == ("transport.queues[0]: no", "pools[0]: no")


def test_a_merge_policy_is_read_case_244() -> None:
    merge = read(
        merge={
            "type": "tier-priority",
            "parameters": {
                "priority_header": "x-p",
                "tier_label": "sla",
                "objective_header": "x-o",
                "lane_objectives": {"reserved-interactive": "gold"},
                "fairness_header": "",
                "fairness_attribute": "team",
            },
        }
    ).merge

    assert merge == MergeConfig(
        type="tier-priority",
        tier_label="sla",
        stamps=Stamps(
            priority_header="x-p",
            objective_header="x-o",
            lane_objectives={"reserved-interactive": "gold"},
            fairness_header="",
            fairness_attribute="team",
        ),
    )


def test_the_policy_without_starvation_has_a_patience_for_each_lane() -> None:
    merge = read(merge={"type": "tier-aging", "parameters": {"patience": 8, "lane_patience": {"overflow-batch": 64}}})

    assert (merge.merge.patience, merge.merge.lane_patience) == (8, {"overflow-batch": 64})


@pytest.mark.parametrize(
    ("merge", "where"),
    [
        pytest.param({"type": "random-robin", "extra": 1}, "merge.extra: is not", id="an unknown key"),
        pytest.param({"type": "fifo"}, 'merge.type: is "fifo"', id="an unknown policy"),
        pytest.param({}, "merge.type: is missing", id="no policy"),
        pytest.param(
            {"type": "random-robin", "parameters": {"tier_label": "x"}}, "merge.parameters.tier_label", id="not its"
        ),
        pytest.param(
            {"type": "tier-priority", "parameters": {"lane_objectives": {"reserved": "g"}}},
            "merge.parameters.lane_objectives.reserved: is no lane",
            id="no lane",
        ),
        pytest.param(
            {"type": "tier-priority", "parameters": {"priority_header": "a b"}},
            'merge.parameters.priority_header: is "a b"',
            id="no header",
        ),
        pytest.param(
            {"type": "random-robin", "parameters": {"fairness_header": "a:b"}},
            'merge.parameters.fairness_header: is "a:b"',
            id="no header either",
        ),
        pytest.param(
            {"type": "tier-aging", "parameters": {"lane_patience": {"overflow-batch": 0}}},
            "merge.parameters.lane_patience.overflow-batch: is",
            id="no patience",
        ),
        pytest.param(
            {"type": "tier-priority", "parameters": {"lane_objectives": {"overflow-batch": "a\nb"}}},
            "merge.parameters.lane_objectives.overflow-batch: is",
            id="no value of a header",
        ),
        pytest.param([1], "merge: is [1]; accepted: an object", id="no object"),
        pytest.param("null", "merge: is null", id="null"),
    ],
)
def test_what_is_wrong_with_a_merge_policy_is_said_case_244(merge: object, where: str) -> None:
    assert any(said.startswith(where) for said in problems(merge=merge))


def transforms(document: object) -> tuple[TransformConfig, ...]:
    return read_documents("redis-sortedset", transport(), None, None, json.dumps(document)).transforms


GCS = {"name": "gcs", "type": "gcs_uri_multipart", "parameters": {"providers": ["google"]}}


NAMED = {"name": "named", "type": "model_name"}


def test_transforms_of_answers_are_read_case_285() -> None:
    document = json.dumps({"responseTransforms": [NAMED]})

    read = read_documents("redis-sortedset", transport(), None, None, document)

    assert read.transforms == ()
    assert read.answer_transforms == (
        AnswerTransformConfig(name="named", type="model_name", parameters={}, where="transforms.responseTransforms[0]"),
    )


def test_body_transforms_are_read_and_none_is_fine_case_285() -> None:
    assert transforms({"requestTransforms": []}) == transforms({}) == ()
    assert transforms({"requestTransforms": [GCS], "responseTransforms": []}) == (
        TransformConfig(
            name="gcs",
            type="gcs_uri_multipart",
            parameters={"providers": ["google"]},
            where="transforms.requestTransforms[0]",
        ),
    )


@pytest.mark.parametrize(
    ("document", "where"),
    [
        pytest.param({"transforms": []}, "transforms.transforms: is not", id="an unknown key"),
        pytest.param(
            {"requestTransforms": [{**GCS, "type": "no"}]}, "transforms.requestTransforms[0].type", id="no type"
        ),
        pytest.param(
            {"requestTransforms": [{**GCS, "type": "random-robin"}]},
            "transforms.requestTransforms[0].type",
            id="the type of something else",
        ),
        pytest.param({"requestTransforms": [GCS, GCS]}, "transforms.requestTransforms[1].name", id="a name twice"),
        pytest.param(
            {"requestTransforms": [{**GCS, "x": 1}]}, "transforms.requestTransforms[0].x", id="its unknown key"
        ),
        pytest.param({"requestTransforms": [7]}, "transforms.requestTransforms[0]: is 7", id="no object"),
        pytest.param(
            {"requestTransforms": [{**GCS, "parameters": 7}]}, "transforms.requestTransforms[0].par", id="no map"
        ),
        pytest.param({"requestTransforms": 7}, "transforms.requestTransforms: is 7", id="no list"),
        pytest.param({"responseTransforms": [GCS]}, "transforms.responseTransforms[0].type", id="of answers"),
        pytest.param({"responseTransforms": 7}, "transforms.responseTransforms: is 7", id="no list of answers"),
        pytest.param({"responseTransforms": [NAMED, NAMED]}, "transforms.responseTransforms[1].name", id="twice"),
    ],
)
def test_what_is_wrong_with_a_transform_is_said_case_285(document: object, where: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        transforms(document)

    assert caught.value.problems[0].startswith(where)


def test_a_key_that_is_there_twice_is_an_error() -> None:
    text = transport().replace('"queues"', '"batch_size": 1, "batch_size": 2, "queues"')

    assert problems(text) == ['transport: has "batch_size" twice in one object; accepted: once']


@pytest.mark.parametrize("kind", ["redis-streams", "rabbitmq"])
def test_our_other_transports_take_the_same_queues_and_may_leave_the_url_to_the_environment(kind: str) -> None:
    item = queue(gate_type="constant", labels={"tier": "async"}, result_ttl_seconds=5)

    config = read_documents(kind, json.dumps({"queues": [item], "batch_size": 3})).transport

    assert (config.kind, config.url, config.batch_size) == (kind, None, 3)
    assert (config.queues[0].labels, config.queues[0].result_ttl_s) == ({"tier": "async"}, 5)


def test_what_only_a_sorted_set_has_is_unknown_elsewhere() -> None:
    with pytest.raises(ConfigurationError, match=r"transport\.poll_interval_ms: is not a parameter"):
        read_documents("redis-streams", json.dumps({"queues": [QUEUE], "poll_interval_ms": 5}))


def test_a_url_is_for_its_broker() -> None:
    with pytest.raises(ConfigurationError, match="amqp://"):
        read_documents("rabbitmq", json.dumps({"url": URL, "queues": [QUEUE]}))


@pytest.mark.parametrize("kind", ["", "kafka"])
def test_a_transport_that_is_none_of_ours_is_said(kind: str) -> None:
    with pytest.raises(ConfigurationError, match="accepted: redis-sortedset, redis-streams, rabbitmq"):
        read_documents(kind, transport())


def test_the_environments_url_is_used_where_the_document_has_none() -> None:
    documents = read_documents("redis-sortedset", json.dumps({"queues": [QUEUE]}), url="redis://env:1")

    assert documents.transport.url is not None
    assert documents.transport.url.now() == "redis://env:1"


def test_nothing_that_is_printed_has_the_password() -> None:
    assert "secret" not in repr(read())


def test_no_queues_are_fine_for_a_process_that_runs_case_313() -> None:
    text = json.dumps({"url": URL, "queues": []})

    assert read_documents("redis-sortedset", text, without_queues=True).transport.queues == ()


def test_a_zero_stands_for_the_default() -> None:
    config = read(transport(poll_interval_ms=0, batch_size=0, claim_lease_ttl_seconds=0)).transport

    assert (config.poll_interval_s, config.batch_size, config.claim_lease_s) == (1.0, 10, 300.0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["url", "queues", "queue_name", "gate_type", "gate_params", "id", "type", "parameters"])
            | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON, JSON, JSON)
def test_whatever_the_documents_say_they_are_read_or_their_problems_are(
    one: object, two: object, three: object
) -> None:
    try:
        read_documents("redis-sortedset", json.dumps(one), json.dumps(two), json.dumps(three))
    except ConfigurationError as exc:
        named = [problem.startswith(("transport", "pools", "merge")) for problem in exc.problems]
    else:
        named = [True]

    assert all(named)
    assert named


def test_what_is_nested_too_deep_is_told_at_whichever_depth_that_begins() -> None:
    for depth in range(900, 1020):
        with pytest.raises(ConfigurationError):
            read_documents("redis-sortedset", "{}", "[" * depth + "]" * depth)
