"""Quotas in Redis, one for each value of an attribute, over all processes: how many at once, or how many lately.

A quota refuses what is over it, or only says so (`classification`), for a merge policy and a tier gate to act on.
Limits stand in a hash that may be changed while everything runs. A quota counts requests or tokens.

Redis is asked for each request, since a count over several processes is exact no other way; where it cannot be asked,
a quota fails and a classifier says overflow.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, Literal

import structlog

from inference_worker.errors import GateFailed, StoreUnavailable
from inference_worker.gates.parameters import Parameters
from inference_worker.gates.permits import OncePermit
from inference_worker.gates.quota_scripts import ADMIT_WITHIN, CORRECT, TAKE, TAKE_CAPPED
from inference_worker.gates.slots import LEASE_S, Place, Slots
from inference_worker.gates.token_cost import estimated_tokens
from inference_worker.gates.undoing import Undoing
from inference_worker.ports import Admitted, Asked, Feedback, Permit, TurnedAway, Verdict
from inference_worker.redis_scripts import RedisLink

log = structlog.get_logger(__name__)

CLASSIFICATION: Final = "classification"
RESERVED: Final = "reserved"
OVERFLOW: Final = "overflow"
LONGEST_VALUE_BYTES: Final = 256
"""A longer one, which a caller may send, is counted under its hash."""
KEPT_S: Final = 300.0
"""How long the counter of slots outlives the last of them, at least."""
CLASSIFIER_KEPT_S: Final = 86_400.0

LinkTo = Callable[[str], RedisLink]
"""The connection to an address, as a document names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How much, of what, for whom."""

    limit: int
    """For those that the hash of limits does not name."""
    attribute: str = "userid"
    window_s: float = 60.0
    prefix: str = "quota:"
    counts: Literal["requests", "tokens"] = "requests"
    blocking: bool = True
    """Refuses what is over the limit; else that is admitted, and called overflow."""
    limits_key: str = ""

    @property
    def limits(self) -> str:
        """The hash of limits by value: outside the prefix, so that no value of a caller's can be its name."""
        return self.limits_key or f"{self.prefix.rstrip(':')}-limits:{self.attribute}"

    def key(self, value: str) -> str:
        """Where one value is counted."""
        return f"{self.prefix}{self.attribute}:{value}"

    def beside(self, what: str, value: str) -> str:
        """What is kept besides the count: also outside the prefix, for the same reason."""
        return f"{self.prefix.rstrip(':')}-{what}:{self.attribute}:{value}"

    def cost(self, asked: Asked) -> int:
        """What a request is counted as."""
        return 1 if self.counts == "requests" else estimated_tokens(asked.payload)


class ConcurrencyQuota:
    """So many at once. What a process held that is gone is free after its lease."""

    def __init__(self, link: RedisLink, allowance: Allowance, *, holder: str, lease_s: float = LEASE_S) -> None:
        self._allowance = allowance
        self._slots = Slots(link, holder=holder, lease_s=lease_s, kept_s=max(allowance.window_s, KEPT_S))

    def budget(self) -> float:
        """See `ports.Gate`: others than this request's tenant may have room."""
        return 1.0

    async def admit(self, asked: Asked) -> Verdict:
        """See `ports.Gate`."""
        value = value_of(asked, self._allowance.attribute)
        if value is None:
            return Admitted()
        try:
            slot = await self._slots.take(
                TAKE,
                self._place(value),
                self._allowance.limit,
                cost=self._allowance.cost(asked),
                tenant=value,
            )
        except StoreUnavailable as exc:
            raise GateFailed(f"the quota cannot be asked: {exc}") from exc
        return _classified(asked, self._allowance, within=slot is not None, permit=slot)

    def signal(self, changed: asyncio.Event, asked: Asked) -> bool:
        """See `permits.Signals`: told of slots that this process gives back."""
        value = value_of(asked, self._allowance.attribute)
        if value is None:
            return False
        self._slots.wait_for(self._place(value), changed)
        return True

    async def run(self, until: asyncio.Event) -> None:
        """See `ports.Gate`: renews what is held."""
        await self._slots.run(until)

    def closes_at(self) -> str:
        """See `ports.Gate`."""
        return _said(self._allowance, "at once")

    def _place(self, value: str) -> Place:
        counter, slots = self._allowance.key(value), self._allowance.beside("slots", value)
        return Place(counter=counter, slots=slots, limit=self._allowance.limits)


class RateQuota:
    """So many within a sliding window. What was never sent, and tokens that were not used, are taken off again."""

    def __init__(self, link: RedisLink, allowance: Allowance, *, holder: str) -> None:
        self._link = link
        self._allowance = allowance
        self._holder = holder
        self._numbers = count(1)
        self._window_ms = max(round(allowance.window_s * 1000), 1)
        self._undoing = Undoing(link)

    def budget(self) -> float:
        """See `ports.Gate`: others than this request's tenant may have room."""
        return 1.0

    async def admit(self, asked: Asked) -> Verdict:
        """See `ports.Gate`."""
        value = value_of(asked, self._allowance.attribute)
        if value is None:
            return Admitted()
        keys, cost = (self._allowance.key(value), self._allowance.beside("total", value)), self._allowance.cost(asked)
        name = f"{self._holder}:{next(self._numbers)}"
        member = f"{cost}:{name}"
        try:
            within = await self._link.run(
                ADMIT_WITHIN, (*keys, self._allowance.limits), member, self._allowance.limit, self._window_ms, value
            )
        except StoreUnavailable as exc:
            self._undoing.later(CORRECT, keys, member, "")
            raise GateFailed(f"the quota cannot be asked: {exc}") from exc
        except BaseException:
            self._undoing.later(CORRECT, keys, member, "")
            raise
        permit = OncePermit(lambda seen: self.correct(keys, name, cost, seen)) if within == 1 else None
        return _classified(asked, self._allowance, within=within == 1, permit=permit)

    def correct(self, keys: tuple[str, str], name: str, cost: int, seen: Feedback) -> None:
        """Put right what was counted, where it was something else: soon, and nobody waits for it."""
        true = self._true_cost(cost, seen)
        if true != cost:
            self._undoing.later(CORRECT, keys, f"{cost}:{name}", "" if true is None else f"{true}:{name}")

    async def run(self, until: asyncio.Event) -> None:
        """See `ports.Gate`: takes off what was counted too much."""
        await self._undoing.run(until)

    def closes_at(self) -> str:
        """See `ports.Gate`."""
        return _said(self._allowance, f"within {self._allowance.window_s:g} s")

    def _true_cost(self, cost: int, seen: Feedback) -> int | None:
        if seen.kind == "not_sent":
            return None
        used = (seen.input_tokens, seen.output_tokens)
        if self._allowance.counts == "requests" or used == (None, None):
            return cost
        return max(sum(tokens for tokens in used if tokens is not None), 1)


class ReservationClassifier:
    """Says whether a bucket of labels is within what is reserved for it. Admits everything.

    The cap of each bucket is a key of its own, to be changed at any time; what is in flight can be read beside it.
    """

    def __init__(
        self,
        link: RedisLink,
        labels: Sequence[str],
        *,
        holder: str,
        prefix: str = "rmp",
        fallback_cap: int = 0,
        label: str = CLASSIFICATION,
        kept_s: float = CLASSIFIER_KEPT_S,
        lease_s: float = LEASE_S,
    ) -> None:
        self._labels = tuple(labels)
        self._prefix = prefix
        self._fallback_cap = fallback_cap
        self._label = label
        self._slots = Slots(link, holder=holder, lease_s=lease_s, kept_s=kept_s)
        self._silent = False

    def budget(self) -> float:
        """See `ports.Gate`."""
        return 1.0

    async def admit(self, asked: Asked) -> Verdict:
        """See `ports.Gate`. Without Redis everything is overflow."""
        bucket = ":".join(asked.labels.get(name, "") for name in self._labels)
        counter, slots, limit = (f"{self._prefix}:{what}:{bucket}" for what in ("inflight", "slots", "cap"))
        place = Place(counter=counter, slots=slots, limit=limit)
        slot: Permit | None = None
        try:
            slot = await self._slots.take(TAKE_CAPPED, place, self._fallback_cap, cost=1)
            self._silent = False
        except StoreUnavailable as exc:
            if not self._silent:
                log.warning("reservations cannot be looked up: all is overflow", reason=str(exc))
            self._silent = True
        asked.labels[self._label] = RESERVED if slot is not None else OVERFLOW
        return Admitted() if slot is None else Admitted(permits=(slot,))

    async def run(self, until: asyncio.Event) -> None:
        """See `ports.Gate`: renews what is held."""
        await self._slots.run(until)

    def closes_at(self) -> str:
        """See `ports.Gate`."""
        return f"never; overflow beyond {self._prefix}:cap:<{':'.join(self._labels)}>, else {self._fallback_cap}"


def value_of(asked: Asked, attribute: str) -> str | None:
    """Whose quota a request is counted on; None where it says nothing.

    What the queue's own labels say outranks the caller's metadata, which can claim to be anybody.
    """
    value = asked.labels.get(attribute) or asked.metadata.get(attribute)
    if not value and attribute == "tenant":
        value = asked.tenant
    if not value:
        return None
    encoded = value.encode(errors="replace")
    return value if len(encoded) <= LONGEST_VALUE_BYTES else f"sha256-{hashlib.sha256(encoded).hexdigest()}"


def redis_quota(given: Parameters, link_to: LinkTo, *, holder: str) -> ConcurrencyQuota | RateQuota:
    """`redis-quota`. Beyond what others know: `counts`, `limits_key`, `lease`."""
    address = given.text("address")
    concurrency = given.choice("mode", ("rate-limit", "concurrency"), "rate-limit") == "concurrency"
    allowance = Allowance(
        limit=given.whole("limit", at_least=1),
        attribute=given.text("attribute", "userid"),
        window_s=given.seconds("window", 60.0, above=0),
        prefix=given.text("prefix", "quota:"),
        counts="tokens" if given.choice("counts", ("requests", "tokens"), "requests") == "tokens" else "requests",
        blocking=given.choice("gating_mode", ("blocking", "classifying"), "blocking") == "blocking",
        limits_key=given.text("limits_key", ""),
    )
    lease_s = given.seconds("lease", LEASE_S, at_least=1)
    given.finish()
    link = link_to(address)
    if concurrency:
        return ConcurrencyQuota(link, allowance, holder=holder, lease_s=lease_s)
    return RateQuota(link, allowance, holder=holder)


def reservation_classifier(given: Parameters, link_to: LinkTo, *, holder: str) -> ReservationClassifier:
    """`reservation-classifier`: `labels`, a list of names separated by commas, make the bucket."""
    address = given.text("address")
    labels = [name.strip() for name in given.text("labels").split(",") if name.strip()]
    prefix, label = given.text("prefix", "rmp"), given.text("label", CLASSIFICATION)
    fallback_cap = given.whole("fallback_cap", 0, at_least=0)
    kept_s = given.seconds("ttl", CLASSIFIER_KEPT_S, above=0)
    lease_s = given.seconds("lease", LEASE_S, at_least=1)
    given.finish()
    return ReservationClassifier(
        link_to(address),
        labels,
        holder=holder,
        prefix=prefix,
        fallback_cap=fallback_cap,
        label=label,
        kept_s=kept_s,
        lease_s=lease_s,
    )


def _classified(asked: Asked, allowance: Allowance, *, within: bool, permit: Permit | None) -> Verdict:
    asked.labels[CLASSIFICATION] = RESERVED if within else OVERFLOW
    if not within and allowance.blocking:
        return TurnedAway(because="quota_exhausted")
    return Admitted() if permit is None else Admitted(permits=(permit,))


def _said(allowance: Allowance, when: str) -> str:
    what = f"{allowance.limit} {allowance.counts} {when} for each {allowance.attribute}"
    return f"{what}, or what {allowance.limits} says" + ("" if allowance.blocking else "; then it only says overflow")
