"""A short run of kills of the sidecar; the thousand: `… tests.bench process-kills --transport rabbitmq --command run`.

Begotten like the workers of `test_process_kills.py`. The moments that matter are met one by one in `test_kills.py`.
"""

from tests.faults.process_kills import run
from tests.sidecar_queue import sidecar_queue

KILLS = 20


async def test_sidecars_killed_again_and_again_end_and_bill_each_request_once(
    rabbitmq_url: str, redis_url: str
) -> None:
    async with sidecar_queue(rabbitmq_url, redis_url) as queue:
        ended = await run(queue, kills=KILLS, requests=6 * KILLS, lives_s=0.4, within=60)

    assert not ended.breaches()
    assert (len(ended.submitted), ended.kills) == (6 * KILLS, KILLS)
