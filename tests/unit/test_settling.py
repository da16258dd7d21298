"""What every transport does alike when it settles: store, bury, release."""

import asyncio
import json

import pytest

from inference_worker.disposition import Ack, Busy, DeadLetter, Hold, Known, StoreSilent, Token
from inference_worker.messages import Reply
from inference_worker.ports import BelowFloor, Claimed
from inference_worker.settling import COURTESY_S, bury, release, store_reply
from tests.transport_contract import failed, reply
from tests.unit.worker_kit import EPOCH, FaultyStore, Site

MINE = Hold("a", Token("mine"))


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(Site().store)


def letter(answer: Reply | None) -> DeadLetter:
    return DeadLetter(
        reason="retries_exhausted", detail="x" * 5000, attempts=3, status_code=500, reply=answer, claim=MINE
    )


class TestStoreReply:
    """Result and usage event come first, and say whether the rest may follow."""

    async def test_nothing_to_store_is_nothing_to_wait_for(self, store: FaultyStore) -> None:
        store.away = "gone"

        assert await store_reply(store, Ack()) is None
        assert await store_reply(store, letter(None)) is None

    async def test_a_stored_reply_lets_the_acknowledgement_follow(self, store: FaultyStore) -> None:
        assert await store_reply(store, Ack(reply=reply("a"), usage_event=b"{}", claim=MINE)) is None
        assert [entry.event for entry in await store.real.take(9)] == [b"{}"]

    async def test_a_dead_letter_is_never_billed(self, store: FaultyStore) -> None:
        assert await store_reply(store, letter(failed("a"))) is None
        assert await store.read("a") is not None
        assert await store.real.size() == 0

    async def test_a_reply_without_a_claim_is_stored_where_nobody_has_one(self, store: FaultyStore) -> None:
        assert await store_reply(store, Ack(reply=failed("a"))) is None

    async def test_what_is_known_is_handed_up(self, store: FaultyStore) -> None:
        await store.real.write(reply("a", status_code=201), None, Token("other"))

        settlement = await store_reply(store, Ack(reply=reply("a"), claim=MINE))

        assert isinstance(settlement, Known)
        assert settlement.reply.status_code == 201

    async def test_a_failure_waits_for_another_runner(self, store: FaultyStore) -> None:
        await store.real.claim("a", 0, Token("other"), EPOCH + 600)

        assert await store_reply(store, Ack(reply=failed("a"), claim=MINE)) == Busy(left_s=15.0)

    async def test_a_store_that_is_away_stores_nothing(self, store: FaultyStore) -> None:
        store.away = "gone"

        assert await store_reply(store, Ack(reply=reply("a"), claim=MINE)) == StoreSilent()


class TestRelease:
    """A courtesy: the lease lapses by itself."""

    async def test_frees_the_claim_and_sets_the_floor(self, store: FaultyStore) -> None:
        await store.real.claim("a", 0, MINE.token, EPOCH + 600)

        await release(store, MINE, 1)

        assert await store.real.claim("a", 0, Token("other"), EPOCH + 600) == BelowFloor()
        assert await store.real.claim("a", 1, Token("other"), EPOCH + 600) == Claimed(starts=1)

    async def test_without_a_claim_asks_nobody(self, store: FaultyStore) -> None:
        await release(store, None)

        assert store.asked == []

    async def test_gives_up_on_a_store_that_is_away(self, store: FaultyStore) -> None:
        store.away = "gone"

        await release(store, MINE)

    async def test_gives_up_on_a_store_that_is_silent(self, store: FaultyStore) -> None:
        store.takes_s["release"] = 60.0

        await release(store, MINE)

        assert asyncio.get_running_loop().time() == COURTESY_S


class TestBury:
    """A note for whoever looks at the dead letters."""

    async def test_notes_why_and_when_and_how_often(self, store: FaultyStore) -> None:
        await bury(store, letter(failed("a")), 7.5)

        assert json.loads(store.real.notes["a"]) == {
            "request_id": "a",
            "reason": "retries_exhausted",
            "detail": "x" * 1000,
            "attempts": 3,
            "status_code": 500,
            "dead_at": 7.5,
        }

    async def test_what_has_no_reply_has_its_note_already(self, store: FaultyStore) -> None:
        await bury(store, letter(None), 7.5)

        assert store.asked == []

    async def test_holds_nobody_up(self, store: FaultyStore) -> None:
        store.away = "gone"

        await bury(store, letter(failed("a")), 7.5)

        assert store.real.notes == {}
