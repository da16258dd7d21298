"""What the `dlq` command prints for people, of letters in which anybody may have written anything."""

import asyncio

import pytest

from inference_worker.dlq import Dead, Walk
from inference_worker.dlq_saying import Saying

STEERING = "\x1b]0;mine\x07 a\u2028b\x9b31m"
ESCAPED = r"\x1b]0;mine\x07 a\u2028b\x9b31m"


def saying() -> Saying:
    return Saying("dead", asyncio.Event(), as_json=False, with_queue=True)


async def test_nothing_in_a_letter_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    said = saying()
    said.found(Dead(request_id=STEERING, queue="q", reason="poison"))
    said.listed(Walk(looked_at=1, matched=1))
    said.show({"reason": STEERING, "headers": "x"}, f"{{\n{STEERING}}}")
    said.say(STEERING, "left", STEERING)

    printed = capsys.readouterr().out

    assert printed.count(ESCAPED) == 5
    assert "{\n" + ESCAPED in printed
    assert not any(steers in printed for steers in "\x1b\x07\u2028\x9b")


@pytest.mark.parametrize("time", [1.7e12, 1e300, -1e300])
async def test_a_letter_with_a_time_that_is_none_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str], time: float
) -> None:
    said = saying()
    said.found(Dead(request_id="odd", queue="q", reason="poison", died_at=time))
    said.found(Dead(request_id="good", queue="q", reason="poison", died_at=0.0))
    said.listed(Walk(looked_at=2, matched=2))
    said.show({"received_at": time}, "")

    printed = capsys.readouterr().out

    assert "1970-01-01 00:00:00Z" in printed
    assert printed.count(f"{time:g} Unix s") == 2
