"""The transport document of kind `gcp-pubsub`: its keys, their defaults, and what is wrong with them."""

import json
import random

import pytest

from inference_worker import process_pubsub
from inference_worker.config.documents import TransportConfig, read_documents
from inference_worker.errors import ConfigurationError
from inference_worker.process_pubsub import pubsub_names
from inference_worker.process_setup import ProcessSetup, read_setup

TOPIC = {"subscriber_id": "requests", "igw_base_url": "http://g"}


def read(kind: str = "gcp-pubsub", **document: object) -> TransportConfig:
    whole = {"project_id": "p", "result_topic_id": "results", "topics": [TOPIC]} | document
    return read_documents(kind, json.dumps(whole)).transport


def problems(**document: object) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        read(**document)  # type: ignore[arg-type]  # Keys of the document.
    return caught.value.problems


def test_a_topic_is_a_queue_with_the_names_of_the_service() -> None:
    more = {
        "worker_pool_id": "default",
        "inference_objective": "o",
        "request_path_url": "/v1/x",
        "gate_type": "constant",
        "gate_params": {"value": 1},
        "labels": {"tier": "batch"},
        "result_topic_id": "mine",
    }
    transport = read(topics=[TOPIC, TOPIC | more | {"subscriber_id": "other"}])
    first, second = (pubsub_names(transport, queue) for queue in transport.queues)

    assert (transport.batch_size, transport.project) == (10, "p")
    assert first.subscription == "projects/p/subscriptions/requests"
    assert first.result_topic == "projects/p/topics/results"
    assert (second.result_topic, second.path, second.labels) == ("projects/p/topics/mine", "/v1/x", {"tier": "batch"})


def test_a_name_that_is_whole_stays_as_it_is() -> None:
    transport = read(topics=[TOPIC | {"subscriber_id": "projects/other/subscriptions/s"}])

    assert pubsub_names(transport, transport.queues[0]).subscription == "projects/other/subscriptions/s"


def test_the_old_name_stands_for_the_same() -> None:
    assert read("gcp-pubsub-gated").kind == "gcp-pubsub"


def test_what_is_wrong_is_said_where_it_stands() -> None:
    assert problems(project_id="") == ("transport.project_id: is missing; accepted: a text",)
    assert problems(topics=[]) == ("transport.topics: has no queue; accepted: at least one",)
    assert any("transport.topics[0].result_topic_id: is missing" in one for one in problems(result_topic_id=""))
    assert any(one.startswith("transport.batch_size: ") for one in problems(batch_size=0))
    assert any(one.startswith("transport.topics[1].subscriber_id: ") for one in problems(topics=[TOPIC, TOPIC]))
    assert any("transport.topics[0].queue_name" in one for one in problems(topics=[TOPIC | {"queue_name": "a"}]))
    assert any("transport.queues" in one for one in problems(queues=[]))
    unknown = problems(topics=[TOPIC | {"worker_pool_id": "none"}])
    assert any(one.startswith("transport.topics[0].worker_pool_id: ") for one in unknown)


def setup(kind: str) -> ProcessSetup:
    document = {"project_id": "p", "result_topic_id": "results", "topics": [TOPIC]}
    given = {"transport": kind, "transport-config": json.dumps(document)}
    return read_setup(given, {"PUBSUB_EMULATOR_HOST": "h:1"}, dict[str, str]().__getitem__, random.Random(1))


def test_without_its_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pubsub, "_installed", lambda: True)
    assert setup("gcp-pubsub-gated").settings.pubsub.emulator == "h:1"

    monkeypatch.setattr(process_pubsub, "_installed", lambda: False)
    with pytest.raises(ConfigurationError, match=r"pip install 'inference-worker\[pubsub\]'"):
        setup("gcp-pubsub")
