"""The fleet in a real Redis: who was heard of, what is wanted, and what expires; and a worker that idles by it."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from inference_worker.errors import StoreUnavailable
from inference_worker.ports import Beat
from inference_worker.redis_scripts import RedisLink, RedisTls
from inference_worker.results.fleet import RedisFleet, wish_key, workers_key
from tests.in_process import request_body
from tests.integration.conftest import OwnRedis, RunningWorker
from tests.waiting import eventually

SOON_S = 10.0
BEAT = Beat(
    replica_id="worker-1",
    at=0.0,
    slots=4,
    in_flight=2,
    consuming=True,
    fit=True,
    service_s=1.5,
    done_per_s=0.25,
    model="tiny",
)


def link_to(url: str) -> RedisLink:
    return RedisLink(lambda: url, lambda: None, client_name="fleet-test", tls=RedisTls())


@pytest.fixture
async def link(redis_url: str) -> AsyncGenerator[RedisLink]:
    async with link_to(redis_url).open() as opened:
        yield opened


async def test_a_worker_is_known_by_its_last_word_and_by_the_clock_of_redis(
    link: RedisLink, redis_client: Redis
) -> None:
    fleet = RedisFleet(link, queue="q:1")
    await fleet.beat(replace(BEAT, in_flight=0))

    assert await fleet.beat(BEAT) is None
    (seen,) = await fleet.members()

    at, _ = await redis_client.time()
    assert abs(seen.at - at) < 5  # The worker's own clock said 0.
    assert replace(seen, at=0.0) == BEAT


async def test_who_is_silent_is_gone_and_makes_room_when_another_joins(link: RedisLink, redis_client: Redis) -> None:
    """The hash goes when all are silent; while some speak, what is left of the others goes with the next to join."""
    fleet = RedisFleet(link, queue="q", silent_s=0.3)
    await fleet.beat(replace(BEAT, replica_id="dead"))

    async def alive_alone() -> bool:
        await fleet.beat(replace(BEAT, replica_id="alive"))
        return [beat.replica_id for beat in await fleet.members()] == ["alive"]

    await eventually(alive_alone, within=SOON_S, what="only the one that speaks")
    kept = set(await redis_client.hkeys(workers_key("q")))
    await fleet.beat(replace(BEAT, replica_id="new"))

    assert kept == {b"dead", b"alive"}
    assert set(await redis_client.hkeys(workers_key("q"))) == {b"alive", b"new"}

    async def nothing_left() -> bool:
        return not await redis_client.exists(workers_key("q"))

    await eventually(nothing_left, within=SOON_S, what="the end of the hash")


async def test_who_has_ended_is_gone_at_once(link: RedisLink) -> None:
    fleet = RedisFleet(link, queue="q")
    await fleet.beat(BEAT)

    await fleet.leave("worker-1")

    assert await fleet.members() == []


async def test_a_wish_is_heard_with_the_next_beat_and_lapses(link: RedisLink, redis_client: Redis) -> None:
    fleet = RedisFleet(link, queue="q")

    await fleet.want(3, 30.0)
    heard = await fleet.beat(BEAT), await fleet.desired()
    life_ms = await redis_client.pttl(wish_key("q"))
    await fleet.want(0, 0.1)

    assert heard == (3, 3)
    assert 25_000 < life_ms <= 30_000

    async def lapsed() -> bool:
        return await fleet.desired() is None and await fleet.beat(BEAT) is None

    await eventually(lapsed, within=SOON_S, what="the end of the wish")


@pytest.mark.parametrize("wish", ["", "-1", "many", "1e3", "99999999999999999999"])
async def test_a_wish_that_is_no_count_is_none(link: RedisLink, redis_client: Redis, wish: str) -> None:
    fleet = RedisFleet(link, queue="q")
    await redis_client.set(wish_key("q"), wish)

    assert await fleet.beat(BEAT) is None
    assert await fleet.desired() is None


async def test_what_is_no_beat_is_left_out(link: RedisLink, redis_client: Redis) -> None:
    """Workers of another version, or somebody else's field."""
    fleet = RedisFleet(link, queue="q")
    await fleet.beat(BEAT)
    at, _ = await redis_client.time()
    half, deep = json.dumps({"replica_id": "d"}), "[" * 5000
    for field, said in {
        "a": "",
        "b": "no number",
        "c": f"{at}000 [1]",
        "d": f"{at}000 {half}",
        "e": f"{at}000 {deep}",
    }.items():
        await redis_client.hset(workers_key("q"), field, said)

    assert [beat.replica_id for beat in await fleet.members()] == ["worker-1"]


async def test_queues_do_not_share_a_fleet(link: RedisLink) -> None:
    one, other = RedisFleet(link, queue="one"), RedisFleet(link, queue="other")

    await one.beat(BEAT)
    await one.want(3, 30)

    assert (await other.members(), await other.desired()) == ([], None)


@pytest.mark.needs_control
async def test_a_redis_that_is_gone_is_said_to_be(own_redis: OwnRedis) -> None:
    server = await own_redis()
    async with link_to(server.url).open() as link:
        fleet = RedisFleet(link, queue="q")
        await fleet.beat(BEAT)
        await asyncio.to_thread(server.kill)

        with pytest.raises(StoreUnavailable):
            await fleet.beat(BEAT)


# ---------------------------------------------------------------- a worker that idles


async def test_a_worker_that_is_not_wanted_takes_nothing_until_it_is(
    running_worker: RunningWorker, link: RedisLink
) -> None:
    one = await running_worker(REPLICA_ID="iw-worker-2")
    await one.consuming()
    fleet = RedisFleet(link, queue=one.queue)

    await fleet.want(1, 60)
    await one.suspended()

    async def told() -> bool:
        return [(one.consuming, one.fit) for one in await fleet.members()] == [(False, True)]

    await eventually(told, within=SOON_S, what="a member that idles and is fit")
    await one.publish(request_body("r"))
    await fleet.want(2, 60)
    await one.stored("r")

    seen = await one.seen()
    assert (seen.dispositions, seen.queued, list(seen.results)) == (["ack"], [], ["r"])
    assert await fleet.members() == []  # It has left.


async def test_a_dead_scaler_keeps_no_worker_idle(running_worker: RunningWorker, link: RedisLink) -> None:
    one = await running_worker(REPLICA_ID="worker-2")
    await one.consuming()
    fleet = RedisFleet(link, queue=one.queue)

    await fleet.want(1, 4)  # The last word of a scaler that has been killed.
    await one.suspended()

    await one.consuming()
