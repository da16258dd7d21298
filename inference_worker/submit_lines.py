"""The lines of `submit`: what a line of input may be, and what its line of output looks like.

Not here: sending, waiting, and going on after a stop (`submit`).
"""

import hashlib
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Final

import msgspec

from inference_worker.client import MOST_PRIORITY, Result
from inference_worker.messages import usable_id

MOST_LINE_BYTES: Final = 16 * 1024 * 1024
FIELDS: Final = ("payload", "request_id", "timeout_s", "endpoint", "metadata", "tenant", "priority")
BATCH_FIELDS: Final = ("custom_id", "method", "url", "body")
ACCEPTED: Final = (
    "a JSON object on one line: a payload for the model; or one with `payload` and perhaps "
    "`request_id`, `timeout_s`, `endpoint`, `metadata`, `tenant`, `priority`; or an OpenAI batch line with "
    "`custom_id`, `method`, `url`, `body`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One request, as its line says it."""

    index: int
    """Counted from 0, empty lines left out."""
    payload: bytes
    request_id: str | None = None
    timeout_s: float | None = None
    endpoint: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    tenant: str | None = None
    priority: int | None = None
    custom_id: str | None = None
    """Of an OpenAI batch line, which is answered by one."""


class BadLine(Exception):
    """A line that is no request; each problem says what is wrong and what is accepted."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(slots=True, kw_only=True)
class Checked:
    """What a look at all lines has found."""

    lines: int = 0
    size_bytes: int = 0
    sha256: str = ""
    problems: list[str] = field(default_factory=list)
    """One for each bad line, with its number in the file."""


def check(
    source: BinaryIO, endpoints: Sequence[str], *, tenants: bool, priorities: bool
) -> Generator[Checked, None, Checked]:
    """Look at all lines, yielding now and then so that somebody else may do something. Remembers a hash of each id."""
    found, digest, ids = Checked(), hashlib.sha256(), dict[bytes, int]()
    for number, raw in enumerate(_raw_lines(source), 1):
        digest.update(raw)
        found.size_bytes += len(raw)
        if not raw.strip():
            continue
        try:
            line = read_line(raw, found.lines, endpoints)
            if line.tenant is not None and not tenants:
                raise BadLine("tenant: over HTTP it is that of the API key; leave it out")
            if line.priority is not None and not priorities:
                raise BadLine("priority: only RabbitMQ has any; leave it out")
            if (name := line.custom_id or line.request_id) is not None:
                first = ids.setdefault(hashlib.blake2b(name.encode(), digest_size=12).digest(), number)
                if first != number:
                    which = "custom_id" if line.custom_id is not None else "request_id"
                    raise BadLine(f"{which}: the same as on line {first}; each request has one of its own")
        except BadLine as bad:
            found.problems.append(f"line {number}: {bad}")
        found.lines += 1
        if number % 500 == 0:
            yield found
    found.sha256 = digest.hexdigest()
    return found


def read_lines(source: BinaryIO, endpoints: Sequence[str], *, after: int) -> Iterator[Line]:
    """The requests, less the first `after`; all lines have been checked."""
    source.seek(0)
    index = 0
    for raw in _raw_lines(source):
        if raw.strip():
            if index >= after:
                yield read_line(raw, index, endpoints)
            index += 1


def _raw_lines(source: BinaryIO) -> Iterator[bytes]:
    while raw := source.readline(MOST_LINE_BYTES + 1):
        yield raw
        while len(raw) > MOST_LINE_BYTES and not raw.endswith(b"\n"):
            raw = source.readline(MOST_LINE_BYTES + 1)  # The rest of a line that is refused anyway.


def read_line(raw: bytes, index: int, endpoints: Sequence[str]) -> Line:
    """Read one line; the payload stays the bytes that came.

    Raises:
        BadLine
    """
    if len(raw) > MOST_LINE_BYTES:
        raise BadLine(f"is longer than {MOST_LINE_BYTES} bytes")
    raw = raw.strip().removeprefix(b"\xef\xbb\xbf")
    fields = _object(raw, "is not a request")
    if "custom_id" in fields or ("body" in fields and "url" in fields):
        return _batch_line(fields, index, endpoints)
    if "payload" in fields:
        return _own_line(fields, index, endpoints)
    return Line(index=index, payload=raw)


def _own_line(fields: dict[str, msgspec.Raw], index: int, endpoints: Sequence[str]) -> Line:
    problems = [f"{name}: is not known; accepted are {', '.join(FIELDS)}" for name in fields if name not in FIELDS]
    payload = bytes(fields["payload"])
    try:
        _object(payload, "payload: must be a JSON object")
    except BadLine as bad:
        problems += bad.problems
    said = {name: _decoded(fields[name]) for name in FIELDS[1:] if name in fields}
    wrong = (
        ("request_id", usable_id, "1 to 512 bytes of UTF-8 without control characters"),
        ("timeout_s", _is_seconds, "a finite number of seconds above 0"),
        ("endpoint", lambda value: value in endpoints, "one of " + ", ".join(endpoints)),
        ("metadata", _is_string_map, "an object whose values are strings"),
        ("tenant", lambda value: isinstance(value, str), "a string"),
        ("priority", _is_priority, f"a whole number from 0 to {MOST_PRIORITY}"),
    )
    problems += [
        f"{name}: must be {accepted}" for name, fits, accepted in wrong if name in said and not fits(said[name])
    ]
    if problems:
        raise BadLine(*problems)
    timeout_s, priority = said.get("timeout_s"), said.get("priority")
    metadata = said.get("metadata")
    return Line(
        index=index,
        payload=payload,
        request_id=_text(said.get("request_id")),
        timeout_s=float(timeout_s) if isinstance(timeout_s, int | float) else None,
        endpoint=_text(said.get("endpoint")),
        metadata={str(name): str(value) for name, value in metadata.items()} if isinstance(metadata, dict) else {},
        tenant=_text(said.get("tenant")),
        priority=priority if isinstance(priority, int) else None,
    )


def _batch_line(fields: dict[str, msgspec.Raw], index: int, endpoints: Sequence[str]) -> Line:
    said = {name: _decoded(fields[name]) for name in fields if name != "body"}
    problems = [
        f"{name}: is not known; an OpenAI batch line has {', '.join(BATCH_FIELDS)}"
        for name in fields
        if name not in BATCH_FIELDS
    ]
    custom_id, url = said.get("custom_id"), said.get("url")
    if not isinstance(custom_id, str) or not custom_id:
        problems.append("custom_id: must be a string that is not empty")
    if said.get("method") != "POST":
        problems.append("method: must be POST")
    if url not in endpoints:
        problems.append(f"url: must be one of {', '.join(endpoints)}")
    if "body" not in fields:
        problems.append("body: is missing; it is a JSON object, the request for the model")
    else:
        try:
            _object(bytes(fields["body"]), "body: must be a JSON object")
        except BadLine as bad:
            problems += bad.problems
    if problems:
        raise BadLine(*problems)
    return Line(index=index, payload=bytes(fields["body"]), endpoint=str(url), custom_id=str(custom_id))


def _object(raw: bytes, what: str) -> dict[str, msgspec.Raw]:
    try:
        raw.decode()
        return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise BadLine(f"{what} ({exc})") from exc


def _decoded(raw: msgspec.Raw) -> object:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _is_seconds(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return 0 < float(value) < math.inf
    except OverflowError:
        return False


def _is_priority(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_PRIORITY


def _is_string_map(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


# ---------------------------------------------------------------- output


def output_line(line: Line, result: Result) -> bytes:
    """The line that answers `line`, with its line break."""
    body = _batch_answer(line, result) if line.custom_id is not None else _own_answer(result)
    # A line break inside of JSON stands between two tokens and nowhere else: in a string it is written \n.
    return msgspec.json.encode(body).replace(b"\r", b" ").replace(b"\n", b" ") + b"\n"


def _own_answer(result: Result) -> dict[str, object]:
    """The keys of a stored result, in its order, with the id first."""
    body: dict[str, object] = {
        "request_id": result.request_id,
        "status": result.status,
        "status_code": result.status_code,
    }
    if result.completed:
        body["result"] = msgspec.Raw(result.result or b"null")
    else:
        body |= {"error": result.error, "error_code": result.error_code}
    body["attempt"] = result.attempt
    for name in ("replica_id", "received_at", "finished_at"):
        if (value := getattr(result, name)) is not None:
            body[name] = value
    body["timings"] = {
        name: value
        for name in ("queue_s", "model_s", "ttft_s", "tbt_s")
        if (value := getattr(result.timings, name)) is not None
    }
    return body


def _batch_answer(line: Line, result: Result) -> dict[str, object]:
    """As OpenAI writes a line of a batch's output; a request that no model answered has an `error` instead."""
    response: dict[str, object] | None = None
    error: dict[str, object] | None = None
    if result.completed:
        response = {"body": msgspec.Raw(result.result or b"null")}
    elif result.error_code == "model_error":
        response = {
            "body": {
                "error": {"message": result.error, "type": "model_error", "param": None, "code": result.status_code}
            }
        }
    else:
        error = {"code": result.error_code or "failed", "message": result.error}
    if response is not None:
        response = {"status_code": result.status_code, "request_id": result.request_id, **response}
    return {
        "id": f"batch_req_{result.request_id}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
