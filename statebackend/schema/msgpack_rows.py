"""Rows of any schema: a version byte, then one msgpack array of the fields in their wire form.

The wire form of each type is said in `statebackend.schema.msgpack_types`. It is msgpack and not
pickle: whoever can write to the bucket must not be able to run code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from types import GenericAlias
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import types as T

from statebackend.errors import CorruptionError, FormatError, ValueMismatchError
from statebackend.schema.conform import conform_all
from statebackend.schema.msgpack_columns import decode_columns
from statebackend.schema.msgpack_types import (
    arrow_from_wire,
    from_wire,
    to_wire,
    wire_list,
    wire_type,
)
from statebackend.schema.scalars import Convert, Refused
from statebackend.schema.type_table import simple_type
from statebackend.schema.value_checks import as_row, columns_of_one_type, diagnose, mismatch

__all__ = ["MsgpackCodec"]

# Plans are made per combination of value types; past this many, none is kept.
_PLANS_MAX = 256
# The largest integer that msgpack writes as itself.
_FIXINT_MAX = 127

Row = tuple[Any, ...]
# Which values must lie between which two; and what to do to each value (None: nothing to any).
Plan = tuple[list[tuple[int, int, int]], list[Convert | None] | None]


class MsgpackCodec:
    """The `RowCodec` of schemas with strings, binaries, large decimals or nested fields."""

    encode: Callable[[Row], bytes]
    decode: Callable[[bytes], Row]

    def __init__(self, schema: T.StructType, version: int = 0) -> None:
        self.schema = schema
        self.version = version
        self._pack = msgspec.msgpack.Encoder().encode
        self._unpack: Callable[[bytes], Row] = msgspec.msgpack.Decoder(wire_type(schema)).decode
        self._unpack_many: Callable[[bytes], list[Any]] = msgspec.msgpack.Decoder(
            GenericAlias(list, wire_type(schema) | int)
        ).decode
        self._full = [to_wire(field.dataType, field.name, field.nullable) for field in schema]
        self._steps = [from_wire(field.dataType) for field in schema]
        self.encode = _encoder(self)
        self.decode = _decoder(self)

    def __reduce__(self) -> tuple[object, ...]:
        return MsgpackCodec, (self.schema, self.version)

    def __repr__(self) -> str:
        return f"MsgpackCodec({self.schema.simpleString()}, version={self.version})"

    def encode_many(self, rows: Sequence[Row]) -> list[bytes]:
        """`encode` for each of many: see `RowCodec.encode_many`."""
        columns = columns_of_one_type(rows, len(self._full)) if len(rows) > 1 else None
        if columns is not None:
            pack, prefix = self._pack, bytes([self.version])
            try:
                for index, (field, convert) in enumerate(zip(self.schema, self._full, strict=True)):
                    column = columns[index]
                    step = _column_step(column, field, convert)
                    if step is not None:
                        columns[index] = list(map(step, column))
                return [prefix + pack(row) for row in zip(*columns, strict=True)]
            except (ValueError, TypeError, ArithmeticError, ValueMismatchError):
                pass  # said below, by the row
        return list(map(self.encode, rows))

    def decode_many(self, rows: Sequence[bytes | None]) -> list[Row | None]:
        """`decode` for each of many: see `RowCodec.decode_many`."""
        decode = self.decode
        there = [row for row in rows if row is not None]
        wires = self._wires(there)
        if wires is None:
            return [None if row is None else decode(row) for row in rows]
        if any(step is not None for step in self._steps):
            columns = list(zip(*wires, strict=True))
            for index, step in enumerate(self._steps):
                if step is not None:
                    columns[index] = tuple([None if v is None else step(v) for v in columns[index]])
            wires = list(zip(*columns, strict=True))
        if len(there) == len(rows):
            return list(wires)
        following = iter(wires)
        return [None if row is None else next(following) for row in rows]

    def _wires(self, rows: Sequence[bytes]) -> list[Row] | None:
        """Many rows in wire form by one call of the decoder; None where that cannot be done.

        A version below 128 is an integer to msgpack, so that rows end to end, with a head in
        front, are one array: version, row, version, row.
        """
        if len(rows) < 2 or self.version > _FIXINT_MAX or not all(rows):
            return None
        # Each must begin as a row, or a damaged one could take its neighbour's bytes.
        if set(map(itemgetter(0), rows)) != {self.version}:
            return None
        head = b"\xdd" + (2 * len(rows)).to_bytes(4, "big")
        try:
            flat = self._unpack_many(head + b"".join(rows))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return None
        wires = flat[1::2]
        if flat[::2] != [self.version] * len(rows) or set(map(type, wires)) != {tuple}:
            return None
        return wires

    def encode_arrow(self, columns: Sequence[pa.Array | pa.ChunkedArray]) -> pa.BinaryArray:
        """The bytes of every row: see `RowCodec.encode_arrow`."""
        arrays = conform_all(columns, self.schema)
        try:
            wires = [
                wire_list(array, field.dataType)
                for array, field in zip(arrays, self.schema, strict=True)
            ]
        except UnicodeDecodeError as error:
            raise ValueMismatchError(
                f"A string of {self.schema.simpleString()} is not UTF-8: {error}.",
                todo="Declare the field binary, or clean the text up first.",
            ) from error
        pack, prefix = self._pack, bytes([self.version])
        return pa.array([prefix + pack(row) for row in zip(*wires, strict=True)], pa.binary())

    def decode_arrow(self, values: pa.BinaryArray) -> list[pa.Array]:
        """One array for each field: see `RowCodec.decode_arrow`."""
        if (found := decode_columns(values, self.schema, self.version)) is not None:
            return found
        rows = values.to_pylist()
        wires = None if values.null_count else self._wires(rows)
        if wires is None:
            blank = (None,) * len(self.schema.fields)
            wires = [blank if row is None else self._wire(row) for row in rows]
        columns = list(zip(*wires, strict=True)) if wires else [()] * len(self.schema.fields)
        return [
            arrow_from_wire(list(column), field.dataType)
            for column, field in zip(columns, self.schema, strict=True)
        ]

    def _wire(self, data: bytes) -> Row:
        """The fields of one row in wire form."""
        if data[:1] != bytes([self.version]):
            raise self._wrong_version(data)
        try:
            return self._unpack(data[1:])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise CorruptionError(
                f"{len(data)} bytes are not a row of {self.schema.simpleString()}: {error}.",
                todo="Restore from the durable copy; the local one is damaged.",
            ) from error

    def _wrong_version(self, data: bytes) -> FormatError:
        if not data:
            return CorruptionError(
                f"No bytes are no row of {self.schema.simpleString()}.",
                todo="Restore from the durable copy; the local one is damaged.",
            )
        return FormatError(
            f"A row of schema version {data[0]} was given to the codec of version {self.version}.",
            todo="Decode it with the codec of its own version, then migrate it.",
        )


def _encoder(codec: MsgpackCodec) -> Callable[[Row], bytes]:
    schema, pack, prefix = codec.schema, codec._pack, bytes([codec.version])
    full = codec._full
    plans: dict[tuple[type, ...], Plan] = {}

    def plan_for(kinds: tuple[type, ...], values: Row) -> Plan:
        as_row(schema, values)
        bounds: list[tuple[int, int, int]] = []
        steps: list[Convert | None] = []
        for index, (kind, field, convert) in enumerate(zip(kinds, schema, full, strict=True)):
            limits = _limits(kind, field)
            if limits is not None:
                bounds.append((index, *limits))
            steps.append(None if limits is not None else _step(kind, field, convert))
        plan: Plan = (bounds, steps if any(step is not None for step in steps) else None)
        if len(plans) < _PLANS_MAX:
            plans[kinds] = plan
        return plan

    def encode(values: Any, /) -> bytes:
        if not isinstance(values, tuple):
            values = as_row(schema, values)
        kinds = tuple(map(type, values))
        try:
            bounds, steps = plans.get(kinds) or plan_for(kinds, values)
            for index, low, high in bounds:
                if not low <= values[index] <= high:
                    raise Refused(f"{values[index]}, which is out of range")
            if steps is None:
                return prefix + pack(values)
            return prefix + pack(
                [v if step is None else step(v) for step, v in zip(steps, values, strict=True)]
            )
        except ValueMismatchError:
            raise
        except UnicodeEncodeError as error:
            raise _not_unicode(codec, full, values, error) from None
        except (ValueError, TypeError, ArithmeticError) as error:
            raise diagnose(schema, values, error) from None

    return encode


def _not_unicode(
    codec: MsgpackCodec, full: list[Convert], values: Row, error: UnicodeEncodeError
) -> ValueMismatchError:
    """The error for a lone surrogate somewhere in a row."""
    for field, convert, value in zip(codec.schema, full, values, strict=True):
        try:
            codec._pack(convert(value))
        except UnicodeEncodeError:
            return mismatch(field.name, field.dataType, value, f"{value!r}: {error}")
    return diagnose(codec.schema, values, error)


def _step(kind: type, field: T.StructField, convert: Convert) -> Convert | None:
    """What is left to do for values of exactly this type; `convert` does it for any."""
    if kind is type(None) and field.nullable:
        return None
    row = simple_type(field.dataType)
    return convert if row is None or row.scalar.bounds is not None else row.scalar.converter(kind)


def _limits(kind: type, field: T.StructField) -> tuple[int, int] | None:
    """Lowest and highest value where the limits are all that is to be checked."""
    row = simple_type(field.dataType) if kind is int else None
    return row.scalar.bounds if row and int in row.scalar.to_plain else None


def _column_step(column: Sequence[Any], field: T.StructField, convert: Convert) -> Convert | None:
    """What is left to do for a column whose values are of one type."""
    kind = type(column[0])
    limits = _limits(kind, field)
    if limits is not None and limits[0] <= min(column) and max(column) <= limits[1]:
        return None
    return _step(kind, field, convert)


def _decoder(codec: MsgpackCodec) -> Callable[[bytes], Row]:
    steps = codec._steps
    plain = all(step is None for step in steps)
    unpack, prefix = codec._unpack, bytes([codec.version])

    def decode(data: bytes, /) -> Row:
        try:
            wire = unpack(data[1:]) if data.startswith(prefix) else codec._wire(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            wire = codec._wire(data)  # says what is wrong
        if plain:
            return wire
        return tuple(
            [
                v if step is None or v is None else step(v)
                for step, v in zip(steps, wire, strict=True)
            ]
        )

    return decode
