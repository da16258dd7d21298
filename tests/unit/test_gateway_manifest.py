"""The gateway on Kubernetes, and what watches it and the scaler there: sound, and as code and alerts expect it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from inference_worker.config.settings import Settings, describe, load
from inference_worker.gateway import answers, bodies
from tests.watching import alerts

DEPLOY = Path(__file__).parents[2] / "deploy"
GATEWAY = DEPLOY / "kubernetes" / "gateway"
SECRETS = "/run/secrets/inference-worker"
DEPLOYMENT = "inference-worker/deployment"

Manifest = dict[str, Any]  # YAML has no types.


def in_file(path: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(path.read_text()))


def one(path: Path, kind: str) -> Manifest:
    (found,) = [manifest for manifest in in_file(path) if manifest["kind"] == kind]
    return found


def configuration() -> dict[str, str]:
    data: dict[str, str] = one(DEPLOY / "kubernetes" / "replica.yaml", "ConfigMap")["data"]
    return data


def template() -> Manifest:
    found: Manifest = one(GATEWAY / "gateway.yaml", "Deployment")["spec"]["template"]
    return found


def container() -> Manifest:
    (found,) = template()["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def settings(tmp_path: Path) -> Settings:
    """As the container's process reads them."""
    environ = {"REPLICA_ID": "inference-worker-gateway-0"}
    for entry in container()["env"]:
        if key := entry.get("valueFrom", {}).get("configMapKeyRef"):
            environ[entry["name"]] = configuration()[key["key"]]
        elif entry["name"].endswith("_URL_FILE"):
            file = tmp_path / Path(entry["value"]).name
            file.write_text({"rabbitmq-url": "amqp://rabbitmq/", "redis-url": "redis://redis"}[file.name])
            environ[entry["name"]] = str(file)
        elif "value" in entry:
            environ[entry["name"]] = entry["value"]
    return load(environ, needs="gateway")


def test_the_gateway_is_configured_and_stands_before_the_queue_of_the_replica(tmp_path: Path) -> None:
    known = {variable.name for variable in describe()} | {f"{v.name}_FILE" for v in describe() if v.file}

    found = settings(tmp_path)

    assert {entry["name"] for entry in container()["env"]} - known == set()
    assert found.queue == f"infer_req.{configuration()['DEPLOYMENT_ID']}"
    assert container()["args"] == ["gateway"]
    assert (
        container()["image"]
        == one(DEPLOY / "keda" / "scaler.yaml", "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"]
    )


def test_it_listens_beyond_its_pod_with_keys_alone(tmp_path: Path) -> None:
    """Without the file it would be on loopback, where no probe and no Service finds it."""
    found = settings(tmp_path).gateway
    (port,) = container()["ports"]
    (service,) = one(GATEWAY / "gateway.yaml", "Service")["spec"]["ports"]

    assert (found.host, found.port, found.api_keys_file) == (
        "0.0.0.0",
        port["containerPort"],
        f"{SECRETS}-gateway/api-keys.json",
    )
    assert service["targetPort"] == port["name"] == "http"
    assert (
        one(GATEWAY / "gateway.yaml", "Service")["spec"]["selector"].items() <= template()["metadata"]["labels"].items()
    )


def test_it_shows_the_signal_within_the_bounds_of_the_scaler() -> None:
    (scaler,) = one(DEPLOY / "keda" / "scaler.yaml", "Deployment")["spec"]["template"]["spec"]["containers"]

    ours, its = (
        {entry["name"]: entry.get("value") for entry in found["env"] if entry["name"].startswith("SCALE_")}
        for found in (container(), scaler)
    )
    assert ours == its != {}


def test_no_secret_is_a_value_and_each_is_in_a_directory_that_is_mounted() -> None:
    secret = {variable.name for variable in describe() if variable.secret} | {"RABBITMQ_URL", "REDIS_URL"}
    mounts = {mount["mountPath"] for mount in container()["volumeMounts"] if "subPath" not in mount}
    files = [Path(entry["value"]) for entry in container()["env"] if entry["name"].endswith("_FILE")]

    assert {entry["name"] for entry in container()["env"]} & secret == set()
    assert {str(file.parent) for file in files} == mounts
    (shared,) = [volume["secret"] for volume in template()["spec"]["volumes"] if volume["name"] == "secrets"]
    assert {item["path"] for item in shared["items"]} == {file.name for file in files} - {"api-keys.json"}


def test_the_gateway_may_do_nothing_that_it_need_not() -> None:
    scaler = one(DEPLOY / "keda" / "scaler.yaml", "Deployment")["spec"]["template"]["spec"]

    for spec in (template()["spec"], scaler):
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["fsGroup"] == 10001
        assert spec["containers"][0]["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


def test_a_neighbours_outage_restarts_no_gateway() -> None:
    found = container()

    assert found["livenessProbe"]["httpGet"]["path"] == found["startupProbe"]["httpGet"]["path"] == "/livez"
    assert found["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert {probe["httpGet"]["port"] for name, probe in found.items() if name.endswith("Probe")} == {"http"}


def test_it_is_given_the_time_that_it_takes_to_stop() -> None:
    """Compose's own for the same process, and the pause before it."""
    streams = yaml.safe_load((DEPLOY / "compose-streams" / "compose.yaml").read_text())["services"]["gateway"]
    pause_s = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])

    assert template()["spec"]["terminationGracePeriodSeconds"] > pause_s + int(streams["stop_grace_period"].rstrip("s"))


def test_its_memory_is_more_than_what_it_may_hold() -> None:
    limit = container()["resources"]["limits"]["memory"]

    held = bodies.MOST_BYTES_AT_ONCE + answers.MOST_BYTES_AT_ONCE
    assert int(limit.removesuffix("Mi")) * 2**20 >= 1.5 * held
    assert "cpu" not in container()["resources"]["limits"]


def test_a_roll_out_leaves_no_moment_without_a_gateway() -> None:
    spec = one(GATEWAY / "gateway.yaml", "Deployment")["spec"]

    assert spec["replicas"] >= 2
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


@pytest.mark.parametrize(
    ("name", "manifest"),
    [
        ("inference-worker-gateway", GATEWAY / "gateway.yaml"),
        ("inference-worker-scaler", DEPLOY / "keda" / "scaler.yaml"),
    ],
)
def test_the_pod_monitors_find_their_pods_and_name_job_and_deployment_as_the_alerts_expect(
    name: str, manifest: Path
) -> None:
    (monitor,) = [one["spec"] for one in in_file(GATEWAY / "podmonitor.yaml") if one["metadata"]["name"] == name]
    pods = one(manifest, "Deployment")["spec"]["template"]
    labels = pods["metadata"]["labels"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    rules = {rule["targetLabel"]: rule for rule in endpoint["relabelings"]}

    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["jobLabel"]] == name
    assert endpoint["port"] in {port["name"] for port in pods["spec"]["containers"][0]["ports"]}
    assert rules.keys() == {"deployment", "instance"}
    assert rules["deployment"].get("replacement", labels.get(DEPLOYMENT)) == configuration()["DEPLOYMENT_ID"]


def test_the_jobs_that_alerts_look_for_are_those_that_are_scraped() -> None:
    monitors = [*in_file(GATEWAY / "podmonitor.yaml"), *in_file(DEPLOY / "kubernetes" / "podmonitor.yaml")]
    asked = {job for alert in alerts() for job in re.findall(r'job="([^"]*)"', alert.expression)}

    assert asked == {monitor["metadata"]["name"] for monitor in monitors}


def test_kustomize_applies_files_that_exist() -> None:
    text = (GATEWAY / "kustomization.yaml").read_text()

    named = set(re.findall(r"- (\w+\.yaml)$", text, re.MULTILINE))
    assert named == {path.name for path in GATEWAY.glob("*.yaml")} - {"kustomization.yaml"}
