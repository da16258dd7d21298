"""The command line of `process`: the flags as argparse takes them, as llm-d-async's are written.

What they may hold is read elsewhere (`config/process_flags.py`), where all that is wrong is said at once.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Final

from inference_worker.config.process_flags import FLAGS, Flag
from inference_worker.config.values import open_regular
from inference_worker.logs import Level
from inference_worker.process_setup import ProcessSetup

MOST_FILE_BYTES: Final = 16 * 1024 * 1024
_ONE_DASH: Final = re.compile(r"-[a-z][a-z.-]+(=|\Z)")
PREFIX: Final = "flag:"
"""Keeps what is a flag of this command apart from all else that is parsed."""


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Have all of them taken; values are looked at later."""
    usual = parser.add_argument_group("flags")
    old = parser.add_argument_group("old flags, and flags that change nothing")
    for flag in FLAGS:
        group = old if flag.instead or flag.unused else usual
        shown = f" (default {flag.default})" if flag.default and not flag.unused else ""
        names = [f"--{flag.name}"] if len(flag.name) > 1 else [f"-{flag.name}", f"--{flag.name}"]
        if flag.kind == "switch":
            group.add_argument(
                *names,
                dest=PREFIX + flag.name,
                nargs="?",
                const="true",
                metavar="BOOL",
                help=_help(flag, shown),
            )
        else:
            group.add_argument(*names, dest=PREFIX + flag.name, metavar=_metavar(flag), help=_help(flag, shown))


def _help(flag: Flag, shown: str) -> str:
    return (flag.meaning + shown).replace("%", "%%")


def _metavar(flag: Flag) -> str:
    match flag.kind:
        case "whole":
            return "N"
        case "seconds":
            return "DURATION"
        case _:
            return "FILE" if flag.name.endswith("file") else "TEXT"


def with_two_dashes(arguments: Sequence[str]) -> list[str]:
    """The same command line, with flags as they are shown: Go's take one dash or two."""
    return [f"-{said}" if _ONE_DASH.match(said) else said for said in arguments]


def takes_flags(args: argparse.Namespace) -> bool:
    """Whether this is a command line with the flags: those that there are not are told with all else that is wrong."""
    return any(name.startswith(PREFIX) for name in vars(args))


def given_flags(args: argparse.Namespace, unknown: Sequence[str] = ()) -> Mapping[str, str]:
    """Those that were given, by their names; also what is `unknown`, which is no flag, but for its values."""
    flags = [said.lstrip("-").partition("=")[0] for said in unknown if said.startswith("-")]
    given = {
        name.removeprefix(PREFIX): value
        for name, value in vars(args).items()
        if name.startswith(PREFIX) and value is not None
    }
    return given | dict.fromkeys(flags or unknown, "")


def read_text(path: str) -> str:
    """A file that a flag names.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no text, or too large.
    """
    with open_regular(path) as opened:
        raw = opened.read(MOST_FILE_BYTES + 1)
    if len(raw) > MOST_FILE_BYTES:
        raise ValueError(f"it is larger than {MOST_FILE_BYTES} bytes")
    return raw.decode()


def process_level(setup: ProcessSetup) -> Level:
    """What is logged: LOG_LEVEL says, or else the flag `v`."""
    log = setup.settings.log
    if "level" in log.model_fields_set:
        return log.level
    match setup.flags.verbosity:
        case number if number <= 0:
            return "warning"
        case number if number < 4:
            return "info"
        case _:
            return "debug"
