"""The JSON documents of a process of many queues: transport, pools, merge policy, body transforms. Checked whole.

The keys and defaults are those of llm-d-async. What it lets pass is an error here: a key, a gate type or a pool that
does not exist, anything given twice. Each problem names its place in the document, what is there and what is accepted,
and all of them come at once.

Not here: the flags that name the documents (`process_flags`), and the parameters of gates: each gate reads its own.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal, cast, get_args

from pydantic import TypeAdapter, ValidationError

from inference_worker.config.values import AmqpUrl, BaseUrl, RedisUrl, SqlUrl, Text
from inference_worker.errors import ConfigurationError
from inference_worker.gates.parameters import Parameters, shown
from inference_worker.lanes import LANES, TIER_LABEL
from inference_worker.messages import usable_id
from inference_worker.stamping import (
    FAIRNESS_ATTRIBUTE,
    FAIRNESS_HEADER,
    OBJECTIVE_HEADER,
    Stamps,
    legal_name,
    legal_value,
)

TransportKind = Literal[
    "redis-sortedset", "redis-streams", "rabbitmq", "sql", "gcp-pubsub", "redis-pubsub", "extension"
]
KINDS: Final[tuple[TransportKind, ...]] = (
    "redis-sortedset",
    "redis-streams",
    "rabbitmq",
    "sql",
    "gcp-pubsub",
    "redis-pubsub",
)
"""`extension` is for those of other packages, and no name that a document may have."""
ALIASES: Final[Mapping[str, TransportKind]] = {"gcp-pubsub-gated": "gcp-pubsub"}
"""Names that llm-d-async had: whether a topic has a gate is said by the topic."""
RedisMode = Literal["standalone", "cluster", "sentinel"]
MODES: Final[tuple[RedisMode, ...]] = ("standalone", "cluster", "sentinel")
MergeType = Literal["random-robin", "tier-priority", "tier-aging", "extension"]
MERGE_TYPES: Final[tuple[MergeType, ...]] = ("random-robin", "tier-priority", "tier-aging")

TransformType = Literal["gcs_uri_multipart", "multipart", "extension"]
TRANSFORM_TYPES: Final[tuple[TransformType, ...]] = ("gcs_uri_multipart", "multipart")
AnswerTransformType = Literal["model_name", "extension"]
ANSWER_TRANSFORM_TYPES: Final[tuple[AnswerTransformType, ...]] = ("model_name",)

PartKind = Literal["gate", "merge policy", "transport", "transform", "answer transform", "billing sink"]
"""What other packages may bring (`extensions.py`)."""
OtherNames = Callable[[PartKind], Sequence[str]]
"""The names of what they bring; asked for only where a name is not built in."""

DEFAULT_POOL: Final = "default"
DEFAULT_PATH: Final = "/v1/completions"
DEFAULT_WORKERS: Final = 64
MOST_WORKERS: Final = 100_000
MOST_QUEUES: Final = 10_000
YEAR_S: Final = 366 * 86_400

BESIDE: Final[Mapping[TransportKind, tuple[str, ...]]] = {
    "redis-sortedset": ("claimed", "claim-owners", "claims-idx", "claim-notes", "delayed", "dead"),
    "redis-streams": ("delayed", "dead"),
}
"""The keys of a queue besides its own, each behind its name and a colon. What else were written there would end it."""

GateType = Literal[
    "aimd",
    "binary-metric",
    "composite",
    "constant",
    "constant-decision",
    "deadline-drop",
    "endpoint-scrape",
    "local-max-concurrency",
    "local-rate-limit",
    "prometheus-budget",
    "prometheus-query",
    "prometheus-saturation",
    "redis",
    "redis-leased-rate",
    "redis-quota",
    "reservation-classifier",
    "sql-quota",
    "tier-priority-admission",
    "wait-on-refuse",
]
GATE_TYPES: Final[tuple[GateType, ...]] = get_args(GateType)
SQL_QUOTA: Final = "sql-quota"

LEGAL_VALUE: Final = "what a header can have: no line ends, no control characters"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """A gate as a document has it; its parameters are native values or text."""

    gate_type: str
    gate_params: Mapping[str, object]
    where: str
    """Its place in the document, for problems with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """One queue, and where its requests go."""

    id: str
    """Its name in metrics and envelopes; the queue's own where the document has none."""
    queue_name: str
    base_url: Text
    request_path: str
    """Where a request names no endpoint."""
    worker_pool_id: str = DEFAULT_POOL
    objective: str = ""
    gate: GateConfig | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    result_queue_name: str = ""
    """Empty: the message's choice, else the transport's."""
    result_ttl_s: int = 0
    """0: results do not expire."""
    model: str = ""
    """The name by which its requests ask for their model there; empty: as their callers say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueNames:
    """What a document calls its queues, and a queue its name and where its results go."""

    several: str = "queues"
    name: str = "queue_name"
    results: str = "result_queue_name"


QUEUES: Final = QueueNames()
RESULTS: Final[Mapping[str, str]] = {"sql": "result-sql", "redis-pubsub": "result-queue"}
"""Where results go, where nobody says otherwise, unless into `result-list`."""
NAMES: Final[Mapping[str, QueueNames]] = {
    "gcp-pubsub": QueueNames(several="topics", name="subscriber_id", results="result_topic_id")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """Where the queues are, and what holds for all of them."""

    kind: TransportKind
    url: Text | None
    """None: as the environment says."""
    extension: str = ""
    """Its name, where another package has it."""
    parameters: Mapping[str, object] = field(default_factory=dict)
    """What the document says to that one alone."""
    mode: RedisMode = "standalone"
    addresses: tuple[str, ...] = ()
    master_name: str = ""
    retry_queue_name: str = "retry-sortedset"
    result_queue_name: str = "result-list"
    poll_interval_s: float = 1.0
    batch_size: int = 10
    claim_lease_s: float = 300.0
    claim_reclaim_interval_s: float = 15.0
    max_connections: int = 10
    """To Postgres, of one process."""
    project: str = ""
    """Of Google Cloud, which has the subscriptions."""
    enable_tracing: bool = False
    queues: tuple[QueueConfig, ...] = ()

    @property
    def name(self) -> str:
        """As `--transport` has it."""
        return self.extension or self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Workers that share a gate and a budget of requests in flight."""

    id: str
    workers: int
    gate: GateConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeConfig:
    """In which order a pool takes from its queues, and what is stamped on the way."""

    type: MergeType = "random-robin"
    tier_label: str = TIER_LABEL
    stamps: Stamps = field(default_factory=Stamps)
    max_per_lane: int | None = None
    """None: as the policy has it."""
    patience: int | None = None
    """For `tier-aging`: how often a lane that has work is passed over at most; None: as the policy has it."""
    lane_patience: Mapping[str, int] = field(default_factory=dict)
    extension: str = ""
    """Its name, where another package has it."""
    parameters: Mapping[str, object] = field(default_factory=dict)
    """What the document says to that one alone."""

    @property
    def name(self) -> str:
        """As the document has it."""
        return self.extension or self.type


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformConfig:
    """What makes another body of a payload; the first that fits does."""

    name: str
    type: TransformType
    parameters: Mapping[str, object]
    where: str
    """Its place in the document, for problems with its parameters."""
    extension: str = ""
    """The name of its type, where another package has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTransformConfig:
    """What makes another answer of one; each gets what the one before has made."""

    name: str
    type: AnswerTransformType
    parameters: Mapping[str, object]
    where: str
    """Its place in the document, for problems with its parameters."""
    extension: str = ""
    """The name of its type, where another package has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessDocuments:
    """All of it, checked."""

    transport: TransportConfig
    pools: tuple[PoolConfig, ...]
    merge: MergeConfig
    transforms: tuple[TransformConfig, ...] = ()
    answer_transforms: tuple[AnswerTransformConfig, ...] = ()


GateProblems = Callable[[GateConfig], Sequence[str]]


def no_others(_: PartKind) -> Sequence[str]:
    """There are no parts but those that are built in."""
    return ()


def read_documents(
    kind: str,
    transport_json: str,
    pools_json: str | None = None,
    merge_json: str | None = None,
    transform_json: str | None = None,
    *,
    url: str | None = None,
    concurrency: int = DEFAULT_WORKERS,
    without_queues: bool = False,
    gate_problems: GateProblems | None = None,
    others: OtherNames = no_others,
) -> ProcessDocuments:
    """Read the documents. Without one for pools there is one pool, `default`, of `concurrency` workers.

    `url` is the broker's where the document has none. `without_queues`: no queue is fine, as it is for a process that
    runs already. `gate_problems` finds out what is wrong with a gate; its type and those inside it where left out.
    `others` has the names of what other packages bring.

    Raises:
        ConfigurationError: with every problem of all documents.
    """
    problems: list[str] = []
    transport = _transport(kind, transport_json, url, without_queues, others, problems)
    pools = _pools(pools_json, concurrency, problems)
    merge = _merge(merge_json, others, problems)
    transforms, answer_transforms = _transforms(transform_json, others, problems)
    if pools is not None:
        _check_pools(transport, pools, problems)
    gates = [*(queue.gate for queue in transport.queues), *(pool.gate for pool in pools or ())]
    for gate in gates:
        if gate is not None:
            problems.extend((gate_problems or type_problems)(gate))
            problems.extend(_misplaced(gate, transport.kind))
    if problems:
        raise ConfigurationError(tuple(dict.fromkeys(problems)))
    return ProcessDocuments(
        transport=transport, pools=pools or (), merge=merge, transforms=transforms, answer_transforms=answer_transforms
    )


def _misplaced(gate: GateConfig, kind: TransportKind) -> list[str]:
    """A gate that counts where the queues are, and they are not there."""
    if kind == "sql" or SQL_QUOTA not in json.dumps([gate.gate_type, gate.gate_params]):
        return []
    return [f"{gate.where}: has a gate {SQL_QUOTA}; accepted: with --transport sql"]


def type_problems(gate: GateConfig) -> list[str]:
    """What is wrong with the type of a gate and of those inside it."""
    problems: list[str] = []
    _check_type(gate.gate_type, Parameters(gate.gate_params, f"{gate.where}.gate_params", problems), gate.where)
    return problems


def _check_type(gate_type: str, given: Parameters, where: str, name: str = "gate_type") -> None:
    if gate_type not in GATE_TYPES:
        given.problems.append(f"{where}.{name}: is {shown(gate_type)}; accepted: {', '.join(sorted(GATE_TYPES))}")
        return
    if gate_type == "tier-priority-admission":
        saturation = given.text("saturation_gate")
        if saturation:  # Its absence is noted already.
            _check_type(saturation, given.inner("saturation_gate_params"), given.where, "saturation_gate")
    inner = given.gates("gates") if gate_type == "composite" else ()
    if gate_type == "wait-on-refuse" and (only := given.gate("gate")) is not None:
        inner = (only,)
    for spec in inner:
        _check_type(spec.gate_type, spec.given, spec.where)


# ---------------------------------------------------------------- the transport


def _transport(
    kind: str, text: str, url: str | None, without_queues: bool, others: OtherNames, problems: list[str]
) -> TransportConfig:
    known = ALIASES.get(kind) or next((known for known in KINDS if known == kind), None)
    extension = ""
    if known is None and kind in (names := others("transport")):
        known, extension = "extension", kind
    elif known is None:
        problems.append(f"--transport: is {shown(kind)}; accepted: {', '.join((*KINDS, *names))}")
    before = len(problems)
    document = _object(text, "transport", problems)
    if not document and len(problems) > before:  # Nothing could be read: no word of what is missing in it.
        return TransportConfig(kind=known or "redis-sortedset", url=None)
    given = Parameters(document, "transport", problems)
    names_of = NAMES.get(known or "", QUEUES)
    given.has(names_of.several)
    where = f"transport.{names_of.several}"
    items = _list(document.get(names_of.several), where, problems)
    if not items and not without_queues:
        problems.append(f"{where}: has no queue; accepted: at least one")
    if len(items) > MOST_QUEUES:
        problems.append(f"{where}: has {len(items)} queues; accepted: up to {MOST_QUEUES}")
    queues = [_queue(item, f"{where}[{place}]", names_of, problems) for place, item in enumerate(items[:MOST_QUEUES])]
    _once(where, "id", [queue.id for queue in queues], problems)
    _once(where, names_of.name, [queue.queue_name for queue in queues], problems)
    config = _of_a_kind(known or "redis-sortedset", document, given, url, tuple(queues), problems)
    if extension:
        config = replace(config, extension=extension, parameters=given.rest())
    if known is not None:
        given.finish()
        _check_keys(config, problems)
    return config


def _check_keys(transport: TransportConfig, problems: list[str]) -> None:
    """Note where two things would lie under one key of Redis: the first that is written there ends the other."""
    owners: dict[str, str] = {}
    if transport.kind == "redis-sortedset":
        owners[transport.retry_queue_name] = "the set of retries"
    for queue in transport.queues:
        for beside in BESIDE.get(transport.kind, ()):
            owners[f"{queue.queue_name}:{beside}"] = f"a key of the queue {queue.queue_name}"

    def note(where: str, name: str) -> None:
        if name in owners:
            problems.append(f"{where}: is {shown(name)}, which is {owners[name]}; accepted: a key of its own")

    for place, queue in enumerate(transport.queues):
        note(f"transport.queues[{place}].queue_name", queue.queue_name)
    if transport.kind in BESIDE:
        owners |= {queue.queue_name: f"the queue {queue.queue_name}" for queue in transport.queues if queue.queue_name}
    if transport.kind == "redis-sortedset":
        note("transport.result_queue_name", transport.result_queue_name)
    for place, queue in enumerate(transport.queues):
        note(f"transport.queues[{place}].result_queue_name", queue.result_queue_name)


def _of_a_kind(
    kind: TransportKind,
    document: Mapping[str, object],
    given: Parameters,
    url: str | None,
    queues: tuple[QueueConfig, ...],
    problems: list[str],
) -> TransportConfig:
    if kind == "gcp-pubsub":
        return _of_pubsub(given, queues, problems)
    config = TransportConfig(
        kind=kind,
        url=_broker_url(kind, given, url, problems),
        result_queue_name=given.text("result_queue_name", RESULTS.get(kind, "result-list")),
        batch_size=_or_default(given, "batch_size", 10, MOST_WORKERS),
        enable_tracing=given.switch("enable_tracing", False),
        queues=queues,
    )
    if kind == "sql":
        return _of_sql(config, given, problems)
    if kind == "redis-pubsub":
        return replace(config, retry_queue_name=given.text("retry_queue_name", "retry-sortedset"))
    if kind != "redis-sortedset":
        return config
    mode, addresses, master_name = _topology(document, given, problems)
    return replace(
        config,
        mode=mode,
        addresses=addresses,
        master_name=master_name,
        retry_queue_name=given.text("retry_queue_name", "retry-sortedset"),
        poll_interval_s=_or_default(given, "poll_interval_ms", 1000, 3_600_000) / 1000,
        claim_lease_s=float(_or_default(given, "claim_lease_ttl_seconds", 300, YEAR_S)),
        claim_reclaim_interval_s=_or_default(given, "claim_reclaim_interval_ms", 15_000, YEAR_S * 1000) / 1000,
    )


def _of_sql(config: TransportConfig, given: Parameters, problems: list[str]) -> TransportConfig:
    names = {"result_queue_name": config.result_queue_name}
    for place, queue in enumerate(config.queues):
        names |= {
            f"queues[{place}].queue_name": queue.queue_name,
            f"queues[{place}].result_queue_name": queue.result_queue_name,
        }
    # Others would be refused by the table or by its index, each time that something is put there.
    problems.extend(
        f"transport.{where}: is {shown(name)}; accepted: up to 512 bytes of UTF-8 without control characters"
        for where, name in names.items()
        if name and not usable_id(name)
    )
    # Taken for the documents there are: rows are not dealt out in partitions, nor looked at in batches of a set size.
    for name, default in (
        ("handoff_timeout_seconds", 900),
        ("result_batch_size", 32),
        ("cancel_check_batch_size", 256),
        ("cancel_check_linger_ms", 5),
    ):
        given.whole(name, default, at_least=0, at_most=YEAR_S)
    return replace(
        config,
        poll_interval_s=_or_default(given, "poll_interval_ms", 1000, 3_600_000) / 1000,
        claim_lease_s=float(_or_default(given, "lease_ttl_seconds", 30, YEAR_S)),
        max_connections=_or_default(given, "max_connections", 10, 10_000),
    )


def _of_pubsub(given: Parameters, queues: tuple[QueueConfig, ...], problems: list[str]) -> TransportConfig:
    results = given.text("result_topic_id", "")
    problems.extend(
        f"transport.topics[{place}].result_topic_id: is missing; accepted: a topic, here or for all of them"
        for place, queue in enumerate(queues)
        if not (results or queue.result_queue_name)
    )
    return TransportConfig(
        kind="gcp-pubsub",
        url=None,
        project=given.text("project_id"),
        result_queue_name=results,
        batch_size=given.whole("batch_size", 10, at_least=1, at_most=1000),
        enable_tracing=given.switch("enable_tracing", False),
        queues=queues,
    )


def _or_default(given: Parameters, name: str, default: int, most: int) -> int:
    """A whole number; 0 stands for the default, as it does there."""
    return given.whole(name, default, at_least=0, at_most=most) or default


def _topology(
    document: Mapping[str, object], given: Parameters, problems: list[str]
) -> tuple[RedisMode, tuple[str, ...], str]:
    mode = next(mode for mode in MODES if mode == given.choice("mode", MODES, "standalone"))
    given.has("addrs")
    items = _list(document.get("addrs"), "transport.addrs", problems)
    addresses = tuple(item for item in items if isinstance(item, str) and item)
    problems.extend(
        f"transport.addrs[{place}]: is {shown(item)}; accepted: host:port"
        for place, item in enumerate(items)
        if item not in addresses
    )
    master_name = given.text("master_name", "")
    if addresses and mode == "standalone":
        problems.append("transport.addrs: is given; accepted only with the mode cluster or sentinel")
    if master_name and mode != "sentinel":
        problems.append("transport.master_name: is given; accepted only with the mode sentinel")
    if mode == "sentinel" and not master_name:
        problems.append("transport.master_name: is missing; accepted: the name that the sentinels watch")
    return mode, addresses, master_name


def _broker_url(kind: TransportKind, given: Parameters, url: str | None, problems: list[str]) -> Text | None:
    """Never shown where it is wrong: it may hold a password."""
    written = given.text("url", "")
    if kind == "extension":
        return Text(written) if written else None
    said = (url or written if kind == "sql" else written or url) or ""
    if said:
        adapter = _sql if kind == "sql" else _amqp if kind == "rabbitmq" else _redis
        return _url(said, adapter, "transport.url", problems)
    if kind == "sql":
        problems.append("transport.url: is missing; accepted: a postgres:// URL, here or in SQL_URL")
    if kind in ("redis-sortedset", "redis-pubsub"):
        problems.append("transport.url: is missing; accepted: a redis:// URL, here or in REDIS_URL")
    return None


def _queue(item: object, where: str, names: "QueueNames", problems: list[str]) -> QueueConfig:
    if not isinstance(item, Mapping):
        problems.append(f"{where}: is {shown(item)}; accepted: an object")
        return QueueConfig(id="", queue_name="", base_url=Text(""), request_path=DEFAULT_PATH, worker_pool_id="")
    given = Parameters(item, where, problems)
    queue_name = given.text(names.name)
    base_url = given.text("igw_base_url")
    queue = QueueConfig(
        id=given.text("id", queue_name),
        queue_name=queue_name,
        base_url=_url(base_url, _base, f"{where}.igw_base_url", problems) if base_url else Text(""),
        request_path=given.text("request_path_url", DEFAULT_PATH),
        worker_pool_id=given.text("worker_pool_id", DEFAULT_POOL),
        objective=given.text("inference_objective", ""),
        gate=_gate(given, item, where, problems),
        labels=given.texts("labels"),
        result_queue_name=given.text(names.results, ""),
        result_ttl_s=given.whole("result_ttl_seconds", 0, at_least=0, at_most=YEAR_S),
        model=given.text("model_override", ""),
    )
    if not legal_value(queue.objective):
        given.wrong("inference_objective", LEGAL_VALUE)
    given.finish()
    return queue


def _gate(given: Parameters, item: Mapping[str, object], where: str, problems: list[str]) -> GateConfig | None:
    gate_type, params = given.text("gate_type", ""), item.get("gate_params")
    given.has("gate_params")
    if isinstance(params, str) and params:
        params = _parsed(params, f"{where}.gate_params", problems)
    if params not in (None, "") and not isinstance(params, Mapping):
        problems.append(f"{where}.gate_params: is {shown(params)}; accepted: an object, or its JSON as text")
    read = params if isinstance(params, Mapping) else {}
    if gate_type:
        return GateConfig(gate_type=gate_type, gate_params=read, where=where)
    if read:
        problems.append(f"{where}.gate_params: is given without a gate_type; accepted: both, or none")
    return None


# ---------------------------------------------------------------- pools


def _pools(text: str | None, concurrency: int, problems: list[str]) -> tuple[PoolConfig, ...] | None:
    """None where the document cannot be read, so that nothing is said of the pools that queues name."""
    if text is None:
        return (PoolConfig(id=DEFAULT_POOL, workers=concurrency),)
    parsed = _parsed(text, "pools", problems)
    if not isinstance(parsed, list):
        problems.extend([] if parsed is None else [f"pools: is {shown(parsed)}; accepted: a list"])
        return None
    items = cast("list[object]", parsed)
    pools = [pool for place, item in enumerate(items) if (pool := _pool(item, f"pools[{place}]", problems)) is not None]
    _once("pools", "id", [pool.id for pool in pools], problems)
    return tuple(pools)


def _pool(item: object, where: str, problems: list[str]) -> PoolConfig | None:
    if not isinstance(item, Mapping):
        problems.append(f"{where}: is {shown(item)}; accepted: an object")
        return None
    given = Parameters(item, where, problems)
    pool = PoolConfig(
        id=given.text("id"),
        workers=given.whole("workers", at_least=1, at_most=MOST_WORKERS),
        gate=_gate(given, item, where, problems),
    )
    given.finish()
    return pool


def _check_pools(transport: TransportConfig, pools: Sequence[PoolConfig], problems: list[str]) -> None:
    names = [pool.id for pool in pools]
    accepted = f"one of the pools: {', '.join(names)}" if names else "a pool, of which there is none"
    several = NAMES.get(transport.kind, QUEUES).several
    problems.extend(
        f"transport.{several}[{place}].worker_pool_id: is {shown(queue.worker_pool_id)}; accepted: {accepted}"
        for place, queue in enumerate(transport.queues)
        if queue.worker_pool_id and queue.worker_pool_id not in names
    )


# ---------------------------------------------------------------- the merge policy


def _merge(text: str | None, others: OtherNames, problems: list[str]) -> MergeConfig:
    if text is None:
        return MergeConfig()
    document = _object(text, "merge", problems)
    given = Parameters(document, "merge", problems)
    named = _named(given, MERGE_TYPES, "merge policy", others)
    kind: MergeType = next((known for known in MERGE_TYPES if known == named), "extension")
    params = given.inner("parameters")
    merge = MergeConfig(
        type=kind,
        stamps=Stamps(
            fairness_header=_header(params, "fairness_header", params.text_or_off("fairness_header", FAIRNESS_HEADER)),
            fairness_attribute=params.text("fairness_attribute", FAIRNESS_ATTRIBUTE),
        ),
        max_per_lane=_given_whole(params, "max_per_lane"),
    )
    if kind == "extension":
        merge = replace(
            merge,
            tier_label=params.text("tier_label", TIER_LABEL),
            stamps=_lane_stamps(params, merge),
            extension=named,
            parameters=params.rest(),
        )
    elif kind != "random-robin":
        merge = replace(merge, tier_label=params.text("tier_label", TIER_LABEL), stamps=_lane_stamps(params, merge))
    if kind == "tier-aging":
        patience = {name: _given_whole(params.inner("lane_patience"), name) for name in _lanes(params, "lane_patience")}
        merge = replace(
            merge,
            patience=_given_whole(params, "patience"),
            lane_patience={name: number for name, number in patience.items() if number is not None},
        )
    given.finish()
    if document.get("type") in MERGE_TYPES:  # Else nobody knows what it may have.
        params.finish()
    return merge


def _lane_stamps(params: Parameters, merge: MergeConfig) -> Stamps:
    objectives = params.texts("lane_objectives")
    params.problems.extend(
        f"{params.where}.lane_objectives.{lane}: is {shown(said)}; accepted: {LEGAL_VALUE}"
        for lane, said in objectives.items()
        if not legal_value(said)
    )
    return replace(
        merge.stamps,
        priority_header=_header(params, "priority_header", params.text("priority_header", "")),
        objective_header=_header(params, "objective_header", params.text("objective_header", OBJECTIVE_HEADER)),
        lane_objectives={name: objectives[name] for name in _lanes(params, "lane_objectives")},
    )


def _lanes(params: Parameters, name: str) -> list[str]:
    """The lanes that a map names; what is none of them is a problem."""
    asked = params.texts(name)
    params.problems.extend(
        f"{params.where}.{name}.{lane}: is no lane; accepted: {', '.join(LANES)}" for lane in asked if lane not in LANES
    )
    return [lane for lane in asked if lane in LANES]


def _header(params: Parameters, name: str, header: str) -> str:
    """An illegal name would fail every request; better this start."""
    if header and not legal_name(header):
        params.wrong(name, "a name of an HTTP header, or nothing")
    return header


def _given_whole(params: Parameters, name: str) -> int | None:
    return params.whole(name, 1, at_least=1, at_most=1_000_000) if params.has(name) else None


# ---------------------------------------------------------------- transforms


def _transforms(
    text: str | None, others: OtherNames, problems: list[str]
) -> tuple[tuple[TransformConfig, ...], tuple[AnswerTransformConfig, ...]]:
    """Of requests and of answers."""
    if text is None:
        return (), ()
    document = _object(text, "transforms", problems)
    given = Parameters(document, "transforms", problems)
    given.has("requestTransforms")
    given.has("responseTransforms")
    given.finish()
    requests = tuple(
        TransformConfig(
            name=one.text("name"),
            type=next((known for known in TRANSFORM_TYPES if known == named), "extension"),
            parameters=parameters,
            where=one.where,
            extension="" if named in TRANSFORM_TYPES else named,
        )
        for one, parameters in _each(document, "requestTransforms", problems)
        for named in [_named(one, TRANSFORM_TYPES, "transform", others)]
    )
    answers = tuple(
        AnswerTransformConfig(
            name=one.text("name"),
            type=next((known for known in ANSWER_TRANSFORM_TYPES if known == named), "extension"),
            parameters=parameters,
            where=one.where,
            extension="" if named in ANSWER_TRANSFORM_TYPES else named,
        )
        for one, parameters in _each(document, "responseTransforms", problems)
        for named in [_named(one, ANSWER_TRANSFORM_TYPES, "answer transform", others)]
    )
    _once("transforms.requestTransforms", "name", [transform.name for transform in requests], problems)
    _once("transforms.responseTransforms", "name", [transform.name for transform in answers], problems)
    return requests, answers


def _each(
    document: Mapping[str, object], key: str, problems: list[str]
) -> Iterator[tuple[Parameters, Mapping[str, object]]]:
    """The transforms of a list, each with its parameters, which nobody has looked at."""
    for place, item in enumerate(_list(document.get(key), f"transforms.{key}", problems)):
        where = f"transforms.{key}[{place}]"
        if not isinstance(item, Mapping):
            problems.append(f"{where}: is {shown(item)}; accepted: an object")
            continue
        given = Parameters(item, where, problems)
        parameters = item.get("parameters")
        given.inner("parameters")
        yield given, parameters if isinstance(parameters, Mapping) else {}
        given.finish()


def _named(given: Parameters, built_in: Sequence[str], kind: PartKind, others: OtherNames) -> str:
    """The type that is named: one that is built in, or one that another package has."""
    return given.choice("type", built_in, more=partial(others, kind))


# ---------------------------------------------------------------- JSON and URLs

_amqp: Final = TypeAdapter[Text](AmqpUrl)
_redis: Final = TypeAdapter[Text](RedisUrl)
_sql: Final = TypeAdapter[Text](SqlUrl)
_base: Final = TypeAdapter[Text](BaseUrl)


def _url(said: str, adapter: TypeAdapter[Text], where: str, problems: list[str]) -> Text:
    try:
        return adapter.validate_python(said)
    except ValidationError as exc:
        problems.append(f"{where}: {exc.errors()[0]['ctx']['error']}")
        return Text("")


def _once(where: str, name: str, values: Sequence[str], problems: list[str]) -> None:
    """Note what stands there a second time."""
    first: dict[str, int] = {}
    for place, value in enumerate(values):
        if first.setdefault(value, place) < place and value:
            problems.append(
                f"{where}[{place}].{name}: is {shown(value)}, as in {where}[{first[value]}]; accepted: each once"
            )


def _list(value: object, where: str, problems: list[str]) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        problems.append(f"{where}: is {shown(value)}; accepted: a list")
        return []
    return cast("list[object]", value)


def _object(text: str, where: str, problems: list[str]) -> Mapping[str, object]:
    parsed = _parsed(text, where, problems)
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        problems.append(f"{where}: is {shown(parsed)}; accepted: an object")
        return {}
    return cast("dict[str, object]", parsed)


def _parsed(text: str, where: str, problems: list[str]) -> object:
    """The JSON of a document; None where it is none, which is noted."""
    twice: list[str] = []

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            twice.extend(name for name in made if names.count(name) > 1)
        return made

    try:
        parsed: object = json.loads(text, object_pairs_hook=once, parse_constant=_no_number)
    except json.JSONDecodeError as exc:
        problems.append(f"{where}: is no JSON: {exc.msg} at line {exc.lineno}, column {exc.colno}")
        return None
    except (ValueError, RecursionError) as exc:
        problems.append(f"{where}: is no JSON: {exc}")
        return None
    try:
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        problems.append(f"{where}: has half a character, such as \\ud83d alone; accepted: Unicode text")
    except RecursionError:
        problems.append(f"{where}: is nested too deep")
        return None
    problems.extend(f"{where}: has {shown(name)} twice in one object; accepted: once" for name in twice)
    if parsed is None:
        problems.append(f"{where}: is null; accepted: a document")
    return parsed


def _no_number(word: str) -> object:
    raise ValueError(f"{word} is no JSON number")
