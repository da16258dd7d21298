"""Parts from other Python packages, found by entry points: gates, merge policies, transports, transforms, sinks.

A package names a factory in the group of its kind. It is loaded when a document or a variable uses its name, and at no
other time; built-in names are never looked for here, so that none can be taken over. What is wrong with one is a
problem of the configuration, and names the package. Not here: what a part does, and what becomes of its faults while it
runs (the files named `guarded`).
"""

import random
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Final, Literal

import httpx
from prometheus_client import CollectorRegistry

from inference_worker.config.documents import (
    ANSWER_TRANSFORM_TYPES,
    GATE_TYPES,
    KINDS,
    MERGE_TYPES,
    TRANSFORM_TYPES,
    PartKind,
)
from inference_worker.config.parts import CROESUS
from inference_worker.errors import ConfigurationError
from inference_worker.faults import Thrown, as_exceptions
from inference_worker.gates.parameters import GateSpec, Parameters, shown
from inference_worker.ports import Gate, ResultStore
from inference_worker.redis_scripts import RedisLink

API: Final = 1
"""Of what factories are handed: rises where one that was written for the number before would not do any more. A field
that is added, with what was there as it was, raises nothing."""

GROUPS: Final[Mapping[PartKind, str]] = {
    "gate": "inference_worker.gates",
    "merge policy": "inference_worker.merge_policies",
    "transport": "inference_worker.transports",
    "transform": "inference_worker.transforms",
    "answer transform": "inference_worker.answer_transforms",
    "billing sink": "inference_worker.billing_sinks",
}
BUILT_IN: Final[Mapping[PartKind, Sequence[str]]] = {
    "gate": GATE_TYPES,
    "merge policy": MERGE_TYPES,
    "transport": KINDS,
    "transform": TRANSFORM_TYPES,
    "answer transform": ANSWER_TRANSFORM_TYPES,
    "billing sink": (CROESUS,),
}
METHODS: Final[Mapping[PartKind, Sequence[str]]] = {
    "gate": ("admit", "budget", "closes_at", "run"),
    "merge policy": ("__len__", "pop", "put", "remove", "room", "sizes"),
    "transport": ("__call__",),
    "transform": ("apply", "validate"),
    "answer transform": ("apply",),
    "billing sink": ("send",),
}
"""Of the protocol that what a factory returns is to fill."""
LONGEST_SAID: Final = 200
"""Characters of what an exception says."""


# ---------------------------------------------------------------- what factories are handed


@dataclass(frozen=True, slots=True, kw_only=True)
class GateParts:
    """For a gate: the factory returns a `ports.Gate`."""

    given: Parameters
    """`gate_params`; what nobody asks for is a problem."""
    stands_at: Literal["queue", "pool"]
    name: str
    """Of that queue or pool."""
    pool: str
    now: Callable[[], float]
    """Unix seconds."""
    clock: Callable[[], float]
    """Loop time."""
    chance: Callable[[], float]
    """Uniform in [0, 1)."""
    holder: str
    """A name that no other gate has anywhere, for what is held in a place that processes share."""
    link_to: Callable[[str], RedisLink]
    """The connection to a Redis by its URL; it opens with the first question."""
    client: httpx.AsyncClient
    """For metrics, with the certificates that the flags name."""
    prometheus_url: str
    """Empty where none is given."""
    build: Callable[[GateSpec], Gate]
    """Makes a gate inside this one, such as `given.gate("gate")` has."""
    api: int = API


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePolicyParts:
    """For a merge policy: the factory returns a `merge.MergePolicy`, a new one each time."""

    given: Parameters
    """`parameters`, but for what all policies have."""
    rng: random.Random
    per_lane: int
    """How many items a lane, or a queue, may hold here."""
    api: int = API


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportParts:
    """For a transport: the factory is called for each queue and returns a `ports.Connect`."""

    given: Parameters
    """The keys of the transport document, but for what all transports have."""
    url: str
    """The document's; empty where it has none. It may hold a password."""
    queue_name: str
    labels: Mapping[str, str]
    store: ResultStore
    """Where results and claims are; `settling.py` has the steps that are the same for all transports."""
    now: Callable[[], float]
    """Unix seconds."""
    replica_id: str
    """A name that no other process has."""
    lease_s: float
    """How long what a process holds is its own, where the queue has leases."""
    registry: CollectorRegistry
    """Of the pool. A metric may be registered once in it; a pool may have several queues."""
    api: int = API


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformParts:
    """For a transform: the factory returns a `transforms.chain.BodyTransform`, or an `AnswerTransform`."""

    given: Parameters
    """`parameters`."""
    name: str
    """As the document calls it."""
    api: int = API


@dataclass(frozen=True, slots=True, kw_only=True)
class BillingSinkParts:
    """For a billing sink: the factory returns a `ports.BillingSink`.

    Where that is an asynchronous context manager as well, it is entered before the first event and left after the last.
    """

    given: Parameters
    """`BILLING_SINK_PARAMETERS`."""
    url: Callable[[], str] | None
    """`CROESUS_HOST`, read anew each time; None where that is off."""
    now: Callable[[], float]
    """Unix seconds."""
    tls: ssl.SSLContext | None
    """As `TLS_*` say; None: the usual."""
    deployment_id: str
    replica_id: str
    api: int = API


Parts = GateParts | MergePolicyParts | TransportParts | TransformParts | BillingSinkParts


# ---------------------------------------------------------------- who has them


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """A part that an installed package offers."""

    kind: PartKind
    name: str
    package: str
    version: str
    load: Callable[[], Callable[[Parts], object]] = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


Installed = Callable[[PartKind], Sequence[Extension]]


def installed(kind: PartKind) -> Sequence[Extension]:
    """All of a kind that are installed here."""
    return [
        Extension(
            kind=kind,
            name=entry.name,
            package="a package without a name" if entry.dist is None else entry.dist.name,
            version="" if entry.dist is None else entry.dist.version,
            load=entry.load,
        )
        for entry in entry_points(group=GROUPS[kind])
    ]


class Extensions:
    """Those of one process: looked for once, loaded once. What is installed later needs a restart."""

    def __init__(self, look: Installed = installed) -> None:
        self._look = look
        self._found: dict[PartKind, Sequence[Extension]] = {}
        self._factories: dict[Extension, Callable[[Parts], object]] = {}
        self.used: dict[Extension, None] = {}
        """Those that something was made by."""

    def names(self, kind: PartKind) -> Sequence[str]:
        """What may be named beside what is built in, in the order of the alphabet."""
        return sorted({one.name for one in self._of(kind)} - set(BUILT_IN[kind]))

    def hidden(self, kind: PartKind) -> Sequence[Extension]:
        """Those that are never used, since their names are built in."""
        return [one for one in self._of(kind) if one.name in BUILT_IN[kind]]

    def said_of(self, kind: PartKind, name: str) -> str:
        """Who offers it, for people."""
        return " and ".join(str(one) for one in self._of(kind) if one.name == name)

    def make(self, kind: PartKind, name: str, parts: Parts, place: str) -> object | None:
        """What a factory makes; None where there is a problem, which is noted in `parts.given`.

        `place` is where the name stands. The object has the methods of its protocol: no more is known of it.
        """
        try:
            return self._made(kind, name, parts, place)
        finally:
            parts.given.rest()  # What was not read is said once, or was not to be read.

    def _made(self, kind: PartKind, name: str, parts: Parts, place: str) -> object | None:
        problems = parts.given.problems
        accepted = f"accepted: {', '.join((*sorted(BUILT_IN[kind]), *self.names(kind)))}"
        several = [one for one in self._of(kind) if one.name == name]
        if len(several) != 1:
            who = f", which {' and '.join(map(str, several))} both offer" if several else ""
            problems.append(f"{place}: is {shown(name)}{who}; {accepted}{', each from one package' if who else ''}")
            return None
        found = several[0]
        said = f"{place}: the {kind} {shown(name)} of {found}"
        try:
            with as_exceptions():
                factory = self._factories.get(found) or found.load()
        except Exception as exc:  # noqa: BLE001  # Whatever a package does when it is imported, the others are fine.
            problems.append(f"{said} cannot be imported: {_told(exc)}; {accepted}")
            return None
        self._factories[found] = factory
        self.used[found] = None
        try:
            with as_exceptions():
                made = factory(parts)
                missing = [method for method in METHODS[kind] if not callable(getattr(made, method, None))]
        except ConfigurationError as exc:
            problems.extend(exc.problems)
            return None
        except Exception as exc:  # noqa: BLE001  # As above.
            problems.append(f"{said} cannot be made: {_told(exc)}; {accepted}")
            return None
        if missing:
            problems.append(f"{said} is of type {type(made).__name__}, without {', '.join(missing)}; {accepted}")
            return None
        parts.given.finish()
        return made

    def _of(self, kind: PartKind) -> Sequence[Extension]:
        if kind not in self._found:
            self._found[kind] = sorted(self._look(kind), key=lambda one: (one.name, one.package))
        return self._found[kind]


def _told(exc: Exception) -> str:
    said = str(exc) if isinstance(exc, Thrown) else f"{type(exc).__name__}: {exc}"
    return said[:LONGEST_SAID]
