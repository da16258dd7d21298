"""The command reads its documents again: queues come, go and change under a load, and every request ends once."""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aio_pika
import httpx
import pytest
from redis.asyncio import Redis as RedisClient

from inference_worker.assembly import Outside
from inference_worker.process import process
from inference_worker.process_setup import read_setup
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.transports.redis_streams import append
from inference_worker.transports.stream_entries import StreamNames
from tests.faults.processes import WorkerProcess
from tests.in_process import request_body
from tests.process_rig import PACE, RESULTS, Document, queue, serving_mock, submit
from tests.services import free_port
from tests.waiting import eventually

OTHER = "other-results"


class ConfigMap:
    """Files as Kubernetes mounts them: links into a folder that is replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._turn = 0

    def hold(self, **texts: str) -> None:
        """These are the files now, by their names without `.json`."""
        self._turn += 1
        there = self._folder / f"..{self._turn}"
        there.mkdir(parents=True)
        for name, text in texts.items():
            (there / f"{name}.json").write_text(text)
            link = self._folder / f"{name}.json"
            if not link.is_symlink():
                link.symlink_to(Path("..data") / f"{name}.json")
        fresh = self._folder / "..fresh"
        fresh.symlink_to(there.name)
        fresh.rename(self._folder / "..data")

    def path(self, name: str) -> str:
        return str(self._folder / f"{name}.json")


class Command:
    """The command, its documents and its metrics."""

    def __init__(self, redis_url: str, tmp_path: Path, interval: str) -> None:
        self._url = redis_url
        self.files = ConfigMap(tmp_path / "config")
        self._port = free_port()
        flags = {
            **PACE,
            "transport": "redis-sortedset",
            "transport-config-file": self.files.path("transport"),
            "pool-config-file": self.files.path("pools"),
            "transport-config-watch-interval": interval,
            "metrics-port": str(self._port),
        }
        command = (sys.executable, "-m", "inference_worker", "process", *(f"--{k}={v}" for k, v in flags.items()))
        self.process = WorkerProcess({}, output=tmp_path / "process.log", command=command)

    def says(
        self, *queues: Document, pools: Sequence[Mapping[str, object]] = ({"id": "default", "workers": 8},)
    ) -> None:
        transport = {"url": self._url, "queues": queues}
        self.files.hold(transport=json.dumps(transport), pools=json.dumps(pools))

    async def reloads(self, result: str = "success") -> int:
        async with httpx.AsyncClient() as client:
            page = (await client.get(f"http://127.0.0.1:{self._port}/metrics")).text
        name = f'llm_d_async_async_queue_config_reloads_total{{result="{result}"}} '
        (value,) = [line.removeprefix(name) for line in page.splitlines() if line.startswith(name)]
        return int(float(value))

    async def reloaded(self, count: int, result: str = "success") -> None:
        async def so_many() -> bool:
            return await self.reloads(result) == count

        await eventually(so_many, within=10, what=f"{count} reloads with {result}")

    async def ready(self) -> None:
        def consuming() -> bool:
            assert self.process.returncode is None, self.process.log
            return '"event":"consuming"' in self.process.log

        await eventually(consuming, within=20, what="it consumes")


async def answered(redis: RedisClient) -> list[dict[str, Any]]:
    found = [one for name in (RESULTS, OTHER) for one in await redis.lrange(name, 0, -1)]
    return [json.loads(one) for one in found]


async def test_queues_and_pools_come_go_and_change_under_a_load_and_every_request_ends_once_case_310_312_313(
    redis_url: str, tmp_path: Path
) -> None:
    ids = {name: [f"{name}{n}" for n in range(count)] for name, count in (("a", 200), ("b", 150), ("c", 150))}
    gate = {"gate_type": "local-max-concurrency", "gate_params": {"limit": 2}}
    async with (
        serving_mock(latency_s=0.03) as mock,
        serving_mock(latency_s=0.03) as second,
        RedisClient.from_url(redis_url, socket_timeout=None) as redis,
    ):
        a, b, c = (queue(name, mock.url) for name in "abc")
        command = Command(redis_url, tmp_path, "100ms")
        command.says(a, b)
        pools = [{"id": "default", "workers": 3}, {"id": "more", "workers": 2, **gate}]

        async def feed() -> None:
            for turn in range(10):
                for name, of_it in ids.items():
                    await submit(redis, name, of_it[turn * len(of_it) // 10 : (turn + 1) * len(of_it) // 10])
                await asyncio.sleep(0.2)

        async with command.process as process, asyncio.TaskGroup() as group:
            await command.ready()
            group.create_task(feed())
            turns: list[tuple[list[Document], list[dict[str, object]]]] = [
                ([a, b, c], [{"id": "default", "workers": 8}]),
                ([{**a, "result_queue_name": OTHER}, c], [{"id": "default", "workers": 2}]),
                ([{**a, **gate}, {**b, "worker_pool_id": "more"}], pools),
                ([], pools),
                ([{**c, "igw_base_url": second.url}, {**a, "result_queue_name": OTHER}], [pools[0]]),
            ]
            for number, (queues, of_it) in enumerate(turns, start=1):
                command.says(*queues, pools=of_it)
                await command.reloaded(number)
                await asyncio.sleep(0.2)
            command.says({**a, "worker_pool_id": "nowhere"}, {"queue_name": "b"})
            await command.reloaded(1, "error")
            assert await command.reloads() == len(turns)
            before = len(await answered(redis))
            await eventually(lambda: _more(redis, before), within=10, what="the last good documents still hold")
            command.says(a, b, c)
            await command.reloaded(len(turns) + 1)
            await eventually(lambda: _more(redis, sum(map(len, ids.values())) - 1), within=30, what="all are done")
            process.terminate()
            await eventually(lambda: process.returncode is not None, within=15, what="it has ended")
        results = await answered(redis)
        left = [await redis.zcard(name) + await redis.hlen(f"{name}:claimed") for name in "abc"]
        others = await redis.llen(OTHER)

    assert process.returncode == 0, process.log
    assert Counter(result["id"] for result in results) == Counter(one for some in ids.values() for one in some)
    assert {result["status_code"] for result in results} == {200}
    assert left == [0, 0, 0]
    assert others > 0
    assert process.log.count("the documents are wrong") == 1
    assert '"nowhere"' in process.log or '\\"nowhere\\"' in process.log


async def test_at_a_sighup_the_documents_are_read_whatever_the_interval_case_310(
    redis_url: str, tmp_path: Path
) -> None:
    async with serving_mock() as mock, RedisClient.from_url(redis_url, socket_timeout=None) as redis:
        command = Command(redis_url, tmp_path, "0")
        command.says(queue("a", mock.url))
        async with command.process as process:
            await command.ready()
            await submit(redis, "b", ["b0"])
            command.says(queue("a", mock.url), queue("b", mock.url))

            os.kill(process.pid, signal.SIGHUP)
            await eventually(lambda: _more(redis, 0), within=10, what="the queue that came is served")

            assert await command.reloads() == 1
            process.terminate()
            await eventually(lambda: process.returncode is not None, within=15, what="it has ended")

    assert process.returncode == 0, process.log


async def _more(redis: RedisClient, than: int) -> bool:
    return len(await answered(redis)) > than


@pytest.mark.parametrize("kind", ["redis-streams", "rabbitmq"])
async def test_other_brokers_have_their_queues_come_go_and_change_as_well_case_310(
    kind: str, vhost: str, redis_url: str
) -> None:
    files: dict[str, str] = {}

    def says(*queues: Document) -> None:
        files["t"] = json.dumps({"url": vhost if kind == "rabbitmq" else redis_url, "queues": queues})

    async with AsyncExitStack() as stack:
        mock = await stack.enter_async_context(serving_mock(latency_s=0.5))
        redis = await stack.enter_async_context(RedisClient.from_url(redis_url, socket_timeout=None))
        put = await stack.enter_async_context(putting(kind, vhost, redis_url))
        a, b = queue("a", mock.url, result_queue_name=RESULTS), queue("b", mock.url, result_queue_name=RESULTS)
        says(a)
        given = {"transport": kind, "transport-config-file": "t", **PACE}
        rng = random.Random(1)
        setup = read_setup(given, {"REDIS_URL": redis_url}, files.__getitem__, rng)
        made = await stack.enter_async_context(process(setup, Outside(now=time.time, rng=rng)))
        stop = asyncio.Event()
        running = asyncio.create_task(made.worker.run(stop), name="process")
        stack.push_async_callback(asyncio.wait, [running])
        stack.callback(stop.set)

        async def becomes(*queues: Document) -> None:
            says(*queues)
            made.reloading.ask()
            names = {f"queue {one['queue_name']}": True for one in queues}

            def so() -> bool:
                ready = made.worker.ready()
                return {name: ok for name, (ok, _) in ready.items() if name.startswith("queue ")} == names

            await eventually(so, within=10, what="it is connected to its queues")

        await eventually(lambda: made.worker.ready().get("queue a", (False, ""))[0], within=15, what="it is connected")
        await put("a", "a1")
        await eventually(lambda: mock.mock.running == 1, within=10, what="it is called")
        await becomes({**a, "labels": {"team": "new"}}, b)
        await put("a", "a2")
        await put("b", "b1")
        await eventually(lambda: _more(redis, 2), within=10, what="all are answered")
        await becomes(b)
        await put("a", "left")
        await put("b", "b2")
        await eventually(lambda: _more(redis, 3), within=10, what="the queue that stays is served")
        assert Counter(one["id"] for one in await answered(redis)) == Counter(["a1", "a2", "b1", "b2"])
        await becomes(a, b)
        await eventually(lambda: _more(redis, 4), within=10, what="the queue that came back is served")

    assert running.result() is None


@asynccontextmanager
async def putting(kind: str, vhost: str, redis_url: str) -> AsyncGenerator[Callable[[str, str], Awaitable[None]]]:
    """A way to put a request into a queue, by its name and the request's id."""

    def body(request_id: str) -> bytes:
        return json.dumps(request_body(request_id, payload={"prompt": "x", "max_tokens": 2})).encode()

    if kind == "rabbitmq":
        async with await aio_pika.connect(vhost) as connection, connection.channel() as channel:

            async def publish(name: str, request_id: str) -> None:
                await channel.default_exchange.publish(aio_pika.Message(body(request_id)), routing_key=name)

            yield publish
    else:
        link = RedisLink(lambda: redis_url, lambda: None, client_name="test", tls=RedisTls())
        async with link.open():

            async def add(name: str, request_id: str) -> None:
                names = StreamNames(stream=name, group="workers", dead_letters=f"{name}:dead")
                await append(link, names, body(request_id), request_id, enqueued_at=time.time())

            yield add
