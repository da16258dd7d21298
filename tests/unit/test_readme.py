"""The README and the docs say what is so: variables, files, commands."""

import re
import shlex
from pathlib import Path

import pytest

from inference_worker.cli import _parser, _wrong_together
from inference_worker.config.settings import describe, load
from inference_worker.dev_samples import curl_lines, sample_payload
from inference_worker.redis_scripts import SCRIPTS
from tests.readme_table import README, table, written

ROOT = README.parent
DOCS = sorted([README, *ROOT.glob("docs/**/*.md"), ROOT / "CONTRIBUTING.md"])
TEXT = README.read_text()
NAMED = {path: path.read_text() for path in DOCS}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_table_of_variables_is_that_of_the_settings() -> None:
    """To mend it: python -m tests.readme_table"""
    assert written(TEXT) == TEXT


def test_the_table_has_every_variable_once() -> None:
    assert re.findall(r"^\| `([A-Z_0-9]+)`", table(), re.MULTILINE) == [variable.name for variable in describe()]


@pytest.mark.parametrize("path", DOCS, ids=name)
def test_every_file_that_is_linked_exists(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", NAMED[path])

    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]

    assert missing == []


@pytest.mark.parametrize("path", DOCS, ids=name)
def test_every_file_of_ours_that_is_named_exists(path: Path) -> None:
    names = re.findall(r"`((?:inference_worker|docs|tests|deploy)/[\w./-]+|[a-z_]+(?:/[a-z_]+)*\.py)`", NAMED[path])

    missing = [
        named for named in names if not ((ROOT / named).exists() or (ROOT / "inference_worker" / named).exists())
    ]

    assert missing == []


@pytest.mark.parametrize("path", DOCS, ids=name)
def test_every_variable_that_is_named_exists(path: Path) -> None:
    # The last one is an error code of the llm-d-async format.
    known = {variable.name for variable in describe()} | {
        "DEPLOYMENT_ID",
        "TEST_SERVICES",
        "NAME_FILE",
        "INFERENCE_ERROR",
    }
    named = set(
        re.findall(
            r"\b(?:RABBITMQ|REDIS|MODEL|INFERENCE|HEALTH|METRICS?|WORKER|GATEWAY|TLS|LOG)_[A-Z_]+\b", NAMED[path]
        )
    )

    assert named - known - {f"{variable.name}_FILE" for variable in describe() if variable.file} == set()


def fenced(heading: str, language: str) -> str:
    """The first block of a language below a heading."""
    found = re.search(rf"^## {re.escape(heading)}$.*?^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def test_the_curl_commands_are_those_that_dev_prints_and_that_its_test_runs() -> None:
    payload = sample_payload("/v1/chat/completions", "mock-model", "Hello, queue", stream=False)

    assert fenced("Submit over HTTP", "sh").splitlines() == list(curl_lines("http://127.0.0.1:8080", payload))


def test_the_least_environment_is_enough_and_nothing_in_it_is_wrong() -> None:
    exported = shlex.split(fenced("Run it beside a model", "sh"), comments=True)
    environ = dict(word.split("=", 1) for word in exported if word != "export")

    settings = load(environ)

    assert settings.identity.replica_id == "replica-1"
    required = {variable.name for variable in describe() if variable.default == "required"}
    assert required - environ.keys() == {"METRIC_SERVER_SERVICE_TOKEN"}


def test_the_two_commands_are_the_first_that_are_shown() -> None:
    commands = re.findall(r"^(make \w+)", TEXT, re.MULTILINE)

    assert commands[:2] == ["make run", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", "".join(re.findall(r"`[^`]*`", TEXT))):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_commands_of_the_readme_exist() -> None:
    for command in re.findall(r"inference-worker (run|dev|mock-model)\b", TEXT):
        assert _parser().parse_args([command]).command == command


@pytest.mark.parametrize("command", ["submit", "dlq list", "dlq purge"])
def test_a_url_without_a_scheme_is_refused_before_anything_is_asked(command: str) -> None:
    args = _parser().parse_args([*command.split(), "--url", "127.0.0.1:8080"])

    assert "does not begin with http://" in (_wrong_together(args) or "")


def test_every_redis_command_of_a_script_is_in_the_docs() -> None:
    page = NAMED[ROOT / "docs" / "redis.md"]
    used = {command for script in SCRIPTS for command in re.findall(r"redis\.call\('(\w+)'", script.source)}

    assert [command for command in sorted(used) if f"`{command}`" not in page] == []
