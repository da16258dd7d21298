"""Keys, places in the queue, back-pressure, lists and cancelling: contract, section 9."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from inference_worker.disposition import Token
from inference_worker.errors import StoreUnavailable
from inference_worker.gateway.job_requests import LARGEST_PAGE, NewJob
from inference_worker.gateway.pace import LONGEST_RETRY_AFTER_S
from inference_worker.ports import Beat, Progress
from tests.unit.gateway_kit import CHAT, TTL_S, Intake, Site, is_problem, opened, said

OTHER = {"messages": [{"role": "user", "content": "something else"}]}


@pytest.fixture
async def intake() -> AsyncIterator[Intake]:
    async with opened(Intake()) as made:
        yield made


# ---------------------------------------------------------------- idempotency


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        pytest.param({"idempotency_key": "k-1"}, {}, id="in the body"),
        pytest.param({}, {"Idempotency-Key": "k-1"}, id="bare, in the header"),
        pytest.param({}, {"Idempotency-Key": '"k-1"'}, id="quoted, in the header"),
        pytest.param({"idempotency_key": "k-1"}, {"Idempotency-Key": '"k-1"'}, id="in both"),
    ],
)
async def test_the_same_key_means_the_same_job_once_in_the_queue(
    intake: Intake, body: dict[str, object], headers: dict[str, str]
) -> None:
    first = await intake.post({"payload": CHAT, "idempotency_key": "k-1"})
    second = await intake.post({"payload": CHAT, **body}, headers)

    assert (first.status_code, second.status_code) == (202, 202)
    assert said(second)["job_id"] == said(first)["job_id"]
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert intake.queue.ids == [said(first)["job_id"]]
    assert (intake.count("jobs_accepted_total"), intake.count("jobs_replayed_total")) == (1, 1)


async def test_a_repeated_key_tells_how_the_job_is_by_now(intake: Intake) -> None:
    first = await intake.post({"payload": CHAT, "idempotency_key": "k"})
    await intake.end(said(first)["job_id"])

    again = await intake.post({"payload": CHAT, "idempotency_key": "k"})

    assert (again.status_code, said(again)["status"], said(again)["position"]) == (202, "succeeded", None)


async def test_a_repeated_key_is_answered_also_when_the_result_has_gone(intake: Intake) -> None:
    first = await intake.post({"payload": CHAT, "idempotency_key": "k"})
    await intake.end(said(first)["job_id"])
    await asyncio.sleep(TTL_S + 1)

    again = await intake.post({"payload": CHAT, "idempotency_key": "k"})

    assert (again.status_code, said(again)["status"]) == (202, "succeeded")
    is_problem(await intake.get(said(first)["job_id"]), 410)


@pytest.mark.parametrize(
    "other",
    [
        {"payload": OTHER},
        {"payload": CHAT, "timeout_s": 61},
        {"payload": CHAT, "endpoint": "/v1/embeddings"},
        {"payload": CHAT, "metadata": {"a": "b"}},
    ],
)
async def test_the_same_key_with_another_body_is_refused(intake: Intake, other: dict[str, object]) -> None:
    await intake.post({"payload": CHAT, "idempotency_key": "k"})

    refused = await intake.post({"idempotency_key": "k", **other})

    assert is_problem(refused, 422)["code"] == "idempotency_key_reused"
    assert len(intake.queue.ids) == 1


async def test_two_keys_for_one_job_are_refused(intake: Intake) -> None:
    refused = await intake.post({"payload": CHAT, "idempotency_key": "a"}, {"Idempotency-Key": "b"})

    assert is_problem(refused, 422)["errors"][0]["pointer"] == "/idempotency_key"


@pytest.mark.parametrize(
    "key", ['""', "", '"half', '"a"b"', "k" * 600], ids=["nothing", "empty", "half", "odd", "long"]
)
async def test_a_header_that_is_no_key_is_refused(intake: Intake, key: str) -> None:
    refused = await intake.post({"payload": CHAT}, {"Idempotency-Key": key})

    assert "Idempotency-Key" in is_problem(refused, 422)["detail"]


async def test_a_quoted_key_may_have_quotes_inside(intake: Intake) -> None:
    await intake.post({"payload": CHAT}, {"Idempotency-Key": r'"say \"hi\" \\"'})

    again = await intake.post({"payload": CHAT, "idempotency_key": 'say "hi" \\'})

    assert again.headers["idempotency-replayed"] == "true"


async def test_a_key_holds_at_every_intake_of_a_queue() -> None:
    site = Site()
    async with opened(Intake(site)) as one, opened(Intake(site)) as other:
        first, second = await asyncio.gather(
            one.post({"payload": CHAT, "idempotency_key": "k"}), other.post({"payload": CHAT, "idempotency_key": "k"})
        )

    assert said(first)["job_id"] == said(second)["job_id"]
    assert len(site.queue.ids) == 1


def test_the_fingerprint_is_of_the_bytes_that_came() -> None:
    assert NewJob(payload=b"{}").fingerprint() != NewJob(payload=b"{ }").fingerprint()
    assert NewJob(payload=b"{}").fingerprint() == NewJob(payload=b"{}", key="k").fingerprint()


# ---------------------------------------------------------------- the place in the queue, and back-pressure


async def test_a_job_is_told_its_place_and_how_long_that_takes(intake: Intake) -> None:
    await intake.site.worker("a", slots=2, service_s=0.5)
    await intake.site.worker("b", slots=1, service_s=1.0)
    for _ in range(10):
        await intake.job()

    view = said(await intake.post({"payload": CHAT}))

    assert (view["position"], view["estimated_wait_s"]) == (11, 2.0)


async def test_workers_that_take_no_work_do_not_count(intake: Intake) -> None:
    await intake.site.worker("new", service_s=None)

    assert said(await intake.post({"payload": CHAT}))["estimated_wait_s"] is None


@pytest.mark.parametrize(
    ("waiting", "retry_after"),
    [(5, 1), (6, 1), (16, 3), (10**6, LONGEST_RETRY_AFTER_S)],
    ids=["just full", "one more", "ten more", "far too many"],
)
async def test_a_full_queue_says_when_there_should_be_room(waiting: int, retry_after: int) -> None:
    async with opened(Intake(most_waiting=5)) as intake:
        await intake.site.worker(slots=2, service_s=0.5)
        intake.queue.waiting = waiting

        refused = await intake.post({"payload": CHAT})

    assert is_problem(refused, 429)["code"] == "queue_full"
    assert refused.headers["retry-after"] == str(retry_after)
    assert intake.queue.ids == []
    assert intake.count("jobs_refused_total", reason="queue_full") == 1


async def test_a_full_queue_without_a_known_pace_says_five_seconds() -> None:
    async with opened(Intake(most_waiting=1)) as intake:
        await intake.job()
        await asyncio.sleep(1)

        refused = await intake.post({"payload": CHAT})

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")


# ---------------------------------------------------------------- lists


async def test_jobs_are_listed_newest_first_in_pages_with_their_states(intake: Intake) -> None:
    ids = []
    for number in range(5):
        ids.append(await intake.job(metadata={"n": str(number)}))
        await asyncio.sleep(1)
    await intake.end(ids[0])
    await intake.end(ids[1], status_code=500, code="retries_exhausted")
    await intake.store.claim(ids[2], 0, Token("t"), intake.now() + 60)

    seen, after = [], None
    while True:
        page = said(await intake.http.get("/v1/jobs", params={"limit": 2} | ({"after": after} if after else {})))
        seen += page["jobs"]
        if (after := page["after"]) is None:
            break

    assert [job["job_id"] for job in seen] == ids[::-1]
    assert [job["status"] for job in seen] == ["queued", "queued", "running", "dead", "succeeded"]
    assert seen[0]["metadata"] == {"n": "4"}
    assert seen[0]["endpoint"] == "/v1/chat/completions"


async def test_a_list_reads_no_result_of_a_job_that_succeeded(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page would hold a hundred answers of megabytes."""
    await intake.end(await intake.job())

    async def read(request_id: str) -> bytes:
        raise AssertionError("it is read")

    monkeypatch.setattr(intake.store, "read", read)

    assert said(await intake.http.get("/v1/jobs"))["jobs"][0]["status"] == "succeeded"


@pytest.mark.parametrize(
    "query", ["limit=0", f"limit={LARGEST_PAGE + 1}", "limit=x", "limit=-1", "limit=1e1", "after=nonsense", "after="]
)
async def test_a_page_that_cannot_be_is_refused(intake: Intake, query: str) -> None:
    is_problem(await intake.http.get(f"/v1/jobs?{query}"), 422)


async def test_a_list_without_a_store_is_refused(intake: Intake) -> None:
    await intake.job()
    intake.store.away = "Redis gave no answer"

    is_problem(await intake.http.get("/v1/jobs"), 503)


# ---------------------------------------------------------------- cancelling


async def test_a_cancelled_job_is_shown_so_and_its_message_finds_the_result(intake: Intake) -> None:
    job_id = await intake.job()

    answer = await intake.http.delete(f"/v1/jobs/{job_id}")

    assert answer.status_code == 200
    assert (said(answer)["status"], said(answer)["status_code"]) == ("cancelled", 499)
    assert await intake.state(job_id) == "cancelled"
    stored = await intake.store.read(job_id)
    assert stored is not None
    assert msgspec.json.decode(stored)["error_code"] == "cancelled"
    assert intake.count("jobs_cancelled_total") == 1


async def test_cancelling_twice_is_the_same_as_once(intake: Intake) -> None:
    job_id = await intake.job()

    answers = [await intake.http.delete(f"/v1/jobs/{job_id}") for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert intake.count("jobs_cancelled_total") == 1


async def test_a_running_job_is_cancelled_whoever_runs_it(intake: Intake) -> None:
    job_id = await intake.job()
    await intake.store.claim(job_id, 0, Token("t"), intake.now() + 60)

    assert (await intake.http.delete(f"/v1/jobs/{job_id}")).status_code == 200


async def test_a_job_that_has_ended_otherwise_is_not_cancelled_and_the_answer_says_how(intake: Intake) -> None:
    job_id = await intake.job()
    await intake.end(job_id)

    refused = await intake.http.delete(f"/v1/jobs/{job_id}")

    assert "succeeded" in is_problem(refused, 409)["detail"]
    assert await intake.state(job_id) == "succeeded"


async def test_a_job_that_nobody_knows_is_not_cancelled(intake: Intake) -> None:
    is_problem(await intake.http.delete("/v1/jobs/nobody"), 404)

    assert await intake.store.read("nobody") is None


async def test_a_job_that_is_gone_is_not_cancelled(intake: Intake) -> None:
    job_id = await intake.job()
    await intake.end(job_id)
    await asyncio.sleep(TTL_S + 1)

    is_problem(await intake.http.delete(f"/v1/jobs/{job_id}"), 410)
    assert await intake.store.read(job_id) is None


# ---------------------------------------------------------------- webhooks


async def test_a_webhook_is_noted_with_the_job_and_told_of_when_that_is_cancelled() -> None:
    """What is sent, and when: tests/unit/test_webhooks.py."""
    asked: list[tuple[str, str]] = []
    hinted: list[str] = []

    def check(tenant: str, url: str) -> str | None:
        asked.append((tenant, url))
        return None

    async with opened(Intake(check_webhook=check, hint=hinted.append)) as intake:
        answer = await intake.post({"payload": CHAT, "webhook": {"url": "https://a.example/hook"}})
        job_id = said(answer)["job_id"]
        view = said(await intake.get(job_id))
        await intake.http.delete(f"/v1/jobs/{job_id}")

    assert asked == [("", "https://a.example/hook")]
    assert said(answer)["links"]["webhook"] == f"/v1/jobs/{job_id}/webhook"
    assert view["webhook"] == {"url": "https://a.example/hook", "log": f"/v1/jobs/{job_id}/webhook"}
    assert hinted == [job_id]


async def test_a_webhook_that_cannot_be_is_refused_with_the_reason() -> None:
    async with opened(Intake(check_webhook=lambda tenant, url: "has no host")) as intake:
        refused = await intake.post({"payload": CHAT, "webhook": {"url": "https://"}})

    assert is_problem(refused, 422)["errors"][0]["detail"] == "has no host"


# ---------------------------------------------------------------- neighbours that are away


async def test_a_job_that_cannot_be_written_down_is_not_accepted(intake: Intake) -> None:
    intake.store.away = "Redis gave no answer"

    refused = await intake.post({"payload": CHAT})

    assert is_problem(refused, 503)["code"] == "store_unavailable"
    assert intake.queue.ids == []
    assert intake.count("jobs_refused_total", reason="store") == 1


async def test_a_wait_whose_store_stays_away_is_told(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = await intake.job()

    async def wait(request_id: str, within_s: float) -> bytes | None:
        raise StoreUnavailable("Redis gave no answer")

    monkeypatch.setattr(intake.store, "wait", wait)

    is_problem(await intake.get(job_id, wait=3), 503)


async def test_a_list_whose_states_cannot_be_told_is_refused(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    await intake.job()

    async def progress(request_id: str) -> Progress:
        raise StoreUnavailable("Redis gave no answer")

    monkeypatch.setattr(intake.store, "progress", progress)

    is_problem(await intake.http.get("/v1/jobs"), 503)


async def test_a_fleet_that_is_silent_only_leaves_the_time_unknown(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def members() -> list[Beat]:
        await asyncio.sleep(100)
        return []

    monkeypatch.setattr(intake.site.fleet, "members", members)

    assert said(await intake.post({"payload": CHAT}))["estimated_wait_s"] is None
    assert asyncio.get_running_loop().time() <= 1


async def test_a_damaged_result_is_listed_as_failed(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    await intake.job()

    async def read(request_id: str) -> bytes:
        return b"{half"

    monkeypatch.setattr(intake.store, "read", read)

    assert said(await intake.http.get("/v1/jobs"))["jobs"][0]["status"] == "failed"
