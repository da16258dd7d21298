"""How many messages of a subscription are not acknowledged, as Cloud Monitoring has it: Pub/Sub itself does not say.

A number is a minute or so old when it comes; it is asked for twice a minute at most. Where it cannot be had (no
permission, an emulator), the backlog is unknown, and nothing else is the worse for it.
"""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import httpx

from inference_worker.errors import StoreUnavailable

API: Final = "https://monitoring.googleapis.com"
METRIC: Final = "pubsub.googleapis.com/subscription/num_undelivered_messages"
WINDOW_S: Final = 300
"""The newest point within it counts."""

KEPT_S: Final = 30.0
ANSWER_S: Final = 5.0


class Monitoring:
    """Asks for one process, all of its subscriptions. See `transports.gcp_pubsub.Undelivered`."""

    def __init__(
        self,
        token: Callable[[], Awaitable[str]],
        now: Callable[[], float],
        open_client: Callable[[], httpx.AsyncClient],
    ) -> None:
        """`token`: what is shown to the service; raises StoreUnavailable."""
        self._token = token
        self._now = now
        self._open_client = open_client
        self._seen: dict[str, tuple[float, int | None]] = {}
        """By subscription: when it was asked for, in Unix seconds, and what was said."""

    async def __call__(self, subscription: str) -> int | None:
        """See `Undelivered`."""
        asked_at, seen = self._seen.get(subscription, (0.0, None))
        if self._now() - asked_at >= KEPT_S:
            self._seen[subscription] = self._now(), None  # Also where it fails: not at once again.
            seen = await self._ask(subscription)
            self._seen[subscription] = self._now(), seen
        return seen

    async def _ask(self, subscription: str) -> int | None:
        project, _, name = subscription.rpartition("/subscriptions/")
        until = datetime.fromtimestamp(self._now(), UTC)
        asked = {
            "filter": f'metric.type="{METRIC}" AND resource.labels.subscription_id="{name}"',
            "interval.startTime": (until - timedelta(seconds=WINDOW_S)).isoformat(),
            "interval.endTime": until.isoformat(),
            "pageSize": "1",
        }
        headers = {"Authorization": f"Bearer {await self._token()}"}
        try:
            async with self._open_client() as client:
                answer = await client.get(f"{API}/v3/{project}/timeSeries", params=asked, headers=headers)
                answer.raise_for_status()
                said = answer.json()
            return _newest(said)
        except (httpx.HTTPError, ValueError, KeyError, TypeError, LookupError) as exc:
            raise StoreUnavailable(f"Cloud Monitoring: {type(exc).__name__}: {exc}") from exc


def monitoring_client() -> httpx.AsyncClient:
    """The way to it."""
    return httpx.AsyncClient(timeout=ANSWER_S)


def _newest(said: Any) -> int | None:
    """The newest point; None where there is none, as for a subscription that was made just now."""
    series = said.get("timeSeries") or []
    return int(series[0]["points"][0]["value"]["int64Value"]) if series else None
