"""Puts so many requests into the queues, by turns, and prints the answers: `ask.py [NUMBER]`."""

import asyncio
import sys
import time

from inference_worker.producer import Producer, Request


async def main(number: int) -> None:
    async with Producer("redis://redis:6379/0", result_queue="result-list") as producer:
        for n in range(number):
            queue = ("chat", "reports")[n % 2]
            payload = {"model": "mock-model", "messages": [{"role": "user", "content": f"{queue} {n}"}]}
            await producer.submit(Request(payload=payload, deadline=time.time() + 120, request_queue=queue))
        for _ in range(number):
            leased = await producer.receive(within_s=120)
            print(leased.result.status_code, leased.result.json()["choices"][0]["message"]["content"])
            await leased.ack()


asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 4))
