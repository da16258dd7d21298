"""The one connection to Redis: who asks gets an answer, whatever goes wrong on the way."""

import asyncio

import pytest

from inference_worker.errors import StoreUnavailable
from inference_worker.redis_scripts import RedisLink, RedisTls


async def test_a_fault_of_ours_while_sending_leaves_nobody_waiting() -> None:
    def url() -> str:
        raise TypeError("unexpected keyword argument")

    link = RedisLink(url, lambda: None, client_name="test", tls=RedisTls())
    async with link.open(), asyncio.timeout(5.0):
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="TypeError"):
                await asyncio.gather(link.do("PING"), link.do("PING"))
