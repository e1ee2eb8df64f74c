"""One setting: how it is checked and read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from statebackend.errors import SettingError
from statebackend.spark_forms import parsed_bytes, parsed_seconds
from statebackend.texts import did_you_mean

__all__ = [
    "PREFIX",
    "Setting",
    "no_such_setting",
    "not_negative",
    "parallelism",
    "positive",
    "switch",
]

PREFIX: Final = "spark.statebackend."
_SWITCHES: Final = {"true": 1, "false": 0}


@dataclass(frozen=True)
class Setting:
    """One setting: its key below ``spark.statebackend.``, its default, its check, its meaning.

    ``secret``: its value is shown nowhere.
    """

    key: str
    default: Any
    kind: type
    meaning: str
    check: Callable[[Any], bool] = lambda value: True
    wants: str = ""
    secret: bool = False

    def parse(self, value: Any) -> Any:
        """A checked value from a string or a value.

        Raises:
            SettingError: naming the key, the value and what is wanted.
        """
        try:
            parsed = self._read(value)
        except (TypeError, ValueError, OverflowError):
            raise self._refused(value) from None
        if (isinstance(value, bool) and self.check is not switch) or (
            isinstance(value, float) and parsed != value
        ):
            raise self._refused(value)
        if not self.check(parsed):
            raise self._refused(value)
        return parsed

    def _read(self, value: Any) -> Any:
        """A value, also in the forms of Spark's own settings: "true", "64m", "10 minutes"."""
        text = value.strip().lower() if isinstance(value, str) else ""
        if self.check is switch and text in _SWITCHES:
            return _SWITCHES[text]
        if self.kind is not str and text:
            parse = self._parser()
            if parse is not None and (found := parse(text)) is not None:
                return self.kind(found)
        return self.kind(value)

    def _parser(self) -> Callable[[str], float | None] | None:
        if "bytes" in self.wants:
            return parsed_bytes
        return parsed_seconds if "seconds" in self.wants else None

    def _refused(self, value: Any) -> SettingError:
        wants = self.wants or f"a value of type {self.kind.__name__}"
        shown = "wrong, and is not shown here" if self.secret else repr(value)
        return SettingError(
            f"The setting {PREFIX}{self.key} (or the argument of that meaning) is {shown}.",
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


def no_such_setting(name: str, known: Iterable[str]) -> SettingError:
    """The error for a name or key that is no setting, with the one that may have been meant."""
    names = list(known)
    return SettingError(
        f"There is no setting {name!r}.",
        todo=did_you_mean(name, names) or f"Use one of: {', '.join(names)}.",
    )
