"""The way of a job into a queue that confirms: a record in the book, the message, the record confirmed.

Cut off between any two steps, the job is reserved, and perhaps in the queue: the next call with its key puts it in
again under the same id, where two messages are one run. Queues that live beside the book do it in one step instead
(`transports/stream_intake.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol, assert_never

import structlog

from inference_worker.errors import InferenceWorkerError, NotAccepted, QueueFull, StoreUnavailable, TransportLost
from inference_worker.job_book import JobBook, JobRecord, Message, OtherBody, Reserved, Standing, Taken
from inference_worker.ports import Backlog
from inference_worker.timing import quietly

log = structlog.get_logger(__name__)

PATIENCE_S: Final = 10.0
"""How long a call waits for another one with its key."""

LOOK_S: Final = 0.25
"""How old a look at the queue's depth may be; what was accepted here since then is added to it."""

FIRST_PAUSE_S: Final = 0.02
LONGEST_PAUSE_S: Final = 0.2
"""Between two questions to the book."""

BOOK_S: Final = 5.0
"""How long a last word to the book may take."""


class Publish(Protocol):
    """Puts a message into the queue; returns once the broker has it.

    Raises:
        QueueFull: it has not got it, for sure.
        NotAccepted: `maybe` says whether it may have got it.
        TransportLost: it may have got it.
    """

    async def __call__(self, body: bytes, *, message_id: str) -> None: ...


class ConfirmedIntake:
    """The intake of `job_book.py` over a book and a queue that know nothing of each other."""

    def __init__(
        self,
        book: JobBook,
        publish: Publish,
        backlog: Callable[[], Awaitable[Backlog]],
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._book = book
        self._publish = publish
        self._depth = _Depth(backlog)
        self._patience_s = patience_s

    async def accept(
        self, record: JobRecord, message: Message, *, key: str | None, most_waiting: int
    ) -> Taken | OtherBody:
        """See `job_book.Intake`."""
        if key is None:  # With one, a repeat is answered however full the queue is.
            await self._room(most_waiting)
        match await self._reserve(record, key):
            case OtherBody() as other:
                return other
            case Standing(record=standing):
                return Taken(record=standing, new=False)
            case Reserved() as reserved:
                return await self._put_in(reserved, message, most_waiting)
            case never:
                assert_never(never)

    async def backlog(self) -> Backlog:
        """See `job_book.Intake`."""
        return await self._depth.look()

    async def _reserve(self, record: JobRecord, key: str | None) -> Reserved | Standing | OtherBody:
        """The record reserved, or what the key stands for, once the job of that is in the queue."""
        loop = asyncio.get_running_loop()
        until, pause_s = loop.time() + self._patience_s, FIRST_PAUSE_S
        while True:
            match await self._book.reserve(record, key):
                case Standing(confirmed=False, left_s=left_s):
                    if loop.time() >= until:
                        raise TransportLost("another request with this key is still on its way into the queue")
                    await asyncio.sleep(min(pause_s, left_s + 0.001))
                    pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
                case found:
                    return found

    async def _put_in(self, reserved: Reserved, message: Message, most_waiting: int) -> Taken:
        try:
            waiting = await self._room(most_waiting)
        except (QueueFull, TransportLost, StoreUnavailable):
            await self._last_word(self._book.withdraw(reserved))
            raise
        job_id = reserved.record.job_id
        try:
            with self._depth.one_more():
                await self._publish(message(reserved.record), message_id=job_id)
        except QueueFull as exc:
            await self._last_word(self._book.withdraw(reserved))
            raise QueueFull(str(exc), waiting if exc.waiting is None else exc.waiting) from exc
        except NotAccepted as exc:
            await self._last_word(self._book.leave(reserved) if exc.maybe else self._book.withdraw(reserved))
            if exc.for_good:
                raise
            raise TransportLost(str(exc)) from exc
        except TransportLost:
            await self._last_word(self._book.leave(reserved))
            raise
        await self._confirm(reserved)
        return Taken(record=reserved.record, new=True, waiting=waiting)

    async def _room(self, most_waiting: int) -> int | None:
        """How many wait; None where that cannot be told and does not matter."""
        try:
            await self._depth.look()
        except (TransportLost, StoreUnavailable):
            if most_waiting:
                raise
            return None
        waiting = self._depth.waiting
        if most_waiting and waiting >= most_waiting:
            raise QueueFull(f"{waiting} requests wait, and {most_waiting} may", waiting)
        return waiting

    async def _confirm(self, reserved: Reserved) -> None:
        """Say that the queue has it. Where the book cannot be told, the job is accepted all the same: it will run.

        It is then not listed before it has ended, and another call with its key would put it in a second time, where
        the worker's claim makes two messages one run.
        """
        if not await self._last_word(self._confirmed(reserved)):
            log.warning("a job is in the queue and its record is not confirmed", job_id=reserved.record.job_id)

    async def _confirmed(self, reserved: Reserved) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await self._book.confirm(reserved)
            except StoreUnavailable:
                await asyncio.sleep(pause_s)
            pause_s *= 2

    async def _last_word(self, said: Awaitable[None]) -> bool:
        return await quietly(said, BOOK_S, StoreUnavailable)


class _Depth:
    """How many requests wait, by a look that all calls share, and what was put in here since it began.

    Between two looks it counts rather too many than too few; what other intakes put in is seen at the next look.
    """

    def __init__(self, backlog: Callable[[], Awaitable[Backlog]]) -> None:
        self._backlog = backlog
        self._seen: _Look | None = None
        self._looking: _Look | None = None
        self._under_way = 0
        self._put_in = 0

    @property
    def waiting(self) -> int:
        """As of the last look."""
        seen = self._seen
        assert seen is not None
        assert seen.backlog is not None
        at_that_time = seen.backlog.ready + (seen.backlog.delayed or 0)
        return at_that_time + self._put_in - seen.put_in_before + self._under_way

    @contextmanager
    def one_more(self) -> Generator[None, None, None]:
        """A request is on its way into the queue, and after that in it."""
        self._under_way += 1
        try:
            yield
            self._put_in += 1
        finally:
            self._under_way -= 1

    async def look(self) -> Backlog:
        """A look that is at most `LOOK_S` old. One looks, the others wait for it and share what it finds, failures too.

        Raises: what looking raises.
        """
        loop = asyncio.get_running_loop()
        while True:
            seen = self._seen
            if seen is not None and seen.backlog is not None and loop.time() - seen.at <= LOOK_S:
                return seen.backlog
            look = self._looking
            if look is None:
                return await self._look(loop)
            await look.over.wait()
            if look.failure is not None:
                raise look.failure
            # Else it is there now, or who looked was cancelled.

    async def _look(self, loop: asyncio.AbstractEventLoop) -> Backlog:
        look = self._looking = _Look(put_in_before=self._put_in)
        try:
            backlog = look.backlog = await self._backlog()
            look.at, self._seen = loop.time(), look
            return backlog
        except InferenceWorkerError as exc:
            look.failure = exc
            raise
        finally:
            self._looking = None
            look.over.set()


@dataclass(slots=True, kw_only=True, eq=False)
class _Look:
    put_in_before: int
    """How many had been put in when it began."""
    at: float = 0.0
    """When it was over, by the loop's clock."""
    backlog: Backlog | None = None
    failure: InferenceWorkerError | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
