"""Every variable of the environment, as frozen settings, and `load`, the one reader.

Not here: what a kind of value may hold (`values`). Nothing reads `os.environ`; the doors hand it in.
"""

import ssl
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal, NamedTuple
from urllib.parse import parse_qs, urlsplit, urlunsplit

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from inference_worker.config.values import (
    DAY_S,
    AmqpName,
    AmqpUrl,
    BaseUrl,
    DeclaredName,
    DeploymentId,
    HeaderName,
    Heartbeat,
    Host,
    HttpPath,
    Identity,
    Lower,
    Networks,
    PageUrl,
    Password,
    Plain,
    RedisUrl,
    SinkUrl,
    StatusCodes,
    StreamName,
    Text,
    Token,
    WebhookSecret,
    WholeSeconds,
    is_off,
    open_regular,
    percent_encoded,
    read_file,
    seconds,
    url_text,
    variable,
    whole,
    whole_seconds,
    without_user,
)
from inference_worker.disposition import RetryPolicy
from inference_worker.errors import ConfigurationError

Needs = Literal["run", "dev", "client", "gateway", "scaler"]
"""Who asks: `run` and `check`; `dev`, which brings everything; `submit` and `dlq`, which use broker and Redis; and the
intake and the scaler, which use those too."""

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
}
STREAMS_DEPLOYMENT = "default"
"""Names nothing outside a worker where the queue is a stream, so that nobody else need set one."""

STREAMS_RETRY_STATUSES = frozenset({429, 500, 502, 503, 504})

ACKNOWLEDGEMENT_LIMIT_S = 1800
"""RabbitMQ closes a channel whose consumer holds a message longer (`consumer_timeout`)."""
USUAL_KILL_S = 30
"""How long Kubernetes waits after SIGTERM unless told otherwise."""


class Part(BaseSettings):
    """One neighbour's variables. The names of the environment are the fields' aliases."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, arbitrary_types_allowed=True, case_sensitive=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What `load` hands in, and nothing else: no environment, no .env file."""
        return (init_settings,)


class IdentitySettings(Part):
    deployment_id: DeploymentId = variable("DEPLOYMENT_ID", ..., "UUID of the deployment", "up to 221 bytes of text")
    replica_id: Identity = variable("REPLICA_ID", ..., "unique id of this replica", "text of up to 512 characters")
    user_id: Identity = variable("USER_ID", ..., "the owner's user id", "text of up to 512 characters")
    org_id: Identity = variable("ORG_ID", "", "organization id", "text of up to 512 characters")
    hf_model_id: Identity = variable("HF_MODEL_ID", ..., "the model's Hugging Face id", "text of up to 512 characters")

    @property
    def request_queue(self) -> str:
        return f"infer_req.{self.deployment_id}"


class RabbitMQSettings(Part):
    url: AmqpUrl | None = variable(
        "RABBITMQ_URL",
        None,
        "wins over host, port, user, password and vhost",
        "amqp:// or amqps:// with user, host, port and vhost; a heartbeat in its query is from 1 to 65535",
        file=True,
    )
    host: Host = variable("RABBITMQ_HOST", "localhost", "server hostname", "a host name or address, without a port")
    port: int = whole("RABBITMQ_PORT", 5672, "server port", 1, 65535)
    username: Plain = variable("RABBITMQ_USERNAME", "guest", "user", "text without control characters")
    password: Password = variable(
        "RABBITMQ_PASSWORD", Text("guest"), "password", "text without control characters", secret=True, shown="guest"
    )
    vhost: AmqpName = variable("RABBITMQ_VHOST", "/", "virtual host", "up to 255 bytes")
    heartbeat_s: Heartbeat = variable(
        "RABBITMQ_HEARTBEAT_S",
        120,
        "seconds between heartbeats; a heartbeat in RABBITMQ_URL wins",
        "seconds above 0 to 65535; a fraction is rounded up",
    )
    prefetch: int = whole("RABBITMQ_PREFETCH", 1, "in-flight requests of this worker", 1, 65535)
    max_retries: int = whole("RABBITMQ_MAX_RETRIES", 1, "retries before the dead-letter queue", 0, 1_000_000)
    retry_delay_s: float = seconds(
        "RABBITMQ_RETRY_DELAY_S",
        0.0,
        "first delay before a retry is visible again, doubling, with equal jitter, up to 30 s; 0 = at once",
        30,
        least=0,
    )
    queue_type: Annotated[Literal["quorum", "classic"], Lower] = variable(
        "RABBITMQ_QUEUE_TYPE", "quorum", "used when the queue is first declared", "quorum or classic"
    )
    delivery_limit: int = whole(
        "RABBITMQ_DELIVERY_LIMIT", 100, "the quorum queue's own limit of deliveries, a last line", 1, 1_000_000_000
    )
    max_crashes: int = whole(
        "INFERENCE_MAX_CRASHES", 3, "a request whose worker died this often while running it is dead-lettered", 1, 1000
    )
    management_url: BaseUrl | None = variable(
        "RABBITMQ_MANAGEMENT_URL",
        None,
        "the management API, which counts what workers hold; asked with the user and password of RABBITMQ_URL unless "
        "it has its own",
        "http:// or https://, without a query",
        file=True,
    )
    dlx: DeclaredName = variable("INFERENCE_DLX", "infer.dlx", "dead-letter exchange", "up to 255 bytes, not amq.*")
    dlq: DeclaredName = variable("INFERENCE_DLQ", "infer.dlq", "dead-letter queue", "up to 255 bytes, not amq.*")
    dlx_routing_key: AmqpName = variable(
        "INFERENCE_DLX_ROUTING_KEY", "dead", "routing key of dead letters", "up to 255 bytes"
    )

    @property
    def given(self) -> bool:
        """An address was set, so that `dev` has something to use."""
        return not self.model_fields_set.isdisjoint({"url", "host"})

    @property
    def address(self) -> str:
        """Where the broker is, as it may be logged."""
        return without_user(self.url_now())

    def url_now(self) -> str:
        """The URL to connect with, its files read again; always with a heartbeat."""
        if self.url is None:
            user, password, vhost = map(percent_encoded, (self.username, self.password.now(), self.vhost))
            host = f"[{self.host}]" if ":" in self.host else self.host
            return f"amqp://{user}:{password}@{host}:{self.port}/{vhost}?heartbeat={self.heartbeat_s}"
        url = self.url.now()
        query = urlsplit(url).query
        if "heartbeat" in parse_qs(query):
            return url
        return f"{url.rstrip('?')}{'&' if query else '?'}heartbeat={self.heartbeat_s}"


class StreamsSettings(Part):
    stream: StreamName = variable(
        "IWL_STREAM", "inference:jobs", "the stream that requests come from", "up to 512 bytes of text"
    )
    group: StreamName = variable("IWL_GROUP", "workers", "its consumer group", "up to 512 bytes of text")
    dead_letters: StreamName = variable(
        "IWL_DLQ_STREAM", "inference:dlq", "the stream of dead letters", "up to 512 bytes of text"
    )
    claim_idle_ms: int = whole(
        "IWL_CLAIM_IDLE_MS",
        30_000,
        "how long an entry stays its worker's when the worker is silent, in ms; takes the place of CLAIM_LEASE_S",
        100,
        3_600_000,
    )
    max_attempts: int = whole(
        "IWL_MAX_ATTEMPTS", 3, "attempts of a request before the dead-letter stream", 1, 1_000_000
    )
    concurrency: int = whole("IWL_CONCURRENCY", 1, "in-flight requests of this worker", 1, 65535)
    retry_delay_s: float = seconds(
        "IWL_RETRY_DELAY_S",
        0.0,
        "first delay before a retry is visible again, doubling, with equal jitter, up to 30 s; 0 = at once",
        30,
        least=0,
    )


class RedisSettings(Part):
    url: RedisUrl = variable(
        "REDIS_URL",
        url_text("redis://localhost:6379"),
        "where results go",
        "redis://, rediss:// or unix://, with a database number",
        file=True,
    )
    password: Password | None = variable(
        "REDIS_PASSWORD", None, "used where the URL has none", "text without control characters", secret=True
    )
    response_ttl_s: WholeSeconds = whole_seconds("REDIS_RESPONSE_TTL_S", 3600, "how long a result lives", 366 * DAY_S)
    retry_delay_s: float = seconds(
        "REDIS_RETRY_DELAY_S", 10.0, "how long Redis is asked again before a message is handed back", 3600
    )
    claim_lease_s: float = seconds(
        "CLAIM_LEASE_S", 15.0, "how long a request stays its runner's when the runner is silent", 3600, least=0.1
    )

    @property
    def given(self) -> bool:
        return "url" in self.model_fields_set

    @property
    def address(self) -> str:
        """Where Redis is, as it may be logged."""
        return without_user(self.url_now())

    def url_now(self) -> str:
        """The URL to connect with, its files read again and the password put in."""
        parts = urlsplit(self.url.now())
        user, _, host = parts.netloc.rpartition("@")
        name, _, password = user.partition(":")
        if password or self.password is None:
            return parts.geturl()
        netloc = f"{name}:{percent_encoded(self.password.now())}@{host}"
        return urlunsplit(parts._replace(netloc=netloc))


class ModelSettings(Part):
    url: BaseUrl = variable(
        "MODEL_CONTAINER_URL",
        url_text("http://localhost:8000"),
        "the model container's base URL",
        "http:// or https://, without a query",
        file=True,
    )
    api_key: Token | None = variable(
        "MODEL_API_KEY", None, "sent to the model as a bearer token", "printable ASCII", secret=True
    )
    infer_path: HttpPath = variable(
        "MODEL_INFER_PATH", "/v1/chat/completions", "inference endpoint", "a path that starts with '/'"
    )
    health_path: HttpPath = variable("MODEL_HEALTH_PATH", "/health", "health endpoint", "a path that starts with '/'")
    infer_timeout_s: float = seconds("MODEL_INFER_TIMEOUT_S", 300.0, "time limit of one call to the model", 30 * DAY_S)
    retry_status_codes: StatusCodes = variable(
        "MODEL_RETRY_STATUS_CODES",
        frozenset(),
        "model statuses treated as temporary, for example 429,503; unset, they are 429,500,502,503,504 with "
        "TRANSPORT=redis-streams; off = none",
        "statuses from 400 to 599 with commas between them, or off",
        shown="",
    )
    mode: Annotated[Literal["vllm", "mock"], Lower] = variable(
        "MODEL_MODE", "vllm", "mock: no model, an echo of the prompt inside the worker", "vllm or mock"
    )
    mock_latency_s: float = seconds(
        "MODEL_MOCK_LATENCY_S", 0.05, "how long each call takes with MODEL_MODE=mock", 3600, least=0
    )
    max_response_bytes: int = whole(
        "MODEL_MAX_RESPONSE_BYTES", 16_777_216, "a larger body is a failed result (502)", 1, 536_870_912
    )

    @property
    def url_given(self) -> bool:
        return "url" in self.model_fields_set

    def url_now(self) -> str:
        """The base URL, without a slash at its end."""
        return self.url.now()

    def api_key_now(self) -> str | None:
        return None if self.api_key is None else self.api_key.now()


class HealthSettings(Part):
    interval_s: float = seconds("HEALTH_CHECK_INTERVAL_S", 10.0, "how often the model's health is asked", 3600)
    failure_threshold: int = whole(
        "HEALTH_FAILURE_THRESHOLD", 3, "time-outs of /health in a row that make the model unhealthy", 1, 1000
    )
    breaker_failures: int = whole(
        "MODEL_BREAKER_FAILURES",
        10,
        "failed calls in a row after which consuming pauses although /health is well, for 5 s to 60 s; 0 = never",
        0,
        100_000,
    )


class MetricsSettings(Part):
    url: SinkUrl = variable(
        "METRIC_SERVER_URL", ..., "the metric server; off = none", "http:// or https://, or off", file=True
    )
    service_token: Token | None = variable(
        "METRIC_SERVER_SERVICE_TOKEN",
        None,
        "bearer token for the metric server; not needed where that is off",
        "printable ASCII",
        secret=True,
        shown="required",
    )
    flush_interval_s: float = seconds("METRICS_FLUSH_INTERVAL_S", 30.0, "how often metrics are sent")
    ttft_header: HeaderName = variable(
        "METRICS_MODEL_TTFT_HEADER",
        "x-ttft",
        "response header with the time to the first token, in seconds",
        "a header's name",
    )
    tbt_header: HeaderName = variable(
        "METRICS_MODEL_TBT_HEADER",
        "x-tbt",
        "response header with the time between tokens, in seconds",
        "a header's name",
    )
    vllm_url: PageUrl | None = variable(
        "VLLM_METRICS_URL",
        None,
        "the model's Prometheus metrics",
        "http:// or https://",
        file=True,
        shown="MODEL_CONTAINER_URL + /metrics",
    )
    dcgm_url: PageUrl | None = variable(
        "DCGM_METRICS_URL", None, "the host's DCGM GPU metrics", "http:// or https://", file=True
    )

    def url_now(self) -> str | None:
        return None if self.url is None else self.url.now()

    def service_token_now(self) -> str | None:
        return None if self.service_token is None else self.service_token.now()

    def dcgm_url_now(self) -> str | None:
        return None if self.dcgm_url is None else self.dcgm_url.now()


class BillingSettings(Part):
    url: SinkUrl = variable(
        "CROESUS_HOST", ..., "the billing server's URL; off = none", "http:// or https://, or off", file=True
    )

    def url_now(self) -> str | None:
        return None if self.url is None else self.url.now()


class OpsSettings(Part):
    host: Host = variable("WORKER_HTTP_HOST", "0.0.0.0", "address of the ops port", "a host name or address")
    port: int = whole("WORKER_HTTP_PORT", 9090, "livez, readyz, healthz, metrics, status; 0 = off", 0, 65535)
    token: Token | None = variable(
        "WORKER_HTTP_TOKEN",
        None,
        "bearer token for POST /pause, /resume and /log-level on the ops port; without one they are off",
        "any text",
        secret=True,
        file=True,
    )
    shutdown_grace_s: float = seconds(
        "SHUTDOWN_GRACE_S", 25.0, "how long in-flight requests may finish after SIGTERM", least=0
    )

    def token_now(self) -> str | None:
        return None if self.token is None else self.token.now()


class GatewaySettings(Part):
    host: Host = variable("GATEWAY_HOST", "127.0.0.1", "address of the HTTP intake", "a host name or address")
    port: int = whole("GATEWAY_PORT", 8080, "port of the HTTP intake; 0 = any free one", 0, 65535)
    api_keys_file: Plain | None = variable(
        "GATEWAY_API_KEYS_FILE",
        None,
        "who may use the HTTP intake; without it, it listens on loopback alone",
        "a JSON file: docs/gateway.md",
    )
    max_queue_depth: int = whole(
        "IWL_MAX_QUEUE_DEPTH", 10_000, "waiting requests at which the HTTP intake says 429; 0 = no limit", 0, 2**31 - 1
    )
    wait_s: float = seconds(
        "GATEWAY_WAIT_S", 120.0, "how long the OpenAI-compatible paths wait for an answer before they say 504", 3600
    )
    max_body_bytes: int = whole("GATEWAY_MAX_BODY_BYTES", 16_777_216, "a larger body is refused (413)", 1, 268_435_456)
    webhook_secret: WebhookSecret | None = variable(
        "GATEWAY_WEBHOOK_SECRET",
        None,
        "signs webhooks of tenants that have no secret of their own; without any there are no webhooks",
        "whsec_ and 24 to 64 bytes as base64",
        secret=True,
    )
    webhook_networks: Networks = variable(
        "GATEWAY_WEBHOOK_NETWORKS",
        (),
        "private networks that webhooks may go to all the same",
        "networks with commas between them, such as 10.0.0.0/8,fd00::/8",
        shown="",
    )


class CallerSettings(Part):
    api_key: Token | None = variable(
        "GATEWAY_API_KEY",
        None,
        "what submit and dlq send to a gateway that asks for a key, with --url",
        "printable ASCII",
        secret=True,
    )

    def api_key_now(self) -> str | None:
        return None if self.api_key is None else self.api_key.now()


class ScaleSettings(Part):
    least: int = whole("SCALE_MIN", 1, "fewest replicas that are ever wanted", 0, 100_000)
    most: int = variable(
        "SCALE_MAX",
        10,
        "most replicas that are ever wanted",
        "a whole number from SCALE_MIN to 100000",
        ge=0,
        le=100_000,
    )
    per_replica: int = whole(
        "SCALE_TARGET_PER_REPLICA",
        0,
        "requests, waiting and running, that one replica is to have; 0 = as many as it runs at once",
        0,
        1_000_000,
    )
    down_lag: int = whole(
        "SCALE_DOWN_LAG", 0, "fewer replicas are wanted only while at most so many requests wait", 0, 2**31 - 1
    )
    down_after_s: float = seconds(
        "SCALE_DOWN_AFTER_S", 30.0, "how long fewer must have been enough before fewer are wanted", least=0
    )
    interval_s: float = seconds("SCALE_INTERVAL_S", 2.0, "how often the queue is looked at", 60, least=0.05)
    host: Host = variable("SCALER_HOST", "127.0.0.1", "address of the scaler's HTTP port", "a host name or address")
    port: int = whole("SCALER_PORT", 8081, "port of the scaler; 0 = any free one", 0, 65535)


class TlsSettings(Part):
    ca_file: Plain | None = variable("TLS_CA_FILE", None, "authorities to trust instead of the system's", "a PEM file")
    cert_file: Plain | None = variable("TLS_CERT_FILE", None, "our certificate, with TLS_KEY_FILE", "a PEM file")
    key_file: Plain | None = variable("TLS_KEY_FILE", None, "our certificate's key", "a PEM file, not encrypted")

    def context(self) -> ssl.SSLContext | None:
        """What to connect with, the files read again; None where nothing is set and the libraries' default does.

        Raises: OSError (ssl.SSLError is one) where a file has become unusable.
        """
        if self.ca_file is None and self.cert_file is None:
            return None
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.cert_file is not None:
            # An encrypted key would ask for its password on the terminal.
            context.load_cert_chain(self.cert_file, self.key_file, password="")
        return context

    def public_context(self) -> ssl.SSLContext:
        """What strangers are reached with: our authorities besides the system's, and no certificate of ours.

        Raises: as `context`.
        """
        context = ssl.create_default_context()
        if self.ca_file is not None:
            context.load_verify_locations(self.ca_file)
        return context


class TracesSettings(Part):
    base_url: BaseUrl | None = variable(
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        None,
        "the collector that traces go to, over OTLP/HTTP; without one there are none",
        "http:// or https://, without a query",
        file=True,
    )
    url: PageUrl | None = variable(
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        None,
        "the same as a whole URL; wins",
        "http:// or https://",
        file=True,
        shown="OTEL_EXPORTER_OTLP_ENDPOINT + /v1/traces",
    )

    def url_now(self) -> str | None:
        """The whole URL; None where no traces are wanted."""
        if self.url is not None:
            return self.url.now()
        return None if self.base_url is None else f"{self.base_url.now()}/v1/traces"


class LogSettings(Part):
    level: Annotated[Literal["debug", "info", "warning", "error", "critical"], Lower] = variable(
        "LOG_LEVEL", "info", "least level that is written", "debug, info, warning, error or critical"
    )
    format: Annotated[Literal["json", "console"], Lower] = variable(
        "LOG_FORMAT", "json", "shape of a log line", "json or console"
    )


class TransportSettings(Part):
    kind: Annotated[Literal["rabbitmq", "redis-streams", "memory"], Lower] = variable(
        "TRANSPORT",
        "rabbitmq",
        "where requests come from; memory only in dev",
        "rabbitmq or redis-streams; in dev also memory",
    )

    @property
    def given(self) -> bool:
        return "kind" in self.model_fields_set


class Settings(Part):
    """All parts. Made by `load`; a test changes one with `model_copy(update=…)`."""

    identity: IdentitySettings
    transport: TransportSettings
    rabbitmq: RabbitMQSettings
    streams: StreamsSettings
    redis: RedisSettings
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
    reports = needs in ("run", "dev")
    if reports and "METRIC_SERVER_SERVICE_TOKEN" not in values and not is_off(values.get("METRIC_SERVER_URL")):
        yield "METRIC_SERVER_SERVICE_TOKEN", "is required and not set"
    match parts:
        case {"rabbitmq": RabbitMQSettings(dlq=dlq), "identity": IdentitySettings(request_queue=queue)} if dlq == queue:
            yield "INFERENCE_DLQ", "is the name of the request queue"
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
