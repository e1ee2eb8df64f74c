"""Figures over many checkpoints: least, median, 95 per cent, most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

from recovery.inspect.history import CheckpointFigures
from statebackend.ui.job_figures import SummaryLine
from statebackend.ui.page_charts import quantile

__all__ = ["boxes", "summary_lines"]

_Unit = Literal["ms", "bytes", "rows"]


def _phase(name: str) -> Callable[[CheckpointFigures], float | None]:
    return lambda one: one.phases_ms.get(name)


_FIGURES: Final[tuple[tuple[str, _Unit, Callable[[CheckpointFigures], float | None]], ...]] = (
    ("end to end", "ms", lambda one: one.total_ms),
    ("until all subtasks have saved", "ms", _phase("acks")),
    ("commit", "ms", _phase("commit")),
    ("longest start delay", "ms", _phase("start_delay")),
    ("longest alignment", "ms", _phase("alignment")),
    ("longest read of input", "ms", _phase("read")),
    ("longest restore or opening", "ms", _phase("restore")),
    ("longest processing", "ms", _phase("process")),
    ("longest freeze", "ms", lambda one: one.phases_ms.get("snapshot", one.phases_ms.get("sync"))),
    ("longest persist", "ms", _phase("async")),
    ("changed bytes", "bytes", lambda one: one.delta_bytes),
    ("changes", "rows", lambda one: one.delta_rows),
    ("rows in", "rows", lambda one: one.rows),
    ("late rows", "rows", lambda one: one.late_rows),
    ("state", "bytes", lambda one: one.state_bytes),
)


def summary_lines(checkpoints: Sequence[CheckpointFigures]) -> list[SummaryLine]:
    """Each figure that any of the checkpoints has."""
    lines = []
    for name, unit, figure in _FIGURES:
        known = sorted(value for one in checkpoints if (value := figure(one)) is not None)
        if not known or not known[-1]:
            continue
        median, p95 = quantile(known, 0.5), quantile(known, 0.95)
        lines.append(
            SummaryLine(
                name=name, unit=unit, least=known[0], median=median, p95=p95, most=known[-1]
            )
        )
    return lines


def boxes(line: SummaryLine) -> tuple[float, float, float, float]:
    """Of its drawing in per cent: where the line begins, its length; the same of the box."""
    top = line.most or 1.0
    begin, box = 100 * line.least / top, 100 * line.median / top
    width = 100 * (line.p95 - line.median) / top
    return round(begin, 2), round(100 - begin, 2), round(box, 2), round(max(width, 0.5), 2)
