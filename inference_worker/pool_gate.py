"""The gate before the model: a request with a slot waits at it, for a bounded time, and gives back what it took.

Not here: what ends the waiting early (the processor's affair), and what becomes of a message that is not let in
(`disposition.py`).
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Final

from inference_worker.disposition import Concluded, Outcome
from inference_worker.errors import BadResponse, ModelCut, ModelFailure
from inference_worker.gates.feedback import feedback
from inference_worker.gates.permits import NOT_SENT, give_back
from inference_worker.gates.waiting import SHORTEST_PAUSE_S, GateTold, outlast
from inference_worker.ports import (
    NO_HEADERS,
    Admitted,
    Answer,
    Asked,
    Dropped,
    Feedback,
    Gate,
    Parked,
    Permit,
    TurnedAway,
    Verdict,
)

WAIT_S: Final = 300.0
"""How long a request waits at a gate."""


def nobody_wants(_: Feedback) -> None:
    """Nobody but the gates that have given something wants to know."""


class Permits:
    """What one request has taken, until it is given back: once, with what became of it."""

    def __init__(self, taken: tuple[Permit, ...], told: Callable[[Feedback], None] = nobody_wants) -> None:
        """`told` hears what became of the call, also where nothing was taken here: another gate may want to know."""
        self._taken = taken
        self._told = told
        self._over = False
        self._sent_at: float | None = None

    def sent(self, at: float) -> None:
        """The request leaves us; loop time."""
        self._sent_at = at

    async def answered(self, answer: Answer | ModelFailure | None, outcome: Outcome | None) -> None:
        """The call is over. None for an answer: it was closed from here; `outcome` is what an answer was judged to be.

        A repeat does nothing.
        """
        if self._over:
            return
        taken, self._taken, self._over = self._taken, (), True
        usage = outcome.usage if isinstance(outcome, Concluded) else None
        seen = feedback(
            answer.status_code if isinstance(answer, Answer | ModelCut | BadResponse) else None,
            answer.headers if isinstance(answer, Answer | ModelCut) else NO_HEADERS,
            sent_at=self._sent_at,
            retry_after_s=answer.retry_after_s if isinstance(answer, Answer | ModelCut) else None,
            input_tokens=usage.input_tokens if usage is not None else None,
            output_tokens=usage.output_tokens if usage is not None else None,
        )
        self._told(seen)
        await give_back(taken, seen)

    async def over(self) -> None:
        """Give back what is still held: of a request that was never sent, or whose call nobody saw the end of."""
        if self._sent_at is not None:
            await self.answered(None, None)
            return
        taken, self._taken = self._taken, ()
        await give_back(taken, NOT_SENT)


class Question:
    """A question to a gate on its way."""

    def __init__(self, ask: Callable[[], Coroutine[None, None, Verdict]], until: float, heard: "Heard") -> None:
        """`ask` puts the question, to the gate that stands there then."""
        self._ask = ask
        self._until = until
        self._heard = heard
        self._taken = False
        self.answered = asyncio.Event()
        self._before: list[asyncio.Task[Verdict]] = []
        """Questions to gates that stood there before."""
        self._asking = self._asked()

    def anew(self) -> None:
        """Another gate stands there: ask that one, if the old one has not answered."""
        if self.pending:
            before = self._asking
            self._before.append(before)
            self._asking = self._asked()
            before.cancel()

    def _asked(self) -> "asyncio.Task[Verdict]":
        asking = asyncio.create_task(self._ask(), name="a question to a gate")
        asking.add_done_callback(self._ended)
        return asking

    def _ended(self, asking: "asyncio.Task[Verdict]") -> None:
        if asking is self._asking:
            self.answered.set()

    @property
    def pending(self) -> bool:
        """There is no verdict yet."""
        return not self._asking.done()

    @property
    def left_s(self) -> float:
        """Seconds until nobody waits for it any more; 0 where rounding alone has left some."""
        left_s = self._until - asyncio.get_running_loop().time()
        return left_s if left_s > SHORTEST_PAUSE_S else 0.0

    def verdict(self) -> Verdict:
        """The verdict, which has come. What it has admitted is the caller's to give back.

        Raises:
            GateFailed: it could not be said.
        """
        self._taken = True
        try:
            verdict = self._asking.result()
        except Exception:
            self._heard.failed()
            raise
        self._heard.verdict(verdict)
        return verdict

    async def withdraw(self) -> None:
        """Nobody wants to know any more: what was admitted all the same goes back. A second cancellation waits."""
        self._asking.cancel()
        cut: asyncio.CancelledError | None = None
        while not all(asking.done() for asking in (self._asking, *self._before)):
            try:
                await asyncio.wait([self._asking, *self._before])
            except asyncio.CancelledError as exc:
                cut = exc
        for asking in self._before if self._taken else (self._asking, *self._before):
            # An exception is retrieved, so that nobody is told of it.
            verdict = None if asking.cancelled() or asking.exception() is not None else asking.result()
            if isinstance(verdict, Admitted):
                await give_back(verdict.permits, NOT_SENT)
        if cut is not None:
            raise cut


class Heard:
    """Tells what one request met at the gate: that it waits, once, or why it goes no further."""

    def __init__(self, told: GateTold | None) -> None:
        self._told = told
        self._waits = False

    def parked(self, verdict: Parked) -> None:
        """It waits from now on."""
        if self._told is not None and not self._waits:
            self._waits = True
            self._told.decided(verdict.because)
            self._told.waiting(+1)

    def verdict(self, verdict: Verdict) -> None:
        """The gate's last word to it. Who has waited and is turned away then was told of already."""
        if self._told is None:
            return
        match verdict:
            case TurnedAway(because=because) if not self._waits:
                self._told.decided(because)
            case Dropped():
                self._told.decided("dropped")
            case _:
                pass

    def failed(self) -> None:
        """The gate could not say."""
        if self._told is not None:
            self._told.decided("error")

    def gone(self) -> None:
        """It is not at the gate any more, however it came away."""
        if self._told is not None and self._waits:
            self._told.waiting(-1)


class PoolGate:
    """One gate for all requests of a pool, or the place where one may come to stand."""

    def __init__(
        self, gate: Gate | None, rng: random.Random, *, wait_s: float = WAIT_S, told: GateTold | None = None
    ) -> None:
        """`wait_s` is how long a request waits here; 0 = until its deadline. `told` counts what happens here."""
        self._gate = gate
        self._rng = rng
        self._told = told
        self._questions: dict[Question, None] = {}
        self.wait_s = wait_s

    @property
    def stands(self) -> bool:
        """There is a gate."""
        return self._gate is not None

    def replace(self, gate: Gate | None) -> None:
        """Another gate from now on, or none. Who waits is asked anew; what the old one has admitted goes back to it."""
        self._gate = gate
        for question in self._questions:
            question.anew()

    @asynccontextmanager
    async def asking(self, asked: Asked, left_s: float) -> AsyncGenerator[Question, None]:
        """Ask while the gate says wait; leaving the context withdraws the question. `left_s` is to the deadline."""
        until = asyncio.get_running_loop().time() + (min(self.wait_s, left_s) if self.wait_s > 0 else left_s)
        heard = Heard(self._told)
        question = Question(lambda: self._ask(asked, until, heard), until, heard)
        self._questions[question] = None
        try:
            await asyncio.sleep(0)  # Most gates need no more.
            yield question
        finally:
            del self._questions[question]
            try:
                await question.withdraw()
            finally:
                heard.gone()

    async def _ask(self, asked: Asked, until: float, heard: Heard) -> Verdict:
        if self._gate is None:
            return Admitted()
        return await outlast(self._gate, asked, until, self._rng, heard.parked)
