"""Gates that need no neighbour: fixed verdicts, a count, a rate, a deadline. All of one process.

Nothing in their `admit` waits, so that what is counted is counted at once, and cancelling it leaves nothing behind.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Final, Literal, assert_never

from inference_worker.gates.parameters import Parameters
from inference_worker.gates.permits import ASK_AGAIN_S, POLL_S, Line, OncePermit
from inference_worker.ports import Admitted, Asked, Dropped, Feedback, Parked, TurnedAway, Verdict

Decision = Literal["continue", "wait", "refuse", "drop"]
GatingMode = Literal["blocking", "classifying"]

LONGEST_RATE: Final = 60_000_000
"""Requests a minute: more than one process can send."""


class Constant:
    """Always open."""

    def budget(self) -> float:
        """All of it."""
        return 1.0

    async def admit(self, asked: Asked) -> Verdict:
        """Go on."""
        return Admitted()

    async def run(self, until: asyncio.Event) -> None:
        """It reads nothing."""

    def closes_at(self) -> str:
        """Never."""
        return "never"


class ConstantDecision:
    """The same verdict for all: for tests, and to drain or stop a queue without taking it out."""

    def __init__(self, decision: Decision) -> None:
        self._decision = decision

    def budget(self) -> float:
        """All or nothing. What is to be dropped must be taken out of its queue first."""
        return 1.0 if self._decision in ("continue", "drop") else 0.0

    async def admit(self, asked: Asked) -> Verdict:
        """The one verdict."""
        match self._decision:
            case "continue":
                return Admitted()
            case "wait":
                return Parked(within_s=ASK_AGAIN_S)
            case "refuse":
                return TurnedAway()
            case "drop":
                return Dropped(status_code=None, error_code="GATE_DROPPED", error="the gate drops every request")
            case _:
                assert_never(self._decision)

    async def run(self, until: asyncio.Event) -> None:
        """It reads nothing."""

    def closes_at(self) -> str:
        """Always, or never."""
        return "never" if self._decision == "continue" else f"always: {self._decision}"


class LocalMaxConcurrency:
    """At most `limit` requests at once. Once full, it keeps a request waiting (`blocking`) or refuses it."""

    def __init__(self, limit: int, mode: GatingMode = "classifying") -> None:
        self._limit = limit
        self._mode = mode
        self._held = 0
        self._line = Line()

    def budget(self) -> float:
        """The part that is free."""
        return max(0.0, 1 - self._held / self._limit) if self._limit > 0 else 0.0

    async def admit(self, asked: Asked) -> Verdict:
        """A slot, if one is free."""
        if self._held < self._limit:
            self._held += 1
            return Admitted(permits=(OncePermit(self._give_back),))
        if self._mode == "blocking" and self._limit > 0:
            return Parked(within_s=ASK_AGAIN_S, changed=self._line.join())
        return TurnedAway()

    def signal(self, changed: asyncio.Event, asked: Asked) -> bool:
        """Told of the next slot that is free."""
        self._line.join(changed)
        return True

    async def run(self, until: asyncio.Event) -> None:
        """It reads nothing."""

    def closes_at(self) -> str:
        """At its limit."""
        return f"{self._limit} requests in flight in this process"

    def _give_back(self, seen: Feedback) -> None:
        self._held -= 1
        self._line.wake(1)


class LocalRateLimit:
    """A token bucket of one process: so many requests a minute, and at most `burst` at once. It keeps the rest waiting.

    A token that was not used, because the request was not sent after all, goes back.
    """

    def __init__(self, requests_per_minute: float, burst: float, clock: Callable[[], float]) -> None:
        """`clock` is the loop's time. Both numbers are at least 1."""
        self._per_s = requests_per_minute / 60
        self._burst = burst
        self._clock = clock
        self._tokens = burst
        self._counted_at = clock()
        self._line = Line()
        self._timer: asyncio.TimerHandle | None = None

    def budget(self) -> float:
        """The part of the bucket that is full."""
        tokens = self._count()
        return tokens / self._burst if tokens >= 1 else 0.0

    async def admit(self, asked: Asked) -> Verdict:
        """A token, if there is one."""
        if self._count() >= 1:
            self._tokens -= 1
            return Admitted(permits=(OncePermit(self._give_back),))
        changed = self._line.join()
        self._wake_later()
        return Parked(within_s=max(ASK_AGAIN_S, self._next_s()), changed=changed)

    def signal(self, changed: asyncio.Event, asked: Asked) -> bool:
        """Told of the next token."""
        self._line.join(changed)
        self._wake_later()
        return True

    async def run(self, until: asyncio.Event) -> None:
        """It reads nothing."""

    def closes_at(self) -> str:
        """At its rate."""
        return f"{self._per_s * 60:g} requests a minute in this process, {self._burst:g} at once"

    def _count(self) -> float:
        """The tokens as of now."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._counted_at) * self._per_s)
        self._counted_at = now
        # Sums of parts of a token: what is whole but for rounding is whole.
        if math.isclose(self._tokens, round(self._tokens), abs_tol=1e-6):
            self._tokens = float(round(self._tokens))
        return self._tokens

    def _next_s(self) -> float:
        return max(0.0, 1 - self._count()) / self._per_s

    def _wake_later(self) -> None:
        """One timer for all who wait: each token wakes one of them."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._next_s(), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._line.wake(int(self._count()))
        if len(self._line):
            # Not before another token is due, even where those woken have not taken theirs.
            self._timer = asyncio.get_running_loop().call_later(max(1 / self._per_s, POLL_S / 10), self._wake)

    def _give_back(self, seen: Feedback) -> None:
        if seen.kind == "not_sent":
            self._tokens = min(self._burst, self._count() + 1)
            self._line.wake(1)


class DeadlineDrop:
    """Drops what nobody waits for any more. First in a chain, it saves the slot."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` says the Unix time."""
        self._now = now

    def budget(self) -> float:
        """All of it: it depends on the request."""
        return 1.0

    async def admit(self, asked: Asked) -> Verdict:
        """Go on, unless the deadline has passed."""
        late_s = self._now() - asked.deadline
        if late_s > 0:
            said = f"the deadline passed {late_s:.3f} s before the request could be sent"
            return Dropped(status_code=None, error_code="DEADLINE_EXCEEDED", error=said)
        return Admitted()

    async def run(self, until: asyncio.Event) -> None:
        """It reads nothing."""

    def closes_at(self) -> str:
        """By the request."""
        return "never; it drops what is past its deadline"


# Made of a document's parameters. What is wrong stands in `given.problems`; the gate is harmless then.


def constant(given: Parameters) -> Constant:
    """`constant`: no parameters."""
    given.finish()
    return Constant()


def constant_decision(given: Parameters) -> ConstantDecision:
    """`constant-decision`: `decision`."""
    decision: Decision = given.choice("decision", ("continue", "wait", "refuse", "drop"))
    given.finish()
    return ConstantDecision(decision)


def local_max_concurrency(given: Parameters) -> LocalMaxConcurrency:
    """`local-max-concurrency`: `limit`, `gating_mode`."""
    limit = given.whole("limit", at_least=1)
    mode: GatingMode = given.choice("gating_mode", ("blocking", "classifying"), "classifying")
    given.finish()
    return LocalMaxConcurrency(limit, mode)


def local_rate_limit(given: Parameters, clock: Callable[[], float]) -> LocalRateLimit:
    """`local-rate-limit`: `requests_per_minute`, `burst`."""
    rate = given.number("requests_per_minute", at_least=1, at_most=LONGEST_RATE)
    burst = given.whole("burst", 1, at_least=1)
    given.finish()
    return LocalRateLimit(rate, burst, clock)


def deadline_drop(given: Parameters, now: Callable[[], float]) -> DeadlineDrop:
    """`deadline-drop`: no parameters."""
    given.finish()
    return DeadlineDrop(now)
