"""The table of cases is whole, names tests that exist, and no case that applies is without one."""

import pytest

from tests import conformance
from tests.conformance import GROUPS, Found, all_tests, found, main, numbers_in, report

ALL = [case for cases in GROUPS.values() for case in cases]


def test_no_test_stands_for_a_case_that_there_is_not() -> None:
    known = {case.number for case in ALL}

    unknown = [test for test in all_tests() if not known.issuperset(numbers_in(test))]

    assert unknown == []


def test_every_test_that_is_named_exists() -> None:
    tests = set(all_tests())

    assert [test for case in ALL for test in case.named if test not in tests] == []


def test_every_number_is_there_once_and_in_its_order() -> None:
    numbers = [case.number for case in ALL]

    assert numbers == sorted(set(numbers))
    assert (len(numbers), numbers[0], numbers[-1]) == (271, 1, 356)


def test_every_case_that_applies_has_a_test() -> None:
    missing = {one.case.number for cases in found(all_tests()).values() for one in cases if one.missing}

    assert missing == set()


def test_what_does_not_apply_says_why_and_names_no_test() -> None:
    assert [case.number for case in ALL if case.does_not_apply and case.named] == []
    assert all(case.said for case in ALL)


def test_a_case_is_found_by_the_end_of_a_tests_name() -> None:
    assert numbers_in("file.py::TestThem::test_in_any_letter_case_case_242") == (242,)
    assert numbers_in("file.py::test_two_case_198_case_200") == (198, 200)
    assert numbers_in("file.py::test_three_case_1_2_3") == (1, 2, 3)
    assert numbers_in("file.py::test_in_case_of_need") == ()


def test_a_case_without_a_test_is_told_and_ends_it_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conformance, "all_tests", lambda: ("file.py::test_it_case_1", "file.py::test_more_case_84"))

    assert main(["--list"]) == 1

    said = capsys.readouterr().out
    assert "    1 a plain request is read as it was written\n        file.py::test_it_case_1\n" in said
    assert "    2 a request with routes of its own keeps them in its data\n        MISSING\n" in said
    assert "        does not apply: Google's own libraries publish and pull: there is no producer of ours\n" in said
    assert "\nWithout a test:\n    2 a request with routes" in said


def test_where_no_case_is_without_a_test_it_ends_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "_".join(str(case.number) for case in ALL)
    monkeypatch.setattr(conformance, "all_tests", lambda: (f"file.py::test_all_case_{names}",))

    assert main([]) == 0


def test_the_counts_add_up() -> None:
    case, other = ALL[0], next(case for case in ALL if case.does_not_apply)
    groups = {"one": [Found(case=case, tests=("t",)), Found(case=case, tests=()), Found(case=other, tests=("t",))]}

    lines = list(report(groups))

    assert [line.split() for line in lines[1:3]] == [["one", "3", "2", "1", "1"], ["all", "3", "2", "1", "1"]]
