"""The main job on real input: requests in RabbitMQ, a model that answers, results in Redis, usage billed."""

import asyncio
import json
import time
from pathlib import Path

from redis.asyncio import Redis as RedisClient

from tests.conservation import assert_conserved, collect, publish
from tests.faults.model import FakeModel
from tests.faults.processes import WorkerProcess
from tests.faults.sinks import BillingServer, MetricServer
from tests.services import free_port
from tests.waiting import eventually
from tests.worker_env import queue_of, worker_env


async def test_requests_are_answered_billed_and_reported(
    rabbitmq_url: str, redis_url: str, redis_client: RedisClient, deployment_id: str, tmp_path: Path
) -> None:
    port = free_port()
    async with FakeModel() as model, BillingServer() as billing, MetricServer() as metrics:
        env = worker_env(
            rabbitmq_url=rabbitmq_url,
            redis_url=redis_url,
            model_url=model.url,
            deployment_id=deployment_id,
            http_port=port,
            RABBITMQ_PREFETCH="8",
            CROESUS_HOST=billing.url,
            METRIC_SERVER_URL=metrics.url,
            METRIC_SERVER_SERVICE_TOKEN="s3cret",
        )
        ids = [f"{deployment_id}-{n}" for n in range(50)]
        async with WorkerProcess(env, output=tmp_path / "worker.log") as worker:
            await worker.ready(f"http://127.0.0.1:{port}/readyz")
            bodies = [
                {
                    "request_id": i,
                    "received_at": time.time(),
                    "timeout_s": 60,
                    "payload": {"model": "tiny", "messages": []},
                }
                for i in ids
            ]
            await publish(rabbitmq_url, queue_of(env), *bodies)

            async def all_done() -> bool:
                return len(await redis_client.keys(f"infer_resp:{deployment_id}-*")) == len(ids)

            await eventually(all_done, within=20, what="all results are stored")
            await billing.billed(len(ids))
            worker.terminate()
            assert await worker.wait(within=15) == 0, worker.log
        assert_conserved(
            await collect(
                ids,
                redis=redis_client,
                rabbitmq_url=rabbitmq_url,
                deployment_id=deployment_id,
                dlq=env["INFERENCE_DLQ"],
                billed=billing.events,
            )
        )
        assert len(metrics.records) == len(ids)
        assert "s3cret" not in worker.log
        assert json.loads(worker.log.splitlines()[0])
        await asyncio.sleep(0)
