"""Sends webhooks of jobs that have ended: when, how often, how many at once, and what becomes of each try.

Sent at least once, always under the same id: whoever dies between two steps leaves a lease that lapses, and then any
gateway goes on. What is due is the book's part, one POST is `webhook_posting.py`, the standard `webhook_signing.py`.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol, assert_never
from urllib.parse import urlsplit

import structlog

from inference_worker.config.values import read_secrets
from inference_worker.errors import StoreUnavailable
from inference_worker.gateway.problems import Refusal
from inference_worker.gateway.views import OPEN
from inference_worker.gateway.webhook_posting import Answered, NoAnswer, Post
from inference_worker.gateway.webhook_signing import signed_headers, webhook_body
from inference_worker.job_book import LONGEST_LOOK_S, Hook, HookBook, HookTry
from inference_worker.timing import first_of, quietly

log = structlog.get_logger(__name__)

TRIES_AT_S: Final = (0.0, 300.0, 3600.0, 6 * 3600.0, 24 * 3600.0)
"""When each try is, from the first one on."""
JITTER: Final = 0.05
"""Each is so much earlier or later at most, in parts of its time: all that failed together shall not come together."""
LEAST_GAP_S: Final = 240.0
"""Between two tries, also where those before it came late because no gateway was there."""
LONGEST_RETRY_AFTER_S: Final = 6 * 3600.0
"""A receiver may ask to be left alone for so long; to be tried sooner than planned it may not, its tries are few."""

SEND_S: Final = 20.0
LEASE_S: Final = 60.0
"""Longer than all that is done with a webhook in one go: the view, the POST, and writing down how it went."""
WRITE_DOWN_S: Final = 20.0
"""How long it is tried to write down how a try went, where the store is silent: else it is sent once more."""
VIEW_S: Final = 15.0
MOST_AT_ONCE: Final = 32
MOST_OF_A_TENANT: Final = 16
"""Where there are tenants: one whose receivers all hang leaves room for the others."""
MOST_OF_A_HOST: Final = 4
MOST_VIEWS: Final = 4
"""Views that are read at once: with its result, one may be large."""
POLL_S: Final = 0.5
LONGEST_DEFER_S: Final = 30.0
MOST_HINTS: Final = 10_000
CLOSE_S: Final = 3.0
"""How long those under way may take at the end; the rest is given back."""

Outcome = Literal["delivered", "failed_try", "failed", "disabled", "dropped"]
ViewOf = Callable[[str, str], Awaitable[Mapping[str, object]]]
"""A tenant's job as `GET /v1/jobs/{job_id}` gives it. Raises `Refusal` where there is none, and StoreUnavailable."""


class HookMeter(Protocol):
    """Counts what becomes of webhooks."""

    def hook(self, outcome: Outcome) -> None:
        """A try failed and there will be another, or a webhook is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """How a try went, and what its receiver asked for."""

    line: HookTry
    retry_after_s: float = 0.0


class WebhookSender:
    """The loop of one gateway. `run` it in a task; `hint` makes it prompt."""

    def __init__(
        self,
        *,
        book: HookBook,
        view_of: ViewOf,
        secret_of: Callable[[str], str | None],
        post: Post,
        meter: HookMeter,
        now: Callable[[], float],
        rng: random.Random,
    ) -> None:
        """`secret_of` a tenant: one or several with spaces between them, read anew for each try."""
        self._book = book
        self._view_of = view_of
        self._secret_of = secret_of
        self._post = post
        self._meter = meter
        self._now = now
        self._rng = rng
        self._under_way: set[asyncio.Task[None]] = set()
        self._of_hosts: Counter[str] = Counter()
        self._of_tenants: Counter[str] = Counter()
        self._deferred: Counter[str] = Counter()
        self._views = asyncio.Semaphore(MOST_VIEWS)
        self._hints: dict[str, None] = {}
        self._wake = asyncio.Event()

    def hint(self, job_id: str) -> None:
        """A job has ended that may have a webhook. Never blocks; a hint that gets lost costs seconds."""
        if len(self._hints) < MOST_HINTS:
            self._hints[job_id] = None
            self._wake.set()

    async def run(self, until: asyncio.Event) -> None:
        """Send until told to stop; then what is under way may end, for a moment, and the rest is given back."""
        pause_s, away = 0.0, ""
        async with asyncio.TaskGroup() as group:
            while True:
                await first_of(until, self._wake, within_s=pause_s)
                self._wake.clear()
                if until.is_set():
                    break
                try:
                    more = await self._turn(group)
                except StoreUnavailable as exc:
                    if str(exc) != away:
                        log.warning("webhooks wait, the store cannot be asked", reason=str(exc))
                    pause_s, away = min(max(2 * pause_s, POLL_S), 5.0), str(exc)
                else:
                    pause_s, away = 0.0 if more else POLL_S, ""
            if self._under_way:
                await asyncio.wait(self._under_way, timeout=CLOSE_S)
            for task in self._under_way:
                task.cancel()

    async def _turn(self, group: asyncio.TaskGroup) -> bool:
        """Take what is due and start sending it; whether there may be more at once."""
        if self._hints:
            hints = list(self._hints)
            await self._book.hasten(hints)
            for job_id in hints:
                self._hints.pop(job_id, None)
        free = MOST_AT_ONCE - len(self._under_way)
        if free <= 0:
            return False  # The end of one wakes the loop.
        hooks = await self._book.due(free, LEASE_S)
        for hook in hooks:
            task = group.create_task(self._attend(hook), name="webhook")
            self._under_way.add(task)
            task.add_done_callback(self._ended)
        return len(hooks) == free

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if len(self._under_way) >= MOST_AT_ONCE:
            self._wake.set()
        self._under_way.discard(task)

    # ------------------------------------------------------------ one webhook

    async def _attend(self, hook: Hook) -> None:
        """Send one, if there is room for it. Never raises: the others must go on."""
        host = _host_of(hook.url)
        crowded = hook.tenant != "" and self._of_tenants[hook.tenant] >= MOST_OF_A_TENANT
        if crowded or self._of_hosts[host] >= MOST_OF_A_HOST:
            await self._defer(hook, host)
            return
        self._of_hosts[host] += 1
        self._of_tenants[hook.tenant] += 1
        try:
            await self._deliver(hook)
        except asyncio.CancelledError:
            # We stop. It may have been received, and will come once more under the same id.
            await quietly(self._book.later(hook, 0.0), 1.0, StoreUnavailable)
            raise
        except StoreUnavailable as exc:
            log.warning("a webhook waits, the store cannot be asked", job_id=hook.job_id, reason=str(exc))
        except Exception:  # One webhook that we cannot handle may not stop the others; its lease lapses.
            log.exception("a webhook could not be handled", job_id=hook.job_id)
        finally:
            _less(self._of_hosts, host)
            _less(self._of_tenants, hook.tenant)
            if host not in self._of_hosts:
                self._deferred.pop(host, None)

    async def _defer(self, hook: Hook, host: str) -> None:
        """Its receiver has enough to do. The more of them wait, the longer: they shall not be taken again and again."""
        self._deferred[host] += 1
        in_s = min(1.0 + self._deferred[host] / MOST_OF_A_HOST / 4, LONGEST_DEFER_S)
        await quietly(self._book.later(hook, in_s * self._rng.uniform(0.5, 1.0)), 5.0, StoreUnavailable)

    async def _deliver(self, hook: Hook) -> None:
        body, new = await self._book.body_of(hook.job_id) if hook.kept else None, False
        if body is None:
            try:
                async with asyncio.timeout(VIEW_S), self._views:
                    view = await self._view_of(hook.job_id, hook.tenant)
                    body, new = webhook_body(view, now=self._now()), True
            except Refusal as exc:
                if exc.status not in (404, 410):
                    raise
                await self._drop(hook, str(exc))
                return
            except TimeoutError as exc:
                raise StoreUnavailable(f"the job was not read within {VIEW_S:g} s") from exc
            if view.get("status") in OPEN:
                await self._book.later(hook, LONGEST_LOOK_S)
                return
            del view
        tried = await self._try(hook, body)
        await self._settle(hook, tried, body if new else None)

    async def _try(self, hook: Hook, body: bytes) -> _Tried:
        at = self._now()

        def failed(detail: str, status_code: int | None = None, retry_after_s: float = 0.0) -> _Tried:
            return _Tried(line=HookTry(at=at, status_code=status_code, detail=detail), retry_after_s=retry_after_s)

        secret = self._secret_of(hook.tenant)
        if secret is None:
            return failed("there is no webhook secret")
        try:
            headers = signed_headers(hook.job_id, body, read_secrets(secret), now=at)
        except ValueError as exc:
            return failed(str(exc))
        headers |= {"Content-Type": "application/json", "User-Agent": "inference-worker-webhooks/1"}
        try:
            async with asyncio.timeout(SEND_S):
                answer = await self._post(hook.url, headers, body)
        except TimeoutError:
            return failed(f"no answer within {SEND_S:g} s")
        except Exception:  # Whatever a receiver makes the driver do is a failed try, and not one for ever.
            log.exception("a webhook could not be sent", job_id=hook.job_id)
            return failed("it could not be sent")
        match answer:
            case NoAnswer(why=why):
                return failed(why)
            case Answered(status_code=status) if 200 <= status < 300:
                return _Tried(line=HookTry(at=at, status_code=status))
            case Answered(status_code=status) if 300 <= status < 400:
                return failed("a redirect, which is not followed", status)
            case Answered(status_code=status, retry_after_s=retry_after_s):
                return failed("", status, retry_after_s or 0.0)
            case _ as unexpected:
                assert_never(unexpected)

    async def _settle(self, hook: Hook, tried: _Tried, body: bytes | None) -> None:
        status = tried.line.status_code
        tries = hook.tries + 1
        first_at = hook.first_try_at if hook.first_try_at is not None else tried.line.at
        hook = replace(hook, tries=tries, first_try_at=first_at)
        if status is not None and 200 <= status < 300:
            await self._write_down(lambda: self._book.over(hook, "delivered", tried.line))
            self._told(hook, "delivered", tried.line)
        elif status == 410:
            await self._write_down(lambda: self._book.over(hook, "disabled", tried.line, body))
            self._told(hook, "disabled", tried.line)
        elif tries >= len(TRIES_AT_S):
            await self._write_down(lambda: self._book.over(hook, "failed", tried.line, body))
            self._told(hook, "failed", tried.line)
        else:
            in_s = next_try_in_s(tries, self._now() - first_at, tried.retry_after_s, self._rng)
            await self._write_down(lambda: self._book.later(hook, in_s, tried.line, body))
            self._told(hook, "failed_try", tried.line)

    async def _write_down(self, write: Callable[[], Awaitable[None]]) -> None:
        """Say how it went, and again where the store is silent, for as long as nobody else takes the webhook.

        Raises: StoreUnavailable
        """
        pause_s = 0.25
        loop = asyncio.get_running_loop()
        until = loop.time() + WRITE_DOWN_S
        while True:
            try:
                await write()
            except StoreUnavailable:
                if loop.time() + pause_s >= until:
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
            else:
                return

    async def _drop(self, hook: Hook, why: str) -> None:
        line = HookTry(at=self._now(), status_code=None, detail=f"there is nothing to send: {why}")
        await self._write_down(lambda: self._book.over(hook, "failed", line))
        self._told(hook, "dropped", line)

    def _told(self, hook: Hook, outcome: Outcome, line: HookTry) -> None:
        self._meter.hook(outcome)
        log.info(
            "webhook",
            job_id=hook.job_id,
            outcome=outcome,
            tries=hook.tries,
            status_code=line.status_code,
            detail=line.detail,
        )


def next_try_in_s(tries: int, since_first_s: float, retry_after_s: float, rng: random.Random) -> float:
    """Seconds until the next try, `tries` of them being over."""
    planned = TRIES_AT_S[tries] * rng.uniform(1 - JITTER, 1 + JITTER) - since_first_s
    return max(planned, LEAST_GAP_S, min(retry_after_s, LONGEST_RETRY_AFTER_S))


def _host_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _less(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if counts[name] <= 0:
        del counts[name]
