"""What `check` prints: a table for people, or one JSON object."""

import sys
from collections.abc import Mapping
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inference_worker.check import Report, check
from inference_worker.config.settings import Settings

PLAIN_COLUMNS: Final = 160
STYLES: Final[Mapping[str, str]] = {"ok": "green", "warning": "yellow", "failed": "red", "off": "dim"}


async def run_check(settings: Settings, environ: Mapping[str, str], *, as_json: bool, with_variables: bool) -> int:
    """The command. 0: all is reached; 1: something is not."""
    return show_report(await check(settings, environ), as_json=as_json, with_variables=with_variables)


def show_report(report: Report, *, as_json: bool, with_variables: bool) -> int:
    """Print it. 0: all is reached; 1: something is not."""
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(_json(report)) + b"\n")
        sys.stdout.buffer.flush()
    else:
        _print(report, with_variables=with_variables)
    return 0 if report.reached else 1


def _json(report: Report) -> bytes:
    rows = [{"what": row.what, "state": row.word, "detail": row.detail, "mend": row.mend} for row in report.findings]
    gates = {} if report.gates is None else {"gates": report.gates}
    return msgspec.json.encode({"reached": report.reached, "checks": rows, **gates, "variables": report.variables})


def _print(report: Report, *, with_variables: bool) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_COLUMNS)
    if with_variables:
        table = _table("variable", "value", "")
        for row in report.variables:
            table.add_row(str(row["name"]), Text(str(row["value"])), "" if row["set"] else Text("default", style="dim"))
        console.print(table)
        console.print()
    table = _table("", "", "what is so", "what mends it")
    for finding in report.findings:
        word = Text(finding.word, style=STYLES[finding.word])
        table.add_row(Text(finding.what), word, Text(finding.detail), Text(finding.mend))
    console.print(table)
    failed = [finding.what for finding in report.findings if finding.word == "failed"]
    console.print(Text(f"not reached: {', '.join(failed)}" if failed else "all reached", style="bold"))


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
