"""Which request is next where a pool has fewer workers than work: strict lanes, and lanes of which none starves."""

import json
from itertools import pairwise
from typing import Final

from inference_worker.lanes import LANES
from tests.faults.model import FakeModel, ok
from tests.process_rig import Document, Processing, processing, queue
from tests.waiting import eventually

RUNNING_S: Final = 0.2
ONE_WORKER: Final = [{"id": "default", "workers": 1}]
STRICT: Final[Document] = {"type": "tier-priority"}


def lane(name: str, model: FakeModel) -> Document:
    """A queue named after the lane that all of its requests are of."""
    classification, tier = name.split("-")
    return queue(name, model.url, labels={"classification": classification, "tier": tier})


async def submitted(running: Processing, into: str, *ids: str) -> None:
    """Requests whose prompts are their ids, so that the model knows them."""
    for one in ids:
        await running.submit(one, queue=into, payload={"model": "tiny", "prompt": one})


def begun(model: FakeModel) -> list[str]:
    """Ids in the order in which the model began."""
    return [json.loads(request.body)["prompt"] for request in model.requests]


async def one_more(model: FakeModel) -> int:
    """Wait until the model begins another one; how many it has begun."""
    before = len(model.requests)
    await eventually(lambda: len(model.requests) > before, within=5, what="the next request")
    return len(model.requests)


async def test_an_interactive_request_waits_for_the_running_one_and_no_other(redis_url: str, model: FakeModel) -> None:
    model.default = ok(takes_s=RUNNING_S)
    queues = [lane("overflow-batch", model), lane("overflow-interactive", model)]
    async with processing(redis_url, queues=queues, pools=ONE_WORKER, merge=STRICT) as running:
        await submitted(running, "overflow-batch", *(f"batch-{n}" for n in range(40)))
        for number in range(6):
            # One has just begun: so the next turn is a whole request away.
            at = await one_more(model)
            await submitted(running, "overflow-interactive", f"interactive-{number}")
            await one_more(model)

            assert begun(model)[at - 1].startswith("batch")
            assert begun(model)[at] == f"interactive-{number}"


async def test_all_reserved_are_among_the_first_seven_over_a_backlog_case_245(redis_url: str, model: FakeModel) -> None:
    model.default = ok(takes_s=0.05)
    queues = [lane("overflow-batch", model), lane("reserved-batch", model)]
    async with processing(redis_url, queues=queues, pools=ONE_WORKER, merge=STRICT) as running:
        await submitted(running, "overflow-batch", *(f"overflow-{n}" for n in range(20)))
        await submitted(running, "reserved-batch", *(f"reserved-{n}" for n in range(5)))

        results = [str(one["id"]) for one in await running.results(25)]

        assert sum(one.startswith("reserved") for one in results[:7]) == 5
        assert results[-1].startswith("overflow")
        assert len(set(results)) == 25


async def test_no_lane_starves_under_a_flood_of_the_first_one(redis_url: str, model: FakeModel) -> None:
    """Between two turns of a lane that has work there are at most `patience + 5` others."""
    model.default = ok(takes_s=0.002)
    patience, each = 8, 5
    merge: Document = {"type": "tier-aging", "parameters": {"patience": patience}}
    first, *others = LANES
    queues = [lane(name, model) for name in LANES]
    async with processing(redis_url, queues=queues, pools=ONE_WORKER, merge=merge) as running:

        async def flooded() -> bool:
            missing = 100 - await running.redis.zcard(first)
            await submitted(running, first, *(f"{first}/{len(model.requests)}-{n}" for n in range(missing)))
            return sum(not one.startswith(first) for one in begun(model)) == each * len(others)

        await flooded()
        for name in others:
            await submitted(running, name, *(f"{name}/{n}" for n in range(each)))
        await eventually(flooded, within=10, what="the turns of the lower lanes")
        order = [one.split("/")[0] for one in begun(model)]

    for name in others:
        turns = [at for at, one in enumerate(order) if one == name]
        assert max(later - earlier - 1 for earlier, later in pairwise(turns)) <= patience + 5, name
    assert order.count(first) >= each * (patience - len(others))  # It has what their patience leaves.
