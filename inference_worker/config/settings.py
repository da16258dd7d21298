"""Every variable of the environment, as frozen settings, and `load`, the one reader.

Not here: which variables each part has (`parts`), and what a kind of value may hold (`values`). Nothing reads
`os.environ`; the doors hand it in.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from inference_worker.config.parts import (
    BillingSettings,
    CallerSettings,
    GatewaySettings,
    HealthSettings,
    IdentitySettings,
    LogSettings,
    MetricsSettings,
    ModelSettings,
    OpsSettings,
    Part,
    PubsubSettings,
    RabbitMQSettings,
    RedisSettings,
    ScaleSettings,
    SqlSettings,
    StreamsSettings,
    TlsSettings,
    TracesSettings,
    TransportSettings,
)
from inference_worker.config.values import Text, is_off, open_regular, read_file
from inference_worker.disposition import RetryPolicy
from inference_worker.errors import ConfigurationError

Needs = Literal["run", "dev", "client", "gateway", "scaler", "process"]
"""Who asks: `run` and `check`; `dev`, which brings everything; `submit` and `dlq`, which use broker and Redis; the
intake and the scaler, which use those too; and `process`, whose queues and models stand in documents."""

_NOT_A_REPLICA: Mapping[str, str] = {
    "USER_ID": "client",
    "HF_MODEL_ID": "client",
    "METRIC_SERVER_URL": "off",
    "CROESUS_HOST": "off",
}

BROUGHT: Mapping[Needs, Mapping[str, str]] = {
    "run": {},
    "dev": {
        "DEPLOYMENT_ID": "dev",
        "REPLICA_ID": "dev-1",
        "USER_ID": "dev",
        "HF_MODEL_ID": "mock-model",
        "METRIC_SERVER_URL": "off",
        "CROESUS_HOST": "off",
    },
    "client": {**_NOT_A_REPLICA, "REPLICA_ID": "client"},
    "gateway": {**_NOT_A_REPLICA, "REPLICA_ID": "gateway"},
    "scaler": {**_NOT_A_REPLICA, "REPLICA_ID": "scaler"},
    "process": {
        "DEPLOYMENT_ID": "process",
        "REPLICA_ID": "process",
        "USER_ID": "process",
        "HF_MODEL_ID": "various",
        "METRIC_SERVER_URL": "off",
        "CROESUS_HOST": "off",
    },
}
STREAMS_DEPLOYMENT = "default"
"""Names nothing outside a worker where the queue is a stream, so that nobody else need set one."""

STREAMS_RETRY_STATUSES = frozenset({429, 500, 502, 503, 504})

ACKNOWLEDGEMENT_LIMIT_S = 1800
"""RabbitMQ closes a channel whose consumer holds a message longer (`consumer_timeout`)."""
USUAL_KILL_S = 30
"""How long Kubernetes waits after SIGTERM unless told otherwise."""


class Settings(Part):
    """All parts. Made by `load`; a test changes one with `model_copy(update=…)`."""

    identity: IdentitySettings
    transport: TransportSettings
    rabbitmq: RabbitMQSettings
    streams: StreamsSettings
    redis: RedisSettings
    sql: SqlSettings
    pubsub: PubsubSettings
    model: ModelSettings
    health: HealthSettings
    metrics: MetricsSettings
    billing: BillingSettings
    ops: OpsSettings
    gateway: GatewaySettings
    caller: CallerSettings
    scale: ScaleSettings
    tls: TlsSettings
    traces: TracesSettings
    log: LogSettings

    # What each transport has a variable of its own for.

    @property
    def over_streams(self) -> bool:
        return self.transport.kind == "redis-streams"

    @property
    def queue(self) -> str:
        """The queue's name, which is also what its fleet and its scale signal go by."""
        return self.streams.stream if self.over_streams else self.identity.request_queue

    @property
    def queue_address(self) -> str:
        """Where the queue is, as it may be logged."""
        return self.redis.address if self.over_streams else self.rabbitmq.address

    @property
    def slots(self) -> int:
        """In-flight requests of this worker."""
        return self.streams.concurrency if self.over_streams else self.rabbitmq.prefetch

    @property
    def lease_s(self) -> float:
        """How long a request stays its runner's when the runner is silent."""
        return self.streams.claim_idle_ms / 1000 if self.over_streams else self.redis.claim_lease_s

    @property
    def retry_policy(self) -> RetryPolicy:
        if self.over_streams:
            return RetryPolicy(max_retries=self.streams.max_attempts - 1, first_delay_s=self.streams.retry_delay_s)
        return RetryPolicy(max_retries=self.rabbitmq.max_retries, first_delay_s=self.rabbitmq.retry_delay_s)

    @property
    def retry_statuses(self) -> frozenset[int]:
        """Statuses of the model that are tried again."""
        if self.over_streams and "retry_status_codes" not in self.model.model_fields_set:
            return STREAMS_RETRY_STATUSES
        return self.model.retry_status_codes

    def vllm_metrics_url_now(self) -> str:
        vllm = self.metrics.vllm_url
        return f"{self.model.url_now()}/metrics" if vllm is None else vllm.now()


class Variable(NamedTuple):
    """One row of the README's table."""

    name: str
    default: str
    meaning: str
    accepted: str
    secret: bool
    file: bool
    """It has a `_FILE` twin."""


def load(environ: Mapping[str, str], *, needs: Needs = "run") -> Settings:
    """Read the settings out of an environment.

    Raises: ConfigurationError with one line for every variable that is missing or wrong.
    """
    problems: dict[str, str] = {}
    values = {**BROUGHT[needs], **_read(environ, problems)}
    if needs in ("client", "gateway", "scaler") and str(values.get("TRANSPORT", "")).lower() == "redis-streams":
        values.setdefault("DEPLOYMENT_ID", STREAMS_DEPLOYMENT)
    parts: dict[str, Part] = {}
    for field, part in _parts():
        names = [row.name for row in _variables(part)]
        try:
            parts[field] = part.model_validate({name: values[name] for name in names if name in values})
        except ValidationError as exc:
            for error in exc.errors(include_url=False):
                name = str(error["loc"][0])
                problems.setdefault(name, _what(error, values.get(name)))
    for name, what in _across(parts, values, needs):
        problems.setdefault(name, what)
    if problems:
        raise ConfigurationError(
            tuple(
                f"{row.name}: {problems[row.name]}; accepted: {row.accepted}"
                for row in describe()
                if row.name in problems
            )
        )
    return Settings.model_validate(parts)


def describe() -> list[Variable]:
    """Every variable, in the order of the documentation."""
    return [row for _, part in _parts() for row in _variables(part)]


def warnings(settings: Settings) -> list[str]:
    """What is allowed and probably not meant, one sentence each."""
    rabbitmq, redis, model, ops = settings.rabbitmq, settings.redis, settings.model, settings.ops
    over_rabbitmq = settings.transport.kind == "rabbitmq"
    found = (
        (
            model.infer_timeout_s > redis.response_ttl_s,
            "REDIS_RESPONSE_TTL_S is shorter than MODEL_INFER_TIMEOUT_S: a result may be gone before a redelivered "
            "message asks for it, and the request would run and be billed twice",
        ),
        (
            over_rabbitmq and model.infer_timeout_s > ACKNOWLEDGEMENT_LIMIT_S,
            f"MODEL_INFER_TIMEOUT_S is above {ACKNOWLEDGEMENT_LIMIT_S} s: RabbitMQ closes the channel of a consumer "
            "that holds a message longer, unless its consumer_timeout is raised",
        ),
        (
            ops.shutdown_grace_s > USUAL_KILL_S,
            f"SHUTDOWN_GRACE_S is above {USUAL_KILL_S} s: whoever stops the worker must wait longer before killing "
            "it (stop_grace_period, terminationGracePeriodSeconds)",
        ),
        (
            over_rabbitmq and rabbitmq.queue_type == "quorum" and rabbitmq.delivery_limit <= rabbitmq.max_crashes,
            "RABBITMQ_DELIVERY_LIMIT is not above INFERENCE_MAX_CRASHES: the broker dead-letters a request before "
            "the worker can say why",
        ),
        (
            over_rabbitmq and rabbitmq.heartbeat_s > 600,
            "RABBITMQ_HEARTBEAT_S is above 600 s: a dead connection is noticed only after two of them",
        ),
    )
    return [*(text for applies, text in found if applies), *_of_the_other_transport(settings)]


def _of_the_other_transport(settings: Settings) -> Iterator[str]:
    """Variables that are set for a queue that is not in use, where the queue in use has one for the same."""
    rabbitmq, redis, streams = settings.rabbitmq, settings.redis, settings.streams
    pairs = (
        (rabbitmq, "prefetch", "RABBITMQ_PREFETCH", streams, "concurrency", "IWL_CONCURRENCY"),
        (rabbitmq, "max_retries", "RABBITMQ_MAX_RETRIES", streams, "max_attempts", "IWL_MAX_ATTEMPTS"),
        (rabbitmq, "retry_delay_s", "RABBITMQ_RETRY_DELAY_S", streams, "retry_delay_s", "IWL_RETRY_DELAY_S"),
        (redis, "claim_lease_s", "CLAIM_LEASE_S", streams, "claim_idle_ms", "IWL_CLAIM_IDLE_MS"),
    )
    for one, field, name, other, other_field, other_name in pairs:
        set_here, set_there = field in one.model_fields_set, other_field in other.model_fields_set
        if settings.over_streams and set_here and not set_there:
            yield f"{name} has no effect with TRANSPORT=redis-streams: {other_name} is what counts there"
        if not settings.over_streams and set_there and not set_here:
            yield f"{other_name} has no effect without TRANSPORT=redis-streams: {name} is what counts here"


def _parts() -> Iterator[tuple[str, type[Part]]]:
    for field, info in Settings.model_fields.items():
        part = info.annotation
        assert isinstance(part, type)
        assert issubclass(part, Part)
        yield field, part


def _variables(part: type[Part]) -> Iterator[Variable]:
    for info in part.model_fields.values():
        extra = info.json_schema_extra
        assert isinstance(extra, dict)
        shown = extra["shown"]
        if shown is None:
            empty = info.default is None or info.default == ""
            shown = "required" if info.default is PydanticUndefined else "" if empty else _shown(info.default)
        yield Variable(
            name=str(info.validation_alias),
            default=str(shown),
            meaning=info.description or "",
            accepted=str(extra["accepted"]),
            secret=bool(extra["secret"]),
            file=bool(extra["file"]),
        )


def _shown(default: object) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)


def _read(environ: Mapping[str, str], problems: dict[str, str]) -> dict[str, str | Text]:
    """What is set, by name; an empty value is unset, and white space around anything but a secret is dropped."""
    values: dict[str, str | Text] = {}
    for row in describe():
        value = environ.get(row.name, "")
        value = value if row.secret else value.strip()
        path = environ.get(f"{row.name}_FILE", "").strip() if row.file else ""
        if value and path:
            problems[row.name] = f"is set, and {row.name}_FILE too"
        elif path:
            try:
                text = read_file(path)
            except (OSError, ValueError) as exc:
                reason = exc.strerror if isinstance(exc, OSError) else str(exc)
                problems[row.name] = f"{row.name}_FILE cannot be read: {path!r}: {reason}"
                continue
            if text if row.secret else text.strip():
                values[row.name] = Text(text, path=path)
        elif value and not row.secret and value[0] in "\"'" and len(value) > 1 and value[-1] == value[0]:
            problems[row.name] = "is wrapped in quotes, which are part of the value here"
        elif value:
            values[row.name] = Text(value) if row.file else value
    return values


def _what(error: ErrorDetails, value: str | Text | None) -> str:
    """The error in words of ours: pydantic's own would quote what came."""
    match error["type"]:
        case "missing":
            return "is required and not set"
        case "value_error":
            return str(error["ctx"]["error"])
        case kind:
            came = repr(value)[:80] if isinstance(value, str) and "@" not in value else "***"
            if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
                return f"{came} is out of bounds"
            return f"{came} cannot be read"


def _across(parts: Mapping[str, Part], values: Mapping[str, str | Text], needs: Needs) -> Iterable[tuple[str, str]]:
    """What only two variables together tell. A part that is wrong by itself is missing here."""
    reports = needs in ("run", "dev", "process")
    if reports and "METRIC_SERVER_SERVICE_TOKEN" not in values and not is_off(values.get("METRIC_SERVER_URL")):
        yield "METRIC_SERVER_SERVICE_TOKEN", "is required and not set"
    match parts:
        case {"rabbitmq": RabbitMQSettings(dlq=dlq), "identity": IdentitySettings(request_queue=queue)} if dlq == queue:
            yield "INFERENCE_DLQ", "is the name of the request queue"
    match parts:
        case {"rabbitmq": RabbitMQSettings(queue_type="quorum", max_priority=levels)} if levels:
            yield "RABBITMQ_MAX_PRIORITY", f"{levels} is for classic queues (RABBITMQ_QUEUE_TYPE)"
    match parts:
        case {"transport": TransportSettings(kind="memory")} if needs != "dev":
            yield "TRANSPORT", "'memory' keeps nothing outside this process, and only dev has it"
    match parts:
        case {"streams": StreamsSettings(stream=stream, dead_letters=dead)} if stream == dead:
            yield "IWL_DLQ_STREAM", "is the name of the stream of requests"
        case {"streams": StreamsSettings(stream=stream, dead_letters=dead)} if dead == f"{stream}:delayed":
            yield "IWL_DLQ_STREAM", "is where the retries lie that wait for their time"
    match parts:
        case {"scale": ScaleSettings(least=least, most=most)} if least > most:
            yield "SCALE_MAX", f"{most} is below SCALE_MIN, which is {least}"
    match parts:
        case {"tls": TlsSettings() as tls}:
            yield from _tls_problems(tls)


def _tls_problems(tls: TlsSettings) -> Iterable[tuple[str, str]]:
    if tls.cert_file is not None and tls.key_file is None:
        yield "TLS_KEY_FILE", "is required with TLS_CERT_FILE"
    if tls.key_file is not None and tls.cert_file is None:
        yield "TLS_CERT_FILE", "is required with TLS_KEY_FILE"
    paths = {"TLS_CA_FILE": tls.ca_file, "TLS_CERT_FILE": tls.cert_file, "TLS_KEY_FILE": tls.key_file}
    readable = True
    for name, path in paths.items():
        try:
            if path is not None:
                open_regular(path).close()
        except (OSError, ValueError) as exc:
            readable = False
            yield name, f"{path!r} cannot be read: {exc.strerror if isinstance(exc, OSError) else exc}"
    if not readable or (tls.cert_file is None) != (tls.key_file is None):
        return
    for name, only in (
        ("TLS_CA_FILE", TlsSettings.model_construct(ca_file=tls.ca_file, cert_file=None, key_file=None)),
        ("TLS_CERT_FILE", TlsSettings.model_construct(ca_file=None, cert_file=tls.cert_file, key_file=tls.key_file)),
    ):
        try:
            only.context()
        except OSError as exc:
            yield name, f"OpenSSL does not take it: {exc}"
