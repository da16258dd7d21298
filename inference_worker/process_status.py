"""Whether the queues of a process are connected, and how its pools and gates stand: for probes and people."""

from collections.abc import Mapping

from inference_worker.assembly import Listeners
from inference_worker.config.documents import ProcessDocuments
from inference_worker.listener import Listener
from inference_worker.ports import Gate
from inference_worker.routed_model import RoutedModel
from inference_worker.transports.merged import MergedTransport


class Standing:
    """The gates of a process, as they stand, and what is said of them."""

    def __init__(self, documents: ProcessDocuments, gateways: RoutedModel) -> None:
        self._documents = documents
        self._gateways = gateways
        self._at_queues: dict[str, Mapping[str, Gate]] = {}
        """By pools, and then by the ids of queues."""
        self._at_pools: dict[str, Gate | None] = {}

    def change(self, documents: ProcessDocuments) -> None:
        """These are the queues and pools now."""
        self._documents = documents

    def stand(self, pool: str, at_queues: Mapping[str, Gate], at_pool: Gate | None) -> None:
        """These gates stand before a pool and its queues now, by the ids of these."""
        self._at_queues[pool] = at_queues
        self._at_pools[pool] = at_pool

    def status(self, listeners: Listeners) -> Mapping[str, object]:
        """Each pool, with its queues: for the page of a worker."""
        slots = {pool.id: pool.workers for pool in self._documents.pools}
        return {
            "gateways": {host: self._gateways.unreached.get(host, "ok") for host in self._gateways.gateways},
            "pools": {
                name: {
                    "state": listener.state,
                    "suspended": dict(listener.suspended),
                    "in_flight": listener.in_flight,
                    "slots": slots[name],
                    **_gate(self._at_pools.get(name)),
                    "queues": self._queues(name, listener),
                }
                for name, listener in listeners.items()
            },
        }

    def _queues(self, pool: str, listener: Listener) -> Mapping[str, object]:
        session = listener.transport
        waiting = session.waiting() if isinstance(session, MergedTransport) else {}
        reasons = session.reasons() if isinstance(session, MergedTransport) else {}
        gates = self._at_queues.get(pool, {})
        return {
            queue.id: {
                "connected": reasons.get(queue.queue_name, "not connected") or "yes",
                "waiting_here": waiting.get(queue.queue_name, 0),
                **_gate(gates.get(queue.id)),
            }
            for queue in self._documents.transport.queues
            if queue.worker_pool_id == pool
        }


def links(listeners: Listeners) -> Mapping[str, tuple[bool, str]]:
    """Whether each queue is connected, and why not."""
    found: dict[str, tuple[bool, str]] = {}
    for name, listener in listeners.items():
        session = listener.transport
        if isinstance(session, MergedTransport):
            found |= {f"queue {queue}": (not why, why) for queue, why in session.reasons().items()}
        else:
            found[f"pool {name}"] = (False, listener.link_reason or "not connected")
    return found


def _gate(gate: Gate | None) -> Mapping[str, object]:
    return {} if gate is None else {"gate": {"budget": round(gate.budget(), 4), "closes_at": gate.closes_at()}}
