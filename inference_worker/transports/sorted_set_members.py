"""Members of a queue in a sorted set as values: names of keys, what a claim has, and what a result is there. Pure.

A member is opaque: it is claimed, given back and parked as the bytes that came. It is read in one of two formats: an
envelope of llm-d-async (`llmd_messages`), or a message of ours, whose attempts and headers lie beside it. What is
neither is no request.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from inference_worker.config.documents import BESIDE
from inference_worker.errors import MalformedRequest
from inference_worker.llmd_messages import (
    Envelope,
    OwnMessage,
    generation_of,
    read_member,
    retried,
    routed,
    write_envelope,
)
from inference_worker.llmd_results import NoAnswer, result_for, result_json
from inference_worker.messages import (
    CLOCK_SKEW_S,
    ERROR_CODES,
    LONGEST_TIMEOUT_S,
    ErrorCode,
    Reply,
    encode_reply,
)
from inference_worker.ports import Route
from inference_worker.redis_slots import beside
from inference_worker.results.redis import claim_key, result_key
from inference_worker.transports.sorted_set_scripts import PUSHED

REQUEST_QUEUE: Final = "request-sortedset"
RETRY_QUEUE: Final = "retry-sortedset"
RESULT_LIST: Final = "result-list"
PAYLOADS: Final = "request-payload:"
CANCELS: Final = "request-cancel:"
ACTIVE: Final = "request-active:"
LONGEST_NAME_SHOWN: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedSetQueue:
    """A queue, and what its configuration says of the requests in it."""

    name: str = REQUEST_QUEUE
    queue_id: str = ""
    """The name, where it has none of its own."""
    retries: str = RETRY_QUEUE
    """One set for all queues of a process; on a Cluster each queue has its own, in its slot."""
    results: str = ""
    """The list for its results, whatever the messages ask for; empty where they may choose."""
    default_results: str = RESULT_LIST
    """Where neither says anything."""
    result_ttl_s: int = 0
    """After which a whole list goes that got nothing new; 0: never."""
    path: str = "/v1/completions"
    """Where a request in an envelope names no endpoint."""
    route: Route | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    queues: Set[str] = frozenset()
    """The names of all queues of the process: no message may have its result sent to a key of them."""
    clustered: bool = False
    """It is on a Cluster: all its keys lie in its slot, by a hash tag (`{<queue>}:claimed`)."""

    @property
    def dead_letters(self) -> str:
        """The stream of what ended as no result or as a failure beyond repair."""
        return self._beside("dead")

    @property
    def delayed(self) -> str:
        """Retries in our own format."""
        return self._beside("delayed")

    @property
    def own_results(self) -> str:
        """The list of what asks for no other."""
        return self.results or self.default_results

    @property
    def own_retries(self) -> str:
        """Where its retries in envelopes are put."""
        return self._beside(self.retries) if self.clustered else self.retries

    @property
    def keys(self) -> list[str]:
        """As every script has them."""
        book = [self._beside(name) for name in ("claimed", "claim-owners", "claims-idx", "claim-notes")]
        return [self.name, *book, self.delayed, self.own_retries, self.dead_letters]

    def lies_in_a_queue(self, key: str) -> bool:
        """Whether it is the key of a queue, or one of those beside it: a result there would end that queue."""
        if key in self.queues or key in (self.name, self.own_retries):
            return True
        queue, _, beside = key.rpartition(":")
        return beside in BESIDE["redis-sortedset"] and (queue in self.queues or key in self.keys)

    def _beside(self, name: str) -> str:
        return beside(self.name, name) if self.clustered else f"{self.name}:{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A member that was claimed, as the script gives it."""

    claim_id: bytes
    number: int
    """Of the claim in its session: with the session it is the owner."""
    member: bytes
    score: bytes
    token: str
    """Of the submission; empty where it has none, as in our own format."""
    cancelled: bool
    attempts: int
    deliveries: int
    """How often it was handed out since its last attempt, this time included."""
    lapses: int
    """How often its holder went silent since then."""
    message_id: str | None
    headers: Mapping[str, object]

    @property
    def entry_id(self) -> str:
        """The claim's id as text, one for one."""
        return self.claim_id.decode(errors="surrogateescape")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What it takes to settle a member."""

    taken: Taken
    envelope: Envelope | None
    """None for our own format, and for what could not be read."""
    request_id: str
    """The public id; empty where none could be read."""
    result_list: str
    """Empty where the result goes to no list: our own format, and what has no id."""
    result_ttl_s: int

    @property
    def generation(self) -> str:
        """What claims and results go by."""
        return generation_of(self.request_id, self.taken.token)

    @property
    def cancel_key(self) -> str:
        """What its producer sets to cancel it; empty where it cannot."""
        return CANCELS + self.request_id if self.taken.token and self.result_list else ""

    def keys(self, outbox: str) -> list[str]:
        """Those of the request's end, for one that goes to a list."""
        return [
            *request_keys(self.generation, outbox),
            *(self.result_list, ACTIVE + self.request_id, CANCELS + self.request_id, self.payload_key),
        ]

    @property
    def lies_apart(self) -> bool:
        """Its payload has a key of its own, or may have one."""
        return self.envelope is None or self.envelope.routing.payload_ref != ""

    @property
    def payload_key(self) -> str:
        """Where its payload lies, if it lies apart."""
        payload = self.envelope.routing.payload_ref if self.envelope is not None else ""
        return payload if payload.startswith(PAYLOADS) else f"{PAYLOADS}{self.request_id}:{self.taken.token}"

    def message(self, reply: Reply) -> bytes:
        """What its list gets."""
        if self.envelope is not None:
            return result_for(self.envelope, reply)
        text = reply.error or "it could not be read"
        return result_json(self.request_id, NoAnswer(code="INVALID_REQUEST", text=text), token=self.taken.token)

    def copy(self, attempts: int) -> bytes:
        """The member to be tried again: where it keeps no count of its attempts itself, byte for byte."""
        if self.envelope is None:
            return self.taken.member
        once_more = retried(self.envelope)
        return write_envelope(replace(once_more, routing=replace(once_more.routing, retry_count=attempts)))

    @property
    def attempts(self) -> int:
        """How many lie behind it."""
        return self.taken.attempts if self.envelope is None else self.envelope.routing.retry_count


def request_keys(request_id: str, outbox: str) -> list[str]:
    """Those of any request's end."""
    return [result_key(request_id), claim_key(request_id), outbox, f"infer_dead:{request_id}"]


def taken_of(rows: Sequence[Any]) -> list[Taken]:
    """Members as the script `TAKE` gives them."""
    return [
        Taken(
            claim_id=bytes(row[0]),
            number=int(row[1]),
            member=bytes(row[2]),
            score=bytes(row[3]),
            token=_text(row[4]),
            cancelled=bool(row[5]),
            attempts=int(row[6]),
            deliveries=int(row[7]),
            lapses=int(row[8]),
            message_id=_text(row[9]) or None,
            headers=dict(zip(map(_text, row[10][::2]), map(_text, row[10][1::2]), strict=True)),
        )
        for row in rows
    ]


def read_taken(taken: Taken, queue: SortedSetQueue) -> tuple[Claim, str]:
    """Read a member: what it takes to settle it, and why it is no request; empty where it is one."""
    try:
        member = read_member(taken.member)
    except MalformedRequest as exc:
        known = exc.request_id or ""
        results = queue.own_results if known else ""
        claim = Claim(
            taken=taken,
            envelope=None,
            request_id=known,
            result_list=results,
            result_ttl_s=queue.result_ttl_s,
        )
        return claim, exc.reason
    if isinstance(member, OwnMessage):
        own = Claim(taken=taken, envelope=None, request_id="", result_list="", result_ttl_s=0)
        return own, ""
    envelope = routed(
        member,
        queue_id=queue.queue_id or queue.name,
        queue_name=queue.name,
        result_queue_name=queue.results,
        default_result_queue_name=queue.default_results,
        result_ttl_seconds=queue.result_ttl_s,
        labels=queue.labels,
    )
    why = ""
    if queue.lies_in_a_queue(asked := envelope.routing.result_queue_name):
        why = f"result_queue_name is {asked[:LONGEST_NAME_SHOWN]}, which is a key of a queue; accepted: another"
        envelope = replace(envelope, routing=replace(envelope.routing, result_queue_name=queue.default_results))
    # The script and the reader of JSON agree on the token but for members that say it twice: the reader counts.
    claim = Claim(
        taken=replace(taken, token=envelope.routing.request_token),
        envelope=envelope,
        request_id=envelope.request.id,
        result_list=envelope.routing.result_queue_name,
        result_ttl_s=envelope.routing.result_ttl_seconds,
    )
    return claim, why


def sent(reply: Reply) -> bytes:
    """A terminal result whose body went to a list: what a claim needs to know of it."""
    return encode_reply(replace(reply, result=None, answer=None))[:-1] + PUSHED


def stored_reply(request_id: str, stored: bytes) -> Reply:
    """A terminal result as it was stored; a foreign or damaged one is a failure, and says so."""
    try:
        seen = msgspec.json.decode(stored, type=_Stored)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        seen = _Stored(status="failed", status_code=500, error="its stored result cannot be read")
    done = seen.status == "completed"
    code: ErrorCode | None = next((code for code in ERROR_CODES if code == seen.error_code), None)
    return Reply(
        request_id=request_id,
        status="completed" if done else "failed",
        status_code=seen.status_code,
        attempt=seen.attempt,
        replica_id=seen.replica_id,
        finished_at=seen.finished_at,
        result=bytes(seen.result) if done else None,
        error=None if done else seen.error,
        error_code=None if done else code or "bad_response",
    )


def own_score(body: bytes, now: float) -> float:
    """The deadline of a message in our own format; now, so that it is looked at soon, where it cannot be read."""
    try:
        said = msgspec.json.decode(body, type=_Times)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return now
    if said.timeout_s <= 0:
        return now
    return min(said.received_at, now + CLOCK_SKEW_S) + min(said.timeout_s, LONGEST_TIMEOUT_S)


def letter_fields(
    claim: Claim, message_id: str | None, headers: Mapping[str, object], notes: Mapping[str, str]
) -> list[str | bytes]:
    """The fields of a dead letter: the member, what lay beside it, and what became of it."""
    fields: list[str | bytes] = ["attempt", str(claim.attempts), "request", claim.taken.member]
    if (job_id := message_id or claim.request_id) != "":
        fields = ["job_id", job_id, *fields]
    ours = {"job_id", "attempt", "request", *notes}
    for name, value in headers.items():
        if name not in ours:
            fields += [name, str(value)]
    return [*fields, *(part for pair in notes.items() for part in pair)]


class _Stored(msgspec.Struct):
    status: str
    status_code: int = 0
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    error_code: str | None = None
    attempt: int = 0
    replica_id: str = ""
    finished_at: float = 0.0


class _Times(msgspec.Struct):
    received_at: float
    timeout_s: float


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
