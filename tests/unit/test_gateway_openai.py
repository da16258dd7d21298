"""OpenAI's paths over the queue. With OpenAI's own client: tests/integration/test_openai_client.py."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import msgspec
import pytest

from inference_worker.disposition import Token
from inference_worker.errors import StoreUnavailable
from inference_worker.gateway.completions import answer_of, chunks
from inference_worker.gateway.openai_api import FIRST_S, KEEP_ALIVE_S, TIMEOUT_S
from inference_worker.gateway.problems import Refusal
from inference_worker.messages import ErrorCode, decode
from tests.unit.gateway_kit import CHAT, START, WAIT_S, Intake, is_openai_error, is_problem, opened, said

ANSWER: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "system_fingerprint": "fp",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hé\n☃", "reasoning_content": "hm", "tool_calls": None},
            "logprobs": {"content": [{"token": "H", "logprob": -0.5}]},
            "finish_reason": "stop",
            "stop_reason": 7,
        },
        {
            "index": 1,
            "message": {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
                    {"id": "call-2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
                ],
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        },
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
}
RAW = json.dumps(ANSWER, indent=1).encode()


@pytest.fixture
async def intake() -> AsyncIterator[Intake]:
    async with opened(Intake(models=("m", "people/model-7b"))) as made:
        yield made


async def answered(
    intake: Intake,
    body: Mapping[str, object],
    *,
    after_s: float = 1.0,
    path: str = "/v1/chat/completions",
    headers: Mapping[str, str] | None = None,
    result: bytes = RAW,
    code: ErrorCode | None = None,
    status_code: int = 200,
) -> httpx.Response:
    """Ask, and have the job end after a while."""
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(intake.http.post(path, json=dict(body), headers=dict(headers or {})))
        await intake.queue.published.wait()
        await asyncio.sleep(after_s)
        await intake.end(intake.queue.ids[-1], result=result, code=code, status_code=status_code)
    return asked.result()


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as streams do."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


# ---------------------------------------------------------------- whole answers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
async def test_the_answer_comes_as_the_bytes_that_the_model_sent(intake: Intake, path: str) -> None:
    answer = await answered(intake, CHAT, path=path)

    assert answer.status_code == 200
    assert answer.content == RAW
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-job-id"] == intake.queue.ids[0]
    request = decode(intake.queue.bodies[0], message_id=None, infer_path="/x", now=START)
    assert (request.endpoint, request.timeout_s) == (path, TIMEOUT_S)


async def test_the_body_is_the_payload_untouched(intake: Intake) -> None:
    body = rb' { "messages" :[], "a":1.0,"a":2, "t":"\ud83d" }'

    asked = asyncio.create_task(
        intake.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    )
    await intake.queue.published.wait()
    await intake.end("job-1")
    await asked

    assert b'"payload":' + body in intake.queue.bodies[0]


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"[]", "application/json", 400),
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b'"\xff"', "application/json", 400),
        (b"{}", "text/plain", 415),
    ],
)
async def test_a_body_that_is_no_payload_is_refused_in_openais_shape(
    intake: Intake, body: bytes, kind: str, status: int
) -> None:
    answer = await intake.http.post("/v1/completions", content=body, headers={"Content-Type": kind})

    assert is_openai_error(answer, status)["type"] == "invalid_request_error"
    assert intake.queue.bodies == []
    assert intake.count("jobs_refused_total", reason="invalid") == 1


@pytest.mark.parametrize(
    ("status_code", "code", "status", "retry"),
    [
        pytest.param(400, "model_error", 400, None, id="the model says that it is wrong"),
        pytest.param(429, "model_error", 429, None, id="the model is busy"),
        pytest.param(503, "model_error", 503, None, id="the model is away"),
        pytest.param(502, "bad_response", 502, None, id="the model's answer is none"),
        pytest.param(500, "retries_exhausted", 500, "false", id="tried as often as it may be"),
        pytest.param(500, "poison", 500, "false", id="its workers died"),
        pytest.param(408, "expired", 504, "false", id="its time was over"),
        pytest.param(408, "deadline_exceeded", 504, "false", id="its time was over in the middle"),
        pytest.param(499, "cancelled", 409, "false", id="somebody cancelled it"),
        pytest.param(0, "model_error", 502, None, id="a status that is none"),
    ],
)
async def test_a_failed_job_is_an_error_with_its_status_and_words(
    intake: Intake, status_code: int, code: ErrorCode, status: int, retry: str | None
) -> None:
    answer = await answered(intake, CHAT, status_code=status_code, code=code)

    error = is_openai_error(answer, status)
    assert (error["message"], error["code"], error["job_id"]) == ("it failed", code, "job-1")
    assert answer.headers["x-job-id"] == "job-1"
    assert answer.headers.get("x-should-retry") == retry


async def test_a_job_that_takes_too_long_is_named_and_stays(intake: Intake) -> None:
    answer = await intake.chat()

    assert "job-1" in is_openai_error(answer, 504)["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert asyncio.get_running_loop().time() == pytest.approx(WAIT_S)
    assert await intake.state("job-1") == "queued"


@pytest.mark.parametrize(("asked", "waits_s"), [("wait=3", 3.0), ("wait=1000000", WAIT_S), ("wait=x", WAIT_S)])
async def test_a_caller_may_wait_less_and_not_more(intake: Intake, asked: str, waits_s: float) -> None:
    is_openai_error(await intake.chat({"Prefer": asked}), 504)

    assert asyncio.get_running_loop().time() == pytest.approx(waits_s)


async def test_who_does_not_want_to_wait_gets_the_job(intake: Intake) -> None:
    answer = await intake.chat({"Prefer": "respond-async"})

    assert answer.status_code == 202
    assert answer.headers["preference-applied"] == "respond-async"
    assert answer.headers["location"] == "/v1/jobs/job-1"
    assert (said(answer)["status"], said(answer)["position"]) == ("queued", 1)
    assert asyncio.get_running_loop().time() == 0


async def test_who_wants_to_wait_a_little_gets_the_answer_or_the_job(intake: Intake) -> None:
    late = await intake.chat({"Prefer": "respond-async, wait=3"})
    took_s = asyncio.get_running_loop().time()
    intake.queue.published.clear()
    soon = await answered(intake, CHAT, headers={"Prefer": "respond-async, wait=3"})

    assert (late.status_code, late.headers["preference-applied"]) == (202, "respond-async, wait=3")
    assert took_s == pytest.approx(3)
    assert soon.content == RAW


async def test_an_idempotency_key_asks_for_the_same_answer_again(intake: Intake) -> None:
    first = await answered(intake, CHAT, headers={"Idempotency-Key": "k"})
    second = await intake.chat({"Idempotency-Key": "k"})

    assert second.content == first.content
    assert second.headers["idempotency-replayed"] == "true"
    assert len(intake.queue.ids) == 1


async def test_a_full_queue_is_told_in_openais_shape() -> None:
    async with opened(Intake(most_waiting=1)) as intake:
        await intake.job()
        await asyncio.sleep(1)

        answer = await intake.chat()

    assert is_openai_error(answer, 429)["code"] == "queue_full"
    assert "retry-after" in answer.headers


async def test_a_store_that_is_away_for_a_moment_is_asked_again(intake: Intake) -> None:
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(intake.chat())
        await intake.queue.published.wait()
        await asyncio.sleep(0.1)
        intake.store.away = "Redis gave no answer"
        await asyncio.sleep(5)
        intake.store.away = None
        await intake.end("job-1", result=RAW)

    assert asked.result().content == RAW


async def test_a_store_that_stays_away_is_told_with_the_job(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait(request_id: str, within_s: float) -> bytes | None:
        raise StoreUnavailable("Redis gave no answer")

    monkeypatch.setattr(intake.store, "wait", wait)

    answer = await intake.chat()

    assert "job-1" in is_openai_error(answer, 503)["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert asyncio.get_running_loop().time() == pytest.approx(WAIT_S)


async def test_a_gateway_that_stops_lets_those_go_who_wait(intake: Intake) -> None:
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(intake.chat())
        await intake.queue.published.wait()
        await asyncio.sleep(1)
        intake.jobs.stopping.set()

    assert is_openai_error(asked.result(), 503)["code"] == "stopping"
    assert await intake.state("job-1") == "queued"


# ---------------------------------------------------------------- streams


async def test_a_stream_has_every_part_of_the_answer(intake: Intake) -> None:
    answer = await answered(intake, {**CHAT, "stream": True})

    parts = events_of(answer)
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert {(part["id"], part["model"], part["system_fingerprint"]) for part in parts} == {("chatcmpl-1", "m", "fp")}
    assert all("usage" not in part for part in parts)
    first, second = ([p["choices"][0] for p in parts if p["choices"][0]["index"] == index] for index in (0, 1))
    assert first[0]["delta"]["content"] == "Hé\n☃"
    assert first[0]["delta"]["reasoning_content"] == "hm"
    assert first[0]["logprobs"] == ANSWER["choices"][0]["logprobs"]
    assert (first[0]["finish_reason"], first[-1]["finish_reason"], first[-1]["stop_reason"]) == (None, "stop", 7)
    assert [call["index"] for call in second[0]["delta"]["tool_calls"]] == [0, 1]
    assert second[0]["delta"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert second[-1]["finish_reason"] == "tool_calls"
    assert answer.headers["x-job-id"] == "job-1"


async def test_the_usage_of_a_stream_comes_where_it_is_asked_for(intake: Intake) -> None:
    parts = events_of(await answered(intake, {**CHAT, "stream": True, "stream_options": {"include_usage": True}}))

    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == ANSWER["usage"]
    assert all(part["usage"] is None for part in parts[:-1])


async def test_a_stream_of_text_has_its_texts(intake: Intake) -> None:
    whole = {"id": "c", "choices": [{"index": 0, "text": "a\nb", "logprobs": None, "finish_reason": "length"}]}

    parts = events_of(
        await answered(
            intake, {"prompt": "x", "stream": True}, path="/v1/completions", result=json.dumps(whole).encode()
        )
    )

    assert {part["object"] for part in parts} == {"text_completion"}
    assert "".join(part["choices"][0]["text"] for part in parts) == "a\nb"
    assert parts[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_stream_shows_that_it_lives_while_its_job_waits(intake: Intake) -> None:
    answer = await answered(intake, {**CHAT, "stream": True}, after_s=FIRST_S + 2.5 * KEEP_ALIVE_S)

    assert answer.text.count(": the job") == 3
    assert events_of(answer)


async def test_what_fails_soon_fails_with_its_status(intake: Intake) -> None:
    answer = await answered(intake, {**CHAT, "stream": True}, code="model_error", status_code=400)

    is_openai_error(answer, 400)


@pytest.mark.parametrize("result", [b"null", b'{"data": []}', b'{"choices": 3}', b'{"choices": [{"message": 1}]}'])
async def test_an_answer_that_cannot_be_streamed_is_an_error(intake: Intake, result: bytes) -> None:
    answer = await answered(intake, {**CHAT, "stream": True}, result=result)

    assert is_openai_error(answer, 502)["code"] == "bad_response"


async def test_what_fails_late_is_an_error_in_the_stream(intake: Intake) -> None:
    answer = await answered(intake, {**CHAT, "stream": True}, after_s=FIRST_S + 1, code="poison", status_code=500)

    (event,) = events_of(answer)
    assert answer.status_code == 200
    assert (event["error"]["message"], event["error"]["code"]) == ("it failed", "poison")


async def test_a_stream_that_takes_too_long_names_its_job(intake: Intake) -> None:
    (event,) = events_of(await intake.chat(stream=True))

    assert event["error"]["code"] == "not_ended_in_time"
    assert "job-1" in event["error"]["message"]
    assert asyncio.get_running_loop().time() == pytest.approx(WAIT_S)


async def test_a_stream_ends_with_the_gateway(intake: Intake) -> None:
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(intake.chat(stream=True))
        await intake.queue.published.wait()
        await asyncio.sleep(FIRST_S + 1)
        intake.jobs.stopping.set()

    (event,) = events_of(asked.result())
    assert event["error"]["code"] == "stopping"


def test_a_large_answer_is_cut_into_chunks_without_being_decoded() -> None:
    """Texts are slices: a mebibyte takes milliseconds. The bar is far above, for slow machines."""
    text = json.dumps("x\\u00e9" * 700_000)
    result = b'{"choices": [{"index": 0, "message": {"content": %b}, "finish_reason": "stop"}]}' % text.encode()

    first = next(chunks("j", msgspec.Raw(result), chat=True, include_usage=False))

    assert text.encode() in first


def test_a_stored_result_that_cannot_be_read_is_told() -> None:
    with pytest.raises(Refusal, match="cannot be read"):
        answer_of("j", b"{half")


# ---------------------------------------------------------------- clients that go away


class Client:
    """A client of one request that can go away, and what it got."""

    def __init__(self, intake: Intake, path: str, body: object, headers: Mapping[str, str]) -> None:
        self.intake = intake
        self.body = json.dumps(body).encode()
        self.gone = asyncio.Event()
        self.got: list[Any] = []
        self.sent = False
        names = {"content-type": "application/json", **headers}
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in names.items()],
            "server": ("intake", 80),
            "client": ("client", 1),
        }

    async def receive(self) -> dict[str, Any]:
        if not self.sent:
            self.sent = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.got.append(message)

    async def run(self) -> None:
        await self.intake.web(self.scope, self.receive, self.send)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("after_s", [1.0, FIRST_S + 1.0])
@pytest.mark.parametrize(
    ("headers", "state"),
    [({}, "cancelled"), ({"Idempotency-Key": "k"}, "running")],
    ids=["nobody can ask again", "who has a key will be back"],
)
async def test_who_goes_away_while_he_waits_cancels_his_job(
    intake: Intake, stream: bool, after_s: float, headers: dict[str, str], state: str
) -> None:
    client = Client(intake, "/v1/chat/completions", {**CHAT, "stream": stream}, headers)
    async with asyncio.TaskGroup() as group:
        group.create_task(client.run())
        await intake.queue.published.wait()
        await intake.store.claim("job-1", 0, Token("t"), intake.now() + 60)
        await asyncio.sleep(after_s)
        client.gone.set()

    assert asyncio.get_running_loop().time() == pytest.approx(after_s)
    assert await intake.state("job-1") == state


async def test_who_goes_away_from_a_job_keeps_it(intake: Intake) -> None:
    """`GET …?wait=` is a question, not the job."""
    job_id = await intake.job()
    waiting = asyncio.create_task(intake.get(job_id, wait=30))
    await asyncio.sleep(1)
    waiting.cancel()
    await asyncio.wait([waiting])

    assert await intake.state(job_id) == "queued"


async def test_who_goes_away_from_a_job_is_not_waited_for(intake: Intake) -> None:
    """He would count among those under way, of whom there may be so many, up to the end of his time."""
    job_id = await intake.job()
    client = Client(intake, f"/v1/jobs/{job_id}", {}, {})
    client.scope |= {"method": "GET", "query_string": b"wait=30"}
    async with asyncio.TaskGroup() as group:
        group.create_task(client.run())
        await asyncio.sleep(1)
        client.gone.set()

    assert asyncio.get_running_loop().time() == pytest.approx(1)
    assert await intake.state(job_id) == "queued"


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/chat/completions"])
async def test_who_goes_away_in_the_middle_of_a_body_has_asked_for_nothing(intake: Intake, path: str) -> None:
    client = Client(intake, path, CHAT, {})
    client.sent = True  # Nothing comes but the end.
    client.gone.set()

    await client.run()

    assert intake.queue.ids == []
    assert client.got[0]["status"] == 400


# ---------------------------------------------------------------- models


async def test_models_are_listed_and_found_by_their_names(intake: Intake) -> None:
    listed = said(await intake.http.get("/v1/models"))
    one = said(await intake.http.get("/v1/models/people/model-7b"))
    escaped = said(await intake.http.get("/v1/models/people%2Fmodel-7b"))

    assert [model["id"] for model in listed["data"]] == ["m", "people/model-7b"]
    assert one["id"] == escaped["id"] == "people/model-7b"


async def test_a_model_that_nobody_has_is_not_found_in_openais_shape(intake: Intake) -> None:
    assert is_openai_error(await intake.http.get("/v1/models/none"), 404)["code"] == "model_not_found"


async def test_what_openai_has_and_we_have_not_is_told_in_openais_shape(intake: Intake) -> None:
    """Its clients show the message of no other body."""
    error = is_openai_error(await intake.http.post("/v1/responses", json={}), 404)

    assert "POST /v1/responses" in error["message"]
    is_problem(await intake.http.get("/v1/jobs/a/b"), 404)


async def test_a_method_that_a_path_does_not_have_is_told_in_its_shape(intake: Intake) -> None:
    is_openai_error(await intake.http.get("/v1/chat/completions"), 405)
    is_problem(await intake.http.put("/v1/jobs"), 405)
