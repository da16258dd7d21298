"""The store of this process keeps the store contract, and stays within its bounds."""

import asyncio
import json

import pytest

from inference_worker.disposition import Token
from inference_worker.errors import StoreUnavailable
from inference_worker.messages import encode_reply
from inference_worker.ports import Claimed, Stored
from inference_worker.results import memory
from inference_worker.results.memory import MemoryStore
from tests.store_contract import StoreContract, failure, reply
from tests.unit.worker_kit import EPOCH, now

A = Token("a")


class MemoryStoreHarness:
    """A store on virtual time."""

    lease_s = 15.0
    ttl_s = 60.0

    def __init__(self) -> None:
        store = MemoryStore(now=now, lease_s=self.lease_s, ttl_s=self.ttl_s)
        self.store = self.short_lived = self.heeded = self.outbox = self.other_outbox = store

    def now(self) -> float:
        return now()

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def leave_lying(self) -> None:
        await asyncio.sleep(60.0)


@pytest.fixture
async def harness() -> MemoryStoreHarness:
    return MemoryStoreHarness()


class TestMemoryStore(StoreContract):
    """All clauses, on virtual time."""


async def test_a_claim_is_over_two_leases_and_a_minute_after_the_deadline(harness: MemoryStoreHarness) -> None:
    await harness.store.claim("a", 0, A, now() + 100)
    await harness.store.release("a", A, 1)

    await asyncio.sleep(100 + 2 * 15 + 60 - 1)
    assert await harness.store.claim("a", 0, A, now()) != Claimed(starts=1)
    await asyncio.sleep(1)

    assert await harness.store.claim("a", 0, A, now()) == Claimed(starts=1)


async def test_a_refused_event_is_kept_with_its_reason(harness: MemoryStoreHarness) -> None:
    await harness.store.write(reply(), b"{}", A)
    (entry,) = await harness.store.take(1)

    await harness.store.refused(entry, "no")

    assert harness.store.refused_events == [(b"{}", "no")]


@pytest.mark.parametrize(
    "name", ["claim", "renew", "release", "write", "cancel", "bury", "read", "wait", "progress", "probe"]
)
async def test_a_store_that_is_away_answers_nothing(harness: MemoryStoreHarness, name: str) -> None:
    harness.store.away = "gone"
    arguments: dict[str, tuple[object, ...]] = {
        "claim": ("a", 0, A, EPOCH),
        "renew": ("a", A),
        "release": ("a", A),
        "write": (reply(), None, A),
        "cancel": (failure(),),
        "bury": ("a", b"{}"),
        "wait": ("a", 1.0),
        "probe": (),
    }

    with pytest.raises(StoreUnavailable, match="gone"):
        await getattr(harness.store, name)(*arguments.get(name, ("a",)))


@pytest.mark.parametrize("name", ["take", "sent", "refused", "size"])
async def test_an_outbox_that_is_away_answers_nothing(harness: MemoryStoreHarness, name: str) -> None:
    await harness.store.write(reply(), b"{}", A)
    (entry,) = await harness.store.take(1)
    harness.store.away = "gone"
    arguments: dict[str, tuple[object, ...]] = {"take": (1,), "sent": ([entry],), "refused": (entry, "no"), "size": ()}

    with pytest.raises(StoreUnavailable, match="gone"):
        await getattr(harness.store, name)(*arguments[name])


class TestBounds:
    """What arrives without an end is not kept without one."""

    async def test_the_oldest_results_go_first(
        self, harness: MemoryStoreHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory, "MOST_RESULTS", 2)
        for name in ("a", "b", "c"):
            await harness.store.write(reply(name), None, A)

        assert [await harness.store.read(name) is None for name in ("a", "b", "c")] == [True, False, False]

    async def test_results_have_a_bound_in_bytes_and_the_last_one_stays(
        self, harness: MemoryStoreHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory, "MOST_BYTES", len(encode_reply(reply("a"))) * 2)
        for name in ("a", "b", "c"):
            await harness.store.write(reply(name), None, A)
        assert await harness.store.read("a") is None
        assert await harness.store.read("b") is not None

        await harness.store.write(reply("d", result=json.dumps("x" * 5000).encode()), None, A)

        assert await harness.store.read("c") is None
        assert await harness.store.read("d") is not None

    async def test_what_is_over_is_swept_by_later_writes(self, harness: MemoryStoreHarness) -> None:
        for name in ("a", "b", "c"):
            await harness.store.write(reply(name), None, A)
            await harness.store.claim(f"claimed-{name}", 0, A, now())
        await asyncio.sleep(1000)

        for name in ("d", "e"):
            await harness.store.write(reply(name), None, A)

        assert set(harness.store._results) == {"d", "e"}
        assert harness.store._leases == {}
        assert harness.store._held_bytes == 2 * len(encode_reply(reply("d")))

    async def test_waiting_for_what_never_comes_leaves_nothing_behind_for_ever(
        self, harness: MemoryStoreHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory, "MOST_RESULTS", 2)
        for n in range(4):
            await harness.store.wait(f"never-{n}", 1.0)

        assert await harness.store.write(reply(), None, A) == Stored()

        assert len(harness.store._told) <= 2

    async def test_the_oldest_notes_go_first(
        self, harness: MemoryStoreHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory, "MOST_RESULTS", 2)
        for name in ("a", "b", "c"):
            await harness.store.bury(name, b"{}")

        assert list(harness.store.notes) == ["b", "c"]
