"""Where a gate's number comes from: what counts as one, how old it may be, and that nobody waits for a look."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from structlog.testing import capture_logs

from inference_worker.gates.queries import PoolQueries, Query
from inference_worker.gates.sources import (
    LONGEST_ANSWER_BYTES,
    Cascade,
    Measurement,
    Missing,
    PageSum,
    PromQl,
    Reading,
    Series,
    Watch,
)
from tests.unit.prometheus_kit import URL, Neighbours, page, unix_now, vector


def promql(neighbours: Neighbours, query: Query = Query(budget="q")) -> PromQl:  # noqa: B008 - frozen
    return PromQl(neighbours.client(), URL, query, now=unix_now)


class Source:
    """One that says what it is told to."""

    def __init__(self, *says: Measurement | Missing | Exception) -> None:
        self.says = list(says)
        self.looks = 0
        self.takes_s = 0.0

    async def read(self) -> Measurement | Missing:
        self.looks += 1
        await asyncio.sleep(self.takes_s)
        said = self.says[0] if len(self.says) == 1 else self.says.pop(0)
        if isinstance(said, Exception):
            raise said
        return said


GOOD, NONE = Measurement(value=0.5), Missing(reason="gone")


# ---------------------------------------------------------------- Prometheus


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        pytest.param(lambda: vector(0.4), 0.4, id="one sample"),
        pytest.param(lambda: vector(0.4, 0.9), 0.4, id="several: the first counts"),
        pytest.param(vector, "no such series", id="none"),
        pytest.param(lambda: vector("NaN"), "the value is NaN", id="NaN"),
        pytest.param(lambda: vector("+Inf"), "the value is +Inf", id="infinite"),
        pytest.param(lambda: httpx.Response(500), "status 500", id="a failure"),
        pytest.param(lambda: httpx.Response(302, headers={"Location": "/x"}), "status 302", id="redirects"),
        pytest.param(lambda: httpx.Response(200, text="<html>"), "an answer that is no vector", id="no JSON"),
        pytest.param(
            lambda: httpx.Response(200, text='{"data":{"resultType":"matrix","result":[]}}'),
            "an answer that is no vector",
            id="a matrix",
        ),
        pytest.param(
            lambda: httpx.Response(200, json={"data": {"resultType": "scalar", "result": [unix_now(), "0.7"]}}),
            0.7,
            id="a scalar",
        ),
        pytest.param(
            lambda: httpx.Response(200, content=b" " * (LONGEST_ANSWER_BYTES + 1)),
            f"an answer of more than {LONGEST_ANSWER_BYTES} bytes",
            id="without end",
        ),
    ],
)
async def test_what_prometheus_says_is_a_number_or_missing_case_196(
    answer: Callable[[], httpx.Response], seen: float | str
) -> None:
    neighbours = Neighbours()
    neighbours.answers = {"q": answer}

    found = await promql(neighbours).read()

    assert found == (Missing(reason=seen) if isinstance(seen, str) else Measurement(value=seen))


async def test_a_prometheus_that_nobody_reaches_is_missing_case_196() -> None:
    neighbours = Neighbours()
    neighbours.answers = {"q": httpx.ConnectError("refused")}

    assert await promql(neighbours).read() == Missing(reason="ConnectError: refused")


async def test_a_prometheus_that_is_silent_is_missing() -> None:
    neighbours = Neighbours()
    neighbours.takes_s = 60.0

    assert await promql(neighbours).read() == Missing(reason="no whole answer within 10 s")


STAMPED = Query(budget="q", measured="stamp", capacity="cap")


async def test_a_sample_is_as_old_as_it_says_and_brings_its_capacity() -> None:
    neighbours = Neighbours()
    neighbours.answers = {
        "q": lambda: vector(0.4),
        "stamp": lambda: vector(unix_now() - 20),
        "cap": lambda: vector(800),
    }

    assert await promql(neighbours, STAMPED).read() == Measurement(value=0.4, age_s=20.0, capacity=800.0)


async def test_a_sample_that_is_too_old_is_missing() -> None:
    neighbours = Neighbours()
    neighbours.answers = {"q": lambda: vector(0.4), "stamp": lambda: vector(unix_now() - 61)}

    assert await promql(neighbours, STAMPED).read() == Missing(reason="the sample is 61 s old")


async def test_an_answer_from_a_cache_is_as_old_as_its_own_time() -> None:
    neighbours = Neighbours()
    neighbours.answers = {"q": lambda: vector(0.4, at=unix_now() - 100)}

    assert await promql(neighbours).read() == Missing(reason="the sample is 100 s old")


async def test_a_clock_that_is_ahead_makes_no_sample_from_the_future() -> None:
    neighbours = Neighbours()
    neighbours.answers = {"q": lambda: vector(0.4, at=unix_now() + 100)}

    assert await promql(neighbours).read() == Measurement(value=0.4)


# ---------------------------------------------------------------- the queries


def test_queries_name_their_metrics_under_both_names_case_197() -> None:
    first, second, third = PoolQueries("chat", "", 50).budgets()
    saturation = PoolQueries("chat").saturation()

    assert first.budget == (
        '1 - (sum(llm_d_epp_flow_control_queue_size{inference_pool="chat"})'
        ' or sum(inference_extension_flow_control_queue_size{inference_pool="chat"}))'
        ' / ((max(llm_d_epp_ready_endpoints{name="chat"}) or max(inference_pool_ready_pods{name="chat"})) * 50)'
    )
    assert 'avg(max by (model_server_endpoint) (llm_d_epp_per_endpoint_queue_size{name="chat"}))' in second.budget
    assert 'avg(max by (model_server_pod) (inference_pool_per_pod_queue_size{name="chat"}))' in second.budget
    assert "average_queue_size" not in second.budget  # A gauge that freezes with its last pod.
    assert 'sum(vllm:num_requests_running{inference_pool="chat"})' in third.budget
    assert saturation.budget == (
        '1 - (max(llm_d_epp_flow_control_pool_saturation{inference_pool="chat"})'
        ' or max(inference_extension_flow_control_pool_saturation{inference_pool="chat"}))'
    )
    assert saturation.capacity is None


@pytest.mark.parametrize("number", range(3))
def test_queries_join_what_several_routers_say_of_one_pool_case_205(number: int) -> None:
    """Every series stands inside an aggregation without labels, so that the sides of a division always match."""
    query = PoolQueries("chat", "", 50).budgets()[number]

    for text in filter(None, (query.budget, query.measured, query.capacity)):
        before = text.split("{")[:-1]
        assert all("sum(" in part or "max(" in part or "max by" in part or "min(" in part for part in before), text


def test_a_namespace_and_odd_names_are_quoted_case_197() -> None:
    query = PoolQueries('a"b\\c', "prod").saturation()

    assert '{inference_pool="a\\"b\\\\c",namespace="prod"}' in query.budget


@pytest.mark.parametrize(("pool", "each"), [("", 1.0), ("p", 0.0), ("p", -1.0)])
def test_a_query_without_a_pool_or_without_room_cannot_be_made_case_197(pool: str, each: float) -> None:
    with pytest.raises(ValueError, match=r"pool|max_concurrency"):
        PoolQueries(pool, "", each)


# ---------------------------------------------------------------- pages and cascades


def series(**labels: str) -> Series:
    return Series(url="http://m/metrics", metric="load", labels=labels)


@pytest.mark.parametrize(
    ("lines", "labels", "absent", "seen"),
    [
        pytest.param(["load 3"], {}, None, 3.0, id="one"),
        pytest.param(['load{e="0"} 3', 'load{e="1"} 4'], {}, None, 7.0, id="counts add up"),
        pytest.param(['load{e="0"} 3', 'load{e="1"} 4'], {"e": "1"}, None, 4.0, id="by label"),
        pytest.param(["load NaN"], {}, None, "no such series", id="NaN is nothing"),
        pytest.param(["other 1"], {}, None, "no such series", id="absent"),
        pytest.param(["other 1"], {}, 0.25, 0.25, id="absent, with a value for that"),
    ],
)
async def test_a_page_is_read_case_198(
    lines: list[str], labels: dict[str, str], absent: float | None, seen: float | str
) -> None:
    neighbours = Neighbours()
    neighbours.answers = {"metrics": lambda: page(*lines)}

    found = await PageSum(neighbours.client(), series(**labels), absent=absent).read()

    assert found == (Missing(reason=seen) if isinstance(seen, str) else Measurement(value=seen))


async def test_a_page_that_fails_is_missing_whatever_stands_for_an_absent_series_case_198() -> None:
    neighbours = Neighbours()
    neighbours.answers = {"metrics": lambda: httpx.Response(500)}

    assert await PageSum(neighbours.client(), series(), absent=1.0).read() == Missing(reason="status 500")


def test_a_cascade_needs_two_sources_case_194() -> None:
    with pytest.raises(ValueError, match="at least two"):
        Cascade([Source(GOOD)])


async def test_a_cascade_hears_the_first_that_speaks_and_says_when_that_changes_case_194() -> None:
    first, second = Source(GOOD, NONE, NONE, NONE, GOOD), Source(Measurement(value=0.2), GOOD, NONE, GOOD)
    cascade = Cascade([first, second])

    with capture_logs() as log:
        seen = [await cascade.read() for _ in range(5)]

    assert [each.source if isinstance(each, Measurement) else each.reason for each in seen] == [
        0,
        1,
        1,
        "source 1 of 2: gone; source 2 of 2: gone",
        0,
    ]
    assert [(line["before"], line["now"]) for line in log] == [(None, 0), (0, 1), (1, None), (None, 0)]


# ---------------------------------------------------------------- the watch


@asynccontextmanager
async def watching(watch: Watch) -> AsyncGenerator[None]:
    until = asyncio.Event()
    task = asyncio.create_task(watch.run(until))
    try:
        yield
    finally:
        until.set()
        await task


def watch_of(source: Source, told: list[Reading | None] | None = None, **changes: float) -> Watch:
    return Watch(source, name="g", told=(lambda _: None) if told is None else told.append, **changes)


async def test_there_is_one_look_a_refresh_however_often_a_gate_is_asked_case_184() -> None:
    source = Source(GOOD)
    watch = watch_of(source, refresh_s=5.0)
    async with watching(watch):
        await asyncio.sleep(4.9)
        for _ in range(1000):
            watch.reading()
        assert source.looks == 1
        await asyncio.sleep(0.2)
        assert source.looks == 2


async def test_a_failed_look_is_followed_by_another_one_soon_case_184() -> None:
    source = Source(NONE, NONE, GOOD)
    watch = watch_of(source, refresh_s=30.0)
    async with watching(watch):
        await asyncio.sleep(2.5)

        assert source.looks == 3
        assert watch.reading() is not None


async def test_nobody_waits_for_a_look_that_takes_long() -> None:
    source = Source(GOOD)
    watch = watch_of(source, refresh_s=5.0)
    async with watching(watch):
        await asyncio.sleep(1)
        source.takes_s = 20.0
        await asyncio.sleep(10)
        before = asyncio.get_running_loop().time()

        assert watch.reading() is not None
        assert asyncio.get_running_loop().time() == before


async def test_a_good_sample_holds_while_looks_fail_and_not_beyond_its_age() -> None:
    told: list[Reading | None] = []
    watch = watch_of(Source(GOOD, NONE), told, refresh_s=5.0, max_age_s=20.0)
    async with watching(watch):
        await asyncio.sleep(19.5)
        held = watch.reading()
        await asyncio.sleep(1.0)

        assert held is not None
        assert watch.reading() is None
        assert told[0] is not None
        assert told[1:] == [None] * len(told[1:])


async def test_a_sample_is_dated_back_by_its_age_and_a_lag_and_an_older_one_is_no_news() -> None:
    watch = watch_of(Source(Measurement(value=1, age_s=3), Measurement(value=2, age_s=30)), lag_s=2.0)
    await asyncio.sleep(100)

    await watch.look()
    await watch.look()

    assert watch.reading() == Reading(value=1, at=95.0, capacity=None, source=0)


async def test_a_fault_of_ours_in_a_source_ends_no_watch() -> None:
    source = Source(RuntimeError("boom"), GOOD)
    watch = watch_of(source)
    with capture_logs() as log:
        async with watching(watch):
            await asyncio.sleep(2)

    assert source.looks == 2
    assert log[0]["event"] == "the look of a gate failed"


async def test_a_log_line_is_written_when_sight_is_lost_or_had_again_and_not_for_each_look() -> None:
    watch = watch_of(Source(GOOD, GOOD, NONE, NONE, NONE, GOOD))

    with capture_logs() as log:
        for _ in range(6):
            await watch.look()

    assert [line["event"] for line in log] == [
        "a gate sees its number",
        "a gate cannot see its number",
        "a gate sees its number",
    ]
