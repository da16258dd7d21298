"""Parameters as their documents have them: native or text, with every problem told at once."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.errors import ConfigurationError
from inference_worker.gates.parameters import Parameters

HERE = "pools[0].gate_params"


def of(**given: object) -> Parameters:
    return Parameters(given, HERE)


@pytest.mark.parametrize(
    ("value", "text"),
    [("a", "a"), (5, "5"), (5.0, "5"), (0.25, "0.25"), (True, "true"), (False, "false"), (None, "d"), ("", "d")],
)
def test_a_text_may_be_written_as_a_number_or_a_truth_value_case_180(value: object, text: str) -> None:
    params = of(name=value)

    assert params.text("name", "d") == text
    assert not params.problems


@pytest.mark.parametrize(
    ("value", "read"),
    [(["a", "b"], ("a", "b")), ("a, b", ("a", "b")), ("a", ("a",)), (None, ("d",)), ("", ("d",))],
)
def test_words_are_a_list_or_a_text_with_commas(value: object, read: tuple[str, ...]) -> None:
    params = of(name=value)

    assert params.words("name", ("d",)) == read
    assert not params.problems


@pytest.mark.parametrize("value", [[], ["a", ""], ["a", 1], "a,,b", {"a": 1}, 7])
def test_words_that_are_none_are_a_problem(value: object) -> None:
    params = of(name=value)

    assert params.words("name", ("d",)) == ("d",)
    assert "a list of texts, or one with commas" in params.problems[0]


@pytest.mark.parametrize(
    ("value", "number"), [(0.5, 0.5), (2, 2.0), ("0.5", 0.5), ("2e1", 20.0), ("", 7.0), (None, 7.0)]
)
def test_a_number_may_be_a_number_or_a_text_case_180(value: object, number: float) -> None:
    params = of(n=value)

    assert params.number("n", 7.0) == number
    assert not params.problems


@pytest.mark.parametrize(
    "value", ["abc", "1_000", "nan", "inf", True, [1], {}, float("inf"), "٣", " 1", "1e999", 10**400], ids=repr
)
def test_what_is_no_number_is_told_with_name_value_and_what_is_accepted_case_180(value: object) -> None:
    params = of(n=value)

    assert params.number("n", 7.0) == 7.0
    (problem,) = params.problems
    assert problem.startswith(f"{HERE}.n: is ")
    assert problem.endswith("; accepted: a number")


@pytest.mark.parametrize(("value", "number"), [(3, 3), (3.0, 3), ("3", 3), ("-3", -3), (None, 9)])
def test_a_whole_number_may_be_written_in_several_ways_case_180(value: object, number: int) -> None:
    assert of(n=value).whole("n", 9) == number


@pytest.mark.parametrize("value", [1.5, "1.5", "x", True, "9" * 5000], ids=repr)
def test_a_part_of_a_number_is_no_whole_number_case_180(value: object) -> None:
    params = of(n=value)

    assert params.whole("n", 9) == 9
    assert "a whole number" in params.problems[0]
    assert len(params.problems[0]) < 200


@pytest.mark.parametrize(
    ("value", "lasts_s"),
    [
        ("1s", 1.0),
        ("1m30s", 90.0),
        ("500ms", 0.5),
        ("1.5h", 5400.0),
        ("10us", 1e-5),
        ("-2s", -2.0),
        ("0", 0.0),
        (0, 0.0),
    ],
)
def test_a_duration_is_written_with_its_unit_case_180(value: object, lasts_s: float) -> None:
    params = of(d=value)

    assert params.seconds("d") == pytest.approx(lasts_s)
    assert not params.problems


@pytest.mark.parametrize("value", ["5", 5, "s", "1 s", "1d", "1s2", "", None, [], True, "1s" * 100], ids=repr)
def test_a_duration_without_a_unit_is_none_case_180(value: object) -> None:
    params = of(d=value)
    params.seconds("d")

    assert "1m30s" in params.problems[0]


@pytest.mark.parametrize("value", [{"a": "x", "b": 2, "c": True}, '{"a": "x", "b": 2, "c": true}'])
def test_a_map_may_be_an_object_or_its_json_as_text_case_180(value: object) -> None:
    assert of(m=value).texts("m") == {"a": "x", "b": "2", "c": "true"}


@pytest.mark.parametrize("value", ["not json", "[1]", [1], 5, {"a": {}}, "[" * 5000], ids=lambda value: str(value)[:9])
def test_what_is_no_map_is_a_problem_case_180(value: object) -> None:
    params = of(m=value)

    assert params.texts("m") == {}
    assert len(params.problems) == 1


@pytest.mark.parametrize("name", ["text", "number", "whole", "seconds", "switch", "gate", "gates"])
def test_what_is_needed_and_missing_is_a_problem_case_180(name: str) -> None:
    params = of()
    getattr(params, name)("n")

    assert params.problems[0].startswith(f"{HERE}.n: is missing; accepted: ")


def test_a_problem_can_be_printed_whatever_the_value_is() -> None:
    params = of(a="\ud800ü", b=object(), c="x" * 1000)
    for name in "abc":
        params.number(name)

    assert '"\\ud800ü"' in params.problems[0]
    assert all(len(problem.encode()) < 150 for problem in params.problems)


def test_a_bound_is_part_of_what_is_accepted() -> None:
    params = of(a="0.9", b=0, c="0s", d=3)
    read = (
        params.number("a", 0.5, at_least=0, below=0.9),
        params.whole("b", at_least=1, at_most=8),
        params.seconds("c", 1.0, above=0),
        params.number("d", 3.0, above=3),
    )

    assert read == (0.5, 1, 1.0, 3.0)
    assert [problem.partition("; ")[2] for problem in params.problems] == [
        "accepted: a number at least 0, below 0.9",
        "accepted: a whole number at least 1, at most 8",
        'accepted: a duration such as "500ms", "90s" or "1m30s" above 0 s',
        "accepted: a number above 3",
    ]


def test_a_word_that_is_not_accepted_is_told_with_those_that_are() -> None:
    params = of(mode="Blocking")

    assert params.choice("mode", ("blocking", "classifying"), "classifying") == "classifying"
    assert params.problems == [f'{HERE}.mode: is "Blocking"; accepted: "blocking" or "classifying"']


@pytest.mark.parametrize(("value", "on"), [(True, True), ("false", False), ("TRUE", True), (None, False)])
def test_a_switch_is_true_or_false(value: object, on: bool) -> None:
    assert of(s=value).switch("s", False) is on


def test_a_text_that_is_none_is_not_shown_for_it_may_hold_a_secret() -> None:
    params = of(address={"url": "redis://:hunter2@host"})
    params.text("address")

    assert params.problems == [f"{HERE}.address: is an object; accepted: a text"]


def test_an_url_in_a_wrong_place_is_shown_without_its_password() -> None:
    params = of(limit="redis://me:hunter2@host/0")
    params.whole("limit")

    (problem,) = params.problems
    assert problem.startswith(f'{HERE}.limit: is "redis://***@host/0"; accepted: ')


def test_an_empty_text_can_switch_off() -> None:
    assert of(h="").text_or_off("h", "x-h") == ""
    assert of().text_or_off("h", "x-h") == "x-h"
    assert of(h="x-other").text_or_off("h", "x-h") == "x-other"


def test_a_name_that_nobody_asks_for_is_a_problem() -> None:
    params = of(limit=1, limt=2)
    params.whole("limit")
    params.finish()

    assert params.problems == [f"{HERE}.limt: is not a parameter; accepted: limit"]


def test_all_problems_are_raised_at_once() -> None:
    params = of(a="x", b="y")
    params.number("a")
    params.number("b")

    with pytest.raises(ConfigurationError) as raised:
        params.raise_problems()

    assert len(raised.value.problems) == 2


GATES = [{"gate_type": "constant"}, {"gate_type": "local-max-concurrency", "gate_params": {"limit": "x"}}]


@pytest.mark.parametrize("value", [GATES, json.dumps(GATES)], ids=["native", "JSON as text"])
def test_a_list_of_gates_may_be_native_or_text_case_181(value: object) -> None:
    params = of(gates=value)
    first, second = params.gates("gates")
    second.given.whole("limit")

    assert (first.gate_type, second.gate_type) == ("constant", "local-max-concurrency")
    assert params.problems == [f'{HERE}.gates[1].gate_params.limit: is "x"; accepted: a whole number']


@pytest.mark.parametrize(
    "value",
    [
        {"gate_type": "constant", "gate_params": {"a": 1}},
        {"gate_type": "constant", "gate_params": '{"a": 1}'},
        '{"gate_type": "constant", "gate_params": {"a": 1}}',
    ],
    ids=["native", "parameters as text", "all of it as text"],
)
def test_a_nested_gate_may_be_native_or_text_case_181(value: object) -> None:
    params = of(gate=value)
    spec = params.gate("gate")

    assert spec is not None
    assert spec.given.whole("a") == 1
    assert not params.problems


@pytest.mark.parametrize("value", [5, True, [1], "text", '"text"', {"gate_type": 5}, {"gate_type": ""}, {}], ids=repr)
def test_what_is_no_gate_is_a_problem_case_181(value: object) -> None:
    params = of(gate=value)

    assert params.gate("gate") is None
    assert len(params.problems) == 1


@pytest.mark.parametrize("value", [5, {"gate_type": "constant"}, "text", [5]], ids=repr)
def test_what_is_no_list_of_gates_is_a_problem_case_181(value: object) -> None:
    params = of(gates=value)

    assert params.gates("gates") == ()
    assert len(params.problems) == 1


def test_a_misspelt_part_of_a_gate_is_a_problem() -> None:
    params = of(gate={"gate_type": "constant", "gate_parms": {}})
    params.gate("gate")

    assert params.problems == [f"{HERE}.gate.gate_parms: is not a part of a gate; accepted: gate_type, gate_params"]


def test_parameters_that_are_no_object_are_a_problem() -> None:
    assert Parameters([1], HERE).problems == [f"{HERE}: is [1]; accepted: an object, or its JSON as text"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(JSON)
def test_whatever_a_document_says_reading_it_goes_on(value: Any) -> None:
    for read in ("text", "number", "whole", "seconds", "switch", "texts", "inner", "gate", "gates"):
        params = of(n=value)
        getattr(params, read)("n")

        assert all(problem.startswith(f"{HERE}.n") for problem in params.problems)


@given(st.integers(0, 10**6), st.integers(0, 59), st.integers(0, 59), st.integers(0, 999))
def test_a_duration_is_the_sum_of_its_parts(hours: int, minutes: int, seconds: int, millis: int) -> None:
    text = f"{hours}h{minutes}m{seconds}s{millis}ms"

    assert of(d=text).seconds("d") == pytest.approx(hours * 3600 + minutes * 60 + seconds + millis / 1000)
