"""A Redis Cluster of three masters, and a Redis that a sentinel watches: from the servers that the run has anyway.

Made by plain commands, so that no `redis-cli` is needed. Everything blocks, as in `services.py`.
"""

import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redis import Redis as Client
from redis.exceptions import ReadOnlyError, RedisError

from tests.services import LOOPBACK, Container, Processes, Redis, Supply, free_port, reaper
from tests.waiting import wait_until

SLOTS = 16384
START_S = 30.0


@dataclass(frozen=True)
class Node:
    """A server, and the address that it has for other servers; for clients, too."""

    server: Redis
    host: str
    port: int
    bus: int = 0
    """The port by which the servers of a Cluster speak with each other."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.address}"

    def ask(self, *words: str | int) -> Any:
        """The answer to a command, as text."""
        with Client(host=self.host, port=self.port, decode_responses=True, protocol=2) as client:
            return client.execute_command(*words)


def node(supply: Supply, *args: str) -> Node:
    """A server of its own, not that of the run."""
    server = supply.redis(*args)
    if isinstance(server.engine, Container):
        container = server.engine._wrapped
        container.reload()
        networks: dict[str, Any] = container.attrs["NetworkSettings"]["Networks"]
        return Node(server, next(iter(networks.values()))["IPAddress"], 6379)
    return Node(server, server.host, server.port)


class Cluster:
    """Some masters, and no replicas at first."""

    def __init__(self, supply: Supply, masters: int = 3) -> None:
        self._masters = masters
        self.nodes = [self._node(supply) for _ in range(masters)]
        first = self.nodes[0]
        for number, one in enumerate(self.nodes):
            one.ask("CLUSTER", "ADDSLOTS", *range(number * SLOTS // masters, (number + 1) * SLOTS // masters))
            if one is not first:
                one.ask("CLUSTER", "MEET", first.host, first.port, first.bus)
        wait_until(lambda: all(map(self._is_whole, self.nodes)), within=START_S, what="a Cluster")
        for one in self.nodes:
            one.ask("CONFIG", "SET", "cluster-node-timeout", 15_000)

    def owner(self, key: str) -> Node:
        """Who has a key now."""
        slot = int(self.nodes[0].ask("CLUSTER", "KEYSLOT", key))
        for first, last, master, *_ in self.nodes[0].ask("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(one for one in self.nodes if one.address == f"{master[0]}:{master[1]}")
        raise AssertionError(f"nobody has slot {slot}")

    def begin_to_move(self, key: str, to: Node) -> None:
        """Move what is in the slot of a key: from then on each side sends those who ask to the other."""
        slot, source = int(to.ask("CLUSTER", "KEYSLOT", key)), self.owner(key)
        to.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.ask("CLUSTER", "MYID"))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", to.ask("CLUSTER", "MYID"))
        if keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 1000):
            source.ask("MIGRATE", to.host, to.port, "", 0, 5000, "KEYS", *keys)

    def have_moved(self, key: str, to: Node) -> None:
        """The slot of a key is another server's now, and all know it."""
        slot, name = int(to.ask("CLUSTER", "KEYSLOT", key)), to.ask("CLUSTER", "MYID")
        for one in [to, *self.nodes]:
            one.ask("CLUSTER", "SETSLOT", slot, "NODE", name)

    def add_replica(self, supply: Supply, of: Node) -> Node:
        """A server that stands by for a master; ready to take over when this returns."""
        made = self._node(supply)
        made.ask("CLUSTER", "MEET", of.host, of.port, of.bus)
        name = of.ask("CLUSTER", "MYID")
        wait_until(lambda: name in made.ask("CLUSTER", "NODES"), within=START_S, what="a replica that knows its master")
        made.ask("CLUSTER", "REPLICATE", name)
        self.nodes.append(made)
        wait_until(
            lambda: (
                made.ask("INFO", "replication").get("master_link_status") == "up"
                and all("slave" in one.ask("CLUSTER", "NODES") for one in self.nodes)
            ),
            within=START_S,
            what="a replica that has its master's data, and is known",
        )
        return made

    def is_level(self, replica: Node) -> bool:
        """Whether it has all that the first server has."""
        first, behind = (one.ask("INFO", "replication") for one in (self.nodes[0], replica))
        return bool(first["master_repl_offset"] == behind["slave_repl_offset"])

    def other_than(self, owner: Node) -> Node:
        """Another server."""
        return next(one for one in self.nodes if one is not owner)

    def empty(self) -> None:
        """Remove all keys."""
        for one in self.nodes:
            with suppress(ReadOnlyError):
                one.ask("FLUSHALL")

    def close(self) -> None:
        for one in self.nodes:
            one.server.close()

    def _node(self, supply: Supply) -> Node:
        # Its own port for the bus, too: 10000 above the other, where it would be, somebody may listen.
        bus = free_port() if supply.kind == "local" else 16379
        # As long as the time-out is, no keys are served at first.
        args = ("--cluster-enabled", "yes", "--cluster-node-timeout", "500", "--cluster-port", str(bus))
        made = node(supply, *args, "--repl-diskless-sync-delay", "0")
        return replace(made, bus=bus)

    def _is_whole(self, one: Node) -> bool:
        return "cluster_state:ok" in one.ask("CLUSTER", "INFO") and len(one.ask("CLUSTER", "SLOTS")) == self._masters


class Watched:
    """A master, its replica, and a sentinel that watches them under the name `main`."""

    def __init__(self, supply: Supply) -> None:
        # A master waits for more replicas otherwise, before it sends the first one its data.
        self.master, self.replica = (node(supply, "--repl-diskless-sync-delay", "0") for _ in range(2))
        self.replica.ask("REPLICAOF", self.master.host, self.master.port)
        # Before there is a sentinel: it looks at once, and then every ten seconds.
        wait_until(self._follows, within=START_S, what="a replica that has its master's data")
        self._folder = Path(tempfile.mkdtemp(prefix="test-sentinel-"))
        reaper().remember("folder", str(self._folder))
        self._process: Processes | None = None
        port = free_port() if supply.kind == "local" else 26379
        said = [
            f"port {port}",
            "protected-mode no",
            f"sentinel monitor main {self.master.host} {self.master.port} 1",
            "sentinel down-after-milliseconds main 500",
            "sentinel failover-timeout main 2000",
        ]
        engine = self.replica.server.engine
        if isinstance(engine, Container):
            lines = "\\n".join(said)
            program = "$(command -v redis-server || command -v valkey-server)"
            write = f"printf '{lines}\\n' > /tmp/sentinel.conf"
            engine.run("sh", "-c", f"{write} && {program} /tmp/sentinel.conf --sentinel --daemonize yes")
            self.sentinel = f"{self.replica.host}:{port}"
        else:
            (self._folder / "sentinel.conf").write_text("\n".join([*said, f"bind {LOOPBACK}", f"dir {self._folder}"]))
            assert isinstance(engine, Processes)
            self._process = Processes(self._folder, [engine._argv[0], "sentinel.conf", "--sentinel"], engine._environ)
            self._process.start()
            self.sentinel = f"{LOOPBACK}:{port}"
        wait_until(self._knows_both, within=START_S, what="a sentinel that knows a replica")

    def ask(self, *words: str) -> Any:
        """The sentinel."""
        host, _, port = self.sentinel.rpartition(":")
        with Client(host=host, port=int(port), decode_responses=True, protocol=2) as client:
            return client.execute_command(*words)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
        for one in (self.master, self.replica):
            one.server.close()

    def _knows_both(self) -> bool:
        try:
            known = [dict(zip(one[::2], one[1::2], strict=True)) for one in self.ask("SENTINEL", "REPLICAS", "main")]
        except (RedisError, OSError):
            return False
        return [one["flags"] for one in known] == ["slave"] and known[0]["master-link-status"] == "ok"

    def _follows(self) -> bool:
        return bool(self.replica.ask("INFO", "replication").get("master_link_status") == "up")
