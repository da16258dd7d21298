"""Contract, section 8: `/metrics` of a real worker, as Prometheus reads it."""

import re
import time
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.conservation import publish
from tests.faults import wire
from tests.faults.model import FakeModel, ok
from tests.in_process import InProcess
from tests.integration.conftest import RunningWorker
from tests.services import free_port
from tests.waiting import eventually

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
BASE_UNITS = ("_seconds", "_bytes", "_ratio")
COUNTED = ("_total", "_requests", "_slots", "_waiting", "_running", "_messages", "_results", "_events", "_info")
"""What is counted has no unit; its name says what."""
STATES = ("_up", "_suspended", "_consuming", "_link_state")
MANY = 5000

Series = tuple[str, frozenset[tuple[str, str]]]


async def exposed(w: InProcess) -> list[Metric]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{w.env['WORKER_HTTP_PORT']}/metrics") as answer,
    ):
        assert answer.status == 200
        return list(text_string_to_metric_families(await answer.text()))


def series(families: list[Metric]) -> dict[Series, float]:
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in families
        for one in family.samples
        if not one.name.endswith("_created")
    }


def documented() -> dict[str, dict[str, list[str]]]:
    """Every metric's labels and their values, by docs/metrics.md."""
    rows = re.findall(r"^\| `(inference_worker_\w+)` \| \w+ \| (.*?) \| ", DOCS.read_text(), re.MULTILINE)
    return {
        name: {
            label: re.findall(r"`([^`]+)`", values) for label, values in re.findall(r"`(\w+)`: ([^;]+)(?:;|$)", cell)
        }
        for name, cell in rows
    }


async def test_every_label_value_is_there_at_0_from_the_start(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 8: "every label value that can occur exists at 0 from the start"."""
    model.sick()
    w = await running_worker(ready=False, WORKER_HTTP_PORT=str(free_port()), WORKER_HTTP_HOST="127.0.0.1")
    await eventually(lambda: w.worker.listener.transport is not None, within=15, what="an ops port that answers")

    found = series(await exposed(w))

    counters = {name: labels for name, labels in documented().items() if name.endswith("_total")}
    assert len(counters) > 10
    for name, labels in counters.items():
        values = {labelled: value for (found_name, labelled), value in found.items() if found_name == name}
        assert set(values.values()) == {0.0}, name
        for label, expected in labels.items():
            assert {dict(labelled)[label] for labelled in values} == set(expected), name
    for name, label in (("suspended", "reason"), ("up", "peer"), ("link_state", "state")):
        there = {dict(labelled)[label] for found_name, labelled in found if found_name == f"inference_worker_{name}"}
        assert there == set(documented()[f"inference_worker_{name}"][label])


async def test_names_have_the_prefix_and_base_units(running_worker: RunningWorker) -> None:
    """Section 8: "prefix `inference_worker_`; base units"."""
    w = await running_worker(WORKER_HTTP_PORT=str(free_port()), WORKER_HTTP_HOST="127.0.0.1")

    names = {family.name + ("_total" if family.type == "counter" else "") for family in await exposed(w)}

    assert names == documented().keys()
    assert all(name.startswith("inference_worker_") for name in names)
    assert [name for name in names if not name.endswith(BASE_UNITS + COUNTED + STATES)] == []
    assert not re.search(r"_(ms|milliseconds|minutes|percent|kb|mb|mib|kilobytes|megabytes)(_|\b)", " ".join(names))


@pytest.mark.timeout(180)
async def test_the_number_of_series_does_not_depend_on_what_comes(
    running_worker: RunningWorker, model: FakeModel, rabbitmq_url: str
) -> None:
    """Section 8, "bounded labels" (B124): ids, models, tenants and error texts of 5,000 requests add no series."""
    model.decide = lambda request: (
        wire.error(400, f"no such model {request.arrived_at}") if b"-bad-" in request.body else ok()
    )
    w = await running_worker(WORKER_HTTP_PORT=str(free_port()), WORKER_HTTP_HOST="127.0.0.1", RABBITMQ_PREFETCH="64")
    before = series(await exposed(w))
    bodies = [
        {
            "request_id": f"r-{number}",
            "received_at": time.time(),
            "timeout_s": 600,
            "tenant": f"tenant-{number}",
            "metadata": {f"key-{number}": "value"},
            "payload": {"model": f"model-{number}{'-bad-' if number % 5 == 0 else ''}", "messages": []},
        }
        for number in range(MANY)
    ]

    await publish(rabbitmq_url, w.queue, *bodies)
    await eventually(lambda: len(w.dispositions) >= MANY, within=120, what=f"{MANY} dispositions", every=0.5)

    after = series(await exposed(w))
    assert after.keys() == before.keys()
    assert after["inference_worker_dispositions_total", frozenset({("disposition", "ack")})] == MANY
