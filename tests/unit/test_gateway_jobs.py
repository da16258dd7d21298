"""The HTTP intake's own paths: contract, section 9."""

import asyncio
import errno
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest

from inference_worker.disposition import Token
from inference_worker.errors import NotAccepted, QueueFull, TransportLost
from inference_worker.gateway.bodies import BODY_S, MOST_BODY_BYTES, Bodies
from inference_worker.gateway.job_requests import (
    DEFAULT_TIMEOUT_S,
    LONGEST_WAIT_S,
    MOST_FIELD_BYTES,
    MOST_METADATA_BYTES,
    MOST_PROBLEMS,
)
from inference_worker.gateway.serving import serving
from inference_worker.gateway.views import state_of
from inference_worker.job_book import KEPT_AFTER_S
from inference_worker.messages import ErrorCode, decode
from inference_worker.ports import Progress
from inference_worker.results.memory import MemoryStore
from tests.unit.gateway_kit import CHAT, START, TTL_S, Intake, is_problem, opened, said


@pytest.fixture
async def intake() -> AsyncIterator[Intake]:
    async with opened(Intake()) as made:
        yield made


# ---------------------------------------------------------------- accepting


async def test_a_job_is_accepted_with_its_id_and_where_to_ask(intake: Intake) -> None:
    answer = await intake.post({"payload": CHAT, "timeout_s": 30})

    assert answer.status_code == 202
    assert said(answer) == {
        "job_id": "job-1",
        "status": "queued",
        "created_at": START,
        "expires_at": START + 30,
        "position": 1,
        "estimated_wait_s": None,
        "links": {"self": "/v1/jobs/job-1", "wait": "/v1/jobs/job-1?wait=60"},
    }
    assert answer.headers["location"] == "/v1/jobs/job-1"


async def test_what_lies_in_the_queue_is_the_message_of_section_3(intake: Intake) -> None:
    body = {"payload": CHAT, "timeout_s": 2.5, "endpoint": "/v1/embeddings", "metadata": {"team": "a"}}

    job_id = await intake.job(**body)

    request = decode(intake.queue.bodies[0], message_id=None, infer_path="/x", now=START)
    assert intake.queue.ids == [job_id]
    assert request.request_id == job_id
    assert (request.received_at, request.timeout_s) == (START, 2.5)
    assert (request.endpoint, request.metadata) == ("/v1/embeddings", {"team": "a"})


async def test_only_the_payload_is_required(intake: Intake) -> None:
    await intake.job()

    request = decode(intake.queue.bodies[0], message_id=None, infer_path="/x", now=START)
    assert (request.endpoint, request.metadata, request.timeout_s) == ("/x", {}, DEFAULT_TIMEOUT_S)


async def test_the_payload_is_passed_on_as_the_bytes_that_came(intake: Intake) -> None:
    payload = b'{ "b":1.0,"a": 1e2, "a":2, "big":123456789012345678901234567890, "t":"\\u00e9" }'

    await intake.http.post(
        "/v1/jobs", content=b'{"payload":%b}' % payload, headers={"Content-Type": "application/json"}
    )

    assert bytes(msgspec.json.decode(intake.queue.bodies[0], type=dict[str, msgspec.Raw])["payload"]) == payload


@pytest.mark.parametrize(
    ("body", "pointer", "accepted"),
    [
        pytest.param({}, "/payload", "a JSON object", id="no payload"),
        pytest.param({"payload": [1]}, "/payload", "a JSON object", id="a list for a payload"),
        pytest.param({"payload": None}, "/payload", "a JSON object", id="null for a payload"),
        pytest.param({"payload": CHAT, "timeout_s": 0}, "/timeout_s", "above 0", id="no time at all"),
        pytest.param({"payload": CHAT, "timeout_s": -1}, "/timeout_s", "above 0", id="less than no time"),
        pytest.param({"payload": CHAT, "timeout_s": "60"}, "/timeout_s", "number", id="a text for a number"),
        pytest.param({"payload": CHAT, "timeout_s": True}, "/timeout_s", "number", id="a boolean for a number"),
        pytest.param({"payload": CHAT, "timeout_s": None}, "/timeout_s", "number", id="null for a number"),
        pytest.param({"payload": CHAT, "timeout_s": 10**400}, "/timeout_s", "finite", id="beyond what is finite"),
        pytest.param({"payload": CHAT, "endpoint": "/admin"}, "/endpoint", "/v1/embeddings", id="another endpoint"),
        pytest.param({"payload": CHAT, "endpoint": None}, "/endpoint", "/v1/embeddings", id="null for an endpoint"),
        pytest.param({"payload": CHAT, "metadata": {"a": 1}}, "/metadata", "strings", id="a number in the metadata"),
        pytest.param({"payload": CHAT, "metadata": ["a"]}, "/metadata", "strings", id="a list for the metadata"),
        pytest.param({"payload": CHAT, "timeout": 3}, "/timeout", "timeout_s", id="a name that is not known"),
        pytest.param({"payload": CHAT, "tenant": "me"}, "/tenant", "payload", id="a tenant, which nobody may claim"),
        pytest.param({"payload": CHAT, "idempotency_key": ""}, "/idempotency_key", "1 to", id="an empty key"),
        pytest.param({"payload": CHAT, "idempotency_key": 7}, "/idempotency_key", "1 to", id="a number for a key"),
        pytest.param(
            {"payload": CHAT, "idempotency_key": "a\n"}, "/idempotency_key", "control", id="a key of two lines"
        ),
        pytest.param({"payload": CHAT, "idempotency_key": "k" * 513}, "/idempotency_key", "512", id="a key too long"),
        pytest.param(
            {"payload": CHAT, "webhook": {"url": "https://a.b"}}, "/webhook", "URL", id="no secret to sign with"
        ),
        pytest.param({"payload": CHAT, "webhook": "https://a.b"}, "/webhook", "object", id="a text for a webhook"),
        pytest.param(
            {"payload": CHAT, "metadata": {"a": "x" * MOST_METADATA_BYTES}},
            "/metadata",
            "bytes",
            id="a lot of metadata",
        ),
        pytest.param({"payload": CHAT, "a/b~c": 1}, "/a~1b~0c", "payload", id="a name that a pointer must escape"),
    ],
)
async def test_a_field_that_is_wrong_is_named_with_what_is_accepted(
    intake: Intake, body: dict[str, object], pointer: str, accepted: str
) -> None:
    problem = is_problem(await intake.post(body), 422)

    assert [error["pointer"] for error in problem["errors"]] == [pointer]
    assert accepted in problem["errors"][0]["accepted"]
    assert pointer in problem["detail"]
    assert intake.queue.bodies == []


async def test_all_that_is_wrong_is_told_at_once(intake: Intake) -> None:
    problem = is_problem(await intake.post({"payload": 1, "timeout_s": -1, "endpoint": "/x", "what": 1}), 422)

    pointers = [error["pointer"] for error in problem["errors"]]
    assert pointers == ["/payload", "/timeout_s", "/endpoint", "/what"]


async def test_a_time_beyond_all_numbers_is_refused(intake: Intake) -> None:
    content = b'{"payload": {}, "timeout_s": 1e400}'

    answer = await intake.http.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})

    assert is_problem(answer, 422)["errors"][0]["pointer"] == "/timeout_s"


MANY_LISTS = b"[" + b"[]," * 50_000 + b"[]]"


@pytest.mark.parametrize("name", ["timeout_s", "endpoint", "metadata", "idempotency_key", "webhook"])
async def test_a_field_that_is_far_too_large_is_refused_without_being_decoded(
    intake: Intake, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Out of a few megabytes of lists come a few gigabytes of objects, and everybody waits for them."""
    decoded: list[int] = []
    decode_it = msgspec.json.decode

    def noted(raw: msgspec.Raw, **how: object) -> object:
        decoded.append(0 if how else len(raw))
        return decode_it(raw, **how)  # type: ignore[call-overload]  # Passed on as it came.

    monkeypatch.setattr("inference_worker.gateway.job_requests.msgspec.json.decode", noted)
    body = b'{"payload": {}, "%s": %s}' % (name.encode(), MANY_LISTS)

    answer = await intake.http.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})

    assert [error["pointer"] for error in is_problem(answer, 422)["errors"]] == [f"/{name}"]
    assert max(decoded, default=0) <= MOST_FIELD_BYTES
    assert len(answer.content) < 1000


@pytest.mark.parametrize("count", [30, 200_000])
async def test_an_answer_to_many_unknown_fields_stays_small(intake: Intake, count: int) -> None:
    answer = await intake.post({"payload": CHAT, **{f"field {number}": 0 for number in range(count)}})

    errors = is_problem(answer, 422)["errors"]
    assert errors[0]["pointer"] == "/field 0"
    assert len(errors) == (MOST_PROBLEMS if count == 30 else 1)
    assert len(answer.content) < 10_000


async def test_a_body_of_another_kind_is_told_what_kind_is_expected(intake: Intake) -> None:
    assert "must be a JSON object: Expected `object`, got `array`" in is_problem(await intake.post([]), 400)["detail"]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"{", id="half"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b'{"payload": {"a": \xff}}', id="bytes that are no text"),
        pytest.param(b'{"payload": NaN}', id="a number that JSON does not have"),
        pytest.param(b'{"payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="too deep"),
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(intake: Intake, body: bytes) -> None:
    answer = await intake.http.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})

    assert answer.status_code in (400, 422)
    is_problem(answer, answer.status_code)
    assert intake.queue.bodies == []


async def test_a_body_that_does_not_come_as_json_is_refused_with_what_to_send(intake: Intake) -> None:
    answer = await intake.http.post("/v1/jobs", content=b'{"payload":{}}', headers={"Content-Type": "text/plain"})

    assert "Content-Type: application/json" in is_problem(answer, 415)["detail"]


class Pieces(httpx.AsyncByteStream):
    """A body without an end."""

    def __init__(self, piece: bytes, pause_s: float = 0.0) -> None:
        self.piece = piece
        self.pause_s = pause_s
        self.sent = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(self.pause_s)
            self.sent += len(self.piece)
            yield self.piece


async def test_a_body_is_not_read_beyond_its_bound(intake: Intake) -> None:
    pieces = Pieces(b"x" * (1024 * 1024))

    answer = await intake.http.post("/v1/jobs", content=pieces, headers={"Content-Type": "application/json"})

    is_problem(answer, 413)
    assert pieces.sent <= MOST_BODY_BYTES + 2 * len(pieces.piece)


async def test_a_body_that_announces_too_much_is_not_read_at_all(intake: Intake) -> None:
    headers = {"Content-Type": "application/json", "Content-Length": str(MOST_BODY_BYTES + 1)}

    answer = await intake.http.post("/v1/jobs", content=b"{}", headers=headers)

    is_problem(answer, 413)


async def test_a_body_that_trickles_is_given_up(intake: Intake) -> None:
    pieces = Pieces(b" ", pause_s=1)

    answer = await intake.http.post("/v1/jobs", content=pieces, headers={"Content-Type": "application/json"})

    is_problem(answer, 408)
    assert pieces.sent <= BODY_S + 1


async def test_all_bodies_together_have_a_bound_which_is_free_again_afterwards() -> None:
    async with opened(Intake(bodies=Bodies(most_bytes_at_once=100))) as intake:
        refused = await intake.post({"payload": {"text": "x" * 200}})
        accepted = await intake.post({"payload": CHAT})

    assert "retry-after" in refused.headers
    is_problem(refused, 503)
    assert accepted.status_code == 202


async def test_the_bound_of_a_body_is_that_of_the_settings() -> None:
    async with opened(Intake(bodies=Bodies(most_bytes=100))) as intake:
        refused = await intake.post({"payload": {"text": "x" * 100}})

    assert "100 bytes" in is_problem(refused, 413)["detail"]


async def test_half_a_character_in_a_payload_reaches_the_queue_as_the_bytes_that_came(intake: Intake) -> None:
    """Browsers write them when a text is cut in the middle of an emoji."""
    payload = rb'{"text": "\ud83d"}'

    answer = await intake.http.post(
        "/v1/jobs", content=b'{"payload":%b}' % payload, headers={"Content-Type": "application/json"}
    )

    assert answer.status_code == 202
    assert payload in intake.queue.bodies[0]


@pytest.mark.parametrize(
    ("refuses", "status"),
    [
        pytest.param(TransportLost("not connected yet"), 503, id="the broker is away"),
        pytest.param(QueueFull("it holds 10000 messages"), 429, id="the queue is full"),
        pytest.param(
            NotAccepted("it is larger than 8 bytes", maybe=False, for_good=True), 413, id="the queue never will"
        ),
        pytest.param(NotAccepted("not confirmed", maybe=True), 503, id="the broker has not confirmed it"),
    ],
)
async def test_a_job_that_the_broker_has_not_taken_is_not_accepted(
    intake: Intake, refuses: Exception, status: int
) -> None:
    intake.queue.refuses = refuses

    answer = await intake.post({"payload": CHAT})

    assert str(refuses) in is_problem(answer, status)["detail"]
    assert ("retry-after" in answer.headers) == (status != 413)
    assert intake.queue.bodies == []
    if status in (413, 429):  # The others may have put it in: its record stays, under an id that nobody was told.
        is_problem(await intake.get("job-1"), 404)


# ---------------------------------------------------------------- asking


async def test_a_job_is_queued_until_somebody_runs_it(intake: Intake) -> None:
    job_id = await intake.job()

    answer = await intake.get(job_id)

    assert answer.status_code == 200
    assert said(answer) == {
        "job_id": job_id,
        "status": "queued",
        "attempt": 0,
        "created_at": START,
        "expires_at": START + DEFAULT_TIMEOUT_S,
    }


async def test_a_job_runs_while_a_claim_on_it_is_alive_and_is_retrying_after_it(intake: Intake) -> None:
    job_id = await intake.job()

    await intake.store.claim(job_id, 0, Token("t"), intake.now() + 60)
    running = await intake.state(job_id)
    await intake.store.release(job_id, Token("t"), 1)

    assert running == "running"
    retrying = said(await intake.get(job_id))
    assert (retrying["status"], retrying["attempt"]) == ("retrying", 1)


async def test_a_result_is_shown_as_the_bytes_that_were_stored(intake: Intake) -> None:
    job_id = await intake.job()
    await intake.end(job_id, result=b'{"n":1.0, "n":2,"big":123456789012345678901234567890}')

    answer = await intake.get(job_id)

    body = said(answer)
    assert (body["status"], body["status_code"], body["attempt"], body["timings"]) == ("succeeded", 200, 1, {})
    assert b'"result":{"n":1.0, "n":2,"big":123456789012345678901234567890}' in answer.content
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("status_code", "code", "state"),
    [
        (499, "cancelled", "cancelled"),
        (408, "expired", "expired"),
        (408, "deadline_exceeded", "expired"),
        (500, "retries_exhausted", "dead"),
        (500, "poison", "dead"),
        (400, "invalid_request", "dead"),
        (502, "bad_response", "failed"),
        (429, "model_error", "failed"),
        (408, "model_error", "failed"),
    ],
)
async def test_a_failure_is_the_state_that_its_reason_says(
    intake: Intake, status_code: int, code: ErrorCode, state: str
) -> None:
    job_id = await intake.job()
    await intake.end(job_id, status_code=status_code, code=code)

    body = said(await intake.get(job_id))

    assert (body["status"], body["status_code"], body["error"], body["error_code"]) == (
        state,
        status_code,
        "it failed",
        code,
    )


@pytest.mark.parametrize(("status_code", "state"), [(499, "cancelled"), (408, "expired"), (500, "failed")])
def test_a_result_without_an_error_code_is_read_by_its_status(status_code: int, state: str) -> None:
    """As a worker of the first source's own would have written it."""
    assert state_of("failed", status_code, None) == state


async def test_a_damaged_result_is_said_to_be_one(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(request_id: str) -> bytes:
        return b"{not json"

    monkeypatch.setattr(intake.store, "read", read)

    body = said(await intake.get("job-1"))

    assert (body["status"], body["error"]) == ("failed", "the stored result cannot be read")


async def test_a_job_that_nobody_knows_is_not_found(intake: Intake) -> None:
    is_problem(await intake.get("job-1"), 404)


@pytest.mark.parametrize("job_id", ["%0A", "x" * 600], ids=["a line break", "too long"])
async def test_what_can_be_no_id_is_not_found_without_asking_the_store(intake: Intake, job_id: str) -> None:
    intake.store.away = "must not be asked"

    is_problem(await intake.get(job_id), 404)


async def test_a_job_that_came_another_way_is_known_once_it_runs_or_has_ended(intake: Intake) -> None:
    await intake.store.claim("other", 0, Token("t"), intake.now() + 60)
    running = await intake.state("other")
    await intake.end("other")

    assert running == "running"
    assert await intake.state("other") == "succeeded"


async def test_a_job_that_ends_between_the_two_questions_is_found(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def progress(request_id: str) -> Progress:
        await intake.end(request_id)
        return Progress(running=False)

    monkeypatch.setattr(intake.store, "progress", progress)

    assert await intake.state("other") == "succeeded"


async def test_a_job_whose_result_has_gone_is_gone(intake: Intake) -> None:
    job_id = await intake.job()
    await intake.end(job_id)
    seen = await intake.state(job_id)

    await asyncio.sleep(TTL_S + 1)

    assert seen == "succeeded"
    is_problem(await intake.get(job_id), 410)


async def test_a_job_of_which_nothing_can_come_any_more_is_gone_and_then_forgotten(intake: Intake) -> None:
    job_id = await intake.job(timeout_s=10)

    await asyncio.sleep(10 + TTL_S + 1)
    gone = await intake.get(job_id)
    await asyncio.sleep(KEPT_AFTER_S)
    await intake.job()

    is_problem(gone, 410)
    is_problem(await intake.get(job_id), 404)


async def test_without_a_store_no_state_can_be_told(intake: Intake) -> None:
    job_id = await intake.job()
    intake.store.away = "Redis gave no answer"

    answer = await intake.get(job_id)

    assert "Redis gave no answer" in is_problem(answer, 503)["detail"]
    assert "retry-after" in answer.headers


# ---------------------------------------------------------------- waiting


async def test_a_wait_ends_with_the_job(intake: Intake) -> None:
    job_id = await intake.job()
    loop = asyncio.get_running_loop()

    async with asyncio.TaskGroup() as group:
        asked = group.create_task(intake.get(job_id, wait=30))
        await asyncio.sleep(5)
        await intake.end(job_id)

    assert said(asked.result())["status"] == "succeeded"
    assert loop.time() == pytest.approx(5)


@pytest.mark.parametrize(("asked_s", "waits_s"), [(3, 3), (100_000, LONGEST_WAIT_S)])
async def test_a_wait_is_over_after_its_time_at_the_latest(intake: Intake, asked_s: float, waits_s: float) -> None:
    job_id = await intake.job()

    answer = await intake.get(job_id, wait=asked_s)

    assert said(answer)["status"] == "queued"
    assert asyncio.get_running_loop().time() == pytest.approx(waits_s)


@pytest.mark.parametrize("wait", ["-1", "soon", "nan"])
async def test_a_wait_that_is_no_number_is_refused(intake: Intake, wait: str) -> None:
    job_id = await intake.job()

    assert "wait must be a number of seconds" in is_problem(await intake.get(job_id, wait=wait), 422)["detail"]


async def test_nobody_waits_for_a_job_that_is_not_known(intake: Intake) -> None:
    answer = await intake.get("job-1", wait=30)

    is_problem(answer, 404)
    assert asyncio.get_running_loop().time() == 0


async def test_a_wait_ends_when_the_intake_stops(intake: Intake) -> None:
    job_id = await intake.job()

    async with asyncio.TaskGroup() as group:
        asked = group.create_task(intake.get(job_id, wait=30))
        await asyncio.sleep(1)
        intake.jobs.stopping.set()

    assert said(asked.result())["status"] == "queued"
    assert asyncio.get_running_loop().time() == pytest.approx(1)


async def test_a_store_that_goes_away_during_a_wait_is_told(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = await intake.job()

    async with asyncio.TaskGroup() as group:
        asked = group.create_task(intake.get(job_id, wait=3))
        await asyncio.sleep(1)
        intake.store.away = "Redis gave no answer"

    is_problem(asked.result(), 503)


# ---------------------------------------------------------------- around it


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("PUT", "/v1/jobs", 405), ("PATCH", "/v1/jobs/x", 405), ("GET", "/v1/jobs/", 404)],
)
async def test_what_does_not_exist_is_a_problem_in_json(intake: Intake, method: str, path: str, status: int) -> None:
    answer = await intake.http.request(method, path)

    assert path in is_problem(answer, status)["detail"]
    allowed = {"/v1/jobs": "GET, POST", "/v1/jobs/x": "DELETE, GET"}
    assert answer.headers.get("allow") == (allowed[path] if status == 405 else None)


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/v1/jobs", "/v1/jobs/nobodys"])
async def test_head_says_what_get_would(intake: Intake, path: str) -> None:
    """Balancers ask whether somebody is alive by it."""
    asked, got = await intake.http.head(path), await intake.http.get(path)

    assert asked.status_code == got.status_code
    assert asked.headers["content-type"] == got.headers["content-type"]


async def test_a_fault_of_ours_is_a_problem_without_its_details(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(request_id: str) -> bytes:
        raise RuntimeError("secret")

    monkeypatch.setattr(intake.store, "read", read)

    answer = await intake.get("job-1")

    is_problem(answer, 500)
    assert "secret" not in answer.text


async def test_the_api_describes_itself(intake: Intake) -> None:
    described = said(await intake.http.get("/openapi.json"))

    assert set(described["paths"]) == {
        "/v1/jobs",
        "/v1/jobs/{job_id}",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/models",
        "/v1/models/{model_id}",
    }
    assert said(await intake.http.get("/"))["jobs"] == "/v1/jobs"


@asynccontextmanager
async def served(port: int = 0) -> AsyncGenerator[tuple[Intake, str]]:
    made = Intake()
    async with made.http, serving(made.web, "127.0.0.1", port, made.jobs.stopping) as url:
        yield made, url


@pytest.mark.real_loop
async def test_the_intake_listens_and_ends_those_who_wait_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = asyncio.Event()
    wait_for_result = MemoryStore.wait

    async def wait(self: MemoryStore, request_id: str, within_s: float) -> bytes | None:
        waits.set()
        return await wait_for_result(self, request_id, within_s)

    monkeypatch.setattr(MemoryStore, "wait", wait)
    async with httpx.AsyncClient(trust_env=False) as client:
        async with served() as (made, url):
            job_id = await made.job()
            seen = await client.get(f"{url}/v1/jobs/{job_id}")
            waiting = asyncio.create_task(client.get(f"{url}/v1/jobs/{job_id}", params={"wait": 30}))
            await waits.wait()
        waited = await waiting

    assert (seen.status_code, waited.status_code) == (200, 200)


@pytest.mark.real_loop
async def test_a_port_in_use_is_told_by_the_name_of_its_variable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(OSError, match=f"GATEWAY_PORT: cannot listen on 127.0.0.1:{port}: it is in use") as told:
            async with served(port):
                pass

    assert isinstance(told.value.__cause__, OSError)
    assert told.value.__cause__.errno == errno.EADDRINUSE
