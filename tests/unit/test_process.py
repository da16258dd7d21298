"""What the command `process` keeps beside its pools: connections that gates ask over, and what it has doubts about."""

import json
import random

import pytest
import structlog.testing

from inference_worker.config.documents import ProcessDocuments, read_documents
from inference_worker.errors import StoreUnavailable
from inference_worker.process import Doubts, Links
from inference_worker.process_setup import read_setup

QUEUE = {"queue_name": "a", "igw_base_url": "http://g", "result_ttl_seconds": 60}
TRANSPORT = json.dumps({"url": "redis://r", "queues": [QUEUE]})


def documents(*pools: str) -> ProcessDocuments:
    return read_documents(
        "redis-sortedset", TRANSPORT, json.dumps([{"id": name, "workers": 1} for name in ("default", *pools)])
    )


async def test_connections_that_are_asked_for_while_it_runs_are_closed_at_the_end_with_the_others() -> None:
    links = Links(
        read_setup({"transport": "redis-sortedset", "transport-config": TRANSPORT}, {}, str, random.Random(1))
    )
    first = links.to("redis://one")
    async with links.open():
        await links.open_new()
        second = links.to("redis://two")
        await links.open_new()
        await links.open_new()
        assert links.to("redis://two") is second

    for link in (first, second):
        with pytest.raises(StoreUnavailable, match="closed"):
            await link.do("PING")


async def test_each_doubt_is_said_once_until_it_is_gone() -> None:
    doubting = Doubts()
    with structlog.testing.capture_logs() as logs:
        for now in (documents("x"), documents("x"), documents("x", "y"), documents("y"), documents("x", "y")):
            doubting.look(now)

    assert [log["what"] for log in logs] == ["pool x", "pool y", "pool x"]
