"""Keys as canonical, self-delimiting bytes. Part of the format: one key, one encoding, for ever.

A key is its fields in order. A field is a tag byte (0 null, 1 present) and its content:

=============================== =================================================================
type                            content, all integers big-endian
=============================== =================================================================
boolean                         1 byte, 0 or 1
byte, short, int, long          1, 2, 4, 8 bytes, sign bit flipped
date                            4 bytes, days since 1970, sign bit flipped
timestamp, timestamp_ntz,       8 bytes, microseconds (since 1970), sign bit flipped
day-time interval
time                            8 bytes, nanoseconds since midnight, sign bit flipped
float, double                   4, 8 bytes: IEEE bits, sign bit flipped where positive, all bits
                                flipped where negative; -0.0 is 0.0, every NaN the positive
                                quiet one
decimal                         16 bytes, unscaled value at the field's scale, sign bit flipped
string (UTF-8), binary          4 bytes length, then as many bytes
array                           4 bytes count, then as many elements, each a field of its own
struct                          its fields
=============================== =================================================================

A null field still has its content, all zero (length or count 0; a null struct's fields are null
fields), so that keys of fixed-width fields have one length. Bytes of fixed-width fields sort as
their values do, nulls first; strings sort by length first.

A key whose fields are all null is refused: no row may belong to "nobody in particular".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from statebackend.errors import CorruptionError, NullKeyError, ValueMismatchError
from statebackend.schema.conform import conform_all
from statebackend.schema.keys.key_column_encoding import encode_columns
from statebackend.schema.keys.key_scalars import KeyTuple, field_decoder, field_encoder
from statebackend.schema.type_table import simple
from statebackend.schema.types import check_key_schema

__all__ = ["KeyCodec"]


class KeyCodec:
    """Encodes and decodes the keys of one schema.

    Args:
        schema: the key columns; nullability is not looked at.
        allow_all_null: take keys whose every field is null (for the keys of a map state).

    Attributes:
        encode: key tuple to bytes; the bytes are those of `encode_arrow`, bit for bit. Raises
            ValueMismatchError and NullKeyError.
        decode: (bytes, offset) to (key tuple, end offset); values as in a `pyspark.sql.Row`
            (arrays as lists, structs as Rows). Raises CorruptionError.
        width: the length of every key in bytes; None if keys differ in length.

    Raises:
        SchemaError: no fields, or two of one name.
        UnsupportedTypeError: a type that cannot be part of a key.
    """

    encode: Callable[[KeyTuple], bytes]
    decode: Callable[..., tuple[KeyTuple, int]]

    def __init__(self, schema: T.StructType, *, allow_all_null: bool = False) -> None:
        check_key_schema(schema)
        self.schema = schema
        self.allow_all_null = allow_all_null
        # The column is nullable to the codec: what a null means is decided here, not by Spark.
        self._loose = T.StructType([T.StructField(f.name, f.dataType) for f in schema])
        self._dtypes = [field.dataType for field in schema]
        sizes = [_width(dtype) for dtype in self._dtypes]
        known = [size for size in sizes if size is not None]
        self.width: int | None = sum(known) if len(known) == len(sizes) else None
        self.encode = _encoder(self)
        self.decode = _decoder(self)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.schema, self.allow_all_null)

    def __repr__(self) -> str:
        return f"KeyCodec({self.schema.simpleString()})"

    def encode_arrow(self, columns: Sequence[pa.Array | pa.ChunkedArray]) -> pa.BinaryArray:
        """The key bytes of every row.

        Args:
            columns: one array for each field, in the schema's order, all of one length.

        Returns:
            A BinaryArray of that length, without nulls.

        Raises:
            NullKeyError: a row whose every column is null (unless `allow_all_null`).
            ValueMismatchError: a column of another type, or a wrong number of columns.
        """
        arrays = conform_all(columns, self._loose)
        if not self.allow_all_null and all(array.null_count for array in arrays):
            missing = pc.is_null(arrays[0])
            for array in arrays[1:]:
                missing = pc.and_(missing, pc.is_null(array))
            count = pc.sum(missing).as_py()
            if count:
                raise self.null_key_error(count)
        return encode_columns(arrays, self._dtypes, len(arrays[0]))

    def null_key_error(self, rows: int = 1) -> NullKeyError:
        """The error for `rows` rows whose every key column is null."""
        names = self.schema.names
        some = f"{rows} rows have" if rows > 1 else "A row has"
        which = (
            f"column {names[0]!r}" if len(names) == 1 else "columns " + ", ".join(map(repr, names))
        )
        if all(map(str.isidentifier, names)):
            tests = " | ".join(f'col("{name}").isNotNull()' for name in names)
            how = f"df.where({tests})"
        else:  # Spark's text of an expression, which col() does not take
            how = "df.where(...), with isNotNull() of what groupBy() is given"
        return NullKeyError(
            f"{some} a null key ({which}).",
            todo=f"Filter such rows out before the operator: {how}.",
        )


def _rebuild(schema: T.StructType, allow_all_null: bool) -> KeyCodec:
    return KeyCodec(schema, allow_all_null=allow_all_null)


def _width(dtype: T.DataType) -> int | None:
    """Bytes of a field with its tag; None if they vary."""
    if isinstance(dtype, T.StructType):
        total = 1
        for field in dtype:
            size = _width(field.dataType)
            if size is None:
                return None
            total += size
        return total
    if isinstance(dtype, T.ArrayType):
        return None
    content = 16 if isinstance(dtype, T.DecimalType) else simple(dtype).width
    return None if content is None else 1 + content


def _encoder(codec: KeyCodec) -> Callable[[KeyTuple], bytes]:
    fields = [field_encoder(f.dataType, f.name) for f in codec.schema]
    general = _general_encoder(codec, fields)
    if len(fields) > 1:
        return general
    (dtype,) = codec._dtypes
    if type(dtype) is T.LongType:
        pack, bias = struct.Struct(">BQ").pack, 1 << 63

        def encode_long(values: KeyTuple, /) -> bytes:
            if type(values) is tuple and len(values) == 1 and type(values[0]) is int:
                try:
                    return pack(1, values[0] + bias)
                except struct.error:
                    pass
            return general(values)

        return encode_long
    if type(dtype) is T.StringType:
        head = struct.Struct(">BI").pack

        def encode_string(values: KeyTuple, /) -> bytes:
            if type(values) is tuple and len(values) == 1 and type(values[0]) is str:
                try:
                    body = values[0].encode()
                    return head(1, len(body)) + body
                except UnicodeEncodeError:
                    pass
            return general(values)

        return encode_string
    return general


def _general_encoder(
    codec: KeyCodec, fields: list[Callable[[Any], bytes]]
) -> Callable[[KeyTuple], bytes]:
    count, nullable = len(fields), codec.allow_all_null

    def encode(given: Any, /) -> bytes:
        values: KeyTuple | list[Any] = given
        if nullable and count == 1 and isinstance(given, str) and len(given) == 1:
            values = (given,)  # a map's key: to Spark a string is a row of characters
        if not isinstance(values, tuple | list) or len(values) != count:
            raise _arity(codec, values)
        if not nullable and values.count(None) == count:
            raise codec.null_key_error()
        return b"".join([field(value) for field, value in zip(fields, values, strict=True)])

    return encode


def _arity(codec: KeyCodec, values: object) -> ValueMismatchError:
    names = ", ".join(codec.schema.names)
    rows = (tuple, list)
    got = f"{len(values)} values" if isinstance(values, rows) else f"a {type(values).__name__}"
    return ValueMismatchError(
        f"A key of ({names}) cannot be made of {got}.",
        todo=f"Pass a tuple of {len(codec.schema.names)}.",
    )


def _decoder(codec: KeyCodec) -> Callable[..., tuple[KeyTuple, int]]:
    fields = [field_decoder(dtype) for dtype in codec._dtypes]

    def damaged(data: bytes, offset: int, error: Exception) -> CorruptionError:
        return CorruptionError(
            f"Key bytes at offset {offset} of {len(data)} are not a key of "
            f"{codec.schema.simpleString()}: {error}.",
            todo="Restore from the durable copy; the local one is damaged.",
        )

    if len(fields) == 1:
        (only,) = fields

        def decode_one(data: bytes, offset: int = 0) -> tuple[KeyTuple, int]:
            try:
                value, end = only(data, offset)
            except _DAMAGE as error:
                raise damaged(data, offset, error) from error
            return (value,), end

        return decode_one

    def decode(data: bytes, offset: int = 0) -> tuple[KeyTuple, int]:
        values, end = [], offset
        try:
            for field in fields:
                value, end = field(data, end)
                values.append(value)
        except _DAMAGE as error:
            raise damaged(data, offset, error) from error
        return tuple(values), end

    return decode


_DAMAGE = (struct.error, IndexError, UnicodeDecodeError)
