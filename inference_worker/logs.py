"""The log: structlog's lines and the standard library's records, through one renderer, to one stream.

Not here: what is logged. Bodies, prompts and credentials never are.
"""

import logging
from typing import Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

Level = Literal["debug", "info", "warning", "error", "critical"]

DRIVERS = ("aio_pika", "aiormq", "aiohttp", "asyncio", "redis", "uvicorn")
"""They log what we log in our own words. Their warnings pass, with `debug` their `info` too, never their `debug`:
aiormq's prints frames, and the credentials in them."""
HTTPX = ("httpcore", "httpx")
"""Their `info` prints whole URLs, with the user part."""
SILENT_DRIVERS = ("aiormq.connection", "aio_pika.exchange", "aiohttp.access")
"""A lost connection is several warnings with tracebacks there; ours is one line per change of reason."""


def configure(level: Level, fmt: Literal["json", "console"], stream: TextIO) -> None:
    """Set both logging systems up; called once, by the doors."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        # A cached logger would keep what was configured at the time of its first line, in tests above all.
        cache_logger_on_first_use=False,
    )
    finish: list[Processor] = (
        [structlog.processors.format_exc_info, _order, structlog.processors.JSONRenderer(default=str)]
        if fmt == "json"
        # With rich installed, structlog's own choice prints the local variables: prompts and credentials.
        else [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback)]
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *finish],
        )
    )
    logging.getLogger().handlers = [handler]
    # A full disk or a closed pipe must not print a traceback for every line.
    logging.raiseExceptions = False
    set_level(level)


def set_level(level: Level) -> None:
    """Change the level while running."""
    least = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(least)
    verbose = least <= logging.DEBUG
    for name in DRIVERS:
        logging.getLogger(name).setLevel(logging.INFO if verbose else max(least, logging.WARNING))
    for name in HTTPX:
        logging.getLogger(name).setLevel(max(least, logging.WARNING))
    for name in SILENT_DRIVERS:
        logging.getLogger(name).setLevel(logging.INFO if verbose else logging.CRITICAL)


def _order(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Every line begins alike, for whoever reads the raw log."""
    first = {key: event.pop(key) for key in ("timestamp", "level", "event", "logger") if key in event}
    return {**first, **event}
