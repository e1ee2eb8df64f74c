"""The arguments of ``backend.aggregate`` in Spark's words: windows of Spark's, and output modes."""

from __future__ import annotations

import re
from typing import Final

from pyspark.sql import Column

from statebackend.errors import SettingError
from statebackend.operators.aggregate.windows import Window, session, sliding, tumbling
from statebackend.spark.frames.spark_arguments import either

__all__ = ["emitted_in", "window_of"]

_EMITTED: Final = {"update": "updates", "append": "closed"}  # by Spark's output mode
# As pyspark shows a column: its names for what F.window() and F.session_window() were given.
_WINDOW: Final = re.compile(r"Column<'window\((.+), '([^']+)', '([^']+)', '([^']+)'\)'>")
_SESSION: Final = re.compile(r"Column<'session_window\((.+), '([^']+)'\)'>")


def window_of(
    window: Window | Column | None, event_time: str | None
) -> tuple[Window | None, str | None]:
    """A window of ours, and the column of its event time; of Spark's, what that says.

    Raises:
        SettingError: the column is no window of Spark's with fixed durations, or is of another
            event time than ``event_time``.
    """
    if not isinstance(window, Column):
        return window, event_time
    shown = str(window)
    if found := _WINDOW.fullmatch(shown):
        steps = found[2] != found[3]
        made = (
            sliding(found[2], found[3], offset=found[4])
            if steps
            else tumbling(found[2], offset=found[4])
        )
    elif found := _SESSION.fullmatch(shown):
        made = session(found[2])
    else:
        raise SettingError(
            f"The window is {shown}.",
            todo="Give F.window() or F.session_window() of a column, with durations as text, or "
            "tumbling(), sliding() or session().",
        )
    if event_time not in (None, found[1]):
        raise SettingError(
            f"The window is of {found[1]!r}, and event_time= is {event_time!r}.",
            todo="Leave event_time= out.",
        )
    return made, found[1]


def emitted_in(emit: str | None, output_mode: str | None) -> str:
    """What ``emit=`` means, or Spark's output mode in its place.

    Raises:
        SettingError: both were given, or a mode that there is not.
    """
    mode = None if output_mode is None else str(output_mode).lower()
    if mode is not None and mode not in _EMITTED:
        raise SettingError(
            f"The output mode of the aggregation is {output_mode!r}.",
            todo='Give "update" (rows that a batch changed) or "append" (windows once closed).',
        )
    said = None if mode is None else _EMITTED[mode]
    return str(either(emit, said, "emit", "outputMode", default="updates"))
