"""Memory stays bounded and the event loop free, whatever the size of what arrives."""

import asyncio
import gc
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.faults import model as models
from tests.faults import wire
from tests.faults.processes import WorkerProcess
from tests.faults.system import System
from tests.integration.conftest import OwnRedis
from tests.services import free_port
from tests.waiting import eventually

MIB = 1024 * 1024
MOST_BYTES = 768 * MIB
"""Of resident memory: the budget of 256 MiB twice, as a body is held as it came and as what the model is sent; what the
process takes by itself; and bytes on their way through the drivers."""


def peak_bytes(pid: int) -> int:
    """The most resident memory that a process ever had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


@pytest.fixture
async def roomy(own_redis: OwnRedis, rabbitmq_url: str, deployment_id: str, tmp_path: Path) -> AsyncGenerator[System]:
    """A deployment with a Redis of its own: what is stored here is large."""
    server = await own_redis()
    made = System(
        rabbitmq_url=rabbitmq_url, redis_url=server.url, deployment_id=deployment_id, folder=tmp_path, watched=False
    )
    async with made as system:
        yield system


async def stored(system: System, ids: list[str]) -> None:
    """Wait for results without reading them."""

    async def all_there() -> bool:
        return int(await system.redis.exists(*(f"infer_resp:{one}" for one in ids))) == len(ids)

    await eventually(all_there, within=60, what=f"{len(ids)} results", every=0.1)


async def test_large_bodies_beyond_the_budget_wait_in_the_queue(roomy: System) -> None:
    """64 bodies of 8 MiB at a prefetch of 64 are more than may be held at once."""
    ids = roomy.ids(64)
    opened = asyncio.Event()
    roomy.model.default = wire.gated(opened, models.ok())
    async with roomy.worker(RABBITMQ_PREFETCH="64") as worker:
        for one in ids:
            await roomy.submit(one, pad=8 * MIB)
        await worker.in_state("suspended")
        assert "memory" in str((await worker.status())["suspended"])
        opened.set()
        await stored(roomy, ids)
        await roomy.drained()
        await roomy.billed()
        peak = peak_bytes(worker.pid)
        await roomy.stopped(worker)

    await roomy.conserved()
    assert roomy.calls() == dict.fromkeys(ids, 1)
    assert peak < MOST_BYTES, f"{peak / MIB:.0f} MiB"


async def test_large_answers_beyond_the_budget_wait_for_each_other(roomy: System) -> None:
    """48 answers of 12 MiB at once: 576 MiB as they are."""
    ids = roomy.ids(48)
    opened = asyncio.Event()
    roomy.model.default = wire.gated(opened, wire.huge(12 * MIB, chunked=True))
    # As in the image: else glibc keeps the heap that the pieces of the answers were in.
    async with roomy.worker(RABBITMQ_PREFETCH="64", MALLOC_MMAP_THRESHOLD_="65536") as worker:
        await roomy.submit(*ids)
        await roomy.model.busy(48)
        opened.set()
        await stored(roomy, ids)
        await roomy.drained()
        peak = peak_bytes(worker.pid)
        await roomy.stopped(worker)

    await roomy.conserved()
    assert roomy.calls() == dict.fromkeys(ids, 1)
    assert peak < MOST_BYTES, f"{peak / MIB:.0f} MiB"


@asynccontextmanager
async def lag_probe() -> AsyncGenerator[list[float]]:
    """The longest stretches, in seconds, that this thread computed without letting a waiting task run.

    Of computing, not of waiting: what other processes take of the machine is no fault of the worker's.
    """
    longest = [0.0]

    async def look() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            longest.append(time.thread_time() - before)

    # The collector's look at all that the tests have loaded is no stretch of the worker's.
    gc.collect()
    gc.freeze()
    looking = asyncio.create_task(look())
    try:
        yield longest
    finally:
        looking.cancel()
        await asyncio.wait([looking])
        gc.unfreeze()


@pytest.mark.alone
@pytest.mark.parametrize("size_mib", [1, 8, 15])
async def test_the_loop_is_never_blocked_for_long(size_mib: int, roomy: System, tmp_path: Path) -> None:
    """50 ms, or 5 ms for each MiB, with bodies and answers of this size; the model is a process of its own."""
    ids = roomy.ids(4)
    port = free_port()
    command = (sys.executable, "-m", "tests.faults.model", "--port", str(port))
    answer = {"huge": {"size_bytes": size_mib * MIB}}
    async with WorkerProcess({}, output=tmp_path / "model.log", command=command) as server:
        await server.ready(f"http://127.0.0.1:{port}/health")
        await order(port, {"default": answer})
        async with roomy.process("declares", MODEL_CONTAINER_URL="http://127.0.0.1:9"):
            await roomy.submit_when_declared()
        for one in ids:
            await roomy.submit(one, pad=size_mib * MIB)
        async with roomy.inside(MODEL_CONTAINER_URL=f"http://127.0.0.1:{port}") as worker:
            worker.listener.suspend_consuming("kept", "until the probe looks: starting may take its time")
            await eventually(
                lambda: [*worker.listener.suspended] == ["kept"], within=10, what="nothing else to wait for"
            )
            async with lag_probe() as longest:
                worker.listener.resume_consuming("kept")
                await eventually(lambda: worker.listener.in_flight, within=10, what="the first message")
                await roomy.drained(worker, within=60)

    await roomy.conserved()
    assert max(longest) < max(0.05, 0.005 * size_mib), f"{max(longest):.3f} s"


async def order(port: int, orders: dict[str, object]) -> None:
    """Tell a model in a process of its own what to do."""
    url = f"http://127.0.0.1:{port}/__control__"
    async with aiohttp.ClientSession() as session, session.post(url, json=orders) as answer:
        assert answer.status == 200
