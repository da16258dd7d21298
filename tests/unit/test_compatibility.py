"""Which versions are run, and what is read from their reports."""

from pathlib import Path

import pytest

from tests.compatibility import FOLDER, TESTS, Outcome, Version, outcome_of, versions, what_is_in, what_of
from tests.faults.processes import ROOT

REPORT = '<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="20"/></testsuites>'


def test_without_a_word_each_server_is_run_as_installed_and_by_its_image() -> None:
    assert [(one.what, one.image) for one in versions([], [])] == [
        ("redis", ""),
        ("postgres", ""),
        ("rabbitmq", ""),
        ("redis", "redis:8"),
        ("valkey", "valkey/valkey:8"),
        ("postgres", "postgres:17"),
        ("rabbitmq", "rabbitmq:4-management"),
    ]


def test_images_that_are_named_are_run_and_no_others() -> None:
    (one,) = versions(["redis"], ["registry.example:5000/valkey:7.2"])

    assert (one.what, one.environ) == (
        "valkey",
        {"TEST_SERVICES": "docker", "REDIS_IMAGE": "registry.example:5000/valkey:7.2"},
    )
    assert one.command == "python -m tests.compatibility --image registry.example:5000/valkey:7.2"


def test_what_is_installed_is_run_without_docker_where_that_is_asked_for() -> None:
    (one,) = versions(["redis", "valkey"], [], installed=True)

    assert (one.what, one.name) == ("redis", "installed")
    assert one.command == "python -m tests.compatibility --only redis --installed"


def test_programs_of_another_version_are_known_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "initdb").touch()

    (one,) = versions([], [], [str(tmp_path)])

    assert (one.what, one.environ) == ("postgres", {"TEST_SERVICES": "local", "TEST_PROGRAMS": str(tmp_path)})
    assert one.command == f"python -m tests.compatibility --programs {tmp_path}"


def test_a_folder_without_a_server_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has none of redis-server, valkey-server, initdb, rabbitmq-server"):
        what_is_in(str(tmp_path))


def test_an_image_that_there_are_no_tests_for_is_an_error() -> None:
    with pytest.raises(ValueError, match="mysql:8: is none of redis, valkey, postgres, rabbitmq"):
        what_of("mysql:8")


def test_errors_count_as_failures_and_what_was_left_out_as_neither() -> None:
    assert outcome_of(REPORT, 7.0) == Outcome(passed=14, failed=3, skipped=3, seconds=7.0)


@pytest.mark.parametrize("what", TESTS)
def test_the_tests_of_a_server_are_there(what: str) -> None:
    arguments = Version(what=what).arguments

    assert arguments
    assert all((ROOT / one).is_file() and one.startswith(FOLDER) for one in arguments)
