"""Sends requests to a replica's queue and waits for their answers: `python send.py PREFIX COUNT SECONDS [FAULT]`.

deploy/test-compose.sh runs it in the worker's image and environment, as a witness that shares nothing with the worker
but its libraries. With all answers in time it exits 0; with SECONDS 0 it does not wait. FAULT is JSON for the mock
model; `sent` sends nothing, and only looks. Not here: a client; `inference-worker submit` is one.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence

import aio_pika
from redis.asyncio import Redis


async def send(environ: Mapping[str, str], ids: Sequence[str], fault: str) -> None:
    """Publish one request for each id."""
    connection = await aio_pika.connect(environ["RABBITMQ_URL"])
    async with connection, connection.channel() as channel:
        for request_id in ids:
            payload: dict[str, object] = {"messages": [{"role": "user", "content": f"Say {request_id} again"}]}
            if fault:
                payload["mock"] = json.loads(fault)
            body = {"request_id": request_id, "received_at": time.time(), "timeout_s": 120, "payload": payload}
            message = aio_pika.Message(json.dumps(body).encode(), delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(message, routing_key=f"infer_req.{environ['DEPLOYMENT_ID']}")


async def completed(environ: Mapping[str, str], ids: Sequence[str], within_s: float) -> int:
    """How many of them are completed, with their own words in the answer, once all have ended or time is over."""
    keys = [f"infer_resp:{request_id}" for request_id in ids]
    ends = time.monotonic() + within_s
    async with Redis.from_url(environ["REDIS_URL"]) as redis:
        answers = await redis.mget(keys)
        while None in answers and time.monotonic() < ends:
            await asyncio.sleep(0.2)
            answers = await redis.mget(keys)
    return sum(
        answer is not None and json.loads(answer)["status"] == "completed" and f"Say {request_id} again" in str(answer)
        for request_id, answer in zip(ids, answers, strict=True)
    )


async def main(prefix: str, count: str, seconds: str, fault: str = "") -> bool:
    """Whether all is as it should be."""
    ids = [f"{prefix}-{number}" for number in range(int(count))]
    if fault != "sent":
        await send(os.environ, ids, fault)
    done = await completed(os.environ, ids, float(seconds))
    print(f"{prefix}: {done} of {count} completed")
    return float(seconds) == 0 or done == len(ids)


if __name__ == "__main__":
    sys.exit(not asyncio.run(main(*sys.argv[1:])))
