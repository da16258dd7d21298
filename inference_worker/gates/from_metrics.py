"""Makes the gates of `saturation` from a document's parameters. What is wrong is noted there; nothing is asked yet.

Beyond the parameters that others know: `max_age` (how old a sample may be), `lag` (how much older it is than it says),
`replicas` (how many processes take from the same pool), and for those that do not know how much one request is,
`max_concurrency` or `capacity`; without it that is learned, and the first seconds are slow.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import httpx
from pydantic import TypeAdapter, ValidationError

from inference_worker.config.values import PageUrl, Text, without_user
from inference_worker.gates.headroom import OwnLoad
from inference_worker.gates.parameters import Parameters
from inference_worker.gates.queries import PoolQueries, Query
from inference_worker.gates.saturation import (
    BinaryGate,
    Bounds,
    CountedGate,
    MetricGate,
    Pace,
    Told,
    alone,
    untold,
)
from inference_worker.gates.sources import (
    ANSWER_S,
    MAX_AGE_S,
    REFRESH_S,
    Cascade,
    Measurement,
    MetricSource,
    Missing,
    Now,
    PageSum,
    PromQl,
    Series,
)

NO_POOL: Final = "-"
"""Stands for a pool's name that is missing, which was noted."""

_page: Final = TypeAdapter[Text](PageUrl)

OwnOf = Callable[[str, float], OwnLoad]
"""What is in flight through all gates that look at the same as this one, which is named; remembered so many seconds."""


def of_its_own(what: str, remembered_s: float) -> OwnLoad:
    """For a gate that nothing else is counted with."""
    return OwnLoad(remembered_s=remembered_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the gates of a process that look at metrics have in common."""

    client: httpx.AsyncClient
    now: Now
    """Unix seconds."""
    chance: Callable[[], float]
    """Uniform in [0, 1)."""
    prometheus_url: str = ""
    refresh_s: float = REFRESH_S
    own: OwnOf = of_its_own
    """Shared by gates that look at the same, and that no request passes two of."""
    sharers: Callable[[], int] = alone
    """How many processes take from the same pool; the parameter `replicas` stands above it."""
    told: Told = untold
    place: str = ""
    """Before what the gate stands, for people."""


def prometheus_saturation(given: Parameters, around: Surroundings) -> MetricGate:
    """Closed from a saturation on that the router itself reports. Its fallback is a saturation: 0 is open."""
    pool, namespace = given.text("pool"), given.text("namespace", "")
    threshold = given.number("threshold", 0.8)
    fallback = given.number("fallback", 0.0)
    each = given.number("max_concurrency", above=0) if given.has("max_concurrency") else None
    query = PoolQueries(pool or NO_POOL, namespace, each).saturation()
    bounds = Bounds(
        baseline=1 - threshold,
        fallback=_part(1 - fallback),
        closes_at=f"closed at a saturation of {threshold:g} and above; without a reading {_without(1 - fallback)}",
    )
    pace = _pace(given, around)
    source = _prometheus(given, around, (query,), pace)
    return _gate(given, around, source, bounds, pace, name=f"saturation of {pool}", what=query.budget)


def prometheus_budget(given: Parameters, around: Surroundings) -> MetricGate:
    """Closed while no more than a baseline of the pool is free, by the first of three sources that says."""
    pool, namespace = given.text("pool"), given.text("namespace", "")
    each = given.number("max_concurrency", 100.0, above=0)
    baseline = given.number("baseline", 0.05, at_least=0, below=1)
    fallback = given.number("fallback", 0.0)
    queries = PoolQueries(pool or NO_POOL, namespace, each).budgets()
    bounds = Bounds(
        baseline=baseline,
        fallback=_part(fallback),
        closes_at=f"closed at {each * (1 - baseline):g} requests for each ready pod ({each:g} x (1 - {baseline:g})); "
        f"without a reading {_without(fallback)}",
    )
    pace = _pace(given, around)
    source = _prometheus(given, around, queries, pace)
    return _gate(given, around, source, bounds, pace, name=f"budget of {pool}", what=queries[0].budget)


def prometheus_query(given: Parameters, around: Surroundings) -> MetricGate:
    """The value of any expression is the budget. `pool` is a label alone."""
    text, pool = given.text("query"), given.text("pool", "")
    fallback = given.number("fallback", 0.0)
    capacity = given.number("capacity", above=0) if given.has("capacity") else None
    bounds = Bounds(
        baseline=0.0,
        fallback=_part(fallback),
        closes_at=f"closed while the query gives 0 or less; without a reading {_without(fallback)}",
    )
    pace = _pace(given, around)
    source = _Scaled(_prometheus(given, around, (Query(budget=text),), pace), capacity)
    return _gate(given, around, source, bounds, pace, name=f"query for {pool}" if pool else "query", what=text)


def endpoint_scrape(given: Parameters, around: Surroundings) -> MetricGate | CountedGate:
    """A metric of any page: how much of a capacity is used, or the budget itself."""
    url, metric, labels = given.text("url"), given.text("metric"), given.texts("labels")
    url = _checked_url(given, "url", url)
    each = given.number("max_count_per_pod", 0.0, at_least=0)
    is_budget = given.choice("value_type", ("saturation", "budget"), "saturation") == "budget"
    counted = given.choice("admission", ("budget", "counted"), "budget") == "counted"
    absent = given.number("absent_value") if given.has("absent_value") else None
    pods, pace = _pods(given, around, url), _pace(given, around)
    if counted and (is_budget or each <= 0):
        given.wrong("admission", '"counted" only with a max_count_per_pod above 0, of a saturation')
    if counted and (given.has("baseline") or given.has("fallback")):
        given.wrong("admission", '"counted" without baseline and fallback, which it does not use')
    baseline = given.number("baseline", 0.0, at_least=0, below=1)
    fallback = given.number("fallback", 0.0)
    # Parts do not add up: the fullest of several counts. Nor do budgets: the smallest.
    joined: Callable[[Sequence[float]], float] = min if is_budget else sum if each > 0 else max
    series = Series(url=url, metric=metric, labels=labels)
    page = PageSum(around.client, series, joined=joined, absent=absent, within_s=ANSWER_S)
    source = page if is_budget else _Used(page, pods, each)
    what = metric if is_budget or each <= 0 else f"{metric} / ({each:g} x pods)"
    if counted:
        closes_at = f"each reading of {metric} grants what is left of {each:g} for each pod; without one closed"
        given.finish()
        return CountedGate(
            source, pace, name=_named(f"{metric} of {without_user(url)}", around), closes_at=closes_at, told=around.told
        )
    at = f"is {baseline:g} or less" if is_budget else f"is {1 - baseline:g} or more"
    bounds = Bounds(
        baseline=baseline,
        fallback=_part(fallback),
        closes_at=f"closed while {what} {at}; without a reading {_without(fallback)}",
    )
    return _gate(
        given,
        around,
        source,
        bounds,
        pace,
        name=f"{metric} of {without_user(url)}",
        what=f"{url} {metric} {sorted(labels.items())}",
    )


def binary_metric(given: Parameters, around: Surroundings) -> BinaryGate:
    """A query that gives 0 while work may be sent."""
    text = given.text("query")
    pace = _pace(given, around)
    source = _prometheus(given, around, (Query(budget=text),), pace)
    given.finish()
    return BinaryGate(source, pace, name=_named("binary metric", around), told=around.told)


# ---------------------------------------------------------------- parts


class _Scaled:
    """A source with a capacity that was configured."""

    def __init__(self, source: MetricSource, capacity: float | None) -> None:
        self._source = source
        self._capacity = capacity

    async def read(self) -> Measurement | Missing:
        found = await self._source.read()
        if isinstance(found, Missing) or self._capacity is None:
            return found
        return Measurement(value=found.value, age_s=found.age_s, capacity=self._capacity, source=found.source)


class _Used:
    """What is free, from what is used: of so much for each pod, of so much in all, or of 1."""

    def __init__(self, used: MetricSource, pods: MetricSource | None, each: float) -> None:
        self._used = used
        self._pods = pods
        self._each = each

    async def read(self) -> Measurement | Missing:
        used = await self._used.read()
        if isinstance(used, Missing):
            return used
        if self._each <= 0:
            return Measurement(value=1 - _part(used.value))
        pods = Measurement(value=1.0) if self._pods is None else await self._pods.read()
        if isinstance(pods, Missing):
            return Missing(reason=f"the number of pods: {pods.reason}")
        capacity = pods.value * self._each
        free = 1 - _part(used.value / capacity) if capacity > 0 else 0.0
        return Measurement(value=free, capacity=max(capacity, 0.0))


def _pods(given: Parameters, around: Surroundings, url: str) -> MetricSource | None:
    at, metric, labels = (
        given.text("pods_url", url or NO_POOL),
        given.text("pods_metric", ""),
        given.texts("pods_labels"),
    )
    if given.has("pods_url"):
        at = _checked_url(given, "pods_url", at)
    if metric:
        return PageSum(around.client, Series(url=at, metric=metric, labels=labels), within_s=ANSWER_S)
    if given.has("pods_url") or labels:
        given.wrong("pods_metric", "the name of a metric, where pods_url or pods_labels is given")
    return None


def _checked_url(given: Parameters, name: str, url: str) -> str:
    """Note what can never be read. Not shown: it may hold a password."""
    try:
        return _page.validate_python(url).now() if url else NO_POOL  # Its absence was noted already.
    except ValidationError as exc:
        given.problems.append(f"{given.where}.{name}: {exc.errors()[0]['ctx']['error']}")
        return NO_POOL


def _prometheus(given: Parameters, around: Surroundings, queries: Sequence[Query], pace: Pace) -> MetricSource:
    if not around.prometheus_url:
        given.problems.append(f"{given.where}: this gate asks Prometheus; give its address with --prometheus-url")
    # The age limit is the watch's affair, too; here it has a cascade go on to its next source.
    sources = [
        PromQl(around.client, around.prometheus_url, query, now=around.now, max_age_s=pace.max_age_s)
        for query in queries
    ]
    return sources[0] if len(sources) == 1 else Cascade(sources)


def _gate(
    given: Parameters, around: Surroundings, source: MetricSource, bounds: Bounds, pace: Pace, *, name: str, what: str
) -> MetricGate:
    """`name` is for people, `what` says at what it looks."""
    replicas = given.whole("replicas", at_least=1) if given.has("replicas") else None
    given.finish()
    return MetricGate(
        source,
        bounds,
        pace,
        name=_named(name, around),
        chance=around.chance,
        own=around.own(what, pace.max_age_s + pace.refresh_s),
        sharers=around.sharers if replicas is None else lambda: replicas,
        told=around.told,
    )


def _named(name: str, around: Surroundings) -> str:
    return f"{name}, before {around.place}" if around.place else name


def _pace(given: Parameters, around: Surroundings) -> Pace:
    return Pace(
        refresh_s=around.refresh_s,
        max_age_s=given.seconds("max_age", MAX_AGE_S, above=0),
        lag_s=given.seconds("lag", 0.0, at_least=0),
    )


def _part(value: float) -> float:
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0


def _without(budget: float) -> str:
    return "open" if _part(budget) >= 1 else "closed" if _part(budget) <= 0 else f"a budget of {_part(budget):g}"
