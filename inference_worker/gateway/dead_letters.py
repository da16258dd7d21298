"""Dead letters over HTTP, for operators: listed, shown, replayed, purged. What each of that is, is `dlq`'s.

Bounded: one look at a time, so many letters in one answer, and of bodies only the beginning.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.convertors import Convertor, register_url_convertor

from inference_worker.dlq import Dead, Filter, Letter, Replay, Store, Walk, mark_of, plain, walk
from inference_worker.dlq_reach import AnyLetters, Reach
from inference_worker.errors import TransportLost
from inference_worker.gateway.bodies import Bodies
from inference_worker.gateway.description import JSON, problems
from inference_worker.gateway.problems import Refusal, json_answer
from inference_worker.rmq_dead_letters import LookedAtTooOften, NoDeadLetterQueue

Permit = Callable[[Request], None]
"""Raises a Refusal for who is no operator."""

Act = Callable[[Dead, Letter], Awaitable[None]]

MOST_LETTERS: Final = 1000
"""In one answer."""
USUAL_LETTERS: Final = 100
MOST_SHOWN: Final = 10
MOST_SHOWN_BYTES: Final = 1024 * 1024
"""Of one body."""
MOST_MARKS: Final = 100_000
PATHS: Final = "/v1/dead-letters"

_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Marks = Annotated[list[str], msgspec.Meta(max_length=MOST_MARKS)]


class _Meant(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which letters are meant: the body of `replay` and `purge`; a list's query has the same names."""

    ids: Annotated[list[str], msgspec.Meta(max_length=MOST_LETTERS)] = []
    reason: str | None = None
    tenant: str | None = None
    older_than_s: _Seconds | None = None
    newer_than_s: _Seconds | None = None
    completed: bool = False
    all: bool = False
    """Also those that died in other queues."""
    everything: bool = False
    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST_LETTERS)] = USUAL_LETTERS
    dry_run: bool = False
    marks: _Marks | None = None
    """Only those that an earlier answer named so."""
    skip: _Marks = []
    """None of those."""

    def filter(self, queue: str) -> Filter:
        return Filter(
            queue=None if self.all else queue,
            ids=frozenset(self.ids),
            reason=self.reason,
            tenant=self.tenant,
            older_than_s=self.older_than_s,
            newer_than_s=self.newer_than_s,
            completed=self.completed,
            marks=None if self.marks is None else frozenset(self.marks),
            skip=frozenset(self.skip),
        )

    @property
    def chosen(self) -> bool:
        given = (self.reason, self.tenant, self.older_than_s, self.newer_than_s, self.marks)
        return bool(self.ids) or self.completed or self.everything or any(one is not None for one in given)


class _Desk:
    """What the routes work on."""

    def __init__(self, reach: Reach, queue: str, now: Callable[[], float], stop: asyncio.Event) -> None:
        self._reach = reach
        self._queue = queue
        self._now = now
        self._stop = stop
        self._taken = False

    async def list(self, meant: _Meant) -> dict[str, object]:
        found: list[dict[str, object]] = []

        async def note(dead: Dead, letter: Letter) -> None:
            found.append({**dead.as_json(), "mark": mark_of(letter)})

        seen = await self._walked(meant, note)
        return {"dead_letters": found, **_told(seen)}

    async def show(self, request_id: str) -> dict[str, object]:
        found: list[dict[str, object]] = []

        async def note(dead: Dead, letter: Letter) -> None:
            body = letter.body[:MOST_SHOWN_BYTES].decode(errors="replace")
            cut = len(letter.body) > MOST_SHOWN_BYTES
            headers = {name: plain(value) for name, value in letter.headers.items()}
            found.append({**dead.as_json(), "mark": mark_of(letter), "headers": headers, "body": body, "body_cut": cut})

        seen = await self._walked(_Meant(ids=[request_id], all=True, limit=MOST_SHOWN), note)
        if not found:
            raise Refusal(404, "no_such_dead_letter", "There is no dead letter of this request.")
        return {"dead_letters": found, **_told(seen)}

    async def replay(self, meant: _Meant) -> dict[str, object]:
        said: list[dict[str, object]] = []
        counts: dict[str, int] = {}

        async def run(letters: AnyLetters, store: Store) -> Walk:
            put_back = Replay(
                letters=letters, store=store, now=self._now, stop=self._stop, rate=0, dry_run=meant.dry_run
            )

            async def one(dead: Dead, letter: Letter) -> None:
                word, why = await put_back(dead, letter)
                counts[word] = counts.get(word, 0) + 1
                said.append({"request_id": dead.request_id, "outcome": word, "why": why, "mark": mark_of(letter)})

            return await self._walk(letters, store, meant, one)

        seen = await self._session(run)
        return {"outcomes": counts, "letters": said, **_told(seen)}

    async def purge(self, meant: _Meant) -> dict[str, object]:
        said: list[dict[str, object]] = []

        async def run(letters: AnyLetters, store: Store) -> Walk:
            async def one(dead: Dead, letter: Letter) -> None:
                if not meant.dry_run:
                    await letters.take_away(letter)
                word = "would purge" if meant.dry_run else "purged"
                said.append({"request_id": dead.request_id, "outcome": word, "why": "", "mark": mark_of(letter)})

            return await self._walk(letters, store, meant, one)

        seen = await self._session(run)
        return {"outcomes": {str(said[0]["outcome"]): len(said)} if said else {}, "letters": said, **_told(seen)}

    async def _walked(self, meant: _Meant, act: Act) -> Walk:
        return await self._session(lambda letters, store: self._walk(letters, store, meant, act))

    async def _walk(self, letters: AnyLetters, store: Store, meant: _Meant, act: Act) -> Walk:
        return await walk(
            letters, store, meant.filter(self._queue), act, now=self._now, stop=self._stop, limit=meant.limit
        )

    async def _session(self, run: Callable[[AnyLetters, Store], Awaitable[Walk]]) -> Walk:
        """One at a time: over RabbitMQ a look holds what it has looked at, in memory too."""
        if self._taken:
            raise Refusal(503, "busy", "Somebody else looks at the dead letters just now.", retry_after_s=1)
        self._taken = True
        try:
            async with self._reach() as (letters, store):
                return await run(letters, store)
        except TransportLost as exc:
            raise Refusal(503, "queue_unavailable", "The broker cannot be reached.", because=str(exc)) from exc
        except (NoDeadLetterQueue, LookedAtTooOften) as exc:
            raise Refusal(409, "cannot_look", str(exc)) from exc
        finally:
            self._taken = False


class _LetterId(Convertor[str]):
    """A part of a path that is none of the other routes' names: what a path allows must not depend on that."""

    regex = "(?!(?:replay|purge)$)[^/]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("letter", _LetterId())


def routes(
    web: FastAPI,
    reach: Reach,
    permit: Permit,
    bodies: Bodies,
    *,
    queue: str,
    now: Callable[[], float],
    stop: asyncio.Event,
) -> None:
    """Mount all four. `queue` is whose letters are meant unless `all` is said; `stop` ends a long walk early.

    `StoreUnavailable` passes through, for the gateway's own handler.
    """
    desk = _Desk(reach, queue, now, stop)

    @web.get(PATHS, tags=["dead letters"], **_LIST)
    async def list_dead_letters(request: Request) -> Response:
        """What is dead, and why: the oldest first."""
        permit(request)
        return json_answer(await desk.list(_of_query(request)))

    # `?id=` finds those whose request is called like one of the two below.
    @web.get(PATHS + "/{request_id:letter}", tags=["dead letters"], **_SHOW)
    async def show_dead_letters(request_id: str, request: Request) -> Response:
        """All dead letters of a request, each with its headers and its body."""
        permit(request)
        return json_answer(await desk.show(request_id))

    @web.post(PATHS + "/replay", tags=["dead letters"], **_REPLAY)
    async def replay(request: Request) -> Response:
        """Put dead letters back into the queue, as new. A request with a completed result, or that runs, is not."""
        permit(request)
        async with bodies.json(request) as body:
            meant = _of_body(body)
        return json_answer(await desk.replay(meant))

    @web.post(PATHS + "/purge", tags=["dead letters"], **_PURGE)
    async def purge(request: Request) -> Response:
        """Remove dead letters for good. `dry_run` first, and its marks then, remove what was looked at and no more."""
        permit(request)
        async with bodies.json(request) as body:
            meant = _of_body(body)
        return json_answer(await desk.purge(meant))


def _told(seen: Walk) -> dict[str, object]:
    return {"looked_at": seen.looked_at, "matched": seen.matched, "more": seen.more, "store_silent": seen.store_silent}


# ---------------------------------------------------------------- reading


def _of_body(body: bytes) -> _Meant:
    try:
        meant = msgspec.json.decode(body, type=_Meant)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise Refusal(422, "invalid_request", f"The body says none of what is accepted here: {exc}.") from exc
    if not meant.chosen:
        detail = "Say which: ids, reason, tenant, older_than_s, newer_than_s, completed, marks, or everything: true."
        raise Refusal(422, "nothing_chosen", detail)
    return meant


def _of_query(request: Request) -> _Meant:
    query = request.query_params
    given: dict[str, object] = {"ids": query.getlist("id")}
    for name in ("reason", "tenant"):
        if name in query:
            given[name] = query[name]
    for name in ("older_than_s", "newer_than_s"):
        if name in query:
            given[name] = _number(name, query[name])
    for name in ("completed", "all"):
        if name in query:
            if query[name] not in ("true", "false"):
                raise Refusal(422, "invalid_request", f"{name} must be true or false.")
            given[name] = query[name] == "true"
    if "limit" in query:
        text = query["limit"]
        given["limit"] = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    try:
        return msgspec.convert(given, type=_Meant)
    except msgspec.ValidationError as exc:
        raise Refusal(422, "invalid_request", f"The query says none of what is accepted here: {exc}.") from exc


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise Refusal(422, "invalid_request", f"{name} must be a number of seconds.")
    return value


# ---------------------------------------------------------------- description

_EXAMPLE: Final[Mapping[str, object]] = {
    "request_id": "5f2b8c0e9a4d4c1f8b7e6a5d",
    "queue": "inference:jobs",
    "reason": "retries_exhausted",
    "detail": "503: the engine is overloaded",
    "attempts": 3,
    "status_code": 500,
    "died_at": 1764446400.25,
    "result": "failed",
    "tenant": "acme",
    "endpoint": None,
    "received_at": 1764446390.1,
    "timeout_s": 60.0,
    "message_id": "5f2b8c0e9a4d4c1f8b7e6a5d",
    "size_bytes": 143,
    "mark": "6b1e0c5b0e9f4a7d8c3b2a1908f7e6d5",
}
_SEEN: Final[Mapping[str, object]] = {"looked_at": 1, "matched": 1, "more": False, "store_silent": ""}
_DONE: Final[Mapping[str, object]] = {
    "outcomes": {"replayed": 1},
    "letters": [{"request_id": _EXAMPLE["request_id"], "outcome": "replayed", "why": "", "mark": _EXAMPLE["mark"]}],
    **_SEEN,
}


def _answers(description: str, example: Mapping[str, object], *refusals: int) -> dict[int | str, dict[str, Any]]:
    told = {"description": description, "content": {JSON: {"schema": {"type": "object"}, "example": example}}}
    return {200: told, **problems(*refusals)}


def _query(name: str, description: str, schema: Mapping[str, object]) -> dict[str, object]:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


_TEXT: Final[Mapping[str, object]] = {"type": "string"}
_AGE: Final[Mapping[str, object]] = {"type": "number", "minimum": 0}
_FLAG: Final[Mapping[str, object]] = {"type": "boolean"}
_MOST: Final[Mapping[str, object]] = {
    "type": "integer",
    "minimum": 1,
    "maximum": MOST_LETTERS,
    "default": USUAL_LETTERS,
}
_FILTERS: Final[Mapping[str, Mapping[str, object]]] = {
    "ids": {"type": "array", "items": _TEXT, "maxItems": MOST_LETTERS},
    "reason": {"type": ["string", "null"]},
    "tenant": {"type": ["string", "null"]},
    "older_than_s": {"type": ["number", "null"], "minimum": 0},
    "newer_than_s": {"type": ["number", "null"], "minimum": 0},
    "completed": _FLAG,
    "all": _FLAG,
    "everything": {**_FLAG, "description": "Where no other choice is made."},
    "limit": _MOST,
    "dry_run": {**_FLAG, "description": "Say what would be done, and do nothing."},
    "marks": {"type": ["array", "null"], "items": _TEXT, "description": "Only those that an answer marked so."},
    "skip": {"type": "array", "items": _TEXT, "description": "None of those."},
}
_CHOICES: Final = [
    {"required": [name], "properties": {name: chosen}}
    for name, chosen in {
        "ids": {"type": "array", "minItems": 1},
        "reason": {"type": "string"},
        "tenant": {"type": "string"},
        "older_than_s": {"type": "number"},
        "newer_than_s": {"type": "number"},
        "completed": {"const": True},
        "everything": {"const": True},
        "marks": {"type": "array"},
    }.items()
]
"""One of them says which letters are meant."""

_BODY: Final[Mapping[str, object]] = {
    "requestBody": {
        "required": True,
        "content": {
            JSON: {
                "schema": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": _FILTERS,
                    "anyOf": _CHOICES,
                },
                "example": {"reason": "retries_exhausted", "limit": 100},
            }
        },
    }
}
_LIST: Final[dict[str, Any]] = {
    "responses": _answers("Dead letters.", {"dead_letters": [_EXAMPLE], **_SEEN}, 401, 403, 409, 422, 503),
    "openapi_extra": {
        "parameters": [
            _query("id", "Of this request; may be said more than once.", _TEXT),
            _query("reason", "For example retries_exhausted, poison, invalid_request.", _TEXT),
            _query("tenant", "Of this tenant.", _TEXT),
            _query("older_than_s", "Dead for longer.", _AGE),
            _query("newer_than_s", "Dead for at most so long.", _AGE),
            _query("completed", "Whose request has a completed result by now.", _FLAG),
            _query("all", "Also those that died in other queues.", _FLAG),
            _query("limit", "At most so many.", _MOST),
        ]
    },
}
_SHOWN: Final[Mapping[str, object]] = {**_EXAMPLE, "headers": {}, "body": "{…}", "body_cut": False}
_SHOW: Final[dict[str, Any]] = {
    "responses": _answers("What is dead of it.", {"dead_letters": [_SHOWN], **_SEEN}, 401, 403, 404, 409, 503)
}
_REPLAY: Final[dict[str, Any]] = {
    "responses": _answers("What became of each.", _DONE, 401, 403, 408, 409, 413, 415, 422, 503),
    "openapi_extra": _BODY,
}
_PURGE: Final[dict[str, Any]] = {
    "responses": _answers("What became of each.", _DONE, 401, 403, 408, 409, 413, 415, 422, 503),
    "openapi_extra": _BODY,
}
