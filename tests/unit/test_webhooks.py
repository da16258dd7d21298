"""Webhooks: signed as the standard says, tried five times over a day, sent at least once whoever dies."""

import asyncio
import base64
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI, Request, Response
from httpx import ASGITransport, AsyncClient
from standardwebhooks import Webhook
from structlog.testing import capture_logs

from inference_worker.config.values import read_secrets
from inference_worker.disposition import Token
from inference_worker.errors import StoreUnavailable
from inference_worker.gateway import webhooks
from inference_worker.gateway.problems import Refusal, answer
from inference_worker.gateway.views import View, ended_view, open_view
from inference_worker.gateway.webhook_posting import Answered, NoAnswer
from inference_worker.gateway.webhook_routes import routes
from inference_worker.gateway.webhook_signing import (
    MOST_BODY_BYTES,
    secret_problem,
    signed_headers,
    webhook_body,
)
from inference_worker.gateway.webhooks import (
    LEASE_S,
    LEAST_GAP_S,
    LONGEST_RETRY_AFTER_S,
    MOST_AT_ONCE,
    MOST_OF_A_HOST,
    MOST_OF_A_TENANT,
    MOST_VIEWS,
    SEND_S,
    TRIES_AT_S,
    VIEW_S,
    WebhookSender,
    next_try_in_s,
)
from inference_worker.job_book import Hook, HookBook, HookEnd, HookLog, HookTry, JobRecord, Reserved
from inference_worker.results.memory import MemoryStore
from inference_worker.results.memory_hook_book import MemoryHookBook
from inference_worker.results.memory_job_book import MemoryJobBook
from inference_worker.timing import ended
from tests.store_contract import failure, reply
from tests.unit.worker_kit import now

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
OTHER = "whsec_" + base64.b64encode(bytes(range(64))).decode()
DAY_S = 86_400.0

# ---------------------------------------------------------------- the standard


def test_the_standards_own_library_takes_what_we_sign() -> None:
    body = webhook_body({"job_id": "a", "status": "succeeded", "result": {"ü": 1}}, now=1.0)
    headers = signed_headers("a", body, read_secrets(SECRET), now=time.time())

    assert Webhook(SECRET).verify(body, headers)["data"]["job_id"] == "a"
    assert headers["webhook-id"] == "msg_a"


def test_while_secrets_are_rotated_each_of_them_fits() -> None:
    body = b"{}"
    headers = signed_headers("a", body, read_secrets(f"{SECRET} {OTHER}"), now=time.time())

    for secret in (SECRET, OTHER):
        Webhook(secret).verify(body, headers)
    assert headers["webhook-signature"].count("v1,") == 2


def test_the_signature_is_that_of_the_published_example() -> None:
    """From the tests of the standard's own libraries."""
    keys = read_secrets("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")

    headers = signed_headers("p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', keys, now=1614265330.9)

    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


@pytest.mark.parametrize("size", [24, 64])
def test_a_secret_has_24_to_64_bytes(size: int) -> None:
    assert read_secrets("whsec_" + base64.b64encode(b"x" * size).decode()) == (b"x" * size,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        base64.b64encode(b"x" * 32).decode(),
        "whsec_",
        "whsec_!!!",
        "whsec_" + base64.b64encode(b"x" * 23).decode(),
        "whsec_" + base64.b64encode(b"x" * 65).decode(),
        SECRET + " nonsense",
        "WHSEC_" + base64.b64encode(b"x" * 32).decode(),
    ],
)
def test_what_is_no_secret_is_refused_without_a_word_of_it(text: str) -> None:
    problem = secret_problem(text)

    assert problem is not None
    assert text.removeprefix("whsec_").strip() == "" or text.removeprefix("whsec_") not in problem
    assert secret_problem(SECRET) is None


@pytest.mark.parametrize("status", ["succeeded", "failed", "cancelled", "expired", "dead"])
def test_the_body_names_how_the_job_ended_and_when(status: str) -> None:
    view: View = {"job_id": "a", "status": status, "finished_at": msgspec.Raw(b"1764446400.25")}

    assert json.loads(webhook_body(view, now=5.0)) == {
        "type": f"job.{status}",
        "timestamp": "2025-11-29T20:00:00.250Z",
        "data": {"job_id": "a", "status": status, "finished_at": 1764446400.25},
    }


def test_the_same_job_has_the_same_body_whenever_it_is_sent() -> None:
    view: View = {"job_id": "a", "status": "failed", "finished_at": 7.0}

    assert webhook_body(view, now=5.0) == webhook_body(view, now=500.0)
    assert json.loads(webhook_body({"status": "failed"}, now=5.0))["timestamp"] == "1970-01-01T00:00:05.000Z"
    assert json.loads(webhook_body({"status": "failed", "finished_at": 1e300}, now=5.0))["timestamp"].startswith("1970")


def test_a_body_that_would_be_too_large_comes_without_its_largest_part() -> None:
    large = msgspec.Raw(b'"' + b"x" * MOST_BODY_BYTES + b'"')
    view: View = {"job_id": "a", "status": "succeeded", "result": large, "metadata": {"k": "v"}}

    body = webhook_body(view, now=1.0)

    assert json.loads(body)["data"] == {
        "job_id": "a", "status": "succeeded", "metadata": {"k": "v"}, "omitted": ["result"],
    }  # fmt: skip
    assert json.loads(webhook_body({**view, "metadata": large}, now=1.0))["data"]["omitted"] == ["result", "metadata"]


def test_a_result_just_small_enough_is_sent_as_it_is() -> None:
    view: View = {"job_id": "a", "status": "succeeded", "result": ""}
    room = MOST_BODY_BYTES - len(webhook_body(view, now=1.0))

    body = webhook_body({**view, "result": "x" * room}, now=1.0)

    assert len(body) == MOST_BODY_BYTES
    assert "omitted" not in json.loads(body)["data"]


# ---------------------------------------------------------------- what a gateway is made of


@dataclass(frozen=True, slots=True)
class Received:
    """One POST that arrived."""

    at: float
    url: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def job_id(self) -> str:
        return self.headers["webhook-id"].removeprefix("msg_")


@dataclass
class FakeReceiver:
    """Answers with what `says` gives for a URL, in this order, and then with 200; it takes `takes_s` for each."""

    says: dict[str, list[Answered | NoAnswer | Exception]] = field(default_factory=dict)
    takes_s: dict[str, float] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)
    at_once: Counter[str] = field(default_factory=Counter)
    most_at_once: Counter[str] = field(default_factory=Counter)

    async def __call__(self, url: str, headers: Mapping[str, str], body: bytes) -> Answered | NoAnswer:
        self.received.append(Received(now(), url, headers, body))
        host = url.split("/")[2]
        for name in (host, "all"):
            self.at_once[name] += 1
            self.most_at_once[name] = max(self.most_at_once[name], self.at_once[name])
        try:
            await asyncio.sleep(self.takes_s.get(host, 0.0))
        finally:
            self.at_once[host] -= 1
            self.at_once["all"] -= 1
        said: Answered | NoAnswer | Exception = Answered(status_code=200)
        if self.says.get(url):
            said = self.says[url].pop(0)
        if isinstance(said, Exception):
            raise said
        return said


@dataclass
class CountingMeter:
    """Counts."""

    seen: Counter[str] = field(default_factory=Counter)

    def hook(self, outcome: webhooks.Outcome) -> None:
        self.seen[outcome] += 1


class Site:
    """What gateways share: jobs, results, webhooks, a receiver."""

    def __init__(self, *, ttl_s: float = 30 * DAY_S) -> None:
        self.store = MemoryStore(now=now, lease_s=15.0, ttl_s=ttl_s)
        self.jobs = MemoryJobBook(self.store, ttl_s=ttl_s, now=now)
        self.book = MemoryHookBook(self.jobs, self.store, now=now)
        self.receiver = FakeReceiver()
        self.meter = CountingMeter()
        self.secrets: dict[str, str] = defaultdict(lambda: SECRET)

    async def accept(self, job_id: str, *, tenant: str = "", url: str | None = None) -> str:
        url = url or f"https://example.com/{job_id}"
        record = JobRecord(
            job_id=job_id, tenant=tenant, created_at=now(), expires_at=now() + 600, fingerprint="", webhook_url=url
        )
        reserved = await self.jobs.reserve(record, None)
        assert isinstance(reserved, Reserved)
        await self.jobs.confirm(reserved)
        return url

    async def end(self, job_id: str, **changes: Any) -> None:
        await self.store.write(reply(job_id, **({"finished_at": now()} | changes)), None, Token("t"))

    async def ended(self, job_id: str, *, tenant: str = "", url: str | None = None) -> str:
        url = await self.accept(job_id, tenant=tenant, url=url)
        await self.end(job_id)
        return url

    async def view_of(self, job_id: str, tenant: str) -> View:
        record = await self.jobs.find(job_id)
        stored = await self.store.read(job_id)
        if record is None or record.tenant != tenant:
            raise Refusal(404, "no_such_job", "There is no such job.")
        if stored is None and record.ended:
            raise Refusal(410, "gone", "The job is gone.")
        return (
            open_view(job_id, await self.store.progress(job_id), record)
            if stored is None
            else ended_view(job_id, stored, record)
        )

    def sender(self, **changes: Any) -> WebhookSender:
        parts: dict[str, Any] = {
            "book": self.book,
            "view_of": self.view_of,
            "secret_of": lambda tenant: self.secrets[tenant],
            "post": self.receiver,
            "meter": self.meter,
            "now": now,
            "rng": random.Random(7),
        }
        return WebhookSender(**(parts | changes))

    @asynccontextmanager
    async def running(self, **changes: Any) -> AsyncGenerator[WebhookSender, None]:
        sender, until = self.sender(**changes), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(sender.run(until))
            yield sender
            until.set()

    async def log_of(self, job_id: str) -> HookLog:
        log = await self.book.log_of(job_id)
        assert log is not None
        return log


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop looks every 20 s, so that a day of virtual time has fewer turns."""
    monkeypatch.setattr(webhooks, "POLL_S", 20.0)


# ---------------------------------------------------------------- one webhook


async def test_an_ended_job_is_told_at_once_and_once() -> None:
    site = Site()
    await site.ended("a", url="https://example.com/a?b=c")

    async with site.running():
        await asyncio.sleep(600)

    (got,) = site.receiver.received
    assert got.url == "https://example.com/a?b=c"
    assert got.headers["Content-Type"] == "application/json"
    assert json.loads(got.body)["data"]["result"] == {"ok": True}
    log = await site.log_of("a")
    assert (log.state, [tried.status_code for tried in log.tries]) == ("delivered", [200])
    assert site.meter.seen == {"delivered": 1}


async def test_a_failed_job_is_told_too() -> None:
    site = Site()
    await site.accept("a")
    await site.store.write(failure("a", error_code="retries_exhausted"), None, Token("t"))

    async with site.running():
        await asyncio.sleep(1)

    assert json.loads(site.receiver.received[0].body)["type"] == "job.dead"


async def test_a_job_is_told_of_soon_after_its_end() -> None:
    site = Site()
    await site.accept("a")

    async with site.running():
        await asyncio.sleep(300)
        assert not site.receiver.received
        await site.end("a")
        at = now()
        await asyncio.sleep(10)

    assert site.receiver.received[0].at - at <= 5.5


async def test_a_hint_makes_it_prompt() -> None:
    site = Site()
    await site.accept("a")

    async with site.running() as sender:
        await asyncio.sleep(300)
        await site.end("a")
        sender.hint("a")
        sender.hint("unknown")
        await asyncio.sleep(0.01)

        assert len(site.receiver.received) == 1


async def test_a_receiver_that_stays_away_is_tried_five_times_over_a_day(seldom: None) -> None:
    site = Site()
    url = await site.ended("a")
    site.receiver.says[url] = [Answered(status_code=500)] * 9

    async with site.running():
        await asyncio.sleep(3 * DAY_S)

    times = [got.at for got in site.receiver.received]
    assert [at - times[0] for at in times] == pytest.approx(TRIES_AT_S, rel=0.06, abs=30)
    assert len({got.body for got in site.receiver.received}) == 1
    assert {got.headers["webhook-id"] for got in site.receiver.received} == {"msg_a"}
    assert len({got.headers["webhook-timestamp"] for got in site.receiver.received}) == 5
    log = await site.log_of("a")
    assert (log.state, [tried.status_code for tried in log.tries]) == ("failed", [500] * 5)
    assert site.meter.seen == {"failed_try": 4, "failed": 1}


async def test_the_last_try_has_the_body_although_the_result_is_gone(seldom: None) -> None:
    site = Site(ttl_s=60)
    url = await site.ended("a")
    site.receiver.says[url] = [Answered(status_code=500)] * 4

    async with site.running():
        await asyncio.sleep(2 * DAY_S)

    assert (await site.log_of("a")).state == "delivered"
    assert len({got.body for got in site.receiver.received}) == 1


async def test_what_failed_is_replayed_with_all_its_tries(seldom: None) -> None:
    site = Site()
    url = await site.ended("a")
    site.receiver.says[url] = [Answered(status_code=500)] * 7

    async with site.running() as sender:
        await asyncio.sleep(2 * DAY_S)
        assert len(site.receiver.received) == 5
        await site.book.replay("a")
        sender.hint("a")
        await asyncio.sleep(0.1)
        assert len(site.receiver.received) == 6
        await asyncio.sleep(2 * DAY_S)

    assert (await site.log_of("a")).state == "delivered"
    assert len(site.receiver.received) == 8


@pytest.mark.parametrize(
    ("said", "detail"),
    [
        (Answered(status_code=500), ""),
        (Answered(status_code=404), ""),
        (Answered(status_code=429, retry_after_s=1.0), ""),
        (Answered(status_code=302), "a redirect, which is not followed"),
        (NoAnswer("no connection: refused"), "no connection: refused"),
        (RuntimeError("the driver"), "it could not be sent"),
        (UnicodeError("the driver"), "it could not be sent"),
    ],
)
async def test_anything_but_2xx_is_a_failed_try(said: Answered | NoAnswer | Exception, detail: str) -> None:
    site = Site()
    url = await site.ended("a")
    site.receiver.says[url] = [said]

    async with site.running():
        await asyncio.sleep(10)

    log = await site.log_of("a")
    assert log.state == "waiting"
    assert [tried.detail for tried in log.tries] == [detail]
    assert log.next_try_at is not None
    assert 280 < log.next_try_at - now() < 320


async def test_a_receiver_that_hangs_is_given_up_after_20_s() -> None:
    site = Site()
    await site.ended("a")
    site.receiver.takes_s["example.com"] = 3600

    async with site.running():
        await asyncio.sleep(SEND_S + 2)

    log = await site.log_of("a")
    assert [(tried.status_code, tried.detail) for tried in log.tries] == [(None, "no answer within 20 s")]
    assert site.receiver.at_once["example.com"] == 0


async def test_410_ends_it() -> None:
    site = Site()
    url = await site.ended("a")
    site.receiver.says[url] = [Answered(status_code=410)]

    async with site.running():
        await asyncio.sleep(600)

    assert len(site.receiver.received) == 1
    assert (await site.log_of("a")).state == "disabled"
    assert site.meter.seen == {"disabled": 1}


@pytest.mark.parametrize(("secret", "word"), [(None, "no webhook secret"), ("whsec_bad", "24 to 64 bytes")])
async def test_without_a_usable_secret_nothing_is_sent_and_the_log_says_why(secret: str | None, word: str) -> None:
    site = Site()
    await site.ended("a")

    async with site.running(secret_of=lambda _: secret):
        await asyncio.sleep(1)

    assert not site.receiver.received
    assert word in (await site.log_of("a")).tries[0].detail


async def test_each_tenant_has_its_own_secret() -> None:
    site = Site()
    site.secrets |= {"x": SECRET, "y": OTHER}
    await site.ended("a", tenant="x")
    await site.ended("b", tenant="y")

    async with site.running(now=time.time):  # The standard's library asks the real clock.
        await asyncio.sleep(1)

    for got, secret in zip(sorted(site.receiver.received, key=lambda got: got.job_id), (SECRET, OTHER), strict=True):
        Webhook(secret).verify(got.body, dict(got.headers))


async def test_a_job_that_is_gone_is_dropped_with_a_line_in_the_log(seldom: None) -> None:
    """No gateway was there while its result was."""
    site = Site(ttl_s=60)
    await site.ended("a")
    await asyncio.sleep(3600)

    with capture_logs() as logs:
        async with site.running():
            await asyncio.sleep(60)

    assert not site.receiver.received
    assert (await site.log_of("a")).state == "failed"
    assert [line["outcome"] for line in logs if line["event"] == "webhook"] == ["dropped"]
    assert site.meter.seen == {"dropped": 1}


async def test_a_book_that_is_ahead_of_the_view_is_asked_again() -> None:
    site = Site()
    await site.ended("a")
    asked = 0

    async def view_of(job_id: str, tenant: str) -> View:
        nonlocal asked
        asked += 1
        return await site.view_of(job_id, tenant) if asked > 2 else {"job_id": job_id, "status": "running"}

    async with site.running(view_of=view_of):
        await asyncio.sleep(20)

    assert (asked, len(site.receiver.received)) == (3, 1)
    assert len((await site.log_of("a")).tries) == 1


# ---------------------------------------------------------------- when it is tried again


@pytest.mark.parametrize("tries", [1, 2, 3, 4])
def test_the_next_try_is_where_the_day_has_it(tries: int) -> None:
    since_s = TRIES_AT_S[tries - 1] + 3
    rng = random.Random(tries)

    drawn = {next_try_in_s(tries, since_s, 0.0, rng) + since_s for _ in range(200)}

    assert min(drawn) >= TRIES_AT_S[tries] * 0.95
    assert max(drawn) <= TRIES_AT_S[tries] * 1.05
    assert len(drawn) > 100


@pytest.mark.parametrize(
    ("retry_after_s", "least", "most"),
    [
        pytest.param(1.0, 285, 315, id="sooner than planned is not granted"),
        pytest.param(1200.0, 1200, 1200, id="later than planned is"),
        pytest.param(1e9, LONGEST_RETRY_AFTER_S, LONGEST_RETRY_AFTER_S, id="for so long and no longer"),
    ],
)
def test_retry_after_is_honoured_within_bounds(retry_after_s: float, least: float, most: float) -> None:
    assert least <= next_try_in_s(1, 0.0, retry_after_s, random.Random(1)) <= most


def test_tries_that_come_late_do_not_come_all_at_once() -> None:
    assert next_try_in_s(2, 20 * DAY_S, 0.0, random.Random(1)) == LEAST_GAP_S


# ---------------------------------------------------------------- many


async def test_many_are_sent_at_once_but_few_to_one_host() -> None:
    site = Site()
    for number in range(100):
        await site.ended(f"r-{number}", url=f"https://h{number % 20}.example/r-{number}")
    site.receiver.takes_s = {f"h{number}.example": 1.0 for number in range(20)}

    async with site.running():
        await asyncio.sleep(60)

    assert len(site.receiver.received) == 100
    most = site.receiver.most_at_once
    assert most.pop("all") == MOST_AT_ONCE
    assert max(most.values()) <= MOST_OF_A_HOST


async def test_a_slow_host_does_not_hold_up_the_others() -> None:
    site = Site()
    for number in range(500):
        await site.ended(f"slow-{number}", url=f"https://slow.example/{number}")
    site.receiver.takes_s["slow.example"] = 19.0
    await site.ended("quick", url="https://quick.example/")
    at = now()

    async with site.running():
        await asyncio.sleep(10)
        quick = next(got for got in site.receiver.received if got.job_id == "quick")
        assert quick.at - at < 2
        assert site.receiver.most_at_once["slow.example"] == MOST_OF_A_HOST


async def test_a_tenant_whose_receivers_hang_leaves_room_for_the_others() -> None:
    site = Site()
    for number in range(100):
        await site.ended(f"r-{number}", tenant="x", url=f"https://h{number}.example/")
        site.receiver.takes_s[f"h{number}.example"] = 19.0
    await site.ended("other", tenant="y")
    at = now()

    async with site.running():
        await asyncio.sleep(10)
        assert next(got.at for got in site.receiver.received if got.job_id == "other") - at < 2
        assert site.receiver.most_at_once["all"] <= MOST_OF_A_TENANT + 1


async def test_two_gateways_send_each_once() -> None:
    site = Site()
    for number in range(50):
        await site.ended(f"r-{number}", url=f"https://h{number}.example/")
        site.receiver.takes_s[f"h{number}.example"] = 0.3

    async with site.running(), site.running():
        await asyncio.sleep(30)

    assert Counter(got.job_id for got in site.receiver.received) == {f"r-{number}": 1 for number in range(50)}


async def test_one_that_cannot_be_handled_does_not_stop_the_others() -> None:
    site = Site()
    await site.ended("bad")
    await site.ended("good")

    async def view_of(job_id: str, tenant: str) -> View:
        if job_id == "bad":
            raise ValueError("ours")
        return await site.view_of(job_id, tenant)

    with capture_logs() as logs:
        async with site.running(view_of=view_of):
            await asyncio.sleep(30)
            await site.ended("later")
            await asyncio.sleep(10)

    assert {got.job_id for got in site.receiver.received} == {"good", "later"}
    assert [line["job_id"] for line in logs if line["log_level"] == "error"] == ["bad"]


@pytest.mark.parametrize("url", ["https://[", "nonsense", "https://example.com:99999/"])
async def test_a_url_that_nobody_validated_does_not_stop_the_loop(url: str) -> None:
    site = Site()
    await site.ended("bad", url=url)
    site.receiver.says[url] = [ValueError("no URL")]

    async with site.running():
        await asyncio.sleep(5)
        await site.ended("good")
        await asyncio.sleep(5)

    assert "good" in {got.job_id for got in site.receiver.received}


# ---------------------------------------------------------------- a store that is away


async def test_the_loop_outlives_a_store_that_is_away() -> None:
    site = Site()
    await site.ended("a")
    site.store.away = "gone"

    with capture_logs() as logs:
        async with site.running():
            await asyncio.sleep(120)
            site.store.away = None
            await asyncio.sleep(70)

    assert len(site.receiver.received) == 1
    assert sum("webhooks wait" in line["event"] for line in logs) == 1


async def test_what_was_received_is_written_down_once_the_store_is_back() -> None:
    """Else it would be sent again."""
    site = Site()
    await site.ended("a")
    site.receiver.takes_s["example.com"] = 1.0

    async with site.running():
        await asyncio.sleep(0.5)
        site.store.away = "gone"
        await asyncio.sleep(10)
        site.store.away = None
        await asyncio.sleep(120)

    assert len(site.receiver.received) == 1
    assert (await site.log_of("a")).state == "delivered"


async def test_views_that_hang_are_given_up_and_asked_again() -> None:
    """They are few at once, so that those that hang would hold up all others."""
    site = Site()
    names = [f"r-{number}" for number in range(MOST_VIEWS + 1)]
    for number, name in enumerate(names):
        await site.ended(name, url=f"https://h{number}.example/")
    asked = 0

    async def view_of(job_id: str, tenant: str) -> View:
        nonlocal asked
        asked += 1
        if asked <= MOST_VIEWS:
            await asyncio.Event().wait()
        return await site.view_of(job_id, tenant)

    async with site.running(view_of=view_of):
        await asyncio.sleep(VIEW_S + 10)
        await site.ended("later")
        await asyncio.sleep(10)
        assert "later" in {got.job_id for got in site.receiver.received}
        await asyncio.sleep(120)

    assert Counter(got.job_id for got in site.receiver.received) == {name: 1 for name in [*names, "later"]}


async def test_what_cannot_be_written_down_comes_again_once_its_lease_lapses() -> None:
    site = Site()
    await site.ended("a")
    site.receiver.takes_s["example.com"] = 1.0

    async with site.running():
        await asyncio.sleep(0.5)
        site.store.away = "gone"
        await asyncio.sleep(LEASE_S + 20)
        site.store.away = None
        await asyncio.sleep(20)

    assert [got.headers["webhook-id"] for got in site.receiver.received] == ["msg_a"] * 2
    assert (await site.log_of("a")).state == "delivered"


async def test_a_view_that_is_refused_for_now_is_asked_again() -> None:
    site = Site()
    await site.ended("a")
    asked = 0

    async def view_of(job_id: str, tenant: str) -> View:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise Refusal(503, "store_unavailable", "The store cannot be asked.")
        return await site.view_of(job_id, tenant)

    async with site.running(view_of=view_of):
        await asyncio.sleep(120)

    assert len(site.receiver.received) == 1


async def test_hints_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "MOST_HINTS", 2)
    site = Site()
    sender = site.sender()

    for number in range(10):
        sender.hint(f"r-{number}")

    assert list(sender._hints) == ["r-0", "r-1"]


# ---------------------------------------------------------------- the end of a gateway


async def test_at_the_end_what_is_under_way_may_end() -> None:
    site = Site()
    await site.ended("a")
    site.receiver.takes_s["example.com"] = 2.0

    async with site.running():
        await asyncio.sleep(1)

    assert (await site.log_of("a")).state == "delivered"


async def test_what_does_not_end_in_time_is_given_back() -> None:
    """The next gateway need not wait for the lease."""
    site = Site()
    await site.ended("a")
    site.receiver.takes_s["example.com"] = 15.0

    async with site.running():
        await asyncio.sleep(1)
    at = now()
    site.receiver.takes_s.clear()
    async with site.running():
        await asyncio.sleep(1)

    assert site.receiver.received[1].at - at < 0.6
    assert (await site.log_of("a")).state == "delivered"


class Killed:
    """Cuts a gateway at its `cut`th step, before it is taken or after; from then on it does nothing any more."""

    def __init__(self, cut: int) -> None:
        self._left = cut
        self.dead = False

    async def step(self, work: Callable[[], Awaitable[Any]]) -> Any:
        await self._maybe_die()
        answer = await work()
        await self._maybe_die()
        return answer

    async def _maybe_die(self) -> None:
        self._left -= 1
        if self._left < 0:
            self.dead = True
        if self.dead:
            await asyncio.Event().wait()


class CutBook:
    """A hook book whose every call is a step."""

    def __init__(self, book: HookBook, killed: Killed) -> None:
        self._book = book
        self._step = killed.step

    async def due(self, limit: int, lease_s: float) -> Sequence[Hook]:
        hooks: Sequence[Hook] = await self._step(lambda: self._book.due(limit, lease_s))
        return hooks

    async def hasten(self, job_ids: Sequence[str]) -> None:
        await self._step(lambda: self._book.hasten(job_ids))

    async def body_of(self, job_id: str) -> bytes | None:
        body: bytes | None = await self._step(lambda: self._book.body_of(job_id))
        return body

    async def later(self, hook: Hook, in_s: float, tried: HookTry | None = None, body: bytes | None = None) -> None:
        await self._step(lambda: self._book.later(hook, in_s, tried, body))

    async def over(self, hook: Hook, end: HookEnd, tried: HookTry, body: bytes | None = None) -> None:
        await self._step(lambda: self._book.over(hook, end, tried, body))

    async def log_of(self, job_id: str) -> HookLog | None:
        return await self._book.log_of(job_id)

    async def replay(self, job_id: str) -> bool:
        return await self._book.replay(job_id)


async def test_a_gateway_killed_between_any_two_steps_loses_no_webhook(seldom: None) -> None:
    """Conservation: every ended job is told at least once, under one id, and then is over."""
    jobs = ("good", "failing", "gone-receiver", "later")
    cuts = 0
    for cut in range(200):
        site, killed = Site(), Killed(cut)
        for job_id in jobs:
            await site.accept(job_id)
        site.receiver.says["https://example.com/failing"] = [Answered(status_code=503)] * 2
        site.receiver.says["https://example.com/gone-receiver"] = [Answered(status_code=410)]
        for job_id in jobs[:3]:
            await site.end(job_id)

        async def post(url: str, headers: Mapping[str, str], body: bytes, *, s: Site = site, k: Killed = killed) -> Any:
            return await k.step(lambda: s.receiver(url, headers, body))

        async def view_of(job_id: str, tenant: str, *, s: Site = site, k: Killed = killed) -> Any:
            return await k.step(lambda: s.view_of(job_id, tenant))

        first = site.sender(book=CutBook(site.book, killed), post=post, view_of=view_of)
        task = asyncio.create_task(first.run(asyncio.Event()))
        await asyncio.sleep(30)
        await site.end("later")
        await asyncio.sleep(400)
        died = killed.dead
        killed.dead = True  # Also at its end it says nothing to anybody.
        await ended(task)
        async with site.running():
            await asyncio.sleep(2 * 3600)

        got = {got.job_id for got in site.receiver.received}
        assert got == set(jobs), f"cut {cut}"
        assert {r.headers["webhook-id"] for r in site.receiver.received} == {f"msg_{job_id}" for job_id in jobs}
        states = {job_id: (await site.log_of(job_id)).state for job_id in jobs}
        assert set(states.values()) <= {"delivered", "disabled"}, f"cut {cut}: {states}"
        for job_id in jobs:
            assert len({r.body for r in site.receiver.received if r.job_id == job_id}) == 1
        if not died:
            break
        cuts += 1

    assert 20 < cuts < 199


# ---------------------------------------------------------------- what a caller sees


@asynccontextmanager
async def caller(site: Site, hints: list[str] | None = None) -> AsyncGenerator[AsyncClient, None]:
    """A client of an application with nothing but these routes; the tenant is in a header."""
    web = FastAPI()

    async def tenant_of(request: Request) -> str:
        return request.headers.get("x-tenant", "")

    @web.exception_handler(Refusal)
    async def refused(request: Request, exc: Refusal) -> Response:
        return answer(request.url.path, exc)

    routes(web, site.book, tenant_of, (hints if hints is not None else []).append)
    async with AsyncClient(transport=ASGITransport(web), base_url="http://test", headers={"x-tenant": "x"}) as client:
        yield client


async def test_a_caller_reads_the_log_of_his_webhook() -> None:
    site = Site()
    url = await site.ended("a", tenant="x")
    site.receiver.says[url] = [Answered(status_code=503)]
    async with site.running():
        await asyncio.sleep(5)

    async with caller(site) as client:
        response = await client.get("/v1/jobs/a/webhook")

    assert response.status_code == 200
    body = response.json()
    assert body["tries"] == [{"at": pytest.approx(now(), abs=10), "status_code": 503, "detail": ""}]
    assert (body["job_id"], body["url"], body["state"]) == ("a", url, "waiting")
    assert body["next_try_at"] > now()


async def test_a_caller_has_his_webhook_sent_again() -> None:
    site, hints = Site(), list[str]()
    await site.ended("a", tenant="x")
    async with site.running(), caller(site, hints) as client:
        await asyncio.sleep(1)
        response = await client.post("/v1/jobs/a/webhook/replay")
        await asyncio.sleep(1)

    assert (response.status_code, response.json()["state"], hints) == (202, "waiting", ["a"])
    assert [got.headers["webhook-id"] for got in site.receiver.received] == ["msg_a"] * 2


async def test_what_cannot_be_sent_is_not_replayed() -> None:
    site = Site()
    await site.accept("a", tenant="x")

    async with caller(site) as client:
        response = await client.post("/v1/jobs/a/webhook/replay")

    assert (response.status_code, response.json()["code"]) == (409, "nothing_to_send")


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_webhook_of_another_tenant_is_one_that_does_not_exist(method: str) -> None:
    site = Site()
    await site.ended("theirs", tenant="y")
    path = "/v1/jobs/{}/webhook" + ("/replay" if method == "POST" else "")

    async with caller(site) as client:
        theirs = await client.request(method, path.format("theirs"))
        nobodys = await client.request(method, path.format("nobodys"))
        unusable = await client.request(method, path.format("x" * 600))

    assert theirs.status_code == nobodys.status_code == unusable.status_code == 404
    assert theirs.content == nobodys.content == unusable.content
    assert theirs.headers == nobodys.headers


async def test_a_store_that_is_away_is_no_404() -> None:
    site = Site()
    await site.ended("a", tenant="x")
    site.store.away = "gone"

    async with caller(site) as client:
        with pytest.raises(StoreUnavailable):
            await client.get("/v1/jobs/a/webhook")
