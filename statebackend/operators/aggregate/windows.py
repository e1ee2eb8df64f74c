"""Event-time windows in columns: which windows a time lies in, which rows make a session."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from statebackend.operators.aggregate.arrow_numpy import Ints
from statebackend.operators.aggregate.functions import Window

__all__ = ["Sessions", "merge_sessions", "pane_starts", "pane_us", "timer_ms", "windows_of"]

_SPAN_MAX: Final = 1 << 62


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


@dataclass(frozen=True)
class Sessions:
    """Sessions that rows touched, in the order of (key, start).

    Attributes:
        key, start_us, end_us: of each session.
        of_row: the session of each row.
        of_stored: that of each stored session; -1 for those that no row touched.
    """

    key: Ints
    start_us: Ints
    end_us: Ints
    of_row: Ints
    of_stored: Ints


def merge_sessions(
    row_key: Ints,
    row_us: Ints,
    gap_us: int,
    stored_key: Ints,
    stored_start_us: Ints,
    stored_end_us: Ints,
) -> Sessions:
    """Put rows and stored sessions together: sessions that overlap or meet become one.

    Args:
        row_key: a number for the key of each row (from 0 on), and row_us: its time.
        stored_key, stored_start_us, stored_end_us: sessions that are open already.
    """
    stored = len(stored_key)
    key = np.concatenate([stored_key, row_key])
    start = np.concatenate([stored_start_us, row_us])
    end = np.concatenate([stored_end_us, row_us + np.int64(gap_us)])
    order = np.lexsort((start, key))
    key, start, end = key[order], start[order], end[order]
    furthest = _running_max(key, end)
    opens = np.ones(len(key), bool)
    opens[1:] = (key[1:] != key[:-1]) | (start[1:] > furthest[:-1])
    session = np.cumsum(opens) - 1
    begins = np.flatnonzero(opens)
    touched = np.logical_or.reduceat(order >= stored, begins)
    ends = np.append(begins[1:], len(key)) - 1
    numbers = np.where(touched, np.cumsum(touched) - 1, -1)
    of = np.empty(len(key), np.int64)
    of[order] = numbers[session]
    return Sessions(
        key=key[begins][touched],
        start_us=start[begins][touched],
        end_us=furthest[ends][touched],
        of_row=of[stored:],
        of_stored=of[:stored],
    )


def _running_max(key: Ints, values: Ints) -> Ints:
    """The largest value so far within each key; keys ascend."""
    low, high = int(values.min()), int(values.max())
    span = high - low + 1
    if (int(key[-1]) + 1) * span < _SPAN_MAX:
        base = key * np.int64(span)
        found: Ints = np.maximum.accumulate(base + (values - low)) - base + low
        return found
    distinct, ranks = np.unique(values, return_inverse=True)
    base = key * np.int64(len(distinct))
    by_rank: Ints = distinct[np.maximum.accumulate(base + ranks) - base]
    return by_rank
