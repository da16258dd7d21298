"""A queue whose results go to a list as well: once each, and before the message is forgotten."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from inference_worker.disposition import (
    Ack,
    DeadLetter,
    DeliveryLost,
    Hold,
    Known,
    Nack,
    Settled,
    StoreSilent,
    Token,
)
from inference_worker.errors import StoreUnavailable, TransportLost
from inference_worker.messages import Reply
from inference_worker.ports import Delivery, Transport
from inference_worker.results.memory import MemoryStore
from inference_worker.transports.listed import ListedTransport, NoList, listed
from inference_worker.transports.memory import MemoryBroker, MemoryTransport
from tests.transport_contract import Parked, TransportContract, request


@dataclass
class Shelf:
    """Takes results, each once; fails as often as it is told to."""

    replies: list[Reply] = field(default_factory=list)
    failures: int = 0
    seen: Callable[[], None] = lambda: None
    is_list: bool = True

    async def look(self) -> None:
        if not self.is_list:
            raise NoList("it is a string")

    async def send(self, reply: Reply) -> None:
        self.seen()
        await self.look()
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("away")
        if reply.request_id not in self.ids:
            self.replies.append(reply)

    @property
    def ids(self) -> list[str]:
        return [reply.request_id for reply in self.replies]


class ListedHarness:
    """An embedded queue with a list beside it."""

    def __init__(self) -> None:
        self.store = MemoryStore(now=time.time, lease_s=15, ttl_s=3600)
        self.shelf = Shelf()
        self.broker = MemoryBroker(store=self.store, now=time.time)
        self._open = listed(self.broker.connect, self.shelf, self.store, time.time)
        self._inner: MemoryTransport | None = None

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Transport, None]:
        async with self._open() as transport:
            yield transport

    async def publish(self, body: bytes, message_id: str | None = None) -> None:
        async with self.broker.connect() as transport:
            await transport.publish(body, message_id=message_id)

    async def cut(self, transport: Transport) -> None:
        assert isinstance(transport, ListedTransport)
        inner = transport._transport
        assert isinstance(inner, MemoryTransport)
        inner.cut("cut by the test")

    lapse = cut

    async def parked(self) -> list[Parked]:
        return [Parked(letter.body) for letter in self.broker.dead]

    @asynccontextmanager
    async def received(self, *ids: str) -> AsyncGenerator[tuple[Transport, list[Delivery]], None]:
        """A session that has received these requests."""
        for request_id in ids:
            await self.publish(request(request_id))
        async with self.connect() as transport, transport.consuming(8):
            yield transport, [await transport.receive() for _ in ids]


@pytest.fixture
def harness() -> ListedHarness:
    return ListedHarness()


class TestListedTransport(TransportContract):
    """All clauses, on virtual time."""


def reply_to(request_id: str) -> Reply:
    return Reply(
        request_id=request_id,
        status="completed",
        status_code=200,
        attempt=0,
        replica_id="r",
        finished_at=1.0,
        result=b'{"n":1}',
    )


def ack(request_id: str) -> Ack:
    return Ack(reply=reply_to(request_id), claim=Hold(request_id, Token("t")))


async def test_a_result_is_sent_once_and_after_it_was_stored(harness: ListedHarness) -> None:
    stored: list[bool] = []
    async with harness.received("a") as (transport, (delivery,)):
        harness.shelf.seen = lambda: stored.append("a" in harness.store._results)
        assert isinstance(await transport.settle(delivery, ack("a")), Settled)

    assert stored == [True]
    assert harness.shelf.ids == ["a"]
    assert len(harness.broker.ready) == 0


async def test_a_result_that_could_not_be_sent_keeps_its_message_and_is_sent_the_next_time(
    harness: ListedHarness,
) -> None:
    harness.shelf.failures = 1
    async with harness.received("a") as (transport, (delivery,)):
        assert isinstance(await transport.settle(delivery, ack("a")), StoreSilent)
        assert isinstance(await transport.settle(delivery, ack("a")), Known)
        assert isinstance(await transport.settle(delivery, Ack()), Settled)

    assert harness.shelf.ids == ["a"]


async def test_a_redelivered_message_sends_the_result_that_nobody_has_sent(harness: ListedHarness) -> None:
    await harness.store.write(reply_to("a"), None, Token("t"))
    async with harness.received("a") as (transport, (delivery,)):
        assert isinstance(await transport.settle(delivery, Ack()), Settled)

    (sent,) = harness.shelf.replies
    assert (sent.request_id, sent.status_code, sent.result) == ("a", 200, b'{"n":1}')


@pytest.mark.parametrize("known", [False, True])
async def test_what_is_no_list_ends_its_own_session_and_the_result_is_sent_once_it_is_one(
    harness: ListedHarness, known: bool
) -> None:
    """No outage of the store, which would hold up every queue of the process."""
    if known:
        await harness.store.write(reply_to("a"), None, Token("t"))
    async with harness.received("a") as (transport, (delivery,)):
        harness.shelf.is_list = False
        settled = await transport.settle(delivery, Ack() if known else ack("a"))
        assert settled == DeliveryLost(stored=not known)
        assert (transport.lost.is_set(), transport.lost_because) == (True, "it is a string")
        with pytest.raises(TransportLost, match="it is a string"):
            await transport.receive()
    with pytest.raises(TransportLost, match="it is a string"):
        async with harness.connect():
            pass
    harness.shelf.is_list = True
    async with harness.connect() as transport, transport.consuming(1):
        assert isinstance(await transport.settle(await transport.receive(), Ack()), Settled)

    assert harness.shelf.ids == ["a"]


async def test_a_message_whose_request_has_no_result_is_forgotten_without_one(harness: ListedHarness) -> None:
    async with harness.received("a") as (transport, (delivery,)):
        assert isinstance(await transport.settle(delivery, Ack()), Settled)

    assert harness.shelf.ids == []


async def test_what_goes_back_sends_nothing(harness: ListedHarness) -> None:
    async with harness.received("a") as (transport, (delivery,)):
        await transport.settle(delivery, Nack())

    assert harness.shelf.ids == []
    assert len(harness.broker.ready) == 1


async def test_a_dead_letter_sends_its_result_and_leaves_its_note(harness: ListedHarness) -> None:
    failed = replace(reply_to("a"), status="failed", status_code=500, error="x", error_code="poison", result=None)
    letter = DeadLetter(reason="poison", detail="x", attempts=1, status_code=500, reply=failed)
    async with harness.received("a") as (transport, (delivery,)):
        assert isinstance(await transport.settle(delivery, letter), Settled)

    assert harness.shelf.ids == ["a"]
    assert len(harness.broker.dead) == 1
    assert "a" in harness.store.notes
