"""A thousand kills of `inference-worker process` over one transport, or of `run`, and whether all is conserved."""

from typing import Literal

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.bench.servers import Servers
from tests.every_transport import Transport
from tests.faults.process_kills import QUEUE, WORKERS, run

Command = Literal["process", "run"]

FOR_EACH = 6
"""Requests for a kill."""

MOST_SHOWN = 20
WITHIN_S = 600.0


async def process_kills_bar(
    transport: Transport, command: Command, kills: int, servers: Servers, console: Console
) -> bool:
    """The run, its table, and whether each request ended once and was billed once."""
    with Progress(console=console, disable=not console.is_terminal) as bar:
        killing, ending = bar.add_task("kills", total=kills), bar.add_task("ended", total=kills * FOR_EACH)

        def told(killed: int, ended: int) -> None:
            bar.update(killing, completed=killed)
            bar.update(ending, completed=ended)

        opened = servers.queues(transport, [QUEUE]) if command == "process" else servers.sidecar()
        async with opened as queues:
            ended = await run(queues, kills=kills, requests=kills * FOR_EACH, told=told, within=WITHIN_S)
    breaches = ended.breaches()
    table = Table(title=f"{command}, {transport}: {ended.kills} kills of {WORKERS} workers", show_header=False)
    for row in (
        ("requests", str(len(ended.submitted))),
        ("completed", str(len(ended.completed))),
        ("failed, dead letters", f"{len(ended.failed)}, {len(ended.found.dead)}"),
        ("usage events, by id", str(len({event_id for event_id, _ in ended.found.billed}))),
        ("results said again", str(ended.said_again)),
        ("tried again after a failure", str(ended.failed_once)),
        ("calls of the model", str(ended.calls)),
        ("seconds", f"{ended.seconds:.0f}"),
        ("breaches", str(len(breaches))),
    ):
        table.add_row(*row)
    console.print(table)
    for breach in breaches[:MOST_SHOWN]:
        console.print(f"BREACH: {breach}", style="red", markup=False)
    return not breaches
