"""Standard Webhooks 1.0: what is sent of a job that has ended, and how it is signed. Pure.

Source: https://github.com/standard-webhooks/standard-webhooks, spec/standard-webhooks.md.
"""

import base64
import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec

from inference_worker.config.values import read_secrets

MOST_BODY_BYTES: Final = 1_000_000
"""Web servers commonly refuse more than a megabyte, and each body is kept for a day where its receiver is away."""


def secret_problem(text: str) -> str | None:
    """What is wrong with webhook secrets, without a word of them; None where nothing is."""
    try:
        read_secrets(text)
    except ValueError as exc:
        return str(exc)
    return None


def webhook_id(job_id: str) -> str:
    """The id of a job's webhook: the same for every try, so that its receiver can drop what it has."""
    return f"msg_{job_id}"


def signed_headers(job_id: str, body: bytes, keys: tuple[bytes, ...], *, now: float) -> dict[str, str]:
    """The three headers of the standard, with one signature for each key."""
    said, at = webhook_id(job_id), str(int(now))
    content = f"{said}.{at}.".encode() + body
    signatures = (base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode() for key in keys)
    return {
        "webhook-id": said,
        "webhook-timestamp": at,
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


def webhook_body(view: Mapping[str, object], *, now: float) -> bytes:
    """The body of an ended job's webhook; the same for the same view, where that says when the job ended.

    Where it would be too large, the largest parts of the view stay out, and `omitted` names them.
    """
    data, omitted = dict(view), []
    body = _body(data, now)
    for name in ("result", "metadata", "error"):
        if len(body) > MOST_BODY_BYTES and name in data:
            del data[name]
            omitted.append(name)
            body = _body({**data, "omitted": omitted}, now)
    return body


def _body(data: Mapping[str, object], now: float) -> bytes:
    return msgspec.json.encode(
        {"type": f"job.{_plain(data.get('status'))}", "timestamp": rfc3339(_ended_at(data, now)), "data": data}
    )


def _ended_at(data: Mapping[str, object], now: float) -> float:
    value = _plain(data.get("finished_at"))
    return float(value) if isinstance(value, int | float) else now


def _plain(value: object) -> object:
    """A value of the view, some of which are slices of the stored result."""
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value


def rfc3339(at: float) -> str:
    """Unix seconds as RFC 3339 writes them."""
    try:
        moment = datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError, OSError):
        moment = datetime.fromtimestamp(0, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
