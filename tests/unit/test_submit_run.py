"""A run of `submit` over many lines: order, windows, what is asked again, and how it stops. In virtual time."""

import asyncio
import io
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from inference_worker import submit_run
from inference_worker.client import Client, Result
from inference_worker.client_ways import Cancelled, Request, Way
from inference_worker.errors import NotAccepted, StoreUnavailable
from inference_worker.submit_lines import Line
from inference_worker.submit_progress import Progress
from inference_worker.submit_run import AHEAD, Run
from inference_worker.submit_state import State, read_state


class FakeSystem:
    """Answers a request `takes_s[payload]` seconds after it was submitted."""

    def __init__(self, **takes_s: float) -> None:
        self.takes_s = takes_s
        self.submitted: list[str] = []
        self.looks: list[str] = []
        self.due: dict[str, float] = {}
        self.peak = 0
        self.refuses: dict[str, NotAccepted] = {}
        self.silent_looks = 0

    async def submit(self, request: Request, within_s: float) -> str:
        name = json.loads(request.payload)["n"]
        assert request.request_id is not None
        if name in self.refuses:
            raise self.refuses[name]
        now = asyncio.get_running_loop().time()
        self.submitted.append(name)
        self.due.setdefault(request.request_id, now + self.takes_s.get(name, 1.0))
        self.peak = max(self.peak, sum(due > now for due in self.due.values()))
        return request.request_id

    async def look(self, request_id: str, within_s: float) -> Result | None:
        self.looks.append(request_id)
        if self.silent_looks:
            self.silent_looks -= 1
            raise StoreUnavailable("away")
        left_s = self.due.get(request_id, float("inf")) - asyncio.get_running_loop().time()
        await asyncio.sleep(max(min(left_s, within_s), 0.0))
        if left_s > within_s:
            return None
        return Result(request_id=request_id, status="completed", status_code=200, result=b'"' + b"x" * 100 + b'"')

    async def cancel(self, request_id: str) -> Cancelled:
        return "too late"


@asynccontextmanager
async def reached(system: FakeSystem) -> AsyncGenerator[Way, None]:
    yield system


class Kit:
    """One run, which may be gone on with."""

    def __init__(self, system: FakeSystem, folder: Path, names: str, *, in_flight: int = 2) -> None:
        self.system = system
        self.path = folder / "state"
        self.names = names
        self.in_flight = in_flight
        self.output = io.BytesIO()
        self.state = State(
            run_id="run", input="in", input_sha256="", lines=len(names), output="-", timeout_s=60, deployment_id="d"
        )
        self.taken = 0

    def lines(self) -> Iterator[Line]:
        for index, name in enumerate(self.names):
            if index >= self.state.written:
                self.taken = index + 1
                yield Line(index=index, payload=json.dumps({"n": name}).encode())

    async def run(self, stop: asyncio.Event | None = None) -> str:
        with Progress(self.state.lines, self.state.written, self.state.failed, plain=True) as progress:
            async with Client(reached(self.system), now=lambda: 0.0) as client:
                run = Run(client, self.state, self.path, _File(self.output), progress, in_flight=self.in_flight)
                return await run.to_the_end(self.lines(), stop or asyncio.Event())

    @property
    def written(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.output.getvalue().splitlines()]

    @property
    def numbers(self) -> list[int]:
        return [int(str(line["request_id"]).rpartition("-")[2]) for line in self.written]


class _File(io.BytesIO):
    """Writes into another one, and has no descriptor."""

    def __init__(self, into: io.BytesIO) -> None:
        super().__init__()
        self._into = into

    def write(self, some: object, /) -> int:
        assert isinstance(some, bytes)
        return self._into.write(some)

    def fileno(self) -> int:
        raise OSError("it has none")


async def test_results_are_written_in_the_order_of_the_input_whatever_is_ready_first(tmp_path: Path) -> None:
    kit = Kit(FakeSystem(a=9.0, b=1.0, c=5.0), tmp_path, "abcd")

    assert await kit.run() == ""

    assert kit.numbers == [1, 2, 3, 4]
    assert kit.state.written_bytes == len(kit.output.getvalue())


async def test_so_many_are_under_way_and_no_more(tmp_path: Path) -> None:
    kit = Kit(FakeSystem(), tmp_path, "x" * 30, in_flight=3)

    await kit.run()

    assert kit.system.peak == 3


async def test_one_slow_request_does_not_let_the_rest_of_the_input_into_memory(tmp_path: Path) -> None:
    kit = Kit(FakeSystem(a=50.0), tmp_path, "a" + "b" * 200, in_flight=2)
    stop = asyncio.Event()
    running = asyncio.create_task(kit.run(stop))

    await asyncio.sleep(45)

    assert kit.taken == AHEAD * 2
    await running
    assert len(kit.numbers) == 201


async def test_results_beyond_the_budget_are_asked_for_again_at_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit_run, "MOST_HELD_BYTES", 600)
    kit = Kit(FakeSystem(a=20.0), tmp_path, "abcdefgh", in_flight=2)

    await kit.run()

    assert kit.numbers == list(range(1, 9))
    assert len(kit.system.looks) > 8
    assert sorted(kit.system.submitted) == list("abcdefgh")


async def test_a_stop_leaves_a_state_from_which_nothing_is_asked_twice(tmp_path: Path) -> None:
    kit = Kit(FakeSystem(c=500.0), tmp_path, "abcdef")
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(20, stop.set)

    assert await kit.run(stop) == "stopped"

    assert kit.numbers == [1, 2]
    assert read_state(kit.path).written == 2
    for request_id in kit.system.due:
        kit.system.due[request_id] = 0.0
    sent = list(kit.system.submitted)
    assert await kit.run() == ""
    assert kit.numbers == [1, 2, 3, 4, 5, 6]
    assert kit.system.submitted == sent, "a resume submitted what was answered"


async def test_a_request_that_is_never_accepted_is_a_failed_line_and_the_rest_goes_on(tmp_path: Path) -> None:
    kit = Kit(FakeSystem(), tmp_path, "abc")
    kit.system.refuses["b"] = NotAccepted("too large", maybe=False, for_good=True)

    await kit.run()

    assert [line["status"] for line in kit.written] == ["completed", "failed", "completed"]
    assert (kit.written[1]["error"], kit.written[1]["error_code"]) == ("too large", "not_accepted")
    assert kit.state.failed == 1


async def test_a_broker_that_takes_nothing_stops_the_run_to_be_gone_on_with(tmp_path: Path) -> None:
    kit = Kit(FakeSystem(), tmp_path, "abcd")
    kit.system.refuses["c"] = NotAccepted("not confirmed within 300 s", maybe=True)

    assert await kit.run() == "stopped: not confirmed within 300 s"

    assert kit.state.written < 4
    kit.system.refuses.clear()
    await kit.run()
    assert kit.numbers == [1, 2, 3, 4]


async def test_a_request_without_an_answer_is_a_failed_line_after_its_time(tmp_path: Path) -> None:
    kit = Kit(FakeSystem(a=1e9), tmp_path, "ab")

    await kit.run()

    assert kit.written[0]["error_code"] == "no_result"
    assert kit.written[1]["status"] == "completed"
    assert asyncio.get_running_loop().time() == pytest.approx(90, abs=5)


async def test_a_store_that_is_away_is_asked_again(tmp_path: Path) -> None:
    kit = Kit(FakeSystem(), tmp_path, "ab")
    kit.system.silent_looks = 5

    await kit.run()

    assert kit.numbers == [1, 2]


async def test_a_full_disk_stops_the_run_and_what_was_noted_before_stays_right(tmp_path: Path) -> None:
    kit = Kit(FakeSystem(), tmp_path, "abcdef")
    whole = kit.output.write

    def write(some: bytes) -> int:
        if kit.state.written == 3:
            raise OSError(28, "No space left on device")
        return whole(some)

    kit.output.write = write  # type: ignore[method-assign,assignment]

    assert await kit.run() == "stopped: the output cannot be written: No space left on device"

    assert read_state(kit.path).written == 3
    kit.output.write = whole  # type: ignore[method-assign]
    assert await kit.run() == ""
    assert kit.numbers == [1, 2, 3, 4, 5, 6]
