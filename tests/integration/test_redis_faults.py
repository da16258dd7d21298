"""A result store that stops, freezes, forgets, refuses and loses replies: answers wait for it, nothing is billed twice.

The numbers B… are those of the collected bug reports of other workers; the rules are in `docs/design/delivery.md`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker.assembly import Worker
from inference_worker.redis_scripts import CLAIM, FINISH, RELEASE, RENEW, SENT, Script
from tests.faults import model as models
from tests.faults import wire
from tests.faults.proxy import Do
from tests.faults.system import System
from tests.integration.conftest import MakeProxy, OwnRedis
from tests.services import Redis
from tests.waiting import eventually

PATIENCE_S = 1.0


@pytest.fixture
async def with_own_redis(
    own_redis: OwnRedis, rabbitmq_url: str, deployment_id: str, tmp_path: Path
) -> AsyncGenerator[tuple[System, Redis]]:
    """A deployment whose Redis is this test's own and keeps what it has acknowledged."""
    server = await own_redis("--appendonly", "yes", "--appendfsync", "always")
    made = System(
        rabbitmq_url=rabbitmq_url, redis_url=server.url, deployment_id=deployment_id, folder=tmp_path, watched=False
    )
    async with made as system:
        yield system, server


async def paused_for_the_store(worker: Worker, *, within: float = 15.0) -> None:
    """Wait until nothing is consumed because of the store."""
    await eventually(
        lambda: worker.listener.state == "suspended" and {"store", "kept"} & worker.listener.suspended.keys(),
        within=within,
        what="a pause for the store",
    )


async def command(client: RedisClient, *words: str) -> None:
    """Any command, in its own words."""
    await client.execute_command(*words)  # type: ignore[no-untyped-call]  # The driver's own gap.


@asynccontextmanager
async def stopped(server: Redis) -> AsyncGenerator[None]:
    await asyncio.to_thread(server.stop)
    yield
    await asyncio.to_thread(server.start)


@asynccontextmanager
async def killed(server: Redis) -> AsyncGenerator[None]:
    await asyncio.to_thread(server.kill)
    yield
    await asyncio.to_thread(server.start)


@asynccontextmanager
async def frozen(server: Redis) -> AsyncGenerator[None]:
    server.pause()
    yield
    server.resume()


@asynccontextmanager
async def read_only(server: Redis) -> AsyncGenerator[None]:
    async with RedisClient.from_url(server.url, socket_timeout=None) as client:
        await command(client, "REPLICAOF", "127.0.0.1", "1")
        yield
        await command(client, "REPLICAOF", "NO", "ONE")


@asynccontextmanager
async def out_of_memory(server: Redis) -> AsyncGenerator[None]:
    async with RedisClient.from_url(server.url, socket_timeout=None) as client:
        await client.config_set("maxmemory-policy", "noeviction")
        await client.config_set("maxmemory", "1")
        yield
        await client.config_set("maxmemory", "0")


@asynccontextmanager
async def password_wanted(server: Redis) -> AsyncGenerator[None]:
    async with RedisClient.from_url(server.url, socket_timeout=None) as client:
        await client.config_set("requirepass", "another")
        await command(client, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        yield
        await client.config_set("requirepass", "")


@pytest.mark.parametrize("beyond_patience", [False, True], ids=["for a moment", "for longer than a message is held"])
@pytest.mark.parametrize("fault", [stopped, killed, frozen, read_only, out_of_memory, password_wanted])
async def test_answers_that_are_ready_while_the_store_is_away_are_stored_when_it_is_back(
    fault: Callable[[Redis], AbstractAsyncContextManager[None]],
    beyond_patience: bool,
    with_own_redis: tuple[System, Redis],
) -> None:
    """B99, B100, B101, B103, B107: one call of the model and one bill each; nothing new is begun meanwhile."""
    system, server = with_own_redis
    ready, waiting = system.ids(4, "ready"), system.ids(4, "waiting")
    opened = asyncio.Event()
    system.model.default = wire.gated(opened, models.ok())
    patience_s = PATIENCE_S if beyond_patience else 30.0
    async with system.inside(REDIS_RETRY_DELAY_S=str(patience_s), RABBITMQ_PREFETCH="4") as worker:
        await system.submit_when_declared(*ready)
        await system.model.busy(4)
        async with fault(server):
            opened.set()
            await system.submit(*waiting)
            await paused_for_the_store(worker)
            if beyond_patience:
                await system.waiting(8)
            assert system.calls() == dict.fromkeys(ready, 1)
        await system.answered([*ready, *waiting])
        await system.drained(worker)
        await system.billed()

    await system.conserved()
    assert system.calls() == dict.fromkeys([*ready, *waiting], 1)
    assert len({str(event["id"]) for event in system.billing.events}) == 8


async def test_a_store_frozen_for_fifteen_seconds_costs_time_and_nothing_else(
    with_own_redis: tuple[System, Redis],
) -> None:
    """B99: longer than every lease, with another replica waiting for the same queue."""
    system, server = with_own_redis
    ids = system.ids(12)
    system.model.default = models.ok(takes_s=0.5)
    async with system.inside("one") as one, system.inside("two") as two:
        await system.submit_when_declared(*ids)
        await system.model.busy(8)
        server.pause()
        try:
            await paused_for_the_store(one)
            await paused_for_the_store(two)
            await asyncio.sleep(15)  # the fault
        finally:
            server.resume()
        await system.answered(ids)
        await system.drained(one, two)
        await system.billed()

    await system.conserved()
    assert max(system.calls().values()) <= 2


class Loading:
    """A Redis that has its data still to load."""

    async def __aenter__(self) -> tuple[str, int]:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        address: tuple[str, int] = self._server.sockets[0].getsockname()
        return address

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            writer.write(b"-LOADING Redis is loading the dataset in memory\r\n")
        writer.close()


async def test_a_store_that_loads_its_data_is_waited_for(system: System, redis_server: Redis, proxy: MakeProxy) -> None:
    """B102: at the start, and later."""
    before, after = system.ids(2)
    async with Loading() as loading:
        store = await proxy(loading)
        async with system.inside(REDIS_URL=store.url(system.redis_url)) as worker:
            await eventually(
                lambda: "LOADING" in worker.store_health.reason or "loading" in worker.store_health.reason,
                within=10,
                what="the news of loading",
            )
            store.server_port = redis_server.port
            await store.cut()
            await eventually(lambda: worker.listener.state == "consuming", within=10, what="a consumer")
            await system.submit(before)
            await system.answered([before])

            store.server_port = loading[1]
            await store.cut()
            await system.submit(after)
            await paused_for_the_store(worker)
            store.server_port = redis_server.port
            await store.cut()
            await system.answered([before, after])
            await system.drained(worker)
            await system.billed()

    await system.conserved()
    assert system.calls() == dict.fromkeys([before, after], 1)


@pytest.mark.parametrize("lacking", ["evalsha", "hset", "set", "xadd", "del", "publish", "pexpireat", "get"])
async def test_a_user_who_lacks_a_command_loses_no_answer_and_no_bill(
    lacking: str, with_own_redis: tuple[System, Redis]
) -> None:
    """B107: what a script may not finish it must not half do; all goes on once the command is allowed."""
    system, server = with_own_redis
    ids = system.ids(3)
    await command(system.redis, "ACL", "SETUSER", "worker", "on", ">pw", "~*", "&*", "+@all", f"-{lacking}")
    url = server.url.replace("redis://", "redis://worker:pw@")
    async with system.inside(REDIS_URL=url, REDIS_RETRY_DELAY_S=str(PATIENCE_S)) as worker:
        await system.submit_when_declared(*ids)
        await eventually(
            lambda: not worker.store_health.ok or system.billing.events,
            within=10,
            what="the trouble, or an answer in spite of it",
        )
        await command(system.redis, "ACL", "SETUSER", "worker", f"+{lacking}")
        await system.answered(ids)
        await system.drained(worker)
        await system.billed()

    await system.conserved()
    assert max(system.calls().values()) <= 2


async def test_an_emptied_store_costs_at_most_a_repeat(with_own_redis: tuple[System, Redis]) -> None:
    """B108: FLUSHALL while ten run and ten wait."""
    system, _ = with_own_redis
    ids = system.ids(20)
    opened = asyncio.Event()
    system.model.default = wire.gated(opened, models.ok())
    async with system.inside(RABBITMQ_PREFETCH="10") as worker:
        await system.submit_when_declared(*ids)
        await system.model.busy(10)
        await system.redis.flushall()
        opened.set()
        await system.answered(ids)
        await system.drained(worker)
        await system.billed()

    await system.conserved()
    assert max(system.calls().values()) <= 2


async def test_forgotten_scripts_are_sent_again(system: System) -> None:
    """NOSCRIPT: SCRIPT FLUSH between the claim and the result, and while idle."""
    running, later = system.ids(10, "running"), system.ids(3, "later")
    opened = asyncio.Event()
    system.model.default = wire.gated(opened, models.ok())
    async with system.inside(RABBITMQ_PREFETCH="10") as worker:
        await system.submit_when_declared(*running)
        await system.model.busy(10)
        await system.redis.script_flush()
        opened.set()
        await system.answered(running)
        await system.redis.script_flush()
        await system.submit(*later)
        await system.answered(later)
        await system.drained(worker)
        await system.billed()

    await system.conserved()
    assert system.calls() == dict.fromkeys([*running, *later], 1)


@pytest.mark.parametrize("do", [Do.RESET, Do.CUT_ON_REPLY], ids=["before it is done", "after it was done"])
@pytest.mark.parametrize(
    ("script", "name"),
    [(CLAIM, "claim"), (RENEW, "renew"), (FINISH, "finish"), (RELEASE, "release"), (SENT, "sent")],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_connection_lost_at_a_script_costs_no_call_and_no_bill(
    script: Script, name: str, do: Do, system: System, redis_server: Redis, proxy: MakeProxy
) -> None:
    """Whether it was done is unknown to the worker, which asks again with the same token."""
    store = await proxy(redis_server, speaks="redis")
    (one,) = system.ids(1)
    if name == "release":
        system.model.next(wire.close_before_answer())
    system.model.default = models.ok(takes_s=0.5 if name == "renew" else 0.0)
    async with system.inside(REDIS_URL=store.url(system.redis_url), CLAIM_LEASE_S="1") as worker:
        await eventually(lambda: worker.listener.state == "consuming", within=10, what="a consumer")
        lost = store.when_client_sends(lambda unit: script.sha.encode() in unit.args, do)
        await system.submit(one)
        await system.answered([one])
        await system.drained(worker)
        await system.billed()
        assert lost.hits == 1

    await system.conserved()
    assert system.calls()[one] == (2 if name == "release" else 1)
    assert len({str(event["id"]) for event in system.billing.events}) == 1


async def test_a_hundred_and_fifty_answers_at_once_fit_through(system: System) -> None:
    """B105: no pool that says "too many"."""
    ids = system.ids(150)
    opened = asyncio.Event()
    system.model.default = wire.gated(opened, models.ok())
    async with system.inside(RABBITMQ_PREFETCH="150") as worker:
        await system.submit_when_declared(*ids)
        await system.model.busy(150, within=20)
        opened.set()
        await system.answered(ids)
        await system.drained(worker)
        await system.billed()

    await system.conserved()
    assert system.calls() == dict.fromkeys(ids, 1)


async def test_an_outage_is_told_once(with_own_redis: tuple[System, Redis]) -> None:
    """B117: few lines, whatever its length; ready again by itself."""
    system, server = with_own_redis
    async with system.worker() as worker:
        await asyncio.to_thread(server.stop)
        await worker.ready(worker.readyz, status=503)
        await asyncio.sleep(3)  # the outage
        await asyncio.to_thread(server.start)
        await worker.ready(worker.readyz)
        await system.stopped(worker)

    assert len(worker.lines("the result store does not answer; consuming pauses")) == 1
    assert len(worker.log.splitlines()) < 20, worker.log
