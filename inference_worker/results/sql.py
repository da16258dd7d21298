"""Results, claims and the billing outbox in Postgres: the same protocol as in Redis. `docs/sql.md` lists the tables."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

from inference_worker.disposition import Token
from inference_worker.errors import StoreUnavailable
from inference_worker.messages import KnownReply, Reply, encode_reply, known_reply
from inference_worker.ports import (
    AlreadyAnswered,
    BelowFloor,
    Claim,
    Claimed,
    ClaimLost,
    OutboxEntry,
    Progress,
    Renewal,
    Renewed,
    RunningElsewhere,
    Stored,
    Write,
)
from inference_worker.sql_place import SqlPlace
from inference_worker.timing import quietly, stopped_within

ENDED: Final = "iw_ended"
CANCELLED: Final = "iw_cancelled"
DEAD_NOTE_TTL_S: Final = 30 * 86_400.0
LEFT_LYING_S: Final = 60.0
"""After this time another sender takes over an event that one has taken and not removed."""

LOOK_S: Final = 2.0
"""How often what is waited for is looked for, told or not."""

WANT_S: Final = 60.0
HINT_S: Final = 2.0


class SqlStore:
    """The result store of `ports.py`."""

    def __init__(self, place: SqlPlace, *, deployment_id: str, replica_id: str, lease_s: float, ttl_s: float) -> None:
        self._link = place.link
        self._ears = place.ears
        self.deployment_id = deployment_id
        self._replica_id = replica_id
        self.lease_s = lease_s
        self.ttl_s = float(ttl_s)

    async def claim(self, request_id: str, attempt: int, token: Token, deadline: float) -> Claim:
        """See `ports.ResultStore`."""
        said, known, number = await self._link.row(
            "select * from iw1_claim($1, $2, $3, $4, $5)", row_id(request_id), attempt, token, self.lease_s, deadline
        )
        match said:
            case "CLAIMED":
                return Claimed(starts=int(number))
            case "SUPERSEDED":
                return BelowFloor()
            case "BUSY":
                return RunningElsewhere(left_s=number)
            case _:
                return AlreadyAnswered(reply=known_of(known))

    async def renew(self, request_id: str, token: Token) -> Renewal:
        """See `ports.ResultStore`."""
        said, known = await self._link.row(
            "select * from iw1_renew($1, $2, $3)", row_id(request_id), token, self.lease_s
        )
        match said:
            case "OK":
                return Renewed()
            case "LOST":
                return ClaimLost()
            case _:
                return AlreadyAnswered(reply=known_of(known))

    async def release(self, request_id: str, token: Token, floor: int | None = None) -> None:
        """See `ports.ResultStore`."""
        await self._link.fetch("select iw1_release($1, $2, $3, $4)", row_id(request_id), token, floor, self.lease_s)

    async def write(self, reply: Reply, usage_event: bytes | None, token: Token) -> Write:
        """See `ports.ResultStore`."""
        return await self._finish(reply, usage_event, token, past_token=False)

    async def cancel(self, reply: Reply) -> Write:
        """See `ports.ResultStore`."""
        written = await self._finish(reply, None, Token(""), past_token=True)
        # Also where it is said again: an answer that got lost may have taken its hint along. Without it, whoever runs
        # the request finds out at its next renewal.
        said = row_id(reply.request_id).hex()
        telling = self._link.fetch("select pg_notify($1, $2)", CANCELLED, said)
        await quietly(telling, HINT_S, StoreUnavailable)
        return written

    async def cancellations(self, until: asyncio.Event, told: Callable[[str], None]) -> None:
        """See `ports.ResultStore`."""

        def hear(said: str) -> None:
            # Anybody may say anything on a channel; what is no id is none of ours.
            with suppress(ValueError):
                told(bytes.fromhex(said).decode(errors="surrogatepass"))

        with self._ears.hearing(CANCELLED, hear):
            await until.wait()

    async def bury(self, request_id: str, note: bytes) -> None:
        """See `ports.ResultStore`."""
        await self._link.fetch("select iw1_note($1, $2, $3)", row_id(request_id), note, DEAD_NOTE_TTL_S)

    async def read(self, request_id: str) -> bytes | None:
        """See `ports.ResultStore`."""
        rows = await self._link.fetch(
            "select reply from iw_state where id = $1 and expires > clock_timestamp()", row_id(request_id)
        )
        return rows[0][0] if rows else None

    async def wait(self, request_id: str, within_s: float) -> bytes | None:
        """See `ports.ResultStore`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        if (stored := await self.read(request_id)) is not None or within_s <= 0:
            return stored
        told, (name,) = asyncio.Event(), await self._link.row("select encode(sha256($1), 'hex')", row_id(request_id))
        who, wanted_until = secrets.token_hex(8), 0.0
        with self._ears.hearing(ENDED, lambda said: told.set() if said == name else None):
            try:
                while True:
                    told.clear()
                    if loop.time() > wanted_until - LOOK_S:
                        wanted_until = loop.time() + WANT_S
                        await self._ears.stands(ENDED)
                        await self._link.fetch("select iw1_want($1, $2, $3)", f"iw_e_{name}", who, WANT_S)
                    if (stored := await self.read(request_id)) is not None:
                        return stored
                    left_s = until - loop.time()
                    if left_s <= 0:
                        return None
                    await stopped_within(told, min(left_s, LOOK_S))
            finally:
                forgetting = self._link.fetch(
                    "delete from iw_waiting where what = $1 and who = $2", f"iw_e_{name}", who
                )
                await quietly(forgetting, HINT_S, StoreUnavailable)

    async def progress(self, request_id: str) -> Progress:
        """See `ports.ResultStore`."""
        rows = await self._link.fetch(
            "select holder is not null and held_until > clock_timestamp(), lowest from iw_state"
            " where id = $1 and expires > clock_timestamp()",
            row_id(request_id),
        )
        return Progress(running=bool(rows[0][0]), attempts=rows[0][1]) if rows else Progress(running=False)

    async def probe(self) -> None:
        """See `ports.ResultStore`. A server that only reads refuses it."""
        probe = f"probe/{self.deployment_id}/{self._replica_id}"
        await self._link.fetch("select iw1_want($1, $2, 1)", "iw_probe", probe[:512])

    # ------------------------------------------------------------ what replays of dead letters ask

    async def known(self, request_id: str) -> KnownReply | None:
        """What is stored, without the answer, which may be large; None where nothing is."""
        rows = await self._link.fetch(
            "select case when status = 'failed' then reply end from iw_state"
            " where id = $1 and reply is not null and expires > clock_timestamp()",
            row_id(request_id),
        )
        return known_of(rows[0][0]) if rows else None

    async def dead_note(self, request_id: str) -> bytes | None:
        """What `bury` has noted."""
        rows = await self._link.fetch(
            "select note from iw_notes where id = $1 and expires > clock_timestamp()", row_id(request_id)
        )
        return rows[0][0] if rows else None

    async def make_room(self, request_id: str, deadline: float) -> Literal["completed", "running"] | None:
        """Forget a failed result and the claim, so that the request can run anew; None where that was done."""
        match (await self._link.row("select iw1_make_room($1)", row_id(request_id)))[0]:
            case "COMPLETED":
                return "completed"
            case "BUSY":
                return "running"
            case _:
                return None

    async def _finish(self, reply: Reply, event: bytes | None, token: Token, *, past_token: bool) -> Write:
        said, known, left_s = await self._link.row(
            "select * from iw1_finish($1, $2, $3, $4, $5, $6, $7, $8, false)",
            row_id(reply.request_id),
            token,
            encode_reply(reply),
            reply.status,
            self.ttl_s,
            event,
            self.deployment_id,
            past_token,
        )
        match said:
            case "STORED":
                return Stored()
            case "BUSY":
                return RunningElsewhere(left_s=left_s)
            case _:
                return AlreadyAnswered(reply=known_of(known))


class SqlOutbox:
    """The outbox of `ports.py`: a table of usage events, of which each sender locks its own."""

    def __init__(self, place: SqlPlace, *, deployment_id: str, replica_id: str) -> None:
        self._link = place.link
        self._deployment_id = deployment_id
        self._replica_id = replica_id

    async def take(self, limit: int) -> Sequence[OutboxEntry]:
        """See `ports.Outbox`."""
        rows: Sequence[Any] = await self._link.fetch(
            "select * from iw1_usage_take($1, $2, $3, $4)", self._deployment_id, self._replica_id, limit, LEFT_LYING_S
        )
        return [OutboxEntry(entry_id=str(row[0]), event=row[1]) for row in sorted(rows, key=lambda row: int(row[0]))]

    async def sent(self, entries: Sequence[OutboxEntry]) -> None:
        """See `ports.Outbox`."""
        if entries:
            await self._link.fetch("delete from iw_usage where seq = any($1::bigint[])", _numbers(entries))

    async def refused(self, entry: OutboxEntry, reason: str) -> None:
        """See `ports.Outbox`."""
        await self._link.fetch(
            "with gone as (delete from iw_usage where seq = any($1::bigint[]) returning deployment, event)"
            " insert into iw_usage_refused (deployment, event, reason) select deployment, event, $2 from gone",
            _numbers([entry]),
            reason[:500].replace("\0", " "),
        )

    async def size(self) -> int:
        """See `ports.Outbox`."""
        return int(
            (await self._link.row("select count(*) from iw_usage where deployment = $1", self._deployment_id))[0]
        )


def row_id(request_id: str) -> bytes:
    """A request's id as the tables have it: bytes, since a generation has a NUL inside, which no text has there."""
    return request_id.encode(errors="surrogatepass")


def known_of(reply: bytes | None) -> KnownReply:
    """What is told of a result: a failed one whole, of a completed one only that it is."""
    return KnownReply(status="completed", status_code=200) if reply is None else known_reply(reply)


def _numbers(entries: Sequence[OutboxEntry]) -> list[int]:
    return [int(entry.entry_id) for entry in entries]
