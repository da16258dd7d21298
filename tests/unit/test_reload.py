"""Documents that are read again: taken whole or not at all, each content once, and tried again where they fail."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
import structlog.testing

from inference_worker.config.documents import ProcessDocuments, QueueConfig, read_documents
from inference_worker.config.values import Text
from inference_worker.process_changes import needs_restart, written
from inference_worker.process_files import Snapshot
from inference_worker.process_reload import AGAIN_S, Reloading
from inference_worker.process_setup import ProcessSetup, documents_again, read_setup

Files = dict[str, str]

QUEUE = {"queue_name": "a", "igw_base_url": "http://g"}
POOLS = [{"id": "default", "workers": 2}]


def transport(*queues: Mapping[str, object], **others: object) -> str:
    return json.dumps({"url": "redis://r", "queues": queues, **others})


class Process:
    """A process as far as its documents go; its files are in memory."""

    def __init__(self, interval_s: float = 5.0, *, inline: bool = False) -> None:
        self.files: Files = {"t.json": transport(QUEUE), "p.json": json.dumps(POOLS), "m.json": "{}"}
        self.files["m.json"] = json.dumps({"type": "random-robin"})
        named = {"pool-config-file": "p.json", "request-merge-policy-config-file": "m.json"}
        given = {"transport-config": self.files["t.json"]} if inline else {"transport-config-file": "t.json", **named}
        self.setup: ProcessSetup = read_setup(
            {"transport": "redis-sortedset", **given}, {}, self.read, random.Random(1)
        )
        self.applied: list[ProcessDocuments] = []
        self.fails: list[Exception] = []
        self.told: list[str] = []
        self.reads = 0
        self.reloading = Reloading(
            partial(documents_again, self.setup),
            self._apply,
            self.told.append,
            read_file=self.read,
            paths=self.setup.paths,
            fingerprint=self.setup.fingerprint,
            interval_s=interval_s,
        )

    def read(self, path: str) -> str:
        if path not in self.files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self.files[path]

    async def _apply(self, documents: ProcessDocuments) -> Sequence[str]:
        if self.fails:
            raise self.fails.pop(0)
        self.applied.append(documents)
        return []

    @property
    def queues(self) -> list[list[str]]:
        return [[queue.id for queue in one.transport.queues] for one in self.applied]

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.reloading.run(over))
            try:
                yield
            finally:
                over.set()


async def test_a_document_that_changes_is_applied_at_the_next_look_and_not_again() -> None:
    process = Process()
    async with process.running():
        await asyncio.sleep(12.0)
        assert process.told == [], "nothing has changed"
        process.files["t.json"] = transport(QUEUE, {**QUEUE, "queue_name": "b"})
        await asyncio.sleep(5.0)

        assert (process.queues, process.told) == ([["a", "b"]], ["success"])
        await asyncio.sleep(60.0)
        assert len(process.applied) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [("p.json", json.dumps([{"id": "default", "workers": 3}])), ("m.json", json.dumps({"type": "tier-priority"}))],
    ids=["the pools", "the merge policy"],
)
async def test_every_file_that_a_flag_names_is_looked_at(name: str, text: str) -> None:
    process = Process()
    async with process.running():
        process.files[name] = text
        await asyncio.sleep(6.0)

        assert process.told == ["success"]


async def test_a_change_between_the_start_and_the_first_look_is_seen() -> None:
    process = Process()
    process.files["t.json"] = transport()
    async with process.running():
        await asyncio.sleep(6.0)

        assert process.queues == [[]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "transport: "),
        (transport(QUEUE, QUEUE), 'transport.queues[1].queue_name: is "a"'),
        (transport(QUEUE, {**QUEUE, "queue_name": "b", "id": "a"}), "transport.queues[1].id"),
        (transport({"queue_name": "a"}), "transport.queues[0].igw_base_url: is missing"),
        (transport({**QUEUE, "worker_pool_id": "no"}), 'transport.queues[0].worker_pool_id: is "no"'),
        (transport({**QUEUE, "gate_type": "no"}), "transport.queues[0]"),
        (None, "t.json cannot be read"),
    ],
    ids=[
        "broken JSON",
        "the same name twice",
        "the same id twice",
        "no base URL",
        "no such pool",
        "no such gate",
        "gone",
    ],
)
async def test_a_document_with_a_problem_is_refused_and_said_once_and_the_last_good_one_stays_case_312(
    text: str | None, said: str
) -> None:
    process = Process()
    with structlog.testing.capture_logs() as logs:
        async with process.running():
            good = process.files.pop("t.json")
            if text is not None:
                process.files["t.json"] = text
            await asyncio.sleep(31.0)

            assert (process.applied, process.told) == ([], ["error"])
            process.files["t.json"] = good
            await asyncio.sleep(6.0)
            assert (process.queues, process.told) == ([["a"]], ["error", "success"])

    (problems,) = [log["problems"] for log in logs if "problems" in log]
    assert any(said in problem for problem in problems), problems


async def test_all_problems_of_all_documents_are_said_together() -> None:
    process = Process()
    with structlog.testing.capture_logs() as logs:
        async with process.running():
            process.files |= {"t.json": transport({"queue_name": "a"}), "p.json": "[{}]", "m.json": '{"type": "no"}'}
            await asyncio.sleep(6.0)

    (problems,) = [log["problems"] for log in logs if "problems" in log]
    assert {problem.partition(".")[0].partition("[")[0] for problem in problems} == {"transport", "pools", "merge"}


async def test_what_cannot_be_applied_is_tried_again_at_each_look_and_said_once_case_314() -> None:
    process = Process()
    process.fails = [RuntimeError("a gate"), RuntimeError("a gate")]
    with structlog.testing.capture_logs() as logs:
        async with process.running():
            process.files["t.json"] = transport()
            await asyncio.sleep(6.0)
            assert process.told == ["error"]
            await asyncio.sleep(5.0)
            assert process.told == ["error", "error"]
            await asyncio.sleep(20.0)

    assert (process.told, process.queues) == (["error", "error", "success"], [[]])
    assert len([log for log in logs if log.get("reason") == "RuntimeError: a gate"]) == 1


async def test_what_cannot_be_applied_is_tried_again_where_nobody_looks_now_and_then() -> None:
    process = Process(interval_s=0)
    process.fails = [RuntimeError("a gate")]
    async with process.running():
        process.reloading.ask()
        await asyncio.sleep(AGAIN_S / 2)
        assert process.told == ["error"]
        await asyncio.sleep(AGAIN_S)

        assert process.told == ["error", "success"]


async def test_without_an_interval_the_files_are_read_when_somebody_asks() -> None:
    process = Process(interval_s=0)
    async with process.running():
        process.files["t.json"] = transport()
        await asyncio.sleep(3600.0)
        assert process.told == []

        process.reloading.ask()
        await asyncio.sleep(0.1)

        assert (process.queues, process.told) == ([[]], ["success"])


async def test_who_asks_is_answered_also_where_nothing_has_changed() -> None:
    process = Process()
    async with process.running():
        process.reloading.ask()
        await asyncio.sleep(0.1)

        assert process.told == ["success"]


async def test_where_all_documents_are_in_the_command_line_there_is_nothing_to_read_and_that_is_said() -> None:
    process = Process(interval_s=0, inline=True)
    with structlog.testing.capture_logs() as logs:
        async with process.running():
            process.reloading.ask()
            await asyncio.sleep(60.0)

    assert process.told == []
    assert [log["event"] for log in logs] == ["no flag names a file: there is nothing to read again"]


async def test_nothing_is_read_once_it_was_told_to_stop_case_313() -> None:
    process = Process()
    async with process.running():
        pass
    process.files["t.json"] = transport()
    process.reloading.ask()
    await asyncio.sleep(60.0)

    assert process.applied == []


# ---------------------------------------------------------------- what is the same


def documents(text: str, transforms: str | None = None) -> ProcessDocuments:
    return read_documents("redis-sortedset", text, json.dumps(POOLS), None, transforms, without_queues=True)


def test_a_queue_is_the_same_wherever_it_stands_and_another_one_with_any_other_word() -> None:
    gate = {"gate_type": "local-max-concurrency", "gate_params": {"limit": 2}}
    queue = {**QUEUE, **gate, "labels": {"tier": "batch"}}
    (first,) = documents(transport(queue)).transport.queues
    _, second = documents(transport({**QUEUE, "queue_name": "z"}, queue)).transport.queues
    others = [
        {**queue, "igw_base_url": "http://h"},
        {**queue, "gate_params": {"limit": 3}},
        {**queue, "labels": {"tier": "async"}},
        {**queue, "result_queue_name": "mine"},
    ]

    assert written(first) == written(second)
    for other in others:
        (changed,) = documents(transport(other)).transport.queues
        assert written(changed) != written(first)


def test_a_text_is_what_is_written_in_it() -> None:
    queue = QueueConfig(id="a", queue_name="a", base_url=Text("http://g"), request_path="/")

    assert written(queue) == written(replace(queue, base_url=Text("http://g")))
    assert written(queue) != written(replace(queue, base_url=Text("http://h")))
    with pytest.raises(TypeError, match="documents hold no object"):
        written(object())


def test_what_cannot_change_while_it_runs_is_named_without_what_is_written_there() -> None:
    before = documents(transport(QUEUE))
    shapes = json.dumps({"requestTransforms": [{"name": "m", "type": "multipart", "parameters": {"file_field": "f"}}]})
    now = documents(transport(url="redis://:secret@elsewhere", retry_queue_name="other"))

    assert needs_restart(before, documents(transport())) == []
    assert needs_restart(before, now) == [
        "transport.url: has changed, which needs a restart",
        "transport.retry_queue_name: has changed, which needs a restart",
    ]
    assert needs_restart(before, documents(transport(QUEUE), shapes)) == [
        "transforms: has changed, which needs a restart"
    ]


async def test_a_document_that_needs_a_restart_is_refused_case_312() -> None:
    process = Process()
    with structlog.testing.capture_logs() as logs:
        async with process.running():
            process.files["t.json"] = transport(QUEUE, {**QUEUE, "queue_name": "b"}, url="redis://elsewhere")
            await asyncio.sleep(6.0)

    assert (process.applied, process.told) == ([], ["error"])
    (problems,) = [log["problems"] for log in logs if "problems" in log]
    assert problems == ["transport.url: has changed, which needs a restart"]


# ---------------------------------------------------------------- files


def test_a_file_is_read_once_and_says_the_same_ever_after() -> None:
    files = {"a": "1"}
    seen = Snapshot(files.__getitem__, ["a"])
    files["a"] = "2"

    assert (seen("a"), seen.paths) == ("1", ("a",))
    assert Snapshot(files.__getitem__, ["a"]).fingerprint != seen.fingerprint


def test_a_file_that_is_missing_is_another_content_than_any_text() -> None:
    def missing(path: str) -> str:
        raise FileNotFoundError("gone")

    seen = Snapshot(missing, ["a"])

    assert seen.fingerprint != Snapshot(lambda _: "gone", ["a"]).fingerprint
    assert seen.fingerprint == Snapshot(missing, ["a"]).fingerprint
    with pytest.raises(FileNotFoundError):
        seen("a")


def test_texts_that_lie_in_other_files_are_other_contents() -> None:
    def of(texts: Files) -> str:
        return Snapshot(texts.__getitem__, texts).fingerprint

    assert of({"a": "x", "b": "y"}) != of({"a": "y", "b": "x"})
    assert of({"a": "xb", "b": "y"}) != of({"a": "x", "b": "by"})
    assert of({"a": "x", "b": "y"}) == of({"b": "y", "a": "x"})
