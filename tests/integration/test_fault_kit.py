"""The kit that other tests break things with does what it says: real servers, proxy, processes, model, sinks, check."""

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import aio_pika
import aiohttp
import pytest
from redis.asyncio import Redis as RedisClient
from redis.exceptions import ConnectionError as RedisGone

from tests import conservation
from tests.conservation import Evidence, ResultWatcher, assert_conserved, drain_queue, faults_of, peek, publish
from tests.faults import model as models
from tests.faults import wire
from tests.faults.model import BY_NAME, FakeModel
from tests.faults.processes import WorkerProcess
from tests.faults.proxy import Do, Way
from tests.faults.sinks import BillingServer, MetricServer
from tests.integration.conftest import MakeProxy, OwnRedis
from tests.llamacpp.server import LlamaServer, llama_server
from tests.services import Rabbit, Redis, Unavailable, choose, free_port
from tests.waiting import NotInTime, eventually

__all__ = ["llama_server"]

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


class Echo:
    """A TCP server that sends back what it gets."""

    async def __aenter__(self) -> tuple[str, int]:
        port = free_port()
        self._server = await asyncio.start_server(self._echo, "127.0.0.1", port)
        return "127.0.0.1", port

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()


async def say(host: str, port: int, text: bytes, expect: int) -> bytes:
    """Send, and return what came back, up to `expect` bytes."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(text)
        async with asyncio.timeout(5):
            return await reader.readexactly(expect)
    except asyncio.IncompleteReadError as short:
        return short.partial
    finally:
        writer.close()


# Waiting


async def test_a_condition_that_does_not_come_is_named() -> None:
    with pytest.raises(NotInTime, match=r"waited 0\.05 s for godot"):
        await eventually(lambda: False, within=0.05, what="godot")


async def test_a_failed_assertion_counts_as_not_yet() -> None:
    answers = [0, 0, 1]

    def third_time_lucky() -> bool:
        assert answers.pop(0), "not yet"
        return True

    assert await eventually(third_time_lucky, within=1, what="the third answer")


# Services


def test_a_wrong_choice_of_services_is_told() -> None:
    with pytest.raises(Unavailable, match="accepted are url, docker, local"):
        choose({"TEST_SERVICES": "moon"}, print)


def test_services_by_url_need_both_urls() -> None:
    with pytest.raises(Unavailable, match="needs RABBITMQ_URL and REDIS_URL"):
        choose({"TEST_SERVICES": "url"}, print)


async def test_a_database_is_empty_and_a_queue_keeps_what_it_gets(
    redis_client: RedisClient, rabbitmq_url: str, deployment_id: str
) -> None:
    assert await redis_client.dbsize() == 0
    queue = f"infer_req.{deployment_id}"
    await publish(rabbitmq_url, queue, {"request_id": "a"}, {"request_id": "b"}, declare={})

    seen, again, drained = [
        [conservation.request_id_of(message) for message in messages]
        for messages in (
            await peek(rabbitmq_url, queue),
            await peek(rabbitmq_url, queue),
            await drain_queue(rabbitmq_url, queue),
        )
    ]

    assert seen == again == drained == ["a", "b"]
    assert await drain_queue(rabbitmq_url, queue) == []


@pytest.mark.needs_control
async def test_a_broker_keeps_durable_queues_over_a_kill(rabbit: Rabbit, deployment_id: str) -> None:
    queue = f"infer_req.{deployment_id}"
    await publish(rabbit.url, queue, {"request_id": "a"}, declare={"x-queue-type": "quorum"})
    await asyncio.to_thread(rabbit.write_down)

    await asyncio.to_thread(rabbit.kill)
    assert not rabbit.answers()
    await asyncio.to_thread(rabbit.start)

    assert [conservation.request_id_of(message) for message in await drain_queue(rabbit.url, queue)] == ["a"]


@pytest.mark.needs_control
async def test_a_paused_broker_answers_nothing_until_it_is_resumed(rabbit: Rabbit) -> None:
    rabbit.pause()
    try:
        assert not await asyncio.to_thread(rabbit.answers)
    finally:
        rabbit.resume()

    await eventually(lambda: asyncio.to_thread(rabbit.answers), within=20, what="the resumed broker")


async def test_a_virtual_host_is_empty(vhost: str) -> None:
    assert await peek(vhost, "infer.dlq") == []


async def test_an_own_redis_keeps_acknowledged_writes_over_a_kill(own_redis: OwnRedis) -> None:
    server = await own_redis("--appendonly", "yes")
    async with RedisClient.from_url(server.url, socket_timeout=None) as client:
        await client.set("a", "1")

        await asyncio.to_thread(server.kill)
        assert not server.answers()
        await asyncio.to_thread(server.start)

    async with RedisClient.from_url(server.url, socket_timeout=None) as client:
        assert await client.get("a") == b"1"


async def test_a_paused_redis_is_silent_and_loses_nothing(own_redis: OwnRedis) -> None:
    server = await own_redis()
    async with RedisClient.from_url(server.url, socket_timeout=None) as client:
        await client.ping()
        await asyncio.to_thread(server.pause)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.ping()
        await asyncio.to_thread(server.resume)

        assert await client.ping()


# Proxy


async def test_a_delay_is_paid_once_each_way(proxy: MakeProxy) -> None:
    async with Echo() as echo:
        through = await proxy(echo)
        through.delay(0.1)
        began = asyncio.get_running_loop().time()

        assert await say(through.host, through.port, b"hello", 5) == b"hello"

        assert asyncio.get_running_loop().time() - began >= 0.2


async def test_what_was_frozen_arrives_after_the_thaw(proxy: MakeProxy) -> None:
    async with Echo() as echo:
        through = await proxy(echo)
        through.freeze(Way.DOWN)
        answer = asyncio.ensure_future(say(through.host, through.port, b"hello", 5))
        await eventually(lambda: through.passed[Way.UP] == 5, within=5, what="the question at the server")
        assert not answer.done()

        through.thaw()

        assert await answer == b"hello"


@pytest.mark.parametrize(("after_bytes", "came"), [(3, b"hel"), (0, b""), (5, b"hello")])
async def test_a_truncated_answer_ends_at_the_byte(proxy: MakeProxy, after_bytes: int, came: bytes) -> None:
    async with Echo() as echo:
        through = await proxy(echo)
        through.truncate(Way.DOWN, after_bytes)

        assert await say(through.host, through.port, b"hello", 6) == came


async def test_a_reset_is_a_reset_and_a_cut_is_an_end(proxy: MakeProxy) -> None:
    async with Echo() as echo:
        through = await proxy(echo)
        reader, writer = await asyncio.open_connection(through.host, through.port)
        await eventually(lambda: through.open, within=5, what="the connection")
        assert await through.cut() == 1
        assert await reader.read() == b""
        writer.close()

        reader, writer = await asyncio.open_connection(through.host, through.port)
        await eventually(lambda: through.open, within=5, what="the connection")
        assert await through.reset() == 1
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        assert through.accepted == 2


async def test_a_refusing_proxy_refuses_until_it_accepts(proxy: MakeProxy) -> None:
    async with Echo() as echo:
        through = await proxy(echo)
        await through.refuse()
        with pytest.raises(ConnectionRefusedError):
            await say(through.host, through.port, b"hello", 5)
        await through.accept()

        assert await say(through.host, through.port, b"hello", 5) == b"hello"


async def test_a_silent_proxy_accepts_and_says_nothing(proxy: MakeProxy) -> None:
    async with Echo() as echo:
        through = await proxy(echo)
        through.silence()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await say(through.host, through.port, b"hello", 5)

        assert through.accepted == 1


async def test_dropped_bytes_do_not_arrive(proxy: MakeProxy) -> None:
    async with Echo() as echo:
        through = await proxy(echo)
        reader, writer = await asyncio.open_connection(through.host, through.port)
        through.drop(Way.UP)
        writer.write(b"lost")
        await eventually(lambda: through.swallowed[Way.UP] == 4, within=5, what="the lost bytes")
        through.let_pass()
        writer.write(b"kept")

        assert await reader.readexactly(4) == b"kept"
        writer.close()


async def one_message(url: str, queue: str) -> None:
    """Get one message and acknowledge it, then close in good order."""
    async with await aio_pika.connect(url) as connection, connection.channel() as channel:
        source = await channel.declare_queue(queue, passive=True)
        message = await source.get()
        await message.ack()


@pytest.mark.parametrize(
    ("do", "left"),
    [
        pytest.param(Do.DROP, 1, id="an ack that is dropped leaves the message"),
        pytest.param(Do.CUT, 1, id="a cut before the ack leaves the message"),
        pytest.param(Do.RESET, 1, id="a reset before the ack leaves the message"),
        pytest.param(Do.CUT_AFTER, 0, id="a cut after the ack takes the message"),
    ],
)
async def test_an_ack_is_hit(proxy: MakeProxy, rabbit: Rabbit, deployment_id: str, do: Do, left: int) -> None:
    queue = f"infer_req.{deployment_id}"
    await publish(rabbit.url, queue, {"request_id": "a"}, declare={})
    through = await proxy(rabbit, speaks="amqp")
    trap = through.when_client_sends("basic.ack", do)

    try:
        await one_message(through.url(rabbit.url), queue)
    except (aio_pika.exceptions.AMQPError, ConnectionError, asyncio.CancelledError):
        assert do is not Do.DROP

    await trap.sprung()
    await eventually(lambda: through.open == 0, within=10, what="the end of the connection")

    async def as_expected() -> bool:
        messages = await peek(rabbit.url, queue)
        assert len(messages) == left
        return True

    await eventually(as_expected, within=10, what=f"{left} messages in the queue")
    await drain_queue(rabbit.url, queue)


async def test_a_lost_confirm_leaves_a_published_message(proxy: MakeProxy, rabbit: Rabbit, deployment_id: str) -> None:
    queue = f"infer_req.{deployment_id}"
    await publish(rabbit.url, queue, {"request_id": "a"}, declare={})
    through = await proxy(rabbit, speaks="amqp")
    trap = through.when_server_sends("basic.ack", Do.CUT)

    with pytest.raises((aio_pika.exceptions.AMQPError, ConnectionError, asyncio.CancelledError)):
        await publish(through.url(rabbit.url), queue, {"request_id": "b"})

    assert trap.hits == 1
    found = await drain_queue(rabbit.url, queue)
    assert [conservation.request_id_of(message) for message in found] == ["a", "b"]


async def test_a_dropped_publish_goes_with_its_content(proxy: MakeProxy, rabbit: Rabbit, deployment_id: str) -> None:
    queue = f"infer_req.{deployment_id}"
    await publish(rabbit.url, queue, declare={})
    through = await proxy(rabbit, speaks="amqp")
    trap = through.when_client_sends("basic.publish", Do.DROP)

    async with await aio_pika.connect(through.url(rabbit.url)) as connection:
        channel = await connection.channel(publisher_confirms=False)
        for body in (b"lost", b"kept"):
            await channel.default_exchange.publish(aio_pika.Message(body), routing_key=queue)
        await channel.close()

    assert trap.hits == 1
    assert [message.body for message in await drain_queue(rabbit.url, queue)] == [b"kept"]


@pytest.mark.parametrize(
    ("do", "stored"),
    [
        pytest.param(Do.CUT, None, id="a cut before the command: not done"),
        pytest.param(Do.CUT_ON_REPLY, b"1", id="a cut in the place of the reply: done, and unknown"),
    ],
)
async def test_a_command_is_hit(
    proxy: MakeProxy, redis_server: Redis, redis_url: str, do: Do, stored: bytes | None
) -> None:
    through = await proxy(redis_server, speaks="redis")
    async with (
        RedisClient.from_url(through.url(redis_url), socket_timeout=None, retry=None) as client,
        RedisClient.from_url(redis_url, socket_timeout=None) as direct,
    ):
        await client.set("b", "0")
        trap = through.when_client_sends(b"infer_resp:", do)

        with pytest.raises(RedisGone):
            await client.set("infer_resp:a", "1")

        assert trap.units[0].args[:2] == (b"SET", b"infer_resp:a")
        assert await direct.get("infer_resp:a") == stored
        assert await client.get("b") == b"0"


# Processes


async def test_a_process_ends_as_it_is_told(tmp_path: Path) -> None:
    sleeper = (sys.executable, "-c", "print('up', flush=True); import time; time.sleep(60)")
    worker = WorkerProcess({}, output=tmp_path / "log", command=sleeper)
    for end, code in ((worker.terminate, -signal.SIGTERM), (worker.kill, -signal.SIGKILL)):
        async with worker:
            await worker.logged("up")
            worker.output.unlink()
            end()

            assert await worker.wait(within=5) == code


async def test_a_model_of_its_own_process_takes_orders(tmp_path: Path) -> None:
    port = free_port()
    command = (sys.executable, "-m", "tests.faults.model", "--port", str(port))
    async with WorkerProcess({}, output=tmp_path / "log", command=command) as process, aiohttp.ClientSession() as web:
        await process.ready(f"http://127.0.0.1:{port}/health")
        orders = {"next": [{"error": {"status": 429}}], "health": ["status", 500]}
        await web.post(f"http://127.0.0.1:{port}/__control__", json=orders)

        answers = [
            (await web.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=CHAT)).status,
            (await web.get(f"http://127.0.0.1:{port}/health")).status,
        ]
        record = await (await web.post(f"http://127.0.0.1:{port}/__control__")).json()

        assert answers == [429, 500]
        assert (record["peak"], len(record["requests"]), record["probes"]) == (1, 1, 2)


# Model


async def ask(model: FakeModel, body: Mapping[str, object] = CHAT, total_s: float = 5.0) -> tuple[int, bytes]:
    timeout = aiohttp.ClientTimeout(total=total_s)
    async with (
        aiohttp.ClientSession(timeout=timeout) as web,
        web.post(f"{model.url}/v1/chat/completions", json=body, allow_redirects=False) as answer,
    ):
        return answer.status, await answer.read()


@pytest.mark.parametrize(
    ("name", "comes"),
    [
        ("ok", 200),
        ("retry_after", 503),
        ("close_before_answer", aiohttp.ServerDisconnectedError),
        ("close_after_headers", aiohttp.ClientPayloadError),
        ("half_body", aiohttp.ClientPayloadError),
        ("chunked_without_end", aiohttp.ClientPayloadError),
        ("reset", aiohttp.ClientConnectionError),
        ("html", 200),
        ("broken_gzip", aiohttp.ClientPayloadError),
        ("latin1", 200),
        ("no_content", 204),
        ("empty", 200),
        ("redirect", 307),
        ("lone_surrogate", 200),
        ("not_a_number", 200),
        ("deep", 200),
        ("cut_all", aiohttp.ServerDisconnectedError),
        ("sse_error", 200),
        ("sse_without_end", aiohttp.ClientPayloadError),
        ("sse_shed", 200),
        ("silent", TimeoutError),
    ],
)
async def test_a_behaviour_is_what_it_says(name: str, comes: int | type[Exception]) -> None:
    argument = ("7",) if name == "retry_after" else ()
    async with FakeModel() as model:
        model.next(BY_NAME[name](*argument))

        if isinstance(comes, int):
            assert (await ask(model))[0] == comes
        else:
            with pytest.raises(comes):
                await ask(model, total_s=0.3)
        assert (await ask(model))[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_huge_body_is_of_its_size(chunked: bool) -> None:
    async with FakeModel(default=wire.huge(3_000_001, chunked=chunked)) as model:
        assert len((await ask(model))[1]) == 3_000_001


async def test_a_stream_has_its_usage_and_its_end() -> None:
    async with FakeModel() as model:
        _, body = await ask(model, {**CHAT, "stream": True, "stream_options": {"include_usage": True}})

    *chunks, done = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    assert done == b"[DONE]"
    assert json.loads(chunks[-1])["usage"]["total_tokens"] == 5


async def test_a_model_records_bodies_concurrency_and_who_left() -> None:
    async with FakeModel() as model:
        opened = asyncio.Event()
        model.default = wire.gated(opened, models.ok())
        model.when_prompt_has("poison", wire.cut_all())
        async with asyncio.TaskGroup() as group:
            two = [group.create_task(ask(model)) for _ in range(2)]
            with pytest.raises(TimeoutError):
                await ask(model, total_s=0.1)
            await model.busy(2)
            opened.set()

        assert [task.result()[0] for task in two] == [200, 200]
        assert model.peak == 3
        assert sum(request.disconnected_at is not None for request in model.requests) == 1
        assert all(json.loads(request.body) == CHAT for request in model.requests)
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await ask(model, {"prompt": "poison"})


async def test_a_dead_model_comes_back_on_its_port() -> None:
    async with FakeModel() as model:
        await model.refuse()
        with pytest.raises(aiohttp.ClientConnectorError):
            await ask(model)

        await model.listen()

        assert (await ask(model))[0] == 200


async def test_llama_cpp_answers(llama_server: LlamaServer) -> None:
    async with (
        aiohttp.ClientSession() as web,
        web.post(f"{llama_server.url}/v1/chat/completions", json={**CHAT, "max_tokens": 4}) as answer,
    ):
        assert (await answer.json())["usage"]["completion_tokens"] == 4


# Sinks


async def test_sinks_record_and_fail_as_told() -> None:
    async with MetricServer() as metrics, BillingServer() as billing, aiohttp.ClientSession() as web:
        billing.reject("bad")
        events = [{"id": "good", "data": {"request_id": "r"}}, {"id": "bad"}]
        metrics.fail(status=500)

        statuses = [
            (await web.post(f"{metrics.url}/metrics", json={"requests": []})).status,
            (await web.post(f"{billing.url}/events", json=events)).status,
            (await web.post(f"{billing.url}/events", json=events[:1])).status,
        ]

        assert statuses == [500, 400, 204]
        assert [event["id"] for event in await billing.billed(1)] == ["good"]
        assert len(metrics.batches) == 1


# Conservation


def result(tokens: int = 2, code: str | None = None) -> dict[str, object]:
    if code is None:
        return {"status": "completed", "status_code": 200, "result": {"usage": {"total_tokens": tokens}}}
    return {"status": "failed", "status_code": 500, "error": "x", "error_code": code}


def bill(request_id: str, event_id: str | None = None) -> dict[str, object]:
    return {"id": event_id or f"usage-{request_id}", "data": {"request_id": request_id}}


GOOD = Evidence(
    submitted=frozenset("abcd"),
    queued=Counter("a"),
    results={"b": result(), "c": result(code="retries_exhausted"), "d": result(0)},
    dead=Counter("c"),
    billed=[bill("b"), bill("b")],
    outbox=[bill("b")],
    announced={"b": ["completed"], "c": ["failed"], "d": ["completed"]},
)


def test_a_good_end_is_conserved() -> None:
    assert_conserved(GOOD)


@pytest.mark.parametrize(
    ("breach", "said"),
    [
        (replace(GOOD, queued=Counter()), "lost, neither queued nor answered nor dead: a"),
        (replace(GOOD, dead=Counter("cb")), "in the DLQ although the result does not say so: b"),
        (replace(GOOD, dead=Counter("ca")), "in the DLQ without a result: a"),
        (replace(GOOD, dead=Counter()), "neither in the DLQ nor queued: c"),
        (replace(GOOD, billed=[], outbox=[]), "completed with tokens but not billed: b"),
        (replace(GOOD, billed=[bill("b"), bill("d")]), "billed although no completed result used tokens: d"),
        (replace(GOOD, billed=[bill("b", "other")]), "b was billed under 2 event ids"),
        (replace(GOOD, billed=[bill("b"), bill("z")]), "billed but never submitted: z"),
        (replace(GOOD, replaced={"b": "x became y"}), "the result of b was replaced"),
        (
            replace(GOOD, announced={"b": ["completed"] * 2, "c": ["failed"], "d": ["completed"]}),
            "published more than once: b",
        ),
    ],
)
def test_a_breach_is_named(breach: Evidence, said: str) -> None:
    assert [line for line in faults_of(breach) if said in line] == faults_of(breach)


async def test_the_evidence_is_collected_from_the_real_servers(
    rabbitmq_url: str, redis_url: str, redis_client: RedisClient, deployment_id: str
) -> None:
    ids = [f"{deployment_id}-{name}" for name in "abc"]
    queue, dlq = f"infer_req.{deployment_id}", f"dlq.{deployment_id}"
    async with ResultWatcher(redis_url, only=deployment_id) as watcher:
        await publish(rabbitmq_url, queue, {"request_id": ids[0]}, declare={})
        await publish(rabbitmq_url, dlq, {"request_id": ids[2]}, declare={})
        for one, stored in ((ids[1], result()), (ids[2], result(code="poison"))):
            await redis_client.set(f"infer_resp:{one}", json.dumps(stored))
            await redis_client.publish(f"infer_resp:{one}", str(stored["status"]))
        await redis_client.xadd(f"infer_usage:{deployment_id}", {"event": json.dumps(bill(ids[1]))})
        await watcher.ended(ids[1:])

        evidence = await conservation.collect(
            ids, redis=redis_client, rabbitmq_url=rabbitmq_url, deployment_id=deployment_id, dlq=dlq, watcher=watcher
        )

    assert_conserved(evidence)
    assert (set(evidence.queued), set(evidence.results), set(evidence.dead)) == ({ids[0]}, set(ids[1:]), {ids[2]})
    await redis_client.set(f"infer_resp:{ids[1]}", json.dumps(result(3)))
    assert watcher.replaced(await conservation.results(redis_client, ids)).keys() == {ids[1]}
