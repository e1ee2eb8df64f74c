"""The pandas flavour's input: a small DataFrame per key, cheap to make.

Spark makes a key's frame from Python rows, so pandas infers its types from the values: every
integer column is int64, every real one float64. The same types are made here by the chunk, and a
key's frame is cut out of the chunk's columns. They depend on nothing but the key's own rows: an
integer column that holds a null is float64, a boolean one object. (In Spark it also becomes so if
another key of the same record batch holds the null.)

``applyInPandasWithState`` is given Arrow's own types instead: an int column stays int32.

A frame owns its values and its labels: changing it changes no other, keeping it keeps no other.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import _create_converter_to_pandas
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DayTimeIntervalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from statebackend.operators.pandas_frames.frame_slicing import Array, Make, frame_maker
from statebackend.operators.pandas_frames.frame_writer import FrameWriter

__all__ = ["FrameReader", "FrameWriter", "empty_frames", "frame_names"]

_INTEGERS: Final = (ByteType, ShortType, IntegerType, LongType)
_REALS: Final = (FloatType, DoubleType)
_TIMES: Final = (TimestampType, TimestampNTZType)
_FRAME_ROWS: Final = 10_000  # Spark's arrow.maxRecordsPerBatch
_NO_LIMIT: Final = 1 << 31


def frame_names(schema: StructType) -> list[str]:
    """The frames' column names: Spark's, which writes ``_1`` for one that is no identifier.

    (So it does for a name that comes a second time, begins with ``_`` or is a Python keyword.)
    """
    return list(namedtuple("Row", schema.names, rename=True)._fields)  # type: ignore[attr-defined]


class FrameReader:
    """Gives a key its rows as DataFrames: one, or several if it has very many.

    Args:
        schema: the input's columns, in order.
        key_positions: where the key columns stand among them.
        timezone: the session's, in which timestamps are shown (without a zone).
        max_rows: of a frame.
        max_bytes: of a frame, as Spark counts them: it has as many rows as take that many bytes in
        Arrow, by the average row of the key, and at least one.
        own_types: numbers keep the width of their column, keys are numpy's numbers, and columns
            have the schema's names to the letter: as ``applyInPandasWithState`` shows them.
        shown: how many of the first columns a processor sees; None: all.
    """

    def __init__(
        self,
        schema: StructType,
        key_positions: Sequence[int],
        *,
        timezone: str,
        max_rows: int = _FRAME_ROWS,
        max_bytes: int = _NO_LIMIT,
        own_types: bool = False,
        shown: int | None = None,
    ) -> None:
        self._schema, self._shown = schema, shown
        self._key_positions = tuple(key_positions)
        self._timezone = timezone
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._own_types = own_types
        names = list(schema.names) if own_types else frame_names(schema)
        self._names = names[:shown]

    def chunk(
        self, table: pa.Table, starts: Sequence[int]
    ) -> tuple[list[tuple[Any, ...]], list[Iterator[Any]]]:
        """The keys, and for each an iterator that makes its frames when it is asked for them.

        Args:
            table: the rows of the keys, one key after the other.
            starts: n + 1 offsets; the i-th key has the rows ``starts[i]:starts[i + 1]``.
        """
        columns = self._columns(table)
        keys = self._keys([columns[i] for i in self._key_positions], starts[:-1])
        pieces = self._pieces(columns, starts)
        if table.num_rows <= self._max_rows and table.nbytes <= self._max_bytes:
            return keys, [map(make, (a,), (b,)) for make, a, b in pieces]
        return keys, [self._sliced(make, a, b, table) for make, a, b in pieces]

    def key(self, table: pa.Table) -> tuple[Any, ...]:
        """The key of the first row."""
        columns = self._columns(table.slice(0, 1))
        return self._keys([columns[i] for i in self._key_positions], [0])[0]

    def keys(self, table: pa.Table) -> list[tuple[Any, ...]]:
        """The keys of rows that have one each."""
        columns = self._columns(table)
        return self._keys([columns[i] for i in self._key_positions], range(table.num_rows))

    def piece(self, table: pa.Table) -> Iterable[Any]:
        """Frames of some rows of one key."""
        columns = self._columns(table)
        for make, first, end in self._pieces(columns, [0, table.num_rows]):
            yield from self._sliced(make, first, end, table)

    def _sliced(self, make: Make, first: int, end: int, table: pa.Table) -> Iterator[Any]:
        """Frames of the rows of one key."""
        rows = min(self._max_rows, self._fitting(table.slice(first, end - first)))
        for start in range(first, end, rows):
            yield make(start, min(start + rows, end))

    def _fitting(self, rows: pa.Table) -> int:
        """How many of the rows go into one frame, by their bytes."""
        count, size_bytes = int(rows.num_rows), int(rows.nbytes)
        if size_bytes <= self._max_bytes:
            return max(1, count)
        return max(1, -(-self._max_bytes * count // size_bytes))

    def _columns(self, table: pa.Table) -> list[_Column]:
        return [
            _column(column, field, self._timezone, own_types=self._own_types)
            for column, field in zip(table.columns, self._schema.fields, strict=True)
        ]

    def _keys(self, columns: Sequence[_Column], firsts: Sequence[int]) -> list[tuple[Any, ...]]:
        return (_own_keys if self._own_types else _keys)(columns, firsts)

    def _pieces(
        self, columns: Sequence[_Column], starts: Sequence[int]
    ) -> Iterable[tuple[Make, int, int]]:
        """What makes the frame of each key, with its rows."""
        columns, makers = columns[: self._shown], frame_maker()
        varying = [column for column in columns if column.with_nulls is not None]
        if not varying:
            make = makers(self._names, [column.values for column in columns])
            return [(make, a, b) for a, b in pairwise(starts)]
        patterns = np.stack([column.null_keys(starts) for column in varying], axis=1)
        made: dict[bytes, Make] = {}
        pieces = []
        for pattern, (a, b) in zip(map(bytes, patterns), pairwise(starts), strict=True):
            make_one = made.get(pattern)
            if make_one is None:
                flags = iter(pattern)
                arrays = [
                    column.with_nulls
                    if column.with_nulls is not None and next(flags)
                    else column.values
                    for column in columns
                ]
                make_one = made[pattern] = makers(self._names, arrays)
            pieces.append((make_one, a, b))
        return pieces


# --- columns of a chunk


@dataclass(frozen=True)
class _Column:
    """A chunk's column; ``with_nulls``: what a key with a null has instead of ``values``."""

    values: Array
    with_nulls: Array | None = None
    nulls: Array | None = None

    def null_keys(self, starts: Sequence[int]) -> Array:
        """Which keys have a null, bool."""
        assert self.nulls is not None
        counted = np.zeros(len(self.nulls) + 1, np.int64)
        np.cumsum(self.nulls, out=counted[1:])
        at_starts = counted[np.asarray(starts)]
        found: Array = at_starts[1:] > at_starts[:-1]
        return found


def _column(
    column: pa.ChunkedArray, field: StructField, timezone: str, *, own_types: bool
) -> _Column:
    kind = field.dataType
    if isinstance(kind, _INTEGERS):
        integer = column.type.to_pandas_dtype() if own_types else np.int64
        if column.null_count == 0:
            return _Column(_numpy(column, integer))
        filled = _numpy(pc.fill_null(column, 0), integer)
        nulls = _numpy(column.is_null(), np.bool_)
        return _Column(filled, np.where(nulls, np.nan, filled.astype(np.float64)), nulls)
    if isinstance(kind, _REALS):
        return _Column(_numpy(column, column.type.to_pandas_dtype() if own_types else np.float64))
    if isinstance(kind, BooleanType):
        if column.null_count == 0:
            return _Column(_numpy(column, np.bool_))
        filled = _numpy(pc.fill_null(column, False), np.bool_)
        return _Column(filled, _numpy(column, np.object_), _numpy(column.is_null(), np.bool_))
    if isinstance(kind, StringType):
        return _Column(_numpy(column, np.object_))
    values = _as_spark(column, kind, timezone)
    if isinstance(kind, _TIMES):
        return _Column(values.to_numpy(np.dtype("M8[ns]")))
    if isinstance(kind, DayTimeIntervalType):
        return _Column(values.to_numpy(np.dtype("m8[ns]")))
    return _Column(values.to_numpy(np.object_))


def _as_spark(column: pa.ChunkedArray, kind: DataType, timezone: str) -> Any:
    """A Series as pyspark's worker makes it."""
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, (*_INTEGERS, BooleanType)):
        # With a null in any of them, all arrays would hold objects.
        lists = column.combine_chunks()
        is_null = pc.list_flatten(lists).is_null()
        if is_null.true_count:
            rows = np.unique(pc.list_parent_indices(lists).filter(is_null).to_numpy())
            others = np.delete(np.arange(len(lists)), rows)
            values = np.empty(len(lists), object)
            for some in (rows, others):
                values[some] = _converted(lists.take(pa.array(some)), kind, timezone)
            return pd.Series(values)
    return _converted(column, kind, timezone)


def _converted(column: Any, kind: DataType, timezone: str) -> Any:
    series = column.to_pandas(
        date_as_object=True, coerce_temporal_nanoseconds=True, integer_object_nulls=True
    )
    convert = _create_converter_to_pandas(kind, True, timezone=timezone, struct_in_pandas="dict")
    return convert(series)


def _numpy(column: pa.ChunkedArray, dtype: Any) -> Array:
    values: Array = column.to_numpy().astype(dtype, copy=False)
    return values


def _keys(columns: Sequence[_Column], firsts: Sequence[int]) -> list[tuple[Any, ...]]:
    lists = []
    for column in columns:
        values = column.values[np.asarray(firsts)]
        if values.dtype.kind in "mM":
            lists.append(list(pd.Series(values)))
        elif column.nulls is not None:
            nulls = column.nulls[np.asarray(firsts)].tolist()
            lists.append(
                [None if null else v for v, null in zip(values.tolist(), nulls, strict=True)]
            )
        else:
            lists.append(values.tolist())
    return list(zip(*lists, strict=True))


def _own_keys(columns: Sequence[_Column], firsts: Sequence[int]) -> list[tuple[Any, ...]]:
    """Keys whose values are what the columns of a key's frame hold."""
    lists = []
    for column in columns:
        at = np.asarray(firsts)
        values = list(pd.Series(column.values[at])) if column.values.dtype.kind in "mM" else None
        values = list(column.values[at]) if values is None else values
        if column.nulls is not None and column.with_nulls is not None:
            for place in np.flatnonzero(column.nulls[at]):
                values[place] = column.with_nulls[at[place]]
        lists.append(values)
    return list(zip(*lists, strict=True))


def empty_frames(names: Sequence[str]) -> Callable[[], Any]:
    """Makes frames with these columns and no rows."""
    make = frame_maker()(names, [np.empty(0, object)] * len(names))
    return lambda: make(0, 0)
