"""Times and sizes as Spark's settings write them: ``10 seconds``, ``500ms``, ``64m``."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any, Final, TypeAlias

from statebackend.errors import SettingError

__all__ = ["Duration", "bytes_of", "parsed_bytes", "parsed_seconds", "seconds_of"]

Duration: TypeAlias = float | str | timedelta
"""A number of seconds, "10 seconds" as in Spark, or a timedelta."""

_AMOUNT: Final = r"(\d+(?:\.\d+)?)\s*([a-z]+)"
_SIZE: Final = re.compile(_AMOUNT)
_TIME: Final = re.compile(rf"(?:interval\s+)?{_AMOUNT}(?:\s+{_AMOUNT})*")
# As Spark reads them: powers of 1,024, and the names that its intervals take.
_BYTES: Final = {
    unit + end: 1 << 10 * power
    for power, unit in enumerate(("", "k", "m", "g", "t"))
    for end in ("b", "" if unit else "bytes")
}
_SECONDS: Final = {
    name: seconds
    for seconds, names in {
        0.000001: "us microsecond microseconds",
        0.001: "ms millisecond milliseconds",
        1.0: "s sec second seconds",
        60.0: "m min minute minutes",
        3600.0: "h hour hours",
        86400.0: "d day days",
        604800.0: "week weeks",
    }.items()
    for name in names.split()
}


def parsed_seconds(text: str) -> float | None:
    """The seconds of "10 seconds", "500ms" or "1 minute 30 seconds"; None: it is no such text."""
    found = text.strip().lower()
    parts = _SIZE.findall(found) if _TIME.fullmatch(found) else []
    if not parts or any(unit not in _SECONDS for _, unit in parts):
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def parsed_bytes(text: str) -> float | None:
    """The bytes of "64m" or "1.5 gb"; None: it is no such text."""
    found = _SIZE.fullmatch(text.strip().lower())
    unit = _BYTES.get(found[2]) if found else None
    return None if found is None or unit is None else float(found[1]) * unit


def seconds_of(name: str, value: Any) -> float:
    """A duration that was given for ``name``, in seconds.

    Raises:
        SettingError: it is none.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else _number(value)
    if seconds is None and isinstance(value, str):
        seconds = parsed_seconds(value)
    if seconds is None:
        raise SettingError(
            f"{name} is {value!r}.", todo='Give a number of seconds, or a text like "10 seconds".'
        )
    return seconds


def bytes_of(name: str, value: Any) -> int:
    """A size that was given for ``name``, in bytes.

    Raises:
        SettingError: it is none.
    """
    size = _number(value)
    if size is None and isinstance(value, str):
        size = parsed_bytes(value)
    if size is None or size != int(size):
        raise SettingError(f"{name} is {value!r}.", todo='Give a number of bytes, or "64k".')
    return int(size)


def _number(value: Any) -> float | None:
    """What is a number, or the text of one; NaN is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if abs(found) < float("inf") else None
