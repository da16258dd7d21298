"""The OpenAPI document: what is asked and answered, with examples. Words and shapes only; nothing here is executed.

The routes are described here and not by the framework's own means: bodies and answers are bytes that pass through.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from inference_worker.gateway.job_requests import (
    DEFAULT_PAGE,
    DEFAULT_TIMEOUT_S,
    LARGEST_PAGE,
    LONGEST_KEY,
    LONGEST_WAIT_S,
)
from inference_worker.gateway.views import STATES
from inference_worker.messages import ENDPOINTS
from inference_worker.metrics import version

Schema = dict[str, Any]
JSON: Final = "application/json"
PROBLEM_JSON: Final = "application/problem+json"

CHAT_EXAMPLE: Final[Schema] = {"model": "my-model", "messages": [{"role": "user", "content": "Hello"}]}
_JOB_ID: Final = "5f2b8c0e9a4d4c1f8b7e6a5d"

# ---------------------------------------------------------------- schemas

PROBLEM: Final[Schema] = {
    "type": "object",
    "description": "An error as RFC 9457 writes it.",
    "required": ["type", "title", "status", "detail", "code"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "For people: what is wrong, and what helps."},
        "code": {"type": "string", "description": "For programs; the same as in OpenAI's shape."},
        "job_id": {"type": "string"},
        "errors": {
            "type": "array",
            "description": "Every field that is wrong.",
            "items": {
                "type": "object",
                "required": ["pointer", "detail", "accepted"],
                "properties": {
                    "pointer": {"type": "string"},
                    "detail": {"type": "string"},
                    "accepted": {"type": "string"},
                },
            },
        },
    },
}
OPENAI_ERROR: Final[Schema] = {
    "type": "object",
    "description": "An error as OpenAI writes it.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "job_id": {"type": "string"},
            },
        }
    },
}
_TIMES: Final[Schema] = {
    "created_at": {"type": "number", "description": "Unix seconds."},
    "expires_at": {"type": "number", "description": "The deadline, Unix seconds."},
}
ACCEPTED: Final[Schema] = {
    "type": "object",
    "required": ["job_id", "status", "created_at", "expires_at", "position", "estimated_wait_s", "links"],
    "properties": {
        "job_id": {"type": "string"},
        "status": {"type": "string", "enum": list(STATES)},
        **_TIMES,
        "position": {"type": ["integer", "null"], "description": "In the queue, 1 for the next; null where not known."},
        "estimated_wait_s": {
            "type": ["number", "null"],
            "description": "Until it runs, at the workers' pace of late; null where not known.",
        },
        "links": {
            "type": "object",
            "required": ["self", "wait"],
            "properties": {"self": {"type": "string"}, "wait": {"type": "string"}, "webhook": {"type": "string"}},
        },
    },
}
JOB: Final[Schema] = {
    "type": "object",
    "required": ["job_id", "status"],
    "properties": {
        "job_id": {"type": "string"},
        "status": {"type": "string", "enum": list(STATES)},
        "status_code": {"type": "integer", "description": "Of the model, or of who ended the job. Once it has ended."},
        "result": {"description": "The model's answer as it came. Where the job has succeeded."},
        "error": {"type": "string"},
        "error_code": {"type": "string"},
        "attempt": {"type": "integer", "description": "0 for the first."},
        "replica_id": {"type": "string"},
        "received_at": {"type": "number"},
        "finished_at": {"type": "number"},
        "timings": {"type": "object", "additionalProperties": {"type": "number"}},
        **_TIMES,
        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
        "webhook": {
            "type": "object",
            "required": ["url", "log"],
            "properties": {"url": {"type": "string"}, "log": {"type": "string"}},
        },
    },
}
LISTED: Final[Schema] = {
    "type": "object",
    "required": ["jobs", "after"],
    "properties": {
        "jobs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["job_id", "status", "created_at", "expires_at", "endpoint", "metadata"],
                "properties": {
                    "job_id": {"type": "string"},
                    "status": {"type": "string", "enum": list(STATES)},
                    **_TIMES,
                    "endpoint": {"type": "string"},
                    "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
                },
            },
        },
        "after": {"type": ["string", "null"], "description": "The cursor of the next page; null at the end."},
    },
}
MODEL_SCHEMA: Final[Schema] = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
    },
}
SCHEMAS: Final[Mapping[str, Schema]] = {
    "Problem": PROBLEM,
    "OpenAIError": OPENAI_ERROR,
    "Accepted": ACCEPTED,
    "Job": JOB,
    "Jobs": LISTED,
    "Model": MODEL_SCHEMA,
}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


# ---------------------------------------------------------------- examples

_ACCEPTED_EXAMPLE: Final[Schema] = {
    "job_id": _JOB_ID,
    "status": "queued",
    "created_at": 1795968000.25,
    "expires_at": 1795968060.25,
    "position": 3,
    "estimated_wait_s": 0.8,
    "links": {"self": f"/v1/jobs/{_JOB_ID}", "wait": f"/v1/jobs/{_JOB_ID}?wait=60"},
}
_JOB_EXAMPLE: Final[Schema] = {
    "job_id": _JOB_ID,
    "status": "succeeded",
    "status_code": 200,
    "result": {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello!"}}]},
    "attempt": 0,
    "replica_id": "worker-1",
    "received_at": 1795968000.25,
    "finished_at": 1795968001.5,
    "timings": {"queue_s": 0.3, "model_s": 0.9},
    "created_at": 1795968000.25,
    "expires_at": 1795968060.25,
}
_CANCELLED_EXAMPLE: Final[Schema] = {
    "job_id": _JOB_ID,
    "status": "cancelled",
    "status_code": 499,
    "error": "cancelled by the caller",
    "error_code": "cancelled",
    "created_at": 1795968000.25,
    "expires_at": 1795968060.25,
}
_LISTED_EXAMPLE: Final[Schema] = {
    "jobs": [
        {
            "job_id": _JOB_ID,
            "status": "running",
            "created_at": 1795968000.25,
            "expires_at": 1795968060.25,
            "endpoint": "/v1/chat/completions",
            "metadata": {"team": "search"},
        }
    ],
    "after": None,
}

_MEANS: Final[Mapping[int, str]] = {
    400: "The body is no JSON object.",
    401: "There is no API key, or one that is not known.",
    403: "The key is not that of an operator.",
    404: "There is no such job of this caller.",
    405: "This path has no such method; `Allow` has those it has.",
    408: "The body did not arrive in time.",
    409: "The job has ended otherwise.",
    410: "The job is over, and its result is not kept any more.",
    413: "The body is too large.",
    415: "The body does not say that it is JSON.",
    422: "Something in the request is wrong; `errors` names every field.",
    429: "As many requests wait as may. `Retry-After` is when fewer should.",
    503: "The queue or the result store cannot be reached. `Retry-After` is a guess.",
}
_HEADERS: Final[Mapping[int, Mapping[str, Schema]]] = {
    status: {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
    for status in (429, 503)
} | {401: {"WWW-Authenticate": {"description": "How to authenticate.", "schema": {"type": "string"}}}}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Errors of RFC 9457, as responses."""
    return {status: _error(status, PROBLEM_JSON, "Problem", _problem_example(status)) for status in sorted(statuses)}


def openai_errors(means: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """Errors of OpenAI's shape, as responses."""
    example = {"error": {"message": "…", "type": "invalid_request_error", "param": None, "code": "invalid_request"}}
    found: dict[int | str, dict[str, Any]] = {
        status: {**_error(status, JSON, "OpenAIError", example), "description": text} for status, text in means.items()
    }
    return found


def _error(status: int, media_type: str, schema: str, example: Schema) -> dict[str, Any]:
    told: dict[str, Any] = {
        "description": _MEANS.get(status, ""),
        "content": {media_type: {"schema": _ref(schema), "example": example}},
    }
    if status in _HEADERS:
        told["headers"] = _HEADERS[status]
    return told


def _problem_example(status: int) -> Schema:
    title = HTTPStatus(status).phrase
    return {
        "type": "about:blank",
        "title": title,
        "status": status,
        "detail": _MEANS[status],
        "code": title.lower().replace(" ", "_"),
    }


def _told(description: str, schema: Schema, example: object, headers: Mapping[str, Schema] | None = None) -> Schema:
    told: Schema = {"description": description, "content": {JSON: {"schema": schema, "example": example}}}
    return told | ({"headers": headers} if headers else {})


# ---------------------------------------------------------------- jobs

_TEXT_HEADER: Final[Schema] = {"schema": {"type": "string"}}
_KEY_HEADER: Final[Schema] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same key means the same job, for as long as that is known. Quoted or bare.",
    "schema": {"type": "string", "minLength": 1, "maxLength": LONGEST_KEY},
    "example": "order-7-attempt-1",
}
_JOB_BODY: Final[Schema] = {
    "type": "object",
    "required": ["payload"],
    "additionalProperties": False,
    "properties": {
        "payload": {"type": "object", "description": "The OpenAI request, passed on as the bytes that came."},
        "timeout_s": {
            "type": "number",
            "exclusiveMinimum": 0,
            "default": DEFAULT_TIMEOUT_S,
            "description": "From now on; afterwards it expires. 30 days at most.",
        },
        "endpoint": {"type": "string", "enum": list(ENDPOINTS)},
        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
        "idempotency_key": {
            "type": "string",
            "minLength": 1,
            "maxLength": LONGEST_KEY,
            "pattern": "^[^\\x00-\\x1f\\x7f-\\x9f]*$",
        },
        "webhook": {
            "type": "object",
            "required": ["url"],
            "additionalProperties": False,
            "properties": {
                "url": {"type": "string", "description": "Is sent the ended job, signed: Standard Webhooks."}
            },
        },
    },
}


def submit(*, webhooks: bool) -> Schema:
    """`POST /v1/jobs`."""
    body = _JOB_BODY
    if not webhooks:
        body = {**body, "properties": {name: of for name, of in body["properties"].items() if name != "webhook"}}
    example = {"payload": CHAT_EXAMPLE, "timeout_s": 60, "metadata": {"team": "search"}}
    return {
        "status_code": 202,
        "responses": {
            202: _told(
                "The queue has the job.",
                _ref("Accepted"),
                _ACCEPTED_EXAMPLE,
                {
                    "Location": {"description": "Where to ask for the job.", **_TEXT_HEADER},
                    "Idempotency-Replayed": {
                        "description": "`true` where the key stood for this job already.",
                        "schema": {"type": "string", "const": "true"},
                    },
                },
            )
        }
        | problems(400, 401, 408, 413, 415, 422, 429, 503),
        "openapi_extra": {
            "requestBody": {"required": True, "content": {JSON: {"schema": body, "example": example}}},
            "parameters": [_KEY_HEADER],
        },
    }


LIST: Final[Schema] = {
    "responses": {200: _told("A page of jobs, newest first.", _ref("Jobs"), _LISTED_EXAMPLE)} | problems(401, 422, 503),
    "openapi_extra": {
        "parameters": [
            {
                "name": "limit",
                "in": "query",
                "description": "Most jobs on the page.",
                "schema": {"type": "integer", "minimum": 1, "maximum": LARGEST_PAGE, "default": DEFAULT_PAGE},
            },
            {
                "name": "after",
                "in": "query",
                "description": "The cursor that the page before gave.",
                "schema": {"type": "string", "pattern": "^[0-9]{1,10}\\.[0-9]{1,6}~[a-f0-9]{1,24}$"},
            },
        ]
    },
}
LOOK: Final[Schema] = {
    "responses": {200: _told("The job.", _ref("Job"), _JOB_EXAMPLE)} | problems(401, 404, 410, 422, 503),
    "openapi_extra": {
        "parameters": [
            {
                "name": "wait",
                "in": "query",
                "description": f"Seconds to wait for the end of the job, cut to {LONGEST_WAIT_S:g}.",
                "schema": {"type": "number", "minimum": 0, "default": 0},
            }
        ]
    },
}
CANCEL: Final[Schema] = {
    "responses": {200: _told("The job, cancelled.", _ref("Job"), _CANCELLED_EXAMPLE)}
    | problems(401, 404, 409, 410, 503),
}

# ---------------------------------------------------------------- OpenAI

_PREFER: Final[Schema] = {
    "name": "Prefer",
    "in": "header",
    "required": False,
    "description": "`respond-async`: the job at once (202). `wait=N`: wait so many seconds at most.",
    "schema": {"type": "string"},
    "example": "respond-async, wait=1",
}
_ANSWER_HEADERS: Final[Mapping[str, Schema]] = {
    "X-Job-Id": {"description": "The job behind it: `GET /v1/jobs/{job_id}`.", **_TEXT_HEADER}
}
_COMPLETION_ERRORS: Final[Mapping[int | str, str]] = {
    400: "The body is no JSON object, or the model says that the request is wrong.",
    401: _MEANS[401],
    404: "The model says that there is no such thing, for example no such model.",
    408: _MEANS[408],
    409: "The job was cancelled.",
    413: _MEANS[413],
    415: _MEANS[415],
    422: "The idempotency key stands for another body, or the model says that the request is wrong.",
    429: _MEANS[429],
    500: "The model failed, as often as it was tried.",
    502: "The model's answer cannot be used.",
    503: _MEANS[503],
    504: "The job has not ended in time; the message names it, and it stays. Or its own time was over.",
}


def _completion(model_answer: str, payload: Schema, example: Schema, *, streams: bool) -> Schema:
    content: dict[str, Any] = {JSON: {"schema": {}, "example": {"object": model_answer}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}, "example": "data: [DONE]\n\n"}
    ok: Schema = {"description": "The model's answer, as it came.", "content": content, "headers": _ANSWER_HEADERS}
    later = _told("With `Prefer: respond-async`: the job.", _ref("Accepted"), _ACCEPTED_EXAMPLE)
    later["headers"] = {**_ANSWER_HEADERS, "Location": {"description": "Where to ask for the job.", **_TEXT_HEADER}}
    return {
        "responses": {200: ok, 202: later}
        | openai_errors({int(status): text for status, text in _COMPLETION_ERRORS.items()}),
        "openapi_extra": {
            "requestBody": {"required": True, "content": {JSON: {"schema": payload, "example": example}}},
            "parameters": [_KEY_HEADER, _PREFER],
        },
    }


def _payload(required: str, properties: Schema) -> Schema:
    return {"type": "object", "required": [required], "properties": {"model": {"type": "string"}, **properties}}


_MESSAGES: Final[Schema] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"type": "string"}, "content": {"type": "string"}},
    },
    "description": "What a model takes is for the model to say; nothing of it is looked at here.",
}
COMPLETIONS: Final[Mapping[str, Schema]] = {
    "/v1/chat/completions": _completion(
        "chat.completion", _payload("messages", {"messages": _MESSAGES}), CHAT_EXAMPLE, streams=True
    ),
    "/v1/completions": _completion(
        "text_completion",
        _payload("prompt", {"prompt": {"type": "string"}}),
        {"model": "my-model", "prompt": "Once upon a time"},
        streams=True,
    ),
    "/v1/embeddings": _completion(
        "list",
        _payload("input", {"input": {"type": "string"}}),
        {"model": "my-model", "input": "Hello"},
        streams=False,
    ),
}
_MODEL_EXAMPLE: Final[Schema] = {"id": "my-model", "object": "model", "created": 0, "owned_by": "inference-worker"}
MODELS: Final[Schema] = {
    "responses": {
        200: _told(
            "The models.",
            {
                "type": "object",
                "required": ["object", "data"],
                "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _ref("Model")}},
            },
            {"object": "list", "data": [_MODEL_EXAMPLE]},
        )
    }
    | openai_errors({401: _MEANS[401]}),
}
MODEL: Final[Schema] = {
    "responses": {200: _told("The model.", _ref("Model"), _MODEL_EXAMPLE)}
    | openai_errors({401: _MEANS[401], 404: "No worker has this model."}),
}

# ---------------------------------------------------------------- the document


def describe(web: FastAPI, *, keyed: bool) -> Schema:
    """The whole document; `keyed` where an API key is needed."""
    document = get_openapi(
        title="inference-worker",
        version=version(),
        summary="Inference jobs through a queue",
        description="A job is accepted once the queue has it, and ends in one state. OpenAI's own paths work, too.",
        routes=web.routes,
    )
    components = document.setdefault("components", {})
    components["schemas"] = {**components.get("schemas", {}), **SCHEMAS}
    if keyed:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        document["security"] = [{"bearer": []}, {"apiKey": []}]
    return document
