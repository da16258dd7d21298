"""Contract, section 7: what a real worker sends to the metric server and to billing, held to the published schemas."""

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.faults import model as models
from tests.faults import wire
from tests.faults.model import FakeModel
from tests.faults.sinks import BillingServer, MetricServer
from tests.in_process import SOON_S, InProcess, request_body
from tests.integration.conftest import RunningWorker
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
NEVER_BY_THE_CLOCK = {"METRICS_FLUSH_INTERVAL_S": "3600"}


def schema(name: str) -> Any:
    return json.loads((ROOT / "docs" / "telemetry" / f"{name}.schema.json").read_text())


def sample(name: str) -> str:
    return (ROOT / "tests" / "samples" / f"{name}.metrics.txt").read_text()


def reporting_to(metrics: MetricServer, **changes: str) -> dict[str, str]:
    to = {"METRIC_SERVER_URL": metrics.url, "METRIC_SERVER_SERVICE_TOKEN": "t-1", "METRICS_FLUSH_INTERVAL_S": "0.1"}
    return to | changes


async def record(metrics: MetricServer, request_id: str | None, disposition: str) -> dict[str, Any]:
    """Wait for what was reported of one disposition."""

    def there() -> list[dict[str, object]]:
        return [one for one in metrics.records if (one["request_id"], one["disposition"]) == (request_id, disposition)]

    return (await eventually(there, within=SOON_S, what=f"the record of {request_id}, {disposition}"))[0]


def contents(metrics: MetricServer) -> list[dict[str, Any]]:
    return [batch.content for batch in metrics.batches if isinstance(batch.content, dict)]


def last(metrics: MetricServer) -> dict[str, Any]:
    assert metrics.batches, "no batch has come"
    return contents(metrics)[-1]


# ---------------------------------------------------------------- the metric server


async def test_every_disposition_is_a_record_by_the_schema(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 7: `requests[]`, "one per disposition", with its fields; identity at the top; the bearer token."""
    model.when_prompt_has("-timed-", wire.answer(200, ANSWERED, {"x-ttft": "0.25", "x-tbt": "0.5"}))
    model.when_prompt_has("-refused-", wire.error(422))
    once = iter([wire.close_before_answer()])
    model.decide = lambda request: next(once, None) if b"-again-" in request.body else None
    model.when_prompt_has("-hangs-", wire.silent())
    async with MetricServer() as metrics:
        w = await running_worker(**reporting_to(metrics), ORG_ID="org-1", RABBITMQ_PREFETCH="4")
        sent = request_body("timed", payload=says("-timed-"))
        for body in (sent, request_body("refused", payload=says("-refused-")), request_body("no", timeout_s="soon")):
            await w.publish(body)
        await w.publish(request_body("again", payload=says("-again-")))
        await w.publish(request_body("hangs", payload=says("-hangs-")))
        timed = await record(metrics, "timed", "ack")
        refused = await record(metrics, "refused", "ack")
        invalid = await record(metrics, "no", "dead_letter")
        retried, then = await record(metrics, "again", "retry"), await record(metrics, "again", "ack")
        await w.stop()
        handed_back = await record(metrics, "hangs", "requeue")

    for batch in contents(metrics):
        jsonschema.validate(batch, schema("metric-batch"))
        assert [batch[name] for name in ("deployment_id", "replica_id", "user_id", "org_id", "hf_model_id")] == [
            *(w.env["DEPLOYMENT_ID"], "replica-1", "user-1", "org-1", "tiny")
        ]
    assert {(batch.path, batch.headers["authorization"]) for batch in metrics.batches} == {("/metrics", "Bearer t-1")}
    assert {batch.headers["content-type"] for batch in metrics.batches} == {"application/json"}
    assert {name: timed[name] for name in timed.keys() - {"finished_at", "queue_s", "model_s"}} == {
        **{"request_id": "timed", "status_code": 200, "status": "completed", "disposition": "ack", "attempt": 0},
        **{"received_at": sent["received_at"], "ttft_s": 0.25, "tbt_s": 0.5},
        **{"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12},
    }
    assert timed["finished_at"] >= timed["received_at"] + timed["queue_s"] + timed["model_s"] - 0.001
    assert (refused["status_code"], refused["status"], refused["total_tokens"]) == (422, "failed", None)
    assert (invalid["status_code"], invalid["status"], invalid["received_at"]) == (400, "failed", None)
    assert (retried["status"], retried["status_code"], retried["attempt"]) == (None, None, 0)
    assert (then["status"], then["attempt"]) == ("completed", 1)
    assert (handed_back["status"], handed_back["status_code"], handed_back["attempt"]) == (None, None, 0)


ANSWERED = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}}


def says(text: str) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}]}


async def test_the_health_in_a_batch_is_the_last_look(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 7: `health` (`healthy`, `checked_at`)."""
    async with MetricServer() as metrics:
        w = await running_worker(**reporting_to(metrics))
        await eventually(lambda: last(metrics)["health"]["healthy"], within=SOON_S, what="a healthy model")
        before = last(metrics)["health"]["checked_at"]

        model.sick()

        await eventually(lambda: not last(metrics)["health"]["healthy"], within=SOON_S, what="a sick model")
        await w.stop()
    final = last(metrics)
    assert before < final["health"]["checked_at"] <= final["sent_at"]


@pytest.mark.parametrize(
    ("name", "cache", "running", "waiting"),
    [
        ("vllm-0.32", 0.9230769230769231, 4, 2),
        ("vllm-0.8-legacy", 0.61, 8, 3),
        ("sglang-0.5", 0.62, 12, 3),
        ("tgi-3", 0.3125, 12, 3),
        ("llamacpp-b11549", None, 4, 3),
        ("triton-trtllm", 0.62, 12, 3),
        ("trtllm-serve", 0.62, 12, 3),
    ],
)
async def test_the_models_own_metrics_are_passed_on(
    name: str, cache: float | None, running: int, waiting: int, running_worker: RunningWorker, model: FakeModel
) -> None:
    """Section 7: `model`; section 2: without `VLLM_METRICS_URL` they come from `MODEL_CONTAINER_URL` + `/metrics`."""
    model.metrics_text = sample(name)
    async with MetricServer() as metrics:
        w = await running_worker(**reporting_to(metrics))
        await metrics.received()
        await w.stop()

    jsonschema.validate(contents(metrics)[0], schema("metric-batch"))
    assert contents(metrics)[0]["model"] == {
        "kv_cache_usage": cache,
        "requests_running": running,
        "requests_waiting": waiting,
    }


async def test_the_gpus_are_those_of_the_exporter(running_worker: RunningWorker) -> None:
    """Section 7: "`gpus[]` (from DCGM)", from `DCGM_METRICS_URL`."""
    async with MetricServer() as metrics, FakeModel() as exporter:
        exporter.metrics_text = sample("dcgm")
        w = await running_worker(**reporting_to(metrics, DCGM_METRICS_URL=f"{exporter.url}/metrics"))
        await metrics.received()
        await w.stop()

    jsonschema.validate(contents(metrics)[0], schema("metric-batch"))
    gpus = contents(metrics)[0]["gpus"]
    assert [(gpu["index"], gpu["utilization_percent"], gpu["memory_used_mib"], gpu["xid"]) for gpu in gpus] == [
        ("0", 97.0, 72001.0, 0),
        ("1", 41.0, 70544.0, 79),
    ]


async def test_the_queue_depth_is_what_nobody_holds(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 7: "`queue_depth` (ready messages)"."""
    model.sick()
    async with MetricServer() as metrics:
        w = await running_worker(ready=False, **reporting_to(metrics))
        await eventually(lambda: w.worker.listener.transport is not None, within=SOON_S, what="a connection")
        for number in range(3):
            await w.publish(request_body(f"r-{number}"))
        await eventually(lambda: last(metrics)["queue_depth"] == 3, within=SOON_S, what="three that wait")

        model.well()
        await w.disposed("ack", "ack", "ack")

        await eventually(lambda: last(metrics)["queue_depth"] == 0, within=SOON_S, what="an empty queue")
        await w.stop()


async def test_a_clean_stop_sends_what_is_there(
    running_worker: RunningWorker, model: FakeModel, billing: BillingServer
) -> None:
    """Section 7: "and once more on a clean stop", to both, of a request too that ended within the grace."""
    opened = asyncio.Event()
    model.when_prompt_has("-late-", wire.gated(opened, models.ok()))
    async with MetricServer() as metrics:
        env = reporting_to(metrics, **NEVER_BY_THE_CLOCK) | {"SHUTDOWN_GRACE_S": "10", "RABBITMQ_PREFETCH": "2"}
        w = await running_worker(**env)
        await w.publish(request_body("early"))
        await w.disposed("ack")
        await w.publish(request_body("late", payload=says("-late-")))
        await model.called(2)
        assert not metrics.batches

        w.told_to_stop()
        opened.set()
        await w.stop()

    assert [one["request_id"] for one in metrics.records] == ["early", "late"]
    assert len(metrics.batches) == 1
    assert request_ids(billing) == ["early", "late"]


# ---------------------------------------------------------------- billing


def request_ids(billing: BillingServer) -> list[str]:
    return sorted(str(one["data"]["request_id"]) for one in billing.events)  # type: ignore[index]


async def test_every_event_is_a_cloudevent_by_the_schema(
    running_worker: RunningWorker, model: FakeModel, billing: BillingServer
) -> None:
    """Section 7: `POST {CROESUS_HOST}/events`, a CloudEvents batch; its fields, `subject` and `operation`."""
    usage = {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}
    model.default = wire.answer(200, {"choices": [], "usage": usage})
    once = iter([wire.close_before_answer()])
    model.decide = lambda request: next(once, None) if b"-again-" in request.body else None
    w = await running_worker(ORG_ID="org-1")
    await w.publish(request_body("chat", tenant="tenant-1", payload=says("-again-")))
    await w.publish(request_body("text", endpoint="/v1/completions", payload={"prompt": "a"}))
    await w.publish(request_body("vector", endpoint="/v1/embeddings", payload={"input": "a"}))
    await billing.billed(3)
    await w.stop()

    for event in billing.events:
        jsonschema.validate(event, schema("usage-event"))
    assert {(batch.path, batch.headers["content-type"]) for batch in billing.batches} == {
        ("/events", "application/cloudevents-batch+json")
    }
    by_request: dict[str, Any] = {one["data"]["request_id"]: one for one in billing.events}  # type: ignore[index]
    assert {name: (one["subject"], one["data"]["operation"]) for name, one in by_request.items()} == {
        "chat": ("tenant-1", "chat"),
        "text": ("org-1", "text_completion"),
        "vector": ("org-1", "embeddings"),
    }
    data = by_request["chat"]["data"]
    assert {name: data[name] for name in data.keys() - {"duration_s", "queue_s"}} == {
        **{"request_id": "chat", "model": "tiny", "operation": "chat", "requests": 1},
        **{"input_tokens": 5, "output_tokens": 7, "total_tokens": 12, "cached_input_tokens": 3},
        **{"attempt": 1, "replica_id": "replica-1"},
    }
    assert {one["source"] for one in by_request.values()} == {
        f"urn:inference-worker:deployment:{w.env['DEPLOYMENT_ID']}"
    }
    assert {one["id"] for one in by_request.values()} == {"chat:usage", "text:usage", "vector:usage"}


async def test_without_tenant_and_organisation_the_user_is_billed(
    running_worker: RunningWorker, billing: BillingServer
) -> None:
    """Section 7: "`subject` = the message's `tenant`, else `ORG_ID`, else `USER_ID`"."""
    w: InProcess = await running_worker()
    await w.publish(request_body("r"))
    await billing.billed(1)
    await w.stop()

    assert [one["subject"] for one in billing.events] == ["user-1"]
