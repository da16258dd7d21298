"""The `dlq` command: lists, shows, replays and purges dead letters, and says what it did."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inference_worker.config.settings import Settings
from inference_worker.dlq import Act, Dead, Filter, Replay, Walk, mark_of, walk
from inference_worker.errors import ConfigurationError, StoreUnavailable, TransportLost
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.results.redis import RedisStore
from inference_worker.rmq_dead_letters import (
    DeadLetters,
    Letter,
    LookedAtTooOften,
    NoDeadLetterQueue,
    open_dead_letters,
)
from inference_worker.timing import first_of

PLAIN_COLUMNS: Final = 160
MOST_SHOWN_BYTES: Final = 4000


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
    command = _Command(settings, options, now, stop)
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
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        print("nothing is lost: what was held goes back to the dead letters", file=sys.stderr)
        return 1
    except NoDeadLetterQueue as exc:
        print(exc, file=sys.stderr)
        return 1


class _Command:
    def __init__(self, settings: Settings, options: DlqOptions, now: Callable[[], float], stop: asyncio.Event) -> None:
        self._settings = settings
        self._options = options
        self._now = now
        self._stop = stop
        self._meant = options.filter(settings.identity.request_queue)
        self._console = Console(highlight=False, soft_wrap=True)
        if not self._console.is_terminal:
            self._console = Console(highlight=False, soft_wrap=True, width=PLAIN_COLUMNS)

    async def list_all(self) -> int:
        found: list[Dead] = []

        async def note(dead: Dead, _: Letter) -> None:
            if self._options.json:
                _print_json(dead.as_json())
            else:
                found.append(dead)

        async with self._reach() as (letters, store):
            seen = await self._walk(letters, store, note)
        if not self._options.json:
            if found:
                self._console.print(self._table(found))
            self._console.print(self._summary(seen))
        self._say_silent(seen)
        return 0

    async def show(self) -> int:
        async def print_one(dead: Dead, letter: Letter) -> None:
            headers = {name: _plain(value) for name, value in letter.headers.items()}
            shown = {**dead.as_json(), "headers": headers}
            if self._options.json:
                _print_json({**shown, "body": letter.body.decode(errors="replace")})
                return
            for name, value in shown.items():
                if name in ("died_at", "received_at") and isinstance(value, float):
                    value = _when(value)
                if value is not None and value != "":
                    self._console.out(f"{name:<12} {value}", highlight=False)
            text = letter.body[:MOST_SHOWN_BYTES].decode(errors="replace")
            cut = " …" if len(letter.body) > MOST_SHOWN_BYTES else ""
            self._console.out(f"{'body':<12} {text}{cut}\n", highlight=False)

        async with self._reach() as (letters, store):
            seen = await self._walk(letters, store, print_one)
        self._say_silent(seen)
        if seen.matched == 0:
            print(self._summary(seen), file=sys.stderr)
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
                self._say(dead, word, why)

            seen = await self._walk(letters, store, one)
        counts = ", ".join(f"{count} {word}" for word, count in put_back.outcomes.items()) or "none"
        self._end(f"{counts}; {self._summary(seen)}", {"outcomes": put_back.outcomes, "looked_at": seen.looked_at})
        self._say_silent(seen)
        good = put_back.outcomes.keys() <= {"replayed", "would replay"}
        return 0 if good and (not self._options.ids or seen.matched) else 1

    async def purge(self) -> int:
        """Count, ask, and remove what was counted: a letter that came meanwhile was not asked about."""
        counted: set[bytes] = set()

        async def count(dead: Dead, letter: Letter) -> None:
            counted.add(mark_of(letter))
            if self._options.dry_run:
                self._say(dead, "would purge", "")

        async with self._reach() as (letters, store):
            seen = await self._walk(letters, store, count)
        if self._options.dry_run or not counted:
            self._end(f"{seen.matched} would be purged; {self._summary(seen)}", {"would_purge": seen.matched})
            return 0
        if not self._options.yes and not await self._agreed(seen):
            print("nothing was purged", file=sys.stderr)
            return 1
        purged = 0

        async with self._reach() as (letters, store):

            async def remove(dead: Dead, letter: Letter) -> None:
                nonlocal purged
                if mark_of(letter) in counted:
                    await letters.take_away(letter)
                    purged += 1
                    self._say(dead, "purged", "")

            await self._walk(letters, store, remove)
        self._end(f"{purged} purged", {"purged": purged})
        return 0 if purged == seen.matched else 1

    async def _agreed(self, seen: Walk) -> bool:
        if not sys.stdin.isatty():
            raise ConfigurationError(("dlq purge: nobody can be asked here; --yes says that it is meant",))
        question = f"Remove {seen.matched} dead letters of {self._settings.rabbitmq.dlq} for good? Type yes: "
        print(question, end="", file=sys.stderr, flush=True)
        return await _typed(self._stop) == "yes"

    # ------------------------------------------------------------ reaching, walking

    @asynccontextmanager
    async def _reach(self) -> AsyncGenerator[tuple[DeadLetters, RedisStore], None]:
        settings = self._settings
        identity, redis, tls = settings.identity, settings.redis, settings.tls
        shown = "".join(c if "!" <= c <= "~" else "_" for c in f"inference-worker/{identity.deployment_id}/dlq")[:200]
        files = RedisTls(ca_file=tls.ca_file, cert_file=tls.cert_file, key_file=tls.key_file)
        link = RedisLink(redis.url_now, lambda: None, client_name=shown, tls=files)
        async with link.open():
            store = RedisStore(
                link,
                deployment_id=identity.deployment_id,
                replica_id="dlq",
                lease_s=redis.claim_lease_s,
                ttl_s=redis.response_ttl_s,
            )
            async with open_dead_letters(
                settings.rabbitmq.url_now(), settings.rabbitmq.dlq, name=shown, tls=tls.context()
            ) as letters:
                yield letters, store

    async def _walk(self, letters: DeadLetters, store: RedisStore, act: Act) -> Walk:
        return await walk(
            letters,
            store,
            self._meant,
            act,
            now=self._now,
            stop=self._stop,
            limit=self._options.limit,
        )

    # ------------------------------------------------------------ saying

    def _table(self, found: list[Dead]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        headings = ["request", "reason", "tried", "status", "died", "result", "tenant"]
        for heading in [*headings, *(["queue"] if self._options.all_deployments else [])]:
            table.add_column(heading, no_wrap=True, justify="right" if heading in ("tried", "status") else "left")
        for dead in found:
            cells = [
                dead.request_id or "–",
                dead.reason,
                "–" if dead.attempts is None else str(dead.attempts),
                "–" if dead.status_code is None else str(dead.status_code),
                "–" if dead.died_at is None else _when(dead.died_at),
                dead.result or "none",
                dead.tenant or "–",
            ]
            if self._options.all_deployments:
                cells.append(dead.queue or "–")
            table.add_row(*(Text(cell) for cell in cells))
        return table

    def _summary(self, seen: Walk) -> str:
        more = "; there are more" if seen.more else ""
        return f"{seen.matched} of {seen.looked_at} dead letters in {self._settings.rabbitmq.dlq}{more}"

    def _say(self, dead: Dead, word: str, why: str) -> None:
        if self._options.json:
            _print_json({"request_id": dead.request_id, "outcome": word, "why": why})
        else:
            self._console.print(Text(f"{dead.request_id or '–'}: {word}{f': {why}' if why else ''}"))

    def _end(self, text: str, counts: dict[str, object]) -> None:
        if self._options.json:
            _print_json(counts)
        else:
            self._console.print(Text(text))

    def _say_silent(self, seen: Walk) -> None:
        if seen.store_silent:
            print(
                f"Redis could not be asked, so that results and notes are missing: {seen.store_silent}", file=sys.stderr
            )


async def _typed(stop: asyncio.Event) -> str:
    """A line from the terminal; nothing after Ctrl-C, which a blocking read would not hear of."""
    loop, fd, readable = asyncio.get_running_loop(), sys.stdin.fileno(), asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await first_of(readable, stop)
    finally:
        loop.remove_reader(fd)
    return os.read(fd, 1000).decode(errors="replace").strip() if readable.is_set() else ""


def _print_json(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def _when(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _plain(value: object) -> object:
    match value:
        case dict():
            return {str(name): _plain(one) for name, one in value.items()}
        case list():
            return [_plain(one) for one in value]
        case datetime():
            return value.isoformat()
        case str() | int() | float() | None:
            return value
        case _:
            return str(value)
