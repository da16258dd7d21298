"""One name of the model inside and the caller's outside: what changes of requests, answers and errors, and what not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.messages import InferenceRequest
from inference_worker.transforms.members import members_of, with_member
from inference_worker.transforms.model_name import (
    ModelName,
    error_as_asked,
    named_as_asked,
    sent_as,
    without_name,
)


def request(payload: bytes = b'{"model":"mine"}', *, model: str = "") -> InferenceRequest:
    return InferenceRequest(
        request_id="a",
        received_at=0.0,
        timeout_s=1.0,
        deadline=1.0,
        payload=payload,
        endpoint="/v1/chat/completions",
        stream=False,
        model=model,
    )


@pytest.mark.parametrize(
    ("payload", "sent"),
    [
        (b'{"model":"mine","a":1}', b'{"model":"inner","a":1}'),
        (
            b'{ "a" : 1.50 ,\n "model"\t: "mi\\u006ee" , "z":{"model":"mine"}}\n',
            b'{ "a" : 1.50 ,\n "model"\t: "inner" , "z":{"model":"mine"}}\n',
        ),
        (b'{"text":"\\"model\\":\\"mine\\"","model":"mine"}', b'{"text":"\\"model\\":\\"mine\\"","model":"inner"}'),
        (b'{"model":{"a":[1]},"b":2}', b'{"model":"inner","b":2}'),
        (b'{"a":1}', b'{"model":"inner","a":1}'),
        (b" {} ", b' {"model":"inner"} '),
        (b'{"mo\\u0064el":"mine"}', b'{"mo\\u0064el":"inner"}'),
        (b'{"a":"\\ud83d half","model":"mine"}', b'{"a":"\\ud83d half","model":"inner"}'),
        (b'{"model":"inner"}', b'{"model":"inner"}'),
        (b"[1]", b"[1]"),
        (b"no JSON", b"no JSON"),
    ],
)
def test_only_the_name_of_a_payload_is_another_inside(payload: bytes, sent: bytes) -> None:
    assert sent_as(payload, "inner") == sent


@pytest.mark.parametrize(
    "payload",
    [
        b'{"model":"a","model":"b"}',
        b'{"model":"b","x":1,"model":"b"}',
        b'{"x":1,"x":1,"model":1}',
        b'{"model":"a","x":1,"mod\\u0065l":"a"}',
    ],
)
def test_a_name_that_is_given_twice_does_not_get_past(payload: bytes) -> None:
    """A server may take the first or the last of them."""
    sent = sent_as(payload, "inner")

    pairs = json.loads(sent, object_pairs_hook=list)
    assert [value for name, value in pairs if name == "model"] == ["inner"]


members = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=8,
)
names = st.sampled_from(["model", "a", "b", '"', "}", "mod", "\\", "1"])


@given(st.dictionaries(names, members), st.sampled_from([None, 0, 2]), st.booleans())
def test_whatever_a_payload_holds_all_but_its_name_stays(held: dict[str, object], indent: int | None, ok: bool) -> None:
    payload = json.dumps(held, indent=indent, ensure_ascii=ok).encode()

    sent = sent_as(payload, "inner")

    assert json.loads(sent) == {**held, "model": "inner"}
    if "model" in held:
        back = with_member(sent, "model", (members_of(payload) or {})["model"]) or sent
        assert back == payload


@pytest.mark.parametrize(
    ("asked", "answer", "stored"),
    [
        (request(), b'{"id":1, "model":"inner"}', b'{"id":1, "model":"mine"}'),
        (request(b'{"model":"m\\u0069ne"}'), b'{"model":"inner-2024"}', b'{"model":"m\\u0069ne"}'),
        (request(b"{}"), b'{"model":"inner"}', b'{"model":""}'),
        (request(b"{}", model="label"), b'{"model":"inner"}', b'{"model":"label"}'),
        (request(b"[1]", model="label"), b'{"model":"inner"}', b'{"model":"label"}'),
        (request(b'{"model":null}'), b'{"model":"inner"}', b'{"model":null}'),
        (request(), b'{"text":"inner"}', b'{"text":"inner"}'),
        (request(), b"[1]", b"[1]"),
        (request(), b"no JSON", b"no JSON"),
    ],
)
def test_a_good_answer_names_the_model_as_its_caller_did(asked: InferenceRequest, answer: bytes, stored: bytes) -> None:
    assert named_as_asked(asked, answer) == stored


@pytest.mark.parametrize(
    ("answer", "stored"),
    [
        (
            b'{"error":{"message":"The model `org/inner-7b` does not exist.","code":404}}',
            b'{"error":{"message":"The model `mine` does not exist.","code":404}}',
        ),
        (
            b'{"error": {"message": "org/inner-7b.1 and my-org/inner-7b are others"}}',
            b'{"error": {"message": "org/inner-7b.1 and my-org/inner-7b are others"}}',
        ),
        (b'{"m":["org\\/inner-7b"],"org/inner-7b":1}', b'{"m":["mine"],"mine":1}'),
        (b"no org/inner-7b. \xff", b"no mine. \xff"),
        (b"[" * 5000 + b'"org/inner-7b"', b"[" * 5000 + b'"mine"'),
        (b"", b""),
    ],
)
def test_an_error_does_not_show_the_inner_name(answer: bytes, stored: bytes) -> None:
    assert error_as_asked(request(), answer, "org/inner-7b") == stored


def test_an_error_that_is_nested_as_deeply_as_can_be_read_fails_nothing() -> None:
    for depth in range(100, 1500, 50):
        deep = b"[" * depth + b'"inner"' + b"]" * depth

        assert b"mine" in error_as_asked(request(), deep, "inner")


def test_a_text_does_not_show_the_inner_name_also_where_no_other_is_known() -> None:
    assert without_name(request(), "no inner here: inner", "inner") == "no mine here: mine"
    assert without_name(request(b"{}"), "no `inner`", "inner") == "no ``"


def test_the_transform_gives_names_of_its_document_or_the_callers() -> None:
    mapped = ModelName(names={"inner": "shown"})

    assert mapped.apply(request(), b'{"model": "inner"}') == b'{"model": "shown"}'
    assert mapped.apply(request(), b'{"model":"other"}') == b'{"model":"other"}'
    assert mapped.apply(request(), b'{"model":7}') == b'{"model":7}'
    assert mapped.apply(request(), b"[1]") == b"[1]"
    assert ModelName().apply(request(), b'{"model":"other"}') == b'{"model":"mine"}'
