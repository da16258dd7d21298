"""Each neighbour's variables: one small class a part, one line or two a variable.

Not here: what a kind of value may hold (`values`), and who reads the environment (`settings`).
"""

import ssl
from typing import Annotated, Literal
from urllib.parse import parse_qs, urlsplit, urlunsplit

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
    SqlUrl,
    StatusCodes,
    StreamName,
    Text,
    Token,
    WebhookSecret,
    WholeSeconds,
    percent_encoded,
    seconds,
    url_text,
    variable,
    whole,
    whole_seconds,
    without_user,
)


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
    max_priority: int = whole(
        "RABBITMQ_MAX_PRIORITY",
        0,
        "levels of priority of a classic queue, used when it is first declared; 0 = none; quorum queues have two",
        0,
        255,
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


class SqlSettings(Part):
    url: SqlUrl | None = variable(
        "SQL_URL",
        None,
        "where the queues of the transport sql are; wins over the url of its document",
        "postgres:// or postgresql:// with a host",
        file=True,
    )

    @property
    def given(self) -> bool:
        return self.url is not None

    @property
    def address(self) -> str:
        """Where Postgres is, as it may be logged."""
        return without_user(self.url_now())

    def url_now(self) -> str:
        """The URL to connect with, its file read again."""
        return "" if self.url is None else self.url.now()


class PubsubSettings(Part):
    emulator: Plain = variable(
        "PUBSUB_EMULATOR_HOST", "", "an emulator to use in the place of Google Cloud Pub/Sub, without TLS", "host:port"
    )


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


CROESUS = "croesus"
"""The billing server's name as a sink."""


class BillingSettings(Part):
    url: SinkUrl = variable(
        "CROESUS_HOST", ..., "the billing server's URL; off = none", "http:// or https://, or off", file=True
    )
    sink: Plain = variable(
        "BILLING_SINK", CROESUS, "who takes usage events: the billing server, or a sink of another package", "a name"
    )
    sink_parameters: Password = variable(
        "BILLING_SINK_PARAMETERS",
        Text(""),
        "what a sink of another package is told",
        "a JSON object on one line",
        secret=True,
        shown="",
    )

    @property
    def on(self) -> bool:
        """Somebody takes usage events."""
        return self.url is not None or self.sink != CROESUS

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
