"""The servers of a Redis Cluster as one: each command goes to the server that has its key, by one connection to each.

The driver's own client is not used: it sends no scripts in pipelines, and looks for servers with commands waiting on
locks of its own. Here a server is a `RedisLink` with its deadlines; the map of slots is read when it is needed, and
again when an answer, or none, says that it is out of date. A command is repeated only where a server has said that it
did not carry it out. A script's keys share a slot: who calls it sees to that.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from redis.exceptions import AskError, MovedError, ResponseError

from inference_worker.errors import StoreUnavailable
from inference_worker.redis_scripts import (
    ANSWER_S,
    Address,
    Argument,
    RedisLink,
    RedisTls,
    Script,
    address_in,
    url_at,
)
from inference_worker.redis_slots import SLOTS, key_of, slot_of
from inference_worker.timing import ended

LOOK_S: Final = 1.5
"""How long one server is waited for that is asked for the map; there are others."""

LOOKS_S: Final = 5.0
"""How long all of them together are."""

LOOK_PAUSE_S: Final = 0.25
"""Between two looks at the map because of commands that failed: while a server is replaced all of them do."""

MOST_REDIRECTS: Final = 5

Ask = Callable[[RedisLink], Awaitable[Any]]


class RedisCluster:
    """See `redis_scripts.ClusterCommands`. For any number of tasks."""

    def __init__(
        self,
        url: Callable[[], str],
        addresses: Sequence[str] = (),
        *,
        client_name: str,
        tls: RedisTls,
        answer_s: float = ANSWER_S,
    ) -> None:
        """`url` has scheme and credentials of all servers, and is asked at each connection. `addresses` (`host:port`)
        are those asked first for the map; without them, the one that the URL names."""
        self._url = url
        self._addresses = tuple(addresses)
        self._client_name = client_name
        self._tls = tls
        self._answer_s = answer_s
        self._links: dict[str, RedisLink] = {}
        self._owners: list[str] = []
        """The address of each slot's master; empty for a slot that has none. Nothing before the first look."""
        self.masters: tuple[str, ...] = ()
        """Their addresses, as last seen."""
        self._out_of_date = True
        self._looked_at = 0.0
        self._best: str | None = None
        """Who knows the map for sure: it has just sent us elsewhere, or answered last time."""
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    @asynccontextmanager
    async def open(self) -> AsyncGenerator["RedisCluster", None]:
        """A context that closes all connections at its end; opening it does not connect."""
        try:
            yield self
        finally:
            self._closed = True
            if self._looking is not None:
                await ended(self._looking)
            await asyncio.gather(*(link.close() for link in self._links.values()))

    async def run(self, script: Script, keys: Sequence[str], *arguments: Argument) -> Any:
        """See `redis_scripts.RedisCommands`."""
        return await self._answer(
            keys[0],
            lambda link: link.run(script, keys, *arguments),
            # In whole: what comes after an ASKING must not need a second command.
            lambda link: link.do("EVAL", script.source, len(keys), *keys, *arguments),
        )

    async def do(self, *parts: Argument) -> Any:
        """See `redis_scripts.RedisCommands`."""
        return await self._answer(key_of(parts), lambda link: link.do(*parts), lambda link: link.do(*parts))

    def address_of(self, key: str) -> Address:
        """See `redis_scripts.ClusterCommands`. Found out at each connection; raises ConnectionError where it cannot."""

        async def url() -> str:
            await self._look()
            owner = self._owners[slot_of(key)]
            if not owner:
                raise ConnectionError(f"no server of the Cluster has slot {slot_of(key)}")
            return url_at(self._url(), owner)

        return url

    def address_at(self, master: str) -> Address:
        """See `redis_scripts.ClusterCommands`."""
        return lambda: url_at(self._url(), master)

    async def any_address(self) -> str:
        """The `Address` of some server, for what all of them tell: notifications. Raises: ConnectionError."""
        await self._look()
        return url_at(self._url(), self._best or self.masters[0])

    # ------------------------------------------------------------ commands

    async def _answer(self, key: str | None, ask: Ask, asking: Ask) -> Any:
        address = await self._owner(key)
        for _ in range(MOST_REDIRECTS):
            try:
                return await ask(self._link_to(address))
            except StoreUnavailable as exc:
                match exc.__cause__:
                    case MovedError() as moved:
                        self._out_of_date = True
                        address = self._best = self._named(moved, address)
                        self._owners[moved.slot_id] = address
                    case AskError() as asked:
                        link = self._link_to(self._named(asked, address))
                        # Both leave together, one behind the other: it is said of the next command alone.
                        return (await asyncio.gather(link.do("ASKING"), asking(link)))[1]
                    case ResponseError():
                        raise
                    case _:
                        self._out_of_date = True  # It is gone, perhaps, and another has its slots.
                        raise
        raise StoreUnavailable("the servers of the Cluster send us from one to the next")

    async def _owner(self, key: str | None) -> str:
        loop = asyncio.get_running_loop()
        if not self._owners or (self._out_of_date and loop.time() - self._looked_at >= LOOK_PAUSE_S):
            try:
                await self._look()
            except OSError as exc:
                raise StoreUnavailable(str(exc)) from exc
        owner = self._owners[slot_of(key)] if key is not None else self.masters[0]
        if not owner:
            self._out_of_date = True
            raise StoreUnavailable(f"no server of the Cluster has slot {slot_of(key or '')}")
        return owner

    def _named(self, elsewhere: AskError, by: str) -> str:
        """Where an answer sends us; one without a host means the host that says so."""
        return f"{elsewhere.host or by.rpartition(':')[0]}:{elsewhere.port}"

    def _link_to(self, address: str) -> RedisLink:
        if self._closed:
            raise StoreUnavailable("the connection to Redis was closed by us")
        if address not in self._links:
            self._links[address] = RedisLink(
                self.address_at(address),
                lambda: None,
                client_name=self._client_name,
                tls=self._tls,
                answer_s=self._answer_s,
            )
        return self._links[address]

    # ------------------------------------------------------------ the map

    async def _look(self) -> None:
        """Read the map anew, all who want it in one look. Raises: ConnectionError."""
        if self._looking is None or self._looking.done():
            if self._closed:
                raise ConnectionError("the connection to Redis was closed by us")
            self._looking = asyncio.create_task(self._read_map(), name="redis cluster map")
        looking = self._looking
        await asyncio.wait([looking])  # Who is cancelled meanwhile does not take the look along.
        if looking.cancelled():
            raise ConnectionError("the connection to Redis was closed by us")
        looking.result()

    async def _read_map(self) -> None:
        why = "nobody was asked"
        known = [*([self._best] if self._best else []), *self.masters, *(self._addresses or (address_in(self._url()),))]
        try:
            async with asyncio.timeout(LOOKS_S):
                for address in dict.fromkeys(known):
                    try:
                        async with asyncio.timeout(LOOK_S):
                            rows = await self._link_to(address).do("CLUSTER", "SLOTS")
                    except StoreUnavailable as exc:
                        why = str(exc)
                    except TimeoutError:
                        why = "no answer in time"
                    else:
                        if rows:
                            await self._take_over(rows, address)
                            return
                        why = "its servers have no slots"
        except TimeoutError:
            why = "no answer in time"
        raise ConnectionError(f"the Cluster cannot be asked who has which keys: {why}")

    async def _take_over(self, rows: Sequence[Any], said_by: str) -> None:
        owners = [""] * SLOTS
        for first, last, master, *_ in rows:
            host = _text(master[0]) if master[0] else ""
            # A server that does not know its own name, or says so, means the one by which we have reached it.
            address = f"{host if host not in ('', '?') else said_by.rpartition(':')[0]}:{master[1]}"
            owners[first : last + 1] = [address] * (last + 1 - first)
        self._owners = owners
        self.masters = tuple(dict.fromkeys(owner for owner in owners if owner))
        self._best = said_by
        self._out_of_date = False
        self._looked_at = asyncio.get_running_loop().time()
        kept = {*self.masters, *self._addresses, said_by}
        for address in [address for address in self._links if address not in kept]:
            await self._links.pop(address).close()


def _text(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.decode(errors="replace")
