"""Messages of Google Cloud Pub/Sub: what a delivery asks for, where its result goes, what a dead letter says. Pure.

A message is the bare request, with no envelope around it. Its attributes are merged into the request's metadata and
win, as whoever publishes has set them last. Not here: how a message is pulled and acknowledged (`gcp_pubsub.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from inference_worker.disposition import DeadLetter
from inference_worker.errors import MalformedRequest
from inference_worker.llmd_messages import OwnMessage, read_bare, to_request
from inference_worker.llmd_results import NoAnswer, outcome_of, result_json
from inference_worker.messages import InferenceRequest, Reply, public_id, request_id_in
from inference_worker.ports import Route
from inference_worker.pubsub_values import Pulled

RESULT_ROUTE: Final = "result_route"
MESSAGE_ID: Final = "message_id"
"""The attribute that names a message where its publisher wants to: the service draws ids of its own."""

MOST_ATTRIBUTE: Final = 1024
"""Bytes of an attribute's value."""

MOST_ATTRIBUTES: Final = 100
"""Of one message."""

MOST_RESULT: Final = 9_500_000
"""Bytes of a result: a message of the service is of up to 10 MB."""

SOURCE: Final = "CloudPubSubDeadLetterSourceSubscription"
"""The attribute by which the service says it, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PubsubQueue:
    """One subscription, and what its requests are told."""

    project: str = "project"
    name: str = "requests"
    """Of the subscription."""
    results: str = "results"
    """The topic of results; empty: they are stored only."""
    path: str = "/v1/completions"
    route: Route | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def subscription(self) -> str:
        return _full(self.project, "subscriptions", self.name)

    @property
    def result_topic(self) -> str:
        return _full(self.project, "topics", self.results) if self.results else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PubsubClaim:
    """A delivery in our hands, as far as it could be read."""

    pulled: Pulled
    request: InferenceRequest | None = None
    """None for our own format, and for what could not be read."""
    request_id: str = ""
    """What claims and results go by; empty where none could be read."""
    wrong: str = ""
    """What is wrong with it, where it is no request."""
    redelivered: bool = False

    @property
    def size_bytes(self) -> int:
        return len(self.pulled.data)

    @property
    def headers(self) -> Mapping[str, object]:
        return dict(self.pulled.attributes) if self.request is None else self.request.metadata

    @property
    def message_id(self) -> str:
        return self.pulled.attributes.get(MESSAGE_ID) or self.pulled.message_id

    @property
    def result_attributes(self) -> dict[str, str]:
        """Those of its result: the route that its producer reads by, where it has one."""
        route = str(self.headers.get(RESULT_ROUTE) or "")
        return {RESULT_ROUTE: route} if route and len(route.encode()) <= MOST_ATTRIBUTE else {}

    def result(self, reply: Reply) -> bytes:
        """The message that says how it ended."""
        said = result_json(public_id(reply.request_id), outcome_of(reply))
        if len(said) <= MOST_RESULT:
            return said
        text = f"the answer makes a result of {len(said)} bytes, more than Pub/Sub takes"
        return result_json(public_id(reply.request_id), NoAnswer(code="INFERENCE_ERROR", text=text))

    def refusal(self, detail: str) -> bytes:
        """The result of what has no id of its own: it is named by the id that publishing gave."""
        return result_json(self.message_id, NoAnswer(code="INVALID_REQUEST", text=detail))

    def dead_attributes(self, queue: PubsubQueue, letter: DeadLetter) -> dict[str, str]:
        """The attributes that came, as many as there is room for, and why it is dead."""
        ours = {
            MESSAGE_ID: self.message_id,
            SOURCE: queue.name,
            "dead_reason": letter.reason,
            "dead_detail": letter.detail.encode()[:MOST_ATTRIBUTE].decode(errors="ignore") or "-",
            "dead_attempts": str(letter.attempts),
            "dead_status": str(letter.status_code),
        }
        # One more than the service takes, and it would be refused, and come again, as often as it may be delivered.
        theirs = {name: value for name, value in self.pulled.attributes.items() if name not in ours}
        return dict(islice(theirs.items(), MOST_ATTRIBUTES - len(ours))) | ours


def read_pulled(pulled: Pulled, queue: PubsubQueue, now: float) -> PubsubClaim:
    """What a delivery asks for. Never fails: what is no request says why."""
    claim = PubsubClaim(pulled=pulled, redelivered=pulled.delivery_attempt > 1)
    try:
        member = read_bare(pulled.data)
        if isinstance(member, OwnMessage):
            request_id = request_id_in(pulled.data, message_id=claim.message_id, now=now)
            return replace(claim, request_id=request_id or "")
        request = to_request(member, path=queue.path, now=now)
    except MalformedRequest as exc:
        return replace(claim, request_id=exc.request_id or "", wrong=exc.reason)
    merged = {**request.metadata, **pulled.attributes}
    return replace(claim, request=replace(request, metadata=merged), request_id=request.request_id)


def attributes_of(message_id: str | None, headers: Mapping[str, object] | None) -> dict[str, str]:
    """Attributes of a new message; a header that is no text is left out."""
    said = {name: value for name, value in (headers or {}).items() if isinstance(value, str)}
    return said if message_id is None else {**said, MESSAGE_ID: message_id}


def _full(project: str, kind: str, name: str) -> str:
    """A name as the service has it; one that is whole already stays."""
    return name if name.startswith("projects/") else f"projects/{project}/{kind}/{name}"
