"""What an adversary found: messages, models and settings at which a worker once stumbled."""

import struct
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

from inference_worker.results.redis import claim_key, probe_key
from tests.faults import wire
from tests.faults.model import FakeModel
from tests.faults.processes import WorkerProcess
from tests.in_process import request_body
from tests.integration.conftest import RunningWorker
from tests.services import free_port
from tests.waiting import eventually
from tests.worker_env import worker_env

MARK = datetime(2020, 1, 1, tzinfo=UTC)
"""A timestamp to be replaced on its way to the broker, by what the driver would not write."""


def microseconds(sent: bytes) -> bytes:
    return sent.replace(struct.pack(">Q", int(MARK.timestamp())), struct.pack(">Q", 1_700_000_000_000_000))


def raw_bytes(sent: bytes) -> bytes:
    return sent.replace(b"MARK", b"\xff\xfe\x00\x80")


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_a_message_whose_properties_the_driver_cannot_read_stops_nobody(
    running_worker: RunningWorker, model: FakeModel, queue_type: str
) -> None:
    """The driver gave up the connection, and the broker delivered the same message again, for ever, and no other."""
    w = await running_worker(RABBITMQ_QUEUE_TYPE=queue_type, RABBITMQ_PREFETCH="4", RABBITMQ_MAX_RETRIES="3")
    model.next(wire.reset(), wire.reset(), wire.reset())

    await w.publish(request_body("time"), timestamp=MARK, headers={"when": MARK}, wire=microseconds)
    await w.publish(request_body("id"), correlation_id="MARK", reply_to="MARK", message_id="MARK", wire=raw_bytes)
    await w.publish(request_body("name"), headers={"MARK": 1}, wire=raw_bytes)
    await w.publish(request_body("good"))

    for request_id in ("time", "id", "name", "good"):
        assert (await w.stored(request_id))["status"] == "completed"
    assert (await w.seen()).dispositions.count("retry") == 3


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({"k": "MARK"}, id="a text that is not UTF-8"),
        pytest.param({"k": 1e300}, id="a number beyond single precision"),
    ],
)
@pytest.mark.parametrize("model_fails", [1, 2])
async def test_a_header_that_the_driver_cannot_write_is_copied_all_the_same(
    running_worker: RunningWorker, model: FakeModel, headers: Mapping[str, object], model_fails: int
) -> None:
    """The copy was tried for 30 s, the message handed back and the model called again, until the broker's limit."""
    w = await running_worker(RABBITMQ_MAX_RETRIES="1")
    model.next(*[wire.reset()] * model_fails)

    # A double is what the test's own driver writes here, since it is ours.
    await w.publish(request_body("r"), headers=headers, wire=raw_bytes)

    assert (await w.stored("r"))["attempt"] == 1
    seen = await w.seen(dead=model_fails - 1)
    assert seen.calls == 2


IDS = (
    "x",
    "{infer_resp:x}",
    ":{infer_resp:x}",
    "::{infer_resp:x}",
    "{infer_resp:{infer_resp:x}}",
    "a}b",
    "{infer_resp:a}b}",
)


def test_no_two_requests_share_a_claim() -> None:
    """A claim has a floor: the first try of one request would be taken for the past of another that was tried again."""
    assert len({claim_key(one) for one in IDS}) == len(IDS)
    assert claim_key("probe:{d}:r") != probe_key("{d}", "r")


async def test_a_request_that_is_tried_again_does_not_hide_one_whose_id_is_its_key(
    running_worker: RunningWorker, model: FakeModel
) -> None:
    """The second was acknowledged as superseded, without a result."""
    w = await running_worker(RABBITMQ_RETRY_DELAY_S="1", RABBITMQ_MAX_RETRIES="1")
    model.next(wire.reset())

    await w.publish(request_body("x"))
    await w.disposed("retry")
    await w.publish(request_body("{infer_resp:x}"))

    assert (await w.stored("{infer_resp:x}"))["status"] == "completed"
    assert (await w.stored("x"))["status"] == "completed"


async def test_a_worker_whose_names_have_braces_survives_a_request_named_like_its_probe(
    running_worker: RunningWorker,
) -> None:
    w = await running_worker(REPLICA_ID="{r}")

    await w.publish(request_body(f"probe:{w.env['DEPLOYMENT_ID']}:{{r}}"))
    await w.disposed("ack")

    assert len((await w.seen()).results) == 1


@pytest.mark.parametrize(("status", "stored"), [(500, 500), (302, 502)])
async def test_a_reason_phrase_that_is_no_text_fails_the_request_and_nothing_else(
    running_worker: RunningWorker, model: FakeModel, status: int, stored: int
) -> None:
    """Its result could not be encoded: the model was called until the request was poison."""
    w = await running_worker()
    model.next(wire.raw(b"HTTP/1.1 %d Caf\xe9 \xff\r\nLocation: \xff\r\nContent-Length: 0\r\n\r\n" % status))

    await w.publish(request_body("r"))

    result = await w.stored("r")
    assert result["status_code"] == stored
    assert "Caf\ufffd \ufffd" in result["error"]
    assert (await w.seen()).calls == 1


async def test_a_worker_that_is_told_to_stop_while_it_loads_exits_as_asked(tmp_path: Path) -> None:
    """It was killed by the signal; as the first process of a container it would not even have noticed."""
    async with WorkerProcess(lonely(), output=tmp_path / "log") as process:
        mapped = Path(f"/proc/{process.pid}/maps")
        await eventually(
            lambda: "_pydantic_core" in mapped.read_text(), within=10, what="the middle of the loading", every=0.005
        )

        process.terminate()

        assert await process.wait(within=10) == 0


def test_a_stop_that_comes_where_the_interpreter_drops_exceptions_is_a_stop() -> None:
    """It forgets the locks of modules in callbacks while it loads them: what a handler raised there was ignored."""
    code = """
import os, signal, sys, weakref
class Thing: pass
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "inference_worker.assembly":
            thing = Thing()
            forgotten = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM))
            del thing
sys.meta_path.insert(0, Finder())
from inference_worker.__main__ import main
sys.argv = ["inference-worker", "--help"]
main()
"""
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert (said.stdout, said.stderr) == ("", "")


async def test_a_worker_that_is_told_to_stop_again_and_again_exits_as_asked(tmp_path: Path) -> None:
    """The handlers went with the event loop, and a signal in what was left of the process killed it."""
    async with WorkerProcess(lonely(), output=tmp_path / "log") as process:
        await process.logged("connecting", within=20)

        def ended() -> bool:
            process.terminate()
            process.interrupt()
            return process.returncode is not None

        await eventually(ended, within=10, what="the end", every=0.002)

        assert process.returncode == 0, process.log


def lonely() -> dict[str, str]:
    """The environment of a worker that reaches nobody."""
    return worker_env(
        rabbitmq_url=f"amqp://127.0.0.1:{free_port()}",
        redis_url=f"redis://127.0.0.1:{free_port()}",
        model_url=f"http://127.0.0.1:{free_port()}",
        deployment_id="lonely",
    )
