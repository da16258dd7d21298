"""How a Redis is reached: one server, one that sentinels watch, or a Cluster. The `match` is the only registry.

Who uses it need not know which: it has commands to run, and an address for connections of its own.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import assert_never

from inference_worker.config.documents import RedisMode
from inference_worker.redis_cluster import RedisCluster
from inference_worker.redis_scripts import Address, RedisCommands, RedisLink, RedisTls
from inference_worker.redis_sentinel import SWITCHED, Sentinels
from inference_worker.results.notifications import Notifications


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisPlace:
    """A Redis that is reached."""

    address: Address
    """For connections of one's own; on a Cluster it leads to some server."""
    commands: RedisCommands
    moved: Callable[[], int] = lambda: 0
    """How often the address has come to lead elsewhere: connections from before are not to be used."""
    cluster: RedisCluster | None = None
    """Set where it is one."""

    @property
    def clustered(self) -> bool:
        """Keys of a script have to share a slot."""
        return self.cluster is not None


@asynccontextmanager
async def redis_place(
    url: Callable[[], str],
    *,
    mode: RedisMode,
    addresses: Sequence[str] = (),
    master_name: str = "",
    client_name: str,
    tls: RedisTls,
) -> AsyncGenerator[RedisPlace, None]:
    """A context that closes the connections at its end; opening it waits for nobody.

    `url` has scheme and credentials, whoever is asked. `addresses` (`host:port`) are the sentinels, or servers of the
    Cluster; without them, what the URL names is one.
    """
    match mode:
        case "cluster":
            async with RedisCluster(url, addresses, client_name=client_name, tls=tls).open() as cluster:
                yield RedisPlace(address=cluster.any_address, commands=cluster, cluster=cluster)
        case "sentinel":
            watch = Sentinels(url, addresses, master_name=master_name, tls=tls)
            link = RedisLink(watch.master, lambda: None, client_name=client_name, tls=tls, moved=watch.turns)
            told = Notifications(link, watch.sentinel, lambda: None, client_name=client_name, tls=tls)
            async with link.open(), told.open():
                with told.hearing(SWITCHED, watch.heard):
                    yield RedisPlace(address=watch.master, commands=link, moved=watch.turns)
        case "standalone":
            async with RedisLink(url, lambda: None, client_name=client_name, tls=tls).open() as link:
                yield RedisPlace(address=url, commands=link)
        case _:
            assert_never(mode)
