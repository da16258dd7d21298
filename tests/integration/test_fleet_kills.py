"""Two gateways, three workers, a worker killed over and over: every accepted job ends once, and is billed once."""

from pathlib import Path

import pytest

from tests.faults import fleet_run
from tests.integration.conftest import OwnRedis


@pytest.mark.needs_control
async def test_no_job_is_lost_or_done_twice_while_workers_are_killed(own_redis: OwnRedis, tmp_path: Path) -> None:
    redis = await own_redis()

    ended = await fleet_run.run(redis.url, tmp_path, name="fleet", jobs=2500, kill_every_s=1.0, within=60)

    assert fleet_run.judge(ended) == []
    assert ended.accepted == 2500
    assert ended.killed >= 2
