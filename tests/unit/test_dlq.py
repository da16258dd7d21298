"""Dead letters: which are meant, what is known of them, and that no step of a replay loses one."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from pamqp.commands import Basic

from inference_worker.dlq import Dead, Filter, Replay, Walk, describe, renewed, walk
from inference_worker.dlq import _body as body_of
from inference_worker.errors import StoreUnavailable
from inference_worker.messages import LONGEST_TIMEOUT_S, KnownReply
from inference_worker.results.redis import ReplayRefused
from inference_worker.rmq_dead_letters import Letter, NotPutBack
from inference_worker.stream_dead_letters import Seen

QUEUE = "infer_req.d"
NOW = 1_000_000.0


class Killed(BaseException):
    """The process ends here."""


@dataclass
class System:
    """Queue, dead letters and results in memory; a kill falls before or after the step of that number."""

    dead: list[Letter] = field(default_factory=list)
    queue: list[dict[str, Any]] = field(default_factory=list)
    results: dict[str, KnownReply] = field(default_factory=dict)
    notes: dict[str, bytes] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    queues: set[str] = field(default_factory=lambda: {QUEUE})
    kill_at: int | None = None
    after: bool = False
    silent: bool = False
    steps: int = 0
    looks: int = 0
    ready: int = 0
    at_once: bool = False

    def begin(self) -> "System":
        """A session with the dead letters as they are now."""
        self.looks, self.ready = 0, len(self.dead)
        return self

    def _step(self, do: Callable[[], None]) -> None:
        killed, self.steps = self.steps == self.kill_at, self.steps + 1
        if killed and not self.after:
            raise Killed
        do()
        if killed:
            raise Killed

    async def next(self) -> Letter | None:
        self.looks += 1
        return self.dead[self.looks - 1] if self.looks <= len(self.dead) else None

    async def has_queue(self, name: str) -> bool:
        return name in self.queues

    async def put_back(self, letter: Letter, body: bytes, queue: str) -> None:
        self._step(lambda: self.queue.append(json.loads(body)))

    async def take_away(self, letter: Letter) -> None:
        def remove() -> None:
            self.dead = [one for one in self.dead if one.tag != letter.tag]
            self.looks -= 1

        self._step(remove)

    async def known(self, request_id: str) -> KnownReply | None:
        if self.silent:
            raise StoreUnavailable("Redis is away")
        return self.results.get(request_id)

    async def dead_note(self, request_id: str) -> bytes | None:
        return self.notes.get(request_id)

    async def make_room(self, request_id: str, deadline: float) -> ReplayRefused | None:
        known = self.results.get(request_id)
        if known is not None and known.status == "completed":
            return "completed"
        if request_id in self.running:
            return "running"

        def forget() -> None:
            self.results.pop(request_id, None)

        self._step(forget)
        return None

    def run_all(self) -> None:
        """A worker answers all that is queued; the first terminal result stands."""
        for request in self.queue:
            self.results.setdefault(request["request_id"], KnownReply(status="completed", status_code=200))
        self.queue.clear()


def letter(
    request_id: str = "r",
    *,
    tag: int = 1,
    queue: str | None = QUEUE,
    headers: dict[str, Any] | None = None,
    **changes: object,
) -> Letter:
    body = {"request_id": request_id, "received_at": 1.0, "timeout_s": 60, "payload": {"a": 1}} | changes
    deaths = [{"queue": queue, "reason": "rejected", "time": datetime.fromtimestamp(NOW - 100, UTC), "count": 1}]
    return Letter(
        tag=tag,
        body=json.dumps(body).encode(),
        properties=Basic.Properties(headers=({"x-death": deaths} if queue else {}) | (headers or {})),
    )


def failed(code: str = "retries_exhausted") -> KnownReply:
    return KnownReply(status="failed", status_code=500, attempt=1, error_code=code)


def meant(**changes: Any) -> Filter:
    return Filter(**({"queue": QUEUE} | changes))


async def walked(system: System, which: Filter, limit: int | None = None) -> tuple[Walk, list[Dead]]:
    found: list[Dead] = []

    async def note(dead: Dead, _: Letter) -> None:
        found.append(dead)

    seen = await walk(system.begin(), system, which, note, now=lambda: NOW, stop=asyncio.Event(), limit=limit)
    return seen, found


async def replay(system: System, which: Filter | None = None, *, dry_run: bool = False) -> dict[str, int]:
    run = Replay(letters=system, store=system, now=lambda: NOW, stop=asyncio.Event(), rate=0, dry_run=dry_run)

    async def one(dead: Dead, held: Letter) -> None:
        await run(dead, held)

    await walk(system.begin(), system, which or meant(), one, now=lambda: NOW, stop=run.stop, limit=None)
    return {str(word): count for word, count in run.outcomes.items()}


async def test_a_letter_is_described_by_its_headers_the_worker_s_note_and_its_result() -> None:
    note = {"reason": "retries_exhausted", "detail": "reset", "attempts": 3, "status_code": 500, "dead_at": 5.0}
    system = System(notes={"r": json.dumps(note).encode()}, results={"r": failed()})
    held = letter(tenant="acme")

    dead = await describe(held, body_of(held.body), system)

    assert (dead.reason, dead.detail, dead.attempts, dead.status_code) == ("retries_exhausted", "reset", 3, 500)
    assert (dead.died_at, dead.result, dead.tenant, dead.queue) == (NOW - 100, "failed", "acme", QUEUE)


async def test_without_a_note_and_without_redis_the_letter_speaks_for_itself() -> None:
    held = letter(headers={"x-retry-count": 2})

    dead = await describe(held, body_of(held.body), System(silent=True))

    assert (dead.reason, dead.attempts, dead.result) == ("rejected", 3, None)
    assert dead.store_silent == "Redis is away"


async def test_a_letter_that_the_worker_published_itself_says_so_in_its_own_headers() -> None:
    headers = {"x-dead-reason": "poison", "x-dead-attempts": 4, "x-dead-status": 500, "x-dead-queue": QUEUE}
    held = letter(queue=None, headers=headers)

    dead = await describe(held, body_of(held.body), System())

    assert (dead.reason, dead.attempts, dead.status_code, dead.queue) == ("poison", 4, 500, QUEUE)


@pytest.mark.parametrize(
    ("which", "found"),
    [
        pytest.param(meant(), ["a", "b"], id="ours alone, unless more is asked for"),
        pytest.param(meant(queue=None), ["a", "b", "c", "d"], id="all deployments that share the queue"),
        pytest.param(meant(tenant="acme"), ["b"], id="a tenant's"),
        pytest.param(meant(ids=frozenset({"a"})), ["a"], id="by id"),
        pytest.param(meant(reason="poison"), ["b"], id="a reason's"),
        pytest.param(meant(older_than_s=200), ["b"], id="older ones"),
        pytest.param(meant(newer_than_s=200), ["a"], id="newer ones"),
        pytest.param(meant(completed=True), ["a"], id="those that are answered by now"),
    ],
)
async def test_the_filters_choose(which: Filter, found: list[str]) -> None:
    old = [{"queue": QUEUE, "reason": "rejected", "time": datetime.fromtimestamp(NOW - 999, UTC)}]
    system = System(
        dead=[
            letter("a", tag=1),
            letter("b", tag=2, tenant="acme", headers={"x-death": old}),
            letter("c", tag=3, queue="infer_req.other"),
            letter("d", tag=4, queue=None),
        ],
        results={"a": KnownReply(status="completed", status_code=200), "b": failed("poison")},
    )

    _, dead = await walked(system, which)

    assert [one.request_id for one in dead] == found


async def test_a_delayed_retry_that_died_on_its_way_back_is_ours() -> None:
    deaths = [{"queue": QUEUE, "reason": "maxlen"}, {"queue": f"{QUEUE}.delay.100", "reason": "expired"}]
    system = System(dead=[letter(headers={"x-death": deaths})])

    seen, _ = await walked(system, meant())

    assert seen.matched == 1


async def test_a_limit_ends_the_walk_and_is_told() -> None:
    seen, dead = await walked(System(dead=[letter(str(n), tag=n) for n in range(5)]), meant(), limit=2)

    assert (len(dead), seen.more) == (2, True)


async def test_a_replay_is_a_new_submission() -> None:
    system = System(dead=[letter()], results={"r": failed()})

    assert await replay(system) == {"replayed": 1}

    assert (system.dead, system.results) == ([], {})
    assert system.queue == [{"request_id": "r", "received_at": NOW, "timeout_s": 60, "payload": {"a": 1}}]


@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
@pytest.mark.parametrize(
    "step", [0, 1, 2], ids=["the result is removed", "the copy is confirmed", "the letter is acked"]
)
async def test_a_replay_that_is_killed_at_any_step_loses_nothing_and_can_be_repeated(step: int, after: bool) -> None:
    system = System(dead=[letter()], results={"r": failed()}, kill_at=step, after=after)

    with pytest.raises(Killed):
        await replay(system)

    assert system.dead or system.queue, "the request is nowhere"
    system.kill_at = None
    await replay(system)
    system.run_all()
    assert system.results["r"].status == "completed"
    await replay(system)
    assert system.queue == [], "a request with a completed result was replayed"


async def test_a_completed_request_is_not_replayed() -> None:
    system = System(dead=[letter()], results={"r": KnownReply(status="completed", status_code=200)})

    assert await replay(system) == {"completed": 1}

    assert (len(system.dead), system.queue) == (1, [])


async def test_a_request_that_completes_while_it_is_looked_at_is_not_replayed() -> None:
    """The script refuses, whatever was seen before."""
    system = System(dead=[letter()], results={"r": failed()})
    seen_as_failed = system.results["r"]
    run = Replay(letters=system, store=system, now=lambda: NOW, stop=asyncio.Event(), rate=0)
    held = letter()
    dead = await describe(held, body_of(held.body), system)
    assert dead.result == seen_as_failed.status
    system.results["r"] = KnownReply(status="completed", status_code=200)

    word, _ = await run(dead, held)

    assert (word, system.queue) == ("completed", [])


async def test_a_running_request_is_not_replayed() -> None:
    system = System(dead=[letter()], running={"r"})

    assert await replay(system) == {"running": 1}


async def test_two_letters_of_one_request_make_one_copy() -> None:
    system = System(dead=[letter(tag=1), letter(tag=2)])

    assert await replay(system) == {"replayed": 1, "again": 1}

    assert (len(system.queue), [one.tag for one in system.dead]) == (1, [2])


async def test_a_letter_that_cannot_become_a_request_is_left_where_it_is() -> None:
    unreadable = Letter(tag=1, body=b"{", properties=letter().properties)
    system = System(dead=[unreadable])

    assert await replay(system) == {"unreadable": 1}

    assert len(system.dead) == 1


async def test_nothing_is_removed_where_there_is_no_queue_to_put_a_copy_into() -> None:
    system = System(dead=[letter()], results={"r": failed()}, queues=set())

    assert await replay(system) == {"no queue": 1}

    assert system.results == {"r": failed()}


async def test_a_dry_run_changes_nothing() -> None:
    system = System(dead=[letter(tag=1), letter(tag=2)], results={"r": failed()})

    assert await replay(system, dry_run=True) == {"would replay": 1, "again": 1}

    assert (len(system.dead), system.queue, system.results) == (2, [], {"r": failed()})


async def test_a_copy_that_is_not_confirmed_leaves_the_letter() -> None:
    class Refusing(System):
        async def put_back(self, letter: Letter, body: bytes, queue: str) -> None:
            raise NotPutBack("no confirm")

    system = Refusing(dead=[letter()])

    assert await replay(system) == {"not put back": 1}

    assert len(system.dead) == 1


async def test_a_replay_keeps_to_its_rate() -> None:
    system = System(dead=[letter(str(n), tag=n) for n in range(1, 6)])
    run = Replay(letters=system, store=system, now=lambda: NOW, stop=asyncio.Event(), rate=2)

    async def one(dead: Dead, held: Letter) -> None:
        await run(dead, held)

    begun = asyncio.get_running_loop().time()
    await walk(system.begin(), system, meant(), one, now=lambda: NOW, stop=run.stop, limit=None)

    assert asyncio.get_running_loop().time() - begun == pytest.approx(2.5)


def test_only_the_time_of_a_renewed_body_changes() -> None:
    body = b'{"request_id": "r", "received_at": 1, "payload": {"a":  1.50}}'

    assert renewed(body, 7.5) == b'{"request_id":"r","received_at":7.5,"payload":{"a":  1.50}}'
    assert renewed(b"[]", 7.5) is None


@pytest.mark.parametrize(
    ("said", "lasts_s"),
    [("5", 5.0), ("null", 0.0), ('"5"', 0.0), ("-5", 0.0), ("{}", 0.0), ("1" * 400, LONGEST_TIMEOUT_S)],
)
def test_a_time_that_is_none_is_no_reason_not_to_look_at_a_letter(said: str, lasts_s: float) -> None:
    seen = msgspec.json.decode(f'{{"request_id": "r", "timeout_s": {said}}}', type=Seen)

    assert seen.lasts_s == lasts_s
