"""Who may use the intake: a file of hashed API keys, each with its tenant, read again when it changes.

The file has no key in it, only digests: whoever reads it can ask for nothing. Without a file nobody is asked who he is.
"""

import asyncio
import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import structlog

from inference_worker.config.values import open_regular
from inference_worker.errors import ConfigurationError

log = structlog.get_logger(__name__)

VARIABLE: Final = "GATEWAY_API_KEYS_FILE"
MOST_BYTES: Final = 8 * 1024 * 1024
LOOK_S: Final = 1.0
"""How often it is looked whether the file has changed."""

KEY_PREFIX: Final = "iwk_"
_DIGEST: Final = re.compile("[0-9a-f]{64}")
_TENANT: Final = re.compile("[^\x00-\x1f\x7f-\x9f]{1,512}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks."""

    tenant: str
    """Empty where nobody is asked who he is."""
    operator: bool


ANYBODY: Final = Caller(tenant="", operator=True)
"""Who asks where there are no keys: somebody on this machine."""


class _Key(msgspec.Struct, forbid_unknown_fields=True):
    tenant: str
    sha256: str
    operator: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[_Key]
    webhook_secrets: dict[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    callers: Mapping[str, Caller]
    """By the key's digest."""
    webhook_secrets: Mapping[str, str] = field(repr=False)


def no_check(_: str) -> str | None:
    """Takes any webhook secret."""
    return None


class KeyFile:
    """The keys of a file. A file that has gone bad keeps the last good state, with a warning for each change."""

    def __init__(self, path: str, check_secret: Callable[[str], str | None] = no_check) -> None:
        """Read the file; `check_secret` says what is wrong with a tenant's webhook secret.

        Raises:
            ConfigurationError: with what is wrong and where, and never what was there.
        """
        self._path = path
        self._check_secret = check_secret
        self._looked_at = 0.0
        self._unopened = ""
        """Why the file could not be opened the last time, if so: no permission, no descriptor left, half swapped."""
        self._seen = self._stamp()
        try:
            self._known = self._read()
        except (OSError, ValueError) as exc:
            raise ConfigurationError((f"{VARIABLE}: {path!r}: {_reason(exc)}; accepted: {ACCEPTED}",)) from exc

    def caller(self, key: str) -> Caller | None:
        """Whose key it is. It is looked up by its digest, so that the time to look tells nothing of it."""
        self._look_again()
        return self._known.callers.get(digest(key))

    def webhook_secret(self, tenant: str) -> str | None:
        """What a tenant's webhooks are signed with, where the file says so."""
        self._look_again()
        return self._known.webhook_secrets.get(tenant)

    @property
    def has_webhook_secrets(self) -> bool:
        """Whether some tenant's webhooks can be signed."""
        return bool(self._known.webhook_secrets)

    def _look_again(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        stamp = self._stamp()
        # What could not be opened is tried again: nothing of the file itself need change for that to succeed.
        if stamp == self._seen and not self._unopened:
            return
        changed, self._seen = stamp != self._seen, stamp
        try:
            self._known, self._unopened = self._read(), ""
        except (OSError, ValueError) as exc:
            before, self._unopened = self._unopened, _reason(exc) if isinstance(exc, OSError) else ""
            if changed or self._unopened != before:
                log.warning("the API keys cannot be read again; those from before hold", reason=_reason(exc))
        else:
            log.info("the API keys were read again", keys=len(self._known.callers))

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            seen = Path(self._path).stat()
        except OSError:
            return None
        return seen.st_mtime_ns, seen.st_size, seen.st_ino

    def _read(self) -> _Known:
        with open_regular(self._path) as opened:
            raw = opened.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise ValueError(f"is larger than {MOST_BYTES} bytes")
        try:
            file = msgspec.json.decode(raw, type=_File)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
            # No cause and no names: a key may have been written where a name belongs.
            raise ValueError(
                f"cannot be read: {re.sub('unknown field `.*?`', 'a field that is not known', str(exc))}"
            ) from None
        callers: dict[str, Caller] = {}
        for number, key in enumerate(file.keys):
            where = f"keys[{number}]"
            if not _DIGEST.fullmatch(key.sha256.lower()):
                raise ValueError(f"{where}.sha256 is no SHA-256 in hexadecimal")
            if not _TENANT.fullmatch(key.tenant):
                raise ValueError(f"{where}.tenant is not 1 to 512 characters without control characters")
            if key.sha256.lower() in callers:
                raise ValueError(f"{where}.sha256 is there twice")
            callers[key.sha256.lower()] = Caller(tenant=key.tenant, operator=key.operator)
        for tenant, secret in file.webhook_secrets.items():
            if (wrong := self._check_secret(secret)) is not None:
                raise ValueError(f"webhook_secrets[{tenant!r}] {wrong}")
        if not callers:
            log.warning("the file of API keys has none: nobody can come in", file=self._path)
        return _Known(callers=callers, webhook_secrets=file.webhook_secrets)


ACCEPTED: Final = '{"keys": [{"tenant": "…", "sha256": "…", "operator": false}], "webhook_secrets": {"…": "whsec_…"}}'


def digest(key: str) -> str:
    """What stands in the file for a key. A key is 256 random bits, so that a plain digest is enough."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def new_key(tenant: str, *, operator: bool) -> tuple[str, str]:
    """A fresh key, and its line for the file.

    Raises:
        ConfigurationError: that can be no tenant.
    """
    if not _TENANT.fullmatch(tenant):
        raise ConfigurationError(("--new-key: a tenant is 1 to 512 characters without control characters",))
    key = f"{KEY_PREFIX}{secrets.token_urlsafe(32)}"
    line = msgspec.json.encode(_Key(tenant=tenant, sha256=digest(key), operator=operator))
    return key, line.decode()


def given_key(headers: Mapping[str, str]) -> str | None:
    """The key that a request brings: `Authorization: Bearer`, or `X-API-Key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key") or None


def _reason(exc: Exception) -> str:
    return exc.strerror or type(exc).__name__ if isinstance(exc, OSError) else str(exc)
