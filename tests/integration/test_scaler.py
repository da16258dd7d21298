"""The scale signal over real brokers: what is counted, which way, and what is said while the broker cannot be seen."""

import asyncio
import random
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aio_pika
import httpx
import pytest
from redis.asyncio import Redis

from inference_worker.assembly import Outside
from inference_worker.config.settings import load
from inference_worker.errors import TransportLost
from inference_worker.job_book import JobRecord
from inference_worker.ports import Backlog
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.results.fleet import RedisFleet, wish_key
from inference_worker.results.job_book import RedisJobBook
from inference_worker.rmq_backlog import RabbitMQBacklog
from inference_worker.serve_scaler import run_scaler
from tests.faults.model import FakeModel, ok
from tests.faults.processes import WorkerProcess
from tests.in_process import Broker, request_body
from tests.integration.conftest import MakeProxy, RunningWorker
from tests.services import Container, Rabbit, _rabbit_programs, free_port
from tests.unit import gjson
from tests.waiting import eventually

SOON_S = 15.0
Signal = dict[str, Any]  # JSON has no types.


@pytest.fixture
def queue(deployment_id: str) -> str:
    return f"infer_req.{deployment_id}"


@asynccontextmanager
async def counting(url: str, queue: str, management_url: str | None = None) -> AsyncGenerator[RabbitMQBacklog]:
    management = None if management_url is None else lambda: management_url
    async with RabbitMQBacklog(lambda: url, queue, name="test", management_url=management).open() as backlog:
        yield backlog


@asynccontextmanager
async def holding(url: str, queue: str, count: int) -> AsyncGenerator[None]:
    """A consumer that holds so many messages."""
    async with await aio_pika.connect(url) as connection, connection.channel() as channel:
        await channel.set_qos(count)
        held: asyncio.Queue[object] = asyncio.Queue()
        await (await channel.get_queue(queue)).consume(held.put)
        await eventually(lambda: held.qsize() == count, within=SOON_S, what=f"{count} messages held")
        yield


# ---------------------------------------------------------------- RabbitMQ, by AMQP


async def test_amqp_tells_what_is_ready_at_this_moment(rabbitmq_url: str, broker: Broker, queue: str) -> None:
    await broker.declare(queue, {"x-queue-type": "quorum"})
    for _ in range(5):
        await broker.publish(queue, b"x")

    async with counting(rabbitmq_url, queue) as backlog, holding(rabbitmq_url, queue, 2):
        counted = await backlog.backlog()

    assert counted == Backlog(ready=3, how="amqp")
    await broker.delete(queue)


async def test_a_queue_that_is_not_there_is_not_empty_and_is_seen_once_it_is(
    rabbitmq_url: str, broker: Broker, queue: str
) -> None:
    async with counting(rabbitmq_url, queue) as backlog:
        with pytest.raises(TransportLost, match="no queue"):
            await backlog.backlog()
        await broker.declare(queue)

        assert await backlog.backlog() == Backlog(ready=0, how="amqp")
    await broker.delete(queue)


async def test_a_connection_that_was_lost_is_opened_anew(
    rabbit: Rabbit, broker: Broker, queue: str, proxy: MakeProxy
) -> None:
    between = await proxy(rabbit, speaks="amqp")
    await broker.declare(queue)
    async with counting(between.url(rabbit.url), queue) as backlog:
        await backlog.backlog()
        await between.refuse()
        await between.cut()
        with pytest.raises(TransportLost):
            await backlog.backlog()
        await between.accept()

        assert await backlog.backlog() == Backlog(ready=0, how="amqp")
    await broker.delete(queue)


# ---------------------------------------------------------------- RabbitMQ, by the management API


@pytest.fixture(scope="module")
def management_url(rabbit: Rabbit) -> Generator[str]:
    """The management API of the shared broker. Where it has none, it gets one for the rest of the run."""
    if isinstance(rabbit.engine, Container):
        container = rabbit.engine._wrapped
        container.reload()
        networks = container.attrs["NetworkSettings"]["Networks"]
        yield f"http://{next(iter(networks.values()))['IPAddress']}:15672"
        return
    programs, port = _rabbit_programs(), free_port()
    assert programs is not None
    listener = f'application:set_env(rabbitmq_management, tcp_config, [{{port, {port}}}, {{ip, "127.0.0.1"}}]).'
    plugins = [str(programs / "rabbitmq-plugins"), *rabbit._ctl[1:]]
    rabbit.ctl("eval", listener)
    rabbit.engine.run(*plugins, "enable", "rabbitmq_management")
    yield f"http://127.0.0.1:{port}"  # To take it away again costs as much time as all these tests.


@pytest.mark.needs_control
async def test_the_management_api_tells_what_workers_hold_and_what_comes_back_later(
    rabbitmq_url: str, management_url: str, broker: Broker, queue: str
) -> None:
    """The counts of a quorum queue are up to five seconds old there, so that they are waited for."""
    neighbour, delayed = f"{queue}x", f"{queue}.delay.5000"
    await broker.declare(queue, {"x-queue-type": "quorum"})
    for other in (neighbour, delayed):
        await broker.declare(other)
        await broker.publish(other, b"x")
    for _ in range(5):
        await broker.publish(queue, b"x")

    async with counting(rabbitmq_url, queue, management_url) as backlog, holding(rabbitmq_url, queue, 2):

        async def told() -> bool:
            counted = await backlog.backlog()
            assert counted.ready == 3  # That is not waited for.
            return counted == Backlog(ready=3, in_flight=2, delayed=1, how="management")

        await eventually(told, within=SOON_S, what="two messages in flight, one that comes back")
    await broker.delete(queue, neighbour, delayed)


@pytest.mark.needs_control
async def test_a_queue_with_an_odd_name_is_found_in_a_vhost_of_its_own(
    rabbit: Rabbit, vhost: str, management_url: str
) -> None:
    name = "infer_req.a/b:c#d,e f+g"
    async with await aio_pika.connect(vhost) as connection, connection.channel() as channel:
        await channel.declare_queue(name, durable=True)
        async with counting(vhost, name, management_url) as backlog:
            counted = await backlog.backlog()

    assert counted == Backlog(ready=0, in_flight=0, delayed=0, how="management")


@pytest.mark.needs_control
@pytest.mark.parametrize("wrong", ["credentials", "port"])
async def test_without_the_management_api_amqp_still_counts_and_it_says_so(
    rabbitmq_url: str, management_url: str, broker: Broker, queue: str, wrong: str
) -> None:
    await broker.declare(queue)
    host = management_url.removeprefix("http://")
    url = f"http://guest:wrong@{host}" if wrong == "credentials" else f"http://127.0.0.1:{free_port()}"

    async with counting(rabbitmq_url, queue, url) as backlog:
        assert await backlog.backlog() == Backlog(ready=0, how="amqp")
    await broker.delete(queue)


# ---------------------------------------------------------------- the scaler


class Scaler:
    """One that runs in this process."""

    def __init__(self, port: int, queue: str) -> None:
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False)
        self._path = f"/v1/scale/{queue}"
        self.stop = asyncio.Event()

    async def ask(self) -> httpx.Response:
        return await self._http.get(self._path)

    async def signal(self, until: Callable[[Signal], bool], what: str) -> Signal:
        """Wait for a signal like that."""

        async def come() -> Signal | None:
            answer = await self.ask()
            return answer.json() if answer.status_code == 200 and until(answer.json()) else None

        return await eventually(come, within=SOON_S, what=what)

    async def blind(self) -> httpx.Response:
        async def come() -> httpx.Response | None:
            answer = await self.ask()
            return answer if answer.status_code == 503 else None

        return await eventually(come, within=SOON_S, what="a 503")

    async def close(self) -> None:
        await self._http.aclose()


StartScaler = Callable[..., Awaitable[Scaler]]


@pytest.fixture
async def scaler(rabbitmq_url: str, redis_url: str, deployment_id: str, queue: str) -> AsyncGenerator[StartScaler]:
    """`await scaler(SCALE_MAX="4")`: a scaler that is listening."""
    async with AsyncExitStack() as made:

        async def start(*, of: str = queue, **changes: str) -> Scaler:
            port = free_port()
            env = {
                "RABBITMQ_URL": rabbitmq_url,
                "REDIS_URL": redis_url,
                "DEPLOYMENT_ID": deployment_id,
                "SCALER_PORT": str(port),
                "SCALE_INTERVAL_S": "0.1",
                "SCALE_DOWN_AFTER_S": "0.5",
            }
            one = Scaler(port, of)
            made.push_async_callback(one.close)
            settings = load(env | changes, needs="scaler")
            task = asyncio.create_task(run_scaler(settings, Outside(now=time.time, rng=random.Random(1)), one.stop))

            async def end() -> None:
                one.stop.set()
                await task

            made.push_async_callback(end)

            async def answers() -> bool:
                if task.done():
                    task.result()
                try:
                    return (await one.ask()).status_code in (200, 503)
                except httpx.TransportError:
                    return False

            await eventually(answers, within=SOON_S, what="the scaler listens")
            return one

        yield start


async def test_what_runs_counts_until_it_is_done_and_then_the_wish_goes_down(
    running_worker: RunningWorker, scaler: StartScaler, redis_client: Redis, model: FakeModel, deployment_id: str
) -> None:
    """By AMQP the queue of a busy worker looks empty: what it holds, it says itself."""
    worker = await running_worker(RABBITMQ_PREFETCH="2", REPLICA_ID="worker-1")
    model.next(ok(takes_s=3.0), ok(takes_s=3.0))  # Longer than the time between two beats.
    view = await scaler(SCALE_MAX="4", SCALE_TARGET_PER_REPLICA="1")
    for number in range(3):
        await worker.publish(request_body(f"r{number}"))

    busy = await view.signal(
        lambda seen: (seen["backlog"]["ready"], seen["backlog"]["in_flight"]) == (1, 2), "two in flight, one waits"
    )
    wished = await redis_client.get(wish_key(worker.queue))
    for number in range(3):
        await worker.stored(f"r{number}")
    rest = await view.signal(lambda seen: bool(seen["desired_replicas"] == 1), "a wish for one")

    assert (busy["load"], busy["desired_replicas"], busy["how"], wished) == (3, 3, "amqp+workers", b"3")
    assert busy["capacity"]["slots_per_replica"] == 2
    assert (rest["load"], rest["active"]) == (0, 0)
    seen = await worker.seen()
    assert (seen.dispositions, len(seen.results)) == (["ack"] * 3, 3)


async def test_while_the_broker_cannot_be_seen_it_says_503_and_wants_nothing(
    rabbit: Rabbit, broker: Broker, scaler: StartScaler, proxy: MakeProxy, redis_client: Redis, queue: str
) -> None:
    between = await proxy(rabbit, speaks="amqp")
    await broker.declare(queue)
    for _ in range(3):
        await broker.publish(queue, b"x")
    view = await scaler(RABBITMQ_URL=between.url(rabbit.url))
    await view.signal(lambda seen: bool(seen["desired_replicas"] == 3), "a wish for three")

    await between.refuse()
    await between.cut()
    blind = await view.blind()
    left_ms = await redis_client.pttl(wish_key(queue))

    async def aged() -> bool:
        return bool(await redis_client.pttl(wish_key(queue)) < left_ms - 500)

    await eventually(aged, within=SOON_S, what="a wish that is not renewed")
    with pytest.raises(gjson.Unreadable):
        gjson.read(blind.status_code, blind.content, "load")
    await between.accept()
    again = await view.signal(lambda seen: True, "a signal")

    assert (again["desired_replicas"], again["load"]) == (3, 3)
    await broker.delete(queue)


async def test_a_queue_that_nobody_has_declared_is_not_seen(scaler: StartScaler) -> None:
    view = await scaler()

    async def said() -> bool:  # At first it says that it has not looked yet.
        return "no queue" in (await view.blind()).json()["detail"]

    await eventually(said, within=10, what="it says that there is no queue")


async def test_a_stream_is_counted_with_what_is_pending_and_what_is_due(
    scaler: StartScaler, redis_client: Redis, redis_url: str
) -> None:
    await redis_client.xgroup_create("jobs:a", "workers", id="0", mkstream=True)
    for number in range(5):
        await redis_client.xadd("jobs:a", {"job_id": str(number), "attempt": "0", "request": "{}"})
    await redis_client.xreadgroup("workers", "somebody", {"jobs:a": ">"}, count=2)
    link = RedisLink(lambda: redis_url, lambda: None, client_name="test", tls=RedisTls())
    async with link.open():
        book = RedisJobBook(link, queue="jobs:a", ttl_s=60.0, now=time.time)
        for number, due_s in enumerate((30, 3600)):
            at = time.time()
            record = JobRecord(job_id=f"j{number}", tenant="", created_at=at, expires_at=at + due_s, fingerprint="f")
            await book.reserve(record, None)
        fleet = RedisFleet(link, queue="jobs:a")

        view = await scaler(of="jobs:a", TRANSPORT="redis-streams", IWL_STREAM="jobs:a", IWL_CONCURRENCY="2")
        seen = await view.signal(lambda seen: True, "a signal")

        assert {name: seen["backlog"][name] for name in ("ready", "in_flight", "delayed", "due_within_60s")} == {
            "ready": 3,
            "in_flight": 2,
            "delayed": 0,
            "due_within_60s": 1,
        }
        assert (seen["load"], seen["desired_replicas"]) == (5, 3)
        assert await fleet.desired() == 3


@pytest.mark.needs_control
async def test_the_command_runs_until_it_is_told_to_stop(
    rabbitmq_url: str,
    redis_url: str,
    redis_client: Redis,
    broker: Broker,
    deployment_id: str,
    queue: str,
    tmp_path: Path,
) -> None:
    await broker.declare(queue)
    port = free_port()
    env = {
        "RABBITMQ_URL": rabbitmq_url,
        "REDIS_URL": redis_url,
        "DEPLOYMENT_ID": deployment_id,
        "SCALER_PORT": str(port),
    }
    command = [sys.executable, "-m", "inference_worker", "scaler"]
    async with (
        WorkerProcess(env, output=tmp_path / "scaler.log", command=command) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http,
    ):
        await process.ready(f"http://127.0.0.1:{port}/readyz", within=SOON_S)
        signal = (await http.get("/v1/scale")).json()
        process.terminate()
        code = await process.wait(within=SOON_S)

    assert gjson.path_parts(f"queues.{queue}".replace("infer_req.", r"infer_req\.")) == ["queues", queue]
    assert signal["queues"][queue]["desired_replicas"] == 1
    assert await redis_client.get(wish_key(queue)) == b"1"
    assert code == 0
    await broker.delete(queue)
