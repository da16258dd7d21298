"""The judge of runs of kills sees every way in which a request may have gone wrong."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.every_transport import Found
from tests.faults.process_kills import Ended


def result(status_code: int, payload: str = "x") -> str:
    return json.dumps({"id": "any", "status_code": status_code, "payload": payload})


SAID: Mapping[str, Sequence[str]] = {"a": [result(200)], "b": [result(200)], "poison": [result(500)]}
BILLED = (("e1", "a"), ("e2", "b"))
WELL = Ended(
    submitted=frozenset({"a", "b", "poison"}),
    found=Found(results=SAID, dead=Counter(["poison"]), billed=BILLED, left={"the queue": 0}),
    repeats=False,
    kills=1,
    fell=0,
    failed_once=0,
    calls=3,
    seconds=1.0,
)


def but(**changes: Any) -> Ended:
    return replace(WELL, found=replace(WELL.found, **changes))


def test_all_is_well_where_each_request_has_one_end_and_one_bill() -> None:
    assert WELL.breaches() == []
    assert (WELL.completed, WELL.failed) == (frozenset({"a", "b"}), frozenset({"poison"}))


@pytest.mark.parametrize(
    ("ended", "breaches"),
    [
        pytest.param(
            but(results={name: SAID[name] for name in ("a", "poison")}, billed=BILLED[:1]),
            ["b has no result"],
            id="a lost request",
        ),
        pytest.param(
            replace(WELL, submitted=frozenset({"a", "poison"})), ["b was never submitted"], id="a request of nobody"
        ),
        pytest.param(but(results={**SAID, "a": [result(200)] * 2}), ["a has 2 results"], id="a result twice"),
        pytest.param(
            but(results={**SAID, "a": [result(200), result(200, "y")]}),
            ["a has 2 different results", "a has 2 results"],
            id="another result",
        ),
        pytest.param(but(dead=Counter[str]()), ["poison has failed, and is no dead letter"], id="no dead letter"),
        pytest.param(
            but(dead=Counter(["poison", "a"])), ["a is a dead letter, and has not failed"], id="a wrong dead letter"
        ),
        pytest.param(but(dead=Counter(["poison"] * 2)), ["poison is 2 dead letters"], id="a dead letter twice"),
        pytest.param(
            but(billed=(*BILLED, BILLED[0])), ["event e1 is there 2 times", "a is billed 2 times"], id="an event twice"
        ),
        pytest.param(but(billed=(*BILLED, ("e3", "a"))), ["a is billed 2 times"], id="two events for one request"),
        pytest.param(but(billed=BILLED[:1]), ["b was completed, and is not billed"], id="no bill"),
        pytest.param(
            but(billed=(*BILLED, ("e3", "poison"))), ["poison is billed, and was not completed"], id="a wrong bill"
        ),
        pytest.param(replace(WELL, fell=1), ["1 workers ended by themselves"], id="a worker that fell"),
        pytest.param(but(left={"the queue": 2, "another": 0}), ["2 left in the queue"], id="something is left"),
    ],
)
def test_a_breach_is_named(ended: Ended, breaches: list[str]) -> None:
    assert ended.breaches() == breaches


def test_what_is_published_may_be_said_again_but_not_differently() -> None:
    again = replace(but(results={**SAID, "a": [result(200)] * 2}, dead=Counter(["poison"] * 2)), repeats=True)
    differently = replace(but(results={**SAID, "a": [result(200), result(200, "y")]}), repeats=True)

    assert again.breaches() == []
    assert again.said_again == 1
    assert differently.breaches() == ["a has 2 different results"]
