"""A model client over several gateways: one client, and so one pool of connections, for each scheme and host.

The base URLs are those of the configuration, so there are at most as many clients as that names; they may become others
(`open`, `keep`). A gateway that hangs has no part in the calls to others. Where a call goes is said by its `base_url`
(`addressing.py`), not found out here.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Protocol, Self

import structlog

from inference_worker.addressing import origin
from inference_worker.config.values import without_user
from inference_worker.errors import ModelGone
from inference_worker.ports import NO_HEADERS, Answer, ModelClient

log = structlog.get_logger(__name__)


class Closable(ModelClient, Protocol):
    """A client that has connections."""

    async def close(self) -> None:
        """Close every connection."""


class RoutedModel:
    """The model client of `ports.py`, for deliveries with a route."""

    def __init__(self, base_urls: Iterable[str], open_client: Callable[[str], Closable]) -> None:
        """`open_client` makes the client of one scheme and host, within a running loop."""
        self._open_client = open_client
        self._clients: dict[str, Closable] = {}
        self._by_host: dict[str, Closable] = {}
        self.unreached: dict[str, str] = {}
        """Gateways that the last call could not reach, and why: by scheme and host, as they may be shown."""
        self.open(base_urls)

    def open(self, base_urls: Iterable[str]) -> None:
        """Call these, too; those that are there already keep their connections."""
        for base_url in base_urls:
            host = origin(base_url)
            if host not in self._by_host:
                self._by_host[host] = self._open_client(host)
            self._clients[base_url] = self._by_host[host]

    async def keep(self, base_urls: Iterable[str]) -> None:
        """Call no others any more, and close the connections to hosts that none of them has."""
        kept = set(base_urls)
        self._clients = {base_url: client for base_url, client in self._clients.items() if base_url in kept}
        hosts = {origin(base_url) for base_url in self._clients}
        left = [host for host in self._by_host if host not in hosts]
        for host in left:
            self.unreached.pop(without_user(host), None)
        await _closed([self._by_host.pop(host) for host in left])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection to every gateway, also where one of them fails to."""
        await _closed(list(self._by_host.values()))

    async def infer(
        self,
        *,
        endpoint: str,
        payload: bytes,
        stream: bool,
        request_id: str,
        timeout_s: float,
        headers: Mapping[str, str] = NO_HEADERS,
        base_url: str | None = None,
    ) -> Answer:
        """See `ports.ModelClient`. `endpoint` is all that follows the host, the base's own path included.

        Raises:
            ModelGone: no gateway of this base URL is configured, or it is gone.
            ModelCut, ModelSlow, BadResponse: see `errors.py`.
        """
        client = self._clients.get(base_url) if base_url is not None else None
        if client is None:
            raise ModelGone(f"no gateway with the base URL {without_user(base_url or '')} is configured")
        try:
            answer = await client.infer(
                endpoint=endpoint,
                payload=payload,
                stream=stream,
                request_id=request_id,
                timeout_s=timeout_s,
                headers=headers,
            )
        except ModelGone as exc:
            self._not_reached(base_url, str(exc))
            raise
        self._reached(base_url)
        return answer

    @property
    def gateways(self) -> Sequence[str]:
        """All of them, by scheme and host, as they may be shown."""
        return tuple(dict.fromkeys(map(without_user, self._by_host)))

    def _not_reached(self, base_url: str | None, reason: str) -> None:
        host = _shown(base_url)
        if host not in self.unreached:
            log.warning("a gateway cannot be reached; its requests are tried again", gateway=host, reason=reason)
        self.unreached[host] = reason

    def _reached(self, base_url: str | None) -> None:
        if self.unreached and self.unreached.pop(_shown(base_url), None) is not None:
            log.info("a gateway answers again", gateway=_shown(base_url))

    async def warm(self, connections: int) -> None:
        """Open connections ahead, the number shared out among the gateways, at least one each. Never fails."""
        clients = list(self._by_host.values())
        each = max(connections // max(len(clients), 1), 1)
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.warm(each))


def _shown(base_url: str | None) -> str:
    """Its scheme and host, without what may be a password."""
    return without_user(origin(base_url or ""))


async def _closed(clients: Sequence[Closable]) -> None:
    async with AsyncExitStack() as stack:
        for client in clients:
            stack.push_async_callback(client.close)
