"""Arrow columns as numpy sees them, and back; segments of sorted rows.

A *segment* is a run of rows of one group. ``starts`` (int64, n + 1) says where each of n segments
begins, the last entry where the last one ends. No segment is empty, but where said so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from statebackend.schema.arrow_buffers import values_of
from statebackend.state.binary_columns import bools_of, indices_of, take, valid_bits

__all__ = [
    "Ints",
    "Mask",
    "any_valid",
    "arrow_of",
    "bools_of",
    "first_of",
    "flags",
    "indices_of",
    "interleaved",
    "numpy_of",
    "order_ranks",
    "single_starts",
    "take",
    "validity",
    "validity_buffer",
]

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_] | None

_SIZES = {1: "i1", 2: "<i2", 4: "<i4", 8: "<i8"}


def numpy_of(array: pa.Array) -> tuple[NDArray[Any], Mask]:
    """Values and validity of a column of numbers, booleans, dates or times.

    Returns:
        The values (arbitrary where null; floats as such, booleans as int8, all else as integers of
        the type's width), and True where not null, or None where nothing is null.
    """
    valid = validity(array)
    kind = array.type
    if pt.is_boolean(kind):
        return values_of(array.cast(pa.uint8()), "i1"), valid
    size = kind.bit_width // 8
    form = f"<f{size}" if pt.is_floating(kind) else _SIZES[size]
    return values_of(array, form), valid


def arrow_of(values: NDArray[Any], valid: Mask, kind: pa.DataType) -> pa.Array:
    """The reverse of `numpy_of`: a column over the same memory where the widths agree."""
    if pt.is_boolean(kind):
        data = _packed(values.astype(bool))
        return pa.Array.from_buffers(kind, len(values), [validity_buffer(valid), data])
    size = kind.bit_width // 8
    form = f"<f{size}" if pt.is_floating(kind) else _SIZES[size]
    data = np.ascontiguousarray(values, dtype=form)
    return pa.Array.from_buffers(kind, len(data), [validity_buffer(valid), pa.py_buffer(data)])


def validity(array: pa.Array) -> Mask:
    """True where not null; None where nothing is."""
    return valid_bits(array) if array.null_count else None


def flags(values: NDArray[np.bool_], valid: Mask = None) -> pa.BooleanArray:
    """Booleans as a column; `pa.array` would import pandas, a second in a new worker."""
    return arrow_of(values, valid, pa.bool_())


def validity_buffer(valid: Mask) -> pa.Buffer | None:
    """Arrow's validity of a mask."""
    return None if valid is None or valid.all() else _packed(valid)


def _packed(values: NDArray[np.bool_]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))


def single_starts(rows: int) -> Ints:
    """Segments of one row each."""
    return np.arange(rows + 1, dtype=np.int64)


def any_valid(valid: Mask, starts: Ints) -> Mask:
    """Per segment: whether one of its rows is valid; None: all segments have one."""
    if valid is None or len(starts) == 1:
        return None
    found: NDArray[np.bool_] = np.logical_or.reduceat(valid, starts[:-1])
    return found


def first_of(mask: NDArray[np.bool_], starts: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Per segment: the first row of `mask`, and whether there is one (else its own first)."""
    chosen = np.flatnonzero(mask)
    at = np.searchsorted(chosen, starts[:-1])
    there = at < len(chosen)
    rows = starts[:-1].copy()
    rows[there] = chosen[at[there]]
    found = there & (rows < starts[1:])
    rows[~found] = starts[:-1][~found]
    return rows, found


def order_ranks(array: pa.Array) -> Ints:
    """Numbers in the order of the values, equal ones for equal values; arbitrary where null.

    Strings and binaries are ordered by their bytes, as Spark orders them without a collation.
    """
    coded = array.dictionary_encode(null_encoding="encode")
    order = indices_of(pc.sort_indices(coded.dictionary))
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    found: Ints = ranks[indices_of(coded.indices)]
    return found


def interleaved(first: Sequence[pa.Array], second: Sequence[pa.Array]) -> list[pa.Array]:
    """Columns of two record batches of n rows as one of 2 n: first[0], second[0], first[1]..."""
    rows = len(first[0])
    index = np.empty(2 * rows, np.int64)
    index[::2] = np.arange(rows)
    index[1::2] = np.arange(rows, 2 * rows)
    return [take(pa.concat_arrays([a, b]), index) for a, b in zip(first, second, strict=True)]
