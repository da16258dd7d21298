"""A transport of another package, whose faults end its connection and nothing else: it is opened anew, as a lost one.

Not here: what a transport promises (`ports.Transport`), which it is asked for all the same.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import UnionType
from typing import Final, TypeVar

import structlog

from inference_worker.disposition import Disposition, Settlement
from inference_worker.errors import TransportLost
from inference_worker.faults import as_exceptions
from inference_worker.ports import Backlog, Connect, Delivery, Transport
from inference_worker.timing import ended

log = structlog.get_logger(__name__)

METHODS: Final = ("consuming", "set_limit", "receive", "settle", "extend", "publish", "backlog")


def guarded(connect: Connect, name: str) -> Connect:
    """The same way to open connections, without its faults."""

    @asynccontextmanager
    async def open_guarded() -> AsyncGenerator[Transport, None]:
        with _lost_by(name, "could not be opened"):
            session = connect()
            inner = await session.__aenter__()
        try:
            missing = [method for method in METHODS if not callable(getattr(inner, method, None))]
            if not isinstance(getattr(inner, "lost", None), asyncio.Event):
                missing.append("lost")
            if missing:
                raise TransportLost(f"the transport {name} has no {', '.join(missing)}")
            transport = GuardedTransport(inner, name)
            watching = asyncio.create_task(transport.watch(), name=f"the connection of {name}")
            try:
                yield transport
            finally:
                await ended(watching)
        finally:
            try:
                with as_exceptions():
                    await session.__aexit__(None, None, None)
            except Exception:
                log.exception("a connection could not be closed", transport=name)

    return open_guarded


class GuardedTransport:
    """See `ports.Transport`."""

    def __init__(self, inner: Transport, name: str) -> None:
        self._inner = inner
        self._name = name
        self._why = ""
        self.lost = asyncio.Event()
        """Of its own: what a transport does once its own is set, such as giving back, is not to be done by halves."""

    async def watch(self) -> None:
        """Until the connection is lost by itself."""
        await self._inner.lost.wait()
        self.lost.set()

    @property
    def lost_because(self) -> str:
        """See `ports.Transport`."""
        return self._why or self._inner.lost_because

    @asynccontextmanager
    async def consuming(self, limit: int) -> AsyncGenerator[None, None]:
        """See `ports.Transport`."""
        with self._whole("begin to consume"):
            flow = self._inner.consuming(limit)
            await flow.__aenter__()
        try:
            yield
        finally:
            with self._whole("stop consuming", on=True):
                await flow.__aexit__(None, None, None)

    async def set_limit(self, limit: int) -> None:
        """See `ports.Transport`."""
        with self._whole("change its limit"):
            await self._inner.set_limit(limit)

    async def receive(self) -> Delivery:
        """See `ports.Transport`."""
        with self._whole("receive"):
            return _a(await self._inner.receive(), Delivery)

    async def settle(self, delivery: Delivery, disposition: Disposition) -> Settlement:
        """See `ports.Transport`."""
        # Also after a fault: until the connection is closed, what it has handed up may be settled.
        with self._whole("settle", on=True):
            return _a(await self._inner.settle(delivery, disposition), Settlement)

    async def extend(self, delivery: Delivery) -> None:
        """See `ports.Transport`."""
        with self._whole("extend"):
            await self._inner.extend(delivery)

    async def publish(
        self, body: bytes, *, message_id: str | None = None, headers: Mapping[str, object] | None = None
    ) -> None:
        """See `ports.Transport`."""
        with self._whole("publish"):
            await self._inner.publish(body, message_id=message_id, headers=headers)

    async def backlog(self) -> Backlog:
        """See `ports.Transport`."""
        with self._whole("count"):
            return _a(await self._inner.backlog(), Backlog)

    @contextmanager
    def _whole(self, what: str, *, on: bool = False) -> Generator[None]:
        """A fault of its own is the end of this connection; `on`: not for this call."""
        if self._why and not on:
            raise TransportLost(self._why)
        try:
            with _lost_by(self._name, f"could not {what}"):
                yield
        except TransportLost as exc:
            if isinstance(exc, _Fault):
                self._why = self._why or str(exc)
                self.lost.set()
            elif self._inner.lost.is_set():
                self.lost.set()
            raise


Said = TypeVar("Said")


def _a(said: Said, kind: type | UnionType) -> Said:
    # Taken for none at all, a delivery that is none would be asked for again, and again, and nobody else have a turn.
    if not isinstance(said, kind):
        raise TypeError(f"it returns a {type(said).__name__}")
    return said


@contextmanager
def _lost_by(name: str, what: str) -> Generator[None]:
    try:
        with as_exceptions():
            yield
    except TransportLost:
        raise
    except Exception as exc:
        log.exception("a transport failed; its connection is opened anew", transport=name, what=what)
        raise _Fault(f"the transport {name} {what}: {type(exc).__name__}") from exc


class _Fault(TransportLost):
    """One of the transport's own."""
