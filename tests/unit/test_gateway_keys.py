"""Who may come in, and that a tenant sees nothing of another."""

import asyncio
import errno
import hashlib
import json
import os
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from structlog.testing import capture_logs

from inference_worker.errors import ConfigurationError, TransportLost
from inference_worker.gateway.bodies import Bodies
from inference_worker.gateway.edge import permit_operators, tenant_of
from inference_worker.gateway.keys import MOST_BYTES, KeyFile, new_key
from inference_worker.gateway.webhook_signing import secret_problem
from inference_worker.job_book import JobBook, JobRecord
from inference_worker.messages import decode
from tests.unit.gateway_kit import CHAT, Intake, Site, is_openai_error, is_problem, opened, said

ACME, RIVAL, OPERATOR = "acme-key", "rival-key", "operator-key"
SECRET = "whsec_" + "A" * 44


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def keys_file(folder: Path, content: object = None) -> Path:
    path = folder / "keys.json"
    if content is None:
        content = {
            "keys": [
                {"tenant": "acme", "sha256": digest(ACME)},
                {"tenant": "rival", "sha256": digest(RIVAL)},
                {"tenant": "ops", "sha256": digest(OPERATOR).upper(), "operator": True},
            ],
            "webhook_secrets": {"acme": SECRET},
        }
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# ---------------------------------------------------------------- the door


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({}, id="no key"),
        pytest.param(bearer("guessed"), id="a key that is not known"),
        pytest.param(bearer(digest(ACME)), id="the digest that stands in the file"),
        pytest.param({"Authorization": "Basic YTpi"}, id="another scheme"),
        pytest.param({"Authorization": "Bearer "}, id="a scheme alone"),
        pytest.param({"X-API-Key": ""}, id="an empty header"),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/jobs"), ("GET", "/v1/jobs"), ("GET", "/v1/jobs/x"), ("DELETE", "/v1/jobs/x"), ("GET", "/nothing")],
)
async def test_nobody_comes_in_without_a_key(
    tmp_path: Path, headers: Mapping[str, str], method: str, path: str
) -> None:
    async with opened(Intake(keys=KeyFile(str(keys_file(tmp_path))))) as intake:
        intake.store.away = "must not be asked"

        refused = await intake.http.request(method, path, headers=dict(headers))

    assert is_problem(refused, 401)["code"] == "unauthorized"
    assert refused.headers["www-authenticate"].startswith("Bearer")


async def test_a_refusal_on_an_openai_path_has_its_shape(tmp_path: Path) -> None:
    async with opened(Intake(keys=KeyFile(str(keys_file(tmp_path))))) as intake:
        refused = await intake.chat()

    assert is_openai_error(refused, 401)["code"] == "unauthorized"
    assert intake.count("jobs_refused_total", reason="unauthorized") == 1


@pytest.mark.parametrize("headers", [bearer(ACME), {"Authorization": f"bearer  {ACME}"}, {"X-API-Key": ACME}])
async def test_a_key_lets_in_and_its_tenant_is_billed(tmp_path: Path, headers: dict[str, str]) -> None:
    async with opened(Intake(keys=KeyFile(str(keys_file(tmp_path))))) as intake:
        answer = await intake.post({"payload": CHAT}, headers)

    assert answer.status_code == 202
    request = decode(intake.queue.bodies[0], message_id=None, infer_path="/x", now=intake.now())
    assert request.tenant == "acme"


@pytest.mark.parametrize("path", ["/livez", "/healthz", "/readyz", "/metrics", "/openapi.json", "/"])
async def test_probes_and_the_document_need_no_key(tmp_path: Path, path: str) -> None:
    async with opened(Intake(keys=KeyFile(str(keys_file(tmp_path))))) as intake:
        assert (await intake.http.get(path)).status_code in (200, 503)


async def test_the_document_says_that_a_key_is_needed(tmp_path: Path) -> None:
    async with opened(Intake(keys=KeyFile(str(keys_file(tmp_path))))) as intake:
        described = said(await intake.http.get("/openapi.json"))

    assert described["security"] == [{"bearer": []}, {"apiKey": []}]


# ---------------------------------------------------------------- tenants


class Counted:
    """A book that writes down what it is asked."""

    def __init__(self, real: JobBook) -> None:
        self.real = real
        self.asked: list[str] = []

    async def find(self, job_id: str, tenant: str | None = None) -> JobRecord | None:
        self.asked.append("find")
        return await self.real.find(job_id, tenant)


@pytest.mark.parametrize("ended", [False, True], ids=["a job that waits", "a job that has ended"])
@pytest.mark.parametrize(
    ("method", "query"),
    [("GET", ""), ("GET", "?wait=30"), ("DELETE", "")],
    ids=["looking", "waiting", "cancelling"],
)
async def test_a_job_of_another_tenant_is_exactly_one_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, query: str, ended: bool
) -> None:
    """The same words, and the same steps, so that their time tells nothing either."""
    async with opened(Intake(keys=KeyFile(str(keys_file(tmp_path))))) as intake:
        job_id = said(await intake.post({"payload": CHAT}, bearer(ACME)))["job_id"]
        if ended:
            await intake.end(job_id)
        answers: list[httpx.Response] = []
        steps: list[list[str]] = []
        for asked in (job_id, "job-99"):
            counted = Counted(intake.book)
            monkeypatch.setattr(intake.jobs, "_book", counted)
            monkeypatch.setattr(intake.jobs, "_store", None)  # Must not be asked.
            url = f"/v1/jobs/{asked}{query}"
            answers.append(await intake.http.request(method, url, headers={**bearer(RIVAL), "X-Request-Id": "r"}))
            monkeypatch.setattr(intake.jobs, "_store", intake.store)
            steps.append(counted.asked)

        assert answers[0].status_code == answers[1].status_code == 404
        assert answers[0].content == answers[1].content
        assert answers[0].headers == answers[1].headers
        assert steps == [["find"], ["find"]]
        monkeypatch.setattr(intake.jobs, "_book", intake.book)
        mine = await intake.http.get(f"/v1/jobs/{job_id}", headers=bearer(ACME))
        assert said(mine)["status"] == ("succeeded" if ended else "queued")


async def test_a_tenant_lists_its_own_jobs_alone_also_with_the_cursor_of_another(tmp_path: Path) -> None:
    async with opened(Intake(keys=KeyFile(str(keys_file(tmp_path))))) as intake:
        for key in (ACME, RIVAL, ACME, RIVAL):
            await intake.post({"payload": CHAT}, bearer(key))
        page = said(await intake.http.get("/v1/jobs?limit=1", headers=bearer(ACME)))
        after = {"after": page["after"]}

        others = said(await intake.http.get("/v1/jobs", headers=bearer(RIVAL), params=after))

    assert {job["job_id"] for job in others["jobs"]} <= {"job-2", "job-4"}
    assert [job["job_id"] for job in page["jobs"]] == ["job-3"]


async def test_the_same_key_of_two_tenants_is_two_jobs(tmp_path: Path) -> None:
    async with opened(Intake(keys=KeyFile(str(keys_file(tmp_path))))) as intake:
        mine = await intake.post({"payload": CHAT, "idempotency_key": "k"}, bearer(ACME))
        others = await intake.post({"payload": {"other": 1}, "idempotency_key": "k"}, bearer(RIVAL))

    assert (mine.status_code, others.status_code) == (202, 202)
    assert said(mine)["job_id"] != said(others)["job_id"]
    assert "idempotency-replayed" not in others.headers


async def test_an_operator_sees_no_jobs_of_tenants(tmp_path: Path) -> None:
    async with opened(Intake(keys=KeyFile(str(keys_file(tmp_path))))) as intake:
        job_id = said(await intake.post({"payload": CHAT}, bearer(ACME)))["job_id"]

        is_problem(await intake.http.get(f"/v1/jobs/{job_id}", headers=bearer(OPERATOR)), 404)


async def test_a_job_that_came_another_way_is_nobodys_where_there_are_tenants(tmp_path: Path) -> None:
    async with opened(Intake(keys=KeyFile(str(keys_file(tmp_path))))) as intake:
        await intake.end("from-the-broker")

        is_problem(await intake.http.get("/v1/jobs/from-the-broker", headers=bearer(ACME)), 404)


async def test_a_tenants_job_is_not_shown_where_nobody_is_asked_who_he_is(tmp_path: Path) -> None:
    """Two gateways before one queue, one of them without keys."""
    site = Site()
    async with opened(Intake(site, keys=KeyFile(str(keys_file(tmp_path))))) as keyed, opened(Intake(site)) as keyless:
        job_id = said(await keyed.post({"payload": CHAT}, bearer(ACME)))["job_id"]
        await site.end(job_id)

        is_problem(await keyless.get(job_id), 404)


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param("{", "cannot be read", id="no JSON"),
        pytest.param([], "expected", id="no object"),
        pytest.param({}, "keys", id="no keys"),
        pytest.param({"keys": [{"tenant": "a", "sha256": "s3cret"}]}, "keys[0].sha256", id="a key and no digest"),
        pytest.param({"keys": [{"tenant": "", "sha256": digest("s3cret")}]}, "keys[0].tenant", id="no tenant"),
        pytest.param({"keys": [{"tenant": "a", "sha256": 1}]}, "keys[0].sha256", id="a number for a digest"),
        pytest.param({"keys": [{"tenant": "a", "sha256": digest("a"), "s3cret": 1}]}, "keys", id="an unknown field"),
        pytest.param({"s3cret": "a"}, "not known", id="a key for a field"),
        pytest.param({"keys": [{"tenant": "a", "sha256": digest("a")}] * 2}, "twice", id="a key twice"),
        pytest.param({"keys": [], "webhook_secrets": {"a": "s3cret"}}, "webhook_secrets['a']", id="a bad secret"),
    ],
)
def test_a_bad_file_is_told_with_what_and_where_and_no_secret(tmp_path: Path, content: object, told: str) -> None:
    path = keys_file(tmp_path, content)

    with pytest.raises(ConfigurationError) as refused:
        KeyFile(str(path), secret_problem)

    (problem,) = refused.value.problems
    assert problem.startswith("GATEWAY_API_KEYS_FILE: ")
    assert str(path) in problem
    assert told.lower() in problem.lower()
    assert "s3cret" not in problem.replace(str(path), "")


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        KeyFile(str(tmp_path / "none.json"))


async def test_a_changed_file_is_read_again_within_a_second(tmp_path: Path) -> None:
    path = keys_file(tmp_path)
    keys = KeyFile(str(path))
    assert keys.caller("late") is None

    path.write_text(json.dumps({"keys": [{"tenant": "late", "sha256": digest("late")}]}))
    await asyncio.sleep(1.1)

    found = keys.caller("late")
    assert found is not None
    assert (found.tenant, found.operator) == ("late", False)
    assert keys.caller(ACME) is None


@pytest.mark.parametrize("how", ["broken", "removed"])
async def test_a_file_that_goes_bad_leaves_what_was_known(tmp_path: Path, how: str) -> None:
    path = keys_file(tmp_path)
    keys = KeyFile(str(path))
    if how == "broken":
        path.write_text("{")
    else:
        os.remove(path)
    await asyncio.sleep(1.1)

    assert keys.caller(ACME) is not None

    keys_file(tmp_path, {"keys": []})
    await asyncio.sleep(1.1)
    assert keys.caller(ACME) is None


async def test_a_file_that_could_not_be_opened_is_read_as_soon_as_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it is written first and given its owner afterwards, or where there was no descriptor left."""
    path = keys_file(tmp_path)
    async with opened(Intake(keys=KeyFile(str(path)))) as intake:
        assert (await intake.http.get("/v1/jobs", headers=bearer(ACME))).status_code == 200
        keys_file(tmp_path, {"keys": [{"tenant": "rival", "sha256": digest(RIVAL)}]})
        with monkeypatch.context() as refused:
            refused.setattr("inference_worker.gateway.keys.open_regular", _no_permission)
            await asyncio.sleep(1.5)
            assert (await intake.http.get("/v1/jobs", headers=bearer(ACME))).status_code == 200

        await asyncio.sleep(1.5)

        assert (await intake.http.get("/v1/jobs", headers=bearer(ACME))).status_code == 401
        assert (await intake.http.get("/v1/jobs", headers=bearer(RIVAL))).status_code == 200


def _no_permission(_: str) -> object:
    raise PermissionError(errno.EACCES, "Permission denied")


async def test_a_fresh_key_is_let_in_by_its_line(tmp_path: Path) -> None:
    key, line = new_key("acme", operator=True)
    keys = KeyFile(str(keys_file(tmp_path, {"keys": [json.loads(line)]})))

    caller = keys.caller(key)

    assert caller is not None
    assert (caller.tenant, caller.operator) == ("acme", True)
    assert key not in line
    assert new_key("acme", operator=False)[0] != key


def test_a_name_that_can_be_no_tenant_gets_no_key() -> None:
    with pytest.raises(ConfigurationError):
        new_key("a\nb", operator=False)


def test_a_file_without_a_bound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(b" " * (MOST_BYTES + 1))

    with pytest.raises(ConfigurationError, match="larger than"):
        KeyFile(str(path))


async def test_webhook_secrets_are_those_of_the_file(tmp_path: Path) -> None:
    path = keys_file(tmp_path)
    keys = KeyFile(str(path), secret_problem)

    assert (keys.webhook_secret("acme"), keys.webhook_secret("rival")) == (SECRET, None)
    assert keys.has_webhook_secrets

    keys_file(tmp_path, {"keys": []})
    await asyncio.sleep(1.1)
    assert keys.webhook_secret("acme") is None
    assert not keys.has_webhook_secrets


async def test_a_file_without_keys_is_warned_of(tmp_path: Path) -> None:
    """Nobody can come in, which is seldom what was meant."""
    with capture_logs() as logs:
        KeyFile(str(keys_file(tmp_path, {"keys": []})))

    assert [line["event"] for line in logs] == ["the file of API keys has none: nobody can come in"]


@pytest.mark.parametrize(
    ("key", "told"),
    [
        pytest.param(ACME, "The job is not accepted, the queue cannot be reached.", id="a tenant"),
        pytest.param(
            OPERATOR,
            "The job is not accepted, the queue cannot be reached: no route to 10.0.0.7:5672.",
            id="an operator",
        ),
    ],
)
async def test_what_neighbours_are_called_is_told_to_operators_alone(tmp_path: Path, key: str, told: str) -> None:
    async with opened(Intake(keys=KeyFile(str(keys_file(tmp_path))))) as intake:
        intake.queue.refuses = TransportLost("no route to 10.0.0.7:5672")
        refused = await intake.post({"payload": CHAT}, bearer(key))
        chat = await intake.chat(bearer(key))

    assert is_problem(refused, 503)["detail"] == told
    assert is_openai_error(chat, 503)["message"] == told


async def test_the_bodies_of_one_tenant_leave_room_for_another(tmp_path: Path) -> None:
    bodies = Bodies(most_bytes_at_once=1000)
    async with opened(Intake(keys=KeyFile(str(keys_file(tmp_path))), bodies=bodies)) as intake:
        refused = await intake.post({"payload": {"text": "x" * 600}}, bearer(ACME))
        slow = asyncio.create_task(
            intake.http.post(
                "/v1/jobs", content=_trickling(), headers={**bearer(ACME), "Content-Type": "application/json"}
            )
        )
        await asyncio.sleep(1)
        other = await intake.post({"payload": {"text": "x" * 400}}, bearer(RIVAL))
        slow.cancel()

    assert is_problem(refused, 503)["code"] == "overloaded"
    assert other.status_code == 202


async def _trickling() -> AsyncGenerator[bytes, None]:
    """Holds 450 bytes and sends no more."""
    yield b" " * 450
    await asyncio.sleep(20)


async def test_what_is_for_operators_is_for_operators(tmp_path: Path) -> None:
    def other(web: FastAPI) -> None:
        @web.get("/v1/scale")
        async def shown(request: Request) -> Response:
            permit_operators(request)
            return Response(await tenant_of(request))

    keys = KeyFile(str(keys_file(tmp_path)))
    async with opened(Intake(keys=keys, others=(other,))) as keyed, opened(Intake(others=(other,))) as keyless:
        answers = [await keyed.http.get("/v1/scale", headers=bearer(key)) for key in (OPERATOR, ACME)]
        anybody = await keyless.http.get("/v1/scale")

    assert answers[0].text == "ops"
    assert is_problem(answers[1], 403)["code"] == "operators_only"
    assert anybody.status_code == 200
