"""The seams: what the listener and the processor need of a broker, a store, a model and a billing receiver.

Data and protocols only; who fills them is chosen in `assembly.py`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from inference_worker.disposition import Disposition, Outcome, Settlement, Token
from inference_worker.errors import ModelFailure
from inference_worker.messages import InferenceRequest, KnownReply, Reply, Usage

NO_HEADERS: Final[Mapping[str, str]] = {}

# ---------------------------------------------------------------- transport


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delivery:
    """One message in our hands, until it is settled or its connection is gone. Data only."""

    body: bytes
    attempts: int
    """How many attempts lie behind it: 0 for a first one."""
    queue: str
    message_id: str | None
    redelivered: bool
    receipt: object
    """What the transport needs to settle it; opaque to everybody else."""
    lost: asyncio.Event
    """Set once the right to settle it is gone."""
    headers: Mapping[str, object] = field(default_factory=dict)
    correlation_id: str | None = None
    request: InferenceRequest | None = None
    """Set where the transport has read the message already: its format is not that of `messages.decode`."""
    route: "Route | None" = None
    """Where the queue that it came from has it sent; None for the one model of a sidecar."""
    labels: dict[str, str] = field(default_factory=dict)
    """What the queue's configuration says of it; a gate may add `classification`."""
    taken_at: float = 0.0
    """Loop time of its arrival here, for those who judge by how long something has waited in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """How much work waits."""

    ready: int
    """Messages that nobody holds."""
    delayed: int | None = None
    """Retries that wait for their time; None where the transport cannot tell."""
    in_flight: int | None = None
    """Messages that somebody holds; None where the transport cannot tell."""
    oldest_s: float | None = None
    """How long the oldest message that nobody holds has waited; None where there is none or it cannot be told."""
    how: str = ""
    """How this was found out, where there are several ways: one word for people."""
    next_deadline: float | None = None
    """Unix seconds: the earliest deadline of what nobody holds; None where there is none or it cannot be told."""
    withheld: int = 0
    """Of those ready: what is not handed up now for a good reason, such as a closed gate of its queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where requests of a queue go, and what is sent along."""

    base_url: str
    """Without a slash at its end."""
    path: str
    """Where the request names no endpoint."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Set by the system before those of the request, such as the queue's objective."""
    model: str = ""
    """The model's name there, which callers do not see; empty: what they call it."""


class Transport(Protocol):
    """One open connection to one queue. Every method raises `TransportLost` once it is gone, for ever."""

    @property
    def lost(self) -> asyncio.Event:
        """Set once the connection is gone."""

    @property
    def lost_because(self) -> str:
        """Why it is gone; empty while it is not."""

    def consuming(self, limit: int) -> AbstractAsyncContextManager[None]:
        """Inside it deliveries flow, at most `limit` unsettled ones.

        Leaving it stops the flow and gives back what was not received; what was received stays ours.
        """

    async def set_limit(self, limit: int) -> None:
        """Change the limit while consuming; a smaller one gives the surplus back."""

    async def receive(self) -> Delivery:
        """Wait for the next delivery. May be cancelled at any time and loses nothing by it."""

    async def settle(self, delivery: Delivery, disposition: Disposition) -> Settlement:
        """Carry out a disposition: store, publish the copy, release, acknowledge, in this order.

        Anything but `Settled` means: not acknowledged, and may be settled again.
        """

    async def extend(self, delivery: Delivery) -> None:
        """Keep a delivery ours for another lease, where the transport has leases."""

    async def publish(
        self, body: bytes, *, message_id: str | None = None, headers: Mapping[str, object] | None = None
    ) -> None:
        """Put a new message into the queue; returns once the broker has taken it over."""

    async def backlog(self) -> Backlog:
        """Count what waits."""


class Connect(Protocol):
    """Opens a connection; leaving the context closes it.

    Raises:
        TransportLost: when no connection could be had.
    """

    def __call__(self) -> AbstractAsyncContextManager[Transport]: ...


# ---------------------------------------------------------------- result store


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """The request is ours to run until the lease lapses."""

    starts: int
    """How many runs were begun and not finished, this one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyAnswered:
    """A terminal result is stored."""

    reply: KnownReply


@dataclass(frozen=True, slots=True)
class BelowFloor:
    """A copy with a higher attempt exists for sure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningElsewhere:
    """Another holder's lease is alive."""

    left_s: float


@dataclass(frozen=True, slots=True)
class Renewed:
    """The lease runs anew."""


@dataclass(frozen=True, slots=True)
class ClaimLost:
    """Another holder has it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The reply is the request's terminal result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What is known of a request that has no result."""

    running: bool
    """Somebody's lease on it is alive."""
    attempts: int = 0
    """How many attempts lie behind it for sure."""


Claim = Claimed | AlreadyAnswered | BelowFloor | RunningElsewhere
Renewal = Renewed | AlreadyAnswered | ClaimLost
Write = Stored | AlreadyAnswered | RunningElsewhere


class ResultStore(Protocol):
    """Terminal results and claims on requests; `docs/design/delivery.md` has the protocol.

    Every method raises `StoreUnavailable` when there is no answer in its time; each may be repeated with the same
    arguments.
    """

    async def claim(self, request_id: str, attempt: int, token: Token, deadline: float) -> Claim:
        """Ask to run a request."""

    async def renew(self, request_id: str, token: Token) -> Renewal:
        """Keep a claim alive; take one over that nobody holds."""

    async def release(self, request_id: str, token: Token, floor: int | None = None) -> None:
        """Give a claim up. `floor` says that a copy with this attempt is confirmed."""

    async def write(self, reply: Reply, usage_event: bytes | None, token: Token) -> Write:
        """Store a terminal result; the first one wins. Result, usage event and notification are one step."""

    async def cancel(self, reply: Reply) -> Write:
        """Store a failed reply whoever runs the request: what a caller's cancelling is."""

    async def cancellations(self, until: asyncio.Event, told: Callable[[str], None]) -> None:
        """Until told to stop: have `told` called with the id of each request that `cancel` was called for.

        A hint that makes it quick, and may be missed or unfounded: whoever runs a request asks by `renew`. Never fails.
        """

    async def bury(self, request_id: str, note: bytes) -> None:
        """Note why a message was dead-lettered, for 30 days."""

    async def read(self, request_id: str) -> bytes | None:
        """The stored result, as its JSON."""

    async def wait(self, request_id: str, within_s: float) -> bytes | None:
        """The stored result, waiting for it for up to `within_s` seconds."""

    async def progress(self, request_id: str) -> Progress:
        """How far a request without a result has come."""

    async def probe(self) -> None:
        """Find out whether the store takes writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxEntry:
    """A usage event that has not been sent for sure."""

    entry_id: str
    event: bytes


class Outbox(Protocol):
    """Usage events on their way to billing, stored with their results. Raises `StoreUnavailable`."""

    async def take(self, limit: int) -> Sequence[OutboxEntry]:
        """Up to `limit` entries: new ones, and those that another sender has left lying for a minute."""

    async def sent(self, entries: Sequence[OutboxEntry]) -> None:
        """Forget entries that the receiver has."""

    async def refused(self, entry: OutboxEntry, reason: str) -> None:
        """Put an entry aside that the receiver will never take."""

    async def size(self) -> int:
        """How many entries wait."""


# ---------------------------------------------------------------- gates


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a gate is told of a request."""

    request_id: str
    metadata: Mapping[str, str]
    labels: dict[str, str]
    """Of its queue; a classifying gate writes `classification` (`reserved` or `overflow`) here."""
    deadline: float
    """Unix seconds."""
    tenant: str | None = None
    payload: bytes = b""
    """For gates that count what it costs; not looked into otherwise."""


FeedbackKind = Literal["accepted", "capacity_rejected", "ttl_expired", "evicted", "rejected", "error", "not_sent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What became of a request that a gate has admitted."""

    kind: FeedbackKind
    """`capacity_rejected` is a 429 without a reason, or one that says saturated; `not_sent`: it never left us."""
    sent_at: float | None = None
    """Loop time at which it was sent: a rejection says nothing of what was decided later."""
    retry_after_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of the answer, with lower-case names."""
    input_tokens: int | None = None
    output_tokens: int | None = None


class Permit(Protocol):
    """What an admission has taken. Released exactly once, with what became of the request; a repeat does nothing."""

    async def release(self, seen: Feedback) -> None:
        """Give it back. Never fails: what cannot be given back lapses."""


RefusedBecause = Literal["gate_closed", "quota_exhausted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Go on."""

    permits: tuple[Permit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """Not yet: keep it, and ask again once `changed` is set, or after `within_s`."""

    within_s: float
    changed: asyncio.Event | None = None
    because: RefusedBecause = "gate_closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedAway:
    """Not here and now: give it back to its queue, uncounted."""

    because: RefusedBecause = "gate_closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Never: it ends with this answer."""

    status_code: int | None
    """An HTTP status, where the gate answers in the model's place."""
    error_code: str
    error: str


Verdict = Admitted | Parked | TurnedAway | Dropped


class Gate(Protocol):
    """Says whether a request may be sent now. `admit` counts what it admits against its last reading.

    A gate that stands at several places (a queue, a pool) is one object at each.
    """

    def budget(self) -> float:
        """The part of the capacity that is free, 0 to 1, by the last reading; never waits."""

    async def admit(self, asked: Asked) -> Verdict:
        """The verdict on one request.

        Raises:
            GateFailed: it cannot be said.
        """

    async def run(self, until: asyncio.Event) -> None:
        """Keep its readings fresh until told to stop; returns at once where there are none."""

    def closes_at(self) -> str:
        """At which load it closes, for people: `check` prints it."""


# ---------------------------------------------------------------- the fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What one worker says of itself, every few seconds; plain data, stored as JSON."""

    replica_id: str
    at: float
    """Unix seconds."""
    slots: int
    in_flight: int
    consuming: bool
    """It takes work now; one that idles because fewer replicas are wanted, or whose model is ill, does not."""
    fit: bool
    """It would take work if it were wanted: its model and its store are well, and it is not stopping."""
    service_s: float | None
    """Mean seconds for which a request has lately held a slot; None before the first one."""
    done_per_s: float
    """Requests finished a second, over the last minute."""
    model: str


class Fleet(Protocol):
    """The workers of one queue, as they see themselves, and how many of them are wanted. Raises `StoreUnavailable`.

    A worker that has not said anything for `FLEET_SILENT_S` counts as gone, and a wish that is not renewed lapses: a
    dead scaler must not keep workers idle.
    """

    async def beat(self, beat: Beat) -> int | None:
        """Say how one is; returns how many replicas are wanted, None where nobody says."""

    async def leave(self, replica_id: str) -> None:
        """A worker has ended."""

    async def members(self) -> Sequence[Beat]:
        """Those that were heard of lately."""

    async def desired(self) -> int | None:
        """How many replicas are wanted; None where nobody says."""

    async def want(self, replicas: int, for_s: float) -> None:
        """Say how many are wanted, for so many seconds."""


FLEET_SILENT_S: Final = 10.0

# ---------------------------------------------------------------- model


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model said: any status, with a whole body (a stream is put together)."""

    status_code: int
    reason: str
    body: bytes
    ttft_s: float | None = None
    tbt_s: float | None = None
    retry_after_s: float | None = None
    usage: Usage | None = None
    """Set where the body does not carry it."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """What gates and results need of its headers, by lower-case names: a few, and short."""


class ModelClient(Protocol):
    """Calls the model. Cancelling a call closes its connection, which stops the model."""

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
        """Send a payload, with `headers` besides those that every call has, and wait for the whole answer.

        `base_url` says to which of several gateways (that of the delivery's `Route`); who has one model ignores it.

        Raises:
            ModelGone, ModelCut, ModelSlow, BadResponse: see `errors.py`.
        """

    async def warm(self, connections: int) -> None:
        """Open connections ahead of the first requests. Never fails."""


# ---------------------------------------------------------------- traces


class CallSpan(Protocol):
    """One call to the model, as a trace shows it."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What tells the model which trace the call belongs to."""

    def ended(self, answer: Answer | ModelFailure | None, outcome: Outcome | None) -> None:
        """Note what came: None for a call that was closed from outside; and what an answer was judged to be."""


class Span(Protocol):
    """One delivery as a trace shows it, from its arrival to its settlement."""

    @property
    def ids(self) -> Mapping[str, str]:
        """What its log lines get: `trace_id`, where it belongs to a trace."""

    def calling(self, request: InferenceRequest) -> AbstractContextManager[CallSpan]:
        """A call to the model lasts as long as the context."""

    def settled(self, outcome: Outcome, how: str, *, request_id: str | None) -> None:
        """Note what became of it; the last note holds."""

    def failed(self, exc: BaseException) -> None:
        """Note a fault of ours."""

    def end(self) -> None:
        """It is over."""


class Tracer(Protocol):
    """Tells somebody what happens to each message, if anybody wants to know. Never waits, never fails."""

    def begin(self, delivery: Delivery) -> Span:
        """A delivery has arrived."""

    async def run(self, until: asyncio.Event) -> None:
        """Until told to stop: then send what is left, for a bounded time."""


# ---------------------------------------------------------------- billing


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver has the events, from now or from before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The receiver will not take these events, however often they are sent."""

    reason: str


class BillingSink(Protocol):
    """Takes usage events."""

    async def send(self, events: Sequence[bytes]) -> Delivered | Refused:
        """Send events, at most 100.

        Raises:
            SinkUnavailable: try again later.
        """


# ---------------------------------------------------------------- health


class Health:
    """Whether a neighbour is fit for work, as last seen. One writes it, the others look or are told of a change."""

    def __init__(self, name: str, *, ok: bool = False, reason: str = "not asked yet") -> None:
        self.name = name
        self.ok = ok
        self.reason = reason
        self.checked_at: float | None = None
        """Unix seconds of the last look."""
        self.wanted = asyncio.Event()
        """Set by who wants a look at once."""
        self.looked = asyncio.Event()
        """Set after each look; who waits for one clears it first."""
        self._watchers: list[Callable[[bool, str], None]] = []
        self._reported = False

    def watch(self, told: Callable[[bool, str], None]) -> None:
        """Have `told` called with the first verdict, whatever it is, and with each change of it."""
        self._watchers.append(told)
        if self._reported:
            told(self.ok, self.reason)

    def unwatch(self, told: Callable[[bool, str], None]) -> None:
        """Call it no more; a repeat does nothing."""
        if told in self._watchers:
            self._watchers.remove(told)

    def report(self, ok: bool, reason: str = "", *, checked_at: float | None = None) -> None:
        """Note what was seen."""
        changed = ok != self.ok or not self._reported
        self._reported = True
        self.ok, self.reason = ok, reason
        if checked_at is not None:
            self.checked_at = checked_at
        self.looked.set()
        if changed:
            for told in self._watchers:
                told(ok, reason)

    async def check_now(self, within_s: float) -> bool:
        """Have a look taken, wait for it for at most `within_s`, and say how it is."""
        self.looked.clear()
        self.wanted.set()
        try:
            async with asyncio.timeout(within_s):
                await self.looked.wait()
        except TimeoutError:
            pass
        return self.ok


LinkState = Literal["connecting", "suspended", "consuming", "stopping", "stopped"]
