"""Smallest, largest, first and last values."""

# ruff: noqa: D102  (Accumulator and EntryStore say what their methods do)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray
from pyspark.sql import types as T

from statebackend.key_hashing import canonical_bits
from statebackend.operators.aggregate.accumulators import Accumulator, Columns
from statebackend.operators.aggregate.arrow_numpy import (
    Ints,
    Mask,
    any_valid,
    arrow_of,
    first_of,
    flags,
    numpy_of,
    order_ranks,
    validity,
)
from statebackend.schema.type_table import simple_type

__all__ = ["Extreme", "FirstLast", "FirstLastBy", "ordered"]

_LONG_RANK = np.iinfo(np.int64)


def ordered(dtype: T.DataType) -> bool:
    """Whether values of the type can be compared here."""
    if isinstance(dtype, T.StringType):
        return dtype == T.StringType()
    return simple_type(dtype) is not None and not isinstance(dtype, T.NullType)


class Extreme(Accumulator):
    """Minimum or maximum, in the type of the column; NaN is larger than every number."""

    def __init__(
        self, name: str, inputs: Sequence[str], dtype: T.DataType, *, largest: bool
    ) -> None:
        super().__init__(name, inputs, {"value": dtype})
        self.result_type = dtype
        self._largest = largest
        self.function = "max" if largest else "min"
        self._by_rank = isinstance(dtype, T.StringType | T.BinaryType | T.DecimalType)

    def lift(self, columns: Columns, starts: Ints) -> list[pa.Array]:
        (column,) = columns
        if len(starts) == 1:
            return [column.slice(0, 0)]
        if self._by_rank:
            rows, found = _extreme_rows(column, starts, largest=self._largest)
            return [_taken(column, rows, found)]
        values, valid = numpy_of(column)
        pick = self._pick(values)
        filled = values if valid is None else np.where(valid, values, self._neutral(values))
        found_values = pick.reduceat(filled, starts[:-1])
        return [arrow_of(found_values, any_valid(valid, starts), column.type)]

    def merge(self, accumulators: Columns, starts: Ints) -> list[pa.Array]:
        return self.lift(accumulators, starts)

    def combine(self, old: Columns, new: Columns) -> list[pa.Array]:
        if self._by_rank:
            return super().combine(old, new)
        (a, a_valid), (b, b_valid) = numpy_of(old[0]), numpy_of(new[0])
        if a_valid is not None:
            a = np.where(a_valid, a, self._neutral(a))
        if b_valid is not None:
            b = np.where(b_valid, b, self._neutral(b))
        valid = None if a_valid is None or b_valid is None else a_valid | b_valid
        return [arrow_of(self._pick(a)(a, b), valid, old[0].type)]

    def result(self, accumulators: Columns) -> pa.Array:
        return accumulators[0]

    def _pick(self, values: NDArray[Any]) -> np.ufunc:
        # maximum lets NaN win; fmin lets it lose.
        if self._largest:
            return np.maximum
        return np.fmin if values.dtype.kind == "f" else np.minimum

    def _neutral(self, values: NDArray[Any]) -> Any:
        if values.dtype.kind == "f":
            return values.dtype.type(-np.inf if self._largest else np.nan)
        bounds = np.iinfo(values.dtype)
        return values.dtype.type(bounds.min if self._largest else bounds.max)


class FirstLast(Accumulator):
    """First or last value in order of arrival.

    State: the value, and whether there was a row (a value may be null).
    """

    mergeable = False

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        dtype: T.DataType,
        *,
        last: bool,
        ignore_nulls: bool = False,
    ) -> None:
        super().__init__(name, inputs, {"value": dtype, "seen": T.BooleanType()})
        self.result_type = dtype
        self._last, self._ignore_nulls = last, ignore_nulls
        self.function = "last" if last else "first"

    @property
    def meaning(self) -> str:
        return super().meaning + (" without nulls" if self._ignore_nulls else "")

    def lift(self, columns: Columns, starts: Ints) -> list[pa.Array]:
        (column,) = columns
        valid = validity(column) if self._ignore_nulls else None
        return self._chosen(column, valid, starts)

    def merge(self, accumulators: Columns, starts: Ints) -> list[pa.Array]:
        return self._chosen(accumulators[0], validity(accumulators[1]), starts)

    def _chosen(self, column: pa.Array, counted: Mask, starts: Ints) -> list[pa.Array]:
        if counted is None:
            rows = starts[1:] - 1 if self._last else starts[:-1]
            found = np.ones(len(rows), bool)
        elif self._last:
            rows, found = _last_of(counted, starts)
        else:
            rows, found = first_of(counted, starts)
        seen = flags(np.ones(len(rows), bool), found)
        return [_taken(column, rows, found), seen]

    def result(self, accumulators: Columns) -> pa.Array:
        return accumulators[0]


class FirstLastBy(Accumulator):
    """The value of the row with the smallest (first) or largest (last) order value.

    Rows without an order value are left out. Of several with the same, the one that arrived first
    is taken: only an order without ties gives the same result whatever the order of arrival.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        dtype: T.DataType,
        by: T.DataType,
        *,
        last: bool,
        ignore_nulls: bool = False,
    ) -> None:
        super().__init__(name, inputs, {"value": dtype, "by": by})
        self.result_type = dtype
        self._last, self._ignore_nulls = last, ignore_nulls
        self.function = "last" if last else "first"

    @property
    def meaning(self) -> str:
        value, by = self.inputs
        kept = " without nulls" if self._ignore_nulls else ""
        return f"{self.function}({value} by {by}){kept}"

    def lift(self, columns: Columns, starts: Ints) -> list[pa.Array]:
        value, by = columns
        if self._ignore_nulls and value.null_count:
            by = pc.if_else(value.is_valid(), by, pa.scalar(None, by.type))
        return self.merge([value, by], starts)

    def merge(self, accumulators: Columns, starts: Ints) -> list[pa.Array]:
        value, by = accumulators
        rows, found = _extreme_rows(by, starts, largest=self._last)
        return [_taken(value, rows, found), _taken(by, rows, found)]

    def result(self, accumulators: Columns) -> pa.Array:
        return accumulators[0]


def _taken(column: pa.Array, rows: Ints, found: NDArray[np.bool_]) -> pa.Array:
    return column.take(arrow_of(rows, found, pa.int64()))


def _last_of(mask: NDArray[np.bool_], starts: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    chosen = np.flatnonzero(mask)
    at = np.searchsorted(chosen, starts[1:]) - 1
    there = at >= 0
    rows = starts[:-1].copy()
    rows[there] = chosen[at[there]]
    found = there & (rows >= starts[:-1])
    rows[~found] = starts[:-1][~found]
    return rows, found


def _extreme_rows(
    column: pa.Array, starts: Ints, *, largest: bool
) -> tuple[Ints, NDArray[np.bool_]]:
    """Per segment: the first row with its smallest or largest value, and whether it has one."""
    if len(starts) == 1:
        return starts[:0], np.zeros(0, bool)
    ranks = ranks_of(column)
    valid = validity(column)
    pick, neutral = (np.maximum, _LONG_RANK.min) if largest else (np.minimum, _LONG_RANK.max)
    if valid is not None:
        ranks = np.where(valid, ranks, neutral)
    best = np.repeat(pick.reduceat(ranks, starts[:-1]), np.diff(starts))
    hit = ranks == best
    return first_of(hit if valid is None else hit & valid, starts)


def ranks_of(column: pa.Array) -> Ints:
    """Integers in the order of the values."""
    kind = column.type
    if pt.is_floating(kind):
        return _float_ranks(column)
    if pt.is_string(kind) or pt.is_binary(kind) or pt.is_decimal(kind):
        return order_ranks(column)
    return numpy_of(column)[0].astype(np.int64)


def _float_ranks(column: pa.Array) -> Ints:
    """The bits of a float as an integer of the same order; one zero, one NaN, the largest."""
    values, _ = numpy_of(column)
    with np.errstate(all="ignore"):
        wide = values.astype(np.float64)
    bits = canonical_bits(wide.view(np.uint64)).view(np.int64)
    return np.where(bits < 0, bits ^ np.int64(0x7FFFFFFFFFFFFFFF), bits)
