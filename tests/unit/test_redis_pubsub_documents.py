"""The transport document of kind `redis-pubsub`: its keys, their defaults, and that it is deprecated."""

import json

import pytest

from inference_worker.config.documents import ProcessDocuments, read_documents
from inference_worker.config.doubts import doubts
from inference_worker.errors import ConfigurationError

QUEUE = {"queue_name": "requests", "igw_base_url": "http://g"}


def read(**document: object) -> ProcessDocuments:
    return read_documents("redis-pubsub", json.dumps({"url": "redis://r", "queues": [QUEUE]} | document))


def test_defaults_are_those_of_the_peer() -> None:
    transport = read().transport

    assert (transport.retry_queue_name, transport.result_queue_name) == ("retry-sortedset", "result-queue")


def test_its_keys_are_taken_and_others_are_not() -> None:
    transport = read(retry_queue_name="a", result_queue_name="b", enable_tracing=True).transport

    assert (transport.retry_queue_name, transport.result_queue_name) == ("a", "b")
    with pytest.raises(ConfigurationError, match="claim_lease_ttl_seconds: is not a parameter"):
        read(claim_lease_ttl_seconds=1)
    with pytest.raises(ConfigurationError, match=r"transport\.url: is missing; accepted: a redis:// URL"):
        read(url="")


def test_it_is_said_to_be_deprecated() -> None:
    (said,) = [doubt for doubt in doubts(read(), most_files=100_000) if doubt.what == "transport"]

    assert "redis-pubsub is deprecated" in said.detail
    assert "redis-sortedset" in said.mend
