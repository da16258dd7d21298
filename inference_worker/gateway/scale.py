"""The scale signal over HTTP: `GET /v1/scale`, `GET /v1/scale/{queue}`, in a shape that KEDA's `metrics-api` reads.

What is answered was seen before: no request waits for a broker. Who may ask is decided by who mounts this; what is
wanted, by `scaling`. What cannot be seen is a 503, never a 0: a 0 would take replicas away that are at work.
"""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request, Response

from inference_worker.gateway.problems import Refusal, json_answer
from inference_worker.scaler import NotSeen, ScaleView, shown

RETRY_AFTER_S: Final = 5

Permit = Callable[[Request], None]
"""Raises a Refusal for who may not see the signal."""


def mount(web: FastAPI, views: Mapping[str, ScaleView], permit: Permit) -> None:
    """Put the two paths on an application, which knows how to answer a `Refusal`."""

    @web.get("/v1/scale", tags=["scale"], responses=_responses(_ALL, 401, 403, 503))
    async def all_queues(request: Request) -> Response:
        """How many replicas every queue wants, by the queue's name."""
        permit(request)
        return json_answer({"queues": {name: _shown(view) for name, view in views.items()}})

    # A name may have any character in it: also a slash, which comes decoded.
    @web.get("/v1/scale/{queue:path}", tags=["scale"], responses=_responses(EXAMPLE, 401, 403, 404, 503))
    async def one_queue(queue: str, request: Request) -> Response:
        """How many replicas one queue wants. Numbers at every path, also for KEDA's `valueLocation`."""
        permit(request)
        view = views.get(queue)
        if view is None:
            raise Refusal(404, "no_such_queue", "There is no queue of this name here; GET /v1/scale has them all.")
        return json_answer(_shown(view))


def _shown(view: ScaleView) -> dict[str, object]:
    try:
        return shown(view)
    except NotSeen as exc:
        detail = f"The queue cannot be seen, so that nothing can be said of it: {exc}."
        raise Refusal(503, "queue_not_seen", detail, retry_after_s=RETRY_AFTER_S) from exc


EXAMPLE: Final[Mapping[str, object]] = {
    "queue": "inference:jobs",
    "observed_at": "2026-11-29T15:54:35.120Z",
    "age_seconds": 0.8,
    "active": 1,
    "desired_replicas": 5,
    "load": 139,
    "target_per_replica": 32,
    "backlog": {"ready": 120, "in_flight": 16, "delayed": 3, "oldest_seconds": 12.4, "due_within_60s": 40},
    "capacity": {"replicas_ready": 2, "slots_per_replica": 32, "completions_per_second": 3.6},
    "recommendations": {"by_load": 5, "by_wait": 4, "by_deadline": 5, "raw": 5, "stabilised": 5},
    "limits": {"min": 0, "max": 10},
    "reason": "by_load",
    "how": "stream",
    "not_known": [],
}
_ALL: Final[Mapping[str, object]] = {"queues": {"inference:jobs": EXAMPLE}}


def _responses(example: Mapping[str, object], *refusals: int) -> dict[int | str, dict[str, Any]]:
    told = {"description": "The signal.", "content": {"application/json": {"example": example}}}
    refused: dict[int | str, dict[str, Any]] = {
        status: {"description": HTTPStatus(status).phrase, "content": {"application/problem+json": {}}}
        for status in refusals
    }
    return {HTTPStatus.OK.value: told, **refused}
