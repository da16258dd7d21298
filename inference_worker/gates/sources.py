"""Where a gate's number comes from, and a watch that keeps the last one at hand.

Nobody who asks a gate waits for a query, the very first one apart: `Watch.run` looks in the background, and others take
what it has seen. A look that fails is followed by another one soon; the last good sample holds meanwhile, never longer
than its age limit. What a number means, and what goes without one, is the gate's affair.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

import httpx
import msgspec
import structlog

from inference_worker.gates.queries import Query
from inference_worker.scraping import NotRead, Sample, scrape_samples
from inference_worker.timing import ended, first_of

log = structlog.get_logger(__name__)

REFRESH_S: Final = 5.0
"""Between two looks."""
MAX_AGE_S: Final = 60.0
"""Two scrapes of half a minute."""
ANSWER_S: Final = 10.0
"""For one look."""
AGAIN_S: Final = 1.0
"""After a failed look the next one comes this soon, where it would not come sooner anyway."""
SOONEST_S: Final = 0.1
LONGEST_ANSWER_BYTES: Final = 1024 * 1024

Now = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A number that came out of a look."""

    value: float
    """The free part of the capacity, or whatever the gate makes of it."""
    age_s: float = 0.0
    """How old it was when it came."""
    capacity: float | None = None
    """Requests that make the whole capacity, where the source knows."""
    source: int = 0
    """Which of several sources it is from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """There is no number."""

    reason: str


class MetricSource(Protocol):
    """Somebody who can be asked for a number. Never fails, and has a time limit of its own."""

    async def read(self) -> Measurement | Missing:
        """Ask."""


# ---------------------------------------------------------------- Prometheus


class PromQl:
    """An instant query. Of several samples the first counts; a sample whose own time is too long ago is missing."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        base_url: str,
        query: Query,
        *,
        now: Now,
        max_age_s: float = MAX_AGE_S,
        within_s: float = ANSWER_S,
    ) -> None:
        self._client = client
        self._url = f"{base_url.rstrip('/')}/api/v1/query"
        self._query = query
        self._now = now
        self._max_age_s = max_age_s
        self._within_s = within_s

    async def read(self) -> Measurement | Missing:
        """See `MetricSource`. Value, time and capacity are asked for at once."""
        try:
            async with asyncio.timeout(self._within_s), asyncio.TaskGroup() as group:
                budget = group.create_task(self._ask(self._query.budget))
                measured = group.create_task(self._ask(self._query.measured))
                capacity = group.create_task(self._ask(self._query.capacity))
        except TimeoutError:
            return Missing(reason=f"no whole answer within {self._within_s:g} s")
        return self._joined(budget.result(), measured.result(), capacity.result())

    def _joined(self, budget: "_Answer", measured: "_Answer", capacity: "_Answer") -> Measurement | Missing:
        if isinstance(budget, str):
            return Missing(reason=budget)
        evaluated_at, value = budget
        # Prometheus stamps an answer with the time of the question; only the samples' own time tells their age.
        stamp = evaluated_at if isinstance(measured, str) else measured[1]
        age_s = max(self._now() - stamp, 0.0)
        if age_s > self._max_age_s:
            return Missing(reason=f"the sample is {age_s:.0f} s old")
        known = None if isinstance(capacity, str) else capacity[1]
        return Measurement(value=value, age_s=age_s, capacity=known)

    async def _ask(self, query: str | None) -> "_Answer":
        """Time and value of the first sample, or why there is none. Never raises."""
        if query is None:
            return "not asked"
        try:
            async with self._client.stream(
                "GET", self._url, params={"query": query}, follow_redirects=False
            ) as response:
                body = bytearray()
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > LONGEST_ANSWER_BYTES:
                        return f"an answer of more than {LONGEST_ANSWER_BYTES} bytes"
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as exc:
            return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
        if response.status_code != 200:
            return f"status {response.status_code}"
        return _first_sample(bytes(body))


_Answer = tuple[float, float] | str


class _Vector(msgspec.Struct):
    value: tuple[float, str]


class _Data(msgspec.Struct, rename="camel"):
    result_type: Literal["vector", "scalar"]
    result: msgspec.Raw


class _Reply(msgspec.Struct):
    data: _Data


def _first_sample(body: bytes) -> _Answer:
    try:
        data = msgspec.json.decode(body, type=_Reply).data
        if data.result_type == "scalar":
            at, text = msgspec.json.decode(data.result, type=tuple[float, str])
        else:
            vector = msgspec.json.decode(data.result, type=list[_Vector])
            if not vector:
                return "no such series"
            at, text = vector[0].value
        value = float(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return "an answer that is no vector"
    return (at, value) if math.isfinite(value) else f"the value is {text}"


# ---------------------------------------------------------------- a page of metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A metric on a page, with labels that it must have."""

    url: str
    metric: str
    labels: Mapping[str, str]

    def of(self, samples: Sequence[Sample]) -> list[float]:
        """The finite values of what matches."""
        return [
            sample.value
            for sample in samples
            if math.isfinite(sample.value)
            and sample.name == self.metric
            and all(sample.labels.get(name) == value for name, value in self.labels.items())
        ]


class PageSum:
    """The values of a series on a page, joined: added up where they are counts."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        series: Series,
        *,
        joined: Callable[[Sequence[float]], float] = sum,
        absent: float | None = None,
        within_s: float = ANSWER_S,
    ) -> None:
        self._client = client
        self._series = series
        self._joined = joined
        self._absent = absent
        self._within_s = within_s

    async def read(self) -> Measurement | Missing:
        """See `MetricSource`. `absent` stands for a series that the page lacks, not for a page that cannot be had."""
        names = frozenset({self._series.metric})
        page = await scrape_samples(self._client, self._series.url, names, within_s=self._within_s)
        if isinstance(page, NotRead):
            return Missing(reason=page.reason)
        values = self._series.of(page)
        if values:
            return Measurement(value=self._joined(values))
        return Missing(reason="no such series") if self._absent is None else Measurement(value=self._absent)


# ---------------------------------------------------------------- several


class Cascade:
    """Several sources for one number: the first that has one is heard. Which one that is, is logged when it changes."""

    def __init__(self, sources: Sequence[MetricSource]) -> None:
        if len(sources) < 2:
            raise ValueError(f"a cascade needs at least two sources, not {len(sources)}")
        self._sources = sources
        self.heard: int | None = None
        """Which one spoke last; None where none did."""

    async def read(self) -> Measurement | Missing:
        """See `MetricSource`."""
        reasons = []
        for number, source in enumerate(self._sources):
            found = await source.read()
            if isinstance(found, Measurement):
                self._note(number)
                return replace(found, source=number)
            reasons.append(f"source {number + 1} of {len(self._sources)}: {found.reason}")
        self._note(None)
        return Missing(reason="; ".join(reasons))

    def _note(self, number: int | None) -> None:
        if number != self.heard:
            log.info("a gate takes its number from another source", before=self.heard, now=number)
            self.heard = number


# ---------------------------------------------------------------- the watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The last good sample."""

    value: float
    at: float
    """Loop time at which it was true."""
    capacity: float | None
    source: int


class Watch:
    """Looks at a source again and again, and keeps what it saw."""

    def __init__(
        self,
        source: MetricSource,
        *,
        name: str,
        refresh_s: float = REFRESH_S,
        max_age_s: float = MAX_AGE_S,
        lag_s: float = 0.0,
        told: Callable[["Reading | None"], None],
    ) -> None:
        self._source = source
        self._name = name
        self._refresh_s = max(refresh_s, SOONEST_S)
        self._max_age_s = max_age_s
        self._lag_s = lag_s
        self._told = told
        self._last: Reading | None = None
        self._was: bool | None = None
        self._looked = asyncio.Event()
        self.why_not = ""
        """Why the last look saw nothing; empty where it saw something."""

    @property
    def looked(self) -> bool:
        """Whether a first look has ended, whatever came of it."""
        return self._looked.is_set()

    async def first_look(self) -> None:
        """Return once a first look has ended, or it has taken too long. The one wait there is: when a process starts.

        Else a gate that is open without a number would let everybody through before it has looked at all.
        """
        if not self._looked.is_set():
            await first_of(self._looked, within_s=ANSWER_S)

    def reading(self) -> Reading | None:
        """The last good sample, if it is not too old."""
        if self._last is None or asyncio.get_running_loop().time() - self._last.at > self._max_age_s:
            return None
        return self._last

    async def run(self, until: asyncio.Event) -> None:
        """Look until told to stop; a look that is under way then is broken off."""
        looking = asyncio.create_task(self._look_for_ever(), name=f"watch of {self._name}")
        try:
            await first_of(until)
        finally:
            await ended(looking)

    async def look(self) -> bool:
        """Look once; say whether there was something to see. Never raises."""
        loop = asyncio.get_running_loop()
        try:
            found = await self._source.read()
        except Exception as exc:
            log.exception("the look of a gate failed", gate=self._name)  # A fault of ours; the gate must live on.
            found = Missing(reason=type(exc).__name__)
        self.why_not = found.reason if isinstance(found, Missing) else ""
        seen: Reading | None = None
        if isinstance(found, Measurement):
            at = loop.time() - found.age_s - self._lag_s
            seen = Reading(value=found.value, at=at, capacity=found.capacity, source=found.source)
            # A reading that was on its way for long is no news over a younger one.
            if self._last is None or seen.at >= self._last.at:
                self._last = seen
        self._say(seen, found)
        try:
            self._told(seen)
        except Exception:
            log.exception("what a gate saw could not be taken in", gate=self._name)  # As above.
        self._looked.set()
        return seen is not None

    async def _look_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            seen = await self.look()
            pause_s = self._refresh_s if seen else min(self._refresh_s, AGAIN_S)
            await asyncio.sleep(max(began + pause_s - loop.time(), SOONEST_S))

    def _say(self, seen: Reading | None, found: Measurement | Missing) -> None:
        if (seen is not None) == self._was:
            return
        self._was = seen is not None
        match found:
            case Missing(reason=reason):
                log.warning("a gate cannot see its number", gate=self._name, reason=reason)
            case Measurement(value=value):
                log.info("a gate sees its number", gate=self._name, value=value)
