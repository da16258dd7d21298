"""Asks the model how it is: at every interval, and at once when somebody wants to know. It stops and resumes nothing.

Suspending is the listener's part; it watches the `Health` that is written here.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Final

import httpx
import msgspec
import structlog

from inference_worker.ports import Health
from inference_worker.timing import ended, first_of

log = structlog.get_logger(__name__)

LONGEST_LOOK_S: Final = 5.0
"""A busy model answers late: it is given this long, or the interval where that is shorter."""

LONGEST_LIST_BYTES: Final = 1024 * 1024


class HealthChecker:
    """The one writer of the model's `Health`. Starts unhealthy."""

    def __init__(
        self,
        health: Health,
        *,
        base_url: Callable[[], str],
        health_path: str,
        hf_model_id: str,
        api_key: Callable[[], str | None],
        now: Callable[[], float],
        interval_s: float,
        failure_threshold: int,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._health = health
        self._base_url = base_url
        self._health_path = health_path
        self._hf_model_id = hf_model_id
        self._api_key = api_key
        self._now = now
        self._interval_s = interval_s
        self._failure_threshold = failure_threshold
        self._look_s = min(interval_s, LONGEST_LOOK_S)
        self._verify = verify
        self._transport = transport
        self._timeouts_in_a_row = 0
        self._last_said: bool | None = None
        self._last_served: frozenset[str] | None = None

    async def run(self, until: asyncio.Event) -> None:
        """Look until told to stop; a look that is under way then is broken off."""
        async with self._client() as client:
            looking = asyncio.create_task(self._look_for_ever(client))
            try:
                await first_of(until)
            finally:
                await ended(looking)

    async def _look_for_ever(self, client: httpx.AsyncClient) -> None:
        loop = asyncio.get_running_loop()
        while True:
            next_look = loop.time() + self._interval_s
            try:
                await self._look(client)
            except Exception:  # A watcher's, too: a checker that died would leave the last verdict for ever.
                log.exception("the look at the model's health failed")
            await first_of(self._health.wanted, within_s=max(next_look - loop.time(), 0.0))

    async def _look(self, client: httpx.AsyncClient) -> None:
        self._health.wanted.clear()
        ok, reason = await self._verdict(client)
        if ok and self._health.wanted.is_set():
            # Somebody lost a connection meanwhile, and this answer may be older than that.
            self._health.wanted.clear()
            ok, reason = await self._verdict(client)
        if ok and not self._health.ok:
            await self._identify(client)
        if ok != self._last_said:
            self._last_said = ok
            if ok:
                log.info("the model is healthy")
            else:
                log.warning("the model is not healthy", reason=reason)
        self._health.report(ok, reason, checked_at=self._now())

    async def _verdict(self, client: httpx.AsyncClient) -> tuple[bool, str]:
        """Whether the model is fit, and why not. Busy is not dead: time-outs count in a row, anything else at once."""
        try:
            async with asyncio.timeout(self._look_s):
                status_code = await self._status_code(client)
        except (TimeoutError, httpx.TimeoutException):
            self._timeouts_in_a_row += 1
            reason = f"no answer within {self._look_s:g} s, {self._timeouts_in_a_row} in a row"
            return self._health.ok and self._timeouts_in_a_row < self._failure_threshold, reason
        except Exception as exc:  # noqa: BLE001 - refused, reset, no such host, broken TLS, unreadable key: not healthy
            self._timeouts_in_a_row = 0
            return False, f"{type(exc).__name__}: {exc}"
        self._timeouts_in_a_row = 0
        if 200 <= status_code < 300:
            return True, ""
        return False, f"HTTP {status_code}"

    async def _status_code(self, client: httpx.AsyncClient) -> int:
        """The status alone: a body may be empty, or never end."""
        async with client.stream("GET", self._base_url() + self._health_path, headers=self._headers()) as response:
            return response.status_code

    async def _identify(self, client: httpx.AsyncClient) -> None:
        """Ask the model who it is, and warn where that is not who we report and bill it as. Never fails."""
        try:
            async with asyncio.timeout(LONGEST_LOOK_S):
                served = await self._served(client)
        except Exception as exc:  # noqa: BLE001 - a courtesy: a server without /v1/models serves as well
            log.info("the model does not say who it is", reason=f"{type(exc).__name__}: {exc}")
            return
        if self._hf_model_id not in served and served != self._last_served:
            log.warning(
                "the model serves something else than HF_MODEL_ID",
                expected=self._hf_model_id,
                served=sorted(served)[:10],
            )
        self._last_served = served

    async def _served(self, client: httpx.AsyncClient) -> frozenset[str]:
        async with client.stream("GET", f"{self._base_url()}/v1/models", headers=self._headers()) as response:
            if not response.is_success:
                raise ValueError(f"HTTP {response.status_code}")
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > LONGEST_LIST_BYTES:
                    raise ValueError(f"the list of models is longer than {LONGEST_LIST_BYTES} bytes")
        models = msgspec.json.decode(bytes(body), type=_Models).data
        return frozenset(name for model in models for name in (model.id, model.root) if name)

    def _headers(self) -> dict[str, str]:
        key = self._api_key()
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers={"Accept-Encoding": "identity"},
            # A fresh connection for each look: one that the server closed meanwhile would read as a dead model.
            limits=httpx.Limits(max_keepalive_connections=0),
            timeout=None,  # One limit for the whole look instead.
            trust_env=False,
            verify=self._verify,
            transport=self._transport,
        )


class _Model(msgspec.Struct):
    id: str | None = None
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]
