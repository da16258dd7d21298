"""A dead request of llm-d-async as a new submission: the same, with a deadline and a token of its own. Pure."""

import math
from dataclasses import replace
from typing import Final

import msgspec

from inference_worker.errors import MalformedRequest
from inference_worker.lanes import CLASSIFICATION_LABEL
from inference_worker.llmd_messages import Envelope, read_member, write_envelope
from inference_worker.messages import LONGEST_TIMEOUT_S

UNKNOWN_S: Final = 3600.0
"""For a request that does not say when it was submitted."""
SHORTEST_S: Final = 60.0


def envelope_in(member: bytes) -> Envelope | None:
    """The envelope that a member is; None for anything else."""
    try:
        read = read_member(member)
    except MalformedRequest:
        return None
    return read if isinstance(read, Envelope) else None


def submitted_at(envelope: Envelope) -> float | None:
    """Unix seconds, as far as it says so."""
    if envelope.routing.enqueued_at_ms > 0:
        return envelope.routing.enqueued_at_ms / 1000
    return float(envelope.request.created) if envelope.request.created > 0 else None


def allowed_s(envelope: Envelope) -> float:
    """How long it had when it was submitted; an hour where that is not known."""
    began = submitted_at(envelope)
    given = UNKNOWN_S if began is None else envelope.request.deadline - began
    return min(max(given, SHORTEST_S), LONGEST_TIMEOUT_S)


def renewed_envelope(envelope: Envelope, now: float, token: str) -> bytes:
    """The member to put back: as much time as it had, no attempts behind it, its result where it was to go.

    What a gate has said of it is forgotten; everything that its caller said is kept as the bytes that came.
    """
    deadline = math.ceil(now + allowed_s(envelope))
    fields = msgspec.json.decode(envelope.data, type=dict[str, msgspec.Raw])
    fields["deadline"] = msgspec.Raw(str(deadline).encode())
    routing = replace(
        envelope.routing,
        retry_count=0,
        request_token=token,
        enqueued_at_ms=int(now * 1000),
        labels={name: text for name, text in envelope.routing.labels.items() if name != CLASSIFICATION_LABEL},
    )
    return write_envelope(replace(envelope, data=msgspec.json.encode(fields), routing=routing))
