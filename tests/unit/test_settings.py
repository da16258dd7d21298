"""The environment becomes settings, or one line for every variable that is missing or wrong."""

import os
import ssl
from pathlib import Path

import pytest

from inference_worker.config.settings import Needs, Settings, Variable, describe, load, warnings
from inference_worker.config.values import url_text
from inference_worker.disposition import RetryPolicy
from inference_worker.errors import ConfigurationError

REQUIRED = {
    "DEPLOYMENT_ID": "d-1",
    "REPLICA_ID": "r-1",
    "USER_ID": "u-1",
    "HF_MODEL_ID": "org/model",
    "METRIC_SERVER_URL": "http://metrics:9000",
    "METRIC_SERVER_SERVICE_TOKEN": "t-secret",
    "CROESUS_HOST": "https://croesus",
}
SECRET = "s3cr3t"


def run_with(**environ: str) -> Settings:
    return load(REQUIRED | environ)


def problems_of(environ: dict[str, str], needs: Needs = "run") -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        load(environ, needs=needs)
    return caught.value.problems


def problem_of(**environ: str) -> str:
    """The one line that is wrong with an environment that is whole otherwise."""
    (problem,) = problems_of(REQUIRED | environ)
    return problem


# The table of variables


def test_the_defaults_are_the_sources() -> None:
    settings = run_with()

    rabbitmq, redis, model = settings.rabbitmq, settings.redis, settings.model
    assert (rabbitmq.host, rabbitmq.port, rabbitmq.username, rabbitmq.password.now()) == (
        "localhost",
        5672,
        "guest",
        "guest",
    )
    assert (rabbitmq.vhost, rabbitmq.heartbeat_s, rabbitmq.prefetch, rabbitmq.max_retries) == ("/", 120, 1, 1)
    assert (rabbitmq.queue_type, rabbitmq.delivery_limit, rabbitmq.retry_delay_s) == ("quorum", 100, 0)
    assert (rabbitmq.dlx, rabbitmq.dlq, rabbitmq.dlx_routing_key) == ("infer.dlx", "infer.dlq", "dead")
    assert (redis.url_now(), redis.response_ttl_s, redis.retry_delay_s) == ("redis://localhost:6379", 3600, 10)
    assert (redis.claim_lease_s, rabbitmq.max_crashes) == (15, 3)
    assert (model.url_now(), model.infer_path, model.infer_timeout_s) == (
        "http://localhost:8000",
        "/v1/chat/completions",
        300,
    )
    assert (model.health_path, model.api_key_now(), model.max_response_bytes) == ("/health", None, 16 * 2**20)
    assert model.retry_status_codes == frozenset()
    assert (settings.health.interval_s, settings.health.failure_threshold) == (10, 3)
    assert (settings.metrics.flush_interval_s, settings.metrics.dcgm_url_now()) == (30, None)
    assert (settings.metrics.ttft_header, settings.metrics.tbt_header) == ("x-ttft", "x-tbt")
    assert settings.vllm_metrics_url_now() == "http://localhost:8000/metrics"
    assert (settings.ops.host, settings.ops.port, settings.ops.shutdown_grace_s) == ("0.0.0.0", 9090, 25)
    assert (settings.ops.token_now(), settings.health.breaker_failures) == (None, 10)
    assert (settings.gateway.host, settings.gateway.port) == ("127.0.0.1", 8080)
    assert settings.traces.url_now() is None
    assert (settings.log.level, settings.log.format, settings.transport.kind) == ("info", "json", "rabbitmq")
    assert (settings.identity.org_id, settings.identity.request_queue) == ("", "infer_req.d-1")


def test_every_variable_is_described_once() -> None:
    rows = describe()

    assert len({row.name for row in rows}) == len(rows)
    assert all(row.meaning and row.accepted for row in rows)
    assert [row.name for row in rows if row.default == "required"] == [
        "DEPLOYMENT_ID",
        "REPLICA_ID",
        "USER_ID",
        "HF_MODEL_ID",
        "METRIC_SERVER_URL",
        "METRIC_SERVER_SERVICE_TOKEN",
        "CROESUS_HOST",
    ]
    assert {row.name for row in rows if row.secret} == {
        "RABBITMQ_PASSWORD",
        "REDIS_PASSWORD",
        "WORKER_HTTP_TOKEN",
        "MODEL_API_KEY",
        "METRIC_SERVER_SERVICE_TOKEN",
        "BILLING_SINK_PARAMETERS",
        "GATEWAY_WEBHOOK_SECRET",
        "GATEWAY_API_KEY",
    }
    urls = {row.name for row in rows if row.name.endswith(("_URL", "_ENDPOINT"))} | {"CROESUS_HOST"}
    assert {row.name for row in rows if row.file and not row.secret} == urls


@pytest.mark.parametrize(
    "row",
    [row for row in describe() if row.default not in ("", "required") and " + " not in row.default],
    ids=lambda r: r.name,
)
def test_a_documented_default_may_also_be_set(row: Variable) -> None:
    assert repr(run_with(**{row.name: row.default})) == repr(run_with())


def test_the_environment_of_the_process_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RABBITMQ_PREFETCH", "7")
    monkeypatch.setenv("prefetch", "7")

    assert run_with().rabbitmq.prefetch == 1


# The second transport


def test_over_streams_its_own_variables_say_how_many_how_long_and_how_often() -> None:
    settings = run_with(TRANSPORT="redis-streams", IWL_CONCURRENCY="4", IWL_MAX_ATTEMPTS="5", IWL_CLAIM_IDLE_MS="2500")

    assert (settings.queue, settings.queue_address) == ("inference:jobs", "redis://localhost:6379")
    assert (settings.slots, settings.lease_s, settings.retry_policy) == (4, 2.5, RetryPolicy(max_retries=4))


def test_over_rabbitmq_they_say_nothing() -> None:
    settings = run_with(IWL_CONCURRENCY="4", IWL_MAX_ATTEMPTS="5", IWL_CLAIM_IDLE_MS="2500", RABBITMQ_PREFETCH="3")

    assert (settings.queue, settings.slots, settings.lease_s) == ("infer_req.d-1", 3, 15)
    assert settings.retry_policy == RetryPolicy(max_retries=1)


@pytest.mark.parametrize(
    ("transport", "given", "codes"),
    [
        ("rabbitmq", "", frozenset()),
        ("redis-streams", "", frozenset({429, 500, 502, 503, 504})),
        ("redis-streams", "429", frozenset({429})),
        ("redis-streams", "off", frozenset()),
        ("rabbitmq", "503", frozenset({503})),
    ],
)
def test_each_transport_has_its_own_temporary_statuses(transport: str, given: str, codes: frozenset[int]) -> None:
    assert run_with(TRANSPORT=transport, MODEL_RETRY_STATUS_CODES=given).retry_statuses == codes


@pytest.mark.parametrize("needs", ["gateway", "scaler", "client"])
def test_over_streams_a_deployment_is_asked_for_by_workers_alone(needs: Needs) -> None:
    """The stream has a name of its own; RabbitMQ's queue is named after the deployment."""
    assert load({"TRANSPORT": "redis-streams"}, needs=needs).queue == "inference:jobs"
    assert problems_of({}, needs=needs) == (
        "DEPLOYMENT_ID: is required and not set; accepted: up to 221 bytes of text",
    )


@pytest.mark.parametrize("needs", ["gateway", "scaler", "client"])
def test_who_reports_nothing_needs_no_token_for_it(needs: Needs) -> None:
    """All processes of a deployment may share their environment."""
    environ = {"DEPLOYMENT_ID": "d-1", "METRIC_SERVER_URL": "http://metrics:9000", "CROESUS_HOST": "http://croesus"}

    assert load(environ, needs=needs).queue == "infer_req.d-1"


def test_over_streams_nobody_is_warned_of_rabbitmqs_limits() -> None:
    odd = {"INFERENCE_MAX_CRASHES": "200", "RABBITMQ_HEARTBEAT_S": "900", "MODEL_INFER_TIMEOUT_S": "2000"}

    assert len(warnings(run_with(**odd))) == 3
    assert warnings(run_with(TRANSPORT="redis-streams", **odd)) == []


def test_the_dead_letters_need_a_stream_of_their_own() -> None:
    assert problem_of(IWL_DLQ_STREAM="inference:jobs").startswith("IWL_DLQ_STREAM: is the name of the stream of req")
    taken = problem_of(IWL_STREAM="a", IWL_DLQ_STREAM="a:delayed")
    assert taken.startswith("IWL_DLQ_STREAM: is where the retries lie that wait for their time")


def test_the_most_replicas_are_not_fewer_than_the_fewest() -> None:
    assert problem_of(SCALE_MIN="4", SCALE_MAX="3").startswith("SCALE_MAX: 3 is below SCALE_MIN, which is 4; accepted")


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("GATEWAY_WEBHOOK_NETWORKS", "10.0.0.0/8,nowhere", "has a part that is no network: 'nowhere'"),
        ("GATEWAY_WEBHOOK_NETWORKS", "10.0.0.1/8", "has a part that is no network: 10.0.0.1/8 has host bits set"),
        ("IWL_CLAIM_IDLE_MS", "99", "'99' is out of bounds"),
        ("IWL_MAX_ATTEMPTS", "0", "'0' is out of bounds"),
        ("GATEWAY_WEBHOOK_SECRET", "whsec_short", "is no webhook secret"),
        ("MODEL_MODE", "echo", "'echo' cannot be read"),
        ("TRANSPORT", "kafka", "'kafka' cannot be read"),
    ],
)
def test_what_the_second_source_adds_is_checked_as_well(name: str, value: str, what: str) -> None:
    assert problem_of(**{name: value}).startswith(f"{name}: {what}")


def test_networks_are_read_as_a_list() -> None:
    assert run_with(GATEWAY_WEBHOOK_NETWORKS="10.0.0.0/8, fd00::/8").gateway.webhook_networks == (
        "10.0.0.0/8",
        "fd00::/8",
    )


# Missing and wrong: one line each, all at once


def test_every_missing_variable_has_its_line() -> None:
    problems = problems_of({})

    assert [problem.partition(":")[0] for problem in problems] == list(
        name for name in (row.name for row in describe()) if name in REQUIRED
    )
    assert all("is required and not set; accepted: " in problem for problem in problems)


def test_missing_and_wrong_come_together() -> None:
    problems = problems_of({"RABBITMQ_PORT": "x", "LOG_LEVEL": "loud", "METRIC_SERVER_URL": "off"})

    names = {problem.partition(":")[0] for problem in problems}
    assert names == (REQUIRED.keys() - {"METRIC_SERVER_URL", "METRIC_SERVER_SERVICE_TOKEN"}) | {
        "RABBITMQ_PORT",
        "LOG_LEVEL",
    }


def test_a_token_is_asked_for_also_where_the_url_is_wrong() -> None:
    environ = {**REQUIRED, "METRIC_SERVER_URL": "metrics:9000"}
    del environ["METRIC_SERVER_SERVICE_TOKEN"]

    assert len(problems_of(environ)) == 2


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("RABBITMQ_PREFETCH", "0", "out of bounds"),
        ("RABBITMQ_PREFETCH", "65536", "out of bounds"),
        ("RABBITMQ_PREFETCH", "1.5", "cannot be read"),
        ("RABBITMQ_PREFETCH", '"4"', "wrapped in quotes"),
        ("RABBITMQ_PORT", "70000", "accepted: a whole number from 1 to 65535"),
        ("RABBITMQ_HOST", "rabbit:5672", "port, user and scheme do not belong here"),
        ("RABBITMQ_HEARTBEAT_S", "0", "a dead peer would never be noticed"),
        ("RABBITMQ_HEARTBEAT_S", "soon", "no number of seconds"),
        ("RABBITMQ_HEARTBEAT_S", "70000", "out of bounds"),
        ("RABBITMQ_MAX_RETRIES", "-1", "out of bounds"),
        ("RABBITMQ_QUEUE_TYPE", "stream", "accepted: quorum or classic"),
        ("RABBITMQ_RETRY_DELAY_S", "31", "out of bounds"),
        ("RABBITMQ_VHOST", "v" * 256, "256 bytes"),
        ("RABBITMQ_PASSWORD", f"{SECRET}\n", "control character"),
        ("INFERENCE_DLX", "amq.direct", "keeps for itself"),
        ("INFERENCE_DLQ", "infer_req.d-1", "is the name of the request queue"),
        ("RABBITMQ_MAX_PRIORITY", "256", "accepted: a whole number from 0 to 255"),
        ("RABBITMQ_MAX_PRIORITY", "5", "for classic queues"),
        ("INFERENCE_MAX_CRASHES", "0", "out of bounds"),
        ("CLAIM_LEASE_S", "0", "out of bounds"),
        ("REDIS_RESPONSE_TTL_S", "0", "out of bounds"),
        ("REDIS_RESPONSE_TTL_S", "inf", "cannot be read"),
        ("REDIS_RETRY_DELAY_S", "nan", "cannot be read"),
        ("MODEL_INFER_TIMEOUT_S", "0", "accepted: seconds above 0 to 2592000"),
        ("MODEL_INFER_PATH", "v1/completions", "does not start with '/'"),
        ("MODEL_HEALTH_PATH", "/he alth", "white space"),
        ("MODEL_API_KEY", f"{SECRET}\r\nX-Evil: 1", "no HTTP header can carry"),
        ("MODEL_RETRY_STATUS_CODES", "429,200", "accepted: statuses from 400 to 599"),
        ("MODEL_RETRY_STATUS_CODES", "429,,503", "no list of statuses"),
        ("METRICS_MODEL_TTFT_HEADER", "x ttft", "no name of an HTTP header"),
        ("SHUTDOWN_GRACE_S", "-1", "out of bounds"),
        ("WORKER_HTTP_PORT", "65536", "out of bounds"),
        ("GATEWAY_PORT", "-1", "out of bounds"),
        ("LOG_LEVEL", "loud", "accepted: debug, info, warning, error or critical"),
        ("LOG_FORMAT", "xml", "accepted: json or console"),
        ("TLS_CA_FILE", "a\nb", "control character"),
        ("TRANSPORT", "memory", "only dev has it"),
        ("TRANSPORT", "sql", "cannot be read"),
        ("DEPLOYMENT_ID", "d" * 222, "RabbitMQ's names leave 221"),
        ("DEPLOYMENT_ID", "ü" * 111, "222 bytes"),
        ("REPLICA_ID", "a\nb", "control character"),
        ("USER_ID", "u" * 513, "longer than 512"),
        ("HF_MODEL_ID", "caf\udce9", "not UTF-8"),
    ],
)
def test_a_wrong_value_is_refused_in_words(name: str, value: str, what: str) -> None:
    problem = problem_of(**{name: value})

    assert problem.startswith(f"{name}: ")
    assert what in problem
    assert SECRET not in problem


@pytest.mark.parametrize(
    ("name", "url", "what"),
    [
        ("RABBITMQ_URL", f"http://u:{SECRET}@h", "does not begin with amqp:// or amqps://"),
        ("RABBITMQ_URL", f"amqp://u:{SECRET}@h?heartbeat=0", "never be noticed"),
        ("RABBITMQ_URL", f"amqp://u:{SECRET}@h/a/b", "written %2F"),
        ("RABBITMQ_URL", f"amqp://u:{SECRET}@h:0", "port 0"),
        ("RABBITMQ_URL", f"amqp://u:{SECRET}@h:99999", "no number from 1 to 65535"),
        ("RABBITMQ_URL", f"amqp://u:{SECRET}/x@h", "no number from 1 to 65535"),
        ("RABBITMQ_URL", f"amqp://u:{SECRET}#@h", "written %23"),
        ("RABBITMQ_URL", f"amqp:/u:{SECRET}@h", "does not begin with"),
        ("RABBITMQ_URL", "amqp://", "names no host"),
        ("RABBITMQ_URL", f'"amqp://u:{SECRET}@h"', "wrapped in quotes"),
        ("REDIS_URL", f"h:{SECRET}@6379", "does not begin with redis://"),
        ("REDIS_URL", f"redis://:{SECRET}@h/zero", "no database number"),
        ("REDIS_URL", "unix://", "names no socket file"),
        ("MODEL_CONTAINER_URL", f"http://u:{SECRET}@h?x=1", "has a query"),
        ("MODEL_CONTAINER_URL", f"http://u:{SECRET}@h h", "white space"),
        ("VLLM_METRICS_URL", f"ftp://u:{SECRET}@h", "does not begin with http:// or https://"),
        ("DCGM_METRICS_URL", f"u:{SECRET}@h", "does not begin with http:// or https://"),
        ("METRIC_SERVER_URL", f"u:{SECRET}@h", "accepted: http:// or https://, or off"),
        ("CROESUS_HOST", f"u:{SECRET}@h", "accepted: http:// or https://, or off"),
        ("RABBITMQ_HOST", f"amqp://u:{SECRET}@h", "no host name"),
        ("RABBITMQ_PORT", f"u:{SECRET}@h", "*** cannot be read"),
    ],
)
def test_a_wrong_url_is_refused_without_being_shown(name: str, url: str, what: str) -> None:
    problem = problem_of(**{name: url})

    assert problem.startswith(f"{name}: ")
    assert what in problem
    assert SECRET not in problem


def test_nothing_secret_is_printed() -> None:
    settings = run_with(
        RABBITMQ_URL=f"amqps://user-{SECRET}:{SECRET}@h/v",
        RABBITMQ_PASSWORD=SECRET,
        REDIS_URL=f"redis://:{SECRET}@h?password={SECRET}",
        REDIS_PASSWORD=SECRET,
        MODEL_API_KEY=SECRET,
        METRIC_SERVER_SERVICE_TOKEN=SECRET,
        METRIC_SERVER_URL=f"http://{SECRET}@h",
    )

    printed = f"{settings!r} {settings} {settings.model_dump()}"
    assert SECRET not in printed
    assert "amqps://***@h/v" in printed


# What is accepted


def test_an_empty_value_is_unset_and_white_space_around_is_dropped() -> None:
    settings = run_with(RABBITMQ_PREFETCH="", RABBITMQ_PORT=" 5673 ", REDIS_URL="  ", ORG_ID=" o\n", LOG_LEVEL="DEBUG")

    assert (settings.rabbitmq.prefetch, settings.rabbitmq.port) == (1, 5673)
    assert (settings.redis.url_now(), settings.redis.given) == ("redis://localhost:6379", False)
    assert (settings.identity.org_id, settings.log.level) == ("o", "debug")


def test_white_space_around_a_secret_is_part_of_it() -> None:
    assert run_with(RABBITMQ_PASSWORD=" p ").rabbitmq.password.now() == " p "


def test_an_empty_required_variable_is_missing() -> None:
    assert problem_of(USER_ID="  ").startswith("USER_ID: is required and not set")


def test_seconds_may_be_fractions_and_whole_seconds_are_rounded_up() -> None:
    settings = run_with(HEALTH_CHECK_INTERVAL_S="0.25", REDIS_RESPONSE_TTL_S="0.5", RABBITMQ_HEARTBEAT_S="1.5")

    assert settings.health.interval_s == 0.25
    assert (settings.redis.response_ttl_s, settings.rabbitmq.heartbeat_s) == (1, 2)


def test_a_list_of_statuses_may_have_spaces() -> None:
    assert run_with(MODEL_RETRY_STATUS_CODES="429, 503").model.retry_status_codes == {429, 503}


def test_trailing_slashes_of_base_urls_are_dropped() -> None:
    settings = run_with(MODEL_CONTAINER_URL="http://m:1/v//", METRIC_SERVER_URL="http://m/", CROESUS_HOST="http://c/")

    assert settings.model.url_now() == "http://m:1/v"
    assert (settings.metrics.url_now(), settings.billing.url_now()) == ("http://m", "http://c")
    assert settings.vllm_metrics_url_now() == "http://m:1/v/metrics"


def test_a_sink_that_is_off_needs_nothing_else() -> None:
    off = {"METRIC_SERVER_URL": "off", "METRIC_SERVER_SERVICE_TOKEN": "", "CROESUS_HOST": "OFF"}

    settings = load(REQUIRED | off)

    assert (settings.metrics.url_now(), settings.metrics.service_token_now()) == (None, None)
    assert settings.billing.url_now() is None


# Addresses


def test_the_broker_url_is_built_with_everything_encoded() -> None:
    settings = run_with(
        RABBITMQ_HOST="::1", RABBITMQ_USERNAME="u@x", RABBITMQ_PASSWORD="p/%:#", RABBITMQ_HEARTBEAT_S="9"
    )

    assert settings.rabbitmq.url_now() == "amqp://u%40x:p%2F%25%3A%23@[::1]:5672/%2F?heartbeat=9"
    assert settings.rabbitmq.given


@pytest.mark.parametrize(
    ("url", "used"),
    [
        ("amqps://u:p@h/v", "amqps://u:p@h/v?heartbeat=120"),
        ("amqp://h?heartbeat=5", "amqp://h?heartbeat=5"),
        ("amqp://h/?connection_timeout=9", "amqp://h/?connection_timeout=9&heartbeat=120"),
        ("amqp://h?", "amqp://h?heartbeat=120"),
    ],
)
def test_a_broker_url_wins_and_always_has_a_heartbeat(url: str, used: str) -> None:
    assert run_with(RABBITMQ_URL=url, RABBITMQ_HOST="other", RABBITMQ_VHOST="other").rabbitmq.url_now() == used


@pytest.mark.parametrize(
    ("url", "used"),
    [
        ("redis://h:1/2", "redis://:p%40@h:1/2"),
        ("rediss://user@h", "rediss://user:p%40@h"),
        ("redis://user:own@h", "redis://user:own@h"),
        ("unix:///run/redis.sock?db=1", "unix://:p%40@/run/redis.sock?db=1"),
    ],
)
def test_the_redis_password_is_used_where_the_url_has_none(url: str, used: str) -> None:
    assert run_with(REDIS_URL=url, REDIS_PASSWORD="p@").redis.url_now() == used


def test_an_address_may_be_logged() -> None:
    settings = run_with(RABBITMQ_PASSWORD=SECRET, REDIS_URL=f"redis://h/1?password={SECRET}", REDIS_PASSWORD=SECRET)

    assert settings.rabbitmq.address == "amqp://***@localhost:5672/%2F"
    assert settings.redis.address == "redis://***@h/1"


# Files


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "value"


def test_a_file_is_read_less_one_newline(file: Path) -> None:
    file.write_text(f"{SECRET} \n\n")

    # A password with a line break inside is refused, so that the second newline shows.
    assert "control character" in problem_of(RABBITMQ_PASSWORD_FILE=str(file))

    file.write_text(f"{SECRET} \n")
    assert run_with(RABBITMQ_PASSWORD_FILE=str(file)).rabbitmq.password.now() == f"{SECRET} "


def test_a_file_is_read_again_and_the_last_good_value_is_kept(file: Path) -> None:
    file.write_text("first\n")
    environ = {**REQUIRED, "RABBITMQ_PASSWORD_FILE": str(file)}
    rabbitmq = load(environ).rabbitmq

    file.write_text("second\r\n")
    assert ":second@" in rabbitmq.url_now()
    file.write_text("bad\nvalue")
    assert ":second@" in rabbitmq.url_now()
    file.write_text("")
    assert ":second@" in rabbitmq.url_now()
    file.unlink()
    assert ":second@" in rabbitmq.url_now()


@pytest.mark.parametrize("later", ["", "\n", "'redis://b'", "http://b", "redis://b c", "\x00", "redis://b:x"])
def test_a_url_that_has_become_wrong_is_not_used(file: Path, later: str) -> None:
    file.write_text("redis://a")
    redis = run_with(REDIS_URL_FILE=str(file)).redis

    file.write_text(later)

    assert redis.url_now() == "redis://a"


def test_every_part_reads_its_files_again(tmp_path: Path) -> None:
    values = {
        "RABBITMQ_URL": "amqp://{0}",
        "REDIS_URL": "redis://{0}",
        "REDIS_PASSWORD": "{0}",
        "MODEL_CONTAINER_URL": "http://{0}/",
        "MODEL_API_KEY": "{0}",
        "METRIC_SERVER_URL": "http://{0}",
        "METRIC_SERVER_SERVICE_TOKEN": "{0}",
        "CROESUS_HOST": "http://{0}",
        "DCGM_METRICS_URL": "http://{0}",
    }
    for name, form in values.items():
        (tmp_path / name).write_text(form.format("one"))
    environ = {name: value for name, value in REQUIRED.items() if name not in values}
    settings = load(environ | {f"{name}_FILE": str(tmp_path / name) for name in values})
    for name, form in values.items():
        (tmp_path / name).write_text(form.format("two"))

    assert settings.rabbitmq.url_now() == "amqp://two?heartbeat=120"
    assert settings.redis.url_now() == "redis://:two@two"
    assert (settings.model.url_now(), settings.model.api_key_now()) == ("http://two", "two")
    assert (settings.metrics.url_now(), settings.metrics.service_token_now()) == ("http://two", "two")
    assert (settings.billing.url_now(), settings.metrics.dcgm_url_now()) == ("http://two", "http://two")
    assert settings.vllm_metrics_url_now() == "http://two/metrics"


def test_a_value_and_its_file_together_are_an_error(file: Path) -> None:
    file.write_text(SECRET)

    assert problem_of(REDIS_PASSWORD=SECRET, REDIS_PASSWORD_FILE=str(file)).startswith(
        "REDIS_PASSWORD: is set, and REDIS_PASSWORD_FILE too"
    )


def test_an_empty_value_beside_a_file_is_unset(file: Path) -> None:
    file.write_text("x")

    assert run_with(MODEL_API_KEY="", MODEL_API_KEY_FILE=str(file)).model.api_key_now() == "x"


def test_an_empty_file_is_unset(file: Path) -> None:
    file.write_text("\n")

    assert run_with(MODEL_API_KEY_FILE=str(file)).model.api_key_now() is None


@pytest.mark.parametrize("kind", ["missing", "a folder", "a pipe", "not text", "too large"])
def test_a_file_that_cannot_be_read_is_an_error_that_names_the_variable(file: Path, kind: str) -> None:
    match kind:
        case "a folder":
            file.mkdir()
        case "a pipe":
            os.mkfifo(file)
        case "not text":
            file.write_bytes(b"\xff" + SECRET.encode())
        case "too large":
            file.write_text("x" * 70_000)

    problem = problem_of(MODEL_API_KEY_FILE=str(file))

    assert problem.startswith("MODEL_API_KEY: MODEL_API_KEY_FILE cannot be read: ")
    assert SECRET not in problem


def test_a_url_from_a_file_is_checked_without_being_shown(file: Path) -> None:
    file.write_text(f"http://u:{SECRET}@h\n")

    problem = problem_of(REDIS_URL_FILE=str(file))

    assert problem.startswith("REDIS_URL: does not begin with")
    assert SECRET not in problem


def test_other_variables_have_no_file_twin(file: Path) -> None:
    file.write_text("9")

    assert run_with(RABBITMQ_PREFETCH_FILE=str(file)).rabbitmq.prefetch == 1


# TLS


def test_without_tls_files_the_libraries_decide() -> None:
    assert run_with().tls.context() is None


def test_a_certificate_and_its_key_come_together(file: Path) -> None:
    file.write_text("x")

    assert "TLS_KEY_FILE: is required with TLS_CERT_FILE" in problem_of(TLS_CERT_FILE=str(file))
    assert "TLS_CERT_FILE: is required with TLS_KEY_FILE" in problem_of(TLS_KEY_FILE=str(file))


def test_tls_files_are_tried_at_the_start(file: Path) -> None:
    file.write_text("no PEM")

    assert "TLS_CA_FILE: OpenSSL does not take it" in problem_of(TLS_CA_FILE=str(file))
    assert "TLS_CERT_FILE: OpenSSL does not take it" in problem_of(TLS_CERT_FILE=str(file), TLS_KEY_FILE=str(file))
    assert "cannot be read: No such file" in problem_of(TLS_CA_FILE=f"{file}.none")
    assert "is not a regular file" in problem_of(TLS_CA_FILE=str(file.parent))


def test_an_authority_is_trusted_instead_of_the_systems(file: Path) -> None:
    file.write_text(AUTHORITY)

    context = run_with(TLS_CA_FILE=str(file)).tls.context()

    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 1


def test_strangers_are_reached_with_our_authority_besides_the_systems(file: Path) -> None:
    """A webhook goes to whoever a tenant names."""
    file.write_text(AUTHORITY)

    context = run_with(TLS_CA_FILE=str(file)).tls.public_context()

    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == len(ssl.create_default_context().get_ca_certs()) + 1


# Who asks


def test_dev_brings_everything() -> None:
    settings = load({}, needs="dev")

    assert (settings.identity.deployment_id, settings.identity.replica_id) == ("dev", "dev-1")
    assert (settings.identity.user_id, settings.identity.hf_model_id) == ("dev", "mock-model")
    assert (settings.metrics.url_now(), settings.billing.url_now()) == (None, None)
    given = (settings.model.url_given, settings.rabbitmq.given, settings.redis.given, settings.transport.given)
    assert not any(given)


def test_dev_uses_what_is_given() -> None:
    environ = {
        "DEPLOYMENT_ID": "mine",
        "MODEL_CONTAINER_URL": "http://m",
        "RABBITMQ_HOST": "r",
        "REDIS_URL": "redis://r",
        "TRANSPORT": "memory",
    }

    settings = load(environ, needs="dev")

    assert settings.identity.deployment_id == "mine"
    assert settings.model.url_given
    assert settings.rabbitmq.given
    assert settings.redis.given
    assert settings.transport.kind == "memory"


def test_dev_with_a_metric_server_needs_its_token() -> None:
    (problem,) = problems_of({"METRIC_SERVER_URL": "http://m"}, "dev")

    assert problem.startswith("METRIC_SERVER_SERVICE_TOKEN: is required")


def test_a_client_needs_the_deployment_alone() -> None:
    (problem,) = problems_of({}, "client")

    assert problem.startswith("DEPLOYMENT_ID: is required")
    assert load({"DEPLOYMENT_ID": "d"}, needs="client").identity.request_queue == "infer_req.d"


def test_settings_are_frozen_and_copied_with_changes() -> None:
    settings = load({}, needs="dev")

    model = settings.model.model_copy(update={"url": url_text("http://127.0.0.1:9")})
    changed = settings.model_copy(update={"model": model})

    assert changed.model.url_now() == "http://127.0.0.1:9"
    with pytest.raises(ValueError, match="frozen"):
        settings.rabbitmq.prefetch = 2


# Warnings


def test_the_defaults_warn_of_nothing() -> None:
    assert warnings(run_with()) == []


@pytest.mark.parametrize(
    ("environ", "first"),
    [
        ({"REDIS_RESPONSE_TTL_S": "299"}, "REDIS_RESPONSE_TTL_S"),
        ({"MODEL_INFER_TIMEOUT_S": "1801"}, "MODEL_INFER_TIMEOUT_S"),
        ({"SHUTDOWN_GRACE_S": "31"}, "SHUTDOWN_GRACE_S"),
        ({"RABBITMQ_DELIVERY_LIMIT": "3"}, "RABBITMQ_DELIVERY_LIMIT"),
        ({"RABBITMQ_HEARTBEAT_S": "601"}, "RABBITMQ_HEARTBEAT_S"),
        ({"IWL_CONCURRENCY": "8"}, "IWL_CONCURRENCY has no effect"),
        ({"TRANSPORT": "redis-streams", "RABBITMQ_PREFETCH": "8"}, "RABBITMQ_PREFETCH has no effect"),
        ({"TRANSPORT": "redis-streams", "CLAIM_LEASE_S": "9"}, "CLAIM_LEASE_S has no effect"),
    ],
)
def test_what_is_probably_not_meant_is_said(environ: dict[str, str], first: str) -> None:
    (warning,) = warnings(run_with(**environ))

    assert warning.startswith(first)


def test_one_environment_for_both_transports_warns_of_nothing() -> None:
    both = {"RABBITMQ_PREFETCH": "8", "IWL_CONCURRENCY": "8"}

    assert warnings(run_with(**both)) == warnings(run_with(TRANSPORT="redis-streams", **both)) == []


AUTHORITY = """\
-----BEGIN CERTIFICATE-----
MIIBqjCCAVGgAwIBAgIUVWgho7Wc41zr3zB3hTkzo4fzbeIwCgYIKoZIzj0EAwIw
KjEoMCYGA1UEAwwfaW5mZXJlbmNlLXdvcmtlciB0ZXN0IGF1dGhvcml0eTAgFw0y
NjExMjkxODQ0MjhaGA8yMTI2MTEwNTE4NDQyOFowKjEoMCYGA1UEAwwfaW5mZXJl
bmNlLXdvcmtlciB0ZXN0IGF1dGhvcml0eTBZMBMGByqGSM49AgEGCCqGSM49AwEH
A0IABD2SGr+Y41P2tHuRven7inTIYINv9wdumFFWnaKwbwvnUV/Uq7fHCHyoEcOm
4BaJmrMCQeZWV6QwpRR7ggpOUcajUzBRMB0GA1UdDgQWBBS8pZ9PRluspTNfpQoV
yjOio4DYVDAfBgNVHSMEGDAWgBS8pZ9PRluspTNfpQoVyjOio4DYVDAPBgNVHRMB
Af8EBTADAQH/MAoGCCqGSM49BAMCA0cAMEQCIAPPwpLEL+W/EZN8MoyInJzuaTm4
CX7LHHnDkfa1ea9vAiBBW2/91ZyG3dX/7AkR6ImEXnNMORddWcQRE+PDrMb7KQ==
-----END CERTIFICATE-----
"""


def test_traces_go_to_the_url_that_is_named_or_below_the_base_url() -> None:
    base, whole = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"

    assert run_with(**{base: "http://c:4318/"}).traces.url_now() == "http://c:4318/v1/traces"
    assert run_with(**{whole: "http://t:1/in?x=1"}).traces.url_now() == "http://t:1/in?x=1"
    assert run_with(**{base: "http://c:4318", whole: "http://t:1/in"}).traces.url_now() == "http://t:1/in"
