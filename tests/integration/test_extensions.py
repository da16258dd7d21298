"""The examples of other packages, installed as anybody would, and served with; and parts that fail while they run."""

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis as RedisClient

from tests.faults.model import FakeModel, ok
from tests.integration.test_check_process import checked
from tests.process_rig import processing
from tests.process_rig import queue as any_queue
from tests.transport_contract import request as no_conversation
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NIGHT_AND_DAY = ({"opens": 0, "closes": 12}, {"opens": 12, "closes": 0})
"""One of these gates is open."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the packages of all examples are, by pip, without a network."""
    sources, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("installed")
    shutil.copytree(EXAMPLES, sources, dirs_exist_ok=True)  # A build leaves files beside its sources.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-input"]
    pip += ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([*pip, *map(str, sorted(sources.glob("extension-*")))], check=True, capture_output=True, timeout=90)
    return target


@pytest.fixture
def here(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installed in this process, too."""
    monkeypatch.syspath_prepend(installed)
    return installed


def queue(name: str, base_url: str, **options: object) -> dict[str, object]:
    return dict(any_queue(name, base_url, **options))


def merge() -> dict[str, object]:
    return {"type": "weighted", "parameters": {"weights": {"chat": "3"}}}


def transforms() -> dict[str, object]:
    return {
        "requestTransforms": [
            {"name": "brief", "type": "system-prompt", "parameters": {"prompt": "Be brief."}},
        ],
        "responseTransforms": [{"name": "quiet", "type": "without-reasoning"}],
    }


def conversation(request_id: str) -> bytes:
    messages = [{"role": "user", "content": "2 + 2?"}]
    payload = {"model": "tiny", "messages": messages}
    return json.dumps(
        {"request_id": request_id, "received_at": time.time(), "timeout_s": 60, "payload": payload}
    ).encode()


async def test_the_examples_pass_their_own_tests(installed: Path) -> None:
    """The transport's has the whole contract."""
    paths = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(installed), *sys.path, str(ROOT)])}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLES)),
        cwd=ROOT,
        env=paths,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()

    assert process.returncode == 0, out.decode()
    assert b" passed" in out


async def test_check_says_which_package_each_part_comes_from(
    installed: Path, tmp_path: Path, redis_url: str, model: FakeModel
) -> None:
    (tmp_path / "m.json").write_text(json.dumps(merge()))
    (tmp_path / "x.json").write_text(json.dumps(transforms()))
    with closing(sqlite3.connect(tmp_path / "q.db")):
        pass
    env = {
        "PYTHONPATH": os.pathsep.join([str(installed), *sys.path, str(ROOT)]),
        "REDIS_URL": redis_url,
        "BILLING_SINK": "json-lines",
        "BILLING_SINK_PARAMETERS": json.dumps({"path": str(tmp_path / "usage.jsonl")}),
    }
    transport = {"path": str(tmp_path / "q.db")}
    day, night = NIGHT_AND_DAY

    ended = await checked(
        tmp_path,
        "",
        queue("chat", model.url, gate_type="business-hours", gate_params=day),
        queue("other", model.url, gate_type="business-hours", gate_params=night),
        transport="sqlite",
        document=transport,
        flags=(
            *("--request-merge-policy-config-file", str(tmp_path / "m.json")),
            *("--transform-config-file", str(tmp_path / "x.json"), "--json"),
        ),
        env=env,
    )

    assert ended.code == 0, ended.out + ended.err
    assert {row["what"]: row["detail"] for row in ended.said["checks"] if row["what"].startswith("extension")} == {
        "extension business-hours": "gate, of iw-business-hours 1.0.0",
        "extension weighted": "merge policy, of iw-weighted 1.0.0",
        "extension sqlite": "transport, of iw-sqlite 1.0.0",
        "extension system-prompt": "transform, of iw-system-prompt 1.0.0",
        "extension without-reasoning": "answer transform, of iw-system-prompt 1.0.0",
        "extension json-lines": "billing sink, of iw-json-lines 1.0.0",
    }
    assert ended.of("queue chat")[:2] == ("ok", "chat: 0 ready, 0 with workers, 0 delayed; by SQLite")
    assert sorted(gate["budget"] for gate in ended.said["gates"]) == [0.0, 1.0]
    assert "closed from 12 to 00 h UTC" in ended.out


async def test_a_process_serves_with_parts_of_other_packages(
    here: Path, tmp_path: Path, redis_url: str, model: FakeModel
) -> None:
    model.default = ok("<think> hm </think> four")
    usage = tmp_path / "usage.jsonl"
    environ = {
        "REDIS_URL": redis_url,
        "BILLING_SINK": "json-lines",
        "BILLING_SINK_PARAMETERS": json.dumps({"path": str(usage)}),
        "METRICS_FLUSH_INTERVAL_S": "0.1",
    }
    options: dict[str, Any] = {"request_path_url": "/v1/chat/completions", "result_queue_name": "done"}
    both = [
        queue(name, model.url, gate_type="business-hours", gate_params=hours, **options)
        for name, hours in zip(("chat", "other"), NIGHT_AND_DAY, strict=True)
    ]

    async with processing(
        redis_url,
        kind="sqlite",
        queues=both,
        merge=merge(),
        transforms=transforms(),
        transport={"path": str(tmp_path / "q.db")},
        environ=environ,
    ) as running:
        with closing(sqlite3.connect(tmp_path / "q.db", isolation_level=None)) as db:
            for name in ("chat", "other"):
                body = conversation(f"of-{name}")
                db.execute("insert into messages (queue, body, message_id) values (?, ?, ?)", (name, body, name))
        (result,) = await running.results(1, "done")
        await eventually(usage.exists, within=10, what="usage is written")
        with closing(sqlite3.connect(tmp_path / "q.db")) as db:
            left = db.execute("select queue from messages").fetchall()

    opened = result["id"].removeprefix("of-")
    assert left == [("other" if opened == "chat" else "chat",)], "the gate that is closed lets nothing in"
    assert json.loads(result["payload"])["choices"][0]["message"]["content"] == "four"
    assert [one["role"] for one in json.loads(model.requests[0].body)["messages"]] == ["system", "user"]
    (event,) = map(json.loads, usage.read_text().splitlines())
    assert (event["type"], event["data"]["request_id"]) == ("inference.usage", result["id"])


# ---------------------------------------------------------------- faults

FAULTY = '''
"""Parts that fail while they run."""
import iw_sqlite


class Fails:
    def __init__(self, *broken, inner=None):
        self.broken, self.inner = broken, inner

    def __getattr__(self, name):
        if self.inner is not None and name not in self.broken:
            return getattr(self.inner, name)
        def fail(*_, **__):
            raise LookupError(name)
        return fail

    def __len__(self):
        raise LookupError("len")


def gate(parts):
    return Fails()


def policy(parts):
    return Fails()


def sink(parts):
    return Fails()


class Transform:
    def validate(self, request):
        if b"poison" in request.payload:
            raise LookupError("poison")

    def apply(self, request, body=None):
        if body is not None and b"poison" in body:
            raise LookupError("poison")
        return body


def transform(parts):
    return Transform()


def transport(parts):
    good = iw_sqlite.sqlite(parts)
    if parts.queue_name != "ill":
        return good

    def connect():
        return Opens(good())

    return connect


class Opens:
    def __init__(self, session):
        self.session = session

    async def __aenter__(self):
        return Fails("receive", "settle", inner=await self.session.__aenter__())

    async def __aexit__(self, *exc):
        return await self.session.__aexit__(*exc)
'''
POINTS: Mapping[str, str] = {
    "gates": "gate",
    "merge_policies": "policy",
    "transports": "transport",
    "transforms": "transform",
    "answer_transforms": "transform",
    "billing_sinks": "sink",
}


@pytest.fixture
async def faulty(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[None]:
    """A package whose parts are all called `faulty`."""
    folder = tmp_path / "faulty"
    info = folder / "iw_faulty-0.1.dist-info"
    info.mkdir(parents=True)
    (folder / "iw_faulty.py").write_text(FAULTY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: iw-faulty\nVersion: 0.1\n")
    points = (f"[inference_worker.{group}]\nfaulty = iw_faulty:{name}\n" for group, name in POINTS.items())
    (info / "entry_points.txt").write_text("\n".join(points))
    monkeypatch.syspath_prepend(folder)
    yield
    sys.modules.pop("iw_faulty", None)


async def test_gates_policies_transforms_and_sinks_that_fail_hold_up_nobody_else(
    faulty: None, redis_url: str, model: FakeModel
) -> None:
    environ = {"BILLING_SINK": "faulty", "METRICS_FLUSH_INTERVAL_S": "0.1"}
    one = [{"name": "f", "type": "faulty"}]

    async with processing(
        redis_url,
        queues=[
            queue("well", model.url, request_path_url="/v1/chat/completions"),
            queue("ill", model.url, gate_type="faulty"),
            queue("judged", model.url, worker_pool_id="judged"),
        ],
        pools=[{"id": "default", "workers": 2}, {"id": "judged", "workers": 1, "gate_type": "faulty"}],
        merge={"type": "faulty"},
        transforms={"requestTransforms": one, "responseTransforms": one},
        environ=environ,
    ) as running:
        await running.submit("kept", queue="ill")
        await running.submit("judged", queue="judged")
        await running.submit("poison", queue="well", payload={"model": "m", "messages": [], "x": "poison"})
        await running.submit(*(f"w{number}" for number in range(20)), queue="well")
        results = {result["id"]: result for result in await running.results(22)}

        async def owed() -> bool:
            return await running.redis.xlen("infer_usage:process") == 20

        await eventually(owed, within=10, what="the events are kept for a sink that works")
        assert await running.lying() == {"ill": 1}

    assert all(results[f"w{number}"]["status_code"] == 200 for number in range(20))
    assert results["poison"]["error_code"] == "INVALID_REQUEST"
    assert results["judged"]["error_code"] == "GATE_ERROR"


async def test_a_transport_that_fails_at_one_queue_serves_the_others(
    faulty: None, tmp_path: Path, redis_url: str, model: FakeModel
) -> None:
    queues: Sequence[Any] = [queue(name, model.url, result_queue_name="done") for name in ("ill", "well")]

    async with processing(
        redis_url,
        kind="faulty",
        queues=queues,
        transport={"path": str(tmp_path / "q.db")},
        environ={"REDIS_URL": redis_url},
        ready=False,
    ) as running:
        there = (tmp_path / "q.db").exists
        await eventually(there, within=10, what="the file is made")
        with closing(sqlite3.connect(tmp_path / "q.db", isolation_level=None)) as db:

            def table() -> bool:
                return bool(db.execute("select 1 from sqlite_master where name = 'messages'").fetchone())

            await eventually(table, within=10, what="the table is made")
            for name in ("ill", "well"):
                body = no_conversation(f"of-{name}")
                db.execute("insert into messages (queue, body) values (?, ?)", (name, body))
            (result,) = await running.results(1, "done")
            left = db.execute("select queue, attempts from messages").fetchall()

    assert result["id"] == "of-well"
    assert left == [("ill", 0)]


async def test_what_is_wrong_with_a_package_is_said_at_the_start(
    installed: Path, tmp_path: Path, redis_client: RedisClient, redis_url: str
) -> None:
    """As the command says it: the package, and what would be accepted."""
    env = {"PYTHONPATH": os.pathsep.join([str(installed), *sys.path, str(ROOT)])}

    ended = await checked(
        tmp_path, redis_url, queue("q", "http://h", gate_type="business-hours", gate_params={"opens": 9}), env=env
    )
    unknown = await checked(tmp_path, redis_url, queue("q", "http://h", gate_type="bussiness-hours"), env=env)

    assert (ended.code, unknown.code) == (2, 2)
    assert "transport.queues[0].gate_params.closes: is missing" in ended.err
    assert 'transport.queues[0].gate_type: is "bussiness-hours"; accepted: aimd, ' in unknown.err
    assert ", business-hours" in unknown.err
