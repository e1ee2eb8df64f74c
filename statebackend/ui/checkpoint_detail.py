"""What the page of one checkpoint shows: per operator a line on skew, a strip, and some rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from recovery.inspect.history import CheckpointFigures, OperatorFigures, SubtaskFigures
from statebackend.texts import count, seconds, size
from statebackend.ui.page_charts import Heat, Segment, heat, quantile, segments

__all__ = ["ROWS", "OperatorSection", "facts_of", "milliseconds", "place_text", "section"]

ROWS: Final = 25
_SKEWED: Final = 2.0  # times the median
_SKEWED_MS: Final = 50.0
_WAITED_MS: Final = 1_000.0  # for a core: less is the start of tasks
_SHARE: Final = 0.25  # of the slowest: what took less holds nothing up
# In their order. The field's words for the phases that workers measure.
_PHASES: Final = {
    "start_delay": ("start", "start delay"),
    "read": ("read", "read input"),
    "restore": ("restore", "open or restore"),
    "process": ("process", "process"),
    "alignment": ("alignment", "alignment"),
    "snapshot": ("freeze", "freeze"),
    "sync": ("freeze", "freeze"),
    "async": ("persist", "persist"),
    "base": ("persist", "base"),
    "close": ("other", "close"),
}


@dataclass(frozen=True)
class _Column:
    """One column of the table: what it is called, what it shows, how it is sorted."""

    name: str
    head: str
    value: Callable[[SubtaskFigures], Any]
    text: Callable[[Any], str]
    number: bool = True


@dataclass
class OperatorSection:
    """One operator on the page of a checkpoint."""

    uid: str
    subtasks: int
    facts: list[tuple[str, str]]
    skew: str = ""
    skewed: bool = False
    missing: int = 0
    heat: Heat | None = None
    values: str = ""
    rows: list[_Row] = field(default_factory=list)
    columns: list[tuple[str, str, bool]] = field(default_factory=list)
    kinds: list[tuple[str, str]] = field(default_factory=list)
    query: str = ""
    previous: int | None = None
    next: int | None = None
    range: str = ""


@dataclass(frozen=True)
class _Row:
    subtask: int
    cells: list[tuple[str, bool]]
    segments: list[Segment]
    slow: bool
    missing: bool


def milliseconds(value: float | None) -> str:
    """A span for people; empty where it is not known."""
    if value is None:
        return ""
    return f"{value:.1f} ms" if 0 < value < 9.95 else seconds(value / 1000)


def facts_of(one: CheckpointFigures) -> list[tuple[str, str]]:
    """The figures of a whole checkpoint."""
    phases = {
        _PHASES.get(name, ("", name))[1]: milliseconds(took) for name, took in one.phases_ms.items()
    }
    until, commit = phases.pop("acks", ""), phases.pop("commit", "")
    return [
        ("end to end", milliseconds(one.total_ms)),
        ("until all have saved", until),
        ("commit", commit),
        *((f"longest {name}", text) for name, text in phases.items()),
        ("rows in", _amount(one.rows)),
        ("changes", _amount(one.delta_rows)),
        ("changed bytes", size(one.delta_bytes)),
        ("bases", str(one.bases or "")),
        ("late rows", _amount(one.late_rows or None)),
        ("restored subtasks", str(one.restores or "")),
        ("driver generation", str(one.generation)),
    ]


def section(
    one: OperatorFigures, sort: str, begin: int, *, tells_begins: bool = False
) -> OperatorSection:
    """An operator, with so many rows from ``begin`` on, sorted by a column, the most first.

    Args:
        tells_begins: whether a subtask that ran nowhere yet has not begun.
    """
    made = OperatorSection(one.uid, one.subtasks, _operator_facts(one))
    slow_ms = _judge(made, one)
    if made.skew and tells_begins:
        made.skew += _waited_for_a_core(one)
    if not one.by_subtask:
        return made
    subtasks = _with_missing(one.by_subtask, one.subtasks)
    times = [_took_ms(part) for part in subtasks]
    made.missing = sum(time is None for time in times)
    idle = {part.subtask for part in subtasks if tells_begins and _is_idle(part)}
    made.heat = heat(times, idle)
    made.values = " ".join(milliseconds(time).replace(" ", "_") or "-" for time in times)
    columns = _columns(subtasks)
    made.columns = [(column.name, column.head, column.number) for column in columns]
    ordered = _sorted(subtasks, columns, sort)
    begin = max(0, min(begin, len(ordered) - 1))
    shown = ordered[begin : begin + ROWS]
    # What a task of a micro-batch waited for a core would leave no room for its phases.
    waited = not tells_begins
    whole = max((_length(part, waited=waited) for part in subtasks), default=0.0) or 1.0
    made.rows = [
        _row(
            _cells(part, columns, "not begun" if part.subtask in idle else "not yet"),
            part,
            _drawn(part, whole, waited=waited),
            slow_ms,
        )
        for part in shown
    ]
    drawn = {name for part in shown for name, took in _lane(part, waited=waited).items() if took}
    made.kinds = list(dict.fromkeys(_PHASES[name] for name in _PHASES if name in drawn))
    if begin > 0:
        made.previous = max(0, begin - ROWS)
    if begin + ROWS < len(ordered):
        made.next = begin + ROWS
    made.range = f"{begin + 1} to {begin + len(shown)} of {len(ordered)}"
    return made


def _operator_facts(one: OperatorFigures) -> list[tuple[str, str]]:
    return [
        ("subtasks", f"{one.subtasks:,}"),
        ("median end to end", milliseconds(one.ack_median_ms)),
        ("95 %", milliseconds(one.ack_p95_ms)),
        ("maximum", milliseconds(one.acks_ms)),
        ("commit", milliseconds(one.commit_ms)),
        ("changes", _amount(one.delta_rows)),
        ("changed bytes", size(one.delta_bytes)),
        ("state", size(one.state_bytes) if one.state_bytes is not None else ""),
        ("bases", f"{one.bases}, {size(one.base_bytes)}" if one.bases else ""),
    ]


def _judge(made: OperatorSection, one: OperatorFigures) -> float:
    """Say which subtask is slow, if one is; from where on a subtask is called slow."""
    times = sorted(time for p in one.by_subtask if (time := _took_ms(p)) is not None)
    median = one.ack_median_ms if one.ack_median_ms is not None else 0.0
    most, slowest, where = one.acks_ms, one.slowest, one.slowest_on
    if times:
        median, most = quantile(times, 0.5), times[-1]
        found = max(one.by_subtask, key=lambda part: _took_ms(part) or -1.0)
        slowest, where = found.subtask, _place(found)
    slow_ms = max(_SKEWED * median, median + _SKEWED_MS, _SHARE * (most or 0.0))
    if most is None or slowest is None or one.subtasks < 2:
        return slow_ms
    against = f"{most / median:.1f} times the median" if median else "the median is 0"
    on = f" ({place_text(where)})" if where else ""
    if not times:  # with what it waited for a core, which nobody knows any more
        made.skew = f"The slowest was subtask {slowest}{on}."
        return slow_ms
    stands_out = most >= slow_ms
    phase, because = _because(one.by_subtask, slowest)
    # A start takes its time, and so does a batch without rows: neither says how keys are spread.
    made.skewed = stands_out and phase != "restore" and not _has_no_rows(one.by_subtask)
    head = "Skewed: subtask" if made.skewed else "The slowest was subtask"
    head = head if stands_out else "Even: the slowest subtask is"
    text = f"{head} {slowest}{on}{' took' if made.skewed else ', with'} {milliseconds(most)}"
    made.skew = f"{text}, {against} ({milliseconds(median)})."
    if stands_out:
        number = sum(time >= slow_ms for time in times)
        if number > 1:
            made.skew += f" {count(number, 'subtask')} took {milliseconds(slow_ms)} or more."
        made.skew += because
    return slow_ms


def _has_no_rows(parts: Sequence[SubtaskFigures]) -> bool:
    """Whether it is known that no row came in."""
    return all(part.rows == 0 for part in parts)


def _waited_for_a_core(one: OperatorFigures) -> str:
    """Where tasks mostly waited for others to end: then no subtask by itself is the trouble."""
    times = [time for part in one.by_subtask if (time := _took_ms(part)) is not None]
    delays = sorted(p.start_delay_ms for p in one.by_subtask if p.start_delay_ms is not None)
    waited_ms = quantile(delays, 0.5) if delays else 0.0
    if waited_ms < max([_WAITED_MS, *times]):
        return ""
    waited = (
        f" But subtasks waited longer for a free core: {milliseconds(waited_ms)} at the median."
    )
    return f"{waited} More cores, or fewer subtasks, help most."


def _because(parts: Sequence[SubtaskFigures], slowest: int) -> tuple[str, str]:
    """The phase in which the slowest subtask lost most against the median, and a sentence on it."""
    own = next((part for part in parts if part.subtask == slowest), None)
    if own is None:
        return "", ""
    lost = []
    for name, took in _phases(own).items():
        if name == "start_delay":
            continue
        others = sorted(_phases(part).get(name, 0.0) for part in parts)
        lost.append((took - quantile(others, 0.5), name))
    if not lost or max(lost)[0] <= 0:
        return "", ""
    more_ms, phase = max(lost)
    rows = sorted(part.rows or 0 for part in parts)
    said = f" It lost {milliseconds(more_ms)} in {_PHASES.get(phase, ('', phase))[1]}"
    if own.rows and own.rows > 2 * max(1, quantile(rows, 0.5)):
        times = own.rows / max(1, quantile(rows, 0.5))
        return phase, f"{said}, and got {times:.1f} times as many rows as the median."
    return phase, f"{said}."


def _with_missing(parts: Sequence[SubtaskFigures], expected: int) -> list[SubtaskFigures]:
    by_number = {part.subtask: part for part in parts}
    return [by_number.get(number) or SubtaskFigures(subtask=number) for number in range(expected)]


def _phases(part: SubtaskFigures) -> dict[str, float]:
    """In the order in which they come."""
    found = {} if part.start_delay_ms is None else {"start_delay": part.start_delay_ms}
    found.update((name, part.timings_ms[name]) for name in _PHASES if name in part.timings_ms)
    if not found.keys() - {"start_delay"}:
        named = (
            ("alignment", part.alignment_ms),
            ("sync", part.freeze_ms),
            ("async", part.persist_ms),
        )
        found.update((name, took) for name, took in named if took is not None)
    return found


def _took_ms(part: SubtaskFigures) -> float | None:
    """A subtask's own time: of a micro-batch without what its task waited for a core.

    A barrier that comes late to a subtask of a continuous job was held up by another.
    """
    if part.end_to_end_ms is None:
        return None
    return max(0.0, part.end_to_end_ms - (part.start_delay_ms or 0.0))


def _lane(part: SubtaskFigures, *, waited: bool) -> dict[str, float]:
    """The phases that are drawn."""
    phases = _phases(part)
    return phases if waited else {name: phases[name] for name in phases if name != "start_delay"}


def _length(part: SubtaskFigures, *, waited: bool) -> float:
    own_ms = part.end_to_end_ms if waited else _took_ms(part)
    return max(sum(_lane(part, waited=waited).values()), own_ms or 0.0)


def _place(part: SubtaskFigures) -> str:
    """The executor and host it ran on."""
    return place_text(" on ".join(filter(None, (part.executor, part.host))))


def place_text(place: str) -> str:
    """Of an executor and its host, as figures name them: Spark's numbers say what they are."""
    return f"executor {place}" if place[:1].isdigit() and " on " in place else place


def _amount(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _phase_column(name: str) -> _Column:
    return _Column(name, _PHASES[name][1], lambda part: _phases(part).get(name), milliseconds)


def _columns(parts: Sequence[SubtaskFigures]) -> list[_Column]:
    """Those that any subtask has a value in."""
    columns = [
        _Column("subtask", "subtask", lambda part: part.subtask, str),
        _Column("took", "took", _took_ms, milliseconds),
        _Column("end", "end to end", lambda part: part.end_to_end_ms, milliseconds),
        *(_phase_column(name) for name in _PHASES),
        _Column("rows", "rows in", lambda part: part.rows, _amount),
        _Column("changes", "changes", lambda part: part.delta_rows, _amount),
        _Column("bytes", "changed", lambda part: part.delta_bytes, size),
        _Column("base", "base", lambda part: part.base_bytes or None, _size),
        _Column("on", "ran on", _place, str, number=False),
    ]
    return [
        column
        for column in columns
        if column.name in ("subtask", "took", "end") or any(column.value(part) for part in parts)
    ]


def _size(value: int | None) -> str:
    return "" if value is None else size(value)


def _sorted(
    parts: Sequence[SubtaskFigures], columns: Sequence[_Column], sort: str
) -> list[SubtaskFigures]:
    column = next((one for one in columns if one.name == sort), None)
    if column is None or column.name == "subtask":
        return list(parts)
    if column.name in ("took", "end"):  # who has not acked is the slowest of all
        return sorted(parts, key=lambda part: _slowness(part, column.value(part)))
    if not column.number:
        return sorted(parts, key=column.value)
    return sorted(parts, key=lambda part: -(column.value(part) or 0))


def _is_idle(part: SubtaskFigures) -> bool:
    """Whether it has neither acked nor run anywhere."""
    return part.end_to_end_ms is None and not _place(part)


def _slowness(part: SubtaskFigures, took_ms: float | None) -> tuple[int, float]:
    """Those at work first, then those that have not begun, then the others, the slowest first."""
    if part.end_to_end_ms is None:
        return int(_is_idle(part)), 0.0
    return 2, -(took_ms or 0.0)


def _cells(
    part: SubtaskFigures, columns: Sequence[_Column], not_yet: str
) -> list[tuple[str, bool]]:
    cells = [(column.text(column.value(part)), column.number) for column in columns]
    if part.end_to_end_ms is None:
        cells[1] = (not_yet, True)
    return cells


def _drawn(part: SubtaskFigures, whole: float, *, waited: bool) -> list[Segment]:
    phases = [
        (_PHASES[name][0], took, f"{_PHASES[name][1]}: {milliseconds(took)}")
        for name, took in _lane(part, waited=waited).items()
    ]
    return segments(phases, whole)


def _row(
    cells: list[tuple[str, bool]], part: SubtaskFigures, drawn: list[Segment], slow_ms: float
) -> _Row:
    slow = (_took_ms(part) or 0.0) >= slow_ms
    return _Row(part.subtask, cells, drawn, slow, part.end_to_end_ms is None)
