"""The scale signal over HTTP, as KEDA's `metrics-api` trigger reads it, and what becomes of it when nothing is seen."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from inference_worker.config.settings import describe
from inference_worker.errors import TransportLost
from inference_worker.gateway.keys import KeyFile, digest
from inference_worker.gateway.scale import EXAMPLE
from inference_worker.gateway.scale_app import app, permit_of
from inference_worker.ports import Backlog
from inference_worker.results.fleet import MemoryFleet
from inference_worker.scaler import ScaleView, Sources
from inference_worker.scaling import Policy
from tests.unit import gjson
from tests.unit.test_fleet import beat
from tests.unit.test_scaler import Queue
from tests.unit.worker_kit import now

KEDA = Path(__file__).parents[2] / "deploy" / "keda"
BUSY = Backlog(ready=120, in_flight=16, delayed=3, oldest_s=12.4, how="stream")
ODD_NAMES = ("infer_req.llama-70b", "inference:jobs", "a/b", "späte Jobs", "100%", "{x}", "a?b#c")


async def view_of(queue: Queue, *, name: str = "inference:jobs", interval_s: float = 2.0) -> ScaleView:
    """A view that has looked once, with two workers of 32 slots."""
    fleet = MemoryFleet(now=now)
    for number in (1, 2):
        await fleet.beat(replace(beat(f"worker-{number}"), slots=32, service_s=8.0, done_per_s=1.8))
    view = ScaleView(
        name,
        Sources(backlog=queue.count, fleet=fleet, deadlines=queue.deadlines),
        Policy(least=0, most=10),
        now=now,
        interval_s=interval_s,
        slots=1,
        writes=False,
    )
    await view.refresh()
    return view


@asynccontextmanager
async def client(view: ScaleView, keys: KeyFile | None = None) -> AsyncGenerator[httpx.AsyncClient]:
    web = app(view, permit_of(keys), asyncio.Event())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(web), base_url="http://scaler") as http:
        yield http


def leaves(value: object, path: str = "") -> Mapping[str, object]:
    """Every value of a document by its path."""
    if not isinstance(value, dict):
        return {path: value}
    return {at: leaf for key, inner in value.items() for at, leaf in leaves(inner, f"{path}.{key}").items()}


# ---------------------------------------------------------------- as KEDA reads it


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("load", 139),
        ("desired_replicas", 5),
        ("active", 1),
        ("target_per_replica", 32),
        ("backlog.ready", 120),
        ("backlog.in_flight", 16),
        ("backlog.delayed", 3),
        ("backlog.oldest_seconds", 12.4),
        ("backlog.due_within_60s", 0),
        ("capacity.replicas_ready", 2),
        ("capacity.slots_per_replica", 32),
        ("capacity.completions_per_second", 3.6),
        ("recommendations.by_load", 5),
        ("recommendations.raw", 5),
        ("recommendations.stabilised", 5),
        ("limits.max", 10),
    ],
)
async def test_keda_finds_a_number_at_every_documented_path(path: str, value: float) -> None:
    async with client(await view_of(Queue(BUSY))) as http:
        answer = await http.get("/v1/scale/inference:jobs")

    assert gjson.read(answer.status_code, answer.content, path) == value


@pytest.mark.parametrize("backlog", [Backlog(ready=0), BUSY], ids=["little is known", "all is known"])
async def test_there_is_no_null_and_no_boolean_anywhere(backlog: Backlog) -> None:
    async with client(await view_of(Queue(backlog))) as http:
        answer = await http.get("/v1/scale/inference:jobs")

    found = leaves(answer.json())
    assert {path: leaf for path, leaf in found.items() if leaf is None or isinstance(leaf, bool)} == {}
    texts = {path for path, leaf in found.items() if isinstance(leaf, str)}
    assert texts == {".queue", ".observed_at", ".reason", ".how"}


async def test_the_example_in_the_docs_has_the_shape_of_the_answer() -> None:
    async with client(await view_of(Queue(BUSY))) as http:
        answer = (await http.get("/v1/scale/inference:jobs")).json()

    assert list(leaves(answer)) == list(leaves(dict(EXAMPLE)))


async def test_what_is_not_seen_is_a_failure_to_keda_and_never_a_zero() -> None:
    """A 503 lets the fallback act; a 0 would end replicas that are at work."""
    queue = Queue(BUSY)
    view = await view_of(queue)
    queue.away = TransportLost("no broker")
    await view.refresh()

    async with client(view) as http:
        answers = [await http.get("/v1/scale/inference:jobs"), await http.get("/v1/scale")]

    for answer in answers:
        with pytest.raises(gjson.Unreadable):
            gjson.read(answer.status_code, answer.content, "load")
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert "Retry-After" in answer.headers
        assert gjson.value_at(answer.content, "load") is ...
        assert "no broker" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("interval_s", "still_told_s"), [(2.0, 10.0), (10.0, 30.0)], ids=["ten seconds", "three intervals"]
)
async def test_an_old_look_is_not_told_as_if_it_were_new(interval_s: float, still_told_s: float) -> None:
    async with client(await view_of(Queue(BUSY), interval_s=interval_s)) as http:
        await asyncio.sleep(still_told_s - 0.1)
        fresh = await http.get("/v1/scale/inference:jobs")
        await asyncio.sleep(0.2)
        old = await http.get("/v1/scale/inference:jobs")

    assert (fresh.status_code, old.status_code) == (200, 503)
    assert fresh.json()["age_seconds"] == pytest.approx(still_told_s - 0.1)


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_a_queue_is_found_by_whatever_name_it_has(name: str) -> None:
    async with client(await view_of(Queue(BUSY), name=name)) as http:
        encoded = "".join(f"%{byte:02X}" for byte in name.encode())
        by_path = await http.get(f"/v1/scale/{encoded}")
        in_all = await http.get("/v1/scale")

    escaped = name.replace("\\", "\\\\").replace(".", "\\.")
    assert by_path.json()["queue"] == name
    assert gjson.read(in_all.status_code, in_all.content, f"queues.{escaped}.load") == 139


@pytest.mark.parametrize("path", ["/v1/scale/infer_req.other", "/v1/scale/inference", "/v1/scale/inference:jobs/x"])
async def test_another_name_is_no_queue(path: str) -> None:
    async with client(await view_of(Queue(BUSY))) as http:
        answer = await http.get(path)

    assert (answer.status_code, answer.json()["code"]) == (404, "no_such_queue")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/jobs", 404), ("POST", "/v1/scale", 405)])
async def test_what_is_not_there_is_refused_in_the_same_words(method: str, path: str, status: int) -> None:
    async with client(await view_of(Queue(BUSY))) as http:
        answer = await http.request(method, path)

    assert (answer.status_code, answer.json()["status"]) == (status, status)
    assert answer.headers["content-type"] == "application/problem+json"


# ---------------------------------------------------------------- who may ask


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({}, 401, id="nobody"),
        pytest.param({"Authorization": "Bearer wrong"}, 401, id="an unknown key"),
        pytest.param({"Authorization": "Bearer of-a-tenant"}, 403, id="a tenant"),
        pytest.param(
            {"Authorization": "Bearer of-an-operator"}, 200, id="an operator, as KEDA's authMode bearer sends it"
        ),
        pytest.param({"X-API-Key": "of-an-operator"}, 200, id="an operator, as KEDA's authMode apiKey sends it"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/scale", "/v1/scale/inference:jobs", "/v1/scale/nowhere"])
async def test_with_keys_the_signal_is_for_operators(
    tmp_path: Path, path: str, headers: dict[str, str], status: int
) -> None:
    file = tmp_path / "keys.json"
    keys = [
        {"tenant": "acme", "sha256": digest("of-a-tenant")},
        {"tenant": "ops", "sha256": digest("of-an-operator"), "operator": True},
    ]
    file.write_text(json.dumps({"keys": keys}))

    async with client(await view_of(Queue(BUSY)), KeyFile(str(file))) as http:
        answer = await http.get(path, headers=headers)

    assert answer.status_code == (404 if status == 200 and path.endswith("nowhere") else status)


async def test_probes_and_metrics_need_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text('{"keys": []}')

    async with client(await view_of(Queue(BUSY)), KeyFile(str(file))) as http:
        statuses = [(await http.get(path)).status_code for path in ("/livez", "/readyz", "/metrics")]

    assert statuses == [200, 200, 200]


async def test_it_is_not_ready_while_it_sees_nothing_and_alive_all_the_same() -> None:
    queue = Queue()
    queue.away = TransportLost("no broker")

    async with client(await view_of(queue)) as http:
        ready, alive = await http.get("/readyz"), await http.get("/livez")

    assert (ready.status_code, alive.status_code) == (503, 200)
    assert ready.json()["conditions"]["queue"] == {"ok": False, "reason": "no broker"}


# ---------------------------------------------------------------- as Prometheus reads it


async def series(view: ScaleView) -> dict[str, float]:
    async with client(view) as http:
        page = (await http.get("/metrics")).text
    return {
        ":".join((sample.name.removeprefix("inference_worker_scale_"), *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def test_prometheus_gets_the_same_numbers() -> None:
    assert await series(await view_of(Queue(BUSY))) == {
        "up": 1,
        "desired_replicas": 5,
        "recommended_replicas:by_load": 5,
        "recommended_replicas:by_wait": 1,
        "recommended_replicas:by_deadline": 0,
        "recommended_replicas:raw": 5,
        "load": 139,
        "backlog:ready": 120,
        "backlog:in_flight": 16,
        "backlog:delayed": 3,
        "oldest_seconds": 12.4,
        "replicas_ready": 2,
        "completions_per_second": 3.6,
    }


async def test_a_format_that_is_none_gets_the_usual_one() -> None:
    async with client(await view_of(Queue(BUSY))) as http:
        answer = await http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=x.y"})

    assert (answer.status_code, "inference_worker_scale_load 139.0" in answer.text) == (200, True)


async def test_what_is_not_seen_is_no_number_to_prometheus() -> None:
    queue = Queue()
    queue.away = TransportLost("no broker")

    found = await series(await view_of(queue))

    assert found.pop("up") == 0
    assert len(found) == 12
    assert all(math.isnan(value) for value in found.values())


# ---------------------------------------------------------------- the manifests


def triggers() -> list[Any]:
    found: list[Any] = []
    for path in sorted(KEDA.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] == "ScaledObject":
                found += [
                    pytest.param(
                        trigger["metadata"], document["spec"], id=f"{path.stem}: {document['metadata']['name']}"
                    )
                    for trigger in document["spec"]["triggers"]
                ]
    return found


@pytest.mark.parametrize(("metadata", "spec"), triggers())
async def test_the_manifests_read_a_number_of_a_path_that_is_there(
    metadata: dict[str, str], spec: dict[str, Any]
) -> None:
    url = httpx.URL(metadata["url"])
    name = url.path.removeprefix("/v1/scale/")

    async with client(await view_of(Queue(BUSY), name=name)) as http:
        answer = await http.get(url.raw_path.decode())

    value = gjson.read(answer.status_code, answer.content, metadata["valueLocation"])
    assert value / float(metadata["targetValue"]) > 0
    assert spec["fallback"]["replicas"] >= 1


def test_the_scalers_manifest_names_variables_and_secrets_that_are_there() -> None:
    documents = list(yaml.safe_load_all((KEDA / "scaler.yaml").read_text()))
    (pod,) = (one["spec"]["template"]["spec"] for one in documents if one["kind"] == "Deployment")
    (token,) = (one["spec"]["secretTargetRef"][0] for one in documents if one["kind"] == "TriggerAuthentication")
    environ = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}

    known = {variable.name for variable in describe()} | {f"{variable.name}_FILE" for variable in describe()}
    assert environ.keys() - known == set()
    assert token["name"] in {volume["secret"]["secretName"] for volume in pod["volumes"]}
    mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert {str(Path(value).parent) for name, value in environ.items() if name.endswith("_FILE")} <= mounts


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("load", ["load"]),
        ("backlog.ready", ["backlog", "ready"]),
        (r"queues.infer_req\.a.load", ["queues", "infer_req.a", "load"]),
    ],
)
def test_a_path_is_taken_apart_as_gjson_does(path: str, parts: list[str]) -> None:
    assert gjson.path_parts(path) == parts


@pytest.mark.parametrize("value", ["null", "true", '"5"', "{}", "[]"])
def test_keda_takes_nothing_but_a_number(value: str) -> None:
    with pytest.raises(gjson.Unreadable):
        gjson.read(200, b'{"load": %s}' % value.encode(), "load")
