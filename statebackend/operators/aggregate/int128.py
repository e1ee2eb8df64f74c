"""Exact sums of decimals: 128-bit integers in columns, by limbs of 32 bits.

A sum is kept as two bigints, `hi` and `lo`: ``hi * 2**64 + lo``, `lo` read as unsigned. So the
state of a sum of decimals of any precision has a fixed width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.operators.aggregate.arrow_numpy import Ints, Mask, validity_buffer

__all__ = ["decimal_halves", "decimals_of", "fits_digits", "sum_halves"]

_LIMB = np.int64(0xFFFFFFFF)
_SHIFT = np.int64(32)


def decimal_halves(array: pa.Array) -> tuple[Ints, Ints]:
    """High and low half of every unscaled value of a decimal128 column; arbitrary where null."""
    halves = np.frombuffer(array.buffers()[1] or b"", "<i8")
    wanted = halves[2 * array.offset : 2 * (array.offset + len(array))].reshape(-1, 2)
    if len(wanted) < len(array):  # an all-null array may come without values
        wanted = np.zeros((len(array), 2), np.int64)
    return wanted[:, 1], wanted[:, 0]


def sum_halves(hi: Ints, lo: Ints, starts: Ints) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Sums by segment.

    Returns:
        High and low half of each sum, and whether it fits into 128 bits.
    """
    if len(starts) == 1:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, np.zeros(0, bool)
    # Fewer than 2**31 rows: no sum of limbs leaves 64 bits.
    limbs = [lo & _LIMB, (lo >> _SHIFT) & _LIMB, hi & _LIMB, hi >> _SHIFT]
    sums = [np.add.reduceat(limb, starts[:-1]) for limb in limbs]
    for index in range(3):
        sums[index + 1] += sums[index] >> _SHIFT
        sums[index] &= _LIMB
    top = sums[3]
    fits = (top >= -(1 << 31)) & (top < 1 << 31)
    return (top << _SHIFT) | sums[2], (sums[1] << _SHIFT) | sums[0], fits


def fits_digits(hi: Ints, lo: Ints, digits: int) -> NDArray[np.bool_]:
    """Whether each number has at most so many decimal digits."""
    bound = 10**digits - 1
    unsigned = lo.view(np.uint64)

    def at_most(limit: int) -> NDArray[np.bool_]:
        high, low = limit >> 64, np.uint64(limit & (2**64 - 1))
        below: NDArray[np.bool_] = (hi < high) | ((hi == high) & (unsigned <= low))
        return below

    return at_most(bound) & ~at_most(-bound - 1)


def decimals_of(hi: Ints, lo: Ints, valid: Mask, kind: pa.DataType) -> pa.Array:
    """A decimal128 column of unscaled values."""
    data: NDArray[Any] = np.empty((len(hi), 2), "<i8")
    data[:, 0], data[:, 1] = lo, hi
    return pa.Array.from_buffers(kind, len(hi), [validity_buffer(valid), pa.py_buffer(data)])
