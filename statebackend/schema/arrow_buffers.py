"""Arrow columns over the memory of numpy's arrays, and numpy's over Arrow's, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from statebackend.errors import ValueMismatchError

__all__ = ["Mask", "boolean_array", "bytes_between", "fixed_array", "valid_mask", "values_of"]

Mask = NDArray[np.bool_] | None


def fixed_array(record: NDArray[Any], validity: pa.Buffer | None = None) -> pa.BinaryArray:
    """A contiguous array of fixed-size items as a BinaryArray over the same memory.

    Raises:
        ValueMismatchError: more than 2 GiB, which an Arrow binary array cannot address.
    """
    size = record.dtype.itemsize
    if record.nbytes > 2**31 - 1:
        raise ValueMismatchError(
            f"{len(record)} rows of {size} bytes are more than the 2 GiB of one Arrow array.",
            todo="Pass smaller batches.",
        )
    offsets = np.arange(0, record.nbytes + 1, size, dtype=np.int32)
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(record)]
    return pa.Array.from_buffers(pa.binary(), len(record), buffers)


def boolean_array(flags: NDArray[np.bool_]) -> pa.BooleanArray:
    """Booleans as Arrow's; `pa.array` would import pandas, a second in a new worker."""
    bits = pa.py_buffer(np.packbits(flags, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(flags), [None, bits])


def bytes_between(
    buffer: pa.Buffer,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    valid: NDArray[np.bool_] | None,
) -> pa.BinaryArray:
    """The bytes from each start to its end.

    Args:
        starts, ends: ascending, within the buffer. valid: False: null.
    """
    rows = len(starts)
    if not rows:
        return pa.array([], pa.binary())
    # The pieces, and what lies between them, are the items of an array over the same bytes.
    bounds = np.empty(2 * rows, np.int32)
    bounds[::2], bounds[1::2] = starts, ends
    both = pa.Array.from_buffers(pa.binary(), len(bounds) - 1, [None, pa.py_buffer(bounds), buffer])
    places: NDArray[Any] = np.arange(0, len(bounds), 2)
    bits = None if valid is None else boolean_array(valid).buffers()[1]
    return both.take(pa.Array.from_buffers(pa.int64(), rows, [bits, pa.py_buffer(places)]))


def valid_mask(array: pa.Array) -> Mask:
    """True where not null; None when nothing is null."""
    if not array.null_count:
        return None
    valid = pc.is_valid(array)
    # `to_numpy` would import pandas: a second in a new worker.
    every = np.unpackbits(np.frombuffer(valid.buffers()[1], np.uint8), bitorder="little")
    return every[valid.offset : valid.offset + len(valid)].view(np.bool_)


def values_of(array: pa.Array, kind: str) -> NDArray[Any]:
    """The values of a fixed-width array as numpy sees them, no copy; arbitrary where null.

    Args:
        array: not boolean.
        kind: a numpy format of the array's byte width.
    """
    buffer = array.buffers()[1]
    values: NDArray[Any] = np.frombuffer(buffer if buffer is not None else b"", kind)
    # An all-null or empty array may come with less than it should hold.
    if len(values) < array.offset + len(array):
        return np.zeros(len(array), kind)
    return values[array.offset : array.offset + len(array)]
