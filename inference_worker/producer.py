"""A producer for the queues of llm-d-async on Redis (`redis-sortedset`): submit, cancel, and take results.

It writes and reads what the Go library does, so that both may work on the same queues. For our own queues there is
`client`, whose requests have one result each, under their id; here results come in a list, whoever takes them first.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from inference_worker.errors import (
    ConfigurationError,
    InvalidSubmission,
    KeyTaken,
    LeaseLost,
    NoResultYet,
    NotAccepted,
    PartlyAccepted,
    StoreUnavailable,
    UnreadableResult,
)
from inference_worker.messages import usable_id
from inference_worker.producer_arrivals import Arrivals
from inference_worker.producer_leases import LeasedResult, Leases, Nothing
from inference_worker.producer_putting import Returning, answered, put, put_all
from inference_worker.producer_requests import (
    PAYLOAD_GRACE_S,
    RECORD_GRACE_S,
    Prepared,
    Request,
    Submission,
    Tokens,
    active_key,
    cancel_key,
    payload_key,
    prepared,
    record_key,
)
from inference_worker.producer_results import Result, read_result
from inference_worker.producer_scripts import CANCEL, LOOK_UP, MOST_AT_ONCE, SUBMIT
from inference_worker.producer_steps import cancel_in_steps, submit_in_steps
from inference_worker.redis_cluster import RedisCluster
from inference_worker.redis_scripts import MOST_BYTES, Address, Argument, RedisCommands, RedisLink, RedisTls

__all__ = [
    "ConfigurationError",
    "InvalidSubmission",
    "KeyTaken",
    "LeaseLost",
    "LeasedResult",
    "NoResultYet",
    "NotAccepted",
    "PartlyAccepted",
    "Producer",
    "Request",
    "Result",
    "StoreUnavailable",
    "Submission",
    "UnreadableResult",
]

REQUEST_QUEUE: Final = "request-sortedset"
CANCELLED_FOR_S: Final = 7 * 86_400
"""How long it stands that a submission was cancelled."""

SUBMIT_S: Final = 30.0
LEASE_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """How much lies in the producer's two queues."""

    requests: int
    """That nobody has taken."""
    results: int
    """That nobody has taken."""
    leased: int
    """Results that were received and not acknowledged."""


class Producer:
    """`async with Producer(url, result_queue="results") as producer:`. For any number of tasks.

    `redis_url` may be a function, which is asked again at each connection. A `link` that is given instead is used, and
    left open: a `RedisLink`, or a `RedisCluster`, on which there are no idempotency keys. With `payload_keys` payloads
    lie in keys of their own, and the queue holds envelopes only.
    """

    def __init__(
        self,
        redis_url: str | Callable[[], str] | None = None,
        *,
        result_queue: str,
        request_queue: str = REQUEST_QUEUE,
        link: RedisLink | RedisCluster | None = None,
        payload_keys: bool = False,
        redis_password: str | None = None,
        redis_tls: RedisTls | None = None,
        name: str = "producer",
        now: Callable[[], float] = time.time,
    ) -> None:
        problems = _problems(redis_url, link, request_queue=request_queue, result_queue=result_queue)
        if problems:
            raise ConfigurationError(problems)
        shown = "".join(c if "!" <= c <= "~" else "_" for c in f"inference-worker/{name}")[:200]
        address: Address = redis_url if callable(redis_url) else lambda: str(redis_url)
        if isinstance(link, RedisCluster):
            address = link.address_of(result_queue)
        tls = redis_tls or RedisTls()
        own = RedisLink(address, lambda: redis_password, client_name=shown, tls=tls)
        self._clustered = isinstance(link, RedisCluster)
        self._results = link if isinstance(link, RedisLink) else own
        """Leads to the server that has the results."""
        self._own_results = not isinstance(link, RedisLink)
        self._link: RedisCommands = link or self._results
        self._request_queue = request_queue
        self._result_queue = result_queue
        self._payload_keys = payload_keys
        self._now = now
        self._rng = random.Random()
        self._tokens = Tokens()
        self._leases = Leases(self._results, result_queue, clustered=self._clustered)
        self._arrivals = Arrivals(self._results, result_queue)
        self._returning = Returning()
        self._open: AsyncExitStack | None = None

    # ------------------------------------------------------------ requests

    async def submit(self, request: Request, *, within_s: float = SUBMIT_S) -> Submission:
        """Put a request into its queue.

        Where Redis says nothing, one with an idempotency key is tried again until `within_s` is over, and one without
        is not: it may be there.

        Raises:
            InvalidSubmission: it cannot be meant.
            NotAccepted: it was not taken over, for sure or perhaps (`maybe`).
            KeyTaken: its idempotency key stands for another request.
        """
        (submission,) = await put([self._prepared(request)], partial(self._taken, within_s=within_s))
        return submission

    async def submit_many(self, requests: Iterable[Request], *, within_s: float = SUBMIT_S) -> Sequence[Submission]:
        """Put requests into their queues, a thousand or 8 MiB at a time, each such chunk as a whole or not at all.

        All are checked before the first is put there. `within_s` is for each chunk.

        Raises:
            InvalidSubmission: one cannot be meant; nothing was done.
            PartlyAccepted: the first chunks were taken over, and what follows was not, or perhaps.
            NotAccepted, KeyTaken: as `submit`, of the first chunk.
        """
        prepared = [self._prepared(request) for request in requests]
        take = partial(self._taken, within_s=within_s)
        return await put_all(prepared, take, most=MOST_AT_ONCE, most_bytes=MOST_BYTES)

    async def look_up(self, idempotency_key: str) -> Submission | None:
        """What was submitted under a key; None where nothing was, or it is long ago.

        Raises:
            StoreUnavailable
        """
        found = await self._reached().run(LOOK_UP, [record_key(idempotency_key)])
        return _stored(found) if found[0] is not None else None

    async def cancel(self, which: str | Submission | Iterable[str | Submission]) -> Sequence[str]:
        """Mark requests as cancelled: who has not begun one will not, and answers with `CANCELLED`.

        An id means whichever submission is the latest under it, a `Submission` only itself. Returns the ids of those
        that were marked; the others have ended, or never were.

        Raises:
            StoreUnavailable: it may have been done; asking again does no harm.
        """
        all_of_them = [which] if isinstance(which, str | Submission) else which
        meant = [(one.id, one.token) if isinstance(one, Submission) else (one, "") for one in all_of_them]
        marked: list[str] = []
        for start in range(0, len(meant), MOST_AT_ONCE):
            some = meant[start : start + MOST_AT_ONCE]
            if self._clustered:
                marked.extend(await cancel_in_steps(self._reached(), some, CANCELLED_FOR_S))
                continue
            keys = [key for request_id, _ in some for key in (active_key(request_id), cancel_key(request_id))]
            places = await self._reached().run(CANCEL, keys, CANCELLED_FOR_S, *(token for _, token in some))
            marked.extend(some[place - 1][0] for place in places)
        return marked

    # ------------------------------------------------------------ results

    async def get_result(self, within_s: float) -> Result:
        """Take the oldest result out of the list, waiting for one for up to `within_s` seconds.

        It is gone from Redis then: who dies before it is safe has lost it, which `receive` is for. Not for a list that
        is also received from.

        Raises:
            NoResultYet: there was none.
            UnreadableResult: what was taken is no result.
            StoreUnavailable: nobody could be asked. A result that was on its way is lost.
        """

        async def take() -> bytes | None:
            popped = await self._reached().do("RPOP", self._result_queue)
            return None if popped is None else bytes(popped)

        until = asyncio.get_running_loop().time() + within_s
        while True:
            raw = await self._returning.ask(take(), self._put_back)
            if raw is not None:
                return read_result(raw)
            await self._another_look(until)

    async def receive(self, within_s: float, lease_s: float = LEASE_S) -> LeasedResult:
        """Lease the oldest result, waiting for one for up to `within_s` seconds. Comes again unless acknowledged.

        Raises:
            NoResultYet: there was none.
            UnreadableResult: what lies there is no result. It is leased, too, and does not hold up what is behind it.
            StoreUnavailable: nobody could be asked. A result that was on its way comes again once the lease has lapsed.
        """
        self._reached()
        until = asyncio.get_running_loop().time() + within_s
        while True:
            match await self._returning.ask(self._leases.receive(lease_s), self._leases.give_back):
                case LeasedResult() as leased:
                    return leased
                case UnreadableResult() as unreadable:
                    raise unreadable
                case Nothing(lapses_in_s=lapses_in_s):
                    await self._another_look(until, lapses_in_s)

    # ------------------------------------------------------------ queues

    async def depth(self) -> Depth:
        """Count what lies there.

        Raises:
            StoreUnavailable
        """
        link = self._reached()
        requests, results, leased = await asyncio.gather(
            link.do("ZCARD", self._request_queue),
            link.do("LLEN", self._result_queue),
            link.do("HLEN", self._leases.keys[1]),
        )
        return Depth(requests=requests, results=results, leased=leased)

    async def clear(self, *, requests: bool = False, results: bool = False) -> None:
        """Throw away all requests that nobody has taken, or all results, the leased ones included: whosever they are.

        Raises:
            StoreUnavailable
        """
        keys = [self._request_queue] * requests + [*self._leases.keys] * results
        if not keys:
            raise ValueError("say what to clear: requests=True, results=True, or both")
        link = self._reached()
        await asyncio.gather(*(link.do("UNLINK", key) for key in keys))

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            if self._own_results:
                await opened.enter_async_context(self._results.open())
            await self._link.do("PING")
            opened.push_async_callback(self._returning.end)
            await opened.enter_async_context(self._arrivals.open())
            self._open = opened.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            await opened.aclose()

    def _reached(self) -> RedisCommands:
        if self._open is None:
            raise RuntimeError("the producer is not open: use it inside `async with`")
        return self._link

    # ------------------------------------------------------------ submitting

    def _prepared(self, request: Request) -> Prepared:
        if self._clustered and request.idempotency_key is not None:
            raise InvalidSubmission("idempotency_key is given; on a Redis Cluster there are none")
        return prepared(
            request,
            self._tokens,
            request_queue=self._request_queue,
            result_queue=self._result_queue,
            payload_keys=self._payload_keys,
            now=self._now(),
        )

    async def _taken(self, chunk: Sequence[Prepared], *, within_s: float) -> Sequence[Submission]:
        if self._clustered:
            await submit_in_steps(self._reached(), chunk)
            return [one.submission for one in chunk]
        said, *seen = await self._answered(chunk, within_s)
        match said:
            case b"OTHER":
                raise KeyTaken(chunk[seen[0] - 1].idempotency_key or "", _text(seen[1]))
            case b"REFUSED":
                raise NotAccepted(f"Redis refuses it: {_text(seen[0])[:200]}", maybe=False)
        taken = [one.submission for one in chunk]
        for place, *stored in seen[0]:
            ours = taken[place - 1]
            known = _stored(stored)
            # Ours where the answer to the script before was lost.
            taken[place - 1] = ours if known.token == ours.token else replace(known, repeated=True)
        return taken

    async def _answered(self, chunk: Sequence[Prepared], within_s: float) -> Any:
        keys, arguments = _as_asked(chunk)
        return await answered(
            chunk, lambda: self._reached().run(SUBMIT, keys, *arguments), within_s=within_s, rng=self._rng
        )

    # ------------------------------------------------------------ waiting

    async def _another_look(self, until: float, lapses_in_s: float | None = None) -> None:
        left_s = until - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise NoResultYet(f"no result in {self._result_queue}")
        await self._arrivals.wait(left_s if lapses_in_s is None else min(left_s, lapses_in_s))

    async def _put_back(self, raw: bytes | None) -> None:
        if raw is not None:
            await self._link.do("RPUSH", self._result_queue, raw)


def _problems(redis_url: object, link: object, *, request_queue: object, result_queue: object) -> tuple[str, ...]:
    problems: list[str] = []
    if (redis_url is None) == (link is None):
        problems.append("redis_url or link: one of them is needed, and only one")
    if redis_url is not None and not callable(redis_url) and not (isinstance(redis_url, str) and redis_url):
        problems.append("redis_url: a URL is expected, or a function that gives one")
    elif isinstance(redis_url, str) and not redis_url.startswith(("redis://", "rediss://", "unix://")):
        problems.append("redis_url: does not begin with redis:// or rediss:// or unix://")
    if link is not None and not isinstance(link, RedisLink | RedisCluster):
        problems.append(f"link: a RedisLink or RedisCluster is expected, got {type(link).__name__}")
    for name, queue in (("request_queue", request_queue), ("result_queue", result_queue)):
        if not isinstance(queue, str) or not usable_id(queue):
            problems.append(f"{name}: the name of a key is expected, got {queue!r}")
    if request_queue == result_queue and request_queue:
        problems.append(f"result_queue: is the request queue, {request_queue!r}: another key is expected")
    return tuple(problems)


def _as_asked(chunk: Sequence[Prepared]) -> tuple[Sequence[str], Sequence[Argument]]:
    """The keys and arguments of `SUBMIT`."""
    keys: list[str] = []
    arguments: list[Argument] = [len(chunk)]
    for one in chunk:
        submission = one.submission
        keys += [submission.request_queue, active_key(submission.id), cancel_key(submission.id)]
        apart = one.payload is not None
        if apart:
            keys.append(payload_key(submission.id, submission.token))
        if one.idempotency_key is not None:
            keys.append(record_key(one.idempotency_key))
        arguments += [
            repr(one.score),
            one.member,
            submission.token,
            submission.deadline,
            submission.deadline + PAYLOAD_GRACE_S if apart else "",
            one.payload or b"",
            one.fingerprint,
            submission.id,
            submission.result_queue,
            submission.deadline + RECORD_GRACE_S,
        ]
    return keys, arguments


def _stored(fields: Sequence[bytes]) -> Submission:
    """What the record of a key holds."""
    request_id, token, request_queue, result_queue, deadline = map(_text, fields)
    return Submission(
        id=request_id,
        token=token,
        request_queue=request_queue,
        result_queue=result_queue,
        deadline=int(deadline),
        repeated=True,
    )


def _text(raw: bytes) -> str:
    return bytes(raw).decode(errors="replace")
