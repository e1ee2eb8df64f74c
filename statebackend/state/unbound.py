"""Stand-ins for a state, timers or a context where the real one cannot be."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from pyspark.errors import PySparkRuntimeError

from statebackend.errors import KeyContextError

__all__ = ["Deleted", "DeletedStateError", "LeftBehind", "OfOneEpoch", "Unbound"]

_SPARKS_VERBS: Final = {"exists": "checking", "get": "getting", "clear": "clearing"}


class DeletedStateError(KeyContextError, PySparkRuntimeError):
    """A state is used that ``init`` deletes; as in Spark a ``PySparkRuntimeError``."""

    def __init__(self, what: str, *, todo: str = "") -> None:
        PySparkRuntimeError.__init__(self, message=what)
        self.what, self.todo = what, todo


class Unbound:
    """Stands for a state (or the timers) while the driver runs ``init``: there is no key."""

    def __init__(self, what: str, method: str) -> None:
        self._what, self._method = what, method

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._refusal(name)

    def _refusal(self, used: str) -> KeyContextError:
        method = self._method
        return KeyContextError(
            f"{method}() uses {self._what}, but belongs to no key.",
            todo=f"Use states and timers in the calls for a key; {method}() only asks for them.",
        )


class Deleted(Unbound):
    """Stands for a state that ``init`` asks for, and deletes.

    Args:
        kind: of the state: ``value``, ``list`` or ``map``.
    """

    def __init__(self, what: str, method: str, kind: str) -> None:
        super().__init__(what, method)
        self._kind = "map" if kind == "map" else "value"  # Spark calls a list a value here

    def _refusal(self, used: str) -> KeyContextError:
        sparks = f"Error {_SPARKS_VERBS.get(used, 'updating')} {self._kind} state"
        sparks += " exists" if used == "exists" else ""
        return DeletedStateError(
            f"{_first_upper(self._what)} is used, but {self._method}() deletes it ({sparks}).",
            todo="Take out the call of deleteIfExists(), or ask for the state after it.",
        )


class LeftBehind(Unbound):
    """Stands for what a processor was given, in a copy of that processor."""

    def _refusal(self, used: str) -> KeyContextError:
        return KeyContextError(
            f"{_first_upper(self._what)} belongs to the processor that this one is a copy of.",
            todo="Ask for it in init() or open(), each time that it is called.",
        )


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]


class OfOneEpoch:
    """Base of what a processor is given for one epoch, and may keep as an attribute.

    It leads to an open store, so it cannot be shipped with the processor. But a processor that ran
    in a test may go into a query afterwards, and is given all of it anew there. So pickle (and a
    deep copy) puts a `LeftBehind` in its place.
    """

    __slots__ = ()
    called: ClassVar[str] = ""
    """How messages call it; a state is called by its name."""

    def __reduce__(self) -> tuple[Any, ...]:
        return LeftBehind, (self.called or f"state {getattr(self, '_name', '')!r}", "init")
