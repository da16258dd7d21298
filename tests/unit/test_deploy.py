"""What is under deploy/ fits the worker: its variables everywhere the same, its manifests sound."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from inference_worker.config.settings import Settings, describe, load
from tests.env_example import EXAMPLE, GROUPS, written
from tests.readme_table import README

ROOT = README.parent
COMPOSE = ROOT / "deploy" / "compose-replica" / "compose.yaml"
KUBERNETES = ROOT / "deploy" / "kubernetes"

VARIABLES = {variable.name: variable for variable in describe()}
KNOWN = VARIABLES.keys() | {f"{name}_FILE" for name, variable in VARIABLES.items() if variable.file}
NOT_THE_WORKERS = {"HF_TOKEN_PATH", "VLLM_NO_USAGE_STATS"}
"""What vLLM reads."""
STOP_S = 10
"""The worker ends at most so long after its grace: contract, section 1."""

Manifest = dict[str, Any]  # YAML has no types.


def compose() -> Manifest:
    content: Manifest = yaml.safe_load(COMPOSE.read_text())
    return content


def services() -> dict[str, Manifest]:
    found: dict[str, Manifest] = compose()["services"]
    return found


def manifests() -> list[Manifest]:
    return [
        document
        for file in sorted(KUBERNETES.glob("*.yaml"))
        for document in yaml.safe_load_all(file.read_text())
        if document["kind"] != "Kustomization"
    ]


def of_kind(kind: str) -> Manifest:
    (found,) = [manifest for manifest in manifests() if manifest["kind"] == kind]
    return found


def pod() -> Manifest:
    spec: Manifest = of_kind("Deployment")["spec"]["template"]["spec"]
    return spec


def container(name: str) -> Manifest:
    found: list[Manifest] = [one for one in [*pod()["initContainers"], *pod()["containers"]] if one["name"] == name]
    (only,) = found
    return only


def seconds(text: str) -> int:
    """`40s` of Compose."""
    matched = re.fullmatch(r"(\d+)s", text)
    assert matched, text
    return int(matched[1])


def default_of(interpolation: str) -> str:
    """What Compose makes of `${NAME:-default}` where NAME is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", interpolation)


# One set of variables


def test_settings_readme_and_env_example_have_the_same_variables() -> None:
    in_readme = re.findall(r"^\| `([A-Z_0-9]+)`", README.read_text(), re.MULTILINE)
    in_example = re.findall(r"^#?([A-Z_0-9]+)=", EXAMPLE.read_text(), re.MULTILINE)
    composes_own = set(re.findall(r"\$\{(\w+):-", COMPOSE.read_text())) - VARIABLES.keys() | {"COMPOSE_PROFILES"}

    assert set(in_readme) == set(VARIABLES)
    assert set(in_example) == set(VARIABLES) | composes_own
    assert len(in_example) == len(set(in_example))


def test_the_env_example_is_that_of_the_settings() -> None:
    """To mend it: python -m tests.env_example"""
    assert written(EXAMPLE.read_text()) == EXAMPLE.read_text()
    assert set(VARIABLES) >= GROUPS.keys()


def test_the_env_example_asks_for_what_is_required_and_for_nothing_else() -> None:
    asked = re.findall(r"^([A-Z_0-9]+)=$", EXAMPLE.read_text(), re.MULTILINE)

    assert asked == [name for name, variable in VARIABLES.items() if variable.default == "required"]


def test_the_defaults_of_the_env_example_may_be_uncommented_as_they_are() -> None:
    """An empty one is unset; the required ones are filled in with something."""
    lines = re.findall(r"^#?([A-Z_0-9]+)=(.*)$", EXAMPLE.read_text(), re.MULTILINE)
    environ = {name: value or "off" for name, value in lines if value or VARIABLES[name].default == "required"}

    settings, defaults = load(environ), load({name: value for name, value in environ.items() if value == "off"})
    assert repr(settings) == repr(defaults)
    assert settings.rabbitmq.url_now() == defaults.rabbitmq.url_now()
    assert settings.redis.url_now() == defaults.redis.url_now()
    assert settings.model.url_now() == defaults.model.url_now()


def test_the_defaults_of_compose_are_told_as_they_are() -> None:
    told = dict(re.findall(r"^#([A-Z_]+)=(.+)$", EXAMPLE.read_text(), re.MULTILINE))
    used = set(re.findall(r"\$\{(\w+):-([^}]*)\}", COMPOSE.read_text())) - {("HF_MODEL_ID", "")}

    assert used == {(name, told[name]) for name, _ in used}


@pytest.mark.parametrize("service", ["worker", "laptop-worker"])
def test_compose_sets_variables_that_exist(service: str) -> None:
    assert services()[service]["environment"].keys() - KNOWN == set()


def test_kubernetes_sets_variables_that_exist() -> None:
    named = {entry["name"] for entry in container("worker")["env"]} | of_kind("ConfigMap")["data"].keys()

    assert named - KNOWN == set()
    assert {entry["name"] for entry in container("vllm")["env"]} - KNOWN - NOT_THE_WORKERS == set()


def test_the_laptop_is_configured(tmp_path: Path) -> None:
    environ = {name: str(value) for name, value in services()["laptop-worker"]["environment"].items()}
    environ["METRIC_SERVER_SERVICE_TOKEN_FILE"] = str(COMPOSE.parent / "sinks" / "metric-server-token")

    settings = load(environ)

    assert settings.metrics.service_token_now()


def test_kubernetes_configures_everything_that_is_required(tmp_path: Path) -> None:
    environ = {**of_kind("ConfigMap")["data"], "REPLICA_ID": "inference-worker-0"}
    for entry in container("worker")["env"]:
        if entry["name"].endswith("_FILE"):
            file = tmp_path / Path(entry["value"]).name
            file.write_text({"rabbitmq-url": "amqp://rabbitmq/", "redis-url": "redis://redis"}.get(file.name, "token"))
            environ[entry["name"]] = str(file)
        elif "value" in entry:
            environ[entry["name"]] = entry["value"]

    settings = load(environ)

    assert settings.identity.request_queue.endswith(environ["DEPLOYMENT_ID"])


# The end: the worker first, and in its own time


@pytest.mark.parametrize(("service", "model"), [("worker", "vllm"), ("laptop-worker", "mock-model")])
def test_compose_stops_the_model_after_the_worker(service: str, model: str) -> None:
    """What depends goes first."""
    assert model in services()[service]["depends_on"]


@pytest.mark.parametrize("service", ["worker", "laptop-worker"])
def test_compose_waits_longer_than_the_worker_takes_to_stop(service: str) -> None:
    waits_s = seconds(default_of(services()[service]["stop_grace_period"]))

    assert waits_s > float(VARIABLES["SHUTDOWN_GRACE_S"].default) + STOP_S


def test_kubernetes_stops_the_model_after_the_worker() -> None:
    """An init container that restarts always is a native sidecar: told to stop when the main containers have ended."""
    assert [one["name"] for one in pod()["containers"]] == ["worker"]
    assert container("vllm")["restartPolicy"] == "Always"
    assert container("vllm") in pod()["initContainers"]


def test_kubernetes_waits_longer_than_both_take_to_stop() -> None:
    arguments = container("vllm")["args"]
    vllm_s = int(arguments[arguments.index("--shutdown-timeout") + 1])

    assert pod()["terminationGracePeriodSeconds"] > float(VARIABLES["SHUTDOWN_GRACE_S"].default) + STOP_S + vllm_s


# The least that a worker needs


@pytest.mark.parametrize("service", ["worker", "laptop-worker"])
def test_the_compose_worker_may_do_nothing_that_it_need_not(service: str) -> None:
    spec = services()[service]

    assert spec["read_only"] is True
    assert spec["cap_drop"] == ["ALL"]
    assert spec["security_opt"] == ["no-new-privileges:true"]


def test_the_kubernetes_worker_may_do_nothing_that_it_need_not() -> None:
    assert container("worker")["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod()["automountServiceAccountToken"] is False
    assert pod()["securityContext"]["fsGroup"] == 10001


def test_no_secret_is_a_value_in_a_manifest() -> None:
    secret = {name for name, variable in VARIABLES.items() if variable.secret} | {"RABBITMQ_URL", "REDIS_URL"}
    given = {entry["name"] for entry in container("worker")["env"]} | of_kind("ConfigMap")["data"].keys()

    assert given & secret == set()
    assert services()["worker"]["environment"].keys() & secret == set()


def test_secrets_are_mounted_as_a_directory_so_that_a_new_one_arrives() -> None:
    """A mount of one file, or by subPath, keeps the old content."""
    mounts = container("worker")["volumeMounts"]

    assert all("subPath" not in mount for mount in mounts)
    (directory,) = [mount["mountPath"] for mount in mounts if mount["name"] == "secrets"]
    for entry in container("worker")["env"]:
        if entry["name"].endswith("_FILE"):
            assert Path(entry["value"]).parent == Path(directory)


# The stand-ins


def test_the_billing_stand_in_counts_an_event_once_however_often_it_comes() -> None:
    billing = runpy.run_path(str(COMPOSE.parent / "sinks" / "sink.py"))["Billing"]()
    event = {"source": "/d", "id": "1", "data": {"total_tokens": 7}}

    billing.take([event, event])
    billing.take([event, {**event, "source": "/other"}])

    assert billing.seen() == {"distinct": 2, "repeated": 2, "tokens": 14}


# Health


def test_the_brokers_health_check_waits_for_the_port() -> None:
    """`ping` answers before the AMQP listener does."""
    assert services()["rabbitmq"]["healthcheck"]["test"][-1] == "check_port_connectivity"


def test_the_stand_in_redis_keeps_what_it_has_acknowledged() -> None:
    command = " ".join(services()["redis"]["command"])

    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command


def test_the_model_is_given_time_to_load() -> None:
    assert services()["vllm"]["healthcheck"]["start_period"] == "30m"
    probe = container("vllm")["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] == 30 * 60
    assert of_kind("Deployment")["spec"]["progressDeadlineSeconds"] > 30 * 60


def test_liveness_asks_no_neighbour_and_readiness_asks_all() -> None:
    worker = container("worker")

    assert worker["livenessProbe"]["httpGet"]["path"] == worker["startupProbe"]["httpGet"]["path"] == "/livez"
    assert worker["readinessProbe"]["httpGet"]["path"] == "/readyz"
    (port,) = worker["ports"]
    assert (port["name"], str(port["containerPort"])) == ("ops", VARIABLES["WORKER_HTTP_PORT"].default)


def test_the_pod_monitor_finds_the_pods_and_names_the_deployment() -> None:
    monitor = of_kind("PodMonitor")["spec"]
    labels = of_kind("Deployment")["spec"]["template"]["metadata"]["labels"]

    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["jobLabel"]] == "inference-worker"
    assert labels["inference-worker/deployment"] == of_kind("ConfigMap")["data"]["DEPLOYMENT_ID"]
    assert {rule["targetLabel"] for rule in monitor["podMetricsEndpoints"][0]["relabelings"]} == {
        "deployment",
        "instance",
    }


def test_compose_and_kubernetes_run_the_same_model_server() -> None:
    assert default_of(services()["vllm"]["image"]) == container("vllm")["image"]


# The image


def test_nothing_but_what_the_image_is_made_of_is_sent_to_the_builder() -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)

    assert patterns[0] == "*"
    assert {pattern[1:] for pattern in patterns if pattern.startswith("!")} == set(" ".join(copied).split())


def test_the_image_needs_no_frontend_from_a_registry() -> None:
    assert "# syntax=" not in (ROOT / "Dockerfile").read_text()


# Streams over HTTP

STREAMS = ROOT / "deploy" / "compose-streams" / "compose.yaml"
WORKERS = ("worker-1", "worker-2", "worker-3")


def streams() -> dict[str, Manifest]:
    found: dict[str, Manifest] = yaml.safe_load(STREAMS.read_text())["services"]
    return found


def settings_of(service: str) -> Settings:
    """As the container's process reads them; the defaults of Compose's own variables put in."""
    environ = {name: default_of(str(value)) for name, value in streams()[service]["environment"].items()}
    environ.pop("GATEWAY_API_KEYS_FILE", None)
    return load(environ, needs={"gateway": "gateway", "scaler": "scaler"}.get(service, "run"))  # type: ignore[arg-type]  # They are three of the literals.


@pytest.mark.parametrize("service", [*WORKERS, "gateway", "scaler"])
def test_the_streams_services_set_variables_that_exist_and_find_the_same_queue(service: str) -> None:
    assert streams()[service]["environment"].keys() - KNOWN == set()
    settings = settings_of(service)
    assert (settings.transport.kind, settings.queue) == ("redis-streams", "inference:jobs")
    assert settings.redis.address == settings_of("worker-1").redis.address


@pytest.mark.parametrize("service", [*WORKERS, "gateway", "scaler"])
def test_the_streams_services_may_do_nothing_that_they_need_not(service: str) -> None:
    spec = streams()[service]

    assert spec["read_only"] is True
    assert spec["cap_drop"] == ["ALL"]
    assert spec["security_opt"] == ["no-new-privileges:true"]


def test_each_streams_worker_is_called_as_the_scaler_counts() -> None:
    """`worker-N` idles by its number; a gap, or more of them than the scaler may want, would idle for ever."""
    replicas = [settings_of(service).identity.replica_id for service in WORKERS]

    assert replicas == [f"worker-{number + 1}" for number in range(settings_of("scaler").scale.most)]
    assert {service for service in streams() if service.startswith("worker")} == set(WORKERS)


@pytest.mark.parametrize("service", WORKERS)
def test_compose_waits_longer_than_a_streams_worker_takes_to_stop(service: str) -> None:
    waits_s = seconds(default_of(streams()[service]["stop_grace_period"]))

    assert waits_s > settings_of(service).ops.shutdown_grace_s + STOP_S
    assert {"redis", "vllm"} <= streams()[service]["depends_on"].keys(), "what depends goes first"


@pytest.mark.parametrize("service", ["gateway", "scaler"])
def test_what_listens_beyond_its_container_has_keys(service: str) -> None:
    """Keys in a file that is mounted, and no key in the environment; the host shows the port to itself alone."""
    spec = streams()[service]

    (secret,) = spec["secrets"]
    assert spec["environment"]["GATEWAY_API_KEYS_FILE"] == f"/run/secrets/{secret}"
    assert all(default_of(port).startswith("127.0.0.1:") for port in spec["ports"])
    assert spec["environment"].keys() & {name for name, variable in VARIABLES.items() if variable.secret} == set()


def test_the_redis_that_is_the_queue_keeps_what_it_has_acknowledged() -> None:
    spec = streams()["redis"]

    assert "--appendonly yes" in " ".join(spec["command"])
    assert "--maxmemory-policy noeviction" in " ".join(spec["command"])
    assert spec["volumes"] == ["redis:/data"]
    assert "ports" not in spec, "it asks for no password"


def test_the_defaults_of_the_streams_compose_file_are_told_as_they_are() -> None:
    example = (STREAMS.parent / ".env.example").read_text()
    told = dict(re.findall(r"^#([A-Z_]+)=(.*)$", example, re.MULTILINE))
    used = set(re.findall(r"\$\{(\w+):-([^}]*)\}", STREAMS.read_text())) - {("HF_MODEL_ID", "")}

    assert used == {(name, told[name]) for name in told.keys() - {"COMPOSE_PROFILES"}}


def test_the_model_mode_of_the_streams_compose_file_is_the_mock_unless_told() -> None:
    assert settings_of("worker-1").model.mode == "mock"
    assert streams()["vllm"]["profiles"] == ["gpu"]
