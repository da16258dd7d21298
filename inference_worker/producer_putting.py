"""What the producers of all transports do alike: chunks, repeats within one, another try, and nothing lost on the way.

Not here: how a chunk is put into its queue, and how a result is taken; a producer says that.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from inference_worker.errors import KeyTaken, NotAccepted, PartlyAccepted, StoreUnavailable
from inference_worker.producer_requests import Prepared, Submission
from inference_worker.timing import ended, quietly

T = TypeVar("T")

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
GIVE_BACK_S: Final = 5.0
"""How long giving back may take what somebody was cancelled before."""

Take = Callable[[Sequence[Prepared]], Awaitable[Sequence[Submission]]]
"""Takes over a chunk, as a whole or not at all; what is known under a key already is said as it is known."""


async def put(chunk: Sequence[Prepared], take: Take) -> Sequence[Submission]:
    """Of several under one key in a chunk the first is taken over, and the others are repeats of it.

    Raises:
        KeyTaken: two under one key are not the same.
        NotAccepted: as `take` does.
    """
    firsts: dict[str, Prepared] = {}
    for one in chunk:
        first = firsts.setdefault(one.idempotency_key or one.submission.token, one)
        if first.fingerprint != one.fingerprint:
            raise KeyTaken(one.idempotency_key or "", first.submission.id)
    taken = dict(zip(firsts, await take(list(firsts.values())), strict=True))
    submissions: list[Submission] = []
    for one in chunk:
        key = one.idempotency_key or one.submission.token
        submissions.append(taken[key] if firsts[key] is one else replace(taken[key], repeated=True))
    return submissions


async def put_all(requests: Sequence[Prepared], take: Take, *, most: int, most_bytes: int) -> Sequence[Submission]:
    """Put them in chunks of up to `most` requests and `most_bytes`, one after the other.

    Raises:
        PartlyAccepted: the first chunks were taken over, and what follows was not, or perhaps.
        NotAccepted, KeyTaken: of the first chunk.
    """
    taken: list[Submission] = []
    for chunk in chunks(requests, most=most, most_bytes=most_bytes):
        try:
            taken.extend(await put(chunk, take))
        except NotAccepted as exc:
            if not taken:
                raise
            said = f"{len(taken)} were taken over, then: {exc}"
            raise PartlyAccepted(said, tuple(taken), maybe=exc.maybe, for_good=exc.for_good) from exc
    return taken


def chunks(requests: Sequence[Prepared], *, most: int, most_bytes: int) -> Iterable[Sequence[Prepared]]:
    """In their order; one that is larger than `most_bytes` comes alone."""
    chunk: list[Prepared] = []
    size_bytes = 0
    for one in requests:
        if chunk and (len(chunk) == most or size_bytes + one.size_bytes > most_bytes):
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append(one)
        size_bytes += one.size_bytes
    if chunk:
        yield chunk


async def answered(
    chunk: Sequence[Prepared], ask: Callable[[], Awaitable[T]], *, within_s: float, rng: random.Random
) -> T:
    """Ask until there is an answer, or time is over. Only where all have keys: the others may be there already.

    Raises:
        NotAccepted: nobody answered.
    """
    repeatable = all(one.idempotency_key is not None for one in chunk)
    loop = asyncio.get_running_loop()
    until, pause_s = loop.time() + within_s, FIRST_PAUSE_S
    while True:
        try:
            return await ask()
        except StoreUnavailable as exc:
            if not repeatable or loop.time() + pause_s > until:
                raise NotAccepted(f"not confirmed: {exc}", maybe=True) from exc
        await asyncio.sleep(pause_s * rng.uniform(0.5, 1.0))
        pause_s = min(pause_s * 2, LONGEST_PAUSE_S)


class Returning:
    """Sees to it that whoever is cancelled while a result is on its way loses nothing."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, asking: Awaitable[T], give_back: Callable[[T], Awaitable[None]]) -> T:
        """Ask for something. Who is cancelled meanwhile loses nothing: what then comes is given back."""
        asked = asyncio.ensure_future(asking)
        try:
            await asyncio.wait([asked])
        except asyncio.CancelledError:
            task = asyncio.create_task(_returned(asked, give_back), name="result given back")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            raise
        return asked.result()

    async def end(self) -> None:
        """Wait until all of it is back."""
        if tasks := list(self._tasks):
            await quietly(asyncio.wait(tasks), 2 * GIVE_BACK_S)
            for task in tasks:
                await ended(task)


async def _returned(asked: "asyncio.Future[T]", give_back: Callable[[T], Awaitable[None]]) -> None:
    await asyncio.wait([asked])
    if not asked.cancelled() and asked.exception() is None:
        await quietly(give_back(asked.result()), GIVE_BACK_S, StoreUnavailable)
