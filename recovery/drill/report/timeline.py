"""A drill over time: which mark stands where on the page's lanes, and what it says.

Places are percent of the width, so that the page can be as wide as it likes; rows within a lane are
counted from 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from recovery.drill.report.drill_report import DrillReport, DriverLife, Recovery, Struck
from recovery.drill.report.wording import after, how_it_went
from statebackend.texts import seconds, size

__all__ = ["Bar", "Lane", "Mark", "Row", "Timeline", "timeline"]

TICKS_MAX: Final = 8
SUBTASK_ROWS_MAX: Final = 48
LABEL_WIDTH: Final = 7.0  # percent: an epoch's number on a telephone


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happened at one moment. `shape` says what it is, beside its colour."""

    x: float
    shape: str
    title: str
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Something that lasted."""

    x: float
    width: float
    kind: str
    title: str
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a lane, with its name in front."""

    label: str
    bars: Sequence[Bar] = ()
    marks: Sequence[Mark] = ()


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Rows of one kind."""

    name: str
    rows: Sequence[Row]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All lanes over one axis of seconds. `ticks`: place and text."""

    lanes: Sequence[Lane]
    ticks: Sequence[tuple[float, str]]


class _Scale:
    """From seconds to percent of the width; a margin keeps the last marks whole."""

    def __init__(self, end_s: float) -> None:
        self.end_s = end_s
        self._full_s = max(end_s, 0.001) * 1.02

    def at(self, at_s: float) -> float:
        return round(100 * min(max(at_s, 0.0) / self._full_s, 1.0), 3)

    def span(self, from_s: float, to_s: float) -> tuple[float, float]:
        x = self.at(from_s)
        return x, round(max(self.at(to_s) - x, 0.0), 3)

    def ticks(self) -> list[tuple[float, str]]:
        """Round seconds, at most `TICKS_MAX`."""
        raw = max(self.end_s, 0.001) / TICKS_MAX
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(times * power for times in (1, 2, 5, 10) if times * power >= raw)
        digits = max(0, -math.floor(math.log10(step)))
        numbers = range(int(self.end_s / step + 1e-9) + 1)
        return [(self.at(n * step), f"{n * step:.{digits}f} s") for n in numbers]


def timeline(report: DrillReport) -> Timeline:
    """The marks of a report. Lanes without any are left out."""
    scale = _Scale(_end_s(report))
    lanes = (
        Lane(name="Epochs", rows=[_epochs(report, scale)] if report.epochs else []),
        Lane(name="Drivers", rows=list(_drivers(report.drivers, scale))),
        Lane(name="Faults", rows=list(_faults(report.faults, scale))),
        Lane(name="Recoveries", rows=list(_recoveries(report.recoveries, scale))),
    )
    return Timeline(lanes=[lane for lane in lanes if lane.rows], ticks=scale.ticks())


def _end_s(report: DrillReport) -> float:
    """The last moment that is told; not later than the drill's own end if that is."""
    times = [report.duration_s]
    times += [one.at_s for one in report.epochs]
    times += [one.ended_s for one in report.drivers if one.ended_s is not None]
    times += [one.until_s or one.at_s for one in report.faults]
    times += [one.at_s for one in report.recoveries]
    return max(times)


def _epochs(report: DrillReport, scale: _Scale) -> Row:
    """A tick for each; numbers where there is room for them."""
    marks: list[Mark] = []
    free_from = 0.0
    for one in report.epochs:
        x = scale.at(one.at_s)
        title = f"epoch {one.epoch}, committed at {one.at_s:.1f} s by driver {one.driver}"
        label = str(one.epoch) if x >= free_from else ""
        if label:
            free_from = x + LABEL_WIDTH
        marks.append(Mark(x=x, shape="tick", title=title, label=label))
    return Row(label="committed", marks=marks)


def _drivers(lives: Sequence[DriverLife], scale: _Scale) -> Iterable[Row]:
    """One after another in a row; those that lived at once in rows of their own."""
    rows: list[list[DriverLife]] = []
    for life in sorted(lives, key=lambda one: one.started_s):
        for row in rows:
            if row[-1].ended_s is not None and row[-1].ended_s <= life.started_s:
                row.append(life)
                break
        else:
            rows.append([life])
    for number, row in enumerate(rows):
        yield Row(
            label="driver" if number == 0 else "at once",
            bars=[bar for life in row for bar in _life(life, scale)],
            marks=[
                Mark(
                    x=scale.at(life.ended_s),
                    shape=life.ending,
                    title=f"driver {life.number} {life.ending} at {life.ended_s:.1f} s",
                )
                for life in row
                if life.ended_s is not None
            ],
        )


def _life(life: DriverLife, scale: _Scale) -> Iterable[Bar]:
    end_s = scale.end_s if life.ended_s is None else life.ended_s
    ready_s = end_s if life.ready_s is None else life.ready_s
    x, width = scale.span(life.started_s, ready_s)
    starting = f"driver {life.number} starting: {seconds(ready_s - life.started_s)}"
    yield Bar(x=x, width=width, kind="starting", title=starting)
    if life.ready_s is not None:
        x, width = scale.span(ready_s, end_s)
        title = f"driver {life.number} running: {seconds(end_s - ready_s)}, {life.ending}"
        yield Bar(x=x, width=width, kind="running", title=title, label=str(life.number))


def _faults(faults: Sequence[Struck], scale: _Scale) -> Iterable[Row]:
    """A row for each kind of fault, in the order in which they first came."""
    for name in dict.fromkeys(one.fault for one in faults):
        of_kind = [one for one in faults if one.fault == name]
        bars = [bar for one in of_kind for bar in _fault_bars(one, scale)]
        marks = [
            Mark(
                x=scale.at(one.at_s),
                shape="skipped" if one.skipped else "struck",
                title=f"{name} at {one.at_s:.1f} s, {after(one)}"
                + (f", {one.target}" if one.target else "")
                + f": {how_it_went(one)}",
            )
            for one in of_kind
        ]
        yield Row(label=name, bars=bars, marks=marks)


def _fault_bars(one: Struck, scale: _Scale) -> Iterable[Bar]:
    if one.recovered_s is not None and not one.skipped:
        x, width = scale.span(one.at_s, one.at_s + one.recovered_s)
        title = f"{one.fault}: {how_it_went(one)}"
        yield Bar(x=x, width=width, kind="recovering", title=title)
    if one.until_s is not None:
        x, width = scale.span(one.at_s, one.until_s)
        title = f"{one.fault}: lasted {seconds(one.until_s - one.at_s)}"
        yield Bar(x=x, width=width, kind="lasting", title=title)


def _recoveries(recoveries: Sequence[Recovery], scale: _Scale) -> Iterable[Row]:
    """A row for each subtask; with very many, a row for each operator."""

    def whose(one: Recovery) -> tuple[str, int]:
        return one.report.operator, one.report.subtask

    subtasks = sorted({whose(one) for one in recoveries})
    if len(subtasks) > SUBTASK_ROWS_MAX:
        for operator in sorted({operator for operator, _ in subtasks}):
            mine = [one for one in recoveries if one.report.operator == operator]
            yield Row(label=operator, marks=[_dot(one, scale) for one in mine])
        return
    for operator, subtask in subtasks:
        mine = [one for one in recoveries if whose(one) == (operator, subtask)]
        yield Row(label=f"{operator} {subtask}", marks=[_dot(one, scale) for one in mine])


def _dot(one: Recovery, scale: _Scale) -> Mark:
    report = one.report
    title = (
        f"{report.operator} {report.subtask} at {one.at_s:.1f} s: {report.source}, epoch "
        f"{report.epoch}, {seconds(report.seconds)}, {size(report.local_bytes)} local, "
        f"{size(report.durable_bytes)} durable"
    )
    return Mark(x=scale.at(one.at_s), shape=report.source, title=title)
