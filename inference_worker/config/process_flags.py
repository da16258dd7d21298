"""The flags of a process of many queues, new ones and old ones, and how documents come of them.

Names and defaults are those of llm-d-async, so that its command lines work here. An old flag is an alias: of a key of
the transport document, or of another flag. Where new ones are given beside old ones the new ones hold, and it is said
which were left out. Not here: reading the command line, and what the documents may hold (`documents`).
"""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from inference_worker.config.documents import (
    ALIASES,
    DEFAULT_PATH,
    DEFAULT_WORKERS,
    KINDS,
    MOST_WORKERS,
    NAMES,
    QUEUES,
    GateProblems,
    OtherNames,
    ProcessDocuments,
    TransportKind,
    no_others,
    read_documents,
)
from inference_worker.config.values import BaseUrl, Text
from inference_worker.errors import ConfigurationError
from inference_worker.gates.parameters import Parameters, shown
from inference_worker.llmd_retry import StatusTable, status_table

T = TypeVar("T")

_base: Final = TypeAdapter[Text](BaseUrl)

FlagKind = Literal["text", "whole", "seconds", "switch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of the command line."""

    name: str
    """Without its dashes."""
    default: str
    """As one would write it."""
    meaning: str
    kind: FlagKind = "text"
    instead: str = ""
    """Set for an old flag: what to give in its place."""
    unused: str = ""
    """Set where it is taken and changes nothing: why."""


def _old(name: str, default: str, instead: str, kind: FlagKind = "text") -> Flag:
    return Flag(name=name, default=default, meaning=f"old: use {instead}", kind=kind, instead=instead)


def _unused(name: str, default: str, why: str, kind: FlagKind = "text") -> Flag:
    return Flag(name=name, default=default, meaning=f"taken and not used: {why}", kind=kind, unused=why)


_TRANSPORT: Final = "--transport-config or --transport-config-file"

FLAGS: Final[tuple[Flag, ...]] = (
    Flag(name="transport", default="", meaning=f"the kind of queues: {', '.join(KINDS)}"),
    Flag(name="transport-config", default="", meaning="the transport document itself, as JSON"),
    Flag(name="transport-config-file", default="", meaning="the file of the transport document"),
    Flag(
        name="transport-config-watch-interval",
        default="0",
        meaning="how often it is looked whether the files of the documents have changed; 0: only at SIGHUP",
        kind="seconds",
    ),
    Flag(name="pool-config-file", default="", meaning="the file of the pools; without one there is one, `default`"),
    Flag(
        name="request-merge-policy-config-file",
        default="",
        meaning="the file of the merge policy; without one it is random-robin",
    ),
    Flag(name="transform-config-file", default="", meaning="the file of the transforms"),
    Flag(
        name="concurrency",
        default=str(DEFAULT_WORKERS),
        meaning="workers of the pool `default`, where no file has pools",
        kind="whole",
    ),
    Flag(name="request-timeout", default="5m", meaning="the longest one call may take", kind="seconds"),
    Flag(name="drain-timeout", default="2m", meaning="how long running calls may go on at a stop", kind="seconds"),
    Flag(
        name="gate-wait-timeout",
        default="5m",
        meaning="how long a request may wait at its pool's gate; 0: until its deadline",
        kind="seconds",
    ),
    Flag(
        name="status-rules",
        default="",
        meaning='what statuses mean where it is not as usual, as JSON: {"404": "retry", "5xx": "final"}',
    ),
    Flag(name="prometheus-url", default="", meaning="the Prometheus server that gates ask"),
    Flag(name="prometheus-cache-ttl", default="5s", meaning="how often gates read their metrics", kind="seconds"),
    Flag(
        name="metrics-backlog-poll-interval",
        default="15s",
        meaning="how often the backlog is counted; 0: never",
        kind="seconds",
    ),
    Flag(
        name="health-port",
        default="8081",
        meaning="a port of /livez, /readyz, /metrics, /status; 0: none",
        kind="whole",
    ),
    Flag(name="metrics-port", default="9090", meaning="another port of the same; 0: none", kind="whole"),
    Flag(name="tls-ca-cert", default="", meaning="a file of certificates (PEM) that the gateway's is checked against"),
    Flag(name="tls-cert", default="", meaning="a client certificate (PEM); needs tls-key"),
    Flag(name="tls-key", default="", meaning="its key (PEM)"),
    Flag(
        name="tls-insecure-skip-verify",
        default="false",
        meaning="do not check the gateway's certificate",
        kind="switch",
    ),
    Flag(name="v", default="2", meaning="how much is logged: 0 warnings, 1 to 3 usual, 4 debug", kind="whole"),
    _unused("metrics-endpoint-auth", "true", "there is no Kubernetes behind the metrics to ask", "switch"),
    _unused("kubeconfig", "", "nothing here asks Kubernetes"),
    _unused("zap-devel", "true", "use LOG_FORMAT: json or console", "switch"),
    _unused("zap-encoder", "", "use LOG_FORMAT: json or console"),
    _unused("zap-log-level", "", "use v"),
    _unused("zap-stacktrace-level", "", "a fault of ours always comes with its trace"),
    _unused("zap-time-encoding", "", "times are UTC, as ISO 8601 has them"),
    _old("message-queue-impl", "redis-pubsub", "--transport"),
    _old("redis-tracing", "false", "enable_tracing in the transport document", "switch"),
    _old("request-merge-policy-config", "", "--request-merge-policy-config-file"),
    _old("redis.url", "", "url in the transport document"),
    _old("redis.ss.igw-base-url", "", _TRANSPORT),
    _old("redis.ss.request-path-url", DEFAULT_PATH, _TRANSPORT),
    _old("redis.ss.inference-objective", "", _TRANSPORT),
    _old("redis.ss.request-queue-name", "request-sortedset", _TRANSPORT),
    _old("redis.ss.result-queue-name", "result-list", _TRANSPORT),
    _old("redis.ss.queues-config", "", "--transport-config"),
    _old("redis.ss.queues-config-file", "", "--transport-config-file"),
    _old("redis.ss.queues-config-watch-interval", "0", "--transport-config-watch-interval", "seconds"),
    _old("redis.ss.poll-interval-ms", "1000", "poll_interval_ms in the transport document", "whole"),
    _old("redis.ss.batch-size", "10", "batch_size in the transport document", "whole"),
    _old("redis.ss.gate-type", "", "gate_type in the transport document"),
    _old("redis.ss.gate-params", "{}", "gate_params in the transport document"),
    _old("redis.igw-base-url", "", _TRANSPORT),
    _old("redis.request-path-url", DEFAULT_PATH, _TRANSPORT),
    _old("redis.inference-objective", "", _TRANSPORT),
    _old("redis.request-queue-name", "request-queue", _TRANSPORT),
    _old("redis.retry-queue-name", "retry-sortedset", "retry_queue_name in the transport document"),
    _old("redis.result-queue-name", "result-queue", "result_queue_name in the transport document"),
    _old("redis.queues-config", "", "--transport-config"),
    _old("redis.queues-config-file", "", "--transport-config-file"),
    _old("pubsub.project-id", "", "project_id in the transport document"),
    _old("pubsub.igw-base-url", "", _TRANSPORT),
    _old("pubsub.request-path-url", DEFAULT_PATH, _TRANSPORT),
    _old("pubsub.inference-objective", "", _TRANSPORT),
    _old("pubsub.request-subscriber-id", "", _TRANSPORT),
    _old("pubsub.result-topic-id", "", "result_topic_id in the transport document"),
    _old("pubsub.topics-config-file", "", "--transport-config-file"),
    _old("pubsub.batch-size", "10", "batch_size in the transport document", "whole"),
)
BY_NAME: Final = {flag.name: flag for flag in FLAGS}
NO_DOCUMENT: Final = ("{}", "null")
"""What stands for a transport document that was not named, or could not be read."""
_OF_OLD_TRANSPORTS: Final = tuple(
    flag.name
    for flag in FLAGS
    if flag.name == "message-queue-impl" or (flag.instead and flag.name.startswith(("redis.", "pubsub.")))
)
"""Old flags that say where requests are; others may stand beside new ones."""
NEW_TRANSPORT: Final = ("transport", "transport-config", "transport-config-file")


@dataclass(frozen=True, slots=True, kw_only=True)
class _OldKind:
    """Which old flags make the document of a transport."""

    kind: TransportKind
    prefix: str
    """Of its own flags."""
    of_all: Mapping[str, str]
    """Keys of the document, and their flags."""
    of_one: Mapping[str, str]
    """Keys of a queue, where one alone is told of by flags."""
    inline: str = ""
    """The flag of the list of queues itself."""
    file: str
    """The flag of its file."""
    gated: bool = True
    """Whether queues have gates; elsewhere they were taken and not asked."""

    def others(self, name: str) -> bool:
        """Whether a flag is of another transport."""
        if name in self.of_all.values() or not name.startswith(("redis.", "pubsub.")):
            return False
        return not name.startswith(self.prefix) or (self.prefix == "redis." and name.startswith("redis.ss."))


_CHANNELS: Final = _OldKind(
    kind="redis-pubsub",
    prefix="redis.",
    of_all={
        "url": "redis.url",
        "retry_queue_name": "redis.retry-queue-name",
        "result_queue_name": "redis.result-queue-name",
        "enable_tracing": "redis-tracing",
    },
    of_one={
        "queue_name": "redis.request-queue-name",
        "igw_base_url": "redis.igw-base-url",
        "request_path_url": "redis.request-path-url",
        "inference_objective": "redis.inference-objective",
    },
    inline="redis.queues-config",
    file="redis.queues-config-file",
)
_SORTED_SETS: Final = _OldKind(
    kind="redis-sortedset",
    prefix="redis.ss.",
    of_all={
        "url": "redis.url",
        "result_queue_name": "redis.ss.result-queue-name",
        "poll_interval_ms": "redis.ss.poll-interval-ms",
        "batch_size": "redis.ss.batch-size",
        "enable_tracing": "redis-tracing",
    },
    of_one={
        "queue_name": "redis.ss.request-queue-name",
        "igw_base_url": "redis.ss.igw-base-url",
        "request_path_url": "redis.ss.request-path-url",
        "inference_objective": "redis.ss.inference-objective",
        "gate_type": "redis.ss.gate-type",
        "gate_params": "redis.ss.gate-params",
    },
    inline="redis.ss.queues-config",
    file="redis.ss.queues-config-file",
)
_TOPICS: Final = _OldKind(
    kind="gcp-pubsub",
    prefix="pubsub.",
    of_all={
        "project_id": "pubsub.project-id",
        "result_topic_id": "pubsub.result-topic-id",
        "batch_size": "pubsub.batch-size",
    },
    of_one={
        "subscriber_id": "pubsub.request-subscriber-id",
        "igw_base_url": "pubsub.igw-base-url",
        "request_path_url": "pubsub.request-path-url",
        "inference_objective": "pubsub.inference-objective",
    },
    file="pubsub.topics-config-file",
)
OLD_KINDS: Final[Mapping[str, _OldKind]] = {
    "redis-pubsub": _CHANNELS,
    "redis-sortedset": _SORTED_SETS,
    "gcp-pubsub": replace(_TOPICS, gated=False),
    "gcp-pubsub-gated": _TOPICS,
}
"""By what `message-queue-impl` says."""
OLD_DEFAULT: Final = (
    "--message-queue-impl is not given, which stands for redis-pubsub: requests may be lost there; "
    "use --transport, and rather with redis-sortedset"
)
UNGATED: Final = (
    "--message-queue-impl gcp-pubsub asks no gates: those in --pubsub.topics-config-file are not used; use --transport"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFlags:
    """A command line, read: the texts of the documents, and the rest as values. An empty text stands for none."""

    kind: str
    transport_json: str
    transport_file: str
    """Where `transport_json` was read, to be watched."""
    transport_is_queues: bool
    """That file has the list of queues alone, as an old flag wants it."""
    pools_json: str | None
    merge_json: str | None
    transform_json: str | None
    watch_interval_s: float
    concurrency: int
    request_timeout_s: float
    drain_timeout_s: float
    gate_wait_timeout_s: float
    backlog_poll_interval_s: float
    statuses: StatusTable
    prometheus_url: str
    prometheus_cache_s: float
    health_port: int
    metrics_port: int
    tls_ca_cert: str
    tls_cert: str
    tls_key: str
    tls_skip_verify: bool
    verbosity: int
    notes: tuple[str, ...] = field(default_factory=tuple)
    """What was left out, and which flags are old: one warning each."""


def read_flags(
    given: Mapping[str, str], read_file: Callable[[str], str], others: OtherNames = no_others
) -> ProcessFlags:
    """Make documents of the flags that were given, by their names; `read_file` raises OSError or ValueError.

    `others` has the names of transports that other packages bring.

    Raises:
        ConfigurationError: with every problem.
    """
    flags, problems = flags_and_problems(given, read_file, others)
    if problems:
        raise ConfigurationError(problems)
    return flags


def flags_and_problems(
    given: Mapping[str, str], read_file: Callable[[str], str], others: OtherNames = no_others
) -> tuple[ProcessFlags, tuple[str, ...]]:
    """The same, with all that is wrong beside it: what could be read may be wrong itself."""
    problems = [f"--{name}: is no flag; {_meant(name)}" for name in given if name not in BY_NAME]
    values = _Values(given, problems)
    files = _Files(read_file, problems)
    text, kind, file, queues_alone = _transport(values, files, others)
    merge_file = _either(values, "request-merge-policy-config-file", "request-merge-policy-config")
    if values.text("pool-config-file") and not _has_queue_list(values):
        values.wrong("pool-config-file", "only with --transport-config, --transport-config-file or a list of queues")
    if bool(values.text("tls-cert")) != bool(values.text("tls-key")):
        problems.append("--tls-cert: is given without --tls-key, or the other way round; accepted: both, or none")
    prometheus = values.text("prometheus-url")
    try:
        if prometheus:
            _base.validate_python(prometheus)
    except ValidationError as exc:  # Not shown: it may hold a password.
        problems.append(f"--prometheus-url: {exc.errors()[0]['ctx']['error']}")
    watch_s = values.seconds(
        "transport-config-watch-interval"
        if values.new_transport or "transport-config-watch-interval" in given
        else "redis.ss.queues-config-watch-interval"
    )
    if watch_s and not file:
        problems.append("--transport-config-watch-interval: is given without a file to watch; accepted: 0, or a file")
    flags = ProcessFlags(
        kind=kind,
        transport_json=text,
        transport_file=file,
        transport_is_queues=queues_alone,
        pools_json=files.text("pool-config-file", values.text("pool-config-file")),
        merge_json=files.text("request-merge-policy-config-file", merge_file),
        transform_json=files.text("transform-config-file", values.text("transform-config-file")),
        watch_interval_s=watch_s,
        concurrency=values.whole("concurrency", 1, MOST_WORKERS),
        request_timeout_s=values.seconds("request-timeout", above=0.0),
        drain_timeout_s=values.seconds("drain-timeout"),
        gate_wait_timeout_s=values.seconds("gate-wait-timeout"),
        backlog_poll_interval_s=values.seconds("metrics-backlog-poll-interval"),
        statuses=_statuses(values.text("status-rules"), problems),
        prometheus_url=values.text("prometheus-url"),
        prometheus_cache_s=values.seconds("prometheus-cache-ttl"),
        health_port=values.whole("health-port", 0, 65535),
        metrics_port=values.whole("metrics-port", 0, 65535),
        tls_ca_cert=values.text("tls-ca-cert"),
        tls_cert=values.text("tls-cert"),
        tls_key=values.text("tls-key"),
        tls_skip_verify=values.switch("tls-insecure-skip-verify"),
        verbosity=min(values.whole("v", -128, 1_000_000), 127),
        notes=tuple(_notes(values)),
    )
    return flags, tuple(dict.fromkeys(problems))


def _meant(name: str) -> str:
    close = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.75)
    return f"--{close[0]} is probably meant" if close else "accepted: see --help"


def documents_of(
    flags: ProcessFlags,
    *,
    url: str | None = None,
    gate_problems: GateProblems | None = None,
    without_queues: bool = False,
    others: OtherNames = no_others,
) -> ProcessDocuments:
    """The documents that the flags name. `url` is the broker's by the environment; see `read_documents` for the rest.

    Raises:
        ConfigurationError: with every problem of all documents.
    """
    return read_documents(
        flags.kind,
        flags.transport_json,
        flags.pools_json,
        flags.merge_json,
        flags.transform_json,
        url=url,
        concurrency=flags.concurrency,
        without_queues=without_queues,
        gate_problems=gate_problems,
        others=others,
    )


# ---------------------------------------------------------------- the transport


def _transport(values: "_Values", files: "_Files", others: OtherNames) -> tuple[str, str, str, bool]:
    """The document, the kind, the file that it was read from, and whether that has the queues alone."""
    if values.new_transport:
        return _new_transport(values, files, others)
    if not any(values.given(name) for name in _OF_OLD_TRANSPORTS):
        values.problems.append(f"--transport: is missing; accepted: {', '.join(KINDS)}, and one of {_TRANSPORT}")
        return "{}", KINDS[0], "", False
    known = _old_kind(values)
    if known is None:
        values.wrong("message-queue-impl", f"{', '.join(OLD_KINDS)}; new: --transport with {', '.join(KINDS)}")
        return "{}", KINDS[0], "", False
    return _old_transport(known, values, files)


def _new_transport(values: "_Values", files: "_Files", others: OtherNames) -> tuple[str, str, str, bool]:
    kind, text, file = (values.text(name) for name in NEW_TRANSPORT)
    kind = ALIASES.get(kind, kind)
    if kind not in KINDS and kind not in (more := others("transport")):
        # llm-d-async takes redis-pubsub where nothing is said, which loses requests and is deprecated: better ask.
        values.wrong("transport", ", ".join((*KINDS, *more)))
    if bool(text) == bool(file):
        said = "both are given" if text else "neither is given"
        values.problems.append(f"--transport-config, --transport-config-file: {said}; accepted: exactly one")
    if file and not text:
        return files.text("transport-config-file", file) or "{}", kind, file, False
    return text or "{}", kind, "", False


def _old_kind(values: "_Values") -> _OldKind | None:
    """The transport that old flags are of; None where it is none."""
    return OLD_KINDS.get(values.text("message-queue-impl"))


def _old_transport(old: _OldKind, values: "_Values", files: "_Files") -> tuple[str, str, str, bool]:
    document: dict[str, object] = {key: values.document(flag) for key, flag in old.of_all.items()}
    inline, file = values.text(old.inline) if old.inline else "", values.text(old.file)
    queues: object
    if inline:
        queues = _json(old.inline, inline, values.problems)
    elif file:
        queues = _json(old.file, files.text(old.file, file) or "[]", values.problems)
    else:
        queues = [{key: values.document(flag) for key, flag in old.of_one.items()}]
    if not old.gated:
        queues = _without_gates(queues, values)
    document[NAMES.get(old.kind, QUEUES).several] = queues
    watched = "" if inline else file
    return json.dumps(document), old.kind, watched, bool(watched)


def _without_gates(queues: object, values: "_Values") -> object:
    """As it was there, where another name stood for topics with gates."""
    if not isinstance(queues, list):
        return queues
    gates = ("gate_type", "gate_params")
    if any(isinstance(queue, dict) and queue.get("gate_type") for queue in queues):
        values.notes.append(UNGATED)
    return [
        {key: value for key, value in queue.items() if key not in gates} if isinstance(queue, dict) else queue
        for queue in queues
    ]


def _has_queue_list(values: "_Values") -> bool:
    if values.new_transport:
        return any(values.text(name) for name in NEW_TRANSPORT[1:])
    old = _old_kind(values)
    return old is not None and any(values.text(name) for name in (old.inline, old.file) if name)


# ---------------------------------------------------------------- the rest


def _statuses(text: str, problems: list[str]) -> StatusTable:
    if not text:
        return StatusTable()
    settings = _json("status-rules", text, problems)
    if not isinstance(settings, dict) or not all(isinstance(value, str) for value in settings.values()):
        problems.append(f"--status-rules: is {shown(settings)}; accepted: an object of texts")
        return StatusTable()
    table, wrong = status_table(settings)
    problems.extend(f"--status-rules: {problem}" for problem in wrong)
    return table


def _either(values: "_Values", new: str, old: str) -> str:
    return values.text(new) or values.text(old)


def _notes(values: "_Values") -> list[str]:
    notes = list(values.notes)
    old = None if values.new_transport else _old_kind(values)
    if old is not None and not values.given("message-queue-impl"):
        notes += [OLD_DEFAULT] if any(values.given(name) for name in _OF_OLD_TRANSPORTS) else []
    for flag in FLAGS:
        if not values.given(flag.name):
            continue
        if flag.unused:
            notes.append(f"--{flag.name} is not used: {flag.unused}")
        elif flag.instead and _left_out(flag, values):
            notes.append(f"--{flag.name} is ignored, since newer flags are given; use {flag.instead}")
        elif flag.instead and old is not None and old.others(flag.name):
            notes.append(f"--{flag.name} is not used: it is of another transport than {old.kind}; use {flag.instead}")
        elif flag.instead:
            notes.append(f"--{flag.name} is old; use {flag.instead}")
    return notes


def _left_out(flag: Flag, values: "_Values") -> bool:
    if flag.name == "request-merge-policy-config":
        return values.given("request-merge-policy-config-file")
    return values.new_transport


def _json(name: str, text: str, problems: list[str]) -> object:
    try:
        parsed: object = json.loads(text or "null")
    except (ValueError, RecursionError) as exc:
        problems.append(f"--{name}: is no JSON: {exc}")
        return None
    return parsed


class _Files:
    """Reads files, and notes those that cannot be read."""

    def __init__(self, read_file: Callable[[str], str], problems: list[str]) -> None:
        self._read_file = read_file
        self._problems = problems

    def text(self, name: str, path: str) -> str | None:
        """None where no file is named."""
        if not path:
            return None
        try:
            return self._read_file(path)
        except (OSError, ValueError) as exc:
            self._problems.append(f"--{name}: the file {path} cannot be read: {exc}")
            return "null"


class _Values:
    """The flags that were given, and the defaults of the others."""

    def __init__(self, given: Mapping[str, str], problems: list[str]) -> None:
        self._given = given
        self.problems = problems
        self.notes: list[str] = []
        """What is to be warned of beside the flags themselves."""
        self.new_transport = any(name in given for name in NEW_TRANSPORT)

    def given(self, name: str) -> bool:
        return name in self._given

    def text(self, name: str) -> str:
        return self._given.get(name, BY_NAME[name].default)

    def document(self, name: str) -> object:
        """What a document has in the place of an old flag."""
        if BY_NAME[name].kind == "switch":
            return self.switch(name)
        if name.endswith("gate-params"):
            return _json(name, self.text(name), self.problems)
        return self.text(name)

    def whole(self, name: str, least: int, most: int) -> int:
        return self._read(name, lambda values, flag: values.whole(flag, at_least=least, at_most=most))

    def seconds(self, name: str, above: float | None = None) -> float:
        return self._read(name, lambda values, flag: values.seconds(flag, at_least=0.0, above=above))

    def switch(self, name: str) -> bool:
        return self._read(name, lambda values, flag: values.switch(flag))

    def wrong(self, name: str, accepted: str) -> None:
        self.problems.append(f"--{name}: is {shown(self.text(name))}; accepted: {accepted}")

    def _read(self, name: str, read: Callable[[Parameters, str], T]) -> T:
        found: list[str] = []
        value = read(Parameters({f"--{name}": self.text(name)}, "", found), f"--{name}")
        self.problems.extend(problem.removeprefix(".") for problem in found)
        return value
