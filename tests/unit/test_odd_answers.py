"""Answers that are whole and odd: nothing that a model says in passing may cost the answer, or the bill."""

import json

import pytest

from inference_worker.errors import BadResponse
from inference_worker.event_stream import EventParser, Reassembly, choices_asked
from inference_worker.messages import MOST_TOKENS, Usage, answer_of, usage_of


def used(prompt: int, output: int) -> Usage:
    return Usage(input_tokens=prompt, output_tokens=output, total_tokens=prompt + output)


def assembled(*events: str) -> tuple[dict[str, object], Usage | None]:
    parser, answer = EventParser(), Reassembly()
    for event in events:
        answer.add(parser.feed(f"data: {event}\n\n".encode()), 1.0)
    whole = answer.finish()
    body: dict[str, object] = json.loads(whole.body)
    return body, whole.usage


def chunk(besides: str = "", content: str = '"x"', finish: str = '"stop"') -> str:
    return f'{{"id":"a","choices":[{{"index":0,"delta":{{"content":{content}}},"finish_reason":{finish}}}]{besides}}}'


@pytest.mark.parametrize(
    ("said", "usage"),
    [
        pytest.param('"timings":{"prompt_n":2,"predicted_n":3}', used(2, 3), id="as it should be"),
        pytest.param('"timings":{"odd":1e400,"predicted_n":3}', used(0, 3), id="a number beyond all"),
        pytest.param('"timings":{"predicted_n":1e400}', None, id="a count beyond all"),
        pytest.param(f'"timings":{{"predicted_n":{10**400}}}', None, id="a count too large for a float"),
        pytest.param('"timings":{"predicted_n":true}', None, id="a count that is none"),
        pytest.param('"timings":{"predicted_n":-5}', None, id="a count below 0"),
        pytest.param('"timings":[]', None, id="timings that are none"),
        pytest.param('"prompt_token_ids":[1e400]', used(1, 0), id="an odd token"),
        pytest.param('"prompt_token_ids":5', None, id="tokens that are none"),
        pytest.param(f'"usage":{{"completion_tokens":{10**400}}}', None, id="a usage too large for a float"),
    ],
)
def test_what_a_stream_says_in_passing_does_not_cost_its_answer(said: str, usage: Usage | None) -> None:
    """It was an error of ours: the message went round until it was poison, the model called each time."""
    body, counted = assembled(chunk(f",{said}"), "[DONE]")

    assert body["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "x"}, "logprobs": None, "finish_reason": "stop"}
    ]
    assert counted == usage


def test_half_a_character_in_an_event_is_replaced_as_in_a_whole_answer() -> None:
    """Legal JSON; servers that cut text by UTF-16 write it, and the answer was failed with a 502."""
    body, _ = assembled(chunk(content='"\\ud83d"', finish="null"), chunk(), "[DONE]")

    assert body["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "\ufffdx"}, "logprobs": None, "finish_reason": "stop"}
    ]


def test_an_event_that_is_no_json_still_fails_the_answer() -> None:
    with pytest.raises(BadResponse, match="no chunk of an answer"):
        assembled(chunk(content='"\\x"'))


def test_half_a_character_in_a_payload_does_not_hide_how_many_choices_it_asks_for() -> None:
    """A stream that was cut after one of two choices passed for whole."""
    assert choices_asked(b'{"prompt":"\\ud83d","n":2}') == 2


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        pytest.param('{"prompt_tokens":12.0,"completion_tokens":3.0}', (12, 3, 15, 0), id="written as fractions"),
        pytest.param('{"prompt_tokens":1,"prompt_tokens_details":[]}', (1, 0, 1, 0), id="details that are none"),
        pytest.param(
            '{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":1.0}}', (1, 0, 1, 1), id="odd details"
        ),
        pytest.param('{"prompt_tokens":"1","completion_tokens":2}', (0, 2, 2, 0), id="a count as text"),
        pytest.param('{"prompt_tokens":true,"completion_tokens":2}', (0, 2, 2, 0), id="a count that is none"),
        pytest.param('{"prompt_tokens":1.5,"completion_tokens":2}', (0, 2, 2, 0), id="half a token"),
        pytest.param(f'{{"prompt_tokens":{10**400},"completion_tokens":2}}', (0, 2, 2, 0), id="a count beyond all"),
        pytest.param(f'{{"total_tokens":{MOST_TOKENS}}}', (0, 0, MOST_TOKENS, 0), id="the largest count"),
    ],
)
def test_what_can_be_counted_is_billed(usage: str, counted: tuple[int, int, int, int]) -> None:
    body = f'{{"choices":[],"usage":{usage}}}'.encode()
    inputs, outputs, total, cached = counted

    expected = Usage(input_tokens=inputs, output_tokens=outputs, total_tokens=total, cached_input_tokens=cached)
    assert answer_of(body) == (True, expected)
    assert usage_of(body) == expected


@pytest.mark.parametrize(
    "body", [b"[1]", b'{"usage":5}', b'{"usage":[]}', b'{"usage":null}', b'"x"', b'{"usage":{"prompt_tokens":"x"}}']
)
def test_what_cannot_be_counted_is_an_answer_all_the_same(body: bytes) -> None:
    assert answer_of(body) == (True, None)
