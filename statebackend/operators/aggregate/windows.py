"""Event-time windows in columns: which windows a time lies in."""

from __future__ import annotations

import math

import numpy as np

from statebackend.operators.aggregate.arrow_numpy import Ints
from statebackend.operators.aggregate.functions import Window

__all__ = ["pane_starts", "pane_us", "timer_ms", "windows_of"]


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
