"""The base class of all errors, and the way from a code back to its class."""

from __future__ import annotations

import re
from typing import ClassVar, Final

__all__ = ["StateBackendError", "error_for_code", "error_in_text"]


_TEXT: Final = re.compile(r"\[(SB\d{4})\] (.+)")


class StateBackendError(Exception):
    """Base of every error this library raises on purpose.

    Its text is ``[code] what todo``.

    Attributes:
        code: the stable code of this kind of error, such as ``SB4001``.
        what: what happened, and to what.
        todo: what to do next.
    """

    code: ClassVar[str] = "SB0000"

    def __init__(self, what: str, *, todo: str = "") -> None:
        super().__init__(what, todo)
        self.what, self.todo = what, todo

    def __str__(self) -> str:
        return f"[{self.code}] {self.what}" + (f" {self.todo}" if self.todo else "")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.todo)


def _rebuild(kind: type[StateBackendError], what: str, todo: str) -> StateBackendError:
    return kind(what, todo=todo)


def error_for_code(code: str, what: str, todo: str) -> StateBackendError:
    """The error for a code that came over the wire; the base class if the code is unknown."""
    kinds: list[type[StateBackendError]] = [StateBackendError]
    for kind in kinds:  # breadth first: the list grows in the loop
        if kind.code == code:
            return kind(what, todo=todo)
        kinds += kind.__subclasses__()
    return StateBackendError(f"({code}) {what}", todo=todo)


def error_in_text(text: str) -> StateBackendError | None:
    """The error that another process has printed, its whole text as `what`; None: there is none."""
    found = _TEXT.search(text)
    return None if found is None else error_for_code(found[1], found[2], "")
