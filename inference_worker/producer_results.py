"""A result as it lies in a result list, read. Pure."""

import json
from dataclasses import dataclass
from typing import Any

from inference_worker import llmd_results
from inference_worker.errors import UnreadableResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a submission has ended.

    `status_code` is set where the model's gateway answered, well or badly; otherwise `error_code` says what happened.
    """

    id: str
    token: str | None
    """Of the submission; None where an old version wrote the result."""
    status_code: int | None
    payload: bytes
    """The body of the answer; without one, a small JSON object with an `error`."""
    error_code: str | None
    error_message: str | None
    raw: bytes
    """As it came, with fields of other versions."""

    @property
    def ok(self) -> bool:
        """The gateway answered with a 2xx."""
        return self.status_code is not None and 200 <= self.status_code < 300

    def json(self) -> Any:  # JSON is what it is.
        """The body, decoded."""
        return json.loads(self.payload)


def read_result(raw: bytes) -> Result:
    """Read a result.

    Raises:
        UnreadableResult: it is no JSON, has no id, or a field that is something else.
    """
    try:
        seen = llmd_results.read_result(raw)
    except ValueError as exc:
        raise UnreadableResult(str(exc), raw) from exc
    return Result(
        id=seen.id,
        token=seen.request_token or None,
        status_code=seen.status_code or None,
        payload=seen.payload.encode(),
        error_code=seen.error_code or None,
        error_message=seen.error_message or None,
        raw=raw,
    )
