"""Windows of event time: what a user writes into ``window=``, and in which of them a time lies."""

from __future__ import annotations

import datetime
import math
import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from statebackend.errors import SettingError
from statebackend.operators.aggregate.arrow_numpy import Ints

__all__ = [
    "Window",
    "pane_starts",
    "pane_us",
    "session",
    "sliding",
    "timer_ms",
    "tumbling",
    "windows_of",
]

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


# --- in columns ----------------------------------------------------------------------------------


def pane_us(window: Window) -> int:
    """The length of a pane: every window is a run of whole panes."""
    return math.gcd(window.duration_us, window.slide_us)


def pane_starts(times_us: Ints, window: Window) -> Ints:
    """The start of the pane that each time lies in; it is in the same windows as the time."""
    return times_us - (times_us - np.int64(window.offset_us)) % np.int64(pane_us(window))


def windows_of(times_us: Ints, window: Window) -> tuple[Ints | None, Ints]:
    """Tumbling or sliding windows.

    Returns:
        (row, start): each row once for each window it is in, ascending, and the windows' starts in
        microseconds, ascending for each row. ``row`` None: each row is in one window.
    """
    slide = np.int64(window.slide_us)
    last = times_us - (times_us - np.int64(window.offset_us)) % slide
    overlap = -(-window.duration_us // window.slide_us)
    if overlap == 1:
        return None, last
    starts = last[:, None] - slide * np.arange(overlap - 1, -1, -1, dtype=np.int64)
    # Where the slide does not divide the duration, the earliest may end before the time.
    inside = starts + np.int64(window.duration_us) > times_us[:, None]
    row = np.repeat(np.arange(len(times_us)), overlap)[inside.reshape(-1)]
    return row, starts[inside]


def timer_ms(end_us: Ints) -> Ints:
    """The first whole millisecond at which a watermark closes a window that ends then."""
    return -(-end_us // np.int64(1000))
