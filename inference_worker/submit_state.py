"""How far a `submit` has come: a small file beside its output, from which it goes on after Ctrl-C or a crash.

Output first, then the file: what the file says was written lies on the disk. What the output has beyond that is cut off
when it goes on, and asked for again under the same ids.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from inference_worker.errors import ConfigurationError

VERSION: Final = 1
NO_FILE: Final = (errno.EINVAL, errno.EROFS, errno.ENOTSUP, errno.EBADF, None)
"""What fsync says of a pipe or a terminal."""

READ_BYTES: Final = 1024 * 1024
STDOUT: Final = "-"


class State(msgspec.Struct, kw_only=True):
    """What is needed to go on."""

    version: int = VERSION
    run_id: str
    """The ids of requests that have none of their own are made of it and of the line's number."""
    input: str
    input_sha256: str
    owns_input: bool = False
    """The input came from a pipe and was kept for going on; it goes with the state."""
    lines: int
    output: str
    url: str | None = None
    deployment_id: str | None = None
    timeout_s: float
    written: int = 0
    """Lines of output, which are those of the first so many requests."""
    written_bytes: int = 0
    failed: int = 0
    takes_ids: bool = True
    """Whether the server takes our ids; where it does not, `jobs` has its own."""
    jobs: dict[int, str] = msgspec.field(default_factory=dict)
    """Over HTTP: jobs that were accepted and whose results are not written, by the line's number from 0."""

    def request_id(self, index: int) -> str:
        """The id of a request that brings none: the same whenever it is asked for."""
        return f"{self.run_id}-{index + 1}"


def read_state(path: Path) -> State:
    """Read a state file.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        state = msgspec.json.decode(path.read_bytes(), type=State)
    except OSError as exc:
        raise ConfigurationError((f"--resume: {path} cannot be read: {exc.strerror}",)) from exc
    except msgspec.MsgspecError as exc:
        raise ConfigurationError((f"--resume: {path} is no file of submit's: {exc}",)) from exc
    if state.version != VERSION:
        raise ConfigurationError((f"--resume: {path} is of version {state.version}, and this is {VERSION}",))
    return state


def write_state(path: Path, state: State) -> None:
    """Write it whole or not at all."""
    beside = path.with_name(f"{path.name}.new")
    with beside.open("wb") as file:
        file.write(msgspec.json.encode(state))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def flush(output: BinaryIO) -> None:
    """Have what was written lie on the disk, where it is a file."""
    output.flush()
    try:
        os.fsync(output.fileno())
    except OSError as exc:
        if exc.errno not in NO_FILE:
            raise


def absolute(path: str) -> str:
    """The path from wherever the run is gone on with."""
    return str(Path(path).absolute())


def forget(path: Path, state: State) -> None:
    """Everything is written: the state goes, and what was kept for it."""
    path.unlink(missing_ok=True)
    if state.owns_input:
        Path(state.input).unlink(missing_ok=True)


def new_state_path(given: str | None, output: str | None, source: str | None) -> Path:
    """Where the state goes: beside the output, else beside the input, else here.

    Raises:
        ConfigurationError: an earlier run's is there.
    """
    if given is not None:
        path = Path(given)
    elif output not in (None, STDOUT):
        path = Path(f"{output}.resume")
    elif source is not None:
        path = Path(f"{source}.resume")
    else:
        path = Path(f"submit-{secrets.token_hex(4)}.resume")
    if path.exists():
        raise ConfigurationError(
            (f"{path}: is there: a run was stopped. Go on with --resume {path}, or remove it to begin anew",)
        )
    return path


@contextlib.contextmanager
def opened_input(path: str) -> Iterator[BinaryIO]:
    """A file that can be read again.

    Raises:
        ConfigurationError: it cannot.
    """
    with _opened(path, "the input", "rb") as source:
        # A device may be seekable and never end, and a read of it would not hear of a stop.
        if not (source.seekable() and stat.S_ISREG(os.fstat(source.fileno()).st_mode)):
            raise ConfigurationError((f"{path}: can be read only once; give it by stdin, with '-'",))
        yield source


def keep_input(source: BinaryIO, state: State) -> None:
    """Keep what came by a pipe, for going on."""
    source.seek(0)
    with _opened(state.input, "what came by stdin", "wb") as kept:
        shutil.copyfileobj(source, kept)


@contextlib.contextmanager
def input_again(state: State) -> Iterator[BinaryIO]:
    """The input of a run that is gone on with.

    Raises:
        ConfigurationError: it is gone, or is not what it was.
    """
    with _opened(state.input, "the run's input", "rb") as source:
        digest = hashlib.sha256()
        while some := source.read(READ_BYTES):
            digest.update(some)
        if digest.hexdigest() != state.input_sha256:
            raise ConfigurationError((f"{state.input}: is not what it was when the run was begun",))
        yield source


@contextlib.contextmanager
def opened_output(state: State, *, again: bool) -> Iterator[BinaryIO]:
    """Where results go. Of a run that is gone on with, what was not noted as written is cut off.

    Raises:
        ConfigurationError: it exists, or cannot be written.
    """
    if state.output == STDOUT:
        with open(1, "wb", closefd=False) as output:
            yield output
        return
    with _opened(state.output, "--output", "r+b" if again else "xb") as output:
        if again:
            if output.seek(0, os.SEEK_END) < state.written_bytes:
                raise ConfigurationError((f"{state.output}: is shorter than when the run was stopped",))
            output.truncate(state.written_bytes)
            output.seek(0, os.SEEK_END)
        yield output


@contextlib.contextmanager
def _opened(path: str, what: str, mode: str) -> Iterator[BinaryIO]:
    try:
        file = open(path, mode)  # noqa: SIM115 - its errors are ours alone while it is opened
    except FileExistsError as exc:
        raise ConfigurationError((f"{what}: {path} exists; name another file, or remove it",)) from exc
    except OSError as exc:
        raise ConfigurationError((f"{what}: {path} cannot be opened: {exc.strerror}",)) from exc
    with file:
        yield file  # type: ignore[misc]  # The mode is a binary one.
