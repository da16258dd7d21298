"""The metric server and the billing receiver, slow, failing and gone: requests never wait, bills always arrive.

The numbers B… are those of the collected bug reports of other workers.
"""

import asyncio
import json
from dataclasses import replace

import pytest

from inference_worker.messages import Reply
from inference_worker.metrics_reporter import MetricsReporter
from inference_worker.results import redis as results_in_redis
from tests.conservation import Evidence, assert_conserved, outbox
from tests.faults import model as models
from tests.faults import wire
from tests.faults.sinks import Mode
from tests.faults.system import System
from tests.waiting import eventually


def dropped(system: System) -> int:
    """How many lost records the batches that arrived tell of."""
    told = [batch.content for batch in system.metrics.batches if batch.status == 204]
    return sum(int(content["dropped"]) for content in told if isinstance(content, dict))


async def refused(system: System) -> list[dict[str, object]]:
    entries = await system.redis.xrange(f"infer_usage_refused:{system.deployment_id}") or []
    return [json.loads((fields or {})[b"event"]) for _, fields in entries]


async def test_each_record_of_a_failing_metric_server_is_sent_or_counted(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B125: it fails, hangs and resets in turn, then works; requests do not notice."""
    defaults = MetricsReporter.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "timeout_s", 0.5)
    modes: tuple[Mode, ...] = ("status", "silent", "reset", "ok")
    ids = {mode: system.ids(5, mode) for mode in modes}
    async with system.inside(
        METRIC_SERVER_URL=system.metrics.url, METRIC_SERVER_SERVICE_TOKEN="token", METRICS_FLUSH_INTERVAL_S="0.1"
    ) as worker:
        for mode in modes:
            system.metrics.fail(mode, status=500)
            before = len(system.metrics.batches)
            await system.submit_when_declared(*ids[mode])
            await system.answered(ids[mode], within=5)
            # Two more batches: the second was begun after the last record was there.
            await eventually(lambda n=before: len(system.metrics.batches) > n + 2, within=15, what="three batches")  # type: ignore[misc]
        await system.drained(worker)
        await system.billed()

    await system.conserved()
    arrived = [str(record["request_id"]) for record in system.metrics.records]
    assert set(ids["ok"]) <= set(arrived)
    assert len(arrived) == len(set(arrived))
    assert len(arrived) + dropped(system) == 20
    assert dropped(system) >= 10


async def test_an_event_that_the_receiver_has_already_counts_as_sent(system: System) -> None:
    """B130: 409 is success."""
    known, other = system.ids(2)
    system.billing.already_has(known)
    async with system.inside() as worker:
        await system.submit_when_declared(known, other)
        await system.answered([known, other])
        await system.drained(worker)
        await system.billed()

    await system.conserved()
    assert not await refused(system)


@pytest.mark.parametrize(
    ("mode", "status", "headers"),
    [
        pytest.param("status", 503, {}, id="503"),
        pytest.param("status", 429, {"Retry-After": "1"}, id="429"),
        pytest.param("reset", 0, {}, id="reset"),
    ],
)
async def test_events_that_are_not_taken_now_are_kept_and_sent_later(
    mode: Mode, status: int, headers: dict[str, str], system: System
) -> None:
    """Billing is down while requests are answered as ever."""
    ids = system.ids(120)
    system.billing.fail(mode, status=status, headers=headers)
    async with system.inside(RABBITMQ_PREFETCH="32") as worker:
        await system.submit_when_declared(*ids)
        await system.answered(ids)
        await system.drained(worker)
        await system.billing.received(2)
        assert len(await outbox(system.redis, system.deployment_id)) == 120
        system.billing.work()
        await system.billed()

    await system.conserved()
    assert len({str(event["id"]) for event in system.billing.events}) == 120


async def test_one_event_that_is_refused_blocks_no_other_and_is_put_aside(system: System) -> None:
    """400 for a batch is an answer for none of its events: they go one by one, and the culprit goes aside."""
    bad, *good = system.ids(12)
    system.billing.reject(bad)
    async with system.inside() as worker:
        await system.submit_when_declared(bad, *good)
        await system.answered([bad, *good])
        await system.drained(worker)
        await system.billed()

    aside = await refused(system)
    evidence: Evidence = await system.evidence()
    assert_conserved(replace(evidence, billed=[*evidence.billed, *aside]))
    assert [event["data"]["request_id"] for event in aside if isinstance(event["data"], dict)] == [bad]
    assert {str(event["id"]) for event in system.billing.events}.isdisjoint({str(aside[0]["id"])})


async def test_events_of_a_killed_replica_are_sent_by_another(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """B133: they lie in Redis with their results, and whoever is left takes them over."""
    monkeypatch.setattr(results_in_redis, "LEFT_LYING_MS", 200)
    ids = system.ids(10)
    system.billing.fail("silent")
    async with system.worker("doomed") as doomed:
        await system.submit(*ids)
        await system.answered(ids)
        await system.billing.received()
        doomed.kill()
    system.billing.work()

    async with system.inside("heir") as heir:
        await system.drained(heir)
        await system.billed()

    await system.conserved()
    assert len({str(event["id"]) for event in system.billing.events}) == 10


async def test_with_billing_off_nothing_is_kept(system: System) -> None:
    ids = system.ids(5)
    async with system.inside(CROESUS_HOST="off") as worker:
        await system.submit_when_declared(*ids)
        await system.answered(ids)
        await system.drained(worker)

    assert not await system.redis.keys("infer_usage*")
    assert not system.billing.batches
    evidence = await system.evidence()
    assert not evidence.queued
    assert len(evidence.results) == 5


async def test_only_what_was_completed_with_tokens_is_billed(system: System) -> None:
    """B132: the policy, outcome by outcome; a call that was cut and then succeeded is billed once."""
    names = ("plain", "cut", "late", "refused", "broken", "exhausted", "unmetered", "cancelled", "expired")
    by_name = {name: system.ids(1, name)[0] for name in names}
    cut = iter([wire.close_after_headers()])
    opened = asyncio.Event()
    system.model.when_prompt_has("-refused", wire.error(400))
    system.model.when_prompt_has("-broken", wire.html())
    system.model.when_prompt_has("-exhausted", wire.half_body())
    system.model.when_prompt_has("-unmetered", models.ok(usage=False))
    system.model.when_prompt_has("-cancelled", wire.gated(opened, models.ok()))
    system.model.when_prompt_has("-late", wire.silent())
    system.model.decide = lambda request: next(cut, None) if b"-cut" in request.body else None
    async with system.inside(RABBITMQ_PREFETCH="16", CLAIM_LEASE_S="0.6") as worker:
        quick = {by_name["late"], by_name["expired"]}
        await system.submit_when_declared(*(one for one in by_name.values() if one not in quick))
        await system.submit(by_name["late"], timeout_s=0.5)
        await system.submit(by_name["expired"], timeout_s=0.000001)
        await eventually(
            lambda: by_name["cancelled"] in system.calls(), within=10, what="the call that is to be cancelled"
        )
        cancel = Reply(
            request_id=by_name["cancelled"],
            status="failed",
            status_code=499,
            attempt=0,
            replica_id="caller",
            finished_at=0.0,
            error="cancelled by the caller",
            error_code="cancelled",
        )
        await worker._stores.results.cancel(cancel)
        results = await system.answered(by_name.values())
        await system.drained(worker)
        await system.billed()

    await system.conserved()
    assert {name: result["status_code"] for name in names for result in [results[by_name[name]]]} == {
        "plain": 200,
        "cut": 200,
        "late": 408,
        "refused": 400,
        "broken": 502,
        "exhausted": 500,
        "unmetered": 200,
        "cancelled": 499,
        "expired": 408,
    }
    data = [event["data"] for event in system.billing.events]
    assert sorted(str(one["request_id"]) for one in data if isinstance(one, dict)) == sorted(
        [by_name["plain"], by_name["cut"]]
    )
