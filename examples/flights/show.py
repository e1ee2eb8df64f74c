"""What is printed: short sentences and one table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from examples.flights.check import Comparison

if TYPE_CHECKING:
    from examples.flights.demo import Outcome, Run

_EXAMPLES = 5


def introduce(console: Console, flights: pd.DataFrame, nameless: int, files: int) -> None:
    """What the stream is made of."""
    cancelled = int(flights["dep_delay"].isna().sum())
    diverted = int(flights["arr_delay"].isna().sum()) - cancelled
    console.print(
        f"{len(flights) + nameless:,} departures from New York in 2013. {nameless:,} name no "
        f"aircraft and are left out: the aircraft is the key.\n"
        f"{cancelled:,} were cancelled: legs that were not flown. {diverted:,} were diverted: "
        f"flown, without an arrival.\n"
        f"{len(flights):,} rows in the order of the timetable, in {files} files: one file, one "
        f"epoch.",
    )


def killed(console: Console, run: Run, then: str) -> None:
    """A driver's end."""
    when = f"in epoch {run.cut_off}" if run.cut_off > run.last_epoch else "between two epochs"
    console.print(f"Run {run.number}: driver killed with SIGKILL {when}. {then}")


def conclude(console: Console, outcome: Outcome) -> None:
    """The table, what it means, and what is wrong."""
    console.print(_table(outcome))
    _fresh, *restarted = outcome.runs
    for run in restarted:
        console.print(_recovery(run))
    history, comparison = outcome.history, outcome.comparison
    if history.ok:
        console.print(
            f"No epoch was lost or counted twice: {history.rows:,} rows in the sink, one per "
            f"aircraft and epoch, each with the legs that the input has up to there.",
        )
    _differences(console, comparison)
    if comparison.ok:
        console.print(
            f"The last row of each aircraft equals the batch computation in every column: "
            f"{comparison.equal:,} rows equal, 0 differ, 0 missing.",
        )
    for complaint in outcome.complaints:
        console.print(f"WRONG: {complaint}", style="bold red")
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in outcome.phases_s.items())
    console.print(f"Time: {spent}; {sum(outcome.phases_s.values()):.0f} s.")


def _recovery(run: Run) -> str:
    read_bytes = sum(report.durable_bytes for report in run.restores)
    reads = sum(report.durable_reads for report in run.restores)
    if read_bytes or reads:
        what = f"{size(read_bytes)} of state from the durable store, in {reads} slices"
        return f"Run {run.number} ({run.started}) read {what}."
    return f"Run {run.number} ({run.started}) read 0 bytes of state from the durable store."


def _table(outcome: Outcome) -> Table:
    runs = outcome.runs
    table = Table(title="Three runs of one stream", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(f"run {run.number}", justify="right")

    def line(name: str, values: list[str]) -> None:
        table.add_row(name, *values)

    line("start", [run.started for run in runs])
    line("epochs", [f"{run.first_epoch} to {run.last_epoch}" for run in runs])
    line("aircraft in state", [f"{run.aircraft:,}" for run in runs])
    line("durable store", [size(run.durable_bytes) for run in runs])
    line("local copies", [size(run.local_bytes) for run in runs])
    table.add_section()
    line("subtasks came back from", [_sources(run) for run in runs])
    line("read locally", _sums(runs, "local_bytes"))
    line("read durably", _sums(runs, "durable_bytes"))
    line("slowest recovery", ["-", *map(_slowest, runs[1:])])
    line("first epoch done after", [f"{r.first_epoch_s:.1f} s" for r in runs])
    line("whole run", [f"{run.wall_s:.1f} s" for run in runs])
    table.add_section()
    comparison = outcome.comparison
    of = comparison.equal + len(comparison.differing) + len(comparison.missing)
    line("rows equal to the batch", ["", "", f"{comparison.equal:,} of {of:,}"])
    return table


def _sources(run: Run) -> str:
    sources = sorted({report.source for report in run.restores})
    if sources == ["empty"]:
        return "-"
    return ", ".join(f"{sum(r.source == s for r in run.restores)} {s}" for s in sources)


def _sums(runs: list[Run], name: str) -> list[str]:
    # A first run has nothing to come back from.
    return ["-"] + [size(sum(getattr(r, name) for r in run.restores)) for run in runs[1:]]


def _slowest(run: Run) -> str:
    return f"{max((r.seconds for r in run.restores), default=0) * 1000:.0f} ms"


def _differences(console: Console, comparison: Comparison) -> None:
    def few(what: str, found: list[Any]) -> None:
        if found:
            console.print(f"{len(found):,} {what}, such as {found[:_EXAMPLES]}")

    few("aircraft are missing in the sink", comparison.missing)
    few("aircraft in the sink are not in the data", comparison.unexpected)
    for expected, found in comparison.differing[:_EXAMPLES]:
        columns = [name for name in expected if expected[name] != found.get(name)]
        for name in columns:
            console.print(
                f"{expected['tailnum']}, {name}: expected {expected[name]}, found "
                f"{found.get(name)}",
            )
    if comparison.differing:
        console.print(f"{len(comparison.differing):,} rows differ.")


def size(size_bytes: int) -> str:
    """Bytes, for people."""
    if size_bytes < 1000:
        return f"{size_bytes} B"
    if size_bytes < 1_000_000:
        return f"{size_bytes / 1000:.0f} kB"
    return f"{size_bytes / 1_000_000:.1f} MB"
