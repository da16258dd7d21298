"""Whether the gateway's neighbours answer: asked every few seconds, so that `/readyz` answers at once."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import structlog

from inference_worker.errors import StoreUnavailable, TransportLost
from inference_worker.gateway.metrics import GatewayMetrics, Peer
from inference_worker.ports import Backlog
from inference_worker.timing import stopped_within

log = structlog.get_logger(__name__)

LOOK_S: Final = 2.0
ANSWER_S: Final = 5.0
NOT_ASKED: Final = "not asked yet"

Conditions = Mapping[str, tuple[bool, str]]
"""By name: whether it is met, and why not."""


class Watch:
    """Looks at queue and store, and knows what it last saw."""

    def __init__(
        self,
        backlog: Callable[[], Awaitable[Backlog]],
        probe: Callable[[], Awaitable[None]],
        metrics: GatewayMetrics,
        stopping: asyncio.Event,
    ) -> None:
        self._backlog = backlog
        self._probe = probe
        self._metrics = metrics
        self._stopping = stopping
        self._seen: dict[Peer, tuple[bool, str]] = {
            "broker": (False, NOT_ASKED),
            "store": (False, NOT_ASKED),
        }
        self._said: dict[Peer, str] = {}

    def conditions(self) -> Conditions:
        """What `/readyz` says."""
        seen: dict[str, tuple[bool, str]] = {name: self._seen[name] for name in ("broker", "store")}
        return {**seen, "serving": (not self._stopping.is_set(), "stopping" if self._stopping.is_set() else "")}

    async def run(self, until: asyncio.Event) -> None:
        """Look until told to stop."""
        while True:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._look("broker", self._count))
                group.create_task(self._look("store", self._probe))
            if await stopped_within(until, LOOK_S):
                return

    async def _count(self) -> None:
        self._metrics.backlog(None)
        self._metrics.backlog((await self._backlog()).ready)

    async def _look(self, peer: Peer, ask: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                await ask()
        except (TransportLost, StoreUnavailable) as exc:
            seen = (False, str(exc))
        except TimeoutError:
            seen = (False, f"no answer within {ANSWER_S:g} s")
        except Exception as exc:
            # A surprise of one look must not end the gateway, which would only meet it again after its restart.
            log.exception("a look at a neighbour failed", peer=peer)
            seen = (False, f"the look failed: {type(exc).__name__}")
        else:
            seen = (True, "")
        before, self._seen[peer] = self._seen[peer], seen
        self._metrics.peer(peer, seen[0])
        if not seen[0] and not before[0] and self._said.get(peer) != seen[1] and before[1] != NOT_ASKED:
            self._said[peer] = seen[1]  # Seen twice: the first look may have been before there was a connection.
            log.warning("a neighbour does not answer", peer=peer, reason=seen[1])
        elif seen[0] and self._said.pop(peer, None) is not None:
            log.info("a neighbour answers again", peer=peer)
