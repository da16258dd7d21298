"""The gate before the model: a request with a slot waits at it, for a bounded time, and gives back what it took.

Not here: what ends the waiting early (the processor's affair), and what becomes of a message that is not let in
(`disposition.py`).
"""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from inference_worker.disposition import Concluded, Outcome
from inference_worker.errors import BadResponse, ModelFailure
from inference_worker.gates.feedback import feedback
from inference_worker.gates.permits import NOT_SENT, give_back
from inference_worker.gates.waiting import outlast
from inference_worker.ports import NO_HEADERS, Admitted, Answer, Asked, Gate, Permit, Verdict

WAIT_S: Final = 300.0
"""How long a request waits at a gate."""


class Permits:
    """What one request has taken, until it is given back: once, with what became of it."""

    def __init__(self, taken: tuple[Permit, ...]) -> None:
        self._taken = taken
        self._sent_at: float | None = None

    def sent(self, at: float) -> None:
        """The request leaves us; loop time."""
        self._sent_at = at

    async def answered(self, answer: Answer | ModelFailure | None, outcome: Outcome | None) -> None:
        """The call is over. None for an answer: it was closed from here; `outcome` is what an answer was judged to be.

        A repeat does nothing.
        """
        taken, self._taken = self._taken, ()
        if not taken:
            return
        usage = outcome.usage if isinstance(outcome, Concluded) else None
        seen = feedback(
            answer.status_code if isinstance(answer, Answer | BadResponse) else None,
            answer.headers if isinstance(answer, Answer) else NO_HEADERS,
            sent_at=self._sent_at,
            retry_after_s=answer.retry_after_s if isinstance(answer, Answer) else None,
            input_tokens=usage.input_tokens if usage is not None else None,
            output_tokens=usage.output_tokens if usage is not None else None,
        )
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

    def __init__(self, asking: "asyncio.Task[Verdict]", until: float) -> None:
        self._asking = asking
        self._until = until
        self._taken = False
        self.answered = asyncio.Event()
        asking.add_done_callback(lambda _: self.answered.set())

    @property
    def pending(self) -> bool:
        """There is no verdict yet."""
        return not self._asking.done()

    @property
    def left_s(self) -> float:
        """Seconds until nobody waits for it any more."""
        return max(self._until - asyncio.get_running_loop().time(), 0.0)

    def verdict(self) -> Verdict:
        """The verdict, which has come. What it has admitted is the caller's to give back.

        Raises:
            GateFailed: it could not be said.
        """
        self._taken = True
        return self._asking.result()

    async def withdraw(self) -> None:
        """Nobody wants to know any more: what was admitted all the same goes back. A second cancellation waits."""
        self._asking.cancel()
        cut: asyncio.CancelledError | None = None
        while not self._asking.done():
            try:
                await asyncio.wait([self._asking])
            except asyncio.CancelledError as exc:
                cut = exc
        if self._taken or self._asking.cancelled():
            verdict = None
        else:
            # An exception is retrieved, so that nobody is told of it.
            verdict = self._asking.result() if self._asking.exception() is None else None
        if isinstance(verdict, Admitted):
            await give_back(verdict.permits, NOT_SENT)
        if cut is not None:
            raise cut


class PoolGate:
    """One gate for all requests of a pool."""

    def __init__(self, gate: Gate, rng: random.Random, *, wait_s: float = WAIT_S) -> None:
        """`wait_s` is how long a request waits here; 0 = until its deadline."""
        self._gate = gate
        self._rng = rng
        self.wait_s = wait_s

    @asynccontextmanager
    async def asking(self, asked: Asked, left_s: float) -> AsyncGenerator[Question, None]:
        """Ask while the gate says wait; leaving the context withdraws the question. `left_s` is to the deadline."""
        until = asyncio.get_running_loop().time() + (min(self.wait_s, left_s) if self.wait_s > 0 else left_s)
        asking = asyncio.create_task(outlast(self._gate, asked, until, self._rng), name="a question to a gate")
        question = Question(asking, until)
        try:
            await asyncio.sleep(0)  # Most gates need no more.
            yield question
        finally:
            await question.withdraw()
