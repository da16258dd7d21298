"""Dead letters over HTTP: the gateway's routes on an embedded queue, and the `dlq` command's way to them."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from inference_worker import dlq_command
from inference_worker.config.settings import load
from inference_worker.disposition import Token
from inference_worker.dlq import Store
from inference_worker.dlq_command import DlqOptions, run_dlq
from inference_worker.dlq_reach import AnyLetters, reach_of
from inference_worker.dlq_remote import RemoteDeadLetters
from inference_worker.errors import ConfigurationError, StoreUnavailable, TransportLost
from inference_worker.gateway import dead_letters
from inference_worker.gateway.bodies import Bodies
from inference_worker.gateway.problems import Refusal, answer
from inference_worker.ports import Answer
from inference_worker.rmq_dead_letters import NoDeadLetterQueue
from tests.store_contract import reply
from tests.unit.worker_kit import FakeModel, Site, Worker, body, now, running


class Desk:
    """A queue with dead letters, and the routes before it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.refuses: Exception | None = None
        self.held = asyncio.Event()
        self.held.set()
        """Cleared, it makes a session take its time."""
        self.operator = True
        real = reach_of(load({}, needs="dev"), now, broker=site.broker, store=site.store)

        @asynccontextmanager
        async def reach() -> AsyncGenerator[tuple[AnyLetters, Store], None]:
            if self.refuses is not None:
                raise self.refuses
            await self.held.wait()
            async with real() as found:
                yield found

        def permit(_: Request) -> None:
            if not self.operator:
                raise Refusal(403, "operators_only", "no")

        web = FastAPI()

        @web.exception_handler(Refusal)
        async def refused(request: Request, exc: Refusal) -> Response:
            return answer(request.url.path, exc)

        dead_letters.routes(web, reach, permit, Bodies(), queue=site.broker.queue, now=now, stop=asyncio.Event())
        self.transport = httpx.ASGITransport(web)
        self.http = httpx.AsyncClient(transport=self.transport, base_url="http://gateway")

    async def get(self, path: str = "", **params: Any) -> httpx.Response:
        return await self.http.get(f"/v1/dead-letters{path}", params=params)

    async def post(self, what: str, **meant: Any) -> httpx.Response:
        return await self.http.post(f"/v1/dead-letters/{what}", json=meant)

    async def die(self, *ids: str) -> None:
        """Requests whose model has no room, until their retries are used up."""
        model = FakeModel(answer=Answer(status_code=503, reason="Busy", body=b"{}"))
        worker = Worker(self.site, model, retry_statuses=frozenset({503}), max_retries=0)
        async with running(worker):
            await self.site.publish(*(body(one) for one in ids))
            async with asyncio.timeout(60):
                while len(self.site.broker.dead) < len(ids):
                    await asyncio.sleep(0.1)

    @property
    def queued(self) -> list[str]:
        return [json.loads(message.body)["request_id"] for message in self.site.broker.ready]

    @property
    def dead(self) -> list[str]:
        return [json.loads(letter.body)["request_id"] for letter in self.site.broker.dead]


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    made = Desk(Site())
    async with made.http:
        yield made


def ids_of(answered: httpx.Response, of: str = "dead_letters") -> list[str]:
    assert answered.status_code == 200, answered.text
    return [one["request_id"] for one in answered.json()[of]]


async def test_dead_letters_are_listed_with_why_and_when(desk: Desk) -> None:
    await desk.die("a", "b")

    listed = await desk.get()

    assert ids_of(listed) == ["a", "b"]
    first = listed.json()["dead_letters"][0]
    assert (first["reason"], first["attempts"], first["result"]) == ("retries_exhausted", 1, "failed")
    assert first["died_at"] == pytest.approx(now(), abs=60)
    assert (listed.json()["looked_at"], listed.json()["more"]) == (2, False)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"id": "b"}, ["b"]),
        ({"id": ["a", "c"]}, ["a", "c"]),
        ({"reason": "poison"}, []),
        ({"limit": "2"}, ["a", "b"]),
        ({"older_than_s": "3600"}, []),
        ({"newer_than_s": "3600"}, ["a", "b", "c"]),
        ({"completed": "true"}, []),
    ],
)
async def test_a_query_chooses(desk: Desk, query: dict[str, Any], found: list[str]) -> None:
    await desk.die("a", "b", "c")

    assert ids_of(await desk.get(**query)) == found


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "0"},
        {"limit": "1001"},
        {"limit": "x"},
        {"older_than_s": "-1"},
        {"newer_than_s": "nan"},
        {"completed": "1"},
        {"all": "maybe"},
    ],
)
async def test_a_query_that_cannot_be_meant_is_refused(desk: Desk, query: dict[str, str]) -> None:
    assert (await desk.get(**query)).status_code == 422


async def test_one_is_shown_with_its_body(desk: Desk) -> None:
    await desk.die("a", "b")

    shown = await desk.get("/b")

    (letter,) = shown.json()["dead_letters"]
    assert json.loads(letter["body"])["request_id"] == "b"
    assert letter["body_cut"] is False
    assert (await desk.get("/nobody")).status_code == 404


async def test_a_replay_puts_back_what_is_meant(desk: Desk) -> None:
    await desk.die("a", "b", "c")

    done = await desk.post("replay", ids=["a", "c"])

    assert done.json()["outcomes"] == {"replayed": 2}
    assert (desk.queued, desk.dead) == (["a", "c"], ["b"])
    assert await desk.site.store.read("a") is None
    async with running(Worker(desk.site, FakeModel())):
        await asyncio.sleep(1)
    assert (await desk.site.result("a") or {})["status"] == "completed"


async def test_a_replay_that_is_only_tried_does_nothing(desk: Desk) -> None:
    await desk.die("a")

    done = await desk.post("replay", everything=True, dry_run=True)

    assert done.json()["outcomes"] == {"would replay": 1}
    assert (desk.queued, desk.dead) == ([], ["a"])


async def test_what_is_done_or_runs_is_not_replayed(desk: Desk) -> None:
    await desk.die("done", "runs")
    for one in ("done", "runs"):
        await desk.site.store.make_room(one, now() + 60)
    await desk.site.store.write(reply("done"), None, Token("t"))
    await desk.site.store.claim("runs", 0, Token("t"), now() + 60)

    done = await desk.post("replay", everything=True)

    assert done.json()["outcomes"] == {"completed": 1, "running": 1}
    assert (desk.queued, desk.dead) == ([], ["done", "runs"])


async def test_a_purge_removes_what_was_marked_and_nothing_that_came_meanwhile(desk: Desk) -> None:
    await desk.die("a", "b")
    tried = await desk.post("purge", reason="retries_exhausted", dry_run=True)
    marks = [one["mark"] for one in tried.json()["letters"]]
    assert desk.dead == ["a", "b"]
    await desk.site.publish(b"not json")
    async with running(Worker(desk.site, FakeModel())):
        await asyncio.sleep(1)

    done = await desk.post("purge", marks=marks)

    assert done.json()["outcomes"] == {"purged": 2}
    assert [letter.body for letter in desk.site.broker.dead] == [b"not json"]


@pytest.mark.parametrize("what", ["replay", "purge"])
@pytest.mark.parametrize(
    "meant",
    [
        pytest.param({}, id="nothing is chosen"),
        pytest.param({"everything": False}, id="nothing at all is chosen"),
        pytest.param({"ids": "a"}, id="a text for a list"),
        pytest.param({"everything": True, "limit": 0}, id="no letter"),
        pytest.param({"everything": True, "surprise": 1}, id="a field that is not known"),
    ],
)
async def test_a_choice_that_cannot_be_meant_does_nothing(desk: Desk, what: str, meant: dict[str, Any]) -> None:
    await desk.die("a")

    assert (await desk.post(what, **meant)).status_code == 422
    assert (desk.queued, desk.dead) == ([], ["a"])


async def test_only_operators_work_with_dead_letters(desk: Desk) -> None:
    await desk.die("a")
    desk.operator = False

    codes = {
        (await desk.get()).status_code,
        (await desk.get("/a")).status_code,
        (await desk.post("replay", everything=True)).status_code,
        (await desk.post("purge", everything=True)).status_code,
    }

    assert codes == {403}
    assert desk.dead == ["a"]


async def test_one_look_at_a_time(desk: Desk) -> None:
    """Over RabbitMQ a look holds what it looks at."""
    desk.held.clear()
    first = asyncio.create_task(desk.get())
    await asyncio.sleep(0.1)

    second = await desk.get()
    desk.held.set()

    assert (second.status_code, second.json()["code"]) == (503, "busy")
    assert (await first).status_code == 200
    assert (await desk.get()).status_code == 200


@pytest.mark.parametrize(
    ("fault", "status"),
    [(TransportLost("cut"), 503), (NoDeadLetterQueue("there is none"), 409)],
    ids=["the broker is away", "the queue does not exist"],
)
async def test_a_queue_that_cannot_be_looked_at_is_said_so(desk: Desk, fault: Exception, status: int) -> None:
    desk.refuses = fault

    assert (await desk.get()).status_code == status
    desk.refuses = None
    assert (await desk.get()).status_code == 200


# ---------------------------------------------------------------- the command


@pytest.fixture
def command(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """`dlq --url` reaches this desk."""

    @asynccontextmanager
    async def remote(url: str, api_key: str | None, verify: object) -> AsyncGenerator[RemoteDeadLetters, None]:
        yield RemoteDeadLetters(desk.http, url)

    monkeypatch.setattr(dlq_command, "remote", remote)
    return desk


async def run(do: Any, **options: Any) -> int:
    settings = load({"GATEWAY_API_KEY": "k"}, needs="dev")
    asked = DlqOptions(do=do, url="http://gateway/v1/jobs", **({"rate": 0.0} | options))
    return await run_dlq(settings, asked, now, asyncio.Event())


def printed(capfdbinary: pytest.CaptureFixture[bytes]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]


async def test_the_command_lists_and_shows_over_http(command: Desk, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    await command.die("a", "b")
    capfdbinary.readouterr()

    assert await run("list", json=True) == 0
    assert [one["request_id"] for one in printed(capfdbinary)] == ["a", "b"]
    assert await run("list") == 0
    assert "2 of 2 dead letters in http://gateway/v1/jobs" in capfdbinary.readouterr().out.decode()
    assert await run("show", ids=frozenset({"b"}), json=True) == 0
    (shown,) = printed(capfdbinary)
    assert json.loads(shown["body"])["request_id"] == "b"
    assert await run("show", ids=frozenset({"nobody"})) == 1


@pytest.mark.parametrize("rate", [0.0, 2.0])
async def test_the_command_replays_in_steps_and_asks_for_nothing_twice(
    command: Desk, rate: float, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """A letter that is refused stays where it is, in front of those that are not."""
    await command.die(*(f"r-{n}" for n in range(5)))
    await command.site.store.make_room("r-0", now() + 60)
    await command.site.store.write(reply("r-0"), None, Token("t"))
    capfdbinary.readouterr()
    begun = asyncio.get_running_loop().time()

    assert await run("replay", everything=True, rate=rate, json=True) == 1

    assert printed(capfdbinary)[-1]["outcomes"] == {"completed": 1, "replayed": 4}
    assert (command.queued, command.dead) == ([f"r-{n}" for n in range(1, 5)], ["r-0"])
    assert (asyncio.get_running_loop().time() - begun >= 1.5) == (rate > 0)


async def test_the_command_replays_no_more_than_its_limit(command: Desk) -> None:
    await command.die("a", "b", "c")

    assert await run("replay", everything=True, limit=2) == 0

    assert command.dead == ["c"]


async def test_the_command_purges_once_it_is_meant(command: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    await command.die("a", "b")
    with pytest.raises(ConfigurationError, match="nobody can be asked"):
        await run("purge", everything=True)
    assert await run("purge", everything=True, dry_run=True) == 0
    assert command.dead == ["a", "b"]

    assert await run("purge", ids=frozenset({"a"}), yes=True) == 0

    assert command.dead == ["b"]


async def test_a_gateway_that_refuses_is_said_so(command: Desk, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    command.operator = False

    assert await run("list") == 1

    assert "HTTP 403" in capfdbinary.readouterr().err.decode()


async def test_what_is_no_gateway_is_said_so() -> None:
    page = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>"))
    async with httpx.AsyncClient(transport=page) as client:
        with pytest.raises(StoreUnavailable, match="is this a gateway"):
            await RemoteDeadLetters(client, "http://elsewhere").show("a")
