"""Many rows of the msgpack codec to columns at once, without a Python object for each value.

Each row has a place up to which it was read, and a field is taken from all rows by what its first
byte says. It is for schemas of plain fields. Whatever else there is (nested fields, a damaged row)
is left to the codec, which goes by the row and says what is wrong.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import types as T

from statebackend.schema.arrow_buffers import boolean_array, bytes_between
from statebackend.schema.type_table import simple_type
from statebackend.schema.types import arrow_type

__all__ = ["decode_columns"]

_NIL: Final = 0xC0
_FALSE: Final = 0xC2
_TRUE: Final = 0xC3
_DOUBLE: Final = 0xCB
_FIXINT_MAX: Final = 0x7F
_FIXINT_MIN: Final = 0xE0
_UINT64: Final = 0xCF
_INTEGERS: Final = {
    0xCC: ">u1",
    0xCD: ">u2",
    0xCE: ">u4",
    _UINT64: ">u8",
    0xD0: ">i1",
    0xD1: ">i2",
    0xD2: ">i4",
    0xD3: ">i8",
}
_TEXTS: Final = {0xD9: ">u1", 0xDA: ">u2", 0xDB: ">u4"}
_BINARIES: Final = {0xC4: ">u1", 0xC5: ">u2", 0xC6: ">u4"}
_FIXTEXT: Final = slice(0xA0, 0xC0)
_FIXTEXT_MASK: Final = 0x1F
_FIXARRAY: Final = 0x90
_FIXARRAY_MAX: Final = 15
_ARRAY: Final = 0xDC

Places = NDArray[np.int64]


class _OtherwiseError(Exception):
    """It is for the codec to read, or to refuse."""


def decode_columns(
    values: pa.BinaryArray, schema: T.StructType, version: int
) -> list[pa.Array] | None:
    """One array for each field, in the types of `arrow_type`; null where the row is null.

    Returns:
        None where the rows are to be read one by one.
    """
    if not len(values) or not all(map(_is_plain, schema)):
        return None
    if values.null_count:
        there = values.is_valid().to_numpy(zero_copy_only=False)
        columns = decode_columns(values.drop_null(), schema, version)
        index = _array(pa.int64(), np.cumsum(there) - 1, len(there), there)
        return None if columns is None else [column.take(index) for column in columns]
    try:
        reader = _Reader(values, _head(len(schema), version))
        columns = [reader.field(field.dataType) for field in schema]
        reader.check_at_end()
    except (_OtherwiseError, pa.ArrowException):
        return None
    return columns


def _is_plain(field: T.StructField) -> bool:
    kind = simple_type(field.dataType)
    if kind is None:
        return False
    big = isinstance(field.dataType, T.DecimalType) and kind.wire is bytes
    return kind.wire in (bool, int, float, str, bytes) and not big


def _head(fields: int, version: int) -> bytes:
    if fields <= _FIXARRAY_MAX:
        return bytes([version, _FIXARRAY | fields])
    return bytes([version, _ARRAY]) + fields.to_bytes(2, "big")


class _Reader:
    """How far each row has been read."""

    def __init__(self, values: pa.BinaryArray, head: bytes) -> None:
        rows = len(values)
        _, offsets, data = values.buffers()
        bounds = np.frombuffer(offsets, np.int32)[values.offset : values.offset + rows + 1]
        self._buffer = data
        self._data = np.frombuffer(data or b"", np.uint8)
        self._at: Places = bounds[:-1].astype(np.int64)
        self._ends: Places = bounds[1:].astype(np.int64)
        for byte in head:
            if (self._bytes() != byte).any():
                raise _OtherwiseError

    def check_at_end(self) -> None:
        """Nothing is left of any row."""
        if (self._at != self._ends).any():
            raise _OtherwiseError

    def field(self, dtype: T.DataType) -> pa.Array:
        """The next field of every row."""
        tags = self._bytes()
        seen = np.bincount(tags, minlength=256)
        kind = arrow_type(dtype)
        wire = simple_type(dtype).wire  # type: ignore[union-attr]
        if wire in (str, bytes):
            return self._bodies(tags, seen, kind, text=wire is str)
        valid = tags != _NIL if seen[_NIL] else None
        if wire is bool:
            self._only(seen, _FALSE, _TRUE)
            return _array(kind, np.packbits(tags == _TRUE, bitorder="little"), len(tags), valid)
        if wire is float:
            self._only(seen, _DOUBLE)
            where = None if valid is None else np.flatnonzero(valid)
            found = self._taken(where, ">f8", np.float64)
            with np.errstate(all="ignore"):
                content = found.astype(kind.to_pandas_dtype())
            return _array(kind, content, len(tags), valid)
        return _of_integers(self._integers(tags, seen), kind, valid)

    def _only(self, seen: NDArray[Any], *tags: int) -> None:
        if int(seen[[_NIL, *tags]].sum()) != len(self._at):
            raise _OtherwiseError

    def _bytes(self) -> NDArray[np.uint8]:
        """The next byte of every row."""
        if (self._at >= self._ends).any():
            raise _OtherwiseError
        found: NDArray[np.uint8] = self._data[self._at]
        self._at = self._at + 1
        return found

    def _taken(self, where: Places | None, form: str, made: Any) -> NDArray[Any]:
        """A number of some rows (None: of all), 0 for the others."""
        size = int(form[2:])
        at = self._at if where is None else self._at[where]
        if (at + size > (self._ends if where is None else self._ends[where])).any():
            raise _OtherwiseError
        # Every byte offset as the number that begins there.
        numbers: NDArray[Any] = np.ndarray(
            (max(self._data.size - size + 1, 0),), form, self._data, strides=(1,)
        )
        if where is None:
            self._at = at + size
            return numbers[at].astype(made)
        found = np.zeros(len(self._at), made)
        found[where] = numbers[at]
        self._at[where] += size
        return found

    def _sized(self, tags: NDArray[np.uint8], seen: NDArray[Any], forms: dict[int, str]) -> Any:
        """The numbers that follow tags, by rows of each tag; 0 for rows of no such tag."""
        found = np.zeros(len(tags), np.int64)
        for tag, form in forms.items():
            if seen[tag] == len(tags):
                return self._taken(None, form, np.int64)
            if seen[tag]:
                found += self._taken(np.flatnonzero(tags == tag), form, np.int64)
        return found

    def _integers(self, tags: NDArray[np.uint8], seen: NDArray[Any]) -> NDArray[np.int64]:
        small = int(seen[: _FIXINT_MAX + 1].sum() + seen[_FIXINT_MIN:].sum())
        large = int(seen[list(_INTEGERS)].sum())
        if small + large + int(seen[_NIL]) != len(tags):
            raise _OtherwiseError
        found: NDArray[np.int64] = self._sized(tags, seen, _INTEGERS)
        if seen[_UINT64] and (found[tags == _UINT64] < 0).any():  # above the largest
            raise _OtherwiseError
        if small:
            is_small = (tags <= _FIXINT_MAX) | (tags >= _FIXINT_MIN)
            found = np.where(is_small, tags.view(np.int8).astype(np.int64), found)
        return found

    def _bodies(
        self, tags: NDArray[np.uint8], seen: NDArray[Any], kind: pa.DataType, *, text: bool
    ) -> pa.Array:
        forms = _TEXTS if text else _BINARIES
        short = int(seen[_FIXTEXT].sum()) if text else 0
        if short + int(seen[list(forms)].sum()) + int(seen[_NIL]) != len(tags):
            raise _OtherwiseError
        lengths = self._sized(tags, seen, forms)
        if short:
            is_short = (tags >= _FIXTEXT.start) & (tags < _FIXTEXT.stop)
            lengths = np.where(is_short, tags & _FIXTEXT_MASK, lengths)
        starts, ends = self._at, self._at + lengths
        if (ends > self._ends).any():
            raise _OtherwiseError
        self._at = ends
        valid = tags != _NIL if seen[_NIL] else None
        return bytes_between(self._buffer, starts, ends, valid).cast(kind)


def _of_integers(
    found: NDArray[np.int64], kind: pa.DataType, valid: NDArray[np.bool_] | None
) -> pa.Array:
    """A column whose values are kept as integers."""
    if pa.types.is_decimal128(kind):
        limit = 10**kind.precision
        if ((found >= limit) | (found <= -limit)).any():
            raise _OtherwiseError
        content: NDArray[Any] = np.stack([found, found >> 63], axis=1)
    else:
        narrow = np.dtype(f"i{kind.bit_width // 8}")
        content = found.astype(narrow)
        if narrow.itemsize < found.itemsize and (content != found).any():
            raise _OtherwiseError
    return _array(kind, content, len(found), valid)


def _array(
    kind: pa.DataType, content: NDArray[Any], rows: int, valid: NDArray[np.bool_] | None
) -> pa.Array:
    bits = None if valid is None else boolean_array(valid).buffers()[1]
    return pa.Array.from_buffers(kind, rows, [bits, pa.py_buffer(np.ascontiguousarray(content))])
