"""What a caller is told where something is refused: RFC 9457, and on OpenAI's paths a body of OpenAI's shape.

One exception with one `code` for both shapes; which one is written depends on the path alone. Who refuses what is not
decided here.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import msgspec
from fastapi import Response

OPENAI_PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models")
OUR_PATHS: Final = ("/v1/jobs", "/v1/scale", "/v1/dead-letters")
RETRY_AFTER_S: Final = 2
"""What is suggested where nothing is known: a neighbour that is away may be back soon."""


class Refusal(Exception):
    """An answer that is no success."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        because: str = "",
        problems: tuple[Mapping[str, str], ...] = (),
        retry_after_s: int | None = None,
        job_id: str | None = None,
        final: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        """For programs; the same in both shapes."""
        self.because = because
        """What a neighbour or a driver said, which may name addresses: for operators alone."""
        self.problems = problems
        """One for each field that is wrong: where, what is wrong, what is accepted."""
        self.job_id = job_id
        self.headers = dict(headers or {})
        if retry_after_s is None and status == 503:
            retry_after_s = RETRY_AFTER_S
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)
        if job_id is not None:
            self.headers["X-Job-Id"] = job_id
        if final:
            # OpenAI's clients send a request that failed once more by themselves. Here that would be a second job.
            self.headers["X-Should-Retry"] = "false"

    def text(self, *, operator: bool) -> str:
        """What it says to whom."""
        return f"{str(self).rstrip('.')}: {self.because.rstrip('.')}." if self.because and operator else str(self)


def is_openai(path: str) -> bool:
    """Whether a path is one of those that speak as OpenAI does."""
    return _below(path, OPENAI_PATHS)


def _below(path: str, those: tuple[str, ...]) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in those)


def _refused_as_openai(path: str) -> bool:
    """Also what OpenAI has under /v1 and we have not: its clients show the message of no other body."""
    return is_openai(path) or (path.startswith("/v1/") and not _below(path, OUR_PATHS))


def answer(path: str, refusal: Refusal, *, operator: bool = False) -> Response:
    """A refusal as this path tells it to an operator, or to somebody else."""
    if _refused_as_openai(path):
        return json_answer(openai_error(refusal, operator=operator), refusal.status, refusal.headers)
    body: dict[str, object] = {
        "type": "about:blank",
        "title": HTTPStatus(refusal.status).phrase,
        "status": refusal.status,
        "detail": refusal.text(operator=operator),
        "code": refusal.code,
    }
    if refusal.job_id is not None:
        body["job_id"] = refusal.job_id
    if refusal.problems:
        body["errors"] = refusal.problems
    return json_answer(body, refusal.status, refusal.headers, media_type="application/problem+json")


def openai_error(refusal: Refusal, *, operator: bool = False) -> dict[str, object]:
    """A refusal as OpenAI writes it."""
    match refusal.status:
        case 401:
            kind = "authentication_error"
        case 403:
            kind = "permission_error"
        case 429:
            kind = "rate_limit_error"
        case 504:
            kind = "timeout_error"
        case status if status >= 500:
            kind = "server_error"
        case _:
            kind = "invalid_request_error"
    text = refusal.text(operator=operator)
    error: dict[str, object] = {"message": text, "type": kind, "param": None, "code": refusal.code}
    if refusal.job_id is not None:
        error["job_id"] = refusal.job_id
    return {"error": error}


def json_answer(
    body: object,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    *,
    media_type: str = "application/json",
) -> Response:
    """An answer in JSON; raw parts of `body` stay the bytes that they are."""
    return Response(msgspec.json.encode(body), status, {"Cache-Control": "no-store", **(headers or {})}, media_type)
