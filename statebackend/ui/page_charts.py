"""Drawings of the page as plain numbers, which the templates write as SVG. Nothing is drawn here.

Widths and heights are per cent or cells, so a drawing fits a phone and a wide screen. No drawing
has more shapes than there are pixels for: a thousand subtasks are six paths.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Bar", "Heat", "Segment", "bars", "heat", "quantile", "segments"]

_LEVELS: Final = (1.25, 1.6, 2.2, 3.5, 6.0)  # times the median: above each, the next colour
_SHARES: Final = (0.05, 0.12, 0.25, 0.4, 0.6)  # of the way from the median to the highest: as well
_NOISE_MS: Final = 20.0  # no skew worth a look
_COLUMNS: Final = 100


@dataclass(frozen=True)
class Bar:
    """One bar of a chart of columns, in per cent of its width and height.

    Attributes:
        parts: from the bottom up: class, bottom and height.
    """

    x: float
    width: float
    parts: list[tuple[str, float, float]]
    title: str
    link: str


@dataclass(frozen=True)
class Segment:
    """One piece of a row, in per cent of its width."""

    kind: str
    x: float
    width: float
    title: str


@dataclass(frozen=True)
class Heat:
    """A strip of cells, one for each subtask.

    Attributes:
        columns, rows: its size in cells.
        paths: a path for each colour, in cells; the colour's number, 6 for those without a value,
            7 for those of them that have not begun.
    """

    columns: int
    rows: int
    paths: list[tuple[int, str]]


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of values in ascending order: of four the third is the median, as in the records' figures."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bars(
    columns: Sequence[tuple[Mapping[str, float], str, str]], *, least: int = 24
) -> tuple[list[Bar], float]:
    """Columns side by side, and the value at the top of the chart.

    Args:
        columns: by kind, from the bottom up, how high; a title; a link.
        least: so many have room at least.
    """
    top = max((sum(parts.values()) for parts, _, _ in columns), default=0.0) or 1.0
    step = 100 / max(least, len(columns))
    made = []
    for number, (parts, title, link) in enumerate(columns):
        at, stacked = 100.0, []
        for kind, amount in parts.items():
            height = 100 * amount / top
            at -= height
            stacked.append((kind, round(at, 2), round(height, 2)))
        made.append(Bar(round(number * step, 3), round(0.8 * step, 3), stacked, title, link))
    return made, top


def segments(phases: Sequence[tuple[str, float, str]], whole: float) -> list[Segment]:
    """Phases one after the other.

    Args:
        phases: kind, length, title. whole: what 100 per cent are.
    """
    at, made = 0.0, []
    for kind, length, title in phases:
        if length > 0:
            made.append(
                Segment(kind, round(100 * at / whole, 2), round(100 * length / whole, 2), title)
            )
        at += length
    return made


def heat(values: Sequence[float | None], idle: Container[int] = ()) -> Heat:
    """How far each value is above the median: skew is what stands out, not the size.

    The warmest colours are for what comes near the highest, or one slow subtask of a thousand would
    be lost among many that took some milliseconds more than others.

    Args:
        idle: which of those without a value have not begun.
    """
    known = sorted(value for value in values if value is not None)
    median = quantile(known, 0.5) if known else 0.0
    columns = max(1, min(_COLUMNS, len(values)))
    cells: dict[int, list[str]] = {}
    for number, value in enumerate(values):
        row, column = divmod(number, columns)
        level = _level(value, median, known) + (value is None and number in idle)
        cells.setdefault(level, []).append(f"M{column} {row}h1v1h-1z")
    return Heat(
        columns,
        math.ceil(len(values) / columns) or 1,
        [(level, "".join(cells[level])) for level in sorted(cells)],
    )


def _level(value: float | None, median: float, ordered: Sequence[float]) -> int:
    if value is None:
        return len(_LEVELS) + 1
    if value - median < _NOISE_MS:
        return 0
    span = ordered[-1] - median
    return min(
        sum(value > times * median for times in _LEVELS),
        sum(value - median > share * span for share in _SHARES),
    )
