"""Accumulators: what an aggregation keeps, and how it is made, merged and read, in columns.

Every accumulator is a few state fields. All of them null means "nothing yet", which is also what a
state without an entry gives: it is the neutral element of every merge.
"""

# ruff: noqa: D102  (Accumulator and EntryStore say what their methods do)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import types as T

from statebackend.errors import ValueMismatchError
from statebackend.operators.aggregate.arrow_numpy import (
    Ints,
    Mask,
    any_valid,
    arrow_of,
    first_of,
    interleaved,
    numpy_of,
    validity,
)

__all__ = ["Accumulator", "Count", "DoubleSum", "LongSum", "Mean", "Variance"]

Columns = Sequence[pa.Array]
Floats = NDArray[np.float64]

_INT64 = pa.int64()
_FLOAT64 = pa.float64()


class Accumulator(ABC):
    """One aggregation of one output column.

    Args:
        name: of the output column, for messages.
        inputs: the columns that it reads.

    Attributes:
        result_type: of the output column.
        fields: of its state: name to type, all nullable.
        function: names what the state means, see :attr:`meaning`.
        mergeable: partial accumulators, made anywhere, in any order, may be merged.
    """

    mergeable: ClassVar[bool] = True
    result_type: T.DataType
    function: str

    def __init__(self, name: str, inputs: Sequence[str], fields: Mapping[str, T.DataType]) -> None:
        self.name, self.inputs, self.fields = name, tuple(inputs), fields

    @property
    def meaning(self) -> str:
        """What the state holds, as far as its types do not say it: one name keeps one meaning.

        What may change without harm, such as a type that is widened, is left out.
        """
        return f"{self.function}({', '.join(self.inputs)})"

    @abstractmethod
    def lift(self, columns: Columns, starts: Ints) -> list[pa.Array]:
        """Accumulators of rows.

        Args:
            columns: the inputs, rows sorted by group.
            starts: the groups' segments (n + 1), none empty.

        Returns:
            One array of n for each state field.
        """

    @abstractmethod
    def merge(self, accumulators: Columns, starts: Ints) -> list[pa.Array]:
        """Accumulators sorted by group to one for each group; earlier ones stand first.

        Raises:
            ValueMismatchError: a sum that does not fit its type.
        """

    def combine(self, old: Columns, new: Columns) -> list[pa.Array]:
        """`merge` of two accumulators for each row, of which `old` is the earlier."""
        rows = len(old[0])
        return self.merge(interleaved(old, new), np.arange(0, 2 * rows + 1, 2, dtype=np.int64))

    @abstractmethod
    def result(self, accumulators: Columns) -> pa.Array:
        """The output column."""

    def overflow(self) -> ValueMismatchError:
        """The error for a result that does not fit."""
        return ValueMismatchError(
            f"Aggregation {self.name!r} overflows: a result does not fit into "
            f"{self.result_type.simpleString()}.",
            todo="Aggregate a wider type: cast the column to decimal(38, s), or to double.",
        )


# --- count --------------------------------------------------------------------------------------


class Count(Accumulator):
    """Rows, or those with a value: bigint."""

    function = "count"
    result_type = T.LongType()

    def __init__(self, name: str, inputs: Sequence[str] = ()) -> None:
        super().__init__(name, inputs, {"n": T.LongType()})

    def lift(self, columns: Columns, starts: Ints) -> list[pa.Array]:
        valid = validity(columns[0]) if columns else None
        if valid is None or len(starts) == 1:
            return [arrow_of(np.diff(starts), None, _INT64)]
        return [arrow_of(np.add.reduceat(valid, starts[:-1], dtype=np.int64), None, _INT64)]

    def merge(self, accumulators: Columns, starts: Ints) -> list[pa.Array]:
        if len(starts) == 1:
            return list(accumulators)
        counts = zero_filled(*numpy_of(accumulators[0]))
        return [arrow_of(np.add.reduceat(counts, starts[:-1]), None, _INT64)]

    def combine(self, old: Columns, new: Columns) -> list[pa.Array]:
        total = zero_filled(*numpy_of(old[0])) + zero_filled(*numpy_of(new[0]))
        return [arrow_of(total, None, _INT64)]

    def result(self, accumulators: Columns) -> pa.Array:
        return arrow_of(zero_filled(*numpy_of(accumulators[0])), None, _INT64)


# --- sums ---------------------------------------------------------------------------------------


class LongSum(Accumulator):
    """Sum of integers: bigint, null where there is no value."""

    function = "sum"
    result_type = T.LongType()

    def __init__(self, name: str, inputs: Sequence[str]) -> None:
        super().__init__(name, inputs, {"sum": T.LongType()})

    @property
    def meaning(self) -> str:
        return f"{super().meaning} as bigint"

    def lift(self, columns: Columns, starts: Ints) -> list[pa.Array]:
        values, valid = numpy_of(columns[0])
        return self._sums(values.astype(np.int64, copy=False), valid, starts)

    def merge(self, accumulators: Columns, starts: Ints) -> list[pa.Array]:
        return self._sums(*numpy_of(accumulators[0]), starts)

    def _sums(self, values: Ints, valid: Mask, starts: Ints) -> list[pa.Array]:
        if len(starts) == 1:
            return [arrow_of(values[:0], None, _INT64)]
        sums, fits = sum_longs(zero_filled(values, valid), starts)
        if not fits:
            raise self.overflow()
        return [arrow_of(sums, any_valid(valid, starts), _INT64)]

    def combine(self, old: Columns, new: Columns) -> list[pa.Array]:
        (a, a_valid), (b, b_valid) = numpy_of(old[0]), numpy_of(new[0])
        a, b = zero_filled(a, a_valid), zero_filled(b, b_valid)
        total = a + b
        # A sum wraps if its sign is neither's.
        if ((a ^ total) & (b ^ total) < 0).any():
            raise self.overflow()
        return [arrow_of(total, either(a_valid, b_valid), _INT64)]

    def result(self, accumulators: Columns) -> pa.Array:
        return accumulators[0]


class DoubleSum(Accumulator):
    """Sum of floats: double, null where there is no value."""

    function = "sum"
    result_type = T.DoubleType()

    def __init__(self, name: str, inputs: Sequence[str]) -> None:
        super().__init__(name, inputs, {"sum": T.DoubleType()})

    @property
    def meaning(self) -> str:
        return f"{super().meaning} as double"

    def lift(self, columns: Columns, starts: Ints) -> list[pa.Array]:
        values, valid = doubles(columns[0])
        sums = sum_doubles(zero_filled(values, valid), starts)
        return [arrow_of(sums, any_valid(valid, starts), _FLOAT64)]

    def merge(self, accumulators: Columns, starts: Ints) -> list[pa.Array]:
        return self.lift(accumulators, starts)

    def combine(self, old: Columns, new: Columns) -> list[pa.Array]:
        (a, a_valid), (b, b_valid) = numpy_of(old[0]), numpy_of(new[0])
        with np.errstate(all="ignore"):
            total = zero_filled(a, a_valid) + zero_filled(b, b_valid)
        return [arrow_of(total, either(a_valid, b_valid), _FLOAT64)]

    def result(self, accumulators: Columns) -> pa.Array:
        return accumulators[0]


# --- mean and variance --------------------------------------------------------------------------


class Mean(Accumulator):
    """Mean of integers or floats: double, null where there is no value."""

    function = "mean"
    result_type = T.DoubleType()

    def __init__(self, name: str, inputs: Sequence[str]) -> None:
        super().__init__(name, inputs, {"sum": T.DoubleType(), "n": T.LongType()})

    def lift(self, columns: Columns, starts: Ints) -> list[pa.Array]:
        values, valid = doubles(columns[0])
        sums = sum_doubles(zero_filled(values, valid), starts)
        return [arrow_of(sums, None, _FLOAT64), arrow_of(counts_of(valid, starts), None, _INT64)]

    def merge(self, accumulators: Columns, starts: Ints) -> list[pa.Array]:
        sums = sum_doubles(zero_filled(*numpy_of(accumulators[0])), starts)
        counts = sum_counts(zero_filled(*numpy_of(accumulators[1])), starts)
        return [arrow_of(sums, None, _FLOAT64), arrow_of(counts, None, _INT64)]

    def combine(self, old: Columns, new: Columns) -> list[pa.Array]:
        a, b = ([zero_filled(*numpy_of(column)) for column in side] for side in (old, new))
        with np.errstate(all="ignore"):
            sums = a[0] + b[0]
        return [arrow_of(sums, None, _FLOAT64), arrow_of(a[1] + b[1], None, _INT64)]

    def result(self, accumulators: Columns) -> pa.Array:
        sums, counts = (zero_filled(*numpy_of(column)) for column in accumulators)
        with np.errstate(all="ignore"):
            return arrow_of(sums / np.maximum(counts, 1), counts > 0, _FLOAT64)


class Variance(Accumulator):
    """Sample variance (or standard deviation): double, null below two values.

    State: count, mean, and the sum of squared differences from it (m2). Merged by the parallel
    formula of Chan, Golub and LeVeque (Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances, Stanford STAN-CS-79-773, 1979), for any number of parts at once:
    ``m2 = sum(m2_i) + sum(n_i * (mean_i - mean)**2)``.
    """

    function = "variance"
    result_type = T.DoubleType()

    def __init__(self, name: str, inputs: Sequence[str], *, root: bool = False) -> None:
        fields = {"n": T.LongType(), "mean": T.DoubleType(), "m2": T.DoubleType()}
        super().__init__(name, inputs, fields)
        self._root = root

    def lift(self, columns: Columns, starts: Ints) -> list[pa.Array]:
        values, valid = doubles(columns[0])
        values = zero_filled(values, valid)
        ones = np.ones(len(values)) if valid is None else valid.astype(np.float64)
        return _moments(ones, values, None, starts)

    def merge(self, accumulators: Columns, starts: Ints) -> list[pa.Array]:
        counts, means, m2 = (zero_filled(*numpy_of(column)) for column in accumulators)
        return _moments(counts.astype(np.float64), means, m2, starts)

    def combine(self, old: Columns, new: Columns) -> list[pa.Array]:
        n_a, mean_a, m2_a = (zero_filled(*numpy_of(column)) for column in old)
        n_b, mean_b, m2_b = (zero_filled(*numpy_of(column)) for column in new)
        n = n_a + n_b
        with np.errstate(all="ignore"):
            share = n_b / np.maximum(n, 1)
            apart = mean_b - mean_a
            both = (n_a > 0) & (n_b > 0)
            alone = np.where(n_a > 0, mean_a, mean_b)
            mean = np.where(both, mean_a + apart * share, alone)
            m2 = m2_a + m2_b + np.where(both, apart * apart * n_a * share, 0.0)
        return _moment_columns(n, mean, m2)

    def result(self, accumulators: Columns) -> pa.Array:
        counts, _, m2 = (zero_filled(*numpy_of(column)) for column in accumulators)
        with np.errstate(all="ignore"):
            variance = m2 / np.maximum(counts - 1, 1)
            shown = np.sqrt(variance) if self._root else variance
        return arrow_of(shown, counts > 1, _FLOAT64)


def _moments(counts: Floats, means: Floats, m2: Floats | None, starts: Ints) -> list[pa.Array]:
    """Count, mean and m2 by segment; ``m2`` None: each row is one value."""
    segment = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    # Around one of the segment's own values, sums of differences lose no digits.
    rows, found = first_of(counts > 0, starts)
    pivot = np.where(found, means[rows], 0.0) if len(rows) else np.zeros(0)
    total = sum_doubles(counts, starts)
    with np.errstate(all="ignore"):
        apart = np.where(counts > 0, means - pivot[segment], 0.0)
        mean = pivot + sum_doubles(counts * apart, starts) / np.maximum(total, 1.0)
        apart = np.where(counts > 0, means - mean[segment], 0.0)
        squares = counts * apart * apart
    if m2 is not None:
        squares = squares + m2
    return _moment_columns(total.astype(np.int64), mean, sum_doubles(squares, starts))


def _moment_columns(n: Ints, mean: Floats, m2: Floats) -> list[pa.Array]:
    return [arrow_of(n, None, _INT64), arrow_of(mean, None, _FLOAT64), arrow_of(m2, None, _FLOAT64)]


# --- what they share ----------------------------------------------------------------------------


def zero_filled(values: NDArray[Any], valid: Mask) -> NDArray[Any]:
    """Zero where null."""
    return values if valid is None else np.where(valid, values, values.dtype.type(0))


def either(one: Mask, other: Mask) -> Mask:
    """Valid where one of two is."""
    return None if one is None or other is None else one | other


def doubles(array: pa.Array) -> tuple[Floats, Mask]:
    """A column of numbers as doubles."""
    if isinstance(array.type, pa.Decimal128Type):
        array = array.cast(_FLOAT64)
    values, valid = numpy_of(array)
    return values.astype(np.float64, copy=False), valid


def sum_doubles(values: Floats, starts: Ints) -> Floats:
    """Sums by segment, infinities and NaN as they come."""
    if len(starts) == 1:
        return values[:0]
    with np.errstate(all="ignore"):
        sums: Floats = np.add.reduceat(values, starts[:-1])
    return sums


def sum_counts(values: Ints, starts: Ints) -> Ints:
    """Sums by segment of numbers that are too small to overflow."""
    return values[:0] if len(starts) == 1 else np.add.reduceat(values, starts[:-1])


def counts_of(valid: Mask, starts: Ints) -> Ints:
    """Valid rows by segment."""
    if valid is None or len(starts) == 1:
        return np.diff(starts)
    counts: Ints = np.add.reduceat(valid, starts[:-1], dtype=np.int64)
    return counts


def sum_longs(values: Ints, starts: Ints) -> tuple[Ints, bool]:
    """Sums by segment, and whether all of them fit into 64 bits."""
    begins = starts[:-1]
    largest = max(abs(int(np.min(values))), abs(int(np.max(values))))
    if largest * int(np.diff(starts).max()) < 1 << 63:
        return np.add.reduceat(values, begins), True
    low = np.add.reduceat(values & np.int64(0xFFFFFFFF), begins)
    high = np.add.reduceat(values >> np.int64(32), begins) + (low >> np.int64(32))
    fits = bool(((high >= -(1 << 31)) & (high < 1 << 31)).all())
    return (high << np.int64(32)) | (low & np.int64(0xFFFFFFFF)), fits
