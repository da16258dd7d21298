"""Looks at a queue and its workers every few seconds, and knows how many replicas are wanted: the scale signal.

What it saw is kept for who asks (`look`), so that an answer never waits for a broker; what it wants is written where
workers read it, if that is its business. It starts and stops no container, and it decides nothing on what it could not
see: then it says so. The arithmetic is in `scaling`, HTTP in `gateway/scale`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import structlog

from inference_worker.config.settings import Settings
from inference_worker.errors import StoreUnavailable, TransportLost
from inference_worker.ports import Backlog, Beat, Fleet
from inference_worker.scaling import Capacity, Held, Load, Policy, Recommendation, recommend
from inference_worker.timing import stopped_within

log = structlog.get_logger(__name__)

LOOK_S: Final = 8.0
"""How long one look may take, connecting included."""

SHORTEST_WISH_S: Final = 30.0
SHORTEST_LIFE_S: Final = 10.0
MOST_DEADLINES: Final = 5000
SOON_S: Final = 60.0


class NotSeen(Exception):
    """Nothing can be said of the queue now; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one look has seen, and what was made of it."""

    at: float
    """Unix seconds."""
    backlog: Backlog
    load: Load
    capacity: Capacity
    due_soon: int | None
    """Requests whose deadline is within a minute; None where no deadlines are known."""
    how: str
    recommendation: Recommendation


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a look gets its numbers from."""

    backlog: Callable[[], Awaitable[Backlog]]
    """Raises TransportLost or StoreUnavailable."""
    fleet: Fleet
    deadlines: Callable[[int], Awaitable[Sequence[float]]] | None = None
    """The soonest ones, at most so many; None where nobody keeps them. Raises StoreUnavailable."""


@dataclass(slots=True)
class _Known:
    """What earlier looks have told, for when there is no worker to ask."""

    slots: int
    service_s: float | None = None


class ScaleView:
    """The scale signal of one queue. `run` looks, `look` tells."""

    def __init__(
        self,
        queue: str,
        sources: Sources,
        policy: Policy,
        *,
        now: Callable[[], float],
        interval_s: float,
        slots: int,
        writes: bool,
    ) -> None:
        """`slots` of a replica are assumed until one was heard of. Who does not write shows the wish of who does."""
        self.queue = queue
        self.policy = policy
        self._sources = sources
        self._now = now
        self._interval_s = interval_s
        self._writes = writes
        self._wish_s = max(SHORTEST_WISH_S, 5 * interval_s)
        self._life_s = max(SHORTEST_LIFE_S, 3 * interval_s)
        self._known = _Known(slots)
        self._held: Held | None = None
        self._sample: Sample | None = None
        self._sampled_at = 0.0
        self._why = "the queue has not been looked at yet"
        self._said = ""
        self._mute = False
        self.looked = asyncio.Event()
        """Set after the first look, whatever came of it."""

    async def run(self, until: asyncio.Event) -> None:
        """Look again and again, until told to stop."""
        while not until.is_set():
            await self.refresh()
            await stopped_within(until, self._interval_s)

    async def refresh(self) -> None:
        """Look once. Never fails: what cannot be seen is told by `look`."""
        try:
            async with asyncio.timeout(LOOK_S):
                sample = await self._see()
                await self._write(sample.recommendation.stabilised)
        except (TransportLost, StoreUnavailable, NotSeen) as exc:
            self._lost(str(exc))
        except TimeoutError:
            self._lost(f"no answer within {LOOK_S:g} s")
        except Exception as exc:
            # A fault of ours blinds us, and must not end the intake or the scaler that we are part of.
            if self._why != (why := f"the look failed: {type(exc).__name__}"):
                log.exception("the look at the queue failed", queue=self.queue)
            self._lost(why)
        else:
            self._seen(sample)
        self.looked.set()

    def look(self) -> Sample:
        """What was seen last, while it can be relied on.

        Raises:
            NotSeen: the last look failed, or is too long ago.
        """
        if self._sample is None:
            raise NotSeen(self._why)
        if (age_s := self.age_s) > self._life_s:
            raise NotSeen(f"the last look was {age_s:.0f} s ago")
        return self._sample

    @property
    def age_s(self) -> float:
        """How long ago the last good look was, by a clock that nobody sets."""
        return asyncio.get_running_loop().time() - self._sampled_at

    # ------------------------------------------------------------ one look

    async def _see(self) -> Sample:
        asked_at = self._now()
        backlog, beats, deadlines = await _all(
            self._sources.backlog(), self._sources.fleet.members(), self._deadlines()
        )
        wish = await self._sources.fleet.desired() if self._held is None or not self._writes else None
        load = _load(backlog, beats, deadlines or ())
        capacity = self._capacity(beats)
        answer = recommend(load, capacity, self.policy, self._before(wish), asked_at)
        if answer is None:
            raise NotSeen("what was counted cannot be: it is nothing to decide by")
        self._held = answer.held
        return Sample(
            at=asked_at,
            backlog=backlog,
            load=load,
            capacity=capacity,
            due_soon=None if deadlines is None else sum(at - asked_at <= SOON_S for at in deadlines),
            how=(backlog.how or "queue") + ("+workers" if backlog.in_flight is None else ""),
            recommendation=answer,
        )

    async def _deadlines(self) -> Sequence[float] | None:
        return None if self._sources.deadlines is None else await self._sources.deadlines(MOST_DEADLINES)

    def _before(self, wish: int | None) -> Held | None:
        """What was wanted before: by this process, else by the one before it, or by the one that writes."""
        return self._held if wish is None else Held(replicas=wish)

    async def _write(self, replicas: int) -> None:
        """Tell the workers. Where that fails, what was seen is as true as before: who asks gets it."""
        if not self._writes:
            return
        try:
            await self._sources.fleet.want(replicas, self._wish_s)
        except StoreUnavailable as exc:
            if not self._mute:
                log.warning("the wish cannot be written; workers go by the last one", reason=str(exc))
            self._mute = True
        else:
            self._mute = False

    def _capacity(self, beats: Sequence[Beat]) -> Capacity:
        fit = [beat for beat in beats if beat.fit]
        if slots := [beat.slots for beat in fit or beats if beat.slots > 0]:
            self._known.slots = max(round(sum(slots) / len(slots)), 1)
        if times_s := [beat.service_s for beat in beats if beat.service_s is not None]:
            self._known.service_s = sum(times_s) / len(times_s)
        return Capacity(
            replicas=len(fit),
            slots_per_replica=self._known.slots,
            service_s=self._known.service_s,
            completions_per_s=sum(beat.done_per_s for beat in beats),
        )

    def _seen(self, sample: Sample) -> None:
        last = self._sample.recommendation.stabilised if self._sample is not None else None
        self._sample, self._sampled_at, self._why = sample, asyncio.get_running_loop().time(), ""
        if self._said:
            self._said = ""
            log.info("the queue is seen again", queue=self.queue)
        if self._writes and sample.recommendation.stabilised != last:
            log.info(
                "replicas wanted",
                queue=self.queue,
                replicas=sample.recommendation.stabilised,
                before=last,
                reason=sample.recommendation.reason,
                load=sample.load.total,
            )

    def _lost(self, why: str) -> None:
        self._sample, self._why = None, why
        if why != self._said:
            self._said = why
            log.warning("the queue cannot be seen; nothing is wanted until it is", queue=self.queue, reason=why)


def _load(backlog: Backlog, beats: Sequence[Beat], deadlines: Sequence[float]) -> Load:
    # The workers know at once what they hold; a broker may tell late, or not at all.
    held = sum(beat.in_flight for beat in beats)
    return Load(
        ready=backlog.ready,
        in_flight=max(backlog.in_flight or 0, held),
        delayed=backlog.delayed or 0,
        deadlines=deadlines,
    )


async def _all(
    backlog: Awaitable[Backlog], beats: Awaitable[Sequence[Beat]], deadlines: Awaitable[Sequence[float] | None]
) -> tuple[Backlog, Sequence[Beat], Sequence[float] | None]:
    """All three at once; the first failure is the only one that comes out, and the others are over by then."""
    tasks = [asyncio.ensure_future(one) for one in (backlog, beats, deadlines)]
    try:
        return await asyncio.gather(*tasks)  # type: ignore[return-value]  # mypy joins the three types.
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def scale_view(settings: Settings, sources: Sources, *, now: Callable[[], float], writes: bool) -> ScaleView:
    """The signal of the queue that the settings name."""
    scale = settings.scale
    return ScaleView(
        settings.queue,
        sources,
        Policy(
            least=scale.least,
            most=scale.most,
            per_replica=scale.per_replica,
            down_lag=scale.down_lag,
            down_after_s=scale.down_after_s,
        ),
        now=now,
        interval_s=scale.interval_s,
        slots=settings.slots,
        writes=writes,
    )


# ---------------------------------------------------------------- as JSON


def shown(view: ScaleView) -> dict[str, object]:
    """The signal as it is answered over HTTP: a number at every documented path, never null.

    Raises:
        NotSeen
    """
    sample = view.look()
    load, backlog, answer, capacity = sample.load, sample.backlog, sample.recommendation, sample.capacity
    guesses = {
        "backlog.delayed": backlog.delayed,
        "backlog.oldest_seconds": backlog.oldest_s if load.ready else 0.0,
        "backlog.due_within_60s": sample.due_soon,
        "recommendations.by_wait": answer.by_wait,
        "recommendations.by_deadline": answer.by_deadline,
    }
    return {
        "queue": view.queue,
        "observed_at": datetime.fromtimestamp(sample.at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "age_seconds": round(view.age_s, 3),
        "active": 1 if load.total else 0,
        "desired_replicas": answer.stabilised,
        "load": load.total,
        "target_per_replica": answer.target_per_replica,
        "backlog": {
            "ready": load.ready,
            "in_flight": load.in_flight,
            "delayed": load.delayed,
            "oldest_seconds": round(guesses["backlog.oldest_seconds"] or 0.0, 3),
            "due_within_60s": sample.due_soon or 0,
        },
        "capacity": {
            "replicas_ready": capacity.replicas,
            "slots_per_replica": capacity.slots_per_replica,
            "completions_per_second": round(capacity.completions_per_s, 3),
        },
        "recommendations": {
            "by_load": answer.by_load,
            "by_wait": answer.by_wait or 0,
            "by_deadline": answer.by_deadline or 0,
            "raw": answer.raw,
            "stabilised": answer.stabilised,
        },
        "limits": {"min": view.policy.least, "max": view.policy.most},
        "reason": answer.reason,
        "how": sample.how,
        "not_known": [path for path, value in guesses.items() if value is None],
    }
