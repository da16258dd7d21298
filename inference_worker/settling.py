"""The part of settling that every transport does alike: what is stored, and what is released, and when.

The order never changes: result and usage event, copy confirmed, release, acknowledgement.
"""

from typing import Final, assert_never

import msgspec

from inference_worker.disposition import (
    Ack,
    Busy,
    DeadLetter,
    DeliveryLost,
    Disposition,
    Hold,
    Known,
    Nack,
    Republish,
    Settlement,
    StoreSilent,
    Token,
)
from inference_worker.errors import StoreUnavailable
from inference_worker.ports import AlreadyAnswered, ResultStore, RunningElsewhere
from inference_worker.timing import quietly

COURTESY_S: Final = 2.0
"""How long a release or a note may take, which nothing depends on."""


async def store_reply(store: ResultStore, disposition: Ack | DeadLetter) -> Settlement | None:
    """Store the reply, if there is one. None: go on and acknowledge."""
    if disposition.reply is None:
        return None
    event = disposition.usage_event if isinstance(disposition, Ack) else None
    try:
        token = disposition.claim.token if disposition.claim is not None else Token("")
        written = await store.write(disposition.reply, event, token)
    except StoreUnavailable:
        return StoreSilent()
    match written:
        case AlreadyAnswered(reply=known):
            return Known(reply=known)
        case RunningElsewhere(left_s=left_s):
            return Busy(left_s=left_s)
        case _:
            return None


async def release(store: ResultStore, claim: Hold | None, floor: int | None = None) -> None:
    """Give the claim up, if there is one and the store answers; otherwise its lease lapses."""
    if claim is not None:
        await quietly(store.release(claim.request_id, claim.token, floor), COURTESY_S, StoreUnavailable)


async def settle_late(store: ResultStore, disposition: Disposition, now: float) -> Settlement:
    """The delivery is not ours any more: what can still be stored or released is. Whoever has it finds the result."""
    match disposition:
        case Ack() | DeadLetter():
            if (not_yet := await store_reply(store, disposition)) is not None:
                return not_yet
            if isinstance(disposition, DeadLetter):
                await bury(store, disposition, now)
            return DeliveryLost(stored=disposition.reply is not None)
        case Nack(claim=claim) | Republish(claim=claim):
            await release(store, claim)
            return DeliveryLost(stored=False)
        case _:
            assert_never(disposition)


async def bury(store: ResultStore, letter: DeadLetter, now: float) -> None:
    """Note why a message is dead-lettered, if it has an id and the store answers."""
    if letter.reply is None:
        return
    request_id = letter.reply.request_id
    await quietly(store.bury(request_id, death_note(request_id, letter, now)), COURTESY_S, StoreUnavailable)


def death_note(request_id: str, letter: DeadLetter, now: float) -> bytes:
    """Why a message is dead-lettered, as `dlq` reads it."""
    return msgspec.json.encode(
        {
            "request_id": request_id,
            "reason": letter.reason,
            "detail": letter.detail[:1000],
            "attempts": letter.attempts,
            "status_code": letter.status_code,
            "dead_at": now,
        }
    )
