"""The PromQL of the gates that know a router's metrics. Pure text.

Every quantity is asked for under the router's present name, and under the former one where that is all there is. What
several replicas of the router each say of one pool is joined: what waits in them is added up, what they all see is
counted once.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What is asked, and what tells how far it can be trusted."""

    budget: str
    """The free part of the capacity; 1 is idle."""
    measured: str | None = None
    """When the oldest sample behind it was taken, in Unix seconds."""
    capacity: str | None = None
    """How many requests make the whole of it."""


@dataclass(frozen=True, slots=True)
class _Either:
    """One quantity under its present and its former name."""

    present: str
    former: str

    def joined(self, present: str, former: str | None = None) -> str:
        """`present` and `former` are functions of PromQL with `%s` for the series."""
        return f"({present % self.present} or {(former or present) % self.former})"

    def stamp(self) -> str:
        return self.joined("min(timestamp(%s))")


class PoolQueries:
    """The queries on one inference pool.

    Raises ValueError without a pool, and where a pod takes no request.
    """

    def __init__(self, pool: str, namespace: str = "", max_concurrency: float | None = None) -> None:
        if not pool:
            raise ValueError("the name of the inference pool is needed")
        if max_concurrency is not None and not max_concurrency > 0:
            raise ValueError(f"max_concurrency is {max_concurrency:g}, and must be above 0")
        self._max_concurrency = max_concurrency
        flow = _selector({"inference_pool": pool, "namespace": namespace})
        named = _selector({"name": pool, "namespace": namespace})
        self._saturation = _either("flow_control_pool_saturation", "flow_control_pool_saturation", flow)
        self._queued = _either("flow_control_queue_size", "flow_control_queue_size", flow)
        self._ready = _Either(f"llm_d_epp_ready_endpoints{named}", f"inference_pool_ready_pods{named}")
        self._per_pod = _Either(
            f"llm_d_epp_per_endpoint_queue_size{named}", f"inference_pool_per_pod_queue_size{named}"
        )
        self._running = f"vllm:num_requests_running{flow}"

    def saturation(self) -> Query:
        """1 - what the router calls the pool's saturation, the worst of its replicas'."""
        return Query(
            budget=f"1 - {self._saturation.joined('max(%s)')}",
            measured=self._saturation.stamp(),
            capacity=None if self._max_concurrency is None else self._capacity(),
        )

    def budgets(self) -> tuple[Query, Query, Query]:
        """Three views of how full a pool is, the best first: the router's queue, the pods' queues, what vLLM runs."""
        assert self._max_concurrency is not None, "a budget is in parts of what the pods take"
        each, capacity = f"{self._max_concurrency:g}", self._capacity()
        per_pod = self._per_pod.joined(
            "avg(max by (model_server_endpoint) (%s))", "avg(max by (model_server_pod) (%s))"
        )
        return (
            Query(
                budget=f"1 - {self._queued.joined('sum(%s)')} / {capacity}",
                measured=self._queued.stamp(),
                capacity=capacity,
            ),
            Query(budget=f"1 - {per_pod} / {each}", measured=self._per_pod.stamp(), capacity=capacity),
            Query(
                budget=f"1 - sum({self._running}) / {capacity}",
                measured=f"min(timestamp({self._running}))",
                capacity=capacity,
            ),
        )

    def _capacity(self) -> str:
        return f"({self._ready.joined('max(%s)')} * {self._max_concurrency:g})"


def _either(present: str, former: str, selector: str) -> _Either:
    return _Either(f"llm_d_epp_{present}{selector}", f"inference_extension_{former}{selector}")


def _selector(labels: Mapping[str, str]) -> str:
    quoted = (
        '{}="{}"'.format(name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
        for name, value in labels.items()
        if value
    )
    return "{" + ",".join(quoted) + "}"
