"""Confirmed publishes over a connection that comes back: what one failure means for the others, and the bounds."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from pamqp.commands import Basic

from inference_worker.errors import NotAccepted, TransportLost
from inference_worker.rmq_connection import Connection, Publisher, copied
from inference_worker.rmq_producer import Producer, _Window


class FakeChannel:
    """Publishes wait for what the test says of them."""

    def __init__(self) -> None:
        self.is_closed = False
        self.confirms: dict[bytes, asyncio.Future[None]] = {}

    async def basic_publish(self, body: bytes, **_: Any) -> None:
        self.confirms[body] = asyncio.get_running_loop().create_future()
        await self.confirms[body]

    async def get_underlay_channel(self) -> "FakeChannel":
        return self


class FakeBroker:
    def __init__(self) -> None:
        self.channels: list[FakeChannel] = []
        self.refuses = False

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Connection, None]:
        if self.refuses:
            raise TransportLost("connect: refused")
        yield cast(Connection, self)

    async def channel(self, **_: Any) -> FakeChannel:
        self.channels.append(FakeChannel())
        return self.channels[-1]


async def turns() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def publish(publisher: Publisher, body: bytes) -> "asyncio.Task[None]":
    properties = Basic.Properties(message_id=body.decode())
    return asyncio.create_task(publisher.publish(body, properties, exchange="", routing_key="q", within_s=9))


async def test_a_publish_that_fails_late_does_not_take_the_new_channel_from_the_others() -> None:
    broker = FakeBroker()
    publisher = Publisher(broker.connect)
    late, early = publish(publisher, b"late"), publish(publisher, b"early")
    await turns()
    broker.channels[0].confirms[b"early"].set_exception(ConnectionError("gone"))
    await turns()
    third = publish(publisher, b"third")
    await turns()

    broker.channels[0].confirms[b"late"].set_exception(ConnectionError("gone"))
    await turns()
    fourth = publish(publisher, b"fourth")
    await turns()

    assert len(broker.channels) == 2
    for confirm in broker.channels[1].confirms.values():
        confirm.set_result(None)
    await asyncio.gather(third, fourth)
    for lost in (late, early):
        with pytest.raises(TransportLost):
            await lost
    await publisher.close()


async def test_a_confirm_that_never_comes_has_its_channel_given_up_for_the_next() -> None:
    """On the old channel a late confirm could be taken for the next message's."""
    broker = FakeBroker()
    publisher = Publisher(broker.connect)
    lost = publish(publisher, b"lost")
    with pytest.raises(TransportLost, match="no answer within 9 s"):
        await lost

    following = publish(publisher, b"next")
    await turns()

    assert len(broker.channels) == 2
    broker.channels[1].confirms[b"next"].set_result(None)
    await following
    await publisher.close()


async def test_a_window_lets_in_so_many_and_so_many_bytes_and_one_of_any_size() -> None:
    window = _Window(2, 10)
    inside: list[int] = []

    async def take(size: int, seconds: float) -> None:
        async with window.of(size):
            inside.append(size)
            await asyncio.sleep(seconds)

    async with asyncio.TaskGroup() as group:
        for size in (99, 4, 4, 1):
            group.create_task(take(size, 1.0))
        await asyncio.sleep(0.5)
        assert inside == [99]
        await asyncio.sleep(1.0)
        assert inside == [99, 4, 4]
    assert inside == [99, 4, 4, 1]


async def test_many_that_wait_for_a_broker_ask_for_it_one_at_a_time_and_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[float] = []

    @asynccontextmanager
    async def refused(*_: Any, **__: Any) -> AsyncGenerator[Connection, None]:
        tries.append(asyncio.get_running_loop().time())
        raise TransportLost("connect: refused")
        yield

    monkeypatch.setattr("inference_worker.rmq_producer.opened", refused)
    async with Producer(lambda: "amqp://nowhere", "q", name="n").open() as producer:
        sending = [
            asyncio.create_task(producer.publish(b"x", message_id=str(number), within_s=60)) for number in range(50)
        ]
        ends = await asyncio.gather(*sending, return_exceptions=True)

    assert all(isinstance(end, NotAccepted) and end.maybe for end in ends)
    after_the_first = [at for at in tries if at > 0]
    assert len(after_the_first) < 40, f"{len(after_the_first)} tries in a minute"


def test_a_header_that_is_no_utf8_can_be_copied() -> None:
    """The driver reads it as bytes and will not write bytes: without this no retry copy could ever be placed."""
    odd = Basic.Properties(headers={"k": b"\xff", "t": {"a": [b"\xfe", "s", 1]}})

    kept = copied(odd)

    assert kept.headers == odd.headers
    assert b"\x01kS\x00\x00\x00\x01\xff" in kept.marshal()
