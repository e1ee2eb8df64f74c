"""The pandas flavour's output: many small DataFrames to record batches of the declared schema.

A frame's values are copied out when it comes, a few microseconds' work; they are converted a few
thousand rows at a time, by pyspark's converters. Columns are found as Spark finds them: by name if
any column of the frame has one, by position otherwise. A column too many is refused, although Spark
leaves it out: its name may be misspelled, and its values would be lost in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Final, NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.pandas.types import _create_converter_from_pandas
from pyspark.sql.types import (
    DecimalType,
    StructField,
    StructType,
)

from statebackend.errors import ValueMismatchError
from statebackend.operators.rows.frozen_values import MUTABLE, frozen_in_frame
from statebackend.operators.rows.returned_row_checks import (
    MisfitError,
    how_to_name,
    inner_names,
    unknown_field,
)
from statebackend.operators.rows.row_conversion import arrow_schema

__all__ = ["FrameWriter"]

_PLAIN_KINDS: Final = "iufbO"
_ORDERS_MAX: Final = 256
_INTEGERS: Final = pa.decimal128(20, 0)
"""Holds any integer of 64 bits."""

_Order = list[tuple[Callable[[Any], None], bool] | None]
"""By a frame's column: what takes its values, and whether they may be changed from outside."""


class FrameWriter:
    """Collects frames and turns them into record batches of the declared schema.

    Args:
        schema: the output schema.
        describe: says whose frames these are, for errors.
        timezone: the session's, in which timestamps without a zone are read.
        max_rows: rows per record batch.
        by_name: Spark's ``spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName``.
        safe: refuse values that a conversion would change (a fraction for an integer, an
            overflow): Spark's ``spark.sql.execution.pandas.convertToArrowArraySafely``.
    """

    def __init__(
        self,
        schema: StructType,
        describe: Callable[[], str],
        *,
        timezone: str,
        max_rows: int = 10_000,
        by_name: bool = True,
        safe: bool = True,
    ) -> None:
        self._schema = schema
        self._arrow = arrow_schema(schema)
        self._describe = describe
        self._timezone = timezone
        self._max_rows = max_rows
        self._by_name = by_name
        self._safe = safe
        self._mutable = [isinstance(field.dataType, MUTABLE) for field in schema.fields]
        self._columns: list[list[Any]] = [[] for _ in schema.fields]
        self._orders: dict[tuple[Any, ...], _Order] = {}
        self._copy_out = _copier()
        self.pending = 0

    def collect(self, frames: Iterable[Any]) -> Iterator[pa.RecordBatch]:
        """Collect DataFrames; a batch whenever there is a full one.

        Raises:
            ValueMismatchError: no DataFrame, or one without a declared column.
        """
        if isinstance(frames, pd.DataFrame):
            self._refuse_frames(frames)
        for frame in frames:
            if not isinstance(frame, pd.DataFrame):
                self._refuse_frames(frame)
            rows = len(frame)
            names = tuple(frame.columns.tolist())
            order = self._orders.get(names)
            if order is None:
                order = self._order(names, rows, frames)
            if not rows:
                continue
            self._copy_out(frame, order)
            self.pending += rows
            if self.pending >= self._max_rows:
                batch = self.take()
                for start in range(0, batch.num_rows, self._max_rows):
                    yield batch.slice(start, self._max_rows)

    def take(self) -> pa.RecordBatch:
        """What is collected as one batch; the writer is empty afterwards.

        Raises:
            ValueMismatchError: a value does not fit its column.
        """
        rows, self.pending = self.pending, 0
        taken = [list(column) for column in self._columns]
        for column in self._columns:
            column.clear()
        if not taken:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
        arrays = [
            self._array(pieces, field, arrow.type)
            for pieces, field, arrow in zip(taken, self._schema.fields, self._arrow, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._arrow)

    # --- taking in

    def _order(self, names: tuple[Any, ...], rows: int, output: Any) -> _Order:
        """Which declared column is where in a frame with these columns; remembered.

        ``output``: what has just yielded such a frame.
        """
        wanted = self._schema.names
        if not names and rows == 0:  # pd.DataFrame(), as Spark allows
            return []
        if self._by_name and any(isinstance(name, str) for name in names):
            for name in wanted:
                if names.count(name) != 1:
                    self._refuse_columns(name, names, output)
            unknown = unknown_field(names, wanted)
            if unknown is not None:
                self._refuse_unknown(unknown, names, output)
            positions: Sequence[int] = [names.index(name) for name in wanted]
        else:
            if len(names) < len(wanted):
                self._refuse_columns(wanted[len(names)], names, output)
            if len(names) > len(wanted):
                self._refuse_unknown(names[len(wanted)], names, output)
            positions = range(len(wanted))
        order: _Order = [None] * len(names)
        for position, column, mutable in zip(positions, self._columns, self._mutable, strict=True):
            order[position] = (column.append, mutable)
        if len(self._orders) >= _ORDERS_MAX:  # made up anew for each frame
            self._orders.clear()
        self._orders[names] = order
        return order

    def _refuse_frames(self, found: Any) -> NoReturn:
        kind = type(found)
        raise ValueMismatchError(
            f"{self._describe()} returned {kind.__module__}.{kind.__qualname__} "
            "where an iterator of pandas DataFrames was expected.",
            todo="Yield DataFrames from the processor's methods.",
        )

    def _refuse_columns(self, name: str, names: tuple[Any, ...], output: Any) -> NoReturn:
        often = names.count(name)
        wrong = unknown_field(names, self._schema.names)
        hint = "" if often or wrong is None else f", but with {wrong!r}"
        error = ValueMismatchError(
            f"{self._describe()} returned a DataFrame with the columns {list(names)!r}, "
            f"{'in which' if often else 'without'} the column {name!r}"
            f"{f' comes {often} times' if often else hint}.",
            todo=f"Give it the columns of output_schema ({self._schema.simpleString()}).",
        )
        raise MisfitError.at(error, output)

    def _refuse_unknown(self, name: Any, names: tuple[Any, ...], output: Any) -> NoReturn:
        error = ValueMismatchError(
            f"{self._describe()} returned a DataFrame with the column {name!r}, which "
            f"output_schema does not have ({self._schema.simpleString()}); its columns are "
            f"{list(names)!r}.",
            todo=how_to_name(name, self._schema.names),
        )
        raise MisfitError.at(error, output)

    # --- converting

    def _array(self, pieces: list[Any], field: StructField, arrow: pa.DataType) -> pa.Array:
        if not pieces:
            return pa.array([], arrow)
        self._check_names(pieces, field)
        kinds: dict[Any, list[int]] = {}
        for i, piece in enumerate(pieces):
            kinds.setdefault(piece.dtype, []).append(i)
        if len(kinds) == 1:
            array = self._joined(pieces, field, arrow)
        else:  # a type at a time, and then back into order
            arrays, rows = [], []
            ends = np.cumsum([len(piece) for piece in pieces])
            for places in kinds.values():
                arrays.append(self._joined([pieces[i] for i in places], field, arrow))
                rows += [np.arange(ends[i] - len(pieces[i]), ends[i]) for i in places]
            array = pa.concat_arrays(arrays).take(pa.array(np.argsort(np.concatenate(rows))))
        if not field.nullable and array.null_count:
            raise self._refused(field, "a null in a column that is declared without")
        return array

    def _check_names(self, pieces: list[Any], field: StructField) -> None:
        check = inner_names(field.dataType)
        if check is None:
            return
        try:
            for piece in pieces:
                for value in piece:
                    check(value)
        except ValueError as error:
            raise self._refused(field, str(error)) from error

    def _joined(self, pieces: list[Any], field: StructField, arrow: pa.DataType) -> pa.Array:
        """Pieces of one dtype, in one go; piece by piece if that fails, for what it may mean."""
        cast = pieces[0].dtype != object  # what Arrow infers must not depend on other frames
        try:
            return self._converted(_concatenated(pieces), field, arrow, cast)
        except Exception as error:
            if not isinstance(error, (pa.ArrowException, TypeError, ValueError, AssertionError)):
                raise self._refused(field, f"{type(error).__name__}: {error}") from error
        arrays = []
        for piece in pieces:
            try:
                arrays.append(self._converted(pd.Series(piece), field, arrow, True))
            except Exception as error:
                raise self._refused(
                    field, f"dtype {piece.dtype}, {type(error).__name__}: {error}"
                ) from error
        return pa.concat_arrays(arrays)

    def _converted(
        self, series: Any, field: StructField, arrow: pa.DataType, cast: bool
    ) -> pa.Array:
        # As pyspark's PandasToArrowConversion does it.
        kind = field.dataType
        if isinstance(kind, DecimalType) and pd.api.types.is_integer_dtype(series.dtype):
            return _as_decimals(series, arrow)
        convert = _create_converter_from_pandas(
            kind, timezone=self._timezone, error_on_duplicated_field_names=False
        )
        series = convert(series)
        mask = None if hasattr(series.array, "__arrow_array__") else series.isnull().to_numpy()
        try:
            array = pa.Array.from_pandas(series, mask=mask, type=arrow, safe=self._safe)
        except pa.ArrowInvalid:
            if not cast:
                raise
            array = pa.Array.from_pandas(series, mask=mask).cast(arrow, safe=self._safe)
        return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array

    def _refused(self, field: StructField, why: str) -> ValueMismatchError:
        return ValueMismatchError(
            f"{self._describe()} returned a value for column {field.name!r} that is no "
            f"{field.dataType.simpleString()} ({why}).",
            todo="Return values of the types that output_schema declares.",
        )


# --- out of frames


def inner_copy(frame: Any, order: _Order) -> None:
    """Copy the columns out block by block (pandas 2.2 and 2.3)."""
    # Converted later: until then the user may change the frame and give it again.
    for block in frame._mgr.blocks:
        values = block.values
        places = block.mgr_locs.as_array.tolist()
        if type(values) is np.ndarray and values.dtype.kind in _PLAIN_KINDS:
            values = values.copy()
            for row, place in enumerate(places):
                taker = order[place]
                if taker is not None:
                    taker[0](_all_frozen(values[row]) if taker[1] else values[row])
            continue
        for row, place in enumerate(places):
            taker = order[place]
            if taker is not None:
                taker[0](_copied(values[row] if values.ndim > 1 else values))


def public_copy(frame: Any, order: _Order) -> None:
    """The same as anyone can, at some ten times the cost."""
    for place, taker in enumerate(order):
        if taker is not None:
            series = frame.iloc[:, place]
            values = _copied(series.array)
            if isinstance(series.dtype, np.dtype):
                values = series.to_numpy(copy=True)
            taker[0](_all_frozen(values) if taker[1] and series.dtype == object else values)


@cache
def _copier() -> Callable[[Any, _Order], None]:
    """The quick way if this pandas has it, the public one otherwise."""
    return choose_copier(inner_copy)


def choose_copier(quick: Callable[[Any, _Order], None]) -> Callable[[Any, _Order], None]:
    """``quick``, if it finds what :func:`public_copy` finds."""
    values = {
        "a": [1, 2],
        "b": ["x", None],
        "c": [3, 4],
        "d": [0.5, 1.5],
        "e": [pd.Timestamp(5), pd.NaT],
        "f": pd.array([1, None], "Int64"),
        "g": [pd.Timedelta(6), pd.NaT],
    }
    frame = pd.DataFrame(values)
    frame["h"] = frame["a"] + frame["c"]
    found: list[list[Any]] = [[], []]
    try:
        for copy, into in zip((quick, public_copy), found, strict=True):
            columns: list[list[Any]] = [[] for _ in frame.columns]
            copy(frame, [None, *[(column.append, False) for column in columns[1:]]])
            into += [(one.dtype, list(pd.Series(one))) for column in columns for one in column]
        same = repr(found[0]) == repr(found[1]) and len(found[0]) == len(frame.columns) - 1
    except Exception:
        same = False
    return quick if same else public_copy


def _as_decimals(series: Any, arrow: pa.DataType) -> pa.Array:
    """Integers as decimals of a narrower type than Arrow would cast them to, each value checked."""
    array = pa.Array.from_pandas(series).cast(_INTEGERS)
    return array.cast(arrow, safe=True)


def _copied(values: Any) -> Any:
    """A copy of a pandas array: NumPy's where that says the same."""
    if isinstance(values, pd.Categorical) or isinstance(values.dtype, np.dtype):
        return np.asarray(values).copy()  # np.array does not copy pandas 2.2's times
    return values.copy()


def _all_frozen(values: Any) -> Any:
    for i, value in enumerate(values):
        values[i] = frozen_in_frame(value)
    return values


def _concatenated(pieces: list[Any]) -> Any:
    if isinstance(pieces[0], np.ndarray):
        values = np.concatenate(pieces)
        return pd.Series(values, dtype=values.dtype)
    return pd.concat([pd.Series(piece) for piece in pieces], ignore_index=True)
