"""Fixtures for tests with a real RabbitMQ and a real Redis; where they come from is told in `tests/services.py`.

Both servers are started once per run, when the first test asks for them. A test that breaks Redis takes `own_redis`.
Another folder's conftest may import these fixtures by name: the servers are kept by the run, not by this folder.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, ExitStack
from itertools import count
from pathlib import Path
from typing import Literal

import aio_pika
import pytest
from redis.asyncio import Redis as RedisClient
from structlog.testing import capture_logs

from tests.faults.model import FakeModel
from tests.faults.proxy import TcpProxy
from tests.faults.sinks import BillingServer
from tests.faults.system import System
from tests.in_process import PACE, Broker, InProcess, Neighbours, in_process
from tests.services import Given, Postgres, Rabbit, Redis, Supply, Unavailable, choose
from tests.waiting import eventually
from tests.worker_env import worker_env

TIMEOUT_S = 120
DATABASES = 16
NEEDS_CONTROL_FIXTURES = frozenset({"vhost", "own_redis", "own_postgres"})

OwnRedis = Callable[..., Awaitable[Redis]]
OwnPostgres = Callable[[], Awaitable[Postgres]]
MakeProxy = Callable[..., Awaitable[TcpProxy]]
RunningWorker = Callable[..., Awaitable[InProcess]]


class Services:
    """The run's servers, each made when first asked for."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._supply: Supply | None = None
        self._rabbit: Rabbit | None = None
        self._redis: Redis | None = None
        self._postgres: Postgres | None = None
        self._open = ExitStack()
        self.databases = count()
        config.add_cleanup(self._open.close)

    @property
    def supply(self) -> Supply:
        if self._supply is None:
            self._supply = choose(os.environ, self._say)
            self._open.callback(self._supply.close)
        return self._supply

    @property
    def rabbit(self) -> Rabbit:
        if self._rabbit is None:
            self._rabbit = self.supply.rabbit()
            self._say(f"RabbitMQ ({self.supply.kind}) after {self._rabbit.started_in_s:.1f} s")
        return self._rabbit

    @property
    def postgres(self) -> Postgres:
        if self._postgres is None:
            self._postgres = self.supply.postgres()
            self._say(f"Postgres ({self.supply.kind}) after {self._postgres.started_in_s:.2f} s")
        return self._postgres

    @property
    def redis(self) -> Redis:
        if self._redis is None:
            self._redis = self.supply.redis()
            self._say(f"Redis ({self.supply.kind}) after {self._redis.started_in_s:.2f} s")
        return self._redis

    def _say(self, line: str) -> None:
        capture = self._config.pluginmanager.getplugin("capturemanager")
        terminal = self._config.get_terminal_writer()
        with capture.global_and_fixture_disabled() if capture else ExitStack():
            terminal.line()
            terminal.line(f"test services: {line}")


_SERVICES = pytest.StashKey[Services]()


def services_of(config: pytest.Config) -> Services:
    if _SERVICES not in config.stash:
        config.stash[_SERVICES] = Services(config)
    return config.stash[_SERVICES]


def _or_end(get: Callable[[], Rabbit | Redis | Postgres | Supply]) -> None:
    """End the run where there is no server: a skip would look like a pass."""
    try:
        get()
    except Unavailable as why:
        pytest.exit(str(why), returncode=3)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_control: stops, pauses or sets up a server; not with TEST_SERVICES=url")
    config.addinivalue_line("markers", "alone: measures time or computing; not beside other tests")
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        # What is missing is installed once, before several processes of tests look for it.
        _or_end(lambda: services_of(config).supply)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    controlling = [item for item in items if _needs_control(item)]
    if controlling:
        _or_end(lambda: services_of(config).supply)
        if isinstance(services_of(config).supply, Given):
            items[:] = [item for item in items if item not in controlling]
            config.hook.pytest_deselected(items=controlling)
            config.get_terminal_writer().line(
                f"{len(controlling)} tests control a server, which one given by URL does not allow: deselected"
            )


def _needs_control(item: pytest.Item) -> bool:
    fixtures: list[str] = getattr(item, "fixturenames", [])
    return item.get_closest_marker("needs_control") is not None or not NEEDS_CONTROL_FIXTURES.isdisjoint(fixtures)


@pytest.fixture(scope="session")
def rabbit(request: pytest.FixtureRequest) -> Rabbit:
    """The run's RabbitMQ. It is shared: restart it, pause it, but leave it running and as it was configured."""
    services = services_of(request.config)
    _or_end(lambda: services.rabbit)
    return services.rabbit


@pytest.fixture(scope="session")
def redis_server(request: pytest.FixtureRequest) -> Redis:
    """The run's Redis, shared. Without persistence: a test that restarts or configures a Redis takes `own_redis`."""
    services = services_of(request.config)
    _or_end(lambda: services.redis)
    return services.redis


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> Postgres:
    """The run's Postgres, shared: leave it running. A test that kills one takes `own_postgres`."""
    services = services_of(request.config)
    _or_end(lambda: services.postgres)
    return services.postgres


@pytest.fixture
async def sql_url(postgres: Postgres) -> AsyncGenerator[str]:
    """The URL of a schema that is empty but for our tables: the same for all tests, as making it takes a while."""
    import asyncpg

    connection = await asyncpg.connect(postgres.url)
    try:
        await connection.execute("create schema if not exists tests")
        tables = await connection.fetch("select tablename from pg_tables where schemaname = 'tests'")
        emptied = [f"delete from tests.{name};" for (name,) in tables if name != "iw_schema"]
        await connection.execute("select 1;" + "".join(emptied))
        yield postgres.at("tests")
    finally:
        await connection.close()


@pytest.fixture
async def empty_sql_url(postgres: Postgres) -> AsyncGenerator[str]:
    """The URL of an empty schema of this test's own."""
    import asyncpg

    schema = f"t_{secrets.token_hex(6)}"
    connection = await asyncpg.connect(postgres.url)
    try:
        await connection.execute(f"create schema {schema}")
        yield postgres.at(schema)
        await connection.execute(f"drop schema {schema} cascade")
    finally:
        await connection.close()


@pytest.fixture
async def own_postgres(request: pytest.FixtureRequest) -> AsyncGenerator[OwnPostgres]:
    """`await own_postgres()`: a Postgres of this test's own, to stop and to kill."""
    services = services_of(request.config)
    _or_end(lambda: services.supply)
    async with AsyncExitStack() as made:

        async def make() -> Postgres:
            server = await asyncio.to_thread(services.supply.postgres)
            made.push_async_callback(asyncio.to_thread, server.close)
            return server

        yield make


@pytest.fixture
def deployment_id() -> str:
    """A name that no other test has: the queue `infer_req.<deployment_id>` is this test's alone."""
    return f"t-{secrets.token_hex(6)}"


@pytest.fixture
def rabbitmq_url(rabbit: Rabbit) -> str:
    """The shared broker's default virtual host."""
    return rabbit.url


@pytest.fixture
def vhost(rabbit: Rabbit) -> Generator[str]:
    """The URL of a virtual host of this test's own, for topology that has fixed names. It costs two seconds."""
    name = f"v-{secrets.token_hex(6)}"
    rabbit.ctl("add_vhost", name)
    rabbit.ctl("set_permissions", "-p", name, "guest", ".*", ".*", ".*")
    yield rabbit.at(name)
    rabbit.ctl("delete_vhost", name)


@pytest.fixture
async def redis_url(request: pytest.FixtureRequest, redis_server: Redis) -> str:
    """An empty database: one of sixteen by turns, flushed; by URL the one named there, which must be empty at first."""
    services = services_of(request.config)
    turn = next(services.databases)
    url = redis_server.at(turn % DATABASES) if redis_server.controllable else redis_server.url
    async with RedisClient.from_url(url, socket_timeout=None) as client:
        if not redis_server.controllable and not turn and await client.dbsize():
            pytest.exit(
                "REDIS_URL: the database is not empty, and these tests flush it; name an empty one", returncode=3
            )
        await client.flushdb()
    return url


@pytest.fixture
async def redis_client(redis_url: str) -> AsyncGenerator[RedisClient]:
    """A client of this test's database, for looking."""
    async with RedisClient.from_url(redis_url, socket_timeout=None) as client:
        yield client


@pytest.fixture
async def own_redis(request: pytest.FixtureRequest) -> AsyncGenerator[OwnRedis]:
    """`await own_redis("--appendonly", "yes")`: a Redis of this test's own, to kill, freeze and configure."""
    services = services_of(request.config)
    _or_end(lambda: services.supply)
    async with AsyncExitStack() as made:

        async def make(*args: str) -> Redis:
            server = await asyncio.to_thread(services.supply.redis, *args)
            made.push_async_callback(asyncio.to_thread, server.close)
            return server

        yield make


@pytest.fixture
async def proxy() -> AsyncGenerator[MakeProxy]:
    """`await proxy(rabbit, speaks="amqp")`: a TcpProxy before a server, or a host and port, until the test's end."""
    async with AsyncExitStack() as made:

        async def make(
            server: Rabbit | Redis | Postgres | tuple[str, int], *, speaks: Literal["amqp", "redis"] | None = None
        ) -> TcpProxy:
            host, port = server if isinstance(server, tuple) else (server.host, server.port)
            return await made.enter_async_context(TcpProxy(host, port, speaks=speaks))

        yield make


@pytest.fixture
async def model() -> AsyncGenerator[FakeModel]:
    """The model of this test's workers in the process."""
    async with FakeModel() as made:
        yield made


@pytest.fixture
async def billing() -> AsyncGenerator[BillingServer]:
    """Where this test's workers in the process send usage to."""
    async with BillingServer() as made:
        yield made


@pytest.fixture
async def broker(rabbitmq_url: str) -> AsyncGenerator[Broker]:
    """A connection of the test's own to the shared broker."""
    async with await aio_pika.connect(rabbitmq_url) as connection:
        yield Broker(connection)


@pytest.fixture
async def running_worker(
    rabbitmq_url: str,
    redis_url: str,
    redis_client: RedisClient,
    deployment_id: str,
    model: FakeModel,
    billing: BillingServer,
    broker: Broker,
) -> AsyncGenerator[RunningWorker]:
    """`await running_worker(RABBITMQ_PREFETCH="4")`: a worker in this process, consuming unless `ready=False`."""
    async with AsyncExitStack() as running:
        log = running.enter_context(capture_logs())
        started: list[InProcess] = []

        async def start(*, ready: bool = True, redis: RedisClient = redis_client, **changes: str) -> InProcess:
            env = worker_env(
                rabbitmq_url=rabbitmq_url, redis_url=redis_url, model_url=model.url, deployment_id=deployment_id
            )
            env |= PACE | {"CROESUS_HOST": billing.url} | changes
            env = {name: value for name, value in env.items() if value}
            at = Neighbours(broker=broker, redis=redis, model=model, billing=billing, log=log)
            made = await running.enter_async_context(in_process(env, at))
            started.append(made)
            if ready:
                await made.consuming()
            return made

        yield start
    for one in started:
        await broker.delete(one.queue, one.dlq)
        await broker.delete_exchange(one.env["INFERENCE_DLX"])


@pytest.fixture
async def system(rabbitmq_url: str, redis_url: str, deployment_id: str, tmp_path: Path) -> AsyncGenerator[System]:
    """One deployment on the run's broker and store, with model and sinks; the test starts its workers."""
    async with System(
        rabbitmq_url=rabbitmq_url, redis_url=redis_url, deployment_id=deployment_id, folder=tmp_path
    ) as made:
        yield made


@pytest.fixture(autouse=True)
async def no_task_is_left() -> AsyncGenerator[None]:
    """A task that outlives its test hides an error, or works on in the next one."""
    before = asyncio.all_tasks()
    yield
    own = asyncio.current_task()

    def left() -> list[str]:
        return [repr(task) for task in asyncio.all_tasks() - before if task is not own]

    def none_left() -> bool:
        assert not left(), left()
        return True

    await eventually(none_left, within=2, what="the end of all tasks that the test started")
