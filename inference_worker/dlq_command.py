"""The `dlq` command: lists, shows, replays and purges dead letters, and says what it did."""

import asyncio
import math
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from inference_worker.config.settings import Settings
from inference_worker.dlq import Dead, Filter, Letter, Replay, Store, Walk, mark_of, plain, walk
from inference_worker.dlq_reach import AnyLetters, reach_of
from inference_worker.dlq_remote import MOST_AT_ONCE, RemoteDeadLetters, remote
from inference_worker.dlq_saying import Saying
from inference_worker.errors import ConfigurationError, StoreUnavailable, TransportLost
from inference_worker.rmq_dead_letters import LookedAtTooOften, NoDeadLetterQueue
from inference_worker.timing import stopped_within

OURS: Final = "this queue"
"""Whose letters are meant over HTTP, where the gateway knows the queue's name and we do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DlqOptions:
    """What the command line says."""

    do: Literal["list", "show", "replay", "purge"]
    ids: frozenset[str] = frozenset()
    reason: str | None = None
    tenant: str | None = None
    older_than_s: float | None = None
    newer_than_s: float | None = None
    completed: bool = False
    all_deployments: bool = False
    everything: bool = False
    limit: int | None = None
    json: bool = False
    rate: float = 10.0
    dry_run: bool = False
    yes: bool = False
    url: str | None = None
    """Of a gateway; None for the broker and Redis of the settings."""
    sorted_set: str | None = None
    """A queue in a sorted set of that Redis, in place of the queue of the settings."""
    sql: str | None = None
    """A queue in the Postgres of the settings, in place of the queue of the settings."""

    def filter(self, queue: str) -> Filter:
        return Filter(
            queue=None if self.all_deployments else queue,
            ids=self.ids,
            reason=self.reason,
            tenant=self.tenant,
            older_than_s=self.older_than_s,
            newer_than_s=self.newer_than_s,
            completed=self.completed,
        )

    @property
    def chosen(self) -> bool:
        """Whether something was said about which letters are meant."""
        given = (self.reason, self.tenant, self.older_than_s, self.newer_than_s)
        return bool(self.ids) or self.completed or self.everything or any(one is not None for one in given)


async def run_dlq(settings: Settings, options: DlqOptions, now: Callable[[], float], stop: asyncio.Event) -> int:
    """The command. 0: done; 1: something could not be done, and it was said what.

    Raises:
        ConfigurationError: what was asked for cannot be meant.
    """
    if options.do in ("replay", "purge") and not options.chosen:
        raise ConfigurationError(
            (f"dlq {options.do}: say which: ids, --reason, --tenant, --older-than, --newer-than, or --everything",)
        )
    command: Command
    if options.url is None:
        command = _Direct(settings, options, now, stop)
    else:
        command = _OverHttp(settings, options, options.url, stop)
    try:
        match options.do:
            case "list":
                return await command.list_all()
            case "show":
                return await command.show()
            case "replay":
                return await command.replay()
            case "purge":
                return await command.purge()
    except (TransportLost, StoreUnavailable, LookedAtTooOften) as exc:
        print(f"dlq {options.do}: {_not_asked(exc, options)}{exc}", file=sys.stderr)
        if options.do in ("replay", "purge"):
            print("nothing is lost: what was not put back is still a dead letter", file=sys.stderr)
        return 1
    except NoDeadLetterQueue as exc:
        print(exc, file=sys.stderr)
        return 1


def _not_asked(exc: Exception, options: DlqOptions) -> str:
    """Whose silence it is, and which variable leads there; over HTTP the error says so itself."""
    if options.url is None and isinstance(exc, TransportLost):
        return "RabbitMQ cannot be asked (RABBITMQ_URL): "
    if options.url is None and isinstance(exc, StoreUnavailable):
        where = "Redis cannot be asked (REDIS_URL): "
        return where if options.sql is None else "Postgres cannot be asked (SQL_URL): "
    return ""


class Command(Protocol):
    """The four of them; each returns the exit code."""

    async def list_all(self) -> int: ...
    async def show(self) -> int: ...
    async def replay(self) -> int: ...
    async def purge(self) -> int: ...


class _Direct:
    """Over the broker and Redis."""

    def __init__(self, settings: Settings, options: DlqOptions, now: Callable[[], float], stop: asyncio.Event) -> None:
        self._options = options
        self._now = now
        self._stop = stop
        self._reach = reach_of(settings, now, sorted_set=options.sorted_set, sql=options.sql)
        self._meant = options.filter(options.sorted_set or options.sql or settings.queue)
        source = settings.streams.dead_letters if settings.over_streams else settings.rabbitmq.dlq
        if options.sorted_set is not None:
            source = f"{options.sorted_set}:dead"
        elif options.sql is not None:
            source = f"iw_dead of {options.sql}"
        self._said = Saying(source, stop, as_json=options.json, with_queue=options.all_deployments)

    async def list_all(self) -> int:
        async def note(dead: Dead, _: Letter) -> None:
            self._said.found(dead)

        async with self._reach() as (letters, store):
            seen = await self._walk(letters, store, note)
        self._said.listed(seen)
        return 0

    async def show(self) -> int:
        async def print_one(dead: Dead, letter: Letter) -> None:
            headers = {name: plain(value) for name, value in letter.headers.items()}
            self._said.show({**dead.as_json(), "headers": headers}, letter.body.decode(errors="replace"))

        async with self._reach() as (letters, store):
            seen = await self._walk(letters, store, print_one)
        self._said.say_silent(seen)
        if seen.matched == 0:
            print(self._said.summary(seen), file=sys.stderr)
            return 1
        return 0

    async def replay(self) -> int:
        async with self._reach() as (letters, store):
            put_back = Replay(
                letters=letters,
                store=store,
                now=self._now,
                stop=self._stop,
                rate=self._options.rate,
                dry_run=self._options.dry_run,
            )

            async def one(dead: Dead, letter: Letter) -> None:
                word, why = await put_back(dead, letter)
                self._said.say(dead.request_id, word, why)

            seen = await self._walk(letters, store, one)
        outcomes = {str(word): count for word, count in put_back.outcomes.items()}
        self._said.replayed(outcomes, seen)
        return _replayed_well(self._options, outcomes, seen.matched)

    async def purge(self) -> int:
        """Count, ask, and remove what was counted: a letter that came meanwhile was not asked about."""
        counted: set[str] = set()

        async def count(dead: Dead, letter: Letter) -> None:
            counted.add(mark_of(letter))
            if self._options.dry_run:
                self._said.say(dead.request_id, "would purge", "")

        async with self._reach() as (letters, store):
            seen = await self._walk(letters, store, count)
        if self._options.dry_run or not counted:
            self._said.end(f"{seen.matched} would be purged; {self._said.summary(seen)}", {"would_purge": seen.matched})
            return 0
        if not self._options.yes and not await self._said.agreed(seen):
            print("nothing was purged", file=sys.stderr)
            return 1
        purged = 0

        async with self._reach() as (letters, store):

            async def remove(dead: Dead, letter: Letter) -> None:
                nonlocal purged
                if mark_of(letter) in counted:
                    await letters.take_away(letter)
                    purged += 1
                    self._said.say(dead.request_id, "purged", "")

            await self._walk(letters, store, remove)
        self._said.end(f"{purged} purged", {"purged": purged})
        return 0 if purged == seen.matched else 1

    # ------------------------------------------------------------ reaching, walking

    async def _walk(self, letters: AnyLetters, store: Store, act: Callable[[Dead, Letter], Awaitable[None]]) -> Walk:
        return await walk(
            letters,
            store,
            self._meant,
            act,
            now=self._now,
            stop=self._stop,
            limit=self._options.limit,
        )


class _OverHttp:
    """Over a gateway, in as many questions as it takes."""

    def __init__(self, settings: Settings, options: DlqOptions, url: str, stop: asyncio.Event) -> None:
        self._settings = settings
        self._options = options
        self._url = url
        self._stop = stop
        self._meant = options.filter(OURS)
        self._said = Saying(url, stop, as_json=options.json, with_queue=options.all_deployments)

    async def list_all(self) -> int:
        async with self._gateway() as there:
            found, seen = await there.listed(self._meant, self._options.limit)
        for dead in found:
            self._said.found(dead)
        self._said.listed(seen)
        return 0

    async def show(self) -> int:
        shown = 0
        async with self._gateway() as there:
            ids = sorted(self._options.ids)
            if not ids:
                found, _ = await there.listed(self._meant, self._options.limit)
                ids = list(dict.fromkeys(dead.request_id for dead in found if dead.request_id is not None))
            for request_id in ids:
                for letter in await there.show(request_id):
                    shown += 1
                    self._said.show({**letter, "body": "", "mark": ""}, letter["body"])
        return 0 if shown else 1

    async def replay(self) -> int:
        """So many a second: as many at once, then a pause. What was not put back is not asked for again."""
        outcomes, total, skip = Counter[str](), Walk(), list[str]()
        dry_run, rate = self._options.dry_run, self._options.rate
        at_once = MOST_AT_ONCE if dry_run or rate == 0 else max(1, min(math.ceil(rate), MOST_AT_ONCE))
        async with self._gateway() as there:
            while not self._stop.is_set() and (left := self._left(total.matched)) > 0:
                limit = min(at_once, left)
                done, seen = await there.do("replay", self._meant, limit=limit, dry_run=dry_run, skip=skip)
                for one in done:
                    outcomes[one.outcome] += 1
                    self._said.say(one.request_id, one.outcome, one.why)
                skip += [one.mark for one in done if one.outcome != "replayed"]
                _add(total, seen)
                if not done or not seen.more:
                    break
                if rate > 0 and not dry_run:
                    await stopped_within(self._stop, len(done) / rate)
        self._said.replayed(outcomes, total)
        return _replayed_well(self._options, outcomes, total.matched)

    async def purge(self) -> int:
        """Count, ask, and remove what was counted: a letter that came meanwhile was not asked about."""
        marks, total = list[str](), Walk()
        async with self._gateway() as there:
            while not self._stop.is_set() and (left := self._left(total.matched)) > 0:
                done, seen = await there.do("purge", self._meant, limit=left, dry_run=True, skip=marks)
                marks += [one.mark for one in done]
                _add(total, seen)
                if self._options.dry_run:
                    for one in done:
                        self._said.say(one.request_id, one.outcome, one.why)
                if not done or not seen.more:
                    break
        if self._options.dry_run or not marks:
            said = f"{total.matched} would be purged; {self._said.summary(total)}"
            self._said.end(said, {"would_purge": total.matched})
            return 0
        if not self._options.yes and not await self._said.agreed(total):
            print("nothing was purged", file=sys.stderr)
            return 1
        purged = 0
        async with self._gateway() as there:
            for start in range(0, len(marks), MOST_AT_ONCE):
                some = marks[start : start + MOST_AT_ONCE]
                done, _ = await there.do("purge", self._meant, limit=MOST_AT_ONCE, marks=some)
                for one in done:
                    self._said.say(one.request_id, one.outcome, one.why)
                purged += len(done)
        self._said.end(f"{purged} purged", {"purged": purged})
        return 0 if purged == total.matched else 1

    def _left(self, matched: int) -> int:
        return MOST_AT_ONCE if self._options.limit is None else self._options.limit - matched

    @asynccontextmanager
    async def _gateway(self) -> AsyncGenerator[RemoteDeadLetters, None]:
        context = self._settings.tls.context()
        verify = True if context is None else context
        async with remote(self._url, self._settings.caller.api_key_now(), verify) as there:
            yield there


def _add(total: Walk, seen: Walk) -> None:
    total.looked_at = max(total.looked_at, seen.looked_at)
    total.matched += seen.matched
    total.more = seen.more
    total.store_silent = total.store_silent or seen.store_silent


def _replayed_well(options: DlqOptions, outcomes: Mapping[str, int], matched: int) -> int:
    good = outcomes.keys() <= {"replayed", "would replay"}
    return 0 if good and (not options.ids or matched) else 1
