"""Parts of other packages: who is found, what is wrong with them, and that nobody takes a built-in name."""

import inspect
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from inference_worker.billing.cloudevents import CroesusSink
from inference_worker.billing.making import billing_sink, sink_problems
from inference_worker.check import _billing
from inference_worker.check_process import _extensions
from inference_worker.config.documents import GateConfig, PartKind
from inference_worker.config.doubts import doubts
from inference_worker.config.settings import load
from inference_worker.errors import ConfigurationError
from inference_worker.extensions import (
    BUILT_IN,
    GROUPS,
    METHODS,
    Extension,
    Extensions,
    GateParts,
    MergePolicyParts,
    Parts,
    TransportParts,
    installed,
)
from inference_worker.gates.basic import Constant
from inference_worker.gates.making import gate_problems
from inference_worker.merge import MergePolicy, RandomRobin
from inference_worker.merge_guarded import GuardedPolicy
from inference_worker.ports import BillingSink, Connect, Delivered, Gate
from inference_worker.process_extensions import policy_of_another
from inference_worker.process_setup import ProcessSetup, documents_again, read_setup
from inference_worker.transforms.chain import AnswerTransform, BodyTransform
from inference_worker.transforms.making import transforms_of

PROTOCOLS: Mapping[PartKind, type] = {
    "gate": Gate,
    "merge policy": MergePolicy,
    "transport": Connect,
    "transform": BodyTransform,
    "answer transform": AnswerTransform,
    "billing sink": BillingSink,
}
Factory = Callable[[Any], object]


def offers(kind: PartKind, name: str, make: Factory | BaseException, package: str = "iw-other") -> Extension:
    """A part that a package offers, or one that cannot be imported."""

    def load_it() -> Callable[[Parts], object]:
        if isinstance(make, BaseException):
            raise make
        return make

    return Extension(kind=kind, name=name, package=package, version="1.2.3", load=load_it)


def among(*parts: Extension) -> Extensions:
    return Extensions(lambda kind: [part for part in parts if part.kind == kind])


def open_gate(parts: GateParts) -> Constant:
    parts.given.text("who", "")
    return Constant()


def refuses(parts: Parts) -> object:
    raise ConfigurationError(("this machine has no such thing",))


def ends(parts: Parts) -> object:
    raise SystemExit(3)


def breaks(parts: Parts) -> object:
    raise LookupError("oh")


def setup_of(
    extensions: Extensions,
    *,
    kind: str = "redis-sortedset",
    transport: Mapping[str, object] | None = None,
    queue: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    **files: object,
) -> ProcessSetup:
    """A process's set-up; `files` are documents by the flags that name them."""
    one = {"queue_name": "q", "igw_base_url": "http://gw", "result_ttl_seconds": 9, **(queue or {})}
    document = {"queues": [one], **({"url": "redis://h"} if transport is None else transport)}
    flags = {name.replace("_", "-"): f"{name}.json" for name in files}
    texts = {f"{name}.json": json.dumps(text) for name, text in files.items()}
    given = {"transport": kind, "transport-config": json.dumps(document), **flags}
    return read_setup(given, environ or {}, texts.__getitem__, random.Random(1), extensions)


def wrong(extensions: Extensions, **changes: Any) -> Sequence[str]:
    with pytest.raises(ConfigurationError) as caught:
        setup_of(extensions, **changes)
    return caught.value.problems


# ---------------------------------------------------------------- who is looked for, and when


def test_the_methods_asked_for_are_those_of_the_protocols() -> None:
    for kind, protocol in PROTOCOLS.items():
        own = {name for name, member in vars(protocol).items() if inspect.isfunction(member)} - {
            "__init__",
            "_no_init_or_replace_init",
            "__subclasshook__",
        }
        assert set(METHODS[kind]) == own, kind
    assert set(PROTOCOLS) == set(GROUPS) == set(BUILT_IN) == set(METHODS)


def test_who_names_built_in_parts_alone_looks_for_no_others() -> None:
    def nobody(kind: PartKind) -> Sequence[Extension]:
        raise AssertionError(f"looked for a {kind}")

    setup_of(
        Extensions(nobody),
        queue={"gate_type": "constant"},
        request_merge_policy_config_file={"type": "tier-aging"},
        transform_config_file={"responseTransforms": [{"name": "n", "type": "model_name"}]},
    )


def test_entry_points_of_installed_packages_are_read() -> None:
    """None is installed with the tests; what is found is what the metadata says."""
    assert all(isinstance(found, Extension) for kind in GROUPS for found in installed(kind))


def test_a_built_in_name_cannot_be_taken_over_and_check_says_so() -> None:
    others = among(offers("gate", "constant", breaks))

    setup = setup_of(others, queue={"gate_type": "constant"})

    assert others.names("gate") == []
    (row,) = _extensions(setup)
    assert (row.word, row.detail) == ("warning", "the gate of iw-other 1.2.3 is not used: its name is built in")


def test_check_says_which_package_a_part_comes_from() -> None:
    setup = setup_of(among(offers("gate", "mine", open_gate)), queue={"gate_type": "mine"})

    (row,) = _extensions(setup)

    assert setup.extensions.said_of("gate", "mine") == "iw-other 1.2.3"
    assert (row.what, row.word, row.detail) == ("extension mine", "ok", "gate, of iw-other 1.2.3")


# ---------------------------------------------------------------- what is wrong

KINDS: Sequence[tuple[PartKind, dict[str, Any], str]] = (
    ("gate", {"queue": {"gate_type": "mine"}}, "transport.queues[0].gate_type"),
    ("merge policy", {"request_merge_policy_config_file": {"type": "mine"}}, "merge.type"),
    ("transport", {"kind": "mine", "transport": {}}, "--transport"),
    (
        "transform",
        {"transform_config_file": {"requestTransforms": [{"name": "n", "type": "mine"}]}},
        "transforms.requestTransforms[0].type",
    ),
    (
        "answer transform",
        {"transform_config_file": {"responseTransforms": [{"name": "n", "type": "mine"}]}},
        "transforms.responseTransforms[0].type",
    ),
    ("billing sink", {"environ": {"BILLING_SINK": "mine"}}, "BILLING_SINK"),
)
OF_EACH_KIND = pytest.mark.parametrize(("kind", "named", "place"), KINDS, ids=[kind for kind, _, _ in KINDS])


@OF_EACH_KIND
def test_one_that_cannot_be_imported_is_a_problem_that_names_its_package(
    kind: PartKind, named: dict[str, Any], place: str
) -> None:
    (problem,) = wrong(among(offers(kind, "mine", ImportError("no grpc")), offers(kind, "fine", open_gate)), **named)

    assert problem.startswith(
        f'{place}: the {kind} "mine" of iw-other 1.2.3 cannot be imported: ImportError: no grpc; '
    )
    accepted = problem.partition("accepted: ")[2].split(", ")
    assert set(accepted) == {*BUILT_IN[kind], "fine", "mine"}


@OF_EACH_KIND
def test_one_that_cannot_be_made_is_a_problem_that_names_its_package(
    kind: PartKind, named: dict[str, Any], place: str
) -> None:
    (problem,) = wrong(among(offers(kind, "mine", breaks)), **named)

    assert problem.startswith(f'{place}: the {kind} "mine" of iw-other 1.2.3 cannot be made: LookupError: oh; accepted')


@OF_EACH_KIND
def test_one_that_would_end_the_process_is_a_problem(kind: PartKind, named: dict[str, Any], place: str) -> None:
    (at_import,) = wrong(among(offers(kind, "mine", SystemExit("needs a newer Python"))), **named)
    (when_made,) = wrong(among(offers(kind, "mine", ends)), **named)

    said = f'{place}: the {kind} "mine" of iw-other 1.2.3 cannot be'
    assert at_import.startswith(f"{said} imported: SystemExit: needs a newer Python; accepted: ")
    assert when_made.startswith(f"{said} made: SystemExit: 3; accepted: ")


@OF_EACH_KIND
def test_what_a_factory_says_against_the_configuration_is_said(
    kind: PartKind, named: dict[str, Any], place: str
) -> None:
    assert wrong(among(offers(kind, "mine", refuses)), **named) == ("this machine has no such thing",)


@OF_EACH_KIND
def test_one_without_the_methods_of_its_kind_is_a_problem(kind: PartKind, named: dict[str, Any], place: str) -> None:
    (problem,) = wrong(among(offers(kind, "mine", lambda _: object())), **named)

    said = (
        f'{place}: the {kind} "mine" of iw-other 1.2.3 is of type object, without {", ".join(METHODS[kind])}; accepted'
    )
    assert problem.startswith(said)


@OF_EACH_KIND
def test_one_name_of_two_packages_is_a_problem_case_298(kind: PartKind, named: dict[str, Any], place: str) -> None:
    two = among(offers(kind, "mine", breaks, "iw-b"), offers(kind, "mine", breaks, "iw-a"))

    (problem,) = wrong(two, **named)

    assert problem.startswith(f'{place}: is "mine", which iw-a 1.2.3 and iw-b 1.2.3 both offer; accepted: ')
    assert problem.endswith(", each from one package")


@OF_EACH_KIND
def test_a_name_that_nobody_has_is_a_problem_with_all_that_is_found(
    kind: PartKind, named: dict[str, Any], place: str
) -> None:
    problem = wrong(among(offers(kind, "fine", open_gate)), **named)[0]

    assert problem.startswith(f'{place.removeprefix("--")}: is "mine"' if problem[0] != "-" else f'{place}: is "mine"')
    assert "fine" in problem
    assert all(name in problem for name in BUILT_IN[kind])


def test_a_parameter_that_nobody_asks_for_is_a_problem() -> None:
    others = among(offers("gate", "mine", open_gate))

    (problem,) = wrong(others, queue={"gate_type": "mine", "gate_params": {"whose": "x"}})

    assert problem == "transport.queues[0].gate_params.whose: is not a parameter; accepted: who"


# ---------------------------------------------------------------- what is made


def test_a_gate_is_told_where_it_stands_and_may_have_gates_inside() -> None:
    seen: list[GateParts] = []

    def outer(parts: GateParts) -> Gate:
        seen.append(parts)
        inner = parts.given.gate("gate")
        assert inner is not None
        assert parts.link_to("h:6379") is not None
        return parts.build(inner)

    others = among(offers("gate", "outer", outer), offers("gate", "mine", open_gate))
    gate = {"gate_type": "outer", "gate_params": {"gate": {"gate_type": "mine"}}}

    setup_of(others, queue=gate)

    assert [(parts.stands_at, parts.api) for parts in seen] == [("pool", 1)]
    assert [part.name for part in others.used] == ["outer", "mine"]


def test_gates_of_other_packages_count_for_the_depth() -> None:
    def outer(parts: GateParts) -> Gate:
        inner = parts.given.gate("gate")
        assert inner is not None
        return parts.build(inner)

    deep: dict[str, Any] = {"gate_type": "constant"}
    for _ in range(20):
        deep = {"gate_type": "outer", "gate_params": {"gate": deep}}

    assert any("is 17 gates deep" in problem for problem in wrong(among(offers("gate", "outer", outer)), queue=deep))


def test_one_stands_inside_a_built_in_gate() -> None:
    others = among(offers("gate", "mine", open_gate))
    config = GateConfig(gate_type="composite", gate_params={"gates": [{"gate_type": "mine"}]}, where="pools[0]")

    assert gate_problems(config, extensions=others) == ()
    assert [part.name for part in others.used] == ["mine"]


def test_a_merge_policy_gets_its_own_parameters_and_not_those_of_all() -> None:
    seen: list[Mapping[str, object]] = []

    def policy(parts: MergePolicyParts) -> RandomRobin[object]:
        seen.append({**parts.given.texts("weights"), "per_lane": parts.per_lane})
        return RandomRobin(parts.rng, parts.per_lane)

    others = among(offers("merge policy", "mine", policy))
    params = {"max_per_lane": 5, "tier_label": "t", "fairness_header": "x-f", "weights": {"a": "1"}}

    setup = setup_of(others, request_merge_policy_config_file={"type": "mine", "parameters": params})

    merge = setup.documents.merge
    assert seen == [{"a": "1", "per_lane": 5}]
    assert (merge.name, merge.tier_label, merge.stamps.fairness_header) == ("mine", "t", "x-f")
    assert isinstance(policy_of_another(merge, random.Random(1), others), GuardedPolicy)


def test_a_merge_policy_that_cannot_be_made_any_more_is_no_reason_to_end() -> None:
    broken: list[bool] = []

    def policy(parts: MergePolicyParts) -> RandomRobin[object]:
        if broken:
            raise RuntimeError
        return RandomRobin(parts.rng)

    others = among(offers("merge policy", "mine", policy))
    setup = setup_of(others, request_merge_policy_config_file={"type": "mine"})
    broken.append(True)

    assert isinstance(policy_of_another(setup.documents.merge, random.Random(1), others), RandomRobin)


def test_a_transport_gets_its_own_keys_and_its_own_url() -> None:
    seen: list[tuple[str, str, str]] = []

    def transport(parts: TransportParts) -> Callable[[], None]:
        seen.append((parts.url, parts.queue_name, parts.given.text("path")))
        return lambda: None

    others = among(offers("transport", "mine", transport))

    setup = setup_of(others, kind="mine", transport={"url": "x://u:p@h", "path": "/q"})

    assert seen == [("x://u:p@h", "q", "/q")]
    assert setup.documents.transport.name == "mine"
    assert setup.settings.redis.url_now() == "redis://localhost:6379"
    assert documents_again(setup, setup.read_file).transport.parameters == {"path": "/q"}


def test_transforms_of_both_kinds_are_made_in_their_places_case_298() -> None:
    class Both:
        def validate(self, request: object) -> None: ...
        def apply(self, request: object, body: bytes = b"") -> bytes:
            return body

    others = among(offers("transform", "mine", lambda _: Both()), offers("answer transform", "mine", lambda _: Both()))
    one = [{"name": "n", "type": "mine"}]

    setup = setup_of(others, transform_config_file={"requestTransforms": one, "responseTransforms": one})
    made = transforms_of(setup.documents, others)

    assert (list(made.requests), list(made.answers)) == (["n"], ["n"])


# ---------------------------------------------------------------- billing sinks


class Closes:
    """A sink that has something open."""

    def __init__(self) -> None:
        self.open = False

    async def __aenter__(self) -> "Closes":
        self.open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.open = False

    async def send(self, events: Sequence[bytes]) -> Delivered:
        assert self.open
        return Delivered()


async def test_a_sink_is_entered_and_left() -> None:
    closes = Closes()
    settings = load({"BILLING_SINK": "mine"}, needs="process")
    others = among(offers("billing sink", "mine", lambda _: closes))

    async with billing_sink(settings, others, now=lambda: 0.0, verify=True) as sink:
        assert settings.billing.on
        assert sink is not None
        assert await sink.send([b"{}"]) == Delivered()
    assert not closes.open


@pytest.mark.parametrize("text", ["secret", '["secret"]', '{"secret"'])
def test_parameters_of_a_sink_that_are_no_object_are_not_shown(text: str) -> None:
    settings = load({"BILLING_SINK": "mine", "BILLING_SINK_PARAMETERS": text}, needs="process")

    (problem,) = sink_problems(settings, among(offers("billing sink", "mine", lambda _: Closes())))

    assert problem == "BILLING_SINK_PARAMETERS: is no JSON object; accepted: a JSON object on one line"


async def test_the_billing_server_is_the_sink_where_nothing_is_named() -> None:
    settings = load({"CROESUS_HOST": "http://billing"}, needs="process")

    async with billing_sink(settings, among(), now=lambda: 0.0, verify=True) as sink:
        assert isinstance(sink, CroesusSink)
    assert sink_problems(settings, among()) == ()


async def test_a_sink_need_have_nothing_open() -> None:
    class Plain:
        async def send(self, events: Sequence[bytes]) -> Delivered:
            return Delivered()

    settings = load({"BILLING_SINK": "mine"}, needs="process")
    others = among(offers("billing sink", "mine", lambda _: Plain()))

    assert sink_problems(settings, others) == ()
    async with billing_sink(settings, others, now=lambda: 0.0, verify=True) as sink:
        assert sink is not None
        assert await sink.send([]) == Delivered()


async def test_without_a_sink_there_is_none() -> None:
    async with billing_sink(load({}, needs="process"), among(), now=lambda: 0.0, verify=True) as sink:
        assert sink is None


async def test_an_unknown_sink_ends_the_start() -> None:
    settings = load({"BILLING_SINK": "nobody"}, needs="process")

    with pytest.raises(ConfigurationError, match=r'BILLING_SINK: is "nobody"; accepted: croesus'):
        async with billing_sink(settings, among(), now=lambda: 0.0, verify=True):
            pass


@pytest.mark.parametrize(
    ("name", "word", "detail"),
    [
        ("mine", "ok", "mine, of iw-other 1.2.3"),
        ("ours", "failed", 'BILLING_SINK: is "ours"; accepted: croesus, mine'),
    ],
)
async def test_check_says_whose_the_sink_is(monkeypatch: pytest.MonkeyPatch, name: str, word: str, detail: str) -> None:
    others = among(offers("billing sink", "mine", lambda _: Closes()))
    monkeypatch.setattr("inference_worker.check.Extensions", lambda: others)

    (row,) = await _billing(load({"BILLING_SINK": name}, needs="process"))

    assert (row.what, row.word, row.detail) == ("billing", word, detail)


def test_of_a_merge_policy_of_another_package_nobody_says_which_labels_it_needs() -> None:
    others = among(offers("merge policy", "mine", lambda parts: RandomRobin(parts.rng)))

    setup = setup_of(others, request_merge_policy_config_file={"type": "mine"})

    assert doubts(setup.documents, most_files=10**6) == []
