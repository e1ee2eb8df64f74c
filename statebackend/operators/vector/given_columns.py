"""What users hand to states as columns: record batches, dicts, sequences of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from statebackend.errors import ValueMismatchError
from statebackend.schema.arrow_buffers import boolean_array
from statebackend.schema.conform import conform_all
from statebackend.schema.types import arrow_type

__all__ = ["Columns", "arrow_fields", "as_arrow", "columns_of", "record"]

Columns = Any
"""A record batch (by the names of its columns, or by position if none of them is a field's), a dict
from field name to column, a sequence of columns, or one column for one
field. A column is an Arrow array or a numpy array of numbers."""

_PLAIN: Final = "iuf"


def columns_of(given: Columns, schema: StructType, rows: int | None, what: str) -> list[pa.Array]:
    """One array for each field, in the schema's order and types.

    Args:
        rows: how many there must be, if that is known. what: whose they are, for errors.

    Raises:
        ValueMismatchError: other fields, another type, nulls where there may be none, or another
            number of rows.
    """
    listed = _listed(given, schema, what)
    try:
        arrays = conform_all([as_arrow(column) for column in listed], schema)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueMismatchError(
            f"{what} was given a column that is none ({type(error).__name__}: {error}).",
            todo="Give arrays of pyarrow or numpy, or lists of values of one type.",
        ) from error
    for array in arrays:
        if rows is not None and len(array) != rows:
            raise ValueMismatchError(
                f"{what} was given {len(array)} rows for {rows} keys.",
                todo="Give one row for each key, in their order: the columns that get() gave, or "
                "others made of them.",
            )
    return arrays


def _listed(given: Columns, schema: StructType, what: str) -> list[Any]:
    names = schema.names
    if isinstance(given, pa.RecordBatch | pa.Table):
        found = given.schema.names
        if sorted(found) == sorted(names):
            return [given.column(name) for name in names]
        # By position only if the names say nothing: a name that was misspelled is a mistake.
        if len(found) == len(names) and not set(found) & set(names):
            return list(given.columns)
        raise _other_fields(names, found, what)
    if isinstance(given, Mapping):
        if sorted(given) != sorted(names):
            raise _other_fields(names, list(given), what)
        return [given[name] for name in names]
    if len(names) == 1 and isinstance(given, pa.Array | pa.ChunkedArray | np.ndarray):
        return [given]
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        if len(given) != len(names):
            raise _other_fields(names, [f"column {i}" for i in range(len(given))], what)
        return list(given)
    raise ValueMismatchError(
        f"{what} was given a {type(given).__name__}.",
        todo="Give a pyarrow.RecordBatch, a dict from field name to array, or a list of arrays.",
    )


def _other_fields(names: list[str], found: list[str], what: str) -> ValueMismatchError:
    return ValueMismatchError(
        f"{what} has the fields ({', '.join(names)}), but was given "
        f"({', '.join(map(str, found))}).",
        todo="Give one column for each field.",
    )


def as_arrow(column: Any) -> pa.Array | pa.ChunkedArray:
    """A column as Arrow's; numbers of numpy without a copy."""
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return column
    if isinstance(column, str | bytes | set | frozenset):
        raise TypeError(f"a {type(column).__name__}")  # Arrow would take its characters, or items
    if isinstance(column, np.ndarray) and type(column) is np.ndarray and column.ndim == 1:
        if column.dtype == np.bool_:
            return boolean_array(column)
        if column.dtype.kind in _PLAIN and column.dtype.isnative and column.dtype.itemsize > 1:
            # `pa.array` would import pandas: a second in a new worker.
            data = pa.py_buffer(np.ascontiguousarray(column))
            kind = pa.from_numpy_dtype(column.dtype)
            return pa.Array.from_buffers(kind, len(column), [None, data])
    return pa.array(column)


def arrow_fields(schema: StructType) -> pa.Schema:
    """The Arrow schema of a record batch of these fields."""
    return pa.schema(
        [pa.field(one.name, arrow_type(one.dataType, one.name)) for one in schema.fields]
    )


def record(arrays: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """A record batch; without columns it could not say how many rows it has, so there is one."""
    return pa.RecordBatch.from_arrays(list(arrays), schema=schema)
