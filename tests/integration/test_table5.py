"""Contract, section 5: what becomes of a message. One test or parameter for each row, in the table's order.

Each runs a real worker against a real RabbitMQ and a real Redis, and looks at the stored result, at the queue and the
dead letters, at what the model was asked, and at what was billed. The ids of reported bugs are those of
`reference/bug-reports.md`.
"""

import asyncio
import gzip
import json
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker.assembly import redis_stores
from inference_worker.config.settings import load
from inference_worker.messages import Reply
from inference_worker.model_client import HttpModelClient
from inference_worker.ports import Answer, Stored
from tests.faults import wire
from tests.faults.model import FakeModel, ok, sse, sse_error, sse_shed, sse_without_end
from tests.faults.processes import WorkerProcess
from tests.faults.proxy import Do
from tests.faults.wire import Behaviour
from tests.in_process import COMPLETED_KEYS, FAILED_KEYS, INVALID_KEYS, SOON_S, InProcess, Seen, request_body
from tests.integration.conftest import MakeProxy, OwnRedis, RunningWorker
from tests.services import Rabbit, Redis, free_port
from tests.waiting import eventually
from tests.worker_env import worker_env

ODD_IDS = (
    pytest.param("with spaces in it", id="spaces"),
    pytest.param("a/b/../c", id="slashes"),
    pytest.param("a:b:c", id="colons"),
    pytest.param("🚀 naïve", id="emoji"),
    pytest.param("x" * 512, id="512 bytes"),
    pytest.param("é" * 256, id="512 bytes of two-byte characters"),
    pytest.param("job-{tag}-1", id="a hash tag of its own"),
    pytest.param("}{", id="braces that are no tag"),
    pytest.param("%s %n \\ \" '", id="quotes and percents"),
)


def claim_of(request_id: str) -> str:
    return f"infer_claim:{{infer_resp:{request_id}}}"


async def foreign_claim(redis: RedisClient, request_id: str, *, lease_s: float, **fields: int) -> None:
    """Put another worker's claim where ours would be."""
    seconds, micros = await redis.time()
    until = seconds * 1000 + micros // 1000 + round(lease_s * 1000)
    claim: dict[str, str | int] = {"holder": "another", "until": until, "starts": 1, **fields}
    await redis.hset(claim_of(request_id), mapping=claim)  # type: ignore[arg-type]  # Its keys may be more than text.
    await redis.pexpire(claim_of(request_id), 600_000)


async def put_result(redis: RedisClient, request_id: str, **changes: object) -> bytes:
    """Store a terminal result as another worker would have."""
    result = {"status": "completed", "status_code": 200, "result": {"n": 1}, "request_id": request_id, "attempt": 0}
    stored = json.dumps(result | changes, separators=(",", ":")).encode()
    await redis.set(f"infer_resp:{request_id}", stored, ex=600)
    return stored


def failed_with(code: str, status_code: int, **changes: object) -> dict[str, object]:
    return {"status": "failed", "status_code": status_code, "error": "no", "error_code": code, **changes}


def nothing_done(seen: Seen) -> bool:
    return seen.calls == 0 and seen.billed == [] and seen.queued == []


# ---------------------------------------------------------------- row 1: malformed

BAD = "request_id must be"


def without(*names: str, **changes: object) -> bytes:
    return json.dumps(request_body(**dict.fromkeys(names, ...), **changes)).encode()


def as_json(text: str) -> bytes:
    """A request with a piece of JSON that Python's writer would not write."""
    return without(HERE=0).replace(b'"HERE": 0', text.encode())


NOT_READABLE = (
    pytest.param(b"", "the message must be JSON", id="B61 empty"),
    pytest.param(b"null", "the message must be a JSON object", id="B61 null"),
    pytest.param(b"[]", "the message must be a JSON object", id="B61 array"),
    pytest.param(b'"x"', "the message must be a JSON object", id="B61 string"),
    pytest.param(b"42", "the message must be a JSON object", id="B61 number"),
    pytest.param(b"{}", BAD, id="B61 empty object"),
    pytest.param(json.dumps(request_body()).encode("utf-16"), "the message must be", id="B61 UTF-16"),
    pytest.param(b"\xef\xbb\xbf" + json.dumps(request_body()).encode(), "the message must be JSON", id="B61 BOM"),
    pytest.param(json.dumps(request_body()).encode() + b"}", "the message must be JSON", id="B61 trailing garbage"),
    pytest.param(json.dumps(request_body()).encode()[:-1], "the message must be JSON", id="cut short"),
    pytest.param(gzip.compress(json.dumps(request_body()).encode()), "the message must be UTF-8", id="B61 gzip"),
    pytest.param(b"\xff\xfe\xff", "the message must be UTF-8", id="B61 0xff"),
    pytest.param(b"[" * 50_000, "the message must be", id="nested without end"),
    pytest.param(without("request_id"), BAD, id="no id"),
    pytest.param(without(request_id=7), BAD, id="B62 id is a number"),
    pytest.param(without(request_id=None), BAD, id="id is null"),
    pytest.param(without(request_id=["r"]), BAD, id="id is an array"),
    pytest.param(without(request_id=""), BAD, id="B62 id is empty"),
    pytest.param(without(request_id="x" * 10_000), BAD, id="B62 id of 10 kB"),
    pytest.param(without(request_id="x" * 513), BAD, id="id of 513 bytes"),
    pytest.param(without(request_id="é" * 257), BAD, id="id of 257 two-byte characters"),
    pytest.param(without(request_id="a\nb"), BAD, id="B62 id with a newline"),
    pytest.param(without(request_id="a\x00b"), BAD, id="id with a zero byte"),
    pytest.param(without(request_id="a\x7fb"), BAD, id="id with DEL"),
    pytest.param(without().replace(b'"r"', b'"\\ud800"'), BAD, id="id with half a surrogate"),
    pytest.param(as_json('"x": NaN'), "the message must be JSON", id="B65 NaN beside the payload"),
    pytest.param(
        without().replace(b'"tiny"', b"NaN"), "the message must be JSON", id="B65 NaN in the payload: that is no JSON"
    ),
    pytest.param(without().replace(b'"tiny"', b"-Infinity"), "the message must be JSON", id="B65 Infinity in it"),
)

WRONG_FIELDS = (
    pytest.param(without("payload"), "payload is missing", id="no payload"),
    pytest.param(without(payload=None), "payload must be a JSON object", id="B62 payload is null"),
    pytest.param(without(payload=[]), "payload must be a JSON object", id="B62 payload is an array"),
    pytest.param(without(payload="{}"), "payload must be a JSON object", id="payload is a string"),
    pytest.param(without("timeout_s"), "timeout_s must be a finite number", id="no timeout_s"),
    pytest.param(without(timeout_s="60"), "timeout_s must be a finite number", id="timeout_s is a string"),
    pytest.param(without(timeout_s=True), "timeout_s must be a finite number", id="timeout_s is a boolean"),
    pytest.param(without(timeout_s=None), "timeout_s must be a finite number", id="timeout_s is null"),
    pytest.param(without(timeout_s=0), "timeout_s must be above 0", id="timeout_s is 0"),
    pytest.param(without(timeout_s=-0.5), "timeout_s must be above 0", id="timeout_s is negative"),
    pytest.param(without(timeout_s=10**400), "timeout_s must be a finite number", id="timeout_s beyond any float"),
    pytest.param(without("timeout_s", HERE=0).replace(b'"HERE": 0', b'"timeout_s": 1e999'), "timeout_s", id="1e999"),
    pytest.param(without("received_at"), "received_at must be a finite number", id="no received_at"),
    pytest.param(without(received_at="now"), "received_at must be a finite number", id="received_at is a string"),
    pytest.param(without(received_at=False), "received_at must be a finite number", id="received_at is a boolean"),
    pytest.param(without(received_at={}), "received_at must be a finite number", id="received_at is an object"),
    pytest.param(without(endpoint="/v1/models"), "endpoint must be one of", id="an endpoint outside the list"),
    pytest.param(without(endpoint="v1/embeddings"), "endpoint must be one of", id="an endpoint without its slash"),
    pytest.param(without(endpoint="/v1/embeddings?x=1"), "endpoint must be one of", id="an endpoint with a query"),
    pytest.param(without(endpoint=None), "endpoint must be one of", id="endpoint is null"),
    pytest.param(without(endpoint=["/v1/embeddings"]), "endpoint must be one of", id="endpoint is an array"),
    pytest.param(without(metadata=[]), "metadata must be an object", id="metadata is an array"),
    pytest.param(without(metadata={"a": 1}), "metadata must be an object", id="a number in metadata"),
    pytest.param(without(metadata=None), "metadata must be an object", id="metadata is null"),
    pytest.param(without(tenant=7), "tenant must be a string", id="tenant is a number"),
    pytest.param(without(tenant=None), "tenant must be a string", id="tenant is null"),
)


@pytest.mark.parametrize(("body", "why"), NOT_READABLE)
async def test_a_message_without_a_usable_id_is_answered_under_its_message_id(
    running_worker: RunningWorker, body: bytes, why: str
) -> None:
    """Section 5, row 1 (B61, B62, B65): failed 400 under the AMQP `message_id`, rejected into the DLQ."""
    w = await running_worker()

    await w.publish(body, message_id="m-1")
    await w.disposed("dead_letter")

    seen = await w.seen(dead=1)
    assert list(seen.results) == ["m-1"]
    assert tuple(seen.result) == INVALID_KEYS
    assert (seen.result["status"], seen.result["status_code"]) == ("failed", 400)
    assert (seen.result["error_code"], seen.result["attempt"]) == ("invalid_request", 0)
    assert seen.result["error"].startswith(why)
    assert [message.body for message in seen.dead] == [body]
    assert nothing_done(seen)


@pytest.mark.parametrize("message_id", [None, "", "a\nb", "x" * 100 + "\x00"])
async def test_a_message_without_any_usable_id_is_only_dead_lettered(
    running_worker: RunningWorker, message_id: str | None
) -> None:
    """Section 5, row 1: "else none"."""
    w = await running_worker()

    await w.publish(b"hello", message_id=message_id)
    await w.disposed("dead_letter")

    seen = await w.seen(dead=1)
    assert seen.results == {}
    assert nothing_done(seen)


@pytest.mark.parametrize(("body", "why"), WRONG_FIELDS)
async def test_a_request_with_a_wrong_field_is_answered_under_its_request_id(
    running_worker: RunningWorker, body: bytes, why: str
) -> None:
    """Section 5, row 1 (B62, B65): failed 400 that names the field, rejected into the DLQ."""
    w = await running_worker()

    await w.publish(body, message_id="m-1")
    await w.disposed("dead_letter")

    seen = await w.seen(dead=1)
    assert list(seen.results) == ["r"]
    assert tuple(seen.result) == INVALID_KEYS
    assert (seen.result["status"], seen.result["status_code"]) == ("failed", 400)
    assert (seen.result["error_code"], seen.result["attempt"]) == ("invalid_request", 0)
    assert seen.result["error"].startswith(why)
    assert [message.body for message in seen.dead] == [body]
    assert nothing_done(seen)


async def test_a_malformed_repeat_of_an_answered_request_leaves_the_answer_alone(
    running_worker: RunningWorker, redis_client: RedisClient
) -> None:
    """Section 5, row 1, and invariant 2: rejected all the same, and the terminal result is not replaced."""
    before = await put_result(redis_client, "r")
    w = await running_worker()

    await w.publish(without(payload=7))
    await w.disposed("dead_letter")

    assert await redis_client.get("infer_resp:r") == before
    assert len((await w.seen(dead=1)).dead) == 1


async def test_a_good_message_behind_bad_ones_is_answered(running_worker: RunningWorker) -> None:
    """Section 5, row 1 (B61): a message that nobody can read costs the next one nothing."""
    w = await running_worker()

    for body in (b"", b"\xff", b"null", without("payload")):
        await w.publish(body)
    await w.publish(request_body("good"))
    await w.disposed("ack")

    seen = await w.seen(dead=4)
    assert seen.dispositions == ["dead_letter"] * 4 + ["ack"]
    assert seen.results["good"]["status"] == "completed"


@pytest.mark.parametrize("request_id", ODD_IDS)
async def test_an_odd_id_that_is_usable_is_used(running_worker: RunningWorker, request_id: str) -> None:
    """Section 3 (B62): "1–512 bytes of UTF-8 without control characters"; any such id names a request."""
    w = await running_worker()

    await w.publish(request_body(request_id))
    await w.disposed("ack")

    seen = await w.seen()
    assert list(seen.results) == [request_id]
    assert (seen.result["status"], seen.result["request_id"]) == ("completed", request_id)
    assert (seen.calls, seen.billed, seen.dead) == (1, [request_id], [])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"payload": {}}, id="an empty payload"),
        pytest.param({"payload": {"messages": []}}, id="B62 no messages"),
        pytest.param({"payload": {"messages": "hello"}}, id="B62 messages are a string"),
        pytest.param({"payload": {"messages": [{"content": None}]}}, id="B62 a null inside"),
        pytest.param({"unknown": {"a": [1]}, "priority": 7}, id="B62 unknown fields"),
        pytest.param({"metadata": {}}, id="empty metadata"),
        pytest.param({"metadata": {"a": "b"}, "tenant": ""}, id="an empty tenant"),
        pytest.param({"timeout_s": 10**12}, id="a time-out beyond 30 days"),
        pytest.param({"payload": {"prompt": "\ud800"}}, id="half a surrogate, which JSON can write"),
    ],
)
async def test_what_is_the_models_to_judge_goes_to_the_model(
    running_worker: RunningWorker, model: FakeModel, changes: dict[str, object]
) -> None:
    """Section 3 (B62): unknown fields are ignored, and the payload is not ours to validate."""
    w = await running_worker()

    await w.publish(request_body("r", **changes))
    await w.disposed("ack")

    seen = await w.seen()
    assert (seen.result["status"], seen.calls, seen.dead) == ("completed", 1, [])
    assert model.requests[0].json == changes.get("payload", request_body()["payload"])


async def test_a_content_encoding_that_is_not_so_is_not_believed(running_worker: RunningWorker) -> None:
    """Section 3 (B61): the body is UTF-8 JSON, whatever `content_encoding` says."""
    w = await running_worker()

    await w.publish(request_body("r"), content_encoding="gzip")
    await w.disposed("ack")

    assert (await w.seen()).result["status"] == "completed"


# ---------------------------------------------------------------- row 2: expired


async def test_an_expired_request_is_failed_408_and_acknowledged(running_worker: RunningWorker) -> None:
    """Section 5, row 2."""
    w = await running_worker()

    await w.publish(request_body("r", received_at=time.time() - 100, timeout_s=60), headers={"x-retry-count": 1})
    await w.disposed("ack")

    seen = await w.seen()
    assert tuple(seen.result) == FAILED_KEYS
    assert (seen.result["status"], seen.result["status_code"]) == ("failed", 408)
    assert (seen.result["error_code"], seen.result["attempt"]) == ("expired", 1)
    assert seen.result["error"] == "the deadline had passed before it could be tried again; 1 try failed"
    assert nothing_done(seen)
    assert seen.dead == []


async def test_an_expired_request_that_runs_elsewhere_is_not_failed(
    running_worker: RunningWorker, redis_client: RedisClient
) -> None:
    """Section 5, after the table: a failure may not be stored while another rightly runs the request."""
    await foreign_claim(redis_client, "r", lease_s=30)
    w = await running_worker()

    await w.publish(request_body("r", received_at=time.time() - 100))
    await eventually(lambda: w.worker.listener.in_flight == 1, within=SOON_S, what="the message has come")
    before = await put_result(redis_client, "r")
    await w.disposed("ack")

    assert await redis_client.get("infer_resp:r") == before
    assert nothing_done(await w.seen())


@pytest.mark.parametrize("claim", [{"floor": 1}, {"starts": 3}], ids=["older", "poison"])
async def test_that_it_has_expired_comes_before_the_rows_below(
    running_worker: RunningWorker, redis_client: RedisClient, claim: dict[str, int]
) -> None:
    """Section 5: "The first row that fits, from the top"; an older attempt or a poisonous one is expired first."""
    await foreign_claim(redis_client, "r", lease_s=-1, **claim)
    w = await running_worker()

    await w.publish(request_body("r", received_at=time.time() - 100))
    await w.disposed("ack")

    seen = await w.seen()
    assert (seen.result["status_code"], seen.result["error_code"], seen.calls) == (408, "expired", 0)


# ---------------------------------------------------------------- row 3: a terminal result exists


@pytest.mark.parametrize("age_s", [0, 3600], ids=["in time", "expired"])
@pytest.mark.parametrize(
    ("result", "attempt"),
    [
        pytest.param({}, 0, id="completed"),
        pytest.param({}, 5, id="completed, a later attempt"),
        pytest.param(failed_with("model_error", 400), 0, id="model_error"),
        pytest.param(failed_with("bad_response", 502), 0, id="bad_response"),
        pytest.param(failed_with("expired", 408), 0, id="expired"),
        pytest.param(failed_with("deadline_exceeded", 408), 1, id="deadline_exceeded"),
        pytest.param(failed_with("cancelled", 499), 0, id="cancelled"),
        pytest.param(failed_with("invalid_request", 400), 0, id="invalid_request"),
        pytest.param(failed_with("retries_exhausted", 500, attempt=1), 0, id="retries_exhausted, an older attempt"),
        pytest.param(failed_with("poison", 500, attempt=2), 1, id="poison, an older attempt"),
    ],
)
async def test_an_answered_request_is_acknowledged(
    running_worker: RunningWorker, redis_client: RedisClient, result: dict[str, object], attempt: int, age_s: int
) -> None:
    """Section 5, row 3: left alone; the model is not called, nothing is billed again. Also where it has expired."""
    before = await put_result(redis_client, "r", **result)
    w = await running_worker()

    await w.publish(request_body("r", received_at=time.time() - age_s), headers={"x-retry-count": attempt})
    await w.disposed("ack")

    assert await redis_client.get("infer_resp:r") == before
    seen = await w.seen()
    assert nothing_done(seen)
    assert seen.dead == []


@pytest.mark.parametrize("code", ["retries_exhausted", "poison"])
@pytest.mark.parametrize("attempt", [1, 2], ids=["the same attempt", "a later one"])
async def test_a_lost_reject_is_made_good(
    running_worker: RunningWorker, redis_client: RedisClient, code: str, attempt: int
) -> None:
    """Section 5, row 3: "rejected → DLQ, since the first reject was lost"."""
    before = await put_result(redis_client, "r", **failed_with(code, 500, attempt=1))
    w = await running_worker()

    await w.publish(request_body("r"), headers={"x-retry-count": attempt})
    await w.disposed("dead_letter")

    assert await redis_client.get("infer_resp:r") == before
    seen = await w.seen(dead=1)
    assert nothing_done(seen)


async def test_a_lost_ack_costs_no_second_call_and_no_second_bill(
    running_worker: RunningWorker, rabbit: Rabbit, rabbitmq_url: str, proxy: MakeProxy
) -> None:
    """Section 5, row 3 (B90): the result is stored, the ack is lost, the message comes again."""
    link = await proxy(rabbit, speaks="amqp")
    w = await running_worker(RABBITMQ_URL=link.url(rabbitmq_url))
    lost = link.when_client_sends("basic.ack", Do.CUT)

    await w.publish(request_body("r"))
    await lost.sprung()
    await eventually(lambda: len(w.dispositions) >= 2 or link.accepted > 1, within=SOON_S, what="a new connection")
    await eventually(lambda: "Answered" in outcomes(w), within=SOON_S, what="the redelivery")

    seen = await w.seen()
    assert (seen.calls, seen.billed, seen.queued, seen.dead) == (1, ["r"], [], [])


def outcomes(w: InProcess) -> list[str]:
    return [str(line["outcome"]) for line in w.lines("request")]


# ---------------------------------------------------------------- row 4: an older attempt


async def test_an_older_attempt_is_acknowledged_without_a_result(
    running_worker: RunningWorker, redis_client: RedisClient
) -> None:
    """Section 5, row 4: a copy with a higher attempt was confirmed by the broker."""
    await redis_client.hset(claim_of("r"), mapping={"floor": 1})
    w = await running_worker()

    await w.publish(request_body("r"))
    await w.disposed("ack")

    seen = await w.seen()
    assert seen.results == {}
    assert nothing_done(seen)
    assert seen.dead == []


async def test_the_attempt_at_the_floor_runs(running_worker: RunningWorker, redis_client: RedisClient) -> None:
    """Section 5, row 4: only *below* the floor is older."""
    await redis_client.hset(claim_of("r"), mapping={"floor": 1})
    w = await running_worker()

    await w.publish(request_body("r"), headers={"x-retry-count": 1})
    await w.disposed("ack")

    seen = await w.seen()
    assert (seen.result["status"], seen.result["attempt"], seen.calls) == ("completed", 1, 1)


# ---------------------------------------------------------------- row 5: running elsewhere


async def test_a_request_that_runs_elsewhere_waits_for_the_answer(
    running_worker: RunningWorker, redis_client: RedisClient
) -> None:
    """Section 5, row 5: waits, unacknowledged, for the answer; then row 3."""
    await foreign_claim(redis_client, "r", lease_s=60)
    w = await running_worker()

    await w.publish(request_body("r"))
    await eventually(lambda: w.worker.listener.in_flight == 1, within=SOON_S, what="the message is held")
    await eventually(lambda: waiting(w) == 1, within=SOON_S, what="it waits for the other worker")
    assert w.dispositions == []
    before = await put_result(redis_client, "r")
    await w.disposed("ack")

    assert await redis_client.get("infer_resp:r") == before
    assert nothing_done(await w.seen())


async def test_a_request_whose_runner_died_runs_when_its_lease_has_lapsed(
    running_worker: RunningWorker, model: FakeModel, redis_client: RedisClient
) -> None:
    """Section 5, row 5: "or for the runner's lease to lapse, then runs it". Renewed leases are waited for, too."""
    begun = time.monotonic()
    await foreign_claim(redis_client, "r", lease_s=0.6)
    w = await running_worker()

    await w.publish(request_body("r"))
    await eventually(lambda: waiting(w) == 1, within=SOON_S, what="it waits for the other worker")
    await foreign_claim(redis_client, "r", lease_s=1.2)
    renewed = time.monotonic()
    await w.disposed("ack")

    assert model.requests[0].arrived_at - begun >= 0.6
    assert model.requests[0].arrived_at - renewed >= 1.1
    seen = await w.seen()
    assert (seen.result["status"], seen.result["attempt"], seen.calls) == ("completed", 0, 1)
    assert seen.billed == ["r"]


def metric(w: InProcess, name: str) -> float:
    """A metric without labels, as Prometheus would read it."""
    page = w.worker.metrics.exposition("")[0].decode()
    (line,) = [line for line in page.splitlines() if line.startswith(f"inference_worker_{name} ")]
    return float(line.split()[1])


def waiting(w: InProcess) -> float:
    """Deliveries that wait for another worker's claim."""
    return metric(w, "claims_waiting")


async def test_a_running_worker_renews_its_lease(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 5, row 5: the lease is renewed every third of it, so that a second worker waits as long as it takes."""
    opened = asyncio.Event()
    model.default = wire.gated(opened, ok())
    one = await running_worker(CLAIM_LEASE_S="0.6")
    await one.publish(request_body("r"))
    await model.busy()
    two = await running_worker(CLAIM_LEASE_S="0.6", REPLICA_ID="replica-2")

    await two.publish(request_body("r"))
    begun = time.monotonic()
    await eventually(lambda: waiting(two) == 1, within=SOON_S, what="the second worker waits")
    await eventually(lambda: time.monotonic() - begun > 1.8, within=5, what="three leases have passed")
    opened.set()
    await two.disposed("ack", "ack")

    await one.stop()
    seen = await two.seen()
    assert (seen.calls, seen.billed) == (1, ["r"])
    assert seen.result["replica_id"] == "replica-1"


async def test_in_the_same_process_it_joins_the_call_that_runs(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 5, row 5: duplicates in one process are one call, and all of them are acknowledged."""
    opened = asyncio.Event()
    model.default = wire.gated(opened, ok())
    w = await running_worker(RABBITMQ_PREFETCH="3")

    for _ in range(3):
        await w.publish(request_body("r"))
    await eventually(lambda: metric(w, "joined_total") == 2, within=SOON_S, what="two have joined the first")
    assert (waiting(w), model.in_flight) == (0, 1)
    opened.set()
    await w.disposed("ack", "ack", "ack")

    seen = await w.seen()
    assert (seen.calls, seen.billed, seen.dead) == (1, ["r"], [])
    assert seen.result["status"] == "completed"


# ---------------------------------------------------------------- row 6: the store cannot be asked


async def _stopped(server: Redis, client: RedisClient) -> None:
    await asyncio.to_thread(server.stop)


async def _started(server: Redis, client: RedisClient) -> None:
    await asyncio.to_thread(server.start)


async def _readonly(server: Redis, client: RedisClient) -> None:
    await client.replicaof("127.0.0.1", str(free_port()))


async def _primary(server: Redis, client: RedisClient) -> None:
    await client.replicaof("NO", "ONE")


async def _full(server: Redis, client: RedisClient) -> None:
    await client.config_set("maxmemory", "1")


async def _roomy(server: Redis, client: RedisClient) -> None:
    await client.config_set("maxmemory", "0")


async def _locked(server: Redis, client: RedisClient) -> None:
    await client.config_set("requirepass", "s3cret")
    await client.client_kill_filter(_type="normal", skipme=True)


async def _unlocked(server: Redis, client: RedisClient) -> None:
    await client.config_set("requirepass", "")


Turn = Callable[[Redis, RedisClient], Awaitable[None]]


@pytest.mark.parametrize(
    ("breaks", "mends", "reason"),
    [
        pytest.param(_stopped, _started, "", id="stopped"),
        pytest.param(_readonly, _primary, "ReadOnly", id="a replica (READONLY)"),
        pytest.param(_full, _roomy, "OutOfMemory", id="out of memory (OOM)"),
        pytest.param(_locked, _unlocked, "Redis refused the credentials", id="a password (NOAUTH)"),
    ],
)
async def test_without_a_store_consuming_pauses_until_it_answers(
    running_worker: RunningWorker, own_redis: OwnRedis, breaks: Turn, mends: Turn, reason: str
) -> None:
    """Section 5, row 6: "the model is not called; consuming pauses until Redis answers"."""
    server = await own_redis()
    async with RedisClient.from_url(server.url, socket_timeout=None) as client:
        w = await running_worker(REDIS_URL=server.url, redis=client)

        await breaks(server, client)
        await w.suspended()
        assert set(w.worker.listener.suspended) == {"store"}
        assert reason in w.worker.listener.suspended["store"]
        await w.publish(request_body("r"))
        assert await w.at.broker.ready(w.queue) == 1
        await mends(server, client)
        await w.disposed("ack")

        seen = await w.seen()
        assert (seen.result["status"], seen.result["attempt"], seen.calls) == ("completed", 0, 1)
        assert (seen.billed, seen.dispositions) == (["r"], ["ack"])


class Loading:
    """A Redis that loads its data, and says so to every command."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readline():
                for _ in range(int(head[1:])):
                    size = int((await reader.readline())[1:])
                    await reader.readexactly(size + 2)
                writer.write(b"-LOADING Redis is loading the dataset in memory\r\n")
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def test_a_store_that_is_loading_its_data_is_waited_for(
    running_worker: RunningWorker, redis_server: Redis, redis_url: str, proxy: MakeProxy
) -> None:
    """Section 5, row 6, and after the table: Redis unreachable at the start is waited for, and the worker not ready."""
    stub = await asyncio.start_server(Loading().serve, "127.0.0.1", 0)
    async with stub:
        link = await proxy(("127.0.0.1", stub.sockets[0].getsockname()[1]))
        w = await running_worker(REDIS_URL=link.url(redis_url), ready=False)
        await eventually(
            lambda: "LOADING" in w.worker.store_health.reason or "Busy" in w.worker.store_health.reason,
            within=SOON_S,
            what="the worker knows that Redis is loading",
        )
        assert not w.worker.ready()["redis"][0]

        link.server_host, link.server_port = redis_server.host, redis_server.port
        await link.cut()
        await w.consuming()
        await w.publish(request_body("r"))
        await w.disposed("ack")

        assert (await w.seen()).result["status"] == "completed"


async def test_a_message_that_came_just_before_an_outage_is_handed_back(
    running_worker: RunningWorker, redis_server: Redis, redis_url: str, proxy: MakeProxy
) -> None:
    """Section 5, row 6: "asked again for `REDIS_RETRY_DELAY_S`, then nack, requeue"; then it is answered once."""
    link = await proxy(redis_server, speaks="redis")
    w = await running_worker(REDIS_URL=link.url(redis_url), REDIS_RETRY_DELAY_S="0.5")

    link.silence()
    await link.cut()
    await link.refuse()
    await w.publish(request_body("r"))
    await w.disposed("requeue")
    assert "store" in w.worker.listener.suspended
    assert w.at.model.requests == []
    await link.accept()
    await w.disposed("requeue", "ack")

    seen = await w.seen()
    assert (seen.dispositions, seen.calls, seen.billed) == (["requeue", "ack"], 1, ["r"])
    assert seen.result["attempt"] == 0


# ---------------------------------------------------------------- row 7: poison


@pytest.mark.parametrize("limit", [1, 3])
async def test_a_request_whose_runners_died_too_often_is_poison(
    running_worker: RunningWorker, redis_client: RedisClient, limit: int
) -> None:
    """Section 5, row 7: failed 500 `poison`, rejected into the DLQ, and the model not called again."""
    await foreign_claim(redis_client, "r", lease_s=-1, starts=limit)
    w = await running_worker(INFERENCE_MAX_CRASHES=str(limit))

    await w.publish(request_body("r"), headers={"x-retry-count": 1})
    await w.disposed("dead_letter")

    seen = await w.seen(dead=1)
    assert tuple(seen.result) == FAILED_KEYS
    assert (seen.result["status"], seen.result["status_code"]) == ("failed", 500)
    assert (seen.result["error_code"], seen.result["attempt"]) == ("poison", 1)
    assert seen.result["error"] == f"its workers died {limit} times while running it"
    assert nothing_done(seen)


async def test_one_death_below_the_limit_runs(running_worker: RunningWorker, redis_client: RedisClient) -> None:
    """Section 5, row 7: only at `INFERENCE_MAX_CRASHES` deaths it is poison."""
    await foreign_claim(redis_client, "r", lease_s=-1, starts=2)
    w = await running_worker(INFERENCE_MAX_CRASHES="3")

    await w.publish(request_body("r"))
    await w.disposed("ack")

    assert (await w.seen()).result["status"] == "completed"


# ---------------------------------------------------------------- row 8: cancelled


async def cancel(w: InProcess, request_id: str) -> object:
    """What the caller's side does."""
    async with redis_stores(load(w.env)) as stores:
        return await stores.results.cancel(
            Reply(
                request_id=request_id,
                status="failed",
                status_code=499,
                attempt=0,
                replica_id="gateway",
                finished_at=time.time(),
                error="cancelled by the caller",
                error_code="cancelled",
            )
        )


async def test_cancelling_closes_the_call_that_runs(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 5, row 8: failed 499, ack; the running call is closed by the next renewal, a third of the lease on."""
    model.default = wire.silent()
    w = await running_worker(CLAIM_LEASE_S="0.9")
    await w.publish(request_body("r"))
    await model.busy()

    assert await cancel(w, "r") == Stored()
    cancelled_at = time.monotonic()
    await w.disposed("ack")

    await eventually(lambda: model.requests[0].disconnected_at is not None, within=5, what="the model sees the end")
    assert (model.requests[0].disconnected_at or 0) - cancelled_at < 0.3 + 0.25
    seen = await w.seen()
    assert (seen.result["status_code"], seen.result["error_code"]) == (499, "cancelled")
    assert (seen.calls, seen.billed, seen.queued, seen.dead) == (1, [], [], [])


async def test_a_request_that_was_cancelled_while_it_was_queued_never_runs(running_worker: RunningWorker) -> None:
    """Section 5, rows 3 and 8."""
    w = await running_worker()
    await cancel(w, "r")

    await w.publish(request_body("r"))
    await w.disposed("ack")

    seen = await w.seen()
    assert seen.result["status_code"] == 499
    assert nothing_done(seen)


# ---------------------------------------------------------------- row 9: completed


@pytest.mark.parametrize(
    ("behaviour", "status_code", "result", "billed"),
    [
        pytest.param(wire.answer(200, b'{"a" : [1,\n2] }'), 200, b'{"a" : [1,\n2] }', 0, id="JSON, byte for byte"),
        pytest.param(wire.answer(201, b'{"id":1}'), 201, b'{"id":1}', 0, id="201"),
        pytest.param(wire.answer(200, b'"text"'), 200, b'"text"', 0, id="a string"),
        pytest.param(wire.answer(200, b"null"), 200, b"null", 0, id="null"),
        pytest.param(wire.answer(200, b"0"), 200, b"0", 0, id="a number"),
        pytest.param(wire.no_content(), 204, b"null", 0, id="204"),
        pytest.param(wire.empty(), 200, b"null", 0, id="200 without a body"),
        pytest.param(wire.answer(200, b'{"n":1}', {"Content-Type": "text/plain"}), 200, b'{"n":1}', 0, id="as text"),
        pytest.param(
            wire.answer(200, b'{"usage":{"total_tokens":0}}'), 200, b'{"usage":{"total_tokens":0}}', 0, id="no tokens"
        ),
        pytest.param(
            wire.answer(200, b'{"usage":{"prompt_tokens":4}}'), 200, b'{"usage":{"prompt_tokens":4}}', 1, id="tokens"
        ),
    ],
)
async def test_a_2xx_with_complete_json_or_nothing_is_completed(
    running_worker: RunningWorker,
    model: FakeModel,
    redis_client: RedisClient,
    behaviour: Behaviour,
    status_code: int,
    result: bytes,
    billed: int,
) -> None:
    """Section 5, row 9: completed with the model's status and its bytes, ack."""
    model.default = behaviour
    w = await running_worker()

    await w.publish(request_body("r"))
    await w.disposed("ack")

    stored = await redis_client.get("infer_resp:r")
    assert isinstance(stored, bytes)
    assert stored.startswith(
        b'{"status":"completed","status_code":%d,"result":%s,"request_id":' % (status_code, result)
    )
    seen = await w.seen()
    assert tuple(seen.result) == COMPLETED_KEYS
    assert (seen.result["attempt"], seen.result["replica_id"]) == (0, "replica-1")
    assert (seen.calls, len(seen.billed), seen.queued, seen.dead) == (1, billed, [], [])


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
async def test_every_endpoint_is_completed_and_billed(
    running_worker: RunningWorker, model: FakeModel, endpoint: str
) -> None:
    """Section 3 (`endpoint`) and section 5, row 9: chat, completions, embeddings."""
    w = await running_worker()

    await w.publish(request_body("r", endpoint=endpoint, payload={"input": "x"}))
    await w.disposed("ack")

    seen = await w.seen()
    assert model.requests[0].path == endpoint
    assert (seen.result["status"], seen.billed) == ("completed", ["r"])


async def test_a_stream_is_completed_in_the_shape_of_the_unstreamed_answer(
    running_worker: RunningWorker, model: FakeModel
) -> None:
    """Section 3: "the worker reads it to its end and stores it reassembled"; section 5, row 9."""
    w = await running_worker()

    await w.publish(request_body("r", payload={"model": "tiny", "messages": [], "stream": True}))
    await w.disposed("ack")

    seen = await w.seen()
    body = seen.result["result"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "tick tock"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert seen.result["timings"]["ttft_s"] >= 0
    assert seen.billed == ["r"]


# ---------------------------------------------------------------- row 10: the model's 4xx and 5xx


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        pytest.param(400, {"error": {"message": "too long", "type": "x"}}, "too long", id="error.message"),
        pytest.param(429, {"error": {"message": "busy"}, "message": "no"}, "busy", id="error.message before message"),
        pytest.param(500, {"message": "engine died", "detail": "no"}, "engine died", id="message before detail"),
        pytest.param(404, {"detail": "Not Found"}, "Not Found", id="detail"),
        pytest.param(422, {"object": "error"}, '{"object": "error"}', id="none of them: the body"),
        pytest.param(422, {"error": {"code": 1}}, '{"error": {"code": 1}}', id="an error without a message: the body"),
        pytest.param(503, "upstream is away", "upstream is away", id="text"),
        pytest.param(502, "<html>Bad Gateway</html>", "<html>Bad Gateway</html>", id="HTML keeps its status"),
        pytest.param(500, "é" * 5000, "é" * 1000, id="the first 1,000 characters"),
        pytest.param(500, b"\xff\xfe", "\ufffd\ufffd", id="not UTF-8"),
        pytest.param(500, None, "Reason", id="no body: the reason phrase"),
        pytest.param(418, {"error": {"message": ""}, "message": "teapot"}, "teapot", id="an empty message is none"),
    ],
)
async def test_a_models_error_is_the_result(
    running_worker: RunningWorker, model: FakeModel, status: int, body: object, error: str
) -> None:
    """Section 5, row 10: failed with the model's status and its message, ack; not tried again."""
    model.default = wire.answer(status, body)
    w = await running_worker()

    await w.publish(request_body("r"))
    await w.disposed("ack")

    seen = await w.seen()
    assert tuple(seen.result) == FAILED_KEYS
    assert (seen.result["status"], seen.result["status_code"]) == ("failed", status)
    assert (seen.result["error"], seen.result["error_code"]) == (error, "model_error")
    assert seen.result["attempt"] == 0
    assert (seen.dispositions, seen.calls, seen.billed) == (["ack"], 1, [])
    assert (seen.queued, seen.dead) == ([], [])


# ---------------------------------------------------------------- row 11: no answer that can be stored


@pytest.mark.parametrize(
    ("behaviour", "streamed"),
    [
        pytest.param(wire.redirect(), False, id="307"),
        pytest.param(wire.answer(304), False, id="304"),
        pytest.param(wire.answer(300, {"a": 1}), False, id="300 with JSON"),
        pytest.param(wire.html(), False, id="HTML"),
        pytest.param(wire.answer(200, b'{"a":1'), False, id="half of an object"),
        pytest.param(wire.answer(200, b'{"a":1} x'), False, id="more than JSON"),
        pytest.param(wire.answer(200, b" "), False, id="a space"),
        pytest.param(wire.latin1(), False, id="Latin-1"),
        pytest.param(wire.not_a_number(), False, id="NaN"),
        pytest.param(wire.broken_gzip(), False, id="broken gzip"),
        pytest.param(wire.huge(20_001), False, id="too large, and says so"),
        pytest.param(wire.huge(20_001, chunked=True), False, id="too large, chunked"),
        pytest.param(sse(*["word"] * 5000), True, id="a stream that is too large"),
        pytest.param(sse_error(), True, id="an error event in a stream"),
        pytest.param(sse_shed(), True, id="an error event at the start of a stream"),
    ],
)
async def test_an_answer_that_cannot_be_stored_is_failed_502(
    running_worker: RunningWorker, model: FakeModel, behaviour: Behaviour, streamed: bool
) -> None:
    """Section 5, row 11: failed 502 `bad_response`, ack; a redirect is not followed."""
    model.default = behaviour
    w = await running_worker(MODEL_MAX_RESPONSE_BYTES="20000")

    await w.publish(request_body("r", payload={"stream": True} if streamed else {}))
    await w.disposed("ack")

    seen = await w.seen()
    assert tuple(seen.result) == FAILED_KEYS
    assert (seen.result["status"], seen.result["status_code"]) == ("failed", 502)
    assert (seen.result["error_code"], seen.result["attempt"]) == ("bad_response", 0)
    assert seen.result["error"]
    assert (seen.dispositions, seen.calls, seen.billed) == (["ack"], 1, [])
    assert (seen.queued, seen.dead) == ([], [])


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_answer_just_within_the_limit_is_completed(
    running_worker: RunningWorker, model: FakeModel, chunked: bool
) -> None:
    """Section 5, rows 9 and 11: `MODEL_MAX_RESPONSE_BYTES` itself is within."""
    model.default = wire.huge(20_000, chunked=chunked)
    w = await running_worker(MODEL_MAX_RESPONSE_BYTES="20000")

    await w.publish(request_body("r"))
    await w.disposed("ack")

    assert (await w.seen()).result["status"] == "completed"


# ---------------------------------------------------------------- row 12: failures that may pass

TEMPORARY = (
    pytest.param(wire.reset(), {}, "the model is gone", id="reset"),
    pytest.param(wire.close_before_answer(), {}, "the model is gone", id="closed before an answer"),
    pytest.param(wire.raw(b"hello\r\n\r\n"), {}, "the answer was cut short", id="no HTTP"),
    pytest.param(wire.raw(b"HTTP/1.1 200 OK\r\nContent-"), {}, "the answer was cut short", id="half of the headers"),
    pytest.param(wire.close_after_headers(), {}, "the answer was cut short", id="closed after the headers"),
    pytest.param(wire.half_body(), {}, "the answer was cut short", id="half of the body"),
    pytest.param(wire.half_body(wire.Exchange.reset), {}, "the answer was cut short", id="reset in the body"),
    pytest.param(wire.chunked_without_end(), {}, "the answer was cut short", id="chunks without an end"),
    pytest.param(sse_without_end(), {"stream": True}, "the answer was cut short", id="a stream without an end"),
    pytest.param(
        sse("a", "b", finish=False, done=False),
        {"stream": True},
        "the answer was cut short",
        id="a stream not finished",
    ),
    pytest.param(wire.silent(), {}, "the model took too long", id="MODEL_INFER_TIMEOUT_S"),
    pytest.param(
        wire.trickle(b"x" * 100, every_s=0.02), {}, "the model took too long", id="a trickle that takes too long"
    ),
    pytest.param(wire.error(503), {}, "the model asked to be tried again", id="a retry status"),
    pytest.param(wire.html(503), {}, "the model asked to be tried again", id="a retry status in HTML"),
    pytest.param(sse_shed(), {"stream": True}, "the model asked to be tried again", id="a retry status in a stream"),
)
AS_TEMPORARY = {"MODEL_RETRY_STATUS_CODES": "429,503", "MODEL_INFER_TIMEOUT_S": "0.4"}


@pytest.mark.parametrize(("behaviour", "payload", "fault"), TEMPORARY)
async def test_a_failure_that_may_pass_is_tried_again(
    running_worker: RunningWorker, model: FakeModel, behaviour: Behaviour, payload: dict[str, object], fault: str
) -> None:
    """Section 5, row 12: no result while retries are left; a copy with `x-retry-count` + 1, then ack."""
    model.next(behaviour)
    w = await running_worker(**AS_TEMPORARY)

    await w.publish(request_body("r", payload=payload))
    await w.disposed("retry", "ack")

    (retried, _) = w.lines("request")
    assert (retried["attempt"], retried["status_code"]) == (0, None)
    assert str(retried["why"]).startswith(fault)
    seen = await w.seen()
    assert (seen.result["status"], seen.result["status_code"], seen.result["attempt"]) == ("completed", 200, 1)
    assert (seen.calls, seen.billed, seen.queued, seen.dead) == (2, ["r"], [], [])


@pytest.mark.parametrize(("behaviour", "payload", "fault"), TEMPORARY)
async def test_a_failure_that_does_not_pass_uses_the_retries_up(
    running_worker: RunningWorker, model: FakeModel, behaviour: Behaviour, payload: dict[str, object], fault: str
) -> None:
    """Section 5, row 12: then failed 500 `retries_exhausted`, rejected into the DLQ."""
    model.default = behaviour
    w = await running_worker(**AS_TEMPORARY, RABBITMQ_MAX_RETRIES="2")

    await w.publish(request_body("r", payload=payload))
    await w.disposed("dead_letter")

    seen = await w.seen(dead=1)
    assert tuple(seen.result) == FAILED_KEYS
    assert (seen.result["status"], seen.result["status_code"]) == ("failed", 500)
    assert (seen.result["error_code"], seen.result["attempt"]) == ("retries_exhausted", 2)
    assert seen.result["error"].startswith(f"{fault}, 3 times tried: ")
    assert (seen.dispositions, seen.calls, seen.billed) == (["retry", "retry", "dead_letter"], 3, [])
    assert [message.headers.get("x-retry-count") for message in seen.dead] == [2]
    assert seen.queued == []


async def test_without_retries_the_first_failure_is_the_last(running_worker: RunningWorker, model: FakeModel) -> None:
    """Section 5, row 12: `RABBITMQ_MAX_RETRIES` = 0."""
    model.default = wire.reset()
    w = await running_worker(RABBITMQ_MAX_RETRIES="0")

    await w.publish(request_body("r"))
    await w.disposed("dead_letter")

    seen = await w.seen(dead=1)
    assert (seen.result["error_code"], seen.result["attempt"], seen.calls) == ("retries_exhausted", 0, 1)


async def test_a_refused_connection_stops_consuming_and_is_tried_again(
    running_worker: RunningWorker, model: FakeModel
) -> None:
    """Section 5, row 12: "consuming is stopped where the model is gone, copy with `x-retry-count` + 1, then ack"."""
    w = await running_worker(HEALTH_CHECK_INTERVAL_S="60")

    await model.refuse()
    await w.publish(request_body("r"))
    await w.disposed("retry")

    assert set(w.worker.listener.suspended) == {"model"}
    await w.suspended()
    assert await w.at.broker.ready(w.queue) == 1
    await model.listen()
    w.worker.model_health.wanted.set()
    await w.disposed("retry", "ack")
    seen = await w.seen()
    assert (seen.result["attempt"], seen.calls, seen.billed) == (1, 1, ["r"])


async def test_a_name_that_does_not_resolve_is_tried_again(
    running_worker: RunningWorker, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Section 5, row 12: DNS."""
    resolve = socket.getaddrinfo
    fails = True

    def lookup(host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0) -> Any:
        if host not in ("model.test", b"model.test"):
            return resolve(host, port, family, type, proto, flags)
        # The calls' driver asks with a flag; the look at the health, without, finds the model and leaves it alone.
        if fails and flags:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return resolve("127.0.0.1", port, family, type, proto, flags)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    w = await running_worker(MODEL_CONTAINER_URL=f"http://model.test:{model.port}", RABBITMQ_RETRY_DELAY_S="0.3")

    await w.publish(request_body("r"))
    await w.disposed("retry")
    fails = False
    await w.disposed("retry", "ack")

    assert str(w.lines("request")[0]["why"]).startswith("the model is gone")
    seen = await w.seen()
    assert (seen.result["status"], seen.result["attempt"], seen.calls) == ("completed", 1, 1)


@pytest.mark.parametrize(("asked", "least_s"), [("1", 1.0), ("soon", 0.0), ("-5", 0.0)])
async def test_retry_after_is_honoured(
    running_worker: RunningWorker, model: FakeModel, asked: str, least_s: float
) -> None:
    """Section 2 (`MODEL_RETRY_STATUS_CODES`): "`Retry-After` is honoured within the deadline"."""
    model.next(wire.retry_after(asked))
    w = await running_worker(MODEL_RETRY_STATUS_CODES="503")

    await w.publish(request_body("r"))
    await w.disposed("retry", "ack")

    first, second = model.requests
    assert second.arrived_at - first.arrived_at >= least_s
    assert (await w.seen()).result["attempt"] == 1


async def test_retry_after_beyond_the_deadline_leaves_room_for_one_more_try(
    running_worker: RunningWorker, model: FakeModel
) -> None:
    """Section 2 (`MODEL_RETRY_STATUS_CODES`): within the deadline, also where the model asks for an hour."""
    model.next(wire.retry_after("3600"))
    w = await running_worker(MODEL_RETRY_STATUS_CODES="503")

    await w.publish(request_body("r", timeout_s=2))
    await w.disposed("retry", "ack")

    first, second = model.requests
    assert second.arrived_at - first.arrived_at > 0.5, "waited for half of what was left"
    seen = await w.seen()
    assert (seen.result["status"], seen.result["attempt"], seen.calls) == ("completed", 1, 2)


# ---------------------------------------------------------------- row 13: the deadline while the model works


@pytest.mark.parametrize(
    ("behaviour", "payload"),
    [
        pytest.param(wire.silent(), {}, id="before any answer"),
        pytest.param(sse(*["word"] * 500, every_s=0.02), {"stream": True}, id="in the middle of a stream"),
        pytest.param(wire.trickle(b" " * 5000, every_s=0.02), {}, id="in the middle of a body"),
    ],
)
async def test_a_deadline_while_the_model_works_is_failed_408_and_closes_the_call(
    running_worker: RunningWorker, model: FakeModel, behaviour: Behaviour, payload: dict[str, object]
) -> None:
    """Section 5, row 13: failed 408 `deadline_exceeded`, ack; the model sees the end of the call at once."""
    model.default = behaviour
    w = await running_worker()
    received_at = time.time()

    await w.publish(request_body("r", received_at=received_at, timeout_s=0.7, payload=payload))
    deadline = time.monotonic() + received_at + 0.7 - time.time()
    await w.disposed("ack")

    call = model.requests[0]
    await eventually(lambda: call.disconnected_at is not None, within=5, what="the model sees the end")
    assert -0.02 < (call.disconnected_at or 0) - deadline < 0.2
    seen = await w.seen()
    assert tuple(seen.result) == FAILED_KEYS
    assert (seen.result["status_code"], seen.result["error_code"]) == (408, "deadline_exceeded")
    assert (seen.result["attempt"], seen.dispositions, seen.calls) == (0, ["ack"], 1)
    assert (seen.billed, seen.queued, seen.dead) == ([], [], [])


# ---------------------------------------------------------------- row 14: the result cannot be written


async def test_an_answer_is_kept_and_stored_when_redis_is_back(
    running_worker: RunningWorker, model: FakeModel, redis_server: Redis, redis_url: str, proxy: MakeProxy
) -> None:
    """Section 5, row 14: nack, requeue; kept, and stored before consuming resumes: the model is called once."""
    link = await proxy(redis_server, speaks="redis")
    opened = asyncio.Event()
    model.default = wire.gated(opened, ok())
    w = await running_worker(REDIS_URL=link.url(redis_url), REDIS_RETRY_DELAY_S="0.5")
    await w.publish(request_body("r"))
    await model.busy()

    await link.refuse()
    await link.cut()
    opened.set()
    await w.disposed("requeue")
    await w.suspended()
    await eventually(lambda: "kept" in w.worker.listener.suspended, within=SOON_S, what="the answer is kept")

    async def is_back() -> bool:
        return await w.at.broker.ready(w.queue) == 1

    await eventually(is_back, within=SOON_S, what="the message is back in the queue")
    await link.accept()
    await w.consuming()
    assert await w.at.redis.exists("infer_resp:r") == 1
    await w.disposed("requeue", "ack")

    seen = await w.seen()
    assert (seen.dispositions, seen.calls, seen.billed) == (["requeue", "ack"], 1, ["r"])
    assert (seen.result["status"], seen.result["attempt"]) == ("completed", 0)


async def test_an_outage_within_the_delay_costs_nothing(
    running_worker: RunningWorker, redis_server: Redis, redis_url: str, proxy: MakeProxy
) -> None:
    """Section 5, row 14: "tried again for `REDIS_RETRY_DELAY_S`" comes before the hand-back."""
    link = await proxy(redis_server, speaks="redis")
    w = await running_worker(REDIS_URL=link.url(redis_url), REDIS_RETRY_DELAY_S="5")
    cut = link.when_client_sends(b'{"status":"completed"', Do.CUT)

    await w.publish(request_body("r"))
    await w.disposed("ack")

    assert cut.hits == 1
    seen = await w.seen()
    assert (seen.dispositions, seen.calls, seen.billed) == (["ack"], 1, ["r"])


async def test_a_write_whose_answer_was_lost_is_not_repeated_to_anybody(
    running_worker: RunningWorker, redis_server: Redis, redis_url: str, proxy: MakeProxy
) -> None:
    """Section 5, row 14, and invariants 2 and 3: it was stored after all; one result, one bill, one call."""
    link = await proxy(redis_server, speaks="redis")
    w = await running_worker(REDIS_URL=link.url(redis_url), REDIS_RETRY_DELAY_S="5")
    cut = link.when_client_sends(b'{"status":"completed"', Do.CUT_ON_REPLY)

    await w.publish(request_body("r"))
    await w.disposed("ack")

    assert cut.hits == 1
    seen = await w.seen()
    assert (seen.dispositions, seen.calls, seen.billed) == (["ack"], 1, ["r"])
    assert seen.result["status"] == "completed"


# ---------------------------------------------------------------- rows 15 and 16: stopped, killed


async def test_a_request_that_ends_within_the_grace_is_answered(
    running_worker: RunningWorker, model: FakeModel
) -> None:
    """Section 5, row 15: what can still finish, finishes; and nothing new is taken."""
    opened = asyncio.Event()
    model.default = wire.gated(opened, ok())
    w = await running_worker(SHUTDOWN_GRACE_S="10")
    await w.publish(request_body("r"))
    await model.busy()

    w.told_to_stop()
    await eventually(lambda: w.worker.listener.state == "stopping", within=SOON_S, what="the worker is stopping")
    await w.publish(request_body("later"))
    opened.set()
    await w.disposed("ack")

    seen = await w.seen()
    assert list(seen.results) == ["r"]
    assert (seen.dispositions, seen.calls, seen.billed) == (["ack"], 1, ["r"])
    assert len(seen.queued) == 1


async def test_a_request_that_does_not_end_within_the_grace_is_requeued_uncounted(
    running_worker: RunningWorker, model: FakeModel, redis_client: RedisClient
) -> None:
    """Section 5, row 15: no result, requeued, retry count unchanged; the call is closed and its claim given up."""
    model.default = wire.silent()
    w = await running_worker(SHUTDOWN_GRACE_S="0.2")
    await w.publish(request_body("r"), headers={"x-retry-count": 1, "a": "b"})
    await model.busy()

    await w.stop()

    assert w.dispositions == ["requeue"]
    assert model.requests[0].disconnected_at is not None or model.in_flight == 0
    assert await redis_client.hget(claim_of("r"), "holder") is None
    assert await redis_client.hget(claim_of("r"), "starts") == b"0"
    seen = await w.seen()
    assert (seen.results, seen.billed, seen.dead) == ({}, [], [])
    assert [message.headers.get("x-retry-count") for message in seen.queued] == [1]


async def test_a_message_that_has_not_begun_is_handed_back_at_once(
    running_worker: RunningWorker, redis_client: RedisClient
) -> None:
    """Section 5, row 15: it does not wait for the grace."""
    await foreign_claim(redis_client, "r", lease_s=60)
    w = await running_worker(SHUTDOWN_GRACE_S="60")
    await w.publish(request_body("r"))
    await eventually(lambda: waiting(w) == 1, within=SOON_S, what="it waits for the other worker")

    await w.stop()

    assert w.dispositions == ["requeue"]
    assert len((await w.seen()).queued) == 1


@pytest.mark.parametrize("attempt", [0, 1])
async def test_a_killed_workers_request_is_redelivered_and_runs_once_more(
    running_worker: RunningWorker,
    model: FakeModel,
    rabbitmq_url: str,
    redis_url: str,
    deployment_id: str,
    tmp_path: Path,
    attempt: int,
) -> None:
    """Section 5, row 16: redelivered by RabbitMQ with its count; another worker waits for the lease, then runs it."""
    model.next(wire.silent())
    w = await running_worker(REPLICA_ID="replica-2")
    await w.stop()
    env = worker_env(
        rabbitmq_url=rabbitmq_url,
        redis_url=redis_url,
        model_url=model.url,
        deployment_id=deployment_id,
        CLAIM_LEASE_S="1",
    )
    await w.publish(request_body("r"), headers={"x-retry-count": attempt})
    async with WorkerProcess(env, output=tmp_path / "log") as killed:
        await model.busy(within=20)
        killed.kill()

    again = await running_worker(REPLICA_ID="replica-3", ready=False)
    await again.disposed("ack")

    seen = await again.seen()
    assert (seen.result["replica_id"], seen.result["attempt"]) == ("replica-3", attempt)
    assert (seen.calls, seen.billed, seen.queued, seen.dead) == (2, ["r"], [], [])


async def test_an_answer_that_is_kept_does_not_hold_up_a_stop(
    running_worker: RunningWorker, model: FakeModel, redis_server: Redis, redis_url: str, proxy: MakeProxy
) -> None:
    """Section 5, rows 14 and 15, and section 1: given up after the grace, as the message is queued; then run again."""
    link = await proxy(redis_server, speaks="redis")
    opened = asyncio.Event()
    model.next(wire.gated(opened, ok()))
    w = await running_worker(REDIS_URL=link.url(redis_url))
    await w.publish(request_body("r"))
    await model.busy()
    await link.refuse()
    await link.cut()
    opened.set()
    await eventually(lambda: "kept" in w.worker.listener.suspended, within=SOON_S, what="the answer is kept")

    await w.stop()
    other = await running_worker(REPLICA_ID="replica-2", ready=False)
    await other.disposed("requeue", "ack")

    seen = await other.seen()
    assert (seen.result["replica_id"], seen.result["attempt"]) == ("replica-2", 0)
    assert (seen.calls, seen.billed, seen.queued, seen.dead) == (2, ["r"], [], [])


# ---------------------------------------------------------------- after the table


async def test_the_history_of_a_message_that_is_no_request_is_kept_too(
    running_worker: RunningWorker, redis_client: RedisClient
) -> None:
    """Section 4: reason, attempts and last status of every dead letter that has an id."""
    w = await running_worker()

    await w.publish(without(payload=[]))
    await w.disposed("dead_letter")

    note = json.loads(await redis_client.get("infer_dead:r") or b"null")
    assert (note["reason"], note["attempts"], note["status_code"]) == ("invalid_request", 0, 400)
    assert note["detail"].startswith("payload must be a JSON object")


async def test_a_dead_letters_history_is_kept_in_redis(
    running_worker: RunningWorker, model: FakeModel, redis_client: RedisClient
) -> None:
    """Section 4: `infer_dead:<request_id>` has reason, attempts and last status for 30 days."""
    model.default = wire.reset()
    w = await running_worker()

    await w.publish(request_body("r"))
    await w.disposed("dead_letter")

    note = json.loads(await redis_client.get("infer_dead:r") or b"null")
    assert (note["request_id"], note["reason"]) == ("r", "retries_exhausted")
    assert (note["attempts"], note["status_code"]) == (2, 500)
    assert 29 * 86_400 < await redis_client.ttl("infer_dead:r") <= 30 * 86_400


async def test_a_connection_that_the_model_had_closed_costs_no_attempt(
    running_worker: RunningWorker, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Section 5, after the table: repeated without counting where the request was provably not sent.

    The model closes its idle connections at the very moment when a call is about to take one of them.
    """
    infer = HttpModelClient.infer

    async def just_closed(self: HttpModelClient, **call: Any) -> Answer:
        for connection in model._connections:
            with suppress(OSError):
                connection._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        return await infer(self, **call)

    monkeypatch.setattr(HttpModelClient, "infer", just_closed)
    w = await running_worker(RABBITMQ_MAX_RETRIES="0")

    for number in range(5):
        await w.publish(request_body(f"r-{number}"))
        await w.stored(f"r-{number}")
    await w.disposed(*["ack"] * 5)

    seen = await w.seen()
    assert {result["attempt"] for result in seen.results.values()} == {0}
    assert seen.calls == 5


async def test_losing_rabbitmq_does_not_stop_a_running_call(
    running_worker: RunningWorker, model: FakeModel, rabbit: Rabbit, rabbitmq_url: str, proxy: MakeProxy
) -> None:
    """Section 5, after the table: it ends, its answer is stored, the redelivery finds it; never more than prefetch."""
    link = await proxy(rabbit, speaks="amqp")
    opened = asyncio.Event()
    model.next(wire.gated(opened, ok()))
    w = await running_worker(RABBITMQ_URL=link.url(rabbitmq_url), RABBITMQ_PREFETCH="1")
    await w.publish(request_body("r"))
    await model.busy()
    await w.publish(request_body("other"))

    await link.cut()
    await w.consuming()
    await eventually(lambda: w.worker.listener.in_flight == 2, within=SOON_S, what="a message has come again")
    assert (model.in_flight, len(model.requests)) == (1, 1)
    opened.set()
    await w.disposed("ack", "ack")

    seen = await w.seen()
    assert (seen.calls, model.peak, seen.billed) == (2, 1, ["other", "r"])
    assert {result["attempt"] for result in seen.results.values()} == {0}
    assert (seen.queued, seen.dead) == ([], [])


async def test_a_call_whose_message_is_gone_still_holds_its_slot(
    running_worker: RunningWorker, model: FakeModel, rabbit: Rabbit, rabbitmq_url: str, proxy: MakeProxy
) -> None:
    """Section 5, after the table: "in-flight requests never exceed the prefetch", also with a message of a new session.

    The message of the running call is taken out of the queue meanwhile, so that another one comes first.
    """
    link = await proxy(rabbit, speaks="amqp")
    opened = asyncio.Event()
    model.next(wire.gated(opened, ok()))
    w = await running_worker(RABBITMQ_URL=link.url(rabbitmq_url), RABBITMQ_PREFETCH="1")
    await w.publish(request_body("r"))
    await model.busy()

    await link.refuse()
    await link.cut()
    await eventually(lambda: w.at.broker.ready(w.queue), within=SOON_S, what="the broker has its message back")
    assert len(await w.at.broker.take(w.queue)) == 1
    await w.publish(request_body("other"))
    await link.accept()
    await eventually(lambda: w.worker.listener.in_flight == 2, within=SOON_S, what="another message has come")
    await w.publish(request_body("one more"))
    assert len(model.requests) == 1
    opened.set()
    await w.disposed("ack", "ack")

    seen = await w.seen()
    assert (seen.calls, model.peak) == (3, 1)
    assert seen.billed == ["one more", "other", "r"]


async def test_a_late_runner_may_still_store_a_success(
    running_worker: RunningWorker, model: FakeModel, redis_client: RedisClient
) -> None:
    """Section 5, after the table: a *completed* result counts, whoever has the claim."""
    opened = asyncio.Event()
    model.default = wire.gated(opened, ok())
    w = await running_worker(CLAIM_LEASE_S="30")
    await w.publish(request_body("r"))
    await model.busy()

    await foreign_claim(redis_client, "r", lease_s=60)
    opened.set()
    await w.disposed("ack")

    seen = await w.seen()
    assert (seen.result["status"], seen.result["replica_id"]) == ("completed", "replica-1")
    assert (seen.calls, seen.billed) == (1, ["r"])


async def test_a_late_runner_may_not_store_a_failure(
    running_worker: RunningWorker, model: FakeModel, redis_client: RedisClient
) -> None:
    """Section 5, after the table: "a failure it may not store"; it waits for who runs the request now."""
    opened = asyncio.Event()
    model.default = wire.gated(opened, wire.error(400))
    w = await running_worker(CLAIM_LEASE_S="30")
    await w.publish(request_body("r"))
    await model.busy()

    await foreign_claim(redis_client, "r", lease_s=60)
    opened.set()
    await eventually(lambda: waiting(w) == 1, within=SOON_S, what="the late runner waits for the other one")
    assert await redis_client.exists("infer_resp:r") == 0
    before = await put_result(redis_client, "r")
    await w.disposed("ack")

    assert await redis_client.get("infer_resp:r") == before
    assert (await w.seen()).billed == []


async def test_a_runner_that_lost_its_claim_closes_its_call(
    running_worker: RunningWorker, model: FakeModel, redis_client: RedisClient
) -> None:
    """Section 5, row 5, seen from the other side: told at its renewal, it stops and waits."""
    model.default = wire.silent()
    w = await running_worker(CLAIM_LEASE_S="0.6")
    await w.publish(request_body("r"))
    await model.busy()

    await foreign_claim(redis_client, "r", lease_s=60)
    await eventually(lambda: model.in_flight == 0, within=5, what="the call is closed")
    await eventually(lambda: waiting(w) == 1, within=5, what="the message waits")
    await put_result(redis_client, "r")
    await w.disposed("ack")

    assert (await w.seen()).billed == []
