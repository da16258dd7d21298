"""A short run of kills over a queue in Postgres; a thousand: `python -m tests.bench process-kills --transport sql`."""

from tests.every_transport import sql_tables
from tests.faults.process_kills import QUEUE, run

KILLS = 20


async def test_killed_again_and_again_each_request_has_one_result_and_one_bill(sql_url: str) -> None:
    async with sql_tables(sql_url, [QUEUE]) as queues:
        ended = await run(queues, kills=KILLS, requests=120, lives_s=0.5)

    assert not ended.breaches()
    assert len(ended.submitted) == 120
