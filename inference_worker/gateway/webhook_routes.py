"""What a caller sees of the webhook of a job: its log, and `replay`. Who is asking, and errors, are the gateway's."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response

from inference_worker.gateway.problems import Refusal, json_answer
from inference_worker.job_book import HookBook, HookLog
from inference_worker.messages import usable_id

TenantOf = Callable[[Request], Awaitable[str]]
"""Whose request it is. Raises `Refusal` where that is not known."""

_LOG_EXAMPLE = {
    "job_id": "01JQ8Z6V4M",
    "url": "https://example.com/hooks",
    "state": "waiting",
    "tries": [{"at": 1764446400.25, "status_code": 503, "detail": ""}],
    "next_try_at": 1764446700.0,
}
_PROBLEM = {"content": {"application/problem+json": {"schema": {"type": "object"}}}}
_LOG = {
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["job_id", "url", "state", "tries", "next_try_at"],
                "properties": {
                    "job_id": {"type": "string"},
                    "url": {"type": "string"},
                    "state": {"type": "string", "enum": ["waiting", "delivered", "failed", "disabled"]},
                    "tries": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["at", "status_code", "detail"],
                            "properties": {
                                "at": {"type": "number"},
                                "status_code": {"type": ["integer", "null"]},
                                "detail": {"type": "string"},
                            },
                        },
                    },
                    "next_try_at": {"type": ["number", "null"]},
                },
            },
            "example": _LOG_EXAMPLE,
        }
    }
}


def routes(web: FastAPI, book: HookBook, tenant_of: TenantOf, hint: Callable[[str], None]) -> None:
    """Mount both. A webhook of another tenant is exactly one that does not exist. `hint` wakes the sender.

    `StoreUnavailable` passes through, for the gateway's own handler.
    """

    async def mine(request: Request, job_id: str) -> HookLog:
        tenant = await tenant_of(request)
        log = await book.log_of(job_id) if usable_id(job_id) else None
        if log is None or log.tenant != tenant:
            raise Refusal(404, "no_such_webhook", "There is no such job, or it has no webhook.")
        return log

    @web.get(
        "/v1/jobs/{job_id}/webhook",
        responses={
            200: {"description": "The webhook and its last 20 tries, oldest first", **_LOG},
            404: {"description": "No such job, or it has no webhook", **_PROBLEM},
        },
    )
    async def webhook_log(job_id: str, request: Request) -> Response:
        """What became of a job's webhook."""
        return json_answer(_view(job_id, await mine(request, job_id)))

    @web.post(
        "/v1/jobs/{job_id}/webhook/replay",
        status_code=202,
        responses={
            202: {"description": "It will be sent again, at once, with all its tries before it", **_LOG},
            404: {"description": "No such job, or it has no webhook", **_PROBLEM},
            409: {"description": "The job has not ended, or its result is not kept any more", **_PROBLEM},
        },
    )
    async def replay_webhook(job_id: str, request: Request) -> Response:
        """Send a job's webhook again, whatever became of it, under the same id."""
        await mine(request, job_id)
        if not await book.replay(job_id):
            detail = "There is nothing to send: the job has not ended (or only seconds ago), or its result is gone."
            raise Refusal(409, "nothing_to_send", detail)
        hint(job_id)
        return json_answer(_view(job_id, await mine(request, job_id)), 202)


def _view(job_id: str, log: HookLog) -> dict[str, object]:
    return {
        "job_id": job_id,
        "url": log.url,
        "state": log.state,
        "tries": [{"at": tried.at, "status_code": tried.status_code, "detail": tried.detail} for tried in log.tries],
        "next_try_at": log.next_try_at,
    }
