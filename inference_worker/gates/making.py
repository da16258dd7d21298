"""From a gate as a document names it to the gate itself: every type there is, and no other.

What is wrong is noted with its place, what is there and what is accepted; nothing is asked or connected yet. Not here:
which parameters a gate has (each gate's file reads its own), who opens the connections, and who runs the gates.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Final, Literal, assert_never, cast

import httpx
from pydantic import TypeAdapter, ValidationError

from inference_worker.config.documents import GATE_TYPES, GateConfig, GateType
from inference_worker.config.values import RedisUrl, Text
from inference_worker.errors import ConfigurationError
from inference_worker.extensions import Extensions, GateParts
from inference_worker.gates.aimd import Aimd, aimd
from inference_worker.gates.basic import (
    Constant,
    constant,
    constant_decision,
    deadline_drop,
    local_max_concurrency,
    local_rate_limit,
)
from inference_worker.gates.combined import composite, wait_on_refuse
from inference_worker.gates.from_metrics import (
    Surroundings,
    binary_metric,
    endpoint_scrape,
    prometheus_budget,
    prometheus_query,
    prometheus_saturation,
)
from inference_worker.gates.guarded import GuardedGate
from inference_worker.gates.headroom import OwnLoad, OwnLoads
from inference_worker.gates.parameters import GateSpec, Parameters
from inference_worker.gates.quota import LinkTo, redis_quota, reservation_classifier
from inference_worker.gates.redis_gates import DrainLimit, redis_budget, redis_leased_rate
from inference_worker.gates.saturation import Seen
from inference_worker.gates.tiers import tier_priority_admission
from inference_worker.ports import Gate
from inference_worker.redis_scripts import RedisLink, RedisTls

if TYPE_CHECKING:
    from inference_worker.sql_place import SqlPlace

DEEPEST: Final = 16
"""Gates inside gates."""
ADDRESS: Final = "host:port, or a redis:// or rediss:// URL"

_redis: Final = TypeAdapter[Text](RedisUrl)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Before what a gate stands; with it go all gates inside it."""

    kind: Literal["queue", "pool"]
    name: str
    pool: str
    """The pool: its own name, or that of the queue's."""


def nobody_watches(owner: Owner, inference_pool: str) -> None:
    """Nobody wants to know which gates look at metrics."""


def nobody_reads(owner: Owner, windows: Aimd) -> None:
    """Nobody wants to read windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What gates need of the process that they are in."""

    metrics: Surroundings
    """For gates that look at metrics; whom they tell is set here, by `seen`."""
    link_to: LinkTo
    """The connection to a Redis by its URL; the same one for the same URL, closed by whoever hands it out."""
    clock: Callable[[], float]
    """Loop time."""
    process: str
    """A name that no other process has: slots in Redis are held under it."""
    seen: Callable[[Owner, str, Seen], None]
    """Told of each look of a metric gate: whose it is, and the inference pool that its parameters name, if any."""
    lent: Callable[[Owner, DrainLimit], None]
    """Told of each change of a leased rate, and at its beginning."""
    sql: "SqlPlace | None" = None
    """The Postgres that has the queues, where it is one; a gate may keep its counts there."""
    watched: Callable[[Owner, str], None] = nobody_watches
    """Told of each metric gate that is made, before its first look: whose it is, and its inference pool, if any."""
    windows: Callable[[Owner, Aimd], None] = nobody_reads
    """Handed each `aimd` gate that is made: it is read, and tells nobody."""
    extensions: Extensions = field(default_factory=Extensions)
    """Gates of other packages."""
    loads: OwnLoads = field(default_factory=OwnLoads)
    """What is in flight through gates that look at metrics."""
    looks: Counter[str] = field(default_factory=Counter)
    """How many of the gates before one queue or pool look at the same metric."""
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    """Of gates that hold something under a name."""

    def holder(self) -> str:
        """A name for one gate of this process, which no other gate has anywhere."""
        return f"{self.process}/{next(self.numbers)}"


def gate_of(config: GateConfig | None, around: Around, owner: Owner) -> Gate:
    """The gate of a queue or a pool; without one it is always open.

    Raises:
        ConfigurationError: with all that is wrong with it.
    """
    problems: list[str] = []
    around = replace(around, looks=Counter())
    gate = make_gate(None if config is None else spec_of(config, problems), around, owner)
    if problems:
        raise ConfigurationError(tuple(dict.fromkeys(problems)))
    return gate


def spec_of(config: GateConfig, problems: list[str]) -> GateSpec:
    """A gate of the documents, to be made; what is wrong with it is added to `problems`."""
    given = Parameters(config.gate_params, f"{config.where}.gate_params", problems)
    return GateSpec(gate_type=config.gate_type, given=given, where=config.where)


def gate_problems(
    config: GateConfig, *, prometheus_url: str = "", extensions: Extensions | None = None
) -> tuple[str, ...]:
    """All that is wrong with a gate and with those inside it: what `documents.read_documents` asks for each."""
    problems: list[str] = []
    around = Around(
        metrics=Surroundings(
            client=httpx.AsyncClient(transport=_never, trust_env=False),
            now=lambda: 0.0,
            chance=lambda: 0.0,
            prometheus_url=prometheus_url,
        ),
        link_to=lambda _: _unopened(),
        clock=lambda: 0.0,
        process="-",
        seen=lambda _, __, ___: None,
        lent=lambda _, __: None,
        extensions=extensions or Extensions(),
    )
    make_gate(spec_of(config, problems), around, Owner(kind="pool", name="-", pool="-"))
    return tuple(dict.fromkeys(problems))


def make_gate(spec: GateSpec | None, around: Around, owner: Owner, depth: int = 1) -> Gate:
    """Make a gate; without a type it is always open. Problems are noted in `spec.given`, and the gate is harmless then.

    All gates inside it have the same owner.
    """
    if spec is None or not spec.gate_type:
        return Constant()
    gate_type = next((known for known in GATE_TYPES if known == spec.gate_type), None)
    if depth > DEEPEST and (gate_type is not None or spec.gate_type in around.extensions.names("gate")):
        spec.given.problems.append(f"{spec.where}: is {depth} gates deep; accepted: up to {DEEPEST}")
        return Constant()
    if gate_type is None:
        return _of_another_package(spec, around, owner, depth)
    return _made(gate_type, spec.given, around, owner, depth)


def _of_another_package(spec: GateSpec, around: Around, owner: Owner, depth: int) -> Gate:
    parts = GateParts(
        given=spec.given,
        stands_at=owner.kind,
        name=owner.name,
        pool=owner.pool,
        now=around.metrics.now,
        clock=around.clock,
        chance=around.metrics.chance,
        holder=around.holder(),
        link_to=lambda address: _link(address, spec.given, around),
        client=around.metrics.client,
        prometheus_url=around.metrics.prometheus_url,
        build=lambda inner: make_gate(inner, around, owner, depth + 1),
    )
    made = around.extensions.make("gate", spec.gate_type, parts, _place(spec))
    return Constant() if made is None else GuardedGate(cast(Gate, made), spec.gate_type)


def _made(gate_type: GateType, given: Parameters, around: Around, owner: Owner, depth: int) -> Gate:
    def build(inner: GateSpec) -> Gate:
        return make_gate(inner, around, owner, depth + 1)

    def link_to(address: str) -> RedisLink:
        return _link(address, given, around)

    match gate_type:
        case "constant":
            return constant(given)
        case "constant-decision":
            return constant_decision(given)
        case "deadline-drop":
            return deadline_drop(given, around.metrics.now)
        case "local-max-concurrency":
            return local_max_concurrency(given)
        case "local-rate-limit":
            return local_rate_limit(given, around.clock)
        case "aimd":
            learning = aimd(given, around.clock)
            around.windows(owner, learning)
            return learning
        case "composite":
            return composite(given, build)
        case "wait-on-refuse":
            return wait_on_refuse(given, build)
        case "tier-priority-admission":
            return tier_priority_admission(given, build)
        case "prometheus-saturation":
            return prometheus_saturation(given, _seen_by(around, owner, given.text("pool", "")))
        case "prometheus-budget":
            return prometheus_budget(given, _seen_by(around, owner, given.text("pool", "")))
        case "prometheus-query":
            return prometheus_query(given, _seen_by(around, owner, given.text("pool", "")))
        case "endpoint-scrape":
            return endpoint_scrape(given, _seen_by(around, owner, ""))
        case "binary-metric":
            return binary_metric(given, _seen_by(around, owner, ""))
        case "redis":
            return redis_budget(given, link_to)
        case "redis-quota":
            return redis_quota(given, link_to, holder=around.holder())
        case "sql-quota":
            from inference_worker.gates.quota_sql import sql_quota

            return sql_quota(given, around.sql, holder=around.holder)
        case "redis-leased-rate":
            return redis_leased_rate(given, link_to, pool_id=owner.pool, told=lambda limit: around.lent(owner, limit))
        case "reservation-classifier":
            return reservation_classifier(given, link_to, holder=around.holder())
        case _:
            assert_never(gate_type)


def redis_url(address: str) -> str:
    """The URL of a Redis that a document names, often as `host:port`.

    Raises:
        ValueError: it is no address.
    """
    try:
        return _redis.validate_python(address if "://" in address else f"redis://{address}").now()
    except ValidationError as exc:
        # The cause is left out: it shows the address, which may hold a password.
        raise ValueError(str(exc.errors()[0]["ctx"]["error"])) from None


def _link(address: str, given: Parameters, around: Around) -> RedisLink:
    if not address:  # Which was noted.
        return _unopened()
    try:
        return around.link_to(redis_url(address))
    except ValueError as exc:
        given.problems.append(f"{given.where}.address: {exc}; accepted: {ADDRESS}")
        return _unopened()


def _seen_by(around: Around, owner: Owner, inference_pool: str) -> Surroundings:
    around.watched(owner, inference_pool)

    def own(what: str, remembered_s: float) -> OwnLoad:
        around.looks[what] += 1
        return around.loads.of(owner.kind, around.looks[what], what, remembered_s)

    return replace(
        around.metrics,
        place=f"{owner.kind} {owner.name}",
        own=own,
        told=lambda seen: around.seen(owner, inference_pool, seen),
    )


def _place(spec: GateSpec) -> str:
    """A type stands under `gate_type`; the one inside a tier gate stands in a parameter of its own."""
    return spec.where if spec.where.endswith(".saturation_gate") else f"{spec.where}.gate_type"


def _unopened() -> RedisLink:
    """For gates that are made to see whether they can be, and thrown away."""
    return RedisLink(lambda: "", lambda: None, client_name="-", tls=RedisTls())


def _nobody(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("this gate was made to be looked at")


_never: Final = httpx.MockTransport(_nobody)
