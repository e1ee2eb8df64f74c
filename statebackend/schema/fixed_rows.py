"""Rows whose fields all have a fixed width: a packed record that struct and numpy both read.

======================= =========================================================================
bytes                   content, little-endian, no padding
======================= =========================================================================
1                       schema version
(fields + 7) // 8       null bitmap: bit `i % 8` of byte `i // 8` is set where field i is null
1                       boolean (0, 1), byte
2                       short
4                       int, float, date (days since 1970)
8                       long, double, timestamp, timestamp_ntz and day-time interval
                        (microseconds), time (nanoseconds since midnight), decimal up to 18
                        digits (unscaled)
======================= =========================================================================

A null field is zeros. Floats keep their bits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import types as T

from statebackend.errors import CorruptionError, FormatError, ValueMismatchError
from statebackend.schema.arrow_buffers import fixed_array, valid_mask, values_of
from statebackend.schema.conform import conform_all
from statebackend.schema.scalars import Convert, Scalar
from statebackend.schema.type_table import simple
from statebackend.schema.types import arrow_type
from statebackend.schema.value_checks import as_row, columns_of_one_type, diagnose

__all__ = ["FixedCodec"]

# Plans are made per combination of value types; nulls make for many. Past this, none is kept.
_PLANS_MAX = 256
# Below so many rows, numpy's calls cost more than they save.
_COLUMNS_MIN = 24

Row = tuple[Any, ...]
Plan = tuple[bytes, list[Convert | None] | None]


class FixedCodec:
    """The `RowCodec` of schemas whose fields all have a fixed width."""

    encode: Callable[[Row], bytes]
    decode: Callable[[bytes], Row]

    def __init__(self, schema: T.StructType, version: int = 0) -> None:
        self.schema = schema
        self.version = version
        self._codes = [simple(field.dataType).packed for field in schema]
        self._bitmap = (len(self._codes) + 7) // 8
        formats = [np.dtype("u1" if code == "?" else f"<{code}") for code in self._codes]
        names = [f"f{index}" for index in range(len(formats))]
        head = [("version", "u1"), ("nulls", "u1", (self._bitmap,))]
        self.dtype = np.dtype([*head, *zip(names, formats, strict=True)])
        self._pack = struct.Struct(f"<{1 + self._bitmap}s{''.join(self._codes)}").pack
        self.encode = _encoder(self)
        self.decode = _decoder(self)
        self._scalars = [_packable(field.dataType) for field in schema]
        self._steps = [scalar.from_plain for scalar in self._scalars]

    def __reduce__(self) -> tuple[object, ...]:
        return FixedCodec, (self.schema, self.version)

    def __repr__(self) -> str:
        return f"FixedCodec({self.schema.simpleString()}, version={self.version})"

    def encode_many(self, rows: Sequence[Row]) -> list[bytes]:
        """`encode` for each of many: see `RowCodec.encode_many`."""
        columns = columns_of_one_type(rows, len(self._scalars)) if len(rows) > 1 else None
        if columns is not None:
            prefix = bytes([self.version]) + bytes(self._bitmap)
            try:
                for index, scalar in enumerate(self._scalars):
                    step = scalar.converter(type(columns[index][0]))
                    if step is not None:
                        columns[index] = list(map(step, columns[index]))
                return list(map(self._pack, repeat(prefix), *columns))
            except (struct.error, ArithmeticError, ValueError, TypeError):
                pass  # said below, by the row
        return list(map(self.encode, rows))

    def decode_many(self, rows: Sequence[bytes | None]) -> list[Row | None]:
        """`decode` for each of many: see `RowCodec.decode_many`."""
        decode, size = self.decode, self.dtype.itemsize
        there = [row for row in rows if row is not None]
        if len(there) < _COLUMNS_MIN or set(map(len, there)) != {size}:
            return [None if row is None else decode(row) for row in rows]
        record = np.frombuffer(b"".join(there), self.dtype)
        odd = np.flatnonzero(record["version"] != self.version)
        if odd.size:
            raise self._wrong_version(int(record["version"][odd[0]]))
        decoded = zip(*self._python_columns(record), strict=True)
        if len(there) == len(rows):
            return list(decoded)
        return [None if row is None else next(decoded) for row in rows]

    def _python_columns(self, record: NDArray[Any]) -> list[list[Any]]:
        columns = []
        some_null = bool(record["nulls"].any())
        for index, (code, step) in enumerate(zip(self._codes, self._steps, strict=True)):
            plain = record[f"f{index}"]
            values: list[Any] = (plain != 0 if code == "?" else plain).tolist()
            null: list[int] = []
            if some_null:
                bits = record["nulls"][:, index // 8] & np.uint8(1 << index % 8)
                null = np.flatnonzero(bits).tolist()
            if step is not None:
                values = list(map(step, values))
            for row in null:
                values[row] = None
            columns.append(values)
        return columns

    def encode_arrow(self, columns: Sequence[pa.Array | pa.ChunkedArray]) -> pa.BinaryArray:
        """The bytes of every row: see `RowCodec.encode_arrow`."""
        arrays = conform_all(columns, self.schema)
        record = np.zeros(len(arrays[0]), self.dtype)
        record["version"] = self.version
        nulls = record["nulls"]
        for index, (array, field) in enumerate(zip(arrays, self.schema, strict=True)):
            plain = _plain_values(array, field.dataType, self._codes[index])
            valid = valid_mask(array)
            if valid is not None:
                plain = np.where(valid, plain, plain.dtype.type(0))
                nulls[:, index // 8] |= (~valid).astype(np.uint8) << np.uint8(index % 8)
            record[f"f{index}"] = plain
        return fixed_array(record)

    def decode_arrow(self, values: pa.BinaryArray) -> list[pa.Array]:
        """One array for each field: see `RowCodec.decode_arrow`."""
        there = valid_mask(values)
        record = self._record(values if there is None else values.drop_null())
        if there is not None:
            spread = np.zeros(len(values), self.dtype)
            spread[there] = record
            record = spread
        columns = []
        for index, field in enumerate(self.schema):
            bits = record["nulls"][:, index // 8] >> np.uint8(index % 8)
            null = (bits & np.uint8(1)).astype(np.bool_)
            if there is not None:
                null |= ~there
            columns.append(_arrow_array(record[f"f{index}"], field.dataType, null))
        return columns

    def _record(self, values: pa.BinaryArray) -> NDArray[Any]:
        """The rows (none of them null) as one numpy record array over Arrow's memory."""
        values = values.cast(pa.binary())
        rows, size = len(values), self.dtype.itemsize
        if not rows:
            return np.zeros(0, self.dtype)
        _, offset_buffer, data = values.buffers()
        offsets = np.frombuffer(offset_buffer, np.int32)[values.offset : values.offset + rows + 1]
        lengths = np.diff(offsets)
        if (lengths != size).any():
            raise self._wrong_length(int(lengths[lengths != size][0]))
        record: NDArray[Any] = np.frombuffer(data, self.dtype, rows, int(offsets[0]))
        versions = record["version"]
        if (versions != self.version).any():
            raise self._wrong_version(int(versions[versions != self.version][0]))
        return record

    def _wrong_length(self, length: int) -> CorruptionError:
        return CorruptionError(
            f"A row of {length} bytes cannot be one of {self.schema.simpleString()}, "
            f"which takes {self.dtype.itemsize}.",
            todo="Restore from the durable copy; the local one is damaged.",
        )

    def _wrong_version(self, version: int) -> FormatError:
        return FormatError(
            f"A row of schema version {version} was given to the codec of version {self.version}.",
            todo="Decode it with the codec of its own version, then migrate it.",
        )


# --- one row -----------------------------------------------------------------------------------


def _encoder(codec: FixedCodec) -> Callable[[Row], bytes]:
    schema = codec.schema
    pack = codec._pack
    scalars = [_packable(field.dataType) for field in schema]
    plans: dict[tuple[type, ...], Plan] = {}

    def plan_for(kinds: tuple[type, ...], values: Row) -> Plan:
        as_row(schema, values)
        nulls = 0
        steps: list[Convert | None] = []
        for index, (kind, field) in enumerate(zip(kinds, schema, strict=True)):
            if kind is type(None) and field.nullable:
                nulls |= 1 << index
                steps.append(_zero)
            else:
                steps.append(scalars[index].converter(kind))
        prefix = bytes([codec.version]) + nulls.to_bytes(codec._bitmap, "little")
        plan: Plan = (prefix, steps if any(step is not None for step in steps) else None)
        if len(plans) < _PLANS_MAX:
            plans[kinds] = plan
        return plan

    def encode(values: Any, /) -> bytes:
        if not isinstance(values, tuple):
            values = as_row(schema, values)
        # One dictionary look-up checks the types of all values, and their number.
        kinds = tuple(map(type, values))
        try:
            prefix, steps = plans.get(kinds) or plan_for(kinds, values)
            if steps is None:
                return pack(prefix, *values)
            return pack(
                prefix,
                *[v if step is None else step(v) for step, v in zip(steps, values, strict=True)],
            )
        except ValueMismatchError:
            raise
        except (struct.error, ArithmeticError, ValueError, TypeError) as error:
            raise diagnose(schema, values, error) from None

    return _quick_encoder(codec, scalars, encode) or encode


def _quick_encoder(
    codec: FixedCodec, scalars: list[Scalar], general: Callable[[Row], bytes]
) -> Callable[[Row], bytes] | None:
    """For tuples of the plain Python types that are packed as they are; ``general`` does the rest.

    None if a field has no such type.
    """
    found = [
        next((kind for kind in (int, float, bool) if scalar.to_plain.get(kind, 0) is None), None)
        for scalar in scalars
    ]
    if None in found:
        return None
    pack, prefix, refused = codec._pack, bytes([codec.version]) + bytes(codec._bitmap), struct.error
    if len(found) == 1:
        (kind,) = found

        def encode_one(values: Any, /) -> bytes:
            if type(values) is tuple and len(values) == 1 and type(values[0]) is kind:
                try:
                    return pack(prefix, values[0])
                except (refused, OverflowError):
                    pass
            return general(values)

        return encode_one
    kinds = tuple(found)

    def encode(values: Any, /) -> bytes:
        if type(values) is tuple and tuple(map(type, values)) == kinds:
            try:
                return pack(prefix, *values)
            except (refused, OverflowError):
                pass
        return general(values)

    return encode


def _zero(value: None) -> int:
    return 0


def _packable(dtype: T.DataType) -> Scalar:
    scalar = simple(dtype).scalar
    if isinstance(dtype, T.FloatType):
        # Packing rounds to single precision by itself, and says so when out of range.
        return Scalar({**scalar.to_plain, float: None}, refused=scalar.refused)
    return scalar


def _decoder(codec: FixedCodec) -> Callable[[bytes], Row]:
    skipped = 1 + codec._bitmap
    packed = struct.Struct(f"<{skipped}x{''.join(codec._codes)}")
    unpack, size = packed.unpack, packed.size
    prefix = bytes([codec.version]) + bytes(codec._bitmap)
    steps = [_packable(field.dataType).from_plain for field in codec.schema]
    plain = all(step is None for step in steps)

    def decode(data: bytes, /) -> Row:
        if len(data) != size:
            raise codec._wrong_length(len(data))
        values: Row = unpack(data)
        if data.startswith(prefix):
            if plain:
                return values
            nulls = 0
        else:
            if data[0] != codec.version:
                raise codec._wrong_version(data[0])
            nulls = int.from_bytes(data[1:skipped], "little")
        return tuple(
            [
                None if nulls >> index & 1 else value if step is None else step(value)
                for index, (step, value) in enumerate(zip(steps, values, strict=True))
            ]
        )

    return decode


# --- columns -----------------------------------------------------------------------------------


def _plain_values(array: pa.Array, dtype: T.DataType, code: str) -> NDArray[Any]:
    if code == "?":
        return values_of(array.cast(pa.uint8()), "u1")
    if isinstance(dtype, T.DecimalType):
        # 16 bytes each, of which the low 8 hold every value of up to 18 digits.
        halves = np.frombuffer(array.buffers()[1] or b"", "<i8")
        return halves[2 * array.offset : 2 * (array.offset + len(array)) : 2]
    return values_of(array, f"<{code}")


def _arrow_array(values: NDArray[Any], dtype: T.DataType, null: NDArray[np.bool_]) -> pa.Array:
    validity = None
    if null.any():
        validity = pa.py_buffer(np.packbits(~null, bitorder="little"))
    if isinstance(dtype, T.BooleanType):
        content: NDArray[Any] = np.packbits(values, bitorder="little")
    elif isinstance(dtype, T.DecimalType):
        content = np.stack([values, values >> 63], axis=1)
    else:
        content = np.ascontiguousarray(values)
    buffers = [validity, pa.py_buffer(np.ascontiguousarray(content))]
    return pa.Array.from_buffers(arrow_type(dtype), len(values), buffers)
