"""The states and timers that a processor of ours is given, for annotations.

They are protocols: the objects are the cells themselves (``statebackend.state``), so that a call
goes through no layer. Rows are tuples, positional as the schema; what ``get`` gives is a plain
tuple, as in Spark. All of them belong to the key of the call, and are refused outside it, but for
`OperatorRows` and `BroadcastMap`, which belong to none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

__all__ = [
    "AggregatingState",
    "BroadcastMap",
    "ListState",
    "MapState",
    "OperatorRows",
    "ReducingState",
    "Timers",
    "ValueState",
]

Row = tuple[Any, ...]
Times = list[int]


class _State(Protocol):
    def exists(self) -> bool:
        """Whether the key has any."""
        ...

    def clear(self) -> None:
        """Remove what the key has."""
        ...


class ValueState(_State, Protocol):
    """A state with one row per key."""

    def get(self) -> Row | None:
        """The row, None if there is none."""
        ...

    def update(self, newValue: Row, /) -> None:
        """Set the row.

        Raises:
            ValueMismatchError: it does not fit the schema.
        """
        ...


class ListState(_State, Protocol):
    """A state with a list of rows per key, in the order in which they were appended."""

    def get(self) -> Iterator[Row]:
        """The rows; later changes do not show in the iterator."""
        ...

    def put(self, newState: list[Row], /) -> None:
        """Replace the rows by others, at least one (use ``clear`` for none)."""
        ...

    def append(self, newState: Row, /) -> None:
        """Add a row at the end; costs the same at any length."""
        ...

    def extend(self, newState: list[Row], /) -> None:
        """Add rows at the end, at least one."""
        ...


class MapState(_State, Protocol):
    """A state with a map per key, from rows to rows; touching one entry reads no other."""

    def get_value(self, key: Row, /) -> Row | None:
        """The row under a map key, or None."""
        ...

    def contains_key(self, key: Row, /) -> bool:
        """Whether there is an entry."""
        ...

    def update_value(self, key: Row, value: Row, /) -> None:
        """Set an entry."""
        ...

    def remove_key(self, key: Row, /) -> None:
        """Remove an entry, if there is one."""
        ...

    def iterator(self) -> Iterator[tuple[Row, Row]]:
        """(map key, row) of every entry."""
        ...

    def keys(self) -> Iterator[Row]:
        """The map keys."""
        ...

    def values(self) -> Iterator[Row]:
        """The rows."""
        ...


class ReducingState(_State, Protocol):
    """A state with one row per key, into which others are reduced."""

    def get(self) -> Row | None:
        """The row so far, None before the first."""
        ...

    def add(self, value: Row, /) -> None:
        """Reduce a row into it."""
        ...

    def add_all(self, rows: Iterable[Row], /) -> None:
        """Reduce rows into it in their order, writing once."""
        ...


class AggregatingState(_State, Protocol):
    """A state with an accumulator per key; what is added, and what is got, may differ in shape."""

    def get(self) -> Any:
        """The result of what was added so far, None before the first."""
        ...

    def add(self, value: Any, /) -> None:
        """Add to the accumulator."""
        ...

    def add_all(self, items: Iterable[Any], /) -> None:
        """Add many in their order, writing once."""
        ...

    def accumulator(self) -> Row | None:
        """The accumulator itself, None before the first."""
        ...

    def merge(self, accumulator: Row, /) -> None:
        """Take another accumulator in; the state must have been given ``merge``."""
        ...


class OperatorRows(Protocol):
    """A list of rows of the subtask, in the order in which they were added; of no key."""

    def get(self) -> Iterator[Row]:
        """The rows; later changes do not show in the iterator."""
        ...

    def add(self, row: Row, /) -> None:
        """Append a row."""
        ...

    def update(self, rows: Iterable[Row], /) -> None:
        """Replace all rows; none is fine."""
        ...

    def clear(self) -> None:
        """Remove all rows."""
        ...

    def __len__(self) -> int:
        """How many rows there are."""
        ...


class BroadcastMap(Protocol):
    """A map that is the same in every subtask; written in ``process_broadcast`` only."""

    def get(self, key: Row, /) -> Row | None:
        """The row under a key, or None."""
        ...

    def contains(self, key: Row, /) -> bool:
        """Whether there is an entry."""
        ...

    def items(self) -> Iterator[tuple[Row, Row]]:
        """(key, row) of every entry, in one order in all subtasks."""
        ...

    def put(self, key: Row, row: Row, /) -> None:
        """Set an entry."""
        ...

    def remove(self, key: Row, /) -> None:
        """Remove an entry, if there is one."""
        ...

    def clear(self) -> None:
        """Remove all entries."""
        ...

    def __len__(self) -> int:
        """How many entries there are."""
        ...


class Timers(Protocol):
    """The current key's timers; milliseconds since 1970, in the operator's time mode."""

    def register(self, at_ms: int, /) -> None:
        """Set a timer; setting it twice is setting it once."""
        ...

    def delete(self, at_ms: int, /) -> None:
        """Delete a timer, if it is set."""
        ...

    def list(self) -> Times:
        """The times that are set, ascending."""
        ...
