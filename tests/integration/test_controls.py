"""What an operator may do to a running worker: by signal and over the ops port (issue of the operator's hand)."""

import os
import signal
from pathlib import Path

import httpx
from redis.asyncio import Redis as RedisClient

from tests.conservation import publish
from tests.faults.model import FakeModel
from tests.faults.processes import WorkerProcess
from tests.in_process import request_body
from tests.services import free_port
from tests.waiting import eventually
from tests.worker_env import queue_of, worker_env


async def test_a_worker_is_paused_and_resumed_by_signal_and_over_its_port(
    rabbitmq_url: str, redis_url: str, redis_client: RedisClient, deployment_id: str, tmp_path: Path
) -> None:
    port = free_port()
    async with FakeModel() as model, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as ops:
        env = worker_env(
            rabbitmq_url=rabbitmq_url,
            redis_url=redis_url,
            model_url=model.url,
            deployment_id=deployment_id,
            http_port=port,
            WORKER_HTTP_TOKEN="s3cret-of-the-port",
        )

        async def state() -> str:
            return str((await ops.get("/status")).json()["state"])

        async def is_state(name: str) -> None:
            async def there() -> bool:
                return await state() == name

            await eventually(there, within=10, what=name)

        async def answered(request_id: str) -> None:
            async def there() -> bool:
                return await redis_client.exists(f"infer_resp:{request_id}") == 1

            await eventually(there, within=10, what="the answer")

        async with WorkerProcess(env, output=tmp_path / "worker.log") as worker:
            await worker.ready(f"http://127.0.0.1:{port}/readyz")
            await is_state("consuming")
            os.kill(worker.pid, signal.SIGUSR1)
            await is_state("suspended")
            await publish(rabbitmq_url, queue_of(env), request_body(f"{deployment_id}-1"))
            assert (await ops.get("/status")).json()["suspended"] == {"operator": "paused by an operator"}
            assert model.requests == []
            os.kill(worker.pid, signal.SIGUSR1)
            await answered(f"{deployment_id}-1")

            token = {"Authorization": "Bearer s3cret-of-the-port"}
            assert (await ops.post("/pause")).status_code == 401
            assert (await ops.post("/pause", headers=token)).json() == {"paused": True}
            await is_state("suspended")
            assert (await ops.post("/resume", headers=token)).json() == {"paused": False}
            await publish(rabbitmq_url, queue_of(env), request_body(f"{deployment_id}-2"))
            await answered(f"{deployment_id}-2")

            os.kill(worker.pid, signal.SIGUSR2)
            await worker.logged('"to":"debug"')
            assert (await ops.post("/log-level", headers=token, json={"level": "error"})).json() == {"level": "error"}
            worker.terminate()
            assert await worker.wait(within=15) == 0
            assert "s3cret" not in worker.log
