"""Contract, section 2: `amqps://`, `rediss://` and `https://` with `TLS_CA_FILE`, `TLS_CERT_FILE`, `TLS_KEY_FILE`.

TLS ends in a proxy of ours (`tests/faults/tls.py`), in front of the plain servers.
"""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from ssl import TLSVersion

import pytest

from inference_worker import listener
from tests.faults.model import FakeModel
from tests.faults.sinks import BillingServer, MetricServer
from tests.faults.tls import CLIENT, STRANGER, TRUST, TlsFront
from tests.in_process import SOON_S, InProcess, request_body
from tests.integration.conftest import RunningWorker
from tests.waiting import eventually

VARIABLES = ("RABBITMQ_URL", "REDIS_URL", "MODEL_CONTAINER_URL", "METRIC_SERVER_URL", "CROESUS_HOST")


class Fronts:
    """All neighbours behind TLS, by the variable that names each."""

    def __init__(self, plain: dict[str, str], metrics: MetricServer) -> None:
        self.plain = plain
        self.metrics = metrics
        self.by_name: dict[str, TlsFront] = {}
        self._stack = AsyncExitStack()

    async def raised(
        self, *names: str, clients_prove_themselves: bool = False, newest: TLSVersion = TLSVersion.TLSv1_3
    ) -> dict[str, str]:
        """Put TLS before these; the variables for a worker: those by TLS, the others plain."""
        for name in names:
            front = TlsFront(self.plain[name], clients_prove_themselves=clients_prove_themselves, newest=newest)
            self.by_name[name] = await self._stack.enter_async_context(front)
        secure = {name: front.url for name, front in self.by_name.items()}
        return self.plain | secure | {"METRIC_SERVER_SERVICE_TOKEN": "t"}

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def fronts(rabbitmq_url: str, redis_url: str, model: FakeModel, billing: BillingServer) -> AsyncGenerator[Fronts]:
    """Before the worker in a test's parameters, so that it is closed after it."""
    async with MetricServer() as metrics:
        urls = (rabbitmq_url, redis_url, model.url, metrics.url, billing.url)
        made = Fronts(dict(zip(VARIABLES, urls, strict=True)), metrics)
        yield made
        await made.close()


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "FIRST_BACKOFF_S", 0.05)


async def answered_billed_and_reported(w: InProcess, fronts: Fronts) -> None:
    """One request through every neighbour."""
    await w.publish(request_body("r"))
    await w.disposed("ack")
    await w.at.billing.billed(1)
    await eventually(lambda: fronts.metrics.records, within=SOON_S, what="a record at the metric server")
    assert (await w.seen()).result["status"] == "completed"


async def test_every_neighbour_is_reached_over_tls(fronts: Fronts, running_worker: RunningWorker) -> None:
    """Section 2: `amqps://`, `rediss://`, `https://` (model, metric server, billing) with `TLS_CA_FILE`."""
    w = await running_worker(**await fronts.raised(*VARIABLES), **TRUST)

    await answered_billed_and_reported(w, fronts)

    assert {name: bool(front.proven) for name, front in fronts.by_name.items()} == dict.fromkeys(VARIABLES, True)
    assert {shown for front in fronts.by_name.values() for shown in front.proven} == {""}


async def test_every_neighbour_is_shown_our_certificate_where_it_asks(
    fronts: Fronts, running_worker: RunningWorker
) -> None:
    """Section 2: `TLS_CERT_FILE` and `TLS_KEY_FILE`, for all five."""
    w = await running_worker(**await fronts.raised(*VARIABLES, clients_prove_themselves=True), **CLIENT)

    await answered_billed_and_reported(w, fronts)

    assert {name: set(front.proven) for name, front in fronts.by_name.items()} == {
        name: {"replica-1"} for name in VARIABLES
    }


def waiting_for(w: InProcess, name: str) -> str:
    """Why the worker does not work with this neighbour, in its own words; empty while it has not said."""
    ready = {key: why for key, (ok, why) in w.worker.ready().items() if not ok}
    match name:
        case "RABBITMQ_URL":
            return ready.get("rabbitmq", "")
        case "REDIS_URL":
            return ready.get("redis", "")
        case "MODEL_CONTAINER_URL":
            return ready.get("model", "")
        case "METRIC_SERVER_URL":
            lines = w.lines("the metric server did not take a batch; it is dropped")
        case _:
            lines = w.lines("the billing receiver does not take events; they are kept")
    return str(lines[0]["reason"]) if lines else ""


SINKS = ("METRIC_SERVER_URL", "CROESUS_HOST")


async def told_and_alive(w: InProcess, fronts: Fronts, name: str) -> str:
    """Wait until the front has refused twice, or was refused: the worker tries on; the reason that it gives."""
    front = fronts.by_name[name]
    if name in SINKS:
        await w.consuming()
        await w.publish(request_body("r"))
        await w.disposed("ack")
    await eventually(lambda: front.refused >= 2, within=SOON_S, what=f"two tries at {name}")
    said = await eventually(lambda: waiting_for(w, name), within=SOON_S, what="a reason")
    assert not front.proven
    if name not in SINKS:
        assert not all(ok for ok, _ in w.worker.ready().values())
    return said


@pytest.mark.parametrize("name", VARIABLES)
async def test_a_neighbour_of_an_unknown_authority_is_not_believed(
    name: str, fronts: Fronts, running_worker: RunningWorker
) -> None:
    """Section 5, after the table: backoff for ever, not ready, no exit; and the reason says what is wrong."""
    w = await running_worker(ready=False, **await fronts.raised(name), TLS_CA_FILE=STRANGER)

    said = await told_and_alive(w, fronts, name)

    assert "certificate" in said.lower()
    assert "verif" in said.lower()


@pytest.mark.parametrize("newest", [TLSVersion.TLSv1_2, TLSVersion.TLSv1_3], ids=lambda version: version.name)
@pytest.mark.parametrize("name", VARIABLES)
async def test_without_the_certificate_that_a_neighbour_asks_for_it_is_tried_again(
    name: str, newest: TLSVersion, fronts: Fronts, running_worker: RunningWorker
) -> None:
    """Section 2, client certificates demanded and not there: the same as any neighbour that is not to be had."""
    env = await fronts.raised(name, clients_prove_themselves=True, newest=newest)
    w = await running_worker(ready=False, **env, **TRUST)

    said = await told_and_alive(w, fronts, name)

    assert "alert" in said.lower()
