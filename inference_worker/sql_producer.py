"""A producer for queues in Postgres (the transport `sql`): submit, cancel, and take results by their route.

The same requests, submissions and results as `producer` has for sorted sets of Redis; tables are in `docs/sql.md`.
"""

import asyncio
import math
import random
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from inference_worker.errors import (
    ConfigurationError,
    KeyTaken,
    LeaseLost,
    NoResultYet,
    NotAccepted,
    StatementRefused,
    StoreUnavailable,
    UnreadableResult,
)
from inference_worker.messages import usable_id
from inference_worker.producer import Depth, Request, Result, Submission
from inference_worker.producer_leases import REMEMBERED_S, Lease, LeasedResult
from inference_worker.producer_putting import Returning, answered, put, put_all
from inference_worker.producer_requests import RECORD_GRACE_S, Prepared, Tokens, prepared
from inference_worker.producer_results import read_result
from inference_worker.sql_link import ANSWER_S, SqlTls
from inference_worker.sql_place import SqlPlace, route_channel, sql_place
from inference_worker.timing import first_of, quietly

__all__ = ["Depth", "LeasedResult", "Request", "Result", "SqlProducer", "SqlTls", "Submission"]

REQUEST_QUEUE: Final = "request-sql"
SUBMIT_S: Final = 30.0
LEASE_S: Final = 300.0
LOOK_S: Final = 1.0
"""How often it is looked for results, told or not."""

WANT_S: Final = 60.0
MOST_AT_ONCE: Final = 1000
MOST_BYTES: Final = 8 * 1024 * 1024
CONNECTIONS: Final = 4
KEY_TAKEN: Final = "IW001"


class SqlProducer:
    """`async with SqlProducer(url, result_queue="results") as producer:`. For any number of tasks.

    `sql_url` may be a function, which is asked again at each connection. A `place` that is given instead is used, and
    left open.
    """

    def __init__(
        self,
        sql_url: str | Callable[[], str] | None = None,
        *,
        result_queue: str,
        request_queue: str = REQUEST_QUEUE,
        place: SqlPlace | None = None,
        tls: SqlTls | None = None,
        name: str = "producer",
        most_connections: int = CONNECTIONS,
        now: Callable[[], float] = time.time,
    ) -> None:
        problems = [
            f"{name}: a name of 1 to 512 bytes is expected, got {queue!r}"
            for name, queue in (("request_queue", request_queue), ("result_queue", result_queue))
            if not usable_id(queue)
        ]
        if (sql_url is None) == (place is None):
            problems.append("sql_url or place: one of them is needed, and only one")
        if problems:
            raise ConfigurationError(tuple(problems))
        self._url: Callable[[], str] = sql_url if callable(sql_url) else lambda: str(sql_url)
        self._given = place
        self._tls = tls or SqlTls()
        self._name = f"inference-worker/{name}"
        self._most_connections = most_connections
        self._request_queue = request_queue
        self._result_queue = result_queue
        self._now = now
        self._rng = random.Random()
        self._tokens = Tokens()
        self._place: SqlPlace | None = None
        self._open: AsyncExitStack | None = None
        self._arrivals: _Arrivals | None = None
        self._returning = Returning()

    # ------------------------------------------------------------ requests

    async def submit(self, request: Request, *, within_s: float = SUBMIT_S) -> Submission:
        """Put a request into its queue.

        Where nobody answers, one with an idempotency key is tried again until `within_s` is over, and one without is
        not: it may be there.

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
        rows = await self._reached().link.fetch(
            "select request_id, token, queue, route, deadline from iw_keys"
            " where key = $1 and expires > clock_timestamp()",
            idempotency_key,
        )
        return _known(rows[0]) if rows else None

    async def cancel(self, which: str | Submission | Iterable[str | Submission]) -> Sequence[str]:
        """Mark requests as cancelled: who has not begun one will not, and answers with `CANCELLED`.

        An id means whichever submission is the latest under it, a `Submission` only itself. Returns the ids of those
        that were marked; the others have ended, or never were.

        Raises:
            StoreUnavailable: it may have been done; asking again does no harm.
        """
        all_of_them = [which] if isinstance(which, str | Submission) else list(which)
        meant = [(one.id, one.token) if isinstance(one, Submission) else (one, "") for one in all_of_them]
        meant = [(request_id, token) for request_id, token in meant if usable_id(request_id)]
        marked: list[str] = []
        for start in range(0, len(meant), MOST_AT_ONCE):
            some = meant[start : start + MOST_AT_ONCE]
            rows = await self._reached().link.fetch(
                "select place from iw1_cancel($1, $2)",
                [request_id for request_id, _ in some],
                [token for _, token in some],
            )
            marked.extend(some[place - 1][0] for place in sorted(row[0] for row in rows))
        return marked

    # ------------------------------------------------------------ results

    async def get_result(self, within_s: float) -> Result:
        """Take the oldest result off the route, waiting for one for up to `within_s` seconds.

        It is gone from Postgres then: who dies before it is safe has lost it, which `receive` is for.

        Raises:
            NoResultYet: there was none.
            UnreadableResult: what was taken is no result.
            StoreUnavailable: nobody could be asked. A result that was on its way is lost.
        """
        until = asyncio.get_running_loop().time() + within_s
        while True:
            if rows := await self._returning.ask(self._popped(1), self._put_back):
                return read_result(rows[0][1])
            await self._another_look(until)

    async def get_results(self, limit: int) -> Sequence[Result]:
        """Take up to `limit` results off the route, the oldest first; without any, at once none.

        Raises:
            UnreadableResult: one of them is no result; it is gone, and the others lie where they lay.
            StoreUnavailable: as `get_result`.
        """
        rows = await self._returning.ask(self._popped(limit), self._put_back)
        results = []
        for place, row in enumerate(rows):
            try:
                results.append(read_result(row[1]))
            except UnreadableResult:
                await self._put_back([*rows[:place], *rows[place + 1 :]])
                raise
        return results

    async def receive(self, within_s: float, lease_s: float = LEASE_S) -> LeasedResult:
        """Lease the oldest result, waiting for one for up to `within_s` seconds. Comes again unless acknowledged.

        Raises:
            NoResultYet: there was none.
            UnreadableResult: what lies there is no result. It is leased, too, and does not hold up what is behind it.
            StoreUnavailable: nobody could be asked. A result that was on its way comes again once the lease has lapsed.
        """
        until = asyncio.get_running_loop().time() + within_s
        leases = _SqlLeases(self._reached(), self._result_queue)
        while True:
            owner = secrets.token_hex(16)
            row = await self._returning.ask(leases.take(owner, _seconds(lease_s)), leases.give_back)
            if row["seq"] is not None:
                return leases.leased(row, Lease(name=str(row["seq"]), owner=owner, lease_s=lease_s))
            await self._another_look(until, row["lapses_s"])

    # ------------------------------------------------------------ queues

    async def depth(self) -> Depth:
        """Count what lies there.

        Raises:
            StoreUnavailable
        """
        requests, results, leased = await self._reached().link.row(
            "select (select count(*) from iw_requests where queue = $1 and owner is null),"
            " (select count(*) from iw_results where route = $2 and owner is null),"
            " (select count(*) from iw_results where route = $2 and owner is not null)",
            self._request_queue,
            self._result_queue,
        )
        return Depth(requests=requests, results=results, leased=leased)

    async def clear(self, *, requests: bool = False, results: bool = False) -> None:
        """Throw away all requests that nobody has taken, or all results, the leased ones included: whosever they are.

        Raises:
            StoreUnavailable
        """
        if not requests and not results:
            raise ValueError("say what to clear: requests=True, results=True, or both")
        link = self._reached().link
        if requests:
            await link.fetch("delete from iw_requests where queue = $1 and owner is null", self._request_queue)
        if results:
            await link.fetch("delete from iw_results where route = $1", self._result_queue)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            place = self._given
            if place is None:
                place = await opened.enter_async_context(
                    sql_place(
                        self._url,
                        client_name=self._name,
                        tls=self._tls,
                        most_connections=self._most_connections,
                        sweeps=False,
                    )
                )
            await place.link.fetch("select 1")
            opened.push_async_callback(self._returning.end)
            self._arrivals = await opened.enter_async_context(_arrivals(place, self._result_queue))
            self._place = place
            self._open = opened.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened, self._open, self._place = self._open, None, None
        if opened is not None:
            await opened.aclose()

    def _reached(self) -> SqlPlace:
        if self._place is None:
            raise RuntimeError("the producer is not open: use it inside `async with`")
        return self._place

    # ------------------------------------------------------------ submitting

    def _prepared(self, request: Request) -> Prepared:
        return prepared(
            request,
            self._tokens,
            request_queue=self._request_queue,
            result_queue=self._result_queue,
            payload_keys=True,
            now=self._now(),
        )

    async def _taken(self, chunk: Sequence[Prepared], *, within_s: float) -> Sequence[Submission]:
        taken = [one.submission for one in chunk]
        for row in await answered(chunk, partial(self._submitted, chunk), within_s=within_s, rng=self._rng):
            ours, known = taken[row["place"] - 1], _known([row[name] for name in _FIELDS])
            # Ours where the answer to the statement before was lost.
            taken[row["place"] - 1] = ours if known.token == ours.token else known
        return taken

    async def _submitted(self, chunk: Sequence[Prepared]) -> Sequence[Any]:
        try:
            return await self._reached().link.fetch(
                "select * from iw1_submit($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
                [one.submission.request_queue for one in chunk],
                [one.submission.id for one in chunk],
                [one.submission.token for one in chunk],
                [one.submission.deadline for one in chunk],
                [one.member for one in chunk],
                [one.payload for one in chunk],
                [one.submission.result_queue for one in chunk],
                [one.idempotency_key for one in chunk],
                [one.fingerprint for one in chunk],
                float(RECORD_GRACE_S),
            )
        except StatementRefused as exc:
            if exc.code == KEY_TAKEN:
                place, _, known = str(exc).rpartition(": ")[2].partition(":")
                raise KeyTaken(chunk[int(place) - 1].idempotency_key or "", known) from exc
            raise NotAccepted(f"Postgres refuses it: {exc}", maybe=False) from exc

    # ------------------------------------------------------------ waiting

    async def _another_look(self, until: float, lapses_in_s: float | None = None) -> None:
        left_s = until - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise NoResultYet(f"no result on {self._result_queue}")
        assert self._arrivals is not None
        await self._arrivals.wait(min(left_s, LOOK_S if lapses_in_s is None else max(lapses_in_s, 0.001)))

    async def _popped(self, limit: int) -> Sequence[Any]:
        rows: Sequence[Any] = await self._reached().link.fetch(
            "select * from iw1_pop($1, $2)", self._result_queue, limit
        )
        return sorted(rows, key=lambda row: int(row["seq"]))

    async def _put_back(self, rows: Sequence[Any]) -> None:
        """To where they lay."""
        if rows and (place := self._given or self._place) is not None:
            await place.link.fetch(
                "insert into iw_results (seq, route, body) overriding system value"
                " select n.seq, $1, n.body from unnest($2::bigint[], $3::bytea[]) n(seq, body)",
                self._result_queue,
                [row["seq"] for row in rows],
                [row["body"] for row in rows],
            )


class _SqlLeases:
    """The leases on the results of one route. See `producer_leases.LeaseBook`."""

    def __init__(self, place: SqlPlace, route: str) -> None:
        self._link = place.link
        self._route = route

    async def take(self, owner: str, lease_s: float) -> Any:
        """The oldest result, with its `seq`; None there where there is none."""
        return await self._link.row("select *, $2 as owner from iw1_receive($1, $2, $3)", self._route, owner, lease_s)

    def leased(self, row: Any, lease: Lease) -> LeasedResult:
        """Raises UnreadableResult."""
        try:
            return LeasedResult(result=read_result(row["body"]), lease=lease, leases=self)
        except UnreadableResult as exc:
            raise UnreadableResult(str(exc), row["body"], lambda: self.acknowledge(lease)) from exc

    async def renew(self, lease: Lease, lease_s: float) -> None:
        (done,) = await self._link.row(
            "select iw1_result_renew($1, $2, $3)", int(lease.name), lease.owner, _seconds(lease_s)
        )
        if not done:
            raise LeaseLost("the lease on the result has lapsed")

    async def acknowledge(self, lease: Lease) -> None:
        (done,) = await self._link.row(
            "select iw1_result_ack($1, $2, $3)", int(lease.name), lease.owner, float(REMEMBERED_S)
        )
        if not done:
            raise LeaseLost("the lease on the result has lapsed: it may have been received again")

    async def release(self, lease: Lease) -> None:
        await self._link.fetch("select iw1_result_release($1, $2, $3)", self._route, int(lease.name), lease.owner)

    async def give_back(self, row: Any) -> None:
        """Release what was taken for somebody who is gone."""
        if row["seq"] is not None:
            await self._link.fetch("select iw1_result_release($1, $2, $3)", self._route, row["seq"], row["owner"])


class _Arrivals:
    """Tells those who wait that a result may lie on the route."""

    def __init__(self, place: SqlPlace, channel: str) -> None:
        self._place = place
        self._channel = channel
        self._who = secrets.token_hex(8)
        self._wanted_until = 0.0
        self._waiting: set[asyncio.Event] = set()
        self._hearing = ExitStack()
        """Empty until the first who waits: who only submits needs no connection that listens."""
        self._heard = False

    def told(self, _: str) -> None:
        for event in self._waiting:
            event.set()

    async def wait(self, within_s: float) -> None:
        """Return once a result lies there or `within_s` has passed. May return for nothing, to look once more."""
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            if not self._heard:
                self._heard = True
                self._hearing.enter_context(self._place.ears.hearing(self._channel, self.told))
            if self._wanted_until - loop.time() < WANT_S / 2:
                at = loop.time()
                await self._place.ears.stands(self._channel)
                await self._place.link.fetch("select iw1_want($1, $2, $3)", self._channel, self._who, WANT_S)
                self._wanted_until = at + WANT_S
                return
            await first_of(event, within_s=within_s)
        finally:
            self._waiting.discard(event)

    async def leave(self) -> None:
        self._hearing.close()
        if not self._wanted_until:
            return
        await self._place.link.fetch("delete from iw_waiting where what = $1 and who = $2", self._channel, self._who)


@asynccontextmanager
async def _arrivals(place: SqlPlace, route: str) -> AsyncGenerator[_Arrivals, None]:
    arrivals = _Arrivals(place, route_channel(route))
    try:
        yield arrivals
    finally:
        await quietly(arrivals.leave(), ANSWER_S, StoreUnavailable)


_FIELDS: Final = ("request_id", "token", "queue", "route", "deadline")


def _known(fields: Sequence[Any]) -> Submission:
    """What a key stands for."""
    request_id, token, queue, route, deadline = fields
    return Submission(
        id=request_id, token=token, request_queue=queue, result_queue=route, deadline=deadline, repeated=True
    )


def _seconds(lease_s: float) -> float:
    if not 0 < lease_s < math.inf:
        raise ValueError(f"a lease must last a number of seconds above 0, got {lease_s!r}")
    return max(float(lease_s), 0.001)
