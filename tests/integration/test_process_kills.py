"""Short runs of kills of `process`; the thousand are a bench: `python -m tests.bench process-kills --transport …`.

Queues in Postgres are in `test_sql_kills.py`, subscriptions of Pub/Sub in `test_pubsub_kills.py`.
"""

from tests.every_transport import Queues, rabbit_queues, sorted_sets, streams
from tests.faults.process_kills import QUEUE, run

KILLS = 20


async def killed(queues: Queues) -> None:
    ended = await run(queues, kills=KILLS, requests=6 * KILLS, lives_s=0.4, within=60)

    assert not ended.breaches()
    assert len(ended.submitted) == 6 * KILLS


async def test_over_sorted_sets_each_request_ends_once_whatever_is_killed(redis_url: str) -> None:
    async with sorted_sets(redis_url, [QUEUE]) as queues:
        await killed(queues)


async def test_over_streams_each_request_ends_once_whatever_is_killed(redis_url: str) -> None:
    async with streams(redis_url, [QUEUE]) as queues:
        await killed(queues)


async def test_over_rabbitmq_each_request_ends_once_whatever_is_killed(rabbitmq_url: str, redis_url: str) -> None:
    async with rabbit_queues(rabbitmq_url, redis_url, [QUEUE]) as queues:
        await killed(queues)
