"""What a gateway tells of itself: metrics, probes, its own document. Contract, section 8; docs/metrics.md."""

import asyncio
import math
import re
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from inference_worker.errors import TransportLost
from inference_worker.gateway.edge import route_of
from inference_worker.gateway.metrics import GatewayMetrics
from tests.unit.gateway_kit import CHAT, Intake, is_problem, opened, said

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture
async def intake() -> AsyncIterator[Intake]:
    async with opened(Intake(models=["m"])) as made:
        yield made


def series(metrics: GatewayMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }


async def test_every_series_is_there_from_the_start(intake: Intake) -> None:
    before = series(intake.metrics)

    await intake.job()
    await intake.post({})
    await intake.post({"payload": CHAT, "idempotency_key": "k"})
    await intake.post({"payload": CHAT, "idempotency_key": "k"})
    await intake.http.get("/v1/jobs")
    await intake.http.delete("/v1/jobs/job-1")
    await intake.http.get("/v1/models/whatever/it/is")
    await intake.http.get("/nothing/at/all")
    await intake.chat({"Prefer": "respond-async"})
    await intake.metrics_page()

    assert series(intake.metrics).keys() == before.keys()
    assert {value for value in before.values() if not math.isnan(value)} == {0.0}
    assert {name for (name, _), value in before.items() if math.isnan(value)} == {
        "inference_worker_gateway_queue_ready_messages"
    }


async def test_requests_are_counted_by_route_and_class_of_status(intake: Intake) -> None:
    await intake.job()
    await intake.post({})
    await intake.get("nobody")

    assert intake.count("requests_total", route="submit", status="2xx") == 1
    assert intake.count("requests_total", route="submit", status="4xx") == 1
    assert intake.count("requests_total", route="look", status="4xx") == 1
    assert intake.count("jobs_accepted_total") == 1
    assert intake.count("jobs_refused_total", reason="invalid") == 1
    assert intake.count("request_seconds_count", route="submit") == 2


async def test_those_who_wait_are_counted_while_they_do(intake: Intake) -> None:
    job_id = await intake.job()
    async with asyncio.TaskGroup() as group:
        group.create_task(intake.get(job_id, wait=5))
        await asyncio.sleep(1)
        waiting = intake.count("waiting_clients")

    assert (waiting, intake.count("waiting_clients")) == (1, 0)


def test_no_path_makes_a_route_of_its_own() -> None:
    assert {route_of("GET", f"/v1/jobs/{name}") for name in ("a", "b", "%2F")} == {"look"}
    assert route_of("GET", "/v1/jobs/a/b/c") == "other"
    assert route_of("GET", "/v1/jobs/a/webhook") == "webhook"
    assert route_of("GET", "/v1/scale/x:y") == "scale"
    assert route_of("POST", "/v1/dead-letters/replay") == "dead_letters"
    assert route_of("GET", "/v1/models/a/b") == "models"


def test_the_table_in_the_docs_is_what_is_exposed() -> None:
    documented = {}
    section = DOCS.read_text().partition("## Of a gateway\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("| `"):
            name, kind, labels, _ = (cell.strip() for cell in line.strip("|").split(" | "))
            found = {}
            for part in labels.split("; "):
                label, _, values = part.partition(": ")
                if values:
                    found[label.strip("`")] = set(re.findall(r"`([\w]+)`", values))
            documented[f"inference_worker_gateway_{name.strip('`')}"] = (kind, found)
    exposed = {}
    for family in GatewayMetrics().registry.collect():
        labels_found: dict[str, set[str]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label != "le":
                    labels_found.setdefault(label, set()).add(value)
        exposed[family.name + ("_total" if family.type == "counter" else "")] = (family.type, labels_found)

    assert documented == exposed


async def test_it_is_ready_once_queue_and_store_have_answered(intake: Intake) -> None:
    before = await intake.http.get("/readyz")
    over = asyncio.Event()
    watching = asyncio.create_task(intake.watch.run(over))
    await asyncio.sleep(0.1)
    ready = await intake.http.get("/readyz")
    intake.queue.refuses = TransportLost("the broker is away")
    await asyncio.sleep(3)
    away = await intake.http.get("/readyz")
    intake.queue.refuses = None
    await asyncio.sleep(3)
    intake.jobs.stopping.set()
    stopping = await intake.http.get("/readyz")
    over.set()
    await watching

    assert (before.status_code, ready.status_code, away.status_code, stopping.status_code) == (503, 200, 503, 503)
    assert said(away)["conditions"]["broker"] == {"ok": False, "reason": "the broker is away"}
    assert not said(stopping)["conditions"]["serving"]["ok"]
    assert (await intake.http.get("/livez")).status_code == 200


async def test_a_neighbour_that_hangs_makes_it_not_ready(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    async def probe() -> None:
        await asyncio.sleep(1000)

    monkeypatch.setattr(intake.watch, "_probe", probe)
    over = asyncio.Event()
    watching = asyncio.create_task(intake.watch.run(over))
    await asyncio.sleep(6)

    assert "no answer" in said(await intake.http.get("/readyz"))["conditions"]["store"]["reason"]
    over.set()
    await watching


async def test_a_surprise_of_a_look_does_not_end_the_watch(intake: Intake) -> None:
    """What would end the gateway would be met again after its restart."""
    over = asyncio.Event()
    intake.queue.refuses = RuntimeError("a count that nobody thought of")
    watching = asyncio.create_task(intake.watch.run(over))
    await asyncio.sleep(1)
    seen = intake.watch.conditions()["broker"]
    intake.queue.refuses = None
    await asyncio.sleep(5)
    over.set()
    await watching

    assert seen == (False, "the look failed: RuntimeError")
    assert intake.watch.conditions()["broker"] == (True, "")


@pytest.mark.parametrize("given", ["my-id", "x" * 128])
async def test_a_request_keeps_its_id(intake: Intake, given: str) -> None:
    answer = await intake.http.get("/v1/jobs", headers={"X-Request-Id": given})

    assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "two words", "x" * 129])
async def test_a_request_without_a_usable_id_gets_one(intake: Intake, given: str) -> None:
    answer = await intake.http.get("/nothing", headers={"X-Request-Id": given})

    is_problem(answer, 404)
    assert re.fullmatch("[0-9a-f]{16}", answer.headers["x-request-id"])


async def test_a_fault_of_ours_has_its_id_and_is_counted(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    async def find(job_id: str) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(intake.book, "find", find)

    answer = await intake.get("x")

    is_problem(answer, 500)
    assert answer.headers["x-request-id"]
    assert intake.count("requests_total", route="look", status="5xx") == 1


@pytest.mark.parametrize("accept", ["", "text/plain", "application/openmetrics-text; version=nonsense"])
async def test_the_page_is_there_whatever_is_asked_for(intake: Intake, accept: str) -> None:
    page = await intake.http.get("/metrics", headers={"Accept": accept})

    assert page.status_code == 200
    assert "inference_worker_gateway_requests_total" in page.text


def test_what_becomes_of_webhooks_is_counted() -> None:
    metrics = GatewayMetrics()

    metrics.hook("delivered")

    name = "inference_worker_gateway_webhooks_total"
    assert metrics.registry.get_sample_value(name, {"outcome": "delivered"}) == 1
    assert metrics.registry.get_sample_value(name, {"outcome": "failed"}) == 0


async def test_the_log_tells_of_a_neighbour_that_stays_away_once_and_when_it_is_back(intake: Intake) -> None:
    over = asyncio.Event()
    with capture_logs() as logged:
        intake.queue.refuses = TransportLost("the broker is away")
        watching = asyncio.create_task(intake.watch.run(over))
        await asyncio.sleep(20)
        intake.queue.refuses = None
        await asyncio.sleep(3)
        over.set()
        await watching

    assert [line["event"] for line in logged] == ["a neighbour does not answer", "a neighbour answers again"]


async def test_there_is_a_page_for_people(intake: Intake) -> None:
    page = await intake.http.get("/docs")

    assert page.status_code == 200
    assert "/openapi.json" in page.text


async def test_what_is_no_request_passes_by(intake: Intake) -> None:
    """A lifespan, for a server that has one."""
    got: list[str] = []
    asked: list[dict[str, object]] = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive() -> dict[str, object]:
        return asked.pop(0)

    async def send(message: MutableMapping[str, object]) -> None:
        got.append(str(message["type"]))

    await intake.web({"type": "lifespan", "state": {}}, receive, send)

    assert got == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_there_is_a_bound_on_requests_and_probes_are_beyond_it(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_worker.gateway.edge.MOST_AT_ONCE", 1)
    job_id = await intake.job()
    async with asyncio.TaskGroup() as group:
        group.create_task(intake.get(job_id, wait=5))
        await asyncio.sleep(1)
        refused = await intake.post({"payload": CHAT})
        alive = await intake.http.get("/livez")
    later = await intake.post({"payload": CHAT})

    assert is_problem(refused, 503)["code"] == "overloaded"
    assert intake.count("jobs_refused_total", reason="overloaded") == 1
    assert (alive.status_code, later.status_code) == (200, 202)
