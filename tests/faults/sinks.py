"""The two receivers of what the worker reports, the metric server and the billing service: each fails as told."""

import json
from dataclasses import dataclass, field
from typing import Literal

from tests.faults import wire
from tests.faults.wire import Exchange, HttpServer
from tests.waiting import eventually

Mode = Literal["ok", "status", "silent", "reset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One POST that came, whatever it was answered."""

    path: str
    headers: dict[str, str]
    content: object
    """The parsed JSON."""
    status: int | None
    """What it was answered; None: nothing."""


class Sink(HttpServer):
    """Records every POST, and answers by its mode; the answer of `ok` is a subclass's to refine."""

    def __init__(self, *, port: int | None = None) -> None:
        super().__init__(port=port)
        self.mode: Mode = "ok"
        self.status = 503
        self.headers: dict[str, str] = {}
        self.batches: list[Batch] = []

    def fail(self, mode: Mode = "status", *, status: int = 503, headers: dict[str, str] | None = None) -> None:
        """From now on. `refuse` and `listen` close and open the port itself."""
        self.mode, self.status, self.headers = mode, status, headers or {}

    def work(self) -> None:
        self.mode = "ok"

    async def received(self, batches: int = 1, *, within: float = 10.0) -> list[Batch]:
        """Wait until this many POSTs have come, whatever they were answered."""
        await eventually(lambda: len(self.batches) >= batches, within=within, what=f"{batches} batches")
        return self.batches

    async def answer(self, exchange: Exchange) -> None:
        request = exchange.request
        if request.method != "POST":
            await wire.answer(200)(exchange)
            return
        content = json.loads(request.body)
        status = self._status(content)
        self.batches.append(Batch(path=request.path, headers=request.headers, content=content, status=status))
        if status is not None:
            await exchange.answer(status, b"", self.headers if self.mode == "status" else None)
        elif self.mode == "silent":
            await wire.silent()(exchange)
        else:
            await wire.reset()(exchange)

    def _status(self, content: object) -> int | None:
        match self.mode:
            case "ok":
                return self.judge(content)
            case "status":
                return self.status
            case "silent" | "reset":
                return None

    def judge(self, content: object) -> int:
        """The status for a batch that nothing else is wrong with."""
        return 204


class MetricServer(Sink):
    """`POST /metrics`."""

    @property
    def records(self) -> list[dict[str, object]]:
        """All `requests[]` of the batches that were taken, in order."""
        taken: list[dict[str, object]] = []
        for batch in self.batches:
            if batch.status is not None and batch.status < 300 and isinstance(batch.content, dict):
                taken += batch.content.get("requests", [])
        return taken


@dataclass(slots=True)
class _Verdicts:
    refused: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)


class BillingServer(Sink):
    """`POST /events`, batches of CloudEvents. Which events are refused is by their `id`, or by their request's."""

    def __init__(self, *, port: int | None = None) -> None:
        super().__init__(port=port)
        self._verdicts = _Verdicts()

    def reject(self, *ids: str) -> None:
        """Answer 400 to every batch that contains one of these: event ids, or request ids."""
        self._verdicts.refused.update(ids)

    def already_has(self, *ids: str) -> None:
        """Answer 409 to every batch that contains one of these."""
        self._verdicts.known.update(ids)

    @property
    def events(self) -> list[dict[str, object]]:
        """Every event of the batches that were taken (2xx or 409), in order, repeats included."""
        taken: list[dict[str, object]] = []
        for batch in self.batches:
            if batch.status is not None and (batch.status < 300 or batch.status == 409):
                taken += _events(batch.content)
        return taken

    async def billed(self, events: int, *, within: float = 10.0) -> list[dict[str, object]]:
        """Wait until this many distinct events were taken."""
        await eventually(
            lambda: len({str(one["id"]) for one in self.events}) >= events,
            within=within,
            what=f"{events} billed events",
        )
        return self.events

    def judge(self, content: object) -> int:
        names = {name for one in _events(content) for name in _names(one)}
        if names & self._verdicts.refused:
            return 400
        return 409 if names & self._verdicts.known else 204


def _events(content: object) -> list[dict[str, object]]:
    return [one for one in content if isinstance(one, dict)] if isinstance(content, list) else []


def _names(one: dict[str, object]) -> set[str]:
    data = one.get("data")
    return {str(one.get("id"))} | ({str(data.get("request_id"))} if isinstance(data, dict) else set())
