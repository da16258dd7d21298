"""The ops port: contract, sections 2 and 6. Over loopback, as the web framework is most of it."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from inference_worker.ops_server import OpsServer

pytestmark = pytest.mark.real_loop


class Worker:
    def __init__(self) -> None:
        self.conditions: dict[str, tuple[bool, str]] = {
            "rabbitmq": (True, ""),
            "redis": (True, ""),
            "model": (True, ""),
            "running": (True, ""),
        }
        self.status: dict[str, object] = {"replica_id": "replica-1", "in_flight": 2, "kind": Worker}
        self.accepted: list[str] = []
        self.token: str | None = "s3cret"
        self.told: list[str] = []

    def metrics(self, accept: str) -> tuple[bytes, str]:
        self.accepted.append(accept)
        return b"a_metric 1\n", "text/plain; version=0.0.4; charset=utf-8"

    def server(self) -> OpsServer:
        return OpsServer(
            ready=lambda: self.conditions,
            status=lambda: self.status,
            metrics=self.metrics,
            controls=self,
            token=lambda: self.token,
        )

    def pause(self) -> None:
        self.told.append("pause")

    def resume(self) -> None:
        self.told.append("resume")

    def log_level(self, level: str) -> None:
        self.told.append(level)


@asynccontextmanager
async def client_of(worker: Worker) -> AsyncGenerator[httpx.AsyncClient]:
    async with (
        worker.server().serving("127.0.0.1", 0) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False) as client,
    ):
        yield client


@pytest.mark.parametrize("path", ["/livez", "/healthz"])
async def test_a_live_worker_is_alive_whatever_its_neighbours_do(path: str) -> None:
    """An outage of the broker must not restart the fleet."""
    worker = Worker()
    worker.conditions = {name: (False, "down") for name in worker.conditions}

    async with client_of(worker) as client:
        response = await client.get(path)

    assert (response.status_code, response.json()) == (200, {"status": "alive"})


async def test_a_worker_is_ready_while_every_condition_is_met() -> None:
    async with client_of(Worker()) as client:
        response = await client.get("/readyz")

    assert response.status_code == 200
    assert response.json()["ready"] is True


@pytest.mark.parametrize("name", ["rabbitmq", "redis", "model", "running"])
async def test_a_worker_is_not_ready_while_one_condition_is_not_met_and_says_which(name: str) -> None:
    worker = Worker()
    worker.conditions[name] = (False, "HTTP 503")

    async with client_of(worker) as client:
        response = await client.get("/readyz")

    body: dict[str, Any] = response.json()
    assert response.status_code == 503
    assert body["ready"] is False
    assert body["conditions"].pop(name) == {"ok": False, "reason": "HTTP 503"}
    assert all(condition == {"ok": True, "reason": ""} for condition in body["conditions"].values())


async def test_the_metrics_come_in_the_format_asked_for() -> None:
    worker = Worker()

    async with client_of(worker) as client:
        response = await client.get("/metrics", headers={"Accept": "application/openmetrics-text"})

    assert (response.status_code, response.content) == (200, b"a_metric 1\n")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert worker.accepted == ["application/openmetrics-text"]


async def test_the_status_is_json_whatever_is_in_it() -> None:
    async with client_of(Worker()) as client:
        response = await client.get("/status")

    assert response.status_code == 200
    assert response.json() == {"replica_id": "replica-1", "in_flight": 2, "kind": str(Worker)}


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("POST", "/livez", 405)])
async def test_anything_else_is_an_error_in_json(method: str, path: str, status: int) -> None:
    async with client_of(Worker()) as client:
        response = await client.request(method, path)

    assert response.status_code == status
    assert response.json()["path"] == path
    assert response.headers["content-type"] == "application/json"
    if status == 405:
        assert response.headers["allow"] == "GET,HEAD"


async def test_a_probe_may_ask_for_the_head_alone() -> None:
    async with client_of(Worker()) as client:
        response = await client.head("/livez")

    assert (response.status_code, response.content) == (200, b"")


async def test_an_address_in_use_is_told_by_the_name_of_its_variable() -> None:
    async with Worker().server().serving("127.0.0.1", 0) as port:
        with pytest.raises(OSError, match=f"WORKER_HTTP_PORT: cannot listen on 127.0.0.1:{port}: it is in use"):
            async with Worker().server().serving("127.0.0.1", port):
                pass


async def test_a_host_that_is_not_there_is_told_by_the_name_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(self: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("aiohttp.web.TCPSite.start", start)

    with pytest.raises(OSError, match=r"WORKER_HTTP_HOST: cannot listen on nowhere:9090: .*Name or service not known"):
        async with Worker().server().serving("nowhere", 9090):
            pass


async def test_another_trouble_with_the_address_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(self: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("aiohttp.web.TCPSite.start", start)

    with pytest.raises(OSError, match=r"WORKER_HTTP_PORT: cannot listen on .*Permission denied"):
        async with Worker().server().serving("127.0.0.1", 0):
            pass


async def test_a_client_that_says_nothing_does_not_hold_up_the_others_nor_the_end() -> None:
    async with Worker().server().serving("127.0.0.1", 0) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /livez HT")
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            response = await client.get(f"http://127.0.0.1:{port}/livez")

    writer.close()
    assert response.status_code == 200


@pytest.mark.parametrize(("path", "body", "told"), [("/pause", {}, "pause"), ("/resume", {}, "resume")])
async def test_an_operator_with_the_token_pauses_and_resumes(path: str, body: dict[str, str], told: str) -> None:
    worker = Worker()
    async with client_of(worker) as client:
        response = await client.post(path, json=body, headers={"Authorization": "Bearer s3cret"})

    assert response.status_code == 200
    assert worker.told == [told]


async def test_an_operator_with_the_token_changes_the_log_level() -> None:
    worker = Worker()
    async with client_of(worker) as client:
        headers = {"Authorization": "Bearer s3cret"}
        good = await client.post("/log-level", json={"level": "debug"}, headers=headers)
        bad = await client.post("/log-level", json={"level": "loud"}, headers=headers)

    assert (good.status_code, good.json()) == (200, {"level": "debug"})
    assert worker.told == ["debug"]
    assert bad.status_code == 400
    assert "debug|info|warning|error|critical" in bad.json()["error"]


@pytest.mark.parametrize("header", [None, "Bearer wrong", "s3cret", "Bearer \u00e4"])
async def test_without_the_right_token_nothing_is_changed(header: str | None) -> None:
    worker = Worker()
    async with client_of(worker) as client:
        headers = httpx.Headers({} if header is None else {b"Authorization": header.encode()})
        answers = [await client.post(path, headers=headers) for path in ("/pause", "/resume", "/log-level")]

    assert [answer.status_code for answer in answers] == [401, 401, 401]
    assert worker.told == []


async def test_without_a_token_of_its_own_a_worker_has_no_controls() -> None:
    worker = Worker()
    worker.token = None
    async with client_of(worker) as client:
        answer = await client.post("/pause", headers={"Authorization": "Bearer x"})

    assert answer.status_code == 403
    assert "WORKER_HTTP_TOKEN" in answer.json()["error"]
    assert worker.told == []
