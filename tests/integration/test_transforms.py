"""Transforms and inner names of models in a whole process, over real connections."""

import base64
import json

from inference_worker.transforms.chain import Body
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
    async with processing(redis_url, queues=queues, transforms=TRANSFORMS) as running:
        await running.submit("a", queue="named", payload={**chat, "stream": True})
        streamed = json.loads((await running.result("a"))["payload"])
        await running.submit("b", queue="plain", payload=chat)
        mapped = json.loads((await running.result("b"))["payload"])

    assert (streamed["model"], streamed["choices"][0]["message"]["content"]) == ("mine", "tick tock")
    assert mapped["model"] == "shown"
    named, plain = sent(model)
    assert json.loads(named.content) == {**chat, "model": "inner", "stream": True}
    assert (plain.content, plain.content_type) == (json.dumps(chat).encode(), "application/json")
