"""Quotas in Postgres (`sql-quota`): what `quota` has in Redis, for processes whose queues are there.

Each admission is a row under a name of its own, so that whatever is repeated after an answer was lost counts once.
Slots belong to a holder, which is this gate for as long as its lease is renewed; a holder that lapses frees them all,
and the gate goes on under another name. Requests of one tenant that ask at the same time share a statement.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

import structlog

from inference_worker.errors import GateFailed, StoreUnavailable
from inference_worker.gates.parameters import Parameters
from inference_worker.gates.permits import Line, OncePermit
from inference_worker.gates.quota import CLASSIFICATION, OVERFLOW, RESERVED, Allowance, value_of
from inference_worker.gates.slots import LEASE_S, MOST_LINES, RENEWALS_IN_A_LEASE
from inference_worker.ports import Admitted, Asked, Feedback, TurnedAway, Verdict
from inference_worker.sql_link import ANSWER_S, Record
from inference_worker.sql_place import SqlPlace
from inference_worker.timing import ended, first_of, quietly

log = structlog.get_logger(__name__)

AGAIN_S: Final = 0.25
"""Until what could not be given back is given back anew."""
CLOSE_S: Final = 2.0
MOST_AT_ONCE: Final = 1000


@dataclass(frozen=True, slots=True, eq=False)
class _Ask:
    """One request that wants to go on."""

    slot: str
    cost: int
    answer: "asyncio.Future[bool]"


class SqlQuota:
    """So many at once, or so many within a window, for each value of an attribute."""

    def __init__(
        self,
        place: SqlPlace | None,
        allowance: Allowance,
        *,
        holder: str,
        at_once: bool,
        lease_s: float = LEASE_S,
    ) -> None:
        """Without a `place` it can be looked at, and not asked."""
        self._place = place
        self._allowance = allowance
        self._name = holder
        self._at_once = at_once
        self._lease_s = lease_s
        self._numbers = count(1)
        self._holder = ""
        """As which slots are taken now; empty before the first, and after a lease that has lapsed."""
        self._asks: dict[str, list[_Ask]] = {}
        """By the value that they are counted on, while its statement runs."""
        self._held: dict[str, str] = {}
        """Values, by our slots."""
        self._over: dict[str, int | None] = {}
        """What is to be put right: slots, with their true cost, or None where nothing is taken any more."""
        self._put_right = asyncio.Event()
        self._doubtful: dict[str, float] = {}
        """Slots that may yet be taken by a statement whose answer was lost, and the loop time at which it is over."""
        self._lines: dict[str, Line] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def budget(self) -> float:
        """See `ports.Gate`: others than this request's tenant may have room."""
        return 1.0

    async def admit(self, asked: Asked) -> Verdict:
        """See `ports.Gate`."""
        value = _counted_on(asked, self._allowance.attribute)
        if value is None:
            return Admitted()
        cost = self._allowance.cost(asked)
        slot = f"{self._name}/{secrets.token_hex(8)}/{next(self._numbers)}"
        try:
            within = await self._ask(value, slot, cost)
        except StoreUnavailable as exc:
            self._undo(slot)
            self._doubtful[slot] = asyncio.get_running_loop().time() + 2 * ANSWER_S
            raise GateFailed(f"the quota cannot be asked: {exc}") from exc
        except BaseException:  # Who asked has gone: what is granted is given back.
            self._undo(slot)
            raise
        asked.labels[CLASSIFICATION] = RESERVED if within else OVERFLOW
        if not within:
            return TurnedAway(because="quota_exhausted") if self._allowance.blocking else Admitted()
        if self._at_once:
            self._held[slot] = value
        return Admitted(permits=(OncePermit(lambda seen: self._ended(slot, cost, seen)),))

    def signal(self, changed: asyncio.Event, asked: Asked) -> bool:
        """See `permits.Signals`: told of slots that this process gives back."""
        value = _counted_on(asked, self._allowance.attribute)
        if value is None or not self._at_once:
            return False
        if len(self._lines) >= MOST_LINES:
            self._lines = {name: line for name, line in self._lines.items() if len(line)}
        self._lines.setdefault(value, Line()).join(changed)
        return True

    async def run(self, until: asyncio.Event) -> None:
        """See `ports.Gate`: renews what is held, and puts right what was counted wrong, also at the end."""
        loop = asyncio.get_running_loop()
        renew_at = loop.time()
        while not until.is_set():
            if self._held and loop.time() >= renew_at:
                renew_at = loop.time() + self._lease_s / RENEWALS_IN_A_LEASE
                await self._renew()
            for slot in [slot for slot, over_at in self._doubtful.items() if loop.time() >= over_at]:
                del self._doubtful[slot]
                self._undo(slot)
            done = await self._correct()
            pause_s = self._lease_s / RENEWALS_IN_A_LEASE if done else AGAIN_S
            waits = (until, self._put_right) if done else (until,)
            await first_of(*waits, within_s=pause_s)
        for task in tuple(self._tasks):
            await ended(task)
        await quietly(self._correct(), CLOSE_S)
        if self._holder and not self._held:
            leaving = self._fetch("delete from iw_quota_holders where holder = $1", self._holder)
            await quietly(leaving, CLOSE_S, StoreUnavailable)

    def closes_at(self) -> str:
        """See `ports.Gate`."""
        allowance = self._allowance
        when = "at once" if self._at_once else f"within {allowance.window_s:g} s"
        what = f"{allowance.limit} {allowance.counts} {when} for each {allowance.attribute}"
        return f"{what}, or what iw_quota_limits says" + ("" if allowance.blocking else "; then it only says overflow")

    # ------------------------------------------------------------ asking

    async def _ask(self, value: str, slot: str, cost: int) -> bool:
        """Those who ask while a statement is under way go together in the next one."""
        ask = _Ask(slot, cost, asyncio.get_running_loop().create_future())
        if value in self._asks:
            self._asks[value].append(ask)
        else:
            self._asks[value] = [ask]
            task = asyncio.create_task(self._serve(value), name="quota in postgres")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await ask.answer

    async def _serve(self, value: str) -> None:
        try:
            while asks := [ask for ask in self._asks[value] if not ask.answer.done()]:
                self._asks[value] = asks[MOST_AT_ONCE:]
                await self._answer(value, asks[:MOST_AT_ONCE])
        finally:
            _fail(self._asks.pop(value), StoreUnavailable("the gate has ended"))

    async def _answer(self, value: str, asks: Sequence[_Ask]) -> None:
        try:
            answers = await self._taken(value, asks)
        except StoreUnavailable as exc:
            _fail(asks, exc)
        except BaseException:
            _fail(asks, StoreUnavailable("the gate has ended"))
            raise
        else:
            for ask, within in zip(asks, answers, strict=True):
                if not ask.answer.done():
                    ask.answer.set_result(within)
                elif within:
                    self._undo(ask.slot)

    async def _taken(self, value: str, asks: Sequence[_Ask]) -> Sequence[bool]:
        allowance = self._allowance
        what = (allowance.key(value), allowance.limits, value, allowance.limit)
        slots = ([ask.slot for ask in asks], [ask.cost for ask in asks])
        if not self._at_once:
            rows = await self._fetch(
                "select iw1_quota_admit($1, $2, $3, $4, $5, $6, $7)", *what, allowance.window_s, *slots
            )
            return [bool(within) for within in rows[0][0]]
        while True:
            if not self._holder:
                self._holder = await self._joined()
            holder = self._holder
            rows = await self._fetch("select iw1_quota_take($1, $2, $3, $4, $5, $6, $7)", *what, holder, *slots)
            if rows[0][0] is not None:
                return [bool(within) for within in rows[0][0]]
            self._lapsed(holder)

    async def _joined(self) -> str:
        """A new holder."""
        holder = f"{self._name}/{secrets.token_hex(8)}"
        await self._fetch(
            "insert into iw_quota_holders values ($1, clock_timestamp() + make_interval(secs => $2))",
            holder,
            self._lease_s,
        )
        return holder

    async def _renew(self) -> None:
        holder = self._holder
        if not holder:
            return
        try:
            rows = await self._fetch(
                "update iw_quota_holders set lease_until = clock_timestamp() + make_interval(secs => $2)"
                " where holder = $1 and lease_until > clock_timestamp() returning holder",
                holder,
                self._lease_s,
            )
        except StoreUnavailable as exc:
            log.warning("the lease on quota slots cannot be renewed", reason=str(exc))
        else:
            if not rows:
                self._lapsed(holder)

    def _lapsed(self, holder: str) -> None:
        """What it held counts no more; requests that run on are not to blame."""
        if self._holder == holder:
            self._holder = ""

    # ------------------------------------------------------------ giving back

    def _ended(self, slot: str, cost: int, seen: Feedback) -> None:
        """Soon, and nobody waits for it."""
        if self._at_once or seen.kind == "not_sent":
            self._undo(slot)
            return
        used = [tokens for tokens in (seen.input_tokens, seen.output_tokens) if tokens is not None]
        if self._allowance.counts == "tokens" and used and sum(used) != cost:
            self._over[slot] = max(sum(used), 1)
            self._put_right.set()

    def _undo(self, slot: str) -> None:
        self._over[slot] = None
        self._put_right.set()

    async def _correct(self) -> bool:
        """Delete slots that are over, and set the costs of others; False where that is to be tried again."""
        self._put_right.clear()
        table = "iw_quota_slots" if self._at_once else "iw_quota_admissions"
        while self._over:
            some = dict(list(self._over.items())[:MOST_AT_ONCE])
            gone = [slot for slot, cost in some.items() if cost is None]
            true = {slot: cost for slot, cost in some.items() if cost is not None}
            try:
                await self._fetch(f"delete from {table} where slot = any($1::text[])", gone)
                if true:
                    await self._fetch(
                        f"update {table} t set cost = n.cost from unnest($1::text[], $2::bigint[]) n(slot, cost)"
                        " where t.slot = n.slot",
                        list(true),
                        list(true.values()),
                    )
            except StoreUnavailable:
                return False
            for slot, cost in some.items():
                if self._over.get(slot, 0) == cost:
                    del self._over[slot]
                if (value := self._held.pop(slot, None)) is not None and value in self._lines:
                    self._lines[value].wake(1)
        return True

    async def _fetch(self, statement: str, *arguments: object) -> Sequence[Record]:
        assert self._place is not None
        return await self._place.link.fetch(statement, *arguments)


def _counted_on(asked: Asked, attribute: str) -> str | None:
    """Whose quota it is; a value that no text of Postgres can be, which a caller may send, by its hash."""
    value = value_of(asked, attribute)
    if value is None or "\0" not in value:
        return value
    return f"sha256-{hashlib.sha256(value.encode(errors='replace')).hexdigest()}"


def _fail(asks: Sequence[_Ask], why: StoreUnavailable) -> None:
    for ask in asks:
        if not ask.answer.done():
            ask.answer.set_exception(why)


def sql_quota(given: Parameters, place: SqlPlace | None, *, holder: Callable[[], str]) -> SqlQuota:
    """`sql-quota`: the parameters of `redis-quota` without an address."""
    at_once = given.choice("mode", ("rate-limit", "concurrency"), "rate-limit") == "concurrency"
    allowance = Allowance(
        limit=given.whole("limit", at_least=1),
        attribute=given.text("attribute", "userid"),
        window_s=given.seconds("window", 60.0, above=0),
        prefix=given.text("prefix", "quota:"),
        counts="tokens" if given.choice("counts", ("requests", "tokens"), "requests") == "tokens" else "requests",
        blocking=given.choice("gating_mode", ("blocking", "classifying"), "blocking") == "blocking",
        limits_key=given.text("limits_key", ""),
    )
    lease_s = given.seconds("lease", LEASE_S, at_least=1)
    given.finish()
    return SqlQuota(place, allowance, holder=holder(), at_once=at_once, lease_s=lease_s)
