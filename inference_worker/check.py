"""The `check` command: what is configured, who of the neighbours can be reached, and what to do about the rest.

It looks and leaves everything as it is: it consumes nothing, and declares nothing but what is there already.
Not here: what is asked for a process of many queues (`check_process`), which shares the words and the servers' rows.
"""

import asyncio
import difflib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import httpx
import msgspec

from inference_worker.billing.making import sink_problems
from inference_worker.config.parts import CROESUS, StreamsSettings
from inference_worker.config.settings import Settings, describe, warnings
from inference_worker.config.values import is_off, without_user
from inference_worker.errors import StoreUnavailable, TransportLost
from inference_worker.extensions import Extensions
from inference_worker.redis_scripts import PROBE, RedisCommands, RedisLink, RedisTls
from inference_worker.results.redis import probe_key
from inference_worker.rmq_look import Found, look
from inference_worker.scraping import NotRead, scrape_model
from inference_worker.transports.redis_streams import stream_backlog
from inference_worker.transports.stream_entries import StreamNames

Word = Literal["ok", "warning", "failed", "off"]
CHECK_S: Final = 8.0
"""How long one neighbour may take; they are asked at the same time."""

SET: Final = "CONFIG SET"
MOST_BODY_BYTES: Final = 1_048_576
OURS: Final = (
    *("RABBITMQ_", "REDIS_", "MODEL_", "METRICS_", "METRIC_", "INFERENCE_", "HEALTH_", "WORKER_", "GATEWAY_"),
    *("TLS_", "LOG_", "VLLM_", "DCGM_", "CROESUS_", "BILLING_", "CLAIM_", "SHUTDOWN_", "DEPLOYMENT_", "REPLICA_"),
    *("IWL_", "SCALE_", "SCALER_", "TRANSPORT"),
)
"""How our variables begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row: what was looked at, how it is, and what mends it."""

    what: str
    word: Word
    detail: str
    mend: str = ""


@dataclass(slots=True, kw_only=True)
class Report:
    """All rows, and the variables that they come from."""

    findings: list[Finding] = field(default_factory=list)
    variables: list[dict[str, object]] = field(default_factory=list)
    gates: list[dict[str, object]] | None = None
    """Each gate of a process of many queues; None where there is no such process."""

    @property
    def reached(self) -> bool:
        return not any(finding.word == "failed" for finding in self.findings)


async def check(settings: Settings, environ: Mapping[str, str]) -> Report:
    """Ask all neighbours at the same time, each for at most `CHECK_S`."""
    asked: Sequence[tuple[str, Callable[[Settings], Awaitable[list[Finding]]]]] = (
        *(() if settings.over_streams else (("RabbitMQ", _rabbitmq),)),
        ("Redis", _redis),
        ("model", _mock if settings.model.mode == "mock" else _model),
        ("metric server", _metric_server),
        ("billing", _billing),
    )
    report = Report(findings=_configuration(settings, environ), variables=variables(settings, environ))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(in_time(what, partial(ask, settings))) for what, ask in asked]
    for task in tasks:
        report.findings += task.result()
    return report


async def in_time(what: str, ask: Callable[[], Awaitable[list[Finding]]]) -> list[Finding]:
    """The rows that somebody's answer makes, or one that says why there are none. Never raises."""
    try:
        async with asyncio.timeout(CHECK_S):
            return await ask()
    except TimeoutError:
        return [failed(what, f"no answer within {CHECK_S:g} s", "see whether address and port are right and open")]
    except Exception as exc:  # noqa: BLE001 - one neighbour's surprise must not hide what the others say
        return [failed(what, f"{type(exc).__name__}: {exc}"[:300], "")]


def variables(settings: Settings, environ: Mapping[str, str]) -> list[dict[str, object]]:
    """Every variable: whether it is set, and its value; secrets are not shown."""
    values: dict[str, object] = {}
    for part_name in type(settings).model_fields:
        part = getattr(settings, part_name)
        for name, info in type(part).model_fields.items():
            values[str(info.validation_alias)] = getattr(part, name)
    return [
        {
            "name": row.name,
            "set": bool(environ.get(row.name) or (row.file and environ.get(f"{row.name}_FILE"))),
            "value": _shown(values[row.name], environ.get(row.name, ""), secret=row.secret),
        }
        for row in describe()
    ]


def _shown(value: object, given: str, *, secret: bool) -> str:
    if value is None or value == "":
        return "off" if is_off(given) else ""
    if secret:
        return "***"
    if isinstance(value, frozenset):
        return ",".join(str(one) for one in sorted(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _configuration(settings: Settings, environ: Mapping[str, str]) -> list[Finding]:
    found = [Finding(what="configuration", word="warning", detail=text, mend="") for text in warnings(settings)]
    found += unknown_variables(environ)
    said = f"{len(describe())} variables, none of them wrong"
    return found or [Finding(what="configuration", word="ok", detail=said)]


def unknown_variables(environ: Mapping[str, str]) -> list[Finding]:
    """Variables that look like ours, are not, and are written almost as one of ours."""
    all_known = {row.name for row in describe()} | {f"{row.name}_FILE" for row in describe() if row.file}
    found = []
    for name in sorted(environ):
        if name in all_known or not name.startswith(OURS):
            continue
        if close := difflib.get_close_matches(name, sorted(all_known), n=1, cutoff=0.85):
            found.append(
                Finding(
                    what="configuration",
                    word="warning",
                    detail=f"{name} is set, and there is no such variable",
                    mend=f"{close[0]} is probably meant",
                )
            )
    return found


# ---------------------------------------------------------------- RabbitMQ


async def _rabbitmq(settings: Settings) -> list[Finding]:
    rabbitmq, queue = settings.rabbitmq, settings.identity.request_queue
    try:
        found = await look(
            rabbitmq.url_now(),
            queue=queue,
            queue_type=rabbitmq.queue_type,
            delivery_limit=rabbitmq.delivery_limit,
            max_priority=rabbitmq.max_priority,
            exchange=rabbitmq.dlx,
            dead_letter_queue=rabbitmq.dlq,
            routing_key=rabbitmq.dlx_routing_key,
            tls=settings.tls.context(),
            within_s=CHECK_S - 1,
        )
    except (TransportLost, OSError) as exc:
        why = str(exc)
        return [failed("RabbitMQ", f"{rabbitmq.address}: {why}", rabbitmq_mend(why))]
    rows = [Finding(what="RabbitMQ", word="ok", detail=f"{rabbitmq.address}, {found.server}")]
    rows.append(_request_queue(found, queue))
    rows.append(_dead_letter_queue(found, rabbitmq.dlq, rabbitmq.dlx))
    return rows


def rabbitmq_mend(why: str) -> str:
    """What to do about a RabbitMQ that cannot be used."""
    if "credentials" in why:
        return "RABBITMQ_URL, or RABBITMQ_USERNAME and RABBITMQ_PASSWORD: the broker does not know them"
    if "vhost" in why or "access" in why.lower():
        return "RABBITMQ_URL or RABBITMQ_VHOST: the virtual host is not there, or the user may not use it"
    return "RABBITMQ_URL, or RABBITMQ_HOST and RABBITMQ_PORT: is it the right address, and does the broker run?"


def _request_queue(found: Found, queue: str) -> Finding:
    what = "request queue"
    if found.queue_missing:
        if "ACCESS_REFUSED" in found.queue_missing:
            return failed(what, f"{queue}: {found.queue_missing}", "grant the permissions of docs/rabbitmq.md")
        return Finding(what=what, word="ok", detail=f"{queue} does not exist yet: the worker declares it")
    said = f"{queue}: {found.ready} ready, {found.consumers} consumers"
    if "ACCESS_REFUSED" in found.queue_differs:
        return failed(what, f"{said}; {found.queue_differs}", "grant the permissions of docs/rabbitmq.md")
    if found.queue_differs:
        mend = "the worker uses it as it is; to have it declared anew, stop all, empty and delete it"
        return Finding(what=what, word="warning", detail=f"{said}; in another form: {found.queue_differs}", mend=mend)
    return Finding(what=what, word="ok", detail=said)


def _dead_letter_queue(found: Found, name: str, exchange: str) -> Finding:
    what = "dead letters"
    if found.dead_missing or found.exchange_missing:
        missing = name if found.dead_missing else exchange
        return Finding(what=what, word="ok", detail=f"{missing} does not exist yet: the worker declares it")
    if found.dead_letters:
        mend = "inference-worker dlq list"
        return Finding(what=what, word="warning", detail=f"{name}: {found.dead_letters} dead letters", mend=mend)
    return Finding(what=what, word="ok", detail=f"{name}: none")


# ---------------------------------------------------------------- Redis


async def _redis(settings: Settings) -> list[Finding]:
    redis, tls, identity = settings.redis, settings.tls, settings.identity
    link = RedisLink(
        redis.url_now,
        lambda: None,
        client_name="inference-worker/check",
        tls=RedisTls(ca_file=tls.ca_file, cert_file=tls.cert_file, key_file=tls.key_file),
        answer_s=CHECK_S - 1,
    )
    async with link.open():
        try:
            await link.run(PROBE, [probe_key(identity.deployment_id, "check")])
        except StoreUnavailable as exc:
            return [failed("Redis", f"{redis.address}: {exc}", redis_mend(str(exc)))]
        rows = await redis_server(link, redis.address)
        if settings.over_streams:
            rows += await _streams(link, settings.streams)
    return rows


KEPT: Final = "answers and unsent usage events"
"""What is lost with Redis."""


async def redis_server(link: RedisCommands, address: str, kept: str = KEPT) -> list[Finding]:
    """Which Redis it is, and whether it keeps what it has acknowledged, `kept`; scripts have been tried."""
    try:
        info = _info(await link.do("INFO"))
    except StoreUnavailable as exc:
        said = f"{address}: scripts may write; INFO is not allowed ({exc})"
        mend = "see for yourself that it persists, and that maxmemory-policy is noeviction"
        return [Finding(what="Redis", word="warning", detail=said, mend=mend)]
    version = info.get("valkey_version") or info.get("redis_version", "of unknown version")
    rows = [Finding(what="Redis", word="ok", detail=f"{address}, {version}, scripts may write")]
    return rows + _keeps(info, kept)


def redis_mend(why: str) -> str:
    """What to do about a Redis that cannot be used."""
    if "credentials" in why or "Authentication" in why:
        return "REDIS_URL or REDIS_PASSWORD: Redis does not take them"
    if "NoPermission" in why or "NOPERM" in why:
        return "grant the permissions of docs/redis.md"
    if "ReadOnly" in why:
        return "REDIS_URL: this is a replica; name the primary"
    if "OutOfMemory" in why or "OOM" in why or "MISCONF" in why:
        return "Redis refuses writes: free or add memory, or mend its disk"
    return "REDIS_URL: is it the right address, and does Redis run?"


def _info(raw: object) -> dict[str, str]:
    text = raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _keeps(info: Mapping[str, str], kept: str) -> list[Finding]:
    """Whether Redis keeps what it has acknowledged: delivery.md, "Windows that stay open"."""
    rows = []
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        detail = f"maxmemory-policy is {policy}: {kept} may be evicted"
        rows.append(
            Finding(what="Redis memory", word="warning", detail=detail, mend="CONFIG SET maxmemory-policy noeviction")
        )
    if info.get("aof_enabled") != "1":
        detail = f"appendonly is off: a restart forgets {kept}"
        rows.append(Finding(what="Redis persistence", word="warning", detail=detail, mend=f"{SET} appendonly yes"))
    if info.get("role") == "slave":
        rows.append(failed("Redis", "this is a replica", "REDIS_URL: name the primary"))
    return rows


# ---------------------------------------------------------------- Redis Streams


async def _streams(link: RedisLink, streams: StreamsSettings) -> list[Finding]:
    try:
        return [await _request_stream(link, streams), await _dead_letter_stream(link, streams.dead_letters)]
    except StoreUnavailable as exc:
        return [failed("request stream", f"{streams.stream}: {exc}", redis_mend(str(exc)))]


async def _request_stream(link: RedisLink, streams: StreamsSettings) -> Finding:
    what, name = "request stream", streams.stream
    match await link.do("TYPE", name):
        case b"none":
            return Finding(what=what, word="ok", detail=f"{name} does not exist yet: the worker creates it")
        case b"stream":
            pass
        case kind:
            detail = f"{name} is a {bytes(kind).decode(errors='replace')}"
            return failed(what, detail, "IWL_STREAM: something else is kept under this name")
    groups = {group.get("name"): group for group in map(_pairs, await link.do("XINFO", "GROUPS", name))}
    group = groups.get(streams.group.encode())
    if group is None:
        length = await link.do("XLEN", name)
        detail = f"{name}: {length} entries; the group {streams.group} does not exist yet: the worker creates it"
        return Finding(what=what, word="ok", detail=detail)
    names = StreamNames(stream=name, group=streams.group, dead_letters=streams.dead_letters)
    backlog = await stream_backlog(link, names)
    detail = (
        f"{name}: {backlog.ready} ready, {backlog.in_flight} with workers, {backlog.delayed} delayed; "
        f"group {streams.group}: {group.get('consumers')} consumers"
    )
    return Finding(what=what, word="ok", detail=detail)


async def _dead_letter_stream(link: RedisLink, name: str) -> Finding:
    what = "dead letters"
    if await link.do("TYPE", name) not in (b"none", b"stream"):
        return failed(what, f"{name} is no stream", "IWL_DLQ_STREAM: something else is kept under this name")
    if dead := await link.do("XLEN", name):
        detail = f"{name}: {dead} dead letters"
        return Finding(what=what, word="warning", detail=detail, mend="inference-worker dlq list")
    return Finding(what=what, word="ok", detail=f"{name}: none")


def _pairs(row: Any) -> dict[str, Any]:
    """What XINFO says: names and values by turns, or a map in RESP3."""
    pairs = row if isinstance(row, dict) else dict(zip(row[::2], row[1::2], strict=True))
    return {bytes(name).decode(): value for name, value in pairs.items()}


# ---------------------------------------------------------------- model


async def _mock(settings: Settings) -> list[Finding]:
    detail = f"a mock: an echo of the prompt inside the worker, after {settings.model.mock_latency_s:g} s"
    return [Finding(what="model", word="ok", detail=detail)]


async def _model(settings: Settings) -> list[Finding]:
    model, key = settings.model, settings.model.api_key_now()
    shown = without_user(model.url_now())
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with _http(settings, headers) as client:
        try:
            status = await status_of(client, model.url_now() + model.health_path)
        except (httpx.HTTPError, OSError) as exc:
            return [
                failed("model", f"{shown}: {said_of(exc)}", "MODEL_CONTAINER_URL: does the model server run there?")
            ]
        if not 200 <= status < 300:
            mend = "MODEL_HEALTH_PATH, or the model is still loading; it is used once it is healthy"
            return [failed("model", f"{shown}{model.health_path}: HTTP {status}", mend)]
        rows = [Finding(what="model", word="ok", detail=f"{shown} is healthy")]
        rows.append(await _identity(client, settings))
        rows.append(await _metrics_of(client, settings))
    return rows


async def _identity(client: httpx.AsyncClient, settings: Settings) -> Finding:
    what, wanted = "model identity", settings.identity.hf_model_id
    try:
        served = await _served(client, f"{settings.model.url_now()}/v1/models")
    except (httpx.HTTPError, OSError, ValueError) as exc:
        mend = "MODEL_API_KEY, if it asks for one; a server without /v1/models serves as well"
        return Finding(what=what, word="warning", detail=f"/v1/models: {said_of(exc)}", mend=mend)
    if wanted in served:
        return Finding(what=what, word="ok", detail=f"serves {wanted}")
    detail = f"serves {', '.join(sorted(served)[:5]) or 'nothing'}, and HF_MODEL_ID is {wanted}"
    return Finding(what=what, word="warning", detail=detail, mend="HF_MODEL_ID: usage is billed under it")


async def _served(client: httpx.AsyncClient, url: str) -> set[str]:
    async with client.stream("GET", url) as answer:
        if not answer.is_success:
            raise ValueError(f"HTTP {answer.status_code}")
        body = bytearray()
        async for part in answer.aiter_bytes():
            body += part
            if len(body) > MOST_BODY_BYTES:
                raise ValueError("the list of models does not end")
    try:
        listed = msgspec.json.decode(bytes(body), type=_Models).data
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ValueError(f"no list of models: {exc}") from exc
    return {name for model in listed for name in (model.id, model.root) if name}


class _Model(msgspec.Struct):
    id: str | None = None
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def _metrics_of(client: httpx.AsyncClient, settings: Settings) -> Finding:
    url = settings.vllm_metrics_url_now()
    load = await scrape_model(client, url, within_s=CHECK_S / 2)
    if isinstance(load, NotRead):
        mend = "VLLM_METRICS_URL; requests are served without it"
        return Finding(what="model metrics", word="warning", detail=f"{without_user(url)}: {load.reason}", mend=mend)
    kv = "" if load.kv_cache_usage is None else f", KV cache {load.kv_cache_usage:.0%}"
    detail = f"{_or_unknown(load.requests_running)} running, {_or_unknown(load.requests_waiting)} waiting{kv}"
    return Finding(what="model metrics", word="ok", detail=detail)


def _or_unknown(count: int | None) -> str:
    return "?" if count is None else str(count)


# ---------------------------------------------------------------- sinks


async def _metric_server(settings: Settings) -> list[Finding]:
    return [await _sink(settings, "metric server", settings.metrics.url_now(), "METRIC_SERVER_URL")]


async def _billing(settings: Settings) -> list[Finding]:
    name = settings.billing.sink
    if name != CROESUS:
        extensions = Extensions()
        if problems := sink_problems(settings, extensions):
            return [failed("billing", problem, "docs/extending.md") for problem in problems]
        return [Finding(what="billing", word="ok", detail=f"{name}, of {extensions.said_of('billing sink', name)}")]
    return [await _sink(settings, "billing", settings.billing.url_now(), "CROESUS_HOST")]


async def _sink(settings: Settings, what: str, url: str | None, variable: str) -> Finding:
    """Whether somebody answers; nothing is sent to it, so that a token is not tried."""
    if url is None:
        return Finding(what=what, word="off", detail=f"{variable}=off")
    async with _http(settings, {}) as client:
        try:
            status = await status_of(client, url)
        except (httpx.HTTPError, OSError) as exc:
            return failed(what, f"{without_user(url)}: {said_of(exc)}", f"{variable}: is it the right address?")
    if status >= 500:
        return Finding(
            what=what, word="warning", detail=f"{without_user(url)} answers HTTP {status}", mend="look there"
        )
    return Finding(what=what, word="ok", detail=f"{without_user(url)} answers")


# ---------------------------------------------------------------- shared


def _http(settings: Settings, headers: Mapping[str, str]) -> httpx.AsyncClient:
    context = settings.tls.context()
    return httpx.AsyncClient(
        headers=headers, timeout=CHECK_S / 2, trust_env=False, verify=True if context is None else context
    )


async def status_of(client: httpx.AsyncClient, url: str) -> int:
    """The status alone: a body may never end."""
    async with client.stream("GET", url) as answer:
        return answer.status_code


def failed(what: str, detail: str, mend: str) -> Finding:
    """A row that makes the exit code 1."""
    return Finding(what=what, word="failed", detail=detail, mend=mend)


def said_of(exc: Exception) -> str:
    """An error in words, even one without any."""
    return (str(exc) or type(exc).__name__)[:300]
