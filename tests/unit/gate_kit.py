"""Requests, gates that say what they are told to, and permits that remember what they were given back with."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TypeVar

from inference_worker.lanes import CLASSIFICATION_LABEL, TIER_LABEL
from inference_worker.ports import Admitted, Asked, Feedback, FeedbackKind, Gate, Permit, Verdict

T = TypeVar("T")


def asked(
    tier: str | None = None,
    classification: str | None = None,
    *,
    deadline: float = 1e9,
    tier_label: str = TIER_LABEL,
    request_id: str = "a",
) -> Asked:
    """A request with these labels."""
    labels = {tier_label: tier, CLASSIFICATION_LABEL: classification}
    return Asked(
        request_id=request_id,
        metadata={},
        labels={name: value for name, value in labels.items() if value is not None},
        deadline=deadline,
    )


def at_once(work: Coroutine[object, None, T]) -> T:
    """What a coroutine returns that never waits; so it cannot be cancelled half-way either."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise AssertionError("it waits")


def admitted(gate: Gate, request: Asked) -> tuple[Permit, ...]:
    """The permits of a request that goes on at once."""
    verdict = at_once(gate.admit(request))
    assert isinstance(verdict, Admitted), verdict
    return verdict.permits


def release(permits: Sequence[Permit], kind: FeedbackKind = "accepted", **seen: object) -> None:
    """Give them back with what was seen."""
    for permit in permits:
        at_once(permit.release(Feedback(kind=kind, **seen)))  # type: ignore[arg-type] # the fields of Feedback


class RecordedPermit:
    """Remembers what it was released with; a release takes a turn of the loop, or as long as told."""

    def __init__(self, name: str, order: list[str], takes_s: float = 0.0) -> None:
        self.name = name
        self.seen: list[Feedback] = []
        self._order = order
        self._takes_s = takes_s

    async def release(self, seen: Feedback) -> None:
        self.seen.append(seen)
        self._order.append(self.name)
        await asyncio.sleep(self._takes_s)


class Told:
    """Says what it is told to, one verdict after the other and then the last one for ever."""

    def __init__(self, *verdicts: Verdict | Exception, budget: float = 1.0, takes_s: float = 0.0) -> None:
        self._verdicts = list(verdicts)
        self._budget = budget
        self._takes_s = takes_s
        self.asks = 0
        self.ran = False

    def budget(self) -> float:
        return self._budget

    async def admit(self, asked: Asked) -> Verdict:
        self.asks += 1
        if self._takes_s:
            await asyncio.sleep(self._takes_s)
        verdict = self._verdicts.pop(0) if len(self._verdicts) > 1 else self._verdicts[0]
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    async def run(self, until: asyncio.Event) -> None:
        await until.wait()
        self.ran = True

    def closes_at(self) -> str:
        return f"at {self._budget:g}"
