"""`check process`: what it says of documents, queues, gateways and gates, and that it ends in time."""

import asyncio
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis as RedisClient

from inference_worker.assembly import Outside
from inference_worker.check import Finding
from inference_worker.check_process import check_process
from inference_worker.process_setup import read_setup
from tests.conservation import channel_of
from tests.faults.model import FakeModel
from tests.integration.conftest import OwnRedis
from tests.integration.test_check import LONGEST_S, Ended, check
from tests.pubsub_kit import subscribed

SATURATION = {"gate_type": "prometheus-saturation", "gate_params": {"pool": "p", "threshold": 0.7}}
SCRAPE = {"metric": "vllm:num_requests_running", "max_count_per_pod": 10, "baseline": 0.2}


def queue(name: str, gateway: str, **others: object) -> dict[str, object]:
    return {"queue_name": name, "igw_base_url": gateway, "result_ttl_seconds": 60, **others}


async def checked(
    folder: Path,
    url: str,
    *queues: dict[str, object],
    pools: object = None,
    transport: str = "redis-sortedset",
    flags: tuple[str, ...] = ("--json",),
    env: Mapping[str, str] | None = None,
    document: Mapping[str, object] | None = None,
) -> Ended:
    (folder / "t.json").write_text(json.dumps({"url": url, "queues": queues, **(document or {})}))
    files = ["--transport-config-file", str(folder / "t.json")]
    if pools is not None:
        (folder / "p.json").write_text(json.dumps(pools))
        files += ["--pool-config-file", str(folder / "p.json")]
    return await check(env or {}, "process", "--transport", transport, *files, *flags)


def gates_of(ended: Ended) -> dict[str, dict[str, Any]]:
    return {gate["place"]: gate for gate in ended.said["gates"]}


async def test_it_says_of_each_gate_when_it_closes_and_what_it_reads(
    tmp_path: Path, own_redis: OwnRedis, model: FakeModel
) -> None:
    model.metrics_text = "vllm:num_requests_running 4\n"
    redis = await own_redis("--appendonly", "yes", "--maxmemory", "100mb")
    async with RedisClient.from_url(redis.url) as client:
        await client.zadd("chat", {"{}": time.time() + 600})
        await client.xadd("chat:dead", {"request": "{}"})
    scrape = {"gate_type": "endpoint-scrape", "gate_params": {"url": f"{model.url}/metrics", **SCRAPE}}
    quota = {"gate_type": "redis-quota", "gate_params": {"address": f"{redis.host}:{redis.port}", "limit": 7}}
    rate = {"address": redis.url, "control_key": "control"}
    leased = {"gate_type": "redis-leased-rate", "gate_params": rate}
    pools = [
        {"id": "default", "workers": 4, "gate_type": "wait-on-refuse", "gate_params": {"gate": scrape}},
        {"id": "planned", "workers": 4, **leased},
    ]

    ended = await checked(
        tmp_path,
        redis.url,
        queue("chat", model.url, **quota),
        queue("later", model.url, worker_pool_id="planned"),
        pools=pools,
    )

    assert ended.code == 0, ended.out
    assert ended.err == ""
    warned = [row["what"] for row in ended.said["checks"] if row["state"] == "warning"]
    assert warned == ["dead letters", "gate of pool planned"]
    assert ended.of("queue chat")[1] == "chat: 1 ready, 0 with workers, 0 delayed; by sorted set"
    assert ended.of("dead letters")[1] == "chat:dead: 1 dead letters"
    assert ended.of("changes")[0] == "ok"
    assert ended.of(f"gateway {model.url}")[1].endswith("; of chat, later")
    gates = gates_of(ended)
    assert gates["pool default"]["type"] == "wait-on-refuse(endpoint-scrape)"
    assert gates["pool default"]["closes_at"].startswith("closed while vllm:num_requests_running / (10 x pods) is 0.8")
    assert (gates["pool default"]["budget"], gates["pool default"]["why_not"]) == (0.4, "")
    assert gates["queue chat"]["closes_at"].startswith("7 requests within 60 s for each userid")
    assert (gates["pool planned"]["budget"], gates["pool planned"]["why_not"]) == (0, "no lease that holds")


async def test_people_get_a_table(tmp_path: Path, redis_url: str, model: FakeModel) -> None:
    ended = await checked(
        tmp_path,
        redis_url,
        queue("table", model.url, gate_type="constant"),
        flags=("--variables",),
    )

    assert ended.code == 0, ended.out
    assert "constant; closes: never. Now: open, budget 1.00" in ended.out
    assert "REDIS_RESPONSE_TTL_S" in ended.out
    assert ended.out.endswith("all reached\n")


async def _says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()
    await writer.wait_closed()


async def test_where_nothing_is_reached_each_says_why_and_it_ends_in_time(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    silent = await asyncio.start_server(_says_nothing, "127.0.0.1", 0)
    page = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}/metrics"
    scrape = {"gate_type": "endpoint-scrape", "gate_params": {"url": page, **SCRAPE}}
    budget = {"gate_type": "redis", "gate_params": {"address": "redis://:secret-3@127.0.0.1:9"}}
    begun = time.monotonic()

    ended = await checked(
        tmp_path,
        "redis://:secret-1@127.0.0.1:9/0",
        queue("a", "http://u:secret-2@127.0.0.1:9", **SATURATION),
        queue("b", "http://u:secret-2@127.0.0.1:9", **scrape),
        pools=[{"id": "default", "workers": 1, **budget}],
        flags=("--json", "--prometheus-url", nowhere),
    )
    silent.close()
    await silent.wait_closed()

    assert time.monotonic() - begun < LONGEST_S
    assert ended.code == 1
    failed = [row["what"] for row in ended.said["checks"] if row["state"] == "failed"]
    assert failed == [
        "Redis",
        "gateway http://***@127.0.0.1:9",
        "Prometheus",
        "Redis of gates redis://***@127.0.0.1:9",
    ]
    gate = gates_of(ended)["queue a"]
    assert gate["why_not"] == "ConnectError: All connection attempts failed"
    assert (gate["closes_at"], gate["budget"]) == (
        "closed at a saturation of 0.7 and above; without a reading open",
        1,
    )
    assert gates_of(ended)["queue b"]["why_not"] == "no answer within 5 s"
    assert gates_of(ended)["pool default"]["budget"] == 0
    assert "secret" not in ended.out + ended.err


async def test_what_is_wrong_in_flags_documents_and_variables_is_said_at_once(tmp_path: Path) -> None:
    ended = await checked(
        tmp_path,
        "redis://127.0.0.1/0",
        queue("a", "ftp://x", gate_type="no-such"),
        flags=("--concurrency", "0"),
        env={"REDIS_RESPONSE_TTL_S": "never"},
    )

    assert (ended.code, ended.out) == (2, "")
    for word in ("--concurrency", "REDIS_RESPONSE_TTL_S"):
        assert word in ended.err


async def test_what_is_no_queue_is_named_and_so_is_a_redis_that_tells_nothing(
    tmp_path: Path, own_redis: OwnRedis, model: FakeModel
) -> None:
    redis = await own_redis()
    parts = urlsplit(redis.url)
    async with RedisClient.from_url(redis.url) as client:
        await client.set("text", "x")
        words = ("ACL", "SETUSER", "w", "reset", "on", ">pw", "~*", "&*", "+@all", "-client|tracking")
        await client.execute_command(*words)  # type: ignore[no-untyped-call]  # The driver's own gap.

    ended = await checked(tmp_path, f"redis://w:pw@{parts.hostname}:{parts.port}/0", queue("text", model.url))

    assert ended.code == 1
    assert ended.of("queue text")[::2] == ("failed", "something else is kept under its name")
    assert ended.of("changes")[0] == "warning"


async def test_streams_and_queues_of_rabbitmq_are_looked_at_too(
    tmp_path: Path, rabbitmq_url: str, redis_url: str, model: FakeModel, deployment_id: str
) -> None:
    name = f"q-{deployment_id}"
    async with channel_of(rabbitmq_url) as channel:
        await channel.declare_queue(name, auto_delete=True)
        over_rabbitmq = await checked(
            tmp_path,
            rabbitmq_url,
            queue(name, model.url),
            queue("not-there", model.url),
            transport="rabbitmq",
            env={"REDIS_URL": redis_url},
        )
    over_streams = await checked(tmp_path, redis_url, queue(name, model.url), transport="redis-streams")

    assert over_rabbitmq.code == 0, over_rabbitmq.out
    assert "does not exist yet" in over_rabbitmq.of("queue not-there")[1]
    assert over_rabbitmq.of(f"queue {name}")[0] == "warning"
    assert over_rabbitmq.of("RabbitMQ")[0] == "ok"
    assert over_streams.code == 0, over_streams.out
    assert over_streams.of(f"queue {name}")[1] == f"{name} does not exist yet: it is created"


# ---------------------------------------------------------------- each transport, asked in this process


async def asked(kind: str, document: Mapping[str, object], environ: Mapping[str, str] | None = None) -> list[Finding]:
    """What is said of a transport document."""
    given, rng = {"transport": kind, "transport-config": json.dumps(document)}, random.Random(1)
    setup = read_setup(given, environ or {}, dict[str, str]().__getitem__, rng)
    return (await check_process(setup, environ or {}, Outside(now=time.time, rng=rng))).findings


async def asked_sql(url: str, model: FakeModel) -> dict[str, Finding]:
    return {row.what: row for row in await asked("sql", {"url": url, "queues": [queue("chat", model.url)]})}


async def test_of_postgres_it_says_what_is_wrong_and_who_mends_it(
    empty_sql_url: str, deployment_id: str, model: FakeModel
) -> None:
    """A database that is not there, and a role that may connect and no more."""
    import asyncpg

    role, parts = f"r_{deployment_id.removeprefix('t-')}", urlsplit(empty_sql_url)
    schema = parts.query.removeprefix("search_path=")
    poor = parts._replace(netloc=f"{role}:x@{parts.hostname}:{parts.port}").geturl()
    admin = await asyncpg.connect(empty_sql_url)
    try:
        await admin.execute(f"create role {role} login password 'x'")
        nowhere = await asked_sql(parts._replace(path="/nowhere").geturl(), model)
        no_schema = await asked_sql(poor, model)
        well = await asked_sql(empty_sql_url, model)
        await admin.execute(f"grant usage on schema {schema} to {role}")
        await admin.execute(f"grant select on all tables in schema {schema} to {role}")
        reads_only = await asked_sql(poor, model)
    finally:
        await admin.execute(f"drop owned by {role}; drop role {role}")
        await admin.close()
    gone = await asked_sql("postgresql://u:secret@127.0.0.1:1/d", model)

    assert well["Postgres"].word == "ok"
    said = [rows["Postgres"] for rows in (nowhere, no_schema, reads_only, gone)]
    assert [row.word for row in said] == ["failed"] * 4
    assert [row.mend.split(",")[0] for row in said] == [
        "SQL_URL: name a database that is there",
        "grant its user the permissions of docs/sql.md",
        "grant its user the permissions of docs/sql.md",
        "SQL_URL: is it the right address",
    ]
    assert "secret" not in said[3].detail
    assert "Redis" not in {*well, *gone}


async def test_channels_are_looked_at_with_the_set_of_their_retries(
    redis_url: str, redis_client: RedisClient, model: FakeModel
) -> None:
    document = {"url": redis_url, "queues": [{"queue_name": "talk", "igw_base_url": model.url}]}
    well = {row.what: row for row in await asked("redis-pubsub", document)}
    await redis_client.set("retry-sortedset", "x")
    ill = {row.what: row for row in await asked("redis-pubsub", document)}

    assert well["queue talk"].detail == "talk: 0 listen to this channel"
    assert well["retries"].detail == "retry-sortedset: 0 wait"
    assert (ill["retries"].word, ill["retries"].mend) == ("failed", "something else is kept under its name")


async def test_of_subscriptions_each_problem_is_said_at_once(redis_url: str, model: FakeModel) -> None:
    async with subscribed(redis_url, exactly_once=False) as kit:
        topics = [{"subscriber_id": name, "igw_base_url": model.url} for name in ("requests", "missing")]
        document = {"project_id": kit.queue.project, "result_topic_id": "results", "topics": topics}
        environ = {"REDIS_URL": redis_url, "PUBSUB_EMULATOR_HOST": kit.address}
        seen = await asked("gcp-pubsub", document, environ)
    away = await asked(
        "gcp-pubsub", document, {"REDIS_URL": "redis://127.0.0.1:9/0", "PUBSUB_EMULATOR_HOST": "127.0.0.1:9"}
    )

    rows = [row for row in seen if row.what.startswith("queue ")]
    assert [(row.what, row.word) for row in rows] == [
        ("queue requests", "ok"),
        ("queue requests", "warning"),
        ("queue missing", "failed"),
    ]
    assert rows[-1].mend == "project_id and subscriber_id, and that the subscription was created"
    failed = [row for row in away if row.word == "failed"]
    assert [row.what for row in failed] == ["Redis", "queue requests", "queue missing"]
    assert failed[-1].mend.startswith("PUBSUB_EMULATOR_HOST, or GOOGLE_APPLICATION_CREDENTIALS")
