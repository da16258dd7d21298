"""Results that are received under a lease: renewed, acknowledged, or released, by who holds it and nobody else.

The keys beside the result list are those of the Go library's durable results. Not here: waiting for results.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from inference_worker.errors import LeaseLost, UnreadableResult
from inference_worker.producer_results import Result, read_result
from inference_worker.producer_scripts import ACKNOWLEDGE, RECEIVE, RELEASE, RENEW
from inference_worker.redis_scripts import RedisLink
from inference_worker.redis_slots import beside

REMEMBERED_S: Final = 7 * 86_400
"""How long it is remembered that a result was acknowledged: a copy of it is dropped, and an ack may be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A right to one result, for a time."""

    name: str
    """The result's generation: its id, and behind a NUL its token."""
    owner: str
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """No result lies there now."""

    lapses_in_s: float | None
    """When the next lease of anybody lapses, where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedResult:
    """A result that is ours for a time. It comes again, to whoever receives, unless it is acknowledged by then."""

    result: Result
    lease: Lease
    leases: "LeaseBook" = field(repr=False, compare=False)

    async def renew(self, lease_s: float | None = None) -> None:
        """Have the lease begin anew, as long as it was, or `lease_s` long.

        Raises:
            LeaseLost: it has lapsed.
            StoreUnavailable
        """
        await self.leases.renew(self.lease, self.lease.lease_s if lease_s is None else lease_s)

    async def ack(self) -> None:
        """Say that the result is safe: it never comes again. May be repeated.

        Raises:
            LeaseLost: it has lapsed, and the result will come again or has been received by another.
            StoreUnavailable: it may have been done; asking again does no harm.
        """
        await self.leases.acknowledge(self.lease)

    async def release(self) -> None:
        """Give the result back for another to receive at once. Does nothing where the lease has lapsed.

        Raises:
            StoreUnavailable
        """
        await self.leases.release(self.lease)


class LeaseBook(Protocol):
    """Where leases are kept: in Redis, in Postgres. Every method raises `StoreUnavailable`."""

    async def renew(self, lease: Lease, lease_s: float) -> None: ...
    async def acknowledge(self, lease: Lease) -> None: ...
    async def release(self, lease: Lease) -> None: ...


class Leases:
    """The leases on one result list. Every method raises `StoreUnavailable`."""

    def __init__(self, link: RedisLink, results: str, *, clustered: bool = False) -> None:
        self._link = link
        names = ("result-claimed", "result-claim-owners", "result-claims-idx", "result-ack-tombstones")
        self.keys: Sequence[str] = (
            results,
            *(beside(results, name) if clustered else f"{results}:{name}" for name in names),
        )

    async def receive(self, lease_s: float) -> LeasedResult | UnreadableResult | Nothing:
        """Lease the oldest result, if one lies there."""
        lease = Lease(name="", owner=secrets.token_hex(16), lease_s=lease_s)
        while True:
            said, *seen = await self._link.run(RECEIVE, self.keys, lease.owner, _ms(lease_s))
            if said == b"NONE":
                return Nothing(lapses_in_s=None if seen[0] < 0 else seen[0] / 1000)
            if said != b"MORE":
                return self._leased(seen[0], seen[1], lease)

    def _leased(self, name: bytes, raw: bytes, lease: Lease) -> LeasedResult | UnreadableResult:
        # Names pass as bytes that may be no UTF-8: whatever a foreign program wrote is to be acknowledged all the same.
        held = Lease(name=name.decode(errors="surrogateescape"), owner=lease.owner, lease_s=lease.lease_s)
        try:
            return LeasedResult(result=read_result(raw), lease=held, leases=self)
        except UnreadableResult as exc:
            return UnreadableResult(str(exc), raw, lambda: self.acknowledge(held))

    async def renew(self, lease: Lease, lease_s: float) -> None:
        """See `LeasedResult`."""
        _, _, owners, expiries, _ = self.keys
        if not await self._link.run(RENEW, [owners, expiries], _bytes(lease), lease.owner, _ms(lease_s)):
            raise LeaseLost(f"the lease on the result of {_shown(lease)} has lapsed")

    async def acknowledge(self, lease: Lease) -> None:
        """See `LeasedResult`."""
        done = await self._link.run(ACKNOWLEDGE, self.keys[1:], _bytes(lease), lease.owner, _ms(REMEMBERED_S))
        if not done:
            raise LeaseLost(f"the lease on the result of {_shown(lease)} has lapsed: it may have been received again")

    async def release(self, lease: Lease) -> None:
        """See `LeasedResult`."""
        await self._link.run(RELEASE, self.keys[:4], _bytes(lease), lease.owner)

    async def give_back(self, received: Any) -> None:
        """Release what `receive` has brought for somebody who is gone."""
        if isinstance(received, LeasedResult):
            await self.release(received.lease)


def _ms(seconds: float) -> int:
    if not 0 < seconds < math.inf:
        raise ValueError(f"a lease must last a number of seconds above 0, got {seconds!r}")
    return max(int(seconds * 1000), 1)


def _bytes(lease: Lease) -> bytes:
    return lease.name.encode(errors="surrogateescape")


def _shown(lease: Lease) -> str:
    return repr(lease.name.partition("\0")[0])
