"""Errors that are Spark's, too: for calls at which pyspark or its ``TwsTester`` raises its own.

Each has our code and Spark's error class, so that a test that was written for ``TwsTester`` catches
what it caught. They are not in `statebackend.errors`, because that needs no pyspark.
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
    """A call that fails an assertion of pyspark's tester, such as one for a missing state."""


class UnknownModeError(SettingError, AssertionError):
    """A time or output mode that Spark does not have."""


class _OfSpark(PySparkException):
    """The Spark half of an error; comes before one of our classes among the bases.

    ``condition``: Spark's error class, if it names one. This class is no `StateBackendError`, so
    that `error_for_code` does not find it.
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
    """A clock was moved that the time mode does not have."""

    condition = "UNSUPPORTED_OPERATION"


class ExtractorMissingError(_OfSpark, SettingError, PySparkValueError):
    """There is nothing to take event time from."""

    condition = "ARGUMENT_REQUIRED"


class NotForwardError(_OfSpark, SettingError, IllegalArgumentException):
    """A time that does not move forward."""


class UnknownStateError(_OfSpark, TesterUseError, PySparkAssertionError):
    """No state of this name."""

    condition = "STATE_NOT_EXISTS"
