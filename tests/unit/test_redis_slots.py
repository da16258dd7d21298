"""Where keys lie in a Redis Cluster, against the driver's own count, and names that share a slot."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis.crc import key_slot

from inference_worker.redis_slots import beside, key_of, slot_of, tag_of
from inference_worker.results.redis import slot_keys

NAMES = st.text(alphabet="ab:{}\0ü", max_size=12)


@given(NAMES)
def test_a_key_has_the_slot_that_the_server_gives_it(key: str) -> None:
    assert slot_of(key) == key_slot(key.encode())


@given(NAMES.filter(bool), st.sampled_from(["claimed", "dead"]))
def test_what_lies_beside_a_key_lies_in_its_slot(key: str, name: str) -> None:
    assert slot_of(beside(key, name)) == slot_of(key) == slot_of(f"{{{tag_of(key)}}}")


@given(NAMES.filter(bool), NAMES.filter(bool))
@example("q", "{q}")
@example("a{}b", f"{{{tag_of('a{}b')}}}a{{}}b")
@example("}", f"{{{tag_of('}')}}}")
def test_two_keys_have_nothing_beside_them_in_common(one: str, other: str) -> None:
    assert (beside(one, "x") == beside(other, "x")) is (one == other)


@given(NAMES.filter(bool), NAMES.filter(bool))
def test_what_belongs_to_a_request_shares_a_slot_and_is_no_other_requests(one: str, other: str) -> None:
    assert len(set(map(slot_of, slot_keys(one)))) == 1
    assert one == other or not set(slot_keys(one)) & set(slot_keys(other))


@pytest.mark.parametrize(
    ("queue", "expected"),
    [
        pytest.param("tier-a", "{tier-a}:claimed", id="as other programs name it"),
        pytest.param("{team}:tier-a", "{team}:tier-a:claimed", id="a tag of its own is kept"),
        pytest.param("a{b", "{a{b}:claimed", id="a brace that opens none"),
    ],
)
def test_names_beside_a_queue(queue: str, expected: str) -> None:
    assert beside(queue, "claimed") == expected


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("GET", "k"), "k"),
        (("get", b"k"), "k"),
        (("XGROUP", "CREATE", "k", "g", "0"), "k"),
        (("XREADGROUP", "GROUP", "g", "c", "COUNT", 1, "STREAMS", "k", ">"), "k"),
        (("XAUTOCLAIM", "k", "g", "c", 0, "0-0"), "k"),
        (("PUBLISH", "channel", "said"), "channel"),
        (("PING",), None),
        (("SCRIPT", "LOAD", "return 1"), None),
        (("CLUSTER", "SLOTS"), None),
    ],
)
def test_the_key_of_a_command(command: tuple[object, ...], key: str | None) -> None:
    assert key_of(command) == key
