"""Equal rows get equal numbers: grouping by columns, as the engine tells keys apart.

Equality is that of `statebackend.schema.keys.key_codec`: one NaN, one zero, a null equals a null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray
from pyspark.sql import types as T

from statebackend.key_hashing import canonical_bits
from statebackend.operators.aggregate.arrow_numpy import Ints, arrow_of, numpy_of
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.state.binary_columns import indices_of, places_array, valid_bits

__all__ = ["Grouped", "first_rows", "group_rows", "order_by_code"]

_DENSE_SPARE: Final = 1024
_DENSE_TIMES: Final = 4
_CODES_MAX: Final = 1 << 62
_HALF: Final = 16


class Grouped:
    """The groups of n rows.

    Attributes:
        codes: int64, n: which group a row is of, ``0 <= code < groups``.
        groups: how many there are, each with a row.
    """

    def __init__(self, codes: Ints, groups: int) -> None:
        self.codes, self.groups = codes, groups

    def counts(self) -> Ints:
        """Rows of each group."""
        return np.bincount(self.codes, minlength=self.groups)

    def starts(self) -> Ints:
        """Segments of the rows in the order of :meth:`order`."""
        starts = np.zeros(self.groups + 1, np.int64)
        np.cumsum(self.counts(), out=starts[1:])
        return starts

    def order(self) -> Ints:
        """Rows sorted by group; rows of one group keep their order."""
        return order_by_code(self.codes, self.groups)


def group_rows(columns: Sequence[pa.Array], dtypes: Sequence[T.DataType]) -> Grouped:
    """Number the groups of equal rows.

    Args:
        columns: the columns to tell rows apart by, in the Arrow types of `schema.types`; with none,
            all rows are one group's.
        dtypes: their Spark types.
    """
    rows = len(columns[0]) if columns else 0
    codes, span = _codes_of(columns[0], dtypes[0]) if columns else (np.zeros(0, np.int64), 1)
    for column, dtype in zip(columns[1:], dtypes[1:], strict=True):
        more, factor = _codes_of(column, dtype)
        if span * factor >= _CODES_MAX:
            found = _compact(codes, span, rows)
            codes, span = found.codes, found.groups
        codes, span = codes * np.int64(factor) + more, span * factor
    return _compact(codes, span, rows)


def first_rows(grouped: Grouped) -> Ints:
    """The first row of each group."""
    first = np.empty(grouped.groups, np.int64)
    # The last write to a place wins: backwards, that is the first row.
    first[grouped.codes[::-1]] = np.arange(len(grouped.codes) - 1, -1, -1)
    return first


def order_by_code(codes: Ints, groups: int) -> Ints:
    """A stable sort of numbers below `groups`, by their 16-bit halves (numpy's radix sort)."""
    order: Ints = np.argsort(codes.astype(np.uint16), kind="stable")
    shift = _HALF
    while groups > 1 << shift:
        half = (codes[order] >> shift).astype(np.uint16)
        order = order[np.argsort(half, kind="stable")]
        shift += _HALF
    return order


def _compact(codes: Ints, span: int, rows: int) -> Grouped:
    """Codes without gaps."""
    if span > _DENSE_TIMES * rows + _DENSE_SPARE:
        coded = places_array(codes).dictionary_encode()
        return Grouped(indices_of(coded.indices).astype(np.int64), len(coded.dictionary))
    there = np.zeros(span, bool)
    there[codes] = True
    groups = int(np.count_nonzero(there))
    if groups == span:
        return Grouped(codes, groups)
    return Grouped((np.cumsum(there) - 1)[codes], groups)


def _codes_of(column: pa.Array, dtype: T.DataType) -> tuple[Ints, int]:
    """Codes of one column, with gaps, and their bound."""
    kind = column.type
    if pt.is_string(kind) or pt.is_binary(kind):
        return _encoded(column)
    if pt.is_floating(kind):
        values, _ = numpy_of(column)
        size = values.dtype.itemsize
        bits = canonical_bits(values.view(f"<u{size}")).view(f"<i{size}")
        return _integer_codes(bits, _nulls(column))
    if pt.is_decimal128(kind):
        sixteen = pa.Array.from_buffers(
            pa.binary(16), len(column), column.buffers(), offset=column.offset
        )
        return _encoded(sixteen)
    if pt.is_list(kind) or pt.is_struct(kind):
        codec = KeyCodec(T.StructType([T.StructField("k", dtype)]), allow_all_null=True)
        return _encoded(codec.encode_arrow([column]))
    return _integer_codes(numpy_of(column)[0], _nulls(column))


def _nulls(column: pa.Array) -> NDArray[np.bool_] | None:
    if not column.null_count:
        return None
    return ~valid_bits(column)


def _encoded(column: pa.Array) -> tuple[Ints, int]:
    coded = column.dictionary_encode(null_encoding="encode")
    return indices_of(coded.indices).astype(np.int64), max(1, len(coded.dictionary))


def _column(values: NDArray[Any]) -> pa.Array:
    kind = pa.from_numpy_dtype(values.dtype)
    return arrow_of(values, None, kind)


def _integer_codes(values: NDArray[Any], nulls: NDArray[np.bool_] | None) -> tuple[Ints, int]:
    """Offsets from the smallest value where the range is small; null comes first."""
    if not len(values):
        return np.zeros(0, np.int64), 1
    extra = 0 if nulls is None else 1
    if nulls is not None:
        present = values[~nulls]
        filler = present[0] if len(present) else values.dtype.type(0)
        values = np.where(nulls, filler, values)
    low, high = int(values.min()), int(values.max())
    span = high - low + 1
    if span <= _DENSE_TIMES * len(values) + _DENSE_SPARE:
        codes = values.astype(np.int64) - np.int64(low)
    else:
        codes, span = _encoded(_column(values))
    if nulls is not None:
        codes = np.where(nulls, 0, codes + 1)
    return codes, span + extra
