"""The row flavour's output: the rows that user code returns, as batches of the declared schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import StructType

from statebackend.operators.rows.frozen_values import MUTABLE, frozen
from statebackend.operators.rows.returned_row_checks import RowShapes
from statebackend.operators.rows.returned_values import column_array
from statebackend.operators.rows.row_conversion import arrow_schema

__all__ = ["RowWriter"]

# The first rows of each batch are checked when they are yielded, so that an error has their line
# and key. The others are checked with the batch, which saves 60 ns a row.
_WATCHED_ROWS: Final = 256
_fields_of: Final = attrgetter("__fields__")


class RowWriter:
    """Collects output rows and turns them into record batches of the declared schema.

    A Row with names is matched by name, as in Spark: in any order, and a missing field is null. A
    field that is no column is refused (Spark leaves it out). Other tuples go by position. A row
    that does not fit is a ``MisfitError`` at the line that yields it, if it is early in a batch.

    Args:
        schema: the output schema.
        describe: says whose rows these are, for errors.
        max_rows: rows per record batch.
    """

    def __init__(
        self, schema: StructType, describe: Callable[[], str], max_rows: int = 10_000
    ) -> None:
        self._schema = schema
        self._arrow = arrow_schema(schema)
        self._names = schema.names
        self._describe = describe
        self._max_rows = max_rows
        self.rows: list[Any] = []
        # Converted later: until then the user may change what a row holds, as a list it reuses.
        self._mutable = any(isinstance(field.dataType, MUTABLE) for field in schema)
        self._shapes = RowShapes(schema, describe)
        self._taken: Callable[[Iterable[Any]], Iterator[Any]] = iter
        if self._mutable:
            self._taken = partial(map, frozen)
        self.put = self._putter()

    @property
    def pending(self) -> int:
        """Rows that are collected and not taken."""
        return len(self.rows)

    def collect(self, rows: Iterable[Any]) -> Iterator[pa.RecordBatch]:
        """Collect rows (tuples or Rows); a batch whenever there is one."""
        return self._collect(self._taken(self._watched(rows)))

    def _collect(self, source: Iterator[Any]) -> Iterator[pa.RecordBatch]:
        while True:
            self.rows.extend(islice(source, self._max_rows - len(self.rows)))
            if len(self.rows) < self._max_rows:
                return
            yield self.take()

    def _putter(self) -> Callable[[Iterable[Any]], Iterator[pa.RecordBatch] | None]:
        """As :meth:`collect`, without a generator for each call: None where no batch is full."""
        rows, extend, max_rows = self.rows, self.rows.extend, self._max_rows
        taken, watched = self._taken, self._watched

        def put(output: Iterable[Any]) -> Iterator[pa.RecordBatch] | None:
            held = len(rows)
            source = taken(output if held >= _WATCHED_ROWS else watched(output))
            extend(islice(source, max_rows - held))
            return None if len(rows) < max_rows else full(source)

        def full(source: Iterator[Any]) -> Iterator[pa.RecordBatch]:
            yield self.take()
            yield from self._collect(source)

        return put

    def _watched(self, output: Iterable[Any]) -> Iterator[Any]:
        """Passes rows on; refuses one that does not fit while ``output`` stands at its line."""
        names, width, shapes = self._names, len(self._names), self._shapes
        source = iter(output)
        for row in islice(source, max(0, _WATCHED_ROWS - len(self.rows))):
            if type(row) is tuple:
                if len(row) != width:
                    shapes.check(row, output)
            elif getattr(row, "__fields__", None) != names:
                shapes.check(row, output)
            yield row
        yield from source

    def take(self) -> pa.RecordBatch:
        """The collected rows as one batch; the writer is empty afterwards.

        Raises:
            ValueMismatchError: what was returned is no row, or a value does not fit.
        """
        rows = self.rows[:]
        self.rows.clear()  # the very list stays: put() holds it
        columns = self._columns(rows) if rows else [()] * len(self._names)
        arrays = [
            column_array(values, field, arrow.type, self._describe)
            for values, field, arrow in zip(columns, self._schema.fields, self._arrow, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._arrow)

    def _columns(self, rows: list[Any]) -> Sequence[tuple[Any, ...]]:
        """The rows as columns, in the schema's order."""
        names = self._names
        try:
            kinds = set(map(type, rows))
            if kinds == {tuple} or list(map(_fields_of, rows)).count(names) == len(rows):
                columns = list(zip(*rows, strict=True))
                if len(columns) == len(names):
                    return columns
        except (AttributeError, TypeError, ValueError):  # no Row with names, no row, uneven ones
            pass
        return list(zip(*self._one_by_one(rows), strict=True))

    def _one_by_one(self, rows: list[Any]) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for row in rows:
            order = self._shapes.order(row)
            if order is not None:
                values = (*row, None)
                row = tuple([values[place] for place in order])
            found.append(row)
        return found
