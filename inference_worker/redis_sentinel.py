"""The address of a Redis that sentinels watch: who is the master now, asked at each connection.

All else is as with one server: where it is replaced, connections to it end, and the next ones lead to its successor.
What the sentinels say is not believed before the server itself says that it is the master: for a moment after it was
replaced they may not agree, and a replica would take no writes.

A server that was replaced while it was well keeps its connections for some ten seconds, and all that is written to it
then is lost: `heard` is for what sentinels say on `SWITCHED`, and `turns` for those who have such connections.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from inference_worker.redis_scripts import Argument, RedisTls, address_in, connect, reason_of, url_at
from inference_worker.timing import quietly

ANSWER_S: Final = 1.0
"""How long one sentinel is waited for, or the server that it names; there are other sentinels."""

ALL_S: Final = 4.0
"""How long all of them together are: less than a connection may take."""


SWITCHED: Final = "+switch-master"
"""The channel of a sentinel on which it says that another is the master now."""


class Sentinels:
    """`master` is the `Address` of the server, `sentinel` that of one who watches it."""

    def __init__(
        self,
        url: Callable[[], str],
        addresses: Sequence[str] = (),
        *,
        master_name: str,
        tls: RedisTls,
    ) -> None:
        """`url` has scheme, credentials and database; its host is the sentinel where there are no `addresses`.

        A sentinel that takes no credentials is asked without.
        """
        self._url = url
        self._addresses = tuple(addresses)
        self._master_name = master_name
        self._tls = tls
        self._best = ""
        """The sentinel that has lately known it."""
        self._bare: set[str] = set()
        """Sentinels that take no credentials."""
        self._asked = 0
        self._turns = 0

    async def master(self) -> str:
        """The URL of the server that is the master now.

        Raises:
            ConnectionError: none of them knows one that says so itself.
        """
        why: dict[str, str] = {}
        try:
            async with asyncio.timeout(ALL_S):
                for sentinel in sorted(self._sentinels(), key=lambda one: one != self._best):
                    try:
                        url = await self._named_by(sentinel)
                    except (RedisError, OSError, TimeoutError, ValueError) as exc:
                        why[sentinel] = reason_of(exc)
                    else:
                        self._best = sentinel
                        return url
        except TimeoutError:
            pass
        said = "; ".join(f"{sentinel}: {reason}" for sentinel, reason in why.items()) or "no answer in time"
        raise ConnectionError(f"no sentinel knows a master {self._master_name!r} that is one ({said})")

    def sentinel(self) -> str:
        """The URL of a sentinel, another one each time."""
        sentinels = self._sentinels()
        self._asked += 1
        return self._url_of(sentinels[self._asked % len(sentinels)])

    def heard(self, said: str) -> None:
        """A sentinel has said that another server is the master of something."""
        if said.split(" ")[0] == self._master_name:
            self._turns += 1

    def turns(self) -> int:
        """How often `master` has come to lead elsewhere, as far as was heard."""
        return self._turns

    def _sentinels(self) -> Sequence[str]:
        return self._addresses or (address_in(self._url()),)

    def _url_of(self, sentinel: str) -> str:
        url = url_at(self._url(), sentinel, database=False)
        return _without_credentials(url) if sentinel in self._bare else url

    async def _named_by(self, sentinel: str) -> str:
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._master_name)
        try:
            named = await self._answer(self._url_of(sentinel), *question)
        except AuthenticationError:
            self._bare.add(sentinel)
            named = await self._answer(self._url_of(sentinel), *question)
        if not named:
            raise ValueError("it does not watch it")
        host, port = (part if isinstance(part, str) else part.decode(errors="replace") for part in named)
        master = url_at(self._url(), f"{host}:{port}")
        try:
            role = (await self._answer(master, "ROLE"))[0]
        except NoPermissionError:
            return master  # Then it has to be believed.
        if role not in (b"master", "master"):
            raise ValueError(f"{host}:{port} is no master")
        return master

    async def _answer(self, url: str, *words: Argument) -> Any:
        async with asyncio.timeout(ANSWER_S):
            connection = await connect(url, None, client_name="", tls=self._tls, within_s=ANSWER_S)
            try:
                await connection.send_packed_command(connection.pack_commands([words]), check_health=False)
                return await connection.read_response(disconnect_on_error=False)
            finally:
                await quietly(connection.disconnect(nowait=True), 1.0, RedisError, OSError)


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
