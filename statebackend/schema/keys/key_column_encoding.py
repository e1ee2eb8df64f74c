"""Canonical key bytes by the column: the vectorised half of `statebackend.schema.keys.key_codec`.

The layout is described there. A key is a run of *parts*: fixed-width pieces (tags, numbers,
lengths) and bodies of varying length. Neighbouring fixed pieces share one numpy record; records
and bodies are then glued row by row in Arrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import types as T

from statebackend.key_hashing import canonical_bits
from statebackend.schema.arrow_buffers import (
    Mask,
    boolean_array,
    fixed_array,
    valid_mask,
    values_of,
)

__all__ = ["encode_columns"]

# A fixed-width piece: its numpy format, and its values or one for all rows.
Fixed = tuple[str, NDArray[Any] | int]
# A piece, or a body: a BinaryArray.
Part = Any

_SIGN = {1: 0x80, 2: 0x8000, 4: 0x80000000, 8: 1 << 63}


def encode_columns(
    columns: Sequence[pa.Array], dtypes: Sequence[T.DataType], rows: int
) -> pa.BinaryArray:
    """Key bytes of every row.

    Args:
        columns: arrays in the Arrow types of `types.arrow_type`, each of `rows` rows.
        dtypes: their Spark types.
        rows: the number of rows.

    Raises:
        ValueMismatchError: more than 2 GiB of keys.
    """
    parts: list[Part] = []
    for column, dtype in zip(columns, dtypes, strict=True):
        _emit(column, dtype, None, parts)
    glued: list[pa.Array] = []
    fixed: list[Fixed] = []
    for part in parts:
        if isinstance(part, tuple):
            fixed.append(part)
        else:
            glued += [_record(fixed, rows), part]
            fixed = []
    if fixed:
        glued.append(_record(fixed, rows))
    return glued[0] if len(glued) == 1 else pc.binary_join_element_wise(*glued, b"")


def _record(parts: list[Fixed], rows: int) -> pa.BinaryArray:
    kind = np.dtype([(f"p{index}", form) for index, (form, _) in enumerate(parts)])
    record = np.empty(rows, kind)
    for index, (_, values) in enumerate(parts):
        record[f"p{index}"] = values
    return fixed_array(record)


def _emit(array: pa.Array, dtype: T.DataType, outer: Mask, parts: list[Part]) -> None:
    """Append the parts of one field; `outer` says where the structs around it are there."""
    own = valid_mask(array)
    valid = own if outer is None else (outer if own is None else outer & own)
    parts.append(("u1", 1 if valid is None else valid.view(np.uint8)))
    if isinstance(dtype, T.StructType):
        for index, field in enumerate(dtype):
            _emit(array.field(index), field.dataType, valid, parts)
    elif isinstance(dtype, T.ArrayType):
        _emit_list(array, dtype, valid, parts)
    elif isinstance(dtype, T.StringType | T.BinaryType):
        # Offsets of a sliced array are its own once viewed through numpy's slice.
        offsets = _offsets(array)
        body = array.cast(pa.binary())
        _emit_body(np.diff(offsets), body, valid, parts)
    else:
        for form, values in _fixed(array, dtype):
            parts.append((form, values if valid is None else np.where(valid, values, 0)))


def _emit_body(lengths: NDArray[Any], body: pa.Array, valid: Mask, parts: list[Part]) -> None:
    if valid is not None:
        lengths = np.where(valid, lengths, 0)
        body = pc.if_else(boolean_array(valid), body, pa.scalar(b"", pa.binary()))
    parts += [(">u4", lengths), body]


def _emit_list(array: pa.Array, dtype: T.ArrayType, valid: Mask, parts: list[Part]) -> None:
    offsets = _offsets(array)
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    elements = array.values.slice(first, last - first)
    encoded = encode_columns([elements], [dtype.elementType], len(elements))
    lists = pa.ListArray.from_arrays(pa.array(offsets - np.int32(first), pa.int32()), encoded)
    _emit_body(np.diff(offsets), pc.binary_join(lists, b""), valid, parts)


def _offsets(array: pa.Array) -> NDArray[np.int32]:
    buffer = array.buffers()[1]
    if buffer is None or buffer.size == 0:
        return np.zeros(1, np.int32)
    offsets = np.frombuffer(buffer, np.int32)
    return offsets[array.offset : array.offset + len(array) + 1]


def _fixed(array: pa.Array, dtype: T.DataType) -> list[tuple[str, NDArray[Any]]]:
    """The fixed-width pieces of a simple type, most significant first."""
    if isinstance(dtype, T.BooleanType):
        return [("u1", values_of(array.cast(pa.uint8()), "u1"))]
    if isinstance(dtype, T.DecimalType):
        halves = values_of(
            pa.Array.from_buffers(_SIXTEEN, len(array), array.buffers(), offset=array.offset),
            "<u8,<u8",
        )
        return [(">u8", halves["f1"] ^ np.uint64(_SIGN[8])), (">u8", halves["f0"])]
    size = array.type.bit_width // 8
    bits = values_of(array, f"<u{size}")
    sign = bits.dtype.type(_SIGN[size])
    if isinstance(dtype, T.FloatType | T.DoubleType):
        bits = canonical_bits(bits)
        return [(f">u{size}", np.where(bits & sign, ~bits, bits | sign))]
    return [(f">u{size}", bits ^ sign)]


_SIXTEEN = pa.binary(16)
