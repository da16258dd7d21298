"""The health checker: contract, section 6, and the bug reports B92 to B96."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from structlog.testing import capture_logs

from inference_worker.health_checker import HealthChecker
from inference_worker.ports import Health

REFUSED = -1
SILENT = -2


class FakeModelServer:
    """Answers `/health` by what `says` says, and `/v1/models` with `models`."""

    def __init__(self, *says: int) -> None:
        self.says = list(says) or [200]
        """A status each look, the last one for ever."""
        self.takes_s = 0.0
        self.models: object = {"data": [{"id": "org/model"}]}
        self.models_take_s = 0.0
        self.models_status = 200
        self.looked_at: list[float] = []
        self.asked_who_at: list[float] = []
        self.requests: list[httpx.Request] = []
        self.overlapping = 0
        self._under_way = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        now = asyncio.get_running_loop().time()
        if request.url.path.endswith("/v1/models"):
            self.asked_who_at.append(now)
            await asyncio.sleep(self.models_take_s)
            return httpx.Response(self.models_status, json=self.models)
        self.looked_at.append(now)
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        self._under_way += 1
        self.overlapping = max(self.overlapping, self._under_way)
        try:
            await asyncio.sleep(1e6 if said == SILENT else self.takes_s)
        finally:
            self._under_way -= 1
        if said == REFUSED:
            raise httpx.ConnectError("connection refused")
        return httpx.Response(said, headers={"location": "http://elsewhere/health"} if said == 302 else {})


class Watched:
    """A `Health` with the history of its verdicts."""

    def __init__(self) -> None:
        self.health = Health("model")
        self.changes: list[tuple[float, bool]] = []
        self.health.watch(self._told)

    def _told(self, ok: bool, reason: str) -> None:
        self.changes.append((asyncio.get_running_loop().time(), ok))


@asynccontextmanager
async def checking(
    server: Callable[[httpx.Request], object],
    health: Health,
    *,
    interval_s: float = 10.0,
    failure_threshold: int = 3,
    api_key: Callable[[], str | None] = lambda: None,
) -> AsyncGenerator[HealthChecker]:
    checker = HealthChecker(
        health,
        base_url=lambda: "http://model:8000",
        health_path="/health",
        hf_model_id="org/model",
        api_key=api_key,
        now=lambda: 1000.0 + asyncio.get_running_loop().time(),
        interval_s=interval_s,
        failure_threshold=failure_threshold,
        verify=False,
        transport=httpx.MockTransport(server),  # type: ignore[arg-type] # it takes coroutine functions, too
    )
    until = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(checker.run(until))
        try:
            yield checker
        finally:
            until.set()


async def test_a_model_is_unhealthy_until_its_first_good_answer() -> None:
    """B95: refused, then 500, 503 and 404 while it loads, then 200 with an empty body."""
    server, watched = FakeModelServer(REFUSED, 500, 503, 404, 200), Watched()

    async with checking(server, watched.health):
        await asyncio.sleep(39)
        assert not watched.health.ok
        assert watched.health.reason == "HTTP 404"
        await asyncio.sleep(2)

    assert watched.changes == [(0, False), (40, True)]
    assert watched.health.checked_at == 1040.0


async def test_health_is_asked_at_every_interval() -> None:
    server = FakeModelServer()
    server.takes_s = 3

    async with checking(server, Watched().health):
        await asyncio.sleep(35)

    assert server.looked_at == [0, 10, 20, 30]


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(REFUSED, id="a refused connection"),
        pytest.param(500, id="an error"),
        pytest.param(404, id="a path that is not there"),
        pytest.param(302, id="a redirect, which is not followed"),
    ],
)
async def test_a_definite_no_makes_it_unhealthy_at_once(said: int) -> None:
    server, watched = FakeModelServer(200, said, 200), Watched()

    async with checking(server, watched.health):
        await asyncio.sleep(25)

    assert watched.changes == [(0, True), (10, False), (20, True)]


async def test_time_outs_count_only_in_a_row() -> None:
    """B93: busy is not dead. Two time-outs, a good answer, then three."""
    server, watched = FakeModelServer(200, SILENT, SILENT, 200, SILENT, SILENT, SILENT, 200), Watched()

    async with checking(server, watched.health):
        await asyncio.sleep(75)

    assert watched.changes == [(0, True), (65, False), (70, True)]


async def test_a_slow_but_good_answer_is_good() -> None:
    server, watched = FakeModelServer(), Watched()
    server.takes_s = 4.9

    async with checking(server, watched.health):
        await asyncio.sleep(100)

    assert watched.changes == [(4.9, True)]


async def test_a_time_out_is_as_long_as_the_interval_where_that_is_shorter() -> None:
    """B94: a poll that hangs is over in its time, and the next one does not overlap it."""
    server, watched = FakeModelServer(200, SILENT), Watched()

    async with checking(server, watched.health, interval_s=2):
        await asyncio.sleep(9)

    assert watched.changes == [(0, True), (8, False)]
    assert server.overlapping == 1
    assert watched.health.reason == "no answer within 2 s, 3 in a row"


async def test_a_time_out_is_5_s_however_long_the_interval_is() -> None:
    """Contract, section 6: "each the interval long, at most 5 s": three looks a minute apart, the last 5 s long."""
    server, watched = FakeModelServer(200, SILENT), Watched()

    async with checking(server, watched.health, interval_s=60):
        await asyncio.sleep(200)

    assert watched.changes == [(0, True), (185, False)]
    assert watched.health.reason == "no answer within 5 s, 3 in a row"


async def test_a_time_out_does_not_make_an_unhealthy_model_healthy() -> None:
    server, watched = FakeModelServer(SILENT), Watched()

    async with checking(server, watched.health):
        await asyncio.sleep(50)

    assert watched.changes == [(5, False)]
    assert not watched.health.ok


async def test_a_definite_no_begins_the_count_of_time_outs_anew() -> None:
    server, watched = FakeModelServer(200, SILENT, SILENT, 503, 200, SILENT, SILENT, 200), Watched()

    async with checking(server, watched.health):
        await asyncio.sleep(75)

    assert watched.changes == [(0, True), (30, False), (40, True)]


@pytest.mark.parametrize("definite", [503, REFUSED])
async def test_the_reason_tells_how_many_time_outs_there_were_in_a_row(definite: int) -> None:
    server, watched = FakeModelServer(200, SILENT, definite, SILENT), Watched()

    async with checking(server, watched.health):
        await asyncio.sleep(36)

    assert watched.health.reason == "no answer within 5 s, 1 in a row"


async def test_a_look_that_is_wanted_is_taken_at_once() -> None:
    server, watched = FakeModelServer(200, REFUSED), Watched()

    async with checking(server, watched.health):
        await asyncio.sleep(3)
        ok = await watched.health.check_now(5)

        assert not ok
        assert asyncio.get_running_loop().time() == 3
    assert server.looked_at == [0, 3]


async def test_a_good_answer_from_before_it_was_wanted_is_not_the_answer() -> None:
    """Somebody's connection was refused while a look was under way: the look may be older than that."""
    server, watched = FakeModelServer(200, 200, REFUSED), Watched()

    async with checking(server, watched.health):
        await asyncio.sleep(1)
        server.takes_s = 1
        await asyncio.sleep(9.5)  # In the middle of the second look.
        ok = await watched.health.check_now(5)

        assert not ok
    assert server.overlapping == 1


async def test_many_who_want_a_look_share_one() -> None:
    server, watched = FakeModelServer(), Watched()

    async with checking(server, watched.health):
        await asyncio.sleep(1)
        server.takes_s = 1
        await asyncio.gather(*(watched.health.check_now(5) for _ in range(50)))

    assert server.looked_at == [0, 1]


async def test_no_exception_ends_the_checking() -> None:
    """B125's rule for every task: also one that nobody thought of."""
    watched = Watched()
    failures: list[Exception | None] = [
        OSError("a cable"),
        httpx.RemoteProtocolError("garbage"),
        None,
        ValueError("a bug"),
        None,
    ]

    def server(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health" and (failure := failures.pop(0)) is not None:
            raise failure
        return httpx.Response(200, json={"data": []})

    async with checking(server, watched.health):
        await asyncio.sleep(41)

    assert watched.changes == [(0, False), (20, True), (30, False), (40, True)]


async def test_a_watcher_that_fails_does_not_end_the_checking() -> None:
    server, watched = FakeModelServer(200, 500, 200), Watched()

    def broken(ok: bool, reason: str) -> None:
        raise RuntimeError("a bug in a watcher")

    watched.health.watch(broken)

    async with checking(server, watched.health):
        await asyncio.sleep(25)

    assert watched.changes == [(0, True), (10, False), (20, True)]


async def test_a_stop_does_not_wait_for_a_look() -> None:
    async with checking(FakeModelServer(SILENT), Watched().health):
        await asyncio.sleep(2)

    assert asyncio.get_running_loop().time() == 2


async def test_each_change_of_verdict_is_one_line() -> None:
    server = FakeModelServer(503, 503, 200, 200, 500, 500)

    with capture_logs() as lines:
        async with checking(server, Watched().health):
            await asyncio.sleep(55)

    assert [(line["log_level"], line["event"]) for line in lines] == [
        ("warning", "the model is not healthy"),
        ("info", "the model is healthy"),
        ("warning", "the model is not healthy"),
    ]


async def test_the_key_is_sent_as_a_bearer_token_and_read_each_time() -> None:
    keys = ["first", "second"]
    server = FakeModelServer(503)

    async with checking(server, Watched().health, api_key=lambda: keys.pop(0)):
        await asyncio.sleep(15)

    assert [request.headers["authorization"] for request in server.requests] == ["Bearer first", "Bearer second"]


async def test_without_a_key_none_is_sent() -> None:
    server = FakeModelServer(503)

    async with checking(server, Watched().health):
        await asyncio.sleep(1)

    assert "authorization" not in server.requests[0].headers
    assert str(server.requests[0].url) == "http://model:8000/health"


class TestWhoTheModelIs:
    """Before it consumes, the worker asks the model who it is, and warns when that is not HF_MODEL_ID."""

    async def warnings(self, server: FakeModelServer, for_s: float = 1.0) -> list[object]:
        with capture_logs() as lines:
            async with checking(server, Watched().health):
                await asyncio.sleep(for_s)
        return [line["served"] for line in lines if line["event"].startswith("the model serves something else")]

    @pytest.mark.parametrize(
        ("models", "warned"),
        [
            pytest.param([{"id": "org/model"}], [], id="the expected one"),
            pytest.param([{"id": "alias", "root": "org/model"}], [], id="the expected one under another name"),
            pytest.param([{"id": "a"}, {"id": "org/model"}], [], id="the expected one among others"),
            pytest.param([{"id": "other", "root": None}], [["other"]], id="another one"),
            pytest.param([], [[]], id="none at all"),
        ],
    )
    async def test_a_warning_tells_of_another_model(self, models: object, warned: object) -> None:
        server = FakeModelServer()
        server.models = {"data": models}

        assert await self.warnings(server) == warned

    async def test_it_is_asked_before_the_first_good_verdict(self) -> None:
        server, watched = FakeModelServer(503, 200), Watched()
        server.models_take_s = 2

        async with checking(server, watched.health):
            await asyncio.sleep(30)

        assert server.asked_who_at == [10]
        assert watched.changes == [(0, False), (12, True)]

    async def test_a_model_that_does_not_say_holds_nothing_up_for_more_than_5_s(self) -> None:
        server, watched = FakeModelServer(), Watched()
        server.models_take_s = 1000

        async with checking(server, watched.health):
            await asyncio.sleep(6)

        assert watched.changes == [(5, True)]

    @pytest.mark.parametrize(
        ("status", "models"),
        [
            pytest.param(404, {}, id="a server without the list"),
            pytest.param(200, {"models": []}, id="another list"),
            pytest.param(200, {"data": [{"id": "x" * 2_000_000}]}, id="a list without an end"),
        ],
    )
    async def test_what_cannot_be_read_is_no_reason_to_warn(self, status: int, models: object) -> None:
        server = FakeModelServer()
        server.models_status, server.models = status, models

        assert await self.warnings(server) == []

    async def test_it_is_asked_again_after_each_recovery_and_warned_once_per_change(self) -> None:
        server = FakeModelServer(200, 503, 200, 503, 200)
        server.models = {"data": [{"id": "other"}]}

        assert await self.warnings(server, for_s=45) == [["other"]]
        assert server.asked_who_at == [0, 20, 40]

    async def test_a_wrong_model_that_comes_back_is_another_warning(self) -> None:
        server = FakeModelServer(200, 503, 200, 503, 200)
        server.models = {"data": [{"id": "other"}]}

        async def exchange() -> None:
            await asyncio.sleep(15)
            server.models = {"data": [{"id": "org/model"}]}
            await asyncio.sleep(20)
            server.models = {"data": [{"id": "other"}]}

        exchanged = asyncio.create_task(exchange())
        assert await self.warnings(server, for_s=45) == [["other"], ["other"]]
        await exchanged

    async def test_another_wrong_model_is_another_warning(self) -> None:
        server = FakeModelServer(200, 503, 200)
        server.models = {"data": [{"id": "other"}]}

        async def exchange() -> None:
            await asyncio.sleep(15)
            server.models = {"data": [{"id": "third"}]}

        exchanged = asyncio.create_task(exchange())
        assert await self.warnings(server, for_s=25) == [["other"], ["third"]]
        await exchanged
