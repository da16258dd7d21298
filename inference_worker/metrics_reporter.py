"""What leaves the worker for its operator: metric batches, best effort, and usage events, at least once.

Two loops that know nothing of each other, so that neither sink can hold up the other. Nobody waits for them.
"""

import asyncio
import random
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Final, TypeVar, assert_never

import httpx
import msgspec
import structlog

from inference_worker.errors import SinkUnavailable, StoreUnavailable
from inference_worker.metrics import ModelLoad, WorkerMetrics
from inference_worker.metrics_buffer import MetricsBuffer, RequestRecord
from inference_worker.ports import BillingSink, Delivered, Health, Outbox, OutboxEntry, Refused
from inference_worker.timing import ended, stopped_within

log = structlog.get_logger(__name__)
T = TypeVar("T")

FINAL_BILLING_S: Final = 3.0
FINAL_METRICS_S: Final = 2.0
"""After being told to stop. Each sink has its own, or the first one that hangs would starve the other."""

EVENTS_A_BATCH: Final = 100
FIRST_BACKOFF_S: Final = 1.0
LONGEST_BACKOFF_S: Final = 60.0
LONGEST_RETRY_AFTER_S: Final = 600.0


async def report(reporter: "MetricsReporter", drainer: "BillingDrainer | None", until: asyncio.Event) -> None:
    """Run both until told to stop; then the last usage events go first, and the last metrics after them."""
    billed = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reporter.run(billed))
        if drainer is None:
            await until.wait()
        else:
            await drainer.run(until)
        billed.set()


class MetricsReporter:
    """Sends what the buffer holds, with a look at the rest, at every interval and once more at the end.

    A batch that does not arrive is dropped, and the next one says how many records that cost. With `url` None nothing
    is sent; the model is still asked for its load, for Prometheus.
    """

    def __init__(
        self,
        *,
        url: Callable[[], str] | None,
        token: Callable[[], str | None],
        buffer: MetricsBuffer,
        health: Health,
        metrics: WorkerMetrics,
        scrape_model: Callable[[], Awaitable[ModelLoad | None]],
        scrape_gpus: Callable[[], Awaitable[Sequence[object]]],
        backlog: Callable[[], Awaitable[int | None]],
        now: Callable[[], float],
        deployment_id: str,
        replica_id: str,
        user_id: str,
        org_id: str,
        hf_model_id: str,
        flush_interval_s: float,
        timeout_s: float = 10.0,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url
        self._token = token
        self._buffer = buffer
        self._health = health
        self._metrics = metrics
        self._scrape_model = scrape_model
        self._scrape_gpus = scrape_gpus
        self._backlog = backlog
        self._now = now
        self._identity = {
            "deployment_id": deployment_id,
            "replica_id": replica_id,
            "user_id": user_id,
            "org_id": org_id,
            "hf_model_id": hf_model_id,
        }
        self._flush_interval_s = flush_interval_s
        self._timeout_s = timeout_s
        self._verify = verify
        self._transport = transport
        self._trouble: str | None = None

    async def run(self, until: asyncio.Event) -> None:
        """Flush until told to stop, and once more then; over within `FINAL_METRICS_S` of being told."""
        used_s = 0.0
        async with self._client() as client:
            while not await stopped_within(until, self._flush_interval_s):
                # Half of the end's time for a flush that is under way, or a sink that hangs would cost the last one.
                used_s = await _cut_short(self._flush(client, self._timeout_s), until, grace_s=FINAL_METRICS_S / 2)
            await self._flush(client, FINAL_METRICS_S - used_s)

    async def _flush(self, client: httpx.AsyncClient, within_s: float) -> None:
        """Send one batch. Fails silently but for one line per change of trouble."""
        records, dropped = self._buffer.take()
        arrived = False
        try:
            async with asyncio.timeout(within_s):
                # At most half of the time for looking round, or a model that hangs would cost the batch.
                body = await self._batch(records, dropped, within_s=within_s / 2)
                if self._url is not None:
                    await self._post(client, f"{self._url()}/metrics", body)
            arrived = True
        except (TimeoutError, httpx.TimeoutException):
            self._failed(f"no answer within {within_s:g} s", len(records))
        except Exception as exc:  # noqa: BLE001 - best effort: the next flush must come, whatever became of this one
            self._failed(f"{type(exc).__name__}: {exc}", len(records))
        else:
            self._succeeded()
        finally:
            if not arrived:  # Also when cut off at the end.
                self._buffer.not_sent(len(records), dropped)

    async def _batch(self, records: Sequence[RequestRecord], dropped: int, *, within_s: float) -> bytes:
        load, gpus, queue_depth = await asyncio.gather(
            _or_none(self._scrape_model, within_s),
            _or_none(self._scrape_gpus, within_s),
            _or_none(self._backlog, within_s),
        )
        self._metrics.scraped(load)
        self._metrics.backlog(queue_depth)
        return msgspec.json.encode(
            {
                **self._identity,
                "sent_at": self._now(),
                "requests": records,
                "health": {"healthy": self._health.ok, "checked_at": self._health.checked_at},
                "model": {
                    "kv_cache_usage": None if load is None else load.kv_cache_usage,
                    "requests_running": None if load is None else load.requests_running,
                    "requests_waiting": None if load is None else load.requests_waiting,
                },
                "gpus": gpus or (),
                "queue_depth": queue_depth,
                "dropped": dropped,
            }
        )

    async def _post(self, client: httpx.AsyncClient, url: str, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        if token := self._token():
            headers["Authorization"] = f"Bearer {token}"
        async with client.stream("POST", url, content=body, headers=headers) as response:
            if not response.is_success:
                raise SinkUnavailable(f"HTTP {response.status_code}")

    def _failed(self, reason: str, records: int) -> None:
        self._metrics.flush_failed("metrics")
        if reason != self._trouble:
            log.warning("the metric server did not take a batch; it is dropped", reason=reason, records=records)
        self._trouble = reason

    def _succeeded(self) -> None:
        if self._trouble is not None:
            log.info("the metric server takes batches again")
        self._trouble = None

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers={"Accept-Encoding": "identity"},
            timeout=None,  # One limit for the whole flush instead.
            trust_env=False,
            verify=self._verify,
            transport=self._transport,
        )


class BillingDrainer:
    """Empties the outbox into the billing receiver. An event leaves the outbox only after an answer for it."""

    def __init__(
        self,
        outbox: Outbox,
        sink: BillingSink,
        metrics: WorkerMetrics,
        *,
        rng: random.Random,
        flush_interval_s: float,
        warn_at: int = 10_000,
        alarm_at: int = 1_000_000,
    ) -> None:
        self._outbox = outbox
        self._sink = sink
        self._metrics = metrics
        self._rng = rng
        self._flush_interval_s = flush_interval_s
        self._thresholds = (warn_at, alarm_at)
        self._crossed = 0
        self._groups: deque[list[OutboxEntry]] = deque()
        """Taken and not done with: the outbox hands them to nobody else for a minute, nor to us."""
        self._answer: Delivered | Refused | None = None
        """The receiver's, for the first group, until the outbox knows of it."""
        self._failures = 0
        self._trouble: str | None = None
        self._pause_s = flush_interval_s

    async def run(self, until: asyncio.Event) -> None:
        """Drain until told to stop, and once more then; over within `FINAL_BILLING_S` of being told."""
        used_s = 0.0
        while not await stopped_within(until, self._pause_s):
            used_s = await _cut_short(self._round(), until, grace_s=FINAL_BILLING_S)
        final = asyncio.create_task(self._round())
        try:
            await asyncio.wait([final], timeout=FINAL_BILLING_S - used_s)
        finally:
            await ended(final)

    async def _round(self) -> None:
        """Drain what is there, and find how long to pause then."""
        try:
            await self._drain()
        except SinkUnavailable as exc:
            self._pause_s = self._failed(str(exc), exc.retry_after_s)
        except StoreUnavailable:
            self._pause_s = self._flush_interval_s  # Who looks after the store says so.
        except Exception as exc:  # Billing must go on, whatever was wrong with one round.
            log.exception("a round of billing failed")
            self._pause_s = self._failed(f"{type(exc).__name__}: {exc}", None)
        else:
            self._pause_s = self._flush_interval_s
            self._failures = 0
            if self._trouble is not None:
                log.info("the billing receiver takes events again")
            self._trouble = None
        try:
            await self._measure()
        except StoreUnavailable:
            pass
        except Exception:  # As above.
            log.exception("the outbox could not be measured")

    async def _drain(self) -> None:
        """Batch after batch, while full ones come."""
        more = True
        while more:
            if not self._groups:
                taken = list(await self._outbox.take(EVENTS_A_BATCH))
                more = len(taken) >= EVENTS_A_BATCH
                if taken:
                    self._groups.append(taken)
            while self._groups:
                await self._send_first_group()
            if more:
                await self._measure()

    async def _send_first_group(self) -> None:
        group = self._groups[0]
        if self._answer is None:
            self._answer = await self._sink.send([entry.event for entry in group])
        answer = self._answer
        match answer:
            case Refused() if len(group) > 1:
                # One of them, or some: alone, none can block the rest.
                self._groups.popleft()
                self._groups.extendleft([entry] for entry in reversed(group))
                self._answer = None
                return
            case Refused(reason=reason):
                await self._outbox.refused(group[0], reason)
                self._metrics.events("refused", 1)
                log.error(
                    "the billing receiver refused a usage event; it is put aside",
                    entry_id=group[0].entry_id,
                    reason=reason.partition(":")[0],
                )
            case Delivered():
                await self._outbox.sent(group)
                self._metrics.events("sent", len(group))
            case _:
                assert_never(answer)
        self._groups.popleft()
        self._answer = None

    async def _measure(self) -> None:
        """Tell how many events wait: in a gauge, and in one line for each threshold crossed."""
        size = await self._outbox.size()
        self._metrics.outbox_events.set(size)
        crossed = sum(size >= threshold for threshold in self._thresholds)
        if crossed > self._crossed:
            tell = log.warning if crossed < len(self._thresholds) else log.error
            tell("usage events pile up", events=size, threshold=self._thresholds[crossed - 1])
        elif crossed < self._crossed:
            log.info("fewer usage events wait", events=size, threshold=self._thresholds[crossed])
        self._crossed = crossed

    def _failed(self, reason: str, retry_after_s: float | None) -> float:
        """Note a failure; return how long to wait.

        Equal jitter, as at a retry (`disposition.retry_delay_s`); a Retry-After is a floor under it.
        """
        self._failures += 1
        self._metrics.flush_failed("billing")
        if reason != self._trouble:
            log.warning("the billing receiver does not take events; they are kept", reason=reason)
        self._trouble = reason
        whole_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self._failures - 1, 30))
        return max(self._rng.uniform(whole_s / 2, whole_s), min(retry_after_s or 0.0, LONGEST_RETRY_AFTER_S))


async def _cut_short(work: Coroutine[object, object, None], until: asyncio.Event, *, grace_s: float) -> float:
    """Run `work`; once told to stop, for `grace_s` more at most. Returns how many seconds it ran on then."""
    loop = asyncio.get_running_loop()
    task, told = asyncio.create_task(work), asyncio.create_task(until.wait())
    try:
        await asyncio.wait([task, told], return_when=asyncio.FIRST_COMPLETED)
        told_at = loop.time()
        await asyncio.wait([task], timeout=grace_s)
        return loop.time() - told_at
    finally:
        await ended(told)
        await ended(task)


async def _or_none(ask: Callable[[], Awaitable[T]], within_s: float) -> T | None:
    """An answer within its time, or None: what is not known is not a reason to send nothing."""
    try:
        async with asyncio.timeout(within_s):
            return await ask()
    except Exception as exc:  # noqa: BLE001 - see above
        log.debug("no number for the metric server", reason=f"{type(exc).__name__}: {exc}")
        return None
