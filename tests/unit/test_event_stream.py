"""A stream and the unstreamed answer are the same answer; the samples are what real servers sent."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.errors import BadResponse, ModelCut
from inference_worker.event_stream import Assembled, EventParser, Reassembly, choices_asked
from inference_worker.messages import Usage

SAMPLES = Path(__file__).parents[1] / "samples"
WHOLE = (
    "vllm-stream-usage",
    "vllm-stream-continuous-usage",
    "vllm-stream-n2-logprobs",
    "vllm-stream-reasoning",
    "vllm-stream-tools",
    "llamacpp-stream-usage",
    "transformers-serve-stream",
)


def sample(name: str) -> bytes:
    return (SAMPLES / f"{name}.sse").read_bytes()


def assembled(*chunks: bytes, choices: int = 1, **limits: int) -> Assembled:
    parser, answer = EventParser(), Reassembly(choices=choices, **limits)
    for at, chunk in enumerate(chunks):
        answer.add(parser.feed(chunk), float(at))
    return answer.finish()


def answer(*chunks: bytes, choices: int = 1) -> Any:
    return json.loads(assembled(*chunks, choices=choices).body)


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps({"id": "c", "object": "chat.completion.chunk", **chunk}).encode() + b"\n\n"


def delta(index: int = 0, finish: str | None = None, /, **fields: object) -> bytes:
    return event(choices=[{"index": index, "delta": fields, "finish_reason": finish}])


# ---------------------------------------------------------------- events


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        pytest.param(b"data: a\n\ndata: b\n\n", [b"a", b"b"], id="two events"),
        pytest.param(b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"], id="lines may end in CRLF"),
        pytest.param(b"data: a\r\ndata: b\r\n\r\n", [b"a\nb"], id="a CRLF is one line end wherever it is cut"),
        pytest.param(b"data: a\r\rdata: b\r\r", [b"a", b"b"], id="lines may end in CR"),
        pytest.param(b"data: a\ndata: b\n\n", [b"a\nb"], id="several data lines are one text"),
        pytest.param(b"data:a\n\ndata:  b\n\n", [b"a", b" b"], id="one space after the colon is no data"),
        pytest.param(b": ping\n\ndata: a\n: pong\n\n", [b"a"], id="comments are nothing"),
        pytest.param(b"\xef\xbb\xbfdata: a\n\n", [b"a"], id="a byte order mark at the start is nothing"),
        pytest.param(b"data\n\n", [b""], id="a field without a colon is empty"),
        pytest.param(b"event: sglext_ids\ndata: a\n\ndata: b\n\n", [b"b"], id="other types of events are passed over"),
        pytest.param(b"event: error\ndata: a\n\n", [b"a"], id="an event of the type error has a say"),
        pytest.param(b"id: 3\nretry: 9\ndata: a\n\n", [b"a"], id="id and retry are nothing"),
        pytest.param(b"\n\n\n\ndata: a\n\n\n\n", [b"a"], id="empty lines are nothing"),
        pytest.param(b"data: a\n\ndata: b\n", [b"a"], id="what has not ended is no event"),
    ],
)
def test_events_are_parsed_by_the_standard_however_they_are_cut(stream: bytes, events: list[bytes]) -> None:
    """https://html.spec.whatwg.org/multipage/server-sent-events.html, 9.2.6."""
    for cut in range(len(stream) + 1):
        parser = EventParser()

        seen = parser.feed(stream[:cut]) + parser.feed(stream[cut:])

        assert seen == events, f"cut at {cut}"
    parser = EventParser()
    assert [seen for byte in stream for seen in parser.feed(bytes([byte]))] == events


@pytest.mark.parametrize("cut", [5, 200, 400], ids=lambda cut: f"cut at {cut}")
def test_an_event_that_is_too_large_is_a_bad_response(cut: int) -> None:
    parser = EventParser(100)
    stream = b"data: " + b"x" * 300 + b"\n\ndata: y\n\n"

    with pytest.raises(BadResponse, match="larger than 100 bytes"):
        parser.feed(stream[:cut]) + parser.feed(stream[cut:])


def test_a_large_event_in_the_middle_of_a_read_is_a_bad_response_too() -> None:
    with pytest.raises(BadResponse, match="larger than 100 bytes"):
        EventParser(100).feed(b"data: y\n\ndata: " + b"x" * 300 + b"\n\n")


def test_the_parser_says_what_it_holds() -> None:
    parser = EventParser()

    parser.feed(b"data: a\n\ndata: b")

    assert parser.held_bytes == 7


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize("name", WHOLE)
def test_a_sample_is_the_same_answer_wherever_it_is_cut(name: str) -> None:
    stream = sample(name)
    choices = 2 if "n2" in name else 1
    whole = assembled(stream, choices=choices).body

    for cut in range(len(stream)):
        assert assembled(stream[:cut], stream[cut:], choices=choices).body == whole, f"cut at {cut}"


@given(seed=st.integers(0, 2**32), name=st.sampled_from(WHOLE), crlf=st.booleans())
def test_a_sample_is_the_same_answer_in_any_number_of_pieces(seed: int, name: str, crlf: bool) -> None:
    stream = sample(name).replace(b"\n", b"\r\n") if crlf else sample(name)
    cuts = sorted(random.Random(seed).choices(range(len(stream)), k=20))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    assert answer(*pieces) == answer(sample(name))


def test_a_streamed_chat_has_the_shape_of_the_unstreamed_one() -> None:
    unstreamed = json.loads((SAMPLES / "vllm-chat.json").read_text())

    streamed = answer(sample("vllm-stream-usage"))

    assert streamed["object"] == "chat.completion"
    assert set(streamed) <= set(unstreamed)
    assert set(streamed["choices"][0]) <= set(unstreamed["choices"][0])
    assert streamed["choices"][0]["message"] == {"role": "assistant", "content": " English� over"}
    assert streamed["choices"][0]["finish_reason"] == "length"
    assert streamed["usage"]["completion_tokens"] == 4
    assert streamed["system_fingerprint"] == unstreamed["system_fingerprint"]
    assert streamed["metrics"]["time_to_first_token_ms"] == 9.334136999768816


def test_streamed_tool_calls_are_the_unstreamed_ones() -> None:
    """The arguments are compared as JSON: unstreamed, vLLM writes them anew."""
    unstreamed = json.loads((SAMPLES / "vllm-tools.json").read_text())["choices"][0]

    streamed = answer(sample("vllm-stream-tools"))["choices"][0]

    (call,), (expected,) = streamed["message"]["tool_calls"], unstreamed["message"]["tool_calls"]
    assert set(call) == set(expected) == {"id", "type", "function"}
    assert call["type"] == "function"
    assert call["function"]["name"] == expected["function"]["name"]
    assert json.loads(call["function"]["arguments"]) == json.loads(expected["function"]["arguments"])
    assert streamed["message"]["content"] == unstreamed["message"]["content"]
    assert streamed["finish_reason"] == unstreamed["finish_reason"]


def test_every_choice_and_its_logprobs_are_kept() -> None:
    first, second = answer(sample("vllm-stream-n2-logprobs"), choices=2)["choices"]

    assert (first["index"], second["index"]) == (0, 1)
    assert (first["message"]["content"], second["message"]["content"]) == (" English", "}lea")
    assert [entry["token"] for entry in second["logprobs"]["content"]] == ["}", "lea"]
    assert first["logprobs"]["content"][0]["logprob"] == -5.964858055114746


def test_reasoning_keeps_the_name_that_the_server_gives_it() -> None:
    assert answer(sample("vllm-stream-reasoning"))["choices"][0]["message"]["reasoning"] == " English over"
    old = answer(delta(reasoning_content="a"), delta(0, "stop", reasoning_content="b"))
    assert old["choices"][0]["message"] == {"role": "assistant", "content": None, "reasoning_content": "ab"}


def test_a_stream_without_done_is_whole_where_every_choice_has_finished() -> None:
    assert answer(sample("transformers-serve-stream"))["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("name", "status_code", "reason"),
    [
        ("vllm-stream-engine-died", 500, "EngineCore encountered an issue"),
        ("vllm-stream-shed-http200", 503, "The engine is currently busy"),
    ],
)
def test_an_error_event_is_a_bad_response_with_its_code(name: str, status_code: int, reason: str) -> None:
    with pytest.raises(BadResponse, match=reason) as failed:
        assembled(sample(name))

    assert failed.value.status_code == status_code


# ---------------------------------------------------------------- errors and ends


@pytest.mark.parametrize(
    ("error", "reason", "status_code"),
    [
        pytest.param({"error": "The model is scaling"}, "The model is scaling", None, id="a string"),
        pytest.param({"error": {"message": "m", "code": "429"}}, "m", 429, id="a code in words"),
        pytest.param({"error": {"message": "m", "code": "too_long"}}, "m", None, id="a code that is no number"),
        pytest.param({"error": {"message": "m", "code": 7}}, "m", None, id="a code that is no status"),
        pytest.param({"error": {"oops": 1}}, '{"oops":1}', None, id="no message"),
        pytest.param({"object": "error", "message": "m", "code": 503}, "m", 503, id="flat, as SGLang's"),
    ],
)
def test_an_error_comes_in_many_shapes(error: dict[str, object], reason: str, status_code: int | None) -> None:
    with pytest.raises(BadResponse) as failed:
        assembled(delta(content="x"), b"data: " + json.dumps(error).encode() + b"\n\n", b"data: [DONE]\n\n")

    assert (str(failed.value), failed.value.status_code) == (reason, status_code)


@pytest.mark.parametrize(
    ("stream", "choices"),
    [
        pytest.param([], 1, id="nothing at all"),
        pytest.param([b"data: [DONE]\n\n"], 1, id="only [DONE]"),
        pytest.param([delta(content="x"), b"data: [DONE]\n\n"], 1, id="[DONE] before a finish_reason"),
        pytest.param([delta(content="x")], 1, id="an end before a finish_reason"),
        pytest.param([delta(0, "stop"), delta(1, content="x")], 1, id="one of two choices that were seen"),
        pytest.param([delta(0, "stop"), b"data: [DONE]\n\n"], 2, id="one of two choices that were asked for"),
        pytest.param([delta(0, "", content="x")], 1, id="an empty finish_reason is none"),
    ],
)
def test_a_stream_that_ends_before_its_answer_is_cut(stream: list[bytes], choices: int) -> None:
    with pytest.raises(ModelCut):
        assembled(*stream, choices=choices)


def test_nothing_after_done_is_read() -> None:
    assert answer(delta(0, "stop", content="x"), b"data: [DONE]\n\ndata: rubbish\n\n")


@pytest.mark.parametrize(
    "data", [b"[1]", b"{", b'{"choices":3}', b'{"choices":[{"index":-1}]}', b'{"choices":[{"delta":"x"}]}']
)
def test_an_event_that_is_no_chunk_is_a_bad_response(data: bytes) -> None:
    with pytest.raises(BadResponse):
        assembled(b"data: " + data + b"\n\n")


def test_an_answer_beyond_the_limit_is_a_bad_response_as_soon_as_it_is_seen() -> None:
    whole = Reassembly(limit_bytes=1000)

    with pytest.raises(BadResponse, match="larger than 1000 bytes"):
        whole.add([delta(content="x" * 20)[6:-2]] * 100, 0.0)


def test_an_answer_that_only_grows_too_large_when_written_is_a_bad_response() -> None:
    with pytest.raises(BadResponse, match="larger than 120 bytes"):
        assembled(delta(0, "stop", content="x"), limit_bytes=120)


# ---------------------------------------------------------------- what is kept


def test_content_is_null_only_where_nothing_came() -> None:
    assert answer(delta(content=None), delta(0, "stop"))["choices"][0]["message"]["content"] is None
    assert answer(delta(content=""), delta(0, "stop"))["choices"][0]["message"]["content"] == ""
    assert answer(delta(content=None), delta(0, "stop", content="a"))["choices"][0]["message"]["content"] == "a"


def test_choices_come_in_any_order_and_are_written_in_theirs() -> None:
    streamed = answer(delta(1, content="b"), delta(0, content="a"), delta(1, "stop"), delta(0, "length"), choices=2)

    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in streamed["choices"]] == [
        (0, "a", "length"),
        (1, "b", "stop"),
    ]


def test_legacy_completions_are_put_together_from_their_texts() -> None:
    def piece(text: str, finish: str | None, **more: object) -> bytes:
        choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": {"tokens": [text]}, **more}
        return b"data: " + json.dumps({"id": "c", "object": "text_completion", "choices": [choice]}).encode() + b"\n\n"

    streamed = answer(piece("a", None), piece("b", "stop", stop_reason=7))

    assert streamed["object"] == "text_completion"
    assert streamed["choices"] == [
        {"index": 0, "text": "ab", "logprobs": {"tokens": ["a", "b"]}, "finish_reason": "stop", "stop_reason": 7}
    ]


def test_a_function_call_of_old_is_put_together() -> None:
    streamed = answer(
        delta(function_call={"name": "f", "arguments": ""}),
        delta(function_call={"arguments": '{"a"'}),
        delta(function_call={"arguments": ":1}"}),
        delta(0, "function_call"),
    )

    assert streamed["choices"][0]["message"]["function_call"] == {"name": "f", "arguments": '{"a":1}'}


def call(arguments: object = None, /, **fields: object) -> bytes:
    function = {name: fields.pop(name) for name in ("name",) if name in fields}
    return delta(tool_calls=[{**fields, "function": {**function, "arguments": arguments}}])


def test_parallel_tool_calls_are_kept_apart_by_their_index() -> None:
    streamed = answer(
        call("", index=1, id="b", type="function", name="g"),
        call("", index=0, id="a", type="function", name="f"),
        call("1", index=1),
        call("2", index=0, name="f"),
        call("3", index=1, id="b"),
        delta(0, "tool_calls"),
    )

    assert [(c["id"], c["function"]) for c in streamed["choices"][0]["message"]["tool_calls"]] == [
        ("a", {"name": "f", "arguments": "2"}),
        ("b", {"name": "g", "arguments": "13"}),
    ]


def test_tool_calls_without_an_index_begin_where_an_id_is_new() -> None:
    """Some shims of Gemini and Ollama leave the index out; Ollama sends the arguments as an object."""
    streamed = answer(
        call("1", id="a", name="f"), call("2"), call("3"), call({"x": 1}, id="b", name="g"), delta(0, "tool_calls")
    )

    assert [(c["id"], c["function"]["arguments"]) for c in streamed["choices"][0]["message"]["tool_calls"]] == [
        ("a", "123"),
        ("b", '{"x": 1}'),
    ]


def test_tool_calls_without_an_index_go_on_where_an_id_is_known() -> None:
    pieces = call("1", id="a", name="f"), call("2", id="b", name="g"), call("3", id="a"), call("4", id="b")

    streamed = answer(*pieces, delta(0, "tool_calls"))

    calls = streamed["choices"][0]["message"]["tool_calls"]
    assert [(c["id"], c["function"]["arguments"]) for c in calls] == [("a", "13"), ("b", "24")]


def test_an_answer_is_named_by_its_first_chunk_and_its_fingerprint_is_the_last_one() -> None:
    first = b'data: {"id":"a","created":1,"model":"m","system_fingerprint":"f"}\n\n'
    second = b'data: {"id":"b","created":2,"model":"n","system_fingerprint":"g"}\n\n'

    streamed = answer(first, second, event(choices=[choice(0, "stop")]))

    assert (streamed["id"], streamed["created"], streamed["model"]) == ("a", 1, "m")
    assert streamed["system_fingerprint"] == "g"


def test_unknown_fields_are_kept() -> None:
    streamed = answer(
        event(choices=[{"index": 0, "delta": {"thought": "a", "links": [1]}, "matched": None}], provider="p"),
        event(
            choices=[{"index": 0, "delta": {"thought": "b", "links": [2], "odd": 1}, "finish_reason": "stop"}],
            tier=None,
        ),
        event(choices=[], tier="x"),
    )

    assert (streamed["provider"], streamed["tier"]) == ("p", "x")
    assert streamed["choices"][0]["matched"] is None
    assert streamed["choices"][0]["message"] == {
        "role": "assistant", "content": None, "thought": "ab", "links": [1, 2], "odd": 1
    }  # fmt: skip


def test_bytes_that_are_no_utf_8_are_replaced() -> None:
    broken = delta(content="§").replace(b"\\u00a7", b"\xff")

    assert answer(broken, delta(0, "stop"))["choices"][0]["message"]["content"] == "�"


# ---------------------------------------------------------------- templates


@given(
    pieces=st.lists(st.text(), max_size=30),
    shape=st.sampled_from(["content", "reasoning", "text", "arguments"]),
    ascii_only=st.booleans(),
    padding=st.sampled_from([None, '"content":"x"', '{"content": ""}']),
)
def test_a_template_reads_what_a_full_reading_reads(
    pieces: list[str], shape: str, ascii_only: bool, padding: str | None
) -> None:
    """Each piece also comes in a chunk of a shape of its own, which no template fits."""

    def stream(unlike: bool) -> list[bytes]:
        events = []
        for number, piece in enumerate(pieces):
            said: dict[str, Any] = {"index": 0, "odd": padding}
            if shape == "text":
                said["text"] = piece
            elif shape == "arguments":
                said["delta"] = {"tool_calls": [{"index": 0, "function": {"arguments": piece}}], "content": None}
            else:
                said["delta"] = {"role": "assistant", shape: piece}
            chunk: dict[str, object] = {"id": "c", "choices": [said]}
            if unlike:
                chunk[f"n{number}"] = None
            events.append(json.dumps(chunk, ensure_ascii=ascii_only).encode())
        end: dict[str, object] = {"index": 0, "finish_reason": "stop"}
        end["text" if shape == "text" else "delta"] = "" if shape == "text" else {}
        return [*events, json.dumps({"id": "c", "choices": [end]}).encode()]

    def read(events: list[bytes]) -> Any:
        whole = Reassembly()
        for at, data in enumerate(events):
            whole.add([data], float(at))
        done = whole.finish()
        kept = {name: value for name, value in json.loads(done.body).items() if not name.startswith("n")}
        return kept, done.first_token_at, done.tbt_s

    assert read(stream(unlike=False)) == read(stream(unlike=True))


def test_a_template_is_for_one_choice_also_where_the_index_stands_last() -> None:
    pieces = [
        event(choices=[{"delta": {"content": text}, "finish_reason": None, "index": i}])
        for text in "abc"
        for i in (0, 1)
    ]

    streamed = answer(*pieces, delta(0, "stop"), delta(1, "stop"), choices=2)

    assert [c["message"]["content"] for c in streamed["choices"]] == ["abc", "abc"]


def test_a_template_is_for_the_text_and_no_other_string_of_its_name() -> None:
    pieces = [event(choices=[{"index": 0, "aside": {"content": aside}, "delta": {"content": "a"}}]) for aside in "xyz"]

    assert answer(*pieces, delta(0, "stop"))["choices"][0]["message"]["content"] == "aaa"


def test_two_strings_in_the_place_of_one_are_a_bad_response() -> None:
    like = delta(content="a"), delta(content="b")

    with pytest.raises(BadResponse):
        assembled(*like, delta(content="c").replace(b'"content": "c"', b'"content": "c","d"'))


@pytest.mark.parametrize(
    "unlike",
    [
        pytest.param((b'"delta"', b'"aside": {"content": "x"}, "delta"'), id="the same name elsewhere"),
        pytest.param((b'"content"', b'"c\\u006fntent"'), id="a name that is escaped"),
        pytest.param((b'"delta"', b'"odd": 1e999, "delta"'), id="a field that cannot be read"),
    ],
)
def test_where_no_template_can_be_made_events_are_read_in_full(unlike: tuple[bytes, bytes]) -> None:
    pieces = [delta(content=text).replace(*unlike) for text in "abc"]
    whole = Reassembly()

    whole.add([piece[6:-2] for piece in (*pieces, delta(0, "stop", content="d"))], 0.0)

    assert b'"content":"abcd"' in whole.finish().body


def test_null_is_nothing_anywhere() -> None:
    streamed = answer(
        event(choices=None, usage=None, error=None),
        event(choices=[{"index": 0, "delta": None, "finish_reason": None}]),
        delta(role=None, content=None, function_call=None, tool_calls=None),
        call(None, index=0, id=None, name=None),
        delta(0, "stop"),
    )

    assert streamed["choices"][0]["message"] == {
        "role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {}}]
    }  # fmt: skip


def test_the_name_of_a_tool_is_a_token() -> None:
    whole = assembled(delta(role="assistant"), delta(tool_calls=[{"index": 0, "id": "a"}]), delta(0, "tool_calls"))

    assert whole.first_token_at == 1.0


def test_long_texts_are_kept_in_few_pieces() -> None:
    whole = Reassembly()
    for _ in range(5000):
        whole.add([delta(content="ab")[6:-2]], 0.0)
    whole.add([delta(0, "stop")[6:-2]], 0.0)

    assert json.loads(whole.finish().body)["choices"][0]["message"]["content"] == "ab" * 5000


# ---------------------------------------------------------------- usage and times


def usage(prompt: int, output: int) -> dict[str, object]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def choice(index: int, finish: str | None = None, **more: object) -> dict[str, object]:
    return {"index": index, "delta": {"content": "x"}, "finish_reason": finish, **more}


def test_a_usage_beside_no_choice_wins_over_running_ones() -> None:
    whole = assembled(
        event(choices=[choice(0, "stop")], usage=usage(3, 1)),
        event(choices=[choice(1, "stop")], usage=usage(3, 5)),
        event(choices=[], usage=usage(3, 6)),
        choices=2,
    )

    assert (json.loads(whole.body)["usage"], whole.usage) == (usage(3, 6), None)


@pytest.mark.parametrize(
    ("stream", "choices", "expected"),
    [
        pytest.param(
            [
                event(choices=[choice(0, "stop")], usage=usage(3, 1)),
                event(choices=[choice(1, "stop")], usage=usage(3, 5)),
            ],
            2,
            Usage(input_tokens=3, output_tokens=6, total_tokens=9),
            id="running counts are each choice's own",
        ),
        pytest.param(
            [event(choices=[choice(0, "stop")], timings={"predicted_n": 4, "prompt_n": 2, "cache_n": 3})],
            1,
            Usage(input_tokens=5, output_tokens=4, total_tokens=9, cached_input_tokens=3),
            id="llama.cpp's timings",
        ),
        pytest.param(
            [
                event(choices=[choice(0, token_ids=[5, 6])], prompt_token_ids=[1, 2, 3]),
                event(choices=[choice(0, "stop", token_ids=[7])]),
            ],
            1,
            Usage(input_tokens=3, output_tokens=3, total_tokens=6),
            id="token ids",
        ),
        pytest.param([event(choices=[choice(0, "stop")])], 1, None, id="nothing to go by"),
    ],
)
def test_a_usage_that_is_missing_is_estimated_from_the_stream_alone(
    stream: list[bytes], choices: int, expected: Usage | None
) -> None:
    whole = assembled(*stream, choices=choices)

    assert whole.usage == expected
    assert "usage" not in json.loads(whole.body)


def test_the_first_token_is_the_first_text_and_gaps_are_divided_by_tokens() -> None:
    """A role, a comment or an empty text is no token, and one event may carry several."""
    whole = assembled(
        delta(role="assistant", content=""),
        b": keep-alive\n\n",
        delta(content="two tokens"),
        delta(content=" three"),
        delta(0, "stop", content=" four"),
        event(choices=[], usage=usage(1, 5)),
    )

    assert (whole.first_token_at, whole.tbt_s) == (2.0, 0.5)


def test_of_one_token_there_is_no_gap() -> None:
    assert assembled(delta(0, "stop", content="x")).tbt_s is None


def test_choices_run_side_by_side() -> None:
    both = [choice(0), choice(1)]
    whole = assembled(
        event(choices=both), event(choices=both), event(choices=[choice(0, "stop"), choice(1, "stop")]),
        event(choices=[], usage=usage(1, 6)), choices=2,
    )  # fmt: skip

    assert whole.tbt_s == 1.0


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b'{"messages":[]}', 1),
        (b'{"n":3}', 3),
        (b'{"n":null,"prompt":"a"}', 1),
        (b'{"n":2,"prompt":["a","b"]}', 4),
        (b'{"prompt":[[1,2],[3]]}', 2),
        (b'{"prompt":[1,2,3]}', 1),
        (b'{"n":true}', 1),
        (b'{"n":"x"}', 1),
        (b"[]", 1),
    ],
)
def test_a_payload_tells_how_many_choices_it_asks_for(payload: bytes, expected: int) -> None:
    assert choices_asked(payload) == expected
