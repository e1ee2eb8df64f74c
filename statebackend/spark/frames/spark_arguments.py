"""Arguments that have Spark's names, and ours."""

from __future__ import annotations

from typing import Any, Final

from statebackend.errors import ProcessorError, SettingError

__all__ = ["check_flavour", "check_processor", "either", "uid_of"]

_MODES: Final = ("append", "update")
_NEEDED: Final = object()


def either(first: Any, second: Any, name: str, other: str, default: Any = _NEEDED) -> Any:
    """An argument that has two names; None stands for one that was not given.

    Raises:
        SettingError: both were given, or neither of one that has no default.
    """
    if first is not None and second is not None:
        raise SettingError(f"{name}= and {other}= are one argument.", todo=f"Give {name}= only.")
    found = second if first is None else first
    if found is not None:
        return found
    if default is _NEEDED:
        raise SettingError(f"{name}= was not given.", todo=f"Give {name}=.")
    return default


def uid_of(uid: str | None, processor: Any) -> tuple[str, str]:
    """An operator's uid, and whose name that is where none was given; "": it was given."""
    if uid is not None:
        return uid, ""
    if name := getattr(processor, "__name__", ""):
        return str(name), "function"
    return type(processor).__name__, "class"


def check_processor(processor: Any) -> None:
    """Refuse what is no object with the methods of Spark's ``StatefulProcessor``.

    Raises:
        ProcessorError: what was given.
    """
    if isinstance(processor, type):
        raise ProcessorError(
            f"The processor is the class {processor.__name__} itself.",
            todo=f"Give an object of it: {processor.__name__}(...).",
        )
    missing = [
        name for name in ("init", "handleInputRows") if not callable(getattr(processor, name, None))
    ]
    if missing:
        raise ProcessorError(
            f"The processor is a {type(processor).__name__} without {' and '.join(missing)}.",
            todo="Give an object of a subclass of pyspark's StatefulProcessor.",
        )


def check_flavour(flavour: str, output_mode: str | None) -> None:
    """Refuse what rows cannot be handed over as, and output modes that Spark's operators lack.

    Raises:
        SettingError: with what they can, or have.
    """
    if flavour not in ("rows", "pandas"):
        raise SettingError(
            f"The flavour is {flavour!r}.", todo="Give flavour='rows' or flavour='pandas'."
        )
    if output_mode is not None and str(output_mode).lower() not in _MODES:
        raise SettingError(
            f"The output mode of an operator with state is {output_mode!r}.",
            todo="Give 'append' or 'update'.",
        )
