"""Flags, documents and environment of `process`: read together, and all that is wrong said at once."""

import argparse
import json
import random
from collections.abc import Mapping

import pytest

from inference_worker.errors import ConfigurationError
from inference_worker.process import process_name
from inference_worker.process_arguments import add_process_flags, given_flags, process_level, with_two_dashes
from inference_worker.process_queues import policy_of, route_of
from inference_worker.process_setup import ProcessSetup, read_setup

DOCUMENT = {
    "url": "redis://:secret@redis:6379/2",
    "queues": [
        {"queue_name": "chat", "igw_base_url": "http://gateway/base/", "inference_objective": "fast"},
        {"queue_name": "night", "igw_base_url": "http://gateway", "worker_pool_id": "batch"},
    ],
}
POOLS = [{"id": "default", "workers": 3}, {"id": "batch", "workers": 5}]


def read(
    document: object = DOCUMENT,
    environ: Mapping[str, str] | None = None,
    files: Mapping[str, object] | None = None,
    **flags: str,
) -> ProcessSetup:
    """A setup; `files` by their names, as objects."""
    texts = {"pools": json.dumps(POOLS), **{name: json.dumps(value) for name, value in (files or {}).items()}}
    given = {
        "transport": "redis-sortedset",
        "transport-config": json.dumps(document),
        "pool-config-file": "pools",
        **{name.replace("_", "-"): value for name, value in flags.items()},
    }
    return read_setup(given, environ or {}, lambda path: texts[path], random.Random(1))


def parsed(*arguments: str) -> Mapping[str, str]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_process_flags(parser)
    return given_flags(parser.parse_args(with_two_dashes(arguments)))


def test_a_process_needs_no_variable_of_the_environment() -> None:
    setup = read()

    assert setup.settings.identity.deployment_id == "process"
    assert setup.settings.redis.url_now() == "redis://:secret@redis:6379/2"
    queues = setup.documents.transport.queues
    assert [queue.id for queue in queues if queue.worker_pool_id == "batch"] == ["night"]


def test_two_processes_of_one_host_have_different_names() -> None:
    names = {
        read_setup(
            {
                "transport": "redis-sortedset",
                "transport-config": json.dumps({**DOCUMENT, "queues": DOCUMENT["queues"][:1]}),
            },
            {},
            str,
            random.Random(seed),
        ).settings.identity.replica_id
        for seed in (1, 2)
    }

    assert len(names) == 2


def test_a_name_that_is_set_is_kept() -> None:
    assert read(environ={"REPLICA_ID": "worker-3"}).settings.identity.replica_id == "worker-3"


def test_the_environment_stands_in_for_a_url_that_the_document_has_not() -> None:
    document = {"queues": DOCUMENT["queues"]}

    assert read(document, {"REDIS_URL": "redis://other:1/0"}).settings.redis.url_now() == "redis://other:1/0"
    rabbit = read(document, {"RABBITMQ_URL": "amqp://u:p@broker/", "REDIS_URL": "redis://r"}, transport="rabbitmq")
    assert rabbit.settings.rabbitmq.url_now().startswith("amqp://u:p@broker/")
    assert rabbit.settings.redis.url_now() == "redis://r"


def test_the_document_stands_above_the_environment() -> None:
    assert "other" not in read(environ={"REDIS_URL": "redis://other:1/0"}).settings.redis.url_now()


def test_all_that_is_wrong_with_flags_documents_and_environment_is_said_at_once() -> None:
    document = {
        "url": "redis://r",
        "queues": [{"queue_name": "a", "worker_pool_id": "nobody", "gate_type": "no-such-gate"}],
    }

    with pytest.raises(ConfigurationError) as raised:
        read(document, {"LOG_LEVEL": "loud", "CLAIM_LEASE_S": "-1"})

    text = "\n".join(raised.value.problems)
    for said in ("LOG_LEVEL", "CLAIM_LEASE_S", "queues[0].igw_base_url", '"nobody"', "no-such-gate"):
        assert said in text


def test_wrong_flags_and_wrong_variables_are_said_together() -> None:
    with pytest.raises(ConfigurationError) as raised:
        read(environ={"LOG_LEVEL": "loud"}, concurrency="none", drain_timeout="-1s")

    text = "\n".join(raised.value.problems)
    assert "LOG_LEVEL" in text
    assert "--concurrency" in text
    assert "--drain-timeout" in text


def test_a_url_with_a_password_is_never_shown() -> None:
    with pytest.raises(ConfigurationError) as raised:
        read({**DOCUMENT, "url": "redis://:secret@redis:port"})

    assert "secret" not in "\n".join(raised.value.problems)


def test_what_is_wrong_with_a_transforms_parameters_is_said_at_the_start() -> None:
    transforms = {"requestTransforms": [{"name": "a", "type": "gcs_uri_multipart", "parameters": {"provider": ["p"]}}]}

    with pytest.raises(ConfigurationError, match="providers: is missing"):
        read(files={"transforms": transforms}, transform_config_file="transforms")


def test_a_route_has_the_objective_of_its_queue_and_no_slash_at_its_end() -> None:
    chat, _ = read().documents.transport.queues

    route = route_of(chat, "x-objective")

    assert (route.base_url, route.headers, route.model) == ("http://gateway/base", {"x-objective": "fast"}, "")
    assert route_of(chat, "").headers == {}


def test_a_route_has_the_model_name_of_its_queue() -> None:
    queue = {"queue_name": "chat", "igw_base_url": "http://gateway", "model_override": "inner"}

    (chat,) = read({**DOCUMENT, "queues": [queue]}).documents.transport.queues

    assert route_of(chat, "").model == "inner"


@pytest.mark.parametrize("kind", ["random-robin", "tier-priority", "tier-aging"])
def test_each_merge_policy_is_made(kind: str) -> None:
    merge = read(files={"merge": {"type": kind}}, request_merge_policy_config_file="merge").documents.merge

    assert len(policy_of(merge, random.Random())) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--transport", "redis-sortedset", "-v=4"),
        ("--transport=redis-sortedset", "-v", "4"),
        ("-transport", "redis-sortedset", "--v", "4"),
        ("-transport=redis-sortedset", "--v=4"),
    ],
)
def test_flags_are_taken_with_one_dash_or_two_and_with_or_without_an_equals_sign(arguments: tuple[str, ...]) -> None:
    assert parsed(*arguments) == {"transport": "redis-sortedset", "v": "4"}


def test_a_switch_needs_no_value() -> None:
    assert parsed("--tls-insecure-skip-verify") == {"tls-insecure-skip-verify": "true"}
    assert parsed("--tls-insecure-skip-verify=false") == {"tls-insecure-skip-verify": "false"}
    assert parsed() == {}


@pytest.mark.parametrize(("number", "level"), [("0", "warning"), ("2", "info"), ("3", "info"), ("4", "debug")])
def test_the_flag_v_says_how_much_is_logged_unless_the_environment_does(number: str, level: str) -> None:
    assert process_level(read(v=number)) == level
    assert process_level(read(v=number, environ={"LOG_LEVEL": "error"})) == "error"


def test_a_flag_that_there_is_not_is_told_with_what_is_wrong_in_the_documents() -> None:
    with pytest.raises(ConfigurationError) as raised:
        read({**DOCUMENT, "queues": [{"queue_name": "a"}]}, concurency="3")

    text = "\n".join(raised.value.problems)
    assert "--concurency: is no flag; --concurrency is probably meant" in text
    assert "queues[0].igw_base_url" in text


@pytest.mark.parametrize("text", ["{}", "null", "[]"])
def test_a_document_without_anything_is_said_to_have_nothing(text: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        read_setup({"transport": "redis-sortedset", "transport-config": text}, {}, str, random.Random(1))

    assert raised.value.problems
    assert all("transport" in problem for problem in raised.value.problems)


def test_a_file_that_cannot_be_read_is_one_problem() -> None:
    def gone(path: str) -> str:
        raise FileNotFoundError(2, "No such file or directory")

    with pytest.raises(ConfigurationError) as raised:
        read_setup({"transport": "redis-sortedset", "transport-config-file": "t.json"}, {}, gone, random.Random(1))

    (problem,) = raised.value.problems
    assert problem.startswith("--transport-config-file: the file t.json cannot be read")


def test_a_process_that_begins_anew_under_its_name_holds_nothing_of_the_one_before() -> None:
    """The members of a quota are numbered from 1 in each process: one that were there already would not be counted."""
    settings = read(environ={"REPLICA_ID": "pod-0", "DEPLOYMENT_ID": "d"}).settings
    rng = random.Random(1)
    first, second = process_name(settings, rng), process_name(settings, rng)

    assert first != second
    assert all(name.startswith("d/pod-0/") for name in (first, second))
