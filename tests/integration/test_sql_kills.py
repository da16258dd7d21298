"""A short run of kills over a queue in Postgres; the thousand are a bench: `python -m tests.bench sql-kills`."""

from tests.faults.sql_kills import run

KILLS = 20


async def test_killed_again_and_again_each_request_has_one_result_and_one_bill(sql_url: str) -> None:
    ended = await run(sql_url, kills=KILLS, requests=120, lives_s=0.5)

    assert not ended.breaches()
    assert len(ended.submitted) == 120
