"""State that is folded as rows come: one value per key, reduced or aggregated.

Stored as value state is, with or without a TTL: what is kept is the reduced row, or the accumulator
row. Each ``add`` decodes and encodes it once; ``add_all`` does so once for many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from statebackend.errors import UsageError
from statebackend.state.cells import KeyCursor, RowCodecLike, ValueCell
from statebackend.state.table import StateTable
from statebackend.state.ttl_cells import TTL, TtlValueCell
from statebackend.state.unbound import OfOneEpoch

__all__ = ["AggregatingCell", "ReducingCell"]

Row = tuple[Any, ...]
Result = TypeVar("Result")


class _FoldCell(OfOneEpoch):
    """What both share: a value cell that holds what was folded so far."""

    def __init__(
        self,
        cursor: KeyCursor,
        table: StateTable,
        name: str,
        state_id: int,
        codec: RowCodecLike,
        ttl: TTL | None,
        now_ms: int,
    ) -> None:
        self._name = name
        self._kept: ValueCell
        if ttl is None:
            self._kept = ValueCell(cursor, table, name, state_id, codec)
        else:
            self._kept = TtlValueCell(cursor, table, name, state_id, codec, ttl=ttl, now_ms=now_ms)

    def set_now(self, now_ms: int) -> None:
        """What time it is, of one with a TTL; while no key is current."""
        if isinstance(self._kept, TtlValueCell):
            self._kept.set_now(now_ms)

    def exists(self) -> bool:
        """Whether something was added for the current key."""
        return self._kept.exists()

    def clear(self) -> None:
        """Forget what was added for the current key."""
        self._kept.clear()


class ReducingCell(_FoldCell):
    """One row per key: each row that is added is reduced with it.

    Args:
        codec: of the rows.
        reduce: (row kept, row added) to the row to keep; called from the second row on.
    """

    def __init__(
        self,
        cursor: KeyCursor,
        table: StateTable,
        name: str,
        state_id: int,
        codec: RowCodecLike,
        reduce: Callable[[Row, Row], Row],
        *,
        ttl: TTL | None = None,
        now_ms: int = 0,
    ) -> None:
        super().__init__(cursor, table, name, state_id, codec, ttl, now_ms)
        self._reduce = reduce

    def get(self) -> Row | None:
        """The reduced row; None if nothing was added."""
        return self._kept.get()

    def add(self, row: Row) -> None:
        """Reduce one more row.

        Raises:
            ValueMismatchError: the result does not fit the schema; nothing is changed.
        """
        kept = self._kept.get()
        self._kept.update(row if kept is None else self._reduce(kept, row))

    def add_all(self, rows: Iterable[Row]) -> None:
        """Reduce rows in their order, writing once."""
        kept, added = self._kept.get(), False
        for row in rows:
            kept = row if kept is None else self._reduce(kept, row)
            added = True
        if added and kept is not None:
            self._kept.update(kept)


class AggregatingCell(_FoldCell, Generic[Result]):
    """One accumulator per key, to which rows of any form are added.

    Args:
        codec: of the accumulator.
        create: gives an empty accumulator (a row of the schema).
        add: (accumulator, what is added) to the accumulator to keep.
        result: accumulator to what :meth:`get` gives.
        merge: (accumulator kept, accumulator given) to the accumulator to keep.
    """

    def __init__(
        self,
        cursor: KeyCursor,
        table: StateTable,
        name: str,
        state_id: int,
        codec: RowCodecLike,
        create: Callable[[], Row],
        add: Callable[[Row, Any], Row],
        result: Callable[[Row], Result],
        merge: Callable[[Row, Row], Row] | None = None,
        *,
        ttl: TTL | None = None,
        now_ms: int = 0,
    ) -> None:
        super().__init__(cursor, table, name, state_id, codec, ttl, now_ms)
        self._create, self._add, self._result, self._merge = create, add, result, merge

    def get(self) -> Result | None:
        """The result so far; None if nothing was added."""
        kept = self._kept.get()
        return None if kept is None else self._result(kept)

    def accumulator(self) -> Row | None:
        """The accumulator itself, as :meth:`merge` takes it; None if nothing was added."""
        return self._kept.get()

    def add(self, item: Any) -> None:
        """Add one more.

        Raises:
            ValueMismatchError: the accumulator does not fit the schema; nothing is changed.
        """
        kept = self._kept.get()
        self._kept.update(self._add(self._create() if kept is None else kept, item))

    def add_all(self, items: Iterable[Any]) -> None:
        """Add many in their order, writing once."""
        kept, added = self._kept.get(), False
        for item in items:
            kept = self._add(self._create() if kept is None else kept, item)
            added = True
        if added and kept is not None:
            self._kept.update(kept)

    def merge(self, accumulator: Row) -> None:
        """Take another accumulator in.

        Raises:
            UsageError: the state was declared without ``merge``.
            ValueMismatchError: the accumulator does not fit the schema; nothing is changed.
        """
        if self._merge is None:
            raise UsageError(
                f"Aggregating state {self._name!r} was declared without merge=.",
                todo="Give merge= where the state is declared.",
            )
        kept = self._kept.get()
        self._kept.update(accumulator if kept is None else self._merge(kept, accumulator))
