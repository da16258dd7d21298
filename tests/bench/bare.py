"""The bare loop: consume, claim, POST, store, acknowledge, with the worker's own clients and no logic.

What a worker could reach if deciding, checking, timing, logging and counting cost nothing.
"""

import asyncio
import os
import secrets
import signal
import time

import aio_pika
import aiohttp
import msgspec
from aiormq.abc import DeliveredMessage

from inference_worker.redis_scripts import CLAIM, FINISH, RedisLink, RedisTls


class _Message(msgspec.Struct):
    request_id: str
    payload: msgspec.Raw


async def main() -> None:
    """Until SIGTERM."""
    env, stop = os.environ, asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    deployment, limit = env["DEPLOYMENT_ID"], int(env["RABBITMQ_PREFETCH"])
    url = env["MODEL_CONTAINER_URL"] + "/v1/chat/completions"
    link = RedisLink(lambda: env["REDIS_URL"], lambda: None, client_name="bare", tls=RedisTls())
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers={"Content-Type": "application/json"}, trust_env=False
    )
    async with link.open(), session, await aio_pika.connect(env["RABBITMQ_URL"]) as connection:
        channel = connection.channel(publisher_confirms=False)
        await channel.initialize()
        raw = await channel.get_underlay_channel()
        await raw.basic_qos(prefetch_count=limit)

        async def one(message: DeliveredMessage) -> None:
            request = msgspec.json.decode(message.body, type=_Message)
            result = f"infer_resp:{request.request_id}"
            keys = [result, f"infer_claim:{{{result}}}"]
            token = secrets.token_hex(16)
            await link.run(CLAIM, keys, 0, token, 15_000, round((time.time() + 3600) * 1000))
            async with session.post(url, data=bytes(request.payload)) as response:
                answer = await response.read()
            reply = b'{"status":"completed","status_code":200,"result":%b,"finished_at":%f}' % (answer, time.time())
            outbox = f"infer_usage:{deployment}"
            await link.run(FINISH, [*keys, outbox], token, reply, 3600, "completed", "", "", "")
            assert message.delivery_tag is not None
            await raw.basic_ack(message.delivery_tag)

        await raw.basic_consume(f"infer_req.{deployment}", one)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main())
