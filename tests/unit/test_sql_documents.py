"""The transport document of kind `sql`: its keys, their defaults, and what is wrong with them."""

import json
import random

import pytest

from inference_worker.config.documents import TransportConfig, read_documents
from inference_worker.errors import ConfigurationError
from inference_worker.process_setup import read_setup

URL = "postgresql://user:secret@db:5432/work"
QUEUE = {"queue_name": "a", "igw_base_url": "http://g"}


def read(**document: object) -> TransportConfig:
    return read_documents("sql", json.dumps({"queues": [QUEUE]} | document)).transport


def problems(**document: object) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        read(**document)
    return caught.value.problems


def test_defaults_are_those_of_the_peer_case_158() -> None:
    transport = read(url=URL)

    assert (transport.kind, transport.result_queue_name) == ("sql", "result-sql")
    assert (transport.poll_interval_s, transport.claim_lease_s, transport.max_connections) == (1.0, 30.0, 10)


def test_the_keys_there_are_are_taken_case_158() -> None:
    transport = read(
        url=URL,
        result_queue_name="r",
        poll_interval_ms=250,
        batch_size=5,
        result_batch_size=8,
        lease_ttl_seconds=12,
        handoff_timeout_seconds=60,
        cancel_check_batch_size=1,
        cancel_check_linger_ms=1,
        max_connections=3,
        enable_tracing=True,
    )

    assert (transport.result_queue_name, transport.poll_interval_s) == ("r", 0.25)
    assert (transport.claim_lease_s, transport.max_connections) == (12.0, 3)


def test_zero_stands_for_the_default() -> None:
    zero = read(url=URL, lease_ttl_seconds=0, poll_interval_ms=0, max_connections=0)

    assert (zero.claim_lease_s, zero.poll_interval_s, zero.max_connections) == (30.0, 1.0, 10)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql"])
def test_an_address_is_a_url_of_postgres_case_125(scheme: str) -> None:
    transport = read(url=f"{scheme}://user:secret@db/work?sslmode=verify-full")

    assert transport.url is not None
    assert transport.url.now() == f"{scheme}://user:secret@db/work?sslmode=verify-full"
    assert "secret" not in repr(transport.url)
    assert "user" not in repr(transport.url)


@pytest.mark.parametrize(
    "url", ["sqlite:///x", "file:x", "mysql://u:secret@h/d", "redis://h", "h:5432", "postgresql://"]
)
def test_another_address_is_an_error_that_does_not_show_it_case_125(url: str) -> None:
    (said,) = problems(url=url)

    assert said.startswith("transport.url: ")
    assert "secret" not in said


@pytest.mark.parametrize(
    ("document", "where"),
    [
        pytest.param({}, "transport.url: is missing", id="no address"),
        pytest.param({"url": URL, "queues": []}, "transport.queues: has no queue", id="no queue"),
        pytest.param({"url": URL, "queues": [{"queue_name": "a"}]}, "igw_base_url: is missing", id="no base URL"),
        pytest.param({"url": URL, "queues": [QUEUE, QUEUE]}, "transport.queues[1].", id="a queue twice"),
        pytest.param({"url": URL, "claim_lease_ttl_seconds": 1}, "claim_lease_ttl_seconds", id="a key of sorted sets"),
        *(
            pytest.param({"url": URL, name: -1}, f"transport.{name}: is -1", id=name)
            for name in (
                *("poll_interval_ms", "batch_size", "result_batch_size", "lease_ttl_seconds", "max_connections"),
                *("handoff_timeout_seconds", "cancel_check_batch_size", "cancel_check_linger_ms"),
            )
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place_case_158(document: dict[str, object], where: str) -> None:
    assert any(where in said for said in problems(**document))


def test_what_is_no_json_is_an_error_case_158() -> None:
    with pytest.raises(ConfigurationError, match="is no JSON"):
        read_documents("sql", "{", url=URL)


def test_the_environments_address_wins_case_158() -> None:
    """Over that of the document; it may be a file that is read again."""
    flags = {
        "transport": "sql",
        "transport-config": json.dumps({"url": "postgresql://document/d", "queues": [QUEUE]}),
    }

    def url_with(environ: dict[str, str]) -> str:
        return read_setup(flags, environ, {}.__getitem__, random.Random(1)).settings.sql.url_now()  # type: ignore[arg-type]  # There are no files.

    assert url_with({"SQL_URL": URL}) == URL
    assert url_with({}) == "postgresql://document/d"


def test_a_quota_in_postgres_needs_queues_there() -> None:
    gate = {
        "gate_type": "wait-on-refuse",
        "gate_params": {"gate": {"gate_type": "sql-quota", "gate_params": {"limit": 1}}},
    }
    queues = [QUEUE | gate]

    assert read(url=URL, queues=queues).queues[0].gate is not None
    with pytest.raises(ConfigurationError, match=r"queues\[0\]: has a gate sql-quota; accepted: with --transport sql"):
        read_documents("redis-sortedset", json.dumps({"url": "redis://h", "queues": queues}))


def test_names_that_no_table_takes_are_an_error() -> None:
    queues = [QUEUE | {"queue_name": "x" * 600, "result_queue_name": "a\0b"}]

    said = problems(url=URL, result_queue_name="c\nd", queues=queues)

    assert [one.partition(":")[0] for one in said] == [
        "transport.result_queue_name",
        "transport.queues[0].queue_name",
        "transport.queues[0].result_queue_name",
    ]
    assert all("up to 512 bytes of UTF-8 without control characters" in one for one in said)
