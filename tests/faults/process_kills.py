"""Workers over one transport, killed again and again while requests come; what is looked at when all have ended.

Each worker is a whole `inference-worker process` in a process of its own (`nursery.py`), and dies by SIGKILL at a
moment drawn by chance: at its start, between a claim and its answer, between a result and its acknowledgement. A part
of the requests fails at the model the first time, so that some are tried again. The same goes for `inference-worker
run` (`sidecar_queue.py`).

A worker lives for half a second on average, so now and then a request is with three that die: it is then taken for what
kills them, and dead-lettered. That is one end like any other.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from tests.every_transport import Found, Queues
from tests.faults import model as models
from tests.faults import wire
from tests.faults.model import FakeModel
from tests.faults.nursery import Nursery, nursery
from tests.waiting import NotInTime, eventually

QUEUE: Final = "kills"
WORKERS: Final = 4
SLOTS: Final = 4
LATENCY_S: Final = 0.03
AT_ONCE: Final = 6
CALLS_BETWEEN: Final = 3
"""Of the model, between two kills; a moment drawn by chance comes after them."""

PATIENCE_S: Final = 0.5
"""How long they are waited for: there may be nothing to do."""

MORE: Final = {
    "INFERENCE_MAX_CRASHES": "3",
    "MODEL_BREAKER_FAILURES": "0",
    "CROESUS_HOST": "http://127.0.0.1:1",  # Nobody takes usage events there: all of them can be counted.
}

STEP_S: Final = 120.0
"""How long the kills between two submissions take, at most."""

ToldOf = Callable[[int, int], None]
"""Of kills and of ends so far."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What was found when nothing waited any more, and nobody was there."""

    submitted: frozenset[str]
    found: Found
    repeats: bool
    """Whether what was said once may be said again."""
    kills: int
    fell: int = 0
    """Workers that were dead before anybody killed them."""
    failed_once: int
    """Requests that failed at the model."""
    calls: int
    """Of the model."""
    seconds: float

    @property
    def completed(self) -> frozenset[str]:
        """Those with a result that is an answer."""
        ends = self.found.results.items()
        return frozenset(name for name, said in ends if json.loads(said[0]).get("status_code") == 200)

    @property
    def failed(self) -> frozenset[str]:
        """Those with another one."""
        return frozenset(self.found.results.keys() - self.completed)

    @property
    def said_again(self) -> int:
        """How many results are there more than once."""
        return sum(len(said) > 1 for said in self.found.results.values())

    def breaches(self) -> list[str]:
        """What must not be, one line each."""
        return [
            *self._of_results(),
            *self._of_dead_letters(),
            *self._of_bills(),
            *self._of_what_is_left(),
            *([f"{self.fell} workers ended by themselves"] if self.fell else []),
        ]

    def _of_results(self) -> list[str]:
        results = self.found.results
        return [
            *(f"{name} has no result" for name in sorted(self.submitted - results.keys())),
            *(f"{name} was never submitted" for name in sorted(results.keys() - self.submitted)),
            *(f"{name} has {len(set(said))} different results" for name, said in results.items() if len(set(said)) > 1),
            *(
                f"{name} has {len(said)} results"
                for name, said in results.items()
                if len(said) > 1 and not self.repeats
            ),
        ]

    def _of_dead_letters(self) -> list[str]:
        dead = self.found.dead
        return [
            *(f"{name} has failed, and is no dead letter" for name in sorted(self.failed - dead.keys())),
            *(f"{name} is a dead letter, and has not failed" for name in sorted(dead.keys() - self.failed)),
            *(f"{name} is {n} dead letters" for name, n in dead.items() if n > 1 and not self.repeats),
        ]

    def _of_bills(self) -> list[str]:
        ids = Counter(event_id for event_id, _ in self.found.billed)
        requests = Counter(request_id for _, request_id in self.found.billed)
        return [
            *(f"event {name} is there {n} times" for name, n in ids.items() if n > 1),
            *(f"{name} is billed {n} times" for name, n in requests.items() if n > 1),
            *(f"{name} was completed, and is not billed" for name in sorted(self.completed - requests.keys())),
            *(f"{name} is billed, and was not completed" for name in sorted(requests.keys() - self.completed)),
        ]

    def _of_what_is_left(self) -> list[str]:
        return [f"{n} left in {where}" for where, n in self.found.left.items() if n]


class FailingOnce:
    """A model that fails some requests the first time."""

    def __init__(self, share: float, rng: random.Random, calls: int) -> None:
        """`calls`: among so many. The last ones do not fail, or a short run would mostly wait for them."""
        self.failed: set[bytes] = set()
        self._share = share
        self._rng = rng
        self._calls = calls

    def __call__(self, request: wire.Request) -> wire.Behaviour | None:
        self._calls -= 1
        if self._calls < 0 or request.body in self.failed or self._rng.random() >= self._share:
            return None
        self.failed.add(request.body)
        return wire.error(503)


async def run(
    queues: Queues,
    *,
    kills: int,
    requests: int,
    lives_s: float = 0.5,
    failing: float = 0.2,
    told: ToldOf = lambda _, __: None,
    within: float = 120.0,
) -> Ended:
    """Submit, kill, wait for the end, look.

    `lives_s`: how long a worker lives on average. `failing`: which part of the first half fails once. `within`: how
    long after the last kill all must have ended; what has not is a breach.
    """
    rng, began = random.Random(7), time.monotonic()
    async with FakeModel(default=models.ok(takes_s=LATENCY_S)) as model:
        model.decide = failures = FailingOnce(failing, rng, requests // 2)
        asked = queues.told(model.url, quick=True, concurrency=str(SLOTS))
        async with nursery(replace(asked, environ={**asked.environ, **MORE})) as workers:
            ids = [f"r{number}" for number in range(requests)]
            async with asyncio.TaskGroup() as group:
                group.create_task(_submit(queues, ids, workers, kills))
                group.create_task(_kill(workers, queues, model, kills, lives_s, rng, told))
            last = time.monotonic()
            with suppress(NotInTime):
                await eventually(
                    lambda: _over(queues, kills, requests, told), within=within, every=0.2, what="the end of all"
                )
            # What the dead had in hand may have its end already; it comes again, and somebody has to acknowledge it.
            lease_s = queues.lease_again_s if failures.failed else queues.lease_s
            await asyncio.sleep(max(lease_s - (time.monotonic() - last), min(lease_s, 1.0)))
            killed = workers.killed
            for left in tuple(workers.alive):
                await workers.kill(left)
        return Ended(
            submitted=frozenset(ids),
            found=await queues.found(),
            repeats=queues.repeats,
            kills=killed,
            fell=len(workers.fell),
            failed_once=len(failures.failed),
            calls=len(model.requests),
            seconds=time.monotonic() - began,
        )


async def _submit(queues: Queues, ids: list[str], workers: Nursery, kills: int) -> None:
    """Some at a time, as fast as workers are killed, so that the last ones have something to do as well."""
    for start in range(0, len(ids), AT_ONCE):

        def due(so_many: float = kills * start / len(ids)) -> bool:
            return workers.killed + len(workers.fell) >= so_many

        await eventually(due, within=STEP_S, every=0.01, what="more kills")
        await queues.put(QUEUE, ids[start : start + AT_ONCE])


async def _kill(
    workers: Nursery,
    queues: Queues,
    model: FakeModel,
    kills: int,
    lives_s: float,
    rng: random.Random,
    told: ToldOf,
) -> None:
    """By chance, and amid work: without calls between two kills, all would die at their start on a slow machine."""
    for _ in range(WORKERS):
        await workers.beget()
    for kill in range(kills):
        enough = len(model.requests) + CALLS_BETWEEN

        def at_work(enough: float = enough) -> bool:
            return len(model.requests) >= enough

        with suppress(NotInTime):
            await eventually(at_work, within=PATIENCE_S, every=0.005, what="work between kills")
        await asyncio.sleep(rng.expovariate(WORKERS / lives_s))
        await workers.kill(rng.choice(workers.alive))
        await workers.beget()
        if kill % 10 == 0:
            told(kill, await queues.ended())


async def _over(queues: Queues, kills: int, requests: int, told: ToldOf) -> bool:
    ended = await queues.ended()
    told(kills, ended)
    return ended >= requests and not await queues.waiting()
