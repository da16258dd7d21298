"""The fleet of `ports.py` in Postgres: what the workers of a queue say of themselves, and how many are wanted."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from inference_worker.ports import FLEET_SILENT_S, Beat
from inference_worker.sql_place import SqlPlace


class SqlFleet:
    """The workers of one queue. `at` is when Postgres heard of each."""

    def __init__(self, place: SqlPlace, *, queue: str, silent_s: float = FLEET_SILENT_S) -> None:
        self._link = place.link
        self._queue = queue
        self._silent_s = silent_s

    async def beat(self, beat: Beat) -> int | None:
        """See `ports.Fleet`."""
        await self._link.fetch(
            "insert into iw_fleet values ($1, $2, $3, clock_timestamp()) on conflict (queue, replica_id)"
            " do update set beat = excluded.beat, heard_at = excluded.heard_at",
            self._queue,
            beat.replica_id,
            msgspec.json.encode(beat),
        )
        return await self.desired()

    async def leave(self, replica_id: str) -> None:
        """See `ports.Fleet`. Those who have long been silent go, too."""
        await self._link.fetch(
            "delete from iw_fleet where queue = $1 and (replica_id = $2"
            " or heard_at < clock_timestamp() - make_interval(secs => 60 * $3))",
            self._queue,
            replica_id,
            self._silent_s,
        )

    async def members(self) -> Sequence[Beat]:
        """See `ports.Fleet`. What cannot be read is left out: another version of ours has written it."""
        rows = await self._link.fetch(
            "select beat, extract(epoch from heard_at)::double precision from iw_fleet"
            " where queue = $1 and heard_at >= clock_timestamp() - make_interval(secs => $2)",
            self._queue,
            self._silent_s,
        )
        heard = [read for said, at in rows if (read := _beat(said, at)) is not None]
        return sorted(heard, key=lambda beat: beat.replica_id)

    async def desired(self) -> int | None:
        """See `ports.Fleet`."""
        rows = await self._link.fetch(
            "select replicas from iw_wishes where queue = $1 and until > clock_timestamp()", self._queue
        )
        return rows[0][0] if rows else None

    async def want(self, replicas: int, for_s: float) -> None:
        """See `ports.Fleet`."""
        await self._link.fetch(
            "insert into iw_wishes values ($1, $2, clock_timestamp() + make_interval(secs => $3))"
            " on conflict (queue) do update set replicas = excluded.replicas, until = excluded.until",
            self._queue,
            replicas,
            float(for_s),
        )


def _beat(said: bytes, at: float) -> Beat | None:
    try:
        return replace(msgspec.json.decode(said, type=Beat), at=at)
    except (msgspec.MsgspecError, RecursionError):
        return None
