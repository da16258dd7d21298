"""20,000 jobs over two gateways into a stream, three workers, one of them killed every five seconds."""

import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.faults import fleet_run
from tests.services import Redis

KILL_EVERY_S = 5.0


async def kills_bar(jobs: int, redis: Redis, console: Console) -> bool:
    """The run, its table, and whether every accepted job ended in exactly one state and was billed at most once."""
    with tempfile.TemporaryDirectory() as name, Progress(console=console, disable=not console.is_terminal) as bar:
        accepting = bar.add_task("accepted", total=jobs)
        ending = bar.add_task("ended", total=jobs)

        def told(accepted: int, ended: int) -> None:
            bar.update(accepting, completed=accepted)
            bar.update(ending, completed=ended)

        ended = await fleet_run.run(
            redis.at(1), Path(name), name="bar", jobs=jobs, kill_every_s=KILL_EVERY_S, told=told, within=1200
        )
    results = ended.evidence.results.values()
    table = Table(title=f"{jobs} jobs, three workers, one killed every {KILL_EVERY_S:g} s", show_header=False)
    for row in (
        ("accepted", str(ended.accepted)),
        ("refused, and sent again", ", ".join(f"{n} × {status}" for status, n in ended.refused.items()) or "none"),
        ("completed", str(sum(result["status"] == "completed" for result in results))),
        ("failed", str(sum(result["status"] == "failed" for result in results))),
        ("usage events, by id", str(len({str(event["id"]) for event in ended.evidence.billed}))),
        ("kills", str(ended.killed)),
        ("seconds", f"{ended.seconds:.0f}"),
    ):
        table.add_row(*row)
    console.print(table)
    breaches = fleet_run.judge(ended)
    for breach in breaches:
        console.print(f"BREACH: {breach}", style="red", markup=False)
    console.print("every accepted job ended once, none is billed twice" if not breaches else "the bar is MISSED")
    return not breaches
