"""Transforms and inner names of models in a whole process, over real connections."""

import base64
import json
from typing import Any, cast

from redis.asyncio import Redis

from inference_worker.transforms.chain import Body
from tests.conservation import outbox
from tests.faults import wire
from tests.faults.model import FakeModel, sse
from tests.process_rig import processing, queue
from tests.unit.form_kit import Part, fields_of, parts_of

TRANSFORMS = {
    "requestTransforms": [
        {"name": "stored", "type": "gcs_uri_multipart", "parameters": {"providers": ["whisper"]}},
        {"name": "audio", "type": "multipart"},
    ],
    "responseTransforms": [{"name": "public", "type": "model_name", "parameters": {"names": {"tiny": "shown"}}}],
}
AUDIO = {"request_path_url": "/v1/audio/transcriptions"}
WHISPER = {"provider": "whisper"}
BILLS = {"CROESUS_HOST": "http://127.0.0.1:1"}
"""Nobody takes usage events there, so they stay."""


async def billed_data(redis: Redis) -> list[dict[str, Any]]:
    return [cast("dict[str, Any]", event["data"]) for event in await outbox(redis, "process")]


def sent(model: FakeModel) -> list[Body]:
    """What the gateway got, in its order."""
    return [Body(content=one.body, content_type=one.headers["content-type"]) for one in model.requests]


async def test_forms_arrive_whole_and_refused_requests_not_at_all_case_290(redis_url: str, model: FakeModel) -> None:
    sound = bytes(range(256)) * 400
    upload = {"model": "mine", "file_base64": base64.b64encode(sound).decode(), "filename": "a.mp3"}
    queues = [queue("audio", model.url, **AUDIO, model_override="inner")]
    async with processing(redis_url, queues=queues, transforms=TRANSFORMS) as running:
        await running.submit("upload", payload=upload)
        answer = json.loads((await running.result("upload"))["payload"])
        await running.submit("stored", payload={"gcs_uri": "https://g/o", "temperature": 0.5}, metadata=WHISPER)
        await running.result("stored")
        await running.submit("late", payload={"gcs_uri": "https://g/o?Expires=1700000000"}, metadata=WHISPER)
        late = await running.result("late")

    first, second = sent(model)
    assert await parts_of(first) == [
        Part(name="model", content=b"inner"),
        Part(name="file", content=sound, filename="a.mp3", content_type="audio/mpeg"),
    ]
    assert await fields_of(second) == {"url": "https://g/o", "model": "inner", "temperature": "0.5"}
    assert answer["model"] == "mine"
    assert (late["error_code"], "status_code" in late) == ("INVALID_REQUEST", False)
    assert "the transform stored refuses it" in late["error_message"]


async def test_names_are_restored_in_streams_and_everything_else_passes_as_it_came(
    redis_url: str, model: FakeModel
) -> None:
    model.next(sse("tick", "tock"))
    queues = [
        queue("named", model.url, request_path_url="/v1/chat/completions", model_override="inner"),
        queue("plain", model.url, request_path_url="/v1/chat/completions"),
    ]
    chat = {"model": "mine", "messages": [{"role": "user", "content": "model"}]}
    async with processing(redis_url, queues=queues, transforms=TRANSFORMS, environ=BILLS) as running:
        await running.submit("a", queue="named", payload={**chat, "stream": True})
        streamed = json.loads((await running.result("a"))["payload"])
        await running.submit("b", queue="plain", payload=chat)
        mapped = json.loads((await running.result("b"))["payload"])
        await running.submit("c", queue="named", payload={"messages": []})
        await running.result("c")
        billed = {data["request_id"]: data for data in await billed_data(running.redis)}

    assert (streamed["model"], streamed["choices"][0]["message"]["content"]) == ("mine", "tick tock")
    assert mapped["model"] == "shown"
    assert {name: data["model"] for name, data in billed.items()} == {"b": "mine", "c": "various"}
    named, plain, _ = sent(model)
    assert json.loads(named.content) == {**chat, "model": "inner", "stream": True}
    assert (plain.content, plain.content_type) == (json.dumps(chat).encode(), "application/json")


async def test_a_retried_stream_is_shaped_anew_and_its_result_goes_its_own_way_with_the_callers_name(
    redis_url: str, model: FakeModel
) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    model.next(wire.answer(503, {"error": {"message": "inner is busy"}}), sse("tick", "tock", usage=usage))
    quota = {"gate_params": {"address": redis_url, "limit": 100, "counts": "tokens"}, "gate_type": "redis-quota"}
    queues = [
        queue("named", model.url, request_path_url="/v1/chat/completions", model_override="inner", **quota),
    ]
    chat = {"model": "mine", "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with processing(redis_url, queues=queues, transforms=TRANSFORMS, environ=BILLS) as running:
        await running.submit("a", payload=chat, metadata={"userid": "u"}, result_queue_name="mine")
        result = await running.result("a", "mine")
        (data,) = await billed_data(running.redis)

    answer = json.loads(result["payload"])
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("mine", "tick tock")
    assert [json.loads(one.content)["model"] for one in sent(model)] == ["inner", "inner"]
    assert (data["model"], data["total_tokens"], data["attempt"]) == ("mine", 5, 1)
