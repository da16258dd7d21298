"""What documents of many queues may say and probably do not mean, one sentence each. Pure.

Nothing here stops a start: each is a rule of llm-d-async that surprises, or a setting without effect where it stands.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from inference_worker.config.documents import GateConfig, ProcessDocuments, QueueConfig
from inference_worker.config.gate_tree import GateTree, gate_tree
from inference_worker.lanes import TIERS

SOCKETS_OF_A_QUEUE: Final = 3
SOCKETS_BESIDE: Final = 64
"""Ports, metric sources, Redis for results and gates, files."""
NAMED: Final = 5
"""So many names stand in one sentence."""
ASKS_CLASSES: Final = frozenset({"tier-priority-admission", "aimd"})
"""Gates that treat what is reserved in another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Something that is allowed and probably not meant."""

    what: str
    detail: str
    mend: str


def doubts(documents: ProcessDocuments, *, most_files: int) -> list[Doubt]:
    """All of them. `most_files` is how many files and sockets the process may have open."""
    return [
        *_deprecated(documents),
        *_idle_pools(documents),
        *_odd_tiers(documents),
        *_unread_classes(documents),
        *_counted_twice(documents),
        *_eternal_results(documents),
        *_too_few_files(documents, most_files),
    ]


def named(names: Sequence[str]) -> str:
    """Names for a sentence, not all of too many."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _queues_of(documents: ProcessDocuments, pool: str) -> list[QueueConfig]:
    return [queue for queue in documents.transport.queues if queue.worker_pool_id == pool]


def _deprecated(documents: ProcessDocuments) -> Iterator[Doubt]:
    if documents.transport.kind == "redis-pubsub":
        detail = "redis-pubsub is deprecated: what nobody listens to is lost, as is what a killed worker held"
        yield Doubt(what="transport", detail=detail, mend="redis-sortedset, whose producers only write elsewhere")


def _idle_pools(documents: ProcessDocuments) -> Iterator[Doubt]:
    for pool in documents.pools:
        if not _queues_of(documents, pool.id):
            detail = f"no queue names it: its {pool.workers} workers have nothing to do"
            yield Doubt(what=f"pool {pool.id}", detail=detail, mend="worker_pool_id of a queue, or leave the pool out")


def _odd_tiers(documents: ProcessDocuments) -> Iterator[Doubt]:
    merge = documents.merge
    if merge.type in ("random-robin", "extension"):
        return  # Without lanes, or with lanes of its own.
    label = merge.tier_label
    odd = [queue.queue_name for queue in documents.transport.queues if queue.labels.get(label) not in TIERS]
    if odd:
        said = f"their label {label} is missing or none of {', '.join(TIERS)}: they count as batch"
        yield Doubt(what="tiers", detail=f"{named(odd)}: {said}", mend=f"labels: {{{label}: …}}, or tier_label")


def _unread_classes(documents: ProcessDocuments) -> Iterator[Doubt]:
    """Marks that nobody reads: a queue's are for lanes and the pool's gate, a pool's for the gates around it alone."""
    lanes = documents.merge.type != "random-robin"
    for pool in documents.pools:
        of_pool = [] if pool.gate is None else list(gate_tree(pool.gate).all())
        reads = any(gate.gate_type in ASKS_CLASSES for gate in of_pool)
        if not reads and any(map(_classifies, of_pool)):
            yield _unread(f"gate of pool {pool.id}", "its pool has no gate that looks at it")
        for queue in _queues_of(documents, pool.id):
            gates = [] if queue.gate is None else list(gate_tree(queue.gate).all())
            read = lanes or reads or any(gate.gate_type in ASKS_CLASSES for gate in gates)
            if not read and any(map(_classifies, gates)):
                yield _unread(f"gate of queue {queue.id}", "random-robin does not look at it, nor does a gate")


def _classifies(gate: GateTree) -> bool:
    if gate.gate_type == "reservation-classifier":
        return True
    quota = gate.gate_type in ("redis-quota", "sql-quota")
    return quota and gate.given.text("gating_mode", "blocking") == "classifying"


def _unread(what: str, why: str) -> Doubt:
    detail = f"it only marks requests as reserved or overflow, and {why}: it limits nothing"
    return Doubt(what=what, detail=detail, mend="a merge policy with lanes, tier-priority-admission, or gating_mode")


def _counted_twice(documents: ProcessDocuments) -> Iterator[Doubt]:
    """Quotas under one key of Redis: of two kinds neither can read it, and of one kind both count in it."""
    kinds: dict[tuple[str, ...], set[str]] = {}
    passed: set[tuple[str, ...]] = set()
    pools = {pool.id: _quotas(pool.gate) for pool in documents.pools}
    queues = [pools.get(queue.worker_pool_id, []) + _quotas(queue.gate) for queue in documents.transport.queues]
    for way in [*pools.values(), *queues]:
        for key, kind in way:
            kinds.setdefault(key, set()).add(kind)
        keys = [key for key, _ in way]
        passed.update(key for key in keys if keys.count(key) > 1)
    for key, found in kinds.items():
        _, prefix, attribute = key
        under = f"several redis-quota gates count under {prefix}{attribute}:…"
        if len(found) > 1:
            detail = f"{under}, some at once and some by time: these are kept in two ways, and every request fails"
        elif key in passed:
            detail = f"{under}, and a request that passes two of them is counted twice"
        else:
            continue
        yield Doubt(what="quotas", detail=detail, mend="a prefix of its own for each")


def _quotas(gate: GateConfig | None) -> list[tuple[tuple[str, ...], str]]:
    """Of the quotas in a gate: the server and the beginning of the key, and how they count."""
    quotas = [] if gate is None else [one.given for one in gate_tree(gate).all() if one.gate_type == "redis-quota"]
    named_by = (("address", ""), ("prefix", "quota:"), ("attribute", "userid"))
    return [
        (tuple(given.text(name, default) for name, default in named_by), given.text("mode", "rate-limit"))
        for given in quotas
    ]


def _eternal_results(documents: ProcessDocuments) -> Iterator[Doubt]:
    transport = documents.transport
    if transport.kind not in ("redis-sortedset", "sql"):
        return
    lives: dict[str, set[int]] = {}
    for queue in transport.queues:
        lives.setdefault(queue.result_queue_name or transport.result_queue_name, set()).add(queue.result_ttl_s)
    if eternal := [name for name, ttls in lives.items() if ttls == {0}]:
        detail = f"{named(eternal)}: results that nobody takes stay for ever"
        yield Doubt(what="result lists", detail=detail, mend="result_ttl_seconds of their queues")
    if mixed := [name for name, ttls in lives.items() if 0 in ttls and len(ttls) > 1]:
        said = "some of their queues have a result_ttl_seconds, and when it is over the results of all go"
        yield Doubt(what="result lists", detail=f"{named(mixed)}: {said}", mend="the same for all, or several lists")


def _too_few_files(documents: ProcessDocuments, most_files: int) -> Iterator[Doubt]:
    workers = sum(pool.workers for pool in documents.pools)
    needed = workers + SOCKETS_OF_A_QUEUE * len(documents.transport.queues) + SOCKETS_BESIDE
    if needed > most_files:
        detail = f"{workers} workers may need {needed} files and sockets, and {most_files} may be open here"
        yield Doubt(what="open files", detail=detail, mend="ulimit -n, LimitNOFILE, or fewer workers")
