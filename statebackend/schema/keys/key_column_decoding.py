"""Keys back to columns: the inverse of `key_column_encoding`, without a loop per row.

The layout is described in `key_codec`. Each row has a place up to which it was
read; a piece of fixed width is gathered there for all rows at once.
"""

from __future__ import annotations

import copy
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import types as T

from statebackend.errors import CorruptionError
from statebackend.schema.arrow_buffers import boolean_array, bytes_between
from statebackend.schema.type_table import simple
from statebackend.schema.types import arrow_type

__all__ = ["decode_key_columns", "decode_leading_columns"]

_TAG_BYTES: Final = 1
_LENGTH_BYTES: Final = 4


def decode_key_columns(
    keys: pa.BinaryArray, schema: T.StructType, skip: int | NDArray[np.int64] = 0
) -> list[pa.Array]:
    """One array for each field, in the types of ``types.arrow_type``.

    Args:
        keys: without nulls. skip: how many bytes of each (or of all) stand before the key.

    Raises:
        CorruptionError: bytes that are no keys of this schema.
    """
    columns, left = decode_leading_columns(keys, schema, skip)
    if left.any():
        raise _damaged(schema, "their length is another")
    return columns


def decode_leading_columns(
    keys: pa.BinaryArray, schema: T.StructType, skip: int | NDArray[np.int64] = 0
) -> tuple[list[pa.Array], NDArray[np.int64]]:
    """As :func:`decode_key_columns`, of keys that something follows; how many bytes, of each.

    Raises:
        CorruptionError: bytes that do not begin with keys of this schema.
    """
    reader = _Reader(keys, skip)
    try:
        columns = [reader.field(field.dataType) for field in schema]
    except (IndexError, pa.ArrowInvalid) as error:
        raise _damaged(schema, str(error)) from error
    return columns, reader.ends - reader.at


def _damaged(schema: T.StructType, why: str) -> CorruptionError:
    return CorruptionError(
        f"Bytes are not keys of {schema.simpleString()}: {why}.",
        todo="Restore from the durable copy; the local one is damaged.",
    )


class _Reader:
    """How far each row has been read."""

    def __init__(self, keys: pa.BinaryArray, skip: int | NDArray[np.int64]) -> None:
        rows = len(keys)
        _, offsets, data = keys.buffers()
        ends = (
            np.frombuffer(offsets, np.int32)[keys.offset : keys.offset + rows + 1]
            if rows
            else (np.zeros(1, np.int32))
        )
        self._buffer = data
        self._data = np.frombuffer(data or b"", np.uint8)
        self.at = ends[:-1].astype(np.int64) + skip
        self.ends = ends[1:].astype(np.int64)

    def field(self, dtype: T.DataType) -> pa.Array:
        """The next field of every row."""
        tags = self._bytes(_TAG_BYTES)[:, 0]
        if (tags > 1).any():
            raise IndexError("a field begins with neither 0 (null) nor 1 (present)")
        valid = tags == 1
        if isinstance(dtype, T.ArrayType):
            return self._lists(dtype, valid)
        if isinstance(dtype, T.StructType):
            children = [self.field(field.dataType) for field in dtype]
            return pa.StructArray.from_arrays(
                children, fields=list(arrow_type(dtype)), mask=boolean_array(~valid)
            )
        if isinstance(dtype, T.StringType | T.BinaryType):
            return self._bodies(arrow_type(dtype), valid)
        if isinstance(dtype, T.DecimalType):
            return self._decimals(arrow_type(dtype), valid)
        return self._numbers(dtype, valid)

    def _bytes(self, size: int) -> NDArray[np.uint8]:
        """The next ``size`` bytes of every row."""
        if len(self.at) and int(np.max(self.at + size - self.ends)) > 0:
            raise IndexError("they end too early")
        found: NDArray[np.uint8] = self._data[self.at[:, None] + np.arange(size)]
        self.at = self.at + size
        return found

    def _unsigned(self, size: int) -> NDArray[Any]:
        raw = np.ascontiguousarray(self._bytes(size)).view(f">u{size}").reshape(-1)
        return raw.astype(f"u{size}")

    def _numbers(self, dtype: T.DataType, valid: NDArray[np.bool_]) -> pa.Array:
        size = simple(dtype).width
        assert size is not None, "a number"
        bits = self._unsigned(size)
        if isinstance(dtype, T.BooleanType):
            content: Any = np.packbits(bits == 1, bitorder="little")
            return _array(arrow_type(dtype), content, valid)
        sign = bits.dtype.type(1 << (8 * size - 1))
        if isinstance(dtype, T.FloatType | T.DoubleType):
            bits = np.where(bits & sign, bits ^ sign, ~bits)
        else:
            bits = bits ^ sign
        return _array(arrow_type(dtype), np.where(valid, bits, bits.dtype.type(0)), valid)

    def _decimals(self, kind: pa.DataType, valid: NDArray[np.bool_]) -> pa.Array:
        high = self._unsigned(8) ^ np.uint64(1 << 63)
        halves = np.stack([self._unsigned(8), high], axis=1)
        halves[~valid] = 0
        return _array(kind, halves, valid)

    def _bodies(self, kind: pa.DataType, valid: NDArray[np.bool_]) -> pa.Array:
        lengths = self._unsigned(_LENGTH_BYTES).astype(np.int64)
        if len(lengths) and int(np.max(self.at + lengths - self.ends)) > 0:
            raise IndexError("they end too early")
        starts, self.at = self.at, self.at + lengths
        found = bytes_between(self._buffer, starts, self.at, None if valid.all() else valid)
        return found.cast(kind)  # text must be UTF-8

    def _lists(self, dtype: T.ArrayType, valid: NDArray[np.bool_]) -> pa.Array:
        """All first elements at once, then all second ones, as long as some row has more."""
        counts = self._unsigned(_LENGTH_BYTES).astype(np.int64)
        if (counts > self.ends - self.at).any():  # an element has one byte at least
            raise IndexError("they end too early")
        made = [pa.nulls(0, arrow_type(dtype.elementType))]
        rows, owners, number = np.flatnonzero(counts), [np.zeros(0, np.int64)], 0
        while len(rows):
            some = copy.copy(self)
            some.at, some.ends = self.at[rows], self.ends[rows]
            made.append(some.field(dtype.elementType))
            self.at[rows] = some.at
            owners.append(rows)
            number += 1
            rows = rows[counts[rows] > number]
        order = np.argsort(np.concatenate(owners), kind="stable")
        offsets = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        places = pa.Array.from_buffers(pa.int64(), len(order), [None, pa.py_buffer(order)])
        elements = pa.concat_arrays(made).take(places)
        buffers = [_bits(valid), pa.py_buffer(offsets)]
        return pa.Array.from_buffers(arrow_type(dtype), len(counts), buffers, children=[elements])


def _array(kind: pa.DataType, content: Any, valid: NDArray[np.bool_]) -> pa.Array:
    buffers = [_bits(valid), pa.py_buffer(np.ascontiguousarray(content))]
    return pa.Array.from_buffers(kind, len(valid), buffers)


def _bits(valid: NDArray[np.bool_]) -> pa.Buffer | None:
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
