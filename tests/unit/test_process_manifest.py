"""A process of many queues as Compose and Kubernetes run it: flags and documents are read as the command reads them."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from inference_worker.cli import _parser
from inference_worker.config.doubts import doubts
from inference_worker.config.settings import describe
from inference_worker.process_arguments import given_flags
from inference_worker.process_setup import ProcessSetup, read_setup

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = DEPLOY / "compose-process" / "compose.yaml"
KUBERNETES = DEPLOY / "kubernetes" / "process"
STOP_S = 10
"""It ends at most so long after its grace."""

Manifest = dict[str, Any]  # YAML has no types.


def services() -> dict[str, Manifest]:
    found: dict[str, Manifest] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def one(kind: str, name: str = "process.yaml") -> Manifest:
    found: list[Manifest] = list(yaml.safe_load_all((KUBERNETES / name).read_text()))
    (only,) = [manifest for manifest in found if manifest["kind"] == kind]
    return only


def pod() -> Manifest:
    found: Manifest = one("Deployment")["spec"]["template"]
    return found


def container() -> Manifest:
    (found,) = pod()["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def setup(words: list[str], environ: dict[str, str], read: Callable[[str], str]) -> ProcessSetup:
    return read_setup(given_flags(_parser().parse_args(words)), environ, read, random.Random(1))


def in_compose() -> ProcessSetup:
    spec = services()["process"]

    def read(path: str) -> str:
        return (COMPOSE.parent / Path(path).relative_to("/etc/inference-worker")).read_text()

    return setup(spec["command"], spec["environment"], read)


def in_kubernetes(tmp_path: Path) -> ProcessSetup:
    (tmp_path / "redis-url").write_text("redis://redis.example.svc:6379/0")
    environ = {"REPLICA_ID": "inference-process-0", "REDIS_URL_FILE": str(tmp_path / "redis-url")}
    environ |= {entry["name"]: entry["value"] for entry in container()["env"] if entry["name"] == "DEPLOYMENT_ID"}
    documents: dict[str, str] = one("ConfigMap")["data"]

    def read(path: str) -> str:
        return documents[str(Path(path).relative_to("/etc/inference-process"))]

    return setup(container()["args"], environ, read)


def test_the_documents_of_both_are_right_and_leave_no_doubt(tmp_path: Path) -> None:
    for of in (in_compose(), in_kubernetes(tmp_path)):
        assert [queue.queue_name for queue in of.documents.transport.queues] == ["chat", "reports"]
        assert doubts(of.documents, most_files=1024) == []


def test_both_wait_longer_than_it_takes_to_stop(tmp_path: Path) -> None:
    (seconds,) = re.findall(r"^(\d+)s$", services()["process"]["stop_grace_period"])

    assert int(seconds) > in_compose().flags.drain_timeout_s + STOP_S
    assert pod()["spec"]["terminationGracePeriodSeconds"] > in_kubernetes(tmp_path).flags.drain_timeout_s + STOP_S


def test_the_processes_of_a_deployment_share_a_name_and_none_shares_its_own(tmp_path: Path) -> None:
    names = {entry["name"]: entry for entry in container()["env"]}

    assert in_kubernetes(tmp_path).settings.identity.deployment_id == "process"
    assert names["REPLICA_ID"]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}


def test_probes_and_the_pod_monitor_find_its_ports(tmp_path: Path) -> None:
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    flags = in_kubernetes(tmp_path).flags
    monitor = one("PodMonitor", "podmonitor.yaml")["spec"]

    assert ports == {"health": flags.health_port, "metrics": flags.metrics_port}
    probes = {name: container()[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/livez",
        "livenessProbe": "/livez",
        "readinessProbe": "/readyz",
    }
    assert {probe["port"] for probe in probes.values()} == {"health"}
    assert [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]] == ["metrics"]
    assert monitor["selector"]["matchLabels"].items() <= pod()["metadata"]["labels"].items()
    assert one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= pod()["metadata"]["labels"].items()


def test_no_secret_is_a_value_and_its_directory_is_mounted() -> None:
    secret = {variable.name for variable in describe() if variable.secret} | {"REDIS_URL"}
    names = {entry["name"]: entry.get("value", "") for entry in container()["env"]}
    mounts = {mount["mountPath"] for mount in container()["volumeMounts"] if "subPath" not in mount}

    assert names.keys() & secret == set()
    assert str(Path(names["REDIS_URL_FILE"]).parent) in mounts


@pytest.mark.parametrize("service", ["process", "model", "ask"])
def test_no_service_may_do_what_it_need_not(service: str) -> None:
    spec = services()[service]

    assert (spec["read_only"], spec["cap_drop"]) == (True, ["ALL"])
    assert spec["security_opt"] == ["no-new-privileges:true"]
    assert all(":127.0.0.1:" in f":{port.partition(':-')[2] or port}" for port in spec.get("ports", []))


def test_the_pod_may_do_nothing_that_it_need_not() -> None:
    assert pod()["spec"]["automountServiceAccountToken"] is False
    assert container()["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_redis_of_compose_keeps_what_it_has_acknowledged() -> None:
    words = " ".join(services()["redis"]["command"])

    assert "--appendonly yes" in words
    assert "--maxmemory-policy noeviction" in words
    assert "ports" not in services()["redis"], "it asks for no password"
