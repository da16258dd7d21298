"""Contract, section 6: the model's health, when messages flow and when not, and what the ops port says of it."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from inference_worker import listener
from tests.faults import wire
from tests.faults.model import FakeModel, ok
from tests.faults.proxy import Do, Unit
from tests.in_process import SOON_S, InProcess, request_body
from tests.integration.conftest import MakeProxy, RunningWorker
from tests.services import Rabbit, Redis, free_port
from tests.waiting import eventually

NO_LOOKS = {"HEALTH_CHECK_INTERVAL_S": "60"}
"""Looks are taken at the start and when somebody asks for one, not by the clock."""


@dataclass(frozen=True)
class Page:
    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


Get = Callable[[InProcess, str], Awaitable[Page]]


@pytest.fixture
async def get() -> AsyncGenerator[Get]:
    """`await get(w, "/readyz")`."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:

        async def page(w: InProcess, path: str) -> Page:
            async with session.get(f"http://127.0.0.1:{w.env['WORKER_HTTP_PORT']}{path}") as answer:
                return Page(answer.status, await answer.text())

        yield page


async def linked(w: InProcess) -> None:
    await eventually(lambda: w.worker.listener.transport is not None, within=15, what="a connection to RabbitMQ")


# ---------------------------------------------------------------- suspended and resumed


async def test_the_worker_starts_suspended_until_the_first_healthy_answer(
    running_worker: RunningWorker, model: FakeModel
) -> None:
    """Section 6: "The worker starts suspended until the first healthy answer"."""
    model.sick(status=503)
    w = await running_worker(ready=False)
    await linked(w)
    await w.publish(request_body("r"))

    await eventually(lambda: len(model.probes) >= 3, within=SOON_S, what="three looks")
    assert await w.at.broker.consumers(w.queue) == 0
    assert await w.at.broker.ready(w.queue) == 1
    model.well()
    await w.disposed("ack")

    assert not [
        line for line in w.at.log[: w.at.log.index(w.lines("the model is healthy")[0])] if line["event"] == "consuming"
    ]
    seen = await w.seen()
    assert (seen.result["attempt"], seen.calls) == (0, 1)


async def test_a_model_that_loads_burns_no_message(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 6 (B95): refused, then 503, 500, 404, then 200 with an empty body: all are answered at the first try."""
    await model.refuse()
    w = await running_worker(ready=False, HEALTH_CHECK_INTERVAL_S="0.1", RABBITMQ_MAX_RETRIES="0")
    await linked(w)
    for number in range(10):
        await w.publish(request_body(f"r-{number}"))

    await eventually(lambda: "Connect" in w.worker.model_health.reason, within=SOON_S, what="a refused look")
    model.sick(status=503)
    await model.listen()
    for status in (503, 500, 404):
        model.sick(status=status)
        await eventually(
            lambda said=f"HTTP {status}": w.worker.model_health.reason == said,  # type: ignore[misc]
            within=SOON_S,
            what=f"a look that finds {status}",
        )
    assert await w.at.broker.ready(w.queue) == 10
    model.sick("empty")
    await w.disposed(*["ack"] * 10)

    seen = await w.seen()
    assert seen.dispositions == ["ack"] * 10
    assert {result["attempt"] for result in seen.results.values()} == {0}
    assert {result["status"] for result in seen.results.values()} == {"completed"}


@pytest.mark.parametrize("status", [500, 503, 404, 302])
async def test_anything_but_a_2xx_suspends_at_once_and_calls_that_run_go_on(
    running_worker: RunningWorker, model: FakeModel, status: int
) -> None:
    """Section 6: suspended = `basic.cancel`: messages stay in the queue, in-flight ones finish; then it resumes."""
    opened = asyncio.Event()
    model.default = wire.gated(opened, ok())
    # Classic: a quorum queue counts a cancelled consumer for as long as it holds a message.
    w = await running_worker(RABBITMQ_PREFETCH="2", RABBITMQ_QUEUE_TYPE="classic")
    await w.publish(request_body("running"))
    await model.busy()

    model.sick(status=status)
    await w.suspended()
    assert w.worker.listener.suspended == {"model": f"HTTP {status}"}
    await w.publish(request_body("later"))
    await nobody_consumes(w)
    assert await w.at.broker.ready(w.queue) == 1
    opened.set()
    await w.disposed("ack")
    assert len(model.requests) == 1
    assert await w.at.broker.ready(w.queue) == 1
    model.well()
    await w.disposed("ack", "ack")

    seen = await w.seen()
    assert {name: result["attempt"] for name, result in seen.results.items()} == {"running": 0, "later": 0}
    assert (seen.calls, seen.billed) == (2, ["later", "running"])


async def nobody_consumes(w: InProcess) -> None:
    async def nobody() -> bool:
        return await w.at.broker.consumers(w.queue) == 0

    await eventually(nobody, within=SOON_S, what="no consumer on the queue")


async def test_while_one_is_suspended_another_replica_takes_the_messages(
    running_worker: RunningWorker, model: FakeModel
) -> None:
    """Section 6: "messages stay in the queue for other replicas"."""
    w = await running_worker()
    model.sick()
    await w.suspended()
    async with FakeModel() as other_model:
        other = await running_worker(REPLICA_ID="replica-2", MODEL_CONTAINER_URL=other_model.url)

        await other.publish(request_body("r"))
        result = await other.stored("r")

        assert result["replica_id"] == "replica-2"
        assert (len(model.requests), len(other_model.requests)) == (0, 1)
        await other.stop()


async def test_the_consumer_is_cancelled_and_the_connection_kept(
    running_worker: RunningWorker, model: FakeModel, rabbit: Rabbit, rabbitmq_url: str, proxy: MakeProxy
) -> None:
    """Section 6: "`basic.cancel` on the same channel"."""
    link = await proxy(rabbit, speaks="amqp")
    seen: list[int] = []

    def note(unit: Unit) -> bool:
        if unit.method in ("basic.cancel", "basic.consume"):
            seen.append(unit.channel)
        return False

    link.when_client_sends(note, Do.DROP)
    w = await running_worker(RABBITMQ_URL=link.url(rabbitmq_url))

    model.sick()
    await w.suspended()
    await eventually(lambda: len(seen) == 2, within=SOON_S, what="a cancel")
    model.well()
    await w.consuming()
    await eventually(lambda: len(seen) == 3, within=SOON_S, what="a consumer again")

    assert len(set(seen)) == 1, "one channel"
    assert link.accepted == 1, "one connection"


async def test_time_outs_suspend_only_in_a_row(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 6: `HEALTH_FAILURE_THRESHOLD` time-outs in a row, each the interval long."""
    w = await running_worker(HEALTH_CHECK_INTERVAL_S="0.2", HEALTH_FAILURE_THRESHOLD="3")

    model.forget_requests()
    model.sick("silent")
    await eventually(lambda: len(model.probes) == 2, within=SOON_S, what="a second look after one that got no answer")
    model.well()
    await eventually(lambda: len(model.probes) >= 4, within=SOON_S, what="looks that are answered")
    assert len(w.lines("consuming")) == 1
    assert not w.lines("suspended")[1:], "only at the start"

    model.sick("silent")
    model.forget_requests()
    await w.suspended()
    assert 3 <= len(model.probes) <= 4
    model.well()
    await w.consuming()


# ---------------------------------------------------------------- after a connection error


async def test_after_a_connection_error_the_health_is_asked_at_once(
    running_worker: RunningWorker, model: FakeModel
) -> None:
    """Section 6: "and at once after a connection error"; found healthy, consuming goes on."""
    w = await running_worker(**NO_LOOKS)
    model.forget_requests()
    model.next(wire.reset())

    await w.publish(request_body("r"))
    await w.disposed("retry", "ack")

    assert len(model.probes) == 1
    assert len(w.lines("consuming")) == 1


@pytest.mark.parametrize("behaviour", [wire.reset(), wire.half_body(), wire.close_before_answer()])
async def test_a_model_that_is_gone_is_known_before_the_copy_is_published(
    running_worker: RunningWorker, model: FakeModel, behaviour: Any
) -> None:
    """Section 5, after the table: "first asks `/health` … and suspends where it is gone, then publishes the copy"."""
    w = await running_worker(**NO_LOOKS)
    model.sick()
    model.default = behaviour

    await w.publish(request_body("r"))
    await w.disposed("retry")

    assert w.worker.listener.suspended == {"model": "HTTP 503"}
    await nobody_consumes(w)
    assert await w.at.broker.ready(w.queue) == 1
    assert len(model.requests) == 1


async def test_a_dead_model_does_not_burn_the_retries(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 5, after the table (B95): "it must not burn all retries by itself"."""
    w = await running_worker(RABBITMQ_PREFETCH="2", RABBITMQ_MAX_RETRIES="1", HEALTH_CHECK_INTERVAL_S="0.2")
    await model.refuse()

    for number in range(6):
        await w.publish(request_body(f"r-{number}"))
    await w.disposed("retry", within=20)
    await w.suspended()
    await nobody_consumes(w)
    await eventually(lambda: w.worker.listener.in_flight == 0, within=SOON_S, what="nothing in hand")
    assert await w.at.broker.ready(w.queue) == 6
    await model.listen()
    await w.disposed(*["ack"] * 6)

    seen = await w.seen()
    assert (seen.dispositions.count("dead_letter"), seen.dead, len(seen.results)) == (0, [], 6)
    assert {result["status"] for result in seen.results.values()} == {"completed"}
    assert seen.dispositions.count("retry") <= 2, "those that were in flight"


# ---------------------------------------------------------------- who the model is


@pytest.mark.parametrize(("served", "warnings"), [("tiny", 0), ("another", 1)])
async def test_the_model_is_asked_who_it_is_before_anything_is_consumed(
    running_worker: RunningWorker, model: FakeModel, served: str, warnings: int
) -> None:
    """One warning where it serves something else than `HF_MODEL_ID`, also after it was away."""
    model.model_id = served
    w = await running_worker(HF_MODEL_ID="tiny")
    model.sick()
    await w.suspended()
    model.well()
    await w.consuming()

    said = w.lines("the model serves something else than HF_MODEL_ID")
    assert len(said) == warnings
    for warning in said:
        assert (warning["expected"], warning["served"]) == ("tiny", ["another"])
        assert w.at.log.index(warning) < w.at.log.index(w.lines("consuming")[0])


async def test_the_health_path_and_the_key_are_used(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 2: `MODEL_HEALTH_PATH`, and `MODEL_API_KEY` as a bearer token."""
    w = await running_worker(MODEL_HEALTH_PATH="/ready", MODEL_API_KEY="k-1")

    await w.publish(request_body("r"))
    await w.disposed("ack")

    assert {probe.path for probe in model.probes} == {"/ready"}
    assert model.requests[0].headers["authorization"] == "Bearer k-1"
    assert "Bearer k-1" in {probe.headers.get("authorization") for probe in model.probes}


# ---------------------------------------------------------------- the ops port


async def test_the_ops_port_follows_every_neighbour(
    running_worker: RunningWorker,
    model: FakeModel,
    rabbit: Rabbit,
    rabbitmq_url: str,
    redis_server: Redis,
    redis_url: str,
    proxy: MakeProxy,
    get: Get,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Section 6: `/readyz` is 200 only while RabbitMQ and Redis answer and the model is healthy; `/livez` always is."""
    monkeypatch.setattr(listener, "FIRST_BACKOFF_S", 0.1)
    amqp, redis = await proxy(rabbit), await proxy(redis_server)
    for link in (amqp, redis, model):
        await link.refuse()
    w = await running_worker(
        ready=False,
        RABBITMQ_URL=amqp.url(rabbitmq_url),
        REDIS_URL=redis.url(redis_url),
        WORKER_HTTP_PORT=str(free_port()),
    )

    async def not_ready(*names: str) -> bool:
        try:
            page = await get(w, "/readyz")
        except aiohttp.ClientConnectionError:
            return False
        wrong = {name for name, condition in page.json["conditions"].items() if not condition["ok"]}
        assert wrong == set(names), page.text
        assert all(page.json["conditions"][name]["reason"] for name in names), page.text
        assert page.status == (503 if names else 200)
        assert page.json["ready"] is not bool(names)
        for path in ("/livez", "/healthz"):
            live = await get(w, path)
            assert (live.status, live.json) == (200, {"status": "alive"})
        return True

    async def becomes(*names: str) -> None:
        await eventually(lambda: not_ready(*names), within=SOON_S, what=f"not ready because of {names}")

    await becomes("rabbitmq", "redis", "model")
    await amqp.accept()
    await becomes("redis", "model")
    await redis.accept()
    await becomes("model")
    await model.listen()
    await becomes()
    model.sick()
    await becomes("model")
    model.well()
    await redis.refuse()
    await redis.cut()
    await becomes("redis")
    await redis.accept()
    await amqp.refuse()
    await amqp.cut()
    await becomes("rabbitmq")
    await amqp.accept()
    await becomes()


async def test_a_stopping_worker_is_alive_and_not_ready(
    running_worker: RunningWorker, model: FakeModel, get: Get
) -> None:
    """Section 6: "and the worker is not stopping"."""
    opened = asyncio.Event()
    model.default = wire.gated(opened, ok())
    w = await running_worker(WORKER_HTTP_PORT=str(free_port()), SHUTDOWN_GRACE_S="20")
    await w.publish(request_body("r"))
    await model.busy()
    assert (await get(w, "/readyz")).status == 200

    w.told_to_stop()
    await eventually(lambda: w.worker.listener.state == "stopping", within=SOON_S, what="the worker is stopping")

    ready, live, status = await get(w, "/readyz"), await get(w, "/livez"), await get(w, "/status")
    assert (ready.status, live.status) == (503, 200)
    assert ready.json["conditions"]["running"] == {"ok": False, "reason": "stopping"}
    assert (status.json["state"], status.json["in_flight"]) == ("stopping", 1)
    opened.set()
    await w.disposed("ack")
    await w.stop()


async def test_the_status_and_the_metrics_tell_the_state(
    running_worker: RunningWorker, model: FakeModel, get: Get
) -> None:
    """Sections 2 and 8: `/status` for people, `/metrics` for Prometheus, both of this very moment."""
    w = await running_worker(WORKER_HTTP_PORT=str(free_port()), RABBITMQ_PREFETCH="3")
    model.default = wire.silent()
    await w.publish(request_body("r"))
    await model.busy()

    status, metrics = (await get(w, "/status")).json, (await get(w, "/metrics")).text
    assert (status["state"], status["suspended"], status["in_flight"], status["slots"]) == ("consuming", {}, 1, 3)
    assert (status["queue"], status["replica_id"]) == (w.queue, "replica-1")
    for line in (
        'inference_worker_link_state{state="consuming"} 1.0',
        'inference_worker_suspended{reason="model"} 0.0',
        'inference_worker_up{peer="model"} 1.0',
        "inference_worker_in_flight_requests 1.0",
        'inference_worker_dispositions_total{disposition="ack"} 0.0',
    ):
        assert line in metrics.splitlines()

    model.sick()
    await w.suspended()
    status, metrics = (await get(w, "/status")).json, (await get(w, "/metrics")).text
    assert (status["state"], status["suspended"]) == ("suspended", {"model": "HTTP 503"})
    assert 'inference_worker_suspended{reason="model"} 1.0' in metrics.splitlines()
    assert 'inference_worker_link_state{state="suspended"} 1.0' in metrics.splitlines()
    missing = await get(w, "/nothing")
    assert (missing.status, missing.json["path"]) == (404, "/nothing")


# ---------------------------------------------------------------- unreachable, at the start or later

NO_LINK = "no connection to the broker; trying again"


async def test_an_unreachable_broker_is_tried_for_ever_with_one_warning(
    running_worker: RunningWorker,
    rabbit: Rabbit,
    rabbitmq_url: str,
    proxy: MakeProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Section 5, after the table: "backoff for ever, one warning per change of reason, not ready"."""
    monkeypatch.setattr(listener, "FIRST_BACKOFF_S", 0.05)
    link = await proxy(rabbit, speaks="amqp")
    cut = link.when_client_sends(lambda unit: unit.raw.startswith(b"AMQP"), Do.CUT, times=1000)
    w = await running_worker(ready=False, RABBITMQ_URL=link.url(rabbitmq_url))

    await eventually(lambda: cut.hits >= 4, within=SOON_S, what="four tries")
    assert len(w.lines(NO_LINK)) == 1
    assert not w.worker.ready()["rabbitmq"][0]
    link.clear_traps()
    await w.consuming()

    assert w.worker.ready()["rabbitmq"][0]


async def test_refused_credentials_are_tried_for_ever_and_read_again(
    running_worker: RunningWorker,
    rabbit: Rabbit,
    rabbitmq_url: str,
    proxy: MakeProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Section 5, after the table: "refusing the credentials"; section 2: a `_FILE` is read at each reconnect."""
    monkeypatch.setattr(listener, "FIRST_BACKOFF_S", 0.05)
    link = await proxy(rabbit, speaks="amqp")
    secret = tmp_path / "url"
    secret.write_text(f"amqp://guest:wr0ng@{link.host}:{link.port}/\n")
    w = await running_worker(ready=False, RABBITMQ_URL="", RABBITMQ_URL_FILE=str(secret))

    await eventually(lambda: link.accepted >= 3, within=SOON_S, what="three tries")
    (warning,) = w.lines(NO_LINK)
    assert "refused the credentials" in warning["reason"]
    secret.write_text(f"{link.url(rabbitmq_url)}\n")
    await w.consuming()

    assert "wr0ng" not in repr(w.at.log)


async def test_an_unreachable_store_is_waited_for_with_one_warning(
    running_worker: RunningWorker, redis_server: Redis, redis_url: str, proxy: MakeProxy
) -> None:
    """Section 5, after the table, for Redis: nothing is consumed before it answers."""
    link = await proxy(redis_server)
    await link.refuse()
    w = await running_worker(ready=False, REDIS_URL=link.url(redis_url))
    await linked(w)
    await w.publish(request_body("r"))

    await eventually(lambda: not w.worker.store_health.ok and w.worker.store_health.checked_at, within=5, what="a look")
    await w.suspended()
    assert await w.at.broker.ready(w.queue) == 1
    await link.accept()
    await w.disposed("ack")

    assert (await w.seen()).result["attempt"] == 0
    assert len(w.lines("the result store does not answer; consuming pauses")) <= 1
