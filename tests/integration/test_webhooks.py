"""Webhooks over real sockets and a real Redis: the contract of hook books, and gateways that die."""

import asyncio
import base64
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal

import pytest
from redis.asyncio import Redis as RedisClient
from standardwebhooks import Webhook

from inference_worker.disposition import Token
from inference_worker.gateway.views import View, ended_view
from inference_worker.gateway.webhooks import WebhookSender
from inference_worker.job_book import HOOK_KEPT_S, HookTry, JobRecord, Reserved
from inference_worker.job_records import hooks_key, record_key
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.results.hook_book import RedisHookBook, hook_key
from inference_worker.results.job_book import RedisJobBook
from inference_worker.results.redis import RedisStore, result_key
from inference_worker.timing import ended
from tests.faults import wire
from tests.faults.wire import Request
from tests.hook_book_contract import LEASE_S, HookBookContract, record
from tests.integration.conftest import MakeProxy
from tests.services import Redis
from tests.store_contract import failure, reply
from tests.waiting import eventually
from tests.webhook_receiver import Receiver, posting

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
QUEUE = "infer_req.d"
TTL_S = 3600

# ---------------------------------------------------------------- the book in Redis


def linked(url: str) -> RedisLink:
    return RedisLink(lambda: url, lambda: None, client_name="test", tls=RedisTls())


class RedisHookHarness:
    """Two gateways with a connection each. Time passes by moving all that is written down back."""

    def __init__(self, first: RedisLink, second: RedisLink, client: RedisClient) -> None:
        self.client = client
        self.link = first
        self.jobs = RedisJobBook(first, queue=QUEUE, ttl_s=TTL_S, now=time.time)
        self.store = RedisStore(first, deployment_id="d", replica_id="r", lease_s=15, ttl_s=TTL_S)
        self.book = RedisHookBook(first, queue=QUEUE)
        self.other = RedisHookBook(second, queue=QUEUE)
        self.elsewhere = RedisHookBook(second, queue="other")

    def now(self) -> float:
        return time.time()

    async def names(self, prefix: str = "") -> list[str]:
        """The keys there are."""
        return [key if isinstance(key, str) else key.decode() for key in await self.client.keys(f"{prefix}*")]

    async def pass_time(self, seconds: float) -> None:
        for name in await self.names():
            if (left_ms := int(await self.client.pttl(name))) >= 0:
                await self.client.pexpire(name, left_ms - round(seconds * 1000))
        for name in await self.names(hook_key("")):
            if await self.client.hexists(name, "next"):
                await self.client.hincrbyfloat(name, "next", -seconds)
        for name in await self.names(record_key("")):
            await self.client.hincrbyfloat(name, "created_at", -seconds)
        index = hooks_key(QUEUE)
        for member in await self.client.zrange(index, 0, -1):
            assert isinstance(member, bytes)
            await self.client.zincrby(index, -seconds, member)

    async def accept(self, record: JobRecord) -> None:
        reserved = await self.jobs.reserve(record, None)
        assert isinstance(reserved, Reserved)
        await self.jobs.confirm(reserved)

    async def finish(self, job_id: str, status: Literal["completed", "failed"] = "completed") -> None:
        await self.store.write((reply if status == "completed" else failure)(job_id), None, Token("w"))

    async def forget_result(self, job_id: str) -> None:
        await self.client.delete(result_key(job_id))

    async def forget_job(self, job_id: str) -> None:
        await self.client.delete(record_key(job_id))


@pytest.fixture
async def harness(redis_url: str, redis_client: RedisClient) -> AsyncGenerator[RedisHookHarness]:
    async with AsyncExitStack() as links:
        first, second = [await links.enter_async_context(linked(redis_url).open()) for _ in range(2)]
        yield RedisHookHarness(first, second, redis_client)


class TestRedisHookBook(HookBookContract):
    """All clauses, on a real Redis."""


async def test_no_key_is_for_ever(harness: RedisHookHarness) -> None:
    for name in ("open", "taken", "later", "over", "replayed"):
        await harness.accept(record(name, time.time()))
        if name != "open":
            await harness.finish(name)
    hooks = {hook.job_id: hook for hook in await harness.book.due(10, LEASE_S)}
    hooks |= {hook.job_id: hook for hook in await harness.book.due(10, LEASE_S)}
    await harness.book.hasten(list(hooks))
    hooks |= {hook.job_id: hook for hook in await harness.book.due(10, LEASE_S)}
    assert hooks.keys() == {"taken", "later", "over", "replayed"}
    tried = HookTry(at=time.time(), status_code=500)
    await harness.book.later(hooks["later"], 86_400.0, tried, b"{}")
    await harness.book.later(hooks["over"], 86_400.0, tried, b"{}")
    await harness.book.over(hooks["over"], "failed", tried, b"{}")
    await harness.book.over(hooks["replayed"], "disabled", tried, b"{}")
    assert await harness.book.replay("replayed")

    ends = {name: await harness.client.ttl(name) for name in await harness.names()}

    assert [key for key, left_s in ends.items() if left_s < 0] == []
    assert ends[hook_key("later")] == pytest.approx(86_400 + HOOK_KEPT_S, abs=5)
    assert ends[hook_key("over")] == pytest.approx(HOOK_KEPT_S, abs=5)
    assert ends[hooks_key(QUEUE)] >= 86_400 + HOOK_KEPT_S - 5


async def test_a_job_whose_worker_may_not_write_its_record_is_told_all_the_same(harness: RedisHookHarness) -> None:
    """The worker's user may have no right to the intake's keys: the result alone says that the job has ended."""
    await harness.accept(record("a", time.time()))
    await harness.client.set(result_key("a"), b"{}")
    await harness.book.hasten(["a"])

    assert [hook.job_id for hook in await harness.book.due(10, LEASE_S)] == ["a"]


# ---------------------------------------------------------------- gateways


@pytest.fixture
async def receiver() -> AsyncGenerator[Receiver]:
    async with Receiver() as server:
        yield server


class Meter:
    """Counts."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def hook(self, outcome: str) -> None:
        self.seen[outcome] += 1


@asynccontextmanager
async def gateway(
    url: str, meter: Meter | None = None
) -> AsyncGenerator[tuple[WebhookSender, Callable[[], Awaitable[None]]], None]:
    """The sender of one gateway with a connection of its own, and its end by a kill."""
    link, until = linked(url), asyncio.Event()
    store = RedisStore(link, deployment_id="d", replica_id="r", lease_s=15, ttl_s=TTL_S)
    jobs = RedisJobBook(link, queue=QUEUE, ttl_s=TTL_S, now=time.time)

    async def view_of(job_id: str, _: str) -> View:
        stored = await store.read(job_id)
        assert stored is not None
        return ended_view(job_id, stored, await jobs.find(job_id))

    async with link.open(), posting() as post:
        sender = WebhookSender(
            book=RedisHookBook(link, queue=QUEUE),
            view_of=view_of,
            secret_of=lambda _: SECRET,
            post=post,
            meter=meter or Meter(),
            now=time.time,
            rng=random.Random(1),
        )
        task = asyncio.create_task(sender.run(until))

        async def kill() -> None:
            link._closed = True  # As from a dead process, no word reaches Redis from here on.
            await ended(task)

        try:
            yield sender, kill
        finally:
            until.set()
            await asyncio.wait([task], timeout=10)
            await ended(task)


def ids(requests: Sequence[Request]) -> Counter[str]:
    return Counter(request.headers["webhook-id"] for request in requests)


async def states(harness: RedisHookHarness, names: Sequence[str]) -> Mapping[str, str]:
    logs = {name: await harness.book.log_of(name) for name in names}
    return {name: "none" if log is None else log.state for name, log in logs.items()}


async def accept(harness: RedisHookHarness, receiver: Receiver, names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        url = f"http://h{number}.example:{receiver.port}/{name}"
        await harness.accept(record(name, time.time(), url=url))


async def test_two_gateways_tell_of_each_job_once_signed_as_the_standard_says(
    harness: RedisHookHarness, redis_url: str, receiver: Receiver
) -> None:
    names = [f"r-{number}" for number in range(40)]
    await accept(harness, receiver, names)

    async with gateway(redis_url), gateway(redis_url):
        for name in names:
            await harness.finish(name, "failed" if name.endswith("7") else "completed")
        await eventually(lambda: _all(harness, names, {"delivered"}), within=15, what="all webhooks", every=0.1)

    assert ids(receiver.requests) == {f"msg_{name}": 1 for name in names}
    for request in receiver.requests:
        body = Webhook(SECRET).verify(request.body, request.headers)
        assert body["data"]["job_id"] == request.path.lstrip("/")
        assert body["type"] == ("job.dead" if request.path.endswith("7") else "job.succeeded")


async def _all(harness: RedisHookHarness, names: Sequence[str], ends: set[str]) -> bool:
    return set((await states(harness, names)).values()) <= ends


async def test_a_killed_gateways_webhooks_go_to_another_under_the_same_id(
    harness: RedisHookHarness, redis_url: str, receiver: Receiver
) -> None:
    names = [f"r-{number}" for number in range(6)]
    await accept(harness, receiver, names)
    for name in names:
        await harness.finish(name)
    receiver.behaves = wire.silent()

    async with gateway(redis_url) as (_, kill):
        await eventually(lambda: len(receiver.requests) == len(names), within=10, what="all under way")
        await kill()
    receiver.behaves = wire.answer(204)
    await leases_lapse(harness)
    async with gateway(redis_url):
        await eventually(lambda: _all(harness, names, {"delivered"}), within=15, what="all webhooks", every=0.1)

    assert ids(receiver.requests) == {f"msg_{name}": 2 for name in names}
    assert len({request.body for request in receiver.requests}) == len(names)


async def test_a_broken_connection_to_redis_delays_and_loses_nothing(
    harness: RedisHookHarness, redis_url: str, redis_server: Redis, proxy: MakeProxy, receiver: Receiver
) -> None:
    names = [f"r-{number}" for number in range(30)]
    await accept(harness, receiver, names)
    between, done = await proxy(redis_server, speaks="redis"), list[Request]()

    async with gateway(between.url(redis_url)):
        for number, name in enumerate(names):
            await harness.finish(name)
            if number % 7 == 5:
                await eventually(lambda: receiver.requests, within=20, what="one more webhook")
                receiver.requests, done = [], [*done, *receiver.requests]
                await between.cut()
        await eventually(lambda: _told(harness, names), within=30, what="all webhooks", every=0.2)

    assert ids([*done, *receiver.requests]).keys() == {f"msg_{name}" for name in names}


async def _told(harness: RedisHookHarness, names: Sequence[str]) -> bool:
    """What was taken when the connection broke comes once its lease lapses."""
    await leases_lapse(harness)
    return await _all(harness, names, {"delivered"})


async def leases_lapse(harness: RedisHookHarness) -> None:
    """Let the time pass that all those have who are sending."""
    for name in await harness.names(hook_key("")):
        if await harness.client.hget(name, "held") == b"1":
            await harness.client.hset(name, "next", "1")
            await harness.book.hasten([name.removeprefix(hook_key(""))])


async def test_a_failed_one_is_sent_again_by_a_replay(
    harness: RedisHookHarness, redis_url: str, receiver: Receiver
) -> None:
    await accept(harness, receiver, ["a"])
    await harness.finish("a")
    receiver.behaves = wire.answer(410)
    meter = Meter()

    async with gateway(redis_url, meter) as (sender, _):
        await eventually(lambda: _all(harness, ["a"], {"disabled"}), within=10, what="the first try")
        await harness.forget_result("a")
        receiver.behaves = wire.answer(204)
        assert await harness.other.replay("a")
        sender.hint("a")
        await eventually(lambda: _all(harness, ["a"], {"delivered"}), within=10, what="the replay")

    assert ids(receiver.requests) == {"msg_a": 2}
    assert receiver.requests[0].body == receiver.requests[1].body
    assert meter.seen == {"disabled": 1, "delivered": 1}
