"""The conservation check: after all faults, nothing that RabbitMQ accepted is lost, answered twice, or billed wrongly.

It is the first three invariants of the contract (section 5). Take the evidence while no worker runs: a message that a
worker holds is in nobody's hands here. Also the small tools that such tests need: `publish`, `drain_queue`, `peek`.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, HeadersType
from redis.asyncio import Redis

from tests.waiting import eventually

RESULT = "infer_resp:"
DEAD_LETTERED = frozenset({"retries_exhausted", "poison", "invalid_request"})
"""The `error_code` of results whose message is to be in the DLQ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Where each request was found."""

    submitted: frozenset[str]
    queued: Counter[str]
    """Ready in the queue (or the queues), by request id: how many copies."""
    results: Mapping[str, dict[str, object]]
    """The terminal results in Redis."""
    dead: Counter[str]
    billed: Sequence[Mapping[str, object]]
    """Usage events that the receiver took, repeats included."""
    outbox: Sequence[Mapping[str, object]]
    """Usage events that wait in Redis."""
    announced: Mapping[str, Sequence[str]] | None = None
    """What was published of each request's end; None where nobody listened."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Requests whose result changed after it was first seen, and how."""


def faults_of(evidence: Evidence) -> list[str]:
    """Every breach of the invariants, one line each; none is what we want."""
    return [*_lost(evidence), *_dead_wrongly(evidence), *_answered_twice(evidence), *_billed_wrongly(evidence)]


def assert_conserved(evidence: Evidence) -> None:
    """Raises: AssertionError: it names every breach and the ids that it concerns."""
    breaches = faults_of(evidence)
    assert not breaches, (
        f"{len(breaches)} breaches of conservation over {len(evidence.submitted)} requests "
        f"({len(evidence.queued)} queued, {len(evidence.results)} answered, {len(evidence.dead)} dead):\n- "
        + "\n- ".join(breaches)
    )


async def collect(
    submitted: Iterable[str],
    *,
    redis: Redis,
    rabbitmq_url: str,
    deployment_id: str,
    dlq: str = "infer.dlq",
    billed: Sequence[Mapping[str, object]] = (),
    watcher: "ResultWatcher | None" = None,
    more_queues: Sequence[str] = (),
) -> Evidence:
    """Look everywhere, and leave everything where it is. `more_queues`: where delayed retries wait, for example."""
    ids = frozenset(submitted)
    queued: Counter[str] = Counter()
    for queue in (f"infer_req.{deployment_id}", *more_queues):
        queued.update(request_id_of(message) for message in await peek(rabbitmq_url, queue))
    dead = Counter(request_id_of(message) for message in await peek(rabbitmq_url, dlq))
    stored = await results(redis, ids)
    return Evidence(
        submitted=ids,
        queued=queued,
        results=stored,
        dead=dead,
        billed=billed,
        outbox=await outbox(redis, deployment_id),
        announced=watcher.announced if watcher else None,
        replaced=watcher.replaced(stored) if watcher else {},
    )


def _lost(evidence: Evidence) -> Iterable[str]:
    found = evidence.queued.keys() | evidence.results.keys() | evidence.dead.keys()
    if lost := evidence.submitted - found:
        yield f"lost, neither queued nor answered nor dead: {_names(lost)}"
    open_results = {
        one
        for one, result in evidence.results.items()
        if result.get("status") not in ("completed", "failed") or not isinstance(result.get("status_code"), int)
    }
    if open_results:
        yield f"a result that is not terminal: {_names(open_results)}"


def _dead_wrongly(evidence: Evidence) -> Iterable[str]:
    told = {one for one, result in evidence.results.items() if result.get("error_code") in DEAD_LETTERED}
    ours = evidence.dead.keys() & evidence.submitted
    if silent := ours - evidence.results.keys():
        yield f"in the DLQ without a result: {_names(silent)}"
    if wrong := (ours & evidence.results.keys()) - told:
        yield f"in the DLQ although the result does not say so: {_names(wrong)}"
    # A reject that was lost comes again with the redelivery: then the message is still queued.
    if missing := told - evidence.dead.keys() - evidence.queued.keys():
        yield f"the result says dead-lettered, but the message is neither in the DLQ nor queued: {_names(missing)}"


def _answered_twice(evidence: Evidence) -> Iterable[str]:
    for one, how in evidence.replaced.items():
        yield f"the result of {one} was replaced: {how}"
    if evidence.announced is None:
        return
    ours = evidence.submitted | evidence.results.keys()
    if twice := {one for one in ours if len(evidence.announced.get(one, ())) > 1}:
        yield f"a result was published more than once: {_names(twice)}"
    if never := evidence.results.keys() - evidence.announced.keys():
        yield f"a result was stored but not published: {_names(never)}"


def _billed_wrongly(evidence: Evidence) -> Iterable[str]:
    by_event: dict[str, set[str]] = {}
    by_request: dict[str, set[str]] = {}
    for one in (*evidence.billed, *evidence.outbox):
        event_id, request_id = str(one.get("id")), _billed_request(one)
        by_event.setdefault(event_id, set()).add(request_id)
        by_request.setdefault(request_id, set()).add(event_id)
    used = {one for one, result in evidence.results.items() if _tokens(result) > 0}
    if unbilled := used - by_request.keys():
        yield f"completed with tokens but not billed: {_names(unbilled)}"
    if gratis := (by_request.keys() & evidence.submitted) - used:
        yield f"billed although no completed result used tokens: {_names(gratis)}"
    if strangers := by_request.keys() - evidence.submitted:
        yield f"billed but never submitted: {_names(strangers)}"
    for request_id, events in by_request.items():
        if len(events) > 1:
            yield f"{request_id} was billed under {len(events)} event ids: {_names(events)}"
    for event_id, requests in by_event.items():
        if len(requests) > 1:
            yield f"event id {event_id} stands for {len(requests)} requests: {_names(requests)}"


def _billed_request(one: Mapping[str, object]) -> str:
    data = one.get("data")
    return str(data.get("request_id")) if isinstance(data, dict) else f"(event {one.get('id')} without data)"


def _tokens(result: Mapping[str, object]) -> int:
    body = result.get("result")
    usage = body.get("usage") if isinstance(body, dict) and result.get("status") == "completed" else None
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    return total if isinstance(total, int) else 0


def _names(ids: Collection[str], most: int = 20) -> str:
    shown = ", ".join(sorted(ids)[:most])
    return shown if len(ids) <= most else f"{shown}, … ({len(ids)} in all)"


class ResultWatcher:
    """Listens to every end that is published, and reads the result at once, so that a replacement shows.

    The channels are `infer_resp:<request_id>` of the whole server, whatever the database. It does not survive a restart
    of Redis: what is published while it is away is missed.
    """

    def __init__(self, redis_url: str, *, only: str = "") -> None:
        self.announced: dict[str, list[str]] = {}
        """By request id, the statuses that were published."""
        self.first: dict[str, bytes] = {}
        """By request id, the result as it was when it was first announced."""
        self._only = only
        self._redis: Redis = Redis.from_url(redis_url, socket_timeout=None)
        self._task: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()

    async def ended(self, ids: Collection[str], *, within: float = 30.0) -> None:
        """Wait until all of these were announced."""
        await eventually(
            lambda: self.announced.keys() >= set(ids), within=within, what=f"the published ends of {len(ids)} requests"
        )

    def replaced(self, now: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
        """Requests whose result is not any more what it first was."""
        changed = {}
        for one, before in self.first.items():
            if one in now and json.loads(before) != now[one]:
                changed[one] = f"{before[:200].decode(errors='replace')} became {json.dumps(now[one])[:200]}"
        return changed

    async def __aenter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self._watch())
        await eventually(self._listening.is_set, within=10, what="the subscription to results")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._redis.aclose()

    async def _watch(self) -> None:
        async with self._redis.pubsub() as channel:
            await channel.psubscribe(f"{RESULT}{self._only}*")
            async for message in channel.listen():
                if message["type"] == "psubscribe":
                    self._listening.set()
                elif message["type"] == "pmessage":
                    await self._note(message["channel"].decode(), message["data"].decode())

    async def _note(self, key: str, status: str) -> None:
        request_id = key.removeprefix(RESULT)
        self.announced.setdefault(request_id, []).append(status)
        stored = await self._redis.get(key)
        if isinstance(stored, bytes):
            self.first.setdefault(request_id, stored)


# Tools


@asynccontextmanager
async def channel_of(url: str) -> AsyncGenerator[AbstractChannel]:
    """A channel with confirms on a connection of its own."""
    async with await aio_pika.connect(url) as connection, connection.channel(on_return_raises=True) as channel:
        yield channel


async def publish(
    url: str,
    queue: str,
    *bodies: Mapping[str, object] | bytes,
    headers: HeadersType | None = None,
    message_id: str | None = None,
    declare: Mapping[str, str | int] | None = None,
) -> None:
    """Publish to a queue through the default exchange, persistent, each confirmed; unroutable is an error.

    With `declare`, the queue is declared durable first, with these arguments: `{}` for none.
    """
    async with channel_of(url) as channel:
        if declare is not None:
            await channel.declare_queue(queue, durable=True, arguments=dict(declare))
        for body in bodies:
            message = aio_pika.Message(
                body if isinstance(body, bytes) else json.dumps(body).encode(),
                headers=headers or {},
                message_id=message_id,
                delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            )
            await channel.default_exchange.publish(message, routing_key=queue, mandatory=True)


async def drain_queue(url: str, queue: str) -> list[AbstractIncomingMessage]:
    """Take all ready messages out; none where the queue does not exist."""
    return await _get_all(url, queue, keep=False)


async def peek(url: str, queue: str) -> list[AbstractIncomingMessage]:
    """All ready messages, which are put back; a quorum queue counts that as a delivery."""
    return await _get_all(url, queue, keep=True)


async def results(redis: Redis, ids: Iterable[str]) -> dict[str, dict[str, object]]:
    """The stored results of those that have one."""
    names = list(ids)
    if not names:
        return {}
    values = await redis.mget([RESULT + name for name in names])
    return {name: json.loads(value) for name, value in zip(names, values, strict=True) if value is not None}


async def outbox(redis: Redis, deployment_id: str) -> list[dict[str, object]]:
    """The usage events that have not been sent yet, whatever the stream's field is called."""
    entries = await redis.xrange(f"infer_usage:{deployment_id}") or []
    events: list[dict[str, object]] = []
    for _, fields in entries:
        events += [one for value in (fields or {}).values() if (one := _event(value)) is not None]
    return events


def request_id_of(message: AbstractIncomingMessage) -> str:
    """The `request_id` of the body, else the AMQP message id, else a name for what has none."""
    with suppress(ValueError):
        body = json.loads(message.body)
        if isinstance(body, dict) and isinstance(body.get("request_id"), str):
            return str(body["request_id"])
    return message.message_id or f"(no id: {message.body[:40]!r})"


def _event(value: bytes | str) -> dict[str, object] | None:
    try:
        parsed = json.loads(value)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) and "id" in parsed else None


async def _get_all(url: str, queue: str, *, keep: bool) -> list[AbstractIncomingMessage]:
    async def attempt() -> tuple[list[AbstractIncomingMessage]] | None:
        try:
            return (await _get_all_once(url, queue, keep=keep),)
        except TimeoutError:
            return None  # just after the broker's start a quorum queue has no leader yet, and `basic.get` no answer

    (found,) = await eventually(attempt, within=60, what=f"the messages of {queue}")
    return found


async def _get_all_once(url: str, queue: str, *, keep: bool) -> list[AbstractIncomingMessage]:
    found: list[AbstractIncomingMessage] = []
    async with channel_of(url) as channel:
        try:
            source = await channel.declare_queue(queue, passive=True)
        except aio_pika.exceptions.ChannelNotFoundEntity:
            return []
        while (message := await source.get(fail=False)) is not None:
            found.append(message)
        if found and keep:
            await found[-1].nack(requeue=True, multiple=True)
        elif found:
            await found[-1].ack(multiple=True)
    return found
