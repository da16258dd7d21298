"""The gate by itself: no process, no clock."""

import httpx
import pytest
from iw_business_hours import BusinessHours, business_hours

from inference_worker.extensions import GateParts
from inference_worker.gates.basic import Constant
from inference_worker.gates.parameters import Parameters
from inference_worker.ports import Admitted, Asked, Parked
from inference_worker.redis_scripts import RedisLink

ASKED = Asked(request_id="a", metadata={}, labels={}, deadline=9e9)


def no_redis(_: str) -> RedisLink:
    raise AssertionError("this gate asks nobody")


def gate(hour: float, **parameters: object) -> tuple[BusinessHours, list[str]]:
    problems: list[str] = []
    made = business_hours(
        GateParts(
            given=Parameters(parameters, "gate_params", problems),
            stands_at="pool",
            name="p",
            pool="p",
            now=lambda: hour * 3600,
            clock=lambda: 0.0,
            chance=lambda: 0.0,
            holder="h",
            link_to=no_redis,
            client=httpx.AsyncClient(),
            prometheus_url="",
            build=lambda _: Constant(),
        )
    )
    return made, problems


@pytest.mark.parametrize(
    ("hour", "shut_for_h"),
    [
        pytest.param(21.5, 0.5, id="half an hour before it opens"),
        pytest.param(22, 0, id="when it opens"),
        pytest.param(24 + 3, 0, id="after midnight"),
        pytest.param(6, 16, id="when it closes"),
    ],
)
async def test_what_comes_too_early_waits_until_it_opens(hour: float, shut_for_h: float) -> None:
    night, problems = gate(hour, opens=22, closes=6)

    verdict = await night.admit(ASKED)

    assert problems == []
    assert verdict == (Parked(within_s=shut_for_h * 3600) if shut_for_h else Admitted())
    assert (night.budget() > 0) == isinstance(verdict, Admitted)


def test_hours_that_are_none_are_a_problem() -> None:
    assert [line.partition(":")[0] for line in gate(0, opens=25, closes=6)[1]] == ["gate_params.opens"]
    assert gate(0, opens=5, closes=5)[1] == ["gate_params.closes: is 5; accepted: another hour than opens"]
