"""Sums and means of decimals, exact."""

# ruff: noqa: D102  (Accumulator says what its methods do)

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from statebackend.operators.aggregate.accumulators import (
    Accumulator,
    Columns,
    counts_of,
    sum_counts,
    zero_filled,
)
from statebackend.operators.aggregate.arrow_numpy import (
    Ints,
    Mask,
    any_valid,
    arrow_of,
    numpy_of,
    validity,
)
from statebackend.operators.aggregate.int128 import (
    decimal_halves,
    decimals_of,
    fits_digits,
    sum_halves,
)
from statebackend.schema.types import arrow_type

__all__ = ["DecimalMean", "DecimalSum"]

_INT64 = pa.int64()
_FLOAT64 = pa.float64()


class DecimalSum(Accumulator):
    """Sum of decimal(p, s): decimal(min(38, p + 10), s), null where there is no value."""

    function = "sum"

    def __init__(self, name: str, inputs: Sequence[str], dtype: T.DecimalType) -> None:
        super().__init__(name, inputs, {"hi": T.LongType(), "lo": T.LongType()})
        self._digits = min(38, dtype.precision + 10)
        self.result_type = T.DecimalType(self._digits, dtype.scale)
        # All of 128 bits whatever the precision, which may change; the scale is nowhere else.
        self._stored = T.DecimalType(38, dtype.scale).simpleString()

    @property
    def meaning(self) -> str:
        return f"{super().meaning} as {self._stored}"

    def lift(self, columns: Columns, starts: Ints) -> list[pa.Array]:
        hi, lo = decimal_halves(columns[0])
        return self._sums(hi, lo, validity(columns[0]), starts)

    def merge(self, accumulators: Columns, starts: Ints) -> list[pa.Array]:
        hi, valid = numpy_of(accumulators[0])
        return self._sums(hi, numpy_of(accumulators[1])[0], valid, starts)

    def _sums(self, hi: Ints, lo: Ints, valid: Mask, starts: Ints) -> list[pa.Array]:
        high, low, fits = sum_halves(zero_filled(hi, valid), zero_filled(lo, valid), starts)
        if not (fits & fits_digits(high, low, self._digits)).all():
            raise self.overflow()
        there = any_valid(valid, starts)
        return [arrow_of(high, there, _INT64), arrow_of(low, there, _INT64)]

    def result(self, accumulators: Columns) -> pa.Array:
        hi, valid = numpy_of(accumulators[0])
        lo, _ = numpy_of(accumulators[1])
        # State may be from a column of more digits.
        if not fits_digits(zero_filled(hi, valid), zero_filled(lo, valid), self._digits).all():
            raise self.overflow()
        return decimals_of(hi, lo, valid, arrow_type(self.result_type))


class DecimalMean(Accumulator):
    """Mean of decimals: double, null where there is no value; the sum is kept exact."""

    function = "mean"
    result_type = T.DoubleType()

    def __init__(self, name: str, inputs: Sequence[str], dtype: T.DecimalType) -> None:
        self._sum = DecimalSum(name, inputs, dtype)
        super().__init__(name, inputs, {**self._sum.fields, "n": T.LongType()})

    @property
    def meaning(self) -> str:
        return self._sum.meaning.replace("sum", self.function, 1)

    def lift(self, columns: Columns, starts: Ints) -> list[pa.Array]:
        counts = counts_of(validity(columns[0]), starts)
        return [*self._sum.lift(columns, starts), arrow_of(counts, None, _INT64)]

    def merge(self, accumulators: Columns, starts: Ints) -> list[pa.Array]:
        counts = sum_counts(zero_filled(*numpy_of(accumulators[2])), starts)
        return [*self._sum.merge(accumulators[:2], starts), arrow_of(counts, None, _INT64)]

    def result(self, accumulators: Columns) -> pa.Array:
        sums, valid = numpy_of(self._sum.result(accumulators[:2]).cast(_FLOAT64))
        counts = zero_filled(*numpy_of(accumulators[2]))
        with np.errstate(all="ignore"):
            return arrow_of(sums / np.maximum(counts, 1), valid, _FLOAT64)
