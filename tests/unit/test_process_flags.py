"""The command line of a process of many queues, with its old flags. Names end in the number of the peer's case."""

import json
from contextlib import suppress
from random import Random

import pytest

from inference_worker import cli
from inference_worker.assembly import Outside
from inference_worker.config.process_flags import (
    BY_NAME,
    FLAGS,
    ProcessFlags,
    documents_of,
    flags_and_problems,
    read_flags,
)
from inference_worker.errors import ConfigurationError

QUEUE = {"queue_name": "q1", "igw_base_url": "http://gateway:8000"}
TRANSPORT = json.dumps({"url": "redis://r:6379", "queues": [QUEUE]})
NEW = {"transport": "redis-sortedset", "transport-config": TRANSPORT}
OLD = {
    "message-queue-impl": "redis-sortedset",
    "redis.url": "redis://old:6379",
    "redis.ss.igw-base-url": "http://gateway:8000",
}


def read(given: dict[str, str], files: dict[str, str] | None = None) -> ProcessFlags:
    def read_file(path: str) -> str:
        if files is None or path not in files:
            raise FileNotFoundError(path)
        return files[path]

    return read_flags(given, read_file)


def problems(given: dict[str, str], files: dict[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        read(given, files)
    return caught.value.problems


def test_the_defaults_are_the_peers() -> None:
    flags = read(NEW)

    assert (flags.concurrency, flags.request_timeout_s, flags.drain_timeout_s) == (64, 300.0, 120.0)
    assert (flags.gate_wait_timeout_s, flags.backlog_poll_interval_s, flags.prometheus_cache_s) == (300.0, 15.0, 5.0)
    assert (flags.health_port, flags.metrics_port, flags.verbosity, flags.watch_interval_s) == (8081, 9090, 2, 0.0)
    assert (flags.pools_json, flags.merge_json, flags.transform_json, flags.notes) == (None, None, None, ())
    assert documents_of(flags).transport.queues[0].queue_name == "q1"


def test_each_flag_is_there_once_and_says_what_it_means() -> None:
    assert len(BY_NAME) == len(FLAGS)
    assert all(flag.meaning for flag in FLAGS)


def test_documents_come_from_files() -> None:
    given = {
        "transport": "redis-sortedset",
        "transport-config-file": "t.json",
        "pool-config-file": "p.json",
        "request-merge-policy-config-file": "m.json",
        "transform-config-file": "x.json",
        "transport-config-watch-interval": "10s",
    }
    files = {
        "t.json": TRANSPORT,
        "p.json": '[{"id": "default", "workers": 3}]',
        "m.json": '{"type": "tier-priority"}',
        "x.json": '{"requestTransforms": []}',
    }

    flags = read(given, files)

    assert (flags.transport_file, flags.watch_interval_s, flags.transform_json) == ("t.json", 10.0, files["x.json"])
    documents = documents_of(flags)
    assert [pool.workers for pool in documents.pools] == [3]
    assert documents.merge.type == "tier-priority"


def test_the_concurrency_is_that_of_the_one_pool() -> None:
    assert [pool.workers for pool in documents_of(read({**NEW, "concurrency": "7"})).pools] == [7]


def test_old_flags_make_a_document_that_the_new_reader_takes_case_293() -> None:
    flags = read(
        {
            **OLD,
            "redis.ss.request-path-url": "/v1/chat/completions",
            "redis.ss.inference-objective": "gold",
            "redis.ss.request-queue-name": "mine",
            "redis.ss.result-queue-name": "results",
            "redis.ss.poll-interval-ms": "50",
            "redis.ss.batch-size": "64",
            "redis.ss.gate-type": "redis",
            "redis.ss.gate-params": '{"address": "r:6379"}',
            "redis-tracing": "true",
        }
    )

    config = documents_of(flags).transport
    only = config.queues[0]
    assert (config.result_queue_name, config.poll_interval_s, config.batch_size) == ("results", 0.05, 64)
    assert config.enable_tracing
    assert (only.queue_name, only.request_path, only.objective) == ("mine", "/v1/chat/completions", "gold")
    assert only.worker_pool_id == "default"
    assert only.gate is not None
    assert (only.gate.gate_type, only.gate.gate_params) == ("redis", {"address": "r:6379"})


def test_old_flags_alone_have_the_old_defaults_case_293() -> None:
    config = documents_of(read(OLD)).transport

    assert (config.queues[0].queue_name, config.result_queue_name) == ("request-sortedset", "result-list")
    assert (config.poll_interval_s, config.batch_size, config.queues[0].gate) == (1.0, 10, None)


@pytest.mark.parametrize("inline", [True, False])
def test_an_old_list_of_queues_is_taken_inline_or_from_its_file_case_293(inline: bool) -> None:
    text = json.dumps([QUEUE, {**QUEUE, "queue_name": "q2"}])
    name = "redis.ss.queues-config" if inline else "redis.ss.queues-config-file"

    flags = read({**OLD, name: text if inline else "q.json"}, {"q.json": text})

    assert [queue.queue_name for queue in documents_of(flags).transport.queues] == ["q1", "q2"]
    assert (flags.transport_file, flags.transport_is_queues) == (("", False) if inline else ("q.json", True))


def test_old_flags_of_channels_make_a_document_of_channels_case_293() -> None:
    flags = read(
        {
            "message-queue-impl": "redis-pubsub",
            "redis.url": "redis://old:6379",
            "redis.igw-base-url": "http://gateway:8000",
            "redis.request-path-url": "/v1/chat/completions",
            "redis.inference-objective": "gold",
            "redis.request-queue-name": "mine",
            "redis.retry-queue-name": "again",
            "redis.result-queue-name": "results",
            "redis-tracing": "true",
        }
    )

    config = documents_of(flags).transport
    (only,) = config.queues
    assert (config.kind, config.retry_queue_name, config.result_queue_name) == ("redis-pubsub", "again", "results")
    assert config.enable_tracing
    assert (only.queue_name, only.request_path, only.objective) == ("mine", "/v1/chat/completions", "gold")
    assert all("is old; use" in note for note in flags.notes)


def test_without_a_word_of_the_transport_old_flags_are_of_channels_and_that_is_warned_of_case_293() -> None:
    flags = read({"redis.url": "redis://old:6379", "redis.igw-base-url": "http://gateway:8000"})

    config = documents_of(flags).transport
    assert (config.kind, config.queues[0].queue_name) == ("redis-pubsub", "request-queue")
    assert (config.retry_queue_name, config.result_queue_name) == ("retry-sortedset", "result-queue")
    assert "which stands for redis-pubsub: requests may be lost there" in flags.notes[0]
    assert len(flags.notes) == 3


@pytest.mark.parametrize("kind", ["gcp-pubsub", "gcp-pubsub-gated"])
def test_old_flags_of_a_topic_make_a_document_of_topics_case_293(kind: str) -> None:
    flags = read(
        {
            "message-queue-impl": kind,
            "pubsub.project-id": "p",
            "pubsub.igw-base-url": "http://gateway:8000",
            "pubsub.request-path-url": "/v1/x",
            "pubsub.inference-objective": "gold",
            "pubsub.request-subscriber-id": "requests",
            "pubsub.result-topic-id": "results",
            "pubsub.batch-size": "64",
        }
    )

    config = documents_of(flags).transport
    (only,) = config.queues
    assert (config.kind, config.project, config.result_queue_name, config.batch_size) == (
        "gcp-pubsub",
        "p",
        "results",
        64,
    )
    assert (only.queue_name, only.request_path, only.objective) == ("requests", "/v1/x", "gold")


def test_the_old_name_without_gates_asks_none_and_says_so_case_293() -> None:
    topic = {"subscriber_id": "s", "igw_base_url": "http://g", "gate_type": "constant", "gate_params": {"value": 0}}
    given = {"pubsub.project-id": "p", "pubsub.result-topic-id": "r", "pubsub.topics-config-file": "t.json"}
    files = {"t.json": json.dumps([topic, {"subscriber_id": "plain", "igw_base_url": "http://g"}])}

    plain = read({**given, "message-queue-impl": "gcp-pubsub"}, files)
    gated = read({**given, "message-queue-impl": "gcp-pubsub-gated"}, files)

    assert [queue.gate for queue in documents_of(plain).transport.queues] == [None, None]
    assert "asks no gates" in plain.notes[0]
    (gate, none) = [queue.gate for queue in documents_of(gated).transport.queues]
    assert none is None
    assert gate is not None
    assert gate.gate_type == "constant"
    assert not any("asks no gates" in note for note in gated.notes)
    assert gated.transport_file == "t.json"


def test_old_flags_of_another_transport_are_said_to_be_unused_case_294() -> None:
    others = {"pubsub.project-id": "p", "redis.request-queue-name": "channel", "redis.ss.request-queue-name": "set"}

    notes = read({**OLD, **others}).notes
    unused = {note.split()[0] for note in notes if "is of another transport than redis-sortedset" in note}
    assert unused == {"--pubsub.project-id", "--redis.request-queue-name"}
    channels = read({**OLD, **others, "message-queue-impl": "redis-pubsub", "redis.igw-base-url": "http://g"}).notes
    unused = {note.split()[0] for note in channels if "is of another transport than redis-pubsub" in note}
    assert unused == {"--pubsub.project-id", "--redis.ss.request-queue-name", "--redis.ss.igw-base-url"}


def test_the_old_url_may_come_from_the_environment() -> None:
    old = {name: value for name, value in OLD.items() if name != "redis.url"}

    url = documents_of(read(old), url="redis://env:1").transport.url

    assert url is not None
    assert url.now() == "redis://env:1"


def test_new_flags_win_and_the_old_ones_are_said_to_be_ignored_case_294() -> None:
    flags = read({**NEW, **OLD})

    assert documents_of(flags).transport.queues[0].queue_name == "q1"
    assert len(flags.notes) == len(OLD)
    assert all("is ignored" in note for note in flags.notes)


def test_old_flags_alone_are_said_to_be_old_and_new_ones_say_nothing_case_294() -> None:
    assert all("is old; use" in note for note in read(OLD).notes)
    assert len(read(OLD).notes) == len(OLD)
    assert read(NEW).notes == ()


@pytest.mark.parametrize(
    ("names", "used", "notes"),
    [
        pytest.param(("request-merge-policy-config-file",), "new", 0, id="new"),
        pytest.param(("request-merge-policy-config",), "old", 1, id="old"),
        pytest.param(("request-merge-policy-config", "request-merge-policy-config-file"), "new", 1, id="both"),
    ],
)
def test_the_merge_policy_has_an_old_name_and_the_new_one_wins_case_296(
    names: tuple[str, ...], used: str, notes: int
) -> None:
    paths = {"request-merge-policy-config-file": "new.json", "request-merge-policy-config": "old.json"}
    files = {"new.json": '"new"', "old.json": '"old"'}

    flags = read({**NEW, **{name: paths[name] for name in names}}, files)

    assert flags.merge_json == f'"{used}"'
    assert len(flags.notes) == notes
    assert ("is ignored" in "".join(flags.notes)) == (len(names) == 2)


def test_flags_of_what_is_not_here_are_taken_and_said_to_be_unused() -> None:
    notes = read({**NEW, "zap-encoder": "json", "metrics-endpoint-auth": "false"}).notes

    assert len(notes) == 2
    assert all("is not used: " in note for note in notes)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param({}, "--transport: is missing", id="nothing"),
        pytest.param({"transport-config": TRANSPORT}, '--transport: is ""; accepted: redis-sortedset', id="no kind"),
        pytest.param({**NEW, "transport": "kafka"}, '--transport: is "kafka"', id="a kind not here"),
        pytest.param(
            {"transport": "redis-sortedset"}, "--transport-config, --transport-config-file: neither", id="none"
        ),
        pytest.param(
            {**NEW, "transport-config-file": "x"}, "--transport-config, --transport-config-file: both", id="both"
        ),
        pytest.param({**OLD, "message-queue-impl": "kafka"}, '--message-queue-impl: is "kafka"', id="no old kind"),
        pytest.param({"redis-tracing": "true"}, "--transport: is missing", id="an old flag of no transport"),
        pytest.param(
            {"message-queue-impl": "gcp-pubsub", "pool-config-file": "p"},
            "--pool-config-file: is",
            id="pools, no topics",
        ),
        pytest.param(
            {"message-queue-impl": "gcp-pubsub", "pubsub.topics-config-file": "gone"},
            "--pubsub.topics-config-file: the file gone cannot",
            id="no topics",
        ),
        pytest.param({"redis.queues-config": "["}, "--redis.queues-config: is no JSON", id="no channels"),
        pytest.param({**NEW, "pool-config-file": "gone"}, "--pool-config-file: the file gone cannot", id="no file"),
        pytest.param({**OLD, "pool-config-file": "p"}, "--pool-config-file: is", id="pools without a list of queues"),
        pytest.param({**NEW, "concurrency": "0"}, "--concurrency: is", id="no workers"),
        pytest.param({**NEW, "request-timeout": "5"}, '--request-timeout: is "5"', id="no unit"),
        pytest.param({**NEW, "request-timeout": "0"}, "--request-timeout: is", id="no time"),
        pytest.param({**NEW, "gate-wait-timeout": "-1s"}, "--gate-wait-timeout: is", id="less than no time"),
        pytest.param({**NEW, "health-port": "70000"}, "--health-port: is", id="no port"),
        pytest.param({**NEW, "tls-insecure-skip-verify": "maybe"}, "--tls-insecure-skip-verify: is", id="no switch"),
        pytest.param({**NEW, "colour": "red"}, "--colour: is no flag", id="no flag"),
        pytest.param(
            {**NEW, "transport-config-watch-interval": "1s"}, "--transport-config-watch-interval: is", id="watch"
        ),
        pytest.param({**OLD, "redis.ss.gate-params": "{"}, "--redis.ss.gate-params: is no JSON", id="no parameters"),
        pytest.param({**OLD, "redis.ss.queues-config": "["}, "--redis.ss.queues-config: is no JSON", id="no queues"),
        pytest.param({**NEW, "status-rules": "{"}, "--status-rules: is no JSON", id="no rules"),
        pytest.param({**NEW, "status-rules": "[1]"}, "--status-rules: is [1]", id="a list of rules"),
        pytest.param({**NEW, "status-rules": '{"200": "retry"}'}, "--status-rules: 200 is no status", id="a success"),
    ],
)
def test_what_is_wrong_is_said_by_the_flags_name(given: dict[str, str], said: str) -> None:
    found = problems(given)

    assert any(problem.startswith(said) for problem in found), found


@pytest.mark.parametrize("name", ["tls-cert", "tls-key"])
def test_a_certificate_needs_its_key_and_a_key_its_certificate_case_297(name: str) -> None:
    assert problems({**NEW, name: "x.pem"}) == (
        "--tls-cert: is given without --tls-key, or the other way round; accepted: both, or none",
    )


def test_tls_is_as_it_is_given_case_297() -> None:
    flags = read({**NEW, "tls-ca-cert": "ca", "tls-cert": "c", "tls-key": "k", "tls-insecure-skip-verify": "true"})

    assert (flags.tls_ca_cert, flags.tls_cert, flags.tls_key, flags.tls_skip_verify) == ("ca", "c", "k", True)


def test_all_problems_come_at_once() -> None:
    assert len(problems({**NEW, "concurrency": "x", "v": "loud", "nope": "1", "drain-timeout": "soon"})) == 4


def test_the_rules_of_statuses_are_read() -> None:
    statuses = read({**NEW, "status-rules": '{"404": "retry"}'}).statuses

    assert (statuses.of(404).judgement, statuses.of(400).judgement) == ("retry", "final")


@pytest.mark.parametrize(("given", "verbosity"), [("3", 3), ("127", 127), ("500", 127)])
def test_a_verbosity_that_is_too_high_is_clamped_case_308(given: str, verbosity: int) -> None:
    assert read({**NEW, "v": given}).verbosity == verbosity


def test_pools_beside_an_old_list_of_queues_are_fine() -> None:
    given = {**OLD, "redis.ss.queues-config": json.dumps([QUEUE]), "pool-config-file": "p"}

    assert read(given, {"p": "[]"}).pools_json == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--redis-url=redis://u:secret@r"),
        ("process", "--transport=x", "--redis-url=redis://u:secret@r"),
        ("process", "--transport=x", "--redis-url", "redis://u:secret@r"),
        ("process", "--transport=x", "redis://u:secret@r"),
    ],
)
def test_what_a_command_line_has_and_nobody_knows_is_said_without_what_may_be_a_password(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(SystemExit):
        assert cli.run(arguments, {}, Outside(now=lambda: 0.0, rng=Random())) == 2

    said = capsys.readouterr().err
    assert "--redis-url" in said or "***" in said
    assert "secret" not in said


@pytest.mark.parametrize("url", ["prometheus:9090", "http://", "http://[::1", "http://p:99999", "http://u:hidden@p:x"])
def test_a_prometheus_that_can_never_be_asked_stops_the_start(url: str) -> None:
    _, problems = flags_and_problems({"prometheus-url": url}, str)

    (problem,) = [problem for problem in problems if problem.startswith("--prometheus-url: ")]
    assert "hidden" not in problem
