"""The log: structlog's lines and the standard library's records, through one renderer, to one stream.

Not here: what is logged. Bodies, prompts and credentials never are.
"""

import json
import logging
import sys
from contextlib import suppress
from typing import Literal, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

Level = Literal["debug", "info", "warning", "error", "critical"]

DRIVERS = ("aio_pika", "aiormq", "aiohttp", "asyncio", "redis", "urllib3", "uvicorn")
"""They log what we log in our own words. Their warnings pass, with `debug` their `info` too, never their `debug`:
aiormq's prints frames, and the credentials in them; urllib3's whole paths, with their query."""
HTTPX = ("httpcore", "httpx")
"""Their `info` prints whole URLs, with the user part."""
SILENT_DRIVERS = ("aiormq.connection", "aio_pika.exchange", "aiohttp.access")
"""A lost connection is several warnings with tracebacks there; ours is one line per change of reason."""


class _Lines:
    """Where rendered lines go. A full disk or a closed pipe must not stop the work that is logged."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name

    def msg(self, line: str) -> None:
        with suppress(OSError, ValueError):
            _stream.write(line + "\n")
            _stream.flush()

    debug = info = warning = error = critical = exception = msg


_stream: TextIO = sys.stderr
"""Where to, at this time: a logger that was bound before the stream was changed follows it."""

_least_number = logging.INFO
"""The level in force, as the standard library's number: read with each line, since it may change while running."""


def configure(level: Level, fmt: Literal["json", "console"], stream: TextIO) -> None:
    """Set both logging systems up; called once, by the doors.

    Our own lines are rendered and written at once; only the drivers' records take the way through the standard library,
    which costs three times as much.
    """
    global _stream
    _stream = stream
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    finish: list[Processor] = (
        [structlog.processors.format_exc_info, _order, structlog.processors.JSONRenderer(serializer=_json)]
        if fmt == "json"
        # With rich installed, structlog's own choice prints the local variables: prompts and credentials.
        else [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback)]
    )
    begin: list[Processor] = [
        _filter,
        _name,
        structlog.stdlib.add_log_level,
        stamp,
    ]
    structlog.configure(
        processors=[*begin, *finish],
        logger_factory=_Lines,
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        # A cached logger would keep what was configured at the time of its first line, in tests above all.
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_logger_name,
                structlog.stdlib.add_log_level,
                stamp,
                structlog.stdlib.ExtraAdder(),
            ],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *finish],
        )
    )
    logging.getLogger().handlers = [handler]
    logging.raiseExceptions = False  # As `_Lines`.
    set_level(level)


def set_level(level: Level) -> None:
    """Change the level while running."""
    global _least_number
    least = _least_number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(least)
    verbose = least <= logging.DEBUG
    for name in DRIVERS:
        logging.getLogger(name).setLevel(logging.INFO if verbose else max(least, logging.WARNING))
    for name in HTTPX:
        logging.getLogger(name).setLevel(max(least, logging.WARNING))
    for name in SILENT_DRIVERS:
        logging.getLogger(name).setLevel(logging.INFO if verbose else logging.CRITICAL)


def _filter(_logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if structlog.processors.NAME_TO_LEVEL[method] < _least_number:
        raise structlog.DropEvent
    return event


def _name(logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    if (name := getattr(logger, "name", None)) is not None:
        event["logger"] = name
    return event


def _json(event: EventDict, **_: object) -> str:
    try:
        return msgspec.json.encode(event, enc_hook=str).decode()
    except (UnicodeEncodeError, TypeError):  # A lone surrogate, a key that is no string: slower, and never in vain.
        return json.dumps({str(key): value for key, value in event.items()}, default=str)


def _order(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Every line begins alike, for whoever reads the raw log."""
    first = {key: event.pop(key) for key in ("timestamp", "level", "event", "logger") if key in event}
    return {**first, **event}
