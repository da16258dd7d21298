"""What every transport promises, as tests. A transport's own test file brings a harness and one fixture.

No transport adds a clause or leaves one out; where brokers differ, the harness differs: `lapse` waits for a lease where
there are leases, and cuts the connection where there are none.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import pytest

from inference_worker.disposition import (
    Ack,
    DeadLetter,
    DeliveryLost,
    Hold,
    Known,
    Nack,
    Republish,
    Settled,
    Token,
)
from inference_worker.errors import TransportLost
from inference_worker.messages import Reply
from inference_worker.ports import AlreadyAnswered, BelowFloor, Claimed, Delivery, ResultStore, Transport
from tests.waiting import eventually

SOON_S = 10.0
QUIET_S = 0.3
"""How long "nothing comes" is looked for; on virtual time it costs nothing."""


@dataclass(frozen=True)
class Parked:
    """A dead letter as the broker has it."""

    body: bytes


class Harness(Protocol):
    """One queue of one broker, and the means to hurt it."""

    @property
    def store(self) -> ResultStore: ...
    def connect(self) -> AbstractAsyncContextManager[Transport]: ...
    async def publish(self, body: bytes, message_id: str | None = None) -> None: ...
    async def cut(self, transport: Transport) -> None: ...
    async def lapse(self, transport: Transport) -> None: ...
    async def parked(self) -> list[Parked]: ...


def request(request_id: str) -> bytes:
    """A message's body."""
    return json.dumps(
        {"request_id": request_id, "received_at": time.time(), "timeout_s": 600, "payload": {"n": "ü \x7f"}}
    ).encode()


def reply(request_id: str, **changes: object) -> Reply:
    """A terminal result."""
    values: dict[str, object] = {
        "request_id": request_id,
        "status": "completed",
        "status_code": 200,
        "attempt": 0,
        "replica_id": "r",
        "finished_at": 1.0,
        "result": b'{"ok":true}',
    }
    return Reply(**(values | changes))  # type: ignore[arg-type]  # Test data by name.


def failed(request_id: str, **changes: object) -> Reply:
    """A terminal failure."""
    values: dict[str, object] = {
        "status": "failed",
        "status_code": 500,
        "result": None,
        "error": "no",
        "error_code": "retries_exhausted",
    }
    return reply(request_id, **(values | changes))


async def take(transport: Transport, within_s: float = SOON_S) -> Delivery:
    """The next delivery, or a failure."""
    async with asyncio.timeout(within_s):
        return await transport.receive()


async def nothing_comes(transport: Transport, for_s: float = QUIET_S) -> None:
    """Fail where something does."""
    with pytest.raises(TimeoutError):
        await take(transport, for_s)


async def claim(harness: Harness, request_id: str, attempt: int = 0, token: str = "t") -> Hold:
    """Claim a request as the processor does."""
    answer = await harness.store.claim(request_id, attempt, Token(token), time.time() + 600)
    assert isinstance(answer, Claimed)
    return Hold(request_id, Token(token))


class TransportContract:
    """Fifteen clauses, and what follows from them for the order of settling."""

    async def test_what_goes_in_comes_out_byte_for_byte(self, harness: Harness) -> None:
        """No codec of ours has a place between producer and processor."""
        body = request("a") + b" \n"
        await harness.publish(body, message_id="m-1")
        async with harness.connect() as transport, transport.consuming(1):
            delivery = await take(transport)

            assert delivery.body == body
            assert delivery.message_id == "m-1"
            assert delivery.attempts == 0
            assert not delivery.redelivered

    async def test_acked_is_gone_whatever_becomes_of_the_connection(self, harness: Harness) -> None:
        await harness.publish(request("a"))
        async with harness.connect() as transport, transport.consuming(1):
            settled = await transport.settle(await take(transport), Ack())
            assert settled == Settled(how="ack")
        async with harness.connect() as again, again.consuming(1):
            await nothing_comes(again)

    async def test_the_reply_goes_out_with_the_ack(self, harness: Harness) -> None:
        await harness.publish(request("a"))
        async with harness.connect() as transport, transport.consuming(1):
            delivery = await take(transport)
            hold = await claim(harness, "a")
            settled = await transport.settle(delivery, Ack(reply=reply("a"), usage_event=b"{}", claim=hold))

            assert settled == Settled(how="ack")
            stored = await harness.store.read("a")
            assert stored is not None
            assert json.loads(stored)["result"] == {"ok": True}

    async def test_unsettled_comes_back_when_its_holder_goes_away(self, harness: Harness) -> None:
        """At-least-once: uncounted, and marked as redelivered."""
        await harness.publish(request("a"))
        async with harness.connect() as transport, transport.consuming(1):
            await take(transport)
            await harness.lapse(transport)
        async with harness.connect() as again, again.consuming(1):
            delivery = await take(again)

            assert delivery.attempts == 0
            assert delivery.redelivered

    async def test_nacked_comes_back_at_once_and_uncounted(self, harness: Harness) -> None:
        """Our own stops must not count against a request; and its claim is free for the next one."""
        await harness.publish(request("a"))
        async with harness.connect() as transport, transport.consuming(1):
            delivery = await take(transport)
            hold = await claim(harness, "a")
            settled = await transport.settle(delivery, Nack(claim=hold))
            back = await take(transport)

            assert settled == Settled(how="requeue")
            assert back.attempts == 0
            assert await harness.store.claim("a", 0, Token("u"), time.time() + 600) == Claimed(starts=1)

    @pytest.mark.parametrize("delay_s", [0.0, 0.905])
    async def test_republished_stays_hidden_for_its_delay_then_comes_once_counted(
        self, harness: Harness, delay_s: float
    ) -> None:
        await harness.publish(request("a"), message_id="m-1")
        async with harness.connect() as transport, transport.consuming(2):
            delivery = await take(transport)
            hold = await claim(harness, "a")
            loop = asyncio.get_running_loop()
            before = loop.time()
            settled = await transport.settle(delivery, Republish(delay_s=delay_s, attempts=1, left_s=60, claim=hold))
            assert settled == Settled(how="retry")
            copy = await take(transport)

            assert loop.time() - before >= delay_s * 0.95
            assert copy.body == delivery.body
            assert copy.attempts == 1
            assert copy.message_id == "m-1"
            assert await harness.store.claim("a", 0, Token("u"), time.time() + 600) == BelowFloor()
            await nothing_comes(transport)

    async def test_what_was_not_tried_comes_again_uncounted_and_unclaimed(self, harness: Harness) -> None:
        """Before a closed gate nothing is claimed; the copy is of the same attempt."""
        await harness.publish(request("a"), message_id="m-1")
        async with harness.connect() as transport, transport.consuming(2):
            delivery = await take(transport)
            unclaimed = Hold("a", Token("never claimed"))
            settled = await transport.settle(delivery, Republish(delay_s=0.02, attempts=0, left_s=60, claim=unclaimed))
            assert settled == Settled(how="retry")
            copy = await take(transport)

            assert (copy.body, copy.attempts, copy.message_id) == (delivery.body, 0, "m-1")
            assert await harness.store.claim("a", 0, Token("u"), time.time() + 600) == Claimed(starts=1)
            await nothing_comes(transport)

    async def test_a_dead_letter_is_parked_and_its_reply_stored(self, harness: Harness) -> None:
        body = request("a")
        await harness.publish(body)
        async with harness.connect() as transport, transport.consuming(1):
            delivery = await take(transport)
            hold = await claim(harness, "a")
            letter = DeadLetter(
                reason="retries_exhausted", detail="no", attempts=2, status_code=500, reply=failed("a"), claim=hold
            )
            settled = await transport.settle(delivery, letter)

            assert settled == Settled(how="dead_letter")
            assert isinstance(await harness.store.claim("a", 0, Token("u"), 0), AlreadyAnswered)
            await nothing_comes(transport)
        parked = await eventually(harness.parked, within=SOON_S, what="the dead letter is parked")
        assert [letter.body for letter in parked] == [body]

    async def test_settling_twice_is_refused_and_changes_nothing(self, harness: Harness) -> None:
        """On AMQP a second settlement closes the channel under all other deliveries."""
        await harness.publish(request("a"))
        await harness.publish(request("b"))
        async with harness.connect() as transport, transport.consuming(2):
            first, second = await take(transport), await take(transport)
            await transport.settle(first, Ack())

            for again in (Ack(), Nack(), Republish(delay_s=0, attempts=1, left_s=9, claim=Hold("a", Token("t")))):
                assert isinstance(await transport.settle(first, again), DeliveryLost)
            assert await transport.settle(second, Ack()) == Settled(how="ack")
            await nothing_comes(transport)
            assert not transport.lost.is_set()

    async def test_a_late_holder_cannot_settle_or_extend_what_went_to_another(self, harness: Harness) -> None:
        """The worst one: an acknowledgement that acknowledges somebody else's delivery."""
        await harness.publish(request("a"))
        async with harness.connect() as late, late.consuming(1):
            stale = await take(late)
            await harness.lapse(late)
            async with harness.connect() as other, other.consuming(1):
                theirs = await take(other)

                assert isinstance(await late.settle(stale, Ack()), DeliveryLost)
                with pytest.raises(TransportLost):
                    await late.extend(stale)
                assert await other.settle(theirs, Nack()) == Settled(how="requeue")
                assert (await take(other)).body == stale.body

    async def test_a_late_holders_success_is_stored_all_the_same(self, harness: Harness) -> None:
        """Losing the broker does not lose the generation: the redelivered message is answered from the store."""
        await harness.publish(request("a"))
        async with harness.connect() as late, late.consuming(1):
            stale = await take(late)
            hold = await claim(harness, "a")
            await harness.lapse(late)

            assert await late.settle(stale, Ack(reply=reply("a"), claim=hold)) == DeliveryLost(stored=True)
            assert await harness.store.read("a") is not None

    async def test_extended_stays_ours_past_its_lease(self, harness: Harness) -> None:
        await harness.publish(request("a"))
        async with harness.connect() as transport, transport.consuming(1):
            delivery = await take(transport)
            await transport.extend(delivery)

            assert await transport.settle(delivery, Ack()) == Settled(how="ack")

    async def test_cancelling_receive_ends_it_and_loses_nothing(self, harness: Harness) -> None:
        """At sixty points of the call; drivers that swallow a cancellation, or drop what had just arrived, fail it."""
        async with harness.connect() as transport, transport.consuming(100):
            got: list[bytes] = []
            for turns in range(60):
                body = request(f"r-{turns}")
                receiving = asyncio.create_task(transport.receive())
                publishing = asyncio.create_task(harness.publish(body))
                for _ in range(turns):
                    await asyncio.sleep(0)
                receiving.cancel()
                await asyncio.wait([receiving])
                if not receiving.cancelled():
                    got.append(receiving.result().body)
                await publishing
                if receiving.cancelled():
                    got.append((await take(transport)).body)
                assert got[-1] == body

    async def test_no_two_hold_the_same_message(self, harness: Harness) -> None:
        bodies = [request(f"r-{n}") for n in range(40)]
        for body in bodies:
            await harness.publish(body)
        got: list[bytes] = []

        async def drain(transport: Transport) -> None:
            while len(got) < len(bodies):
                try:
                    delivery = await take(transport, QUIET_S)
                except TimeoutError:
                    continue
                got.append(delivery.body)
                assert await transport.settle(delivery, Ack()) == Settled(how="ack")

        async with harness.connect() as one, harness.connect() as two, one.consuming(3), two.consuming(3):
            async with asyncio.timeout(SOON_S * 3):
                await asyncio.gather(drain(one), drain(two), drain(one))
        assert sorted(got) == sorted(bodies)

    async def test_the_limit_is_the_most_that_is_unsettled(self, harness: Harness) -> None:
        for n in range(3):
            await harness.publish(request(f"r-{n}"))
        async with harness.connect() as transport, transport.consuming(2):
            first = await take(transport)
            await take(transport)
            await nothing_comes(transport)
            await transport.settle(first, Ack())

            assert (await take(transport)).attempts == 0

    async def test_leaving_consuming_gives_back_what_was_not_received(self, harness: Harness) -> None:
        """Suspending: what waits goes to other workers, what was received stays ours."""
        for n in range(3):
            await harness.publish(request(f"r-{n}"))
        async with harness.connect() as transport, harness.connect() as other:
            async with transport.consuming(3):
                mine = await take(transport)
            async with other.consuming(3):
                others = [(await take(other)).body, (await take(other)).body]
                await nothing_comes(other)

            assert mine.body not in others
            assert await transport.settle(mine, Ack()) == Settled(how="ack")
            async with transport.consuming(3):
                await nothing_comes(transport)

    async def test_the_limit_can_be_changed_while_consuming(self, harness: Harness) -> None:
        for n in range(4):
            await harness.publish(request(f"r-{n}"))
        async with harness.connect() as transport, transport.consuming(1):
            held = [await take(transport)]
            await nothing_comes(transport)
            await transport.set_limit(4)
            held += [await take(transport) for _ in range(3)]

            for delivery in held:
                assert await transport.settle(delivery, Ack()) == Settled(how="ack")

    async def test_a_cut_wakes_a_waiting_receive(self, harness: Harness) -> None:
        """A worker asleep for ever is the commonest fault of all."""
        async with harness.connect() as transport, transport.consuming(1):
            receiving = asyncio.create_task(transport.receive())
            await asyncio.sleep(0)
            await harness.cut(transport)

            with pytest.raises(TransportLost):
                async with asyncio.timeout(SOON_S):
                    await receiving
            assert transport.lost.is_set()
            assert transport.lost_because

    async def test_a_cut_connection_says_so_from_every_method_and_goes_on_saying_so(self, harness: Harness) -> None:
        await harness.publish(request("a"))
        async with harness.connect() as transport:
            async with transport.consuming(1):
                delivery = await take(transport)
                await harness.cut(transport)
                async with asyncio.timeout(SOON_S):
                    await transport.lost.wait()
            calls: list[Callable[[], Awaitable[object]]] = [
                transport.receive,
                transport.backlog,
                lambda: transport.set_limit(2),
                lambda: transport.extend(delivery),
                lambda: transport.publish(b"{}"),
                lambda: transport.consuming(1).__aenter__(),
            ]
            for call in calls * 2:
                with pytest.raises(TransportLost):
                    await call()
            assert delivery.lost.is_set()
            assert isinstance(await transport.settle(delivery, Ack()), DeliveryLost)

    async def test_the_backlog_counts_what_nobody_holds(self, harness: Harness) -> None:
        for n in range(3):
            await harness.publish(request(f"r-{n}"))
        async with harness.connect() as transport, transport.consuming(1):
            await take(transport)

            async def two_ready() -> bool:
                return (await transport.backlog()).ready == 2

            await eventually(two_ready, within=SOON_S, what="two messages are ready")

    async def test_what_is_published_arrives(self, harness: Harness) -> None:
        async with harness.connect() as transport, transport.consuming(1):
            body = request("a")
            await transport.publish(body, message_id="m-2", headers={"traceparent": "00-x"})
            delivery = await take(transport)

            assert delivery.body == body
            assert delivery.message_id == "m-2"
            assert delivery.headers["traceparent"] == "00-x"

    async def test_what_is_known_already_is_not_acknowledged(self, harness: Harness) -> None:
        """`settle` hands the known result up, so that `decide` says what follows."""
        await harness.publish(request("a"))
        async with harness.connect() as transport, transport.consuming(1):
            delivery = await take(transport)
            await harness.store.write(reply("a"), None, Token("other"))
            settlement = await transport.settle(delivery, Ack(reply=reply("a", status_code=201)))

            assert isinstance(settlement, Known)
            assert settlement.reply.status == "completed"
            assert await transport.settle(delivery, Ack()) == Settled(how="ack")
