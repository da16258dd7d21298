"""The command reads its documents again: queues come, go and change under a load, and every request ends once."""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis as RedisClient
from structlog.testing import capture_logs

from inference_worker.assembly import Outside
from inference_worker.process import Process, process
from inference_worker.process_setup import read_setup
from tests.every_transport import Queues, Told, rabbit_queues, sorted_sets, sql_tables, streams, subscriptions
from tests.faults.model import FakeModel, ok
from tests.faults.processes import WorkerProcess
from tests.process_rig import PACE, RESULTS, Document, envelope, queue, serving_mock, submit
from tests.services import free_port
from tests.waiting import eventually

OTHER = "other-results"
QUEUE = "queue_name"
WRONG = "the documents are wrong; the last good ones stay"


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


# ---------------------------------------------------------------- over each transport


class Reloadable:
    """A process in this one, whose documents are what a test says at the time."""

    def __init__(self, told: Told) -> None:
        self._document = json.loads(told.flags["transport-config"])
        self._texts: dict[str, str] = {}
        self._several, self._name = ("topics", "subscriber_id") if "topics" in self._document else ("queues", QUEUE)
        self._flags = {name: text for name, text in told.flags.items() if name != "transport-config"}
        self._environ = {**told.environ, "CROESUS_HOST": "http://127.0.0.1:1"}  # Nobody takes usage events there.
        self._made: Process | None = None
        self.kind = told.flags["transport"]
        self._log: Sequence[Mapping[str, Any]] = ()
        self.queues: Mapping[str, Document] = {str(one[self._name]): one for one in self._document[self._several]}
        """What each queue was told to be, by its name."""

    @asynccontextmanager
    async def running(self, *queues: Document, workers: int = 4, **files: str) -> AsyncGenerator[None]:
        """From these documents on; `files`: others, by the flags that name them."""
        self._say(queues, workers)
        self._texts |= files
        given = self._flags | {"transport-config-file": "transport", "pool-config-file": "pools"}
        given |= {name.replace("_", "-"): name for name in files}
        rng, stop = random.Random(1), asyncio.Event()
        setup = read_setup(given, self._environ, self._texts.__getitem__, rng)
        with capture_logs() as self._log:
            async with process(setup, Outside(now=time.time, rng=rng)) as self._made, asyncio.TaskGroup() as group:
                group.create_task(self._made.worker.run(stop), name="process")
                try:
                    await self._connected(queues)
                    assert self.ready() == {"postgres" if self.kind == "sql" else "redis", "running"}
                    yield
                finally:
                    stop.set()

    async def becomes(self, *queues: Document, workers: int = 4, **files: str) -> None:
        """Have them be read, and wait until they hold."""
        before, wrong = len(self._said("the documents were read again")), len(self._said(WRONG))
        self._say(queues, workers)
        self._texts |= files
        assert self._made is not None
        self._made.reloading.ask()

        def read() -> bool:
            assert len(self._said(WRONG)) == wrong, self._log
            return len(self._said("the documents were read again")) > before

        await eventually(read, within=10, what="the documents were read again")
        await self._connected(queues)

    async def gone(self, queues: int) -> None:
        """Wait until so many have left since the start."""
        await eventually(lambda: len(self._said("a queue was taken away")) >= queues, within=10, what="they have left")

    async def refuses(self, **files: str) -> str:
        """Have them be read, and wait until it is said what is wrong."""
        self._texts |= files
        assert self._made is not None
        self._made.reloading.ask()

        def problems() -> str:
            return " ".join(
                str(one["problems"]) for one in self._said("the documents are wrong; the last good ones stay")
            )

        return await eventually(problems, within=10, what="it is said what is wrong")

    def ready(self) -> set[str]:
        """What has to be well beside the queues, by the names that people are told."""
        assert self._made is not None
        return {name for name in self._made.worker.ready() if not name.startswith("queue ")}

    def _say(self, queues: Sequence[Document], workers: int) -> None:
        self._texts["transport"] = json.dumps({**self._document, self._several: queues})
        self._texts["pools"] = json.dumps([{"id": "default", "workers": workers}])

    def _said(self, event: str) -> list[Mapping[str, Any]]:
        return [one for one in self._log if one["event"] == event]

    async def _connected(self, queues: Sequence[Document]) -> None:
        names = {f"queue {one[self._name]}": True for one in queues}

        def so() -> bool:
            assert self._made is not None
            ready = self._made.worker.ready()
            return {name: ok for name, (ok, _) in ready.items() if name.startswith("queue ")} == names

        await eventually(so, within=15, what="it is connected to its queues")


async def come_go_and_change(
    queues: Queues, names: Sequence[str], model: FakeModel, *, one_by_one: bool = False, within: float = 15
) -> None:
    """While requests run: a queue comes, one goes and leaves its backlog, gates, workers and inner names change.

    `one_by_one`: only once what was has left, since what is given back to a pull that ends is hidden for its deadline.
    """
    model.default = ok(takes_s=0.1)
    command = Reloadable(queues.told(model.url))
    a, b, c = (command.queues[name] for name in names)
    slow = {"gate_type": "local-max-concurrency", "gate_params": {"limit": 1}}
    ids = {name: [f"{name}-{number}" for number in range(12)] for name in names}
    left = [f"{names[1]}-left-{number}" for number in range(3)]

    def called(*among: str) -> set[str]:
        return {str(json.loads(one.body)["prompt"]) for one in model.requests} & {*among}

    async with command.running(a, {**b, **slow}):
        for name in names[:2]:
            await queues.put(name, ids[name])
        await model.busy()
        await command.becomes({**a, "model_override": "inner"}, {**b, **slow}, c, workers=2)
        await queues.put(names[2], ids[names[2]])
        await model.busy()
        if one_by_one:
            await command.gone(1)
        await command.becomes({**a, **slow, "model_override": "inner"}, c, workers=6)
        await queues.put(names[1], left)
        served = [*ids[names[0]], *ids[names[2]]]
        await eventually(lambda: len(called(*served)) == len(served), within=within, what="those that stay are served")
        await eventually(lambda: model.in_flight == 0, within=10, what="the calls end")
        assert not called(*left), "what is removed is not served"
        if one_by_one:
            await command.gone(3)
        await command.becomes(a, b)
        total = len(left) + sum(map(len, ids.values()))

        async def all_ended() -> bool:
            return await queues.ended() >= total

        await eventually(all_ended, within=within, what="the backlog that was left is served")
        await eventually(lambda: model.in_flight == 0, within=10, what="the calls end")
    found = await queues.found()
    everything = {*left, *(one for some in ids.values() for one in some)}
    results = {name: json.loads(said[0]) for name, said in found.results.items()}

    assert set(found.results) == everything
    assert {result["status_code"] for result in results.values()} == {200}
    assert queues.repeats or all(len(said) == 1 for said in found.results.values())
    assert not found.dead
    assert Counter(request_id for _, request_id in found.billed) == Counter(everything)
    assert not any(found.left.values()), found.left
    asked = {json.loads(one.body)["model"] for one in model.requests if json.loads(one.body)["prompt"] in ids[names[0]]}
    assert asked >= {"inner"}
    assert {json.loads(results[name]["payload"])["model"] for name in ids[names[0]]} <= {"mock-model", "tiny"}


@pytest.mark.parametrize("kind", ["redis-sortedset", "redis-streams", "rabbitmq"])
async def test_other_brokers_have_their_queues_come_go_and_change_as_well_case_310(
    kind: str, rabbitmq_url: str, redis_url: str, deployment_id: str, model: FakeModel
) -> None:
    names = [f"{deployment_id}-{name}" for name in "abc"]
    match kind:
        case "redis-sortedset":
            opened: AbstractAsyncContextManager[Queues] = sorted_sets(redis_url, names)
        case "redis-streams":
            opened = streams(redis_url, names)
        case _:
            opened = rabbit_queues(rabbitmq_url, redis_url, names)
    async with opened as queues:
        await come_go_and_change(queues, names, model)


async def test_queues_in_postgres_come_go_and_change_as_well_case_310(sql_url: str, model: FakeModel) -> None:
    async with sql_tables(sql_url, ["a", "b", "c"]) as queues:
        await come_go_and_change(queues, ["a", "b", "c"], model)


async def test_subscriptions_of_pubsub_come_go_and_change_as_well_case_310(redis_url: str, model: FakeModel) -> None:
    names = ["sub-a", "sub-b", "sub-c"]
    async with subscriptions(redis_url, names) as queues:
        # Google's emulator now and then hands what was given back to a pull that was given up: for a deadline of 10 s.
        await come_go_and_change(queues, names, model, one_by_one=True, within=45)


async def test_channels_come_and_go_and_what_runs_meanwhile_is_answered_case_310(
    redis_url: str, redis_client: RedisClient, model: FakeModel
) -> None:
    model.default = ok(takes_s=0.3)
    names = ("a", "b")
    document = {"url": redis_url, "queues": [queue(name, model.url) for name in names]}
    flags = {"transport": "redis-pubsub", "transport-config": json.dumps(document), **PACE}
    command = Reloadable(Told(flags=flags, environ={}, modules=()))
    a, b = (command.queues[name] for name in names)

    async def say(channel: str, request_id: str) -> int:
        return int(await redis_client.publish(channel, envelope(request_id)[0]))

    async def answered() -> bool:
        return len([key async for key in redis_client.scan_iter("infer_resp:*")]) == 2

    async with command.running(a):
        assert await say("a", "first") == 1
        await model.busy()
        await command.becomes(b)
        assert await say("b", "second") == 1
        await eventually(answered, within=10, what="both are answered")
        await command.gone(1)
        assert await say("a", "nobody listens") == 0


async def test_transforms_cannot_change_while_it_runs_but_the_inner_name_of_a_queue_can_case_312(
    redis_url: str, model: FakeModel
) -> None:
    """The refused document is refused whole: its other changes do not hold either."""
    shapes = {"requestTransforms": [{"name": "audio", "type": "multipart"}]}
    async with sorted_sets(redis_url, ["a"]) as queues:
        command = Reloadable(queues.told(model.url))
        (a,) = command.queues.values()
        async with command.running(a, transform_config_file=json.dumps(shapes)):
            said = await command.refuses(
                transport=json.dumps({"url": redis_url, "queues": [{**a, "model_override": "wrong"}]}),
                transform_config_file=json.dumps({"requestTransforms": []}),
            )
            await queues.put("a", ["first"])
            await model.called(1)
            await command.becomes({**a, "model_override": "inner"}, transform_config_file=json.dumps(shapes))
            await queues.put("a", ["second"])
            await model.called(2)

    assert "transforms: has changed, which needs a restart" in said
    assert [json.loads(one.body)["model"] for one in model.requests] == ["mock-model", "inner"]
