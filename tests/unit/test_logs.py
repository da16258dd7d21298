"""Both logging systems give the same lines, and the drivers stay quiet."""

import io
import json
import logging
from collections.abc import Generator
from datetime import datetime
from typing import Any, Literal

import pytest
import structlog

from inference_worker import logs

SECRET = "s3cr3t"


@pytest.fixture(autouse=True)
def _as_it_was() -> Generator[None]:
    root = logging.getLogger()
    names = (*logs.DRIVERS, *logs.HTTPX, *logs.SILENT_DRIVERS)
    before, level, raises = root.handlers[:], root.level, logging.raiseExceptions
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    root.handlers, logging.raiseExceptions = before, raises
    root.setLevel(level)
    for name in names:
        logging.getLogger(name).setLevel(levels[name])
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def configured(level: logs.Level = "info", fmt: Literal["json", "console"] = "json") -> io.StringIO:
    stream = io.StringIO()
    logs.configure(level, fmt, stream)
    return stream


def test_a_line_has_its_time_level_event_and_logger_first() -> None:
    stream = configured()

    structlog.get_logger("inference_worker.listener").info("request finished", seconds=1.5, codes={429})

    (line,) = lines(stream)
    assert list(line) == ["timestamp", "level", "event", "logger", "seconds", "codes"]
    assert (line["level"], line["event"], line["logger"]) == ("info", "request finished", "inference_worker.listener")
    assert line["timestamp"].endswith("Z")
    assert datetime.fromisoformat(line["timestamp"]).tzinfo is not None


def test_the_standard_librarys_records_have_the_same_shape() -> None:
    stream = configured()

    logging.getLogger("some.library").warning("lost %s", "it", extra={"queue": "q"})

    (line,) = lines(stream)
    assert (line["level"], line["event"], line["logger"]) == ("warning", "lost it", "some.library")
    assert line["queue"] == "q"


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("info", ["aio_pika warning", "httpx warning"]),
        ("debug", ["aio_pika warning", "aio_pika info", "aiormq.connection warning", "aiormq.connection info"]),
        ("error", []),
    ],
)
def test_the_drivers_say_what_we_do_not(level: logs.Level, said: list[str]) -> None:
    """At no level their `debug`, where frames are printed with credentials, nor httpx's whole URLs."""
    stream = configured(level)

    for name in ("aio_pika", "aiormq.connection", "httpx"):
        for severity in ("warning", "info", "debug"):
            getattr(logging.getLogger(name), severity)(f"{name} {severity}")

    expected = [*said, "httpx warning"] if level == "debug" else said
    assert [line["event"] for line in lines(stream)] == expected


def test_the_level_changes_while_running() -> None:
    stream = configured()
    log = structlog.get_logger("inference_worker.x")

    log.debug("before")
    logs.set_level("debug")
    log.debug("between")
    logs.set_level("warning")
    log.info("after")

    assert [line["event"] for line in lines(stream)] == ["between"]


@pytest.mark.parametrize("fmt", ["json", "console"])
def test_a_traceback_shows_no_local_variables(fmt: Literal["json", "console"]) -> None:
    stream = configured(fmt=fmt)

    def fail() -> None:
        prompt = SECRET.upper().lower()
        raise ValueError(len(prompt))

    try:
        fail()
    except ValueError:
        structlog.get_logger("x").exception("boom")

    assert "ValueError: 6" in stream.getvalue()
    assert SECRET not in stream.getvalue()


def test_a_stream_that_takes_nothing_more_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk or a closed pipe: the line is lost, without a traceback a line."""
    stream = configured()

    stream.close()
    structlog.get_logger("x").info("nobody hears it")

    assert capsys.readouterr().err == ""
