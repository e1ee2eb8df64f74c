"""Canonical key bytes one value at a time: the scalar half of `statebackend.schema.keys.key_codec`.

The layout is described there. Functions are closures made once for a schema, so that nothing about
types is decided per value but the value's own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from pyspark.sql import types as T

from statebackend.errors import CorruptionError
from statebackend.schema.scalars import SEQUENCES, Convert
from statebackend.schema.type_table import simple
from statebackend.schema.value_checks import by_names, mismatch, row_maker, typed

__all__ = ["KeyTuple", "field_decoder", "field_encoder"]

KeyTuple = tuple[Any, ...]
Encode = Callable[[Any], bytes]
Decode = Callable[[bytes, int], tuple[Any, int]]


class _Never:
    """What no value's type is."""


_HEAD = struct.Struct(">BI")


def field_encoder(dtype: T.DataType, path: str) -> Encode:
    """A function from any value of a field (or None) to tag and content.

    It raises ValueMismatchError naming `path` for a value that does not fit.
    """
    if isinstance(dtype, T.StructType):
        return _struct_encoder(dtype, path)
    if isinstance(dtype, T.ArrayType):
        return _array_encoder(dtype, path)
    plain = typed(path, dtype, nullable=False)
    if isinstance(dtype, T.StringType | T.BinaryType):
        return _bytes_encoder(dtype, path, plain)
    content, size = _content_encoder(dtype)
    null, exact = bytes(1 + size), _exact(dtype)

    def encode(value: Any) -> bytes:
        if type(value) is exact:
            try:
                return content(value)
            except struct.error:  # out of range: said below
                pass
        return null if value is None else content(plain(value))

    return encode


def _exact(dtype: T.DataType) -> type:
    """The Python type that is its own plain form; `_Never` if there is none."""
    accepted = simple(dtype).scalar.to_plain.items()
    return next((kind for kind, convert in accepted if convert is None), _Never)


def field_decoder(dtype: T.DataType) -> Decode:
    """A function from (bytes, offset) to (value, end of the field).

    It raises struct.error or IndexError where the bytes end too early, CorruptionError for a tag
    that is neither 0 nor 1.
    """
    if isinstance(dtype, T.StructType):
        return _struct_decoder(dtype)
    if isinstance(dtype, T.ArrayType):
        return _array_decoder(dtype)
    if isinstance(dtype, T.StringType | T.BinaryType):
        return _bytes_decoder(isinstance(dtype, T.StringType))
    return _content_decoder(dtype, simple(dtype).scalar.from_plain)


# --- encoding ----------------------------------------------------------------------------------


def _content_encoder(dtype: T.DataType) -> tuple[Encode, int]:
    """From the plain form of a fixed-width value to tag and content, and the content's size."""
    if isinstance(dtype, T.BooleanType):
        return (lambda plain: b"\x01\x01" if plain else b"\x01\x00"), 1
    if isinstance(dtype, T.DecimalType):
        middle = 1 << 127

        def encode_decimal(plain: int) -> bytes:
            return b"\x01" + (plain + middle).to_bytes(16, "big")

        return encode_decimal, 16
    if isinstance(dtype, T.FloatType | T.DoubleType):
        return _float_encoder(isinstance(dtype, T.DoubleType))
    packer = struct.Struct(f">B{simple(dtype).packed.upper()}")
    size = packer.size - 1
    bias = 1 << (8 * size - 1)
    pack = packer.pack
    return (lambda plain: pack(1, plain + bias)), size


def _float_encoder(double: bool) -> tuple[Encode, int]:
    size = 8 if double else 4
    as_float = struct.Struct(">d" if double else ">f").pack
    as_bits = struct.Struct(">Q" if double else ">I").unpack
    pack = struct.Struct(">BQ" if double else ">BI").pack
    sign = 1 << (8 * size - 1)
    ones = (sign << 1) - 1
    nan = (0x7FF8 << 48 if double else 0x7FC00000) | sign

    def encode(plain: float) -> bytes:
        if plain != plain:
            return pack(1, nan)
        # -0.0 + 0.0 is 0.0.
        (bits,) = as_bits(as_float(plain + 0.0))
        return pack(1, bits ^ ones if bits & sign else bits | sign)

    return encode, size


def _bytes_encoder(dtype: T.DataType, path: str, plain: Convert) -> Encode:
    text, exact = isinstance(dtype, T.StringType), _exact(dtype)
    null, head = bytes(5), _HEAD.pack

    def encode(value: Any) -> bytes:
        body: Any
        if type(value) is exact:
            body = value
        elif value is None:
            return null
        else:
            body = plain(value)
        if text:
            try:
                body = body.encode()
            except UnicodeEncodeError as error:
                raise mismatch(path, dtype, value, f"{value!r}: {error}") from None
        return head(1, len(body)) + bytes(body)

    return encode


def _struct_encoder(dtype: T.StructType, path: str) -> Encode:
    fields = [field_encoder(f.dataType, f"{path}.{f.name}") for f in dtype]
    null = b"\0" + b"".join([field(None) for field in fields])

    def encode(value: Any) -> bytes:
        if value is None:
            return null
        if isinstance(value, dict):
            value = by_names(dtype, value, path)
        if not isinstance(value, tuple | list) or len(value) != len(fields):
            size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
            raise mismatch(path, dtype, value, f"a {type(value).__name__}{size}")
        return b"\x01" + b"".join([f(v) for f, v in zip(fields, value, strict=True)])

    return encode


def _array_encoder(dtype: T.ArrayType, path: str) -> Encode:
    element, null, head = field_encoder(dtype.elementType, f"{path}[]"), bytes(5), _HEAD.pack

    def encode(value: Any) -> bytes:
        if value is None:
            return null
        if not isinstance(value, SEQUENCES):
            raise mismatch(path, dtype, value)
        return head(1, len(value)) + b"".join([element(v) for v in value])

    return encode


# --- decoding ----------------------------------------------------------------------------------


def _present(tag: int) -> bool:
    if tag > 1:
        raise CorruptionError(
            f"A key field begins with {tag}, where 0 (null) or 1 (present) must stand.",
            todo="Restore from the durable copy; the local one is damaged.",
        )
    return tag == 1


def _content_decoder(dtype: T.DataType, restore: Convert | None) -> Decode:
    if isinstance(dtype, T.DecimalType):
        return _decimal_decoder(restore)
    if isinstance(dtype, T.BooleanType):
        return _boolean
    if isinstance(dtype, T.FloatType | T.DoubleType):
        return _float_decoder(isinstance(dtype, T.DoubleType))
    unpacker = struct.Struct(f">B{simple(dtype).packed.upper()}")
    unpack, size = unpacker.unpack_from, unpacker.size
    bias = 1 << (8 * (size - 1) - 1)

    def decode(data: bytes, at: int) -> tuple[Any, int]:
        tag, biased = unpack(data, at)
        if tag != 1 and not _present(tag):
            return None, at + size
        plain = biased - bias
        return plain if restore is None else restore(plain), at + size

    return decode


def _boolean(data: bytes, at: int) -> tuple[Any, int]:
    tag, content = data[at], data[at + 1]
    return (content == 1 if _present(tag) else None), at + 2


def _decimal_decoder(restore: Convert | None) -> Decode:
    assert restore is not None, "decimals are kept unscaled"

    def decode(data: bytes, at: int) -> tuple[Any, int]:
        end = at + 17
        if len(data) < end:
            raise IndexError("a decimal ends too early")
        if not _present(data[at]):
            return None, end
        return restore(int.from_bytes(data[at + 1 : end], "big") - (1 << 127)), end

    return decode


def _float_decoder(double: bool) -> Decode:
    unpacker = struct.Struct(">BQ" if double else ">BI")
    unpack, size = unpacker.unpack_from, unpacker.size
    as_bits = struct.Struct(">Q" if double else ">I").pack
    as_float = struct.Struct(">d" if double else ">f").unpack
    sign = 1 << (8 * (size - 1) - 1)
    ones = (sign << 1) - 1

    def decode(data: bytes, at: int) -> tuple[Any, int]:
        tag, bits = unpack(data, at)
        if tag != 1 and not _present(tag):
            return None, at + size
        return as_float(as_bits(bits ^ sign if bits & sign else bits ^ ones))[0], at + size

    return decode


def _bytes_decoder(text: bool) -> Decode:
    unpack = _HEAD.unpack_from

    def decode(data: bytes, at: int) -> tuple[Any, int]:
        tag, length = unpack(data, at)
        end = at + 5 + length
        if tag != 1 and not _present(tag):
            return None, end
        body = data[at + 5 : end]
        if len(body) != length:
            raise IndexError(f"{length} bytes are announced, {len(body)} are there")
        return body.decode() if text else body, end

    return decode


def _struct_decoder(dtype: T.StructType) -> Decode:
    fields = [field_decoder(f.dataType) for f in dtype]
    make = row_maker(dtype)

    def decode(data: bytes, at: int) -> tuple[Any, int]:
        there, end, values = _present(data[at]), at + 1, []
        for field in fields:
            value, end = field(data, end)
            values.append(value)
        return make(values) if there else None, end

    return decode


def _array_decoder(dtype: T.ArrayType) -> Decode:
    unpack, element = _HEAD.unpack_from, field_decoder(dtype.elementType)

    def decode(data: bytes, at: int) -> tuple[Any, int]:
        tag, count = unpack(data, at)
        end, values = at + 5, []
        for _ in range(count):
            value, end = element(data, end)
            values.append(value)
        return values if _present(tag) else None, end

    return decode
