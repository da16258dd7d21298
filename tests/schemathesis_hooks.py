"""What schemathesis is told besides the OpenAPI document: a key that comes again means the same job.

The document cannot say that two requests with one key must have one body, so each request gets a key of its own. Nor
can it say that a key in the header and one in the body must be the same.
"""

import itertools
from typing import Any

import schemathesis

LONGEST = 512
"""A key that is too long, or empty, is meant to be refused and stays as it is."""

_numbers = itertools.count()


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    own = f"{next(_numbers):08d}"
    in_body = isinstance(case.body, dict) and "idempotency_key" in case.body
    if in_body and _usable(case.body["idempotency_key"]):
        case.body["idempotency_key"] = own + case.body["idempotency_key"][8:]
    if _usable(case.headers.get("Idempotency-Key")):
        if in_body:
            del case.headers["Idempotency-Key"]
        else:
            case.headers["Idempotency-Key"] = own + case.headers["Idempotency-Key"][8:]


def _usable(key: object) -> bool:
    return isinstance(key, str) and 0 < len(key) <= LONGEST
