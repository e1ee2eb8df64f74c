"""One setting: how it is checked and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from statebackend.errors import SettingError

__all__ = ["PREFIX", "Setting", "not_negative", "parallelism", "positive", "switch"]

PREFIX: Final = "spark.statebackend."


@dataclass(frozen=True)
class Setting:
    """One setting: its key below ``spark.statebackend.``, its default, its check, its meaning."""

    key: str
    default: Any
    kind: type
    meaning: str
    check: Callable[[Any], bool] = lambda value: True
    wants: str = ""

    def parse(self, value: Any) -> Any:
        """A checked value from a string or a value.

        Raises:
            SettingError: naming the key, the value and what is wanted.
        """
        try:
            parsed = self.kind(value)
        except (TypeError, ValueError, OverflowError):
            raise self._refused(value) from None
        if isinstance(value, bool) or (isinstance(value, float) and parsed != value):
            raise self._refused(value)
        if not self.check(parsed):
            raise self._refused(value)
        return parsed

    def _refused(self, value: Any) -> SettingError:
        wants = self.wants or f"a value of type {self.kind.__name__}"
        return SettingError(
            f"The setting {PREFIX}{self.key} (or the argument of that meaning) is {value!r}.",
            todo=f"Give {wants}: {self.meaning}",
        )


def positive(value: Any) -> bool:
    """Over 0."""
    return bool(value > 0)


def parallelism(value: Any) -> bool:
    """A number of subtasks; 0: the default."""
    return bool(0 <= value <= 32768)


def not_negative(value: Any) -> bool:
    """0 or more."""
    return bool(value >= 0)


def switch(value: Any) -> bool:
    """Off or on."""
    return value in (0, 1)
