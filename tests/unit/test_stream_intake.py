"""How long the way into a stream is tried; what the script does is seen with a real Redis."""

import asyncio
from typing import Any

import pytest

from inference_worker.errors import StoreUnavailable
from inference_worker.job_book import JobRecord
from inference_worker.redis_scripts import ANSWER_S
from inference_worker.transports.stream_entries import StreamNames
from inference_worker.transports.stream_intake import StreamIntake


class SilentLink:
    """A Redis that takes its time and says nothing."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s
        self.asked = 0

    async def run(self, *_: Any) -> Any:
        self.asked += 1
        await asyncio.sleep(self.takes_s)
        raise StoreUnavailable("no answer in time")


@pytest.mark.parametrize(("takes_s", "asked", "within_s"), [(0.0, 5, 2.0), (ANSWER_S, 2, 2 * ANSWER_S + 0.5)])
async def test_a_redis_that_is_silent_is_a_refusal_before_the_caller_has_gone(
    takes_s: float, asked: int, within_s: float
) -> None:
    link = SilentLink(takes_s)
    names = StreamNames(stream="s", group="g", dead_letters="d")
    intake = StreamIntake(link, names, queue="s", ttl_s=60, now=lambda: 0.0)  # type: ignore[arg-type]  # A stand-in.
    one = JobRecord(job_id="a", tenant="", created_at=0.0, expires_at=60.0, fingerprint="")
    loop = asyncio.get_running_loop()
    begun = loop.time()

    with pytest.raises(StoreUnavailable):
        await intake.accept(one, lambda _: b"{}", key=None, most_waiting=0)

    assert link.asked == asked
    assert loop.time() - begun <= within_s
