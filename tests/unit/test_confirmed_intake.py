"""A job comes into a confirming queue once, wherever a call with its key was cut off; and not beyond the limit."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from inference_worker.confirmed_intake import LOOK_S, PATIENCE_S, ConfirmedIntake
from inference_worker.errors import InferenceWorkerError, NotAccepted, QueueFull, StoreUnavailable, TransportLost
from inference_worker.job_book import RESERVED_S, JobRecord, OtherBody, Page, Reserved, Standing, Taken
from inference_worker.messages import encode_request
from inference_worker.ports import Backlog
from inference_worker.results.memory_job_book import MemoryJobBook
from inference_worker.timing import ended
from tests.unit.worker_kit import TTL_S, FakeModel, Site, Worker, now, running

T = TypeVar("T")


def message(record: JobRecord) -> bytes:
    return encode_request(
        request_id=record.job_id,
        received_at=record.created_at,
        timeout_s=record.expires_at - record.created_at,
        payload=b"{}",
    )


class Gateway:
    """One process of ours with an intake, and the links from it to book and broker, which can be cut at every step."""

    def __init__(self, site: Site, book: MemoryJobBook, name: str) -> None:
        self.name = name
        self._site = site
        self._book = book
        self._ids = count()
        self.cut_at: int | None = None
        """At this step, counted from 0, it stops; before the step is done for even numbers, after it for odd ones."""
        self.steps: list[str] = []
        self.stopped = asyncio.Event()
        self.dead = False
        self.publish_takes_s = 0.0
        self.publish_raises: list[Exception | None] = []
        """What the next publications end with; the message gets through where it may have."""
        self.book_raises: dict[str, list[Exception]] = {}
        self.published: list[str] = []
        self.looks = 0
        self.look_takes_s = 0.0
        self.look_raises: InferenceWorkerError | None = None
        self.intake = ConfirmedIntake(self, self.publish, self.backlog)

    async def accept(
        self, key: str | None = "k", *, most_waiting: int = 0, fingerprint: str = "f", tenant: str = "t"
    ) -> Taken | OtherBody:
        """Accept one more job."""
        record = JobRecord(
            job_id=f"{self.name}-{next(self._ids)}",
            tenant=tenant,
            created_at=now(),
            expires_at=now() + 600,
            fingerprint=fingerprint,
        )
        return await self.intake.accept(record, message, key=key, most_waiting=most_waiting)

    async def taken(self, key: str | None = "k", *, most_waiting: int = 0, tenant: str = "t") -> Taken:
        taken = await self.accept(key, most_waiting=most_waiting, tenant=tenant)
        assert isinstance(taken, Taken)
        return taken

    async def _step(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        await self._cut(f"before {name}")
        if self.book_raises.get(name):
            raise self.book_raises[name].pop(0)
        done = await work()
        await self._cut(f"after {name}")
        return done

    async def _cut(self, step: str) -> None:
        if self.dead or self.cut_at == len(self.steps):
            self.stopped.set()
            await asyncio.Event().wait()
        self.steps.append(step)

    async def publish(self, body: bytes, *, message_id: str) -> None:
        await self._step("publish", lambda: self._publish(body, message_id))

    async def _publish(self, body: bytes, message_id: str) -> None:
        await asyncio.sleep(self.publish_takes_s)
        end = self.publish_raises.pop(0) if self.publish_raises else None
        if end is None or isinstance(end, TransportLost) or (isinstance(end, NotAccepted) and end.maybe):
            await self._site.publish(body, message_id=message_id)
            self.published.append(message_id)
        if end is not None:
            raise end

    async def backlog(self) -> Backlog:
        self.looks += 1
        await asyncio.sleep(self.look_takes_s)
        if self.look_raises is not None:
            raise self.look_raises
        async with self._site.broker.connect() as transport:
            return await transport.backlog()

    # ------------------------------------------------------------ JobBook

    async def reserve(self, record: JobRecord, key: str | None) -> Reserved | Standing | OtherBody:
        return await self._step("reserve", lambda: self._book.reserve(record, key))

    async def confirm(self, reserved: Reserved) -> None:
        await self._step("confirm", lambda: self._book.confirm(reserved))

    async def withdraw(self, reserved: Reserved) -> None:
        await self._step("withdraw", lambda: self._book.withdraw(reserved))

    async def leave(self, reserved: Reserved) -> None:
        await self._step("leave", lambda: self._book.leave(reserved))

    async def find(self, job_id: str, tenant: str | None = None) -> JobRecord | None:
        return await self._book.find(job_id, tenant)

    async def page(self, tenant: str, *, limit: int, after: str | None) -> Page:
        return await self._book.page(tenant, limit=limit, after=after)

    async def deadlines(self, limit: int) -> list[float]:
        return list(await self._book.deadlines(limit))


class Place:
    """A queue, a store, a book, and gateways before them."""

    def __init__(self) -> None:
        self.site = Site()
        self.book = MemoryJobBook(self.site.store, ttl_s=TTL_S, now=now)
        self.names = iter("abcdefgh")
        self.model = FakeModel(takes_s=0.5)

    def gateway(self) -> Gateway:
        return Gateway(self.site, self.book, next(self.names))

    @property
    def waiting(self) -> int:
        return len(self.site.broker.ready)

    async def run_all(self, *job_ids: str) -> None:
        """Have two workers empty the queue, until these jobs have ended."""
        workers = [Worker(self.site, self.model) for _ in range(2)]
        async with running(workers[0]), running(workers[1]), asyncio.timeout(60):
            for job_id in job_ids:
                while await self.site.store.read(job_id) is None:
                    await asyncio.sleep(0.1)
            while self.site.broker.ready or any(worker.listener.in_flight for worker in workers):
                await asyncio.sleep(0.1)


@pytest.fixture
async def place() -> Place:
    return Place()


async def stopped_at(gateway: Gateway, step: int, *, killed: bool) -> bool:
    """Have it accept a job with key `k` and end it at this step; False where there are not as many."""
    gateway.cut_at = step
    call = asyncio.create_task(gateway.accept())
    stopped = asyncio.create_task(gateway.stopped.wait())
    await asyncio.wait([call, stopped], return_when=asyncio.FIRST_COMPLETED)
    gateway.dead = killed
    gateway.cut_at = None
    cut = gateway.stopped.is_set()
    await ended(call)
    await ended(stopped)
    return cut


STEPS = 6
"""Of a job's way into the queue: before and after each of reserve, publish and confirm."""


async def test_a_jobs_way_has_the_steps_that_the_next_tests_cut(place: Place) -> None:
    gateway = place.gateway()
    await gateway.accept()

    assert gateway.steps == [
        f"{when} {step}" for step in ("reserve", "publish", "confirm") for when in ("before", "after")
    ]


async def conserved(place: Place, taken: Taken, *, at_most: int) -> None:
    """One job for the key, which ran once, whatever lay in the queue."""
    job_id = taken.record.job_id
    assert 1 <= place.waiting <= at_most
    assert {lying.message_id for lying in place.site.broker.ready} == {job_id}
    await place.run_all(job_id)
    assert place.model.calls == [job_id]
    assert [entry.event for entry in await place.site.store.take(9)] == [
        f'{{"id": "{job_id}", "tokens": 7, "attempt": 0}}'.encode()
    ]
    assert not place.site.dead
    page = await place.book.page("t", limit=10, after=None)
    assert [one.job_id for one in page.records] == [job_id]
    assert page.records[0].ended == "completed"


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "cancelled"])
@pytest.mark.parametrize("step", range(STEPS))
async def test_a_call_cut_off_at_any_step_is_finished_by_the_next_one_with_its_key(
    place: Place, step: int, killed: bool
) -> None:
    first, second = place.gateway(), place.gateway()
    assert await stopped_at(first, step, killed=killed)
    begun = now()

    taken = await second.taken()

    assert now() - begun <= RESERVED_S + 0.5
    assert taken.record.job_id == ("b-0" if step == 0 else "a-0")
    assert taken.new == (step < STEPS - 1)
    assert await second.taken() == Taken(record=taken.record, new=False)
    await conserved(place, taken, at_most=2)


@pytest.mark.parametrize("late", range(STEPS))
@pytest.mark.parametrize("early", range(STEPS))
async def test_two_calls_cut_off_one_after_the_other_are_finished_by_a_third(
    place: Place, early: int, late: int
) -> None:
    first, second, third = place.gateway(), place.gateway(), place.gateway()
    await stopped_at(first, early, killed=True)
    await stopped_at(second, late, killed=True)

    taken = await third.taken()

    assert taken.record.job_id == ("a-0" if early else "b-0" if late else "c-0")
    await conserved(place, taken, at_most=3)


async def test_a_worker_may_have_finished_before_the_call_is_repeated(place: Place) -> None:
    first, second = place.gateway(), place.gateway()
    await stopped_at(first, 4, killed=True)
    await place.run_all("a-0")

    taken = await second.taken()

    assert not taken.new
    assert taken.record.job_id == "a-0"
    assert taken.record.ended == "completed"
    assert second.published == []


async def test_a_call_that_is_merely_slow_is_overtaken_and_both_mean_one_job(place: Place) -> None:
    first, second = place.gateway(), place.gateway()
    first.publish_takes_s = RESERVED_S + 3

    one, other = await asyncio.gather(first.taken(), second.taken())

    assert one.record.job_id == other.record.job_id == "a-0"
    await conserved(place, one, at_most=2)


async def test_a_second_call_waits_for_the_first(place: Place) -> None:
    first, second = place.gateway(), place.gateway()
    first.publish_takes_s = 2.0

    one, other = await asyncio.gather(first.taken(), second.taken())

    assert (one.new, other.new) == (True, False)
    assert one.record == other.record
    assert second.published == []


async def test_of_fifty_calls_at_once_at_two_gateways_one_puts_the_job_in(place: Place) -> None:
    gateways = [place.gateway(), place.gateway()]
    for gateway in gateways:
        gateway.publish_takes_s = 0.3

    taken = await asyncio.gather(*(gateways[number % 2].taken(most_waiting=5) for number in range(50)))

    assert len({one.record.job_id for one in taken}) == 1
    assert sum(one.new for one in taken) == 1
    assert place.waiting == 1


async def test_who_has_waited_long_enough_is_told_to_come_again(place: Place) -> None:
    """Each of those before it took the job over in turn, and was as slow as the one before."""
    gateways = [place.gateway() for _ in range(6)]
    for gateway in gateways:
        gateway.publish_takes_s = 30.0
    calls = [asyncio.create_task(gateway.accept()) for gateway in gateways[:-1]]
    await asyncio.sleep(0)
    begun = now()

    with pytest.raises(TransportLost, match="on its way"):
        await gateways[-1].accept()

    assert now() - begun == pytest.approx(PATIENCE_S, abs=0.5)
    await asyncio.wait(calls)
    assert {str(call.exception()) for call in calls if call.exception()} <= {
        "another request with this key is still on its way into the queue"
    }


async def test_two_tenants_with_one_key_have_a_job_each(place: Place) -> None:
    gateway = place.gateway()

    one, other = await gateway.taken(tenant="t"), await gateway.taken(tenant="u")

    assert one.new
    assert other.new
    assert place.waiting == 2


async def test_a_key_with_another_body_puts_nothing_in(place: Place) -> None:
    gateway = place.gateway()
    await gateway.accept()

    assert await gateway.accept(fingerprint="g") == OtherBody()
    assert place.waiting == 1


async def test_without_a_key_every_call_is_a_job(place: Place) -> None:
    gateway = place.gateway()

    taken = [await gateway.taken(None) for _ in range(3)]

    assert [one.waiting for one in taken] == [0, 1, 2]
    assert place.waiting == 3


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        pytest.param(QueueFull("full"), QueueFull, id="the queue is full"),
        pytest.param(NotAccepted("no queue", maybe=False), TransportLost, id="there is no queue"),
        pytest.param(NotAccepted("large", maybe=False, for_good=True), NotAccepted, id="never will be"),
    ],
)
@pytest.mark.parametrize("key", ["k", None])
async def test_a_job_that_was_refused_for_sure_is_forgotten(
    place: Place, raised: Exception, expected: type[Exception], key: str | None
) -> None:
    gateway = place.gateway()
    gateway.publish_raises = [raised]

    with pytest.raises(expected) as caught:
        await gateway.accept(key)

    assert str(caught.value) == str(raised)
    assert await place.book.find("a-0") is None
    assert (await gateway.taken(key)).record.job_id == "a-1"


@pytest.mark.parametrize(
    "raised",
    [TransportLost("cut"), NotAccepted("not confirmed within 30 s", maybe=True)],
    ids=["the connection was lost", "not confirmed in time"],
)
async def test_a_job_of_unknown_whereabouts_keeps_its_id_for_its_key(place: Place, raised: Exception) -> None:
    first, second = place.gateway(), place.gateway()
    first.publish_raises = [raised]
    with pytest.raises(TransportLost):
        await first.accept()
    begun = now()

    taken = await second.taken()

    assert now() - begun < 0.5
    assert taken.record.job_id == "a-0"
    assert taken.new
    await conserved(place, taken, at_most=2)


async def test_a_job_that_may_be_in_the_queue_is_not_forgotten_by_a_later_refusal(place: Place) -> None:
    gateway = place.gateway()
    gateway.publish_raises = [TransportLost("cut"), QueueFull("full")]
    with pytest.raises(TransportLost):
        await gateway.accept()
    with pytest.raises(QueueFull):
        await gateway.accept()

    taken = await gateway.taken()

    assert taken.record.job_id == "a-0"
    await conserved(place, taken, at_most=2)


async def test_a_full_broker_says_how_many_wait(place: Place) -> None:
    gateway = place.gateway()
    await gateway.accept(None)
    gateway.publish_raises = [QueueFull("full")]

    with pytest.raises(QueueFull) as caught:
        await gateway.accept(None)

    assert caught.value.waiting == 1


async def test_nothing_is_put_in_while_the_book_cannot_be_asked(place: Place) -> None:
    gateway = place.gateway()
    gateway.book_raises["reserve"] = [StoreUnavailable("away")]

    with pytest.raises(StoreUnavailable):
        await gateway.accept()

    assert place.waiting == 0


async def test_a_confirmation_is_said_again_until_the_book_has_it(place: Place) -> None:
    gateway = place.gateway()
    gateway.book_raises["confirm"] = [StoreUnavailable("away")] * 3

    taken = await gateway.taken()

    assert await gateway.taken() == Taken(record=taken.record, new=False)
    assert place.waiting == 1


async def test_a_job_in_the_queue_is_accepted_though_the_book_cannot_be_told(place: Place) -> None:
    """It will run and be answered; to refuse it would have its caller send it twice."""
    gateway = place.gateway()
    gateway.book_raises["confirm"] = [StoreUnavailable("away")] * 99

    with capture_logs() as log:
        taken = await gateway.taken(None)

    assert taken.new
    assert [(entry["log_level"], entry["job_id"]) for entry in log] == [("warning", "a-0")]
    await conserved(place, taken, at_most=1)


async def test_a_refusal_is_told_though_the_book_cannot_be_told(place: Place) -> None:
    gateway = place.gateway()
    gateway.publish_raises = [QueueFull("full")]
    gateway.book_raises["withdraw"] = [StoreUnavailable("away")]

    with pytest.raises(QueueFull, match="full"):
        await gateway.accept()

    await asyncio.sleep(RESERVED_S)
    assert (await gateway.taken()).record.job_id == "a-0"


# ---------------------------------------------------------------- depth


@pytest.mark.parametrize("key", ["new", None])
async def test_at_the_limit_a_job_is_refused_with_how_many_wait_and_leaves_nothing(
    place: Place, key: str | None
) -> None:
    gateway = place.gateway()
    for _ in range(3):
        await gateway.taken(None, most_waiting=3)

    with pytest.raises(QueueFull, match="3 requests wait, and 3 may") as caught:
        await gateway.accept(key, most_waiting=3)

    assert caught.value.waiting == 3
    assert place.waiting == 3
    assert await place.book.find("a-3") is None


async def test_a_repeat_is_answered_however_full_the_queue_is(place: Place) -> None:
    gateway = place.gateway()
    taken = await gateway.taken(most_waiting=1)

    assert await gateway.taken(most_waiting=1) == Taken(record=taken.record, new=False)


async def test_no_more_are_put_in_at_once_than_may_wait(place: Place) -> None:
    gateway = place.gateway()
    gateway.publish_takes_s = 0.1

    answers = await asyncio.gather(*(gateway.accept(None, most_waiting=10) for _ in range(50)), return_exceptions=True)

    assert sum(isinstance(answer, Taken) for answer in answers) == 10
    assert sum(isinstance(answer, QueueFull) for answer in answers) == 40
    assert place.waiting == 10


async def test_room_that_was_made_is_seen_with_the_next_look(place: Place) -> None:
    gateway = place.gateway()
    taken = await gateway.taken(None, most_waiting=1)
    await place.run_all(taken.record.job_id)

    await asyncio.sleep(LOOK_S)

    assert (await gateway.taken(None, most_waiting=1)).waiting == 0


async def test_retries_that_wait_for_their_time_count(place: Place) -> None:
    gateway = place.gateway()
    place.site.broker.delayed = 2

    with pytest.raises(QueueFull):
        await gateway.accept(None, most_waiting=2)


async def test_what_goes_in_while_a_look_is_under_way_is_counted(place: Place) -> None:
    gateway = place.gateway()
    await gateway.taken(None)
    await asyncio.sleep(LOOK_S + 0.01)
    gateway.look_takes_s, gateway.publish_takes_s = 0.1, 0.2

    taken = await asyncio.gather(*(gateway.taken(None) for _ in range(3)))

    assert sorted(one.waiting or 0 for one in taken) == [1, 2, 3]


async def test_many_calls_share_one_look(place: Place) -> None:
    gateway = place.gateway()
    gateway.look_takes_s = 2 * LOOK_S

    await asyncio.gather(*(gateway.accept(None) for _ in range(50)))

    assert gateway.looks == 1


async def test_a_look_is_kept_for_a_quarter_of_a_second(place: Place) -> None:
    gateway = place.gateway()
    for _ in range(10):
        await gateway.accept(None)
        await asyncio.sleep(LOOK_S / 5 * 1.01)

    assert gateway.looks == 2


async def test_a_look_that_fails_fails_for_all_who_wait_for_it_and_leaves_nothing(place: Place) -> None:
    gateway = place.gateway()
    gateway.look_takes_s, gateway.look_raises = 1.0, TransportLost("no broker")
    begun = now()

    calls = (gateway.accept(key, most_waiting=1) for key in [*(f"{number}" for number in range(9)), None])
    answers = await asyncio.gather(*calls, return_exceptions=True)

    assert [str(answer) for answer in answers] == ["no broker"] * 10
    assert now() - begun < 2
    assert await place.book.deadlines(99) == []
    assert place.waiting == 0


async def test_a_repeat_is_answered_while_the_broker_is_away(place: Place) -> None:
    gateway = place.gateway()
    taken = await gateway.taken(most_waiting=9)
    await asyncio.sleep(LOOK_S + 0.01)
    gateway.look_raises = TransportLost("no broker")

    assert await gateway.taken(most_waiting=9) == Taken(record=taken.record, new=False)


async def test_without_a_limit_a_job_needs_no_look(place: Place) -> None:
    gateway = place.gateway()
    gateway.look_raises = TransportLost("no management")

    taken = await gateway.taken(None)

    assert taken.waiting is None
    with pytest.raises(TransportLost, match="no management"):
        await gateway.intake.backlog()


async def test_a_look_whose_caller_has_gone_is_taken_by_the_next(place: Place) -> None:
    gateway = place.gateway()
    gateway.look_takes_s = 1.0
    first = asyncio.create_task(gateway.accept(None))
    second = asyncio.create_task(gateway.taken(None))
    await asyncio.sleep(0.5)

    await ended(first)

    assert (await second).waiting == 0
    assert gateway.looks == 2


async def test_the_backlog_is_that_of_the_queue(place: Place) -> None:
    gateway = place.gateway()
    await gateway.accept(None)

    assert replace(await gateway.intake.backlog(), how="") == Backlog(ready=0, delayed=0, in_flight=0)
    await asyncio.sleep(LOOK_S + 0.01)
    assert (await gateway.intake.backlog()).ready == 1
