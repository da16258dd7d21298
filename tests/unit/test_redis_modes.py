"""Which client a mode has, and whom it asks. Nothing is connected to: opening one asks nobody."""

from collections.abc import Callable

import pytest

from inference_worker.config.documents import MODES, RedisMode
from inference_worker.redis_cluster import RedisCluster
from inference_worker.redis_modes import redis_place
from inference_worker.redis_scripts import RedisLink, RedisTls, address_in, url_at
from inference_worker.redis_sentinel import Sentinels

URL = "rediss://user:secret@first:7000/0?ssl_cert_reqs=none"


def url() -> str:
    return URL


@pytest.mark.parametrize(
    ("mode", "client", "clustered"),
    [
        pytest.param("standalone", RedisLink, False, id="one server by one connection"),
        pytest.param("sentinel", RedisLink, False, id="whoever is the master by one connection"),
        pytest.param("cluster", RedisCluster, True, id="a connection to each server"),
    ],
)
async def test_each_mode_has_its_client_case_68(mode: RedisMode, client: type, clustered: bool) -> None:
    name = "main" if mode == "sentinel" else ""
    async with redis_place(url, mode=mode, master_name=name, client_name="test", tls=RedisTls()) as place:
        assert isinstance(place.commands, client)
        assert place.clustered is clustered
        assert (place.cluster is place.commands) is clustered
        assert place.moved() == 0


def test_no_mode_is_left_out_case_68() -> None:
    assert set(MODES) == {"standalone", "sentinel", "cluster"}


async def test_of_one_server_the_url_is_asked_at_each_connection_case_68() -> None:
    """It may have a password that changes."""
    said = iter(["redis://one", "redis://two"])
    async with redis_place(lambda: next(said), mode="standalone", client_name="test", tls=RedisTls()) as place:
        assert [place.address(), place.address()] == ["redis://one", "redis://two"]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.2:7001", "rediss://user:secret@10.0.0.2:7001/0?ssl_cert_reqs=none"),
        ("fd00::2:7001", "rediss://user:secret@[fd00::2]:7001/0?ssl_cert_reqs=none"),
        ("[fd00::2]:7001", "rediss://user:secret@[fd00::2]:7001/0?ssl_cert_reqs=none"),
    ],
)
def test_another_server_is_reached_as_the_url_says(address: str, expected: str) -> None:
    assert url_at(URL, address) == expected


def test_without_other_addresses_the_urls_own_is_asked() -> None:
    assert address_in(URL) == "first:7000"
    assert address_in("redis://") == "localhost:6379"
    assert address_in("redis://[::1]") == "::1:6379"


@pytest.mark.parametrize(
    ("said", "turns"),
    [
        ("main 10.0.0.1 6379 10.0.0.2 6379", 1),
        ("other 10.0.0.1 6379 10.0.0.2 6379", 0),
        ("main2 10.0.0.1 6379 10.0.0.2 6379", 0),
        ("", 0),
    ],
)
def test_a_switch_is_heeded_if_it_is_of_our_master(said: str, turns: int) -> None:
    sentinels = Sentinels(url, ("a:1", "b:2"), master_name="main", tls=RedisTls())

    sentinels.heard(said)

    assert sentinels.turns() == turns


def test_who_listens_to_sentinels_turns_to_another_each_time_and_names_no_database() -> None:
    """One that is dead must not be the only one that is listened to."""
    sentinels = Sentinels(url, ("a:1", "b:2"), master_name="main", tls=RedisTls())
    ask: Callable[[], str] = sentinels.sentinel

    assert {ask(), ask()} == {
        "rediss://user:secret@a:1?ssl_cert_reqs=none",
        "rediss://user:secret@b:2?ssl_cert_reqs=none",
    }
