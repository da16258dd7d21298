"""The workers of one queue as they see themselves, and how many are wanted: in Redis, or in this process.

Redis' own clock says who has been silent, so that the workers' clocks do not matter. Nothing here decides how many are
wanted (`scaling`), or what a worker makes of it (`fleet_reporter`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from inference_worker.ports import FLEET_SILENT_S, Beat
from inference_worker.redis_scripts import RedisCommands, Script

BEAT: Final = Script(
    """
-- KEYS workers, wish   ARGV replica, beat, ms of silence after which a worker is gone
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local new = redis.call('HSET', KEYS[1], ARGV[1], string.format('%d %s', now, ARGV[2]))
-- Only when one joins, which is when the hash grows: so it stays small, and a beat costs the same in any fleet.
if new == 1 then
  local all = redis.call('HGETALL', KEYS[1])
  for i = 1, #all, 2 do
    local at = tonumber(string.match(all[i + 1], '^%d+'))
    if not at or now - at > tonumber(ARGV[3]) then redis.call('HDEL', KEYS[1], all[i]) end
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return redis.call('GET', KEYS[2])
"""
)

MEMBERS: Final = Script(
    """
-- KEYS workers   ARGV ms of silence after which a worker is gone
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local all, heard = redis.call('HGETALL', KEYS[1]), {}
for i = 2, #all, 2 do
  local at = tonumber(string.match(all[i], '^%d+'))
  if at and now - at <= tonumber(ARGV[1]) then heard[#heard + 1] = all[i] end
end
return heard
"""
)


def workers_key(queue: str) -> str:
    """The hash of the workers' last words, by replica."""
    return f"infer_workers:{queue}"


def wish_key(queue: str) -> str:
    """How many replicas are wanted; it expires."""
    return f"infer_desired:{queue}"


class RedisFleet:
    """The fleet of `ports.py` in Redis. On a Cluster the queue's name has a hash tag."""

    def __init__(self, link: RedisCommands, *, queue: str, silent_s: float = FLEET_SILENT_S) -> None:
        self._link = link
        self._silent_ms = max(round(silent_s * 1000), 1)
        self._workers = workers_key(queue)
        self._wish = wish_key(queue)

    async def beat(self, beat: Beat) -> int | None:
        """See `ports.Fleet`."""
        said = msgspec.json.encode(beat)
        return _wish(await self._link.run(BEAT, (self._workers, self._wish), beat.replica_id, said, self._silent_ms))

    async def leave(self, replica_id: str) -> None:
        """See `ports.Fleet`."""
        await self._link.do("HDEL", self._workers, replica_id)

    async def members(self) -> Sequence[Beat]:
        """See `ports.Fleet`. Each `at` is when Redis heard of it. What cannot be read is left out."""
        heard = await self._link.run(MEMBERS, (self._workers,), self._silent_ms)
        return sorted(filter(None, map(_beat, heard)), key=lambda beat: beat.replica_id)

    async def desired(self) -> int | None:
        """See `ports.Fleet`."""
        return _wish(await self._link.do("GET", self._wish))

    async def want(self, replicas: int, for_s: float) -> None:
        """See `ports.Fleet`."""
        await self._link.do("SET", self._wish, replicas, "PX", max(round(for_s * 1000), 1))


class MemoryFleet:
    """The fleet of `ports.py` in this process. Times are Unix seconds of `now`."""

    def __init__(self, *, now: Callable[[], float]) -> None:
        self._now = now
        self._beats: dict[str, Beat] = {}
        self._wish: int | None = None
        self._wished_until = 0.0

    async def beat(self, beat: Beat) -> int | None:
        """See `ports.Fleet`."""
        self._forget_silent()
        self._beats[beat.replica_id] = replace(beat, at=self._now())
        return await self.desired()

    async def leave(self, replica_id: str) -> None:
        """See `ports.Fleet`."""
        self._beats.pop(replica_id, None)

    async def members(self) -> Sequence[Beat]:
        """See `ports.Fleet`."""
        self._forget_silent()
        return sorted(self._beats.values(), key=lambda beat: beat.replica_id)

    async def desired(self) -> int | None:
        """See `ports.Fleet`."""
        return self._wish if self._now() < self._wished_until else None

    async def want(self, replicas: int, for_s: float) -> None:
        """See `ports.Fleet`."""
        self._wish, self._wished_until = replicas, self._now() + for_s

    def _forget_silent(self) -> None:
        silent_since = self._now() - FLEET_SILENT_S
        self._beats = {replica: beat for replica, beat in self._beats.items() if beat.at >= silent_since}


def _wish(stored: object) -> int | None:
    """None also for what is no count: somebody else's key under this name must not stop a worker."""
    return int(stored) if isinstance(stored, bytes) and stored.isdigit() and len(stored) < 10 else None


def _beat(stored: bytes) -> Beat | None:
    at_ms, _, said = stored.partition(b" ")
    try:
        return replace(msgspec.json.decode(said, type=Beat), at=int(at_ms) / 1000)
    except (
        msgspec.MsgspecError,
        ValueError,
        RecursionError,
    ):  # Written by another version of ours, or by somebody else.
        return None
