"""What a user writes into ``aggregations=`` and ``window=``."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass, field
from typing import Any, Final

from statebackend.errors import SettingError

__all__ = [
    "Aggregation",
    "Window",
    "approx_count_distinct",
    "count_distinct",
    "first",
    "last",
    "session",
    "sliding",
    "top_k",
    "tumbling",
]


@dataclass(frozen=True)
class Aggregation:
    """One aggregation, not yet checked against a schema.

    Attributes:
        function: its name.
        columns: what it reads.
        options: by name; those that the function has.
    """

    function: str
    columns: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def first(column: str, *, by: str | None = None, ignore_nulls: bool = False) -> Aggregation:
    """The value that arrived first, or that of the smallest ``by``.

    Args:
        column: to take the value of; nulls count as values unless ``ignore_nulls``.
        by: the order; rows where it is null are left out. With it, rows can be
            aggregated before the shuffle; the result does not hang on the order of arrival if
            ``by`` has no ties. (Without it, of sessions that merge the one that starts earlier
            counts as having arrived earlier.)
    """
    return Aggregation("first", (column,), {"by": by, "ignore_nulls": ignore_nulls})


def last(column: str, *, by: str | None = None, ignore_nulls: bool = False) -> Aggregation:
    """The value that arrived last, or that of the largest ``by``: see `first`."""
    return Aggregation("last", (column,), {"by": by, "ignore_nulls": ignore_nulls})


def count_distinct(*columns: str) -> Aggregation:
    """How many different values (combinations of several columns) there are; exact.

    Rows with a null in one of the columns are left out. State holds every value.
    """
    return Aggregation("count_distinct", columns)


def approx_count_distinct(column: str, *, rsd: float = 0.02) -> Aggregation:
    """About how many different values there are, by a HyperLogLog sketch (Apache DataSketches).

    Needs ``pip install 'statebackend[sketches]'``.

    Args:
        column: whose values to count; nulls are left out.
        rsd: relative standard deviation, 0.0008 to 0.09. A sketch takes at most
            ``1.1 / rsd**2`` bytes and a few (2 KiB for 0.02), fewer while it has seen little.
    """
    return Aggregation("approx_count_distinct", (column,), {"rsd": rsd})


def top_k(column: str, k: int) -> Aggregation:
    """The ``k`` most frequent values, exact: array<struct<value, count>>.

    Most frequent first, of equally frequent ones the smallest first; nulls are left out. State
    holds a count for every value.
    """
    return Aggregation("top_k", (column,), {"k": k})


# --- windows -------------------------------------------------------------------------------------

Duration = str | datetime.timedelta

_UNITS_US: Final = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
_PART: Final = re.compile(r"([+-]?\d+)\s*([a-z]+?)s?(?:\s+|$)")


@dataclass(frozen=True)
class Window:
    """An event-time window; made by `tumbling`, `sliding` and `session`.

    Attributes:
        kind: tumbling, sliding or session.
        duration_us: its length, or the gap of a session; whole milliseconds.
        slide_us: from the start of one to that of the next (the length, if tumbling).
        offset_us: where the first starts after 1970-01-01 00:00 UTC.
    """

    kind: str
    duration_us: int
    slide_us: int
    offset_us: int = 0


def tumbling(duration: Duration, *, offset: Duration = "0 seconds") -> Window:
    """Windows of ``duration``, one after the other, as Spark's ``window(ts, duration)``.

    Args:
        duration: as "10 minutes", or a timedelta; in whole milliseconds. A month has no fixed
            length and is refused.
        offset: from 1970-01-01 00:00 UTC to where windows start.

    Raises:
        SettingError: not such a duration.
    """
    length_us = duration_us(duration, "The window's duration", least=1)
    return Window("tumbling", length_us, length_us, _offset_us(offset, length_us))


def sliding(duration: Duration, slide: Duration, *, offset: Duration = "0 seconds") -> Window:
    """Windows of ``duration`` that start every ``slide``, which is not longer.

    Raises:
        SettingError: as `tumbling`, or a slide that is longer than the duration.
    """
    length_us = duration_us(duration, "The window's duration", least=1)
    step_us = duration_us(slide, "The window's slide", least=1)
    if step_us > length_us:
        raise SettingError(
            f"The window's slide ({slide}) is longer than its duration ({duration}).",
            todo="Give a slide that is not longer than the duration.",
        )
    return Window("sliding", length_us, step_us, _offset_us(offset, step_us))


def session(gap: Duration) -> Window:
    """Sessions: a row belongs to the session that it is at most ``gap`` away from.

    A session starts with its first row and ends ``gap`` after its last, as Spark's
    ``session_window``.

    Raises:
        SettingError: not a duration of at least a millisecond.
    """
    gap_us = duration_us(gap, "The session's gap", least=1)
    return Window("session", gap_us, gap_us)


def _offset_us(offset: Duration, slide_us: int) -> int:
    # A window's start is unique modulo the slide.
    return duration_us(offset, "The window's offset", least=None) % slide_us


def duration_us(value: Duration, what: str, *, least: int | None) -> int:
    """Microseconds of an interval such as "1 hour 30 minutes"; whole milliseconds.

    Raises:
        SettingError: it does not parse, is no whole number of milliseconds, or below ``least`` ms.
    """
    if isinstance(value, datetime.timedelta):
        found = value // datetime.timedelta(microseconds=1)
    elif isinstance(value, str):
        found = _parsed_us(value, what)
    else:
        raise SettingError(
            f"{what} is a {type(value).__name__}.",
            todo='Give an interval such as "10 minutes", or a timedelta.',
        )
    if found % 1000 or (least is not None and found < 1000 * least):
        raise SettingError(
            f"{what} is {value!r}.", todo="Give a whole number of milliseconds, at least one."
        )
    return found


def _parsed_us(text: str, what: str) -> int:
    rest = text.strip().lower().removeprefix("interval ").strip()
    total, at = 0, 0
    while at < len(rest):
        part = _PART.match(rest, at)
        if part is None or part[2] not in _UNITS_US:
            at = -1
            break
        total += int(part[1]) * _UNITS_US[part[2]]
        at = part.end()
    if at <= 0:
        raise SettingError(
            f"{what}, {text!r}, does not parse.",
            todo="Give numbers and units from microseconds to weeks, such as "
            '"1 hour 30 minutes"; months have no fixed length.',
        )
    return total
