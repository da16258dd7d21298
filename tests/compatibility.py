"""Run the tests of a store or a broker against every version of it that can be had here, and say what passed.

    python -m tests.compatibility [--only redis valkey postgres rabbitmq] [--installed]
    python -m tests.compatibility --image redis:7.2 postgres:16
    python -m tests.compatibility --programs /opt/redis-6.2/bin

Versions are what is installed, images of Docker, and folders with a server's programs; an image that is not here is
pulled, or said to be missing. The exit code is 1 where a test failed. What was run for `docs/compatibility.md` stands
there with its date.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from redis.asyncio import Redis as RedisClient
from rich.console import Console
from rich.table import Table

from tests import services

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = "tests/integration"
LONGEST_S: Final = 1800.0

REDIS_TESTS: Final = (
    *("redis_store", "redis_streams_transport", "redis_streams_faults", "redis_streams_kills"),
    *("redis_sorted_set_transport", "redis_sorted_set_rules", "redis_sorted_set_faults", "redis_cluster"),
    *("redis_gates", "redis_pubsub", "redis_job_book", "redis_faults", "stream_intake", "producer"),
    "sorted_set_dead_letters",
)
TESTS: Final[Mapping[str, Sequence[str]]] = {
    "redis": REDIS_TESTS,
    "valkey": REDIS_TESTS,
    "postgres": (
        *("sql_transport", "sql_rules", "sql_faults", "sql_kills", "sql_store"),
        *("sql_quota", "sql_producer", "sql_process"),
    ),
    "rabbitmq": (
        *("rabbitmq_transport", "rabbitmq_rules", "rabbitmq_replies", "rabbitmq_priorities"),
        *("broker_faults", "kills", "dlq", "client"),
    ),
}
IMAGES: Final[Mapping[str, Sequence[str]]] = {
    "redis": (services.REDIS_IMAGE,),
    "valkey": ("valkey/valkey:8",),
    "postgres": (services.POSTGRES_IMAGE,),
    "rabbitmq": (services.RABBITMQ_IMAGE,),
}
VARIABLES: Final = {
    "redis": "REDIS_IMAGE",
    "valkey": "REDIS_IMAGE",
    "postgres": "POSTGRES_IMAGE",
    "rabbitmq": "RABBITMQ_IMAGE",
}
INSTALLED: Final = ("redis", "postgres", "rabbitmq")
"""What distributions have; Valkey is asked for by its image."""
PROGRAMS: Final = {
    "redis-server": "redis",
    "valkey-server": "valkey",
    "initdb": "postgres",
    "rabbitmq-server": "rabbitmq",
}
WIDTH: Final = 160
"""Of the table, where there is no terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One version of a store or broker, and how the tests are told to have it."""

    what: str
    image: str = ""
    programs: str = ""
    """A folder. Neither this nor an image: what is installed."""

    @property
    def environ(self) -> dict[str, str]:
        """Variables of the tests."""
        if self.image:
            return {"TEST_SERVICES": "docker", VARIABLES[self.what]: self.image}
        return {"TEST_SERVICES": "local", "TEST_PROGRAMS": self.programs}

    @property
    def name(self) -> str:
        """Where it is from."""
        return self.image or self.programs or "installed"

    @property
    def arguments(self) -> list[str]:
        """Of pytest."""
        return [f"{FOLDER}/test_{name}.py" for name in TESTS[self.what]]

    @property
    def command(self) -> str:
        """The command line that a person would type for this version alone."""
        if self.image:
            which = f"--image {self.image}"
        elif self.programs:
            which = f"--programs {self.programs}"
        else:
            which = f"--only {self.what} --installed"
        return f"python -m tests.compatibility {which}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one version."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0


def versions(
    only: Sequence[str], images: Sequence[str], programs: Sequence[str] = (), *, installed: bool = False
) -> list[Version]:
    """Those that are asked for: with images or folders of programs, these and no others."""
    if images or programs:
        return [
            *(Version(what=what_of(image), image=image) for image in images),
            *(Version(what=what_is_in(folder), programs=folder) for folder in programs),
        ]
    chosen = list(only) or list(TESTS)
    from_images = [Version(what=what, image=image) for what in chosen for image in IMAGES[what]]
    return [*(Version(what=what) for what in chosen if what in INSTALLED), *([] if installed else from_images)]


def what_of(image: str) -> str:
    """What an image is, by its name.

    Raises:
        ValueError: none of those that there are tests for.
    """
    name = image.rpartition("/")[2].partition(":")[0]
    if name not in TESTS:
        raise ValueError(f"{image}: is none of {', '.join(TESTS)}")
    return name


def what_is_in(folder: str) -> str:
    """What a folder has the programs of.

    Raises:
        ValueError: none of those that there are tests for.
    """
    for program, what in PROGRAMS.items():
        if Path(folder, program).exists():
            return what
    raise ValueError(f"{folder}: has none of {', '.join(PROGRAMS)}")


def outcome_of(report: str, seconds: float) -> Outcome:
    """Read a report of JUnit's form."""
    suite = next(ElementTree.fromstring(report).iter("testsuite"))
    total, failed, skipped = (int(suite.get(name, "0")) for name in ("tests", "failures", "skipped"))
    failed += int(suite.get("errors", "0"))
    return Outcome(passed=total - failed - skipped, failed=failed, skipped=skipped, seconds=seconds)


async def said_by(version: Version) -> str:
    """The version that the server itself tells.

    Raises:
        services.Unavailable: it cannot be had here.
    """
    supply = services.choose({**os.environ, **version.environ}, lambda _: None)
    try:
        match version.what:
            case "postgres":
                import asyncpg

                connection = await asyncpg.connect(supply.postgres().url)
                told = str(await connection.fetchval("show server_version"))
                await connection.close()
                return told.split()[0]
            case "rabbitmq":
                return supply.rabbit().ctl("version").strip()
            case _:
                async with RedisClient.from_url(supply.redis().at(0)) as client:
                    info = await client.info("server")
                return str(info.get("valkey_version") or info["redis_version"])
    finally:
        supply.close()


def run(version: Version, console: Console) -> Outcome:
    """Its tests, their output to the terminal."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", f"--junitxml={report}"]
        console.print(f"[bold]{version.what}[/] {version.name}")
        began = time.monotonic()
        environ = {**os.environ, **version.environ, "TESTCONTAINERS_RYUK_DISABLED": "true"}
        subprocess.run([*command, *version.arguments], cwd=ROOT, env=environ, check=False, timeout=LONGEST_S)
        if not report.exists():
            return Outcome(failed=1, seconds=time.monotonic() - began)
        return outcome_of(report.read_text(), time.monotonic() - began)


def main() -> int:
    """Run what the arguments name; 1 where a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility")
    parser.add_argument("--only", nargs="+", choices=list(TESTS), default=[])
    parser.add_argument("--image", nargs="+", default=[], help="these versions and no others")
    parser.add_argument("--programs", nargs="+", default=[], metavar="FOLDER", help="these and no others")
    parser.add_argument("--installed", action="store_true", help="no images")
    args = parser.parse_args()
    try:
        asked = versions(args.only, args.image, args.programs, installed=args.installed)
    except ValueError as exc:
        parser.error(str(exc))
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    table = Table(title="compatibility")
    for heading, justify in (("server", "left"), ("version", "left"), ("passed", "right"), ("failed", "right")):
        table.add_column(heading, justify="right" if justify == "right" else "left")
    for heading in ("skipped", "seconds"):
        table.add_column(heading, justify="right")
    table.add_column("command", overflow="fold")
    good = True
    for version in asked:
        try:
            told = asyncio.run(said_by(version))
        except services.Unavailable as exc:
            console.print(f"{version.what} {version.name}: {exc}", markup=False)
            table.add_row(version.what, "not to be had", "", "", "", "", version.command)
            continue
        outcome = run(version, console)
        good &= outcome.failed == 0
        counts = (outcome.passed, outcome.failed, outcome.skipped, round(outcome.seconds))
        table.add_row(version.what, told, *(str(count) for count in counts), version.command)
    console.print(table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
