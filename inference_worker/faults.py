"""Has whatever a part of another package throws come out as an exception, which can be dealt with.

`sys.exit()` would end the process, a panic of a part that is written in Rust as well; and a cancellation that nobody
has asked for would end the task that called the part, and say nothing. Not here: what becomes of a fault (`guarded`).
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager


class Thrown(Exception):
    """What came was no `Exception`."""


@contextmanager
def as_exceptions() -> Generator[None]:
    """Raises Thrown in place of what is none; a cancellation that was asked for, and what Ctrl-C raises, go through."""
    try:
        yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except asyncio.CancelledError as exc:
        if _asked_for():
            raise
        raise Thrown("CancelledError, which nobody has asked for") from exc
    except BaseException as exc:
        raise Thrown(f"{type(exc).__name__}: {exc}") from exc


def _asked_for() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
