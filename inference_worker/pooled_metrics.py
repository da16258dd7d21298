"""The page of a process that runs several workers, one for each pool: their metrics side by side, told apart by `pool`.

Each worker has a registry of its own (`metrics.py`), with the same families in it. What is true of the process is shown
once, and what others count with labels of their own, as they have it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from inference_worker.metrics import PREFIX, page

POOL_LABEL: Final = "pool"
OF_THE_PROCESS: Final = (f"{PREFIX}_build", "python_", "process_")
"""How the names of families begin that are the same in every registry."""


class PooledMetrics(Collector):
    """The registries of a process, as one."""

    def __init__(self, pools: Mapping[str, CollectorRegistry], others: Sequence[CollectorRegistry] = ()) -> None:
        """`pools` by their ids. `others` have no family of theirs, and none in common."""
        self._pools = pools
        self._others = others

    def collect(self) -> Iterable[Metric]:
        """Every family once, as the format asks for, with the samples of all pools."""
        merged: dict[str, Metric] = {}
        for pool, registry in self._pools.items():
            for family in registry.collect():
                if family.name.startswith(OF_THE_PROCESS):
                    merged.setdefault(family.name, family)
                else:
                    _add(merged, family, pool)
        yield from merged.values()
        for registry in self._others:
            yield from registry.collect()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, in the format that the `Accept` header asks for."""
        return page(self, accept)


def _add(merged: dict[str, Metric], family: Metric, pool: str) -> None:
    if family.name not in merged:
        merged[family.name] = Metric(family.name, family.documentation, family.type, family.unit)
    merged[family.name].samples.extend(
        sample._replace(labels={POOL_LABEL: pool, **sample.labels}) for sample in family.samples
    )
