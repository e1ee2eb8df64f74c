"""The demo itself: prepare, run, kill, run, kill, run, compare.

Nothing here takes part in the stream. It starts drivers, watches Spark's commits in the checkpoint
location, kills, and reads what the drivers left behind.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec
import pandas as pd
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.flights import batch, check, data, show
from examples.flights.child import Driver
from examples.flights.workdir import WorkDir, size_bytes
from statebackend import RestoreReport

SUBTASKS: Final = 4
_POLL_S: Final = 0.05
_INTO_EPOCH_S: Final = 0.3  # how far into the next epoch a driver is killed
_STALLED_S: Final = 300.0


class DemoError(Exception):
    """The demo did not show what it should."""


@dataclass
class Run:
    """One driver's life, as seen from outside. Epochs are counted from 1 here."""

    number: int
    started: str
    first_epoch: int
    last_epoch: int = 0
    cut_off: int = 0  # the epoch that was begun and not done when it was killed; else the last
    aircraft: int = 0
    durable_bytes: int = 0
    local_bytes: int = 0
    first_epoch_s: float = 0.0
    wall_s: float = 0.0
    restores: list[RestoreReport] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """Everything that is shown at the end."""

    runs: list[Run]
    comparison: check.Comparison
    history: check.History
    phases_s: dict[str, float]

    @property
    def complaints(self) -> list[str]:
        """What is not as promised; empty when all is well."""
        found = []
        for run, source in ((self.runs[1], "local"), (self.runs[2], "durable")):
            sources = sorted(report.source for report in run.restores)
            if sources != [source] * SUBTASKS:
                found.append(f"Run {run.number} came back from {sources}, not from {source}.")
        read_bytes = sum(report.durable_bytes for report in self.runs[1].restores)
        reads = sum(report.durable_reads for report in self.runs[1].restores)
        if read_bytes or reads:
            found.append(f"Run 2 had local copies, but read {read_bytes} bytes durably.")
        if not self.history.ok:
            found.append(f"Epochs were lost or counted twice: {self.history}.")
        if not self.comparison.ok:
            found.append("The sink and the batch computation differ.")
        return found


def play(work: WorkDir, files: int, console: Console) -> Outcome:
    """All of it.

    Raises:
        DemoError: a driver failed or stood still.
    """
    begun_s = time.monotonic()
    flights, nameless = data.read_flights()
    data.write_feed(flights, work.feed, files)
    show.introduce(console, flights, nameless, files)
    phases_s = {"prepare": time.monotonic() - begun_s}
    runs = _stream(work, files, console)
    phases_s |= {f"run {run.number}": run.wall_s for run in runs}
    begun_s = time.monotonic()
    outcome = _compare(work, flights, files, runs, phases_s)
    phases_s["compare"] = time.monotonic() - begun_s
    return outcome


def _compare(
    work: WorkDir, flights: pd.DataFrame, files: int, runs: list[Run], phases_s: dict[str, float]
) -> Outcome:
    sink = pq.read_table(work.result)
    tailnums, file_of_row = flights["tailnum"], data.split(flights, files)
    ends = work.files_by_epoch()
    for run in runs:
        run.aircraft = tailnums[file_of_row < ends[run.last_epoch - 1]].nunique()
    history = check.check_history(file_of_row, tailnums, ends, sink)
    return Outcome(runs, check.compare(batch.by_aircraft(flights), sink), history, phases_s)


def _stream(work: WorkDir, files: int, console: Console) -> list[Run]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("epoch"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("run 1: starting Spark", total=files)

        def advance(run: Run) -> None:
            done = work.epochs_done()
            told = "streaming" if done >= run.first_epoch else "starting Spark"
            progress.update(bar, completed=done, description=f"run {run.number}: {told}")

        first = _run(work, 1, "fresh", advance, kill_after=files // 3)
        show.killed(progress.console, first, "Its local copies stay.")
        second = _run(work, 2, "copies kept", advance, kill_after=2 * files // 3)
        shutil.rmtree(work.local)
        show.killed(progress.console, second, "Its local copies are deleted.")
        third = _run(work, 3, "copies deleted", advance, kill_after=None)
        progress.update(bar, total=third.last_epoch, description="done")
    return [first, second, third]


def _run(
    work: WorkDir,
    number: int,
    started: str,
    advance: Callable[[Run], None],
    *,
    kill_after: int | None,
) -> Run:
    """One driver, to the end of the stream or until it has committed so many epochs."""
    run = Run(number, started, first_epoch=work.epochs_done() + 1)
    begun_s = moved_s = time.monotonic()
    done = run.first_epoch - 1
    with Driver(work, number) as driver:
        while (code := driver.exit_code()) is None:
            advance(run)
            if work.epochs_done() > done:
                done, moved_s = work.epochs_done(), time.monotonic()
                run.first_epoch_s = run.first_epoch_s or moved_s - begun_s
            if kill_after is not None and kill_after <= done < work.epochs_planned():
                time.sleep(_INTO_EPOCH_S)
                driver.kill()
                break
            if time.monotonic() - moved_s > _STALLED_S:
                raise DemoError(f"Run {number} has not finished an epoch for {_STALLED_S:g} s.")
            time.sleep(_POLL_S)
    if code is not None and (code != 0 or kill_after is not None):
        raise DemoError(f"The driver of run {number} ended by itself, with code {code}.")
    advance(run)
    run.last_epoch, run.cut_off = work.epochs_done(), work.epochs_planned()
    run.wall_s = time.monotonic() - begun_s
    run.durable_bytes, run.local_bytes = size_bytes(work.store), size_bytes(work.local)
    run.restores = msgspec.json.decode(work.report(number).read_bytes(), type=list[RestoreReport])
    return run
