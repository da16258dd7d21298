"""The bare read-ahead loop over a stream: a buffer beside what runs, call, SET and XACK in one pipeline, and no logic.

No claim, no lease, no bill, no retry, no check: what a worker could reach if keeping a request cost nothing.
"""

import asyncio
import os
import signal
from typing import Any

import aiohttp
import msgspec
from redis.asyncio import Redis


class _Request(msgspec.Struct):
    payload: msgspec.Raw


async def main() -> None:
    """Until SIGTERM."""
    env, stop = os.environ, asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    stream, group, slots = env["IWL_STREAM"], "workers", int(env["IWL_CONCURRENCY"])
    latency_s = float(env["MODEL_MOCK_LATENCY_S"]) if env["MODEL_MODE"] == "mock" else None
    url = env["MODEL_CONTAINER_URL"] + "/v1/chat/completions"
    redis: Redis = Redis.from_url(env["REDIS_URL"], socket_timeout=None)
    headers = {"Content-Type": "application/json"}
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers, trust_env=False)
    ahead: asyncio.Queue[tuple[bytes, dict[bytes, bytes]]] = asyncio.Queue(slots)

    async def work() -> None:
        while True:
            entry, fields = await ahead.get()
            payload = bytes(msgspec.json.decode(fields[b"request"], type=_Request).payload)
            if latency_s is not None:
                await asyncio.sleep(latency_s)
                answer = payload
            else:
                async with session.post(url, data=payload) as response:
                    answer = await response.read()
            both = redis.pipeline(transaction=False)
            both.set("infer_resp:" + fields[b"job_id"].decode(), answer, ex=3600)
            both.xack(stream, group, entry)
            await both.execute()

    async def read() -> None:
        while True:
            got: Any = await redis.xreadgroup(group, "bare", {stream: ">"}, count=slots, block=500)
            for entry, fields in got[0][1] if got else []:
                await ahead.put((entry, fields))

    async with session, redis:
        await redis.xgroup_create(stream, group, "0", mkstream=True)
        tasks = [asyncio.create_task(job) for job in (read(), *(work() for _ in range(slots)))]
        await redis.set("ready:" + stream, "1")
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


if __name__ == "__main__":
    asyncio.run(main())
