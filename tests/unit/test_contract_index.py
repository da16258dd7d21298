"""The index of the contract names tests that exist, and leaves no sentence without one."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.contract_index import INDEX, Sentence

TESTS = Path(__file__).parents[1]
EVERY = [pytest.param(one, id=one.said[:60]) for sentences in INDEX.values() for one in sentences]


@cache
def names_in(file: str) -> frozenset[str]:
    """The tests of one file, as `name` or `class::name`."""
    found: set[str] = set()
    for node in ast.parse((TESTS / file).read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name, body=body):
                found |= {
                    f"{name}::{one.name}" for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
                }
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


def test_every_test_that_is_named_exists() -> None:
    named = {test for sentences in INDEX.values() for one in sentences for test in one.proved_by}

    missing = []
    for test in sorted(named):
        file, _, name = test.partition("::")
        if not (TESTS / file).is_file() or name not in names_in(file):
            missing.append(test)

    assert missing == []


@pytest.mark.parametrize("sentence", EVERY)
def test_a_sentence_has_a_test_or_is_of_another_part(sentence: Sentence) -> None:
    assert sentence.said
    assert bool(sentence.proved_by) != bool(sentence.later)
    assert len(set(sentence.proved_by)) == len(sentence.proved_by)


def test_no_section_is_empty() -> None:
    assert [name.partition(".")[0] for name in INDEX] == [str(number) for number in range(1, 10)]
    assert [name for name, sentences in INDEX.items() if not any(one.proved_by for one in sentences)] == []


def test_no_sentence_stands_there_twice() -> None:
    for sentences in INDEX.values():
        said = [one.said for one in sentences]
        assert len(set(said)) == len(said)
