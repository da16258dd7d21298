"""Gates that others steer through Redis: a budget in a key, and a rate that a planner lends for a time.

The budget is read in the background. The rate is one bucket for all processes, so Redis is asked for each request, and
its clock alone counts; whatever is wrong with a lease closes the gate and never fails it, since a planner's outage must
not end requests.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from inference_worker.errors import StoreUnavailable
from inference_worker.gates.parameters import Parameters
from inference_worker.gates.quota_scripts import LOOK_AT_RATE, RETURN_TOKEN, TAKE_TOKEN
from inference_worker.gates.sources import Measurement, Missing, Reading, Watch
from inference_worker.ports import Admitted, Asked, Feedback, TurnedAway, Verdict
from inference_worker.redis_scripts import RedisLink

log = structlog.get_logger(__name__)

API_VERSION: Final = "llm-d.ai/v1alpha1"
LOOK_S: Final = 1.0
BELIEVED_S: Final = 5.0
"""How long a budget that was read holds while Redis is silent: a hiccup closes nothing."""


# ---------------------------------------------------------------- a budget in a key


class BudgetKey:
    """A number that somebody keeps in Redis: missing, or none, it is 1."""

    def __init__(self, link: RedisLink, key: str) -> None:
        self._link = link
        self._key = key

    async def read(self) -> Measurement | Missing:
        """See `sources.MetricSource`."""
        try:
            said = await self._link.do("GET", self._key)
        except StoreUnavailable as exc:
            return Missing(reason=str(exc))
        return Measurement(value=_budget(said))


class BudgetKeyGate:
    """Open while the budget is above 0. Closed while Redis cannot be asked."""

    def __init__(self, link: RedisLink, key: str, *, look_s: float = LOOK_S, believed_s: float = BELIEVED_S) -> None:
        self._key = key
        self._watch = Watch(
            BudgetKey(link, key), name=f"budget in {key}", refresh_s=look_s, max_age_s=believed_s, told=_unheard
        )

    def budget(self) -> float:
        """See `ports.Gate`."""
        reading = self._watch.reading()
        return 0.0 if reading is None else reading.value

    async def admit(self, asked: Asked) -> Verdict:
        """See `ports.Gate`."""
        await self._watch.first_look()
        return Admitted() if self.budget() > 0 else TurnedAway()

    async def run(self, until: asyncio.Event) -> None:
        """See `ports.Gate`."""
        await self._watch.run(until)

    def closes_at(self) -> str:
        """See `ports.Gate`."""
        return f"closed while {self._key} says 0 or less, and without Redis; open where it says nothing"


# ---------------------------------------------------------------- a leased rate


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainLimit:
    """What the gauges of a leased rate show."""

    rate: float = 0.0
    """Requests a second; 0 also where there is no lease."""
    valid_until: float = 0.0
    """Unix seconds."""
    valid: bool = False


NO_LEASE: Final = DrainLimit()


class LeasedRateGate:
    """As many requests a second as a planner allows, over all processes. Closed without a lease that holds."""

    def __init__(
        self,
        link: RedisLink,
        *,
        control_key: str,
        state_key: str,
        pool_id: str,
        burst_s: float = 1.0,
        look_s: float = LOOK_S,
        told: Callable[[DrainLimit], None],
    ) -> None:
        self._link = link
        self._keys = (control_key, state_key)
        self._pool_id = pool_id
        self._burst_s = burst_s
        self._look_s = look_s
        self._told = told
        self._limit = NO_LEASE
        self._why_not = ""
        told(NO_LEASE)

    def budget(self) -> float:
        """See `ports.Gate`: 1 while a lease above 0 holds, by the last look. The rate itself is kept by `admit`."""
        return 1.0 if self._limit.valid and self._limit.rate > 0 else 0.0

    async def admit(self, asked: Asked) -> Verdict:
        """See `ports.Gate`. Never fails."""
        try:
            said = await self._link.run(TAKE_TOKEN, self._keys, API_VERSION, self._pool_id, self._burst_s)
        except StoreUnavailable as exc:
            self._note(NO_LEASE, str(exc))
            return TurnedAway()
        taken = self._heard(said)
        return Admitted(permits=(_Token(self._link, self._keys[1]),)) if taken else TurnedAway()

    async def run(self, until: asyncio.Event) -> None:
        """See `ports.Gate`: a lease that lapses is seen though nobody asks."""
        loop = asyncio.get_running_loop()
        while not until.is_set():
            next_look = loop.time() + self._look_s
            try:
                self._heard(await self._link.run(LOOK_AT_RATE, self._keys[:1], API_VERSION, self._pool_id))
            except StoreUnavailable as exc:
                self._note(NO_LEASE, str(exc))
            try:
                async with asyncio.timeout(max(next_look - loop.time(), 0.05)):
                    await until.wait()
            except TimeoutError:
                pass

    def closes_at(self) -> str:
        """See `ports.Gate`."""
        return f"closed beyond the rate that {self._keys[0]} lends to pool {self._pool_id}, and without it"

    def _heard(self, said: Sequence[Any]) -> bool:
        taken, valid, rate, till_ms = said
        if valid != 1:
            self._note(NO_LEASE, "missing, lapsed, of another pool, or not to be read")
            return False
        self._note(DrainLimit(rate=float(rate), valid_until=till_ms / 1000, valid=True), "")
        return bool(taken == 1)

    def _note(self, limit: DrainLimit, why_not: str) -> None:
        if why_not != self._why_not:
            if why_not:
                log.warning("no leased rate: the gate is closed", pool=self._pool_id, reason=why_not)
            self._why_not = why_not
        self._limit = limit
        self._told(limit)


class _Token:
    """A token of the bucket: it is used up, unless nothing was sent."""

    __slots__ = ("_link", "_state_key")

    def __init__(self, link: RedisLink, state_key: str) -> None:
        self._link: RedisLink | None = link
        self._state_key = state_key

    async def release(self, seen: Feedback) -> None:
        """See `ports.Permit`."""
        link, self._link = self._link, None
        if link is None or seen.kind != "not_sent":
            return
        try:
            await link.run(RETURN_TOKEN, (self._state_key,))
        except StoreUnavailable as exc:
            log.info("a token could not be returned", reason=str(exc))


# ---------------------------------------------------------------- parameters


def redis_budget(given: Parameters, link_to: Callable[[str], RedisLink]) -> BudgetKeyGate:
    """`redis`."""
    address, key = given.text("address"), given.text("budget_key", "dispatch-gate-budget")
    look_s = given.seconds("refresh", LOOK_S, above=0)
    believed_s = given.seconds("max_age", max(BELIEVED_S, 3 * look_s), above=0)
    given.finish()
    return BudgetKeyGate(link_to(address), key, look_s=look_s, believed_s=believed_s)


def redis_leased_rate(
    given: Parameters, link_to: Callable[[str], RedisLink], *, pool_id: str, told: Callable[[DrainLimit], None]
) -> LeasedRateGate:
    """`redis-leased-rate`; `pool_id` is that of the owning pool, where the parameters name none."""
    address, control_key = given.text("address"), given.text("control_key")
    state_key = given.text("state_key", f"{control_key}:state")
    pool = given.text("pool_id", pool_id or None)
    burst_s = given.number("burst_seconds", 1.0, above=0)
    given.finish()
    return LeasedRateGate(
        link_to(address), control_key=control_key, state_key=state_key, pool_id=pool, burst_s=burst_s, told=told
    )


def _budget(said: object) -> float:
    try:
        budget = float(said) if isinstance(said, bytes | str) else 1.0
    except ValueError:
        return 1.0
    return min(max(budget, 0.0), 1.0) if math.isfinite(budget) else 1.0


def _unheard(_: Reading | None) -> None:
    """A budget has no gauges of its own besides `budget`."""
