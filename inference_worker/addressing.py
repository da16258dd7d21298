"""Where a delivery's call goes, and with which headers: by its route, its lane, and what its caller asked for. Pure.

A delivery without a route goes to the one model of a sidecar, with nothing but the headers of the trace.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from inference_worker.lanes import TIER_LABEL, lane_by_labels
from inference_worker.messages import InferenceRequest
from inference_worker.ports import Delivery, Route
from inference_worker.stamping import Stamps, overlaid, stamped, target


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """What a call needs besides its payload."""

    base_url: str | None
    """Of the gateway; None for the one model there is."""
    endpoint: str
    """All that follows the host."""
    headers: Mapping[str, str]
    skipped: tuple[str, ...] = ()
    """Names of the caller's headers that are not sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addressing:
    """How routes are followed."""

    stamps: Stamps = field(default_factory=Stamps)
    tier_label: str = TIER_LABEL

    def of(self, delivery: Delivery, request: InferenceRequest, trace: Mapping[str, str]) -> Address:
        """The address of one call, whose trace has headers of its own, which nothing replaces."""
        if delivery.route is None:
            return Address(base_url=None, endpoint=request.endpoint, headers=trace)
        route = delivery.route
        mine = {name.lower() for name in route.headers}
        given = {name: value for name, value in request.headers.items() if name.lower() not in mine}
        sent = stamped(
            self.stamps,
            lane=lane_by_labels(delivery.labels, self.tier_label),
            objective=self._objective(route),
            given=given,
            metadata=request.metadata,
            tenant=request.tenant,
        )
        whole = target(route.base_url, route.path, request.endpoint)
        return Address(
            base_url=route.base_url,
            endpoint=whole.removeprefix(origin(route.base_url)),
            headers=overlaid(overlaid(route.headers, sent.headers), trace),
            skipped=(*(name for name in request.headers if name not in given), *sent.skipped),
        )

    def _objective(self, route: Route) -> str | None:
        """The queue's own objective, which a lane's stands above."""
        name = self.stamps.objective_header.lower()
        return next((value for header, value in route.headers.items() if header.lower() == name), None)


def origin(base_url: str) -> str:
    """The scheme and the host of a URL."""
    parts = urlsplit(base_url)
    return f"{parts.scheme}://{parts.netloc}"
