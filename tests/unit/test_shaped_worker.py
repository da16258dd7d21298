"""A worker with transforms and inner names, from message to result. Names end in the number of the peer's case."""

import base64
import json
import random
from dataclasses import replace

import pytest

from inference_worker.disposition import Concluded, Outcome
from inference_worker.errors import BadResponse
from inference_worker.llmd_results import outcome_of
from inference_worker.messages import InferenceRequest
from inference_worker.pool_gate import PoolGate
from inference_worker.ports import Admitted, Answer, Route
from inference_worker.transforms.chain import Body, Transforms, Unfit
from inference_worker.transforms.gcs_uri import GcsUriMultipart
from inference_worker.transforms.model_name import ModelName
from inference_worker.transforms.multipart import Multipart
from inference_worker.transforms.shaping import Shaping
from tests.unit.form_kit import fields_of, parts_of
from tests.unit.gate_kit import Told
from tests.unit.worker_kit import EPOCH, FakeModel, Site, Worker, now

ROUTE = Route(base_url="http://gateway", path="/v1/audio/transcriptions")
INNER = replace(ROUTE, path="/v1/chat/completions", model="inner")
SHAPING = Shaping(transforms=Transforms(requests={"gcs": GcsUriMultipart(["whisper"]), "audio": Multipart()}))


def request(payload: bytes, *, stream: bool = False, headers: dict[str, str] | None = None) -> InferenceRequest:
    return InferenceRequest(
        request_id="a",
        received_at=now(),
        timeout_s=600.0,
        deadline=now() + 600.0,
        payload=payload,
        endpoint="/v1/audio/transcriptions",
        stream=stream,
        metadata={"provider": "whisper"},
        headers=headers or {},
    )


async def processed(worker: Worker, sent: InferenceRequest, route: Route = ROUTE) -> Outcome:
    job = worker.job(sent.payload)
    job.delivery = replace(job.delivery, request=sent, route=route)
    try:
        return await worker.processor.process(job)
    finally:
        worker.processor.forget(job)


async def concluded(worker: Worker, sent: InferenceRequest, route: Route = ROUTE) -> Concluded:
    outcome = await processed(worker, sent, route)
    assert isinstance(outcome, Concluded)
    return outcome


@pytest.mark.parametrize("name", ["Content-Type", "content-type", "CONTENT-TYPE"])
async def test_the_form_is_sent_under_its_own_type_and_again_as_clean_case_290(name: str) -> None:
    """The caller's type would name no boundary, or a wrong one; its headers are for the next attempt, too."""
    model = FakeModel()
    worker = Worker(Site(), model, shaping=SHAPING)
    sent = request(b'{"gcs_uri":"https://g/o","temperature":0.5}', headers={name: "application/json", "X-Mine": "1"})

    for _ in range(2):
        await concluded(worker, sent)

    for payload, headers in zip(model.payloads, model.headers, strict=True):
        (content_type,) = [value for name, value in headers.items() if name.lower() == "content-type"]
        body = Body(content=payload, content_type=content_type)
        assert await fields_of(body) == {"url": "https://g/o", "temperature": "0.5"}
        assert headers["X-Mine"] == "1"
    assert sent.headers == {name: "application/json", "X-Mine": "1"}


async def test_what_no_transform_is_for_goes_as_it_came_with_the_callers_type_case_290() -> None:
    model = FakeModel()
    odd = b'{ "a": 1.0 }'

    await concluded(Worker(Site(), model, shaping=SHAPING), request(odd, headers={"content-type": "text/x"}))

    assert (model.payloads, dict(model.headers[0])) == ([odd], {"content-type": "text/x"})


async def test_a_refused_request_ends_without_a_call_a_gate_or_a_claim_case_290() -> None:
    early = f'{{"gcs_uri":"https://g/o?Expires={EPOCH:.0f}"}}'.encode()
    gate = Told(Admitted())
    worker = Worker(Site(), FakeModel(), shaping=SHAPING, gate=PoolGate(gate, random.Random(3)))

    outcome = await concluded(worker, request(early))

    assert (outcome.reply.status_code, outcome.reply.error_code) == (400, "invalid_request")
    assert "the transform gcs refuses it: gcs_uri expires" in (outcome.reply.error or "")
    assert outcome_of(outcome.reply).code == "INVALID_REQUEST"  # type: ignore[union-attr]
    assert (worker.model.calls, gate.asks, worker.store.asked) == ([], 0, [])


async def test_a_body_that_cannot_be_made_ends_the_request_without_a_call_case_290() -> None:
    worker = Worker(Site(), FakeModel(), shaping=SHAPING)

    outcome = await concluded(worker, request(b'{"file_base64":"?"}'))

    assert (outcome.reply.status_code, outcome.reply.error_code) == (400, "invalid_request")
    assert "no base64" in (outcome.reply.error or "")
    assert worker.model.calls == []
    assert worker.processor.calls == 0


async def test_an_upload_goes_out_with_the_inner_name() -> None:
    model = FakeModel()
    payload = json.dumps({"model": "mine", "file_base64": base64.b64encode(b"sound").decode()}).encode()

    await concluded(Worker(Site(), model, shaping=SHAPING), request(payload), replace(INNER, path=ROUTE.path))

    parts = await parts_of(Body(content=model.payloads[0], content_type=model.headers[0]["Content-Type"]))
    assert [(part.name, part.content) for part in parts] == [("model", b"inner"), ("file", b"sound")]


async def test_an_answer_to_a_form_is_never_taken_for_a_stream() -> None:
    model = FakeModel()

    await concluded(Worker(Site(), model, shaping=SHAPING), request(b'{"gcs_uri":"g","stream":true}', stream=True))
    await concluded(Worker(Site(), model, shaping=SHAPING), request(b'{"stream":true}', stream=True))

    assert model.streams == [False, True]


# ---------------------------------------------------------------- the model's name


async def test_a_caller_sees_its_own_name_of_the_model_and_the_model_its_own() -> None:
    answer = b'{"id":"x", "model":"inner-2024","choices":[]}'
    model = FakeModel(answer=Answer(status_code=200, reason="OK", body=answer))

    outcome = await concluded(Worker(Site(), model), request(b'{"n": 1.0, "model":"mine"}'), INNER)

    assert model.payloads == [b'{"n": 1.0, "model":"inner"}']
    assert outcome.reply.result == b'{"id":"x", "model":"mine","choices":[]}'


@pytest.mark.parametrize("status_code", [404, 503])
async def test_an_error_names_the_model_as_its_caller_did(status_code: int) -> None:
    said = b'{"error":{"message":"The model `inner` is not here."}}'
    model = FakeModel(answer=Answer(status_code=status_code, reason="no", body=said))

    outcome = await processed(Worker(Site(), model, retry_statuses=frozenset({503})), request(b'{"model":"m"}'), INNER)

    assert "The model `m` is not here." in (outcome.reply.error or "")  # type: ignore[union-attr]
    assert outcome.reply.answer == said.replace(b"inner", b"m")  # type: ignore[union-attr]
    assert b"inner" not in repr(outcome).encode()


async def test_an_error_within_a_stream_names_the_model_as_its_caller_did() -> None:
    model = FakeModel(failures=[BadResponse("no inner here", 500)])

    outcome = await concluded(Worker(Site(), model), request(b'{"model":"m"}'), INNER)

    assert (outcome.reply.error_code, outcome.reply.error) == ("bad_response", "no m here")


async def test_without_an_inner_name_everything_passes_as_it_came() -> None:
    answer = Answer(status_code=404, reason="no", body=b'{"error": "The model `m` is not here."}')
    model = FakeModel(answer=answer, failures=[BadResponse("no m")])
    worker = Worker(Site(), model)

    assert (await concluded(worker, request(b'{"model":"x"}'))).reply.error == "no m"
    assert (await concluded(worker, request(b'{"model":"x"}'))).reply.answer == answer.body


async def test_answers_pass_the_transforms_behind_the_name() -> None:
    model = FakeModel(answer=Answer(status_code=200, reason="OK", body=b'{"model":"inner"}'))
    shaping = Shaping(transforms=Transforms(answers={"n": ModelName(names={"mine": "shown"})}))

    outcome = await concluded(Worker(Site(), model, shaping=shaping), request(b'{"model":"mine"}'), INNER)

    assert outcome.reply.result == b'{"model":"shown"}'


async def test_an_answer_whose_transform_fails_is_not_stored() -> None:
    class Broken:
        def apply(self, request: InferenceRequest, body: bytes) -> bytes:
            raise KeyError("secret")

    worker = Worker(Site(), FakeModel(), shaping=Shaping(transforms=Transforms(answers={"n": Broken()})))

    outcome = await concluded(worker, request(b"{}"))

    assert (outcome.reply.status_code, outcome.reply.error_code) == (502, "bad_response")
    assert outcome.reply.error == "the transform n failed: KeyError"


async def test_an_empty_answer_has_nothing_to_change() -> None:
    class Never:
        def apply(self, request: InferenceRequest, body: bytes) -> bytes:
            raise AssertionError("asked")

        def validate(self, request: InferenceRequest) -> Unfit | None:
            return None

    model = FakeModel(answer=Answer(status_code=204, reason="", body=b""))
    worker = Worker(Site(), model, shaping=Shaping(transforms=Transforms(answers={"n": Never()})))

    reply = (await concluded(worker, request(b"{}"), INNER)).reply

    assert (reply.status_code, reply.result) == (204, None)
