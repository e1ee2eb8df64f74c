"""Between Arrow columns and the Python values that Spark's row API shows.

Plain types go column by column without a Python call per value. What needs care (timestamps,
nested types, decimals) goes through pyspark's own converters, so that a value looks as in Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.conversion import ArrowTableToRowsConversion, LocalDataToArrowConversion
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BooleanType,
    ByteType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    Row,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from statebackend.errors import ValueMismatchError

__all__ = ["RowWriter", "arrow_schema", "columns_to_python", "make_rows", "row_type"]

_NUMPY_TYPES: Final = (ByteType, ShortType, IntegerType, LongType, FloatType, DoubleType)
_INTEGER_TYPES: Final = (ByteType, ShortType, IntegerType, LongType)
_PLAIN_TYPES: Final = (*_NUMPY_TYPES, BooleanType, DateType)


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema that ``mapInArrow`` must return for ``schema``, to the letter."""
    return to_arrow_schema(schema, timezone="UTC")


def _column_to_python(column: pa.ChunkedArray, field: StructField) -> list[Any]:
    if isinstance(field.dataType, _NUMPY_TYPES) and column.null_count == 0:
        values: list[Any] = column.to_numpy().tolist()
        return values
    if isinstance(field.dataType, (*_PLAIN_TYPES, StringType)):
        values = column.to_pylist()
        return values
    table = pa.table([column], names=[field.name])
    rows = ArrowTableToRowsConversion.convert(table, StructType([field]))
    return [row[0] for row in rows]


def columns_to_python(table: pa.Table, schema: StructType) -> list[list[Any]]:
    """One list of Python values per field of ``schema``; ``table`` has these columns in order."""
    return [
        _column_to_python(column, field)
        for column, field in zip(table.columns, schema.fields, strict=True)
    ]


def row_type(names: list[str]) -> type[Row]:
    """A pyspark Row with these fields, which its class knows: no dictionary per row."""
    return type("Row", (Row,), {"__slots__": (), "__fields__": names})


def make_rows(columns: Sequence[Sequence[Any]], row: type[Row]) -> list[Row]:
    """A Row per row of ``columns``; no Python call per row."""
    return list(map(tuple.__new__, repeat(row), zip(*columns, strict=True)))


class RowWriter:
    """Collects output rows and turns them into record batches of the declared schema.

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
        self._describe = describe
        self._max_rows = max_rows
        self.rows: list[Any] = []

    def collect(self, rows: Iterable[Any]) -> Iterator[pa.RecordBatch]:
        """Collect rows (tuples or Rows, positional as in Spark); a batch whenever there is one."""
        source = iter(rows)
        while True:
            self.rows.extend(islice(source, self._max_rows - len(self.rows)))
            if len(self.rows) < self._max_rows:
                return
            yield self.take()

    def take(self) -> pa.RecordBatch:
        """The collected rows as one batch; the writer is empty afterwards.

        Raises:
            ValueMismatchError: a row has another number of fields, or a value does not fit.
        """
        rows, self.rows = self.rows, []
        width = len(self._schema.fields)
        try:
            bad = [r for r in rows if not isinstance(r, tuple) or len(r) != width]
            columns = [] if bad else list(zip(*rows, strict=True))
        except (TypeError, ValueError):
            bad = rows
        if bad:
            raise ValueMismatchError(
                f"{self._describe()} returned {bad[0]!r}, which is no row of {width} fields "
                f"({self._schema.simpleString()}).",
                todo="Yield pyspark Rows or tuples with one value per field of output_schema.",
            )
        arrays = [
            self._column(values, field, arrow.type)
            for values, field, arrow in zip(columns, self._schema.fields, self._arrow, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._arrow)

    def _column(self, values: Sequence[Any], field: StructField, arrow: pa.DataType) -> pa.Array:
        if isinstance(field.dataType, _INTEGER_TYPES) and float in set(map(type, values)):
            # Neither Arrow nor pyspark objects: they cut the fraction off.
            raise self._refused(field, "a fractional number")
        if field.nullable and isinstance(field.dataType, (*_PLAIN_TYPES, StringType)):
            try:
                return pa.array(values, type=arrow)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                pass  # pyspark's converter allows some coercions, and names what it refuses
        try:
            table = LocalDataToArrowConversion.convert(
                [(value,) for value in values], StructType([field]), False
            )
        except Exception as error:
            raise self._refused(field, str(error)) from error
        return table.column(0).combine_chunks().cast(arrow)

    def _refused(self, field: StructField, why: str) -> ValueMismatchError:
        return ValueMismatchError(
            f"{self._describe()} returned a value for column {field.name!r} that is no "
            f"{field.dataType.simpleString()} ({why}).",
            todo="Return values of the types that output_schema declares.",
        )
