"""The bars of what takes long, all with one look: how much of how much, how fast, how long yet.

They are on standard error, and only if that is a terminal. In a notebook they are below the cell.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from statebackend import work_done
from statebackend.texts import size

__all__ = ["Bars", "Unit", "progress_bar", "progress_bars"]

Unit: TypeAlias = Literal["bytes", "objects", "rows", "subtasks", "steps"]

_SLOW: Final = 10  # a second: below it, a rate has a decimal


class _Done(ProgressColumn):
    """3/8 subtasks; 1,200 rows, where nobody knows of how many."""

    def render(self, task: Task) -> Text:
        """See `ProgressColumn`."""
        unit = task.fields["unit"]
        amounts = [task.completed] if task.total is None else [task.completed, task.total]
        if unit == "bytes":
            return Text("/".join(size(int(one)) for one in amounts), "progress.download")
        return Text(f"{'/'.join(f'{int(one):,}' for one in amounts)} {unit}", "progress.download")


class _Rate(ProgressColumn):
    """So much a second, of late."""

    def render(self, task: Task) -> Text:
        """See `ProgressColumn`."""
        speed, unit = task.finished_speed or task.speed, task.fields["unit"]
        if not speed:
            return Text("")
        if unit == "bytes":
            return Text(f"{size(int(speed))}/s", "progress.data.speed")
        decimals = 1 if speed < _SLOW else 0
        return Text(f"{speed:,.{decimals}f} {unit}/s", "progress.data.speed")


class _Time(ProgressColumn):
    """The time left; where nobody knows how much there is, the time that it took so far."""

    max_refresh = 0.5  # else it jitters

    def __init__(self) -> None:
        super().__init__()
        self._left = TimeRemainingColumn(elapsed_when_finished=True)
        self._elapsed = TimeElapsedColumn()

    def render(self, task: Task) -> Text:
        """See `ProgressColumn`."""
        return (self._elapsed if task.total is None else self._left).render(task)


class Bars:
    """Bars that are shown, one below the other."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown

    def add(self, title: str, unit: Unit) -> work_done.Progress:
        """Add a bar; call what this returns to move it."""
        task = self._shown.add_task(escape(title), total=None, unit=unit)

        def tell(done: int, total: int) -> None:
            self._shown.update(task, completed=done, total=total or None)

        return tell

    def say(self, line: str) -> None:
        """A line that stays, above the bars."""
        if self._shown.disable:
            print(line, file=sys.stderr, flush=True)
        else:
            self._shown.console.print(Text(line))


@contextmanager
def progress_bars(*, quiet: bool = False) -> Iterator[Bars]:
    """Shows bars while the block runs, on a terminal or in a notebook.

    They go when it ends: what stays is the answer.

    Args:
        quiet: show none.
    """
    console = Console(stderr=True)
    looked_at = console.is_jupyter or sys.stderr.isatty()
    shown = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        _Done(),
        _Rate(),
        _Time(),
        console=console,
        transient=not console.is_jupyter,
        redirect_stdout=False,  # an answer that is printed meanwhile stays one
        disable=quiet or not looked_at,
    )
    with shown:
        try:
            yield Bars(shown)
        finally:
            shown.refresh()  # in a notebook nothing else shows the end


@contextmanager
def progress_bar(
    title: str, unit: Unit = "bytes", *, quiet: bool = False
) -> Iterator[work_done.Progress]:
    """Shows a bar meanwhile, on a terminal or in a notebook: hand what it gives on as `progress=`.

    Needs the extra ``cli``, and in a notebook the package ipywidgets.

    Args:
        title: before the bar.
        unit: of what is counted; each function says what that is.
        quiet: show none.
    """
    with progress_bars(quiet=quiet) as bars:
        yield bars.add(title, unit)
