"""Rows of a queue in Postgres as values: what a claim has, what is put there, and what a result is. Pure.

A row is read in one of two formats: an envelope of llm-d-async (`llmd_messages`), whose payload lies beside it as the
bytes that came, or a message of ours, whose attempts and headers lie beside it. What is neither is no request.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from inference_worker.errors import MalformedRequest
from inference_worker.llmd_messages import (
    Envelope,
    OwnMessage,
    generation_of,
    read_member,
    retried,
    routed,
    with_payload,
    without_payload,
    write_envelope,
)
from inference_worker.llmd_results import NoAnswer, result_for, result_json
from inference_worker.messages import Reply, usable_id
from inference_worker.ports import Route
from inference_worker.producer_requests import payload_key
from inference_worker.transports.sorted_set_members import own_score

REQUEST_QUEUE: Final = "request-sql"
RESULT_ROUTE: Final = "result-sql"
USABLE: Final = "1 to 512 bytes of UTF-8 without control characters"
LONGEST_TOKEN_BYTES: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlQueue:
    """A queue, and what its configuration says of the requests in it."""

    name: str = REQUEST_QUEUE
    queue_id: str = ""
    """The name, where it has none of its own."""
    results: str = ""
    """The route for its results, whatever the messages ask for; empty where they may choose."""
    default_results: str = RESULT_ROUTE
    """Where neither says anything."""
    result_ttl_s: int = 0
    """After which a result goes that nobody has taken; 0: never."""
    path: str = "/v1/completions"
    """Where a request in an envelope names no endpoint."""
    route: Route | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlClaim:
    """What it takes to settle a row."""

    seq: int
    attempt: int
    """The fence: a claim of the row that has another one is not this one."""
    body: bytes
    payload: bytes | None
    deadline: float
    cancelled: bool
    own_attempts: int
    deliveries: int
    """How often it was handed out since its last attempt, this time included."""
    lapses: int
    """How often its holder went silent since then."""
    message_id: str | None
    headers: Mapping[str, object]
    envelope: Envelope | None = None
    """None for our own format, and for what could not be read."""
    request_id: str = ""
    """The public id; empty where none could be read, and in our own format."""
    token: str = ""
    route: str = ""
    """Empty where the result goes to no route: our own format, and what has no id."""
    route_ttl_s: int = 0

    @property
    def entry_id(self) -> str:
        return str(self.seq)

    @property
    def generation(self) -> str:
        """What claims and results go by."""
        return generation_of(self.request_id, self.token)

    @property
    def attempts(self) -> int:
        """How many lie behind it."""
        return self.own_attempts if self.envelope is None else self.envelope.routing.retry_count

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.payload or b"")

    def message(self, reply: Reply) -> bytes:
        """What its route gets."""
        if self.envelope is not None:
            return result_for(self.envelope, reply)
        text = reply.error or "it could not be read"
        return result_json(self.request_id, NoAnswer(code="INVALID_REQUEST", text=text), token=self.token)

    def copy(self, attempts: int) -> bytes | None:
        """The envelope to be tried again; None for our own format, which stays as it is. Payloads stay in any case."""
        if self.envelope is None:
            return None
        once_more = retried(self.envelope)
        return write_envelope(replace(once_more, routing=replace(once_more.routing, retry_count=attempts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A message as its row has it."""

    request_id: str
    token: str
    deadline: float
    body: bytes
    payload: bytes | None


def claims_of(rows: Sequence[Any]) -> list[SqlClaim]:
    """Rows as `iw1_take` gives them, the earliest deadline first."""
    claims = [
        SqlClaim(
            seq=row["seq"],
            attempt=row["attempt"],
            body=row["body"],
            payload=row["payload"],
            deadline=row["deadline"],
            cancelled=row["cancelled"],
            own_attempts=row["attempts"],
            deliveries=row["deliveries"],
            lapses=row["lapses"],
            message_id=row["message_id"] or None,
            headers=headers_in(row["headers"]),
            request_id=row["request_id"],
            token=row["token"] if row["request_id"] else "",
        )
        for row in rows
    ]
    return sorted(claims, key=lambda claim: (claim.deadline, claim.seq))


def headers_in(stored: bytes | None) -> dict[str, object]:
    """What lies beside a message of ours; nothing where that cannot be read, as who wrote it was not we."""
    try:
        return {} if stored is None else msgspec.json.decode(stored, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def read_claim(claim: SqlClaim, queue: SqlQueue) -> tuple[SqlClaim, str]:
    """Read a row: what it takes to settle it, and why it is no request; empty where it is one."""
    try:
        member = read_member(claim.body)
    except MalformedRequest as exc:
        known = claim.request_id or exc.request_id or ""
        route = queue.results or queue.default_results if known else ""
        return replace(claim, request_id=known, route=route, route_ttl_s=queue.result_ttl_s), exc.reason
    if isinstance(member, OwnMessage):
        return replace(claim, request_id="", token=""), ""
    envelope = routed(
        member if claim.payload is None else with_payload(member, claim.payload),
        queue_id=queue.queue_id or queue.name,
        queue_name=queue.name,
        result_queue_name=queue.results,
        default_result_queue_name=queue.default_results,
        result_ttl_seconds=queue.result_ttl_s,
        labels=queue.labels,
    )
    if why := _not_storable(envelope):
        route = queue.results or queue.default_results
        unnamed = replace(claim, request_id=envelope.request.id, token="")
        return replace(unnamed, route=route, route_ttl_s=queue.result_ttl_s), why
    return (
        replace(
            claim,
            envelope=envelope,
            request_id=envelope.request.id,
            token=envelope.routing.request_token,
            route=envelope.routing.result_queue_name,
            route_ttl_s=envelope.routing.result_ttl_seconds,
        ),
        "",
    )


def _not_storable(envelope: Envelope) -> str:
    """Why what a producer has named cannot be put into a table, and into its index; empty where it can.

    Refused by the table it would come again for ever, and look as if Postgres did not answer.
    """
    if not usable_id(envelope.routing.result_queue_name):
        return f"result_queue_name must be {USABLE}"
    if envelope.routing.request_token and not _storable(envelope.routing.request_token):
        return f"request_token must be {USABLE}"
    return ""


def _storable(token: str) -> bool:
    return "\0" not in token and len(token.encode(errors="surrogatepass")) <= LONGEST_TOKEN_BYTES


def placed(body: bytes, now: float) -> Placed:
    """A message as it is put into the table; what cannot be read is looked at soon, and found to be no request."""
    try:
        member = read_member(body)
    except MalformedRequest:
        member = OwnMessage(body=body)
    if isinstance(member, OwnMessage):
        return Placed(
            request_id="", token=secrets.token_hex(16), deadline=own_score(body, now), body=body, payload=None
        )
    token = member.routing.request_token
    if not token or not _storable(token):  # The latter is found to be no request when it is taken.
        token = secrets.token_hex(16)
    apart, payload = without_payload(member, payload_key(member.request.id, token))
    return Placed(
        request_id=member.request.id,
        token=token,
        deadline=float(member.request.deadline),
        body=write_envelope(apart),
        payload=payload,
    )


def whole(body: bytes, payload: bytes | None) -> bytes:
    """An envelope with its payload in it; anything else as it is."""
    if payload is None:
        return body
    try:
        member = read_member(body)
    except MalformedRequest:
        return body
    if isinstance(member, OwnMessage):
        return body
    fields = msgspec.json.decode(member.data, type=dict[str, msgspec.Raw])
    fields["payload"] = msgspec.Raw(payload)
    routing = replace(member.routing, payload_ref="")
    return write_envelope(replace(member, data=msgspec.json.encode(fields), routing=routing))


def headers_as_stored(headers: Mapping[str, object] | None) -> bytes | None:
    """As JSON; None where there are none."""
    return msgspec.json.encode({name: str(value) for name, value in headers.items()}) if headers else None
