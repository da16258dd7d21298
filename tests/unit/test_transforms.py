"""Which transform makes the body, what a form has, and what is refused. Names end in the number of the peer's case."""

import base64
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pytest

from inference_worker.config.documents import read_documents
from inference_worker.errors import BadResponse, ConfigurationError
from inference_worker.messages import InferenceRequest
from inference_worker.transforms.chain import Body, Transforms, Unfit
from inference_worker.transforms.gcs_uri import GcsUriMultipart, expiry
from inference_worker.transforms.making import transform_problems, transforms_of
from inference_worker.transforms.model_name import ModelName
from inference_worker.transforms.multipart import Multipart
from tests.unit.form_kit import Part, fields_of, parts_of

DEADLINE = 1_700_000_000.0
TRANSCRIPTIONS = "/v1/audio/transcriptions"


def request(
    payload: object,
    *,
    endpoint: str = TRANSCRIPTIONS,
    metadata: Mapping[str, str] | None = None,
    stream: bool = False,
) -> InferenceRequest:
    return InferenceRequest(
        request_id="a",
        received_at=0.0,
        timeout_s=1.0,
        deadline=DEADLINE,
        payload=payload if isinstance(payload, bytes) else json.dumps(payload).encode(),
        endpoint=endpoint,
        stream=stream,
        metadata=dict(metadata or {}),
    )


class Told:
    """A transform that says what it is told to, and is counted."""

    def __init__(self, made: Body | Unfit | None = None, refused: Unfit | None = None) -> None:
        self.made = made
        self.refused = refused
        self.asked = 0
        self.applied = 0

    def validate(self, request: InferenceRequest) -> Unfit | None:
        self.asked += 1
        return self.refused

    def apply(self, request: InferenceRequest) -> Body | Unfit | None:
        self.applied += 1
        return self.made


class Broken:
    """A transform with a fault."""

    def validate(self, request: InferenceRequest) -> Unfit | None:
        raise KeyError("secret")

    def apply(self, request: InferenceRequest, body: bytes = b"") -> Body:
        raise KeyError("secret")


class BrokenAnswer:
    def apply(self, request: InferenceRequest, body: bytes) -> bytes:
        raise KeyError("secret")


# ---------------------------------------------------------------- the chain


def test_the_first_that_anything_says_against_a_request_counts_case_284() -> None:
    first, second = Told(refused=Unfit("too early")), Told(refused=Unfit("too late"))
    chain = Transforms(requests={"zero": Told(), "one": first, "two": second})

    assert chain.refused(request({})) == Unfit("the transform one refuses it: too early")
    assert (second.asked, first.applied) == (0, 0)
    assert Transforms(requests={"zero": Told()}).refused(request({})) is None


def test_the_first_that_handles_a_request_makes_its_body_and_later_ones_are_not_asked_case_284() -> None:
    made, last = Body(content=b"x", content_type="text/plain"), Told(Body(content=b"y"))

    assert Transforms(requests={"a": Told(), "b": Told(made), "c": last}).body(request({})) == made
    assert last.applied == 0


def test_where_none_handles_it_the_payload_goes_as_it_came_case_284() -> None:
    odd = b'{ "b":1.0,\t"a" : "\\u0041" }\n'

    for chain in (Transforms(requests={"a": Told(), "b": Told()}), Transforms()):
        assert chain.body(request(odd)) == Body(content=odd, content_type=None)


def test_an_error_while_a_body_is_made_ends_it_case_284() -> None:
    last = Told(Body(content=b"y"))

    body = Transforms(requests={"a": Told(), "b": Told(Unfit("no")), "c": last}).body(request({}))

    assert body == Unfit("the transform b refuses it: no")
    assert last.applied == 0


def test_a_transform_that_fails_ends_its_request_and_shows_nothing_of_it() -> None:
    chain = Transforms(requests={"b": Broken()}, answers={"c": BrokenAnswer()})

    for said in (chain.refused(request({})), chain.body(request({}))):
        assert isinstance(said, Unfit)
        assert "transform b failed: KeyError" in said.reason
        assert "secret" not in said.reason
    with pytest.raises(BadResponse, match="transform c failed: KeyError"):
        chain.answer(request({}), b"{}")


def test_of_answers_each_gets_what_the_one_before_has_made() -> None:
    chain = Transforms(
        answers={"one": ModelName(names={"a": "b"}), "two": ModelName(names={"b": "c"}), "three": ModelName(names={})}
    )

    assert chain.answer(request({}), b'{"model":"a"}') == b'{"model":""}'
    assert Transforms(answers=dict(list(chain.answers.items())[:2])).answer(request({}), b'{"model":"a"}') == (
        b'{"model":"c"}'
    )


# ---------------------------------------------------------------- gcs_uri_multipart

SIGNED = "https://storage.googleapis.com/b/o.wav?X-Goog-Signature=abc%2F1&x=1"
WHISPER = {"provider": "whisper"}
GCS = GcsUriMultipart(["whisper", "ocr"])


def signed(*, expires_in_s: float, lasts_s: int = 3600) -> str:
    """A V4 address that ends so long after the deadline."""
    begins = datetime.fromtimestamp(DEADLINE, UTC) + timedelta(seconds=expires_in_s - lasts_s)
    return f"{SIGNED}&X-Goog-Date={begins:%Y%m%dT%H%M%SZ}&X-Goog-Expires={lasts_s}"


async def test_the_form_has_the_address_and_the_other_members_as_fields_case_286() -> None:
    payload = (
        b'{"gcs_uri":"%s","model":"whisper-1","temperature":0.50,"vad":true,"langs":["de", "en"],"hint":null,'
        b'"prompt":"\\u00fc\\r\\nb","url":"http://other","file_base64":""}' % SIGNED.encode()
    )

    body = GCS.apply(request(payload, metadata=WHISPER))

    assert isinstance(body, Body)
    assert body.content_type is not None
    assert body.content_type.startswith("multipart/form-data; boundary=")
    assert await fields_of(body) == {
        "url": SIGNED,
        "model": "whisper-1",
        "temperature": "0.50",
        "vad": "true",
        "langs": '["de", "en"]',
        "hint": "",
        "prompt": "ü\r\nb",
    }


@pytest.mark.parametrize(
    ("payload", "metadata"),
    [
        pytest.param({"gcs_uri": SIGNED}, {"provider": "other"}, id="another provider"),
        pytest.param({"gcs_uri": SIGNED}, {}, id="no provider"),
        pytest.param({"model": "m"}, WHISPER, id="no address"),
        pytest.param({"gcs_uri": ""}, WHISPER, id="an empty address"),
        pytest.param({"gcs_uri": 7}, WHISPER, id="an address that is no text"),
        pytest.param({"file_base64": "aGk="}, WHISPER, id="a file without an address"),
    ],
)
def test_what_is_not_for_it_is_left_alone_case_288(payload: object, metadata: Mapping[str, str]) -> None:
    assert GCS.validate(request(payload, metadata=metadata)) is None
    assert GCS.apply(request(payload, metadata=metadata)) is None


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        pytest.param({"gcs_uri": SIGNED, "file_base64": "aGk="}, "file_base64 is not accepted", id="a file inside"),
        pytest.param({"gcs_uri": signed(expires_in_s=-1)}, "expires at 2023-11-14T22:13:19Z", id="too early"),
        pytest.param({"gcs_uri": signed(expires_in_s=0)}, "expires at 2023-11-14T22:13:20Z", id="at the deadline"),
        pytest.param({"gcs_uri": f"{SIGNED}&Expires=1700000000"}, "expires at 2023", id="in the old form"),
        pytest.param({"gcs_uri": f"{SIGNED}&Expires=-999999999999999"}, "expires at -1e+15", id="in no calendar"),
        pytest.param([1], "no JSON object", id="a payload that is no object"),
    ],
)
def test_what_can_never_succeed_is_refused_case_288(payload: object, said: str) -> None:
    refused = GCS.validate(request(payload, metadata=WHISPER))

    assert refused is not None
    assert said in refused.reason


@pytest.mark.parametrize(
    "address",
    [
        signed(expires_in_s=1),
        SIGNED,
        f"{SIGNED}&Expires=1700000001",
        f"{SIGNED}&Expires=soon",
        f"{SIGNED}&X-Goog-Date=today&X-Goog-Expires=1",
        "https://[no-address",
        "no address",
    ],
)
def test_an_address_that_lasts_or_does_not_say_how_long_is_fine_case_288(address: str) -> None:
    assert GCS.validate(request({"gcs_uri": address}, metadata=WHISPER)) is None
    assert GCS.apply(request({"gcs_uri": address}, metadata=WHISPER)) is not None


@pytest.mark.parametrize(
    ("asked", "at"),
    [
        ("X-Goog-Date=20231114T221320Z&X-Goog-Expires=60", 1_700_000_060.0),
        ("Expires=1700000007", 1_700_000_007.0),
        ("X-Goog-Date=20231114T221320Z&Expires=1700000007", 1_700_000_007.0),
        ("X-Goog-Date=2023-11-14&X-Goog-Expires=60&Expires=1700000007", None),
        ("X-Goog-Date=20231399T221320Z&X-Goog-Expires=60", None),
        ("X-Goog-Date=20231114T221320Z&X-Goog-Expires=1m", None),
        ("X-Goog-Date=20231114T221320Z&X-Goog-Expires=1_000", None),
        ("X-Goog-Date=20231114T221320Z&X-Goog-Expires=" + "9" * 400, None),
        ("Expires=" + "9" * 30, None),
        ("", None),
    ],
)
def test_both_ways_of_signing_tell_when_an_address_ends_case_288(asked: str, at: float | None) -> None:
    assert expiry(f"https://host/object?{asked}") == at


# ---------------------------------------------------------------- multipart

SOUND = bytes(range(256)) * 3 + b"\r\n--x\r\n"
FILE = base64.b64encode(SOUND).decode()


async def test_a_file_inside_a_message_becomes_a_part_and_the_rest_fields() -> None:
    payload = {
        "model": "whisper-1",
        "file_base64": FILE,
        "filename": "a.mp3",
        "temperature": 0.5,
        "timestamp_granularities[]": ["word", "segment"],
        "options": {"a": 1},
        "language": None,
        "file": "mine",
    }

    *fields, sound = await parts_of(Multipart().apply(request(payload)))

    assert sound == Part(name="file", content=SOUND, filename="a.mp3", content_type="audio/mpeg")
    assert [(part.name, part.content.decode()) for part in fields] == [
        ("model", "whisper-1"),
        ("temperature", "0.5"),
        ("timestamp_granularities[]", "word"),
        ("timestamp_granularities[]", "segment"),
        ("options", '{"a": 1}'),
    ]


@pytest.mark.parametrize(
    ("given", "filename", "content_type"),
    [
        ({}, "audio.wav", "audio/wav"),
        ({"filename": "x.FLAC"}, "x.FLAC", "audio/flac"),
        ({"filename": "scan.tiff"}, "scan.tiff", "application/octet-stream"),
        ({"filename": "x.wav", "content_type": "audio/x-own; codecs=1"}, "x.wav", "audio/x-own; codecs=1"),
    ],
)
async def test_a_file_has_a_name_and_a_type(given: Mapping[str, str], filename: str, content_type: str) -> None:
    (part,) = await parts_of(Multipart().apply(request({"file_base64": FILE, **given})))

    assert (part.filename, part.content_type) == (filename, content_type)


async def test_names_cannot_break_out_of_their_place() -> None:
    sneaky = 'a"\r\nContent-Type: text/html\r\n\r\nb'

    body = Multipart().apply(request({"file_base64": FILE, "filename": sneaky, sneaky: "v"}))

    assert isinstance(body, Body)
    assert b"\r\nContent-Type: text/html" not in body.content
    field, part = await parts_of(body)
    assert (field.content, part.content) == (b"v", SOUND)
    assert b'filename="a%22%0D%0AContent-Type: text/html' in body.content


def test_two_forms_have_different_boundaries() -> None:
    made = {str(Multipart().apply(request({"file_base64": FILE}))) for _ in range(2)}

    assert len(made) == 2


def test_lines_in_the_base64_are_fine() -> None:
    lines = base64.encodebytes(SOUND).decode()

    body = Multipart().apply(request({"file_base64": lines}))

    assert isinstance(body, Body)
    assert SOUND in body.content


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        pytest.param({"file_base64": "a"}, "file_base64 is no base64", id="a wrong length"),
        pytest.param({"file_base64": "a?b="}, "file_base64 is no base64", id="a wrong character"),
        pytest.param({"file_base64": "ä"}, "file_base64 is no base64", id="not ASCII"),
        pytest.param({"file_base64": FILE, "content_type": "a/b\r\nX: y"}, "no media type", id="a header inside"),
    ],
)
def test_a_file_that_cannot_be_sent_is_refused(payload: object, said: str) -> None:
    refused = Multipart().apply(request(payload))

    assert isinstance(refused, Unfit)
    assert said in refused.reason


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"a" * 20_000 + "[]": [0] * 200}, id="a long name, many times"),
        pytest.param({"a[]": [0] * 5_000}, id="many items"),
        pytest.param({f"a{number}": 0 for number in range(5_000)}, id="many members"),
    ],
)
def test_a_form_that_would_be_many_times_its_payload_is_refused(more: Mapping[str, object]) -> None:
    """Each item of a list costs a head with the whole name: a message of some megabytes would take all memory."""
    signed = request({"gcs_uri": "https://x/y", **more}, metadata={"provider": "gcs"})

    for refused in (
        Multipart().apply(request({"file_base64": FILE, **more})),
        GcsUriMultipart(["gcs"]).apply(signed) if "a[]" not in more else Unfit("a form has at most"),
    ):
        assert isinstance(refused, Unfit)
        assert "a form has at most" in refused.reason


def test_a_stream_is_refused_before_anything_is_taken_for_it() -> None:
    refused = Multipart().validate(request({"file_base64": FILE, "stream": True}, stream=True))

    assert refused is not None
    assert "stream" in refused.reason
    assert Multipart().validate(request({"file_base64": FILE})) is None
    assert Multipart().validate(request({"stream": True}, stream=True)) is None


@pytest.mark.parametrize(
    ("transform", "payload", "endpoint", "metadata"),
    [
        pytest.param(Multipart(), {"file_base64": FILE}, "/v1/chat/completions", {}, id="another path"),
        pytest.param(Multipart(), {"model": "m"}, TRANSCRIPTIONS, {}, id="no file"),
        pytest.param(Multipart(), {"file_base64": ""}, TRANSCRIPTIONS, {}, id="an empty file"),
        pytest.param(Multipart(), [1], TRANSCRIPTIONS, {}, id="no object"),
        pytest.param(
            Multipart(providers=("a",)), {"file_base64": FILE}, TRANSCRIPTIONS, {"provider": "b"}, id="not its provider"
        ),
    ],
)
def test_what_is_no_upload_of_its_own_is_left_alone(
    transform: Multipart, payload: object, endpoint: str, metadata: Mapping[str, str]
) -> None:
    assert transform.apply(request(payload, endpoint=endpoint, metadata=metadata)) is None


# ---------------------------------------------------------------- the document


def made(document: object) -> Transforms:
    queues = {"url": "redis://r", "queues": [{"queue_name": "q", "igw_base_url": "http://g"}]}
    return transforms_of(read_documents("redis-sortedset", json.dumps(queues), None, None, json.dumps(document)))


def test_each_type_is_made_by_its_name_case_289() -> None:
    chain = made(
        {
            "requestTransforms": [
                {"name": "g", "type": "gcs_uri_multipart", "parameters": {"providers": ["whisper"]}},
                {"name": "m", "type": "multipart"},
            ],
            "responseTransforms": [{"name": "n", "type": "model_name", "parameters": {"names": {"a": "b"}}}],
        }
    )

    assert list(chain.requests) == ["g", "m"]
    assert isinstance(chain.requests["g"], GcsUriMultipart)
    assert chain.requests["m"] == Multipart()
    assert chain.answers == {"n": ModelName(names={"a": "b"})}


async def test_the_parameters_of_multipart_are_read() -> None:
    parameters = {
        "endpoints": "/v1/images/edits,/v2/x",
        "providers": ["p"],
        "base64_field": "image_base64",
        "file_field": "image",
        "filename": "a.png",
    }
    chain = made({"requestTransforms": [{"name": "m", "type": "multipart", "parameters": parameters}]})

    sent = request({"image_base64": FILE}, endpoint="/v2/x/", metadata={"provider": "p"})

    (part,) = await parts_of(chain.body(sent))
    assert (part.name, part.filename) == ("image", "a.png")


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        pytest.param({}, "requestTransforms[0].parameters.providers: is missing", id="none"),
        pytest.param({"providers": []}, "providers: is []", id="an empty list"),
        pytest.param({"providers": ["a", ""]}, 'providers: is ["a", ""]', id="an empty one"),
        pytest.param({"providers": ["a"], "more": 1}, "parameters.more: is not a parameter", id="an unknown parameter"),
    ],
)
def test_providers_are_needed_case_289(parameters: object, said: str) -> None:
    with pytest.raises(ConfigurationError, match="transforms") as raised:
        made({"requestTransforms": [{"name": "g", "type": "gcs_uri_multipart", "parameters": parameters}]})

    assert said in "\n".join(raised.value.problems)


def test_what_is_wrong_with_parameters_is_told_without_raising() -> None:
    queues = {"url": "redis://r", "queues": [{"queue_name": "q", "igw_base_url": "http://g"}]}
    document = {"responseTransforms": [{"name": "n", "type": "model_name", "parameters": {"names": 1}}]}
    read = read_documents("redis-sortedset", json.dumps(queues), None, None, json.dumps(document))

    (problem,) = transform_problems(read)

    assert problem.startswith("transforms.responseTransforms[0].parameters.names: is 1")
