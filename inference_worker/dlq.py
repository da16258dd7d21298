"""The dead letters: what each one is, which are meant, and how one is put back or removed.

A replay is a new submission: the failed result and the claim go, a confirmed copy follows, then the letter is taken
away, in this order, or all in one step; after a stop at any point the letter is there or its copy is.
Not here: what is printed (`dlq_command`).
"""

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Generic, Literal, Protocol, TypeVar

import msgspec

from inference_worker.errors import StoreUnavailable
from inference_worker.llmd_renewed import allowed_s, envelope_in, renewed_envelope, submitted_at
from inference_worker.messages import LONGEST_TIMEOUT_S, KnownReply, usable_id
from inference_worker.results.redis import ReplayRefused
from inference_worker.rmq_dead_letters import NotPutBack
from inference_worker.timing import stopped_within

MOST_LOOKED_AT: Final = 100_000
"""Letters held at once by one command; what lies beyond them is not looked at."""


class Letter(Protocol):
    """A dead letter: `rmq_dead_letters.Letter`, `stream_dead_letters.StreamLetter`, also of a sorted set."""

    @property
    def body(self) -> bytes: ...
    @property
    def headers(self) -> Mapping[str, object]: ...
    @property
    def deaths(self) -> Sequence[Mapping[str, object]]: ...
    @property
    def origin(self) -> str | None: ...
    @property
    def message_id(self) -> str | None: ...


L = TypeVar("L", bound=Letter)


class Letters(Protocol[L]):
    """The queue of them: `rmq_dead_letters.DeadLetters`, `stream_dead_letters.StreamDeadLetters`."""

    @property
    def at_once(self) -> bool:
        """Whether `put_back` also makes room for the new run and takes the letter away, in one step."""

    @property
    def ready(self) -> int: ...
    async def next(self) -> L | None: ...
    async def has_queue(self, name: str) -> bool: ...
    async def put_back(self, letter: L, body: bytes, queue: str) -> "NotReplayed | None": ...
    async def take_away(self, letter: L) -> None: ...


class Store(Protocol):
    """What the result store knows: `results.redis.RedisStore`."""

    async def known(self, request_id: str) -> KnownReply | None: ...
    async def dead_note(self, request_id: str) -> bytes | None: ...
    async def make_room(self, request_id: str, deadline: float) -> ReplayRefused | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """What is known of one dead letter, from the letter, from the worker's note, and from the result."""

    request_id: str | None
    queue: str | None
    """Where it died."""
    reason: str
    detail: str = ""
    attempts: int | None = None
    """How often it was tried."""
    status_code: int | None = None
    """The last one."""
    died_at: float | None = None
    result: str | None = None
    """The status of the result that is stored; None where none is."""
    tenant: str | None = None
    endpoint: str | None = None
    received_at: float | None = None
    timeout_s: float | None = None
    message_id: str | None = None
    size_bytes: int = 0
    store_silent: str = ""
    """Why Redis could not be asked, if it could not."""

    def as_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "store_silent"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which letters are meant; what is None does not matter."""

    queue: str | None
    """Only what died here; None for all deployments that share the queue."""
    ids: frozenset[str] = frozenset()
    reason: str | None = None
    tenant: str | None = None
    older_than_s: float | None = None
    newer_than_s: float | None = None
    completed: bool = False
    """Only letters whose request has a completed result by now."""
    marks: frozenset[str] | None = None
    """Only those with one of these marks."""
    skip: frozenset[str] = frozenset()
    """None with one of these."""

    def fits_letter(self, letter: Letter, seen: "_Body") -> bool:
        """What can be told without the store."""
        if self.queue is not None and not _died_in(letter, self.queue):
            return False
        request_id = seen.request_id or letter.message_id
        if self.ids and request_id not in self.ids:
            return False
        if (self.marks is not None or self.skip) and not self._fits_mark(mark_of(letter)):
            return False
        return self.tenant is None or seen.tenant == self.tenant

    def _fits_mark(self, mark: str) -> bool:
        return mark not in self.skip and (self.marks is None or mark in self.marks)

    def fits(self, dead: Dead, now: float) -> bool:
        """The rest."""
        if self.reason is not None and dead.reason != self.reason:
            return False
        if self.completed and dead.result != "completed":
            return False
        age_s = None if dead.died_at is None else now - dead.died_at
        if self.older_than_s is not None and (age_s is None or age_s < self.older_than_s):
            return False
        return self.newer_than_s is None or (age_s is not None and age_s <= self.newer_than_s)


@dataclass(slots=True, kw_only=True)
class Walk:
    """What a walk over the queue has seen."""

    looked_at: int = 0
    matched: int = 0
    more: bool = False
    """It stopped before the end of the queue."""
    store_silent: str = ""


async def walk(
    letters: Letters[L],
    store: Store,
    meant: Filter,
    act: Callable[[Dead, L], Awaitable[None]],
    *,
    now: Callable[[], float],
    stop: asyncio.Event,
    limit: int | None,
) -> Walk:
    """Call `act` with each letter that is meant, `limit` of them at most. Letters that come meanwhile are not seen.

    Raises:
        TransportLost, LookedAtTooOften, StoreUnavailable
    """
    seen = Walk()
    while seen.looked_at < letters.ready:
        if stop.is_set() or seen.looked_at >= MOST_LOOKED_AT or (limit is not None and seen.matched >= limit):
            seen.more = True
            break
        letter = await letters.next()
        if letter is None:
            break
        seen.looked_at += 1
        body = _body(letter.body)
        if not meant.fits_letter(letter, body):
            continue
        dead = await describe(letter, body, store)
        seen.store_silent = seen.store_silent or dead.store_silent
        if meant.fits(dead, now()):
            seen.matched += 1
            await act(dead, letter)
    return seen


async def describe(letter: Letter, body: "_Body", store: Store) -> Dead:
    """Put together what is known of a letter; without Redis it is what the letter itself says."""
    request_id = body.request_id if usable_id(body.request_id) else letter.message_id
    note, known, silent = _Note(), None, ""
    if request_id is not None and usable_id(request_id):
        try:
            note = _note(await store.dead_note(body.stored_as or request_id))
            known = await store.known(body.stored_as or request_id)
        except StoreUnavailable as exc:
            silent = str(exc)
    failed = known if known is not None and known.status == "failed" else None
    retries = _whole(letter.headers.get("x-retry-count"))
    attempts = _whole(letter.headers.get("x-dead-attempts"))
    if attempts is None:
        attempts = note.attempts
    if attempts is None and retries is not None:
        attempts = retries + 1
    status = _whole(letter.headers.get("x-dead-status")) or note.status_code
    said = letter.headers.get("x-dead-reason") or note.reason or (failed.error_code if failed is not None else None)
    died_at = _died_at(letter)
    return Dead(
        request_id=request_id,
        queue=letter.origin,
        reason=str(said or _broker_reason(letter)),
        detail=note.detail or str(letter.headers.get("x-dead-detail") or ""),
        attempts=attempts,
        status_code=status or (failed.status_code if failed is not None else None),
        died_at=died_at if died_at is not None else note.dead_at,
        result=None if known is None else known.status,
        tenant=body.tenant,
        endpoint=body.endpoint,
        received_at=body.received_at,
        timeout_s=body.timeout_s,
        message_id=letter.message_id,
        size_bytes=len(letter.body),
        store_silent=silent,
    )


# ---------------------------------------------------------------- replay

NotReplayed = Literal["completed", "running", "gone"]
Replayed = Literal[
    "replayed", "would replay", "completed", "running", "gone", "unreadable", "no queue", "not put back", "again"
]
WHY: Final[Mapping[NotReplayed, str]] = {
    "completed": "the request has a completed result",
    "running": "the request is running now",
    "gone": "somebody else has put it back or removed it",
}


@dataclass(slots=True, kw_only=True)
class Replay(Generic[L]):
    """Puts letters back, so many a second."""

    letters: Letters[L]
    store: Store
    now: Callable[[], float]
    stop: asyncio.Event
    rate: float
    """Letters a second; 0 for as fast as it goes."""
    dry_run: bool = False
    outcomes: dict[Replayed, int] = field(default_factory=dict)
    _queues: dict[str, bool] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)

    async def __call__(self, dead: Dead, letter: L) -> tuple[Replayed, str]:
        """Put one back; what became of it, in a word and in words.

        Raises:
            TransportLost: the letter may be held no more, or taken away; nothing is lost.
            StoreUnavailable: nothing was done that cannot be done again.
        """
        word, why = await self._put_back(dead, letter)
        self.outcomes[word] = self.outcomes.get(word, 0) + 1
        if word == "replayed" and self.rate > 0:
            await stopped_within(self.stop, 1 / self.rate)
        return word, why

    async def _put_back(self, dead: Dead, letter: L) -> tuple[Replayed, str]:
        now = self.now()
        request_id, body = dead.request_id, renewed(letter.body, now)
        if body is None or request_id is None or _body(letter.body).request_id != request_id:
            return "unreadable", "it cannot be read as a request with a usable id, and would be refused again"
        if request_id in self._done:
            return "again", "another letter of the same request was just replayed"
        queue = letter.origin
        if queue is None or not await self._exists(queue):
            return "no queue", f"the queue that it died in, {queue or 'which it does not name'}, does not exist"
        if dead.result == "completed":
            return "completed", WHY["completed"]
        if self.dry_run:
            self._done.add(request_id)
            return "would replay", ""
        refused: NotReplayed | None = None
        if not self.letters.at_once:
            refused = await self.store.make_room(request_id, now + min(dead.timeout_s or 0.0, LONGEST_TIMEOUT_S))
        try:
            if refused is None:
                refused = await self.letters.put_back(letter, body, queue)
        except NotPutBack as exc:
            return "not put back", f"{exc}; the letter is still here, replay it again"
        if refused is not None:
            return refused, WHY[refused]
        self._done.add(request_id)
        if not self.letters.at_once:
            await self.letters.take_away(letter)
        return "replayed", ""

    async def _exists(self, queue: str) -> bool:
        if queue not in self._queues:
            self._queues[queue] = await self.letters.has_queue(queue)
        return self._queues[queue]


def renewed(body: bytes, now: float) -> bytes | None:
    """The body as a new request, all that its caller said as the bytes that came; None where it is no object.

    Ours has a new `received_at`, an envelope of llm-d-async a new deadline and token.
    """
    if (envelope := envelope_in(body)) is not None:
        return renewed_envelope(envelope, now, secrets.token_hex(16))
    try:
        body.decode()
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    fields["received_at"] = msgspec.Raw(msgspec.json.encode(now))
    return msgspec.json.encode(fields)


def mark_of(letter: Letter) -> str:
    """What a letter is recognised by from one walk to the next."""
    return hashlib.blake2b(letter.body + (letter.message_id or "").encode(), digest_size=16).hexdigest()


def plain(value: object) -> object:
    """A header as JSON can have it."""
    match value:
        case dict():
            return {str(name): plain(one) for name, one in value.items()}
        case list():
            return [plain(one) for one in value]
        case datetime():
            return value.isoformat()
        case str() | int() | float() | None:
            return value
        case _:
            return str(value)


# ---------------------------------------------------------------- reading a letter


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    request_id: str | None = None
    tenant: str | None = None
    endpoint: str | None = None
    received_at: float | None = None
    timeout_s: float | None = None
    stored_as: str | None = None
    """What its result is known by, where that is not its id."""


class _Note(msgspec.Struct):
    reason: str | None = None
    detail: str = ""
    attempts: int | None = None
    status_code: int | None = None
    dead_at: float | None = None


def _body(raw: bytes) -> _Body:
    if (envelope := envelope_in(raw)) is not None:
        return _Body(
            request_id=envelope.request.id,
            endpoint=envelope.request.endpoint or None,
            received_at=submitted_at(envelope),
            timeout_s=allowed_s(envelope),
            stored_as=envelope.generation,
        )
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return _Body()

    def said(name: str) -> object:
        try:
            return msgspec.json.decode(fields[name]) if name in fields else None
        except (msgspec.MsgspecError, RecursionError):
            return None

    return _Body(
        request_id=_text(said("request_id")),
        tenant=_text(said("tenant")),
        endpoint=_text(said("endpoint")),
        received_at=_seconds(said("received_at")),
        timeout_s=_seconds(said("timeout_s")),
    )


def _note(raw: bytes | None) -> _Note:
    try:
        return _Note() if raw is None else msgspec.json.decode(raw, type=_Note)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _Note()


def _died_in(letter: Letter, queue: str) -> bool:
    """A delayed retry died in its waiting queue, on the way back to the request queue."""
    queues = {str(death.get("queue")) for death in letter.deaths} | {letter.origin}
    return queue in queues


def _broker_reason(letter: Letter) -> str:
    """`rejected`, `delivery_limit`, `maxlen`, `expired`: why the broker moved it."""
    deaths = letter.deaths
    return str(deaths[0].get("reason", "unknown")) if deaths else "unknown"


def _died_at(letter: Letter) -> float | None:
    times: Sequence[Mapping[str, object]] = letter.deaths
    when = times[0].get("time") if times else None
    if isinstance(when, datetime):
        return when.timestamp()
    return _seconds(when)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
