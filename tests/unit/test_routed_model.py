"""One client for each gateway; sockets are in the tests of the client itself."""

import asyncio
from dataclasses import dataclass

import pytest

from inference_worker.errors import ModelGone
from inference_worker.gates.aimd import HEADROOM_HEADER, QUEUE_MS_HEADER
from inference_worker.gates.feedback import REASON_HEADER
from inference_worker.model_client import KEPT_HEADERS
from inference_worker.ports import Answer, ModelClient
from inference_worker.routed_model import RoutedModel
from tests.unit.worker_kit import FakeModel


@dataclass
class Gateway(FakeModel):
    host: str = ""
    closed_at_the_end: bool = False
    fails_to_close: bool = False
    warmed_at: float = -1.0

    async def close(self) -> None:
        self.closed_at_the_end = True
        if self.fails_to_close:
            raise OSError("it does not close")

    async def warm(self, connections: int) -> None:
        await asyncio.sleep(1.0)
        self.warmed = connections
        self.warmed_at = asyncio.get_running_loop().time()


class Gateways:
    def __init__(self, takes_s: float = 0.0) -> None:
        self.made: list[Gateway] = []
        self.takes_s = takes_s

    def open(self, host: str) -> Gateway:
        self.made.append(Gateway(host=host, takes_s=self.takes_s))
        return self.made[-1]


async def infer(model: ModelClient, base_url: str | None) -> Answer:
    return await model.infer(
        endpoint="/v1/x",
        payload=b'{ "a" : 1 }',
        stream=False,
        request_id="a",
        timeout_s=7.0,
        headers={"X-Mine": "1"},
        base_url=base_url,
    )


async def test_a_call_goes_to_the_gateway_of_its_base_url_as_it_is() -> None:
    gateways = Gateways()
    async with RoutedModel(["http://one", "http://two"], gateways.open) as model:
        await infer(model, "http://two")

    one, two = gateways.made
    assert (one.calls, two.calls) == ([], ["a"])
    assert (two.payloads, two.headers, two.timeouts_s) == ([b'{ "a" : 1 }'], [{"X-Mine": "1"}], [7.0])
    assert two.targets == [(None, "/v1/x")]


async def test_there_is_one_client_for_each_host_however_many_queues_go_there() -> None:
    gateways = Gateways()
    urls = ["http://one/a", "http://one/b", "http://one/a", "https://one", "http://one:8080"]
    async with RoutedModel(urls, gateways.open) as model:
        for url in urls:
            await infer(model, url)

    assert [gateway.host for gateway in gateways.made] == ["http://one", "https://one", "http://one:8080"]
    assert [len(gateway.calls) for gateway in gateways.made] == [3, 1, 1]


@pytest.mark.parametrize("base_url", ["http://three", None])
async def test_a_gateway_that_is_not_configured_is_gone_and_nothing_is_opened(base_url: str | None) -> None:
    gateways = Gateways()
    async with RoutedModel(["http://one"], gateways.open) as model:
        with pytest.raises(ModelGone, match="no gateway"):
            await infer(model, base_url)

    assert len(gateways.made) == 1


async def test_all_are_closed_at_the_end_also_where_one_fails_to() -> None:
    gateways = Gateways()
    model = RoutedModel(["http://one", "http://two", "http://three"], gateways.open)
    gateways.made[1].fails_to_close = True

    with pytest.raises(OSError, match="does not close"):
        await model.close()

    assert all(gateway.closed_at_the_end for gateway in gateways.made)


async def test_a_call_that_is_cancelled_closes_the_call_of_its_gateway() -> None:
    gateways = Gateways(takes_s=60.0)
    async with RoutedModel(["http://one"], gateways.open) as model:
        call = asyncio.create_task(infer(model, "http://one"))
        await asyncio.sleep(1.0)
        call.cancel()
        await asyncio.wait([call])

    assert gateways.made[0].closed == ["a"]


@pytest.mark.parametrize(("connections", "each"), [(8, 4), (1, 1)])
async def test_connections_ahead_are_shared_out_and_opened_at_once(connections: int, each: int) -> None:
    gateways = Gateways()
    async with RoutedModel(["http://one", "http://two"], gateways.open) as model:
        await model.warm(connections)

    assert [(gateway.warmed, gateway.warmed_at) for gateway in gateways.made] == [(each, 1.0)] * 2


async def test_without_gateways_there_is_nothing_to_warm() -> None:
    await RoutedModel([], Gateways().open).warm(4)


def test_a_client_keeps_the_headers_that_gates_learn_from() -> None:
    assert {REASON_HEADER, HEADROOM_HEADER, QUEUE_MS_HEADER} == set(KEPT_HEADERS)


async def test_a_gateway_is_named_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    """In logs, at /status, and in what a request is told."""
    gateways = Gateways()
    async with RoutedModel(["http://user:secret@one"], gateways.open) as model:
        gateways.made[0].failures.append(ModelGone("no connection"))
        with pytest.raises(ModelGone):
            await infer(model, "http://user:secret@one")
        said = f"{model.gateways} {model.unreached} {capsys.readouterr().out}"
        with pytest.raises(ModelGone) as raised:
            await infer(model, "http://user:secret@another")

    assert said.count("http://***@one") == 3
    assert "secret" not in said + str(raised.value)


async def test_gateways_are_called_from_when_they_are_opened_and_the_others_keep_their_connections() -> None:
    gateways = Gateways()
    async with RoutedModel(["http://one"], gateways.open) as model:
        model.open(["http://one/base", "http://two"])
        await infer(model, "http://one/base")
        await infer(model, "http://two")

    assert [gateway.host for gateway in gateways.made] == ["http://one", "http://two"]
    assert [len(gateway.calls) for gateway in gateways.made] == [1, 1]


async def test_a_gateway_that_nobody_names_any_more_is_closed_and_not_called() -> None:
    gateways = Gateways()
    async with RoutedModel(["http://one/a", "http://one/b", "http://two"], gateways.open) as model:
        one, two = gateways.made

        await model.keep(["http://one/b"])

        assert (one.closed_at_the_end, two.closed_at_the_end) == (False, True)
        await infer(model, "http://one/b")
        for gone in ("http://one/a", "http://two"):
            with pytest.raises(ModelGone):
                await infer(model, gone)
        model.open(["http://two"])
        await infer(model, "http://two")
    assert [gateway.host for gateway in gateways.made] == ["http://one", "http://two", "http://two"]


async def test_all_gateways_that_nobody_names_are_closed_where_one_of_them_fails_to() -> None:
    gateways = Gateways()
    model = RoutedModel(["http://one", "http://two", "http://three"], gateways.open)
    gateways.made[1].fails_to_close = True

    with pytest.raises(OSError, match="it does not close"):
        await model.keep([])

    assert all(gateway.closed_at_the_end for gateway in gateways.made)
