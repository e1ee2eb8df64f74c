"""Errors that are Spark's, too: where pyspark (or its ``TwsTester``) raises a class of its own.

Each keeps our code and bears Spark's error class, so that a test that was written for ``TwsTester``
catches what it caught. They stand apart from `statebackend.errors`, which needs no pyspark.
"""

from __future__ import annotations

from typing import ClassVar

from pyspark.errors import (
    IllegalArgumentException,
    PySparkAssertionError,
    PySparkException,
    PySparkValueError,
)

from statebackend.errors import SettingError, UnsupportedQueryError, UsageError

__all__ = [
    "ExtractorMissingError",
    "NotForwardError",
    "TesterUseError",
    "TimersRefusedError",
    "UnknownModeError",
    "UnknownStateError",
    "WrongTimeModeError",
]


class TesterUseError(UsageError, AssertionError):
    """What pyspark's tester asserts: that a state is there, that there is one initial state."""


class UnknownModeError(SettingError, AssertionError):
    """A time or output mode that Spark has not."""


class _OfSpark(PySparkException):
    """Comes before one of our classes; ``condition``: Spark's error class, if it names one.

    It is none of ours itself: an error that comes over the wire by its code is found among those.
    """

    code: ClassVar[str]
    condition: ClassVar[str] = ""

    def __init__(self, what: str, *, todo: str = "") -> None:
        message = f"{what} {todo}".rstrip()
        PySparkException.__init__(self, message, self.condition or None, {})
        self.what, self.todo, self.args = what, todo, (what, todo)

    def __str__(self) -> str:
        condition = f"[{self.condition}] " if self.condition else ""
        return f"[{self.code}] {condition}{self._message}"


class TimersRefusedError(_OfSpark, UnsupportedQueryError, PySparkValueError):
    """Timers, in an operator without a time mode."""

    condition = "UNSUPPORTED_OPERATION"


class WrongTimeModeError(_OfSpark, UnsupportedQueryError, PySparkValueError):
    """A time was moved that the time mode does not have."""

    condition = "UNSUPPORTED_OPERATION"


class ExtractorMissingError(_OfSpark, SettingError, PySparkValueError):
    """There is nothing to take event time from."""

    condition = "ARGUMENT_REQUIRED"


class NotForwardError(_OfSpark, SettingError, IllegalArgumentException):
    """A time that does not move forward."""


class UnknownStateError(_OfSpark, TesterUseError, PySparkAssertionError):
    """No state of this name."""

    condition = "STATE_NOT_EXISTS"
