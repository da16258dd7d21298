"""The dead letters of a gateway, over HTTP: what the `dlq` command does with `--url`."""

import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import httpx
import msgspec

from inference_worker.dlq import Dead, Filter, Walk
from inference_worker.errors import StoreUnavailable

ANSWER_S: Final = 60.0
MOST_AT_ONCE: Final = 1000
"""Letters of one question; a gateway answers no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What became of one letter."""

    request_id: str | None
    outcome: str
    why: str
    mark: str


class RemoteDeadLetters:
    """One gateway. Every method raises `StoreUnavailable` where it is not reached, or refuses; the text says why."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client = client
        self._base = f"{url.rstrip('/').removesuffix('/v1/jobs')}/v1/dead-letters"

    async def listed(self, meant: Filter, limit: int | None) -> tuple[list[Dead], Walk]:
        """The first of them."""
        query: list[tuple[str, str]] = [("id", one) for one in sorted(meant.ids)]
        given = {name: getattr(meant, name) for name in ("reason", "tenant", "older_than_s", "newer_than_s")}
        query += [(name, str(value)) for name, value in given.items() if value is not None]
        query += [("completed", "true")] if meant.completed else []
        query += [("all", "true")] if meant.queue is None else []
        query.append(("limit", str(min(limit or MOST_AT_ONCE, MOST_AT_ONCE))))
        said = await self._ask("GET", "", params=query)
        names = Dead.__dataclass_fields__
        found = [Dead(**{name: one[name] for name in names if name in one}) for one in said["dead_letters"]]
        return found, _seen(said)

    async def show(self, request_id: str) -> Sequence[dict[str, Any]]:
        """All letters of a request, each with its headers and its body; none where there is none."""
        said = await self._ask("GET", f"/{quote(request_id, safe='')}", missing={"dead_letters": []})
        found: list[dict[str, Any]] = said["dead_letters"]
        return found

    async def do(
        self,
        what: str,
        meant: Filter,
        *,
        limit: int,
        dry_run: bool = False,
        marks: Sequence[str] | None = None,
        skip: Sequence[str] = (),
    ) -> tuple[list[Done], Walk]:
        """`replay` or `purge`."""
        body = {
            "ids": sorted(meant.ids),
            "reason": meant.reason,
            "tenant": meant.tenant,
            "older_than_s": meant.older_than_s,
            "newer_than_s": meant.newer_than_s,
            "completed": meant.completed,
            "all": meant.queue is None,
            "everything": True,  # The command has asked whether that is meant.
            "limit": min(limit, MOST_AT_ONCE),
            "dry_run": dry_run,
            "marks": None if marks is None else list(marks),
            "skip": list(skip),
        }
        said = await self._ask("POST", f"/{what}", json=body)
        return [Done(**one) for one in said["letters"]], _seen(said)

    async def _ask(self, method: str, path: str, *, missing: dict[str, Any] | None = None, **sent: Any) -> Any:
        try:
            answer = await self._client.request(method, f"{self._base}{path}", **sent)
        except httpx.HTTPError as exc:
            raise StoreUnavailable(f"{self._base} cannot be asked: {type(exc).__name__}: {exc}"[:300]) from exc
        if answer.status_code == 404 and missing is not None:
            return missing
        try:
            said = msgspec.json.decode(answer.content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise StoreUnavailable(f"HTTP {answer.status_code}, and no JSON: is this a gateway?") from exc
        if answer.status_code != 200:
            detail = said.get("detail") if isinstance(said, dict) else None
            key = " GATEWAY_API_KEY is what is sent." if answer.status_code in (401, 403) else ""
            raise StoreUnavailable(f"HTTP {answer.status_code}: {detail or answer.reason_phrase}{key}")
        return said


def _seen(said: dict[str, Any]) -> Walk:
    return Walk(**{name: said[name] for name in ("looked_at", "matched", "more", "store_silent")})


@asynccontextmanager
async def remote(
    url: str,
    api_key: str | None,
    verify: ssl.SSLContext | bool,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
) -> AsyncGenerator[RemoteDeadLetters, None]:
    """The dead letters of the gateway at `url`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(
        headers=headers, verify=verify, timeout=ANSWER_S, trust_env=False, transport=transport
    ) as client:
        yield RemoteDeadLetters(client, url)
