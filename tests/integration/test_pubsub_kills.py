"""A short run of kills over a subscription; the thousand: `python -m tests.bench process-kills --transport gcp-pubsub`.

It takes longer than those of other transports, as what the dead had in hand comes again after ten seconds: that is the
shortest deadline that the service has. Without failures of the model: what is tried again has a minute.
"""

from tests.every_transport import subscriptions
from tests.faults.process_kills import QUEUE, run

KILLS = 10
REQUESTS = 90


async def test_killed_again_and_again_each_request_ends_once_and_is_billed_once(redis_url: str) -> None:
    async with subscriptions(redis_url, [QUEUE]) as queues:
        ended = await run(queues, kills=KILLS, requests=REQUESTS, failing=0.0, within=60)

    assert not ended.breaches()
    assert len(ended.submitted) == REQUESTS
